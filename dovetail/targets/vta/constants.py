"""A region's constants as VTA reads them: weights in blocks, the bias as digits, scales and shifts as accumulators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array
from dovetail.loops import digit_rows, digits, ones
from dovetail.operators.arithmetic import Clip, ScaleShift
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.targets.vta.config import VtaConfig

LEAST_INT8 = -128


@dataclass(frozen=True)
class Constants:
    """What a region knows at compile time, by the argument names of `dovetail.loops.algorithm`."""

    blob: Array
    """The bytes behind the WGT and ACC pointers, uint8."""
    first: Mapping[str, int]
    """Where each array begins, in elements of its memory; "one" lies behind the INP pointer."""
    steps: Mapping[str, tuple[int, ...]]
    """Elements from one index to the next along each dimension but the lanes."""
    scalars: Mapping[str, int]
    """Values of the scalar arguments."""


_MOST_DEPTH = 16
"""Input blocks of a dense layer loaded at once: enough to hide what a load waits for."""


def depth(graph: Graph, config: VtaConfig) -> int:
    """How many input blocks a dense layer sums at a time: the most of those that divide them; 1 for other regions."""
    if not any(isinstance(node.operator, FullyConnected) for node in graph.nodes):
        return 1
    blocks = -(-graph.types[graph.inputs[0]].shape[-1] // config.block)
    return max(step for step in range(1, _MOST_DEPTH + 1) if blocks % step == 0)


def constants(graph: Graph, config: VtaConfig) -> Constants:
    """Pack a region's constants; the order is weights, digits, scale, shift."""
    matrices: dict[str, Array] = {}
    rows: dict[str, Array] = {}
    scalars = {"least_value": LEAST_INT8}
    for node in graph.nodes:
        if isinstance(node.operator, Conv2d | DepthwiseConv2d | FullyConnected):
            matrices["w"] = _weights(graph, node, config.block, depth(graph, config))
        elif isinstance(node.operator, ScaleShift):
            channels = graph.types[node.output].shape[-1]
            scale, offset, shift = (np.broadcast_to(graph.constants[name], channels) for name in node.inputs[1:])
            if offset.any():
                matrices["digits"] = _digits(offset // scale, config.block)
            for name, values in (("scale", scale), ("shift", shift)):
                if (values == values[0]).all():
                    scalars[name] = int(values[0])
                else:
                    rows[name] = _accumulators(values, config)
        elif isinstance(node.operator, Clip):
            scalars.update(low=node.operator.low, high=node.operator.high)
    return _joined(matrices, rows, scalars, config)


def ones_row(config: VtaConfig) -> Array:
    """The vector the digits are multiplied by, int8 [batch, block]; every row of digits uses the same."""
    return np.repeat(ones(1, config.block), config.batch, axis=0)


def _joined(
    matrices: Mapping[str, Array], rows: Mapping[str, Array], scalars: Mapping[str, int], config: VtaConfig
) -> Constants:
    parts: list[Array] = []
    first = {"one": 0}
    steps: dict[str, tuple[int, ...]] = {"one": (0,)}
    size = 0
    elements = {**dict.fromkeys(matrices, config.wgt_element), **dict.fromkeys(rows, config.acc_element)}
    for name, array in {**matrices, **rows}.items():
        padding = -size % elements[name]
        parts += [np.zeros(padding, np.uint8), array.reshape(-1).view(np.uint8)]
        first[name] = (size + padding) // elements[name]
        leading = array.shape[:-2]
        steps[name] = tuple(int(np.prod(leading[axis + 1 :], dtype=np.int64)) for axis in range(len(leading)))
        size += padding + array.nbytes
    blob = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return Constants(blob, first, steps, scalars)


def _weights(graph: Graph, node: Node, block: int, rows: int) -> Array:
    """[out block, in block, row, column, out, in]; of a depthwise layer [block, row, column, out, in], all diagonal.

    `rows` input blocks of a dense layer are the rows of a kernel.
    """
    weights = graph.constants[node.inputs[1]]
    if isinstance(node.operator, DepthwiseConv2d):
        filled = _filled(weights[0], 2, block)
        height, width, channels = filled.shape
        split = filled.reshape(height, width, channels // block, block).transpose(2, 0, 1, 3)
        return np.ascontiguousarray(split[..., None] * np.eye(block, dtype=np.int8))
    if weights.ndim == 2:
        weights = weights[:, None, None, :]
    filled = _filled(_filled(weights, 0, block), 3, block)
    out, height, width, depth = filled.shape
    split = filled.reshape(out // block, block, height, width, depth // block, block)
    found = np.ascontiguousarray(split.transpose(0, 4, 2, 3, 1, 5))
    return found.reshape(found.shape[0], -1, rows * height, width, block, block)


def _digits(bias: Array, block: int) -> Array:
    """[out block, row of digits, out, in]."""
    made = _filled(digits(bias, digit_rows(bias, block), block), 0, block)
    return np.ascontiguousarray(made.reshape(-1, block, made.shape[1], block).transpose(0, 2, 1, 3))


def _accumulators(values: Array, config: VtaConfig) -> Array:
    """[block, batch, lane], int32, every image the same."""
    filled = _filled(values.astype(np.int32), 0, config.block).reshape(-1, 1, config.block)
    return np.ascontiguousarray(np.repeat(filled, config.batch, axis=1))


def _filled(array: Array, axis: int, block: int) -> Array:
    """Zeros up to a whole number of blocks."""
    widths = [(0, -array.shape[axis] % block if index == axis else 0) for index in range(array.ndim)]
    return np.pad(array, widths)
