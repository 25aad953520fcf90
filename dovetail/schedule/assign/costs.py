"""Candidates of a layer, and their costs: cycles of engines, DMA and core, and of what lies between two regions.

Engine cycles are the target's own formula, by way of the tiling the planner would choose with the values in the
engine's memory; those of DMAs, launches and kernels are of `dovetail.timing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.ir.graph import Graph
from dovetail.ir.layout import same_bytes
from dovetail.program.ir import CORE, Queue, copy_queue
from dovetail.records import Record
from dovetail.schedule.cores import copies, cores_cycles, dense_views
from dovetail.schedule.region import AssignedRegion, EnginePart, LaidRegion, Region, engine_layouts
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.tiling import TileCache, Tiling, first_constants
from dovetail.target.description import Target
from dovetail.timing.clock import EngineQueue, Issuer, start_cycles
from dovetail.timing.transfers import copy_cost, relayout_cost


class QueueUse(Record):
    """A stretch of time in which a step keeps a queue busy."""

    queue: Queue
    offset: int
    """Cycles after the step's beginning."""
    length: int


ALL_ROOM = 1000
"""An engine's room for constants that wait, in thousandths."""


class CandidateStep(Record):
    """One region as a candidate computes it."""

    region: AssignedRegion
    cycles: int
    """From its beginning to its end."""
    uses: tuple[QueueUse, ...]
    fetch: int = 0
    """Cycles the DMA fetches constants before, when there is room for them."""
    launch: int = 0
    """Cycles the core starts it, when its operands are there and at any time before it begins: engines have queues."""
    issuing: int = 0
    """Cycles after its beginning in which its last tile is started."""
    taken: int = 0
    """Cycles after its beginning in which an engine takes the next: at its end where that holds nothing that waits."""
    engines: tuple[str, ...] = ()
    """The engines it is started on that work on by themselves."""
    filled: tuple[int, ...] = ()
    """Thousandths of each engine's room for constants that wait, which the step's own take until it begins."""

    @property
    def alone(self) -> int:
        """Cycles where nothing else is under way: constants are fetched, it is started, and it computes."""
        return self.fetch + self.launch + self.cycles


class Candidate(Record):
    """A way of computing a layer."""

    place: str
    """An engine, several joined by "+", "core", or one of these "then" another."""
    steps: tuple[CandidateStep, ...]
    """In order, one after the other."""

    @property
    def cycles(self) -> int:
        """Cycles of the layer by itself."""
        return sum(step.cycles for step in self.steps)

    @property
    def members(self) -> frozenset[str]:
        """Names of all who take part."""
        return frozenset(name for step in self.steps for name in step.region.place.split("+"))


class LayerOptions(Record):
    """A layer as the partition found it, and what else could compute it."""

    region: Region
    candidates: tuple[Candidate, ...]
    """At least one; the order is that of the target's engines, then several together, then the core."""
    refused: Mapping[str, str]
    """Engine -> why it does not take it."""
    after: tuple[int, ...]
    """The layers whose results it reads."""
    delays: Mapping[tuple[int, int, int], int]
    """LayerOptions it reads from, that one's candidate, its own -> cycles between the two, where there are any."""
    pinned: str = ""
    """The place the user wants it in; empty for no wish."""
    passed_over: tuple[Candidate, ...] = ()
    """The other candidates, which that wish rules out."""


class PlacementReason(Record):
    """Why one layer is where it is, and its costs elsewhere."""

    candidates: tuple[tuple[str, int], ...]
    """Each place, and its cycles for this layer alone."""
    refused: Mapping[str, str]
    """Engine -> why it does not take it."""
    why: str
    """Why it is where it is."""


class Schedule(Record):
    """A candidate and a time for every layer."""

    picks: tuple[int, ...]
    """The candidate of each layer."""
    launches: tuple[tuple[int, ...], ...]
    """By layer and step, the cycle in which the core starts it."""
    starts: tuple[tuple[int, ...], ...]
    """By layer and step, the cycle in which it begins."""
    finish: int
    """Cycle in which everything has been computed."""


_MOST_LAUNCHES = 16
"""Launches of a step the schedule makes room for on the core one by one."""


class RegionCosts(Record):
    """The costs of computing regions of a network on a target."""

    graph: Graph
    target: Target
    far: bool = False
    """Whether no value lies in the engine's memory, as where that holds no tile beside one."""
    quick: bool = False
    """Whether the first tiles that fit will do: the costs are then upper bounds, and soon found."""

    def candidate(
        self,
        layer: str,
        regions: Sequence[Region],
        cache: TileCache | None = None,
        alike: Sequence[CandidateStep] = (),
    ) -> Candidate:
        """A layer computed as some regions, which get its name; `cache` as of `step`, whose answers `alike` has for
        other regions."""
        names = [layer] if len(regions) == 1 else [f"{layer}_{number}" for number in range(len(regions))]
        own = [replace(region, name=name) for region, name in zip(regions, names, strict=True)]
        places = dict.fromkeys(region.place for region in own if not region.is_idle)

        def step(region: Region) -> CandidateStep:
            known = next((one for one in alike if costs_alike(one.region, region)), None)
            return replace(known, region=AssignedRegion.of(region)) if known else self.step(region, cache)

        return Candidate(" then ".join(places), tuple(map(step, own)))

    def step(self, region: Region, cache: TileCache | None = None) -> CandidateStep:
        """The cost of computing a region.

        Args:
            region: one as it shall be computed, its shares included.
            cache: tiles of the network's regions, if there is one; new answers are added.

        Raises:
            PlanError: an engine's memory does not hold its smallest tile.
        """
        region, target = AssignedRegion.of(region), self.target
        if region.shares:
            return self._on_engines(region, cache)
        if region.is_idle:
            return CandidateStep(region, 0, ())
        queue, launch = CORE, 0
        if not region.copied_by:
            cycles = cores_cycles(region.graph, target, region.choice, region.cores)
        elif region.graph.nodes[0].operator.joins:  # its operands lie inside it, as a rule
            return CandidateStep(region, 0, ())
        else:
            cost = copy_cost(target.dma, copies(0, region.graph, *dense_views(region.graph)) or ())
            queue, cycles, launch = copy_queue(target), cost.cycles, target.core.statements.copy * cost.starts
        return CandidateStep(region, cycles, (QueueUse(queue, 0, cycles),), launch=launch)

    def _on_engines(self, region: AssignedRegion, cache: TileCache | None) -> CandidateStep:
        """All parts at the same time, as far as the core can start them; the DMA brings operands as the step begins."""
        parts, target = LaidRegion.of(region).parts, self.target
        tilings = [self._tiling(part, parts, cache) for part in parts]
        uses, engines, filled = list[QueueUse](), list[str](), list[int]()
        core, launches = Issuer.of_list(), 0
        for part, tiling in zip(parts, tilings, strict=True):
            if not part.engine.wait:
                uses.append(QueueUse(CORE, 0, tiling.ready_cycles))
                continue
            tiles, begin = tiling.estimate.tiles, core.now
            end = EngineQueue(1, 0).launch(core, tiling.ready_cycles, tiling.estimate.starting // tiles)
            uses.append(QueueUse(Queue(part.engine.name), begin, end - begin))
            engines.append(part.engine.name)
            filled.append(self._filled(part, tiling, tiles))
            launches = max(launches, tiles)
        held, moving = sum(one.estimate.starting for one in tilings), sum(one.estimate.moving for one in tilings)
        if target.dma and moving:
            uses.append(QueueUse(copy_queue(target), 0, moving))
        cycles = max(use.offset + use.length for use in uses)
        launch = sum(start_cycles(part.engine, target.core.statements) for part in parts)
        most = min(launches, _MOST_LAUNCHES)
        for number in range(0 if held else 1, most):
            uses.append(QueueUse(CORE, number * cycles // most, min(held, cycles) // most if held else launch))
        issuing = (launches - 1) * cycles // launches if launches else 0
        taken = cycles if any(part.engine.queue == 1 for part in parts) else issuing
        return CandidateStep(
            region,
            cycles,
            tuple(uses),
            _fetching(parts, tilings),
            launch if launches else 0,
            issuing,
            taken,
            tuple(engines),
            tuple(filled),
        )

    def _tiling(self, part: EnginePart, parts: Sequence[EnginePart], cache: TileCache | None) -> Tiling:
        """The tiling the planner would choose with the values in the first part's memory, where each has its share."""
        ends = {*self.graph.inputs, *self.graph.outputs}
        values = (*part.graph.inputs, part.output)
        near, far = parts[0].engine.memory, self.target.values
        homes = {name: far if self.far or name in ends else near for name in values}
        budget = self.target.memory(part.engine.memory).size // len(parts)
        return choose_tiling(part, self.target, homes, budget, cache, quick=self.quick)

    def _filled(self, part: EnginePart, tiling: Tiling, tiles: int) -> int:
        """Thousandths of the room for constants that wait which a part's take: half of the engine's memory for them.
        All of it where more are fetched while it computes, or values lie there too."""
        if not tiling.estimate.fetching:
            return 0
        if not part.engine.constants or tiles > 1:
            return ALL_ROOM
        nbytes = sum(map(len, first_constants(part, tiling)))
        return min(-(-2 * nbytes * ALL_ROOM // self.target.memory(part.engine.constants).size), ALL_ROOM)

    def around(self, candidate: Candidate, makers: Mapping[str, Region], readers: Mapping[str, list[Region]]) -> int:
        """Cycles of relayouts between a layer computed so and its neighbours as they are."""
        regions = [step.region for step in candidate.steps]
        last = regions[-1]
        before = ((value, makers[value], one) for one in regions for value in one.graph.inputs if value in makers)
        after = ((last.output, last, one) for one in readers.get(last.output, ()))
        return sum(border(*pair, self.target) for pair in (*before, *after))


def costs_alike(one: Region, other: Region) -> bool:
    """Whether two regions of a layer, each of one engine's, cost the same, since the target's functions are asked the
    same: their offloads differ in name and pattern only, and bind the same values and operators."""
    if one.offload is None or other.offload is None or len(one.shares) > 1 or len(other.shares) > 1:
        return False
    if replace(other.offload, name=one.offload.name, pattern=one.offload.pattern) != one.offload:
        return False
    graphs, matches = (one.graph, other.graph), (one.match, other.match)
    bound = [(match.values, match.nodes, match.root) for match in matches if match]
    same = bound[0] == bound[1] and graphs[0].types == graphs[1].types and graphs[0].nodes == graphs[1].nodes
    same = same and one.place == other.place and AssignedRegion.of(one).choice == AssignedRegion.of(other).choice
    return same and all(graphs[1].constants.get(name) is array for name, array in graphs[0].constants.items())


def _fetching(parts: Sequence[EnginePart], tilings: Sequence[Tiling]) -> int:
    """Parts that read the same constants from one memory share them."""
    if len(parts) == 1:
        return tilings[0].estimate.fetching
    pairs = zip(parts, tilings, strict=True)
    each = {(p.engine.constants_memory, first_constants(p, one)): one.estimate.fetching for p, one in pairs}
    return sum(each.values())


def border(value: str, maker: Region, reader: Region, target: Target) -> int:
    """Cycles between two regions: of relayouts, and of copies from one engine's memory to another's.

    Args:
        value: what one makes and the other reads.
        maker: with an engine or without.
        reader: likewise.
        target: the machine.
    """
    kind = maker.graph.types[value]
    lies, wanted = engine_layouts(maker).get(value), engine_layouts(reader).get(value)
    cycles = 0
    if not _is_flexible(maker) and not _is_flexible(reader) and not same_bytes(lies, wanted, kind.shape):
        cycles += relayout_cost(target.dma, kind, lies, wanted).cycles
    if len({region.engine.memory for region in (maker, reader) if region.engine is not None}) == 2:
        cycles += relayout_cost(target.dma, kind, lies, lies).cycles
    return cycles


def _is_flexible(region: Region) -> bool:
    """True for what may keep the layout its values come in: the layout stage has the last word."""
    if region.shares:
        return False
    if region.copied_by:
        operator = region.graph.nodes[0].operator
        return operator.joins or operator.pads
    return all(region.graph.types[name].shape == region.shape for name in region.graph.inputs)
