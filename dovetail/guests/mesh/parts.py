"""A mapping as ONNX: a model for each element, with what it computes. Written of any mapping, and read as a partition.

Values have the names of the integer graph (`compile --save-stages`); of a part of a value, the box stands behind it:
`x[0:8,0:32,0:16]` are rows, columns and channels, and of a layer whose sums are cut `x[...]{8:16}` is what the piece
that sums over the second eight makes of those before. A part may compute several pieces, and views of what it computes
or reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dovetail.errors import ModelError, PlanError
from dovetail.guests.mesh.layers import MeshLayer
from dovetail.guests.mesh.mapping_file import PART_HINT, PartWishes, Position, WishPlace, unread
from dovetail.guests.mesh.partition import MeshStage
from dovetail.guests.mesh.pieces import PARTIAL, piece_graph
from dovetail.guests.mesh.placement import MeshMapping
from dovetail.ir.graph import Graph, Node, renamed
from dovetail.ir.onnx_file import load_graph
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.types import Array, Box, TensorType, full_box

_MOST_FILES = 1 << 18
_BOX = re.compile(
    r"(.*)\[(\d{1,7}):(\d{1,7}),(\d{1,7}):(\d{1,7}),(\d{1,7}):(\d{1,7})\](?:\{(\d{1,7}):(\d{1,7})\})?", re.S
)
_PLACE = re.compile(r"(\d{1,6})_(\d{1,6})_(\d{1,6})")


def part_graphs(mapped: MeshMapping) -> Iterator[tuple[str, Graph]]:
    """(name, graph) of every element of a resident network; `0_1_7` is element 7 of the chip in column 0 and row 1."""
    placed, _ = mapped.whole
    owner = placed.section.owners
    for element, pieces in placed.tenants.items():
        name = "_".join(map(str, mapped.topology.position(element)))
        views = {r.view: r.value for piece in pieces for r in owner[piece][0].layer.readings if r.view != r.value}
        yield name, _joined(name, [_named(*owner[piece]) for piece in pieces], views)


def _named(stage: MeshStage, piece: int) -> Graph:
    """The graph of a piece, its values named for the part of the network they are."""
    graph, reads = piece_graph(stage, piece)
    suffix = _suffix(stage.spans(piece), stage.layer)
    names = {name: name + suffix for name in graph.types if name not in graph.inputs}
    names |= {graph.outputs[0]: stage.layer.graph.outputs[0] + suffix}
    for reading in stage.layer.readings:
        if reading.name in graph.inputs:
            whole = stage.layer.graph.types[reading.name]
            part = reads[reading.name]
            names[reading.name] = reading.view + ("" if part == full_box(whole.shape) else _shown(_image(part)))
    if PARTIAL in graph.inputs:
        names[PARTIAL] = stage.layer.graph.outputs[0] + _suffix(stage.spans(piece - 1), stage.layer)
    again = renamed(graph, names)
    return replace(again, inputs=tuple(dict.fromkeys(again.inputs)))


def _image(box: Box) -> Box:
    """A box of a value as rows, columns and channels, where it is an image or a vector."""
    ends = box[1:] if box[0] == (0, 1) and len(box) in (2, 4) else box
    return ((0, 1),) * (3 - len(ends)) + ends


def _shown(box: Sequence[tuple[int, int]]) -> str:
    return "[" + ",".join(f"{first}:{last}" for first, last in box) + "]"


def _suffix(box: Sequence[tuple[int, int]], layer: MeshLayer) -> str:
    """The text behind the name of a value for a box of rows, columns, channels and sums."""
    whole = [(0, size) for size in (*layer.image, layer.summed)]
    sums = "" if box[3] == whole[3] else f"{{{box[3][0]}:{box[3][1]}}}"
    return "" if box == whole else _shown(box[:3]) + sums


def _joined(name: str, graphs: Sequence[Graph], views: Mapping[str, str]) -> Graph:
    """Pieces in one graph, and views of what it computes; all their results are outputs."""
    types: dict[str, TensorType] = {}
    constants: dict[str, Array] = {}
    for graph in graphs:
        types |= graph.types
        constants |= graph.constants
    nodes: list[Node] = []
    computed: set[str] = set()
    for graph in graphs:
        for value in graph.inputs:
            if value not in computed and views.get(value) in computed:
                nodes.append(Node(Reshape(types[value].shape), (views[value],), value))
        nodes += graph.nodes
        computed.update(node.output for node in nodes)
    inputs = dict.fromkeys(value for graph in graphs for value in graph.inputs if value not in computed)
    outputs = tuple(graph.outputs[0] for graph in graphs)
    return Graph(name, tuple(inputs), outputs, tuple(nodes), types, constants)


def read_parts(folder: Path, operators: Mapping[str, type[Operator]]) -> dict[str, Graph]:
    """The graphs in the ONNX files of a folder, by the files' names without the ending.

    Raises:
        ModelError: a file is not one of Dovetail's, or damaged.
        PlanError: there are none, or too many.
    """
    files = sorted(folder.glob("*.onnx")) if folder.is_dir() else []
    if not 1 <= len(files) <= _MOST_FILES:
        what = f"{len(files)} ONNX files are here, 1 to {_MOST_FILES} are read"
        raise PlanError(what, where=str(folder), hint="give the folder of a model for each element")
    return {file.stem: load_graph(file, operators) for file in files}


def wishes_of_parts(graphs: Mapping[str, Graph], layers: Sequence[MeshLayer]) -> PartWishes:
    """The wishes of parts: each computes its pieces on an element with its name.

    Raises:
        PlanError: a part computes no layer, or a box cannot be.
    """
    by_result = {layer.graph.outputs[0]: layer for layer in layers}
    pieces: dict[str, list[tuple[Box, str, WishPlace]]] = {}
    for name, graph in graphs.items():
        at = unread(f"{name}.onnx", PART_HINT)
        own = [(layer, box) for node in graph.nodes for layer, box in _piece_of(node.output, by_result)]
        if not own:
            raise at.wrong("no value in it is the result of a layer of the network")
        for layer, box in own:
            if any(not 0 <= a < b <= size for (a, b), size in zip(box, (*layer.image, layer.summed), strict=True)):
                raise at.wrong(f"{layer.name} has no part {_shown(box)}")
            pieces.setdefault(layer.name, []).append((box, name, at))
    return PartWishes({name: _place_of(name) for name in graphs}, pieces)


def _place_of(name: str) -> Position | None:
    """The position a part's name says, if it does."""
    match = _PLACE.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _piece_of(value: str, layers: Mapping[str, MeshLayer]) -> Iterator[tuple[MeshLayer, Box]]:
    """The layer and box a value is the result of, if it is one."""
    match = _BOX.fullmatch(value)
    layer = layers.get(match[1] if match else value)
    if layer is None:
        return
    whole: Box = tuple((0, size) for size in (*layer.image, layer.summed))
    if match is None:
        yield layer, whole
        return
    ends = [int(end) for end in match.groups()[1:] if end is not None]
    yield layer, (*tuple(zip(ends[::2], ends[1::2], strict=True)), *((whole[3],) if len(ends) == 6 else ()))


def check_parts(mapped: MeshMapping, graphs: Mapping[str, Graph]) -> None:
    """Check that parts, of which a network was mapped, compute what it does.

    Raises:
        ModelError: one computes something else; with the value.
    """
    layers = {layer.graph.outputs[0]: layer for layer in mapped.network.layers}
    owner = {(stage.layer.index, *stage.spans(piece)): (stage, piece) for stage, piece in mapped.sections[0].owners}
    for name, graph in graphs.items():
        seen: set[str] = set()
        makers = {node.output: node for node in graph.nodes}
        for value, layer, box in [(v, *part) for v in makers for part in _piece_of(v, layers)]:
            ours = _named(*owner[layer.index, *box])
            wrong = _different(ours, ours.outputs[0], graph, value, makers, seen)
            if wrong:
                what = f"'{wrong[:80]}' is not what {layer.name} of the network computes there"
                raise ModelError(what, where=f"{name}.onnx", hint=PART_HINT)
        for node in graph.nodes:
            if node.output not in seen and not node.operator.is_view:
                what = f"'{node.output[:80]}' belongs to no layer that the part computes as a whole"
                raise ModelError(what, where=f"{name}.onnx", hint=PART_HINT)


def _different(
    ours: Graph, own: str, theirs: Graph, other: str, makers: Mapping[str, Node], seen: set[str]
) -> str | None:
    """A value of `theirs` that is computed in another way than in `ours`; None where there is none."""
    if own in ours.inputs:
        same = own == other and theirs.types.get(other) == ours.types[own]
        return None if same else other
    if own in ours.constants:
        same = other in theirs.constants and theirs.types[other] == ours.types[own]
        return None if same and np.array_equal(ours.constants[own], theirs.constants[other]) else other
    node, maker = next(node for node in ours.nodes if node.output == own), makers.get(other)
    if maker is None or maker.operator != node.operator or len(maker.inputs) != len(node.inputs):
        return other
    seen.add(other)
    pairs = zip(node.inputs, maker.inputs, strict=True)
    values = (_different(ours, a, theirs, b, makers, seen) for a, b in pairs)
    return next((value for value in values if value is not None), None)
