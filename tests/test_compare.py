"""`dovetail compare`: layers matched by the operators they compute, totals, what changed, and the page."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from browser import chromium
from command_line import dovetail, refused
from dovetail.guests import zoo
from dovetail.guests.report.compare import compare, versus
from test_report_page import STRAY, check_figures

needs_iss = pytest.mark.skipif(find_spec("unicorn") is None, reason="the simulator needs unicorn (dovetail[iss])")


def layer(name: str, operators: list[str], cycles: int, engine: str = "core", macs: int = 0) -> dict[str, Any]:
    """A layer of a run's JSON."""
    return {
        "name": name,
        "operators": operators,
        "engine": engine,
        "cycles": cycles,
        "macs": macs,
        "bytes_moved": 0,
        "ideal_macs_per_cycle": 8.0 if engine != "core" else None,
    }


def report(layers: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    """As little of a run's JSON as a comparison needs."""
    total = sum(each.get("cycles", 0) for each in layers)
    found = {
        "schema": 1,
        "model": "m",
        "target": "t",
        "policy": "p",
        "simulator": "iss",
        "dovetail": "0",
        "cycles": {"total": total, "core": total},
        "macs": {"total": 0},
        "memory": {"ram": {"size": 9, "peak": 4}},
        "sizes": {"text": 100},
        "layers": layers,
    }
    return found | others


def test_layers_hang_together_by_operators() -> None:
    a = report([layer("conv_0", ["conv", "relu"], 100), layer("pool_1", ["pool"], 10), layer("own_2", [], 5)])
    b = report(
        [
            layer("own_2", [], 4),
            layer("conv_1", ["conv"], 20, "npu", 64),
            layer("relu_2", ["relu"], 30),
            layer("pad_3", [], 7),
            layer("pool_4", ["pool"], 10),
        ],
        policy="q",
    )
    data = compare(a, b, ("one", "two"))
    rows = {
        tuple(row["a"]["layers"]): (row["b"]["layers"], row["a"]["time"], row["b"]["time"], row["ratio"])
        for row in data["layers"]
    }
    assert rows == {
        ("conv_0",): (["conv_1", "relu_2"], 100, 50, 0.5),
        ("pool_1",): (["pool_4"], 10, 10, 1.0),
        ("own_2",): (["own_2"], 5, 4, 0.8),
        (): (["pad_3"], None, 7, None),
    }
    changed = {change["what"]: (change["a"], change["b"]) for change in data["changed"]}
    assert changed == {"policy": ("p", "q"), "engines": ("none", "npu 8 MACs per cycle")}
    totals = {row["name"]: (row["a"], row["b"], row["ratio"]) for row in data["totals"]}
    assert totals["cycles"] == (115, 71, round(71 / 115, 4)) and totals["peak of ram, bytes"] == (4, 4, 1.0)


@needs_iss
def test_two_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "digits.onnx").write_bytes(zoo.build("digits"))
    folders = [tmp_path / policy for policy in ("engine", "exact")]
    for folder in folders:
        assert dovetail("compile", tmp_path / "digits.onnx", "-t", "ne16", "--requant", folder.name, "-o", folder) == 0
        assert dovetail("report", folder, "-o", folder.with_suffix(".html"), "--json", folder.with_suffix(".json")) == 0
    files = [json.loads(folder.with_suffix(".json").read_text()) for folder in folders]
    capsys.readouterr()
    assert dovetail("compare", *folders, "--json", tmp_path / "c.json", "-o", tmp_path / "c.html") == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "c.json").read_text())
    assert "policy: engine -> exact" in printed and f"{files[1]['cycles']['total']:,}" in printed
    assert data == compare(*files, ("engine", "exact")), "builds and their reports are the same"
    for side, file in zip("ab", files, strict=True):
        assert sum(row[side]["time"] or 0 for row in data["layers"]) == file["cycles"]["total"]
        named = [name for row in data["layers"] for name in row[side]["layers"]]
        busy = [each["name"] for each in file["layers"] if each["time"]]
        assert len(named) == len(set(named)) and set(busy) <= set(named)
    with chromium() as browser:
        browser.open(tmp_path / "c.html")
        assert check_figures(browser, data) > 60 and browser.faults == [] == browser.pale_anywhere()
        evil = "</script><img src=x onerror=alert(1)>"
        (tmp_path / "evil.html").write_text(versus(compare(*files, (evil, "b"))))
        browser.open(tmp_path / "evil.html")
        assert browser.evaluate("document.images.length") == 0 and browser.faults == [] == browser.evaluate(STRAY)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, text, old = tmp_path / "good.json", tmp_path / "text.json", tmp_path / "old.json"
    good.write_text(json.dumps(report([layer("a", ["x"], 1)])))
    text.write_text("{")
    old.write_text(json.dumps({"schema": 1, "model": "m"}))
    assert "text.json:1: this is not JSON" in refused(capsys, "compare", good, text)
    assert "'target' is missing" in refused(capsys, "compare", old, good)
    for damaged in ("[1]", '"model target"', json.dumps(report([{"name": "a"}])), json.dumps(report([], memory=[]))):
        old.write_text(damaged)
        assert "give a build, or what dovetail report --json wrote" in refused(capsys, "compare", old, good)
    assert "is not a build" in refused(capsys, "compare", good, tmp_path / "nowhere")
    assert dovetail("compare", good, good) == 0
