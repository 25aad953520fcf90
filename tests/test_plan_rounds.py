"""Rounds of planning: a shortage of memory changes no more than it must, and rounds look only at what has changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import dovetail.schedule.assign.costs as costs
import dovetail.schedule.plan as planning
from dovetail.errors import PlanError
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt
from dovetail.program.ir import CORE, Begin, Buffer, Copy, Role, Wait, copy_queue
from dovetail.program.synchronise import synchronise
from dovetail.program.verify import verify
from dovetail.schedule.assign import assign
from dovetail.schedule.layout import LayoutPlan, choose_layouts
from dovetail.schedule.partition import initial_partition, partition
from dovetail.schedule.plan import plan
from dovetail.schedule.plan.allocate import allocate
from dovetail.schedule.plan.homes import first_homes
from dovetail.schedule.plan.lifetimes import StatementOrder
from dovetail.schedule.plan.lower import lower
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.clock import PartClock, TileCut
from dovetail.target import Memory, Target
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


def test_only_the_layers_that_settle_wait() -> None:
    target = load_target("ne16")
    laid = laid_out(chain(32, 32, 32, 32), target)
    made = plan(laid, target, {})
    lowered = lower(laid, made.tilings, target, first_homes(laid, target, ()), frozenset(), {})
    dma, engine_layers = copy_queue(target), [i for i, region in enumerate(laid.regions) if region.engine]
    middle = engine_layers[1]
    free, local, whole = (
        synchronise(lowered.statements, dma, settle)
        for settle in ((), frozenset({middle}), frozenset(range(len(laid.regions))))
    )
    counts = [sum(isinstance(one, Wait) for one in made) for made in (free, local, whole)]
    assert counts[0] < counts[1] < counts[2], counts
    begins = [place for place, one in enumerate(local) if isinstance(one, Begin) and one.layer == middle]
    assert local[: begins[0]][: len(free)] != whole[: begins[0]]
    before = [one for one in local[: begins[0]] if isinstance(one, Begin)]
    assert [one for one in free if isinstance(one, Begin)][: len(before)] == before
    queues = {one.queue for one in local[: begins[0]] if isinstance(one, Wait)}
    assert queues, "everything before has finished"


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


def test_other_orders_make_buffers_fit() -> None:
    """Five buffers that need 10 units together: by size, by life and by time they take 11."""
    spans = ((4, 2, 3), (2, 6, 8), (2, 3, 6), (4, 3, 4), (5, 1, 2))
    buffers = {f"b{i}": Buffer(f"b{i}", "L1", 16 * size, Role.VALUE) for i, (size, _, _) in enumerate(spans)}
    touches = {
        f"b{i}": [(first, CORE, 0, 16 * size), (last, CORE, 0, 16 * size)]
        for i, (size, first, last) in enumerate(spans)
    }
    timeline: Any = SimpleNamespace(
        buffers=buffers, touches=touches, statements=range(9), order=StatementOrder([], "dma")
    )
    memory = Memory("L1", base=0, size=160)
    assert allocate(memory, timeline).peak == 176
    assert allocate(memory, timeline, room=160).peak == 160


def test_a_layer_alone_fetches_its_constants_again() -> None:
    """Constants that another layer has fetched are read where that put them, unless the layer is to be alone."""
    target = load_target("ne16")
    net = Net("equal", (12, 12, 16))
    value = net.x
    for kernel in (1, 3, 1):
        value = net.convolution(value, 16, kernel)
    graph = net.finish(value)
    first, _, last = (node for node in graph.nodes if isinstance(node.operator, Conv2d))
    scales = [next(node for node in graph.nodes if one.output in node.inputs) for one in (first, last)]
    constants = dict(graph.constants)
    for one, other in ((first, last), scales):
        constants |= {theirs: constants[own] for own, theirs in zip(one.inputs[1:], other.inputs[1:], strict=True)}
    laid = laid_out(replace(graph, constants=constants), target)
    made = plan(laid, target, {})
    homes = first_homes(laid, target, ())
    shared, alone = (
        lower(laid, made.tilings, target, homes, frozenset(), {}, names)
        for names in (frozenset[str](), frozenset(made.tilings))
    )

    def fetches(lowered: Any) -> int:
        copies = [one for one in lowered.statements if isinstance(one, Copy)]
        return sum(lowered.buffers[one.source.buffer].role is Role.CONSTANT for one in copies)

    if not shared.sharing:
        pytest.fail("the layers have no constants in common")
    assert fetches(alone) == fetches(shared) + sum(map(len, shared.sharing.values()))


def test_a_shortage_leaves_other_layers_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the buffers of one layer are too large, that layer alone has smaller tiles."""
    target = machine(24)
    laid = laid_out(chain(32, 48, 32, 48, 32), target)
    usual = plan(laid, target, {})
    verify(usual.program, target)
    parts = list(usual.tilings)
    short, found = parts[2], list[Any]()
    real = planning.allocate

    def crowded(memory: Memory, timeline: Any, *given: Any) -> Any:
        """Reports some bytes too many where the part has the tiles it had at first."""
        made = real(memory, timeline, *given)
        own = [one for one in timeline.buffers.values() if one.name.startswith(f"{short}_") and one.role is Role.TILE]
        if memory.name != "L1" or sum(one.nbytes for one in own) < before:
            return made
        top = max(own, key=lambda one: one.nbytes)
        found.append(top.name)
        addresses = {**made.addresses, top.name: memory.base + memory.size}
        return replace(made, addresses=addresses, peak=memory.size + top.nbytes)

    tiles = [
        one for one in usual.program.buffers.values() if one.name.startswith(f"{short}_") and one.role is Role.TILE
    ]
    before = sum(one.nbytes for one in tiles)
    monkeypatch.setattr(planning, "allocate", crowded)
    made = plan(laid, target, {})
    assert found
    changed = {name for name in parts if made.tilings[name].shape != usual.tilings[name].shape}
    assert changed == {short}


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
