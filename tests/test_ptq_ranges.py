"""Ranges and roundings against brute force on small arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dovetail.guests.ptq.layers import (
    Evidence,
    LayerSettings,
    WeightLimits,
    adapt_rounding,
    choose_weights,
    gather,
    loss,
    nearest,
)
from dovetail.guests.ptq.settings import Method
from dovetail.guests.ptq.steps import BINS, Histogram, TensorQuantisation, choose, percentile, spanning
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.types import Array, DType


def seen(values: Array) -> Histogram:
    """What the observer would have counted."""
    low, high = float(values.min()), float(values.max())
    return Histogram(low, high, np.histogram(values, BINS, (low, high))[0])


def skewed(count: int = 4000) -> Array:
    generator = np.random.default_rng(3)
    return np.concatenate([generator.normal(0.5, 1.0, count), [-9.0, 14.0, 15.0]])


def mean_square(values: Array, steps: TensorQuantisation) -> float:
    return float(((values - steps.rounded(values)) ** 2).mean())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.UINT8])
def test_minmax_spans_everything_and_has_zero_exactly(dtype: DType, symmetric: bool) -> None:
    values = np.abs(skewed()) if symmetric and not dtype.signed else skewed()
    steps = choose(seen(values), Method.MINMAX, dtype, symmetric)
    assert np.abs(steps.rounded(values) - values).max() <= steps.scale * 0.5001 + 1e-6
    assert steps.rounded(np.zeros(1))[0] == 0.0
    assert not symmetric or steps.zero_point == 0
    assert steps.scale == np.float32(steps.scale)


def test_a_range_above_zero_still_contains_it() -> None:
    steps = spanning(3.0, 5.0, DType.INT8, symmetric=False)
    assert (steps.zero_point, steps.scale) == (-128, float(np.float32(5 / 255)))
    assert spanning(0.0, 0.0, DType.INT8, symmetric=True).scale > 0


def test_percentile_is_numpys() -> None:
    values = skewed(100_000)
    low, high = percentile(seen(values), 99.0)
    width = (values.max() - values.min()) / BINS
    assert low == pytest.approx(np.percentile(values, 0.5), abs=2 * width)
    assert high == pytest.approx(np.percentile(values, 99.5), abs=2 * width)


@pytest.mark.parametrize("symmetric", [False, True])
def test_least_square_error_is_close_to_the_best_of_all_ranges(symmetric: bool) -> None:
    values = skewed(1500)
    chosen = mean_square(values, choose(seen(values), Method.MSE, DType.INT4, symmetric))
    shares = np.linspace(0.02, 1, 60)
    tried = itertools.product(shares, shares) if not symmetric else zip(shares, shares, strict=True)
    ranges = [spanning(values.min() * a, values.max() * b, DType.INT4, symmetric) for a, b in tried]
    best = min(mean_square(values, steps) for steps in ranges)
    assert chosen <= 1.05 * best
    assert chosen < 0.8 * mean_square(values, choose(seen(values), Method.MINMAX, DType.INT4, symmetric))


def kl(values: Array, steps: TensorQuantisation, edges: Array) -> float:
    """The divergence by its definition, one bin after the other."""
    counts = np.histogram(values, edges)[0]
    groups: dict[int, list[int]] = {}
    for index, (a, b) in enumerate(itertools.pairwise(edges)):
        centre = 0.0 if a <= 0 <= b else (a + b) / 2
        groups.setdefault(round(centre / steps.scale) + steps.zero_point, []).append(index)
    inside = sorted(q for q in groups if steps.dtype.low <= q <= steps.dtype.high)
    bins = [index for q in inside for index in groups[q]]
    p = counts[bins].astype(float)
    p[0] += counts[: bins[0]].sum()
    p[-1] += counts[bins[-1] + 1 :].sum()
    q: list[float] = []
    for level in inside:
        held = [index for index in groups[level] if counts[index]]
        share = sum(counts[index] for index in held) / max(len(held), 1)
        q += [share if index in held else 0.0 for index in groups[level]]
    p, spread = p / p.sum(), np.array(q) / sum(q)
    return float(sum(a * np.log(a / max(b, 1e-12)) for a, b in zip(p, spread, strict=True) if a > 0))


def test_entropy_is_close_to_the_least_divergence_of_all_ranges() -> None:
    values = skewed(80_000)
    edges = np.linspace(values.min(), values.max(), BINS + 1)
    chosen = kl(values, choose(seen(values), Method.ENTROPY, DType.INT4, True), edges)
    shares = np.linspace(0.2, 1, 25)
    best = min(kl(values, spanning(values.min() * s, values.max() * s, DType.INT4, True), edges) for s in shares)
    assert chosen <= best * 1.02 + 1e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nearest_weights_keep_their_type_and_are_the_nearest(bits: int) -> None:
    weights = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    limits = WeightLimits(DType.INT8.narrowed(bits))
    found = nearest(FullyConnected(), weights, limits, per_channel=True)
    dtype = found.dtype
    assert found.integers.min() >= (-127 if bits == 8 else dtype.low) and found.integers.max() <= dtype.high
    inside = np.abs(weights / found.scale[:, None]) <= dtype.high
    assert np.abs(found.real - weights)[inside].max() <= found.scale.max() * 0.5001
    assert nearest(
        FullyConnected(), weights, WeightLimits(DType.INT8.narrowed(bits)), per_channel=False
    ).scale.shape == (1,)


def test_adaptive_rounding_comes_near_what_trying_all_integers_finds() -> None:
    ratios = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        x = generator.standard_normal((1, 200, 4)) @ generator.standard_normal((4, 4))
        weights = generator.standard_normal((1, 3, 4))
        evidence = gather(x, x @ weights.transpose(0, 2, 1), weights)
        steps, scale = adapt_rounding(evidence, weights, WeightLimits(DType.INT2), per_channel=True)
        constant = np.einsum("gpk,gpk->gp", weights @ evidence.products, weights)
        every = np.array(list(itertools.product(range(-2, 2), repeat=4)), np.float64)
        rounded = np.clip(np.rint(weights / scale[..., None]), -2, 1)
        for row in range(3):
            one = Evidence(evidence.products, evidence.wanted[:, row : row + 1])
            width = scale[:, row : row + 1]
            best = min(loss(one, candidate[None, None], width)[0, 0] for candidate in every)
            found, first = (loss(one, s[:, row : row + 1], width)[0, 0] for s in (steps, rounded))
            assert best - 1e-9 <= found <= first + 1e-9
            ratios.append((found + constant[0, row], best + constant[0, row], first + constant[0, row]))
    found, best, first = np.array(ratios).sum(axis=0)
    assert found < 1.3 * best and found < 0.75 * first


@pytest.mark.parametrize("bits", [2, 4])
def test_adaptive_rounding_gives_less_error_on_new_data(bits: int) -> None:
    generator = np.random.default_rng(2)
    mixing = generator.standard_normal((24, 24))
    x, new = ((generator.standard_normal((300, 24)) @ mixing).astype(np.float32) for _ in range(2))
    weights = generator.standard_normal((8, 24)).astype(np.float32)
    errors = []
    for adaptive in (True, False):
        how = LayerSettings(adaptive=adaptive)
        chosen = choose_weights(FullyConnected(), weights, x, x @ weights.T, bits, how)
        errors.append(float(((new @ (chosen.real - weights).T) ** 2).mean()))
    assert errors[0] < 0.75 * errors[1]
