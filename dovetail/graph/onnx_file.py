"""Graphs as ONNX models: every operator a function of the model's own, whose body is standard ONNX.

So any stage opens in Netron, runs unchanged in ONNX Runtime, and loads back as the same graph. A state is an input
with its first contents as default value, and an output with its next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from dovetail import __version__
from dovetail.errors import DovetailError, ModelError
from dovetail.graph.graph import Graph, Node, verify
from dovetail.graph.onnx_attributes import read_attributes, write_attributes
from dovetail.graph.onnx_body import OPSET, OnnxBody, element_type
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.base import Operator
from dovetail.operators.catalogue import OPERATORS

DOMAIN = "dovetail"
"""The domain of the functions."""
IR_VERSION = 10
"""The file format's version: the one of opset 21, read by every ONNX Runtime since 1.18."""
_NARROW_TYPES = "dovetail.narrow_types"
_OPERATOR = "dovetail.operator"
_ORIGIN = "dovetail.origin"
_MOST_BYTES = (1 << 31) - 1
"""The largest protobuf message."""
_MOST_DIMENSIONS = 32


def save_graph(graph: Graph, path: Path | str) -> None:
    """Write a graph as an ONNX model, the same bytes every time.

    Raises:
        DovetailError: the model is larger than 2 GiB, or cannot be written there.
    """
    model = to_model(graph)
    if model.ByteSize() > _MOST_BYTES:
        what = f"{model.ByteSize()} bytes are more than an ONNX file can hold ({_MOST_BYTES})"
        raise DovetailError(what, where=str(path), hint="compile without --save-stages, or a smaller network")
    try:
        Path(path).write_bytes(model.SerializeToString(deterministic=True))
    except OSError as error:
        raise DovetailError(f"cannot write the model: {error.strerror}", where=str(path),
                            hint="choose another folder, or free space and give permission") from error


def load_graph(path: Path | str) -> Graph:
    """Read a graph that `save_graph` wrote. The functions' bodies are not read: the operators' names say all.

    Raises:
        ModelError: the file is missing, damaged, or not one of Dovetail's.
    """
    try:
        size = Path(path).stat().st_size
        if size > _MOST_BYTES:
            raise ModelError(f"{size} bytes are more than an ONNX file can hold ({_MOST_BYTES})", where=str(path),
                             hint="compile a smaller network")
        model = onnx.ModelProto.FromString(Path(path).read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read the model: {error.strerror}", where=str(path),
                         hint="check the spelling and the permission to read") from error
    except DecodeError as error:
        raise ModelError("this is not an ONNX model, or it is damaged", where=str(path),
                         hint="save the stage again with --save-stages") from error
    try:
        return from_model(model)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ModelError(
            f"this is not a graph saved by Dovetail: {error}", where=str(path), hint="save the stage again"
        ) from error


def to_model(graph: Graph) -> onnx.ModelProto:
    """The graph as an ONNX model in memory."""
    functions = _Functions()
    body = onnx.GraphProto(name=graph.name)
    body.input.extend(_value_info(graph, name) for name in graph.inputs)
    body.output.extend(_value_info(graph, name) for name in graph.outputs)
    for name, array in graph.constants.items():
        body.initializer.append(_tensor(name, array))
    for name, _, first in graph.kept:  # an input with a default value
        body.initializer.append(_tensor(name, first))
    for node in graph.nodes:
        body.node.append(_node(graph, node, functions))
        if node.output not in graph.outputs:
            body.value_info.append(_value_info(graph, node.output))
    narrow = {name: kind.dtype.text for name, kind in graph.types.items() if kind.dtype.bits < 8}
    model = onnx.ModelProto(ir_version=IR_VERSION, producer_name=DOMAIN, producer_version=__version__, graph=body)
    model.opset_import.extend([onnx.OperatorSetIdProto(domain="", version=OPSET)])
    model.opset_import.extend([onnx.OperatorSetIdProto(domain=DOMAIN, version=1)])
    model.functions.extend(functions.written)
    if narrow:
        model.metadata_props.add(key=_NARROW_TYPES, value=json.dumps(dict(sorted(narrow.items()))))
    return model


class _Functions:
    """The functions written so far; operators with one body share one function."""

    def __init__(self) -> None:
        self.written: list[onnx.FunctionProto] = []
        self._names: dict[tuple[str, bytes], str] = {}
        self._counts: dict[str, int] = {}

    def name_of(self, operator: Operator, types: Sequence[TensorType]) -> str:
        """The name of the function for this operator on operands of these types."""
        kind = type(operator).__name__
        function = _function(operator, types)
        key = (kind, function.SerializeToString(deterministic=True))
        if key not in self._names:
            count = self._counts.get(kind, 0) + 1
            self._counts[kind] = count
            function.name = kind if count == 1 else f"{kind}_{count}"
            self._names[key] = function.name
            self.written.append(function)
        return self._names[key]


def _function(operator: Operator, types: Sequence[TensorType]) -> onnx.FunctionProto:
    """The operator's meaning, not yet named."""
    operands = [f"operand_{index}" for index in range(len(types))]
    body = OnnxBody(operands)
    result = operator.onnx(body, operands, types)
    if result in operands:
        result = body.add("Identity", [result])
    kind = type(operator)
    function = onnx.FunctionProto(domain=DOMAIN, doc_string=(kind.__doc__ or "").partition("\n")[0])
    function.input.extend(operands)
    function.output.append(result)
    function.attribute.extend(attribute.name for attribute in write_attributes(operator))
    function.node.extend(body.nodes)
    function.opset_import.extend([onnx.OperatorSetIdProto(domain="", version=OPSET)])
    function.metadata_props.add(key=_OPERATOR, value=kind.__name__)
    return function


def _node(graph: Graph, node: Node, functions: _Functions) -> onnx.NodeProto:
    name = functions.name_of(node.operator, [graph.types[value] for value in node.inputs])
    written = onnx.NodeProto(name=node.output, op_type=name, domain=DOMAIN)
    written.input.extend(node.inputs)
    written.output.append(node.output)
    written.attribute.extend(write_attributes(node.operator))
    if node.origin:
        written.metadata_props.add(key=_ORIGIN, value=node.origin)
    return written


def _value_info(graph: Graph, name: str) -> onnx.ValueInfoProto:
    kind = graph.types[name]
    return onnx.helper.make_tensor_value_info(name, element_type(kind.dtype), list(kind.shape))


def _tensor(name: str, array: Array) -> onnx.TensorProto:
    plain = np.ascontiguousarray(array).reshape(array.shape)
    return onnx.numpy_helper.from_array(plain, name)


def from_model(model: onnx.ModelProto) -> Graph:
    """The graph of a model that `to_model` gave; raises ValueError for any other."""
    if model.producer_name != DOMAIN:
        raise ValueError(f"it was written by {model.producer_name or 'an unknown program'!r}")
    narrow = _narrow_types(model)
    kinds = {function.name: _operator_kind(function) for function in model.functions}
    types: dict[str, TensorType] = {}
    for info in model.graph.input:
        types[info.name] = _type_of(info.name, info.type.tensor_type, narrow)
    constants: dict[str, Array] = {}
    states: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        array = _array(tensor)
        if tensor.name in types:
            states[tensor.name] = array
            continue
        constants[tensor.name] = array
        types[tensor.name] = TensorType(tuple(array.shape), narrow.get(tensor.name) or DType.of(array.dtype))
    nodes = []
    for written in model.graph.node:
        node = _read_node(written, kinds)
        unknown = [name for name in node.inputs if name not in types]
        if unknown:
            raise ValueError(f"node {written.name!r} reads {unknown[0]!r} before it is defined")
        if node.output in types:
            raise ValueError(f"the value {node.output!r} is defined twice")
        types[node.output] = node.operator.infer([types[name] for name in node.inputs])
        nodes.append(node)
    inputs = tuple(info.name for info in model.graph.input)
    outputs = tuple(info.name for info in model.graph.output)
    if inputs[len(inputs) - len(states) :] != tuple(states):
        raise ValueError("the states are not the last inputs")
    graph = Graph(model.graph.name, inputs, outputs, tuple(nodes), types, constants, tuple(states.values()))
    verify(graph)
    return graph


def _narrow_types(model: onnx.ModelProto) -> dict[str, DType]:
    for entry in model.metadata_props:
        if entry.key == _NARROW_TYPES:
            found = json.loads(entry.value)
            if not isinstance(found, dict):
                raise ValueError(f"{_NARROW_TYPES} holds {entry.value!r}")
            kinds = {kind.text: kind for kind in DType if kind.bits < 8}
            return {name: kinds[text] for name, text in found.items()}
    return {}


def _operator_kind(function: onnx.FunctionProto) -> type[Operator]:
    names = [entry.value for entry in function.metadata_props if entry.key == _OPERATOR]
    if len(names) != 1 or names[0] not in OPERATORS:
        raise ValueError(f"the function {function.name!r} is no operator of Dovetail")
    return OPERATORS[names[0]]


def _type_of(name: str, kind: onnx.TypeProto.Tensor, narrow: dict[str, DType]) -> TensorType:
    shape = tuple(size.dim_value for size in kind.shape.dim)
    if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError(f"the input {name!r} has the shape {list(shape)}")
    return TensorType(shape, narrow.get(name) or DType.of(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))


def _array(tensor: onnx.TensorProto) -> Array:
    if tensor.data_location != onnx.TensorProto.DEFAULT or len(tensor.dims) > _MOST_DIMENSIONS:
        raise ValueError(f"the constant {tensor.name!r} lies outside the file")
    array = np.array(onnx.numpy_helper.to_array(tensor))
    array.setflags(write=False)
    return array


def _read_node(written: onnx.NodeProto, kinds: dict[str, type[Operator]]) -> Node:
    if written.domain != DOMAIN or written.op_type not in kinds or len(written.output) != 1:
        raise ValueError(f"node {written.name!r} is {written.domain}.{written.op_type}")
    operator = read_attributes(kinds[written.op_type], written.attribute)
    origin = next((entry.value for entry in written.metadata_props if entry.key == _ORIGIN), "")
    return Node(operator, tuple(written.input), written.output[0], origin)
