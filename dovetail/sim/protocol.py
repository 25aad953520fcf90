"""Simulators: what they are given, what they answer, and how client and worker write that to a pipe.

A message is a JSON object and byte strings: a header of two little-endian 64-bit numbers (bytes of JSON, bytes of
all byte strings), the JSON, whose "blobs" lists the sizes of the byte strings, then those. Nothing that is read
is ever executed, and all sizes are bounded.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from dovetail.errors import SimulationError
from dovetail.sim.device import Activity, DeviceSpec, MemoryRegion

MAXIMUM_JSON = 256 << 20
"""Bytes of JSON a message may have."""
MAXIMUM_BLOBS = 4 << 30
"""Bytes of byte strings a message may have."""
SIM_CONTROL = 0x1A000000
"""Address of the harness's registers (DOVETAIL_SIM_CONTROL in dovetail_rt.h)."""
DEFAULT_INSTRUCTION_LIMIT = 20_000_000_000
DEFAULT_TIMEOUT = 600.0
"""Seconds a request may take."""
_HEADER = struct.Struct("<QQ")
_Kind = TypeVar("_Kind")

Json = dict[str, Any]
Buffers = Mapping[str, bytes]
"""Contents by the name of the C symbol."""


def call_failed(what: str, status: int) -> SimulationError:
    """The error for a call that its library says has failed: `what` names function and layer."""
    hint = "look that number up in the library's header"
    return SimulationError(f"the call failed: it returned {status}", where=what, hint=hint)


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """The chip and its firmware.

    Attributes:
        elf: the firmware, linked with sim_main.c (or anything that writes the same commands).
        memories: base addresses must be multiples of 4096; the core can reach up to the next multiple after the end.
        devices: their address ranges may share a page, not overlap.
        isa: instruction set of the core. costs: cycles per class of instruction where they differ from the stated
            default of that instruction set (`riscv.py`, `arm.py`).
        sim_control: address of the harness's registers.
        native_hook: count with the compiled block hook where a host compiler exists; False: in Python.
        extension: "module:function" that executes the core's own instructions; empty for none.
        workers: the same as `costs` for each further core, from number 1 on. mailbox: address of the registers by
            which core 0 starts them.
        core_rtl: the core in Verilog that takes the place of core 0 (`core_rtl.py`); empty for none. core_library:
            where it is built.
    """

    elf: Path
    memories: tuple[MemoryRegion, ...]
    devices: tuple[DeviceSpec, ...] = ()
    isa: str = "rv32imc"
    costs: Mapping[str, int] = field(default_factory=dict)
    sim_control: int = SIM_CONTROL
    native_hook: bool = True
    extension: str = ""
    workers: tuple[Mapping[str, int], ...] = ()
    mailbox: int = 0x1A010000
    core_rtl: str = ""
    core_library: Path = Path()


@dataclass(frozen=True, slots=True)
class HostSetup:
    """A shared library compiled for this computer, and the name of the model's entry point, void f(void)."""

    library: Path
    entry: str


@dataclass(frozen=True, slots=True)
class Marker:
    """The time from one DOVETAIL_MARK, which was given the layer, to the next; cycles and instructions since the start
    of the inference."""

    layer: int
    start_cycle: int
    end_cycle: int
    start_instruction: int
    end_instruction: int


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """One run of the model. On the host there are only outputs, and no time."""

    outputs: Mapping[str, bytes]
    instructions: int | None = None
    """Executed by the core."""
    core_cycles: int | None = None
    """Cycles in which the core was executing."""
    total_cycles: int | None = None
    """`core_cycles` and `idle_cycles` together: the time from "ready" to "done"."""
    idle_cycles: int | None = None
    """Cycles the core slept in wfi."""
    markers: tuple[Marker, ...] = ()
    """Layers, in order."""
    activities: Mapping[str, tuple[Activity, ...]] = field(default_factory=dict)
    """By device name: jobs that ended during this inference, cycles since its start."""
    nanoseconds: int | None = None
    """What it took on this computer; None on a simulated chip."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a request gave."""

    inferences: tuple[InferenceResult, ...]
    """One per set of inputs."""
    stack_bytes: int | None = None
    """Most bytes of stack ever used since the firmware was loaded; None where unknown."""
    executed_instructions: int | None = None
    """Since the firmware was loaded, start-up included."""
    exit_code: int | None = None
    """What the firmware exited with, None while it waits for the next inputs."""
    worker_stack_bytes: tuple[int | None, ...] = ()
    """As `stack_bytes`, of each further core from number 1 on."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Inferences to run."""

    inputs: tuple[Buffers, ...]
    """For each inference the contents of the input symbols."""
    outputs: Mapping[str, int]
    """Output symbols and their sizes in bytes."""
    instruction_limit: int = DEFAULT_INSTRUCTION_LIMIT
    """Instructions all of them together may take."""


Runner = Callable[[RunRequest], SimulationResult]
"""What `load(content)` of a worker's module gives: the function that answers requests."""


class Simulator(ABC):
    """What runs inferences, kept open between them: a simulated chip, this computer, or a board."""

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
    """What came with a message: JSON, and the byte strings that were taken out of it."""

    def __init__(self, json: Any, blobs: Sequence[bytes]) -> None:
        self._json, self._blobs = json, blobs

    def of(self, kind: type[_Kind]) -> _Kind:
        """The content as an object of a dataclass."""
        found: _Kind = _typed(kind, self._json, iter(self._blobs))
        return found


def send(write: Callable[[bytes], object], message: Json, content: object = None) -> None:
    """Write a message with `write`: a JSON object, and a dataclass or None as `content`; raises SimulationError where
    it is larger than the bounds."""
    blobs: list[bytes] = []
    message = {**message, "content": _plain(content, blobs), "blobs": [len(blob) for blob in blobs]}
    text = json.dumps(message).encode()
    total = sum(len(blob) for blob in blobs)
    _bounded(len(text), total)
    write(_HEADER.pack(len(text), total) + text)
    for blob in blobs:
        write(blob)


def receive(read: Callable[[int], bytes]) -> tuple[Json, Content] | None:
    """Read a message, None where the stream ends before it; raises SimulationError where it is damaged or too large.

    `read(n)` must give exactly n bytes, or fewer at the end of the stream.
    """
    header = read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    text_size, total = _HEADER.unpack(header)
    _bounded(text_size, total)
    text, content = read(text_size), read(total) if total else b""
    if len(text) < text_size or len(content) < total:
        return None
    message = json.loads(text)
    sizes = message.pop("blobs")
    if sum(sizes) != total or any(size < 0 for size in sizes):
        what = f"a message is damaged: {total} bytes, announced {sizes[:8]}"
        hint = "let nothing else in the device model write to standard output"
        raise SimulationError(what, where="simulator", hint=hint)
    blobs = [content[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return message, Content(message.pop("content"), blobs)


def _bounded(text: int, blobs: int) -> None:
    if text > MAXIMUM_JSON or blobs > MAXIMUM_BLOBS:
        what = f"a message has {text} + {blobs} bytes; the limits are {MAXIMUM_JSON} + {MAXIMUM_BLOBS}"
        raise SimulationError(what, where="simulator", hint="run fewer inferences per request")


def _plain(value: Any, blobs: list[bytes]) -> Any:
    """A value as JSON has it: a dataclass as the list of its fields; byte strings are taken out, in their order."""
    if isinstance(value, bytes | bytearray | memoryview):
        blobs.append(bytes(value))
        return None
    if is_dataclass(value):
        return [_plain(getattr(value, field.name), blobs) for field in fields(value)]
    if isinstance(value, Mapping):
        return {name: _plain(content, blobs) for name, content in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(content, blobs) for content in value]
    return str(value) if isinstance(value, Path) else value


def _typed(kind: Any, value: Any, blobs: Iterator[bytes]) -> Any:
    """The value of a type that `_plain` wrote."""
    if kind is bytes:
        return next(blobs)
    origin = get_origin(kind)
    if origin is None and hasattr(kind, "__dataclass_fields__"):
        return kind(*(_typed(of, each, blobs) for of, each in zip(_field_types(kind), value, strict=True)))
    if origin is tuple:
        return tuple(_typed(get_args(kind)[0], each, blobs) for each in value)
    if origin is Mapping:
        return {name: _typed(get_args(kind)[1], each, blobs) for name, each in value.items()}
    return Path(value) if kind is Path else value


@cache
def _field_types(kind: Any) -> tuple[Any, ...]:
    return tuple(get_type_hints(kind).values())
