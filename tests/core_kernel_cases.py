"""Random regions for the tests of the core kernels.

A seeded generator, not hypothesis: many cases share one compilation, so nothing could be shrunk, and its draws
repeat simple choices (of 40 movements, it drew 20 pads and no slice).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder, verify
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import (
    Add,
    Clip,
    Dequantize,
    Lookup,
    Offset,
    Quantize,
    Requantize,
    Rounding,
    ScaleShift,
)
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Im2col, Pad, Reshape, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.types import Array, DType, TensorType

BYTES = (DType.INT8, DType.UINT8)
ACTIVATIONS = (DType.INT8, DType.UINT8, DType.INT16)


@dataclass(frozen=True)
class Case:
    """A region and operands to run it on."""

    graph: Graph
    inputs: Mapping[str, Array]


def random_array(seed: int, kind: TensorType, reach: int = 1 << 40) -> Array:
    """Integers over the whole type, its extremes among them, limited to +-reach; floats around 0."""
    generator = np.random.default_rng(seed)
    if kind.dtype is DType.FLOAT32:
        values = generator.normal(0, 50, kind.shape).astype(np.float32)
        halves = np.round(values) + np.float32(0.5)
        return np.where(generator.random(kind.shape) < 0.3, halves, values).astype(np.float32)
    low, high = max(kind.dtype.low, -reach), min(kind.dtype.high, reach)
    integers = generator.integers(low, high, kind.shape, endpoint=True)
    chosen = generator.random(kind.shape)
    mixed = np.where(chosen < 0.05, low, np.where(chosen > 0.95, high, integers))
    return mixed.astype(kind.dtype.numpy)


class Maker:
    """Draws the parts of a region."""

    def __init__(self, seed: str, sizes: str = "") -> None:
        """Makers of one seed and other `sizes` draw regions of one structure with other numbers, as far as they can."""
        self.random = random.Random(seed)
        self.sizes = random.Random(seed + sizes) if sizes else self.random
        self.builder = GraphBuilder("region")
        self.seed = self.number(0, 1 << 31)

    def number(self, low: int, high: int) -> int:
        return self.sizes.randint(low, high)

    def one_of(self, *options: Any) -> Any:
        return self.random.choice(options)

    def shuffled(self, items: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.random.sample(items, len(items)))

    def array(self, kind: TensorType, reach: int = 1 << 40) -> Array:
        self.seed += 1
        return random_array(self.seed, kind, reach)

    def input(self, shape: tuple[int, ...], dtype: DType) -> str:
        return self.builder.input(self.builder.fresh("x"), TensorType(shape, dtype))

    def constant(self, shape: tuple[int, ...], dtype: DType, reach: int = 1 << 40) -> str:
        return self.builder.constant("k", self.array(TensorType(shape, dtype), reach), dtype)

    def add(self, operator: Operator, *operands: str) -> str:
        return self.builder.add(operator, operands)

    def zero_point(self, dtype: DType) -> int:
        return int(self.one_of(0, dtype.low, self.number(max(dtype.low, -200), min(dtype.high, 255))))

    def requantize(self, value: str, rounding: Rounding | None = None) -> str:
        kind = self.builder.type_of(value)
        size = self.one_of(1, kind.shape[-1])
        wide = kind.dtype is DType.INT64
        rounding = rounding or self.one_of(Rounding.DOUBLE, Rounding.SINGLE, *([Rounding.WIDE] if wide else []))
        generator = np.random.default_rng(self.number(0, 999))
        multiplier = generator.integers(1 << 30, 1 << 31, size).astype(np.int32)
        typical = {8: -1, 16: -8, 32: -10, 64: -16}[kind.dtype.bits]
        shift = generator.integers(typical - 3, typical + 2, size).astype(np.int32)
        if kind.dtype is not DType.INT64 and self.one_of(True, False, False):
            shift[self.number(0, size - 1)] = self.one_of(0, 3)
        names = (self.builder.constant("m", multiplier), self.builder.constant("s", shift))
        narrow = kind.dtype.bits <= 8
        offset = self.number(-128, 127) if kind.dtype.bits <= 16 else 0
        raised = self.one_of(0, 0, 12) if narrow else 0
        operator = Requantize(rounding, offset, self.number(-128, 127), raised)
        return self.add(operator, value, *names)

    def clip(self, value: str) -> str:
        dtype = self.one_of(DType.INT8, DType.UINT8, DType.INT16)
        low, high = dtype.low, dtype.high
        if self.one_of(True, False, False, False):
            low = self.number(dtype.low, 0)
            high = self.number(low, dtype.high)
        return self.add(Clip(low, high, dtype), value)

    def finished(self, value: str) -> str:
        """Pointwise operators behind an anchor: none, or a requantisation with what may follow it."""
        kind = self.builder.type_of(value)
        ending = self.one_of("requantize", "requantize", "none", "residual", "lookup", "scale")
        if ending == "none" or (ending == "scale" and kind.dtype is DType.INT64):
            return value
        if ending == "scale":
            size = self.one_of(1, kind.shape[-1])
            shift = self.builder.constant("s", np.full(size, self.number(0, 12), np.int32))
            scale, offset = self.constant((size,), DType.INT32, 15), self.constant((size,), DType.INT32, 900)
            return self.clip(self.add(ScaleShift(), value, scale, offset, shift))
        result = self.requantize(value)
        if ending == "residual":
            other = self.requantize(self.input(kind.shape, DType.INT8))
            result = self.requantize(self.add(Add(), result, other))
        result = self.clip(result)
        if ending == "lookup" and self.builder.type_of(result).dtype in BYTES:
            table = self.constant((256,), self.one_of(DType.INT8, DType.INT16))
            return self.add(Lookup(), result, table)
        return result

    def case(self, output: str) -> Case:
        graph = self.builder.finish([output])
        verify(graph)
        inputs = {name: self.array(graph.types[name], 1 << 22) for name in graph.inputs}
        return Case(graph, inputs)


def padded(maker: Maker, x: str, kernel: tuple[int, int], dilation: tuple[int, int], zero_point: int) -> str:
    """`x`, often with a pad no wider than the window."""
    if maker.one_of(True, True, False) is False:
        return x
    sides = [maker.number(0, (kernel[axis % 2] - 1) * dilation[axis % 2]) for axis in range(4)]
    value = maker.one_of(zero_point, zero_point, maker.number(0, 100))
    before, after = (0, sides[0], sides[1], 0), (0, sides[2], sides[3], 0)
    return maker.add(Pad(before, after, value), x)


def image(maker: Maker, channels: int, dtype: DType, span: tuple[int, int]) -> str:
    sizes = [maker.number(span[axis], span[axis] + 6) for axis in (0, 1)]
    return maker.input((maker.one_of(1, 1, 2), sizes[0], sizes[1], channels), dtype)


def convolution(depthwise: bool, maker: Maker) -> Case:
    dtype = maker.one_of(*ACTIVATIONS)
    kernel = (maker.number(1, 4), maker.number(1, 4))
    dilation = (maker.one_of(1, 1, 2), maker.one_of(1, 1, 2))
    stride = (maker.number(1, 2), maker.number(1, 3))
    span = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    groups = maker.one_of(1, 1, 2, 3)
    depth, share = maker.number(1, 5), maker.number(1, 9)
    if depthwise:
        groups, depth, share = maker.one_of(1, 3, 4, 8, 10), 1, maker.one_of(1, 1, 1, 2, 4)
    zero_point = maker.zero_point(dtype)
    weight_dtype = maker.one_of(DType.INT8, DType.INT4, DType.INT4, DType.INT2, DType.UINT8)
    weight_zero_point = maker.one_of(0, maker.zero_point(weight_dtype))
    x = padded(maker, image(maker, groups * depth, dtype, (span[0], span[1])), kernel, dilation, zero_point)
    outputs = groups * share
    shape = (1, *kernel, outputs) if depthwise else (outputs, *kernel, depth)
    operands = [x, maker.constant(shape, weight_dtype)]
    if maker.one_of(True, True, False):
        accumulator = DType.INT64 if dtype is DType.INT16 else DType.INT32
        operands.append(maker.constant((outputs,), accumulator, maker.one_of(1000, 1 << 20)))
    kind = DepthwiseConv2d if depthwise else Conv2d
    value = maker.add(kind(stride, dilation, zero_point, weight_zero_point), *operands)
    return maker.case(maker.finished(value))


def fully_connected(maker: Maker) -> Case:
    dtype = maker.one_of(*ACTIVATIONS)
    depth, outputs = maker.number(1, 40), maker.number(1, 14)
    x = maker.input((*maker.one_of((), (1,), (2,), (3, 2)), depth), dtype)
    operands = [x, maker.constant((outputs, depth), maker.one_of(DType.INT8, DType.INT8, DType.INT4, DType.INT2))]
    if maker.one_of(True, False):
        operands.append(maker.constant((outputs,), DType.INT64 if dtype is DType.INT16 else DType.INT32, 1 << 20))
    return maker.case(maker.finished(maker.add(FullyConnected(maker.zero_point(dtype), maker.one_of(0, 3)), *operands)))


def pooling(maker: Maker) -> Case:
    kind = maker.one_of(MaxPool2d, AveragePool2d, SumPool2d)
    dtype = maker.one_of(*ACTIVATIONS, *([DType.INT32] if kind is MaxPool2d else []))
    kernel = (maker.number(1, 4), maker.number(1, 4))
    x = image(maker, maker.one_of(1, 3, 4, 8, 10), dtype, kernel)
    if maker.one_of(True, False):
        shape = maker.builder.type_of(x).shape
        kernel = (shape[1], shape[2])
    sides = [maker.one_of(0, maker.number(0, kernel[axis // 2] - 1)) for axis in range(4)]
    padding = ((sides[0], sides[1]), (sides[2], sides[3]))
    arguments: list[Any] = [kernel, (maker.number(1, 3), maker.number(1, 3)), padding]
    zero = {} if kind is MaxPool2d else {"input_zero_point": maker.zero_point(DType.INT8)}
    return maker.case(maker.finished(maker.add(kind(*arguments, **zero), x)))


def pointwise(maker: Maker) -> Case:
    shape = tuple(maker.number(1, 5) for _ in range(maker.number(1, 4)))
    form = maker.one_of("requantize", "add", "broadcast", "shared", "quantize", "dequantize", "both")
    if form == "requantize":
        return maker.case(maker.clip(maker.requantize(maker.input(shape, maker.one_of(*ACTIVATIONS, DType.INT32)))))
    if form == "quantize":
        return maker.case(quantized(maker, maker.input(shape, DType.FLOAT32)))
    if form in ("dequantize", "both"):
        real = dequantized(maker, maker.input(shape, maker.one_of(*ACTIVATIONS, DType.INT32)))
        return maker.case(quantized(maker, real) if form == "both" else real)
    left = maker.input(shape, maker.one_of(*BYTES))
    other = tuple(maker.one_of(1, size) for size in shape)[maker.number(0, len(shape) - 1) :]
    right = maker.input(other if form == "broadcast" else shape, maker.one_of(DType.INT8, DType.INT32))
    first = maker.requantize(left)
    second = first if form == "shared" else maker.requantize(right)
    return maker.case(maker.clip(maker.requantize(maker.add(Add(), first, second))))


def parameters(maker: Maker, x: str) -> tuple[str, str, int]:
    """Scale and zero point of one element or along an axis."""
    shape = maker.builder.type_of(x).shape
    axis = maker.number(-len(shape), len(shape) - 1)
    size = maker.one_of(1, shape[axis])
    scale = np.exp2(np.random.default_rng(maker.number(0, 99)).uniform(-4, 2, size)).astype(np.float32)
    scale = maker.one_of(scale, np.ones(size, np.float32))
    return maker.builder.constant("scale", scale), maker.constant((size,), DType.INT32, 128), axis


def quantized(maker: Maker, x: str) -> str:
    scale, zero_point, axis = parameters(maker, x)
    return maker.add(Quantize(maker.one_of(*ACTIVATIONS), axis), x, scale, zero_point)


def dequantized(maker: Maker, x: str) -> str:
    scale, zero_point, axis = parameters(maker, x)
    return maker.add(Dequantize(axis), x, scale, zero_point)


def movement(maker: Maker) -> Case:
    rank = maker.number(1, 5)
    shape = tuple(maker.number(1, 6) for _ in range(rank))
    dtype = maker.one_of(*ACTIVATIONS, DType.INT32)
    x = maker.input(shape, dtype)
    form = maker.one_of("transpose", "concat", "pad", "slice", "reshape", "offset")
    if form == "transpose":
        value = maker.add(Transpose(maker.shuffled(range(rank))), x)
    elif form == "concat":
        axis = maker.number(0, rank - 1)
        parts = [(*shape[:axis], maker.number(1, 5), *shape[axis + 1 :]) for _ in range(maker.number(1, 3))]
        value = maker.add(Concat(axis), x, *(maker.input(part, dtype) for part in parts))
    elif form == "pad":
        sides = [tuple(maker.number(0, 3) for _ in shape) for _ in range(2)]
        value = maker.add(Pad(sides[0], sides[1], maker.number(0, 100)), x)
    elif form == "slice":
        start = tuple(maker.number(0, size - 1) for size in shape)
        stop = tuple(maker.number(a + 1, size) for a, size in zip(start, shape, strict=True))
        value = maker.add(Slice(start, stop, tuple(maker.number(1, 3) for _ in shape)), x)
    elif form == "reshape":
        value = maker.add(Reshape((int(np.prod(shape)),)), x)
    else:
        dtype = maker.one_of(*BYTES)
        x = maker.input((maker.number(1, 90),), dtype)
        shifted = DType.UINT8 if dtype is DType.INT8 else DType.INT8
        return maker.case(maker.add(Offset(-dtype.low if dtype.signed else -128, shifted), x))
    return maker.case(value if maker.one_of(True, False) else maker.clip(maker.requantize(value)))


def patches(maker: Maker) -> Case:
    dtype = maker.one_of(*ACTIVATIONS)
    kernel, dilation = (maker.number(1, 3), maker.number(1, 3)), (maker.one_of(1, 2), maker.one_of(1, 1, 2))
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    x = image(maker, maker.number(1, 9), dtype, (span[0], span[1]))
    x = padded(maker, x, kernel, dilation, maker.number(0, 9))
    value = maker.add(Im2col(kernel, (maker.number(1, 2), maker.number(1, 2)), dilation), x)
    return maker.case(value if maker.one_of(True, False) else maker.clip(maker.requantize(value)))


def softmax(maker: Maker) -> Case:
    shape = (*maker.one_of((), (1,), (3,)), maker.one_of(1, 2, 10, 1000))
    x = maker.input(shape, maker.one_of(*BYTES))
    operator = FixedSoftmax(
        maker.number(1 << 30, (1 << 31) - 1),
        maker.number(19, 26),
        -maker.one_of(0, 31, 124, 248, 255),
        maker.one_of(DType.INT8, DType.UINT8, DType.INT16),
    )
    case = maker.case(maker.add(operator, x))
    if maker.one_of(True, False):
        return case
    return Case(case.graph, {name: np.full_like(array, 7) for name, array in case.inputs.items()})


FAMILIES: Mapping[str, Callable[[Maker], Case]] = {
    "conv2d": partial(convolution, False),
    "depthwise": partial(convolution, True),
    "fully_connected": fully_connected,
    "pooling": pooling,
    "pointwise": pointwise,
    "movement": movement,
    "patches": patches,
    "softmax": softmax,
}


def drawn(name: str, count: int) -> list[Case]:
    """`count` cases of a family, the same ones every time."""
    return [FAMILIES[name](Maker(f"{name} {seed}")) for seed in range(count)]
