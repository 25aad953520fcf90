"""The trial log and the tuning file: what they hold comes back, and everything that is wrong is said, nothing lost."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dovetail.compile import Options, compile_model, prepare
from dovetail.guests.tune.log import NETWORK, LogError, may_be_written, open_log
from dovetail.guests.tune.measure import TrialOutcome
from dovetail.schedule.partition import partition
from dovetail.schedule.tuning import (
    Identity,
    Tuning,
    TuningEntry,
    TuningError,
    choices_for,
    identity,
    read_tuning,
    signature,
    tuning_text,
)
from dovetail.targets import load_target
from tuning_cases import digits_file

HEADER = {"dovetail_tuning_log": 1, "model_sha256": "ab", "target": "ne16", "seed": 0}


def write_log(path: Path) -> None:
    """A log of three trials and one of the network."""
    with open_log(path, HEADER, print) as log:
        log.add("a-ff", {}, TrialOutcome(100))
        log.add("a-ff", {"tile_rows": 3, "order": "channels"}, TrialOutcome(90))
        log.add("a-ff", {"tile_rows": 2}, TrialOutcome(None, "it broke"))
        log.add(NETWORK, {"conv_0": {"tile_rows": 3}}, TrialOutcome(1000))


def test_a_log_gives_back_its_trials(tmp_path: Path) -> None:
    path, notes = tmp_path / "log", list[str]()
    write_log(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == HEADER and len(lines) == 5
    with open_log(path, HEADER, notes.append) as log:
        assert log.find("a-ff", {"order": "channels", "tile_rows": 3}) == TrialOutcome(90)
        assert log.find("a-ff", {"tile_rows": 2}) == TrialOutcome(None, "it broke")
        assert log.find(NETWORK, {"conv_0": {"tile_rows": 3}}) == TrialOutcome(1000)
        assert log.find("b-ff", {}) is None and log.find("a-ff", {"tile_rows": 4}) is None
        log.add("b-ff", {}, TrialOutcome(5))
        assert len(log.used) == 3, "what was added now is not counted as old"
    assert not notes and path.read_text().splitlines()[:5] == [json.dumps(line, sort_keys=True) for line in lines]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_cut_last_line_is_dropped_with_a_note(cut: int, tmp_path: Path) -> None:
    path, notes = tmp_path / "log", list[str]()
    write_log(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with open_log(path, HEADER, notes.append) as log:
        assert len(log.finished) == 3
        log.add(NETWORK, {"conv_0": {"tile_rows": 3}}, TrialOutcome(1000))
    assert len(notes) == 1 and "last line" in notes[0]
    assert path.read_bytes() == whole


def test_a_cut_header_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(HEADER, sort_keys=True)[:20])
    write_log(path)
    with open_log(path, HEADER, print) as log:
        assert len(log.finished) == 4


DAMAGE = {
    "not JSON": (b'{"layer": "a-ff", "cho\n', "log:3"),
    "zeros": (b"\0" * 40 + b"\n", "log:3"),
    "not a trial": (b"[1, 2]\n", "log:3"),
    "no outcome": (b'{"layer": "a", "choice": {}}\n', "log:3"),
    "a wrong outcome": (b'{"layer": "a", "choice": {}, "cycles": "many"}\n', "log:3"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_elsewhere_is_an_error_and_the_log_is_kept(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = DAMAGE[kind][0]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LogError) as caught, open_log(path, HEADER, print):
        pass
    assert DAMAGE[kind][1] in caught.value.where and "delete that line" in caught.value.hint
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize(("name", "value"), [("model_sha256", "cd"), ("target", "vta"), ("seed", 1)])
def test_a_log_of_something_else_is_kept(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path)
    before = path.read_bytes()
    with pytest.raises(LogError, match=f"{name} = .*now it is {value}"), open_log(path, {**HEADER, name: value}, print):
        pass
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"years of work", b"years of work\n", b'{"a": 1}\n', b"\n"])
def test_a_file_that_is_no_log_is_kept(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.write_bytes(content)
    with pytest.raises(LogError, match=r"not a trial"), open_log(path, HEADER, print):
        pass
    assert path.read_bytes() == content


def test_a_log_is_used_by_one_process(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path)
    with open_log(path, HEADER, print), pytest.raises(LogError, match="another process"), open_log(path, HEADER, print):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits model."""
    return digits_file(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def good(model: Path) -> Tuning:
    """A valid tuning of the digits model."""
    target = load_target("ne16")
    graph = prepare(model, target, Options())
    regions = {region.name: region for region in partition(graph, target)}
    of = identity(graph.name, model.read_bytes(), "ne16", "engine", "single")
    choices = {"conv_6": {"tile_rows": 2, "order": "channels"}, "dense_13": {"placement": "core"}}
    entries = (TuningEntry(name, signature(regions[name].graph), 10, 9, choice) for name, choice in choices.items())
    cycles = {"default_cycles": 100, "tuned_cycles": 99}
    return Tuning(**msgspec.structs.asdict(of), measure="iss", **cycles, layers=tuple(entries))


def test_a_tuning_file_is_toml_and_comes_back(good: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    odd = replace(good, model='a "b"\\\n\x7f é')
    for tuning in (good, odd):
        path.write_text(tuning_text(tuning))
        assert read_tuning(path).value == tuning
        assert tomllib.loads(path.read_text())["model"] == tuning.model
    may_be_written(path)
    print(tuning_text(good))


def test_compile_uses_a_tuning_file(good: Tuning, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(tuning_text(good))
    target = load_target("ne16")
    plain = compile_model(model, target, Options())
    tuned = compile_model(model, target, Options(tuning=path))
    assert plain.plan.tilings["conv_6"].shape[1] != 2 == tuned.plan.tilings["conv_6"].shape[1]
    assert "dense_13" in plain.plan.tilings and "dense_13" not in tuned.plan.tilings
    places = {region.name: region for region in tuned.regions}
    assert places["dense_13"].place == "core" and "tuning" in places["dense_13"].reason


def _bad_files(good: Tuning) -> dict[str, tuple[str, str]]:
    """Texts that are refused, and a word of the message."""
    text = tuning_text(good)

    def entry(**changes: Any) -> str:
        return tuning_text(replace(good, layers=(replace(good.layers[0], **changes),)))

    def other(**changes: Any) -> str:
        return tuning_text(replace(good, **changes))

    return {
        "cut": (text[: len(text) - 8], "not TOML"),
        "empty": ("", "'schema' is missing"),
        "schema": (text.replace("schema = 1", "schema = 2"), "schema: is 2, expected 1"),
        "version": (other(dovetail="0.0.1"), "dovetail = 0.0.1"),
        "model": (other(model_sha256="00"), "model_sha256 = 00"),
        "target": (other(target="vta"), "target = vta, this is ne16"),
        "policy": (other(policy="exact"), "policy = exact"),
        "layer": (entry(name="conv_99"), "no layer 'conv_99'"),
        "signature": (entry(signature="00"), "signature differs"),
        "knob": (entry(choice={"tile_depth": 4}), "no knob 'tile_depth'"),
        "value": (entry(choice={"tile_rows": 999}), "tile_rows = 999 is out of range"),
        "kind": (
            text.replace("tile_rows = 2", "tile_rows = 2.5"),
            "choice.tile_rows: must be a whole number or a text",
        ),
        "twice": (tuning_text(replace(good, layers=(good.layers[0], good.layers[0]))), "named twice"),
        "field": (text.replace('name = "conv_6"', 'nome = "conv_6"'), "nome: there is no such entry, perhaps 'name'"),
        "type": (text.replace("default_cycles = 10\n", 'default_cycles = "10"\n'), "must be a whole number"),
        "table": (text.split("\n[[layer]]")[0] + "layer = 3\n", "layer: must be a list"),
        "large": (text + "# " + "x" * (1 << 20), "larger than 1,048,576 bytes"),
    }


def test_bad_tuning_files_are_refused(good: Tuning, model: Path, tmp_path: Path) -> None:
    target = load_target("ne16")
    regions = partition(prepare(model, target, Options()), target)
    path = tmp_path / "t.toml"
    of = Identity(**{name: getattr(good, name) for name in Identity.__struct_fields__})
    path.write_text(tuning_text(good))
    assert set(choices_for(path, of, regions, target)) == {"conv_6", "dense_13"}
    for kind, (text, words) in _bad_files(good).items():
        path.write_text(text)
        with pytest.raises(TuningError) as caught:
            choices_for(path, of, regions, target)
        message = str(caught.value)
        assert words in message and "t.toml" in message, (kind, message)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TuningError, match="not text in UTF-8"):
        read_tuning(path)
    with pytest.raises(TuningError, match="cannot be read"):
        read_tuning(tmp_path / "absent.toml")
    with pytest.raises(TuningError, match="not a tuning file"):
        may_be_written(path)
    with pytest.raises(TuningError, match="folder"):
        may_be_written(tmp_path)
