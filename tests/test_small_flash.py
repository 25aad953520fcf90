"""A memory that does not hold the network: every bundled target says so, by how much, and at once."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dovetail.compile import Options, compile_model
from dovetail.errors import PlanError
from dovetail.guests import zoo
from dovetail.target import Target
from dovetail.target.description import with_cores
from dovetail.target.parts import PARTS
from dovetail.targets import BUILT_IN, load_target

MOST_SECONDS = 2.0
"""Of the processor, from the model's file to the message."""


@cache
def digits(folder: Path) -> Path:
    """The zoo's smallest network."""
    path = folder / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return path


def sized(target: Target, size: int) -> Target:
    """The target with so many bytes for its program."""
    memories = (replace(one, size=size) if one.name == target.code else one for one in target.memories)
    return replace(target, memories=tuple(memories))


def short(model: Path, target: Target) -> int:
    """The bytes that the message says are missing."""
    began = time.process_time()
    with pytest.raises(PlanError, match=r": [\d,]+ bytes short") as caught:
        compile_model(model, target, Options())
    seconds = time.process_time() - began
    assert seconds <= MOST_SECONDS
    assert caught.value.hint
    found = re.search(r": ([\d,]+) bytes short", str(caught.value))
    return int(found[1].replace(",", "")) if found else 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_from_a_byte_to_nine_tenths_too_small(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where values lie in the same memory, it is too small from where they no longer fit."""
    model, target = digits(tmp_path_factory.getbasetemp()), load_target(name)
    needed = 4096 + short(model, sized(target, 4096))
    if target.code != target.values:
        compile_model(model, sized(target, needed), Options())
    for missing in (1, needed // 100, needed // 10, needed // 2, needed * 9 // 10):
        assert short(model, sized(target, needed - missing)) >= missing


@pytest.mark.parametrize("name", PARTS)
def test_parts_have_their_core_and_memories(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    part, target = PARTS[name], load_target(name)
    core = load_target(part.core).core
    assert target.name == name and replace(target.core, pairs=core.pairs) == core
    flash, ram = target.memory(target.code), target.memory(target.values)
    assert ((flash.base, flash.size), (ram.base, ram.size)) == (part.flash, part.ram)
    assert part.name in target.sentence and part.source
    compiled = compile_model(digits(tmp_path_factory.getbasetemp()), target, Options())
    assert compiled.project.files["dovetail.json"]


@pytest.mark.parametrize(("name", "cores"), [("riscv", 2), ("ne16", 4)])
def test_code_is_measured(
    name: str, cores: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that is longer than what the plan keeps for it would only be met by the linker."""
    monkeypatch.setattr(sys.modules["dovetail.compile"], "CODE_RESERVE", 0)
    model, target = digits(tmp_path_factory.getbasetemp()), load_target(name)
    target = with_cores(target, cores)
    needed = 4096 + short(model, sized(target, 4096))
    beside = ", and values and stack" if target.code == target.values else ""
    with pytest.raises(PlanError, match=f"code and constants take about [0-9,]+{beside}.*bytes short") as caught:
        compile_model(model, sized(target, needed + 1024), Options())
    assert "--cores" in caught.value.hint and "--optimize size" in caught.value.hint
