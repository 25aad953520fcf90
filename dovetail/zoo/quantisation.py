"""The asymmetric int8 quantisation of an activation: value = scale * (integer - zero point)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.zoo.arithmetic import Floats


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How an int8 activation stands for a real one."""

    scale: np.float32
    """The real step between two neighbouring integers, greater than 0."""
    zero_point: int
    """The integer that stands for 0.0, -128 to 127."""

    @classmethod
    def spanning(cls, low: float, high: float) -> Quantisation:
        """The finest whose 256 integers reach from `low` to `high`, and in which 0.0 is exact."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = np.float32(max(high - low, 2.0**-20) / 255)
        return cls(scale, int(np.clip(np.rint(-128 - low / float(scale)), -128, 127)))


PROBABILITY = Quantisation(np.float32(1 / 256), -128)
"""What TFLite fixes for the result of a softmax."""


def quantise(x: Floats, quantisation: Quantisation) -> npt.NDArray[np.int8]:
    """The nearest integers, ties to even (QuantizeLinear's rule), saturated."""
    steps = np.rint(x / float(quantisation.scale)) + quantisation.zero_point
    integers: npt.NDArray[np.int8] = np.clip(steps, -128, 127).astype(np.int8)
    return integers
