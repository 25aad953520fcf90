"""Cycles of DIANA's engines by the two public models, which disagree by up to 37 % per convolution and 3 times on
dense layers. Neither is silicon.

Sources: eml-eda/plinio (diana_latency.py); eml-eda/match target/diana/digital/cost_model.py, as of e8eaf86^.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

ROWS, COLUMNS = 1152, 512
"""Of the analog array."""
ARRAY_CYCLES = 70e-9 * 260e6
"""Cycles of one use of the analog array: 70 ns at PLiNIO's 260 MHz."""
LEAST_ROWS = 64
"""Rows of the array each tap takes at least: its blocks have so many."""
UNROLLS = (1, 2, 4, 8)
"""Columns of a result the analog array may compute at a time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer computes, sizes in elements."""

    inputs: int
    """Channels of the operand, all groups."""
    outputs: int
    rows: int
    columns: int
    """Of the result."""
    kernel: tuple[int, int]
    """Rows and columns of the window."""
    groups: int = 1


Cost = Callable[[Shape], float]
"""Cycles of a layer."""


def plinio_digital(shape: Shape) -> float:
    """Cycles on the 16x16 array, 16 columns by 16 channels at a time, and its transfers at 8 bytes per cycle."""
    height, width = shape.kernel
    blocks = ceil(shape.outputs / shape.groups / 16) * ceil(shape.columns / 16)
    work = blocks * shape.inputs * shape.rows * height * width
    return work + shape.columns * shape.rows * (shape.outputs + shape.inputs) / 8


def match_digital(shape: Shape) -> float:
    """Cycles of a convolution or dense layer alone: rows in which p of the window's rows are padded need less."""
    height, width = shape.kernel
    side, cycles = (height - 1) // 2, 0
    for pad in range(side + 1):
        rows = shape.rows - 2 * side if pad == 0 else 2
        loop = shape.inputs * (height - pad) * width + 2 * shape.inputs * (height - pad) + 23
        cycles += ceil(shape.outputs * rows * shape.columns / 256) * loop
    return float(cycles)


def plinio_analog(shape: Shape) -> float:
    """Cycles to load the array's rows and to use it for every group of columns of the result."""
    height, width = shape.kernel
    passes = ceil(shape.outputs / COLUMNS) * ceil(shape.inputs / 128) * shape.columns * shape.rows
    return 8 * shape.inputs * height * width + passes / unroll(shape) * ARRAY_CYCLES


def unroll(shape: Shape) -> int:
    """Columns of the result computed at a time: the most for which copies of the window fit the array."""
    height, width = shape.kernel
    depth = max(LEAST_ROWS, shape.inputs) * height
    fitting = [n for n in UNROLLS if n * shape.outputs <= COLUMNS and (n + width - 1) * depth <= ROWS]
    return max(fitting, default=1)


def sum_cycles(elements: int) -> float:
    """Cycles of an element-wise sum. No public model has it: three bytes per element at PLiNIO's 8 per cycle."""
    return 3 * elements / 8


DIGITAL: dict[str, Cost] = {"plinio": plinio_digital, "match": match_digital}
"""The models of convolutions and dense layers on the digital engine. Depthwise ones are PLiNIO's in both."""
