"""What a device model of the simulated chip is, and the memories it can reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dovetail.errors import SimulationError

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional array of bytes."""

INITIAL_BYTE = 0xA5
"""Memories start filled with this, so that firmware reading what nobody wrote does not see friendly zeros."""


class Bus(Protocol):
    """The memories a device may reach."""

    @property
    def regions(self) -> Sequence[MemoryRegion]:
        """What there is, by address."""
        ...

    def view(self, address: int, nbytes: int) -> Bytes:
        """Return a writable view of `nbytes` bytes at `address`, without a copy.

        Raises:
            SimulationError: the range is not inside one memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class Activity:
    """One bar of the timeline: a finished job of a device.

    Attributes:
        start: cycle the job started at.
        end: cycle its effects became visible at.
        label: what it was, for people.
        moved: bytes written by a transfer, 0 for engines.
        macs: useful multiply-accumulates of an engine's job, 0 for transfers.
        instructions: executed by a further core, 0 for devices.
    """

    start: int
    end: int
    label: str
    moved: int = 0
    macs: int = 0
    instructions: int = 0


class Device(Protocol):
    """A memory-mapped device; a job's memory effects happen at its completion, in `advance`."""

    name: str

    def reset(self) -> None:
        """Return to the state after power-on and forget all activities."""
        ...

    def read(self, offset: int, now: int) -> int:
        """Read the 32-bit register at byte `offset` at cycle `now` (`advance(now)` was called before)."""
        ...

    def write(self, offset: int, value: int, now: int) -> None:
        """Write the 32-bit register at byte `offset` at cycle `now` (`advance(now)` was called before)."""
        ...

    def next_event(self) -> int | None:
        """Return the cycle of the next completion, None when idle."""
        ...

    def advance(self, now: int) -> None:
        """Carry out everything that completes at or before cycle `now`."""
        ...

    def interrupt(self) -> bool:
        """Return the level of the interrupt line; it stays high until the driver acknowledges."""
        ...

    def activities(self) -> list[Activity]:
        """Return the jobs finished since `reset()`, in order of completion."""
        ...


@runtime_checkable
class Clocked(Protocol):
    """A device that does not know when its next interrupt comes before it gets there; its events are steps."""

    def clock(self, until: int) -> int:
        """Carry on to cycle `until`, or to the one in which the interrupt line rises; return where it stands."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A memory of the chip: name, base address, and size in bytes."""

    name: str
    base: int
    size: int


class MemoryBus:
    """A `Bus` over numpy arrays, one per memory.

    Args:
        regions: the memories; none may overlap another.

    Raises:
        SimulationError: two memories overlap, or one is empty.
    """

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions = tuple(sorted(regions, key=lambda region: region.base))
        for lower, upper in zip(self._regions, self._regions[1:], strict=False):
            if lower.base + lower.size > upper.base:
                raise SimulationError(f"it overlaps '{lower.name}' at {upper.base:#x}", where=f"memory '{upper.name}'",
                                      hint="move one of the two in the target, or make it smaller")
        self.arrays: dict[str, Bytes] = {}
        for region in self._regions:
            if region.size <= 0:
                raise SimulationError(f"it has {region.size} bytes", where=f"memory '{region.name}'",
                                      hint="give the memory of the target a size above 0")
            self.arrays[region.name] = allocate(region.size)

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """See `Bus.regions`."""
        return self._regions

    def view(self, address: int, nbytes: int) -> Bytes:
        """See `Bus.view`."""
        for region in self.regions:
            offset = address - region.base
            if offset >= 0 and nbytes >= 0 and offset + nbytes <= region.size:
                return self.arrays[region.name][offset : offset + nbytes]
        known = ", ".join(f"{r.name} {r.base:#x}..{r.base + r.size - 1:#x}" for r in self.regions)
        raise SimulationError(f"{nbytes} bytes at {address:#x} are not inside one memory", where="bus",
                              hint=f"look at the addresses the driver writes; memories: {known}")

    def fill(self) -> None:
        """Set every byte of every memory to `INITIAL_BYTE`."""
        for array in self.arrays.values():
            array[:] = INITIAL_BYTE


def allocate(nbytes: int) -> Bytes:
    """Return an array of `nbytes` bytes of `INITIAL_BYTE`, page-aligned and backed by whole pages.

    The emulator maps whole 4096-byte pages of host memory, hence the alignment and the slack after the array.
    """
    page = 4096
    backing = np.empty((nbytes + page - 1) // page * page + page, dtype=np.uint8)
    start = -backing.ctypes.data % page
    backing[:] = INITIAL_BYTE
    return backing[start : start + nbytes]
