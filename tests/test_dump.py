"""`compile --dump`: every launch can be run from its files alone, by whoever executes the engine's commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.emit.dump import dump
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import BuildError, TargetError
from dovetail.guests import zoo
from dovetail.sim.device import MemoryBus, MemoryRegion
from dovetail.targets import load_target


def _dumped(folder: Path, model: str, target: str) -> dict[str, Any]:
    path = folder / f"{model}.onnx"
    path.write_bytes(zoo.build(model))
    compiled = compile_model(path, load_target(target), Options())
    count = dump(compiled.unit, sample_inputs(compiled.graph), folder / "raw")
    index: dict[str, Any] = json.loads((folder / "raw" / "index.json").read_text())
    assert count == len(index["launches"]) > 0
    return index


def _run_vta(folder: Path, index: dict[str, Any], launch: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Execute one launch on nothing but its files; returns the image afterwards."""
    from dovetail.targets.vta.checks import BufferRange, Pointers
    from dovetail.targets.vta.config import VtaConfig
    from dovetail.targets.vta.executor import execute

    image = np.fromfile(folder / launch["image"]["file"], np.uint8)
    bus = MemoryBus([MemoryRegion("image", launch["image"]["address"], image.size)])
    bus.view(launch["image"]["address"], image.size)[:] = image
    (command,) = launch["commands"]
    instructions = (folder / command["parts"]["instructions"]["file"]).read_bytes()
    registers = command["registers"]
    pointers = Pointers(*(registers[name] for name in ("uop", "inp", "wgt", "acc", "out")))
    allowed = [BufferRange("inputs", launch["image"]["address"], image.size, True, False)]
    result = next(buffer for buffer in launch["buffers"] if buffer["role"] == "result")
    written = BufferRange("result", result["address"], result["bytes"], False, True)
    execute(instructions, bus, pointers, VtaConfig(**index["engines"]["vta"]), buffers=[*allowed, written])
    return bus.view(launch["image"]["address"], image.size)


def test_every_launch_runs_from_its_files_alone(tmp_path: Path) -> None:
    index = _dumped(tmp_path, "digits", "vta")
    for launch in index["launches"]:
        after = _run_vta(tmp_path / "raw", index, launch)
        result = next(buffer for buffer in launch["buffers"] if buffer["role"] == "result")
        start = result["address"] - launch["image"]["address"]
        found = after[start : start + result["bytes"]]
        expected = np.fromfile(tmp_path / "raw" / result["expected"], np.uint8)
        counts = np.fromfile(tmp_path / "raw" / result["mask"], np.uint8) if result["mask"] else np.ones_like(expected)
        assert expected.size == result["bytes"] and counts.any()
        assert (found == expected)[counts != 0].all(), launch["layer"]


def test_a_flipped_expectation_would_be_noticed(tmp_path: Path) -> None:
    index = _dumped(tmp_path, "digits", "vta")
    launch = index["launches"][0]
    result = next(buffer for buffer in launch["buffers"] if buffer["role"] == "result")
    before = np.fromfile(tmp_path / "raw" / launch["image"]["file"], np.uint8)
    expected = np.fromfile(tmp_path / "raw" / result["expected"], np.uint8)
    start = result["address"] - launch["image"]["address"]
    assert (before[start : start + expected.size] != expected).any(), "the image must not hold the result already"


def test_engines_without_a_form_of_their_own_dump_their_tasks(tmp_path: Path) -> None:
    index = _dumped(tmp_path, "digits", "ne16")
    for launch in index["launches"]:
        for command in launch["commands"]:
            assert set(command["parts"]) == {"task"} and command["registers"] == {}


def test_nothing_to_dump_and_a_folder_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    core = compile_model(path, load_target("riscv"), Options())
    with pytest.raises(TargetError, match=r"nothing of .* runs on an engine"):
        dump(core.unit, sample_inputs(core.graph), tmp_path / "raw")
    compiled = compile_model(path, load_target("vta"), Options())
    (tmp_path / "there").mkdir()
    with pytest.raises(BuildError, match="exists"):
        dump(compiled.unit, sample_inputs(compiled.graph), tmp_path / "there")
