"""The manifest of a mapped network's folder, by which the folder alone can be run: `mesh.json`.

Elements are named by column, row and number in one word (`word_of`). Clocks are counted by elements in the order of
these words, and the pieces of each.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from dovetail.codegen.build.toolchain import digest
from dovetail.codegen.manifest import TensorPort
from dovetail.documents import read_document
from dovetail.errors import BuildError
from dovetail.guests.mesh.emit import ElementRecord, MeshProject, read_chip_image
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.ir.graph import Graph
from dovetail.ir.onnx_file import graph_bytes
from dovetail.ir.types import Array
from dovetail.sim.rack import LoadKind
from dovetail.target.description import Target

MANIFEST = "mesh.json"
GRAPH = "network.onnx"
_SCHEMA = 2
_MOST_BYTES = 64 << 20
_AGAIN = "run dovetail mesh again"
Images = Sequence[tuple[LoadKind, int, bytes]]
"""Everything a rack is loaded with, in order."""


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor in DRAM."""

    bytes: Annotated[int, Meta(ge=1, lt=1 << 31, description="bytes of one input")]
    input: str = ""
    """The input of the network that it is; empty for none."""
    outputs: tuple[str, ...] = ()
    """The network's outputs that it is, each in its own shape."""


class MeshRecord(msgspec.Struct, frozen=True):
    """A network mapped by `dovetail mesh`, as it is run: the contents of `mesh.json`, behind its schema."""

    network: str
    target: str
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="32 hexadecimal digits")]
    """The digest of everything emitted."""
    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    tensors: tuple[TensorRecord, ...]
    """Tensors in DRAM, by number."""
    elements: tuple[ElementRecord, ...]
    """In the order of their words."""

    @property
    def pieces(self) -> int:
        """Number of pieces of all elements."""
        return sum(len(one.places) for one in self.elements)

    @property
    def programs(self) -> list[str]:
        """Names of the programs, by number."""
        return sorted({one.program for one in self.elements})

    def __post_init__(self) -> None:
        if unknown := {one.input for one in self.tensors} - {"", *(one.name for one in self.inputs)}:
            raise ValueError(f"the tensor '{min(unknown)}' is no input")
        if missing := {one.name for one in self.outputs} - {name for one in self.tensors for name in one.outputs}:
            raise ValueError(f"no tensor is the output '{min(missing)}'")
        if any(one.word >= after.word for one, after in pairwise(self.elements)):
            raise ValueError("the elements are not in the order of their places")


def mesh_manifest(build: MeshRecord, graph: Graph) -> dict[str, bytes]:
    """The files by which the folder of a network can be run: the manifest and the integer graph."""
    content = {"schema": _SCHEMA, **msgspec.to_builtins(build)}
    text = json.dumps(content, separators=(",", ":"))
    return {MANIFEST: text.encode() + b"\n", GRAPH: graph_bytes(graph)}


def mesh_build(mapped: MeshMapping, project: MeshProject, target: Target) -> MeshRecord:
    """A network as it is run."""
    graph, network = mapped.graph, mapped.network
    outputs: dict[str, list[str]] = {}
    for name, layer in network.outputs.items():
        outputs.setdefault(network.layers[layer].graph.outputs[0], []).append(name)
    tensors = (
        TensorRecord(nbytes, name if name in graph.inputs else "", tuple(outputs.get(name, ())))
        for name, nbytes in project.tensors.items()
    )

    def ports(names: Sequence[str]) -> tuple[TensorPort, ...]:
        kinds = ((name, graph.types[name]) for name in names)
        return tuple(TensorPort(name=name, shape=kind.shape, dtype=kind.dtype.text) for name, kind in kinds)

    return MeshRecord(
        graph.name,
        target.name,
        digest(*(part for name, content in sorted(project.files.items()) for part in (name.encode(), content)))[:32],
        ports(graph.inputs),
        ports(graph.outputs),
        tuple(tensors),
        tuple(one.record for one in project.elements),
    )


def read_mesh(folder: Path) -> MeshRecord:
    """A folder of `dovetail mesh -o`; raises BuildError where it is none, or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        what = f"this is not a mapped network: it has no {MANIFEST}"
        raise BuildError(what, where=str(folder), hint="make one with dovetail mesh -o")
    hint = f"the file is damaged: {_AGAIN}"
    return read_document(
        path, "json", MeshRecord, hint=hint, schema=_SCHEMA, most_bytes=_MOST_BYTES, error=BuildError
    ).value


def rack_images(build: MeshRecord, firmware: Mapping[str, Path], files: Mapping[str, bytes]) -> Images:
    """Everything a rack is loaded with: programs, what the files in chips/ hold, tables, sizes of tensors.

    Raises:
        BuildError: the files are damaged.
    """
    programs = build.programs
    images = [(LoadKind.PROGRAM, number, firmware[name].read_bytes()) for number, name in enumerate(programs)]
    for name in sorted(name for name in files if name.startswith("chips/chip_")):
        try:
            images += read_chip_image(files[name])
        except (struct.error, ValueError) as error:
            raise BuildError(f"the image is damaged: {error}", where=name, hint=_AGAIN) from None
    words = {word for kind, word, _ in images if kind is LoadKind.DATA}
    if words != {one.word for one in build.elements}:
        what = f"chips/ has {len(words)} elements, {MANIFEST} {len(build.elements)}, and they are not the same"
        raise BuildError(what, where=build.network, hint=_AGAIN)
    for element in build.elements:
        table = (programs.index(element.program), *(one for place in element.places for one in place))
        images.append((LoadKind.TABLE, element.word, struct.pack(f"<{len(table)}I", *table)))
    return [*images, *((LoadKind.TENSOR, n, struct.pack("<I", one.bytes)) for n, one in enumerate(build.tensors))]


def outputs_of(build: MeshRecord, stored: Mapping[int, bytes], inputs: int) -> list[dict[str, Array]]:
    """The outputs of each input, from tensors of all inputs by number; raises BuildError where sizes differ."""
    outputs: list[dict[str, Array]] = [{} for _ in range(inputs)]
    ports = {one.name: one for one in build.outputs}
    for number, name in ((n, name) for n, one in enumerate(build.tensors) for name in one.outputs):
        try:
            array = np.frombuffer(stored[number], ports[name].kind.numpy).reshape(inputs, *ports[name].shape)
        except (ValueError, KeyError):
            what = f"'{name}' is not what elements stored"
            raise BuildError(what, where=build.network, hint=_AGAIN) from None
        for one, own in zip(outputs, array, strict=True):
            one[name] = own.copy()
    return outputs
