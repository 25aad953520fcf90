"""What `dovetail tune` does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.console import INTERRUPTED, note, output, progress, say
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from dovetail.board import Board
    from dovetail.tune.tuner import LayerResult, Progress, Request, Tuned



@dataclass(frozen=True, slots=True)
class Order:
    """The arguments of the command; see `dovetail tune --help`."""

    model: Path
    target: str
    policy: str | None
    rounding: str
    trials: int
    measure: str | None
    layers: tuple[str, ...]
    seed: int
    jobs: int
    scheduler: str | None
    output: Path | None
    log: Path | None
    board: Board | None = None

    @property
    def stem(self) -> str:
        """What the names of files that are not given begin with."""
        return f"{self.model.stem}.{Path(self.target).stem}"


def tune_to(order: Order) -> None:
    """Tune a model, print a table, write the tuning file; raises DovetailError.

    Ctrl-C ends the process with status `INTERRUPTED`; the log has every trial that has ended.
    """
    file = order.output or Path(f"{order.stem}.toml")
    log = order.log or Path(f"{order.stem}.jsonl")
    with progress("starting") as show:
        from dovetail.cli.arrays import write_file
        from dovetail.tune.file import may_be_written, to_toml
        from dovetail.tune.tuner import tune

        may_be_written(file)
        try:
            tuned = tune(_request(order, log), _shown(show), note)
        except KeyboardInterrupt:
            kept = "every trial that has ended is" if log.exists() else "nothing was begun: no trial is"
            note(f"stopped; {kept} in {log}. Run the same command to go on.")
            sys.exit(INTERRUPTED)
        write_file(file, to_toml(tuned.tuning).encode())
    _print(tuned)
    if tuned.repeated:
        note(f"{tuned.repeated} of the trials were made earlier: they are from {log}")
    say(f"{file}: {_sentence(tuned)}")


def _request(order: Order, log: Path) -> Request:
    from dovetail.compile import Options
    from dovetail.operators.arithmetic import Rounding
    from dovetail.tune.tuner import Request

    return Request(
        model=order.model,
        target=order.target,
        log=log,
        trials=order.trials,
        options=Options(order.policy, Rounding(order.rounding)),
        measure=_measure(order),
        layers=order.layers,
        seed=order.seed,
        jobs=order.jobs,
        scheduler=order.scheduler,
        board=order.board,
    )


def _measure(order: Order) -> str:
    """What is gone by; raises DovetailError where two things are asked for."""
    from dovetail.run import BOARD, default_simulator
    from dovetail.targets import load_target

    if order.board is None:
        return order.measure or default_simulator(load_target(order.target))
    if order.measure is not None:
        raise DovetailError(f"a choice is measured on a board or by '{order.measure}', not by both",
                            where="--measure, --on", hint="leave out --measure or --on")
    return BOARD


def _shown(show: Callable[[str], None]) -> Callable[[Progress], None]:
    def told(now: Progress) -> None:
        """Show one step of the search in a line."""
        trials = f"{now.done} of {now.trials}" if now.trials else f"{now.done}"
        cycles = ", ".join(
            f"{what} {count:,}" for what, count in (("best", now.best), ("default", now.default)) if count is not None
        )
        show(f"{now.layer} ({now.number} of {now.count} layers): {trials} trials; {cycles or 'no cycles yet'}")

    return told


def _print(tuned: Tuned) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    unit = "ns" if tuned.tuning.measure == "host" else "cycles"
    for heading in ("layers", "trials", "failed", f"default {unit}", f"best {unit}", "saved", "choice"):
        table.add_column(heading, overflow="fold", justify="left" if heading in ("layers", "choice") else "right")
    for result in tuned.layers:
        table.add_row(*(Text(text) for text in _row(result, tuned.dropped)))
    output().print(table, highlight=False)


def _row(result: LayerResult, dropped: tuple[str, ...]) -> tuple[str, ...]:
    best = result.best.outcome.cycles if result.best else None
    names = ", ".join(name + ("*" if name in dropped else "") for name in result.layer.names)
    failed = sum(trial.outcome.cycles is None for trial in result.trials)
    choice = result.best.choice if result.best else {}
    return (
        names,
        str(len(result.trials)),
        str(failed),
        "failed" if result.default is None else f"{result.default:,}",
        "failed" if best is None else f"{best:,}",
        "" if best is None or result.default is None else _percent(result.default, best),
        ", ".join(f"{name} {value}" for name, value in choice.items()) or "the default",
    )


def _percent(before: int, after: int) -> str:
    return f"{100 * (before - after) / before:.1f} %" if before else "0.0 %"


def _sentence(tuned: Tuned) -> str:
    tuning = tuned.tuning
    star = "; * does not help in the network and is left out" if tuned.dropped else ""
    kinds = {"host": "nanoseconds", "model": "cycles as the cost model thinks"}
    kind = kinds.get(tuning.measure, "cycles")
    return (
        f"{len(tuning.layers)} layers chosen for; the network takes {tuning.tuned_cycles:,} {kind} instead of "
        f"{tuning.default_cycles:,}, {_percent(tuning.default_cycles, tuning.tuned_cycles)} less{star}"
    )
