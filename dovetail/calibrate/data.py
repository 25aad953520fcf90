"""Calibration and test data from untrusted files: an `.npz`, a folder of `.npy`, a folder of images."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.graph.graph import Graph
from dovetail.graph.types import Array, Shape, TensorType
from dovetail.npy import MOST_BYTES, InputError, check_archive, read_npy

LABELS = "labels"
"""Name of the array (or file) of labels."""
MOST_FILES = 65536
"""Files of a folder that are read."""
HINT = (
    "one array per input, named as the model does, samples along the first axis; for a model with one input, any name"
)
IMAGES = (".png", ".jpg", ".jpeg")
"""Suffixes of image files."""


@dataclass(frozen=True)
class Preprocessing:
    """What is done to every element, and to images before: element * scale + offset."""

    scale: float = 1.0
    offset: float = 0.0
    resize: bool = False
    """Images of another size are scaled to the model's (bilinear); without, they are refused."""
    most: int = 512
    """Samples that are read, from the first."""


@dataclass(frozen=True)
class Samples:
    """Data for a network."""

    inputs: Mapping[str, Array]
    """float32 [N, *shape] by input; the model's own integers for an integer input"""
    labels: Array | None
    """int64 [N], where there are any"""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(next(iter(self.inputs.values())))


def read_samples(path: Path, graph: Graph, how: Preprocessing) -> Samples:
    """Read the data a path holds.

    Args:
        path: an `.npz` with an array per input and perhaps `labels`; or a folder of `.npy` files (a sample or several
            each, in the order of their names; for several inputs a folder per input; perhaps `labels.npy`); or a folder
            of PNG or JPEG images.
        graph: the network they are for.
        how: what is done to the elements.

    Raises:
        InputError: missing, empty, damaged, too large, of wrong names, shapes or types, or not finite.
        MissingExtraError: images need Pillow.
    """
    if path.is_dir():
        arrays = _read_folder(path, graph, how)
    elif path.is_file():
        arrays = _read_archive(path, graph)
    else:
        raise InputError("there is no such file or folder", where=str(path), hint="give an .npz file or a folder")
    labels = arrays.pop(LABELS, None)
    inputs = {name: _samples(name, arrays[name], graph.types[name], path, how) for name in graph.inputs}
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"the inputs have different numbers of samples: {counts}", where=str(path),
                         hint="give each input the same number of samples")
    return Samples(inputs, _labels(labels, next(iter(counts.values())), path, how))


def _read_archive(path: Path, graph: Graph) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = check_archive(archive, str(path), "give fewer samples")
            names = _match(list(members), graph, str(path))
            return {
                name: read_npy(partial(archive.open, info), info.file_size, name, _numbers(name, path))
                for name, info in ((name, members[member]) for name, member in names.items())
            }
    except zipfile.BadZipFile as error:
        raise InputError(f"not an .npz file: {error}", where=str(path), hint="write it with numpy.savez") from None
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise InputError(f"a damaged .npz file: {error}", where=str(path), hint="write it with numpy.savez") from None


def _match(found: list[str], graph: Graph, where: str) -> dict[str, str]:
    """Which member each input, and the labels, are."""
    names = {LABELS: LABELS} if LABELS in found and LABELS not in graph.inputs else {}
    others = [name for name in found if name not in names]
    if not others:
        raise InputError("there are no arrays for the model's inputs", where=where, hint=HINT)
    if len(graph.inputs) == 1 and len(others) == 1:
        return {graph.inputs[0]: others[0], **names}
    if set(others) != set(graph.inputs):
        wanted, got = (", ".join(f"'{n}'" for n in sorted(group)) for group in (graph.inputs, others))
        raise InputError(f"expected arrays {wanted}, got {got}", where=where, hint=HINT)
    return {name: name for name in (*graph.inputs, *names)}


def _numbers(name: str, path: Path) -> Any:
    def accept(shape: Shape, dtype: np.dtype[Any]) -> None:
        """Numbers only."""
        if dtype.kind not in "fiub":
            raise InputError(f"'{name}' holds {dtype}, not numbers", where=str(path), hint=HINT)

    return accept


def _read_folder(path: Path, graph: Graph, how: Preprocessing) -> dict[str, Array]:
    files = folder_files(path, (".npy", *IMAGES))
    images = [file for file in files if file.suffix.lower() in IMAGES]
    if images and len(graph.inputs) == 1:
        from dovetail.calibrate.images import read_images

        arrays = {graph.inputs[0]: read_images(images[: how.most], graph.types[graph.inputs[0]], how.resize)}
        labels = [file for file in files if file.name == f"{LABELS}.npy"]
    elif len(graph.inputs) == 1:
        labels = [file for file in files if file.name == f"{LABELS}.npy"]
        arrays = {graph.inputs[0]: _read_files([f for f in files if f not in labels], graph, graph.inputs[0], path)}
    else:
        labels = [file for file in files if file.name == f"{LABELS}.npy"]
        arrays = {name: _read_files(folder_files(path / name, (".npy",)), graph, name, path) for name in graph.inputs}
    if labels:
        arrays[LABELS] = _read_file(labels[0], LABELS)
    return arrays


def folder_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The folder's own files with these suffixes, by name; raises InputError for links that lead out of it."""
    if not path.is_dir():
        raise InputError("there is no such folder", where=str(path), hint="make a folder of .npy files for each input")
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes)
    if len(found) > MOST_FILES:
        raise InputError(f"{len(found)} files, the limit is {MOST_FILES}", where=str(path),
                         hint=f"keep at most {MOST_FILES} of them in the folder")
    home = path.resolve()
    for file in found:
        if not file.is_file() or home not in file.resolve().parents:
            raise InputError("not a file of this folder (a link, or a folder)", where=str(file),
                             hint="copy the file itself into the folder")
    return found


def _read_file(file: Path, name: str) -> Array:
    try:
        return read_npy(lambda: file.open("rb"), file.stat().st_size, name, _numbers(name, file))
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"a damaged .npy file: {error}", where=str(file), hint="write it with numpy.save") from None


def _read_files(files: list[Path], graph: Graph, name: str, path: Path) -> Array:
    if not files:
        raise InputError("the folder has no .npy files and no images", where=str(path), hint="put samples in it")
    total = sum(file.stat().st_size for file in files)
    if total > MOST_BYTES:
        raise InputError(f"{total} bytes, the limit is {MOST_BYTES}", where=str(path), hint="give fewer samples")
    parts = [_shaped(name, _read_file(file, name), graph.types[name], file) for file in files]
    return np.concatenate(parts)


def _shaped(name: str, array: Array, kind: TensorType, path: Path) -> Array:
    """The array as [N, *shape]: a sample, several, or several along the model's own batch axis of 1."""
    shape = kind.shape
    if array.shape == shape and not (shape and shape[0] == 1):
        return array[None]
    if array.shape[1:] == shape:
        return array
    if shape[:1] == (1,) and array.ndim and array.shape[1:] == shape[1:]:
        return array.reshape(len(array), *shape)
    if shape[:1] == (1,) and array.shape == shape[1:]:
        return array.reshape(1, *shape)
    what = f"'{name}' must be [n, {', '.join(map(str, shape))}], got {list(array.shape)}"
    raise InputError(what, where=str(path), hint=HINT)


def _samples(name: str, array: Array, kind: TensorType, path: Path, how: Preprocessing) -> Array:
    """The samples of an input in its type, preprocessed and checked."""
    array = _shaped(name, array, kind, path)[: how.most]
    if array.size == 0:
        raise InputError(f"'{name}' is empty: {list(array.shape)}", where=str(path), hint="give at least one sample")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int(array.size - np.isfinite(array).sum())
        raise InputError(f"'{name}' holds {bad} values that are NaN or infinite", where=str(path),
                         hint="see how they come about: a division by zero, or values that were never set")
    if kind.dtype.is_integer:
        if array.dtype.kind == "f" or array.min() < kind.dtype.low or array.max() > kind.dtype.high:
            raise InputError(f"'{name}' must be {kind.dtype.text}, got {array.dtype}", where=str(path),
                             hint=f"save the array with .astype('{kind.dtype.text}') and values in its range")
        return array.astype(kind.dtype.numpy)
    result = (array.astype(np.float64) * how.scale + how.offset).astype(np.float32)
    if not np.isfinite(result).all():
        raise InputError(f"'{name}' is not finite after preprocessing", where=str(path), hint="check --scale, --offset")
    return result


def _labels(labels: Array | None, count: int, path: Path, how: Preprocessing) -> Array | None:
    if labels is None:
        return None
    if labels.dtype.kind not in "iu" or labels.ndim == 0 or labels.size != len(labels):
        raise InputError(f"the labels must be integers [n], got {labels.dtype} {list(labels.shape)}", where=str(path),
                         hint="give one class number for each sample")
    row = labels.reshape(-1)[: how.most].astype(np.int64)
    if len(row) != count:
        raise InputError(f"{len(row)} labels for {count} samples", where=str(path),
                         hint="give one label for each sample")
    return row
