"""Steps with which every requantisation is a right shift: powers of two, the same for the operands of a sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil, log2

from dovetail.calibrate.points import carries, shared
from dovetail.calibrate.ranges import Steps
from dovetail.graph.graph import Graph
from dovetail.operators.arithmetic import Add


def shiftable(graph: Graph, steps: Mapping[str, Steps], spare: Mapping[str, int]) -> dict[str, Steps]:
    """The finest steps that are powers of two, no finer than those given, and fit each other.

    Args:
        graph: the float graph.
        steps: of the quantised values, symmetric.
        spare: bits that are to stay free above a value, by name.
    """
    scale = {name: 2.0 ** (ceil(log2(one.scale)) + spare.get(name, 0)) for name, one in steps.items()}
    joined = shared(graph, tuple(steps))
    sums = _sums(graph, steps)
    before: dict[str, float] = {}
    while before != scale:
        before = dict(scale)
        for name, owner in joined.items():
            scale[name] = scale[owner] = max(scale[name], scale[owner])
        for operands, result in sums:
            most = max(scale[name] for name in operands)
            scale.update(dict.fromkeys(operands, most))
            scale[result] = max(scale[result], most)
    return {name: replace(one, scale=scale[name]) for name, one in steps.items()}


def operands_of(graph: Graph, layers: Collection[str]) -> set[str]:
    """The quantised values that layers, by their results, read their activations from."""
    return {_source(graph, node.inputs[0]) for node in graph.nodes if node.output in layers}


def _source(graph: Graph, value: str) -> str:
    """The value whose elements a value has."""
    producers = graph.producers()
    while value in producers and carries(producers[value]):
        value = producers[value].inputs[0]
    return value


def _sums(graph: Graph, steps: Mapping[str, Steps]) -> list[tuple[tuple[str, ...], str]]:
    """The quantised operands and the quantised result of every sum of computed values."""
    users = graph.users()
    found = []
    for node in graph.nodes:
        operands = tuple(_source(graph, value) for value in node.inputs)
        if not isinstance(node.operator, Add) or any(name not in steps for name in operands):
            continue
        result = node.output
        while result not in steps and len(users[result]) == 1:
            result = users[result][0].output  # limits that are applied to it
        if result in steps:
            found.append((operands, result))
    return found
