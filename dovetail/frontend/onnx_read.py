"""Reads an ONNX file: versions, external data, model-local functions and ONNX's own checker, then decoding."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.frontend.onnx_file import (
    IR_VERSIONS,
    MAX_ELEMENTS,
    MAX_NODES,
    MICROSOFT_OPSETS,
    OPSETS,
    OnnxFile,
    all_tensors,
    decode,
)


def read_onnx(name: str, data: bytes, folder: Path) -> OnnxFile:
    """Decode and check a file.

    Args:
        name: the file's name, for messages.
        data: its bytes.
        folder: the directory external data must lie in.

    Raises:
        ModelError: the file is damaged, or holds something outside the limits above.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    model = onnx.ModelProto()
    damaged = (DecodeError, ValueError, TypeError, RuntimeError, KeyError, IndexError, OverflowError)
    try:
        model.ParseFromString(data)
        _check_versions(name, model)
        return decode(name, prepare(name, model, folder))
    except (*damaged, onnx.checker.ValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the ONNX file is damaged or invalid: {reason[:300]}", where=name, hint="export the model again"
        ) from error


def _check_versions(name: str, model: Any) -> None:
    """File format and operator versions are in the ranges read."""
    if not IR_VERSIONS[0] <= model.ir_version <= IR_VERSIONS[1]:
        raise ModelError(f"ONNX IR version {model.ir_version} is not supported, only {IR_VERSIONS[0]} to "
                         f"{IR_VERSIONS[1]}", where=name,
                         hint="export the model again with a current version of its exporter")
    limits = {"": OPSETS, "ai.onnx": OPSETS, "com.microsoft": MICROSOFT_OPSETS}
    for entry in model.opset_import:
        low, high = limits.get(entry.domain, (0, 2**63))
        if not low <= entry.version <= high:
            raise ModelError(
                f"operator set {entry.domain or 'ai.onnx'} version {entry.version} is not supported, "
                f"only {low} to {high}",
                where=name,
                hint="convert it with onnx.version_converter, or export with another opset_version",
            )


def prepare(name: str, model: Any, folder: Path) -> Any:
    """The model checked, with external data read in and model-local functions expanded.

    Args:
        name: the file's name, for messages.
        model: an onnx.ModelProto.
        folder: the directory external data must lie in.

    Raises:
        ModelError: what the model holds is refused.
        onnx.checker.ValidationError: the model breaks ONNX's own rules.
    """
    import onnx
    from onnx import inliner

    for what, count in (("operators", len(model.graph.node)), ("initialisers", len(model.graph.initializer))):
        if count > MAX_NODES:
            raise ModelError(f"the model has {count} {what}; the limit is {MAX_NODES}", where=name,
                             hint="split the model, or simplify it first")
    if model.graph.sparse_initializer:
        raise ModelError("the model has sparse initialisers", where=name, hint="store the weights dense")
    if model.functions:
        _check_functions(name, model)
        model = inliner.inline_local_functions(model)
    _check_sizes(name, model)
    _read_external(name, model, folder)
    onnx.checker.check_model(model)
    return model


def _check_sizes(name: str, model: Any) -> None:
    """No stored tensor claims more elements than any may have."""
    for tensor in all_tensors(model):
        if min(tensor.dims, default=1) < 0 or prod(tensor.dims) >= MAX_ELEMENTS:
            shape = list(tensor.dims)
            raise ModelError(f"tensor {tensor.name!r} has the shape {shape}; the limit is {MAX_ELEMENTS} elements",
                             where=name, hint="export the model again; its tensors are too large or damaged")


def _check_functions(name: str, model: Any) -> None:
    """Functions do not call themselves, and expand to a bounded number of operators."""
    bodies = {(entry.domain, entry.name): entry for entry in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    open_calls: list[tuple[str, str]] = []

    def expanded(nodes: Any) -> int:
        return sum(size_of((node.domain, node.op_type)) for node in nodes)

    def size_of(key: tuple[str, str]) -> int:
        """Operators a call of this function expands to."""
        if key not in bodies:
            return 1
        if key in open_calls or len(open_calls) > 50:
            raise ModelError(f"the model-local function {key[1]!r} is nested too deep or calls itself", where=name,
                             hint="export the model without model-local functions")
        if key not in sizes:
            open_calls.append(key)
            sizes[key] = expanded(bodies[key].node)
            open_calls.pop()
        return sizes[key]

    total = expanded(model.graph.node)
    if total > MAX_NODES:
        raise ModelError(f"the model's functions expand to {total} operators; the limit is {MAX_NODES}", where=name,
                         hint="export the model without model-local functions, or a smaller one")


def _read_external(name: str, model: Any, folder: Path) -> None:
    """Bring external data into the tensors; only files inside the model's folder are read."""
    from onnx import TensorProto

    total = 0
    for tensor in all_tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        data = _external_bytes(name, tensor.name, entries, folder)
        total += len(data)
        if total >= MAX_ELEMENTS:
            raise ModelError(f"the external data takes more than {MAX_ELEMENTS} bytes", where=name,
                             hint="compile a smaller network")
        tensor.raw_data = data
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _external_bytes(name: str, tensor: str, entries: dict[str, str], folder: Path) -> bytes:
    """The bytes of one tensor kept in another file."""
    location = entries.get("location", "")
    root = folder.resolve()
    path = (root / location).resolve()
    if not location or Path(location).is_absolute() or not path.is_relative_to(root):
        raise ModelError(
            f"tensor {tensor!r} keeps its data in {location!r}, outside the model's folder",
            where=name,
            hint="put the data file beside the model, and refer to it by a relative name",
        )
    if not path.is_file():
        raise ModelError(f"tensor {tensor!r} keeps its data in {location!r}, which does not exist", where=name,
                         hint="put the data file beside the model")
    size = path.stat().st_size
    offset = int(entries.get("offset", "0"))
    length = int(entries.get("length", size - offset))
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(f"tensor {tensor!r} wants bytes {offset} to {offset + length} of {location!r}, which has "
                         f"{size}", where=name, hint="copy the data file again, or export the model again")
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)
