"""Small rewrites that keep a graph's meaning: movement cancelled, folded into constants, or moved where it is cheap.

Two rounds, each run to a fixed point. The first sinks transposes and reshapes towards the outputs, through
everything that does not care about the order of elements, until they cancel or are absorbed by weights. The second
lifts what is left above Dequantize, so that movement acts on integers and a float operator stands directly between
Dequantize and Quantize.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

import numpy as np

from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, Rewrite, run
from dovetail.graph.types import DType, Shape
from dovetail.operators.activation import Clamp, Softmax, Unary
from dovetail.operators.arithmetic import Add, Clip, Offset
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Reshape, Slice, Transpose
from dovetail.operators.pooling import MaxPool2d
from dovetail.operators.quantization import Dequantize, Quantize
from dovetail.operators.selection import Pick

POINTWISE = (Quantize, Dequantize, Clamp, Unary, Clip, Offset)
"""Operators of one value (and parameters) that treat every element alike, or every element of one axis."""

MOVEMENT = (Transpose, Reshape, Slice, Pad, Concat, Pick)
"""Operators that compute nothing."""

MAX_FOLDED = 1 << 26
"""Most elements of a constant computed at compile time."""

FOLDED_INTEGERS = 16
"""Most bits for which an integer survives Dequantize and Quantize with the same parameters exactly."""


def simplify(graph: Graph) -> Graph:
    """The same network with less movement.

    Returns:
        A graph with the same inputs, outputs and results: to the bit, except where a bias joins the layer before it
        (one float rounding less).
    """
    return run(run(graph, SINK), LIFT)


def inverse(permutation: Shape) -> Shape:
    """The permutation that undoes another."""
    return tuple(permutation.index(axis) for axis in range(len(permutation)))


def fold_constant(draft: Draft, node: Node) -> str | None:
    """Movement and quantisation of constants is done at compile time."""
    if not isinstance(node.operator, (*MOVEMENT, Quantize)) or any(n not in draft.constants for n in node.inputs):
        return None
    if draft.types[node.output].elements > MAX_FOLDED:
        return None
    array = node.operator.evaluate([draft.constants[name] for name in node.inputs])
    return draft.constant(array, draft.types[node.output].dtype, node.output)


def lift_above_constant(draft: Draft, node: Node) -> str | None:
    """Movement of a dequantised constant moves the constant; its scales follow."""
    if not node.inputs or draft.made_by(node.inputs[0], Dequantize) is None or not draft.is_static(node.inputs[0]):
        return None
    return lift_above_dequantize(draft, node)


def lift_above_dequantize(draft: Draft, node: Node) -> str | None:
    """Transpose or reshape after Dequantize: before it, on the integers."""
    if not isinstance(node.operator, Transpose | Reshape):
        return None
    source = draft.made_by(node.inputs[0], Dequantize)
    if source is None or not isinstance(source.operator, Dequantize):
        return None
    axis = moved_axis(draft, node, source.operator.axis, source.inputs[1], draft.types[source.inputs[0]].shape)
    if axis is None:
        return None
    moved = draft.add(node.operator, [source.inputs[0]], node, source.inputs[0])
    return draft.add(Dequantize(axis), [moved, *source.inputs[1:]], node)


def lift_above_border(draft: Draft, node: Node) -> str | None:
    """A transpose after a pad or a slice: before it; the border follows its axes."""
    border = draft.made_by(node.inputs[0], Pad, Slice, Pick)
    if border is None or not isinstance(node.operator, Transpose) or draft.users(border.output) != 1:
        return None
    moved = draft.add(node.operator, [border.inputs[0]], node, border.inputs[0])
    return draft.add(_follow(border.operator, node.operator.permutation), [moved], border, node.output)


def _follow(border: Operator, order: Shape) -> Operator:
    """The pad or slice of a value whose axis i is axis order[i] of the one `border` is written for."""

    def follow(values: Shape) -> Shape:
        return tuple(values[axis] for axis in order)

    if isinstance(border, Pad):
        return Pad(follow(border.before), follow(border.after), border.value)
    if isinstance(border, Slice):
        return Slice(follow(border.start), follow(border.stop), follow(border.step))
    if isinstance(border, Pick):
        return Pick(tuple(border.places[axis] for axis in order))
    raise TypeError(f"{type(border).__name__} has no border")


def moved_axis(draft: Draft, node: Node, axis: int, scale: str, shape: Shape) -> int | None:
    """The axis a quantisation along `axis` of a value of `shape` runs along after the movement; None if it is torn."""
    if draft.types[scale].shape == (1,):
        return -1
    place = axis % len(shape)
    if isinstance(node.operator, Transpose):
        return node.operator.permutation.index(place)
    before, size = prod(shape[:place]), shape[place]
    result = draft.types[node.output].shape
    matching = [i for i, n in enumerate(result) if n == size and prod(result[:i]) == before]
    return matching[-1] if matching else None


def drop_identity(draft: Draft, node: Node) -> str | None:
    """Movement that leaves everything in place, and a clamp without limits, are removed."""
    source, operator = node.inputs[0], node.operator
    if isinstance(operator, Clamp):
        return source if (operator.low, operator.high) == (-inf, inf) else None
    if isinstance(operator, Concat):
        return source if len(node.inputs) == 1 else None
    if isinstance(operator, Transpose):
        return source if operator.permutation == tuple(range(len(operator.permutation))) else None
    if isinstance(operator, Pick):
        sizes = draft.types[source].shape
        return source if all(p == tuple(range(n)) for p, n in zip(operator.places, sizes, strict=True)) else None
    still = isinstance(operator, Reshape | Pad | Slice) and draft.types[source] == draft.types[node.output]
    return source if still else None


def merge_movement(draft: Draft, node: Node) -> str | None:
    """Two transposes, or two reshapes, one behind the other: one."""
    first = draft.made_by(node.inputs[0], type(node.operator))
    if first is None:
        return None
    if isinstance(node.operator, Reshape):
        return draft.add(node.operator, first.inputs, node)
    if isinstance(node.operator, Transpose) and isinstance(first.operator, Transpose):
        order = tuple(first.operator.permutation[axis] for axis in node.operator.permutation)
        return draft.add(Transpose(order), first.inputs, node)
    return None


def transpose_as_reshape(draft: Draft, node: Node) -> str | None:
    """A transpose that only moves axes of size 1 is a reshape."""
    if not isinstance(node.operator, Transpose):
        return None
    shape = draft.types[node.inputs[0]].shape
    real = [axis for axis in node.operator.permutation if shape[axis] != 1]
    if real != sorted(real):
        return None
    return draft.add(Reshape(draft.types[node.output].shape), node.inputs, node)


def sink_through_pointwise(draft: Draft, node: Node) -> str | None:
    """Movement before an operator that treats every element alike: after it."""
    if not isinstance(node.operator, POINTWISE):
        return None
    move = draft.made_by(node.inputs[0], Transpose, Reshape)
    if move is None:
        return None
    operator: Operator = node.operator
    if isinstance(operator, Quantize | Dequantize) and draft.types[node.inputs[1]].shape != (1,):
        if not isinstance(move.operator, Transpose):
            return None
        axis = operator.axis % len(move.operator.permutation)
        operator = replace(operator, axis=move.operator.permutation[axis])
    result = draft.add(operator, [move.inputs[0], *node.inputs[1:]], node)
    return draft.add(move.operator, [result], node)


def sink_through_softmax(draft: Draft, node: Node) -> str | None:
    """A transpose that leaves the last axis in place goes after a softmax."""
    move = draft.made_by(node.inputs[0], Transpose)
    if not isinstance(node.operator, Softmax) or move is None or not isinstance(move.operator, Transpose):
        return None
    if move.operator.permutation[-1] != len(move.operator.permutation) - 1:
        return None
    return draft.add(move.operator, [draft.add(node.operator, move.inputs, node)], node)


def sink_through_border(draft: Draft, node: Node) -> str | None:
    """A transpose before a pad or a slice goes after it; the border follows its axes."""
    move = draft.made_by(node.inputs[0], Transpose)
    if move is None or not isinstance(move.operator, Transpose) or not isinstance(node.operator, Pad | Slice | Pick):
        return None
    operator = _follow(node.operator, inverse(move.operator.permutation))
    return draft.add(move.operator, [draft.add(operator, move.inputs, node)], node)


def _unmoved(draft: Draft, node: Node) -> tuple[Shape, list[str]] | None:
    """The operands of a node before a transpose all of them share; constants are transposed back."""
    moves = [draft.made_by(value, Transpose) for value in node.inputs]
    orders = {move.operator.permutation for move in moves if move and isinstance(move.operator, Transpose)}
    if len(orders) != 1:
        return None
    (order,) = orders
    operands = []
    for value, move in zip(node.inputs, moves, strict=True):
        if move is not None:
            operands.append(move.inputs[0])
        elif draft.is_static(value) and len(draft.types[value].shape) <= len(order):
            shape = draft.types[value].shape
            whole = draft.add(Reshape((1,) * (len(order) - len(shape)) + shape), [value], node)
            operands.append(draft.add(Transpose(inverse(order)), [whole], node))
        else:
            return None
    return order, operands


def sink_through_add(draft: Draft, node: Node) -> str | None:
    """A transpose (or reshape) of both operands of an addition (or other function of two values), or of one with a
    constant other: of the sum."""
    if not isinstance(node.operator, Add | Binary):
        return None
    found = _unmoved(draft, node)
    if found is not None:
        total = draft.add(node.operator, found[1], node)
        return draft.add(Transpose(found[0]), [total], node)
    moves = [draft.made_by(value, Reshape) for value in node.inputs]
    sources = [move.inputs[0] for move in moves if move is not None]
    shapes = {draft.types[name].shape for name in (*sources, *node.inputs)} if len(sources) == 2 else set()
    same = len({draft.types[name].shape for name in sources}) == 1
    if len(sources) != 2 or not same or len(shapes) > 2 or draft.types[node.inputs[0]] != draft.types[node.inputs[1]]:
        return None
    total = draft.add(node.operator, sources, node)
    return draft.add(Reshape(draft.types[node.output].shape), [total], node)


def sink_through_concat(draft: Draft, node: Node) -> str | None:
    """One transpose of all operands of a concatenation: of the result."""
    if not isinstance(node.operator, Concat):
        return None
    if any(len(draft.types[name].shape) != len(draft.types[node.output].shape) for name in node.inputs):
        return None
    found = _unmoved(draft, node)
    if found is None:
        return None
    joined = draft.add(Concat(found[0][node.operator.axis]), found[1], node)
    return draft.add(Transpose(found[0]), [joined], node)


def fold_into_columns(draft: Draft, node: Node) -> str | None:
    """Transpose and flatten before a fully connected layer: its weight columns are put in the stored order."""
    if not isinstance(node.operator, FullyConnected):
        return None
    flat = draft.made_by(node.inputs[0], Reshape)
    move = draft.made_by(flat.inputs[0], Transpose) if flat else None
    if flat is None or move is None or not isinstance(move.operator, Transpose):
        return None
    shape, rows = draft.types[move.output].shape, draft.types[flat.output].shape
    order = move.operator.permutation
    kept = [axis for axis in range(len(order)) if order[:axis] == tuple(range(axis)) and prod(shape[axis:]) == rows[-1]]
    if not kept or len(rows) < 2:
        return None
    start = kept[-1]
    weights = _columns(draft, node.inputs[1], shape[start:], tuple(axis - start for axis in order[start:]))
    if weights is None:
        return None
    straight = draft.add(flat.operator, move.inputs, flat)
    return draft.add(node.operator, [straight, weights, *node.inputs[2:]], node)


def _columns(draft: Draft, weights: str, shape: Shape, order: Shape) -> str | None:
    """Constant weights [N, K] with the columns, which are a tensor of `shape`, transposed back by `order`."""
    source = draft.made_by(weights, Dequantize)
    stored = source.inputs[0] if source else weights
    if stored not in draft.constants:
        return None
    along_rows = source is None or draft.types[source.inputs[1]].shape == (1,)
    if source and isinstance(source.operator, Dequantize):
        along_rows = along_rows or source.operator.axis % 2 == 0
    if not along_rows:
        return None
    array = draft.constants[stored]
    back = (0, *(1 + axis for axis in inverse(order)))
    permuted = array.reshape(array.shape[0], *shape).transpose(back).reshape(array.shape)
    moved = draft.constant(permuted, draft.types[stored].dtype, stored)
    return draft.add(source.operator, [moved, *source.inputs[1:]], source) if source else moved


def join_bias(draft: Draft, node: Node) -> str | None:
    """A constant per output channel added to a convolution or fully connected layer becomes its bias."""
    if not isinstance(node.operator, Add):
        return None
    for layer_value, bias in (node.inputs, node.inputs[::-1]):
        layer = draft.made_by(layer_value, Conv2d, DepthwiseConv2d, FullyConnected)
        if layer is None or len(layer.inputs) != 2 or draft.users(layer_value) != 1 or not _is_bias(draft, bias):
            continue
        kind, channels = draft.types[bias], draft.types[layer_value].shape[-1]
        if kind.elements == channels == kind.shape[-1] and draft.types[layer_value] == draft.types[node.output]:
            row = draft.add(Reshape((channels,)), [bias], node) if len(kind.shape) != 1 else bias
            return draft.add(layer.operator, [*layer.inputs, row], node)
    return None


def _is_bias(draft: Draft, value: str) -> bool:
    """A float constant, or a dequantised int32 one: a coarser quantisation is left to an addition of its own."""
    source = draft.made_by(value, Dequantize)
    if source is None:
        return value in draft.constants and len(draft.types[value].shape) > 0
    return source.inputs[0] in draft.constants and draft.types[source.inputs[0]].dtype is DType.INT32


def drop_requantize(draft: Draft, node: Node) -> str | None:
    """Quantize after Dequantize with the same parameters gives the integers back."""
    if not isinstance(node.operator, Quantize):
        return None
    source = draft.made_by(node.inputs[0], Dequantize)
    if source is None or not _same_parameters(draft, node, source):
        return None
    return source.inputs[0] if draft.types[source.inputs[0]].dtype is node.operator.dtype else None


def _same_parameters(draft: Draft, a: Node, b: Node) -> bool:
    """Both quantise per tensor with equal constants, and the integers are narrow enough to survive exactly."""
    pairs = list(zip(a.inputs[1:], b.inputs[1:], strict=True))
    if any(name not in draft.constants or draft.types[name].shape != (1,) for pair in pairs for name in pair):
        return False
    narrow = draft.types[b.inputs[0]].dtype.bits <= FOLDED_INTEGERS
    return narrow and all(np.array_equal(draft.constants[x], draft.constants[y]) for x, y in pairs)


def integer_selection(draft: Draft, node: Node) -> str | None:
    """Dequantize, a maximum pool or concatenation, Quantize, all with the same parameters: of the integers."""
    if not isinstance(node.operator, Quantize):
        return None
    middle = draft.made_by(node.inputs[0], MaxPool2d, Concat)
    if middle is None:
        return None
    sources = [draft.made_by(value, Dequantize) for value in middle.inputs]
    found = [source for source in sources if source is not None and _same_parameters(draft, node, source)]
    if len(found) != len(sources) or any(draft.types[s.inputs[0]].dtype is not node.operator.dtype for s in found):
        return None
    return draft.add(middle.operator, [source.inputs[0] for source in found], node)


CLEAN: tuple[Rewrite, ...] = (fold_constant, drop_identity, merge_movement, transpose_as_reshape, lift_above_constant)
"""Rewrites of both rounds."""

SINK: tuple[Rewrite, ...] = (
    *CLEAN,
    drop_requantize,
    sink_through_pointwise,
    sink_through_softmax,
    sink_through_border,
    sink_through_add,
    sink_through_concat,
    fold_into_columns,
    join_bias,
)
"""The first round: movement goes down."""

LIFT: tuple[Rewrite, ...] = (*CLEAN, drop_requantize, lift_above_dequantize, lift_above_border, integer_selection)
"""The second round: what is left of it goes up to the integers."""
