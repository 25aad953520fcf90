"""Batch normalisation behind a layer whose weights are quantised already: into the weights' scales.

The integers stay, so the layer is what was trained; networks trained with quantisation (QONNX, PyTorch) have it so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dovetail.graph.graph import Node
from dovetail.graph.rewrite import Draft
from dovetail.graph.types import Array, DType
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.quantization import Dequantize

_WIDER = {DType.INT2: DType.INT4, DType.INT4: DType.INT8}


def fold_into_scales(draft: Draft, node: Node) -> str | None:
    """(w * s) x + b, times f, plus c: (w * s * f) x + (b * f + c); a negative f turns the sign of the integers."""
    parameters = _normalisation(draft, node)
    layer = draft.made_by(node.inputs[0], Conv2d, DepthwiseConv2d, FullyConnected) if parameters else None
    if parameters is None or layer is None or draft.users(layer.output) != 1:
        return None
    weights = draft.made_by(layer.inputs[1], Dequantize)
    if weights is None or any(name not in draft.constants for name in (*weights.inputs, *layer.inputs[2:])):
        return None
    factor, offset = parameters
    axis = 3 if isinstance(layer.operator, DepthwiseConv2d) else 0
    integers, scale, zeros = (draft.constants[name] for name in weights.inputs)
    assert isinstance(weights.operator, Dequantize)
    along = weights.operator.axis % integers.ndim
    if (scale.size > 1 and along != axis) or (factor == 0).any() or zeros.any():
        return None
    dtype = draft.types[weights.inputs[0]].dtype
    shape = [factor.size if index == axis else 1 for index in range(integers.ndim)]
    turned = integers.astype(np.int64) * np.sign(factor).astype(np.int64).reshape(shape)
    if turned.max(initial=0) > dtype.high:
        if dtype not in _WIDER:
            return None
        dtype = _WIDER[dtype]
    steps = (scale.astype(np.float64) * np.abs(factor)).astype(np.float32)
    names = [
        draft.constant(turned.astype(dtype.numpy), dtype, weights.inputs[0]),
        draft.constant(steps, DType.FLOAT32, weights.inputs[1]),
        draft.constant(np.zeros(steps.size, np.int32), DType.INT32, weights.inputs[2]),
    ]
    scaled = draft.add(Dequantize(axis), names, weights, weights.output)
    bias = draft.constants[layer.inputs[2]].astype(np.float64) if len(layer.inputs) > 2 else np.zeros(factor.size)
    row = draft.constant((bias * factor + offset).astype(np.float32), DType.FLOAT32, f"{node.output}_bias")
    return draft.add(layer.operator, [layer.inputs[0], scaled, row], replace(layer, output=node.output))


def _normalisation(draft: Draft, node: Node) -> tuple[Array, Array] | None:
    """Factor and offset per channel [C] of a batch normalisation, which the frontends give as a 1x1 depthwise layer."""
    operator = node.operator
    if not isinstance(operator, DepthwiseConv2d) or operator.stride != (1, 1):
        return None
    constants = [draft.constants.get(name) for name in node.inputs[1:]]
    channels = draft.types[node.inputs[0]].shape[-1]
    weights = constants[0]
    if weights is None or weights.shape != (1, 1, 1, channels) or weights.dtype != np.float32:
        return None
    offset = constants[1] if len(constants) > 1 else np.zeros(channels)
    return None if offset is None else (weights.reshape(-1).astype(np.float64), offset.astype(np.float64))
