"""Large constants as bytes in a file of their own, which an assembler file makes arrays of (`.incbin`).

C text takes about four bytes for one of a constant, and compilers take seconds for every million of them; GCC's and
Clang's assemblers take the file as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from dovetail.ir.types import Array
from dovetail.kernels.c import Lines, code
from dovetail.records import Record


class Weights(StrEnum):
    """How the constants of a network are written."""

    AUTO = "auto"
    """As text, of large networks as bytes."""
    TEXT = "text"
    """As arrays in C."""
    BINARY = "binary"
    """The larger arrays as bytes in a file of their own."""


LARGE = 2 << 20
"""Bytes of constants from which on a network is large."""
LEAST = 1 << 10
"""Bytes of the smallest array that is written as bytes: small ones are read in C."""
_STEP = 16
"""Bytes every array of the file begins at a multiple of."""
_TYPES = {f"{kind}{bits}_t" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"float"}
"""Types of C whose elements are the bytes numpy has, in little-endian order."""


class BinaryArray(Record):
    """An array whose bytes are in the file."""

    array: Array
    alignment: int
    """Alignment of its address, bytes."""
    section: str
    """Section of the object file."""


def as_bytes(constants: Mapping[str, tuple[str, Array]], wanted: Weights) -> frozenset[str]:
    """The names of the constants, of a type of C each, that are written as bytes."""
    whole = sum(array.nbytes for _, array in constants.values())
    if wanted is Weights.TEXT or (wanted is Weights.AUTO and whole < LARGE):
        return frozenset()
    return frozenset(
        name for name, (kind, array) in constants.items() if array.nbytes >= LEAST and _is_plain(kind, array)
    )


def _is_plain(kind: str, array: Array) -> bool:
    """Whether an array in memory is what C has of that type."""
    return kind in _TYPES and array.dtype == np.dtype("float32" if kind == "float" else kind.removesuffix("_t"))


def weights_files(model: str, held: Mapping[str, BinaryArray]) -> tuple[str, list[Array]]:
    """The assembler file that makes arrays of a file of bytes, and the arrays that file consists of."""
    content, state, lines, offset = list[Array](), hashlib.sha256(), Lines(), 0
    for name, one in held.items():
        array = _flat(one.array)
        filler = np.zeros(-array.nbytes % _STEP, np.uint8)
        for part in (array, filler) if filler.size else (array,):
            content.append(part)
            state.update(part.data)
        lines += code(
            f"""
            @blank
                .section {one.section}, "a"
                .balign {one.alignment}
                .globl {name}
                .type {name}, STT_OBJECT
                .size {name}, {array.nbytes}
            {name}:
                .incbin "{model}_weights.bin", {offset}, {array.nbytes}
        """,
            blank=[""],
        )
        offset += array.nbytes + filler.nbytes
    head = _HEAD.format(model=model, nbytes=offset, digest=state.hexdigest())
    return "\n".join([head, *lines, "", _TAIL]), content


def _flat(array: Array) -> Array:
    """The bytes of an array in little-endian order, not copied where they lie so."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)


_HEAD = """\
/* The larger constants of {model}, which are parts of a file in a folder of -I.
   It has {nbytes} bytes, elements in little-endian order; their SHA-256 is
   {digest}. */
#if !defined(__ELF__)
#error "this needs an assembler for ELF: compile the network again with --weights text"
#endif"""
_TAIL = """\
#if defined(__linux__)
    .section .note.GNU-stack, "", %progbits /* nothing here runs from the stack */
#endif
"""
