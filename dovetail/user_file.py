"""Python files of the user's own: targets, device models, instructions of a core."""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

from dovetail.errors import DovetailError, TargetError

_LONGEST = 200
_OWN = Path(__file__).resolve().parent
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


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


def blamed(error: Exception) -> TargetError | None:
    """The error for what a function of a user's file raised when Dovetail called it, with the line in that file; None
    where the exception comes from anywhere else, which is a bug."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max((number for number, frame in enumerate(frames) if _within(frame.filename, (_OWN,))), default=len(frames))
    called = [frame for frame in frames[last + 1 :] if not _within(frame.filename, _INSTALLED)]
    if not called or called[0] is not frames[last + 1]:
        return None
    origin = called[-1].filename
    path = Path(origin)
    return _refused(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path, origin, error)


def _within(filename: str, folders: tuple[Path, ...]) -> bool:
    """Whether a file lies in one of the folders; what is no file, such as `<string>`, counts as installed."""
    path = Path(filename).resolve()
    return not path.is_file() or any(path.is_relative_to(folder) for folder in folders)
