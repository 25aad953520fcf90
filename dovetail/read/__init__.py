"""Frontends: model files as graphs in QDQ form (quantised values between Dequantize and Quantize)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from dovetail.errors import DovetailError, ModelError, visible
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.operators.user import UserOperator
from dovetail.ir.types import Shape
from dovetail.notes import Tell, silent
from dovetail.operators import installed_operators
from dovetail.read.elsewhere import known_elsewhere
from dovetail.read.states import paired, tied, untied

MAX_BYTES = 512 * 2**20
"""Largest model file read, in bytes."""

MOST_LISTED = 10
"""Most refused operators a message names beside the first."""

KNOWN_FORMATS = "TensorFlow Lite (.tflite) and Keras (.keras, .h5), recognised by their content, and ONNX (.onnx)"


def load_model(
    path: Path,
    shapes: Mapping[str, Shape] | None = None,
    tell: Tell = silent,
    operators: Sequence[type[UserOperator]] = (),
    states: Mapping[str, str] | None = None,
    faults: list[ModelError] | None = None,
) -> Graph:
    """Read a model file: TFLite (recognised by the identifier "TFL3"), Keras (a zip archive or HDF5) or ONNX (by the
    suffix .onnx). The network is in QDQ form, or of floats where the model is, and named after the file's stem.
    `shapes` are those of inputs an ONNX model leaves open, by name; `tell` is told what was taken for granted.
    `operators` are the user's own, known beside those of packages (`dovetail.operators.installed_operators`).
    `states` are inputs of an ONNX model by the output that each becomes in the next inference, beside those called
    past and present. With a list of `faults`, all refused operators of TFLite and ONNX are noted there, and the graph
    is only good for looking at.

    Raises:
        ModelError: there is no such file, its format is unknown, it is damaged, or it says something
            Dovetail cannot honour; the message names the file and every operator that is refused.
        MissingExtraError: it is a Keras file, and h5py is not installed.
    """
    load = partial(_load_model, path, shapes, operators=operators, states=states)
    try:
        return load(tell=tell, faults=faults)
    except ModelError as error:
        refused: list[ModelError] = []
        with suppress(DovetailError):
            load(tell=silent, faults=refused)
        others = list({one.what: f"\n  {one.where}: {one.what}" for one in refused if one.what != error.what}.values())
        more = f"\n  and {len(others) - MOST_LISTED} more" if len(others) > MOST_LISTED else ""
        error.what += "".join([*others[:MOST_LISTED], more])
        raise


def _load_model(
    path: Path,
    shapes: Mapping[str, Shape] | None,
    tell: Tell,
    operators: Sequence[type[UserOperator]],
    states: Mapping[str, str] | None,
    faults: list[ModelError] | None,
) -> Graph:
    """The same; raises at the first operator that is refused."""
    name = visible(path.stem)
    data = _read(path)

    def known() -> Iterator[type[UserOperator]]:
        """The operators of packages, which are loaded where one is asked for, and the user's own."""
        yield from installed_operators(tell)
        yield from operators

    if data[4:8] == b"TFL3":
        from dovetail.read.tflite import load_tflite

        return load_tflite(path.name, data, name, known(), tell, faults)
    if path.suffix.lower() == ".onnx":
        from dovetail.read.onnx import load_onnx

        graph = load_onnx(path.name, data, name, path.parent, shapes, tell, known(), faults)
        graph = tied(graph, paired(graph, states or {}), tell, states or {})
        untied(graph, tell)
        return graph
    if states:
        what = "only ONNX models give states as inputs and outputs"
        raise _refused(path, what, "leave --state out: states of TFLite and Keras models are known")
    other = known_elsewhere(path, data)
    is_keras = data.startswith((b"\x89HDF\r\n\x1a\n", b"PK\x03\x04")) and not other
    if is_keras or path.suffix.lower() == ".keras":
        from dovetail.read.keras import load_keras

        return load_keras(path.name, data, name)
    what, how = other or ("this file is of no known model format", f"known are {KNOWN_FORMATS}")
    raise _refused(path, what, how)


def own_rounding(path: Path) -> Rounding:
    """The rounding of the runtime of the model's format: ONNX Runtime rounds once, TFLite Micro twice, Keras never."""
    return Rounding.SINGLE if path.suffix.lower() == ".onnx" else Rounding.DOUBLE


def _refused(path: Path, what: str, hint: str) -> ModelError:
    return ModelError(what, where=str(path), hint=hint)


def _read(path: Path) -> bytes:
    """The file's bytes, after checking that it is a file of a sensible size."""
    if not path.exists():
        raise _refused(path, "there is no such file", "check the spelling and the directory")
    if path.is_dir():
        nothing = ("this is a directory, not a model file", f"known are {KNOWN_FORMATS}")
        what, how = known_elsewhere(path) or nothing
        raise _refused(path, what, how)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            what = f"the file has {size} bytes; the limit is {MAX_BYTES}"
            raise _refused(path, what, "give the file of a smaller network")
        data = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise _refused(path, f"the file cannot be read: {error.strerror}", "check the permission to read it") from error
    if not data:
        raise _refused(path, "the file is empty", "copy or convert the model again")
    return data
