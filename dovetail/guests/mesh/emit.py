"""The C of a mapped network: programs, the data of elements, and an image for each chip.

A network that is resident as a whole has a program for each kind of element. A network in sections has one program for
all elements: it holds a part for each different piece, and an element's data say which part it is in each section,
where in a memory that all sections share its data and buffers lie, and what is loaded from DRAM. Sections lie at both
ends of that memory in turn, so that the data of the next are loaded while the present one computes, where there is
room.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.building import build_files
from dovetail.guests.mesh.layout import (
    SectionPart,
    joined_data,
    places_of,
    program_files,
    section_files,
    section_part,
    up16,
)
from dovetail.guests.mesh.mapping import MeshMapping
from dovetail.guests.mesh.placement import SectionPlacement, Tables
from dovetail.guests.mesh.programs import HEADER_BYTES, ElementProgram, element_program
from dovetail.guests.mesh.sections import LAYER_CODE
from dovetail.guests.mesh.transfers import padding, piece_bytes, senders_of
from dovetail.target.description import Target

SECTIONS = "sections"
"""Name of the program of all sections."""
_NO_PART = 0xFFFFFFFF
_SECTION_HEADER, _SECTION, _LOAD, _FILL = (struct.Struct(f"<{count}I") for count in (4, 8, 3, 5))
"""`mesh_sections_t`, `mesh_section_t`, `mesh_load_t`, `mesh_fill_t`."""
_TABLE_ROOM = 416
"""Bytes of an element's tables for a section at most."""


@dataclass(frozen=True)
class Element:
    """An element, with the program and data it is loaded with."""

    element: int
    """Chip * elements per chip + number on it."""
    program: str
    data: bytes
    """For the symbol element_data."""
    pieces: tuple[int, ...] = ()
    """Its pieces; empty where sections differ in them."""
    places: tuple[int, ...] = ()
    """First byte of each piece's data."""


@dataclass(frozen=True)
class MeshProject:
    """Everything that is emitted."""

    elements: tuple[Element, ...]
    keys: tuple[Tables, ...]
    """Keys and routing entries of each section; no key is used in two."""
    files: Mapping[str, bytes]
    """By relative path: programs, run-time, an image per chip."""
    dram: bytes = b""
    """Image of the chip's DRAM, for a network in sections."""
    early: int = 0
    """Loads of elements that take place while the section before computes."""

    @property
    def programs(self) -> list[str]:
        """Names of the programs."""
        return sorted({element.program for element in self.elements})


_Pieces = list[tuple[ElementProgram, bytes]]
"""The program and data of each piece of a section."""


def emit_mesh(mapped: MeshMapping, target: Target) -> MeshProject:
    """Write programs and data.

    Raises:
        PlanError: a section does not fit.
        DovetailError: the core has no kernel for what it would have to compute.
    """
    placed, tables = mapped.placed, mapped.tables
    keys = _apart(tables)
    pieces = [list(_pieces(one, each, target)) for one, each in zip(placed, keys, strict=True)]
    if len(placed) == 1:
        return _emit_resident(placed[0], keys[0], pieces[0], target)
    return _emit_sections(mapped, placed, keys, pieces, target)


def _apart(tables: Sequence[Tables]) -> tuple[Tables, ...]:
    """The tables with keys that differ between sections."""
    step = 1 << max(int(one.key.max(initial=0)) + 1 for one in tables).bit_length()
    return tuple(replace(one, key=one.key + n * step, first=one.first + n * step) for n, one in enumerate(tables))


def _pieces(placed: SectionPlacement, tables: Tables, target: Target) -> Iterator[tuple[ElementProgram, bytes]]:
    for number, senders in enumerate(senders_of(placed)):
        program = element_program(*placed.section.owners[number], target)
        yield program, piece_bytes(placed, number, program, tables, senders)


def _emit_resident(placed: SectionPlacement, tables: Tables, pieces: _Pieces, target: Target) -> MeshProject:
    names: dict[tuple[str, ...], str] = {}
    sizes: dict[str, list[int]] = {}
    elements = []
    layers = [stage.layer.name for stage, _ in placed.section.owners]
    for element, tenants in placed.tenants.items():
        if len(tenants) > 1 and target.mesh is not None and target.mesh.pieces is not None:
            what = f"the pieces {', '.join(map(str, tenants))} share an element whose target computes them"
            hint = "give each an element of its own: their buffers have fixed places"
            raise PlanError(what, where=layers[tenants[0]], hint=hint)
        texts = tuple(pieces[piece][0].source for piece in tenants)
        name = names.setdefault(texts, f"{layers[tenants[0]]}_{len(names)}")
        most = zip(sizes.get(name, [0] * len(tenants)), tenants, strict=True)
        sizes[name] = [max(size, len(pieces[piece][1])) for size, piece in most]
        elements.append(Element(element, name, b"", tenants))
    loaded = [
        replace(
            one,
            data=joined_data([pieces[piece][1] for piece in one.pieces], sizes[one.program]),
            places=tuple(places_of(sizes[one.program])[: len(one.pieces)]),
        )
        for one in elements
    ]
    sources = {name: program_files(texts, sizes[name]) for texts, name in names.items()}
    files = {**dict(build_files(sources, target)), **dict(chip_images(placed, tables, loaded))}
    return MeshProject(tuple(loaded), (tables,), files)


_IMAGE = struct.Struct("<4sIIIII")
_LOADED = struct.Struct("<II32sI")
_ROUTE = struct.Struct("<IIII")


def chip_images(placed: SectionPlacement, tables: Tables, elements: Sequence[Element]) -> Iterator[tuple[str, bytes]]:
    """A loader image per chip, little-endian words.

    "DVM1", column and row of the chip, counts of elements, of routing entries and of local sets. Per element its
    number, the bytes of its data, the name of its program (32 bytes) and a zero, then the data, to a multiple of 4.
    Per routing entry: key, mask, directions (a bit each), and the local set plus one (0 for none). Per local set: its
    number plus one, how many elements, and their numbers.
    """
    per, traffic = placed.topology.mesh.per_chip, placed.traffic
    by_chip: dict[int, list[Element]] = defaultdict(list)
    for element in sorted(elements, key=lambda one: one.element):
        by_chip[element.element // per].append(element)
    for chip in sorted({*by_chip, *tables.chip.tolist()}):
        rows = np.nonzero(tables.chip == chip)[0]
        sets = sorted({int(number) for number in tables.local[rows] if number >= 0})
        x, y = placed.topology.places[chip]
        content = [_IMAGE.pack(b"DVM1", x, y, len(by_chip[chip]), len(rows), len(sets))]
        for element in by_chip[chip]:
            content.append(_LOADED.pack(element.element % per, len(element.data), element.program.encode()[:32], 0))
            content.append(element.data + bytes(-len(element.data) % 4))
        for row in rows:
            mask = ~(int(tables.keys[row]) - 1) & 0xFFFFFFFF
            content.append(_ROUTE.pack(int(tables.first[row]), mask, int(tables.ways[row]), int(tables.local[row]) + 1))
        for number in sets:
            members = placed.element[traffic.members[traffic.start[number] : traffic.start[number + 1]]]
            here = sorted({element % per for element in members.tolist() if element // per == chip})
            content.append(struct.pack(f"<{2 + len(here)}I", number + 1, len(here), *here))
        yield f"chips/chip_{x}_{y}.img", b"".join(content)


def read_chip_image(content: bytes) -> tuple[tuple[int, int], dict[int, bytes], bytes]:
    """Place of a chip, the data of its elements by number, and its routes: counts of entries and sets, then these.

    Raises:
        ValueError, struct.error: the content is not an image.
    """
    magic, x, y, count, entries, sets = _IMAGE.unpack_from(content)
    if magic != b"DVM1":
        raise ValueError("no image")
    data, place = {}, _IMAGE.size
    for _ in range(count):
        number, nbytes, _, _ = _LOADED.unpack_from(content, place)
        place += _LOADED.size
        data[number] = content[place : place + nbytes]
        place += -(-nbytes // 4) * 4
    return (x, y), data, struct.pack("<2I", entries, sets) + content[place:]


@dataclass(frozen=True)
class _SectionTurn:
    """The part of a program an element runs in a section, with its loads and padding."""

    part: int = _NO_PART
    buffers: int = 0
    loads: tuple[tuple[int, int, int], ...] = ()
    """Place in DRAM, place in the data, bytes."""
    fills: tuple[tuple[int, int, int, int, int], ...] = ()
    """Fields of `mesh_fill_t`."""

    @property
    def data(self) -> int:
        """Bytes of data, to a multiple of 16."""
        return max((up16(to + size) for _, to, size in self.loads), default=0)


class _DramImage:
    """The image of a chip's DRAM; equal contents are there once."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._places: dict[bytes, int] = {}

    def place(self, content: bytes) -> int:
        """The first byte of some content, which is added if it is new."""
        if content not in self._places:
            self._places[content] = len(self.content)
            self.content += content + bytes(-len(content) % 16)
        return self._places[content]


def _emit_sections(
    mapped: MeshMapping,
    placed: Sequence[SectionPlacement],
    keys: tuple[Tables, ...],
    pieces: Sequence[_Pieces],
    target: Target,
) -> MeshProject:
    name, mesh = mapped.parts.graph.name, mapped.parts.mesh
    dram, numbers, parts = _DramImage(), dict[str, int](), list[SectionPart]()
    for program, _ in (piece for section in pieces for piece in section):
        if numbers.setdefault(program.source, len(parts)) == len(parts):
            parts.append(section_part(program.source, len(parts)))
    turns = [dict(_turns(one, each, dram, numbers, parts)) for one, each in zip(placed, pieces, strict=True)]
    rows = {element: [turn.get(element, _SectionTurn()) for turn in turns] for element in sorted(set().union(*turns))}
    limit = mesh.usable - mesh.code - LAYER_CODE * len(mapped.parts.layers) - mesh.stack - _TABLE_ROOM * len(turns)
    room = min(limit, max(map(_early_bytes, rows.values()))) // 16 * 16
    least = max(turn.data + turn.buffers for row in rows.values() for turn in row)
    if room < least:
        what = f"a section takes {least} bytes of an element beside the program of all sections, {room} are left"
        raise PlanError(what, where=name, hint="use more elements, or elements with more memory")
    tables = {element: _section_table(row, room) for element, row in rows.items()}
    elements = tuple(Element(element, SECTIONS, content) for element, (content, _) in tables.items())
    program_texts = section_files(parts, room, max(len(one.data) for one in elements))
    files = dict(build_files({SECTIONS: program_texts}, target, sections=True))
    files |= dict(_section_images(placed, keys, elements, bytes(dram.content)))
    return MeshProject(elements, keys, files, bytes(dram.content), sum(early for _, early in tables.values()))


def _turns(
    placed: SectionPlacement, pieces: _Pieces, dram: _DramImage, numbers: Mapping[str, int], parts: list[SectionPart]
) -> Iterator[tuple[int, _SectionTurn]]:
    """Each element of a section and what it does there."""
    owners = zip(placed.section.owners, pieces, placed.element.tolist(), strict=True)
    for (stage, piece), (program, data), element in owners:
        number = numbers[program.source]
        part, place = parts[number], program.operands[0]
        ends = (0, HEADER_BYTES, struct.unpack_from("<I", data, 16)[0], len(data))
        loads = tuple((dram.place(data[a:b]), a, b - a) for a, b in pairwise(ends) if b > a)
        fills = tuple(
            (
                part.places["operand_0"] + row * place.row_bytes + column * place.column_bytes,
                *(rows, columns * place.column_bytes, place.row_bytes, place.fill),
            )
            for row, rows, column, columns in padding(stage, piece, place)
        )
        yield element, _SectionTurn(number, part.buffers, loads, fills)


def _early_bytes(row: Sequence[_SectionTurn]) -> int:
    """Bytes of an element's memory for sections with which the data of every section are loaded early."""
    return max(turn.data + turn.buffers + row[(n + 1) % len(row)].data for n, turn in enumerate(row))


def _section_table(row: Sequence[_SectionTurn], room: int) -> tuple[bytes, int]:
    """An element's data, and how many of its sections are loaded early."""
    loads: list[tuple[int, int, int]] = []
    fills: list[tuple[int, int, int, int, int]] = []
    entries, count = b"", 0
    for number, turn in enumerate(row):
        before = row[number - 1]
        is_opposite = number > 0 or len(row) % 2 == 0  # it lies at the other end than the section before
        early = is_opposite and before.data + before.buffers + turn.data <= room
        low, high = (0, turn.data) if number % 2 == 0 else (room - turn.data, room - turn.data - turn.buffers)
        lists = (len(turn.loads), len(loads), len(turn.fills), len(fills))
        entries += _SECTION.pack(turn.part, low, high, int(early), *lists)
        loads += turn.loads
        fills += turn.fills
        count += early and bool(turn.loads)
    first = _SECTION_HEADER.size + len(entries)
    second = first + _LOAD.size * len(loads)
    tail = b"".join(_LOAD.pack(*load) for load in loads) + b"".join(_FILL.pack(*fill) for fill in fills)
    return _SECTION_HEADER.pack(len(row), first, second, 0) + entries + tail, count


def _section_images(
    placed: Sequence[SectionPlacement], keys: Sequence[Tables], elements: Sequence[Element], dram: bytes
) -> Iterator[tuple[str, bytes]]:
    """The chip's loader image, little-endian words: "DVM2", column and row of the chip, count of elements, bytes of
    DRAM; per element its number and the bytes of its data, then these; then the DRAM. Routes are in an image per
    section, of the form `chip_images` writes, without elements."""
    topology = placed[0].topology
    x, y, _ = topology.position(elements[0].element)
    content = struct.pack("<4sIIII", b"DVM2", x, y, len(elements), len(dram))
    for one in elements:
        content += struct.pack("<II", topology.position(one.element)[2], len(one.data)) + one.data
    yield f"chips/chip_{x}_{y}.img", content + dram
    for number, (section, tables) in enumerate(zip(placed, keys, strict=True)):
        yield from ((f"sections/{number}/{name}", image) for name, image in chip_images(section, tables, ()))
