"""Policies beside the default one: whether one of them would take fewer cycles."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from dovetail.ir.graph import Graph
from dovetail.notes import Kind, Note
from dovetail.schedule.partition import cycles_within, layer_cycles
from dovetail.target.adapt import adapt
from dovetail.target.description import Target

_LESS = 0.9
"""Share of the default policy's cycles that another one must stay below to be named."""


class PolicyRivals:
    """The other policies of a target, while the default one is applied. Rewrites that begin both are done once."""

    def __init__(self, graph: Graph, target: Target) -> None:
        """The integer graph before the first rewrite, and the machine."""
        self.target, self.own = target, target.policies[0]
        self.others = () if target.core.is_host else target.policies[1:]
        pairs = {one.name: zip(self.own.rewrites, one.rewrites, strict=False) for one in self.others}
        self.shared = {name: sum(1 for _ in takewhile(_is_same, own)) for name, own in pairs.items()}
        """Name of a policy -> number of rewrites it begins with as the default one does."""
        self.graphs = {0: graph}
        """Number of rewrites -> the graph after these, where another policy goes on from there."""
        self.done = 0

    def follow(self, graph: Graph) -> None:
        """The default policy has done a rewrite more, which gave this graph."""
        self.done += 1
        if self.done in self.shared.values():
            self.graphs[self.done] = graph

    def note(self, adapted: Graph) -> Note | None:
        """The note that another policy takes clearly fewer cycles than the graph adapted by the default one, by
        estimate; None where none does."""
        if not self.others:
            return None
        default, cycles = layer_cycles(adapted, self.target), dict[str, float]()
        for one in self.others:
            count = self.shared[one.name]
            graph = adapt(self.graphs[count], replace(one, rewrites=one.rewrites[count:]))
            spent = cycles_within(graph, self.target, default)
            if spent is not None:
                cycles[one.name] = spent
        least = min(cycles, key=lambda name: cycles[name], default="")
        if not least or cycles[least] >= _LESS * default:
            return None
        figures = f"{cycles[least]:,.0f} cycles in place of {default:,.0f} by estimate"
        what = f"the policy '{self.own.name}' is the default; --requant '{least}' would take {figures}"
        return Note(Kind.SLOWER, what)


def _is_same(pair: tuple[object, object]) -> bool:
    return pair[0] == pair[1]
