"""TFLite convolutions, matrix products, pools and bilinear resizing."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.operators.activation import Unary, UnaryKind
from dovetail.ir.operators.base import SlidingWindow
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Resample
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.geometry import Pair, TransposedAxis, same_border, same_padding, transposed_convolution
from dovetail.read.tflite.file import TfliteTensor
from dovetail.read.tflite.values import TfliteValues
from dovetail.read.values import ALIKE, FOLD, Value

SAME, VALID = 0, 1
"""Padding by its number in the schema."""

WEIGHT_TYPES = {
    DType.INT8: (DType.INT8, DType.INT4),
    DType.INT16: (DType.INT8, DType.INT4),
    DType.UINT8: (DType.UINT8,),
    DType.FLOAT32: (DType.FLOAT32, DType.INT8, DType.INT4, DType.UINT8),
}
"""Weights that may meet an activation. Integers at a float activation ("hybrid") mean their real values."""

BIAS_TOLERANCE = 0.02
"""Largest difference of a declared bias scale from input scale * weight scale, in steps of the result. Runtimes hold a
layer with one scale to it (GetQuantizedConvolutionMultipler), and read no scale of the bias of one with several."""


def _pair(v: TfliteValues, rows: str, columns: str, what: str) -> Pair:
    """Two options, which must be positive."""
    found = v.option(rows), v.option(columns)
    v.wrong_if(min(found) < 1, f"the {what} is {found[0]}x{found[1]}; both must be at least 1")
    return found


def _padded(v: TfliteValues, window: SlidingWindow, shape: Shape) -> SlidingWindow:
    """The window with what the padding option adds around an image."""
    padding = v.option("Padding")
    if padding not in (SAME, VALID):
        raise v.refuse(f"the padding {padding} is not supported, only SAME ({SAME}) and VALID ({VALID})")
    return replace(window, padding=same_padding(window, shape[1:3])) if padding == SAME else window


def _weights(v: TfliteValues, x: TfliteTensor, rank: int, axis: int) -> TfliteTensor:
    """The weight operand: constant, of a type that fits x, quantised per tensor or along `axis`."""
    w = v.input(1)
    v.refuse_if(not w.is_constant or w.rank != rank, f"the weights {w} must be a constant with {rank} axes", FOLD)
    v.refuse_if(w.dtype not in WEIGHT_TYPES.get(x.dtype, ()), f"weights {w} at activations {x} are not supported")
    found = w.quantisation.axis if w.quantisation else -1
    v.refuse_if(found not in (-1, axis), f"the weights {w} are quantised along axis {found}, expected {axis}", ALIKE)
    return w


def _bias(v: TfliteValues, x: TfliteTensor, w: TfliteTensor, position: int = 2) -> list[Value]:
    """The bias in float: none, as it is, or counted in units of input scale * weight scale."""
    bias = v.optional(position)
    if bias is None:
        return []
    v.array(bias, "bias")
    if x.dtype is DType.FLOAT32:
        v.wrong_if(bias.dtype is not DType.FLOAT32, f"the bias {bias} at float activations must be float32")
        return [v.value(bias)]
    expected = (DType.INT32, DType.INT64) if x.dtype is DType.INT16 else (DType.INT32,)
    v.wrong_if(bias.dtype not in expected, f"the bias {bias} must be {' or '.join(kind.text for kind in expected)}")
    scale, declared = v.quantisation(x).scale * v.quantisation(w).scale, bias.quantisation
    away = np.abs(declared.scale - scale).max() if declared and len(scale) == 1 else 0.0
    if away > BIAS_TOLERANCE * float(v.quantisation(v.output).scale[0]) and v.array(bias, "bias").any():
        raise v.refuse(f"the scale of the bias {bias} is not input scale * weight scale", "quantise it again")
    v.refuse_if(declared and declared.zero_point.any(), f"the bias {bias} has a zero point, which must be 0", ALIKE)
    steps = v.placed(f"{bias.name}_scale", scale)
    return [v.dequantized(v.value(bias), steps, v.placed(f"{bias.name}_zero_point", np.zeros(len(scale), np.int32)))]


def _check_bias_type(v: TfliteValues) -> None:
    """`quantized_bias_type` must name the bias' own type; 0 (FLOAT32) means it was not set."""
    number, bias = v.option("QuantizedBiasType"), v.optional(2)
    odd = number and bias is not None and {2: DType.INT32, 4: DType.INT64}.get(number) is not bias.dtype
    v.wrong_if(odd, f"quantized_bias_type is {number}, the bias is {bias}")


def convolution(v: TfliteValues) -> Value:
    """CONV_2D, groups included (they show in the depth of the weights)."""
    x = v.image()
    result = _convolve(v, x, _weights(v, x, rank=4, axis=0), Conv2d)
    _check_bias_type(v)
    return result


def depthwise(v: TfliteValues) -> Value:
    """DEPTHWISE_CONV_2D. The depth multiplier is implied by the shapes; the option must agree unless it is 0."""
    x = v.image()
    w = _weights(v, x, rank=4, axis=3)
    multiplier, declared = w.shape[3] // x.shape[3], v.option("DepthMultiplier")
    v.wrong_if(declared not in (0, multiplier), f"the depth multiplier is {declared}, the shapes say {multiplier}")
    return _convolve(v, x, w, DepthwiseConv2d)


def _convolve(v: TfliteValues, x: TfliteTensor, w: TfliteTensor, kind: type[Conv2d] | type[DepthwiseConv2d]) -> Value:
    v.same_type(x, v.output)
    stride = _pair(v, "StrideH", "StrideW", "stride")
    dilation = _pair(v, "DilationHFactor", "DilationWFactor", "dilation")
    window = _padded(v, SlidingWindow((w.shape[1], w.shape[2]), stride, dilation), x.shape)
    return v.finish(kind(stride, dilation), [v.bordered(v.real(x), window.padding), v.real(w), *_bias(v, x, w)])


def transpose_conv(v: TfliteValues) -> Value:
    """TRANSPOSE_CONV: result's shape, weights, activations, bias."""
    result, x = v.output, v.input(2)
    w, strides, padding = _weights(v, x, 4, 0), [v.option("StrideH"), v.option("StrideW")], v.option("Padding")
    fits = x.rank == 4 == result.rank and min(strides) >= 1 and padding in (SAME, VALID)
    what = f"{x}, the weights {w}, stride {strides} and padding {padding} do not fit {result}"
    v.wrong_if(not fits or w.shape[3] != x.shape[3] or w.shape[0] != result.shape[3], what)
    axes = []
    for place, stride in enumerate(strides, 1):
        # The padding is that of the convolution this one transposes (kernels/padding.h).
        size, span = result.shape[place], w.shape[place]
        lead = same_border(size, span, stride)[0] if padding == SAME else 0
        axes.append(TransposedAxis(x.shape[place], span, stride, lead, size))
    return v.finish(None, [transposed_convolution(v, [v.real(x), v.real(w), *_bias(v, x, w, position=3)], axes, 1)])


def fully_connected(v: TfliteValues) -> Value:
    """FULLY_CONNECTED: without keep_num_dims the input is read as rows of as many elements as a weight row has."""
    what = "the weights are stored in the shuffled format (SHUFFLED4x16INT8)"
    v.refuse_if(v.option("WeightsFormat"), what, "convert with the default format")
    x, w = v.x, _weights(v, v.x, rank=2, axis=0)
    v.same_type(x, v.output)
    count, depth = prod(x.shape), w.shape[1]
    shape, value = x.shape if v.option("KeepNumDims") else (count // depth, depth), v.value(x)
    if shape != x.shape:
        value = v.reshape(value, shape, name=f"{x.name}_rows")
    if x.dtype is not DType.FLOAT32:
        value = v.dequantized(value, *v.parameters(x))
    result = v.finish(FullyConnected(), [value, v.real(w), *_bias(v, x, w)])
    _check_bias_type(v)
    return result


def batch_matmul(v: TfliteValues) -> Value:
    """BATCH_MATMUL of two activations, or of one with a constant."""
    operands = []
    for position, name in enumerate(("AdjX", "AdjY")):
        tensor = v.input(position)
        if tensor.rank < 2 or tensor.dtype is not v.output.dtype:
            raise v.refuse(f"multiplies {tensor} for {v.output}, which is not supported")
        value = v.real(tensor)
        operands.append(v.matrix_turned(value, "transposed") if v.option(name) else value)
    return v.finish(MatrixProduct(), operands)


Pool = type[AveragePool2d] | type[MaxPool2d]


def _pool(v: TfliteValues, kind: Pool) -> AveragePool2d | MaxPool2d:
    """The pool that the options say."""
    x, kernel = v.image(), _pair(v, "FilterHeight", "FilterWidth", "pool window")
    window = _padded(v, SlidingWindow(kernel, _pair(v, "StrideH", "StrideW", "stride")), x.shape)
    return kind(window.kernel, window.stride, window.padding)


def pool(v: TfliteValues, kind: Pool) -> Value:
    """AVERAGE_POOL_2D, whose padding does not count, and MAX_POOL_2D, on the integers themselves unless an activation
    is fused. TFLite's kernels copy the raw values, so both sides must be quantised alike."""
    operator, x = _pool(v, kind), v.x
    v.same_type(x, v.output)
    v.keeps(x, v.output, what="a pool must keep the quantisation, that of")
    if kind is MaxPool2d and not v.activation:
        return v.add(operator, [v.value(x)])
    return v.finish(operator, [v.real(x)])


def l2_pool(v: TfliteValues) -> Value:
    """L2_POOL_2D: the root of the mean of squares, float."""
    mean = v.add(_pool(v, AveragePool2d), [v.square(v.value(v.x), "squares")], "mean")
    return v.finish(Unary(UnaryKind.SQUARE_ROOT), [mean])


def _linear_taps(size: int, result: int, align: bool, centred: bool, exact: bool) -> tuple[Array, Array]:
    """Places and weights [result, 2]; unless `exact` in steps of 1/1024, as TFLite's integer kernel takes them
    (reference/resize_bilinear.h)."""
    corners = align and result > 1
    if exact:
        step, middle = np.float32(size - corners) / np.float32(result - corners), np.float32(0.5)
        place = np.arange(result, dtype=np.float32)
        at = ((place + middle) * step - middle if centred else place * step).astype(np.float64)
    else:
        whole = result - corners
        scale = ((size - corners) * 1024 + whole // 2) // whole
        at = (np.arange(result, dtype=np.int64) * scale + (scale // 2 - 512 if centred else 0)) / 1024.0
    low, high = np.maximum(np.floor(at), 0), np.minimum(np.ceil(at), size - 1)
    places = np.clip(np.stack([low, high], axis=1), 0, size - 1).astype(np.int32)
    return places, np.stack([1.0 - (at - low), at - low], axis=1).astype(np.float32)


def resize_bilinear(v: TfliteValues) -> Value:
    """RESIZE_BILINEAR: both axes in one step."""
    x = v.x
    v.keeps(x, v.output, what="resizing must keep the quantisation, that of")
    (batch, height, width, channels), results = v.image().shape, v.integers(1, "size")
    v.expect_shape((batch, *results, channels))
    align, centred, exact = v.option("AlignCorners"), v.option("HalfPixelCenters"), x.dtype is DType.FLOAT32
    operands = [v.real(x)]
    for size, result in zip((height, width), results, strict=True):
        places, weights = _linear_taps(size, result, align, centred, exact)
        operands += [v.constant(places, "places"), v.constant(weights, "weights")]
    return v.finish(Resample((1, 2)), operands)
