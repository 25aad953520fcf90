"""Real networks the whole way: model file to firmware on the simulated chip, compared with stored references.

The references were made by other runtimes (TensorFlow Lite Micro, ONNX Runtime); ../shared/models/README.md says how.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cycle_budget import within_budget
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, compile_model, prepare, sample_inputs
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Dequantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Transpose
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array
from dovetail.kernels import Optimize
from dovetail.quantize import quantize
from dovetail.read import load_model
from dovetail.run import RunResult, open_build, run_build
from dovetail.schedule.partition import partition
from dovetail.targets import load_target
from firmware import require_chip
from oracles import NETWORKS, derived_file, references

pytestmark = pytest.mark.oracles

MOST_OVER_BUSY = 1.09
"""All cycles of a network over those in which the busier of engine and DMA works."""
MOST_LSB = {"ic_resnet8": 5, "vww_mobilenetv1": 2, "ad_autoencoder": 3, "kws_dscnn": 4}
"""Bound on the difference from `tflm` before the softmax with the engine's requantisation, in steps of the logits."""
DERIVED = {"kws_dscnn_qdq_s8s8_perchannel": (4, 6), "mnist8_qop_u8s8": (0, 0), "vww_mbv1_qdq_u8s8": (1, 1)}
"""Derived ONNX models: the most steps of the output between it and `ort_precise`, with the model's own requantisation
and with the engine's. Each of the requantisations one after another (9 in kws, 28 in vww) may differ by one step."""
REPOSITORY = Path(__file__).resolve().parents[1]


def network_file(name: str) -> Path:
    """The int8 file of a network; skips the test where ../shared is absent."""
    folder = REPOSITORY.parent / "shared" / "models" / "mlperf_tiny"
    if not folder.is_dir():
        pytest.skip("the reference models of ../shared are not here")
    return folder / f"{name}_int8.tflite"


def integer_graph(model: Path) -> Graph:
    """The integer graph before any target's rewrites, the value before a final softmax a second output."""
    graph = quantize(simplify(load_model(model)))
    logits = [node.inputs[0] for node in graph.nodes if isinstance(node.operator, FixedSoftmax)]
    return replace(graph, outputs=(*graph.outputs, *logits))


def compile_with_logits(
    model: Path, target_name: str, policy: str | None, optimize: Optimize = Optimize.SPEED
) -> Compiled:
    """What `compile_model` does, for a graph that also gives the logits."""
    target, options = load_target(target_name), Options(policy, optimize=optimize)
    graph = integer_graph(model)
    for rewrite in target.policy(policy).rewrites:
        graph = rewrite.apply(graph)
    return compile_graph(graph, target, options, model=model)


def run(compiled: Compiled, folder: Path, inputs: list[dict[str, Array]], simulator: str = "iss") -> RunResult:
    """Write, build and run."""
    write_project(compiled.project, folder)
    return run_build(open_build(folder), simulator, inputs)


def stored(name: str, compiled: Compiled) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Every stored input of a network, and the references."""
    reference = references(name)
    count = sum(key.startswith("in_") for key in reference)
    return [{compiled.graph.inputs[0]: reference[f"in_{index}"]} for index in range(count)], reference


def assert_equals_micro(name: str, result: RunResult, compiled: Compiled, reference: dict[str, Array]) -> None:
    """Every output byte, and every logit that TensorFlow Lite Micro's are stored of."""
    compared = 0
    for index, outputs in enumerate(result.outputs):
        np.testing.assert_array_equal(outputs[compiled.graph.outputs[0]], reference[f"out_{index}__tflm"])
        if f"pretail_{index}__tflm" in reference:
            np.testing.assert_array_equal(outputs[compiled.graph.outputs[1]], reference[f"pretail_{index}__tflm"])
            compared += 1
    assert len(result.outputs) == 13
    assert compared == (0 if name == "ad_autoencoder" else 12), "the autoencoder ends without a softmax"


@pytest.mark.parametrize("optimize", list(Optimize))
@pytest.mark.parametrize("name", NETWORKS)
def test_riscv_firmware_equals_micro(name: str, optimize: Optimize, tmp_path: Path) -> None:
    require_chip()
    compiled = compile_with_logits(network_file(name), "riscv", None, optimize)
    inputs, reference = stored(name, compiled)
    assert_equals_micro(name, run(compiled, tmp_path / "build", inputs), compiled, reference)


@pytest.mark.parametrize("name", NETWORKS)
def test_cortex_m4_firmware_equals_micro(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    require_chip()
    compiled = compile_with_logits(network_file(name), "cortex_m4", None)
    inputs, reference = stored(name, compiled)
    result = run(compiled, tmp_path / "build", inputs)
    assert_equals_micro(name, result, compiled, reference)
    macs, inference = sum(region.macs for region in compiled.regions), result.simulation.inferences[0]
    record_property("instructions", inference.instructions)
    print(f"{name}: {inference.instructions} instructions, {inference.total_cycles} cycles, {macs} MACs")


@pytest.mark.parametrize("name", NETWORKS)
def test_cycles_on_cortex_m4(name: str, tmp_path: Path, update: bool) -> None:
    """As users compile it: what changes nothing is left out."""
    require_chip()
    compiled = compile_model(network_file(name), load_target("cortex_m4"), Options())
    given = sample_inputs(compiled.graph)
    result = run(compiled, tmp_path / "build", [given])
    wanted = evaluate(compiled.graph, given)
    assert all(np.array_equal(result.outputs[0][value], wanted[value]) for value in compiled.graph.outputs)
    within_budget(name, "cortex_m4", result.simulation.inferences[0].total_cycles, update)


@pytest.mark.parametrize("optimize", list(Optimize))
@pytest.mark.parametrize("target_name", ["cortex_m0plus", "cortex_m7", "cortex_m23", "cortex_m33"])
def test_other_cortex_m_cores_equal_micro(target_name: str, optimize: Optimize, tmp_path: Path) -> None:
    require_chip()
    compiled = compile_with_logits(network_file("kws_dscnn"), target_name, None, optimize)
    inputs, reference = stored("kws_dscnn", compiled)
    assert_equals_micro("kws_dscnn", run(compiled, tmp_path / "build", inputs), compiled, reference)


@pytest.mark.parametrize("target_name", ["cortex_m0plus", "cortex_m3", "cortex_m23", "riscv_imac", "riscv64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_further_cores_equal_micro(name: str, target_name: str, tmp_path: Path) -> None:
    require_chip()
    compiled = compile_with_logits(network_file(name), target_name, None)
    inputs, reference = stored(name, compiled)
    result = run(compiled, tmp_path / "build", inputs)
    assert_equals_micro(name, result, compiled, reference)
    inference = result.simulation.inferences[0]
    print(f"{target_name}, {name}: {inference.instructions} instructions, {inference.total_cycles} cycles")


@pytest.mark.parametrize("name", NETWORKS)
def test_exact_policy_equals_micro(name: str, tmp_path: Path) -> None:
    require_chip()
    compiled = compile_with_logits(network_file(name), "ne16", "exact")
    inputs, reference = stored(name, compiled)
    assert_equals_micro(name, run(compiled, tmp_path / "build", inputs), compiled, reference)


@pytest.mark.parametrize("name", NETWORKS)
def test_engine_policy(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Bit for bit the integer graph, near `tflm`, and as fast as the silicon."""
    require_chip()
    compiled = compile_with_logits(network_file(name), "ne16", "engine")
    inputs, reference = stored(name, compiled)
    result = run(compiled, tmp_path / "build", inputs)
    largest = 0
    for index, (given, outputs) in enumerate(zip(inputs, result.outputs, strict=True)):
        expected = evaluate(compiled.graph, given)
        for value in compiled.graph.outputs:
            np.testing.assert_array_equal(outputs[value], expected[value])
        key = "out" if len(compiled.graph.outputs) == 1 else "pretail"
        if f"{key}_{index}__tflm" in reference:
            found = outputs[compiled.graph.outputs[-1]].astype(int) - reference[f"{key}_{index}__tflm"]
            largest = max(largest, int(np.abs(found).max()))
    record_property("largest_lsb_before_softmax", largest)
    print(f"{name}: largest difference from tflm before the softmax {largest} LSB")
    assert largest <= MOST_LSB[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_cycles_and_sizes(name: str, tmp_path: Path, update: bool) -> None:
    require_chip()
    model = network_file(name)
    began = time.process_time()
    compiled = compile_model(model, load_target("ne16"), Options())
    seconds = time.process_time() - began
    assert seconds <= 10.0
    result = run(compiled, tmp_path / "build", [sample_inputs(compiled.graph)])
    peaks = {p.memory: (p.peak, p.lower_bound) for p in compiled.plan.placements}
    print(f"{name}: compiled in {seconds:.2f} s, (peak, bound) {peaks}, {dict(result.sizes)}")
    within_budget(name, "ne16", result.simulation.inferences[0].total_cycles, update)
    assert result.sizes["data"] == 0, "weights belong into .rodata"
    assert result.sizes["rodata"] >= sum(a.nbytes for a in compiled.plan.program.constants.values())
    host = run_build(result.build, "host", [sample_inputs(compiled.graph)])
    for value in compiled.graph.outputs:
        np.testing.assert_array_equal(host.outputs[0][value], result.outputs[0][value])


@pytest.mark.parametrize("setup", [16, 370])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_near_the_bound_of_engine_and_dma(name: str, setup: int, tmp_path: Path) -> None:
    """Also where a transfer takes 370 cycles to set up."""
    require_chip()
    target = load_target("ne16")
    assert target.dma is not None
    target = replace(target, name="ne16_slow", dma=replace(target.dma, setup_cycles=setup))
    compiled = compile_model(network_file(name), target, Options())
    write_project(compiled.project, tmp_path / "build")
    build = open_build(tmp_path / "build", target)
    found = run_build(build, "iss", [sample_inputs(compiled.graph)]).simulation.inferences[0]
    busy = {device: sum(done.end - done.start for done in some) for device, some in found.activities.items()}
    assert found.total_cycles is not None
    print(f"{name}, {setup} to set up: {found.total_cycles} cycles, busy {busy}")
    assert found.total_cycles <= MOST_OVER_BUSY * max(busy["ne16"], busy["dma"])


@pytest.mark.parametrize("policy", ["engine", "exact"])
@pytest.mark.parametrize("name", ["ic_resnet8", "vww_mobilenetv1"])
def test_the_engine_does_the_work(name: str, policy: str) -> None:
    """MACs are those of the user's model: an identity convolution for an addition does not count."""
    target = load_target("ne16")
    plain = prepare(network_file(name), load_target("riscv"), Options())
    regions = partition(prepare(network_file(name), target, Options(policy)), target)
    linear = (Conv2d, DepthwiseConv2d, FullyConnected)
    types = plain.types
    origins = {
        node.origin: node.operator.macs([types[value] for value in node.inputs])
        for node in plain.nodes
        if isinstance(node.operator, linear)
    }
    on_core = {
        node.origin
        for region in regions
        if region.engine is None
        for node in region.graph.nodes
        if isinstance(node.operator, linear)
    }
    assert on_core <= set(origins)
    share = 1 - sum(origins[origin] for origin in on_core) / sum(origins.values())
    assert share >= 0.97


@pytest.mark.parametrize("policy", ["engine", "exact"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_relayout(name: str, policy: str) -> None:
    """No transposition at run time: engine regions agree on one layout."""
    target = load_target("ne16")
    graph = prepare(network_file(name), target, Options(policy))
    assert not [node.output for node in graph.nodes if isinstance(node.operator, Transpose)]


@pytest.mark.parametrize(("target_name", "policy"), [("riscv", None), ("ne16", "engine"), ("ne16", "exact")])
@pytest.mark.parametrize("name", DERIVED)
def test_derived_models(
    name: str, target_name: str, policy: str | None, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    require_chip()
    compiled = compile_model(derived_file(f"{name}.onnx"), load_target(target_name), Options(policy))
    with np.load(derived_file(f"{name}.onnx.ref.npz")) as archive:
        image, expected = archive["in_0"], archive["out_0__ort_precise"]
    (value,), (output,) = compiled.graph.inputs, compiled.graph.outputs
    inputs = [{value: image.reshape(compiled.graph.types[value].shape)}, sample_inputs(compiled.graph)]
    result = run(compiled, tmp_path / "build", inputs)
    for given, outputs in zip(inputs, result.outputs, strict=True):
        np.testing.assert_array_equal(outputs[output], evaluate(compiled.graph, given)[output])
    found = result.outputs[0][output].astype(np.float64).reshape(expected.shape)
    difference = float(np.abs(found - expected).max())
    step = output_step(compiled.graph)
    record_property("steps", difference / step)
    print(f"{name} {target_name} {policy}: {difference:g} from ort_precise, {difference / step:.2f} steps of {step:g}")
    assert difference <= (DERIVED[name][policy == "engine"] + 1e-3) * step


def output_step(graph: Graph) -> float:
    """The scale of the final Dequantize."""
    node = graph.producers()[graph.outputs[0]]
    assert isinstance(node.operator, Dequantize)
    return float(graph.constants[node.inputs[1]].max())


_COMPILE = """
import hashlib, sys
from pathlib import Path
from dovetail.compile import Options, compile_model
from dovetail.codegen.emit import write_project
from dovetail.targets import load_target
model, folder = Path(sys.argv[1]), Path(sys.argv[2])
write_project(compile_model(model, load_target("ne16"), Options()).project, folder)
"""


def python(code: str, *arguments: str, seed: str = "0", folder: Path = REPOSITORY) -> str:
    """Output of a Python process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=folder).stdout


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", NETWORKS)
def test_same_input_same_bytes(name: str, tmp_path: Path) -> None:
    found = []
    for seed, place in (("1", tmp_path / "here"), ("4242", tmp_path / "some" / "where" / "else")):
        place.mkdir(parents=True)
        model = place / "model.tflite"
        model.write_bytes(network_file(name).read_bytes())
        python(_COMPILE, str(model), str(place / "build"), seed=seed, folder=place)
        found.append(contents(place / "build"))
    assert len(found[0]) > 8
    assert found[0] == found[1]


def test_import_is_light() -> None:
    code = "import time; t = time.process_time(); import dovetail; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


SANITISED_MAIN = """
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "{model}.h"

int main(int count, char **arguments)
{{
    FILE *file = fopen(arguments[1], "rb");
    if (count != 3 || file == NULL || fread({into}, 1, {bytes_in}, file) != {bytes_in}) {{ return 2; }}
    fclose(file);
    {model}_run();
    file = fopen(arguments[2], "wb");
    if (file == NULL || fwrite({outof}, 1, {bytes_out}, file) != {bytes_out}) {{ return 3; }}
    return fclose(file);
}}
"""


@cache
def _system_compiler() -> str:
    import shutil

    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.mark.parametrize(
    ("name", "target_name", "policy"),
    [
        ("ic_resnet8", "riscv", None),
        ("ic_resnet8", "ne16", "engine"),
        ("kws_dscnn", "ne16", "exact"),
        ("vww_mobilenetv1", "ne16", "engine"),
        ("ad_autoencoder", "riscv", None),
        ("kws_dscnn", "cortex_m4", None),
    ],
)
def test_clean_under_sanitisers(name: str, target_name: str, policy: str | None, tmp_path: Path) -> None:
    compiled = compile_model(network_file(name), load_target(target_name), Options(policy))
    folder = tmp_path / "build"
    write_project(compiled.project, folder)
    build = open_build(folder)
    entry, exit_ = build.manifest.inputs[0], build.manifest.outputs[0]
    model = build.manifest.model_prefix
    place = "(uint8_t *){symbol} + {offset}"
    source = SANITISED_MAIN.format(
        model=model,
        into=place.format(symbol=entry.symbol, offset=entry.offset),
        bytes_in=entry.bytes,
        outof=place.format(symbol=exit_.symbol, offset=exit_.offset),
        bytes_out=exit_.bytes,
    )
    externs = sorted({port.symbol for port in (entry, exit_)})
    source = source.replace("int main", "".join(f"extern uint8_t {s}[];\n" for s in externs) + "int main", 1)
    (folder / "main_test.c").write_text(source)
    flags = ["-std=c99", "-O1", "-g", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-DDOVETAIL_HOST"]
    sanitise = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Isrc", "-Iruntime", "-Idriver"]
    files = [*build.manifest.sources.host, "main_test.c"]
    made = subprocess.run(
        [_system_compiler(), *flags, *sanitise, *files, "-o", "program"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-4000:]
    given = sample_inputs(compiled.graph)
    (folder / "in.bin").write_bytes(given[entry.name].tobytes())
    ran = subprocess.run(["./program", "in.bin", "out.bin"], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    expected = evaluate(compiled.graph, given)[exit_.name]
    np.testing.assert_array_equal(
        np.frombuffer((folder / "out.bin").read_bytes(), expected.dtype), expected.reshape(-1)
    )
