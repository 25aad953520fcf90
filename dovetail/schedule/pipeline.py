"""Pipeline: the network in stages, each for a group of cores, that work on successive inputs at the same time.

The cores of a group share its layers. The stages are cut so that each takes as long as the others, if need be within a
layer: the stage before computes the first rows of its result, the one behind the others. What one stage leaves for
the next is a state: so one step of the pipeline is a network as any, in which no stage reads what another one computes.
The cores of a stage wait for one another, and nobody for another stage before the end. Between an input and its outputs
lie as many steps as there are stages but one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from dovetail.errors import PlaceError, ProgramError, TargetError
from dovetail.ir.crop import part
from dovetail.ir.graph import Graph, Node, evaluate_all, prune
from dovetail.ir.operators.movement import Concat, Reshape
from dovetail.ir.types import Array, Box, frozen, full_box, with_span
from dovetail.records import Record
from dovetail.schedule.assign.pins import pinned_cores, resolve
from dovetail.schedule.cores import cores_cycles, stretch_axis
from dovetail.schedule.partition import partition
from dovetail.schedule.region import CoreGroup, Region
from dovetail.target.description import Target
from dovetail.timing.kernels import core_cycles
from dovetail.timing.transfers import relayout_cost


class PipelineBuilder:
    """Collects the nodes of each stage, in the order of the network, and gives one step of the pipeline.

    Args:
        graph: the network, without states.
        count: of stages.
    """

    def __init__(self, graph: Graph, count: int) -> None:
        self._graph, self._last = graph, count - 1
        self._nodes: list[list[Node]] = [[] for _ in range(count)]
        self._types, self._constants = dict(graph.types), dict(graph.constants)
        self._stage = dict.fromkeys(graph.inputs, 0)
        """The stage that has each value first."""
        self._names: dict[str, str] = {}
        """Values that have another name there."""
        self._states: dict[tuple[str, int], tuple[str, str]] = {}
        """Value and stage -> the state it is read from there, and what the state becomes."""

    def kept_bytes(self, stage: int) -> int:
        """Bytes that a stage leaves for the next one."""
        return sum(self._types[read].nbytes for (_, to), (read, _) in self._states.items() if to == stage + 1)

    def add(self, nodes: Sequence[Node], stage: int) -> None:
        """Add nodes to a stage."""
        for node in nodes:
            ahead = node.output in self._graph.outputs and stage != self._last
            self._names[node.output] = f"{node.output} ahead" if ahead else node.output
            self._stage[node.output] = stage
            inputs = tuple(self._at(value, stage) for value in node.inputs)
            self._nodes[stage].append(replace(node, inputs=inputs, output=self._names[node.output]))

    def add_parts(self, region: Graph, parts: Sequence[tuple[int, Box]]) -> None:
        """Add a region of which each of several stages, in their order, computes a box.

        Raises:
            ValueError: it cannot be computed in such parts; nothing has been added.
        """
        (output,) = region.outputs
        cuts = [part(region, {output: box}, f" for {output} in stage {stage}") for stage, box in parts]
        for cut, (stage, _) in zip(cuts, parts, strict=True):
            self._types.update(cut.types)
            self._constants.update(cut.constants)
            self.add(cut.nodes, stage)
        joined = Concat(stretch_axis(self._graph.types[output])[0])
        self.add([Node(joined, tuple(cut.outputs[0] for cut in cuts), output, region.nodes[-1].origin)], parts[-1][0])

    def finish(self) -> tuple[Graph, dict[str, int]]:
        """One step, and the stage of every computed value."""
        for name in self._graph.outputs:
            if self._stage[name] != self._last:
                copy = Node(Reshape(self._graph.types[name].shape), (self._at(name, self._last),), name)
                self._nodes[self._last].append(copy)
        stages = {node.output: stage for stage, nodes in enumerate(self._nodes) for node in nodes}
        reads = tuple(read for read, _ in self._states.values())
        step = replace(
            self._graph,
            inputs=(*self._graph.inputs, *reads),
            outputs=(*self._graph.outputs, *(written for _, written in self._states.values())),
            nodes=tuple(node for nodes in self._nodes for node in nodes),
            types={**self._types, **{self._names.get(n, n): kind for n, kind in self._types.items()}},
            constants=self._constants,
            states=tuple(
                frozen(np.zeros(kind.shape, kind.dtype.numpy)) for kind in map(self._types.__getitem__, reads)
            ),
        )
        return prune(step), stages

    def _at(self, value: str, stage: int) -> str:
        """The name under which a stage finds a value."""
        if value in self._constants:
            return value
        name = self._names.get(value, value)
        for later in range(self._stage[value] + 1, stage + 1):
            if (value, later) not in self._states:
                self._states[value, later] = self._state(value, later, name)
            name = self._states[value, later][0]
        return name

    def _state(self, value: str, stage: int, before: str) -> tuple[str, str]:
        """A state of a stage that becomes what the stage before has under a name: a computed value, or a copy."""
        read, kind = f"{value} of stage {stage}", self._types[value]
        self._types[read] = kind
        if any(node.output == before for node in self._nodes[stage - 1]):
            return read, before
        copy = f"{value} for stage {stage}"
        self._types[copy] = kind
        self._nodes[stage - 1].append(Node(Reshape(kind.shape), (before,), copy))
        return read, copy


class Stage(Record):
    """The part of the network that a group of cores computes, for every input."""

    cores: CoreGroup
    layers: tuple[str, ...]
    """Names of the layers, in order."""
    share: float
    """Part of all work, by estimate."""
    cycles: int
    """Cycles of its kernels, by estimate."""
    kept_bytes: int
    """Bytes of states it leaves for the next stage."""


class Pipeline(Record):
    """A network in stages."""

    graph: Graph
    """One step."""
    cores: Mapping[str, CoreGroup]
    """The cores that share each value's computation."""
    stages: tuple[Stage, ...]
    regions: tuple[Region, ...]
    """The partition of the step."""
    interval: int = 0
    """Cycles from one input to the next: by the clock once the step has been planned, else of kernels and copies."""

    @property
    def delay(self) -> int:
        """Steps between an input and its outputs."""
        return len(self.stages) - 1

    def describe(self) -> str:
        """Words for who does what, and when."""
        parts = []
        for stage in self.stages:
            names = " to ".join(dict.fromkeys(stage.layers[:: max(1, len(stage.layers) - 1)])) or "nothing"
            who = f"core {stage.cores[0]} does" if len(stage.cores) == 1 else f"cores {_listed(stage.cores)} do"
            parts.append(f"{who} {names} ({100 * stage.share:.1f} % of the work)")
        latency = self.interval * len(self.stages)
        times = f"an input every {self.interval:,} cycles by estimate, its outputs {latency:,} cycles later"
        return f"a pipeline of {len(self.stages)} stages: {', '.join(parts)}; {times}"

    def to_json(self) -> list[dict[str, Any]]:
        """The stages as plain values, keys as the fields of `Stage`."""
        return [asdict(stage) for stage in self.stages]


def _listed(cores: CoreGroup) -> str:
    """Numbers of cores in words."""
    return " and ".join(filter(None, (", ".join(map(str, cores[:-1])), str(cores[-1]))))


def pipelined(graph: Graph, target: Target, pins: Mapping[str, str]) -> Pipeline:
    """The network in stages, each for a group of cores.

    Layers pinned to cores are computed by them; the groups that pins name are stages, in the order of their layers. Of
    the cores that no pin names, and of the layers no pin names, the stages that give the shortest time between inputs
    are searched for, and of those nearly as short the fewest, whose outputs come first.

    Raises:
        TargetError: the target has one core or engines, or the network keeps states of its own.
        PlaceError: pins name what is not there, or give a core two stages.
    """
    _refuse(graph, target)
    regions = partition(graph, target)
    wishes = {name: pinned_cores(wish) for name, wish in resolve(pins, regions, target).items()}
    own = [wishes.get(region.name, ()) for region in regions]
    found = []
    for groups in _ways(own, target):
        costs = [[0.0 if r.is_idle else cores_cycles(r.graph, target, cores=one) for r in regions] for one in groups]
        for turn in range(_CORRECTIONS):
            cuts = _balanced(groups, own, costs)
            made = _staged(graph, target, regions, groups, cuts)
            found += [made] if turn else [made, _staged(graph, target, regions, groups, [*map(round, cuts)])]
            mean = sum(stage.cycles for stage in made.stages) / len(groups) or 1
            costs = [
                [cycles * stage.cycles / mean for cycles in each]
                for each, stage in zip(costs, made.stages, strict=True)
            ]
    shortest = min(one.interval for one in found)
    near = [one for one in found if one.interval <= _NEAR * shortest]
    return min(near, key=lambda one: (len(one.stages), one.interval))


def _staged(
    graph: Graph, target: Target, regions: Sequence[Region], groups: Sequence[CoreGroup], cuts: Sequence[float]
) -> Pipeline:
    """The network in stages for these groups of cores, cut at these places: 3.25 is behind a quarter of region 3."""
    builder = PipelineBuilder(graph, len(groups))
    for place, region in enumerate(regions):
        _deal(builder, region, (place, place + 1), cuts)
    step, stage_of = builder.finish()
    regions_of_step = partition(step, target)
    busy = [one for one in regions_of_step if not one.is_idle or (one.is_view and one.output in step.outputs)]
    work = sum(core_cycles(one.graph, target) for one in busy)
    stages = []
    for number, group in enumerate(groups):
        own = [one for one in busy if stage_of[one.output] == number]
        cycles = sum(cores_cycles(one.graph, target, cores=group) for one in own)
        share = sum(core_cycles(one.graph, target) for one in own) / max(work, 1)
        layers = tuple(one.name for one in regions_of_step if stage_of[one.output] == number)
        stages.append(Stage(group, layers, share, cycles, builder.kept_bytes(number)))
    kept = sum(relayout_cost(None, step.types[read], None, None).cycles for read, _, _ in step.kept)
    cores = {value: groups[number] for value, number in stage_of.items()}
    return Pipeline(step, cores, tuple(stages), regions_of_step, max(stage.cycles for stage in stages) + kept)


def _refuse(graph: Graph, target: Target) -> None:
    if len(target.cores) < 2:
        raise TargetError(
            "a pipeline needs several cores, it has one", where=target.name, hint="say how many with --cores"
        )
    if target.engines or target.dma:
        what = f"a pipeline is for cores alone; it has {'engines' if target.engines else 'a DMA'}"
        raise TargetError(what, where=target.name, hint="leave --pipeline out")
    if graph.states:
        raise TargetError(
            "the network keeps states from one inference to the next, which a pipeline would fill "
            "before its first input",
            where=graph.name,
            hint="leave --pipeline out: its layers are then shared by the cores one by one",
        )


_NEAR = 1.02
"""Times the shortest time between inputs that stages may take to be fewer."""
_CORRECTIONS = 3
"""Times cuts are tried, with the cycles that stages took before: parts of a layer take more than their share of it."""
_HALVINGS = 40
"""Steps of the search for a time, each of half the range."""


def _balanced(
    groups: Sequence[CoreGroup], wishes: Sequence[CoreGroup], costs: Sequence[Sequence[float]]
) -> list[float]:
    """The places that part stages so that the longest is shortest, as `_staged` has them; arguments as of `_cuts`."""
    low, high = 0.0, float(sum(map(max, zip(*costs, strict=True)))) + 1
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _cuts(groups, costs, wishes, middle) else (middle, high)
    return _cuts(groups, costs, wishes, high)[:-1]


def _ways(wishes: Sequence[CoreGroup], target: Target) -> Iterator[tuple[CoreGroup, ...]]:
    """Ways to give the cores to stages: the groups that pins name in the order of their layers, and before, between or
    behind them the other cores one by one, in pairs, in fours and so on.

    Raises:
        PlaceError: a core would be in two stages, or there is one stage only.
    """
    pinned = [group for group, _ in groupby(filter(None, wishes))]
    taken = Counter(core for group in pinned for core in group)
    if twice := [core for core, count in taken.items() if count > 1]:
        what = f"core {twice[0]} would compute two stages: a stage is a stretch of the network for a group of cores"
        hint = "pin layers that follow one another to the same cores, and others to other cores"
        raise PlaceError(what, where="--pin, --pipeline", hint=hint)
    free = [core for core in range(len(target.cores)) if core not in taken]
    if len(pinned) < 2 and not free:
        what = "all cores are in one group, and a pipeline needs several"
        raise PlaceError(what, where="--pin, --pipeline", hint="leave --pipeline out, or pin layers to fewer cores")
    if not free:
        yield tuple(pinned)
    for size in (1 << power for power in range(len(free).bit_length())):
        some = [tuple(free[first : first + size]) for first in range(0, len(free), size)]
        if len(some) + len(pinned) > 1:
            yield from ((*pinned[:at], *some, *pinned[at:]) for at in range(len(pinned) + 1))


def _cuts(
    groups: Sequence[CoreGroup], costs: Sequence[Sequence[float]], wishes: Sequence[CoreGroup], limit: float
) -> list[float]:
    """The ends of the stages, as places of `_staged`, where each takes as much as it can within a limit of cycles;
    empty where that is too short.

    Args:
        groups: the cores of each stage.
        costs: by stage and region, cycles.
        wishes: by region, the cores it is pinned to; empty for any.
        limit: cycles.
    """
    place, ends = 0.0, list[float]()
    for stage, group in enumerate(groups):
        left, later = limit, set(groups[stage + 1 :])
        while place < len(wishes) and wishes[int(place)] not in later:
            whole = int(place) + 1
            cycles = (whole - place) * costs[stage][whole - 1]
            if cycles > left:
                place += 0 if wishes[whole - 1] else left / costs[stage][whole - 1]
                break
            place, left = whole, left - cycles
        if group in wishes[int(place) :]:
            return []
        ends.append(place)
    return ends if place == len(wishes) else []


def _deal(builder: PipelineBuilder, region: Region, span: tuple[float, float], cuts: Sequence[float]) -> None:
    """Put a region, whose work lies in a span of all of it, into the stages between the cuts."""
    start, stop = span
    first, last = bisect_right(cuts, start), bisect_left(cuts, stop)
    places = [(cut - start) / (stop - start) for cut in cuts[first:last]]
    parts = _boxes(region, first, places) if places else []
    if len(parts) > 1:
        try:
            builder.add_parts(region.graph, parts)
        except ValueError:
            parts = []
    if len(parts) <= 1:
        middle = parts[0][0] if parts else bisect_right(cuts, (start + stop) / 2) if places else first
        builder.add(region.graph.nodes, middle)


def _boxes(region: Region, first: int, places: Sequence[float]) -> list[tuple[int, Box]]:
    """The stretches of a region's result between these places, from 0 to 1, and their stages from `first` on; none
    that is empty."""
    kind = region.graph.types[region.output]
    axis, step = stretch_axis(kind)
    size = kind.shape[axis] if kind.shape else 1
    marks = [0, *(min(size, round(place * size / step) * step) for place in places), size]
    whole = full_box(kind.shape)
    spans = enumerate(pairwise(marks), first)
    return [(stage, with_span(whole, axis, (start, stop))) for stage, (start, stop) in spans if start < stop]


def check_pipeline(graph: Graph, pipeline: Pipeline, inputs: Sequence[Mapping[str, Array]]) -> None:
    """Compare the steps of a pipeline with the network, bit for bit.

    Args:
        graph: the network.
        pipeline: its stages.
        inputs: an array per input of the graph, for each of some successive steps; more than the delay.

    Raises:
        ProgramError: an output differs.
    """
    expected = evaluate_all(graph, inputs[: len(inputs) - pipeline.delay])
    actual = evaluate_all(pipeline.graph, inputs)[pipeline.delay :]
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        for name in graph.outputs:
            if not np.array_equal(one[name], other[name]):
                what = f"the pipeline computes another '{name}' of input {number} than the network"
                hint = "report this with the model; leave --pipeline out meanwhile"
                raise ProgramError(what, where=graph.name, hint=hint)
