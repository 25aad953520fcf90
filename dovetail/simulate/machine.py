"""The simulated chip: cores, memories, devices and time. Imported by the worker process only (Unicorn is GPL-2.0)."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.build.elf import Symbol, load_image, symbols
from dovetail.errors import SimulationError
from dovetail.simulate import block_hook
from dovetail.simulate.address_map import Window
from dovetail.simulate.architecture import CoreSetup, architecture_of, core_costs
from dovetail.simulate.device import INITIAL_BYTE, Clocked, Device, MemoryBus
from dovetail.simulate.factory import make_device
from dovetail.simulate.harness import SIZE as HARNESS_SIZE
from dovetail.simulate.harness import Clock, Harness
from dovetail.simulate.mailbox import SIZE as MAILBOX_SIZE
from dovetail.simulate.mailbox import Mailbox, Worker
from dovetail.simulate.processor import Processor
from dovetail.simulate.protocol import RunRequest, SimulationResult, SimulationSetup


class Machine:
    """A chip with its firmware loaded, standing at the reset vector.

    Args:
        setup: what it consists of.

    Raises:
        SimulationError: memories or devices overlap or are misaligned, or the firmware does not fit them.
    """

    def __init__(self, setup: SimulationSetup) -> None:
        self.bus = MemoryBus(setup.memories)
        self.devices: list[Device] = [make_device(spec, self.bus) for spec in setup.devices]
        self._clocked = [device for device in self.devices if isinstance(device, Clocked)]
        self._symbols = symbols(setup.elf)
        self._workers = [self._worker(setup, number) for number in range(1, len(setup.workers) + 1)]
        self._harness = Harness(
            self._clock, self.write_symbol, self._read_symbol, self._text, [*self.devices, *self._workers]
        )
        windows = [Window(spec.base, spec.size, device) for spec, device in
                   zip(setup.devices, self.devices, strict=True)]
        if self._workers:
            self.devices.append(Mailbox(self._workers))
            windows.append(Window(setup.mailbox, MAILBOX_SIZE, self.devices[-1]))
        windows.append(Window(setup.sim_control, HARNESS_SIZE, None))
        self._idle = 0
        self._cpu = Processor(self._setup(setup, setup.costs), self.bus, windows, self._access, self._symbols,
                              setup.native_hook)
        self._core, self._state = self._cpu.core, self._cpu.state
        self._load(setup, architecture_of(setup.isa).elf_machine)

    # -- construction

    def _setup(self, setup: SimulationSetup, costs: Mapping[str, int]) -> CoreSetup:
        table = core_costs(setup.isa, costs, setup.elf.name)
        return CoreSetup(setup.isa, table, self.bus, setup.elf, setup.extension)

    def _worker(self, setup: SimulationSetup, number: int) -> Worker:
        core = self._setup(setup, setup.workers[number - 1])
        return Worker(number, core, self.bus, setup.mailbox, self._symbols, setup.native_hook)

    def _load(self, setup: SimulationSetup, machine: str) -> None:
        entry, segments = load_image(setup.elf, machine)
        for segment in segments:
            try:
                self.bus.view(segment.address, len(segment.data))[:] = memoryview(segment.data)
            except SimulationError as error:
                what = f"the firmware does not fit the memories: {error.what}"
                raise SimulationError(what, where="firmware",
                                      hint="give the memories of the target more room, or choose a smaller network; "
                                           f"{error.hint}") from None
        self._cpu.start(entry)
        for worker in self._workers:
            worker.start(entry)
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
        for worker in self._workers:
            worker.instruction_limit = worker.instructions + request.instruction_limit
        self._harness.begin(request)
        while not self._harness.stop:
            self._advance(state.cycles)
            if self._cpu.asleep_at is not None:
                self._sleep(self._cpu.asleep_at)
            self._take_interrupt()
            self._arm()
            self._cpu.execute()
            if state.stop_reason == block_hook.STOP_LIMIT and not self._harness.stop:
                raise self._watchdog(request.instruction_limit)
        stacks = [self._stack_bytes(suffix) for suffix in ("", *(f"_{worker.number}" for worker in self._workers))]
        return SimulationResult(tuple(self._harness.results), stacks[0], state.instructions, self._harness.exit_code,
                                tuple(stacks[1:]))

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
                                      where=self._cpu.place(place), hint=self._cpu.recent())
            moment = min(events)
            for device in self._clocked:
                moment = min(moment, device.clock(moment))
            skipped = max(0, moment - self._state.cycles)
            self._idle += skipped
            self._state.cycles += skipped
            self._advance(self._state.cycles)
        self._cpu.asleep_at = None

    def _take_interrupt(self) -> None:
        """Enter the handler if a line is high and nothing masks it."""
        cycles = self._core.enter_interrupt() if self._interrupt() else None
        if cycles is not None:
            self._state.cycles += cycles
            self._state.taken_extra = 0

    def _access(self, kind: str, window: Window, offset: int, value: int) -> int:
        """An access of core 0 to a device or the harness."""
        now, raised = self._state.cycles, bool(self._state.interrupt)
        self._advance(now)
        if kind == "read":
            value = self._harness.read(offset) if window.device is None else window.device.read(offset, now)
        elif window.device is None:
            self._harness.write(offset, value)
        else:
            window.device.write(offset, value, now)
        self._arm()
        if self._state.interrupt and not raised:
            self._state.deadline = 0  # a new interrupt may be due at the next block
        return value

    # -- symbols and messages

    def _clock(self) -> Clock:
        return Clock(self._state.cycles, self._state.instructions, self._idle)

    def _address(self, place: str, nbytes: int) -> int:
        """Address of "symbol" or "symbol+offset"."""
        name, _, offset = place.partition("+")
        symbol, start = self._symbol(name), int(offset or 0)
        if symbol.size and start + nbytes > symbol.size:
            raise SimulationError(f"{start + nbytes} bytes are wanted of it, it has {symbol.size}",
                                  where=f"symbol '{name}'",
                                  hint="compile the model again: the build is not of this firmware")
        return symbol.address + start

    def _symbol(self, name: str) -> Symbol:
        symbol = self._symbols.get(name)
        if symbol is None:
            raise SimulationError(f"there is no symbol '{name}'", where="firmware",
                                  hint="keep the buffer alive (not static, used by the model)")
        return symbol

    def write_symbol(self, name: str, content: bytes) -> None:
        """Write the first bytes of a symbol; raises SimulationError when there is none, or it is smaller."""
        self.bus.view(self._address(name, len(content)), len(content))[:] = memoryview(content)

    def _read_symbol(self, name: str, nbytes: int) -> bytes:
        return self.bus.view(self._address(name, nbytes), nbytes).tobytes()

    def _text(self, address: int) -> str:
        """The string at an address, cut at 200 bytes."""
        region = next((r for r in self.bus.regions if r.base <= address < r.base + r.size), None)
        if region is None:
            return f"what has its name at {address:#x}"
        content = self.bus.view(address, min(200, region.base + region.size - address)).tobytes()
        return content.partition(b"\0")[0].decode(errors="replace")

    def _watchdog(self, limit: int) -> SimulationError:
        return SimulationError(f"the firmware executed {limit} instructions without an end",
                               where=self._cpu.place(self._core.pc()), hint=self._cpu.recent())

    def _stack_bytes(self, suffix: str) -> int | None:
        """The most a core has used of its stack, whose symbols have this suffix."""
        bottom, top = self._symbols.get(f"__stack_bottom{suffix}"), self._symbols.get(f"__stack_top{suffix}")
        if bottom is None or top is None or top.address <= bottom.address:
            return None
        size = top.address - bottom.address
        used = (self.bus.view(bottom.address, size) != INITIAL_BYTE).nonzero()[0]
        depth = size - int(used[0]) if used.size else 0
        if depth == size:
            whose = f"stack of core {suffix[1:]}" if suffix else "stack"
            raise SimulationError(f"all of its {size} bytes were used: it has overflowed", where=whose,
                                  hint="reserve a larger stack (Core.stack)")
        return depth
