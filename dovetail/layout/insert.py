"""Puts a relayout wherever a value is wanted in another layout than it lies in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail.graph.graph import Graph, Node
from dovetail.graph.layout import Layout, same_bytes
from dovetail.graph.types import TensorType
from dovetail.layout.choose import others
from dovetail.operators.movement import Relayout
from dovetail.partition.regions import Region
from dovetail.program.ir import CORE
from dovetail.target.description import Target
from dovetail.target.pattern import Match, match_pattern


@dataclass
class _Draft:
    """What is added to the network."""

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
        """Take note of a value's layout."""
        if layout is not None:
            self.layouts[name] = layout

    def rename(self, region: int, old: str, new: str) -> None:
        """Let a region use another name for a value."""
        self.names.setdefault(region, {})[old] = new


def insert(
    graph: Graph, regions: Sequence[Region], target: Target, native: Collection[str]
) -> tuple[Graph, tuple[Region, ...], Mapping[str, Layout]]:
    """The network with its relayouts: whole graph, regions in execution order, and the layouts that are not row-major.

    A relayout comes right before the first region that reads its result; that of a network output right after
    the value has been computed. Ends of the network that are `native` lie as their maker gives them or their first
    reader takes them.
    """
    draft = _Draft(dict(graph.types))
    for value in (*graph.inputs, *(region.output for region in regions)):
        _relay(draft, graph, regions, value, value in native)
    renamed = [_renamed(region, draft.names.get(index, {}), draft.types) for index, region in enumerate(regions)]
    ordered = _ordered(graph, renamed, draft, target)
    names = {node.output: draft.names.get(i, {}) for i, region in enumerate(regions) for node in region.graph.nodes}
    nodes = [_renamed_node(node, names.get(node.output, {})) for node in graph.nodes]
    whole = replace(graph, nodes=tuple(_sorted(nodes, draft.made)), types=draft.types)
    return whole, ordered, draft.layouts


def _relay(draft: _Draft, graph: Graph, regions: Sequence[Region], value: str, native: bool) -> None:
    """Decide the names of a value: one for each layout it is wanted in."""
    maker = next((index for index, region in enumerate(regions) if region.output == value), None)
    readers = [index for index, region in enumerate(regions) if value in region.graph.inputs]
    at_home = maker if maker is not None else readers[0] if native and readers else None
    lies = None if at_home is None else regions[at_home].layouts.get(value)
    shape, is_output = graph.types[value].shape, value in graph.outputs and not native
    wanted = [*([None] if is_output else []), *(regions[index].layouts.get(value) for index in readers)]
    moved = others(lies, wanted, graph, value)
    source = value
    if is_output and maker is not None and not same_bytes(lies, None, shape):
        source = draft.value(f"{value} as {lies}", value, lies)
        draft.rename(maker, value, source)
    else:
        draft.lies(value, lies)
    for layout in moved:
        is_final = is_output and same_bytes(layout, None, shape)
        result = value if is_final else draft.value(f"{value} as {layout or 'row-major'}", value, layout)
        draft.made.append(Node(Relayout(), (source,), result))
        for index in readers:
            if same_bytes(regions[index].layouts.get(value), layout, shape):
                draft.rename(index, value, result)
    for index in readers:
        if source != value and value not in draft.names.get(index, {}):
            draft.rename(index, value, source)


def _renamed_node(node: Node, names: Mapping[str, str]) -> Node:
    inputs = tuple(names.get(value, value) for value in node.inputs)
    return replace(node, inputs=inputs, output=names.get(node.output, node.output))


def _renamed(region: Region, names: Mapping[str, str], types: Mapping[str, TensorType]) -> Region:
    """The region with other names for some of its values, its match found again."""
    changed = {old: new for old, new in names.items() if old != new}
    if not changed:
        return region
    graph = replace(
        region.graph,
        inputs=tuple(changed.get(value, value) for value in region.graph.inputs),
        outputs=tuple(changed.get(value, value) for value in region.graph.outputs),
        nodes=tuple(_renamed_node(node, changed) for node in region.graph.nodes),
        types={changed.get(value, value): kind for value, kind in region.graph.types.items()},
    )
    layouts = {changed.get(value, value): layout for value, layout in region.layouts.items()}
    match = region.match
    if region.offload is not None:
        found = match_pattern(region.offload.pattern, graph, graph.outputs[0])
        assert isinstance(found, Match), "names do not matter to patterns"
        match = found
    return replace(region, graph=graph, match=match, layouts=layouts)


def _ordered(graph: Graph, regions: Sequence[Region], draft: _Draft, target: Target) -> tuple[Region, ...]:
    before: dict[int, list[Region]] = {}
    after: dict[int, list[Region]] = {}
    for number, node in enumerate(draft.made):
        region = _relayout(node, number, draft, target)
        if node.output in graph.outputs:
            maker = next(index for index, other in enumerate(regions) if other.output == node.inputs[0])
            after.setdefault(maker, []).append(region)
        else:
            reader = next(index for index, other in enumerate(regions) if node.output in other.graph.inputs)
            before.setdefault(reader, []).append(region)
    found: list[Region] = []
    for index, region in enumerate(regions):
        found += [*before.get(index, []), region, *after.get(index, [])]
    return tuple(found)


def _relayout(node: Node, number: int, draft: _Draft, target: Target) -> Region:
    (source,), result, name = node.inputs, node.output, f"relayout_{number}"
    types = {value: draft.types[value] for value in (source, result)}
    layouts = {value: draft.layouts[value] for value in (source, result) if value in draft.layouts}
    mover = target.dma.name if target.dma else CORE
    inner = Graph(name, (source,), (result,), (node,), types)
    return Region(name, inner, None, None, None, "", (), mover, layouts)


def _sorted(nodes: Sequence[Node], made: Sequence[Node]) -> list[Node]:
    """The nodes with each relayout right behind what computes its operand."""
    behind: dict[str, list[Node]] = {}
    computed = {node.output for node in nodes}
    for node in made:
        behind.setdefault(node.inputs[0] if node.inputs[0] in computed else "", []).append(node)
    found = list(behind.get("", []))
    for node in nodes:
        found += [node, *behind.get(node.output, [])]
    return found
