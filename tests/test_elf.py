"""What is read of ELF files, against pyelftools."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection

from dovetail.codegen.build.elf import code_ranges, load_image, opened, section_sizes, symbols
from dovetail.codegen.build.instruction_sets import instruction_set
from dovetail.codegen.build.stack import read_code
from dovetail.codegen.build.toolchain import compile_firmware, compile_host
from dovetail.codegen.emit.firmware import RUNTIME, SIMULATION_MAIN, linker_script, runtime_path
from dovetail.errors import BuildError
from firmware import MEMORIES, require_cross_compiler

MODEL = """
#include "net.h"
int8_t net_out[16];
static const int8_t weights[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static int32_t calls = 3;
void net_run(void) { for (int i = 0; i < 16; i++) { net_out[i] = (int8_t)(weights[(i + calls++) & 15]); } }
"""
ISAS = ("rv32imc", "rv64gc", "cortex-m4")


def build(folder: Path, isa: str) -> list[Path]:
    """The firmware of a small program, and its objects."""
    require_cross_compiler()
    start = instruction_set(isa).start
    for name in (start, SIMULATION_MAIN, *RUNTIME):
        (folder / name).write_bytes(runtime_path(name).read_bytes())
    (folder / "net.c").write_text(MODEL)
    (folder / "net.h").write_text("#include <stdint.h>\nvoid net_run(void);\n")
    (folder / "link.ld").write_text(linker_script(MEMORIES, text="l2", data="l1", stack_bytes=1000, isa=isa))
    elf = compile_firmware(
        folder,
        [Path("net.c"), Path(start), Path("dovetail_rt.c"), Path(SIMULATION_MAIN)],
        linker_script=Path("link.ld"),
        isa=isa,
        defines={"DOVETAIL_SIM": 1, "DOVETAIL_MODEL_HEADER": '"net.h"', "DOVETAIL_MODEL_RUN": "net_run"},
        cache=folder / "cache",
    )
    objects = sorted((folder / "cache").rglob("*.o"))
    assert len(objects) >= 4
    return [elf, *objects]


def as_pyelftools_reads(path: Path) -> dict[str, Any]:
    """The facts of an ELF file."""
    with path.open("rb") as stream:
        file = ELFFile(stream)
        sections = list(file.iter_sections())
        table = file.get_section_by_name(".symtab")
        numbers = {"SHN_UNDEF": 0, "SHN_ABS": 0xFFF1, "SHN_COMMON": 0xFFF2}
        return {
            "kind": (file["e_machine"], file.elfclass, file.little_endian, file["e_entry"]),
            "sections": [
                (one.name, one["sh_flags"], one["sh_addr"], one["sh_size"], one["sh_link"], one["sh_info"])
                for one in sections
            ],
            "contents": [b"" if one["sh_type"] == "SHT_NOBITS" else one.data() for one in sections],
            "symbols": [
                (one.name, one["st_value"], one["st_size"], numbers.get(one["st_shndx"], one["st_shndx"]))
                for one in table.iter_symbols()
                if one["st_info"]["type"] != "STT_SECTION"  # which it gives the section's name
            ],
            "relocations": [
                (
                    one["sh_info"],
                    [(to["r_offset"], to["r_info_type"], to["r_info_sym"]) for to in one.iter_relocations()],
                )
                for one in sections
                if isinstance(one, RelocationSection)
            ],
            "loaded": [
                (segment["p_paddr"], segment.data())
                for segment in file.iter_segments()
                if segment["p_type"] == "PT_LOAD"
                and segment["p_filesz"]
                and any(segment.section_in_segment(one) for one in sections)
            ],
        }


def as_dovetail_reads(path: Path) -> dict[str, Any]:
    """The same."""
    with opened(path) as file:
        return {
            "kind": (file.machine, file.bits, file.order == "<", file.entry),
            "sections": [(one.name, one.flags, one.address, one.size, one.link, one.info) for one in file.sections],
            "contents": [file.content(one) for one in file.sections],
            "symbols": [
                (name, value, size, section) for name, value, size, info, section in file.symbols() if info & 15 != 3
            ],
            "relocations": list(file.relocations()),
            "loaded": list(file.loaded()),
        }


@pytest.mark.parametrize("isa", ISAS)
def test_objects_and_firmware_are_read_as_pyelftools_reads_them(isa: str, tmp_path: Path) -> None:
    elf, *objects = build(tmp_path, isa)
    assert as_pyelftools_reads(elf)["loaded"] and any(as_pyelftools_reads(one)["relocations"] for one in objects)
    for path in (elf, *objects):
        assert as_dovetail_reads(path) == as_pyelftools_reads(path)


def test_more_sections_than_their_number_holds_are_read(tmp_path: Path) -> None:
    """From 65,280 on the header has 0 as their number, and the first section has it."""
    count = 66_000
    (tmp_path / "many.S").write_text("".join(f'.section .f{one}, "ax"\n' for one in range(count)))
    library = compile_host(tmp_path, [Path("many.S")], flags=(), cache=tmp_path / "cache")
    (made,) = library.parents[1].rglob("*.o")
    with opened(made) as file:
        named = {one.name for one in file.sections}
    assert {f".f{one}" for one in range(count)} <= named


def test_a_damaged_file_is_a_message(tmp_path: Path) -> None:
    readers: list[Callable[[Path], object]] = [section_sizes, symbols, code_ranges, load_image]
    readers.append(lambda path: read_code([path]))
    path, generator, refused = tmp_path / "damaged.o", random.Random(0), 0
    for source in build(tmp_path, "rv32imc"):
        whole = source.read_bytes()
        for turn in range(100):
            data = bytearray(whole[: generator.randrange(len(whole))] if turn % 2 else whole)
            for _ in range(3):
                data[generator.randrange(min(len(data), 80))] = generator.randrange(256) if data else 0
            path.write_bytes(data)
            for read in readers:
                with suppress(BuildError):
                    read(path)
                    refused -= 1
                refused += 1
    assert refused > 500
