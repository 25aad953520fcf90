"""Tuning as a whole: the command, a kill and what follows, several workers, a cluster, the simulated chip."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import dovetail
from dovetail.errors import DovetailError
from dovetail.guests.tune.layers import region_alone
from dovetail.guests.tune.log import NETWORK
from dovetail.guests.tune.measure import TrialOutcome, make_task, measure, measured
from dovetail.guests.tune.search import candidates
from dovetail.guests.tune.tuner import Progress, TrialRunner, TrialTally, TuningRequest, settle, tune
from dovetail.schedule.tuning import TuningEntry, read_tuning, tuning_text
from dovetail.targets import load_target
from firmware import require_chip
from tuning_cases import digits_file, layer_graph, tunable

pytest.importorskip("lightgbm", reason="tuning needs lightgbm (dovetail[tune])")
REPOSITORY = Path(__file__).resolve().parents[1]
QUICK = ("--target", "ne16", "--trials", "40", "--measure", "model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits model."""
    return digits_file(tmp_path_factory.mktemp("model"))


def begin(model: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Tuning in a process of its own."""
    command = [sys.executable, "-m", "dovetail.cli.main", "tune", str(model), *QUICK]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", "")))}
    return subprocess.Popen(
        [*command, "-o", str(folder / "t.toml"), "--log", str(folder / "t.jsonl")],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored where we run
    )


def wait_for_lines(log: Path, count: int) -> None:
    """Until a log has so many lines."""
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "tuning does not get on"
        time.sleep(0.002)


def trials(log: Path) -> list[str]:
    """A log's lines, sorted."""
    return sorted(log.read_text().splitlines())


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the result and log of tuning without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    assert dovetail("tune", model, *QUICK, "-o", folder / "t.toml", "--log", folder / "t.jsonl") == 0
    return folder


def test_tuning_gives_a_file_that_compile_uses(
    whole: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = read_tuning(whole / "t.toml").value
    assert tuning.layers and tuning.tuned_cycles < tuning.default_cycles
    assert all(entry.tuned_cycles <= entry.default_cycles for entry in tuning.layers)
    header, *lines = [json.loads(line) for line in (whole / "t.jsonl").read_text().splitlines()]
    assert header["target"] == "ne16" and header["seed"] == 0 and header["measure"] == "model"
    assert header["model_sha256"] == tuning.model_sha256
    assert all(("cycles" in line) != ("error" in line) for line in lines)
    assert dovetail("compile", model, "--target", "ne16", "-o", tmp_path / "b", "--tuning", whole / "t.toml") == 0
    capsys.readouterr()
    options = ("--target", "ne16", "--requant", "exact", "-o", tmp_path / "c", "--tuning", whole / "t.toml")
    assert dovetail("compile", model, *options) == 1
    message = capsys.readouterr().err
    assert "t.toml" in message and "policy = engine" in message and not (tmp_path / "c").exists()


@pytest.mark.parametrize("lines", [3, 60])
def test_killed_and_resumed_gives_the_same(lines: int, whole: Path, model: Path, tmp_path: Path) -> None:
    process = begin(model, tmp_path)
    wait_for_lines(tmp_path / "t.jsonl", lines)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "t.toml").exists()
    killed = trials(tmp_path / "t.jsonl")
    assert lines <= len(killed) < len(trials(whole / "t.jsonl"))
    assert dovetail("tune", model, *QUICK, "-o", tmp_path / "t.toml", "--log", tmp_path / "t.jsonl") == 0
    assert (tmp_path / "t.toml").read_bytes() == (whole / "t.toml").read_bytes()
    assert trials(tmp_path / "t.jsonl") == trials(whole / "t.jsonl"), "nothing is lost, nothing is made twice"


def test_interrupted_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    process = begin(model, tmp_path)
    wait_for_lines(tmp_path / "t.jsonl", 5)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Run the same command to go on" in messages and b"t.jsonl" in messages and b"Traceback" not in messages
    assert all(json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines())


def test_two_processes_give_the_same(whole: Path, model: Path, tmp_path: Path) -> None:
    files = ("-o", tmp_path / "t.toml", "--log", tmp_path / "t.jsonl")
    assert dovetail("tune", model, *QUICK, *files, "--jobs", 2) == 0
    assert (tmp_path / "t.toml").read_bytes() == (whole / "t.toml").read_bytes()
    assert trials(tmp_path / "t.jsonl") == trials(whole / "t.jsonl")


def test_on_the_chip_with_a_cluster_and_without(model: Path, tmp_path: Path) -> None:
    """Two Dask workers on this machine, the cost model and one layer on the simulated chip: as one worker."""
    require_chip()
    distributed = pytest.importorskip("distributed", reason="--scheduler needs distributed (dovetail[tune])")
    chip = TuningRequest(model, "ne16", tmp_path / "one", trials=4, layers=("dense_13",))
    quick = TuningRequest(model, "ne16", tmp_path / "two", trials=18, layers=("conv_6", "depthwise_9"), measure="model")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        for request in (chip, quick):
            alone = tune(request)
            log = request.log.with_suffix(".cluster")
            together = tune(replace(request, scheduler=address, log=log))
            assert tuning_text(together.tuning) == tuning_text(alone.tuning)
            assert [layer.trials for layer in together.layers] == [layer.trials for layer in alone.layers]
            assert trials(log) == trials(request.log)
    (result,) = tune(chip).layers
    assert result.default is not None and all(trial.outcome.cycles for trial in result.trials)
    assert result.best is not None and result.best.outcome.cycles is not None
    print("dense_13:", [trial.outcome.cycles for trial in result.trials])


def test_the_cost_model_agrees_with_the_chip() -> None:
    """A layer cut in two ways: within 3 %, and its output exact (a trial that differs has no cycles)."""
    require_chip()
    target = load_target("ne16")
    layer = tunable(layer_graph((16, 18, 32), 48, 3), target)
    tasks = [make_task(layer.graph, layer.near, "ne16", None, kind) for kind in ("iss", "model")]
    name = region_alone(layer.graph, target).name
    cut = {"tile_rows": 6, "tile_columns": 9, "tile_channels": 32, "buffers": 3, "order": "positions"}
    for choice in ({}, cut):
        real, thought = (measure(task, {name: choice}) for task in tasks)
        print(choice, real, thought)
        assert real.cycles and thought.cycles and abs(thought.cycles - real.cycles) < 0.03 * real.cycles
    failed = measure(tasks[0], {name: {"tile_rows": 999}})
    assert failed.cycles is None and "tile_rows = 999 is out of range" in failed.error


def test_the_cost_model_ranks_as_the_chip() -> None:
    """Choices drawn at random: each within 5 %, and in the same order; tiles that lie as parts of wider images too."""
    require_chip()
    target = load_target("ne16")
    layer = tunable(layer_graph((13, 11, 32), 40), target)
    found, name = candidates(layer, target, 1), region_alone(layer.graph, target).name
    drawn = np.random.default_rng(1).choice(len(found.choices), 7, replace=False)
    real = [measured(layer.graph, target, None, {name: found.choices[index]}, layer.near) for index in drawn]
    thought = found.estimates[drawn]
    print([f"{own} {cycles}" for own, cycles in zip(thought, real, strict=True)])
    assert (abs(thought / np.array(real) - 1) < 0.05).all()
    ranks = [np.argsort(np.argsort(values)) for values in (thought, real)]
    assert np.corrcoef(*ranks)[0, 1] >= 0.95


def test_what_does_not_help_the_network_is_dropped(tmp_path: Path) -> None:
    from dovetail.guests.tune.log import open_log
    from dovetail.guests.tune.measure import Choices, MeasureTask

    effect = {"a": -10, "b": 25, "c": -5, "d": None}

    def run(task: MeasureTask, batch: list[Choices]):  # type: ignore[no-untyped-def]
        for number, choices in enumerate(batch):
            changes = [effect[name] for name, choice in choices.items() if "tile_rows" in choice]
            late = sum(3 for choice in choices.values() if choice.get("early") == "no")
            broken = None in changes
            yield (
                number,
                TrialOutcome(None, "no room") if broken else TrialOutcome(100 + sum(c or 0 for c in changes) + late),
            )

    gains = {name: TuningEntry(name, "s", 50, 50 - rank, {"tile_rows": 3}) for rank, name in enumerate(effect, 1)}
    tally = TrialTally(Progress("the network", 1, 1), lambda progress: None)
    task = MeasureTask(b"", "", None, "iss")
    with open_log(tmp_path / "log", {"dovetail_tuning_log": 1}, print) as log:
        kept = settle(TrialRunner(log, run), task, list(effect), gains, tally)
        assert kept.choices == {"a": {"tile_rows": 3}, "c": {"tile_rows": 3}}
        assert (kept.default, kept.tuned) == (100, 85)
        assert log.find(NETWORK, {"d": {"tile_rows": 3}}) == TrialOutcome(None, "no room")


def test_wrong_arguments_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("-o", tmp_path / "t.toml", "--log", tmp_path / "t.jsonl")
    (tmp_path / "mine.toml").write_text("years = 4\n")
    for extra, words in (
        (("--layers", "conv_99"), "no layer 'conv_99'"),
        (("--layers", "offset_0"), "nothing can be chosen for the layer 'offset_0'"),
        (("--trials", 0), "0 trials are too few"),
        (("--jobs", 0), "0 jobs are too few"),
        (("--seed", -1), "0 or more, not -1"),
        (("--requant", "fast"), "'fast'"),
        (("--target", "riscv_dot4"), "nothing to choose"),
        (("-o", tmp_path / "mine.toml"), "not a tuning file"),
    ):
        capsys.readouterr()
        assert dovetail("tune", model, "--target", "ne16", *files, *extra) == 1, extra
        assert words in capsys.readouterr().err
    assert (tmp_path / "mine.toml").read_text() == "years = 4\n"
    assert dovetail("tune", "--help") == 0
    assert "Example: dovetail tune" in capsys.readouterr().out


def test_a_missing_package_names_the_extra(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.guests.tune.search.find_spec", lambda name: None)
    with pytest.raises(DovetailError) as caught:
        tune(TuningRequest(model, "ne16", tmp_path / "log"))
    assert "lightgbm" in caught.value.where and "dovetail[tune]" in caught.value.hint
