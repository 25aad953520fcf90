"""Turns regions into statements: calls on the core, copies and launches for the engines, in issue order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from dovetail.graph.layout import nbytes
from dovetail.graph.types import Array, Box, DType, TensorType
from dovetail.layout import Placed
from dovetail.partition.regions import Region
from dovetail.plan.cores import split, workers_first
from dovetail.plan.movement import copies
from dovetail.plan.order import Parts, in_turn
from dovetail.plan.tiles import PACK_ALIGNMENT, EngineTile, Tiling
from dovetail.program.ir import (
    CORE,
    Buffer,
    Copy,
    Launch,
    Role,
    Statement,
    View,
    dense_view,
    reads,
    writes,
)
from dovetail.target.description import IN_PLACE_ALIGNMENT, Target


@dataclass(frozen=True)
class Lowered:
    """The statements of a network before waits and addresses."""

    statements: tuple[Statement, ...]
    buffers: dict[str, Buffer]
    constants: dict[str, Array]
    values: dict[str, View]
    fetches: dict[str, str]
    """Buffer that constants are fetched into -> name of the region they are for."""


@dataclass
class _Context:
    placed: Placed
    target: Target
    homes: Mapping[str, str]
    cores: Mapping[str, int]
    buffers: dict[str, Buffer] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    values: dict[str, View] = field(default_factory=dict)
    blobs: dict[tuple[int, bytes], str] = field(default_factory=dict)
    fetched: dict[tuple[int, str, str], str] = field(default_factory=dict)
    """Layer, constant and memory -> the buffer that holds the constant for all parts of the layer."""
    fetches: dict[str, str] = field(default_factory=dict)

    def buffer(self, name: str, memory: str, nbytes: int, role: Role) -> str:
        """Declare a buffer; returns its name."""
        self.buffers[name] = Buffer(name, memory, nbytes, role)
        return name

    def operand(self, region: Region, value: str) -> View:
        """Where an operand lies, in the layout the region takes it in."""
        return self.values[value].seen_as(region.layouts.get(value))


def lower(
    placed: Placed,
    tilings: Mapping[str, Tiling],
    target: Target,
    homes: Mapping[str, str],
    early: frozenset[str],
    cores: Mapping[str, int],
) -> Lowered:
    """Statements in issue order, without waits.

    Args:
        placed: the network and how its values lie.
        tilings: the tiles of each engine region, by region name.
        target: the machine.
        homes: memory of every computed value and input.
        early: names of the regions whose constants are fetched while the region before is computed.
        cores: the core that computes each value, in a pipeline; empty for as many as make each region fastest.
    """
    graph, regions = placed.graph, placed.regions
    context = _Context(placed, target, homes, cores)
    names = {name: (f"input_{index}", Role.INPUT) for index, name in enumerate(graph.given)}
    names |= {name: (f"state_{index}", Role.STATE) for index, (name, _, _) in enumerate(graph.kept)}
    for name, (stem, role) in names.items():
        buffer = context.buffer(stem, homes[name], placed.nbytes(name), role)
        context.values[name] = dense_view(buffer, graph.types[name], layout=placed.layouts.get(name))
    parts = [_region(context, index, region, tilings) for index, region in enumerate(regions)]
    waiting = _early_of_next(regions, parts, early)
    for index, fetches in waiting.items():
        if regions[index].slot and regions[index].place == CORE:  # a kernel would hold them up
            parts[index].head[:0] = fetches
        else:
            parts[index].head += fetches
    ordered = in_turn([region.slot for region in regions], parts)
    ordered = workers_first(ordered, regions, cores) if cores else ordered
    for read, written, _ in graph.kept:
        _replace_state(ordered, context.values[read], context.values[written], bool(cores))
    return Lowered(tuple(ordered), context.buffers, context.constants, context.values, context.fetches)


def _replace_state(ordered: list[Statement], state: View, value: View, at_end: bool) -> None:
    """Copy a state's next contents to it as soon as they are there and nothing reads the old ones any more; or at the
    end, where other cores may read them until then."""
    last = len(ordered) - 1 if at_end else max(
        index
        for index, statement in enumerate(ordered)
        if any(view.buffer == state.buffer for view in reads(statement))
        or any(view.buffer == value.buffer for view in writes(statement))
    )
    ordered.insert(last + 1, Copy(ordered[last].layer, value, state))


def _early_of_next(regions: Sequence[Region], parts: list[Parts], early: frozenset[str]) -> dict[int, list[Statement]]:
    """Move each early region's constants behind the first loads of the engine region before it (or the very start), or
    to where they are scheduled."""
    placed: dict[int, list[Statement]] = {}
    previous = 0
    for index, region in enumerate(regions):
        if region.engine is None:
            continue
        if region.name in early and index > 0:
            placed.setdefault(_fetched_with(regions, index, previous), []).extend(parts[index].early)
            parts[index].early = []
        previous = index
    return placed


def _fetched_with(regions: Sequence[Region], index: int, previous: int) -> int:
    """The region with which the constants of another one are fetched: the last that is issued when that is scheduled;
    the engine region before where nothing is."""
    own = regions[index].slot
    if own is None:
        return previous
    issued = [i for i, r in enumerate(regions[:index]) if r.slot and r.slot.issue <= own.fetch and not r.is_view]
    return issued[-1] if issued else 0


def _region(context: _Context, index: int, region: Region, tilings: Mapping[str, Tiling]) -> Parts:
    graph = context.placed.graph
    kind = graph.types[region.output]
    if region.is_view and region.output not in graph.outputs:
        source = context.operand(region, region.graph.inputs[0])
        context.values[region.output] = dense_view(source.buffer, kind, source.offset)
        return Parts()
    result = _result(context, region)
    context.values[region.output] = result
    if region.still:
        return Parts()
    if region.engine is not None:
        return _together([_engine(context, index, part, tilings[part.name], result) for part in region.parts])
    operands = {value: context.operand(region, value) for value in region.graph.inputs}
    copying = context.target.dma or context.target.engines
    moved = copies(index, region.graph, operands, result) if copying else None
    if moved is not None:
        return Parts(head=[copy for copy in moved if not _in_place(copy)])
    core = context.cores.get(region.output)
    return Parts(head=[*split(index, region.graph, operands, result, context.target, core)])


def _in_place(copy: Copy) -> bool:
    """True when what is copied lies at its destination already."""
    return copy.source == copy.destination and not copy.before


def _result(context: _Context, region: Region) -> View:
    """Where a region's result lies; declares the buffer unless another region has."""
    graph, placed = context.placed.graph, context.placed
    inside = placed.inside.get(region.output)
    if inside is not None:
        outer = context.values.get(inside.outer)
        return (outer or _outer(context, inside.outer)).part(inside.box)
    within = [placed.inside[value].outer for value in region.graph.inputs if value in placed.inside]
    if region.output in within:
        return _outer(context, region.output)
    kind = graph.types[region.output]
    role = Role.OUTPUT if region.output in graph.results else Role.VALUE
    name = f"output_{graph.results.index(region.output)}" if role is Role.OUTPUT else f"{region.name}_out"
    context.buffer(name, context.homes[region.output], placed.nbytes(region.output), role)
    return dense_view(name, kind, 0, placed.layouts.get(region.output))


def _outer(context: _Context, value: str) -> View:
    """Where a value that others lie in lies."""
    placed = context.placed
    position = sorted({inside.outer for inside in placed.inside.values()}).index(value)
    name = f"joined_{position}"
    if name not in context.buffers:
        context.buffer(name, context.homes[value], placed.nbytes(value), Role.VALUE)
    return dense_view(name, placed.graph.types[value], 0, placed.layouts.get(value))


def _engine(context: _Context, index: int, region: Region, tiling: Tiling, result: View) -> Parts:
    """Tiles in turn; with two buffers, while one is computed the next is loaded and the one before is stored."""
    parts = Parts()
    loads = [_tile_loads(context, index, region, tiling, number) for number in range(len(tiling.tiles))]
    first_constants, first_inputs = loads[0][0], loads[0][1]
    parts.early += first_constants
    parts.head += first_inputs
    launches = [_launch(context, index, region, tiling, number, result) for number in range(len(tiling.tiles))]
    stores: list[list[Statement]] = [[] for _ in launches]
    if region.output not in tiling.in_place:
        pairs = zip(launches, tiling.tiles, strict=True)
        stores = [[Copy(index, launch.result, result.part(tile.tile.box))] for launch, tile in pairs]
    late = tiling.buffers - 1
    for number, launch in enumerate(launches):
        step: list[Statement] = [launch]
        if number >= late:
            step += stores[number - late]
        if number + 1 < len(launches):
            step += [*loads[number + 1][0], *loads[number + 1][1]]
        parts.rest.append(step)
    parts.tail += [copy for store in stores[len(stores) - late :] for copy in store]
    return parts


def _together(shares: Sequence[Parts]) -> Parts:
    """The statements of a region's parts as those of one: the first tiles of all are launched, then the second ones."""
    early = [statement for share in shares for statement in share.early]
    head = [statement for share in shares for statement in share.head]
    tail = [statement for share in shares for statement in share.tail]
    rest = []
    for turn in zip_longest(*(share.rest for share in shares), fillvalue=()):
        launches = [step[0] for step in turn if step]
        rest.append([*launches, *(statement for step in turn for statement in step[1:])])
    return Parts(early, head, rest, tail)


def _slots(keys: Sequence[object], buffers: int) -> list[tuple[int, bool]]:
    """For each tile the slot its operand is in, and whether it must be loaded: equal neighbours share one."""
    found: list[tuple[int, bool]] = []
    for number, key in enumerate(keys):
        if number and keys[number - 1] == key:
            found.append((found[-1][0], False))
        else:
            found.append(((found[-1][0] + 1) % buffers if number else 0, True))
    return found


def _tile_loads(
    context: _Context, index: int, region: Region, tiling: Tiling, number: int
) -> tuple[list[Statement], list[Statement]]:
    """Copies a tile needs before its launch: of constants, and of operands."""
    assert region.engine is not None
    memory = region.engine.memory
    tile = tiling.tiles[number]
    constants: list[Statement] = []
    inputs: list[Statement] = []
    if tile.packed and "" not in tiling.in_place:
        slot, load = _constant_slot(tiling, number)
        source, place = _constant_blob(context, region, tile), region.engine.constants or memory
        shared = (index, source.buffer, place)
        if load and shared not in context.fetched:
            target = _tile_buffer(context, f"{region.name}_constants_{slot}", place, source.type.elements)
            context.fetches[target] = context.placed.regions[index].name
            constants.append(Copy(index, source, dense_view(target, source.type)))
            if len({_channels(other.tile.box) for other in tiling.tiles}) == 1:  # they stay where they are
                context.fetched[shared] = target
    for value in region.graph.inputs:
        if value in tiling.in_place:
            continue
        slot, load = _input_slot(tiling, value, number)
        if load:
            kind, layout = tile.tile.graph.types[value], region.layouts.get(value)
            name = f"{region.name}_in{region.graph.inputs.index(value)}_{slot}"
            target = _tile_buffer(context, name, memory, nbytes(layout, kind))
            source = context.operand(region, value).part(tile.tile.reads[value])
            inputs.append(Copy(index, source, dense_view(target, kind, 0, layout)))
    return constants, inputs


def _constant_slot(tiling: Tiling, number: int) -> tuple[int, bool]:
    return _slots([_channels(tile.tile.box) for tile in tiling.tiles], tiling.buffers)[number]


def _input_slot(tiling: Tiling, value: str, number: int) -> tuple[int, bool]:
    return _slots([tile.tile.reads[value] for tile in tiling.tiles], tiling.buffers)[number]


def _channels(box: Box) -> tuple[int, int]:
    return box[-1]


def _tile_buffer(context: _Context, name: str, memory: str, nbytes: int) -> str:
    """A tile's buffer: as large as the largest tile that uses the slot."""
    known = context.buffers.get(name)
    if known is None or known.nbytes < nbytes:
        context.buffers[name] = Buffer(name, memory, nbytes, Role.TILE)
    return name


def _constant_blob(context: _Context, region: Region, tile: EngineTile) -> View:
    """The packed constants of a tile as one constant of the program; equal ones are stored once."""
    alignment = _alignment(context, region)
    offsets = pack_offsets(tile.packed, alignment)
    blob = np.zeros(offsets[""], dtype=np.uint8)
    for name, array in tile.packed.items():
        blob[offsets[name] : offsets[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    key = (alignment, blob.tobytes())
    if key not in context.blobs:
        stem = f"{region.name}_constants"
        name = stem if stem not in context.constants else f"{stem}_from_{_channels(tile.tile.box)[0]}"
        context.blobs[key] = name
        context.constants[name] = blob
        context.buffers[name] = Buffer(name, context.target.code, blob.nbytes, Role.CONSTANT)
    return dense_view(context.blobs[key], TensorType(blob.shape, DType.UINT8))


def _alignment(context: _Context, region: Region) -> int:
    """Bytes each packed constant of a region is aligned to."""
    assert region.engine is not None
    return IN_PLACE_ALIGNMENT if context.target.reads_constants(region.engine) else PACK_ALIGNMENT


def pack_offsets(packed: Mapping[str, Array], alignment: int) -> dict[str, int]:
    """Where each packed constant begins in a tile's blob, bytes; the blob's size under ""."""
    offsets, total = {}, 0
    for name, array in packed.items():
        offsets[name] = total
        total += -(-array.nbytes // alignment) * alignment
    return {**offsets, "": total}


def _launch(context: _Context, index: int, region: Region, tiling: Tiling, number: int, result: View) -> Launch:
    assert region.engine is not None
    tile, layouts = tiling.tiles[number], region.layouts
    graph, memory = tile.tile.graph, region.engine.memory
    operands: dict[str, View] = {}
    for position, value in enumerate(region.graph.inputs):
        if value in tiling.in_place:
            operands[value] = context.operand(region, value).part(tile.tile.reads[value])
        else:
            slot = _input_slot(tiling, value, number)[0]
            operands[value] = dense_view(
                f"{region.name}_in{position}_{slot}", graph.types[value], 0, layouts.get(value)
            )
    operands |= _packed(context, index, region, tiling, number)
    if tile.scratch:
        buffer = _tile_buffer(context, f"{region.name}_scratch", memory, tile.scratch)
        operands["scratch"] = dense_view(buffer, TensorType((tile.scratch,), DType.UINT8))
    if region.output in tiling.in_place:
        written = result.seen_as(layouts.get(region.output)).part(tile.tile.box)
    else:
        kind, layout = graph.types[region.output], layouts.get(region.output)
        slot = number % tiling.buffers
        buffer = _tile_buffer(context, f"{region.name}_out_{slot}", memory, nbytes(layout, kind))
        written = dense_view(buffer, kind, 0, layout)
    queue = "" if region.engine.wait else CORE
    return Launch(index, region.engine.name, tile.match, operands, written, tile.packed, layouts, queue)


def _packed(
    context: _Context, index: int, region: Region, tiling: Tiling, number: int
) -> dict[str, View]:
    """Where a launch finds its packed constants: copied close to the engine, or where they lie."""
    assert region.engine is not None
    tile = tiling.tiles[number]
    if not tile.packed:
        return {}
    if "" in tiling.in_place:
        buffer = _constant_blob(context, region, tile).buffer
    else:
        own = f"{region.name}_constants_{_constant_slot(tiling, number)[0]}"
        blob = _constant_blob(context, region, tile).buffer
        buffer = context.fetched.get((index, blob, region.engine.constants or region.engine.memory), own)
    offsets = pack_offsets(tile.packed, _alignment(context, region))
    kinds = {name: TensorType((array.nbytes,), DType.UINT8) for name, array in tile.packed.items()}
    return {name: dense_view(buffer, kind, offsets[name]) for name, kind in kinds.items()}
