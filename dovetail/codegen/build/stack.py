"""The stack a function needs, with all it calls: frames as compilers say them, calls as the objects' relocations do.

Clang writes frames into a section of the object (`.stack_sizes`: an address and a ULEB128 for each function; LLVM's
"Code generation: emitting function stack size information"), GCC into a file beside it (`-fstack-usage`: place, bytes
and kind, with tabs between). Every function lies in a section of its own (-ffunction-sections), so a relocation in it
names what it calls, or data it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.codegen.build.elf import opened, symbol_table

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_Place = tuple[int, int]
"""Number of an object, and of a section in it."""
_CALLS = {"EM_RISCV": {16, 17, 18, 19, 44, 45}, "EM_ARM": {10, 30, 51, 102, 103}}
"""Relocations of branches, jumps and calls, by machine (psABI of RISC-V; ELF for the Arm architecture)."""
_RETURNING = {10, 18, 19}
"""The relocations that only calls have."""
_ALLOCATE, _EXECUTE, _FUNCTION = 2, 4, 2  # section flags and a type of symbol, System V ABI, chapter 4
_NOWHERE = 0xFF00  # numbers of sections from here on, and 0, are of no section (ibid.)


@dataclass
class Code:
    """Functions and calls found in the objects of a program."""

    names: dict[str, _Place] = field(default_factory=dict)
    """Place of each global function or object."""
    functions: dict[_Place, str] = field(default_factory=dict)
    """Name of the function in a section."""
    code: set[_Place] = field(default_factory=set)
    """The sections that are code."""
    frames: dict[_Place, int] = field(default_factory=dict)
    """Bytes of stack a function takes for itself, by section; absent where the compiler did not say."""
    uses: dict[_Place, set[tuple[_Place | str, bool]]] = field(default_factory=dict)
    """References of a section: the section or global name, and whether it is a call."""


def read_code(objects: Sequence[Path]) -> Code:
    """Functions and calls of objects, compiled with a section for each function and told to say frames.

    Raises:
        BuildError: what is no ELF file. MissingExtraError: the package that reads them is not installed.
    """
    code = Code()
    for number, path in enumerate(objects):
        with opened(path) as file:
            _read(code, number, file, path.with_suffix(".su"))
    return code


def open_names(code: Code) -> set[str]:
    """The names that are used and not there."""
    return {to for uses in code.uses.values() for to, _ in uses if isinstance(to, str)} - code.names.keys()


def stack_need(code: Code, entry: str) -> int | str:
    """Bytes of stack the function `entry` needs at most, with all it calls, interrupts apart; the reason in words where
    there is no bound: calls by address or in circles, functions in no object, or a frame the compiler does not say."""
    return _need(code, code.names[entry], {}) if entry in code.names else f"no source has the function {entry}"


def _need(code: Code, place: _Place, known: dict[_Place, int | str]) -> int | str:
    """Bytes from a section on, or why they have no bound."""
    if place in known:
        return known[place]
    name = code.functions.get(place, "data")
    known[place] = f"{name} calls itself, directly or through others"  # found again on the way, it is a circle
    deepest, frame = 0, code.frames.get(place) if place in code.code else 0
    for used, called in sorted(code.uses.get(place, ()), key=str):
        to = code.names.get(used) if isinstance(used, str) else used
        if to is None and not called:
            continue  # a place the linker makes
        if to is None:
            return f"{name} calls {used} of a library, whose frames are not known"
        if to in code.code and not called:
            return f"{name} takes the address of {code.functions.get(to, 'a function')}, which may be called by it"
        below = _need(code, to, known)
        if isinstance(below, str):
            return below
        deepest = max(deepest, below)
    known[place] = f"the compiler does not say the frame of {name}" if frame is None else frame + deepest
    return known[place]


def _read(code: Code, number: int, file: ELFFile, told: Path) -> None:
    """Add what one object says."""
    from elftools.elf.relocation import RelocationSection

    sections, symbols = list(file.iter_sections()), list(symbol_table(file))
    code.code |= {(number, place) for place, one in enumerate(sections) if int(one["sh_flags"]) & _EXECUTE}
    own = {name: (number, at) for name, _, _, _, at in symbols if name and 0 < at < _NOWHERE}
    shared = {name for name, _, _, info, _ in symbols if info >> 4}
    code.names |= {name: place for name, place in own.items() if name in shared}
    written = _written(told)  # which knows the clones of a function (name.part.0) by one name
    functions = [name for name, _, _, info, _ in symbols if info & 15 == _FUNCTION and name in own]
    code.functions |= {own[name]: name for name in functions}
    clones = {own[name]: re.sub(r"\.\d+$", "", name) for name in functions}
    code.frames |= {place: written[name] for place, name in clones.items() if name in written}
    calls = _CALLS.get(file["e_machine"], set())
    for section in sections:
        if not isinstance(section, RelocationSection):
            continue
        place, to = (number, int(section["sh_info"])), sections[section["sh_info"]]
        entries = [(one, symbols[one["r_info_sym"]]) for one in section.iter_relocations() if one["r_info_sym"]]
        if to.name == ".stack_sizes":
            sizes = _sizes(to.data(), [int(one["r_offset"]) + file.elfclass // 8 for one, _ in entries])
            code.frames |= {(number, at): nbytes for (_, (*_, at)), nbytes in zip(entries, sizes, strict=True)}
        elif int(to["sh_flags"]) & _ALLOCATE:
            uses = code.uses.setdefault(place, set())
            for one, (name, _, _, info, at) in entries:
                kind = int(one["r_info_type"])
                if at != place[1] or (info & 15 == _FUNCTION and kind in _RETURNING):  # a jump in a section is no use
                    uses.add(((number, at) if 0 < at < _NOWHERE else name, kind in calls))


def _sizes(content: bytes, starts: Sequence[int]) -> Iterator[int]:
    """The numbers at these places, 7 bits in a byte, the lowest first."""
    for start in starts:
        number, place, more = 0, start, True
        while more:
            number |= (content[place] & 127) << 7 * (place - start)
            more, place = bool(content[place] & 128), place + 1
        yield number


def _written(told: Path) -> Mapping[str, int]:
    """The frames GCC wrote, by function, the largest of clones; none for those without a bound."""
    found: dict[str, int] = {}
    lines = [line.split("\t") for line in told.read_text("utf-8").splitlines()] if told.exists() else []
    for place, nbytes, _ in lines:
        name = place.rsplit(":", 1)[-1]
        found[name] = max(found.get(name, 0), int(nbytes))
    unbound = {place.rsplit(":", 1)[-1] for place, _, kind in lines if kind == "dynamic"}
    return {name: nbytes for name, nbytes in found.items() if name not in unbound}
