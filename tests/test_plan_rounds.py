"""Searches of placing and planning look only at what may decide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import dovetail.schedule.assign.costs as costs
import dovetail.schedule.plan as planning
from dovetail.errors import PlanError
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt
from dovetail.schedule.assign import assign
from dovetail.schedule.layout import LayoutPlan, choose_layouts
from dovetail.schedule.partition import initial_partition, partition
from dovetail.schedule.plan import plan
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.clock import PartClock, TileCut
from dovetail.target import Target
from dovetail.targets import load_target
from networks import Net
from test_plan import Network, machine


def laid_out(graph: Graph, target: Target) -> LayoutPlan:
    """The network and how its values lie."""
    adapted = adapt(graph, target.policies[0])
    return choose_layouts(adapted, partition(adapted, target), target)


def chain(*channels: int, size: int = 24) -> Graph:
    """Convolutions one after the other."""
    net = Net("chain", (size, size, 16))
    value = net.x
    for count in channels:
        value = net.convolution(value, count)
    return net.finish(value)


def test_operands_of_other_channels_take_two_buffers() -> None:
    """A depthwise layer that is cut by its channels alone loads other channels for each tile."""
    net = Network(0)
    net.builder = GraphBuilder("deep")
    net.value = net.builder.input("x", TensorType((1, 12, 12, 64), DType.INT8))
    net.convolution(3, 1, True)
    region = next(r for r in laid_out(net.finish(), load_target("ne16")).regions if r.engine)
    (part,) = region.parts
    clock = PartClock(part, load_target("ne16"))
    cut = TileCut((1, *part.shape[1:3], 16), frozenset(), 2)
    first, held = clock.first(cut), clock.held(cut)
    assert held is not None and held[1] >= 2 * first.load_bytes + 2 * first.store_bytes


def test_tiles_are_looked_for_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is moved out of the engine's memory has the tiles looked for again from its layer on."""
    target = machine(16)
    laid = laid_out(chain(*([32] * 12)), target)
    asked: Counter[str] = Counter()

    def counted(part: Any, *given: Any) -> Any:
        asked[part.name] += 1
        try:
            return choose_tiling(part, *given)
        except PlanError:
            asked["refused"] += 1
            raise

    monkeypatch.setattr(planning, "choose_tiling", counted)
    plan(laid, target, {})
    refused = asked.pop("refused")
    assert refused > 5, "no layer had to move values"
    first = next(iter(asked))
    assert asked[first] <= 6, f"the first layer was asked {asked[first]} times"


def test_a_layer_that_is_far_faster_on_the_engine_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tiling is enough to see that the core is no match."""
    target = load_target("ne16")
    net = Net("far", (24, 24, 64))
    graph = adapt(net.finish(net.convolution(net.x, 64, 1)), target.policy("exact"))
    asked: list[bool] = []

    def recorded(*given: Any, quick: bool) -> Any:
        asked.append(quick)
        return choose_tiling(*given, quick=quick)

    monkeypatch.setattr(costs, "choose_tiling", recorded)
    made = assign(graph, initial_partition(graph, target), target, {})
    assert any(region.engine for region in made.regions)
    assert asked and all(asked)
