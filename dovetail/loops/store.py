"""Keeps scheduled procedures between runs: making one takes seconds, reading its text back a hundredth of one."""

from __future__ import annotations

import ast
import hashlib
import os
import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.loops.printing import procedure_text
from dovetail.loops.text import Procedure, exo, functions

_REFUSED = (ast.Attribute, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr)
"""What no procedure needs and a tampered file might use, since Exo evaluates the names of memories."""


def stored(key: str, folder: Path, make: Callable[[], Procedure], scope: Mapping[str, Any]) -> Procedure:
    """The procedure that `make` gives, from the folder if an earlier run has left it there.

    Whether it was there or not, the procedure has been through its text, so that nothing depends on it; what it is
    derived from is forgotten. A file that is damaged is ignored and written anew; a folder that cannot be written is
    no error, the next run only takes longer.

    Args:
        key: everything the result depends on beside Exo and this package, e.g. the algorithm and the schedule's text.
        folder: where procedures are kept, made when it is missing.
        make: the schedule.
        scope: memories and instructions the result uses, by name.
    """
    path = folder / f"{_digest(' '.join((version('exo-lang'), _package(), key)))}.loops"
    found = _read(path, scope)
    if found is not None:
        return found
    made = make()
    text = procedure_text(made)
    try:
        again = parsed(text, scope)
    except Exception:  # a name of the procedure hides one of the scope, say; then it is not kept
        return made
    if procedure_text(again) != text:  # Exo has a construct that it does not print as it reads it
        return made
    _write(path, text)
    return again


def parsed(text: str, scope: Mapping[str, Any]) -> Procedure:
    """A procedure that was printed before, type-checked; what was proven of it then is not proven again.

    Raises:
        Exception: the text is no procedure, or uses a name that is not in the scope.
    """
    package = exo()
    from exo.API import Procedure as Made
    from exo.core.prelude import SrcInfo
    from exo.frontend.pyparser import Parser
    from exo.frontend.typecheck import TypeChecker

    (function,) = ast.parse(text).body
    for node in ast.walk(function):
        if isinstance(node, _REFUSED) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            raise ValueError(f"line {getattr(node, 'lineno', 1)} is not of a procedure")
    names = {"__builtins__": {}, "DRAM": package.DRAM, **functions(), **scope}
    place = SrcInfo("<stored loops>", 1, 1, 1, 1)
    parser = Parser(function, lambda node: place, func_globals=names, srclocals=ChainMap(), as_func=True)
    return Made(TypeChecker(parser.result()).get_loopir())


def _read(path: Path, scope: Mapping[str, Any]) -> Procedure | None:
    """What a file holds; None when it is not there or not as it was written."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if digest != _digest(text):
        return None
    try:
        return parsed(text, scope)
    except Exception:  # whatever Exo finds wrong with it, it is made anew
        return None


def _write(path: Path, text: str) -> None:
    """Write a file at once, so that no other process reads a part of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(f"{_digest(text)}\n{text}")
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _package() -> str:
    """Digest of this package's own source."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return _digest("".join(file.read_text(encoding="utf-8") for file in files))
