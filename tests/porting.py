"""Ports with planted bugs, for the tests of `dovetail check`."""

from __future__ import annotations

from pathlib import Path

from dovetail.guests.check.cases import Limits
from dovetail.guests.check.suite import Order
from dovetail.guests.newtarget import write_new_target
from dovetail.target import Target
from dovetail.targets import load_target

SMALL = Limits(30_000, 6_000)
TINY = Limits(2_000, 400)


def port_file(folder: Path, old: str = "", new: str = "", suffix: str = ".py") -> Path:
    """The starting file of a port, with a bug in it or in its driver."""
    path = write_new_target("small", folder)[0]
    changed = path.with_suffix(suffix)
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new) if old else text)
    return path


def port(folder: Path, old: str = "", new: str = "", suffix: str = ".py") -> Target:
    """The starting file's target, with a bug in it or in its driver."""
    return load_target(str(port_file(folder, old, new, suffix)))


def order(
    *offloads: str, simulators: tuple[str, ...] = ("model",), seconds: float = 30.0, limits: Limits = SMALL
) -> Order:
    """A small check."""
    return Order(limits, simulators, offloads, seconds)
