"""Patterns as nests of operators, limits as sentences, and knobs: the choices that tuning may make.

    x = operand("x")
    conv = apply(Conv2d, maybe(Pad, x, name="pad"), constant("weights"), name="conv")
    pattern = apply(Clip, apply(ScaleShift, conv, constant("scale"), constant("offset"), constant("shift")))

Patterns are data; matching is one function. A pattern that does not match says how far it got and why.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.movement import Concat, Reshape
from dovetail.ir.pattern import Apply as Apply
from dovetail.ir.pattern import Leaf as Leaf
from dovetail.ir.pattern import Mismatch as Mismatch
from dovetail.ir.pattern import OperatorT, find
from dovetail.ir.pattern import Pattern as Pattern
from dovetail.ir.pattern import apply as apply
from dovetail.ir.pattern import constant as constant
from dovetail.ir.pattern import leaves as leaves
from dovetail.ir.pattern import maybe as maybe
from dovetail.ir.pattern import operand as operand
from dovetail.ir.types import Array, Shape, TensorType
from dovetail.records import Record, field

Value = int | str
"""The setting of a knob."""
Choice = Mapping[str, Value]
"""Settings by knob name; the compiler decides on knobs that are absent."""


class Knob(Record):
    """A choice that `dovetail tune` may make, with its possible settings."""

    name: str
    """A lower-case identifier, unique among the knobs of a region."""
    values: tuple[Value, ...]
    """Values it may be set to, at least one."""
    sentence: str
    """Description of the knob, with its unit."""


class Space(Record):
    """The choices there are for one region."""

    knobs: tuple[Knob, ...]
    """The choices, in order."""
    problem: Callable[[Choice], str | None] = lambda choice: None
    """Function that returns why a choice is not possible, as a sentence; None if it is possible."""

    @property
    def size(self) -> int:
        """Number of whole choices, those that are not allowed included."""
        return prod(len(knob.values) for knob in self.knobs)

    def point(self, index: int) -> dict[str, Value]:
        """The whole choice number `index` of `size`, the last knob turning fastest."""
        choice: dict[str, Value] = {}
        for knob in reversed(self.knobs):
            index, position = divmod(index, len(knob.values))
            choice[knob.name] = knob.values[position]
        return {knob.name: choice[knob.name] for knob in self.knobs}

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


def together(*results: Pattern) -> Apply[Concat]:
    """A pattern with several results in one launch. The results are adjacent in one value of one dimension,
    row-major.

    Values of a network become such a value by the rewrite `dovetail.legalize.results_together`; `results_of` tells
    where each lies. All are of one type of element.
    """
    flat = (apply(Reshape, part, name=f"flat_{number}") for number, part in enumerate(results))
    return apply(Concat, *flat, name="together")


class Match(Record):
    """A pattern found in a graph: its leaves bound to values, its operators to nodes."""

    graph: Graph
    """The network it was found in: a region's own, or a tile's."""
    root: str
    """The value the pattern computes."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Leaf name -> value name."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """Operator name in the pattern -> node."""
    choice: Choice = field(default_factory=dict)
    """Settings of the offload's own knobs; one that is absent means the offload's default."""
    within: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of larger values, by the name of the value inside; set only for cycles of choices."""

    loaded: frozenset[str] = frozenset()
    """Names of `Offload.buffered` whose bytes are in the engine's buffer already; set only for `cycles`."""

    def apart(self, value: str) -> bool:
        """True if an image is known to have columns of other values between its rows.

        Args:
            value: name of the image in the graph.
        """
        return value in self.within and self.within[value][-2] != self.graph.types[value].shape[-2]

    def has(self, name: str) -> bool:
        """True if an optional operator of the pattern is in the graph.

        Args:
            name: name of the operator in the pattern.
        """
        return name in self.nodes

    def operator(self, name: str, kind: type[OperatorT]) -> OperatorT:
        """The operator bound to a name.

        Args:
            name: name of the operator in the pattern.
            kind: class that the operator must have.

        Raises:
            TypeError: the operator is of another class.
        """
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
        """Multiply-accumulates; for other operators, elements of the result."""
        types = self.graph.types
        macs = sum(node.operator.macs([types[name] for name in node.inputs]) for node in self.graph.nodes)
        return macs or self.result.elements


class Scope(enum.Enum):
    """Scope of a constraint."""

    ALL = "all"
    LAYERS = "layers"
    """Whole layers, when the network is partitioned; a tile of one need not keep it."""
    TILES = "tiles"
    """A single launch: a layer that does not keep the limit is cut until its tiles do."""


class Constraint(Record):
    """A limit beyond the pattern.

    `sentence` is what a user reads when it fails, followed by the value; the support tables are made from it.
    """

    sentence: str
    """The limit, as a user reads it; without a full stop."""
    measure: Callable[[Match], Any]
    """The value the limit is about."""
    accepts: Callable[[Any], bool]
    """Whether that value is within the limit."""
    scope: Scope = Scope.ALL
    """Scope the constraint applies to."""

    def failure(self, match: Match) -> str | None:
        """The sentence with the offending value, None when the constraint holds."""
        value = self.measure(match)
        return None if self.accepts(value) else f"{self.sentence}; here: {value}"

    def worded(self, sentence: str) -> Constraint:
        """The same limit with another sentence.

        Args:
            sentence: the new sentence, which `explain` and the support page show.
        """
        return replace(self, sentence=sentence)


def broken_limits(limits: Iterable[Constraint], match: Match, but: Scope) -> str:
    """The sentences of all limits that a match breaks, without those of one scope; a limit may rely on those before."""
    broken: list[str] = []
    for limit in limits:
        try:
            failure = limit.failure(match) if limit.scope is not but else None
        except Exception:
            if broken:
                break
            raise
        if failure is not None:
            broken.append(failure)
    return "; ".join(broken)


def one_of(sentence: str, measure: Callable[[Match], Any], *allowed: Any, scope: Scope = Scope.ALL) -> Constraint:
    """A limit to some values.

    Args:
        sentence: the limit, as messages say it.
        measure: what is limited, of a match.
        allowed: its values.
        scope: where the limit counts.
    """
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
    found = find(pattern, graph, root, inside)
    if isinstance(found, Mismatch):
        return found
    values = {part.name: value for part, value in found.values.items() if isinstance(part, Leaf)}
    nodes = {part.name: node for part, node in found.nodes.items() if isinstance(part, Apply)}
    return Match(graph, root, values, nodes)
