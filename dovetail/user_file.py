"""Python files of the user's own: targets, device models, instructions of a core."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path
from types import ModuleType

from dovetail.errors import DovetailError, TargetError

_LONGEST = 200


def import_file(path: Path) -> ModuleType:
    """The module a Python file makes.

    Raises:
        TargetError: the file does not import; with the line in it, and what the exception says.
        DovetailError: what a part of Dovetail says about the declarations in it.
    """
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None or not path.is_file():
        raise TargetError("there is no such Python file", where=str(path), hint="check the spelling; it ends in .py")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except DovetailError:
        raise
    except (Exception, SystemExit) as error:
        raise _refused(path, found.origin or "", error) from error
    return module


def _refused(path: Path, origin: str, error: BaseException) -> TargetError:
    """The error for a file that raises: the innermost line in it, as it is the user's own."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == origin]
    text, hint = str(error), "mend the file there"
    if isinstance(error, SyntaxError):
        text, hint = error.msg, "mend the Python there"
        lines = [error.lineno] if error.filename == origin else lines
    elif isinstance(error, ImportError):
        hint = "install that package for the Python of dovetail, or correct the name"
    place = f"{path}:{lines[-1]}" if lines else str(path)
    what = f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
    return TargetError(what, where=place, hint=hint)
