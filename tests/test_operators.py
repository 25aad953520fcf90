"""Every operator: its numpy meaning against its ONNX form, against plain loops, and its cropping rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.ir.graph import GraphBuilder
from dovetail.ir.onnx_file import check_graph
from dovetail.ir.operators import OPERATORS
from dovetail.ir.operators.activation import Clamp, FixedSoftmax, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import (
    MOST_FLOAT,
    Add,
    Clip,
    Dequantize,
    Lookup,
    Offset,
    Quantize,
    Requantize,
    Rounding,
    ScaleShift,
    fixed_point,
)
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.bits import BitProduct, SpreadBits, ToBitPlanes, WriteBits
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Convert, Select
from dovetail.ir.operators.fixed import (
    FixedDivide,
    FixedLogSoftmax,
    FixedNormalise,
    FixedSoftmax16,
    FixedStandard,
    Sigmoid16,
)
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import (
    Concat,
    Gather,
    Im2col,
    Pad,
    Pick,
    Relayout,
    Resample,
    Reshape,
    Slice,
    Transpose,
)
from dovetail.ir.operators.recurrent import Curve, FixedLstm, FixedRecurrent, Recurrent, RecurrentKind, RowProducts
from dovetail.ir.operators.reduction import (
    ArgExtreme,
    AveragePool2d,
    CumSum,
    MaxPool2d,
    Normalise,
    Reduce,
    ReduceKind,
    SumPool2d,
)
from dovetail.ir.operators.sequence import Attention, AttentionEnd, AttentionWeights, FixedAttention, WriteRow
from dovetail.ir.types import Array, Box, DType, TensorType, box_shape, box_slices

I4, I8, U8, I16, I32 = DType.INT4, DType.INT8, DType.UINT8, DType.INT16, DType.INT32
I64, F32 = DType.INT64, DType.FLOAT32
PADDED = ((1, 0), (2, 1))


DOMAINS = {
    UnaryKind.SQUARE_ROOT: (0.0, 9.0),
    UnaryKind.LOGARITHM: (0.01, 9.0),
    UnaryKind.RECIPROCAL_ROOT: (0.01, 9.0),
}
"""Where functions are defined, if that is not everywhere."""


@dataclass(frozen=True)
class Case:
    """An operator and the types of its operands, with the range each operand is drawn from."""

    operator: Operator
    operands: tuple[TensorType, ...]
    ranges: tuple[tuple[float, float] | None, ...] = ()
    """Of each operand; None or absent for the whole range of its type."""

    def arrays(self, seed: int = 0) -> list[Array]:
        """Random operands, the extreme values among them."""
        rng = np.random.default_rng(seed)
        found = []
        for index, kind in enumerate(self.operands):
            limits = self.ranges[index] if index < len(self.ranges) else None
            if kind.dtype is F32:
                low, high = limits or (-4.0, 4.0)
                found.append(rng.uniform(low, high, kind.shape).astype(np.float32))
                continue
            low, high = (int(v) for v in limits) if limits else (kind.dtype.low, kind.dtype.high)
            array = rng.integers(low, high + 1, kind.shape)
            array.reshape(-1)[:2] = (low, high)[: array.size]
            found.append(array.astype(kind.dtype.numpy))
        return found


def of(dtype: DType, *shape: int) -> TensorType:
    return TensorType(shape, dtype)


def requantize(rounding: Rounding, channels: int, x: DType = I32, **attributes: int) -> Case:
    wide = (-(1 << 46), 1 << 46) if x is I64 else (-(1 << 24), 1 << 24) if x is I32 else None
    shifts = (-20, 3) if x is not I64 else (-20, 0)
    operands = (of(x, 2, 3, 7), of(I32, channels), of(I32, channels))
    return Case(Requantize(rounding, **attributes), operands, (wide, (1 << 30, (1 << 31) - 1), shifts))


def pools(x: DType) -> list[Case]:
    image = (of(x, 2, 9, 8, 3),)
    return [
        Case(MaxPool2d((3, 2), (2, 1)), image),
        Case(MaxPool2d((3, 3), (2, 2), PADDED), image),
        Case(AveragePool2d((3, 3), (2, 2), PADDED), image),
        Case(AveragePool2d((9, 8), (1, 1)), image),
    ]


LINEAR = [
    Case(Conv2d(), (of(I8, 1, 5, 6, 4), of(I8, 3, 1, 1, 4))),
    Case(
        Conv2d((2, 1), (1, 2), -128, 0),
        (of(I8, 2, 9, 8, 4), of(I8, 6, 3, 2, 4), of(I32, 6)),
        (None, None, (-9999, 9999)),
    ),
    Case(Conv2d((1, 1), (1, 1), 3, 17), (of(U8, 1, 7, 7, 4), of(U8, 6, 3, 3, 4))),
    Case(Conv2d((1, 1), (1, 1), 200, -5), (of(U8, 1, 7, 7, 4), of(I8, 6, 3, 3, 2))),
    Case(Conv2d((1, 2), (1, 1), 5, 0), (of(I8, 1, 7, 7, 4), of(I4, 6, 3, 3, 4))),
    Case(
        Conv2d((1, 1), (1, 1), 77, 0),
        (of(I16, 1, 7, 7, 4), of(I8, 6, 3, 3, 4), of(I64, 6)),
        (None, None, (-(1 << 40), 1 << 40)),
    ),
    Case(Conv2d(), (of(F32, 1, 5, 6, 4), of(F32, 3, 2, 2, 4), of(F32, 3))),
    Case(
        DepthwiseConv2d((2, 2), (1, 1), -3, 0),
        (of(I8, 2, 9, 8, 4), of(I8, 1, 3, 3, 4), of(I32, 4)),
        (None, None, (-99, 99)),
    ),
    Case(DepthwiseConv2d((1, 1), (2, 1), 9, 2), (of(U8, 1, 9, 8, 3), of(I8, 1, 3, 2, 6))),
    Case(DepthwiseConv2d(), (of(I16, 1, 5, 5, 3), of(I8, 1, 3, 2, 3))),
    Case(DepthwiseConv2d(), (of(F32, 1, 5, 6, 4), of(F32, 1, 2, 2, 4))),
    Case(FullyConnected(-7, 0), (of(I8, 5, 33), of(I8, 7, 33), of(I32, 7)), (None, None, (-99999, 99999))),
    Case(FullyConnected(7, 128), (of(U8, 1, 2, 33), of(U8, 7, 33))),
    Case(FullyConnected(-70, 0), (of(I16, 5, 33), of(I8, 7, 33), of(I64, 7)), (None, None, (-(1 << 40), 1 << 40))),
    Case(FullyConnected(), (of(F32, 5, 33), of(F32, 7, 33), of(F32, 7))),
    Case(FullyConnected(), (of(F32, 5, 33), of(I4, 7, 33), of(F32, 7))),
    Case(Conv2d(), (of(F32, 1, 5, 6, 4), of(I8, 3, 2, 2, 4)), (None, (-9, 9))),
]
MOVEMENT = [
    *(Case(Pad((0, 1, 0, 2), (0, 0, 3, 1), 5), (of(kind, 1, 3, 4, 2),)) for kind in (I8, U8, I16, I32, F32)),
    *(Case(Concat(1), (of(kind, 2, 3, 4), of(kind, 2, 5, 4))) for kind in (I8, I16, F32)),
    *(Case(Reshape((4, 6)), (of(kind, 2, 3, 4),)) for kind in (I8, F32)),
    *(Case(Transpose((2, 0, 1)), (of(kind, 2, 3, 4),)) for kind in (I8, I16, F32)),
    *(Case(Slice((0, 1, 2), (2, 7, 6), (1, 2, 3)), (of(kind, 2, 8, 9),)) for kind in (I8, I16, F32)),
    *(Case(Im2col((3, 2), (2, 1), (1, 2)), (of(kind, 2, 7, 6, 3),)) for kind in (I8, F32)),
    Case(Im2col((3, 2), (2, 1), (2, 1)), (of(I8, 1, 7, 6, 3),)),
    Case(Pad((0, 1, 0, 0), (0, 0, 3, 0), 5), (of(I8, 1, 3, 4, 2),)),
    *(Case(Relayout(), (of(kind, 2, 7, 6),)) for kind in (I8, F32)),
]
ARITHMETIC = [
    *(requantize(rounding, channels) for rounding in (Rounding.DOUBLE, Rounding.SINGLE) for channels in (1, 7)),
    requantize(Rounding.DOUBLE, 1, I8, input_zero_point=-100, left_shift=20),
    requantize(Rounding.SINGLE, 7, I32, output_zero_point=-128),
    requantize(Rounding.WIDE, 7, I64, output_zero_point=3),
    Case(
        ScaleShift(),
        (of(I32, 2, 3, 5), *[of(I32, 5)] * 3),
        ((-(1 << 16), 1 << 16), (0, 255), (-(1 << 20), 1 << 20), (0, 20)),
    ),
    *(Case(Clip(-100, 90, I8), (of(kind, 4, 50),)) for kind in (I8, I16, I32, I64)),
    Case(Offset(128, U8), (of(I8, 4, 90),)),
    Case(Offset(-128, I8), (of(U8, 4, 90),)),
    Case(Add(), (of(I32, 2, 3, 4, 5), of(I32, 1, 3, 1, 5)), ((-(1 << 29), 1 << 29),) * 2),
    Case(Add(), (of(F32, 2, 3, 4, 5), of(F32, 5))),
    Case(Lookup(), (of(I8, 3, 300), of(I8, 256))),
    Case(Lookup(), (of(U8, 3, 300), of(I16, 256))),
]
POOLS = [
    *(case for kind in (I8, U8, I16, I32, F32) for case in pools(kind)),
    *(Case(SumPool2d((3, 3), (2, 2), PADDED, -7), (of(kind, 2, 9, 8, 3),)) for kind in (I8, U8, I16)),
    *(Case(AveragePool2d((3, 3), (2, 2), PADDED, False, 128), (of(kind, 2, 9, 8, 3),)) for kind in (I8, U8, I16)),
]
FLOAT = [
    *(
        Case(Quantize(kind), (of(F32, 3, 40), of(F32, 1), of(I32, 1)), (None, (0.01, 0.02), (-9, 9)))
        for kind in (I4, I8, U8, I16)
    ),
    Case(Quantize(I8, 1), (of(F32, 3, 40, 2), of(F32, 40), of(I32, 40)), ((-9, 9), (0.01, 0.1), (-9, 9))),
    *(
        Case(Dequantize(), (of(kind, 3, 40), of(F32, 1), of(I32, 1)), (None, (0.01, 0.1), (-9, 9)))
        for kind in (I8, U8, I16, I32)
    ),
    Case(Dequantize(0), (of(I4, 3, 40), of(F32, 3), of(I32, 3)), (None, (0.01, 0.1), (0, 0))),
    Case(Clamp(0.0, math.inf), (of(F32, 3, 40),)),
    Case(Clamp(-1.0, 1.0), (of(F32, 3, 40),)),
    *(Case(Unary(kind, 0.3), (of(F32, 3, 40),), (DOMAINS.get(kind),)) for kind in UnaryKind),
    Case(LogSoftmax(), (of(F32, 3, 40),)),
    *(
        Case(Binary(kind), (of(F32, 3, 1, 5), of(F32, 4, 5)), ((0.1, 4.0),) if kind is BinaryKind.POWER else ())
        for kind in BinaryKind
    ),
    *(
        Case(Binary(kind), (of(dtype, 2, 3, 5), of(dtype, 5)), (None, (1, 100)))
        for kind in BinaryKind
        for dtype in (I8, U8, I16, I32, I64)
        if kind not in (BinaryKind.PRELU, BinaryKind.POWER)
    ),
    Case(Binary(BinaryKind.POWER), (of(I32, 2, 3, 5), of(I32, 5)), ((-9, 9), (0, 9))),
    *(Case(Reduce(kind, (0, 2)), (of(F32, 3, 4, 5),)) for kind in ReduceKind),
    *(Case(Reduce(kind, (1,)), (of(U8, 3, 4, 5),)) for kind in (ReduceKind.MAXIMUM, ReduceKind.MINIMUM)),
    Case(Reduce(ReduceKind.SUM, (1, 2), -7), (of(I8, 3, 4, 5),)),
    Case(CumSum(1, exclusive=True), (of(F32, 3, 4, 5),)),
    Case(CumSum(2, reverse=True), (of(I32, 3, 4, 5),)),
    Case(CumSum(1, exclusive=True, reverse=True, input_zero_point=-7), (of(I8, 3, 4, 5),)),
    *(
        Case(ArgExtreme(1, largest, last, kind), (of(x, 3, 7, 5),), ((0, 3) if x is I8 else None,))
        for largest, last, kind, x in ((True, False, I64, F32), (False, True, I32, I8), (True, True, I64, I8))
    ),
    Case(Normalise(1e-5), (of(F32, 3, 8),)),
    Case(Normalise(0.1, False, True), (of(F32, 2, 3, 8),)),
    Case(FixedNormalise(-5), (of(I8, 20, 3),)),
    Case(FixedNormalise(127), (of(I8, 2, 3, 800),)),
    Case(Normalise(0.1, False), (of(F32, 2, 3, 8),)),
    Case(Pick(((2, 0, 0), (0, 1, 2, 3), (4, 3, 2, 1, 0))), (of(I8, 3, 4, 5),)),
    Case(Pick(((0,), (0, 0, 1, 1))), (of(F32, 1, 2),)),
    Case(Gather(1), (of(F32, 3, 4, 5), of(I64, 2, 3)), (None, (-4, 3))),
    Case(Gather(0), (of(I8, 6, 5), of(I32, 4)), (None, (-9, 9))),
    Case(Resample((1,)), (of(F32, 2, 4, 3), of(I32, 5, 2), of(F32, 5, 2)), (None, (0, 3))),
    Case(
        Resample((1, 2)),
        (of(I8, 2, 4, 3), of(I32, 5, 2), of(I32, 5, 2), of(I32, 6, 2), of(I32, 6, 2)),
        (None, (0, 3), (-1024, 1024), (0, 2), (-1024, 1024)),
    ),
    Case(MatrixProduct(), (of(F32, 2, 1, 3, 4), of(F32, 3, 4, 5))),
    *(
        Case(MatrixProduct(-3, 7), (of(a, 2, 1, 3, 4), of(b, 3, 4, 5)))
        for a, b in ((I8, I8), (U8, I8), (U8, U8), (I16, I16), (I16, U8))
    ),
    Case(MatrixProduct(0, 7), (of(I16, 3, 300), of(I8, 300, 2))),
    *(Case(ToBitPlanes(group), (of(U8, 5, depth),)) for group, depth in ((16, 32), (16, 21), (8, 5))),
    *(Case(WriteBits(), (of(U8, 3, 2, 8, 2), of(U8, 1, 3), of(at, 1)), (None, None, (-40, 40))) for at in (I32, I64)),
    *(
        Case(WriteBits(), (of(U8, 3, 2, 8, 2), of(U8, 20, 3), of(I32, 20)), (None, None, (places, 9)))
        for places in (-9, 8)
    ),
    *(
        Case(SpreadBits(16, 2, 2, 131, first), (of(I8, 4 - first, rows, depth),))
        for first in (0, 1)
        for rows, depth in ((1, 16), (3, 8), (2, 5))
    ),
    *(Case(BitProduct(zero), (of(U8, 3, 21), of(U8, 6, 2, 8, 2))) for zero in (0, 131)),
    *(Case(Compare(kind), (of(x, 2, 300), of(x, 300))) for kind in CompareKind for x in (F32, I8, I32)),
    Case(Select(), (of(DType.BOOL, 2, 1), of(I16, 2, 30), of(I16, 30)), ((0, 1),)),
    Case(Select(), (of(DType.BOOL, 30), of(F32, 2, 30), of(F32, 1)), ((0, 1),)),
    *(Case(Convert(kind), (of(F32, 3, 40),), ((-300, 300),)) for kind in (I8, U8, I32, I64, DType.BOOL, F32)),
    *(Case(Convert(kind), (of(x, 3, 40),)) for kind in (I8, I32, DType.BOOL, F32) for x in (I8, U8, I16, I64)),
    *(Case(Convert(kind), (of(DType.BOOL, 3, 40),), ((0, 1),)) for kind in (I8, F32)),
    Case(Binary(BinaryKind.MAXIMUM), (of(DType.BOOL, 3, 4), of(DType.BOOL, 4)), ((0, 1), (0, 1))),
    *(
        Case(FixedDivide(3, zero, -5, 1374389534, shift), (of(I8, 4, 90), of(I8, 90)))
        for zero, shift in ((-128, 3), (9, -2))
    ),
    *(Case(FixedSoftmax16(1374389534, shift), (of(I16, 2, 3, count),)) for shift, count in ((3, 40), (-3, 700))),
    Case(FixedLogSoftmax(1374389534, 22, -124, 1717986918, -22), (of(I8, 3, 5, 40),)),
    Case(FixedLogSoftmax(1374389534, 26, -8, 1717986918, -26), (of(I8, 5, 400),)),
    *(
        Case(Sigmoid16(multiplier, shift, tangent), (of(I16, 3, 900),))
        for multiplier, shift in ((3, 0), (20000, 14))
        for tangent in (True, False)
    ),
    Case(Softmax(0.5), (of(F32, 3, 40),)),
    *(
        Case(FixedSoftmax(1374389534, 22, -124, result), (of(x, 3, 5, 40),))
        for x in (I8, U8)
        for result in (I8, U8, I16)
    ),
    Case(FixedSoftmax(1374389534, 26, -15, I8), (of(I8, 3, 5, 400),)),
]
GATES = tuple((1_500_000_000 + gate, -4 - gate) for gate in range(4))
RECURRENT = [
    *(
        Case(
            FixedLstm(-7, 3, GATES, GATES[::-1], (1 << 30, -14), (1 << 30, -17), (1_300_000_000, -22), bits, clip),
            (of(I8, 3, 2, 5), of(I8, 16, 5), of(I8, 16, 4), of(I32, 16), of(I16, 2, 2, 4)),
            (None, None, None, (-20000, 20000)),
        )
        for bits, clip in ((12, 1 << 15), (9, 900), (15, 32767))
    ),
    *(
        Case(
            Recurrent(kind, reverse, kind is RecurrentKind.GRU and reverse, curves),
            (of(F32, 3, 2, 5), of(F32, rows, 5), of(F32, rows, 4), of(F32, 2 * rows), of(F32, kept, 2, 4), *more),
        )
        for reverse in (False, True)
        for kind, rows, kept, curves, more in (
            (RecurrentKind.LSTM, 16, 2, (), (of(F32, 12),)),
            (RecurrentKind.GRU, 12, 1, (), ()),
            (RecurrentKind.RNN, 4, 1, (Curve.RELU,), ()),
        )
    ),
    *(
        Case(
            FixedRecurrent(kind, -7, GATES[: kind.gates], GATES[1 : kind.gates + 1], after),
            (of(x, 3, 2, 5), of(I8, rows, 5), of(I8, rows, 4), of(I32, 2 * rows), of(I16, 1, 2, 4)),
            (None, None, None, (-20000, 20000)),
        )
        for x in (I8, I16)
        for kind, rows, after in (
            (RecurrentKind.GRU, 12, False),
            (RecurrentKind.GRU, 12, True),
            (RecurrentKind.RNN, 4, False),
        )
    ),
    Case(FixedStandard(40, 3, 500), (of(I8, 3, 5, 40),)),
    Case(FixedStandard(40, -9, 70, centred=False), (of(I16, 5, 40),), ((-300, 300),)),
    Case(RowProducts(-9), (of(I8, 2, 3, 7), of(I8, 3, 7), of(I32, 3)), (None, None, (-99999, 99999))),
    Case(RowProducts(), (of(I16, 2, 3, 7), of(I16, 3, 7))),
    Case(RowProducts(), (of(F32, 2, 3, 7), of(F32, 3, 7), of(F32, 3))),
]
BOOL = DType.BOOL
SEQUENCE = [
    *(
        Case(WriteRow(1), (of(x, 3, 7, 2), of(x, 3, 1, 2), of(at, 1)), (None, None, (-9, 9)))
        for x in (I8, F32)
        for at in (I32, I64)
    ),
    *(
        Case(
            operator,
            (of(x, 4, rows, 8), of(x, heads, 20, 8), of(x, heads, 20, 5), of(BOOL, masks, 20)),
            (*[None] * 3, (0, 1)),
        )
        for operator, x in ((Attention(0.3), F32), (FixedAttention(40000, 21, -7, 90), I8))
        for rows, heads, masks in ((1, 2, 1), (3, 4, 3), (2, 1, 1))
    ),
    Case(AttentionWeights(40000, 21), (of(I32, 1, 20, 1, 3), of(BOOL, 1, 20)), ((-9000, 9000), (0, 1))),
    Case(AttentionEnd(2, 2), (of(I32, 1, 8, 1, 6), of(I32, 1, 8, 1, 1)), ((-90000, 90000), (0, 90000))),
]
CASES = [*LINEAR, *MOVEMENT, *ARITHMETIC, *POOLS, *FLOAT, *RECURRENT, *SEQUENCE]


def test_every_operator_has_a_case() -> None:
    assert {type(case.operator) for case in CASES} == set(OPERATORS.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy_and_onnx_runtime_agree(case: Case) -> None:
    """Integers exactly, floats within `FLOAT_TOLERANCE`, and the type rule tells what comes out."""
    pytest.importorskip("onnxruntime")
    builder = GraphBuilder("case")
    names = [builder.input(f"x{index}", kind) for index, kind in enumerate(case.operands)]
    graph = builder.finish([builder.add(case.operator, names, "y")])
    for seed in range(2):
        arrays = case.arrays(seed)
        result = case.operator.evaluate(arrays)
        assert (result.shape, result.dtype) == (graph.types["y"].shape, graph.types["y"].dtype.numpy)
        assert check_graph(graph, dict(zip(names, arrays, strict=True))) == 1


@pytest.mark.parametrize("case", MOVEMENT, ids=str)
def test_pieces_are_the_operator(case: Case) -> None:
    """Strided views of row-major operands, put where the pieces say, are the result."""
    arrays = case.arrays()
    expected, pieces = case.operator.evaluate(arrays), case.operator.pieces(case.operands)
    if pieces is None:
        assert isinstance(case.operator, Pad | Im2col)
        return
    found = np.full(expected.shape, 77, expected.dtype)
    for piece in pieces:
        source, target = arrays[piece.operand], found[box_slices(piece.box)]
        if piece.walks:
            strides = [source.strides[axis] * step for axis, step in piece.walks]
            first = sum(a * b for a, b in zip(piece.start, source.strides, strict=True))
            source = np.ndarray(target.shape, source.dtype, source.tobytes(), first, strides)
        elif piece.before:
            target[...] = piece.fill
            target = target[tuple(slice(a, a + n) for a, n in zip(piece.before, source.shape, strict=True))]
        target[...] = source.reshape(target.shape) if case.operator.is_view else source
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_traits_are_true(case: Case) -> None:
    """What moves or chooses makes no new elements; what is pointwise gives each part from the same part."""
    arrays = case.arrays()
    result, chosen = case.operator.evaluate(arrays), case.operator.chosen_from(arrays)
    if chosen and not isinstance(case.operator, Pad):
        assert np.isin(result, np.concatenate([array.reshape(-1) for array in chosen])).all()
    assert not case.operator.moves_only or len(chosen) == len(arrays)
    if case.operator.pointwise:
        part = tuple((size // 2, size) for size in result.shape)
        operator, boxes = case.operator.crop(part, case.operands)
        read = [array[box_slices(box)] for array, box in zip(arrays, boxes, strict=True)]
        assert operator == case.operator
        assert np.array_equal(operator.evaluate(read), result[box_slices(part)], equal_nan=result.dtype == np.float32)


def plain_fixed_point(x: int, multiplier: int, shift: int, rounding: Rounding) -> int:
    """The definitions in unbounded integers, one value at a time."""
    if rounding is Rounding.DOUBLE:
        high = math.floor(Fraction(x * multiplier, 1 << 31) + Fraction(1, 2))
        size = math.floor(Fraction(abs(high), 1 << -shift) + (Fraction(1, 2) if shift else 0))
        return size if high >= 0 else -size
    if rounding is Rounding.WIDE:
        multiplier = (multiplier + (1 << 15)) >> 16 if multiplier < 0x7FFF0000 else 0x7FFF
        return (x * multiplier + (1 << (14 - shift))) >> (15 - shift)
    if rounding is Rounding.DOWN:
        return math.floor(Fraction(x * multiplier, 1 << (31 - shift)))
    if rounding is Rounding.AWAY:
        size = math.floor(Fraction(abs(x * multiplier), 1 << (31 - shift)) + Fraction(1, 2))
        return size if x * multiplier >= 0 else -size
    if rounding is Rounding.FLOAT32:
        product = float(np.float32(x) * np.float32(math.ldexp(multiplier, shift - 31)))
        return int(min(max(round(product), -MOST_FLOAT), MOST_FLOAT))
    return (x * multiplier + (1 << (30 - shift))) >> (31 - shift)


@given(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(1 << 30, (1 << 31) - 1),
    st.integers(-31, 0),
    st.sampled_from(list(Rounding)),
)
@settings(deadline=None, max_examples=500)
def test_fixed_point_is_its_definition(x: int, multiplier: int, shift: int, rounding: Rounding) -> None:
    found = fixed_point(np.array([x], np.int64), multiplier, shift, rounding)
    assert found.tolist() == [plain_fixed_point(x, multiplier, shift, rounding)]


def test_the_roundings_differ_where_they_should() -> None:
    """A negative half: DOUBLE moves it away from zero, SINGLE up; a 31-bit multiplier is cut by WIDE."""
    half = np.array([-3], np.int64)
    assert fixed_point(half, 1 << 30, 0, Rounding.DOUBLE).tolist() == [-1]
    assert fixed_point(half, 1 << 30, -1, Rounding.DOUBLE).tolist() == [-1]
    assert fixed_point(np.array([-2], np.int64), 1 << 30, -1, Rounding.DOUBLE).tolist() == [-1]
    assert fixed_point(np.array([-2], np.int64), 1 << 30, -1, Rounding.SINGLE).tolist() == [0]
    large = np.array([1 << 29], np.int64)
    wide, single = (fixed_point(large, (1 << 30) + 99, 0, kind) for kind in (Rounding.WIDE, Rounding.SINGLE))
    assert wide.tolist() != single.tolist()


def plain_convolution(x: Array, w: Array, stride: Sequence[int], dilation: Sequence[int], zx: int, zw: int) -> Array:
    """A convolution without groups by its definition, element by element."""
    _, height, width, _ = x.shape
    outputs, rows, columns, _ = w.shape
    high = (height - (rows - 1) * dilation[0] - 1) // stride[0] + 1
    wide = (width - (columns - 1) * dilation[1] - 1) // stride[1] + 1
    y = np.zeros((len(x), high, wide, outputs), np.int64)
    for n, i, j, o in np.ndindex(*y.shape):
        for a, b in np.ndindex(rows, columns):
            pixel = x[n, i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]].astype(np.int64) - zx
            y[n, i, j, o] += int(pixel @ (w[o, a, b].astype(np.int64) - zw))
    return y


def test_convolutions_are_their_definition() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(-128, 128, (2, 8, 7, 3)).astype(np.int8)
    w = rng.integers(-128, 128, (4, 3, 2, 3)).astype(np.int8)
    bias = rng.integers(-999, 999, 4).astype(np.int32)
    expected = plain_convolution(x, w, (2, 1), (1, 2), -5, 3)
    np.testing.assert_array_equal(Conv2d((2, 1), (1, 2), -5, 3).evaluate([x, w, bias]), expected + bias)
    halves = Conv2d((2, 1), (1, 2), -5, 3).evaluate([np.concatenate([x, x + 1], axis=3), w])
    np.testing.assert_array_equal(halves[..., :2], expected[..., :2])
    patches = Im2col((3, 2), (2, 1), (1, 2)).evaluate([x])
    product = FullyConnected(-5, 3).evaluate([patches, w.reshape(4, -1)])
    np.testing.assert_array_equal(product, expected)
    deep = rng.integers(-128, 128, (1, 3, 2, 6)).astype(np.int8)
    found = DepthwiseConv2d((2, 1), (1, 2), -5, 3).evaluate([x, deep])
    for channel in range(6):
        single = plain_convolution(
            x[..., channel // 2 : channel // 2 + 1], deep[..., channel : channel + 1], (2, 1), (1, 2), -5, 3
        )
        np.testing.assert_array_equal(found[..., channel], single[..., 0])


@pytest.mark.parametrize("dtype", [DType.INT8, DType.UINT8, DType.INT16])
@pytest.mark.parametrize("terms", [500, 515, 40_000])
def test_long_sums_are_exact(dtype: DType, terms: int) -> None:
    """Sums of the largest products, which wrap where 32 bits do not hold them, and of single ones beside large sums."""
    for x, w, zero_point in product((dtype.low, dtype.high), (-128, 127), (0, 1, dtype.low)):
        image, weights = np.full((1, 1, 1, terms), x, dtype.numpy), np.full((3, 1, 1, terms), w, np.int8)
        weights[1, :, :, ::2], weights[2, :, :, -1] = -1 - w, 1
        wide = (image.reshape(-1).astype(np.int64) - zero_point) @ weights.reshape(3, -1).T.astype(np.int64)
        wanted = wide.astype(np.int64 if dtype is DType.INT16 else np.int32)
        operands = image, weights, np.arange(3).astype(wanted.dtype)
        found = Conv2d(input_zero_point=zero_point).evaluate(operands).reshape(-1)
        dense = FullyConnected(zero_point).evaluate([image[0, 0], weights[:, 0, 0], operands[2]])
        np.testing.assert_array_equal(found, wanted + operands[2], strict=True)
        np.testing.assert_array_equal(dense[0], found, strict=True)


def test_pools_are_their_definition() -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(-128, 128, (1, 6, 5, 2)).astype(np.int8)
    kernel, stride = (3, 3), (2, 2)
    largest = MaxPool2d(kernel, stride, PADDED).evaluate([x])
    average = AveragePool2d(kernel, stride, PADDED).evaluate([x])
    total = SumPool2d(kernel, stride, PADDED, 9).evaluate([x])
    real = AveragePool2d(kernel, stride, PADDED).evaluate([x.astype(np.float32)])
    for _, i, j, c in np.ndindex(*largest.shape):
        rows = [row for row in range(2 * i - 1, 2 * i + 2) if 0 <= row < 6]
        columns = [column for column in range(2 * j - 2, 2 * j + 1) if 0 <= column < 5]
        window = [int(x[0, row, column, c]) for row in rows for column in columns]
        mean = Fraction(sum(window), len(window))
        away = math.floor(abs(mean) + Fraction(1, 2)) * (1 if mean >= 0 else -1)
        assert largest[0, i, j, c] == max(window)
        assert average[0, i, j, c] == away
        assert total[0, i, j, c] == sum(window) - 9 * len(window)
        assert real[0, i, j, c] == pytest.approx(float(mean), abs=1e-5)


def test_fixed_softmax_is_a_softmax() -> None:
    """Within the rounding of 8 bits and its Q0.31 exponentials; rows sum to about 1."""
    x = np.random.default_rng(5).integers(-128, 128, (200, 12)).astype(np.int8)
    operator = FixedSoftmax(1717986918, 22, -248, I8)  # scale 0.05
    found = (operator.evaluate([x]).astype(np.float64) + 128) / 256
    powers = np.exp(0.05 * (x.astype(np.float64) - x.max(axis=1, keepdims=True)))
    expected = np.minimum(powers / powers.sum(axis=1, keepdims=True), 255 / 256)
    assert np.abs(found - expected).max() <= 0.5 / 256 + 1e-6


def test_type_rules_refuse_what_does_not_fit() -> None:
    refused: list[tuple[Operator, list[TensorType]]] = [
        (MaxPool2d((2, 2), (1, 1), ((2, 0), (0, 0))), [of(I8, 1, 4, 4, 1)]),
        (AveragePool2d((5, 5), (1, 1)), [of(I8, 1, 4, 4, 1)]),
        (SumPool2d((2, 2), (1, 1)), [of(F32, 1, 4, 4, 1)]),
        (FixedSoftmax(1 << 30, 20, -100, I8), [of(I16, 1, 4)]),
        (FixedSoftmax(1 << 30, 20, -100, I8), [of(I8, 1, 5000)]),
        (Quantize(I8), [of(F32, 3, 4), of(F32, 3), of(I32, 3)]),
        (Quantize(F32), [of(F32, 3, 4), of(F32, 1), of(I32, 1)]),
        (Dequantize(), [of(F32, 3, 4), of(F32, 1), of(I32, 1)]),
        (Clamp(0, 1), [of(I8, 3)]),
        (Softmax(), [of(I8, 3)]),
        (Clip(-200, 0, I8), [of(I32, 3)]),
    ]
    for operator, kinds in refused:
        with pytest.raises(ValueError, match=r"."):
            operator.infer(kinds)


WHOLE_ONLY = (
    *(Reshape, FixedLstm, FixedRecurrent, Recurrent),
    *(Attention, FixedAttention, WriteRow),
)
"""Operators that are never computed in parts."""
SPREAD_ROWS = [case for case in CASES if isinstance(case.operator, SpreadBits) and case.operands[0].shape[1] > 1]
"""Cropped by whole heads only."""
CROPPED = [case for case in CASES if not isinstance(case.operator, WHOLE_ONLY) and case not in SPREAD_ROWS]


def random_box(data: st.DataObject, shape: Sequence[int]) -> Box:
    """A part of a tensor, whole axes often."""
    spans = []
    for size in shape:
        if data.draw(st.booleans()):
            spans.append((0, size))
            continue
        start = data.draw(st.integers(0, size - 1))
        spans.append((start, data.draw(st.integers(start + 1, size))))
    return tuple(spans)


@pytest.mark.parametrize("case", CROPPED, ids=str)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_cropping_computes_the_crop(case: Case, data: st.DataObject) -> None:
    """The cropped operator on the cropped operands is the crop of the whole result."""
    kinds = case.operands
    box = random_box(data, case.operator.infer(kinds).shape)
    try:
        operator, boxes = case.operator.crop(box, kinds)
    except ValueError as error:
        assert "not tiled" in str(error)
        return
    arrays = case.arrays()
    parts = [array[box_slices(part)] for array, part in zip(arrays, boxes, strict=True)]
    cut = [TensorType(box_shape(part), kind.dtype) for part, kind in zip(boxes, kinds, strict=True)]
    expected = case.operator.evaluate(arrays)[box_slices(box)]
    assert operator.infer(cut) == TensorType(box_shape(box), case.operator.infer(kinds).dtype)
    found = operator.evaluate(parts)
    if found.dtype == np.float32:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", CROPPED, ids=str)
def test_the_first_row_can_be_cropped(case: Case) -> None:
    """No operator refuses every box."""
    shape = case.operator.infer(case.operands).shape
    box = ((0, 1), *((0, size) for size in shape[1:]))
    _, boxes = case.operator.crop(box, case.operands)
    assert len(boxes) == len(case.operands)


@pytest.mark.parametrize("kind", WHOLE_ONLY)
def test_some_operators_are_not_tiled(kind: type[Operator]) -> None:
    case = next(case for case in CASES if isinstance(case.operator, kind))
    with pytest.raises(ValueError, match="cannot be tiled"):
        case.operator.crop(((0, 1),), case.operands)
