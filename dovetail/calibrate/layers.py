"""The weights of every layer in turn: chosen while what the layers before made of the data is known.

One walk computes the float network and the quantised one side by side. At each layer with weights it has the operands
the quantised layer gets and the sums the float layer gave: rounding and bias are fitted to these, so that a layer also
makes up for the errors before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from dovetail.calibrate.execute import Values, columns, compute, sampled
from dovetail.calibrate.prepare import LINEAR, Linear, output_axis
from dovetail.calibrate.qdq import steps_of
from dovetail.calibrate.ranges import Steps
from dovetail.calibrate.rounding import adapt_rounding, gather
from dovetail.calibrate.weights import WIDTHS, Form, Weights, nearest
from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Array
from dovetail.operators.linear import DepthwiseConv2d, FullyConnected

MOST_ROWS = 8192
"""Most sums of a layer that its rounding is fitted to."""
MOST_BYTES = 512 << 20
"""Bytes of activations the two networks may hold together."""


@dataclass(frozen=True)
class LayerSettings:
    """How weights are chosen."""

    per_channel: bool = True
    adaptive: bool = True
    """Fit the rounding of weights narrower than 8 bits to data; else to the nearest."""
    correct_bias: bool = True
    """Take the mean error of each channel off its bias."""
    seed: int = 0
    """Of the choice of sums."""
    ternary: bool = False
    """Weights of 2 bits are -1, 0 or 1."""
    powers_of_two: bool = False
    """Scales of weights are powers of two."""
    largest: float = inf
    """Scale of narrow weights that are powers of two."""


@dataclass(frozen=True)
class Layers:
    """What the walk chose, by result of the layer."""

    weights: Mapping[str, Weights]
    biases: Mapping[str, Array]


def weighted_layers(graph: Graph) -> tuple[Node, ...]:
    """The layers whose weights are constants."""
    return tuple(
        node for node in graph.nodes if isinstance(node.operator, LINEAR) and node.inputs[1] in graph.constants
    )


def fit_layers(
    graph: Graph,
    data: Mapping[str, Array],
    activations: Mapping[str, Steps],
    bits: Mapping[str, int],
    settings: LayerSettings,
    report: Callable[[str], None] = lambda text: None,
) -> Layers:
    """Choose weights and biases.

    Args:
        graph: the float graph.
        data: [N, *shape] by input; as many samples are used as memory allows.
        activations: steps of the quantised values.
        bits: width of the weights by result of the layer; a layer that is not here keeps its float weights.
        settings: how.
        report: told the progress.
    """
    largest = sum(sorted(4 * k.elements for n, k in graph.types.items() if n not in graph.constants)[-6:])
    count = int(max(1, MOST_BYTES // (2 * largest)))
    walk = _Walk(graph, activations, bits, settings)
    for name in graph.inputs:
        walk.real[name] = data[name][:count]
        walk.coded[name] = walk.rounded(name, walk.real[name])
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    for index, node in enumerate(graph.nodes):
        report(f"choosing weights: operator {index + 1} of {len(graph.nodes)}")
        walk.step(node)
        for name in node.inputs:
            if last[name] == index:
                walk.real.pop(name, None)
                walk.coded.pop(name, None)
    return Layers(walk.weights, walk.biases)


class _Walk:
    """The state of both networks."""

    def __init__(
        self, graph: Graph, activations: Mapping[str, Steps], bits: Mapping[str, int], settings: LayerSettings
    ) -> None:
        self.graph, self.activations, self.bits, self.settings = graph, activations, bits, settings
        self.real: Values = {}
        self.coded: Values = {}
        """Values of the quantised network, as floats."""
        self.weights: dict[str, Weights] = {}
        self.biases: dict[str, Array] = {}
        self.layers = {node.output for node in weighted_layers(graph)}

    def rounded(self, name: str, array: Array) -> Array:
        """The value as its integers stand for it."""
        steps = self.activations.get(name)
        return array if steps is None else rounded32(array, steps)

    def step(self, node: Node) -> None:
        """Compute a node in both networks."""
        name = node.output
        self.real[name] = compute(self.graph, node, self.real)
        if name in self.layers and name in self.bits and sampled(self.graph, self.real, name):
            sums = self._layer(node)
        else:
            sums = compute(self.graph, node, self.coded)
        self.coded[name] = self.rounded(name, sums)

    def _layer(self, node: Node) -> Array:
        """Choose weights and bias; gives the quantised layer's sums."""
        operator = node.operator
        assert isinstance(operator, LINEAR)
        weights = self.graph.constants[node.inputs[1]]
        channels = weights.shape[output_axis(operator)]
        bias = self.graph.constants.get(node.inputs[2]) if len(node.inputs) > 2 else None
        found = choose_weights(
            operator,
            weights,
            self.coded[node.inputs[0]],
            wanted_sums(self.graph, node, self.real[node.output], self.settings),
            self.bits[node.output],
            replace(self.settings, largest=self._largest_scale(node)),
        )
        plain = replace(node, inputs=(node.inputs[0], node.inputs[1]))
        graph = replace(self.graph, constants={node.inputs[1]: found.real})
        sums = compute(graph, plain, self.coded)
        before = np.zeros(channels, np.float32) if bias is None else bias
        if self.settings.correct_bias:
            axes = tuple(range(sums.ndim - 1))
            after = self.real[node.output].mean(axis=axes, dtype=np.float64) - sums.mean(axis=axes, dtype=np.float64)
            before = after.astype(np.float32)
        self.weights[node.output] = found
        if bias is not None or before.any():
            self.biases[node.output] = before
        return np.asarray(sums + before, np.float32)


    def _largest_scale(self, node: Node) -> float:
        """The scale of weights with which the sums have the steps of the result: with more, they would be raised."""
        source, result = steps_of(self.graph, self.activations, node.inputs[0]), self.activations.get(node.output)
        readers = [reader for reader in self.graph.nodes if node.output in reader.inputs]
        if result is None and len(readers) == 1:  # a limit that is applied to it
            result = self.activations.get(readers[0].output)
        return result.scale / source.scale if source is not None and result is not None else inf


def rounded32(array: Array, steps: Steps) -> Array:
    """As `Steps.rounded`, in float32."""
    scale, zero_point = np.float32(steps.scale), np.float32(steps.zero_point)
    integers = np.clip(np.rint(array / scale), steps.dtype.low - zero_point, steps.dtype.high - zero_point)
    return np.asarray(integers * scale, np.float32)


def wanted_sums(graph: Graph, node: Node, sums: Array, settings: LayerSettings) -> Array:
    """The float layer's sums as its weights are fitted to them: without its bias, unless that is corrected after."""
    if settings.correct_bias or len(node.inputs) < 3:
        return sums
    return np.asarray(sums - graph.constants[node.inputs[2]], np.float32)


def choose_weights(operator: Linear, weights: Array, x: Array, y: Array, bits: int, settings: LayerSettings) -> Weights:
    """The integers of a layer's weights.

    Args:
        operator: the layer.
        weights: float32, in the operator's order.
        x: its operand in the quantised network [N, *shape].
        y: the sums wanted [N, *shape], see `wanted_sums`.
        bits: 2, 4 or 8.
        settings: how.
    """
    form = Form(WIDTHS[bits], settings.ternary, settings.powers_of_two, settings.largest)
    if bits == 8 or not settings.adaptive:
        return nearest(operator, weights, form, settings.per_channel)
    rows, sums, matrix = _problem(operator, weights, x, y, settings.seed)
    evidence = gather(rows, sums, matrix, settings.correct_bias)
    steps, scale = adapt_rounding(evidence, matrix, form, settings.per_channel)
    if isinstance(operator, DepthwiseConv2d):
        shaped = steps.reshape(weights.shape[3], *weights.shape[1:3], 1).transpose(3, 1, 2, 0)
    else:
        shaped = steps.reshape(weights.shape)
    flat = scale.reshape(-1) if settings.per_channel else scale.reshape(-1)[:1]
    integers = np.ascontiguousarray(shaped).astype(np.int8)
    return Weights(integers, flat.astype(np.float32), form.dtype, output_axis(operator))


def _problem(operator: Linear, weights: Array, x: Array, y: Array, seed: int) -> tuple[Array, Array, Array]:
    """Operands [G, R, K], sums [G, R, P] and weights [G, P, K] of a choice of sums."""
    generator = np.random.default_rng(seed)
    sums = y.reshape(-1, y.shape[-1])
    chosen = np.sort(generator.permutation(len(sums))[:MOST_ROWS])
    if isinstance(operator, FullyConnected):
        return x.reshape(-1, x.shape[-1])[chosen][None], sums[chosen][None], weights[None].astype(np.float64)
    view = columns(operator, x.reshape(-1, *x.shape[-3:]), (weights.shape[1], weights.shape[2]))
    places = np.unravel_index(chosen, view.shape[:3])
    windows = view[places]  # [R, C, KH, KW]
    picked = sums[chosen]
    if isinstance(operator, DepthwiseConv2d):
        many = weights.shape[3] // x.shape[-1]
        rows = windows.reshape(len(chosen), x.shape[-1], -1).transpose(1, 0, 2)
        matrix = weights[0].reshape(-1, weights.shape[3]).T.reshape(x.shape[-1], many, -1)
        return rows, picked.reshape(len(chosen), x.shape[-1], many).transpose(1, 0, 2), matrix.astype(np.float64)
    groups = x.shape[-1] // weights.shape[3]
    split = windows.reshape(len(chosen), groups, weights.shape[3], *weights.shape[1:3]).transpose(1, 0, 3, 4, 2)
    rows = split.reshape(groups, len(chosen), -1)
    outputs = weights.shape[0] // groups
    matrix = weights.reshape(groups, outputs, -1).astype(np.float64)
    return rows, picked.reshape(len(chosen), groups, outputs).transpose(1, 0, 2), matrix
