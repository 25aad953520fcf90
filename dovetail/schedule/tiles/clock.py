"""The clock of an engine's part of a layer: cycles of a way to cut it, tile by tile.

Planner and tuner ask it; `timing/layer.py` walks the tiles. scripts/tuning_model.py says how near it comes to `iss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, product
from math import prod

from dovetail.ir.crop import Tile
from dovetail.ir.layout import nbytes
from dovetail.ir.types import Box, Shape, full_box
from dovetail.program.ir import Copy, dense_view
from dovetail.records import Record
from dovetail.schedule.region import EnginePart, Layouts
from dovetail.schedule.tiles.tile import laid_part, packed_bytes, packed_tile, tile_boxes, tile_match
from dovetail.target.chip import Dma
from dovetail.target.description import Target
from dovetail.target.engine import Engine, StreamDma
from dovetail.target.pattern import Choice, Match, Scope
from dovetail.timing.clock import EngineQueue, Issuer
from dovetail.timing.layer import LayerClock, OperandLoad, TileCost, TilePass
from dovetail.timing.transfers import FREE, CopyCost, copy_cost, dma_cycles
from dovetail.user_file import asking


@dataclass(frozen=True)
class TileCut:
    """A way to cut a part into tiles."""

    shape: Shape
    """Result shape of a whole tile."""
    in_place: frozenset[str]
    """Values (operands, result) the engine reaches where they lie; "" stands for its packed constants."""
    buffers: int = 2
    """Buffers per operand that changes from tile to tile: 2 let copies run while the engine computes."""
    channels_outer: bool | None = None
    """Whether all positions are computed for some channels before the next channels are; None: as moves fewest
    bytes."""


class Estimate(Record):
    """Estimated cost of a layer cut in one way. Times are cycles, without a network's beginning and end."""

    cycles: int
    """The layer by itself."""
    tiles: int = 1
    nbytes: int = 0
    """Bytes of the engine's memory that tiles take."""
    engine: int = 0
    """The engine is busy."""
    copying: int = 0
    """The DMA is busy."""
    fetching: int = 0
    """The DMA is busy for constants."""
    starting: int = 0
    """The core goes along with tiles it starts."""
    together: int = 1
    """Tiles whose constants one copy fetches."""
    channels_outer: bool = True
    """The order of a `TileCut`, decided."""

    @property
    def moving(self) -> int:
        """The DMA is busy for operands and results."""
        return self.copying - self.fetching


class _TileAxes(Record):
    """Some axes of a tile; tiles whose axes have one `kind` cost the same."""

    box: Box
    kind: tuple[object, ...]


_NO_SETTINGS: Choice = {}
_Key = tuple[tuple[object, ...], tuple[object, ...], tuple[object, ...]]
"""Settings of the offload's knobs, and the kinds of a tile's positions and channels."""


@dataclass
class PartClock:
    """Estimates ways to cut a part; every kind of tile is looked at once. Converted values lie as `lies` says."""

    part: EnginePart
    target: Target
    lies: Layouts = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dma, self.room = self.target.dma_of(self.part.engine), constants_room(self.target, self.part.engine)
        self._costs: dict[tuple[_Key, frozenset[str], frozenset[str]], TileCost] = {}
        self._computing: dict[tuple[_Key, frozenset[str], frozenset[str]], int] = {}
        self._constants: dict[tuple[object, ...], int] = {}
        self._matches: dict[tuple[object, ...], tuple[Tile, Match]] = {}
        self._tiles: dict[Box, Tile] = {}
        self.sizes, self.axes = cache(self._sizes), cache(self._axes)

    def first(self, cut: TileCut, own: Choice = _NO_SETTINGS) -> TileCost:
        """The cost of a whole tile without its constants; raises ValueError where the engine does not take it."""
        return self._tile(own, *self._first(cut), cut.in_place)

    def computing(self, cut: TileCut) -> int:
        """The engine's cycles of a whole tile, which are asked before the rest of its cost; raises as `first`."""
        place, span = self._first(cut)
        return self._cycles(_NO_SETTINGS, place, span, cut.in_place, frozenset())

    def _first(self, cut: TileCut) -> tuple[_TileAxes, _TileAxes]:
        """The place and the channels of a whole tile."""
        sizes = zip(self.part.extent, cut.shape, self.part.shape, strict=True)
        *rest, (channels,) = [_cut(begin, min(begin + step, end), total, step) for (begin, end), step, total in sizes]
        return _joined([place for (place,) in rest]), channels

    def takes(self, cut: TileCut) -> bool:
        """Whether the engine takes the tiles of a cut at the ends and in the middle of each axis: where limits are of
        single launches, one in the middle, which reads the most, may be too large; where values lie in blocks, it may
        begin inside one."""
        limited = any(limit.scope is Scope.TILES for limit in self.part.offload.constraints)
        if not (limited or self.part.layouts):
            return True
        spans = zip(self.part.extent, cut.shape, strict=True)
        axes = [[(at, min(at + step, end)) for at in range(begin, end, step)] for (begin, end), step in spans]
        try:
            for box in product(*({axis[0], axis[len(axis) // 2], axis[-1]} for axis in axes)):
                tile = self._laid(box)
                if limited:
                    tile_match(self.part, box, tile)
        except ValueError:
            return False
        return True

    def estimate(
        self,
        cut: TileCut,
        own: Choice = _NO_SETTINGS,
        around: tuple[Sequence[CopyCost], Sequence[CopyCost]] = ((), ()),
        *,
        alike: bool = False,
        ready: bool = False,
    ) -> Estimate | None:
        """The cost of a cut; None where the engine's memory for constants does not hold them.

        Args:
            cut: the tiles.
            own: settings of the offload's knobs.
            around: changes of layout before and after it.
            alike: whether all tiles are thought to cost what the first does.
            ready: whether all constants are there when the layer begins.
        """
        if (memory := self.held(cut, own)) is None:
            return None
        (together, held), engine, statements = memory, self.part.engine, self.target.core.statements
        spatial, channels = self.axes(cut.shape)
        first, counts = self._tile(own, spatial[0], channels[0], cut.in_place), (len(spatial), len(channels))
        packed = self._packed(own, spatial[0], channels[0]) if "" not in cut.in_place else 0
        outer = self._is_outer(cut, own, first, packed, (spatial, channels))
        order = list(product(range(counts[0]), range(counts[1])))
        if outer:
            order.sort(key=lambda tile: tile[1])
        axes = [(spatial[0], channels[0]) if alike else (spatial[place], channels[span]) for place, span in order]
        loaded = [self._loaded(own, *kind, *turn) for kind, turn in zip(axes, pairwise([None, *order]), strict=True)]
        tiles = [self._tile(own, *kind, cut.in_place, there) for kind, there in zip(axes, loaded, strict=True)]
        if alike:
            nbytes = [packed] * len(order)
        else:
            nbytes = [self._packed(own, spatial[place], channels[span]) for place, span in order] if packed else []
        if packed and not ready:
            tiles = list(self._with_constants(tiles, nbytes, together))
        issuer = Issuer(statements) if engine.stream is None else Issuer.of_list()
        clock = LayerClock(issuer, EngineQueue.of(engine))
        cycles = clock.run(TilePass(tiles, order, cut.buffers, together), *around)
        if engine.stream is not None:
            cycles += engine.launching + statements.wake
        starting = sum(tile.starting for tile in tiles)
        busy = clock.engine.busy, clock.dma.busy, clock.fetching, starting
        return Estimate(cycles, len(tiles), held, *busy, together, outer)

    def held(self, cut: TileCut, own: Choice = _NO_SETTINGS) -> tuple[int, int] | None:
        """Tiles whose constants one copy fetches, and bytes of the engine's memory that tiles take; None where its
        memory for constants does not hold them. `own` as of `estimate`, which is asked for what fits."""
        spatial, channels = self.axes(cut.shape)
        first, counts = self._tile(own, spatial[0], channels[0], cut.in_place), (len(spatial), len(channels))
        packed = self._packed(own, spatial[0], channels[0]) if "" not in cut.in_place else 0
        constants = constants_in_copies(self.dma, packed, counts, cut.buffers, self.room)
        if constants is None:
            return None
        held = 0 if self.room else constants[1]
        for load in first.loads:
            spans = min(cut.buffers, counts[1]) if load.by_span else 1
            held += load.nbytes * (cut.buffers if counts[0] > 1 else spans)
        return constants[0], held + first.scratch + first.store_bytes * (cut.buffers if prod(counts) > 1 else 1)

    def copying(self, cut: TileCut, first: TileCost) -> int:
        """Cycles of the DMA for the tiles of a cut, all like the first: at most those of `estimate`."""
        spatial, channels = axes = self.axes(cut.shape)
        packed = self._packed(_NO_SETTINGS, spatial[0], channels[0]) if "" not in cut.in_place else 0
        outer = self._is_outer(cut, _NO_SETTINGS, first, packed, axes)
        places, spans = len(spatial), len(channels)
        stays = outer or spans <= cut.buffers or places == 1
        constants = dma_cycles(self.dma, packed * spans) * (1 if stays else places) if packed else 0

        def times(load: OperandLoad) -> int:
            """How often it is fetched: where what changes last in the order of the tiles needs another part of it."""
            by_place, by_span = load.by_place and places > 1, load.by_span and spans > 1
            if (by_place and outer) or (by_span and not outer) or (by_place and by_span):
                return places * spans
            return places if by_place else spans if by_span else 1

        loads = sum(load.copy.cycles * times(load) for load in first.loads)
        return loads + constants + first.store.cycles * places * spans

    def _is_outer(
        self,
        cut: TileCut,
        own: Choice,
        first: TileCost,
        packed: int,
        axes: tuple[Sequence[_TileAxes], Sequence[_TileAxes]],
    ) -> bool:
        """Whether channels are the outer loop, as the cut says or as moves fewest bytes."""
        if cut.channels_outer is not None:
            return cut.channels_outer
        loads, constants = self._buffered(own, axes[0][0], axes[1][0])
        return outer_channels(first.load_bytes + loads, packed + constants, len(axes[0]), len(axes[1]))

    def _buffered(self, own: Choice, place: _TileAxes, span: _TileAxes) -> tuple[int, int]:
        """Bytes of operands and of constants that a tile loads into its engine's buffer."""
        if self.part.offload.buffered is None:
            return 0, 0
        tile, match = self._match(own, place, span)
        sizes = {
            name: one if isinstance(one, int) else len(one) for name, one in self.part.offload.buffered(match).items()
        }
        loads = sum(size for name, size in sizes.items() if match.values.get(name) in tile.reads)
        return loads, sum(sizes.values()) - loads

    def _loaded(
        self,
        own: Choice,
        place: _TileAxes,
        span: _TileAxes,
        before: tuple[int, int] | None,
        turn: tuple[int, int] | None,
    ) -> frozenset[str]:
        """Names of what the tile before has loaded for a tile; turns are positions and channels."""
        if self.part.offload.buffered is None or before is None or turn is None:
            return frozenset()
        tile, match = self._match(own, place, span)
        there = set()
        for name in self.part.offload.buffered(match):
            *rest, last = [False, True]
            if read := tile.reads.get(match.values.get(name, "")):
                shape = self.part.graph.types[match.values[name]].shape
                *rest, last = (one != (0, size) for one, size in zip(read, shape, strict=True))
            if (before[0] == turn[0] or not any(rest)) and (before[1] == turn[1] or not last):
                there.add(name)
        return frozenset(there)

    def _axes(self, shape: Shape) -> tuple[list[_TileAxes], list[_TileAxes]]:
        """Positions and channels of the tiles of a shape."""
        cuts = zip(self.part.extent, shape, self.part.shape, strict=True)
        *rest, channels = [_cut(*span, total, step) for span, step, total in cuts]
        return [_joined(parts) for parts in product(*rest)], channels

    def _sizes(self, shape: Shape) -> Mapping[str, int] | None:
        """Bytes of each operand and of the result of a tile; None where the region cannot be cut like that."""
        try:
            tile = self._laid(next(tile_boxes(self.part.extent, shape, True)))
        except ValueError:
            return None
        names, kinds = (*tile.graph.inputs, self.part.output), tile.graph.types
        return {name: nbytes(self.part.layouts.get(name), kinds[name]) for name in names}

    def _laid(self, box: Box) -> Tile:
        if box not in self._tiles:
            self._tiles[box] = laid_part(self.part, box)
        return self._tiles[box]

    def _tile(
        self,
        own: Choice,
        place: _TileAxes,
        span: _TileAxes,
        in_place: frozenset[str],
        loaded: frozenset[str] = frozenset(),
    ) -> TileCost:
        """Cost of a tile without its constants; tiles of one size that touch the same edges cost the same."""
        key = (tuple(own.values()), place.kind, span.kind), in_place, loaded
        if key not in self._costs:
            asked = self._asked(own, place, span, in_place, loaded)
            cycles = self._cycles(own, place, span, in_place, loaded)
            self._costs[key] = self._cost((*place.box, *span.box), *asked, in_place, cycles)
        return self._costs[key]

    def _cycles(
        self, own: Choice, place: _TileAxes, span: _TileAxes, in_place: frozenset[str], loaded: frozenset[str]
    ) -> int:
        """Cycles of the engine for a tile; arguments as those of `_tile`."""
        key = (tuple(own.values()), place.kind, span.kind), in_place, loaded
        if key not in self._computing:
            _, match = self._asked(own, place, span, in_place, loaded)
            with asking(f"the cycles of {self.part.offload.name} for {self.part.name}"):
                self._computing[key] = self.part.offload.cycles(match)
        return self._computing[key]

    def _asked(
        self, own: Choice, place: _TileAxes, span: _TileAxes, in_place: frozenset[str], loaded: frozenset[str]
    ) -> tuple[Tile, Match]:
        """A tile, and its match with what the target's functions are told of the tile's surroundings."""
        tile, match = self._match(own, place, span)
        reads, types = {**tile.reads, self.part.output: (*place.box, *span.box)}, self.part.graph.types
        within = {
            name: types[name].shape
            for name, read in reads.items()
            if name in in_place and read != full_box(types[name].shape)
        }
        return tile, replace(match, within=within, loaded=loaded) if within or loaded else match

    def _match(self, own: Choice, place: _TileAxes, span: _TileAxes) -> tuple[Tile, Match]:
        key = (tuple(own.values()), place.kind, span.kind)
        if key not in self._matches:
            box = (*place.box, *span.box)
            part = replace(self.part, choice={**self.part.choice, **own}) if own else self.part
            self._matches[key] = tile_match(part, box, self._laid(box))
        return self._matches[key]

    def _packed(self, own: Choice, place: _TileAxes, span: _TileAxes) -> int:
        """Bytes of a tile's packed constants."""
        key = (tuple(own.values()), span.kind)
        if key not in self._constants:
            self._constants[key] = packed_bytes(packed_tile(self.part, *self._match(own, place, span)).packed)
        return self._constants[key]

    def _with_constants(self, tiles: Sequence[TileCost], nbytes: Sequence[int], together: int) -> Iterator[TileCost]:
        """Tiles with the copies of their constants: the first of those that one copy is for has it."""
        kinds: dict[tuple[int, int], TileCost] = {}
        for place, tile in enumerate(tiles):
            count = sum(nbytes[place : place + together]) if place % together == 0 else 0
            key = id(tile), count
            if count and key not in kinds:
                kinds[key] = replace(tile, constants=CopyCost(1, dma_cycles(self.dma, count)))
            yield kinds[key] if count else tile

    def _cost(self, box: Box, tile: Tile, match: Match, in_place: frozenset[str], cycles: int) -> TileCost:
        part, types = self.part, tile.graph.types
        away = [name for name in tile.reads if name not in in_place]
        sizes = {name: nbytes(part.layouts.get(name), types[name]) for name in (*away, part.output)}
        with asking(f"the cycles of {part.offload.name} for {part.name}"):
            starting = part.offload.starting(match)
        is_stored = part.output not in in_place
        return TileCost(
            engine=cycles,
            starting=starting,
            loads=tuple(self._load(name, tile, sizes[name]) for name in away),
            store=self._copy(part.output, box, tile, False) if is_stored else FREE,
            load_bytes=sum(sizes[name] for name in away),
            store_bytes=sizes[part.output] if is_stored else 0,
            scratch=packed_tile(part, tile, match, False).scratch,
        )

    def _load(self, name: str, tile: Tile, nbytes: int) -> OperandLoad:
        whole = self.part.graph.types[name].shape
        cut = [span != (0, size) for span, size in zip(tile.reads[name], whole, strict=True)]
        return OperandLoad(self._copy(name, tile.reads[name], tile, True), any(cut[:-1]), cut[-1], nbytes)

    def _copy(self, name: str, box: Box, tile: Tile, loads: bool) -> CopyCost:
        """Cost of copying a part of a value to a tile, which lies as the engine takes it, or from one."""
        layout = self.part.layouts.get(name)
        lies = self.lies.get(name) if name in self.part.converted else layout
        whole = dense_view("value", self.part.graph.types[name], layout=lies).part(box)
        held = dense_view("tile", tile.graph.types[name], layout=layout)
        return copy_cost(self.dma, [Copy(0, *((whole, held) if loads else (held, whole)))])


def _joined(parts: Sequence[_TileAxes]) -> _TileAxes:
    """Parts of different axes together."""
    return _TileAxes(tuple(part.box[0] for part in parts), tuple(part.kind for part in parts))


def _cut(begin: int, end: int, total: int, step: int) -> list[_TileAxes]:
    """A stretch of an axis cut into parts; parts of one length that touch the same ends of the axis are of one kind."""
    spans = [(start, min(start + step, end)) for start in range(begin, end, step)]
    return [_TileAxes(((start, stop),), (stop - start, start == 0, stop == total)) for start, stop in spans]


def constants_in_copies(
    dma: Dma | StreamDma | None, packed: int, tiles: tuple[int, int], buffers: int, room: int
) -> tuple[int, int] | None:
    """Tiles whose constants one copy fetches, and bytes of the buffers they are copied into; None where an engine's own
    memory for them does not hold them.

    Args:
        dma: what copies them.
        packed: bytes of a whole tile's.
        tiles: how many of the same channels, and how often the channels are cut.
        buffers: per operand that changes from tile to tile.
        room: bytes of that memory (`constants_room`).
    """
    spatial, channel_cuts = tiles
    together = fetched_together(dma, packed, channel_cuts, room // buffers) if spatial == 1 else 1
    held = packed * together * min(buffers, -(-channel_cuts // together))
    return None if 0 < room < held else (together, held)


_LONG = 8
"""A copy of constants takes at least so many times its setup, if those of several tiles can make it so long."""


def constants_room(target: Target, engine: Engine) -> int:
    """Bytes of the memory that an engine has for constants alone; 0 where it has none."""
    return target.memory(engine.constants).size if engine.constants not in ("", engine.memory) else 0


def fetched_together(dma: Dma | StreamDma | None, packed: int, tiles: int, room: int) -> int:
    """Number of tiles whose constants one copy fetches, where an engine has a memory of its own for constants.

    Args:
        dma: what copies them.
        packed: bytes of one tile's.
        tiles: how many have constants of their own.
        room: bytes of that memory for one copy; 0 where there is no such memory.
    """
    if dma is None or not packed or packed > room:
        return 1
    wanted = -(-_LONG * dma.setup_cycles * dma.bytes_per_cycle // packed)
    copies = -(-tiles // max(1, min(wanted, room // packed, tiles)))
    return -(-tiles // copies)


def outer_channels(loads: int, packed: int, spatial: int, channel_cuts: int) -> bool:
    """True when looping over channels outside moves fewer bytes than looping over positions outside."""
    if spatial == 1 or channel_cuts == 1:
        return True
    return loads * spatial * channel_cuts + packed * channel_cuts <= loads * spatial + packed * spatial * channel_cuts
