"""The search for widths: sensitivities, costs, the frontier, and the point a budget asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dovetail.calibrate.budget import (
    Budget,
    LayerCost,
    Point,
    byte_costs,
    cheapest,
    decibel,
    frontier,
    outputs_on,
    result_values,
    sensitivities,
    top1,
    within,
)
from dovetail.calibrate.calibration import Calibrated, Settings, choose_layers, layer_settings
from dovetail.calibrate.costs import simulate
from dovetail.calibrate.data import Samples
from dovetail.calibrate.layers import weighted_layers
from dovetail.calibrate.qdq import Scheme, qdq_graph
from dovetail.errors import DovetailError
from dovetail.graph.types import Array
from dovetail.target.description import Target

Report = Callable[[str], None]


@dataclass(frozen=True)
class Search:
    """What was found."""

    layers: tuple[LayerCost, ...]
    points: tuple[Point, ...]
    """The frontier, from the cheapest on."""
    chosen: Point
    unit: str
    """"bytes" or "cycles"."""
    base: float
    """Cycles that no width changes; 0 for bytes."""

    @property
    def widths(self) -> dict[str, int]:
        """Bits by layer."""
        return {layer.name: bits for layer, bits in zip(self.layers, self.chosen.widths, strict=True)}


def search(
    calibrated: Calibrated,
    data: Mapping[str, Array],
    measured: Samples,
    target: Target,
    settings: Settings,
    budget: Budget,
    report: Report = lambda text: None,
) -> Search:
    """Choose the width of every layer's weights.

    Args:
        calibrated: the float graph with the steps of its activations.
        data: float32 [N, *shape] by input.
        measured: what a loss or a ratio is measured on; without labels the float network's answers are taken for right.
        target: its widths are tried; its simulator is asked for cycles.
        settings: how weights are chosen.
        budget: what must hold.
        report: told the progress.

    Raises:
        DovetailError: no choice keeps the budget.
    """
    widths = target.quantisation.weight_bits
    how = layer_settings(target.quantisation, settings)
    noise = sensitivities(calibrated.graph, data, widths, how, report)
    names = [node.output for node in weighted_layers(calibrated.graph)]
    costs, base, unit = byte_costs(calibrated.graph, widths), 0.0, "bytes"
    if budget.kind == "cycles":
        costs, base = _cycle_costs(calibrated, data, target, settings, report)
        unit = "cycles"
    layers = tuple(LayerCost(name, noise[name], costs[name]) for name in names)
    points = frontier(layers)
    if budget.kind in ("bytes", "cycles"):
        chosen = within(points, budget.limit - base, unit)
    else:
        excess = _excess(calibrated, data, measured, target, settings, budget, names, report)
        chosen = cheapest(points, excess, "points of top-1" if budget.kind == "loss" else "dB")
    return Search(layers, points, chosen, unit, base)


def _graph_of(
    calibrated: Calibrated,
    data: Mapping[str, Array],
    widths: Mapping[str, int],
    target: Target,
    settings: Settings,
    integer_ends: bool,
    report: Report,
) -> Scheme:
    layers = choose_layers(calibrated, data, widths, target.quantisation, settings, report)
    return Scheme(calibrated.activations, layers.weights, layers.biases, integer_ends)


def _cycle_costs(
    calibrated: Calibrated, data: Mapping[str, Array], target: Target, settings: Settings, report: Report
) -> tuple[dict[str, dict[int, float]], float]:
    """Cycles of each layer at each width, from the whole network at that width, and what is left of the widest."""
    names = [node.output for node in weighted_layers(calibrated.graph)]
    few = {name: array[:8] for name, array in data.items()}
    costs: dict[str, dict[int, float]] = {name: {} for name in names}
    base = 0.0
    for bits in target.quantisation.weight_bits:
        report(f"simulating the network with {bits}-bit weights")
        scheme = _graph_of(
            calibrated, few, dict.fromkeys(names, bits), target, settings, settings.integer_ends, lambda text: None
        )
        measured = simulate(qdq_graph(calibrated.graph, scheme), target, names)
        for name in names:
            costs[name][bits] = float(measured.layers[name])
        base = max(base, float(measured.total - sum(measured.layers.values())))
    return costs, base


def _excess(
    calibrated: Calibrated,
    data: Mapping[str, Array],
    measured: Samples,
    target: Target,
    settings: Settings,
    budget: Budget,
    names: list[str],
    report: Report,
) -> Callable[[Point], float]:
    """By how much a point misses a loss or a signal-to-noise ratio, measured with all layers quantised."""
    value = result_values(calibrated.graph)[0]
    wanted, labels = outputs_on(calibrated.graph, measured.inputs, value), measured.labels
    if budget.kind == "loss":
        if wanted.shape[1] < 2:
            raise DovetailError("a loss of top-1 needs a network with several classes", where="--budget",
                                hint="give sqnr=DB")
        truth = check_labels(labels, wanted.shape[1]) if labels is not None else wanted.argmax(axis=1)
        best = top1(wanted, truth)

    def excess(point: Point) -> float:
        """Quantise like this and compare."""
        report(f"trying {point.cost:,.0f} bytes of weights")
        widths = dict(zip(names, point.widths, strict=True))
        scheme = _graph_of(calibrated, data, widths, target, settings, False, lambda text: None)
        graph = qdq_graph(calibrated.graph, scheme)
        given = value if value in graph.types else calibrated.graph.outputs[0]
        got = outputs_on(graph, measured.inputs, given)
        if budget.kind == "loss":
            return best - top1(got, truth) - budget.limit
        error = ((got - wanted).astype(np.float64) ** 2).sum() / (wanted.astype(np.float64) ** 2).sum()
        return budget.limit - decibel(float(error))

    return excess


def check_labels(labels: Array, classes: int) -> Array:
    """The labels, all of which must be classes; raises DovetailError otherwise."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        raise DovetailError(f"{bad.size} labels are out of range: label {int(labels[bad[0]])} of sample {int(bad[0])}, "
                            f"the network has classes 0 to {classes - 1}", where="labels",
                            hint=f"give each sample a class from 0 to {classes - 1}")
    return labels
