"""The C of a placed network: a program for each kind of element, data for each element, an image for each chip."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.emit.runtime import runtime_path
from dovetail.emit.runtime.linker import linker_script
from dovetail.errors import PlanError
from dovetail.mesh.loads import spread
from dovetail.mesh.partition import Partitioned, Stage, read_span
from dovetail.mesh.place import Placed
from dovetail.mesh.program import HEADER_BYTES, ElementProgram, OperandPlace, element_program
from dovetail.mesh.tables import Tables
from dovetail.target.description import Target

_TRANSFER = struct.Struct("<13I")
_HEADER = struct.Struct("<8I")
SHARED = ("dovetail_rt.h", "dovetail_rt.c")
OWN = ("mesh_hal.h", "element.h", "mesh_sim.c")


@dataclass(frozen=True)
class Element:
    """What one element is loaded with."""

    piece: int
    element: int
    """Chip * elements per chip + number on it."""
    program: str
    data: bytes
    """For the symbol element_data."""


@dataclass(frozen=True)
class MeshProject:
    """Everything that is emitted."""

    programs: Mapping[str, str]
    """Program -> its C text."""
    data_bytes: Mapping[str, int]
    """Program -> bytes its elements' data may have."""
    elements: tuple[Element, ...]
    files: Mapping[str, bytes]
    """By relative path: programs, run-time, an image per chip."""


def emit_mesh(parts: Partitioned, placed: Placed, tables: Tables, target: Target) -> MeshProject:
    """Write programs and data.

    Raises:
        PlanError: the network is not resident as a whole, or a table does not fit its element.
        DovetailError: what the core would have to compute has no kernel.
    """
    if not parts.resident:
        raise PlanError("programs are written for networks that are on the mesh as a whole", where=parts.graph.name,
                        hint="use more chips or boards")  # fmt: skip
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    elements = []
    senders = senders_of(placed)
    for stage in placed.section.stages:
        for piece in range(stage.pieces):
            made = element_program(stage, piece, parts.mesh, target)
            name = names.setdefault(made.source, f"{stage.layer.name}_{len(names)}")
            data = _data(placed, stage, piece, made, tables, senders[stage.first + piece])
            sizes[name] = max(sizes.get(name, 0), len(data))
            number = stage.first + piece
            elements.append(Element(number, int(placed.element[number]), name, data))
    programs = {name: source for source, name in names.items()}
    files = dict(_files(programs, sizes, target))
    files.update(_images(placed, tables, elements))
    return MeshProject(programs, sizes, tuple(elements), files)


def senders_of(placed: Placed) -> list[list[int]]:
    """Per piece the pieces whose messages it is sent."""
    traffic = placed.traffic
    order = np.argsort(traffic.group, kind="stable")
    start = np.searchsorted(traffic.group[order], np.arange(traffic.sets + 1))
    owner, entry = spread(start, traffic.set_of_members())
    found: list[list[int]] = [[] for _ in range(placed.section.pieces)]
    for member, sender in zip(traffic.members[owner].tolist(), order[entry].tolist(), strict=True):
        found[member].append(sender)
    return [sorted(one) for one in found]


def _data(
    placed: Placed, stage: Stage, piece: int, made: ElementProgram, tables: Tables, senders: list[int]
) -> bytes:
    """An element's data: header, constants, transfers."""
    messages = [t for sender in senders for t in _messages(placed, stage, piece, made, tables, sender)]
    fetches = list(_fetches(placed, stage, piece, made))
    start = -(-made.constants_end // 16) * 16
    found = bytearray(start)
    number = stage.first + piece
    group = placed.traffic.group[number]
    sends = int(placed.traffic.start[group + 1] > placed.traffic.start[group])
    key = int(tables.key[number])
    stores = int(placed.traffic.stores[number])
    found[:HEADER_BYTES] = _HEADER.pack(key, sends, stores, made.skip, start, len(messages), len(fetches), 0)
    for place, content in made.constants:
        found[place : place + len(content)] = content
    return bytes(found) + b"".join(_TRANSFER.pack(*transfer) for transfer in (*messages, *fetches))


def _messages(
    placed: Placed, stage: Stage, piece: int, made: ElementProgram, tables: Tables, sender: int
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
            wanted = _wanted(stage, piece, number)
            both = [[max(a, box[2 * i]), min(b, box[2 * i + 1])] for i, (a, b) in enumerate(wanted)]
            if all(a < b for a, b in both):
                yield _transfer(key, number, made.operands[number], box, both)


def _fetches(placed: Placed, stage: Stage, piece: int, made: ElementProgram) -> Iterator[tuple[int, ...]]:
    """The transfers of what comes from DRAM; their key is the number of the operand among those that do."""
    for tensor, fetch in enumerate(placed.traffic.fetches):
        for number, reading in enumerate(stage.layer.readings):
            here = reading.value == fetch.value and stage.first + piece in fetch.pieces
            if here and reading.producer < 0:
                image = reading.image
                whole = [0, image[0], 0, image[1], 0, image[2]]
                yield _transfer(tensor, number, made.operands[number], whole, _wanted(stage, piece, number))
        if stage.first + piece in fetch.pieces:
            return


def _wanted(stage: Stage, piece: int, number: int) -> list[list[int]]:
    reading, box = stage.layer.readings[number], stage.boxes[piece][None]
    return [[int(end[0]) for end in read_span(reading, stage.layer, axis, box)] for axis in range(3)]


def _transfer(
    key: int, operand: int, place: OperandPlace, box: list[int], part: list[list[int]]
) -> tuple[int, ...]:
    """Part of a dense message (of the elements of `box`) into an operand, as the fields of mesh_transfer_t."""
    size = place.itemsize
    columns, channels = box[3] - box[2], box[5] - box[4]
    source = (((part[0][0] - box[0]) * columns + part[1][0] - box[2]) * channels + part[2][0] - box[4]) * size
    rows, wide, deep = (stop - start for start, stop in part)
    offsets = [a - b for (a, _), b in zip(part, place.start, strict=True)]
    target = offsets[0] * place.row_bytes + offsets[1] * place.column_bytes + offsets[2] * size
    return (
        key, source, target, operand, rows, wide, deep * size, columns * channels * size, channels * size,
        place.row_bytes, place.column_bytes, place.slots, place.nbytes,
    )  # fmt: skip


def _files(programs: Mapping[str, str], sizes: Mapping[str, int], target: Target) -> Iterator[tuple[str, bytes]]:
    """The files of all programs and what they share."""
    core = instruction_set(target.core.isa)
    script = linker_script(
        target.memories, text=target.code, data=target.values, stack_bytes=target.core.stack,
        extra={".element": target.code}, isa=target.core.isa,
    )  # fmt: skip
    for name in (core.start, *SHARED):
        yield f"runtime/{name}", runtime_path(name).read_bytes()
    for name in OWN:
        yield f"runtime/{name}", (Path(__file__).parent / "runtime" / name).read_bytes()
    yield "link.ld", script.encode()
    for name, source in sorted(programs.items()):
        yield f"programs/{name}/program.c", source.encode()
        header = f"#ifndef PROGRAM_H\n#define PROGRAM_H\n#define ELEMENT_BYTES {sizes[name]}u\n#endif\n"
        yield f"programs/{name}/program.h", header.encode()
    yield "Makefile", _makefile(core.gcc_command, " ".join(core.gcc), core.start).encode()


def _makefile(command: str, flags: str, start: str) -> str:
    return f"""# Builds every element program. HAL is what supplies the functions of runtime/mesh_hal.h.
CC = {command}
CFLAGS = {flags} -std=c99 -O2 -ffreestanding -ffunction-sections -fdata-sections \\
\t{" ".join(EMITTED_C)}
HAL = runtime/mesh_sim.c -DDOVETAIL_SIM
PROGRAMS = $(patsubst programs/%/program.c,%.elf,$(wildcard programs/*/program.c))

all: $(PROGRAMS)
%.elf: programs/%/program.c
\t$(CC) $(CFLAGS) -Iruntime -Iprograms/$* -nostdlib -Wl,--gc-sections -T link.ld $< runtime/{start} \\
\t\truntime/dovetail_rt.c $(HAL) -lgcc -o $@
clean:
\trm -f $(PROGRAMS)
.PHONY: all clean
"""


_IMAGE = struct.Struct("<4sIIIII")
_LOADED = struct.Struct("<II32sI")
_ROUTE = struct.Struct("<IIII")


def _images(placed: Placed, tables: Tables, elements: list[Element]) -> Iterator[tuple[str, bytes]]:
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
            here = sorted(int(e) % per for e in placed.element[members] if e // per == chip)
            found.append(struct.pack(f"<{2 + len(here)}I", number + 1, len(here), *here))
        yield f"chips/chip_{x}_{y}.img", b"".join(found)
