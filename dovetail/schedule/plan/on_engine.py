"""Turns an engine's part of a region into statements: copies and launches of its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from dovetail.ir.layout import nbytes
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.ir import CORE, Buffer, Copy, LaunchStatement, Queue, Role, Statement, View, Views, dense_view
from dovetail.program.loops import digest
from dovetail.records import Record, field
from dovetail.schedule.plan.lowered import Blob, LayerStatements, LoweredNetwork, LoweredPart
from dovetail.schedule.region import EnginePart
from dovetail.schedule.tiles.tile import PACK_ALIGNMENT, EngineTile
from dovetail.schedule.tiles.tiling import CompleteTiling
from dovetail.target.engine import IN_PLACE_ALIGNMENT
from dovetail.timing.layer import constants_ahead, tiles_ahead


class EngineLowering(Record, dict=True):
    """An engine's part of a region while its tiles become statements."""

    context: LoweredNetwork
    index: int
    """Index of the layer."""
    part: EnginePart
    tiling: CompleteTiling
    operands: Views
    result: View
    starts_with_next: bool
    """As of a `LaunchStatement`."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    fetches: dict[str, str] = field(default_factory=dict)
    fetched: dict[tuple[View, str], str] = field(default_factory=dict)
    """These three as of a `LoweredPart`."""

    def lowered(self) -> LayerStatements:
        """The statements, those of an earlier round where all they are made from is the same."""
        context, tiling = self.context, self.tiling
        blobs = tuple(self.blob(number) if tile.packed else None for number, tile in enumerate(tiling.tiles))
        sources = dict.fromkeys(self.source(number) for number, blob in enumerate(blobs) if blob is not None)
        loaded = tuple(context.fetched.get((source, self.part.engine.constants_memory)) for source in sources)
        source, part = (*self.operands.values(), self.result, blobs, loaded), context.known.parts.get(self.part.name)
        if part is None or part.tiling is not tiling or part.source != source:
            part = LoweredPart(source, tiling, self.statements(), self.buffers, self.fetches, self.fetched)
            context.known.parts[self.part.name] = part
        context.buffers |= part.buffers
        context.fetches |= part.fetches
        context.fetched |= part.fetched
        return part.statements

    def statements(self) -> LayerStatements:
        """Tiles in turn; with two buffers, while one is computed the next is loaded and the one before is stored; with
        three the one after it too, so that the DMA has a transfer when it ends one."""
        tiling, late = self.tiling, self.tiling.buffers - 1
        numbers = range(len(tiling.tiles))
        loads = [(self.constants(number), self.inputs(number)) for number in numbers]
        cycles = tiling.estimate.fetching, tiling.estimate.engine
        ahead = tiles_ahead(tiling.buffers, len(loads), *cycles)
        fetched = constants_ahead(tiling.buffers, len(loads), self.together, *cycles)
        layer = LayerStatements(
            early=[copy for load in loads[:fetched] for copy in load[0]],
            head=[copy for load in loads[:ahead] for copy in load[1]],
        )
        launches = [self.launch(number) for number in numbers]
        stores: list[list[Statement]] = [[] for _ in launches]
        if self.part.output not in tiling.in_place:
            pairs = zip(launches, tiling.tiles, strict=True)
            stores = [[self.copy(one.result, self.result.part(tile.tile.box))] for one, tile in pairs]
        for number, launch in enumerate(launches):
            step: list[Statement] = [launch]
            if number >= late:
                step += stores[number - late]
            for place, kind in ((number + fetched, 0), (number + ahead, 1)):
                step += loads[place][kind] if place < len(loads) else []
            layer.rest.append(step)
        layer.tail += [copy for store in stores[len(stores) - late :] for copy in store]
        return layer

    def slot(self, number: int, value: str = "") -> tuple[int, bool]:
        """The slot a tile's operand (or constants) is in, and whether it must be loaded: equal neighbours share one."""
        changes, several = self._changes[value], 1 if value else self.together
        turn, before = changes[number] // several, changes[number - 1] // several if number else -1
        return turn % self.tiling.buffers, turn != before

    @cached_property
    def _changes(self) -> Mapping[str, list[int]]:
        """For each operand, and for constants under "", how often a tile up to each has needed another part of it."""
        tiles = [one.tile for one in self.tiling.tiles]
        keys: dict[str, list[object]] = {"": [tile.box[-1] for tile in tiles]}
        keys |= {value: [tile.reads[value] for tile in tiles] for value in self.operands}
        return {
            value: list(accumulate((one != other for one, other in pairwise(own)), initial=0))
            for value, own in keys.items()
        }

    def constants(self, number: int) -> list[Statement]:
        """Copies of constants a tile needs before its launch."""
        if not self.tiling.tiles[number].packed or "" in self.tiling.in_place:
            return []
        slot, load = self.slot(number)
        source, place = self.source(number), self.part.engine.constants_memory
        if not load or self.holder(source) is not None:
            return []
        buffer = self.tile_buffer(f"constants_{slot}", place, source.type.elements)
        self.fetches[buffer] = self.context.laid.regions[self.index].name
        spans = len({other.tile.box[-1] for other in self.tiling.tiles})
        if spans <= self.tiling.buffers * self.together:  # they stay where they are
            self.fetched[source, place] = buffer
        held = dense_view(buffer, source.type)
        # its own DMA copies into the engine's memory only
        return [self.copy(source, held) if place == self.part.engine.memory else Copy(self.index, source, held)]

    def inputs(self, number: int) -> list[Statement]:
        """Copies of operands a tile needs before its launch."""
        tile = self.tiling.tiles[number].tile
        copies: list[Statement] = []
        for position, (value, view) in enumerate(self.operands.items()):
            slot, load = self.slot(number, value)
            if value not in self.tiling.in_place and load:
                held = self.held(f"in{position}_{slot}", value, tile.graph.types[value])
                copies.append(self.copy(view.part(tile.reads[value]), held))
        return copies

    def copy(self, source: View, destination: View) -> Copy:
        """A copy by the engine's own DMA, or by what copies for everybody."""
        engine = self.part.engine
        if engine.dma is None:
            return Copy(self.index, source, destination)
        return Copy(self.index, source, destination, queue=Queue(engine.dma.name), stream=engine.name)

    def held(self, suffix: str, value: str, kind: TensorType) -> View:
        """A tile's part of a value in a buffer of its own, in the layout the engine takes it in."""
        layout = self.part.layouts.get(value)
        return dense_view(self.tile_buffer(suffix, self.part.engine.memory, nbytes(layout, kind)), kind, 0, layout)

    def tile_buffer(self, suffix: str, memory: str, nbytes: int) -> str:
        """Name of a buffer of tiles, which is as large as the largest of them."""
        name = f"{self.part.name}_{suffix}"
        if name not in self.buffers or self.buffers[name].nbytes < nbytes:
            self.buffers[name] = Buffer(name, memory, nbytes, Role.TILE)
        return name

    def launch(self, number: int) -> LaunchStatement:
        part, engine, tile = self.part, self.part.engine, self.tiling.tiles[number]
        types, in_place = tile.tile.graph.types, self.tiling.in_place
        operands: dict[str, View] = {}
        for position, (value, view) in enumerate(self.operands.items()):
            if value in in_place:
                operands[value] = view.part(tile.tile.reads[value])
            else:
                operands[value] = self.held(f"in{position}_{self.slot(number, value)[0]}", value, types[value])
        operands |= self.packed(number)
        if tile.scratch:
            buffer = self.tile_buffer("scratch", engine.memory, tile.scratch)
            operands["scratch"] = dense_view(buffer, TensorType((tile.scratch,), DType.UINT8))
        if part.output in in_place:
            written = self.result.seen_as(part.layouts.get(part.output)).part(tile.tile.box)
        else:
            written = self.held(f"out_{number % self.tiling.buffers}", part.output, types[part.output])
        return LaunchStatement(
            self.index,
            engine.name,
            tile.match,
            operands,
            written,
            tile.packed,
            part.layouts,
            None if engine.wait else CORE,
            engine.name if engine.stream else "",
            self.starts_with_next,
        )

    def packed(self, number: int) -> dict[str, View]:
        """The packed constants of a launch: copied close to the engine, or where they lie."""
        tile = self.tiling.tiles[number]
        if not tile.packed:
            return {}
        blob = self.blob(number)
        buffer, start = blob.buffer, blob.offset
        if "" not in self.tiling.in_place:
            source = self.source(number)
            buffer = self.holder(source) or f"{self.part.name}_constants_{self.slot(number)[0]}"
            start = blob.offset - source.offset
        offsets = pack_offsets(tile.packed, self.alignment)
        kinds = {name: TensorType((array.nbytes,), DType.UINT8) for name, array in tile.packed.items()}
        return {name: dense_view(buffer, kind, start + offsets[name]) for name, kind in kinds.items()}

    def holder(self, source: View) -> str | None:
        """The buffer that holds some constants where the engine reads them, for this layer or all; None for none."""
        place = source, self.part.engine.constants_memory
        return self.fetched.get(place) or self.context.fetched.get(place)

    @property
    def alignment(self) -> int:
        """Bytes each packed constant is aligned to."""
        return IN_PLACE_ALIGNMENT if self.context.target.reads_constants(self.part.engine) else PACK_ALIGNMENT

    @cached_property
    def together(self) -> int:
        """Tiles whose constants one copy fetches: as the tiling says, if all lie side by side."""
        several = self.tiling.estimate.together
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
        context, kept = self.context, self.context.known.blobs.get(self.part.name)
        if kept is None or kept[0] is not self.tiling:
            kept = self.tiling, [_blob(tile, self.alignment) for tile in self.tiling.tiles]
            context.known.blobs[self.part.name] = kept
        blob = kept[1][number]
        key = (self.alignment, blob.digest)
        if key not in context.blobs:
            name = f"{self.part.name}_constants"
            start = context.buffers[name].nbytes if name in context.buffers else 0
            context.buffer(name, context.target.code, start + blob.array.nbytes, Role.CONSTANT)
            context.pieces.setdefault(name, []).append(blob.array)
            context.blobs[key] = dense_view(name, TensorType(blob.array.shape, DType.UINT8), start)
        return context.blobs[key]


def _blob(tile: EngineTile, alignment: int) -> Blob:
    offsets = pack_offsets(tile.packed, alignment)
    array = np.zeros(offsets[""], dtype=np.uint8)
    for name, own in tile.packed.items():
        array[offsets[name] : offsets[name] + own.nbytes] = own.reshape(-1).view(np.uint8)
    return Blob(array, digest(array))


def pack_offsets(packed: Mapping[str, Array], alignment: int) -> dict[str, int]:
    """First byte of each packed constant in a tile's blob; the blob's size under ""."""
    offsets, total = {}, 0
    for name, array in packed.items():
        offsets[name] = total
        total += -(-array.nbytes // alignment) * alignment
    return {**offsets, "": total}
