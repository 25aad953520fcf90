"""Networks that read a sequence step by step: rows written, attention to live places, states tied, buffers as rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from dovetail.arrays import built
from dovetail.compile import Options, compile_graph, compile_model
from dovetail.errors import ModelError, ProgramError
from dovetail.ir.graph import Graph, GraphBuilder, evaluate, evaluate_all
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.arithmetic import Lookup
from dovetail.ir.operators.bits import BitProduct, WriteBits
from dovetail.ir.operators.movement import Reshape, Transpose
from dovetail.ir.operators.sequence import Attention, FixedAttention, WriteRow
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import attention_of_bits
from dovetail.notes import Note
from dovetail.program.ir import Begin, Call, Copy
from dovetail.program.verify import verify
from dovetail.read import load_model
from dovetail.run import run_build
from dovetail.target.description import with_cores
from dovetail.targets import load_target

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models" / "lm"
EXPORTS = ("torch", "hf", "hf23")
STEPS = 256
RNG = np.random.default_rng(5)


def story(which: str, tokens: Sequence[int]) -> list[dict[str, Array]]:
    """The inputs of successive steps of an export."""
    steps = []
    for at, token in enumerate(tokens):
        row, place = np.array([token], np.int64), np.array([at], np.int64)
        if which == "torch":
            steps.append({"token": row, "position": place})
            continue
        mask = (np.arange(STEPS) >= STEPS - 1 - at).astype(np.int64)
        steps.append({"input_ids": row[None], "position_ids": place[None], "attention_mask": mask[None]})
    return steps


@pytest.fixture(scope="module")
def reference() -> Any:
    if not MODELS.is_dir():
        pytest.skip("the language models beside the project are not there")
    return np.load(MODELS / "stories260K.ref.npz")


def export(which: str) -> Path:
    return MODELS / f"stories260K_{which}.onnx"


@pytest.mark.parametrize("which", EXPORTS)
def test_exports_compute_the_reference(reference: Any, which: str) -> None:
    """Read as a graph with states, of which each attention reads the live places only."""
    told = list[Note]()
    graph = load_model(export(which), tell=told.append)
    assert sum(isinstance(node.operator, Attention) for node in graph.nodes) == 5
    assert graph.results == ("logits",) and "kept from one inference to the next" in told[0].text
    found = evaluate_all(graph, story(which, reference["greedy"][:20]))
    for outputs, logits in zip(found, reference["greedy_logits"], strict=False):
        np.testing.assert_allclose(outputs["logits"].reshape(-1), logits, atol=1e-4)


@pytest.mark.oracles
@pytest.mark.parametrize("which", EXPORTS)
def test_float_firmware_computes_the_reference(reference: Any, which: str) -> None:
    """256 steps of the emitted C on this computer, so that every place of a ring is written."""
    target = load_target("riscv")
    compiled = compile_model(export(which), target, Options(allow_float=True))
    with built(compiled, target) as build:
        found = run_build(build, "host", story(which, reference["greedy"][:STEPS])).outputs
    for outputs, logits in zip(found, reference["greedy_logits"], strict=True):
        np.testing.assert_allclose(outputs["logits"].reshape(-1), logits, atol=1e-3)


@pytest.mark.parametrize("which", ["hf"])
def test_float_firmware_begins_as_the_reference(reference: Any, which: str) -> None:
    """Two steps on the simulated core."""
    target = load_target("riscv")
    compiled = compile_model(export(which), target, Options(allow_float=True))
    with built(compiled, target) as build:
        found = run_build(build, "iss", story(which, reference["greedy"][:2])).outputs
    for outputs, logits in zip(found, reference["greedy_logits"], strict=False):
        np.testing.assert_allclose(outputs["logits"].reshape(-1), logits, atol=1e-3)


@pytest.mark.parametrize("which", EXPORTS)
def test_no_pass_copies_a_cache(reference: Any, which: str) -> None:
    """A step writes a row of each cache and moves nothing else of it."""
    compiled = compile_model(export(which), load_target("riscv"), Options(allow_float=True))
    program = compiled.plan.program
    states = {state.view.buffer: state.view.type.nbytes for state in program.states}
    caches = {name for name, nbytes in states.items() if nbytes > 4}
    copied = [
        one
        for one in program.statements
        if isinstance(one, Copy) and {one.source.buffer, one.destination.buffer} & caches
    ]
    assert len(caches) == 10 and not copied
    writers = [one for one in program.statements if isinstance(one, Call) and one.result.buffer in caches]
    assert len(writers) == 10
    for call in writers:
        (node,) = call.graph.nodes
        assert isinstance(node.operator, WriteRow) and call.operands[node.inputs[0]] == call.result


# Attention and rows by themselves


def attention(fixed: bool, shapes: tuple[int, ...], masks: int) -> Graph:
    heads, groups, rows, places, depth, width = shapes
    builder, kind = GraphBuilder("attention"), DType.INT8 if fixed else DType.FLOAT32
    sizes = {"q": (heads, rows, depth), "k": (groups, places, depth), "v": (groups, places, width)}
    names = [builder.input(name, TensorType(shape, kind)) for name, shape in sizes.items()]
    live = builder.input("live", TensorType((masks, places), DType.BOOL))
    operator = FixedAttention(90000, 21, 3, -5) if fixed else Attention(0.4)
    return builder.finish([builder.add(operator, [*names, live], "y")])


def drawn(graph: Graph, rng: np.random.Generator, live: Array) -> dict[str, Array]:
    found = {"live": live}
    for name in "qkv":
        kind = graph.types[name]
        whole = rng.integers(-128, 128, kind.shape).astype(np.int8)
        found[name] = whole if kind.dtype is DType.INT8 else (whole / 50).astype(np.float32)
    return found


SHAPES = ((8, 4, 1, 40, 8, 8), (2, 2, 3, 7, 3, 17), (3, 1, 2, 9, 20, 5), (1, 1, 1, 1, 1, 1))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("fixed", [False, True])
def test_kernels_attend_to_live_places(fixed: bool, shapes: tuple[int, ...]) -> None:
    """Prefixes, holes, all places and none, with a mask for all rows or one for each."""
    rows, places = shapes[2:4]
    rng, target = np.random.default_rng(2), load_target("riscv")
    for masks in {1, rows}:
        graph = attention(fixed, shapes, masks)
        lives = [np.broadcast_to(np.arange(places) <= at, (masks, places)).copy() for at in (0, places // 2, places)]
        lives += [rng.random((masks, places)) < 0.5, np.zeros((masks, places), np.bool_)]
        samples = [drawn(graph, rng, live) for live in lives]
        compiled = compile_graph(graph, target, Options(allow_float=True))
        with built(compiled, target) as build:
            found = run_build(build, "host", samples).outputs
        for sample, outputs in zip(samples, found, strict=True):
            wanted = evaluate(graph, sample)["y"]
            np.testing.assert_allclose(outputs["y"], wanted, atol=0 if fixed else 1e-5, rtol=0)


@pytest.mark.parametrize("name", ["riscv", "cortex_m4", "riscv_xpulp"])
@pytest.mark.parametrize("shapes", [(8, 4, 1, 12, 8, 8), (3, 3, 1, 9, 12, 5)], ids=str)
def test_cores_attend_with_their_own_instructions(name: str, shapes: tuple[int, ...]) -> None:
    """Two heads of the same keys, and one by one; a prefix, and holes."""
    rng, target, graph = np.random.default_rng(4), load_target(name), attention(True, shapes, 1)
    lives = [np.arange(shapes[3])[None] < 5, rng.random((1, shapes[3])) < 0.5]
    samples = [drawn(graph, rng, live) for live in lives]
    compiled = compile_graph(graph, target, Options())
    kernels = next(text for file, text in compiled.project.files.items() if file.endswith("_kernels.c"))
    assert ("smlad(" in str(kernels), "sdotsp_b(" in str(kernels)) == (name == "cortex_m4", name == "riscv_xpulp")
    with built(compiled, target) as build:
        found = run_build(build, "iss", samples).outputs
    for sample, outputs in zip(samples, found, strict=True):
        np.testing.assert_array_equal(outputs["y"], evaluate(graph, sample)["y"])


@pytest.mark.parametrize(
    ("heads", "groups", "depth", "shape", "axis"),
    [(4, 2, 8, (2, 32, 8), 1), (6, 6, 4, (1, 6, 32, 4), 2), (6, 6, 4, (32, 6, 4), 0), (4, 2, 8, (32, 16), 0)],
)
def test_an_engine_attends_as_the_core(heads: int, groups: int, depth: int, shape: tuple[int, ...], axis: int) -> None:
    """Scores and weighted values by NE16, of caches that lie as it reads them: exact, of a prefix, with holes, of
    nothing, of places that were never written, and behind a place that is too large."""
    builder, rng, places = GraphBuilder("net"), np.random.default_rng(3), shape[axis]
    row = TensorType((*shape[:axis], 1, *shape[axis + 1 :]), DType.INT8)
    whole = (groups, places, depth) if axis else (places, groups, depth)
    q = builder.input("q", TensorType((heads, 1, depth), DType.INT8))
    live, place = (
        builder.input("live", TensorType((1, places), DType.BOOL)),
        builder.input("at", TensorType((1,), DType.INT64)),
    )
    kept = []
    for name in "kv":
        state = builder.state(f"past_{name}", rng.integers(-128, 128, shape).astype(np.int8))
        written = builder.add(WriteRow(axis), [state, builder.input(name, row), place])
        builder.replace_state(state, written)
        seen = builder.add(Reshape(whole), [written]) if shape != whole else written
        kept.append(seen if axis else builder.add(Transpose((1, 0, 2)), [seen]))
    graph = builder.finish([builder.add(FixedAttention(9000, 21, 3, -5), [q, *kept, live], "y")])
    target = load_target("ne16")
    rewritten = attention_of_bits(16, lambda _: True)(graph)
    assert sum(isinstance(node.operator, BitProduct) for node in rewritten.nodes) == 2
    lives = [np.arange(places) <= 5, rng.random(places) < 0.5, np.zeros(places, np.bool_), np.ones(places, np.bool_)]
    samples = [
        {name: rng.integers(-128, 128, graph.types[name].shape).astype(np.int8) for name in "qkv"}
        | {"live": one[None], "at": np.array([at])}
        for one, at in zip(lives, (5, -2, 99, 6), strict=True)
    ]
    with built(compile_graph(rewritten, target, Options()), target) as build:
        outputs = run_build(build, "iss", samples).outputs
    for wanted, exact, found in zip(
        evaluate_all(graph, samples), evaluate_all(rewritten, samples), outputs, strict=True
    ):
        np.testing.assert_array_equal(exact["y"], wanted["y"])
        np.testing.assert_array_equal(found["y"], wanted["y"])


@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 1 << 30), scale=st.floats(1e-5, 0.02))
def test_fixed_attention_is_attention(seed: int, scale: float) -> None:
    """Of the numbers that integers stand for, within a step and a hundredth of the largest value."""
    rng = np.random.default_rng(seed)
    zeros = rng.integers(-128, 128, 2)
    operator = FixedAttention(max(round(scale * 64 * (1 << 21)), 1), 21, int(zeros[0]), int(zeros[1]))
    graph = attention(True, (4, 2, 1, 33, 8, 6), 1)
    sample = drawn(graph, rng, (rng.random((1, 33)) < 0.7) | (np.arange(33) == 5))
    found = operator.evaluate([sample[name] for name in ("q", "k", "v", "live")]) / 256
    exact = [sample["q"].astype(np.float32) - zeros[0], sample["k"].astype(np.float32)]
    wanted = Attention(scale).evaluate([*exact, sample["v"].astype(np.float32) - np.float32(zeros[1]), sample["live"]])
    assert np.abs(found - wanted).max() < 3.0


def test_a_write_over_the_old_state_that_is_read_later_is_found() -> None:
    """The verifier holds a state that is changed in place to it: nothing reads the old contents behind that."""
    builder = GraphBuilder("net")
    row, place = (
        builder.input(name, TensorType(shape, kind))
        for name, shape, kind in (("row", (1, 4), DType.INT8), ("place", (1,), DType.INT32))
    )
    state = builder.state("kept", np.zeros((6, 4), np.int8))
    written = builder.add(WriteRow(0), [state, row, place], "after")
    builder.replace_state(state, written)
    graph = builder.finish([builder.add(WriteRow(0), [written, row, place], "twice")])
    target = load_target("riscv")
    program = compile_graph(graph, target, Options()).plan.program
    writers = [
        at for at, one in enumerate(program.statements) if isinstance(one, Call) and one.result.buffer == "state_0"
    ]
    assert len(writers) == 1
    call = program.statements[writers[0]]
    assert isinstance(call, Call)
    later = Call(call.layer, call.graph, call.operands, program.outputs["twice"])
    statements = (*program.statements, later)
    with pytest.raises(ProgramError, match="after it was replaced"):
        verify(replace(program, statements=statements, loops=()), target)


def test_cores_write_parts_of_a_state() -> None:
    """Bits of a state that four cores write, each its rows, equal the graph's; each part is held to as a whole is."""
    builder, target = GraphBuilder("net"), with_cores(load_target("riscv"), 4)
    row = builder.input("row", TensorType((1, 64), DType.UINT8))
    place = builder.input("place", TensorType((1,), DType.INT32))
    state = builder.state("kept", RNG.integers(0, 256, (64, 3, 8, 2)).astype(np.uint8))
    written = builder.add(WriteBits(), [state, row, place], "after")
    builder.replace_state(state, written)
    graph = builder.finish([builder.add(Lookup(), [written, builder.constant("same", np.arange(256, dtype=np.uint8))])])
    compiled = compile_graph(graph, target, Options())
    steps = [
        {"row": RNG.integers(0, 256, (1, 64)).astype(np.uint8), "place": np.array([at], np.int32)}
        for at in (47, 0, -5, 60)
    ]
    with built(compiled, target) as build:
        found = run_build(build, "iss", steps).outputs
    for outputs, wanted in zip(found, evaluate_all(graph, steps), strict=True):
        np.testing.assert_array_equal(outputs[graph.results[0]], wanted[graph.results[0]])
    program, alone = (compile_graph(graph, one, Options()).plan.program for one in (target, load_target("riscv")))
    writers = [at for at, one in enumerate(program.statements) if isinstance(one, Call) and "kept" in one.operands]
    (call,) = (one for one in alone.statements if isinstance(one, Call) and "kept" in one.operands)
    assert len(writers) == 4
    later = (*program.statements, replace(call, result=program.outputs[graph.results[0]]))
    missing = (*program.statements[: writers[-1]], Begin(0), *program.statements[writers[-1] + 1 :])
    for statements, why in ((later, "after it was replaced"), (missing, "replaced in part")):
        with pytest.raises(ProgramError, match=why):
            verify(replace(program, statements=statements, loops=()), target)


# States of ONNX models


def cache_model(kind: str, size: int = 6) -> Any:
    """A model that gives its input with a row more: `written` at a place, or `shifted`."""
    width = 3
    nodes, inputs = [], [("row", TensorProto.FLOAT, (1, width))]
    if kind == "written":
        inputs += [("place", TensorProto.INT64, (1, 1)), ("old", TensorProto.FLOAT, (size, width))]
        nodes.append(helper.make_node("ScatterND", ["old", "place", "row"], ["new"]))
    else:
        inputs.append(("old", TensorProto.FLOAT, (size - 1, width)))
        nodes.append(helper.make_node("Concat", ["old", "row"], ["new"], axis=0))
    nodes.append(helper.make_node("ReduceSum", ["new", "axes"], ["total"], keepdims=1))
    ends = [helper.make_tensor_value_info(*one) for one in inputs]
    results = [("total", (1, width)), ("new", (size, width))]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in results]
    axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
    graph = helper.make_graph(nodes, "net", ends, made, [axes])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def renamed(model: Any, names: dict[str, str]) -> Any:
    for node in model.graph.node:
        node.input[:], node.output[:] = ([names.get(name, name) for name in ends] for ends in (node.input, node.output))
    for entry in (*model.graph.input, *model.graph.output):
        entry.name = names.get(entry.name, entry.name)
    return model


def saved(folder: Path, model: Any) -> Path:
    file = folder / "net.onnx"
    file.write_bytes(model.SerializeToString())
    return file


def sums(graph: Graph, kind: str, rows: Array) -> list[Array]:
    places = [{"place": np.array([[at]])} if kind == "written" else {} for at in range(len(rows))]
    steps = [{"row": row[None], **place} for row, place in zip(rows, places, strict=True)]
    return [outputs["total"] for outputs in evaluate_all(graph, steps)]


@pytest.mark.parametrize("kind", ["written", "shifted"])
@pytest.mark.parametrize("said", [False, True])
def test_a_pair_becomes_a_state(tmp_path: Path, kind: str, said: bool) -> None:
    """By its names, or by --state; the sum is of all rows so far, for as long as the buffer holds them."""
    pairs = {"new": "old"} if said else {}
    model = (
        cache_model(kind)
        if said
        else renamed(cache_model(kind), {"new": "present.0.key", "old": "past_key_values.0.key"})
    )
    told = list[Note]()
    graph = load_model(saved(tmp_path, model), tell=told.append, states=pairs)
    assert graph.results == ("total",) and len(graph.states) == 1 and len(told) == (not pairs)
    rows = RNG.normal(size=(6, 3)).astype(np.float32)
    for got, wanted in zip(sums(graph, kind, rows), np.cumsum(rows, axis=0), strict=True):
        np.testing.assert_allclose(got[0], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["written", "shifted"])
def test_a_cache_that_is_no_state_is_warned_about(tmp_path: Path, kind: str) -> None:
    told = list[Note]()
    graph = load_model(saved(tmp_path, cache_model(kind)), tell=told.append)
    assert not graph.states and len(told) == 1
    assert "--state new=old" in told[0].text and "no state" in told[0].text


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"nothing": "old"}, "no output 'nothing'"),
        ({"new": "nothing"}, "no input 'nothing'"),
        ({"total": "place"}, "it becomes"),
        ({"new": "old", "total": "old"}, "two outputs"),
    ],
)
def test_pairs_that_are_none(tmp_path: Path, pairs: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(saved(tmp_path, cache_model("written")), states=pairs)


def test_other_formats_know_their_states(tmp_path: Path) -> None:
    file = tmp_path / "net.tflite"
    file.write_bytes(b"\0\0\0\0TFL3" + b"\0" * 20)
    with pytest.raises(ModelError):
        load_model(file, states={"a": "b"})


def one_row_of_attention() -> Any:
    """GroupQueryAttention of ONNX Runtime with buffers of 12 places."""
    size, width, heads, groups = 12, 16, 4, 2
    shapes = {"q": (1, 1, heads * width), "k": (1, 1, groups * width), "v": (1, 1, groups * width)}
    shapes |= {"past_key": (1, groups, size, width), "past_value": (1, groups, size, width)}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    ends.append(helper.make_tensor_value_info("length", TensorProto.INT32, (1, 1)))
    angles = np.outer(np.arange(size), 0.7 ** np.arange(width // 2)).astype(np.float32)
    held = {"total": np.array([size], np.int32), "cosine": np.cos(angles), "sine": np.sin(angles)}
    names = [*shapes, "length", *held]
    results = {"y": shapes["q"], "present_key": shapes["past_key"], "present_value": shapes["past_value"]}
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        list(results),
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=groups,
        do_rotary=1,
    )
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in results.items()]
    graph = helper.make_graph(
        [node], "net", ends, made, [numpy_helper.from_array(array, name) for name, array in held.items()]
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_grouped_attention_is_onnx_runtimes(tmp_path: Path) -> None:
    """Step by step, ONNX Runtime's buffers handed on by the test, ours states."""
    pytest.importorskip("onnxruntime")
    model = one_row_of_attention()
    session = runtime_session(model.SerializeToString())
    graph = load_model(saved(tmp_path, model))
    assert len(graph.states) == 2 and any(isinstance(node.operator, Attention) for node in graph.nodes)
    buffers = [np.zeros((1, 2, 12, 16), np.float32)] * 2
    steps, wanted = [], []
    for at in range(6):
        step = {name: RNG.normal(size=graph.types[name].shape).astype(np.float32) for name in "qkv"}
        step["length"] = np.array([[at]], np.int32)
        result, *buffers = session.run(None, {**step, "past_key": buffers[0], "past_value": buffers[1]})
        steps.append(step)
        wanted.append(result)
    for outputs, result in zip(evaluate_all(graph, steps), wanted, strict=True):
        np.testing.assert_allclose(outputs["y"], result, atol=1e-5)
