"""Which layout each region takes and gives its values in, and which values lie within larger ones.

Engines' layouts are fixed. A region that does not care where elements lie (element by element on the core, or a
concatenation or pad of whole blocks) may keep the layout its values come in. What is minimised is the number of
bytes read and written by all relayouts; a value that several readers want in one other layout is moved once.
The search is exact for up to `_TOGETHER` such regions that share values; longer chains are decided in runs of that
length, in execution order, the regions still to come taken as row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from dovetail import kernels
from dovetail.ir.crop import joined_boxes, lie_apart, sliced_box
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout, check_part, nbytes, packed, physical_shape, same_bytes
from dovetail.ir.operators.movement import Concat, Pad, Relayout, Slice
from dovetail.ir.types import Box, TensorType
from dovetail.program.transfers import can_pad
from dovetail.schedule.partition import Region, engine_layouts


@dataclass(frozen=True)
class ValueSlice:
    """A value that lies as a part of another one."""

    outer: str
    """Name of the value it is part of."""
    box: Box
    """The part."""


def inside(graph: Graph, regions: Sequence[Region]) -> Mapping[str, ValueSlice]:
    """Put the operands of concatenations and pads inside the result, the one that saves most bytes first.

    A value can lie inside another of the same layout when whatever writes or reads it takes strides (an engine or a
    copy), or a kernel of the core writes it where it lies densely, and it is neither an input nor an output of the
    network. A padded value must be for engines, too. What lies inside a joint lies where that does. So do parts of an
    input that are only copied, and slices and joints of whole rows on a core alone.
    """
    users: dict[str, list[Region]] = {}
    for region in regions:
        for name in dict.fromkeys((region.output, *region.graph.inputs)):
            users.setdefault(name, []).append(region)
    candidates = [
        (graph.types[value].nbytes, position, value, ValueSlice(region.output, box))
        for position, region in enumerate(regions)
        if region.mover and region.output not in graph.outputs
        for value, box in _parts(region, users[region.output])
        if _fits(region, value, box) and _may_lie_inside(value, region, graph, users[value])
    ]
    chosen = {value: found for region in regions if region.still for value, found in _still(graph, region)}
    chosen |= {r.output: found for r in regions if r.mover for found in _cut_from_input(graph, r, users[r.output])}
    layouts = {region.output: region.layouts.get(region.output) for region in regions}
    for _, _, value, found in sorted(candidates, key=lambda c: (-c[0], c[1])):
        whole = _within(found, chosen[found.outer], graph, layouts) if found.outer in chosen else found
        by_kernel = any(_by_kernel(region) for region in users[value] if region.output == value)
        if whole is None or value in chosen or value in {i.outer for i in chosen.values()}:
            continue
        if not by_kernel or (layouts.get(whole.outer) is None and lie_apart(graph, whole.outer, [whole.box])):
            chosen[value] = whole
    return chosen


def _within(
    part: ValueSlice, whole: ValueSlice, graph: Graph, layouts: Mapping[str, Layout | None]
) -> ValueSlice | None:
    """Where a part of a value lies that lies inside another one; None where that is no whole blocks."""
    box = tuple((at + start, at + stop) for (start, stop), (at, _) in zip(part.box, whole.box, strict=True))
    try:
        check_part(layouts.get(whole.outer), box, graph.types[whole.outer].shape)
    except (ValueError, KeyError):
        return None
    return ValueSlice(whole.outer, box)


def _cut_from_input(graph: Graph, region: Region, users: Sequence[Region]) -> Iterator[ValueSlice]:
    """Where a slice of an input lies that lies as that does and is only copied."""
    node = region.graph.nodes[0]
    if isinstance(node.operator, Slice) and set(node.operator.step) == {1} and node.inputs[0] in graph.inputs:
        readers = [reader for reader in users if region.output in reader.graph.inputs]
        alike = all(reader.layouts.get(region.output) is None for reader in (region, *readers))
        if alike and not region.layouts and readers and all(reader.mover for reader in readers):
            yield ValueSlice(node.inputs[0], sliced_box(node))


def _still(graph: Graph, region: Region) -> Iterator[tuple[str, ValueSlice]]:
    """Values that lie inside others where the core does nothing: a slice in its operand, operands in their joint."""
    (node,) = region.graph.nodes
    if isinstance(node.operator, Slice):
        yield node.output, ValueSlice(node.inputs[0], sliced_box(node))
    else:
        boxes = joined_boxes(graph, node)
        yield from ((value, ValueSlice(node.output, box)) for value, box in zip(node.inputs, boxes, strict=True))


def _parts(region: Region, users: Sequence[Region]) -> Iterator[tuple[str, Box]]:
    """The operands that could lie inside the result, and the box of it each becomes; `users` make or read it."""
    node = region.graph.nodes[0]
    if isinstance(node.operator, Concat):
        yield from concatenated(region)
    readers = [reader for reader in users if region.output in reader.graph.inputs]
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
    return _whole(region, layout, box) and region.layouts.get(value) == layout


def _by_kernel(maker: Region) -> bool:
    """Whether a kernel of the core makes its result, which takes no strides."""
    return not (maker.engine or maker.mover or maker.is_view or maker.still)


def _may_lie_inside(value: str, mover: Region, graph: Graph, users: Sequence[Region]) -> bool:
    """True when an engine, a relayout by copies or a kernel of the core makes the value, and only engines and the mover
    read it, all in one layout; `users` make or read it."""
    if value in graph.inputs or value in graph.outputs:
        return False
    makers = [region for region in users if region.output == value]
    readers = [region for region in users if value in region.graph.inputs]
    copied = (region.mover and isinstance(region.graph.nodes[0].operator, Relayout | Concat) for region in makers)
    strided = all(
        region.takes_strides or copy or _by_kernel(region) for region, copy in zip(makers, copied, strict=True)
    )
    alike = all(region.layouts.get(value) == mover.layouts.get(value) for region in (*makers, *readers))
    others = all(region.takes_strides or region is mover for region in readers)
    return bool(makers) and strided and alike and others


_TOGETHER = 8
"""Regions decided together: with two layouts 2**8 assignments are tried."""
_MOST_TRIED = 1 << 13
"""Assignments tried at once, where regions have more than two layouts each."""


Layouts = Mapping[str, Layout]
"""The layouts of a region's values by name, where they are not row-major."""


def choose(graph: Graph, regions: Sequence[Region], packs: bool = False) -> tuple[Region, ...]:
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
    found = [replace(region, layouts=engine_layouts(region)) for region in regions]
    known = list(dict.fromkeys(layout for region in found for layout in region.layouts.values()))
    if packs or any(layout.packed for layout in known):
        known = list(dict.fromkeys([*known, packed(None, 1, 4)]))
    options = {index: ({}, *_choices(region, known)) for index, region in enumerate(found)}
    for group in _groups(regions, [index for index, choices in options.items() if len(choices) > 1]):
        while group:
            count = next(n for n in range(_TOGETHER, 0, -1) if n == 1 or _tried(group[:n], options) <= _MOST_TRIED)
            chunk, group = group[:count], group[count:]
            _decide(graph, found, chunk, [options[index] for index in chunk], packs)
    return tuple(found)


def _tried(group: Sequence[int], options: Mapping[int, Sequence[Layouts]]) -> int:
    """How many assignments a group of regions has."""
    return prod(len(options[index]) for index in group)


def _choices(region: Region, known: Sequence[Layout]) -> list[Layouts]:
    """The layouts, beside row-major, that a region which is not an engine's could take and give its values in."""
    if region.engine is not None:
        return []
    values = (*region.graph.inputs, region.output)
    ranks = {len(region.graph.types[value].shape) for value in values}
    whole = (layout for layout in known if not layout.packed and ranks == {layout.rank} and _keeps(region, layout))
    shared = (layouts for layout in known if layout.packed for layouts in _shared(region, layout))
    found = [*(dict.fromkeys(values, layout) for layout in whole), *shared]
    return [layouts for place, layouts in enumerate(found) if layouts not in found[:place]]


def _shared(region: Region, manner: Layout) -> Iterator[Layouts]:
    """The layouts of a region that keeps its narrow values in bytes as another layout does: all of them, its operands
    or its result; none where it cannot, because some do not fill their bytes or no kernel takes them so."""
    types, values = region.graph.types, dict.fromkeys((*region.graph.inputs, region.output))
    order, narrow = manner.order, [value for value in values if types[value].dtype.bits < 8]
    if order is not None and {len(types[value].shape) for value in values} != {order.rank}:
        return
    if region.is_view or region.mover:
        found = _in_manner(manner, types, narrow)
        alike = len(values) == len(narrow) == len(found)
        if alike and (region.is_view or (len(set(found.values())) == 1 and _keeps(region, found[region.output]))):
            yield found
        return
    if order is not None and not _keeps(region, order):
        return
    others = {value: order for value in values} if order is not None else {}
    sides = (narrow, [value for value in narrow if value != region.output], narrow[-1:])
    for side in sides:
        found = _in_manner(manner, types, side)
        if found and kernels.takes_packed(region.graph, list(found)) is None:
            yield others | found


def _in_manner(manner: Layout, types: Mapping[str, TensorType], values: Sequence[str]) -> dict[str, Layout]:
    """How narrow values lie in the order and the bytes of a packed layout, perhaps one of another width and rank; none
    where one does not fill its bytes."""
    order, axis = manner.order, manner.dims[-1][0] if manner.order is not None else -1
    found: dict[str, Layout] = {}
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
        found[value] = layout
    return found


def _keeps(region: Region, layout: Layout) -> bool:
    """True when a region computes the same whether its values lie row-major or all in `layout`."""
    operator = region.graph.nodes[0].operator
    if region.mover and isinstance(operator, Pad):
        pads = zip(operator.before, operator.after, strict=True)
        whole = all(layout.block(axis) == 1 for axis, sides in enumerate(pads) if any(sides))
        return whole and layout.rank == 4 and can_pad(layout)
    if region.mover and isinstance(operator, Concat):
        parts = concatenated(region)
        return len(parts) == len(region.graph.nodes[0].inputs) and all(_whole(region, layout, box) for _, box in parts)
    return _is_elementwise(region) and _padding_is_harmless(region, layout)


def _whole(region: Region, layout: Layout | None, box: Box) -> bool:
    try:
        check_part(layout, box, region.graph.types[region.output].shape)
    except ValueError:
        return False
    return True


def _is_elementwise(region: Region) -> bool:
    """True when every value has one shape, and every constant is the same for all elements."""
    types, shape = region.graph.types, region.graph.types[region.output].shape
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
    groups: list[tuple[set[str], list[int]]] = []
    for index in flexible:
        values, members = {*regions[index].graph.inputs, regions[index].output}, [index]
        for others in [group for group in groups if group[0] & values]:
            groups.remove(others)
            values, members = values | others[0], members + others[1]
        groups.append((values, members))
    return [sorted(members) for _, members in groups]


def _decide(
    graph: Graph, regions: list[Region], chunk: Sequence[int], options: Sequence[tuple[Layouts, ...]], packs: bool
) -> None:
    """Put the cheapest assignment of some regions in their place; of equals the one with the fewest changes of layout
    (only a value of the same layout can lie inside another), then row-major before others."""
    values = sorted({value for index in chunk for value in (*regions[index].graph.inputs, regions[index].output)})
    uses = []
    for value in values:
        maker = next((index for index, region in enumerate(regions) if region.output == value), None)
        uses.append(
            _ValueUse(value, maker, tuple(i for i, region in enumerate(regions) if value in region.graph.inputs))
        )

    def put(assignment: tuple[Layouts, ...]) -> tuple[int, ...]:
        """Put an assignment in place; returns what it costs."""
        for index, layouts in zip(chunk, assignment, strict=True):
            regions[index] = replace(regions[index], layouts=layouts)
        costs = [_moved(graph, regions, use) for use in uses]
        held = sum(_held(graph, regions, use) for use in uses) if packs else 0
        return sum(moved for moved, _ in costs), held, sum(changes for _, changes in costs)

    put(min(product(*options), key=put))


@dataclass(frozen=True)
class _ValueUse:
    """Who makes a value and who reads it, as places in the list of regions."""

    value: str
    maker: int | None
    """None for an input of the network."""
    readers: tuple[int, ...]


def _moved(graph: Graph, regions: Sequence[Region], use: _ValueUse) -> tuple[int, int]:
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


def _held(graph: Graph, regions: Sequence[Region], use: _ValueUse) -> int:
    """Bytes of a value as it is made."""
    at = use.maker if use.maker is not None else next(iter(use.readers), None)
    return nbytes(None if at is None else regions[at].layouts.get(use.value), graph.types[use.value])


def others(lies: Layout | None, wanted: Sequence[Layout | None], graph: Graph, value: str) -> list[Layout | None]:
    """The layouts a value is wanted in beside the one it lies in, each once; those with the same bytes are one."""
    shape = graph.types[value].shape
    found = [lies]
    for layout in wanted:
        if not any(same_bytes(layout, other, shape) for other in found):
            found.append(layout)
    return found[1:]
