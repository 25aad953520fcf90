"""Targets with more than one core."""

from __future__ import annotations

from dataclasses import replace

from dovetail.errors import TargetError
from dovetail.target.description import Target

MOST_CORES = 64
"""Cores a target may have: what the mailbox of the simulated chip has registers for."""


def with_cores(target: Target, count: int | None) -> Target:
    """The target with so many cores like its own; as it is for None.

    Raises:
        TargetError: the number is not from 1 to `MOST_CORES`, or the target says itself which further cores it has.
    """
    if count is None or count == len(target.cores):
        return target
    if not 1 <= count <= MOST_CORES:
        raise TargetError(f"{count} cores are asked for", where=target.name,
                          hint=f"give a number from 1 to {MOST_CORES}")
    if target.workers:
        raise TargetError(f"it has {len(target.cores)} cores of its own, {count} are asked for", where=target.name,
                          hint="leave --cores out, or change the target file")
    return replace(target, workers=(target.core,) * (count - 1))


def check_cores(target: Target) -> None:
    """Raise TargetError where a further core cannot run the firmware of core 0, or one has no speed."""
    first = target.core
    for number, core in enumerate(target.cores):
        where = f"core {number} of {target.name}"
        if core.speed <= 0:
            raise TargetError(f"its speed is {core.speed}", where=where, hint="give a speed above 0")
        if (core.isa, core.instructions, core.extension) != (first.isa, first.instructions, first.extension):
            raise TargetError(
                f"it is of another kind ({core.isa}) than core 0 ({first.isa}), whose firmware it has to run",
                where=where,
                hint="give all cores the same instruction set and instructions",
            )
        if core.stack < first.stack:
            raise TargetError(f"it has {core.stack} bytes of stack, core 0 has {first.stack}", where=where,
                              hint="give it as many")
