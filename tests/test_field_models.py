"""Networks as people have them (../shared/models/field): each is what its runtime computes; what measures that finds
what is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "field_models.py"
FOLDER = Path(__file__).resolve().parents[2] / "shared" / "models" / "field"
SLOW = ("basic_pitch_nmp.tflite", "yunet_n_320_320.onnx", "deeplabv3_mnv2_dm05_pascal_quant.tflite")
"""Minutes each: `python scripts/field_models.py` measures them."""


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("field_models", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


field = _script()
MODELS = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.suffix in field.SUFFIXES)


@pytest.mark.oracles
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SLOW])
def test_every_model_is_what_its_runtime_computes(name: str) -> None:
    found = field.measure(FOLDER / name)
    assert found["holds"], field.sentence(found)


def reference(**arrays: Any) -> dict[str, Any]:
    return {f"out_0__{name}": array for name, array in arrays.items()}


def test_one_step_is_found() -> None:
    """Of integers one element that is 1 off; of floats what is more than 1e-4 of the largest; infinities elsewhere."""
    wanted = np.arange(12, dtype=np.int8).reshape(3, 4)
    assert field.compare(reference(tflm=wanted), 0, list(wanted))["holds"]
    off = wanted.copy()
    off[2, 1] += 1
    found = field.compare(reference(tflm=wanted), 0, list(off))
    assert not found["holds"] and (found["lsb"], found["different"]) == (1, 1)
    real = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    for difference, holds in ((0.9e-4, True), (1.2e-4, False)):
        moved = real.copy()
        moved[0, 0] += np.float32(difference)
        assert field.compare(reference(ort_precise=real), 0, list(moved))["holds"] is holds
    infinite = real.copy()
    infinite[1, 1] = -np.inf
    assert field.compare(reference(ort_precise=infinite), 0, list(infinite))["holds"]
    assert not field.compare(reference(ort_precise=infinite), 0, list(real))["holds"]


def test_the_runtime_that_counts() -> None:
    """TensorFlow Lite Micro before others, ONNX Runtime with precise kernels before others."""
    arrays = {name: np.zeros((1, 2), np.int8) for name in ("xnnpack", "builtin_ref", "tflm")}
    assert field.compare(reference(**arrays), 0, [np.zeros(2, np.int8)])["runtime"] == "tflm"
    arrays = {name: np.zeros((1, 2), np.int8) for name in ("ort_noopt", "ort_precise")}
    assert field.compare(reference(**arrays), 0, [np.zeros(2, np.int8)])["runtime"] == "ort_precise"


@pytest.mark.oracles
def test_a_layer_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step against ONNX Runtime: an average that is one too much."""
    from dovetail.ir.operators.reduction import AveragePool2d
    from dovetail.targets import load_target

    path = FOLDER / "made" / "digits_qdq.onnx"
    if not path.is_file():
        pytest.skip("the reference models of ../shared are not here")
    known, target = np.load(f"{path}.ref.npz"), load_target("riscv")
    assert field.steps(path, target, known)["lsb"] == 1
    evaluate = AveragePool2d.evaluate

    def wrong(self: Any, inputs: Any) -> Any:
        return evaluate(self, inputs) + 2

    monkeypatch.setattr(AveragePool2d, "evaluate", wrong)
    assert field.steps(path, target, known)["lsb"] > 1
