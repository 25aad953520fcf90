"""Random ONNX models of one quantised operator, and what ONNX Runtime's exact integer operators give for them.

ConvInteger and MatMulInteger are exact in both. Where a result is scaled, ONNX defines a float product that no two
runtimes round alike: the sums are ONNX Runtime's, the scaling is done in float64, and an element is doubtful where the
exact value lies so near to a half that the number of bits of a factor decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import frexp
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from dovetail.compile import Options
from dovetail.ir.onnx_runtime import runtime_session
from dovetail.ir.operators.arithmetic import Rounding
from dovetail.ir.types import Array
from property_batches import Case, Draw

FINE = 1e-4
"""Distance from a half within which a float32 product may be rounded the other way, values being below 256."""

NAMES = ("x", "x1", "x2")
"""Inputs of the models."""

NARROW = {2: (TensorProto.INT2, TensorProto.UINT2), 4: (TensorProto.INT4, TensorProto.UINT4)}
"""Element types of fewer than 8 bits, signed and unsigned."""


@dataclass(frozen=True)
class Quantisation:
    """(q - zero_point) * scale; one scale for all elements or one per output channel."""

    scale: Array
    zero_point: int
    dtype: str

    @property
    def zero(self) -> Array:
        """The zero point as an array of the element type."""
        return np.array(self.zero_point, self.dtype)


def quantisation(draw: Draw, dtype: str, scale: float | None = None) -> Quantisation:
    """A random one, zero points at the extremes among them."""
    limits = np.iinfo(dtype)
    zero = draw.one_of(limits.min, limits.max, (limits.min + limits.max + 1) // 2, draw.number(limits.min, limits.max))
    scale = scale or float(np.exp(draw.rng.uniform(-5, -1)))
    return Quantisation(np.array(scale, np.float32), int(zero), dtype)


def elements(draw: Draw, shape: Sequence[int], dtype: str) -> list[Array]:
    """Two operands: all integers, and nothing but extremes."""
    limits = np.iinfo(dtype)
    free = draw.rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    return [free, np.where(draw.rng.random(shape) < 0.5, limits.min, limits.max).astype(dtype)]


def weights(draw: Draw, shape: Sequence[int], dtype: str, bits: int) -> Array:
    """Weights of so many bits, in a type of 8."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype == "int8" else (0, (1 << bits) - 1)
    return draw.rng.integers(low, high + 1, shape).astype(dtype)


def model(nodes: Sequence[Any], feed: Sequence[Array], result: tuple[str, int], constants: Mapping[str, Any]) -> bytes:
    """A model of the inputs `x`, `x1`, ... to `y`, of a type and a number of axes, as a file."""
    tensors = [
        value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        for name, value in constants.items()
    ]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(NAMES, feed, strict=False)
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(result[0]))
    output = helper.make_tensor_value_info("y", kind, [f"d{axis}" for axis in range(result[1])])
    graph = helper.make_graph(list(nodes), "g", inputs, [output], tensors)
    newest = any(tensor.data_type in NARROW[2] for tensor in tensors)
    opsets = [helper.make_opsetid("", 25 if newest else 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=13 if newest else 10).SerializeToString())


def run(file: bytes, feeds: Sequence[Sequence[Array]], names: Sequence[str] = NAMES) -> list[list[Array]]:
    """What ONNX Runtime computes from each set of inputs, without saturating 16-bit sums."""
    session = runtime_session(file)
    return [[np.asarray(session.run(None, dict(zip(names, feed, strict=False)))[0])] for feed in feeds]


@cache
def saturates() -> bool:
    """True where ONNX Runtime adds pairs of uint8 by int8 products in 16 bits, as it does on processors with AVX2 and
    without VNNI: it is no oracle of such products then, whatever its settings."""
    shapes = {"x": (1, 2), "w": (2, 1)}
    sides = [helper.make_tensor_value_info("x", TensorProto.UINT8, shapes["x"])]
    sides.append(helper.make_tensor_value_info("w", TensorProto.INT8, shapes["w"]))
    result = helper.make_tensor_value_info("y", TensorProto.INT32, (1, 1))
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "g", sides, [result])
    file = bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    )
    operands = [np.full(shapes["x"], 255, np.uint8), np.full(shapes["w"], 127, np.int8)]
    return int(run(file, [operands], ("x", "w"))[0][0].item()) != 2 * 255 * 127


def accumulators(
    op_type: str, operands: Sequence[Array], zero: Array, w: Array, w_zero: Array, window: Mapping[str, Any]
) -> list[Array]:
    """Exact sums of products by ConvInteger or MatMulInteger, whose left operand ONNX Runtime wants unsigned."""
    if zero.dtype == np.int8:
        operands = [(operand.astype(np.int16) + 128).astype(np.uint8) for operand in operands]
        zero = (zero.astype(np.int16) + 128).astype(np.uint8)
    node = helper.make_node(op_type, ["x", "w", "x_zero", "w_zero"], ["y"], **window)
    feeds = [[operand] for operand in operands]
    file = model([node], feeds[0], ("int32", operands[0].ndim), {"w": w, "x_zero": zero, "w_zero": w_zero})
    return [outputs[0] for outputs in run(file, feeds)]


def scaled(
    exact: Sequence[Array], result: Quantisation, limits: tuple[int, int], reach: Array | float
) -> tuple[list[list[Array]], list[list[Array]]]:
    """Float64 values in steps, rounded to the nearest, within limits; and where a half is nearer than `reach`."""
    wanted = [[np.clip(np.rint(array) + result.zero_point, *limits).astype(result.dtype)] for array in exact]
    return wanted, [[np.abs(array - np.floor(array) - 0.5) <= reach] for array in exact]


def reach_of(factor: Array, rounding: Rounding) -> Array:
    """How far from a half a product is still rounded the other way: gemmlowp rounds first to 2**exponent, then to 1."""
    if rounding is Rounding.SINGLE:
        return np.full(np.shape(factor), FINE)
    steps = [2.0 ** (min(frexp(value)[1], 0) - 1) for value in np.ravel(factor)]
    return np.reshape(steps, np.shape(factor)) + FINE


def window(draw: Draw, sizes: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
    """A kernel and the attributes of a convolution that fits."""
    kernel = [draw.one_of(1, 1, 2, 3, 3, 5) for _ in sizes]
    dilations = [draw.one_of(1, 1, 1, 2) for _ in sizes]
    strides = [draw.one_of(1, 1, 2, 3) for _ in sizes]
    found: dict[str, Any] = {"strides": strides, "dilations": dilations}
    mode = draw.one_of("NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID") if dilations == [1, 1] else "NOTSET"
    pads = [draw.number(0, kernel[at % 2] - 1) if mode == "NOTSET" and draw.often(0.6) else 0 for at in range(4)]
    for axis, size in enumerate(sizes):
        if (kernel[axis] - 1) * dilations[axis] + 1 > size + (pads[axis] + pads[axis + 2]):
            kernel[axis], pads[axis], pads[axis + 2] = 1, 0, 0
    return kernel, {**found, **({"pads": pads} if mode == "NOTSET" else {"auto_pad": mode})}


@dataclass(frozen=True)
class Layer:
    """Operands of a convolution (NCHW, OIHW) or a matrix product ([..., K], [K, N]), all but its result."""

    op_type: str
    operands: Sequence[Array]
    x: Quantisation
    w: Array
    bits: int
    attributes: dict[str, Any]

    @property
    def channels(self) -> int:
        """Output channels."""
        return int(self.w.shape[0] if self.op_type == "Conv" else self.w.shape[1])

    @property
    def taps(self) -> int:
        """Products in a sum."""
        return int(self.w.size // self.channels)

    def per_channel(self, values: Array) -> Array:
        """Values of each output channel, to broadcast over the result."""
        return values.reshape(-1, 1, 1) if self.op_type == "Conv" else values

    def integers(self, w_zero: int) -> list[Array]:
        """The exact sums."""
        zero = np.array(w_zero, self.w.dtype)
        name = f"{self.op_type}Integer"
        return accumulators(name, self.operands, self.x.zero, self.w, zero, self.attributes)


def convolution(draw: Draw) -> Layer:
    """Any convolution of an image, groups and depthwise ones included."""
    groups, share, depth = draw.one_of(1, 1, 1, 2, 4), draw.number(1, 5), draw.number(1, 5)
    if draw.often(0.3):
        groups, share, depth = draw.one_of(2, 3, 8), draw.one_of(1, 1, 2), 1
    sizes = [draw.number(1, 9), draw.number(1, 9)]
    kernel, attributes = window(draw, sizes)
    x = quantisation(draw, draw.one_of("uint8", "int8"))
    bits = draw.number(2, 8)
    w = weights(draw, (groups * share, depth, *kernel), draw.one_of("uint8", "int8"), bits)
    shape = (draw.one_of(1, 1, 2), groups * depth, *sizes)
    return Layer("Conv", elements(draw, shape, x.dtype), x, w, bits, {**attributes, "group": groups})


def product(draw: Draw) -> Layer:
    """A matrix product."""
    x = quantisation(draw, draw.one_of("uint8", "int8"))
    depth, bits = draw.number(1, 40), draw.number(2, 8)
    w = weights(draw, (depth, draw.number(1, 12)), draw.one_of("uint8", "int8"), bits)
    shape = (*draw.one_of((draw.number(1, 5),), (2, 3)), depth)
    return Layer("MatMul", elements(draw, shape, x.dtype), x, w, bits, {})


def words(layer: Layer, others: str) -> str:
    """A layer in words."""
    return (
        f"{layer.op_type}{layer.attributes} {layer.operands[0].dtype}{list(layer.operands[0].shape)} zero "
        f"{layer.x.zero_point}, weights of {layer.bits} bits {layer.w.dtype}{list(layer.w.shape)} {others}"
    )


def zero_of(draw: Draw, layer: Layer) -> int:
    """A zero point of the weights, 0 half of the time."""
    return int(draw.one_of(0, 0, int(layer.w.min()), int(layer.w.max()))) if layer.w.size else 0


def as_integers(name: str, draw: Draw, layer: Layer) -> Case:
    """ConvInteger or MatMulInteger: int32 sums, exact."""
    zero = zero_of(draw, layer)
    constants = {"w": layer.w, "x_zero": layer.x.zero, "w_zero": np.array(zero, layer.w.dtype)}
    node = helper.make_node(f"{layer.op_type}Integer", ["x", *constants], ["y"], **layer.attributes)
    file = model([node], layer.operands[:1], ("int32", layer.operands[0].ndim), constants)
    wanted = [[total] for total in layer.integers(zero)]
    text = words(layer, f"zero {zero}")
    return Case(name, file, ".onnx", text, [[operand] for operand in layer.operands], wanted)


@dataclass(frozen=True)
class Scaling:
    """How a layer's sums become 8 bits."""

    steps: Array
    """Scales of the weights: one, or one per channel."""
    bias: Array | None
    y: Quantisation
    totals: Sequence[Array]
    """The exact sums with their bias, per set of inputs."""
    factor: Array
    """What they are multiplied by, to broadcast over them."""


def scaling(draw: Draw, layer: Layer, zero: int) -> Scaling:
    """Random scales that leave most results within the type."""
    totals = layer.integers(zero)
    size = float(np.sqrt((totals[0].astype(np.float64) ** 2).mean())) + 1
    bias = None
    if layer.op_type == "Conv" and draw.often(0.7):
        bias = draw.rng.integers(-int(size), int(size) + 1, layer.channels).astype(np.int32)
        totals = [total + layer.per_channel(bias) for total in totals]
    count = layer.channels if draw.often(0.5) and zero == 0 else 1
    steps = np.exp(draw.rng.uniform(-6, -5, count)).astype(np.float32)
    wide = size * float(layer.x.scale) * float(steps.max()) / 70 * float(np.exp(draw.rng.uniform(-0.5, 1)))
    y = quantisation(draw, layer.x.dtype, wide)
    factor = layer.x.scale.astype(np.float64) * steps.astype(np.float64) / y.scale.astype(np.float64)
    return Scaling(steps if count > 1 else steps.reshape(()), bias, y, totals, layer.per_channel(factor))


def as_qlinear(name: str, draw: Draw, layer: Layer) -> Case:
    """QLinearConv or QLinearMatMul; ONNX Runtime's own result must agree too, where it does not saturate (uint8)."""
    if layer.x.dtype == "int8" and layer.w.dtype == np.uint8:
        layer = Layer(layer.op_type, layer.operands, layer.x, layer.w.astype(np.int8), layer.bits, layer.attributes)
    zero = zero_of(draw, layer) if layer.op_type == "Conv" or layer.w.dtype == np.uint8 else 0
    how = scaling(draw, layer, zero)
    constants = {
        "x_scale": layer.x.scale,
        "x_zero": layer.x.zero,
        "w": layer.w,
        "w_scale": how.steps,
        "w_zero": np.full(how.steps.shape, zero, layer.w.dtype),
        "y_scale": how.y.scale,
        "y_zero": how.y.zero,
        **({"bias": how.bias} if how.bias is not None else {}),
    }
    node = helper.make_node(f"QLinear{layer.op_type}", ["x", *constants], ["y"], **layer.attributes)
    file = model([node], layer.operands[:1], (layer.x.dtype, layer.operands[0].ndim), constants)
    limits = None if layer.x.dtype == "uint8" else (-128, 127)
    return scaled_case(name, draw, layer, how, file, limits, f"zero {zero}")


def as_qdq(name: str, draw: Draw, layer: Layer) -> Case:
    """Conv or MatMul between DequantizeLinear and QuantizeLinear, weights of 2 or 4 bits in types of their own."""
    zero = zero_of(draw, layer)
    how = scaling(draw, layer, zero)
    kind = NARROW[layer.bits][int(layer.w.dtype == np.uint8)] if layer.bits in NARROW else None
    w_zero = np.full(how.steps.shape, zero, layer.w.dtype)
    constants: dict[str, Any] = {
        "w": layer.w if kind is None else helper.make_tensor("w", kind, layer.w.shape, layer.w.ravel().tolist()),
        "w_scale": how.steps,
        "w_zero": w_zero if kind is None else helper.make_tensor("w_zero", kind, w_zero.shape, w_zero.ravel().tolist()),
        "x_scale": layer.x.scale,
        "x_zero": layer.x.zero,
        "y_scale": how.y.scale,
        "y_zero": how.y.zero,
    }
    per_channel, limits = how.steps.size > 1, np.iinfo(how.y.dtype)
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "x_scale", "x_zero"], ["x_real"]),
        helper.make_node(
            "DequantizeLinear",
            ["w", "w_scale", "w_zero"],
            ["w_real"],
            **({"axis": 0 if layer.op_type == "Conv" else 1} if per_channel else {}),
        ),
    ]
    operands = ["x_real", "w_real"]
    if how.bias is not None:
        constants |= {"bias": how.bias, "b_scale": (layer.x.scale * how.steps).astype(np.float32)}
        axis = {"axis": 0} if per_channel else {}
        nodes.append(helper.make_node("DequantizeLinear", ["bias", "b_scale"], ["b_real"], **axis))
        operands.append("b_real")
    nodes.append(helper.make_node(layer.op_type, operands, ["sum"], **layer.attributes))
    active = draw.often(0.3)
    nodes += [helper.make_node("Relu", ["sum"], ["active"])] if active else []
    nodes.append(helper.make_node("QuantizeLinear", ["active" if active else "sum", "y_scale", "y_zero"], ["y"]))
    file = model(nodes, layer.operands[:1], (layer.x.dtype, layer.operands[0].ndim), constants)
    bounds = (how.y.zero_point if active else int(limits.min), int(limits.max))
    return scaled_case(name, draw, layer, how, file, bounds, f"zero {zero}")


def scaled_case(
    name: str, draw: Draw, layer: Layer, how: Scaling, file: bytes, limits: tuple[int, int] | None, text: str
) -> Case:
    """The case of a layer with a result of 8 bits; without `limits`, ONNX Runtime computes it too."""
    rounding = draw.one_of(Rounding.SINGLE, Rounding.DOUBLE)
    feeds = [[operand] for operand in layer.operands]
    exact = [total.astype(np.float64) * how.factor for total in how.totals]
    wanted, doubtful = scaled(exact, how.y, limits or (0, 255), reach_of(how.factor, rounding))
    if limits is None and not (layer.op_type == "MatMul" and layer.w.dtype == np.int8 and saturates()):
        for one, other, near in zip(wanted, run(file, feeds), doubtful, strict=True):
            assert (one[0] == other[0])[~near[0]].all(), f"{name}: the two oracles differ"
    text = f"{text} scales {how.steps.size} bias {how.bias is not None} -> {how.y} {rounding.value} {limits}"
    text = words(layer, text)
    return Case(name, file, ".onnx", text, feeds, wanted, doubtful, Options(rounding=rounding))


Make = Callable[[str], Case]
"""Draws the case of a name."""


def made(layer: Callable[[Draw], Layer], form: Callable[[str, Draw, Layer], Case]) -> Make:
    """A layer in one of its forms."""

    def make(name: str) -> Case:
        draw = Draw(name)
        return form(name, draw, layer(draw))

    return make


def images(draw: Draw, dtype: str, count: int = 1) -> list[list[Array]]:
    """Two sets of `count` images of one shape but for their channels."""
    batch, sizes = draw.one_of(1, 1, 2), (draw.number(1, 9), draw.number(1, 9))
    drawn = [elements(draw, (batch, draw.number(1, 9), *sizes), dtype) for _ in range(count)]
    return [list(feed) for feed in zip(*drawn, strict=True)]


def largest(name: str) -> Case:
    """MaxPool with pads and dilations, exact."""
    draw = Draw(name)
    feeds = images(draw, draw.one_of("uint8", "int8"))
    shape = feeds[0][0].shape
    kernel, attributes = window(draw, shape[2:])
    if max(attributes["strides"]) > 1:  # where a stride is longer than the window, ONNX Runtime pads by less than 0
        attributes.pop("auto_pad", None)
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=kernel, **attributes)
    file = model([node], feeds[0], (str(feeds[0][0].dtype), 4), {})
    return Case(name, file, ".onnx", f"MaxPool {kernel} {attributes} of {shape}", feeds, run(file, feeds))


def parameters(stem: str, how: Quantisation) -> dict[str, Array]:
    """Scale and zero point as constants."""
    return {f"{stem}_scale": how.scale, f"{stem}_zero": how.zero}


def reals(feeds: Sequence[Sequence[Array]], parts: Sequence[Quantisation]) -> list[list[Array]]:
    """The inputs' exact meaning in float64."""
    return [
        [
            (array.astype(np.float64) - part.zero_point) * np.float64(part.scale)
            for array, part in zip(feed, parts, strict=True)
        ]
        for feed in feeds
    ]


def qlinear(
    name: str,
    draw: Draw,
    feeds: Sequence[Sequence[Array]],
    parts: Sequence[Quantisation],
    y: Quantisation,
    op_type: str,
    real: Callable[[list[Array]], Array],
    **attributes: Any,
) -> Case:
    """The case of an operator of ONNX Runtime's own on quantised values, checked with its exact meaning."""
    constants, inputs = parameters("y", y) if op_type == "QLinearConcat" else {}, []
    for at, (input_name, part) in enumerate(zip(NAMES, parts, strict=False)):
        constants |= parameters(f"p{at}", part)
        inputs += [input_name, f"p{at}_scale", f"p{at}_zero"]
    ends = ["y_scale", "y_zero"]
    constants |= parameters("y", y)
    inputs = [*ends, *inputs] if op_type == "QLinearConcat" else [*inputs, *ends]
    node = helper.make_node(op_type, inputs, ["y"], domain="com.microsoft", **attributes)
    file = model([node], feeds[0], (y.dtype, 4), constants)
    exact = [real(values) / np.float64(y.scale) for values in reals(feeds, parts)]
    low, high = np.iinfo(y.dtype).min, np.iinfo(y.dtype).max
    wanted, doubtful = scaled(exact, y, (int(low), int(high)), LOOSE)
    for one, other, near in zip(wanted, run(file, feeds), doubtful, strict=True):
        assert (one[0] == other[0])[~near[0]].all(), f"{name}: the two oracles differ"
    text = f"{op_type} {[array.shape for array in feeds[0]]} {parts} -> {y} {attributes}"
    return Case(name, file, ".onnx", text, feeds, wanted, doubtful, Options(rounding=Rounding.SINGLE))


LOOSE = 4e-3
"""Distance from a half within which sums of rescaled operands may be rounded the other way."""


def added(name: str) -> Case:
    """QLinearAdd."""
    draw = Draw(name)
    dtype = draw.one_of("uint8", "int8")
    first = images(draw, dtype)
    feeds = [[feed[0], other] for feed, other in zip(first, elements(draw, first[0][0].shape, dtype), strict=True)]
    parts = [quantisation(draw, dtype) for _ in range(2)]
    wide = max(float(part.scale) for part in parts) * float(np.exp(draw.rng.uniform(-0.5, 1)))
    return qlinear(name, draw, feeds, parts, quantisation(draw, dtype, wide), "QLinearAdd", lambda v: v[0] + v[1])


def joined(name: str) -> Case:
    """QLinearConcat of channels, each part in a quantisation of its own."""
    draw = Draw(name)
    dtype = draw.one_of("uint8", "int8")
    feeds = images(draw, dtype, draw.number(1, 3))
    parts = [quantisation(draw, dtype) for _ in feeds[0]]
    wide = max(float(part.scale) for part in parts) * float(np.exp(draw.rng.uniform(-0.5, 1)))
    y = draw.one_of(parts[0], quantisation(draw, dtype, wide))
    return qlinear(name, draw, feeds, parts, y, "QLinearConcat", lambda v: np.concatenate(v, axis=1), axis=1)


def averaged(name: str) -> Case:
    """QLinearGlobalAveragePool."""
    draw = Draw(name)
    dtype = draw.one_of("uint8", "int8")
    feeds, x = images(draw, dtype), quantisation(draw, dtype)
    y = draw.one_of(x, quantisation(draw, dtype, float(x.scale) * float(np.exp(draw.rng.uniform(-1.5, 0.5)))))
    return qlinear(
        name,
        draw,
        feeds,
        [x],
        y,
        "QLinearGlobalAveragePool",
        lambda v: v[0].mean(axis=(2, 3), keepdims=True),
        channels_last=0,
    )
