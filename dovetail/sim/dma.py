"""A generic DMA: 1-D to 3-D strided copies with padding, a queue, and an interrupt.

Driver: emit/runtime/dma.h. Registers are 32 bits wide, at the byte offsets of `Register`.
"""

from __future__ import annotations

from enum import IntEnum
from operator import itemgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.errors import SimulationError
from dovetail.records import Record
from dovetail.sim.device import Activity, Bus, Bytes
from dovetail.sim.launch_queue import MASK32, Launch, QueueDevice
from dovetail.target.chip import DMA_PLACES

Count = TypeVar("Count", int, npt.NDArray[np.int64])

QUEUE = DMA_PLACES
DEFAULT_BYTES_PER_CYCLE = 8
DEFAULT_SETUP_CYCLES = 16


class DmaRegister(IntEnum):
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


class DmaJob(Record):
    """One transfer: the bytes that one START copies.

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
    row_bytes: Count,
    rows: Count,
    planes: Count,
    *,
    bytes_per_cycle: int = DEFAULT_BYTES_PER_CYCLE,
    setup_cycles: int = DEFAULT_SETUP_CYCLES,
) -> Count:
    """Return the cycles of a transfer: setup_cycles + planes * rows * ceil(row_bytes / bytes_per_cycle).

    Every destination row begins a new beat. The sizes, ints or int64 arrays, are those of the destination, padding
    included; `setup_cycles` pass before the first byte.
    """
    return setup_cycles + planes * rows * ((row_bytes + (bytes_per_cycle - 1)) // bytes_per_cycle)


def carry_out(job: DmaJob, bus: Bus) -> int:
    """Copy and fill as `job` says, and return how many bytes of the destination were written: the source is read whole
    before. Raises SimulationError where source or destination is not inside one memory."""
    copied, target = _source(job, bus), _destination(job, bus)
    image = np.full(target.shape, job.fill, dtype=np.uint8)
    image[:, job.top : job.top + job.rows, job.left : job.left + job.row_bytes] = copied
    target[...] = image
    return int(target.size)


def _source(job: DmaJob, bus: Bus) -> Bytes:
    strides = (job.source_plane_stride, job.source_row_stride)
    return _rows(bus, job.source, (job.planes, job.rows, job.row_bytes), strides)


def _destination(job: DmaJob, bus: Bus) -> Bytes:
    strides = (job.destination_plane_stride, job.destination_row_stride)
    return _rows(bus, job.destination, (job.planes, job.height, job.width), strides)


def _rows(bus: Bus, address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> Bytes:
    """Return a writable (planes, rows, bytes) view."""
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    extent = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1] + shape[2]
    span = bus.view(address, extent)
    return np.lib.stride_tricks.as_strided(span, shape=shape, strides=(*strides, 1))


class DmaDevice(QueueDevice[DmaJob]):
    """The DMA as a `Device`; each transfer costs `setup_cycles` beyond its rows."""

    def __init__(
        self,
        bus: Bus,
        name: str = "dma",
        bytes_per_cycle: int = DEFAULT_BYTES_PER_CYCLE,
        setup_cycles: int = DEFAULT_SETUP_CYCLES,
    ) -> None:
        super().__init__(bus, name, tuple(DmaRegister), QUEUE)
        self._bytes_per_cycle, self._setup_cycles = bytes_per_cycle, setup_cycles

    def read(self, offset: int, now: int) -> int:
        self.check_register(offset, "the DMA's header")
        if offset == DmaRegister.START:
            return self.queue.next_number - 1 & MASK32
        if offset == DmaRegister.DONE:
            return self.queue.collect()
        return self.queue.room if offset == DmaRegister.STATUS else self.registers[offset]

    def write(self, offset: int, value: int, now: int) -> None:
        self.check_register(offset, "the DMA's header")
        if offset in (DmaRegister.DONE, DmaRegister.STATUS):
            hint = "look at the driver: write SRC, DST, the sizes and START only"
            raise SimulationError(f"register {DmaRegister(offset).name} is read-only", where=self.name, hint=hint)
        if offset == DmaRegister.START:
            self._start(value, now)
        else:
            self.registers[offset] = value

    def complete(self, launch: Launch[DmaJob]) -> Activity:
        return Activity(launch.start, launch.end, describe(launch.work), moved=carry_out(launch.work, self.bus))

    def _start(self, mode: int, now: int) -> None:
        if not self.queue.room:
            what = f"transfer {self.queue.next_number} was started with all {QUEUE} places of the queue taken"
            raise SimulationError(what, where=self.name, hint="wait until STATUS is not 0")
        job = self._configured(mode)
        self._check(job)
        rates = {"bytes_per_cycle": self._bytes_per_cycle, "setup_cycles": self._setup_cycles}
        self.queue.hand_over(job, now, transfer_cycles(job.width, job.height, job.planes, **rates))

    def _configured(self, mode: int) -> DmaJob:
        if mode not in (1, 2, 3, 4):
            hint = "look at the driver: write the number of dimensions of the copy"
            raise SimulationError(f"START was written {mode}; it takes 1 to 4", where=self.name, hint=hint)
        r = DmaRegister
        given = [*itemgetter(r.SRC, r.DST, r.ROW_BYTES)(self.registers)]
        if mode > 1:
            given += itemgetter(r.ROWS, r.SRC_ROW_STRIDE, r.DST_ROW_STRIDE)(self.registers)
        if mode > 2:
            given += itemgetter(r.PLANES, r.SRC_PLANE_STRIDE, r.DST_PLANE_STRIDE)(self.registers)
        if mode > 3:
            fill, rows, sides = itemgetter(r.FILL, r.PAD_ROWS, r.PAD_BYTES)(self.registers)
            given += [fill & 0xFF, rows >> 16, rows & 0xFFFF, sides >> 16, sides & 0xFFFF]
        return DmaJob(*given)

    def _check(self, t: DmaJob) -> None:
        """Complain at START, where the culprit is still at hand, and not at the completion."""
        if not t.planes * t.height * t.width:
            return
        span = t.width
        for stride, count, name in sorted(
            [
                (t.destination_row_stride, t.height, "DST_ROW_STRIDE"),
                (t.destination_plane_stride, t.planes, "DST_PLANE_STRIDE"),
            ]
        ):
            if count > 1 and stride < span:
                raise SimulationError(
                    f"destination bytes overlap: {name} is {stride}, a row or plane has {span} bytes ({describe(t)})",
                    where=self.name,
                    hint="look at the driver: give rows and planes of the destination a stride of their size or more",
                )
            span += (count - 1) * stride if count > 1 else 0
        try:
            _source(t, self.bus)
            _destination(t, self.bus)
        except SimulationError as error:
            what = f"{error.what} (transfer {self.queue.next_number}: {describe(t)})"
            raise SimulationError(what, where=self.name, hint=error.hint) from None


def describe(job: DmaJob) -> str:
    """Return the transfer in a few words."""
    t = job
    shape = f"{t.planes}x{t.rows}x{t.row_bytes}" if t.planes > 1 else f"{t.rows}x{t.row_bytes}"
    padded = ", padded" if (t.width, t.height) != (t.row_bytes, t.rows) else ""
    return f"copy {shape} B{padded} {t.source:#x} -> {t.destination:#x}"
