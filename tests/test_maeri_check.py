"""`dovetail schedule --check`: a user's own order, read from a file, against hardware, rules, sums and outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import main
from dovetail.guests import zoo

Change = Callable[[list[dict[str, Any]]], None]


def run(arguments: list[str]) -> int:
    """The exit status of a command line."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network and an order of it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "digits.onnx").write_bytes(zoo.build("digits"))
    more = ["--seconds", "0", "--no-simulate", "-o", str(folder / "order")]
    assert run(["schedule", str(folder / "digits.onnx"), "-t", "maeri", *more]) == 0
    return folder


def checked(folder: Path, change: Change, *more: str) -> int:
    """The exit status of checking the order with some change."""
    data = json.loads((folder / "order" / "schedule.json").read_text())
    change(data["items"])
    (folder / "mine.json").write_text(json.dumps(data))
    command = ["schedule", str(folder / "digits.onnx"), "-t", "maeri", "--check", str(folder / "mine.json"), *more]
    return run(command)


def test_an_order_of_ones_own(order: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(order, lambda items: None) == 0
    said = capsys.readouterr().out
    assert "mine.json is kept" in said and "equal to the network's in every bit" in said

    def later(items: list[dict[str, Any]]) -> None:
        for item in items:
            item["start"] += 100

    assert checked(order, later) == 0  # slower, and right


def edited(number: int, **fields: object) -> Change:
    """A change of one item's fields."""
    return lambda items: items[number].update(fields)


FAULTS: dict[str, tuple[Change, str]] = {
    "an item left out": (lambda items: items.pop(0).clear(), "are added 0 times"),
    "a layer left out": (lambda items: items.__setitem__(slice(None), items[:1]), "no item computes"),
    "an item twice": (lambda items: items.append({**items[0], "start": 90_000}), "are added 2 times"),
    "too early": (edited(-1, start=0), "in use until|inputs exist from"),
    "another layer": (edited(0, layer="nothing"), "there is no layer 'nothing'"),
    "outside": (edited(0, multipliers=[60, 70]), "are not on the multipliers"),
    "no such positions": (edited(0, segments=[[0, 0, 100_000]]), "are not of"),
    "no number": (edited(0, start="soon"), "start"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_it(order: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = FAULTS[fault]
    assert checked(order, change) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert any(each in said for each in message.split("|")), said
    assert "what to do" in said and "report this" not in said


def test_rules_are_checked_too(order: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = order / "rules.yaml"
    rules.write_text("at_most: 1\n")
    assert checked(order, lambda items: None, "--rules", str(rules)) == 1
    assert "at_most" in capsys.readouterr().err
