"""Fuzzes the compiler: random models, targets, policies and options, each compiled, linked, run and compared.

    python scripts/fuzz.py build/fuzz --seconds 3600 [--jobs 2] [--seed 0] [--only 17]

Trial N of a seed is always the same. The first are the models of tests/edge_models.py; each must compile. Most others
draw a model of a family of the tests, a target, a policy and options. The firmware runs on the simulated chip, its
outputs are compared with the integer graph, and with the runtime of the model's format unless the compiler has told
that values are approximate. The others spoil the model's file and compile it. A trial fails by a traceback, a message
that asks to report it, a program that the verifier refuses, C that does not compile or link, an output that differs, a
process that dies, more seconds of computing than `SECONDS`, or more memory than `MEMORY`.

`log.jsonl` in the folder has a line for each trial; the same command goes on where it was stopped. Failures of one kind
are one: its first trial is made smaller (without options, on a plain core, with smaller models of the family) and kept
in a folder with the model, its inputs and what to type. Ends with 1 where one was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import selectors
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "scripts")]

from mutated_models import spoilt  # noqa: E402

import edge_models  # noqa: E402
import random_qdq  # noqa: E402
import test_properties_onnx  # noqa: E402
import test_properties_tflite  # noqa: E402
import test_random_tflite_more  # noqa: E402
from dovetail.codegen.emit.project import write_project  # noqa: E402
from dovetail.compile import Compiled, Options, compile_model, sample_inputs  # noqa: E402
from dovetail.errors import BuildError, DovetailError, ProgramError  # noqa: E402
from dovetail.notes import Kind  # noqa: E402
from dovetail.prove import difference, read_graph  # noqa: E402
from dovetail.run import open_build, run_build  # noqa: E402
from dovetail.targets import BUILT_IN, load_target  # noqa: E402
from property_batches import Case  # noqa: E402
from property_batches import difference as from_oracle  # noqa: E402

SECONDS = {"spoil": 20.0, "run": 120.0}
"""Most seconds of computing, by kind of trial."""
MEMORY = 1 << 30
"""Most bytes a trial takes beside what is loaded before it."""
SMALLER = 12
"""How many other models of the family are tried in place of one that fails."""
UNDER_LOAD = r"its worker process died|not a readable ELF file"
"""What a system without memory or room gives: such a trial is made once more before it counts."""
GOOD = ("ran", "compiled", "refused", "not drawn", "no device")

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "tflite": tuple(name for name, one in test_properties_tflite.FAMILIES.items() if one.oracle == "micro"),
    "chain": ("chain",) * 40,
    "onnx": tuple(test_properties_onnx.FAMILIES),
    "more": tuple(test_random_tflite_more.FAMILIES),
    "qdq": tuple(random_qdq.STEPS),
}
"""Families of models by the generator that draws them."""


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    number: int
    kind: str
    """run or spoil."""
    maker: str
    """Generator."""
    family: str
    seed: int
    target: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Ended:
    """What became of it."""

    outcome: str
    """One of `GOOD`, or the kind of the failure."""
    what: str = ""
    """The refusal, or what went wrong."""
    seconds: float = 0.0
    """Of computing."""
    megabytes: int = 0
    """More than before it."""
    size: int = 0
    """Bytes of the model's file."""
    again: str = ""
    """How it ended at first, where it was made once more."""

    @property
    def sign(self) -> str:
        """What failures of one kind have in common: the last line, numbers and names apart."""
        last = self.what.strip().splitlines()[-1] if self.outcome == "traceback" else self.what.partition("\n")[0]
        plain = re.sub("[0-9]+", "0", re.sub("'[^']*'|/[^ ]*", "", last))
        return f"{self.outcome}: {plain[:160]}"


def trial(number: int, seed: int) -> Trial:
    """The trial of a number: those of the edges first, in every seed."""
    if number < len(edge_models.TRIED):
        return Trial(number, "run", "edges", *edge_models.TRIED[number])
    source = random.Random(f"{seed} {number}")
    maker = source.choice(list(FAMILIES))
    family, target = source.choice(FAMILIES[maker]), load_target(source.choice(list(BUILT_IN)))
    memories = sorted({target.values, *(engine.memory for engine in target.engines)})  # little room makes tiles
    drawn: dict[str, tuple[float, Callable[[], Any]]] = {
        "policy": (0.7, lambda: source.choice(target.policies).name),
        "optimize": (0.4, lambda: "size"),
        "weights": (0.3, lambda: source.choice(("text", "binary"))),
        "keep_dead": (0.2, lambda: True),
        "allow_float": (0.3, lambda: True),
        "integer_inputs": (0.2, lambda: True),
        "integer_outputs": (0.2, lambda: True),
        "rounding": (0.2, lambda: source.choice(("single", "double"))),
        "name": (0.2, lambda: source.choice(("stdint", "int", "3kws", "dma", "main", "dovetail_rt", "x"))),
        "arena": (0.1, lambda: "shared"),
        "cores": (0.15, lambda: source.choice((2, 3))),
        "pipeline": (0.04, lambda: True),
        "memory_budget": (0.08, lambda: source.choice((256, 512, 1024, 4096))),
        "pins": (0.15, lambda: {"*": source.choice(("core", *(engine.name for engine in target.engines)))}),
        "settings": (0.25, lambda: {f"{source.choice(memories)}.size": source.choice(("512", "2K", "8K", "32K"))}),
    }
    options = {name: make() for name, (chance, make) in drawn.items() if source.random() < chance}
    if target.engines:  # what is for plain cores alone
        options = {name: value for name, value in options.items() if name not in ("memory_budget", "cores", "pipeline")}
    kind = "spoil" if source.random() < 0.25 else "run"
    return Trial(number, kind, maker, family, source.randrange(1 << 20), target.name, options)


def case_of(one: Trial) -> Case | None:
    """The model; None where the runtime does not run what was drawn."""
    if one.maker in ("tflite", "chain"):
        return test_properties_tflite.make(one.family, one.seed)
    if one.maker == "onnx":
        return test_properties_onnx.FAMILIES[one.family][0](f"{one.family} {one.seed}")
    if one.maker == "more":
        return test_random_tflite_more.made(one.family, one.seed)
    if one.maker == "edges":
        return edge_models.made(one.family, one.seed)
    try:
        return random_qdq.drawn(f"{one.family} {one.seed}").case
    except random_qdq.NotRun:
        return None


def options_of(one: Trial, case: Case) -> Options:
    """The options of a trial: those drawn, and what its model needs."""
    return replace(case.options, **one.options)


def tried(one: Trial, folder: Path) -> Ended:
    """Try it in this process; the model is left in the folder."""
    if (case := case_of(one)) is None:
        return Ended("not drawn")
    path, data = folder / f"net{case.suffix}", case.file
    if one.kind == "spoil":
        data = spoilt(data, case.suffix, random.Random(one.seed))
    path.write_bytes(data)
    options = options_of(one, case)
    exact = options.rounding == case.options.rounding
    started = time.process_time()
    outcome, what = _outcome(one, case, path, options, exact)
    seconds = time.process_time() - started
    if seconds > SECONDS[one.kind]:
        outcome, what = "slow", f"more than {SECONDS[one.kind]:g} s of computing"
    return Ended(outcome, what, round(seconds, 2), size=len(data))


def _outcome(one: Trial, case: Case, path: Path, options: Options, exact: bool) -> tuple[str, str]:
    target, place = load_target(one.target), path.parent / "build"
    try:
        made = compile_model(path, target, options)
        write_project(made.project, place)
    except DovetailError as error:
        asks = "report" in error.hint or "report this" in str(error) or isinstance(error, BuildError | ProgramError)
        return ("asks to report" if asks else "not taken" if one.maker == "edges" else "refused"), str(error)
    except Exception:
        return "traceback", traceback.format_exc(limit=-4)
    if one.kind == "spoil":
        return "compiled", ""
    try:
        wrong = _wrong(made, case, place, exact)
    except DovetailError as error:
        if "clBuildProgram failed" in error.what or "OpenCL" in error.what:
            return "no device", error.what
        return "does not run", str(error)
    except Exception:
        return "traceback", traceback.format_exc(limit=-4)
    return ("differs", wrong) if wrong else ("ran", "")


def _wrong(made: Compiled, case: Case, place: Path, exact: bool) -> str:
    """Run the build with the case's inputs; what is wrong with the outputs, empty where nothing is. They are compared
    with the runtime's where the compiler has told of nothing approximate and both are of one type."""
    build = open_build(place, made.unit.target)
    ports, graph = build.manifest.inputs, read_graph(build)
    feeds = [{port.name: array for port, array in zip(ports, feed, strict=True)} for feed in case.feeds]
    other = any(feed[port.name].dtype.name != port.dtype for feed in feeds for port in ports)  # integer ends
    if other or not feeds:
        feeds = [sample_inputs(graph, seed) for seed in range(2)]
    found = run_build(build, None, feeds).outputs
    if (wrong := difference(graph, feeds, found)) is not None:
        return str(wrong)
    if other or not case.wanted or not exact or any(note.kind is Kind.APPROXIMATE for note in made.notes):
        return ""
    pairs = zip(build.manifest.outputs, case.wanted[0], strict=True)
    if any(array.dtype.kind == "f" and array.dtype.name != port.dtype for port, array in pairs):
        return ""
    arrays = [[outputs[port.name] for port in build.manifest.outputs] for outputs in found]
    return from_oracle(case, arrays) or ""


@dataclass
class Child:
    """A trial in a process of its own."""

    trial: Trial
    process: int
    pipe: int
    folder: TemporaryDirectory[str]
    until: float
    """When it is ended, by the clock."""


def begin(one: Trial) -> Child:
    """Start a trial."""
    folder, (read, write) = TemporaryDirectory(ignore_cleanup_errors=True), os.pipe()
    if not (process := os.fork()):
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            ended = tried(one, Path(folder.name))
        except BaseException:
            ended = Ended("generator", traceback.format_exc(limit=-4))
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if more > MEMORY:
            ended = replace(ended, outcome="large", what="too much memory")
        os.write(write, json.dumps(asdict(replace(ended, megabytes=more >> 20))).encode()[:60000])
        os._exit(0)
    os.close(write)
    return Child(one, process, read, folder, time.monotonic() + 5 * SECONDS[one.kind])


def end(child: Child) -> Ended:
    """What a child says that has ended, or is out of time."""
    late = time.monotonic() > child.until
    text = b"" if late else os.read(child.pipe, 1 << 16)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process, signal.SIGKILL)
    _, status = os.waitpid(child.process, 0)
    os.close(child.pipe)
    if text:
        return Ended(**json.loads(text))
    return Ended("hangs", "does not end") if late else Ended("dies", f"status {status}")


def alone(one: Trial) -> tuple[Ended, bytes]:
    """Try one, and wait; with the model's file."""
    child = begin(one)
    with selectors.DefaultSelector() as waiting:
        waiting.register(child.pipe, selectors.EVENT_READ)
        waiting.select(max(child.until - time.monotonic(), 0))
    ended = end(child)
    files = [path.read_bytes() for path in Path(child.folder.name).glob("net.*")]
    child.folder.cleanup()
    return ended, files[0] if files else b""


def several(trials: Iterator[Trial], jobs: int) -> Iterator[tuple[Trial, Ended]]:
    """Every trial with what became of it, so many at a time."""
    running: list[Child] = []
    with selectors.DefaultSelector() as waiting:
        while True:
            while len(running) < jobs and (one := next(trials, None)) is not None:
                running.append(begin(one))
                waiting.register(running[-1].pipe, selectors.EVENT_READ)
            if not running:
                return
            ready = {key.fd for key, _ in waiting.select(1.0)}
            for child in [one for one in running if one.pipe in ready or time.monotonic() > one.until]:
                running.remove(child)
                waiting.unregister(child.pipe)
                ended = end(child)
                child.folder.cleanup()
                yield child.trial, ended


def smaller(one: Trial, sign: str) -> Trial:
    """The smallest trial found that fails in the same way."""

    def same(other: Trial) -> bool:
        return alone(other)[0].sign == sign

    for name in list(one.options):
        without = replace(one, options={key: value for key, value in one.options.items() if key != name})
        one = without if same(without) else one
    plain = replace(one, target="riscv")
    one = plain if one.target != "riscv" and same(plain) else one
    best = alone(one)[0].size
    for seed in range(SMALLER):
        other = replace(one, seed=seed)
        ended, _ = alone(other)
        if ended.sign == sign and ended.size < best:
            one, best = other, ended.size
    return one


def keep(folder: Path, one: Trial, ended: Ended) -> Path:
    """Write down a failure, made smaller."""
    least = smaller(one, ended.sign)
    last, data = alone(least)
    case = case_of(least)
    name = re.sub("[^a-z0-9]+", "_", ended.sign.lower())[:50].strip("_")
    place = folder / f"{one.number}_{name}"
    place.mkdir(parents=True, exist_ok=True)
    suffix = case.suffix if case else ""
    (place / f"net{suffix}").write_bytes(data)
    if case is not None and case.feeds:
        np.savez(place / "inputs.npz", *case.feeds[0])
    said = {"trial": asdict(least), "first": asdict(one), "sign": ended.sign, "ended": asdict(last)}
    (place / "trial.json").write_text(json.dumps(said, indent=2, default=str) + "\n")
    return place


def summary(counts: Mapping[str, int], signs: Mapping[str, int]) -> str:
    """What became of the trials, in words."""
    total = f"{sum(counts.values()):,} trials: " + ", ".join(f"{n:,} {name}" for name, n in sorted(counts.items()))
    return "\n".join([total, *(f"  {n:,} x {sign}" for sign, n in sorted(signs.items(), key=lambda one: -one[1]))])


def fuzz(folder: Path, seconds: float, jobs: int, seed: int, count: int = 1 << 40) -> Mapping[str, int]:
    """Go on with the trials of a folder for so long, or until so many were made; kinds of failures and how often."""
    folder.mkdir(parents=True, exist_ok=True)
    log, until = folder / "log.jsonl", time.monotonic() + seconds
    lines = [json.loads(text) for text in log.read_text().splitlines() if text.endswith("}")] if log.is_file() else []
    done = {line["number"] for line in lines}
    counts, signs = Counter(line["outcome"] for line in lines), Counter(line["sign"] for line in lines if line["sign"])
    waiting = (trial(n, seed) for n in range(min(count, 1 << 40)) if n not in done)
    within = iter(lambda: next(waiting, None) if time.monotonic() < until else None, None)
    with log.open("a") as file:
        for one, ended in several(within, jobs):
            if re.search(UNDER_LOAD, ended.what):
                ended = replace(alone(one)[0], again=ended.sign)
                counts["made once more"] += 1
            sign = "" if ended.outcome in GOOD else ended.sign
            file.write(json.dumps({**asdict(one), **asdict(ended), "sign": sign}, default=str) + "\n")
            file.flush()
            counts[ended.outcome] += 1
            if sign:
                signs[sign] += 1
                if signs[sign] == 1:
                    print(f"{one.number}: {sign} ({one.maker} {one.family} on {one.target})", flush=True)
                    print(f"  kept in {keep(folder, one, ended)}", flush=True)
    print(summary(counts, signs), flush=True)
    return signs


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the log and of what is found")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--count", type=int, default=1 << 40, help="at most so many trials")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="try the trial of this number, and print what becomes of it")
    given = parser.parse_args(words)
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if given.only is not None:
        one = trial(given.only, given.seed)
        print(one, alone(one)[0], sep="\n")
        return
    sys.exit(bool(fuzz(given.folder, given.seconds, given.jobs, given.seed, given.count)))


if __name__ == "__main__":
    main()
