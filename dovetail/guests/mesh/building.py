"""Builds the programs of a mesh: the files they share, the Makefile, and the firmware of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dovetail.codegen.build.elf import symbols
from dovetail.codegen.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.codegen.build.toolchain import compile_firmware
from dovetail.codegen.emit.firmware import FRAMES, linker_script, runtime_path
from dovetail.errors import PlanError
from dovetail.guests.mesh.compiled import macros, shared_files
from dovetail.guests.mesh.layers import Show, unseen
from dovetail.target.description import Target

_SHARED = ("dovetail_rt.h", "dovetail_rt.c")
_OWN = ("mesh_hal.h", "element.h", "element.c", "mesh_sim.c")
_SECTIONS = ("mesh_sections.h", "mesh_sections_sim.c")
_MANAGER = ("mesh_manager.h", "mesh_manager.c")


def runtime_bytes(name: str) -> bytes:
    """A file of the mesh's own run-time."""
    return (Path(__file__).parent / "runtime" / name).read_bytes()


def c_template(name: str) -> str:
    """C text of the run-time with places for `%`."""
    return runtime_bytes(f"{name}.c.txt").decode()


def build_files(
    sources: Mapping[str, Mapping[str, str]], target: Target, sections: bool = False
) -> Iterator[tuple[str, bytes]]:
    """All files that programs are built from, by relative path; `sources` is program -> file name -> C text."""
    core, drivers = instruction_set(target.core.isa), shared_files(target)
    own = {f".{memory.name.lower()}": memory.name for memory in target.memories} if drivers else {}
    script = linker_script(
        target.memories,
        text=target.code,
        data=target.values,
        stack_bytes=target.core.stack,
        extra={**own, ".element": target.code},
        isa=target.core.isa,
    )
    for name in (core.start, *_SHARED):
        yield f"runtime/{name}", runtime_path(name).read_bytes()
    for name in (*_OWN, *_SECTIONS) if sections else _OWN:
        yield f"runtime/{name}", runtime_bytes(name)
    yield "link.ld", script.encode()
    for program, files in sorted(sources.items()):
        yield from ((f"programs/{program}/{name}", text.encode()) for name, text in files.items())
    yield from ((name, text.encode()) for name, text in drivers.items())
    hal = [*(name for name in drivers if name.endswith(".c")), "runtime/mesh_sim.c"]
    yield "Makefile", _makefile(target, [*hal, *["runtime/mesh_sections_sim.c"] * sections], bool(drivers)).encode()


def manager_files() -> dict[str, bytes]:
    """Files of the element that manages the others, without the user's own."""
    own = {f"manager/{name}": runtime_bytes(name) for name in _MANAGER}
    return own | {f"manager/{name}": runtime_path(name).read_bytes() for name in FRAMES}


def _makefile(target: Target, hal: list[str], has_drivers: bool) -> str:
    core = instruction_set(target.core.isa)
    own = [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in macros(target).items()]
    values = {"command": core.gcc_command, "flags": " ".join(core.gcc), "start": core.start}
    values |= {"emitted": " ".join(EMITTED_C), "include": "-Iruntime -Idriver" if has_drivers else "-Iruntime"}
    return runtime_bytes("Makefile.txt").decode() % {**values, "hal": f"{' '.join(hal)} {' '.join(own)}"}


def build_programs(
    files: Mapping[str, bytes], target: Target, folder: Path, jobs: int = 2, show: Show = unseen
) -> dict[str, Path]:
    """Compile every program of what was emitted, in a folder; returns its ELF file. Raises BuildError where the
    compiler refuses one."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shared = [folder / name for name in sorted(files) if re.fullmatch(r"(runtime|driver)/.*\.[cS]", name)]

    def build(program: Path) -> tuple[str, Path]:
        own = sorted(program.glob("*.c"))
        return program.name, compile_firmware(
            program,
            [*own, *shared],
            linker_script=folder / "link.ld",
            isa=target.core.isa,
            defines=macros(target),
            include=(folder / "runtime", folder / "driver"),
            flags=EMITTED_C,
            compiler_runtime=any(b"float" in path.read_bytes() for path in own),
        )

    programs, built = sorted((folder / "programs").iterdir()), dict[str, Path]()
    with ThreadPoolExecutor(jobs) as pool:
        for name, path in pool.map(build, programs):
            built[name] = path
            show(f"compiling the elements' programs: {len(built)} of {len(programs)}")
    return built


def used_bytes(firmware: Mapping[str, Path], target: Target, usable: int, hint: str) -> dict[str, int]:
    """Bytes of an element's memory that each program, its stack, data and buffers take; PlanError above `usable`."""
    base = target.memory(target.values).base
    used = {name: symbols(path)["__bss_end"].address - base for name, path in firmware.items()}
    for name in sorted(used):
        if used[name] > usable:
            what = f"a program takes {used[name]} bytes, an element has {usable}"
            raise PlanError(what, where=name, hint=hint)
    return used
