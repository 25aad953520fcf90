"""What a network keeps from one inference to the next: in graph, program, interpreter, C, simulators and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dovetail.arrays import built
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Compiled, Options, compile_graph, sample_inputs
from dovetail.errors import ProgramError
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import Graph, GraphBuilder, evaluate_all, verify
from dovetail.ir.onnx_file import check_graph, load_graph, save_graph
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.arithmetic import Clip, Lookup
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Slice
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.interpret import check_program
from dovetail.program.ir import Copy, Program, Role, StateVariable
from dovetail.program.verify import verify as verify_program
from dovetail.quantize import quantize
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from interpreted import interpret

RANDOM = np.random.default_rng(4)
FRAME = TensorType((1, 1, 4, 3), DType.INT8)


def ring_network() -> Graph:
    """A convolution over a ring of frames; the frame before as a result; a ring nothing replaces; the ring itself."""
    builder = GraphBuilder("ring")
    x = builder.input("x", FRAME)
    ring = builder.state("ring", RANDOM.integers(-5, 5, (1, 4, 4, 3)).astype(np.int8))
    before = builder.state("before", np.full(FRAME.shape, 7, np.int8))
    fixed = builder.state("fixed", np.arange(5, dtype=np.int16))
    newer = builder.add(Slice((0, 1, 0, 0), (1, 4, 4, 3), (1, 1, 1, 1)), [ring])
    joined = builder.add(Concat(1), [newer, x])
    builder.replace_state(ring, joined)
    builder.replace_state(before, x)
    weights = builder.constant("w", RANDOM.integers(-9, 9, (2, 4, 4, 3)).astype(np.int8))
    total = builder.add(Clip(-128, 127, DType.INT8), [builder.add(Conv2d(), [joined, weights])])
    return builder.finish(
        [total, joined, builder.add(Clip(-50, 50, DType.INT8), [before]), builder.add(Clip(0, 3, DType.INT8), [fixed])]
    )


def frames(count: int) -> list[Mapping[str, Array]]:
    return [{"x": RANDOM.integers(-128, 128, FRAME.shape).astype(np.int8)} for _ in range(count)]


def by_hand(graph: Graph, feeds: Sequence[Mapping[str, Array]]) -> list[list[Array]]:
    """The ring network in plain numpy."""
    ring, before, _ = (first for _, _, first in graph.kept)
    found = []
    for feed in feeds:
        ring = np.concatenate([ring[:, 1:], feed["x"]], axis=1)
        sums = np.tensordot(ring.astype(np.int64), graph.constants["w"].astype(np.int64), ([1, 2, 3], [1, 2, 3]))
        conv = np.clip(sums, -128, 127).reshape(1, 1, 1, 2)
        found.append([conv, ring, np.clip(before, -50, 50), np.clip(np.arange(5), 0, 3)])
        before = feed["x"]
    return found


@pytest.fixture(scope="module")
def ring() -> Graph:
    graph = ring_network()
    verify(graph)
    return graph


def compiled(graph: Graph, target: str) -> Compiled:
    return compile_graph(graph, load_target(target), Options())


def same(graph: Graph, found: Sequence[Mapping[str, Array]], expected: Sequence[Sequence[Array]]) -> None:
    assert len(found) == len(expected)
    for outputs, arrays in zip(found, expected, strict=True):
        assert list(outputs) == list(graph.results)
        for output, array in zip(outputs.values(), arrays, strict=True):
            np.testing.assert_array_equal(output, array)


@pytest.mark.parametrize("target", ["riscv", "ne16"])
def test_states_are_carried_over_everywhere(ring: Graph, target: str, tmp_path: Path) -> None:
    feeds = frames(6)
    expected = by_hand(ring, feeds)
    same(ring, evaluate_all(ring, feeds), expected)
    made = compiled(ring, target)
    same(ring, interpret(made.plan.program, load_target(target), feeds), expected)
    write_project(made.project, tmp_path / "build")
    build = open_build(tmp_path / "build")
    assert json.loads((build.folder / "dovetail.json").read_text())["state_bytes"] == 48 + 12 + 10
    for simulator in ("host", "iss"):
        same(ring, run_build(build, simulator, feeds).outputs, expected)
        same(ring, run_build(build, simulator, feeds[:1]).outputs, expected[:1])  # a run begins anew


def test_stages_and_files_keep_them(ring: Graph, tmp_path: Path) -> None:
    feeds = frames(3)
    for graph in (simplify(ring), quantize(ring), simplify(quantize(simplify(ring)))):
        verify(graph)
        same(graph, evaluate_all(graph, feeds), by_hand(ring, feeds))
    save_graph(ring, tmp_path / "ring.onnx")
    loaded = load_graph(tmp_path / "ring.onnx")
    assert (loaded.inputs, loaded.outputs, loaded.nodes) == (ring.inputs, ring.outputs, ring.nodes)
    for left, right in zip(ring.states, loaded.states, strict=True):
        np.testing.assert_array_equal(left, right)
    assert check_graph(ring, sample_inputs(ring)) == len(ring.outputs)


def test_onnx_runtime_begins_with_their_first_contents(ring: Graph, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    save_graph(ring, tmp_path / "ring.onnx")
    session = runtime_session(tmp_path / "ring.onnx")
    feeds, held = frames(3), {}
    for feed, expected in zip(feeds, by_hand(ring, feeds), strict=True):
        outputs = dict(zip(ring.outputs, session.run(list(ring.outputs), {**feed, **held}), strict=True))
        for name, array in zip(ring.results, expected, strict=True):
            np.testing.assert_array_equal(outputs[name], array)
        held = {read: outputs[written] for read, written, _ in ring.kept}


def test_the_tuner_measures_a_network_with_states(ring: Graph) -> None:
    assert measured(ring, load_target("riscv"), None, {}) > 0  # outputs of the first inference are compared


def test_they_share_memory_with_nothing(ring: Graph) -> None:
    program = compiled(ring, "riscv").plan.program
    states = [buffer for buffer in program.buffers.values() if buffer.role is Role.STATE]
    assert len(states) == 3
    for state in states:
        assert state.address is not None
        for other in program.buffers.values():
            if other.address is not None and other.name != state.name and other.memory == state.memory:
                below = other.address + other.nbytes <= state.address
                assert below or state.address + state.nbytes <= other.address, (state.name, other.name)


def moved(program: Program, kept: StateVariable, to: int) -> Program:
    """The program with the copy that replaces a state put elsewhere."""
    statements = [s for s in program.statements if not (isinstance(s, Copy) and s.destination == kept.view)]
    (copy,) = (s for s in program.statements if isinstance(s, Copy) and s.destination == kept.view)
    statements.insert(to, copy)
    return replace(program, statements=tuple(statements))


def test_wrong_programs_are_refused(ring: Graph) -> None:
    target = load_target("riscv")
    program = compiled(ring, "riscv").plan.program
    kept = program.states[0]
    (place,) = (i for i, s in enumerate(program.statements) if isinstance(s, Copy) and s.destination == kept.view)
    copy = program.statements[place]
    assert isinstance(copy, Copy)
    wrong = {
        "never written": moved(program, kept, 1),
        "never replaced": replace(program, statements=(*program.statements[:place], *program.statements[place + 1 :])),
        "twice": replace(program, statements=(*program.statements, copy)),
        "lifetimes overlap": replace(
            program,
            buffers={
                **program.buffers,
                "output_0": replace(program.buffers["output_0"], address=program.buffers["state_1"].address),
            },
        ),
    }
    for message, changed in wrong.items():
        with pytest.raises(ProgramError, match=message):
            verify_program(changed, target)
    early = replace(
        program,
        statements=(
            program.statements[0],
            replace(copy, source=program.states[0].view),
            *program.statements[1:place],
            *program.statements[place + 1 :],
        ),
    )
    with pytest.raises(ProgramError, match="after it was replaced"):
        verify_program(early, target)
    other = replace(copy, source=program.values["ring"])
    forgets = replace(program, statements=(*program.statements[:place], other, *program.statements[place + 1 :]))
    verify_program(forgets, target)
    with pytest.raises(ProgramError, match="differ from the graph"):
        check_program(forgets, target, ring, sample_inputs(ring))


def test_graphs_that_contradict_themselves_are_refused(ring: Graph) -> None:
    with pytest.raises(ValueError, match="cannot become"):
        builder = GraphBuilder("wrong")
        builder.replace_state(builder.state("s", np.zeros(3, np.int8)), builder.input("x", FRAME))
    with pytest.raises(ValueError, match="first contents of the state 'fixed'"):
        verify(replace(ring, states=(*ring.states[:2], np.zeros(4, np.int16))))
    with pytest.raises(ValueError, match="computed value of its own"):
        verify(replace(ring, outputs=(*ring.outputs[:4], ring.outputs[1], *ring.outputs[5:])))


@pytest.mark.parametrize("simulator", ["iss", "host"])
@pytest.mark.parametrize(
    "first",
    [
        np.full(1000, 7),  # no multiple of 16
        np.full(1024, -3),
        np.tile(np.arange(16), 64),
        np.tile(np.arange(16), 3),
        np.arange(1040) % 117,
    ],
)
def test_states_begin_with_their_first_contents(first: Array, simulator: str) -> None:
    """One byte or sixteen repeated, as bytes and as words, and contents that repeat nothing."""
    builder = GraphBuilder("net")
    state = builder.state("kept", first.astype(np.int8))
    frame = builder.input("x", TensorType(first.shape, DType.INT8))
    builder.replace_state(state, frame)
    same = builder.constant("same", np.arange(-128, 128, dtype=np.int8))
    graph = builder.finish([builder.add(Lookup(), [state, same])])
    target = load_target("riscv")
    steps = [{"x": np.full(first.shape, at, np.int8)} for at in (5, 6)]
    with built(compile_graph(graph, target, Options()), target) as build:
        found = run_build(build, simulator, steps).outputs
    for outputs, wanted in zip(found, (first, steps[0]["x"]), strict=True):
        np.testing.assert_array_equal(outputs[graph.results[0]], wanted)
