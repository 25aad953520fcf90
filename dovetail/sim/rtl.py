"""An engine's Verilog in the simulated chip: a device that is clocked while it has work (verilator.py builds it).

The module stands at a cycle of its own, which follows the chip's: register accesses and the other devices' events bring
it up to date, and while the core sleeps it runs to the cycle its interrupt line rises in. While the core is awake it is
brought up to date every `QUANTUM` cycles, so an interrupt that is not slept for may be seen that much later. What a
register access costs is in the core's cycles: wait states of the port do not hold it up, and the cycles of a module
that is idle in them are not counted.
"""

from __future__ import annotations

import ctypes
import re
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import BuildError, SimulationError
from dovetail.sim.device import Activity, Bus, Device, find
from dovetail.sim.verilator import Design, build_design
from dovetail.target.devices import INITIAL, Rtl, RtlPort, read_rtl

_HOST = Path(__file__).with_name("rtl_host.cpp")


def build_rtl(rtl: Rtl, traced: bool = False, cache: Path | None = None) -> Path:
    """The shared library of a module, from a cache (None: the user's) where it is there; `traced` ones can write waves,
    which makes them slower.

    Raises:
        BuildError: a file is missing, Verilator or the C++ compiler refuses it, or its ports are not those said; the
            message is the first error.
        MissingExtraError: there is no Verilator.
    """
    read = (rtl.top, rtl.sources, _HOST, ports_header(rtl), rtl.include, rtl.defines, rtl.parameters, rtl.options)
    return build_design(Design(*read, traced), cache, lambda model: _check_ports(rtl, model))


def _check_ports(rtl: Rtl, model: str) -> None:
    """Raise BuildError where the module lacks a signal of its description, or a memory port has no width of memory."""
    widths = {name: int(high) + 1 for name, high in re.findall(r"VL_(?:IN|OUT)\w*\(&(\w+),(\d+),0", model)}
    ports = [port.signals() for port in (rtl.registers, *rtl.memory)]
    own = [rtl.clock, rtl.reset, rtl.interrupt, rtl.busy, *(name for signals in ports for name in signals.values())]
    if missing := [name for name in own if name and name not in widths]:
        hint = f"its ports: {', '.join(sorted(widths))}"
        raise BuildError(f"the module has no port '{missing[0]}'", where=rtl.top, hint=hint)
    for signals in ports[1:]:
        for name in (signals["wdata"] or signals["rdata"], signals["rdata"]):
            width = widths[name]
            if width < 8 or width & (width - 1) or width != widths[signals["rdata"]]:
                what = f"the port '{name}' is {width} bits wide; data of a memory are 8, 16, 32, ... and alike"
                raise BuildError(what, where=rtl.top, hint="give data ports of a memory one width, 8, 16, 32, ... bits")


_INPUTS = "psel penable pwrite paddr pwdata awvalid awaddr wvalid wdata wstrb bready arvalid araddr rready"
"""Signals of register ports the module reads."""
_ABSENT = {"pready": "1", "pslverr": "0", "bresp": "0", "rresp": "0"}
"""Value of an output that the module lacks."""


def ports_header(rtl: Rtl) -> str:
    """The C++ header that names the module's signals to rtl_host.cpp."""

    def output(own: str, absent: str) -> str:
        """A signal of the module, or what stands for one it has not."""
        return f"(dut->{own})" if own else absent

    lines = [
        f"#define DUT_CLOCK {rtl.clock}",
        *([f"#define DUT_RESET dut->{rtl.reset}", f"#define DUT_RESET_LEVEL {rtl.reset_level}"] if rtl.reset else []),
        f"#define DUT_INTERRUPT {output(rtl.interrupt, '0')}",
        f"#define DUT_BUSY {output(rtl.busy, '1')}",
        f"#define DUT_{rtl.registers.protocol.upper().replace('-', '_')}",
    ]
    for name, own in rtl.registers.signals().items():
        macro = f"{rtl.registers.protocol.partition('-')[0].upper()}_{name.upper()}"
        if name in _INPUTS.split():
            lines.append(f"#define {macro}(value) " + (f"(dut->{own} = (value))" if own else "((void)(value))"))
        else:
            lines.append(f"#define {macro} {output(own, _ABSENT.get(name, ''))}")
    ports = " ".join(_memory_port(number, port) for number, port in enumerate(rtl.memory))
    return "\n".join([*lines, f"#define DUT_MEMORY_PORTS(PORT) {ports}", ""])


def _memory_port(number: int, port: RtlPort) -> str:
    """PORT(number, request, grant, whether it writes, address, wdata, byte enables, rdata)."""
    own = port.signals()
    writes = f"(dut->{own['we']} == {0 if 'we' in port.low else 1})" if own["we"] else "false"
    written = own["wdata"] or own["rdata"]
    enables = f"dut->{own['be']}" if own["be"] else "~UINT64_C(0)"
    signals = [*(f"dut->{own[name]}" for name in ("req", "gnt")), writes, f"dut->{own['addr']}"]
    signals += [f"dut->{written}", enables, f"dut->{own['rdata']}"]
    return f"PORT({number}, {', '.join(signals)})"


QUANTUM = 4096
"""Cycles the module may be behind while the core is awake."""
SETTLE = 16
"""Cycles it is clocked after an access, or after its last work, before it may sleep."""
MOST_WAIT = 1000
"""Cycles a register access may take."""
WAVE_CYCLES = 10_000
"""Cycles that are written to the waves unless asked otherwise."""
_FAULTS = {1: "outside the memories", 2: "at no multiple of that"}
_SILENT = -2


class _RtlState(ctypes.Structure):
    """Mirrors `struct State` of rtl_host.cpp."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("cycles", "time")),
        *((name, ctypes.c_uint32) for name in ("busy", "interrupt", "fault", "fault_write", "fault_address")),
        *((name, ctypes.c_uint32) for name in ("fault_bytes", "stall", "random")),
        *((name, ctypes.c_uint64) for name in ("traced_cycles", "busy_from")),
    )
    cycles: int
    time: int
    busy: int
    interrupt: int
    fault: int
    fault_write: int
    fault_address: int
    fault_bytes: int
    stall: int
    busy_from: int


class VerilatedDevice(Device):
    """A module as a `Device` with a clock, which reaches all memories.

    Args:
        bus: the memories.
        rtl: the module, as `dovetail.target.Rtl.device` writes it.
        name: its name in reports and messages.
        library: the module built; empty to build it here, with the errors of `build_rtl`.
        waves: file the first `wave_cycles` cycles in which it is clocked are written to (VCD, 10 ns a cycle).
    """

    _model: int | None = None

    def __init__(
        self,
        bus: Bus,
        rtl: Mapping[str, Any],
        name: str,
        library: str = "",
        waves: str = "",
        wave_cycles: int = WAVE_CYCLES,
    ) -> None:
        self.name = name
        self._rtl = read_rtl(rtl)
        self._library = _load(Path(library) if library else build_rtl(self._rtl, traced=bool(waves)))
        self._waves, self._wave_cycles = waves.encode(), wave_cycles if waves else 0
        self._memories = memories_of(bus)
        self._macs: Callable[[Mapping[int, int]], int] = (
            find(self._rtl.macs, "function") if self._rtl.macs else lambda registers: 0
        )
        self.reset()

    def reset(self) -> None:
        self.close()
        self._model = self._library.dovetail_rtl_new(
            self._memories, len(self._memories), self._waves, self._wave_cycles, INITIAL[self._rtl.initial]
        )
        self._state: _RtlState = self._library.dovetail_rtl_state(self._model).contents
        self._state.stall = self._rtl.stall
        self._library.dovetail_rtl_reset(self._model)
        self._time = 0
        self._awake_until = SETTLE
        self._changed = self._touched = 0
        self._started: tuple[int, int] | None = None
        self._written: dict[int, int] = {}
        self._accesses: deque[str] = deque(maxlen=8)
        self._done: list[Activity] = []

    def close(self) -> None:
        """Switch the module off, which completes the waves."""
        if self._model is not None:
            self._library.dovetail_rtl_delete(self._model)
        self._model = None

    def __del__(self) -> None:
        """Close."""
        self.close()

    def read(self, offset: int, now: int) -> int:
        return self._access("read", offset, 0, now)

    def write(self, offset: int, value: int, now: int) -> None:
        self._written[offset] = value
        self._access("write", offset, value, now)

    def next_event(self) -> int | None:
        """See `Device.next_event`: when it wants to be brought up to date."""
        return self._time + QUANTUM if self._awake else None

    def advance(self, now: int) -> None:
        while self._time < now:
            self._run(now)

    def clock(self, until: int) -> int:
        raised = self._state.interrupt
        while self._time < until and self._state.interrupt <= raised:
            self._run(until)
        if not self._rtl.busy and self._time - self._touched >= self._rtl.watchdog:
            raise self._error(f"it hangs: no interrupt for {self._rtl.watchdog} cycles while the core waits")
        return self._time

    def interrupt(self) -> bool:
        return bool(self._state.interrupt)

    def activities(self) -> list[Activity]:
        """See `Device.activities`: from busy, or the interrupt before, to the next interrupt, or idle."""
        return list(self._done)

    @property
    def _awake(self) -> bool:
        return bool(self._state.busy) or self._time < self._awake_until

    def _run(self, until: int) -> None:
        """Clock to a cycle, or to the next change; sleeping is a step of any length."""
        if not self._awake:
            self._time = until
            return
        state, before = self._state, (self._state.cycles, self._state.busy, self._state.interrupt)
        settled = (self._changed + self._rtl.watchdog if state.busy else self._awake_until) - self._time
        cycles = min(until - self._time, settled) if self._rtl.busy else until - self._time
        state.time = max(state.time, 2 * self._time)
        self._library.dovetail_rtl_run(self._model, max(1, cycles))
        self._time += state.cycles - before[0]
        self._note(before[1], before[2])

    def _note(self, was_busy: int, was_raised: int) -> None:
        """See what has changed: jobs that began or ended, faults, a hang."""
        state = self._state
        if state.fault:
            what = "writes" if state.fault_write else "reads"
            place = f"{state.fault_address:#x}, {_FAULTS[state.fault]}"
            raise self._error(f"it {what} {state.fault_bytes} bytes at {place}")
        if state.busy == was_busy and state.interrupt == was_raised:
            if self._rtl.busy and state.busy and self._time - self._changed >= self._rtl.watchdog:
                raise self._error(f"it hangs: busy for {self._rtl.watchdog} cycles without an interrupt")
            return
        self._changed, self._awake_until = self._time, self._time + SETTLE
        if self._started and (not state.busy or state.interrupt > was_raised):
            start, macs = self._started
            self._done.append(Activity(start, self._time, f"job {len(self._done) + 1}", macs=macs))
            self._started = None
        if state.busy and self._started is None and self._rtl.busy:
            ago = 0 if was_busy else state.cycles - state.busy_from
            self._started = (self._time - ago, self._macs(self._written))

    def _access(self, kind: str, offset: int, value: int, now: int) -> int:
        """A register access; it begins when the module has come to the present."""
        state, before = self._state, (self._state.cycles, self._state.busy, self._state.interrupt)
        self._time = max(self._time, now)
        state.time = max(state.time, 2 * self._time)
        content = ctypes.c_uint32(value)
        took = self._library.dovetail_rtl_access(self._model, kind == "write", offset, ctypes.byref(content), MOST_WAIT)
        # What an access costs is in the core's cycles; only work that goes on beside it takes time here.
        self._time += state.cycles - (before[0] if before[1] else state.busy_from if state.busy else state.cycles)
        self._awake_until, self._touched = self._time + SETTLE, self._time
        if took == _SILENT:
            raise self._error(f"its register port hangs: no answer to a {kind} of {offset:#x} in {MOST_WAIT} cycles")
        if took < 0:
            raise self._error(f"it refuses a {kind} of its register {offset:#x}")
        self._accesses.append(f"cycle {now}: {kind} {offset:#x} = {content.value:#x}")
        self._note(before[1], before[2])
        return content.value

    def _error(self, what: str) -> SimulationError:
        hint = f"last register accesses: {'; '.join(self._accesses) or 'none'}"
        return SimulationError(f"{what} (cycle {self._time})", where=self.name, hint=hint)


def _load(path: Path) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    types: dict[str, tuple[list[Any], Any]] = {
        "new": ([pointer, number, ctypes.c_char_p, ctypes.c_uint64, number], pointer),
        "delete": ([pointer], None),
        "state": ([pointer], ctypes.POINTER(_RtlState)),
        "reset": ([pointer], None),
        "access": ([pointer, number, number, ctypes.POINTER(number), ctypes.c_int32], ctypes.c_int32),
        "run": ([pointer, ctypes.c_uint64], None),
    }
    return load_calls(path, "dovetail_rtl_", types)


class _VerilogMemory(ctypes.Structure):
    """Mirrors `struct Memory` of rtl_host.cpp and core_host.cpp."""

    _fields_ = (("base", ctypes.c_uint64), ("size", ctypes.c_uint64), ("data", ctypes.c_void_p))


def memories_of(bus: Bus) -> ctypes.Array[Any]:
    """The memories of a chip as the C++ around a design takes them; the arrays stay those of the bus."""
    memories = (_VerilogMemory * len(bus.regions))()
    for memory, region in zip(memories, bus.regions, strict=True):
        memory.base, memory.size = region.base, region.size
        memory.data = bus.view(region.base, region.size).ctypes.data
    return memories


def load_calls(path: Path, prefix: str, types: Mapping[str, tuple[list[Any], Any]]) -> ctypes.CDLL:
    """A library that `build_design` made, its functions `prefix` + name typed: arguments and result by name."""
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in types.items():
        function = getattr(library, prefix + name)
        function.argtypes, function.restype = arguments, result
    return library
