"""Targets with more than one core, made from those with one."""

from __future__ import annotations

from dataclasses import replace

from dovetail.errors import TargetError
from dovetail.target.description import Core, Target


def with_workers(target: Target, *workers: Core) -> Target:
    """The target with further cores that work for its own.

    Args:
        target: the machine; its name gets the number of all cores behind it.
        workers: the further cores, from number 1 on: often `target.core` again, or a slower one made from it with
            other `costs` and a smaller `speed`.

    Raises:
        TargetError: a core on which the firmware of core 0 could not run, or one without speed.
    """
    count = len(target.cores) + len(workers)
    alike = all(core == target.core for core in (*target.workers, *workers))
    found = replace(
        target,
        name=f"{target.name}_x{count}",
        sentence=f"{target.sentence}; {count} cores {'alike' if alike else 'of different speed'}",
        workers=(*target.workers, *workers),
    )
    check_cores(found)
    return found


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
