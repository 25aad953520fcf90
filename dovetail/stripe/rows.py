"""What a band of rows of a region's result costs: the rows it reads and the multiply-accumulates it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail import kernels
from dovetail.graph.graph import Graph
from dovetail.graph.types import Box, TensorType, box_shape, full_box
from dovetail.partition.regions import Region
from dovetail.program.in_place import reads_in_place

Rows = tuple[int, int]
"""First row and one past the last."""


@dataclass(frozen=True)
class Band:
    """Some rows of a region's result."""

    reads: tuple[tuple[str, Rows], ...]
    """The rows of each operand."""
    macs: int


@dataclass
class Bands:
    """The bands of a network's regions, each worked out once."""

    graph: Graph
    regions: tuple[Region, ...]
    _known: dict[tuple[int, Rows], Band | None] = field(default_factory=dict)
    _replaced: dict[int, str | None] = field(default_factory=dict)

    def band(self, index: int, rows: Rows) -> Band | None:
        """Some rows of what a region computes; None where it cannot be computed so."""
        key = (index, rows)
        if key not in self._known:
            try:
                self._known[key] = _band(self.regions[index].graph, rows)
            except ValueError:
                self._known[key] = None
        return self._known[key]

    def replaced(self, index: int) -> str | None:
        """The operand whose place a region's result could take."""
        if index not in self._replaced:
            graph = self.regions[index].graph
            free = self.regions[index].is_view is False and kernels.may_overwrite(graph)
            found = (value for value in graph.inputs if free and reads_in_place(graph, value))
            self._replaced[index] = next(found, None)
        return self._replaced[index]


def can_be_cut(kind: TensorType) -> bool:
    """True for one image, whose rows lie one behind the other."""
    return len(kind.shape) == 4 and kind.shape[0] == 1 and kind.shape[1] > 1 and kind.dtype.bits >= 8


def row_bytes(kind: TensorType) -> int:
    """Bytes of one row of an image."""
    return kind.nbytes // kind.shape[1]


def _band(graph: Graph, rows: Rows) -> Band:
    """Propagate a box of whole rows from the result to the operands; raises ValueError where a rule does."""
    (output,) = graph.outputs
    if any(not can_be_cut(graph.types[name]) for name in (*graph.inputs, output)):
        raise ValueError("not an image")
    whole = full_box(graph.types[output].shape)
    wanted: dict[str, Box] = {output: (whole[0], rows, *whole[2:])}
    total = 0
    for node in reversed(graph.nodes):
        operator, boxes = node.operator.crop(wanted[node.output], [graph.types[name] for name in node.inputs])
        kinds = [TensorType(box_shape(b), graph.types[n].dtype) for n, b in zip(node.inputs, boxes, strict=True)]
        total += operator.macs(kinds)
        for name, box in zip(node.inputs, boxes, strict=True):
            before = wanted.get(name, box)
            wanted[name] = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(before, box, strict=True))
    if any(start >= stop for name in graph.inputs for start, stop in wanted[name]):
        raise ValueError("a part reads nothing of an operand")
    return Band(tuple((name, wanted[name][1]) for name in graph.inputs), total)
