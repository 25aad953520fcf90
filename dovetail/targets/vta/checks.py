"""Checks of every access to SRAM and DRAM: races, unwritten and rewritten data, bounds.

An access A happens before an access B when the clock of B's instruction knows A's (stream.py). Two conflicting
accesses are always seen one after the other here, and the later one is faulty unless the earlier happens before it;
as instructions of a queue are in order, looking at the last of each queue finds all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from dovetail.records import Record
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import Instruction, Load, Store, VtaMemory, element_bytes
from dovetail.targets.vta.stream import COMPUTE, LOAD, QUEUES, STORE, Fault, InstructionStart, StreamError, name

ALL_CHECKS = frozenset(Fault)
"""Every check there is. DECODE, DEADLOCK and BOUNDS are made whatever is asked for."""

Indices = npt.NDArray[np.int64]
_ADDRESSES = 1 << 32


class Pointers(Record):
    """Byte addresses the DRAM elements of each memory are counted from."""

    uop: int
    inp: int
    wgt: int
    acc: int
    out: int

    def base(self, memory: VtaMemory) -> int:
        """The address `memory` counts from."""
        return (self.uop, self.wgt, self.inp, self.acc, self.out)[memory]


class BufferRange(Record):
    """Bytes of DRAM a stream may touch."""

    name: str
    address: int
    nbytes: int
    readable: bool
    writable: bool
    complete: bool = False
    """Whether every byte must be stored by the stream."""


class DramRows(Record):
    """DRAM bytes of a transfer: `count` rows of `nbytes` bytes, `step` bytes apart."""

    address: int
    nbytes: int
    count: int
    step: int

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + (self.count - 1) * self.step + self.nbytes if self.count and self.nbytes else self.address

    def starts(self) -> Indices:
        """Address of each row."""
        found: Indices = self.address + self.step * np.arange(self.count, dtype=np.int64)
        return found

    def bytes(self) -> Indices:
        """Address of every byte, row after row."""
        found: Indices = (self.starts()[:, None] + np.arange(self.nbytes, dtype=np.int64)).reshape(-1)
        return found


def rows_of(instruction: Load | Store, config: VtaConfig, pointers: Pointers) -> DramRows:
    """The DRAM bytes of a LOAD or STORE."""
    element = element_bytes(instruction.memory, config)
    address = pointers.base(instruction.memory) + instruction.dram * element
    return DramRows(address, instruction.x_size * element, instruction.y_size, instruction.x_stride * element)


class _Shadow:
    """Numbers of the instructions that accessed each place of a memory last."""

    def __init__(self, instructions: Sequence[Instruction], checks: Collection[Fault], text: str) -> None:
        """`text` words a place."""
        self._instructions, self._checks, self._text = instructions, checks, text
        self._race = Fault.RACE in checks

    def _check_order(
        self,
        issue: InstructionStart,
        places: Indices,
        others: npt.NDArray[np.int32],
        queue: int,
        verbs: tuple[str, str],
    ) -> None:
        """Raise RACE where one of the last accesses of a queue is in no order with `issue`."""
        late = others > issue.clock[queue]
        if self._race and late.any():
            at = int(late.argmax())
            place, other = self._text.format(int(places[at])), int(others[at])
            does = f"{issue} {verbs[0]} {place}, which {name(self._instructions, other)} {verbs[1]}"
            whose = f"the other's queue ({QUEUES[queue]} for instruction {other})"
            hint = f"let the later of the two pop a token {whose} pushes"
            raise StreamError(Fault.RACE, f"{does}, and no token makes one wait for the other", hint=hint)


class SramShadow(_Shadow):
    """Last writers and readers of the entries of one memory; only the queues `writer` and `reader` may access it."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        memory: VtaMemory,
        entries: int,
        writer: int,
        reader: int,
        checks: Collection[Fault],
    ) -> None:
        super().__init__(instructions, checks, f"{memory.name} entry {{}}")
        self._memory, self._entries, self._writer, self._reader = memory, entries, writer, reader
        self._find_unwritten = Fault.UNINITIALISED in checks
        self._unwritten_read: StreamError | None = None
        self._written: npt.NDArray[np.int32] = np.full(entries, -1, np.int32)
        self._read: npt.NDArray[np.int32] = np.full(entries, -1, np.int32)

    def check_range(self, issue: InstructionStart, first: int, last: int) -> None:
        """Raise BOUNDS unless entries first..last are in the memory."""
        if first < 0 or last >= self._entries:
            what = f"{issue} touches {self._memory.name} entries {first} to {last}; there are 0 to {self._entries - 1}"
            hint = "look at the instruction's first entry and counts against the memory's size"
            raise StreamError(Fault.BOUNDS, what, hint=hint)

    def read(self, issue: InstructionStart, entries: Indices) -> None:
        """Note a read; raises RACE, and UNINITIALISED when the memory is read by the queue that writes it.

        For another queue that has to wait: a write that comes later and in no order with the read makes it a race.
        """
        written = self._written[entries]
        if self._find_unwritten and self._unwritten_read is None and (written < 0).any():
            entry = int(entries[int((written < 0).argmax())])
            what = f"{issue} reads {self._memory.name} entry {entry}, which this stream has not written"
            hint = "load the entry first, or reset it with a GEMM"
            self._unwritten_read = StreamError(Fault.UNINITIALISED, what, hint=hint)
            if self._writer == self._reader:
                raise self._unwritten_read
        self._check_order(issue, entries, written, self._writer, ("reads", "writes"))
        self._read[entries] = issue.number

    def check_reads(self) -> None:
        """Raise UNINITIALISED for the first read, if any, of what was not written before."""
        if self._unwritten_read is not None:
            raise self._unwritten_read

    def write(self, issue: InstructionStart, entries: Indices) -> None:
        """Note a write; raises RACE."""
        self._check_order(issue, entries, self._read[entries], self._reader, ("writes", "reads"))
        self._written[entries] = issue.number

    def forget(self, entries: Indices) -> None:
        """Take entries as never written: what they hold now, nothing may read."""
        self._written[entries] = -1


def sram_shadows(
    instructions: Sequence[Instruction], config: VtaConfig, checks: Collection[Fault]
) -> dict[VtaMemory, SramShadow]:
    """The shadows of all memories."""
    sizes = {
        VtaMemory.UOP: (config.uop_entries, COMPUTE, COMPUTE),
        VtaMemory.WGT: (config.wgt_entries, LOAD, COMPUTE),
        VtaMemory.INP: (config.inp_entries, LOAD, COMPUTE),
        VtaMemory.ACC: (config.acc_entries, COMPUTE, COMPUTE),
        VtaMemory.OUT: (config.acc_entries, COMPUTE, STORE),
    }
    return {memory: SramShadow(instructions, memory, *size, checks) for memory, size in sizes.items()}


class DramShadow(_Shadow):
    """Last stores and loads of the DRAM bytes this stream stores; checks that accesses stay in the buffers.

    Only bytes some STORE of the stream covers are followed: others cannot conflict.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        config: VtaConfig,
        pointers: Pointers,
        checks: Collection[Fault],
        buffers: Sequence[BufferRange] | None,
    ) -> None:
        super().__init__(instructions, checks, "address {:#x}")
        self._buffers = buffers
        rows = [rows_of(i, config, pointers) for i in instructions if isinstance(i, Store)]
        self._starts, self._ends = merged([r for r in rows if r.end > r.address and r.end <= _ADDRESSES])
        self._offsets = np.concatenate(([0], np.cumsum(self._ends - self._starts)))
        total = int(self._offsets[-1])
        self._stored: npt.NDArray[np.int32] = np.full(total, -1, np.int32)
        self._loaded = {queue: np.full(total, -1, np.int32) for queue in (LOAD, COMPUTE)}

    def load(self, issue: InstructionStart, rows: DramRows) -> None:
        """Note a LOAD; raises BOUNDS or RACE."""
        self._check_bounds(issue, rows, writes=False)
        addresses, places = self._followed(rows)
        self._check_order(issue, addresses, self._stored[places], STORE, ("loads", "stores"))
        self._loaded[issue.queue][places] = issue.number

    def store(self, issue: InstructionStart, rows: DramRows) -> None:
        """Note a STORE; raises BOUNDS, RACE or REWRITTEN."""
        self._check_bounds(issue, rows, writes=True)
        again = Fault.REWRITTEN in self._checks
        if again and rows.count > 1 and rows.step < rows.nbytes:
            what = f"{issue} stores address {rows.address + rows.step:#x} twice itself"
            what += f": rows of {rows.nbytes} bytes are {rows.step} bytes apart"
            hint = "let rows in DRAM be at least as far apart as they are long"
            raise StreamError(Fault.REWRITTEN, what, hint=hint)
        addresses, places = self._followed(rows)
        for queue, loaded in self._loaded.items():
            self._check_order(issue, addresses, loaded[places], queue, ("stores", "loads"))
        before = self._stored[places]
        if again and (before >= 0).any():
            place = int((before >= 0).argmax())
            other = name(self._instructions, int(before[place]))
            what = f"{issue} stores address {int(addresses[place]):#x}, which {other} stored before"
            hint = "store every byte once: look at the addresses of the two"
            raise StreamError(Fault.REWRITTEN, what, hint=hint)
        self._stored[places] = issue.number

    def check_complete(self) -> None:
        """Raise UNWRITTEN when a byte of a buffer that is to be filled was not stored."""
        for buffer in self._buffers or ():
            if not buffer.complete or not buffer.nbytes or Fault.UNWRITTEN not in self._checks:
                continue
            place = int(np.searchsorted(self._starts, buffer.address, side="right")) - 1
            end = int(self._ends[place]) if place >= 0 else 0
            missing = max(buffer.address, end)
            if missing < buffer.address + buffer.nbytes:
                what = f"no instruction stores address {missing:#x}, byte {missing - buffer.address}"
                what += f" of the {buffer.nbytes} of buffer '{buffer.name}'{self._beside(place, missing, buffer)}"
                hint = "store the rest of the buffer, or give the STORE its whole size"
                raise StreamError(Fault.UNWRITTEN, what, hint=hint)

    def _beside(self, place: int, missing: int, buffer: BufferRange) -> str:
        """Which STORE stored the byte before the missing one, or the next one that was, in words."""
        if missing > buffer.address:
            number, which = int(self._stored[int(self._offsets[place + 1]) - 1]), "the byte before"
        elif place + 1 < len(self._starts) and int(self._starts[place + 1]) < buffer.address + buffer.nbytes:
            number, which = int(self._stored[int(self._offsets[place + 1])]), "the first byte after"
        else:
            return "; nothing is stored there"
        return f"; {name(self._instructions, number)} stores {which}"

    def _followed(self, rows: DramRows) -> tuple[Indices, Indices]:
        """The addresses of the transfer that are followed, and their places."""
        first = int(np.searchsorted(self._ends, rows.address, side="right"))
        if rows.end <= rows.address or first == len(self._starts) or self._starts[first] >= rows.end:
            nothing: Indices = np.zeros(0, np.int64)
            return nothing, nothing
        addresses = rows.bytes()
        segment = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = (segment >= 0) & (addresses < self._ends[segment])
        addresses, segment = addresses[inside], segment[inside]
        return addresses, self._offsets[segment] + addresses - self._starts[segment]

    def _check_bounds(self, issue: InstructionStart, rows: DramRows, writes: bool) -> None:
        if rows.end > _ADDRESSES:
            what = f"{issue} reaches address {rows.end - 1:#x}; the last one is {_ADDRESSES - 1:#x}"
            hint = "look at the address: it is counted in elements of the memory's type"
            raise StreamError(Fault.BOUNDS, what, hint=hint)
        if self._buffers is None or rows.end == rows.address:
            return
        starts = rows.starts()
        allowed = np.zeros(rows.count, bool)
        for buffer in self._buffers:
            if buffer.writable if writes else buffer.readable:
                end = buffer.address + buffer.nbytes
                allowed |= (starts >= buffer.address) & (starts + rows.nbytes <= end)
        if not allowed.all():
            raise self._outside(issue, int(starts[int((~allowed).argmax())]), rows.nbytes, writes)

    def _outside(self, issue: InstructionStart, start: int, nbytes: int, writes: bool) -> StreamError:
        verb, kind = ("stores", "writable") if writes else ("loads", "readable")
        what = f"{issue} {verb} the row {start:#x} to {start + nbytes - 1:#x}"
        known = ", ".join(
            f"'{b.name}' {b.address:#x} to {b.address + b.nbytes - 1:#x}"
            f"{' readable' if b.readable else ''}{' writable' if b.writable else ''}"
            for b in self._buffers or ()
        )
        what += f", which is not inside one {kind} buffer"
        return StreamError(Fault.BOUNDS, what, hint=f"look at the address; buffers: {known}")


def merged(rows: Sequence[DramRows]) -> tuple[Indices, Indices]:
    """The union of the rows as disjoint sorted intervals that do not touch: their starts and ends."""
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts = np.concatenate([r.starts() for r in rows])
    ends = starts + np.concatenate([np.full(r.count, r.nbytes, np.int64) for r in rows])
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], reach[last]
