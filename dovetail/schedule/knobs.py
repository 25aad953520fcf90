"""Choices about regions: the planner's own knobs and those of an offload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from dovetail import kernels
from dovetail.errors import PlanError, TargetError
from dovetail.ir.types import Box, full_box
from dovetail.schedule.region import AssignedRegion, EnginePart, LaidRegion, Region, engine_layouts
from dovetail.schedule.tiles.tile import (
    BUFFERS,
    EARLY,
    ORDER,
    PLACEMENT,
    TILE,
    cuts,
    tile_classes,
    tile_counts,
    tile_match,
)
from dovetail.schedule.tiles.tiling import PartTiles, Tiling
from dovetail.target.description import Target
from dovetail.target.pattern import Choice, Knob, Space, Value
from dovetail.user_file import asking

CONTEXT = (EARLY,)
"""Knobs that change nothing for a region alone, only beside other regions."""

MOST_TILES = 256
"""Tiles a region may be cut into: each is code of its own."""
_STEP_PARTS = (1, 2, 3, 4)
"""Tile sizes are multiples of the offload's own step, and of these parts of it (of channels only where they must)."""


def region_space(region: Region, target: Target) -> Space:
    """The knobs of a region and what they may be set to: on the core those of its kernel; none where there are none.

    Raises:
        TargetError: the offload has a knob of a name the planner uses, or knobs without a default.
    """
    if not region.shares:
        no_knobs = Space(())
        return kernels.offered(region.graph, kernels.core_traits(target.core)).space if region.is_kernel else no_knobs
    (part,) = replace(LaidRegion.of(region), layouts=engine_layouts(region)).parts
    planner = _planner_knobs(part, target)
    own = part.offload.knobs(part.match) if part.offload.knobs else Space(())
    where = f"{part.engine.name} {part.offload.name}"
    if own.knobs and part.offload.default is None:
        raise TargetError(
            "this offload has knobs and no default for them", where=where, hint="give the Offload a default="
        )
    if clash := {knob.name for knob in planner} & {knob.name for knob in own.knobs}:
        what = f"the knob '{min(clash)}' has a name the planner uses"
        raise TargetError(what, where=where, hint="give it another name")
    own_names = {knob.name for knob in own.knobs}
    first = {knob.name: knob.values[0] for knob in (*planner, *own.knobs)}
    tiles = _Tiles(part, target)

    def problem(choice: Choice) -> str | None:
        """Why a choice is not allowed, None where it is."""
        if choice.get(PLACEMENT) == "core":
            idle = next((name for name, value in choice.items() if name != PLACEMENT and value != first[name]), None)
            return f"{idle} means nothing on the core" if idle else None
        return own.problem({k: v for k, v in choice.items() if k in own_names}) or tiles.problem(choice)

    return Space((*planner, *own.knobs), problem)


def alike(regions: Sequence[Region], others: Sequence[Region]) -> dict[str, Choice]:
    """Choices with which engines read the constants of layers as those of another network's layers, by region name.
    Layers that do so without a choice, or cannot, have none.

    Args:
        regions: of a network.
        others: of the other one, without choices.
    """
    there, found = {_packed(region, {}) for region in others if region.shares}, dict[str, Choice]()
    for region in regions:
        if len(region.shares) != 1 or region.offload is None or region.match is None or region.offload.knobs is None:
            continue
        choices = ({}, *region.offload.knobs(region.match).points())
        same = next((choice for choice in choices if _packed(region, choice) in there), {})
        found |= {region.name: same} if same else {}
    return found


def _packed(region: Region, choice: Choice) -> frozenset[tuple[str, bytes]]:
    """Names and bytes of the constants of a region on an engine."""
    if region.offload is None or region.match is None:
        return frozenset()
    with asking(f"the constants of {region.offload.name} for {region.name}"):
        packed = region.offload.pack(replace(region.match, choice=choice))
    return frozenset((name, array.tobytes()) for name, array in packed.items())


def canonical(choice: Choice) -> dict[str, Value]:
    """A choice without settings that go without saying: on the core there are no tiles; elsewhere is on the engine."""
    if choice.get(PLACEMENT) == "core":
        return {PLACEMENT: "core"}
    return {name: value for name, value in choice.items() if name != PLACEMENT}


def choose(regions: Sequence[Region], choices: Mapping[str, Choice], target: Target) -> tuple[AssignedRegion, ...]:
    """The regions with what is chosen for them, those moved to the core included.

    Args:
        regions: the network.
        choices: by region name.
        target: the machine.

    Raises:
        PlanError: an unknown region or knob, a value out of range, or a choice that is not allowed; says which.
    """
    by_name = {region.name: region for region in regions}
    for name, choice in choices.items():
        if name not in by_name:
            raise PlanError(
                f"there is no layer '{name}'", where=f"choice for '{name}'", hint="dovetail explain lists the layers"
            )
        if refusal := region_space(by_name[name], target).refusal(choice):
            raise PlanError(refusal, where=f"layer {name}", hint="tune again, or change the entry")
    return tuple(_chosen(AssignedRegion.of(region), choices.get(region.name, {})) for region in regions)


def _chosen(region: AssignedRegion, choice: Choice) -> AssignedRegion:
    """A region with a choice that is allowed."""
    if choice.get(PLACEMENT) == "core":
        return replace(region, shares=(), reason="the tuning file places it on the core", choice={})
    return replace(region, choice=dict(choice)) if choice else region


def _planner_knobs(part: EnginePart, target: Target) -> tuple[Knob, ...]:
    """Placement, and what concerns tiles where the planner cuts any."""
    shape, offload = part.shape, part.offload
    on_core = ("core",) if kernels.supports(part.graph) is None else ()
    placement = Knob(PLACEMENT, (part.engine.name, *on_core), "what computes the layer")
    if target.works_in_place(part.engine):
        return (placement,)
    image = [(TILE[axis - 1], _sizes(shape[axis], offload.row_step)) for axis in (1, 2) if len(shape) == 4]
    sizes = [*image, (TILE[2], _channels(part, target))]
    return (
        placement,
        *(Knob(name, values, f"{name[5:]} of a tile's result") for name, values in sizes),
        Knob(BUFFERS, (2, 1, 3), "buffers per operand that changes from tile to tile"),
        Knob(ORDER, ("channels", "positions"), "what the outer loop over tiles runs over"),
        Knob(EARLY, ("yes", "no"), "whether constants are fetched while the layer before is computed"),
    )


def _channels(part: EnginePart, target: Target) -> tuple[int, ...]:
    """Channels of a tile: of whole steps, for an engine takes as long for a part of one. Parts too where no tile of
    whole steps fits the engine's memory."""
    *rest, total = part.shape
    step = part.offload.channel_step
    whole = tuple(cuts(total, step))
    smallest = (cuts(size, part.offload.row_step)[-1] if place else size for place, size in enumerate(rest))
    in_place = frozenset({""} if target.reads_constants(part.engine) else ())
    room = target.memory(part.engine.memory).size
    outcome = PartTiles(part, target).evaluate((*smallest, whole[-1]), in_place, 1, room)
    return whole if isinstance(outcome, Tiling) else _sizes(total, step)


def _sizes(total: int, step: int) -> tuple[int, ...]:
    sizes = {size for part in _STEP_PARTS for size in cuts(total, max(1, step // part))}
    return tuple(sorted(sizes, reverse=True))


@dataclass
class _Tiles:
    """Asks whether tiles are allowed; every shape of tile is cut only once."""

    part: EnginePart
    target: Target
    refusals: dict[tuple[object, ...], str | None] = field(default_factory=dict)

    def problem(self, choice: Choice) -> str | None:
        """Why tiles like these are not allowed; None when they are, or when not all of their sizes are chosen."""
        shape = self.part.shape
        names = TILE if len(shape) == 4 else TILE[2:]
        if any(name not in choice for name in names):
            return None
        sizes = tuple(int(choice[name]) for name in names)
        size = (*shape[: -len(sizes)], *sizes)
        counts = tile_counts(full_box(shape), size)
        tiles, buffers = prod(counts), int(choice.get(BUFFERS, 2))
        if tiles > MOST_TILES:
            return f"it would be cut into {tiles} tiles; at most {MOST_TILES} are allowed"
        if tiles == 1 and buffers != 2:
            return f"{BUFFERS} = {buffers} changes nothing for a single tile"
        if (counts[-1] == 1 or tiles == counts[-1]) and choice.get(ORDER, "channels") != "channels":
            return f"{ORDER} = {choice[ORDER]} changes nothing: only one of channels and positions is cut"
        if tiles < buffers == 3:
            return f"{BUFFERS} = 3 changes nothing for {tiles} tiles"
        for box, _ in tile_classes(shape, size):
            if refusal := self._refusal(box, choice):
                return f"a tile of {'x'.join(map(str, size))} is not possible: {refusal}"
        return None

    def _refusal(self, box: Box, choice: Choice) -> str | None:
        """Why one tile is not allowed; tiles of one size that touch the same edges are alike."""
        own = tuple(value for name, value in choice.items() if name not in (PLACEMENT, BUFFERS, ORDER, EARLY, *TILE))
        edges = ((b - a, a == 0, b == total) for (a, b), total in zip(box, self.part.shape, strict=True))
        key = (own, *edges)
        if key not in self.refusals:
            self.refusals[key] = self._asked(box, choice)
        return self.refusals[key]

    def _asked(self, box: Box, choice: Choice) -> str | None:
        try:
            tile, _ = tile_match(replace(self.part, choice=choice), box)
        except ValueError as error:
            return str(error)
        memory, needed = self.target.memory(self.part.engine.memory), tile.graph.types[self.part.output].nbytes
        if needed > memory.size:  # whatever else it needs
            return f"its result has {needed} bytes, {memory.name} has {memory.size}"
        return None
