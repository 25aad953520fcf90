"""The manifest of a mapped network's folder, by which the folder alone can be run: `mesh.json`.

Elements are named by column, row and number in one word (`word_of`). Results and clocks are counted by elements in the
order of these words, and the pieces of each.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from dovetail.codegen.manifest import Count, TensorPort
from dovetail.documents import read_document
from dovetail.errors import BuildError
from dovetail.guests.mesh.emit import MeshProject, read_chip_image
from dovetail.guests.mesh.mapping import MeshMapping
from dovetail.ir.onnx_file import graph_bytes
from dovetail.ir.types import Array, box_shape, box_slices
from dovetail.sim.rack import LoadKind
from dovetail.target.description import Target

MANIFEST = "mesh.json"
GRAPH = "network.onnx"
_SCHEMA = 1
_MOST_BYTES = 64 << 20
_AGAIN = "run dovetail mesh again"
Images = Sequence[tuple[LoadKind, int, bytes]]
"""Everything a rack is loaded with, in order."""
_Byte = Annotated[int, Meta(ge=0, le=255)]


class ResultPart(msgspec.Struct, frozen=True):
    """Place of a stored result in an output."""

    output: str
    result: Count
    """Its number among all stored results, by element and piece."""
    box: tuple[tuple[Count, Count], ...]
    """Part of a value of `shape`."""
    shape: tuple[Count, ...]


class ElementRecord(msgspec.Struct, frozen=True):
    """An element, its program, and the first byte of each piece's data."""

    on: tuple[_Byte, _Byte, Annotated[int, Meta(ge=0, lt=1 << 16)]]
    program: Annotated[str, Meta(pattern="^[^./][^/]*$", description="the name of a program")]
    places: tuple[Count, ...]


class MeshRecord(msgspec.Struct, frozen=True):
    """The contents of `mesh.json`, behind its schema."""

    network: str
    target: str
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="32 hexadecimal digits")]
    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    tensors: tuple[str, ...]
    elements: tuple[ElementRecord, ...]
    parts: tuple[ResultPart, ...]

    def __post_init__(self) -> None:
        if unknown := {*self.tensors} - {one.name for one in self.inputs}:
            raise ValueError(f"the tensor '{min(unknown)}' is no input")


@dataclass(frozen=True)
class MeshBuild:
    """A network mapped by `dovetail mesh`, as it is run."""

    folder: Path
    target: str
    digest: str
    """Digest of everything emitted, 32 hexadecimal digits."""
    inputs: Sequence[TensorPort]
    outputs: Sequence[TensorPort]
    tensors: Sequence[str]
    """The input that each tensor in DRAM is, by its number."""
    elements: Mapping[int, tuple[str, tuple[int, ...]]]
    """Word -> an element's program, and the first byte of each piece's data; in the order of words."""
    parts: Sequence[ResultPart]

    @property
    def pieces(self) -> int:
        """Number of pieces of all elements."""
        return sum(len(places) for _, places in self.elements.values())


def word_of(position: Sequence[int]) -> int:
    """Column, row and number of an element in one word."""
    return position[0] << 24 | position[1] << 16 | position[2]


def name_of(word: int) -> str:
    """Column, row and number of an element in text."""
    return f"({word >> 24}, {word >> 16 & 0xFF}, {word & 0xFFFF})"


def mesh_manifest(mapped: MeshMapping, project: MeshProject, target: Target) -> dict[str, bytes]:
    """The files by which the folder of a resident network can be run: the manifest and the integer graph."""
    content = {"schema": _SCHEMA, **msgspec.to_builtins(_record(mapped, project, target))}
    text = json.dumps(content, separators=(",", ":"))
    return {MANIFEST: text.encode() + b"\n", GRAPH: graph_bytes(mapped.parts.graph)}


def mesh_build(mapped: MeshMapping, project: MeshProject, target: Target) -> MeshBuild:
    """A resident network as it is run, without a folder."""
    return _build(_record(mapped, project, target), Path())


def _record(mapped: MeshMapping, project: MeshProject, target: Target) -> MeshRecord:
    graph, (placed, _), position = mapped.parts.graph, mapped.whole, mapped.topology.position
    ordered = sorted(project.elements, key=lambda one: word_of(position(one.element)))
    stored = [piece for one in ordered for piece in one.pieces if placed.traffic.stores[piece]]
    results = {piece: number for number, piece in enumerate(stored)}
    parts, stages = [], {stage.layer.index: stage for stage in placed.section.stages}
    for name, index in mapped.parts.outputs.items():
        stage = stages[index]
        for piece in np.nonzero(stage.last)[0].tolist():
            parts.append(ResultPart(name, results[stage.first + piece], stage.result_box(piece), stage.result.shape))

    def ports(names: Sequence[str]) -> tuple[TensorPort, ...]:
        kinds = ((name, graph.types[name]) for name in names)
        return tuple(TensorPort(name=name, shape=kind.shape, dtype=kind.dtype.text) for name, kind in kinds)

    return MeshRecord(
        graph.name,
        target.name,
        _digest(project.files),
        ports(graph.inputs),
        ports(graph.outputs),
        tuple(fetch.value for fetch in placed.traffic.fetches),
        tuple(ElementRecord(position(one.element), one.program, one.places) for one in ordered),
        tuple(parts),
    )


def _digest(files: Mapping[str, bytes]) -> str:
    state = hashlib.sha256()
    for name, content in sorted(files.items()):
        state.update(struct.pack("<QQ", len(name), len(content)) + name.encode() + content)
    return state.hexdigest()[:32]


def _build(record: MeshRecord, folder: Path) -> MeshBuild:
    elements = dict(sorted((word_of(one.on), (one.program, one.places)) for one in record.elements))
    ports = (record.inputs, record.outputs)
    return MeshBuild(folder, record.target, record.digest, *ports, record.tensors, elements, record.parts)


def read_mesh(folder: Path) -> MeshBuild:
    """A folder of `dovetail mesh -o`; raises BuildError where it is none, or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        what = f"this is not a mapped network: it has no {MANIFEST}"
        raise BuildError(what, where=str(folder), hint="make one with dovetail mesh -o")
    hint = f"the file is damaged: {_AGAIN}"
    document = read_document(
        path, "json", MeshRecord, hint=hint, schema=_SCHEMA, most_bytes=_MOST_BYTES, error=BuildError
    )
    return _build(document.value, folder)


def read_images(build: MeshBuild, files: Mapping[str, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Data of every element by its word, and the routes of each chip by its word: what the files in chips/ hold.

    Raises:
        BuildError: they are damaged.
    """
    data: dict[int, bytes] = {}
    routes: dict[int, bytes] = {}
    for name in sorted(files):
        if not name.startswith("chips/chip_"):
            continue
        try:
            place, elements, routes_of_chip = read_chip_image(files[name])
        except (struct.error, ValueError) as error:
            where = str(build.folder / name)
            raise BuildError(f"the image is damaged: {error}", where=where, hint=_AGAIN) from None
        data |= {word_of((*place, number)): content for number, content in elements.items()}
        routes[word_of((*place, 0))] = routes_of_chip
    if set(data) != set(build.elements):
        what = f"chips/ has {len(data)} elements, {MANIFEST} {len(build.elements)}, and they are not the same"
        raise BuildError(what, where=str(build.folder), hint=_AGAIN)
    return data, routes


def rack_images(
    build: MeshBuild, firmware: Mapping[str, Path], data: Mapping[int, bytes], routes: Mapping[int, bytes]
) -> Images:
    """Everything a rack is loaded with: programs, data of elements, routes of chips and sizes of tensors."""
    numbers = {name: number for number, name in enumerate(sorted({program for program, _ in build.elements.values()}))}
    images = [(LoadKind.PROGRAM, number, firmware[name].read_bytes()) for name, number in numbers.items()]
    for word, (program, places) in build.elements.items():
        table = struct.pack(f"<{1 + len(places)}I", numbers[program], *places)
        images += [(LoadKind.DATA, word, data[word]), (LoadKind.TABLE, word, table)]
    images += [(LoadKind.ROUTES, word, content) for word, content in routes.items()]
    sizes = {one.name: prod(one.shape) * one.kind.numpy.itemsize for one in build.inputs}
    tensors = ((LoadKind.TENSOR, n, struct.pack("<I", sizes[name])) for n, name in enumerate(build.tensors))
    return [*images, *tensors]


def part_bytes(build: MeshBuild) -> dict[int, int]:
    """Bytes of each stored result."""
    sizes = {one.name: one.kind.numpy.itemsize for one in build.outputs}
    return {part.result: prod(box_shape(part.box)) * sizes[part.output] for part in build.parts}


def outputs_of(build: MeshBuild, stored: Mapping[int, bytes], inputs: int) -> list[dict[str, Array]]:
    """The outputs of each input, from stored results, each of all inputs; raises BuildError where sizes differ."""
    sizes = part_bytes(build)
    turns = ({n: content[t * sizes[n] : (t + 1) * sizes[n]] for n, content in stored.items()} for t in range(inputs))
    return [_outputs(build, one) for one in turns]


def _outputs(build: MeshBuild, stored: Mapping[int, bytes]) -> dict[str, Array]:
    outputs = {}
    for one in build.outputs:
        kind = one.kind.numpy
        parts = [part for part in build.parts if part.output == one.name]
        result = np.zeros(parts[0].shape if parts else one.shape, kind)
        try:
            for part in parts:
                result[box_slices(part.box)] = np.frombuffer(stored[part.result], kind).reshape(box_shape(part.box))
            outputs[one.name] = result.reshape(one.shape)
        except (ValueError, KeyError, IndexError):
            what = f"'{one.name}' cannot be put together from what elements stored"
            raise BuildError(what, where=str(build.folder), hint=_AGAIN) from None
    return outputs
