"""What the simulator must know of an instruction set: one `Architecture` for each family of cores.

Everything that differs between them is behind it: `riscv.py` and `arm.py` each hold one. This module, and those as
long as no core is made, import nothing of the emulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from dovetail.build.instruction_sets import instruction_set
from dovetail.errors import TargetError
from dovetail.simulate.device import Bus, Device


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What running a block once, up to its end, adds to the counters.

    Attributes:
        end: address after the last instruction that runs.
        instructions: their number, predicated ones left out.
        cycles: their cycles, a final conditional branch counted as not taken, predicated ones as skipped.
        taken_extra: cycles to add when the next block does not start at `end`.
        system: whether it contains an instruction that may change the interrupt enables.
    """

    end: int
    instructions: int
    cycles: int
    taken_extra: int
    system: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Why the core stopped by itself.

    Attributes:
        at: address of the instruction it stopped at.
        waits: True after wfi, False where it can go on at once.
        cycles: what the core has spent on whatever stopped it.
        fault: what it cannot go on after, "" for nothing.
    """

    at: int
    waits: bool
    cycles: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class CoreSetup:
    """What a core is made from.

    Attributes:
        isa: its instruction set.
        costs: cycles of each class of instruction, of the type `Architecture.costs`.
        bus: the memories.
        elf: the firmware.
        extension: what executes instructions of the core's own (`extension.load_extension`); empty for none.
    """

    isa: str
    costs: Any
    bus: Bus
    elf: Path
    extension: str = ""


class Core(Protocol):
    """A core in the emulator."""

    @property
    def emulator(self) -> Any:
        """The emulator's handle."""
        ...

    @property
    def registers(self) -> tuple[int, Device] | None:
        """Base address of the registers the core itself has in memory, and what answers there; 4096 bytes."""
        ...

    @property
    def predicated(self) -> Mapping[int, int]:
        """Addresses of instructions that may be skipped where they stand; `block_cost` leaves them out. For each the
        cycles it takes more when it is executed than when it is skipped."""
        ...

    def start(self, entry: int) -> None:
        """Go to the entry point of the firmware, as after a reset."""
        ...

    def pc(self) -> int:
        """Address of the next instruction."""
        ...

    def resume_at(self) -> int:
        """What the emulator is told to go on at."""
        ...

    def pause(self) -> Pause | None:
        """Why the core stopped by itself, and finish what stopped it; None for no known reason."""
        ...

    def line_enabled(self) -> bool:
        """Whether the interrupt line of the devices reaches the core: then it ends wfi."""
        ...

    def enter_interrupt(self) -> int | None:
        """Go to the handler of the devices' interrupt and return the cycles of that; None where it is masked."""
        ...

    def block_cost(self, address: int, size: int) -> BlockCost:
        """Count the block of `size` bytes at `address`."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of cores.

    Attributes:
        elf_machine: the machine of its ELF files, as pyelftools names it.
        costs: the frozen dataclass of cycles per class of instruction; its defaults are a stated core's.
        make: makes a core; imports the emulator.
        product: fewest cycles of a multiply-accumulate by its instructions for one number at a time.
        word: fewest cycles in which a word of 4 bytes is loaded or stored.
    """

    elf_machine: str
    costs: Callable[..., Any]
    make: Callable[[CoreSetup], Core]
    product: Callable[[Any], int]
    word: Callable[[Any], int]


def architecture_of(isa: str) -> Architecture:
    """The architecture of an instruction set.

    Raises:
        BuildError: there is no such instruction set.
    """
    if instruction_set(isa).family == "arm":
        from dovetail.simulate.arm import ARM

        return ARM
    from dovetail.simulate.riscv import RISCV

    return RISCV


def core_costs(isa: str, overrides: Mapping[str, int], name: str) -> Any:
    """The table of cycles of a core.

    Args:
        isa: its instruction set. overrides: cycles that differ from the stated default (`Core.costs`).
        name: of the target, for the message.

    Raises:
        TargetError: an override for a class of instructions that does not exist.
    """
    table = architecture_of(isa).costs
    default = table()
    known = [field.name for field in fields(default)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise TargetError(f"there is a cost for '{unknown[0]}', which is no class of instructions",
                          where=f"core of {name}", hint=f"use {', '.join(known)}")
    return table(**overrides)
