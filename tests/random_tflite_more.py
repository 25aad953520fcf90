"""Random TFLite models of operators that `random_tflite` does not draw: movement, comparisons, reductions, resizing,
transposed convolution, products of matrices, on int8, int16 and uint8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from oracles import TensorEntry
from tflite_maker import Maker

Step = Callable[[Maker], int]
"""Draws an operator and its operands; gives its result."""


def some(m: Maker, least: int = 1, most: int = 4) -> int:
    """An input of a few axes."""
    return m.input([m.one_of(1, 2, 3, 4, 5, 7) for _ in range(m.number(least, most))])


def image(m: Maker) -> int:
    return m.input((m.one_of(1, 1, 2), m.number(1, 8), m.number(1, 8), m.number(1, 6)))


def kept(
    m: Maker, opcode: str, operands: list[int], shape: list[int], kind: str = "", version: int = 1, **more: object
) -> int:
    """An operator that keeps the quantisation of its first quantised operand."""
    first = next(place for place in operands if m.tensors[place].scale)
    return m.call(opcode, operands, m.alike(first, shape), kind, version, **more)


def transposed(m: Maker) -> int:
    x = image(m)
    batch, height, width, depth = m.shape(x)
    kernel, stride = (m.number(1, 4), m.number(1, 4)), (m.one_of(1, 2, 2, 3), m.one_of(1, 2, 2, 3))
    same, outputs = m.often(0.5), m.number(1, 5)
    sizes = [
        n * s if same else (n - 1) * s + max(k, s) for n, s, k in zip((height, width), stride, kernel, strict=True)
    ]
    if not same:
        sizes = [(n - 1) * s + k for n, s, k in zip((height, width), stride, kernel, strict=True)]
    count = outputs if m.often(0.6) else 1
    scales = tuple(float(np.float32(scale)) for scale in np.exp(m.rng.uniform(-7, -5, count)))
    array = m.rng.integers(-127, 128, (outputs, *kernel, depth)).astype(np.int8)
    w = m.add(TensorEntry("w", array.shape, "int8", scales, 0, array))
    shape = (batch, *sizes, outputs)
    spread = 74 * 74 * np.sqrt(prod(kernel) * depth) * m.scale(x) * max(scales) * (256 if m.dtype == "int16" else 1)
    y = m.add(m.entry(shape, m.near(float(spread) / (60 * (256 if m.dtype == "int16" else 1)))))
    options = {"padding": 0 if same else 1, "strideH": stride[0], "strideW": stride[1]}
    return m.call("TRANSPOSE_CONV", [m.integers(shape), w, x], y, "TransposeConvOptions", 3, **options)


def resize(m: Maker) -> int:
    x = image(m)
    batch, _, _, depth = m.shape(x)
    sizes = [m.number(1, 12), m.number(1, 12)]
    centred = m.often(0.4)
    options = {"halfPixelCenters": centred, "alignCorners": not centred and m.often(0.5)}
    nearest = m.often(0.5)
    opcode, kind = (
        ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions")
        if nearest
        else ("RESIZE_BILINEAR", "ResizeBilinearOptions")
    )
    return kept(m, opcode, [x, m.integers(sizes)], [batch, *sizes, depth], kind, 3, **options)


def split(m: Maker) -> int:
    x = some(m)
    shape = list(m.shape(x))
    axis = m.number(0, len(shape) - 1)
    size = shape[axis]
    parts = m.one_of(*(n for n in range(1, size + 1) if size % n == 0))
    shape[axis] = size // parts
    results = [m.alike(x, shape) for _ in range(parts)]
    m.call("SPLIT", [m.integers(axis - len(shape) * m.number(0, 1)), x], results[0], "SplitOptions", 1, numSplits=parts)
    m.calls[-1] = type(m.calls[-1])(
        "SPLIT", m.calls[-1].inputs, tuple(results), {"numSplits": parts}, "SplitOptions", 1
    )
    return results[-1]


def split_v(m: Maker) -> int:
    x = some(m)
    shape = list(m.shape(x))
    axis = m.number(0, len(shape) - 1)
    first = m.number(1, shape[axis])
    sizes = [first, shape[axis] - first] if first < shape[axis] else [first]
    results = [m.alike(x, [*shape[:axis], size, *shape[axis + 1 :]]) for size in sizes]
    operands = [x, m.integers(sizes), m.integers(axis)]
    m.call("SPLIT_V", operands, results[0], "SplitVOptions", 1, numSplits=len(sizes))
    last = m.calls[-1]
    m.calls[-1] = type(last)("SPLIT_V", last.inputs, tuple(results), last.options, "SplitVOptions", 1)
    return results[-1]


def pack(m: Maker) -> int:
    x = some(m, 1, 3)
    shape, count = list(m.shape(x)), m.number(1, 3)
    axis = m.number(0, len(shape))
    values = [x, *(m.add(m.entry(shape, m.scale(x), m.tensors[x].zero_point)) for _ in range(count - 1))]
    options = {"axis": axis, "valuesCount": count}
    return kept(m, "PACK", values, [*shape[:axis], count, *shape[axis:]], "PackOptions", 1, **options)


def unpack(m: Maker) -> int:
    x = some(m, 2)
    shape = list(m.shape(x))
    axis = m.number(0, len(shape) - 1)
    rest = [*shape[:axis], *shape[axis + 1 :]]
    results = [m.alike(x, rest) for _ in range(shape[axis])]
    options = {"axis": axis, "num": shape[axis]}
    m.call("UNPACK", [x], results[0], "UnpackOptions", 1, **options)
    m.calls[-1] = type(m.calls[-1])("UNPACK", (x,), tuple(results), options, "UnpackOptions", 1)
    return results[-1]


def gather(m: Maker) -> int:
    x = some(m)
    shape = list(m.shape(x))
    axis = m.number(0, len(shape) - 1)
    indices = m.rng.integers(0, shape[axis], m.one_of((1,), (3,), (2, 2)))
    result = [*shape[:axis], *indices.shape, *shape[axis + 1 :]]
    return kept(m, "GATHER", [x, m.integers(indices)], result, "GatherOptions", 2, axis=axis, batchDims=0)


def gather_nd(m: Maker) -> int:
    x = some(m, 2)
    shape = list(m.shape(x))
    depth, count = m.number(1, len(shape)), m.number(1, 4)
    indices = np.stack([m.rng.integers(0, size, count) for size in shape[:depth]], axis=-1)
    return kept(m, "GATHER_ND", [x, m.integers(indices)], [count, *shape[depth:]], "GatherNdOptions", 3)


def slice_(m: Maker) -> int:
    x = some(m)
    shape = m.shape(x)
    starts = [m.number(0, size - 1) for size in shape]
    sizes = [m.number(1, size - start) for size, start in zip(shape, starts, strict=True)]
    asked = [
        m.one_of(size, -1) if start + size == whole else size
        for size, start, whole in zip(sizes, starts, shape, strict=True)
    ]
    return kept(m, "SLICE", [x, m.integers(starts), m.integers(asked)], sizes, "SliceOptions", 2)


def mirror(m: Maker) -> int:
    x = some(m)
    shape, mode = m.shape(x), m.number(0, 1)
    pads = [[m.number(0, size - (1 - mode)) for _ in range(2)] for size in shape]
    result = [size + sum(pair) for size, pair in zip(shape, pads, strict=True)]
    return kept(m, "MIRROR_PAD", [x, m.integers(pads)], result, "MirrorPadOptions", 2, mode=mode)


def tile(m: Maker) -> int:
    x = some(m, 1, 3)
    counts = [m.number(1, 3) for _ in m.shape(x)]
    result = [size * count for size, count in zip(m.shape(x), counts, strict=True)]
    return kept(m, "TILE", [x, m.integers(counts)], result, "TileOptions", 2)


def reverse(m: Maker) -> int:
    x = some(m)
    axes = [axis for axis in range(len(m.shape(x))) if m.often(0.5)] or [0]
    return kept(m, "REVERSE_V2", [x, m.integers(axes)], list(m.shape(x)), "ReverseV2Options", 2)


def broadcast(m: Maker) -> int:
    x = some(m, 1, 3)
    wide = [size if size > 1 else m.number(1, 4) for size in m.shape(x)]
    result = [m.number(1, 3), *wide] if m.often(0.4) else wide
    return kept(m, "BROADCAST_TO", [x, m.integers(result)], result, "BroadcastToOptions", 3)


def blocks(m: Maker) -> int:
    size, apart = m.one_of(2, 3), m.often(0.5)
    depth = m.number(1, 3)
    if apart:
        x = m.input((1, 2 * size, size, depth))
        return kept(m, "SPACE_TO_DEPTH", [x], [1, 2, 1, depth * size * size], "SpaceToDepthOptions", 2, blockSize=size)
    x = m.input((1, 2, 3, depth * size * size))
    return kept(m, "DEPTH_TO_SPACE", [x], [1, 2 * size, 3 * size, depth], "DepthToSpaceOptions", 2, blockSize=size)


def batches(m: Maker) -> int:
    block, depth = [m.one_of(1, 2), m.one_of(2, 3)], m.number(1, 3)
    if m.often(0.5):
        x = m.input((1, 2 * block[0], 2 * block[1], depth))
        operands = [x, m.integers(block), m.integers([[0, 0], [0, block[1]]])]
        return kept(m, "SPACE_TO_BATCH_ND", operands, [prod(block), 2, 3, depth], "SpaceToBatchNDOptions", 3)
    x = m.input((prod(block), 3, 3, depth))
    operands = [x, m.integers(block), m.integers([[0, 1], [1, 0]])]
    shape = [1, 3 * block[0] - 1, 3 * block[1] - 1, depth]
    return kept(m, "BATCH_TO_SPACE_ND", operands, shape, "BatchToSpaceNDOptions", 3)


def reduced(m: Maker) -> int:
    x = some(m, 1, 4)
    shape, keep = m.shape(x), m.often(0.5)
    axes = [axis for axis in range(len(shape)) if m.often(0.5)] or [len(shape) - 1]
    result = [1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes]
    operands = [x, m.integers([axis - len(shape) * m.number(0, 1) for axis in axes])]
    kind = m.one_of("SUM", "SUM", "REDUCE_MAX", "REDUCE_MIN", "MEAN")
    if kind in ("REDUCE_MAX", "REDUCE_MIN"):
        return kept(m, kind, operands, result, "ReducerOptions", 3, keepDims=keep)
    count = prod(shape[axis] for axis in axes) if kind == "SUM" else 1
    y = m.add(m.entry(result, m.near(m.scale(x) * float(np.sqrt(count)))))
    return m.call(kind, operands, y, "ReducerOptions", 2, keepDims=keep)


def product(m: Maker) -> int:
    lead, depth = m.one_of((), (2,), (1, 3)), m.number(1, 12)
    rows, columns, turned = m.number(1, 5), m.number(1, 6), (m.often(0.3), m.often(0.4))
    left = (*lead, depth, rows) if turned[0] else (*lead, rows, depth)
    right = (*lead, columns, depth) if turned[1] else (*lead, depth, columns)
    a, constant = m.input(left), m.often(0.4)
    b = m.add(m.entry(right))
    if constant:
        limits = np.iinfo(m.dtype)
        array = m.rng.integers(limits.min, limits.max + 1, right).astype(m.dtype)
        entry = m.tensors[b]
        m.tensors[b] = TensorEntry(entry.name, right, entry.dtype, entry.scale, entry.zero_point, array)
    fine = 256 if m.dtype == "int16" else 1
    y = m.add(
        m.entry((*lead, rows, columns), m.near(74 * 74 * fine * m.scale(a) * m.scale(b) * float(np.sqrt(depth)) / 60))
    )
    return m.call("BATCH_MATMUL", [a, b], y, "BatchMatMulOptions", 2, adjX=turned[0], adjY=turned[1])


def difference(m: Maker) -> int:
    x = some(m)
    other = [m.one_of(size, size, 1) for size in m.shape(x)]
    b = m.add(m.entry(other, m.near(m.scale(x))))
    y = m.add(m.entry(m.shape(x), m.near(m.scale(x) * m.scale(b) * (60 if m.dtype != "int16" else 16000))))
    return m.call("SQUARED_DIFFERENCE", [x, b], y, "SquaredDifferenceOptions", 2)


def slopes(m: Maker) -> int:
    x = some(m)
    y = m.add(m.entry(m.shape(x), m.near(m.scale(x))))
    alpha = float(np.float32(m.rng.uniform(0.01, 0.9)))
    return m.call("LEAKY_RELU", [x], y, "LeakyReluOptions", 2, alpha=alpha)


def compared(m: Maker) -> int:
    shape = [m.one_of(1, 2, 3, 5) for _ in range(m.number(1, 4))]
    other = [m.one_of(size, size, 1) for size in shape]
    # TensorFlow Lite Micro ends the process where a scale is not below 1.
    x, b = (m.add(m.entry(sizes, min(m.near(0.1), 0.9))) for sizes in (shape, other))
    kind = m.one_of("LESS", "GREATER", "LESS_EQUAL", "GREATER_EQUAL", "EQUAL", "NOT_EQUAL")
    y = m.add(TensorEntry("holds", m.shape(x), "bool"))
    names = {"LESS": "Less", "GREATER": "Greater", "LESS_EQUAL": "LessEqual", "GREATER_EQUAL": "GreaterEqual"}
    kinds = {**names, "EQUAL": "Equal", "NOT_EQUAL": "NotEqual"}
    return m.call(kind, [x, b], y, f"{kinds[kind]}Options", 2)


def units(m: Maker) -> int:
    x = some(m, 2)
    y = m.add(m.entry(m.shape(x), 1 / 128, 0))
    return m.call("L2_NORMALIZATION", [x], y, "L2NormOptions", 2)


def log_softmax(m: Maker) -> int:
    x = some(m, 1)
    y = m.add(m.entry(m.shape(x), 16 / 256, 127))
    return m.call("LOG_SOFTMAX", [x], y, "LogSoftmaxOptions", 2)


def summed(m: Maker) -> int:
    shape = [m.one_of(1, 2, 3, 5) for _ in range(m.number(1, 4))]
    x = m.add(m.entry(shape, zero_point=0))  # with another TensorFlow Lite Micro leaves it out of the sum
    values = [x, *(m.add(m.entry(shape, m.scale(x), 0)) for _ in range(m.number(1, 2)))]
    return kept(m, "ADD_N", values, list(shape), "AddNOptions", 1)


MOVING = {
    **{"resize": resize, "split": split, "split_v": split_v, "pack": pack, "unpack": unpack, "gather": gather},
    **{"gather_nd": gather_nd, "slice": slice_, "mirror": mirror, "tile": tile, "reverse": reverse},
    **{"broadcast": broadcast, "blocks": blocks, "batches": batches},
}
STEPS: Mapping[str, Step] = {
    **MOVING,
    **{"transposed": transposed, "reduced": reduced, "product": product, "difference": difference, "slopes": slopes},
    **{"compared": compared, "units": units, "log_softmax": log_softmax, "summed": summed},
}
"""Operators on int8."""
SHORT = (
    "resize",
    "split",
    "pack",
    "gather",
    "slice",
    "mirror",
    "transposed",
    "reduced",
    "product",
    "difference",
    "slopes",
)
"""Operators that are drawn on int16 too."""
