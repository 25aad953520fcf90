"""The data of a piece: its header, constants, and which parts of messages belong where in its operands."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from dovetail.guests.mesh.partition import MeshStage
from dovetail.guests.mesh.placement import SectionPlacement, Tables
from dovetail.guests.mesh.programs import HEADER_BYTES, ElementProgram, OperandPlace, dense_place, wanted

ELEMENT_HEADER = struct.Struct("<8I")
"""`element_t`."""
TRANSFER = struct.Struct("<13I")
"""`mesh_transfer_t`."""
_FILL = struct.Struct("<7I")
"""`mesh_fill_t`."""


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
