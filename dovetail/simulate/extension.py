"""Instructions the simulated core does not know by itself: how a target says what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dovetail.errors import SimulationError


class Registers(Protocol):
    """The integer registers of the core, by number."""

    def read(self, number: int) -> int:
        """Value as 32 bits without sign; x0 is 0."""
        ...

    def write(self, number: int, value: int) -> None:
        """Set one to the low 32 bits of a value; x0 stays 0."""
        ...


Execute = Callable[[int, Registers], bool]
"""Executes the instruction of a word; False when it is none of the extension's."""


def load_extension(place: str) -> Execute:
    """The function "module:function" or "file.py:function" names; raises SimulationError when there is none."""
    from dovetail.simulate.factory import find

    found: Any = find(place, "extension")
    return found  # type: ignore[no-any-return]  # what a user names is only known when it is called


def refuse_extension(isa: str, place: str) -> None:
    """Raise SimulationError when an extension is named for a core that takes none."""
    if place:
        raise SimulationError(f"a core of {isa} takes no instructions of its own", where=place,
                              hint="leave Core.extension out: only RISC-V cores have them here")
