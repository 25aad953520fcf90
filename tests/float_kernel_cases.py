"""Random regions of float operators, and of those that select or combine elements of any type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

import recurrent_cases
from core_kernel_cases import Case, Maker
from dovetail.ir.operators.activation import Clamp, LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Concat, Gather, Pad, Pick, Resample, Slice, Transpose
from dovetail.ir.operators.reduction import ArgExtreme, AveragePool2d, MaxPool2d, Normalise, Reduce, ReduceKind
from dovetail.ir.types import DType, TensorType

F32 = DType.FLOAT32
ANY = (F32, DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64)
INTEGERS = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16, DType.INT32, DType.UINT32, DType.INT64)
STEPS = ("ROUND", "FLOOR", "CEILING", "SIGN", "THRESHOLDED_RELU")
STEEP = ("SQUARE_ROOT", "LOGARITHM", "RECIPROCAL", "EXPONENTIAL", "SQUARE", "RECIPROCAL_ROOT", "SINE", "COSINE")
SAFE = tuple(kind for kind in UnaryKind if kind.name not in (*STEPS, *STEEP))
"""Functions that do not enlarge a small difference."""
STEPPED = (BinaryKind.MODULO, BinaryKind.POWER)


def shape_of(maker: Maker, least: int = 1) -> tuple[int, ...]:
    return tuple(maker.number(1, 5) for _ in range(maker.number(least, 4)))


def broadcast(maker: Maker, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(maker.one_of(1, size, size) for size in shape)[maker.number(0, len(shape) - 1) :]


def finished(maker: Maker, value: str) -> str:
    """None to three pointwise float operators behind an anchor."""
    for _ in range(maker.number(0, 3)):
        kind = maker.builder.type_of(value)
        form = maker.one_of("clamp", "unary", "add", "binary")
        if form == "clamp":
            value = maker.add(Clamp(-maker.number(0, 9), maker.one_of(6.0, float("inf"))), value)
        elif form == "unary":
            value = maker.add(Unary(maker.one_of(*SAFE), 0.25), value)
        else:
            other = maker.constant(maker.one_of(kind.shape[-1:], (1,), kind.shape), F32)
            kinds = (BinaryKind.MULTIPLY, BinaryKind.SUBTRACT, BinaryKind.MAXIMUM, BinaryKind.PRELU)
            value = maker.add(Add() if form == "add" else Binary(maker.one_of(*kinds)), value, other)
    return value


def convolution(maker: Maker) -> Case:
    depthwise = maker.one_of(True, False)
    kernel, stride = (maker.number(1, 4), maker.number(1, 3)), (maker.number(1, 2), maker.number(1, 3))
    dilation = (maker.one_of(1, 1, 2), maker.one_of(1, 2))
    groups, depth = (maker.one_of(1, 3, 4), 1) if depthwise else (maker.one_of(1, 1, 2), maker.number(1, 4))
    outputs = groups * maker.number(1, 3)
    sizes = [(k - 1) * d + maker.number(1, 6) for k, d in zip(kernel, dilation, strict=True)]
    x = maker.input((maker.one_of(1, 2), sizes[0], sizes[1], groups * depth), F32)
    if maker.one_of(True, False):
        sides = [maker.number(0, (kernel[axis % 2] - 1) * dilation[axis % 2]) for axis in range(4)]
        x = maker.add(Pad((0, sides[0], sides[1], 0), (0, sides[2], sides[3], 0), 0.0), x)
    shape = (1, *kernel, outputs) if depthwise else (outputs, *kernel, depth)
    narrow = maker.one_of(F32, F32, DType.INT8, DType.INT4, DType.INT2)
    weights = maker.constant(shape, narrow) if maker.one_of(True, True, False) else maker.input(shape, F32)
    bias = [maker.constant((outputs,), F32)] if maker.one_of(True, False) else []
    value = maker.add((DepthwiseConv2d if depthwise else Conv2d)(stride, dilation), x, weights, *bias)
    return maker.case(finished(maker, value))


def product(maker: Maker) -> Case:
    depth, outputs = maker.number(1, 20), maker.number(1, 9)
    lead = shape_of(maker)
    if maker.one_of(True, False):
        bias = [maker.constant((outputs,), F32)] if maker.one_of(True, False) else []
        x = maker.input((*lead, depth), F32)
        weights = maker.constant((outputs, depth), maker.one_of(F32, DType.INT8, DType.INT4, DType.INT2))
        return maker.case(finished(maker, maker.add(FullyConnected(), x, weights, *bias)))
    a = maker.input((*lead, maker.number(1, 4), depth), F32)
    b = maker.input((*broadcast(maker, lead), depth, outputs), F32)
    return maker.case(finished(maker, maker.add(MatrixProduct(), a, b)))


def pooling(maker: Maker) -> Case:
    kernel = (maker.number(1, 4), maker.number(1, 4))
    shape = (maker.one_of(1, 2), kernel[0] + maker.number(0, 5), kernel[1] + maker.number(0, 5), maker.number(1, 5))
    sides = [maker.one_of(0, maker.number(0, kernel[axis // 2] - 1)) for axis in range(4)]
    kind = maker.one_of(MaxPool2d, AveragePool2d)
    stride = (maker.number(1, 3), maker.number(1, 3))
    operator = kind(kernel, stride, ((sides[0], sides[1]), (sides[2], sides[3])))
    return maker.case(finished(maker, maker.add(operator, maker.input(shape, F32))))


def pointwise(maker: Maker) -> Case:
    shape = shape_of(maker)
    x = maker.input(shape, F32)
    operator = maker.one_of(Add(), *(Binary(kind) for kind in BinaryKind if kind not in STEPPED))
    return maker.case(finished(maker, maker.add(operator, x, maker.input(broadcast(maker, shape), F32))))


def rows(maker: Maker) -> Case:
    operator = maker.one_of(
        Softmax(), Softmax(-0.3), LogSoftmax(), Normalise(1e-3), Normalise(0.1, False), Normalise(0.1, False, True)
    )
    return maker.case(finished(maker, maker.add(operator, maker.input((*shape_of(maker), maker.number(1, 30)), F32))))


def reduction(maker: Maker) -> Case:
    shape = shape_of(maker)
    axes = tuple(axis for axis in range(len(shape)) if maker.one_of(True, False))
    kind = maker.one_of(ReduceKind.SUM, ReduceKind.MEAN, ReduceKind.MAXIMUM, ReduceKind.MINIMUM)
    return maker.case(finished(maker, maker.add(Reduce(kind, axes), maker.input(shape, F32))))


def resample(maker: Maker) -> Case:
    shape = shape_of(maker)
    axes, operands = tuple(axis for axis in range(len(shape)) if maker.one_of(True, False)), []
    for axis in axes:
        result, taps = maker.number(1, 7), maker.number(1, 4)
        places = np.random.default_rng(maker.number(0, 99)).integers(0, shape[axis], (result, taps)).astype(np.int32)
        operands += [maker.builder.constant("places", places), maker.constant((result, taps), F32)]
    return maker.case(finished(maker, maker.add(Resample(axes), maker.input(shape, F32), *operands)))


def integers(maker: Maker) -> Case:
    shape, dtype = shape_of(maker), maker.one_of(*INTEGERS)
    kind = maker.one_of(*(kind for kind in BinaryKind if kind is not BinaryKind.PRELU))
    value = maker.add(Binary(kind), maker.input(shape, dtype), maker.input(broadcast(maker, shape), dtype))
    return maker.case(value)


def integer_reduction(maker: Maker) -> Case:
    shape = shape_of(maker)
    axes = tuple(axis for axis in range(len(shape)) if maker.one_of(True, False))
    if maker.one_of(True, False):
        dtype = maker.one_of(DType.INT8, DType.UINT8)
        value = maker.add(Reduce(ReduceKind.SUM, axes, maker.number(-9, 200)), maker.input(shape, dtype))
        return maker.case(maker.clip(maker.requantize(value)))
    kind = maker.one_of(ReduceKind.MAXIMUM, ReduceKind.MINIMUM)
    return maker.case(maker.add(Reduce(kind, axes), maker.input(shape, maker.one_of(*INTEGERS))))


def extreme(maker: Maker) -> Case:
    shape, dtype = shape_of(maker), maker.one_of(*ANY)
    x = maker.input(shape, dtype)
    axis, kind = maker.number(0, len(shape) - 1), maker.one_of(DType.INT32, DType.INT64)
    operator = ArgExtreme(axis, maker.one_of(True, False), maker.one_of(True, False), kind)
    return maker.case(maker.add(operator, x))


def places_along(maker: Maker, size: int) -> tuple[int, ...]:
    plain = tuple(range(size))
    chosen = tuple(maker.number(0, size - 1) for _ in range(maker.number(1, 6)))
    return maker.one_of(plain, plain[::-1], (0,) * 3, chosen)


def selection(maker: Maker) -> Case:
    shape, dtype = shape_of(maker), maker.one_of(*ANY)
    x = maker.input(shape, dtype)
    if maker.one_of(True, False):
        return maker.case(maker.add(Pick(tuple(places_along(maker, size) for size in shape)), x))
    axis = maker.number(0, len(shape) - 1)
    wanted = TensorType(maker.one_of((), (3,), (2, 2)), maker.one_of(DType.INT32, DType.INT64))
    chosen = np.asarray(np.random.default_rng(maker.number(0, 99)).integers(-9, 9, wanted.shape))
    indices = maker.builder.input("indices", wanted)
    case = maker.case(maker.add(Gather(axis), x, indices))
    return Case(case.graph, {**case.inputs, indices: chosen.astype(wanted.dtype.numpy)})


def movement(maker: Maker) -> Case:
    shape = shape_of(maker)
    x = maker.input(shape, F32)
    form = maker.one_of("transpose", "concat", "pad", "slice")
    if form == "transpose":
        value = maker.add(Transpose(maker.shuffled(range(len(shape)))), x)
    elif form == "concat":
        value = maker.add(Concat(0), x, maker.input((maker.number(1, 3), *shape[1:]), F32))
    elif form == "pad":
        sides = [tuple(maker.number(0, 3) for _ in shape) for _ in range(2)]
        value = maker.add(Pad(sides[0], sides[1], maker.one_of(0.0, -1.5, float("-inf"))), x)
    else:
        start = tuple(maker.number(0, size - 1) for size in shape)
        value = maker.add(Slice(start, shape, tuple(maker.number(1, 3) for _ in shape)), x)
    return maker.case(value)


FLOAT: Mapping[str, Callable[[Maker], Case]] = {
    "convolution": convolution,
    "product": product,
    "pooling": pooling,
    "pointwise": pointwise,
    "rows": rows,
    "reduction": reduction,
    "resample": resample,
    "recurrent": recurrent_cases.recurrent,
    "rows of products": recurrent_cases.float_rows,
}
"""Results agree up to the order of rounding."""

EXACT: Mapping[str, Callable[[Maker], Case]] = {
    "integers": integers,
    "integer_reduction": integer_reduction,
    "extreme": extreme,
    "selection": selection,
    "movement": movement,
    **recurrent_cases.EXACT,
}
"""Results agree in every bit."""
