"""HDF5 files as Keras writes them: read in a process of their own, every declared size checked first, no link followed.

The HDF5 library loops without end, or writes where it must not, on some damaged files. So it runs in a worker, which
sends back plain arrays and texts; one that dies or takes too long is a damaged file.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import MissingExtraError, ModelError
from dovetail.ir.types import Array

SECONDS = 20.0
"""Longest time the worker may take for a small file."""

BYTES_PER_SECOND = 8 * 2**20
"""How much longer it may take for a large one."""

SPOILT = "copy or save the model again"


@dataclass(frozen=True)
class Contents:
    """Contents of an HDF5 model file. Paths have no slash at their ends; the root is empty."""

    name: str
    """The file, for messages."""
    members: Mapping[str, tuple[str, ...]]
    """Names inside each group."""
    texts: Mapping[str, tuple[str, ...]]
    """Attributes that are texts, at `path@name`."""
    arrays: Mapping[str, Array]
    """Datasets, float32."""
    refused: Mapping[str, tuple[str, str]]
    """Parts that could not be read: the fault, and what to do."""

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
        first, parts = f"{path}@{name}", list[Sequence[str]]()
        self._check(first)
        if first in self.texts:
            return [*self.texts[first]]
        while f"{first}{len(parts)}" in self.texts or f"{first}{len(parts)}" in self.refused:
            self._check(f"{first}{len(parts)}")
            parts.append(self.texts[f"{first}{len(parts)}"])
        return [name for part in parts for name in part]

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
    """Read the bytes of the file `name` in a worker.

    Raises:
        MissingExtraError: h5py is not installed.
        ModelError: the file is damaged.
        RuntimeError: a bug in the worker; the message is its traceback.
    """
    if sys.modules.get("h5py", find_spec) is None or find_spec("h5py") is None:
        raise MissingExtraError("h5py", "keras", "reading a Keras model")
    # The worker finds the same packages; -P keeps the current folder out of its path.
    paths = [str(Path(__file__).resolve().parents[3]), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
    try:
        longest = SECONDS + len(data) / BYTES_PER_SECOND
        done = subprocess.run(command, input=data, capture_output=True, env=environment, timeout=longest)
    except subprocess.TimeoutExpired:
        raise ModelError("the file is damaged: reading it comes to no end", where=name, hint=SPOILT) from None
    if done.returncode < 0:
        what = f"the file is damaged: the HDF5 library died of it (signal {-done.returncode})"
        raise ModelError(what, where=name, hint=SPOILT)
    if done.returncode:
        raise RuntimeError(f"in the worker that reads HDF5:\n{done.stderr.decode(errors='replace')}")
    # The length of the head, the head, the elements of all arrays.
    size = 8 + int.from_bytes(done.stdout[:8], "little")
    members, texts, shapes, refused = json.loads(done.stdout[8:size])
    arrays, place = {}, size
    for path, shape in shapes.items():
        arrays[path] = np.frombuffer(done.stdout, np.float32, prod(shape), place).reshape(shape)
        place += 4 * prod(shape)
    return checked(Contents(name, members, texts, arrays, refused))


def encoded(contents: Contents) -> bytes:
    """Contents as bytes: the length of the head, the head, the elements of all arrays."""
    shapes = {path: array.shape for path, array in contents.arrays.items()}
    head = [contents.members, contents.texts, shapes, contents.refused]
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in contents.arrays.values())])


def checked(contents: Contents) -> Contents:
    """The contents, unless the root could not be read."""
    if "" in contents.refused:
        what, hint = contents.refused[""]
        raise ModelError(what, where=contents.name, hint=hint)
    return contents


# In the worker

ROOTS = ("model_weights", "layers", "_layer_checkpoint_dependencies", "vars")
"""Groups that hold a model's weights; an optimizer's are left alone."""

MAX_NAMES = 1 << 16
"""Most names in one attribute."""

MAX_OBJECTS = 1 << 18
"""Most groups and datasets."""

MAX_DEPTH = 64
"""Most groups inside one another."""

MAX_MEMORY = 4 * 2**30
"""Bytes the process may take, beside what the file's size needs."""

BROKEN = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions of h5py for damaged files."""

READABLE = ("float16", "float32", "float64")


class _Refusal(Exception):
    """Something that is not read: the fault, and what to do."""


class Hdf5Reader:
    """One pass over a file."""

    def __init__(self, data: bytes) -> None:
        self._data, self._objects = data, 0
        self._left = len(data)
        """Bytes of weights not read yet: no file holds more of them than its size."""
        self.members: dict[str, tuple[str, ...]] = {}
        self.texts: dict[str, tuple[str, ...]] = {}
        self.arrays: dict[str, Array] = {}
        self.refused: dict[str, tuple[str, str]] = {}

    def read(self, name: str) -> Contents:
        """Everything there is; what cannot be read is noted, not raised."""
        import h5py

        try:
            with h5py.File(io.BytesIO(self._data), "r") as file:
                self._attributes(file, "")
                for root in ROOTS:
                    self._visit(file, root, root)
        except BROKEN as error:
            self.refused[""] = (f"the file is damaged: {_brief(error)}", SPOILT)
        return Contents(name, self.members, self.texts, self.arrays, self.refused)

    def _visit(self, parent: Any, name: str, path: str) -> None:
        """A member of a group, and all inside it, if a hard link leads there."""
        import h5py

        try:
            link = parent.get(name, getlink=True)
            if link is None:
                return
            if not isinstance(link, h5py.HardLink):
                raise _Refusal(f"this is a {type(link).__name__}, which is not followed", SPOILT)
            self._objects += 1
            if self._objects > MAX_OBJECTS or path.count("/") >= MAX_DEPTH:
                limits = f"{MAX_OBJECTS} objects, or {MAX_DEPTH} inside one another"
                raise _Refusal(f"the file has more than {limits}", SPOILT)
            found = parent[name]
            if isinstance(found, h5py.Dataset):
                self.arrays[path] = self._array(found)
                return
            self.members[path] = tuple(str(key) for key in found)
            self._attributes(found, path)
            for key in self.members[path]:
                self._visit(found, key, f"{path}/{key}")
        except _Refusal as refusal:
            self.refused[path] = (refusal.args[0], refusal.args[1])
        except BROKEN as error:
            self.refused[path] = (f"the file is damaged: {_brief(error)}", SPOILT)

    def _array(self, dataset: Any) -> Array:
        """A dataset's elements, if they are plain numbers lying in this file."""
        plist, kind = dataset.id.get_create_plist(), dataset.dtype
        if dataset.is_virtual or plist.get_external_count():
            raise _Refusal("the weights lie in another file, which is not read", "save them in one file")
        if dataset.shape is None or kind.name not in READABLE:
            known = ", ".join(READABLE)
            raise _Refusal(f"the weights are of the type {kind}; read are {known}", "save them as float32")
        if plist.get_nfilters():
            raise _Refusal("the weights are compressed, as Keras never writes them", "h5repack -f NONE")
        size, chunk = dataset.size * kind.itemsize, kind.itemsize * prod(dataset.chunks or ())
        stored, most = dataset.id.get_storage_size(), max(size, chunk)
        if most > self._left or stored < size:
            what = f"the weights {list(dataset.shape)} have {most} bytes"
            raise _Refusal(f"{what}; the file holds {stored} of them", SPOILT)
        self._left -= size
        return np.ascontiguousarray(dataset[()], dtype=np.float32).reshape(dataset.shape)

    def _attributes(self, group: Any, path: str) -> None:
        """The attributes that say what a model is made of."""
        for name in group.attrs:
            if not name.startswith(("model_config", "keras_version", "weight_names")):
                continue
            try:
                self.texts[f"{path}@{name}"] = self._texts(group, name)
            except _Refusal as refusal:
                self.refused[f"{path}@{name}"] = (refusal.args[0], refusal.args[1])
            except BROKEN as error:
                self.refused[f"{path}@{name}"] = (f"the attribute is damaged: {_brief(error)}", SPOILT)

    def _texts(self, group: Any, name: str) -> tuple[str, ...]:
        """One attribute's texts."""
        shape = group.attrs.get_id(name).shape
        count = int(np.prod(shape, dtype=object)) if shape is not None else 0
        if count > MAX_NAMES:
            raise _Refusal(f"the attribute lists {count} names; the limit is {MAX_NAMES}", SPOILT)
        values = np.asarray(group.attrs[name], dtype=object).reshape(-1).tolist() if count else []
        raw = [value if isinstance(value, bytes) else str(value).encode() for value in values]
        return tuple(value.decode() for value in raw)


def _brief(error: Exception) -> str:
    """The first line of another library's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _limit_memory(size: int) -> None:
    """Let the system refuse memory beyond what a file of this size can need, where it can."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    wanted, (_, most) = MAX_MEMORY + 8 * size, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def main() -> None:
    """The worker: reads a file on standard input, writes its `Contents` to standard output."""
    data = sys.stdin.buffer.read()
    _limit_memory(len(data))
    sys.stdout.buffer.write(encoded(Hdf5Reader(data).read("")))
