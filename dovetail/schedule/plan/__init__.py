"""Plan: the memory of every value, the tiles of every region, their order, and addresses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail.errors import PlanError
from dovetail.program.ir import (
    Buffer,
    Program,
    Role,
    Statement,
    StateVariable,
    Wait,
    copy_queue,
    reads,
    stream_of,
)
from dovetail.program.synchronise import mirror, synchronise
from dovetail.records import Record
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.plan.allocate import Placement, allocate
from dovetail.schedule.plan.buffered import filled, with_buffers
from dovetail.schedule.plan.homes import ValueLifetimes, first_homes, same_bytes_as
from dovetail.schedule.plan.lifetimes import Timeline, crowded, overwrites
from dovetail.schedule.plan.lower import lower
from dovetail.schedule.plan.lowered import LoweredNetwork, LoweringCache
from dovetail.schedule.region import CoreGroup, EnginePart, Homes, Region
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.chain import ChainLink, ChainState, link, quickest, ways
from dovetail.schedule.tiles.tile import EARLY
from dovetail.schedule.tiles.tiling import CompleteTiling, TileCache, Tiling, complete
from dovetail.target.description import Target
from dovetail.target.engine import IN_PLACE_ALIGNMENT

_EXACT_SECONDS = 2.0
"""Deterministic solver time for placing activations; memories close to an engine only have to fit."""


class Plan(Record):
    """The program, with the memory its placement needs and could at best need."""

    program: Program
    placements: tuple[Placement, ...]
    tilings: Mapping[str, CompleteTiling]
    """By region name; of a region with shares, by the names of its parts."""


def plan(
    laid: LayoutPlan,
    target: Target,
    reserved: Mapping[str, int],
    near: Collection[str] = (),
    cores: Mapping[str, CoreGroup] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    tiles: TileCache | None = None,
    states_lowest: bool = False,
) -> Plan:
    """Place, tile, order and allocate.

    Values start out in the memory their engines work in; while that does not fit, the largest value or early fetch of
    constants is given up wherever it is too much.

    Args:
        laid: the network and how its values lie.
        target: the machine.
        reserved: bytes of each memory taken by code, constants and stack.
        near: inputs and outputs of the network that shall lie in the engines' memory, not in that of values.
        cores: the group of cores that computes each value, in a pipeline; None without one.
        progress: told whose tiles are looked for.
        tiles: tilings of the regions that were looked at before.
        states_lowest: whether states lie at the start of their memory, as in another program with the same states.

    Raises:
        PlanError: the network does not fit; says which region or memory, and by how much.
    """
    check_reserved(laid.regions, target, reserved)
    early = (region.name for region in laid.regions if region.shares and region.choice.get(EARLY, "yes") == "yes")
    choice = _PlanningRound(first_homes(laid, target, near), frozenset(early))
    planner = _Planner(laid, target, reserved, cores or {}, (tiles or TileCache()).again(progress), states_lowest)
    while True:
        stuck = planner.tile(choice)
        if stuck is not None:
            choice = planner.spilled(*stuck, choice)
            continue
        lowered = planner.lowered(choice)
        if (sooner := planner.surely_crowded(lowered, choice)) is not None:
            choice = sooner
            continue
        draft = planner.draft(lowered, choice)
        crowded = next((p for p in draft.placements if p.peak > planner.room(p.memory)), None)
        if crowded is None:
            return planner.finish(draft, choice)
        if not choice.paced and planner.may_pace:
            choice = replace(choice, paced=True)
        else:
            choice = planner.relieved(crowded, draft, choice)


def check_reserved(regions: Sequence[Region], target: Target, reserved: Mapping[str, int]) -> None:
    """Raise PlanError, with the layers that weigh most, where a memory does not even hold what is reserved in it."""
    for name, taken in reserved.items():
        size = target.memory(name).size
        if taken <= size:
            continue
        weights = [(sum(a.nbytes for a in r.graph.constants.values()), r.name) for r in regions]
        heaviest = ", ".join(f"{layer} {count}" for count, layer in sorted(weights, reverse=True)[:3] if count)
        narrower = "narrower weights (dovetail quantize --weights int4), " if target.quantisation.packed else ""
        raise PlanError(
            f"{name} has {size} bytes, and constants, code and stacks take {taken}: {taken - size} bytes short",
            where=f"{target.name}; the layers that weigh most: {heaviest or 'none'}",
            hint=f"a larger {name}, {narrower}or a smaller network",
        )


class _PlanningRound(Record):
    """The homes of values and how close layers follow each other; each round gives up something, so planning ends."""

    homes: Homes
    """Memory of every value."""
    early: frozenset[str]
    """Regions whose constants are fetched while the region before is computed."""
    settle: bool = False
    """Whether every layer finishes before the next begins, so that their buffers may share memory."""
    paced: bool = False
    """Whether copies wait for what a queue of two launches has behind it, so that they may share its memory."""
    smallest: frozenset[str] = frozenset()
    """Parts whose tiles may be far smaller than the engine's steps, for want of memory."""
    withheld: int = 0
    """Bytes of the engines' memory that tiles may not use, because neighbouring tiles could not be laid together."""

    def moved(self, values: Collection[str], memory: str) -> _PlanningRound:
        """The choice with some values in another memory."""
        homes = {name: memory if name in values else home for name, home in self.homes.items()}
        return replace(self, homes=homes)


class _DraftPlan(Record):
    """A round's program before it is known to fit."""

    lowered: LoweredNetwork
    statements: tuple[Statement, ...]
    timeline: Timeline
    placements: tuple[Placement, ...]


@dataclass
class _Planner:
    """A network while it is planned."""

    laid: LayoutPlan
    target: Target
    reserved: Mapping[str, int]
    cores: Mapping[str, CoreGroup]
    tiles: TileCache
    states_lowest: bool
    parts: LoweringCache = field(default_factory=LoweringCache)
    tilings: dict[str, CompleteTiling] = field(default_factory=dict)
    """By name of the part, as of the last round."""
    tiled: _PlanningRound | None = None
    """The round the tilings are of."""
    alone: list[list[tuple[EnginePart, Tiling, int]]] = field(default_factory=list)
    """By region, of the first ones: the tiling of each part by itself, and the bytes free for it."""
    asked: _PlanningRound | None = None
    """The round these are of."""

    def __post_init__(self) -> None:
        self.lives, self.dma = ValueLifetimes.of(self.laid), copy_queue(self.target)
        self.makers = {region.output: place for place, region in enumerate(self.laid.regions)}

    def room(self, memory: str) -> int:
        """Bytes of a memory that are not reserved."""
        return self.target.memory(memory).size - self.reserved.get(memory, 0)

    def tile(self, choice: _PlanningRound) -> tuple[EnginePart, PlanError] | None:
        """Choose the tilings of all regions; the first part there is no room for, with its error."""
        if self.tiled is not None and replace(self.tiled, settle=choice.settle, paced=choice.paced) == choice:
            return None  # these do not matter to tiles
        self.tiled = choice
        del self.alone[self._unchanged(choice) :]
        self.asked = choice
        for position, region in enumerate(self.laid.regions[len(self.alone) :], len(self.alone)):
            taken, own = dict[str, int](), list[tuple[EnginePart, Tiling, int]]()
            for part in region.parts:
                memory = part.engine.memory
                free = self.room(memory) - self.lives.nbytes(position, memory, choice.homes)
                budget = free - choice.withheld - taken.get(memory, 0)
                try:
                    smallest = part.name in choice.smallest
                    tiling = choose_tiling(part, self.target, choice.homes, budget, self.tiles, smallest)
                except PlanError as error:
                    return part, error
                taken[memory] = taken.get(memory, 0) + tiling.estimate.nbytes
                own.append((part, tiling, budget))
            self.alone.append(own)
        return self._in_chains(self.alone, choice.early)

    def _unchanged(self, choice: _PlanningRound) -> int:
        """The first regions whose parts are cut by themselves as in the last round: how many there are."""
        last = self.asked
        if last is None or last.withheld != choice.withheld:
            return 0
        moved = (name for name, home in choice.homes.items() if last.homes[name] != home)
        finer = choice.smallest ^ last.smallest
        smaller = {part.output for own in self.alone if finer for part, _, _ in own if part.name in finer}
        return min((self.makers.get(name, 0) for name in (*moved, *smaller)), default=len(self.alone))

    def _in_chains(
        self, tilings: Sequence[Sequence[tuple[EnginePart, Tiling, int]]], early: Collection[str]
    ) -> tuple[EnginePart, PlanError] | None:
        """Choose the tilings of parts one behind the other together; the first without one, with its error.

        Args:
            tilings: of each region's parts, each by itself, and the bytes free for it.
            early: as of the round.
        """
        chain: list[tuple[EnginePart, list[ChainLink]]] = []
        for region, own in zip(self.laid.regions, tilings, strict=True):
            for part, tiling, budget in own:
                follows = bool(chain) and len(region.shares) == 1 and part.engine is chain[-1][0].engine
                if follows and region.name in early:
                    chain.append((part, list(ways(self.tiles.of(part, self.target), tiling, budget))))
                    continue
                if stuck := self._complete(chain):
                    return stuck
                chain = [(part, [link(part, tiling)])]
            if not (region.shares or region.is_view):
                if stuck := self._complete(chain):
                    return stuck
                chain = []
        return self._complete(chain)

    def _complete(self, chain: Sequence[tuple[EnginePart, Sequence[ChainLink]]]) -> tuple[EnginePart, PlanError] | None:
        """Choose the tilings of parts one behind the other, so that all of them end first."""
        if not chain:
            return None
        first = ChainState.first(chain[0][0].engine, self.target.core.statements)
        for (part, options), chosen in zip(chain, quickest(first, [options for _, options in chain]), strict=True):
            for one in dict.fromkeys((chosen, options[0])):  # an engine may not take the last tile of a way
                try:
                    timed = self.tiles.of(part, self.target).timed(one.tiling)
                    self.tilings[part.name] = complete(part, timed, self.tilings.get(part.name))
                    break
                except PlanError as error:
                    stuck = part, error
            else:
                return stuck
        return None

    def spilled(self, part: EnginePart, error: PlanError, choice: _PlanningRound) -> _PlanningRound:
        """Move the largest value that is in the way of a part out of its engine's memory; where none is, allow
        the smallest tiles. Raises the error of these."""
        self.tiled = None
        inside, memory = self.laid.inside, part.engine.memory
        resident = self.lives.resident(self.makers[part.output], memory, choice.homes)
        if not resident or memory == self.target.values:
            if part.name in choice.smallest:
                raise error
            return replace(choice, smallest=choice.smallest | {part.name})
        _, largest = max((self.laid.nbytes(region.output), region.output) for region in resident)
        outer = inside[largest].outer if largest in inside else largest
        names = {outer, *(value for value, place in inside.items() if place.outer == outer)}
        return choice.moved(
            {same for name in names for same in same_bytes_as(name, self.laid.regions)}, self.target.values
        )

    def lowered(self, choice: _PlanningRound) -> LoweredNetwork:
        """The statements of a round."""
        return lower(self.laid, self.tilings, self.target, choice.homes, choice.early, self.cores, self.parts)

    def surely_crowded(self, lowered: LoweredNetwork, choice: _PlanningRound) -> _PlanningRound | None:
        """The next round, where a memory is too small even without waits and with the best addresses; None where that
        is not certain, or where nothing can be given up. Every stretch of statements that is too much for a memory
        gives up something at once. It saves most rounds a draft."""
        rooms = [(memory, self.room(memory.name)) for memory in self.target.memories]
        given_up, eased = choice, set[str]()
        for memory, alive in crowded(lowered.statements, lowered.buffers, rooms, self.dma):
            is_short = memory.name == self.target.values and not _has_tiles(alive)
            if is_short or any(one.name in eased for one in alive):
                continue  # what is given up elsewhere may be enough here
            if (more := self._given_up(alive, lowered, given_up)) is not None:
                given_up, eased = more, eased | {one.name for one in alive}
        return None if given_up is choice else replace(given_up, paced=choice.paced or self.may_pace)

    @property
    def may_pace(self) -> bool:
        """Whether copies may wait for launches."""
        return bool(self.target.dma and self.target.engines)

    def draft(self, lowered: LoweredNetwork, choice: _PlanningRound) -> _DraftPlan:
        """The program of a round, with addresses as if every memory were as large as need be; without where it would
        be paced for want of memory."""
        statements = synchronise(lowered.statements, self.dma, choice.settle, choice.paced, apart=bool(self.cores))
        timeline = Timeline(statements, lowered.buffers, self.dma)
        again, seconds = overwrites(timeline), {self.target.values: _EXACT_SECONDS}
        memories = self.target.memories
        limits = {} if choice.paced or not self.may_pace else {one.name: self.room(one.name) for one in memories}
        states = [lowered.values[read].buffer for read, _, _ in self.laid.graph.kept if self.states_lowest]
        placements = (
            allocate(one, timeline, again, seconds.get(one.name, 0.0), states, limits.get(one.name)) for one in memories
        )
        return _DraftPlan(lowered, statements, timeline, tuple(placements))

    def relieved(self, crowded: Placement, draft: _DraftPlan, choice: _PlanningRound) -> _PlanningRound:
        """The next round, which needs less of a memory that is too small; raises PlanError when nothing is left to give
        up."""
        room = self.room(crowded.memory)
        alive, short = _alive(crowded, draft.timeline, room), crowded.peak - room
        has_tiles = _has_tiles(alive)
        # an engine that works in the memory of values has buffers beside them that can give way
        if crowded.memory == self.target.values and not has_tiles:
            raise self._too_large(crowded, alive, short)
        if (given_up := self._given_up(alive, draft.lowered, choice)) is not None:
            return given_up
        if not choice.settle:
            return replace(choice, settle=True)
        if not has_tiles or choice.withheld > room:
            raise self._too_large(crowded, alive, short)
        return replace(choice, withheld=choice.withheld + short)

    def _given_up(
        self, alive: Sequence[Buffer], lowered: LoweredNetwork, choice: _PlanningRound
    ) -> _PlanningRound | None:
        """The round without the first fetch ahead, or else the first value near its engines, of some buffers."""
        for buffer in alive:
            region = lowered.fetches.get(buffer.name)
            if region in choice.early:
                return replace(choice, early=choice.early - {region})
        for buffer in alive:
            if buffer.role is Role.VALUE and buffer.memory != self.target.values:
                values = {name for name, view in lowered.values.items() if view.buffer == buffer.name}
                return choice.moved(values, self.target.values)
        return None

    def _too_large(self, crowded: Placement, alive: Sequence[Buffer], short: int) -> PlanError:
        """The error of a network that does not fit, naming the buffers in memory at the busiest moment."""
        listing = ", ".join(f"{buffer.name} {buffer.nbytes}" for buffer in alive)
        taken, size = self.reserved.get(crowded.memory, 0), self.target.memory(crowded.memory).size
        further = f" for values and {taken} for code, constants and stacks," if taken else ""
        return PlanError(
            f"{crowded.memory} needs {crowded.peak} bytes{further} and has {size}: {short} bytes short",
            where=f"where it is fullest it holds {listing}",
            hint=f"a larger {crowded.memory}, a smaller input, or fewer channels in these layers",
        )

    def finish(self, draft: _DraftPlan, choice: _PlanningRound) -> Plan:
        """The plan of a round that fits; where copies were paced, with no more waits than the placement needs."""
        lowered, statements, placements = draft.lowered, draft.statements, draft.placements
        addresses = {name: address for placement in placements for name, address in placement.addresses.items()}
        if choice.paced:
            placed = {name: (lowered.buffers[name].memory, address) for name, address in addresses.items()}
            statements = synchronise(lowered.statements, self.dma, choice.settle, placed=placed)
            placements = _as_synchronised(placements, draft.statements, statements)
        addresses |= _constant_addresses(lowered, statements)
        buffers = {name: replace(buffer, address=addresses.get(name)) for name, buffer in lowered.buffers.items()}
        graph, values = self.laid.graph, lowered.values
        inputs = {name: values[name] for name in graph.given}
        outputs = {name: values[name] for name in graph.results}
        states = tuple(StateVariable(values[read], first) for read, _, first in graph.kept)
        kept = [state.view for state in states]
        copying = [engine.name for engine in self.target.engines if engine.mirror]
        program = Program(
            name=graph.name,
            buffers=buffers,
            constants=lowered.contents(),
            statements=statements,
            layers=tuple(region.name for region in self.laid.regions),
            inputs=inputs,
            outputs=outputs,
            values=values,
            dma=self.dma,
            states=states,
            moves=mirror(statements, buffers, copying, [*inputs.values(), *kept], [*outputs.values(), *kept]),
        )
        offloads = {
            (place, one.engine.name): one.offload for place, r in enumerate(self.laid.regions) for one in r.shares
        }
        program = with_buffers(program, self.target, offloads)
        return Plan(program, filled(placements, program, self.target), self.tilings)


def _has_tiles(alive: Sequence[Buffer]) -> bool:
    return any(one.role in (Role.TILE, Role.SCRATCH) for one in alive)


def _alive(crowded: Placement, timeline: Timeline, room: int) -> list[Buffer]:
    """The buffers that crowd a memory, largest first: those in use together where it is busiest, if they alone are too
    many; else the highest one and all that may be in use together with it."""
    spans, order = timeline.spans, timeline.order
    placed = (timeline.buffers[name] for name in crowded.addresses)
    mine = sorted(placed, key=lambda buffer: (-buffer.nbytes, buffer.name))
    if crowded.lower_bound > room:
        return [buffer for buffer in mine if spans[buffer.name].covers(crowded.busiest)]
    top = max(mine, key=lambda buffer: (crowded.addresses[buffer.name] + buffer.nbytes, buffer.name)).name
    return [buffer for buffer in mine if buffer.name == top or not order.apart(spans[buffer.name], spans[top])]


def _as_synchronised(
    placements: Sequence[Placement], before: Sequence[Statement], after: Sequence[Statement]
) -> tuple[Placement, ...]:
    """Placements with their busiest statement as a place in the same statements with fewer waits."""
    where = [index for index, statement in enumerate(after) if not isinstance(statement, Wait)]

    def moved(index: int) -> int:
        """The place of the statement now, or of the one behind a wait that is gone."""
        count = sum(not isinstance(statement, Wait) for statement in before[: max(index, 0)])
        return where[min(count, len(where) - 1)] if index >= 0 else index

    return tuple(replace(place, busiest=moved(place.busiest)) for place in placements)


def _constant_addresses(lowered: LoweredNetwork, statements: Sequence[Statement]) -> dict[str, int]:
    """Addresses of the constants that lists read: their words hold addresses, so these are at the end of the memory of
    the code, where no other is."""
    read = [view.buffer for s in statements if stream_of(s) for view in reads(s)]
    names = [name for name in dict.fromkeys(read) if lowered.buffers[name].role is Role.CONSTANT]
    memory, place, addresses = lowered.target.memory(lowered.target.code), 0, {}
    for name in reversed(names):
        place += -(-lowered.buffers[name].nbytes // IN_PLACE_ALIGNMENT) * IN_PLACE_ALIGNMENT
        addresses[name] = memory.base + memory.size - place
    return addresses
