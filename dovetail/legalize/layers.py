"""Layers in the shapes and types an engine takes: borders alike on all sides, im2col, strides as slices, whole words of
results, weights of few bits. Exact."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.linear import Conv2d, Convolution, FullyConnected
from dovetail.ir.operators.movement import Im2col, Pad, Slice
from dovetail.ir.pattern import apply, constant, maybe, occurrence, operand, rest
from dovetail.ir.rules import Rule, RuleMatch, rewriting
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize.requantisation import PARAMETERS, Accepts, accepted

X, WEIGHTS, BIAS = operand("x"), constant("weights"), rest("bias")
_SCALED = apply(ScaleShift)
_LAYER = apply(Conv2d, X, WEIGHTS, BIAS)


def _is_shifted(at: RuleMatch) -> bool:
    """Only a ScaleShift reads the sums: on an engine that requantises so the core computes all other layers, and with
    them what the rule adds."""
    graph = at.draft.graph
    return all(occurrence(_SCALED, graph, user) for user in graph.users()[at.root.output])


def convolution_as_im2col(chooses: Accepts, shifted: bool = False) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen convolution becomes im2col and a 1x1 convolution.

    Args:
        chooses: of types and layer.
        shifted: whether only layers are looked at whose sums a ScaleShift reads.
    """

    def as_patches(at: RuleMatch) -> str:
        operator, weights = at[_LAYER], at.array(WEIGHTS)
        moved = at.add(Im2col((weights.shape[1], weights.shape[2]), operator.stride, operator.dilation), X)
        flat = at.constant(weights.reshape(len(weights), 1, 1, -1), at.type(WEIGHTS).dtype, WEIGHTS)
        return at.add(replace(operator, stride=(1, 1), dilation=(1, 1)), moved, flat, *at.others(_LAYER))

    def has_window(at: RuleMatch) -> bool:
        return at.type(WEIGHTS).shape[1:3] != (1, 1) and at[_LAYER].groups([at.type(X), at.type(WEIGHTS)]) == 1

    only = (_is_shifted,) if shifted else ()
    return rewriting(Rule(_LAYER, as_patches, (*only, has_window, accepted(chooses, _LAYER))))


_POINTS = apply(Conv2d, X, operand("weights"), BIAS, having=lambda layer: layer.stride != (1, 1))


def stride_as_slice(chooses: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: a strided 1x1 convolution that `chooses` takes becomes a dense one of every n-th pixel."""

    def as_slice(at: RuleMatch) -> str:
        sliced = at.add(Slice((0,) * 4, at.type(X).shape, (1, *at[_POINTS].stride, 1)), X)
        return at.add(replace(at[_POINTS], stride=(1, 1)), sliced, *at.root.inputs[1:])

    def is_point(at: RuleMatch) -> bool:
        return at.type(at.root.inputs[1]).shape[1:3] == (1, 1)

    return rewriting(Rule(_POINTS, as_slice, (is_point, accepted(chooses, _POINTS))))


_PAD = maybe(Pad, X)
_WINDOWS = apply(
    Convolution, _PAD, WEIGHTS, BIAS, having=lambda layer: layer.dilation == (1, 1) and not layer.weight_zero_point
)


def even_borders(largest: int, shifted: bool = False) -> Callable[[Graph], Graph]:
    """A rewrite: convolutions get taps of zero until the border is half a window on every side.

    TFLite's SAME with stride 2 pads one row below and none above: a 3x3 window becomes the corner of a 5x5 one.

    Args:
        largest: rows and columns of the largest window made.
        shifted: whether only layers are looked at whose sums a ScaleShift reads.
    """

    def evened(at: RuleMatch) -> str | None:
        operator = at[_WINDOWS]
        border = at[_PAD] if at.has(_PAD) else Pad((0,) * 4, (0,) * 4, operator.input_zero_point)
        if border.value != operator.input_zero_point or any(border.before[a] + border.after[a] for a in (0, 3)):
            return None
        weights, sizes, results = at.array(WEIGHTS), at.type(X).shape, at.type(at.root.output).shape
        # Half the smallest window around the middle that holds all taps, some of them before the image.
        sides = [max(border.before[axis], weights.shape[axis] - 1 - border.before[axis]) for axis in (1, 2)]
        wanted = (0, *sides, 0)
        fits = all(
            (sizes[1 + axis] - 1) // operator.stride[axis] + 1 == results[1 + axis] and 2 * sides[axis] + 1 <= largest
            for axis in (0, 1)
        )
        if not fits or (border.before == wanted and border.after == wanted):
            return None
        padded = at.add(Pad(wanted, wanted, border.value), X) if any(sides) else X
        grown = _grown(weights, [side - border.before[axis] for axis, side in enumerate(sides, 1)], sides)
        name = at.constant(grown, at.type(WEIGHTS).dtype, WEIGHTS)
        return at.add(operator, padded, name, *at.others(_WINDOWS))

    return rewriting(Rule(_WINDOWS, evened, (_is_shifted,) if shifted else ()))


def _grown(weights: Array, first: list[int], sides: list[int]) -> Array:
    """The weights (taps along axes 1 and 2) from taps `first` on of a window of 2 * sides + 1."""
    pads = [(0, 0)] * 4
    for axis in (1, 2):
        lead = first[axis - 1]
        pads[axis] = (lead, 2 * sides[axis - 1] + 1 - lead - weights.shape[axis])
    return np.pad(weights, pads)


_DENSE = apply(FullyConnected, X, WEIGHTS, alone=True)
_SHIFTED = apply(ScaleShift, _DENSE, PARAMETERS, alone=True)
_RESULTS = apply(Clip, _SHIFTED)


def dense_results_of(multiple: int) -> Callable[[Graph], Graph]:
    """A rewrite: a scale-shifted dense layer whose results are no multiple of so many gets results of zero, which are
    cut off again. Exact."""

    def widened(at: RuleMatch) -> str:
        count, shape = at.type(_DENSE).shape[-1], at.type(at.root.output).shape

        def longer(name: str, last: bool) -> str:
            """The constant with more rows: like its last, or of zeros."""
            array = at.array(name)
            array = array if len(array) > 1 else np.repeat(array, count, axis=0)
            more = np.repeat(array[-1:] if last else np.zeros_like(array[-1:]), -count % multiple, axis=0)
            return at.constant(np.concatenate([array, more]), at.type(name).dtype, name)

        wide = at.add(at[_DENSE], X, longer(at[WEIGHTS], last=False), like=_DENSE)
        parameters = [longer(name, last=True) for name in at.others(_SHIFTED)]
        clipped = at.add(at[_RESULTS], at.add(ScaleShift(), wide, *parameters, like=_SHIFTED))
        return at.add(Slice((0,) * len(shape), shape, (1,) * len(shape)), clipped)

    def is_odd(at: RuleMatch) -> bool:
        return at.type(_DENSE).shape[-1] % multiple != 0 and at.knows(_SHIFTED)

    return rewriting(Rule(_RESULTS, widened, (is_odd,)))


def narrow_weights(types: Collection[DType] = (DType.INT2, DType.INT4)) -> Callable[[Graph], Graph]:
    """A rewrite that gives constant weights of layers the first of `types` whose range their values keep within.

    Files hold narrow weights in wider types where their format or its readers have none (a 2-bit one in ONNX).
    """

    def rewrite(graph: Graph) -> Graph:
        kinds = dict(graph.types)
        for name in _weights_only(graph):
            array, kind = graph.constants[name], graph.types[name]
            low, high = int(array.min()), int(array.max())
            for dtype in types:
                if dtype.bits < kind.dtype.bits and kind.dtype.signed and dtype.low <= low and high <= dtype.high:
                    kinds[name] = TensorType(kind.shape, dtype)
                    break
        return replace(graph, types=kinds)

    return rewrite


def _weights_only(graph: Graph) -> list[str]:
    """Constant integer weights that nothing but layers reads."""
    users = graph.users()

    def weighs(node: Node, name: str) -> bool:
        return node.operator.weight_axis is not None and node.inputs[1] == name and node.inputs.count(name) == 1

    integers = (name for name, array in graph.constants.items() if array.size and graph.types[name].dtype.is_integer)
    kept = (name for name in integers if name not in graph.outputs and users[name])
    return [name for name in kept if all(weighs(node, name) for node in users[name])]
