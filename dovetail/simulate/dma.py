"""A generic DMA: 1-D to 3-D strided copies with padding, a queue, and an interrupt.

Driver: emit/runtime/dma.h. Registers are 32 bits wide, at the byte offsets of `Register`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.errors import SimulationError
from dovetail.simulate.device import Activity, Bus, Bytes

Count = TypeVar("Count", int, npt.NDArray[np.int64])

QUEUE = 16
"""Transfers that may be outstanding."""
DEFAULT_BYTES_PER_CYCLE = 8
DEFAULT_SETUP_CYCLES = 16


class Register(IntEnum):
    """Byte offsets of the registers. Strides are byte distances between the starts of rows or planes."""

    SRC = 0x00
    DST = 0x04
    ROW_BYTES = 0x08
    ROWS = 0x0C
    SRC_ROW_STRIDE = 0x10
    DST_ROW_STRIDE = 0x14
    PLANES = 0x18
    SRC_PLANE_STRIDE = 0x1C
    DST_PLANE_STRIDE = 0x20
    FILL = 0x24
    """Byte value of the padding."""
    PAD_ROWS = 0x28
    """top << 16 | bottom: rows added to every plane of the destination."""
    PAD_BYTES = 0x2C
    """left << 16 | right: bytes added to every row of the destination."""
    START = 0x30
    """Write 1, 2, 3: start a copy of that many dimensions; 4: a padded 3-D copy. Read: transfers started so far."""
    DONE = 0x34
    """Read: transfers finished so far, modulo 2^32; lowers the interrupt line."""
    STATUS = 0x38
    """Read: free places in the queue."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one START copies.

    Source rows of `row_bytes` bytes, `rows` of them in each of `planes` planes. In the destination every plane has
    top + rows + bottom rows of left + row_bytes + right bytes, the first starting at `destination`; what is not
    copied there is set to `fill`.
    """

    source: int
    destination: int
    row_bytes: int
    rows: int = 1
    source_row_stride: int = 0
    destination_row_stride: int = 0
    planes: int = 1
    source_plane_stride: int = 0
    destination_plane_stride: int = 0
    fill: int = 0
    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0

    @property
    def width(self) -> int:
        """Bytes of a destination row."""
        return self.left + self.row_bytes + self.right

    @property
    def height(self) -> int:
        """Rows of a destination plane."""
        return self.top + self.rows + self.bottom


def transfer_cycles(
    row_bytes: Count, rows: Count, planes: Count, *, bytes_per_cycle: int = DEFAULT_BYTES_PER_CYCLE,
    setup_cycles: int = DEFAULT_SETUP_CYCLES,
) -> Count:
    """Return the cycles of a transfer: setup_cycles + planes * rows * ceil(row_bytes / bytes_per_cycle).

    Every destination row begins a new beat. Planner and simulator share this; it takes ints or int64 arrays.

    Args:
        row_bytes: bytes of a destination row, padding included.
        rows: rows of a destination plane, padding included.
        planes: planes.
        bytes_per_cycle: bytes moved per cycle. setup_cycles: cycles before the first byte.
    """
    return setup_cycles + planes * rows * ((row_bytes + (bytes_per_cycle - 1)) // bytes_per_cycle)


def carry_out(transfer: Transfer, bus: Bus) -> int:
    """Copy and fill as `transfer` says; the source is read whole before anything is written.

    Returns:
        The number of destination bytes written.

    Raises:
        SimulationError: source or destination is not inside one memory.
    """
    t = transfer
    copied = _rows(bus, t.source, (t.planes, t.rows, t.row_bytes), (t.source_plane_stride, t.source_row_stride))
    target = _rows(bus, t.destination, (t.planes, t.height, t.width),
                   (t.destination_plane_stride, t.destination_row_stride))
    if target.shape == copied.shape:
        target[...] = copied.copy()
        return int(target.size)
    image = np.full(target.shape, t.fill, dtype=np.uint8)
    image[:, t.top : t.top + t.rows, t.left : t.left + t.row_bytes] = copied
    target[...] = image
    return int(target.size)


def _rows(bus: Bus, address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> Bytes:
    """Return a writable (planes, rows, bytes) view."""
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    extent = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + shape[2]
    span = bus.view(address, extent)
    return np.lib.stride_tricks.as_strided(span, shape=shape, strides=(*strides, 1))


@dataclass(frozen=True, slots=True)
class _Queued:
    transfer: Transfer
    start: int
    end: int


class DmaDevice:
    """The DMA as a `Device`.

    Args:
        bus: the memories it copies between.
        name: its name in reports and messages.
        bytes_per_cycle: bytes moved per cycle. setup_cycles: cycles each transfer costs beyond its rows.
    """

    def __init__(
        self, bus: Bus, name: str = "dma", bytes_per_cycle: int = DEFAULT_BYTES_PER_CYCLE,
        setup_cycles: int = DEFAULT_SETUP_CYCLES,
    ) -> None:
        self.name = name
        self._bus = bus
        self._bytes_per_cycle = bytes_per_cycle
        self._setup_cycles = setup_cycles
        self.reset()

    def reset(self) -> None:
        """See `Device.reset`."""
        self._registers = dict.fromkeys(Register, 0)
        self._queue: deque[_Queued] = deque()
        self._issued = 0
        self._finished = 0
        self._interrupt = False
        self._activities: list[Activity] = []

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        register = self._register(offset)
        if register is Register.START:
            return self._issued & 0xFFFFFFFF
        if register is Register.DONE:
            self._interrupt = False
            return self._finished & 0xFFFFFFFF
        if register is Register.STATUS:
            return QUEUE - len(self._queue)
        return self._registers[register]

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        register = self._register(offset)
        if register in (Register.DONE, Register.STATUS):
            raise SimulationError(f"register {register.name} is read-only", where=self.name,
                                  hint="look at the driver: write SRC, DST, the sizes and START only")
        if register is Register.START:
            self._start(value, now)
        else:
            self._registers[register] = value

    def next_event(self) -> int | None:
        """See `Device.next_event`."""
        return self._queue[0].end if self._queue else None

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        while self._queue and self._queue[0].end <= now:
            job = self._queue.popleft()
            moved = carry_out(job.transfer, self._bus)
            self._activities.append(Activity(job.start, job.end, describe(job.transfer), moved=moved))
            self._finished += 1
            self._interrupt = True

    def interrupt(self) -> bool:
        """See `Device.interrupt`."""
        return self._interrupt

    def activities(self) -> list[Activity]:
        """See `Device.activities`."""
        return list(self._activities)

    def _register(self, offset: int) -> Register:
        try:
            return Register(offset)
        except ValueError:
            raise SimulationError(f"there is no register at offset {offset:#x}", where=self.name,
                                  hint="look at the driver: its offsets must be those of the DMA's header") from None

    def _start(self, mode: int, now: int) -> None:
        if len(self._queue) >= QUEUE:
            raise SimulationError(f"transfer {self._issued + 1} was started with all {QUEUE} places of the queue taken",
                                  where=self.name, hint="wait until STATUS is not 0")
        transfer = self._configured(mode)
        self._check(transfer)
        start = max(now, self._queue[-1].end) if self._queue else now
        cycles = transfer_cycles(transfer.width, transfer.height, transfer.planes,
                                 bytes_per_cycle=self._bytes_per_cycle, setup_cycles=self._setup_cycles)
        self._queue.append(_Queued(transfer, start, start + cycles))
        self._issued += 1

    def _configured(self, mode: int) -> Transfer:
        r = self._registers
        if mode not in (1, 2, 3, 4):
            raise SimulationError(f"START was written {mode}; it takes 1 to 4", where=self.name,
                                  hint="look at the driver: write the number of dimensions of the copy")
        line = Transfer(r[Register.SRC], r[Register.DST], r[Register.ROW_BYTES])
        if mode == 1:
            return line
        planes = (r[Register.PLANES], r[Register.SRC_PLANE_STRIDE], r[Register.DST_PLANE_STRIDE])
        plane = Transfer(line.source, line.destination, line.row_bytes, r[Register.ROWS],
                         r[Register.SRC_ROW_STRIDE], r[Register.DST_ROW_STRIDE], *(planes if mode > 2 else (1,)))
        if mode < 4:
            return plane
        rows, sides = r[Register.PAD_ROWS], r[Register.PAD_BYTES]
        return replace(plane, fill=r[Register.FILL] & 0xFF, top=rows >> 16, bottom=rows & 0xFFFF, left=sides >> 16,
                       right=sides & 0xFFFF)

    def _check(self, t: Transfer) -> None:
        """Complain at START, where the culprit is still at hand, and not at the completion."""
        if not t.planes * t.height * t.width:
            return
        span = t.width
        for stride, count, name in sorted([(t.destination_row_stride, t.height, "DST_ROW_STRIDE"),
                                           (t.destination_plane_stride, t.planes, "DST_PLANE_STRIDE")]):
            if count > 1 and stride < span:
                raise SimulationError(f"destination bytes overlap: {name} is {stride}, what it steps over has {span} "
                                      f"bytes ({describe(t)})", where=self.name,
                                      hint="look at the driver: give rows and planes of the destination a stride of "
                                           "their size or more")
            span += (count - 1) * stride if count > 1 else 0
        try:
            _rows(self._bus, t.source, (t.planes, t.rows, t.row_bytes), (t.source_plane_stride, t.source_row_stride))
            _rows(self._bus, t.destination, (t.planes, t.height, t.width),
                  (t.destination_plane_stride, t.destination_row_stride))
        except SimulationError as error:
            raise SimulationError(f"{error.what} (transfer {self._issued + 1}: {describe(t)})", where=self.name,
                                  hint=error.hint) from None


def describe(transfer: Transfer) -> str:
    """Return the transfer in a few words."""
    t = transfer
    shape = f"{t.planes}x{t.rows}x{t.row_bytes}" if t.planes > 1 else f"{t.rows}x{t.row_bytes}"
    padded = ", padded" if (t.width, t.height) != (t.row_bytes, t.rows) else ""
    return f"copy {shape} B{padded} {t.source:#x} -> {t.destination:#x}"
