"""Reads an ONNX file into plain, checked data: no access to the protobuf is trusted after this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dovetail.errors import ModelError
from dovetail.graph.types import Array, DType, TensorType

IR_VERSIONS = (3, 14)
"""Oldest and newest file format read."""

OPSETS = (7, 28)
"""Oldest and newest version of the standard operators read."""

MICROSOFT_OPSETS = (1, 1)
"""Oldest and newest version of ONNX Runtime's own operators (com.microsoft) read."""

MAX_NODES = 100_000
"""Most operators, initialisers or inputs of a model, model-local functions expanded."""

MAX_ELEMENTS = 2**31
"""A tensor must have fewer elements than this, and all initialisers together fewer bytes."""

DTYPES: Mapping[str, DType] = {
    "FLOAT": DType.FLOAT32,
    "BOOL": DType.BOOL,
    **{kind.text.upper(): kind for kind in DType if kind.is_integer},
}
"""Element types by their names in ONNX."""

FIX_SHAPES = (
    "give every input fixed sizes, for instance: python -m onnxruntime.tools.make_dynamic_shape_fixed "
    "--input_name {name} --input_shape 1,... model.onnx fixed.onnx"
)
"""Advice for a model with symbolic sizes."""


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


def decode(name: str, model: Any) -> OnnxFile:
    """The model as plain data; it must have passed the checker."""
    graph = model.graph
    constants = {_text(entry.name): decode_tensor(entry) for entry in graph.initializer}
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
    return Constant(array if dtype is None else array.astype(dtype.numpy), dtype)


def _sizes(entry: Any) -> list[int | str]:
    """Declared sizes; a name or "?" for one that is not fixed."""
    found: list[int | str] = []
    for axis in entry.type.tensor_type.shape.dim:
        fixed = axis.HasField("dim_value") and axis.dim_value > 0
        found.append(axis.dim_value if fixed else axis.dim_param or "?")
    return found


def _input(name: str, entry: Any) -> tuple[str, TensorType]:
    """An input, whose type must be fixed."""
    if not entry.type.HasField("tensor_type") or not entry.type.tensor_type.HasField("shape"):
        raise ModelError(f"input {entry.name!r} is not a tensor with a known rank", where=name,
                         hint="export the model again with a tensor of fixed shape there")
    dtype = element_type(entry.type.tensor_type.elem_type)
    if dtype is None:
        raise ModelError(f"input {entry.name!r} has an element type that is not supported", where=name,
                         hint="use float32, int8, uint8, int16, int32, int64 or bool")
    sizes = _sizes(entry)
    fixed = tuple(size for size in sizes if isinstance(size, int))
    if len(fixed) != len(sizes):
        raise ModelError(
            f"input {entry.name!r} has the shape {sizes}, which is not fixed",
            where=name,
            hint=FIX_SHAPES.format(name=entry.name),
        )
    if prod(fixed) >= MAX_ELEMENTS:
        raise ModelError(f"input {entry.name!r} has {prod(fixed)} elements; the limit is {MAX_ELEMENTS}", where=name,
                         hint="give it a smaller fixed shape")
    return _text(entry.name), TensorType(fixed, dtype)


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
        raise ModelError(f"{node.op_type} {node.name!r} has control flow, which is not supported", where=name,
                         hint="export the model without loops and conditions, or compute them outside the model")
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
