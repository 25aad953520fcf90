"""Cuts a region to a tile: halo, edge padding and slices of the constants follow from each operator's own rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array, Box, TensorType, box_shape, box_slices


@dataclass(frozen=True)
class Tile:
    """A region cut to part of its result."""

    graph: Graph
    """The computation, with the tile's shapes, pads and constants; the value names are the region's."""
    box: Box
    """The part of the result."""
    reads: dict[str, Box]
    """The part of each runtime operand."""


def crop(graph: Graph, box: Box) -> Tile:
    """The part of a one-output graph that computes `box` of its output.

    Raises:
        ValueError: an operator cannot be computed in parts, or one value is read in two different parts.
    """
    wanted: dict[str, Box] = {graph.outputs[0]: box}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        kinds = [graph.types[name] for name in node.inputs]
        operator, boxes = node.operator.crop(wanted[node.output], kinds)
        nodes.append(replace(node, operator=operator))
        for name, part in zip(node.inputs, boxes, strict=True):
            if wanted.setdefault(name, part) != part:
                raise ValueError(f"'{name}' is read in two different parts")
    types = {name: TensorType(box_shape(part), graph.types[name].dtype) for name, part in wanted.items()}
    constants: dict[str, Array] = {name: array[box_slices(wanted[name])] for name, array in graph.constants.items()}
    cropped = replace(graph, nodes=tuple(reversed(nodes)), types=types, constants=constants)
    return Tile(cropped, box, {name: wanted[name] for name in graph.inputs})
