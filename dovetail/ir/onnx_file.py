"""Graphs as ONNX models, written without the package onnx (`dovetail.ir.onnx_stored` reads and runs them).

Every operator is a function of the model's own, whose body is standard ONNX. So any stage opens in Netron, runs
unchanged in ONNX Runtime, and loads back as the same graph. A state is an input with its first contents as default
value, and an output with its next. Attributes are ONNX attributes by the types that the operators' dataclasses declare.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dovetail.documented import summary_of
from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.onnx_body import (
    MOST_BYTES,
    OPSET,
    OnnxBody,
    WrittenNode,
    attribute,
    onnx_model,
    properties,
    value_info,
)
from dovetail.ir.onnx_wire import joined, numbered, tagged, tensor_parts
from dovetail.ir.operators.base import Operator
from dovetail.ir.types import Array, DType, TensorType

OperatorT = TypeVar("OperatorT", bound=Operator)


def write_attributes(operator: Operator) -> list[bytes]:
    """One ONNX attribute per field, in the fields' order: integers and lists of them as such, others as JSON text."""
    return [_write(field.name, getattr(operator, field.name)) for field in dataclasses.fields(operator)]


def from_written(kind: type[OperatorT], attributes: Mapping[str, Any]) -> OperatorT:
    """The operator of attributes as an ONNX file has them: integers, tuples of them, JSON text; errors as
    `from_plain`."""
    plain = {name: json.loads(value) if isinstance(value, str) else value for name, value in attributes.items()}
    found = from_plain(kind, [(name, list(v) if isinstance(v, tuple) else v) for name, v in plain.items()])
    assert isinstance(found, kind)
    return found


def from_plain(kind: type[Operator], attributes: Sequence[tuple[str, Any]]) -> Operator:
    """The operator with these attributes, as JSON has them; raises ValueError when they are not its own."""
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    values: dict[str, Any] = {}
    for name, plain in attributes:
        if name not in fields or name in values:
            raise ValueError(f"{kind.__name__} has no attribute {name!r}, or it is given twice")
        values[name] = _decode(plain, hints[name], name)
    missing = [name for name in fields if name not in values]
    if missing:
        raise ValueError(f"{kind.__name__} lacks its attribute {missing[0]!r}")
    return kind(**values)


def _write(name: str, value: Any) -> bytes:
    plain = _plain(value)
    if type(plain) is int or (isinstance(plain, list) and all(type(item) is int for item in plain)):
        return attribute(name, plain)
    return attribute(name, json.dumps(plain))


def _plain(value: Any) -> Any:
    """The value in lists, numbers and text."""
    if isinstance(value, DType):
        return value.text
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any, hint: Any, name: str) -> Any:
    """A plain value as the declared type; raises ValueError when it is not one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _decode(value, next(part for part in arguments if part is not type(None)), name)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
        if len(kinds) == len(value):
            return tuple(_decode(item, kind, name) for item, kind in zip(value, kinds, strict=True))
    if isinstance(hint, type) and isinstance(value, str) and issubclass(hint, enum.Enum):
        for member in hint:
            if _plain(member) == value:
                return member
    if (hint is float and isinstance(value, (int, float))) or (isinstance(hint, type) and type(value) is hint):
        return value
    raise ValueError(f"attribute {name!r} holds {value!r}")


DOMAIN = "dovetail"
"""The domain of the functions."""
NARROW_TYPES, OPERATOR_KIND, ORIGIN = "dovetail.narrow_types", "dovetail.operator", "dovetail.origin"
"""Metadata of a model: the types narrower than a byte; of a function: its class; of a node: its origin."""
USER_DOMAIN = "dovetail.user"
"""The domain of operators that a user's file or the package defines as classes; these have no standard body."""


def save_graph(graph: Graph, path: Path | str) -> None:
    """Write a graph as an ONNX model, the same bytes every time.

    Raises:
        DovetailError: the model is larger than 2 GiB, or cannot be written there.
    """
    try:
        with Path(path).open("wb") as file:
            file.writelines(part if isinstance(part, bytes) else part.data for part in graph_parts(graph))
    except OSError as error:
        hint = "choose another folder, or free space and give permission"
        raise DovetailError(f"cannot write the model: {error.strerror}", where=str(path), hint=hint) from error


def graph_bytes(graph: Graph) -> bytes:
    """The file `save_graph` writes; raises DovetailError where it would be larger than 2 GiB."""
    return joined(graph_parts(graph))


def graph_parts(graph: Graph) -> list[bytes | Array]:
    """The same as parts one after the other, bytes and the large constants themselves; errors as `graph_bytes`."""
    functions = _Functions()
    nodes = [opaque_node(node) if node.operator.opaque else _node(graph, node, functions) for node in graph.nodes]
    parts: list[bytes | Array] = [numbered(1, *(node.encoded() for node in nodes)) + numbered(2, graph.name)]
    firsts = ((name, first) for name, _, first in graph.kept)  # of an input with a default value
    for name, array in (*graph.constants.items(), *firsts):
        held = tensor_parts(name, array)
        parts += [tagged(5, sum(map(len, held))), *held]
    inner = [node.output for node in graph.nodes if node.output not in graph.outputs]
    for number, names in ((11, graph.inputs), (12, graph.outputs), (13, inner)):
        parts.append(numbered(number, *(value_info(name, graph.types[name]) for name in names)))
    narrow = {name: kind.dtype.text for name, kind in graph.types.items() if kind.dtype.bits < 8}
    metadata = {NARROW_TYPES: json.dumps(dict(sorted(narrow.items())))} if narrow else {}
    domains = (DOMAIN, *([USER_DOMAIN] if any(node.operator.opaque for node in graph.nodes) else []))
    parts = onnx_model(parts, DOMAIN, metadata, domains, functions.written)
    if (nbytes := sum(map(len, parts))) > MOST_BYTES:
        what = f"{nbytes} bytes are more than an ONNX file can hold ({MOST_BYTES})"
        raise DovetailError(what, where=graph.name, hint="a smaller network, or fewer constants in it")
    return parts


class _Functions:
    """The functions written so far; operators with one body share one function."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._names: dict[tuple[object, ...], str] = {}
        self._counts: dict[str, int] = {}

    def name_of(self, operator: Operator, types: Sequence[TensorType]) -> str:
        """The name of the function for this operator on operands of these types."""
        kind, name = type(operator), operator.class_name
        operands = [f"operand_{index}" for index in range(len(types))]
        body = OnnxBody(operands)
        result = operator.onnx(body, operands, types)
        if result in operands:
            result = body.add("Identity", [result])
        nodes = ((one.op_type, *one.input, None, *one.output, *one.attributes) for one in body.nodes)
        key = (name, kind, *operands, result, *nodes)
        if key not in self._names:
            count = self._counts.get(name, 0) + 1
            self._counts[name] = count
            self._names[key] = name if count == 1 else f"{name}_{count}"
            self.written.append(_function(self._names[key], kind, operands, result, body))
        return self._names[key]


def _function(name: str, kind: type[Operator], operands: Sequence[str], result: str, body: OnnxBody) -> bytes:
    """An operator's meaning, as a FunctionProto."""
    attributes = [field.name for field in dataclasses.fields(kind)]
    parts = [numbered(1, name), numbered(4, *operands), numbered(5, result), numbered(6, *attributes)]
    parts += [numbered(7, *(node.encoded() for node in body.nodes))]
    parts += [numbered(8, summary_of(kind).partition("\n")[0]), numbered(9, numbered(1, "") + numbered(2, OPSET))]
    return b"".join([*parts, numbered(10, DOMAIN), properties(14, {OPERATOR_KIND: kind.__name__})])


def _node(graph: Graph, node: Node, functions: _Functions) -> WrittenNode:
    return _written(node, functions.name_of(node.operator, [graph.types[value] for value in node.inputs]), DOMAIN)


def opaque_node(node: Node) -> WrittenNode:
    """A node whose meaning is not in the file, by the name of its class."""
    return _written(node, node.operator.class_name, USER_DOMAIN)


def _written(node: Node, name: str, domain: str) -> WrittenNode:
    origin = {ORIGIN: node.origin} if node.origin else {}
    return WrittenNode(
        name, list(node.inputs), [node.output], node.output, domain, write_attributes(node.operator), origin
    )
