"""C files of an element's program: a piece alone, several that take turns, or a piece of each section.

Turns: the next piece is the one that need not wait, of several the one with the least input, then the first; the model
of time does the same. No piece waits inside its turn, so that none keeps another from what it waits for.

Sections: the buffers and data of the present section lie in a memory that all sections share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from dovetail.guests.mesh.building import c_template
from dovetail.guests.mesh.programs import PieceCode

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
    """File name -> text of a program.

    Args:
        codes: that of each piece.
        sizes: bytes of each piece's data at most.
    """
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
