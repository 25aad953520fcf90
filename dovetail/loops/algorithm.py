"""A region of the integer graph as loops: an Exo algorithm, one nest per step, in the blocked layout engines like.

An activation is x[block of channels, row, column, image lane, channel lane]; a dense vector is an image of one pixel.
Sizes are symbols, so regions that differ only in shape share one text and one schedule; `sizes` holds this region's.
A sum is updated in place: a region's inner values have no other reader.
A region that begins with a relayout reads a row-major operand and brings it into blocks first.

| argument | type | what |
|---|---|---|
| x | i8 [ICB, IH, IW, batch, block] | the operand; before a relayout i8 [batch, IH, IW, block * ICB] |
| w | i8 [OCB, ICB, KH, KW, block, block] | weights, out lane before in lane; a depthwise layer has no ICB |
| one, digits | i8 [D, batch, block], i8 [OCB, D, block, block] | their products sum to the bias: adding is a product |
| bias | i32 [OCB, batch, block] | a bias of more digits than a product pays for |
| scale, shift, again | i32 [OCB, batch, block], or i32 when all are equal | requantisation; `again` shifts further |
| digit_0, ... | i32 [OCB, batch, block] | without a product: how far copies of the sum are shifted, negative for left |
| identity | i8 [block, block] | of a pool: products with it widen its operand |
| low, high | i32 | limits of the result |
| y | i8 [OCB, OH, OW, batch, block] | the result |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, ScaleShift, scale_digits
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad, Relayout
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, TensorType

_MOST = 127
_MOST_ROWS = 1
"""Vectors of digits for which a product is cheaper than adding."""
SHIFTS = ("shift", "again")
"""The arguments that hold the amounts of one shift after the other."""


def digit_rows(bias: Array, block: int) -> int:
    """Vectors of `block` digits each that one bias needs: 127 * 127 per lane, and one lane for what is left over."""
    reach = int(np.abs(bias.astype(np.int64)).max(initial=0))
    return max(1, -(-reach // (_MOST * _MOST * (block - 1))))


def bias_rows(graph: Graph, bias: Array, block: int) -> int:
    """Vectors of digits that a region's bias is a product of; 0 where there is no bias, and where adding it costs no
    more: a dense layer waits for its matrices, each of which it needs once, and digits are another."""
    dense = any(isinstance(node.operator, FullyConnected) for node in graph.nodes)
    rows = digit_rows(bias, block) if bias.any() and not dense else 0
    return rows if rows <= _MOST_ROWS else 0


def shifts(amounts: Array, most: int) -> tuple[Array, ...]:
    """Shift amounts as those of shifts one after the other, none by more than `most`; none where nothing is shifted."""
    found = []
    while amounts.any():
        found.append(np.minimum(amounts, most))
        amounts = amounts - found[-1]
    return tuple(found)


def ones(rows: int, block: int) -> Array:
    """The constant operand, int8 [rows, block]: 127 in every lane but the last of each row, which is 1."""
    made = np.full((rows, block), _MOST, dtype=np.int8)
    made[:, -1] = 1
    return made


def digits(bias: Array, rows: int, block: int) -> Array:
    """Digits of each bias, int8 [len(bias), rows, block], so that sum(digits * ones(rows, block)) is the bias.

    Raises:
        ValueError: a bias is too large for so many rows.
    """
    left = bias.astype(np.int64)
    made = np.zeros((len(bias), rows, block), dtype=np.int8)
    for row in range(rows):
        for lane in range(block - 1):
            digit = np.clip(np.rint(left / _MOST), -_MOST, _MOST).astype(np.int64)
            made[:, row, lane] = digit
            left = left - digit * _MOST
    made[:, -1, -1] = np.clip(left, -_MOST, _MOST)
    if (left != made[:, -1, -1]).any():
        raise ValueError(f"a bias of {int(np.abs(bias).max())} needs more than {rows} rows of {block} digits")
    return made


@dataclass(frozen=True)
class Lanes:
    """Elements computed together: `block` channels of each of `batch` images."""

    block: int
    batch: int = 1

    def blocks(self, channels: int) -> int:
        """Blocks that hold so many channels, the last filled up."""
        return -(-channels // self.block)


@dataclass(frozen=True)
class Algorithm:
    """Loops and what this region's sizes are."""

    text: str
    """One Exo procedure named `region`; the same for all regions of the same structure."""
    sizes: Mapping[str, int]
    """Value of every size argument."""


@dataclass(frozen=True)
class _ArrayExtents:
    """An array and its extents, as Exo expressions."""

    array: str
    channels: str
    height: str
    width: str


@dataclass
class _AlgorithmBuilder:
    graph: Graph
    lanes: Lanes
    constants: Mapping[str, Array]
    image: _ArrayExtents
    operand: tuple[str, ...]
    """Extents of x."""
    depth: int = 1
    most_shift: int = 31
    multiplies: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    offsets: set[str] = field(default_factory=set)
    """Sizes that may be zero."""
    arguments: list[str] = field(default_factory=list)
    asserts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def nest(self, prefix: str, channels: str, statement: str, inner: Sequence[tuple[str, str]] = ()) -> None:
        """Loops over every element of the result, then `inner` ones, around one statement."""
        names = [f"{prefix}{axis}" for axis in "bhwno"]
        extents = [channels, self.image.height, self.image.width, str(self.lanes.batch), str(self.lanes.block)]
        loops = [*zip(names, extents, strict=True), *inner]
        for depth, (name, extent) in enumerate(loops):
            self.lines.append(f"{'    ' * depth}for {name} in seq(0, {extent}):")
        self.lines += ["    " * len(loops) + line for line in statement.splitlines()]

    def declare(self, name: str, kind: str, extents: Sequence[str]) -> None:
        self.lines.append(f"{name}: {kind}[{', '.join(extents)}]")

    def full(self, channels: str, height: str, width: str) -> tuple[str, ...]:
        return channels, height, width, str(self.lanes.batch), str(self.lanes.block)


def algorithm(
    graph: Graph,
    lanes: Lanes,
    constants: Mapping[str, Array] | None = None,
    depth: int = 1,
    most_shift: int = 31,
    multiplies: bool = True,
) -> Algorithm:
    """The loops of a chain of operators on one runtime operand.

    Args:
        graph: the region, or a tile of it.
        lanes: of the engine.
        constants: those of the whole region when `graph` is a tile, so that all its tiles have one structure.
        depth: blocks of a dense layer's operand taken as rows of one kernel: a larger step of the sum; divides them.
        most_shift: the greatest amount of one shift; beyond it there are two.
        multiplies: whether a scale is a product; else shifts and additions, of scales that `scale_digits` knows.

    Raises:
        KeyError: an operator that has no loops here.
        TargetError: a relayout that is not the first step, or of an operand that does not fill blocks and images.
    """
    x, y = graph.types[graph.inputs[0]], graph.types[graph.outputs[0]]
    known = graph.constants if constants is None else constants
    blocked = ("ICB", "IH", "IW", str(lanes.batch), str(lanes.block))
    builder = _AlgorithmBuilder(graph, lanes, known, _ArrayExtents("x", "ICB", "IH", "IW"), blocked)
    builder.depth, builder.most_shift, builder.multiplies = depth, most_shift, multiplies
    builder.sizes.update(ICB=lanes.blocks(x.shape[-1]) // depth, IH=_rows(x) * depth, IW=_columns(x))
    for node in graph.nodes:
        _STEPS[type(node.operator)](builder, node)
    image = builder.image
    if image.array != "y":
        builder.nest("y", image.channels, f"y[yb, yh, yw, yn, yo] = {image.array}[yb, yh, yw, yn, yo]")
    kinds = [f"{name}: {'index' if name in builder.offsets else 'size'}" for name in builder.sizes]
    arrays = [f"x: [i8][{', '.join(builder.operand)}] @ DRAM", *builder.arguments]
    arrays.append(f"y: [i8][{', '.join(builder.full(image.channels, image.height, image.width))}] @ DRAM")
    checks = [f"assert {name} >= 0" for name in sorted(builder.offsets)] + builder.asserts
    head = f"def region({', '.join([*kinds, *arrays])}):"
    assert y.dtype.numpy.itemsize == 1, y
    return Algorithm("\n    ".join([head, *checks, *builder.lines]) + "\n", builder.sizes)


def _rows(kind: TensorType) -> int:
    return kind.shape[1] if len(kind.shape) == 4 else 1


def _columns(kind: TensorType) -> int:
    return kind.shape[2] if len(kind.shape) == 4 else 1


def _relayout(builder: _AlgorithmBuilder, node: Node) -> None:
    """Blocks of a row-major operand."""
    lanes, kind = builder.lanes, builder.graph.types[node.output]
    where = f"relayout of '{node.inputs[0]}'"
    if node is not builder.graph.nodes[0]:
        hint = "relayout the operand before the region, or write the region's loops yourself"
        raise TargetError("a relayout can only be the first step of a region's loops", where=where, hint=hint)
    for axis, step, what in ((-1, lanes.block, "channels"), (0, lanes.batch, "images")):
        if kind.shape[axis] % step or (what == "images" and kind.shape[axis] != step):
            wanted = f"a multiple of {step}" if what == "channels" else str(step)
            hint = "add a Constraint to the offload that asks for it"
            raise TargetError(f"the loops need {wanted} {what}, found {kind.shape[axis]}", where=where, hint=hint)
    builder.operand = (str(lanes.batch), "IH", "IW", f"{lanes.block} * ICB")
    builder.declare("blocked", "i8", builder.full("ICB", "IH", "IW"))
    builder.image = _ArrayExtents("blocked", "ICB", "IH", "IW")
    builder.nest("k", "ICB", f"blocked[kb, kh, kw, kn, ko] = x[kn, kh, kw, {lanes.block} * kb + ko]")


def _pad(builder: _AlgorithmBuilder, node: Node) -> None:
    operator, image = node.operator, builder.image
    assert isinstance(operator, Pad)
    sides = (operator.before[1], operator.after[1], operator.before[2], operator.after[2])
    builder.sizes.update(zip(("T", "B", "L", "R"), sides, strict=True))
    builder.offsets.update("TBLR")
    padded = _ArrayExtents("padded", image.channels, f"T + {image.height} + B", f"L + {image.width} + R")
    builder.declare("padded", "i8", builder.full(padded.channels, padded.height, padded.width))
    builder.image = padded
    inside = f"ph >= T and ph < T + {image.height} and pw >= L and pw < L + {image.width}"
    builder.nest(
        "p",
        padded.channels,
        f"if {inside}:\n"
        f"    padded[pb, ph, pw, pn, po] = {image.array}[pb, ph - T, pw - L, pn, po]\n"
        f"else:\n"
        f"    padded[pb, ph, pw, pn, po] = {float(operator.value)}",
    )


def _window(
    builder: _AlgorithmBuilder, node: Node, kernel: tuple[int, int], stride: tuple[int, int]
) -> tuple[str, str]:
    """Declare the result's rows and columns and the kernel's, and that the operand holds every window."""
    result, image = builder.graph.types[node.output], builder.image
    builder.sizes.update(OH=_rows(result), OW=_columns(result), KH=kernel[0], KW=kernel[1])
    for extent, axis, step in zip((image.height, image.width), "HW", stride, strict=True):
        builder.asserts.append(f"assert {extent} >= {step} * O{axis} - {step} + K{axis}")
    return f"{stride[0]} * sh + kh", f"{stride[1]} * sw + kw"


def _begin_sum(builder: _AlgorithmBuilder, channels: str) -> _ArrayExtents:
    """A sum of zeros as large as the result."""
    image = _ArrayExtents("total", channels, "OH", "OW")
    builder.declare("total", "i32", builder.full(channels, "OH", "OW"))
    builder.image = image
    builder.nest("z", channels, "total[zb, zh, zw, zn, zo] = 0.0")
    return image


def _linear(builder: _AlgorithmBuilder, node: Node) -> None:
    operator, lanes, source = node.operator, builder.lanes, builder.image
    weights = builder.graph.types[node.inputs[1]].shape
    assert isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected)
    dense = isinstance(operator, FullyConnected)
    stride = (1, 1) if isinstance(operator, FullyConnected) else operator.stride
    kernel = (builder.depth, 1) if dense else (weights[1], weights[2])
    row, column = _window(builder, node, kernel, stride)
    channels, others, block, places = "ICB", [], "sb", "sb"
    if not isinstance(operator, DepthwiseConv2d):
        builder.sizes["OCB"] = lanes.blocks(builder.graph.types[node.output].shape[-1])
        channels, others, block, places = "OCB", [("ib", "ICB")], "ib", "sb, ib"
    blocks = ", ".join([channels, *(extent for _, extent in others)])
    builder.arguments.append(f"w: [i8][{blocks}, KH, KW, {lanes.block}, {lanes.block}] @ DRAM")
    _begin_sum(builder, channels)
    inner = [*others, ("kh", "KH"), ("kw", "KW"), ("si", str(lanes.block))]
    product = f"{source.array}[{block}, {row}, {column}, sn, si] * w[{places}, kh, kw, so, si]"
    builder.nest("s", channels, f"total[sb, sh, sw, sn, so] += {product}", inner)


def _scale_shift(builder: _AlgorithmBuilder, node: Node) -> None:
    """((sum + bias) * scale) >> shift, what does nothing left out; a small bias as products of `one` and `digits`."""
    scale, offset, shift = (builder.constants[name] for name in node.inputs[1:])
    channels, lanes = builder.image.channels, builder.lanes
    bias = offset // scale
    rows = bias_rows(builder.graph, bias, lanes.block)
    if rows:
        builder.sizes["D"] = rows
        builder.arguments.append(f"one: [i8][D, {lanes.batch}, {lanes.block}] @ DRAM")
        builder.arguments.append(f"digits: [i8][{channels}, D, {lanes.block}, {lanes.block}] @ DRAM")
        inner = [("bd", "D"), ("bi", str(lanes.block))]
        product = "one[bd, bn, bi] * digits[bb, bd, bo, bi]"
        builder.nest("b", channels, f"total[bb, bh, bw, bn, bo] += {product}", inner)
    elif bias.any():
        builder.arguments.append(f"bias: [i32][{channels}, {lanes.batch}, {lanes.block}] @ DRAM")
        builder.nest("a", channels, "total[ab, ah, aw, an, ao] = total[ab, ah, aw, an, ao] + bias[ab, an, ao]")
    if not builder.multiplies:
        _doublings(builder, scale)
    elif (scale != 1).any():
        factor = _parameter(builder, "scale", "m", scale)
        builder.nest("m", channels, f"total[mb, mh, mw, mn, mo] = total[mb, mh, mw, mn, mo] * {factor}")
    for name, prefix, amounts in zip(SHIFTS, "rg", shifts(shift, builder.most_shift), strict=False):
        amount = _parameter(builder, name, prefix, amounts)
        here = f"total[{prefix}b, {prefix}h, {prefix}w, {prefix}n, {prefix}o]"
        builder.nest(prefix, channels, f"{here} = shift_right({here}, {amount})")


def _doublings(builder: _AlgorithmBuilder, scale: Array) -> None:
    """Multiply by a scale of few digits: total += total << n, once per digit, on a copy."""
    channels, lanes = builder.image.channels, builder.lanes
    for number in range(len(scale_digits(scale) or ())):
        part, name = f"part_{number}", f"digit_{number}"
        builder.arguments.append(f"{name}: [i32][{channels}, {lanes.batch}, {lanes.block}] @ DRAM")
        builder.declare(part, "i32", builder.full(channels, "OH", "OW"))

        def step(kind: str, array: str, value: str, digit: int = number) -> None:
            prefix = f"d{digit}{kind}"
            here = f"[{prefix}b, {prefix}h, {prefix}w, {prefix}n, {prefix}o]"
            amount = f"[{prefix}b, {prefix}n, {prefix}o]"
            builder.nest(prefix, channels, f"{array}{here} = {value.format(here=here, amount=amount)}")

        step("z", part, "0.0")
        step("c", part, f"{part}{{here}} + total{{here}}")
        step("s", part, f"shift_up({part}{{here}}, {name}{{amount}})")
        step("a", "total", f"total{{here}} + {part}{{here}}")


def _parameter(builder: _AlgorithmBuilder, name: str, prefix: str, values: Array) -> str:
    """Declare a parameter, one number or one per channel; returns how the nest reads it."""
    if (values == values.flat[0]).all():
        builder.arguments.append(f"{name}: i32 @ DRAM")
        return name
    lanes = builder.lanes
    builder.arguments.append(f"{name}: [i32][{builder.image.channels}, {lanes.batch}, {lanes.block}] @ DRAM")
    return f"{name}[{prefix}b, {prefix}n, {prefix}o]"


def _clip(builder: _AlgorithmBuilder, node: Node) -> None:
    channels = builder.image.channels
    for prefix, function, limit in (("l", "most", "low"), ("h", "least", "high")):
        builder.arguments.append(f"{limit}: i32 @ DRAM")
        value = f"total[{prefix}b, {prefix}h, {prefix}w, {prefix}n, {prefix}o]"
        builder.nest(prefix, channels, f"{value} = {function}({value}, {limit})")


def _max_pool(builder: _AlgorithmBuilder, node: Node) -> None:
    """The largest of each window, on int32 copies of the operand (products with ones on a diagonal), starting below
    every int8."""
    operator, source = node.operator, builder.image
    assert isinstance(operator, MaxPool2d)
    row, column = _window(builder, node, operator.kernel, operator.stride)
    builder.arguments.append("least_value: i32 @ DRAM")
    wide = _ArrayExtents("wide", source.channels, source.height, source.width)
    builder.declare("wide", "i32", builder.full(wide.channels, wide.height, wide.width))
    block = builder.lanes.block
    builder.arguments.append(f"identity: [i8][{block}, {block}] @ DRAM")
    builder.image = wide
    builder.nest("v", source.channels, "wide[vb, vh, vw, vn, vo] = 0.0")
    widened = f"wide[cb, ch, cw, cn, co] += {source.array}[cb, ch, cw, cn, ci] * identity[co, ci]"
    builder.nest("c", source.channels, widened, [("ci", str(block))])
    _begin_sum(builder, source.channels)
    total = "total[{0}b, {0}h, {0}w, {0}n, {0}o]"
    builder.nest("f", source.channels, f"{total.format('f')} = {total.format('f')} + least_value")
    largest = f"most({total.format('s')}, wide[sb, {row}, {column}, sn, so])"
    builder.nest("s", source.channels, f"{total.format('s')} = {largest}", [("kh", "KH"), ("kw", "KW")])


_STEPS: Mapping[type[Operator], Callable[[_AlgorithmBuilder, Node], None]] = {
    Relayout: _relayout,
    Pad: _pad,
    Conv2d: _linear,
    DepthwiseConv2d: _linear,
    FullyConnected: _linear,
    ScaleShift: _scale_shift,
    Clip: _clip,
    MaxPool2d: _max_pool,
}
