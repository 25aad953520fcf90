"""Several steps of a language model in one call: what they compute, what they share with one step, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.arrays import built
from dovetail.cli.main import main
from dovetail.compile import Options, compile_graph, compile_model
from dovetail.errors import DovetailError, ModelError
from dovetail.guests import zoo
from dovetail.ir.graph import Graph, GraphBuilder, evaluate, evaluate_all
from dovetail.ir.onnx_file import check_graph
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize, Rounding
from dovetail.ir.operators.elementwise import Compare, CompareKind
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Gather, Reshape
from dovetail.ir.operators.sequence import AttentionEnd, AttentionWeights, FixedAttention, WriteRow
from dovetail.ir.prefill import check_steps, place_of, prefilled
from dovetail.ir.rows import rows_as_matrix
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import adapt, attention_of_bits
from dovetail.program.interpret import sample_inputs
from dovetail.program.ir import Call
from dovetail.prove import several_at_once
from dovetail.run import run_build, several_steps
from dovetail.target.description import with_cores
from dovetail.targets import load_target

PLACES, LETTERS = 32, 15


def dovetail(*arguments: str | Path) -> None:
    """A command."""
    with pytest.raises(SystemExit) as end:
        main([str(one) for one in arguments])
    assert not end.value.code


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model of the documentation, quantised."""
    folder = tmp_path_factory.mktemp("letters")
    (folder / "int8.onnx").write_bytes(zoo.build("story"))
    (folder / "letters.bin").write_bytes(zoo.tokenizer("story"))
    return folder


@pytest.fixture(scope="module")
def step() -> Graph:
    """One step of two layers of attention, integers: what the second keeps depends on what the first attends to."""
    return decoder(1)


def decoder(*lead: int) -> Graph:
    """The step, with axes before the width of a token's row."""
    rng, builder = np.random.default_rng(5), GraphBuilder("decoder")

    def dense(x: str, size: int, stem: str) -> str:
        depth = builder.type_of(x).shape[-1]
        weights = builder.constant(f"{stem}_weights", rng.integers(-127, 128, (size, depth)).astype(np.int8))
        return small(builder.add(FullyConnected(), [x, weights]), stem, -9)

    def small(x: str, stem: str, shift: int) -> str:
        factor = builder.constant(f"{stem}_factor", np.array([1 << 30], np.int32))
        by = builder.constant(f"{stem}_by", np.array([shift], np.int32))
        scaled = builder.add(Requantize(Rounding.SINGLE), [x, factor, by])
        return builder.add(Clip(-128, 127, DType.INT8), [scaled], stem)

    token, position = (builder.input(name, TensorType((1,), DType.INT64)) for name in ("token", "position"))
    table = builder.constant("table", rng.integers(-128, 128, (LETTERS, 16)).astype(np.int8))
    places = builder.constant("places", np.arange(PLACES))
    live = builder.add(Compare(CompareKind.LESS_OR_EQUAL), [places, position])
    live, x = builder.add(Reshape((1, PLACES)), [live]), builder.add(Gather(0), [table, token])
    x = builder.add(Reshape((*lead, 16)), [x]) if lead != (1,) else x
    for layer in range(2):
        caches = list[str]()
        for kind in ("key", "value"):
            past = builder.state(f"past_{kind}_{layer}", np.zeros((2, PLACES, 4), np.int8))
            row = builder.add(Reshape((2, 1, 4)), [dense(x, 8, f"{kind}_{layer}")])
            caches.append(builder.add(WriteRow(1), [past, row, position], f"present_{kind}_{layer}"))
            builder.replace_state(past, caches[-1])
        query = builder.add(Reshape((4, 1, 4)), [dense(x, 16, f"query_{layer}")])
        attention = FixedAttention(multiplier=40000, shift=20, query_zero_point=3, value_zero_point=-5)
        attended = builder.add(attention, [query, *caches, live], f"attended_{layer}")
        attended = builder.add(Reshape((*lead, 16)), [small(attended, f"shares_{layer}", -7)])
        total = builder.add(
            Add(), [builder.add(Offset(0, DType.INT32), [y]) for y in (x, dense(attended, 16, f"out_{layer}"))]
        )
        x = builder.add(Clip(-128, 127, DType.INT8), [total])
    return builder.finish([dense(x, LETTERS, "logits")])


def inputs_at(graph: Graph, tokens: Array, first: int) -> dict[str, Array]:
    """Inputs of steps that begin at a place, as a graph takes them."""
    arrays = {"token": tokens, "position": np.arange(first, first + len(tokens))}
    return {name: arrays[name].astype(np.int64).reshape(graph.types[name].shape) for name in graph.given}


def one_by_one(graph: Graph, tokens: Array, first: int, held: Mapping[str, Array]) -> list[Array]:
    """The logits of the last of several steps, and the states behind it."""
    for number in range(len(tokens)):
        found = evaluate(graph, {**inputs_at(graph, tokens[number : number + 1], first + number), **held})
        held = {read: found[written] for read, written, _ in graph.kept}
    return [found[graph.results[0]], *held.values()]


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 12), first=st.integers(0, PLACES - 12), seed=st.integers(0, 1 << 30), bits=st.booleans())
def test_several_steps_are_those_one_by_one(step: Graph, count: int, first: int, seed: int, bits: bool) -> None:
    """From states of any contents, also where attention becomes products for an engine, of some rows at a time."""
    rng, several = np.random.default_rng(seed), prefilled(step, count)
    one = step
    if bits:
        one, several = (attention_of_bits(16, lambda macs: True)(graph) for graph in (step, several))
        assert [several.types[read] for read, _, _ in several.kept] == [one.types[read] for read, _, _ in one.kept]
    held = {read: sample_inputs(one, seed % 99)[read] for read, _, _ in one.kept}
    tokens = rng.integers(0, LETTERS, count)
    found = evaluate(several, {**inputs_at(several, tokens, first), **held})
    for mine, other in zip(found.values(), one_by_one(one, tokens, first, held), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("name", ["riscv", "macarray", "gemmini", "ne16"])
def test_dense_layers_of_several_axes(step: Graph, name: str) -> None:
    """Rows `[1, 1, K]` of a step become one matrix of several steps, as rows `[1, K]` do."""
    target, tokens = load_target(name), np.arange(3)
    deep = decoder(1, 1)
    one, several = (adapt(graph, target.policy(None)) for graph in (deep, prefilled(rows_as_matrix(deep), 3)))
    plain = adapt(prefilled(step, 3), target.policy(None))
    shapes = [
        [graph.types[node.inputs[0]].shape for node in graph.nodes if node.operator.weight_axis is not None]
        for graph in (several, plain)
    ]
    assert shapes[0] == shapes[1]
    check_steps(one, several, "position", sample_inputs(several))
    sample = inputs_at(several, tokens, 0)
    with built(compile_graph(several, target, Options()), target) as build:
        (found,) = run_build(build, None, [sample]).outputs
    wanted = evaluate(several, {**sample, **{read: first for read, _, first in several.kept}})
    np.testing.assert_array_equal(found["logits"], wanted["logits"])


def test_meaning_in_onnx(step: Graph) -> None:
    """ONNX Runtime computes the same from the operators' bodies, rows that are written twice included."""
    several = prefilled(step, 5)
    for graph in (several, attention_of_bits(16, lambda macs: True)(several)):
        inputs = sample_inputs(graph)
        check_graph(graph, {**inputs, "position": np.array([3, 9, 3, 31, 9], np.int64)})


@pytest.mark.parametrize("name", ["riscv", "cortex_m4", "ne16"])
def test_rows_are_weighed_some_at_a_time(step: Graph, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Scores of many rows would not fit beside the caches. The firmware equals the graph of several steps."""
    monkeypatch.setattr("dovetail.legalize.attention._MOST_SCORES", 2 * 4 * PLACES)
    target, packed = load_target(name), attention_of_bits(16, lambda macs: True)
    graph = packed(prefilled(step, 7))
    assert sum(isinstance(node.operator, AttentionEnd) for node in graph.nodes) == 4 + 1  # of the last row alone
    check_steps(packed(step), graph, "position", sample_inputs(graph))
    sample = inputs_at(graph, np.arange(7), 4)
    with built(compile_graph(adapt(graph, target.policy(None)), target, Options()), target) as build:
        (found,) = run_build(build, None, [sample]).outputs
    wanted = evaluate(graph, {**sample, **{read: first for read, _, first in graph.kept}})
    np.testing.assert_array_equal(found["logits"], wanted["logits"])


@pytest.mark.parametrize("count", [1, 3])
def test_cores_share_attention(step: Graph, count: int) -> None:
    """Each of two cores weighs and ends two heads of four."""
    target, packed = with_cores(load_target("ne16"), 2), attention_of_bits(16, lambda macs: True)
    graph = packed(prefilled(step, count) if count > 1 else step)
    sample = [inputs_at(graph, np.arange(at, at + count), at) for at in (0, count, 2 * count)]
    compiled = compile_graph(adapt(graph, target.policy(None)), target, Options())
    shared = [
        {type(node.operator) for node in one.graph.nodes if isinstance(node.operator, AttentionWeights | AttentionEnd)}
        for one in compiled.plan.program.statements
        if isinstance(one, Call) and one.core == 1
    ]
    assert {AttentionWeights} in shared and {AttentionEnd} in shared
    with built(compiled, target) as build:
        found = run_build(build, None, sample).outputs
    for outputs, wanted in zip(found, evaluate_all(graph, sample), strict=True):
        np.testing.assert_array_equal(outputs["logits"], wanted["logits"])


@pytest.mark.parametrize(("simulator", "cores"), [("host", 1), ("iss", 1), ("host", 3), ("iss", 3)])
def test_firmware_shares_states_weights_and_memory(letters: Path, simulator: str, cores: int) -> None:
    """A prompt in calls of several steps, single steps between and behind: all equal single steps of the graph."""
    target, count = with_cores(load_target("riscv"), cores), 5
    compiled = compile_model(letters / "int8.onnx", target, Options(prefill=count))
    assert compiled.prefill is not None
    assert cores > 1 or not compiled.prefill.unit.constants  # each is a constant of the step
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, LETTERS, 3 * count)
    with built(compiled, target) as build:
        several = several_steps(build)
        assert several is not None
        calls, ends = [], []
        for first, size in ((0, count), (count, 1), (count + 1, count), (2 * count + 1, 1)):
            graph = compiled.graph if size == 1 else compiled.prefill.graph
            calls.append(inputs_at(graph, tokens[first : first + size], first))
            ends.append(first + size - 1)
        found = run_build(build, simulator, calls).outputs
        sentence = several_at_once(build, compiled.graph, simulator)
    steps = [inputs_at(compiled.graph, tokens[at : at + 1], at) for at in range(ends[-1] + 1)]
    wanted = evaluate_all(compiled.graph, steps)
    for outputs, at in zip(found, ends, strict=True):
        np.testing.assert_array_equal(outputs["logits"], wanted[at]["logits"])
    assert sentence.startswith(f"{count} steps in one call, and one behind them, equal the integer graph")


def test_an_engine_computes_the_rows(letters: Path) -> None:
    """Dense layers of all steps are launches of the engine, whose guard lets it write the results of both networks."""
    target = load_target("ne16")
    compiled = compile_model(letters / "int8.onnx", target, Options(prefill=16))
    assert compiled.prefill is not None
    assert any(region.engine is not None for region in compiled.prefill.regions)
    with built(compiled, target) as build:
        assert "equal the integer graph" in several_at_once(build, compiled.graph, None)
        assert "was not run" in several_at_once(build, compiled.graph, "host")  # one stand-in of an engine for both


def test_the_prompt_is_computed_several_tokens_a_call(letters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = letters / "build"
    dovetail("compile", letters / "int8.onnx", "--target", "riscv", "-o", build, "--prefill", "4")
    assert "4 steps in one call: ram" in capsys.readouterr().out
    dovetail("run", build, "--sim", "host")
    assert "4 steps in one call, and one behind them, equal the integer graph" in capsys.readouterr().out
    text = ("generate", build, "--tokenizer", letters / "letters.bin", "--tokens", "20")
    dovetail(*text, "--prompt", "a goat l")
    assert "the first 8 were computed several in a call" in capsys.readouterr().out
    dovetail(*text, "--prompt", "a")
    said = capsys.readouterr()
    assert "several in a call" not in said.out and "computed token by token: it has 3 tokens" in said.err


def test_refusals(step: Graph, letters: Path) -> None:
    """Each says why: nothing kept, too many steps, places behind a step's own, another writer, a target."""

    def why(graph: Graph, count: int = 4) -> str:
        with pytest.raises(ModelError) as error:
            prefilled(graph, count)
        return error.value.what

    builder = GraphBuilder("plain")
    x = builder.input("x", TensorType((1, 4), DType.INT8))
    assert "keeps nothing" in why(builder.finish([builder.add(Reshape((4, 1)), [x])]))
    assert f"its states have {PLACES} places" in why(step, PLACES + 1) and "at least 2" in why(step, 1)
    later = [
        replace(node, operator=Compare(CompareKind.LESS)) if isinstance(node.operator, Compare) else node
        for node in step.nodes
    ]
    assert "does not attend to just the places up to its step's" in why(replace(step, nodes=tuple(later)))
    with pytest.raises(DovetailError, match="lists of commands"):
        compile_model(letters / "int8.onnx", load_target("gemmini"), Options(prefill=4))
    with pytest.raises(DovetailError, match="not what they are one by one"):  # its requantisation is not exact
        compile_model(letters / "int8.onnx", load_target("vta"), Options(prefill=4))
    with pytest.raises(DovetailError, match="without stripes and pipelines"):
        compile_model(letters / "int8.onnx", load_target("riscv"), Options(prefill=4, pipeline=True, cores=2))


def test_two_networks_that_flash_has_no_room_for(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step alone fits, its runtime included."""
    monkeypatch.setattr(sys.modules["dovetail.compile"], "CODE_RESERVE", 0)
    options = Options(settings={"flash.size": 62 << 10})
    compile_model(letters / "int8.onnx", load_target("riscv"), options)
    with pytest.raises(DovetailError, match="code and constants of both networks take about"):
        compile_model(letters / "int8.onnx", load_target("riscv"), replace(options, prefill=4))


def test_a_wrong_graph_is_found(step: Graph) -> None:
    """Steps that attend one place too far, or write a row elsewhere, do not pass the comparison with single steps."""
    several = prefilled(step, 4)
    place, inputs = place_of(step)[0], sample_inputs(several)
    check_steps(step, several, place, inputs)
    for name, array in several.constants.items():
        if array.size == PLACES and array.dtype == np.int64:
            wrong = replace(several, constants={**several.constants, name: array - 1})
            with pytest.raises(ModelError, match="not what they are one by one"):
                check_steps(step, wrong, place, inputs)
            return
    raise AssertionError("the places are a constant")
