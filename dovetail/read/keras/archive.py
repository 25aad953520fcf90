"""The two containers of Keras models, `.keras` (a zip archive) and `.h5`: configuration and weights, safely read."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ModelError
from dovetail.read.keras.hdf5 import Contents, read_hdf5

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

_AGAIN = "save the model again with model.save('model.keras')"

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
"""How an HDF5 file begins."""


@dataclass(frozen=True)
class KerasFile:
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


def _read_h5(name: str, data: bytes) -> KerasFile:
    file = read_hdf5(name, data)
    text = file.text("", "model_config")
    if not file.has("model_weights") or text is None:
        hint = "save the whole model: model.save('model.keras'), not model.save_weights(...)"
        raise ModelError("the file holds weights or other data, but no Keras model", where=name, hint=hint)
    version = file.text("", "keras_version") or file.text("model_weights", "keras_version") or "1"
    return KerasFile(name, _parsed(name, "model_config", text.encode()), _major(version), file, by_path=False)


def _read_zip(name: str, data: bytes) -> KerasFile:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = _members(name, archive)
            config = _parsed(name, "config.json", _member(name, archive, members, "config.json", MAX_CONFIG))
            notes = _parsed(name, "metadata.json", _member(name, archive, members, "metadata.json", MAX_CONFIG))
            weights = _member(name, archive, members, "model.weights.h5", MAX_WEIGHTS)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        brief = str(error)[:200]
        raise ModelError(f"the archive is damaged: {brief}", where=name, hint="copy or save the model again") from error
    version = notes.get("keras_version", "3")
    return KerasFile(name, config, _major(str(version)), read_hdf5(f"{name}, model.weights.h5", weights), by_path=True)


def _members(name: str, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by name; refuses names that lead elsewhere or stand twice."""
    entries = archive.infolist()
    if len(entries) > MAX_MEMBERS:
        raise ModelError(f"the archive has {len(entries)} members; the limit is {MAX_MEMBERS}", where=name, hint=_AGAIN)
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        path = entry.filename.replace("\\", "/")
        if path.startswith("/") or ".." in path.split("/") or ":" in path or not path.isprintable():
            what = f"the archive has a member {path[:100]!r}, whose name leads out of it"
            raise ModelError(what, where=name, hint=_AGAIN)
        if path in found:
            raise ModelError(f"the archive has two members with the name {path[:100]!r}", where=name, hint=_AGAIN)
        found[path] = entry
    return found


def _member(
    name: str, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], wanted: str, limit: int
) -> bytes:
    """The bytes of one member, after checking what it says of its size."""
    entry, where = members.get(wanted), f"{name}, {wanted}"
    if entry is None:
        hint = "save the whole model with model.save('model.keras')"
        raise ModelError(f"the archive has no {wanted}, as a Keras model has", where=name, hint=hint)
    if entry.flag_bits & 1:
        raise ModelError("the member is encrypted", where=where, hint="save it without encryption")
    what = f"the member declares {entry.file_size} bytes"
    if entry.file_size > limit:
        raise ModelError(
            f"{what}; the limit is {limit}", where=where, hint="save a smaller network, or the model again"
        )
    if entry.file_size > MAX_EXPANSION * max(entry.compress_size, 1024):
        most = f"{entry.compress_size} are stored; the limit is {MAX_EXPANSION} times as many"
        raise ModelError(f"{what}, {most}", where=where, hint=_AGAIN)
    with archive.open(entry) as stream:
        data = stream.read(entry.file_size + 1)
    if len(data) != entry.file_size:
        raise ModelError(f"{what} and has another number", where=where, hint=_AGAIN)
    return data


def _parsed(name: str, member: str, data: bytes) -> Mapping[str, Any]:
    """JSON of bounded size and depth, an object at the top."""
    where, deep = f"{name}, {member}", f"more than {MAX_DEPTH} brackets stand inside one another"
    if len(data) > MAX_CONFIG:
        what = f"the configuration has {len(data)} bytes; the limit is {MAX_CONFIG}"
        raise ModelError(what, where=where, hint=_AGAIN)
    try:
        found = json.loads(data)
    except RecursionError:
        raise ModelError(deep, where=where, hint=_AGAIN) from None
    except ValueError as error:
        raise ModelError(f"this is not JSON: {str(error)[:200]}", where=where, hint=_AGAIN) from error
    if not isinstance(found, dict):
        raise ModelError("the configuration is no JSON object", where=where, hint=_AGAIN)
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [entry for entry in level if isinstance(entry, dict | list)]
        if not level:
            return found
    raise ModelError(deep, where=where, hint=_AGAIN)


def _major(version: str) -> int:
    """The major version of a version text; 3 where it says nothing."""
    first = version.split(".")[0]
    return int(first) if first.isdecimal() and len(first) < 4 else 3
