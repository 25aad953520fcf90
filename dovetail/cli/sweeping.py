"""What `dovetail sweep` does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.console import INTERRUPTED, note, output, progress, say
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from dovetail.sweep.grid import Axis
    from dovetail.sweep.point import Outcome, Task
    from dovetail.target import Target


@dataclass(frozen=True, slots=True)
class SweepOrder:
    """The arguments of the command; see `dovetail sweep --help`."""

    model: Path
    target: str
    settings: tuple[str, ...]
    policy: str | None
    allow_float: bool
    optimize: str
    jobs: int | None
    page: Path
    json_file: Path | None


def sweep_to(order: SweepOrder) -> None:
    """Sweep, print a table, write the page; raises DovetailError.

    Ctrl-C ends the process with status `INTERRUPTED`; every point that has ended is kept.
    """
    from dovetail.build.toolchain import default_cache
    from dovetail.cli.arrays import write_file
    from dovetail.sweep.grid import axes_of
    from dovetail.sweep.run import sweep, to_json
    from dovetail.targets import load_target

    target = load_target(order.target)
    if not order.settings:
        _list(target)
        return
    axes, task = axes_of(target, order.settings), _task(order, target)
    with progress("starting") as show:

        def told(done: int, count: int, settings: Any, outcome: Outcome) -> None:
            """Show how far it is, and leave a line for every point."""
            what = outcome.error or f"{outcome.cycles:,} cycles"
            note(f"{done} of {count}: {_settings(settings)}: {what}")
            show(f"{done} of {count} points")

        try:
            jobs = _processors() if order.jobs is None else order.jobs
            outcomes, repeated = sweep(task, axes, jobs, default_cache() / "sweep", told)
        except KeyboardInterrupt:
            note("stopped; every point that has ended is kept. Run the same command to go on.")
            sys.exit(INTERRUPTED)
    data = to_json(order.model.stem, target.name, order.policy or target.policies[0].name, axes, outcomes)
    from dovetail.report.page.sweeps import sweep_page

    write_file(order.page, sweep_page(data).encode())
    if order.json_file is not None:
        write_file(order.json_file, (json.dumps(data, indent=2) + "\n").encode())
    _print(data)
    if repeated:
        note(f"{repeated} of the points were made earlier")
    say(f"{order.page}: {_sentence(data, axes)}")


def _task(order: SweepOrder, target: Target) -> Task:
    """What all points share; raises DovetailError for what would go wrong at every one of them."""
    from dovetail.sweep.point import Task

    if not order.model.is_file():
        raise DovetailError("there is no such model", where=str(order.model), hint="give a .tflite or .onnx file")
    known = [policy.name for policy in target.policies]
    if order.policy is not None and order.policy not in known:
        raise DovetailError(f"there is no requantisation policy '{order.policy}'", where=target.name,
                            hint=f"use one of {', '.join(known)}")
    return Task(str(order.model.resolve()), order.target, order.policy, order.allow_float, order.optimize)


def _processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in settings.items())


def _list(target: Target) -> None:
    """Print what may be set."""
    from dovetail.sweep.fields import fields_of

    for field in fields_of(target).values():
        say(f"{field.name:28} {field.present!s:>12}  {field.about}".rstrip())


def _sentence(data: dict[str, Any], axes: Sequence[Axis]) -> str:
    """What was found, in one line."""
    points = data["points"]
    failed = sum(bool(point["error"]) for point in points)
    refused = f"; {failed} cannot be compiled or run" if failed else ""
    if data["best"] is None:
        return f"none of {len(points)} points can be compiled or run"
    best = points[data["best"]]
    return f"{len(points)} points; the fastest has {_settings(best['settings'])}: {best['cycles']:,} cycles{refused}"


def _print(data: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    names = [field["name"] for field in data["fields"]]
    table = Table(show_edge=False, pad_edge=False)
    for heading in (*names, "cycles", "by the best", "MAC/cycle", *(f"{name} peak" for name in data["memories"])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold")
    for number, point in enumerate(data["points"]):
        by_best = "" if point["by_best"] is None else f"{point['by_best']:.3f}"
        rate = "" if point["macs_per_cycle"] is None else f"{point['macs_per_cycle']:.2f}"
        figures = [point["settings"][name] for name in names]
        peaks = [point["peaks"].get(name) for name in data["memories"]]
        cells = [*map(_number, figures), _number(point["cycles"]), by_best, rate, *map(_number, peaks), point["error"]]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if number == data["best"] else "")
    output().print(table, highlight=False)


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, bool) else f"{value:,}"
