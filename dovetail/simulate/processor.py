"""One core in the emulator: the memories and registers it reaches, its clock, and running it until it is stopped."""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.build.elf import Symbol, describe_address
from dovetail.errors import SimulationError
from dovetail.simulate import block_hook
from dovetail.simulate.address_map import AddressMap, Window, neighbours, page_ranges
from dovetail.simulate.architecture import CoreSetup, architecture_of
from dovetail.simulate.device import MemoryBus

# Unicorn's own annotations are incomplete, so it is used as Any.
unicorn: Any = importlib.import_module("unicorn")
uclib: Any = importlib.import_module("unicorn.unicorn_py3.unicorn").uclib

_NOWHERE = 0xFFFFFFFE  # an address no code reaches: the emulator wants one to stop at
_ACCESSES = {
    unicorn.UC_MEM_READ_UNMAPPED: "read", unicorn.UC_MEM_WRITE_UNMAPPED: "write",
    unicorn.UC_MEM_FETCH_UNMAPPED: "instruction fetch",
}


@dataclass(frozen=True, slots=True)
class _Access:
    """An access to a register, kept for messages."""

    cycle: int
    kind: str
    address: int
    value: int


class Processor:
    """A core with its own clock over memories that it may share with others.

    Args:
        setup: what it is made from.
        bus: the memories.
        windows: the devices it reaches.
        access: answers its accesses to them: called with "read" or "write", the window, the byte offset in it and the
            value written; returns the value read.
        symbols: of the firmware, for messages.
        native: whether the compiled block hook is used where there is one.

    Raises:
        SimulationError: memories or devices overlap or are misaligned.
    """

    def __init__(
        self, setup: CoreSetup, bus: MemoryBus, windows: Sequence[Window],
        access: Callable[[str, Window, int, int], int], symbols: Mapping[str, Symbol], native: bool,
    ) -> None:
        self._bus, self._symbols, self._answer = bus, symbols, access
        self._failure: BaseException | None = None
        self._accesses: deque[_Access] = deque(maxlen=8)
        self.asleep_at: int | None = None
        """Address of the wfi it sleeps in; None while it is awake."""
        self.core = architecture_of(setup.isa).make(setup)
        self._emulator = self.core.emulator
        self._map_memories()
        self._map_devices(windows)
        self._hook = self._install_hook(native)
        self.state = self._hook.state
        """Its counters and orders."""
        self._emulator.hook_add(unicorn.UC_HOOK_MEM_INVALID, self._invalid)

    # -- construction

    def _map_memories(self) -> None:
        for region in self._bus.regions:
            if region.base % 4096:
                raise SimulationError(f"it begins at {region.base:#x}", where=f"memory '{region.name}'",
                                      hint="let memories of the simulated chip begin at multiples of 4096")
            size = (region.size + 4095) // 4096 * 4096
            pointer = self._bus.arrays[region.name].ctypes.data
            try:
                self._emulator.mem_map_ptr(region.base, size, unicorn.UC_PROT_ALL, pointer)
            except unicorn.UcError as error:
                raise SimulationError(f"it cannot be mapped at {region.base:#x}: {error}",
                                      where=f"memory '{region.name}'",
                                      hint="let no two memories share a page of 4096 bytes") from None

    def _map_devices(self, windows: Sequence[Window]) -> None:
        own = [] if self.core.registers is None else [Window(self.core.registers[0], 4096, self.core.registers[1])]
        self._windows = AddressMap([*windows, *own])
        for base, size in page_ranges(self._windows.windows):
            try:
                self._emulator.mmio_map(base, size, self._mmio_read, base, self._mmio_write, base)
            except unicorn.UcError as error:
                raise SimulationError(f"they cannot be mapped: {error}", where=f"devices at {base:#x}",
                                      hint="let devices and memories share no page of 4096 bytes") from None

    def _install_hook(self, native: bool) -> block_hook.NativeHook | block_hook.PythonHook:
        library = block_hook.native_hook_library() if native else None
        if library is None:
            hook = block_hook.PythonHook(self.core.block_cost, self._emulator.emu_stop)
            self._emulator.hook_add(unicorn.UC_HOOK_BLOCK, lambda _core, address, size, _data: hook(address, size))
            return hook
        stop = ctypes.cast(uclib.uc_emu_stop, ctypes.c_void_p).value or 0
        compiled = block_hook.NativeHook(library, self.core.block_cost, stop)
        self._add_native(unicorn.UC_HOOK_BLOCK, compiled.function, compiled.state, 1, 0)
        return compiled

    def _add_native(self, kind: int, function: int, state: ctypes.Structure, first: int, last: int) -> None:
        """Have the emulator call a C function for addresses from `first` to `last` (all, if `first` is greater)."""
        handle = ctypes.c_size_t()
        status = uclib.uc_hook_add(
            self._emulator._uch, ctypes.byref(handle), kind, ctypes.c_void_p(function),
            ctypes.c_void_p(ctypes.addressof(state)), ctypes.c_uint64(first), ctypes.c_uint64(last),
        )
        if status != unicorn.UC_ERR_OK:
            raise RuntimeError(f"the emulator refused the hook: {status}")

    def start(self, entry: int) -> None:
        """Stand at the firmware's entry point, its memories loaded."""
        self.core.start(entry)
        self._hook_predicated()

    def _hook_predicated(self) -> None:
        """Count instructions that may be skipped where they are executed: the emulator calls hooks for no others."""
        predicated = self.core.predicated
        if not predicated:
            return
        self._hook.set_predicated(predicated)
        for first, last in neighbours(sorted(predicated)):
            if isinstance(self._hook, block_hook.NativeHook):
                self._add_native(unicorn.UC_HOOK_CODE, self._hook.executed_function, self._hook.state, first, last)
            else:
                self._emulator.hook_add(unicorn.UC_HOOK_CODE, self._hook.on_code, None, first, last)

    # -- running

    def execute(self) -> None:
        """Let the core run until the hook stops it or it waits for an interrupt."""
        self.state.stop_reason = block_hook.RUNNING
        self.state.after_system = 0
        try:
            self._emulator.emu_start(self.core.resume_at(), _NOWHERE)
        except unicorn.UcError as error:
            place = self.place(self.core.pc())
            raise self._failure or SimulationError(f"the core stopped: {error}", where=place,
                                                   hint="look at the code there: an instruction this core does not "
                                                        "have, or a jump to data") from None
        if failure := self._failure or self._hook.failure:
            raise failure
        if self.state.stop_reason == block_hook.RUNNING:
            self._paused()

    def _paused(self) -> None:
        """The core stopped by itself: find out why."""
        pc = self.core.pc()
        pause = self.core.pause()
        if pause is None or pause.fault:
            reason = f": {pause.fault}" if pause is not None else " for no known reason"
            raise SimulationError(f"the core stopped{reason}", where=self.place(pc),
                                  hint="look at the code there: it does what this core cannot")
        self.asleep_at = pause.at if pause.waits else None
        if pause.cycles:
            self.state.cycles += pause.cycles
            self.state.taken_extra = 0

    # -- called by the emulator

    def _mmio_read(self, core: Any, offset: int, size: int, base: int) -> int:
        return self._mmio("read", base + offset, size, 0)

    def _mmio_write(self, core: Any, offset: int, size: int, value: int, base: int) -> None:
        self._mmio("write", base + offset, size, value)

    def _mmio(self, kind: str, address: int, size: int, value: int) -> int:
        """Route an access to its device; an error is kept for `_execute`, as it cannot cross the emulator."""
        if self._failure is not None:
            return 0
        try:
            if size != 4 or address % 4:
                raise SimulationError(f"{kind} of {size} bytes: registers take aligned 32-bit accesses",
                                      where=f"{address:#x}",
                                      hint="look at the driver: access registers through volatile uint32_t pointers")
            return self._access(kind, address, value & 0xFFFFFFFF)
        except SimulationError as error:
            place = self.place(self.state.current)
            self._failure = SimulationError(f"{error.what} ({kind} in the block at {place})", where=error.where,
                                            hint=error.hint)
        except BaseException as error:
            self._failure = error
        self._emulator.emu_stop()
        return 0

    def _access(self, kind: str, address: int, value: int) -> int:
        window, now = self._windows.find(address), self.state.cycles
        value = self._answer(kind, window, address - window.base, value) & 0xFFFFFFFF
        self._accesses.append(_Access(now, kind, address, value))
        return value

    def _invalid(self, core: Any, access: int, address: int, size: int, value: int, data: object) -> bool:
        kind = _ACCESSES.get(access, f"access {access}")
        place = self.place(self.state.current if kind == "instruction fetch" else self.core.pc())
        came = ", after the code here" if kind == "instruction fetch" else ""
        known = ", ".join(f"{r.name} {r.base:#x}..{r.base + r.size - 1:#x}" for r in self._bus.regions)
        self._failure = SimulationError(f"bad {kind} of {size} bytes at {address:#x}{came}", where=place,
                                        hint=f"look at the pointer: nothing is mapped there; memories: {known}")
        return False

    def place(self, address: int) -> str:
        """An address and what lies there, for messages."""
        return f"{address:#x} ({describe_address(address, self._symbols)})"

    def recent(self) -> str:
        """The last accesses to registers, for messages."""
        listed = "; ".join(f"cycle {a.cycle}: {a.kind} {a.address:#x} = {a.value:#x}" for a in self._accesses)
        return f"last register accesses: {listed or 'none'}"

