"""Chains: layers one behind the other, cut so that engine and DMA wait for each other least.

A layer whose constants are many begins with some of its channels while the rest is fetched; each further part is a
launch, and holds the DMA up for the layer behind, whose first constants are fetched early. What is best for one layer
depends on its neighbours: the chain is walked, launch by launch, for the ways each may be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dovetail.ir.types import box_shape
from dovetail.schedule.region import EnginePart
from dovetail.schedule.tiles.tile import BUFFERS, TILE, cuts, tile_counts
from dovetail.schedule.tiles.tiling import PartTiles, Tiling
from dovetail.target.description import Target
from dovetail.timing.layer import tiles_ahead


@dataclass(frozen=True)
class ChainLink:
    """A layer of a chain, cut in one way. Times are cycles."""

    tiling: Tiling
    parts: int
    """Number of parts its channels are cut into."""
    computing: int
    """The engine computes a part."""
    fetching: int
    """The DMA fetches the constants of a part."""
    gap: int
    """The engine waits for its next launch."""
    start: int
    """From when constants have arrived to when the engine begins."""


def link(part: EnginePart, tiling: Tiling, target: Target) -> ChainLink:
    """A layer cut as a tiling says."""
    engine, whole = part.engine, box_shape(part.extent)
    count = tile_counts(part.extent, tiling.shape)[-1]
    launching, wake = (0, 0) if engine.stream else (engine.launching, target.core.statements.wake)
    cuts_channels_only = tiling.shape[:-1] == whole[:-1]
    computing = (
        max(tiling.computing, tiling.estimate.moving // count) if cuts_channels_only else tiling.ready_cycles // count
    )
    gap = launching if engine.queue == 1 else 0
    return ChainLink(tiling, count, computing, tiling.estimate.fetching // count, gap, launching + wake)


_MOST_PARTS = 16
"""Parts of its channels a layer of a chain is cut into."""


def ways(tiles: PartTiles, tiling: Tiling, budget: int) -> Iterator[ChainLink]:
    """The ways a layer may be cut: as it was chosen, and into other parts of its channels where these fit.

    Args:
        tiles: of a part whose constants are fetched early.
        tiling: chosen for it alone.
        budget: bytes of the engine's memory for its tiles.
    """
    part = tiles.part
    yield link(part, tiling, tiles.target)
    *rest, total = box_shape(part.extent)
    is_set = not part.choice.keys().isdisjoint((*TILE, BUFFERS))
    if is_set or not tiling.estimate.fetching or tiling.shape[:-1] != tuple(rest):
        return
    for channels in cuts(total, part.offload.channel_step):
        count = -(-total // channels)
        if channels == tiling.shape[-1] or count > _MOST_PARTS:
            continue
        other = tiles.evaluate((*rest, channels), tiling.in_place, min(count, 2), budget)
        if isinstance(other, Tiling):
            yield link(part, tiles.deepened(other, budget), tiles.target)


@dataclass(frozen=True, slots=True)
class ChainState:
    """State of a chain after one of its layers. Times are cycles since the chain began."""

    computed: int = 0
    """The engine has ended."""
    copied: int = 0
    """The DMA has ended."""
    launched: int = 0
    """The last part was launched: the core goes on to the next layer."""
    asked: int = 0
    """The DMA was asked for the last constants: those of the layer behind are fetched then."""
    launches: int = 0
    link: ChainLink | None = None
    """The layer."""
    before: ChainState | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: end of the engine, then of the DMA, then number of launches."""
        return self.computed, self.copied, self.launches


def behind(before: ChainState, layer: ChainLink) -> ChainState:
    """The chain with one more layer."""
    copied, arrived = max(before.copied, before.asked), list[int]()
    computed, launched, asked = before.computed, before.launched, before.launched
    tiling = layer.tiling
    for _ in range(tiles_ahead(tiling.buffers, layer.parts, tiling.estimate.fetching, tiling.estimate.engine)):
        arrived.append(copied := copied + layer.fetching)
    for part in range(layer.parts):
        launched = max(computed + layer.gap, arrived[part] + layer.start)
        computed = launched + layer.computing
        if len(arrived) < layer.parts:
            asked = launched
            arrived.append(copied := max(copied, launched) + layer.fetching)
    return ChainState(computed, copied, launched, asked, before.launches + layer.parts, layer, before)


_KEPT = 8
"""Number of ways of cutting the layers so far that are kept."""


def quickest(layers: Sequence[Sequence[ChainLink]]) -> list[ChainLink]:
    """The way of cutting each layer of a chain with which the chain ends first.

    A longer chain is only made of ways that none beats with both an earlier end and a DMA that is free earlier.
    """
    states = [ChainState()]
    for options in layers:
        first, *rest = sorted((behind(one, layer) for one in states for layer in options), key=lambda one: one.order)
        states = [first]
        for one in rest:
            if one.copied < states[-1].copied and len(states) < _KEPT:
                states.append(one)
    links, state = list[ChainLink](), states[0]
    while state.link is not None and state.before is not None:
        links.append(state.link)
        state = state.before
    return links[::-1]
