"""`dovetail sweep`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.cli.console import INTERRUPTED, beside_json, note, progress, say, show_table
from dovetail.cli.options import Json, Model, Page, Scheduler, TargetName, option
from dovetail.options import Options

if TYPE_CHECKING:
    from dovetail.fields import Field
    from dovetail.guests.sweep.run import SweepOutcome


def sweep(
    model: Model,
    target: TargetName,
    options: Annotated[Options, "policy", "allow_float", "optimize"],
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            metavar="NAME=VALUE,VALUE",
            help="A field of the target and its values; may be repeated. Without one, the fields are listed.",
        ),
    ] = None,
    jobs: Annotated[int | None, option(help="Processes; as many as there are processors if not given.")] = None,
    scheduler: Scheduler = None,
    page: Page = Path("sweep.html"),
    json_file: Json = None,
) -> None:
    """Compile and run a model for many sizes of the hardware.

    What if the hardware were different? Points that were made before are not made again, so that a sweep that was
    stopped goes on.

    Example: dovetail sweep net.tflite --target ne16 --set l1.size=64K,128K --set dma.bytes_per_cycle=4,8
    """
    from dovetail import fields
    from dovetail.arrays import write_file
    from dovetail.compile import policy_of
    from dovetail.farm import processors
    from dovetail.files import default_cache
    from dovetail.guests.sweep import page as drawing
    from dovetail.guests.sweep import run as sweeping
    from dovetail.guests.sweep.run import SweepTask
    from dovetail.target.registry import load_target

    known = load_target(target)
    if not settings:
        say("\n".join(map(_field_line, fields.fields_of(known).values())))
        return
    axes, policy = fields.axes_of(known, settings), policy_of(known, options).name
    with progress("starting") as show:

        def told(done: int, count: int, point: Mapping[str, Any], outcome: SweepOutcome) -> None:
            note(f"{done} of {count}: {_settings_text(point)}: {outcome.error or f'{outcome.cycles:,} cycles'}")
            show(f"{done} of {count} points")

        try:
            folder, processes = default_cache() / "sweep", processors() if jobs is None else jobs
            task = SweepTask(model.resolve(), target, options)
            outcomes, repeated = sweeping.sweep(task, axes, processes, folder, told, scheduler)
        except KeyboardInterrupt:
            note("stopped; every point that has ended is kept. Run the same command to go on.")
            sys.exit(INTERRUPTED)
    data = sweeping.to_json(model.stem, known.name, policy, axes, outcomes)
    write_file(page, drawing.sweep_page(data).encode())
    with beside_json(json_file, data):
        _print_sweep(data)
        if repeated:
            note(f"{repeated} of the points were made earlier")
        say(f"{page}: {_sweep_sentence(data)}")
    sys.exit(int(data["best"] is None))


def _field_line(field: Field) -> str:
    return f"{field.name:28} {field.present!s:>12}  {field.about}".rstrip()


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in settings.items())


def _sweep_sentence(data: dict[str, Any]) -> str:
    points = data["points"]
    if data["best"] is None:
        return f"none of {len(points)} points can be compiled or run"
    best, failed = points[data["best"]], sum(bool(point["error"]) for point in points)
    fastest = f"{_settings_text(best['settings'])}: {best['cycles']:,} cycles"
    refused = f"; {failed} cannot be compiled or run" if failed else ""
    return f"{len(points)} points; the fastest has {fastest}{refused}"


def _print_sweep(data: dict[str, Any]) -> None:
    names = [field["name"] for field in data["fields"]]
    energy = ["energy"] if any(point["energy"] is not None for point in data["points"]) else []
    uj = ("uJ",) if energy else ()
    figures = (*names, "cycles", "by the best", "MAC/cycle", *uj, *(f"{name} peak" for name in data["memories"]))
    rows = []
    for point in data["points"]:
        by_best = "" if point["by_best"] is None else f"{point['by_best']:.3f}"
        rate = "" if point["macs_per_cycle"] is None else f"{point['macs_per_cycle']:.2f}"
        peaks = [point["peaks"].get(name) for name in data["memories"]]
        set_to = [_number(point["settings"][name]) for name in names]
        used = [_number(point[name]) for name in energy]
        rows.append([*set_to, _number(point["cycles"]), by_best, rate, *used, *map(_number, peaks), point["error"]])
    styles = ["bold" if number == data["best"] else "" for number in range(len(rows))]
    why = ("why not",)
    show_table((*figures, *why), rows, left=why, fold=why, whole=figures, styles=styles)


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, bool) else f"{value:,}"
