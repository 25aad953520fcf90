"""Quantisation in ONNX: QDQ, quantised operators of ONNX and of ONNX Runtime, and QONNX's own operators.

QONNX's facts are from its definitions at github.com/fastmachinelearning/qonnx (docs/qonnx-custom-ops); Brevitas and
QKeras export it. Quant gives (clamp(round(x / scale + zeropt)) - zeropt) * scale, its integers of `bitwidth` bits, one
less of range at the low end (signed) or the high end (unsigned) where it is `narrow`; BipolarQuant gives scale where
x >= 0, else -scale.

From onnxruntime's docs/ContribOperators.md: MatMulNBits keeps [N, K] weights as blocks of `block_size` numbers of
`bits` bits, the lowest bits first, with a scale and an unsigned zero point (the middle where it is absent) for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dovetail.ir.operators.activation import UnaryKind
from dovetail.ir.operators.elementwise import BinaryKind
from dovetail.ir.operators.movement import Concat
from dovetail.ir.operators.reduction import Reduce, ReduceKind
from dovetail.ir.types import Array, DType
from dovetail.read.onnx.file import Constant, element_type
from dovetail.read.onnx.linear import convolved, matrix, over_images, with_rows
from dovetail.read.onnx.values import Importer, OnnxQuantisation, OnnxValues
from dovetail.read.values import ALIKE, Value, unpacked

QUANTISED_TYPES = (DType.INT4, DType.UINT4, DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
"""Integers QuantizeLinear may give."""


def quantize_linear(v: OnnxValues) -> Value:
    """QuantizeLinear, per tensor or per axis."""
    block = v.attribute("block_size", 0)
    v.refuse_if(block, f"the attribute block_size = {block} is not supported", "quantise per tensor or per axis")
    v.only("saturate", 1)  # concerns float8 only
    v.only("precision", 0)
    named, axis, x = element_type(v.attribute("output_dtype", 0)), v.attribute("axis", 1), v.x
    if v.has(1) and v.op.inputs[1] not in v.constants:
        return _quantised_at_run_time(v, named or DType.UINT8)
    scaling = v.scaling(1, 2, axis, named or DType.UINT8, x.rank)
    if scaling.dtype not in QUANTISED_TYPES or (v.given("output_dtype") and scaling.dtype is not named):
        raise v.refuse(f"quantising to {scaling.dtype.text} is not supported")
    return v.quantized(x, scaling)


def dequantize_linear(v: OnnxValues) -> Value:
    """DequantizeLinear, per tensor or per axis, constants in blocks too; constants that are not stay integers."""
    block, axis = v.attribute("block_size", 0), v.attribute("axis", 1)
    wide = element_type(v.attribute("output_dtype", 0)) in (None, DType.FLOAT32)
    v.refuse_if(not wide, "only float32 results are supported")
    if block:
        return _dequantized_blocks(v, block, axis)
    x = v.x
    kind = x.type
    v.refuse_if(not kind.dtype.is_integer, f"dequantises {kind}; only integers are supported")
    return v.dequantized(x, v.scaling(1, 2, axis, kind.dtype, len(kind.shape)), v.stem)


def _out_of_blocks(array: Array, scale: Array, zero_point: Array, axis: int, block: int) -> Array:
    """Integers that every `block` along an axis have a scale and a zero point for, as float32."""
    cut = tuple(slice(0, size) for size in array.shape)
    steps, zeros = (np.repeat(one, block, axis=axis)[cut] for one in (scale, zero_point))
    return np.asarray((array.astype(np.float32) - zeros) * steps, dtype=np.float32)


def _dequantized_blocks(v: OnnxValues, block: int, axis: int) -> Value:
    """DequantizeLinear of constants with a scale for each block along an axis."""
    given, scale = v.array(0, "blocks"), v.array(1, "scale").astype(np.float32)
    zeros = v.array(2, "zero point") if v.has(2) else np.zeros(scale.shape)
    place = v.axis(axis, given.ndim)
    wanted = [-(-size // block) if at == place else size for at, size in enumerate(given.shape)]
    odd = block < 1 or list(scale.shape) != wanted or zeros.shape != scale.shape
    v.wrong_if(odd, f"blocks of {block} along axis {axis} of {list(given.shape)} do not fit the scale")
    return v.constant(_out_of_blocks(given, scale, zeros.astype(np.float32), place, block), "blocks")


def few_bits(v: OnnxValues) -> Value:
    """MatMulNBits: a dense layer whose weights are taken out of their blocks."""
    size, count = v.attribute("K", 0), v.attribute("N", 0)
    bits, block = v.attribute("bits", 4), v.attribute("block_size", 32)
    for name in ("accuracy_level", "weight_prepacked"):
        v.given(name)  # how precisely ONNX Runtime may multiply; how it keeps weights in memory
    blocks = -(-size // max(block, 1))
    packed, scale = v.array(1, "weights"), v.array(2, "scale").astype(np.float32)
    odd = bits not in (2, 4, 8) or size < 1 or packed.size * 8 != count * blocks * block * bits
    v.wrong_if(odd, f"{packed.size} bytes are not {count}x{size} weights of {bits} bits in blocks of {block}")
    what = f"{scale.size} scales do not fit {count * blocks} blocks, or columns are in another order"
    v.wrong_if(scale.size != count * blocks or v.has(4), what)
    zeros = np.full((count, blocks), 1 << (bits - 1), np.float32)
    if v.has(3):
        given = v.array(3, "zero point")
        if given.dtype == np.uint8:
            given = unpacked(given.reshape(count, -1), bits)[:, :blocks]
        v.wrong_if(given.size != zeros.size, f"{given.size} zero points do not fit {zeros.size} blocks")
        zeros = given.reshape(count, blocks).astype(np.float32)
    integers = unpacked(packed.reshape(count, -1).astype(np.uint8), bits)[:, :size]
    weights = v.constant(_out_of_blocks(integers, scale.reshape(count, blocks), zeros, 1, block), "weights")
    return v.dense(with_rows(v, v.real()), weights, *([v.real(5)] if v.has(5) else []))


def dynamic_quantize(v: OnnxValues) -> Value:
    """DynamicQuantizeLinear: uint8 with the scale and zero point that the operand's range asks for."""
    x = v.real()
    axes, zero, steps, ends = tuple(range(x.rank)), v.number(0.0), v.number(255.0), []
    for kind, limit in ((ReduceKind.MINIMUM, BinaryKind.MINIMUM), (ReduceKind.MAXIMUM, BinaryKind.MAXIMUM)):
        ends.append(v.binary(limit, v.reshape(v.add(Reduce(kind, axes), [x], "end"), (), "end"), zero, "limit"))
    scale = v.over(v.minus(ends[1], ends[0], "span"), steps, "scale")
    place = v.over(v.minus(zero, ends[0], "below"), scale, "place")
    offset = v.clamp(v.unary(UnaryKind.ROUND, place, "rounded"), 0.0, 255.0, "offset")
    result = _stepped(v, x, scale, offset, DType.UINT8)
    v.bind_further([scale, v.convert(offset, DType.UINT8, "integer")], ())
    return result


def _stepped(v: OnnxValues, x: Value, scale: Value, offset: Value, dtype: DType) -> Value:
    """round(x / scale) + offset, limited to the type; all of them computed floats."""
    rounded = v.unary(UnaryKind.ROUND, v.over(x, scale, "counted"), "rounded")
    return v.convert(v.clamp(v.plus(rounded, offset, "raised"), float(dtype.low), float(dtype.high), "limited"), dtype)


def _quantised_at_run_time(v: OnnxValues, default: DType) -> Value:
    """QuantizeLinear with a scale that is computed, for the whole tensor."""
    x, scale = v.real(), v.real(1)
    offset = v.value(2) if v.has(2) else v.number(0.0)
    dtype = offset.dtype if v.has(2) else default
    if scale.elements != 1 or dtype not in (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16):
        raise v.refuse(f"quantising to {dtype.text} by the computed scale {scale.type} is not supported")
    return _stepped(v, x, scale, v.convert(offset, DType.FLOAT32, "offset"), dtype)


def _integer_bias(v: OnnxValues, position: int, source: OnnxQuantisation, kernel: OnnxQuantisation) -> list[Value]:
    """An optional int32 bias in float: it is counted in units of input scale * weight scale."""
    if not v.has(position):
        return []
    bias = v.value(position)
    kind = bias.type
    v.wrong_if(kind.dtype is not DType.INT32, f"the bias {bias.name!r} must be int32, got {kind.dtype.text}")
    row = bias if len(kind.shape) == 1 else v.reshape(bias, (kind.elements,), name=f"{bias}_row")
    steps = (source.steps * kernel.steps).astype(np.float32)
    return [v.dequantized(row, v.scaling_of(bias.name, steps, np.zeros(len(steps), np.int32), 0, DType.INT32))]


def qlinear_conv(v: OnnxValues) -> Value:
    """QLinearConv."""
    source, kernel, result = v.scaling(1, 2), v.scaling(4, 5, 0, rank=v.value(3).rank), v.scaling(6, 7)

    def build(v: OnnxValues, x: Value, w: Value) -> Value:
        x, w = v.dequantized(x, source), v.dequantized(w, kernel)
        return v.quantized(convolved(v, x, w, _integer_bias(v, 8, source, kernel)), result, "nhwc")

    return over_images(v, v.x, v.value(3), build)


def qlinear_matmul(v: OnnxValues) -> Value:
    """QLinearMatMul; the right operand is a constant matrix, quantised per tensor or per column, or of several."""
    rank = v.value(3).rank
    left, right = v.scaling(1, 2), v.scaling(4, 5, rank - 1, rank=rank)
    x, b = v.dequantized(with_rows(v, v.x), left), v.dequantized(v.value(3), right)
    return v.quantized(v.dense(x, matrix(v, b), suffix="sum") if rank == 2 else v.product(x, b, "sum"), v.scaling(6, 7))


def qgemm(v: OnnxValues) -> Value:
    """com.microsoft QGemm: an int32 bias in units of the product's scale; the result is float without a scale."""
    v.only("alpha", 1.0)
    v.only("transA", 0)
    turned = v.attribute("transB", False)
    left, right = v.scaling(1, 2), v.scaling(4, 5, 0 if turned else 1, rank=2)
    x = v.dequantized(with_rows(v, v.x), left)
    w = matrix(v, v.dequantized(v.value(3), right), rows_first=not turned)
    result = v.dense(x, w, *_integer_bias(v, 6, left, right), suffix="sum" if v.has(7) else "")
    return v.quantized(result, v.scaling(7, 8)) if v.has(7) else result


def qlinear_two(kind: BinaryKind, word: str) -> Importer:
    """The importer of a quantised sum or product of com.microsoft."""
    return lambda v: v.quantized(v.binary(kind, v.real_operand(0), v.real_operand(3), word), v.scaling(6, 7))


def qlinear_concat(v: OnnxValues) -> Value:
    """com.microsoft QLinearConcat: every part with its own quantisation."""
    result = v.scaling(0, 1)
    parts = [v.real_operand(first) for first in range(2, len(v.op.inputs), 3)]
    return v.quantized(v.add(Concat(v.axis_of(parts[0], 1)), parts, "real"), result)


def qlinear_one(function: Callable[[OnnxValues, Value], Value]) -> Importer:
    """The importer of a quantised function of com.microsoft, given on the float operand."""
    return lambda v: v.quantized(function(v, v.real_operand(0)), v.scaling(3, 4))


def qlinear_pool(pool: Callable[[OnnxValues, Value], Value]) -> Importer:
    """The importer of a pool of com.microsoft, whose image may be NHWC."""

    def build(v: OnnxValues) -> Value:
        source, result, last = v.scaling(1, 2), v.scaling(3, 4), v.attribute("channels_last", False)
        pooled = pool(v, v.dequantized(v.x if last else v.image(v.x), source))
        return v.quantized(pooled, result) if last else v.of_image(v.quantized(pooled, result, "nhwc"))

    return build


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


def quant(v: OnnxValues) -> Value:
    """Quant and IntQuant, of constants (any granularity along one axis) and of computed values (per tensor)."""
    low, high = _grid(v)
    rounding = v.attribute("rounding_mode", "ROUND").upper()
    rounded = v.entry(rounding, _ROUNDINGS, f"rounding_mode = {rounding} is not supported")
    held = v.constants.get(v.name_of(0))
    rank = v.x.rank if held is None else held.array.ndim
    (scale, axis), (zeros, zero_axis) = _row(v, 1, rank), _row(v, 2, rank)
    axis = axis if scale.size > 1 else zero_axis
    if not (scale > 0).all() or (zeros != np.rint(zeros)).any():
        raise v.refuse("the scales must be positive and the zero points whole numbers", ALIKE)
    scale, zeros = np.broadcast_arrays(scale, zeros)
    if held is not None:
        shape = [scale.size if index == axis % max(rank, 1) else 1 for index in range(rank)]
        counted = held.array.astype(np.float32) / scale.astype(np.float32).reshape(shape) + zeros.reshape(shape)
        return _constant(v, np.clip(rounded(counted), low, high), _narrowest(low, high), scale, zeros, axis)
    exact = rounding in ("ROUND", "HALF_EVEN")
    v.refuse_if(not exact, f"rounding_mode = {rounding} of computed values is not supported", "use ROUND")
    if scale.size != 1:
        raise v.refuse(f"a computed value is quantised per channel ({scale.size} scales); only weights may be", ALIKE)
    dtype, x = _narrowest(low, high, 8), v.x
    if (low, high) != (dtype.low, dtype.high):
        least, most = ((limit - float(zeros[0])) * float(scale[0]) for limit in (low, high))
        x = v.clamp(x, least, most, "limited")
    scaling = v.scaling_of(v.stem, scale, zeros, -1, dtype)
    return v.dequantized(v.quantized(x, scaling, "quantized"), scaling, v.stem)


def bipolar_quant(v: OnnxValues) -> Value:
    """BipolarQuant of constants: weights of -1 and 1, held in 2 bits."""
    held = v.constants.get(v.name_of(0))
    if held is None:
        hint = "quantise the activations to 2 bits or more (Quant)"
        raise v.refuse("binary activations are not supported, only binary weights", hint)
    scale, axis = _row(v, 1, held.array.ndim)
    v.refuse_if(not (scale > 0).all(), "the scales must be positive", ALIKE)
    return _constant(v, np.where(held.array >= 0, 1, -1), DType.INT2, scale, np.zeros_like(scale), axis)


def _grid(v: OnnxValues) -> tuple[int, int]:
    """The smallest and the largest integer of `bitwidth`, `signed` and `narrow`."""
    bits, signed, narrow = v.one_number(3, 8.0, "bit width"), v.attribute("signed", 1), v.attribute("narrow", False)
    least, kind = (2, "signed") if signed else (1, "unsigned")
    if bits != int(bits) or not least <= bits <= MOST_BITS:
        raise v.refuse(f"{bits:g} bits, {kind}, are not supported; {least} to {MOST_BITS} are")
    count = 1 << int(bits)
    return (-count // 2 + narrow, count // 2 - 1) if signed else (0, count - 1 - narrow)


def _row(v: OnnxValues, position: int, rank: int) -> tuple[Array, int]:
    """A constant parameter as a row of elements, and the axis of the operand they run along (-1 for one element)."""
    array = v.array(position, "quantisation parameter")
    wide = [index for index, size in enumerate(array.shape) if size > 1]
    odd = len(wide) > 1 or array.ndim > rank or array.dtype.kind not in "fiu" or not np.isfinite(array).all()
    v.wrong_if(odd, f"the parameter {v.op.inputs[position]!r} must be finite and run along one axis at most")
    return array.reshape(-1).astype(np.float64), wide[0] + rank - array.ndim if wide else -1


def _constant(v: OnnxValues, integers: Array, dtype: DType, scale: Array, zeros: Array, axis: int) -> Value:
    """Put constant integers into the graph, and what they stand for."""
    value = v.place(v.named("quantized"), Constant(integers.astype(dtype.numpy), dtype))
    return v.dequantized(value, v.scaling_of(v.stem, scale, zeros, axis, dtype), v.stem)
