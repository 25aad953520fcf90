"""Pipeline: the network in stages, one for each core, that work on successive inputs at the same time.

The stages are cut so that each has work in proportion to the speed of its core, if need be within a layer: the stage
before computes the first rows of its result, the one behind the others. What one stage leaves for the next is a state:
so one step of the pipeline is a network as any, in which no stage reads what another one computes, and nothing has to
wait before its end. Between an input and its outputs lie as many steps as there are stages but one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from dovetail.errors import ProgramError, TargetError
from dovetail.graph.graph import Graph, evaluate_all
from dovetail.graph.types import Array, Box, full_box
from dovetail.partition import Region, partition
from dovetail.pipeline.build import Builder
from dovetail.plan.cores import stretch_axis
from dovetail.plan.work import work
from dovetail.target.description import Target


@dataclass(frozen=True)
class Stage:
    """What one core does of every input."""

    core: int
    layers: tuple[str, ...]
    """Names of the layers, in order."""
    share: float
    """Part of all work, by estimate."""
    kept_bytes: int
    """What it leaves for the next stage."""


@dataclass(frozen=True)
class Pipeline:
    """A network in stages."""

    graph: Graph
    """One step."""
    cores: Mapping[str, int]
    """The core that computes each value."""
    stages: tuple[Stage, ...]

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
    ends = list(accumulate(map(_work, regions), initial=0.0))
    cuts = [ends[-1] * reached / sum(speeds) for reached in accumulate(speeds[:-1])]
    builder = Builder(graph, len(speeds))
    for region, span in zip(regions, pairwise(ends), strict=True):
        _deal(builder, region, span, cuts)
    step, cores = builder.finish()
    made = partition(step, target)
    stages = []
    for core in range(len(speeds)):
        own = [region for region in made if cores[region.output] == core]
        share = sum(map(_work, own)) / max(sum(map(_work, made)), 1.0)
        stages.append(Stage(core, tuple(region.name for region in own), share, builder.kept_bytes(core)))
    return Pipeline(step, cores, tuple(stages))


def _refuse(graph: Graph, target: Target) -> None:
    if len(target.cores) < 2:
        raise TargetError("a pipeline needs several cores, it has one", where=target.name,
                          hint="say how many with --cores")
    if target.engines or target.dma:
        raise TargetError(f"a pipeline is for cores alone; it has {'engines' if target.engines else 'a DMA'}",
                          where=target.name, hint="leave --pipeline out")
    if graph.states:
        raise TargetError("the network keeps states from one inference to the next, which a pipeline would fill "
                          "before its first input", where=graph.name,
                          hint="leave --pipeline out: its layers are then shared by the cores one by one")


def _work(region: Region) -> float:
    return 0.0 if region.is_view or region.still else work(region.graph)


def _deal(builder: Builder, region: Region, span: tuple[float, float], cuts: Sequence[float]) -> None:
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
    return [
        (first + number, (*whole[:axis], (start, stop), *whole[axis + 1 :]))
        for number, (start, stop) in enumerate(pairwise(marks))
        if start < stop
    ]


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
    found = evaluate_all(pipeline.graph, inputs)[pipeline.delay :]
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        for name in graph.outputs:
            if not np.array_equal(one[name], other[name]):
                raise ProgramError(f"the pipeline computes another '{name}' of input {number} than the network",
                                   where=graph.name, hint="report this with the model; leave --pipeline out meanwhile")
