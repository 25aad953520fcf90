"""Graphs as ONNX models: saved, loaded, and run in ONNX Runtime to see whether a stage means what it should.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from dovetail.documented import summary_of
from dovetail.errors import DovetailError, ModelError
from dovetail.ir.graph import Graph, Node, evaluate, verify
from dovetail.ir.onnx_body import MOST_BYTES, OPSET, OnnxBody, onnx_model, tensor, value_info
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.onnx_wire import is_large, with_large
from dovetail.ir.operators import OPERATORS
from dovetail.ir.operators.base import Operator
from dovetail.ir.types import Array, DType, TensorType

OperatorT = TypeVar("OperatorT", bound=Operator)

_MOST_CHARACTERS = 100_000
"""Longest text of one attribute that is read."""


def write_attributes(operator: Operator) -> list[onnx.AttributeProto]:
    """One ONNX attribute per field, in the fields' order: integers and lists of them as such, others as JSON text."""
    return [_write(field.name, getattr(operator, field.name)) for field in dataclasses.fields(operator)]


def read_attributes(kind: type[Operator], attributes: Sequence[onnx.AttributeProto]) -> Operator:
    """The operator whose attributes were written; raises ValueError when they are not its own."""
    return _from_plain(kind, [(attribute.name, _read(attribute)) for attribute in attributes])


def from_written(kind: type[OperatorT], attributes: Mapping[str, Any]) -> OperatorT:
    """The same, of attributes that were decoded: integers, tuples of them, JSON text."""
    plain = {name: json.loads(value) if isinstance(value, str) else value for name, value in attributes.items()}
    found = _from_plain(kind, [(name, list(v) if isinstance(v, tuple) else v) for name, v in plain.items()])
    assert isinstance(found, kind)
    return found


def _from_plain(kind: type[Operator], attributes: Sequence[tuple[str, Any]]) -> Operator:
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


def _write(name: str, value: Any) -> onnx.AttributeProto:
    attribute = onnx.AttributeProto(name=name)
    plain = _plain(value)
    if isinstance(plain, int) and not isinstance(plain, bool):
        attribute.type = onnx.AttributeProto.INT
        attribute.i = plain
    elif isinstance(plain, list) and all(type(item) is int for item in plain):
        attribute.type = onnx.AttributeProto.INTS
        attribute.ints.extend(plain)
    else:
        attribute.type = onnx.AttributeProto.STRING
        attribute.s = json.dumps(plain).encode()
    return attribute


def _plain(value: Any) -> Any:
    """The value in lists, numbers and text."""
    if isinstance(value, DType):
        return value.text
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _read(attribute: onnx.AttributeProto) -> Any:
    if attribute.type == onnx.AttributeProto.INT:
        return attribute.i
    if attribute.type == onnx.AttributeProto.INTS:
        return list(attribute.ints)
    if attribute.type == onnx.AttributeProto.STRING and len(attribute.s) <= _MOST_CHARACTERS:
        return json.loads(attribute.s)
    raise ValueError(f"attribute {attribute.name!r} is of a kind or length that Dovetail does not write")


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
_NARROW_TYPES = "dovetail.narrow_types"
_OPERATOR = "dovetail.operator"
_ORIGIN = "dovetail.origin"
_MOST_DIMENSIONS = 32
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
    return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in graph_parts(graph))


def graph_parts(graph: Graph) -> list[bytes | Array]:
    """The same as parts one after the other, bytes and the large constants themselves; errors as `graph_bytes`."""
    large = {place: array for place, array in enumerate(graph.constants.values()) if is_large(array)}
    model = to_model(graph, hollow=True)
    nbytes = model.ByteSize() + sum(array.nbytes for array in large.values())
    if nbytes > MOST_BYTES:
        what = f"{nbytes} bytes are more than an ONNX file can hold ({MOST_BYTES})"
        raise DovetailError(what, where=graph.name, hint="a smaller network, or fewer constants in it")
    return with_large(bytes(model.SerializeToString(deterministic=True)), large)


def load_graph(path: Path | str, operators: Mapping[str, type[Operator]] | None = None) -> Graph:
    """Read a graph that `save_graph` wrote. The functions' bodies are not read: the operators' names say all.
    `operators` are those of users' files and bundled ones, by the names of their classes.

    Raises:
        ModelError: the file is missing, damaged, or not one of Dovetail's.
    """
    file, where = Path(path), str(path)
    try:
        if (size := file.stat().st_size) > MOST_BYTES:
            hint = "compile a smaller network"
            raise ModelError(f"{size} bytes are more than an ONNX file can hold ({MOST_BYTES})", where=where, hint=hint)
        return from_model(onnx.ModelProto.FromString(file.read_bytes()), operators or {})
    except OSError as error:
        hint = "check the spelling and the permission to read"
        raise ModelError(f"cannot read the model: {error.strerror}", where=where, hint=hint) from error
    except DecodeError as error:
        raise ModelError(
            "this is not an ONNX model, or it is damaged", where=where, hint="save the stage again with --save-stages"
        ) from error
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ModelError(
            f"this is not a graph saved by Dovetail: {error}", where=where, hint="save the stage again"
        ) from error


def to_model(graph: Graph, hollow: bool = False) -> onnx.ModelProto:
    """The graph as an ONNX model in memory; a hollow one has large constants without their contents."""
    functions = _Functions()
    body = onnx.GraphProto(name=graph.name)
    body.input.extend(value_info(name, graph.types[name]) for name in graph.inputs)
    body.output.extend(value_info(name, graph.types[name]) for name in graph.outputs)
    for name, array in graph.constants.items():
        if hollow and is_large(array):
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            body.initializer.append(onnx.TensorProto(name=name, data_type=kind, dims=array.shape))
        else:
            body.initializer.append(tensor(name, array))
    for name, _, first in graph.kept:  # an input with a default value
        body.initializer.append(tensor(name, first))
    for node in graph.nodes:
        body.node.append(_node(graph, node, functions) if not node.operator.opaque else opaque_node(node))
        if node.output not in graph.outputs:
            body.value_info.append(value_info(node.output, graph.types[node.output]))
    narrow = {name: kind.dtype.text for name, kind in graph.types.items() if kind.dtype.bits < 8}
    properties = {_NARROW_TYPES: json.dumps(dict(sorted(narrow.items())))} if narrow else {}
    model = onnx_model(body, DOMAIN, properties, DOMAIN)
    model.functions.extend(functions.written)
    if any(node.operator.opaque for node in graph.nodes):
        model.opset_import.add(domain=USER_DOMAIN, version=1)
    return model


class _Functions:
    """The functions written so far; operators with one body share one function."""

    def __init__(self) -> None:
        self.written: list[onnx.FunctionProto] = []
        self._names: dict[tuple[str, bytes], str] = {}
        self._counts: dict[str, int] = {}

    def name_of(self, operator: Operator, types: Sequence[TensorType]) -> str:
        """The name of the function for this operator on operands of these types."""
        kind = operator.class_name
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
    function = onnx.FunctionProto(domain=DOMAIN, doc_string=summary_of(kind).partition("\n")[0])
    function.input.extend(operands)
    function.output.append(result)
    function.attribute.extend(attribute.name for attribute in write_attributes(operator))
    function.node.extend(body.nodes)
    function.opset_import.extend([onnx.OperatorSetIdProto(domain="", version=OPSET)])
    function.metadata_props.add(key=_OPERATOR, value=kind.__name__)
    return function


def _node(graph: Graph, node: Node, functions: _Functions) -> onnx.NodeProto:
    return _written(node, functions.name_of(node.operator, [graph.types[value] for value in node.inputs]), DOMAIN)


def opaque_node(node: Node) -> onnx.NodeProto:
    """A node whose meaning is not in the file, by the name of its class."""
    return _written(node, node.operator.class_name, USER_DOMAIN)


def _written(node: Node, name: str, domain: str) -> onnx.NodeProto:
    written = onnx.NodeProto(name=node.output, op_type=name, domain=domain)
    written.input.extend(node.inputs)
    written.output.append(node.output)
    written.attribute.extend(write_attributes(node.operator))
    if node.origin:
        written.metadata_props.add(key=_ORIGIN, value=node.origin)
    return written


def from_model(model: onnx.ModelProto, operators: Mapping[str, type[Operator]] = MappingProxyType({})) -> Graph:
    """The graph of a model that `to_model` gave; raises ValueError for any other, ModelError where an operator of the
    user's own is not among `operators`."""
    if model.producer_name != DOMAIN and not any(function.domain == DOMAIN for function in model.functions):
        raise ValueError(f"it was written by {model.producer_name or 'an unknown program'!r}")
    narrow = _narrow_types(model)
    kinds = {function.name: _operator_kind(function, operators) for function in model.functions}
    types: dict[str, TensorType] = {}
    for info in model.graph.input:
        types[info.name] = _type_of(info.name, info.type.tensor_type, narrow)
    constants: dict[str, Array] = {}
    states: dict[str, Array] = {}
    for held in model.graph.initializer:
        array = _array(held)
        if held.name in types:
            states[held.name] = array
            continue
        constants[held.name] = array
        types[held.name] = TensorType(tuple(array.shape), narrow.get(held.name) or DType.of(array.dtype))
    nodes = []
    for written in model.graph.node:
        node = _read_node(written, operators if written.domain == USER_DOMAIN else kinds)
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
    held = next((entry.value for entry in model.metadata_props if entry.key == _NARROW_TYPES), "{}")
    found, kinds = json.loads(held), {kind.text: kind for kind in DType if kind.bits < 8}
    if not isinstance(found, dict):
        raise ValueError(f"{_NARROW_TYPES} holds {held!r}")
    return {name: kinds[text] for name, text in found.items()}


def _operator_kind(function: onnx.FunctionProto, operators: Mapping[str, type[Operator]]) -> type[Operator]:
    known = {**operators, **OPERATORS}
    names = [entry.value for entry in function.metadata_props if entry.key == _OPERATOR]
    if len(names) != 1 or names[0] not in known:
        raise ValueError(f"the function {function.name!r} is no operator of Dovetail")
    return known[names[0]]


def _type_of(name: str, kind: onnx.TypeProto.Tensor, narrow: dict[str, DType]) -> TensorType:
    shape = tuple(size.dim_value for size in kind.shape.dim)
    if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError(f"the input {name!r} has the shape {list(shape)}")
    return TensorType(shape, narrow.get(name) or DType.of(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))


def _array(held: onnx.TensorProto) -> Array:
    if held.data_location != onnx.TensorProto.DEFAULT or len(held.dims) > _MOST_DIMENSIONS:
        raise ValueError(f"the constant {held.name!r} lies outside the file")
    array = np.array(onnx.numpy_helper.to_array(held))
    array.setflags(write=False)
    return array


def _read_node(written: onnx.NodeProto, kinds: Mapping[str, type[Operator]]) -> Node:
    if written.domain == USER_DOMAIN and written.op_type not in kinds:
        what = f"{written.op_type} is an operator of a file of your own"
        raise ModelError(what, where=f"value '{written.name}'", hint="give the file with --operators")
    if written.domain not in (DOMAIN, USER_DOMAIN) or written.op_type not in kinds or len(written.output) != 1:
        raise ValueError(f"node {written.name!r} is {written.domain}.{written.op_type}")
    operator = read_attributes(kinds[written.op_type], written.attribute)
    origin = next((entry.value for entry in written.metadata_props if entry.key == _ORIGIN), "")
    return Node(operator, tuple(written.input), written.output[0], origin)


FLOAT_TOLERANCE = 1e-4
"""Difference allowed between float values, relative to the larger of 1 and the value's largest element."""


def run_onnx(graph: Graph, inputs: Mapping[str, Array], keep: Iterable[str] = ()) -> dict[str, Array]:
    """Run the graph's ONNX form in ONNX Runtime, unoptimised; returns the outputs and the kept values.

    Raises:
        MissingExtraError: onnxruntime is not installed.
    """
    graph, inputs = _without_opaque(graph, inputs)
    computed = {node.output for node in graph.nodes}
    names = tuple(dict.fromkeys(name for name in (*graph.outputs, *keep) if name in computed))
    if not names:
        return {}
    model = to_model(replace(graph, outputs=names))
    session = runtime_session(model, optimised=False)
    results = session.run(list(names), {name: inputs[name] for name in graph.inputs})
    return dict(zip(names, results, strict=True))


def _without_opaque(graph: Graph, inputs: Mapping[str, Array]) -> tuple[Graph, Mapping[str, Array]]:
    """The graph with what operators without a standard body give as further inputs, and these from numpy."""
    given = [node.output for node in graph.nodes if node.operator.opaque]
    if not given:
        return graph, inputs
    found = evaluate(graph, inputs, given)
    nodes = tuple(node for node in graph.nodes if not node.operator.opaque)
    outputs = tuple(name for name in graph.outputs if name not in given)
    rest = replace(graph, nodes=nodes, inputs=(*given, *graph.inputs), outputs=outputs)
    return rest, {**inputs, **{name: found[name] for name in given}}


def check_graph(graph: Graph, inputs: Mapping[str, Array], keep: Iterable[str] = ()) -> int:
    """Compare the graph in numpy with its ONNX form in ONNX Runtime.

    Args:
        graph: any stage.
        inputs: an array per graph input.
        keep: values to compare beside the outputs; names that no node computes are passed over.

    Returns:
        How many values were compared: integers exactly, floats within `FLOAT_TOLERANCE`.

    Raises:
        DovetailError: a value differs; the first in the graph's order is named, with the largest difference.
        MissingExtraError: onnxruntime is not installed.
    """
    found = run_onnx(graph, inputs, keep)
    expected = evaluate(graph, inputs, [name for name in found if name not in graph.outputs])
    for node in graph.nodes:
        if node.output in found:
            _compare(node.output, expected[node.output], found[node.output], 0, "numpy and ONNX Runtime")
    return len(found)


def check_stages(before: Graph, after: Graph, inputs: Mapping[str, Array], lsb: int = 1) -> int:
    """Compare two stages of one network on every value that both compute under one name and type.

    Each such value of `after` is computed from the values of `before` above it, so that a difference is that of
    the nodes between, not one grown from layer to layer. Where values may move, sums of 32 bits are compared in the
    narrower values made of them: a step of one of those is many steps of a sum, which may have another scale too.

    Args:
        before: the earlier stage, for instance the QDQ graph.
        after: the later stage, for instance the integer graph.
        inputs: an array per input of both.
        lsb: largest difference allowed between integers; between floats it is `FLOAT_TOLERANCE`.

    Returns:
        How many values were compared.

    Raises:
        DovetailError: a value differs by more; it is named, with the difference and the bound.
    """
    computed = {node.output for node in before.nodes}
    names = (node.output for node in after.nodes if node.output in computed)
    shared = [name for name in names if before.types[name] == after.types[name]]
    if lsb:
        sums = {name for name in shared if before.types[name].dtype is DType.INT32} - set(after.outputs)
        shared = [name for name in shared if name not in sums]
    expected = evaluate(before, inputs, shared)
    values: dict[str, Array] = {**after.constants, **{name: inputs[name] for name in after.inputs}}
    for node in after.nodes:
        result = node.operator.evaluate([values[name] for name in node.inputs])
        if node.output in expected and node.output in shared:
            _compare(node.output, expected[node.output], result, lsb, f"{before.name} before and after the stage")
            result = expected[node.output]
        values[node.output] = result
    return len(shared)


def _compare(name: str, expected: Array, found: Array, lsb: int, between: str) -> None:
    """Raise DovetailError unless two arrays agree."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        what = f"is {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
        hint = "report this: the two stages must compute the same; --save-stages keeps both for comparison"
        raise DovetailError(f"the value {what} ({between})", where=name, hint=hint)
    if not expected.size:
        return
    allowed: float = lsb
    if DType.of(expected.dtype) is DType.FLOAT32:
        allowed = FLOAT_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    largest = float(difference.max())
    if largest <= allowed:
        return
    place = [int(index) for index in np.unravel_index(int(difference.argmax()), difference.shape)]
    many = f"{int((difference > allowed).sum())} of {difference.size} elements differ"
    raise DovetailError(
        f"{many}, by up to {largest:g} at {place}; allowed is {allowed:g} ({between})",
        where=name,
        hint="report this: the two stages must compute the same; --save-stages keeps both for comparison",
    )
