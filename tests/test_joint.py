"""Launches side by side: firmware, what the device did, the search for turns, and faults the checks find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, prepare, sample_inputs
from dovetail.errors import ProgramError, SimulationError
from dovetail.explain import PlacementReport
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.linear import Conv2d
from dovetail.program.interpret import check_program
from dovetail.program.ir import Call, LaunchStatement, Program, Wait, side_by_side
from dovetail.program.synchronise import synchronise
from dovetail.program.verify import verify
from dovetail.run import open_build, run_build
from dovetail.schedule import joint
from dovetail.schedule.region import LaidRegion
from dovetail.sim.device import MemoryBus, MemoryRegion
from dovetail.sim.protocol import InferenceResult
from dovetail.target import Engine, Joint, Launched
from dovetail.targets.maeri import target
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.device import MaeriDevice, MaeriRegister
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.order import check
from dovetail.targets.maeri.task import Part, Task, encode, of_parts
from dovetail.targets.maeri.task import side_by_side as ordered_together
from firmware import require_chip
from networks import branches, image_net, mixed_kernels
from test_end_to_end import network_file
from test_maeri_target import layer_task

NARROW = MaeriConfig(64, 16, 16)
"""Ports and lines shared by four multipliers."""


def inception() -> Graph:
    """1x1, 3x3 and 5x5 of one input, joined; and what follows on the core."""
    return branches(8, 4, (4, 4, 4, 4, 4))


def kernels() -> Graph:
    """3x3, 4x4 and 5x5 of one image."""
    return mixed_kernels(12, 1, 4)


@cache
def compiled(make: Callable[[], Graph], config: MaeriConfig) -> Compiled:
    return compile_graph(make(), target(config), Options())


def inference(make: Callable[[], Graph], config: MaeriConfig, folder: Path) -> InferenceResult:
    """One inference of the firmware, whose outputs, and this computer's, are the integer graph's."""
    made = compiled(make, config)
    inputs = sample_inputs(made.graph)
    write_project(made.project, folder)
    for simulator in ("host", "iss") if config.joint > 1 else ("iss",):
        result = run_build(open_build(folder, target(config)), simulator, [inputs])
        for name, array in evaluate(made.graph, inputs).items():
            np.testing.assert_array_equal(result.outputs[0][name], array)
    return result.simulation.inferences[0]


@pytest.mark.parametrize(
    ("make", "config", "least"), [(inception, NARROW, 200), (kernels, MaeriConfig(), 200), (kernels, NARROW, 200)]
)
def test_branches_work_at_the_same_time(
    make: Callable[[], Graph], config: MaeriConfig, least: int, tmp_path: Path
) -> None:
    """Exact, fewer cycles than one layer after the other, and in as many as the compiler was told; for `least` cycles
    at least two layers are computed."""
    require_chip()
    found = inference(make, config, tmp_path / "joint")
    alone = inference(make, replace(config, joint=1), tmp_path / "alone")
    assert found.total_cycles is not None and alone.total_cycles is not None
    assert found.total_cycles < alone.total_cycles
    program = compiled(make, config).plan.program
    groups = list(dict.fromkeys(side_by_side(program.statements).values()))
    assert groups and not side_by_side(compiled(make, replace(config, joint=1)).plan.program.statements)
    launches = [index for index, one in enumerate(program.statements) if isinstance(one, LaunchStatement)]
    jobs = dict(zip(launches, found.activities["maeri"], strict=True))
    overlap = 0
    for group in groups:
        own = [jobs[index] for index in group]
        begin, end = min(job.start for job in own), max(job.end for job in own)
        asked = [cast("LaunchStatement", program.statements[index]).match for index in group]
        promised = cast("Joint", target(config).engines[0].joint).cycles([Launched("", match) for match in asked])
        assert end - begin == promised
        overlap += sum(job.end - job.start for job in own) - (end - begin)
    print(make.__name__, config.distribution, found.total_cycles, alone.total_cycles, overlap)
    assert overlap >= least


def test_shortcuts_of_resnet8() -> None:
    """Its two convolutions of 1x1 begin with one of 3x3 each (that the outputs are exact `test_maeri_target` says)."""
    graph = prepare(network_file("ic_resnet8"), target(MaeriConfig()), Options())
    program = compile_graph(graph, target(MaeriConfig()), Options(), interpret=False).plan.program
    launched = [one for one in program.statements if isinstance(one, LaunchStatement)]
    kernels = {one.layer: one.match.array("weights").shape[1] for one in launched if one.match.has("layer")}
    groups = set(side_by_side(program.statements).values())
    layers = [[program.statements[index].layer for index in group] for group in groups]
    assert [sorted(kernels[layer] for layer in own) for own in layers] == [[1, 3], [1, 3]]


def test_what_people_read(tmp_path: Path) -> None:
    """The program, the C and `explain` say what is done beside what."""
    made = compiled(kernels, NARROW)
    held = next(
        one for one in made.plan.program.statements if isinstance(one, LaunchStatement) and one.starts_with_next
    )
    name = made.plan.program.layers[held.layer]
    source = made.project.files["src/mixed.c"]
    text = source if isinstance(source, str) else source.decode()
    assert f"/* {name} on maeri beside " in text and f"(void)maeri_hold(mixed_{name}_task, " in text
    report = PlacementReport(
        made.graph, target(NARROW), Options(), made.regions, made.assignment, side=made.unit.beside
    )
    rows = report.rows()
    assert [row["name"] for row in rows if name in row["beside"]]
    assert (
        made.project.files["src/mixed.c"]
        == compile_graph(kernels(), target(NARROW), Options()).project.files["src/mixed.c"]
    )


def broken(program: Program, **changes: Any) -> Program:
    """The program without its waits, some launches changed by the name of their layer, and waits put in anew."""
    statements = [
        replace(one, starts_with_next=changes[program.layers[one.layer]])
        if isinstance(one, LaunchStatement) and program.layers[one.layer] in changes
        else one
        for one in program.statements
        if not isinstance(one, Wait)
    ]
    return replace(program, statements=synchronise(statements, program.dma))


def test_faults_are_found() -> None:
    """Launches that depend on each other, too many, and ones that nobody starts or waits for rightly."""
    chip = target(NARROW)
    program = compiled(kernels, replace(NARROW, joint=1)).plan.program
    first, second, third, fourth = (
        program.layers[one.layer] for one in program.statements if isinstance(one, LaunchStatement)
    )
    verify(broken(program, **{second: True}), chip)
    check_program(broken(program, **{second: True}), chip, compiled(kernels, NARROW).graph, sample_inputs(kernels()))
    for wrong, message in (
        ({first: True}, "they begin together"),
        ({fourth: True}, "which another launch starts"),
        ({first: True, second: True, third: True}, "3 launches at a time|they begin together"),
    ):
        with pytest.raises(ProgramError, match=message):
            verify(broken(program, **wrong), chip)
    with pytest.raises(ProgramError, match="takes 1 launches at a time"):
        verify(broken(program, **{second: True}), target(replace(NARROW, joint=1)))
    mine = broken(program, **{second: True})
    unheard = broken(program, **{fourth: True}).statements[:-1]
    with pytest.raises(ProgramError, match="which none starts"):
        verify(replace(program, statements=unheard), chip)
    held = next(
        index for index, one in enumerate(mine.statements) if isinstance(one, LaunchStatement) and one.starts_with_next
    )
    early = [replace(one, statement=held) if isinstance(one, Wait) else one for one in mine.statements]
    with pytest.raises(ProgramError, match="which another launch starts"):
        verify(replace(mine, statements=tuple(early)), chip)


def chains() -> Graph:
    """Two chains of layers: of each pair side by side one's operand dies where the other's result begins to live."""
    net = image_net("chains", 8, 4)
    ends = [net.x, net.x]
    for _ in range(3):
        ends = [net.convolution(ends[0], 4, 3), net.convolution(ends[1], 4, 5)]
    return net.finish(net.addition(*ends))


def test_memory_is_not_shared_within_a_joint_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that thinks such launches are in order lays a result over the operand of another."""
    made = compile_graph(chains(), target(NARROW), Options())
    assert len(set(side_by_side(made.plan.program.statements).values())) == 3
    lifetimes = import_module("dovetail.schedule.plan.lifetimes")
    monkeypatch.setattr(lifetimes, "side_by_side", lambda statements: {})
    with pytest.raises(ProgramError, match="they begin together"):
        compile_graph(chains(), target(NARROW), Options())


def test_waits_are_for_the_launch_that_starts_all() -> None:
    """A core that reads what a held launch writes waits for the one that starts it."""
    program = compiled(chains, NARROW).plan.program
    groups = side_by_side(program.statements)
    waits = [one.statement for one in program.statements if isinstance(one, Wait)]
    assert waits and all(groups.get(wait, (wait,))[-1] == wait for wait in waits)
    assert all(not isinstance(one, Call) or one.core == 0 for one in program.statements)


LAYER = OrderLayer(3, 3, 4, 4, 6, 6)


def part_of(layer: OrderLayer) -> Part:
    """A convolution as a part of a launch."""
    shape = (layer.filters, layer.rows, layer.columns, layer.channels)
    return Conv2d(), (1, layer.in_rows, layer.in_columns, layer.channels), shape


def test_the_device_refuses() -> None:
    """More tasks than may begin together, additions beside others, tasks on the same multipliers."""
    bus = MemoryBus([MemoryRegion("ram", 0x1000, 0x4000)])
    order = ordered_together((part_of(LAYER),), NARROW)
    assert order is not None
    task = layer_task(LAYER, order.items)

    def given(device: MaeriDevice, *tasks: Task) -> None:
        for number, each in enumerate(tasks):
            words = encode(each)
            bus.view(0x1000, 4 * len(words)).view("<u4")[:] = words
            device.write(MaeriRegister.TASK, 0x1000, 0)
            device.write(MaeriRegister.WORDS, len(words), 0)
            device.write(MaeriRegister.CONSTANTS, 0x2000, 0)
            device.write(MaeriRegister.CONTROL if number == len(tasks) - 1 else MaeriRegister.HOLD, 1, 0)

    with pytest.raises(SimulationError, match="2 tasks held; 3 may begin together"):
        given(MaeriDevice(bus, multipliers=64, distribution=16, collection=16), task, task, task, task)
    with pytest.raises(SimulationError, match="an addition takes all"):
        given(MaeriDevice(bus, multipliers=64, distribution=16, collection=16), task, replace(task, items=()))
    with pytest.raises(SimulationError, match="is in use until cycle"):
        given(MaeriDevice(bus, multipliers=64, distribution=16, collection=16), task, task)
    with pytest.raises(SimulationError, match="HOLD is written 2"):
        MaeriDevice(bus).write(MaeriRegister.HOLD, 2, 0)


def test_machine_and_model_agree_on_joint_launches() -> None:
    """The scheduler's cycles of several layers in one launch are the machine's, but for a few."""
    sizes = ((1, 8, 8, 8), (3, 4, 4, 8), (4, 1, 8, 9))
    layers = [OrderLayer(k, k, c, f, n + k - 1, n + k - 1) for k, c, f, n in sizes]
    for config in (MaeriConfig(), NARROW):
        for pair in combinations(layers, 2):
            parts = tuple(map(part_of, pair))
            order = arrange(of_parts(parts), config)
            cycles = check(order)
            assert abs(order.makespan - cycles) <= 8
            best = ordered_together(parts, config)
            assert best is not None and best.makespan <= cycles and check(best) == best.makespan


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], list[int], dict[tuple[int, ...], int]]:
    """What each of some regions reads, its cycles, and those of pairs."""
    count = draw(st.integers(2, 5))
    reads = [draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=2, unique=True)) if n else [] for n in range(count)]
    cycles = [draw(st.integers(20, 200)) for _ in range(count)]
    pairs = {
        pair: max(cycles[pair[0]] + cycles[pair[1]] - draw(st.integers(-20, 60)), 1)
        for pair in combinations(range(count), 2)
    }
    return reads, cycles, pairs


@given(graphs())
def test_turns_end_first(drawn: tuple[list[list[int]], list[int], dict[tuple[int, ...], int]]) -> None:
    """No other way to pair regions ends earlier, and each region comes behind what it reads."""
    reads, cycles, pairs = drawn
    handing = 10

    def of(launches: Sequence[Launched]) -> int:
        own = tuple(int(launch.offload) for launch in launches)
        return pairs[own] if len(own) == 2 else cycles[own[0]]

    ways = Joint(2, of, lambda launches: [() for _ in launches], handing)
    engine = cast("Engine", SimpleNamespace(name="e", joint=ways))
    regions = [
        SimpleNamespace(
            name=str(n), output=str(n), graph=SimpleNamespace(inputs=[str(m) for m in own]), shares=(object(),),
            is_idle=False, copied_by="",
            parts=(SimpleNamespace(offload=SimpleNamespace(name=str(n)), match=object(), extent=()),),
        )
        for n, own in enumerate(reads)
    ]  # fmt: skip
    search = joint._TurnSearch(cast("Sequence[LaidRegion]", regions), engine, ways, {})
    run = tuple(range(len(reads)))
    assert len({search.neighbours(index) for index in run}) == 1
    with patch.object(joint, "tile_match", lambda part, extent: (None, part.match)):
        turns = search.turns(run)
    assert sorted(index for turn in turns for index in turn) == list(run)

    def ends(turns: Sequence[tuple[int, ...]]) -> int:
        core, done = 0, [0, 0]
        for turn in turns:
            core = max(core, done[-2]) + handing * len(turn)
            done.append(max(core, done[-1]) + (pairs[turn] if len(turn) == 2 else cycles[turn[0]]))
        return done[-1]

    def every(done: frozenset[int]) -> list[tuple[tuple[int, ...], ...]]:
        if len(done) == len(run):
            return [()]
        ready = [n for n in run if n not in done and set(reads[n]) <= done]
        sets = [*((n,) for n in ready), *combinations(ready, 2)]
        return [(turn, *rest) for turn in sets for rest in every(done | set(turn))]

    assert turns in every(frozenset())
    assert ends(turns) == min(map(ends, every(frozenset())))
