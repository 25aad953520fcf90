"""C functions from scheduled procedures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.kernels.scheduled.pointers import moving_pointers
from dovetail.kernels.text import function, words
from dovetail.loops.text import Procedure

_FUNCTION = re.compile(r"^(?:static )?void (\w+)\( void \*ctxt, ([^\n]*) \) \{\n", re.MULTILINE)
_INDEX = "int_fast32_t"


@dataclass(frozen=True)
class CFunction:
    """One function as Exo writes it, less what Dovetail has no use for."""

    name: str
    parameters: tuple[str, ...]
    """Names; what is no array of the kernel is an index."""
    lines: tuple[str, ...]


def c_functions(p: Procedure) -> tuple[CFunction, ...]:
    """The functions of a procedure and of those it calls, callees first."""
    found = {}
    text = p.c_code_str()
    for head in _FUNCTION.finditer(text):
        name, parameters = head.groups()
        names = tuple(parameter.split()[-1] for parameter in parameters.split(", "))
        lines = [line for line in _body(text[head.end() :]) if line.strip() and not line.startswith("EXO_ASSUME")]
        found[name] = CFunction(name, names, tuple(map(_plain, lines)))
    ordered = sorted(found.values(), key=lambda made: made.name == p.name())
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
    made = list(functions)
    for number, one in enumerate(made[:-1]):
        used = words(one.lines)
        kept = [place for place, name in enumerate(one.parameters) if name in used]
        made[number] = CFunction(one.name, tuple(one.parameters[place] for place in kept), one.lines)
        for other in range(number + 1, len(made)):
            lines = tuple(_call_less(line, one.name, kept) for line in made[other].lines)
            made[other] = CFunction(made[other].name, made[other].parameters, lines)
    return made


def _call_less(line: str, name: str, kept: Sequence[int]) -> str:
    found = re.fullmatch(rf"( *){name}\((.*)\);", line)
    if found is None:
        return line
    arguments = found[2].split(", ")
    return f"{found[1]}{name}({', '.join(arguments[place] for place in kept)});"


def write_functions(
    functions: Sequence[CFunction],
    name: str,
    types: Mapping[str, str],
    entry: str,
    declared: Mapping[str, str],
    moving: bool,
) -> list[str]:
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
    text: list[str] = []
    for made in functions:
        parameters = [declared.get(parameter, f"int32_t {parameter}") for parameter in made.parameters]
        lines = [pattern.sub(lambda match: named[match[1]] + "(", line) for line in _singles_first(made, types)]
        if moving:
            lines = moving_pointers(lines, {name: types[name] for name in made.parameters if name in types})
        text += [*function(f"static void {named[made.name]}", parameters, lines), ""]
    return text[:-1]


def _singles_first(made: CFunction, types: Mapping[str, str]) -> list[str]:
    """The lines with arrays of one element read once, before the loops."""
    text = "\n".join(made.lines)
    single = [name for name in made.parameters if name in types and re.search(rf"\b{name}\[0\]", text)]
    single = [name for name in single if len(re.findall(rf"\b{name}\[", text)) == text.count(f" {name}[0]")]
    for name in single:
        text = text.replace(f" {name}[0]", f" {name}_0")
    return [*(f"const {types[name]} {name}_0 = {name}[0];" for name in single), *text.splitlines()]
