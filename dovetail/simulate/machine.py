"""The simulated chip: core, memories, devices and time. Imported by the worker process only (Unicorn is GPL-2.0)."""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from dovetail.build.elf import Symbol, describe_address, load_image, symbols
from dovetail.errors import SimulationError
from dovetail.simulate import block_hook
from dovetail.simulate.address_map import AddressMap, Window, neighbours, page_ranges
from dovetail.simulate.architecture import CoreSetup, architecture_of, core_costs
from dovetail.simulate.device import INITIAL_BYTE, Device, MemoryBus
from dovetail.simulate.factory import make_device
from dovetail.simulate.harness import SIZE as HARNESS_SIZE
from dovetail.simulate.harness import Clock, Harness
from dovetail.simulate.protocol import RunRequest, SimulationResult, SimulationSetup

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


class Machine:
    """A chip with its firmware loaded, standing at the reset vector.

    Args:
        setup: what it consists of.

    Raises:
        SimulationError: memories or devices overlap or are misaligned, or the firmware does not fit them.
    """

    def __init__(self, setup: SimulationSetup) -> None:
        architecture = architecture_of(setup.isa)
        self.bus = MemoryBus(setup.memories)
        self.devices: list[Device] = [make_device(spec, self.bus) for spec in setup.devices]
        self._symbols = symbols(setup.elf)
        self._harness = Harness(self._clock, self.write_symbol, self._read_symbol, self.devices)
        self._idle = 0
        self._asleep_at: int | None = None
        self._failure: BaseException | None = None
        self._accesses: deque[_Access] = deque(maxlen=8)
        costs = core_costs(setup.isa, setup.costs, setup.elf.name)
        self._core = architecture.make(CoreSetup(setup.isa, costs, self.bus, setup.elf, setup.extension))
        self._emulator = self._core.emulator
        self._map_memories()
        self._map_devices(setup)
        self._hook = self._install_hook(setup.native_hook)
        self._state = self._hook.state
        self._emulator.hook_add(unicorn.UC_HOOK_MEM_INVALID, self._invalid)
        self._load(setup, architecture.elf_machine)
        self._hook_predicated()

    # -- construction

    def _map_memories(self) -> None:
        for region in self.bus.regions:
            if region.base % 4096:
                raise SimulationError(f"the memory '{region.name}' begins at {region.base:#x}",
                                      hint="memories of the simulated chip begin at multiples of 4096")
            size = (region.size + 4095) // 4096 * 4096
            pointer = self.bus.arrays[region.name].ctypes.data
            try:
                self._emulator.mem_map_ptr(region.base, size, unicorn.UC_PROT_ALL, pointer)
            except unicorn.UcError as error:
                raise SimulationError(f"the memory '{region.name}' at {region.base:#x} cannot be mapped: {error}",
                                      hint="two memories may not share a page of 4096 bytes") from None

    def _map_devices(self, setup: SimulationSetup) -> None:
        windows = [Window(spec.base, spec.size, device) for spec, device in
                   zip(setup.devices, self.devices, strict=True)]
        if self._core.registers is not None:
            base, own = self._core.registers
            windows.append(Window(base, 4096, own))
        self._windows = AddressMap([*windows, Window(setup.sim_control, HARNESS_SIZE, None)])
        for base, size in page_ranges(self._windows.windows):
            try:
                self._emulator.mmio_map(base, size, self._mmio_read, base, self._mmio_write, base)
            except unicorn.UcError as error:
                raise SimulationError(f"the devices at {base:#x} cannot be mapped: {error}",
                                      hint="devices and memories may not share a page of 4096 bytes") from None

    def _install_hook(self, native: bool) -> block_hook.NativeHook | block_hook.PythonHook:
        library = block_hook.native_hook_library() if native else None
        if library is None:
            hook = block_hook.PythonHook(self._core.block_cost, self._emulator.emu_stop)
            self._emulator.hook_add(unicorn.UC_HOOK_BLOCK, lambda _core, address, size, _data: hook(address, size))
            return hook
        stop = ctypes.cast(uclib.uc_emu_stop, ctypes.c_void_p).value or 0
        compiled = block_hook.NativeHook(library, self._core.block_cost, stop)
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

    def _hook_predicated(self) -> None:
        """Count instructions that may be skipped where they are executed: the emulator calls hooks for no others."""
        predicated = self._core.predicated
        if not predicated:
            return
        self._hook.set_predicated(predicated)
        for first, last in neighbours(sorted(predicated)):
            if isinstance(self._hook, block_hook.NativeHook):
                self._add_native(unicorn.UC_HOOK_CODE, self._hook.executed_function, self._hook.state, first, last)
            else:
                self._emulator.hook_add(unicorn.UC_HOOK_CODE, self._hook.on_code, None, first, last)

    def _load(self, setup: SimulationSetup, machine: str) -> None:
        entry, segments = load_image(setup.elf, machine)
        for segment in segments:
            try:
                self.bus.view(segment.address, len(segment.data))[:] = memoryview(segment.data)
            except SimulationError as error:
                what = f"the firmware does not fit the memories: {error.what}"
                raise SimulationError(what, hint=error.hint) from None
        self._core.start(entry)
        for device in self.devices:
            device.reset()

    # -- running

    @property
    def cycles(self) -> int:
        """Cycles since the reset, those slept included."""
        return int(self._state.cycles)

    def run(self, request: RunRequest) -> SimulationResult:
        """Run the inferences of `request`, or up to the firmware's exit when there are none.

        Raises:
            SimulationError: a fault of the firmware or of a device, a hang, or the instruction limit.
        """
        state = self._state
        state.instruction_limit = state.instructions + request.instruction_limit
        self._harness.begin(request)
        while not self._harness.stop:
            self._advance(state.cycles)
            if self._asleep_at is not None:
                self._sleep(self._asleep_at)
            self._take_interrupt()
            self._arm()
            self._execute()
            if state.stop_reason == block_hook.STOP_LIMIT and not self._harness.stop:
                raise self._watchdog(request.instruction_limit)
        return SimulationResult(tuple(self._harness.results), self._stack_bytes(), state.instructions,
                                self._harness.exit_code)

    def _execute(self) -> None:
        """Let the core run until the hook stops it or it waits for an interrupt."""
        self._state.stop_reason = block_hook.RUNNING
        self._state.after_system = 0
        try:
            self._emulator.emu_start(self._core.resume_at(), _NOWHERE)
        except unicorn.UcError as error:
            place = self._place(self._core.pc())
            raise self._failure or SimulationError(f"the core stopped: {error}", where=place) from None
        if failure := self._failure or self._hook.failure:
            raise failure
        if self._state.stop_reason == block_hook.RUNNING:
            self._paused()

    def _paused(self) -> None:
        """The core stopped by itself: find out why."""
        pc = self._core.pc()
        pause = self._core.pause()
        if pause is None or pause.fault:
            reason = f": {pause.fault}" if pause is not None else " for no known reason"
            raise SimulationError(f"the core stopped{reason}", where=self._place(pc))
        self._asleep_at = pause.at if pause.waits else None
        if pause.cycles:
            self._state.cycles += pause.cycles
            self._state.taken_extra = 0

    def _advance(self, now: int) -> None:
        """Let the devices complete what is due, in the order of time across devices."""
        while True:
            due = [event for device in self.devices if (event := device.next_event()) is not None and event <= now]
            if not due:
                break
            moment = min(due)
            for device in self.devices:
                device.advance(moment)
                if device.next_event() == moment:
                    raise RuntimeError(f"device '{device.name}' leaves its event of cycle {moment} undone")
        for device in self.devices:
            device.advance(now)

    def _arm(self) -> None:
        """Tell the hook when to stop next."""
        events = [event for device in self.devices if (event := device.next_event()) is not None]
        self._state.deadline = 0 if self._harness.stop else min(events, default=block_hook.NEVER)
        self._state.interrupt = int(self._interrupt())

    def _interrupt(self) -> bool:
        return self._core.line_enabled() and any(device.interrupt() for device in self.devices)

    def _sleep(self, place: int) -> None:
        """Carry on after wfi: let time jump from event to event until a device raises its interrupt."""
        while not self._interrupt():
            events = [event for device in self.devices if (event := device.next_event()) is not None]
            if not events:
                raise SimulationError("deadlock: the core waits for an interrupt and no device is running",
                                      where=self._place(place), hint=self._recent())
            skipped = max(0, min(events) - self._state.cycles)
            self._idle += skipped
            self._state.cycles += skipped
            self._advance(self._state.cycles)
        self._asleep_at = None

    def _take_interrupt(self) -> None:
        """Enter the handler if a line is high and nothing masks it."""
        cycles = self._core.enter_interrupt() if self._interrupt() else None
        if cycles is not None:
            self._state.cycles += cycles
            self._state.taken_extra = 0

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
                raise SimulationError(f"{kind} of {size} bytes at {address:#x}: registers take aligned 32-bit accesses")
            return self._access(kind, address, value & 0xFFFFFFFF)
        except SimulationError as error:
            place = self._place(self._state.current)
            self._failure = SimulationError(f"{error.what} ({kind} in the block at {place})", where=error.where,
                                            hint=error.hint)
        except BaseException as error:
            self._failure = error
        self._emulator.emu_stop()
        return 0

    def _access(self, kind: str, address: int, value: int) -> int:
        window = self._windows.find(address)
        now, raised = self._state.cycles, bool(self._state.interrupt)
        self._advance(now)
        offset = address - window.base
        if kind == "read":
            value = self._harness.read(offset) if window.device is None else window.device.read(offset, now)
        elif window.device is None:
            self._harness.write(offset, value)
        else:
            window.device.write(offset, value, now)
        self._accesses.append(_Access(now, kind, address, value))
        self._arm()
        if self._state.interrupt and not raised:
            self._state.deadline = 0  # a new interrupt may be due at the next block
        return value & 0xFFFFFFFF

    def _invalid(self, core: Any, access: int, address: int, size: int, value: int, data: object) -> bool:
        kind = _ACCESSES.get(access, f"access {access}")
        place = self._place(self._state.current if kind == "instruction fetch" else self._core.pc())
        came = " from the block at" if kind == "instruction fetch" else " at pc"
        known = ", ".join(f"{r.name} {r.base:#x}..{r.base + r.size - 1:#x}" for r in self.bus.regions)
        self._failure = SimulationError(f"bad {kind} of {size} bytes at {address:#x},{came} {place}",
                                        hint=f"nothing is mapped there; memories: {known}")
        return False

    # -- symbols and messages

    def _clock(self) -> Clock:
        return Clock(self._state.cycles, self._state.instructions, self._idle)

    def _address(self, place: str, nbytes: int) -> int:
        """Address of "symbol" or "symbol+offset"."""
        name, _, offset = place.partition("+")
        symbol, start = self._symbol(name), int(offset or 0)
        if symbol.size and start + nbytes > symbol.size:
            raise SimulationError(f"{start + nbytes} bytes for the symbol '{name}', which has {symbol.size}")
        return symbol.address + start

    def _symbol(self, name: str) -> Symbol:
        symbol = self._symbols.get(name)
        if symbol is None:
            raise SimulationError(f"the firmware has no symbol '{name}'",
                                  hint="keep the buffer alive (not static, used by the model)")
        return symbol

    def write_symbol(self, name: str, content: bytes) -> None:
        """Write the first bytes of a symbol; raises SimulationError when there is none, or it is smaller."""
        self.bus.view(self._address(name, len(content)), len(content))[:] = memoryview(content)

    def _read_symbol(self, name: str, nbytes: int) -> bytes:
        return self.bus.view(self._address(name, nbytes), nbytes).tobytes()

    def _place(self, address: int) -> str:
        return f"{address:#x} ({describe_address(address, self._symbols)})"

    def _recent(self) -> str:
        listed = "; ".join(f"cycle {a.cycle}: {a.kind} {a.address:#x} = {a.value:#x}" for a in self._accesses)
        return f"last register accesses: {listed or 'none'}"

    def _watchdog(self, limit: int) -> SimulationError:
        return SimulationError(f"the firmware executed {limit} instructions without an end",
                               where=self._place(self._core.pc()), hint=self._recent())

    def _stack_bytes(self) -> int | None:
        bottom, top = self._symbols.get("__stack_bottom"), self._symbols.get("__stack_top")
        if bottom is None or top is None or top.address <= bottom.address:
            return None
        size = top.address - bottom.address
        used = (self.bus.view(bottom.address, size) != INITIAL_BYTE).nonzero()[0]
        depth = size - int(used[0]) if used.size else 0
        if depth == size:
            raise SimulationError(f"the stack of {size} bytes was used up to its last byte: it has overflowed",
                                  hint="reserve a larger stack")
        return depth
