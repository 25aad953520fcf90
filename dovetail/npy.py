"""Reads `.npy` data from untrusted files: the header is checked before anything is allocated, nothing is executed."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from dovetail.errors import DovetailError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_BYTES = 1 << 30
"""Bytes all arrays of an input file may have together."""
MOST_ARRAYS = 1024
"""Arrays an archive may have."""
_MOST_HEADER = 4096


class InputError(DovetailError):
    """An input file that is damaged or does not fit the model."""


def read_npy(
    open_stream: Callable[[], IO[bytes]],
    size: int,
    name: str,
    accept: Callable[[tuple[int, ...], np.dtype[Any]], None],
) -> NDArray[Any]:
    """Read one array after its header was accepted.

    Args:
        open_stream: opens the data from their beginning.
        size: bytes there are.
        name: for messages.
        accept: raises InputError for a shape and type that is not wanted.

    Raises:
        InputError: by `accept`.
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
        if math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"'{name}' announces {math.prod(shape) * dtype.itemsize} bytes and has {size}")
    with open_stream() as stream:
        array: NDArray[Any] = npy.read_array(stream, allow_pickle=False, max_header_size=_MOST_HEADER)
    return array


def check_archive(archive: zipfile.ZipFile, where: str, hint: str) -> dict[str, zipfile.ZipInfo]:
    """The arrays of an `.npz` by name; raises InputError for too many, too large, or names that are paths."""
    members = archive.infolist()
    if len(members) > MOST_ARRAYS:
        raise InputError(f"{len(members)} arrays, the limit is {MOST_ARRAYS}", where=where,
                         hint=f"write at most {MOST_ARRAYS}")
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
