"""Random models of one TFLite operator, for the comparison with TensorFlow Lite Micro."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dovetail.ir.types import Array
from oracles import SingleOperator, TensorEntry

Draw = Callable[[np.random.Generator], SingleOperator]


def activation(
    rng: np.random.Generator, name: str, shape: Sequence[int], dtype: str = "int8", scale: float = 0.0
) -> TensorEntry:
    """A tensor with a random scale and zero point."""
    if dtype == "float32" or dtype == "bool":
        return TensorEntry(name, tuple(shape), dtype)
    wide = dtype == "int16"
    scale = scale or float(np.exp(rng.uniform(-5, -2))) / (256 if wide else 1)
    return TensorEntry(
        name,
        tuple(shape),
        dtype,
        (scale,),
        0 if wide else int(rng.integers(-60, 60)) + (128 if dtype == "uint8" else 0),
    )


def same(entry: TensorEntry, name: str, shape: Sequence[int]) -> TensorEntry:
    """A tensor quantised as another."""
    return replace(entry, name=name, shape=tuple(int(size) for size in shape), data=None)


def known(name: str, values: Any, dtype: str = "int32") -> TensorEntry:
    """A constant."""
    array = np.array(values, dtype)
    return TensorEntry(name, array.shape, dtype, data=array)


def sizes(rng: np.random.Generator, rank: int, low: int = 1, high: int = 7) -> tuple[int, ...]:
    return tuple(int(size) for size in rng.integers(low, high, rank))


def broadcast(rng: np.random.Generator, shape: Sequence[int]) -> tuple[int, ...]:
    kept = tuple(1 if rng.random() < 0.4 else size for size in shape)
    return kept if rng.random() < 0.7 else tuple(shape)


def function(opcode: str, rng: np.random.Generator, dtype: str, options: str = "", **given: Any) -> SingleOperator:
    shape = (1, 300)
    x = activation(rng, "x", shape, dtype)
    y = activation(rng, "y", shape, dtype, x.scale[0] * float(rng.uniform(0.5, 2.0)) if x.scale else 0.0)
    if opcode == "RSQRT" and dtype == "int8":
        x = replace(x, zero_point=-128)
        y = replace(y, scale=(float(rng.uniform(0.1, 0.5)) / x.scale[0] ** 0.5 / 64,), zero_point=-128)
    if opcode in ("LOGISTIC", "TANH") and dtype == "int16":
        wide = 2.0 ** float(rng.choice([-12, -11])) if rng.random() < 0.4 else float(np.exp(rng.uniform(-9.5, -7)))
        x, y = replace(x, scale=(wide,)), replace(y, scale=(2.0**-15,))
    return SingleOperator(opcode, [x, y], given, options, 1)


def division(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, int(rng.integers(1, 5)))
    a, b = activation(rng, "a", shape, dtype), activation(rng, "b", broadcast(rng, shape), dtype)
    # With a larger scale TensorFlow Lite Micro shifts small quotients by more than 31 bits, which C leaves undefined.
    y = activation(
        rng, "y", shape, dtype, float(rng.uniform(0.004, 0.015)) * a.scale[0] / b.scale[0] if a.scale else 0.0
    )
    b = replace(b, zero_point=-128) if a.scale else b
    return SingleOperator("DIV", [a, b, y], {"fusedActivationFunction": int(rng.integers(0, 2))}, "DivOptions", 2)


def prelu(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, 4)
    x = activation(rng, "x", shape, dtype)
    slope = activation(rng, "a", shape[-1:] if rng.random() < 0.5 else (1, 1, shape[-1]), "int8" if x.scale else dtype)
    values = rng.integers(-128, 128, slope.shape).astype(np.int8)
    slope = replace(slope, data=values if slope.scale else values.astype(np.float32) / 64)
    y = activation(rng, "y", shape, dtype, x.scale[0] * float(rng.uniform(0.4, 1.5)) if x.scale else 0.0)
    return SingleOperator("PRELU", [x, slope, y], {}, "", 1)


def squared_difference(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, int(rng.integers(1, 5)))
    a, b = activation(rng, "a", shape, dtype), activation(rng, "b", broadcast(rng, shape), dtype)
    wanted = max(a.scale[0], b.scale[0]) ** 2 * (60000 if dtype == "int16" else 200) if a.scale else 0.0
    return SingleOperator("SQUARED_DIFFERENCE", [a, b, activation(rng, "y", shape, dtype, wanted)], {}, "", 2)


def binary(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, int(rng.integers(1, 5)))
    return SingleOperator(
        opcode,
        [
            activation(rng, "a", shape, dtype),
            activation(rng, "b", broadcast(rng, shape), dtype),
            activation(rng, "y", shape, dtype),
        ],
        {},
    )


def comparison(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    single = binary(opcode, rng, dtype)
    a, b, y = single.tensors
    b = replace(b, scale=a.scale, zero_point=a.zero_point) if rng.random() < 0.5 else b
    return replace(single, tensors=[a, b, TensorEntry("y", y.shape, "bool")])


def logical(opcode: str, rng: np.random.Generator) -> SingleOperator:
    single = binary(opcode, rng, "bool")
    return replace(single, tensors=[single.tensors[0], single.tensors[2]]) if opcode == "LOGICAL_NOT" else single


def select(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, 3)
    a = activation(rng, "a", shape, dtype)
    tensors = [
        TensorEntry("c", broadcast(rng, shape), "bool"),
        a,
        same(a, "b", broadcast(rng, shape)),
        same(a, "y", shape),
    ]
    return SingleOperator("SELECT_V2", tensors, {}, "SelectV2Options")


def batch_matmul(rng: np.random.Generator, dtype: str) -> SingleOperator:
    lead = sizes(rng, int(rng.integers(0, 3)), 1, 4)
    rows, depth, columns = (int(size) for size in rng.integers(1, 12, 3))
    turned = [bool(rng.integers(0, 2)) for _ in range(2)]
    a = activation(rng, "a", (*lead, *((depth, rows) if turned[0] else (rows, depth))), dtype)
    b = activation(rng, "b", (*lead, *((columns, depth) if turned[1] else (depth, columns))), dtype)
    spread = (
        a.scale[0] * b.scale[0] * (32768 * 0.6 if dtype == "int16" else 74 * 74 / 60) * depth**0.5 if a.scale else 0.0
    )
    if b.scale and rng.random() < 0.3 and not lead:
        b = replace(b, data=rng.integers(-128, 128, b.shape).astype(dtype))
    y = activation(rng, "y", (*lead, rows, columns), dtype, spread)
    return SingleOperator("BATCH_MATMUL", [a, b, y], {"adjX": turned[0], "adjY": turned[1]}, "BatchMatMulOptions", 1)


def transpose_conv(rng: np.random.Generator, dtype: str) -> SingleOperator:
    kernel, stride = sizes(rng, 2, 1, 6), sizes(rng, 2, 1, 4)
    x = activation(rng, "x", (1, *sizes(rng, 2, 1, 6), int(rng.integers(1, 5))), dtype)
    outputs, padding = int(rng.integers(1, 5)), int(rng.integers(0, 2))
    result = [
        size * s if padding == 0 else (size - 1) * s + max(k, s)
        for size, s, k in zip(x.shape[1:3], stride, kernel, strict=True)
    ]
    real = dtype == "float32"
    shape = (outputs, *kernel, x.shape[3])
    channels = outputs if rng.random() < 0.7 else 1
    scales = () if real else tuple(float(scale) for scale in np.exp(rng.uniform(-7, -5, channels)))
    weights: Array = rng.integers(-127, 128, shape)
    w = TensorEntry("w", shape, "float32" if real else "int8", scales, 0, weights.astype("float32" if real else "int8"))
    taps = max(kernel[0] * kernel[1] * x.shape[3] / (stride[0] * stride[1]), 1.0)
    spread = 0.0 if real else 74 * x.scale[0] * 74 * max(scales) * taps**0.5 / 60
    tensors = [known("shape", (1, *result, outputs)), w, x]
    if rng.random() < 0.7:
        kind = {"int8": "int32", "int16": "int64", "float32": "float32"}[dtype]
        own = tuple(float(np.float32(x.scale[0]) * np.float32(scale)) for scale in scales) if not real else ()
        values = rng.integers(-3000, 3000, outputs).astype(kind)
        tensors.append(TensorEntry("bias", (outputs,), kind, own, 0, values))
    tensors.append(activation(rng, "y", (1, *result, outputs), dtype, spread))
    options = {"padding": padding, "strideH": stride[0], "strideW": stride[1]}
    return SingleOperator("TRANSPOSE_CONV", tensors, options, "TransposeConvOptions", 3 if len(tensors) == 5 else 1)


def resize(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    x = activation(rng, "x", (1, *sizes(rng, 2, 1, 9), 3), dtype)
    result = sizes(rng, 2, 1, 14)
    align = bool(rng.integers(0, 2))
    options = {"alignCorners": align, "halfPixelCenters": not align and bool(rng.integers(0, 2))}
    kind = "ResizeBilinearOptions" if opcode == "RESIZE_BILINEAR" else "ResizeNearestNeighborOptions"
    y = same(x, "y", (1, *result, 3))
    return SingleOperator(opcode, [x, known("size", result), y], options, kind, 3)


def log_softmax(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = (*sizes(rng, int(rng.integers(0, 3))), int(rng.integers(1, 60)))
    x = activation(rng, "x", shape, dtype, float(np.exp(rng.uniform(-4, -0.5))))
    y = TensorEntry("y", shape, dtype, (1 / 16,), 127) if x.scale else same(x, "y", shape)
    return SingleOperator("LOG_SOFTMAX", [x, y], {}, "LogSoftmaxOptions")


def reduction(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, 4, 2, 7)
    axes = sorted(rng.permutation(4)[: int(rng.integers(1, 4))].tolist())
    keep = bool(rng.integers(0, 2))
    result = [1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes]
    x = activation(rng, "x", shape, dtype)
    y = same(x, "y", result)
    if opcode in ("SUM", "MEAN") and x.scale:
        count = float(np.prod([shape[axis] for axis in axes])) if opcode == "SUM" else 1.0
        y = activation(rng, "y", result, dtype, x.scale[0] * count**0.5 * float(rng.uniform(0.3, 1.2)))
    return SingleOperator(opcode, [x, known("axes", axes), y], {"keepDims": keep}, "ReducerOptions", 2)


def split(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape, axis, parts = list(sizes(rng, 3, 2, 5)), int(rng.integers(0, 3)), int(rng.integers(1, 4))
    counts = [2] * parts if opcode == "SPLIT" else [int(size) for size in rng.integers(1, 4, parts)]
    shape[axis] = sum(counts) if opcode != "UNPACK" else parts
    x = activation(rng, "x", shape, dtype)
    if opcode == "UNPACK":
        results = [same(x, f"y{part}", (*shape[:axis], *shape[axis + 1 :])) for part in range(parts)]
        return SingleOperator(opcode, [x, *results], {"num": parts, "axis": axis}, "UnpackOptions", 1, parts)
    results = [same(x, f"y{n}", (*shape[:axis], size, *shape[axis + 1 :])) for n, size in enumerate(counts)]
    if opcode == "SPLIT":
        tensors = [known("axis", [axis]), x, *results]
        return SingleOperator(opcode, tensors, {"numSplits": parts}, "SplitOptions", 1, parts)
    tensors = [x, known("sizes", counts), known("axis", [axis]), *results]
    return SingleOperator(opcode, tensors, {"numSplits": parts}, "SplitVOptions", 1, parts)


def gather(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape, axis = sizes(rng, 3, 2, 6), int(rng.integers(0, 3))
    x, wanted = activation(rng, "x", shape, dtype), sizes(rng, int(rng.integers(1, 3)), 1, 4)
    indices = known("indices", rng.integers(0, shape[axis], wanted))
    y = same(x, "y", (*shape[:axis], *wanted, *shape[axis + 1 :]))
    return SingleOperator("GATHER", [x, indices, y], {"axis": axis}, "GatherOptions")


def gather_nd(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, 3, 2, 6)
    depth, count = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    x = activation(rng, "x", shape, dtype)
    indices = known("indices", np.stack([rng.integers(0, size, count) for size in shape[:depth]], axis=-1))
    return SingleOperator("GATHER_ND", [x, indices, same(x, "y", (count, *shape[depth:]))], {}, "GatherNdOptions")


def mirror_pad(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape, mode = sizes(rng, 3, 2, 6), int(rng.integers(0, 2))
    pads = np.array([[int(side) for side in rng.integers(0, size + mode, 2)] for size in shape], np.int32)
    pads = np.minimum(pads, np.array(shape)[:, None] - 1 + mode)
    x = activation(rng, "x", shape, dtype)
    y = same(x, "y", np.array(shape) + pads.sum(axis=1))
    return SingleOperator("MIRROR_PAD", [x, known("pads", pads), y], {"mode": mode}, "MirrorPadOptions")


def blocks(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    size, (height, width, depth) = int(rng.integers(1, 4)), sizes(rng, 3, 1, 4)
    small, large = (1, height, width, depth * size**2), (1, height * size, width * size, depth)
    deep = opcode == "DEPTH_TO_SPACE"
    x = activation(rng, "x", small if deep else large, dtype)
    kind = "DepthToSpaceOptions" if deep else "SpaceToDepthOptions"
    return SingleOperator(opcode, [x, same(x, "y", large if deep else small)], {"blockSize": size}, kind)


def batches(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    size, (height, width, depth) = sizes(rng, 2, 1, 4), sizes(rng, 3, 2, 5)
    cut = np.array([[int(rng.integers(0, 2)), 0], [0, int(rng.integers(0, 2))]], np.int32)
    spread = np.array([height, width]) * np.array(size) - cut.sum(axis=1)
    whole, parts = (1, *spread, depth), (size[0] * size[1], height, width, depth)
    into = opcode == "SPACE_TO_BATCH_ND"
    x = activation(rng, "x", whole if into else parts, dtype)
    kind = "SpaceToBatchNDOptions" if into else "BatchToSpaceNDOptions"
    y = same(x, "y", parts if into else whole)
    return SingleOperator(opcode, [x, known("blocks", size), known("cut", cut), y], {}, kind)


def repeated(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, 3, 1, 5)
    if opcode == "TILE":
        counts, x = sizes(rng, 3, 1, 4), activation(rng, "x", shape, dtype)
        return SingleOperator(
            opcode, [x, known("counts", counts), same(x, "y", np.array(shape) * counts)], {}, "TileOptions"
        )
    x = activation(rng, "x", broadcast(rng, shape), dtype)
    return SingleOperator(opcode, [x, known("shape", shape), same(x, "y", shape)], {}, "BroadcastToOptions", 2)


def reverse(rng: np.random.Generator, dtype: str) -> SingleOperator:
    x = activation(rng, "x", sizes(rng, 3, 1, 6), dtype)
    tensors = [x, known("axes", [int(rng.integers(0, 3))]), same(x, "y", x.shape)]
    return SingleOperator("REVERSE_V2", tensors, {}, "ReverseV2Options")


def add_n(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape, count = sizes(rng, 3), int(rng.integers(2, 6))
    # TensorFlow Lite Micro wants all operands quantised alike, and takes their zero point off once too often.
    x = replace(activation(rng, "x0", shape, dtype), zero_point=0)
    parts = [x, *(same(x, f"x{n}", shape) for n in range(1, count))]
    scale = x.scale[0] * 1.4 if x.scale else 0.0
    return SingleOperator("ADD_N", [*parts, activation(rng, "y", shape, dtype, scale)], {}, "AddNOptions")


def pack(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape, count, axis = sizes(rng, 2), int(rng.integers(1, 4)), int(rng.integers(0, 3))
    x = activation(rng, "x0", shape, dtype)
    parts = [x, *(same(x, f"x{n}", shape) for n in range(1, count))]
    y = same(x, "y", (*shape[:axis], count, *shape[axis:]))
    return SingleOperator("PACK", [*parts, y], {"axis": axis, "valuesCount": count}, "PackOptions")


def normalised(rng: np.random.Generator, dtype: str) -> SingleOperator:
    x = activation(rng, "x", (*sizes(rng, int(rng.integers(1, 3))), int(rng.integers(1, 40))), dtype)
    y = replace(same(x, "y", x.shape), scale=(1 / 128,), zero_point=0) if x.scale else same(x, "y", x.shape)
    return SingleOperator("L2_NORMALIZATION", [x, y], {}, "L2NormOptions", 2)


def softmax_16(rng: np.random.Generator) -> SingleOperator:
    shape = (*sizes(rng, int(rng.integers(0, 3))), int(rng.integers(1, 90)))
    x = activation(rng, "x", shape, "int16", float(np.exp(rng.uniform(-11, -7))))
    y = TensorEntry("y", shape, "int16", (2.0**-15,), 0)
    return SingleOperator("SOFTMAX", [x, y], {"beta": float(rng.choice([1.0, 0.5]))}, "SoftmaxOptions", 3)


def converted(rng: np.random.Generator, source: str, result: str) -> SingleOperator:
    """QUANTIZE from one type to another."""
    shape = (1, 400)
    x = activation(rng, "x", shape, source)
    spread = {"int8": 256, "int16": 65536, "uint8": 256, "int32": 1 << 18}
    scale = x.scale[0] * spread[source] / spread[result] * float(rng.uniform(0.7, 2.0))
    y = TensorEntry("y", shape, result, (scale,), {"int8": int(rng.integers(-9, 9)), "uint8": 120}.get(result, 0))
    return SingleOperator("QUANTIZE", [x, y], {}, "QuantizeOptions", 2)


def pool(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    kernel, stride, padding = sizes(rng, 2, 1, 4), sizes(rng, 2, 1, 3), int(rng.integers(0, 2))
    x = activation(rng, "x", (1, *(size + int(rng.integers(0, 6)) for size in kernel), 3), dtype)
    sides = zip(x.shape[1:3], kernel, stride, strict=True)
    result = [-(-size // s) if padding == 0 else (size - k) // s + 1 for size, k, s in sides]
    options = {"padding": padding, "strideH": stride[0], "strideW": stride[1]}
    options |= {"filterHeight": kernel[0], "filterWidth": kernel[1], "fusedActivationFunction": int(rng.integers(0, 2))}
    return SingleOperator(
        opcode, [x, same(x, "y", (1, *result, 3))], options, "Pool2DOptions", 1 if opcode == "L2_POOL_2D" else 3
    )


def concatenation(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape, count = sizes(rng, 3), int(rng.integers(1, 4))
    x = activation(rng, "x0", shape, dtype)
    parts = [x, *(same(x, f"x{n}", (shape[0], n + 1, shape[2])) for n in range(1, count))]
    y = same(x, "y", (shape[0], sum(part.shape[1] for part in parts), shape[2]))
    return SingleOperator("CONCATENATION", [*parts, y], {"axis": 1}, "ConcatenationOptions", 2)


def pad(rng: np.random.Generator, dtype: str) -> SingleOperator:
    shape = sizes(rng, 4, 1, 5)
    x, sides = activation(rng, "x", shape, dtype), rng.integers(0, 3, (4, 2)).astype(np.int32)
    y = same(x, "y", np.array(shape) + sides.sum(axis=1))
    return SingleOperator("PAD", [x, known("pads", sides), y], {}, "PadOptions", 2)


def transpose(rng: np.random.Generator, dtype: str) -> SingleOperator:
    x, order = activation(rng, "x", sizes(rng, 4), dtype), rng.permutation(4)
    y = same(x, "y", [x.shape[axis] for axis in order])
    return SingleOperator("TRANSPOSE", [x, known("order", order), y], {}, "TransposeOptions", 2)


def layer(opcode: str, rng: np.random.Generator, dtype: str) -> SingleOperator:
    """A convolution, depthwise convolution or dense layer with 4-bit weights."""
    deep, dense = opcode == "CONV_2D", opcode == "FULLY_CONNECTED"
    depth, outputs = int(rng.integers(1, 9)), int(rng.integers(1, 12))
    kernel = sizes(rng, 2, 1, 4)
    outputs = outputs if deep or dense else depth * int(rng.integers(1, 3))
    x = activation(rng, "x", (3, depth) if dense else (1, *kernel, depth), dtype)
    shape = (outputs, depth) if dense else (outputs, *kernel, depth) if deep else (1, *kernel, outputs)
    # TensorFlow Lite Micro's dense layer has one scale for int4 weights.
    scales = tuple(float(scale) for scale in np.exp(rng.uniform(-4, -2, 1 if dense else outputs)))
    values = rng.integers(-7, 8, shape).astype(np.int8)
    w = TensorEntry("w", shape, "int4", scales, 0, values, 0 if deep or dense else 3)
    steps = tuple(float(np.float32(x.scale[0]) * np.float32(scale)) for scale in scales)
    bias = TensorEntry("b", (outputs,), "int32", steps, 0, rng.integers(-300, 300, outputs).astype(np.int32))
    taps = depth if dense else int(np.prod(kernel)) * (depth if deep else 1)
    spread = 74 * x.scale[0] * 4.3 * max(scales) * taps**0.5 / 60
    tensors = [x, w, bias, activation(rng, "y", (3, outputs) if dense else (1, *kernel, outputs), dtype, spread)]
    if dense:
        return SingleOperator(opcode, tensors, {}, "FullyConnectedOptions", 4)
    options = {"padding": 0, "strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}
    kind = "Conv2DOptions" if deep else "DepthwiseConv2DOptions"
    return SingleOperator(
        opcode, tensors, options if deep else options | {"depthMultiplier": outputs // depth}, kind, 3
    )
