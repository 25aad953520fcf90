"""Patterns: nests of operators as data, and the one function that looks for them in a graph.

    x, weights = operand("x"), constant("weights")
    layer = apply(Conv2d, x, weights, alone=True)
    clip = apply(Clip, apply(Requantize, layer))
    found = find(clip, graph, "y")

Each part of a pattern is also the key to what it stands for: `found[layer].stride` is the convolution's, `found[x]` the
name of its operand. A pattern that is not there says how far it got and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, overload

from dovetail.ir.graph import Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.types import Array, TensorType
from dovetail.records import Record

OperatorT = TypeVar("OperatorT", bound=Operator)


class Leaf(Record, eq=False):
    """A value the pattern reads: any value, or only one known at compile time."""

    name: str
    """Name under which a match binds it."""
    constant: bool = False
    """Whether it must be known at compile time."""
    rest: bool = False
    """Whether it stands for all operands that are left, perhaps none."""


class Apply(Record, Generic[OperatorT], eq=False):
    """An operator applied to patterns."""

    kinds: tuple[type[OperatorT], ...]
    """The operator is of one of these classes."""
    inputs: tuple[Pattern, ...]
    """Its operands; empty where these do not matter."""
    name: str
    """Name under which a match binds the node."""
    optional: bool = False
    """When the operator is absent, the pattern of its first operand stands in its place."""
    why: str = ""
    """Told to the user beside the operator that stands in its place."""
    having: Callable[[OperatorT], bool] | None = None
    """Condition on the operator."""
    alone: bool = False
    """Whether nothing else reads the result."""
    commutes: bool = False
    """Whether the operands may come in the opposite order."""
    repeats: bool = False
    """Any number of such operators, each reading the next as its first operand; the pattern goes on with the last's."""
    each: bool = False
    """Every operand matches the one pattern."""
    alternatives: bool = False
    """No operator: the part stands for the first of its `inputs` that is there."""

    @property
    def operator(self) -> type[OperatorT]:
        """The class of the operator, the first of several."""
        return self.kinds[0]

    def fits(self, node: Node) -> bool:
        """Whether a node's operator is the one, whatever its operands."""
        return isinstance(node.operator, self.kinds) and (self.having is None or self.having(node.operator))


Pattern = Leaf | Apply[Any]
"""A nest of operators, or one of the values it reads."""


def operand(name: str) -> Leaf:
    """A leaf of a pattern for a value computed at run time, or a constant.

    Args:
        name: name of the value in a match.
    """
    return Leaf(name)


def constant(name: str) -> Leaf:
    """A leaf of a pattern for a value known at compile time.

    Args:
        name: name of the value in a match.
    """
    return Leaf(name, constant=True)


def rest(name: str, known: bool = False) -> Leaf:
    """All operands that are left, perhaps none; `known`: only constants."""
    return Leaf(name, known, rest=True)


def either(*patterns: Pattern) -> Apply[Any]:
    """The first of some patterns that is there."""
    return Apply((Operator,), patterns, "either", alternatives=True)


def apply(
    operator: type[OperatorT] | OperatorT | tuple[type[OperatorT], ...],
    *inputs: Pattern,
    name: str = "",
    why: str = "",
    having: Callable[[OperatorT], bool] | None = None,
    alone: bool = False,
    commutes: bool = False,
    each: bool = False,
) -> Apply[OperatorT]:
    """`operator` with these operands, or any where none are given.

    Args:
        operator: a class, several of which one is there, or the very operator.
        inputs: patterns of the operands.
        name: finds the node in a match by name; by default the operator's, in lower case.
        why: told to the user beside the operator that stands in its place.
        having: must hold of the operator.
        alone: whether nothing else may read the result.
        commutes: whether the operands may come in the opposite order.
        each: whether every operand must match the one pattern given.
    """
    kinds = (
        operator if isinstance(operator, tuple) else (operator,) if isinstance(operator, type) else (type(operator),)
    )
    holds = operator.__eq__ if isinstance(operator, Operator) else having
    word = name or kinds[0].__name__.lower()
    return Apply(kinds, inputs, word, why=why, having=holds, alone=alone, commutes=commutes, each=each)


def maybe(
    operator: type[OperatorT] | tuple[type[OperatorT], ...], *inputs: Pattern, name: str = "", alone: bool = False
) -> Apply[OperatorT]:
    """An operator that may be absent from the graph. Otherwise it is as `apply`, with the same `inputs`, `name` and
    `alone`."""
    return replace(apply(operator, *inputs, name=name, alone=alone), optional=True)


def some(
    operator: type[OperatorT] | tuple[type[OperatorT], ...], inner: Pattern, alone: bool = False
) -> Apply[OperatorT]:
    """Any number of operators one behind the other, and what the first of them reads; `alone`: nothing else reads their
    results."""
    return replace(apply(operator, inner, alone=alone), optional=True, repeats=True)


def leaves(pattern: Pattern) -> dict[str, bool]:
    """Names of the values a pattern reads, and whether they must be known at compile time."""
    if isinstance(pattern, Leaf):
        return {pattern.name: pattern.constant}
    return {name: known for part in pattern.inputs for name, known in leaves(part).items()}


def operators_of(pattern: Pattern) -> tuple[type[Operator], ...]:
    """Every class of operators of a pattern, the outermost first."""
    if isinstance(pattern, Leaf):
        return ()
    return (*pattern.kinds, *(kind for part in pattern.inputs for kind in operators_of(part)))


class GraphView(Protocol):
    """A place to match patterns in: a graph, or a draft of one."""

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every value."""

    @property
    def constants(self) -> Mapping[str, Array]:
        """The values known at compile time."""

    def producer(self, value: str) -> Node | None:
        """The node that computes a value."""

    def readers(self, value: str) -> int:
        """How many nodes read a value; to be an output counts as one more."""


@dataclass(frozen=True)
class Occurrence:
    """A pattern found in a graph: its parts bound to values and nodes."""

    scope: GraphView = field(repr=False)
    values: Mapping[Pattern, str]
    """The value that each part stands for."""
    nodes: Mapping[Pattern, Node]
    """The node of each operator that is there, the outermost first."""
    runs: Mapping[Pattern, tuple[Node, ...]]
    """The nodes of each part that repeats, the outermost first."""
    every: Mapping[Pattern, tuple[Occurrence, ...]]
    """For each part whose operands are all alike, an occurrence for each of them."""
    members: tuple[Node, ...]
    """All nodes, each behind the operands it reads."""

    @overload
    def __getitem__(self, part: Leaf) -> str: ...
    @overload
    def __getitem__(self, part: Apply[OperatorT]) -> OperatorT: ...
    def __getitem__(self, part: Leaf | Apply[Any]) -> Any:
        """The name of a leaf's value; the operator of another part."""
        return self.values[part] if isinstance(part, Leaf) else self.nodes[part].operator

    def has(self, part: Pattern) -> bool:
        """Whether an operator that may be absent is there."""
        return part in self.nodes

    def node(self, part: Apply[Any]) -> Node:
        """The node of an operator."""
        return self.nodes[part]

    def value(self, part: Pattern | str) -> str:
        """The name of the value a part stands for."""
        return part if isinstance(part, str) else self.values[part]

    def type(self, part: Pattern | str) -> TensorType:
        """The type of a part's value."""
        return self.scope.types[self.value(part)]

    def array(self, part: Leaf | str) -> Array:
        """The elements of a constant."""
        return self.scope.constants[self.value(part)]

    def others(self, part: Apply[Any]) -> tuple[str, ...]:
        """The operands that a `rest` stands for."""
        return self.nodes[part].inputs[len(part.inputs) - 1 :]


class Mismatch(Record):
    """Why a pattern is not there, and how many of its operators were."""

    sentence: str
    depth: int


def find(pattern: Pattern, scope: GraphView, root: str | Node, inside: bool = False) -> Occurrence | Mismatch:
    """Look for a pattern that computes a value.

    A part that stands in the pattern several times, the same object, is one value that is read there several times. Of
    alternatives the first that is there by itself is taken.

    Args:
        pattern: what is looked for.
        scope: where.
        root: the outermost value, or the node that computes it.
        inside: whether every value but the outermost must be read within the pattern only, and be no output.
    """
    if isinstance(root, Node):
        search = _PatternSearch(pattern, scope, root.output, inside)
        failure = search.bind_root(root)
    else:
        search = _PatternSearch(pattern, scope, root, inside)
        failure = search.visit(pattern, root)
    return Mismatch(failure, len(search.nodes)) if failure else search.result()


def occurrence(pattern: Pattern, scope: GraphView, root: str | Node) -> Occurrence | None:
    """The pattern where it computes a value (or a node does); None where it is not there."""
    if isinstance(root, Node) and isinstance(pattern, Apply) and not pattern.fits(root):
        return None  # most nodes: without the search that would find a reason
    found = find(pattern, scope, root)
    return found if isinstance(found, Occurrence) else None


@dataclass
class _PatternSearch:
    """A pattern while it is looked for. Methods, not nested functions: functions that call each other are a circle,
    which stays in memory until it is collected, and there is one search for every offload and node."""

    pattern: Pattern
    scope: GraphView
    root: str
    inside: bool
    names: dict[str, str] = field(default_factory=dict)
    """Value by the name of a leaf."""
    values: dict[Pattern, str] = field(default_factory=dict)
    nodes: dict[Pattern, Node] = field(default_factory=dict)
    runs: dict[Pattern, tuple[Node, ...]] = field(default_factory=dict)
    every: dict[Pattern, tuple[Occurrence, ...]] = field(default_factory=dict)
    members: list[Node] = field(default_factory=list)
    shared: list[tuple[str, str, int]] = field(default_factory=list)
    """Values that parts of the pattern read several times, each with a sentence and the number of nodes met before, in
    case other nodes read it too."""

    def result(self) -> Occurrence | Mismatch:
        """The occurrence once all parts are bound, unless a shared value is also read outside of the pattern."""
        for value, sentence, depth in self.shared:
            if len({node.output for node in self.members if value in node.inputs}) < self.scope.readers(value):
                return Mismatch(sentence, depth)
        return Occurrence(self.scope, self.values, self.nodes, self.runs, self.every, tuple(self.members))

    def visit(self, part: Pattern, value: str) -> str | None:
        """Bind a part to a value; the reason where that is impossible."""
        if isinstance(part, Leaf):
            return self._bind(part, value)
        if self.values.setdefault(part, value) != value:
            return f"{part.name} is read in several places, '{self.values[part]}' and '{value}' are there"
        if part in self.nodes:
            return None
        if part.alternatives:
            return self._first([[(one, value)] for one in part.inputs])
        if part.repeats:
            return self._run(part, value)
        node = self.scope.producer(value)
        failure = self._refusal(part, value, node)
        if node is None or failure:
            return self.visit(part.inputs[0], value) if part.optional else failure
        return self._bind_node(part, node)

    def bind_root(self, node: Node) -> str | None:
        """Bind the outermost operator to a node that need not be in the graph yet."""
        assert isinstance(self.pattern, Apply)
        return self._refusal(self.pattern, node.output, node) or self._bind_node(self.pattern, node)

    def _bind_node(self, part: Apply[Any], node: Node) -> str | None:
        self.nodes[part], self.values[part] = node, node.output
        failure = self._operands(part, node) if part.inputs else None
        self.members.append(node)
        return failure

    def _refusal(self, part: Apply[Any], value: str, node: Node | None) -> str | None:
        """Why a value is not the result of a part's operator, whatever its operands."""
        if node is None or not part.fits(node):
            there = "a constant" if value in self.scope.constants else "an input"
            there = node.operator.class_name if node else there
            return f"expects {_word(part)}, found {there} at '{value}'{part.why and f': {part.why}'}"
        if (self.inside or part.alone) and value != self.root and self.scope.readers(value) > 1:
            sentence = f"the result '{value}' of {_word(part)} is also needed elsewhere"
            if part.optional or part not in _read_again(self.pattern):
                return sentence
            self.shared.append((value, sentence, len(self.nodes)))
        return None

    def _run(self, part: Apply[Any], value: str) -> str | None:
        run: list[Node] = []
        while (node := self.scope.producer(value)) is not None and self._refusal(part, value, node) is None:
            run.append(node)
            value = node.inputs[0]
        self.runs[part] = tuple(run)
        failure = self.visit(part.inputs[0], value)
        self.members += reversed(run)
        return failure

    def _operands(self, part: Apply[Any], node: Node) -> str | None:
        if part.each:
            found = [find(part.inputs[0], self.scope, value, self.inside) for value in node.inputs]
            missing = next((one for one in found if isinstance(one, Mismatch)), None)
            self.every[part] = tuple(one for one in found if isinstance(one, Occurrence))
            return missing.sentence if missing else None
        last = part.inputs[-1]
        has_rest = isinstance(last, Leaf) and last.rest
        count = len(part.inputs) - has_rest
        if len(node.inputs) < count or (len(node.inputs) > count and not has_rest):
            return f"expects {_word(part)} with {len(part.inputs)} operands, found {len(node.inputs)}"
        pairs = list(zip(part.inputs, node.inputs, strict=False))[:count]
        swapped = [(one, value) for (one, _), (_, value) in zip(pairs, reversed(pairs), strict=True)]
        failure = self._first([pairs, swapped] if part.commutes else [pairs])
        if failure or not isinstance(last, Leaf) or not last.constant:
            return failure
        return next((_unknown(last, value) for value in node.inputs[count:] if value not in self.scope.constants), None)

    def _first(self, choices: Sequence[Sequence[tuple[Pattern, str]]]) -> str | None:
        """Bind all pairs of the first choice where that is possible; the reason the first choice fails, else None."""
        reasons = []
        state: tuple[dict[Any, Any], ...] = (self.names, self.values, self.nodes, self.runs, self.every)
        for choice in choices:
            before = [dict(one) for one in state] if len(choices) > 1 else []
            members, shared = len(self.members), len(self.shared)
            failure = next(filter(None, (self.visit(part, value) for part, value in choice)), None)
            if failure is None:
                return None
            reasons.append(failure)
            for one, old in zip(state, before, strict=False):
                one.clear()
                one.update(old)
            del self.members[members:], self.shared[shared:]
        return reasons[0]

    def _bind(self, leaf: Leaf, value: str) -> str | None:
        if leaf.constant and value not in self.scope.constants:
            return _unknown(leaf, value)
        self.values[leaf] = value
        if self.names.setdefault(leaf.name, value) != value:
            return f"{leaf.name} stands for two different values, '{self.names[leaf.name]}' and '{value}'"
        return None


def _word(part: Apply[Any]) -> str:
    return " or ".join(kind.__name__ for kind in part.kinds)


def _unknown(leaf: Leaf, value: str) -> str:
    return f"{leaf.name} must be known at compile time; '{value}' is not"


def _read_again(pattern: Pattern) -> set[Pattern]:
    """The parts of a pattern that stand in it several times."""
    once: set[Pattern] = set()
    again: set[Pattern] = set()
    waiting = [pattern]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Apply) and part not in again:
            (again if part in once else once).add(part)
            waiting += part.inputs if part not in again else ()
    return again
