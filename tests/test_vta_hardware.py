"""What is emitted for VTA, against what public hardware does: programs run on the HLS source, and an executor of its
rules (`vta_strict.py`) that shares nothing with this package. Both lie in ../shared."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.emit.dump import dump
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.guests import zoo
from dovetail.sim.device import MemoryBus, MemoryRegion
from dovetail.target import Target
from dovetail.targets.vta import target
from dovetail.targets.vta.checks import Pointers
from dovetail.targets.vta.config import PRESETS, VtaConfig
from dovetail.targets.vta.executor import execute
from dovetail.targets.vta.isa import Alu, AluOpcode
from dovetail.targets.vta.stream import StreamError, assemble, disassemble
from test_end_to_end import network_file

HARDWARE = Path(__file__).resolve().parents[2] / "shared" / "hardware"
pytestmark = [
    pytest.mark.oracles,
    pytest.mark.skipif(
        not (HARDWARE / "vta_strict.py").exists(),
        reason="the shared facts (vta_strict.py) are not beside the repository",
    ),
]
TAIL = 8192
"""Bytes behind a vector's memory."""
ORDERS = 5
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "vta_hardware.py"


def loaded(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_module", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def strict() -> ModuleType:
    """The executor of the hardware's rules."""
    return loaded(HARDWARE / "vta_strict.py")


@cache
def vectors() -> tuple[list[dict[str, Any]], dict[str, np.ndarray[Any, Any]]]:
    """What is said of each program, and all arrays."""
    with np.load(HARDWARE / "vta_hardware_vectors.npz") as archive:
        arrays = dict(archive)
    return json.loads(str(arrays.pop("meta"))), arrays


def test_programs_give_what_the_hardware_source_gave() -> None:
    """All 240, of six configurations; the executor is the device model's, its checks of style left out."""
    meta, arrays = vectors()
    for each in meta:
        number, want = each["vector"], arrays[f"result_{each['vector']}"]
        memory = np.concatenate([arrays[f"memory_{number}"], np.zeros(TAIL, np.uint8)])
        bus = MemoryBus([MemoryRegion("image", 0, memory.size)])
        bus.view(0, memory.size)[:] = memory
        stream = arrays[f"instructions_{number}"].tobytes()
        execute(stream, bus, Pointers(0, 0, 0, 0, 0), VtaConfig(**each["config"]), checks=())
        assert np.array_equal(bus.view(each["result_at"], want.size), want), each
    assert len(meta) == 240 and len({each["preset"] for each in meta}) == 6


def test_programs_are_encoded_as_they_were_decoded() -> None:
    """Field by field, for six configurations' widths; an immediate beyond SHR's field has no encoding."""
    meta, arrays = vectors()
    encoded = 0
    for each in meta:
        config, stream = VtaConfig(**each["config"]), arrays[f"instructions_{each['vector']}"].tobytes()
        for number, instruction in enumerate(disassemble(stream, config)):
            shift = isinstance(instruction, Alu) and instruction.opcode is AluOpcode.SHR and instruction.use_imm
            if shift and not config.least_shift <= instruction.imm <= config.most_shift:
                continue
            assert assemble([instruction], config) == stream[16 * number : 16 * number + 16]
            encoded += 1
    assert encoded > 1000


def replayed(folder: Path, hardware: str, orders: int = ORDERS) -> bool:
    """Whether every launch of a dump gives the expected bytes on that hardware, in any order its tokens allow."""
    return bool(strict().replay(folder, hardware, orders))


def dumped(model: Path, chip: Target, folder: Path) -> int:
    """Launches of a model, written as `compile --dump` does."""
    compiled = compile_model(model, chip, Options())
    return dump(compiled.unit, sample_inputs(compiled.graph), folder)


@pytest.mark.parametrize("preset", ["pynq", "ultra96", "de10nano", "fsim"])
def test_a_network_runs_on_each_public_hardware(preset: str, tmp_path: Path) -> None:
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    count = dumped(tmp_path / "digits.onnx", target(PRESETS[preset]), tmp_path / "dump")
    assert count > 0 and replayed(tmp_path / "dump", {"de10nano": "chisel", "fsim": "fsim"}.get(preset, "hls"))


@pytest.mark.parametrize("name", ["kws_dscnn", "ic_resnet8"])
def test_launches_of_a_network_are_right_on_hardware(name: str, tmp_path: Path) -> None:
    assert dumped(network_file(name), target(VtaConfig()), tmp_path / "dump") >= 10
    assert replayed(tmp_path / "dump", "hls")


@pytest.mark.parametrize("name", ["block 8", "block 32", "halved memories", "mixed memories", "batch 2"])
def test_launches_of_other_sizes_are_right_on_hardware(name: str, tmp_path: Path) -> None:
    config = loaded(SCRIPT).CONFIGURATIONS[name]
    assert dumped(network_file("kws_dscnn"), target(config), tmp_path / "dump") >= 10
    assert replayed(tmp_path / "dump", "hls", 1)


def test_what_no_hardware_has_is_found(tmp_path: Path) -> None:
    """Launches with MUL, and launches whose bytes were changed, are not right: the judge sees both."""
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    assert dumped(tmp_path / "digits.onnx", target(PRESETS["fsim"]), tmp_path / "fsim") > 0
    assert not replayed(tmp_path / "fsim", "hls", 0)
    assert dumped(tmp_path / "digits.onnx", target(VtaConfig()), tmp_path / "dump") > 0
    files = sorted((tmp_path / "dump").glob("*/instructions.bin"))
    stream = bytearray(files[0].read_bytes())
    for at in range(0, len(stream), 16):
        stream[at + 14] ^= stream[at] & 7 == 4  # the immediates of the ALU
    files[0].write_bytes(bytes(stream))
    assert not replayed(tmp_path / "dump", "hls", 0)


def test_a_device_of_public_hardware_refuses_mul() -> None:
    """The device model is the same executor: what was assembled for `fsim` is no instruction there."""
    stream = assemble([Alu(AluOpcode.MUL, True, 3, 0, 1, 1, 1)], PRESETS["fsim"])
    for preset in ("pynq", "ultra96"):
        with pytest.raises(StreamError, match="ALU operation 4 is unknown; there are 0 to 3"):
            disassemble(stream, PRESETS[preset])
    (shifted,) = disassemble(stream, PRESETS["de10nano"])
    assert isinstance(shifted, Alu) and shifted.opcode is AluOpcode.SHL
