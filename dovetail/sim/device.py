"""Devices of the simulated chip: what one is, the memories it reaches, how it is made and watched, where it answers."""

from __future__ import annotations

import importlib
import os
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from dovetail.documented import document
from dovetail.errors import SimulationError
from dovetail.names import names
from dovetail.records import Record, field
from dovetail.target.chip import Memory
from dovetail.user_file import import_file

if TYPE_CHECKING:
    from dovetail.target.description import Target
    from dovetail.target.engine import DeviceModel

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional array of bytes."""

MOST_NOTED = 1 << 17
"""Accesses a file holds; the newest overwrite the oldest."""
_RECORD = struct.Struct("<QQIII")
INITIAL_BYTE = 0xA5
"""Memories start filled with this, so that firmware reading what nobody wrote does not see friendly zeros."""


class Bus(Protocol):
    """The memories a device may reach."""

    @property
    def regions(self) -> Sequence[MemoryRegion]:
        """The memories, in order of address."""

    def view(self, address: int, nbytes: int) -> Bytes:
        """A writable view of `nbytes` bytes at `address`; raises SimulationError where they are not in one memory."""


class Activity(Record):
    """A finished job of a device, one bar of the timeline."""

    start: int
    """Cycle the job started at."""
    end: int
    """Cycle its effects became visible at."""
    label: str
    """Description of the job, for people."""
    moved: int = 0
    """Bytes written by a transfer, 0 for engines."""
    macs: int = 0
    """Useful multiply-accumulates of an engine's job, 0 for transfers."""
    instructions: int = 0
    """Executed by a further core, 0 for devices."""
    unit: str = ""
    """Part of the device that did it, as a line of its own in the timeline; empty for the device."""


class Device(Protocol):
    """A memory-mapped device; a job's memory effects happen at its completion, in `advance`.

    A class may inherit what a device without time does. One that does not know when its next interrupt comes before it
    gets there also has `clock(until)`: it carries on to cycle `until`, or to the one in which its interrupt line rises,
    and returns where it stands; its events are steps.
    """

    name: str
    """Name in messages and the timeline."""

    def reset(self) -> None:
        """Return to the state after power-on and forget all activities."""
        return

    def read(self, offset: int, now: int) -> int:
        """Read the 32-bit register at byte `offset` at cycle `now` (`advance(now)` was called before)."""

    def write(self, offset: int, value: int, now: int) -> None:
        """Write the 32-bit register at byte `offset` at cycle `now` (`advance(now)` was called before)."""

    def next_event(self) -> int | None:
        """Return the cycle of the next completion, None when idle."""
        return None

    def advance(self, now: int) -> None:
        """Carry out everything that completes at or before cycle `now`."""
        return

    def interrupt(self) -> bool:
        """Return the level of the interrupt line; it stays high until the driver acknowledges."""
        return False

    def activities(self) -> list[Activity]:
        """Return the jobs finished since `reset()`, in order of completion."""
        return []


class Taken(Record):
    """The answer of a device to an instruction of the core."""

    resumed: int
    """Cycle at which the core continues: that of the instruction, or later if the core was stalled."""
    result: int | None = None
    """The number for rd; None for nothing."""


class Coprocessor(Device, Protocol):
    """A device that instructions of the core lead to (`DeviceModel.opcode`), as RoCC and custom function units are.
    Nothing answers at addresses, so it needs neither `read` nor `write`."""

    def read(self, offset: int, now: int) -> int:
        return 0

    def write(self, offset: int, value: int, now: int) -> None:
        return

    def instruct(self, word: int, first: int, second: int, now: int) -> Taken:
        """Take an instruction at cycle `now` (`advance(now)` was called before).

        Args:
            word: its 32 bits.
            first: contents of rs1, as many bits as the core has, without sign. second: those of rs2.
            now: the core's clock, the instruction's own cycle included.
        """

    def fence(self, now: int) -> int:
        """The cycle at which a `fence` of the core at cycle `now` is over: all earlier work has finished."""
        return now


def access(kind: str, device: Device, offset: int, value: int, now: int) -> int:
    """Carry out "read" or "write" of a register; returns the value read or written."""
    if kind == "read":
        return device.read(offset, now)
    device.write(offset, value, now)
    return value


class MemoryRegion(Record):
    """A memory of the chip: name, base address, and size in bytes."""

    name: str
    """Name of the memory."""
    base: int
    """Address of the first byte."""
    size: int
    """Size in bytes."""
    core: bool = True
    """Whether cores reach it."""
    memory: Memory | None = None
    """Description with the waits of reads; None if reads do not wait."""


def regions_of(target: Target) -> tuple[MemoryRegion, ...]:
    """The memories of a target."""
    return tuple(
        MemoryRegion(m.name, m.base, m.size, m.is_reached_by("core"), m if m.waits or m.pj_per_byte else None)
        for m in target.memories
    )


MOST_BYTES = 2 << 30
"""Bytes of memories that are simulated, in all."""


class MemoryBus:
    """A `Bus` over numpy arrays, one per memory; raises SimulationError where two overlap, or one is empty."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self.regions = tuple(sorted(regions, key=lambda region: region.base))
        for lower, upper in pairwise(self.regions):
            if lower.base + lower.size > upper.base:
                raise SimulationError(
                    f"it overlaps '{lower.name}' at {upper.base:#x}",
                    where=f"memory '{upper.name}'",
                    hint="move one of the two in the target, or make it smaller",
                )
        if (total := sum(region.size for region in self.regions)) > MOST_BYTES:
            largest = max(self.regions, key=lambda region: region.size).name
            what = f"the memories have {total:,} bytes, the simulator holds at most {MOST_BYTES:,}"
            raise SimulationError(what, where="target", hint=f"make '{largest}' smaller (--set {largest}.size=256M)")
        self.arrays: dict[str, Bytes] = {}
        for region in self.regions:
            if region.size <= 0:
                hint = "give the memory of the target a size above 0"
                raise SimulationError(f"it has {region.size} bytes", where=f"memory '{region.name}'", hint=hint)
            self.arrays[region.name] = allocate(region.size)

    def view(self, address: int, nbytes: int) -> Bytes:
        """See `Bus.view`."""
        for region in self.regions:
            offset = address - region.base
            if offset >= 0 and nbytes >= 0 and offset + nbytes <= region.size:
                return self.arrays[region.name][offset : offset + nbytes]
        hint = f"look at the addresses the driver writes; {self.described()}"
        raise SimulationError(f"{nbytes} bytes at {address:#x} are not inside one memory", where="bus", hint=hint)

    def described(self) -> str:
        """The memories and their addresses, for messages."""
        return f"memories: {', '.join(f'{r.name} {r.base:#x}..{r.base + r.size - 1:#x}' for r in self.regions)}"


def allocate(nbytes: int) -> Bytes:
    """An array of bytes of `INITIAL_BYTE`, page-aligned and backed by whole pages, as the emulator maps these."""
    page = 4096
    backing = np.empty((nbytes + page - 1) // page * page + page, dtype=np.uint8)
    start = -backing.ctypes.data % page
    backing[:] = INITIAL_BYTE
    return backing[start : start + nbytes]


def read_number(bus: Bus, address: int, nbytes: int) -> int:
    """The little-endian number without sign at an address; raises SimulationError for an address outside the
    memories."""
    return int.from_bytes(bus.view(address, nbytes).tobytes(), "little")


class DeviceSpec(Record):
    """A device of the simulated chip, in the form that simulators take."""

    factory: str
    """Function or class, as "module:function" or "path/file.py:function". It is called with the bus and `arguments`,
    and returns a `Device`."""
    base: int
    """Address of the first register."""
    size: int
    """Bytes of address space, all for this device."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, as JSON allows them."""
    opcode: int = 0
    """Opcode of the core's instructions that lead to the device; 0 for a device with registers."""


def spec_of(model: DeviceModel) -> DeviceSpec:
    """A target's device model, in the form that simulators take."""
    return DeviceSpec(model.factory, model.base, model.size, model.arguments, model.opcode)


def target_devices(target: Target, instead: Mapping[str, DeviceModel] | None = None) -> tuple[DeviceSpec, ...]:
    """Every engine's device, some by name in place of the target's own, and the DMA."""
    engines = [engine for engine in target.engines if engine.device]
    models = [(instead or {}).get(engine.name, engine.device) for engine in engines]
    found = [spec_of(model) for model in models if model]
    if target.dma:
        arguments = {name: getattr(target.dma, name) for name in ("name", "bytes_per_cycle", "setup_cycles")}
        found.append(DeviceSpec("dovetail.sim.dma:DmaDevice", target.dma.base, 0x100, arguments))
    return tuple(found)


def make_device(spec: DeviceSpec, bus: Bus) -> Device:
    """The device its factory makes; raises SimulationError if there is no such factory or it refuses the arguments."""
    factory = find(spec.factory, "device factory")
    try:
        device: Device = factory(bus, **spec.arguments)
    except TypeError as error:
        hint = f"let it take the bus and {', '.join(sorted(spec.arguments)) or 'nothing else'}"
        raise SimulationError(f"the device factory failed: {error}", where=spec.factory, hint=hint) from None
    return device


def find(place: str, what: str) -> Any:
    """The object of a name "module:name" or "file.py:name"; raises SimulationError for an unknown name, and
    TargetError if the file does not import."""
    module_name, _, name = place.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        path = Path(module_name)
        module = _from_file(path, path.stat().st_mtime_ns) if is_file else importlib.import_module(module_name)
        return getattr(module, name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        hint = "write it as 'module:function' or 'file.py:function'"
        raise SimulationError(f"there is no such {what}: {error}", where=place, hint=hint) from None


@lru_cache(maxsize=8)
def _from_file(path: Path, changed: int) -> ModuleType:
    """The module of a file, run anew only when the file has changed."""
    return import_file(path)


class RegisterAccess(Record):
    """A read or a write of a register."""

    cycle: int
    """Cycle of the access."""
    offset: int
    """Bytes from the device's first register."""
    value: int
    """Value read or written."""
    written: bool
    """True for a write, False for a read."""

    def __str__(self) -> str:
        return f"cycle {self.cycle}: {'write' if self.written else 'read'} {self.offset:#x} = {self.value:#x}"


def watched(spec: DeviceSpec, file: Path) -> DeviceSpec:
    """The same device with a log of its register accesses in a file; repeated reads of the same value are logged
    once."""
    return _around(spec, Watched, file=str(file))


def hurried(spec: DeviceSpec) -> DeviceSpec:
    """The same device without delay: work is done at once, so no driver can wait too little."""
    return _around(spec, Hurried)


def slowed(spec: DeviceSpec, times: int) -> DeviceSpec:
    """The same device with a slower clock, so that a driver that does not wait is early."""
    return _around(spec, Slowed, times=times)


def guarded(spec: DeviceSpec, unit: str, results: Sequence[OwnedBytes], others: Sequence[OwnedBytes]) -> DeviceSpec:
    """The same device, which may change the bytes of `results` alone; raises SimulationError in a run where it changes
    others, and names them. Only what a device views anew for each thing it does is seen.

    Args:
        spec: the device.
        unit: its engine, for messages.
        results: what its launches may write.
        others: what lies elsewhere.
    """
    return _around(spec, Guarded, unit=unit, results=list(results), others=list(others))


OwnedBytes = tuple[int, int, str]
"""The first address of some bytes, the one past the last, and whose they are, for people."""


def _around(spec: DeviceSpec, kind: type[_Around], **more: Any) -> DeviceSpec:
    inner = {"factory": spec.factory, "base": spec.base, "size": spec.size, "arguments": dict(spec.arguments)}
    return replace(spec, factory=f"{__name__}:{kind.__name__}", arguments={"inner": inner, **more})


def accesses(file: Path) -> list[RegisterAccess]:
    """The accesses in the file, the oldest first; none if no device wrote it."""
    data = file.read_bytes() if file.is_file() else b""
    whole = data[: len(data) // _RECORD.size * _RECORD.size]
    return [
        RegisterAccess(cycle, offset, value, bool(kind))
        for _, cycle, offset, value, kind in sorted(_RECORD.iter_unpack(whole))
    ]


class _Around:
    """A device that passes everything on to another one."""

    def __init__(self, bus: Bus, inner: dict[str, Any]) -> None:
        self._device = make_device(DeviceSpec(**inner), bus)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the device has."""
        return getattr(self._device, name)


class Hurried(_Around):
    """A device that finishes all its work after every write."""

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        self._device.write(offset, value, now)
        while (event := self._device.next_event()) is not None:
            self._device.advance(event)

    def instruct(self, word: int, first: int, second: int, now: int) -> Taken:
        """See `Coprocessor.instruct`."""
        device = cast("Coprocessor", self._device)
        taken = device.instruct(word, first, second, now)
        device.fence(now)
        return taken


class Slowed(_Around):
    """A device for which a cycle lasts `times` cycles of the others."""

    def __init__(self, bus: Bus, inner: dict[str, Any], times: int) -> None:
        super().__init__(bus, inner)
        self._times = times

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        return self._device.read(offset, now // self._times)

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        self._device.write(offset, value, now // self._times)

    def next_event(self) -> int | None:
        """See `Device.next_event`."""
        event = self._device.next_event()
        return None if event is None else event * self._times

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        self._device.advance(now // self._times)

    def instruct(self, word: int, first: int, second: int, now: int) -> Taken:
        """See `Coprocessor.instruct`."""
        inner = now // self._times
        taken = cast("Coprocessor", self._device).instruct(word, first, second, inner)
        return replace(taken, resumed=now + (taken.resumed - inner) * self._times)

    def fence(self, now: int) -> int:
        """See `Coprocessor.fence`."""
        inner = now // self._times
        return now + (cast("Coprocessor", self._device).fence(inner) - inner) * self._times

    def activities(self) -> list[Activity]:
        """See `Device.activities`."""
        own = self._device.activities()
        return [replace(one, start=one.start * self._times, end=one.end * self._times) for one in own]


class Guarded(_Around):
    """A device that may change some bytes only."""

    def __init__(
        self, bus: Bus, inner: dict[str, Any], unit: str, results: list[OwnedBytes], others: list[OwnedBytes]
    ) -> None:
        self._bus, self._unit, self._results, self._others = _NotingBus(bus), unit, sorted(results), others
        self._starts = np.array([start for start, _, _ in self._results], np.int64)
        self._ends = np.maximum.accumulate(np.array([end for _, end, _ in self._results], np.int64))
        super().__init__(self._bus, inner)

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        self._device.write(offset, value, now)
        self._look()

    def advance(self, now: int) -> None:
        """See `Device.advance`."""
        self._device.advance(now)
        self._look()

    def instruct(self, word: int, first: int, second: int, now: int) -> Taken:
        """See `Coprocessor.instruct`."""
        taken = cast("Coprocessor", self._device).instruct(word, first, second, now)
        self._look()
        return taken

    def fence(self, now: int) -> int:
        """See `Coprocessor.fence`."""
        over = cast("Coprocessor", self._device).fence(now)
        self._look()
        return over

    def _look(self) -> None:
        """Raise SimulationError for the first byte that changed and is no result's."""
        for address, memory, before in self._bus.viewed:
            changed = address + np.flatnonzero(memory != before)
            places = np.searchsorted(self._starts, changed, side="right") - 1
            wrong = changed[(places < 0) | (changed >= self._ends[places])]
            if wrong.size:
                self._refuse(int(wrong[0]), wrong.size)
        self._bus.viewed.clear()

    def _refuse(self, address: int, count: int) -> None:
        start, stop, result = min(self._results, key=lambda one: max(one[0] - address, address - one[1] + 1))
        away = f"{address - stop} bytes behind" if address >= stop else f"{start - address} bytes before"
        whose = next((text for first, last, text in self._others if first <= address < last), "nobody")
        job = "".join(f" in {one.label}" for one in self._device.activities()[-1:])
        raise SimulationError(
            f"{self._unit} writes outside of its result: {count} bytes{job}, the first at {address:#x}, "
            f"{away} the result of {result}; that byte is of {whose}",
            where=self._unit,
            hint="compare the sizes and strides of that launch with the bytes that the engine writes",
        )


class _NotingBus:
    """A bus that keeps what was in memory before a device could change it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.viewed: list[tuple[int, Bytes, Bytes]] = []
        """Address, the memory there, and what it held."""

    def __getattr__(self, name: str) -> Any:
        """Whatever else the bus has."""
        return getattr(self._bus, name)

    @property
    def regions(self) -> Sequence[MemoryRegion]:
        """See `Bus.regions`."""
        return self._bus.regions

    def view(self, address: int, nbytes: int) -> Bytes:
        """See `Bus.view`."""
        memory = self._bus.view(address, nbytes)
        if not any(start <= address and address + nbytes <= start + len(held) for start, held, _ in self.viewed):
            self.viewed.append((address, memory, memory.copy()))
        return memory


class Watched(_Around):
    """A device whose reads and writes are noted in a file."""

    def __init__(self, bus: Bus, inner: dict[str, Any], file: str) -> None:
        super().__init__(bus, inner)
        self._file = os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        self._count, self._last = 0, (-1, -1, False)

    def read(self, offset: int, now: int) -> int:
        """See `Device.read`."""
        value = self._device.read(offset, now)
        if (offset, value, False) != self._last:
            self._note(offset, value, now, False)
        return value

    def write(self, offset: int, value: int, now: int) -> None:
        """See `Device.write`."""
        self._note(offset, value, now, True)
        self._device.write(offset, value, now)

    def _note(self, offset: int, value: int, now: int, written: bool) -> None:
        self._last = (offset, value, written)
        record = _RECORD.pack(self._count, now, offset, value & 0xFFFFFFFF, written)
        os.pwrite(self._file, record, self._count % MOST_NOTED * _RECORD.size)
        self._count += 1


class AddressWindow(Record):
    """`size` bytes of addresses from `base`, answered by `device`."""

    base: int
    """Address of the first register."""
    size: int
    """Bytes of address space."""
    device: Device
    """Device that answers there."""


class AddressMap:
    """Finds the window of an address; raises SimulationError where two overlap, one is misaligned, or two devices have
    one name."""

    def __init__(self, windows: Sequence[AddressWindow]) -> None:
        self.windows = tuple(sorted(windows, key=lambda window: window.base))
        self._bases = [window.base for window in self.windows]
        names = [window.device.name for window in self.windows]
        for name in names:
            if names.count(name) > 1:
                what = f"{names.count(name)} devices have this name"
                hint = "give every engine of the target a name of its own"
                raise SimulationError(what, where=f"device '{name}'", hint=hint)
        for window in self.windows:
            if window.base % 4 or window.size <= 0:
                what = f"it has {window.size} bytes of registers at {window.base:#x}"
                hint = "place registers at multiples of 4, and give them at least 4 bytes"
                raise SimulationError(what, where=f"device '{window.device.name}'", hint=hint)
        for lower, upper in pairwise(self.windows):
            if lower.base + lower.size > upper.base:
                what = f"its registers overlap those of '{lower.device.name}' at {upper.base:#x}"
                hint = "move one of the two in the target"
                raise SimulationError(what, where=f"device '{upper.device.name}'", hint=hint)

    def find(self, address: int) -> AddressWindow:
        """The window an address lies in; raises SimulationError where that is between windows."""
        index = bisect_right(self._bases, address) - 1
        if index >= 0 and address < self.windows[index].base + self.windows[index].size:
            return self.windows[index]
        raise SimulationError(
            "no device answers at this address",
            where=f"{address:#x}",
            hint="look at the driver's addresses; devices: "
            f"{', '.join(f'{w.device.name} {w.base:#x}..{w.base + w.size - 1:#x}' for w in self.windows)}",
        )

    def pages(self, page: int = 4096) -> list[tuple[int, int]]:
        """The (base, bytes) ranges of whole pages that cover the windows, without overlaps."""
        ranges: list[tuple[int, int]] = []
        for window in self.windows:
            start, end = window.base // page * page, (window.base + window.size + page - 1) // page * page
            if ranges and start < ranges[-1][0] + ranges[-1][1]:
                start = ranges.pop()[0]
            ranges.append((start, end - start))
        return ranges


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Window="AddressWindow")

document(__name__)
