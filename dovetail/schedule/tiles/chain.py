"""Chains: layers one behind the other, cut so that engine and DMA wait for each other least.

A layer whose constants are many begins with some of its channels while the rest is fetched; each further part is a
launch, and holds the DMA up for the layer behind, whose first constants are fetched early. What is best for one layer
depends on its neighbours: the chain is walked, launch by launch, for the ways each may be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from dovetail.ir.types import box_shape
from dovetail.records import Record
from dovetail.schedule.region import EnginePart
from dovetail.schedule.tiles.tile import BUFFERS, TILE, cuts, tile_counts
from dovetail.schedule.tiles.tiling import PartTiles, Tiling
from dovetail.target.costs import StatementCycles
from dovetail.target.engine import Engine
from dovetail.timing.clock import CopyQueue, EngineQueue, Issuer
from dovetail.timing.layer import tiles_ahead
from dovetail.timing.transfers import CopyCost


class ChainLink(Record):
    """A layer of a chain, cut in one way."""

    tiling: Tiling
    parts: int
    """Number of parts its channels are cut into."""
    computing: int
    """Cycles of the engine for a part."""
    starting: int
    """Cycles in which the core goes along with its start."""
    constants: CopyCost
    """Cost of fetching the constants of a part."""


def link(part: EnginePart, tiling: Tiling) -> ChainLink:
    """A layer cut as a tiling says."""
    count, estimate = tile_counts(part.extent, tiling.shape)[-1], tiling.estimate
    cuts_channels_only = tiling.shape[:-1] == box_shape(part.extent)[:-1]
    computing = max(tiling.computing, estimate.moving // count) if cuts_channels_only else tiling.ready_cycles // count
    return ChainLink(tiling, count, computing, estimate.starting // count, CopyCost(1, estimate.fetching // count))


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
    yield link(part, tiling)
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
            yield link(part, tiles.deepened(other, budget))


class ChainState(Record):
    """A chain after one of its layers."""

    core: Issuer
    engine: EngineQueue
    dma: CopyQueue
    asked: int = 0
    """When constants were fetched last: those of the layer behind are fetched then. Cycles since the chain began."""
    launches: int = 0
    link: ChainLink | None = None
    """The layer."""
    before: ChainState | None = None

    @classmethod
    def first(cls, engine: Engine, costs: StatementCycles) -> Self:
        """An engine's chain without layers."""
        return cls(Issuer(costs) if engine.stream is None else Issuer.of_list(), EngineQueue.of(engine), CopyQueue())

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: end of the engine, then of the DMA, then number of launches."""
        return self.engine.ends[-1], self.dma.free, self.launches


def behind(before: ChainState, layer: ChainLink) -> ChainState:
    """The chain with one more layer."""
    core, dma = replace(before.core, now=before.asked), replace(before.dma)
    last = before.engine.ends[-before.engine.places :]  # no launch asks for those before
    engine, tiling = replace(before.engine, ends=last), layer.tiling
    ahead = tiles_ahead(tiling.buffers, layer.parts, tiling.estimate.fetching, tiling.estimate.engine)
    arrived = [dma.copy(core, layer.constants) for _ in range(ahead)]
    core.now = asked = max(core.now, before.core.now)
    for part in range(layer.parts):
        core.wait_copy(arrived[part])
        engine.launch(core, layer.computing, layer.starting)
        if len(arrived) < layer.parts:
            asked = core.now
            arrived.append(dma.copy(core, layer.constants))
    return ChainState(core, engine, dma, asked, before.launches + layer.parts, layer, before)


_KEPT = 8
"""Number of ways of cutting the layers so far that are kept."""


def quickest(first: ChainState, layers: Sequence[Sequence[ChainLink]]) -> list[ChainLink]:
    """The way of cutting each layer of a chain with which the chain ends first.

    A longer chain is only made of ways that none beats with both an earlier end and a DMA that is free earlier.
    """
    states = [first]
    for options in layers:
        best, *rest = sorted((behind(one, layer) for one in states for layer in options), key=lambda one: one.order)
        states = [best]
        for one in rest:
            if one.dma.free < states[-1].dma.free and len(states) < _KEPT:
                states.append(one)
    links, state = list[ChainLink](), states[0]
    while state.link is not None and state.before is not None:
        links.append(state.link)
        state = state.before
    return links[::-1]
