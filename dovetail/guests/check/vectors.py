"""`dovetail vectors`: for hardware people, what an engine finds in memory, what is written into its registers, and what
it must give.

    index.json                         target, format, kernels: files, addresses, registers
    convolution/x.hex                  an operand as it lies in the engine's memory, from its address on
    convolution/weights.hex            constants likewise
    convolution/registers.hex          one line a write: byte offset and value, in order
    convolution/expected.hex, mask.hex the bytes of the result, and which of them count (ff) or may be anything (00)
    convolution/list.hex               of an engine that reads its commands from memory, one line a word (list, task,
                                       instructions, ...: the parts its target names)

`hex` has a byte a line, and a register write a line, as `$readmemh` reads them (64 bits: offset, value); `bin` the same
as raw bytes (little-endian pairs of 32 bits); `npz` one file per kernel.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from dovetail.arrays import built
from dovetail.codegen.emit.dump import expected_bytes
from dovetail.codegen.emit.unit import addressed_operands
from dovetail.compile import Compiled
from dovetail.documented import document
from dovetail.documents import read_document
from dovetail.errors import TargetError
from dovetail.files import InputError, open_archive, read_npy
from dovetail.folders import write_files
from dovetail.guests.check.cases import Case, UserCodeError, base
from dovetail.guests.check.layers import NoLayerError
from dovetail.guests.check.run import INSTRUCTIONS, SECONDS, compiled_cases, takes_jobs, writes_of
from dovetail.ir.types import Array
from dovetail.program.interpret import ProgramInterpreter, observe
from dovetail.program.ir import Role, View
from dovetail.records import Record, field
from dovetail.run import Watchdog, run_build
from dovetail.sim.device import accesses
from dovetail.target.description import Target
from dovetail.target.engine import Engine
from dovetail.target.offload import Command, Offload

VectorForm = Literal["hex", "bin", "npz"]
FORMATS: tuple[VectorForm, ...] = get_args(VectorForm)
SCHEMA = 1
_HINT = "write them again with dovetail vectors"
_FileName = Annotated[str, msgspec.Meta(pattern=r"^\w+(\.npz)?$", description="the name of a file or folder beside it")]


class VectorBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block in the index."""

    address: int
    """Address of the first byte."""
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Number of bytes."""


class VectorKernel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kernel in the index: what its files hold."""

    kernel: str
    """Name of the launch."""
    engine: str
    """Name of the engine."""
    memory: str
    """Memory the operands lie in."""
    words: dict[str, int] = {}
    """Elements of each file of words."""
    file: _FileName = ""
    """File with the launch, if the form is one file for each."""
    folder: _FileName = ""
    """Folder with the launch, if the form is a folder for each."""
    blocks: dict[str, VectorBlock]
    """Blocks of bytes, by name."""


class VectorIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `index.json`."""

    schema: int = SCHEMA
    """Version of this form."""
    target: str
    """Name of the target."""
    format: VectorForm
    """Form of the files."""
    kernels: tuple[VectorKernel, ...]
    """Launches, in order."""


class Block(Record):
    """Bytes at an address of the engine's memory."""

    name: str
    """Name of the operand or constant."""
    address: int
    """Address of the first byte."""
    content: Array
    """Bytes, as uint8."""


class Vectors(Record):
    """Operands, constants and result of one launch of an engine."""

    kernel: str
    """Name of the launch."""
    engine: str
    """Name of the engine."""
    memory: str
    """Memory the operands lie in."""
    given: tuple[Block, ...]
    """Operands and constants."""
    writes: tuple[tuple[int, int], ...]
    """Byte offset from the engine's first register, and value, in order."""
    expected: Block
    """Result of the pattern's meaning."""
    mask: Array
    """Bytes as large as `expected`: 0 for a byte that may have any value, uint8."""
    words: Mapping[str, Array] = field(default_factory=dict)
    """Other words the engine reads, by name, uint32; the registers hold their addresses."""


def vectors_of(target: Target, engine: Engine, offload: Offload) -> Vectors | None:
    """A launch of a layer the offload takes; None where none can be made.
    Raises DovetailError where the layer cannot be compiled or run."""
    try:
        point = base(offload)
    except (NoLayerError, UserCodeError):
        return None
    if point is None:
        return None
    case = Case(engine.name, offload.name, point, "a layer within every limit")
    compiled, inputs, _ = compiled_cases(target, [case])
    if engine.stream is not None:
        return _of_list(target, engine, case, compiled, inputs)
    unit, program = compiled.unit, compiled.plan.program
    observed = next(iter(observe(program, unit.target, inputs)))
    launch, places = observed.launch, addressed_operands(program, observed.launch)
    blocks = []
    for name, view in launch.operands.items():
        if name != "scratch":
            is_constant = program.buffers[view.buffer].role is Role.CONSTANT
            packed = launch.packed[name].reshape(-1).view(np.uint8) if is_constant else None
            content = _bytes_at(compiled, observed.before, view) if packed is None else packed
            blocks.append(Block("x" if name in inputs and len(inputs) == 1 else name, places[name].address, content))
    commands = [command for _, command in unit.commands[observed.index] if isinstance(command, Command)]
    words: dict[str, Array] = {}
    if takes_jobs(engine):
        writes = tuple(write for command in commands for write in writes_of(command))
    else:
        read = commands if engine.raw.pointers else []  # others' words are written into registers
        parts = {name: part for command in read for name, part in engine.raw.parts(command).items()}
        words = {name: np.frombuffer(part, "<u4") for name, part in parts.items()}
        writes = writes_seen(target, case)
    result = _expected(launch.result, observed.result, places["result"].address)
    return Vectors(offload.name, engine.name, engine.memory, tuple(blocks), writes, *result, words)


def _bytes_at(compiled: Compiled, memories: Mapping[str, Array], view: View) -> Array:
    """The bytes of a view as they lie in memories."""
    buffer = compiled.plan.program.buffers[view.buffer]
    first = (buffer.address or 0) - compiled.unit.target.memory(buffer.memory).base
    return np.array(memories[buffer.memory][first + view.span[0] : first + view.span[1]])


def _expected(view: View, array: Array, address: int) -> tuple[Block, Array]:
    """The bytes of a result, and which of them count."""
    content, mask = expected_bytes(view, array)
    counts = np.ones(len(content), np.uint8) if mask is None else np.frombuffer(mask, np.uint8)
    return Block("expected", address, np.frombuffer(content, np.uint8)), counts * 255


def _of_list(target: Target, engine: Engine, case: Case, compiled: Compiled, inputs: Mapping[str, Array]) -> Vectors:
    """The one list a layer becomes, with what it finds in the memory of values and in that of its constants."""
    program, unit = compiled.plan.program, compiled.unit
    addresses = {name: buffer.address or 0 for name, buffer in program.buffers.items()}
    machine, blocks = ProgramInterpreter(program, unit.target), []
    for name, view in program.inputs.items():
        machine.write(view, inputs[name])
        content = _bytes_at(compiled, machine.memories, view)
        blocks.append(Block("x" if len(inputs) == 1 else name, addresses[view.buffer] + view.offset, content))
    for name, buffer in program.buffers.items():
        if buffer.role is Role.CONSTANT and buffer.address is not None:
            blocks.append(Block(name, buffer.address, program.constants[name]))
    for index, statement in enumerate(program.statements):
        machine.step(index, statement)
    view = next(iter(program.outputs.values()))
    result = _expected(view, machine.read(view), addresses[view.buffer] + view.offset)
    several = len(unit.lists) > 1
    words = {f"list_{n}" if several else "list": np.array(one.words, np.uint32) for n, one in enumerate(unit.lists)}
    memory, writes = program.buffers[view.buffer].memory, writes_seen(target, case)
    return Vectors(case.offload, engine.name, memory, tuple(blocks), writes, *result, words)


def writes_seen(target: Target, case: Case) -> tuple[tuple[int, int], ...]:
    """Byte offset and value of each register the driver writes for a case, as seen on the simulated chip.
    Raises DovetailError where the case cannot be compiled or run."""
    compiled, inputs, _ = compiled_cases(target, [case])
    with built(compiled, compiled.unit.target) as build:
        run_build(build, "iss", [inputs], watchdog=Watchdog(INSTRUCTIONS, SECONDS, build.folder.parent))
        seen = accesses(build.folder.parent / "0.accesses")  # of the only engine there is
    return tuple((access.offset, access.value) for access in seen if access.written)


def write_vectors(target: Target, form: str, folder: Path, force: bool = False) -> tuple[int, tuple[str, ...]]:
    """Write the vectors of every offload; how many there are, and the names of those without.

    Args:
        target: the machine.
        form: one of `FORMATS`.
        folder: where to.
        force: whether a folder that is there gives way, if it holds vectors.

    Raises:
        TargetError: no such format, or the target has no engine with registers.
        BuildError: the folder exists or cannot be written.
    """
    kind = next((one for one in FORMATS if one == form), None)
    if kind is None:
        raise TargetError(f"there is no format '{form}'", where="vectors", hint=f"use one of {', '.join(FORMATS)}")
    engines = [engine for engine in target.engines if engine.device is not None]
    if not engines:
        raise TargetError("it has no engine with registers", where=target.name, hint="give a target with an engine")
    if force and folder.exists() and not (folder / "index.json").is_file():
        raise TargetError(
            f"{folder} holds no vectors and is not replaced", where="vectors", hint="choose another folder"
        )
    files: dict[str, bytes] = {}
    kernels, without = [], []
    for engine in engines:
        for offload in engine.offloads:
            vectors = vectors_of(target, engine, offload)
            if vectors is None:
                without.append(offload.name)
                continue
            stem = _stem(offload.name) if len(engines) == 1 else f"{engine.name}_{_stem(offload.name)}"
            own, entry = _files(vectors, kind, stem)
            files.update(own)
            kernels.append(entry)
    index = VectorIndex(target=target.name, format=kind, kernels=tuple(kernels))
    files["index.json"] = (json.dumps(msgspec.to_builtins(index), indent=2) + "\n").encode()
    write_files(files, folder, force)
    return len(kernels), tuple(without)


def _stem(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.replace(", ", "_"))


def _files(vectors: Vectors, form: VectorForm, stem: str) -> tuple[dict[str, bytes], VectorKernel]:
    """The files of a kernel, and its entry in the index."""
    all_blocks = (*vectors.given, vectors.expected)
    arrays = {block.name: block.content for block in all_blocks}
    arrays |= {"mask": vectors.mask, "registers": np.array(vectors.writes, np.uint32).reshape(-1, 2), **vectors.words}
    entry = VectorKernel(
        kernel=vectors.kernel,
        engine=vectors.engine,
        memory=vectors.memory,
        words={name: int(words.size) for name, words in vectors.words.items()},
        file=f"{stem}.npz" if form == "npz" else "",
        folder="" if form == "npz" else stem,
        blocks={block.name: VectorBlock(address=block.address, bytes=int(block.content.size)) for block in all_blocks},
    )
    if form == "npz":
        stream = io.BytesIO()
        whole: dict[str, Any] = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        np.savez(stream, **whole)
        return {entry.file: stream.getvalue()}, entry
    return {f"{stem}/{name}.{form}": _written(array, form) for name, array in arrays.items()}, entry


def _written(array: Array, form: VectorForm) -> bytes:
    """Raw, or in hexadecimal one element a line, of register writes a pair."""
    if form == "bin":
        return array.astype(array.dtype.newbyteorder("<")).tobytes()
    if array.ndim == 2:
        return "".join(f"{offset:08x}{value:08x}\n" for offset, value in array.tolist()).encode()
    return "".join(f"{value:0{2 * array.itemsize}x}\n" for value in array.tolist()).encode()


def read_vectors(folder: Path) -> Mapping[str, Mapping[str, Array]]:
    """The files of `write_vectors`: kernel -> name -> array; "registers" as uint32 pairs, all else uint8.
    Raises InputError where one is missing or damaged, or has not as many elements as the index says."""
    index = read_document(
        folder / "index.json", "json", VectorIndex, schema=SCHEMA, hint=_HINT, error=InputError, what="the index"
    ).value
    return {entry.kernel: _read(folder, entry, index.format) for entry in index.kernels}


def _read(folder: Path, entry: VectorKernel, form: VectorForm) -> dict[str, Array]:
    sizes = {name: block.bytes for name, block in entry.blocks.items()} | entry.words
    arrays: dict[str, Array] = {}
    if form == "npz":
        with open_archive(folder / entry.file, _HINT) as (archive, members):
            for name, info in members.items():
                arrays[name] = read_npy(partial(archive.open, info), info.file_size, name, lambda shape, dtype: None)
    else:
        for path in sorted((folder / entry.folder).glob(f"*.{form}")):
            wide = path.stem == "registers" or path.stem in entry.words
            arrays[path.stem] = _numbers(path, form, np.uint32 if wide else np.uint8)
    missing = {*sizes, "registers", "mask"} - {name for name, a in arrays.items() if a.size == sizes.get(name, a.size)}
    if missing or arrays["registers"].size % 2:
        what = f"the files of '{entry.kernel}' lack elements of {', '.join(sorted(missing)) or 'registers'}"
        raise InputError(what, where=str(folder), hint=_HINT)
    return {**arrays, "registers": arrays["registers"].reshape(-1, 2)}


def _numbers(path: Path, form: VectorForm, dtype: type[np.uint8] | type[np.uint32]) -> Array:
    order = np.dtype(dtype).newbyteorder("<" if form == "bin" else ">")
    try:
        content = path.read_bytes() if form == "bin" else bytes.fromhex(path.read_text("utf-8"))
        return np.frombuffer(content, order).astype(dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"a damaged file of vectors: {error}", where=str(path), hint=_HINT) from None


document(__name__)
