"""What an engine can be asked: patterns as nests of operators, limits as sentences, and knobs, what may be chosen.

    x = operand("x")
    conv = apply(Conv2d, maybe(Pad, x, name="pad"), constant("weights"), name="conv")
    pattern = apply(Clip, apply(ScaleShift, conv, constant("scale"), constant("offset"), constant("shift")))

Patterns are data; matching is one function. A pattern that does not match says how far it got and why.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, TypeVar

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Concat, Reshape
from dovetail.ir.types import Array, Shape, TensorType

Value = int | str
"""The setting of a knob."""
Choice = Mapping[str, Value]
"""Settings by knob name; a knob that is absent is left to whoever declared it."""


@dataclass(frozen=True)
class Knob:
    """One thing that may be chosen."""

    name: str
    """A lower-case identifier, unique among the knobs of a region."""
    values: tuple[Value, ...]
    """What it may be set to, at least one."""
    sentence: str
    """What it sets and in which unit."""


@dataclass(frozen=True)
class Space:
    """The choices there are for one region."""

    knobs: tuple[Knob, ...]
    problem: Callable[[Choice], str | None] = lambda choice: None
    """The sentence why a choice (whole or partial, every value one of its knob's) is not allowed; None when it is.
    A choice that is not allowed is never tried."""

    @property
    def size(self) -> int:
        """Number of whole choices, those that are not allowed included."""
        return prod(len(knob.values) for knob in self.knobs)

    def point(self, index: int) -> dict[str, Value]:
        """The whole choice number `index` of `size`, the last knob turning fastest."""
        found: dict[str, Value] = {}
        for knob in reversed(self.knobs):
            index, position = divmod(index, len(knob.values))
            found[knob.name] = knob.values[position]
        return {knob.name: found[knob.name] for knob in self.knobs}

    def points(self) -> Iterator[dict[str, Value]]:
        """Every whole choice that is allowed, in the order of `point`."""
        names = [knob.name for knob in self.knobs]
        for values in product(*(knob.values for knob in self.knobs)):
            choice = dict(zip(names, values, strict=True))
            if self.problem(choice) is None:
                yield choice

    def refusal(self, choice: Choice) -> str | None:
        """Why a choice is none of this space: an unknown knob, a value out of range, a problem. None when it is one."""
        known = {knob.name: knob for knob in self.knobs}
        for name, value in choice.items():
            if name not in known:
                return f"there is no knob '{name}' here; there is {', '.join(known) or 'none'}"
            allowed = known[name].values
            if not any(type(value) is type(one) and value == one for one in allowed):
                return f"{name} = {value} is out of range; it may be {', '.join(map(str, allowed))}"
        return self.problem(choice)


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
"""A nest of operators, or one of the values it reads."""


def operand(name: str) -> Leaf:
    """A value computed at run time (or a constant)."""
    return Leaf(name)


def constant(name: str) -> Leaf:
    """A value known at compile time."""
    return Leaf(name, constant=True)


def leaves(pattern: Pattern) -> dict[str, bool]:
    """Names of the values a pattern reads, and whether they must be known at compile time."""
    if isinstance(pattern, Leaf):
        return {pattern.name: pattern.constant}
    return {name: known for part in pattern.inputs for name, known in leaves(part).items()}


def apply(operator: type[Operator], *inputs: Pattern, name: str = "", why: str = "") -> Apply:
    """`operator` with these operands; `name` (by default the operator's, in lower case) finds the node in a match."""
    return Apply(operator, inputs, name or operator.__name__.lower(), why=why)


def maybe(operator: type[Operator], *inputs: Pattern, name: str = "") -> Apply:
    """Like `apply`, but the operator may be absent."""
    return Apply(operator, inputs, name or operator.__name__.lower(), optional=True)


def together(*results: Pattern) -> Apply:
    """What gives several results in one launch: one behind the other, row-major, in one value of one dimension. One may
    be an inner part of another (the same object), or they are computed side by side from the same operands.

    Values of a network become such a value by the rewrite `dovetail.legalize.results_together`; `results_of` tells
    where each lies. All are of one type of element.
    """
    flat = (apply(Reshape, part, name=f"flat_{number}") for number, part in enumerate(results))
    return apply(Concat, *flat, name="together")


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
    within: Mapping[str, Shape] = field(default_factory=dict)
    """Values known to lie as parts of larger ones -> the shapes of those; only when cycles of choices are asked for."""

    def apart(self, value: str) -> bool:
        """True when an image is known to have others' columns between its rows."""
        return value in self.within and self.within[value][-2] != self.graph.types[value].shape[-2]

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

    @property
    def work(self) -> int:
        """Multiply-accumulates, or elements of the result where there are none."""
        types = self.graph.types
        macs = sum(node.operator.macs([types[name] for name in node.inputs]) for node in self.graph.nodes)
        return macs or self.result.elements


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

    def worded(self, sentence: str) -> Constraint:
        """The same limit, said in other words."""
        return replace(self, sentence=sentence)


def one_of(sentence: str, measure: Callable[[Match], Any], *allowed: Any, scope: Scope = Scope.ALL) -> Constraint:
    """A limit to some values."""
    return Constraint(sentence, measure, lambda value: value in allowed, scope)


def match_again(match: Match, graph: Graph) -> Match | None:
    """A match in a graph that differs from its own in shapes, numbers and constants' contents only, as a tile does;
    None where it differs in more."""
    own = match.graph
    same = own.outputs == graph.outputs and own.constants.keys() == graph.constants.keys()
    if not same or [_form(node) for node in own.nodes] != [_form(node) for node in graph.nodes]:
        return None
    made = graph.producers()
    return replace(match, graph=graph, nodes={name: made[node.output] for name, node in match.nodes.items()})


def _form(node: Node) -> tuple[object, ...]:
    return type(node.operator), node.inputs, node.output


def match_pattern(pattern: Pattern, graph: Graph, root: str, inside: bool = True) -> Match | Mismatch:
    """Find `pattern` computing the value `root`.

    Every value but the outermost must be read within the pattern only and not be an output, since it disappears. A part
    that stands in the pattern several times, the same object, is one value that is read there several times.

    Args:
        pattern: what is looked for.
        graph: where.
        root: the outermost value.
        inside: False where inner values may be read elsewhere too, or be outputs.
    """
    return _PatternSearch(pattern, graph, root, inside).found()


@dataclass
class _PatternSearch:
    """A pattern while it is looked for: methods, since functions that call each other are a circle, which stays in
    memory until it is looked for, and there is one for every offload and node."""

    pattern: Pattern
    graph: Graph
    root: str
    inside: bool
    """All as `match_pattern` takes them."""
    values: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    met: dict[int, str] = field(default_factory=dict)
    """The value that each part stands for, by the part's identity."""
    shared: list[tuple[str, str, int]] = field(default_factory=list)
    """Values that parts of the pattern read several times: each with what is said, and with the nodes met before, where
    others read it too."""

    def found(self) -> Match | Mismatch:
        """The match, or why there is none."""
        failure = self._visit(self.pattern, self.root)
        if failure:
            return Mismatch(failure, len(self.nodes))
        inner, users = {node.output for node in self.nodes.values()}, self.graph.users()
        for value, sentence, depth in self.shared:
            if any(user.output not in inner for user in users[value]):
                return Mismatch(sentence, depth)
        return Match(self.graph, self.root, self.values, self.nodes)

    def _visit(self, part: Pattern, value: str) -> str | None:
        graph, nodes = self.graph, self.nodes
        if isinstance(part, Leaf):
            return self._bind(part, value)
        if self.met.setdefault(id(part), value) != value:
            return f"{part.name} is read in several places, '{self.met[id(part)]}' and '{value}' are there"
        if part.name in nodes and nodes[part.name].output == value:
            return None
        node = graph.producers().get(value)
        if node is None or not isinstance(node.operator, part.operator):
            if part.optional:
                return self._visit(part.inputs[0], value)
            found = type(node.operator).__name__ if node else "a constant" if value in graph.constants else "an input"
            why = f": {part.why}" if part.why else ""
            return f"expects {part.operator.__name__}, found {found} at '{value}'{why}"
        if self.inside and value != self.root and (len(graph.users()[value]) > 1 or value in graph.outputs):
            if part.optional:
                return self._visit(part.inputs[0], value)
            wanted = f"the result '{value}' of {part.operator.__name__} is also needed elsewhere"
            if value in graph.outputs or id(part) not in _read_again(self.pattern):
                return wanted
            self.shared.append((value, wanted, len(nodes)))
        if len(node.inputs) != len(part.inputs):
            return f"expects {part.operator.__name__} with {len(part.inputs)} operands, found {len(node.inputs)}"
        nodes[part.name] = node
        return next(filter(None, map(self._visit, part.inputs, node.inputs)), None)

    def _bind(self, leaf: Leaf, value: str) -> str | None:
        if leaf.constant and value not in self.graph.constants:
            return f"{leaf.name} must be known at compile time; '{value}' is not"
        if self.values.setdefault(leaf.name, value) != value:
            return f"{leaf.name} stands for two different values, '{self.values[leaf.name]}' and '{value}'"
        return None


def _read_again(pattern: Pattern) -> set[int]:
    """The parts of a pattern, by identity, that stand in it several times."""
    found: set[int] = set()
    again: set[int] = set()
    waiting = [pattern]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Apply) and id(part) not in again:
            (again if id(part) in found else found).add(id(part))
            waiting += part.inputs if id(part) not in again else ()
    return again
