"""The pattern language: what an engine can compute, said as a nest of operators, and the limits, said as sentences.

    x = operand("x")
    conv = apply(Conv2d, maybe(Pad, x, name="pad"), constant("weights"), name="conv")
    pattern = apply(Clip, apply(ScaleShift, conv, constant("scale"), constant("offset"), constant("shift")))

Patterns are data; matching is one function. A pattern that does not match says how far it got and why.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array, TensorType
from dovetail.operators.base import Operator
from dovetail.target.knobs import Choice

OperatorT = TypeVar("OperatorT", bound=Operator)


@dataclass(frozen=True)
class Leaf:
    """A value the pattern reads: any value, or only one known at compile time."""

    name: str
    """What a match binds it under."""
    constant: bool = False
    """Whether it must be known at compile time."""


@dataclass(frozen=True)
class Apply:
    """An operator applied to patterns."""

    operator: type[Operator]
    inputs: tuple[Pattern, ...]
    name: str
    """What a match binds the node under."""
    optional: bool = False
    """When the operator is absent, the pattern of its first operand stands in its place."""
    why: str = ""
    """What a user is told beside what was found, where another operator stands in its place."""


Pattern = Leaf | Apply


def operand(name: str) -> Leaf:
    """A value computed at run time (or a constant)."""
    return Leaf(name)


def constant(name: str) -> Leaf:
    """A value known at compile time."""
    return Leaf(name, constant=True)


def apply(operator: type[Operator], *inputs: Pattern, name: str = "", why: str = "") -> Apply:
    """`operator` with these operands; `name` (by default the operator's, in lower case) finds the node in a match."""
    return Apply(operator, inputs, name or operator.__name__.lower(), why=why)


def maybe(operator: type[Operator], *inputs: Pattern, name: str = "") -> Apply:
    """Like `apply`, but the operator may be absent."""
    return Apply(operator, inputs, name or operator.__name__.lower(), optional=True)


@dataclass(frozen=True)
class Match:
    """A pattern found in a graph: its leaves bound to values, its operators to nodes."""

    graph: Graph
    root: str
    """The value the pattern computes."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Leaf name -> value name."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """Operator name in the pattern -> node."""
    choice: Choice = field(default_factory=dict)
    """Settings of the offload's own knobs; one that is absent means the offload's default."""

    def has(self, name: str) -> bool:
        """True when the (optional) operator is there."""
        return name in self.nodes

    def operator(self, name: str, kind: type[OperatorT]) -> OperatorT:
        """The operator bound to a name, of the kind the pattern says."""
        found = self.nodes[name].operator
        if not isinstance(found, kind):
            raise TypeError(f"{name} is a {type(found).__name__}, not a {kind.__name__}")
        return found

    def type(self, leaf: str) -> TensorType:
        """Type of the value bound to a leaf."""
        return self.graph.types[self.values[leaf]]

    def array(self, leaf: str) -> Array:
        """The constant bound to a leaf."""
        return self.graph.constants[self.values[leaf]]

    @property
    def result(self) -> TensorType:
        """Type of the value the pattern computes."""
        return self.graph.types[self.root]


@dataclass(frozen=True)
class Mismatch:
    """Why a pattern is not there, and how many of its operators were."""

    sentence: str
    depth: int


class Scope(enum.Enum):
    """What a constraint is asked of."""

    ALL = "all"
    LAYERS = "layers"
    """Whole layers, when the network is partitioned; a tile of one need not keep it."""
    TILES = "tiles"
    """What is computed in one launch: a layer that does not keep it is cut until its tiles do."""


@dataclass(frozen=True)
class Constraint:
    """A limit beyond the pattern.

    `sentence` is what a user reads when it fails, followed by the value; the support tables are made from it.
    """

    sentence: str
    measure: Callable[[Match], Any]
    """The value the limit is about."""
    accepts: Callable[[Any], bool]
    """Whether that value is within the limit."""
    scope: Scope = Scope.ALL
    """What it is asked of."""

    def failure(self, match: Match) -> str | None:
        """The sentence with the offending value, None when the constraint holds."""
        value = self.measure(match)
        return None if self.accepts(value) else f"{self.sentence}; here: {value}"


def match_pattern(pattern: Pattern, graph: Graph, root: str) -> Match | Mismatch:
    """Find `pattern` computing the value `root`.

    Every operator but the outermost must have a single reader and not be an output, since its value disappears.
    """
    producers, users = graph.producers(), graph.users()
    values: dict[str, str] = {}
    nodes: dict[str, Node] = {}

    def visit(part: Pattern, value: str) -> str | None:
        """Match a part of the pattern at a value; the first difference, None where there is none."""
        if isinstance(part, Leaf):
            return bind(part, value)
        node = producers.get(value)
        if node is None or not isinstance(node.operator, part.operator):
            if part.optional:
                return visit(part.inputs[0], value)
            found = type(node.operator).__name__ if node else "a constant" if value in graph.constants else "an input"
            why = f": {part.why}" if part.why else ""
            return f"expects {part.operator.__name__}, found {found} at '{value}'{why}"
        if value != root and (len(users[value]) > 1 or value in graph.outputs):
            if part.optional:
                return visit(part.inputs[0], value)
            return f"the result '{value}' of {part.operator.__name__} is also needed elsewhere"
        if len(node.inputs) != len(part.inputs):
            return f"expects {part.operator.__name__} with {len(part.inputs)} operands, found {len(node.inputs)}"
        nodes[part.name] = node
        for inner, name in zip(part.inputs, node.inputs, strict=True):
            failure = visit(inner, name)
            if failure:
                return failure
        return None

    def bind(leaf: Leaf, value: str) -> str | None:
        """Match a leaf at a value; the difference, None where there is none."""
        if leaf.constant and value not in graph.constants:
            return f"{leaf.name} must be known at compile time; '{value}' is not"
        if values.setdefault(leaf.name, value) != value:
            return f"{leaf.name} stands for two different values, '{values[leaf.name]}' and '{value}'"
        return None

    failure = visit(pattern, root)
    return Mismatch(failure, len(nodes)) if failure else Match(graph, root, values, nodes)
