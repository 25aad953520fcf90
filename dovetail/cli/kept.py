"""Builds that are kept: a second compilation of the same inputs writes the files of the first.

A build is found by the model's path, the target's name, the options, the package's own files, and the folders that
programs and packages are found in. Beside it lies a digest of every file that the compilation read (the model, a target
file and what it imports, pins, calibrations): any other contents, and it is compiled anew.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import file_digest, sha256
from importlib.util import source_from_cache
from pathlib import Path, PurePosixPath
from sysconfig import get_paths
from typing import Any

import msgspec

import dovetail
from dovetail.files import default_cache, keep_file, kept_file, thin_out
from dovetail.notes import Note
from dovetail.options import Options

MOST_BYTES = 256 << 20
"""Bytes of all kept builds together; those that were used longest ago go first. No build has more than 1/16 of them."""
_OF_SYSTEM = tuple(
    Path(name)
    for name in (
        "/proc",
        "/sys",
        "/dev",
        *(get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
"""Files of these folders are no inputs: installed packages are known by the folders they lie in."""


class KeptBuild(msgspec.Struct, frozen=True):
    """A compilation: its inputs, and all it gives."""

    inputs: dict[str, str]
    """Path of every file it read -> SHA-256 of its contents."""
    files: dict[str, bytes]
    """Relative path -> contents."""
    notes: tuple[Note, ...]
    summary: str


@dataclass
class _Reading:
    """The files read while one is asked for; hooks of the interpreter cannot be taken back, so there is one."""

    seen: dict[Path, tuple[int, int]] | None = None
    """By path: when it was changed last, and its bytes. None: nobody asks."""
    is_hooked: bool = False

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a file that is opened for reading."""
        if self.seen is None or event != "open" or not isinstance(arguments[0], str | bytes):
            return
        _, mode, flags = arguments
        if (set("wxa+") & set(mode)) if mode else flags & (os.O_WRONLY | os.O_RDWR):
            return
        path = Path(os.path.abspath(os.fsdecode(arguments[0])))
        if path.suffix == ".pyc":
            with contextlib.suppress(ValueError):
                path = Path(source_from_cache(path))
        with contextlib.suppress(OSError):
            self.seen.setdefault(path, _state(path))


_READING = _Reading()


def _state(path: Path | str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_mtime_ns, state.st_size


@contextmanager
def inputs_of(*known: Path) -> Iterator[dict[str, str]]:
    """The files that the block reads, with digests, and those that are known to be read by other processes; filled at
    its end. A file that changes meanwhile has no digest."""
    if not _READING.is_hooked:
        sys.addaudithook(_READING.hear)
        _READING.is_hooked = True
    _READING.seen, found = {path.absolute(): _state(path) for path in known}, dict[str, str]()
    try:
        yield found
        own = tuple(f"{one}{os.sep}" for one in (*_OF_SYSTEM, Path(dovetail.__file__).parent, default_cache()))
        for path, state in sorted(_READING.seen.items()):
            is_known = any(path == one.absolute() for one in known)
            if path.is_file() and (is_known or not str(path).startswith(own)):
                found[str(path)] = _digest(path) if _state(path) == state else ""
    finally:
        _READING.seen = None


def _digest(path: Path) -> str:
    """SHA-256 of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def place_of(model: Path, target: str, options: Options) -> Path | None:
    """The file of the cache for a build; None for one that is not kept: it is made for more than its files."""
    if options.check or options.save_stages is not None or options.operators or not model.is_file():
        return None
    asked = [(own.name, getattr(options, own.name)) for own in fields(options) if own.name != "tell"]
    package = Path(dovetail.__file__).parent
    own = [
        (os.path.relpath(folder, package), name, _state(os.path.join(folder, name)))
        for folder, _, names in sorted(os.walk(package))
        for name in sorted(names)
        if not name.endswith(".pyc")
    ]
    folders = [(name, os.stat(name).st_mtime_ns) for name in _searched() if os.path.isdir(name)]
    environment = sorted(item for item in os.environ.items() if item[0].startswith("DOVETAIL_"))
    key = repr((os.getcwd(), str(model), target, asked, own, folders, environment, sys.version))
    return default_cache() / "builds" / f"{sha256(key.encode()).hexdigest()[:32]}.msgpack"


def _searched() -> Sequence[str]:
    """The folders that compilers and packages are found in; modules of the working folder are inputs once read."""
    packages = (name for name in sys.path if name not in ("", os.getcwd()))
    return (*os.environ.get("PATH", "").split(os.pathsep), *packages)


def find(place: Path) -> KeptBuild | None:
    """The kept build, if there is one and none of its inputs has changed."""
    if (data := kept_file(place)) is None:
        return None
    try:
        build = msgspec.msgpack.decode(data, type=KeptBuild)
    except msgspec.DecodeError:
        return None
    if not all(_is_inside(name) for name in build.files):
        return None
    if not build.inputs or any(_digest(Path(path)) != digest for path, digest in build.inputs.items()):
        return None
    with contextlib.suppress(OSError):
        os.utime(place)
    return build


def _is_inside(name: str) -> bool:
    """Whether a relative path stays below where it begins."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def keep(place: Path, inputs: Mapping[str, str], folder: Path, notes: tuple[Note, ...], summary: str) -> None:
    """Keep a build that lies in a folder, and give up those used longest ago where they are too many bytes."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if all(inputs.values()) and sum(path.stat().st_size for path in paths) <= MOST_BYTES // 16:
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        with contextlib.suppress(UnicodeEncodeError):  # of a file name that is no UTF-8
            keep_file(place, msgspec.msgpack.encode(KeptBuild(dict(inputs), files, notes, summary)))
        with contextlib.suppress(OSError):  # another compile thins it out too
            thin_out(place.parent, MOST_BYTES)
