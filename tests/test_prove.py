"""`dovetail run` compares with the integer graph: planted bugs of an engine's model end it with status 1."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dovetail import prove
from dovetail.arrays import built, seeded_inputs
from dovetail.compile import Options, compile_model
from dovetail.errors import BuildError, ModelError
from dovetail.guests import zoo
from dovetail.ir.graph import Graph, GraphBuilder, evaluate_all
from dovetail.ir.operators.arithmetic import Dequantize, Quantize
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.types import DType, TensorType
from dovetail.run import run_build
from dovetail.targets import load_target
from networks import single
from porting import port
from test_check import PLANTS

WRONG = (
    "last row of the kernel",
    "weight order",
    "output channels",
    "operand's zero point",
    "result's zero point",
    "bias",
    "rounding",
    "padding of zeros",
    "parameters",
    "alignment",
)
"""Planted bugs that change what the digits network computes."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network of handwritten digits."""
    file = tmp_path_factory.mktemp("digits") / "digits.onnx"
    file.write_bytes(zoo.build("digits"))
    return file


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_bug_is_seen_by_a_run_and_its_layer_named(name: str, digits: Path, tmp_path: Path) -> None:
    old, new = next((plant[1], plant[2]) for plant in PLANTS if plant[0] == name)
    target = port(tmp_path, old, new)
    with built(compile_model(digits, target, Options()), target) as build:
        graph, inputs = prove.read_graph(build), [seeded_inputs(build.manifest.inputs)]
        found = prove.difference(graph, inputs, run_build(build, "iss", inputs).outputs)
        count, wrong = prove.layers(build, graph, "iss", inputs)
    assert wrong is not None, "no layer differs"
    region, layer = wrong
    assert region.place == target.engines[0].name
    assert count <= len(build.manifest.layers) and layer.count and layer.found != layer.expected
    if found is None:  # the classes may come out the same
        assert name == "rounding", "the outputs are not compared"


def test_a_right_port_computes_every_layer(digits: Path, tmp_path: Path) -> None:
    target = port(tmp_path)
    with built(compile_model(digits, target, Options()), target) as build:
        graph, inputs = prove.read_graph(build), [seeded_inputs(build.manifest.inputs)] * 2
        result = run_build(build, "iss", inputs)
        assert prove.prove(result, graph, inputs) == "outputs equal the integer graph in 2 inferences"
        count, wrong = prove.layers(build, graph, "iss", inputs[:1])
    assert wrong is None and count > 5


def test_layers_are_compared_in_parts_where_memory_is_small(digits: Path) -> None:
    """Not every result fits at once."""
    ne16 = load_target("ne16")
    size = 36 << 10  # constants, code and stack take 34,728 bytes of it
    small = replace(ne16, memories=tuple(replace(m, size=size) if m.name == "L2" else m for m in ne16.memories))
    with built(compile_model(digits, small, Options()), small) as build:
        graph, inputs = prove.read_graph(build), [seeded_inputs(build.manifest.inputs)]
        assert prove.layers(build, graph, "iss", inputs)[1] is None


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    program = "from dovetail.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True)


def test_the_command_says_so_and_ends_with_status_1(digits: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    assert command("compile", digits, "--target", "riscv", "-o", build).returncode == 0
    right = command("run", build)
    assert right.returncode == 0 and right.stdout.splitlines()[-1] == "outputs equal the integer graph"
    (source,) = build.glob("src/*_constants.c")
    text = source.read_text()
    source.write_text(re.sub(r"\{\s*(-?\d+)", "{ 55", text))  # the first number of every constant
    wrong = command("run", build, "--check-layers")
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
    assert "the outputs are not those of the integer graph" in " ".join(wrong.stderr.split())
    assert re.search(r"\d+ of 10 elements of '\w+' differ in inference 0", " ".join(wrong.stderr.split()))
    assert "each of" in wrong.stdout, "the layers, compiled again, are right"
    assert command("run", build, "--no-check").returncode == 0
    host = command("run", build, "--sim", "host")
    assert host.returncode == 1
    assert command("report", build, "-o", tmp_path / "page.html").returncode == 1
    assert command("run", build, "--check-layers", "--no-check").returncode == 1


def test_a_build_without_its_graph_or_with_anothers(digits: Path, tmp_path: Path) -> None:
    target = load_target("riscv")
    with built(compile_model(digits, target, Options()), target) as build:
        graph = build.folder / prove.GRAPH
        held = graph.read_bytes()
        graph.unlink()
        with pytest.raises(BuildError, match="nothing to compare"):
            prove.read_graph(build)
        for damage in (b"", held[:1000], b"\xff" * 100):
            graph.write_bytes(damage)
            with pytest.raises((ModelError, BuildError)):
                prove.read_graph(build)
        graph.write_bytes(held)
        (port,) = build.manifest.outputs
        manifest = msgspec.structs.replace(build.manifest, outputs=(msgspec.structs.replace(port, name="other"),))
        with pytest.raises(BuildError, match="other inputs or outputs"):
            prove.read_graph(replace(build, manifest=manifest))


def test_one_element_in_one_of_three_inferences_is_found() -> None:
    graph = single(5, 6, 4)
    kind = graph.types[graph.inputs[0]]
    rng = np.random.default_rng(0)
    inputs = [{graph.inputs[0]: rng.integers(-128, 128, kind.shape).astype(np.int8)} for _ in range(3)]
    outputs = evaluate_all(graph, inputs)
    assert prove.difference(graph, inputs, outputs) is None
    (name,) = graph.results
    changed = outputs[1][name].copy()
    changed.flat[7] ^= 1
    found = prove.difference(graph, inputs, [outputs[0], {name: changed}, outputs[2]])
    assert found is not None and (found.inference, found.count, found.largest) == (1, 1, 1.0)
    assert found.index == np.unravel_index(7, changed.shape)
    with pytest.raises(ValueError):
        prove.difference(graph, inputs, outputs[:2])  # an inference that is missing is no agreement


def test_floats_may_differ_by_rounding_alone() -> None:
    one = np.array([1.0, 2.0, np.nan], np.float32)
    assert prove._parted(one * (1 + 1e-6), one, True) is None
    assert prove._parted(one * 1.01, one, True) is not None
    assert prove._parted(np.array([1.0, 2.0, 3.0], np.float32), one, True) is not None
    assert prove._parted(np.array([3], np.int8), np.array([5], np.int8), True) is not None


def rounded_twice() -> Graph:
    """Floats made integers, scaled as floats, and made integers again."""
    builder = GraphBuilder("rounded")
    x = builder.input("x", TensorType((1, 64), DType.FLOAT32))
    scale, zero = (
        builder.constant("scale", np.array([0.1], np.float32)),
        builder.constant("zero", np.zeros(1, np.int32)),
    )
    for name in ("first", "second"):
        share = builder.add(
            Binary(BinaryKind.MULTIPLY), [x, builder.constant("share", np.array(0.37, np.float32))], name
        )
        x = builder.add(
            Dequantize(), [builder.add(Quantize(DType.INT8), [share, scale, zero], name), scale, zero], name
        )
    return builder.finish([x])


def test_a_step_where_float32_decides_a_rounding_is_no_fault() -> None:
    graph = rounded_twice()
    (name,) = graph.results
    values = np.linspace(-8, 8, 64, dtype=np.float32).reshape(1, 64)
    values[0, 7] = 0.15 / 0.37  # 1.5 steps, and a step of the second quantiser hangs on it
    inputs = [{"x": values}]
    outputs = evaluate_all(graph, inputs)
    for place, count in ((7, 1), (20, None)):
        changed = outputs[0][name].copy()
        changed[0, place] += np.float32(0.1)
        found, stepped = prove._compared(graph, inputs, [{name: changed}])
        assert (found is None) == (count is not None) and stepped == (count or 0)
