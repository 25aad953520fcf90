"""The starting file of a port runs as it is: it passes `dovetail check`, and compiles and runs a network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.cli.main import main
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import TargetError
from dovetail.guests.check.cases import Limits
from dovetail.guests.check.suite import Order, check
from dovetail.guests.newtarget import PortStyle, PortWish, write_new_target
from dovetail.guests.newtarget.command import new_target
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.target import Target
from dovetail.targets import load_target


def test_it_passes_check(tmp_path: Path) -> None:
    target = load_target(str(write_new_target("mine", tmp_path)[0]))
    found = check(target, Order(Limits(60_000, 8_000, 60), ("model",)))
    assert found.findings == []
    assert [one.offload for one in found.tested] == [offload.name for offload in target.engines[0].offloads]
    assert sum(one.cases for one in found.tested) > 120


def ran(target: Target, model: Path) -> list[str]:
    """Compile and run a model, whose outputs must be those of the integer graph; what computes each layer."""
    compiled = compile_model(model, target, Options())
    write_project(compiled.project, Path("build"))
    inputs = sample_inputs(compiled.graph, 3)
    result = run_build(open_build(Path("build"), target), "iss", [inputs])
    expected = evaluate(compiled.graph, inputs)
    assert all(np.array_equal(array, expected[name]) for name, array in result.outputs[0].items())
    assert result.outputs[0]
    return [region.place for region in compiled.regions]


def test_a_zoo_network_runs_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main_status(["zoo", "digits", "-o", "digits.onnx"])
    main_status(["new-target", "mine"])
    assert ran(load_target("mine.py"), Path("digits.onnx")).count("mine") >= 3


CHECKED = {
    ("registers", "float32"): ("conv", "add"),
    ("registers", "shift"): ("depthwise", "dense"),
    ("list", "double"): ("depthwise", "add"),
    ("list", "single"): ("conv", "dense"),
}
"""Operators that are checked: together each one in each style, and each rounding."""


@pytest.mark.parametrize("operators", ["conv", "dense,add", "conv,depthwise,dense,add"])
@pytest.mark.parametrize("requant", ["double", "single", "float32", "shift"])
@pytest.mark.parametrize("style", ["registers", "list"])
def test_what_is_asked_for_is_there_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str, requant: str, operators: str
) -> None:
    """Each combination compiles and runs a network, driver included; some, together of all, pass a small check."""
    monkeypatch.chdir(tmp_path)
    main_status(["zoo", "digits", "-o", "digits.onnx"])
    options = ["--style", style, "--operators", operators, "--requant", requant]
    assert main_status(["new-target", "mine", *options]) == 0
    target = load_target("mine.py")
    names = [offload.name for offload in target.engines[0].offloads]
    wanted = {"conv": "convolution", "depthwise": "depthwise", "dense": "dense", "add": "sum"}
    assert {wanted[one] for one in operators.split(",")} <= set(names)
    if (style, requant) in CHECKED and "depthwise" in operators:
        checked = tuple(wanted[one] for one in CHECKED[style, requant])
        found = check(target, Order(Limits(1_000, 300), ("iss",), checked))
        assert found.findings == [] and all(one.cases and one.cases > one.skipped for one in found.tested)
    assert requant == "shift" or "mine" in ran(target, Path("digits.onnx"))


def test_an_instruction_of_the_cores_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("exo")
    monkeypatch.chdir(tmp_path)
    main_status(["zoo", "digits", "-o", "digits.onnx"])
    assert main_status(["new-target", "mine", "--style", "instruction"]) == 0
    assert [path.name for path in sorted(tmp_path.glob("mine.*"))] == ["mine.c", "mine.py"]
    found = check(load_target("mine.py"), Order(Limits(2_000, 400), ("iss",)))
    assert found.findings == [] and found.tested[0].cases
    assert set(ran(load_target("mine.py"), Path("digits.onnx"))) == {"core"}
    assert "mine_dot(" in "".join(path.read_text() for path in Path("build").rglob("*.c"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--style", "soup"], "there is no 'soup'"),
        (["--operators", "conv,soup"], "there is no 'soup'"),
        (["--requant", "soup"], "there is no 'soup'"),
        (["--operators", "add"], "an engine that only adds is not written here"),
        (["--style", "instruction", "--requant", "single"], "wherever its meaning occurs"),
        (["--style", "library", "--operators", "conv"], "what its functions do"),
    ],
)
def test_wishes_that_will_not_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main_status(["new-target", "mine", "-o", str(tmp_path), *options]) == 1
    error = capsys.readouterr().err
    assert said in error and "what to do" in error and not list(tmp_path.iterdir())


def test_on_a_terminal_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["list", "conv,add", "single"])
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda question, default: next(answers))
    new_target("mine", tmp_path)
    asked = (tmp_path / "mine.py").read_text()
    new_target("mine", tmp_path / "same", "list", "conv,add", "single")
    assert (tmp_path / "same" / "mine.py").read_text() == asked and not list(answers)


def test_a_first_port_needs_few_names(tmp_path: Path) -> None:
    """At most 12 of the public interface that targets are written against; 18 for loops, which nobody ports
    first."""
    for style in PortStyle:
        most = 18 if style is PortStyle.LOOPS else 12
        text = write_new_target("mine", tmp_path / style, wish=PortWish(style))[0].read_text()
        names = set(re.findall(r"\bdt\.(\w+)", text))
        assert 0 < len(names) <= most, names


def main_status(arguments: list[str]) -> int:
    """Run a command; its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_it_is_about_a_screen_and_writes_nothing_over(tmp_path: Path) -> None:
    paths = write_new_target("mine", tmp_path / "port")
    code, driver, _ = (path.read_text().splitlines() for path in paths)
    assert len(code) <= 120 and len(driver) <= 45
    with pytest.raises(TargetError, match=r"mine\.py exists"):
        write_new_target("mine", tmp_path / "port")
    write_new_target("mine", tmp_path / "port", force=True)


@pytest.mark.parametrize("name", ["", "Mine", "2fast", "a-b", "class", "../up", "macarray"])
def test_names_that_will_not_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(TargetError) as raised:
        write_new_target(name, tmp_path)
    assert raised.value.where and raised.value.hint
    assert list(tmp_path.iterdir()) == []
