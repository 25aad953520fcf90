"""Choices about regions: the planner's own knobs and those of an offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from dovetail import kernels
from dovetail.errors import PlanError, TargetError
from dovetail.ir.types import Box
from dovetail.schedule.partition import Region, engine_layouts
from dovetail.schedule.tiles.tile import BUFFERS, EARLY, ORDER, PLACEMENT, TILE, cuts, tile_classes, tile_match
from dovetail.schedule.tiles.tiling import TileCache, Tiling, evaluate
from dovetail.target.description import Target
from dovetail.target.pattern import Choice, Knob, Space, Value

CONTEXT = (EARLY,)
"""Knobs that change nothing for a region alone, only beside other regions."""

MOST_TILES = 256
"""Tiles a region may be cut into: each is code of its own."""
_STEP_PARTS = (1, 2, 3, 4)
"""Tile sizes are multiples of the offload's own step, and of these parts of it (of channels only where they must)."""


def region_space(region: Region, target: Target) -> Space:
    """The knobs of a region and what they may be set to: on the core those of its kernel; none where nobody has any.

    Raises:
        TargetError: the offload has a knob of a name the planner uses, or knobs without a default.
    """
    if region.engine is None or region.offload is None or region.match is None:
        on_core = region.engine is None and not (region.is_view or region.still or region.mover)
        return kernels.offered(region.graph, kernels.core_traits(target.core)).space if on_core else Space(())
    planner = _planner_knobs(region, target)
    own = region.offload.knobs(region.match) if region.offload.knobs else Space(())
    if own.knobs and region.offload.default is None:
        what = "this offload has knobs and no default for them"
        raise TargetError(what, where=f"{region.engine.name} {region.offload.name}", hint="give the Offload a default=")
    clash = {knob.name for knob in planner} & {knob.name for knob in own.knobs}
    if clash:
        what = f"the knob '{min(clash)}' has a name the planner uses"
        raise TargetError(what, where=f"{region.engine.name} {region.offload.name}", hint="give it another name")
    own_names = {knob.name for knob in own.knobs}
    first = {knob.name: knob.values[0] for knob in (*planner, *own.knobs)}
    tiles = _Tiles(region, target)

    def problem(choice: Choice) -> str | None:
        """Why a choice is not allowed, None where it is."""
        if choice.get(PLACEMENT) == "core":
            idle = next((name for name, value in choice.items() if name != PLACEMENT and value != first[name]), None)
            return f"{idle} means nothing on the core" if idle else None
        return own.problem({k: v for k, v in choice.items() if k in own_names}) or tiles.problem(choice)

    return Space((*planner, *own.knobs), problem)


def canonical(choice: Choice) -> dict[str, Value]:
    """A choice without settings that go without saying: on the core there are no tiles; elsewhere is on the engine."""
    if choice.get(PLACEMENT) == "core":
        return {PLACEMENT: "core"}
    return {name: value for name, value in choice.items() if name != PLACEMENT}


def choose(regions: tuple[Region, ...], choices: Mapping[str, Choice], target: Target) -> tuple[Region, ...]:
    """The regions with what is chosen for them, those moved to the core included.

    Args:
        regions: the network.
        choices: by region name.
        target: the machine.

    Raises:
        PlanError: an unknown region or knob, a value out of range, or a choice that is not allowed; says which.
    """
    known = {region.name: region for region in regions}
    for name, choice in choices.items():
        if name not in known:
            raise PlanError(
                f"there is no layer '{name}'", where=f"choice for '{name}'", hint="dovetail explain lists the layers"
            )
        refusal = region_space(known[name], target).refusal(choice)
        if refusal:
            raise PlanError(refusal, where=f"layer {name}", hint="tune again, or change the entry")
    return tuple(chosen(region, choices.get(region.name, {})) for region in regions)


def chosen(region: Region, choice: Choice) -> Region:
    """One region with a choice known to be allowed."""
    if choice.get(PLACEMENT) == "core":
        reason = "the tuning file places it on the core"
        return replace(region, match=None, engine=None, offload=None, reason=reason, choice={})
    return replace(region, choice=dict(choice)) if choice else region


def _planner_knobs(region: Region, target: Target) -> tuple[Knob, ...]:
    """Placement, and what concerns tiles where the planner cuts any."""
    assert region.offload is not None and region.engine is not None
    shape, offload = region.graph.types[region.output].shape, region.offload
    image = len(shape) == 4
    on_core = ("core",) if kernels.supports(region.graph) is None else ()
    placement = Knob(PLACEMENT, (region.engine.name, *on_core), "what computes the layer")
    if target.works_in_place(region.engine):
        return (placement,)
    sizes = [
        *((TILE[axis - 1], _sizes(shape[axis], offload.row_step)) for axis in (1, 2) if image),
        (TILE[2], _channels(region, target)),
    ]
    return (
        placement,
        *(Knob(name, values, f"{name[5:]} of a tile's result") for name, values in sizes),
        Knob(BUFFERS, (2, 1, 3), "buffers per operand that changes from tile to tile"),
        Knob(ORDER, ("channels", "positions"), "what the outer loop over tiles runs over"),
        Knob(EARLY, ("yes", "no"), "whether constants are fetched while the layer before is computed"),
    )


def _channels(region: Region, target: Target) -> tuple[int, ...]:
    """Channels of a tile: of whole steps, for an engine takes as long for a part of one. Parts too where no tile of
    whole steps fits the engine's memory."""
    assert region.offload is not None and region.engine is not None
    *rest, total = region.graph.types[region.output].shape
    step = region.offload.channel_step
    whole = tuple(cuts(total, step))
    least = (
        *(cuts(size, region.offload.row_step)[-1] if place else size for place, size in enumerate(rest)),
        whole[-1],
    )
    laid = replace(region, layouts={**engine_layouts(region), **region.layouts})
    in_place = frozenset({""} if target.reads_constants(region.engine) else ())
    found = evaluate(laid, target, least, in_place, 1, TileCache())
    fits = isinstance(found, Tiling) and found.nbytes <= target.memory(region.engine.memory).size
    return whole if fits else _sizes(total, step)


def _sizes(total: int, step: int) -> tuple[int, ...]:
    found = {size for part in _STEP_PARTS for size in cuts(total, max(1, step // part))}
    return tuple(sorted(found, reverse=True))


class _Tiles:
    """Asks whether tiles are allowed; every shape of tile is cut only once."""

    def __init__(self, region: Region, target: Target) -> None:
        assert region.engine is not None
        self._region = replace(region, layouts={**engine_layouts(region), **region.layouts})
        self._memory = target.memory(region.engine.memory)
        self._refusals: dict[tuple[object, ...], str | None] = {}
        self._shape = region.graph.types[region.output].shape
        self._image = len(self._shape) == 4

    def problem(self, choice: Choice) -> str | None:
        """Why tiles like these are not allowed; None when they are, or when not all of their sizes are chosen."""
        names = TILE if self._image else TILE[2:]
        if any(name not in choice for name in names):
            return None
        sizes = tuple(int(choice[name]) for name in names)
        size = (self._shape[0], *sizes) if self._image else (*self._shape[:-1], *sizes)
        counts = [-(-total // step) for total, step in zip(self._shape, size, strict=True)]
        tiles = prod(counts)
        if tiles > MOST_TILES:
            return f"it would be cut into {tiles} tiles; at most {MOST_TILES} are allowed"
        if tiles == 1 and choice.get(BUFFERS, 2) != 2:
            return f"{BUFFERS} = {choice[BUFFERS]} changes nothing for a single tile"
        if (counts[-1] == 1 or tiles == counts[-1]) and choice.get(ORDER, "channels") != "channels":
            return f"{ORDER} = {choice[ORDER]} changes nothing: only one of channels and positions is cut"
        if tiles < int(choice.get(BUFFERS, 2)) and choice.get(BUFFERS) == 3:
            return f"{BUFFERS} = 3 changes nothing for {tiles} tiles"
        for box, _ in tile_classes(self._shape, size):
            refusal = self._refusal(box, choice)
            if refusal:
                return f"a tile of {'x'.join(map(str, size))} is not possible: {refusal}"
        return None

    def _refusal(self, box: Box, choice: Choice) -> str | None:
        """Why one tile is not allowed; tiles of one size that touch the same edges are alike."""
        own = tuple(value for name, value in choice.items() if name not in (PLACEMENT, BUFFERS, ORDER, EARLY, *TILE))
        key = (own, *((b - a, a == 0, b == total) for (a, b), total in zip(box, self._shape, strict=True)))
        if key not in self._refusals:
            self._refusals[key] = None
            try:
                tile, _ = tile_match(replace(self._region, choice=choice), box)
                needed = tile.graph.types[self._region.output].nbytes
                if needed > self._memory.size:  # whatever else it needs
                    self._refusals[key] = f"its result has {needed} bytes, {self._memory.name} has {self._memory.size}"
            except ValueError as error:
                self._refusals[key] = str(error)
        return self._refusals[key]
