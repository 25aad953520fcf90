"""Inputs and outputs in the integers the network computes with, in place of floats that are only quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dovetail.ir.boundary import Steps, steps_of
from dovetail.ir.graph import Graph, Node, prune, renamed
from dovetail.ir.types import DType, TensorType


def integer_inputs(graph: Graph) -> tuple[Graph, Mapping[str, Steps]]:
    """The integer graph with each float input as the integers it is quantised to, where nothing else reads it, and
    what these stand for."""
    users, found = graph.users(), dict[str, Steps]()
    for name in graph.given:
        forms = {_form(graph, node) for node in users[name]}
        form = forms.pop() if len(forms) == 1 else None
        results = {node.output: name for node in users[name]}
        if form is None or name in graph.outputs or any(result in graph.outputs for result in results):
            continue
        kept = tuple(node for node in graph.nodes if node.output not in results)
        types = {value: kind for value, kind in graph.types.items() if value not in results}
        types[name] = TensorType(types[name].shape, form[0])
        found[name] = form[1]
        inner = tuple(replace(n, inputs=tuple(results.get(value, value) for value in n.inputs)) for n in kept)
        graph = replace(graph, nodes=inner, types=types)
    return prune(graph), found


def integer_outputs(graph: Graph) -> tuple[Graph, Mapping[str, Steps]]:
    """The integer graph with the integers of each float output that is only dequantised from some, and what these stand
    for; a value that another output or an input is too stays as it is."""
    producers, found = graph.producers(), dict[str, Steps]()
    for name in graph.results:
        node = producers.get(name)
        if node is None or not node.operator.dequantises or graph.users()[name]:
            continue
        source, form = node.inputs[0], _form(graph, node)
        if form is None or source not in producers or source in graph.outputs or graph.results.count(name) > 1:
            continue
        types = {value: kind for value, kind in graph.types.items() if value != name}
        graph = replace(graph, nodes=tuple(other for other in graph.nodes if other is not node), types=types)
        graph = renamed(graph, {source: name})
        producers, found[name] = graph.producers(), form[1]
    return prune(graph), found


def _form(graph: Graph, node: Node) -> tuple[DType, Steps] | None:
    """Type and steps of what quantises or dequantises a whole value; None for anything else."""
    steps = steps_of(graph, node)
    kind = graph.types[node.output if node.operator.quantises else node.inputs[0]].dtype
    return None if steps is None else (kind, steps)
