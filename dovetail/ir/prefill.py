"""Several steps of a network with states in one inference, as one graph that is made from the graph of a step.

A step writes a row of each state at a place, and attends to the places up to that one. Steps at places that follow one
another can so be computed side by side: all rows are written first, and no step attends to the rows of those behind it.
What only the results of a step need is computed for the last one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, GraphBuilder, Node, evaluate, verify
from dovetail.ir.operators.elementwise import Compare, CompareKind
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Concat, Gather, Reshape, Slice, Transpose
from dovetail.ir.operators.sequence import Attention, FixedAttention, WriteRow
from dovetail.ir.pattern import apply, occurrence
from dovetail.ir.types import Array, Shape

_WRITES, _ATTENDS, _MOVES = apply(WriteRow), apply((Attention, FixedAttention)), apply((Transpose, Slice, Concat))
_DENSE, _AXES, _PART, _JOINT = apply(FullyConnected), apply(Transpose), apply(Slice), apply(Concat)


def prefilled(graph: Graph, count: int) -> Graph:
    """The graph of `count` steps in one inference, with the states of one step. Exact where each step is at the place
    behind that of the step before.

    Inputs have an axis of `count` steps in the place of a first axis of one element, or else before all; outputs are
    those of the last step.

    Args:
        graph: of one step.
        count: at least 2.

    Raises:
        ModelError: it has no states, or one of them, or an operator, is not of the kind that allows it.
    """
    if not graph.states:
        raise _refused(graph, "the network keeps nothing from one step to the next")
    place, places = place_of(graph)
    if not 1 < count <= places:
        raise _refused(graph, f"{count} are asked for, and its states have {places} places; at least 2 are several")
    _check_order(graph, place)
    needed = {written for _, written, _ in graph.kept}
    for node in reversed(graph.nodes):
        needed |= set(node.inputs) if node.output in needed else set()
    builder = GraphBuilder(f"{graph.name}_prefill")
    steps = _SeveralSteps(graph, count, builder)
    for name in graph.given:
        kind = graph.types[name]
        steps.stacked[name] = builder.input(name, replace(kind, shape=steps.shape(kind.shape)))
    for name, array in graph.constants.items():
        builder.constant(name, array, graph.types[name].dtype)
    for read, _, first in graph.kept:
        builder.state(read, first, graph.types[read].dtype)
    for node in graph.nodes:
        steps.add_all(node) if node.output in needed else steps.add_last(node)
    for read, written, _ in graph.kept:
        builder.replace_state(read, steps.single[written])
    found = builder.finish([steps.last(name) for name in graph.results])
    verify(found)
    return found


def place_of(graph: Graph) -> tuple[str, int]:
    """The input that is the place of a step's rows, and how many places there are; raises ModelError where there is no
    such input."""
    writers = [_writer(graph, read, written) for read, written, _ in graph.kept]
    places = {_source(graph, node.inputs[2]) for node in writers}
    if len(places) != 1 or (place := places.pop()) not in graph.given:
        raise _refused(graph, "its rows are not all written at one place that is an input")
    return place, min(graph.types[node.output].shape[_axis(graph, node)] for node in writers)


def _axis(graph: Graph, node: Node) -> int:
    """The axis of places of a node that writes rows."""
    match = occurrence(_WRITES, graph, node)
    assert match is not None
    return match[_WRITES].axis


def check_steps(step: Graph, several: Graph, place: str, inputs: Mapping[str, Array]) -> None:
    """Hold a graph of several steps against the graph of one, in numpy.

    Args:
        step: the network of one step.
        several: the network of several.
        place: the input of `place_of`.
        inputs: of `several`, states included; the places are made the first ones.

    Raises:
        ModelError: a result or a state differs.
    """
    count, kind = several.types[place].elements, several.types[place]
    whole = {**inputs, place: np.arange(count, dtype=kind.dtype.numpy).reshape(kind.shape)}
    held = {read: whole[read] for read, _, _ in several.kept}
    for number in range(count):
        given = {name: whole[name][number].reshape(step.types[name].shape) for name in step.given}
        found = evaluate(step, {**given, **held})
        held = {read: found[written] for read, written, _ in step.kept}
    other = evaluate(several, whole)
    pairs = [(found[a], other[b]) for a, b in zip(step.results, several.results, strict=True)]
    pairs += [(held[read], other[written]) for read, written, _ in several.kept]
    if not all(np.allclose(a, b, 1e-4, 1e-4) if a.dtype.kind == "f" else np.array_equal(a, b) for a, b in pairs):
        hint = "choose a --requant that keeps every bit; if it does, report this with the model and the target"
        raise ModelError(f"{count} steps at once are not what they are one by one", where=step.name, hint=hint)


def _refused(graph: Graph, why: str) -> ModelError:
    hint = "leave out --prefill; it is for models that write a row at their position and attend up to it"
    return ModelError(f"several steps cannot be computed at once: {why}", where=graph.name, hint=hint)


def _source(graph: Graph, value: str) -> str:
    """The value that another one is a view of."""
    while (node := graph.producer(value)) is not None and node.operator.is_view:
        value = node.inputs[0]
    return value


def _writer(graph: Graph, read: str, written: str) -> Node:
    """The node that writes a row of a state, which nothing else reads as it was."""
    node = graph.producer(written)
    if node is None or not _WRITES.fits(node) or node.inputs[0] != read or graph.readers(read) != 1:
        raise _refused(graph, f"the state {read} is not a buffer that a step writes one row of")
    return node


def _check_order(graph: Graph, place: str) -> None:
    """Raise ModelError where attention may read places behind the step's own."""
    for node in graph.nodes:
        if not _ATTENDS.fits(node):
            continue
        live = graph.producer(_source(graph, node.inputs[3]))
        known = live is not None and live.operator == Compare(CompareKind.LESS_OR_EQUAL)
        left, right = live.inputs if live is not None and known else ("", "")
        order = graph.constants.get(left)
        in_order = order is not None and np.array_equal(order.reshape(-1), np.arange(order.size))
        if not in_order or _source(graph, right) != place:
            raise _refused(graph, f"{node.output} does not attend to just the places up to its step's, {place}")


@dataclass
class _SeveralSteps:
    """The graph of several steps while it is made."""

    graph: Graph
    count: int
    builder: GraphBuilder
    stacked: dict[str, str] = field(default_factory=dict)
    """Value of a step -> all steps' values of it."""
    single: dict[str, str] = field(default_factory=dict)
    """Value of a step -> the last step's, or that of all: states."""

    def shape(self, shape: Shape) -> Shape:
        """The shape of all steps' values."""
        return (self.count, *(shape[1:] if shape[:1] == (1,) else shape))

    def last(self, value: str) -> str:
        """The last step's value."""
        if value not in self.stacked or value in self.single:
            return self.single.get(value, value)
        shape, whole = self.graph.types[value].shape, self.builder.type_of(self.stacked[value]).shape
        start = (self.count - 1, *(0,) * (len(whole) - 1))
        cut = self.builder.add(Slice(start, whole, (1,) * len(whole)), [self.stacked[value]], f"{value}_last")
        self.single[value] = self._seen(cut, shape)
        return self.single[value]

    def add_last(self, node: Node) -> None:
        """Add a node for the last step alone."""
        inputs = [self.last(name) for name in node.inputs]
        self.single[node.output] = self.builder.add(node.operator, inputs, node.output, node.origin)

    def add_all(self, node: Node) -> None:
        """Add a node for all steps; raises ModelError for an operator that does not take several."""
        operator, add = node.operator, self.builder.add
        if _WRITES.fits(node):
            self.single[node.output] = add(operator, self._row(node), node.output, node.origin)
            return
        of_states = [name for name in node.inputs if name in self.single and name not in self.stacked]
        if of_states and not (operator.moves_only or _ATTENDS.fits(node)):
            raise _refused(self.graph, f"{node.output} reads {of_states[0]}, which is of the states")
        if not any(name in self.stacked for name in node.inputs):
            inputs = [self.single.get(name, name) for name in node.inputs]
            self.single[node.output] = add(operator, inputs, node.output, node.origin)
            return
        make = self._attended if _ATTENDS.fits(node) else self._moved if _MOVES.fits(node) else self._computed
        found = make(node)
        self.stacked[node.output] = self._seen(found, self.shape(self.graph.types[node.output].shape))

    def _seen(self, value: str, shape: Shape) -> str:
        """The same elements under another shape."""
        same = self.builder.type_of(value).shape == shape
        return value if same else self.builder.add(Reshape(shape), [value], value)

    def _apart(self, value: str) -> str:
        """All steps' values with an axis of steps before the axes of one; raises ModelError for a value of no step."""
        if value not in self.stacked:
            raise _refused(self.graph, f"{value} is moved together with values of a step")
        return self._seen(self.stacked[value], (self.count, *self.graph.types[value].shape))

    def _row(self, node: Node) -> list[str]:
        """The operands of a node that writes rows."""
        old, row, place = node.inputs
        shape, axis, rows = self.graph.types[row].shape, _axis(self.graph, node), self._apart(row)
        order = (*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1))
        if set(shape[:axis]) - {1}:
            rows = self.builder.add(Transpose(order), [rows], row)
        rows = self._seen(rows, (*shape[:axis], self.count, *shape[axis + 1 :]))
        return [old, rows, self._seen(self.stacked[place], (self.count,))]

    def _attended(self, node: Node) -> str:
        """Attention of all steps, each with its own live places."""
        query, key, value, live = node.inputs
        (heads, rows, depth), places = (self.graph.types[name].shape for name in (query, live))
        if rows != 1 or query not in self.stacked or live not in self.stacked:
            raise _refused(self.graph, f"{node.output} attends for several rows of one step")
        steps = self._seen(self.stacked[query], (self.count, heads, depth))
        steps = self.builder.add(Transpose((1, 0, 2)), [steps], query)
        inputs = [steps, self.last(key), self.last(value), self._seen(self.stacked[live], (self.count, places[-1]))]
        found = self.builder.add(node.operator, inputs, node.output, node.origin)
        return self.builder.add(Transpose((1, 0, 2)), [found], f"{node.output}_by_step")

    def _moved(self, node: Node) -> str:
        """Elements of all steps moved within each step."""
        graph, operator = self.graph, node.operator
        if axes := occurrence(_AXES, graph, node):
            operator = Transpose((0, *(axis + 1 for axis in axes[_AXES].permutation)))
        elif part := occurrence(_PART, graph, node):
            start, stop, step = part[_PART].start, part[_PART].stop, part[_PART].step
            operator = Slice((0, *start), (self.count, *stop), (1, *step))
        elif joint := occurrence(_JOINT, graph, node):
            operator = Concat(joint[_JOINT].axis % len(graph.types[node.output].shape) + 1)
        return self.builder.add(operator, [self._apart(name) for name in node.inputs], node.output, node.origin)

    def _computed(self, node: Node) -> str:
        """Values computed element by element, row by row or from a table; raises ModelError for anything else."""
        operator, result = node.operator, self.graph.types[node.output].shape
        whole = self.shape(result)
        if operator.is_view:
            return self.builder.add(Reshape(whole), [self.stacked[node.inputs[0]]], node.output, node.origin)
        from_table = operator == Gather(0) and node.inputs[0] in self.graph.constants
        dense = _DENSE.fits(node) and len(result) == 2 and result[0] == 1
        if not (operator.pointwise or operator.is_rowwise or from_table or dense):
            raise _refused(self.graph, f"{node.output} is computed by {operator.class_name}")
        inputs = [self.stacked.get(name, name) for name in node.inputs]
        for at, name in enumerate(node.inputs[: operator.pointwise]):
            shape = self.graph.types[name].shape
            shape = (1,) * (len(result) - len(shape)) + shape
            if name in self.stacked:
                inputs[at] = self._seen(inputs[at], (self.count, *(shape[1:] if len(whole) == len(result) else shape)))
        axis = getattr(operator, "axis", None)
        if operator.pointwise and len(whole) > len(result) and axis is not None and axis >= 0:
            operator = replace(operator, **{"axis": axis + 1})
        found = self.builder.add(operator, inputs, node.output, node.origin)
        if self.builder.type_of(found).shape != whole:
            raise _refused(self.graph, f"{node.output} is computed by {operator.class_name}")
        return found
