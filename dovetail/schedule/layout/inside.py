"""Values that lie within larger ones, so that joining and padding them moves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dovetail.ir.crop import joined_boxes, lie_apart
from dovetail.ir.graph import Graph
from dovetail.ir.layout import Layout, check_part
from dovetail.ir.types import Box, Shape
from dovetail.records import Record
from dovetail.schedule.region import LaidRegion, Region


class ValueSlice(Record):
    """A value that lies as a part of another one."""

    outer: str
    """Name of the value it is part of."""
    box: Box
    """The part."""


def inside(graph: Graph, regions: Sequence[LaidRegion]) -> Mapping[str, ValueSlice]:
    """Put the operands of concatenations and pads inside the result, the one that saves most bytes first.

    A value can lie inside another of the same layout when whatever writes or reads it takes strides (an engine or a
    copy), or a kernel of the core writes it where it lies densely, and it is neither an input nor an output of the
    network. A padded value must be for engines, too. What lies inside a joint lies where that does. So do parts of an
    input that are only copied, and slices and joints of whole rows on a core alone.
    """
    users: dict[str, list[LaidRegion]] = {}
    for region in regions:
        for name in dict.fromkeys((region.output, *region.graph.inputs)):
            users.setdefault(name, []).append(region)
    candidates = [
        (graph.types[value].nbytes, position, value, ValueSlice(region.output, box))
        for position, region in enumerate(regions)
        if region.copied_by and region.output not in graph.outputs
        for value, box in _parts(region, users[region.output])
        if _fits(region, value, box) and _may_lie_inside(value, region, graph, users[value])
    ]
    slices = {value: place for region in regions if region.is_noop for value, place in _of_noop(graph, region)}
    slices |= {r.output: one for r in regions if r.copied_by for one in _cut_from_input(graph, r, users[r.output])}
    layouts = {region.output: region.layouts.get(region.output) for region in regions}
    outers = {one.outer for one in slices.values()}
    for _, _, value, place in sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1])):
        whole = _within(place, slices[place.outer], graph, layouts) if place.outer in slices else place
        if whole is None or value in slices or value in outers:
            continue
        by_kernel = any(region.is_kernel for region in users[value] if region.output == value)
        if not by_kernel or (layouts.get(whole.outer) is None and lie_apart(graph, whole.outer, [whole.box])):
            slices[value] = whole
            outers.add(whole.outer)
    return slices


def is_whole_blocks(layout: Layout | None, box: Box, shape: Shape) -> bool:
    """Whether a part of a value begins and ends at whole blocks of a layout, or ends where the value does."""
    try:
        check_part(layout, box, shape)
    except ValueError:
        return False
    return True


def _within(
    part: ValueSlice, whole: ValueSlice, graph: Graph, layouts: Mapping[str, Layout | None]
) -> ValueSlice | None:
    """The place of a part of a value that lies inside another one; None where that is no whole blocks."""
    box = tuple((at + start, at + stop) for (start, stop), (at, _) in zip(part.box, whole.box, strict=True))
    fits = is_whole_blocks(layouts.get(whole.outer), box, graph.types[whole.outer].shape)
    return ValueSlice(whole.outer, box) if fits else None


def _cut_from_input(graph: Graph, region: LaidRegion, users: Sequence[LaidRegion]) -> Iterator[ValueSlice]:
    """The place of a slice of an input that lies as the input does and is only copied."""
    node = region.graph.nodes[0]
    box = node.operator.box_read
    if box is None or node.operator.skips or node.inputs[0] not in graph.inputs or region.layouts:
        return
    readers = _readers(region, users)
    if readers and all(reader.copied_by and reader.layouts.get(region.output) is None for reader in readers):
        yield ValueSlice(node.inputs[0], box)


def _of_noop(graph: Graph, region: LaidRegion) -> Iterator[tuple[str, ValueSlice]]:
    """The values that lie inside others where the core does nothing: a slice in its operand, operands in their
    joint."""
    (node,) = region.graph.nodes
    if (box := node.operator.box_read) is not None:
        yield node.output, ValueSlice(node.inputs[0], box)
    else:
        boxes = joined_boxes(graph, node)
        yield from ((value, ValueSlice(node.output, box)) for value, box in zip(node.inputs, boxes, strict=True))


def _parts(region: LaidRegion, users: Sequence[LaidRegion]) -> Iterator[tuple[str, Box]]:
    """The operands that could lie inside the result, and the box of it each becomes; `users` make or read it."""
    if region.graph.nodes[0].operator.joins:
        yield from concatenated(region)
    if (image := padded_box(region)) is not None:
        readers = _readers(region, users)
        if readers and all(reader.shares for reader in readers):
            yield region.graph.inputs[0], image


def _readers(region: LaidRegion, users: Sequence[LaidRegion]) -> list[LaidRegion]:
    return [reader for reader in users if region.output in reader.graph.inputs]


def concatenated(region: Region) -> list[tuple[str, Box]]:
    """The operands of a concatenation and the box of the result each becomes; none for an operand used twice."""
    node = region.graph.nodes[0]
    boxes = zip(node.inputs, joined_boxes(region.graph, node), strict=True)
    return [(value, box) for value, box in boxes if node.inputs.count(value) == 1]


def padded_box(region: Region) -> Box | None:
    """The box of the result that the operand of a pad becomes; None for other regions."""
    node, types = region.graph.nodes[0], region.graph.types
    pieces = node.operator.pieces([types[name] for name in node.inputs]) if node.operator.pads else None
    if pieces is None:
        return None
    return tuple((a, a + size) for a, size in zip(pieces[0].before, types[node.inputs[0]].shape, strict=True))


def _fits(region: LaidRegion, value: str, box: Box) -> bool:
    """True when the part is one of whole blocks of the result's layout, which is the value's own."""
    layout = region.layouts.get(region.output)
    return is_whole_blocks(layout, box, region.shape) and region.layouts.get(value) == layout


def _may_lie_inside(value: str, joint: LaidRegion, graph: Graph, users: Sequence[LaidRegion]) -> bool:
    """True when an engine, a relayout by copies or a kernel of the core makes the value, and only engines and the joint
    read it, all in one layout; `users` make or read it."""
    if value in graph.inputs or value in graph.outputs:
        return False
    makers = [region for region in users if region.output == value]
    readers = [region for region in users if value in region.graph.inputs]
    written = all(region.takes_strides or region.is_kernel or _is_placed(region) for region in makers)
    alike = all(region.layouts.get(value) == joint.layouts.get(value) for region in (*makers, *readers))
    return bool(makers) and written and alike and all(one.takes_strides or one is joint for one in readers)


def _is_placed(region: LaidRegion) -> bool:
    """Whether copies bring the result to wherever it lies."""
    operator = region.graph.nodes[0].operator
    return bool(region.copied_by) and (operator.changes_layout or operator.joins)
