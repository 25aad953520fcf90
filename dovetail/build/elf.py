"""What the linked firmware contains: sizes of its sections, its symbols, the bytes to load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import BuildError, MissingExtraError

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_WRITE, _ALLOCATE, _EXECUTE = 1, 2, 4  # section flags, System V ABI, chapter 4


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of an ELF file: address, size in bytes (0 where the assembler gave none), whether it is a function."""

    address: int
    size: int
    function: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes to be loaded at a physical address."""

    address: int
    data: bytes


@contextmanager
def _open(elf: Path) -> Iterator[ELFFile]:
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError:
        raise MissingExtraError("elftools", "iss", "reading the linked firmware") from None
    try:
        with elf.open("rb") as stream:
            yield ELFFile(stream)
    except (OSError, ELFError) as error:
        raise BuildError(f"not a readable ELF file: {error}", where=elf.name) from None


def section_sizes(elf: Path) -> dict[str, int]:
    """Return the bytes of "text", "rodata", "data", "bss" (all other zero or unloaded memory) and "stack".

    Raises:
        BuildError: `elf` is not an ELF file.
    """
    sizes = dict.fromkeys(("text", "rodata", "data", "bss", "stack"), 0)
    with _open(elf) as file:
        for section in file.iter_sections():
            flags = int(section["sh_flags"])
            if flags & _ALLOCATE:
                sizes[_kind(section.name, flags, section["sh_type"] == "SHT_NOBITS")] += int(section["sh_size"])
    return sizes


def _kind(name: str, flags: int, empty: bool) -> str:
    if name == ".stack":
        return "stack"
    if empty:
        return "bss"
    if flags & _EXECUTE:
        return "text"
    return "data" if flags & _WRITE else "rodata"


def symbols(elf: Path) -> dict[str, Symbol]:
    """Return the named symbols, sorted by address, then name.

    Raises:
        BuildError: `elf` is not an ELF file.
    """
    found: dict[str, Symbol] = {}
    with _open(elf) as file:
        from elftools.elf.sections import SymbolTableSection

        table = file.get_section_by_name(".symtab")
        for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
            kind = symbol["st_info"]["type"]
            mapping = symbol.name.startswith("$") or symbol.name.startswith(".L")  # RISC-V ELF psABI, mapping symbols
            if symbol.name and not mapping and kind not in ("STT_FILE", "STT_SECTION"):
                found[symbol.name] = Symbol(int(symbol["st_value"]), int(symbol["st_size"]), kind == "STT_FUNC")
    return dict(sorted(found.items(), key=lambda item: (item[1].address, item[0])))


def load_image(elf: Path) -> tuple[int, list[Segment]]:
    """Return the entry address and the bytes to load, at their load (physical) addresses.

    Raises:
        BuildError: `elf` is not an ELF file, or not a 32-bit little-endian RISC-V executable.
    """
    with _open(elf) as file:
        if file["e_machine"] != "EM_RISCV" or file.elfclass != 32 or not file.little_endian:
            raise BuildError(f"the firmware is for {file['e_machine']} ({file.elfclass} bit), not 32-bit RISC-V")
        loaded = [Segment(int(segment["p_paddr"]), segment.data()) for segment in file.iter_segments()
                  if segment["p_type"] == "PT_LOAD" and segment["p_filesz"]]
        return int(file["e_entry"]), loaded


def describe_address(address: int, table: dict[str, Symbol]) -> str:
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
