"""A clock of statements as they are issued: the core, or an engine that works through a list, and the queues of DMAs
and engines, each one thing after the other. Times are cycles since the clock began."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from dovetail.target.chip import DMA_PLACES
from dovetail.target.costs import IN_LIST, StatementCycles
from dovetail.target.engine import Engine
from dovetail.timing.transfers import CopyCost


@dataclass(slots=True)
class Issuer:
    """The unit that issues statements: the core, or an engine that works through its list."""

    costs: StatementCycles
    now: int = 0

    @classmethod
    def of_list(cls) -> Self:
        """An engine, which hands out the commands of its list in no time."""
        return cls(IN_LIST)

    def start_core(self, cycles: int, free: int = 0) -> int:
        """Let another core work for so long, once it is free; returns its end."""
        half = self.costs.worker // 2  # the other half is waking up, and the wait
        self.now += half
        return max(free, self.now) + cycles + half

    def wait_launch(self, end: int) -> None:
        """Wait for a launch, or another core, that ends then."""
        self.now = max(self.now + self.costs.wait_launch, end + self.costs.wake)

    def wait_copy(self, end: int) -> None:
        """Wait for a copy that ends then."""
        self.now = max(self.now + self.costs.wait_copy, end + self.costs.wake)


@dataclass(slots=True)
class CopyQueue:
    """A DMA."""

    free: int = 0
    """Its last transfer has ended."""
    busy: int = 0

    def copy(self, issuer: Issuer, cost: CopyCost) -> int:
        """Start the transfers of a copy; returns its end."""
        start, each = issuer.costs.copy, cost.cycles / cost.starts
        begin = issuer.now + start
        issuer.now += cost.starts * start
        self.free = round(max(self.free + cost.cycles, begin + cost.cycles, issuer.now + each))
        if start:  # the core waits where the DMA's queue is full
            issuer.now = max(issuer.now, self.free - round(DMA_PLACES * each))
        self.busy += cost.cycles
        return self.free


@dataclass(slots=True)
class EngineQueue:
    """An engine."""

    places: int
    """Launches it holds, the one that is computed included."""
    launching: int
    """Core cycles of a start, once there is room."""
    is_core: bool = False
    """Whether the core itself computes a launch: nobody waits for it."""
    ends: list[int] = field(default_factory=list)
    """End of each launch."""
    busy: int = 0

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """The queue of an engine; one that takes lists holds all of a list."""
        if engine.stream is not None:
            return cls(1 << 30, 0)
        return cls(engine.queue, engine.launching, not engine.wait)

    def launch(self, issuer: Issuer, cycles: int, starting: int = 0) -> int:
        """Start a launch, with which the core goes along for some cycles; the driver waits while the engine is full.
        Returns its end."""
        number = len(self.ends) - self.places
        if number >= 0:
            issuer.now = max(issuer.now, self.ends[number] + issuer.costs.room)
        issuer.now += self.launching
        begin = max(issuer.now, self.ends[-1] if self.ends else 0)
        if self.is_core:
            issuer.now += cycles
        elif starting:
            issuer.now = begin + starting + issuer.costs.room
        self.ends.append(max(issuer.now, begin + cycles))
        self.busy += cycles
        return self.ends[-1]


def start_cycles(engine: Engine, costs: StatementCycles) -> int:
    """Core cycles of starting a layer on an engine: it fetches constants, sees that its own are there, and launches."""
    return costs.copy + costs.wait_copy + engine.launching
