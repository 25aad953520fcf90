"""Writes a segment of a graph as its stripes, each from slices of the first value, joined to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.graph.graph import Graph, Node
from dovetail.graph.trim import part
from dovetail.graph.types import Array, TensorType, full_box
from dovetail.operators.movement import Concat
from dovetail.stripe.rows import Rows


def striped(graph: Graph, nodes: Sequence[Node], source: str, result: str, bands: Sequence[Rows]) -> Graph:
    """The graph with some of its nodes computed in stripes.

    Args:
        graph: the whole graph.
        nodes: those between `source` and `result`, neighbours in the graph's order.
        source: the only value they read that they do not compute.
        result: the only value of them that others read, an image.
        bands: the rows of the result each stripe computes, in the order of computation.
    """
    read = {name for node in nodes for name in node.inputs}
    constants = {name: array for name, array in graph.constants.items() if name in read}
    inner = Graph(graph.name, (source,), (result,), tuple(nodes), graph.types, constants)
    whole = full_box(graph.types[result].shape)
    made: list[Node] = []
    types: dict[str, TensorType] = dict(graph.types)
    kept: dict[str, Array] = dict(graph.constants)
    joined: dict[Rows, str] = {}
    for number, band in enumerate(bands):
        stripe = part(inner, {result: (whole[0], band, *whole[2:])}, f" stripe {number}")
        joined[band] = stripe.outputs[0]
        types.update(stripe.types)
        kept.update(stripe.constants)
        made += stripe.nodes
    made.append(Node(Concat(1), tuple(joined[band] for band in sorted(joined)), result))
    place = graph.nodes.index(nodes[0])
    rest = graph.nodes[place + len(nodes) :]
    return replace(graph, nodes=(*graph.nodes[:place], *made, *rest), types=types, constants=kept)

