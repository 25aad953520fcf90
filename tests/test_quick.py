"""One real compile and run of each kind of hardware and of each command: what `make quick` looks at after an edit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import dovetail

pytest.importorskip("unicorn", reason="the simulator needs dovetail[iss]")
pytestmark = pytest.mark.quick

ON_ISS = {
    "a RISC-V core": ("riscv",),
    "a core with instructions of its own": ("riscv_xpulp",),
    "a Cortex-M": ("cortex_m4",),
    "two cores": ("riscv", "--cores", "2"),
    "a pipeline of cores": ("riscv_big_small", "--pipeline"),
    "stripes": ("riscv", "--memory-budget", "4900"),
    "a coarse engine": ("ne16",),
    "an instruction stream": ("vta",),
    "two engines": ("diana",),
    "lists of commands": ("kestrel",),
    "a multiplier tree": ("maeri",),
    "an engine in Verilog's place": ("macarray",),
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's smallest network."""
    path = tmp_path_factory.mktemp("quick") / "digits.onnx"
    assert dovetail("zoo", "digits", "-o", path) == 0
    return path


@pytest.mark.parametrize("kind", ON_ISS)
def test_firmware_computes_the_network(kind: str, digits: Path, tmp_path: Path) -> None:
    target, *options = ON_ISS[kind]
    assert dovetail("compile", digits, "-t", target, "-o", tmp_path / "net", *options) == 0
    assert dovetail("run", tmp_path / "net", "--json", tmp_path / "run.json") == 0
    assert json.loads((tmp_path / "run.json").read_text())["cycles"]["total"] > 0


def test_the_c_runs_on_this_computer(digits: Path, tmp_path: Path) -> None:
    assert dovetail("compile", digits, "-t", "ne16", "-o", tmp_path / "net") == 0
    assert dovetail("run", tmp_path / "net", "--sim", "host") == 0


def test_a_mesh(digits: Path, tmp_path: Path) -> None:
    assert dovetail("mesh", digits, "-t", "spinnaker2", "--chips", "1", "-o", tmp_path / "mesh") == 0
    assert dovetail("run", tmp_path / "mesh") == 0


def test_an_order_of_a_network(digits: Path, tmp_path: Path) -> None:
    assert dovetail("schedule", digits, "-t", "maeri") == 0


def test_a_float_model_is_quantised_and_compiled(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(1)
    weights = onnx.numpy_helper.from_array(rng.normal(0, 1, (4, 8)).astype(np.float32), "w")
    ends = [onnx.helper.make_tensor_value_info(n, 1, [1, s]) for n, s in (("x", 4), ("y", 8))]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "net", *[[e] for e in ends], [weights]
    )
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9),
        tmp_path / "net.onnx",
    )
    np.savez(tmp_path / "data.npz", x=rng.normal(0, 1, (16, 1, 4)).astype(np.float32))
    assert (
        dovetail(
            "quantize", tmp_path / "net.onnx", "-t", "riscv", "--data", tmp_path / "data.npz", "-o", tmp_path / "q.onnx"
        )
        == 0
    )
    assert dovetail("compile", tmp_path / "q.onnx", "-t", "riscv", "-o", tmp_path / "net") == 0
    assert dovetail("run", tmp_path / "net") == 0


def test_a_port_is_begun_and_checked(tmp_path: Path) -> None:
    assert dovetail("new-target", "mine", "-o", tmp_path) == 0
    assert dovetail("check", tmp_path / "mine.py", "--sim", "model") == 0
