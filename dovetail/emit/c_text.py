"""Small pieces of C text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dovetail.graph.types import Array, DType

C_TYPES = {
    DType.INT8: "int8_t",
    DType.UINT8: "uint8_t",
    DType.INT4: "int8_t",
    DType.UINT4: "uint8_t",
    DType.INT2: "int8_t",
    DType.UINT2: "uint8_t",
    DType.BOOL: "uint8_t",
    DType.INT16: "int16_t",
    DType.UINT16: "uint16_t",
    DType.INT32: "int32_t",
    DType.UINT32: "uint32_t",
    DType.INT64: "int64_t",
    DType.FLOAT32: "float",
}
"""C type of one element."""

_LINE = 112
_RESERVED = frozenset(
    """auto break case char const continue default do double else enum extern float for goto if inline int long main
    register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
    """.split()  # noqa: SIM905
)
"""Words no identifier may be."""


def identifier(text: str, most: int = 24) -> str:
    """A short lower-case C identifier made from any text."""
    name = re.sub(r"[^0-9a-z]+", "_", text.lower()).strip("_")[:most].strip("_") or "model"
    return f"m_{name}" if name[0].isdigit() or name in _RESERVED else name


def one_line(text: str) -> str:
    """Text that may stand in a C comment: one line, no end of comment, printable ASCII."""
    plain = "".join(c if " " <= c <= "~" else "?" for c in text)
    return plain.replace("*/", "* /").replace("/*", "/ *").replace("\\", "/").replace("??", "? ?")


def array_definition(declaration: str, values: Iterable[str]) -> str:
    """`declaration = { … };` wrapped to lines."""
    lines, line = [], "   "
    for value in values:
        if len(line) + len(value) + 2 > _LINE:
            lines.append(line)
            line = "   "
        line += f" {value},"
    return "\n".join([f"{declaration} = {{", *lines, line, "};"]) + "\n"


def elements(array: Array) -> list[str]:
    """The elements of an integer or float array as C constants, row-major."""
    if array.dtype.kind == "f":
        return [_float(float(value)) for value in array.reshape(-1)]
    values = array.reshape(-1).tolist()
    if array.dtype.itemsize == 8:
        return [_int64(value) for value in values]
    if array.dtype.name == "int32":
        return ["(-2147483647 - 1)" if value == -(2**31) else str(value) for value in values]
    if array.dtype.name == "uint32":
        return [f"{value}u" for value in values]
    return [str(int(value)) for value in values]


def _int64(value: int) -> str:
    return "(-9223372036854775807LL - 1)" if value == -(2**63) else f"{value}LL"


def _float(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return '__builtin_nanf("")' if value != value else f"{'-' if value < 0 else ''}__builtin_inff()"
    return f"{value.hex()}f" if value != int(value) or abs(value) > 2**20 else f"{value:.1f}f"


def words(values: Sequence[int]) -> list[str]:
    """32-bit words in hexadecimal."""
    return [f"0x{value & 0xFFFFFFFF:08x}u" for value in values]


def guard(name: str, body: str) -> str:
    """A header's text inside an include guard."""
    return f"#ifndef {name}\n#define {name}\n\n{body}\n#endif\n"
