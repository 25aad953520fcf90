"""How layers one behind the other are cut, so that engine and DMA wait for each other least.

A layer whose constants are many begins with some of its channels while the rest is fetched; each further part is a
launch, and holds the DMA up for the layer behind, whose first constants are fetched early. What is best for one layer
depends on its neighbours: the chain is walked, launch by launch, for the ways each may be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dovetail.ir.types import box_shape
from dovetail.schedule.partition import Region
from dovetail.schedule.tiles.tile import BUFFERS, TILE, cuts
from dovetail.schedule.tiles.tiling import TileCache, TileCost, Tiling, evaluate, tiles_ahead
from dovetail.target.description import Target

WAKE_CYCLES = 26
"""How long after a transfer the core goes on that slept until then."""


@dataclass(frozen=True)
class ChainLink:
    """A layer of a chain, cut in one way. Times are cycles."""

    tiling: Tiling
    parts: int
    """How many, of its channels."""
    computing: int
    """Of the engine, for a part."""
    fetching: int
    """Of the DMA, for the constants of a part."""
    gap: int
    """The engine waits so long for its next launch."""
    start: int
    """From when constants have arrived to when the engine begins."""


def link(region: Region, tiling: Tiling, known: TileCache) -> ChainLink:
    """A region as it is cut."""
    assert region.engine is not None
    whole = box_shape(region.extent)
    parts = -(-whole[-1] // tiling.shape[-1])
    launching, wake = (0, 0) if region.engine.stream else (region.engine.launching, WAKE_CYCLES)
    cost, gap = known.costs.get((region.name, tiling.shape)), launching if region.engine.queue == 1 else 0
    computing = tiling.ready_cycles // parts
    if isinstance(cost, TileCost) and tiling.shape[:-1] == whole[:-1]:
        computing = max(cost.cycles, tiling.moving // parts)
    return ChainLink(tiling, parts, computing, tiling.fetching // parts, gap, launching + wake)


def ways(region: Region, target: Target, tiling: Tiling, budget: int, known: TileCache) -> Iterator[ChainLink]:
    """The ways a region may be cut: as it was chosen, and into fewer parts of its channels where these fit.

    Args:
        region: one whose constants are fetched early.
        target: the machine.
        tiling: chosen for it alone.
        budget: bytes of the engine's memory for its tiles.
        known: of the same region.
    """
    assert region.offload is not None
    yield link(region, tiling, known)
    whole = box_shape(region.extent)
    fixed = not tiling.fetching or not region.choice.keys().isdisjoint((*TILE, BUFFERS))
    for channels in () if fixed or tiling.shape[:-1] != whole[:-1] else cuts(whole[-1], region.offload.channel_step):
        if channels <= tiling.shape[-1]:
            break
        parts = -(-whole[-1] // channels)
        found = evaluate(region, target, (*whole[:-1], channels), tiling.in_place, min(parts, 2), known)
        if isinstance(found, Tiling) and found.nbytes <= budget:
            yield link(region, found, known)


@dataclass(frozen=True, slots=True)
class _ChainState:
    """Where a chain stands behind one of its layers. Times are since it began."""

    computed: int = 0
    """When the engine has ended."""
    copied: int = 0
    """When the DMA has."""
    launched: int = 0
    """When the last part was launched: the core goes on to the next layer."""
    asked: int = 0
    """When the DMA had been asked for the last constants: those of the layer behind are fetched then."""
    launches: int = 0
    link: ChainLink | None = None
    """How the layer is cut."""
    before: _ChainState | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """What makes one better: an early end, then a free DMA, then few launches."""
        return self.computed, self.copied, self.launches


def _behind(before: _ChainState, layer: ChainLink) -> _ChainState:
    """The chain with one more layer."""
    copied, arrived = max(before.copied, before.asked), list[int]()
    computed, launched, asked = before.computed, before.launched, before.launched
    tiling = layer.tiling
    for _ in range(tiles_ahead(tiling.buffers, layer.parts, tiling.fetching, tiling.ready_cycles)):
        arrived.append(copied := copied + layer.fetching)
    for part in range(layer.parts):
        launched = max(computed + layer.gap, arrived[part] + layer.start)
        computed = launched + layer.computing
        if len(arrived) < layer.parts:
            asked = launched
            arrived.append(copied := max(copied, launched) + layer.fetching)
    return _ChainState(computed, copied, launched, asked, before.launches + layer.parts, layer, before)


def end_of(links: Sequence[ChainLink]) -> int:
    """When layers cut in these ways have ended."""
    clock = _ChainState()
    for layer in links:
        clock = _behind(clock, layer)
    return clock.computed


_KEPT = 8
"""Ways of cutting the layers so far that are followed."""


def quickest(layers: Sequence[Sequence[ChainLink]]) -> list[ChainLink]:
    """The ways of cutting a chain's layers that end first, of those that are followed: all with an early end that no
    other beats with a DMA that is free as early."""
    clocks = [_ChainState()]
    for options in layers:
        made = sorted((_behind(clock, layer) for clock in clocks for layer in options), key=lambda one: one.order)
        clocks = [made[0]]
        for one in made[1:]:
            if one.copied < clocks[-1].copied and len(clocks) < _KEPT:
                clocks.append(one)
    found, clock = list[ChainLink](), clocks[0]
    while clock.link is not None and clock.before is not None:
        found.append(clock.link)
        clock = clock.before
    return found[::-1]
