"""HDF5 files as Keras writes them: read in a process of their own, every declared size checked first, no link followed.

The HDF5 library loops without end, or writes where it must not, on some damaged files. So it runs in a worker, which
sends back plain arrays and texts; one that dies or takes too long is a damaged file.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate, count
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from dovetail.errors import MissingExtraError, ModelError
from dovetail.ir.types import Array, Shape
from dovetail.records import Record

SECONDS = 20.0
"""Longest time the worker may take for a small file."""

BYTES_PER_SECOND = 8 * 2**20
"""How much longer it may take for a large one."""

SPOILT = "copy or save the model again"


class RefusedPart(msgspec.Struct, frozen=True, tag=True):
    """A part of a file that could not be read: the fault, and what to do."""

    what: str
    hint: str = SPOILT


class Dataset(msgspec.Struct, frozen=True, tag=True):
    """A dataset: float32, row by row."""

    shape: Shape
    data: bytes


Part = RefusedPart | Dataset | list[str]
"""The contents of a path: names inside a group and texts of an attribute are lists."""

T = TypeVar("T")


class Contents(Record):
    """Contents of an HDF5 model file; raises ModelError if its root could not be read."""

    name: str
    """The file, for messages."""
    parts: Mapping[str, Part]
    """By their paths, which have no slash at their ends; the root is empty. An attribute is at `path@name`."""

    def __post_init__(self) -> None:
        root = self.parts.get("")
        if isinstance(root, RefusedPart):
            raise ModelError(root.what, where=self.name, hint=root.hint)

    def members(self, path: str) -> list[str] | None:
        """Names inside the group at `path`, None where there is none.

        Raises:
            ModelError: it could not be read, or the way there.
        """
        for prefix in accumulate(path.split("/"), "{}/{}".format):
            found = self._at(prefix, list)
        return found

    def array(self, path: str) -> Array:
        """A dataset.

        Raises:
            ModelError: there is none, it could not be read, or holds NaN or infinite numbers.
        """
        self.members(path)
        found = self._at(path, Dataset)
        if found is None:
            raise self._refuse(path, "the file holds no such weights")
        array = np.frombuffer(found.data, np.float32).reshape(found.shape)
        if not np.isfinite(array).all():
            raise self._refuse(path, "the weights hold NaN or infinite numbers", "train or save the model again")
        return array

    def names(self, path: str, name: str) -> list[str]:
        """The names an attribute lists; Keras splits a long list into attributes name0, name1, ..."""
        self.members(path)
        first = self._at(f"{path}@{name}", list)
        later = (self._at(f"{path}@{name}{number}", list) for number in count())
        return first or [text for part in iter(later.__next__, None) for text in part]

    def text(self, path: str, name: str) -> str | None:
        """The one text of an attribute, None where there is none."""
        found = self.names(path, name)
        if len(found) > 1:
            raise self._refuse(f"{path}@{name}", f"the attribute has {len(found)} values, expected 1")
        return found[0] if found else None

    def _at(self, path: str, kind: type[T]) -> T | None:
        """The contents of a path, if it is of this kind."""
        found = self.parts.get(path)
        if isinstance(found, RefusedPart):
            raise self._refuse(path, found.what, found.hint)
        return found if isinstance(found, kind) else None

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
    return Contents(name, msgspec.msgpack.decode(done.stdout, type=dict[str, Part]))


# In the worker

ROOTS = ("model_weights", "layers", "_layer_checkpoint_dependencies", "vars")
"""Groups that hold a model's weights; an optimizer's are left alone."""

SEPARATOR = "\\"
"""Between the folders of a path on Windows."""

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
        self._parts: dict[str, Part] = {}

    def read(self) -> Mapping[str, Part]:
        """Everything there is; what cannot be read is noted, not raised."""
        import h5py

        with self._noting(""), h5py.File(io.BytesIO(self._data), "r") as file:
            self._attributes(file, "")
            self._visit_all(file, [name for name in file if _unicode(name).partition(SEPARATOR)[0] in ROOTS], "")
        return self._parts

    @contextmanager
    def _noting(self, path: str, what: str = "the file") -> Iterator[None]:
        """Within it, what cannot be read is noted at a path."""
        try:
            yield
        except _Refusal as refusal:
            self._parts[path] = RefusedPart(*refusal.args)
        except BROKEN as error:
            brief = (_unicode(error).splitlines() or [type(error).__name__])[0]
            self._parts[path] = RefusedPart(f"{what} is damaged: {brief:.200}")

    def _visit_all(self, group: Any, names: Iterable[str], path: str) -> None:
        """Some members of a group. Keras on Windows wrote `layers\\dense` as the name of one."""
        for name in names:
            place = f"{path}/{name.replace(SEPARATOR, '/')}".lstrip("/")
            folder, _, member = place.rpartition("/")
            if SEPARATOR in name and isinstance(held := self._parts.setdefault(folder, []), list):
                held.append(member)
            self._visit(group, name, place)

    def _visit(self, parent: Any, name: str, path: str) -> None:
        """A member of a group, and all inside it, if a hard link leads there."""
        import h5py

        with self._noting(path):
            link = parent.get(name, getlink=True)
            if link is None:
                return
            if not isinstance(link, h5py.HardLink):
                raise _Refusal(f"this is a {type(link).__name__}, which is not followed")
            self._objects += 1
            if self._objects > MAX_OBJECTS or path.count("/") >= MAX_DEPTH:
                raise _Refusal(f"the file has more than {MAX_OBJECTS} objects, or {MAX_DEPTH} inside one another")
            found = parent[name]
            if isinstance(found, h5py.Dataset):
                self._parts[path] = self._array(found)
                return
            self._parts[path] = members = [*map(_unicode, found)]
            self._attributes(found, path)
            self._visit_all(found, members, path)

    def _array(self, dataset: Any) -> Dataset:
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
            raise _Refusal(f"{what}; the file holds {stored} of them")
        self._left -= size
        return Dataset(dataset.shape, dataset[()].astype(np.float32).tobytes())

    def _attributes(self, group: Any, path: str) -> None:
        """The attributes that say what a model is made of."""
        for name in group.attrs:
            if name.startswith(("model_config", "keras_version", "weight_names")):
                place = f"{path}@{_unicode(name)}"
                with self._noting(place, "the attribute"):
                    self._parts[place] = _texts(group, name)


def _unicode(text: object) -> str:
    """A text that other processes understand: h5py gives halves of surrogates for what is no UTF-8."""
    return str(text).encode(errors="replace").decode()


def _texts(group: Any, name: str) -> list[str]:
    """One attribute's texts."""
    shape = group.attrs.get_id(name).shape
    count = prod(shape) if shape is not None else 0
    if count > MAX_NAMES:
        raise _Refusal(f"the attribute lists {count} names; the limit is {MAX_NAMES}")
    values = np.asarray(group.attrs[name], dtype=object).reshape(-1).tolist() if count else []
    return [(value if isinstance(value, bytes) else str(value).encode()).decode() for value in values]


def _limit_memory(size: int) -> None:
    """Let the system refuse memory beyond what a file of this size can need, where it can."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    wanted, (_, most) = MAX_MEMORY + 8 * size, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def main() -> None:
    """The worker: reads a file on standard input, writes the parts of its `Contents` to standard output."""
    data = sys.stdin.buffer.read()
    _limit_memory(len(data))
    sys.stdout.buffer.write(msgspec.msgpack.encode(Hdf5Reader(data).read()))
