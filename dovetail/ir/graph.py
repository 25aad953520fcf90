"""The graph: nodes over named values with known types, in topological order, never changed in place."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from dovetail.documented import document
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.types import Array, DType, TensorType, frozen
from dovetail.records import Record

OperatorT = TypeVar("OperatorT", bound=Operator)
AnswerT = TypeVar("AnswerT")


class Node(Record):
    """An operator, the names of the values it reads, and the name of its result."""

    operator: Operator
    """Operator that the node applies."""
    inputs: tuple[str, ...]
    """Names of the operands, in the operator's order; an absent optional operand is left off the end."""
    output: str
    """Name of the result, unique in the graph."""
    origin: str = ""
    """Operators of the user's model that this node computes, for messages and reports."""

    def expect(self, kind: type[OperatorT]) -> OperatorT:
        """The operator, where it is known to be of a kind; raises TypeError if it is not."""
        if not isinstance(self.operator, kind):
            raise TypeError(f"{self.output!r} is computed by {self.operator.class_name}, not {kind.__name__}")
        return self.operator


@dataclass(frozen=True)
class Graph:
    """A network: typed values, constants and nodes in topological order.

    What a network keeps from one inference to the next are its states. The last inputs are their contents at the
    start of an inference, the last outputs, in the same order, at its end.
    """

    name: str
    """Name of the network."""
    inputs: tuple[str, ...]
    """Values that a caller gives, in order; states come last."""
    outputs: tuple[str, ...]
    """Values that a caller gets, in order; states come last."""
    nodes: tuple[Node, ...]
    """Applications of operators, each after those it reads."""
    types: Mapping[str, TensorType]
    """Type of every value: inputs, constants and results."""
    constants: Mapping[str, Array] = field(default_factory=dict)
    """Arrays of constant values, by name."""
    states: tuple[Array, ...] = ()
    """Contents of each state before the first inference."""
    left: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Value -> why a rewrite left what computes it as it is, as a sentence: for `explain` and reports only."""

    @property
    def given(self) -> tuple[str, ...]:
        """The inputs that are given for each inference: all but those of states."""
        return self.inputs[: len(self.inputs) - len(self.states)]

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs of an inference: all but those of states."""
        return self.outputs[: len(self.outputs) - len(self.states)]

    @property
    def kept(self) -> tuple[tuple[str, str, Array], ...]:
        """Each state: the input that is read, the output that replaces it, and its first contents."""
        count = len(self.states)
        pairs = zip(self.inputs[len(self.inputs) - count :], self.outputs[len(self.outputs) - count :], strict=True)
        return tuple((read, written, first) for (read, written), first in zip(pairs, self.states, strict=True))

    def type_of(self, value: str) -> TensorType:
        """The type of a value."""
        return self.types[value]

    def is_constant(self, value: str) -> bool:
        """True when the value is known at compile time."""
        return value in self.constants

    def producers(self) -> Mapping[str, Node]:
        """The node that computes each computed value."""
        return self._producers

    def producer(self, value: str) -> Node | None:
        """The node that computes a value; None for an input and a constant."""
        return self._producers.get(value)

    def readers(self, value: str) -> int:
        """The number of nodes that read a value; an output of the graph has one reader more."""
        return len(self._users[value]) + self.outputs.count(value)

    def users(self) -> Mapping[str, Sequence[Node]]:
        """The nodes that read each value, in order; a graph output has no node for being one."""
        return self._users

    def once(self, question: Hashable, answer: Callable[[], AnswerT]) -> AnswerT:
        """The answer to a question about this graph that several stages ask; it stays in this process."""
        if question not in self._answers:
            self._answers[question] = answer()
        found: AnswerT = self._answers[question]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_answers"}

    @cached_property
    def _answers(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def _producers(self) -> Mapping[str, Node]:
        return {node.output: node for node in self.nodes}

    @cached_property
    def _users(self) -> Mapping[str, Sequence[Node]]:
        found: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return found


class GraphBuilder:
    """Collects values and nodes, inferring every type, and gives a verified `Graph`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inputs: list[str] = []
        self._nodes: list[Node] = []
        self._types: dict[str, TensorType] = {}
        self._constants: dict[str, Array] = {}
        self._states: dict[str, Array] = {}
        self._next: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        """The number to try next behind a stem."""

    def fresh(self, stem: str, taken: Container[str] = ()) -> str:
        """A value name not used yet, beginning with `stem`, and none of those `taken`."""
        name, count = self._fresh(stem), 1
        while name in taken:
            count += 1
            name = self._fresh(f"{stem}_{count}")
        return name

    def _fresh(self, stem: str) -> str:
        if stem and stem not in self._types:
            return stem
        count = self._counts.get(stem, 1)
        while f"{stem}_{count}" in self._types:
            count += 1
        self._counts[stem] = count  # names are never given up again
        return f"{stem}_{count}"

    def type_of(self, value: str) -> TensorType:
        """The type of a value added before."""
        return self._types[value]

    def constant_of(self, value: str) -> Array | None:
        """The array of a constant, None for a value computed at run time."""
        return self._constants.get(value)

    def input(self, name: str, kind: TensorType) -> str:
        """Add an input of the network.

        Args:
            name: name of the value.
            type: its shape and element type.
        """
        self._claim(name, kind)
        self._inputs.append(name)
        return name

    def state(self, stem: str, first: Array, dtype: DType | None = None) -> str:
        """Add a state with its first contents; returns the value it has at the start of an inference."""
        return self._hold(self._states, stem, first, dtype)

    def replace_state(self, state: str, value: str) -> None:
        """Let the state be `value` from the next inference on; without a call it stays as it is.

        Raises:
            ValueError: the value is of another type.
        """
        if self._types[value] != self._types[state]:
            raise ValueError(f"the state {state!r} is {self._types[state]}, it cannot become {self._types[value]}")
        self._next[state] = value

    def constant(self, stem: str, array: Array, dtype: DType | None = None) -> str:
        """Add a constant; `dtype` says so when it is narrower than the numpy type that holds it."""
        return self._hold(self._constants, stem, array, dtype)

    def add(self, operator: Operator, inputs: Sequence[str], stem: str = "", origin: str = "") -> str:
        """Add a node and return the name of its result.

        Raises:
            ValueError: the operator does not accept operands of these types.
        """
        name = self.fresh(stem or operator.class_name.lower())
        kind = operator.infer([self._types[value] for value in inputs])
        self._claim(name, kind)
        self._nodes.append(Node(operator, tuple(inputs), name, origin))
        return name

    def finish(self, outputs: Iterable[str], states: tuple[Array, ...] = ()) -> Graph:
        """The graph of everything added that the outputs and states need (all inputs and states are kept). An output
        that is an input or a constant is a copy of it.

        Args:
            outputs: names of values.
            states: where another graph is rebuilt, its states: the last inputs and the last of `outputs`.
        """
        computed, ends = {node.output for node in self._nodes}, list[str]()
        for value, name in (
            *((value, f"{value}_out") for value in outputs),
            *((self._next.get(state, state), f"{state}_next") for state in self._states),
        ):
            is_own = value in computed and value not in ends
            ends.append(value if is_own else self.add(Reshape(self._types[value].shape), [value], name))
        inputs, states = (*self._inputs, *self._states), (*states, *self._states.values())
        return prune(Graph(self.name, inputs, tuple(ends), tuple(self._nodes), self._types, self._constants, states))

    def _hold(self, held: dict[str, Array], stem: str, array: Array, dtype: DType | None) -> str:
        name = self.fresh(stem)
        self._claim(name, TensorType(tuple(array.shape), dtype or DType.of(array.dtype)))
        held[name] = frozen(array)
        return name

    def _claim(self, name: str, kind: TensorType) -> None:
        if name in self._types:
            raise ValueError(f"value {name!r} is defined twice")
        self._types[name] = kind


def prune(graph: Graph) -> Graph:
    """The graph without nodes and constants that no output needs."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.output in needed:
            kept.append(node)
            needed.update(node.inputs)
    needed.update(graph.inputs)
    return replace(
        graph,
        nodes=tuple(reversed(kept)),
        types={name: kind for name, kind in graph.types.items() if name in needed},
        constants={name: array for name, array in graph.constants.items() if name in needed},
        left={name: sentence for name, sentence in graph.left.items() if name in needed},
    )


def part_of(graph: Graph, nodes: Sequence[Node], name: str) -> Graph:
    """A graph of some nodes, whose output is the last node's result.

    Args:
        graph: the whole graph.
        nodes: nodes in order.
        name: name of the new graph.
    """
    own = {node.output for node in nodes}
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value not in own)
    constants = {value: graph.constants[value] for value in read if value in graph.constants}
    inputs = tuple(value for value in read if value not in constants)
    types = {value: graph.types[value] for value in (*read, *(node.output for node in nodes))}
    left = {value: graph.left[value] for value in types if value in graph.left}
    return Graph(name, inputs, (nodes[-1].output,), tuple(nodes), types, constants, left=left)


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The graph with other names for the values in `names`."""
    if not names:
        return graph

    def new(value: str) -> str:
        return names.get(value, value)

    return replace(
        graph,
        inputs=tuple(map(new, graph.inputs)),
        outputs=tuple(map(new, graph.outputs)),
        nodes=tuple(replace(n, inputs=tuple(map(new, n.inputs)), output=new(n.output)) for n in graph.nodes),
        types={new(name): kind for name, kind in graph.types.items()},
        constants={new(name): array for name, array in graph.constants.items()},
        left={new(name): sentence for name, sentence in graph.left.items()},
    )


def verify(graph: Graph) -> None:
    """Check every rule a graph must keep; raises ValueError naming the first node that breaks one."""
    known = set(graph.inputs) | set(graph.constants)
    for node in graph.nodes:
        missing = [name for name in node.inputs if name not in known]
        if missing:
            raise ValueError(f"node {node.output!r} reads {missing[0]!r} before it is defined")
        if node.output in known:
            raise ValueError(f"value {node.output!r} is defined twice")
        inferred = node.operator.infer([graph.types[name] for name in node.inputs])
        if inferred != graph.types[node.output]:
            raise ValueError(f"node {node.output!r} is {graph.types[node.output]}, its operator gives {inferred}")
        known.add(node.output)
    absent = [name for name in graph.outputs if name not in known]
    if absent:
        raise ValueError(f"output {absent[0]!r} is never computed")
    for name, array in graph.constants.items():
        _check_contents(graph, name, array, "constant")
    computed = {node.output for node in graph.nodes}
    for read, written, first in graph.kept:
        _check_contents(graph, read, first, "first contents of the state")
        if graph.types[read] != graph.types[written]:
            raise ValueError(f"the state {read!r} is {graph.types[read]}, it becomes {graph.types[written]}")
        if graph.outputs.count(written) > 1 or written not in computed:
            raise ValueError(f"what the state {read!r} becomes, {written!r}, is not a computed value of its own")


def _check_contents(graph: Graph, name: str, array: Array, what: str) -> None:
    if tuple(array.shape) != graph.types[name].shape or array.dtype != graph.types[name].dtype.numpy:
        raise ValueError(f"{what} {name!r} is not {graph.types[name]}")


def evaluate(graph: Graph, inputs: Mapping[str, Array], keep: Iterable[str] = ()) -> dict[str, Array]:
    """Run the graph in numpy: the reference meaning of every stage.

    Args:
        graph: the network.
        inputs: an array per graph input, states included, of exactly its type.
        keep: values to return beside the outputs.

    Raises:
        ValueError: an input has another type or shape.
    """
    values: dict[str, Array] = dict(graph.constants)
    for name in graph.inputs:
        kind = graph.types[name]
        array = inputs[name]
        if tuple(array.shape) != kind.shape or array.dtype != kind.dtype.numpy:
            raise ValueError(f"input {name!r} is {array.dtype}{list(array.shape)}, expected {kind}")
        values[name] = array
    for node in in_turn(graph, {*graph.outputs, *keep}, values):
        values[node.output] = node.operator.evaluate([values[name] for name in node.inputs])
    return {name: values[name] for name in (*graph.outputs, *keep)}


def in_turn(graph: Graph, wanted: Container[str], *held: dict[str, Array]) -> Iterator[Node]:
    """The nodes in order. Behind each, `held` lose the values that no later node reads, but for those wanted."""
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    for index, node in enumerate(graph.nodes):
        yield node
        for name in node.inputs:
            if last[name] == index and name not in wanted:
                for values in held:
                    values.pop(name, None)


def evaluate_all(graph: Graph, inputs: Iterable[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Successive inferences in numpy, states carried from one to the next.

    Args:
        graph: the network.
        inputs: for each inference an array per input that is given (`Graph.given`).

    Returns:
        For each inference its results (`Graph.results`).
    """
    held = {read: first for read, _, first in graph.kept}
    found = []
    for arrays in inputs:
        outputs = evaluate(graph, {**arrays, **held})
        held = {read: outputs[written] for read, written, _ in graph.kept}
        found.append({name: outputs[name] for name in graph.results})
    return found


document(__name__)
