"""Groups of unequal cores: layers pinned to them, stages of a pipeline for them, with and without the chip."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Compiled, Options, compile_graph, machine, prepare, sample_inputs
from dovetail.errors import PlaceError
from dovetail.ir.graph import Graph, evaluate
from dovetail.program.ir import CORE, Call, Wait
from dovetail.run import open_build, run_build
from dovetail.schedule.partition import partition
from dovetail.target.description import Target
from dovetail.targets import load_target
from firmware import require_chip
from networks import image_net
from test_cores import model
from test_cores_program import check_orders, compiled, sanitised, tangled, threaded, unlike

BIG, SMALL = load_target("riscv").core, load_target("riscv_big_small").workers[0]
EIGHT = replace(load_target("riscv"), name="eight", workers=(BIG, BIG, BIG, *[SMALL] * 4))
"""Three big cores, one more, and four small ones."""
THREE, ONE, FOUR = "core0+core1+core2", "core3", "core4+core5+core6+core7"
NEAR = 0.06
"""How far estimates may be from the simulator."""


def residual(blocks: int = 3, size: int = 24, width: int = 8) -> Graph:
    """ResNet of the form for CIFAR-10 (arXiv 1512.03385) with random weights: 6 * blocks + 2 layers, so 20 as given."""
    net = image_net("residual", size)
    value = net.convolution(net.x, width, relu=True)
    for step, block in product(range(3), range(blocks)):
        channels, stride = width << step, 2 if step and not block else 1
        inner = net.convolution(net.convolution(value, channels, stride=stride, relu=True), channels)
        kept = net.convolution(value, channels, 1, stride=stride) if stride > 1 else value
        value = net.addition(kept, inner, relu=True)
    return net.finish(net.dense(net.mean(value), 10))


def kernels(graph: Graph, target: Target) -> list[str]:
    """Names of the layers that kernels compute, in order."""
    return [region.name for region in partition(graph, target) if region.is_kernel]


def free_starts(*speeds: float) -> Target:
    """Cores of these speeds, none of which takes time to start another."""
    target = unlike(*speeds)
    core, *workers = (replace(one, statements=replace(one.statements, worker=0)) for one in target.cores)
    return replace(target, core=core, workers=tuple(workers))


def drawn(graph: Graph, seed: int, pipeline: bool) -> tuple[Target, dict[str, str]]:
    """Three to six cores of any speed that share even the smallest layer, in groups, and layers pinned to them: in a
    pipeline in the order of the network, and a core may be left over."""
    draw = random.Random(seed)
    target = free_starts(*(draw.choice((1.0, 0.5, 0.3, 2.0)) for _ in range(draw.randint(3, 6))))
    cores = draw.sample(range(len(target.cores)), len(target.cores))
    ends = sorted({*draw.sample(range(1, len(cores)), draw.randint(1, 2)), len(cores)})
    groups = [cores[first:last] for first, last in pairwise((0, *ends))]
    names = kernels(graph, target)
    chosen = draw.sample(range(len(names)), min(len(names), len(groups)))
    chosen = sorted(chosen) if pipeline else chosen
    pins = {names[at]: "+".join(f"core{c}" for c in own) for at, own in zip(chosen, groups, strict=False)}
    if pipeline and draw.random() < 0.5 and len(pins) > 1:
        del pins[draw.choice(list(pins))]
    return target, pins


@given(seed=st.integers(0, 1 << 30), pipeline=st.booleans())
@settings(max_examples=30, deadline=None)
def test_random_groups_and_pins_compute_the_network_in_any_order(seed: int, pipeline: bool) -> None:
    graph = tangled(seed, 5) if seed % 2 else residual(1, 6 + seed % 7)
    target, pins = drawn(graph, seed, pipeline)
    found = compiled(graph, target, pins=pins, pipeline=pipeline)
    by_group = {tuple(sorted(int(one.removeprefix("core")) for one in pin.split("+"))) for pin in pins.values()}
    if found.pipeline is not None:
        assert by_group <= {stage.cores for stage in found.pipeline.stages}
        assert sorted(c for stage in found.pipeline.stages for c in stage.cores) == list(range(len(target.cores)))
    else:
        for place, region in enumerate(found.regions):
            own = [
                call.core for call in found.plan.program.statements if isinstance(call, Call) and call.layer == place
            ]
            group = pins.get(region.name, "")
            assert not group or {f"core{core}" for core in own} <= set(group.split("+"))
    check_orders(found, graph, target, 2)


def ran(graph: Graph, target: Target, folder: Path, pins: Mapping[str, str]) -> tuple[Compiled, list[int]]:
    """A pipeline on the simulated chip, every output compared with the network; cycles of each step."""
    found = compile_graph(graph, target, Options(pins=pins, pipeline=True))
    assert found.pipeline is not None
    inputs = [sample_inputs(graph, seed) for seed in range(found.pipeline.delay + 2)]
    write_project(found.project, folder / "build")
    result = run_build(open_build(folder / "build", target), "iss", inputs)
    for one, outputs in zip(inputs, result.outputs, strict=True):
        for name, expected in evaluate(graph, one).items():
            np.testing.assert_array_equal(outputs[name], expected)
    return found, [one.total_cycles or 0 for one in result.simulation.inferences]


@pytest.mark.oracles
@pytest.mark.parametrize("network", ["resnet8", "residual"])
def test_time_between_inputs_and_to_their_outputs_is_near_the_estimate(network: str, tmp_path: Path) -> None:
    """Three big cores, one big, four small; and the stages the search finds by itself."""
    require_chip()
    graph = prepare(model("ic_resnet8"), EIGHT, Options()) if network == "resnet8" else residual()
    names = kernels(graph, EIGHT)
    for pins in ({names[0]: THREE, names[len(names) // 2]: ONE, names[-1]: FOUR}, {}):
        found, steps = ran(graph, EIGHT, tmp_path / str(len(pins)), pins)
        assert found.pipeline is not None
        interval, stages = found.pipeline.interval, len(found.pipeline.stages)
        assert not pins or [stage.cores for stage in found.pipeline.stages] == [(0, 1, 2), (3,), (4, 5, 6, 7)]
        latency = sum(steps[-stages:])
        print(f"{network}, {stages} stages: every {steps[-1]:,} cycles ({interval / steps[-1] - 1:+.2%})", end=", ")
        print(f"outputs after {latency:,} ({interval * stages / latency - 1:+.2%})")
        assert interval == pytest.approx(steps[-1], rel=NEAR)
        assert interval * stages == pytest.approx(latency, rel=NEAR)


@pytest.mark.parametrize("seed", [3, 8])
def test_random_groups_on_the_simulated_chip(seed: int, tmp_path: Path) -> None:
    require_chip()
    graph = tangled(seed, 4) if seed % 2 else residual(1, 8)
    target, pins = drawn(graph, seed, True)
    ran(graph, target, tmp_path, pins)


def test_pins_of_a_pattern_and_of_a_file_name_groups(tmp_path: Path) -> None:
    """The pin of a layer counts before that of a pattern."""
    graph = tangled(2)
    names = kernels(graph, EIGHT)
    (tmp_path / "pins.json").write_text(json.dumps({"pins": {"c*": FOUR, names[-1]: ONE}}))
    target, options = machine(EIGHT, Options(pins_file=tmp_path / "pins.json"))
    found = compile_graph(graph, target, options)
    used = {call.layer: set[int]() for call in found.plan.program.statements if isinstance(call, Call)}
    for call in found.plan.program.statements:
        if isinstance(call, Call):
            used[call.layer].add(call.core)
    for place, region in enumerate(found.regions):
        if region.is_kernel:
            assert used[place] <= ({3} if region.name == names[-1] else {4, 5, 6, 7})


def test_what_pins_cannot_mean_in_a_pipeline_is_refused() -> None:
    graph, target = tangled(0), unlike(1.0, 1.0, 1.0)
    first, second, third = kernels(graph, target)[:3]
    for pins, words in (
        ({first: "core0", second: "core1", third: "core0"}, "core 0 would compute two stages"),
        ({first: "core0+core1", second: "core1+core2"}, "core 1 would compute two stages"),
        ({first: "core0+core1+core2"}, "all cores are in one group"),
        ({"nothing_*": "core0"}, "there is no such layer"),
    ):
        with pytest.raises(PlaceError, match=words) as told:
            compiled(graph, target, pins=pins, pipeline=True)
        assert told.value.hint


def test_further_cores_wait_for_one_another_and_core_0_goes_on() -> None:
    graph = residual(1, 8)
    names = kernels(graph, EIGHT)
    found = compiled(graph, EIGHT, pins={names[0]: FOUR, names[-1]: THREE}, pipeline=True)
    statements = found.plan.program.statements
    waits = [one for one in statements if isinstance(one, Wait)]
    assert any(one.core != CORE for one in waits)
    own = [place for place, one in enumerate(statements) if isinstance(one, Call) and one.core == 0]
    others = [place for place, one in enumerate(statements) if isinstance(one, Call) and one.core > 3]
    assert max(others) < min(own), "core 0 has started all jobs of the other stages before its own work"
    assert not any(isinstance(one, Wait) and one.core == CORE for one in statements[: min(own)])


def test_the_thread_sanitizer_sees_no_race_between_cores_of_a_group_and_sees_them_without_waits(tmp_path: Path) -> None:
    graph, target = residual(1, 8), unlike(1.0, 1.0, 0.6, 0.5)
    names = kernels(graph, target)
    found = compiled(graph, target, pins={names[0]: "core2+core3", names[-1]: "core0+core1"}, pipeline=True)
    folder = threaded(found, tmp_path / "build")
    source = folder / "src" / f"{found.unit.model}.c"
    lines = source.read_text().splitlines()
    kept = [line for line in lines if "core_after(" not in line]
    assert len(kept) < len(lines)
    assert sanitised(folder, found.unit.model).strip() == "0"
    source.write_text("\n".join(kept))
    # Threads that happen to run one after the other do not meet: some runs see nothing.
    assert any("data race" in sanitised(folder, found.unit.model) for _ in range(10))


def test_nothing_is_proven_where_pins_leave_no_choice() -> None:
    graph, target = tangled(1), unlike(1.0, 1.0)
    found = compiled(graph, target, pins={kernels(graph, target)[0]: "core1"})
    said = found.assignment.describe()
    assert "by estimate" in said and "least" not in said
    assert f"{found.assignment.clock:,}" in said
