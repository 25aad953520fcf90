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
    found = dict[str, Steps]()
    for name in graph.given:
        if (form := _read_as(graph, name)) is not None:
            found[name] = form[1]
            graph = _with_input(graph, name, form[0])
    return prune(graph), found


def _read_as(graph: Graph, name: str) -> tuple[DType, Steps] | None:
    """The integers that a float input is quantised to by all that reads it; None where it is read otherwise."""
    users = graph.users()[name]
    forms = {_form(graph, node) if node.operator.quantises else None for node in users}
    free = name not in graph.outputs and not any(node.output in graph.outputs for node in users)
    return forms.pop() if len(forms) == 1 and free else None


def _with_input(graph: Graph, name: str, dtype: DType) -> Graph:
    """The graph with an input as the integers it is quantised to."""
    results = {node.output: name for node in graph.users()[name]}
    kept = tuple(node for node in graph.nodes if node.output not in results)
    types = {value: kind for value, kind in graph.types.items() if value not in results}
    types[name] = TensorType(types[name].shape, dtype)
    inner = tuple(replace(n, inputs=tuple(results.get(value, value) for value in n.inputs)) for n in kept)
    return replace(graph, nodes=inner, types=types)


def integer_states(graph: Graph) -> Graph:
    """The integer graph with float states as the integers they are quantised to, where what is read of them and what
    replaces them have the same steps."""
    for place, (read, written, first) in enumerate(graph.kept):
        form, node = _read_as(graph, read), graph.producer(written)
        if form is None or node is None or not node.operator.dequantises or _form(graph, node) != form:
            continue
        source = node.inputs[0]
        if source not in graph.producers() or source in graph.outputs or graph.users()[written]:
            continue
        states = list(graph.states)
        states[place] = form[1].quantize(first, form[0])
        types = {value: kind for value, kind in graph.types.items() if value != written}
        graph = replace(graph, nodes=tuple(one for one in graph.nodes if one is not node), types=types)
        graph = _with_input(renamed(graph, {source: written}), read, form[0])
        graph = replace(graph, states=tuple(states))
    return prune(graph)


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
