"""The rules of the quantize stage work with these: quantised operands, the wanted result, and an emitter of nodes.

Facts on factors and bounds from tflite-micro's kernels/internal/quantization_util.cc and kernels/kernel_util.cc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, TypeVar

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.arithmetic import Clip, Offset, Quantize, Requantize, Rounding, multiplier_arrays
from dovetail.ir.operators.base import Operator
from dovetail.ir.types import Array, DType, TensorType
from dovetail.notes import Tell, silent
from dovetail.records import Record

O = TypeVar("O", bound=Operator)  # noqa: E741


class QuantParameters(Record):
    """Scale and zero point of integers: q stands for (q - zero_point) * scale."""

    dtype: DType
    scale: float
    """A float32 value."""
    zero_point: int

    def quantize(self, array: Array) -> Array:
        """Floats as integers of this quantisation."""
        operands = [array, np.array([self.scale], np.float32), np.array([self.zero_point], np.int32)]
        return Quantize(self.dtype).evaluate(operands)

    def bound(self, value: float) -> int:
        """A bound of an activation function as an integer; infinite bounds are the type's own.

        The quotient is a float32, as in TFLite's CalculateActivationRangeQuantized, rounded with halves away from zero.
        """
        if math.isinf(value):
            return self.dtype.high if value > 0 else self.dtype.low
        steps = float(np.float32(value) / np.float32(self.scale))
        rounded = int(math.copysign(math.floor(abs(steps) + 0.5), steps))
        return min(max(self.zero_point + rounded, self.dtype.low), self.dtype.high)


class Bounds(Record):
    """The float range an activation function leaves."""

    low: float = -inf
    high: float = inf

    @property
    def open(self) -> bool:
        """True when nothing is cut off."""
        return self.low == -inf and self.high == inf

    def within(self, low: float, high: float) -> Bounds:
        """The range left when [low, high] is applied first and then these bounds."""
        return Bounds(min(max(low, self.low), self.high), max(min(high, self.high), self.low))

    def integers(self, form: QuantParameters) -> tuple[int, int]:
        """The range as integers of a quantisation."""
        low = form.bound(self.low)
        return low, max(low, form.bound(self.high))


class QuantisedValue(Record):
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
    def form(self) -> QuantParameters:
        """The quantisation of a per-tensor value."""
        return QuantParameters(self.kind.dtype, float(self.scale[0]), int(self.zero_point[0]))

    def same_steps(self, other: QuantisedValue) -> bool:
        """True when equal integers stand for equal floats."""
        return (
            self.kind.dtype is other.kind.dtype
            and (self.per_tensor or self.axis == other.axis)
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )


Operand = QuantisedValue | Array
"""A quantised value, or a float constant."""


@dataclass
class Emitter:
    """Adds nodes to the integer graph under names that are free in the QDQ graph too."""

    builder: GraphBuilder
    taken: frozenset[str]
    rounding: Rounding
    origin: str = ""
    """The model's operator that the next nodes come from."""
    tell: Tell = silent
    """Hears where the integers compute something else than the model says."""

    def fresh(self, stem: str) -> str:
        """A name neither graph uses, beginning with `stem`."""
        return self.builder.fresh(stem, self.taken)

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


class QuantisationRequest(Record, Generic[O]):
    """An operator's result that is wanted as integers: all that a rule is told, and how it answers.

    Names of what is made on the way begin with `stem` and end in a word that says what it is.
    """

    emitter: Emitter
    operator: O
    operands: Sequence[Operand]
    target: QuantParameters
    """The quantisation the result must have."""
    bounds: Bounds
    """The range that is left of the result."""
    stem: str
    """Name of the result."""

    def activations(self, operands: Sequence[Operand] | None = None) -> list[QuantisedValue]:
        """The operands as values with one scale each; raises ModelError for others."""
        wanted = self.operands if operands is None else operands
        found = [operand for operand in wanted if isinstance(operand, QuantisedValue) and operand.per_tensor]
        if len(found) != len(wanted):
            what = f"an operand of {self.operator.class_name} is a float constant or quantised per channel"
            raise ModelError(what, hint="quantise all operands per tensor")
        return found

    def signed(self, x: QuantisedValue) -> QuantisedValue:
        """uint16 as the int16 that stand for the same; others as they are."""
        if x.kind.dtype is not DType.UINT16:
            return x
        name = self.emitter.add(Offset(DType.INT16.low, DType.INT16), [x.name], self.emitter.fresh(f"{x.name}_signed"))
        kind, array = self.emitter.builder.type_of(name), self.emitter.builder.constant_of(name)
        return replace(x, name=name, kind=kind, array=array, zero_point=x.zero_point + DType.INT16.low)

    def refuse(self, x: QuantisedValue, kinds: Sequence[DType] = ()) -> ModelError:
        """The error for integers the operator has no form for; `kinds` are those it has one for."""
        kind = getattr(self.operator, "kind", None)
        name = kind.value if kind is not None else self.operator.class_name
        known = " or ".join(dtype.text for dtype in kinds)
        advice = f"quantise its operands to {known}" if kinds else "take it out of the quantised part of the network"
        hint = f"{advice}, or compile it with --float"
        return ModelError(f"{name} of {x.kind.dtype.text} has no integer form in Dovetail", hint=hint)

    def fresh(self, word: str) -> str:
        """A name for something on the way."""
        return self.emitter.fresh(f"{self.stem}_{word}")

    def add(self, operator: Operator, inputs: Sequence[str], word: str) -> str:
        """Add a node on the way."""
        return self.emitter.add(operator, inputs, self.fresh(word))

    def constant(self, word: str, array: Array, dtype: DType | None = None) -> str:
        """Add a constant."""
        return self.emitter.constant(f"{self.stem}_{word}", array, dtype)

    def scaled(
        self,
        x: str,
        factors: Sequence[float] | tuple[Array, Array],
        word: str = "scaled",
        zero_points: tuple[int, int] = (0, 0),
        left_shift: int = 0,
        rounding: Rounding | None = None,
    ) -> str:
        """x times factors: one, or one per channel.

        Args:
            x: integers.
            factors: real numbers, or multipliers and shifts.
            word: ends the result's name.
            zero_points: taken off x first, and added last.
            left_shift: bits of head-room x is raised by.
            rounding: the stage's where it is None.
        """
        operator = Requantize(rounding or self.emitter.rounding, *zero_points, left_shift)
        name = self.fresh(word)
        multiplier, shift = factors if isinstance(factors, tuple) else multiplier_arrays(factors)
        parameters = [
            self.emitter.constant(f"{name}_multiplier", multiplier),
            self.emitter.constant(f"{name}_shift", shift),
        ]
        return self.emitter.add(operator, [x, *parameters], name)

    def clip(self, x: str) -> str:
        """The result: x limited to the bounds and narrowed to its type."""
        return self.emitter.add(Clip(*self.bounds.integers(self.target), self.target.dtype), [x], self.stem)

    def finish(
        self,
        x: str,
        factors: Sequence[float] | tuple[Array, Array],
        zero_point: int = 0,
        left_shift: int = 0,
        rounding: Rounding | None = None,
    ) -> str:
        """The result: integers with this zero point and scale factors * target.scale, requantised and clipped."""
        zero_points = (zero_point, self.target.zero_point)
        return self.clip(self.scaled(x, factors, "scaled", zero_points, left_shift, rounding))

    def native(self, operator: Operator, x: QuantisedValue, native: QuantParameters, word: str = "native") -> str:
        """The result of an operator that gives a quantisation of its own, requantised where another one is wanted."""
        if self.target == native and self.bounds.open:
            return self.emitter.add(operator, [x.name], self.stem)
        fine = self.add(operator, [x.name], word)
        return self.finish(fine, [native.scale / self.target.scale], native.zero_point)
