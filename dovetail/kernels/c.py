"""C text: types, literals, identifiers, arrays, blocks, loops and expressions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, KeysView, Sequence
from functools import lru_cache
from textwrap import dedent

import numpy as np

from dovetail.ir.types import Array, DType

Lines = list[str]
"""C text, a line each."""
INDENT = "    "
_LINE = 112
_LOWEST_INT64 = "(-9223372036854775807LL - 1)"
_RESERVED = frozenset(
    """auto break case char const continue default do double else enum extern float for goto if inline int long main
    register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
    """.split()  # noqa: SIM905
)
"""Words no identifier may be."""


def c_type(dtype: DType) -> str:
    """The C type that holds one element: narrow integers take a byte each."""
    if dtype is DType.FLOAT32:
        return "float"
    if dtype is DType.BOOL:
        return "uint8_t"
    return f"{'int' if dtype.signed else 'uint'}{max(dtype.bits, 8)}_t"


def indent(lines: Iterable[str]) -> Lines:
    """The lines one level deeper."""
    return [INDENT + line if line else line for line in lines]


def code(template: str, **parts: Iterable[str]) -> Lines:
    """The lines of C text, less the indentation they have in common and empty lines at both ends. A line `@name` stands
    for the lines of that part, as deep as it."""
    lines = Lines()
    for line in dedent(template).strip("\n ").split("\n"):
        margin, at, name = line.partition("@")
        lines += [line] if margin.strip() or not at else [margin + inner if inner else "" for inner in parts[name]]
    return lines


def block(header: str, lines: Iterable[str]) -> Lines:
    """`header { lines }`."""
    return [f"{header} {{", *indent(lines), "}"]


def loop(variable: str, stop: str | int, lines: Iterable[str], start: str | int = 0, step: int = 1) -> Lines:
    """A counting loop from `start` up to `stop`; where there is one turn, the lines with its number instead."""
    lines = list(lines)
    if isinstance(start, int) and isinstance(stop, int) and start >= stop:
        return []
    if isinstance(start, int) and isinstance(stop, int) and start + step >= stop:
        return [re.sub(rf"\b{variable}\b", str(start), line) for line in lines]
    advance = f"++{variable}" if step == 1 else f"{variable} += {step}"
    return block(f"for (int32_t {variable} = {start}; {variable} < {stop}; {advance})", lines)


def unroll_loop(variable: str, count: int, lines: Lines) -> Lines:
    """The lines of a loop's turns one after the other, each in a block of its own; a number stands for the variable."""
    return [line for at in range(count) for line in ("{", *indent(loop(variable, at + 1, lines, start=at)), "}")]


def nested(loops: Iterable[tuple[str, int]], lines: Lines) -> Lines:
    """The lines in loops, each with its variable and number of turns, the outermost first."""
    for variable, count in reversed(list(loops)):
        lines = loop(variable, count, lines)
    return lines


def function(header: str, parameters: Sequence[str], lines: Iterable[str]) -> Lines:
    """A function definition, its parameter list broken at 110 columns."""
    opening = f"{header}("
    margin = " " * len(opening)
    rows, row = [], opening
    for index, parameter in enumerate(parameters):
        piece = parameter + ("," if index + 1 < len(parameters) else ")")
        if len(row) + len(piece) > 110 and row.strip() != opening:
            rows.append(row.rstrip())
            row = margin
        row += piece + " "
    return [*rows, row.rstrip(), "{", *indent(lines), "}"]


_APART = str.maketrans({mark: " " for mark in map(chr, range(128)) if not (mark.isalnum() or mark in "_(")})
"""Blanks for all that is not part of a word; a parenthesis stays with the word before it."""
_DEFINITION = "const int32_t "


def identifiers(lines: Iterable[str]) -> KeysView[str]:
    """Every identifier and number in the text, in the order in which they come first."""
    return _lexed(" ".join(lines))[0].keys()


def calls_in(lines: Iterable[str]) -> frozenset[str]:
    """Every identifier that a parenthesis follows."""
    return _lexed(" ".join(lines))[1]


@lru_cache(maxsize=64)  # layers alike have the same lines, and what is unused is looked for before what is called
def _lexed(text: str) -> tuple[Counter[str], frozenset[str]]:
    """How often each identifier and number is there, and those that a parenthesis follows."""
    counts = Counter(text.replace("(", "( ").translate(_APART).split())  # a third of the time of a regular expression
    counts.pop("(", None)
    calls = [word for word in counts if word[-1] == "("]
    for word in calls:
        counts[word[:-1]] += counts.pop(word)
    return counts, frozenset(word[:-1] for word in calls)


def _defined(line: str) -> str:
    """The identifier that a definition of an int32_t constant names; empty for other lines."""
    return line.removeprefix(_DEFINITION).partition(" ")[0] if line.startswith(_DEFINITION) else ""


def defined(lines: Iterable[str]) -> set[str]:
    """The int32_t constants that lines define, those within blocks apart."""
    return {*map(_defined, lines)} - {""}


def without_unused(lines: Sequence[str]) -> Lines:
    """The lines less definitions of int32_t constants no other line names."""
    names = [_defined(line) for line in lines]
    if not any(names):
        return list(lines)
    counts = _lexed(" ".join(lines))[0]
    kept = [line for line, name in zip(lines, names, strict=True) if not name or counts[name] != 1]
    return kept if len(kept) == len(lines) else without_unused(kept)


def channel_lanes(count: int, most: int) -> int:
    """Neighbouring elements computed together: the largest divisor up to `most`."""
    return max(size for size in range(1, most + 1) if count % size == 0)


def product(factor: str, by: int) -> str:
    """factor * by, simplified; a sum as factor must come in parentheses."""
    if by == 0 or factor == "0":
        return "0"
    return factor if by == 1 else f"{factor} * {by}"


def times(*factors: str | int) -> str:
    """The product of C expressions and numbers, numbers gathered at the end."""
    number, texts = 1, []
    for factor in factors:
        if isinstance(factor, int) or factor.isdigit():
            number *= int(factor)
        else:
            texts.append(factor)
    if not texts or number == 0:
        return str(number)
    if len(texts) > 1 or number != 1:
        texts = [f"({text})" if " + " in text or " - " in text else text for text in texts]
    return product(" * ".join(texts), number)


def variable(name: str, size: int) -> str:
    """The loop variable, or 0 where the loop has one turn."""
    return name if size > 1 else "0"


def total(*terms: str | int) -> str:
    """The sum of C expressions and numbers, zeros dropped and numbers gathered at the end."""
    number = sum(term for term in terms if isinstance(term, int))
    texts = [summand(term) for term in terms if isinstance(term, str) and term != "0"]
    if not texts:
        return str(number)
    joined = " + ".join(texts)
    if number:
        joined += f" + {number}" if number > 0 else f" - {-number}"
    return joined


_LOOSER = frozenset((">>", "<<", "?", ":", "<", ">", "<=", ">=", "==", "!=", "&", "|", "^", "&&", "||"))


def summand(text: str) -> str:
    """The expression, in parentheses where it binds looser than a sum."""
    depth = 0
    for word in text.split(" ") if " " in text else ():
        if depth == 0 and word in _LOOSER:
            return f"({text})"
        depth += word.count("(") + word.count("[") - word.count(")") - word.count("]")
    return text


def wrapped(text: str) -> str:
    """The text in parentheses when it is a sum."""
    return f"({text})" if " + " in text or " - " in text else text


def atom(text: str) -> str:
    """The expression, in parentheses unless it already binds tightly."""
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == " " and depth == 0:
            return f"({text})"
    return f"({text})" if text.startswith("-") or (text.startswith("(") and not text.endswith(")")) else text


def integer(value: int) -> str:
    """An int32 literal; the lowest has no literal of its own in C."""
    return "(-2147483647 - 1)" if value == -(1 << 31) else str(value)


def real(value: float) -> str:
    """A float32 constant in C."""
    single = float(np.float32(value))
    if not np.isfinite(single):
        return '__builtin_nanf("")' if np.isnan(single) else f"{'-' if single < 0 else ''}__builtin_inff()"
    text = f"{single:.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"


def identifier(text: str, most: int = 24) -> str:
    """A short lower-case C identifier made from any text."""
    name = re.sub(r"[^0-9a-z]+", "_", text.lower()).strip("_")[:most].strip("_") or "model"
    return f"m_{name}" if name[0].isdigit() or name in _RESERVED else name


def is_identifier(text: str) -> bool:
    """Whether it may be the name of an array: an identifier that is no word of C's and not reserved to compilers."""
    return re.fullmatch(r"[A-Za-z][0-9A-Za-z_]{0,62}", text) is not None and text not in _RESERVED


def one_line(text: str) -> str:
    """Text that may stand in a C comment: one line, no end of comment, printable ASCII."""
    plain = "".join(c if " " <= c <= "~" else "?" for c in text)
    return plain.replace("*/", "* /").replace("/*", "/ *").replace("\\", "/").replace("??", "? ?")


_COMMA = "\0"
"""Stands for a comma within a value."""


def array_definition(declaration: str, values: str | Sequence[str]) -> str:
    """`declaration = { … };` wrapped to lines; `values` are one text where none has a comma, ", " between them."""
    if not isinstance(values, str):
        joined = ", ".join(value.replace(",", _COMMA) for value in values)
        return array_definition(declaration, joined).replace(_COMMA, ",")
    text, start, width = f"{values},", 0, _LINE - len(INDENT)
    lines = [] if values and text.find(",") < width else ["   "]
    while start < len(text) > 1:
        end = text.rfind(",", start, start + width) + 1 or text.index(",", start) + 1
        lines.append(f"{INDENT}{text[start:end]}")
        start = end + 1
    return "\n".join([f"{declaration} = {{", *lines, "};"]) + "\n"


def elements(array: Array) -> str:
    """The elements of an integer or float array as C constants, row-major, with ", " between them."""
    if array.dtype.kind == "f":
        return ", ".join(_float(float(value)) for value in array.reshape(-1))
    values = array.reshape(-1).tolist()
    if array.dtype.itemsize == 8:
        return ", ".join(_LOWEST_INT64 if value == -(2**63) else f"{value}LL" for value in values)
    if array.dtype.name == "int32":
        return ", ".join(map(integer, values))
    if array.dtype.name == "uint32":
        return ", ".join(f"{value}u" for value in values)
    return repr(values if array.dtype.kind != "b" else list(map(int, values)))[1:-1]


def _float(value: float) -> str:
    if not np.isfinite(value):
        return real(value)
    return f"{value.hex()}f" if value != int(value) or abs(value) > 2**20 else f"{value:.1f}f"


def hexadecimal(values: Sequence[int]) -> str:
    """32-bit words in hexadecimal, with ", " between them."""
    return ", ".join(f"0x{value & 0xFFFFFFFF:08x}u" for value in values)


def guard(name: str, body: str) -> str:
    """A header's text inside an include guard."""
    return f"#ifndef {name}\n#define {name}\n\n{body}\n#endif\n"
