"""A chip with two NE16 engines, as a user's target file: the second has registers of its own, the same L1 and DMA, and may
be slower or have limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dovetail.target import Command, Constraint, DeviceModel, Engine, Match, Offload, Operand, Target
from dovetail.targets.ne16 import ENGINE, TARGET

HERE = Path(__file__).parent
BASE = 0x00202000


def second(slowdown: int = 1, limits: tuple[Constraint, ...] = ()) -> Engine:
    """The second engine: `slowdown` cycles for each of the first, and what it does not take beyond the first's limits."""

    def own(offload: Offload) -> Offload:
        """An offload of the first, started on the second."""

        def commands(match: Match, operands: Mapping[str, Operand]) -> tuple[Command, ...]:
            made = offload.commands(match, operands)
            return tuple(replace(one, function="second_start") for one in made if isinstance(one, Command))

        def cycles(match: Match) -> int:
            return offload.cycles(match) * slowdown

        return replace(
            offload, commands=commands, cycles=cycles, constraints=(*offload.constraints, *limits)
        )

    assert ENGINE.device is not None
    files = {name: HERE / name for name in ("second_ne16.h", "second_ne16.c")}
    device = DeviceModel(ENGINE.device.factory, BASE, 0x100, {"name": "second", "slowdown": slowdown})
    return replace(
        ENGINE, name="second", offloads=tuple(own(offload) for offload in ENGINE.offloads), device=device,
        driver=(), files=files, headers=("second_ne16.h",), wait="second_wait", prepare="second_init",
        defines={"SECOND_NE16_BASE": BASE}, ideal_macs_per_cycle=ENGINE.ideal_macs_per_cycle / slowdown,
    )  # fmt: skip


def machine(slowdown: int = 1, limits: tuple[Constraint, ...] = ()) -> Target:
    """The chip with both."""
    return replace(TARGET, name="two_engines", engines=(ENGINE, second(slowdown, limits)))


TARGET = machine()
