"""Chooses how a region is cut: the tile that fits the engine's memory and keeps engine and DMA busiest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod

from dovetail.errors import PlanError
from dovetail.ir.crop import Tile, crop
from dovetail.ir.layout import check_part, nbytes
from dovetail.ir.types import Array, Box, Shape, TensorType, box_shape, full_box
from dovetail.schedule import shipped
from dovetail.schedule.partition import Region
from dovetail.target.chip import Dma
from dovetail.target.description import Target
from dovetail.target.engine import StreamDma
from dovetail.target.pattern import Choice, Match, Scope, match_again, match_pattern
from dovetail.user_file import asking

PLACEMENT, EARLY, ORDER, BUFFERS = "placement", "early", "order", "buffers"
"""Names of the planner's knobs; the sizes of a tile are `TILE`."""
TILE = ("tile_rows", "tile_columns", "tile_channels")
"""Names of the knobs for the rows, columns and channels of a tile's result."""

LAUNCH_CYCLES = 150
"""Core cycles a tile costs for programming the engine and the DMA; an estimate, used to rank tilings only."""

PACK_ALIGNMENT = 16
"""Bytes every packed constant of a tile is aligned to."""

_MOST_CUTS = 64
MOST_ASKED = 2000
"""Tile shapes of a region the target's functions are asked about; then the best one found is taken."""
_FINEST = 4
"""Channels may be cut this many times finer than the engine's own step where nothing else fits."""


@dataclass(frozen=True)
class EngineTile:
    """A tile with everything a launch of it needs."""

    tile: Tile
    match: Match
    packed: Mapping[str, Array]
    scratch: int
    """Bytes of working memory."""


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
class Known:
    """The first tile of each size, by region and result shape; None where the region cannot be cut like that. Kept
    through the rounds of planning, since the target's functions may take long."""

    sizes: dict[tuple[str, Shape], TileSize | None] = field(default_factory=dict)
    costs: dict[tuple[str, Shape], TileCost | int | None] = field(default_factory=dict)
    """The engine's cycles alone where these rule the size out."""
    asked: Counter[str] = field(default_factory=Counter)
    """Tiles of each region the target's functions were asked about."""
    cuts: dict[_Place, _Cut | None] = field(default_factory=dict)
    tilings: dict[tuple[_Place, object], Tiling | None] = field(default_factory=dict)
    """By how the region is cut, and the order chosen for it."""
    chosen: dict[tuple[str, frozenset[str], frozenset[str], int], Tiling] = field(default_factory=dict)
    """By region, its ends in the engine's memory, what is reached where it lies, and budget."""
    ranked: dict[tuple[str, frozenset[str]], list[tuple[int, Tiling]]] = field(default_factory=dict)
    """By region and what is reached where it lies: the fastest within a budget, by the formula."""
    shipped: dict[tuple[str, frozenset[str]], shipped.Entry | None] = field(default_factory=dict)
    """What the table that comes with the package has, by region and its ends in the engine's memory."""
    progress: Callable[[str], None] = lambda text: None
    """Told which region they are asked about, and where `MOST_ASKED` is reached."""
    _tile: tuple[tuple[str, Shape], Tile | None] = (("", ()), None)
    """The tile that was cut last, and which it is."""

    def size(self, region: Region, size: Shape) -> TileSize | None:
        """What a tile takes by its shapes."""
        if (place := (region.name, size)) not in self.sizes:
            tile = _first_part(region, size)
            self.sizes[place], self._tile = _tile_size(region, tile) if tile else None, (place, tile)
        return self.sizes[place]

    def of(self, names: Collection[str], progress: Callable[[str], None] = lambda text: None) -> Known:
        """What is known of some regions, whatever memory and budget they have."""
        return Known(
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
            tile = self._tile[1] if self._tile[0] == place else _first_part(region, size)
            self.costs[place] = _tile_cost(region, tile, packs, worth) if tile is not None else None
        return self.costs[place]


def choose_tiling(
    region: Region, target: Target, homes: Mapping[str, str], budget: int, known: Known | None = None
) -> Tiling:
    """The fastest tiling whose buffers fit `budget` bytes of the engine's memory, as tuning found it or as the formula
    ranks them.

    Args:
        region: one with an engine, or one of its parts.
        target: the machine.
        homes: memory each value lies in.
        budget: bytes of the engine's memory free for tiles.
        known: of the same regions, from other homes and budgets; what is found is added.

    Raises:
        PlanError: even the smallest tile is too large (says how many bytes are missing), or what was chosen for the
            region's knobs is; names the knobs.
    """
    known, in_place = known or Known(), _in_place(region, target, homes)
    place = region.name, _near(region, homes), in_place, budget
    if place not in known.chosen:
        found = known.within(region, in_place, budget)
        if found is None:
            found = _ranked(region, target, in_place, budget, known)
            known.ranked.setdefault((region.name, in_place), []).append((budget, found))
        tuned = _tuned(region, target, place[1], in_place, known)
        if tuned is not None and tuned.nbytes <= budget:  # it was measured to be faster, whatever the formula thinks
            cycles, ready = min(found.cycles, tuned.cycles), min(found.ready_cycles, tuned.ready_cycles)
            found = replace(tuned, cycles=cycles, ready_cycles=ready)
        known.chosen[place] = found
    return known.chosen[place]


def _near(region: Region, homes: Mapping[str, str]) -> frozenset[str]:
    """Its ends that lie in the engine's memory."""
    assert region.engine is not None
    ends = (*region.graph.inputs, *region.graph.outputs)
    return frozenset(name for name in ends if homes.get(name) == region.engine.memory)


def _in_place(region: Region, target: Target, homes: Mapping[str, str]) -> frozenset[str]:
    """As `Tiling.in_place`."""
    assert region.engine is not None
    values = (*region.graph.inputs, region.output)
    found = frozenset(n for n in values if homes[n] == region.engine.memory and n not in region.converted)
    return found | {""} if target.reads_constants(region.engine) else found


def _ranked(region: Region, target: Target, in_place: frozenset[str], budget: int, known: Known) -> Tiling:
    """The tiling the formula thinks fastest; errors as those of `choose_tiling`."""
    shape = box_shape(region.extent)
    if in_place == {*region.graph.inputs, region.output, ""}:  # nothing is copied: a cut could only save working memory
        whole = _evaluate(region, target, shape, in_place, 1, known)
        if isinstance(whole, Tiling) and whole.nbytes <= max(budget, 0):
            return whole
    best: Tiling | None = None
    larger: list[tuple[int, Shape, int]] = []
    counts = (int(region.choice[BUFFERS]),) if BUFFERS in region.choice else (2, 1)
    for finer in (1, _FINEST):
        for size, buffers in product(_candidates(region, shape, finer), counts):
            if known.asked[region.name] >= MOST_ASKED and (region.name, size) not in known.costs:
                continue
            limits = (budget, best.cycles if best else None)
            tiling = _evaluate(region, target, size, in_place, buffers, known, limits)
            if not isinstance(tiling, Tiling):
                larger += [(tiling, size, buffers)] if tiling is not None else []
            elif tiling.nbytes > budget:
                larger.append((tiling.nbytes, size, buffers))
            elif best is None or tiling.cycles < best.cycles:
                best = tiling
        if best is not None:
            return _never_idle(region, target, best, budget, known)
    exact = (_evaluate(region, target, size, in_place, buffers, known) for _, size, buffers in sorted(larger))
    smallest = min((one for one in islice(exact, _SHOWN) if isinstance(one, Tiling)), key=_nbytes, default=None)
    raise _too_large(region, (smallest.nbytes, smallest.shape) if smallest else None, budget)


def _tuned(
    region: Region, target: Target, near: frozenset[str], in_place: frozenset[str], known: Known
) -> Tiling | None:
    """The tiling that tuning found for such a region; None where there is none, a knob of the tiles is set, or the
    engine does not take one of the tiles."""
    assert region.engine is not None
    whole = full_box(region.graph.types[region.output].shape)
    if region.extent != whole or not region.choice.keys().isdisjoint((*TILE, BUFFERS, ORDER)):
        return None
    place = region.name, near
    if place not in known.shipped:
        entry = shipped.found(target, region.graph, near)
        known.shipped[place] = entry if entry and _is_possible(region, entry.shape) else None
    if (entry := known.shipped[place]) is None:
        return None
    ordered = replace(region, choice={**region.choice, ORDER: "channels" if entry.channels_outer else "positions"})
    tiling = _evaluate(ordered, target, entry.shape, in_place, entry.buffers, known)
    return tiling if isinstance(tiling, Tiling) else None


def _is_possible(region: Region, size: Shape) -> bool:
    """Whether the engine takes every kind of tile of a size."""
    shape = region.graph.types[region.output].shape
    if len(size) != len(shape) or not all(0 < part <= total for part, total in zip(size, shape, strict=True)):
        return False
    try:
        for box, _ in tile_classes(shape, size):
            tile_match(region, box)
    except ValueError:
        return False
    return True


_SHOWN = 16
"""Of the sizes that are too large by their shapes alone, how many are looked at for the error."""


def _nbytes(tiling: Tiling) -> int:
    return tiling.nbytes


def _never_idle(region: Region, target: Target, best: Tiling, budget: int, known: Known) -> Tiling:
    """The tiling with three buffers where it is the DMA that takes longest, with constants for several tiles: with two
    it idles between a transfer's end and the start of the next."""
    channel_cuts = -(-box_shape(region.extent)[-1] // best.shape[-1])
    if best.buffers != 2 or BUFFERS in region.choice or channel_cuts < 3 or not _dma_bound(best, region, known):
        return best
    deeper = _evaluate(region, target, best.shape, best.in_place, 3, known)
    return deeper if isinstance(deeper, Tiling) and deeper.nbytes <= budget else best


def _dma_bound(tiling: Tiling, region: Region, known: Known) -> bool:
    """Whether the DMA is busy longer than the engine computes."""
    first, sizes = (
        known.costs.get((region.name, tiling.shape)),
        zip(box_shape(region.extent), tiling.shape, strict=True),
    )
    return isinstance(first, TileCost) and tiling.fetching + tiling.moving > first.cycles * prod(
        -(-a // b) for a, b in sizes
    )


def _too_large(region: Region, smallest: tuple[int, Shape] | None, budget: int) -> PlanError:
    """The error of a region without a tile that fits, or of chosen knobs that leave none; `smallest` is the bytes and
    shape of the smallest tile, None when the engine takes none."""
    assert region.engine is not None
    engine, memory, where = region.engine, region.engine.memory, ", ".join(region.origins)
    needed, shape = (smallest[0], "x".join(map(str, smallest[1]))) if smallest else (0, "")
    if not region.choice.keys().isdisjoint((*TILE, BUFFERS)):
        set_to = ", ".join(f"{name} = {value}" for name, value in region.choice.items())
        what = f"no tile of {region.name} with {set_to} is one {engine.name} can compute"
        if smallest:
            what = (
                f"with {set_to} a tile of {region.name}, {shape}, needs {needed} bytes of {memory}; {budget} are free"
            )
        return PlanError(what, where=where, hint="leave this layer out of the tuning file, or tune again")
    held = f", with constants that fit {engine.constants}" if engine.constants else ""
    what = f"no tile of {region.name} is one {engine.name} can compute{held}"
    if smallest:
        what = f"the smallest tile of {region.name}, {shape}, needs {needed} bytes of {memory}; {budget} are free"
    larger = f"a {memory} larger by {needed - budget} bytes, or " if smallest else ""
    return PlanError(what, where=where, hint=f"{larger}fewer channels in this layer")


def tile_boxes(extent: Box, size: Shape, channels_outer: bool) -> Iterator[Box]:
    """The tiles of a box of a result, channels outermost or innermost."""
    spans = [
        [(start, min(start + step, end)) for start in range(begin, end, step)]
        for (begin, end), step in zip(extent, size, strict=True)
    ]
    if channels_outer:
        for last, *rest in product(spans[-1], *spans[:-1]):
            yield (*rest, last)
    else:
        yield from product(*spans)


def tile_classes(shape: Shape, size: Shape) -> Iterator[tuple[Box, int]]:
    """The kinds of tile there are (first, middle and last along each axis), and how many of each.

    Args:
        shape: the result.
        size: a whole tile.

    Yields:
        The box of one tile of the kind, and the number of such tiles.
    """
    axes = []
    for total, step in zip(shape, size, strict=True):
        count = -(-total // step)
        kinds = [((0, min(step, total)), 1), ((step, 2 * step), count - 2), (((count - 1) * step, total), 1)]
        axes.append([kinds[0], *([kinds[1]] if count > 2 else []), *([kinds[2]] if count > 1 else [])])
    for parts in product(*axes):
        yield tuple(span for span, _ in parts), prod(times for _, times in parts)


def _candidates(region: Region, shape: Shape, finer: int) -> Iterator[Shape]:
    """Tile sizes worth trying: whole, then ever smaller cuts of rows, columns and channels at the engine's steps."""
    assert region.offload is not None
    image, choice = len(shape) == 4, region.choice
    rows, columns = (cuts(shape[axis], region.offload.row_step) if image else [0] for axis in (1, 2))
    channels = cuts(shape[-1], max(1, region.offload.channel_step // finer))
    sizes = zip(TILE, (rows, columns, channels), strict=True)
    axes = ([int(choice[knob])] if knob in choice else tried for knob, tried in sizes)
    for row, column, channel in product(*axes):
        slow = image and column != shape[2] and row > region.offload.row_step * 4
        if slow and choice.keys().isdisjoint(TILE):
            continue
        yield (shape[0], row, column, channel) if image else (*shape[:-1], channel)


def cuts(total: int, step: int) -> list[int]:
    """Sizes that cut `total` into 1, 2, 3, … nearly equal parts at multiples of `step`."""
    sizes = {total: None}
    parts = 2
    while parts <= _MOST_CUTS:
        size = -(-total // parts)
        size = -(-size // step) * step
        if size < total:
            sizes[size] = None
        if size <= step:
            break
        parts += 1 if parts < 8 else parts // 4
    return list(sizes)


def _evaluate(
    region: Region,
    target: Target,
    size: Shape,
    in_place: frozenset[str],
    buffers: int,
    known: Known,
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
class _Cut:
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
    """Transfers of operands and results, and of constants."""
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
    region: Region, target: Target, size: Shape, in_place: frozenset[str], buffers: int, known: Known
) -> _Cut | None:
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
    dma = target.dma_of(region.engine)
    return _Cut(size, in_place, buffers, dma, launch, spatial, channel_cuts, loads, result, setups, fetches, nbytes)


def _tiling(region: Region, target: Target, cut: _Cut, first: TileCost) -> Tiling | None:
    """A cut with what the target's functions say of a tile; None where the constants do not fit."""
    assert region.engine is not None
    packed, loads, result, tiles = first.packed, cut.loads, cut.result, cut.tiles
    held = packed * (cut.buffers if cut.channel_cuts > 1 else 1)
    apart = region.engine.constants not in ("", region.engine.memory)
    if apart and held > target.memory(region.engine.constants).size:
        return None
    nbytes = cut.nbytes + first.scratch + (0 if apart else held)
    channels_outer = outer_channels(loads, packed, cut.spatial, cut.channel_cuts)
    if ORDER in region.choice:
        channels_outer = region.choice[ORDER] == "channels"
    moved = loads * (tiles if channels_outer and cut.spatial > 1 else cut.spatial) + result * tiles
    fetched = packed * (cut.channel_cuts if channels_outer or cut.spatial == 1 else tiles)
    engine, ends = (first.cycles + cut.launch) * tiles, loads + result
    copying, moving = (
        dma_cycles(cut.dma, moved + fetched, cut.setups + cut.fetches),
        dma_cycles(cut.dma, moved, cut.setups),
    )
    cycles = cut.both(engine, copying) + dma_cycles(cut.dma, ends + packed, 1)
    ready = cut.both(engine, moving) + dma_cycles(cut.dma, ends, 1 if ends else 0)
    times = (copying - moving, moving, ready, first.starting * tiles)
    return Tiling(cut.size, cut.in_place, nbytes, cycles, cut.buffers, channels_outer, *times)


def _first_part(region: Region, size: Shape) -> Tile | None:
    """The first tile of a size; None when the region cannot be cut like that."""
    try:
        return _laid_part(region, next(tile_boxes(region.extent, size, True)))
    except ValueError:
        return None


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
    made = _packed_tile(region, tile, match, packs)
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
        tiles = tuple(_packed_tile(region, *tile_match(region, box)) for box in boxes)
    except ValueError as error:
        set_to = ", ".join(f"{name} = {value}" for name, value in region.choice.items()) or "the planner's own choice"
        raise PlanError(
            f"tiles of {'x'.join(map(str, tiling.shape))} do not fit {region.name} ({set_to}): {error}",
            where=", ".join(region.origins),
            hint="choose another tile, or let a Constraint of the offload (scope tiles) say what the "
            "engine does not take",
        ) from None
    return replace(tiling, tiles=tiles)


def first_tile(region: Region, tiling: Tiling) -> EngineTile:
    """The tile that is launched first; the region is one that can be cut like that."""
    return _packed_tile(region, *tile_match(region, next(tile_boxes(region.extent, tiling.shape, True))))


def packed_bytes(packed: Mapping[str, Array]) -> int:
    """Bytes of the packed constants side by side, each aligned to `PACK_ALIGNMENT`."""
    return sum(-(-array.nbytes // PACK_ALIGNMENT) * PACK_ALIGNMENT for array in packed.values())


def tile_match(region: Region, box: Box, tile: Tile | None = None) -> tuple[Tile, Match]:
    """A tile and the match of its offload in it, with the region's choice; `tile` where it has been cut before.

    Raises:
        ValueError: the region cannot be cut like that, or the offload does not take the tile; says why.
    """
    assert region.offload is not None
    tile, offload = tile or _laid_part(region, box), region.offload
    again = match_again(region.match, tile.graph) if region.match is not None else None
    match = again or match_pattern(offload.pattern, tile.graph, tile.graph.outputs[0])
    if not isinstance(match, Match):
        raise ValueError(match.sentence)
    match = replace(match, choice=offload_choice(region, match))
    for constraint in offload.constraints:
        with asking(f"the limit '{constraint.sentence}' of {offload.name} for {region.name}"):
            failure = constraint.failure(match) if constraint.scope is not Scope.LAYERS else None
        if failure:
            raise ValueError(failure)
    return tile, match


def _laid_part(region: Region, box: Box) -> Tile:
    """The computation of a box of the result, of whole blocks of every value; raises ValueError where it cannot be."""
    tile = _part(region, box)
    for value, part in (*tile.reads.items(), (region.output, box)):
        check_part(region.layouts.get(value), part, region.graph.types[value].shape)
    return tile


def _part(region: Region, box: Box) -> Tile:
    """The computation of a box of the result. What takes no strides is given whole operands: of the last rows too that
    a strided window does not reach. So is what cannot be cut, as several results of one launch."""
    is_whole = box == full_box(region.graph.types[region.output].shape)
    if region.takes_strides or not is_whole:
        try:
            return _whole_blocks(region, crop(region.graph, box))
        except ValueError:
            if not is_whole:
                raise
    return Tile(region.graph, box, {name: full_box(region.graph.types[name].shape) for name in region.graph.inputs})


def _whole_blocks(region: Region, tile: Tile) -> Tile:
    """The tile with operands up to the end of a block, where it computes the same from them: a strided window need not
    reach it."""
    types, reads = dict(tile.graph.types), dict(tile.reads)
    for name, layout in ((name, region.layouts[name]) for name in tile.reads if name in region.layouts):
        ends = zip(tile.reads[name], region.graph.types[name].shape, strict=True)
        reads[name] = tuple(
            (start, min(stop + -stop % layout.block(axis), size)) for axis, ((start, stop), size) in enumerate(ends)
        )
        types[name] = TensorType(box_shape(reads[name]), types[name].dtype)
    if reads == tile.reads:
        return tile
    for node in tile.graph.nodes:
        types[node.output] = node.operator.infer([types[name] for name in node.inputs])
    same = types[region.output] == tile.graph.types[region.output]
    return Tile(replace(tile.graph, types=types), tile.box, reads) if same else tile


def offload_choice(region: Region, match: Match) -> Choice:
    """Settings of the offload's own knobs: its default's, and over them those chosen for the region."""
    assert region.offload is not None
    if region.offload.knobs is None:
        return {}
    default = region.offload.default(match) if region.offload.default else {}
    planner = (PLACEMENT, EARLY, ORDER, BUFFERS, *TILE)
    return {**default, **{name: value for name, value in region.choice.items() if name not in planner}}


def _packed_tile(region: Region, tile: Tile, match: Match, packs: bool = True) -> EngineTile:
    assert region.offload is not None
    with asking(f"the packed constants and scratch of {region.offload.name} for {region.name}"):
        packed = region.offload.pack(match) if packs else {}
        return EngineTile(tile, match, packed, region.offload.scratch(match))


def dma_cycles(dma: Dma | StreamDma | None, nbytes: int, transfers: int) -> int:
    """Cycles of so many transfers of so many bytes in all; 0 without a DMA."""
    if dma is None:
        return 0
    return transfers * dma.setup_cycles + -(-nbytes // dma.bytes_per_cycle)
