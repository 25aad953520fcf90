"""C files of an element's program: a piece alone, several that take turns, or a piece of each section.

Turns: the next piece is the one that need not wait, of several the one with the least input, then the first; the model
of time does the same. No piece waits inside its turn, so that none keeps another from what it waits for.

Sections: the buffers and data of the present section lie in a memory that all sections share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.guests.mesh.building import c_template

ELEMENT_DATA = 'uint8_t element_data[ELEMENT_BYTES] __attribute__((aligned(16), section(".element")));'
"""C of the memory an element's data are loaded into."""
_BUFFER = re.compile(
    r"^static (\w+) (operand_\d+|results|sums|narrowed)((?:\[\d+\])+) __attribute__\(\(aligned\(16\)\)\);$", re.M
)
_SIZES = {"uint8_t": 1, "int8_t": 1, "int32_t": 4}
_FILLING = re.compile(
    r"^    for \(uint32_t i = 0; i < \d+u; \+\+i\) \{\n        operand_\d+\[i\] = \d+u;\n    \}\n", re.M
)


def up16(size: int) -> int:
    """The next multiple of 16 bytes."""
    return -(-size // 16) * 16


def places_of(sizes: Sequence[int]) -> list[int]:
    """First byte of each piece's data, at multiples of 16, and the end of the last."""
    places = [0]
    for size in sizes:
        places.append(up16(places[-1] + size))
    return places


def joined_data(parts: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """The data of an element whose pieces have data of at most these sizes."""
    if len(parts) == 1:
        return parts[0]
    places = places_of(sizes)
    rooms = zip(parts, places[:-1], places[1:], strict=True)
    return b"".join(part + bytes(last - first - len(part)) for part, first, last in rooms)


def program_files(texts: Sequence[str], sizes: Sequence[int]) -> dict[str, str]:
    """File name -> text of a program.

    Args:
        texts: the program of each piece, as on an element of its own.
        sizes: bytes of each piece's data at most.
    """
    places = places_of(sizes)
    header = _header(ELEMENT_BYTES=places[-1] if len(sizes) > 1 else sizes[0])
    if len(texts) == 1:
        return {"program.c": texts[0], "program.h": header}
    includes = [f'#include "{name}"' for name in ("element.h", "mesh_hal.h", "program.h")]
    begins, runs = [], []
    files = {}
    for number, text in enumerate(texts):
        begins.append(f"    mesh_select({number}u);\n    piece_{number}_begin();")
        runs.append(f"piece_{number}_run")
        own = [*_own_names("piece", number), '#include "program.h"', "#include <stdint.h>"]
        own += ["extern uint8_t element_data[ELEMENT_BYTES];"]
        own += [f"#define element_data (element_data + {places[number]}u)"]
        files[f"piece_{number}.c"] = "\n".join([*own, text.replace(ELEMENT_DATA, "")])
    values = {"count": len(texts), "begins": "\n".join(begins), "runs": ", ".join(runs)}
    parts = [*includes, "", ELEMENT_DATA, "", _declarations("piece", len(texts)), "", c_template("turns") % values]
    return {"program.c": "\n".join(parts), "program.h": header, **files}


def _header(**numbers: int) -> str:
    lines = "\n".join(f"#define {name} {number}u" for name, number in numbers.items())
    return f"#ifndef PROGRAM_H\n#define PROGRAM_H\n{lines}\n#endif\n"


def _own_names(kind: str, number: int) -> list[str]:
    """C that gives the functions of a piece's program names of their own."""
    return [f"#define element_{name} {kind}_{number}_{name}" for name in ("begin", "run")]


def _declarations(kind: str, count: int) -> str:
    numbers = range(count)
    return "\n".join(f"void {kind}_{n}_begin(void);\nvoid {kind}_{n}_run(uint32_t input);" for n in numbers)


@dataclass(frozen=True)
class SectionPart:
    """The program of a piece as part of the program of all sections."""

    source: str
    buffers: int
    """Bytes of its buffers."""
    places: Mapping[str, int]
    """Buffer -> first byte among them."""


def section_part(text: str, number: int) -> SectionPart:
    """A piece's program with its buffers in the memory of sections, and names of its own."""
    places: dict[str, int] = {}
    size, lines = 0, []
    for kind, name, shape in _BUFFER.findall(text):
        places[name] = size
        lines.append(f"#define own_{name} (*({kind} (*){shape})(void *)(section_buffers + {size}u))")
        size += up16(_SIZES[kind] * prod(map(int, re.findall(r"\d+", shape))))
    declared = ["extern uint8_t *section_data, *section_buffers;", "#define element_data section_data", *lines]
    body = _FILLING.sub("", _BUFFER.sub("", text))
    if places:  # members of structures have the same names
        body = re.sub(rf"(?<![.\w])({'|'.join(places)})\b", r"own_\1", body)
    body = body.replace(ELEMENT_DATA, "\n".join(declared))
    return SectionPart("\n".join([*_own_names("part", number), body]), size, places)


def section_files(parts: Sequence[SectionPart], room: int, table: int) -> dict[str, str]:
    """File name -> text of the program of all sections, with `room` bytes for them and tables of at most `table`."""
    begins, runs = (", ".join(f"part_{n}_{name}" for n in range(len(parts))) for name in ("begin", "run"))
    values = {"declared": _declarations("part", len(parts)), "begins": begins, "runs": runs}
    text = c_template("sections") % {**values, "count": len(parts), "data": ELEMENT_DATA}
    files = {"program.c": text, "program.h": _header(ELEMENT_BYTES=table, MEMORY_BYTES=room)}
    return {**files, **{f"part_{number}.c": part.source for number, part in enumerate(parts)}}
