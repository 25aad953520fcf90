"""The quantize stage: from a QDQ graph, which means floats, to integers, every rounding spelled out.

Every `Quantize(op(Dequantize(...)))` becomes explicit integer operators.

The walk: each Quantize node asks for its float operand "as integers of this quantisation". Movement, maximum
pools and clamps pass the question on; an arithmetic operator answers it by its rule (`rules.RULES`); a
Dequantize answers it with the integers it stands on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize, Requantize, Rounding
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare
from dovetail.ir.operators.movement import Pad, Reshape, Transpose
from dovetail.ir.operators.reduction import ArgExtreme, Normalise
from dovetail.ir.rewrite import run
from dovetail.ir.types import Array, DType
from dovetail.quantize.cells import reads_cells
from dovetail.quantize.context import Bounds, Emitter, QuantisationRequest, QuantisedValue, QuantParameters
from dovetail.quantize.factors import factor_into_softmax
from dovetail.quantize.linear import fold_into_scales, moved_constant, scaled_afterwards
from dovetail.quantize.rules import RULES, compare, requantize, standardise

HINT = (
    "quantise the model first, with dovetail quantize or the framework's own post-training quantisation to int8; "
    "or let the core compute in float32: dovetail compile --float"
)


def quantize(graph: Graph, rounding: Rounding = Rounding.DOUBLE, allow_float: bool = False) -> Graph:
    """The integer graph of a graph in QDQ form; values keep the names of the QDQ graph's integers.

    Args:
        graph: operators compute on floats, each between Dequantize and Quantize.
        rounding: of every fixed-point product; DOUBLE is TFLite Micro's, SINGLE is TOSA's and XNNPACK's.
            (64-bit accumulators of int16 activations always use WIDE, TFLite's only rule for them.)
        allow_float: what has no integer form stays as it is, to be computed in float32 on the core.

    Returns:
        A graph of integer operators. A float input keeps a Quantize behind it, a float output a Dequantize before it.
        With `allow_float` float operators may be among them.

    Raises:
        ModelError: an operator computes on floats that are not quantised; it is named, with what to do.
    """
    quantised = any(node.operator.quantises or node.operator.dequantises for node in graph.nodes)
    as_given = any(node.operator.as_given for node in graph.nodes)
    if not quantised and not allow_float:
        for node in graph.nodes:
            if graph.types[node.output].dtype is DType.FLOAT32 and not (as_given and _stays(node)):
                raise ModelError(
                    f"the model is not quantised: {_kind(node)} computes on float values", where=_place(node), hint=HINT
                )
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):  # scales as odd as they may be
        return _Lowering(run(graph, (fold_into_scales, factor_into_softmax)), rounding, allow_float).run()


def _kind(node: Node) -> str:
    return type(node.operator).__name__


def _stays(node: Node) -> bool:
    """True for what is as it is on floats: it computes on what it is given, or only moves elements."""
    return node.operator.as_given or bool(node.operator.chosen_from(node.inputs))


def _place(node: Node) -> str:
    return node.origin or node.output


@dataclass
class _Lowering:
    graph: Graph
    rounding: Rounding
    allow_float: bool

    def __post_init__(self) -> None:
        self.emitter = Emitter(GraphBuilder(self.graph.name), frozenset(self.graph.types), self.rounding)
        self.producers = self.graph.producers()
        self.names: dict[str, str] = {}
        """New name of each integer value, and of the graph's inputs."""
        self.views: dict[str, QuantisedValue | None] = {}
        self.answers: dict[tuple[str, QuantParameters, Bounds], str] = {}
        self.reals: dict[str, str] = {}
        """New name of each float value that is computed as such."""
        self.as_given = any(node.operator.as_given for node in self.graph.nodes)

    def run(self) -> Graph:
        builder = self.emitter.builder
        for name in self.graph.inputs:
            self.names[name] = builder.input(name, self.graph.types[name])
        for node in self.graph.nodes:
            self.emitter.origin = node.origin
            if node.operator.quantises:
                self.names[node.output] = self._lower(node)
            elif self.graph.types[node.output].dtype is not DType.FLOAT32:
                if isinstance(node.operator, Compare) and self._compared(node, node.operator):
                    continue
                inputs = [self._integer_operand(node, name) for name in node.inputs]
                self.emitter.origin = node.origin
                self.names[node.output] = self.emitter.add(node.operator, inputs, node.output)
        return builder.finish([self._output(name) for name in self.graph.outputs], self.graph.states)

    def _compared(self, node: Node, operator: Compare) -> bool:
        """True when both operands stand for quantised values: then their integers are compared."""
        views = [self._view(name, "") for name in node.inputs]
        values = [view for view in views if view is not None and view.per_tensor]
        if len(values) == len(views):
            self.names[node.output] = compare(
                QuantisationRequest(self.emitter, operator, values, values[0].form, Bounds(), node.output)
            )
        return len(values) == len(views)

    def _lower(self, node: Node) -> str:
        """The integers a Quantize node gives."""
        if self.allow_float and self.graph.types[node.inputs[1]].shape != (1,) and not self._is_static(node.inputs[0]):
            operands = [self._real(node.inputs[0]), *(self._integer(name) for name in node.inputs[1:])]
            return self.emitter.add(node.operator, operands, node.output)
        target = self._target(node)
        answer = self._answer(node.inputs[0], target, Bounds(), node.output)
        if node.output in self.graph.outputs and answer != node.output:
            shape = self.graph.types[node.output].shape
            return self.emitter.add(Reshape(shape), [answer], node.output)
        return answer

    def _is_static(self, value: str) -> bool:
        """True for a constant and what stands on one alone."""
        node = self.producers.get(value)
        return value in self.graph.constants or (node is not None and all(map(self._is_static, node.inputs)))

    def _target(self, node: Node) -> QuantParameters:
        scale, zero_point = (self._parameter(node, name) for name in node.inputs[1:])
        if scale.size != 1:
            what = f"the result {node.output} is quantised per channel ({scale.size} scales); only weights may be"
            raise ModelError(what, where=_place(node), hint="quantise activations per tensor")
        return QuantParameters(
            self.graph.types[node.output].dtype, float(scale.reshape(-1)[0]), int(zero_point.reshape(-1)[0])
        )

    def _parameter(self, node: Node, name: str) -> Array:
        array = self.graph.constants.get(name)
        if array is None:
            hint = "export the model with constant scales and zero points"
            raise ModelError(f"the quantisation parameter {name} is not a constant", where=_place(node), hint=hint)
        return array

    def _integer(self, name: str) -> str:
        """The new name of an integer value or constant of the QDQ graph."""
        if name not in self.names:
            array = self.graph.constants[name]
            self.names[name] = self.emitter.builder.constant(name, array, self.graph.types[name].dtype)
        return self.names[name]

    def _answer(self, value: str, target: QuantParameters, bounds: Bounds, stem: str) -> str:
        """The float value as integers of `target`, within `bounds`; the result is named `stem` where it is new."""
        key = (value, target, bounds)
        if key not in self.answers:
            self.answers[key] = self._compute(value, target, bounds, stem)
        return self.answers[key]

    def _compute(self, value: str, target: QuantParameters, bounds: Bounds, stem: str) -> str:
        node = self.producers.get(value)
        if value in self.graph.constants:
            array = np.clip(self.graph.constants[value], bounds.low, bounds.high)
            return self.emitter.builder.constant(stem, target.quantize(array), target.dtype)
        if node is None:
            return self._border(value, target, bounds, stem)
        if isinstance(node.operator, Clamp):
            return self._answer(node.inputs[0], target, bounds.within(node.operator.low, node.operator.high), stem)
        named = bounds.open and self._source(value) == target
        view = self._view(value, stem if named else "")
        if view is not None:
            return requantize(QuantisationRequest(self.emitter, Requantize(), [view], target, bounds, stem))
        self.emitter.origin = node.origin
        if node.operator.chosen_from(node.inputs):
            parts = [self._part(name, target, bounds, stem) for name in node.inputs]
            return self.emitter.add(self._on_integers(node.operator, target, bounds), parts, stem)
        return self._arithmetic(node, target, bounds, stem)

    def _part(self, name: str, target: QuantParameters, bounds: Bounds, stem: str) -> str:
        """An operand of an operator that keeps values: a float one as integers of `target`, places as they are."""
        if self.graph.types[name].dtype is not DType.FLOAT32:
            return self._integer(name)
        return self._answer(name, target, bounds, self.emitter.fresh(f"{stem}_part"))

    def _arithmetic(self, node: Node, target: QuantParameters, bounds: Bounds, stem: str) -> str:
        try:
            answer = self._normalised(node, target, bounds, stem)
        except ValueError:  # rows too long
            answer = None
        if answer is not None:
            return answer
        rule = RULES.get(type(node.operator)) if not reads_cells(self.graph, node) else None
        operands = [self._operand(name) for name in self._terms(node)]
        found = [operand for operand in operands if operand is not None]
        if rule is None or len(found) < len(operands):
            if self.allow_float or self._may_be_real(node.output):
                return self._border(self._real(node.output), target, bounds, stem)
            raise self._float_between(node)
        try:
            return rule(QuantisationRequest(self.emitter, node.operator, found, target, bounds, stem))
        except (ModelError, ValueError) as error:  # a type rule may refuse what a rule makes: rows too long, say
            if self.allow_float:
                return self._border(self._real(node.output), target, bounds, stem)
            if isinstance(error, ModelError):
                raise ModelError(error.what, where=error.where or _place(node), hint=error.hint) from error
            raise ModelError(str(error), where=_place(node), hint=HINT) from error

    def _scaled_rows(self, node: Node) -> tuple[Node, Normalise, Array, Array] | None:
        """The layer normalisation that a node scales and moves by constants along its last axis, with their product and
        sum: what ONNX and Keras have as one operator."""
        size = self.graph.types[node.output].shape[-1:]
        factor, offset = np.ones(1), np.zeros(1)
        while not isinstance(node.operator, Normalise):
            kind = node.operator.kind if isinstance(node.operator, Binary) else BinaryKind.ADD
            arrays = [self._known_real(name) for name in node.inputs]
            if isinstance(node.operator, Reshape) and self.graph.types[node.inputs[0]].shape[-1:] == size:
                arrays, kind = [None, np.zeros(1)], BinaryKind.ADD
            elif not isinstance(node.operator, Add | Binary) or [a is None for a in arrays].count(True) != 1:
                return None
            array = next(array for array in arrays if array is not None)
            place = next(place for place, found in enumerate(arrays) if found is None)
            row = array.reshape(-1).astype(np.float64)
            inner = self.producers.get(node.inputs[place])
            if inner is None or array.size not in (1, *array.shape[-1:]) or row.size not in (1, *size):
                return None
            if kind is BinaryKind.MULTIPLY:
                factor = factor * row
            elif kind is BinaryKind.ADD or (kind is BinaryKind.SUBTRACT and place == 0):
                offset = offset + factor * (row if kind is BinaryKind.ADD else -row)
            else:
                return None
            node = inner
        return None if node.operator.summed else (node, node.operator, factor, offset)

    def _known_real(self, name: str) -> Array | None:
        """A float constant, as it is or as constant integers stand for it."""
        if name in self.graph.constants:
            return self.graph.constants[name]
        node = self.producers.get(name)
        if node is None or not node.operator.dequantises or node.inputs[0] not in self.graph.constants:
            return None
        return node.operator.evaluate([self.graph.constants[value] for value in node.inputs])

    def _normalised(self, node: Node, target: QuantParameters, bounds: Bounds, stem: str) -> str | None:
        """The answer for a layer normalisation with its factor and offset; None where it is none or not of integers."""
        found = self._scaled_rows(node)
        x = self._view(found[0].inputs[0], "") if found else None
        if found is None or x is None or not x.per_tensor:
            return None
        shape = self.graph.types[node.output].shape
        ask = QuantisationRequest(self.emitter, found[1], [x], target, bounds, stem)
        if x.kind.shape == shape:
            return standardise(ask, *found[2:])
        rows = standardise(replace(ask, stem=self.emitter.fresh(f"{stem}_rows")), *found[2:])
        return self.emitter.add(Reshape(shape), [rows], stem)

    def _terms(self, node: Node) -> list[str]:
        """The node's operands; of a sum of sums, which rounds nothing in between, all terms."""
        terms = []
        for name in node.inputs:
            inner = self.producers.get(name)
            sum_of_sums = isinstance(node.operator, Add) and inner is not None and isinstance(inner.operator, Add)
            terms += self._terms(inner) if sum_of_sums and inner is not None else [name]
        return terms

    def _operand(self, name: str) -> QuantisedValue | Array | None:
        """An operand as quantised integers or as a float constant; None when it is a float of run time."""
        view = self._view(name, "")
        return view if view is not None else self.graph.constants.get(name)

    def _border(self, value: str, target: QuantParameters, bounds: Bounds, stem: str) -> str:
        """A float value of the new graph (an input of the network, or computed in float), quantised on the core."""
        operands = [
            value,
            self.emitter.constant(f"{stem}_scale", np.array([target.scale], np.float32)),
            self.emitter.constant(f"{stem}_zero_point", np.array([target.zero_point], np.int32)),
        ]
        if bounds.open:
            return self.emitter.add(Quantize(target.dtype), operands, stem)
        ask = QuantisationRequest(self.emitter, Quantize(target.dtype), (), target, bounds, stem)
        return ask.clip(ask.add(ask.operator, operands, "unlimited"))

    def _integer_operand(self, node: Node, name: str) -> str:
        """An operand of a node with an integer result: integers, those a float stands for, or the float itself."""
        if self.graph.types[name].dtype is not DType.FLOAT32:
            return self._integer(name)
        view = self._view(name, "") if isinstance(node.operator, ArgExtreme) else None
        if view is not None and view.per_tensor:
            return view.name
        if not (self.allow_float or (node.operator.as_given and self._may_be_real(name))):
            raise self._float_between(node)
        return self._real(name)

    def _may_be_real(self, value: str) -> bool:
        """True for a float that is one without computing on floats, but for operators that compute on what they are
        given, in a network that has such; raises ModelError where one of those is given floats that something else
        computes."""
        if not self.as_given:
            return False
        node = self.producers.get(value)
        if node is None or node.operator.dequantises or self.graph.types[value].dtype is not DType.FLOAT32:
            return True
        if node.operator.as_given:
            bad = next((name for name in node.inputs if not self._may_be_real(name)), None)
            if bad is not None:
                raise self._float_between(self.producers[bad])
            return True
        chosen = node.operator.chosen_from(node.inputs)
        return bool(chosen) and all(map(self._may_be_real, chosen))

    def _real(self, value: str) -> str:
        """The name of a float value in the new graph, where it is computed in float."""
        wanted = {value}
        for node in reversed(self.graph.nodes):
            if node.output in wanted and node.output not in self.reals and not node.operator.dequantises:
                read = node.inputs if self._integer_weights(node) is None else (node.inputs[0], *node.inputs[2:])
                wanted.update(name for name in read if self.graph.types[name].dtype is DType.FLOAT32)
        for node in self.graph.nodes:
            if node.output in wanted and node.output not in self.reals:
                self.emitter.origin = node.origin
                self.reals[node.output] = self._computed(node)
        return self.reals.get(value) or self._integer(value)

    def _computed(self, node: Node) -> str:
        """A float node of the new graph, its operands being there."""
        weights = self._integer_weights(node)
        read = node.inputs if weights is None else (node.inputs[0], *node.inputs[2:])
        operands = [self.reals.get(name) or self._integer(name) for name in read]
        if weights is None:
            return self.emitter.add(node.operator, operands, node.output)
        return scaled_afterwards(self.emitter, node.operator, operands, weights, node.output)

    def _integer_weights(self, node: Node) -> QuantisedValue | None:
        """The integers that a float layer's constant weights stand for, where its sums can be scaled instead."""
        axis = node.operator.weight_axis
        if axis is None:
            return None
        view = self._view(node.inputs[1], "")
        if view is None or view.array is None or view.zero_point.any() or view.kind.dtype.bits > 8:
            return None
        return view if view.per_tensor or view.axis == axis else None

    def _view(self, value: str, stem: str) -> QuantisedValue | None:
        """The integers a float value stands for without any arithmetic, None if there are none."""
        if value not in self.views:
            node = self.producers.get(value)
            self.views[value] = self._find_view(node, stem) if node is not None else None
        return self.views[value]

    def _source(self, value: str) -> QuantParameters | None:
        """The quantisation of the integers that movement operators bring to a float value, where it has any."""
        node = self.producers.get(value)
        while node is not None and (chosen := node.operator.chosen_from(node.inputs)):
            node = self.producers.get(chosen[0])
        if node is None or not isinstance(node.operator, Dequantize):
            return None
        view = self._dequantized(node, node.operator)
        return view.form if view.per_tensor else None

    def _find_view(self, node: Node, stem: str) -> QuantisedValue | None:
        operator = node.operator
        if isinstance(operator, Dequantize):
            return self._dequantized(node, operator)
        chosen = operator.chosen_from(node.inputs)
        parts = [self._view(name, "") for name in chosen]
        first = parts[0] if parts else None
        if first is None or any(part is None or not part.same_steps(first) for part in parts):
            return None
        if not first.per_tensor and len(parts) == 1 and first.array is not None:
            return moved_constant(self.emitter, operator, first, stem)
        axis = first.axis
        if not first.per_tensor:
            if not isinstance(operator, Transpose):
                return None
            axis = operator.permutation.index(first.axis)
        moved = self._on_integers(operator, first.form, Bounds())
        found = {name: part.name for name, part in zip(chosen, parts, strict=True) if part is not None}
        names = [found.get(name) or self._integer(name) for name in node.inputs]
        result = self.emitter.add(moved, names, stem or self.emitter.fresh(f"{first.name}_moved"))
        kind, array = self.emitter.builder.type_of(result), self.emitter.builder.constant_of(result)
        return replace(first, name=result, kind=kind, axis=axis, array=array)

    def _dequantized(self, node: Node, operator: Dequantize) -> QuantisedValue:
        source = node.inputs[0]
        scale, zero_point = (self._parameter(node, name) for name in node.inputs[1:])
        kind = self.graph.types[source]
        name = self._integer(source)
        axis = operator.axis % max(len(kind.shape), 1)
        array = self.emitter.builder.constant_of(name)
        return QuantisedValue(name, kind, scale.reshape(-1), zero_point.reshape(-1).astype(np.int64), axis, array)

    def _on_integers(self, operator: Operator, target: QuantParameters, bounds: Bounds) -> Operator:
        """A movement operator with its pad value as an integer."""
        if not isinstance(operator, Pad):
            return operator
        value = min(max(operator.value, bounds.low), bounds.high)
        return replace(operator, value=target.bound(value))

    def _output(self, name: str) -> str:
        if name in self.names:
            return self.names[name]
        node = self.producers.get(name)
        if node is None:
            what = f"the output {name} is a constant or an input of the model"
            raise ModelError(what, where=self.graph.name, hint="take this output out of the model, or export it again")
        view = self._view(name, "") if name not in self.reals else None
        if view is None and (self.allow_float or self._may_be_real(name)):
            return self._real(name)
        if view is None:
            raise self._float_between(node)
        self.emitter.origin = node.origin
        scale = self.emitter.constant(f"{name}_scale", view.scale)
        zero_point = self.emitter.constant(f"{name}_zero_point", view.zero_point.astype(np.int32))
        return self.emitter.add(Dequantize(view.axis), [view.name, scale, zero_point], name)

    def _float_between(self, node: Node) -> ModelError:
        """The complaint about a float computation; it names the first operator that lacks quantised operands."""
        first = self._first_float(node)
        if type(first.operator) not in (*RULES, Clamp) and not first.operator.chosen_from(first.inputs):
            what = f"{_kind(first)} has no integer form in Dovetail"
            return ModelError(what, where=_place(first), hint="take this operator out of the network")
        bare = [name for name in first.inputs if self._operand(name) is None]
        what = f"reads the float value {bare[0]}" if bare else f"gives the float value {first.output}"
        return ModelError(f"{_kind(first)} {what}, which is not quantised", where=_place(first), hint=HINT)

    def _first_float(self, node: Node) -> Node:
        for name in node.inputs:
            if self._operand(name) is None and name in self.producers:
                return self._first_float(self.producers[name])
        return node
