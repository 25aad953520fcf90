"""Values that lie within a larger one they become part of: a concatenation then moves nothing, a pad only fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.graph.graph import Graph
from dovetail.graph.layout import check_part
from dovetail.graph.stretch import joined_boxes, sliced_box
from dovetail.graph.types import Box
from dovetail.operators.movement import Concat, Pad, Relayout, Slice
from dovetail.partition.regions import Region


@dataclass(frozen=True)
class Inside:
    """A value that lies as a part of another one."""

    outer: str
    """Name of the value it is part of."""
    box: Box
    """The part."""


def inside(graph: Graph, regions: Sequence[Region]) -> Mapping[str, Inside]:
    """Put the operands of concatenations and pads inside the result, the one that saves most bytes first.

    A value can lie inside another of the same layout when whatever writes or reads it takes strides (an engine or
    a copy), and it is neither an input nor an output of the network. A padded value must be for engines, too.
    On a core alone, slices and joints of whole rows lie where they belong.
    """
    candidates = [
        (graph.types[value].nbytes, position, value, Inside(region.output, box))
        for position, region in enumerate(regions)
        if region.mover and region.output not in graph.outputs
        for value, box in _parts(region, regions)
        if _fits(region, value, box) and _takes_strides(value, region, graph, regions)
    ]
    chosen = {value: found for region in regions if region.still for value, found in _still(graph, region)}
    for _, _, value, found in sorted(candidates, key=lambda c: (-c[0], c[1])):
        if value not in chosen and found.outer not in chosen and value not in {i.outer for i in chosen.values()}:
            chosen[value] = found
    return chosen


def _still(graph: Graph, region: Region) -> Iterator[tuple[str, Inside]]:
    """What lies inside another value where the core does nothing: a slice in its operand, operands in their joint."""
    (node,) = region.graph.nodes
    if isinstance(node.operator, Slice):
        yield node.output, Inside(node.inputs[0], sliced_box(node))
    else:
        boxes = joined_boxes(graph, node)
        yield from ((value, Inside(node.output, box)) for value, box in zip(node.inputs, boxes, strict=True))


def _parts(region: Region, regions: Sequence[Region]) -> Iterator[tuple[str, Box]]:
    """The operands that could lie inside the result, and the box of it each becomes."""
    node = region.graph.nodes[0]
    if isinstance(node.operator, Concat):
        yield from concatenated(region)
    readers = [reader for reader in regions if region.output in reader.graph.inputs]
    if isinstance(node.operator, Pad) and readers and all(reader.engine is not None for reader in readers):
        sizes = region.graph.types[node.inputs[0]].shape
        yield node.inputs[0], tuple((b, b + size) for b, size in zip(node.operator.before, sizes, strict=True))


def concatenated(region: Region) -> list[tuple[str, Box]]:
    """The operands of a concatenation and the box of the result each becomes; none for an operand used twice."""
    node = region.graph.nodes[0]
    boxes = zip(node.inputs, joined_boxes(region.graph, node), strict=True)
    return [(value, box) for value, box in boxes if node.inputs.count(value) == 1]


def _fits(region: Region, value: str, box: Box) -> bool:
    """True when the part is one of whole blocks of the result's layout, which is the value's own."""
    layout = region.layouts.get(region.output)
    try:
        check_part(layout, box, region.graph.types[region.output].shape)
    except ValueError:
        return False
    return region.layouts.get(value) == layout


def _takes_strides(value: str, mover: Region, graph: Graph, regions: Sequence[Region]) -> bool:
    """True when an engine or a relayout makes the value, and only engines and the mover read it, all in one layout."""
    if value in graph.inputs or value in graph.outputs:
        return False
    makers = [region for region in regions if region.output == value]
    readers = [region for region in regions if value in region.graph.inputs]
    strided = all(
        region.takes_strides or isinstance(region.graph.nodes[0].operator, Relayout) for region in makers
    )
    alike = all(region.layouts.get(value) == mover.layouts.get(value) for region in (*makers, *readers))
    others = all(region.takes_strides or region is mover for region in readers)
    return bool(makers) and strided and alike and others
