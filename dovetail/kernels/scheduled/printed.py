"""C functions from scheduled procedures.

Innermost loops may move pointers, from which what they read lies at constant distances: compilers make an address of
every index of an unrolled loop where they see what the index is; pointers that a barrier hides leave them no choice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from dovetail.kernels.c import Lines, function, identifiers, indent
from dovetail.kernels.scheduled.store import CFunction
from dovetail.loops.procedures import Procedure

_LOOP = re.compile(r"( *)for \(int32_t (\w+) = 0; \2 < \d+; \2\+\+\) \{")
_PLACE = re.compile(r"&(\w+)((?:\[[^\[\]]+\])+)")
IN_ORDER = "in_order();"
"""A statement that keeps loads behind it."""
_ARRAY = re.compile(r" *(\w+) (\w+)((?:\[\d+\])+)(?: __attribute__\(\(aligned\(8\)\)\))?;")

Linear = dict[str, int]
"""Variable -> factor; "" -> the number added."""


@dataclass(frozen=True)
class _Array:
    kind: str
    """C type of an element."""
    extents: tuple[int, ...]
    """All but the first; empty for one dimension."""
    given: bool = False
    """Whether it is an argument, which is only read."""

    def place(self, indices: Sequence[str]) -> Linear:
        """How many elements into the array."""
        factors: Linear = {}
        for position, index in enumerate(indices):
            for name, factor in linear(ast.parse(index, mode="eval").body).items():
                factors[name] = factors.get(name, 0) + factor * prod(self.extents[position:])
        return factors


def moving_pointers(lines: Sequence[str], kinds: Mapping[str, str]) -> Lines:
    """The lines of a function, its innermost loops with pointers.

    Args:
        lines: C text, a statement each.
        kinds: C type of an element of each array it is given.
    """
    arrays = {name: _Array(kind, (), True) for name, kind in kinds.items()}
    for line in lines:
        if found := _ARRAY.fullmatch(line):
            extents = tuple(int(extent) for extent in re.findall(r"\d+", found[3]))
            arrays[found[2]] = _Array(found[1], extents[1:])
    moving: Lines = []
    start = 0
    while start < len(lines):
        head = _LOOP.fullmatch(lines[start])
        end = lines.index(f"{head[1]}}}", start) if head else start
        body = list(lines[start + 1 : end])
        if head and len(body) > 1 and not any("{" in line or "}" in line for line in body):
            moved = _moved(head[2], [line.strip() for line in lines[start : end + 1]], arrays)
            moving += [head[1] + line for line in moved]
            start = end
        else:
            moving.append(lines[start])
        start += 1
    return moving


def _moved(variable: str, loop: Sequence[str], arrays: Mapping[str, _Array]) -> Lines:
    """One loop, its head and brace included."""
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

    body = [_PLACE.sub(moves, line) for line in loop[1:-1]]
    before, after = [], []
    for name, place in places.items():
        start = " + ".join(f"{factor} * {other}" for other, factor in place.items() if other != variable)
        first = "[0]" * (len(arrays[name].extents) + 1)
        kind = f"{'const ' if arrays[name].given else ''}{arrays[name].kind}"
        before.append(f"{kind} *{name}_at = &{name}{first}{' + ' if start else ''}{start};")
        after.append(f"{name}_at += {place[variable]};")
    if places:
        after.append(f"""__asm__("" : {", ".join(f'"+r"({name}_at)' for name in places)});""")
    return [*before, loop[0], *indent([*body, *after]), loop[-1]]


def linear(node: ast.expr) -> Linear:
    """An index as a sum of multiples of variables."""
    if isinstance(node, ast.Constant):
        return {"": int(str(node.value))}
    if isinstance(node, ast.Name):
        return {node.id: 1}
    if isinstance(node, ast.UnaryOp):
        return {name: -factor for name, factor in linear(node.operand).items()}
    assert isinstance(node, ast.BinOp)
    left, right = linear(node.left), linear(node.right)
    if isinstance(node.op, ast.Mult):
        left, right = (left, right) if set(right) <= {""} else (right, left)
        return {name: factor * right.get("", 0) for name, factor in left.items()}
    sign = -1 if isinstance(node.op, ast.Sub) else 1
    return {name: left.get(name, 0) + sign * right.get(name, 0) for name in dict.fromkeys((*left, *right))}


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
    call = re.fullmatch(rf"( *){name}\((.*)\);", line)
    if call is None:
        return line
    arguments = call[2].split(", ")
    return f"{call[1]}{name}({', '.join(arguments[place] for place in kept)});"


def write_functions(
    functions: Sequence[CFunction],
    name: str,
    types: Mapping[str, str],
    entry: str,
    declared: Mapping[str, str],
    moving: bool,
) -> Lines:
    """The functions under a kernel's name.

    Args:
        functions: callees first.
        name: of the kernel.
        types: C type of an element of each array.
        entry: the procedure that is the kernel itself.
        declared: C text of the parameter each array is.
        moving: whether innermost loops move pointers.
    """
    named = {made.name: name if made.name == entry else f"{name}_{made.name}" for made in functions}
    named["finish"] = f"{name}_finish"
    pattern = re.compile(rf"\b({'|'.join(named)})\(")
    text: Lines = []
    for made in functions:
        parameters = [declared.get(parameter, f"int32_t {parameter}") for parameter in made.parameters]
        lines = [pattern.sub(lambda match: named[match[1]] + "(", line) for line in _singles_first(made, types)]
        if moving:
            lines = moving_pointers(lines, {name: types[name] for name in made.parameters if name in types})
        text += [*function(f"static void {named[made.name]}", parameters, lines), ""]
    return text[:-1]


def _singles_first(made: CFunction, types: Mapping[str, str]) -> Lines:
    """The lines with arrays of one element read once, before the loops."""
    text = "\n".join(made.lines)
    single = [name for name in made.parameters if name in types and re.search(rf"\b{name}\[0\]", text)]
    single = [name for name in single if len(re.findall(rf"\b{name}\[", text)) == text.count(f" {name}[0]")]
    for name in single:
        text = text.replace(f" {name}[0]", f" {name}_0")
    return [*(f"const {types[name]} {name}_0 = {name}[0];" for name in single), *text.splitlines()]
