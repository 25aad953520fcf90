"""Turns a region of an engine, or one engine's part of it, into statements: copies and launches of its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise

import numpy as np

from dovetail.ir.layout import nbytes
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.ir import CORE, Buffer, Copy, LaunchStatement, Role, Statement, View, dense_view
from dovetail.program.loops import digest
from dovetail.schedule.partition import Region
from dovetail.schedule.plan.lowered import Blob, LayerStatements, LoweredNetwork, LoweredShare
from dovetail.schedule.tiles.tile import PACK_ALIGNMENT, EngineTile
from dovetail.schedule.tiles.tiling import Tiling, constants_ahead, tiles_ahead
from dovetail.target.engine import IN_PLACE_ALIGNMENT, Engine


@dataclass(frozen=True)
class EngineLowering:
    """A region of an engine, or one engine's part of it, while its tiles become statements."""

    context: LoweredNetwork
    index: int
    """Of the layer."""
    region: Region
    engine: Engine
    tiling: Tiling
    result: View

    def share(self) -> LayerStatements:
        """The statements of `parts`, those of an earlier round where all they are made from is the same."""
        context, tiling, place = self.context, self.tiling, self.engine.constants or self.engine.memory
        blobs = tuple(self.blob(number) if tile.packed else None for number, tile in enumerate(tiling.tiles))
        sources = dict.fromkeys(self.source(number) for number, blob in enumerate(blobs) if blob is not None)
        loaded = tuple(context.fetched.get((source, place)) for source in sources)
        operands = tuple(context.operand(self.region, value) for value in self.region.graph.inputs)
        given, share = (operands, self.result, blobs, loaded), context.known.shares.get(self.region.name)
        if share is None or share.tiling is not tiling or share.given != given:
            before = len(context.buffers), len(context.fetches), len(context.fetched)
            parts = self.parts()
            buffers = dict(islice(context.buffers.items(), before[0], None))
            fetches = dict(islice(context.fetches.items(), before[1], None))
            fetched = dict(islice(context.fetched.items(), before[2], None))
            share = LoweredShare(given, tiling, parts, buffers, fetches, fetched)
            context.known.shares[self.region.name] = share
        context.buffers |= share.buffers
        context.fetches |= share.fetches
        context.fetched |= share.fetched
        return share.parts

    def parts(self) -> LayerStatements:
        """Tiles in turn; with two buffers, while one is computed the next is loaded and the one before is stored; with
        three the one after it too, so that the DMA has a transfer when it ends one."""
        region, tiling = self.region, self.tiling
        numbers = range(len(tiling.tiles))
        loads = [(self.constants(number), self.inputs(number)) for number in numbers]
        cycles = tiling.fetching, tiling.ready_cycles
        ahead = tiles_ahead(tiling.buffers, len(loads), *cycles)
        fetched = constants_ahead(tiling.buffers, len(loads), self.together, *cycles)
        early = [copy for load in loads[:fetched] for copy in load[0]]
        parts = LayerStatements(early=early, head=[copy for load in loads[:ahead] for copy in load[1]])
        launches = [self.launch(number) for number in numbers]
        stores: list[list[Statement]] = [[] for _ in launches]
        if region.output not in tiling.in_place:
            pairs = zip(launches, tiling.tiles, strict=True)
            stores = [[self.copy(one.result, self.result.part(tile.tile.box))] for one, tile in pairs]
        late = tiling.buffers - 1
        for number, launch in enumerate(launches):
            step: list[Statement] = [launch]
            if number >= late:
                step += stores[number - late]
            for place, kind in ((number + fetched, 0), (number + ahead, 1)):
                step += loads[place][kind] if place < len(loads) else []
            parts.rest.append(step)
        parts.tail += [copy for store in stores[len(stores) - late :] for copy in store]
        return parts

    def slot(self, number: int, value: str = "") -> tuple[int, bool]:
        """The slot a tile's operand (or constants) is in, and whether it must be loaded: equal neighbours share one."""
        changes, several = self._changes[value], 1 if value else self.together
        turn, before = changes[number] // several, changes[number - 1] // several if number else -1
        return turn % self.tiling.buffers, turn != before

    @cached_property
    def _changes(self) -> Mapping[str, list[int]]:
        """Of each operand, of constants under "", how often a tile up to each has needed another part of it."""
        tiles = [one.tile for one in self.tiling.tiles]
        keys: dict[str, list[object]] = {"": [tile.box[-1] for tile in tiles]}
        keys |= {value: [tile.reads[value] for tile in tiles] for value in self.region.graph.inputs}
        return {
            value: list(accumulate((one != other for one, other in pairwise(own)), initial=0))
            for value, own in keys.items()
        }

    def constants(self, number: int) -> list[Statement]:
        """Copies of constants a tile needs before its launch."""
        context, tile = self.context, self.tiling.tiles[number]
        if not tile.packed or "" in self.tiling.in_place:
            return []
        slot, load = self.slot(number)
        source, place = self.source(number), self.engine.constants or self.engine.memory
        shared = (source, place)
        if not load or shared in context.fetched:
            return []
        target = context.tile_buffer(f"{self.region.name}_constants_{slot}", place, source.type.elements)
        context.fetches[target] = context.laid.regions[self.index].name
        parts = len({other.tile.box[-1] for other in self.tiling.tiles})
        if parts <= self.tiling.buffers * self.together:  # they stay where they are
            context.fetched[shared] = target
        made = dense_view(target, source.type)
        # its own DMA copies into the engine's memory only
        return [self.copy(source, made) if place == self.engine.memory else Copy(self.index, source, made)]

    def inputs(self, number: int) -> list[Statement]:
        """Copies of operands a tile needs before its launch."""
        tile = self.tiling.tiles[number].tile
        made: list[Statement] = []
        for position, value in enumerate(self.region.graph.inputs):
            slot, load = self.slot(number, value)
            if value not in self.tiling.in_place and load:
                source = self.context.operand(self.region, value).part(tile.reads[value])
                view = self.buffer(f"in{position}_{slot}", value, tile.graph.types[value])
                made.append(self.copy(source, view))
        return made

    def copy(self, source: View, destination: View) -> Copy:
        """A copy by the engine's own DMA, or by what copies for everybody."""
        dma, stream = self.engine.dma, self.engine.name
        return Copy(self.index, source, destination, queue=dma.name if dma else "", stream=stream if dma else "")

    def buffer(self, suffix: str, value: str, kind: TensorType) -> View:
        """A tile's part of a value in a buffer of its own, in the layout the engine takes it in."""
        layout = self.region.layouts.get(value)
        name = self.context.tile_buffer(f"{self.region.name}_{suffix}", self.engine.memory, nbytes(layout, kind))
        return dense_view(name, kind, 0, layout)

    def launch(self, number: int) -> LaunchStatement:
        region, context, tile = self.region, self.context, self.tiling.tiles[number]
        types, in_place, output = tile.tile.graph.types, self.tiling.in_place, region.output
        operands: dict[str, View] = {}
        for position, value in enumerate(region.graph.inputs):
            if value in in_place:
                operands[value] = context.operand(region, value).part(tile.tile.reads[value])
            else:
                operands[value] = self.buffer(f"in{position}_{self.slot(number, value)[0]}", value, types[value])
        operands |= self.packed(number)
        if tile.scratch:
            buffer = context.tile_buffer(f"{region.name}_scratch", self.engine.memory, tile.scratch)
            operands["scratch"] = dense_view(buffer, TensorType((tile.scratch,), DType.UINT8))
        if output in in_place:
            written = self.result.seen_as(region.layouts.get(output)).part(tile.tile.box)
        else:
            written = self.buffer(f"out_{number % self.tiling.buffers}", output, types[output])
        queue = "" if self.engine.wait else CORE
        stream = self.engine.name if self.engine.stream else ""
        known = (tile.match, operands, written, tile.packed, region.layouts, queue, stream, region.held)
        return LaunchStatement(self.index, self.engine.name, *known)

    def packed(self, number: int) -> dict[str, View]:
        """Where a launch finds its packed constants: copied close to the engine, or where they lie."""
        tile = self.tiling.tiles[number]
        if not tile.packed:
            return {}
        blob = self.blob(number)
        buffer, start = blob.buffer, blob.offset
        if "" not in self.tiling.in_place:
            own, source = f"{self.region.name}_constants_{self.slot(number)[0]}", self.source(number)
            buffer = self.context.fetched.get((source, self.engine.constants or self.engine.memory), own)
            start = blob.offset - source.offset
        offsets = pack_offsets(tile.packed, self.alignment)
        kinds = {name: TensorType((array.nbytes,), DType.UINT8) for name, array in tile.packed.items()}
        return {name: dense_view(buffer, kind, start + offsets[name]) for name, kind in kinds.items()}

    @property
    def alignment(self) -> int:
        """Bytes each packed constant is aligned to."""
        return IN_PLACE_ALIGNMENT if self.context.target.reads_constants(self.engine) else PACK_ALIGNMENT

    @cached_property
    def together(self) -> int:
        """Tiles whose constants one copy fetches: as the tiling says, if all lie side by side."""
        several = self.tiling.together
        blobs = [self.blob(number) for number in range(len(self.tiling.tiles))] if several > 1 else []
        pairs = (
            (replace(one, type=two.type, offset=one.offset + one.type.nbytes), two) for one, two in pairwise(blobs)
        )
        return several if all(next_to == two for next_to, two in pairs) else 1

    def source(self, number: int) -> View:
        """The constants that one copy fetches for a tile and its neighbours."""
        if self.together == 1:
            return self.blob(number)
        first = number // self.together * self.together
        last = min(first + self.together, len(self.tiling.tiles)) - 1
        start, end = self.blob(first), self.blob(last)
        count = end.offset + end.type.nbytes - start.offset
        return dense_view(start.buffer, TensorType((count,), DType.UINT8), start.offset)

    def blob(self, number: int) -> View:
        """The packed constants of a tile: those of all tiles of a layer are one constant of the program, in the order
        of the tiles, and equal ones are stored once."""
        context, kept = self.context, self.context.known.blobs.get(self.region.name)
        if kept is None or kept[0] is not self.tiling:
            kept = self.tiling, [_blob(tile, self.alignment) for tile in self.tiling.tiles]
            context.known.blobs[self.region.name] = kept
        blob = kept[1][number]
        key = (self.alignment, blob.digest)
        if key not in context.blobs:
            name = f"{self.region.name}_constants"
            start = context.buffers[name].nbytes if name in context.buffers else 0
            context.buffers[name] = Buffer(name, context.target.code, start + blob.array.nbytes, Role.CONSTANT)
            context.pieces.setdefault(name, []).append(blob.array)
            context.blobs[key] = dense_view(name, TensorType(blob.array.shape, DType.UINT8), start)
        return context.blobs[key]


def _blob(tile: EngineTile, alignment: int) -> Blob:
    """What a tile's packed constants are as bytes."""
    offsets = pack_offsets(tile.packed, alignment)
    array = np.zeros(offsets[""], dtype=np.uint8)
    for name, own in tile.packed.items():
        array[offsets[name] : offsets[name] + own.nbytes] = own.reshape(-1).view(np.uint8)
    return Blob(array, digest(array))


def pack_offsets(packed: Mapping[str, Array], alignment: int) -> dict[str, int]:
    """Where each packed constant begins in a tile's blob, bytes; the blob's size under ""."""
    offsets, total = {}, 0
    for name, array in packed.items():
        offsets[name] = total
        total += -(-array.nbytes // alignment) * alignment
    return {**offsets, "": total}
