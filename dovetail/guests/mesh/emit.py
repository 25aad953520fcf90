"""The C of a placed network: a program for each kind of element, data for each element, an image for each chip."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.building import build_files
from dovetail.guests.mesh.partition import MeshPartition, MeshStage
from dovetail.guests.mesh.placement import SectionPlacement, Tables
from dovetail.guests.mesh.programs import (
    HEADER_BYTES,
    ElementProgram,
    OperandPlace,
    element_program,
    result_size,
    wanted,
)
from dovetail.guests.mesh.shared import joined_data, places_of, program_files
from dovetail.target.description import Target

_TRANSFER = struct.Struct("<13I")
"""`mesh_transfer_t`."""
_HEADER = struct.Struct("<8I")
"""`element_t`."""


@dataclass(frozen=True)
class Element:
    """One element, with the program and data it is loaded with."""

    pieces: tuple[int, ...]
    element: int
    """Chip * elements per chip + number on it."""
    program: str
    data: bytes
    """For the symbol element_data."""
    places: tuple[int, ...]
    """Where the data of each piece begin."""


@dataclass(frozen=True)
class MeshProject:
    """Everything that is emitted."""

    programs: Mapping[str, str]
    """Program -> its C text, of several files one after the other."""
    elements: tuple[Element, ...]
    files: Mapping[str, bytes]
    """By relative path: programs, run-time, an image per chip."""


def emit_mesh(parts: MeshPartition, placed: SectionPlacement, tables: Tables, target: Target) -> MeshProject:
    """Write programs and data.

    Raises:
        PlanError: the network is not resident as a whole, or a table does not fit its element.
        DovetailError: what the core would have to compute has no kernel.
    """
    if not parts.resident:
        what = "programs are written for networks that are on the mesh as a whole"
        raise PlanError(what, where=parts.graph.name, hint="use more chips or boards")
    names: dict[tuple[str, ...], str] = {}
    sizes: dict[str, list[int]] = {}
    found: list[tuple[str, list[bytes]]] = []
    owner = [(stage, piece) for stage in placed.section.stages for piece in range(stage.pieces)]
    senders = senders_of(placed)
    for pieces in placed.tenants.values():
        made = [element_program(*owner[number], target) for number in pieces]
        if len(made) > 1 and target.mesh is not None and target.mesh.pieces is not None:
            what = f"the pieces {', '.join(map(str, pieces))} share an element whose target computes them"
            hint = "give each an element of its own: their buffers have fixed places"
            raise PlanError(what, where=owner[pieces[0]][0].layer.name, hint=hint)
        texts = tuple(one.source for one in made)
        name = names.setdefault(texts, f"{owner[pieces[0]][0].layer.name}_{len(names)}")
        pairs = zip(pieces, made, strict=True)
        data = [element_bytes(placed, *owner[number], one, tables, senders[number]) for number, one in pairs]
        limits = zip(sizes.get(name, [0] * len(data)), data, strict=True)
        sizes[name] = [max(known, len(part)) for known, part in limits]
        found.append((name, data))
    elements = [
        Element(pieces, element, name, joined_data(data, sizes[name]), tuple(places_of(sizes[name])[: len(pieces)]))
        for (element, pieces), (name, data) in zip(placed.tenants.items(), found, strict=True)
    ]
    sources = {name: program_files(texts, sizes[name]) for texts, name in names.items()}
    files = {**dict(build_files(sources, target)), **dict(chip_images(placed, tables, elements))}
    programs = {name: "\n".join(texts) for texts, name in names.items()}
    return MeshProject(programs, tuple(elements), files)


def senders_of(placed: SectionPlacement) -> list[list[int]]:
    """Per piece the pieces whose messages it is sent."""
    found: list[list[int]] = [[] for _ in range(placed.section.pieces)]
    for sender, reader in zip(*(ends.tolist() for ends in placed.traffic.pairs()), strict=True):
        found[reader].append(sender)
    return [sorted(one) for one in found]


def element_bytes(
    placed: SectionPlacement, stage: MeshStage, piece: int, made: ElementProgram, tables: Tables, senders: list[int]
) -> bytes:
    """An element's data: header, constants, transfers."""
    messages = [t for sender in senders for t in _messages(placed, stage, piece, made, tables, sender)]
    fetches = list(_fetches(placed, stage, piece, made))
    constants = made.constants[HEADER_BYTES:] + bytes(-len(made.constants) % 16)
    number, traffic = stage.first + piece, placed.traffic
    group = traffic.group[number]
    does = (int(traffic.start[group + 1] > traffic.start[group]), int(traffic.stores[number]), made.skip)
    counts = (HEADER_BYTES + len(constants), len(messages), len(fetches), 0)
    header = _HEADER.pack(int(tables.key[number]), *does, *counts)
    return header + constants + b"".join(_TRANSFER.pack(*transfer) for transfer in (*messages, *fetches))


def _messages(
    placed: SectionPlacement, stage: MeshStage, piece: int, made: ElementProgram, tables: Tables, sender: int
) -> Iterator[tuple[int, ...]]:
    """The transfers of one sender's message: into every operand that reads some of it."""
    from_stage = next(s for s in placed.section.stages if s.first <= sender < s.first + s.pieces)
    box = from_stage.boxes[sender - from_stage.first].tolist()
    key = int(tables.key[sender])
    if from_stage is stage:
        place = made.operands[-1]
        yield _transfer(key, len(made.operands) - 1, place, box, [box[0:2], box[2:4], box[4:6]])
        return
    for number, reading in enumerate(stage.layer.readings):
        if reading.producer == from_stage.layer.index and (number == 0 or stage.last[piece]):
            spans = wanted(stage, piece, number)
            both = [[max(a, box[2 * i]), min(b, box[2 * i + 1])] for i, (a, b) in enumerate(spans)]
            if all(a < b for a, b in both):
                yield _transfer(key, number, made.operands[number], box, both)


def _fetches(placed: SectionPlacement, stage: MeshStage, piece: int, made: ElementProgram) -> Iterator[tuple[int, ...]]:
    """The transfers of what comes from DRAM; their key is the number of the operand among those that do."""
    done: set[int] = set()
    for tensor, fetch in enumerate(placed.traffic.fetches):
        for number, reading in enumerate(stage.layer.readings):
            if number not in done and reading.value == fetch.value and stage.first + piece in fetch.pieces:
                done.add(number)
                image = reading.image
                whole = [0, image[0], 0, image[1], 0, image[2]]
                yield _transfer(tensor, number, made.operands[number], whole, wanted(stage, piece, number))


def padding(stage: MeshStage, piece: int, made: ElementProgram) -> list[tuple[int, int, int, int]]:
    """The padding of a piece's first operand: boxes of its buffer, first row, rows, first column, columns."""
    layer, place = stage.layer, made.operands[0]
    if not layer.on_array or layer.kind == "dense":
        return []
    (top, below), (left, right), _ = wanted(stage, piece, 0)
    reading, (_, columns, _) = layer.readings[0], result_size(stage, piece)
    high, wide = place.nbytes // place.row_bytes, (columns - 1) * reading.step[1] + reading.span[1]
    top, below, left, right = (
        top - place.start[0],
        below - place.start[0],
        left - place.start[1],
        right - place.start[1],
    )
    boxes = [(0, top, 0, wide), (below, high - below, 0, wide), (top, below - top, 0, left)]
    boxes.append((top, below - top, right, wide - right))
    return [box for box in boxes if box[1] > 0 and box[3] > 0]


def _transfer(key: int, operand: int, place: OperandPlace, box: list[int], part: list[list[int]]) -> tuple[int, ...]:
    """Part of a dense message (of the elements of `box`) into an operand, as the fields of mesh_transfer_t."""
    size = place.itemsize
    columns, channels = box[3] - box[2], box[5] - box[4]
    source = (((part[0][0] - box[0]) * columns + part[1][0] - box[2]) * channels + part[2][0] - box[4]) * size
    rows, wide, deep = (stop - start for start, stop in part)
    offsets = [a - b for (a, _), b in zip(part, place.start, strict=True)]
    target = offsets[0] * place.row_bytes + offsets[1] * place.column_bytes + offsets[2] * size
    lies = (columns * channels * size, channels * size, place.row_bytes, place.column_bytes)
    return (key, source, target, operand, rows, wide, deep * size, *lies, place.slots, place.nbytes)


_IMAGE = struct.Struct("<4sIIIII")
_LOADED = struct.Struct("<II32sI")
_ROUTE = struct.Struct("<IIII")


def chip_images(placed: SectionPlacement, tables: Tables, elements: list[Element]) -> Iterator[tuple[str, bytes]]:
    """A loader image per chip, little-endian words.

    "DVM1", column and row of the chip, counts of elements, of routing entries and of local sets. Per element its
    number, the bytes of its data, the name of its program (32 bytes) and a zero, then the data, to a multiple of 4.
    Per routing entry: key, mask, directions (a bit each), and the local set plus one (0 for none). Per local set: its
    number plus one, how many elements, and their numbers.
    """
    per = placed.topology.mesh.per_chip
    by_chip: dict[int, list[Element]] = {}
    for element in elements:
        by_chip.setdefault(element.element // per, []).append(element)
    for chip in sorted({*by_chip, *tables.chip.tolist()}):
        rows = np.nonzero(tables.chip == chip)[0]
        sets = sorted({int(number) for number in tables.local[rows] if number >= 0})
        own = by_chip.get(chip, [])
        x, y = placed.topology.places[chip]
        found = [_IMAGE.pack(b"DVM1", x, y, len(own), len(rows), len(sets))]
        for element in sorted(own, key=lambda one: one.element):
            found.append(_LOADED.pack(element.element % per, len(element.data), element.program.encode()[:32], 0))
            found.append(element.data + bytes(-len(element.data) % 4))
        for row in rows:
            mask = ~(int(tables.keys[row]) - 1) & 0xFFFFFFFF
            found.append(_ROUTE.pack(int(tables.first[row]), mask, int(tables.ways[row]), int(tables.local[row]) + 1))
        for number in sets:
            members = placed.traffic.members[placed.traffic.start[number] : placed.traffic.start[number + 1]]
            here = sorted({int(e) % per for e in placed.element[members] if e // per == chip})
            found.append(struct.pack(f"<{2 + len(here)}I", number + 1, len(here), *here))
        yield f"chips/chip_{x}_{y}.img", b"".join(found)
