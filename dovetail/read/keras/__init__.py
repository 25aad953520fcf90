"""Keras models (`.keras`, `.h5`) as graphs, without Keras: configuration and weights are read, code never runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.read.keras import layers
from dovetail.read.keras.archive import read_keras
from dovetail.read.keras.config import FLOATS, parse, replaced
from dovetail.read.keras.layer import (
    AGAIN,
    SMALLER,
    KerasCall,
    KerasLayer,
    KerasNetwork,
    KerasTensor,
    KerasWeights,
    Reference,
)
from dovetail.read.keras.operations import ACTIVATION_LAYERS, OPERATIONS, Function, tensorflow_operation
from dovetail.read.keras.sequences import SEQUENCES
from dovetail.read.keras.values import Importer, KerasValues, fold_normalisations
from dovetail.read.values import MAX_ELEMENTS

IDENTITIES = (
    *("ActivityRegularization", "AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise", "Identity"),
    *("SpatialDropout1D", "SpatialDropout2D"),
    *("RandomBrightness", "RandomContrast", "RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom"),
)
"""Layers that do nothing at inference."""


def _of_one(function: Function) -> Importer:
    return lambda v: function(v, v.one())


LAYERS: Mapping[str, Importer] = {
    **{name: _of_one(function) for name, function in ACTIVATION_LAYERS.items()},
    **dict.fromkeys(IDENTITIES, layers.identity),
    **SEQUENCES,
    "Add": layers.merge(BinaryKind.ADD),
    **{f"AveragePooling{rank}D": layers.pool(AveragePool2d, rank) for rank in (1, 2)},
    **{f"MaxPooling{rank}D": layers.pool(MaxPool2d, rank) for rank in (1, 2)},
    **{f"GlobalAveragePooling{rank}D": layers.whole_pool(AveragePool2d, rank) for rank in (1, 2)},
    **{f"GlobalMaxPooling{rank}D": layers.whole_pool(MaxPool2d, rank) for rank in (1, 2)},
    **dict.fromkeys(("Conv1D", "Conv2D"), layers.convolution),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose"), layers.transposed),
    **dict.fromkeys(("Cropping1D", "Cropping2D"), layers.cropping),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), layers.depthwise),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), layers.layer_normalization),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), layers.separable),
    **dict.fromkeys(("UpSampling1D", "UpSampling2D"), layers.up_sampling),
    **dict.fromkeys(("ZeroPadding1D", "ZeroPadding2D"), layers.zero_padding),
    "Average": layers.merge(BinaryKind.ADD, mean=True),
    "BatchNormalization": layers.batch_normalization,
    "CenterCrop": layers.center_crop,
    "Concatenate": layers.concatenate,
    "Dense": layers.dense,
    "Embedding": layers.embedding,
    "Flatten": layers.flatten,
    "GroupNormalization": layers.group_normalization,
    "Maximum": layers.merge(BinaryKind.MAXIMUM),
    "Minimum": layers.merge(BinaryKind.MINIMUM),
    "Multiply": layers.merge(BinaryKind.MULTIPLY),
    "Normalization": layers.normalization,
    "Permute": layers.permute,
    "RepeatVector": layers.repeat_vector,
    "Rescaling": layers.rescaling,
    "Reshape": layers.reshape,
    "Resizing": layers.resizing,
    "Subtract": layers.merge(BinaryKind.SUBTRACT),
    "TFOpLambda": tensorflow_operation,
    "UnitNormalization": layers.unit_normalization,
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
    arguments = [v.builder.input(v.builder.fresh(entry), kind) for entry, kind in _inputs(model.network)]
    outputs: list[str] = []
    for value in _run_network(v, arguments):
        idle = value in arguments or value in outputs or v.known(value) is not None
        outputs.append(v.add(Reshape(v.shape(value)), [value], "output") if idle else value)
    names = [ref.layer for ref in model.network.outputs]
    return _renamed(fold_normalisations(v.builder.finish(outputs)), names)


def _renamed(graph: Graph, wanted: Sequence[str]) -> Graph:
    """The graph with its outputs named after the layers that give them, with a number where that is taken."""
    taken, names = set(graph.types) - set(graph.outputs), dict[str, str]()
    for output, name in zip(graph.outputs, wanted, strict=True):
        free = (f"{name}_{count}" if count else name for count in range(len(taken) + 1))
        names[output] = next(candidate for candidate in free if candidate not in taken)
        taken.add(names[output])

    def new(name: str) -> str:
        return names.get(name, name)

    nodes = (replace(n, output=new(n.output), inputs=tuple(map(new, n.inputs))) for n in graph.nodes)
    types = {new(name): kind for name, kind in graph.types.items()}
    return replace(graph, outputs=tuple(map(new, graph.outputs)), nodes=tuple(nodes), types=types)


def _inputs(network: KerasNetwork) -> list[tuple[str, TensorType]]:
    """Names and types of a model's inputs. One that is only looked up in embeddings is of integers."""
    entries = {layer.name: layer for layer in network.layers}
    readers: dict[str, set[str]] = {}
    for layer in network.layers:
        for ref in (ref for call in network.calls[layer.name] for ref in call.references()):
            readers.setdefault(ref.layer, set()).add(layer.kind)
    found = []
    for ref in network.inputs:
        entry = entries.get(ref.layer)
        if entry is None or entry.kind != "InputLayer":
            hint = "save the whole model with model.save('model.keras')"
            raise ModelError(
                f"the input {ref.layer[:80]!r} is not an InputLayer", where=network.layers[0].file, hint=hint
            )
        if entry.get("sparse") or entry.get("ragged"):
            raise entry.refuse("sparse and ragged inputs are not supported")
        kind = _input_type(entry)
        if kind.dtype is DType.FLOAT32 and readers.get(entry.name) == {"Embedding"}:
            kind = TensorType(kind.shape, DType.INT32)
        found.append((entry.name, kind))
    return found


def _input_type(layer: KerasLayer) -> TensorType:
    """The type of a network's input, its batch of any size as 1."""
    dtype, shape = layer.get("dtype", "float32"), layer.get("batch_shape", layer.get("batch_input_shape"))
    if isinstance(dtype, dict):
        dtype = dtype.get("config", {}).get("name") if isinstance(dtype.get("config"), dict) else None
    known = {kind.text: kind for kind in (DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64)}
    found = DType.FLOAT32 if dtype in (*FLOATS, None) else known.get(str(dtype))
    if found is None:
        raise layer.refuse(f"an input of the type {str(dtype)[:80]} is not supported")
    if not isinstance(shape, list) or not shape:
        hint = "give the first layer a keras.Input of the shape it is to be used with, and save again"
        raise layer.refuse("the model does not say the shape of its input", hint)
    sizes = [1 if size is None and axis == 0 else size for axis, size in enumerate(shape)]
    for axis, size in enumerate(sizes):
        if size is None:
            hint = "make the model with a keras.Input of fixed sizes, load the weights into it and save it"
            raise layer.refuse(
                f"the size of axis {axis} of the input {shape} is left open; only the first may be", hint
            )
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < MAX_ELEMENTS:
            raise layer.refuse(f"the input's shape {str(shape)[:80]} is no shape", AGAIN)
    kind = TensorType(tuple(sizes), found)
    if kind.elements >= MAX_ELEMENTS:
        raise layer.refuse(f"the input is {kind}; the limit is {MAX_ELEMENTS} elements", SMALLER)
    return kind


def _run_network(v: KerasValues, arguments: Sequence[str]) -> list[str]:
    """Import a network (the layer being read) called with some values; returns its outputs.

    Each call waits until all it needs is there, so that layers may stand in any order.
    """
    network = v.layer.network
    assert network is not None
    if len(arguments) != len(network.inputs):
        raise v.refuse(f"has {len(network.inputs)} inputs and is called with {len(arguments)} values", AGAIN)
    values = {(ref.layer, 0, 0): value for ref, value in zip(network.inputs, arguments, strict=True)}
    heads = {ref.layer for ref in network.inputs}
    layers = [layer for layer in network.layers if layer.name not in heads]
    ready = [(layer, index) for layer in layers for index in range(len(network.calls[layer.name]))][::-1]
    waiting: dict[tuple[str, int], list[tuple[KerasLayer, int]]] = {}
    while ready:
        layer, index = ready.pop()
        call = network.calls[layer.name][index]
        lacking = [(ref.layer, ref.call) for ref in call.references() if (ref.layer, ref.call, 0) not in values]
        if lacking:
            waiting.setdefault(lacking[0], []).append((layer, index))
            continue
        results = _import_call(v.again(layer=layer, call=replaced(call, partial(_tensor, layer, values))))
        values.update({(layer.name, index, place): value for place, value in enumerate(results)})
        ready += waiting.pop((layer.name, index), [])[::-1]
    if waiting:
        stuck = next(iter(waiting.values()))[0][0]
        raise stuck.refuse("reads a value that is never computed, or that depends on itself", AGAIN)
    return [_tensor(v.layer, values, ref).name for ref in network.outputs]


def _tensor(layer: KerasLayer, values: Mapping[tuple[str, int, int], str], ref: Reference) -> KerasTensor:
    """The graph value a reference names."""
    found = values.get((ref.layer, ref.call, ref.result))
    if found is None:
        raise layer.refuse(f"result {ref.result} of call {ref.call} of {ref.layer[:80]!r} is never computed", AGAIN)
    return KerasTensor(found)


def _import_call(v: KerasValues) -> tuple[str, ...]:
    """Import one call of a layer, an operation or a model; returns its results."""
    v.count_call()
    layer = v.layer
    if layer.network is not None:
        v.check_named(("mask",))
        return tuple(_run_network(v, v.call.tensors()))
    if layer.kind == "TimeDistributed":
        return (_over_time(v),)
    operation = layer.is_operation and (layer.kind in OPERATIONS or layer.kind not in LAYERS)
    table = OPERATIONS if operation else LAYERS
    importer = table.get(layer.kind)
    if importer is None:
        what = "operation" if operation else "layer"
        raise v.refuse(f"the {what} {layer.kind} is not supported", f"supported are {', '.join(sorted(table))}")
    try:
        found = importer(v)
    except ValueError as error:  # an operator's type rule rejects what the file says
        raise v.refuse(str(error)) from error
    if not operation:
        layer.check_settings()
    return (found,) if isinstance(found, str) else tuple(found)


def _over_time(v: KerasValues) -> str:
    """TimeDistributed: the steps of a sequence as a batch."""
    x, layer = v.one(real=False), v.layer
    shape, inner = v.shape(x), layer.parts.get("layer")
    if inner is None or len(shape) < 3:
        raise v.refuse(f"needs a layer and a sequence of vectors or images, its operand is {v.type_of(x)}", AGAIN)
    flat = v.reshape(x, (shape[0] * shape[1], *shape[2:]), "steps")
    results = _import_call(v.again(layer=inner, call=KerasCall((KerasTensor(flat),))))
    if len(results) != 1:
        raise v.refuse(f"the layer inside gives {len(results)} values, expected 1", AGAIN)
    layer.read.add("layer")
    layer.check_settings()
    return v.reshape(results[0], (*shape[:2], *v.shape(results[0])[1:]))
