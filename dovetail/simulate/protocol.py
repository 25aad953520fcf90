"""What client and worker of a simulator say to each other, and how it is written to a pipe.

A message is a JSON object and byte strings: a header of two little-endian 64-bit numbers (bytes of JSON, bytes of
all byte strings), the JSON, whose "blobs" lists the sizes of the byte strings, then those. Nothing that is read
is ever executed, and all sizes are bounded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dovetail.errors import SimulationError
from dovetail.simulate.device import Activity, MemoryRegion

MAXIMUM_JSON = 256 << 20
"""Bytes of JSON a message may have."""
MAXIMUM_BLOBS = 4 << 30
"""Bytes of byte strings a message may have."""
SIM_CONTROL = 0x1A000000
"""Address of the harness's registers (DOVETAIL_SIM_CONTROL in dovetail_rt.h)."""
DEFAULT_INSTRUCTION_LIMIT = 20_000_000_000
_HEADER = struct.Struct("<QQ")

Json = dict[str, Any]
Buffers = Mapping[str, bytes]
"""Contents by the name of the C symbol."""


def call_failed(what: str, status: int) -> SimulationError:
    """The error for a call that its library says has failed: `what` names function and layer."""
    return SimulationError(f"the call failed: it returned {status}", where=what,
                           hint="look that number up in the library's header")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device of the simulated chip.

    Attributes:
        factory: "module:function" or "path/file.py:function"; called as function(bus, **arguments), gives a `Device`.
        base: address of its registers. size: bytes of address space, all of it for this device.
        arguments: keyword arguments of the factory, as JSON allows them.
    """

    factory: str
    base: int
    size: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """The chip and its firmware.

    Attributes:
        elf: the firmware, linked with sim_main.c (or anything that writes the same commands).
        memories: base addresses must be multiples of 4096; the core can reach up to the next multiple after the end.
        devices: their address ranges may share a page, not overlap.
        isa: instruction set of the core. costs: cycles per class of instruction where they differ from the stated
            default of that instruction set (`riscv_costs.py`, `arm_costs.py`).
        sim_control: address of the harness's registers.
        native_hook: count with the compiled block hook where a host compiler exists; False: in Python.
        extension: "module:function" that executes the core's own instructions; empty for none.
        workers: the same as `costs` for each further core, from number 1 on. mailbox: address of the registers by
            which core 0 starts them.
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


@dataclass(frozen=True, slots=True)
class Marker:
    """The time from one DOVETAIL_MARK to the next; cycles and instructions since the start of the inference.

    Attributes:
        layer: what was given to DOVETAIL_MARK.
    """

    layer: int
    start_cycle: int
    end_cycle: int
    start_instruction: int
    end_instruction: int


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """One run of the model. On the host there are only outputs, and no time.

    Attributes:
        outputs: contents of the output symbols.
        instructions: executed by the core.
        core_cycles: cycles in which the core was executing.
        total_cycles: core_cycles + idle_cycles: the time from "ready" to "done".
        idle_cycles: cycles the core slept in wfi.
        markers: layers, in order.
        activities: by device name: jobs that ended during this inference, cycles since its start.
        nanoseconds: what it took on this computer; None on a simulated chip.
    """

    outputs: Mapping[str, bytes]
    instructions: int | None = None
    core_cycles: int | None = None
    total_cycles: int | None = None
    idle_cycles: int | None = None
    markers: tuple[Marker, ...] = ()
    activities: Mapping[str, tuple[Activity, ...]] = field(default_factory=dict)
    nanoseconds: int | None = None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a request gave.

    Attributes:
        inferences: one per set of inputs.
        stack_bytes: most bytes of stack ever used since the firmware was loaded; None where unknown.
        executed_instructions: since the firmware was loaded, start-up included.
        exit_code: what the firmware exited with, None while it waits for the next inputs.
        worker_stack_bytes: as `stack_bytes`, of each further core from number 1 on.
    """

    inferences: tuple[InferenceResult, ...]
    stack_bytes: int | None = None
    executed_instructions: int | None = None
    exit_code: int | None = None
    worker_stack_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Inferences to run.

    Attributes:
        inputs: for each inference the contents of the input symbols.
        outputs: output symbols and their sizes in bytes.
        instruction_limit: instructions all of them together may take.
    """

    inputs: tuple[Buffers, ...]
    outputs: Mapping[str, int]
    instruction_limit: int = DEFAULT_INSTRUCTION_LIMIT


def send(write: Callable[[bytes], object], message: Json, blobs: Sequence[bytes] = ()) -> None:
    """Write a message with `write`.

    Raises:
        SimulationError: it is larger than the bounds.
    """
    text = json.dumps({**message, "blobs": [len(blob) for blob in blobs]}).encode()
    total = sum(len(blob) for blob in blobs)
    _bounded(len(text), total)
    write(_HEADER.pack(len(text), total) + text)
    for blob in blobs:
        write(blob)


def receive(read: Callable[[int], bytes]) -> tuple[Json, list[bytes]] | None:
    """Read a message; `read(n)` must give exactly n bytes, or fewer at the end of the stream.

    Returns:
        The JSON object and the byte strings; None where the stream ends before the message.

    Raises:
        SimulationError: the message is damaged or too large.
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
        raise SimulationError(f"a message is damaged: {total} bytes, announced {sizes[:8]}", where="simulator",
                              hint="let nothing else in the device model write to standard output")
    blobs, position = [], 0
    for size in sizes:
        blobs.append(content[position : position + size])
        position += size
    return message, blobs


def _bounded(text: int, blobs: int) -> None:
    if text > MAXIMUM_JSON or blobs > MAXIMUM_BLOBS:
        raise SimulationError(f"a message has {text} + {blobs} bytes; the limits are {MAXIMUM_JSON} + {MAXIMUM_BLOBS}",
                              where="simulator", hint="run fewer inferences per request")


def setup_to_json(setup: SimulationSetup) -> Json:
    """Write a setup as JSON."""
    devices = [{"factory": spec.factory, "base": spec.base, "size": spec.size, "arguments": dict(spec.arguments)}
               for spec in setup.devices]
    return {
        "elf": str(setup.elf.resolve()), "memories": [asdict(region) for region in setup.memories],
        "devices": devices, "isa": setup.isa, "costs": dict(setup.costs), "sim_control": setup.sim_control,
        "native_hook": setup.native_hook, "extension": setup.extension,
        "workers": [dict(costs) for costs in setup.workers], "mailbox": setup.mailbox,
    }


def setup_from_json(data: Json) -> SimulationSetup:
    """Read what `setup_to_json` wrote."""
    return SimulationSetup(
        Path(data["elf"]),
        tuple(MemoryRegion(**region) for region in data["memories"]),
        tuple(DeviceSpec(**device) for device in data["devices"]),
        data["isa"], data["costs"], data["sim_control"], data["native_hook"], data["extension"],
        tuple(data["workers"]), data["mailbox"],
    )


def run_to_message(request: RunRequest) -> tuple[Json, list[bytes]]:
    """Write a request as JSON and byte strings."""
    names = [list(inputs) for inputs in request.inputs]
    message = {"inputs": names, "outputs": dict(request.outputs), "instruction_limit": request.instruction_limit}
    return message, [bytes(content) for inputs in request.inputs for content in inputs.values()]


def run_from_message(message: Json, blobs: Sequence[bytes]) -> RunRequest:
    """Read what `run_to_message` wrote."""
    contents = iter(blobs)
    inputs = tuple({name: next(contents) for name in names} for names in message["inputs"])
    return RunRequest(inputs, message["outputs"], message["instruction_limit"])


def result_to_message(result: SimulationResult) -> tuple[Json, list[bytes]]:
    """Write a result as JSON and byte strings."""
    message = asdict(result)
    for inference in message["inferences"]:
        inference["outputs"] = list(inference["outputs"])
    return message, [content for inference in result.inferences for content in inference.outputs.values()]


def result_from_message(message: Json, blobs: Sequence[bytes]) -> SimulationResult:
    """Read what `result_to_message` wrote."""
    contents = iter(blobs)
    inferences = tuple(
        InferenceResult(**{
            **data,
            "outputs": {name: next(contents) for name in data["outputs"]},
            "markers": tuple(Marker(**marker) for marker in data["markers"]),
            "activities": {name: tuple(Activity(**activity) for activity in activities)
                           for name, activities in data["activities"].items()},
        })
        for data in message["inferences"]
    )
    return SimulationResult(
        inferences, message["stack_bytes"], message["executed_instructions"], message["exit_code"],
        tuple(message["worker_stack_bytes"]),
    )
