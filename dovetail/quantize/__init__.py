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
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize, Requantize, Rounding
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.pattern import apply, occurrence
from dovetail.ir.rewrite import run
from dovetail.ir.scaling import scaled_rows
from dovetail.ir.types import Array, DType
from dovetail.notes import Tell, silent
from dovetail.quantize.context import Bounds, Emitter, QuantisationRequest, QuantisedValue, QuantParameters
from dovetail.quantize.ends import integer_states
from dovetail.quantize.factors import factor_into_softmax
from dovetail.quantize.linear import fold_into_scales, moved_constant, scaled_afterwards
from dovetail.quantize.recurrent import reads_cells
from dovetail.quantize.rules import on_integers, requantize, rules_for, standardise, sum_of_products
from dovetail.quantize.tables import one_table

_DEQUANTIZE, _SUM = apply(Dequantize), apply(Add)
_ADDED = apply(Operator, having=lambda one: one in (Add(), Binary(BinaryKind.SUBTRACT)))
_TIMES = apply(Binary(BinaryKind.MULTIPLY))
HINT = (
    "quantise the model first, with dovetail quantize or the framework's own post-training quantisation to int8; "
    "or let the core compute in float32: dovetail compile --float"
)


def quantize(
    graph: Graph,
    rounding: Rounding = Rounding.DOUBLE,
    allow_float: bool = False,
    tell: Tell = silent,
) -> Graph:
    """The integer graph of a graph in QDQ form; values keep the names of the QDQ graph's integers.

    Args:
        graph: operators compute on floats, each between Dequantize and Quantize.
        rounding: of every fixed-point product; DOUBLE is TFLite Micro's, SINGLE is TOSA's and XNNPACK's.
            (64-bit accumulators of int16 activations always use WIDE, TFLite's only rule for them.)
        allow_float: what has no integer form stays as it is, to be computed in float32 on the core.
        tell: hears in sentences where the integers compute something else than the model says.

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
                what = f"the model is not quantised: {node.operator.class_name} computes on float values"
                raise ModelError(what, where=_place(node), hint=HINT)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):  # scales as odd as they may be
        graph = run(graph, (fold_into_scales, factor_into_softmax))
        return run(integer_states(_Lowering(graph, rounding, allow_float, tell).run()), (one_table,))


def _stays(node: Node) -> bool:
    """True for what is as it is on floats: it computes on what it is given, or only moves elements."""
    return node.operator.as_given or bool(node.operator.chosen_from(node.inputs))


def _place(node: Node) -> str:
    return node.origin or node.output


def _plain_floats(graph: Graph) -> frozenset[str]:
    """The floats that are there without computing on floats, but by operators that compute on what they are given; none
    in a network without such operators."""
    if not any(node.operator.as_given for node in graph.nodes):
        return frozenset()
    plain = {name for name, kind in graph.types.items() if kind.dtype is not DType.FLOAT32}
    plain |= {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        operator = node.operator
        read = node.inputs if operator.as_given else operator.chosen_from(node.inputs)
        if operator.dequantises or ((read or operator.as_given) and plain.issuperset(read)):
            plain.add(node.output)
    return frozenset(plain)


def _on_integers(operator: Operator, target: QuantParameters, bounds: Bounds) -> Operator:
    """A movement operator with the value it fills in as an integer."""
    fill = operator.filler
    return operator if fill is None else operator.with_filler(target.bound(min(max(fill, bounds.low), bounds.high)))


@dataclass
class _Lowering:
    graph: Graph
    rounding: Rounding
    allow_float: bool
    tell: Tell

    def __post_init__(self) -> None:
        builder = GraphBuilder(self.graph.name)
        self.emitter = Emitter(builder, frozenset(self.graph.types), self.rounding, tell=self.tell)
        self.producers = self.graph.producers()
        self.names: dict[str, str] = {}
        """New name of each integer value, and of the graph's inputs."""
        self.views: dict[str, QuantisedValue | None] = {}
        self.answers: dict[tuple[str, QuantParameters, Bounds], str] = {}
        self.reals: dict[str, str] = {}
        """New name of each float value that is computed as such."""
        self.plain = _plain_floats(self.graph)

    def run(self) -> Graph:
        builder = self.emitter.builder
        for name in self.graph.inputs:
            self.names[name] = builder.input(name, self.graph.types[name])
        for node in self.graph.nodes:
            self.emitter.origin = node.origin
            if node.operator.quantises:
                self.names[node.output] = self._lower(node)
            elif self.graph.types[node.output].dtype is not DType.FLOAT32:
                self.names[node.output] = self._whole(node)
        return builder.finish([self._output(name) for name in self.graph.outputs], self.graph.states)

    def _whole(self, node: Node) -> str:
        """The result of an operator that gives no floats: by its rule where all operands stand for quantised values."""
        views, rules = [self._view(name, "") for name in node.inputs], rules_for(node)
        values = [view for view in views if view is not None and view.per_tensor]
        if rules and len(values) == len(views):
            return on_integers(
                QuantisationRequest(self.emitter, node.operator, values, values[0].form, Bounds(), node.output), rules
            )
        inputs = [self._integer_operand(node, name) for name in node.inputs]
        self.emitter.origin = node.origin
        return self.emitter.add(node.operator, inputs, node.output)

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
        if clamp := node.operator.clamped_to:
            return self._answer(node.inputs[0], target, bounds.within(*clamp), stem)
        named = bounds.open and self._source(value) == target
        view = self._view(value, stem if named else "")
        if view is not None and self._fills(node, view):
            ask = QuantisationRequest(self.emitter, Requantize(), [view], target, bounds, stem)
            return requantize(ask, *ask.activations())
        self.emitter.origin = node.origin
        if node.operator.chosen_from(node.inputs):
            parts = [self._part(name, target, bounds, stem) for name in node.inputs]
            return self.emitter.add(_on_integers(node.operator, target, bounds), parts, stem)
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
        except ModelError:
            if not self.allow_float:
                raise
            answer = None
        if answer is not None:
            return answer
        if products := self._products(node):
            ask = QuantisationRequest(self.emitter, node.operator, (*products[0], *products[1]), target, bounds, stem)
            return sum_of_products(ask, products)
        rules = rules_for(node) if not reads_cells(self.graph, node) else []
        operands = [self._operand(name) for name in self._terms(node)]
        found = [operand for operand in operands if operand is not None]
        if not rules or len(found) < len(operands):
            if self.allow_float or node.output in self.plain:
                return self._border(self._real(node.output), target, bounds, stem)
            raise self._float_between(node)
        try:
            return on_integers(QuantisationRequest(self.emitter, node.operator, found, target, bounds, stem), rules)
        except (ModelError, ValueError) as error:  # a type rule may refuse what a rule makes: rows too long, say
            if self.allow_float:
                return self._border(self._real(node.output), target, bounds, stem)
            if isinstance(error, ModelError):
                raise ModelError(error.what, where=error.where or _place(node), hint=error.hint) from error
            raise ModelError(str(error), where=_place(node), hint=HINT) from error

    def _normalised(self, node: Node, target: QuantParameters, bounds: Bounds, stem: str) -> str | None:
        """The answer for a layer normalisation with its factor and offset; None where it is none or not of integers."""
        found = scaled_rows(self.graph, node)
        x = self._view(found[0], "") if found else None
        if found is None or x is None or not x.per_tensor:
            return None
        shape = self.graph.types[node.output].shape
        ask = QuantisationRequest(self.emitter, found[1], [x], target, bounds, stem)
        if x.kind.shape == shape:
            return standardise(ask, x, *found[2:])
        rows = standardise(replace(ask, stem=self.emitter.fresh(f"{stem}_rows")), x, *found[2:])
        return self.emitter.add(Reshape(shape), [rows], stem)

    def _products(self, node: Node) -> list[list[QuantisedValue]]:
        """The factors of two products of 8-bit values that are not quantised themselves and of which a node is the sum
        or the difference; empty where it is none."""
        made = [self.producers.get(name) for name in node.inputs] if _ADDED.fits(node) else []
        views = [[self._view(name, "") for name in one.inputs] for one in made if one and _TIMES.fits(one)]
        known = [[one for one in pair if one and one.per_tensor and one.kind.dtype.bits == 8] for pair in views]
        return known if [len(pair) for pair in known] == [2, 2] else []

    def _terms(self, node: Node) -> list[str]:
        """The node's operands; of a sum of sums, which rounds nothing in between, all terms."""
        terms = []
        for name in node.inputs:
            inner = self.producers.get(name)
            terms += self._terms(inner) if inner is not None and _SUM.fits(node) and _SUM.fits(inner) else [name]
        return terms

    def _operand(self, name: str) -> QuantisedValue | Array | None:
        """An operand as quantised integers or as a float constant; None when it is a float of run time. Computed
        integers stand for themselves."""
        kind = self.graph.types[name]
        if kind.dtype is not DType.FLOAT32 and name not in self.graph.constants:
            one, zero = np.ones(1, np.float32), np.zeros(1, np.int64)
            return QuantisedValue(self._integer(name), kind, one, zero, 0, None)
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
        if not (self.allow_float or (node.operator.as_given and name in self.plain)):
            raise self._float_between(node)
        return self._real(name)

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

    def _fills(self, node: Node, view: QuantisedValue) -> bool:
        """False where movement puts in a number that the operand's integers do not stand for."""
        moved: Node | None = node
        while moved is not None and (chosen := moved.operator.chosen_from(moved.inputs)):
            fill = moved.operator.filler
            if fill is not None and view.per_tensor:
                exact = fill / view.form.scale + view.form.zero_point
                if not abs(exact - view.form.bound(fill)) <= 1e-3:
                    return False
            moved = self.producers.get(chosen[0])
        return True

    def _source(self, value: str) -> QuantParameters | None:
        """The quantisation of the integers that movement operators bring to a float value, where it has any."""
        node = self.producers.get(value)
        while node is not None and (chosen := node.operator.chosen_from(node.inputs)):
            node = self.producers.get(chosen[0])
        view = self._dequantized(node) if node is not None else None
        return view.form if view is not None and view.per_tensor else None

    def _find_view(self, node: Node, stem: str) -> QuantisedValue | None:
        if (view := self._dequantized(node)) is not None:
            return view
        operator = node.operator
        chosen = operator.chosen_from(node.inputs)
        parts = [self._view(name, "") for name in chosen]
        first = parts[0] if parts else None
        if first is None or any(part is None or not part.same_steps(first) for part in parts):
            return None
        if not first.per_tensor and len(parts) == 1 and first.array is not None:
            return moved_constant(self.emitter, operator, first, stem)
        axis = first.axis if first.per_tensor else operator.axis_after(first.axis, [first.kind])
        if axis is None:
            return None
        moved = _on_integers(operator, first.form, Bounds())
        found = {name: part.name for name, part in zip(chosen, parts, strict=True) if part is not None}
        names = [found.get(name) or self._integer(name) for name in node.inputs]
        result = self.emitter.add(moved, names, stem or self.emitter.fresh(f"{first.name}_moved"))
        kind, array = self.emitter.builder.type_of(result), self.emitter.builder.constant_of(result)
        return replace(first, name=result, kind=kind, axis=axis, array=array)

    def _dequantized(self, node: Node) -> QuantisedValue | None:
        """The integers that a Dequantize stands on; None for another operator."""
        found = occurrence(_DEQUANTIZE, self.graph, node)
        if found is None:
            return None
        source = node.inputs[0]
        scale, zero_point = (self._parameter(node, name) for name in node.inputs[1:])
        kind = self.graph.types[source]
        name = self._integer(source)
        axis = found[_DEQUANTIZE].axis % max(len(kind.shape), 1)
        array = self.emitter.builder.constant_of(name)
        return QuantisedValue(name, kind, scale.reshape(-1), zero_point.reshape(-1).astype(np.int64), axis, array)

    def _output(self, name: str) -> str:
        if name in self.names:
            return self.names[name]
        node = self.producers.get(name)
        if node is None:
            what = f"the output {name} is a constant or an input of the model"
            raise ModelError(what, where=self.graph.name, hint="take this output out of the model, or export it again")
        view = self._view(name, "") if name not in self.reals else None
        if view is None and (self.allow_float or name in self.plain):
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
        operator = first.operator
        if not (rules_for(first) or operator.clamped_to or operator.chosen_from(first.inputs)):
            what = f"{operator.class_name} has no integer form in Dovetail"
            return ModelError(what, where=_place(first), hint="take this operator out of the network")
        bare = [name for name in first.inputs if self._operand(name) is None]
        what = f"reads the float value {bare[0]}" if bare else f"gives the float value {first.output}"
        return ModelError(f"{operator.class_name} {what}, which is not quantised", where=_place(first), hint=HINT)

    def _first_float(self, node: Node) -> Node:
        for name in node.inputs:
            if self._operand(name) is None and name in self.producers:
                return self._first_float(self.producers[name])
        return node
