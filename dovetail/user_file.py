"""Python files of the user's own: targets, device models, instructions of a core."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
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
    found = importlib.util.spec_from_file_location(f"{path.stem} of {path.resolve().parent}", path)
    if found is None or found.loader is None or not path.is_file():
        raise TargetError("there is no such Python file", where=str(path), hint="check the spelling; it ends in .py")
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)  # where dataclasses look for types
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


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Say in an exception what a function of the user's was asked for, e.g. "the cycles of convolution for conv_4"."""
    try:
        yield
    except Exception as error:
        error.add_note(f"when asked for {what}")
        raise


def blamed(error: Exception) -> TargetError | None:
    """The error for what a function of a user's file raised when Dovetail called it, or what Dovetail raised when that
    function called it: with the lines in the user's files, and what was asked; None where none of those was running."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [_within(frame.filename, (_OWN,)) for frame in frames]
    begin = own.index(True) if True in own else len(frames)
    theirs = [
        frame
        for frame, ours in zip(frames[begin:], own[begin:], strict=True)
        if not ours and not _within(frame.filename, _INSTALLED)
    ]
    if not theirs:
        return None
    told = _refused(_near(theirs[-1].filename), theirs[-1].filename, error)
    asked = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    inside = f", in dovetail's {frames[-1].name}" if own[-1] else ""
    lines = [f"  {_near(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}" for frame in theirs]
    return TargetError("\n".join((told.what + inside + asked, *lines)), where=told.where, hint=told.hint)


def _near(filename: str) -> Path:
    """A file as seen from the current folder."""
    path = Path(filename)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _within(filename: str, folders: tuple[Path, ...]) -> bool:
    """Whether a file lies in one of the folders; what is no file, such as `<string>`, counts as installed."""
    path = Path(filename).resolve()
    return not path.is_file() or any(path.is_relative_to(folder) for folder in folders)
