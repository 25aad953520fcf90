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
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, ScaleShift, scale_digits
from dovetail.ir.operators.base import Operator, SlidingWindow
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad, Relayout
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, TensorType
from dovetail.records import Record

_MOST = 127
_MOST_ROWS = 1
"""Vectors of digits for which a product is cheaper than adding."""
SHIFTS = ("shift", "again")
"""The arguments that hold the amounts of one shift after the other."""


def digit_rows(bias: Array, block: int) -> int:
    """The number of vectors of `block` digits for one bias: 127 * 127 per lane, and one lane for the rest."""
    reach = int(np.abs(bias.astype(np.int64)).max(initial=0))
    return max(1, -(-reach // (_MOST * _MOST * (block - 1))))


def bias_rows(graph: Graph, bias: Array, block: int) -> int:
    """The number of vectors of digits whose product is a region's bias. It is 0 without a bias and for a dense layer,
    where an addition costs no more: the layer reads each matrix once, and the digits would be another matrix."""
    matrices = (graph.types[node.inputs[1]] for node in graph.nodes if node.operator.weight_axis is not None)
    dense = any(len(kind.shape) == 2 for kind in matrices)
    rows = digit_rows(bias, block) if bias.any() and not dense else 0
    return rows if rows <= _MOST_ROWS else 0


def shifts(amounts: Array, most: int) -> tuple[Array, ...]:
    """Shift amounts as those of shifts one after the other, none by more than `most`; none where nothing is shifted."""
    steps = []
    while amounts.any():
        steps.append(np.minimum(amounts, most))
        amounts = amounts - steps[-1]
    return tuple(steps)


def ones(rows: int, block: int) -> Array:
    """The constant operand, int8 [rows, block]: 127 in every lane but the last of each row, which is 1."""
    vectors = np.full((rows, block), _MOST, dtype=np.int8)
    vectors[:, -1] = 1
    return vectors


def digits(bias: Array, rows: int, block: int) -> Array:
    """Digits of each bias, int8 [len(bias), rows, block], so that sum(digits * ones(rows, block)) is the bias.

    Raises:
        ValueError: a bias is too large for so many rows.
    """
    left = bias.astype(np.int64)
    values = np.zeros((len(bias), rows, block), dtype=np.int8)
    for row in range(rows):
        for lane in range(block - 1):
            digit = np.clip(np.rint(left / _MOST), -_MOST, _MOST).astype(np.int64)
            values[:, row, lane] = digit
            left = left - digit * _MOST
    values[:, -1, -1] = np.clip(left, -_MOST, _MOST)
    if (left != values[:, -1, -1]).any():
        raise ValueError(f"a bias of {int(np.abs(bias).max())} needs more than {rows} rows of {block} digits")
    return values


class Lanes(Record):
    """Elements computed together: `block` channels of each of `batch` images."""

    block: int
    """Channels of a block."""
    batch: int = 1
    """The number of images."""

    def blocks(self, channels: int) -> int:
        """Blocks that hold so many channels, the last filled up."""
        return -(-channels // self.block)


class Algorithm(Record):
    """Loops and what this region's sizes are."""

    text: str
    """One Exo procedure named `region`; the same for all regions of the same structure."""
    sizes: Mapping[str, int]
    """Value of every size argument."""


class _ArrayExtents(Record):
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
    depth: int
    most_shift: int
    multiplies: bool
    image: _ArrayExtents = field(default_factory=lambda: _ArrayExtents("x", "ICB", "IH", "IW"))
    """The value that the next step reads."""
    sizes: dict[str, int] = field(default_factory=dict)
    offsets: set[str] = field(default_factory=set)
    """Sizes that may be zero."""
    arguments: list[str] = field(default_factory=list)
    asserts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def nest(self, prefix: str, statement: str, inner: Sequence[tuple[str, str]] = ()) -> None:
        """Loops over every element of `image`, then `inner` ones, around one statement.

        Args:
            prefix: of the loops' variables.
            statement: "@" stands for the place of the element, "#" for that of its channel among parameters.
            inner: variables and extents.
        """
        block, row, column, image, lane = (f"{prefix}{axis}" for axis in "bhwno")
        loops = [*zip((block, row, column, image, lane), self.extents(self.image), strict=True), *inner]
        for depth, (name, extent) in enumerate(loops):
            self.lines.append(f"{'    ' * depth}for {name} in seq(0, {extent}):")
        text = statement.replace("@", f"[{block}, {row}, {column}, {image}, {lane}]")
        text = text.replace("#", f"[{block}, {image}, {lane}]")
        self.lines += ["    " * len(loops) + line for line in text.splitlines()]

    def extents(self, image: _ArrayExtents) -> tuple[str, ...]:
        """The extents of an array."""
        return image.channels, image.height, image.width, str(self.lanes.batch), str(self.lanes.block)

    def stage(self, image: _ArrayExtents, kind: str) -> None:
        """Declare an array, which the following nests fill and the next step reads."""
        self.image = image
        self.lines.append(f"{image.array}: {kind}[{', '.join(self.extents(image))}]")

    def argument(self, name: str, kind: str, *extents: str | int) -> None:
        """Declare an argument: a number, or an array."""
        self.arguments.append(
            f"{name}: [{kind}][{', '.join(map(str, extents))}] @ DRAM" if extents else f"{name}: {kind} @ DRAM"
        )

    def parameter(self, name: str) -> None:
        """Declare an argument of a number per channel."""
        self.argument(name, "i32", self.image.channels, self.lanes.batch, self.lanes.block)

    def window_of(self, node: Node) -> SlidingWindow | None:
        """The window of a node."""
        return node.operator.window([self.graph.types[name] for name in node.inputs])


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
    assert y.dtype.numpy.itemsize == 1, y
    known = graph.constants if constants is None else constants
    builder = _AlgorithmBuilder(graph, lanes, known, depth, most_shift, multiplies)
    builder.sizes.update(ICB=lanes.blocks(x.shape[-1]) // depth, IH=_rows(x) * depth, IW=_columns(x))
    operand = builder.extents(builder.image)
    if graph.nodes[0].operator.changes_layout:
        operand = (str(lanes.batch), "IH", "IW", f"{lanes.block} * ICB")
    for node in graph.nodes:
        _STEPS[type(node.operator)](builder, node)
    image = builder.image
    if image.array != "y":
        builder.nest("y", f"y@ = {image.array}@")
    sizes = [f"{name}: {'index' if name in builder.offsets else 'size'}" for name in builder.sizes]
    arrays = [f"x: [i8][{', '.join(operand)}] @ DRAM", *builder.arguments]
    arrays.append(f"y: [i8][{', '.join(builder.extents(image))}] @ DRAM")
    checks = [f"assert {name} >= 0" for name in sorted(builder.offsets)] + builder.asserts
    head = f"def region({', '.join([*sizes, *arrays])}):"
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
    builder.stage(_ArrayExtents("blocked", "ICB", "IH", "IW"), "i8")
    builder.nest("k", f"blocked@ = x[kn, kh, kw, {lanes.block} * kb + ko]")


def _pad(builder: _AlgorithmBuilder, node: Node) -> None:
    operator, image = node.expect(Pad), builder.image
    sides = (operator.before[1], operator.after[1], operator.before[2], operator.after[2])
    builder.sizes.update(zip("TBLR", sides, strict=True))
    builder.offsets.update("TBLR")
    padded = _ArrayExtents("padded", image.channels, f"T + {image.height} + B", f"L + {image.width} + R")
    builder.stage(padded, "i8")
    builder.nest(
        "p",
        f"if ph >= T and ph < T + {image.height} and pw >= L and pw < L + {image.width}:\n"
        f"    padded@ = {image.array}[pb, ph - T, pw - L, pn, po]\n"
        f"else:\n"
        f"    padded@ = {float(operator.value)}",
    )


def _window(builder: _AlgorithmBuilder, node: Node, window: SlidingWindow) -> tuple[str, str]:
    """Declare the result's rows and columns and the kernel's, and that the operand holds every window; the row and the
    column of a tap."""
    result, image = builder.graph.types[node.output], builder.image
    builder.sizes.update(OH=_rows(result), OW=_columns(result), KH=window.kernel[0], KW=window.kernel[1])
    for extent, axis, step in zip((image.height, image.width), "HW", window.stride, strict=True):
        builder.asserts.append(f"assert {extent} >= {step} * O{axis} - {step} + K{axis}")
    return f"{window.stride[0]} * sh + kh", f"{window.stride[1]} * sw + kw"


def _begin_sum(builder: _AlgorithmBuilder, channels: str) -> None:
    """A sum of zeros as large as the result."""
    builder.stage(_ArrayExtents("total", channels, "OH", "OW"), "i32")
    builder.nest("z", "total@ = 0.0")


def _linear(builder: _AlgorithmBuilder, node: Node) -> None:
    lanes, source, window = builder.lanes, builder.image, builder.window_of(node)
    row, column = _window(builder, node, window or SlidingWindow((builder.depth, 1)))
    channels, others, block, places = "ICB", list[tuple[str, str]](), "sb", "sb"
    if not node.operator.is_channelwise:
        builder.sizes["OCB"] = lanes.blocks(builder.graph.types[node.output].shape[-1])
        channels, others, block, places = "OCB", [("ib", "ICB")], "ib", "sb, ib"
    builder.argument("w", "i8", channels, *(extent for _, extent in others), "KH", "KW", lanes.block, lanes.block)
    _begin_sum(builder, channels)
    product = f"{source.array}[{block}, {row}, {column}, sn, si] * w[{places}, kh, kw, so, si]"
    inner = [*others, ("kh", "KH"), ("kw", "KW"), ("si", str(lanes.block))]
    builder.nest("s", f"total@ += {product}", inner)


def _scale_shift(builder: _AlgorithmBuilder, node: Node) -> None:
    """((sum + bias) * scale) >> shift, what does nothing left out; a small bias as products of `one` and `digits`."""
    scale, offset, shift = (builder.constants[name] for name in node.inputs[1:])
    channels, lanes = builder.image.channels, builder.lanes
    bias = offset // scale
    rows = bias_rows(builder.graph, bias, lanes.block)
    if rows:
        builder.sizes["D"] = rows
        builder.argument("one", "i8", "D", lanes.batch, lanes.block)
        builder.argument("digits", "i8", channels, "D", lanes.block, lanes.block)
        inner = [("bd", "D"), ("bi", str(lanes.block))]
        builder.nest("b", "total@ += one[bd, bn, bi] * digits[bb, bd, bo, bi]", inner)
    elif bias.any():
        builder.parameter("bias")
        builder.nest("a", "total@ = total@ + bias#")
    if not builder.multiplies:
        _doublings(builder, scale)
    elif (scale != 1).any():
        builder.nest("m", f"total@ = total@ * {_parameter(builder, 'scale', scale)}")
    for name, prefix, amounts in zip(SHIFTS, "rg", shifts(shift, builder.most_shift), strict=False):
        builder.nest(prefix, f"total@ = shift_right(total@, {_parameter(builder, name, amounts)})")


def _doublings(builder: _AlgorithmBuilder, scale: Array) -> None:
    """Multiply by a scale of few digits: total += total << n, once per digit, on a copy."""
    for number in range(len(scale_digits(scale) or ())):
        part, name, total = f"part_{number}", f"digit_{number}", builder.image
        builder.parameter(name)
        builder.stage(replace(total, array=part), "i32")
        builder.image = total
        steps = (f"{part}@ = 0.0", f"{part}@ = {part}@ + total@", f"{part}@ = shift_up({part}@, {name}#)")
        for kind, statement in zip("zcsa", (*steps, f"total@ = total@ + {part}@"), strict=True):
            builder.nest(f"d{number}{kind}", statement)


def _parameter(builder: _AlgorithmBuilder, name: str, values: Array) -> str:
    """Declare a parameter, one number or one per channel; how a nest reads it."""
    if (values == values.flat[0]).all():
        builder.argument(name, "i32")
        return name
    builder.parameter(name)
    return f"{name}#"


def _clip(builder: _AlgorithmBuilder, node: Node) -> None:
    for prefix, function, limit in (("l", "most", "low"), ("h", "least", "high")):
        builder.argument(limit, "i32")
        builder.nest(prefix, f"total@ = {function}(total@, {limit})")


def _max_pool(builder: _AlgorithmBuilder, node: Node) -> None:
    """The largest of each window, on int32 copies of the operand (products with ones on a diagonal), starting below
    every int8."""
    source, window, block = builder.image, builder.window_of(node), builder.lanes.block
    assert window is not None
    row, column = _window(builder, node, window)
    builder.argument("least_value", "i32")
    builder.argument("identity", "i8", block, block)
    builder.stage(replace(source, array="wide"), "i32")
    builder.nest("v", "wide@ = 0.0")
    builder.nest("c", f"wide@ += {source.array}[cb, ch, cw, cn, ci] * identity[co, ci]", [("ci", str(block))])
    _begin_sum(builder, source.channels)
    builder.nest("f", "total@ = total@ + least_value")
    builder.nest("s", f"total@ = most(total@, wide[sb, {row}, {column}, sn, so])", [("kh", "KH"), ("kw", "KW")])


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
