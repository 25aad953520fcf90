"""ONNX convolutions, matrix products and recurrent layers: float, QDQ and integer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dovetail.ir.operators.base import SlidingWindow
from dovetail.ir.operators.elementwise import Convert
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Reshape, Transpose
from dovetail.ir.operators.recurrent import DEFAULT_CURVES, Curve, Line, Recurrent, RecurrentKind
from dovetail.ir.operators.reduction import Reduce, ReduceKind
from dovetail.ir.types import DType, Shape
from dovetail.notes import Kind, Note
from dovetail.read.geometry import Pair, TransposedAxis, transposed_convolution
from dovetail.read.onnx.file import wrap
from dovetail.read.onnx.values import TO_NHWC, OnnxValues
from dovetail.read.values import FOLD, SMALLER, Value

DEPTHWISE_ORDER = (1, 2, 3, 0)
"""ONNX's depthwise weights [C*M, 1, KH, KW] to ours, [1, KH, KW, C*M]."""


def _row_bias(v: OnnxValues, bias: Value, channels: int) -> Value:
    """A constant bias of any shape with `channels` elements as [channels]."""
    kind = bias.type
    if not v.fixed(bias) or kind.elements != channels:
        raise v.refuse(f"the bias {bias.name!r} {kind} must be constant, with {channels} elements", FOLD)
    return bias if len(kind.shape) == 1 else v.reshape(bias, (channels,), name=f"{bias}_row")


def convolved(v: OnnxValues, source: Value, weights: Value, bias: Sequence[Value], *zero_points: int) -> Value:
    """The NHWC result of an NCHW value's convolution with constant weights OIHW; integers have zero points of both."""
    x, w = source.shape, weights.shape
    axes = f"the operands have {len(x)} and {len(w)} axes"
    v.refuse_if((len(x), len(w)) != (4, 4), f"only 2-D convolutions are supported, {axes}")
    window, groups = v.window(x[2:], w[2:]), v.attribute("group", 1)
    v.wrong_if(window.kernel != w[2:], f"kernel_shape is {list(window.kernel)}, the weights have {list(w[2:])}")
    odd = groups < 1 or x[1] != groups * w[1] or w[0] % groups
    v.wrong_if(odd, f"{groups} groups do not fit {x[1]} channels and the weights {list(w)}")
    image = v.bordered(v.image(source), window.padding, zero_points[0] if zero_points else 0.0)
    v.refuse_if(not v.fixed(weights), f"the weights {weights.name!r} must be constant", FOLD)
    kind, order = (DepthwiseConv2d, DEPTHWISE_ORDER) if groups > 1 and w[1] == 1 else (Conv2d, TO_NHWC)
    ohwi = v.transpose(weights, order, name=f"{weights}_ohwi")
    operands = [image, ohwi, *(_row_bias(v, name, w[0]) for name in bias)]
    return v.add(kind(window.stride, window.dilation, *zero_points), operands, "nhwc")


Convolution = Callable[[OnnxValues, Value, Value], Value]
"""The NHWC result of a convolution of a value NCHW and weights OIHW."""


def over_images(v: OnnxValues, x: Value, w: Value, build: Convolution) -> Value:
    """A convolution over two image axes, or over one, whose values are images of one row."""
    if (x.rank, w.rank) != (3, 3):
        return v.of_image(build(v, x, w))
    x, w = (v.reshape(s, (*s.shape[:2], 1, s.shape[2]), name=f"{s}_image") for s in (x, w))
    row = build(v.over_axes((None, 0)), x, w)
    batch, _, width, channels = row.shape
    return v.transpose(v.reshape(row, (batch, width, channels), "row"), (0, 2, 1))


def conv(v: OnnxValues) -> Value:
    """Conv over one or two image axes."""
    bias = v.optional(2)
    return over_images(v, v.x, v.value(1), lambda v, x, w: convolved(v, x, w, bias))


def _zero_point(v: OnnxValues, position: int, shape: Shape) -> tuple[int, Value | None]:
    """The zero point of an integer operator: a number that the operator takes off by itself, or an int32 value, for
    several under the `shape` that broadcasts to the result."""
    if not v.has(position):
        return 0, None
    if v.op.inputs[position] in v.constants:
        found = set(v.integers(position, "zero point"))
        if len(found) == 1:
            return found.pop(), None
    value = v.value(position)
    wide = v.add(Convert(DType.INT32), [value], name=f"{value}_wide")
    return 0, v.shaped(wide, () if wide.elements == 1 else shape, "offsets")


def conv_integer(v: OnnxValues) -> Value:
    """ConvInteger: padding is the input's zero point, the result int32. A computed zero point comes off the sums, times
    what the weights under the image sum up to at each place."""
    (number, offset), (weight_number, weight_offset) = _zero_point(v, 2, ()), _zero_point(v, 3, v.value(1).shape[:1])
    what = "the weights' zero point is computed, or has several different elements: not supported"
    v.refuse_if(weight_offset, what, FOLD)

    def build(v: OnnxValues, x: Value, w: Value) -> Value:
        sums = convolved(v, x, w, (), number, weight_number)
        if not offset:
            return sums
        ones = v.constant(np.ones(x.shape, x.dtype.numpy), "ones")
        return v.minus(sums, v.times(offset, convolved(v, ones, w, (), 0, weight_number), "share"), "sums")

    return over_images(v, v.x, v.value(1), build)


def _numbers(v: OnnxValues, name: str, rank: int, default: int) -> Pair:
    """An attribute of one number per image axis, as rows and columns."""
    found = v.attribute(name, (default,) * rank)
    v.wrong_if(len(found) != rank, f"the attribute {name} = {list(found)} must be {rank} numbers")
    return (default, found[0]) if rank == 1 else (found[0], found[1])


def _transposed_axes(v: OnnxValues, sizes: Shape, window: SlidingWindow, rank: int) -> list[TransposedAxis]:
    """Rows and columns: what the uncut result loses, and how long it is then."""
    mode, pads = v.attribute("auto_pad", "NOTSET"), v.attribute("pads", (0,) * (2 * rank))
    v.wrong_if(len(pads) != 2 * rank, f"the attribute pads = {list(pads)} must be {2 * rank} numbers")
    extra, wanted = _numbers(v, "output_padding", rank, 0), v.attribute("output_shape", ())
    odd = len(wanted) not in (0, rank, rank + 2)  # ONNX Runtime takes it with batch and channels, too
    v.wrong_if(odd, f"the attribute output_shape = {list(wanted)} must be {rank} numbers")
    axes = []
    for axis, (size, span, stride) in enumerate(zip(sizes, window.span, window.stride, strict=True)):
        place = axis + rank - 2
        lead, trail = (0, 0) if mode == "VALID" or place < 0 else (pads[place], pads[rank + place])
        whole = (size - 1) * stride + span + extra[axis]
        result = whole - lead - trail
        given = wanted and place >= 0
        if given or mode in ("SAME_UPPER", "SAME_LOWER"):
            result = wanted[place - rank] if given else min(size * stride, whole)
            lead = (whole - result + (mode != "SAME_UPPER")) // 2
        v.refuse_if(result < 1, f"the result has {result} elements along an image axis", SMALLER)
        axes.append(TransposedAxis(size, span, stride, lead, result))
    return axes


def conv_transpose(v: OnnxValues) -> Value:
    """ConvTranspose over one or two image axes, with constant weights."""
    x, w = v.x, v.value(1)
    shape, kernel = x.shape, w.shape
    rank, groups = len(shape) - 2, v.attribute("group", 1)
    if rank not in (1, 2) or len(kernel) != len(shape):
        raise v.refuse(f"only one or two image axes are supported, the operand is {x.type}")
    if not v.fixed(w) or kernel[0] != shape[1] or groups < 1 or shape[1] % groups:
        raise v.refuse(f"the weights {w.name!r} must be constant, for {shape[1]} channels in {groups} groups", FOLD)
    odd = v.attribute("kernel_shape", kernel[2:]) != kernel[2:]
    v.wrong_if(odd, f"kernel_shape does not fit the weights {list(kernel)}")
    if rank == 1:
        x = v.reshape(x, (*shape[:2], 1, shape[2]), "image")
        w = v.reshape(w, (*kernel[:2], 1, kernel[2]), "kernel")
    channels, share, rows, columns = w.shape
    window = SlidingWindow((rows, columns), _numbers(v, "strides", rank, 1), _numbers(v, "dilations", rank, 1))
    image = v.image(x)
    steps = {
        "groups": Reshape((groups, channels // groups, share, rows, columns)),
        "moved": Transpose((0, 2, 3, 4, 1)),
        "ohwi": Reshape((groups * share, rows, columns, channels // groups)),
    }
    weights = v.stretched(v.chain(w, steps, "ohwi"), window.dilation)
    operands = [image, weights, *v.optional(2)]
    result = transposed_convolution(v, operands, _transposed_axes(v, x.shape[2:], window, rank), groups)
    moved = v.channels_first(result, "nchw")
    return moved if rank == 2 else v.reshape(moved, (*moved.shape[:2], moved.shape[3]), "row")


def matrix(v: OnnxValues, w: Value, rows_first: bool = True) -> Value:
    """A constant [K, N] operand (already [N, K] unless `rows_first`) as the weights [N, K] of a dense layer."""
    v.refuse_if(not v.fixed(w) or w.rank != 2, f"the right operand {w.name!r} {w.type} must be a constant matrix", FOLD)
    return v.transpose(w, (1, 0), name=f"{w}_rows") if rows_first else w


def with_rows(v: OnnxValues, x: Value) -> Value:
    """The left operand of a dense layer, checked."""
    v.refuse_if(x.rank < 2, f"the left operand {x.name!r} {x.type} must have at least two axes")
    return x


def matmul(v: OnnxValues) -> Value:
    """MatMul: of floats with a constant matrix a dense layer, otherwise with leading axes that broadcast."""
    a, b = v.x, v.value(1)
    left, right = a.shape, b.shape
    if v.fixed(b) and len(right) == 2 and len(left) >= 2:
        return v.dense(a, matrix(v, b))
    v.refuse_if(not left or not right, f"multiplies {a.type} and {b.type}; a matrix has axes")
    a = v.reshape(a, (1, *left), "left") if len(left) == 1 else a
    b = v.reshape(b, (*right, 1), "right") if len(right) == 1 else b
    result = v.product(a, b, "product")
    *batch, rows, columns = result.shape
    return v.shaped(result, (*batch, *[rows][: len(left) - 1], *[columns][: len(right) - 1]))


def matmul_integer(v: OnnxValues) -> Value:
    """MatMulInteger. Zero points that are no constant number come off the sums: sum (a - p) * (b - q) = sum a * b
    - p * sum b - q * sum a + depth * p * q."""
    a, b = with_rows(v, v.x), v.value(1)
    (p, left), (q, right) = _zero_point(v, 2, (a.shape[-2], 1)), _zero_point(v, 3, (1, b.shape[-1]))
    if v.fixed(b) and b.rank == 2:
        sums = v.add(FullyConnected(p, q), [a, matrix(v, b)], "sums")
    else:
        sums = v.add(MatrixProduct(p, q), [a, b], "sums")
    for point, value, axis, number in ((left, b, -2, q), (right, a, -1, p)):
        if point:
            total = v.add(Reduce(ReduceKind.SUM, (axis + value.rank,), number), [value], "total")
            sums = v.minus(sums, v.times(point, total, "share"), "less")
    if left and right:
        both = v.times(v.times(left, right, "points"), v.constant(np.array(a.shape[-1], np.int32), "depth"), "both")
        sums = v.plus(sums, both, "whole")
    return sums


def gemm(v: OnnxValues) -> Value:
    """Gemm; a constant right operand makes it a dense layer, where alpha and beta are 1."""
    alpha, beta = v.attribute("alpha", 1.0), v.attribute("beta", 1.0)
    x, turned = with_rows(v, v.x), v.attribute("transB", False)
    if v.attribute("transA", False):
        x = v.transpose(x, (1, 0), name=f"{x}_columns")
    b, bias = v.value(1), v.optional(2)
    if not v.fixed(b) or (alpha, beta) != (1.0, 1.0):
        b = v.transpose(b, (1, 0), name=f"{b}_columns") if turned else b
        product = v.scaled(v.product(x, b, "product"), alpha)
        return v.plus(product, v.scaled(bias[0], beta), "sum") if bias else product
    weights = matrix(v, b, rows_first=not turned)
    channels = weights.shape[0]
    if all(v.fixed(one) and one.elements == channels and one.shape[-1:] == (channels,) for one in bias):
        return v.dense(x, weights, *(_row_bias(v, one, channels) for one in bias))
    return v.plus(v.dense(x, weights, suffix="sum"), *bias)


def fused_matmul(v: OnnxValues) -> Value:
    """FusedMatMul: a product of matrices, of either its transpose, times a number."""
    v.only("transBatchA", 0)
    v.only("transBatchB", 0)
    a, b, turned = v.real(0), v.real(1), v.attribute("transB", False)
    a = v.matrix_turned(a, "left") if v.attribute("transA", False) else a
    if v.fixed(b) and b.rank == 2:
        product = v.dense(with_rows(v, a), matrix(v, b, rows_first=not turned), suffix="product")
    else:
        product = v.product(a, v.matrix_turned(b, "right") if turned else b, "product")
    return v.scaled(product, v.attribute("alpha", 1.0))


_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def recurrent(v: OnnxValues, kind: RecurrentKind) -> None:
    """LSTM, GRU and RNN: forward, reverse and bidirectional."""
    reset_after = kind is RecurrentKind.GRU and v.attribute("linear_before_reset", False)
    if kind is RecurrentKind.LSTM:
        v.only("input_forget", 0)
    x, shape, r = v.x, v.x.shape, v.value(2).shape
    direction, layout = v.attribute("direction", "forward"), v.attribute("layout", 0)
    directions = _DIRECTIONS.get(direction, ())
    odd = len(shape) != 3 or len(r) != 3 or r[0] != len(directions) or layout not in (0, 1)
    v.wrong_if(odd, f"direction = {direction} and layout = {layout} do not fit {list(shape)} and {list(r)}")
    hidden, count = r[2], len(directions)
    size = v.attribute("hidden_size", hidden)
    v.wrong_if(size != hidden, f"hidden_size is {size}, the weights have {hidden}")
    steps, batch = shape[layout], shape[1 - layout]
    if set(v.integers(4, "sequence lengths", (steps,))) != {steps}:
        raise v.refuse(f"sequences shorter than the {steps} steps of the input are not supported")
    curves, clip = _curves(v, kind, count), v.attribute("clip", 0.0)
    x = v.transpose(x, (1, 0, 2), name=f"{x}_steps") if layout else x
    memory = _memory(v, kind, (count, batch, hidden), layout)
    found = []
    for place, reverse in enumerate(directions):
        rows = [_direction(v, v.value(position), place) for position in (1, 2)]
        bias = _or_zeros(v, 3, (count, 2 * kind.gates * hidden))
        operands = [x, *rows, _direction(v, bias, place), _direction(v, memory, place)]
        operands += [_direction(v, v.value(7), place)] if v.has(7) else []
        found.append(v.add(Recurrent(kind, reverse, reset_after, *curves[place], clip), operands, str(place)))
    last = [0 if reverse else steps - 1 for reverse in directions]
    spans = ([(0, steps)] * count, [(place, place + 1) for place in last], [(steps, steps + 1)] * count)
    for name, parts in zip(v.op.outputs, spans, strict=False):
        if name:
            v.values[name] = _result(v, name, list(zip(found, parts, strict=True)), layout)


def dynamic_lstm(v: OnnxValues) -> None:
    """com.microsoft DynamicQuantizeLSTM: an LSTM with the real values of its weights, which lie [.., depth, gates]."""
    names = list(v.op.inputs[:8])
    for place, first in ((1, 8), (2, 10)):
        weights, scale, zeros = (v.array(at, "weights").astype(np.float32) for at in (place, first, first + 1))
        shape = (weights.shape[0], 1, -1)
        odd = weights.ndim != 3 or scale.size % weights.shape[0] or scale.size != zeros.size
        v.wrong_if(odd, f"{scale.size} scales do not fit the weights {list(weights.shape)}")
        real = (weights - zeros.reshape(shape)) * scale.reshape(shape)
        names[place] = v.named(f"weights_{place}")
        v.constants[names[place]] = wrap(np.ascontiguousarray(real.transpose(0, 2, 1)), DType.FLOAT32)
    what = "computes on floats; ONNX Runtime rounds its inputs and what it keeps to 8 bits at every step"
    v.tell(Note(Kind.APPROXIMATE, f"{v.where}: {what}"))
    recurrent(v.again(op=replace(v.op, inputs=tuple(names))), RecurrentKind.LSTM)


def _curves(v: OnnxValues, kind: RecurrentKind, directions: int) -> list[tuple[tuple[Curve, ...], tuple[Line, ...]]]:
    """The activations of each direction and their lines; () for ONNX's defaults, and where none is a line."""
    default = DEFAULT_CURVES[kind]
    known = {curve.value.lower(): curve for curve in Curve}
    given = v.attribute("activations", tuple(curve.value for curve in default) * directions)
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in given]
    curves = tuple(known[name.lower()] for name in names if name.lower() in known)
    if not len(curves) == len(names) == directions * len(default):
        all_known = ", ".join(curve.value for curve in Curve)
        raise v.refuse(f"the activations {names} are not supported; each must be one of {all_known}")
    alphas, betas = (iter(v.attribute(f"activation_{name}", ())) for name in ("alpha", "beta"))
    usual = {Curve.HARD_SIGMOID: (0.2, 0.5)}
    lines = []
    for curve in curves:  # the lists hold numbers of those that take some, in order
        slope, offset = usual.get(curve, (1.0, 0.0))
        lines.append((next(alphas, slope), next(betas, offset)) if curve.is_line else (1.0, 0.0))
    parts = [slice(start, start + len(default)) for start in range(0, len(curves), len(default))]
    own = [(() if curves[part] == default else curves[part], tuple(lines[part])) for part in parts]
    return [(found, line if any(curve.is_line for curve in found) else ()) for found, line in own]


def _memory(v: OnnxValues, kind: RecurrentKind, sizes: tuple[int, int, int], layout: int) -> Value:
    """Hidden values, and cells, before the first step: [directions, kept, batch, hidden]."""
    count, batch, hidden = sizes
    found, shape = [], (batch, count, hidden) if layout else sizes
    for position in (5, 6)[: kind.kept]:
        value = _or_zeros(v, position, shape)
        value = v.transpose(value, (1, 0, 2), name=f"{value}_directions") if layout else value
        found.append(v.reshape(value, (count, 1, batch, hidden), name=f"{value}_kept"))
    return v.concat(found, 1, "memory")


def _or_zeros(v: OnnxValues, position: int, shape: Shape) -> Value:
    """An optional operand."""
    return v.value(position) if v.has(position) else v.constant(np.zeros(shape, np.float32), "zeros")


def _direction(v: OnnxValues, value: Value, place: int) -> Value:
    """The part of one direction, without the axis of directions."""
    shape = value.shape
    v.wrong_if(place >= shape[0], f"{value.type} has no part for direction {place}")
    if shape[0] > 1:
        value = v.part(value, 0, place, place + 1, name=f"{value}_{place}")
    return v.reshape(value, shape[1:], name=f"{value}_one")


def _result(v: OnnxValues, name: str, parts: Sequence[tuple[Value, Pair]], layout: int) -> Value:
    """Y, Y_h or Y_c: parts of what each direction gives, beside each other."""
    values = []
    for value, (begin, end) in parts:
        part = v.part(value, 0, begin, end, name=f"{name}_part")
        values.append(v.reshape(part, (end - begin, 1, *part.shape[1:]), name=f"{name}_part"))
    whole = v.concat(values, 1, name=f"{name}_whole")
    whole = v.transpose(whole, (2, 0, 1, 3), name=f"{name}_whole") if layout else whole
    shape = list(whole.shape)
    if name != v.op.outputs[0]:
        del shape[layout]
    return v.reshape(whole, shape, name=name)
