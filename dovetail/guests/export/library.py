"""The files of a network that go into other people's programs: no start-up code, no simulator, no library functions.

Beside an operating system its task blocks while an engine or a DMA works, and one task at a time uses it. A device
holds its interrupt line up until its driver has cleared it, which the task does once it runs again. So the handler
switches the line off and gives a semaphore, and whoever waits switches the line on again first: a line that is up then
gives the semaphore at once, and no completion is missed. A semaphore given too often only wakes the driver, which looks
and waits again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dovetail.codegen.emit.project import defines
from dovetail.codegen.manifest import BuildPort
from dovetail.errors import BuildError
from dovetail.records import Record, field
from dovetail.run import ProjectBuild
from dovetail.templates import Template

RUNTIME = "dovetail_rt.h"
"""The header all files of a network include."""
_SURROUNDINGS = re.compile(r"(_start\.S|/dovetail_rt\.c|/sim_main\.c|_arena\.c|/cores\.c)$")
"""Sources a program of its own brings, or has no use for."""
_FOR_SIMULATORS = ("src/board_network.h", "runtime/board.h")


class ExportLibrary(Record):
    """A network as C files in one folder."""

    name: str
    """Begins its C names."""
    version: str
    """Version of Dovetail."""
    sentence: str
    """Describes it."""
    sources: Mapping[str, str]
    """Text of each C or assembler file."""
    headers: Mapping[str, str]
    inputs: tuple[BuildPort, ...]
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
        """Begins its macros."""
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
        return (build.folder / path).read_text("utf-8")
    except OSError as error:
        hint = "compile the model again"
        raise BuildError(f"cannot read {path}: {error.strerror}", where=str(build.folder), hint=hint) from None


def with_macros(header: str, macros: Mapping[str, str | None]) -> str:
    """The header with macros that were options of the compiler."""
    lines = [f"#ifndef {name}\n#define {name} {value}\n#endif\n" for name, value in sorted(macros.items())]
    place = header.index("#include <stdint.h>")
    return header[:place] + "".join(lines) + header[place:]


def template(name: str) -> Template:
    """A template of this package."""
    return Template(f"{__package__}.templates", f"{name}.txt")


ZEPHYR, FREERTOS = "Zephyr", "FreeRTOS"


def beside(library: ExportLibrary, system: str, folder: str = "") -> ExportLibrary:
    """The library with a C file for a system and its header: it waits by semaphores.

    Args:
        library: as it is on a bare chip.
        system: `ZEPHYR` or `FREERTOS`.
        folder: where headers of FreeRTOS lie, such as "freertos/".
    """
    name, headers = f"{library.name}_rtos", dict(library.headers)
    words = {"name": library.name, "upper": library.upper, "system": system, "folder": folder}
    *others, last = library.waits or ("",)
    devices = " and ".join(filter(None, (", ".join(others), last)))
    what = "its task sleeps while it waits" if library.waits else "one task at a time"
    begin = ("begin", *(["interrupt"] if library.waits else [])) if system == FREERTOS else ()
    headers[f"{name}.h"] = template("rtos.h").fill(begin, what=what, devices=devices, **words)
    if library.waits:
        headers[RUNTIME] = with_macros(headers[RUNTIME], {"DOVETAIL_WAIT_HOOK": "1"})
    lines = [f"CONFIG_{option}" for option in interrupt_options(library)]
    calls = {
        "connect": "\n".join(f"    IRQ_CONNECT({line}, 0, handler, NULL, 0);" for line in lines),
        "disable": "\n".join(f"    irq_disable({line});" for line in lines),
        "enable": "\n".join(f"    irq_enable({line});" for line in lines),
    }
    shown = ("memory", "create", "waits") if library.waits else ()
    source = template(f"{system.lower()}.c").fill(shown, **calls, **words)
    return replace(library, sources={**library.sources, f"{name}.c": source}, headers=headers, system=system)


def interrupt_options(library: ExportLibrary) -> dict[str, str]:
    """Kconfig options with the numbers of interrupt lines, and the devices they are of."""
    return {f"DOVETAIL_{library.upper}_{device.upper()}_IRQ": device for device in library.waits}
