"""MAERI's memories on the chip: what an order needs, counted cycle by cycle; orders that need less; refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from conftest import shared_dir
from dovetail.compile import Options, compile_graph, prepare
from dovetail.errors import SimulationError, TargetError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.target import OrderRequest
from dovetail.targets import load_target
from dovetail.targets.maeri import target
from dovetail.targets.maeri.config import MaeriConfig, configured
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import NetworkOrder, Peak, features, prefetched
from maeri_trials import simulate
from networks import limited_net
from test_maeri_schedule import random_network

PLAIN = MaeriConfig()
ENGINES = {"plain": PLAIN, "narrow": MaeriConfig(64, 16, 16), "prefetch": MaeriConfig(64, 16, 4, prefetch=1)}


def residual() -> tuple[Graph, Mapping[str, Array]]:
    """A convolution, another of its result, and a third of that; the first is read again."""
    net = limited_net("residual", 6, 6, 4)
    first = net.convolution(net.x, 8, 3, relu=True)
    last = net.convolution(net.convolution(first, 16, 1, relu=True), 8, 3, relu=True)
    side = net.convolution(first, 4, 1, relu=True)
    return net.builder.finish([last, side]), net.inputs()


def counted(order: NetworkOrder) -> int:
    """Bytes of features, those alive in each cycle summed up: 256 of input, then one per element of a result."""
    works, graph = order.network.works, order.network.graph
    alive = np.zeros(max(order.end(item) for item in order.items), np.int64)
    earlier = [order.network.earlier(number) for number in range(len(works))]
    readers = {
        work.name: [each for each, read in zip(works, earlier, strict=True) if number in read]
        for number, work in enumerate(works)
    }

    def span(name: str) -> tuple[int, int]:
        own = [item for item in order.items if order.work(item).name == name]
        return min(item.start for item in own), max(order.end(item) for item in own)

    for work in works:
        ends = [span(each.name)[1] for each in readers[work.name]]
        alive[span(work.name)[0] : max(ends, default=len(alive))] += graph.types[work.node.output].elements
    first = [work for work, read in zip(works, earlier, strict=True) if not read]
    alive[: max(span(work.name)[1] for work in first)] += graph.types[graph.inputs[0]].elements
    return int(alive.max())


@pytest.mark.parametrize("name", ENGINES)
def test_features_counted_cycle_by_cycle(name: str) -> None:
    for graph, _ in (residual(), random_network(3), random_network(8)):
        order = arrange(network(graph), ENGINES[name])
        assert features(order).used == counted(order)


def test_the_prefetch_buffer_of_one_filter() -> None:
    """3x3 over 4 channels of 8x8: 36 weights, and 3 rows of 8 columns of each channel read so far."""
    net = limited_net("one", 8, 8, 4)
    graph = net.finish(net.convolution(net.x, 1, 3, pad=0))
    config = MaeriConfig(64, 64, 64)
    order = arrange(network(graph), replace(config, prefetch_buffer=36 + 3 * 8 * 4))
    assert prefetched(order).used == 36 + 3 * 8 * 4
    with pytest.raises(TargetError, match="needs 132 bytes and has 131: 1 bytes short"):
        arrange(network(graph), replace(config, prefetch_buffer=36 + 3 * 8 * 4 - 1))


@pytest.mark.parametrize(
    ("memory", "need", "engine"), [("feature_memory", features, "prefetch"), ("prefetch_buffer", prefetched, "plain")]
)
def test_orders_that_need_less_then_none(memory: str, need: Callable[[NetworkOrder], Peak], engine: str) -> None:
    """Down to what is refused every order is exact and fits; the refusal's lever works."""
    graph, inputs = residual()
    net, config, made = network(graph), ENGINES[engine], 0
    size = need(arrange(net, config)).used
    while True:
        try:
            order = arrange(net, configured(config, {memory: size}))
        except TargetError as error:
            lever = re.search(rf"--set {memory}=(\d+)", error.hint)
            assert lever and f"has {size:,}" in error.what and "rules" in error.hint
            arrange(net, configured(config, {memory: int(lever[1])}))
            break
        found, made = simulate(order, inputs), made + 1
        assert need(order).used <= size
        for name, array in evaluate(graph, inputs).items():
            np.testing.assert_array_equal(found.outputs[name], array)
        size = need(order).used * 3 // 4
    assert made


@pytest.mark.parametrize("memory", ["feature_memory", "prefetch_buffer"])
def test_an_order_for_larger_memories_is_found(memory: str) -> None:
    """A planted fault: the order of an engine without limits on one a byte too small."""
    graph, inputs = residual()
    order = arrange(network(graph), PLAIN)
    used = (features if memory == "feature_memory" else prefetched)(order).used
    simulate(replace(order, config=configured(PLAIN, {memory: used})), inputs)
    with pytest.raises(SimulationError, match="1 bytes short"):
        simulate(replace(order, config=configured(PLAIN, {memory: used - 1})), inputs)


def test_compile_keeps_the_same_limits() -> None:
    """A layer whose input and result do not fit is left to the core."""
    graph, _ = residual()
    for size, engines in ((2592, 4), (2591, 3)):  # 8 channels of 6x6 to sums of 16
        compiled = compile_graph(graph, target(MaeriConfig(feature_memory=size)), Options())
        assert sum(region.engine is not None for region in compiled.regions if region.macs) == engines


def test_levers_say_their_price() -> None:
    """The smallest buffer that will do costs most of the cycles; the one that costs nothing is named too."""
    graph = prepare(shared_dir() / "faults" / "maeri" / "mixed.h5", load_target("maeri"), Options(allow_float=True))
    net = network(graph)
    with pytest.raises(TargetError) as error:
        arrange(net, configured(PLAIN, {"prefetch_buffer": 500}))
    levers = re.findall(r"--set prefetch_buffer=(\d+) \(([\d,]+) cycles\)", error.value.hint)
    assert len(levers) == 2
    for size, cycles in levers:
        order = arrange(net, configured(PLAIN, {"prefetch_buffer": int(size)}))
        assert f"{order.makespan:,}" == cycles
    ordering = load_target("maeri").ordering
    assert ordering is not None
    ordered = ordering(graph, OrderRequest({"prefetch_buffer": 1500}, seconds=0.0))
    assert any("none." in note and f"prefetch_buffer={levers[-1][0]}" in note for note in ordered.notes)


@pytest.mark.parametrize(
    ("sizes", "cause", "lever"),
    [
        ({"weight_depth": 1}, "takes 2 steps, and a multiplier holds 1 weights", "weight_depth=2"),
        ({"fold": 0}, "folding is off", "fold=1"),
    ],
)
def test_the_true_cause(sizes: Mapping[str, int], cause: str, lever: str) -> None:
    graph = prepare(shared_dir() / "faults" / "maeri" / "mixed.h5", load_target("maeri"), Options(allow_float=True))
    with pytest.raises(TargetError, match=cause) as error:
        arrange(network(graph), configured(PLAIN, sizes))
    assert lever in error.value.hint
    name, _, value = lever.partition("=")
    arrange(network(graph), configured(PLAIN, {**sizes, name: int(value)}))
