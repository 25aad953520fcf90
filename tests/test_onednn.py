"""oneDNN on this computer: every byte is that of the integer graph, in less time than our C takes.

Where the library is not installed (extra `test`), or the processor lacks what it computes exactly with, tests skip.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from command_line import dovetail
from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_graph, compile_model, sample_inputs
from dovetail.errors import SimulationError, TargetError
from dovetail.ir.graph import Graph, Node, evaluate
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.types import Array, DType, TensorType
from dovetail.run import RunResult, open_build, run_build
from dovetail.target import Target
from dovetail.targets import onednn
from test_end_to_end import assert_equals_micro, integer_graph, network_file, stored

VNNI = 0x08 | 0x40
"""Bits of dnnl_cpu_isa_t: AVX-VNNI and AVX512-VNNI."""


@cache
def installed() -> Target:
    """The target; skips where there is no library, or no processor for it."""
    try:
        found = onednn.target()
    except TargetError as error:
        pytest.skip(str(error))
    if not ctypes.CDLL(found.engines[0].libraries[0]).dnnl_get_effective_cpu_isa() & VNNI:
        pytest.skip("this processor adds products of bytes in 16 bits: oneDNN's sums are not exact")
    return found


def run(compiled: Compiled, target: Target, folder: Path, inputs: list[dict[str, Array]]) -> RunResult:
    write_project(compiled.project, folder)
    return run_build(open_build(folder, target), "host", inputs)


@pytest.mark.parametrize("name", ["ic_resnet8", "vww_mobilenetv1", "kws_dscnn", "ad_autoencoder"])
def test_networks_equal_micro(name: str, tmp_path: Path) -> None:
    """Every convolution and dense layer is oneDNN's; outputs and logits are those stored."""
    target = installed()
    compiled = compile_graph(integer_graph(network_file(name)), target, Options())
    assert [region.name for region in compiled.regions if region.macs and region.engine is None] == []
    inputs, reference = stored(name, compiled)
    result = run(compiled, target, tmp_path / "build", inputs)
    assert_equals_micro(name, result, compiled, reference)
    for given, outputs in zip(inputs, result.outputs, strict=True):
        wanted = evaluate(compiled.graph, given)
        assert all(np.array_equal(outputs[value], wanted[value]) for value in compiled.graph.outputs)


@pytest.mark.parametrize("name", ["ic_resnet8", "vww_mobilenetv1"])
def test_it_is_faster_than_our_c(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The least of 30 inferences each, one thread; the first makes oneDNN's code."""
    least = {}
    for kind, target in (("onednn", installed()), ("ours", onednn.HOST)):
        compiled = compile_model(network_file(name), target, Options())
        result = run(compiled, target, tmp_path / kind, [sample_inputs(compiled.graph)] * 30)
        least[kind] = min(one.nanoseconds or 0 for one in result.simulation.inferences)
    ratio = least["ours"] / least["onednn"]
    record_property("ratio", ratio)
    print(
        f"{name}: oneDNN {least['onednn'] / 1e3:.0f} us, our C {least['ours'] / 1e3:.0f} us: {ratio:.1f} times as long"
    )
    assert ratio > 1


def test_layers_at_every_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Strides, dilations, paddings, groups, zero points, shifts: the suite for ports finds nothing."""
    installed()
    assert dovetail("check", onednn.__file__) == 0
    assert "no findings" in capsys.readouterr().out


def dense(inputs: int) -> Graph:
    """A dense layer of weights 127 whose bias takes off what the sum of the largest operands has, but 5."""
    types = {
        "x": TensorType((1, inputs), DType.INT8),
        "w": TensorType((4, inputs), DType.INT8),
        "bias": TensorType((4,), DType.INT32),
        **dict.fromkeys(("multiplier", "shift"), TensorType((1,), DType.INT32)),
        **dict.fromkeys(("sums", "scaled"), TensorType((1, 4), DType.INT32)),
        "y": TensorType((1, 4), DType.INT8),
    }
    nodes = (
        Node(FullyConnected(input_zero_point=-128), ("x", "w", "bias"), "sums"),
        Node(Requantize(), ("sums", "multiplier", "shift"), "scaled"),
        Node(Clip(-128, 127, DType.INT8), ("scaled",), "y"),
    )
    constants = {
        "w": np.full((4, inputs), 127, np.int8),
        "bias": np.full(4, 5 - inputs * 127 * 255, np.int32),
        "multiplier": np.array([1 << 30], np.int32),
        "shift": np.array([1], np.int32),
    }
    return Graph("dense", ("x",), ("y",), nodes, types, constants)


def answer(graph: Graph, target: Target, folder: Path) -> list[int]:
    """The result for the largest operands."""
    compiled = compile_graph(graph, target, Options())
    assert [region.engine is not None for region in compiled.regions] == [True]
    given = {"x": np.full(graph.types["x"].shape, 127, np.int8)}
    np.testing.assert_array_equal(evaluate(compiled.graph, given)["y"], [[5] * 4])
    return run(compiled, target, folder, [given]).outputs[0]["y"].reshape(-1).tolist()


def test_sums_beyond_float32_stay_on_the_core(tmp_path: Path) -> None:
    """518 products of 127 and 255 are within 24 bits and exact. 519 are not taken, and 1037, taken all the same, come
    out wrong: the limit is needed."""
    target = installed()
    assert answer(dense(518), target, tmp_path / "most") == [5] * 4
    for inputs in (519, 1037):
        compiled = compile_graph(dense(inputs), target, Options())
        assert [region.engine for region in compiled.regions if region.macs] == [None]
    engine = target.engines[0]
    limitless = tuple(replace(offload, constraints=offload.constraints[:-1]) for offload in engine.offloads)
    unlimited = replace(target, engines=(replace(engine, offloads=limitless),))
    assert answer(dense(1037), unlimited, tmp_path / "beyond") != [5] * 4


def test_a_processor_without_the_instructions_is_told(tmp_path: Path) -> None:
    """The library can be made to believe in an older one: no wrong numbers, but an error."""
    target = installed()
    older = replace(target.engines[0], environment=lambda: {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    target = replace(target, engines=(older,))
    compiled = compile_graph(dense(16), target, Options())
    with pytest.raises(SimulationError, match="onednn_convolution"):
        run(compiled, target, tmp_path / "build", [{"x": np.zeros((1, 16), np.int8)}])


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(onednn.VARIABLE, str(tmp_path))
    with pytest.raises(TargetError, match=f"there is no dnnl.h\n.*{onednn.VARIABLE}"):
        onednn.target()
