"""Keras models (`.keras`, `.h5`) as graphs, without Keras: configuration and weights are read, code never runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from dovetail.errors import ModelError
from dovetail.frontend.keras_archive import read_keras
from dovetail.frontend.keras_config import parse, replaced
from dovetail.frontend.keras_context import KerasContext, plain_inputs
from dovetail.frontend.keras_folding import fold_normalisations
from dovetail.frontend.keras_layer import AGAIN, Call, Layer, Network, Reference, Tensor
from dovetail.frontend.keras_layers import LAYERS
from dovetail.frontend.keras_operations import OPERATIONS
from dovetail.frontend.keras_weights import Weights
from dovetail.graph.graph import Graph, GraphBuilder
from dovetail.graph.types import DType, TensorType
from dovetail.operators.movement import Reshape


def load_keras(file_name: str, data: bytes, name: str) -> Graph:
    """Import a Keras model.

    Args:
        file_name: for messages.
        data: the file's bytes: a zip archive (`.keras`) or HDF5 (`.h5`).
        name: the graph's name.

    Returns:
        The float graph. Values keep Keras's axis order; a batch of any size is 1. Inputs are named after the input
        layers, values after the layers that compute them.

    Raises:
        MissingExtraError: h5py is not installed.
        ModelError: the file is damaged, dangerous, or says something Dovetail cannot honour.
    """
    file = read_keras(file_name, data)
    model = parse(file)
    assert model.network is not None
    ctx = KerasContext(GraphBuilder(name), Weights(file, model))
    arguments = [ctx.builder.input(ctx.builder.fresh(entry), kind) for entry, kind in _inputs(model.network)]
    outputs: list[str] = []
    for value in run_network(ctx, model, arguments):
        idle = value in arguments or value in outputs or ctx.builder.constant_of(value) is not None
        outputs.append(ctx.add(model, Reshape(ctx.shape(value)), [value], "output") if idle else value)
    names = [ref.layer for ref in model.network.outputs]
    return _renamed(fold_normalisations(ctx.builder.finish(outputs)), names)


def _renamed(graph: Graph, wanted: Sequence[str]) -> Graph:
    """The graph with its outputs named after the layers that give them, with a number where that is taken."""
    taken, names = set(graph.types) - set(graph.outputs), dict[str, str]()
    for output, name in zip(graph.outputs, wanted, strict=True):
        free = (f"{name}_{count}" if count else name for count in range(len(taken) + 1))
        names[output] = next(candidate for candidate in free if candidate not in taken)
        taken.add(names[output])

    def new(name: str) -> str:
        """The name a value now has."""
        return names.get(name, name)

    nodes = (replace(n, output=new(n.output), inputs=tuple(map(new, n.inputs))) for n in graph.nodes)
    types = {new(name): kind for name, kind in graph.types.items()}
    return replace(graph, outputs=tuple(map(new, graph.outputs)), nodes=tuple(nodes), types=types)


def _inputs(network: Network) -> list[tuple[str, TensorType]]:
    """Names and types of a model's inputs. One that is only looked up in embeddings is of integers."""
    layers = {layer.name: layer for layer in network.layers}
    readers: dict[str, set[str]] = {}
    for layer in network.layers:
        for call in network.calls[layer.name]:
            for ref in call.references():
                readers.setdefault(ref.layer, set()).add(layer.kind)
    found = []
    for ref in network.inputs:
        entry = layers.get(ref.layer)
        if entry is None or entry.kind != "InputLayer":
            raise ModelError(f"the input {ref.layer[:80]!r} is not an InputLayer", where=network.layers[0].file,
                             hint="save the whole model with model.save('model.keras')")
        if entry.get("sparse") or entry.get("ragged"):
            raise entry.refuse("sparse and ragged inputs are not supported")
        shape = entry.get("batch_shape", entry.get("batch_input_shape"))
        kind = plain_inputs(entry, entry.get("dtype", "float32"), shape)
        if kind.dtype is DType.FLOAT32 and readers.get(entry.name) == {"Embedding"}:
            kind = TensorType(kind.shape, DType.INT32)
        found.append((entry.name, kind))
    return found


def run_network(ctx: KerasContext, model: Layer, arguments: Sequence[str]) -> list[str]:
    """Import a network called with some values; returns its outputs.

    Each call waits until all it needs is there, so that layers may stand in any order.
    """
    network = model.network
    assert network is not None
    if len(arguments) != len(network.inputs):
        raise model.refuse(f"has {len(network.inputs)} inputs and is called with {len(arguments)} values", AGAIN)
    values = {(ref.layer, 0, 0): value for ref, value in zip(network.inputs, arguments, strict=True)}
    heads = {ref.layer for ref in network.inputs}
    pending = [
        (layer, index) for layer in network.layers if layer.name not in heads
        for index in range(len(network.calls[layer.name]))
    ]  # fmt: skip
    waiting: dict[tuple[str, int], list[tuple[Layer, int]]] = {}
    ready = pending[::-1]
    while ready:
        layer, index = ready.pop()
        call = network.calls[layer.name][index]
        lacking = [(ref.layer, ref.call) for ref in call.references() if (ref.layer, ref.call, 0) not in values]
        if lacking:
            waiting.setdefault(lacking[0], []).append((layer, index))
            continue
        results = import_call(ctx, layer, replaced(call, partial(_tensor, layer, values)))
        values.update({(layer.name, index, place): value for place, value in enumerate(results)})
        ready += waiting.pop((layer.name, index), [])[::-1]
    if waiting:
        stuck = next(iter(waiting.values()))[0][0]
        raise stuck.refuse("reads a value that is never computed, or that depends on itself", AGAIN)
    return [value_of(model, values, ref) for ref in network.outputs]


def _tensor(layer: Layer, values: Mapping[tuple[str, int, int], str], ref: Reference) -> Tensor:
    return Tensor(value_of(layer, values, ref))


def value_of(layer: Layer, values: Mapping[tuple[str, int, int], str], ref: Reference) -> str:
    """The graph value a reference names."""
    found = values.get((ref.layer, ref.call, ref.result))
    if found is None:
        raise layer.refuse(f"result {ref.result} of call {ref.call} of {ref.layer[:80]!r} is never computed", AGAIN)
    return found


def import_call(ctx: KerasContext, layer: Layer, call: Call) -> tuple[str, ...]:
    """Import one call of a layer, an operation or a model; returns its results."""
    ctx.count(layer)
    if layer.network is not None:
        ctx.check_named(layer, call, ("mask",))
        return tuple(run_network(ctx, layer, call.tensors()))
    if layer.kind == "TimeDistributed":
        return (_over_time(ctx, layer, call),)
    operation = layer.is_operation and (layer.kind in OPERATIONS or layer.kind not in LAYERS)
    table = OPERATIONS if operation else LAYERS
    importer = table.get(layer.kind)
    if importer is None:
        what = "operation" if operation else "layer"
        raise layer.refuse(f"the {what} {layer.kind} is not supported", f"supported are {', '.join(sorted(table))}")
    found = importer(ctx, layer, call)
    if not operation:
        layer.check_settings()
    return (found,) if isinstance(found, str) else tuple(found)


def _over_time(ctx: KerasContext, layer: Layer, call: Call) -> str:
    """TimeDistributed: the steps of a sequence as a batch."""
    x = ctx.one(layer, call, real=False)
    shape, inner = ctx.shape(x), layer.parts.get("layer")
    if inner is None or len(shape) < 3:
        raise layer.refuse(f"needs a layer and a sequence of vectors or images, its operand is {ctx.type_of(x)}", AGAIN)
    flat = ctx.reshaped(layer, x, (shape[0] * shape[1], *shape[2:]), "steps")
    results = import_call(ctx, inner, Call((Tensor(flat),)))
    if len(results) != 1:
        raise layer.refuse(f"the layer inside gives {len(results)} values, expected 1", AGAIN)
    layer.read.add("layer")
    layer.check_settings()
    return ctx.reshaped(layer, results[0], (*shape[:2], *ctx.shape(results[0])[1:]))
