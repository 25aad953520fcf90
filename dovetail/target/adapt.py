"""The integer graph in the form that a target takes: the rewrites of a policy, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dovetail.errors import TargetError
from dovetail.ir.graph import Graph, verify
from dovetail.ir.rows import rows_as_matrix
from dovetail.target.description import Policy

Stage = Callable[[str, Graph, int], None]
"""Told the name of each rewrite, the graph after it, and how far a value may have moved."""


def adapt(graph: Graph, policy: Policy, done: Stage | None = None) -> Graph:
    """The graph after every rewrite of a policy, in its order; `done` is called after each. Before them, the operands
    of dense layers become matrices.

    Raises:
        TargetError: the rewrites give a graph whose types contradict its operators.
    """
    graph = rows_as_matrix(graph)
    for rewrite in policy.rewrites:
        before = graph.left
        graph = rewrite.apply(graph)
        reasons = {name: f"{rewrite.name}: {why}" for name, why in graph.left.items() if before.get(name) != why}
        reasons = {name: f"{why}; {before[name]}" if name in before else why for name, why in reasons.items()}
        kept = {name: why for name, why in {**before, **reasons}.items() if name in graph.types}
        graph = replace(graph, left=kept)
        if done is not None:
            done(rewrite.name, graph, rewrite.lsb)
    if policy.rewrites:
        try:
            verify(graph)
        except ValueError as error:
            hint = "correct the rewrites of the target file; if they come with Dovetail, this is a bug: report it"
            where = f"the rewrites of the policy {policy.name!r}"
            raise TargetError(str(error), where=where, hint=hint) from error
    return graph
