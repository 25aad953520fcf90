"""The C program of an element, and the constants that are each element's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dovetail import kernels
from dovetail.emit.calls import core_traits
from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array, Box, DType, TensorType, box_shape
from dovetail.kernels import CoreKernel
from dovetail.mesh.execute import PARTIAL, piece_graph, result_box
from dovetail.mesh.layers import Layer
from dovetail.mesh.partition import Stage, read_span
from dovetail.operators.arithmetic import Add
from dovetail.target.description import Target
from dovetail.target.mesh import Mesh

HEADER_BYTES = 32
"""Bytes of `element_t`."""
SUMS, FOLDED = "row_of_sums", "folded_bias"
_KINDS = {"convolution": "MAC_CONVOLUTION", "depthwise": "MAC_DEPTHWISE", "dense": "MAC_DENSE"}


@dataclass(frozen=True)
class OperandPlace:
    """How an operand lies in an element's memory: a box of an image, NHWC."""

    start: tuple[int, int, int]
    """Row, column and channel of the image that lie first; they may be padding."""
    row_bytes: int
    column_bytes: int
    itemsize: int
    nbytes: int
    """Of one input's slot."""
    slots: int
    fill: int
    """What the buffer is filled with before the first input: the padding, as a byte."""
    size: tuple[int, int, int]
    """Rows, columns, channels there is room for."""


@dataclass(frozen=True)
class ElementProgram:
    """What an element runs: equal texts are one program."""

    source: str
    """C text; ELEMENT_BYTES is defined elsewhere."""
    constants: tuple[tuple[int, bytes], ...]
    """Place in the element's data, and content."""
    constants_end: int
    operands: tuple[OperandPlace, ...]
    """Of the layer's readings in order, then of the partial sums."""
    result_bytes: int
    skip: int
    """Bytes of the first operand before those it multiplies."""


def element_program(stage: Stage, piece: int, mesh: Mesh, target: Target) -> ElementProgram:
    """The program of a piece.

    Raises:
        DovetailError: no kernel of the core computes what the array does not.
    """
    graph, reads = piece_graph(stage, piece)
    if stage.layer.on_array:
        return _on_array(stage, piece, graph, mesh, target)
    return _on_core(stage, graph, reads, target)


@dataclass
class _Blob:
    """Constants behind an element's header."""

    parts: list[tuple[int, bytes]]
    end: int = HEADER_BYTES

    def add(self, content: bytes) -> int:
        """Place of the content."""
        start = -(-self.end // 16) * 16
        self.parts.append((start, content))
        self.end = start + len(content)
        return start


def _on_core(stage: Stage, graph: Graph, reads: Mapping[str, Box], target: Target) -> ElementProgram:
    """Operands lie densely, one kernel computes the piece."""
    layer = stage.layer
    kernel = kernels.generate(graph, "compute", core_traits(target.core))
    places = []
    for reading, slots in zip(layer.readings, stage.slots, strict=True):
        box = _image_box(reads[reading.name], reading.image)
        places.append(_dense(box, reading.itemsize, slots))
    blob = _Blob([])
    pointers = {reading.name: _slot(number, places[number]) for number, reading in enumerate(layer.readings)}
    call = _call(kernel, pointers, "result", blob)
    nbytes = graph.types[graph.outputs[0]].nbytes
    source = _source(kernel, places, nbytes, 0, [call])
    return ElementProgram(source, tuple(blob.parts), blob.end, tuple(places), nbytes, 0)


def _on_array(stage: Stage, piece: int, graph: Graph, mesh: Mesh, target: Target) -> ElementProgram:
    """Row by row: the array makes sums, a kernel finishes them."""
    layer = stage.layer
    parts = layer.parts
    assert parts is not None and parts.anchor is not None
    anchor = next(node for node in graph.nodes if type(node.operator) is type(parts.anchor.operator))
    rows, columns, outputs = _result_size(stage, piece)
    places, skip = _array_operands(stage, piece, graph)
    blob = _Blob([])
    weights = blob.add(pack_weights(layer.kind, graph.constants[anchor.inputs[1]]).tobytes())
    tail = _tail(graph, anchor, layer)
    itemsize = graph.types[graph.outputs[0]].dtype.numpy.itemsize
    row_bytes = columns * outputs * itemsize
    target_row = f"result + row * {row_bytes}u"
    sums = "sums" if tail else f"(int32_t *)(void *)({target_row})"
    body = _job(stage, places[0], weights, sums, columns, outputs, graph, anchor)
    kernel = None
    if tail:
        kernel = kernels.generate(tail, "finish", core_traits(target.core))
        pointers = {SUMS: "sums"}
        for number, reading in enumerate(layer.readings[1:], start=1):
            pointers[reading.name] = f"{_slot(number, places[number])} + row * {places[number].row_bytes}u"
        if PARTIAL in graph.inputs:
            last = len(places) - 1
            pointers[PARTIAL] = f"{_slot(last, places[last])} + row * {places[last].row_bytes}u"
        body.append(_call(kernel, pointers, target_row, blob))
    lines = [f"for (uint32_t row = 0; row < {rows}u; ++row) {{", *(f"    {line}" for line in body), "}"]
    row_sums = -(-columns // 4) * 4 * outputs if tail else 0
    source = _source(kernel, places, rows * row_bytes, row_sums, lines)
    return ElementProgram(source, tuple(blob.parts), blob.end, tuple(places), rows * row_bytes, skip)


def _result_size(stage: Stage, piece: int) -> tuple[int, int, int]:
    shape = box_shape(result_box(stage, piece))
    return (shape[1], shape[2], shape[3]) if len(shape) == 4 else (1, 1, shape[1])


def _job(
    stage: Stage, image: OperandPlace, weights: int, sums: str, columns: int, outputs: int, graph: Graph, anchor: Node
) -> list[str]:
    """C that has the array compute a row of sums."""
    layer, kind = stage.layer, graph.types[anchor.inputs[0]]
    summed, unsigned = kind.shape[-1], not kind.dtype.signed
    dense = layer.kind == "dense"
    members = [
        f".image = {_slot(0, image)} + self->skip + row * {layer.stride[0] * image.row_bytes if not dense else 0}u",
        f".weights = element_data + {weights}u", f".sums = {sums}", f".image_row = {image.row_bytes}u",
        f".columns = {columns}u", f".outputs = {outputs}u",
        f".inputs = {summed if dense else image.column_bytes}u",
        f".kernel_rows = {layer.kernel[0]}u", f".kernel_columns = {layer.kernel[1]}u",
        f".stride = {layer.stride[1]}u", f".kind = {_KINDS[layer.kind]}", f".is_unsigned = {int(unsigned)}u",
        f".row_stride = {layer.stride[0]}u",
    ]  # fmt: skip
    return ["const mac_job_t job = {", *(f"    {member}," for member in members), "};", "mac_start(&job);",
            "mac_wait();"]  # fmt: skip


def _array_operands(stage: Stage, piece: int, graph: Graph) -> tuple[list[OperandPlace], int]:
    """Where the operands of a piece on the array lie, and the bytes of the first that are skipped."""
    layer, box = stage.layer, stage.boxes[piece]
    first = layer.readings[0]
    rows, columns, _ = _result_size(stage, piece)
    ends = [read_span(first, layer, axis, box[None]) for axis in range(3)]
    spans = [(int(low[0]), int(high[0])) for low, high in ends]
    skip = 0
    if layer.kind == "dense":
        place = _dense(tuple(spans), 1, stage.slots[0])
        if first.image[0] * first.image[1] > 1:
            skip = int(box[6]) - spans[0][0] * first.image[1] * first.image[2]
    else:
        high = (rows - 1) * first.step[0] + first.span[0]
        wide = (columns - 1) * first.step[1] + first.span[1]
        depth = spans[2][1] - spans[2][0]
        start = (int(box[0]) * first.step[0] - first.lead[0], int(box[2]) * first.step[1] - first.lead[1], spans[2][0])
        row = -(-wide // 16) * 16 * depth
        place = OperandPlace(start, row, depth, 1, high * row, stage.slots[0], _filling(layer), (high, wide, depth))
    places = [place]
    whole = ((int(box[0]), int(box[1])), (int(box[2]), int(box[3])), (int(box[4]), int(box[5])))
    for reading, slots in zip(layer.readings[1:], stage.slots[1:], strict=True):
        places.append(_dense(whole, reading.itemsize, slots))
    if PARTIAL in graph.inputs:
        places.append(_dense(whole, 4, stage.slots[0]))
    return places, skip


def _filling(layer: Layer) -> int:
    """The byte an image is padded with."""
    pad = layer.parts.pad if layer.parts else None
    return int(pad.operator.value) & 0xFF if pad else 0  # type: ignore[attr-defined]


def _dense(box: tuple[tuple[int, int], ...], itemsize: int, slots: int) -> OperandPlace:
    size = tuple(stop - start for start, stop in box)
    column = size[2] * itemsize
    start = (box[0][0], box[1][0], box[2][0])
    nbytes = -(-size[0] * size[1] * column // 8) * 8  # kernels read arrays that begin at multiples of 8
    return OperandPlace(start, size[1] * column, column, itemsize, nbytes, slots, 0, (size[0], size[1], size[2]))


def _image_box(box: Box, image: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    """A part of an operand as a part of its image."""
    return box[1:] if len(box) == 4 else tuple((0, size) for size in image)


def pack_weights(kind: str, weights: Array) -> Array:
    """Weights as the array reads them: groups of 4 channels (16 of a dense layer), a group's innermost.

    Args:
        kind: of the layer.
        weights: int8: [O, KH, KW, I], depthwise [1, KH, KW, C], dense [N, K].

    Returns:
        int8 [groups, KH, KW, I, 4]; depthwise [groups, KH, KW, 4]; dense [groups, K, 16].
    """
    if kind == "dense":
        padded = np.pad(weights, ((0, -len(weights) % 16), (0, 0)))
        return np.ascontiguousarray(padded.reshape(-1, 16, padded.shape[1]).transpose(0, 2, 1))
    if kind == "depthwise":
        padded = np.pad(weights[0], ((0, 0), (0, 0), (0, -weights.shape[3] % 4)))
        return np.ascontiguousarray(padded.reshape(*padded.shape[:2], -1, 4).transpose(2, 0, 1, 3))
    padded = np.pad(weights, ((0, -len(weights) % 4), (0, 0), (0, 0), (0, 0)))
    return np.ascontiguousarray(padded.reshape(-1, 4, *padded.shape[1:]).transpose(0, 2, 3, 4, 1))


def _tail(graph: Graph, anchor: Node, layer: Layer) -> Graph | None:
    """What comes behind the sums, for one row of them; None where nothing does."""
    operator = anchor.operator
    weights = graph.constants[anchor.inputs[1]].astype(np.int64)
    axes = {"dense": (1,), "depthwise": (0, 1, 2)}.get(layer.kind, (1, 2, 3))
    folded = -operator.input_zero_point * weights.sum(axis=axes)  # type: ignore[attr-defined]
    if len(anchor.inputs) > 2:
        folded = folded + graph.constants[anchor.inputs[2]]
    behind = graph.nodes[[node.output for node in graph.nodes].index(anchor.output) + 1 :]
    if not behind and not folded.any():
        return None
    shape = graph.types[anchor.output].shape
    row = (1, 1, *shape[2:]) if len(shape) == 4 else shape

    def narrowed(kind: TensorType) -> TensorType:
        """The type of one row."""
        return TensorType(row, kind.dtype) if kind.shape == shape else kind

    first = Node(Add(), (SUMS, FOLDED), anchor.output)
    nodes = (first, *behind)
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    constants = {name: graph.constants[name] for name in read if name in graph.constants}
    constants[FOLDED] = folded.astype(np.int32)
    types = {name: graph.types[name] if name in graph.constants else narrowed(graph.types[name])
             for name in graph.types if name in read or any(name == node.output for node in nodes)}  # fmt: skip
    types |= {SUMS: TensorType(row, DType.INT32), FOLDED: TensorType(folded.shape, DType.INT32)}
    inputs = (SUMS, *(name for name in graph.inputs if name in read))
    return Graph("row", inputs, graph.outputs, nodes, types, constants)


def _slot(number: int, place: OperandPlace) -> str:
    """C of the present input's slot of an operand."""
    return f"operand_{number} + (input % {place.slots}u) * {place.nbytes}u" if place.slots > 1 else f"operand_{number}"


def _call(kernel: CoreKernel, pointers: Mapping[str, str], result: str, blob: _Blob) -> str:
    """C of a kernel's call; its constants go into the element's data."""
    arguments = []
    for parameter in kernel.parameters:
        if parameter.is_constant:
            place = f"element_data + {blob.add(np.ascontiguousarray(kernel.constants[parameter.value]).tobytes())}u"
        else:
            place = result if parameter.name == "output" else pointers[parameter.value]
        const = "" if parameter.name == "output" else "const "
        arguments.append(place if place == "sums" else f"({const}{parameter.c_type} *)(const void *)({place})"
                         if const else f"({parameter.c_type} *)(void *)({place})")  # fmt: skip
    return f"{kernel.name}({', '.join(arguments)});"


def _source(
    kernel: CoreKernel | None, places: list[OperandPlace], result_bytes: int, sums: int, compute: list[str]
) -> str:
    """The program's text."""
    lines = ['#include "element.h"', '#include "mesh_hal.h"', '#include "program.h"', ""]
    if kernel is not None:
        lines += [kernels.helper_source(kernel.helpers), *kernel.declarations, kernel.shared, kernel.source]
    lines.append('uint8_t element_data[ELEMENT_BYTES] __attribute__((aligned(16), section(".element")));')
    for number, place in enumerate(places):
        lines.append(f"static uint8_t operand_{number}[{place.slots * place.nbytes}] __attribute__((aligned(16)));")
    lines.append(f"static uint8_t results[2][{-(-result_bytes // 16) * 16}] __attribute__((aligned(16)));")
    lines += [f"static int32_t sums[{sums}] __attribute__((aligned(16)));"] if sums else []
    lines += ["", "static mesh_transfer_t *transfers(void)", "{",
              "    const element_t *self = (const element_t *)(const void *)element_data;",
              "    return (mesh_transfer_t *)(void *)(element_data + self->transfers);", "}", ""]  # fmt: skip
    lines += [*_begin(places), ""]
    lines += ["void element_run(uint32_t input)", "{",
              "    const element_t *self = (const element_t *)(const void *)element_data;",
              "    uint8_t *result = results[input & 1u];",
              "    if (self->fetches > 0u) {",
              "        mesh_fetch(transfers() + self->messages, self->fetches, input);", "    }",
              "    if (self->messages > 0u) {", "        mesh_wait(input);", "    }",
              "    if (input > 1u) {", "        mesh_sent(input - 2u);", "    }"]  # fmt: skip
    lines += [f"    {line}" for line in compute]
    lines += ["    mesh_release(input);", "    if (self->sends != 0u) {",
              f"        mesh_send(self->key, input, result, {result_bytes}u);", "    }",
              "    if (self->stores != 0u) {", f"        mesh_store(input, result, {result_bytes}u);", "    }",
              "}", ""]  # fmt: skip
    return "\n".join(lines)


def _begin(places: list[OperandPlace]) -> list[str]:
    """The function that makes ready: padding, and where messages belong."""
    names = ", ".join(f"operand_{number}" for number in range(len(places)))
    lines = ["void element_begin(void)", "{",
             "    const element_t *self = (const element_t *)(const void *)element_data;",
             f"    uint8_t *const operands[{len(places)}] = {{{names}}};"]  # fmt: skip
    for number, place in enumerate(places):
        if place.fill:
            lines += [f"    for (uint32_t i = 0; i < {place.slots * place.nbytes}u; ++i) {{",
                      f"        operand_{number}[i] = {place.fill}u;", "    }"]  # fmt: skip
    return [*lines, "    for (uint32_t i = 0; i < self->messages + self->fetches; ++i) {",
            "        transfers()[i].target += (uint32_t)(uintptr_t)operands[transfers()[i].operand];", "    }",
            "    mesh_expect(transfers(), self->messages);", "}"]  # fmt: skip


__all__ = ["HEADER_BYTES", "ElementProgram", "OperandPlace", "element_program", "pack_weights"]
