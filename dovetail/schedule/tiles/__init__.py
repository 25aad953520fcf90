"""Chooses how a region is cut: the tile that fits the engine's memory and keeps engine and DMA busiest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import prod

from dovetail.errors import PlanError
from dovetail.ir.types import Shape, box_shape, full_box
from dovetail.schedule import shipped
from dovetail.schedule.region import EnginePart, Homes
from dovetail.schedule.tiles.tile import BUFFERS, ORDER, TILE, cuts, tile_classes, tile_counts, tile_match
from dovetail.schedule.tiles.tiling import PartTiles, TileCache, Tiling, TooLarge
from dovetail.target.description import Target

_FINEST = 4
"""Channels may be cut this many times finer than the engine's own step where nothing else fits."""
_SHOWN = 16
"""Number of sizes looked at for the error, of those that are too large by their shapes alone."""


def choose_tiling(
    part: EnginePart, target: Target, homes: Homes, budget: int, cache: TileCache | None = None
) -> Tiling:
    """The fastest tiling whose buffers fit the budget, as tuning found it or as the formula ranks them.

    Args:
        part: as one engine computes it.
        target: the machine.
        homes: memory each value lies in.
        budget: bytes of the engine's memory free for tiles.
        cache: of the same network, from other homes and budgets; new answers are added.

    Raises:
        PlanError: even the smallest tile is too large (says how many bytes are missing), or the tile that the knobs of
            the region set is; names the knobs.
    """
    tiles = (cache or TileCache()).of(part, target)
    near = frozenset(name for name in (*part.graph.inputs, part.output) if homes[name] == part.engine.memory)
    in_place = (near - part.converted) | ({""} if target.reads_constants(part.engine) else frozenset())
    tiling = tiles.within(in_place, budget)
    if tiling is None:
        tiling = _ranked(tiles, in_place, budget)
        tiles.ranked.setdefault(in_place, []).append((budget, tiling))
    return _tuned(tiles, near, in_place, budget, tiling) or tiling


def _ranked(tiles: PartTiles, in_place: frozenset[str], budget: int) -> Tiling:
    """The tiling the formula thinks fastest; errors as those of `choose_tiling`."""
    part, shape = tiles.part, box_shape(tiles.part.extent)
    if in_place == {*part.graph.inputs, part.output, ""}:  # nothing is copied: a cut could only save working memory
        whole = tiles.evaluate(shape, in_place, 1, max(budget, 0))
        if isinstance(whole, Tiling):
            return whole
    best: Tiling | None = None
    larger: list[tuple[int, Shape, int]] = []
    counts = (int(part.choice[BUFFERS]),) if BUFFERS in part.choice else (2, 1)
    for finer in (1, _FINEST):
        for size, buffers in product(_candidates(part, finer), counts):
            if not tiles.may_ask(size):
                continue
            outcome = tiles.evaluate(size, in_place, buffers, budget, best.cycles if best else None)
            if isinstance(outcome, TooLarge):
                larger.append((outcome.nbytes, size, buffers))
            elif isinstance(outcome, Tiling) and (best is None or outcome.cycles < best.cycles):
                best = outcome
        if best is not None:
            return _never_idle(tiles, best, budget)
    exact = (tiles.evaluate(size, in_place, buffers) for _, size, buffers in sorted(larger))
    smallest = min((one for one in islice(exact, _SHOWN) if isinstance(one, Tiling)), key=_nbytes, default=None)
    raise _too_large(part, smallest, budget)


def _nbytes(tiling: Tiling) -> int:
    return tiling.nbytes


def _candidates(part: EnginePart, finer: int) -> Iterator[Shape]:
    """Tile sizes worth trying: whole, then ever smaller cuts of rows, columns and channels at the engine's steps."""
    shape, offload, choice = box_shape(part.extent), part.offload, part.choice
    image = len(shape) == 4
    rows, columns = (cuts(shape[axis], offload.row_step) if image else [0] for axis in (1, 2))
    channels = cuts(shape[-1], max(1, offload.channel_step // finer))
    sizes = zip(TILE, (rows, columns, channels), strict=True)
    axes = ([int(choice[knob])] if knob in choice else tried for knob, tried in sizes)
    for row, column, channel in product(*axes):
        slow = image and column != shape[2] and row > offload.row_step * 4
        if slow and choice.keys().isdisjoint(TILE):
            continue
        yield (shape[0], row, column, channel) if image else (*shape[:-1], channel)


def _never_idle(tiles: PartTiles, best: Tiling, budget: int) -> Tiling:
    """The tiling with three buffers where it is the DMA that takes longest, with constants for several tiles: with two
    it idles between a transfer's end and the start of the next."""
    counts = tile_counts(tiles.part.extent, best.shape)
    is_dma_bound = best.fetching + best.moving > best.computing * prod(counts)
    if best.buffers != 2 or BUFFERS in tiles.part.choice or counts[-1] < 3 or not is_dma_bound:
        return best
    deeper = tiles.evaluate(best.shape, best.in_place, 3, budget)
    return deeper if isinstance(deeper, Tiling) else best


def _tuned(
    tiles: PartTiles, near: frozenset[str], in_place: frozenset[str], budget: int, ranked: Tiling
) -> Tiling | None:
    """The tiling that tuning found for such a part: it was measured to be faster, whatever the formula thinks.

    None where there is none, a knob of the tiles is set, or the engine does not take one of the tiles.
    """
    part = tiles.part
    if part.extent != full_box(part.shape) or not part.choice.keys().isdisjoint((*TILE, BUFFERS, ORDER)):
        return None
    if near not in tiles.shipped:
        entry = shipped.find_entry(tiles.target, part.graph, near)
        tiles.shipped[near] = entry if entry and _is_possible(part, entry.shape) else None
    if (entry := tiles.shipped[near]) is None:
        return None
    order = "channels" if entry.channels_outer else "positions"
    tuned = tiles.evaluate(entry.shape, in_place, entry.buffers, budget, order=order)
    return tuned.not_slower_than(ranked) if isinstance(tuned, Tiling) else None


def _is_possible(part: EnginePart, size: Shape) -> bool:
    """Whether the engine takes every kind of tile of a size."""
    shape = part.shape
    if len(size) != len(shape) or not all(0 < length <= total for length, total in zip(size, shape, strict=True)):
        return False
    try:
        for box, _ in tile_classes(shape, size):
            tile_match(part, box)
    except ValueError:
        return False
    return True


def _too_large(part: EnginePart, smallest: Tiling | None, budget: int) -> PlanError:
    """The error of a part without a tile that fits, or of chosen knobs that leave none; `smallest` is the tiling of the
    smallest tile, None when the engine takes none."""
    engine, memory, where = part.engine, part.engine.memory, ", ".join(part.origins)
    needed, shape = (smallest.nbytes, "x".join(map(str, smallest.shape))) if smallest else (0, "")
    if not part.choice.keys().isdisjoint((*TILE, BUFFERS)):
        set_to = ", ".join(f"{name} = {value}" for name, value in part.choice.items())
        what = f"no tile of {part.name} with {set_to} is one {engine.name} can compute"
        if smallest:
            what = f"with {set_to} a tile of {part.name}, {shape}, needs {needed} bytes of {memory}; {budget} are free"
        return PlanError(what, where=where, hint="leave this layer out of the tuning file, or tune again")
    if smallest:
        what = f"the smallest tile of {part.name}, {shape}, needs {needed} bytes of {memory}; {budget} are free"
        hint = f"a {memory} larger by {needed - budget} bytes, or fewer channels in this layer"
        return PlanError(what, where=where, hint=hint)
    held = f", with constants that fit {engine.constants}" if engine.constants else ""
    what = f"no tile of {part.name} is one {engine.name} can compute{held}"
    return PlanError(what, where=where, hint="fewer channels in this layer")
