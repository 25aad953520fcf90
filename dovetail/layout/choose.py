"""Which layout each region takes and gives its values in: the assignment that moves the fewest bytes.

Engines' layouts are fixed. A region that does not care where elements lie (element by element on the core, or a
concatenation or pad of whole blocks) may keep the layout its values come in. What is minimised is the number of
bytes read and written by all relayouts; a value that several readers want in one other layout is moved once.
The search is exact for up to `_TOGETHER` such regions that share values; longer chains are decided in runs of that
length, in execution order, the regions still to come taken as row-major.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from dovetail.graph.graph import Graph
from dovetail.graph.layout import Layout, check_part, nbytes, physical_shape, same_bytes
from dovetail.layout.inside import concatenated
from dovetail.operators.movement import Concat, Pad
from dovetail.partition.regions import Region
from dovetail.program.transfers import can_pad

_TOGETHER = 8
"""Regions decided together: with two layouts 2**8 assignments are tried."""


def choose(graph: Graph, regions: Sequence[Region]) -> tuple[Region, ...]:
    """The regions, each with the layouts of its values.

    Raises:
        ValueError: an offload's layout does not fit the values it is for.
    """
    found = [replace(region, layouts=_fixed(region)) for region in regions]
    known = list(dict.fromkeys(layout for region in found for layout in region.layouts.values()))
    options = {index: (None, *_choices(region, known)) for index, region in enumerate(found)}
    for group in _groups(regions, [index for index, choices in options.items() if len(choices) > 1]):
        for start in range(0, len(group), _TOGETHER):
            chunk = group[start : start + _TOGETHER]
            _decide(graph, found, chunk, [options[index] for index in chunk])
    return tuple(found)


def _fixed(region: Region) -> dict[str, Layout]:
    """What an engine takes and gives; nothing for other regions."""
    if region.offload is None or region.match is None:
        return {}
    found: dict[str, Layout] = {}
    for leaf, layout in region.offload.layouts.items():
        value = region.output if leaf == "result" else region.match.values.get(leaf)
        if value is None or layout.is_row_major or value in region.graph.constants:
            continue
        physical_shape(layout, region.graph.types[value].shape)
        if found.setdefault(value, layout) != layout:
            raise ValueError(f"{region.offload.name} takes '{value}' in two layouts, {found[value]} and {layout}")
    return found


def _choices(region: Region, known: Sequence[Layout]) -> list[Layout]:
    """The layouts, beside row-major, that a region which is not an engine's could take and give all its values in."""
    if region.engine is not None:
        return []
    ranks = {len(region.graph.types[value].shape) for value in (*region.graph.inputs, region.output)}
    return [layout for layout in known if ranks == {layout.rank} and _keeps(region, layout)]


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


def _whole(region: Region, layout: Layout, box: tuple[tuple[int, int], ...]) -> bool:
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
    """What pads the last blocks is computed with as well: it may be any bytes, with which wide sums could overflow."""
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
    graph: Graph, regions: list[Region], chunk: Sequence[int], options: Sequence[tuple[Layout | None, ...]]
) -> None:
    """Put the cheapest assignment of some regions in their place; of equals the one with the fewest changes of layout
    (only a value of the same layout can lie inside another), then row-major before others."""
    values = sorted({value for index in chunk for value in (*regions[index].graph.inputs, regions[index].output)})
    uses = [_Use.of(value, graph, regions) for value in values]
    best: tuple[tuple[int, int], tuple[Layout | None, ...]] | None = None
    for assignment in product(*options):
        for index, layout in zip(chunk, assignment, strict=True):
            regions[index] = replace(regions[index], layouts=_uniform(regions[index], layout))
        moved = (sum(_moved_bytes(graph, regions, use) for use in uses), sum(_changes(regions, use) for use in uses))
        if best is None or moved < best[0]:
            best = moved, assignment
    assert best is not None
    for index, layout in zip(chunk, best[1], strict=True):
        regions[index] = replace(regions[index], layouts=_uniform(regions[index], layout))


def _uniform(region: Region, layout: Layout | None) -> Mapping[str, Layout]:
    return {} if layout is None else dict.fromkeys((*region.graph.inputs, region.output), layout)


@dataclass(frozen=True)
class _Use:
    """Who makes a value and who reads it, as places in the list of regions."""

    value: str
    maker: int | None
    """None for an input of the network."""
    readers: tuple[int, ...]

    @classmethod
    def of(cls, value: str, graph: Graph, regions: Sequence[Region]) -> _Use:
        """Who makes and who reads a value."""
        maker = next((index for index, region in enumerate(regions) if region.output == value), None)
        return cls(value, maker, tuple(i for i, region in enumerate(regions) if value in region.graph.inputs))


def _moved_bytes(graph: Graph, regions: Sequence[Region], use: _Use) -> int:
    """Bytes read and written to bring a value into every layout it is wanted in."""
    kind = graph.types[use.value]
    lies = None if use.maker is None else regions[use.maker].layouts.get(use.value)
    wanted = [regions[index].layouts.get(use.value) for index in use.readers]
    wanted += [None] if use.value in graph.outputs else []
    return sum(nbytes(lies, kind) + nbytes(layout, kind) for layout in others(lies, wanted, graph, use.value))


def _changes(regions: Sequence[Region], use: _Use) -> int:
    """How many readers take a value in another layout than it is given in, be it with the same bytes."""
    lies = None if use.maker is None else regions[use.maker].layouts.get(use.value)
    return sum(regions[index].layouts.get(use.value) != lies for index in use.readers)


def others(
    lies: Layout | None, wanted: Sequence[Layout | None], graph: Graph, value: str
) -> list[Layout | None]:
    """The layouts a value is wanted in beside the one it lies in, each once; those with the same bytes are one."""
    shape = graph.types[value].shape
    found = [lies]
    for layout in wanted:
        if not any(same_bytes(layout, other, shape) for other in found):
            found.append(layout)
    return found[1:]
