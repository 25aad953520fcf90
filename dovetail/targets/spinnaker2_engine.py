"""One SpiNNaker2 element by itself: its MAC array as an engine beside the core, with the clocks the mesh counts with.

The array makes 32-bit sums of whole windows, without padding, zero points or requantisation: the driver has the core do
the latter, row by row, while the array computes the next row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import dovetail.target as dt
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array
from dovetail.target import layers
from dovetail.targets.spinnaker2 import ARRAY
from dovetail.targets.spinnaker2 import TARGET as OF_MESH
from dovetail.targets.spinnaker2_model import JOB, KINDS

BASE, HERE = 0x40001000, "dovetail.targets"
REGISTERS = dt.JobRegisters(JOB)
"""Registers of the array: a job of one row."""
TASK = dt.JobRegisters((*JOB, "rows", "result", "parameters", "zero", "low", "high", "once"))
"""The job of a layer, for the driver."""
START, NEXT, COLUMN = 86, 105, 24
"""Clocks of the core for a row, to start the next one, and for each column, as `iss` shows them."""
ELEMENT = {dt.Rounding.DOUBLE: 47, dt.Rounding.SINGLE: 58}
"""Clocks of the core for each result."""


def kind_of(match: dt.Match) -> str:
    """The array's name for a kind of layer."""
    linear = layers.linear_of(match)
    return KINDS[0 if isinstance(linear, Conv2d) else 1 if linear.is_channelwise else 2]


def work_of(match: dt.Match, rows: int = 1) -> dt.Work:
    """So many rows of a layer's result, as the array's formulas take them."""
    _, columns, outputs = layers.sizes_of(match.result.shape)
    window, inputs = layers.window_of(match), match.type("x").shape[-1]
    height, width, channels, depth = (np.array(size) for size in (rows, columns, outputs, inputs))
    return dt.Work(kind_of(match), height, width, channels, depth, window.kernel, window.stride)


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights in the array's groups; per output channel bias less zero points, multiplier, shifts left and right."""
    kind, weights = kind_of(match), match.array("weights").astype(np.int8)
    linear, outputs = layers.linear_of(match), match.result.shape[-1]
    axes = {"dense": (1,), "depthwise": (0, 1, 2)}.get(kind, (1, 2, 3))
    folded = -linear.input_zero_point * weights.astype(np.int64).sum(axis=axes)
    parameters = np.zeros((outputs, 4), "<i4")
    names = ("bias", "multiplier", "shift")
    for place, name in enumerate(names[0 if "bias" in match.values else 1 :], 0 if "bias" in match.values else 1):
        parameters[:, place] = np.broadcast_to(match.array(name), outputs)
    parameters[:, 0] += folded.astype(np.int32)
    parameters[:, 2:] = np.stack([np.maximum(parameters[:, 2], 0), np.maximum(-parameters[:, 2], 0)], axis=1)
    found = {"weights": dt.pack_weights(kind, weights), "parameters": parameters}
    return {name: np.ascontiguousarray(array).view(np.uint8).reshape(-1) for name, array in found.items()}


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One task."""
    kind, window, shape = kind_of(match), layers.window_of(match), match.type("x").shape
    rows, columns, outputs = layers.sizes_of(match.result.shape)
    clip, requantize = match.operator("clip", Clip), match.operator("requantize", Requantize)
    made = TASK.command(
        "spinnaker2_mac_layer", image=operands[match.values["x"]].address, weights=operands["weights"].address,
        sums=operands["scratch"].address, image_row=shape[-1] * (shape[2] if len(shape) == 4 else 1), columns=columns,
        outputs=outputs, inputs=shape[-1], kernel_rows=window.kernel[0], kernel_columns=window.kernel[1],
        stride=window.stride[1], kind=KINDS.index(kind), is_unsigned=0, row_stride=window.stride[0], rows=rows,
        result=operands["result"].address, parameters=operands["parameters"].address,
        zero=requantize.output_zero_point, low=clip.low, high=clip.high,
        once=int(requantize.rounding is dt.Rounding.SINGLE))  # fmt: skip
    return (replace(made, constants=True),)


def scratch(match: dt.Match) -> int:
    """Bytes of two rows of sums."""
    _, columns, outputs = layers.sizes_of(match.result.shape)
    return 2 * columns * outputs * 4


def cycles(match: dt.Match) -> int:
    """Clocks of a layer: a row of the array, then the slower of array and core for each."""
    rows, columns, outputs = layers.sizes_of(match.result.shape)
    element = ELEMENT[match.operator("requantize", Requantize).rounding]
    row, core = int(ARRAY.clocks(work_of(match))), START + columns * (COLUMN + element * outputs)
    return row + core + (rows - 1) * (NEXT + max(row, core))


ROUNDINGS = dt.one_of(
    "requantisation must round once or twice",
    lambda m: m.operator("requantize", Requantize).rounding,
    *(dt.Rounding.DOUBLE, dt.Rounding.SINGLE),
)
LIMITS = (*layers.INT8, layers.BATCH, layers.NO_DILATION, ROUNDINGS, layers.sizes_below(1 << 16))


def _patterns() -> dict[str, tuple[dt.Pattern, tuple[dt.Constraint, ...]]]:
    """A layer with requantisation and limits, with a bias and without; what is padded the core pads before."""
    found: dict[str, tuple[dt.Pattern, tuple[dt.Constraint, ...]]] = {}
    kinds = (
        ("convolution", Conv2d, layers.NO_GROUPS),
        ("depthwise convolution", DepthwiseConv2d, layers.NO_MULTIPLIER),
    )
    for name, kind, limit in (*kinds, ("dense", FullyConnected, layers.ONE_ROW)):
        for text, bias in ((name, (dt.constant("bias"),)), (f"{name} without bias", ())):
            layer = dt.apply(kind, dt.operand("x"), dt.constant("weights"), *bias, name="layer")
            scaled = dt.apply(Requantize, layer, dt.constant("multiplier"), dt.constant("shift"))
            found[text] = dt.apply(Clip, scaled), (*LIMITS, limit)
    return found


ENGINE = dt.Engine(
    name="mac",
    memory=OF_MESH.values,
    ideal_macs_per_cycle=64.0,
    offloads=tuple(
        dt.Offload(name, pattern, limits, pack, commands, cycles, scratch, channel_step=4, strided=False)
        for name, (pattern, limits) in _patterns().items()
    ),
    driver=(f"{HERE}:spinnaker2_mac/spinnaker2_mac.h", f"{HERE}:spinnaker2_mac/spinnaker2_mac.c"),
    defines={"SPINNAKER2_MAC_BASE": BASE},
    device=REGISTERS.device("mac", f"{HERE}.spinnaker2_model", BASE),
)
TARGET = replace(OF_MESH, engines=(ENGINE,))
