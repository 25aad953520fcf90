"""Pipeline: the network in stages, one for each core, that work on successive inputs at the same time.

The stages are cut so that each has work in proportion to the speed of its core, if need be within a layer: the stage
before computes the first rows of its result, the one behind the others. What one stage leaves for the next is a state:
so one step of the pipeline is a network as any, in which no stage reads what another one computes, and nothing has to
wait before its end. Between an input and its outputs lie as many steps as there are stages but one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from dovetail.errors import ProgramError, TargetError
from dovetail.ir.crop import part
from dovetail.ir.graph import Graph, Node, evaluate_all, prune
from dovetail.ir.operators.movement import Concat, Reshape
from dovetail.ir.types import Array, Box, frozen, full_box, with_span
from dovetail.schedule.cores import stretch_axis
from dovetail.schedule.partition import partition
from dovetail.schedule.region import Region
from dovetail.target.description import Target


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


@dataclass(frozen=True)
class Stage:
    """The part of the network that one core computes, for every input."""

    core: int
    layers: tuple[str, ...]
    """Names of the layers, in order."""
    share: float
    """Part of all work, by estimate."""
    kept_bytes: int
    """Bytes of states it leaves for the next stage."""


@dataclass(frozen=True)
class Pipeline:
    """A network in stages."""

    graph: Graph
    """One step."""
    cores: Mapping[str, int]
    """The core that computes each value."""
    stages: tuple[Stage, ...]
    regions: tuple[Region, ...]
    """The partition of the step."""

    @property
    def delay(self) -> int:
        """Steps between an input and its outputs."""
        return len(self.stages) - 1

    def describe(self) -> str:
        """Words for who does what."""
        parts = []
        for stage in self.stages:
            names = " to ".join(dict.fromkeys(stage.layers[:: max(1, len(stage.layers) - 1)])) or "nothing"
            parts.append(f"core {stage.core} does {names} ({100 * stage.share:.1f} % of the work)")
        return f"a pipeline of {len(self.stages)} stages: {', '.join(parts)}"

    def to_json(self) -> list[dict[str, Any]]:
        """The stages as plain values, keys as the fields of `Stage`."""
        return [asdict(stage) for stage in self.stages]


def pipelined(graph: Graph, target: Target) -> Pipeline:
    """The network in a stage for each core, in the order of their numbers.

    Raises:
        TargetError: the target has one core or engines, or the network keeps states of its own.
    """
    _refuse(graph, target)
    regions, speeds = partition(graph, target), [core.speed for core in target.cores]
    ends = list(accumulate(map(_work, regions), initial=0))
    cuts = [ends[-1] * reached / sum(speeds) for reached in accumulate(speeds[:-1])]
    builder = PipelineBuilder(graph, len(speeds))
    for region, span in zip(regions, pairwise(ends), strict=True):
        _deal(builder, region, span, cuts)
    step, cores = builder.finish()
    regions_of_step = partition(step, target)
    work = {region.name: _work(region) for region in regions_of_step}
    stages = []
    for core in range(len(speeds)):
        own = tuple(region.name for region in regions_of_step if cores[region.output] == core)
        share = sum(work[name] for name in own) / max(sum(work.values()), 1)
        stages.append(Stage(core, own, share, builder.kept_bytes(core)))
    return Pipeline(step, cores, tuple(stages), regions_of_step)


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


_MAC, _CHANNELWISE_MAC, _ELEMENT = 6, 7, 12
"""Weights of multiply-accumulates, and of the elements of each operator's result, by which stages get equal shares."""


def _work(region: Region) -> int:
    """The weight of a region."""
    total, graph = 0, region.graph
    for node in () if region.is_idle else graph.nodes:
        types = [graph.types[name] for name in node.inputs]
        macs, elements = node.operator.macs(types), graph.types[node.output].elements
        total += (_CHANNELWISE_MAC if node.operator.is_channelwise else _MAC) * macs
        total += _ELEMENT * (elements if macs else max([elements, *(kind.elements for kind in types[:1])]))
    return total


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
