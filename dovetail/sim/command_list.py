"""Engines that take lists of commands: units that work side by side, a command that waits, an interrupt at the end.

Registers as those of `dovetail.sim.launch_queue.JobDevice`, with a list in place of a job: 0x00 START, write anything:
begin the list. 0x04 FINISHED, read: lists ended since reset, modulo 2^32; lowers the interrupt line. 0x08 ROOM, read:
lists that can still be handed over. 0x10 LIST: address of the first word. 0x14 WORDS: how many there are.

The words are read at START. Commands are handed to their units in order, at once; each unit carries its own out in
order. A command reads memory when it begins and writes it when it ends. What another unit changes in between, under its
hands, is an error: a wait is missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.documented import document
from dovetail.errors import SimulationError
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus, Bytes, find
from dovetail.sim.launch_queue import Launch, QueueDevice
from dovetail.target.devices import JOB, CommandSet

LIST, WORDS = JOB, JOB + 4
"""Byte offsets of the registers that say where a list is."""


class Timed(Record):
    """A command of a list, and when it is carried out; cycles."""

    name: str
    """Name of the command."""
    fields: Mapping[str, int]
    """Unsigned fields of the command, by name."""
    unit: str
    """Unit that carries it out: the engine's name, or its DMA's."""
    start: int
    """Cycle it starts at."""
    end: int
    """Cycle it ends at."""


Effect = list[tuple[str, Any, Any]]
"""Region, places in it, and the bytes that are written there."""


class ListDevice(QueueDevice[tuple[Timed, ...]]):
    """The engine as a `Device`, computed by plain functions.

    See `CommandSet.device`, which names the arguments. Raises SimulationError where the model lacks a function.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        model: str,
        commands: Mapping[str, list[str]],
        dma: str = "",
        transfers: tuple[str, ...] = (),
        start: int = 0,
    ) -> None:
        self._set = CommandSet({command: tuple(fields) for command, fields in commands.items()})
        self._cycles: Callable[[str, Mapping[str, int]], int] = find(f"{model}:cycles", "function")
        self._macs: Callable[[str, Mapping[str, int]], int] = find(f"{model}:macs", "function")
        self._moved: Callable[[str, Mapping[str, int]], int] = find(f"{model}:moved", "function") if dma else _nothing
        self._compute: Callable[[str, Mapping[str, int], Bus], None] = find(f"{model}:compute", "function")
        self._dma, self._transfers, self._start = dma, frozenset(transfers), start
        super().__init__(bus, name, (LIST, WORDS), 1)

    def launch(self, now: int) -> None:
        """See `QueueDevice.launch`."""
        content = self.bus.view(self.registers[LIST], 4 * self.registers[WORDS]).view("<u4").tolist()
        timed = tuple(self._timed(content, now + self._start))
        self.queue.hand_over(timed, now, max((one.end - now for one in timed), default=self._start))

    def complete(self, launch: Launch[tuple[Timed, ...]]) -> Activity:
        """See `QueueDevice.complete`; the list's commands have lines of their own."""
        raise NotImplementedError("a list has an activity for each command")

    def advance(self, now: int) -> None:
        """See `Device.advance`: everything a list does happens as it ends, in the order of time."""
        for launch in self.queue.ended(now):
            self._carry_out(launch.work)
            for one in launch.work:
                moved, macs = self._moved(one.name, one.fields), self._macs(one.name, one.fields)
                self._activities.append(Activity(one.start, one.end, one.name, moved, macs, unit=one.unit))

    def _timed(self, content: list[int], begin: int) -> Iterator[Timed]:
        """When each command of a list begins and ends."""
        ends: dict[str, list[int]] = {self.name: [], self._dma: []}
        now = begin
        for name, fields in self._set.decode(content, self.name):
            if name == CommandSet.WAIT:
                own = ends[self._dma if fields["unit"] else self.name]
                now = max([now, *own[: max(0, len(own) - fields["unfinished"])][-1:]])
                continue
            unit = self._dma if name in self._transfers else self.name
            start = max([now, *ends[unit][-1:]])
            ends[unit].append(start + self._cycles(name, fields))
            yield Timed(name, fields, unit, start, ends[unit][-1])

    def _carry_out(self, work: tuple[Timed, ...]) -> None:
        """Every command's effect, in order of time. Ends come before what begins at the same moment."""
        effects: dict[int, Effect] = {}
        beside = _beside(work)
        events = sorted(
            (moment, order, n) for n, one in enumerate(work) for order, moment in ((1, one.start), (0, one.end))
        )
        for _, begins, number in events:
            one = work[number]
            if begins and beside[number]:
                effects[number] = self._effect(one)
            elif not begins and not beside[number]:
                self._compute(one.name, one.fields, self.bus)
            elif not begins:
                if not _same(effects[number], self._effect(one)):
                    what = f"{one.name} number {number} works on bytes that another unit changes at the same time"
                    raise SimulationError(what, where=self.name, hint="a wait is missing in the list")
                for region, places, values in effects.pop(number):
                    self._memory(region)[places] = values

    def _memory(self, region: str) -> Bytes:
        own = next(one for one in self.bus.regions if one.name == region)
        return self.bus.view(own.base, own.size)

    def _effect(self, one: Timed) -> Effect:
        """The bytes a command would write now; memory stays as it is."""
        before = {region.name: self._memory(region.name).copy() for region in self.bus.regions}
        self._compute(one.name, one.fields, self.bus)
        found: Effect = []
        for region, held in before.items():
            memory = self._memory(region)
            places = _changed(memory, held)
            found.append((region, places, memory[places].copy()))
            memory[places] = held[places]
        return found


def _beside(work: tuple[Timed, ...]) -> list[bool]:
    """For each command, whether another unit works during it; the commands of one unit follow one another."""
    units = {one.unit: [other for other in work if other.unit == one.unit] for one in work}
    ends = {unit: [one.end for one in ones] for unit, ones in units.items()}

    def met(one: Timed, unit: str) -> bool:
        later = units[unit][bisect_right(ends[unit], one.start) :][:1]
        return unit != one.unit and any(other.start < one.end for other in later)

    return [any(met(one, unit) for unit in units) for one in work]


def _nothing(name: str, fields: Mapping[str, int]) -> int:
    return 0


def _changed(memory: Bytes, held: Bytes) -> npt.NDArray[np.intp]:
    """The places where two memories of a size differ: looked for word by word first, as nearly all is alike."""
    whole = len(held) // _WORD * _WORD
    words = np.flatnonzero(memory[:whole].view(np.uint64) != held[:whole].view(np.uint64))
    near: npt.NDArray[np.intp] = np.concatenate(
        ((_WORD * words[:, None] + np.arange(_WORD)).ravel(), np.arange(whole, len(held)))
    )
    return near[np.flatnonzero(memory[near] != held[near])]


_WORD = 8


def _same(one: Effect, other: Effect) -> bool:
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a[1], b[1]) and np.array_equal(a[2], b[2]) for a, b in pairs)


document(__name__)
