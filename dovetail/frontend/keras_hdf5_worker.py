"""The process that reads an HDF5 file: bytes on standard input, `Contents` on standard output."""

from __future__ import annotations

import io
import sys
from typing import Any

import h5py
import numpy as np

from dovetail.frontend.keras_hdf5 import SPOILT, Contents, encoded
from dovetail.graph.types import Array

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
"""What h5py raises for damaged files."""

READABLE = ("float16", "float32", "float64")


class _Refusal(Exception):
    """Something that is not read: the fault, and what to do."""


class Reader:
    """One pass over a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = len(data)
        """Bytes of weights not read yet: no file holds more of them than its size."""
        self._objects = 0
        self.members: dict[str, tuple[str, ...]] = {}
        self.texts: dict[str, tuple[str, ...]] = {}
        self.arrays: dict[str, Array] = {}
        self.refused: dict[str, tuple[str, str]] = {}

    def read(self, name: str) -> Contents:
        """Everything there is; what cannot be read is noted, not raised."""
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
        try:
            link = parent.get(name, getlink=True)
            if link is None:
                return
            if not isinstance(link, h5py.HardLink):
                raise _Refusal(f"this is a {type(link).__name__}, which is not followed", SPOILT)
            self._objects += 1
            if self._objects > MAX_OBJECTS or path.count("/") >= MAX_DEPTH:
                what = f"the file has more than {MAX_OBJECTS} objects, or {MAX_DEPTH} inside one another"
                raise _Refusal(what, SPOILT)
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
            what = f"the weights are of the type {kind}; read are {', '.join(READABLE)}"
            raise _Refusal(what, "save them as float32")
        if plist.get_nfilters():
            raise _Refusal("the weights are compressed, as Keras never writes them", "h5repack -f NONE")
        size, chunk = dataset.size * kind.itemsize, kind.itemsize
        for length in dataset.chunks or ():
            chunk *= length
        stored = dataset.id.get_storage_size()
        if max(size, chunk) > self._left or stored < size:
            what = f"the weights {list(dataset.shape)} have {max(size, chunk)} bytes; the file holds {stored} of them"
            raise _Refusal(what, SPOILT)
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
    """Read the file on standard input."""
    data = sys.stdin.buffer.read()
    _limit_memory(len(data))
    sys.stdout.buffer.write(encoded(Reader(data).read("")))


if __name__ == "__main__":
    main()
