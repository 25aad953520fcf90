"""What all tests would do again and again: answered from what was found before, or without what nobody asks for."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dovetail.codegen.build import toolchain
from dovetail.files import is_sealed, keep_file, kept_file, replace_file, seal

FRAMES = inspect.stack, inspect.getframeinfo
"""As Python has them."""


HOST = toolchain.compile_host
"""The compiler for this computer, as users run it."""
RUN = toolchain._CompileContext._run
"""The compiler itself, for tests of the cache."""


def run_once(folder: Path, zig: Path) -> Callable[[toolchain._CompileContext, Sequence[str], Path], None]:
    """What stands for `_Work._run`: the compiler's files, by their content address, from an earlier run of it where
    there was one that succeeded.

    Args:
        folder: where they are kept.
        zig: where zig keeps the libraries it makes for itself, some seconds for each core; a folder that stays.
    """
    if zig.is_symlink():  # of an earlier version of this
        zig.unlink(missing_ok=True)
    zig.mkdir(parents=True, exist_ok=True)

    def once(work: toolchain._CompileContext, arguments: Sequence[str], made: Path) -> None:
        """As `_Work._run`."""
        with contextlib.suppress(FileExistsError):
            (work.cache / "zig").symlink_to(zig)
        names = [made.with_suffix(".su").name, made.name]  # what was asked for last: where it is, all is
        if not is_sealed(folder / made.name):
            RUN(work, arguments, made)
            for name in names:
                if (data := kept_file(made.with_name(name))) is not None:
                    keep_file(folder / name, data)
            return
        for name in names:
            if (data := kept_file(folder / name)) is not None:
                replace_file(made.with_name(name), data)
                made.with_name(name).chmod(0o644)
                seal(made.with_name(name))

    return once


def hastily(*args: Any, flags: Sequence[str] = ("-O2",), defines: Any = None, **options: Any) -> Path:
    """As `compile_host`; networks are optimised less: what is run once takes longer to optimise than to run. Commands
    in processes of their own optimise as users' do."""
    if "DOVETAIL_HOST" in (defines or {}):
        flags = ["-O1" if flag == "-O2" else flag for flag in flags]
    return HOST(*args, flags=flags, defines=defines, **options)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills, shared by all processes that run tests: a fixture of a module is otherwise made in
    each process that runs one of the module's tests.

    Args:
        factory: the fixture `tmp_path_factory`.
        name: the folder's name, the same in every process.
        make: fills the folder; if it raises, the next process tries again.
    """
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, filled = base / name, base / f"{name}.filled"
    with (base / f"{name}.lock").open("w") as lock:
        if os.name == "posix":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            filled.touch()
    return folder


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Let Exo find its callers' names without their text, and its solver without looking for others.

    `inspect.stack` reads a line of the source of each of a test's sixty callers, for which it looks through all
    modules; Exo wants two of the frames, as they are.
    """
    patch.setattr(inspect, "stack", callers)
    patch.setattr(inspect, "getframeinfo", place)
    try:
        from pysmt.factory import Factory
    except ImportError:
        return
    made, known = Factory.__init__, list[dict[str, Any]]()

    def again(self: Any, environment: Any, *rest: Any, **options: Any) -> None:
        """As `Factory.__init__`: which solvers are installed is looked up once."""
        if rest or options:
            return made(self, environment, *rest, **options)
        if not known:
            made(self, environment)
            known.append({name: value for name, value in vars(self).items() if name != "environment"})
        found = {name: value.copy() if isinstance(value, dict | list) else value for name, value in known[0].items()}
        vars(self).update(found, environment=environment)
        return None

    patch.setattr(Factory, "__init__", again)


def callers(context: int = 1) -> list[Any]:
    """As `inspect.stack`; for Exo without text."""
    frame: FrameType | None = sys._getframe(1)
    if not _of_exo(frame):
        return FRAMES[0](context)[1:]
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return found


def place(frame: Any, context: int = 1) -> Any:
    """As `inspect.getframeinfo`; for Exo without text."""
    if not _of_exo(sys._getframe(1)):
        return FRAMES[1](frame, context)
    return inspect.Traceback(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None)


def _of_exo(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("exo.")
