"""Kills long commands at random moments and looks at what is left: whole files only, no finished work lost, and the
same end as without kills.

    python scripts/kills.py --kills 200
    python scripts/kills.py --pairs 100
    python scripts/kills.py --together 50

Each command runs once undisturbed. Then it is killed (SIGKILL to it and every process it started) at a random moment
of that time, until there were so many kills; after each one, what lies in its folder is compared with what the whole
run left, file by file, and every few kills it is let run to its end. A failure is a file that is neither absent nor
whole, a trial or a point that was finished and is gone, another end, or a status other than 0. The same seed gives the
same delays.

With --pairs, two compiles of one model for two targets write into one folder at once, so often: both must end well, and
the folder must be that of one of them, whole.

With --together, so many compiles of one model start at once with one empty cache instead, for a core whose loops are
scheduled: all must give equal bytes and leave nothing else behind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dovetail.cli.main import main as main_of_dovetail

EVERY = 5
"""Kills between two runs to the end."""


@dataclass(frozen=True)
class Command:
    """A long command."""

    name: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    """Files and folders it makes at once, in its folder."""
    finished: Callable[[Path, Path], frozenset[str]] = lambda folder, cache: frozenset()
    """What it must not lose, of its folder and its cache."""


def trials(folder: Path, cache: Path) -> frozenset[str]:
    """The whole lines of a tuning log."""
    log = folder / "net.jsonl"
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return frozenset(line.decode() for line in lines)


def kept(folder: Path, cache: Path) -> frozenset[str]:
    """The points of sweeps."""
    return frozenset(
        path.name for path in (cache / "sweep").glob("*.json") if path.with_name(path.name + ".sha256").exists()
    )


COMMANDS = (
    Command("compile", ("compile", "net.onnx", "--target", "ne16", "-o", "built", "--force"), ("built",)),
    Command(
        "quantize",
        ("quantize", "float.onnx", "--data", "data.npz", "--target", "ne16", "--samples", "64", "-o", "small.onnx"),
        ("small.onnx",),
    ),
    Command(
        "tune",
        *(("tune", "net.onnx", "--target", "ne16", "--measure", "model", "--trials", "6", "-o", "net.toml"),),
        ("net.toml",),
        trials,
    ),
    Command(
        "sweep",
        ("sweep", "net.onnx", "--target", "ne16", "--set", "l1.size=32K,64K", "--jobs", "1", "-o", "sweep.html"),
        ("sweep.html",),
        kept,
    ),
    Command("export", ("export", "made", "--to", "cmake", "-o", "exported", "--force"), ("exported",)),
    Command("report", ("report", "made", "-o", "page.html"), ("page.html",)),
    Command("mesh", ("mesh", "net.onnx", "--target", "spinnaker2", "--chips", "1", "-o", "mesh", "--force"), ("mesh",)),
)


def contents(path: Path) -> Mapping[str, bytes]:
    """Every file of a folder, or a file, by name."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


@dataclass
class Trial:
    """A command in its folder, with its cache."""

    command: Command
    folder: Path

    @property
    def cache(self) -> Path:
        """Its cache."""
        return self.folder / "cache"

    def run(self, delay: float | None) -> int | None:
        """Run it; its status, None where it was killed after `delay` seconds."""
        process = self.start()
        until = None if delay is None else time.monotonic() + delay
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if until is not None and time.monotonic() > until:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return None
            time.sleep(0.001)
        if ended[1]:
            print(self.said.read_text()[-600:])
        return ended[1]

    @property
    def said(self) -> Path:
        """The file of its messages."""
        return self.folder / f"{self.command.name}.said"

    def start(self) -> int:
        """Start it; the number of its process."""
        if not (process := os.fork()):
            self._command()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(process, process)  # as the command does: one of them comes first
        return process

    def _command(self) -> NoReturn:
        """Be the command, with the modules imported before."""
        os.setpgrp()
        os.chdir(self.folder)
        os.environ["DOVETAIL_CACHE"] = str(self.cache)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        status = 1
        try:
            main_of_dovetail(self.command.arguments)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        finally:
            sys.stderr.flush()
            os._exit(status)

    def outputs(self) -> Mapping[str, Mapping[str, bytes]]:
        """What is there of its outputs."""
        places = {name: self.folder / name for name in self.command.outputs}
        return {name: contents(place) for name, place in places.items() if place.exists()}


def main() -> int:
    """Kill, look, tell; the status is 1 where anything was wrong."""
    for name in ("compile", "run", "report", *(f"guests.{one}.command" for one in ("ptq", "tune", "sweep", "mesh"))):
        importlib.import_module(f"dovetail.{name}")  # once, and not after each kill
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="only this command; may be repeated")
    parser.add_argument("--warm", action="store_true", help="with what an undisturbed run leaves in the cache")
    parser.add_argument("--together", type=int, help="no kills: so many compiles at once")
    parser.add_argument("--pairs", type=int, help="no kills: so often, two different compiles into one folder at once")
    given = parser.parse_args()
    if given.together:
        return together(given.together)
    if given.pairs:
        return pairs(given.pairs, random.Random(given.seed))
    wrong = 0
    for command in COMMANDS:
        if not given.only or command.name in given.only:
            wrong += disturbed(command, given.kills, given.warm, random.Random(f"{given.seed} {command.name}"))
    return int(wrong > 0)


def disturbed(command: Command, kills: int, warm: bool, generator: random.Random) -> int:
    """Kill a command so often; how much was wrong."""
    with tempfile.TemporaryDirectory() as place:
        whole, trial = Trial(command, Path(place) / "whole"), Trial(command, Path(place) / "killed")
        for one in (whole, trial):
            models(one.folder)
        for _ in range(1 + warm):  # the second one finds what the first has left
            begin_again(whole)
            began = time.monotonic()
            if whole.run(None) != 0:
                print(f"{command.name}: it fails without being killed")
                return 1
        seconds, wanted = time.monotonic() - began, whole.outputs()
        if warm:
            if whole.cache.exists():
                shutil.copytree(whole.cache, trial.cache, dirs_exist_ok=True)
            begin_again(trial)
        done, ended, faults, before = 0, 0, [], trial.command.finished(trial.folder, trial.cache)
        while done < kills:
            status = trial.run(None if ended < done // EVERY else generator.uniform(0, seconds))
            ended, done = ended + (status is not None), done + (status is None)
            found, now = trial.outputs(), command.finished(trial.folder, trial.cache)
            faults += [f"status {status}"] if status else []
            faults += [f"{name} is not whole" for name in found if found[name] != wanted[name]]
            faults += ["an output is missing"] if status == 0 and found != wanted else []
            faults += [f"lost: {sorted(before - now)[:2]}"] if before - now else []
            before = now
            if status == 0:
                begin_again(trial)
                before = frozenset()
        print(
            f"{command.name}: {done} kills, {ended} runs to the end, {len(faults)} faults",
            *sorted(set(faults))[:3],
            flush=True,
        )
    return len(faults)


def pairs(count: int, generator: random.Random) -> int:
    """Compile twice at once so often; the status."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "pairs"
        models(folder)
        words = COMMANDS[0].arguments
        other = Command("other", tuple("riscv" if word == "ne16" else word for word in words), COMMANDS[0].outputs)
        both, wholes, seconds = [Trial(one, folder) for one in (COMMANDS[0], other)], [], 0.0
        for one in both:
            one.run(None)
            began = time.monotonic()
            one.run(None)
            seconds, wholes = time.monotonic() - began, [*wholes, contents(folder / "built")]
        known, ends = {path.name for path in folder.iterdir()}, [0, 0]
        failed = mixed = more = 0
        for number in range(count):
            shutil.rmtree(folder / "built")
            started = [both[number % 2].start()]
            time.sleep(generator.uniform(0, seconds / 2))
            started.append(both[1 - number % 2].start())
            wrong = [os.waitpid(process, 0)[1] for process in started]
            failed += any(wrong)
            if any(wrong):
                print(*(one.said.read_text()[-600:] for one in both))
            made = contents(folder / "built")
            ends = [n + (made == whole) for n, whole in zip(ends, wholes, strict=True)]
            mixed += made not in wholes
            more += {path.name for path in folder.iterdir()} != known
    print(f"{count} pairs: {failed} failed, {mixed} mixed ({ends} whole of each), {more} left something behind")
    return int(failed or mixed or more)


def together(count: int) -> int:
    """Compile so often at once; the status."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "models"
        models(folder)
        environment = {**os.environ, "DOVETAIL_CACHE": str(Path(place) / "cache")}
        command = [
            sys.executable,
            "-m",
            "dovetail",
            "compile",
            str(folder / "net.onnx"),
            "--target",
            "riscv_dot4",
            "-o",
        ]
        builds = [Path(place) / "builds" / str(number) for number in range(count)]
        builds[0].parent.mkdir()
        started = [subprocess.Popen([*command, build], env=environment, stdout=subprocess.DEVNULL) for build in builds]
        failed = sum(process.wait() != 0 for process in started)
        different = sum(contents(build) != contents(builds[0]) for build in builds)
        more = len([*builds[0].parent.iterdir()]) - count
    print(f"{count} compiles at once: {failed} failed, {different} with other bytes, {more} folders left behind")
    return int(failed or different or more)


def begin_again(trial: Trial) -> None:
    """Without outputs, logs and points, sometimes with: the cache of what was built stays."""
    for path in trial.folder.iterdir():
        if path.suffix not in (".onnx", ".npz") and path.name not in ("cache", "made", "built"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(trial.cache / "sweep", ignore_errors=True)
    (trial.folder / "small.onnx").unlink(missing_ok=True)


def models(folder: Path) -> None:
    """The models and data of all commands."""
    folder.mkdir()
    for arguments in (
        ("zoo", "digits", "-o", "net.onnx"),
        ("zoo", "digits", "--float", "-o", "float.onnx", "--calibration", "data.npz"),
        ("compile", "net.onnx", "--target", "ne16", "-o", "made"),
    ):
        command = [sys.executable, "-m", "dovetail", *arguments]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
