"""Simulators: what they are given, what they answer, and how client and worker write that to a pipe.

A message is its length as a little-endian 64-bit number, then MessagePack: a small mapping, and a record as content.
Nothing that is read is ever executed, records are checked against their types, and the length is bounded.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from dovetail.documented import document
from dovetail.errors import SimulationError
from dovetail.records import Record, field
from dovetail.sim.device import Activity, DeviceSpec, MemoryRegion

MAXIMUM_MESSAGE = 4 << 30
"""Bytes a message may have."""
SIM_CONTROL = 0x1A000000
"""Address of the harness's registers (DOVETAIL_SIM_CONTROL in dovetail_rt.h)."""
DEFAULT_INSTRUCTION_LIMIT = 20_000_000_000
DEFAULT_TIMEOUT = 600.0
"""Seconds a request may take."""
_LENGTH = struct.Struct("<Q")
_Record = TypeVar("_Record")

Json = dict[str, Any]
Buffers = Mapping[str, bytes]
"""Contents by the name of the C symbol."""


def call_failed(what: str, status: int) -> SimulationError:
    """The error for a call that its library says has failed: `what` names function and layer."""
    hint = "look that number up in the library's header"
    return SimulationError(f"the call failed: it returned {status}", where=what, hint=hint)


class SimulationSetup(Record):
    """The simulated chip, and its firmware."""

    elf: Path
    """Firmware file, linked with sim_main.c or other code that writes the same commands."""
    memories: tuple[MemoryRegion, ...]
    """Memories of the chip. Base addresses are multiples of 4096; the core reaches up to the next multiple after the
    end."""
    devices: tuple[DeviceSpec, ...] = ()
    """Devices of the chip; their address ranges may share a page, but not overlap."""
    isa: str = "rv32imc"
    """Instruction set of the core."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """Cycles of classes of instructions that differ from the instruction set's defaults (`riscv.py`, `arm.py`)."""
    extension: str = ""
    """C file, or "module:function", that executes the core's own instructions; empty for none."""
    workers: tuple[Mapping[str, int], ...] = ()
    """Costs of each further core, as in `costs`, from number 1 on."""
    mailbox: int = 0x1A010000
    """Address of the registers through which core 0 starts further cores."""
    core_rtl: str = ""
    """Name of the Verilog core in place of core 0 (`core_rtl.py`); empty for none."""
    core_library: Path = Path()
    """Library built from that Verilog."""


class HostSetup(Record):
    """A shared library compiled for this computer, and the name of the model's entry point, void f(void)."""

    library: Path
    """Shared library with the network."""
    entry: str
    """Name of the library's function for one inference."""
    layers: int = 0
    """Number of layers, for drivers that take the time of each."""


class Marker(Record):
    """The time from one DOVETAIL_MARK, which was given the layer, to the next; cycles and instructions since the start
    of the inference."""

    layer: int
    """Number of the layer."""
    start_cycle: int
    """Cycle at its beginning."""
    end_cycle: int
    """Cycle at its end."""
    start_instruction: int
    """Instructions executed before its beginning."""
    end_instruction: int
    """Instructions executed before its end."""
    idle: int = 0
    """Cycles of these in which the core slept."""


class InferenceResult(Record):
    """Outputs and costs of one inference. On the host there are only outputs, and no time."""

    outputs: Mapping[str, bytes]
    """Contents of the output symbols."""
    instructions: int | None = None
    """Executed by the core."""
    core_cycles: int | None = None
    """Cycles in which the core was executing."""
    total_cycles: int | None = None
    """`core_cycles` and `idle_cycles` together: the time from "ready" to "done"."""
    idle_cycles: int | None = None
    """Cycles the core slept in wfi."""
    markers: tuple[Marker, ...] = ()
    """Beginnings and ends of layers, in order."""
    activities: Mapping[str, tuple[Activity, ...]] = field(default_factory=dict)
    """Jobs that ended during this inference, by device name, in cycles since its start."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Memory -> bytes cores read and wrote, where the target says what a byte costs."""
    nanoseconds: int | None = None
    """Time it took on this computer; None on a simulated chip."""
    layer_nanoseconds: tuple[int, ...] = ()
    """Time an engine's device took for each layer, where its driver has `dovetail_nanoseconds`; empty elsewhere."""


class SimulationResult(Record):
    """The results of a request."""

    inferences: tuple[InferenceResult, ...]
    """Results, one for each set of inputs."""
    stack_bytes: int | None = None
    """Most bytes of stack ever used since the firmware was loaded; None where unknown."""
    executed_instructions: int | None = None
    """Since the firmware was loaded, start-up included."""
    exit_code: int | None = None
    """Exit code of the firmware; None while it waits for the next inputs."""
    worker_stack_bytes: tuple[int | None, ...] = ()
    """Most bytes of stack that each further core used, from number 1 on."""


class RunRequest(Record):
    """Inferences for a simulator."""

    inputs: tuple[Buffers, ...]
    """Contents of the input symbols, for each inference."""
    outputs: Mapping[str, int]
    """Output symbols and their sizes in bytes."""
    instruction_limit: int = DEFAULT_INSTRUCTION_LIMIT
    """Instructions all of them together may take."""


Runner = Callable[[RunRequest], SimulationResult]
"""The function that answers requests; `load(content)` of a worker's module returns it."""


class Simulator(ABC):
    """A backend that runs inferences and stays open between them: a simulated chip, this computer, or a board."""

    @abstractmethod
    def run(self, inputs: Sequence[Buffers], outputs: Mapping[str, int]) -> SimulationResult:
        """Run one inference for each element of `inputs`, the contents of the input symbols, in succession; `outputs`
        are the output symbols and their sizes in bytes. Raises DovetailError, and is then of no further use."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; may be called again."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close."""
        self.close()


class Content:
    """The record that came with a message."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data

    def of(self, kind: type[_Record]) -> _Record:
        """The content as a record of this type."""
        return msgspec.msgpack.decode(self._data, type=kind, dec_hook=lambda to, text: to(text))


class _Message(msgspec.Struct, array_like=True):
    head: Json
    content: msgspec.Raw


def send(write: Callable[[bytes], object], message: Json, content: object = None) -> None:
    """Write a message with `write`: a mapping of plain values, and a dataclass or None as `content`; raises
    SimulationError where it is larger than `MAXIMUM_MESSAGE`."""
    data = msgspec.msgpack.encode((message, content), enc_hook=_plain)
    _check_length(len(data))
    write(_LENGTH.pack(len(data)))
    write(data)


def receive(read: Callable[[int], bytes]) -> tuple[Json, Content] | None:
    """Read a message, None where the stream ends before it; raises SimulationError where it is damaged or too large.

    `read(n)` must give exactly n bytes, or fewer at the end of the stream.
    """
    header = read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    _check_length(length)
    data = read(length)
    if len(data) < length:
        return None
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
    except msgspec.MsgspecError as error:
        hint = "let nothing else in the device model write to standard output"
        raise SimulationError(f"a message is damaged: {error}", where="simulator", hint=hint) from None
    return message.head, Content(memoryview(message.content))


def _check_length(length: int) -> None:
    if length > MAXIMUM_MESSAGE:
        what = f"a message has {length} bytes; the limit is {MAXIMUM_MESSAGE}"
        raise SimulationError(what, where="simulator", hint="run fewer inferences per request")


def _plain(value: Any) -> Any:
    """A value of a type that MessagePack does not have, as one that it has."""
    return dict(value) if isinstance(value, Mapping) else str(value)


document(__name__)
