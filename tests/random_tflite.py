"""Random TFLite models of one operator, and chains of several, with every parameter the schema has for them.

Seeded generators, not hypothesis: many models share one compilation, so nothing could be shrunk while it runs. A case
is small from the start and drawn again by its name alone. (The same generators draw with hypothesis where no C is
compiled.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from oracles import TensorEntry
from tflite_maker import HIGH, LOW, Maker


def image(maker: Maker, channels: int | None = None) -> int:
    """An input image, small and rarely square."""
    channels = channels or maker.one_of(1, 2, 3, 4, 5, 8, 12, 16, 20, 33)
    return maker.input((maker.one_of(1, 1, 1, 2), maker.number(1, 10), maker.number(1, 10), channels))


def anything(maker: Maker) -> int:
    """An input of one to four axes."""
    return maker.input([maker.number(1, 9) for _ in range(maker.number(1, 4))])


def windows(size: int, span: int, stride: int, same: bool) -> int:
    """How many windows there are along an axis."""
    return -(-size // stride) if same else (size - span) // stride + 1


def geometry(maker: Maker, sizes: Sequence[int], dilated: bool) -> tuple[list[int], list[int], list[int], bool]:
    """Window, stride, dilation and whether padding is SAME, such that at least one window fits."""
    kernel = [maker.one_of(1, 1, 2, 3, 3, 4, 5, 7) for _ in sizes]
    dilation = [maker.one_of(1, 1, 1, 2, 3) if dilated else 1 for _ in sizes]
    stride = [maker.one_of(1, 1, 2, 3) for _ in sizes]
    if dilated and maker.often(0.5):
        dilation = [1, 1]
    same = maker.often(0.5)
    if not same:
        for axis, size in enumerate(sizes):
            kernel[axis] = min(kernel[axis], size)
            if (kernel[axis] - 1) * dilation[axis] + 1 > size:
                dilation[axis] = 1
    return kernel, stride, dilation, same


def weights(maker: Maker, shape: tuple[int, ...], axis: int, bits: int = 8) -> int:
    """Constant weights, one scale for all or one for each index along `axis`."""
    count = shape[axis] if maker.often(0.6) else 1
    if maker.dtype == "uint8":
        data = maker.rng.integers(0, 256, shape).astype(np.uint8)
        zero_point = maker.one_of(0, 128, 255, maker.number(1, 254))
        scale = maker.even(float(np.exp(maker.rng.uniform(-7, -5))))
        return maker.add(TensorEntry("w", shape, "uint8", (scale,), zero_point, data))
    scales = tuple(maker.even(float(scale)) for scale in np.exp(maker.rng.uniform(-7, -5, count)))
    limit = 7 if bits == 4 else 127
    data = maker.rng.integers(-limit - maker.one_of(0, 1), limit + 1, shape).astype(np.int8)
    if bits == 4:
        return maker.add(TensorEntry("w", shape, "int4", scales, 0, data, axis))
    return maker.add(TensorEntry("w", shape, "int8", scales, 0, data, axis))


def bias(maker: Maker, x: int, w: int, size: int, taps: int) -> list[int]:
    """No bias, or one in steps of input scale * weight scale, as large as sums of `taps` products or less."""
    if maker.often(0.25) and not maker.always_bias:
        return []
    source = np.float32(maker.scale(x))
    scales = tuple(float(source * np.float32(scale)) for scale in maker.tensors[w].scale)
    dtype = "int64" if maker.dtype == "int16" else "int32"
    reach = int(products(maker, w, taps) * maker.one_of(0.1, 1, 1, 1, 3, 100)) + 1
    data = maker.rng.integers(-reach, reach, size).astype(dtype)
    return [maker.add(TensorEntry("b", (size,), dtype, scales, 0, data))]


def products(maker: Maker, w: int, taps: int) -> float:
    """About how large sums of so many products of random elements are."""
    reach = 74.0 * (256 if maker.dtype == "int16" else 1) * (4 if maker.tensors[w].dtype == "int4" else 74)
    return reach * float(np.sqrt(taps))


def summed(maker: Maker, shape: Sequence[int], x: int, w: int, taps: int) -> int:
    """A result whose range fits sums of `taps` products, more or less."""
    fine = 256 if maker.dtype == "int16" else 1
    spread = products(maker, w, taps) * maker.scale(x) * max(maker.tensors[w].scale)
    return maker.add(maker.entry(shape, maker.near(spread / (60 * fine))))


def convolution(maker: Maker, x: int, bits: int = 8) -> int:
    """CONV_2D, with groups now and then."""
    batch, rows, columns, depth = maker.shape(x)
    kernel, stride, dilation, same = geometry(maker, (rows, columns), True)
    groups = maker.one_of(1, 1, 1, *(n for n in (2, 3, 4) if depth % n == 0)) if maker.dtype == "int8" else 1
    outputs = groups * maker.one_of(*range(1, 10), 16, 20)
    w = weights(maker, (outputs, *kernel, depth // groups), 0, bits)
    taps = kernel[0] * kernel[1] * depth // groups
    operands = [x, w, *bias(maker, x, w, outputs, taps)]
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [windows(n, s, t, same) for n, s, t in zip((rows, columns), span, stride, strict=True)]
    y = summed(maker, (batch, *size, outputs), x, w, taps)
    return maker.call(
        "CONV_2D",
        operands,
        y,
        "Conv2DOptions",
        3,
        padding=0 if same else 1,
        strideH=stride[0],
        strideW=stride[1],
        dilationHFactor=dilation[0],
        dilationWFactor=dilation[1],
        fusedActivationFunction=maker.activation(),
    )


def depthwise(maker: Maker, x: int, bits: int = 8) -> int:
    """DEPTHWISE_CONV_2D, with depth multipliers."""
    batch, rows, columns, depth = maker.shape(x)
    kernel, stride, dilation, same = geometry(maker, (rows, columns), True)
    multiplier = maker.one_of(1, 1, 1, 2, 3)
    outputs = depth * multiplier
    w = weights(maker, (1, *kernel, outputs), 3, bits)
    operands = [x, w, *bias(maker, x, w, outputs, kernel[0] * kernel[1])]
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [windows(n, s, t, same) for n, s, t in zip((rows, columns), span, stride, strict=True)]
    y = summed(maker, (batch, *size, outputs), x, w, kernel[0] * kernel[1])
    return maker.call(
        "DEPTHWISE_CONV_2D",
        operands,
        y,
        "DepthwiseConv2DOptions",
        3,
        padding=0 if same else 1,
        strideH=stride[0],
        strideW=stride[1],
        depthMultiplier=multiplier,
        dilationHFactor=dilation[0],
        dilationWFactor=dilation[1],
        fusedActivationFunction=maker.activation(),
    )


def fully_connected(maker: Maker, x: int, bits: int = 8) -> int:
    """FULLY_CONNECTED; keeps the leading axes, or reads the input as rows."""
    shape = maker.shape(x)
    keep = maker.often(0.4)
    depth = shape[-1] if keep or maker.often(0.5) else int(np.prod(shape[1:]))
    outputs = maker.one_of(*range(1, 10), 16, 33)
    w = weights(maker, (outputs, depth), 0, bits)
    operands = [x, w, *bias(maker, x, w, outputs, depth)]
    rows = int(np.prod(shape)) // depth
    y = summed(maker, (*shape[:-1], outputs) if keep else (rows, outputs), x, w, depth)
    return maker.call(
        "FULLY_CONNECTED",
        operands,
        y,
        "FullyConnectedOptions",
        5,
        keepNumDims=keep,
        fusedActivationFunction=maker.activation(),
    )


def pool(maker: Maker, x: int) -> int:
    """AVERAGE_POOL_2D or MAX_POOL_2D."""
    batch, rows, columns, depth = maker.shape(x)
    kernel, stride, _, same = geometry(maker, (rows, columns), False)
    if maker.often(0.2):
        kernel, same = [rows, columns], False
    size = [windows(n, k, t, same) for n, k, t in zip((rows, columns), kernel, stride, strict=True)]
    y = maker.alike(x, (batch, *size, depth))
    return maker.call(
        maker.one_of("AVERAGE_POOL_2D", "MAX_POOL_2D"),
        [x],
        y,
        "Pool2DOptions",
        padding=0 if same else 1,
        strideH=stride[0],
        strideW=stride[1],
        filterHeight=kernel[0],
        filterWidth=kernel[1],
        fusedActivationFunction=maker.activation(),
    )


def second_operand(maker: Maker, shape: tuple[int, ...]) -> int:
    """Another input or a constant, of the same shape or one that broadcasts."""
    if maker.often(0.5):
        shape = tuple(maker.one_of(1, size) for size in shape)
        shape = shape[maker.number(0, len(shape) - 1) :] if maker.often(0.5) else shape
    entry = maker.entry(shape)
    if maker.often(0.35):
        data = maker.rng.integers(LOW[entry.dtype], HIGH[entry.dtype] + 1, shape).astype(entry.dtype)
        entry = TensorEntry(entry.name, shape, entry.dtype, entry.scale, entry.zero_point, data)
    return maker.add(entry)


def arithmetic(maker: Maker, x: int) -> int:
    """ADD, SUB or MUL, of a tensor and another or itself."""
    shape = maker.shape(x)
    opcode = maker.one_of("ADD", "SUB", "MUL")
    other = x if maker.often(0.1) else second_operand(maker, shape)
    a, b = (maker.scale(place) for place in (x, other))
    fine = 256 if maker.dtype == "int16" else 1
    wanted = a * b * 60.0 * fine if opcode == "MUL" else max(a, b) * 1.1
    y = maker.add(maker.entry(shape, maker.near(wanted)))
    operands = [x, other] if maker.often(0.7) else [other, x]
    return maker.call(opcode, operands, y, f"{opcode.title()}Options", fusedActivationFunction=maker.activation())


def extreme(maker: Maker, x: int) -> int:
    """MAXIMUM or MINIMUM."""
    shape = maker.shape(x)
    other = maker.alike(x, tuple(maker.one_of(1, size, size) for size in shape))
    return maker.call(maker.one_of("MAXIMUM", "MINIMUM"), [x, other], maker.alike(x, shape), "MaximumMinimumOptions")


def mean(maker: Maker, x: int) -> int:
    """MEAN over rows and columns."""
    batch, _, _, depth = maker.shape(x)
    axes = maker.integers(maker.one_of([1, 2], [2, 1], [-3, -2]))
    keep = maker.often(0.5)
    shape = (batch, 1, 1, depth) if keep else (batch, depth)
    scale = maker.near(maker.scale(x), 2, 0.5)
    y = maker.alike(x, shape) if maker.often(0.3) else maker.add(maker.entry(shape, scale))
    return maker.call("MEAN", [x, axes], y, "ReducerOptions", keepDims=keep)


def mean_of_any_axes(maker: Maker, x: int) -> int:
    """MEAN over some axes."""
    shape = maker.shape(x)
    axes = [axis for axis in range(len(shape)) if maker.often(0.5)] or [0]
    keep = maker.often(0.5)
    kept = [1 if axis in axes else size for axis, size in enumerate(shape)]
    result = kept if keep else [size for axis, size in enumerate(shape) if axis not in axes] or [1]
    keep = keep or len(axes) == len(shape) == 1
    y = maker.add(maker.entry(result, maker.near(maker.scale(x), 2, 0.5)))
    return maker.call("MEAN", [x, maker.integers(axes)], y, "ReducerOptions", keepDims=keep)


def softmax(maker: Maker, x: int) -> int:
    """SOFTMAX over the last axis."""
    short = maker.dtype == "int16"
    y = maker.add(maker.entry(maker.shape(x), 2.0**-15 if short else 2.0**-8, 0 if short else -128))
    beta = float(maker.one_of(1.0, 0.25, 2.0, 0.7))
    return maker.call("SOFTMAX", [x], y, "SoftmaxOptions", beta=beta)


def function(maker: Maker, x: int) -> int:
    """A function of each element."""
    shape = maker.shape(x)
    short = maker.dtype == "int16"
    opcode = maker.one_of("LOGISTIC", "TANH", "LEAKY_RELU", *(() if short else ("HARD_SWISH", "RELU", "RELU6")))
    near = maker.near(maker.scale(x), 0.5)
    fixed = {"LOGISTIC": (2.0**-8, -128), "TANH": (2.0**-7, 0)}
    scale, zero_point = fixed.get(opcode, (near, None)) if not short or opcode not in fixed else (2.0**-15, 0)
    # Micro's RELU6 takes the result to be quantised as the operand, whatever the file says.
    y = maker.alike(x, shape) if opcode == "RELU6" else maker.add(maker.entry(shape, scale, zero_point))
    kind = {"HARD_SWISH": "HardSwishOptions", "LEAKY_RELU": "LeakyReluOptions"}
    options = {"alpha": float(np.float32(maker.rng.uniform(-0.2, 1.5)))} if opcode == "LEAKY_RELU" else {}
    return maker.call(opcode, [x], y, kind.get(opcode, ""), 1, **options)


def requantize(maker: Maker, x: int) -> int:
    """QUANTIZE, from one quantisation to another and from one type to another."""
    near = maker.near(maker.scale(x), 1, 1.5)
    source, fine = maker.dtype, {"int16": 256.0}
    results = {"int8": ("int8", "int8", "int16"), "int16": ("int8", "int16"), "uint8": ("int8",)}
    maker.dtype = maker.one_of(*results[source])
    y = maker.add(maker.entry(maker.shape(x), near * fine.get(source, 1.0) / fine.get(maker.dtype, 1.0)))
    maker.dtype = source
    return maker.call("QUANTIZE", [x], y, "QuantizeOptions")


def rescale(maker: Maker, x: int) -> int:
    """QUANTIZE within one type."""
    y = maker.add(maker.entry(maker.shape(x), maker.near(maker.scale(x), 1, 1.5)))
    return maker.call("QUANTIZE", [x], y, "QuantizeOptions")


def place_of_extreme(maker: Maker, x: int) -> int:
    """ARG_MAX or ARG_MIN."""
    shape = list(maker.shape(x))
    axis = maker.number(0, len(shape) - 1)
    opcode, options = maker.one_of(("ARG_MAX", "ArgMaxOptions"), ("ARG_MIN", "ArgMinOptions"))
    operands = [x, maker.integers([axis])]
    y = maker.add(TensorEntry("places", tuple(shape[:axis] + shape[axis + 1 :]), "int32"))
    return maker.call(opcode, operands, y, options, outputType=2)


def pad(maker: Maker, x: int) -> int:
    """PAD, or PADV2 with a value."""
    shape = maker.shape(x)
    pads = [[maker.one_of(0, 0, 1, 2, 3), maker.one_of(0, 0, 1, 3)] for _ in shape]
    y_shape = [size + sum(pair) for size, pair in zip(shape, pads, strict=True)]
    operands = [x, maker.integers(pads)]
    if maker.often(0.4):
        of = maker.tensors[x]
        value = np.array([maker.number(LOW[of.dtype], HIGH[of.dtype])], of.dtype)
        operands.append(maker.add(TensorEntry("value", (1,), of.dtype, of.scale, of.zero_point, value)))
        return maker.call("PADV2", operands, maker.alike(x, y_shape), "PadV2Options")
    return maker.call("PAD", operands, maker.alike(x, y_shape), "PadOptions")


def concatenation(maker: Maker, x: int) -> int:
    """CONCATENATION of up to four tensors, one of them twice now and then."""
    shape = maker.shape(x)
    axis = maker.number(0, len(shape) - 1)
    parts = [x]
    for _ in range(maker.number(1, 3)):
        part = (*shape[:axis], maker.number(1, 6), *shape[axis + 1 :])
        parts.append(x if maker.often(0.15) else maker.alike(x, part))
    maker.rng.shuffle(parts)
    total = sum(maker.shape(part)[axis] for part in parts)
    y = maker.alike(x, (*shape[:axis], total, *shape[axis + 1 :]))
    return maker.call(
        "CONCATENATION",
        [int(part) for part in parts],
        y,
        "ConcatenationOptions",
        axis=maker.one_of(axis, axis - len(shape)),
        fusedActivationFunction=0,
    )


def strided_slice(maker: Maker, x: int) -> int:
    """STRIDED_SLICE with masks, or SLICE."""
    shape = maker.shape(x)
    start = [maker.number(0, size - 1) for size in shape]
    stop = [maker.number(low + 1, size) for low, size in zip(start, shape, strict=True)]
    if maker.often(0.3):
        sizes = [high - low for low, high in zip(start, stop, strict=True)]
        operands = [x, maker.integers(start), maker.integers(sizes)]
        return maker.call("SLICE", operands, maker.alike(x, sizes), "SliceOptions")
    step = [maker.one_of(1, 1, 2, 3) for _ in shape]
    masks = [maker.number(0, 15) & maker.number(0, 15) for _ in range(2)]
    for axis, size in enumerate(shape):
        start[axis] = 0 if masks[0] >> axis & 1 else start[axis]
        stop[axis] = size if masks[1] >> axis & 1 else stop[axis]
    result = [-(-(high - low) // s) for low, high, s in zip(start, stop, step, strict=True)]
    given = [
        [at - (size if maker.often(0.3) and at < size else 0) for at, size in zip(row, shape, strict=True)]
        for row in (start, stop)
    ]
    operands = [x, *(maker.integers(row) for row in (*given, step))]
    return maker.call(
        "STRIDED_SLICE", operands, maker.alike(x, result), "StridedSliceOptions", beginMask=masks[0], endMask=masks[1]
    )


def transpose(maker: Maker, x: int) -> int:
    """TRANSPOSE."""
    shape = maker.shape(x)
    order = [int(axis) for axis in maker.rng.permutation(len(shape))]
    y = maker.alike(x, [shape[axis] for axis in order])
    return maker.call("TRANSPOSE", [x, maker.integers(order)], y, "TransposeOptions")


def reshape(maker: Maker, x: int) -> int:
    """RESHAPE to another order of the same factors."""
    shape = [int(size) for size in maker.rng.permutation(maker.shape(x))]
    given = list(shape)
    if maker.often(0.4):
        given[maker.number(0, len(shape) - 1)] = -1
    return maker.call("RESHAPE", [x, maker.integers(given)], maker.alike(x, shape), "ReshapeOptions", 1)


Step = Callable[[Maker, int], int]
"""Puts an operator on a tensor and gives its result."""

STEPS: Mapping[str, Step] = {
    "convolution": convolution,
    "depthwise": depthwise,
    "fully_connected": fully_connected,
    "pool": pool,
    "arithmetic": arithmetic,
    "extreme": extreme,
    "mean": mean,
    "softmax": softmax,
    "function": function,
    "rescale": rescale,
    "pad": pad,
    "concatenation": concatenation,
    "strided_slice": strided_slice,
    "transpose": transpose,
    "reshape": reshape,
}
"""Every operator on int8 images."""


def chain(maker: Maker, x: int) -> int:
    """Two to five operators one after another; a later one may read an earlier result again."""
    seen = [x]
    for _ in range(maker.number(2, 5)):
        rank = len(maker.shape(x))
        movable = ("function", "arithmetic", "fully_connected", "concatenation", "softmax", "reshape", "transpose")
        frequent = ("convolution", "convolution", "depthwise", "depthwise", "pool", "pool", "arithmetic")
        x = STEPS[maker.one_of(*(frequent + tuple(STEPS) if rank == 4 else movable))](maker, x)
        alike = [place for place in seen if maker.shape(place) == maker.shape(x)]
        if alike and maker.often(0.5):
            residual = maker.one_of(*alike)
            wanted = max(maker.scale(x), maker.scale(residual)) * 1.2
            y = maker.add(maker.entry(maker.shape(x), wanted))
            x = maker.call("ADD", [x, residual], y, "AddOptions", fusedActivationFunction=maker.activation())
        seen.append(x)
    return x
