"""Keras models (`.keras`, `.h5`) as graphs, without Keras: configuration and weights are read, code never runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, renamed
from dovetail.ir.types import DType, TensorType
from dovetail.read.keras import layers, operations, sequences
from dovetail.read.keras.archive import read_keras
from dovetail.read.keras.config import FLOATS, parse, replaced
from dovetail.read.keras.layer import KerasCall, KerasLayer, KerasNetwork, KerasWeights, Reference
from dovetail.read.keras.operations import OPERATIONS
from dovetail.read.keras.values import MAX_CALLS, Importer, KerasValues, fold_normalisations
from dovetail.read.values import AGAIN, MAX_ELEMENTS, SMALLER, Value


def _of_one(function: operations.Function) -> Importer:
    return lambda v: function(v, v.one())


LAYERS: Mapping[str, Importer] = {
    **{name: _of_one(function) for name, function in operations.ACTIVATION_LAYERS.items()},
    **layers.LAYERS,
    **sequences.SEQUENCES,
    "TFOpLambda": operations.tensorflow_operation,
}
"""Every layer Dovetail reads, besides InputLayer, TimeDistributed and models themselves."""


def load_keras(file_name: str, data: bytes, name: str) -> Graph:
    """Import a Keras model, a zip archive (`.keras`) or HDF5 (`.h5`), as the float graph `name`.

    Values keep Keras's axis order; a batch of any size is 1. Inputs are named after the input layers, values after the
    layers that compute them.

    Raises:
        MissingExtraError: h5py is not installed.
        ModelError: the file is damaged, dangerous, or says something Dovetail cannot honour.
    """
    file = read_keras(file_name, data)
    model = parse(file)
    assert model.network is not None
    v = KerasValues(name, KerasWeights(file, model)).again(layer=model)
    arguments = [v.graph_input(v.builder.fresh(entry), kind) for entry, kind in _inputs(model.network)]
    outputs: list[Value] = []
    for value in _run_network(v, arguments):
        idle = value in arguments or value in outputs or v.known(value) is not None
        outputs.append(v.reshape(value, value.shape, "output") if idle else value)
    graph = fold_normalisations(v.finished(outputs))
    # Outputs are called after the layers that give them, with a number where that is taken.
    taken, names = set(graph.types) - set(graph.outputs), dict[str, str]()
    for output, layer in zip(graph.outputs, (ref.layer for ref in model.network.outputs), strict=True):
        free = (f"{layer}_{count}" if count else layer for count in range(len(taken) + 1))
        names[output] = next(candidate for candidate in free if candidate not in taken)
        taken.add(names[output])
    return renamed(graph, names)


def _inputs(network: KerasNetwork) -> list[tuple[str, TensorType]]:
    """Names and types of a model's inputs. One that is only looked up in embeddings is of integers."""
    entries = {layer.name: layer for layer in network.layers}
    readers: dict[str, set[str]] = {}
    for layer in network.layers:
        for ref in (ref for call in network.calls[layer.name] for ref in call.all(Reference)):
            readers.setdefault(ref.layer, set()).add(layer.kind)
    found = []
    for ref in network.inputs:
        entry = entries.get(ref.layer)
        if entry is None or entry.kind != "InputLayer":
            what, hint = "is not an InputLayer", "save the whole model with model.save('model.keras')"
            raise ModelError(f"the input {ref.layer[:80]!r} {what}", where=network.layers[0].file, hint=hint)
        entry.refuse_if(entry.get("sparse") or entry.get("ragged"), "sparse and ragged inputs are not supported")
        kind = _input_type(entry)
        if kind.dtype is DType.FLOAT32 and readers.get(entry.name) == {"Embedding"}:
            kind = TensorType(kind.shape, DType.INT32)
        found.append((entry.name, kind))
    return found


def _input_type(layer: KerasLayer) -> TensorType:
    """The type of a network's input, its batch of any size as 1."""
    dtype, shape = layer.policy.get("name"), layer.get("batch_shape", layer.get("batch_input_shape"))
    known = {kind.text: kind for kind in (DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64)}
    found = DType.FLOAT32 if dtype in (*FLOATS, None) else known.get(str(dtype))
    if found is None:
        raise layer.refuse(f"an input of the type {dtype!s:.80} is not supported")
    hint = "give the first layer a keras.Input of the shape it is to be used with, and save again"
    layer.refuse_if(not isinstance(shape, list) or not shape, "the model does not say the shape of its input", hint)
    sizes = [1 if size is None and axis == 0 else size for axis, size in enumerate(shape)]
    for axis, size in enumerate(sizes):
        what = f"the size of axis {axis} of the input {shape} is left open; only the first may be"
        hint = "make the model with a keras.Input of fixed sizes, load the weights into it and save it"
        layer.refuse_if(size is None, what, hint)
        odd = not isinstance(size, int) or isinstance(size, bool) or not 0 < size < MAX_ELEMENTS
        layer.wrong_if(odd, f"the input's shape {shape!s:.80} is no shape")
    kind = TensorType(tuple(sizes), found)
    if kind.elements >= MAX_ELEMENTS:
        raise layer.refuse(f"the input is {kind}; the limit is {MAX_ELEMENTS} elements", SMALLER)
    return kind


def _run_network(v: KerasValues, arguments: Sequence[Value]) -> list[Value]:
    """The outputs of a network (the layer being read) called with some values. Its layers may stand in any order: each
    call waits until all it needs is there."""
    network = v.layer.network
    assert network is not None
    what = f"has {len(network.inputs)} inputs and is called with {len(arguments)} values"
    v.wrong_if(len(arguments) != len(network.inputs), what)
    values = {(ref.layer, 0, 0): value for ref, value in zip(network.inputs, arguments, strict=True)}
    heads = {ref.layer for ref in network.inputs}
    layers = [layer for layer in network.layers if layer.name not in heads]
    ready = [(layer, index) for layer in layers for index in range(len(network.calls[layer.name]))][::-1]
    waiting: dict[tuple[str, int], list[tuple[KerasLayer, int]]] = {}
    while ready:
        layer, index = ready.pop()
        call = network.calls[layer.name][index]
        lacking = [(ref.layer, ref.call) for ref in call.all(Reference) if (ref.layer, ref.call, 0) not in values]
        if lacking:
            waiting.setdefault(lacking[0], []).append((layer, index))
            continue
        results = _import_call(v.again(layer=layer, call=replaced(call, partial(_tensor, layer, values))))
        values.update({(layer.name, index, place): value for place, value in enumerate(results)})
        ready += waiting.pop((layer.name, index), [])[::-1]
    for (stuck, _), *_ in waiting.values():
        raise stuck.refuse("reads a value that is never computed, or that depends on itself", AGAIN)
    return [_tensor(v.layer, values, ref) for ref in network.outputs]


def _tensor(layer: KerasLayer, values: Mapping[tuple[str, int, int], Value], ref: Reference) -> Value:
    """The graph value a reference names."""
    found = values.get((ref.layer, ref.call, ref.result))
    if found is None:
        raise layer.refuse(f"result {ref.result} of call {ref.call} of {ref.layer[:80]!r} is never computed", AGAIN)
    return found


QKERAS = re.compile(r"Q[A-Z]\w+")
"""Names of QKeras's layers."""


def _import_call(v: KerasValues) -> tuple[Value, ...]:
    """Import one call of a layer, an operation or a model; returns its results."""
    layer, what = v.layer, f"the model has more than {MAX_CALLS} calls of layers"
    v.refuse_if(next(v.calls) > MAX_CALLS, what, SMALLER)
    if layer.network is not None:
        v.check_named("mask")
        return tuple(_run_network(v, v.call.all(Value)))
    if layer.kind == "TimeDistributed":
        return (_over_time(v),)
    operation = layer.is_operation and (layer.kind in OPERATIONS or layer.kind not in LAYERS)
    what = f"the {'operation' if operation else 'layer'} {layer.kind} is not supported"
    if QKERAS.fullmatch(layer.kind) and layer.kind not in LAYERS:
        raise v.refuse(what, "it is QKeras's: convert the model with qonnx.converters.keras.from_keras to QONNX")
    build = v.entry(layer.kind, OPERATIONS if operation else LAYERS, what)
    with v.refusing():  # an operator's type rule rejects what the file says
        found = build(v)
    if not operation:
        layer.check_settings()
    return (found,) if isinstance(found, Value) else tuple(found)


def _over_time(v: KerasValues) -> Value:
    """TimeDistributed: the steps of a sequence as a batch."""
    x, layer = v.one(real=False), v.layer
    shape, inner = x.shape, layer.parts.get("layer")
    if inner is None or len(shape) < 3:
        raise v.refuse(f"needs a layer and a sequence of vectors or images, its operand is {x.type}", AGAIN)
    flat = v.shaped(x, (shape[0] * shape[1], *shape[2:]), "steps")
    results = _import_call(v.again(layer=inner, call=KerasCall((flat,))))
    v.wrong_if(len(results) != 1, f"the layer inside gives {len(results)} values, expected 1")
    layer.ignore("layer")
    layer.check_settings()
    return v.shaped(results[0], (*shape[:2], *results[0].shape[1:]))
