"""C functions that kernels share, from the files in `runtime`.

A line "//@ NAME: OTHERS" stands before each function there and names those it calls.

The right shift of a negative number is arithmetic in every compiler supported (C99 leaves it to the implementation);
conversions to narrower signed types are modular there too. Nothing else is relied upon.

The float functions are small, freestanding and in float32 alone. Each states its largest error over all floats, in
units in the last place (tests/test_float_functions.py measures them). Exponentials and logarithms are Taylor series
after exact range reduction (ln 2 in two parts, whose first has few enough bits that its multiples are exact), the
square root is Newton's iteration, erfc a Chebyshev fit of log(erfc(x)) + x**2 - log(t) in t = 1 / (1 + x / 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from dovetail.kernels.c import calls_in

HELPERS: dict[str, str] = {}
"""C text of each function, the comment before it included, by its name."""
FLOAT_HELPERS: dict[str, str] = {}
"""The functions of `HELPERS` that compute on floats."""
_NEEDED: dict[str, tuple[str, ...]] = {}
"""The functions each one calls, in the order of `HELPERS`."""

for _file in ("integers", "fixed", "floats", "narrow", "recurrent"):
    _text = (Path(__file__).parent / "runtime" / f"{_file}.c").read_text(encoding="utf-8")
    for _part in _text.split("//@ ")[1:]:
        _head, _, _body = _part.partition("\n")
        _name, _, _others = _head.partition(":")
        HELPERS[_name], _NEEDED[_name] = _body.rstrip("\n") + "\n", tuple(_others.split())
        if _file == "floats":
            FLOAT_HELPERS[_name] = HELPERS[_name]

SMALL = """\
/* Functions the compiler shall make small. */
#if defined(__clang__)
#define SMALL __attribute__((minsize, noinline))
#elif defined(__GNUC__)
#define SMALL __attribute__((optimize("Os"), noinline))
#else
#define SMALL
#endif
"""
"""C text that must stand before functions marked SMALL."""


def needed_helpers(lines: Iterable[str]) -> tuple[str, ...]:
    """The helpers that C text calls, and those they call, each after those it needs."""
    called = calls_in(lines)
    return with_needed(name for name in HELPERS if name in called)


def with_needed(names: Iterable[str]) -> tuple[str, ...]:
    """Helpers and those they call, each after those it needs."""
    ordered: dict[str, None] = {}
    for name in names:
        if name not in ordered:
            ordered |= dict.fromkeys((*with_needed(_NEEDED[name]), name))
    return tuple(ordered)


def helper_source(names: Iterable[str], own: Mapping[str, str] = MappingProxyType({})) -> str:
    """The C text of helpers and all they need, each once; `own` are a core's, by name, for its firmware alone."""
    firmware = "#if (defined(__riscv) || defined(__arm__)) && !defined(DOVETAIL_HOST)"
    wanted = set(names)
    texts = {name: HELPERS[name] for name in with_needed(name for name in HELPERS if name in wanted)}
    texts |= {name: f"{firmware}\n{own[name]}#else\n{text}#endif\n" for name, text in texts.items() if name in own}
    return "\n".join(texts.values())
