"""Two engines on one chip: networks end sooner than on the better one alone, bit for bit, and the timeline says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.codegen.emit import write_project
from dovetail.compile import Compiled, Options, compile_model, sample_inputs
from dovetail.errors import PlanError
from dovetail.guests import zoo
from dovetail.ir.graph import evaluate
from dovetail.notes import Note
from dovetail.report import Report, ReportActivity, make_report
from dovetail.run import open_build, run_build
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.plan import Plan, plan
from dovetail.target import Memory, Target
from dovetail.targets import ne16
from firmware import require_chip
from two_engines.inception import inception
from two_engines.twins import machine

TWINS = machine()
ALONE = replace(TWINS, engines=(ne16.ENGINE,))


@dataclass(frozen=True)
class Ran:
    """A network compiled and run once."""

    compiled: Compiled
    report: Report

    @property
    def cycles(self) -> int:
        """Of the inference."""
        found = self.report.cycles["total"]
        assert found is not None
        return found


def ran(model: Path, target: Target, folder: Path, pins: Mapping[str, str] | None = None) -> Ran:
    """Compile and run on the simulated chip; every output byte must be that of the integer graph."""
    compiled = compile_model(model, target, Options(pins=pins or {}))
    write_project(compiled.project, folder)
    inputs = sample_inputs(compiled.graph, seed=3)
    result = run_build(open_build(folder, target), "iss", [inputs])
    expected = evaluate(compiled.graph, inputs)
    for value in compiled.graph.outputs:
        np.testing.assert_array_equal(result.outputs[0][value], expected[value])
    return Ran(compiled, make_report(result))


@pytest.fixture(scope="module", params=["resnet8", "inception"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ResNet8 is a chain but for its shortcuts; the Inception network has branches."""
    require_chip()
    path: Path = tmp_path_factory.mktemp("models") / f"{request.param}.onnx"
    path.write_bytes(inception() if request.param == "inception" else zoo.build(request.param))
    return path


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Cycles on the better of: the chip with one engine; and, of two engines, one beside the core, freely scheduled."""
    folder = tmp_path_factory.mktemp("alone")
    sole = ran(model, ALONE, folder / "sole")
    assert sole.compiled.assignment.schedule is None
    mine = {region.name: "ne16" for region in sole.compiled.regions if region.engine is not None}
    beside = ran(model, TWINS, folder / "beside", mine)
    assert not beside.report.timeline.get("second")
    return min(sole.cycles, beside.cycles)


def together(one: tuple[ReportActivity, ...], other: tuple[ReportActivity, ...]) -> int:
    """Cycles in which both are busy."""
    return sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in one for b in other)


def test_two_engines_take_four_fifths_of_the_time_of_one(model: Path, alone: int, tmp_path: Path) -> None:
    """Alike engines; the estimate is near the truth and proven to be the least, and both engines work at once."""
    found = ran(model, TWINS, tmp_path / "build")
    assignment, timeline = found.compiled.assignment, found.report.timeline
    assert assignment.schedule is not None
    both = together(timeline["ne16"], timeline["second"])
    print(f"{model.stem}: {found.cycles} of {alone} cycles, {found.cycles / alone:.3f}; both busy for {both}")
    print(assignment.describe())
    assert found.cycles <= 0.8 * alone
    assert both >= 0.25 * found.cycles
    assert assignment.is_proven and "proven" in assignment.describe()
    assert abs(assignment.schedule.finish - found.cycles) <= 0.15 * found.cycles
    layers = found.report.layers
    assert any(layer.engine == "ne16+second" and layer.ideal_macs_per_cycle == 324.0 for layer in layers)
    assert all(layer.engine_cycles for layer in layers if layer.engine in ("ne16", "second", "ne16+second"))
    macs = found.report.macs
    assert macs["ne16"] + macs["second"] >= macs["total"] - macs["core"] and min(macs["ne16"], macs["second"]) > 0


def test_unlike_engines_share_in_proportion(tmp_path: Path) -> None:
    """The second engine takes twice the cycles: it gets the smaller parts, and still helps."""
    require_chip()
    path = tmp_path / "resnet8.onnx"
    path.write_bytes(zoo.build("resnet8"))
    sole = ran(path, ALONE, tmp_path / "sole")
    found = ran(path, machine(slowdown=2), tmp_path / "build")
    print(f"unlike: {found.cycles} of {sole.cycles} cycles, {found.cycles / sole.cycles:.3f}")
    print(found.compiled.assignment.describe())
    assert found.cycles <= 0.85 * sole.cycles
    assert 0 < found.report.macs["second"] < found.report.macs["ne16"]
    sizes = [
        [np.prod([b - a for a, b in share.box]) for share in r.shares]
        for r in found.compiled.regions
        if len(r.shares) > 1
    ]
    assert sum(first for first, _ in sizes) > 1.3 * sum(second for _, second in sizes)


def test_engines_with_memories_of_their_own(tmp_path: Path) -> None:
    """What one makes and the other reads is copied between the memories; not a bit changes."""
    require_chip()
    first, second = TWINS.engines
    memories = (*TWINS.memories, Memory("L1b", 0x10400000, 128 * 1024))
    target = replace(TWINS, memories=memories, engines=(first, replace(second, memory="L1b")))
    path = tmp_path / "net.onnx"
    path.write_bytes(zoo.build("digits"))
    found = ran(path, target, tmp_path / "build", {"/conv1/Conv": "ne16+second", "/conv2/Conv": "second"})
    assert found.report.memory["L1b"].peak > 0 and found.report.macs["second"] > 18_432
    assert found.report.macs["ne16"] > 0


def test_little_memory_gives_up_what_is_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plan has no room for layers at the same time they come one after the other, and the reader is told."""

    def crowded(placed: LayoutPlan, *rest: Any) -> Plan:
        """The planner, with room for one layer at a time."""
        if any(region.slot for region in placed.regions):
            raise PlanError("there is no room")
        return plan(placed, *rest)

    monkeypatch.setattr(import_module("dovetail.compile"), "plan", crowded)
    path = tmp_path / "net.onnx"
    path.write_bytes(zoo.build("digits"))
    told = list[Note]()
    compiled = compile_model(path, TWINS, Options(tell=told.append))
    assert any("one after the other" in note.text for note in told)
    assert not any(len(region.shares) > 1 or region.slot for region in compiled.regions)
