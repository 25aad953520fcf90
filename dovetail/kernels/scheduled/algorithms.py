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

from dovetail.kernels.c import Lines, indent
from dovetail.target.chip import RegisterMemory

ENTRY = "kernel"
"""Name of the procedure."""


@dataclass(frozen=True)
class Packing:
    """How weights lie."""

    lanes: int
    """Output channels side by side."""
    vector: int
    """Neighbouring taps of a channel that lie together."""


@dataclass(frozen=True)
class ConvolutionSizes:
    """Sizes of a convolution; a fully connected layer is one row of pixels without a kernel."""

    image: tuple[int, int, int]
    """Rows, columns, channels."""
    result: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int]
    """Padding above and on the left."""
    pad_value: int

    @property
    def taps(self) -> int:
        """Products of one sum."""
        return self.kernel[0] * self.kernel[1] * self.image[2]


@dataclass(frozen=True)
class Extra:
    """An array the epilogue reads."""

    name: str
    kind: str
    """"channel": an element per output channel; "position": per element of the result; "one": one element."""


@dataclass(frozen=True)
class Staging:
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


@dataclass(frozen=True)
class InteriorPixels:
    """The pixels whose taps are all in the image: half-open ranges of rows and columns."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def conv2d(sizes: ConvolutionSizes, packing: Packing, extras: Sequence[Extra]) -> str:
    """A convolution over rows, columns and channels, requantised."""
    (height, width, channels), (rows, columns, _) = sizes.image, sizes.result
    row = f"{sizes.stride[0]} * oy + {sizes.dilation[0]} * ky - {sizes.before[0]}"
    column = f"{sizes.stride[1]} * ox + {sizes.dilation[1]} * kx - {sizes.before[1]}"
    tap = f"{sizes.kernel[1] * channels} * ky + {channels} * kx + c"
    outside = f"value = {float(sizes.pad_value)}"
    read = [
        f"if {row} >= 0 and {row} < {height}:",
        f"    if {column} >= 0 and {column} < {width}:",
        f"        value = input[{row}, {column}, c]",
        "    else:",
        f"        {outside}",
        "else:",
        f"    {outside}",
    ]
    taps = [("ky", sizes.kernel[0]), ("kx", sizes.kernel[1]), ("c", channels)]
    return _nest(sizes, packing, extras, [("oy", rows), ("ox", columns)], f"{height}, {width}, ", taps, read, tap)


def fully_connected(sizes: ConvolutionSizes, packing: Packing, extras: Sequence[Extra]) -> str:
    """Every output of a pixel from every channel of it, requantised."""
    (_, pixels, channels) = sizes.image
    read = ["value = input[ox, c]"]
    return _nest(sizes, packing, extras, [("ox", pixels)], f"{pixels}, ", [("c", channels)], read, "c")


def _nest(
    sizes: ConvolutionSizes,
    packing: Packing,
    extras: Sequence[Extra],
    pixels: Sequence[tuple[str, int]],
    image: str,
    taps: Sequence[tuple[str, int]],
    read: Sequence[str],
    tap: str,
) -> str:
    """Loops over pixels, output channels and taps: how a tap's value is read, and its number among the weights."""
    outputs, lanes, vector = sizes.result[2], packing.lanes, packing.vector
    channels = -(-outputs // lanes) * lanes  # the last block filled up
    names, counts = ("".join(f"{part}, " for part in parts) for parts in zip(*pixels, strict=True))
    place = {"channel": "oc", "position": f"{names}oc", "one": "0"}
    shape = {"channel": f"{outputs}", "position": f"{counts}{outputs}", "one": "1"}
    packed = f"{channels // lanes}, {-(-sizes.taps // vector)}, {lanes}, {vector}"
    others = "".join(f", {extra.name}: i32[{shape[extra.kind]}] @ DRAM" for extra in extras)
    given = ", ".join(["sum", *(f"{extra.name}[{place[extra.kind]}]" for extra in extras)])
    store = [f"output[{names}oc] = finish({given})"]
    if outputs % lanes:  # only of channels that exist
        store = [f"if oc < {outputs}:", *indent(store)]
    product = f"sum += value * weights[oc / {lanes}, ({tap}) / {vector}, oc % {lanes}, ({tap}) % {vector}]"
    lines = _loops(taps, ["value: i8 @ DRAM", *read, product])
    lines = _loops([*pixels, ("oc", channels)], ["sum: i32 @ DRAM", "sum = bias[oc]", *lines, *store])
    head = [
        f"def {ENTRY}(input: i8[{image}{sizes.image[2]}] @ DRAM, weights: i8[{packed}] @ DRAM, "
        f"bias: i32[{channels}] @ DRAM,",
        f"            output: i32[{counts}{outputs}] @ DRAM{others}):",
    ]
    return "\n".join([*head, *indent(lines), ""])


def _loops(nest: Sequence[tuple[str, int]], lines: Lines) -> Lines:
    for name, count in reversed(nest):
        lines = [f"for {name} in seq(0, {count}):", *indent(lines)]
    return lines
