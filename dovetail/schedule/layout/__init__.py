"""Layouts of all values of the network, chosen for the graph as a whole so that as few bytes as possible move.

Every value has exactly one layout. Engines say which they take and give; the core takes row-major, and so do the
network's inputs and outputs. In three steps: `choose` gives every region the layouts of its values, `insert` puts a
`Relayout` wherever a value is then wanted otherwise than it lies, but by engines whose own DMA converts, and `inside`
lets values lie within the larger ones they become part of, so that joining and padding them moves nothing. A view
(reshape) lies where its operand lies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail.ir.graph import Graph, Node
from dovetail.ir.layout import Layout, nbytes, same_bytes
from dovetail.ir.operators.movement import Relayout
from dovetail.ir.types import TensorType
from dovetail.program.transfers import same_packing
from dovetail.records import Record
from dovetail.schedule.cores import cores_cycles
from dovetail.schedule.layout.choose import choose, others
from dovetail.schedule.layout.inside import ValueSlice, inside
from dovetail.schedule.region import LaidRegion, Layouts, Region, Slot
from dovetail.target.description import Target
from dovetail.timing.transfers import relayout_cost


@dataclass
class _RelayoutBuilder:
    """Values, layouts and relayouts that are added to the network."""

    types: dict[str, TensorType]
    layouts: dict[str, Layout] = field(default_factory=dict)
    made: list[Node] = field(default_factory=list)
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    """Region -> the names its values get."""

    def value(self, stem: str, like: str, layout: Layout | None) -> str:
        """A new value of the type of another."""
        name, count = stem, 1
        while name in self.types:
            count += 1
            name = f"{stem} {count}"
        self.types[name] = self.types[like]
        self.lies(name, layout)
        return name

    def lies(self, name: str, layout: Layout | None) -> None:
        if layout is not None:
            self.layouts[name] = layout

    def rename(self, region: int, old: str, new: str) -> None:
        """Let a region use another name for a value."""
        self.names.setdefault(region, {})[old] = new


def insert(
    graph: Graph, regions: Sequence[LaidRegion], target: Target, native: Collection[str]
) -> tuple[Graph, tuple[LaidRegion, ...], Layouts]:
    """The network with its relayouts: whole graph, regions in execution order, and the layouts that are not row-major.

    A relayout comes right before the first region that reads its result; that of a network output right after
    the value has been computed. Ends of the network that are `native` lie as their maker gives them or their first
    reader takes them.
    """
    draft = _RelayoutBuilder(dict(graph.types))
    makers = {region.output: index for index, region in enumerate(regions)}
    readers: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        for value in dict.fromkeys(region.graph.inputs):
            readers.setdefault(value, []).append(index)
    for value in (*graph.inputs, *(region.output for region in regions)):
        _relay(draft, graph, regions, value, makers.get(value), readers.get(value, []), value in native)
    renamed = [_renamed(region, draft.names.get(index, {})) for index, region in enumerate(regions)]
    ordered = _ordered(graph, renamed, draft, target)
    names = {node.output: draft.names.get(i, {}) for i, region in enumerate(regions) for node in region.graph.nodes}
    nodes = [_renamed_node(node, names.get(node.output, {})) for node in graph.nodes]
    whole = replace(graph, nodes=tuple(_sorted(nodes, draft.made)), types=draft.types)
    return whole, ordered, draft.layouts


def _relay(
    draft: _RelayoutBuilder,
    graph: Graph,
    regions: Sequence[LaidRegion],
    value: str,
    maker: int | None,
    readers: Sequence[int],
    native: bool,
) -> None:
    """Decide the names of a value: one for each layout it is wanted in; `maker` and `readers` are places of regions."""
    at_home = maker if maker is not None else readers[0] if native and readers else None
    lies = None if at_home is None else regions[at_home].layouts.get(value)
    shape, is_output = graph.types[value].shape, value in graph.outputs and not native
    readers = [index for index in readers if not _converts(regions[index])]
    if maker is not None and _converts(regions[maker]) and (readers or is_output):
        lies = None if is_output else regions[readers[0]].layouts.get(value)
    wanted = [*([None] if is_output else []), *(regions[index].layouts.get(value) for index in readers)]
    source = value
    if is_output and maker is not None and not same_bytes(lies, None, shape):
        source = draft.value(f"{value} as {lies}", value, lies)
        draft.rename(maker, value, source)
    else:
        draft.lies(value, lies)
    for layout in others(lies, wanted, graph, value):
        is_final = is_output and same_bytes(layout, None, shape)
        result = value if is_final else draft.value(f"{value} as {layout or 'row-major'}", value, layout)
        draft.made.append(Node(Relayout(), (source,), result))
        for index in readers:
            if same_bytes(regions[index].layouts.get(value), layout, shape):
                draft.rename(index, value, result)
    for index in readers:
        if source != value and value not in draft.names.get(index, {}):
            draft.rename(index, value, source)


def _converts(region: Region) -> bool:
    """True for an engine's region whose own DMA brings operands and results from and to any layout."""
    return region.engine is not None and region.engine.dma is not None


def _converted(region: LaidRegion, layouts: Layouts) -> LaidRegion:
    """The region with the values that lie otherwise than it takes and gives them, if its DMA converts."""
    if not _converts(region):
        return region
    types, own = region.graph.types, region.layouts
    values = (*region.graph.inputs, region.output)
    differ = (v for v in values if not same_bytes(own.get(v), layouts.get(v), types[v].shape))
    return replace(region, converted=frozenset(differ))


def _renamed_node(node: Node, names: Mapping[str, str]) -> Node:
    inputs = tuple(names.get(value, value) for value in node.inputs)
    return replace(node, inputs=inputs, output=names.get(node.output, node.output))


def _renamed(region: LaidRegion, names: Mapping[str, str]) -> LaidRegion:
    """The region with other names for some of its values."""
    if all(old == new for old, new in names.items()):
        return region
    graph = replace(
        region.graph,
        inputs=tuple(names.get(value, value) for value in region.graph.inputs),
        outputs=tuple(names.get(value, value) for value in region.graph.outputs),
        nodes=tuple(_renamed_node(node, names) for node in region.graph.nodes),
        types={names.get(value, value): kind for value, kind in region.graph.types.items()},
    )
    return replace(region, graph=graph, layouts={names.get(v, v): layout for v, layout in region.layouts.items()})


def _ordered(
    graph: Graph, regions: Sequence[LaidRegion], draft: _RelayoutBuilder, target: Target
) -> tuple[LaidRegion, ...]:
    """The regions with the relayouts between them."""
    before: dict[int, list[LaidRegion]] = {}
    after: dict[int, list[LaidRegion]] = {}
    makers = {region.output: index for index, region in enumerate(regions)}
    readers = {value: index for index in reversed(range(len(regions))) for value in regions[index].graph.inputs}
    for number, node in enumerate(draft.made):
        region, (source,) = _relayout(node, number, draft, target), node.inputs
        if node.output in graph.outputs:
            after.setdefault(makers[source], []).append(region)
        else:
            reader = readers[node.output]  # the first
            place = _soonest(region, makers.get(source, reader), reader, regions, target)
            before.setdefault(place, []).append(region)
    ordered: list[LaidRegion] = []
    for index, region in enumerate(regions):
        ordered += [*before.get(index, []), region, *after.get(index, [])]
    return tuple(ordered)


def _soonest(relayout: LaidRegion, maker_place: int, reader: int, regions: Sequence[LaidRegion], target: Target) -> int:
    """The place of the region before which a relayout comes: of its reader, as a rule.

    Where the DMA brings it about and has moved its operand, it comes behind that, but not before the timetable has time
    for it. Where an engine makes the operand by a timetable, it comes before the first region that is issued when that
    has been computed, by the timetable or because the engine has been given more than it holds since. What would keep
    the core busy long beyond that waits for it.
    """
    maker = regions[maker_place]
    if maker_place >= reader or target.dma is None or relayout.copied_by != target.dma.name:
        return reader
    if maker.copied_by == relayout.copied_by:
        return _in_time(relayout, maker_place, reader, regions, target)
    if maker.slot is None or maker.engine is None:
        return reader
    issued = 0
    for place in range(maker_place + 1, reader):
        other = regions[place]
        if issued >= maker.engine.queue or (other.slot is not None and _waits_for(maker.slot.end, other.slot)):
            return place
        issued += other.engine is maker.engine
    return reader


_WORTH = 4
"""How many times as long as it waits a region must be for the core to wait before it."""


def _waits_for(end: int, region: Slot) -> bool:
    """Whether a region is issued behind an end, or soon enough before it to wait for that."""
    return _WORTH * (end - region.issue) <= max(region.issued - region.issue, 0)


def _in_time(relayout: LaidRegion, maker_place: int, reader: int, regions: Sequence[LaidRegion], target: Target) -> int:
    """The place behind a region that is moved from which the DMA brings about a relayout for its reader in time."""
    wanted = regions[reader].slot
    if wanted is None:
        return maker_place + 1
    start = wanted.begin - _dma_cycles(relayout.graph, relayout.layouts, target)
    later = (place for place in range(maker_place + 1, reader) if (slot := regions[place].slot) and slot.issued > start)
    return next(later, reader)


def _relayout(node: Node, number: int, draft: _RelayoutBuilder, target: Target) -> LaidRegion:
    """The region of a relayout; the DMA does it unless the core has changed the layout before that has made many
    transfers of a few bytes."""
    (source,), result, name = node.inputs, node.output, f"relayout_{number}"
    types = {value: draft.types[value] for value in (source, result)}
    layouts = {value: draft.layouts[value] for value in (source, result) if value in draft.layouts}
    inner = Graph(name, (source,), (result,), (node,), types)
    moves = same_packing(layouts.get(source), layouts.get(result))  # else bytes are put together and taken apart
    if moves and target.dma is not None:
        moves = cores_cycles(inner, target) >= _dma_cycles(inner, layouts, target)
    return LaidRegion(name, inner, (), "", (), target.mover if moves else "", layouts=layouts)


def _dma_cycles(relayout: Graph, layouts: Layouts, target: Target) -> int:
    """Cycles of the DMA for a relayout."""
    (source,), (result,) = relayout.inputs, relayout.outputs
    return relayout_cost(target.dma, relayout.types[source], layouts.get(source), layouts.get(result)).cycles


def _sorted(nodes: Sequence[Node], relayouts: Sequence[Node]) -> list[Node]:
    """The nodes with each relayout right behind what computes its operand."""
    behind: dict[str, list[Node]] = {}
    computed = {node.output for node in nodes}
    for node in relayouts:
        behind.setdefault(node.inputs[0] if node.inputs[0] in computed else "", []).append(node)
    ordered = list(behind.get("", []))
    for node in nodes:
        ordered += [node, *behind.get(node.output, [])]
    return ordered


class Conversion(Record):
    """A change of a value's layout."""

    layer: str
    """The region that does it."""
    maker: str
    """Place that computes the value: an engine, the DMA, "core", or "input"."""
    readers: tuple[str, ...]
    """Places that read the result; "output" where the network gives it."""
    nbytes: int
    """Bytes read and written."""


class LayoutPlan(Record):
    """The network with the layout of every value."""

    graph: Graph
    """The whole network, with a `Relayout` node wherever a value changes its layout."""
    regions: tuple[LaidRegion, ...]
    """In execution order."""
    layouts: Layouts
    """The values that do not lie row-major."""
    inside: Mapping[str, ValueSlice]
    """The values that do not lie by themselves."""
    turns: tuple[tuple[str, ...], ...] = ()
    """Regions an engine computes side by side, by name; the last of a turn starts all."""

    def nbytes(self, value: str) -> int:
        """Bytes of a value as it lies, unused parts of last blocks included."""
        return nbytes(self.layouts.get(value), self.graph.types[value])

    @property
    def beside(self) -> dict[str, tuple[str, ...]]:
        """Region name -> names of the regions it is computed side by side with; none for regions alone."""
        return {name: tuple(one for one in turn if one != name) for turn in self.turns for name in turn}

    def starts_with_next(self, region: Region) -> bool:
        """Whether a region starts with the next one of its engine."""
        return any(region.name in turn[:-1] for turn in self.turns)

    def conversions(self) -> tuple[Conversion, ...]:
        """The relayouts, in execution order."""
        makers = {region.output: region.place for region in self.regions}
        conversions = []
        for region in self.regions:
            if not region.graph.nodes[0].operator.changes_layout:
                continue
            source, result = region.graph.inputs[0], region.output
            readers = [reader.place for reader in self.regions if result in reader.graph.inputs]
            readers += ["output"] if result in self.graph.outputs else []
            moved = self.nbytes(source) + self.nbytes(result)
            names = tuple(dict.fromkeys(readers))
            conversions.append(Conversion(region.name, makers.get(source, "input"), names, moved))
        return tuple(conversions)


def choose_layouts(graph: Graph, regions: Sequence[Region], target: Target, native: Collection[str] = ()) -> LayoutPlan:
    """Give every value its layout.

    Args:
        graph: the integer graph.
        regions: of `partition`, in execution order.
        target: the machine.
        native: inputs and outputs of the network that lie as the regions have them, and not row-major.

    Raises:
        ValueError: an offload's layout does not fit the values it is for.
    """
    # Narrow ends lie as the network has them: to pack or unpack them is up to who gives and takes them.
    narrow = [name for name in (*graph.given, *graph.results) if graph.types[name].dtype.bits < 8]
    chosen = choose(graph, regions, target.core.packs)
    whole, ordered, layouts = insert(graph, chosen, target, {*native, *narrow})
    laid = tuple(_converted(region, layouts) for region in ordered)
    return LayoutPlan(whole, laid, layouts, inside(whole, laid))
