"""Runs ResNet-18's convolutions on the VTA model: prints two tables, and writes them to docs/figures with --write.

    python scripts/vta_layers.py [shift | bias] [--write]

Each layer alone, by the default schedule, with every check of the device, its output compared with the integer graph.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from tables import Rows, run  # noqa: E402

from dovetail.targets.vta.config import VtaConfig  # noqa: E402
from dovetail.targets.vta.executor import Execution  # noqa: E402
from vta_layers import RESNET, case_of, default_tiling, graph_of, resnet_layer  # noqa: E402

VARIANTS = {"shift": False, "bias": True}
"""Section -> whether the layers have a bias and rounding."""


@dataclass(frozen=True)
class Row:
    """One layer measured."""

    name: str
    text: str
    square: bool
    """Whether it is 3x3 with stride 1."""
    tile: str
    """Rows x columns x channel blocks of the default schedule."""
    products: int
    """GEMM tiles of the layer itself: output tiles x input blocks x taps."""
    biases: int
    """GEMM tiles that add the bias."""
    outputs: int
    """Output tiles: elements of batch x block."""
    device: Execution
    once: int
    """Bytes of operand, weights and result, each once."""
    exact: bool

    @property
    def compute_bound(self) -> int:
        """Cycles the products and the ALU need; resets and bias are not counted."""
        return self.products + VtaConfig().alu_interval * self.device.alu_operations

    @property
    def bus_bound(self) -> int:
        """Cycles the bus needs to move every byte once."""
        return -(-self.once // VtaConfig().bus_bytes)

    @property
    def ratio(self) -> float:
        """Cycles over the larger bound."""
        return self.device.cycles / max(self.compute_bound, self.bus_bound)

    @property
    def cells(self) -> tuple[object, ...]:
        """The row as it is printed."""
        figures = (self.compute_bound, self.bus_bound, self.device.cycles)
        return f"{self.name}: {self.text}", self.tile, *figures, f"{self.ratio:.3f}"


HEADER = ("layer", "tile", "compute bound", "bus bound", "cycles", "ratio")


def measure(name: str, bias: bool) -> Row:
    """One of RESNET, lowered by the default schedule and executed.

    Raises:
        StreamError: the device found a fault.
    """
    config = VtaConfig()
    graph = graph_of(resnet_layer(name, bias))
    tiling = default_tiling(graph, config)
    case = case_of(graph, tiling, config)
    memory = case.memory()
    device = case.run(memory)
    size, channels, outputs, kernel, stride = RESNET[name]
    x, y = graph.types[graph.inputs[0]].shape, case.expected.shape
    tiles, taps = prod(y) // config.block, kernel * kernel
    products = tiles * (channels // config.block) * taps
    return Row(
        name,
        f"{size}x{size}x{channels}->{outputs} {kernel}x{kernel} s{stride}",
        kernel == 3 and stride == 1,
        f"{tiling.rows}x{tiling.columns}x{tiling.blocks}",
        products,
        device.gemm_tiles - products,
        tiles,
        device,
        prod(x) + outputs * channels * taps + prod(y),
        bool(np.array_equal(case.found(memory), case.expected)),
    )


def section(name: str) -> dict[str, Rows]:
    """The table of a variant; ends the program where an output differs from the integer graph."""
    rows = [measure(layer, VARIANTS[name]) for layer in RESNET]
    if wrong := [row.name for row in rows if not row.exact]:
        sys.exit(f"not equal to the integer graph: {', '.join(wrong)}")
    return {f"vta_{name}": [HEADER, *(row.cells for row in rows)]}


if __name__ == "__main__":
    sections = {name: partial(section, name) for name in VARIANTS}
    run((__doc__ or "").splitlines()[0], "scripts/vta_layers.py", sections)
