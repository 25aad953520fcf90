"""Notes every register access of a device, so that what a driver did can be shown when it hangs, and replayed."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.simulate.device import Activity, Bus, Clocked
from dovetail.simulate.factory import make_device
from dovetail.simulate.protocol import DeviceSpec

CAPACITY = 1 << 17
"""Accesses a file holds; the newest overwrite the oldest."""
_RECORD = struct.Struct("<QQIII")


@dataclass(frozen=True)
class Access:
    """One access of a register."""

    cycle: int
    offset: int
    """Bytes from the device's first register."""
    value: int
    written: bool

    def __str__(self) -> str:
        return f"cycle {self.cycle}: {'write' if self.written else 'read'} {self.offset:#x} = {self.value:#x}"


def watched(spec: DeviceSpec, file: Path) -> DeviceSpec:
    """The same device, its accesses noted in a file; what is read again with the same value is noted once."""
    inner = {"factory": spec.factory, "base": spec.base, "size": spec.size, "arguments": dict(spec.arguments)}
    return replace(spec, factory="dovetail.simulate.watch:watch", arguments={"inner": inner, "file": str(file)})


def accesses(file: Path) -> list[Access]:
    """What was noted, the oldest first; nothing where no device wrote the file."""
    data = file.read_bytes() if file.is_file() else b""
    whole = data[: len(data) // _RECORD.size * _RECORD.size]
    return [Access(cycle, offset, value, bool(kind)) for _, cycle, offset, value, kind in
            sorted(_RECORD.iter_unpack(whole))]  # fmt: skip


def watch(bus: Bus, inner: dict[str, Any], file: str) -> Watched:
    """The factory the simulator calls."""
    device = make_device(DeviceSpec(**inner), bus)
    return ClockedWatched(device, file) if isinstance(device, Clocked) else Watched(device, file)


class Watched:
    """A device that passes everything on."""

    def __init__(self, device: Any, file: str) -> None:
        self._device = device
        self.name: str = device.name
        self._file = os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        self._count, self._last = 0, (-1, -1, False)

    def _note(self, offset: int, value: int, now: int, written: bool) -> None:
        if not written and (offset, value, written) == self._last:
            return
        self._last = (offset, value, written)
        record = _RECORD.pack(self._count, now, offset, value & 0xFFFFFFFF, written)
        os.pwrite(self._file, record, self._count % CAPACITY * _RECORD.size)
        self._count += 1

    def reset(self) -> None:
        """See `Device.reset`."""
        self._device.reset()

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        value: int = self._device.read(offset, now)
        self._note(offset, value, now, False)
        return value

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        self._note(offset, value, now, True)
        self._device.write(offset, value, now)

    def next_event(self) -> int | None:
        """See `Device.next_event`."""
        event: int | None = self._device.next_event()
        return event

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        self._device.advance(now)

    def interrupt(self) -> bool:
        """See `Device.interrupt`."""
        return bool(self._device.interrupt())

    def activities(self) -> Sequence[Activity]:
        """See `Device.activities`."""
        found: Sequence[Activity] = self._device.activities()
        return found


class ClockedWatched(Watched):
    """The same of a device in Verilog."""

    def clock(self, until: int) -> int:
        """See `Clocked.clock`."""
        return int(self._device.clock(until))
