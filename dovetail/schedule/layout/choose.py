"""The layout each region takes and gives its values in.

Engines' layouts are fixed. A region that does not care where elements lie (element by element on the core, or a
concatenation or pad of whole blocks) may keep the layout its values come in. What is minimised is the number of
bytes read and written by all relayouts; a value that several readers want in one other layout is moved once.
The search is exact for up to `_TOGETHER` such regions that share values; longer chains are decided in runs of that
length, in execution order, the regions still to come taken as row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from dovetail import kernels
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout, nbytes, packed, physical_shape, same_bytes, to_physical
from dovetail.ir.types import Shape, TensorType
from dovetail.program.transfers import can_pad
from dovetail.records import Record
from dovetail.schedule.layout.inside import concatenated, is_whole_blocks, padded_box
from dovetail.schedule.region import LaidRegion, Layouts, Region, engine_layouts

_TOGETHER = 8
"""Regions decided together: with two layouts 2**8 assignments are tried."""
_MOST_TRIED = 1 << 13
"""Assignments tried at once, where regions have more than two layouts each."""


def choose(graph: Graph, regions: Sequence[Region], packs: bool = False) -> tuple[LaidRegion, ...]:
    """The regions, each with the layouts of its values.

    Args:
        graph: the network.
        regions: in execution order.
        packs: whether the core packs narrow values although no engine asks for it; of equal cost is then what takes
            fewest bytes.

    Raises:
        ValueError: an offload's layout does not fit the values it is for.
        TargetError: it packs values of another width.
    """
    laid = [replace(LaidRegion.of(region), layouts=engine_layouts(region)) for region in regions]
    layouts = list(dict.fromkeys(layout for region in laid for layout in region.layouts.values()))
    if packs or any(layout.packed for layout in layouts):
        layouts = list(dict.fromkeys([*layouts, packed(None, 1, 4)]))
    options = {index: ({}, *_choices(region, layouts)) for index, region in enumerate(laid)}
    uses = _uses(regions)
    for group in _groups(regions, [index for index, choices in options.items() if len(choices) > 1]):
        while group:
            count = _TOGETHER
            while count > 1 and prod(len(options[index]) for index in group[:count]) > _MOST_TRIED:
                count -= 1
            chunk, group = group[:count], group[count:]
            _decide(graph, laid, {index: options[index] for index in chunk}, uses, packs)
    return tuple(laid)


def _choices(region: Region, layouts: Sequence[Layout]) -> list[Layouts]:
    """The layouts, beside row-major, that a region which is not an engine's could take and give its values in."""
    if region.shares:
        return []
    values = (*region.graph.inputs, region.output)
    ranks = {len(region.graph.types[value].shape) for value in values}
    whole = (layout for layout in layouts if not layout.packed and ranks == {layout.rank} and _keeps(region, layout))
    shared = (choice for layout in layouts if layout.packed for choice in _shared(region, layout))
    choices: list[Layouts] = []
    for choice in (*(dict.fromkeys(values, layout) for layout in whole), *shared):
        if choice not in choices:
            choices.append(choice)
    return choices


def _shared(region: Region, manner: Layout) -> Iterator[Layouts]:
    """The layouts of a region that keeps its narrow values in bytes as another layout does: all of them, its operands
    or its result; none where it cannot, because some do not fill their bytes or no kernel takes them so."""
    types, values = region.graph.types, dict.fromkeys((*region.graph.inputs, region.output))
    order, narrow = manner.order, [value for value in values if types[value].dtype.bits < 8]
    if order is not None and {len(types[value].shape) for value in values} != {order.rank}:
        return
    if region.is_view or region.copied_by:
        layouts = _in_manner(manner, types, narrow)
        alike = len(values) == len(narrow) == len(layouts)
        if alike and (region.is_view or (len(set(layouts.values())) == 1 and _keeps(region, layouts[region.output]))):
            yield layouts
        return
    if order is not None and not _keeps(region, order):
        return
    others = dict.fromkeys(values, order) if order is not None else {}
    for side in (narrow, [value for value in narrow if value != region.output], narrow[-1:]):
        layouts = _in_manner(manner, types, side)
        if layouts and kernels.takes_packed(region.graph, list(layouts)) is None:
            yield others | layouts


def _in_manner(manner: Layout, types: Mapping[str, TensorType], values: Sequence[str]) -> dict[str, Layout]:
    """The layouts of narrow values in the order and the bytes of a packed layout, perhaps one of another width and
    rank; none where a value does not fill its bytes."""
    order, axis = manner.order, manner.dims[-1][0] if manner.order is not None else -1
    layouts: dict[str, Layout] = {}
    for value in values:
        kind = types[value]
        try:
            layout = packed(order, len(kind.shape), kind.dtype.bits, axis)
        except ValueError:
            return {}
        if manner.dims[-1] in manner.backwards:
            layout = replace(layout, backwards=(*layout.backwards, layout.dims[-1]))
        elements = kind.elements if order is None else prod(physical_shape(order, kind.shape))
        if layout.order != order or prod(physical_shape(layout, kind.shape)) != elements:
            return {}
        layouts[value] = layout
    return layouts


def _keeps(region: Region, layout: Layout) -> bool:
    """True when a region computes the same whether its values lie row-major or all in `layout`."""
    node = region.graph.nodes[0]
    if region.is_view and len(region.graph.inputs) == 1:
        return _lies_alike(layout, region.graph.types[region.graph.inputs[0]].shape, region.shape)
    if region.copied_by and (image := padded_box(region)) is not None:
        axes = enumerate(zip(image, region.shape, strict=True))
        whole = all(layout.block(axis) == 1 for axis, (span, size) in axes if span != (0, size))
        return whole and layout.rank == 4 and can_pad(layout)
    if region.copied_by and node.operator.joins:
        parts = concatenated(region)
        return len(parts) == len(node.inputs) and all(is_whole_blocks(layout, box, region.shape) for _, box in parts)
    return _is_elementwise(region) and _padding_is_harmless(region, layout)


def _lies_alike(layout: Layout, shape: Shape, other: Shape) -> bool:
    """True when a value's bytes in `layout` are those under another shape, such as rows and columns as one row."""
    numbers = np.arange(prod(shape))
    one, another = (to_physical(numbers.reshape(own), layout).reshape(-1) for own in (shape, other))
    return np.array_equal(one, another)


def _is_elementwise(region: Region) -> bool:
    """True when every value has one shape, and every constant is the same for all elements."""
    types, shape = region.graph.types, region.shape
    values = (*region.graph.inputs, *(node.output for node in region.graph.nodes))
    if any(types[name].shape == shape and types[name].elements > 1 for name in region.graph.constants):
        return False
    return all(types[value].shape == shape for value in values) and all(
        node.operator.is_elementwise([types[value] for value in node.inputs]) for node in region.graph.nodes
    )


def _padding_is_harmless(region: Region, layout: Layout) -> bool:
    """The padding of last blocks is computed with as well: it may be any bytes, with which wide sums could overflow."""
    kinds = [region.graph.types[value] for value in region.graph.inputs]
    unpadded = prod(physical_shape(layout, kinds[0].shape)) == kinds[0].elements
    return unpadded or all(kind.dtype.bits <= 16 for kind in kinds)


def _groups(regions: Sequence[Region], flexible: Sequence[int]) -> list[list[int]]:
    """The regions that have a choice, those that share a value together, each group in execution order."""
    leaders: dict[int, int] = {}
    first: dict[str, int] = {}
    """Value -> the first region of those that makes or reads it."""

    def leader(index: int) -> int:
        while leaders[index] != index:
            leaders[index] = leaders[leaders[index]]
            index = leaders[index]
        return index

    for index in flexible:
        leaders[index] = index
        for value in (*regions[index].graph.inputs, regions[index].output):
            leaders[leader(first.setdefault(value, index))] = index
    groups: dict[int, list[int]] = {}
    for index in flexible:
        groups.setdefault(leader(index), []).append(index)
    return [groups[index] for index in sorted(groups)]


def _uses(regions: Sequence[Region]) -> Mapping[str, _ValueUse]:
    """The uses of every value."""
    makers = {region.output: index for index, region in enumerate(regions)}
    readers: dict[str, list[int]] = {value: [] for value in makers}
    for index, region in enumerate(regions):
        for value in dict.fromkeys(region.graph.inputs):
            readers.setdefault(value, []).append(index)
    return {value: _ValueUse(value, makers.get(value), tuple(places)) for value, places in readers.items()}


def _decide(
    graph: Graph,
    regions: list[LaidRegion],
    chunk: Mapping[int, Sequence[Layouts]],
    every: Mapping[str, _ValueUse],
    packs: bool,
) -> None:
    """Put the cheapest assignment of some regions, each with its options, in their place.

    Of equals it is the one with the fewest changes of layout (only a value of the same layout can lie inside another),
    then row-major before others.
    """
    values = {value for index in chunk for value in (*regions[index].graph.inputs, regions[index].output)}
    uses = [every[value] for value in sorted(values)]

    def put(assignment: tuple[Layouts, ...]) -> tuple[int, ...]:
        """Put an assignment in place; returns what it costs."""
        for index, layouts in zip(chunk, assignment, strict=True):
            regions[index] = replace(regions[index], layouts=layouts)
        costs = [_moved(graph, regions, use) for use in uses]
        held = sum(_nbytes(graph, regions, use) for use in uses) if packs else 0
        return sum(moved for moved, _ in costs), held, sum(changes for _, changes in costs)

    put(min(product(*chunk.values()), key=put))


class _ValueUse(Record):
    """The maker and the readers of a value, as places in the list of regions."""

    value: str
    maker: int | None
    """None for an input of the network."""
    readers: tuple[int, ...]


def _moved(graph: Graph, regions: Sequence[LaidRegion], use: _ValueUse) -> tuple[int, int]:
    """Bytes read and written to bring a value into every layout it is wanted in; and how many readers take it in
    another layout than it is given in, be it with the same bytes."""
    kind = graph.types[use.value]
    wanted = [regions[index].layouts.get(use.value) for index in use.readers]
    free = kind.dtype.bits < 8 and use.value in (*graph.given, *graph.results)  # who gives or takes it follows
    lies = (wanted[0] if free and wanted else None) if use.maker is None else regions[use.maker].layouts.get(use.value)
    ends = [None] if use.value in graph.outputs and not free else []
    further = others(lies, [*wanted, *ends], graph, use.value)
    changes = sum(layout != lies for layout in wanted)
    return sum(nbytes(lies, kind) + nbytes(layout, kind) for layout in further), changes


def _nbytes(graph: Graph, regions: Sequence[LaidRegion], use: _ValueUse) -> int:
    """Bytes of a value as it is made."""
    at = use.maker if use.maker is not None else next(iter(use.readers), None)
    return nbytes(None if at is None else regions[at].layouts.get(use.value), graph.types[use.value])


def others(lies: Layout | None, wanted: Sequence[Layout | None], graph: Graph, value: str) -> list[Layout | None]:
    """The layouts a value is wanted in beside the one it lies in, each once; those with the same bytes are one."""
    shape = graph.types[value].shape
    distinct = [lies]
    for layout in wanted:
        if not any(same_bytes(layout, other, shape) for other in distinct):
            distinct.append(layout)
    return distinct[1:]
