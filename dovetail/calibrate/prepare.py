"""A float graph made ready for quantisation: batch normalisation folded, divisions by constants made products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.simplify import simplify
from dovetail.graph.types import Array, DType
from dovetail.operators.arithmetic import Add
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.quantization import Dequantize, Quantize

Linear = Conv2d | DepthwiseConv2d | FullyConnected
LINEAR = (Conv2d, DepthwiseConv2d, FullyConnected)
"""Operators with weights."""
_REORDERED = ("_nhwc", "_ohwi")
"""What the ONNX frontend adds to the names of images and weights in the graph's order."""


def prepare(graph: Graph, file_name: str) -> Graph:
    """The float graph of a model, simplified and folded, its weights checked.

    Raises:
        ModelError: it is quantised already, or a constant holds NaN or infinity.
    """
    graph = own_names(run(simplify(graph), (real_constants,)))
    for node in graph.nodes:
        if isinstance(node.operator, Quantize | Dequantize):
            raise ModelError(
                f"the model is quantised already: {node.origin or node.output}",
                where=file_name,
                hint="give the float model; dovetail compile takes this one as it is",
            )
    for name, array in graph.constants.items():
        if array.dtype == np.float32 and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise ModelError(
                f"the constant '{name}' holds {bad} values that are NaN or infinite",
                where=file_name,
                hint="train or export the model again",
            )
    return own_names(simplify(run(graph, (fold_normalisation, multiply_by_reciprocal))))


def real_constants(draft: Draft, node: Node) -> str | None:
    """Weights of a network of which nothing else is quantised: what their integers stand for."""
    if not isinstance(node.operator, Dequantize) or any(name not in draft.constants for name in node.inputs):
        return None
    array = node.operator.evaluate([draft.constants[name] for name in node.inputs])
    return draft.constant(array, DType.FLOAT32, node.output)


def own_names(graph: Graph) -> Graph:
    """The graph with the names of the model, without what the frontend adds to values it has in another order."""
    names: dict[str, str] = {}
    for name in graph.types:
        own = next((name.removesuffix(suffix) for suffix in _REORDERED if name.endswith(suffix)), name)
        if own not in graph.types and own not in names.values():
            names[name] = own

    def of(name: str) -> str:
        return names.get(name, name)

    return replace(
        graph,
        nodes=tuple(replace(n, output=of(n.output), inputs=tuple(map(of, n.inputs))) for n in graph.nodes),
        types={of(name): kind for name, kind in graph.types.items()},
        constants={of(name): array for name, array in graph.constants.items()},
    )


def output_axis(operator: Linear) -> int:
    """The axis of the weights that runs over output channels."""
    return 3 if isinstance(operator, DepthwiseConv2d) else 0


def along(values: Array, rank: int, axis: int) -> Array:
    """A row of values as an array of `rank` axes that runs along one of them."""
    shape = [1] * rank
    shape[axis] = values.size
    return values.reshape(shape)


def fold_normalisation(draft: Draft, node: Node) -> str | None:
    """A scale (and an offset) per channel behind a layer with weights, batch normalisation that is: into the layer.

    w' = w * factor, b' = b * factor + offset, as in arXiv:1712.05877, section 3.2.
    """
    found = _scaling(draft, node)
    if found is None:
        return None
    value, factor, offset = found
    layer = draft.made_by(value, *LINEAR)
    if layer is None or draft.users(value) != 1 or any(name not in draft.constants for name in layer.inputs[1:]):
        return None
    assert isinstance(layer.operator, LINEAR)
    weights = draft.constants[layer.inputs[1]].astype(np.float64)
    channels = weights.shape[output_axis(layer.operator)]
    factor = np.broadcast_to(factor, (channels,))
    bias = draft.constants[layer.inputs[2]].astype(np.float64) if len(layer.inputs) > 2 else np.zeros(channels)
    scaled = weights * along(factor, weights.ndim, output_axis(layer.operator))
    names = [
        draft.constant(array.astype(np.float32), DType.FLOAT32, stem)
        for array, stem in ((scaled, layer.inputs[1]), (bias * factor + offset, f"{layer.inputs[1]}_bias"))
    ]
    return draft.add(layer.operator, [layer.inputs[0], *names], layer, node.output)


def _scaling(draft: Draft, node: Node) -> tuple[str, Array, Array] | None:
    """The operand, factor [C or 1] and offset [C or 1] of a node that scales channels by constants."""
    operator = node.operator
    channels = draft.types[node.output].shape[-1:] or (1,)
    if isinstance(operator, DepthwiseConv2d):
        constants = [draft.constants.get(name) for name in node.inputs[1:]]
        weights = constants[0]
        if weights is None or any(array is None for array in constants) or operator.stride != (1, 1):
            return None
        if weights.shape != (1, 1, 1, draft.types[node.inputs[0]].shape[-1]):
            return None
        offset = constants[1] if len(constants) > 1 else None
        return node.inputs[0], weights.reshape(-1).astype(np.float64), np.zeros(1) if offset is None else offset
    for value, other in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
        array = draft.constants.get(other)
        rank = len(draft.types[value].shape)
        if (
            array is None
            or draft.types[value] != draft.types[node.output]
            or array.shape not in (*((), (1,), channels, (1,) * (rank - len(channels)) + channels),)
        ):
            continue
        row = array.reshape(-1).astype(np.float64)
        if isinstance(operator, Add):
            return value, np.ones(1), row
        if isinstance(operator, Binary) and operator.kind is BinaryKind.MULTIPLY:
            return value, row, np.zeros(1)
        if isinstance(operator, Binary) and operator.kind is BinaryKind.SUBTRACT and value == node.inputs[0]:
            return value, np.ones(1), -row
    return None


def multiply_by_reciprocal(draft: Draft, node: Node) -> str | None:
    """A division by a constant is a product, which has an integer form."""
    if not isinstance(node.operator, Binary) or node.operator.kind is not BinaryKind.DIVIDE:
        return None
    divisor = draft.constants.get(node.inputs[1])
    if divisor is None or divisor.dtype != np.float32 or not divisor.all():
        return None
    factor = draft.constant((1 / divisor.astype(np.float64)).astype(np.float32), DType.FLOAT32, node.inputs[1])
    return draft.add(Binary(BinaryKind.MULTIPLY), [node.inputs[0], factor], node)
