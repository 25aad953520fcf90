"""Tilings: how an engine's part of a region is cut, the engine memory that takes, and cycles by the formula that ranks
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from dovetail.errors import PlanError
from dovetail.ir.crop import Tile
from dovetail.ir.layout import nbytes
from dovetail.ir.types import Shape
from dovetail.schedule import shipped
from dovetail.schedule.region import EnginePart
from dovetail.schedule.tiles.tile import (
    ORDER,
    EngineTile,
    laid_part,
    packed_bytes,
    packed_tile,
    packed_tiles,
    tile_boxes,
    tile_counts,
    tile_match,
)
from dovetail.target.chip import Dma
from dovetail.target.description import Target
from dovetail.target.engine import Engine, StreamDma
from dovetail.target.pattern import Match, Value
from dovetail.user_file import asking

LAUNCH_CYCLES = 150
"""Core cycles a tile costs for programming the engine and the DMA; an estimate, used to rank tilings only."""
Progress = Callable[[str], None]
"""Told what is looked at."""
MOST_ASKED = 2000
"""Tile shapes of a part the target's functions are asked about; then the best one so far is taken."""


@dataclass(frozen=True)
class Tiling:
    """A way of cutting a part, and its costs."""

    shape: Shape
    """Result shape of a whole tile."""
    in_place: frozenset[str]
    """Values (operands, result) the engine reaches where they lie; "" stands for its packed constants."""
    nbytes: int
    """Bytes of engine memory the tile buffers take."""
    cycles: int
    """Estimated cycles, for ranking."""
    buffers: int = 2
    """Buffers per operand that changes from tile to tile: 2 let copies run while the engine computes."""
    channels_outer: bool = True
    """Whether all positions are computed for some channels before the next channels are."""
    together: int = 1
    """Tiles whose constants one copy fetches."""
    fetching: int = 0
    """Cycles the DMA copies constants for all tiles."""
    moving: int = 0
    """Cycles it loads operands and stores results."""
    ready_cycles: int = 0
    """Estimated cycles from when the constants are there, as they are where they are fetched early."""
    starting: int = 0
    """Cycles in which the core goes along with tiles it starts."""
    computing: int = 0
    """Engine cycles of a whole tile."""

    def not_slower_than(self, other: Tiling) -> Tiling:
        """The tiling with the other's estimates where these are less: it was measured to be faster."""
        cycles, ready = min(self.cycles, other.cycles), min(self.ready_cycles, other.ready_cycles)
        return replace(self, cycles=cycles, ready_cycles=ready)


@dataclass(frozen=True)
class CompleteTiling(Tiling):
    """A tiling with its tiles."""

    tiles: tuple[EngineTile, ...] = ()
    """In the order they are launched."""


@dataclass(frozen=True)
class TooLarge:
    """The outcome for a cut whose tiles do not fit the budget."""

    nbytes: int
    """Bytes of engine memory it takes, at least."""


@dataclass(frozen=True)
class NotTaken:
    """The outcome for a cut that the engine cannot compute, or that is slower than another."""

    reason: str


@dataclass(frozen=True)
class _TileCut:
    """A way of cutting a part, by the shapes of its tiles alone. Bytes and counts are of a tile, if nothing else is
    said."""

    size: Shape
    in_place: frozenset[str]
    buffers: int
    """These as in a `Tiling`."""
    spatial: int
    """Tiles of the same channels."""
    channel_cuts: int
    """Parts the channels are cut into."""
    loads: int
    """Bytes of operands that are copied."""
    result: int
    """Bytes of the result, if it is copied."""
    setups: int
    """Transfers of operands and results of all tiles."""
    fetches: int
    """The fewest transfers of constants for all tiles."""
    nbytes: int
    """Engine memory for all, without constants and working memory."""

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.spatial * self.channel_cuts

    def both(self, computing: int, copying: int) -> int:
        """Cycles of both, at the same time where there are buffers for that."""
        return max(computing, copying) if self.buffers > 1 else computing + copying


@dataclass(frozen=True)
class _TileWork:
    """Cycles of a whole tile, as the target's functions say."""

    computing: int
    """The engine's."""
    starting: int
    """Cycles in which the core goes along with it."""


@dataclass(frozen=True)
class _TileRoom:
    """Bytes of a whole tile beside its operands and result, as the target's functions say."""

    packed: int
    """Packed constants; 0 where they are read in place."""
    scratch: int


class PartTiles:
    """The ways of cutting one engine's part. Answers are kept, since the target's functions may take long."""

    def __init__(self, part: EnginePart, target: Target, progress: Progress = lambda text: None) -> None:
        """`progress` is told when the target's functions are asked for the first time, and when `MOST_ASKED` is
        reached."""
        self.part, self.target, self.progress = part, target, progress
        self.launch = 0 if part.engine.stream else LAUNCH_CYCLES
        """Core cycles of starting a tile."""
        self.dma, self.constants_room = target.dma_of(part.engine), constants_room(target, part.engine)
        self.asked = 0
        """Tiles the target's functions were asked about."""
        self.answered: set[Shape] = set()
        self.ranked: dict[frozenset[str], list[tuple[int, Tiling]]] = {}
        """By the values reached where they lie: the fastest within each budget, by the formula."""
        self.shipped: dict[frozenset[str], shipped.TilingEntry | None] = {}
        """The entry of the table that comes with the package, by the ends in the engine's memory."""
        self.last: tuple[Shape, Tile, Match | None] | None = None
        """The tile that was cut last, and its size."""
        self.cut, self.size = cache(self._cut), cache(self._size)
        self.work, self.room, self.tiling = cache(self._work), cache(self._room), cache(self._tiling)

    def is_of(self, part: EnginePart) -> bool:
        """Whether answers for a part hold: it is the same one, perhaps as another stage has it."""
        own = self.part
        same = own.graph is part.graph and own.engine is part.engine and own.offload is part.offload
        return same and (own.layouts, own.choice, own.extent) == (part.layouts, part.choice, part.extent)

    def within(self, in_place: frozenset[str], budget: int) -> Tiling | None:
        """The fastest tiling within a larger budget, where it is within this one too: then none here is faster."""
        ranked = self.ranked.get(in_place, ())
        return next((tiling for most, tiling in ranked if tiling.nbytes <= budget <= most), None)

    def may_ask(self, size: Shape) -> bool:
        """Whether the target's functions have answered for a tile, or may be asked about one more."""
        return self.asked < MOST_ASKED or size in self.answered

    def evaluate(
        self,
        size: Shape,
        in_place: frozenset[str],
        buffers: int,
        budget: int | None = None,
        rival: int | None = None,
        order: Value | None = None,
    ) -> Tiling | TooLarge | NotTaken:
        """Bytes and cycles of a cut. The target's functions are asked only where the shapes leave it a chance.

        Args:
            size: result shape of a whole tile.
            in_place: as in a `Tiling`.
            buffers: per operand that changes from tile to tile.
            budget: bytes of engine memory it may take; None for any.
            rival: cycles of another tiling, which it has to beat; None for none.
            order: of the loop over tiles; None for the one chosen for the part, or the one that moves fewest bytes.
        """
        slow = NotTaken("it takes longer than another")
        if rival is not None and self.launch * prod(tile_counts(self.part.extent, size)) >= rival:
            return slow
        if (cut := self.cut(size, in_place, buffers)) is None:
            return NotTaken("it cannot be cut like that")
        if budget is not None and cut.nbytes > budget:
            return TooLarge(cut.nbytes)
        if rival is not None and self._least(cut, 0) >= rival:
            return slow
        work = self.work(size)
        if isinstance(work, NotTaken):
            return work
        if rival is not None and self._least(cut, work.computing) >= rival:
            return slow
        tiling = self.tiling(cut, order or self.part.choice.get(ORDER))
        if isinstance(tiling, Tiling) and budget is not None and tiling.nbytes > budget:
            return TooLarge(tiling.nbytes)
        return tiling

    def _match(self, size: Shape) -> tuple[Tile, Match]:
        """The first tile of a size and its match; raises ValueError where the offload does not take it."""
        tile, match = self._first(size)
        if match is None:
            tile, match = tile_match(self.part, tile.box, tile)
            self.last = size, tile, match
        return tile, match

    def _first(self, size: Shape) -> tuple[Tile, Match | None]:
        """The first tile of a size; raises ValueError when the region cannot be cut like that."""
        if self.last is None or self.last[0] != size:
            self.last = size, laid_part(self.part, next(tile_boxes(self.part.extent, size, True))), None
        return self.last[1:]

    def _size(self, size: Shape) -> Mapping[str, int] | None:
        """Bytes of each operand and of the result in a tile; None where the region cannot be cut like that."""
        try:
            tile, _ = self._first(size)
        except ValueError:
            return None
        names, kinds = (*tile.graph.inputs, self.part.output), tile.graph.types
        return {name: nbytes(self.part.layouts.get(name), kinds[name]) for name in names}

    def _work(self, size: Shape) -> _TileWork | NotTaken:
        self.asked += 1
        self.answered.add(size)
        if self.asked in (1, MOST_ASKED):
            more = "" if self.asked == 1 else f": {MOST_ASKED} sizes tried, the best of them is taken"
            self.progress(f"planning tiles of {self.part.name}{more}")
        try:
            _, match = self._match(size)
        except ValueError as error:
            return NotTaken(str(error))
        offload = self.part.offload
        with asking(f"the cycles of {offload.name} for {self.part.name}"):
            return _TileWork(offload.cycles(match), offload.starting(match))

    def _room(self, size: Shape, packs: bool) -> _TileRoom:
        tile = packed_tile(self.part, *self._match(size), packs)
        return _TileRoom(packed_bytes(tile.packed), tile.scratch)

    def _cut(self, size: Shape, in_place: frozenset[str], buffers: int) -> _TileCut | None:
        """The bytes and transfers of a cut by its shapes; None when the region cannot be cut like that."""
        part = self.part
        ends = {*part.graph.inputs, part.output}
        if size != part.shape and not part.offload.strided and not in_place.isdisjoint(ends):
            return None
        if (sizes := self.size(size)) is None:
            return None
        *rest, channel_cuts = tile_counts(part.extent, size)
        spatial, tiles = prod(rest), prod(rest) * channel_cuts
        loaded = [sizes[name] for name in part.graph.inputs if name not in in_place]
        loads, result = sum(loaded), 0 if part.output in in_place else sizes[part.output]
        nbytes = loads * (buffers if spatial > 1 else 1) + result * (buffers if tiles > 1 else 1)
        setups, fetches = tiles * (bool(loaded) + bool(result)), channel_cuts if "" not in in_place else 0
        fetches = min(fetches, 1) if spatial == 1 and self.constants_room else fetches
        return _TileCut(size, in_place, buffers, spatial, channel_cuts, loads, result, setups, fetches, nbytes)

    def _least(self, cut: _TileCut, computing: int) -> int:
        """Cycles a cut takes at least, without those of constants, where the engine takes so many for a tile."""
        moved = cut.loads * cut.spatial + cut.result * cut.tiles
        copying = dma_cycles(self.dma, moved, cut.setups + cut.fetches)
        ends = dma_cycles(self.dma, cut.loads + cut.result, 1)
        return cut.both((computing + self.launch) * cut.tiles, copying) + ends

    def _tiling(self, cut: _TileCut, order: Value | None) -> Tiling | NotTaken:
        """A cut with what the target's functions say of a tile."""
        work, room = self.work(cut.size), self.room(cut.size, "" not in cut.in_place)
        assert isinstance(work, _TileWork)
        packed, loads, result, tiles = room.packed, cut.loads, cut.result, cut.tiles
        counts = cut.spatial, cut.channel_cuts
        constants = constants_in_copies(self.dma, packed, counts, cut.buffers, self.constants_room)
        if constants is None:
            return NotTaken(f"its constants do not fit {self.part.engine.constants}")
        fetches = constants.copies if cut.fetches else 0
        nbytes = cut.nbytes + room.scratch + (0 if self.constants_room else constants.held)
        channels_outer = outer_channels(loads, packed, *counts) if order is None else order == "channels"
        moved = loads * (tiles if channels_outer and cut.spatial > 1 else cut.spatial) + result * tiles
        fetched = packed * (cut.channel_cuts if channels_outer or cut.spatial == 1 else tiles)
        engine, ends = (work.computing + self.launch) * tiles, loads + result
        copying = dma_cycles(self.dma, moved + fetched, cut.setups + fetches)
        moving = dma_cycles(self.dma, moved, cut.setups)
        return Tiling(
            cut.size,
            cut.in_place,
            nbytes,
            cut.both(engine, copying) + dma_cycles(self.dma, ends + packed, 1),
            cut.buffers,
            channels_outer,
            constants.together,
            copying - moving,
            moving,
            cut.both(engine, moving) + dma_cycles(self.dma, ends, 1 if ends else 0),
            work.starting * tiles,
            work.computing,
        )


@dataclass
class TileCache:
    """The ways of cutting each part of a network that was looked at, by its name."""

    parts: dict[str, PartTiles] = field(default_factory=dict)
    progress: Progress = lambda text: None
    """As of `PartTiles`."""

    def of(self, part: EnginePart, target: Target) -> PartTiles:
        """The ways of cutting a part; those known of it, if it is still the same."""
        tiles = self.parts.get(part.name)
        if tiles is None or not tiles.is_of(part):
            tiles = self.parts[part.name] = PartTiles(part, target, self.progress)
        return tiles

    def again(self, progress: Progress) -> TileCache:
        """The same answers for another stage, which may ask as often."""
        for tiles in self.parts.values():
            tiles.asked, tiles.progress = 0, progress
        return TileCache(dict(self.parts), progress)


@dataclass(frozen=True, slots=True)
class CopiedConstants:
    """The copies of the constants of a layer's tiles to the engine."""

    together: int
    """Tiles whose constants one copy fetches."""
    copies: int
    """Copies for all channels once."""
    held: int
    """Bytes of the buffers they are copied into."""


def constants_in_copies(
    dma: Dma | StreamDma | None, packed: int, tiles: tuple[int, int], buffers: int, room: int
) -> CopiedConstants | None:
    """The copies of constants; None where an engine's own memory for them does not hold them.

    Args:
        dma: what copies them.
        packed: bytes of a whole tile's.
        tiles: how many of the same channels, and how often the channels are cut.
        buffers: per operand that changes from tile to tile.
        room: bytes of that memory (`constants_room`).
    """
    spatial, channel_cuts = tiles
    together = fetched_together(dma, packed, channel_cuts, room // buffers) if spatial == 1 else 1
    copies = -(-channel_cuts // together)
    held = packed * together * min(buffers, copies)
    return None if 0 < room < held else CopiedConstants(together, copies, held)


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


def complete(part: EnginePart, tiling: Tiling, before: CompleteTiling | None = None) -> CompleteTiling:
    """The tiling with its tiles; `before`, the one of an earlier round, where it is the same.

    Raises:
        PlanError: the engine takes the first tile and not another one, e.g. at an edge.
    """
    if before is not None and CompleteTiling(**vars(tiling), tiles=before.tiles) == before:
        return before
    boxes = tile_boxes(part.extent, tiling.shape, tiling.channels_outer)
    try:
        return CompleteTiling(**vars(tiling), tiles=tuple(packed_tiles(part, boxes)))
    except ValueError as error:
        set_to = ", ".join(f"{name} = {value}" for name, value in part.choice.items()) or "the planner's own choice"
        raise PlanError(
            f"tiles of {'x'.join(map(str, tiling.shape))} do not fit {part.name} ({set_to}): {error}",
            where=", ".join(part.origins),
            hint="choose another tile, or let a Constraint of the offload (scope tiles) say what the "
            "engine does not take",
        ) from None


def tiles_ahead(buffers: int, parts: int, fetching: int, computing: int) -> int:
    """Number of tiles whose constants are fetched before the first is launched.

    It is one less than there are buffers, so that the core launches soon; all where each tile has a buffer and the DMA
    takes longer than the engine, as it would idle else.

    Args:
        buffers: per operand that changes from tile to tile.
        parts: tiles with constants of their own.
        fetching: cycles of the DMA for the constants of all tiles.
        computing: cycles of the engine for all tiles.
    """
    return parts if parts <= buffers and fetching > computing else min(parts, max(buffers - 1, 1))


def constants_ahead(buffers: int, tiles: int, together: int, fetching: int, computing: int) -> int:
    """As `tiles_ahead`, for constants that one copy fetches for several tiles: with one buffer the next are fetched
    when the last tile that reads these has been launched."""
    copies = -(-tiles // together)
    return 1 if buffers == 1 < copies else together * tiles_ahead(buffers, copies, fetching, computing)


def first_constants(part: EnginePart, tiling: Tiling) -> tuple[bytes, ...]:
    """The packed constants of the tile that is launched first; the part is one that can be cut like that."""
    box = next(tile_boxes(part.extent, tiling.shape, True))
    return tuple(array.tobytes() for array in packed_tile(part, *tile_match(part, box)).packed.values())


def dma_cycles(dma: Dma | StreamDma | None, nbytes: int, transfers: int) -> int:
    """Cycles of so many transfers of so many bytes in all; 0 without a DMA."""
    if dma is None:
        return 0
    return transfers * dma.setup_cycles + -(-nbytes // dma.bytes_per_cycle)
