"""Mixed precision: cost and noise of each layer at each width, the best choices for every cost, and a budget."""

from __future__ import annotations

from bisect import bisect_left
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log10

import numpy as np

from dovetail.errors import DovetailError
from dovetail.guests.ptq.execute import Values, batches, compute, run, sampled
from dovetail.guests.ptq.layers import LayerSettings, choose_weights, wanted_sums, weighted_layers
from dovetail.guests.ptq.settings import Told
from dovetail.guests.ptq.steps import TensorQuantisation
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array

SAMPLES = 64
"""Most samples sensitivities are measured on."""
MOST_BYTES = 256 << 20
"""Bytes of all activations of these samples."""
MOST_POINTS = 2000
"""Points of the frontier that are kept while layers are added."""


@dataclass(frozen=True)
class LayerCost:
    """One layer, or one activation, at every width."""

    name: str
    noise: Mapping[int, float]
    """By bits: square error of the network's result over its mean square, all other layers float."""
    cost: Mapping[int, float]
    """By bits: bytes or cycles."""


@dataclass(frozen=True)
class FrontierPoint:
    """A choice of widths no other beats in both cost and noise."""

    cost: float
    noise: float
    """The sum of the layers' own."""
    widths: tuple[int, ...]
    """Bits by layer, in order."""

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise in dB, as the sum of the layers' noise predicts it."""
        return decibel(self.noise)


@dataclass
class Noise:
    """Signal and error of a value, summed up."""

    signal: float = 0.0
    error: float = 0.0

    def add(self, wanted: Array, got: Array) -> None:
        """Count some elements."""
        wanted = wanted.astype(np.float64).reshape(-1)
        difference = got.astype(np.float64).reshape(-1) - wanted
        self.signal += float((wanted * wanted).sum())
        self.error += float((difference * difference).sum())

    @property
    def share(self) -> float:
        """The error as a part of the signal."""
        return self.error / max(self.signal, 1e-30)

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise in dB."""
        return decibel(self.share)


def decibel(noise: float) -> float:
    """A share of noise as signal-to-noise ratio in dB, at most 200."""
    return min(200.0, -10 * log10(max(noise, 1e-20)))


def weight_bytes(graph: Graph, widths: Mapping[str, int]) -> int:
    """Bytes of all weights, those of each layer packed."""
    own = [node for node in weighted_layers(graph) if node.output in widths]
    return sum((graph.constants[node.inputs[1]].size * widths[node.output] + 7) // 8 for node in own)


def byte_costs(graph: Graph, widths: Sequence[int]) -> dict[str, dict[int, float]]:
    """Bytes of each layer's weights at each width."""
    names = [node.output for node in weighted_layers(graph)]
    return {name: {bits: float(weight_bytes(graph, {name: bits})) for bits in widths} for name in names}


def result_values(graph: Graph) -> tuple[str, ...]:
    """The values noise is measured at: the outputs, or the scores that a softmax at the end reads."""
    scores = {node.output: node.inputs[0] for node in graph.nodes if node.operator.gives_shares}
    return tuple(scores.get(name, name) for name in graph.outputs)


def sensitivities(
    graph: Graph, data: Mapping[str, Array], widths: Sequence[int], settings: LayerSettings, report: Told
) -> dict[str, dict[int, float]]:
    """The noise each layer alone makes at each width, its weights fitted as they will be."""
    values, layers = _every_value(graph, data), weighted_layers(graph)
    noise: dict[str, dict[int, float]] = {node.output: {} for node in layers}
    for index, node in enumerate(layers):
        real = values[node.output]
        sums, weights = wanted_sums(graph, node, real, settings), graph.constants[node.inputs[1]]

        def centred(array: Array, real: Array = real) -> Array:
            return np.asarray(array - (array - real).mean(axis=tuple(range(array.ndim - 1))))

        changes = {node.output: centred} if settings.correct_bias else {}
        for bits in widths:
            report(f"measuring sensitivity: layer {index + 1} of {len(layers)}, {bits} bits")
            chosen = choose_weights(node.operator, weights, values[node.inputs[0]], sums, bits, settings)
            changed = replace(graph, constants={**graph.constants, node.inputs[1]: chosen.real})
            noise[node.output][bits] = _noise(changed, values, changes, node.output)
    return noise


def _every_value(graph: Graph, data: Mapping[str, Array]) -> Values:
    """All values of the float network on some samples."""
    total = sum(4 * kind.elements for name, kind in graph.types.items() if name not in graph.constants)
    count = int(max(1, min(SAMPLES, MOST_BYTES // max(total, 1))))
    part = {name: array[:count] for name, array in data.items()}
    return {**run(graph, part, keep=[node.output for node in graph.nodes]), **part}


def rounding_noise(
    graph: Graph,
    data: Mapping[str, Array],
    groups: Sequence[Sequence[str]],
    steps: Mapping[int, Mapping[str, TensorQuantisation]],
    report: Told,
) -> list[dict[int, float]]:
    """The noise at the results when only some activations are rounded, for each group of them and each width.

    Args:
        graph: the float network.
        data: float32 [N, *shape] by input.
        groups: activations that are rounded together.
        steps: by bits, those of every activation.
        report: told the progress.
    """
    values, noise = _every_value(graph, data), []
    for number, group in enumerate(groups):
        report(f"measuring sensitivity: activation {number + 1} of {len(groups)}")
        changes = {bits: {name: own[name].rounded for name in group} for bits, own in steps.items()}
        noise.append({bits: _noise(graph, values, own) for bits, own in changes.items()})
    return noise


def _noise(graph: Graph, values: Values, changes: Mapping[str, Callable[[Array], Array]], layer: str = "") -> float:
    """The noise at the results when some values are changed, and all behind them and a layer computed again: the square
    error at the results over their mean square."""
    fresh: Values = {name: change(values[name]) for name, change in changes.items() if name in graph.inputs}
    for node in graph.nodes:
        name = node.output
        if name == layer or any(operand in fresh for operand in node.inputs):
            fresh[name] = compute(graph, node, ChainMap(fresh, values))
        if name in changes:
            fresh[name] = changes[name](fresh.get(name, values[name]))
    noise = Noise()
    for name in result_values(graph):
        is_changed = name in fresh and sampled(graph, fresh, name)
        noise.add(values[name], fresh[name] if is_changed else values[name])
    return noise.share


def frontier(layers: Sequence[LayerCost]) -> tuple[FrontierPoint, ...]:
    """Every choice of widths that no other beats in cost and noise, from the cheapest on.

    Exact while at most `MOST_POINTS` remain after a layer; beyond, neighbours in cost are thinned out.
    """
    points = [FrontierPoint(0.0, 0.0, ())]
    for layer in layers:
        grown = [
            FrontierPoint(point.cost + layer.cost[bits], point.noise + layer.noise[bits], (*point.widths, bits))
            for point in points
            for bits in layer.cost
        ]
        grown.sort(key=lambda point: (point.cost, point.noise, point.widths))
        points = []
        for point in grown:
            if not points or point.noise < points[-1].noise:
                points.append(point)
        if len(points) > MOST_POINTS:
            places = np.unique(np.linspace(0, len(points) - 1, MOST_POINTS).astype(int))
            points = [points[index] for index in places]
    return tuple(points)


def within(points: Sequence[FrontierPoint], limit: float, unit: str, base: float = 0.0) -> FrontierPoint:
    """The point of least noise whose cost keeps the limit; raises DovetailError if even the cheapest does not.

    Args:
        points: from the cheapest on.
        limit: of the whole network.
        unit: of the limit.
        base: the cost of everything else in the network, at any widths.
    """
    fitting = [point for point in points if base + point.cost <= limit]
    if fitting:
        return fitting[-1]
    least = base + points[0].cost
    rest = f", {base:,.0f} of them for what has no weights" if base else ""
    raise DovetailError(
        f"the budget is {limit:,.0f} {unit}, the narrowest weights need {least:,.0f}{rest}",
        where="--budget",
        hint=f"raise it to {least:,.0f} or more",
    )


def cheapest(
    points: Sequence[FrontierPoint], excess: Callable[[FrontierPoint], float], unit: str, most: int = 16
) -> FrontierPoint:
    """The cheapest point that keeps a budget, by bisection over at most `most` of them.

    Args:
        points: a frontier.
        excess: by how much a point misses the budget, 0 or less where it keeps it.
        unit: of the excess.
        most: points of the frontier that are candidates.

    Raises:
        DovetailError: none keeps it.
    """
    places = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(int))
    candidates: list[FrontierPoint] = [points[index] for index in places]
    missed = excess(candidates[-1])
    if missed > 0:
        what = f"even the widest weights miss the budget, by {missed:.2f} {unit}"
        raise DovetailError(what, where="--budget", hint="raise the budget, or give more data")
    return candidates[bisect_left(candidates[:-1], True, key=lambda point: excess(point) <= 0)]


def outputs_on(graph: Graph, data: Mapping[str, Array], name: str) -> Array:
    """A value of a float or QDQ graph on all samples, [N, elements]."""
    parts = [run(graph, part, keep=[name])[name] for part in batches(graph, data)]
    whole = np.concatenate(parts)
    return whole.reshape(len(whole), -1)


def top1(scores: Array, labels: Array) -> float:
    """Percent of the rows whose largest element is at the label."""
    return 100 * float((scores.argmax(axis=1) == labels).mean())
