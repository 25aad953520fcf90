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
| scale, shift | i32 [OCB, batch, block], or i32 when all are equal | requantisation |
| low, high | i32 | limits of the result |
| y | i8 [OCB, OH, OW, batch, block] | the result |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.errors import TargetError
from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array, TensorType
from dovetail.loops.digits import digit_rows
from dovetail.operators.arithmetic import Clip, ScaleShift
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad, Relayout
from dovetail.operators.pooling import MaxPool2d


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
class _Image:
    """An array and its extents, as Exo expressions."""

    array: str
    channels: str
    height: str
    width: str


@dataclass
class _Builder:
    graph: Graph
    lanes: Lanes
    constants: Mapping[str, Array]
    image: _Image
    operand: tuple[str, ...]
    """Extents of x."""
    depth: int = 1
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
        """An array in memory of its own."""
        self.lines.append(f"{name}: {kind}[{', '.join(extents)}]")

    def full(self, channels: str, height: str, width: str) -> tuple[str, ...]:
        """Extents of an activation."""
        return channels, height, width, str(self.lanes.batch), str(self.lanes.block)


def algorithm(
    graph: Graph, lanes: Lanes, constants: Mapping[str, Array] | None = None, depth: int = 1
) -> Algorithm:
    """The loops of a chain of operators on one runtime operand.

    Args:
        graph: the region, or a tile of it.
        lanes: of the engine.
        constants: those of the whole region when `graph` is a tile, so that all its tiles have one structure.
        depth: blocks of a dense layer's operand taken as rows of one kernel: a larger step of the sum; divides them.

    Raises:
        KeyError: an operator that has no loops here.
        TargetError: a relayout that is not the first step, or of an operand that does not fill blocks and images.
    """
    x, y = graph.types[graph.inputs[0]], graph.types[graph.outputs[0]]
    known = graph.constants if constants is None else constants
    blocked = ("ICB", "IH", "IW", str(lanes.batch), str(lanes.block))
    builder = _Builder(graph, lanes, known, _Image("x", "ICB", "IH", "IW"), blocked)
    builder.depth = depth
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


def _relayout(builder: _Builder, node: Node) -> None:
    """Blocks of a row-major operand."""
    lanes, kind = builder.lanes, builder.graph.types[node.output]
    where = f"relayout of '{node.inputs[0]}'"
    if node is not builder.graph.nodes[0]:
        raise TargetError("a relayout can only be the first step of a region's loops", where=where,
                          hint="relayout the operand before the region, or write the region's loops yourself")
    for axis, step, what in ((-1, lanes.block, "channels"), (0, lanes.batch, "images")):
        if kind.shape[axis] % step or (what == "images" and kind.shape[axis] != step):
            wanted = f"a multiple of {step}" if what == "channels" else str(step)
            raise TargetError(f"the loops need {wanted} {what}, found {kind.shape[axis]}", where=where,
                              hint="add a Constraint to the offload that asks for it")
    builder.operand = (str(lanes.batch), "IH", "IW", f"{lanes.block} * ICB")
    builder.declare("blocked", "i8", builder.full("ICB", "IH", "IW"))
    builder.image = _Image("blocked", "ICB", "IH", "IW")
    builder.nest("k", "ICB", f"blocked[kb, kh, kw, kn, ko] = x[kn, kh, kw, {lanes.block} * kb + ko]")


def _pad(builder: _Builder, node: Node) -> None:
    operator, image = node.operator, builder.image
    assert isinstance(operator, Pad)
    sides = (operator.before[1], operator.after[1], operator.before[2], operator.after[2])
    builder.sizes.update(zip(("T", "B", "L", "R"), sides, strict=True))
    builder.offsets.update("TBLR")
    padded = _Image("padded", image.channels, f"T + {image.height} + B", f"L + {image.width} + R")
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


def _window(builder: _Builder, node: Node, kernel: tuple[int, int], stride: tuple[int, int]) -> tuple[str, str]:
    """Declare the result's rows and columns and the kernel's, and that the operand holds every window."""
    result, image = builder.graph.types[node.output], builder.image
    builder.sizes.update(OH=_rows(result), OW=_columns(result), KH=kernel[0], KW=kernel[1])
    builder.asserts.append(f"assert {image.height} >= {_span('OH', 'KH', stride[0])}")
    builder.asserts.append(f"assert {image.width} >= {_span('OW', 'KW', stride[1])}")
    return _index("sh", "kh", stride[0]), _index("sw", "kw", stride[1])


def _span(out: str, kernel: str, stride: int) -> str:
    return f"{stride} * {out} - {stride} + {kernel}"


def _index(out: str, tap: str, stride: int) -> str:
    return f"{stride} * {out} + {tap}"


def _begin_sum(builder: _Builder, channels: str) -> _Image:
    """A sum of zeros as large as the result."""
    image = _Image("total", channels, "OH", "OW")
    builder.declare("total", "i32", builder.full(channels, "OH", "OW"))
    builder.image = image
    builder.nest("z", channels, "total[zb, zh, zw, zn, zo] = 0.0")
    return image


def _linear(builder: _Builder, node: Node) -> None:
    operator, lanes, source = node.operator, builder.lanes, builder.image
    weights = builder.graph.types[node.inputs[1]].shape
    assert isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected)
    dense = isinstance(operator, FullyConnected)
    stride = (1, 1) if isinstance(operator, FullyConnected) else operator.stride
    kernel = (builder.depth, 1) if dense else (weights[1], weights[2])
    row, column = _window(builder, node, kernel, stride)
    depthwise = isinstance(operator, DepthwiseConv2d)
    taps = ("KH", "KW", str(lanes.block), str(lanes.block))
    if depthwise:
        builder.arguments.append(f"w: [i8][ICB, {', '.join(taps)}] @ DRAM")
        _begin_sum(builder, "ICB")
        inner = [("kh", "KH"), ("kw", "KW"), ("si", str(lanes.block))]
        weight, pixel = "w[sb, kh, kw, so, si]", f"{source.array}[sb, {row}, {column}, sn, si]"
    else:
        builder.sizes["OCB"] = lanes.blocks(builder.graph.types[node.output].shape[-1])
        builder.arguments.append(f"w: [i8][OCB, ICB, {', '.join(taps)}] @ DRAM")
        _begin_sum(builder, "OCB")
        inner = [("ib", "ICB"), ("kh", "KH"), ("kw", "KW"), ("si", str(lanes.block))]
        weight, pixel = "w[sb, ib, kh, kw, so, si]", f"{source.array}[ib, {row}, {column}, sn, si]"
    builder.nest("s", builder.image.channels, f"total[sb, sh, sw, sn, so] += {pixel} * {weight}", inner)


def _scale_shift(builder: _Builder, node: Node) -> None:
    """((sum + bias) * scale) >> shift, the bias as products of `one` and `digits`, what does nothing left out."""
    scale, offset, shift = (builder.constants[name] for name in node.inputs[1:])
    channels, lanes = builder.image.channels, builder.lanes
    if offset.any():
        builder.sizes["D"] = digit_rows(offset // scale, lanes.block)
        builder.arguments.append(f"one: [i8][D, {lanes.batch}, {lanes.block}] @ DRAM")
        builder.arguments.append(f"digits: [i8][{channels}, D, {lanes.block}, {lanes.block}] @ DRAM")
        inner = [("bd", "D"), ("bi", str(lanes.block))]
        product = "one[bd, bn, bi] * digits[bb, bd, bo, bi]"
        builder.nest("b", channels, f"total[bb, bh, bw, bn, bo] += {product}", inner)
    if (scale != 1).any():
        factor = _parameter(builder, "scale", "m", scale)
        builder.nest("m", channels, f"total[mb, mh, mw, mn, mo] = total[mb, mh, mw, mn, mo] * {factor}")
    if shift.any():
        amount = _parameter(builder, "shift", "r", shift)
        shifted = f"shift_right(total[rb, rh, rw, rn, ro], {amount})"
        builder.nest("r", channels, f"total[rb, rh, rw, rn, ro] = {shifted}")


def _parameter(builder: _Builder, name: str, prefix: str, values: Array) -> str:
    """Declare a parameter, one number or one per channel; returns how the nest reads it."""
    if (values == values.flat[0]).all():
        builder.arguments.append(f"{name}: i32 @ DRAM")
        return name
    lanes = builder.lanes
    builder.arguments.append(f"{name}: [i32][{builder.image.channels}, {lanes.batch}, {lanes.block}] @ DRAM")
    return f"{name}[{prefix}b, {prefix}n, {prefix}o]"


def _clip(builder: _Builder, node: Node) -> None:
    channels = builder.image.channels
    for prefix, function, limit in (("l", "most", "low"), ("h", "least", "high")):
        builder.arguments.append(f"{limit}: i32 @ DRAM")
        value = f"total[{prefix}b, {prefix}h, {prefix}w, {prefix}n, {prefix}o]"
        builder.nest(prefix, channels, f"{value} = {function}({value}, {limit})")


def _max_pool(builder: _Builder, node: Node) -> None:
    """The largest of each window, on int32 copies of the operand, starting below every int8."""
    operator, source = node.operator, builder.image
    assert isinstance(operator, MaxPool2d)
    row, column = _window(builder, node, operator.kernel, operator.stride)
    builder.arguments.append("least_value: i32 @ DRAM")
    wide = _Image("wide", source.channels, source.height, source.width)
    builder.declare("wide", "i32", builder.full(wide.channels, wide.height, wide.width))
    builder.nest("c", source.channels, f"wide[cb, ch, cw, cn, co] = {source.array}[cb, ch, cw, cn, co]")
    _begin_sum(builder, source.channels)
    total = "total[{0}b, {0}h, {0}w, {0}n, {0}o]"
    builder.nest("f", source.channels, f"{total.format('f')} = {total.format('f')} + least_value")
    largest = f"most({total.format('s')}, wide[sb, {row}, {column}, sn, so])"
    builder.nest("s", source.channels, f"{total.format('s')} = {largest}", [("kh", "KH"), ("kw", "KW")])


_STEPS: Mapping[type[Operator], Callable[[_Builder, Node], None]] = {
    Relayout: _relayout,
    Pad: _pad,
    Conv2d: _linear,
    DepthwiseConv2d: _linear,
    FullyConnected: _linear,
    ScaleShift: _scale_shift,
    Clip: _clip,
    MaxPool2d: _max_pool,
}
