"""Reads an ONNX file into plain, checked data: no access to the protobuf is trusted after this module.

Versions, external data and model-local functions come first, then ONNX's own checker, then decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.onnx_wire import elements_of, without_large
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.read.values import MAX_ELEMENTS

IR_VERSIONS = (3, 14)
"""Oldest and newest file format read."""

OPSETS = (7, 28)
"""Oldest and newest version of the standard operators read."""

MICROSOFT_OPSETS = (1, 1)
"""Oldest and newest version of ONNX Runtime's own operators (com.microsoft) read."""

MAX_NODES = 100_000
"""Most operators, initialisers or inputs of a model, model-local functions expanded."""

DTYPES: Mapping[str, DType] = {
    "FLOAT": DType.FLOAT32,
    "BOOL": DType.BOOL,
    **{kind.text.upper(): kind for kind in DType if kind.is_integer},
}
"""Element types by their names in ONNX."""

FIX_SHAPES = "give its sizes, for instance --shape {name}={sizes}"
"""Advice for a model with symbolic sizes."""

Tell = Callable[[str], None]
"""Is told in a sentence what was taken for granted."""


@dataclass(frozen=True)
class Constant:
    """A tensor known at compile time."""

    array: Array
    """Elements; int2 and int4 in int8, uint2 and uint4 in uint8."""
    dtype: DType | None
    """None for a type no value of a graph can have (float64, float16, string): such a constant can only be folded."""


@dataclass(frozen=True)
class OnnxNode:
    """One operator of the model."""

    index: int
    name: str
    domain: str
    """"" for the standard operators."""
    op_type: str
    inputs: tuple[str, ...]
    """"" for an absent optional operand."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    """Numbers, strings, tuples of them, `Constant` for tensors."""


@dataclass(frozen=True)
class OnnxFile:
    """A whole model."""

    name: str
    """File name, for messages."""
    opsets: Mapping[str, int]
    """Version per domain."""
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[tuple[str, TensorType | None], ...]
    """Names, and their types where the model declares fixed ones."""
    constants: Mapping[str, Constant]
    nodes: tuple[OnnxNode, ...]


def read_onnx(name: str, data: bytes, folder: Path, shapes: Mapping[str, Shape], tell: Tell) -> OnnxFile:
    """Decode and check the bytes of the file `name`; external data must lie in `folder`.

    Args:
        name: of the file. data: its bytes. folder: where it lies.
        shapes: of inputs whose sizes the model leaves open.
        tell: is told what was taken for granted.

    Raises:
        ModelError: the file is damaged, or holds something outside the limits above.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    model = onnx.ModelProto()
    damaged = (DecodeError, ValueError, TypeError, RuntimeError, KeyError, IndexError, OverflowError)
    try:
        slim, large = without_large(data)
        model.ParseFromString(slim)
        _check_versions(name, model)
        model = widened(name, prepare(name, model, folder, large), tell)
        return decode(name, fixed_shapes(name, model, shapes, tell), large)
    except (*damaged, onnx.checker.ValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        what = f"the ONNX file is damaged or invalid: {reason[:300]}"
        raise ModelError(what, where=name, hint="export the model again") from error


def _check_versions(name: str, model: Any) -> None:
    """File format and operator versions are in the ranges read."""
    if not IR_VERSIONS[0] <= model.ir_version <= IR_VERSIONS[1]:
        what = f"ONNX IR version {model.ir_version} is not supported, only {IR_VERSIONS[0]} to {IR_VERSIONS[1]}"
        raise ModelError(what, where=name, hint="export the model again with a current version of its exporter")
    limits = {"": OPSETS, "ai.onnx": OPSETS, "com.microsoft": MICROSOFT_OPSETS}
    for entry in model.opset_import:
        low, high = limits.get(entry.domain, (0, 2**63))
        if not low <= entry.version <= high:
            what = f"operator set {entry.domain or 'ai.onnx'} version {entry.version} is not supported"
            hint = "convert it with onnx.version_converter, or export with another opset_version"
            raise ModelError(f"{what}, only {low} to {high}", where=name, hint=hint)


def prepare(name: str, model: Any, folder: Path, large: dict[str, Array]) -> Any:
    """The model (an onnx.ModelProto) checked, with external data read in and model-local functions expanded. `large`
    has the contents of large initializers, which are empty in it, by name, and gains those of external data.

    Raises:
        ModelError: what the model holds is refused.
        onnx.checker.ValidationError: the model breaks ONNX's own rules.
    """
    import onnx
    from onnx import inliner

    for what, count in (("operators", len(model.graph.node)), ("initialisers", len(model.graph.initializer))):
        if count > MAX_NODES:
            hint = "split the model, or simplify it first"
            raise ModelError(f"the model has {count} {what}; the limit is {MAX_NODES}", where=name, hint=hint)
    if model.graph.sparse_initializer:
        raise ModelError("the model has sparse initialisers", where=name, hint="store the weights dense")
    if model.functions:
        _check_functions(name, model)
        model = inliner.inline_local_functions(model)
    for tensor in all_tensors(model):
        if min(tensor.dims, default=1) < 0 or prod(tensor.dims) >= MAX_ELEMENTS:
            what = f"tensor {tensor.name!r} has the shape {list(tensor.dims)}; the limit is {MAX_ELEMENTS} elements"
            raise ModelError(what, where=name, hint="export the model again; its tensors are too large or damaged")
    _read_external(name, model, folder, large)
    _import_domains(model)
    onnx.checker.check_model(model)
    return model


def _import_domains(model: Any) -> None:
    """Say version 1 of each domain of operators the model uses and does not import; Brevitas leaves out its own."""
    from onnx import helper

    known = {entry.domain or "ai.onnx" for entry in model.opset_import}
    used = dict.fromkeys(node.domain for node in model.graph.node if node.domain not in ("", "ai.onnx"))
    model.opset_import.extend(helper.make_opsetid(domain, 1) for domain in used if domain not in known)


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
            what = f"the model-local function {key[1]!r} is nested too deep or calls itself"
            raise ModelError(what, where=name, hint="export the model without model-local functions")
        if key not in sizes:
            open_calls.append(key)
            sizes[key] = expanded(bodies[key].node)
            open_calls.pop()
        return sizes[key]

    total = expanded(model.graph.node)
    if total > MAX_NODES:
        what = f"the model's functions expand to {total} operators; the limit is {MAX_NODES}"
        raise ModelError(what, where=name, hint="export the model without model-local functions, or a smaller one")


def _read_external(name: str, model: Any, folder: Path, large: dict[str, Array]) -> None:
    """Bring external data into the tensors; only files inside the model's folder are read."""
    from onnx import TensorProto

    total, initializers = 0, len(model.graph.initializer)
    for place, tensor in enumerate(all_tensors(model)):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        data = _external_bytes(name, tensor.name, entries, folder)
        total += len(data)
        if total >= MAX_ELEMENTS:
            what = f"the external data takes more than {MAX_ELEMENTS} bytes"
            raise ModelError(what, where=name, hint="compile a smaller network")
        array = elements_of(data, tensor.data_type, tensor.dims) if place < initializers else None
        if array is None or tensor.name in large:
            tensor.raw_data = data
        else:
            large[tensor.name] = array
            tensor.dims[:] = [0]
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _external_bytes(name: str, tensor: str, entries: dict[str, str], folder: Path) -> bytes:
    """The bytes of one tensor kept in another file."""
    location = entries.get("location", "")
    root = folder.resolve()
    path = (root / location).resolve()
    what, hint = f"tensor {tensor!r} keeps its data in {location!r}", "put the data file beside the model"
    if not location or Path(location).is_absolute() or not path.is_relative_to(root):
        hint = f"{hint}, and refer to it by a relative name"
        raise ModelError(f"{what}, outside the model's folder", where=name, hint=hint)
    if not path.is_file():
        raise ModelError(f"{what}, which does not exist", where=name, hint=hint)
    size = path.stat().st_size
    offset = int(entries.get("offset", "0"))
    length = int(entries.get("length", size - offset))
    if offset < 0 or length < 0 or offset + length > size:
        what = f"tensor {tensor!r} wants bytes {offset} to {offset + length} of {location!r}, which has {size}"
        raise ModelError(what, where=name, hint="copy the data file again, or export the model again")
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)


def decode(name: str, model: Any, large: Mapping[str, Array]) -> OnnxFile:
    """The model as plain data; it must have passed the checker. `large` has what is empty in it."""
    graph = model.graph
    constants = {
        _text(entry.name): wrap(large[entry.name], element_type(entry.data_type))
        if entry.name in large and list(entry.dims) == [0]
        else decode_tensor(entry)
        for entry in graph.initializer
    }
    inputs = tuple(_input(name, entry) for entry in graph.input if entry.name not in constants)
    outputs = tuple((_text(entry.name), _declared(entry)) for entry in graph.output)
    nodes = tuple(_node(name, index, node) for index, node in enumerate(graph.node))
    opsets = {entry.domain if entry.domain != "ai.onnx" else "": entry.version for entry in model.opset_import}
    return OnnxFile(name, opsets, inputs, outputs, constants, nodes)


def element_type(number: int) -> DType | None:
    """Our element type for an ONNX one."""
    from onnx import TensorProto

    return DTYPES.get(TensorProto.DataType.Name(number)) if number else None


def decode_tensor(tensor: Any) -> Constant:
    """An ONNX tensor as a constant."""
    from onnx import numpy_helper

    array = np.asarray(numpy_helper.to_array(tensor))
    return wrap(array, element_type(tensor.data_type))


def wrap(array: Array, dtype: DType | None) -> Constant:
    """A constant of `dtype` in the numpy type that holds it."""
    return Constant(array if dtype is None else array.astype(dtype.numpy, copy=False), dtype)


def widened(name: str, model: Any, tell: Tell) -> Any:
    """The model with float16 and bfloat16 as float32, inputs and outputs too: the core has no narrower floats."""
    from onnx import TensorProto, numpy_helper

    narrow, found = (TensorProto.FLOAT16, TensorProto.BFLOAT16), 0
    for tensor in all_tensors(model):
        if tensor.data_type in narrow:
            wide = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
            found += 1
    for entry in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if entry.type.tensor_type.elem_type in narrow:
            entry.type.tensor_type.elem_type = TensorProto.FLOAT
            found += 1
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in narrow:
                attribute.i = TensorProto.FLOAT
    if found:
        tell(f"{name}: its 16-bit floats are computed, taken and given as float32")
    return model


def fixed_shapes(name: str, model: Any, shapes: Mapping[str, Shape], tell: Tell) -> Any:
    """The model with the sizes of its inputs fixed: as asked, else the batch taken as 1. A name that stands for a size
    in several places has the same one everywhere.

    Raises:
        ModelError: a shape is asked for that is not that of an input, or sizes contradict each other.
    """
    constants = {entry.name for entry in model.graph.initializer}
    inputs = {entry.name: entry for entry in model.graph.input if entry.name not in constants}
    named: dict[str, int] = {}
    for wanted, shape in shapes.items():
        sizes = _sizes(inputs[wanted]) if wanted in inputs else None
        if sizes is None or len(sizes) != len(shape):
            what = f"has no input {wanted!r}" if sizes is None else f"gives the input {wanted!r} {len(sizes)} sizes"
            hint = f"its inputs are {', '.join(f'{other}{_sizes(inputs[other])}' for other in inputs)}"
            raise ModelError(f"the model {what}", where=f"{name}, --shape {wanted}", hint=hint)
        for given, size in zip(sizes, shape, strict=True):
            if named.get(str(given), size) != size or (isinstance(given, int) and given != size):
                what = f"{given} of the shape {sizes} of the input {wanted!r} cannot be {size}"
                raise ModelError(what, where=f"{name}, --shape {wanted}", hint="give another shape")
            named |= {given: size} if isinstance(given, str) and given != "?" else {}
    for own, entry in inputs.items():
        sizes = _sizes(entry)
        open_ = bool(sizes) and not entry.type.tensor_type.shape.dim[0].HasField("dim_value")
        if open_ and own not in shapes and sizes[0] not in named:
            batch = str(sizes[0])
            tell(f"{name}: the batch {batch!r} of the input {own!r} is taken as 1; --shape gives another")
            named |= {batch: 1} if batch != "?" else {}
            entry.type.tensor_type.shape.dim[0].dim_value = 1
    for entry in (*inputs.values(), *model.graph.output):
        asked = shapes.get(entry.name) if entry.name in inputs else None
        for place, declared in enumerate(_sizes(entry) if entry.type.HasField("tensor_type") else []):
            if asked is not None or declared in named:
                found = asked[place] if asked is not None else named[str(declared)]
                entry.type.tensor_type.shape.dim[place].dim_value = found
    return model


def _sizes(entry: Any) -> list[int | str]:
    """Declared sizes; a name or "?" for one that is not fixed."""
    dims = entry.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else d.dim_param or "?" for d in dims]


def _input(name: str, entry: Any) -> tuple[str, TensorType]:
    """An input, whose type must be fixed."""
    if not entry.type.HasField("tensor_type") or not entry.type.tensor_type.HasField("shape"):
        hint = "export the model again with a tensor of fixed shape there"
        raise ModelError(f"input {entry.name!r} is not a tensor with a known rank", where=name, hint=hint)
    dtype = element_type(entry.type.tensor_type.elem_type)
    if dtype is None:
        hint = "use float32, int8, uint8, int16, int32, int64 or bool"
        raise ModelError(f"input {entry.name!r} has an element type that is not supported", where=name, hint=hint)
    sizes = _sizes(entry)
    fixed = tuple(size for size in sizes if isinstance(size, int))
    if len(fixed) != len(sizes):
        what = f"input {entry.name!r} has the shape {sizes}, which is not fixed"
        raise ModelError(what, where=name, hint=FIX_SHAPES.format(name=entry.name, sizes=_example(sizes)))
    if prod(fixed) >= MAX_ELEMENTS:
        what = f"input {entry.name!r} has {prod(fixed)} elements; the limit is {MAX_ELEMENTS}"
        raise ModelError(what, where=name, hint="give it a smaller fixed shape")
    return _text(entry.name), TensorType(fixed, dtype)


def _example(sizes: Sequence[int | str]) -> str:
    """Sizes as --shape takes them, with numbers in place of names."""
    return ",".join(
        str(size) if isinstance(size, int) else ("32" if place else "1") for place, size in enumerate(sizes)
    )


def _declared(entry: Any) -> TensorType | None:
    """The declared type of an output, where it is fixed."""
    if not entry.type.HasField("tensor_type") or not entry.type.tensor_type.HasField("shape"):
        return None
    dtype, sizes = element_type(entry.type.tensor_type.elem_type), _sizes(entry)
    fixed = tuple(size for size in sizes if isinstance(size, int))
    return TensorType(fixed, dtype) if dtype is not None and len(fixed) == len(sizes) else None


def _node(name: str, index: int, node: Any) -> OnnxNode:
    domain = "" if node.domain == "ai.onnx" else _text(node.domain)
    inputs, outputs = tuple(map(_text, node.input)), tuple(map(_text, node.output))
    attributes = {entry.name: _attribute(name, node, entry) for entry in node.attribute}
    return OnnxNode(index, _text(node.name), domain, _text(node.op_type), inputs, outputs, attributes)


def _text(value: object) -> str:
    """A name; protobuf gives bytes for one that is not UTF-8."""
    if not isinstance(value, str) or "\x00" in value:
        raise ValueError(f"the name {value!r} is not text")
    return value


def _attribute(name: str, node: Any, entry: Any) -> Any:
    from onnx import AttributeProto, TensorProto, helper

    if entry.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        hint = "export the model without loops and conditions, or compute them outside the model"
        raise ModelError(
            f"{node.op_type} {node.name!r} has control flow, which is not supported", where=name, hint=hint
        )
    value = helper.get_attribute_value(entry)
    if isinstance(value, TensorProto):
        return decode_tensor(value)
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return tuple(value) if isinstance(value, list) or hasattr(value, "extend") else value


def all_tensors(model: Any) -> Iterator[Any]:
    """Every tensor stored in the model's graph and its nodes' attributes."""
    yield from model.graph.initializer
    for node in model.graph.node:
        for entry in node.attribute:
            if entry.HasField("t"):
                yield entry.t
            yield from entry.tensors
