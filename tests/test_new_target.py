"""The starting file of a port runs as it is: it passes `dovetail check`, and compiles and runs a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dovetail.cli.main import main
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.errors import TargetError
from dovetail.guests.check.cases import Limits
from dovetail.guests.check.suite import Order, check
from dovetail.guests.newtarget import write_new_target
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.targets import load_target


def test_it_passes_check(tmp_path: Path) -> None:
    target = load_target(str(write_new_target("mine", tmp_path)[0]))
    found = check(target, Order(Limits(60_000, 8_000, 60), ("model",)))
    assert found.findings == []
    assert [one.offload for one in found.tested] == [offload.name for offload in target.engines[0].offloads]
    assert sum(one.cases for one in found.tested) > 120


def test_a_zoo_network_runs_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main_status(["zoo", "digits", "-o", "digits.onnx"])
    main_status(["new-target", "mine"])
    target = load_target("mine.py")
    compiled = compile_model(Path("digits.onnx"), target, Options())
    assert [region.place for region in compiled.regions].count("mine") >= 3
    write_project(compiled.project, Path("build"))
    inputs = sample_inputs(compiled.graph, 3)
    result = run_build(open_build(Path("build"), target), "iss", [inputs])
    expected = evaluate(compiled.graph, inputs)
    assert all(np.array_equal(array, expected[name]) for name, array in result.outputs[0].items())
    assert result.outputs[0]


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
