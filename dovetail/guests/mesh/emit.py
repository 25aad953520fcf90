"""The C of a mapped network: programs, the data of elements, and an image for each chip.

A network that is resident as a whole has a program for each kind of element. A network in sections has one program for
all elements: it holds a part for each different piece, and an element's data say which part it is in each section,
where in a memory that all sections share its data and buffers lie, and what is loaded from DRAM. Sections lie at both
ends of that memory in turn, so that the data of the next are loaded while the present one computes, where there is
room.

Pieces that share an element take turns: the next piece is the one that need not wait, of several the one with the least
input, then the first; the model of time does the same. No piece waits inside its turn, so that none keeps another from
what it waits for.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from dovetail.codegen.manifest import Count
from dovetail.errors import PlanError
from dovetail.guests.mesh.building import build_files, c_template
from dovetail.guests.mesh.placement import MeshMapping, SectionPlacement, Tables
from dovetail.guests.mesh.programs import (
    ELEMENT_HEADER,
    HEADER_BYTES,
    ElementProgram,
    PieceCode,
    element_program,
    piece_bytes,
    senders_of,
)
from dovetail.guests.mesh.sections import LAYER_CODE
from dovetail.guests.mesh.topology import word_of
from dovetail.records import Record
from dovetail.sim.rack import LoadKind
from dovetail.target.description import Target

_Byte = Annotated[int, Meta(ge=0, le=255)]
SECTIONS = "sections"
"""Name of the program of all sections."""
_NO_PART = 0xFFFFFFFF
_SECTION_HEADER, _SECTION, _LOAD = (struct.Struct(f"<{count}I") for count in (2, 6, 3))
"""`mesh_sections_t`, `mesh_section_t`, `mesh_load_t`."""
_TABLE_ROOM = 416
"""Bytes of an element's tables for a section at most."""


class ElementRecord(msgspec.Struct, frozen=True):
    """An element and its program."""

    on: tuple[_Byte, _Byte, Annotated[int, Meta(ge=0, lt=1 << 16)]]
    """Column and row of its chip, and its number there."""
    program: Annotated[str, Meta(pattern="^[^./][^/]*$", description="the name of a program")]
    places: tuple[tuple[Count, Count, Count], ...]
    """The section of each of its pieces, and the first bytes of its header and its transfers: in the element's data, or
    in the DRAM where there are several sections."""

    @property
    def word(self) -> int:
        """Column, row and number in one word."""
        return word_of(self.on)


class Element(Record):
    """An element with what it is loaded with."""

    record: ElementRecord
    data: bytes
    """For the symbol element_data."""
    pieces: tuple[int, ...]
    """Numbers of its pieces, over all sections."""


class MeshProject(Record):
    """Everything that is emitted."""

    elements: tuple[Element, ...]
    """In the order of their words."""
    keys: tuple[Tables, ...]
    """Keys and routing entries of each section; no key is used in two."""
    files: Mapping[str, bytes]
    """By relative path: programs, run-time, an image per chip."""
    tensors: Mapping[str, int]
    """Values that lie in DRAM, in the order of their numbers, and the bytes of one input."""

    @property
    def programs(self) -> list[str]:
        """Names of the programs."""
        return sorted({element.record.program for element in self.elements})


_Pieces = list[tuple[ElementProgram, bytes]]
"""The program and data of each piece of a section."""


def emit_mesh(mapped: MeshMapping, target: Target) -> MeshProject:
    """Write programs and data.

    Raises:
        PlanError: a section does not fit, or a chip needs more routing entries than it has.
        DovetailError: the core has no kernel for what it would have to compute.
    """
    keys, tensors = _apart(mapped), _tensors(mapped)
    pieces = [list(_pieces(one, each, target, list(tensors))) for one, each in zip(mapped.placed, keys, strict=True)]
    if len(pieces) == 1:
        elements, sources, dram = _one_section(mapped.placed[0], pieces[0], target)
    else:
        elements, sources, dram = _several_sections(mapped, pieces)
    elements = tuple(sorted(elements, key=lambda one: one.record.word))
    files = dict(build_files(sources, target, sections=len(pieces) > 1))
    files |= dict(chip_images(mapped.placed, keys, elements, dram))
    return MeshProject(elements, keys, files, tensors)


def _apart(mapped: MeshMapping) -> tuple[Tables, ...]:
    """The tables of sections with keys that differ between them; raises PlanError where a chip's are too many."""
    step = 1 << max(int(one.key.max(initial=0)) + 1 for one in mapped.tables).bit_length()
    entries = np.bincount(np.concatenate([one.chip for one in mapped.tables]), minlength=1)
    if (most := int(entries.max())) > mapped.topology.mesh.route_entries:
        what = f"a chip needs {most} routing entries for all sections, it has {mapped.topology.mesh.route_entries}"
        raise PlanError(what, where=mapped.graph.name, hint="use more chips, or --whole")
    return tuple(
        replace(one, key=one.key + n * step, first=one.first + n * step) for n, one in enumerate(mapped.tables)
    )


def _tensors(mapped: MeshMapping) -> dict[str, int]:
    """Values that are fetched from DRAM or stored there, and their bytes."""
    graph = mapped.graph
    tensors = {name: graph.types[name].nbytes for name in graph.inputs}
    for placed in mapped.placed:
        for (stage, _), is_stored in zip(placed.section.owners, placed.traffic.stores.tolist(), strict=True):
            if is_stored:
                tensors[stage.layer.graph.outputs[0]] = stage.result.nbytes
    return tensors


def _pieces(
    placed: SectionPlacement, tables: Tables, target: Target, tensors: Sequence[str]
) -> Iterator[tuple[ElementProgram, bytes]]:
    for number, senders in enumerate(senders_of(placed)):
        program = element_program(*placed.section.owners[number], target)
        yield program, piece_bytes(placed, number, program, tables, senders, tensors)


_Layout = tuple[tuple[Element, ...], Mapping[str, Mapping[str, str]], bytes]
"""Elements, the files of their programs, and the image of the DRAM."""


def _one_section(placed: SectionPlacement, pieces: _Pieces, target: Target) -> _Layout:
    """A network that is resident as a whole: a program for each kind of element."""
    layers = [stage.layer.name for stage, _ in placed.section.owners]
    kinds: dict[tuple[PieceCode, ...], list[tuple[int, ...]]] = {}
    for tenants in placed.tenants.values():
        if len(tenants) > 1 and target.mesh is not None and target.mesh.pieces is not None:
            what = f"the pieces {', '.join(map(str, tenants))} share an element whose target computes them"
            hint = "give each an element of its own: their buffers have fixed places"
            raise PlanError(what, where=layers[tenants[0]], hint=hint)
        kinds.setdefault(tuple(pieces[piece][0].code for piece in tenants), []).append(tenants)
    elements, files = [], dict[str, Mapping[str, str]]()
    for codes, members in kinds.items():
        name = f"{layers[members[0][0]]}_{len(files)}"
        sizes = [max(len(pieces[piece][1]) for piece in alike) for alike in zip(*members, strict=True)]
        files[name] = program_files(codes, sizes)
        for tenants in members:
            own = [pieces[piece][1] for piece in tenants]
            begins = zip(places_of(sizes), own, strict=False)
            places = tuple((0, at, at + _transfers_place(data)) for at, data in begins)
            record = ElementRecord(placed.topology.position(int(placed.element[tenants[0]])), name, places)
            elements.append(Element(record, joined_data(own, sizes), tenants))
    return tuple(elements), files, b""


def _transfers_place(data: bytes) -> int:
    """First byte of the transfers in a piece's data."""
    return int(ELEMENT_HEADER.unpack_from(data)[4])


_IMAGE = struct.Struct("<4s6I")
_LOADED = struct.Struct("<II32sI")
_ROUTE = struct.Struct("<IIII")
_MAGIC = b"DVM2"


def chip_images(
    placed: Sequence[SectionPlacement], tables: Sequence[Tables], elements: Sequence[Element], dram: bytes
) -> Iterator[tuple[str, bytes]]:
    """A loader image per chip, little-endian words.

    "DVM2", column and row of the chip, counts of elements, of routing entries and of local sets, bytes of DRAM. Per
    element its number, the bytes of its data, the name of its program (32 bytes) and a zero, then the data, to a
    multiple of 4. Per routing entry: key, mask, directions (a bit each), and the local set plus one (0 for none). Per
    local set: its number plus one, how many elements, and their numbers. Then what lies in the DRAM.
    """
    topology = placed[0].topology
    per, by_chip = topology.mesh.per_chip, defaultdict[int, list[Element]](list)
    for element in elements:
        by_chip[topology.chips[element.record.on[:2]]].append(element)
    routes, sets = defaultdict[int, list[bytes]](list), defaultdict[int, list[bytes]](list)
    first = 1
    for one, table in zip(placed, tables, strict=True):
        for chip in np.unique(table.chip).tolist():
            rows = np.nonzero(table.chip == chip)[0]
            for row in rows:
                mask, local = ~(int(table.keys[row]) - 1) & 0xFFFFFFFF, int(table.local[row])
                number = first + local if local >= 0 else 0
                routes[chip].append(_ROUTE.pack(int(table.first[row]), mask, int(table.ways[row]), number))
            for local in sorted({int(number) for number in table.local[rows] if number >= 0}):
                members = one.element[one.traffic.members[one.traffic.start[local] : one.traffic.start[local + 1]]]
                here = sorted({element % per for element in members.tolist() if element // per == chip})
                sets[chip].append(struct.pack(f"<{2 + len(here)}I", first + local, len(here), *here))
        first += one.traffic.sets
    for chip in sorted({*by_chip, *routes}):
        x, y = topology.places[chip]
        content = [_IMAGE.pack(_MAGIC, x, y, len(by_chip[chip]), len(routes[chip]), len(sets[chip]), len(dram))]
        for element in by_chip[chip]:
            number, name = element.record.on[2], element.record.program.encode()[:32]
            content.append(_LOADED.pack(number, len(element.data), name, 0))
            content.append(element.data + bytes(-len(element.data) % 4))
        yield f"chips/chip_{x}_{y}.img", b"".join([*content, *routes[chip], *sets[chip], dram])


def read_chip_image(content: bytes) -> Iterator[tuple[LoadKind, int, bytes]]:
    """The contents of an image, as a rack is loaded with them: data of each element by its word, routes and DRAM by the
    chip's. Raises ValueError or struct.error where it is none."""
    magic, x, y, count, entries, sets, dram = _IMAGE.unpack_from(content)
    if magic != _MAGIC:
        raise ValueError("no image")
    place, end, chip = _IMAGE.size, len(content) - dram, word_of((x, y, 0))
    for _ in range(count):
        number, nbytes, _, _ = _LOADED.unpack_from(content, place)
        place += _LOADED.size
        yield LoadKind.DATA, chip | number, content[place : place + nbytes]
        place += -(-nbytes // 4) * 4
    yield LoadKind.ROUTES, chip, struct.pack("<2I", entries, sets) + content[place:end]
    if dram:
        yield LoadKind.DRAM, chip, content[end:]


class _SectionTurn(Record):
    """The part of a program an element runs in a section, with its loads."""

    part: int = _NO_PART
    buffers: int = 0
    loads: tuple[tuple[int, int, int], ...] = ()
    """Place in DRAM, place in the data, bytes."""
    piece: int = -1
    """Its number, over all sections."""

    @property
    def places(self) -> tuple[int, int]:
        """First bytes of its header and its transfers in the DRAM."""
        return self.loads[0][0], self.loads[-1][0]

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


def _several_sections(mapped: MeshMapping, pieces: Sequence[_Pieces]) -> _Layout:
    """A network in sections: one program for all elements."""
    placed, mesh = mapped.placed, mapped.mesh
    dram, numbers = _DramImage(), dict[PieceCode, int]()
    for program, _ in (piece for section in pieces for piece in section):
        numbers.setdefault(program.code, len(numbers))
    first = accumulate((one.section.pieces for one in placed), initial=0)
    turns = [dict(_turns(*each, dram, numbers)) for each in zip(first, placed, pieces, strict=False)]
    rows = {element: [turn.get(element, _SectionTurn()) for turn in turns] for element in sorted(set().union(*turns))}
    limit = mesh.usable - mesh.code - LAYER_CODE * len(mapped.network.layers) - mesh.stack - _TABLE_ROOM * len(turns)
    room = min(limit, max(map(_early_bytes, rows.values()))) // 16 * 16
    least = max(turn.data + turn.buffers for row in rows.values() for turn in row)
    if room < least:
        what = f"a section takes {least} bytes of an element beside the program of all sections, {room} are left"
        raise PlanError(what, where=mapped.graph.name, hint="use more elements, or elements with more memory")
    elements = []
    for element, row in rows.items():
        places = tuple((section, *turn.places) for section, turn in enumerate(row) if turn.loads)
        record = ElementRecord(mapped.topology.position(element), SECTIONS, places)
        own = tuple(turn.piece for turn in row if turn.loads)
        elements.append(Element(record, _section_table(row, room), own))
    program_texts = section_files(list(numbers), room, max(len(one.data) for one in elements))
    return tuple(elements), {SECTIONS: program_texts}, bytes(dram.content)


def _turns(
    first: int, placed: SectionPlacement, pieces: _Pieces, dram: _DramImage, numbers: Mapping[PieceCode, int]
) -> Iterator[tuple[int, _SectionTurn]]:
    """Each element of a section and what it does there; the section's pieces are numbered from `first` on."""
    for piece, ((program, data), element) in enumerate(zip(pieces, placed.element.tolist(), strict=True), first):
        ends = (0, HEADER_BYTES, _transfers_place(data), len(data))
        loads = tuple((dram.place(data[a:b]), a, b - a) for a, b in pairwise(ends) if b > a)
        yield element, _SectionTurn(numbers[program.code], buffer_places(program.code)[-1], loads, piece)


def _early_bytes(row: Sequence[_SectionTurn]) -> int:
    """Bytes of an element's memory for sections with which the data of every section are loaded early."""
    return max(turn.data + turn.buffers + row[(n + 1) % len(row)].data for n, turn in enumerate(row))


def _section_table(row: Sequence[_SectionTurn], room: int) -> bytes:
    """An element's data."""
    loads: list[tuple[int, int, int]] = []
    entries = b""
    for number, turn in enumerate(row):
        before = row[number - 1]
        is_opposite = number > 0 or len(row) % 2 == 0  # it lies at the other end than the section before
        early = is_opposite and before.data + before.buffers + turn.data <= room
        low, high = (0, turn.data) if number % 2 == 0 else (room - turn.data, room - turn.data - turn.buffers)
        entries += _SECTION.pack(turn.part, low, high, int(early), len(turn.loads), len(loads))
        loads += turn.loads
    header = _SECTION_HEADER.pack(len(row), _SECTION_HEADER.size + len(entries))
    return header + entries + b"".join(_LOAD.pack(*load) for load in loads)


_INCLUDES = '#include "element.h"\n#include "mesh_hal.h"\n#include "program.h"\n'
_HEADER = "#ifndef PROGRAM_H\n#define PROGRAM_H\n{}\n#endif\n"
_SECTION_MEMORY = """extern uint8_t *section_data, *section_buffers;
#define element_data ((uint8_t *)__builtin_assume_aligned(section_data, 16))"""


def up16(size: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-size // 16) * 16


def places_of(sizes: Sequence[int]) -> list[int]:
    """First byte of each of some contents one after the other, at multiples of 16, and the end of the last."""
    return list(accumulate(map(up16, sizes), initial=0))


def joined_data(parts: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """The data of an element whose pieces have data of at most these sizes."""
    if len(parts) == 1:
        return parts[0]
    return b"".join(part + bytes(up16(size) - len(part)) for part, size in zip(parts, sizes, strict=True))


def _element_data(alignment: int) -> str:
    """C of the memory an element's data are loaded into."""
    return f'uint8_t element_data[ELEMENT_BYTES] __attribute__((aligned({alignment}), section(".element")));'


def _own_buffers(code: PieceCode) -> Iterator[str]:
    for one in code.buffers:
        yield f"static {one.c_type} {one.name}{one.dimensions} __attribute__((aligned(16)));"


def _section_buffers(code: PieceCode) -> Iterator[str]:
    for one, place in zip(code.buffers, buffer_places(code), strict=False):
        at = f"__builtin_assume_aligned(section_buffers + {place}u, 16)"
        yield f"#define {one.name} (*({one.c_type} (*){one.dimensions}){at})"


def buffer_places(code: PieceCode) -> list[int]:
    """First byte of each buffer in the memory of sections, and the end of the last."""
    return places_of([one.nbytes for one in code.buffers])


def _file(code: PieceCode, names: str, data: str, buffers: Iterator[str]) -> str:
    return "\n".join([names, _INCLUDES, data, *buffers, code.source])


def _names(number: int) -> str:
    """C that gives the functions of a piece's program names of their own."""
    return "\n".join(f"#define element_{name} piece_{number}_{name}" for name in ("begin", "run"))


def _main(template: str, count: int, **values: str) -> str:
    """The file that calls the pieces."""
    declared = "\n".join(f"void piece_{n}_begin(void);\nvoid piece_{n}_run(uint32_t input);" for n in range(count))
    begins, runs = (", ".join(f"piece_{n}_{name}" for n in range(count)) for name in ("begin", "run"))
    return c_template(template) % {"declared": declared, "count": count, "begins": begins, "runs": runs, **values}


def _header(**numbers: int) -> str:
    return _HEADER.format("\n".join(f"#define {name} {number}u" for name, number in numbers.items()))


def program_files(codes: Sequence[PieceCode], sizes: Sequence[int]) -> dict[str, str]:
    """File name -> text of a program of some pieces, with data of at most these sizes."""
    if len(codes) == 1:
        text = _file(codes[0], "", _element_data(codes[0].alignment), _own_buffers(codes[0]))
        return {"program.c": text, "program.h": _header(ELEMENT_BYTES=sizes[0])}
    places = places_of(sizes)
    files = {"program.h": _header(ELEMENT_BYTES=places[-1])}
    files["program.c"] = _main("turns", len(codes), data=_element_data(max(code.alignment for code in codes)))
    for number, code in enumerate(codes):
        data = "extern uint8_t element_data[ELEMENT_BYTES];"
        data += f"\n#define element_data (element_data + {places[number]}u)"
        files[f"piece_{number}.c"] = _file(code, _names(number), data, _own_buffers(code))
    return files


def section_files(codes: Sequence[PieceCode], room: int, table: int) -> dict[str, str]:
    """File name -> text of the program of all sections, with `room` bytes for them and tables of at most `table`."""
    files = {
        f"piece_{number}.c": _file(code, _names(number), _SECTION_MEMORY, _section_buffers(code))
        for number, code in enumerate(codes)
    }
    files["program.h"] = _header(ELEMENT_BYTES=table, MEMORY_BYTES=room)
    return {**files, "program.c": _main("sections", len(codes), data=_element_data(16))}
