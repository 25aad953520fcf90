"""Several pieces on one element: the files of its program, in which they take turns, and its data.

The next turn is that of the piece that need not wait, of several the one with the least input, then the first: the
model of time does the same. No piece waits inside its turn, so that none keeps another from what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

ELEMENT_DATA = 'uint8_t element_data[ELEMENT_BYTES] __attribute__((aligned(16), section(".element")));'
"""C of the memory an element's data are loaded into."""
_GUARD = "#ifndef PROGRAM_H\n#define PROGRAM_H\n%s\n#endif\n"


def program_files(texts: Sequence[str], sizes: Sequence[int]) -> dict[str, str]:
    """The C files of a program by name.

    Args:
        texts: the program of each piece, as it would be on an element of its own.
        sizes: bytes of each one's data at most.
    """
    places = places_of(sizes)
    lines = [f"#define ELEMENT_BYTES {places[-1] if len(sizes) > 1 else sizes[0]}u"]
    if len(texts) == 1:
        return {"program.c": texts[0], "program.h": _GUARD % lines[0]}
    found = {f"piece_{number}.c": _piece(text, number, places[number]) for number, text in enumerate(texts)}
    return {"program.c": _turns(len(texts)), "program.h": _GUARD % lines[0], **found}


def joined_data(parts: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """The data of an element: those of its pieces, each at its place."""
    if len(parts) == 1:
        return parts[0]
    places = places_of(sizes)
    rooms = zip(parts, places[:-1], places[1:], strict=True)
    return b"".join(part + bytes(last - first - len(part)) for part, first, last in rooms)


def places_of(sizes: Sequence[int]) -> list[int]:
    """Where the data of each piece of such sizes begin, and where the last end: at multiples of 16 bytes."""
    places = [0]
    for size in sizes:
        places.append(-(-(places[-1] + size) // 16) * 16)
    return places


def _piece(text: str, number: int, place: int) -> str:
    """A piece's program with names of its own for what others call."""
    own = (
        f"#define element_begin piece_{number}_begin",
        f"#define element_run piece_{number}_run",
        '#include "program.h"',
        "#include <stdint.h>",
        "extern uint8_t element_data[ELEMENT_BYTES];",
        f"#define element_data (element_data + {place}u)",
    )
    return "\n".join([*own, text.replace(ELEMENT_DATA, "")])


def _turns(count: int) -> str:
    """The program that calls the pieces'."""
    numbers = range(count)
    lines = ['#include "element.h"', '#include "mesh_hal.h"', '#include "program.h"', "", ELEMENT_DATA, ""]
    for number in numbers:
        lines += [f"void piece_{number}_begin(void);", f"void piece_{number}_run(uint32_t input);"]
    begins = "\n".join(f"    mesh_select({number}u);\n    piece_{number}_begin();" for number in numbers)
    runs = ", ".join(f"piece_{number}_run" for number in numbers)
    return "\n".join([*lines, _TURNS % {"count": count, "begins": begins, "runs": runs}])


_TURNS = """
static uint32_t inputs[%(count)d]; /* the next input of each piece */

void element_begin(void)
{
%(begins)s
}

void element_run(uint32_t turn)
{
    static void (*const runs[%(count)d])(uint32_t input) = {%(runs)s};
    (void)turn;
    for (;;) {
        uint32_t next = %(count)du;
        for (uint32_t piece = 0; piece < %(count)du; ++piece) {
            if (next == %(count)du || inputs[piece] < inputs[next]) {
                mesh_select(piece);
                next = mesh_ready(inputs[piece]) != 0u ? piece : next;
            }
        }
        if (next < %(count)du) {
            mesh_select(next);
            runs[next](inputs[next]);
            ++inputs[next];
            return;
        }
        mesh_idle();
    }
}
"""
