"""Chooses how a region is cut: the tile that fits the engine's memory and keeps engine and DMA busiest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from math import prod

from dovetail.errors import PlanError
from dovetail.ir.types import Shape, box_shape, full_box
from dovetail.schedule import shipped
from dovetail.schedule.partition import Region
from dovetail.schedule.tiles.tile import BUFFERS, ORDER, TILE, cuts, tile_classes, tile_match
from dovetail.schedule.tiles.tiling import TileCache, TileCost, Tiling, evaluate
from dovetail.target.description import Target

_FINEST = 4
"""Channels may be cut this many times finer than the engine's own step where nothing else fits."""


def choose_tiling(
    region: Region, target: Target, homes: Mapping[str, str], budget: int, known: TileCache | None = None
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
    known, in_place = known or TileCache(), _in_place(region, target, homes)
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


def _ranked(region: Region, target: Target, in_place: frozenset[str], budget: int, known: TileCache) -> Tiling:
    """The tiling the formula thinks fastest; errors as those of `choose_tiling`."""
    shape = box_shape(region.extent)
    if in_place == {*region.graph.inputs, region.output, ""}:  # nothing is copied: a cut could only save working memory
        whole = evaluate(region, target, shape, in_place, 1, known)
        if isinstance(whole, Tiling) and whole.nbytes <= max(budget, 0):
            return whole
    best: Tiling | None = None
    larger: list[tuple[int, Shape, int]] = []
    counts = (int(region.choice[BUFFERS]),) if BUFFERS in region.choice else (2, 1)
    for finer in (1, _FINEST):
        for size, buffers in product(_candidates(region, shape, finer), counts):
            if not known.may_ask(region, size):
                continue
            limits = (budget, best.cycles if best else None)
            tiling = evaluate(region, target, size, in_place, buffers, known, limits)
            if not isinstance(tiling, Tiling):
                larger += [(tiling, size, buffers)] if tiling is not None else []
            elif tiling.nbytes > budget:
                larger.append((tiling.nbytes, size, buffers))
            elif best is None or tiling.cycles < best.cycles:
                best = tiling
        if best is not None:
            return _never_idle(region, target, best, budget, known)
    exact = (evaluate(region, target, size, in_place, buffers, known) for _, size, buffers in sorted(larger))
    smallest = min((one for one in islice(exact, _SHOWN) if isinstance(one, Tiling)), key=_nbytes, default=None)
    raise _too_large(region, (smallest.nbytes, smallest.shape) if smallest else None, budget)


def _tuned(
    region: Region, target: Target, near: frozenset[str], in_place: frozenset[str], known: TileCache
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
    tiling = evaluate(ordered, target, entry.shape, in_place, entry.buffers, known)
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


def _never_idle(region: Region, target: Target, best: Tiling, budget: int, known: TileCache) -> Tiling:
    """The tiling with three buffers where it is the DMA that takes longest, with constants for several tiles: with two
    it idles between a transfer's end and the start of the next."""
    channel_cuts = -(-box_shape(region.extent)[-1] // best.shape[-1])
    if best.buffers != 2 or BUFFERS in region.choice or channel_cuts < 3 or not _dma_bound(best, region, known):
        return best
    deeper = evaluate(region, target, best.shape, best.in_place, 3, known)
    return deeper if isinstance(deeper, Tiling) and deeper.nbytes <= budget else best


def _dma_bound(tiling: Tiling, region: Region, known: TileCache) -> bool:
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
