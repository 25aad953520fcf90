"""Graphs read back from ONNX models, and run in ONNX Runtime to see whether a stage means what it should.

Their form is that of `dovetail.ir.onnx_file`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from dovetail.errors import DovetailError, ModelError
from dovetail.ir.graph import Graph, Node, evaluate, verify
from dovetail.ir.onnx_body import MOST_BYTES
from dovetail.ir.onnx_file import (
    DOMAIN,
    NARROW_TYPES,
    OPERATOR_KIND,
    ORIGIN,
    USER_DOMAIN,
    from_plain,
    graph_bytes,
)
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators import OPERATORS
from dovetail.ir.operators.base import Operator
from dovetail.ir.types import Array, DType, TensorType

_MOST_CHARACTERS = 100_000
"""Longest text of one attribute that is read."""
_MOST_DIMENSIONS = 32


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


def to_model(graph: Graph) -> onnx.ModelProto:
    """The graph as an ONNX model in memory."""
    return onnx.load_model_from_string(graph_bytes(graph))


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
    held = next((entry.value for entry in model.metadata_props if entry.key == NARROW_TYPES), "{}")
    found, kinds = json.loads(held), {kind.text: kind for kind in DType if kind.bits < 8}
    if not isinstance(found, dict):
        raise ValueError(f"{NARROW_TYPES} holds {held!r}")
    return {name: kinds[text] for name, text in found.items()}


def _operator_kind(function: onnx.FunctionProto, operators: Mapping[str, type[Operator]]) -> type[Operator]:
    known = {**operators, **OPERATORS}
    names = [entry.value for entry in function.metadata_props if entry.key == OPERATOR_KIND]
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
    origin = next((entry.value for entry in written.metadata_props if entry.key == ORIGIN), "")
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


def read_attributes(kind: type[Operator], attributes: Sequence[onnx.AttributeProto]) -> Operator:
    """The operator whose attributes were written; raises ValueError when they are not its own."""
    return from_plain(kind, [(attribute.name, _read(attribute)) for attribute in attributes])


def _read(attribute: onnx.AttributeProto) -> Any:
    if attribute.type == onnx.AttributeProto.INT:
        return attribute.i
    if attribute.type == onnx.AttributeProto.INTS:
        return list(attribute.ints)
    if attribute.type == onnx.AttributeProto.STRING and len(attribute.s) <= _MOST_CHARACTERS:
        return json.loads(attribute.s)
    raise ValueError(f"attribute {attribute.name!r} is of a kind or length that Dovetail does not write")
