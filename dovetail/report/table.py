"""The report as a table for people."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.report.report import Layer, Report

if TYPE_CHECKING:
    from rich.console import Console


def print_report(report: Report, console: Console) -> None:
    """Print a table of the layers and the totals below it."""
    from rich.table import Table

    many = f", {report.inferences} inferences, the first:" if report.inferences > 1 else ""
    title = f"{report.model} on {report.target} ({report.simulator}, policy {report.policy}){many}"
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for heading in ("cycles", "engine busy", "MACs", "MAC/cycle", "bytes moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in report.layers:
        style = "" if layer.ideal_macs_per_cycle is not None else "dim"
        table.add_row(*_row(*_on_cores(report, layer)), style=style)
    console.print(table, highlight=False)
    for line in totals(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def totals(report: Report) -> list[str]:
    """The lines below the table."""
    lines = []
    if report.cycles["total"] is not None:
        busy = {name: value for name, value in report.cycles.items() if name != "total" and value is not None}
        parts = ", ".join(f"{name} {_number(value)}" for name, value in busy.items())
        lines.append(f"cycles        {_number(report.cycles['total'])}{f' (busy: {parts})' if parts else ''}")
    if report.instructions is not None:
        lines.append(f"instructions  {_number(report.instructions)}")
    lines.append(f"MACs          {_share(report)}")
    if report.conversions:
        lines.append(f"conversions   {_conversions(report)}")
    for name, use in report.memory.items():
        bound = f"lower bound {_number(use.lower_bound)}"
        lines.append(f"{name:13} {_number(use.peak)} of {_number(use.size)} bytes at the peak ({bound})")
    lines += _cores(report) if len(report.cores) > 1 else []
    if report.sizes:
        sizes = ", ".join(f"{name} {_number(size)}" for name, size in report.sizes.items())
        stack = f", stack used {_number(report.stack)}" if report.stack is not None else ""
        lines.append(f"firmware      {sizes}{stack} bytes")
    return lines


def _cores(report: Report) -> list[str]:
    """A line for each of several cores, and one for a pipeline."""
    lines = []
    for core in report.cores:
        line = f"{core.name:13} speed {core.speed:g}, stack {_number(core.stack)} bytes"
        if core.cycles is not None:
            work = f"busy {_number(core.cycles)} cycles, {_number(core.instructions)} instructions"
            line = f"{line}, used {_number(core.stack_used)}; {work}"
        lines.append(line)
    if report.delay:
        calls = "call" if report.delay == 1 else "calls"
        lines.append(f"pipeline      the outputs of an input come {report.delay} {calls} later")
    return lines


def _conversions(report: Report) -> str:
    """How many values change their layout, between whom, and how many from an engine to an engine."""
    engines = {name for name in report.macs if name not in ("total", "core")}
    ways = ", ".join(f"{found.maker} to {' and '.join(found.readers)}" for found in report.conversions)
    between = sum(found.maker in engines and not engines.isdisjoint(found.readers) for found in report.conversions)
    moved = sum(found.nbytes for found in report.conversions)
    return f"{len(report.conversions)} of layouts, {_number(moved)} bytes ({ways}); {between} between engines"


def _share(report: Report) -> str:
    total = report.macs["total"]
    engines = {name: macs for name, macs in report.macs.items() if name not in ("total", "core")}
    shares = ", ".join(f"{100 * macs / total:.1f} % on {name}" for name, macs in engines.items()) if total else ""
    return _number(total) + (f", {shares}" if shares else "")


def _on_cores(report: Report, layer: Layer) -> tuple[Layer, str]:
    """The layer and who does it: an engine, or the cores that have a part of it. Where core 0 has none, its cycles are
    those of the core that works longest."""
    own = {core.name: core.layers[layer.name] for core in report.cores if layer.name in core.layers}
    if layer.engine != "core" or not own:
        return layer, layer.engine
    return layer if "core" in own else replace(layer, cycles=max(own.values())), " ".join(own)


def _row(layer: Layer, where: str) -> tuple[str, ...]:
    rate = layer.macs_per_cycle
    speed = "" if rate is None else f"{rate:.2f}"
    if rate is not None and layer.ideal_macs_per_cycle:
        speed = f"{rate:.1f} of {layer.ideal_macs_per_cycle:g}"
    busy = _number(layer.engine_cycles) if layer.ideal_macs_per_cycle is not None else ""
    moved = _number(layer.bytes_moved) if layer.bytes_moved else ""
    macs = _number(layer.macs) if layer.macs else ""
    return layer.name, where, _number(layer.cycles), busy, macs, speed, moved


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
