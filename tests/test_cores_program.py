"""Several cores without the chip: no order of the cores' work changes a result, and what could is refused."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from core_kernel_cases import Maker
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Compiled, Options, compile_graph, sample_inputs
from dovetail.errors import PlaceError, ProgramError, TargetError
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad, Slice
from dovetail.ir.operators.recurrent import Recurrent, RecurrentKind
from dovetail.ir.types import Array, DType, TensorType
from dovetail.kernels import Optimize
from dovetail.program.ir import CORE, Begin, Call, Program, Statement, View, Wait, core_queue
from dovetail.program.verify import verify
from dovetail.run import open_build, run_build
from dovetail.schedule.partition import partition
from dovetail.target.description import Target
from dovetail.targets import load_target
from interpreted import interpret
from property_batches import needs_compiler, run_batch
from test_properties_tflite import make

RISCV = load_target("riscv")


def unlike(*speeds: float) -> Target:
    """A target with cores of these speeds."""
    cores = [replace(RISCV.core, speed=speed) for speed in speeds]
    return replace(RISCV, core=cores[0], workers=tuple(cores[1:]))


def tangled(seed: int, layers: int = 6) -> Graph:
    """Convolutions and additions of anything that came before; two outputs, one of them early."""
    maker = Maker(f"tangled {seed}")
    depth = maker.one_of(3, 8)
    values = [maker.input((1, maker.number(5, 12), maker.one_of(4, 5), depth), DType.INT8)]
    for _ in range(layers):
        padded = maker.add(Pad((0, 1, 1, 0), (0, 1, 1, 0), 3), maker.one_of(*values[-3:]))
        weights = maker.constant((depth, 3, 3, depth), DType.INT8)
        sums = maker.requantize(maker.add(Conv2d((1, 1), (1, 1), 3, 0), padded, weights))
        side = maker.add(Clip(-128, 127, DType.INT8), sums)
        both = [maker.requantize(value) for value in (maker.one_of(*values), side)]
        total = maker.requantize(maker.add(Add(), *both))
        values.append(maker.add(Clip(-128, 127, DType.INT8), total))
    return maker.builder.finish([values[-1], values[2]])


def compiled(graph: Graph, target: Target, **options: object) -> Compiled:
    """A network, verified and interpreted."""
    return compile_graph(graph, target, Options(**options))  # type: ignore[arg-type]


def any_order(program: Program, seed: int) -> tuple[Statement, ...]:
    """The statements in an order in which they may end: the cores at any pace, each waiting where it has to."""
    pace, made, done = random.Random(seed), list[Statement](), set[int]()
    queues: dict[str, deque[tuple[int, Statement]]] = {CORE: deque(enumerate(program.statements))}

    def may_go(queue: str) -> bool:
        if not queues[queue]:
            return False
        _, first = queues[queue][0]
        return not isinstance(first, Wait) or first.core != queue or first.statement in done

    while any(queues.values()):
        queue = pace.choice([queue for queue in queues if may_go(queue)])
        index, statement = queues[queue].popleft()
        whose = core_queue(statement.core) if isinstance(statement, Call) else getattr(statement, "core", CORE)
        if whose != queue:
            queues.setdefault(whose, deque()).append((index, statement))
        elif not isinstance(statement, Wait):
            done.add(index)
            made.append(statement)
    return tuple(made)


def check_orders(found: Compiled, graph: Graph, target: Target, orders: int = 4) -> None:
    """Successive inferences in several orders equal the network's."""
    delay = found.pipeline.delay if found.pipeline else 0
    inputs = [sample_inputs(graph, seed) for seed in range(delay + 2)]
    for seed in range(orders):
        program = replace(found.plan.program, statements=any_order(found.plan.program, seed))
        outputs = interpret(program, target, inputs)[delay:]
        for given, one in zip(inputs[:2], outputs, strict=True):
            for name, expected in evaluate(graph, given).items():
                assert np.array_equal(one[name], expected), f"order {seed}: {name}"


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_the_parts_of_layers_changes_a_result(seed: int) -> None:
    graph, target = tangled(seed), unlike(*((1.0,) * 4, (1.0, 0.5), (0.5, 2.0, 1.0))[seed % 3])
    found = compiled(graph, target)
    rows = found.graph.types[graph.inputs[0]].nbytes // found.graph.types[graph.inputs[0]].shape[1]
    assert rows % 8 or len({call.core for call in calls(found.plan.program)}) > 1
    check_orders(found, graph, target)


@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_the_stages_of_a_pipeline_changes_a_result(seed: int) -> None:
    """Values that pass stages by, inputs that are read late and outputs that are early, all come out together."""
    graph = tangled(seed)
    target = unlike(*[(1.0, 0.5), (1.0,) * 3, (0.3, 1.0, 1.0, 0.2), (1.0,) * 5][seed % 4])
    found = compiled(graph, target, pipeline=True)
    assert found.pipeline is not None and len(found.pipeline.stages) > 1
    assert [core for stage in found.pipeline.stages for core in stage.cores] == list(range(len(target.cores)))
    assert sum(stage.share for stage in found.pipeline.stages) == pytest.approx(1)
    check_orders(found, graph, target)


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_pinned_to_a_core_is_computed_there_alone(seed: int) -> None:
    graph, target = tangled(seed), unlike(1.0, 0.5, 2.0)
    names = [region.name for region in compiled(graph, target).regions if region.place == CORE]
    wanted = dict(zip(names, ("core2", "core1", "core0"), strict=False))
    found = compiled(graph, target, pins=wanted)
    for name, core in wanted.items():
        layer = next(place for place, region in enumerate(found.regions) if region.name == name)
        assert [f"core{call.core}" for call in calls(found.plan.program) if call.layer == layer] == [core]
    check_orders(found, graph, target, 2)


def test_pins_to_cores_that_are_not_there_are_refused() -> None:
    graph, target = tangled(0), unlike(1.0, 1.0)
    name = next(region.name for region in compiled(graph, target).regions)
    for pin, say in (("core2", "use core, core0, core1$"), ("core0+core", "name one place"), ("core01", "use core, ")):
        with pytest.raises(PlaceError) as told:
            compiled(graph, target, pins={name: pin})
        assert re.search(say, told.value.hint)
    with pytest.raises(PlaceError, match="'core1', which riscv does not have"):
        compiled(graph, RISCV, pins={name: "core1"})


def calls(program: Program) -> list[Call]:
    return [statement for statement in program.statements if isinstance(statement, Call)]


def changed(program: Program, index: int, statement: Statement) -> Program:
    statements = list(program.statements)
    statements[index] = statement
    return replace(program, statements=tuple(statements))


@pytest.mark.parametrize("pipeline", [False, True])
def test_every_wait_is_needed_and_missed_by_the_verifier(pipeline: bool) -> None:
    graph, target = tangled(1), unlike(1.0, 1.0, 1.0)
    name = next(region.name for region in partition(graph, target) if region.is_kernel)
    pins = {name: "core1+core2"} if pipeline else {}
    program = compiled(graph, target, pipeline=pipeline, pins=pins).plan.program
    waits = [(index, wait) for index, wait in enumerate(program.statements) if isinstance(wait, Wait)]
    assert len(waits) > 3
    assert pipeline == any(wait.core != CORE for _, wait in waits)
    for index, wait in waits:
        assert wait.queue not in (CORE, wait.core)
        with pytest.raises(ProgramError, match=r"a wait is missing|may still run"):
            verify(changed(program, index, Begin(wait.layer)), target)


def test_parts_that_overlap_or_leave_a_gap_are_refused() -> None:
    graph, target = tangled(1), unlike(1.0, 1.0, 1.0)
    program = compiled(graph, target).plan.program
    verify(program, target)
    index, call = next((i, c) for i, c in enumerate(program.statements) if isinstance(c, Call) and c.core == 2)
    row = call.result.strides[1]
    for shift, words in ((-row, "may still be writing"), (row, "never written|bytes|may still be writing")):
        moved = replace(call, result=replace(call.result, offset=call.result.offset + shift))
        with pytest.raises(ProgramError, match=words):
            verify(changed(program, index, moved), target)


def test_parts_of_a_result_are_disjoint_and_all_of_it() -> None:
    for seed in range(3):
        program = compiled(tangled(seed), unlike(1.0, 0.7, 0.4)).plan.program
        by_layer: dict[int, list[View]] = {}
        for call in calls(program):
            by_layer.setdefault(call.layer, []).append(call.result)
        for views in by_layer.values():
            spans = sorted(view.span for view in views)
            assert all(stop == start for (_, stop), (start, _) in pairwise(spans))
            assert (spans[0][0], spans[-1][1]) == (0, program.buffers[views[0].buffer].nbytes)


def grus(seed: int = 0) -> Graph:
    """Two float recurrent layers of one shape, which need memory while they run."""
    maker = Maker(f"gru {seed}")
    value, hidden, steps = maker.input((4, 1, 6), DType.FLOAT32), 6, 4
    for _ in range(2):
        shapes = [(3 * hidden, 6), (3 * hidden, hidden), (6 * hidden,), (1, 1, hidden)]
        arrays = [maker.array(TensorType(shape, DType.FLOAT32)) / 100 for shape in shapes]
        constants = [maker.builder.constant("k", array.astype(np.float32)) for array in arrays]
        made = maker.builder.add(Recurrent(RecurrentKind.GRU, False, False, ()), [value, *constants])
        value = maker.builder.add(Slice((0, 0, 0), (steps, 1, hidden), (1, 1, 1)), [made])
    return maker.builder.finish([value])


def test_kernels_with_memory_of_their_own_are_not_shared_by_cores() -> None:
    for target, pipeline, copies in ((RISCV, False, 1), (unlike(1.0, 1.0), True, 2)):
        files = compiled(grus(), target, pipeline=pipeline, allow_float=True).project.files
        kernels = next(text for name, text in files.items() if name.endswith("_kernels.c"))
        assert kernels.count("static float scaled") == copies


@needs_compiler
def test_random_models_in_parts_equal_tensorflow_lite_micro(tmp_path: Path) -> None:
    """Even the smallest layer is shared where it can be."""
    cases, target = [make("chain", seed) for seed in range(7000, 7012)], unlike(1.0, 0.6, 0.3)
    core = replace(target.core, statements=replace(target.core.statements, worker=0))
    outcome = run_batch(cases, replace(target, core=core), "host", tmp_path)
    assert outcome.compared == 12 and outcome.off == 0


def threaded(found: Compiled, folder: Path) -> Path:
    """A build with the five functions written for threads of this computer."""
    write_project(found.project, folder)
    (folder / "runtime" / "cores.c").write_text((Path(__file__).with_name("threads_hal.c")).read_text())
    return folder


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_users_own_five_functions_run_the_emitted_code(pipeline: bool, tmp_path: Path) -> None:
    graph, target = tangled(4, 4), unlike(1.0, 1.0, 0.6)
    found = compiled(graph, target, pipeline=pipeline)
    build = open_build(threaded(found, tmp_path / "build"), target)
    inputs = [sample_inputs(graph, seed) for seed in range(5)]
    outputs = run_build(build, "host", inputs, tmp_path / "cache").outputs
    for given, one in zip(inputs, outputs, strict=True):
        for name, expected in evaluate(graph, given).items():
            assert np.array_equal(one[name], expected)


RACES = """
#include "{model}.h"
#include <string.h>
int main(void)
{{
    for (int run = 0; run < 50; ++run) {{
        memset({model_capital}_INPUT_0, run, {model_capital}_INPUT_0_ELEMENTS);
        {model}_run();
    }}
    return 0;
}}
"""


def sanitised(folder: Path, model: str) -> str:
    """What the thread sanitizer says of a build, linked with threads; skips where there is none."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no host compiler with a thread sanitizer")
    (folder / "main.c").write_text(RACES.format(model=model, model_capital=model.upper()))
    sources = [*sorted((folder / "src").glob("*.c")), folder / "runtime" / "cores.c", folder / "main.c"]
    sources += sorted((folder / "runtime").glob("copy.c"))
    flags = ["-fsanitize=thread", "-std=gnu99", "-O1", "-fno-strict-aliasing", "-DDOVETAIL_HOST", "-Isrc", "-Iruntime"]
    command = [compiler, *flags, *map(str, sources), "-o", "races", "-lpthread"]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("no thread sanitizer here")
    ran = subprocess.run([str(folder / "races")], capture_output=True, text=True, check=False, timeout=60)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the thread sanitizer cannot run here")
    return f"{ran.returncode} {ran.stderr}"


@pytest.mark.parametrize("pipeline", [False, True])
def test_the_thread_sanitizer_sees_no_race_and_sees_them_without_waits(pipeline: bool, tmp_path: Path) -> None:
    graph, target = tangled(4, 3 if pipeline else 5), unlike(1.0, 1.0, 0.6)
    found = compiled(graph, target, pipeline=pipeline, optimize=Optimize.SIZE)
    folder, model = threaded(found, tmp_path / "build"), found.unit.model
    assert sanitised(folder, model).strip() == "0"
    if pipeline:
        return
    source = folder / "src" / f"{model}.c"
    source.write_text("\n".join(line for line in source.read_text().splitlines() if "core_wait(" not in line))
    # Threads that happen to run one after the other do not meet: some runs see nothing.
    assert any("data race" in sanitised(folder, model) for _ in range(10))


def test_a_pipeline_is_refused_where_it_would_be_wrong() -> None:
    graph = tangled(0)
    kept = replace(graph, states=(np.zeros(graph.types[graph.inputs[0]].shape, np.int8),))
    with pytest.raises(TargetError, match="keeps states"):
        compiled(kept, unlike(1.0, 1.0), pipeline=True)


def test_little_code_is_shared_by_the_cores(tmp_path: Path) -> None:
    graph, target = tangled(2), unlike(1.0, 1.0, 1.0)
    found = compiled(graph, target, optimize=Optimize.SIZE)
    write_project(found.project, tmp_path / "build")
    given: dict[str, Array] = sample_inputs(graph)
    (one,) = run_build(open_build(tmp_path / "build", target), "host", [given], tmp_path / "cache").outputs
    for name, expected in evaluate(graph, given).items():
        assert np.array_equal(one[name], expected)
    assert len(found.unit.kernels) < len(calls(found.plan.program))
