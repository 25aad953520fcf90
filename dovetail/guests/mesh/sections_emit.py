"""The C of a network in sections: one program for all elements, tables for each, and the image of the chip's DRAM.

The program holds the part of every section, a part for each different text. An element's data say which part it is in
each section, where in a memory that all sections share its data and buffers lie, and what is loaded from DRAM. Sections
lie at both ends of that memory in turn, so that the data of the next are loaded while the present one computes, where
there is room.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

from dovetail.errors import PlanError
from dovetail.guests.mesh.building import build_files
from dovetail.guests.mesh.emit import chip_images, element_bytes, padding, senders_of
from dovetail.guests.mesh.mapping import MeshMapping
from dovetail.guests.mesh.placement import SectionPlacement, Tables
from dovetail.guests.mesh.programs import HEADER_BYTES, ElementProgram, element_program
from dovetail.guests.mesh.sections import LAYER_CODE
from dovetail.guests.mesh.shared import ELEMENT_DATA
from dovetail.target.description import Target

PROGRAM = "sections"
"""The name of the one program."""
_BUFFER = re.compile(
    r"^static (\w+) (operand_\d+|results|sums|narrowed)((?:\[\d+\])+) __attribute__\(\(aligned\(16\)\)\);$", re.M
)
_SIZES = {"uint8_t": 1, "int8_t": 1, "int32_t": 4}
_FILLING = re.compile(
    r"^    for \(uint32_t i = 0; i < \d+u; \+\+i\) \{\n        operand_\d+\[i\] = \d+u;\n    \}\n", re.M
)
_NONE = 0xFFFFFFFF
_HEADER, _SECTION, _LOAD, _FILL = (struct.Struct(f"<{count}I") for count in (4, 8, 3, 5))


@dataclass(frozen=True)
class PieceSource:
    """A piece's program as part of that of all sections."""

    source: str
    buffers: int
    """Bytes."""
    places: Mapping[str, int]
    """Buffer -> its place among them."""


@dataclass(frozen=True)
class _SectionTurn:
    """What an element does in a section."""

    part: int
    buffers: int
    loads: tuple[tuple[int, int, int], ...]
    """Place in DRAM, place in the data, bytes."""
    fills: tuple[tuple[int, int, int, int, int], ...]

    @property
    def data(self) -> int:
        """Bytes of data, to a multiple of 16."""
        return max((-(-(to + size) // 16) * 16 for _, to, size in self.loads), default=0)


_IDLE = _SectionTurn(_NONE, 0, (), ())


@dataclass(frozen=True)
class SectionsProject:
    """Everything that is emitted."""

    elements: Mapping[int, bytes]
    """Element -> its data, for the symbol element_data."""
    keys: tuple[Tables, ...]
    """Of each section's messages: no key is used in two sections."""
    dram: bytes
    """What the chip's DRAM holds."""
    early: int
    """Sections of elements whose data are loaded while the section before computes."""
    parts: int
    files: Mapping[str, bytes]


def part_of(text: str, number: int) -> PieceSource:
    """A piece's program with its buffers in the memory for sections, and with names of its own."""
    places: dict[str, int] = {}
    size, lines = 0, []
    for kind, name, shape in _BUFFER.findall(text):
        places[name] = size
        lines.append(f"#define own_{name} (*({kind} (*){shape})(void *)(section_buffers + {size}u))")
        size += -(-_SIZES[kind] * prod(map(int, re.findall(r"\d+", shape))) // 16) * 16
    own = [f"#define element_begin part_{number}_begin", f"#define element_run part_{number}_run"]
    declared = ["extern uint8_t *section_data, *section_buffers;", "#define element_data section_data", *lines]
    body = _FILLING.sub("", _BUFFER.sub("", text))
    if places:  # not the members of structures, which are called alike
        body = re.sub(rf"(?<![.\w])({'|'.join(places)})\b", r"own_\1", body)
    body = body.replace(ELEMENT_DATA, "\n".join(declared))
    return PieceSource("\n".join([*own, body]), size, places)


def emit_sections(mapped: MeshMapping, target: Target) -> SectionsProject:
    """Write the program, tables and DRAM of a network in sections.

    Raises:
        PlanError: a section is streamed or does not fit; tables are larger than their room.
        DovetailError: what the core would have to compute has no kernel.
    """
    name, mesh = mapped.parts.graph.name, mapped.parts.mesh
    pairs = [(p, t) for p, t in zip(mapped.placed, mapped.tables, strict=True) if p is not None and t is not None]
    chips = {element // mesh.per_chip for placed, _ in pairs for element in placed.element.tolist()}
    if len(pairs) < len(mapped.placed) or mesh.pieces is not None or len(chips) > 1:
        what = "programs are written for sections on one chip, in which everything is resident"
        raise PlanError(what, where=name, hint="use more chips or boards")
    dram, known, parts = _DramImage(), dict[str, int](), list[PieceSource]()
    turns: list[dict[int, _SectionTurn]] = []
    keys = _apart([tables for _, tables in pairs])
    for number, (placed, _) in enumerate(pairs):
        turns.append(dict(_turns(placed, keys[number], target, dram, known, parts)))
    used = sorted({element for turn in turns for element in turn})
    tables = max((sum(_HEADER.size + 400 for _ in turns), 0))
    limit = mesh.usable - mesh.code - LAYER_CODE * len(mapped.parts.layers) - mesh.stack - tables
    rows = {element: [turn.get(element, _IDLE) for turn in turns] for element in used}
    room = min(limit, max(_wanted(row) for row in rows.values())) // 16 * 16
    least = max(turn.data + turn.buffers for row in rows.values() for turn in row)
    if room < least:
        what = f"a section takes {least} bytes of an element beside the program of all sections, {room} are left"
        raise PlanError(what, where=name, hint="use more elements, or elements with more memory")
    made = {element: _table(row, room) for element, row in rows.items()}
    data = {element: content for element, (content, _) in made.items()}
    program = _program(parts, room, max(map(len, data.values())))
    files = dict(build_files({PROGRAM: program}, target))
    for file in ("mesh_sections.h", "mesh_sections_sim.c"):
        files[f"runtime/{file}"] = (Path(__file__).parent / "runtime" / file).read_bytes()
    both = b"runtime/mesh_sim.c runtime/mesh_sections_sim.c"
    files["Makefile"] = files["Makefile"].replace(b"runtime/mesh_sim.c", both)
    files |= dict(_images(mapped, [p for p, _ in pairs], keys, data, dram))
    return SectionsProject(data, keys, bytes(dram.content), sum(e for _, e in made.values()), len(parts), files)


class _DramImage:
    """The image of a chip's DRAM; equal contents are there once."""

    def __init__(self) -> None:
        self.content, self._known = bytearray(), dict[bytes, int]()

    def place(self, content: bytes) -> int:
        """Where it is."""
        if content not in self._known:
            self._known[content] = len(self.content)
            self.content += content + bytes(-len(content) % 16)
        return self._known[content]


def _apart(tables: Sequence[Tables]) -> tuple[Tables, ...]:
    """The tables with keys that differ between sections."""
    step = 1 << max(int(one.key.max(initial=0)) + 1 for one in tables).bit_length()
    return tuple(
        replace(one, key=one.key + number * step, first=one.first + number * step) for number, one in enumerate(tables)
    )


def _turns(
    placed: SectionPlacement,
    tables: Tables,
    target: Target,
    dram: _DramImage,
    known: dict[str, int],
    parts: list[PieceSource],
) -> Iterator[tuple[int, _SectionTurn]]:
    """What each element does in a section."""
    senders = senders_of(placed)
    for stage in placed.section.stages:
        for piece in range(stage.pieces):
            made = element_program(stage, piece, target)
            if made.source not in known:
                known[made.source] = len(parts)
                parts.append(part_of(made.source, len(parts)))
            part = parts[known[made.source]]
            content = element_bytes(placed, stage, piece, made, tables, senders[stage.first + piece])
            ends = (0, HEADER_BYTES, struct.unpack_from("<I", content, 16)[0], len(content))
            spans = [(a, b) for a, b in pairwise(ends) if b > a]
            loads = tuple((dram.place(content[a:b]), a, b - a) for a, b in spans)
            fills = tuple(_fills(part, made, padding(stage, piece, made)))
            yield int(placed.element[stage.first + piece]), _SectionTurn(known[made.source], part.buffers, loads, fills)


def _fills(
    part: PieceSource, made: ElementProgram, boxes: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int, int, int]]:
    """The padding of the first operand, (first row, rows, first column, columns) each, as fields of mesh_fill_t."""
    place = made.operands[0]
    for row, rows, column, columns in boxes:
        at = part.places["operand_0"] + row * place.row_bytes + column * place.column_bytes
        yield at, rows, columns * place.column_bytes, place.row_bytes, place.fill


def _wanted(row: Sequence[_SectionTurn]) -> int:
    """Bytes of the memory for sections with which everything is loaded early."""
    return max(turn.data + turn.buffers + row[(n + 1) % len(row)].data for n, turn in enumerate(row))


def _table(row: Sequence[_SectionTurn], room: int) -> tuple[bytes, int]:
    """An element's data, and how many sections are loaded early."""
    loads: list[tuple[int, int, int]] = []
    fills: list[tuple[int, int, int, int, int]] = []
    entries, count = b"", 0
    for number, turn in enumerate(row):
        before = row[number - 1]
        apart = number > 0 or len(row) % 2 == 0  # at the other end
        early = apart and before.data + before.buffers + turn.data <= room
        low, high = (0, turn.data) if number % 2 == 0 else (room - turn.data, room - turn.data - turn.buffers)
        lists = (len(turn.loads), len(loads), len(turn.fills), len(fills))
        entries += _SECTION.pack(turn.part, low, high, int(early), *lists)
        loads += turn.loads
        fills += turn.fills
        count += early and bool(turn.loads)
    first = _HEADER.size + len(entries)
    second = first + _LOAD.size * len(loads)
    tail = b"".join(_LOAD.pack(*one) for one in loads) + b"".join(_FILL.pack(*one) for one in fills)
    return _HEADER.pack(len(row), first, second, 0) + entries + tail, count


def _program(parts: Sequence[PieceSource], room: int, table: int) -> dict[str, str]:
    """The files of the program."""
    numbers = range(len(parts))
    declared = "\n".join(f"void part_{n}_begin(void);\nvoid part_{n}_run(uint32_t input);" for n in numbers)
    begins, runs = (", ".join(f"part_{n}_{what}" for n in numbers) for what in ("begin", "run"))
    sizes = (
        f"#ifndef PROGRAM_H\n#define PROGRAM_H\n#define ELEMENT_BYTES {table}u\n#define MEMORY_BYTES {room}u\n#endif\n"
    )
    values = {"declared": declared, "begins": begins, "runs": runs, "count": len(parts), "data": ELEMENT_DATA}
    found = {"program.c": _MAIN % values, "program.h": sizes}
    return {**found, **{f"part_{number}.c": part.source for number, part in enumerate(parts)}}


_IMAGE, _LOADED = struct.Struct("<4sIIII"), struct.Struct("<II")


def _images(
    mapped: MeshMapping,
    placed: Sequence[SectionPlacement],
    keys: Sequence[Tables],
    data: Mapping[int, bytes],
    dram: _DramImage,
) -> Iterator[tuple[str, bytes]]:
    """The chip's loader image, little-endian words: "DVM2", column and row of the chip, count of elements, bytes of
    DRAM; per element its number and the bytes of its data, then these; then the DRAM. Routes are in an image per
    section, of the form `emit.chip_images` writes, without elements."""
    per = mapped.topology.mesh.per_chip
    x, y = mapped.topology.places[next(iter(data)) // per]
    content = _IMAGE.pack(b"DVM2", x, y, len(data), len(dram.content))
    for element, own in data.items():
        content += _LOADED.pack(element % per, len(own)) + own
    yield f"chips/chip_{x}_{y}.img", content + bytes(dram.content)
    for number, (one, tables) in enumerate(zip(placed, keys, strict=True)):
        yield from ((f"sections/{number}/{name}", image) for name, image in chip_images(one, tables, []))


_MAIN = """#include "element.h"
#include "mesh_hal.h"
#include "mesh_sections.h"
#include "program.h"

%(data)s
static uint8_t section_memory[MEMORY_BYTES] __attribute__((aligned(16)));
extern uint8_t *section_data, *section_buffers;
uint8_t *section_data, *section_buffers; /* of the present section */

%(declared)s

static const mesh_section_t *section(uint32_t number)
{
    return (const mesh_section_t *)(const void *)(element_data + sizeof(mesh_sections_t)) + number;
}

static void load(const mesh_section_t *one)
{
    const mesh_sections_t *all = (const mesh_sections_t *)(const void *)element_data;
    const mesh_load_t *loads = (const mesh_load_t *)(const void *)(element_data + all->loads) + one->first_load;
    for (uint32_t i = 0; i < one->loads; ++i) {
        mesh_load(section_memory + one->data + loads[i].offset, loads[i].place, loads[i].bytes);
    }
}

static void fill_row(uint8_t *to, uint32_t value, uint32_t bytes)
{
    const uint32_t word = value * 0x01010101u;
    for (; bytes > 0u && ((uintptr_t)to & 3u) != 0u; --bytes) {
        *to++ = (uint8_t)value;
    }
    for (; bytes >= 16u; bytes -= 16u, to += 16) {
        __builtin_memcpy(to, &word, 4);
        __builtin_memcpy(to + 4, &word, 4);
        __builtin_memcpy(to + 8, &word, 4);
        __builtin_memcpy(to + 12, &word, 4);
    }
    for (; bytes > 0u; --bytes) {
        *to++ = (uint8_t)value;
    }
}

static void fill(const mesh_section_t *one)
{
    const mesh_sections_t *all = (const mesh_sections_t *)(const void *)element_data;
    const mesh_fill_t *fills = (const mesh_fill_t *)(const void *)(element_data + all->fills) + one->first_fill;
    for (uint32_t i = 0; i < one->fills; ++i) {
        uint8_t *row = section_memory + one->buffers + fills[i].offset;
        for (uint32_t count = 0; count < fills[i].rows; ++count, row += fills[i].row_bytes) {
            fill_row(row, fills[i].value, fills[i].bytes);
        }
    }
}

void element_begin(void)
{
}

void element_run(uint32_t turn)
{
    static void (*const begins[%(count)d])(void) = {%(begins)s};
    static void (*const runs[%(count)d])(uint32_t input) = {%(runs)s};
    const uint32_t count = ((const mesh_sections_t *)(const void *)element_data)->sections;
    const uint32_t number = turn %% count;
    const mesh_section_t *one = section(number), *next = section((number + 1u) %% count);
    mesh_join(turn);
    if (turn == 0u || one->early == 0u) {
        load(one);
    }
    mesh_loaded();
    if (next->early != 0u) {
        load(next);
    }
    if (one->part < %(count)du) {
        section_data = section_memory + one->data;
        section_buffers = section_memory + one->buffers;
        fill(one);
        mesh_select(number);
        begins[one->part]();
        runs[one->part](turn / count);
    }
}
"""
