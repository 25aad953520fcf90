"""C functions from scheduled procedures, as statements.

Innermost loops may move pointers, from which what they read lies at constant distances: compilers make an address of
every index of an unrolled loop where they see what the index is; pointers that a barrier hides leave them no choice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from dovetail.kernels.c import INDENT, Lines, identifiers
from dovetail.kernels.scheduled.knobs import Linear, linear
from dovetail.kernels.scheduled.store import CFunction
from dovetail.loops.procedures import Procedure
from dovetail.records import Record

_LOOP = re.compile(r"for \(int32_t (\w+) = 0; \1 < (\d+); \1\+\+\) \{")
_PLACE = re.compile(r"&(\w+)((?:\[[^\[\]]+\])+)")
IN_ORDER = "in_order();"
"""A statement that keeps loads behind it."""
_ARRAY = re.compile(r"(\w+) (\w+)((?:\[\d+\])+)(?: __attribute__\(\(aligned\(8\)\)\))?;")


class CBlock(Record):
    """Statements in braces."""

    head: str
    """The line before them, which ends with the brace; that of an `else` begins with the brace of the block before."""
    body: CBody

    @property
    def loop(self) -> tuple[str, int] | None:
        """Variable and turns of a counting loop; None for other blocks."""
        found = _LOOP.fullmatch(self.head)
        return (found[1], int(found[2])) if found else None


CBody = tuple["str | CBlock", ...]
"""Statements, a line each, and blocks of them."""


def statements(lines: Iterable[str]) -> CBody:
    """A function's lines as statements."""
    open_blocks: list[tuple[str, list[str | CBlock]]] = [("", [])]
    for text in map(str.strip, lines):
        if text.startswith("}"):
            head, body = open_blocks.pop()
            open_blocks[-1][1].append(CBlock(head, tuple(body)))
        if text.endswith("{"):
            open_blocks.append((text, []))
        elif text != "}":
            open_blocks[-1][1].append(text)
    return tuple(open_blocks[0][1])


def lines_of(body: CBody) -> Lines:
    """Statements as lines."""
    lines = Lines()
    for one in body:
        if isinstance(one, str):
            lines.append(one)
            continue
        if one.head.startswith("}"):
            lines.pop()
        inner = (line if line.startswith("#") else INDENT + line for line in lines_of(one.body))
        lines += [one.head, *inner, "}"]
    return lines


class _Array(Record):
    kind: str
    """C type of an element."""
    extents: tuple[int, ...]
    """All but the first; empty for one dimension."""

    def place(self, indices: Sequence[str]) -> Linear:
        """How many elements into the array."""
        factors: Linear = {}
        for position, index in enumerate(indices):
            for name, factor in linear(ast.parse(index, mode="eval").body).items():
                factors[name] = factors.get(name, 0) + factor * prod(self.extents[position:])
        return factors


def moving_pointers(body: CBody, kinds: Mapping[str, str]) -> CBody:
    """The statements of a function, its innermost loops with pointers; `kinds` has the C type of an element of each
    array it is given."""
    arrays = {name: _Array(f"const {kind}", ()) for name, kind in kinds.items()}
    for found in map(_ARRAY.fullmatch, map(str.strip, lines_of(body))):
        if found:
            arrays[found[2]] = _Array(found[1], tuple(map(int, re.findall(r"\d+", found[3])))[1:])

    def moved(one: str | CBlock) -> CBody:
        if isinstance(one, str):
            return (one,)
        lines = [line for line in one.body if isinstance(line, str)]
        if one.loop and len(one.body) == len(lines) > 1:
            return _moved(one.head, one.loop[0], lines, arrays)
        return (replace(one, body=tuple(part for inner in one.body for part in moved(inner))),)

    return tuple(part for one in body for part in moved(one))


def _moved(head: str, variable: str, lines: Lines, arrays: Mapping[str, _Array]) -> CBody:
    """One loop."""
    places: dict[str, Linear] = {}

    def moves(match: re.Match[str]) -> str:
        """The place as a distance from its pointer; unchanged where one pointer of that array is not enough."""
        name = match[1]
        if name not in arrays:
            return match[0]
        place = arrays[name].place(re.findall(r"\[([^\[\]]+)\]", match[2]))
        distance = place.pop("", 0)
        if place.get(variable, 0) == 0 or places.setdefault(name, place) != place:
            return match[0]
        return f"&{name}_at[{distance}]"

    body = [_PLACE.sub(moves, line) for line in lines]
    before = []
    for name, place in places.items():
        start = " + ".join(f"{factor} * {other}" for other, factor in place.items() if other != variable)
        first = "[0]" * (len(arrays[name].extents) + 1)
        before.append(f"{arrays[name].kind} *{name}_at = &{name}{first}{' + ' if start else ''}{start};")
        body.append(f"{name}_at += {place[variable]};")
    if places:
        body.append(f"""__asm__("" : {", ".join(f'"+r"({name}_at)' for name in places)});""")
    return (*before, CBlock(head, tuple(body)))


_FUNCTION = re.compile(r"^(?:static )?void (\w+)\( void \*ctxt, ([^\n]*) \) \{\n", re.MULTILINE)
_INDEX = "int_fast32_t"


def c_functions(p: Procedure) -> tuple[CFunction, ...]:
    """The functions of a procedure and of those it calls, callees first."""
    by_name = {}
    text = p.c_code_str()
    for head in _FUNCTION.finditer(text):
        name, parameters = head.groups()
        names = tuple(parameter.split()[-1] for parameter in parameters.split(", "))
        lines = [line for line in _body(text[head.end() :]) if line.strip() and not line.startswith("EXO_ASSUME")]
        by_name[name] = CFunction(name, names, tuple(map(_plain, lines)))
    ordered = sorted(by_name.values(), key=lambda made: made.name == p.name())
    return tuple(_less_unused(ordered))


def _body(text: str) -> Iterator[str]:
    """Lines up to the brace that closes the function; Exo indents its body no further than the function itself."""
    depth = 1
    for line in text.splitlines():
        depth += line.count("{") - line.count("}")
        if depth == 0:
            return
        yield line


def _plain(line: str) -> str:
    """A line in Dovetail's form: 32-bit indices, four spaces, no context."""
    text = line.lstrip(" ").replace(_INDEX, "int32_t").replace("(ctxt,", "(")
    text = re.sub(r"\(\(int8_t\) (-?[0-9]+)\.0f?\)|(?<== )(-?[0-9]+)\.0f?;", lambda m: m[1] or f"{m[2]};", text)
    return " " * (2 * (len(line) - len(line.lstrip(" ")))) + re.sub(r",(?=\S)", ", ", text)


def _less_unused(functions: Sequence[CFunction]) -> list[CFunction]:
    """Functions without the parameters they do not read."""
    shorter = list(functions)
    for number, one in enumerate(shorter[:-1]):
        used = identifiers(one.lines)
        places = [place for place, name in enumerate(one.parameters) if name in used]
        shorter[number] = replace(one, parameters=tuple(one.parameters[place] for place in places))
        for other in range(number + 1, len(shorter)):
            lines = tuple(_call_less(line, one.name, places) for line in shorter[other].lines)
            shorter[other] = replace(shorter[other], lines=lines)
    return shorter


def _call_less(line: str, name: str, kept: Sequence[int]) -> str:
    head, call, arguments = line.partition(f"{name}(")
    if head.strip() or not call:
        return line
    given = arguments.removesuffix(");").split(", ")
    return f"{head}{call}{', '.join(given[place] for place in kept)});"
