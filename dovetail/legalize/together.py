"""Values an engine computes at once as one value, so that one launch gives several results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.movement import Concat, Reshape, Slice
from dovetail.target.pattern import Apply, Constraint, Match, Pattern, match_pattern


def results_together(pattern: Apply[Any], limits: Sequence[Constraint] = ()) -> Callable[[Graph], Graph]:
    """A rewrite, exact in every bit: values that a pattern made with `together` gives become parts of one value.

    Args:
        pattern: the offload's.
        limits: what must hold, as the offload's constraints: where one does not, the values stay as they are.
    """
    parts = [flat.inputs[0] for flat in pattern.inputs if isinstance(flat, Apply)]

    def apply(graph: Graph) -> Graph:
        taken: set[str] = set()
        for node in graph.nodes:
            for results, members in _found(parts, graph, node.output):
                made = None if taken & members else _joined(graph, results, members)
                match = match_pattern(pattern, made, f"{results[-1]} together") if made else None
                if made is None or not isinstance(match, Match) or any(limit.failure(match) for limit in limits):
                    continue
                graph = made
                taken |= {one.output for one in match.nodes.values()} | members
                break
        return graph

    return apply


def _found(parts: Sequence[Pattern], graph: Graph, last: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """The values of the parts of which the last is given, and all that is computed for them."""
    found = match_pattern(parts[-1], graph, last, inside=False)
    if isinstance(found, Match):
        yield from _others(parts, graph, found, (last,), {node.output for node in found.nodes.values()})


def _others(
    parts: Sequence[Pattern], graph: Graph, known: Match, results: tuple[str, ...], members: set[str]
) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """As `_found`, with the last parts known: another is one of their own, or one of the same operands."""
    part = parts[-1 - len(results)] if len(results) < len(parts) else None
    if part is None:
        yield results, members
        return
    if isinstance(part, Apply) and part.name in known.nodes:
        yield from _others(parts, graph, known, (known.nodes[part.name].output, *results), members)
        return
    for node in graph.nodes:
        match = match_pattern(part, graph, node.output, inside=False) if node.output not in members else None
        if isinstance(match, Match) and all(known.values.get(leaf, v) == v for leaf, v in match.values.items()):
            both = replace(known, values={**known.values, **match.values}, nodes={**known.nodes, **match.nodes})
            own = {one.output for one in match.nodes.values()}
            yield from _others(parts, graph, both, (node.output, *results), members | own)


def _joined(graph: Graph, results: Sequence[str], members: set[str]) -> Graph | None:
    """The graph with the results as slices of one value; None where something the members read needs one of them."""
    inner = {value: f"{value} inside" for value in results}
    types, nodes = dict(graph.types), list[Node]()
    for node in graph.nodes:
        own = node.output in members
        inputs = tuple(inner.get(name, name) if own else name for name in node.inputs)
        nodes.append(replace(node, inputs=inputs, output=inner.get(node.output, node.output)))
    origin = next(node.origin for node in graph.nodes if node.output == results[-1])
    joint, sizes = f"{results[-1]} together", [graph.types[value].elements for value in results]
    more = [Node(Reshape((size,)), (inner[v],), f"{v} flat", origin) for v, size in zip(results, sizes, strict=True)]
    more.append(Node(Concat(0), tuple(node.output for node in more), joint, origin))
    for value, size, end in zip(results, sizes, accumulate(sizes), strict=True):
        more.append(Node(Slice((end - size,), (end,), (1,)), (joint,), f"{value} part", origin))
        more.append(Node(Reshape(graph.types[value].shape), (f"{value} part",), value, origin))
    types |= {inner[value]: graph.types[value] for value in results}
    for node in more:
        types[node.output] = node.operator.infer([types[name] for name in node.inputs])
    ordered = _in_order([*nodes, *more], types.keys() - {node.output for node in (*nodes, *more)})
    return replace(graph, nodes=ordered, types=types) if ordered is not None else None


def _in_order(nodes: Sequence[Node], given: Collection[str]) -> tuple[Node, ...] | None:
    """The nodes so that each comes behind what it reads, otherwise in the order given; None where there is none."""
    known, found, waiting = set(given), list[Node](), list(nodes)
    while waiting:
        ready = next((node for node in waiting if known.issuperset(node.inputs)), None)
        if ready is None:
            return None
        waiting.remove(ready)
        known.add(ready.output)
        found.append(ready)
    return tuple(found)
