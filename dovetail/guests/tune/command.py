"""`dovetail tune`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dovetail.cli.console import INTERRUPTED, note, progress, say, show_table
from dovetail.cli.options import BoardOptions, Model, TargetName
from dovetail.errors import DovetailError
from dovetail.options import Options, flag

if TYPE_CHECKING:
    from dovetail.guests.tune.tuner import LayerResult, Progress, TuningResult


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True)
class TuneOptions:
    """Options of `dovetail tune`."""

    trials: int = flag(64, "Trials of each kind of layer, the default included.")
    output: Path | None = flag(
        None, "The tuning file; MODEL.TARGET.toml if not given.", "--output", "-o", kind=Path | None
    )
    log: Path | None = flag(
        None,
        "Log file of all trials; if it exists, the search continues from it. MODEL.TARGET.jsonl if not given.",
        kind=Path | None,
    )
    layers: tuple[str, ...] = flag(tuple, "Only these layers, by name, with commas.", kind=str | None, read=_names)
    measure: Literal["iss", "qemu", "host", "model"] | None = flag(
        None,
        "Cycles of the simulated chip, time on this computer (where the core is this computer), or what the cost model "
        "thinks.",
        kind=Literal["iss", "qemu", "host", "model"] | None,
    )
    jobs: int = flag(1, "Processes on this machine.")
    scheduler: str | None = flag(None, "Address of a Dask scheduler to use instead.")
    seed: int = flag(0, "Seed of the search.")


def tune(
    model: Model,
    target: TargetName,
    options: Annotated[Options, "policy", "rounding"],
    board: BoardOptions,
    search: TuneOptions,
) -> None:
    """Search for tiles, orders and places that take fewer cycles.

    Writes a file for dovetail compile --tuning.

    Example: dovetail tune net.tflite --target ne16 --trials 64 --jobs 2

    Example: dovetail tune net.tflite --target ne16 --on tcp:lab:4000 --board-io uart.c --load 'flash.sh {elf}'

    Example: dovetail tune net.tflite --target ne16 --on agent:lab/bench1,agent:lab/bench2 --board-io uart.c
    """
    names = [None] if board.on is None else board.on.split(",")
    boards = tuple(one for name in names if (one := replace(board, on=name).board()))
    stem = f"{model.stem}.{Path(target).stem}"
    file, log = search.output or Path(f"{stem}.toml"), search.log or Path(f"{stem}.jsonl")
    with progress("starting") as show:
        from dovetail.arrays import write_file
        from dovetail.guests.tune import tuner
        from dovetail.guests.tune.log import may_be_written
        from dovetail.schedule.tuning import tuning_text

        may_be_written(file)
        try:
            request = tuner.TuningRequest(
                model=model,
                target=target,
                log=log,
                trials=search.trials,
                options=options,
                measure=_measure(target, search.measure, bool(boards)),
                layers=search.layers,
                seed=search.seed,
                jobs=search.jobs,
                scheduler=search.scheduler,
                boards=boards,
            )
            tuned = tuner.tune(request, _shown(show), note)
        except KeyboardInterrupt:
            kept = "every trial that has ended is" if log.exists() else "nothing was begun: no trial is"
            note(f"stopped; {kept} in {log}. Run the same command to go on.")
            sys.exit(INTERRUPTED)
        write_file(file, tuning_text(tuned.tuning).encode())
    _print_tuning(tuned)
    if tuned.repeated:
        note(f"{tuned.repeated} of the trials were made earlier: they are from {log}")
    say(f"{file}: {_sentence(tuned)}")


def _print_tuning(tuned: TuningResult) -> None:
    unit = "ns" if tuned.tuning.measure == "host" else "cycles"
    headings = ("layers", "trials", "failed", f"default {unit}", f"best {unit}", "saved", "choice")
    rows = [_row(result, tuned.dropped) for result in tuned.layers]
    show_table(headings, rows, left=("layers", "choice"), fold=headings)


def _measure(target: str, measure: str | None, on_board: bool) -> str:
    """The measure of a trial; raises DovetailError where two are asked for."""
    from dovetail.run import BOARD, default_simulator
    from dovetail.target.registry import load_target

    if not on_board:
        return measure or default_simulator(load_target(target))
    if measure is not None:
        what = f"a choice is measured on a board or by '{measure}', not by both"
        raise DovetailError(what, where="--measure, --on", hint="leave out --measure or --on")
    return BOARD


def _shown(show: Callable[[str], None]) -> Callable[[Progress], None]:
    def told(now: Progress) -> None:
        trials = f"{now.done} of {now.trials}" if now.trials else f"{now.done}"
        known = {"best": now.best, "default": now.default}
        cycles = ", ".join(f"{what} {count:,}" for what, count in known.items() if count is not None)
        show(f"{now.layer} ({now.number} of {now.count} layers): {trials} trials; {cycles or 'no cycles yet'}")

    return told


def _row(result: LayerResult, dropped: tuple[str, ...]) -> tuple[str, ...]:
    best = result.best.outcome.cycles if result.best else None
    names = ", ".join(name + ("*" if name in dropped else "") for name in result.layer.names)
    failed = sum(trial.outcome.cycles is None for trial in result.trials)
    choice = result.best.choice if result.best else {}
    figures = ["failed" if cycles is None else f"{cycles:,}" for cycles in (result.default, best)]
    saved = "" if best is None or result.default is None else _percent(result.default, best)
    chosen = ", ".join(f"{name} {value}" for name, value in choice.items()) or "the default"
    return names, str(len(result.trials)), str(failed), *figures, saved, chosen


def _percent(before: int, after: int) -> str:
    return f"{100 * (before - after) / before:.1f} %" if before else "0.0 %"


def _sentence(tuned: TuningResult) -> str:
    tuning = tuned.tuning
    star = "; * does not help in the network and is left out" if tuned.dropped else ""
    bound = f"; no schedule is below {tuned.bound:,}" if tuned.bound else ""
    kind = {"host": "nanoseconds", "model": "cycles as the cost model thinks"}.get(tuning.measure, "cycles")
    return (
        f"{len(tuning.layers)} layers chosen for; the network takes {tuning.tuned_cycles:,} {kind} instead of "
        f"{tuning.default_cycles:,}, {_percent(tuning.default_cycles, tuning.tuned_cycles)} less{bound}{star}"
    )
