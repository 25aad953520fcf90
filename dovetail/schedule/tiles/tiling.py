"""Tilings: how an engine's part of a region is cut, the engine memory that takes, and its cycles by the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod

from dovetail.errors import PlanError
from dovetail.ir.types import Shape
from dovetail.records import Record
from dovetail.schedule.region import EnginePart
from dovetail.schedule.tiles.clock import Estimate, PartClock, TileCut
from dovetail.schedule.tiles.tile import (
    BUFFERS,
    ORDER,
    EngineTile,
    packed_tile,
    packed_tiles,
    tile_boxes,
    tile_counts,
    tile_match,
)
from dovetail.target.description import Target
from dovetail.target.pattern import Value
from dovetail.timing.clock import start_cycles

Progress = Callable[[str], None]
"""Told what is being done now."""
TilesAsked = tuple[frozenset[str], bool]
"""The values that are reached where they lie, and whether tiles may be far smaller than the engine's steps."""
MOST_ASKED = 2000
"""Tile shapes of a part the target's functions are asked about; then the best one so far is taken."""


@dataclass(frozen=True)
class Tiling(TileCut):
    """A way of cutting a part, the order of its tiles decided, and its costs."""

    estimate: Estimate = field(kw_only=True)
    """The part by itself."""
    computing: int = 0
    """Engine cycles of a whole tile."""
    ready_cycles: int = 0
    """Cycles from when the constants are there, as they are where they are fetched early."""
    rank: int = 0
    """Cycles by the clock, and those in which the core starts tiles beyond what the DMA takes: it is wanted
    elsewhere."""


@dataclass(frozen=True)
class CompleteTiling(Tiling):
    """A tiling with its tiles."""

    tiles: tuple[EngineTile, ...] = ()
    """In the order they are launched."""


class TooLarge(Record):
    """The outcome for a cut whose tiles do not fit the budget."""

    nbytes: int
    """Bytes of engine memory it takes, at least."""


class PartTiles:
    """The ways of cutting one engine's part. Answers are kept, since the target's functions may take long."""

    def __init__(self, part: EnginePart, target: Target, progress: Progress = lambda text: None) -> None:
        """`progress` is told when the target's functions are asked for the first time, and when `MOST_ASKED` is
        reached."""
        self.part, self.target, self.progress, self.clock = part, target, progress, PartClock(part, target)
        self.ends = frozenset({*part.graph.inputs, part.output})
        self.starting = 0 if part.engine.stream else start_cycles(part.engine, target.core.statements)
        """Cycles of the core for starting a tile."""
        self.asked = 0
        """Tiles the target's functions were asked about."""
        self.answered: set[Shape] = set()
        self.ranked: dict[TilesAsked, list[tuple[int, Tiling]]] = {}
        """The fastest within each budget."""
        self.timed, self.alike = cache(self._timed), cache(partial(self.clock.estimate, alike=True))

    def is_of(self, part: EnginePart) -> bool:
        """Whether answers for a part hold: it is the same one, perhaps as another stage has it."""
        own = self.part
        same = own.graph is part.graph and own.engine is part.engine and own.offload is part.offload
        return same and (own.layouts, own.choice, own.extent) == (part.layouts, part.choice, part.extent)

    def within(self, asked: TilesAsked, budget: int) -> Tiling | None:
        """The fastest tiling within a larger budget, where it is within this one too: then none here is faster."""
        ranked = self.ranked.get(asked, ())
        return next((tiling for most, tiling in ranked if tiling.estimate.nbytes <= budget <= most), None)

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
    ) -> Tiling | TooLarge | None:
        """Bytes and cycles of a cut, all tiles thought to be alike; None for one that the engine does not compute, or
        that is slower than another. The target's functions are asked only where the shapes leave it a chance.

        Args:
            size: result shape of a whole tile.
            in_place: as in a `Tiling`.
            buffers: per operand that changes from tile to tile.
            budget: bytes of engine memory it may take; None for any.
            rival: rank of another tiling, which it has to beat; None for none.
            order: of the loop over tiles; None for the one chosen for the part, or the one that moves fewest bytes.
        """
        part, clock = self.part, self.clock
        *rest, channel_cuts = tile_counts(part.extent, size)
        tiles = prod(rest) * channel_cuts
        starts = self.starting * tiles
        if rival is not None and starts >= rival:
            return None
        is_cut_in_place = size != part.shape and not part.offload.strided and not in_place.isdisjoint(self.ends)
        if is_cut_in_place or (sizes := clock.sizes(size)) is None:
            return None
        loads = sum(sizes[name] for name in part.graph.inputs if name not in in_place)
        held = loads * (buffers if prod(rest) > 1 else 1)
        held += 0 if part.output in in_place else sizes[part.output] * (buffers if tiles > 1 else 1)
        if budget is not None and held > budget:
            return TooLarge(held)
        order = order or part.choice.get(ORDER)
        cut = TileCut(size, in_place, buffers, None if order is None else order == "channels")
        self._ask(size)
        try:
            if rival is not None and clock.computing(cut) * tiles + starts >= rival:
                return None
            first = clock.first(cut)
        except ValueError:
            return None
        if rival is not None and clock.copying(cut, first) >= rival:
            return None
        if (memory := clock.held(cut)) is None:  # its constants do not fit, perhaps only those of two tiles at once
            return TooLarge(held)
        if budget is not None and memory[1] > budget:
            return TooLarge(memory[1])
        estimate = self.alike(cut)
        assert estimate is not None
        longest = max(estimate.engine, estimate.copying)
        rank = estimate.cycles + max(estimate.engine + starts, estimate.copying) - longest
        outer = estimate.channels_outer
        if not clock.takes(cut):
            return None
        return Tiling(size, in_place, buffers, outer, estimate=estimate, computing=first.engine, rank=rank)

    def deepened(self, best: Tiling, budget: int) -> Tiling:
        """A tiling with three buffers where it is the DMA that takes longest, with constants for several tiles: with
        two it idles between a transfer's end and the start of the next."""
        if best.buffers != 2 or BUFFERS in self.part.choice:
            return best
        is_dma_bound = best.estimate.copying > best.estimate.engine
        if tile_counts(self.part.extent, best.shape)[-1] < 3 or not is_dma_bound:
            return best
        order = "channels" if best.channels_outer else "positions"
        deeper = self.evaluate(best.shape, best.in_place, 3, budget, order=order)
        return deeper if isinstance(deeper, Tiling) else best

    def _timed(self, tiling: Tiling) -> Tiling:
        """A tiling with the cycles of every kind of its tiles; of the first where the engine does not take one of
        them."""
        try:
            whole, ready = (self.clock.estimate(tiling, ready=ready) for ready in (False, True))
        except ValueError:
            whole, ready = (self.clock.estimate(tiling, alike=True, ready=ready) for ready in (False, True))
        assert whole is not None and ready is not None
        return replace(tiling, estimate=whole, ready_cycles=ready.cycles)

    def _ask(self, size: Shape) -> None:
        """Count a tile that the target's functions are asked about."""
        if size in self.answered:
            return
        self.asked += 1
        self.answered.add(size)
        if self.asked in (1, MOST_ASKED):
            more = "" if self.asked == 1 else f": {MOST_ASKED} sizes tried, the best of them is taken"
            self.progress(f"planning tiles of {self.part.name}{more}")


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


def complete(part: EnginePart, tiling: Tiling, before: CompleteTiling | None = None) -> CompleteTiling:
    """The tiling with its tiles; `before`, the one of an earlier round, where it is the same.

    Raises:
        PlanError: the engine takes the first tile and not another one, e.g. at an edge.
    """
    if before is not None and CompleteTiling(**vars(tiling), tiles=before.tiles) == before:
        return before
    boxes = tile_boxes(part.extent, tiling.shape, bool(tiling.channels_outer))
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


def first_constants(part: EnginePart, tiling: Tiling) -> tuple[bytes, ...]:
    """The packed constants of the tile that is launched first; the part is one that can be cut like that."""
    box = next(tile_boxes(part.extent, tiling.shape, True))
    return tuple(array.tobytes() for array in packed_tile(part, *tile_match(part, box)).packed.values())
