"""Weights as integers: scales per output channel or per layer, nearest rounding."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from dovetail.calibrate.prepare import Linear, along, output_axis
from dovetail.graph.types import Array, DType

WIDTHS = {2: DType.INT2, 4: DType.INT4, 8: DType.INT8}
"""Types of weights by bits."""
SHARES = np.linspace(0.3, 1.0, 36)[::-1]
"""Shares of the largest weight that are tried as the end of a narrow range."""


@dataclass(frozen=True)
class Form:
    """What weights and their scales may be."""

    dtype: DType
    ternary: bool = False
    """-1, 0 and 1 only, where the type is int2."""
    powers_of_two: bool = False
    """Of the scales."""
    largest: float = inf
    """Scale of weights narrower than 8 bits."""

    @property
    def low(self) -> int:
        """The least integer a weight is given: -127 of int8 (as TFLite), -1 of ternary, else the type's lowest."""
        if self.dtype is DType.INT8:
            return -127
        return -1 if self.ternary and self.dtype is DType.INT2 else self.dtype.low

    def nearest_scale(self, scale: Array) -> Array:
        """The nearest scale there is."""
        return np.minimum(np.exp2(np.rint(np.log2(scale))), self.largest) if self.powers_of_two else scale

    def holding_scale(self, scale: Array) -> Array:
        """The smallest scale there is that is not below."""
        return np.exp2(np.ceil(np.log2(scale))) if self.powers_of_two else scale


@dataclass(frozen=True)
class Weights:
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
        """What the integers stand for, float32."""
        return np.asarray(self.integers * along(self.scale, self.integers.ndim, self.axis), np.float32)


def nearest(operator: Linear, weights: Array, form: Form, per_channel: bool) -> Weights:
    """Symmetric weights of a form, each rounded to the nearest; with fewer than 8 bits the range of least
    square error, with 8 the one that holds every weight."""
    axis = output_axis(operator)
    rows = np.moveaxis(weights, axis, 0).reshape(weights.shape[axis], -1).astype(np.float64)
    if not per_channel:
        rows = rows.reshape(1, -1)
    scale = best_scale(rows, form)
    steps = np.rint(weights / along(scale.astype(np.float64), weights.ndim, axis))
    integers = np.clip(steps, form.low, form.dtype.high).astype(np.int8)
    return Weights(integers, scale, form.dtype, axis)


def best_scale(rows: Array, form: Form) -> Array:
    """The scale of each row [R, K], float32 [R]."""
    peak = np.maximum(np.abs(rows).max(axis=1), 2.0**-40)
    high = form.dtype.high
    if form.dtype is DType.INT8:
        return np.asarray(form.holding_scale(peak / high), np.float32)
    best, least = form.holding_scale(peak / high), np.full(len(rows), np.inf)
    for share in SHARES:
        scale = form.nearest_scale(share * peak / (high + 0.5))
        steps = np.clip(np.rint(rows / scale[:, None]), form.low, high)
        error = ((rows - steps * scale[:, None]) ** 2).sum(axis=1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return np.asarray(best, np.float32)
