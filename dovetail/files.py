"""The cache folder, files that are replaced as a whole, and `.npy` data from untrusted files.

Of an array the header is checked before anything is allocated; nothing is executed.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import warnings
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from dovetail.errors import DovetailError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked or removed
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def default_cache() -> Path:
    """The cache folder: DOVETAIL_CACHE, else `dovetail` in the user's cache folder.

    Where it is not there, it is made for the user alone, if it can be.

    Raises:
        DovetailError: another user may write there or above, and what lies there is executed.
    """
    folder = _cache_place().absolute()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix" and folder.is_dir() and (reason := _open_to_others(folder.resolve())):
        hint = "take the right to write from others and own it yourself, or set DOVETAIL_CACHE to another folder"
        raise DovetailError(f"{reason}, and what lies in the cache is executed", where=str(folder), hint=hint)
    return folder


def _open_to_others(folder: Path) -> str:
    """The reason another user may put files into a folder, or replace it; empty where only the administrator may."""
    for place in (folder, *folder.parents):
        state = place.stat()
        if state.st_uid not in (0, os.getuid()):
            return f"{place} belongs to another user (number {state.st_uid})"
        if state.st_mode & 0o002 and (place == folder or not state.st_mode & stat.S_ISVTX):
            return f"any user may write to {place}"
    return ""


def usable_cache(folder: Path) -> Path:
    """A cache folder, made; where nothing can be written to it, one that is there as long as this process, and a
    `CacheWarning` says that work is done again."""
    reason = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            reason = "it cannot be written"
        elif free < LEAST_ROOM:
            reason = f"{free:,} bytes are free there, {LEAST_ROOM:,} are wanted"
    except OSError as error:
        reason = f"it cannot be made: {str(error.strerror).lower()}"
    return Path(_passing_cache(folder, reason).name) if reason else folder.resolve()


@cache
def _passing_cache(instead_of: Path, reason: str) -> TemporaryFolder:
    """A cache folder of this process, and the warning that says so."""
    what = f"{instead_of}: nothing is kept in the cache, so the next command compiles it again; {reason}"
    warnings.warn(f"{what}; DOVETAIL_CACHE names another folder", CacheWarning, stacklevel=3)
    return TemporaryFolder()


class CacheWarning(UserWarning):
    """Nothing is kept in a cache, so the next command takes longer."""


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that is locked as long as it is used: what a killed process left is unlocked, and removed by
    whoever next makes one in the same place.

    Args:
        place: the folder it is made in, where its name is hidden; None for that of temporary files.
    """

    def __init__(self, place: Path | None = None) -> None:
        _remove_abandoned(place or Path(tempfile.gettempdir()))
        super().__init__(prefix=f".{_TEMPORARY}" if place else _TEMPORARY, dir=place, ignore_cleanup_errors=True)
        if (lock := _locked(Path(self.name))) is not None:
            weakref.finalize(self, os.close, lock)


_TEMPORARY = "dovetail-tmp-"
_OURS = re.compile(rf"\.?{_TEMPORARY}[a-z0-9_]{{8}}")
_NEW_SECONDS = 10
"""Seconds a process has to lock a file or folder it has made."""


def _locked(path: Path) -> int | None:
    """A handle that holds a file or folder until it is closed; None where another process holds it."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


_swept: dict[Path, float] = {}
"""Time of the last sweep of each place. A cache may hold 100,000 files: to list them takes as long as a compiler."""


def _remove_abandoned(place: Path) -> None:
    """Remove the user's temporary files and folders that no process holds, unless that was just done."""
    now = time.monotonic()
    if now - _swept.get(place, -math.inf) < _NEW_SECONDS:
        return
    _swept[place] = now
    with contextlib.suppress(OSError):
        for path in [Path(place, name) for name in os.listdir(place) if _TEMPORARY in name and _OURS.fullmatch(name)]:
            with contextlib.suppress(OSError):
                state = path.lstat()
                new = time.time() - state.st_mtime < _NEW_SECONDS
                if new or stat.S_ISLNK(state.st_mode) or state.st_uid != os.getuid():
                    continue
                if (lock := _locked(path)) is not None:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                    os.close(lock)


def _cache_place() -> Path:
    if chosen := os.environ.get("DOVETAIL_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dovetail"
    root = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dovetail"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file at once: whoever reads it finds the old contents or the new, whenever this process ends.

    Folders above it are made where they are missing.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{_TEMPORARY}", dir=path.parent)
    lock = _locked(Path(name))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def keep_file(path: Path, data: bytes) -> None:
    """`replace_file` for a cache, with a digest beside it: where it cannot be written, the next run takes longer, and
    nothing else happens."""
    try:
        replace_file(path, data)
        seal(path)
    except OSError:
        return


def kept_file(path: Path) -> bytes | None:
    """The contents that `keep_file` wrote; None where there are none, or they were changed since."""
    try:
        data = path.read_bytes()
        return data if _seal(path).read_text("utf-8") == _digest(data) else None
    except (OSError, UnicodeDecodeError):
        return None


def kept_answer(package: Path, asked: str, find: Callable[[], bytes]) -> bytes:
    """The answer kept in the cache for a question, else that of `find`, which is kept then.

    Args:
        package: folder of the modules that find it: another text of theirs may find another answer. Its name is that of
            the folder in the cache.
        asked: all the answer depends on, as text.
        find: finds it.
    """
    digest = hashlib.sha256(f"{asked} {text_digest(package)}".encode()).hexdigest()
    place = default_cache() / package.name / f"{digest[:32]}.json"
    if (data := kept_file(place)) is None:
        keep_file(place, data := find())
    return data


@cache
def text_digest(*packages: Path, code_only: bool = False) -> str:
    """A digest of the modules in folders. With `code_only`, docstrings and comments change nothing; it takes ten times
    as long."""
    texts = [source.read_text("utf-8") for package in packages for source in sorted(package.glob("*.py"))]
    return _digest("\0".join(map(_code, texts) if code_only else texts).encode())


def _code(text: str) -> str:
    """A module without the lines of docstrings and comments."""
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [value for value in values if isinstance(value, ast.Constant)]
    told = {line for value in strings for line in range(value.lineno, (value.end_lineno or value.lineno) + 1)}
    lines = enumerate(text.split("\n"), 1)
    return "\n".join(line for number, line in lines if number not in told and line.strip()[:1] not in ("", "#"))


def seal(path: Path) -> None:
    """Write down what a file of a cache holds now, so that `is_sealed` notices whatever changes it; raises OSError."""
    replace_file(_seal(path), _digest(path.read_bytes()).encode())


def is_sealed(path: Path) -> bool:
    """Whether a file is there as it was when it was sealed."""
    return kept_file(path) is not None


def thin_out(folder: Path, most_bytes: int, unused: float = 0) -> None:
    """Remove files of a cache, those changed longest ago first, until those that stay have at most so many bytes.

    Args:
        folder: where they lie, with their seals.
        most_bytes: of all that stay, without seals.
        unused: seconds for which a file must not have changed, as another process may be about to read it.

    Raises:
        OSError: a file was removed by another process.
    """
    files = [path for path in folder.iterdir() if path.suffix != SEAL and path.name[0] != "." and path.is_file()]
    now, room = time.time(), most_bytes
    for path, state in sorted(((path, path.stat()) for path in files), key=lambda one: -one[1].st_mtime_ns):
        room -= state.st_size
        if room < 0 and now - state.st_mtime >= unused:
            for one in (path, _seal(path)):
                one.unlink(missing_ok=True)


def _seal(path: Path) -> Path:
    return path.with_name(path.name + SEAL)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


LEAST_ROOM = 32 << 20
"""Bytes that must be free on the disk of a cache."""
SEAL = ".sha256"
"""Ends the name of the file that holds another's digest."""
MOST_BYTES = 1 << 30
"""Bytes all arrays of an input file may have together."""
MOST_ARRAYS = 1024
"""Arrays an archive may have."""
_MOST_HEADER = 4096


class InputError(DovetailError):
    """An input file that is damaged or does not fit the model."""


def read_npy(
    open_stream: Callable[[], IO[bytes]], size: int, name: str, accept: Callable[[tuple[int, ...], np.dtype[Any]], None]
) -> NDArray[Any]:
    """Read one array of `size` bytes, which `open_stream` opens from their beginning, after `accept` took its header.

    Raises:
        InputError: by `accept`, for a shape and type that is not wanted.
        ValueError: damaged, or it announces more than there is.
    """
    from numpy.lib import format as npy

    with open_stream() as stream:
        version = npy.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"unknown version {version} of the .npy format")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(stream, max_header_size=_MOST_HEADER)
        accept(shape, dtype)
        if (announced := math.prod(shape) * dtype.itemsize) > size:
            raise ValueError(f"'{name}' announces {announced} bytes and has {size}")
    with open_stream() as stream:
        array: NDArray[Any] = npy.read_array(stream, allow_pickle=False, max_header_size=_MOST_HEADER)
    return array


@contextmanager
def open_archive(path: Path, too_large: str) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """An `.npz` and its arrays by name, while the body reads them. Raises InputError where it is none or damaged, or
    for what `_members` refuses; `too_large` is what to do where its arrays are larger than `MOST_BYTES` together."""
    hint = "write it with numpy.savez"
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive, _members(archive, str(path), too_large)
    except zipfile.BadZipFile as error:
        raise InputError(f"not an .npz file: {error}", where=str(path), hint=hint) from None
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise InputError(f"a damaged .npz file: {error}", where=str(path), hint=hint) from None


def _members(archive: zipfile.ZipFile, where: str, hint: str) -> dict[str, zipfile.ZipInfo]:
    """The arrays of an `.npz` by name; raises InputError for too many, too large, or names that are paths."""
    members = archive.infolist()
    if len(members) > MOST_ARRAYS:
        what = f"{len(members)} arrays, the limit is {MOST_ARRAYS}"
        raise InputError(what, where=where, hint=f"write at most {MOST_ARRAYS}")
    total = sum(info.file_size for info in members)
    if total > MOST_BYTES:
        raise InputError(f"{total} bytes, the limit is {MOST_BYTES}", where=where, hint=hint)
    found: dict[str, zipfile.ZipInfo] = {}
    for info in members:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
            what = f"the archive's member '{info.filename}' is a path that leaves the archive"
            raise InputError(what, where=where, hint="write it with numpy.savez")
        name = info.filename.removesuffix(".npy")
        if name in found:
            raise InputError(f"the array '{name}' is there twice", where=where, hint="write it with numpy.savez")
        found[name] = info
    return found
