"""MAERI's orders: exact on real tensors, near their bounds, as the user's rules say, refused where they are wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from conftest import shared_dir
from dovetail.compile import Options, prepare, sample_inputs
from dovetail.errors import ModelError, SimulationError, TargetError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.targets import load_target
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange, best_order
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import ChannelSegment, Item, NetworkOrder, broken
from dovetail.targets.maeri.rules import Rules, load_rules
from dovetail.targets.maeri.tile import MultiplierTile
from dovetail.targets.maeri.tree import Range
from maeri_trials import simulate
from networks import ORDERED, limited_net

Made = tuple[Graph, Mapping[str, Array]]


def check(graph: Graph, inputs: Mapping[str, Array], schedule: NetworkOrder) -> None:
    """An order computes what the graph means, in the cycles it says, and not in fewer than the bound."""
    found, expected = simulate(schedule, inputs), evaluate(graph, inputs)
    for name, array in expected.items():
        np.testing.assert_array_equal(found.outputs[name], array)
    assert found.cycles == schedule.makespan
    assert found.cycles >= bound(schedule.network, schedule.config).cycles


def shared_network(name: str) -> Made:
    """A network of MLPerf Tiny with random inputs."""
    file = shared_dir() / "models" / "mlperf_tiny" / f"{name}_int8.tflite"
    graph = prepare(file, load_target("riscv"), Options())
    return graph, sample_inputs(graph)


def random_network(seed: int) -> Made:
    """A few layers in a row with random sizes."""
    random = np.random.default_rng(seed)
    net = limited_net("random", int(random.integers(5, 12)), int(random.integers(5, 12)), int(random.integers(1, 9)))
    x = net.x
    for _ in range(int(random.integers(1, 5))):
        kernel = int(random.choice([1, 2, 3, 5]))
        x = net.convolution(x, int(random.integers(1, 20)), kernel, stride=int(random.integers(1, 3)), relu=True)
    if random.integers(2):
        x = net.dense(x, int(random.integers(1, 12)))
    return net.finish(x), net.inputs()


CONFIGS = {
    "plain": MaeriConfig(),
    "many": MaeriConfig(256, 256, 256),
    "few": MaeriConfig(16, 16, 16),
    "narrow": MaeriConfig(64, 8, 16),
    "fat tree": MaeriConfig(64, 16, 16, ports=False),
    "no buffer": MaeriConfig(64, 16, 16, accumulation_buffer=False),
    "prefetch": MaeriConfig(64, 16, 4, prefetch=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_random_networks(name: str) -> None:
    for seed in range(12):
        graph, inputs = random_network(seed)
        check(graph, inputs, arrange(network(graph), CONFIGS[name]))


@pytest.mark.parametrize("multipliers", [64, 256])
@pytest.mark.parametrize("name", [*ORDERED, "ic_resnet8", "vww_mobilenetv1"])
def test_near_the_bound(name: str, multipliers: int) -> None:
    """At full bandwidth at most 1.10 times the bound; simulated, but for VGG-16, whose numbers alone take a minute."""
    graph, inputs = ORDERED[name]() if name in ORDERED else shared_network(name)
    config, net = MaeriConfig(multipliers, multipliers, multipliers), network(graph)
    began = time.process_time()
    schedule = best_order(net, config, seconds=0)
    assert time.process_time() - began < (60 if name == "VGG-16" else 10)
    least = bound(net, config).cycles
    print(f"{name} on {multipliers}: {schedule.makespan:,} cycles, bound {least:,}, {schedule.makespan / least:.4f}")
    assert schedule.makespan <= 1.10 * least
    if name != "VGG-16":
        check(graph, inputs, schedule)


def kernels_of_three_sizes() -> Made:
    """One filter each of 3x3, 4x4 and 5x5 over one channel of 10x10."""
    net = limited_net("kernels", 10, 10, 1)
    outputs = [net.convolution(net.x, 1, kernel, pad=0, relu=True) for kernel in (3, 4, 5)]
    return net.builder.finish(outputs), net.inputs()


def test_three_kernel_sizes_run_in_parallel() -> None:
    """9 + 16 + 25 = 50 of 64 multipliers from cycle 0 on. The 3x3 kernel is the longest: a weight, 64 positions, and
    3 links and 3 cycles until the last sum is in memory: 71."""
    graph, inputs = kernels_of_three_sizes()
    schedule = best_order(network(graph), MaeriConfig(64), Rules(whole_filters=True))
    check(graph, inputs, schedule)
    assert sorted((item.place.size, item.start) for item in schedule.items) == [(9, 0), (16, 0), (25, 0)]
    assert schedule.makespan == 1 + 8 * 8 + 3 + 3


def four_then_one() -> Made:
    """Four 3x3 filters over 6x6 give 4x4 each; then one filter over all four."""
    net = limited_net("four", 6, 6, 1)
    outputs = net.convolution(net.x, 4, pad=0, relu=True)
    return net.finish(net.convolution(outputs, 1, pad=0, relu=True)), net.inputs()


def test_the_next_layer_begins_on_finished_outputs() -> None:
    """32 multipliers hold three of the four filters. Each takes a weight and 16 positions; its last sum has left 6 or
    7 cycles later, which is when its adders may be set up anew: three at 23 or 24, the fourth, begun then, at 47. The
    next layer adds up what three channels give it while the fourth is computed, then the last part: a weight, 4
    positions, 6 cycles to the memory."""
    graph, inputs = four_then_one()
    net = network(graph)
    rules = Rules(whole_filters=(net.works[0].name,))
    schedule = best_order(net, MaeriConfig(32, 32, 32), rules, seconds=10)
    check(graph, inputs, schedule)
    assert not broken(schedule, rules)
    first, second = ([item for item in schedule.items if item.work == number] for number in (0, 1))
    fourth = max(first, key=lambda item: item.start)
    assert len(first) == 4 and 23 <= fourth.start <= 24 and schedule.end(fourth) <= 48
    assert len(second) == 4 and sum(item.start < schedule.end(fourth) - 2 for item in second) == 3
    assert schedule.makespan <= 48 - 1 + 1 + 4 + 7


def test_orders_of_small_units_are_no_worse() -> None:
    for make in (kernels_of_three_sizes, four_then_one):
        graph, inputs = make()
        config, net = MaeriConfig(32, 32, 32), network(graph)
        told: list[tuple[str, int, int]] = []
        schedule = best_order(net, config, report=lambda *each, told=told: told.append(each))
        check(graph, inputs, schedule)
        assert told[0][0] == "list" and told[-1][1] == schedule.makespan <= arrange(net, config).makespan
        assert all(earlier[1] > later[1] >= later[2] for earlier, later in pairwise(told))


def planted() -> tuple[Graph, Mapping[str, Array], NetworkOrder]:
    """A valid order of two layers."""
    net = limited_net("planted", 6, 6, 2)
    graph = net.finish(net.convolution(net.convolution(net.x, 4, relu=True), 4, relu=True))
    return graph, net.inputs(), arrange(network(graph), MaeriConfig())


def shifted(item: Item, cycles: int) -> Item:
    """The same later."""
    return replace(item, start=item.start + cycles)


def first_of(schedule: NetworkOrder, work: int) -> int:
    """The first item of a layer."""
    return next(index for index, item in enumerate(schedule.items) if item.work == work)


def _early(schedule: NetworkOrder) -> list[Item]:
    last = max(range(len(schedule.items)), key=lambda index: schedule.items[index].start)
    return [replace(item, start=0) if index == last else shifted(item, 0) for index, item in enumerate(schedule.items)]


def _too_early(schedule: NetworkOrder) -> list[Item]:
    return [shifted(item, -1) if item.work == 1 else item for item in schedule.items]


def _overlap(schedule: NetworkOrder) -> list[Item]:
    index = first_of(schedule, 1)
    moved = replace(schedule.items[index], place=Range(1, schedule.items[index].place.size))
    return [*schedule.items[:index], moved, *schedule.items[index + 1 :]]


def _outside(schedule: NetworkOrder) -> list[Item]:
    item = schedule.items[0]
    return [replace(item, place=Range(64 - item.place.size + 1, item.place.size)), *schedule.items[1:]]


def _cut(schedule: NetworkOrder) -> list[Item]:
    item = schedule.items[0]
    part = item.segments[-1]
    short = (*item.segments[:-1], ChannelSegment(part.channel, part.first, part.count - 1))
    return [replace(item, segments=short), *schedule.items[1:]]


def _twice(schedule: NetworkOrder) -> list[Item]:
    item = schedule.items[0]
    return [*schedule.items, replace(item, start=100_000)]


def _part(schedule: NetworkOrder) -> list[Item]:
    item = schedule.items[0]
    return [replace(item, taps=(0, item.taps[1] - 1)), *schedule.items[1:]]


FAULTS: Mapping[str, tuple[Callable[[NetworkOrder], list[Item]], str]] = {
    "begun before its inputs exist": (_too_early, "its inputs exist from cycle|in use until"),
    "at the start on others' multipliers": (_early, "in use until|its inputs exist"),
    "over others": (_overlap, "in use until|do not fit"),
    "outside": (_outside, "there are 64 multipliers"),
    "a sum left out": (_cut, "are added 0 times"),
    "sums twice": (_twice, "are added 2 times"),
    "a product left out": (_part, "do not make up|in use until"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    graph, inputs, schedule = planted()
    check(graph, inputs, schedule)
    spoil, message = FAULTS[fault]
    with pytest.raises(SimulationError, match=message):
        simulate(replace(schedule, items=tuple(spoil(schedule))), inputs)


def test_two_sums_on_one_line_are_found() -> None:
    """Sums of 16 on multipliers 16 and 32 leave through the halves of one double switch."""
    net = limited_net("lines", 5, 5, 1)
    graph = net.finish(net.convolution(net.x, 2, 4, pad=0, relu=True))
    items = tuple(
        Item(0, 0, Range(place, 16), MultiplierTile(4, 4), (0, 16), (ChannelSegment(channel, 0, 4),))
        for channel, place in enumerate((16, 32))
    )
    with pytest.raises(SimulationError, match="line 0 of the collection bus would get 2"):
        simulate(NetworkOrder(network(graph), MaeriConfig(), items, 0), net.inputs())


def test_rules_are_kept() -> None:
    graph, inputs = ORDERED["Inception"]()
    net = network(graph)
    names = [work.name for work in net.works]
    rules = Rules(before=((names[3], names[0]),), apart=((names[1], names[3]),), at_most=5)
    schedule = arrange(net, MaeriConfig(), rules)
    found = simulate(schedule, inputs)
    spans: dict[int, list[tuple[int, int]]] = {}
    for item in schedule.items:
        spans.setdefault(item.work, []).append((item.start, schedule.end(item)))
    assert min(start for start, _ in spans[0]) >= max(end for _, end in spans[3])
    assert all(a[1] <= b[0] or b[1] <= a[0] for a in spans[1] for b in spans[3])
    every = [span for each in spans.values() for span in each]
    assert max(sum(start <= at < end for start, end in every) for at, _ in every) <= 5
    assert found.cycles == schedule.makespan


def test_contradictory_rules_name_the_smallest_circle() -> None:
    graph, _ = four_then_one()
    net = network(graph)
    first, second = (work.name for work in net.works)
    with pytest.raises(ModelError, match=f"{second} reads what {first} computes; {second} before {first}"):
        arrange(net, MaeriConfig(), Rules(before=((second, first),)))
    with pytest.raises(ModelError, match="no layer 'x' in the network"):
        arrange(net, MaeriConfig(), Rules(apart=((first, "x"),)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "must be a mapping of before, apart"),
        ("befor: []", "rules.yaml:1: befor: there is no such entry, perhaps 'before'"),
        ("before: [[a]]", "rules.yaml:1: .*a list of two or more layers"),
        ("at_most: 0", "rules.yaml:1: at_most: must be a whole number of virtual neurons from 1"),
        ("at_most: true", "virtual neurons from 1"),
        ("whole_filters: 3", "true or false"),
        ("at_most: {network: " + 5000 * "9" + "}", "rules.yaml:1: at_most.network: must be a whole number of virtual"),
        ("pin: [{what: a, begin: " + 26 * "9" + "}]", "rules.yaml:1: .*begin: must be a whole number from 0 to"),
        ("a: [", "not YAML"),
        ("before: !!python/object/apply:os.system [ls]", "the tag .*os.system; leave it out"),
    ],
)
def test_bad_rule_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(ModelError, match=message):
        load_rules(file)


def test_what_does_not_fit() -> None:
    graph, _ = ORDERED["LeNet"]()
    with pytest.raises(TargetError, match="does not fit"):
        arrange(network(graph), MaeriConfig(16, 16, 16, fold=False))


@pytest.mark.parametrize("fields", [{"distribution": 16}, {"collection": 4}, {"accumulation_buffer": False}])
def test_whole_filters_fit_any_engine(fields: dict[str, int]) -> None:
    """Ports that several multipliers share (D1), few lines, and no accumulation buffer."""
    for seed in range(6):
        graph, inputs = random_network(seed)
        schedule = arrange(network(graph), replace(MaeriConfig(64), **fields), Rules(whole_filters=True))
        check(graph, inputs, schedule)
        assert not broken(schedule, Rules(whole_filters=True))


@pytest.mark.parametrize(("name", "most"), [("ic_resnet8", 1.10), ("vww_mobilenetv1", 1.10), ("kws_dscnn", 1.10)])
def test_near_the_bound_with_the_bandwidth_of_the_rtl(name: str, most: float) -> None:
    """128 multipliers, 16 values sent and 16 sums taken per cycle."""
    graph, inputs = shared_network(name)
    config, net = MaeriConfig(128, 16, 16), network(graph)
    schedule, least = arrange(net, config), bound(net, config)
    print(f"{name}: {schedule.makespan:,} cycles, bound {least.cycles:,} ({least.binds})")
    assert schedule.makespan <= most * least.cycles
    check(graph, inputs, schedule)


def test_three_kernel_sizes_at_a_quarter_of_the_bandwidth() -> None:
    """On ports of their own: 3 and 4 and 7 of 16."""
    graph, inputs = kernels_of_three_sizes()
    rules, config, net = Rules(whole_filters=True), MaeriConfig(64, 16, 16), network(graph)
    schedule = best_order(net, config, rules)
    check(graph, inputs, schedule)
    assert not broken(schedule, rules) and [item.start for item in schedule.items] == [0, 0, 0]
    assert schedule.makespan <= 1.2 * bound(net, config, rules).cycles


def test_a_dense_layers_vector_stays_in_the_multipliers() -> None:
    """64 products, 256 sums: a cycle each, instead of a weight and a product each (the public simulator takes 269)."""
    net = limited_net("dense", 8, 8, 1)
    graph = net.finish(net.dense(net.x, 256))
    schedule = arrange(network(graph), MaeriConfig(64))
    check(graph, net.inputs(), schedule)
    assert schedule.makespan <= 272


def test_seconds_are_kept() -> None:
    """Four seconds of CPU time for better orders, for a small network that is solved and a large one that is not."""
    for name in ("LeNet", "Inception"):
        graph, _ = ORDERED[name]()
        began = time.process_time()
        best_order(network(graph), MaeriConfig(128, 128, 128), seconds=4)
        assert time.process_time() - began <= 1.5 * 4


@pytest.mark.parametrize(("name", "least"), [("ic_resnet8", 1e6), ("kws_dscnn", 1e6), ("vww_mobilenetv1", 0.6e6)])
def test_a_million_cycles_per_second(name: str, least: float) -> None:
    """On 64 multipliers. VWW's 623 items last 100 cycles each: a million on a machine that does nothing else."""
    graph, inputs = shared_network(name)
    schedule = arrange(network(graph), MaeriConfig())
    seconds = []
    for _ in range(5):  # of this thread alone, the quickest: others on the machine take its caches
        began = time.thread_time()
        found = simulate(schedule, inputs)
        seconds.append(time.thread_time() - began)
    speed = found.cycles / min(seconds)
    print(f"{speed:,.0f} simulated cycles per second")
    assert speed >= least
