"""Cross-layer equalisation (arXiv:1906.04721, section 4.1): channels between two layers scaled to even weight ranges.

A factor on a channel of the first layer passes through ReLU, borders of zeros, pools and reshapes, and is taken back by
the second layer's weights; the network computes the same floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from dovetail.calibrate.prepare import LINEAR, along, output_axis
from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array
from dovetail.operators.activation import Clamp
from dovetail.operators.linear import DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad, Reshape
from dovetail.operators.pooling import AveragePool2d, MaxPool2d

ROUNDS = 20
"""Most passes over all pairs."""
ENOUGH = 1e-3
"""A pass that changes no factor by more than this share is the last."""
MOST_FACTOR = 1e3
"""The largest factor, and its inverse the smallest."""


@dataclass(frozen=True)
class Pair:
    """Two layers, the second of which reads nothing but the first's channels."""

    first: Node
    second: Node
    between: tuple[str, ...]
    """Values from the first's result to the second's operand."""


def pairs(graph: Graph) -> tuple[Pair, ...]:
    """Every two layers whose channels may be scaled."""
    users = graph.users()
    found = []
    for node in graph.nodes:
        if not _constant_layer(graph, node):
            continue
        value, between = node.output, [node.output]
        while len(users[value]) == 1 and value not in graph.outputs:
            (reader,) = users[value]
            if _constant_layer(graph, reader) and reader.inputs[0] == value:
                if not isinstance(reader.operator, DepthwiseConv2d) or _one_to_one(graph, reader):
                    found.append(Pair(node, reader, tuple(between)))
                break
            if not _passes(graph, reader):
                break
            value = reader.output
            between.append(value)
    return tuple(found)


def _constant_layer(graph: Graph, node: Node) -> bool:
    if not isinstance(node.operator, LINEAR) or any(name not in graph.constants for name in node.inputs[1:]):
        return False
    groups = 1
    if not isinstance(node.operator, FullyConnected | DepthwiseConv2d):
        groups = graph.types[node.inputs[0]].shape[-1] // graph.types[node.inputs[1]].shape[-1]
    return groups == 1


def _one_to_one(graph: Graph, node: Node) -> bool:
    return graph.types[node.inputs[0]].shape[-1] == graph.types[node.inputs[1]].shape[3]


def _passes(graph: Graph, node: Node) -> bool:
    """Whether f(s * x) = s * f(x) for every positive s per channel, and channels stay innermost."""
    operator = node.operator
    if isinstance(operator, Clamp):
        return operator.low in (0.0, -inf) and operator.high == inf
    if isinstance(operator, Pad):
        return operator.value == 0 and operator.before[-1] == operator.after[-1] == 0
    if isinstance(operator, Reshape):
        before = graph.types[node.inputs[0]].shape
        return len(before) > 1 and operator.shape[0] == before[0] == 1 and operator.shape[-1] % before[-1] == 0
    return isinstance(operator, MaxPool2d | AveragePool2d)


def _reading_axis(node: Node) -> int:
    return 3 if not isinstance(node.operator, FullyConnected) else 1


def equalise(graph: Graph) -> tuple[Graph, Mapping[str, Array]]:
    """The graph with equalised weights, and the factor [C] each value between layers was multiplied with."""
    constants = {name: array.astype(np.float64) for name, array in graph.constants.items() if array.dtype == np.float32}
    found = _unshared(graph, pairs(graph))
    total = {pair.first.output: np.ones(_channels(graph, pair)) for pair in found}
    for _ in range(ROUNDS):
        largest = 0.0
        for pair in found:
            factor = _factor(graph, pair, constants)
            _scale(pair, factor, constants)
            total[pair.first.output] *= factor
            largest = max(largest, float(np.abs(np.log(factor)).max()))
        if largest < ENOUGH:
            break
    new = {**graph.constants, **{name: array.astype(np.float32) for name, array in constants.items()}}
    factors = {}
    for pair in found:
        for name in pair.between:
            size = graph.types[name].shape[-1]
            row = total[pair.first.output]
            factors[name] = np.tile(row, size // row.size).astype(np.float32)
    return replace(graph, constants=new), factors


def _unshared(graph: Graph, found: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Without the pairs whose constants other nodes read too."""
    users = graph.users()
    return tuple(
        pair for pair in found if all(len(users[name]) == 1 for name in (*pair.first.inputs[1:], pair.second.inputs[1]))
    )


def _channels(graph: Graph, pair: Pair) -> int:
    return graph.types[pair.first.output].shape[-1]


def _factor(graph: Graph, pair: Pair, constants: Mapping[str, Array]) -> Array:
    """What each channel between is multiplied with: sqrt(range of the second / range of the first)."""
    channels = _channels(graph, pair)
    first = constants[pair.first.inputs[1]]
    assert isinstance(pair.first.operator, LINEAR)
    one = np.abs(np.moveaxis(first, output_axis(pair.first.operator), 0).reshape(channels, -1)).max(axis=1)
    second = np.moveaxis(constants[pair.second.inputs[1]], _reading_axis(pair.second), -1)
    two = np.abs(second.reshape(-1, channels)).max(axis=0)
    usable = (one > 0) & (two > 0)
    factor = np.sqrt(np.where(usable, two, 1.0) / np.where(usable, one, 1.0))
    return np.clip(np.where(usable, factor, 1.0), 1 / MOST_FACTOR, MOST_FACTOR)


def _scale(pair: Pair, factor: Array, constants: dict[str, Array]) -> None:
    """Multiply the first layer's channels, divide what the second reads."""
    assert isinstance(pair.first.operator, LINEAR)
    weights = constants[pair.first.inputs[1]]
    axis = output_axis(pair.first.operator)
    constants[pair.first.inputs[1]] = weights * along(factor, weights.ndim, axis)
    if len(pair.first.inputs) > 2:
        constants[pair.first.inputs[2]] = constants[pair.first.inputs[2]] * factor
    reading = constants[pair.second.inputs[1]]
    axis = _reading_axis(pair.second)
    row = np.tile(factor, reading.shape[axis] // factor.size)
    constants[pair.second.inputs[1]] = reading / along(row, reading.ndim, axis)
