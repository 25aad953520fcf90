"""One core in the emulator: the memories and registers it reaches, its clock, and running it until it is stopped."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.codegen.build.elf import describe_address
from dovetail.errors import SimulationError
from dovetail.sim.architecture import architecture_of
from dovetail.sim.core import RUNNING, BlockHook, CoreSetup
from dovetail.sim.device import AddressMap, AddressWindow, Device

_NOWHERE = 0xFFFFFFFE  # an address no code reaches: the emulator wants one to stop at

Answer = Callable[[str, Device, int, int], int]
"""Carries out "read" or "write" of a device's register at a byte offset, of a value where it is written; returns the
value."""


class DeviceAccess:
    """The devices a core reaches. What goes wrong is kept, as no error can cross the simulator's C.

    Args:
        windows: the devices.
        answer: carries out an access.
        now: the core's clock.
        place: where the core is, for messages.
        stop: has the core stop, after an error.
    """

    def __init__(
        self,
        windows: Sequence[AddressWindow],
        answer: Answer,
        now: Callable[[], int],
        place: Callable[[], str],
        stop: Callable[[], None],
    ) -> None:
        self.map = AddressMap(windows)
        self.failure: BaseException | None = None
        """The first error."""
        self._answer, self._now, self._place, self._stop = answer, now, place, stop
        self._accesses: deque[str] = deque(maxlen=8)

    def access(self, kind: str, address: int, size: int, value: int) -> int:
        """Carry out "read" or "write" of `size` bytes; returns what was read or written, 0 after an error."""
        if self.failure is not None:
            return 0
        try:
            if size != 4 or address % 4:
                what = f"{kind} of {size} bytes: registers take aligned 32-bit accesses"
                hint = "look at the driver: access registers through volatile uint32_t pointers"
                raise SimulationError(what, where=f"{address:#x}", hint=hint)
            window, now = self.map.find(address), self._now()
            value = self._answer(kind, window.device, address - window.base, value & 0xFFFFFFFF) & 0xFFFFFFFF
            self._accesses.append(f"cycle {now}: {kind} {address:#x} = {value:#x}")
            return value
        except SimulationError as error:
            self.failure = SimulationError(
                f"{error.what} ({kind} in the block at {self._place()})", where=error.where, hint=error.hint
            )
        except BaseException as error:
            self.failure = error
        self._stop()
        return 0

    def recent(self) -> str:
        """The last accesses, for messages."""
        return f"last register accesses: {'; '.join(self._accesses) or 'none'}"


class Processor:
    """A core with its own clock over memories that it may share with others; `access` answers its accesses to devices.
    Raises SimulationError where memories or devices overlap or are misaligned."""

    def __init__(self, setup: CoreSetup, windows: Sequence[AddressWindow], access: Answer) -> None:
        # Unicorn's own annotations are incomplete, so it is used as Any; only the worker process comes here.
        self._unicorn: Any = importlib.import_module("unicorn")
        self._bus, self._symbols = setup.bus, setup.symbols
        self.asleep_at: int | None = None
        """Address of the wfi it sleeps in; None while it is awake."""
        self.core = architecture_of(setup.isa).make(setup)
        self._emulator = self.core.emulator
        own = (
            [] if self.core.registers is None else [AddressWindow(self.core.registers[0], 4096, self.core.registers[1])]
        )
        self._registers = DeviceAccess(
            [*windows, *own],
            access,
            now=lambda: self.state.cycles,
            place=lambda: self.place(self.state.current),
            stop=self._emulator.emu_stop,
        )
        self._map_memories()
        self._map_devices()
        waiting = [region.memory for region in setup.bus.regions if region.memory is not None and region.core]
        self._hook = BlockHook(self.core, waiting)
        self.state = self._hook.state
        """Its counters and orders."""
        self.core.count_into(self.state, self._hook.reads())
        self._emulator.hook_add(self._unicorn.UC_HOOK_MEM_INVALID, self._invalid)

    def _map_memories(self) -> None:
        for region in (one for one in self._bus.regions if one.core):
            if region.base % 4096:
                hint = "let memories of the simulated chip begin at multiples of 4096"
                raise SimulationError(f"it begins at {region.base:#x}", where=f"memory '{region.name}'", hint=hint)
            size = (region.size + 4095) // 4096 * 4096
            pointer = self._bus.arrays[region.name].ctypes.data
            try:
                self._emulator.mem_map_ptr(region.base, size, self._unicorn.UC_PROT_ALL, pointer)
            except self._unicorn.UcError as error:
                raise SimulationError(
                    f"it cannot be mapped at {region.base:#x}: {error}",
                    where=f"memory '{region.name}'",
                    hint="let no two memories share a page of 4096 bytes",
                ) from None

    def _map_devices(self) -> None:
        for base, size in self._registers.map.pages():
            try:
                self._emulator.mmio_map(base, size, self._mmio_read, base, self._mmio_write, base)
            except self._unicorn.UcError as error:
                what = f"they cannot be mapped: {error}"
                hint = "let devices and memories share no page of 4096 bytes"
                raise SimulationError(what, where=f"devices at {base:#x}", hint=hint) from None

    def start(self, entry: int) -> None:
        """Stand at the firmware's entry point, its memories loaded."""
        self.core.start(entry)
        if self.core.predicated:
            self._hook.hook_predicated(self.core.predicated)
        self._hook.hook_timed(self.core.timed)

    def execute(self) -> None:
        """Let the core run until the hook stops it or it waits for an interrupt."""
        self.state.stop_reason = RUNNING
        self.state.after_system = 0
        try:
            self._emulator.emu_start(self.core.resume_at(), _NOWHERE)
        except self._unicorn.UcError as error:
            place = self.place(self.core.pc())
            raise self._registers.failure or SimulationError(
                f"the core stopped: {error}",
                where=place,
                hint="look at the code there: an instruction this core does not have, or a jump to data",
            ) from None
        if failure := self._registers.failure or self._hook.failure:
            raise failure
        if self.state.stop_reason == RUNNING:
            self._paused()

    def _paused(self) -> None:
        """The core stopped by itself: find out why."""
        pc = self.core.pc()
        pause = self.core.pause()
        if pause is None or pause.fault:
            reason = f": {pause.fault}" if pause is not None else " for no known reason"
            hint = "look at the code there: it does what this core cannot"
            raise SimulationError(f"the core stopped{reason}", where=self.place(pc), hint=hint)
        self.asleep_at = pause.at if pause.waits else None
        if pause.cycles:
            self.state.cycles += pause.cycles
            self.state.taken_extra = 0

    # -- called by the emulator

    def _mmio_read(self, core: Any, offset: int, size: int, base: int) -> int:
        return self._registers.access("read", base + offset, size, 0)

    def _mmio_write(self, core: Any, offset: int, size: int, value: int, base: int) -> None:
        self._registers.access("write", base + offset, size, value)

    def _invalid(self, core: Any, access: int, address: int, size: int, value: int, data: object) -> bool:
        kinds = {"READ": "read", "WRITE": "write", "FETCH": "instruction fetch"}
        known_as = {getattr(self._unicorn, f"UC_MEM_{name}_UNMAPPED"): kind for name, kind in kinds.items()}
        kind = known_as.get(access, f"access {access}")
        place = self.place(self.state.current if kind == "instruction fetch" else self.core.pc())
        came = ", after the code here" if kind == "instruction fetch" else ""
        hint = f"look at the pointer: nothing is mapped there; {self._bus.described()}"
        self._registers.failure = SimulationError(
            f"bad {kind} of {size} bytes at {address:#x}{came}", where=place, hint=hint
        )
        return False

    def place(self, address: int) -> str:
        """An address and what lies there, for messages."""
        return f"{address:#x} ({describe_address(address, self._symbols)})"

    def recent(self) -> str:
        """The last accesses to registers, for messages."""
        return self._registers.recent()

    def traffic(self) -> dict[str, int]:
        """See `WaitPorts.traffic`."""
        return self._hook.waits.traffic()

    def clock(self) -> tuple[int, int]:
        """Cycles and instructions so far, the whole current block included."""
        return self.state.cycles, self.state.instructions
