"""Adaptive rounding: the integers whose layer gives what the float layer gave, on calibration data.

The objective is that of AdaRound (arXiv:2004.10568), the square error of a layer's sums; it is quadratic in the
weights, so it needs the data only as a matrix of products and is minimised by going to the best integer of one weight
after the other, for all output channels at once. No step sizes, no iterations over data, the same result every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.calibrate.weights import SHARES, Form
from dovetail.graph.types import Array

SWEEPS = 12
"""Most passes over all weights of a layer."""
DAMPING = 0.05
"""How much weights are held where they were, as a share of the mean square of an operand."""
SCARCITY = 0.5
"""How much more of it for each weight there is per sum: with fewer sums than weights, what fits the samples fits
nothing else."""
MOST_WORK = 4e9
"""Most multiply-accumulates of all sweeps of a layer."""


@dataclass(frozen=True)
class Evidence:
    """What the data say about the weights of a layer, in groups of output channels that read the same operands."""

    products: Array
    """float64 [G, K, K]: X^T X of the operands of the quantised network, damped."""
    wanted: Array
    """float64 [G, P, K]: Y^T X with the sums Y of the float network."""


def gather(x: Array, y: Array, weights: Array, centred: bool = True) -> Evidence:
    """The evidence of samples.

    Args:
        x: operands [G, R, K], one row per sum.
        y: the sums wanted [G, R, P]; their bias is left out unless they are centred.
        weights: [G, P, K] of the float network, towards which the damping pulls.
        centred: take the means off, which the bias makes up for afterwards.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    if centred:
        x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    products = x.transpose(0, 2, 1) @ x
    diagonal = np.einsum("gkk->gk", products)
    damping = (DAMPING + SCARCITY * x.shape[2] / x.shape[1]) * diagonal.mean(axis=1) + 1e-12
    products = products + damping[:, None, None] * np.eye(products.shape[1])
    return Evidence(products, y.transpose(0, 2, 1) @ x + damping[:, None, None] * weights)


def loss(evidence: Evidence, steps: Array, scale: Array) -> Array:
    """The square error of each row [G, P], up to a constant; scale [G, P]."""
    real = steps * scale[..., None]
    return np.asarray(np.einsum("gpk,gpk->gp", real @ evidence.products - 2 * evidence.wanted, real))


def adapt_rounding(evidence: Evidence, weights: Array, form: Form, per_channel: bool) -> tuple[Array, Array]:
    """Integers [G, P, K] and scales [G, P] (all equal unless per channel) of little square error."""
    scale = _first_scale(evidence, weights, form, per_channel)
    steps = np.clip(np.rint(weights / scale[..., None]), form.low, form.dtype.high)
    groups, rows, depth = weights.shape
    sweeps = int(max(2, min(SWEEPS, MOST_WORK / (groups * rows * depth * depth))))
    for start in (steps, _feed_errors_on(evidence, weights, scale, form)):
        found = _descend(evidence, start, scale, form, sweeps)
        better = loss(evidence, found, scale) < loss(evidence, steps, scale)
        steps = np.where(better[..., None], found, steps)
    fitted = form.nearest_scale(_fit_scale(evidence, steps, scale, per_channel))
    again = _descend(evidence, steps, fitted, form, sweeps)
    if loss(evidence, again, fitted).sum() < loss(evidence, steps, scale).sum():
        return again, fitted
    return steps, scale


def _feed_errors_on(evidence: Evidence, weights: Array, scale: Array, form: Form) -> Array:
    """Round one weight after the other while those still to come make up for its error.

    The rule of optimal brain surgeon, as GPTQ (arXiv:2210.17323) applies it to a whole layer: with the inverse
    H of the products, an error e at weight k moves the others by -e * H[k] / H[k, k].
    """
    optimum = np.linalg.solve(evidence.products, evidence.wanted.transpose(0, 2, 1)).transpose(0, 2, 1)
    inverse = np.linalg.inv(evidence.products)
    steps = np.zeros_like(weights)
    for k in range(weights.shape[2]):
        steps[..., k] = np.clip(np.rint(optimum[..., k] / scale), form.low, form.dtype.high)
        error = (optimum[..., k] - steps[..., k] * scale) / inverse[:, None, k, k]
        optimum[..., k:] -= error[..., None] * inverse[:, None, k, k:]
        inverse = inverse - inverse[:, :, k, None] * inverse[:, None, k] / inverse[:, k, k, None, None]
    return steps


def _first_scale(evidence: Evidence, weights: Array, form: Form, per_channel: bool) -> Array:
    """The share of the largest weight with which nearest rounding does best."""
    peak = np.maximum(np.abs(weights).max(axis=2), 2.0**-40)
    peak = peak if per_channel else np.full_like(peak, peak.max())
    best = least = np.full(peak.shape, np.inf)
    for share in SHARES:
        scale = form.nearest_scale(share * peak / (form.dtype.high + 0.5))
        steps = np.clip(np.rint(weights / scale[..., None]), form.low, form.dtype.high)
        error = loss(evidence, steps, scale)
        error = error if per_channel else np.full_like(error, error.sum())
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best


def _descend(evidence: Evidence, steps: Array, scale: Array, form: Form, sweeps: int) -> Array:
    """Each weight in turn to its best integer while the others stay, until none moves."""
    steps = steps.copy()
    products = evidence.products
    slope = (steps * scale[..., None]) @ products - evidence.wanted
    low, high = form.low, form.dtype.high
    for _ in range(sweeps):
        moved = False
        for k in range(steps.shape[2]):
            ideal = steps[..., k] - slope[..., k] / (products[:, None, k, k] * scale)
            change = np.clip(np.rint(ideal), low, high) - steps[..., k]
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
