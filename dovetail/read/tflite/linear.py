"""TFLite convolutions, matrix products, pools and bilinear resizing."""

from __future__ import annotations

from math import prod

import numpy as np

from dovetail.ir.operators.activation import Unary, UnaryKind
from dovetail.ir.operators.base import Padding2d
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Resample, Reshape
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import Array, DType, Shape
from dovetail.read.geometry import Pair, TransposedAxis, same_border, spans, transposed_convolution
from dovetail.read.tflite.file import AGAIN, ALIKE, FOLD, TfliteTensor
from dovetail.read.tflite.values import TfliteValues, bias_scale

SAME, VALID = 0, 1
"""Padding by its number in the schema."""

WEIGHT_TYPES = {
    DType.INT8: (DType.INT8, DType.INT4),
    DType.INT16: (DType.INT8, DType.INT4),
    DType.UINT8: (DType.UINT8,),
    DType.FLOAT32: (DType.FLOAT32, DType.INT8, DType.INT4, DType.UINT8),
}
"""Weights that may meet an activation. Integers at a float activation ("hybrid") mean their real values."""

BIAS_TOLERANCE = 0.01
"""Largest relative difference of a declared bias scale from input scale * weight scale."""


def _pair(v: TfliteValues, rows: str, columns: str, what: str) -> Pair:
    """Two options, which must be positive."""
    found = int(v.op.options[rows]), int(v.op.options[columns])
    if min(found) < 1:
        raise v.refuse(f"the {what} is {found[0]}x{found[1]}; both must be at least 1", AGAIN)
    return found


def _border(v: TfliteValues, shape: Shape, span: Pair, stride: Pair) -> Padding2d:
    """Rows and columns the padding option adds."""
    padding = int(v.op.options["Padding"])
    if padding == VALID:
        return (0, 0), (0, 0)
    if padding != SAME:
        raise v.refuse(f"the padding {padding} is not supported, only SAME ({SAME}) and VALID ({VALID})")
    return same_border(shape[1], span[0], stride[0]), same_border(shape[2], span[1], stride[1])


def _weights(v: TfliteValues, x: TfliteTensor, rank: int, axis: int) -> TfliteTensor:
    """The weight operand: constant, of a type that fits x, quantised per tensor or along `axis`."""
    w = v.input(1)
    if not w.is_constant or len(w.shape) != rank:
        raise v.refuse(f"the weights {w} must be a constant with {rank} axes", FOLD)
    if w.dtype not in WEIGHT_TYPES.get(x.dtype, ()):
        raise v.refuse(f"weights {w} at activations {x} are not supported")
    if w.quantisation and len(w.quantisation.scale) > 1 and w.quantisation.axis != axis:
        raise v.refuse(f"the weights {w} are quantised along axis {w.quantisation.axis}, expected {axis}", ALIKE)
    return w


def _bias(v: TfliteValues, x: TfliteTensor, w: TfliteTensor, position: int = 2) -> list[str]:
    """The bias in float: none, as it is, or counted in units of input scale * weight scale."""
    bias = v.optional(position)
    if bias is None:
        return []
    v.array(bias, "bias")
    if x.dtype is DType.FLOAT32:
        if bias.dtype is not DType.FLOAT32:
            raise v.refuse(f"the bias {bias} at float activations must be float32", AGAIN)
        return [v.value(bias)]
    expected = (DType.INT32, DType.INT64) if x.dtype is DType.INT16 else (DType.INT32,)
    if bias.dtype not in expected:
        raise v.refuse(f"the bias {bias} must be {' or '.join(kind.text for kind in expected)}", AGAIN)
    v.parameters(x), v.parameters(w)
    scale = bias_scale(x, w)
    declared = bias.quantisation
    if declared is not None and not np.allclose(declared.scale, scale, rtol=BIAS_TOLERANCE, atol=0):
        raise v.refuse(f"the scale of the bias {bias} is not input scale * weight scale", "quantise it again")
    if declared is not None and declared.zero_point.any():
        raise v.refuse(f"the bias {bias} has a zero point, which must be 0", ALIKE)
    steps = v.builder.constant(f"{bias.name}_scale", scale)
    zeros = v.builder.constant(f"{bias.name}_zero_point", np.zeros(len(scale), np.int32))
    return [v.dequantize(v.value(bias), steps, zeros)]


def _check_bias_type(v: TfliteValues) -> None:
    """`quantized_bias_type` must name the bias' own type; 0 (FLOAT32) means it was not set."""
    number, bias = int(v.op.options["QuantizedBiasType"]), v.optional(2)
    if number and bias is not None and {2: DType.INT32, 4: DType.INT64}.get(number) is not bias.dtype:
        raise v.refuse(f"quantized_bias_type is {number}, the bias is {bias}", AGAIN)


def convolution(v: TfliteValues) -> str:
    """CONV_2D, groups included (they show in the depth of the weights)."""
    v.options("Conv2DOptions")
    x = v.image()
    result = _convolve(v, x, _weights(v, x, rank=4, axis=0), Conv2d)
    _check_bias_type(v)
    return result


def depthwise(v: TfliteValues) -> str:
    """DEPTHWISE_CONV_2D. The depth multiplier is implied by the shapes; the option must agree unless it is 0."""
    options, x = v.options("DepthwiseConv2DOptions"), v.image()
    w = _weights(v, x, rank=4, axis=3)
    if w.shape[0] != 1 or w.shape[3] % x.shape[3] != 0:
        raise v.refuse(f"the weights {w} do not fit the input {x}", AGAIN)
    multiplier, declared = w.shape[3] // x.shape[3], int(options["DepthMultiplier"])
    if declared not in (0, multiplier):
        raise v.refuse(f"the depth multiplier is {declared}, the shapes say {multiplier}", AGAIN)
    return _convolve(v, x, w, DepthwiseConv2d)


def _convolve(v: TfliteValues, x: TfliteTensor, w: TfliteTensor, kind: type[Conv2d] | type[DepthwiseConv2d]) -> str:

    v.same_type(x, v.output)
    stride = _pair(v, "StrideH", "StrideW", "stride")
    dilation = _pair(v, "DilationHFactor", "DilationWFactor", "dilation")
    border = _border(v, x.shape, spans(w.shape[1:3], dilation), stride)
    operands = [v.bordered(v.real(x), border), v.real(w), *_bias(v, x, w)]
    return v.finish(kind(stride, dilation), operands, v.activation)


def transpose_conv(v: TfliteValues) -> str:
    """TRANSPOSE_CONV: result's shape, weights, activations, bias."""
    options, result, x = v.options("TransposeConvOptions"), v.output, v.input(2)
    w = _weights(v, x, rank=4, axis=0)
    stride = (int(options["StrideH"]), int(options["StrideW"]))
    padding = int(options["Padding"])
    fits = len(x.shape) == 4 == len(result.shape) and min(stride) >= 1 and padding in (SAME, VALID)
    if not fits or w.shape[3] != x.shape[3] or w.shape[0] != result.shape[3]:
        raise v.refuse(f"{x}, the weights {w}, stride {list(stride)} and padding {padding} do not fit {result}", AGAIN)

    def axis(place: int) -> TransposedAxis:
        """One image axis: the padding is that of the convolution this one transposes (kernels/padding.h)."""
        size, step = result.shape[place], stride[place - 1]
        lead = same_border(size, w.shape[place], step)[0] if padding == SAME else 0
        return TransposedAxis(x.shape[place], w.shape[place], step, lead, size)

    operands = [v.real(x), v.real(w), *_bias(v, x, w, position=3)]
    return v.finish_real(transposed_convolution(v, operands, (axis(1), axis(2)), 1), v.activation)


def fully_connected(v: TfliteValues) -> str:
    """FULLY_CONNECTED: without keep_num_dims the input is read as rows of as many elements as a weight row has."""
    options = v.options("FullyConnectedOptions")
    if int(options["WeightsFormat"]) != 0:
        raise v.refuse(
            "the weights are stored in the shuffled format (SHUFFLED4x16INT8)", "convert with the default format"
        )
    x, w = v.input(0), _weights(v, v.input(0), rank=2, axis=0)
    v.same_type(x, v.output)
    depth = w.shape[1]
    if prod(x.shape) % depth != 0:
        raise v.refuse(f"the weights {w} do not fit the input {x}", AGAIN)
    shape, value = x.shape if options["KeepNumDims"] else (prod(x.shape) // depth, depth), v.value(x)
    if shape != x.shape:
        value = v.add(Reshape(shape), [value], name=f"{x.name}_rows")
    if x.dtype is not DType.FLOAT32:
        value = v.dequantize(value, *v.parameters(x))
    result = v.finish(FullyConnected(), [value, v.real(w), *_bias(v, x, w)], v.activation)
    _check_bias_type(v)
    return result


def batch_matmul(v: TfliteValues) -> str:
    """BATCH_MATMUL of two activations, or of one with a constant."""
    options, operands = v.options("BatchMatMulOptions"), []
    for position, name in enumerate(("AdjX", "AdjY")):
        tensor = v.input(position)
        if len(tensor.shape) < 2 or tensor.dtype is not v.output.dtype:
            raise v.refuse(f"multiplies {tensor} for {v.output}, which is not supported")
        value = v.real(tensor)
        operands.append(v.matrix_turned(value, "transposed") if options[name] else value)
    return v.finish(MatrixProduct(), operands)


def _pool(v: TfliteValues) -> tuple[Pair, Pair, Padding2d]:
    """Kernel, stride and padding of a pool."""
    v.options("Pool2DOptions")
    x = v.image()
    kernel = _pair(v, "FilterHeight", "FilterWidth", "pool window")
    stride = _pair(v, "StrideH", "StrideW", "stride")
    return kernel, stride, _border(v, x.shape, kernel, stride)


def _same_scale(v: TfliteValues) -> TfliteTensor:
    """The first operand; TFLite's pools copy the raw values, so both sides must be quantised alike."""
    x = v.input(0)
    v.same_type(x, v.output)
    v.keeps(x, v.output, what="a pool must keep the quantisation, that of")
    return x


def average_pool(v: TfliteValues) -> str:
    """AVERAGE_POOL_2D: padding does not count."""
    return v.finish(AveragePool2d(*_pool(v)), [v.real(_same_scale(v))], v.activation)


def max_pool(v: TfliteValues) -> str:
    """MAX_POOL_2D: on the integers themselves unless an activation is fused."""
    operator, x = MaxPool2d(*_pool(v)), _same_scale(v)
    return v.finish(operator, [v.real(x)], v.activation) if v.activation else v.add(operator, [v.value(x)])


def l2_pool(v: TfliteValues) -> str:
    """L2_POOL_2D: the root of the mean of squares, float."""
    operator, x = AveragePool2d(*_pool(v)), v.input(0)
    if x.dtype is not DType.FLOAT32:
        raise v.refuse(f"pools float32 only, got {x}")
    mean = v.add(operator, [v.square(v.value(x), "squares")], "mean")
    return v.finish(Unary(UnaryKind.SQUARE_ROOT), [mean], v.activation)


def _linear_taps(size: int, result: int, align: bool, centred: bool, exact: bool) -> tuple[Array, Array]:
    """Places and weights [result, 2]; unless `exact` in steps of 1/1024, as TFLite's integer kernel takes them
    (reference/resize_bilinear.h)."""
    corners = align and result > 1
    if exact:
        step = np.float32(size - corners) / np.float32(result - corners)
        place = np.arange(result, dtype=np.float32)
        middle = np.float32(0.5)
        at = ((place + middle) * step - middle if centred else place * step).astype(np.float64)
        low, high = np.maximum(np.floor(at), 0), np.minimum(np.ceil(at), size - 1)
    else:
        whole = result - corners
        scale = ((size - corners) * 1024 + whole // 2) // whole
        steps = np.arange(result, dtype=np.int64) * scale + (scale // 2 - 512 if centred else 0)
        towards_zero = np.where(steps < 0, -(-steps // 1024), steps // 1024)
        raised = steps + 1023
        low = np.maximum(towards_zero, 0).astype(np.float64)
        high = np.minimum(np.where(raised < 0, -(-raised // 1024), raised // 1024), size - 1).astype(np.float64)
        at = steps / 1024.0
    share = at - low
    places = np.stack([low, high], axis=1).astype(np.int32)
    return np.clip(places, 0, size - 1), np.stack([1.0 - share, share], axis=1).astype(np.float32)


def resize_bilinear(v: TfliteValues) -> str:
    """RESIZE_BILINEAR: both axes in one step."""
    options, x = v.options("ResizeBilinearOptions"), v.input(0)
    v.keeps(x, v.output, what="resizing must keep the quantisation, that of")
    v.image()
    align, centred = bool(options["AlignCorners"]), bool(options["HalfPixelCenters"])
    operands, results = [v.real(x)], v.integers(1, "size")
    v.expect_shape((x.shape[0], *results, x.shape[3]))
    for axis, result in zip((1, 2), results, strict=True):
        places, weights = _linear_taps(x.shape[axis], result, align, centred, x.dtype is DType.FLOAT32)
        operands += [v.constant(places, "places"), v.constant(weights, "weights")]
    return v.finish(Resample((1, 2)), operands)
