"""The distinct layers of a network, each as a network of its own: its knobs, its default, and its cost model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dovetail.compile import reserved
from dovetail.errors import DovetailError
from dovetail.guests.tune.cost import Estimator, estimator
from dovetail.ir.graph import Graph
from dovetail.kernels import core_traits, offered
from dovetail.records import Record
from dovetail.schedule.assign import assign
from dovetail.schedule.knobs import region_space
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import Plan, plan
from dovetail.schedule.region import LaidRegion, Region
from dovetail.schedule.tiles.clock import Estimate
from dovetail.schedule.tiles.tile import BUFFERS, EARLY, ORDER, PLACEMENT, TILE, offload_choice
from dovetail.schedule.tuning import signature
from dovetail.target.description import Target
from dovetail.target.pattern import Choice, Space, Value


class LayerKind(Record):
    """One kind of layer: all regions of the network with the same computation, between the same memories."""

    key: str
    """Names it in the log: the signature, and the ends that lie in the engine's memory."""
    signature: str
    graph: Graph
    """The first such region as a network of its own, weights kept."""
    near: tuple[str, ...]
    """Inputs and outputs of `graph` that lie in the engine's memory in the network's default plan."""
    names: tuple[str, ...]
    """The regions, in the network's order."""


def key_of(graph: Graph, near: frozenset[str]) -> str:
    """Names a layer: its signature, and for each of its ends whether it lies in the engine's memory (n) or not (f)."""
    return f"{signature(graph)}-{''.join('n' if end in near else 'f' for end in (*graph.inputs, *graph.outputs))}"


def region_alone(graph: Graph, target: Target) -> Region:
    """The one region of a layer's own network.
    Raises DovetailError where by itself it is not computed as one region."""
    regions = partition(graph, target)
    if len(regions) != 1:
        hint = "tune the whole network instead, or another layer"
        raise DovetailError("by itself this layer is not one region", where=graph.name, hint=hint)
    return regions[0]


def distinct_layers(regions: Sequence[Region], default: Plan, target: Target) -> tuple[LayerKind, ...]:
    """The layers that have something to choose, each kind once, in the network's order; `default` is its default
    plan, which says in which memory values lie."""
    program, found = default.program, dict[str, LayerKind]()
    for region in regions:
        if region.engine is None and not region_space(region, target).knobs:
            continue
        alone = replace(region.graph, name=region.name)
        ends = (*alone.inputs, *alone.outputs)
        memories = {value: program.buffers[program.values[value].buffer].memory for value in ends}
        home = region.engine.memory if region.engine else None
        near = tuple(value for value in ends if memories[value] == home)
        key = key_of(alone, frozenset(near))
        if key in found:
            found[key] = replace(found[key], names=(*found[key].names, region.name))
        elif _stands_alone(alone, region, target):
            found[key] = LayerKind(key, signature(alone), alone, near, (region.name,))
    return tuple(found.values())


def tunable_layers(
    graph: Graph, target: Target, near: Collection[str] = ()
) -> tuple[tuple[Region, ...], tuple[LayerKind, ...]]:
    """The regions of a network with nothing chosen, and its distinct layers that have something to choose; the inputs
    and outputs `near` lie in the engine's memory."""
    regions = partition(graph, target)
    return regions, distinct_layers(regions, planned(graph, regions, target, near), target)


def planned(graph: Graph, regions: Sequence[Region], target: Target, near: Collection[str] = ()) -> Plan:
    """The plan of a network's regions; raises PlanError where it does not fit."""
    return plan(choose_layouts(graph, regions, target, near), target, reserved(graph, target), near)


def _stands_alone(graph: Graph, region: Region, target: Target) -> bool:
    """Whether the region by itself goes to the same offload as in the network, or to the core as there."""
    try:
        alone = region_alone(graph, target)
    except DovetailError:
        return False
    if alone.offload is None or region.offload is None:
        return alone.engine is region.engine is None
    return alone.offload.name == region.offload.name


def resolved_default(region: Region, target: Target, near: Collection[str]) -> dict[str, Value]:
    """The whole choice that stands for the planner's own, for a region that is a network by itself.
    Raises PlanError where the layer does not fit."""
    if region.engine is None:
        return dict(offered(region.graph, core_traits(target.core)).default)
    (part,) = LaidRegion.of(region).parts
    own = {PLACEMENT: region.engine.name, **offload_choice(part, part.match)}
    tiling = planned(region.graph, [region], target, near).tilings[region.name]
    sizes = tiling.shape[1:] if len(tiling.shape) == 4 else tiling.shape[-1:]
    names = TILE if len(tiling.shape) == 4 else TILE[2:]
    buffers = tiling.buffers if len(tiling.tiles) > 1 else 2
    order = "channels" if tiling.channels_outer else "positions"
    return {**own, **dict(zip(names, sizes, strict=True)), BUFFERS: buffers, ORDER: order, EARLY: "yes"}


def placed(region: Region, default: Choice, target: Target) -> Choice:
    """A default, or the core where a compile that is told nothing computes the layer there; nothing chosen of a kernel,
    of which cores that share it choose for themselves."""
    if region.engine is None:
        return {}
    if any(one.engine is not None for one in assign(region.graph, (region,), target, {}).regions):
        return default
    return {PLACEMENT: "core"}


class LayerModel(Record):
    """A layer as a network of its own, with the cost model of its choices."""

    region: Region
    space: Space
    default: Choice
    """The whole choice that stands for the planner's own."""
    estimator: Estimator
    planned: Estimate | None
    """The cost of what a compile chooses by itself, which may be the core; None where that has too little memory."""

    @classmethod
    def of(cls, layer: LayerKind, target: Target) -> LayerModel:
        """The model of a layer; raises DovetailError where the layer does not fit the target even by default."""
        region = region_alone(layer.graph, target)
        default, costs = resolved_default(region, target, layer.near), estimator(region, target, layer.near)
        first = costs(placed(region, default, target))
        return cls(region, region_space(region, target), default, costs, first)

    def estimate(self, choice: Choice) -> Estimate | None:
        """The cost of a choice, empty for none; None when its tiles need more memory than there is."""
        return self.estimator({**self.default, **choice}) if choice else self.planned
