"""Layout: how every value of the network lies, chosen for the graph as a whole so that as few bytes as possible move.

Every value lies in its logical order (NHWC), row-major, unless it can lie inside a larger value it becomes part of:
then a concatenation moves nothing. A view (reshape) lies where its operand lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.graph.graph import Graph
from dovetail.graph.types import Box
from dovetail.operators.movement import Concat
from dovetail.partition.regions import Region


@dataclass(frozen=True)
class Inside:
    """A value that lies as a part of another one."""

    outer: str
    """Name of the value it is part of."""
    box: Box
    """The part."""


Layouts = Mapping[str, Inside]
"""The values that do not lie densely by themselves."""


def choose_layouts(graph: Graph, regions: Sequence[Region]) -> Layouts:
    """Put the operands of concatenations inside the result, the one that saves most bytes first.

    A value can lie inside another when whatever writes or reads it takes strides (an engine or a copy), and it is
    neither an input nor an output of the network.
    """
    candidates = [
        (graph.types[value].nbytes, position, value, Inside(region.output, box))
        for position, region in enumerate(regions)
        if isinstance(region.graph.nodes[0].operator, Concat) and region.output not in graph.outputs
        for value, box in _parts(region)
        if _takes_strides(value, region, graph, regions)
    ]
    chosen: dict[str, Inside] = {}
    for _, _, value, inside in sorted(candidates, key=lambda c: (-c[0], c[1])):
        if value not in chosen and inside.outer not in chosen and value not in {i.outer for i in chosen.values()}:
            chosen[value] = inside
    return chosen


def _parts(region: Region) -> list[tuple[str, Box]]:
    """The operands of a concatenation and the box of the result each becomes; none for an operand used twice."""
    node = region.graph.nodes[0]
    assert isinstance(node.operator, Concat)
    shape = region.graph.types[region.output].shape
    axis, start, found = node.operator.axis, 0, []
    for value in node.inputs:
        size = region.graph.types[value].shape[axis]
        box = tuple((start, start + size) if i == axis else (0, length) for i, length in enumerate(shape))
        start += size
        if node.inputs.count(value) == 1:
            found.append((value, box))
    return found


def _takes_strides(value: str, concat: Region, graph: Graph, regions: Sequence[Region]) -> bool:
    """True when an engine makes the value and only engines and the concatenation read it."""
    if value in graph.inputs or value in graph.outputs:
        return False
    makers = [region for region in regions if region.output == value]
    readers = [region for region in regions if value in region.graph.inputs]
    by_engine = all(region.engine is not None for region in makers)
    return bool(makers) and by_engine and all(region.engine is not None or region is concat for region in readers)
