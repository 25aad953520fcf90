"""Contents of linked firmware: sizes of its sections, its symbols, the bytes to load."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import BuildError, MissingExtraError
from dovetail.records import Record

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_WRITE, _ALLOCATE, _EXECUTE = 1, 2, 4  # section flags, System V ABI, chapter 4
_FUNCTION, _SECTION, _FILE = 2, 3, 4  # symbol types, ibid.


class Symbol(Record):
    """A symbol of an ELF file: address, size in bytes (0 where the assembler gave none), whether it is a function."""

    address: int
    size: int
    function: bool


@contextmanager
def opened(elf: Path) -> Iterator[ELFFile]:
    """An ELF file; raises BuildError for what is none, MissingExtraError without the package that reads it."""
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError:
        raise MissingExtraError("elftools", "iss", "reading the linked firmware") from None
    try:
        with elf.open("rb") as stream:
            yield ELFFile(stream)
    except (OSError, ELFError, struct.error) as error:
        raise BuildError(f"not a readable ELF file: {error}", where=elf.name, hint="compile the model again") from None


def section_sizes(elf: Path) -> dict[str, int]:
    """The bytes of "text", "rodata", "data", "bss" (all other zero or unloaded memory) and "stack"; raises BuildError
    for what is no ELF file, as all here do."""
    sizes = dict.fromkeys(("text", "rodata", "data", "bss", "stack"), 0)
    with opened(elf) as file:
        for section in file.iter_sections():
            flags = int(section["sh_flags"])
            kind = "text" if flags & _EXECUTE else "data" if flags & _WRITE else "rodata"
            kind = "bss" if section["sh_type"] == "SHT_NOBITS" else kind
            if flags & _ALLOCATE:
                sizes["stack" if section.name == ".stack" else kind] += int(section["sh_size"])
    return sizes


def symbol_table(file: ELFFile) -> Iterator[tuple[str, int, int, int, int]]:
    """Name, value, size, binding and type (four bits each), and section of the entries of the symbol table, if there is
    one. pyelftools takes 20 us an entry, and compilers write thousands of local ones."""
    table = file.get_section_by_name(".symtab")
    if table is None:
        return
    names, order = file.get_section(table["sh_link"]).data(), "<" if file.little_endian else ">"
    for entry in struct.iter_unpack(order + ("IBBHQQ" if file.elfclass == 64 else "IIIBBH"), table.data()):
        name, info, _, section, value, size = entry if file.elfclass == 64 else (*entry[:1], *entry[3:], *entry[1:3])
        yield names[name : names.find(0, name)].decode(errors="replace"), value, size, info, section


def symbols(elf: Path) -> dict[str, Symbol]:
    """The named symbols, sorted by address, then name."""
    found: dict[str, Symbol] = {}
    with opened(elf) as file:
        thumb = file["e_machine"] == "EM_ARM"  # bit 0 of a function's address says Thumb (ELF for the Arm architecture)
        for name, value, size, info, _ in symbol_table(file):
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
        marks = sorted(
            (value, name[:2]) for name, value, *_ in symbol_table(file) if name.startswith(("$t", "$d", "$a"))
        )
        for section in file.iter_sections():
            start, end = int(section["sh_addr"]), int(section["sh_addr"] + section["sh_size"])
            if not int(section["sh_flags"]) & _EXECUTE:
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
    what is no little-endian executable of so many bits for that machine, as pyelftools names it."""
    with opened(elf) as file:
        if file["e_machine"] != machine or file.elfclass != bits or not file.little_endian:
            what = f"the firmware is for {file['e_machine']} ({file.elfclass} bit), not {bits}-bit {machine}"
            raise BuildError(what, where=elf.name, hint="compile the model for this target again")
        # a linker may put the file's own headers into a segment before the first: no section, nothing to load
        loaded = [
            (int(segment["p_paddr"]), segment.data())
            for segment in file.iter_segments()
            if segment["p_type"] == "PT_LOAD"
            and segment["p_filesz"]
            and any(segment.section_in_segment(section) for section in file.iter_sections())
        ]
        return int(file["e_entry"]), loaded


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
