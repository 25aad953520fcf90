"""The C program of a kind of element, and the data of its pieces: operands in their slots, rows on the array, what the
core does behind it; and which parts of messages belong where in the operands."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

import numpy as np

from dovetail import kernels
from dovetail.guests.mesh.building import c_template
from dovetail.guests.mesh.compiled import CompiledPieces, copying
from dovetail.guests.mesh.cuts import rows_together
from dovetail.guests.mesh.layers import SUMS, tail_of
from dovetail.guests.mesh.partition import MeshStage, piece_sizes, read_span
from dovetail.guests.mesh.pieces import PARTIAL, piece_graph
from dovetail.guests.mesh.placement import SectionPlacement, Tables
from dovetail.ir.graph import Graph, Node, part_of
from dovetail.ir.types import Box, box_shape
from dovetail.kernels import CoreKernel, core_traits
from dovetail.records import Record
from dovetail.target.description import Target
from dovetail.target.mesh import pack_weights

HEADER_BYTES = 32
"""Bytes of `element_t`."""
ELEMENT_HEADER = struct.Struct("<8I")
"""`element_t`."""
TRANSFER = struct.Struct("<13I")
"""`mesh_transfer_t`."""
_FILL = struct.Struct("<7I")
"""`mesh_fill_t`."""


class OperandPlace(Record):
    """Place of an operand in an element's memory: a box of an image, NHWC."""

    start: tuple[int, int, int]
    """Row, column and channel of the image that lie first; they may be padding."""
    row_bytes: int
    column_bytes: int
    itemsize: int
    nbytes: int
    """Bytes of one input's slot."""
    slots: int
    fill: int
    """The padding, as a byte."""


class PieceBuffer(Record):
    """An array of a piece's program, at a multiple of 16 bytes; its contents are of no use to the next input."""

    name: str
    shape: tuple[int, ...]
    c_type: str = "uint8_t"

    @property
    def dimensions(self) -> str:
        """C behind its name."""
        return "".join(f"[{size}]" for size in self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return prod(self.shape) * (4 if self.c_type == "int32_t" else 1)


class PieceCode(Record):
    """The code of pieces that differ in nothing but their data."""

    source: str
    """C text, without what declares `element_data` and the buffers."""
    buffers: tuple[PieceBuffer, ...]
    alignment: int = 16
    """Alignment of its data."""


class ElementProgram(Record):
    """The program of a piece."""

    code: PieceCode
    constants: bytes
    """The element's data up to its transfers: room for the header, then the constants."""
    operands: tuple[OperandPlace, ...]
    """Places of the layer's readings in order, then of the partial sums."""
    skip: int
    """Bytes of the first operand before those it multiplies."""


def element_program(stage: MeshStage, piece: int, target: Target) -> ElementProgram:
    """The program of a piece.

    Raises:
        DovetailError: no kernel of the core computes what the array does not.
    """
    graph, reads = piece_graph(stage, piece)
    if target.mesh is not None and isinstance(target.mesh.array, CompiledPieces):
        return _compiled(stage, graph, reads, target.mesh.array)
    if stage.layer.on_array:
        return _on_array(stage, piece, graph, target)
    return _on_core(stage, graph, reads, target)


def _compiled(stage: MeshStage, graph: Graph, reads: Mapping[str, Box], pieces: CompiledPieces) -> ElementProgram:
    """A piece the element's target compiles; an operand of one slot is received where it is read."""
    places = _dense_operands(stage, reads)
    result_bytes = graph.types[graph.outputs[0]].nbytes
    held = sum(place.slots * place.nbytes for place in places if place.slots > 1)
    names = [reading.name for reading in stage.layer.readings]
    program = pieces.program(graph, names, bytes(HEADER_BYTES), held + 2 * (result_bytes + 16))
    lines, buffers, compute = [program.source], [_results(result_bytes)], []
    for number, (place, lies) in enumerate(zip(places, program.inputs, strict=True)):
        if place.slots == 1:
            lines.append(f"#define operand_{number} {lies}")
            continue
        buffers.append(PieceBuffer(f"operand_{number}", (place.slots * place.nbytes,)))
        nbytes = graph.types[names[number]].nbytes
        compute.append(copying(pieces.target, lies, slot_of(number, place), nbytes))
    compute += ["piece_run();", copying(pieces.target, "result", program.output, result_bytes)]
    source = "\n".join([*lines, *message_loop(places, result_bytes, compute)])
    return ElementProgram(PieceCode(source, tuple(buffers), program.alignment), program.constants, tuple(places), 0)


def _results(nbytes: int) -> PieceBuffer:
    """The buffer of two results."""
    return PieceBuffer("results", (2, -(-nbytes // 16) * 16))


def add_constant(constants: bytearray, content: bytes) -> int:
    """Add to an element's constants; returns the place."""
    constants += bytes(-len(constants) % 16)
    constants += content
    return len(constants) - len(content)


def _on_core(stage: MeshStage, graph: Graph, reads: Mapping[str, Box], target: Target) -> ElementProgram:
    """Operands lie densely, one kernel computes the piece."""
    kernel = kernels.generate(graph, "compute", core_traits(target.core))
    places, constants = _dense_operands(stage, reads), bytearray(HEADER_BYTES)
    pointers = {one.name: slot_of(n, places[n]) for n, one in enumerate(stage.layer.readings)}
    call = _call(kernel, pointers, "result", constants)
    source = _source(kernel, places, graph.types[graph.outputs[0]].nbytes, (1, 0), [call], own=target.core.functions)
    return ElementProgram(source, bytes(constants), tuple(places), 0)


def _dense_operands(stage: MeshStage, reads: Mapping[str, Box]) -> list[OperandPlace]:
    """Operands as a piece's graph has them: the boxes it reads, without gaps."""
    places = []
    for reading, slots in zip(stage.layer.readings, stage.slots, strict=True):
        box = reads[reading.name]
        image = box[1:] if len(box) == 4 else tuple((0, size) for size in reading.image)
        places.append(dense_place(image, reading.itemsize, slots))
    return places


def _on_array(stage: MeshStage, piece: int, graph: Graph, target: Target) -> ElementProgram:
    """Some rows at a time: the array makes sums, `narrow_sums` or a kernel finishes them."""
    layer = stage.layer
    parts, constants = layer.parts, bytearray(HEADER_BYTES)
    assert parts is not None and parts.anchor is not None
    anchor = next(node for node in graph.nodes if type(node.operator) is type(parts.anchor.operator))
    rows, columns, outputs = box_shape(tuple(stage.spans(piece)[:3]))
    places, skip = _array_operands(stage, piece, graph)
    weights = add_constant(constants, pack_weights(layer.kind, graph.constants[anchor.inputs[1]]).tobytes())
    tail = tail_of(graph, anchor)
    assert target.mesh is not None
    sizes = piece_sizes(stage.cut, stage.boxes[piece : piece + 1])
    together = int(rows_together(layer, sizes, target.mesh)[0]) if tail else rows
    row_bytes = columns * outputs * graph.types[graph.outputs[0]].dtype.numpy.itemsize
    if not tail:
        job = _job(stage, places[0], weights, "(int32_t *)(void *)result", columns, outputs, graph, anchor)
        text = ["const uint32_t next = 0;", f"const uint32_t count = {rows};", *job, "mac_wait();"]
        source = _source(None, places, rows * row_bytes, (1, 0), text, own=target.core.functions)
        return ElementProgram(source, bytes(constants), tuple(places), skip)
    buffers = 1 if together == rows else 2
    body, kernel, helpers, narrowed, row_target = list[str](), None, [], 0, f"result + at * {row_bytes}u"
    names = [reading.name for reading in layer.readings] + [PARTIAL] * (PARTIAL in graph.inputs)
    pointers = {SUMS: f"done + (at - row) * {columns * outputs}u"}
    behind: Graph | None = tail
    if lines := layer.lines(*stage.spans(piece)[2]) if stage.cut.sums == 1 else None:
        helpers.append("narrow_sums")
        first, rest = tail.nodes[2].output, tail.nodes[3:]
        behind = part_of(tail, rest, tail.name) if rest else None
        if behind:  # the array's value is the first operand
            behind = replace(behind, inputs=tuple(sorted(behind.inputs, key=lambda one: one != first)))
        numbers = lines.numbers()
        place = f"(const int32_t *)(const void *)(element_data + {add_constant(constants, numbers.tobytes())}u)"
        to = "narrowed" if behind else f"(int8_t *)(void *)(result + row * {row_bytes}u)"
        shape = f"(int32_t)count * {columns}, {outputs}, {place}, {12 if lines.gains is not None else 8}"
        body.append(f"narrow_sums({to}, done, {shape}, {lines.raise_by}, {(lines.centre * 0x10001):#x}u);")
        narrowed = together * columns * outputs if behind else 0
        pointers[first] = f"narrowed + (at - row) * {columns * outputs}u"
    if behind:
        kernel = kernels.generate(behind, "finish", core_traits(target.core))
        for number in range(1, len(places)):
            pointers[names[number]] = f"{slot_of(number, places[number])} + at * {places[number].row_bytes}u"
        call = _call(kernel, pointers, row_target, constants)
        body += ["for (uint32_t at = row; at < row + count; ++at) {", f"    {call}", "}"]
    job = _job(stage, places[0], weights, _half("next", together, buffers), columns, outputs, graph, anchor)
    text = _by_turns(rows, together, job, _half("row", together, buffers), body)
    row_sums = (buffers, together * columns * outputs)
    source = _source(kernel, places, rows * row_bytes, row_sums, text, helpers, narrowed, target.core.functions)
    return ElementProgram(source, bytes(constants), tuple(places), skip)


def _half(row: str, together: int, buffers: int) -> str:
    """The buffer of the sums of the rows from `row` on."""
    return f"row_sums[{row} / {together}u & 1u]" if buffers > 1 else "row_sums[0]"


def _by_turns(rows: int, together: int, job: Sequence[str], done: str, finish: Sequence[str]) -> list[str]:
    """C in which the array computes rows while the core finishes those before."""

    def count(row: str) -> str:
        left = f"{rows}u - {row}"
        return str(together) if rows % together == 0 else f"{left} < {together}u ? {left} : {together}u"

    def inside(lines: Sequence[str]) -> str:
        return "\n".join(f"        {line}" for line in lines)

    values = {"rows": rows, "together": together, "end": rows + together, "done": done}
    values |= {"next_count": count("next"), "row_count": count("row"), "job": inside(job), "finish": inside(finish)}
    return (c_template("rows") % values).splitlines()


def wanted(stage: MeshStage, piece: int, number: int) -> list[tuple[int, int]]:
    """First and last + 1 along each axis of what a piece reads of an operand."""
    reading, box = stage.layer.readings[number], stage.boxes[piece : piece + 1]
    ends = (read_span(reading, stage.layer, axis, box) for axis in range(3))
    return [(int(first[0]), int(last[0])) for first, last in ends]


def _job(
    stage: MeshStage,
    image: OperandPlace,
    weights: int,
    sums: str,
    columns: int,
    outputs: int,
    graph: Graph,
    anchor: Node,
) -> list[str]:
    """C that has the array begin `count` rows of sums, from the row `next` on."""
    layer, kind = stage.layer, graph.types[anchor.inputs[0]]
    dense = layer.kind == "dense"
    members = {
        "image": f"{slot_of(0, image)} + self->skip + next * {layer.stride[0] * image.row_bytes if not dense else 0}u",
        "weights": f"element_data + {weights}u",
        "sums": sums,
        "image_row": f"{image.row_bytes}u",
        "columns": f"{columns}u",
        "outputs": f"{outputs}u",
        "inputs": f"{kind.shape[-1] if dense else image.column_bytes}u",
        "kernel_rows": f"{layer.kernel[0]}u",
        "kernel_columns": f"{layer.kernel[1]}u",
        "stride": f"{layer.stride[1]}u",
        "kind": f"MAC_{layer.kind.upper()}",
        "is_unsigned": f"{int(not kind.dtype.signed)}u",
        "row_stride": f"{layer.stride[0]}u",
        "rows": "count",
    }
    set_to = (f"    .{name} = {value}," for name, value in members.items())
    return ["const mac_job_t job = {", *set_to, "};", "mac_start(&job);"]


def _array_operands(stage: MeshStage, piece: int, graph: Graph) -> tuple[list[OperandPlace], int]:
    """Places of the operands of a piece on the array, and the bytes of the first that are skipped."""
    layer, first = stage.layer, stage.layer.readings[0]
    *whole, (first_sum, _) = stage.spans(piece)
    rows, columns, _ = box_shape(tuple(whole))
    spans = wanted(stage, piece, 0)
    skip = 0
    if layer.kind == "dense":
        place = dense_place(spans, 1, stage.slots[0])
        if first.image[0] * first.image[1] > 1:
            skip = first_sum - spans[0][0] * first.image[1] * first.image[2]
    else:
        high = (rows - 1) * first.step[0] + first.span[0]
        wide = (columns - 1) * first.step[1] + first.span[1]
        depth = spans[2][1] - spans[2][0]
        top, left = (whole[axis][0] * first.step[axis] - first.lead[axis] for axis in (0, 1))
        row = -(-wide // 16) * 16 * depth
        pad = layer.parts.pad if layer.parts else None
        fill = int(pad.operator.value) & 0xFF if pad else 0  # type: ignore[attr-defined]
        place = OperandPlace((top, left, spans[2][0]), row, depth, 1, high * row, stage.slots[0], fill)
    others = zip(layer.readings[1:], stage.slots[1:], strict=True)
    places = [place, *(dense_place(whole, reading.itemsize, slots) for reading, slots in others)]
    if PARTIAL in graph.inputs:
        places.append(dense_place(whole, 4, stage.slots[0]))
    return places, skip


def dense_place(box: Sequence[Sequence[int]], itemsize: int, slots: int) -> OperandPlace:
    """A box of an image without gaps."""
    rows, columns, channels = (stop - start for start, stop in box)
    column = channels * itemsize
    nbytes = -(-rows * columns * column // 8) * 8  # kernels read arrays that begin at multiples of 8
    return OperandPlace((box[0][0], box[1][0], box[2][0]), columns * column, column, itemsize, nbytes, slots, 0)


def slot_of(number: int, place: OperandPlace) -> str:
    """C of the present input's slot of an operand."""
    return f"operand_{number} + (input % {place.slots}u) * {place.nbytes}u" if place.slots > 1 else f"operand_{number}"


def _call(kernel: CoreKernel, pointers: Mapping[str, str], result: str, constants: bytearray) -> str:
    """C of a kernel's call; its constants go into the element's data."""
    arguments = []
    for parameter in kernel.parameters:
        const = "" if parameter.name == "output" else "const "
        if parameter.is_constant:
            content = np.ascontiguousarray(kernel.constants[parameter.value]).tobytes()
            place = f"element_data + {add_constant(constants, content)}u"
        else:
            place = pointers[parameter.value] if const else result
        cast = f"({const}{parameter.c_type} *)({const}void *)({place})"
        arguments.append(cast)
    return f"{kernel.name}({', '.join(arguments)});"


def _source(
    kernel: CoreKernel | None,
    places: list[OperandPlace],
    result_bytes: int,
    sums: tuple[int, int],
    compute: list[str],
    helpers: Sequence[str] = (),
    narrowed: int = 0,
    own: Mapping[str, str] = MappingProxyType({}),
) -> PieceCode:
    lines = [kernels.helper_source([*helpers, *(kernel.helpers if kernel else ())], own)]
    if kernel is not None:
        lines += [*kernel.declarations, kernel.shared, kernel.source]
    buffers = [PieceBuffer(f"operand_{number}", (one.slots * one.nbytes,)) for number, one in enumerate(places)]
    buffers.append(_results(result_bytes))
    if sums[1]:
        buffers.append(PieceBuffer("row_sums", (sums[0], -(-sums[1] // 4) * 4), "int32_t"))
    if narrowed:
        buffers.append(PieceBuffer("narrowed", (narrowed,), "int8_t"))
    return PieceCode("\n".join([*lines, *message_loop(places, result_bytes, compute)]), tuple(buffers))


def message_loop(places: Sequence[OperandPlace], result_bytes: int, compute: Sequence[str]) -> list[str]:
    """The C functions of element.h around the lines that compute `result` from `operand_0`, `operand_1`, ..."""
    values = {
        "count": len(places),
        "operands": ", ".join(f"operand_{number}" for number in range(len(places))),
        "compute": "\n".join(f"    {line}" for line in compute),
        "bytes": result_bytes,
    }
    return ["", c_template("piece") % values]


def senders_of(placed: SectionPlacement) -> list[list[int]]:
    """Per piece the pieces whose messages it is sent."""
    senders: list[list[int]] = [[] for _ in range(placed.section.pieces)]
    for sender, reader in zip(*(ends.tolist() for ends in placed.traffic.pairs()), strict=True):
        senders[reader].append(sender)
    return [sorted(one) for one in senders]


def piece_bytes(
    placed: SectionPlacement,
    number: int,
    program: ElementProgram,
    tables: Tables,
    senders: list[int],
    tensors: Sequence[str],
) -> bytes:
    """The data of the piece with a number: header, constants, transfers, padding; `tensors` are those in DRAM."""
    messages = [transfer for sender in senders for transfer in _messages(placed, number, program, tables, sender)]
    fetches = list(_fetches(placed, number, program, tensors))
    stores = list(_stores(placed, number, tensors))
    constants = program.constants[HEADER_BYTES:] + bytes(-len(program.constants) % 16)
    traffic = placed.traffic
    group = traffic.group[number]
    does = (int(traffic.start[group + 1] > traffic.start[group]), len(stores), program.skip)
    fills = [_FILL.pack(*fill) for fill in _padding(*placed.section.owners[number], program.operands[0])]
    counts = (HEADER_BYTES + len(constants), len(messages), len(fetches), len(fills))
    header = ELEMENT_HEADER.pack(int(tables.key[number]), *does, *counts)
    return (
        header
        + constants
        + b"".join(TRANSFER.pack(*transfer) for transfer in (*messages, *fetches, *stores))
        + b"".join(fills)
    )


def _messages(
    placed: SectionPlacement, number: int, program: ElementProgram, tables: Tables, sender: int
) -> Iterator[tuple[int, ...]]:
    """The transfers of one sender's message: into every operand that reads some of it."""
    (stage, piece), (sending, part) = placed.section.owners[number], placed.section.owners[sender]
    key, sent = int(tables.key[sender]), sending.spans(part)[:3]
    if sending is stage:  # partial sums
        yield _transfer(key, len(program.operands) - 1, program.operands[-1], sent, sent)
        return
    for operand, reading in enumerate(stage.layer.readings):
        if reading.producer == sending.layer.index and (operand == 0 or stage.last[piece]):
            spans = zip(wanted(stage, piece, operand), sent, strict=True)
            both = [(max(a, first), min(b, last)) for (a, b), (first, last) in spans]
            if all(a < b for a, b in both):
                yield _transfer(key, operand, program.operands[operand], sent, both)


def _fetches(
    placed: SectionPlacement, number: int, program: ElementProgram, tensors: Sequence[str]
) -> Iterator[tuple[int, ...]]:
    """The transfers of operands from DRAM; the key is the tensor's number."""
    stage, piece = placed.section.owners[number]
    for operand, reading in enumerate(stage.layer.readings):
        if reading.producer not in placed.section.layers and (operand == 0 or stage.last[piece]):
            whole, part = [(0, size) for size in reading.image], wanted(stage, piece, operand)
            yield _transfer(tensors.index(reading.value), operand, program.operands[operand], whole, part)


def _stores(placed: SectionPlacement, number: int, tensors: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The transfer of a result to DRAM, if it is wanted there."""
    stage, piece = placed.section.owners[number]
    if placed.traffic.stores[number]:
        box, whole = stage.spans(piece)[:3], [(0, size) for size in stage.layer.image]
        place = dense_place(box, stage.layer.itemsize, 1)
        yield _transfer(tensors.index(stage.layer.graph.outputs[0]), 0, place, whole, box)


def _transfer(
    key: int, operand: int, place: OperandPlace, sent: Sequence[tuple[int, int]], part: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Fields of `mesh_transfer_t`: part of a dense message, which holds the box `sent`, into an operand."""
    size, (_, columns, channels) = place.itemsize, (stop - start for start, stop in sent)
    rows, wide, deep = (stop - start for start, stop in part)
    row, column, channel = (a - b for (a, _), (b, _) in zip(part, sent, strict=True))
    source = ((row * columns + column) * channels + channel) * size
    row, column, channel = (a - b for (a, _), b in zip(part, place.start, strict=True))
    target = row * place.row_bytes + column * place.column_bytes + channel * size
    steps = (columns * channels * size, channels * size, place.row_bytes, place.column_bytes)
    return (key, source, target, operand, rows, wide, deep * size, *steps, place.slots, place.nbytes)


def _padding(stage: MeshStage, piece: int, place: OperandPlace) -> Iterator[tuple[int, ...]]:
    """Fields of `mesh_fill_t`: the boxes of padding in the buffer of a piece's first operand."""
    layer = stage.layer
    if not layer.on_array or layer.kind == "dense":
        return
    reading, (first, last) = layer.readings[0], stage.spans(piece)[1]
    high, wide = place.nbytes // place.row_bytes, (last - first - 1) * reading.step[1] + reading.span[1]
    spans = zip(wanted(stage, piece, 0), place.start, strict=True)
    (top, below), (left, right), _ = ((first - start, last - start) for (first, last), start in spans)
    boxes = [(0, top, 0, wide), (below, high - below, 0, wide), (top, below - top, 0, left)]
    boxes.append((top, below - top, right, wide - right))
    for row, rows, column, width in boxes:
        if rows > 0 and width > 0:
            first, nbytes = row * place.row_bytes + column * place.column_bytes, width * place.column_bytes
            yield first, rows, nbytes, place.row_bytes, place.fill, place.slots, place.nbytes
