"""Gemmini behind the core's RoCC port: when its instructions are carried out, and what the order in DRAM allows.

Three units work side by side: moves in, the array, moves out. Each takes its instructions in order; rows of the local
memories that another unit still works on are waited for, as its reservation station does. DRAM is not: what is moved
out is in memory only behind a `fence`, a move in that reads it before, or a move out over what is still read, is an
error, and so is what the core changes of an operand before the fence. Cycles (docs/gemmini.md has their sources):

- an instruction is taken in a cycle of the core, and stalls it while its unit's entries are full;
- a row moves in or out in a cycle for each 16 bytes, zeros and repeated rows a cycle each;
- the array takes a row a cycle, at least 4, and those of new weights; results come 2 * dim cycles later;
- memory answers after `latency` cycles, transfers overlap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import SimulationError
from dovetail.sim.device import Activity, Bus, Bytes, Coprocessor, Taken
from dovetail.targets.gemmini.loops import expanded
from dovetail.targets.gemmini.machine import (
    COMPUTE,
    COMPUTE_KEPT,
    CONFIG,
    LOADS,
    MVOUT,
    GemminiMachine,
    LocalOperand,
    bits,
)

BUS_BYTES = 16
"""A cycle (dma_buswidth 128, Configs.scala)."""
ENTRIES = {"load": 8, "array": 16, "store": 4}
"""Entries of the reservation station (reservation_station_entries_*, Configs.scala)."""


@dataclass
class AskedWork:
    """All that was asked for between two settings of the array: a launch of ours."""

    start: int
    end: int
    macs: int = 0
    instructions: int = 0


@dataclass
class Touched:
    """Bytes of a memory that moves touch which no fence has ended, and what was read."""

    written: NDArray[np.bool_]
    read: NDArray[np.bool_]
    before: list[tuple[int, int, int, int, Bytes]] = field(default_factory=list)
    """Address, rows, bytes, stride and contents of what was read."""


class GemminiDevice(Coprocessor):
    """The device.

    Args:
        bus: the memories it reaches. dim: rows and columns of the array.
        scratchpad: bytes. accumulator: bytes. latency: cycles from a request to memory's answer.
    """

    name = "gemmini"

    def __init__(
        self, bus: Bus, dim: int = 16, scratchpad: int = 256 << 10, accumulator: int = 64 << 10, latency: int = 40
    ) -> None:
        self.bus, self.latency = bus, latency
        self._sizes = (dim, scratchpad // dim, accumulator // (4 * dim))
        self.reset()

    def reset(self) -> None:
        self.machine = OrderedMachine(self.bus, *self._sizes)
        self._free = dict.fromkeys(ENTRIES, 0)
        self._open = {unit: deque[int](maxlen=count) for unit, count in ENTRIES.items()}
        lengths = [len(self.machine.scratchpad), len(self.machine.accumulator)]
        self._read = [np.zeros(n, np.int64) for n in lengths]
        self._written = {unit: [np.zeros(n, np.int64) for n in lengths] for unit in ("load", "array")}
        self._jobs: list[AskedWork] = []

    def activities(self) -> list[Activity]:
        return [
            Activity(job.start, job.end, f"{job.instructions} instructions", macs=job.macs)
            for job in self._jobs
            if job.instructions
        ]

    def fence(self, now: int) -> int:
        self.machine.settle()
        return max(now, *self._free.values(), *(ends[-1] for ends in self._open.values() if ends))

    def instruct(self, word: int, first: int, second: int, now: int) -> Taken:
        funct = word >> 25
        if funct == CONFIG and first & 0x83 == 0:
            self._jobs.append(AskedWork(now, now))
        elif not self._jobs:
            raise self.machine.refuse("the array is told its work before it is set up (config_ex)")
        self._jobs[-1].instructions += 1
        for step in expanded(self.machine, funct, first, second):
            now = self._taken(*step, now)
        return Taken(now)

    def _taken(self, funct: int, first: int, second: int, now: int) -> int:
        """Carry out a single instruction; the cycle the core goes on at."""
        unit = "load" if funct in LOADS else "store" if funct == MVOUT else "array"
        if funct in (*LOADS, MVOUT, COMPUTE, COMPUTE_KEPT):
            ends = self._open[unit]
            now = max(now, ends[0]) if len(ends) == ends.maxlen else now
            cycles, late, reads, writes = self._work(funct, first, second)
            waits = [self._after(part, unit, write) for parts, write in ((reads, 0), (writes, 1)) for part in parts]
            start = max([now, self._free[unit], *waits])
            self._free[unit] = start + cycles
            end = start + cycles + late
            for kind, part in reads:
                held = self._read[kind][part]
                np.maximum(held, start + cycles, out=held)
            for kind, part in writes:
                self._written[unit][kind][part] = end
            ends.append(max(end, ends[-1]) if ends else end)
            self._jobs[-1].end = max(self._jobs[-1].end, end)
        self.machine.execute(funct, first, second)
        return now

    def _after(self, rows: Rows, unit: str, write: int) -> int:
        """The cycle from which rows may be read, or written: what other units do with them is over by then."""
        kind, part = rows
        if part.stop > len(self._read[kind]):
            memory = ("scratchpad", "accumulator")[kind]
            raise self.machine.refuse(f"rows up to {part.stop - 1} of the {memory}, which has {len(self._read[kind])}")
        known = [int(own[kind][part].max()) for other, own in self._written.items() if other != unit]
        return max([*known, int(self._read[kind][part].max())] if write else known)

    def _work(self, funct: int, first: int, second: int) -> tuple[int, int, list[Rows], list[Rows]]:
        """Cycles of a unit, those until its results are there, and rows it reads and writes."""
        machine, place, dim = self.machine, LocalOperand(second), self.machine.dim
        if funct in LOADS:
            own = machine.loading[LOADS[funct]]
            width = place.columns * (4 if place.accumulator and not own.shrunk else 1)
            fetched = place.rows if first and own.stride else 0
            blocks = range(-(-place.columns // dim))
            row = place.row & 0x1FFFFFFF
            touched = [spanned(int(place.accumulator), row + b * own.block, place.rows) for b in blocks]
            beats = max(fetched * -(-width // BUS_BYTES), place.rows * len(blocks))
            return beats, self.latency if first else 0, [], touched
        if funct == MVOUT:
            pool, kind = machine.pool, int(place.accumulator)
            if pool >> 4 & 3:
                counts = bits(pool, 32, 8) * bits(pool, 40, 8)
                held = bits(pool, 48, 8) * bits(pool, 56, 8)
                return counts * bits(pool, 6, 2) ** 2, self.latency, [spanned(kind, place.row, held)], []
            width = place.columns * (4 if place.full else 1)
            blocks = range(-(-place.columns // dim))
            reads = [spanned(kind, place.row + b * dim, place.rows) for b in blocks]
            return place.rows * -(-width // BUS_BYTES), self.latency, reads, []
        target, weights, fresh = machine.target, machine.weights, funct == COMPUTE and not machine.weights.is_nothing
        a = LocalOperand(first)
        self._jobs[-1].macs += a.rows * a.columns * target.columns
        reads = [spanned(0, a.row, a.rows, machine.a_stride)] if not a.is_nothing else []
        reads += [spanned(0, weights.row, weights.rows)] if fresh else []
        written = [spanned(1, target.row & 0x1FFFFFFF, target.rows, machine.c_stride)] if not target.is_nothing else []
        return max(a.rows, weights.rows if fresh else 1, 4), 2 * dim, reads, written


Rows = tuple[int, slice]
"""A local memory (0 the scratchpad, 1 the accumulator), and rows of it."""


def spanned(kind: int, first: int, count: int, step: int = 1) -> Rows:
    """So many rows."""
    step = max(step, 1)
    return kind, slice(first, first + (count - 1) * step + 1, step)


class OrderedMachine(GemminiMachine):
    """The machine on memory in which moves out are seen behind the next fence only."""

    def __init__(self, bus: Bus, dim: int, scratchpad_rows: int, accumulator_rows: int) -> None:
        super().__init__(bus, dim, scratchpad_rows, accumulator_rows)
        self._orders = {r.name: Touched(np.zeros(r.size, np.bool_), np.zeros(r.size, np.bool_)) for r in bus.regions}
        self._late: list[tuple[int, int, int, int, Bytes]] = []

    def _marks(self, address: int, rows: int, width: int, stride: int) -> tuple[Touched, NDArray[np.intp]]:
        """The marks of the memory some rows lie in, and the places of their bytes."""
        region = next(one for one in self.bus.regions if one.base <= address < one.base + one.size)
        places = address - region.base + np.arange(rows)[:, None] * stride + np.arange(width)
        return self._orders[region.name], places

    def dram(self, address: int, rows: int, width: int, stride: int) -> Bytes:
        held = super().dram(address, rows, width, stride)
        order, places = self._marks(address, rows, width, stride)
        if order.written[places].any():
            raise self._unordered(f"a move in reads bytes at {address:#x} that a move out before it writes")
        order.read[places] = True
        order.before.append((address, rows, width, stride, held.copy()))
        return held

    def write(self, address: int, values: Bytes, stride: int) -> None:
        super().dram(address, len(values), values.shape[1], stride)  # it is there
        order, places = self._marks(address, len(values), values.shape[1], stride)
        if order.read[places].any():
            raise self._unordered(f"a move out writes bytes at {address:#x} that a move in before it reads")
        order.written[places] = True
        self._late.append((address, len(values), values.shape[1], stride, values.copy()))

    def _unordered(self, what: str) -> SimulationError:
        hint = "a fence is missing between the two: DRAM order is not kept"
        return SimulationError(what, where="gemmini", hint=hint)

    def settle(self) -> None:
        """The effect of a fence: all that was moved out is in memory, and what was moved in was as it still is."""
        for order in self._orders.values():
            for address, rows, width, stride, before in order.before:
                if not np.array_equal(super().dram(address, rows, width, stride), before):
                    raise self._unordered(f"the core changed bytes at {address:#x} that a move in reads")
                order.read[self._marks(address, rows, width, stride)[1]] = False
            order.before.clear()
        for address, rows, width, stride, values in self._late:
            super().dram(address, rows, width, stride)[...] = values
            order, places = self._marks(address, rows, width, stride)
            order.written[places] = False
        self._late.clear()
