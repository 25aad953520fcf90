"""What `dovetail new-target`, `check` and `vectors` do."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dovetail.cli.console import note, progress, say
from dovetail.errors import BuildError


@dataclass(frozen=True)
class CheckOrder:
    """What the user wishes of `dovetail check`."""

    target: str
    simulators: tuple[str, ...]
    offloads: tuple[str, ...]
    full: bool
    seconds: float
    junit: Path | None
    markdown: Path | None


def check_target(order: CheckOrder) -> None:
    """Check a target, print its findings, and exit with 1 where there are any; raises DovetailError."""
    for path in (order.junit, order.markdown):
        if path is not None:
            _write(path, "")  # a file that cannot be written is told before the work, not after it
    with progress("reading the target") as report:
        from dovetail.check.cases import FULL, QUICK
        from dovetail.check.report import finding_text, junit, markdown, summary
        from dovetail.check.suite import Order, check
        from dovetail.targets import load_target

        target = load_target(order.target)
        limits = FULL if order.full else QUICK
        found = check(target, Order(limits, order.simulators, order.offloads, order.seconds), report)
    for path, text in ((order.junit, junit), (order.markdown, markdown)):
        if path is not None:
            _write(path, text(found))
    for number, finding in enumerate(found.findings, 1):
        say(f"{number}. {finding_text(finding)}\n")
    say(summary(found))
    if found.findings:
        sys.exit(1)


def new_target(name: str, folder: Path, force: bool) -> None:
    """Write a starting file and say what comes next; raises DovetailError."""
    from dovetail.newtarget import write_new_target

    paths = write_new_target(name, folder, force)
    say(f"{', '.join(str(path) for path in paths)}: try dovetail check {paths[0]}")


def vectors_to(target: str, form: str, folder: Path, force: bool) -> None:
    """Write test vectors; raises DovetailError."""
    with progress("making vectors"):
        from dovetail.targets import load_target
        from dovetail.vectors import write_vectors

        count, without = write_vectors(load_target(target), form, folder, force)
    if without:
        note(f"no layer is made for {', '.join(without)}")
    say(f"{folder}: {count} kernels")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BuildError(f"cannot write it: {error.strerror}", where=str(path), hint="choose another file") from None
