"""The weights of every layer in turn: chosen while what the layers before made of the data is known.

One walk computes the float network and the quantised one side by side. At each layer with weights it has the operands
the quantised layer gets and the sums the float layer gave: rounding and bias are fitted to these, so that a layer also
makes up for the errors before it. Rows that successive steps write into a state are those of the quantised network.

Rounding to the nearest needs no data. Adaptive rounding has the objective of AdaRound (arXiv:2004.10568), the square
error of a layer's sums; it is quadratic in the weights, so it needs the data only as a matrix of products and is
minimised by going to the best integer of one weight after the other, for all output channels at once. No step sizes, no
iterations over data, the same result every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

import numpy as np

from dovetail.guests.ptq.execute import Values, compute, part_of, sampled, value_bytes, window_of
from dovetail.guests.ptq.preparation import along
from dovetail.guests.ptq.settings import Told
from dovetail.guests.ptq.steps import LEAST, Data, StepsByValue, TensorQuantisation, source_of, steps_of
from dovetail.ir.graph import Graph, Node, in_turn
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Gather
from dovetail.ir.types import Array, DType
from dovetail.notes import silent
from dovetail.records import Record

SHARES = np.linspace(0.3, 1.0, 36)[::-1]
"""Shares of the largest weight that are tried as the end of a narrow range."""


class WeightLimits(Record):
    """Limits of the weights of a layer and of their scales."""

    dtype: DType = DType.INT8
    ternary: bool = False
    """-1, 0 and 1 only, where the type is int2."""
    powers_of_two: bool = False
    """Scales are powers of two."""
    largest: float = inf
    """Scale of weights narrower than 8 bits."""

    @property
    def low(self) -> int:
        """The least integer a weight is given: -127 of int8 (as TFLite), -1 of ternary, else the type's lowest."""
        if self.dtype is DType.INT8:
            return -127
        return -1 if self.ternary and self.dtype is DType.INT2 else self.dtype.low

    def integers(self, weights: Array, scale: Array) -> Array:
        """The nearest integers of weights, as floats."""
        return np.asarray(np.clip(np.rint(weights / scale), self.low, self.dtype.high))

    def nearest_scale(self, scale: Array) -> Array:
        """The nearest scale there is."""
        return np.minimum(np.exp2(np.rint(np.log2(scale))), self.largest) if self.powers_of_two else scale

    def holding_scale(self, scale: Array) -> Array:
        """The smallest scale there is that is not below."""
        return np.exp2(np.ceil(np.log2(scale))) if self.powers_of_two else scale


class LayerWeights(Record):
    """The weights of a layer: integer * scale stands for the weight."""

    integers: Array
    """int8, of the shape of the weights"""
    scale: Array
    """float32 [C] or [1]"""
    dtype: DType
    axis: int
    """The axis of output channels."""

    @property
    def real(self) -> Array:
        """The weights the integers stand for, float32."""
        return np.asarray(self.integers * along(self.scale, self.integers.ndim, self.axis), np.float32)


def nearest(operator: Operator, weights: Array, form: WeightLimits, per_channel: bool) -> LayerWeights:
    """Symmetric weights of a form, each rounded to the nearest; with fewer than 8 bits the range of least
    square error, with 8 the one that holds every weight."""
    filters = np.moveaxis(weights, operator.weight_axis or 0, 0)
    rows = filters.reshape(len(filters) if per_channel else 1, -1).astype(np.float64)

    def error(scale: Array) -> Array:
        return np.asarray(((rows - form.integers(rows, scale[:, None]) * scale[:, None]) ** 2).sum(axis=1))

    scale = best_scale(np.maximum(np.abs(rows).max(axis=1), LEAST), form, error).astype(np.float32)
    steps = form.integers(rows.astype(weights.dtype), scale.astype(np.float64)[:, None])
    return _of_filters(operator, weights, steps, scale, form)


def _of_filters(operator: Operator, weights: Array, steps: Array, scale: Array, form: WeightLimits) -> LayerWeights:
    """Integers of output channels, one behind the other, in the order of the weights."""
    axis = operator.weight_axis or 0
    shape = np.moveaxis(weights, axis, 0).shape
    integers = np.ascontiguousarray(np.moveaxis(steps.reshape(shape), 0, axis)).astype(np.int8)
    return LayerWeights(integers, scale.astype(np.float32), form.dtype, axis)


def best_scale(peak: Array, form: WeightLimits, error: Callable[[Array], Array]) -> Array:
    """The scales of least error for rows of weights with these largest magnitudes."""
    best = form.holding_scale(peak / form.dtype.high)
    least = np.full(peak.shape, np.inf)
    for share in SHARES if form.dtype is not DType.INT8 else ():
        scale = form.nearest_scale(share * peak / (form.dtype.high + 0.5))
        loss = error(scale)
        best, least = np.where(loss < least, scale, best), np.minimum(loss, least)
    return best


SWEEPS = 12
"""Most passes over all weights of a layer."""
DAMPING = 0.05
"""Pull of each weight towards its float value, as a share of the mean square of an operand; twice that where samples
are steps of sequences, which resemble each other."""
SCARCITY = 0.5
"""Added to `DAMPING` for each weight per sum: with fewer sums than weights, a fit to the samples fits nothing else."""
MOST_WORK = 4e9
"""Most multiply-accumulates of all sweeps of a layer."""


class Evidence(Record):
    """Sums over the data that weights of a layer are fitted to, in groups of channels that read the same operands."""

    products: Array
    """float64 [G, K, K]: X^T X of the operands of the quantised network, damped."""
    wanted: Array
    """float64 [G, P, K]: Y^T X with the sums Y of the float network."""


def gather(x: Array, y: Array, weights: Array, centred: bool = True, damping: float = DAMPING) -> Evidence:
    """The evidence of samples.

    Args:
        x: operands [G, R, K], one row per sum.
        y: the sums wanted [G, R, P]; their bias is left out unless they are centred.
        weights: [G, P, K] of the float network, towards which the damping pulls.
        centred: take the means off, which the bias makes up for afterwards.
        damping: as `DAMPING`.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    if centred:
        x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    products = x.transpose(0, 2, 1) @ x
    diagonal = np.einsum("gkk->gk", products)
    pull = (damping + SCARCITY * x.shape[2] / x.shape[1]) * diagonal.mean(axis=1) + 1e-12
    products = products + pull[:, None, None] * np.eye(products.shape[1])
    return Evidence(products, y.transpose(0, 2, 1) @ x + pull[:, None, None] * weights)


def gather_weighed(x: Array, y: Array, weights: Array, importance: Array, damping: float) -> Evidence:
    """The evidence of sums that matter more or less, [R, P], as `gather` has it: each channel is a group of its own."""
    own = []
    for channel, shares in enumerate((importance / importance.mean(axis=0)).T.astype(np.float64)):
        root, ends = np.sqrt(shares)[:, None], (x[0], y[0][:, channel : channel + 1])
        rows, wanted = (root * (end - np.average(end, 0, shares)) for end in ends)
        own.append(gather(rows[None], wanted[None], weights[0][None, channel : channel + 1], False, damping))
    return Evidence(
        *(np.concatenate(parts) for parts in zip(*((one.products, one.wanted) for one in own), strict=True))
    )


def loss(evidence: Evidence, steps: Array, scale: Array) -> Array:
    """The square error of each row [G, P], up to a constant; scale [G, P]."""
    real = steps * scale[..., None]
    return np.asarray(np.einsum("gpk,gpk->gp", real @ evidence.products - 2 * evidence.wanted, real))


def adapt_rounding(evidence: Evidence, weights: Array, form: WeightLimits, per_channel: bool) -> tuple[Array, Array]:
    """Integers [G, P, K] and scales [G, P] (all equal unless per channel) of little square error."""
    scale = _first_scale(evidence, weights, form, per_channel)
    steps = form.integers(weights, scale[..., None])
    groups, rows, depth = weights.shape
    sweeps = int(max(2, min(SWEEPS, MOST_WORK / (groups * rows * depth * depth))))
    for start in (steps, _feed_errors_on(evidence, weights, scale, form)):
        descended = _descend(evidence, start, scale, form, sweeps)
        better = loss(evidence, descended, scale) < loss(evidence, steps, scale)
        steps = np.where(better[..., None], descended, steps)
    fitted = form.nearest_scale(_fit_scale(evidence, steps, scale, per_channel))
    again = _descend(evidence, steps, fitted, form, sweeps)
    if loss(evidence, again, fitted).sum() < loss(evidence, steps, scale).sum():
        return again, fitted
    return steps, scale


def _feed_errors_on(evidence: Evidence, weights: Array, scale: Array, form: WeightLimits) -> Array:
    """Round one weight after the other while those still to come make up for its error.

    The rule of optimal brain surgeon, as GPTQ (arXiv:2210.17323) applies it to a whole layer: with the inverse
    H of the products, an error e at weight k moves the others by -e * H[k] / H[k, k].
    """
    optimum = np.linalg.solve(evidence.products, evidence.wanted.transpose(0, 2, 1)).transpose(0, 2, 1)
    inverse = np.linalg.inv(evidence.products)
    steps = np.zeros_like(weights)
    for k in range(weights.shape[2]):
        steps[..., k] = form.integers(optimum[..., k], scale)
        error = (optimum[..., k] - steps[..., k] * scale) / inverse[:, None, k, k]
        optimum[..., k:] -= error[..., None] * inverse[:, None, k, k:]
        inverse = inverse - inverse[:, :, k, None] * inverse[:, None, k] / inverse[:, k, k, None, None]
    return steps


def _first_scale(evidence: Evidence, weights: Array, form: WeightLimits, per_channel: bool) -> Array:
    """The share of the largest weight with which nearest rounding does best."""
    peak = np.maximum(np.abs(weights).max(axis=2), LEAST)

    def error(scale: Array) -> Array:
        own = loss(evidence, form.integers(weights, scale[..., None]), scale)
        return own if per_channel else np.full_like(own, own.sum())

    return best_scale(peak if per_channel else np.full_like(peak, peak.max()), form, error)


def _descend(evidence: Evidence, steps: Array, scale: Array, form: WeightLimits, sweeps: int) -> Array:
    """Each weight in turn to its best integer while the others stay, until none moves."""
    steps = steps.copy()
    products = evidence.products
    slope = (steps * scale[..., None]) @ products - evidence.wanted
    for _ in range(sweeps):
        moved = False
        for k in range(steps.shape[2]):
            ideal = steps[..., k] - slope[..., k] / (products[:, None, k, k] * scale)
            change = np.clip(np.rint(ideal), form.low, form.dtype.high) - steps[..., k]
            if change.any():
                moved = True
                steps[..., k] += change
                slope += (change * scale)[..., None] * products[:, None, k, :]
        if not moved:
            break
    return steps


def _fit_scale(evidence: Evidence, steps: Array, scale: Array, per_channel: bool) -> Array:
    """The scale of least square error for these integers."""
    upper = np.einsum("gpk,gpk->gp", evidence.wanted, steps)
    lower = np.einsum("gpk,gpk->gp", steps @ evidence.products, steps)
    if not per_channel:
        upper, lower = np.full_like(upper, upper.sum()), np.full_like(lower, lower.sum())
    fitted = upper / np.maximum(lower, 1e-30)
    return np.where((lower > 0) & (fitted > scale * 0.25) & (fitted < scale * 4), fitted, scale)


MOST_ROWS = 8192
"""Most sums of a layer that its rounding is fitted to."""
MOST_BYTES = 1 << 30
"""Bytes of activations the two networks may hold together."""


class LayerSettings(Record):
    """How weights are chosen."""

    per_channel: bool = True
    adaptive: bool = True
    """Fit the rounding of weights narrower than 8 bits to data; else to the nearest."""
    correct_bias: bool = True
    """Take the mean error of each channel off its bias."""
    seed: int = 0
    """Seed of the choice of sums."""
    limits: WeightLimits = WeightLimits()
    """Limits of weights of every width."""
    damping: float = DAMPING


def weighted_layers(graph: Graph) -> tuple[Node, ...]:
    """The layers whose weights are constants."""
    layers = (node for node in graph.nodes if node.operator.weight_axis is not None)
    return tuple(node for node in layers if node.inputs[1] in graph.constants)


def fit_layers(
    graph: Graph,
    data: Data,
    activations: StepsByValue,
    bits: Mapping[str, int],
    settings: LayerSettings,
    report: Told = silent,
) -> tuple[Mapping[str, LayerWeights], Data]:
    """Choose weights and biases, by result of the layer.

    Args:
        graph: the float graph.
        data: [N, *shape] by input; as many samples are used as memory allows.
        activations: steps of the quantised values.
        bits: width of the weights by result of the layer; a layer that is not here keeps its float weights.
        settings: how.
        report: told the progress.
    """
    largest = sum(sorted(value_bytes(graph))[-6:])
    real = part_of(data, slice(int(max(1, MOST_BYTES // (2 * largest)))))
    coded: Values = {name: _rounded(activations.get(name), array) for name, array in real.items()}
    settings = replace(settings, damping=2 * DAMPING) if graph.states else settings
    chosen: dict[str, LayerWeights] = {}
    biases: dict[str, Array] = {}
    for index, node in enumerate(in_turn(graph, (), real, coded)):
        report(f"choosing weights: operator {index + 1} of {len(graph.nodes)}")
        name = node.output
        real[name] = compute(graph, node, real)
        if name in bits and sampled(graph, real, name):
            limits = replace(settings.limits, largest=_largest_scale(graph, activations, node))
            own = replace(settings, limits=limits)
            weights, operands = graph.constants[node.inputs[1]], coded[node.inputs[0]]
            fitted = bits[name] < 8 and settings.adaptive
            goal = _goal(graph, node, real, coded, activations) if fitted else real[name]
            wanted = wanted_sums(graph, node, goal, own)
            importance = _importance(graph, node, real[name]) if fitted and own.correct_bias else None
            chosen[name] = choose_weights(node.operator, weights, operands, wanted, bits[name], own, importance)
            plain, one = replace(node, inputs=node.inputs[:2]), {node.inputs[1]: chosen[name].real}
            sums = compute(replace(graph, constants=one), plain, coded)
            bias = _bias(graph, node, goal, sums, settings, importance)
            sums = np.asarray(sums + bias, np.float32)
            if len(node.inputs) > 2 or bias.any():
                biases[name] = bias
        else:
            follow(graph, node, real, coded)
            sums = compute(graph, node, coded)
        coded[name] = _rounded(activations.get(name), sums)
    return chosen, biases


def follow(graph: Graph, node: Node, real: Data, coded: Values) -> None:
    """Give a state that a node writes rows of the contents that the quantised network finds in it before each sample.
    Samples that are not successive steps of as many sequences keep those of the float network."""
    firsts = {read: first for read, written, first in graph.kept if written == node.output}
    if not node.operator.in_place or node.inputs[0] not in firsts:
        return
    read = node.inputs[0]
    before, after, first = real[read], real[node.output], firsts[read]
    apart = (before != first).any(axis=tuple(range(1, before.ndim)))
    count = int(apart.argmax())
    if not count or not np.allclose(before[count:], after[:-count], 1e-3, 1e-3):
        return
    found = coded[read].copy()
    for start in range(count, len(found), count):
        step = slice(start - count, start)
        values = {name: coded[name][step] for name in node.inputs if name in coded and sampled(graph, coded, name)}
        rest = len(found) - start
        found[start : start + count] = compute(graph, node, {**coded, **values, read: found[step]})[:rest]
    coded[read] = found


def _importance(graph: Graph, node: Node, scores: Array) -> Array | None:
    """How much an error of each of the scores of tokens [R, C] matters for the shares that a softmax makes of them,
    p * (1 - p), and as much again on average over the samples; None where a layer does not give a language model's."""
    ends = {source_of(graph, name) for name in graph.results}
    tables = (one.inputs[0] for one in graph.nodes if one.operator == Gather(0) and one.inputs[0] in graph.constants)
    tokens = {len(graph.constants[name]) for name in tables}
    size, depth = scores.shape[-1], graph.constants[node.inputs[1]].size // scores.shape[-1]
    if not graph.states or node.output not in ends or size not in tokens or size * depth**2 > MOST_BYTES // 32:
        return None
    rows = scores.reshape(-1, size).astype(np.float64)
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    varied = shares * (1 - shares)
    return np.asarray(varied + varied.mean(axis=0))


def _goal(graph: Graph, node: Node, real: Data, coded: Data, activations: StepsByValue) -> Array:
    """The sums that a layer is fitted to: the float layer's. Where only an addition to a residual stream of 16 bits
    reads them, the stream's error is added, so that the layer makes up for it."""
    goal, readers = real[node.output], graph.users()[node.output]
    if len(readers) != 1 or readers[0].operator != Add():
        return goal
    for name in readers[0].inputs:
        steps = steps_of(graph, activations, name) if name in coded else None
        if steps is not None and steps.dtype is DType.INT16 and coded[name].shape == goal.shape:
            goal = goal + real[name] - coded[name]
    return goal


def _rounded(steps: TensorQuantisation | None, array: Array) -> Array:
    """A value as its integers stand for it, where it has any."""
    return array if steps is None else steps.rounded(array)


def _bias(
    graph: Graph, node: Node, real: Array, sums: Array, settings: LayerSettings, importance: Array | None
) -> Array:
    """A layer's bias, or what makes up for the mean error of its sums without one."""
    if importance is not None:
        errors = (real.astype(np.float64) - sums).reshape(importance.shape)
        return np.asarray(np.average(errors, axis=0, weights=importance).astype(np.float32))
    if settings.correct_bias:
        axes = tuple(range(sums.ndim - 1))
        error = real.mean(axis=axes, dtype=np.float64) - sums.mean(axis=axes, dtype=np.float64)
        return np.asarray(error.astype(np.float32))
    return graph.constants[node.inputs[2]] if len(node.inputs) > 2 else np.zeros(sums.shape[-1], np.float32)


def _largest_scale(graph: Graph, activations: StepsByValue, node: Node) -> float:
    """The scale of weights with which the sums have the steps of the result: with more, they would be raised."""
    source, result = steps_of(graph, activations, node.inputs[0]), activations.get(node.output)
    readers = graph.users()[node.output]
    if result is None and len(readers) == 1:  # a limit that is applied to it
        result = activations.get(readers[0].output)
    return result.scale / source.scale if source is not None and result is not None else inf


def wanted_sums(graph: Graph, node: Node, sums: Array, settings: LayerSettings) -> Array:
    """The float layer's sums as its weights are fitted to them: without its bias, unless that is corrected after."""
    if settings.correct_bias or len(node.inputs) < 3:
        return sums
    return np.asarray(sums - graph.constants[node.inputs[2]], np.float32)


def choose_weights(
    operator: Operator,
    weights: Array,
    x: Array,
    y: Array,
    bits: int,
    settings: LayerSettings,
    importance: Array | None = None,
) -> LayerWeights:
    """The integers of a layer's weights.

    Args:
        operator: the layer.
        weights: float32, in the operator's order.
        x: its operand in the quantised network [N, *shape].
        y: the sums wanted [N, *shape], see `wanted_sums`.
        bits: 2, 4 or 8.
        settings: how.
        importance: of each sum [N, C], for a layer whose channels read the same operands; None for all alike.
    """
    form = replace(settings.limits, dtype=DType.INT8.narrowed(bits))
    if bits == 8 or not settings.adaptive:
        return nearest(operator, weights, form, settings.per_channel)
    sums = y.reshape(-1, y.shape[-1])
    chosen = np.sort(np.random.default_rng(settings.seed).permutation(len(sums))[:MOST_ROWS])
    rows, groups = _operands(operator, weights, x, chosen)
    filters = np.moveaxis(weights, operator.weight_axis or 0, 0)
    matrix = filters.reshape(groups, len(filters) // groups, -1).astype(np.float64)
    wanted = sums[chosen].reshape(len(chosen), groups, -1).transpose(1, 0, 2)
    if importance is None:
        evidence = gather(rows, wanted, matrix, settings.correct_bias, settings.damping)
    else:
        evidence = gather_weighed(rows, wanted, matrix, importance[chosen], settings.damping)
        matrix = matrix.transpose(1, 0, 2)
    steps, scale = adapt_rounding(evidence, matrix, form, settings.per_channel)
    flat = scale.reshape(-1) if settings.per_channel else scale.reshape(-1)[:1]
    return _of_filters(operator, weights, steps, flat, form)


def _operands(operator: Operator, weights: Array, x: Array, chosen: Array) -> tuple[Array, int]:
    """The operands [G, R, K] of some sums, by their places, and the number of groups of channels."""
    window = window_of(operator, weights)
    if window is None:
        return x.reshape(-1, x.shape[-1])[chosen][None], 1
    view = window.view(x.reshape(-1, *x.shape[-3:]))
    windows = view[np.unravel_index(chosen, view.shape[:3])]  # [R, C, KH, KW]
    groups = x.shape[-1] if operator.is_channelwise else x.shape[-1] // weights.shape[-1]
    split = windows.reshape(len(chosen), groups, -1, *windows.shape[2:]).transpose(1, 0, 3, 4, 2)
    return split.reshape(groups, len(chosen), -1), groups
