"""The public names of the package: those on the page, those that ports use, and old names, which warn for a release."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from pathlib import Path

import pytest

from command_line import dovetail
from conftest import shared_dir
from dovetail.guests.zoo import build as zoo
from dovetail.names import MODULES, OldNameWarning, _new_name
from test_order import public_modules

PORTS = {"acme": 216_959, "mac2": 175_345, "otter": 43_827, "puffin": 65_781}
"""Ports by strangers, and the cycles of the network digits on each."""
FINDINGS = {"acme": "riscv_acme: 1 finding, 88 cases", "otter": "otter: no findings, 200 cases"}
FINDINGS |= {"puffin": "puffin: no findings, 144 cases"}
RENAMED = {
    ("dovetail.explain", "Explained"): ("dovetail.explain", "PlacementReport"),
    ("dovetail.ir.operators.base", "Window"): ("dovetail.ir.operators.base", "SlidingWindow"),
    ("dovetail.run", "Build"): ("dovetail.run", "ProjectBuild"),
    ("dovetail.sim.device", "Window"): ("dovetail.sim.device", "AddressWindow"),
    ("dovetail.target.layers", "Window"): ("dovetail.target.layers", "LayerWindow"),
    ("dovetail.tools.ptq", "Quantised"): ("dovetail.guests.ptq", "QuantisedNetwork"),
    ("dovetail.tools.report", "Activity"): ("dovetail.report", "ReportActivity"),
    ("dovetail.tools.report.report", "Activity"): ("dovetail.report", "ReportActivity"),
    ("dovetail.tools.sweep.run", "Task"): ("dovetail.guests.sweep.run", "SweepTask"),
}
"""Public classes of the last release -> those of today."""
FORMER = """
dovetail.adapt: RequantisationLimits, adapt, engine_requantisation, narrow_weights
dovetail.graph.types: Array, DType, TensorType
dovetail.mesh.topology: build_topology
dovetail.operators.arithmetic: Clip, Rounding, ScaleShift
dovetail.operators.detection: NonMaxSuppression
dovetail.operators.linear: Conv2d, DepthwiseConv2d, FullyConnected
dovetail.operators.movement: Pad
dovetail.operators.signal: SignalRfft
dovetail.simulate.device: Bus
dovetail.targets.fields: axes_of, fields_of, points
dovetail.targets.parts: PARTS
dovetail.tools: zoo
dovetail.tools.agent: Agent
dovetail.tools.arrays: read_inputs, seeded_inputs
dovetail.tools.check.cases: Case, Limits, QUICK
dovetail.tools.check.findings: Finding, summary
dovetail.tools.check.suite: Order, check
dovetail.tools.explain: explain
dovetail.tools.export: export
dovetail.tools.newtarget: write_new_target
dovetail.tools.prove: prove, read_graph
dovetail.tools.ptq: Preprocessing, Settings, prepare, quantise_network, read_samples
dovetail.tools.report: Report, make_report, print_report
dovetail.tools.report.detail: detail
dovetail.tools.report.report: CoreUse, MemoryUse, Report, ReportLayer, Totals
dovetail.tools.sweep.run: sweep
dovetail.tools.vectors: read_vectors, write_vectors
"""
"""Modules of earlier releases by their old names, and names that ports and pages use of them."""


def test_every_module_of_the_page_is_there() -> None:
    modules = public_modules()
    assert len(modules) > 100
    with warnings.catch_warnings():
        warnings.simplefilter("error", OldNameWarning)
        for name in modules:
            assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("line", FORMER.strip().splitlines(), ids=lambda line: line.partition(":")[0])
def test_old_modules_are_found_and_say_their_new_name(line: str) -> None:
    name, _, words = line.partition(": ")
    importlib.sys.modules.pop(name, None)  # type: ignore[attr-defined]  # another test may have used it
    with pytest.warns(OldNameWarning, match=f"{re.escape(name)} is dovetail"):
        module = importlib.import_module(name)
    new = importlib.import_module(_new_name(name))
    assert module is new or vars(module)["__path__"] == []  # a package whose modules went to several places
    for word in words.split(", "):
        if hasattr(new, word):
            assert getattr(module, word) is getattr(new, word)
        else:
            importlib.import_module(f"{name}.{word}")


def test_every_old_module_leads_somewhere() -> None:
    assert [new for new in MODULES.values() if importlib.util.find_spec(new) is None] == []


@pytest.mark.parametrize("old", MODULES)
def test_an_old_name_changes_no_package_of_today(old: str) -> None:
    """`dovetail.tools.agent` is a module of `dovetail.guests.agent`, which must stay what it is."""
    importlib.sys.modules.pop(old, None)  # type: ignore[attr-defined]
    with pytest.warns(OldNameWarning):
        importlib.import_module(old)
    place, _, name = MODULES[old].rpartition(".")
    assert importlib.import_module(f"{place}.{name}") is getattr(importlib.import_module(place), name)
    agent = importlib.import_module("dovetail.guests.agent")
    assert importlib.import_module("dovetail.guests").agent is agent and not hasattr(agent, "Agent")


@pytest.mark.parametrize("old", RENAMED, ids=".".join)
def test_old_classes_are_those_of_today(old: tuple[str, str]) -> None:
    new = importlib.import_module(RENAMED[old][0])
    with pytest.warns(OldNameWarning, match=RENAMED[old][1]):
        kind = getattr(importlib.import_module(old[0]), old[1])
    assert kind is getattr(new, RENAMED[old][1])


def test_a_target_file_that_uses_an_old_name_hears_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from dovetail.target.layers import Window\nfrom dovetail.targets.riscv import TARGET\n")
    with pytest.warns(OldNameWarning) as warned:
        assert dovetail("explain", tmp_path / "none.onnx", "--target", path) == 1
    assert [(one.filename, one.lineno) for one in warned] == [(str(path), 1)]


# ---- ports by strangers, unedited


def port(name: str) -> Path:
    """The target file of a port."""
    return shared_dir() / "faults" / "ports" / name / f"{name}.py"


@pytest.mark.parametrize("name", PORTS)
def test_ports_import_public_modules_only(name: str) -> None:
    listed = {"dovetail", *public_modules()}
    for file in port(name).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            assert {one for one in names if one.split(".")[0] == "dovetail"} <= listed


@pytest.mark.parametrize("name", PORTS)
def test_ports_compile_and_run_as_ever(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same cycles as before, and the outputs of the integer graph."""
    (tmp_path / "digits.onnx").write_bytes(zoo("digits"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", OldNameWarning)
        assert dovetail("compile", tmp_path / "digits.onnx", "--target", port(name), "-o", tmp_path / "build") == 0
    assert dovetail("run", tmp_path / "build", "--target", port(name)) == 0
    said = capsys.readouterr().out
    assert f"cycles        {PORTS[name]:,} " in said and "outputs equal the integer graph" in said


@pytest.mark.oracles
@pytest.mark.parametrize("name", PORTS)
def test_ports_are_checked_as_ever(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In as many cases as before, without findings but that acme claims too much; of mac2 it is the instruction."""
    status, captured = dovetail("check", port(name)), capsys.readouterr()
    if name in FINDINGS:
        assert (status, captured.out.splitlines()[-1]) == (int("no findings" not in FINDINGS[name]), FINDINGS[name])
        assert ("6 of 6 cases are not those declared" in captured.out) == (name == "acme")
    else:
        assert (status, captured.out) == (0, "riscv_mac2: no findings, 64 cases\n")
