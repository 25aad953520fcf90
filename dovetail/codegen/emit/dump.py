"""Every launch as raw files, so that another executor of the same engine can run it: memory image, commands, and what
the result must be, with a JSON index.

    index.json                     engine, launches
    00_conv_1/image.bin            memory before the launch: values, constants, the parts of the commands
    00_conv_1/instructions.bin     each part of a command by itself
    00_conv_1/expected.bin         the bytes of the result, in its layout
    00_conv_1/mask.bin             only where the result does not fill its last block: 0 for bytes that may be anything
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.codegen.emit.unit import Unit, addressed_operands
from dovetail.errors import TargetError
from dovetail.folders import write_files
from dovetail.ir.layout import row_major
from dovetail.ir.types import Array
from dovetail.program.interpret import LaunchRecord, observe
from dovetail.program.ir import View, store
from dovetail.target.offload import Command
from dovetail.version import __version__

SCHEMA = 1
_ALIGNMENT = 256
"""Bytes that constants and parts of commands are aligned to in an image."""


def dump(unit: Unit, inputs: Mapping[str, Array], folder: Path) -> int:
    """Write the launches of one inference into `folder`, and return how many there are; raises TargetError where
    nothing runs on an engine, BuildError where the folder exists or cannot be written."""
    files: dict[str, bytes] = {}
    launches = []
    for number, observed in enumerate(observe(unit.program, unit.target, inputs)):
        stem = f"{number:02d}_{unit.program.layers[observed.launch.layer]}"
        engine = unit.target.engine(observed.launch.engine)
        if engine.device is None:
            continue
        if engine.stream is not None:
            what = f"launches of {engine.name} are parts of lists and cannot be dumped one by one"
            raise TargetError(what, where=unit.target.name, hint="dovetail vectors writes a list of each kind of layer")
        made, entry = _launch(unit, observed, stem)
        files.update(made)
        launches.append(entry)
    if not launches:
        what = f"nothing of {unit.program.name} runs on an engine: there is nothing to dump"
        hint = "dovetail explain says why; choose a model or target whose layers go to an engine"
        raise TargetError(what, where=unit.target.name, hint=hint)
    index = {
        "schema": SCHEMA,
        "dovetail": __version__,
        "model": unit.program.name,
        "target": unit.target.name,
        "engines": {engine.name: dict(engine.device.arguments) for engine in unit.target.engines if engine.device},
        "launches": launches,
    }
    files["index.json"] = (json.dumps(index, indent=2) + "\n").encode()
    write_files(files, folder)
    return len(launches)


def _launch(unit: Unit, observed: LaunchRecord, stem: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of a launch and its entry in the index."""
    launch, target = observed.launch, unit.target
    engine = target.engine(launch.engine)
    packed = [array.tobytes() for array in launch.packed.values()]
    constants = b"".join(content + bytes(-len(content) % 64) for content in packed)
    image = _MemoryImage(unit, observed)
    blob = image.append(constants)
    commands = []
    files: dict[str, bytes] = {}
    given = [command for _, command in unit.commands[observed.index] if isinstance(command, Command)]
    for step, command in enumerate(given):
        parts = engine.raw.parts(command)
        places = {name: image.append(part) for name, part in parts.items()}
        suffix = f"_{step}" if len(given) > 1 else ""
        names = {name: f"{stem}/{name}{suffix}.bin" for name in parts}
        files.update({names[name]: part for name, part in parts.items()})
        known = {**{memory.name: memory.base for memory in target.memories}, **places, "constants": blob}
        commands.append(
            {
                "function": command.function,
                "parts": {name: {"file": names[name], "address": places[name]} for name in names},
                "registers": {register: known[what] for register, what in engine.raw.pointers.items()},
            }
        )
    expected, mask = expected_bytes(launch.result, observed.result)
    files[f"{stem}/image.bin"] = image.content.tobytes()
    files[f"{stem}/expected.bin"] = expected
    if mask is not None:
        files[f"{stem}/mask.bin"] = mask
    operands = addressed_operands(unit.program, launch)
    views = {name: view for name, view in launch.operands.items() if name in launch.graph.inputs}
    buffers = [_buffer(name, view, operands[name].address, "operand") for name, view in views.items()]
    result = _buffer(launch.graph.outputs[0], launch.result, operands["result"].address, "result")
    result |= {"expected": f"{stem}/expected.bin", "mask": f"{stem}/mask.bin" if mask is not None else None}
    image_entry = {"file": f"{stem}/image.bin", "address": image.base}
    entry = {"layer": stem[3:], "engine": engine.name, "image": image_entry, "buffers": [*buffers, result]}
    return files, {**entry, "constants": {"address": blob, "bytes": len(constants)}, "commands": commands}


class _MemoryImage:
    """The memories an engine sees as one stretch of bytes, with room behind what the program uses."""

    def __init__(self, unit: Unit, observed: LaunchRecord) -> None:
        target, program = unit.target, unit.program
        engine = target.engine(observed.launch.engine)
        memories = sorted({engine.memory, *engine.raw.contents}, key=lambda name: target.memory(name).base)
        self.base = target.memory(memories[0]).base
        end = max(
            (b.address + b.nbytes for b in program.buffers.values() if b.address is not None and b.memory in memories),
            default=self.base,
        )
        self.content = np.zeros(end - self.base, np.uint8)
        for name in memories:
            memory = target.memory(name)
            held = observed.before[name].copy()
            contents = np.frombuffer(engine.raw.contents.get(name, b""), np.uint8)
            held[: contents.size] = contents
            start = memory.base - self.base
            size = max(0, min(memory.size, self.content.size - start))
            self.content[start : start + size] = held[:size]

    def append(self, content: bytes) -> int:
        """Put bytes behind all others; returns their address."""
        padding = np.zeros(-self.content.size % _ALIGNMENT, np.uint8)
        address = self.base + self.content.size + padding.size
        self.content = np.concatenate([self.content, padding, np.frombuffer(content, np.uint8)])
        return address


def _buffer(name: str, view: View, address: int, role: str) -> dict[str, Any]:
    layout = view.layout or row_major(len(view.type.shape))
    return {
        "name": name,
        "role": role,
        "address": address,
        "bytes": view.span[1] - view.span[0],
        "shape": list(view.type.shape),
        "dtype": view.type.dtype.text,
        "layout": str(layout),
        "strides": list(view.strides),
    }


def expected_bytes(view: View, result: Array) -> tuple[bytes, bytes | None]:
    """The bytes of a result as they lie, and which of them count; None when all do."""
    size = view.span[1] - view.span[0]
    own = replace(view, offset=0)
    expected, counts = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    store(expected, own, 0, result)
    ones = np.frombuffer(b"\1" * result.nbytes, result.dtype).reshape(result.shape)
    store(counts, own, 0, ones)
    return expected.tobytes(), None if counts.all() else counts.tobytes()
