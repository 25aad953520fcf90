"""What a way of cutting a region takes: bytes of the engine's memory, and cycles by the formula that ranks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from dovetail.errors import PlanError
from dovetail.ir.crop import Tile
from dovetail.ir.layout import nbytes
from dovetail.ir.types import Shape, box_shape
from dovetail.schedule import shipped
from dovetail.schedule.partition import Region
from dovetail.schedule.tiles.tile import (
    ORDER,
    EngineTile,
    first_part,
    packed_bytes,
    packed_tile,
    packed_tiles,
    tile_boxes,
    tile_match,
)
from dovetail.target.chip import Dma
from dovetail.target.description import Target
from dovetail.target.engine import Engine, StreamDma
from dovetail.user_file import asking

LAUNCH_CYCLES = 150
"""Core cycles a tile costs for programming the engine and the DMA; an estimate, used to rank tilings only."""
MOST_ASKED = 2000
"""Tile shapes of a region the target's functions are asked about; then the best one found is taken."""


@dataclass(frozen=True)
class Tiling:
    """How a region is cut, and what the cut costs."""

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
    tiles: tuple[EngineTile, ...] = ()
    """Every tile, in the order they are launched; none until `complete` makes them."""


@dataclass(frozen=True)
class TileSize:
    """Bytes one tile takes, by its shapes alone."""

    operands: Mapping[str, int]
    """Of every runtime operand."""
    result: int


@dataclass(frozen=True)
class TileCost:
    """What one tile needs beside its operands, as the target's functions say."""

    packed: int
    """Bytes of its packed constants; 0 where they are read in place."""
    scratch: int
    cycles: int
    """Of the engine."""
    starting: int
    """Cycles in which the core goes along with it."""


_Place = tuple[str, Shape, frozenset[str], int]
"""Region, tile, what the engine reaches where it lies, buffers per operand."""


@dataclass
class TileCache:
    """The first tile of each size, by region and result shape; None where the region cannot be cut like that. Kept
    through the rounds of planning, since the target's functions may take long."""

    sizes: dict[tuple[str, Shape], TileSize | None] = field(default_factory=dict)
    costs: dict[tuple[str, Shape], TileCost | int | None] = field(default_factory=dict)
    """The engine's cycles alone where these rule the size out."""
    asked: Counter[str] = field(default_factory=Counter)
    """Tiles of each region the target's functions were asked about."""
    cuts: dict[_Place, _TileCut | None] = field(default_factory=dict)
    tilings: dict[tuple[_Place, object], Tiling | None] = field(default_factory=dict)
    """By how the region is cut, and the order chosen for it."""
    chosen: dict[tuple[str, frozenset[str], frozenset[str], int], Tiling] = field(default_factory=dict)
    """By region, its ends in the engine's memory, what is reached where it lies, and budget."""
    ranked: dict[tuple[str, frozenset[str]], list[tuple[int, Tiling]]] = field(default_factory=dict)
    """By region and what is reached where it lies: the fastest within a budget, by the formula."""
    shipped: dict[tuple[str, frozenset[str]], shipped.TilingEntry | None] = field(default_factory=dict)
    """What the table that comes with the package has, by region and its ends in the engine's memory."""
    progress: Callable[[str], None] = lambda text: None
    """Told which region they are asked about, and where `MOST_ASKED` is reached."""
    _tile: tuple[tuple[str, Shape], Tile | None] = (("", ()), None)
    """The tile that was cut last, and which it is."""

    def size(self, region: Region, size: Shape) -> TileSize | None:
        """What a tile takes by its shapes."""
        if (place := (region.name, size)) not in self.sizes:
            tile = first_part(region, size)
            self.sizes[place], self._tile = _tile_size(region, tile) if tile else None, (place, tile)
        return self.sizes[place]

    def of(self, names: Collection[str], progress: Callable[[str], None] = lambda text: None) -> TileCache:
        """What is known of some regions, whatever memory and budget they have."""
        return TileCache(
            {place: one for place, one in self.sizes.items() if place[0] in names},
            {place: one for place, one in self.costs.items() if place[0] in names},
            cuts={place: one for place, one in self.cuts.items() if place[0] in names},
            tilings={place: one for place, one in self.tilings.items() if place[0][0] in names},
            ranked={place: list(one) for place, one in self.ranked.items() if place[0] in names},
            progress=progress,
        )

    def within(self, region: Region, in_place: frozenset[str], budget: int) -> Tiling | None:
        """The fastest tiling within a larger budget, where it is within this one too: then none here is faster."""
        found = self.ranked.get((region.name, in_place), ())
        return next((one for most, one in found if one.nbytes <= budget <= most), None)

    def may_ask(self, region: Region, size: Shape) -> bool:
        """Whether the target's functions have answered for a tile, or may be asked about one more."""
        return self.asked[region.name] < MOST_ASKED or (region.name, size) in self.costs

    def cost(self, region: Region, size: Shape, packs: bool, worth: Callable[[int], bool]) -> TileCost | int | None:
        """What the target's functions say of a tile; `packs` where its constants are copied. The engine's cycles where
        these are not `worth` more: then nothing is packed."""
        place = region.name, size
        kept = self.costs.get(place)
        if place not in self.costs:
            self.asked[region.name] += 1
            if self.asked[region.name] in (1, MOST_ASKED):
                more = "" if self.asked[region.name] == 1 else f": {MOST_ASKED} sizes tried, the best of them is taken"
                self.progress(f"planning tiles of {region.name}{more}")
        if place not in self.costs or (isinstance(kept, int) and worth(kept)):
            tile = self._tile[1] if self._tile[0] == place else first_part(region, size)
            self.costs[place] = _tile_cost(region, tile, packs, worth) if tile is not None else None
        return self.costs[place]


def evaluate(
    region: Region,
    target: Target,
    size: Shape,
    in_place: frozenset[str],
    buffers: int,
    known: TileCache,
    limits: tuple[int | None, int | None] = (None, None),
) -> Tiling | int | None:
    """Bytes and cycles of a tiling; None when the region cannot be cut like that, and only the least bytes it takes
    where these, or its cycles without those of its constants, are over the limits: then nothing is packed."""
    place = region.name, size, in_place, buffers
    if place not in known.cuts:
        launching = _launching(region, size)
        if limits[1] is not None and launching >= limits[1]:
            return None
        known.cuts[place] = _cut(region, target, size, in_place, buffers, known)
    if (cut := known.cuts[place]) is None:
        return None
    most_bytes, most = limits
    if most is not None and cut.launch * cut.tiles >= most:
        return None
    if (most_bytes is not None and cut.nbytes > most_bytes) or (most is not None and cut.least(0) >= most):
        return cut.nbytes
    first = known.cost(region, size, "" not in in_place, lambda own: most is None or cut.least(own) < most)
    if not isinstance(first, TileCost):
        return None if first is None else cut.nbytes
    order = region.choice.get(ORDER)
    if (place, order) not in known.tilings:
        known.tilings[place, order] = _tiling(region, target, cut, first)
    return known.tilings[place, order]


def _launching(region: Region, size: Shape) -> int:
    """Core cycles of starting all tiles of a size."""
    assert region.engine is not None
    tiles = prod(-(-total // step) for total, step in zip(box_shape(region.extent), size, strict=True))
    return 0 if region.engine.stream else LAUNCH_CYCLES * tiles


@dataclass(frozen=True)
class _TileCut:
    """A way of cutting a region, by the shapes of its tiles alone."""

    size: Shape
    in_place: frozenset[str]
    buffers: int
    """As in a `Tiling`."""
    dma: Dma | StreamDma | None
    launch: int
    """Core cycles of starting a tile."""
    spatial: int
    channel_cuts: int
    """Tiles of the same channels, and how often the channels are cut."""
    loads: int
    result: int
    """Bytes copied for a tile: of its operands, and of its result."""
    setups: int
    fetches: int
    """Transfers of operands and results, and the fewest of constants."""
    nbytes: int
    """Of engine memory without constants and working memory."""

    @property
    def tiles(self) -> int:
        """How many there are."""
        return self.spatial * self.channel_cuts

    def both(self, computing: int, copying: int) -> int:
        """Cycles of both, at the same time where there are buffers for that."""
        return max(computing, copying) if self.buffers > 1 else computing + copying

    def least(self, engine: int) -> int:
        """Cycles it takes at least, without those of constants, where the engine takes so many for a tile."""
        copying = dma_cycles(self.dma, self.loads * self.spatial + self.result * self.tiles, self.setups + self.fetches)
        return self.both((engine + self.launch) * self.tiles, copying) + dma_cycles(
            self.dma, self.loads + self.result, 1
        )


def _cut(
    region: Region, target: Target, size: Shape, in_place: frozenset[str], buffers: int, known: TileCache
) -> _TileCut | None:
    """What a cut takes by its shapes; None when the region cannot be cut like that."""
    assert region.offload is not None and region.engine is not None
    whole = region.graph.types[region.output].shape
    if size != whole and not region.offload.strided and not in_place.isdisjoint((*region.graph.inputs, region.output)):
        return None
    if (sizes := known.size(region, size)) is None:
        return None
    counts = [-(-total // step) for total, step in zip(box_shape(region.extent), size, strict=True)]
    spatial, channel_cuts = prod(counts[:-1]), counts[-1]
    tiles, launch = spatial * channel_cuts, 0 if region.engine.stream else LAUNCH_CYCLES
    loaded = [count for name, count in sizes.operands.items() if name not in in_place]
    loads, result = sum(loaded), 0 if region.output in in_place else sizes.result
    nbytes = loads * (buffers if spatial > 1 else 1) + result * (buffers if tiles > 1 else 1)
    setups, fetches = tiles * (bool(loaded) + bool(result)), channel_cuts if "" not in in_place else 0
    fetches = min(fetches, 1) if spatial == 1 and constants_room(target, region.engine) else fetches
    dma = target.dma_of(region.engine)
    return _TileCut(size, in_place, buffers, dma, launch, spatial, channel_cuts, loads, result, setups, fetches, nbytes)


def _tiling(region: Region, target: Target, cut: _TileCut, first: TileCost) -> Tiling | None:
    """A cut with what the target's functions say of a tile; None where the constants do not fit."""
    assert region.engine is not None
    packed, loads, result, tiles = first.packed, cut.loads, cut.result, cut.tiles
    room = constants_room(target, region.engine)
    constants = constants_in_copies(cut.dma, packed, (cut.spatial, cut.channel_cuts), cut.buffers, room)
    if constants is None:
        return None
    fetches = constants.copies if cut.fetches else 0
    nbytes = cut.nbytes + first.scratch + (0 if room else constants.held)
    channels_outer = outer_channels(loads, packed, cut.spatial, cut.channel_cuts)
    if ORDER in region.choice:
        channels_outer = region.choice[ORDER] == "channels"
    moved = loads * (tiles if channels_outer and cut.spatial > 1 else cut.spatial) + result * tiles
    fetched = packed * (cut.channel_cuts if channels_outer or cut.spatial == 1 else tiles)
    engine, ends = (first.cycles + cut.launch) * tiles, loads + result
    copying, moving = (
        dma_cycles(cut.dma, moved + fetched, cut.setups + fetches),
        dma_cycles(cut.dma, moved, cut.setups),
    )
    cycles = cut.both(engine, copying) + dma_cycles(cut.dma, ends + packed, 1)
    ready = cut.both(engine, moving) + dma_cycles(cut.dma, ends, 1 if ends else 0)
    times = (copying - moving, moving, ready, first.starting * tiles)
    return Tiling(cut.size, cut.in_place, nbytes, cycles, cut.buffers, channels_outer, constants.together, *times)


@dataclass(frozen=True, slots=True)
class CopiedConstants:
    """How the constants of a layer's tiles are copied to the engine."""

    together: int
    """Tiles whose constants one copy fetches."""
    copies: int
    """Copies for all channels once."""
    held: int
    """Bytes of the buffers they are copied into."""


def constants_in_copies(
    dma: Dma | StreamDma | None, packed: int, tiles: tuple[int, int], buffers: int, room: int
) -> CopiedConstants | None:
    """How constants are copied; None where an engine's own memory for them does not hold them.

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
    """For how many tiles one copy fetches the constants, where an engine has a memory of its own for them.

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


def _tile_size(region: Region, tile: Tile) -> TileSize:
    """What a tile takes by its shapes."""
    kinds, lies = tile.graph.types, region.layouts
    sizes = {name: nbytes(lies.get(name), kinds[name]) for name in (*tile.graph.inputs, region.output)}
    return TileSize({name: sizes[name] for name in tile.graph.inputs}, sizes[region.output])


def _tile_cost(region: Region, tile: Tile, packs: bool, worth: Callable[[int], bool]) -> TileCost | int | None:
    """What a tile needs, as `Known.cost`; None when the offload does not take it."""
    assert region.offload is not None
    try:
        tile, match = tile_match(region, tile.box, tile)
    except ValueError:
        return None
    with asking(f"the cycles of {region.offload.name} for {region.name}"):
        cycles, starting = region.offload.cycles(match), region.offload.starting(match)
    if not worth(cycles):
        return cycles
    made = packed_tile(region, tile, match, packs)
    return TileCost(packed_bytes(made.packed), made.scratch, cycles, starting)


def outer_channels(loads: int, packed: int, spatial: int, channel_cuts: int) -> bool:
    """True when looping over channels outside moves fewer bytes than looping over positions outside."""
    if spatial == 1 or channel_cuts == 1:
        return True
    return loads * spatial * channel_cuts + packed * channel_cuts <= loads * spatial + packed * spatial * channel_cuts


def complete(region: Region, tiling: Tiling, before: Tiling | None = None) -> Tiling:
    """The tiling with every one of its tiles; those of `before`, a complete tiling, where it is the same.

    Raises:
        PlanError: the engine takes the first tile and not another one, e.g. at an edge.
    """
    if before is not None and replace(before, tiles=()) == tiling:
        return before
    boxes = tile_boxes(region.extent, tiling.shape, tiling.channels_outer)
    try:
        tiles = tuple(packed_tiles(region, boxes))
    except ValueError as error:
        set_to = ", ".join(f"{name} = {value}" for name, value in region.choice.items()) or "the planner's own choice"
        raise PlanError(
            f"tiles of {'x'.join(map(str, tiling.shape))} do not fit {region.name} ({set_to}): {error}",
            where=", ".join(region.origins),
            hint="choose another tile, or let a Constraint of the offload (scope tiles) say what the "
            "engine does not take",
        ) from None
    return replace(tiling, tiles=tiles)


def tiles_ahead(buffers: int, parts: int, fetching: int, computing: int) -> int:
    """For how many tiles, of so many with constants of their own, these are fetched before the first is launched: for
    one less than there are buffers, so that the core launches soon; for all where each has a buffer and the DMA takes
    longer, as it would idle else. Cycles are those of all tiles."""
    return parts if parts <= buffers and fetching > computing else min(parts, max(buffers - 1, 1))


def constants_ahead(buffers: int, tiles: int, together: int, fetching: int, computing: int) -> int:
    """As `tiles_ahead`, for constants that one copy fetches for several tiles: with one buffer the next are fetched
    when the last tile that reads these has been launched."""
    copies = -(-tiles // together)
    return 1 if buffers == 1 < copies else together * tiles_ahead(buffers, copies, fetching, computing)


def first_tile(region: Region, tiling: Tiling) -> EngineTile:
    """The tile that is launched first; the region is one that can be cut like that."""
    return packed_tile(region, *tile_match(region, next(tile_boxes(region.extent, tiling.shape, True))))


def dma_cycles(dma: Dma | StreamDma | None, nbytes: int, transfers: int) -> int:
    """Cycles of so many transfers of so many bytes in all; 0 without a DMA."""
    if dma is None:
        return 0
    return transfers * dma.setup_cycles + -(-nbytes // dma.bytes_per_cycle)
