"""An NE16 whose jobs end at the worst moment: so many cycles after each look at FINISHED or STATUS."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from dovetail.sim.device import Bus
from dovetail.sim.launch_queue import AddressLines
from dovetail.targets.ne16.device import FINISHED, STATUS, Ne16Device


class Adversary(Ne16Device):
    """Every look moves the end of the running job to between 1 and `most` cycles after it.

    Args:
        bus: the memories.
        first: where in the round the distances begin, so that a run with each `first` has every look at every distance.
        most: the longest distance.
        lines: see `Ne16Device`.
    """

    def __init__(self, bus: Bus, first: int, most: int, lines: str = AddressLines.HELD.value) -> None:
        self._looks, self._most = first, most
        super().__init__(bus, lines=lines)

    def read(self, offset: int, now: int) -> int:
        """See `HwpeDevice.read`."""
        value = super().read(offset, now)
        launches = self.queue._launches
        if offset in (FINISHED, STATUS) and launches and launches[0].start <= now:
            self._looks += 1
            moved = now + 1 + self._looks % self._most - launches[0].end
            ends = [
                replace(one, end=one.end + moved, start=one.start + moved * (one is not launches[0]))
                for one in launches
            ]
            self.queue._launches = deque(ends)
        return value
