"""`dovetail sweep`: what may be set, the grid, the cache, points that fail, and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from browser import chromium
from command_line import dovetail, refused
from dovetail import files
from dovetail.errors import DovetailError, TargetError
from dovetail.fields import axes_of, changed, fields_of, find, parse, points
from dovetail.guests import zoo
from dovetail.guests.sweep.page import sweep_page
from dovetail.guests.sweep.run import SweepOutcome, SweepTask, kept, key_of, sweep, to_json
from dovetail.options import Options
from dovetail.targets import BUILT_IN, load_target
from test_report_page import check_figures

needs_iss = pytest.mark.skipif(find_spec("unicorn") is None, reason="the simulator needs unicorn (dovetail[iss])")

FRAGILE = """
import os
from dataclasses import dataclass, replace

from dovetail.target import Recipe
from dovetail.targets.riscv import TARGET as RISCV


@dataclass(frozen=True)
class Config:
    number: int = 1


def make(config):
    if config.number == 13:
        os._exit(1)
    if config.number == 14:
        raise RuntimeError("fourteen")
    return replace(RISCV, name="fragile", recipe=Recipe("part", config, make))


TARGET = make(Config())
"""
"""A target some of whose points end the process that makes them."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits model as a file."""
    path = tmp_path_factory.mktemp("model") / "digits.onnx"
    path.write_bytes(zoo.build("digits"))
    return path


def task(model: Path, target: str) -> SweepTask:
    """A sweep of a model."""
    return SweepTask(model, target, Options())


def quiet(done: int, count: int, settings: Mapping[str, Any], outcome: SweepOutcome) -> None:
    """Told of every point, to no purpose."""


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_what_is_set_is_what_is_there(name: str) -> None:
    target = load_target(name)
    for field in fields_of(target).values():
        assert find(target, field.name.upper()) is find(target, field.name) or field.name in fields_of(target)
        same = changed(target, {field.name: field.present})
        assert fields_of(same)[field.name].present == field.present and same.name == target.name


def test_fields_reach_the_target() -> None:
    ne16 = changed(load_target("ne16"), {"L1.size": 65536, "dma.bytes_per_cycle": 4, "core.multiply": 3})
    assert ne16.memory("L1").size == 65536 and ne16.memory("L2").size == load_target("ne16").memory("L2").size
    assert ne16.dma is not None and ne16.dma.bytes_per_cycle == 4 and ne16.core.costs == {"multiply": 3}
    maeri = changed(load_target("maeri"), {"maeri.multipliers": 16, "maeri.distribution": 8, "maeri.collection": 4})
    (device,) = [engine.device for engine in maeri.engines]
    assert device is not None and device.arguments["multipliers"] == 16 and maeri.engines[0].ideal_macs_per_cycle == 16
    for macs, block, batch in ((64, 8, 1), (128, 8, 2), (256, 16, 1)):
        vta = changed(load_target("vta"), {"vta.macs": macs, "vta.bus_bytes": 4, "DRAM.size": 1 << 20})
        assert vta.engines[0].ideal_macs_per_cycle == macs and vta.memory("DRAM").size == 1 << 20
        assert vta.engines[0].defines["VTA_BLOCK"] == block and vta.engines[0].defines["VTA_BATCH"] == batch
        assert vta.engines[0].bytes_per_cycle == 4
    riscv = changed(load_target("riscv"), {"cores": 4, "core.load": 2})
    assert len(riscv.cores) == 4 and {core.costs["load"] for core in riscv.cores} == {2}
    with pytest.raises(TargetError, match="power of two"):
        changed(load_target("vta"), {"vta.macs": 100})
    with pytest.raises(TargetError, match="at most the 16 multipliers"):
        changed(load_target("maeri"), {"maeri.multipliers": 16})


def test_names_and_values() -> None:
    target = load_target("maeri")
    assert find(target, "engine.macs").name == "maeri.macs" and find(target, "ram.SIZE").name == "RAM.size"
    with pytest.raises(TargetError, match=r"maeri: there is no 'engine\.multiplyers' to set") as wrong:
        find(target, "engine.multiplyers")
    assert "maeri.multipliers" in wrong.value.hint
    with pytest.raises(TargetError, match="no numbers of an engine"):
        find(load_target("ne16"), "engine.macs")
    assert parse("32K", find(target, "RAM.size")) == 32768 and parse("1MiB", find(target, "RAM.size")) == 1 << 20
    assert parse("false", find(target, "maeri.fold")) is False
    with pytest.raises(TargetError, match="true or false"):
        parse("7", find(target, "maeri.fold"))
    with pytest.raises(TargetError, match="'many' is no number"):
        parse("many", find(target, "RAM.size"))


def test_the_grid() -> None:
    axes = axes_of(load_target("ne16"), ["l1.size=32K,64K", "dma.bytes_per_cycle=4,8,8"])
    assert points(axes) == [
        {"L1.size": size, "dma.bytes_per_cycle": width} for size in (32768, 65536) for width in (4, 8)
    ]
    for texts, message in (
        (["l1.size"], "is not NAME=VALUE"),
        (["l1.size="], "is not NAME=VALUE"),
        ([], "nothing is set"),
        (["l1.size=1", "L1.size=2"], "set twice"),
        ([f"l1.size={','.join(map(str, range(5000)))}"], "5,000 points"),
    ):
        with pytest.raises(DovetailError, match=message):
            axes_of(load_target("ne16"), texts)


@needs_iss
def test_sweep_is_what_compiling_gives(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "default_cache", lambda: tmp_path / "cache")
    order = ("sweep", digits, "-t", "ne16", "--jobs", 2, "-o", tmp_path / "s.html", "--json", tmp_path / "s.json")
    assert dovetail(*order, "--set", "l2.size=1K,512K") == 0
    first = capsys.readouterr()
    assert "2 of 2" in first.err and "1 cannot be compiled or run" in first.out
    data = json.loads((tmp_path / "s.json").read_text())
    failed, whole = data["points"]
    assert failed["cycles"] is None and "bytes" in failed["error"] and failed["settings"] == {"L2.size": 1024}
    monkeypatch.undo()
    assert dovetail("compile", digits, "-t", "ne16", "-o", tmp_path / "b") == 0
    assert dovetail("run", tmp_path / "b", "--json", tmp_path / "r.json") == 0
    run = json.loads((tmp_path / "r.json").read_text())
    assert whole["cycles"] == run["cycles"]["total"] and whole["macs"] == run["macs"]["total"]
    assert whole["peaks"] == {name: use["peak"] for name, use in run["memory"].items()} and data["best"] == 1
    capsys.readouterr()
    monkeypatch.setattr(files, "default_cache", lambda: tmp_path / "cache")
    assert dovetail(*order, "--set", "l2.size=1K,512K") == 0
    again = capsys.readouterr()
    assert "2 of the points were made earlier" in again.err and "1 of" not in again.err.replace("1 of the", "")
    assert json.loads((tmp_path / "s.json").read_text()) == data
    with chromium() as browser:
        browser.open(tmp_path / "s.html")
        assert check_figures(browser, data) > 10 and browser.faults == [] == browser.pale_anywhere()
        assert browser.evaluate("document.querySelectorAll('figure:not([hidden])').length") == 1
        assert failed["error"] in browser.evaluate("document.querySelector('path[data-tip]').dataset.tip")


@needs_iss
def test_points_that_end_their_process(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    axes = axes_of(load_target(str(tmp_path / "fragile.py")), ["part.number=13,14,2"])
    work = task(digits, str(tmp_path / "fragile.py"))
    outcomes, repeated = sweep(work, axes, 2, tmp_path / "kept", quiet)
    assert repeated == 0 and "died" in outcomes[0].error and "RuntimeError: fourteen" in outcomes[1].error
    assert outcomes[2].cycles is not None and not outcomes[2].error
    assert len(list((tmp_path / "kept").glob("*.json"))) == 1, "only what would come again is kept"


def test_a_stopped_sweep_goes_on(digits: Path, tmp_path: Path) -> None:
    axes = axes_of(load_target("ne16"), ["l2.size=512,1K"])
    made = []

    def stop(done: int, count: int, settings: Mapping[str, Any], outcome: SweepOutcome) -> None:
        """Ctrl-C after the first point."""
        made.append(settings["L2.size"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(task(digits, "ne16"), axes, 1, tmp_path, stop)
    outcomes, repeated = sweep(task(digits, "ne16"), axes, 1, tmp_path, quiet)
    assert len(made) == 1 and repeated >= 1 and all(outcome.error for outcome in outcomes)


def test_what_an_outcome_depends_on(digits: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(digits.read_bytes() + b"\0")
    (tmp_path / "fragile.py").write_text(FRAGILE)
    own = SweepTask(digits, str(tmp_path / "fragile.py"), Options())
    keys = [
        key_of(task(digits, "ne16"), {"L1.size": 1}),
        key_of(task(digits, "ne16"), {"L1.size": 2}),
        key_of(task(other, "ne16"), {"L1.size": 1}),
        key_of(task(digits, "vta"), {"L1.size": 1}),
        key_of(SweepTask(digits, "ne16", Options("exact")), {"L1.size": 1}),
        key_of(own, {"L1.size": 1}),
    ]
    (tmp_path / "beside.c").write_text("int driver;")
    assert len({*keys, key_of(own, {"L1.size": 1})}) == len(keys) + 1
    (tmp_path / f"{keys[0]}.json").write_text("{damaged")
    assert kept(tmp_path, keys[0]) is None and kept(tmp_path, keys[1]) is None


def test_page_of_several_fields() -> None:
    axes = axes_of(load_target("ne16"), ["dma.bytes_per_cycle=4,8", "l1.size=1K,2K,4K"])
    outcomes = [SweepOutcome(cycles=100 + number, macs=50, macs_per_cycle=0.5, peaks={"L1": 9}) for number in range(5)]
    data = to_json("m</script>", "ne16", "engine", axes, [*outcomes, SweepOutcome(error="<b>too small</b>")])
    page = sweep_page(data)
    assert page.count("</script>") == 2 and "<b>too" not in page and page == sweep_page(data)
    assert [point["by_best"] for point in data["points"]] == [1.0, 1.01, 1.02, 1.03, 1.04, None] and data["best"] == 0


def test_bad_input(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such model" in refused(capsys, "sweep", tmp_path / "x.onnx", "-t", "ne16", "--set", "l1.size=1K")
    assert "there is no 'l3.size' to set" in refused(capsys, "sweep", digits, "-t", "ne16", "--set", "l3.size=1K")
    assert "no requantisation policy 'x'" in refused(
        capsys, "sweep", digits, "-t", "ne16", "--set", "l1.size=1K", "--requant", "x"
    )
    page = ("-o", tmp_path / "s.html")
    assert "0 jobs" in refused(capsys, "sweep", digits, "-t", "ne16", "--set", "l1.size=1K", "--jobs", 0, *page)
    assert dovetail("sweep", digits, "-t", "vta") == 0
    assert "vta.macs" in capsys.readouterr().out
