"""Write a build as a library for another build system."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dovetail.codegen.emit.project import write_files
from dovetail.codegen.manifest import MANIFEST
from dovetail.errors import BuildError
from dovetail.guests.export.forms import FORMS, form_files
from dovetail.guests.export.library import library_of
from dovetail.guests.export.rtos import FREERTOS, beside
from dovetail.run import ProjectBuild


def export(
    build: ProjectBuild, form: str, folder: Path, replace: bool = False, freertos: bool = False
) -> tuple[str, ...]:
    """Write a build as a library.

    Args:
        build: what `dovetail compile` made, for a core that runs firmware.
        form: one of `FORMS`. folder: where it goes.
        replace: whether a folder that is there is replaced, if it has nothing but an export.
        freertos: with a C file for FreeRTOS, as `esp-idf` always has.

    Returns:
        The files, relative to the folder.

    Raises:
        BuildError: the build is a program for this computer, the form is another system's or does not take its weights,
            or the folder cannot be written.
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
    files = {**form_files(FORMS[form], library), _MARK: f"{form} {library.name}\n"}
    if replace and folder.exists() and not (folder / _MARK).is_file():
        hint = "choose another folder"
        where = str(folder)
        raise BuildError(f"this is not an export (it has no {_MARK}) and is not replaced", where=where, hint=hint)
    data = {f"src/{name}": [np.memmap(path, np.uint8, "r")] for name, path in library.data.items()}
    write_files({**{name: text.encode() for name, text in files.items()}, **data}, folder, replace)
    return tuple(sorted({**files, **data}))


_MARK = MANIFEST.replace(".json", "-export.txt")
"""Says what the folder is, so that nothing else is ever replaced."""
