"""Layout: how every value of the network lies, chosen for the graph as a whole so that as few bytes as possible move.

Every value has exactly one layout. Engines say which they take and give; the core takes row-major, and so do the
network's inputs and outputs. In three steps: `choose` gives every region the layouts of its values, `insert` puts a
`Relayout` wherever a value is then wanted otherwise than it lies, and `inside` lets values lie within the larger ones
they become part of, so that joining and padding them moves nothing. A view (reshape) lies where its operand lies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dovetail.graph.graph import Graph
from dovetail.graph.layout import Layout, nbytes
from dovetail.layout.choose import choose
from dovetail.layout.insert import insert
from dovetail.layout.inside import Inside, inside
from dovetail.operators.movement import Relayout
from dovetail.partition.regions import Region
from dovetail.target.description import Target


@dataclass(frozen=True)
class Conversion:
    """A change of a value's layout."""

    layer: str
    """The region that does it."""
    maker: str
    """Who computes the value: an engine, the DMA, "core", or "input"."""
    readers: tuple[str, ...]
    """Who reads the result; "output" where the network gives it."""
    nbytes: int
    """Bytes read and written."""


@dataclass(frozen=True)
class Placed:
    """The network with the layout of every value."""

    graph: Graph
    """The whole network, with a `Relayout` node wherever a value changes its layout."""
    regions: tuple[Region, ...]
    """In execution order; each knows the layouts of its values."""
    layouts: Mapping[str, Layout]
    """The values that do not lie row-major."""
    inside: Mapping[str, Inside]
    """The values that do not lie by themselves."""

    def nbytes(self, value: str) -> int:
        """Bytes of a value as it lies, unused parts of last blocks included."""
        return nbytes(self.layouts.get(value), self.graph.types[value])

    def conversions(self) -> tuple[Conversion, ...]:
        """The relayouts, in execution order."""
        made = {region.output: region.place for region in self.regions}
        found = []
        for region in self.regions:
            if not isinstance(region.graph.nodes[0].operator, Relayout):
                continue
            source, result = region.graph.inputs[0], region.output
            readers = [reader.place for reader in self.regions if result in reader.graph.inputs]
            readers += ["output"] if result in self.graph.outputs else []
            moved = self.nbytes(source) + self.nbytes(result)
            found.append(Conversion(region.name, made.get(source, "input"), tuple(dict.fromkeys(readers)), moved))
        return tuple(found)


def choose_layouts(
    graph: Graph, regions: Sequence[Region], target: Target, native: Collection[str] = ()
) -> Placed:
    """Give every value its layout.

    Args:
        graph: the integer graph.
        regions: of `partition`, in execution order.
        target: the machine.
        native: inputs and outputs of the network that lie as the regions have them, and not row-major.

    Raises:
        ValueError: an offload's layout does not fit the values it is for.
    """
    placed, known, layouts = insert(graph, choose(graph, regions), target, native)
    return Placed(placed, known, layouts, inside(placed, known))


__all__ = ["Conversion", "Inside", "Placed", "choose_layouts"]
