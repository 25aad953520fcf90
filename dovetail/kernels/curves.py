"""The sigmoid and the hyperbolic tangent of fixed-point values between points: one segment looked up, one product."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dovetail.ir.operators.fixed import sigmoid_table
from dovetail.ir.types import Array
from dovetail.kernels.scope import KernelScope

_SIGMOIDS, _TANGENTS = 192, 256
"""Segments on each side of 0: all that three times an int16 reaches in steps of 512, and in steps of 256 all before the
tangent is flat."""


def segments() -> Mapping[str, Array]:
    """Start of each segment (int32, the rounding of the result added) and its slope (uint16), the lowest first.

    The halves below 0 are those of TensorFlow Lite Micro turned round, segment by segment: that of -v begins where the
    one of v ends, with the same slope (`between_sigmoids`).
    """
    table = sigmoid_table().astype(np.int64)
    slopes = np.diff(table)
    place = np.arange(_SIGMOIDS)
    starts = np.concatenate([(1 << 25) - (table[place + 1] << 9)[::-1] + 511, (table[place] << 9) + 512])
    arrays = {"sigmoid_starts": starts, "sigmoid_slopes": np.concatenate([slopes[place][::-1], slopes[place]])}
    place, middle = np.arange(_TANGENTS), 1 << 23  # the last two points are equal: flat from there
    starts = np.concatenate([127 + middle - (table[place + 1] << 8)[::-1], (table[place] << 8) - middle + 128])
    arrays |= {"tangent_starts": starts, "tangent_slopes": np.concatenate([slopes[place][::-1], slopes[place]])}
    return {stem: array.astype(np.int32 if "starts" in stem else np.uint16) for stem, array in arrays.items()}


class Curves:
    """C of both, by a kernel's constants."""

    def __init__(self, scope: KernelScope, owner: str) -> None:
        self._names = {stem: scope.constant(owner, stem, array) for stem, array in segments().items()}

    def sigmoid(self, gate: str) -> str:
        """The sigmoid of an int16 in Q3.12, as Q0.15."""
        starts, slopes = (f"{self._names[stem]} + {_SIGMOIDS}" for stem in ("sigmoid_starts", "sigmoid_slopes"))
        return f"curve_16(3 * {gate}, 9, 10, {starts}, {slopes})"

    def tangent(self, value: str, left: int = 0, right: int = 0) -> str:
        """The tangent of an int16 with 12 + right - left fraction bits, as Q0.15."""
        scaled = f"{3 << left} * {value}"
        scaled = f"({scaled} + {(1 << right) >> 1}) >> {right}" if right else scaled
        starts, slopes = (f"{self._names[stem]} + {_TANGENTS}" for stem in ("tangent_starts", "tangent_slopes"))
        return f"curve_16(saturate_17({scaled}), 8, 8, {starts}, {slopes})"
