"""HDF5 files as Keras writes them, read with every declared size checked first and no link followed out of the file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.errors import MissingExtraError, ModelError
from dovetail.graph.types import Array

if TYPE_CHECKING:
    import h5py

MAX_NAMES = 1 << 16
"""Most names in one list of layers or weights."""

MAX_DEPTH = 64
"""Most groups inside one another."""

BROKEN = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""What h5py raises for damaged files."""

_READABLE = ("float16", "float32", "float64")


def heaps_end(data: bytes) -> bool:
    """True when every walk through a global heap of an HDF5 file comes to its end.

    HDF5 2.0 walks without end over a heap object that takes no room, or so much that sizes wrap. The format: "GCOL",
    version 1, 3 bytes, the heap's bytes; then objects of index (2 bytes), references (2), 4 bytes, size; each padded
    to 8 bytes, but the free space, index 0, whose size counts its head (HDF5 File Format Specification, III.E).
    """
    steps, place = 0, data.find(b"GCOL\x01")
    while place >= 0:
        end = place + int.from_bytes(data[place + 8 : place + 16], "little")
        here = place + 16
        while here + 16 <= min(end, len(data)):
            index, size = (int.from_bytes(data[here + at : here + at + count], "little") for at, count in ((0, 2), (8, 8)))
            step = size if index == 0 else 16 + (size + 7) // 8 * 8
            steps += 1
            if step < 16 or here + step > end or steps > len(data):
                return False
            here += step
        place = data.find(b"GCOL\x01", place + 1)
    return True


class Hdf5File:
    """One HDF5 file in memory. Groups are reached by hard links only."""

    def __init__(self, name: str, data: bytes) -> None:
        """Open it.

        Args:
            name: the file's name, for messages.
            data: its bytes.

        Raises:
            MissingExtraError: h5py is not installed.
            ModelError: the file is damaged.
        """
        try:
            import h5py
        except ImportError as error:
            raise MissingExtraError("h5py", "keras", "Reading a Keras model") from error
        wide = data[13:15] if data[8:9] in (b"\x00", b"\x01") else data[9:11]
        if wide != b"\x08\x08" or not heaps_end(data):
            raise ModelError("the file is damaged: its heaps have no end", where=name, hint="copy or save the model again")
        self._h5py = h5py
        self.name = name
        self._left = len(data)
        """Bytes of weights not read yet: no file holds more of them than its size."""
        try:
            self.root = h5py.File(io.BytesIO(data), "r")
        except BROKEN as error:
            raise self.refuse("", f"the file is damaged: {_brief(error)}", "copy or save the model again") from error

    def refuse(self, place: str, what: str, hint: str = "") -> ModelError:
        """The error for something at `place` of the file that cannot be read."""
        return ModelError(what, where=f"{self.name}, {place}" if place else self.name, hint=hint)

    def group(self, parent: h5py.Group, path: str) -> h5py.Group | None:
        """The group at `path` below another, None where there is none."""
        found = self._find(parent, path)
        if found is not None and not isinstance(found, self._h5py.Group):
            raise self.refuse(_inside(parent, path), "this is not a group of weights")
        return found

    def array(self, parent: h5py.Group, path: str) -> Array:
        """The float32 elements of a dataset, every limit checked before a byte of them is read."""
        place = _inside(parent, path)
        found = self._find(parent, path)
        if found is None or not isinstance(found, self._h5py.Dataset):
            raise self.refuse(place, "the file holds no such weights")
        try:
            self._check(found, place)
            array = np.asarray(found[()], dtype=np.float32)
        except BROKEN as error:
            raise self.refuse(place, f"the weights are damaged: {_brief(error)}") from error
        if not np.isfinite(array).all():
            raise self.refuse(place, "the weights hold NaN or infinite numbers", "train or save the model again")
        return array

    def _check(self, dataset: h5py.Dataset, place: str) -> None:
        """Refuse a dataset that is not plain numbers lying in this file."""
        plist = dataset.id.get_create_plist()
        if dataset.is_virtual or plist.get_external_count():
            raise self.refuse(place, "the weights lie in another file, which is not read", "save them in one file")
        if dataset.shape is None or dataset.dtype.name not in _READABLE:
            raise self.refuse(place, f"the weights are of the type {dataset.dtype}; read are {', '.join(_READABLE)}")
        if plist.get_nfilters():
            raise self.refuse(place, "the weights are compressed, as Keras never writes them", "h5repack -f NONE")
        size, chunk = dataset.size * dataset.dtype.itemsize, dataset.dtype.itemsize
        for length in dataset.chunks or ():
            chunk *= length
        stored = dataset.id.get_storage_size()
        if max(size, chunk) > self._left or stored < size:
            what = f"the weights {list(dataset.shape)} have {max(size, chunk)} bytes; the file holds {stored} of them"
            raise self.refuse(place, what)
        self._left -= size

    def texts(self, group: h5py.Group, name: str) -> list[str]:
        """The names an attribute lists; Keras splits a long list into attributes name0, name1, ..."""
        if self._has(group, name):
            return self._texts(group, name)
        found: list[str] = []
        for part in range(MAX_NAMES):
            if not self._has(group, f"{name}{part}"):
                break
            found += self._texts(group, f"{name}{part}")
        return found

    def text(self, group: h5py.Group, name: str) -> str | None:
        """The one text of an attribute, None where there is none."""
        if not self._has(group, name):
            return None
        found = self._texts(group, name)
        if len(found) != 1:
            raise self.refuse(_inside(group, f"@{name}"), f"the attribute has {len(found)} values, expected 1")
        return found[0]

    def size(self, group: h5py.Group) -> int:
        """How many entries a group has."""
        try:
            return len(group)
        except BROKEN as error:
            raise self.refuse(str(group.name), f"the file is damaged: {_brief(error)}") from error

    def _has(self, group: h5py.Group, name: str) -> bool:
        """True when the group has this attribute."""
        try:
            return name in group.attrs
        except BROKEN as error:
            raise self.refuse(_inside(group, f"@{name}"), f"the file is damaged: {_brief(error)}") from error

    def _texts(self, group: h5py.Group, name: str) -> list[str]:
        place = _inside(group, f"@{name}")
        try:
            handle = group.attrs.get_id(name)
            count = int(np.prod(handle.shape, dtype=object)) if handle.shape is not None else 0
            if count > MAX_NAMES:
                raise self.refuse(place, f"the attribute lists {count} names; the limit is {MAX_NAMES}")
            if count == 0:
                return []
            values: list[Any] = np.asarray(group.attrs[name], dtype=object).reshape(-1).tolist()
        except BROKEN as error:
            raise self.refuse(place, f"the attribute is damaged: {_brief(error)}") from error
        try:
            raw = [value if isinstance(value, bytes) else str(value).encode() for value in values]
            return [value.decode() for value in raw]
        except UnicodeError as error:
            raise self.refuse(place, "the attribute is no text") from error

    def _find(self, parent: h5py.Group, path: str) -> Any:
        """What lies at `path` below a group, reached step by step over hard links."""
        here: Any = parent
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if len(parts) > MAX_DEPTH:
            raise self.refuse(_inside(parent, path)[:200], f"more than {MAX_DEPTH} groups lie inside one another")
        for part in parts:
            if not isinstance(here, self._h5py.Group):
                return None
            try:
                link = here.get(part, getlink=True)
                if link is None:
                    return None
                if not isinstance(link, self._h5py.HardLink):
                    raise self.refuse(_inside(here, part), f"this is a {type(link).__name__}, which is not followed")
                here = here[part]
            except BROKEN as error:
                raise self.refuse(_inside(here, part), f"the file is damaged: {_brief(error)}") from error
        return here


def _inside(group: h5py.Group, path: str) -> str:
    return f"{group.name or ''}/{path}".replace("//", "/")


def _brief(error: Exception) -> str:
    """The first line of another library's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
