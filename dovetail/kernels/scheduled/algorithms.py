"""The operators as loops over one image: sizes are this region's, nothing is said about the schedule.

Padding is part of the meaning: a tap outside the image reads the pad value. Zero points are folded into `bias`, the
number each sum begins with. Weights lie in the order the schedule reads them: `lanes` output channels side by side,
`vector` neighbouring taps of each together; channels beyond the last are zeros.

| argument | type | what |
|---|---|---|
| input | i8 [H, W, C]; fully connected [pixels, C] | the operand |
| weights | i8 [channels / lanes, taps / vector, lanes, vector] | weights |
| bias | i32 [channels] | bias less input zero point times sum of weights |
| output | [OH, OW, O]; fully connected [pixels, O] | the result |
| others | [O], of the result's shape, or [1] | what the epilogue reads, see `write.py` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from dovetail.kernels.c import Lines, code, indent
from dovetail.kernels.sums import Extra
from dovetail.kernels.window import WindowGeometry
from dovetail.records import Record
from dovetail.target.chip import RegisterMemory

ENTRY = "kernel"
"""Name of the procedure."""


class Packing(Record):
    """How weights lie."""

    lanes: int
    """Output channels side by side."""
    vector: int
    """Neighbouring taps of a channel that lie together."""


class ScheduledLayer(Record):
    """Sums of products over one image; a fully connected layer is one row of pixels without a kernel."""

    window: WindowGeometry
    outputs: int
    """Output channels."""
    pad_value: int

    @property
    def taps(self) -> int:
        """Products of one sum."""
        return prod(self.window.kernel) * self.window.channels


class Staging(Record):
    """The registers in which an instruction wants the taps of a step, and their order."""

    memory: RegisterMemory
    parts: int
    """Registers one load fills."""
    interleaved: bool
    """Whether neighbouring taps go to different registers."""

    @property
    def vector(self) -> int:
        """Taps one load brings."""
        return self.parts * self.memory.elements


@dataclass(frozen=True)
class Knobs:
    """The choices of a schedule."""

    pixels: int
    """Pixels of a block."""
    lanes: int
    """Output channels of a block."""
    vector: int
    """Taps that are multiplied together."""
    group: int
    """Output channels one instruction computes."""
    gathered: bool
    """Whether a block's taps are first copied side by side, as where the channels of a pixel fill no vector."""
    unroll: int
    """Most vectors of taps per turn of the innermost loop."""
    staging: Staging | None = None
    """How operands come into the registers an instruction wants them in."""
    fused: bool = field(default=False, repr=False)
    """Whether one instruction is all taps of a block."""
    straight: bool = field(default=False, repr=False)
    """Whether the loops over vectors of taps stay rolled and each sum is requantised where it is: see `streams.py`."""


def conv2d(layer: ScheduledLayer, packing: Packing, extras: Sequence[Extra]) -> str:
    """A convolution over rows, columns and channels, requantised."""
    window, channels = layer.window, layer.window.channels
    (height, width), (rows, columns) = window.size, window.outputs
    row = f"{window.stride[0]} * oy + {window.dilation[0]} * ky - {window.before[0]}"
    column = f"{window.stride[1]} * ox + {window.dilation[1]} * kx - {window.before[1]}"
    tap = f"{window.kernel[1] * channels} * ky + {channels} * kx + c"
    outside = f"value = {float(layer.pad_value)}"
    read = code(f"""
        if {row} >= 0 and {row} < {height}:
            if {column} >= 0 and {column} < {width}:
                value = input[{row}, {column}, c]
            else:
                {outside}
        else:
            {outside}
    """)
    taps = [*zip(("ky", "kx"), window.kernel, strict=True), ("c", channels)]
    return _nest(layer, packing, extras, [("oy", rows), ("ox", columns)], f"{height}, {width}, ", taps, read, tap)


def fully_connected(layer: ScheduledLayer, packing: Packing, extras: Sequence[Extra]) -> str:
    """Every output of a pixel from every channel of it, requantised."""
    pixels, taps = layer.window.size[1], [("c", layer.window.channels)]
    return _nest(layer, packing, extras, [("ox", pixels)], f"{pixels}, ", taps, ["value = input[ox, c]"], "c")


def _nest(
    layer: ScheduledLayer,
    packing: Packing,
    extras: Sequence[Extra],
    pixels: Sequence[tuple[str, int]],
    image: str,
    taps: Sequence[tuple[str, int]],
    read: Sequence[str],
    tap: str,
) -> str:
    """Loops over pixels, output channels and taps: how a tap's value is read, and its number among the weights."""
    outputs, lanes, vector = layer.outputs, packing.lanes, packing.vector
    channels = -(-outputs // lanes) * lanes  # the last block filled up
    names, counts = ("".join(f"{part}, " for part in parts) for parts in zip(*pixels, strict=True))
    place = {"channel": "oc", "position": f"{names}oc", "one": "0"}
    shape = {"channel": f"{outputs}", "position": f"{counts}{outputs}", "one": "1"}
    packed = f"{channels // lanes}, {-(-layer.taps // vector)}, {lanes}, {vector}"
    others = "".join(f", {extra.name}: i32[{shape[extra.kind]}] @ DRAM" for extra in extras)
    given = ", ".join(["sum", *(f"{extra.name}[{place[extra.kind]}]" for extra in extras)])
    store = [f"output[{names}oc] = finish({given})"]
    if outputs % lanes:  # only of channels that exist
        store = [f"if oc < {outputs}:", *indent(store)]
    product = f"sum += value * weights[oc / {lanes}, ({tap}) / {vector}, oc % {lanes}, ({tap}) % {vector}]"
    lines = _loops(taps, ["value: i8 @ DRAM", *read, product])
    lines = _loops([*pixels, ("oc", channels)], ["sum: i32 @ DRAM", "sum = bias[oc]", *lines, *store])
    head = [
        f"def {ENTRY}(input: i8[{image}{layer.window.channels}] @ DRAM, weights: i8[{packed}] @ DRAM, "
        f"bias: i32[{channels}] @ DRAM,",
        f"            output: i32[{counts}{outputs}] @ DRAM{others}):",
    ]
    return "\n".join([*head, *indent(lines), ""])


def _loops(nest: Sequence[tuple[str, int]], lines: Lines) -> Lines:
    for name, count in reversed(nest):
        lines = [f"for {name} in seq(0, {count}):", *indent(lines)]
    return lines
