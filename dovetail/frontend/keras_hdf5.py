"""HDF5 files as Keras writes them: read in a process of their own, every declared size checked first, no link followed.

The HDF5 library loops without end, or writes where it must not, on some damaged files. So it runs in a worker, which
sends back plain arrays and texts; one that dies or takes too long is a damaged file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dovetail.errors import MissingExtraError, ModelError
from dovetail.graph.types import Array

SECONDS = 20.0
"""Longest time the worker may take for a small file."""

BYTES_PER_SECOND = 8 * 2**20
"""How much longer it may take for a large one."""

SPOILT = "copy or save the model again"


@dataclass(frozen=True)
class Contents:
    """What an HDF5 file holds of a model. Paths have no slash at their ends; the root is empty."""

    name: str
    """The file, for messages."""
    members: Mapping[str, tuple[str, ...]]
    """Names inside each group."""
    texts: Mapping[str, tuple[str, ...]]
    """Attributes that are texts, at `path@name`."""
    arrays: Mapping[str, Array]
    """Datasets, float32."""
    refused: Mapping[str, tuple[str, str]]
    """What could not be read, and why: the fault, and what to do."""

    def has(self, path: str) -> bool:
        """True when there is a group at `path`; raises ModelError where the way there could not be read."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            self._check("/".join(parts[:count]))
        return path in self.members

    def array(self, path: str) -> Array:
        """A dataset.

        Raises:
            ModelError: there is none, it could not be read, or holds NaN or infinite numbers.
        """
        self.has(path)
        if path not in self.arrays:
            raise self._refuse(path, "the file holds no such weights")
        if not np.isfinite(self.arrays[path]).all():
            raise self._refuse(path, "the weights hold NaN or infinite numbers", "train or save the model again")
        return self.arrays[path]

    def names(self, path: str, name: str) -> list[str]:
        """The names an attribute lists; Keras splits a long list into attributes name0, name1, ..."""
        first = f"{path}@{name}"
        self._check(first)
        if first in self.texts:
            return [*self.texts[first]]
        found: list[str] = []
        count = 0
        while f"{first}{count}" in self.texts or f"{first}{count}" in self.refused:
            self._check(f"{first}{count}")
            found += self.texts[f"{first}{count}"]
            count += 1
        return found

    def text(self, path: str, name: str) -> str | None:
        """The one text of an attribute, None where there is none."""
        found = self.names(path, name)
        if len(found) > 1:
            raise self._refuse(f"{path}@{name}", f"the attribute has {len(found)} values, expected 1")
        return found[0] if found else None

    def _check(self, path: str) -> None:
        if path in self.refused:
            raise self._refuse(path, *self.refused[path])

    def _refuse(self, path: str, what: str, hint: str = SPOILT) -> ModelError:
        return ModelError(what, where=f"{self.name}, /{path}", hint=hint)


def read_hdf5(name: str, data: bytes) -> Contents:
    """Read a file in a worker.

    Args:
        name: the file's name, for messages.
        data: its bytes.

    Raises:
        MissingExtraError: h5py is not installed.
        ModelError: the file is damaged.
        RuntimeError: a bug in the worker; the message is its traceback.
    """
    if sys.modules.get("h5py", find_spec) is None or find_spec("h5py") is None:
        raise MissingExtraError("h5py", "keras", "reading a Keras model")
    # The worker finds the same packages; -P keeps the current folder out of its path.
    paths = [str(Path(__file__).resolve().parents[2]), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "dovetail.frontend.keras_hdf5_worker"]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, env=environment, timeout=SECONDS + len(data) / BYTES_PER_SECOND
        )
    except subprocess.TimeoutExpired:
        raise ModelError("the file is damaged: reading it comes to no end", where=name, hint=SPOILT) from None
    if done.returncode < 0:
        what = f"the file is damaged: the HDF5 library died of it (signal {-done.returncode})"
        raise ModelError(what, where=name, hint=SPOILT)
    if done.returncode:
        raise RuntimeError(f"in the worker that reads HDF5:\n{done.stderr.decode(errors='replace')}")
    return decoded(name, done.stdout)


def encoded(contents: Contents) -> bytes:
    """Contents as bytes: the length of the head, the head, the elements of all arrays."""
    shapes = {path: array.shape for path, array in contents.arrays.items()}
    head = [contents.members, contents.texts, shapes, contents.refused]
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in contents.arrays.values())])


def decoded(name: str, data: bytes) -> Contents:
    """The inverse of `encoded`; raises ModelError when the whole file could not be read."""
    size = 8 + int.from_bytes(data[:8], "little")
    members, texts, shapes, refused = json.loads(data[8:size])
    arrays, place = {}, size
    for path, shape in shapes.items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[path] = np.frombuffer(data, np.float32, count, place).reshape(shape)
        place += 4 * count
    return checked(Contents(name, members, texts, arrays, refused))


def checked(contents: Contents) -> Contents:
    """The contents, unless the root could not be read."""
    if "" in contents.refused:
        what, hint = contents.refused[""]
        raise ModelError(what, where=contents.name, hint=hint)
    return contents
