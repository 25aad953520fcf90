"""Chooses how a region is cut: the tile that fits the engine's memory and keeps engine and DMA busiest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import prod

from dovetail.errors import PlanError, TileError
from dovetail.ir.types import Shape, box_shape
from dovetail.schedule.region import EnginePart, Homes
from dovetail.schedule.tiles.tile import BUFFERS, TILE, cuts, tile_counts, tile_match
from dovetail.schedule.tiles.tiling import PartTiles, TileCache, TilesAsked, Tiling, TooLarge
from dovetail.target.description import Target

_FINEST = 4
"""Channels may be cut this many times finer than the engine's own step where nothing else fits."""
_SHOWN = 16
"""Number of sizes looked at for the error, of those that are too large by their shapes alone."""


def choose_tiling(
    part: EnginePart,
    target: Target,
    homes: Homes,
    budget: int,
    cache: TileCache | None = None,
    smallest: bool = True,
    quick: bool = False,
) -> Tiling:
    """The fastest tiling whose buffers fit the budget, by the clock.

    Args:
        part: as one engine computes it.
        target: the machine.
        homes: memory each value lies in.
        budget: bytes of the engine's memory free for tiles.
        cache: of the same network, from other homes and budgets; new answers are added.
        smallest: whether tiles may be far smaller than the engine's steps, which is slow, where no others fit.
        quick: whether the first tiling that fits will do, which a search for the fastest begins with.

    Raises:
        PlanError: even the smallest tile is too large (says how many bytes are missing), or the tile that the knobs of
            the region set is; names the knobs.
    """
    tiles = (cache or TileCache()).of(part, target)
    near = frozenset(name for name in (*part.graph.inputs, part.output) if homes[name] == part.engine.memory)
    in_place = (near - part.converted) | ({""} if target.reads_constants(part.engine) else frozenset())
    asked = in_place, smallest
    tiling = tiles.within(asked, budget)
    if tiling is None and quick:
        return tiles.timed(_ranked(tiles, asked, budget, quick))
    if tiling is None:
        tiling = tiles.timed(_ranked(tiles, asked, budget))
        tiles.ranked.setdefault(asked, []).append((budget, tiling))
    return tiling


def _ranked(tiles: PartTiles, asked: TilesAsked, budget: int, quick: bool = False) -> Tiling:
    """The tiling that is fastest by the clock, tiles thought to be alike, or the first one; errors as those of
    `choose_tiling`."""
    part, shape, (in_place, smallest) = tiles.part, box_shape(tiles.part.extent), asked
    if in_place == {*part.graph.inputs, part.output, ""}:  # nothing is copied: a cut could only save working memory
        whole = tiles.evaluate(shape, in_place, 1, max(budget, 0))
        if isinstance(whole, Tiling):
            return whole
    best: Tiling | None = None
    larger: list[tuple[int, Shape, int]] = []
    counts = (int(part.choice[BUFFERS]),) if BUFFERS in part.choice else (2, 1)
    for sizes in (_candidates(part, 1), _candidates(part, _FINEST), *([_smallest(part)] if smallest else [])):
        for size in filter(tiles.may_ask, sizes):
            for buffers in counts:  # fewer only where more do not fit: they save no time
                outcome = tiles.evaluate(size, in_place, buffers, budget, best.rank if best else None)
                if not isinstance(outcome, TooLarge):
                    break
                larger.append((outcome.nbytes, size, buffers))
            if isinstance(outcome, Tiling) and (best is None or outcome.rank < best.rank):
                best = outcome
                if quick:
                    return best
        if best is not None:
            return tiles.deepened(best, budget)
    if not smallest:
        what, hint = f"no tile of {part.name} at the engine's steps fits", "a larger memory of the engine"
        raise PlanError(what, where=", ".join(part.origins), hint=hint)
    exact = (tiles.evaluate(size, in_place, buffers) for _, size, buffers in sorted(larger))
    least = min((one for one in islice(exact, _SHOWN) if isinstance(one, Tiling)), key=_nbytes, default=None)
    raise _too_large(part, least, budget)


def _nbytes(tiling: Tiling) -> int:
    return tiling.estimate.nbytes


def _smallest(part: EnginePart) -> Iterator[Shape]:
    """Sizes down to one element, those that cut the result into few tiles first: they rule out most others."""
    sizes = _candidates(part, _FINEST, to_one=True)
    yield from sorted(dict.fromkeys(sizes), key=lambda size: prod(tile_counts(part.extent, size)))


def _candidates(part: EnginePart, finer: int, to_one: bool = False) -> Iterator[Shape]:
    """Tile sizes worth trying: whole, then ever smaller cuts of rows, columns and channels at the engine's steps, or
    down to one."""
    shape, offload, choice = box_shape(part.extent), part.offload, part.choice
    image, step, row_step = len(shape) == 4, max(1, offload.channel_step // finer), offload.row_step
    least = [1] if to_one else []
    rows, columns = ([*cuts(shape[axis], 1 if to_one else row_step), *least] if image else [0] for axis in (1, 2))
    channels = [*cuts(shape[-1], step), *([step, 1] if to_one and step < shape[-1] else [])]
    sizes = zip(TILE, (rows, columns, channels), strict=True)
    axes = ([int(choice[knob])] if knob in choice else tried for knob, tried in sizes)
    for row, column, channel in product(*axes):
        slow = image and column != shape[2] and row > row_step * 4
        if slow and choice.keys().isdisjoint(TILE):
            continue
        yield (shape[0], row, column, channel) if image else (*shape[:-1], channel)


def _too_large(part: EnginePart, smallest: Tiling | None, budget: int) -> PlanError:
    """The error of a part without a tile that fits, or of chosen knobs that leave none; `smallest` is the tiling of the
    smallest tile, None when the engine takes none."""
    engine, memory, where = part.engine, part.engine.memory, ", ".join(part.origins)
    needed, shape = (smallest.estimate.nbytes, "x".join(map(str, smallest.shape))) if smallest else (0, "")
    if not part.choice.keys().isdisjoint((*TILE, BUFFERS)):
        set_to = ", ".join(f"{name} = {value}" for name, value in part.choice.items())
        what = f"no tile of {part.name} with {set_to} is one {engine.name} can compute"
        if smallest:
            what = f"with {set_to} a tile of {part.name}, {shape}, needs {needed} bytes of {memory}; {budget} are free"
        return PlanError(what, where=where, hint="leave this layer out of the tuning file, or tune again")
    if smallest:
        what = f"the smallest tile of {part.name}, {shape}, needs {needed} bytes of {memory}; {budget} are free"
        hint = f"a {memory} larger by {needed - budget} bytes, or fewer channels in this layer"
    else:
        held = f", with constants that fit {engine.constants}" if engine.constants else ""
        what = f"no tile of {part.name} is one {engine.name} can compute{held}{_limits_of_smallest(part)}"
        hint = "fewer channels in this layer"
    error = TileError(what, where=where, hint=hint)
    error.layer, error.engine = part.name, engine.name
    return error


def _limits_of_smallest(part: EnginePart) -> str:
    """The limits that the smallest tile breaks; empty for none."""
    *_, size = _candidates(part, _FINEST)
    try:
        tile_match(part, tuple((low, min(low + n, high)) for (low, high), n in zip(part.extent, size, strict=True)))
    except ValueError as error:
        return f": {error}"
    return ""
