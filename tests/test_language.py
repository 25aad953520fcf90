"""Language models in integers: calibration on sequences, bits per token, firmware that equals the integer graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from dovetail.arrays import built
from dovetail.compile import Compiled, Options, compile_graph, compile_model, prepare
from dovetail.guests import ptq
from dovetail.guests.ptq import layers
from dovetail.guests.ptq.accuracy import accuracy_of
from dovetail.guests.ptq.sequences import bits_per_token
from dovetail.ir.graph import GraphBuilder, evaluate, evaluate_all
from dovetail.ir.operators.arithmetic import Clip, Dequantize, Requantize, Rounding
from dovetail.ir.operators.bits import BitProduct, WriteBits
from dovetail.ir.operators.fixed import FixedStandard
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.sequence import FixedAttention, WriteRow
from dovetail.ir.types import Array, DType, TensorType
from dovetail.notes import Note
from dovetail.program.ir import Call
from dovetail.read import load_model
from dovetail.run import ProjectBuild, run_build
from dovetail.schedule.partition import initial_partition
from dovetail.target.description import with_cores
from dovetail.targets import load_target
from test_sequence import EXPORTS, MODELS, STEPS, export, reference, saved, story

__all__ = ["reference"]


def ignored(said: object) -> None:
    """Progress that nobody reads."""


def sequences(which: str, stories: Sequence[Array], file: Path) -> Path:
    """Stories as the data of an export: [stories, steps, ...] by input."""
    rows = [story(which, tokens) for tokens in stories]
    np.savez(file, **{name: np.stack([[step[name] for step in one] for one in rows]) for name in rows[0][0]})
    return file


def quantised(which: str, stories: Sequence[Array], folder: Path, bits: int = 8) -> Path:
    """An export quantised with stories."""
    loaded = ptq.with_tables(load_model(export(which)), ignored)
    graph = ptq.prepare(loaded, which)
    data = ptq.read_samples(sequences(which, stories, folder / "data.npz"), graph, ptq.Preprocessing())
    network = ptq.quantise_network(graph, data, load_target("riscv"), ptq.Settings(bits=bits))
    file = folder / f"{which}.onnx"
    file.write_bytes(network.model.SerializeToString())
    return file


def held_to(compiled: Compiled) -> None:
    """Integers throughout, caches of bytes that a step writes a row of."""
    graph = compiled.graph
    assert sum(isinstance(node.operator, FixedAttention) for node in graph.nodes) == 5
    assert sum(isinstance(node.operator, WriteRow) for node in graph.nodes) == 10
    computed = [node for node in graph.nodes if not node.operator.is_view]
    assert not [node for node in computed if graph.types[node.inputs[0]].dtype is DType.FLOAT32]
    caches = [graph.types[read] for read, _, _ in graph.kept if graph.types[read].elements > 1]
    assert len(caches) == 10 and all(kind.dtype is DType.INT8 for kind in caches)


@pytest.fixture(scope="module")
def small(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export quantised with little data."""
    stories = [reference[f"story_{number}"][:12] for number in range(2)]
    return quantised("hf", stories, tmp_path_factory.mktemp("small"))


def test_integers_throughout(reference: Any, small: Path) -> None:
    """The emitted C computes the integer graph over some steps, in little more memory than the caches take."""
    compiled = compile_model(small, load_target("riscv"), Options())
    held_to(compiled)
    caches = sum(array.nbytes for array in compiled.graph.states)
    steps = story("hf", reference["story_9"][:6])
    with built(compiled, load_target("riscv")) as build:
        assert build.manifest.memory["ram"].peak <= caches + (16 << 10)
        found = run_build(build, "host", steps).outputs
    for outputs, wanted in zip(found, evaluate_all(compiled.graph, steps), strict=True):
        np.testing.assert_array_equal(outputs["logits"], wanted["logits"])


def test_an_engine_reads_the_caches_where_they_are(small: Path) -> None:
    """Dense layers of one row are the engine's, and so are the products of attention: it reads what a step writes."""
    target = load_target("ne16")
    graph = prepare(small, target, Options())
    written = [node for node in graph.nodes if isinstance(node.operator, WriteRow | WriteBits)]
    assert len(written) == 10 and {node.inputs[0] for node in written} < set(graph.inputs)
    for node in written:
        assert [type(reader.operator) for reader in graph.users()[node.output]] == [BitProduct]
    regions = initial_partition(graph, target)
    assert len([region for region in regions if region.engine is not None]) >= 5 * (9 + 3)


@pytest.mark.oracles
@pytest.mark.parametrize("which", EXPORTS)
def test_bits_per_token_and_firmware(reference: Any, which: str, tmp_path: Path) -> None:
    """Judged by the judge beside the models: at most 2 % above float. The firmware on the simulated core equals the
    integer graph, over 256 steps of one export and 16 of the others."""
    model = quantised(which, [reference[f"story_{number}"][:STEPS] for number in range(8)], tmp_path)
    target = load_target("riscv")
    compiled = compile_model(model, target, Options())
    held_to(compiled)
    with built(compiled, target) as build:
        judge(build, which, reference, tmp_path, 2)
        steps = story(which, reference["story_8"][: STEPS if which == "hf" else 16])  # a ring is written all around
        found = run_build(build, "iss", steps).outputs
    for outputs, wanted in zip(found, evaluate_all(compiled.graph, steps), strict=True):
        np.testing.assert_array_equal(outputs["logits"], wanted["logits"])


def judge(build: ProjectBuild, which: str, reference: Any, folder: Path, most: int) -> None:
    """Hold the firmware on this computer to so many percent more bits per token than the float model's, on stories that
    it was not quantised with."""
    logits = {}
    for number in range(8, 12):
        found = run_build(build, "host", story(which, reference[f"story_{number}"][:STEPS])).outputs
        logits[f"story_{number}"] = np.stack([outputs["logits"].reshape(-1) for outputs in found])
    np.savez(folder / "logits.npz", **logits)
    command = [sys.executable, str(MODELS / "judge.py"), str(folder / "logits.npz"), str(most)]
    verdict = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verdict.returncode == 0, verdict.stdout


@pytest.mark.oracles
@pytest.mark.parametrize("which", EXPORTS[:2])
def test_weights_of_4_bits_throughout(reference: Any, which: str, tmp_path: Path) -> None:
    """4.9 to 7.3 % above float, as the last bits of float sums fall, which differ between processors."""
    model = quantised(which, [reference[f"story_{number}"][:STEPS] for number in range(8)], tmp_path, bits=4)
    target = load_target("riscv")
    with built(compile_model(model, target, Options()), target) as build:
        judge(build, which, reference, tmp_path, 8)


@pytest.mark.parametrize("successive", [True, False])
def test_states_are_those_of_the_quantised_network(successive: bool) -> None:
    """Where samples are successive steps, the walk that chooses weights finds in a state the rows that it wrote."""
    builder, rng = GraphBuilder("kept"), np.random.default_rng(3)
    token = builder.input("x", TensorType((1, 4), DType.FLOAT32))
    place = builder.input("place", TensorType((1,), DType.INT64))
    past = builder.state("past", np.zeros((5, 4), np.float32))
    written = builder.add(WriteRow(0), [past, token, place], "present")
    builder.replace_state(past, written)
    graph = builder.finish([builder.add(Reshape((20,)), [written])])
    rows, after = rng.normal(0, 1, (10, 1, 4)).astype(np.float32), np.zeros((12, 5, 4), np.float32)
    for sample in range(10):  # two sequences, step by step
        after[sample + 2] = after[sample]
        after[sample + 2, sample // 2] = rows[sample]
    before = after[:-2] if successive else after[-3::-1]
    real: dict[str, Array] = {
        "x": rows,
        "place": np.repeat(np.arange(5), 2)[:, None],
        "past": before,
        "present": after[2:],
    }
    coded = {**real, "x": rows + 1}
    layers.follow(graph, graph.nodes[0], real, coded)
    wanted = before + (before.any(axis=-1, keepdims=True) if successive else 0)
    np.testing.assert_allclose(coded["past"], wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["riscv", "cortex_m4", "riscv_xpulp"])
def test_logits_are_floats_on_every_core(name: str) -> None:
    """A dense layer whose sums become floats in its own kernel, with the core's own instructions where it has some."""
    rng, builder = np.random.default_rng(4), GraphBuilder("logits")
    x = builder.input("x", TensorType((1, 64), DType.INT8))
    total = builder.add(FullyConnected(), [x, builder.constant("w", rng.integers(-127, 128, (70, 64)).astype(np.int8))])
    factors = builder.constant("m", rng.integers(1 << 30, 1 << 31, 70).astype(np.int32))
    scaled = builder.add(
        Requantize(Rounding.SINGLE), [total, factors, builder.constant("s", np.full(70, -4, np.int32))]
    )
    narrow = builder.add(Clip(-32768, 32767, DType.INT16), [scaled])
    steps = [builder.constant("scale", np.array([0.37], np.float32)), builder.constant("zero", np.zeros(1, np.int32))]
    graph = builder.finish([builder.add(Dequantize(), [narrow, *steps], "y")])
    target = load_target(name)
    sample = {"x": rng.integers(-128, 128, (1, 64)).astype(np.int8)}
    with built(compile_graph(graph, target, Options(allow_float=True)), target) as build:
        (found,) = run_build(build, "iss", [sample]).outputs
    np.testing.assert_array_equal(found["y"], evaluate(graph, sample)["y"])


@pytest.mark.parametrize("size", [5, 6, 44])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("cores", [1, 3])
def test_normalisations_of_any_integers(size: int, centred: bool, cores: int) -> None:
    """Squares are added some at a time: of the most negative integers, of nothing and of random ones; on several cores,
    which share a row, by each of them."""
    builder, rng = GraphBuilder("norm"), np.random.default_rng(size)
    x = builder.input("x", TensorType((4 if cores == 1 else 1, size), DType.INT16))
    graph = builder.finish([builder.add(FixedStandard(size, 0, 70, centred=centred), [x])])
    rows = [np.full(size, -32768), np.zeros(size), *rng.integers(-32768, 32768, (2, size))]
    steps = [{"x": one} for one in np.array(rows, np.int16).reshape(-1, *graph.types[x].shape)]
    target = with_cores(load_target("riscv"), cores)
    compiled = compile_graph(graph, target, Options())
    used = {one.core for one in compiled.plan.program.statements if isinstance(one, Call)}
    assert size < 44 or (len(used) > 1) == (cores > 1)
    with built(compiled, target) as build:
        found = run_build(build, "host", steps).outputs
    for outputs, sample in zip(found, steps, strict=True):
        np.testing.assert_array_equal(outputs[graph.results[0]], evaluate(graph, sample)[graph.results[0]])


def small_cache(quantised_apart: bool) -> Any:
    """A sum over a cache whose input and output are quantised with steps of their own, or alike."""
    width, size = 3, 6
    scales = {"a": 0.02, "b": 0.05 if quantised_apart else 0.02}
    held = {name: np.array(scale, np.float32) for name, scale in scales.items()} | {"zero": np.array(0, np.int8)}
    held["axes"] = np.array([0], np.int64)
    nodes = [
        helper.make_node("QuantizeLinear", ["past_x", "a", "zero"], ["past_q"]),
        helper.make_node("DequantizeLinear", ["past_q", "a", "zero"], ["past_r"]),
        helper.make_node("QuantizeLinear", ["row", "b", "zero"], ["row_q"]),
        helper.make_node("DequantizeLinear", ["row_q", "b", "zero"], ["row_r"]),
        helper.make_node("ScatterND", ["past_r", "place", "row_r"], ["new_r"]),
        helper.make_node("QuantizeLinear", ["new_r", "b", "zero"], ["new_q"]),
        helper.make_node("DequantizeLinear", ["new_q", "b", "zero"], ["present_x"]),
        helper.make_node("ReduceMean", ["present_x", "axes"], ["mean"], keepdims=1),
        helper.make_node("QuantizeLinear", ["mean", "b", "zero"], ["mean_q"]),
        helper.make_node("DequantizeLinear", ["mean_q", "b", "zero"], ["y"]),
    ]
    real = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    ends = [real("row", shape=(1, width)), real("past_x", shape=(size, width))]
    ends.append(helper.make_tensor_value_info("place", TensorProto.INT64, (1, 1)))
    results = [real("y", shape=(1, width)), real("present_x", shape=(size, width))]
    constants = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "net", ends, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("apart", [False, True])
def test_a_state_has_one_scale_or_stays_float(tmp_path: Path, apart: bool) -> None:
    """Where both sides agree the buffer holds bytes; otherwise what is handed on are the numbers, not the integers."""
    file = saved(tmp_path, small_cache(apart))
    graph = compile_model(file, load_target("riscv"), Options()).graph
    ((read, _, _),) = graph.kept
    assert graph.types[read].dtype is (DType.FLOAT32 if apart else DType.INT8)
    rows = np.random.default_rng(3).normal(0, 0.3, (6, 1, 3)).astype(np.float32)
    steps = [{"row": row, "place": np.array([[at]])} for at, row in enumerate(rows)]
    for at, outputs in enumerate(evaluate_all(graph, steps)):
        np.testing.assert_allclose(outputs["y"][0], rows[: at + 1, 0].sum(axis=0) / 6, atol=0.1)


def test_an_int8_cache_that_is_no_state_is_warned_about(tmp_path: Path) -> None:
    model = small_cache(True)
    for ends, old, new in ((model.graph.input, "past_x", "x"), (model.graph.output, "present_x", "z")):
        next(entry for entry in ends if entry.name == old).name = new
    for node in model.graph.node:
        node.input[:] = [{"past_x": "x", "present_x": "z"}.get(name, name) for name in node.input]
        node.output[:] = [{"present_x": "z"}.get(name, name) for name in node.output]
    told = list[Note]()
    load_model(saved(tmp_path, model), tell=told.append)
    assert len(told) == 1 and "--state z=x" in told[0].text and "one scale" in told[0].text


def test_bits_per_token() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]))
    bits, right = bits_per_token(logits, np.array([0, 2]))
    assert bits == pytest.approx(1.5) and right == 50.0


def test_accuracy_of_sequences(reference: Any, tmp_path: Path) -> None:
    """Float, integers and firmware beside each other, in bits per token; both ends of the figure by hand."""
    stories = [reference[f"story_{number}"][:10] for number in range(2)]
    model = quantised("torch", stories, tmp_path)
    data = sequences("torch", stories, tmp_path / "test.npz")
    found = accuracy_of(model, data, ptq.Preprocessing(), "riscv", export("torch"), "host", ignored)
    names = [column.name for column in found.columns]
    assert names == ["float", "integer graph", "firmware"]
    exact, integers, firmware = found.columns
    assert integers.bits == firmware.bits and integers.top1 == firmware.top1
    assert exact.bits is not None and integers.bits is not None and abs(integers.bits - exact.bits) < 0.3
    logits = [outputs["logits"] for outputs in evaluate_all(load_model(export("torch")), story("torch", stories[0]))]
    other = [outputs["logits"] for outputs in evaluate_all(load_model(export("torch")), story("torch", stories[1]))]
    rows = np.concatenate([logits[:-1], other[:-1]]).reshape(18, -1)
    assert exact.bits == pytest.approx(bits_per_token(rows, np.concatenate([one[1:] for one in stories]))[0], abs=1e-4)


def test_data_of_sequences_of_different_lengths(reference: Any, tmp_path: Path) -> None:
    from dovetail.errors import DovetailError

    graph = load_model(export("torch"))
    np.savez(tmp_path / "data.npz", token=np.zeros((2, 6), np.int64), position=np.zeros((3, 4), np.int64))
    with pytest.raises(DovetailError, match="different lengths"):
        ptq.read_samples(tmp_path / "data.npz", graph, ptq.Preprocessing())
