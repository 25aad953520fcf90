"""Layers of language models by themselves, of several sizes, for `kernel_cycles.py`: norms, attention, gates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Clip, Dequantize, Lookup, Offset, Requantize, Rounding
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.fixed import FixedStandard
from dovetail.ir.operators.sequence import FixedAttention
from dovetail.ir.types import DType, Shape, TensorType

PARTS = ("FixedStandard", "FixedAttention", "end.gate", "end.Dequantize_shifted")
"""Beginnings of the names of parts that these layers have."""


def language_layers() -> Iterator[Graph]:
    """The layers; every place is live, as when a context is full."""
    for rows, size in ((1, 64), (8, 64), (3, 128)):
        yield _norm((rows, size), DType.INT16, size)
    yield _norm((1, 64), DType.INT16, 16)
    yield _norm((8, 64), DType.INT8, 64)
    for heads, groups, depth, places in ((8, 4, 8, 256), (8, 4, 8, 64), (4, 2, 32, 96)):
        yield _attention(heads, groups, depth, places)
    for rows, count in ((1, 172), (1, 32), (16, 64)):
        yield _gate((rows, count))
    for count in (64, 512):
        yield _scores(count)


def _requantised(builder: GraphBuilder, value: str, channels: int, shift: int) -> Graph:
    """The graph that ends in a value as bytes."""
    numbers = (np.full(channels, 3 << 29), np.full(channels, shift) - np.arange(channels) % 2)
    names = [builder.constant(f"n{place}", one.astype(np.int32)) for place, one in enumerate(numbers)]
    scaled = builder.add(Requantize(Rounding.SINGLE, output_zero_point=-9), [value, *names])
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "y")])


def _norm(shape: Shape, dtype: DType, made: int) -> Graph:
    """A norm, of which so many elements of a row are given."""
    builder = GraphBuilder("norm")
    x = builder.input("x", TensorType(shape, dtype))
    epsilon = 75 * shape[-1] ** 2  # of a step squared, as exports have it
    standard = FixedStandard(shape[-1], 0, epsilon, centred=False, span=None if made == shape[-1] else (0, made))
    return _requantised(builder, builder.add(standard, [x]), made, -9)


def _attention(heads: int, groups: int, depth: int, places: int) -> Graph:
    builder, lives = GraphBuilder("attention"), np.ones((1, places), bool)  # no weight of which is 0
    queries = builder.input("queries", TensorType((heads, 1, depth), DType.INT8))
    caches = [builder.input(name, TensorType((groups, places, depth), DType.INT8)) for name in ("keys", "values")]
    attention = FixedAttention(40, 20, query_zero_point=3, value_zero_point=-5)
    attended = builder.add(attention, [queries, *caches, builder.constant("live", lives)])
    return _requantised(builder, attended, 1, -7)


def _scores(count: int) -> Graph:
    """The last values of a model as floats, in steps of a power of two."""
    builder = GraphBuilder("scores")
    x = builder.input("x", TensorType((1, count), DType.INT16))
    numbers = [
        builder.constant("scale", np.array([2.0**-9], np.float32)),
        builder.constant("zero", np.zeros(1, np.int32)),
    ]
    return builder.finish([builder.add(Dequantize(), [x, *numbers], "y")])


def _gate(shape: Shape) -> Graph:
    builder = GraphBuilder("gate")
    x, y = (builder.input(name, TensorType(shape, DType.INT8)) for name in "xy")
    table = builder.constant("table", (np.arange(-128, 128) * 9).astype(np.int16))
    left = builder.add(Offset(0, DType.INT32), [builder.add(Lookup(), [x, table])])
    right = builder.add(Offset(11, DType.INT32), [y])
    return _requantised(builder, builder.add(Binary(BinaryKind.MULTIPLY), [left, right]), 1, -9)
