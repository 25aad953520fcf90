"""What the rules of the quantize stage work with: quantised operands, the wanted result, and an emitter of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from dovetail.errors import ModelError
from dovetail.graph.graph import GraphBuilder
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.operators.base import Operator
from dovetail.operators.quantization import Quantize
from dovetail.quantize.multiplier import multiplier_arrays, quantized_bound


@dataclass(frozen=True)
class Target:
    """The quantisation a result must have: q stands for (q - zero_point) * scale."""

    dtype: DType
    scale: float
    """A float32 value."""
    zero_point: int

    def quantize(self, array: Array) -> Array:
        """Floats as integers of this quantisation."""
        operands = [array, np.array([self.scale], np.float32), np.array([self.zero_point], np.int32)]
        return Quantize(self.dtype).evaluate(operands)


@dataclass(frozen=True)
class Bounds:
    """The float range an activation function leaves."""

    low: float
    high: float

    @property
    def open(self) -> bool:
        """True when nothing is cut off."""
        return self.low == -inf and self.high == inf

    def within(self, low: float, high: float) -> Bounds:
        """The range left when [low, high] is applied first and then these bounds."""
        return Bounds(min(max(low, self.low), self.high), max(min(high, self.high), self.low))

    def integers(self, target: Target) -> tuple[int, int]:
        """The range as integers of a quantisation."""
        low = quantized_bound(self.low, target.scale, target.zero_point, target.dtype)
        high = quantized_bound(self.high, target.scale, target.zero_point, target.dtype)
        return low, max(low, high)


@dataclass(frozen=True)
class Quantised:
    """Integers of the new graph that stand for floats: (q - zero_point) * scale."""

    name: str
    kind: TensorType
    scale: Array
    """float32 [1], or one per index along `axis`."""
    zero_point: Array
    """int64, of the shape of `scale`."""
    axis: int
    array: Array | None
    """The integers, where they are constant."""

    @property
    def per_tensor(self) -> bool:
        """True when one scale holds for all elements."""
        return self.scale.size == 1

    @property
    def target(self) -> Target:
        """The quantisation of a per-tensor value."""
        return Target(self.kind.dtype, float(self.scale[0]), int(self.zero_point[0]))

    def same_steps(self, other: Quantised) -> bool:
        """True when equal integers stand for equal floats."""
        return (
            self.kind.dtype is other.kind.dtype
            and (self.per_tensor or self.axis == other.axis)
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )


@dataclass
class Emitter:
    """Adds nodes to the integer graph under names that are free in the QDQ graph too."""

    builder: GraphBuilder
    taken: frozenset[str]
    rounding: Rounding
    origin: str = ""
    """The model's operator that the next nodes come from."""

    def fresh(self, stem: str) -> str:
        """A name neither graph uses, beginning with `stem`."""
        name, count = self.builder.fresh(stem), 1
        while name in self.taken:
            count += 1
            name = self.builder.fresh(f"{stem}_{count}")
        return name

    def add(self, operator: Operator, inputs: Sequence[str], stem: str) -> str:
        """Add a node whose result is named `stem`; what depends on constants alone is computed here and now."""
        arrays = [self.builder.constant_of(name) for name in inputs]
        known = [array for array in arrays if array is not None]
        if len(known) == len(arrays):
            kind = operator.infer([self.builder.type_of(name) for name in inputs])
            return self.builder.constant(stem, operator.evaluate(known), kind.dtype)
        return self.builder.add(operator, inputs, stem, self.origin)

    def constant(self, stem: str, array: Array, dtype: DType | None = None) -> str:
        """Add a constant under a fresh name."""
        return self.builder.constant(self.fresh(stem), array, dtype)

    def requantize(self, x: str, factors: tuple[Array, Array], operator: Requantize, stem: str) -> str:
        """x times the factors (multipliers and shifts: one, or one per channel), as `operator` rounds it."""
        multiplier, shift = factors
        parameters = [self.constant(f"{stem}_multiplier", multiplier), self.constant(f"{stem}_shift", shift)]
        return self.add(operator, [x, *parameters], stem)

    def clip(self, x: str, target: Target, bounds: Bounds, stem: str) -> str:
        """x limited to the bounds and narrowed to the result's type."""
        low, high = bounds.integers(target)
        return self.add(Clip(low, high, target.dtype), [x], stem)

    def scale_to(
        self, x: str, factors: Sequence[float], target: Target, bounds: Bounds, stem: str, zero_point: int = 0
    ) -> str:
        """Integers with scale factors * target.scale and this zero point, requantised to the target and clipped."""
        operator = Requantize(self.rounding, zero_point, target.zero_point)
        scaled = self.requantize(x, multiplier_arrays(factors), operator, self.fresh(f"{stem}_scaled"))
        return self.clip(scaled, target, bounds, stem)


Operand = Quantised | Array
"""A quantised value, or a float constant."""


def activations(operator: Operator, operands: Sequence[Operand]) -> list[Quantised]:
    """The operands as values with one scale each; raises ModelError for others."""
    found = [operand for operand in operands if isinstance(operand, Quantised) and operand.per_tensor]
    if len(found) != len(operands):
        kind = type(operator).__name__
        what = f"an operand of {kind} is a float constant or quantised per channel"
        raise ModelError(what, hint="quantise all operands per tensor")
    return found
