"""Mixed precision: cost and noise of each layer at each width, the best choices for every cost, the point that fits a
budget, and a picture of the frontier."""

from __future__ import annotations

from bisect import bisect_left
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, log10
from pathlib import Path

import numpy as np

from dovetail.arrays import built
from dovetail.errors import DovetailError
from dovetail.files import TemporaryFolder
from dovetail.guests.ptq.calibration import CalibratedNetwork, choose_layers, held_bits, shared_widths
from dovetail.guests.ptq.data import Samples, check_labels
from dovetail.guests.ptq.execute import Values, batches, compute, part_of, run, sampled, value_bytes
from dovetail.guests.ptq.layers import LayerSettings, choose_weights, wanted_sums, weighted_layers
from dovetail.guests.ptq.onnx_writer import plain_onnx
from dovetail.guests.ptq.qdq import qdq_graph
from dovetail.guests.ptq.settings import Budget, Told
from dovetail.guests.ptq.steps import Data
from dovetail.guests.report.markup import PlotArea, element, shape
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array
from dovetail.notes import silent
from dovetail.records import Record, field
from dovetail.report import Report, make_report
from dovetail.target.description import Target

SAMPLES = 64
"""Most samples sensitivities are measured on."""
MOST_BYTES = 256 << 20
"""Bytes of all activations of these samples."""
MOST_POINTS = 2000
"""Points of the frontier that are kept while layers are added."""


class LayerCost(Record):
    """One layer, or one activation, at every width."""

    name: str
    noise: Mapping[int, float]
    """By bits: square error of the network's result over its mean square, all other layers float."""
    cost: Mapping[int, float]
    """By bits: bytes or cycles."""


class FrontierPoint(Record):
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
    """Bytes of the weights of layers, of so many bits each."""
    own = [node for node in weighted_layers(graph) if node.output in widths]
    return sum((graph.constants[node.inputs[1]].size * widths[node.output] + 7) // 8 for node in own)


def byte_costs(graph: Graph, widths: Mapping[int, int]) -> dict[str, dict[int, float]]:
    """Bytes of each layer's weights at each width; `widths` has the bits each takes on the target."""
    names = [node.output for node in weighted_layers(graph)]
    return {name: {bits: float(weight_bytes(graph, {name: held})) for bits, held in widths.items()} for name in names}


def result_values(graph: Graph) -> tuple[str, ...]:
    """The values noise is measured at: the outputs, or the scores that a softmax at the end reads."""
    scores = {node.output: node.inputs[0] for node in graph.nodes if node.operator.gives_shares}
    return tuple(scores.get(name, name) for name in graph.outputs)


def sensitivities(
    graph: Graph, data: Data, widths: Sequence[int], settings: LayerSettings, report: Told
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


def _every_value(graph: Graph, data: Data) -> Values:
    """All values of the float network on some samples."""
    part = part_of(data, slice(int(max(1, min(SAMPLES, MOST_BYTES // max(sum(value_bytes(graph)), 1))))))
    return {**run(graph, part, keep=[node.output for node in graph.nodes]), **part}


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
        points = _spread(points, MOST_POINTS)
    return tuple(points)


def _spread(points: Sequence[FrontierPoint], most: int) -> list[FrontierPoint]:
    """At most so many points, ends included, spread evenly over their places."""
    return [points[index] for index in np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(int))]


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
    candidates = _spread(points, most)
    missed = excess(candidates[-1])
    if missed > 0:
        what = f"even the widest weights miss the budget, by {missed:.2f} {unit}"
        raise DovetailError(what, where="--budget", hint="raise the budget, or give more data")
    return candidates[bisect_left(candidates[:-1], True, key=lambda point: excess(point) <= 0)]


def outputs_on(graph: Graph, data: Data, name: str) -> Array:
    """A value of a float or QDQ graph on all samples, [N, elements]."""
    parts = [run(graph, part, keep=[name])[name] for part in batches(graph, data)]
    whole = np.concatenate(parts)
    return whole.reshape(len(whole), -1)


def top1(scores: Array, labels: Array) -> float:
    """Percent of the rows whose largest element is at the label."""
    return 100 * float((scores.argmax(axis=1) == labels).mean())


def run_report(graph: Graph, target: Target) -> Report:
    """The report of one inference of a QDQ graph on the simulated chip, with seeded inputs.
    Raises DovetailError where it does not compile, or the simulator is not installed."""
    from dovetail.compile import Options, compile_model, sample_inputs
    from dovetail.run import chip_simulator, run_build

    with TemporaryFolder() as folder:
        model = Path(folder) / f"{graph.name}.onnx"
        model.write_bytes(plain_onnx(graph).SerializeToString(deterministic=True))
        compiled = compile_model(model, target, Options(allow_float=True))
    with built(compiled, target) as build:
        return make_report(run_build(build, chip_simulator(target), [sample_inputs(compiled.graph)]))


def _cycles(report: Report, name: str) -> int:
    """Cycles of the layers that compute an operator written under this name: of the engine, or the core's time."""
    own = [layer for layer in report.layers if any(operator.endswith(f"({name})") for operator in layer.operators)]
    return sum((layer.engine_cycles if layer.ideal_macs_per_cycle is not None else layer.cycles) or 0 for layer in own)


class WidthSearchResult(Record):
    """The result of a search for widths."""

    layers: tuple[LayerCost, ...]
    points: tuple[FrontierPoint, ...]
    """The frontier, from the cheapest on."""
    chosen: FrontierPoint
    unit: str
    """"bytes" or "cycles"."""
    base: float
    """Cycles that no width changes; 0 for bytes."""
    values: tuple[LayerCost, ...] = ()
    """The activations whose widths were searched for too; in points they come behind the layers."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the name of one of `values`, the activations that share its steps."""
    decided: str = ""
    """By what the point was chosen."""

    @property
    def widths(self) -> dict[str, int]:
        """Bits by layer."""
        return {layer.name: bits for layer, bits in zip(self.layers, self.chosen.widths, strict=False)}

    @property
    def activation_widths(self) -> dict[str, int]:
        """Bits by activation."""
        chosen = zip(self.values, self.chosen.widths[len(self.layers) :], strict=True)
        return {name: bits for value, bits in chosen for name in self.groups[value.name]}


def search(
    calibrated: CalibratedNetwork,
    data: Data,
    measured: Samples,
    target: Target,
    budget: Budget,
    report: Told = silent,
) -> WidthSearchResult:
    """Choose the width of every layer's weights, of every activation, or of both, as the settings say.

    Args:
        calibrated: the float graph with the steps of its activations.
        data: float32 [N, *shape] by input.
        measured: what a loss or a ratio is measured on; without labels the float network's answers are taken for right.
        target: its simulator is asked for cycles.
        budget: what must hold.
        report: told the progress.

    Raises:
        DovetailError: no choice keeps the budget.
    """
    settings, graph = calibrated.settings, calibrated.graph
    widths = {
        node.output: calibrated.wanted.weight_bits
        if settings.mixed_weights
        else (settings.widths.get(node.output, settings.bits),)
        for node in weighted_layers(graph)
    }
    every = sorted({bits for own in widths.values() for bits in own}, reverse=True)
    noise = sensitivities(graph, data, every, calibrated.layer_settings, report)
    if budget.kind == "cycles":
        if settings.mixed_activations:
            hint = "give bytes=N, loss=POINTS or sqnr=DB, or --activations of one width"
            raise DovetailError("cycles are not searched over widths of activations", where="--budget", hint=hint)
        (costs, base), unit = _cycle_costs(calibrated, data, target, report), "cycles"
    else:
        costs, base, unit = byte_costs(graph, {bits: held_bits(target, bits) for bits in every}), 0.0, "bytes"
    layers = tuple(
        LayerCost(name, *({bits: of[name][bits] for bits in own} for of in (noise, costs)))
        for name, own in widths.items()
    )
    groups = shared_widths(graph) if settings.mixed_activations else {}
    values = activation_costs(calibrated, data, groups, calibrated.wanted.activation_bits, report)
    points = frontier((*layers, *values))
    if budget.kind in ("bytes", "cycles"):
        chosen, decided = within(points, budget.limit, unit, base), f"the most predicted dB within the {unit}"
    else:
        excess = _excess(calibrated, data, measured, budget, groups, report)
        measure = "points of top-1" if budget.kind == "loss" else "dB"
        chosen = cheapest(points, excess, measure)
        decided = f"the fewest {unit} that keep the budget in {measure} as measured, not as predicted"
    return WidthSearchResult(layers, points, chosen, unit, base, values, groups, decided)


def activation_costs(
    calibrated: CalibratedNetwork, data: Data, groups: Mapping[str, Sequence[str]], widths: Sequence[int], report: Told
) -> tuple[LayerCost, ...]:
    """Bytes and noise of groups of activations that share their steps, at each width; each group by its name."""
    graph, every = calibrated.graph, [name for group in groups.values() for name in group]
    steps = {bits: calibrated.at_widths(dict.fromkeys(every, bits)).activations for bits in widths if groups}
    values, costs = _every_value(graph, data) if groups else {}, []
    for number, (name, group) in enumerate(groups.items()):
        report(f"measuring sensitivity: activation {number + 1} of {len(groups)}")
        built = {own[group[0]].dtype.bits: own for own in steps.values()}  # which may not be as narrow
        elements = sum(graph.types[one].elements for one in group)
        noise = {bits: _noise(graph, values, {one: own[one].rounded for one in group}) for bits, own in built.items()}
        costs.append(LayerCost(name, noise, {bits: float(-(-elements * bits // 8)) for bits in built}))
    return tuple(costs)


def _cycle_costs(
    calibrated: CalibratedNetwork, data: Data, target: Target, report: Told
) -> tuple[dict[str, dict[int, float]], float]:
    """Cycles of each layer at each width, from the whole network at that width, and what is left of the widest."""
    names = [node.output for node in weighted_layers(calibrated.graph)]
    few = part_of(data, slice(8))
    costs: dict[str, dict[int, float]] = {name: {} for name in names}
    base = 0.0
    for bits in calibrated.wanted.weight_bits:
        report(f"simulating the network with {bits}-bit weights")
        scheme = choose_layers(calibrated, few, dict.fromkeys(names, bits))
        measured = run_report(qdq_graph(calibrated.graph, scheme), target)
        for name in names:
            costs[name][bits] = float(_cycles(measured, name))
        base = max(base, float(measured.cycles["total"] or 0) - sum(own[bits] for own in costs.values()))
    return costs, base


def _excess(
    calibrated: CalibratedNetwork,
    data: Data,
    measured: Samples,
    budget: Budget,
    groups: Mapping[str, Sequence[str]],
    report: Told,
) -> Callable[[FrontierPoint], float]:
    """By how much a point misses a loss or a signal-to-noise ratio, measured with all layers quantised."""
    graph, inputs, labels = calibrated.graph, measured.inputs, measured.labels
    names = [node.output for node in weighted_layers(graph)]
    value = result_values(graph)[0]
    wanted = outputs_on(graph, inputs, value)
    if budget.kind == "loss":
        if wanted.shape[1] < 2:
            hint = "give sqnr=DB"
            raise DovetailError("a loss of top-1 needs a network with several classes", where="--budget", hint=hint)
        truth = check_labels(labels, wanted.shape[1]) if labels is not None else wanted.argmax(axis=1)
        best = top1(wanted, truth)
    float_ends = replace(calibrated, settings=replace(calibrated.settings, integer_ends=False))

    def excess(point: FrontierPoint) -> float:
        report(f"trying {point.cost:,.0f} bytes")
        network = float_ends
        if groups:
            bits = zip(groups.values(), point.widths[len(names) :], strict=True)
            network = float_ends.at_widths({name: width for group, width in bits for name in group})
        quantised = qdq_graph(graph, choose_layers(network, data, dict(zip(names, point.widths, strict=False))))
        got = outputs_on(quantised, inputs, value if value in quantised.types else graph.outputs[0])
        if budget.kind == "loss":
            return best - top1(got, truth) - budget.limit
        noise = Noise()
        noise.add(wanted, got)
        return budget.limit - noise.sqnr

    return excess


FRAME = PlotArea(640, 400, left=70, right=20, top=40, bottom=50)
TICKS = 5
"""Marks along each axis."""


def frontier_svg(search: WidthSearchResult, title: str) -> str:
    """A drawing of the frontier with the chosen point marked; the same text for the same search."""
    unit = "bytes of weights and activations" if search.values else "bytes of weights"
    unit = unit if search.unit == "bytes" else "cycles of layers with weights"
    costs, ratios = [point.cost for point in search.points], [point.sqnr for point in search.points]
    low, high = floor(min(ratios)), max(ceil(max(ratios)), floor(min(ratios)) + 1)
    left, right = min(costs), max(max(costs), min(costs) + 1)

    def place(point: FrontierPoint) -> tuple[float, float]:
        x, y = FRAME.x((point.cost - left) / (right - left)), FRAME.y((point.sqnr - low) / (high - low))
        return round(x, 1), round(y, 1)

    first, last, foot = FRAME.x(0), FRAME.x(1), FRAME.height - 30
    lines = [
        shape("rect", width=FRAME.width, height=FRAME.height, fill="white"),
        element("text", escape(title), x=FRAME.left, y=24, font_size=14),
    ]
    for share in (index / (TICKS - 1) for index in range(TICKS)):
        x, y = FRAME.x(share), FRAME.y(share)
        cost, ratio = f"{left + share * (right - left):,.0f}", f"{low + share * (high - low):.0f} dB"
        lines.append(element("text", cost, x=f"{x:.1f}", y=foot, text_anchor="middle"))
        lines.append(shape("line", x1=first, x2=last, y1=f"{y:.1f}", y2=f"{y:.1f}", stroke="#ddd"))
        lines.append(element("text", ratio, x=first - 8, y=f"{y + 4:.1f}", text_anchor="end"))
    path = " ".join(f"{x},{y}" for x, y in map(place, search.points))
    x, y = place(search.chosen)
    middle = str((FRAME.left + FRAME.width) / 2)
    lines += [
        element("text", escape(unit), x=middle, y=FRAME.height - 10, text_anchor="middle"),
        shape("polyline", points=path, fill="none", stroke="#1f6fb4", stroke_width=2),
        shape("circle", cx=str(x), cy=str(y), r=5, fill="#c0392b"),
    ]
    head = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {FRAME.width} {FRAME.height}"}
    return element("svg", "\n", "\n".join(lines), "\n", **head, font_family="sans-serif", font_size=12) + "\n"


def thinned(points: Sequence[FrontierPoint], most: int) -> list[FrontierPoint]:
    """At most so many points, ends included, spread evenly over the cost."""
    if len(points) <= most:
        return list(points)
    first, last = points[0].cost, points[-1].cost
    costs = (first + (last - first) * index / (most - 1) for index in range(most))
    return list(dict.fromkeys(min(points, key=lambda point: abs(point.cost - cost)) for cost in costs))
