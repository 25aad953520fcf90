"""ELF files, objects and linked firmware: sizes of sections, symbols, relocations, the bytes to load.

Numbers and layouts from the System V ABI, chapters 4 and 5. A package for ELF takes 40 ms to import and 20 us a symbol;
compilers write thousands of symbols.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dovetail.errors import BuildError

_WRITE, _ALLOCATE, _EXECUTE = 1, 2, 4  # section flags
_FUNCTION, _SECTION, _FILE = 2, 3, 4  # symbol types
_SYMBOLS, _ADDED, _ZEROS, _RELOCATIONS, _LOAD = 2, 4, 8, 9, 1  # types of sections, and of a segment
_EXTENDED = 0xFFFF  # this number of a section is in the first section, as it is too large for its field
_MACHINES = {40: "EM_ARM", 243: "EM_RISCV"}


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of an ELF file: address, size in bytes (0 where the assembler gave none), whether it is a function."""

    address: int
    size: int
    function: bool


class ElfSection(NamedTuple):
    """A section: its header, and its name."""

    place: int
    """Place of the name in the section of names."""
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    """Number of the section that this one belongs to: the names of symbols, the symbols of relocations."""
    info: int
    """Number of the section that relocations change."""
    alignment: int
    entry: int
    """Bytes of an entry."""
    name: str = ""

    @property
    def is_allocated(self) -> bool:
        """True for what the program has in memory."""
        return bool(self.flags & _ALLOCATE)

    @property
    def is_code(self) -> bool:
        """True for instructions."""
        return bool(self.flags & _EXECUTE)


class ElfFile:
    """An ELF file; what is damaged raises struct.error, IndexError or ValueError."""

    def __init__(self, data: bytes) -> None:
        if data[:4] != b"\x7fELF" or data[4:5] not in (b"\1", b"\2") or data[5:6] not in (b"\1", b"\2"):
            raise ValueError("it does not begin as one")
        self._data, self.bits, self.order = data, 32 * data[4], "<>"[data[5] - 1]
        wide = self.bits == 64
        header = struct.unpack_from(self.order + ("HHIQQQIHHHHHH" if wide else "HHIIIIIHHHHHH"), data, 16)
        _, machine, _, self.entry, segments, sections, _, _, segment_size, count, size, self._count, names = header
        self.machine = _MACHINES.get(machine, f"machine {machine}")
        self._segments = [segments + at * segment_size for at in range(count)]
        layout = self.order + ("IIQQQQIIQQ" if wide else "10I")
        first = ElfSection(*struct.unpack_from(layout, data, sections)) if sections else None
        total = self._count or (first.size if first else 0)
        found = [ElfSection(*struct.unpack_from(layout, data, sections + at * size)) for at in range(total)]
        texts = self.content(found[first.link if first and names == _EXTENDED else names]) if found else b""
        self.sections = [one._replace(name=_text(texts, one.place)) for one in found]

    def content(self, section: ElfSection) -> bytes:
        """The bytes of a section."""
        return b"" if section.kind == _ZEROS else self._data[section.offset : section.offset + section.size]

    def symbols(self) -> Iterator[tuple[str, int, int, int, int]]:
        """Name, value, size, binding and type (four bits each), and section of the entries of the symbol table, if
        there is one."""
        for table in self.sections:
            if table.kind == _SYMBOLS:
                names = self.content(self.sections[table.link])
                layout = self.order + ("IBBHQQ" if self.bits == 64 else "IIIBBH")
                for entry in struct.iter_unpack(layout, self.content(table)):
                    name, info, _, section, value, size = (
                        entry if self.bits == 64 else (entry[0], *entry[3:], *entry[1:3])
                    )
                    yield _text(names, name), value, size, info, section

    def relocations(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Number of a section, and its relocations: offset, type, and number of the symbol."""
        word, shift = ("Q", 32) if self.bits == 64 else ("I", 8)
        for one in self.sections:
            if one.kind in (_ADDED, _RELOCATIONS):
                layout = f"{self.order}{word}{word}{word.lower() if one.kind == _ADDED else ''}"
                entries = struct.iter_unpack(layout, self.content(one))
                yield one.info, [(at, info & (1 << shift) - 1, info >> shift) for at, info, *_ in entries]

    def loaded(self) -> Iterator[tuple[int, bytes]]:
        """The load (physical) addresses and bytes of what is to be loaded."""
        for place in self._segments:
            if self.bits == 64:
                kind, _, at, _, address, size = struct.unpack_from(self.order + "IIQQQQ", self._data, place)
            else:
                kind, at, _, address, size = struct.unpack_from(self.order + "5I", self._data, place)
            # a linker may put the file's own headers into a segment before the first: no section, nothing to load
            if kind == _LOAD and any(
                one.is_allocated and one.kind != _ZEROS and one.size and at <= one.offset < at + size
                for one in self.sections
            ):
                yield address, self._data[at : at + size]


def _text(names: bytes, place: int) -> str:
    return names[place : names.index(0, place)].decode(errors="replace") if names else ""


@contextmanager
def opened(elf: Path) -> Iterator[ElfFile]:
    """An ELF file; raises BuildError for what is none."""
    try:
        yield ElfFile(elf.read_bytes())
    except (OSError, struct.error, IndexError, ValueError) as error:
        raise BuildError(f"not a readable ELF file: {error}", where=elf.name, hint="compile the model again") from None


def section_sizes(elf: Path) -> dict[str, int]:
    """The bytes of "text", "rodata", "data", "bss" (all other zero or unloaded memory) and "stack"; raises BuildError
    for what is no ELF file, as all here do."""
    sizes = dict.fromkeys(("text", "rodata", "data", "bss", "stack"), 0)
    with opened(elf) as file:
        for section in file.sections:
            kind = "text" if section.is_code else "data" if section.flags & _WRITE else "rodata"
            kind = "bss" if section.kind == _ZEROS else kind
            if section.is_allocated:
                sizes["stack" if section.name == ".stack" else kind] += section.size
    return sizes


def symbols(elf: Path) -> dict[str, Symbol]:
    """The named symbols, sorted by address, then name."""
    found: dict[str, Symbol] = {}
    with opened(elf) as file:
        thumb = file.machine == "EM_ARM"  # bit 0 of a function's address says Thumb (ELF for the Arm architecture)
        for name, value, size, info, _ in file.symbols():
            kind = info & 15
            if (
                name and not name.startswith(("$", ".L")) and kind not in (_SECTION, _FILE)
            ):  # both ABIs, mapping symbols
                found[name] = Symbol(value & ~int(thumb and kind == _FUNCTION), size, kind == _FUNCTION)
    return dict(sorted(found.items(), key=lambda item: (item[1].address, item[0])))


def code_ranges(elf: Path) -> list[tuple[int, int]]:
    """Address and bytes of the stretches of code: of Arm firmware the Thumb code without the data between it, which the
    mapping symbols $t and $d tell apart (ELF for the Arm architecture, "Mapping symbols"); without such symbols whole
    sections."""
    found: list[tuple[int, int]] = []
    with opened(elf) as file:
        marks = sorted((value, name[:2]) for name, value, *_ in file.symbols() if name.startswith(("$t", "$d", "$a")))
        for section in file.sections:
            start, end = section.address, section.address + section.size
            if not section.is_code:
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
    what is no little-endian executable of so many bits for that machine (EM_ARM, EM_RISCV)."""
    with opened(elf) as file:
        if file.machine != machine or file.bits != bits or file.order != "<":
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
