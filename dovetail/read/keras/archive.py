"""The two containers of Keras models, `.keras` (a zip archive) and `.h5`: configuration and weights, safely read."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

from dovetail.errors import ModelError
from dovetail.read.keras.hdf5 import SPOILT, Contents, read_hdf5
from dovetail.records import Record

MAX_CONFIG = 32 * 2**20
"""Most bytes of a model's configuration."""

MAX_DEPTH = 200
"""Most brackets inside one another in a configuration."""

MAX_WEIGHTS = 512 * 2**20
"""Most bytes of weights taken out of an archive."""

MAX_EXPANSION = 100
"""Most times a member of an archive may be larger than what is stored of it. Keras stores plainly."""

MAX_MEMBERS = 4096
"""Most members of an archive."""

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
"""How an HDF5 file begins."""


class KerasFile(Record):
    """Contents of a model file, before anything in it is understood."""

    name: str
    """For messages."""
    config: Mapping[str, Any]
    """The serialised model: class_name, config."""
    version: int
    """Major version of the Keras that wrote it: 1, 2 or 3."""
    weights: Contents
    by_path: bool
    """Weights lie in groups by the attributes of objects (`.keras`); else as a list for each layer (`.h5`)."""


def read_keras(name: str, data: bytes) -> KerasFile:
    """Open a Keras model file, of either format, by its content.

    Raises:
        MissingExtraError: h5py is not installed.
        ModelError: the file is damaged, dangerous, or holds no whole model.
    """
    return _read_h5(name, data) if data.startswith(HDF5_MAGIC) else _read_zip(name, data)


def _refused(where: str, what: str, hint: str = "save the model again with model.save('model.keras')") -> ModelError:
    return ModelError(what, where=where, hint=hint)


def _read_h5(name: str, data: bytes) -> KerasFile:
    file = read_hdf5(name, data)
    text = file.text("", "model_config")
    if file.members("model_weights") is None or text is None:
        hint = "save the whole model: model.save('model.keras'), not model.save_weights(...)"
        raise _refused(name, "the file holds weights or other data, but no Keras model", hint)
    version = file.text("", "keras_version") or file.text("model_weights", "keras_version") or "1"
    return KerasFile(name, _parsed(f"{name}, model_config", text.encode()), _major(version), file, by_path=False)


def _read_zip(name: str, data: bytes) -> KerasFile:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = _members(name, archive)
            texts = {one: _member(name, archive, members, one, MAX_CONFIG) for one in ("config.json", "metadata.json")}
            config, notes = (_parsed(f"{name}, {one}", text) for one, text in texts.items())
            weights = _member(name, archive, members, "model.weights.h5", MAX_WEIGHTS)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _refused(name, f"the archive is damaged: {error!s:.200}", SPOILT) from error
    version = notes.get("keras_version", "3")
    return KerasFile(name, config, _major(str(version)), read_hdf5(f"{name}, model.weights.h5", weights), by_path=True)


def _members(name: str, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by name; refuses names that lead elsewhere or stand twice."""
    entries = archive.infolist()
    if len(entries) > MAX_MEMBERS:
        raise _refused(name, f"the archive has {len(entries)} members; the limit is {MAX_MEMBERS}")
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        path = entry.filename.replace("\\", "/")
        if path.startswith("/") or ".." in path.split("/") or ":" in path or not path.isprintable():
            raise _refused(name, f"the archive has a member {path[:100]!r}, whose name leads out of it")
        if path in found:
            raise _refused(name, f"the archive has two members with the name {path[:100]!r}")
        found[path] = entry
    return found


def _member(
    name: str, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], wanted: str, limit: int
) -> bytes:
    """The bytes of one member, after checking what it says of its size."""
    entry, where = members.get(wanted), f"{name}, {wanted}"
    if entry is None:
        hint = "save the whole model with model.save('model.keras')"
        raise _refused(name, f"the archive has no {wanted}, as a Keras model has", hint)
    if entry.flag_bits & 1:
        raise _refused(where, "the member is encrypted", "save it without encryption")
    size, stored = entry.file_size, entry.compress_size
    what = f"the member declares {size} bytes"
    if size > limit:
        raise _refused(where, f"{what}; the limit is {limit}", "save a smaller network, or the model again")
    if size > MAX_EXPANSION * max(stored, 1024):
        raise _refused(where, f"{what}, {stored} are stored; the limit is {MAX_EXPANSION} times as many")
    with archive.open(entry) as stream:
        data = stream.read(size + 1)
    if len(data) != size:
        raise _refused(where, f"{what} and has another number")
    return data


def _parsed(where: str, data: bytes) -> Mapping[str, Any]:
    """JSON of bounded size and depth, an object at the top."""
    deep = _refused(where, f"more than {MAX_DEPTH} brackets stand inside one another")
    if len(data) > MAX_CONFIG:
        raise _refused(where, f"the configuration has {len(data)} bytes; the limit is {MAX_CONFIG}")
    try:
        found = json.loads(data)
    except RecursionError:
        raise deep from None
    except ValueError as error:
        raise _refused(where, f"this is not JSON: {error!s:.200}") from error
    if not isinstance(found, dict):
        raise _refused(where, "the configuration is no JSON object")
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [entry for entry in level if isinstance(entry, dict | list)]
        if not level:
            return found
    raise deep


def _major(version: str) -> int:
    """The major version of a version text; 3 where it says nothing."""
    first = version.split(".")[0]
    return int(first) if first.isdecimal() and len(first) < 4 else 3
