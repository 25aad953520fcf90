"""What the operators compute, as loops over one image: sizes are this region's, nothing is said about how.

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
from dataclasses import dataclass

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
class Sizes:
    """Of a convolution; a fully connected layer is one row of pixels without a kernel."""

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


def conv2d(sizes: Sizes, packing: Packing, extras: Sequence[Extra]) -> str:
    """A convolution over rows, columns and channels, requantised."""
    (height, width, channels), (rows, columns, outputs) = sizes.image, sizes.result
    place = {"channel": "oc", "position": "oy, ox, oc", "one": "0"}
    shape = {"channel": f"{outputs}", "position": f"{rows}, {columns}, {outputs}", "one": "1"}
    row = f"{sizes.stride[0]} * oy + {sizes.dilation[0]} * ky - {sizes.before[0]}"
    column = f"{sizes.stride[1]} * ox + {sizes.dilation[1]} * kx - {sizes.before[1]}"
    tap = f"{sizes.kernel[1] * channels} * ky + {channels} * kx + c"
    return f"""\
def {ENTRY}(input: i8[{height}, {width}, {channels}] @ DRAM, {_weights(sizes, packing)},
            output: i32[{rows}, {columns}, {outputs}] @ DRAM{_arguments(extras, shape)}):
    for oy in seq(0, {rows}):
        for ox in seq(0, {columns}):
            for oc in seq(0, {_channels(outputs, packing)}):
                sum: i32 @ DRAM
                sum = bias[oc]
                for ky in seq(0, {sizes.kernel[0]}):
                    for kx in seq(0, {sizes.kernel[1]}):
                        for c in seq(0, {channels}):
                            value: i8 @ DRAM
                            if {row} >= 0 and {row} < {height}:
                                if {column} >= 0 and {column} < {width}:
                                    value = input[{row}, {column}, c]
                                else:
                                    value = {float(sizes.pad_value)}
                            else:
                                value = {float(sizes.pad_value)}
                            sum += value * weights[{_weight(packing, tap)}]
{_store("output[oy, ox, oc]", _finish(extras, place), sizes, packing, 4)}
"""


def fully_connected(sizes: Sizes, packing: Packing, extras: Sequence[Extra]) -> str:
    """Every output of a pixel from every channel of it, requantised."""
    (_, pixels, channels), outputs = sizes.image, sizes.result[2]
    place = {"channel": "oc", "position": "ox, oc", "one": "0"}
    shape = {"channel": f"{outputs}", "position": f"{pixels}, {outputs}", "one": "1"}
    return f"""\
def {ENTRY}(input: i8[{pixels}, {channels}] @ DRAM, {_weights(sizes, packing)},
            output: i32[{pixels}, {outputs}] @ DRAM{_arguments(extras, shape)}):
    for ox in seq(0, {pixels}):
        for oc in seq(0, {_channels(outputs, packing)}):
            sum: i32 @ DRAM
            sum = bias[oc]
            for c in seq(0, {channels}):
                value: i8 @ DRAM
                value = input[ox, c]
                sum += value * weights[{_weight(packing, "c")}]
{_store("output[ox, oc]", _finish(extras, place), sizes, packing, 3)}
"""


def _channels(outputs: int, packing: Packing) -> int:
    """Output channels, the last block filled up."""
    return -(-outputs // packing.lanes) * packing.lanes


def _weights(sizes: Sizes, packing: Packing) -> str:
    channels = _channels(sizes.result[2], packing)
    shape = [channels // packing.lanes, -(-sizes.taps // packing.vector), packing.lanes, packing.vector]
    return f"weights: i8[{', '.join(map(str, shape))}] @ DRAM, bias: i32[{channels}] @ DRAM"


def _weight(packing: Packing, tap: str) -> str:
    lanes, vector = packing.lanes, packing.vector
    return f"oc / {lanes}, ({tap}) / {vector}, oc % {lanes}, ({tap}) % {vector}"


def _arguments(extras: Sequence[Extra], shape: dict[str, str]) -> str:
    return "".join(f", {extra.name}: i32[{shape[extra.kind]}] @ DRAM" for extra in extras)


def _store(element: str, value: str, sizes: Sizes, packing: Packing, depth: int) -> str:
    """The assignment of a result, only of channels that exist where a block may be part-empty."""
    outputs, indent = sizes.result[2], "    " * depth
    if outputs % packing.lanes == 0:
        return f"{indent}{element} = {value}"
    return f"{indent}if oc < {outputs}:\n{indent}    {element} = {value}"


def _finish(extras: Sequence[Extra], place: dict[str, str]) -> str:
    return f"finish({', '.join(['sum', *(f'{extra.name}[{place[extra.kind]}]' for extra in extras)])})"
