"""What engines that take whole launches have in common: a few places, one at a time, an interrupt at each end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dovetail.errors import SimulationError
from dovetail.simulate.device import Activity

Work = TypeVar("Work")
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Launch(Generic[Work]):
    """A launch handed over: its number from 1, what it is, and its start and end in cycles."""

    number: int
    work: Work
    start: int
    end: int


class LaunchQueue(Generic[Work]):
    """Launches in the order they are handed over; each begins when the one before has ended.

    Args:
        name: of the device, for messages.
        places: launches it holds, the running one included.
    """

    def __init__(self, name: str, places: int) -> None:
        self._name, self._places = name, places
        self._launches: deque[Launch[Work]] = deque()
        self._finished = 0
        self.interrupt = False
        """The level of the interrupt line: high from the end of a launch until `collect`."""
        self.activities: list[Activity] = []
        """What the device adds for each launch that has ended."""

    @property
    def room(self) -> int:
        """Launches that can still be handed over."""
        return self._places - len(self._launches)

    @property
    def next_number(self) -> int:
        """The number the next launch gets."""
        return self._finished + len(self._launches) + 1

    def hand_over(self, work: Work, now: int, cycles: int) -> None:
        """Take a launch of so many cycles; `check_room` comes first."""
        start = max(now, self._launches[-1].end) if self._launches else now
        self._launches.append(Launch(self.next_number, work, start, start + cycles))

    def check_room(self) -> None:
        """Raise SimulationError where there is no place for a launch."""
        if not self.room:
            what = f"launch {self.next_number} was started with all {self._places} places taken"
            raise SimulationError(what, where=self._name, hint="wait until ROOM is not 0")

    def next_event(self) -> int | None:
        """The cycle of the next end, None when idle."""
        return self._launches[0].end if self._launches else None

    def ended(self, now: int) -> Iterator[Launch[Work]]:
        """The launches that have ended by cycle `now`; each counts as finished when the next is asked for."""
        while self._launches and self._launches[0].end <= now:
            yield self._launches[0]
            self._launches.popleft()
            self._finished += 1
            self.interrupt = True

    def collect(self) -> int:
        """How many have finished since reset, modulo 2^32; lowers the interrupt line."""
        self.interrupt = False
        return self._finished & _MASK32
