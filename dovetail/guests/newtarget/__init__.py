"""`dovetail new-target`: a target file, and the driver beside it, to start a port from."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path

from dovetail import plugins
from dovetail.errors import TargetError

_FILES = {".py": "target.py.txt", ".c": "driver.c.txt", ".h": "driver.h.txt"}
_REGISTERS = 23
"""Of a job, in the target file."""


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
    found = {folder / f"{name}{suffix}": source for suffix, source in _FILES.items()}
    there = [path for path in found if path.exists()]
    if there and not force:
        raise TargetError(f"{there[0]} exists", where="new-target", hint="choose another name or folder, or --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, source in found.items():
            text = files("dovetail.guests.newtarget").joinpath(source).read_text()
            for mark, word in {"@NAME@": name, "@MACRO@": name.upper(), "@WORDS@": str(_REGISTERS)}.items():
                text = text.replace(mark, word)
            path.write_text(text)
    except OSError as error:
        hint = "choose another folder with --output"
        raise TargetError(f"cannot write to {folder}: {error.strerror}", where="new-target", hint=hint) from None
    return tuple(found)
