"""Operators that compute the same twice, or change nothing: left out, exactly.

Two operators of the same operands and constants give the same: where the result is one that networks store, everybody
reads the first. (Wide sums and what only moves elements go with those who read them: to store them would cost more than
to make them again.) Operators that give back each value their operand can have are passed by: limits that nothing
exceeds, requantisations to the same scale and zero point.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.graph import Graph, Node, prune
from dovetail.ir.operators.base import Operator
from dovetail.ir.pattern import apply
from dovetail.ir.rules import Draft, Rule, RuleMatch, run
from dovetail.ir.types import DType
from dovetail.records import Record

_STORED_BITS = 16
"""Bits of the widest integers networks store."""
_MOST_TRIED = 1 << 20
"""Most elements a chain of operators is tried on."""
_LONGEST = 4
"""Operators in such a chain."""


class DeduplicatedGraph(Record):
    """A graph without what is computed twice or changes nothing."""

    graph: Graph
    twice: int
    """Operators left out because another one computes the same."""
    idle: int
    """Operators left out because they change nothing."""


def without_redundant(graph: Graph) -> DeduplicatedGraph:
    """The same network, of the same inputs, outputs and results, with every computation once and none that is idle."""
    first = run(graph, (Rule(apply(Operator), _source),))
    second = _once(first)
    count = [len(each.nodes) for each in (graph, first, second)]
    if count[0] == count[2]:
        return DeduplicatedGraph(graph, 0, 0)
    return DeduplicatedGraph(second, count[1] - count[2], count[0] - count[1])


def _once(graph: Graph) -> Graph:
    """The graph with one of several operators that compute the same."""
    numbers: dict[object, int] = {}
    known = {name: numbers.setdefault(name, len(numbers)) for name in graph.inputs}
    for name, array in graph.constants.items():
        content = (graph.types[name], array.tobytes())
        known[name] = numbers.setdefault(content, len(numbers))
    makers: dict[int, str] = {}
    now: dict[str, str] = {}
    for node in graph.nodes:
        key = (node.operator, tuple(known[name] for name in node.inputs))
        number = known[node.output] = numbers.setdefault(key, len(numbers))
        maker = makers.setdefault(number, node.output)
        if maker != node.output and node.output not in graph.outputs and _is_stored(graph, node):
            now[node.output] = maker
    nodes = (replace(node, inputs=tuple(now.get(name, name) for name in node.inputs)) for node in graph.nodes)
    return prune(replace(graph, nodes=tuple(nodes))) if now else graph


def _is_stored(graph: Graph, node: Node) -> bool:
    """Whether a result is worth a place of its own."""
    kind = graph.types[node.output].dtype
    return not node.operator.moves_only and (kind is DType.FLOAT32 or kind.bits <= _STORED_BITS)


def _source(match: RuleMatch) -> str | None:
    """The value behind which a node, and perhaps some before it, give back what they get."""
    draft, kind, chain = match.draft, match.type(match.root.output), list[Node]()
    if not kind.dtype.is_integer or kind.dtype.bits > _STORED_BITS:
        return None
    at: Node | None = match.root
    while at is not None and len(chain) < _LONGEST and _is_of_one(draft, at):
        chain.insert(0, at)
        source = at.inputs[0]
        if draft.types[source] == kind and _gives_back(draft, chain, source):
            return source
        at = draft.producer(source)
    return None


def _is_of_one(draft: Draft, node: Node) -> bool:
    """True for an operator of one value, element by element, whose constants run along the last axis at most."""
    constants = [draft.constants.get(name) for name in node.inputs[1:]]
    alone = node.inputs[0] not in draft.constants and node.operator.pointwise > 0 and not node.operator.moves_only
    shaped = draft.types[node.inputs[0]].shape == draft.types[node.output].shape
    return alone and shaped and all(one is not None and prod(one.shape[:-1]) == 1 for one in constants)


def _gives_back(draft: Draft, chain: list[Node], source: str) -> bool:
    """Tried on every value there can be, of each channel."""
    kind = draft.types[source]
    low, high = _range(draft, source)
    channels = max((draft.constants[name].size for node in chain for name in node.inputs[1:]), default=1)
    if (high - low + 1) * channels > _MOST_TRIED or channels not in (1, *kind.shape[-1:]):
        return False
    values = np.repeat(np.arange(low, high + 1).astype(kind.dtype.numpy)[:, None], channels, axis=1)
    found = values
    for node in chain:
        found = node.operator.evaluate([found, *(draft.constants[name] for name in node.inputs[1:])])
    return found.dtype == values.dtype and bool(np.array_equal(found, values))


def _range(draft: Draft, value: str) -> tuple[int, int]:
    """The least and the greatest integer a value can have, as far as that is seen."""
    kind = draft.types[value].dtype
    if value in draft.constants:
        return int(draft.constants[value].min()), int(draft.constants[value].max())
    maker = draft.producer(value)
    chosen = maker.operator.chosen_from(maker.inputs) if maker else ()
    if maker is None or not chosen:
        return (maker and maker.operator.limited_to) or (kind.low, kind.high)
    ends = [_range(draft, name) for name in chosen]
    if (fill := maker.operator.filler) is not None:
        ends.append((int(fill), int(fill)))
    return min(low for low, _ in ends), max(high for _, high in ends)
