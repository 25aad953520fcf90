"""Calibration and test data from untrusted files: an `.npz`, a folder of `.npy`, a folder of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import DovetailError, MissingExtraError
from dovetail.files import MOST_BYTES, InputError, open_archive, read_npy
from dovetail.guests.ptq.preparation import as_reals
from dovetail.guests.ptq.settings import Preprocessing
from dovetail.guests.ptq.steps import Data, StepsByValue, infinite
from dovetail.ir.boundary import boundary, steps_of
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array, Shape, TensorType
from dovetail.notes import Kind, Note
from dovetail.records import Record

MOST_PIXELS = 1 << 26
"""Pixels an image may have."""
_MODES = {1: "L", 3: "RGB"}


def _wrong(where: Path, what: str, hint: str) -> InputError:
    return InputError(what, where=str(where), hint=hint)


def read_images(files: Sequence[Path], kind: TensorType, resize: bool) -> Array:
    """Image files as uint8 [N, *shape], elements 0 to 255.

    Args:
        files: PNG or JPEG files.
        kind: the model's input: [1, H, W, C] or [1, C, H, W] of 1 or 3 channels.
        resize: scale images of another size (bilinear); without, they are refused.

    Raises:
        InputError: damaged, too large, of another size, or the input is no image.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("PIL", "images", "reading images") from None
    height, width, channels, first = image_axes(kind)
    size = len(files) * kind.elements
    if size > MOST_BYTES:
        hint = "use fewer images: --samples limits their number"
        where = str(files[0].parent)
        raise InputError(f"{size} bytes of images, the limit is {MOST_BYTES}", where=where, hint=hint)
    images = []
    for file in files:
        try:
            with Image.open(file, formats=("PNG", "JPEG")) as image:
                if image.width * image.height > MOST_PIXELS:
                    what = f"{image.width}x{image.height} pixels, the limit is {MOST_PIXELS}"
                    raise _wrong(file, what, "scale the image down")
                if image.size != (width, height) and not resize:
                    what = f"{image.width}x{image.height} pixels, the model takes {width}x{height}"
                    raise _wrong(file, what, "scale the images, or give --resize")
                whole = image.convert(_MODES[channels])
                if whole.size != (width, height):
                    whole = whole.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(whole, np.uint8).reshape(height, width, channels)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            hint = "save it again as PNG or JPEG, or take it out of the folder"
            raise _wrong(file, f"not a PNG or JPEG image: {error}", hint) from None
        images.append(pixels.transpose(2, 0, 1) if first else pixels)
    return np.stack(images)[:, None]


def image_axes(kind: TensorType) -> tuple[int, int, int, bool]:
    """Height, width and channels of an image input, and whether channels come first; raises InputError for others."""
    if len(kind.shape) == 4 and kind.shape[0] == 1:
        _, a, b, c = kind.shape
        if c in _MODES:
            return a, b, c, False
        if a in _MODES:
            return b, c, a, True
    hint = "give the samples as arrays in an .npz"
    raise InputError(f"the model's input is {kind}, not one image of 1 or 3 channels", where="model", hint=hint)


LABELS = "labels"
"""Name of the array (or file) of labels."""
MOST_FILES = 65536
"""Files of a folder that are read."""
HINT = (
    "one array per input, named as the model does, samples along the first axis; for a model with one input, any name"
)
IMAGES = (".png", ".jpg", ".jpeg")
"""Suffixes of image files."""


class Samples(Record):
    """Data for a network."""

    inputs: Data
    """float32 [N, *shape] by input; the model's own integers for an integer input"""
    labels: Array | None
    """int64 [N], where there are any"""
    steps: int = 1
    """Samples of a sequence, which follow one another, for a network with states; all samples are of one length."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(next(iter(self.inputs.values())))


def unscaled(samples: Samples, graph: Graph, how: Preprocessing) -> Iterator[Note]:
    """Notes on images of bytes that are taken as they are: most networks are trained on 0 to 1, or -1 to 1."""
    for name, values in samples.inputs.items():
        kind = graph.types[name]
        if kind.dtype.is_integer or len(kind.shape) != 4 or (how.scale, how.offset) != (1.0, 0.0):
            continue
        if values.min() >= 0 and 127 < values.max() <= 255 and np.array_equal(values, np.rint(values)):
            what = f"'{name}' gets whole numbers from {values.min():.0f} to {values.max():.0f}, as they are in the data"
            yield Note(Kind.ASSUMED, f"{what}; if it was trained on 0 to 1, give --scale 0.00392157")


def cut_off(samples: Samples, graph: Graph) -> Iterator[Note]:
    """Notes on inputs of a quantised network of whose numbers more than 1 % are beyond what its integers reach."""
    ends = {name: (one, graph.types[name].dtype) for name, one in boundary(graph).items() if name in samples.inputs}
    for node in graph.nodes:
        if node.inputs[0] in samples.inputs and (one := steps_of(graph, node)) is not None and node.operator.quantises:
            ends[node.inputs[0]] = one, graph.types[node.output].dtype
    for name, (one, dtype) in ends.items():
        low, high = ((end - one.zero_point) * one.scale for end in (dtype.low, dtype.high))
        share = float(np.mean(np.abs(samples.inputs[name] - (low + high) / 2) > (high - low) / 2 + one.scale))
        if share > 0.01:
            what = f"{share:.0%} of the numbers of '{name}' are beyond {low:.4g} to {high:.4g}, which the model takes"
            yield Note(
                Kind.ASSUMED, f"{what}, and are cut off; if they are not as in training, give --scale and --offset"
            )


def read_samples(path: Path, graph: Graph, how: Preprocessing, steps: StepsByValue | None = None) -> Samples:
    """Read the data a path holds.

    For a network with states they are steps of sequences, [sequences, steps, *shape] or [steps, *shape].

    Args:
        path: an `.npz` with an array per input and perhaps `labels`; or a folder of `.npy` files (a sample or several
            each, in the order of their names; for several inputs a folder per input; perhaps `labels.npy`); or a folder
            of PNG or JPEG images.
        graph: the network they are for.
        how: what is done to the elements.
        steps: of inputs that are quantised in the model's file: data of their integer type are the integers, and not
            preprocessed.

    Raises:
        InputError: missing, empty, damaged, too large, of wrong names, shapes or types, or not finite.
        MissingExtraError: images need Pillow.
    """
    if path.is_dir():
        arrays = _read_folder(path, graph, how)
    elif path.is_file():
        arrays = _read_archive(path, graph)
    else:
        raise _wrong(path, "there is no such file or folder", "give an .npz file or a folder")
    labels = arrays.pop(LABELS, None)
    inputs, lengths = {}, dict[str, int]()
    for name in graph.given:
        real = as_reals(arrays[name], (steps or {}).get(name))
        own = replace(how, scale=1.0, offset=0.0) if real is not arrays[name] else how
        if graph.states:
            real, length = _steps(name, real, graph.types[name], path, how.most)
            lengths[name], own = length, replace(own, most=len(real))
        inputs[name] = _samples(name, real, graph.types[name], path, own)
    if len({*lengths.values()}) > 1:
        raise _wrong(path, f"the inputs have sequences of different lengths: {lengths}", "give each the same steps")
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) > 1:
        hint = "give each input the same number of samples"
        raise _wrong(path, f"the inputs have different numbers of samples: {counts}", hint)
    found = _labels(labels, next(iter(counts.values())), path, how)
    return Samples(inputs, found, next(iter(lengths.values()), 1))


def _read_archive(path: Path, graph: Graph) -> dict[str, Array]:
    with open_archive(path, "give fewer samples") as (archive, members):
        arrays = {}
        for name, own in _match(list(members), graph, str(path)).items():
            info = members[own]
            arrays[name] = read_npy(partial(archive.open, info), info.file_size, name, _numbers(name, path))
        return arrays


def _match(members: list[str], graph: Graph, where: str) -> dict[str, str]:
    """The member of each input, and of the labels."""
    labels = {LABELS: LABELS} if LABELS in members and LABELS not in graph.given else {}
    others = [name for name in members if name not in labels]
    if not others:
        raise InputError("there are no arrays for the model's inputs", where=where, hint=HINT)
    if len(graph.given) == len(others) == 1:
        return {graph.given[0]: others[0], **labels}
    if set(others) != set(graph.given):
        wanted, got = (", ".join(f"'{n}'" for n in sorted(group)) for group in (graph.given, others))
        raise InputError(f"expected arrays {wanted}, got {got}", where=where, hint=HINT)
    return {name: name for name in (*graph.given, *labels)}


def _numbers(name: str, path: Path) -> Any:
    def accept(shape: Shape, dtype: np.dtype[Any]) -> None:
        if dtype.kind not in "fiub":
            raise _wrong(path, f"'{name}' holds {dtype}, not numbers", HINT)

    return accept


def _read_folder(path: Path, graph: Graph, how: Preprocessing) -> dict[str, Array]:
    files = folder_files(path, (".npy", *IMAGES))
    images = [file for file in files if file.suffix.lower() in IMAGES]
    labels = path / f"{LABELS}.npy"
    first, *others = graph.given
    if others:
        arrays = {name: _read_files(folder_files(path / name, (".npy",)), graph, name, path) for name in graph.given}
    elif images:
        arrays = {first: read_images(images[: how.most], graph.types[first], how.resize)}
    else:
        arrays = {first: _read_files([file for file in files if file != labels], graph, first, path)}
    if labels in files:
        arrays[LABELS] = _read_file(labels, LABELS)
    return arrays


def folder_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The folder's own files with these suffixes, by name; raises InputError for links that lead out of it."""
    if not path.is_dir():
        raise _wrong(path, "there is no such folder", "make a folder of .npy files for each input")
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes)
    if len(files) > MOST_FILES:
        hint = f"keep at most {MOST_FILES} of them in the folder"
        raise _wrong(path, f"{len(files)} files, the limit is {MOST_FILES}", hint)
    home = path.resolve()
    for file in files:
        if not file.is_file() or home not in file.resolve().parents:
            hint = "copy the file itself into the folder"
            raise _wrong(file, "not a file of this folder (a link, or a folder)", hint)
    return files


def _read_file(file: Path, name: str) -> Array:
    try:
        return read_npy(lambda: file.open("rb"), file.stat().st_size, name, _numbers(name, file))
    except (OSError, EOFError, ValueError) as error:
        raise _wrong(file, f"a damaged .npy file: {error}", "write it with numpy.save") from None


def _read_files(files: list[Path], graph: Graph, name: str, path: Path) -> Array:
    if not files:
        raise _wrong(path, "the folder has no .npy files and no images", "put samples in it")
    total = sum(file.stat().st_size for file in files)
    if total > MOST_BYTES:
        raise _wrong(path, f"{total} bytes, the limit is {MOST_BYTES}", "give fewer samples")
    return np.concatenate([_shaped(name, _read_file(file, name), graph.types[name], file) for file in files])


def _shaped(name: str, array: Array, kind: TensorType, path: Path) -> Array:
    """The array as [N, *shape]: a sample, several, or several along the model's own batch axis of 1."""
    shape = kind.shape
    inner = shape[1:] if shape[:1] == (1,) else shape
    if array.shape == inner:
        return array.reshape(1, *shape)
    if array.ndim and array.shape[1:] in (shape, inner):
        return array.reshape(len(array), *shape)
    what = f"'{name}' must be [n, {', '.join(map(str, inner))}], got {list(array.shape)}"
    raise _wrong(path, what, HINT)


def _steps(name: str, array: Array, kind: TensorType, path: Path, most: int) -> tuple[Array, int]:
    """The steps of sequences as samples, and the steps of each: [sequences, steps, *shape], or one sequence."""
    inner = kind.shape[1:] if kind.shape[:1] == (1,) else kind.shape
    sizes, wanted = ([size for size in shape if size != 1] for shape in (array.shape[2:], kind.shape))
    if array.ndim < 2 or sizes != wanted or array.shape[1:] in (kind.shape, inner):
        return array, len(array) if array.ndim else 1
    chosen = array[:most]
    return chosen.reshape(-1, *kind.shape), array.shape[1]


def _samples(name: str, array: Array, kind: TensorType, path: Path, how: Preprocessing) -> Array:
    """The samples of an input in its type, preprocessed and checked."""
    array = _shaped(name, array, kind, path)[: how.most]
    if array.size == 0:
        raise _wrong(path, f"'{name}' is empty: {list(array.shape)}", "give at least one sample")
    if bad := infinite(array):
        hint = "see how they come about: a division by zero, or values that were never set"
        raise _wrong(path, f"'{name}' holds {bad} values that are NaN or infinite", hint)
    if kind.dtype.is_integer:
        if array.dtype.kind == "f" or array.min() < kind.dtype.low or array.max() > kind.dtype.high:
            hint = f"save the array with .astype('{kind.dtype.text}') and values in its range"
            raise _wrong(path, f"'{name}' must be {kind.dtype.text}, got {array.dtype}", hint)
        return array.astype(kind.dtype.numpy)
    result = (array.astype(np.float64) * how.scale + how.offset).astype(np.float32)
    if infinite(result):
        raise _wrong(path, f"'{name}' is not finite after preprocessing", "check --scale, --offset")
    return result


def _labels(labels: Array | None, count: int, path: Path, how: Preprocessing) -> Array | None:
    if labels is None:
        return None
    if labels.dtype.kind not in "iu" or labels.ndim == 0 or labels.size != len(labels):
        what = f"the labels must be integers [n], got {labels.dtype} {list(labels.shape)}"
        raise _wrong(path, what, "give one class number for each sample")
    row = labels.reshape(-1)[: how.most].astype(np.int64)
    if len(row) != count:
        raise _wrong(path, f"{len(row)} labels for {count} samples", "give one label for each sample")
    return row


def check_labels(labels: Array, classes: int) -> Array:
    """The labels, all of which must be classes; raises DovetailError otherwise."""
    bad, classed = np.flatnonzero((labels < 0) | (labels >= classes)), f"0 to {classes - 1}"
    if bad.size:
        raise DovetailError(
            f"{bad.size} labels are out of range: label {int(labels[bad[0]])} of sample {int(bad[0])}, "
            f"the network has classes {classed}",
            where="labels",
            hint=f"give each sample a class from {classed}",
        )
    return labels
