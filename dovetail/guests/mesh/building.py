"""What the programs of a mesh are built from: runtime, linker script, Makefile, and a folder for each program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dovetail.codegen.build.instruction_sets import EMITTED_C, instruction_set
from dovetail.codegen.emit.firmware import FRAMES, linker_script, runtime_path
from dovetail.guests.mesh.compiled import macros, shared_files
from dovetail.target.description import Target

SHARED = ("dovetail_rt.h", "dovetail_rt.c")
OWN = ("mesh_hal.h", "element.h", "mesh_sim.c")
MANAGER = ("mesh_manager.h", "mesh_manager.c")
"""The protocol of the element that manages the others."""


def build_files(sources: Mapping[str, Mapping[str, str]], target: Target) -> Iterator[tuple[str, bytes]]:
    """The files of all programs, by name, and what they share: sources by the name of a program and of its file."""
    core = instruction_set(target.core.isa)
    script = linker_script(
        target.memories,
        text=target.code,
        data=target.values,
        stack_bytes=target.core.stack,
        extra={**_fixed(target), ".element": target.code},
        isa=target.core.isa,
    )
    for name in (core.start, *SHARED):
        yield f"runtime/{name}", runtime_path(name).read_bytes()
    for name in OWN:
        yield f"runtime/{name}", (Path(__file__).parent / "runtime" / name).read_bytes()
    yield "link.ld", script.encode()
    for name, files in sorted(sources.items()):
        for file, text in files.items():
            yield f"programs/{name}/{file}", text.encode()
    shared = shared_files(target)
    yield from ((name, text.encode()) for name, text in shared.items())
    yield "Makefile", _makefile(target, shared).encode()


def manager_files() -> dict[str, bytes]:
    """The files of whoever manages the elements, by name, but for the user's own."""
    ours = {name: (Path(__file__).parent / "runtime" / name).read_bytes() for name in MANAGER}
    return {f"manager/{name}": content for name, content in ours.items()} | {
        f"manager/{name}": runtime_path(name).read_bytes() for name in FRAMES
    }


def _fixed(target: Target) -> dict[str, str]:
    """The sections of buffers that compiled pieces have at addresses of their own, in the order of the memories."""
    return {f".{memory.name.lower()}": memory.name for memory in target.memories} if shared_files(target) else {}


def _makefile(target: Target, shared: Mapping[str, str]) -> str:
    core = instruction_set(target.core.isa)
    command, flags, start = core.gcc_command, " ".join(core.gcc), core.start
    own = [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in macros(target).items()]
    sources = " ".join([*(name for name in shared if name.endswith(".c")), "runtime/mesh_sim.c"])
    include = "-Iruntime -Idriver" if shared else "-Iruntime"
    return f"""# Builds every element program. HAL is what supplies the functions of runtime/mesh_hal.h.
CC = {command}
CFLAGS = {flags} -std=c99 -O2 -ffreestanding -ffunction-sections -fdata-sections \\
\t{" ".join(EMITTED_C)}
HAL = {sources} {" ".join(own)}
PROGRAMS = $(patsubst programs/%/program.c,%.elf,$(wildcard programs/*/program.c))

all: $(PROGRAMS)
%.elf: programs/%/program.c
\t$(CC) $(CFLAGS) {include} -Iprograms/$* -nostdlib -Wl,--gc-sections -T link.ld $(wildcard programs/$*/*.c) \\
\t\truntime/{start} runtime/dovetail_rt.c $(HAL) -lgcc -o $@
clean:
\trm -f $(PROGRAMS)
.PHONY: all clean
"""
