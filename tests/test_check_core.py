"""A core's own instructions that only kernels use are checked in layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import firmware
from dovetail.guests.check import core_layers, suite
from dovetail.guests.check.cases import QUICK
from dovetail.target import Target
from dovetail.targets import load_target

ORDER = suite.Order(QUICK)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution, a depthwise convolution, and an addition, once each."""
    firmware.require_chip()
    monkeypatch.setattr(core_layers, "DRAWN", 1)
    monkeypatch.setattr(core_layers, "NETWORKS", [core_layers.NETWORKS[number] for number in (0, 1, 3)])


def with_instruction(name: str, old: str, new: str) -> Target:
    """The Cortex-M4 whose instruction of a name has another text."""
    target = load_target("cortex_m4")
    own = [
        replace(one, declarations=one.declarations.replace(old, new), c=one.c.replace(old, new))
        if one.name == name
        else one
        for one in target.core.instructions
    ]
    assert own != list(target.core.instructions)
    return replace(target, core=replace(target.core, instructions=tuple(own)))


def test_layers_are_the_cases_of_instructions_in_registers() -> None:
    checked = suite.check(load_target("cortex_m4"), ORDER)
    cases = {one.offload: one.cases for one in checked.tested}
    assert not checked.findings
    assert cases["layers"] == 3 and cases["smlad"] >= 1 and cases["unpack"] >= 2 and cases["add_bytes"] >= 0
    assert {one.offload: one.remark for one in checked.tested}["quantize_bytes"].startswith("no layer")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("smlad", "smlad %0, %1, %2, %0", "smladx %0, %1, %2, %0"), ("unpack", "ror #8", "ror #16")],
)
def test_a_wrong_instruction_is_found_and_named(name: str, old: str, new: str) -> None:
    checked = suite.check(with_instruction(name, old, new), ORDER)
    assert checked.findings
    assert any(name in finding.suspicions[0] for finding in checked.findings)


def test_a_check_without_cases_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_layers, "NETWORKS", [])
    checked = suite.check(load_target("cortex_m4"), ORDER)
    assert "no case was tried" in checked.findings[0].title
