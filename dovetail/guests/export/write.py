"""Write a build as a library for another build system: the form of each, as templates of files beside a network's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

from dovetail.errors import BuildError
from dovetail.folders import MANIFEST, write_files
from dovetail.guests.export.library import (
    FREERTOS,
    ZEPHYR,
    ExportLibrary,
    beside,
    interrupt_options,
    library_of,
    template,
)
from dovetail.records import Record, field
from dovetail.run import ProjectBuild

if TYPE_CHECKING:
    from dovetail.folders import Contents


class ExportForm(Record):
    """The form that one build system takes. `@name@` stands for the network's name everywhere."""

    use: str
    """How to use it, for the README."""
    files: Mapping[str, str]
    """Path in the export -> template."""
    source: str = ""
    """How its files list a file of the network: `{path}`, `{stem}` (without the ending) and `{kind}` are filled in."""
    separator: str = " "
    """Between two listed files."""
    lists_headers: bool = False
    assembles: bool = True
    """Whether it takes weights as an assembler file that includes bytes."""
    examples: Mapping[str, str] = field(
        default_factory=lambda: {"example/main.c": "main.c", "example/cycles.c": "cycles.c"}
    )
    """Path in the export -> template, of programs."""
    system: str = ""
    """Operating system the network waits with; empty for none."""
    folder: str = ""
    """Folder of the system's headers."""


FORMS: Mapping[str, ExportForm] = {
    "cmake": ExportForm(
        "`add_subdirectory` it, or install it and `find_package(@name@)`; then link `@name@::@name@`.",
        {"CMakeLists.txt": "cmake"},
        "src/{path}",
    ),
    "make": ExportForm("`make` gives `lib@name@.a`; headers are in `src`.", {"Makefile": "Makefile"}, "src/{stem}.o"),
    "arduino": ExportForm(
        "Put the folder into your sketchbook's `libraries`, or install it as a ZIP.",
        {"library.properties": "library.properties"},
        assembles=False,
        examples={"examples/@name@_example/@name@_example.ino": "sketch.ino", "extras/cycles.c": "cycles.c"},
    ),
    "platformio": ExportForm(
        "Put the folder into your project's `lib`, or name it in `lib_deps`.", {"library.json": "library.json"}
    ),
    "zephyr": ExportForm(
        "Name the folder in `ZEPHYR_EXTRA_MODULES` and set `CONFIG_DOVETAIL_@upper@=y`.",
        {"zephyr/module.yml": "module.yml", "Kconfig": "Kconfig", "CMakeLists.txt": "zephyr_cmake"},
        "  src/{path}",
        "\n",
        system=ZEPHYR,
    ),
    "esp-idf": ExportForm(
        "Put the folder into your project's `components`.",
        {"CMakeLists.txt": "esp_idf_cmake", "idf_component.yml": "idf_component.yml"},
        '"src/{path}"',
        system=FREERTOS,
        folder="freertos/",
    ),
    "cmsis-pack": ExportForm(
        "Pack the folder with the tools of Open-CMSIS-Pack, or name its `.pdsc` in your solution.",
        {"Dovetail.@name@.pdsc": "pdsc"},
        '        <file category="{kind}" name="src/{path}"/>',
        "\n",
        lists_headers=True,
        assembles=False,
    ),
}
"""By the name on the command line."""
_KINDS = {".h": "header"}


def form_files(form: ExportForm, library: ExportLibrary) -> dict[str, str]:
    """The text of all files of a library in a form, by path."""
    if form.system:
        library = beside(library, form.system, form.folder)
    words = _words(form, library)

    def filled(text: str) -> str:
        return text.replace("@name@", library.name).replace("@upper@", library.upper)

    shown = [
        *(["weights"] if library.data else []),
        *(["arena"] if library.arena else []),
        *(["foreign"] if library.foreign else []),
        "rtos" if library.system else "bare" if library.waits else "alone",
    ]
    files = {f"src/{name}": text for name, text in library.files.items()}
    for path, name in {**form.files, **form.examples, "README.md": "README.md"}.items():
        files[filled(path)] = template(name).fill(shown, use=filled(form.use), **words)
    return files


def _words(form: ExportForm, library: ExportLibrary) -> dict[str, str]:
    """The words that templates have."""
    listed = sorted(library.files if form.lists_headers else library.sources)
    paths = [PurePath(name) for name in listed]
    sources = [form.source.format(path=path, stem=path.stem, kind=_KINDS.get(path.suffix, "source")) for path in paths]
    words = {"name": library.name, "upper": library.upper, "version": library.version, "sentence": library.sentence}
    options = (
        template("Kconfig").fill_part("interrupt", option=option, device=device, **words)
        for option, device in interrupt_options(library).items()
    )
    inference = template("inference.c")
    inputs = []
    for index, port in enumerate(library.inputs):
        value = "0" if port.scale is None else f"{library.name}_quantize_input_{index}(0.0f)"
        inputs.append(inference.fill_part("input", index=index, value=value, **words) + "\n")
    return {
        **words,
        "sentence_json": json.dumps(library.sentence),
        "sentence_xml": escape(library.sentence),
        "assembler": " ASM" if library.data else "",
        "sources": form.separator.join(sources),
        "interrupts": "".join(options),
        "inference": inference.fill_part("", inputs="".join(inputs), **words),
        "array": library.arena,
        "count": str(max(1, len(library.layers))),
        "names": "\n".join(f'    "{name}",' for name in library.layers) or "    0,",
        "system": library.system,
        "blocks": f" Its task blocks while {' or '.join(library.waits)} works." if library.waits else "",
        "libraries": ", ".join(library.foreign),
    }


def library_files(build: ProjectBuild, form: str, freertos: bool = False) -> dict[str, Contents]:
    """The files of a build as a library, by path.

    Args:
        build: what `dovetail compile` made, for a core that runs firmware.
        form: one of `FORMS`.
        freertos: with a C file for FreeRTOS, as `esp-idf` always has.

    Raises:
        BuildError: the build is a program for this computer, or the form is another system's or does not take its
            weights.
    """
    library = library_of(build)
    if freertos and form == "zephyr":
        hint = "leave out --rtos: this form has Zephyr's semaphores"
        raise BuildError("a module of Zephyr's does not run beside FreeRTOS", where="--rtos, --to", hint=hint)
    if freertos and form != "esp-idf":
        library = beside(library, FREERTOS)
    if library.data and not FORMS[form].assembles:
        hint = "compile it again with --weights text"
        raise BuildError("this form has no assembler files, in which the weights are", where=f"--to {form}", hint=hint)
    data = {f"src/{name}": [np.memmap(path, np.uint8, "r")] for name, path in library.data.items()}
    return {**{name: text.encode() for name, text in form_files(FORMS[form], library).items()}, **data}


def write_export(files: Mapping[str, Contents], kind: str, folder: Path, replace: bool) -> tuple[str, ...]:
    """Write the files of an export and its mark; the files, relative to the folder.

    Raises:
        BuildError: the folder is there and is not to be replaced, is something else than an export, or cannot be
            written.
    """
    if replace and folder.exists() and not (folder / _MARK).is_file():
        hint = "choose another folder"
        where = str(folder)
        raise BuildError(f"this is not an export (it has no {_MARK}) and is not replaced", where=where, hint=hint)
    marked = {**files, _MARK: f"{kind}\n".encode()}
    write_files(marked, folder, replace)
    return tuple(sorted(marked))


def export(
    build: ProjectBuild, form: str, folder: Path, replace: bool = False, freertos: bool = False
) -> tuple[str, ...]:
    """Write a build as a library; arguments and errors as `library_files` and `write_export`."""
    kind = f"{form} {build.manifest.model_prefix}"
    return write_export(library_files(build, form, freertos), kind, folder, replace)


_MARK = MANIFEST.replace(".json", "-export.txt")
"""Says what the folder is, so that nothing else is ever replaced."""
