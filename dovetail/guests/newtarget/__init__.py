"""`dovetail new-target`: a target file, and the driver beside it, to start a port from."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from dovetail import plugins
from dovetail.errors import TargetError
from dovetail.templates import Template

_FILES = {".py": "target.py.txt", ".c": "driver.c.txt", ".h": "driver.h.txt"}
_REGISTERS = 23
"""Registers of a job in the target file."""


def write_new_target(name: str, folder: Path, force: bool = False) -> tuple[Path, ...]:
    """Write `name`.py, `name`.c and `name`.h; gives their paths.

    Args:
        name: of the target, its engine and the driver's functions: a lower-case C identifier.
        folder: made where it does not exist.
        force: whether files that are there give way.

    Raises:
        TargetError: the name will not do, a file exists, or the folder cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        hint = "use up to 40 lower-case letters, digits and underscores, a letter first"
        raise TargetError(f"'{name}' cannot name a target", where="new-target", hint=hint)
    if name in plugins.names(plugins.TARGETS):
        raise TargetError(f"there is a built-in target '{name}'", where="new-target", hint="choose another name")
    templates = {folder / f"{name}{suffix}": Template(__name__, file) for suffix, file in _FILES.items()}
    if not force and (old := next((path for path in templates if path.exists()), None)):
        raise TargetError(f"{old} exists", where="new-target", hint="choose another name or folder, or --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in templates.items():
            path.write_text(template.fill(NAME=name, MACRO=name.upper(), WORDS=_REGISTERS))
    except OSError as error:
        hint = "choose another folder with --output"
        raise TargetError(f"cannot write to {folder}: {error.strerror}", where="new-target", hint=hint) from None
    return tuple(templates)
