"""Comparison, choice and conversion of element types."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.graph.types import Array, Box, DType, Shape, TensorType
from dovetail.operators.arithmetic import broadcast_box
from dovetail.operators.base import Operator, one_for_all, require

if TYPE_CHECKING:
    from dovetail.graph.onnx_body import OnnxBody


class CompareKind(enum.Enum):
    """Relations; those that are missing are one of these with the operands exchanged, or equal to false."""

    EQUAL = "Equal"
    LESS = "Less"
    LESS_OR_EQUAL = "LessOrEqual"


_RELATIONS: dict[CompareKind, Callable[[Array, Array], Array]] = {
    CompareKind.EQUAL: np.equal,
    CompareKind.LESS: np.less,
    CompareKind.LESS_OR_EQUAL: np.less_equal,
}


def broadcast_shape(types: Sequence[TensorType]) -> Shape:
    """The shape operands broadcast to; raises ValueError where they do not."""
    try:
        return tuple(int(size) for size in np.broadcast_shapes(*(kind.shape for kind in types)))
    except ValueError:
        raise ValueError(f"{' and '.join(map(str, types))} cannot be broadcast to one shape") from None


@dataclass(frozen=True)
class Compare(Operator):
    """Whether a relation holds between two operands of one type, with broadcasting; bool. NaN is less than nothing."""

    kind: CompareKind

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        a, b = inputs
        require(a.dtype is b.dtype and a.dtype.bits >= 8, f"cannot compare {a} and {b}")
        return TensorType(broadcast_shape(inputs), DType.BOOL)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return np.asarray(_RELATIONS[self.kind](inputs[0], inputs[1]))

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, tuple(broadcast_box(box, kind.shape) for kind in inputs)

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        # ONNX Runtime compares few types; wider ones hold the narrower exactly.
        wide = types[0].dtype if types[0].dtype is DType.FLOAT32 else DType.INT64
        return body.add(self.kind.value, [body.cast(name, wide) for name in inputs])


@dataclass(frozen=True)
class Select(Operator):
    """a where the condition holds, else b. Operands: condition bool, a and b of one type; all broadcast."""

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        condition, a, b = inputs
        fits = condition.dtype is DType.BOOL and a.dtype is b.dtype and a.dtype.bits >= 8
        require(fits, f"cannot choose between {a} and {b} by {condition}")
        return TensorType(broadcast_shape(inputs), a.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return np.where(*inputs)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, tuple(broadcast_box(box, kind.shape) for kind in inputs)

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return one_for_all(inputs)

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        kind = types[1].dtype
        wide = kind if kind is DType.FLOAT32 else DType.INT64
        return body.cast(body.add("Where", [inputs[0], *(body.cast(name, wide) for name in inputs[1:])]), kind)


@dataclass(frozen=True)
class Convert(Operator):
    """The same number in another type.

    From float32 to integers: rounded towards zero, limited to the type, NaN becomes 0. Between integers modulo
    2**bits. To bool: whether it is not 0.
    """

    dtype: DType

    def infer(self, inputs: Sequence[TensorType]) -> TensorType:
        require(min(self.dtype.bits, inputs[0].dtype.bits) >= 8, f"cannot convert {inputs[0]} to {self.dtype.text}")
        return TensorType(inputs[0].shape, self.dtype)

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        x = inputs[0]
        if self.dtype is DType.BOOL:
            return np.asarray(x != 0)
        if x.dtype != np.float32 or self.dtype is DType.FLOAT32:
            return x.astype(self.dtype.numpy)
        whole = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
        if self.dtype is DType.INT64:  # 2**63 - 1 is no float64
            edge = 2.0**63
            inner = np.where(np.abs(whole) < edge, whole, 0.0).astype(np.int64)
            return np.where(whole >= edge, DType.INT64.high, np.where(whole <= -edge, DType.INT64.low, inner))
        return np.clip(whole, self.dtype.low, self.dtype.high).astype(self.dtype.numpy)

    def crop(self, box: Box, inputs: Sequence[TensorType]) -> tuple[Operator, tuple[Box, ...]]:
        return self, (box,)

    def is_elementwise(self, inputs: Sequence[TensorType]) -> bool:
        return True

    def onnx(self, body: OnnxBody, inputs: Sequence[str], types: Sequence[TensorType]) -> str:
        if types[0].dtype is not DType.FLOAT32 or self.dtype in (DType.FLOAT32, DType.BOOL):
            return body.cast(inputs[0], self.dtype)
        known = body.add("Where", [body.add("IsNaN", [inputs[0]]), body.scalar(0.0, DType.FLOAT32), inputs[0]])
        wide = body.real64(known)
        # The largest int64 is no float64: what lies beyond is as far as its runtime's conversion limits it.
        high = min(self.dtype.high, (1 << 63) - 1024)
        bounds = [body.real64_scalar(self.dtype.low), body.real64_scalar(high)]
        return body.cast(body.cast(body.add("Clip", [wide, *bounds]), DType.INT64), self.dtype)
