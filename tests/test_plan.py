"""Random small networks planned for engine memories of many sizes: a sound program or a clear refusal."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import dovetail.schedule.plan as planning
from dovetail.compile import sample_inputs
from dovetail.errors import PlanError
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad, Reshape
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import adapt
from dovetail.program.interpret import check_program
from dovetail.program.ir import Call, Copy, LaunchStatement, Role, overwritten
from dovetail.program.loops import print_program
from dovetail.program.verify import verify
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.partition import partition
from dovetail.schedule.plan import Plan, plan
from dovetail.schedule.plan.lifetimes import Timeline
from dovetail.schedule.plan.lower import lower
from dovetail.schedule.plan.lowered import LoweredNetwork
from dovetail.schedule.region import LaidRegion
from dovetail.schedule.tiles import choose_tiling
from dovetail.schedule.tiles.clock import PartClock, TileCut
from dovetail.schedule.tiles.tile import packed_tile, packed_tiles, tile_boxes, tile_match
from dovetail.target import Target
from dovetail.targets import load_target
from networks import Net, single

SIZES = (16, 24, 48, 128)
"""KiB of engine memory."""


def machine(kib: int) -> Target:
    """ne16 with another size of engine memory."""
    target = load_target("ne16")
    return replace(
        target, memories=tuple(replace(m, size=kib * 1024) if m.name == "L1" else m for m in target.memories)
    )


class Network:
    """Builds a random quantised network, layer by layer."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.builder = GraphBuilder(f"random_{seed}")
        shape = (1, *(int(size) for size in self.random.integers(5, 40, 2)), int(self.random.integers(1, 70)))
        self.value = self.builder.input("x", TensorType(shape, DType.INT8))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the newest value."""
        return self.builder.type_of(self.value).shape

    def requantise(self, sums: str, depth: int, low: int = -128) -> str:
        """int8 again, of about the range the sums have."""
        channels = self.builder.type_of(sums).shape[-1]
        multiplier = self.random.integers(1 << 30, (1 << 31) - 1, channels).astype(np.int32)
        shift = np.full(channels, -6 - int(np.log2(depth) / 2), np.int32)
        names = [self.builder.constant("multiplier", multiplier), self.builder.constant("shift", shift)]
        operator = Requantize(output_zero_point=int(self.random.integers(-20, 20)))
        return self.builder.add(Clip(low, 127, DType.INT8), [self.builder.add(operator, [sums, *names])])

    def convolution(self, kernel: int, stride: int, depthwise: bool) -> None:
        """A padded convolution."""
        zero, channels = int(self.random.integers(-10, 10)), self.shape[-1]
        if kernel == 3:
            before = (0, int(self.random.integers(0, 2)), int(self.random.integers(0, 2)), 0)
            after = (0, int(self.random.integers(0, 2)), int(self.random.integers(0, 2)), 0)
            self.value = self.builder.add(Pad(before, after, zero), [self.value])
        outputs = channels if depthwise else int(self.random.integers(1, 90))
        shape = (1, kernel, kernel, channels) if depthwise else (outputs, kernel, kernel, channels)
        weights = self.builder.constant("weights", self.random.integers(-127, 128, shape).astype(np.int8))
        bias = self.builder.constant("bias", self.random.integers(-3000, 3000, outputs).astype(np.int32))
        kind = DepthwiseConv2d if depthwise else Conv2d
        operator = kind(stride=(stride, stride), input_zero_point=zero)
        sums = self.builder.add(operator, [self.value, weights, bias])
        self.value = self.requantise(sums, kernel * kernel * (1 if depthwise else channels))

    def addition(self) -> None:
        """The newest value and a 1x1 convolution of it, added."""
        skip, channels = self.value, self.shape[-1]
        shape = (channels, 1, 1, channels)
        weights = self.builder.constant("weights", self.random.integers(-127, 128, shape).astype(np.int8))
        side = self.requantise(self.builder.add(Conv2d(input_zero_point=3), [skip, weights]), channels)
        scaled = []
        for value in (skip, side):
            multiplier = self.builder.constant("m", np.array([self.random.integers(1 << 30, (1 << 31) - 1)], np.int32))
            shift = self.builder.constant("s", np.array([-1], np.int32))
            scaled.append(self.builder.add(Requantize(left_shift=20), [value, multiplier, shift]))
        total = self.builder.add(Add(), scaled)
        parameters = [self.builder.constant("p", np.array([number], np.int32)) for number in (1 << 30, -18)]
        self.value = self.builder.add(
            Clip(-128, 127, DType.INT8), [self.builder.add(Requantize(), [total, *parameters])]
        )

    def dense(self) -> None:
        """Everything into a few classes."""
        depth, outputs = int(np.prod(self.shape)), int(self.random.integers(1, 20))
        self.value = self.builder.add(Reshape((1, depth)), [self.value])
        weights = self.builder.constant("weights", self.random.integers(-127, 128, (outputs, depth)).astype(np.int8))
        self.value = self.requantise(
            self.builder.add(FullyConnected(input_zero_point=-2), [self.value, weights]), depth
        )

    def finish(self) -> Graph:
        """The graph, every node with an origin as a frontend gives it."""
        graph = self.builder.finish([self.value])
        return replace(graph, nodes=tuple(replace(node, origin=f"layer {node.output}") for node in graph.nodes))


def random_network(seed: int) -> Graph:
    """Two to five layers of any kind, odd sizes throughout."""
    network = Network(seed)
    for _ in range(int(network.random.integers(2, 6))):
        choice = int(network.random.integers(0, 5))
        stride = int(network.random.integers(1, 3))
        if choice == 4 and network.shape[-1] < 48:
            network.addition()
        elif choice in (1, 2) and min(network.shape[1:3]) >= 3:
            network.convolution(3, stride, depthwise=choice == 1)
        else:
            network.convolution(1, 1 if choice != 3 else stride, depthwise=False)
    if np.prod(network.shape) < 4000:
        network.dense()
    return network.finish()


def planned(graph: Graph, target: Target, policy: str, free: int = 0) -> tuple[Graph, Plan]:
    """The adapted graph and its verified plan."""
    adapted = adapt(graph, target.policy(policy))
    regions = partition(adapted, target)
    reserved = {target.code: free}
    return adapted, plan(choose_layouts(adapted, regions, target), target, reserved)


def check_placement(found: Plan, target: Target) -> None:
    """Peaks are at or above the bound; buffers in use together share no byte."""
    program = found.program
    timeline = Timeline(program.statements, program.buffers, program.dma)
    spans, order = timeline.spans, timeline.order
    calls = [statement for statement in program.statements if isinstance(statement, Call)]
    over = [(call, overwritten(call, program.buffers)) for call in calls]
    in_place = {frozenset((call.result.buffer, call.operands[name].buffer)) for call, name in over if name}
    for placement in found.placements:
        memory = target.memory(placement.memory)
        assert placement.lower_bound <= placement.peak <= memory.size
        placed = [b for b in program.buffers.values() if b.memory == memory.name and b.role is not Role.CONSTANT]
        ends = [b.address + b.nbytes - memory.base for b in placed if b.address is not None]
        assert max(ends, default=0) <= placement.peak
        for a, b in combinations([buffer for buffer in placed if buffer.name in spans], 2):
            assert a.address is not None and b.address is not None
            apart = a.address + a.nbytes <= b.address or b.address + b.nbytes <= a.address
            sequential = order.before(spans[a.name], spans[b.name]) or order.before(spans[b.name], spans[a.name])
            sequential |= frozenset((a.name, b.name)) in in_place
            assert apart or sequential, f"{a.name} and {b.name} are in use together and overlap"


def attempt(seed: int, kib: int, policy: str) -> Plan | None:
    """Plan, verify and interpret a random network; None where it does not fit, with a message that says so."""
    target = machine(kib)
    try:
        adapted, found = planned(random_network(seed), target, policy)
    except PlanError as error:
        numbers = [int(number) for number in re.findall(r"\d+", error.what.split("needs", 1)[-1])]
        assert re.search(r"needs \d+ bytes.*(are free|and has \d+)", error.what), error.what
        assert numbers[0] > numbers[1] or "are free" in error.what, error.what
        assert error.where and error.hint
        return None
    verify(found.program, target)
    check_program(found.program, target, adapted, sample_inputs(adapted, seed))
    check_placement(found, target)
    return found


@pytest.mark.parametrize("policy", ["engine", "exact"])
@pytest.mark.parametrize("group", range(8))
def test_random_networks(group: int, policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(group * 5, group * 5 + 5):
        for kib in SIZES:
            found = attempt(seed, kib, policy)
            seen["fits" if found else f"does not fit {kib}"] += 1
            if found:
                seen["launches"] += sum(isinstance(s, LaunchStatement) for s in found.program.statements)
                seen["cut"] += sum(len(tiling.tiles) > 1 for tiling in found.tilings.values())
                seen["copies"] += sum(isinstance(s, Copy) for s in found.program.statements)
    print(dict(seen))
    assert seen["fits"] >= 10
    assert seen["launches"] and seen["cut"] and seen["copies"]
    assert not seen["does not fit 128"], "these networks are small"


@pytest.mark.parametrize("kib", SIZES)
def test_less_memory_moves_more(kib: int) -> None:
    """The same network in less memory needs no fewer copies."""
    larger, smaller = attempt(1, 128, "engine"), attempt(1, kib, "engine")
    assert larger is not None
    if smaller is None:
        pytest.skip(f"the network does not fit {kib} KiB")
    copies = [sum(isinstance(s, Copy) for s in found.program.statements) for found in (smaller, larger)]
    assert copies[0] >= copies[1]


def test_a_layer_too_large_says_by_how_much() -> None:
    message = r"needs \d+ bytes of L1; \d+ are free|L1 needs \d+ bytes and has \d+"
    with pytest.raises(PlanError, match=message) as caught:
        planned(random_network(3), machine(0), "engine")
    assert caught.value.hint


def test_tiles_far_smaller_than_the_steps_where_no_others_fit() -> None:
    """For a layer of many inputs, whose smallest tile at the engine's steps is too large."""
    graph = single(12, 128, 40, stride=2)
    adapted, found = planned(graph, machine(8), "exact")
    verify(found.program, machine(8))
    check_program(found.program, machine(8), adapted, sample_inputs(adapted))
    check_placement(found, machine(8))
    assert any(max(tiling.shape[1:3]) < 6 for tiling in found.tilings.values()), "tiles of the engine's steps fit"
    roomy = planned(graph, machine(64), "exact")[1].tilings.values()
    assert not any(min(tiling.shape[1:3]) < 6 for tiling in roomy)


def test_the_bound_on_copies_of_a_cut_is_below_them() -> None:
    """It rules out tilings before the clock walks their tiles."""
    random, seen, target = np.random.default_rng(5), Counter[bool](), machine(128)
    for graph in (single(9, 24, 40), single(13, 16, 16, stride=2), single(6, 64, 72, 1)):
        regions = partition(adapt(graph, target.policy("exact")), target)
        (part,) = (LaidRegion.of(region).parts[0] for region in regions if region.engine is not None)
        clock = PartClock(part, target)
        for _ in range(60):
            shape = (1, *(int(random.integers(1, size + 1)) for size in part.shape[1:]))
            near = frozenset(name for name in (*part.graph.inputs, part.output) if random.random() < 0.3)
            outer = [None, True, False][random.integers(3)]
            cut = TileCut(shape, near, int(random.integers(1, 4)), outer)
            estimate = clock.estimate(cut, alike=True)
            assert estimate is not None
            bound = clock.copying(cut, clock.first(cut))
            assert bound <= estimate.copying
            seen[bound > estimate.copying / 2] += 1
    assert seen[True] > 60


def test_values_too_large_say_by_how_much() -> None:
    target = load_target("ne16")
    size = target.memory("L2").size
    message = rf"L2 needs \d+ bytes for values and {size - 100} for .* has {size}: \d+ bytes short"
    with pytest.raises(PlanError, match=message):
        planned(random_network(3), target, "engine", free=size - 100)


def test_the_same_plan_twice() -> None:
    first, second = (planned(random_network(11), machine(24), "engine")[1] for _ in range(2))
    assert first.program.buffers == second.program.buffers
    assert print_program(first.program) == print_program(second.program)


@pytest.mark.parametrize(("name", "policy"), [("cortex_m4", "exact"), ("ne16", "engine")])
def test_constants_that_no_memory_holds_are_refused_at_once(name: str, policy: str) -> None:
    """A network with more weights than there is flash ends with a message, on a core alone as with an engine."""
    target = load_target(name)
    memories = tuple(replace(m, size=40 * 1024) if m.name == target.code else m for m in target.memories)
    with pytest.raises(PlanError, match=r"has 40960 bytes, and constants, code and stacks take \d+") as caught:
        planned(random_network(3), replace(target, memories=memories), policy, free=50_000)
    assert caught.value.hint and "weigh most" in caught.value.where


def test_rounds_remember_only_what_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning that forgets every round all it knew finds the same programs."""
    networks = [adapt(random_network(seed), machine(16).policy("engine")) for seed in range(5)]
    laid = [choose_layouts(graph, partition(graph, machine(16)), machine(16)) for graph in networks]
    rounds: list[int] = []

    def outcome(number: int) -> str:
        """The program as text with its constants, or why there is none."""
        rounds.append(0)
        try:
            program = plan(laid[number], machine(16), {}).program
        except PlanError as error:
            return str(error)
        return print_program(program) + str([array.tobytes() for array in program.constants.values()])

    kept = [outcome(number) for number in range(len(laid))]
    rounds.clear()

    def forgetful(*given: Any) -> LoweredNetwork:
        rounds[-1] += 1
        return lower(*given[:-1])

    monkeypatch.setattr(planning, "lower", forgetful)
    monkeypatch.setattr(planning, "choose_tiling", lambda *given: choose_tiling(*given[:4], None, given[5]))
    assert [outcome(number) for number in range(len(laid))] == kept
    assert max(rounds) > 2, "no network needs several rounds"


@pytest.mark.parametrize("size", [(1, 3, 3, 16), (1, 3, 6, 40), (1, 3, 12, 16)])
def test_tiles_that_compute_the_same_share_it(size: tuple[int, ...]) -> None:
    """Tiles of a padded layer are what each is by itself; of a kind, they are worked out once."""
    net, target = Net("shared", (12, 12, 16)), load_target("ne16")
    graph = adapt(net.finish(net.convolution(net.x, 40)), target.policies[0])
    region = next(region for region in partition(graph, target) if region.engine is not None)
    (part,) = LaidRegion.of(region).parts
    boxes = list(tile_boxes(part.extent, size, True))
    found = list(packed_tiles(part, boxes))
    for box, one in zip(boxes, found, strict=True):
        alone = packed_tile(part, *tile_match(part, box))
        assert (one.tile.box, one.tile.reads, one.scratch) == (box, alone.tile.reads, alone.scratch)
        assert (one.tile.graph.nodes, one.tile.graph.types) == (alone.tile.graph.nodes, alone.tile.graph.types)
        for mine, own in ((one.tile.graph.constants, alone.tile.graph.constants), (one.packed, alone.packed)):
            assert {name: array.tobytes() for name, array in mine.items()} == {n: a.tobytes() for n, a in own.items()}
    kinds = {(one.tile.box[-1], tuple((lo == 0, hi == 12, hi - lo) for lo, hi in one.tile.box[1:3])) for one in found}
    assert len({id(one.tile.graph) for one in found}) <= len(kinds)


def test_constants_that_arrive_in_time_cut_no_layer() -> None:
    """Of three dense layers the first is cut, to begin before all its weights are there. Its last fetch is not held up
    by the second's; those arrive while the first is computed, and the second and the third are one launch each."""
    net = Net("dense", (1, 1, 512))
    value = net.x
    for channels in (128, 64, 64):
        value = net.dense(value, channels)
    target = load_target("macarray")
    graph = adapt(net.finish(value), target.policies[0])
    laid = choose_layouts(graph, partition(graph, target), target)
    made = plan(laid, target, {})
    verify(made.program, target)
    statements = made.program.statements
    launches = Counter(one.layer for one in statements if isinstance(one, LaunchStatement))
    first, second, third = sorted(launches)
    assert launches[first] > 1 and launches[second] == launches[third] == 1
    constants = {name for name, buffer in made.program.buffers.items() if buffer.role is Role.CONSTANT}
    fetched = [one.layer for one in statements if isinstance(one, Copy) and one.source.buffer in constants]
    assert fetched == sorted(fetched) and Counter(fetched)[first] == launches[first]
