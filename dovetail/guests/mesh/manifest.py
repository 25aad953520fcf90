"""What a mapped network's folder says of itself, so that it can be run from the folder alone: `mesh.json`.

Elements are named by column, row and number in one word (`word_of`); results and clocks are counted by elements in the
order of these words, and the pieces of each.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from dovetail.codegen.manifest import Count, TensorPort
from dovetail.documents import read_document
from dovetail.errors import BuildError
from dovetail.guests.mesh.emit import Element, MeshProject
from dovetail.guests.mesh.mapping import MeshMapping, result_box
from dovetail.ir.onnx_file import graph_bytes
from dovetail.ir.types import Array, DType, box_shape
from dovetail.target.description import Target

MANIFEST = "mesh.json"
GRAPH = "network.onnx"
SCHEMA = 1
_MOST = 64 << 20
ChipNumber = Annotated[int, Meta(ge=0, lt=256)]
_IMAGE = struct.Struct("<4sIIIII")
_LOADED = struct.Struct("<II32sI")


class ResultPart(msgspec.Struct, frozen=True):
    """Where one stored result belongs."""

    output: str
    result: Count
    """Which of all the results that are stored, by element and piece."""
    box: tuple[tuple[Count, Count], ...]
    """Of `shape`."""
    shape: tuple[Count, ...]


class ElementEntry(msgspec.Struct, frozen=True):
    """An element of the file."""

    on: tuple[ChipNumber, ChipNumber, Annotated[int, Meta(ge=0, lt=1 << 16)]]
    """Column, row and number."""
    program: Annotated[str, Meta(pattern=r"^[^./][^/]*$", description="the name of a program")]
    places: tuple[Count, ...]
    """Where the data of each piece begin."""


class MeshFile(msgspec.Struct, frozen=True):
    """The file: what a mapped network's folder says of itself."""

    target: str
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="32 hexadecimal digits")]
    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    tensors: tuple[str, ...]
    elements: tuple[ElementEntry, ...]
    parts: tuple[ResultPart, ...]

    def __post_init__(self) -> None:
        if unknown := set(self.tensors) - {port.name for port in self.inputs}:
            raise ValueError(f"the tensor '{min(unknown)}' is no input")


@dataclass(frozen=True)
class MeshBuild:
    """A folder made by `dovetail mesh -o`."""

    folder: Path
    target: str
    digest: str
    """Of everything emitted, 32 hexadecimal digits."""
    inputs: Sequence[TensorPort]
    outputs: Sequence[TensorPort]
    tensors: Sequence[str]
    """The input that each tensor in DRAM is, by its number."""
    elements: Mapping[int, tuple[str, tuple[int, ...]]]
    """By its word, in their order: an element's program, and where the data of each piece begin."""
    parts: Sequence[ResultPart]

    @property
    def pieces(self) -> int:
        """Of all elements."""
        return sum(len(places) for _, places in self.elements.values())


def word_of(position: Sequence[int]) -> int:
    """Column, row and number of an element in one word."""
    return position[0] << 24 | position[1] << 16 | position[2]


def name_of(word: int) -> str:
    """An element as people say it."""
    return f"({word >> 24}, {word >> 16 & 0xFF}, {word & 0xFFFF})"


def port(name: str, shape: Sequence[int], kind: DType) -> dict[str, Any]:
    """An input or output as a manifest has it."""
    return {"name": name, "shape": list(shape), "dtype": kind.text}


def mesh_manifest(mapped: MeshMapping, project: MeshProject, target: Target) -> dict[str, bytes]:
    """The files of a resident network by which its folder can be run: the manifest and the integer graph."""
    graph, (placed, _) = mapped.parts.graph, mapped.whole
    ordered = sorted(project.elements, key=lambda one: word_of(mapped.topology.position(one.element)))
    elements = [_element(mapped, one) for one in ordered]
    results = {
        piece: number
        for number, piece in enumerate(piece for one in ordered for piece in one.pieces if placed.traffic.stores[piece])
    }
    parts, stages = [], {stage.layer.index: stage for stage in placed.section.stages}
    for name, index in mapped.parts.outputs.items():
        stage = stages[index]
        shape = stage.layer.graph.types[stage.layer.graph.outputs[0]].shape
        for piece in np.nonzero(stage.last)[0].tolist():
            box = [list(span) for span in result_box(stage, piece)]
            parts.append({"output": name, "result": results[stage.first + piece], "box": box, "shape": list(shape)})
    content = {
        "schema": SCHEMA,
        "network": graph.name,
        "target": target.name,
        "digest": _digest(project.files),
        "inputs": [port(name, graph.types[name].shape, graph.types[name].dtype) for name in graph.inputs],
        "outputs": [port(name, graph.types[name].shape, graph.types[name].dtype) for name in graph.outputs],
        "tensors": [fetch.value for fetch in placed.traffic.fetches],
        "elements": elements,
        "parts": parts,
    }
    text = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    return {MANIFEST: text, GRAPH: graph_bytes(graph)}


def _element(mapped: MeshMapping, element: Element) -> dict[str, Any]:
    return {
        "on": list(mapped.topology.position(element.element)),
        "program": element.program,
        "places": list(element.places),
    }


def _digest(files: Mapping[str, bytes]) -> str:
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(struct.pack("<QQ", len(name), len(content)) + name.encode() + content)
    return found.hexdigest()[:32]


def is_mesh(folder: Path) -> bool:
    """Whether a folder was made by `dovetail mesh -o`."""
    return (folder / MANIFEST).is_file()


def read_mesh(folder: Path) -> MeshBuild:
    """A folder of `dovetail mesh -o`; raises BuildError where it is none, or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        what = f"this is not a mapped network: it has no {MANIFEST}"
        raise BuildError(what, where=str(folder), hint="make one with dovetail mesh -o")
    file = read_document(
        path,
        "json",
        MeshFile,
        schema=SCHEMA,
        most_bytes=_MOST,
        error=BuildError,
        hint="run dovetail mesh again",
    ).value
    elements = {word_of(one.on): (one.program, one.places) for one in file.elements}
    return MeshBuild(
        folder,
        file.target,
        file.digest,
        file.inputs,
        file.outputs,
        file.tensors,
        dict(sorted(elements.items())),
        file.parts,
    )


def read_images(build: MeshBuild) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Data of every element by its word, and by the word of each chip its routing entries and sets: what the files in
    chips/ hold (`emit.chip_images`). Raises BuildError where they are damaged."""
    data: dict[int, bytes] = {}
    routes: dict[int, bytes] = {}
    for path in sorted((build.folder / "chips").glob("chip_*.img")):
        content = path.read_bytes()
        try:
            magic, x, y, count, _, _ = _IMAGE.unpack_from(content)
            if magic != b"DVM1":
                raise ValueError("no image")
            chip, place = word_of((x, y, 0)), _IMAGE.size
            for _ in range(count):
                number, nbytes, _, _ = _LOADED.unpack_from(content, place)
                place += _LOADED.size
                data[chip | number] = content[place : place + nbytes]
                place += -(-nbytes // 4) * 4
            routes[chip] = struct.pack("<2I", *_IMAGE.unpack_from(content)[4:]) + content[place:]
        except (struct.error, ValueError) as error:
            raise BuildError(
                f"the image is damaged: {error}", where=str(path), hint="run dovetail mesh again"
            ) from None
    if set(data) != set(build.elements):
        what = f"chips/ has {len(data)} elements, {MANIFEST} {len(build.elements)}, and they are not the same"
        raise BuildError(what, where=str(build.folder), hint="run dovetail mesh again")
    return data, routes


def gathered(build: MeshBuild, stored: Mapping[int, bytes]) -> dict[str, Array]:
    """The outputs of an input, from what elements stored, by number; raises BuildError where sizes do not agree."""
    found = {}
    for one in build.outputs:
        kind = one.kind
        parts = [part for part in build.parts if part.output == one.name]
        result = np.zeros(parts[0].shape if parts else one.shape, kind.numpy)
        try:
            for part in parts:
                piece = np.frombuffer(stored[part.result], kind.numpy).reshape(box_shape(part.box))
                result[tuple(slice(first, last) for first, last in part.box)] = piece
            found[one.name] = result.reshape(one.shape)
        except (ValueError, KeyError, IndexError):
            what = f"'{one.name}' cannot be put together from what elements stored"
            raise BuildError(what, where=str(build.folder), hint="run dovetail mesh again") from None
    return found


def part_bytes(build: MeshBuild) -> dict[int, int]:
    """Bytes of each stored result."""
    kinds = {one.name: one.kind for one in build.outputs}
    return {part.result: int(np.prod(box_shape(part.box))) * kinds[part.output].numpy.itemsize for part in build.parts}
