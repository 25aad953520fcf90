"""Activations: float functions, and the fixed-point softmax of microcontrollers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, inf
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dovetail.documented import document
from dovetail.ir.operators import gemmlowp
from dovetail.ir.operators.base import Arrays, Names, Operator, Pointwise, Rowwise, Types, require
from dovetail.ir.types import Array, DType, TensorType
from dovetail.records import Record

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody


@dataclass(frozen=True)
class Clamp(Pointwise):
    """Limit a float operand to [low, high]; either may be infinite."""

    low: float
    """Least result."""
    high: float
    """Largest result."""

    @property
    def clamped_to(self) -> tuple[float, float]:
        return self.low, self.high

    def infer(self, inputs: Types) -> TensorType:
        require(inputs[0].dtype is DType.FLOAT32 and self.low <= self.high, f"cannot clamp {inputs[0]}")
        return inputs[0]

    def evaluate(self, inputs: Arrays) -> Array:
        return np.clip(inputs[0], np.float32(self.low), np.float32(self.high))

    def is_noop(self, inputs: Types) -> bool:
        return (self.low, self.high) == (-inf, inf)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        limits = (self.low, self.high)
        if limits == (0.0, inf):
            return body.add("Relu", [inputs[0]])
        bounds = ["" if abs(limit) == inf else body.scalar(limit, DType.FLOAT32) for limit in limits]
        return body.add("Clip", [inputs[0], *bounds])


class UnaryKind(enum.Enum):
    """Functions of one float; `alpha` is the operator's attribute."""

    SIGMOID = "Sigmoid"
    """Sigmoid: 1 / (1 + exp(-x))."""
    TANH = "Tanh"
    HARD_SIGMOID = "HardSigmoid"
    """Hard sigmoid: min(max(x / 6 + 1/2, 0), 1)."""
    HARD_SWISH = "HardSwish"
    """Hard swish: x * min(max(x / 6 + 1/2, 0), 1)."""
    LEAKY_RELU = "LeakyRelu"
    """Leaky ReLU: x for x >= 0, else alpha * x."""
    ELU = "Elu"
    """Exponential linear unit: x for x >= 0, else alpha * (exp(x) - 1)."""
    GELU = "Gelu"
    """Gaussian error linear unit: x * (1 + erf(x / sqrt(2))) / 2."""
    GELU_TANH = "GeluTanh"
    """Approximate GELU: x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2."""
    NEGATIVE = "Neg"
    ABSOLUTE = "Abs"
    SIGN = "Sign"
    """Sign: -1, 0 or 1."""
    FLOOR = "Floor"
    CEILING = "Ceil"
    ROUND = "Round"
    """Rounding to the nearest integer, halves to even."""
    RECIPROCAL = "Reciprocal"
    SQUARE_ROOT = "Sqrt"
    EXPONENTIAL = "Exp"
    LOGARITHM = "Log"
    """Natural logarithm."""
    ERROR_FUNCTION = "Erf"
    SOFTPLUS = "Softplus"
    """Softplus: log(1 + exp(x))."""
    SOFTSIGN = "Softsign"
    """Softsign: x / (1 + |x|)."""
    SINE = "Sin"
    COSINE = "Cos"
    SQUARE = "Square"
    RECIPROCAL_ROOT = "Rsqrt"
    """Reciprocal root: 1 / sqrt(x)."""
    THRESHOLDED_RELU = "ThresholdedRelu"
    """Thresholded ReLU: x for x > alpha, else 0."""
    HARD_SHRINK = "Shrink"
    """Hard shrink: x for |x| > alpha, else 0."""


def _sigmoid(x: Array, _alpha: float) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _hard_sigmoid(x: Array, _alpha: float) -> Array:
    return np.clip(x / 6.0 + 0.5, 0.0, 1.0)


def _erf(x: Array, _alpha: float) -> Array:
    return np.asarray(np.array([erf(value) for value in x.ravel()], np.float64).reshape(x.shape))


def _gelu(x: Array, alpha: float) -> Array:
    return x * (1.0 + _erf(x / np.sqrt(2.0), alpha)) / 2.0


def _gelu_tanh(x: Array, _alpha: float) -> Array:
    inner = np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))
    return np.asarray(x * (1.0 + inner) / 2.0)


class UnaryFunction(Record):
    """A function of one value."""

    compute: Callable[[Array, float], Array]
    """The function on a float64 array, with the operator's alpha."""
    c: str
    """C of a float `x`, an identifier, with the functions of dovetail/kernels/runtime/floats.c."""


UNARY_FUNCTIONS = {
    UnaryKind.SIGMOID: UnaryFunction(_sigmoid, "logistic({x})"),
    UnaryKind.TANH: UnaryFunction(lambda x, _alpha: np.tanh(x), "hyperbolic_tangent({x})"),
    UnaryKind.HARD_SIGMOID: UnaryFunction(_hard_sigmoid, "smaller(larger({x} / 6.0f + 0.5f, 0.0f), 1.0f)"),
    UnaryKind.HARD_SWISH: UnaryFunction(
        lambda x, alpha: x * _hard_sigmoid(x, alpha), "{x} * smaller(larger({x} / 6.0f + 0.5f, 0.0f), 1.0f)"
    ),
    UnaryKind.LEAKY_RELU: UnaryFunction(
        lambda x, alpha: np.where(x >= 0, x, alpha * x), "{x} >= 0.0f ? {x} : {alpha} * {x}"
    ),
    UnaryKind.ELU: UnaryFunction(
        lambda x, alpha: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0.0))),
        "{x} >= 0.0f ? {x} : {alpha} * exponential_less_one({x})",
    ),
    UnaryKind.GELU: UnaryFunction(_gelu, "{x} * gaussian_share({x})"),
    UnaryKind.GELU_TANH: UnaryFunction(
        _gelu_tanh, "0.5f * {x} * (1.0f + hyperbolic_tangent(0.797884561f * ({x} + 0.044715f * {x} * {x} * {x})))"
    ),
    UnaryKind.NEGATIVE: UnaryFunction(lambda x, _alpha: -x, "-{x}"),
    UnaryKind.ABSOLUTE: UnaryFunction(lambda x, _alpha: np.abs(x), "absolute({x})"),
    UnaryKind.SIGN: UnaryFunction(lambda x, _alpha: np.sign(x), "sign_of({x})"),
    UnaryKind.FLOOR: UnaryFunction(lambda x, _alpha: np.floor(x), "floor_of({x})"),
    UnaryKind.CEILING: UnaryFunction(lambda x, _alpha: np.ceil(x), "ceiling_of({x})"),
    UnaryKind.ROUND: UnaryFunction(lambda x, _alpha: np.rint(x), "nearest({x})"),
    UnaryKind.RECIPROCAL: UnaryFunction(lambda x, _alpha: 1.0 / x, "1.0f / {x}"),
    UnaryKind.SQUARE_ROOT: UnaryFunction(lambda x, _alpha: np.sqrt(x), "square_root({x})"),
    UnaryKind.EXPONENTIAL: UnaryFunction(lambda x, _alpha: np.exp(x), "exponential({x})"),
    UnaryKind.LOGARITHM: UnaryFunction(lambda x, _alpha: np.log(x), "logarithm({x})"),
    UnaryKind.ERROR_FUNCTION: UnaryFunction(_erf, "error_function({x})"),
    UnaryKind.SOFTPLUS: UnaryFunction(
        lambda x, _alpha: np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x))), "soft_plus({x})"
    ),
    UnaryKind.SOFTSIGN: UnaryFunction(lambda x, _alpha: x / (1.0 + np.abs(x)), "{x} / (1.0f + absolute({x}))"),
    UnaryKind.SINE: UnaryFunction(lambda x, _alpha: np.sin(x), "sine({x})"),
    UnaryKind.COSINE: UnaryFunction(lambda x, _alpha: np.cos(x), "cosine({x})"),
    UnaryKind.SQUARE: UnaryFunction(lambda x, _alpha: x * x, "{x} * {x}"),
    UnaryKind.RECIPROCAL_ROOT: UnaryFunction(lambda x, _alpha: 1.0 / np.sqrt(x), "1.0f / square_root({x})"),
    UnaryKind.THRESHOLDED_RELU: UnaryFunction(
        lambda x, alpha: np.where(x > alpha, x, 0.0), "{x} > {alpha} ? {x} : 0.0f"
    ),
    UnaryKind.HARD_SHRINK: UnaryFunction(
        lambda x, alpha: np.where(np.abs(x) > alpha, x, 0.0), "absolute({x}) > {alpha} ? {x} : 0.0f"
    ),
}
"""Functions of one float, by name."""


@dataclass(frozen=True)
class Unary(Pointwise):
    """A function of each float element, computed in float64 and rounded to float32."""

    kind: UnaryKind
    """Name of the function, a key of `UNARY_FUNCTIONS`."""
    alpha: float = 0.0
    """Slope of LEAKY_RELU, scale of ELU, threshold of THRESHOLDED_RELU and HARD_SHRINK; unused by the others."""

    @property
    def c_template(self) -> str:
        return UNARY_FUNCTIONS[self.kind].c

    def infer(self, inputs: Types) -> TensorType:
        require(inputs[0].dtype is DType.FLOAT32, f"expects float32, got {inputs[0]}")
        return inputs[0]

    def evaluate(self, inputs: Arrays) -> Array:
        with np.errstate(all="ignore"):  # outside the domain the result is NaN or infinite, as in C
            wide = UNARY_FUNCTIONS[self.kind].compute(inputs[0].astype(np.float64), self.alpha)
            return np.asarray(wide, dtype=np.float32)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        if self.kind is UnaryKind.SQUARE:
            return body.add("Mul", [inputs[0], inputs[0]])
        if self.kind is UnaryKind.RECIPROCAL_ROOT:
            return body.add("Reciprocal", [body.add("Sqrt", [inputs[0]])])
        if self.kind is UnaryKind.GELU_TANH:
            return body.add("Gelu", [inputs[0]], approximate="tanh")
        if self.kind in (UnaryKind.LEAKY_RELU, UnaryKind.ELU, UnaryKind.THRESHOLDED_RELU):
            return body.add(self.kind.value, [inputs[0]], alpha=self.alpha)
        if self.kind is UnaryKind.HARD_SHRINK:
            return body.add(self.kind.value, [inputs[0]], lambd=self.alpha)
        if self.kind is UnaryKind.HARD_SIGMOID:
            return body.add(self.kind.value, [inputs[0]], alpha=1.0 / 6.0, beta=0.5)
        return body.add(self.kind.value, [inputs[0]])


@dataclass(frozen=True)
class _Scores(Rowwise):
    """Rows of float32 scores along the last axis."""

    reads_scores: ClassVar[bool] = True

    def infer(self, inputs: Types) -> TensorType:
        require(inputs[0].dtype is DType.FLOAT32 and len(inputs[0].shape) > 0, f"expects float32, got {inputs[0]}")
        return inputs[0]


@dataclass(frozen=True)
class Softmax(_Scores):
    """Exponentials exp(beta * x), divided by their sum along the last axis, float32."""

    gives_shares: ClassVar[bool] = True
    beta: float = 1.0
    """Factor of every element before the exponential."""

    def evaluate(self, inputs: Arrays) -> Array:
        x = inputs[0].astype(np.float64) * self.beta
        powers = np.exp(x - x.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True), dtype=np.float32)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        factor = body.scalar(self.beta, DType.FLOAT32) if self.beta != 1.0 else ""
        return body.add("Softmax", [body.add("Mul", [inputs[0], factor]) if factor else inputs[0]], axis=-1)


@dataclass(frozen=True)
class LogSoftmax(_Scores):
    """The logarithm of `Softmax`: x less the logarithm of the sum of exp(x) over the last axis, float32."""

    def evaluate(self, inputs: Arrays) -> Array:
        x = inputs[0].astype(np.float64)
        centred = x - x.max(axis=-1, keepdims=True)
        return np.asarray(centred - np.log(np.exp(centred).sum(axis=-1, keepdims=True)), dtype=np.float32)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        return body.add("LogSoftmax", [inputs[0]], axis=-1)


def _onnx_doubled(body: OnnxBody, x: str, factor: int) -> str:
    bounds = [body.number(-(1 << 31)), body.number(gemmlowp.ONE)]
    return body.add("Clip", [body.add("Mul", [x, body.number(factor)]), *bounds])


def _onnx_reciprocal(body: OnnxBody, x: str, integer_bits: int) -> tuple[str, str]:
    """`gemmlowp.reciprocal` of an int64 value whose last axis is 1."""
    powers = body.tensor(np.int64(1) << np.arange(1, 31, dtype=np.int64))
    reached = body.cast(body.add("GreaterOrEqual", [x, powers]), DType.INT64)
    bits = body.add("ReduceSum", [reached, body.integers((-1,))], keepdims=1)
    headroom = body.add("Sub", [body.number(31), bits])
    raised = body.add("Mul", [x, body.power(headroom)])
    # (raised - 2**31) is the fraction; adding 1 as (2**31 - 1) and 1 to round up leaves raised itself
    half = body.add("Div", [raised, body.number(2)])
    slope = body.high_product(half, body.number(gemmlowp.START_32_17))
    estimate = body.add("Add", [slope, body.number(gemmlowp.START_48_17)])
    for _ in range(3):
        error = body.add("Sub", [body.number(1 << 29), body.high_product(half, estimate)])
        step = _onnx_doubled(body, body.high_product(estimate, error), 4)
        estimate = body.add("Add", [estimate, step])
    over_unit = body.add("Sub", [body.number(integer_bits), headroom])
    return _onnx_doubled(body, estimate, 2), over_unit


@dataclass(frozen=True)
class FixedSoftmax(Rowwise):
    """Softmax over the last axis of 8-bit values, in fixed point: TFLite Micro's, bit for bit.

    Differences to the largest element of the row, times multiplier * 2**(shift - 31), are Q5.26 operands of
    exp; the result has scale 2**-bits and zero point dtype.low.
    """

    multiplier: int
    """Factor of differences, beta * input scale * 2**26, as a Q0.31 multiplier."""
    shift: int
    """The power of two that goes with it, at least 0."""
    diff_min: int
    """Differences below this (it is negative) count as exp = 0."""
    dtype: DType
    """INT8, UINT8 or INT16."""

    def infer(self, inputs: Types) -> TensorType:
        x = inputs[0]
        require(x.dtype in (DType.INT8, DType.UINT8), f"expects 8-bit values, got {x}")
        require(self.dtype in (DType.INT8, DType.UINT8, DType.INT16), f"cannot give {self.dtype.text}")
        require(len(x.shape) > 0 and x.shape[-1] < 4096, f"sums up to 4095 elements, got {x}")
        return TensorType(x.shape, self.dtype)

    def raised(self, by: Sequence[int]) -> Operator | None:
        return self

    def table(self) -> Array:
        """Exponentials of -d for d = 0..255, Q0.31 in int32 [256]; 0 beyond diff_min."""
        differences = -np.arange(256, dtype=np.int64)
        kept = np.maximum(differences, self.diff_min)
        scaled = gemmlowp.high_product(kept << self.shift, self.multiplier)
        return np.where(differences >= self.diff_min, gemmlowp.exponential(scaled), 0).astype(np.int32)

    def evaluate(self, inputs: Arrays) -> Array:
        x = inputs[0].astype(np.int64)
        powers = self.table().astype(np.int64)[x.max(axis=-1, keepdims=True) - x]
        total = gemmlowp.rounding_shift(powers, 12).sum(axis=-1, keepdims=True)
        reciprocal, over_unit = gemmlowp.reciprocal(total, 12)
        exponent = over_unit + 31 - self.dtype.bits
        scaled = gemmlowp.rounding_shift(gemmlowp.high_product(reciprocal, powers), exponent)
        limited: Array = np.clip(scaled + self.dtype.low, self.dtype.low, self.dtype.high)
        return limited.astype(self.dtype.numpy)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        wide = body.cast(inputs[0], DType.INT32)
        largest = body.add("ReduceMax", [wide, body.integers((-1,))], keepdims=1)
        table = body.tensor(self.table().astype(np.int64))
        powers = body.add("Gather", [table, body.add("Sub", [largest, wide])])
        terms = body.rounding_shift(powers, body.number(12))
        total = body.add("ReduceSum", [terms, body.integers((-1,))], keepdims=1)
        reciprocal, over_unit = _onnx_reciprocal(body, total, 12)
        exponent = body.add("Add", [over_unit, body.number(31 - self.dtype.bits)])
        scaled = body.rounding_shift(body.high_product(reciprocal, powers), exponent)
        result = body.add("Add", [scaled, body.number(self.dtype.low)])
        return body.cast(body.limited(result, self.dtype.low, self.dtype.high), self.dtype)


document(__name__)
