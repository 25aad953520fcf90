"""The made-up engine `deep`: a residual block, or a convolution and its pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.types import Array
from dovetail.sim.device import Bus

Job = Mapping[str, int]


def macs(job: Job) -> int:
    """Products of a job."""
    return 9 * job["rows"] * job["columns"] * job["channels"] * job["outputs"] * (1 if job["pooled"] else 2)


def cycles(job: Job) -> int:
    """16 products a cycle."""
    return 40 + macs(job) // 16


def image(bus: Bus, address: int, shape: tuple[int, ...], row: int, pixel: int) -> Array:
    """Rows, columns, channels in memory."""
    extent = (shape[0] - 1) * row + (shape[1] - 1) * pixel + shape[2]
    return as_strided(bus.view(address, extent).view(np.int8), shape, (row, pixel, 1))


def convolution(x: Array, weights: Array, words: Iterator[int]) -> Array:
    """A padded 3x3 convolution, requantised."""
    zero, zero_out, low, high = (next(words) for _ in range(4))
    outputs = weights.shape[0]
    bias, multiplier, shift = (np.array([next(words) for _ in range(outputs)]) for _ in range(3))
    padded = np.pad(x.astype(np.int64) - zero, ((1, 1), (1, 1), (0, 0)))
    sums = np.einsum("rcikl,okli->rco", sliding_window_view(padded, (3, 3), (0, 1)), weights.astype(np.int64)) + bias
    return np.asarray(np.clip(fixed_point(sums, multiplier, shift, Rounding.DOUBLE) + zero_out, low, high))


def scaled(x: Array, words: Iterator[int]) -> Array:
    """One operand of a sum, or the sum."""
    multiplier, shift, zero_in, zero_out, left = (next(words) for _ in range(5))
    raised = (x.astype(np.int64) - zero_in) << left
    return np.asarray(fixed_point(raised, np.array(multiplier), np.array(shift), Rounding.DOUBLE) + zero_out)


def compute(job: Job, bus: Bus) -> None:
    """Carry a job out."""
    rows, columns, channels, outputs = (job[name] for name in ("rows", "columns", "channels", "outputs"))
    x = image(bus, job["x"], (rows, columns, channels), job["row"], job["pixel"])
    count = 9 * channels * outputs
    weights = bus.view(job["weights"], count * (1 if job["pooled"] else 2)).view(np.int8)
    total = 4 + 3 * outputs + (0 if job["pooled"] else 4 + 3 * channels + 17)
    words = iter(bus.view(job["parameters"], 4 * total).view("<i4").tolist())
    first = convolution(x, weights[:count].reshape(outputs, 3, 3, channels), words)
    if job["pooled"]:
        image(bus, job["y"], (rows, columns, outputs), job["y_row"], job["y_pixel"])[...] = first
        around = np.pad(first, ((1, 1), (1, 1), (0, 0)), constant_values=-128)
        largest = sliding_window_view(around, (3, 3), (0, 1)).max(axis=(3, 4))
        image(bus, job["largest"], largest.shape, columns * outputs, outputs)[...] = largest
        return
    second = convolution(first, weights[count:].reshape(channels, 3, 3, outputs), words)
    total_sum = scaled(second, words) + scaled(x, words)
    result = scaled(total_sum, words)
    result = np.clip(result, next(words), next(words))
    image(bus, job["y"], (rows, columns, channels), job["y_row"], job["y_pixel"])[...] = result
