"""Floats to 8 bits without floating point: what a float gives is looked up by its exponent and first mantissa bits.

Quantising never falls as its operand grows, so the floats that share sign, exponent and so many mantissa bits give one
value, or two neighbouring ones with a step between. Which values and where is found at compile time with the operator's
own arithmetic, by bisection, and so is exact for every float. One word holds both: added to the mantissa bits that are
left, it carries into the value from the step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dovetail.ir.operators.arithmetic import Quantize
from dovetail.ir.requantisation.bounds import last_where
from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines
from dovetail.kernels.scope import KernelScope
from dovetail.target.pattern import apply, constant, operand

_REGION = apply(Quantize, operand("x"), constant("scale"), constant("zero_point"))
_LEAST = 256
"""Elements from which tables of 10 to 20 KiB pay."""
_MANTISSA = 23
_INFINITY = 0x7F800000
_BITS = (7, 8)
"""Mantissa bits that may be part of the place in the tables."""


@dataclass(frozen=True)
class QuantisationTable:
    """The tables."""

    starts: Array
    """int32 [512]: by sign and exponent, what leads from a float's bits less `rest` of them to its word."""
    words: Array
    """uint32: a word for each value of the mantissa's first bits."""
    rest: int
    """Mantissa bits behind those."""


def steps_of(scale: float, zero_point: int, dtype: DType) -> QuantisationTable | None:
    """The tables of a scale and a zero point; None where floats that share a word give more than two values."""
    if not 0.0 < scale < float("inf"):
        return None
    divisor = np.float32(scale)

    def quantised(bits: Array) -> Array:
        """The integers that floats of these bits give, as the core's kernels compute them: NaN is the least value."""
        floats = bits.astype(np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            steps = np.rint(floats / divisor).astype(np.float64) + zero_point
        return np.where(np.isnan(steps), dtype.low, np.clip(steps, dtype.low, dtype.high)).astype(np.int64)

    for bits in _BITS:
        if (words := _words(quantised, bits)) is not None:
            break
    else:
        return None
    kept: dict[bytes, int] = {}
    starts = [kept.setdefault(row.tobytes(), len(kept)) << bits for row in words]
    rows = [np.frombuffer(row, np.uint32) for row in kept]
    return QuantisationTable(
        (np.array(starts) - (np.arange(512) << bits)).astype(np.int32), np.concatenate(rows), _MANTISSA - bits
    )


def _words(quantised: Callable[[Array], Array], bits: int) -> Array | None:
    """The word of each sign, exponent and first `bits` of the mantissa, uint32 [512, 2**bits]."""
    rest = _MANTISSA - bits
    start = np.arange(1 << (9 + bits), dtype=np.int64) << rest
    negative, last = start >> 31 == 1, (1 << rest) - 1
    first, final = quantised(start), quantised(start + last)
    not_numbers = start == _INFINITY  # from infinity to NaN: a step up as well, as bytes
    if np.any((np.abs(final - first) > 1) & ~not_numbers):
        return None
    before = last_where(lambda bits: quantised(start + bits) == first, np.zeros_like(start), last - 1, rest)
    high = before + 1  # the first float behind the step
    carried = np.where(first == final, 0, np.where(negative, high, (1 << rest) - high))
    known = np.where(negative, ~(start + last), start)  # of the bits the core adds
    value = np.where(negative, final, first) << rest
    return ((value + carried - known) & ((256 << rest) - 1)).astype(np.uint32).reshape(512, -1)


def quantising_lines(scope: KernelScope) -> Lines | None:
    """The statements of a region that only quantises an array to 8 bits by one scale; None for others."""
    match = scope.whole(_REGION)
    if match is None or scope.layouts or match.values["x"] in scope.graph.constants:
        return None
    kind, scale = match.result, match.array("scale")
    if kind.dtype not in (DType.INT8, DType.UINT8) or kind.elements < _LEAST or scale.size != 1:
        return None
    steps = steps_of(float(scale[0]), int(match.array("zero_point")[0]), kind.dtype)
    if steps is None:
        return None
    source = scope.input(match.values["x"])
    starts, words = (scope.constant(match.root, *named) for named in (("starts", steps.starts), ("steps", steps.words)))
    return [f"quantize_bytes((uint8_t *)output, {source}, {kind.elements}, {starts}, {words}, {steps.rest});"]
