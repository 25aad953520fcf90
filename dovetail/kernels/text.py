"""Small pieces of C text: blocks, loops and sums of products."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

INDENT = "    "


def indent(lines: Iterable[str]) -> list[str]:
    """The lines one level deeper."""
    return [INDENT + line if line else line for line in lines]


def block(header: str, lines: Iterable[str]) -> list[str]:
    """`header { lines }`."""
    return [f"{header} {{", *indent(lines), "}"]


def loop(variable: str, stop: str | int, lines: Iterable[str], start: str | int = 0, step: int = 1) -> list[str]:
    """A counting loop from `start` up to `stop`; where there is one turn, the lines with its number instead."""
    lines = list(lines)
    if isinstance(start, int) and isinstance(stop, int) and start >= stop:
        return []
    if isinstance(start, int) and isinstance(stop, int) and start + step >= stop:
        return [re.sub(rf"\b{variable}\b", str(start), line) for line in lines]
    advance = f"++{variable}" if step == 1 else f"{variable} += {step}"
    return block(f"for (int32_t {variable} = {start}; {variable} < {stop}; {advance})", lines)


def function(header: str, parameters: Sequence[str], lines: Iterable[str]) -> list[str]:
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


def words(lines: Iterable[str]) -> set[str]:
    """Every identifier and number in the text."""
    return set(re.findall(r"\w+", " ".join(lines)))


def without_unused(lines: Sequence[str]) -> list[str]:
    """The lines less definitions of int32_t constants no other line names."""
    kept = []
    for number, line in enumerate(lines):
        found = re.match(r"const int32_t (\w+) = ", line)
        if not found or found.group(1) in words([*lines[:number], *lines[number + 1 :]]):
            kept.append(line)
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


def total(*terms: str | int) -> str:
    """The sum of C expressions and numbers, zeros dropped and numbers gathered at the end."""
    number = sum(term for term in terms if isinstance(term, int))
    texts = [term for term in terms if isinstance(term, str) and term != "0"]
    if not texts:
        return str(number)
    joined = " + ".join(texts)
    if number:
        joined += f" + {number}" if number > 0 else f" - {-number}"
    return joined


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
