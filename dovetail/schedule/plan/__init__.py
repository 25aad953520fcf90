"""Plan: where every value lives, how every region is cut, in what order, and at which addresses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.errors import PlanError
from dovetail.program.ir import CORE, Buffer, Program, Role, Statement, StateVariable, Wait, reads, stream_of
from dovetail.program.synchronise import mirror, synchronise
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.partition import Region
from dovetail.schedule.plan.allocate import Placement, Timeline, allocate, overwrites
from dovetail.schedule.plan.lower import lower
from dovetail.schedule.plan.lowered import LoweredNetwork, LoweringCache
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.chain import ChainLink, link, quickest, ways
from dovetail.schedule.tiles.tile import EARLY
from dovetail.schedule.tiles.tiling import TileCache, Tiling, complete
from dovetail.target.description import Target
from dovetail.target.engine import IN_PLACE_ALIGNMENT

_EXACT_SECONDS = 2.0
"""Deterministic solver time for placing activations; memories close to an engine only have to fit."""


@dataclass(frozen=True)
class Plan:
    """The program, with what its placement needs and could at best need."""

    program: Program
    placements: tuple[Placement, ...]
    tilings: Mapping[str, Tiling]
    """By region name; of a region with shares, by the names of its parts."""


def plan(
    laid: LayoutPlan,
    target: Target,
    reserved: Mapping[str, int],
    near: Collection[str] = (),
    cores: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    sized: TileCache | None = None,
) -> Plan:
    """Place, tile, order and allocate.

    Values start out in the memory their engines work in; while that does not fit, the largest value or early fetch of
    constants at the busiest moment is given up.

    Args:
        laid: the network and how its values lie.
        target: the machine.
        reserved: bytes of each memory taken by code, constants and stack.
        near: inputs and outputs of the network that shall lie in the engines' memory, not in that of values.
        cores: the core that computes each value, in a pipeline; None for as many as make each region fastest.
        progress: told whose tiles are looked for.
        sized: what is known of tiles of the regions by their names, where they take and give row-major values.

    Raises:
        PlanError: the network does not fit; says which region or memory, and by how much.
    """
    check_reserved(laid.regions, target, reserved)
    early = (r.name for r in laid.regions if r.engine is not None and r.choice.get(EARLY, "yes") == "yes")
    choice = _PlanningRound(_first_homes(laid, target, near), frozenset(early))
    dma = target.dma.name if target.dma else CORE
    cut: _PlanningRound | None = None
    tilings: dict[str, Tiling] = {}
    plain = {region.name for region in laid.regions if not (region.layouts or region.converted)}
    known, parts = (sized or TileCache()).of(plain, progress), LoweringCache()
    while True:
        if (
            cut is None or replace(cut, settle=choice.settle, paced=choice.paced) != choice
        ):  # these do not matter to tiles
            cut, stuck = choice, _cut(laid, target, choice, reserved, known, tilings)
        if stuck is not None:
            choice = _spill_for(stuck, laid, target, choice)
            continue
        lowered = lower(laid, tilings, target, choice.homes, choice.early, cores or {}, parts)
        statements = synchronise(lowered.statements, dma, choice.settle, choice.paced)
        timeline = Timeline(statements, lowered.buffers, dma)
        placements = _placements(target, timeline)
        crowded = next((p for p in placements if p.peak > _room(target, p.memory, reserved)), None)
        if crowded is None:
            if choice.paced:
                placements, statements = _as_placed(placements, lowered, dma, choice, statements)
            return Plan(_program(lowered, statements, placements, dma), placements, tilings)
        if not choice.paced and target.dma and target.engines:
            choice = replace(choice, paced=True)
            continue
        room = _room(target, crowded.memory, reserved)
        alive, short = _alive(crowded, timeline, room), crowded.peak - room
        # an engine that works in the memory of values has buffers beside them that can give way
        if crowded.memory == target.values and not any(one.role in (Role.TILE, Role.SCRATCH) for one in alive):
            raise _too_large(crowded, alive, short, target, reserved)
        relief = _relieve(alive, lowered, choice, target)
        tiles = any(one.role in (Role.TILE, Role.SCRATCH) for one in alive)
        if relief is None and choice.settle and (not tiles or choice.withheld > room):
            raise _too_large(crowded, alive, short, target, reserved)
        withheld = choice.withheld + (short if choice.settle else 0)
        choice = relief or replace(choice, settle=True, withheld=withheld)


def check_reserved(regions: Sequence[Region], target: Target, reserved: Mapping[str, int]) -> None:
    """Raise PlanError, with the layers that weigh most, where a memory does not even hold what is reserved in it."""
    for name, taken in reserved.items():
        size = target.memory(name).size
        if taken <= size:
            continue
        weights = [(sum(a.nbytes for a in r.graph.constants.values()), r.name) for r in regions]
        heaviest = ", ".join(f"{layer} {count}" for count, layer in sorted(weights, reverse=True)[:3] if count)
        raise PlanError(
            f"{name} has {size} bytes, and constants, code and stacks take {taken}: {taken - size} bytes short",
            where=f"{target.name}; the layers that weigh most: {heaviest or 'none'}",
            hint=f"a larger {name}, narrower weights (dovetail quantize --weights int4), or a smaller network",
        )


@dataclass(frozen=True)
class _PlanningRound:
    """Where values lie and how close layers follow each other; each round gives up one thing, so planning ends."""

    homes: Mapping[str, str]
    """Memory of every value."""
    early: frozenset[str]
    """Regions whose constants are fetched while the region before is computed."""
    settle: bool = False
    """Whether every layer finishes before the next begins, so that their buffers may share memory."""
    paced: bool = False
    """Whether copies wait for what a queue of two launches has behind it, so that they may share its memory."""
    withheld: int = 0
    """Bytes of the engines' memory that tiles may not use, because neighbouring tiles could not be laid together."""

    def moved(self, values: Collection[str], memory: str) -> _PlanningRound:
        """The choice with some values in another memory."""
        homes = {name: memory if name in values else home for name, home in self.homes.items()}
        return replace(self, homes=homes)


def _first_homes(laid: LayoutPlan, target: Target, near_ends: Collection[str]) -> dict[str, str]:
    """Inputs and outputs in the memory of values; the rest, and the ends given, in the engines' memory."""
    graph, regions = laid.graph, laid.regions
    users: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        for name in dict.fromkeys((region.output, *region.graph.inputs)):
            users.setdefault(name, []).append(index)
    homes = {name: _near(name, regions, users, target) if name in near_ends else target.values for name in graph.inputs}
    private = {memory.name for memory in target.memories if not memory.is_reached_by(CORE)}
    for region in regions:
        if region.is_view and region.output not in graph.outputs:
            homes[region.output] = homes[region.graph.inputs[0]]
        else:
            is_end = region.output in graph.outputs and region.output not in near_ends
            homes[region.output] = target.values if is_end else _near(region.output, regions, users, target)
    for name, inside in laid.inside.items():  # a part lies where the whole does
        homes |= dict.fromkeys(_sharing(name, regions), homes[inside.outer])
    shared = [region for region in regions if not region.is_view and not _is_of_engine(region, target)]
    for name in [*graph.inputs, *graph.outputs, *(v for r in shared for v in (*r.graph.inputs, r.output))]:
        if homes[name] in private:  # who makes or reads it does not reach it there
            homes |= dict.fromkeys(_whole(name, laid), target.values)
    return homes


def _is_of_engine(region: Region, target: Target) -> bool:
    """True for what engines and their own DMAs do by themselves, in memories the core does not reach."""
    if region.engine is not None:
        return True
    return any(engine.dma and engine.dma.name == region.mover for engine in target.engines)


def _whole(name: str, laid: LayoutPlan) -> set[str]:
    """Every value that lies with a value: other names for it, what it lies in, and what else lies in that."""
    views = {region.output: region.graph.inputs[0] for region in laid.regions if region.is_view}
    while name in views:
        name = views[name]
    found = _sharing(name, laid.regions)
    outer = {laid.inside[value].outer for value in found if value in laid.inside} | found
    inner = {value for value, place in laid.inside.items() if place.outer in outer}
    return {other for value in outer | inner for other in _sharing(value, laid.regions)}


def _near(value: str, regions: Sequence[Region], users: Mapping[str, Sequence[int]], target: Target) -> str:
    """The engines' memory a value lies in: that of most engines that make or read it, the maker's if it is a draw;
    of the next engine where none does; that of values where no engine computes anything. `users` are the places of the
    regions that make or read each value."""
    near = [regions[index] for index in users.get(value, ())]
    own = [part.engine.memory for r in near if value == r.output for part in r.parts if part.engine]
    own += [part.engine.memory for r in near if value in r.graph.inputs for part in r.parts if part.engine]
    if own:
        return max(dict.fromkeys(own), key=own.count)
    if not target.engines:
        return target.values
    after = users.get(value, (0,))[0]
    following = (r.engine.memory for r in (*regions[after:], *reversed(regions[:after])) if r.engine)
    return next(following, target.values)


def _cut(
    laid: LayoutPlan,
    target: Target,
    choice: _PlanningRound,
    reserved: Mapping[str, int],
    known: TileCache,
    tilings: dict[str, Tiling],
) -> tuple[Region, PlanError] | None:
    """Write the tilings of all regions, by name, over those of the round before; the first region there is no room
    for."""
    lives = _ValueLifetimes.of(laid)
    chain: list[tuple[Region, list[ChainLink]]] = []
    for position, region in enumerate(laid.regions):
        taken: dict[str, int] = {}
        for part in region.parts if region.engine is not None else ():
            assert part.engine is not None
            memory = part.engine.memory
            free = _room(target, memory, reserved) - _resident(position, memory, laid, lives, choice.homes)
            budget = free - choice.withheld - taken.get(memory, 0)
            try:
                tiling = choose_tiling(part, target, choice.homes, budget, known)
            except PlanError as error:
                return part, error
            taken[memory] = taken.get(memory, 0) + tiling.nbytes
            follows = bool(chain) and len(region.parts) == 1 and region.engine is chain[-1][0].engine
            if not follows or region.name not in choice.early:
                if stuck := _complete(chain, tilings):
                    return stuck
                chain = [(part, [link(part, tiling, known)])]
            else:
                chain.append((part, list(ways(part, target, tiling, budget, known))))
        if region.engine is None and not region.is_view:
            if stuck := _complete(chain, tilings):
                return stuck
            chain = []
    return _complete(chain, tilings)


def _complete(
    chain: Sequence[tuple[Region, Sequence[ChainLink]]], tilings: dict[str, Tiling]
) -> tuple[Region, PlanError] | None:
    """Write the tilings of regions one behind the other, cut so that all of them end first."""
    for (region, options), chosen in zip(chain, quickest([options for _, options in chain]), strict=True):
        for found in dict.fromkeys((chosen, options[0])):  # an engine may not take the last tile of a way
            try:
                tilings[region.name] = complete(region, found.tiling, tilings.get(region.name))
                break
            except PlanError as error:
                stuck = region, error
        else:
            return stuck
    return None


def _spill_for(
    stuck: tuple[Region, PlanError], laid: LayoutPlan, target: Target, choice: _PlanningRound
) -> _PlanningRound:
    """Move the largest value that is in the way of a region (or part) out of its engine's memory; raises its error
    when none is."""
    region, error = stuck
    assert region.engine is not None
    regions, inside = laid.regions, laid.inside
    position = next(index for index, r in enumerate(regions) if r.output == region.output)
    resident = _resident_regions(position, region.engine.memory, _ValueLifetimes.of(laid), choice.homes)
    values = [(laid.nbytes(r.output), r.output) for r in resident]
    if not values or region.engine.memory == target.values:
        raise error
    largest = max(values)[1]
    outer = inside[largest].outer if largest in inside else largest
    names = {outer, *(value for value, place in inside.items() if place.outer == outer)}
    return choice.moved({name for value in names for name in _sharing(value, regions)}, target.values)


def _sharing(value: str, regions: Sequence[Region]) -> set[str]:
    """A value and every other name for the same bytes."""
    names = {value}
    for region in regions:
        if region.is_view and region.graph.inputs[0] in names:
            names.add(region.output)
    return names


@dataclass(frozen=True)
class _ValueLifetimes:
    """Until when regions' results, and the network's inputs, are read."""

    results: tuple[tuple[Region, ...], ...]
    """At each place, in order, the regions whose results are there or are made and will still be read, under whatever
    name; no views."""
    ends: Mapping[str, int]
    """Of every value no region computes, the last place that reads it."""

    @classmethod
    def of(cls, laid: LayoutPlan) -> _ValueLifetimes:
        """Those of a network's regions."""
        named: dict[str, str] = {}
        last: dict[str, int] = {}
        for index, region in enumerate(laid.regions):
            for name in region.graph.inputs:
                last[named.get(name, name)] = index
            source = region.graph.inputs[0] if region.is_view else region.output
            named[region.output] = named.get(source, source)
        alive: list[list[Region]] = [[] for _ in laid.regions]
        for index, region in enumerate(laid.regions):
            for place in range(index, last.get(region.output, index) + 1) if not region.is_view else ():
                alive[place].append(region)
        read = {name: index for index, region in enumerate(laid.regions) for name in region.graph.inputs}
        return cls(tuple(map(tuple, alive)), {name: index for name, index in read.items() if name not in named})


def _resident(position: int, memory: str, laid: LayoutPlan, lives: _ValueLifetimes, homes: Mapping[str, str]) -> int:
    """Bytes of an engine's memory that values hold while the region at a position runs."""
    ends = [name for name, last in lives.ends.items() if last >= position and homes[name] == memory]
    held = [region.output for region in _resident_regions(position, memory, lives, homes)]
    return sum(laid.nbytes(name) for name in (*held, *ends))


def _resident_regions(position: int, memory: str, lives: _ValueLifetimes, homes: Mapping[str, str]) -> list[Region]:
    """The regions whose results lie in a memory while the region at a position runs, its own included."""
    return [region for region in lives.results[position] if homes[region.output] == memory]


def _placements(target: Target, timeline: Timeline) -> tuple[Placement, ...]:
    again = overwrites(timeline)
    seconds = {target.values: _EXACT_SECONDS}
    return tuple(allocate(memory, timeline, again, seconds.get(memory.name, 0.0)) for memory in target.memories)


def _as_placed(
    placements: Sequence[Placement],
    lowered: LoweredNetwork,
    dma: str,
    choice: _PlanningRound,
    paced: Sequence[Statement],
) -> tuple[tuple[Placement, ...], tuple[Statement, ...]]:
    """The placements, and the statements with no more waits than these need."""
    placed = {name: (place.memory, address) for place in placements for name, address in place.addresses.items()}
    statements = synchronise(lowered.statements, dma, choice.settle, placed=placed)
    where = [index for index, statement in enumerate(statements) if not isinstance(statement, Wait)]

    def moved(index: int) -> int:
        """Where the statement is now, or the one behind a wait that is gone."""
        before = sum(not isinstance(statement, Wait) for statement in paced[: max(index, 0)])
        return where[min(before, len(where) - 1)] if index >= 0 else index

    return tuple(replace(place, busiest=moved(place.busiest)) for place in placements), statements


def _room(target: Target, memory: str, reserved: Mapping[str, int]) -> int:
    return target.memory(memory).size - reserved.get(memory, 0)


def _alive(crowded: Placement, timeline: Timeline, room: int) -> list[Buffer]:
    """The buffers that crowd a memory, largest first: those in use together where it is busiest, if they alone are too
    many; else the highest one and all that may be in use together with it."""
    spans, order = timeline.spans, timeline.order
    placed = (timeline.buffers[name] for name in crowded.addresses)
    mine = sorted(placed, key=lambda buffer: (-buffer.nbytes, buffer.name))
    if crowded.lower_bound > room:
        return [buffer for buffer in mine if spans[buffer.name].covers(crowded.busiest)]
    top = max(mine, key=lambda buffer: (crowded.addresses[buffer.name] + buffer.nbytes, buffer.name)).name
    return [
        buffer
        for buffer in mine
        if buffer.name == top
        or not (order.before(spans[buffer.name], spans[top]) or order.before(spans[top], spans[buffer.name]))
    ]


def _relieve(
    alive: Sequence[Buffer], lowered: LoweredNetwork, choice: _PlanningRound, target: Target
) -> _PlanningRound | None:
    """Give up the largest early fetch that is in the way, else move the largest value away; None when there is none."""
    for buffer in alive:
        if lowered.fetches.get(buffer.name) in choice.early:
            return replace(choice, early=choice.early - {lowered.fetches[buffer.name]})
    for buffer in alive:
        if buffer.role is Role.VALUE and buffer.memory != target.values:
            return choice.moved({n for n, view in lowered.values.items() if view.buffer == buffer.name}, target.values)
    return None


def _program(
    lowered: LoweredNetwork, statements: Sequence[Statement], placements: Sequence[Placement], dma: str
) -> Program:
    laid, values = lowered.laid, lowered.values
    addresses = {name: address for placement in placements for name, address in placement.addresses.items()}
    addresses |= _constant_addresses(lowered, statements)
    buffers = {name: replace(buffer, address=addresses.get(name)) for name, buffer in lowered.buffers.items()}
    inputs = {name: values[name] for name in laid.graph.given}
    outputs = {name: values[name] for name in laid.graph.results}
    states = tuple(StateVariable(values[read], first) for read, _, first in laid.graph.kept)
    kept = [state.view for state in states]
    copying = [engine.name for engine in lowered.target.engines if engine.mirror]
    return Program(
        name=laid.graph.name,
        buffers=buffers,
        constants=lowered.contents(),
        statements=tuple(statements),
        layers=tuple(region.name for region in laid.regions),
        inputs=inputs,
        outputs=outputs,
        values=values,
        dma=dma,
        states=states,
        moves=mirror(statements, buffers, copying, [*inputs.values(), *kept], [*outputs.values(), *kept]),
    )


def _constant_addresses(lowered: LoweredNetwork, statements: Sequence[Statement]) -> dict[str, int]:
    """Where the constants lie that lists read: their words hold addresses, so these are at the end of the memory of the
    code, where no other is."""
    read = [view.buffer for s in statements if stream_of(s) for view in reads(s)]
    names = [name for name in dict.fromkeys(read) if lowered.buffers[name].role is Role.CONSTANT]
    memory, place, found = lowered.target.memory(lowered.target.code), 0, {}
    for name in reversed(names):
        place += -(-lowered.buffers[name].nbytes // IN_PLACE_ALIGNMENT) * IN_PLACE_ALIGNMENT
        found[name] = memory.base + memory.size - place
    return found


def _too_large(
    crowded: Placement, alive: Sequence[Buffer], short: int, target: Target, reserved: Mapping[str, int]
) -> PlanError:
    """The error of a network that does not fit, naming what is in memory at the busiest moment."""
    listing = ", ".join(f"{buffer.name} {buffer.nbytes}" for buffer in alive)
    taken, size = reserved.get(crowded.memory, 0), target.memory(crowded.memory).size
    further = f" for values and {taken} for code, constants and stacks," if taken else ""
    return PlanError(
        f"{crowded.memory} needs {crowded.peak} bytes{further} and has {size}: {short} bytes short",
        where=f"where it is fullest it holds {listing}",
        hint=f"a larger {crowded.memory}, a smaller input, or fewer channels in these layers",
    )
