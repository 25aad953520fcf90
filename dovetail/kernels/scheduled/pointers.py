"""Innermost loops that move pointers: what they read lies at constant distances from a few registers.

Compilers make an address of every index of an unrolled loop where they see what the index is; pointers that a barrier
hides from them leave them no choice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.kernels.text import indent

_LOOP = re.compile(r"( *)for \(int32_t (\w+) = 0; \2 < \d+; \2\+\+\) \{")
_PLACE = re.compile(r"&(\w+)((?:\[[^\[\]]+\])+)")
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
        found: Linear = {}
        for position, index in enumerate(indices):
            for name, factor in _linear(ast.parse(index, mode="eval").body).items():
                found[name] = found.get(name, 0) + factor * prod(self.extents[position:])
        return found


def moving_pointers(lines: Sequence[str], kinds: Mapping[str, str]) -> list[str]:
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
    made: list[str] = []
    start = 0
    while start < len(lines):
        head = _LOOP.fullmatch(lines[start])
        end = lines.index(f"{head[1]}}}", start) if head else start
        body = list(lines[start + 1 : end])
        if head and len(body) > 1 and not any("{" in line or "}" in line for line in body):
            moved = _moved(head[2], [line.strip() for line in lines[start : end + 1]], arrays)
            made += [head[1] + line for line in moved]
            start = end
        else:
            made.append(lines[start])
        start += 1
    return made


def _moved(variable: str, loop: Sequence[str], arrays: Mapping[str, _Array]) -> list[str]:
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
        after.append(f"""__asm__("" : {', '.join(f'"+r"({name}_at)' for name in places)});""")
    return [*before, loop[0], *indent([*body, *after]), loop[-1]]


def _linear(node: ast.expr) -> Linear:
    """An index as a sum of multiples."""
    if isinstance(node, ast.Constant):
        return {"": int(str(node.value))}
    if isinstance(node, ast.Name):
        return {node.id: 1}
    if isinstance(node, ast.UnaryOp):
        return {name: -factor for name, factor in _linear(node.operand).items()}
    assert isinstance(node, ast.BinOp)
    left, right = _linear(node.left), _linear(node.right)
    if isinstance(node.op, ast.Mult):
        left, right = (left, right) if set(right) <= {""} else (right, left)
        return {name: factor * right.get("", 0) for name, factor in left.items()}
    sign = -1 if isinstance(node.op, ast.Sub) else 1
    return {name: left.get(name, 0) + sign * right.get(name, 0) for name in dict.fromkeys((*left, *right))}
