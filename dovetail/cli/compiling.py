"""What `dovetail compile` does, and what it shares with `dovetail explain`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.console import note, progress, say
from dovetail.errors import BuildError, ModelError

if TYPE_CHECKING:
    from dovetail.compile import Compiled
    from dovetail.stripe import Striped
    from dovetail.target import Target


@dataclass(frozen=True)
class Placement:
    """The options of who computes what and within how many bytes; see `dovetail compile --help`."""

    cores: int | None
    pipeline: bool
    pin: tuple[str, ...]
    pins: Path | None
    memory_budget: str | None

    def bytes(self) -> int | None:
        """The memory budget; raises ModelError."""
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)

    def all_pins(self) -> dict[str, str]:
        """The pins of the file, and over them those of the command line; raises DovetailError."""
        from dovetail.place.pins import parse_pins, read_pins

        return {**(read_pins(self.pins) if self.pins else {}), **parse_pins(self.pin)}

    def on(self, target: str) -> Target:
        """The target of a name or file, with these cores; raises DovetailError."""
        from dovetail.target.cores import with_cores
        from dovetail.targets import load_target

        return with_cores(load_target(target), self.cores)


@dataclass(frozen=True)
class CompileOrder:
    """The arguments of the command; see `dovetail compile --help`."""

    model: Path
    target: str
    folder: Path
    policy: str | None
    rounding: str
    save_stages: Path | None
    check: bool
    allow_float: bool
    optimize: str
    force: bool
    print_program: bool
    tuning: Path | None
    dump: Path | None
    placement: Placement


def compile_to(order: CompileOrder) -> None:
    """Compile a model into a folder; raises DovetailError."""
    _check_folders(order)
    with progress("starting") as report:
        from dovetail.compile import Options, compile_model
        from dovetail.emit.project import write_project
        from dovetail.kernels import Optimize
        from dovetail.operators.arithmetic import Rounding

        placed = order.placement
        options = Options(
            order.policy, Rounding(order.rounding), order.save_stages, order.check, order.tuning, order.allow_float,
            Optimize(order.optimize), placed.bytes(), placed.pipeline, placed.all_pins(),
        )  # fmt: skip
        compiled = compile_model(order.model, placed.on(order.target), options, report)
        dumped = 0
        if order.dump is not None:
            from dovetail.compile import sample_inputs
            from dovetail.emit.dump import dump

            report("dumping launches")
            dumped = dump(compiled.unit, sample_inputs(compiled.graph), order.dump)
        write_project(compiled.project, order.folder, replace=order.force)
    if order.dump is not None:
        note(f"{order.dump}: {dumped} launches of one inference with seeded inputs")
    if order.print_program:
        from dovetail.program.printer import print_program as text_of

        say(text_of(compiled.plan.program).rstrip())
    for sentence in compiled.unit.notes:
        note(sentence)
    say(f"{order.folder}: {_summary(compiled)}")


def _check_folders(order: CompileOrder) -> None:
    """Before long work: what is in the way of its results; raises BuildError."""
    if order.folder.exists() and not order.force:
        raise BuildError("the output folder exists", where=str(order.folder),
                         hint="choose another folder, or give --force to replace it")  # fmt: skip
    if order.save_stages is not None and order.save_stages.exists() and not order.save_stages.is_dir():
        raise BuildError("this is not a folder", where=str(order.save_stages), hint="choose another --save-stages")


def _summary(compiled: Compiled) -> str:
    """One sentence: what went where and what memory it needs."""
    regions = [region for region in compiled.regions if not region.is_view and not region.still]
    offloaded = [region for region in regions if region.engine is not None]
    macs = sum(region.macs for region in regions)
    share = 100 * sum(region.macs for region in offloaded) / macs if macs else 0.0
    memory = "; ".join(
        f"{use.memory} {use.peak:,} bytes at the peak, lower bound {use.lower_bound:,}"
        for use in compiled.plan.placements
        if use.peak
    )
    stripes = f"; {stripes_sentence(compiled.striped, macs)}" if compiled.striped else ""
    placing = compiled.placing
    stripes += f"; {placing.describe()}" if placing.describe() else ""
    count = len(compiled.unit.target.cores)
    shared = f"; {compiled.pipeline.describe()}" if compiled.pipeline else f"; on {count} cores" if count > 1 else ""
    where = f"{len(offloaded)} of {len(regions)} layers and {share:.1f} % of {macs:,} MACs on an engine"
    return f"{where}; {memory}{stripes}{shared}"


def stripes_sentence(striped: Striped, macs: int) -> str:
    """What is computed in stripes, and what it costs; `macs` is all there is to compute, with stripes."""
    before = macs - striped.extra_macs
    return f"for the memory budget {striped.describe()} ({100 * striped.extra_macs / max(before, 1):.2f} %)"


def parse_bytes(text: str) -> int:
    """A number of bytes: digits, and K for 1024 of them or M for 1024 K.

    Raises:
        ModelError: it is not one.
    """
    match = re.fullmatch(r"(\d+)\s*([KkMm]?)(?:i?[Bb])?", text.strip())
    if match is None or int(match[1]) == 0:
        raise ModelError(f"'{text}' is not a number of bytes", where="--memory-budget", hint="such as 32768 or 32K")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2].upper()]
