"""The simulated chip: cores, memories, devices, time, and the registers by which it is given inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dovetail.codegen.build.elf import load_image, symbols
from dovetail.errors import SimulationError
from dovetail.records import Record, field
from dovetail.sim.architecture import architecture_of, core_costs
from dovetail.sim.core import NEVER, STOP_LIMIT, CoreSetup
from dovetail.sim.device import (
    INITIAL_BYTE,
    Activity,
    AddressWindow,
    Bytes,
    Coprocessor,
    Device,
    MemoryBus,
    access,
    make_device,
)
from dovetail.sim.mailbox import SIZE as MAILBOX_SIZE
from dovetail.sim.mailbox import Mailbox, Worker
from dovetail.sim.processor import Processor
from dovetail.sim.protocol import (
    SIM_CONTROL,
    Buffers,
    Content,
    InferenceResult,
    Marker,
    Runner,
    RunRequest,
    SimulationResult,
    SimulationSetup,
    call_failed,
)

if TYPE_CHECKING:
    from dovetail.sim.core_rtl import RtlProcessor

_END_OF_LAYERS = 0xFFFFFFFF


class CounterReading(Record):
    """A reading of the counters: time, instructions executed, and cycles slept, all since the reset."""

    cycle: int = 0
    instruction: int = 0
    idle: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes cores read and wrote, of memories where they are counted."""


class Firmware:
    """The firmware's symbols in the memories; every error is a SimulationError."""

    def __init__(self, elf: Path, bus: MemoryBus) -> None:
        self._elf, self._bus = elf, bus
        self.symbols = symbols(elf)

    def load(self, machine: str, bits: int) -> int:
        """Put it into the memories of a machine, as pyelftools names it; returns the address of the entry."""
        entry, segments = load_image(self._elf, machine, bits)
        for address, content in segments:
            try:
                self._bus.view(address, len(content))[:] = memoryview(content)
            except SimulationError as error:
                what = f"the firmware does not fit the memories: {error.what}"
                hint = f"give the memories of the target more room, or choose a smaller network; {error.hint}"
                raise SimulationError(what, where="firmware", hint=hint) from None
        return entry

    def write(self, place: str, content: bytes) -> None:
        """Write bytes to "symbol" or "symbol+offset"."""
        self._view(place, len(content))[:] = memoryview(content)

    def read(self, place: str, nbytes: int) -> bytes:
        """Bytes of "symbol" or "symbol+offset"."""
        return self._view(place, nbytes).tobytes()

    def _view(self, place: str, nbytes: int) -> Bytes:
        name, _, offset = place.partition("+")
        symbol, start = self.symbols.get(name), int(offset or 0)
        if symbol is None:
            hint = "keep the buffer alive (not static, used by the model)"
            raise SimulationError(f"there is no symbol '{name}'", where="firmware", hint=hint)
        if symbol.size and start + nbytes > symbol.size:
            raise SimulationError(
                f"{start + nbytes} bytes are wanted of it, it has {symbol.size}",
                where=f"symbol '{name}'",
                hint="compile the model again: the build is not of this firmware",
            )
        return self._bus.view(symbol.address + start, nbytes)

    def text(self, address: int) -> str:
        """The string at an address, cut at 200 bytes."""
        region = next((r for r in self._bus.regions if r.base <= address < r.base + r.size), None)
        if region is None:
            return f"what has its name at {address:#x}"
        content = self._bus.view(address, min(200, region.base + region.size - address)).tobytes()
        return content.partition(b"\0")[0].decode(errors="replace")

    def stack_bytes(self, core: int) -> int | None:
        """The most a core has used of its stack; None where no symbols say where that is."""
        suffix = f"_{core}" if core else ""
        bottom, top = self.symbols.get(f"__stack_bottom{suffix}"), self.symbols.get(f"__stack_top{suffix}")
        if bottom is None or top is None or top.address <= bottom.address:
            return None
        size = top.address - bottom.address
        used = (self._bus.view(bottom.address, size) != INITIAL_BYTE).nonzero()[0]
        depth = size - int(used[0]) if used.size else 0
        if depth == size:
            what = f"all of its {size} bytes were used: it has overflowed"
            hint = "reserve a larger stack (Core.stack)"
            raise SimulationError(what, where=f"stack of core {core}" if core else "stack", hint=hint)
        return depth


class Harness(Device):
    """The simulator's own registers: hands inputs to the firmware, takes outputs, notes the layers.

    The firmware's side is emit/runtime/sim_main.c and DOVETAIL_MARK of dovetail_rt.h. Byte offsets: 0 command
    (1 ready for inputs, 2 inference done, 3 exit), 4 exit code, 8 marker, 12 and 16 cycle counter (reading the low
    word latches the high one), 20 the status of a call that failed, 24 the address of the text that names it.

    Args:
        clock: reads the counters.
        firmware: what inputs are written to and outputs read from.
        devices: the devices, and further cores, whose activities belong to the inferences.
    """

    name = "the simulator's control registers"
    _exit_argument = _latched = _status = 0
    _ready = False
    _start: CounterReading | None = None
    _layer: tuple[int, CounterReading] | None = None
    exit_code: int | None = None
    stop = False

    def __init__(self, clock: Callable[[], CounterReading], firmware: Firmware, devices: Sequence[Device]) -> None:
        self._clock, self._firmware, self._devices = clock, firmware, tuple(devices)
        self._request, self._waiting = RunRequest((), {}), list[Buffers]()
        self._seen: list[int] = []
        self._markers: list[Marker] = []
        self.results: list[InferenceResult] = []

    def begin(self, request: RunRequest) -> None:
        """Take a request; a firmware that is already waiting for inputs gets the first ones at once. Raises
        SimulationError where it has exited."""
        if self.exit_code is not None:
            hint = "start a new session"
            raise SimulationError(f"it has exited with code {self.exit_code}", where="firmware", hint=hint)
        self._request, self._waiting = request, list(request.inputs)
        self.results, self.stop = [], False
        if self._ready:
            self._next_inputs()

    def read(self, offset: int, now: int) -> int:
        if offset == 12:
            self._latched = now >> 32
            return now & 0xFFFFFFFF
        if offset == 16:
            return self._latched
        raise self._unknown(f"read of offset {offset:#x}, where there is nothing to read")

    def write(self, offset: int, value: int, now: int) -> None:
        if offset == 8:
            self._mark(value)
        elif offset == 4:
            self._exit_argument = value
        elif offset == 20:
            self._status = value - (value >> 31 << 32)
        elif offset == 24:
            raise call_failed(self._firmware.text(value), self._status)
        elif offset == 0 and value == 1:
            self._ready = True
            self._next_inputs()
        elif offset == 0 and value == 2:
            self._done()
        elif offset == 0 and value == 3:
            self._exit()
        else:
            raise self._unknown(f"write of {value:#x} to offset {offset:#x}")

    def _unknown(self, what: str) -> SimulationError:
        hint = "leave these registers to the firmware's own start-up code"
        return SimulationError(what, where="simulator's control registers", hint=hint)

    def _next_inputs(self) -> None:
        if not self._waiting:
            self.stop = True
            return
        for name, content in self._waiting.pop(0).items():
            self._firmware.write(name, content)
        self._ready = False
        self._markers, self._layer = [], None
        self._start = self._clock()
        self._seen = [len(device.activities()) for device in self._devices]

    def _mark(self, layer: int) -> None:
        now, start = self._clock(), self._start or CounterReading()
        if self._layer is not None:
            index, begin = self._layer
            cycles = (begin.cycle - start.cycle, now.cycle - start.cycle)
            instructions = (begin.instruction - start.instruction, now.instruction - start.instruction)
            self._markers.append(Marker(index, *cycles, *instructions, now.idle - begin.idle))
        self._layer = None if layer == _END_OF_LAYERS else (layer, now)

    def _done(self) -> None:
        if self._start is None:
            hint = "leave main to the firmware's own start-up code"
            raise SimulationError("it says an inference is done that it never began", where="firmware", hint=hint)
        self._mark(_END_OF_LAYERS)
        start, now = self._start, self._clock()
        self._start = None
        outputs = {name: self._firmware.read(name, size) for name, size in self._request.outputs.items()}
        total, idle = now.cycle - start.cycle, now.idle - start.idle
        counts = (now.instruction - start.instruction, total - idle, total, idle)
        activities: dict[str, list[Activity]] = {device.name: [] for device in self._devices}
        for device, seen in zip(self._devices, self._seen, strict=True):
            for job in device.activities()[seen:]:
                moved = replace(job, start=job.start - start.cycle, end=job.end - start.cycle)
                activities.setdefault(job.unit or device.name, []).append(moved)
        jobs = {name: tuple(own) for name, own in activities.items()}
        traffic = {name: count - start.traffic.get(name, 0) for name, count in now.traffic.items()}
        self.results.append(InferenceResult(outputs, *counts, tuple(self._markers), jobs, traffic=traffic))

    def _exit(self) -> None:
        self.exit_code = self._exit_argument
        self.stop = True
        if self._waiting or self._start is not None:
            raise SimulationError(
                f"it exited with code {self.exit_code} after {len(self.results)} of "
                f"{len(self._request.inputs)} inferences",
                where="firmware",
                hint="look for a call of exit or an error in the driver; its text is in the output",
            )


class Machine:
    """A chip with its firmware loaded, standing at the reset vector; raises SimulationError where memories or devices
    overlap or are misaligned, or the firmware does not fit them."""

    def __init__(self, setup: SimulationSetup) -> None:
        self.bus = MemoryBus(setup.memories)
        self.devices: list[Device] = [make_device(spec, self.bus) for spec in setup.devices]
        self._clocks = [device.clock for device in self.devices if hasattr(device, "clock")]
        self.firmware = Firmware(setup.elf, self.bus)
        tables = [core_costs(setup.isa, costs, setup.elf.name) for costs in (setup.costs, *setup.workers)]
        parts = (self.bus, setup.elf, self.firmware.symbols, setup.extension)
        own, *others = [CoreSetup(setup.isa, table, *parts) for table in tables]
        self._workers = [Worker(number, core, setup.mailbox) for number, core in enumerate(others, 1)]
        self._harness = Harness(self._clock, self.firmware, [*self.devices, *self._workers])
        windows = [
            AddressWindow(spec.base, spec.size, one)
            for spec, one in zip(setup.devices, self.devices, strict=True)
            if not spec.opcode
        ]
        pairs = zip(setup.devices, self.devices, strict=True)
        led = {spec.opcode: cast(Coprocessor, one) for spec, one in pairs if spec.opcode}
        own = replace(own, coprocessors=led)
        if self._workers:
            self.devices.append(Mailbox(self._workers))
            windows.append(AddressWindow(setup.mailbox, MAILBOX_SIZE, self.devices[-1]))
        windows.append(AddressWindow(SIM_CONTROL, 4096, self._harness))
        self._idle = 0
        self._cpu = self._processor(setup, own, windows)
        self._core, self._state = self._cpu.core, self._cpu.state
        architecture = architecture_of(setup.isa)
        entry = self.firmware.load(architecture.elf_machine, architecture.bits)
        self._cpu.start(entry)
        for worker in self._workers:
            worker.start(entry)
        for device in self.devices:
            device.reset()

    def _processor(
        self, setup: SimulationSetup, own: CoreSetup, windows: list[AddressWindow]
    ) -> Processor | RtlProcessor:
        """Core 0: in the emulator, or in Verilog where the setup says so."""
        if not setup.core_rtl:
            return Processor(own, windows, self._access)
        if own.coprocessors:
            hint = "leave out --core"
            raise SimulationError("instructions of it lead to devices", where=f"core {setup.core_rtl}", hint=hint)
        from dovetail.sim.core_rtl import RtlProcessor

        return RtlProcessor(own, windows, self._access, setup.core_rtl, setup.core_library)

    @property
    def cycles(self) -> int:
        """Cycles since the reset, those slept included."""
        return int(self._state.cycles)

    def run(self, request: RunRequest) -> SimulationResult:
        """Run the inferences of `request`, or up to the firmware's exit when there are none; raises SimulationError for
        a fault of the firmware or of a device, a hang, or the instruction limit."""
        state, harness = self._state, self._harness
        state.instruction_limit = state.instructions + request.instruction_limit
        for worker in self._workers:
            worker.instruction_limit = worker.instructions + request.instruction_limit
        harness.begin(request)
        while not harness.stop:
            self._advance(state.cycles)
            if self._cpu.asleep_at is not None:
                self._sleep(self._cpu.asleep_at)
            self._take_interrupt()
            self._arm()
            self._cpu.execute()
            if state.stop_reason == STOP_LIMIT and not harness.stop:
                what = f"the firmware executed {request.instruction_limit} instructions without an end"
                raise SimulationError(what, where=self._cpu.place(self._core.pc()), hint=self._cpu.recent())
        stack, *others = [self.firmware.stack_bytes(core) for core in range(len(self._workers) + 1)]
        return SimulationResult(tuple(harness.results), stack, state.instructions, harness.exit_code, tuple(others))

    def _events(self) -> list[int]:
        """The cycles of the devices' next events."""
        return [event for device in self.devices if (event := device.next_event()) is not None]

    def _advance(self, now: int) -> None:
        """Let the devices complete what is due, in the order of time across devices."""
        while (moment := min(self._events(), default=NEVER)) <= now:
            for device in self.devices:
                device.advance(moment)
                if device.next_event() == moment:
                    raise RuntimeError(f"device '{device.name}' leaves its event of cycle {moment} undone")
        for device in self.devices:
            device.advance(now)

    def _arm(self) -> None:
        """Tell the hook when to stop next."""
        self._state.deadline = 0 if self._harness.stop else min(self._events(), default=NEVER)
        self._state.interrupt = int(self._interrupt())

    def _interrupt(self) -> bool:
        return self._core.line_enabled() and any(device.interrupt() for device in self.devices)

    def _sleep(self, place: int) -> None:
        """Carry on after wfi: let time jump from event to event until a device raises its interrupt."""
        while not self._interrupt():
            moment = min(self._events(), default=NEVER)
            if moment == NEVER:
                what = "deadlock: the core waits for an interrupt and no device is running"
                raise SimulationError(what, where=self._cpu.place(place), hint=self._cpu.recent())
            for clock in self._clocks:
                moment = min(moment, clock(moment))
            skipped = max(0, moment - self._state.cycles)
            self._idle += skipped
            self._state.cycles += skipped
            self._advance(self._state.cycles)
        self._cpu.asleep_at = None
        self._state.cycles += self._core.wake

    def _take_interrupt(self) -> None:
        """Enter the handler if a line is high and nothing masks it."""
        cycles = self._core.enter_interrupt() if self._interrupt() else None
        if cycles is not None:
            self._state.cycles += cycles
            self._state.taken_extra = 0

    def _access(self, kind: str, device: Device, offset: int, value: int) -> int:
        """An access of core 0 to a device or the harness."""
        now, raised = self._state.cycles, bool(self._state.interrupt)
        self._advance(now)
        value = access(kind, device, offset, value, now)
        self._arm()
        if self._state.interrupt and not raised:
            self._state.deadline = 0  # a new interrupt may be due at the next block
        return value

    def _clock(self) -> CounterReading:
        traffic = Counter(self._cpu.traffic())
        for worker in self._workers:
            traffic.update(worker.traffic())
        return CounterReading(*self._cpu.clock(), self._idle, traffic)


def load(content: Content) -> Runner:
    """Build the machine of a `SimulationSetup`; raises SimulationError as `Machine` does."""
    return Machine(content.of(SimulationSetup)).run
