"""Batch normalisation behind a convolution or dense layer becomes part of its weights."""

from __future__ import annotations

import numpy as np

from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.simplify import drop_identity, merge_movement
from dovetail.graph.types import Array, DType
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Reshape


def fold_normalisations(graph: Graph) -> Graph:
    """The same network with fewer layers; results differ by float rounding only."""
    return run(graph, (fold_normalisation, merge_movement_of_layers, drop_identity))


def merge_movement_of_layers(draft: Draft, node: Node) -> str | None:
    """Two reshapes one behind the other: one."""
    return merge_movement(draft, node) if isinstance(node.operator, Reshape) else None


def fold_normalisation(draft: Draft, node: Node) -> str | None:
    """A constant factor and offset per channel (a 1x1 depthwise convolution) after a layer only it reads, perhaps
    with a reshape between them that keeps the channels: into the layer's weights and bias."""
    factors = _factors(draft, node)
    if factors is None:
        return None
    flat = draft.made_by(node.inputs[0], Reshape)
    value = flat.inputs[0] if flat is not None and draft.users(flat.output) == 1 else node.inputs[0]
    layer = draft.made_by(value, Conv2d, DepthwiseConv2d, FullyConnected)
    channels = factors[0].size
    if layer is None or draft.users(value) != 1 or draft.types[value].shape[-1] != channels:
        return None
    arrays = [draft.constants.get(name) for name in layer.inputs[1:]]
    if any(array is None or array.dtype != np.float32 for array in arrays):
        return None
    weights, *bias = [np.asarray(array, np.float64) for array in arrays]
    along_last = isinstance(layer.operator, DepthwiseConv2d)
    shape = (1, 1, 1, channels) if along_last else (channels,) + (1,) * (weights.ndim - 1)
    operands = [
        layer.inputs[0],
        _constant(draft, weights * factors[0].reshape(shape), layer.inputs[1]),
        _constant(draft, (bias[0] if bias else 0.0) * factors[0] + factors[1], node.inputs[2]),
    ]
    folded = draft.add(layer.operator, operands, layer)
    return draft.add(Reshape(draft.types[node.output].shape), [folded], node)


def _constant(draft: Draft, array: Array, like: str) -> str:
    return draft.constant(array.astype(np.float32), DType.FLOAT32, like)


def _factors(draft: Draft, node: Node) -> tuple[Array, Array] | None:
    """Factor and offset of each channel, float64, where a node is nothing but them."""
    operator = node.operator
    if not isinstance(operator, DepthwiseConv2d) or operator.stride != (1, 1) or len(node.inputs) != 3:
        return None
    weights, bias = (draft.constants.get(name) for name in node.inputs[1:])
    if weights is None or bias is None or weights.dtype != np.float32:
        return None
    if weights.shape != (1, 1, 1, draft.types[node.inputs[0]].shape[-1]):
        return None
    return weights.reshape(-1).astype(np.float64), bias.astype(np.float64)
