"""A float graph made ready for quantisation: the floats that a quantised one stands for, composites gathered,
normalisation folded, divisions made products, channels evened out.

Every integer of a quantised network that stands for a real number becomes that number. What the integers' range cut
off stays where it is a limit the network was made with: a zero point at the lowest integer means that a ReLU was fused
into the rounding.

Cross-layer equalisation (arXiv:1906.04721, section 4.1) scales channels between two layers to even weight ranges. A
factor on a channel of the first layer passes through ReLU, borders of zeros, pools and reshapes, and is taken back by
the second layer's weights; the network computes the same floats.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, sqrt

import numpy as np

from dovetail.errors import ModelError
from dovetail.guests.ptq.attention import part_layers
from dovetail.guests.ptq.steps import Data, TensorQuantisation, infinite
from dovetail.ir.boundary import boundary
from dovetail.ir.graph import Graph, GraphBuilder, Node, renamed
from dovetail.ir.normalisation import NORMALISATION
from dovetail.ir.operators.activation import Clamp, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import Pool2d
from dovetail.ir.pattern import Apply, Leaf, Pattern, apply, constant, either, occurrence, rest
from dovetail.ir.rewrite import X, simplify
from dovetail.ir.rules import Rule, RuleMatch, run
from dovetail.ir.scaling import folding
from dovetail.ir.types import Array, DType, TensorType
from dovetail.quantize.factors import factor_into_softmax, factors_behind
from dovetail.records import Record

_PAD = apply(Pad)


def is_quantised(graph: Graph) -> bool:
    """Whether values, and not constants alone, are quantised."""
    return any(
        node.operator.quantises or (node.operator.dequantises and node.inputs[0] not in graph.constants)
        for node in graph.nodes
    )


def input_steps(graph: Graph) -> dict[str, TensorQuantisation]:
    """The quantisation of each quantised input, by its name."""
    kinds = {name: graph.types[name].dtype for name in graph.inputs}
    ends = boundary(graph).items()
    return {name: TensorQuantisation(kinds[name], one.scale, one.zero_point) for name, one in ends if name in kinds}


def unquantised(graph: Graph, saturates: bool = False) -> Graph:
    """The network on floats: no Quantize and no Dequantize is left.

    Args:
        graph: in QDQ form.
        saturates: whether all values stay limited to what their integers reach; else only from below where that is 0.

    Raises:
        ModelError: integers that stand for real numbers are computed with as such, by something that takes no floats.
    """
    rewriter = _FloatRewriter(graph, GraphBuilder(graph.name), saturates, input_steps(graph))
    for name in graph.inputs:
        kind = graph.types[name]
        real = TensorType(kind.shape, DType.FLOAT32) if name in rewriter.steps else kind
        rewriter.real[name] = rewriter.builder.input(name, real)
    for node in graph.nodes:
        rewriter.take(node)
    return rewriter.builder.finish([rewriter.value(name) for name in graph.outputs], graph.states)


@dataclass
class _FloatRewriter:
    graph: Graph
    builder: GraphBuilder
    saturates: bool
    steps: dict[str, TensorQuantisation]
    """Integer value -> what it stands for, where it is quantised."""
    real: dict[str, str] = field(default_factory=dict)
    """Value -> the new value: of integers that stand for real numbers, these."""

    def value(self, name: str) -> str:
        """The new value of an old one."""
        if name not in self.real:
            array, kind = self.graph.constants[name], self.graph.types[name]
            self.real[name] = self.builder.constant(name, array, kind.dtype)
        return self.real[name]

    def take(self, node: Node) -> None:
        """Add what a node means for floats."""
        operator, constants = node.operator, self.graph.constants
        if operator.dequantises:
            self.real[node.output] = self._dequantised(node)
        elif operator.quantises:
            self.real[node.output] = self._quantised(node)
        else:
            steps = next((self.steps[name] for name in node.inputs if name in self.steps), None)
            if steps is not None and (border := occurrence(_PAD, self.graph, node)) is not None:
                operator = replace(border[_PAD], value=steps.real(border[_PAD].value))
            try:
                inputs = [self.value(name) for name in node.inputs]
                self.real[node.output] = self.builder.add(operator, inputs, node.output, node.origin)
            except ValueError as error:
                hint = "give the float model"
                raise ModelError(f"its integers cannot be computed: {error}", where=node.origin, hint=hint) from None
            if steps is not None and all(name in self.steps or name in constants for name in node.inputs):
                self.steps[node.output] = steps

    def _dequantised(self, node: Node) -> str:
        if all(name in self.graph.constants for name in node.inputs):
            array = node.operator.evaluate([self.graph.constants[name] for name in node.inputs])
            return self.builder.constant(node.output, array.astype(np.float32))
        return self.value(node.inputs[0])

    def _quantised(self, node: Node) -> str:
        scale, zero = (self.graph.constants[name].reshape(-1) for name in node.inputs[1:])
        steps = TensorQuantisation(self.graph.types[node.output].dtype, float(scale[0]), int(zero[0]))
        self.steps[node.output] = steps
        value = self.value(node.inputs[0])
        low, high = steps.real(steps.dtype.low), steps.real(steps.dtype.high)
        if self.saturates:
            return self.builder.add(Clamp(low, high), [value], node.output, node.origin)
        if steps.zero_point != steps.dtype.low or self.builder.constant_of(value) is not None:
            return value
        return self.builder.add(Clamp(0.0, inf), [value], node.output, node.origin)


def as_reals(array: Array, steps: TensorQuantisation | None) -> Array:
    """Samples of an input: integers of the quantised input as the numbers they stand for; others as they are."""
    fits = steps is not None and array.dtype.kind in "iu" and array.dtype == steps.dtype.numpy
    return (array.astype(np.float64) - steps.zero_point) * steps.scale if fits and steps is not None else array


_NEAR = 1e-4
"""Relative difference of a constant from the one it stands for: exporters write few digits."""


def _product(left: Pattern, right: Pattern, alone: bool = False) -> Apply[Binary]:
    return apply(Binary(BinaryKind.MULTIPLY), left, right, commutes=True, alone=alone)


def _is(at: RuleMatch, leaf: Leaf, number: float) -> bool:
    """Whether a constant is one number, or near it."""
    return at.type(leaf).elements == 1 and bool(np.isclose(at.array(leaf).reshape(-1)[0], number, rtol=_NEAR))


_HALF, _ONE, _ROOT, _INVERSE = map(constant, ("half", "one", "root", "inverse"))
_LESS = either(apply(Binary(BinaryKind.DIVIDE), X, _ROOT), _product(X, _INVERSE))
_RAISED = apply(Add(), apply(Unary(UnaryKind.ERROR_FUNCTION), _LESS), _ONE, commutes=True)


def _is_gelu(at: RuleMatch) -> bool:
    scaled = _is(at, _ROOT, sqrt(2)) if _ROOT in at.values else _is(at, _INVERSE, 1 / sqrt(2))
    return scaled and _is(at, _ONE, 1.0) and _is(at, _HALF, 0.5)


GELU = tuple(
    Rule(product, lambda at: at.add(Unary(UnaryKind.GELU), X), (_is_gelu,))
    for product in (
        _product(_product(X, _RAISED, alone=True), _HALF),
        _product(_product(_RAISED, _HALF, alone=True), X),
        _product(_product(X, _HALF, alone=True), _RAISED),
    )
)
"""x * (1 + erf(x / sqrt(2))) / 2, its products in any order, is a Gelu."""

_PASSING = (
    apply(Clamp, having=lambda clamp: clamp.low in (0.0, -inf) and clamp.high == inf),
    apply(Pad, having=lambda pad: pad.value == 0 and pad.before[-1] == pad.after[-1] == 0),
    apply(Pool2d),
)
"""Operators that a positive factor per channel passes through."""
_REORDERED = ("_nhwc", "_ohwi")
"""Endings the ONNX frontend adds to the names of images and weights in the graph's order."""


def prepare(graph: Graph, file_name: str) -> Graph:
    """The float graph of a model, simplified and folded, its weights checked; of a quantised one what its integers
    stand for. Raises ModelError where a constant holds NaN or infinity, or integers are computed with as such."""
    graph = unquantised(graph) if is_quantised(graph) else graph
    graph = own_names(run(simplify(graph), (_REAL_CONSTANTS,)))
    for name, array in graph.constants.items():
        if bad := infinite(array):
            what = f"the constant '{name}' holds {bad} values that are NaN or infinite"
            raise ModelError(what, where=file_name, hint="train or export the model again")
    graph = simplify(run(run(graph, (*NORMALISATION, *GELU)), (_RECIPROCAL, *_FOLDED)))
    return own_names(simplify(run(part_layers(graph), (*factors_behind, factor_into_softmax))))


def own_names(graph: Graph) -> Graph:
    """The graph with the names of the model, without what the frontend adds to values it has in another order."""
    names: dict[str, str] = {}
    for name in graph.types:
        own = next((name.removesuffix(suffix) for suffix in _REORDERED if name.endswith(suffix)), name)
        if own not in graph.types and own not in names.values() and name not in (*graph.inputs, *graph.outputs):
            names[name] = own
    return renamed(graph, names)


def along(values: Array, rank: int, axis: int) -> Array:
    """A row of values as an array of `rank` axes that runs along one of them."""
    shape = [1] * rank
    shape[axis] = values.size
    return values.reshape(shape)


_COARSE = apply(Operator, rest("integers", known=True), having=lambda operator: operator.dequantises)
_REAL_CONSTANTS = Rule(
    _COARSE,
    lambda at: at.constant(at[_COARSE].evaluate([at.array(name) for name in at.root.inputs]), DType.FLOAT32),
)
"""Weights of a network of which nothing else is quantised: the numbers their integers stand for."""

_DIVISOR = constant("divisor")
_RECIPROCAL = Rule(
    apply(Binary(BinaryKind.DIVIDE), X, _DIVISOR),
    lambda at: at.add(
        Binary(BinaryKind.MULTIPLY),
        X,
        at.constant((1 / at.array(_DIVISOR).astype(np.float64)).astype(np.float32), DType.FLOAT32, _DIVISOR),
    ),
    (lambda at: at.array(_DIVISOR).dtype == np.float32 and bool(at.array(_DIVISOR).all()),),
)
"""A division by a constant is a product, which has an integer form."""


_FOLDED = (folding(), folding(first=False))
"""A scale (and an offset) per channel behind a layer with weights, batch normalisation that is, goes into the layer."""


ROUNDS = 20
"""Most passes over all pairs."""
ENOUGH = 1e-3
"""A pass that changes no factor by more than this share is the last."""
MOST_FACTOR = 1e3
"""The largest factor, and its inverse the smallest."""


class Pair(Record):
    """Two layers, the second of which reads nothing but the first's channels."""

    first: Node
    second: Node
    between: tuple[str, ...]
    """Values from the first's result to the second's operand."""


def pairs(graph: Graph) -> tuple[Pair, ...]:
    """Every two layers whose channels may be scaled."""
    users = graph.users()
    every = []
    for node in graph.nodes:
        if not _constant_layer(graph, node):
            continue
        value, between = node.output, [node.output]
        while len(users[value]) == 1 and value not in graph.outputs:
            (reader,) = users[value]
            if _constant_layer(graph, reader) and reader.inputs[0] == value:
                sizes = [graph.types[name].shape[-1] for name in reader.inputs[:2]]
                if not reader.operator.is_channelwise or sizes[0] == sizes[1]:
                    every.append(Pair(node, reader, tuple(between)))
                break
            if not _passes(graph, reader):
                break
            value = reader.output
            between.append(value)
    return tuple(every)


def _constant_layer(graph: Graph, node: Node) -> bool:
    if node.operator.weight_axis is None or any(name not in graph.constants for name in node.inputs[1:]):
        return False
    weights = graph.types[node.inputs[1]].shape
    dense = len(weights) == 2 or node.operator.is_channelwise
    return dense or graph.types[node.inputs[0]].shape[-1] // weights[-1] == 1  # one group


def _passes(graph: Graph, node: Node) -> bool:
    """Whether f(s * x) = s * f(x) for every positive s per channel, and channels stay innermost."""
    operator, before, after = node.operator, graph.types[node.inputs[0]].shape, graph.types[node.output].shape
    if operator.is_view:
        return len(before) > 1 and after[0] == before[0] == 1 and after[-1] % before[-1] == 0
    return any(pattern.fits(node) for pattern in _PASSING)


def equalise(graph: Graph) -> tuple[Graph, Data]:
    """The graph with equalised weights, and the factor [C] each value between layers was multiplied with."""
    constants = {name: array.astype(np.float64) for name, array in graph.constants.items() if array.dtype == np.float32}
    users, own = graph.users(), []
    for pair in pairs(graph):
        if all(len(users[name]) == 1 for name in (*pair.first.inputs[1:], pair.second.inputs[1])):
            own.append(pair)
    total: dict[str, Array] = {}
    for _ in range(ROUNDS):
        largest = 0.0
        for pair in own:
            factor = _factor(graph, pair, constants)
            _scale(pair, factor, constants)
            total[pair.first.output] = total.get(pair.first.output, 1.0) * factor
            largest = max(largest, float(np.abs(np.log(factor)).max()))
        if largest < ENOUGH:
            break
    new = {**graph.constants, **{name: array.astype(np.float32) for name, array in constants.items()}}
    rows = {name: total[pair.first.output] for pair in own for name in pair.between}
    sizes = {name: graph.types[name].shape[-1] for name in rows}
    factors = {name: np.tile(row, sizes[name] // row.size).astype(np.float32) for name, row in rows.items()}
    return replace(graph, constants=new), factors


def _factor(graph: Graph, pair: Pair, constants: Data) -> Array:
    """The factor of each channel between: sqrt(range of the second / range of the first). Layers read along the last
    axis of their weights."""
    channels = graph.types[pair.first.output].shape[-1]
    first, second = (constants[node.inputs[1]] for node in (pair.first, pair.second))
    one = np.abs(np.moveaxis(first, pair.first.operator.weight_axis or 0, 0).reshape(channels, -1)).max(axis=1)
    two = np.abs(second.reshape(-1, channels)).max(axis=0)
    usable = (one > 0) & (two > 0)
    factor = np.sqrt(np.where(usable, two, 1.0) / np.where(usable, one, 1.0))
    return np.clip(np.where(usable, factor, 1.0), 1 / MOST_FACTOR, MOST_FACTOR)


def _scale(pair: Pair, factor: Array, constants: dict[str, Array]) -> None:
    """Multiply the first layer's channels, divide what the second reads."""
    name, *bias = pair.first.inputs[1:]
    weights, second = constants[name], constants[pair.second.inputs[1]]
    constants[name] = weights * along(factor, weights.ndim, pair.first.operator.weight_axis or 0)
    constants.update({one: constants[one] * factor for one in bias})
    constants[pair.second.inputs[1]] = second / np.tile(factor, second.shape[-1] // factor.size)
