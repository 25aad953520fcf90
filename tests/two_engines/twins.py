"""A chip with two NE16 engines, as a user's target file.

The second has registers of its own, the same L1 and DMA; it may be slower or have limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dovetail.target import Command, Constraint, DeviceModel, Engine, Match, Offload, Operand, Target
from dovetail.targets import ne16

HERE = Path(__file__).parent
BASE = 0x00202000


def second(slowdown: int = 1, limits: tuple[Constraint, ...] = ()) -> Engine:
    """The second engine.

    Args:
        slowdown: cycles for each of the first.
        limits: what it does not take beyond the first's limits.
    """

    def own(offload: Offload) -> Offload:
        """An offload of the first, started on the second."""

        def commands(match: Match, operands: Mapping[str, Operand]) -> tuple[Command, ...]:
            made = offload.commands(match, operands)
            return tuple(replace(one, function="second_start") for one in made if isinstance(one, Command))

        def cycles(match: Match) -> int:
            return offload.cycles(match) * slowdown

        def starting(match: Match) -> int:
            return offload.starting(match) * slowdown

        constraints = (*offload.constraints, *limits)
        return replace(offload, commands=commands, cycles=cycles, constraints=constraints, starting=starting)

    assert ne16.ENGINE.device is not None
    files = {name: HERE / name for name in ("second_ne16.h", "second_ne16.c")}
    device = DeviceModel(ne16.ENGINE.device.factory, BASE, 0x100, {"name": "second", "slowdown": slowdown})
    return replace(
        ne16.ENGINE,
        name="second",
        offloads=tuple(own(offload) for offload in ne16.ENGINE.offloads),
        device=device,
        driver=(),
        files=files,
        headers=("second_ne16.h",),
        wait="second_wait",
        prepare="second_init",
        defines={"SECOND_NE16_BASE": BASE},
        ideal_macs_per_cycle=ne16.ENGINE.ideal_macs_per_cycle / slowdown,
    )


def machine(slowdown: int = 1, limits: tuple[Constraint, ...] = ()) -> Target:
    """The chip with both."""
    return replace(ne16.TARGET, name="two_engines", engines=(ne16.ENGINE, second(slowdown, limits)))


TARGET = machine()
