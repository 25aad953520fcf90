"""Rewrites that keep a graph's meaning: movement cancelled, folded or moved; constants folded.

`simplify` has two rounds. The first sinks transposes and reshapes towards the outputs, through everything that does not
care about the order of elements, until they cancel or are absorbed by weights. The second lifts what is left above
Dequantize, so that movement acts on integers and a float operator stands directly between Dequantize and Quantize.
"""

from __future__ import annotations

from math import prod

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize
from dovetail.ir.operators.base import Mover, Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Pick, Reshape, Slice, Transpose
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.pattern import Apply, Occurrence, apply, constant, either, occurrence, operand, rest
from dovetail.ir.rules import Draft as Draft
from dovetail.ir.rules import Rule, RuleMatch
from dovetail.ir.rules import run as run
from dovetail.ir.types import DType, Shape, TensorType

MAX_FOLDED = 1 << 26
"""Most elements of a constant computed at compile time."""

FOLDED_INTEGERS = 16
"""Most bits for which an integer survives Dequantize and Quantize with the same parameters exactly."""

X, SCALE, ZERO = operand("x"), operand("scale"), operand("zero point")
OTHERS = rest("others")
"""All operands after the first."""
TRANSPOSE = apply(Transpose, X)
DEQUANTIZE = apply(Dequantize, X, SCALE, ZERO)


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


def _types(at: RuleMatch) -> list[TensorType]:
    """The types of the outermost node's operands."""
    return [at.type(value) for value in at.root.inputs]


def _folded(at: RuleMatch) -> str:
    array = at.root.operator.evaluate([at.array(value) for value in at.root.inputs])
    return at.constant(array, at.type(at.root.output).dtype)


fold_constant = Rule(
    apply((Mover, Quantize), rest("operands", known=True)),
    _folded,
    (lambda at: at.type(at.root.output).elements <= MAX_FOLDED,),
)
"""Movement and quantisation of constants is done at compile time."""

drop_identity = Rule(apply(Operator, X, OTHERS), lambda at: at[X], (lambda at: at.root.operator.is_noop(_types(at)),))
"""Operators that give back their operand are removed."""

merge_reshapes = Rule(apply(Reshape, apply(Reshape, X)), lambda at: at.add(at.root.operator, X))
"""Two reshapes in a row become one."""

_SECOND = apply(Transpose, TRANSPOSE)
merge_transposes = Rule(
    _SECOND, lambda at: at.add(Transpose(tuple(at[TRANSPOSE].permutation[axis] for axis in at[_SECOND].permutation)), X)
)
"""Two transposes in a row become one."""


def _moves_ones(at: RuleMatch) -> bool:
    shape = at.type(X).shape
    real = [axis for axis in at[TRANSPOSE].permutation if shape[axis] != 1]
    return real == sorted(real)


transpose_as_reshape = Rule(TRANSPOSE, lambda at: at.add(Reshape(at.type(TRANSPOSE).shape), X), (_moves_ones,))
"""A transpose that only moves axes of size 1 is a reshape."""

_PART = apply(Slice, X)
_PARTED = apply(Concat, _PART, each=True)


def _whole(at: RuleMatch) -> str | None:
    axis, parts, place = at[_PARTED].axis, at.every[_PARTED], 0
    whole = parts[0][X]
    sizes = at.type(whole).shape
    for part in parts:
        piece = part[_PART]
        spans = list(zip(piece.start, piece.stop, strict=True))
        begin, place = spans[axis][0] - place, spans[axis][1]
        rest = (span == (0, size) for at_, (span, size) in enumerate(zip(spans, sizes, strict=True)) if at_ != axis)
        if part[X] != whole or begin or set(piece.step) != {1} or not all(rest):
            return None
    return whole if at.type(whole) == at.type(_PARTED) else None


drop_parting = Rule(_PARTED, _whole)
"""The parts of a value put together again are the value."""

_MOVED = apply((Transpose, Reshape), DEQUANTIZE)


def _lifted(at: RuleMatch) -> str | None:
    """A movement before Dequantize; the axis of its scales follows."""
    axis = -1 if at.type(SCALE).shape == (1,) else at[_MOVED].axis_after(at[DEQUANTIZE].axis, [at.type(X)])
    return None if axis is None else at.add(Dequantize(axis), at.add(at[_MOVED], X, stem=at[X]), SCALE, ZERO)


lift_above_dequantize = Rule(_MOVED, _lifted)
"""Movement after Dequantize goes before it, on the integers."""

lift_above_constant = Rule(_MOVED, _lifted, (lambda at: at.draft.is_static(at.value(DEQUANTIZE)),))
"""Movement of a dequantised constant moves the constant."""

_BORDER = apply((Pad, Slice, Pick), X, alone=True)
_BEHIND_BORDER = apply(Transpose, _BORDER)


def _before_border(at: RuleMatch) -> str | None:
    border = at[_BORDER].reordered(at[_BEHIND_BORDER].permutation, [at.type(X)])
    moved = at.add(at[_BEHIND_BORDER], X, stem=at[X])
    return at.add(border, moved, like=_BORDER, stem=at.root.output) if border else None


lift_above_border = Rule(_BEHIND_BORDER, _before_border)
"""A transpose after a pad or a slice goes before it; the border follows its axes."""


def _behind_transposes(at: RuleMatch) -> str | None:
    operator, inputs = at.root.operator, at.root.inputs
    count = operator.pointwise or len(inputs)
    moves = [occurrence(TRANSPOSE, at.draft, value) for value in inputs[:count]]
    orders = {move[TRANSPOSE].permutation for move in moves if move}
    if len(orders) != 1:
        return None
    (order,) = orders
    back = inverse(order)
    shapes = [at.type(value).shape for value in inputs]
    rows = list(zip(inputs, moves, shapes, strict=False))
    sunk = operator.reordered(back, _types(at))
    if sunk is None or not all(move or (at.draft.is_static(x) and len(shape) <= len(order)) for x, move, shape in rows):
        return None
    operands = []
    for value, move, shape in rows:
        if move:
            operands.append(move[X])
        else:
            whole = at.add(Reshape((1,) * (len(order) - len(shape)) + shape), value)
            operands.append(at.add(Transpose(back), whole))
    return at.add(Transpose(order), at.add(sunk, *operands, *inputs[count:]))


sink_transposes = Rule(apply(Operator), _behind_transposes)
"""The same transpose of all operands goes behind an operator that can follow it; constants are transposed back."""

_RESHAPE = apply(Reshape, X)
sink_reshape = Rule(
    apply(Operator, _RESHAPE, OTHERS, having=lambda operator: operator.pointwise == 1),
    lambda at: at.add(at[_RESHAPE], at.add(at.root.operator, X, *at.root.inputs[1:])),
    (lambda at: all(at.type(value).elements == 1 for value in at.root.inputs[1:]),),
)
"""A reshape before an operator that treats every element alike goes after it."""

_LEFT, _RIGHT = operand("left"), operand("right")
sink_reshapes = Rule(
    apply(Operator, apply(Reshape, _LEFT), apply(Reshape, _RIGHT), having=lambda operator: operator.pointwise == 2),
    lambda at: at.add(Reshape(at.type(at.root.output).shape), at.add(at.root.operator, _LEFT, _RIGHT)),
    (lambda at: at.type(_LEFT).shape == at.type(_RIGHT).shape and len(set(_types(at))) == 1,),
)
"""A reshape of both operands of a function goes after it."""

_WEIGHTS = constant("weights")
_SCALED = apply(Dequantize, _WEIGHTS, SCALE, ZERO)
_FLAT = apply(Reshape, TRANSPOSE)
_DENSE = apply(FullyConnected, _FLAT, either(_SCALED, _WEIGHTS), OTHERS)


def _in_stored_order(at: RuleMatch) -> str | None:
    shape, rows, order = at.type(TRANSPOSE).shape, at.type(_FLAT).shape, at[TRANSPOSE].permutation
    kept = [axis for axis in range(len(order)) if order[:axis] == tuple(range(axis)) and prod(shape[axis:]) == rows[-1]]
    if not kept or len(rows) < 2:
        return None
    if at.has(_SCALED) and at.type(SCALE).shape != (1,) and at[_SCALED].axis % 2:
        return None
    start, array = kept[-1], at.array(_WEIGHTS)
    back = (0, *(1 + axis for axis in inverse(tuple(axis - start for axis in order[start:]))))
    permuted = array.reshape(array.shape[0], *shape[start:]).transpose(back).reshape(array.shape)
    weights = at.constant(permuted, at.type(_WEIGHTS).dtype, _WEIGHTS)
    weights = at.add(at[_SCALED], weights, SCALE, ZERO, like=_SCALED) if at.has(_SCALED) else weights
    return at.add(at[_DENSE], at.add(at[_FLAT], X, like=_FLAT), weights, *at.others(_DENSE))


fold_into_columns = Rule(_DENSE, _in_stored_order)
"""Transpose and flatten before a fully connected layer: its weight columns are put in the stored order."""

_BARE = apply((Conv2d, DepthwiseConv2d, FullyConnected), X, operand("weights"), alone=True)
_COARSE = apply(Dequantize, constant("integers"), SCALE, ZERO)
_BIAS = either(_COARSE, constant("bias"))


def _is_bias(at: RuleMatch) -> bool:
    """A constant per channel; of quantised ones int32: a coarser one is left to an addition of its own."""
    kind, result = at.type(_BIAS), at.type(_BARE)
    fine = not at.has(_COARSE) or at.type(at.node(_COARSE).inputs[0]).dtype is DType.INT32
    return fine and kind.shape[-1:] == (kind.elements,) == result.shape[-1:] and result == at.type(at.root.output)


def _joined(at: RuleMatch) -> str:
    bias = at.value(_BIAS) if len(at.type(_BIAS).shape) == 1 else at.add(Reshape(at.type(_BARE).shape[-1:]), _BIAS)
    return at.add(at[_BARE], *at.node(_BARE).inputs, bias)


join_bias = Rule(apply(Add, _BARE, _BIAS, commutes=True), _joined, (_is_bias,))
"""A constant per output channel added to a convolution or fully connected layer becomes its bias."""

_STEP, _MIDDLE = constant("step"), constant("middle")
_AGAIN = apply(Quantize, DEQUANTIZE, _STEP, _MIDDLE)


def _same_steps(at: RuleMatch, integers: Occurrence, quantize: Apply[Quantize]) -> bool:
    """Both quantise per tensor with equal constants, and the integers are narrow enough to survive exactly."""
    known, kind = at.draft.constants, integers.type(X).dtype
    pairs = ((_STEP, integers[SCALE]), (_MIDDLE, integers[ZERO]))
    alike = all(
        old in known and at.type(new).shape == at.type(old).shape == (1,) and np.array_equal(at.array(new), known[old])
        for new, old in pairs
    )
    return alike and kind.bits <= FOLDED_INTEGERS and kind is at[quantize].dtype


drop_requantize = Rule(_AGAIN, lambda at: at[X], (lambda at: _same_steps(at, at, _AGAIN),))
"""Quantize after Dequantize with the same parameters gives the integers back."""

_CHOICE = apply((MaxPool2d, Concat), DEQUANTIZE, each=True)
_CHOSEN = apply(Quantize, _CHOICE, _STEP, _MIDDLE)
integer_selection = Rule(
    _CHOSEN,
    lambda at: at.add(at[_CHOICE], *(one[X] for one in at.every[_CHOICE])),
    (lambda at: all(_same_steps(at, one, _CHOSEN) for one in at.every[_CHOICE]),),
)
"""Dequantize, a maximum pool or concatenation, Quantize, all with the same parameters: of the integers."""

CLEAN = (
    fold_constant,
    drop_identity,
    drop_parting,
    merge_reshapes,
    merge_transposes,
    transpose_as_reshape,
    lift_above_constant,
)
"""Rules of both rounds."""

SINK = (
    *CLEAN,
    drop_requantize,
    sink_transposes,
    sink_reshape,
    sink_reshapes,
    fold_into_columns,
    join_bias,
)
"""The first round: movement goes down."""

LIFT = (*CLEAN, drop_requantize, lift_above_dequantize, lift_above_border, integer_selection)
"""The second round: rules that move the remaining operators up to the integers."""
