"""The files of a network that go into other people's programs: no start-up code, no simulator, no library functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.codegen.emit.project import defines
from dovetail.codegen.manifest import BuildPort
from dovetail.errors import BuildError
from dovetail.run import ProjectBuild

RUNTIME = "dovetail_rt.h"
"""The header all files of a network include."""
_SURROUNDINGS = re.compile(r"(_start\.S|/dovetail_rt\.c|/sim_main\.c|_arena\.c|/cores\.c)$")
"""Sources a program of its own brings, or has no use for."""
_FOR_SIMULATORS = ("src/board_network.h", "runtime/board.h")


@dataclass(frozen=True)
class ExportLibrary:
    """A network as C files in one folder."""

    name: str
    """What its C names begin with."""
    version: str
    """Of Dovetail."""
    sentence: str
    """What it is."""
    sources: Mapping[str, str]
    """Text of each C or assembler file."""
    headers: Mapping[str, str]
    inputs: Sequence[BuildPort]
    """As in the build's description: name, shape, dtype, scale."""
    outputs: Sequence[BuildPort]
    arena: str
    """C name of an array the program must bring; empty for none."""
    foreign: tuple[str, ...]
    """Folders of a vendor's library, which stays out: the program has it."""
    waits: tuple[str, ...]
    """The engines and DMAs whose interrupts the core waits for; empty for a network of the core alone."""
    layers: tuple[str, ...]
    """Their names, by the number their marker has."""
    data: Mapping[str, Path] = field(default_factory=dict)
    """Files of bytes that sources take in, by name: where they are."""
    system: str = ""
    """The operating system it runs beside; empty for none."""

    @property
    def files(self) -> dict[str, str]:
        """Sources and headers."""
        return {**self.headers, **self.sources}

    @property
    def upper(self) -> str:
        """What its macros begin with."""
        return self.name.upper()


def library_of(build: ProjectBuild) -> ExportLibrary:
    """The library of a build; raises BuildError where it is a program for this computer."""
    manifest, target = build.manifest, build.target
    if target.core.isa == "host":
        hint = "link with its own sources, which its Makefile names"
        raise BuildError("this build is a program for this computer", where=str(build.folder), hint=hint)
    name = manifest.model_prefix
    wanted = [path for path in manifest.sources.target if not _SURROUNDINGS.search(path)]
    foreign = [path for path in wanted if path.startswith("driver/") and path.count("/") > 1]
    sources = {path.rpartition("/")[2]: _text(build, path) for path in wanted if path not in foreign}
    paths = sorted(path.relative_to(build.folder).as_posix() for path in build.folder.glob("*/*.h"))
    kept = [path for path in paths if path not in _FOR_SIMULATORS and not (foreign and path.startswith("driver/"))]
    headers = {path.rpartition("/")[2]: _text(build, path) for path in kept}
    macros = {key: value for key, value in defines(name, target).items() if value is not None and "MODEL" not in key}
    headers[RUNTIME] = with_macros(headers[RUNTIME], macros)
    return ExportLibrary(
        name=name,
        version=manifest.dovetail,
        sentence=f"{manifest.model}: a neural network for {target.name}, static and bare-metal",
        sources={file: _ALIASING + text if file.endswith(".c") else text for file, text in sources.items()},
        headers=headers,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        arena=manifest.arena or "",
        foreign=tuple(sorted({path.split("/")[1] for path in foreign})),
        waits=_waits(build, sources),
        layers=tuple(layer.name for layer in manifest.layers),
        data={path.rpartition("/")[2]: build.folder / path for path in manifest.sources.data},
    )


def _waits(build: ProjectBuild, sources: Mapping[str, str]) -> tuple[str, ...]:
    """The devices a network uses whose drivers wait."""
    waiting = {file for file, text in sources.items() if _WAITING in text}
    used = {name for work in build.manifest.work for name in work.engines} if waiting - {_DMA} else set()
    engines = [engine.name for engine in build.target.engines if engine.name in used]
    return (*engines, build.target.dma.name) if build.target.dma and _DMA in waiting else tuple(engines)


_DMA = "dma.c"
_WAITING = "dovetail_wait_for_interrupt()"
_ALIASING = """\
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2", "no-strict-aliasing") /* bytes are read as other types */
#endif
"""


def _text(build: ProjectBuild, path: str) -> str:
    try:
        return (build.folder / path).read_text()
    except OSError as error:
        hint = "compile the model again"
        raise BuildError(f"cannot read {path}: {error.strerror}", where=str(build.folder), hint=hint) from None


def with_macros(header: str, macros: Mapping[str, str | None]) -> str:
    """The header with macros that were options of the compiler."""
    lines = [f"#ifndef {name}\n#define {name} {value}\n#endif\n" for name, value in sorted(macros.items())]
    place = header.index("#include <stdint.h>")
    return header[:place] + "".join(lines) + header[place:]


def example(library: ExportLibrary, head: str, main: str, tail: Sequence[str]) -> str:
    """A program that fills the inputs, runs the network and takes the largest output.

    Args:
        library: the network. head: lines before the function. main: the function's head.
        tail: its last lines; `best` is the place of the largest element of the first output.
    """
    upper, lines = library.upper, []
    for index, port in enumerate(library.inputs):
        stem = f"{upper}_INPUT_{index}"
        real, value = port.scale is not None, f"{stem}[at] = 0; /* what your sensor gives */"
        if real:
            value = f"{stem}[at] = {library.name}_quantize_input_{index}(0.0f); /* what your sensor gives */"
        lines += [f"for (int at = 0; at < {stem}_ELEMENTS; at++) {{", f"    {value}", "}"]
    output = f"{upper}_OUTPUT_0"
    lines += [f"{library.name}_run();", "int best = 0;", f"for (int at = 1; at < {output}_ELEMENTS; at++) {{"]
    lines += [f"    best = {output}[at] > {output}[best] ? at : best;", "}", *tail]
    arena = []
    if library.arena:
        arena = [f"uint8_t {library.arena}[{upper}_ARENA_BYTES] __attribute__((aligned(16)));", ""]
    body = "\n".join(f"    {line}" for line in lines)
    return "\n".join([head, "", *arena, main, "{", body, "}", ""])


def cycles(library: ExportLibrary) -> str:
    """A program that runs the network once and prints the cycles of each layer, by the core's own counter."""
    names = "".join(f'    "{name}",\n' for name in library.layers)
    arena = ""
    if library.arena:
        arena = f"uint8_t {library.arena}[{library.upper}_ARENA_BYTES] __attribute__((aligned(16)));\n"
    return _CYCLES.format(name=library.name, count=max(1, len(library.layers)), names=names or "    0,\n", arena=arena)


_CYCLES = """\
/* Cycles of each layer. Compile this file and the network with DOVETAIL_MARK_HOOK defined. */
#include <stdint.h>
#include <stdio.h>

#include "{name}.h"

#define LAYERS {count}u

void dovetail_mark(uint32_t layer);

{arena}static const char *const names[LAYERS] = {{
{names}}};
static uint32_t spent[LAYERS], began, layer_now = LAYERS;

#if defined(DOVETAIL_CYCLES) /* an expression of yours */
static void count(void)
{{
}}
#elif defined(__arm__) && defined(__ARM_ARCH) && __ARM_ARCH >= 7
#define DOVETAIL_CYCLES (*(volatile uint32_t *)0xE0001004u) /* of the debug unit (DWT) */
static void count(void)
{{
    *(volatile uint32_t *)0xE000EDFCu |= 1u << 24;
    DOVETAIL_CYCLES = 0u;
    *(volatile uint32_t *)0xE0001000u |= 1u;
}}
#elif defined(__riscv)
static uint32_t mcycle(void)
{{
    unsigned long cycles;
    __asm__ volatile("csrr %0, mcycle" : "=r"(cycles));
    return (uint32_t)cycles;
}}
#define DOVETAIL_CYCLES mcycle()
static void count(void)
{{
}}
#else
#error "define DOVETAIL_CYCLES as an expression that gives the cycles since any moment"
#endif

void dovetail_mark(uint32_t layer)
{{
    const uint32_t now = DOVETAIL_CYCLES;
    if (layer_now < LAYERS) {{
        spent[layer_now] += now - began;
    }}
    layer_now = layer;
    began = now;
}}

int main(void)
{{
    count();
    {name}_run();
    for (uint32_t layer = 0; layer < LAYERS; layer++) {{
        printf("%-24s %10lu\\n", names[layer], (unsigned long)spent[layer]);
    }}
    return 0;
}}
"""
