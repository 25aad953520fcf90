"""The fuzzer: a slice of its trials, a fault it finds and makes smaller, and a run that goes on."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from firmware import require_chip

pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro is an oracle")
pytest.importorskip("onnxruntime", reason="ONNX Runtime is an oracle")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import fuzz

from dovetail.ir.operators.linear import Conv2d


def test_models_at_the_edges_end_well() -> None:
    """A part of what each run of the fuzzer begins with; every seed begins so."""
    require_chip()
    edges = range(0, len(fuzz.edge_models.TRIED), 6)
    assert all(fuzz.trial(number, 0) == fuzz.trial(number, 1) for number in edges)
    ended = {one.number: end for one, end in fuzz.several((fuzz.trial(number, 0) for number in edges), 2)}
    assert {end.outcome for end in ended.values()} == {"ran"}, ended


def test_a_slice_finds_nothing_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_chip()
    monkeypatch.setattr(fuzz.edge_models, "TRIED", fuzz.edge_models.TRIED[:2])
    assert fuzz.trial(7, 1) == fuzz.trial(7, 1) != fuzz.trial(8, 1)
    for count in (4, 8):
        assert not fuzz.fuzz(tmp_path, 120, 2, 1, count)
        lines = [json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert sorted(line["number"] for line in lines) == list(range(count))


def test_a_fault_is_found_and_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that means something else by a convolution than its kernels compute."""
    require_chip()
    right = Conv2d.evaluate
    monkeypatch.setattr(fuzz, "SMALLER", 1)
    monkeypatch.setattr(Conv2d, "evaluate", lambda self, inputs: right(self, inputs) + np.int32(1 << 12))
    one = fuzz.Trial(0, "run", "tflite", "convolution", 5, "cortex_m4", {"optimize": "size", "weights": "text"})
    ended, _ = fuzz.alone(one)
    assert ended.outcome not in fuzz.GOOD
    place = fuzz.keep(tmp_path, one, ended)
    kept = json.loads((place / "trial.json").read_text())
    assert kept["trial"]["options"] == {} and kept["trial"]["target"] == "riscv"
    assert (place / "net.tflite").stat().st_size and (place / "inputs.npz").is_file()


def test_faults_to_plant_stand_in_the_sources_of_today() -> None:
    """Each edit of scripts/seeded_faults.toml fits one place."""
    scripts, package = Path(fuzz.__file__).parent, Path(fuzz.__file__).parents[1] / "dovetail"
    faults = tomllib.loads((scripts / "seeded_faults.toml").read_text())
    for name, fault in faults.items():
        path, old, _ = fault["edit"]
        assert (package / path).read_text().count(old) == 1, name
