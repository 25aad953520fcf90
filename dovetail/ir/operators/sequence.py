"""Operators of networks that read a sequence step by step: a row written into a buffer, attention to live places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dovetail.ir.operators.base import Arrays, Cut, Int64Operator, Names, Operator, T, Types, require
from dovetail.ir.operators.gemmlowp import leading_zeros, look_up
from dovetail.ir.types import Array, Box, DType, Shape, TensorType, full_box, with_span

if TYPE_CHECKING:
    from dovetail.ir.onnx_body import OnnxBody

PLACES = (DType.INT32, DType.INT64)
"""Element types of a computed place."""


@dataclass(frozen=True)
class WriteRow(Operator):
    """x with rows along an axis replaced, one after the other. Operands: x, T rows (x with T along the axis), their
    places (T integers, int32 or int64).

    A negative place counts from the end; one beyond either end is moved to that end.
    """

    in_place: ClassVar[bool] = True
    axis: int
    """From 0."""

    def infer(self, inputs: Types) -> TensorType:
        x, row, place = inputs
        fits = 0 <= self.axis < len(x.shape) and x.shape[self.axis] > 0 and row.dtype is x.dtype
        fits = fits and row.shape == (*x.shape[: self.axis], place.elements, *x.shape[self.axis + 1 :])
        fits = fits and place.dtype in PLACES and place.elements > 0
        require(fits, f"cannot write {row} into {x} along axis {self.axis} at {place}")
        return x

    def evaluate(self, inputs: Arrays) -> Array:
        x, row, place = inputs
        size = x.shape[self.axis]
        result = x.copy()
        rows, new = np.moveaxis(result, self.axis, 0), np.moveaxis(row, self.axis, 0)
        for number, at in enumerate(place.reshape(-1).tolist()):
            rows[min(max(at + size if at < 0 else at, 0), size - 1)] = new[number]
        return result

    def chosen_from(self, operands: Sequence[T]) -> Sequence[T]:
        return operands[:2]

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        shape = types[0].shape
        size, rest = shape[self.axis], len(shape) - 1 - self.axis
        count = types[2].elements
        wide = body.add("Reshape", [body.cast(inputs[2], DType.INT64), body.integers((count, 1) if count > 1 else ())])
        lifted = body.add("Add", [wide, body.number(size)])
        place = body.limited(body.add("Where", [body.add("Less", [wide, body.number(0)]), lifted, wide]), 0, size - 1)
        if count > 1:  # each place takes the last of the rows that are written there
            here = body.cast(body.add("Equal", [place, body.tensor(np.arange(size)[None])]), DType.INT32)
            last = body.add("ArgMax", [here], axis=0, keepdims=0, select_last_index=1)
            most = body.add("ReduceMax", [here, body.integers((0,))], keepdims=0)
            written = body.add("Greater", [most, body.tensor(np.zeros(1, np.int32))])
            written = body.add("Reshape", [written, body.integers((size, *(1,) * rest))])
            return body.add("Where", [written, body.add("Gather", [inputs[1], last], axis=self.axis), inputs[0]])
        places = body.tensor(np.arange(size, dtype=np.int64).reshape(-1, *(1,) * rest))
        return body.add("Where", [body.add("Equal", [places, place]), inputs[1], inputs[0]])


def _check_attention(inputs: Types) -> TensorType:
    """The type of attention's result, with the queries' element type."""
    q, k, v, mask = inputs
    fits = len(q.shape) == len(k.shape) == len(v.shape) == 3 and len(mask.shape) == 2 and mask.dtype is DType.BOOL
    fits = fits and k.shape[0] == v.shape[0] > 0 and q.shape[0] % k.shape[0] == 0 and q.shape[2] == k.shape[2]
    fits = fits and k.shape[1] == v.shape[1] == mask.shape[1] > 0 and mask.shape[0] in (1, q.shape[1])
    require(fits, f"cannot attend with {q} to {k}, {v} where {mask} says")
    return TensorType((*q.shape[:2], v.shape[2]), q.dtype)


def _macs(inputs: Types) -> int:
    """Multiply-accumulates with all places live."""
    q, k, v, _ = inputs
    return q.shape[0] * q.shape[1] * k.shape[1] * (k.shape[2] + v.shape[2])


def _repeated(array: Array, heads: int) -> Array:
    """Keys or values with a head for each head of the queries."""
    return np.repeat(array, heads // len(array), axis=0)


@dataclass(frozen=True)
class Attention(Operator):
    """Softmax of scaled products of queries and keys over the live places, times values, float32.

    Operands: q [H, T, D], k [K, S, D], v [K, S, E], live bool [1 or T, S]. Result [H, T, E]. Head h reads head
    h // (H / K) of keys and values. Places that are not live are not read; without any the result is 0.
    """

    scale: float
    """Factor of the products."""

    def infer(self, inputs: Types) -> TensorType:
        require(all(kind.dtype is DType.FLOAT32 for kind in inputs[:3]), f"attends to float32, got {inputs[0]}")
        return _check_attention(inputs)

    def evaluate(self, inputs: Arrays) -> Array:
        q, k, v = (array.astype(np.float64) for array in inputs[:3])
        live, heads = inputs[3], q.shape[0]
        k, v = (_repeated(array, heads) for array in (k, v))
        scores = np.where(live, q @ k.transpose(0, 2, 1) * self.scale, -np.inf)
        largest = scores.max(axis=-1, keepdims=True)
        powers = np.where(live, np.exp(scores - np.where(np.isfinite(largest), largest, 0)), 0.0)
        shares = powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-300)
        v = np.where(np.any(live, axis=0).reshape(-1, 1), v, 0.0)
        return np.asarray(shares @ v, np.float32)

    def macs(self, inputs: Types) -> int:
        return _macs(inputs)

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        (heads, _, _), (groups, places, _) = types[0].shape, types[1].shape

        def spread(name: str, kind: TensorType) -> str:
            if heads == groups:
                return name
            one = body.add("Unsqueeze", [name, body.integers((1,))])
            many = body.add("Expand", [one, body.integers((groups, heads // groups, places, kind.shape[2]))])
            return body.add("Reshape", [many, body.integers((heads, places, kind.shape[2]))])

        keys = body.add("Transpose", [spread(inputs[1], types[1])], perm=[0, 2, 1])
        scores = body.add("Mul", [body.add("MatMul", [inputs[0], keys]), body.scalar(self.scale, DType.FLOAT32)])
        low = body.scalar(float(np.finfo(np.float32).min), DType.FLOAT32)
        shares = body.add("Softmax", [body.add("Where", [inputs[3], scores, low])], axis=-1)
        shares = body.add("Where", [inputs[3], shares, body.scalar(0.0, DType.FLOAT32)])
        return body.add("MatMul", [shares, spread(inputs[2], types[2])])


DISTANCE_STEPS = 64
"""Steps of the table of exponentials in which a distance grows by 1."""
FRACTION = 8
"""Fraction bits of the result of FixedAttention."""
ROOM = 9
"""Bits above a sum of weights at least: a value's, its sign's, and one more."""
_RECIPROCAL_BITS = 15


@dataclass(frozen=True)
class _Exponentials(Int64Operator):
    """Scores of places as weights: exponentials of their distances from the largest, in fixed point."""

    multiplier: int
    """scale * query scale * key scale * 64 * 2**shift, at least 1."""
    shift: int
    """0 to 40."""

    def weight_bits(self, places: int) -> int:
        """Fraction bits of the weights: so many that no sum of so many weighted values leaves 32 bits."""
        return min(15, 31 - ROOM - (places - 1).bit_length())

    def table(self, places: int) -> Array:
        """exp(-i / 64) in fixed point, int32, as far as it is not 0, and a 0 behind that."""
        unit = 1 << self.weight_bits(places)
        count = next(i for i in range(1 << 12) if round(unit * exp(-i / DISTANCE_STEPS)) == 0)
        return np.array([round(unit * exp(-i / DISTANCE_STEPS)) for i in range(count + 1)], np.int32)

    def farthest(self, places: int) -> int:
        """The least distance of a score from the largest whose weight is 0."""
        return -((-(len(self.table(places)) - 1) << self.shift) // self.multiplier)

    def weights(self, places: int, scores: Any, live: Any) -> Any:
        """The weights of int64 scores [..., S]."""
        far = self.farthest(places)
        largest = np.max(np.where(live, scores, -(1 << 40)), axis=-1, keepdims=True)
        distance = np.where(live, np.clip(largest - scores, 0, far), far)
        place = np.minimum(distance * self.multiplier >> self.shift, len(self.table(places)) - 1)
        return look_up(self.table(places).astype(np.int64), place)


def _divided(sums: Any, total: Any) -> Any:
    """Sums of weighted values over the sums of their weights, in steps of 1/256."""
    room = leading_zeros(np.maximum(total, 1)) - 1
    raised = np.maximum(total, 1) << room
    reciprocal = np.floor_divide(room * 0 + ((1 << 31) - 1), raised >> _RECIPROCAL_BITS)
    return sums * reciprocal >> (31 + _RECIPROCAL_BITS - FRACTION) - room


@dataclass(frozen=True)
class FixedAttention(_Exponentials):
    """Attention of 8-bit integers, exact. Operands as `Attention`'s, q, k and v int8.

    The distance of a score (q - query_zero_point) . k from the row's largest, times multiplier / 2**shift, is a place
    in a table of exponentials in steps of 1/64. The sums of values, weighted with these, are divided by the sum of the
    weights by its reciprocal. Result int32 [H, T, E]: the values' integers less their zero point, in steps of 1/256.
    """

    result: ClassVar[DType] = DType.INT32
    query_zero_point: int
    value_zero_point: int

    def infer(self, inputs: Types) -> TensorType:
        q, k, v = inputs[:3]
        require(all(kind.dtype is DType.INT8 for kind in (q, k, v)), f"attends to int8, got {q}, {k}, {v}")
        require(k.shape[1] <= MOST_PLACES, f"attends to {k.shape[1]} places; the limit is {MOST_PLACES}")
        require(q.shape[2] <= MOST_DEPTH, f"multiplies {q.shape[2]} elements of a head; the limit is {MOST_DEPTH}")
        return TensorType(_check_attention(inputs).shape, DType.INT32)

    def macs(self, inputs: Types) -> int:
        return _macs(inputs)

    def evaluate(self, inputs: Arrays) -> Array:
        q, k, v, live = (array.astype(np.int64) for array in inputs)
        k, v = (_repeated(array, len(q)) for array in (k, v))
        return np.asarray(self.weighted(k.shape[1], q, k.transpose(0, 2, 1), v, live), dtype=np.int32)

    def weighted(self, places: int, q: Any, k: Any, v: Any, live: Any) -> Any:
        """The result from int64 arrays, keys as [H, D, S], with a head of keys and values for each of the queries."""
        weights = self.weights(places, np.matmul(q - self.query_zero_point, k), live)
        sums = np.matmul(weights, v - self.value_zero_point)
        return _divided(sums, np.sum(weights, axis=-1, keepdims=True))

    def onnx(self, body: OnnxBody, inputs: Names, types: Types) -> str:
        (heads, _, _), (groups, places, _) = types[0].shape, types[1].shape
        head = body.tensor(np.arange(heads, dtype=np.int64) // (heads // groups))
        keys, values = (body.add("Gather", [body.cast(name, DType.INT32), head], axis=0) for name in inputs[1:3])
        names = [inputs[0], body.add("Transpose", [keys], perm=[0, 2, 1]), values, inputs[3]]
        return body.traced(lambda *arrays: self.weighted(places, *arrays), names, types, self.result)


MOST_PLACES = 4096
"""Most places FixedAttention attends to."""
MOST_DEPTH = 256
"""Most elements of a head that FixedAttention multiplies."""


@dataclass(frozen=True)
class AttentionWeights(_Exponentials):
    """The weights of `FixedAttention` from scores that an engine computed.

    Operands: scores int32 [1, S, 1, H * T], live bool [T, S]. Result: uint8 [1, 2 * H * T, 1, S], for each head and row
    the lower bytes of the weights, then the upper ones.
    """

    result: ClassVar[DType] = DType.UINT8
    heads: tuple[int, int] | None = None
    """The first head whose weights are given, and one behind the last; None for all."""

    def span(self, inputs: Types) -> tuple[int, int]:
        """The first head whose weights are given, and one behind the last."""
        return self.heads or (0, inputs[0].shape[3] // inputs[1].shape[0])

    def infer(self, inputs: Types) -> TensorType:
        scores, live = inputs
        fits = scores.dtype is DType.INT32 and len(scores.shape) == 4 and scores.shape[0] == scores.shape[2] == 1
        fits = fits and live.dtype is DType.BOOL and len(live.shape) == 2 and live.shape[1] == scores.shape[1]
        fits = fits and scores.shape[1] <= MOST_PLACES and live.shape[0] > 0 and scores.shape[3] % live.shape[0] == 0
        require(fits, f"weighs scores [1, places, 1, heads], got {scores} where {live} says")
        first, stop = self.span(inputs)
        return TensorType((1, 2 * (stop - first) * live.shape[0], 1, scores.shape[1]), DType.UINT8)

    def meaning(self, scores: Any, live: Any) -> Any:
        (_, places, _, every), rows = scores.shape, live.shape[0]
        first, stop = self.heads or (0, every // rows)
        apart = scores.reshape((places, every)).T.reshape((every // rows, rows, places))[first:stop]
        weights = self.weights(places, apart, live).reshape(((stop - first) * rows, 1, places))
        return (weights >> np.array([[0], [8]]) & 255).reshape((1, 2 * (stop - first) * rows, 1, places))

    def crop(self, box: Box, inputs: Types) -> Cut:
        (start, end), first = _heads_of(box, 1, 2 * inputs[1].shape[0], self.infer(inputs).shape), self.span(inputs)[0]
        return replace(self, heads=(first + start, first + end)), tuple(full_box(kind.shape) for kind in inputs)


def _heads_of(box: Box, axis: int, rows: int, shape: Shape) -> tuple[int, int]:
    """The first head and one behind the last of a box of whole heads, each of so many rows along an axis."""
    first, stop = box[axis]
    whole = with_span(box, axis, (0, 0)) == with_span(full_box(shape), axis, (0, 0))
    require(whole and first % rows == stop % rows == 0, "attention is in whole heads, which are not tiled")
    return first // rows, stop // rows


@dataclass(frozen=True)
class AttentionEnd(Int64Operator):
    """The result of `FixedAttention` from sums that an engine computed of the bytes of `AttentionWeights`.

    Operands: weighted values int32 [1, 2 * H * T, 1, K * E], weights int32 [1, 2 * H * T, 1, 1]. Result int32
    [H, T, E].
    """

    result: ClassVar[DType] = DType.INT32
    groups: int
    """K, the heads of keys and values."""
    each: int
    """Heads for each of these."""
    rows: int = 1
    """T"""
    first: int = 0
    """The first of the H heads, of all K * each."""

    def infer(self, inputs: Types) -> TensorType:
        sums, totals = (kind.shape for kind in inputs)
        fits = all(kind.dtype is DType.INT32 and len(kind.shape) == 4 for kind in inputs) and sums[:3] == totals[:3]
        fits = fits and totals[3] == 1 and sums[1] % (2 * self.rows) == sums[3] % self.groups == 0
        fits = fits and 0 < sums[1] // (2 * self.rows) <= self.groups * self.each - self.first
        require(fits, f"divides weighted values of {self.groups} heads by weights, got {inputs[0]}, {inputs[1]}")
        return TensorType((sums[1] // 2 // self.rows, self.rows, sums[3] // self.groups), DType.INT32)

    def meaning(self, sums: Any, totals: Any) -> Any:
        rows, width = sums.shape[1] // 2, sums.shape[3]
        group = (np.arange(rows) // self.rows + self.first) // self.each
        own = (group[:, None] == np.arange(self.groups)).astype(np.int64)[:, :, None]
        bytes_ = np.array([[1], [256]])
        both, wholes = (
            np.sum(one.reshape((rows, 2, size)) * bytes_, axis=1) for one, size in ((sums, width), (totals, 1))
        )
        mine = np.sum(both.reshape((rows, self.groups, width // self.groups)) * own, axis=1)
        return _divided(mine, wholes).reshape((rows // self.rows, self.rows, width // self.groups))

    def crop(self, box: Box, inputs: Types) -> Cut:
        first, stop = _heads_of(box, 0, 1, self.infer(inputs).shape)
        spans = (with_span(full_box(kind.shape), 1, (2 * self.rows * first, 2 * self.rows * stop)) for kind in inputs)
        return replace(self, first=self.first + first), tuple(spans)
