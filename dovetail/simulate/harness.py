"""The simulator's own registers: hands inputs to the firmware, takes outputs, notes the layers.

The firmware's side is emit/runtime/sim_main.c and DOVETAIL_MARK of dovetail_rt.h. Byte offsets: 0 command
(1 ready for inputs, 2 inference done, 3 exit), 4 exit code, 8 marker, 12 and 16 cycle counter (reading the low
word latches the high one), 20 the status of a call that failed, 24 the address of the text that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dovetail.errors import SimulationError
from dovetail.simulate.device import Activity
from dovetail.simulate.protocol import Buffers, InferenceResult, Marker, RunRequest, call_failed

SIZE = 4096
"""Bytes of address space."""
END_OF_LAYERS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Clock:
    """A reading of the counters: time, instructions executed, and cycles slept, all since the reset."""

    cycle: int
    instruction: int
    idle: int


class Active(Protocol):
    """What has a line in the timeline."""

    name: str

    def activities(self) -> list[Activity]:
        """See `Device.activities`."""
        ...


class Harness:
    """The device at the simulator's control address.

    Args:
        clock: reads the counters.
        write: copies bytes to a symbol. read: returns so many bytes of a symbol.
        text: returns the string at an address.
        devices: the devices, and further cores, whose activities belong to the inferences.
    """

    def __init__(
        self, clock: Callable[[], Clock], write: Callable[[str, bytes], None], read: Callable[[str, int], bytes],
        text: Callable[[int], str], devices: Sequence[Active],
    ) -> None:
        self._clock = clock
        self._write_symbol = write
        self._read_symbol = read
        self._text = text
        self._devices = tuple(devices)
        self._request = RunRequest((), {})
        self._waiting: list[Buffers] = []
        self._ready = False
        self._start: Clock | None = None
        self._seen = [0] * len(self._devices)
        self._layer: tuple[int, Clock] | None = None
        self._markers: list[Marker] = []
        self._exit_argument = 0
        self._latched = 0
        self._status = 0
        self.results: list[InferenceResult] = []
        self.exit_code: int | None = None
        self.stop = False

    def begin(self, request: RunRequest) -> None:
        """Take a request; a firmware that is already waiting for inputs gets the first ones at once.

        Raises:
            SimulationError: the firmware has exited.
        """
        if self.exit_code is not None:
            raise SimulationError(f"it has exited with code {self.exit_code}", where="firmware",
                                  hint="start a new session")
        self._request = request
        self._waiting = list(request.inputs)
        self.results = []
        self.stop = False
        if self._ready:
            self._next_inputs()

    def read(self, offset: int) -> int:
        """Read a register."""
        if offset == 12:
            cycle = self._clock().cycle
            self._latched = cycle >> 32
            return cycle & 0xFFFFFFFF
        if offset == 16:
            return self._latched
        raise SimulationError(f"read of offset {offset:#x}, where there is nothing to read",
                              where="simulator's control registers",
                              hint="leave these registers to the firmware's own start-up code")

    def write(self, offset: int, value: int) -> None:
        """Write a register."""
        if offset == 8:
            self._mark(value)
        elif offset == 4:
            self._exit_argument = value
        elif offset == 20:
            self._status = value - (value >> 31 << 32)
        elif offset == 24:
            raise call_failed(self._text(value), self._status)
        elif offset == 0 and value == 1:
            self._ready = True
            self._next_inputs()
        elif offset == 0 and value == 2:
            self._done()
        elif offset == 0 and value == 3:
            self._exit()
        else:
            raise SimulationError(f"write of {value:#x} to offset {offset:#x}", where="simulator's control registers",
                                  hint="leave these registers to the firmware's own start-up code")

    def _next_inputs(self) -> None:
        if not self._waiting:
            self.stop = True
            return
        for name, content in self._waiting.pop(0).items():
            self._write_symbol(name, content)
        self._ready = False
        self._markers, self._layer = [], None
        self._start = self._clock()
        self._seen = [len(device.activities()) for device in self._devices]

    def _mark(self, layer: int) -> None:
        now = self._clock()
        start = self._start or Clock(0, 0, 0)
        if self._layer is not None:
            index, begin = self._layer
            self._markers.append(Marker(index, begin.cycle - start.cycle, now.cycle - start.cycle,
                                        begin.instruction - start.instruction,
                                        now.instruction - start.instruction))
        self._layer = None if layer == END_OF_LAYERS else (layer, now)

    def _done(self) -> None:
        if self._start is None:
            raise SimulationError("it says an inference is done that it never began", where="firmware",
                                  hint="leave main to the firmware's own start-up code")
        self._mark(END_OF_LAYERS)
        start, now = self._start, self._clock()
        self._start = None
        outputs = {name: self._read_symbol(name, size) for name, size in self._request.outputs.items()}
        total, idle = now.cycle - start.cycle, now.idle - start.idle
        self.results.append(InferenceResult(
            outputs, now.instruction - start.instruction, total - idle, total, idle, tuple(self._markers),
            {device.name: _since(device.activities()[seen:], start.cycle)
             for device, seen in zip(self._devices, self._seen, strict=True)},
        ))

    def _exit(self) -> None:
        self.exit_code = self._exit_argument
        self.stop = True
        if self._waiting or self._start is not None:
            raise SimulationError(f"it exited with code {self.exit_code} after {len(self.results)} of "
                                  f"{len(self._request.inputs)} inferences", where="firmware",
                                  hint="look for a call of exit or an error in the driver; its text is in the output")


def _since(activities: Sequence[Activity], start: int) -> tuple[Activity, ...]:
    return tuple(replace(a, start=a.start - start, end=a.end - start) for a in activities)
