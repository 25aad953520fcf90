"""Quantisation in ONNX: QDQ, quantised operators of ONNX and of ONNX Runtime, and QONNX's own operators.

QONNX's facts are from its definitions at github.com/fastmachinelearning/qonnx (docs/qonnx-custom-ops); Brevitas and
QKeras export it. Quant gives (clamp(round(x / scale + zeropt)) - zeropt) * scale, its integers of `bitwidth` bits, one
less of range at the low end (signed) or the high end (unsigned) where it is `narrow`; BipolarQuant gives scale where
x >= 0, else -scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dovetail.ir.operators.activation import Unary, UnaryKind
from dovetail.ir.operators.elementwise import BinaryKind, Convert
from dovetail.ir.operators.linear import FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Concat, Reshape
from dovetail.ir.operators.reduction import Reduce, ReduceKind
from dovetail.ir.types import Array, DType
from dovetail.read.onnx.file import Constant, element_type
from dovetail.read.onnx.linear import convolved, matrix, with_rows
from dovetail.read.onnx.microsoft import FLOATS, dequantized_blocks
from dovetail.read.onnx.values import AGAIN, ALIKE, Importer, OnnxQuantisation, OnnxValues
from dovetail.read.onnx.windows import average, softmax_of, whole

QUANTISED_TYPES = (DType.INT4, DType.UINT4, DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
"""Integers QuantizeLinear may give."""


def quantize_linear(v: OnnxValues) -> str:
    """QuantizeLinear, per tensor or per axis."""
    _refuse_blocks(v)
    v.only("saturate", 1)  # concerns float8 only
    v.only("precision", 0)
    named, axis = int(v.attribute("output_dtype", 0)), int(v.attribute("axis", 1))
    default, x = element_type(named) or DType.UINT8, v.value(0)
    if v.has(1) and v.op.inputs[1] not in v.constants:
        return _quantised_at_run_time(v, default)
    scaling = v.scaling(1, 2, axis, default, len(v.shape(x)))
    if scaling.dtype not in QUANTISED_TYPES or (named and scaling.dtype is not element_type(named)):
        raise v.refuse(f"quantising to {scaling.dtype.text} is not supported")
    return v.quantized(x, scaling)


def dequantize_linear(v: OnnxValues) -> str:
    """DequantizeLinear, per tensor or per axis, constants in blocks too; constants that are not stay integers."""
    block = int(v.attribute("block_size", 0))
    if element_type(int(v.attribute("output_dtype", 0))) not in (None, DType.FLOAT32):
        raise v.refuse("only float32 results are supported")
    if block:
        return dequantized_blocks(v, block, int(v.attribute("axis", 1)))
    x = v.value(0)
    kind = v.type_of(x)
    if not kind.dtype.is_integer:
        raise v.refuse(f"dequantises {kind}; only integers are supported")
    scaling = v.scaling(1, 2, int(v.attribute("axis", 1)), kind.dtype, len(kind.shape))
    return v.dequantized(x, scaling, v.stem)


def _refuse_blocks(v: OnnxValues) -> None:
    if v.attribute("block_size", 0):
        what = f"the attribute block_size = {v.op.attributes['block_size']} is not supported"
        raise v.refuse(what, "quantise per tensor or per axis")


def dynamic_quantize(v: OnnxValues) -> str:
    """DynamicQuantizeLinear: uint8 with the scale and zero point that the operand's range asks for."""
    x = v.real()
    axes, zero, steps, ends = tuple(range(len(v.shape(x)))), v.number(0.0), v.number(255.0), []
    for kind, limit in ((ReduceKind.MINIMUM, BinaryKind.MINIMUM), (ReduceKind.MAXIMUM, BinaryKind.MAXIMUM)):
        end = v.add(Reshape(()), [v.add(Reduce(kind, axes), [x], "end")], "end")
        ends.append(v.binary(limit, end, zero, "limit"))
    scale = v.over(v.minus(ends[1], ends[0], "span"), steps, "scale")
    place = v.over(v.minus(zero, ends[0], "below"), scale, "place")
    offset = v.clamp(v.unary(UnaryKind.ROUND, place, "rounded"), 0.0, 255.0, "offset")
    result = _stepped(v, x, scale, offset, DType.UINT8)
    for name, value in zip(v.op.outputs[1:], (scale, v.add(Convert(DType.UINT8), [offset], "integer")), strict=False):
        if name:
            v.values[name] = v.add(Reshape(()), [value], name=name)
    return result


def _stepped(v: OnnxValues, x: str, scale: str, offset: str, dtype: DType) -> str:
    """round(x / scale) + offset, limited to the type; all of them computed floats."""
    rounded = v.unary(UnaryKind.ROUND, v.over(x, scale, "counted"), "rounded")
    limited = v.clamp(v.plus(rounded, offset, "raised"), float(dtype.low), float(dtype.high), "limited")
    return v.add(Convert(dtype), [limited])


def _quantised_at_run_time(v: OnnxValues, default: DType) -> str:
    """QuantizeLinear with a scale that is computed, for the whole tensor."""
    x, scale = v.real(), v.real(1)
    offset = v.value(2) if v.has(2) else v.number(0.0)
    dtype = v.type_of(offset).dtype if v.has(2) else default
    if v.type_of(scale).elements != 1 or dtype not in (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16):
        raise v.refuse(f"quantising to {dtype.text} by the computed scale {v.type_of(scale)} is not supported")
    return _stepped(v, x, scale, v.add(Convert(DType.FLOAT32), [offset], "offset"), dtype)


def _integer_bias(v: OnnxValues, position: int, source: OnnxQuantisation, kernel: OnnxQuantisation) -> list[str]:
    """An optional int32 bias in float: it is counted in units of input scale * weight scale."""
    if not v.has(position):
        return []
    bias = v.value(position)
    kind = v.type_of(bias)
    if kind.dtype is not DType.INT32:
        raise v.refuse(f"the bias {bias!r} must be int32, got {kind.dtype.text}", AGAIN)
    row = bias if len(kind.shape) == 1 else v.add(Reshape((kind.elements,)), [bias], name=f"{bias}_row")
    steps = (source.steps * kernel.steps).astype(np.float32)
    return [v.dequantized(row, v.scaling_of(bias, steps, np.zeros(len(steps), np.int32), 0, DType.INT32))]


def qlinear_conv(v: OnnxValues) -> str:
    """QLinearConv."""
    source, kernel, result = v.scaling(1, 2), v.scaling(4, 5, 0, rank=4), v.scaling(6, 7)
    x, w = v.dequantized(v.value(0), source), v.dequantized(v.value(3), kernel)
    image = convolved(v, x, w, _integer_bias(v, 8, source, kernel))
    return v.of_image(v.quantized(image, result, "nhwc"))


def qlinear_matmul(v: OnnxValues) -> str:
    """QLinearMatMul; the right operand is a constant matrix, quantised per tensor or per column, or of several."""
    rank = len(v.shape(v.value(3)))
    left, right = v.scaling(1, 2), v.scaling(4, 5, rank - 1, rank=rank)
    x = v.dequantized(with_rows(v, v.value(0)), left)
    b = v.dequantized(v.value(3), right)
    product = v.add(FullyConnected(), [x, matrix(v, b)], "sum") if rank == 2 else v.add(MatrixProduct(), [x, b], "sum")
    return v.quantized(product, v.scaling(6, 7))


def qgemm(v: OnnxValues) -> str:
    """com.microsoft QGemm: an int32 bias in units of the product's scale; the result is float without a scale."""
    v.only("alpha", 1.0)
    v.only("transA", 0)
    turned = bool(v.attribute("transB", 0))
    left, right = v.scaling(1, 2), v.scaling(4, 5, 0 if turned else 1, rank=2)
    x = v.dequantized(with_rows(v, v.value(0)), left)
    w = matrix(v, v.dequantized(v.value(3), right), rows_first=not turned)
    result = v.add(FullyConnected(), [x, w, *_integer_bias(v, 6, left, right)], "sum" if v.has(7) else "")
    return v.quantized(result, v.scaling(7, 8)) if v.has(7) else result


def qlinear_two(kind: BinaryKind, word: str) -> Importer:
    """The importer of a quantised sum or product of com.microsoft."""
    return lambda v: v.quantized(v.binary(kind, v.real_operand(0), v.real_operand(3), word), v.scaling(6, 7))


def qlinear_concat(v: OnnxValues) -> str:
    """com.microsoft QLinearConcat: every part with its own quantisation."""
    result = v.scaling(0, 1)
    parts = [v.real_operand(first) for first in range(2, len(v.op.inputs), 3)]
    return v.quantized(v.add(Concat(v.axis_of(parts[0], 1)), parts, "real"), result)


def qlinear_softmax(v: OnnxValues) -> str:
    """com.microsoft QLinearSoftmax; its attribute `opset` says which meaning of `axis` holds."""
    x = v.real_operand(0)
    return v.quantized(softmax_of(v, x, int(v.attribute("opset", 13)), "real"), v.scaling(3, 4))


def qlinear_unary(kind: UnaryKind, alpha: float = 0.0) -> Importer:
    """The importer of a quantised function of com.microsoft."""

    def build(v: OnnxValues) -> str:
        operator = Unary(kind, float(v.attribute("alpha", alpha)) if alpha else 0.0)
        return v.quantized(v.add(operator, [v.real_operand(0)], "real"), v.scaling(3, 4))

    return build


def qlinear_pool(pool: Callable[[OnnxValues, str], str]) -> Importer:
    """The importer of a pool of com.microsoft, whose image may be NHWC."""

    def build(v: OnnxValues) -> str:
        source, result, last = v.scaling(1, 2), v.scaling(3, 4), v.attribute("channels_last", 0)
        image = v.dequantized(v.value(0) if last else v.image(v.value(0)), source)
        pooled = pool(v, image)
        return v.quantized(pooled, result) if last else v.of_image(v.quantized(pooled, result, "nhwc"))

    return build


DOMAINS = ("qonnx.custom_op.general", "finn.custom_op.general", "onnx.brevitas")
"""Domains QONNX's operators are found in."""

MOST_BITS = 16
"""Widest integers of theirs that are read."""

_ROUNDINGS: Mapping[str, Callable[[Array], Array]] = {
    **{"ROUND": np.rint, "HALF_EVEN": np.rint, "FLOOR": np.floor, "CEIL": np.ceil},
    "UP": lambda x: np.sign(x) * np.ceil(np.abs(x)),
    **{"DOWN": np.trunc, "ROUND_TO_ZERO": np.trunc},
    "HALF_UP": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "HALF_DOWN": lambda x: np.sign(x) * np.ceil(np.abs(x) - 0.5),
}


def _narrowest(low: int, high: int, least: int = 2) -> DType:
    """The narrowest type of at least so many bits that holds these integers."""
    kinds = [kind for kind in DType if kind.is_integer and kind.signed == (low < 0) and kind.bits >= least]
    return next(kind for kind in kinds if kind.low <= low and high <= kind.high)


def quant(v: OnnxValues) -> str:
    """Quant and IntQuant, of constants (any granularity along one axis) and of computed values (per tensor)."""
    low, high = _grid(v)
    rounding = str(v.attribute("rounding_mode", "ROUND")).upper()
    if rounding not in _ROUNDINGS:
        raise v.refuse(f"rounding_mode = {rounding} is not supported", f"known are {', '.join(_ROUNDINGS)}")
    name = v.name_of(0)
    rank = v.constants[name].array.ndim if name in v.constants else len(v.shape(v.value(0)))
    scale, axis = _row(v, 1, rank)
    zeros, zero_axis = _row(v, 2, rank)
    axis = axis if scale.size > 1 else zero_axis
    if not (scale > 0).all() or (zeros != np.rint(zeros)).any():
        raise v.refuse("the scales must be positive and the zero points whole numbers", ALIKE)
    scale, zeros = np.broadcast_arrays(scale, zeros)
    if name in v.constants:
        array = v.constants[name].array.astype(np.float32)
        shape = [scale.size if index == axis % max(rank, 1) else 1 for index in range(rank)]
        steps = _ROUNDINGS[rounding](array / scale.astype(np.float32).reshape(shape) + zeros.reshape(shape))
        return _constant(v, np.clip(steps, low, high), _narrowest(low, high), scale, zeros, axis)
    if rounding not in ("ROUND", "HALF_EVEN"):
        raise v.refuse(f"rounding_mode = {rounding} of computed values is not supported", "use ROUND")
    if scale.size != 1:
        raise v.refuse(f"a computed value is quantised per channel ({scale.size} scales); only weights may be", ALIKE)
    dtype, x = _narrowest(low, high, 8), v.value(0)
    if (low, high) != (dtype.low, dtype.high):
        least, most = ((limit - float(zeros[0])) * float(scale[0]) for limit in (low, high))
        x = v.clamp(x, least, most, "limited")
    scaling = v.scaling_of(v.stem, scale, zeros, -1, dtype)
    return v.dequantized(v.quantized(x, scaling, "quantized"), scaling, v.stem)


def bipolar_quant(v: OnnxValues) -> str:
    """BipolarQuant of constants: weights of -1 and 1, held in 2 bits."""
    name = v.name_of(0)
    if name not in v.constants:
        hint = "quantise the activations to 2 bits or more (Quant)"
        raise v.refuse("binary activations are not supported, only binary weights", hint)
    array = v.constants[name].array
    scale, axis = _row(v, 1, array.ndim)
    if not (scale > 0).all():
        raise v.refuse("the scales must be positive", ALIKE)
    return _constant(v, np.where(array >= 0, 1, -1), DType.INT2, scale, np.zeros_like(scale), axis)


def _grid(v: OnnxValues) -> tuple[int, int]:
    """The smallest and the largest integer of `bitwidth`, `signed` and `narrow`."""
    bits = v.one_number(3, 8.0, "bit width")
    signed, narrow = (bool(v.attribute(key, default)) for key, default in (("signed", 1), ("narrow", 0)))
    least = 2 if signed else 1
    if bits != int(bits) or not least <= bits <= MOST_BITS:
        kind = "signed" if signed else "unsigned"
        raise v.refuse(f"{bits:g} bits, {kind}, are not supported; {least} to {MOST_BITS} are")
    count = 1 << int(bits)
    return (-count // 2 + narrow, count // 2 - 1) if signed else (0, count - 1 - narrow)


def _row(v: OnnxValues, position: int, rank: int) -> tuple[Array, int]:
    """A constant parameter as a row of elements, and the axis of the operand they run along (-1 for one element)."""
    array = v.constant_operand(position, "quantisation parameter").array
    wide = [index for index, size in enumerate(array.shape) if size > 1]
    if len(wide) > 1 or array.ndim > rank or array.dtype.kind != "f" or not np.isfinite(array).all():
        raise v.refuse(f"the parameter {v.op.inputs[position]!r} must be finite and run along one axis at most", AGAIN)
    axis = wide[0] + rank - array.ndim if wide else -1
    return array.reshape(-1).astype(np.float64), axis


def _constant(v: OnnxValues, integers: Array, dtype: DType, scale: Array, zeros: Array, axis: int) -> str:
    """Put constant integers into the graph, and what they stand for."""
    value = v.place(v.named("quantized"), Constant(integers.astype(dtype.numpy), dtype))
    found = v.dequantized(value, v.scaling_of(v.stem, scale, zeros, axis, dtype), v.stem)
    v.static.add(found)
    return found


MICROSOFT: Mapping[str, Importer] = {
    **FLOATS,
    "DequantizeLinear": dequantize_linear,
    "Gelu": lambda v: v.gelu(v.real(), v.choice("approximate", "none", "none", "tanh") == "tanh"),
    "QGemm": qgemm,
    "QLinearAdd": qlinear_two(BinaryKind.ADD, "sum"),
    "QLinearAveragePool": qlinear_pool(average),
    "QLinearConcat": qlinear_concat,
    "QLinearGlobalAveragePool": qlinear_pool(lambda v, image: whole(v, image, "mean")),
    "QLinearMul": qlinear_two(BinaryKind.MULTIPLY, "product"),
    "QLinearLeakyRelu": qlinear_unary(UnaryKind.LEAKY_RELU, 0.01),
    "QLinearSigmoid": qlinear_unary(UnaryKind.SIGMOID),
    "QLinearSoftmax": qlinear_softmax,
    "QuantizeLinear": quantize_linear,
}
"""ONNX Runtime's own operators (domain com.microsoft)."""

QONNX: Mapping[str, Importer] = {"Quant": quant, "IntQuant": quant, "BipolarQuant": bipolar_quant}
"""QONNX's own operators."""
