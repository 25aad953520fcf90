"""Contents of objects and linked firmware: sizes of sections, symbols, relocations, the bytes to load.

Numbers and layouts: System V ABI, chapters 4 and 5.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dovetail.errors import BuildError

WRITE, ALLOCATE, EXECUTE = 1, 2, 4
"""Flags of sections."""
_SYMBOLS, _WITH_ADDEND, _NO_BITS, _RELOCATIONS = 2, 4, 8, 9  # types of sections
NO_SECTION = 0xFF00
"""Numbers of sections from here on stand for something else: an absolute value, or a common block."""
FUNCTION, _SECTION, _FILE = 2, 3, 4
"""Types of symbols."""
_LOAD = 1  # type of a segment
_MACHINES = {40: "EM_ARM", 243: "EM_RISCV"}


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of an ELF file: address, size in bytes (0 where the assembler gave none), whether it is a function."""

    address: int
    size: int
    function: bool


class ElfSection(NamedTuple):
    """The header of a section: type, flags, address, place in the file, bytes, two numbers that depend on the type."""

    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int


class Entry(NamedTuple):
    """An entry of a symbol table."""

    name: str
    value: int
    size: int
    kind: int
    is_local: bool
    section: int
    """Number of its section; 0 or from `NO_SECTION` on where it is in none."""


class ElfFile:
    """An ELF file; raises BuildError for what is none."""

    def __init__(self, path: Path) -> None:
        try:
            self._read(path.read_bytes())
        except (OSError, struct.error, LookupError, ValueError) as error:
            hint = "compile the model again"
            raise BuildError(f"not a readable ELF file: {error}", where=path.name, hint=hint) from None

    def _read(self, data: bytes) -> None:
        if data[:4] != b"\x7fELF":
            raise ValueError("it does not begin as one")
        self.bits, self.is_little = {1: 32, 2: 64}[data[4]], {1: True, 2: False}[data[5]]
        self._order, word = "<" if self.is_little else ">", "Q" if self.bits == 64 else "I"
        self._data, head = data, struct.unpack_from(f"{self._order}HHI{word}{word}{word}IHHHHHH", data, 16)
        _, machine, _, self.entry, segments, start, _, _, _, number, _, count, names = head
        self.machine = _MACHINES.get(machine, f"machine {machine}")
        headers = self._table(f"II{word}{word}{word}{word}II{word}{word}", start, count)
        texts = data[headers[names][4] :] if headers else b""
        self.sections = [ElfSection(_text(texts, name), *rest[:7]) for name, *rest in headers]
        self._segments = self._table("IIQQQQQQ" if self.bits == 64 else "IIIIIIII", segments, number)
        self.symbols = [entry for one in self.sections if one.kind == _SYMBOLS for entry in self._entries(one)]

    def _table(self, layout: str, start: int, count: int) -> list[tuple[int, ...]]:
        size = struct.calcsize(self._order + layout)
        if len(self._data) < start + count * size:
            raise ValueError("it is cut off")
        return list(struct.iter_unpack(self._order + layout, self._data[start : start + count * size]))

    def content(self, section: ElfSection) -> bytes:
        """The bytes of a section; none where the file has none."""
        return self._data[section.offset : section.offset + (section.size if section.kind != _NO_BITS else 0)]

    def _entries(self, table: ElfSection) -> Iterator[Entry]:
        """The entries of a symbol table; the first is of no symbol."""
        texts = self.content(self.sections[table.link])
        for entry in struct.iter_unpack(self._order + ("IBBHQQ" if self.bits == 64 else "IIIBBH"), self.content(table)):
            name, info, _, section, value, size = entry if self.bits == 64 else (*entry[:1], *entry[3:], *entry[1:3])
            yield Entry(_text(texts, name), value, size, info & 15, info >> 4 == 0, section)

    def relocations(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """For each section that has some, its number, and offset, type and number of the symbol of each relocation."""
        word, shift = ("Q", 32) if self.bits == 64 else ("I", 8)
        for one in self.sections:
            if one.kind in (_RELOCATIONS, _WITH_ADDEND):
                layout = self._order + word * (3 if one.kind == _WITH_ADDEND else 2)
                entries = struct.iter_unpack(layout, self.content(one))
                yield one.info, [(entry[0], entry[1] & ((1 << shift) - 1), entry[1] >> shift) for entry in entries]

    def loaded(self) -> Iterator[tuple[int, bytes]]:
        """Load address and bytes of what is to be loaded."""
        for kind, *header in self._segments:
            start, _, address, size = header[1:5] if self.bits == 64 else header[:4]
            held = (one for one in self.sections if one.flags & ALLOCATE and one.kind != _NO_BITS and one.size)
            # a linker may put the file's own headers into a segment before the first: no section, nothing to load
            if kind == _LOAD and any(start <= one.offset < start + size for one in held):
                yield address, self._data[start : start + size]


def _text(texts: bytes, start: int) -> str:
    """The text that begins at a place."""
    return texts[start : texts.find(0, start)].decode(errors="replace")


def section_sizes(elf: Path) -> dict[str, int]:
    """The bytes of "text", "rodata", "data", "bss" (all other zero or unloaded memory) and "stack"; raises BuildError
    for what is no ELF file, as all here do."""
    sizes = dict.fromkeys(("text", "rodata", "data", "bss", "stack"), 0)
    for one in ElfFile(elf).sections:
        kind = "text" if one.flags & EXECUTE else "data" if one.flags & WRITE else "rodata"
        if one.flags & ALLOCATE:
            sizes["stack" if one.name == ".stack" else "bss" if one.kind == _NO_BITS else kind] += one.size
    return sizes


def symbols(elf: Path) -> dict[str, Symbol]:
    """The named symbols, sorted by address, then name."""
    file, found = ElfFile(elf), dict[str, Symbol]()
    thumb = file.machine == "EM_ARM"  # bit 0 of a function's address says Thumb (ELF for the Arm architecture)
    for one in file.symbols:
        if one.name and not one.name.startswith(("$", ".L")) and one.kind not in (_SECTION, _FILE):  # mapping symbols
            is_function = one.kind == FUNCTION
            found[one.name] = Symbol(one.value & ~int(thumb and is_function), one.size, is_function)
    return dict(sorted(found.items(), key=lambda item: (item[1].address, item[0])))


def code_ranges(elf: Path) -> list[tuple[int, int]]:
    """Address and bytes of the stretches of code: of Arm firmware the Thumb code without the data between it, which the
    mapping symbols $t and $d tell apart (ELF for the Arm architecture, "Mapping symbols"); without such symbols whole
    sections."""
    file, found = ElfFile(elf), list[tuple[int, int]]()
    marks = sorted((one.value, one.name[:2]) for one in file.symbols if one.name.startswith(("$t", "$d", "$a")))
    for section in file.sections:
        start, end = section.address, section.address + section.size
        if not section.flags & EXECUTE:
            continue
        inside = [mark for mark in marks if start <= mark[0] < end]
        if not inside and end > start:
            found.append((start, end - start))
            continue
        for (address, kind), (following, _) in zip(inside, [*inside[1:], (end, "")], strict=True):
            if kind == "$t" and following > address:
                found.append((address, following - address))
    return found


def load_image(elf: Path, machine: str = "EM_RISCV", bits: int = 32) -> tuple[int, list[tuple[int, bytes]]]:
    """The entry address, and the load (physical) addresses and bytes of what is to be loaded; raises BuildError for
    what is no little-endian executable of so many bits for that machine, as the ELF standard names it."""
    file = ElfFile(elf)
    if file.machine != machine or file.bits != bits or not file.is_little:
        what = f"the firmware is for {file.machine} ({file.bits} bit), not {bits}-bit {machine}"
        raise BuildError(what, where=elf.name, hint="compile the model for this target again")
    return file.entry, list(file.loaded())


def describe_address(address: int, table: Mapping[str, Symbol]) -> str:
    """Return "symbol+0x12" for an address inside a symbol of `table` (as `symbols` sorts it), else the number.

    A symbol of unknown size reaches up to the next one; functions are preferred to labels at one address.
    """
    best, start = "", -1
    for name, symbol in table.items():
        if symbol.address > address:
            break
        inside = symbol.size == 0 or address < symbol.address + symbol.size
        if inside and (symbol.address > start or symbol.function):
            best, start = name, symbol.address
    return f"{best}+{address - start:#x}" if best else f"{address:#x}"
