"""ONNX convolutions, matrix products and recurrent layers: float, QDQ and integer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dovetail.ir.operators.elementwise import Convert
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.operators.movement import Concat, Reshape, Transpose
from dovetail.ir.operators.recurrent import DEFAULT_CURVES, Curve, Recurrent, RecurrentKind
from dovetail.ir.operators.reduction import Reduce, ReduceKind
from dovetail.ir.types import DType, Shape
from dovetail.read.geometry import Pair, TransposedAxis, spans, transposed_convolution
from dovetail.read.onnx.values import AGAIN, FOLD, SMALLER, TO_NCHW, TO_NHWC, OnnxValues

DEPTHWISE_ORDER = (1, 2, 3, 0)
"""ONNX's depthwise weights [C*M, 1, KH, KW] to ours, [1, KH, KW, C*M]."""


def _row_bias(v: OnnxValues, bias: str, channels: int) -> str:
    """A constant bias of any shape with `channels` elements as [channels]."""
    kind = v.type_of(bias)
    if not v.fixed(bias) or kind.elements != channels:
        raise v.refuse(f"the bias {bias!r} {kind} must be constant, with {channels} elements", FOLD)
    return bias if len(kind.shape) == 1 else v.add(Reshape((channels,)), [bias], name=f"{bias}_row")


def convolved(v: OnnxValues, source: str, weights: str, bias: Sequence[str], *zero_points: int) -> str:
    """The NHWC result of a convolution of an NCHW value with constant weights OIHW, of floats or of integers with the
    zero points of both."""
    x, w = v.shape(source), v.shape(weights)
    if len(x) != 4 or len(w) != 4:
        raise v.refuse(f"only 2-D convolutions are supported, the operands have {len(x)} and {len(w)} axes")
    kernel = v.pair("kernel_shape", w[2:])
    if kernel != w[2:]:
        raise v.refuse(f"kernel_shape is {list(kernel)}, the weights have {list(w[2:])}", AGAIN)
    stride, dilation, groups = v.pair("strides"), v.pair("dilations"), int(v.attribute("group", 1))
    if groups < 1 or x[1] != groups * w[1] or w[0] % groups != 0:
        raise v.refuse(f"{groups} groups do not fit {x[1]} channels and the weights {list(w)}", AGAIN)
    padding = v.padding(x[2:], spans(w[2:], dilation), stride)
    image = v.bordered(v.image(source), padding, zero_points[0] if zero_points else 0.0)
    if not v.fixed(weights):
        raise v.refuse(f"the weights {weights!r} must be constant", FOLD)
    kind, order = (DepthwiseConv2d, DEPTHWISE_ORDER) if groups > 1 and w[1] == 1 else (Conv2d, TO_NHWC)
    ordered = v.add(Transpose(order), [weights], name=f"{weights}_ohwi")
    operands = [image, ordered, *(_row_bias(v, name, w[0]) for name in bias)]
    return v.add(kind(stride, dilation, *zero_points), operands, "nhwc")


def conv(v: OnnxValues) -> str:
    """Conv over one or two image axes."""
    bias = [v.value(2)] if v.has(2) else []
    x, w = v.value(0), v.value(1)
    if len(v.shape(x)) != 3 or len(v.shape(w)) != 3:
        return v.of_image(convolved(v, x, w, bias))
    x, w = (v.add(Reshape((*v.shape(s)[:2], 1, v.shape(s)[2])), [s], name=f"{s}_image") for s in (x, w))
    row = convolved(v.over_axes((None, 0)), x, w, bias)
    (batch, _, width, channels) = v.shape(row)
    return v.add(Transpose((0, 2, 1)), [v.add(Reshape((batch, width, channels)), [row], "row")])


def _zero_point(v: OnnxValues, position: int, shape: Shape) -> int | str:
    """The zero point of an integer operator: a number where it is one constant, else an int32 value.

    Args:
        v: the operator. position: of the operand.
        shape: under which several broadcast to the result.
    """
    if not v.has(position):
        return 0
    if v.op.inputs[position] in v.constants:
        found = set(v.integers(position, "zero point"))
        if len(found) == 1:
            return found.pop()
    value = v.value(position)
    wide = v.add(Convert(DType.INT32), [value], name=f"{value}_wide")
    return v.reshape(wide, () if v.type_of(wide).elements == 1 else shape, "offsets")


def _number(zero_point: int | str) -> int:
    """The zero point an operator subtracts by itself: a constant one, else 0."""
    return zero_point if isinstance(zero_point, int) else 0


def conv_integer(v: OnnxValues) -> str:
    """ConvInteger: padding is the input's zero point, the result int32.

    A computed zero point comes off the sums: times what the weights under the image sum up to at each place.
    """
    x, w = v.value(0), v.value(1)
    offset, weight_offset = _zero_point(v, 2, ()), _zero_point(v, 3, (v.shape(w)[0],))
    if isinstance(weight_offset, str):
        raise v.refuse("the weights' zero point is computed, or has several different elements: not supported", FOLD)
    sums = convolved(v, x, w, (), _number(offset), weight_offset)
    if isinstance(offset, str):
        kind = v.type_of(x)
        ones = v.constant(np.ones(kind.shape, kind.dtype.numpy), "ones")
        under = convolved(v, ones, w, (), 0, weight_offset)
        sums = v.minus(sums, v.times(offset, under, "share"), "sums")
    return v.of_image(sums)


def _numbers(v: OnnxValues, name: str, rank: int, default: int) -> Pair:
    """An attribute of one number per image axis, as rows and columns."""
    found = tuple(int(value) for value in v.attribute(name, (default,) * rank))
    if len(found) != rank:
        raise v.refuse(f"the attribute {name} = {list(found)} must be {rank} numbers", AGAIN)
    return (default, found[0]) if rank == 1 else (found[0], found[1])


def _transposed_axes(
    v: OnnxValues, sizes: Shape, span: Pair, stride: Pair, rank: int
) -> tuple[TransposedAxis, TransposedAxis]:
    """Rows and columns: what the uncut result loses, and how long it is then."""
    extra = _numbers(v, "output_padding", rank, 0)
    mode = v.attribute("auto_pad", "NOTSET")
    pads = tuple(v.attribute("pads", (0,) * (2 * rank)))
    pads = (0, pads[0], 0, pads[1]) if rank == 1 else pads
    wanted = v.attribute("output_shape", None)

    def along(axis: int) -> TransposedAxis:
        lead, trail = (0, 0) if mode == "VALID" else (pads[axis], pads[2 + axis])
        whole = (sizes[axis] - 1) * stride[axis] + span[axis] + extra[axis]
        result = whole - lead - trail
        given = wanted is not None and rank - 2 + axis >= 0
        if given or mode in ("SAME_UPPER", "SAME_LOWER"):
            result = wanted[axis + rank - 2] if given else sizes[axis] * stride[axis]
            lead = (whole - result + (mode != "SAME_UPPER")) // 2
        if result < 1:
            raise v.refuse(f"the result has {result} elements along an image axis", SMALLER)
        return TransposedAxis(sizes[axis], span[axis], stride[axis], lead, result)

    return along(0), along(1)


def conv_transpose(v: OnnxValues) -> str:
    """ConvTranspose over one or two image axes, with constant weights."""
    x, w = v.value(0), v.value(1)
    shape, kernel = v.shape(x), v.shape(w)
    rank, groups = len(shape) - 2, int(v.attribute("group", 1))
    if rank not in (1, 2) or len(kernel) != len(shape):
        raise v.refuse(f"only one or two image axes are supported, the operand is {v.type_of(x)}")
    if not v.fixed(w) or kernel[0] != shape[1] or groups < 1 or shape[1] % groups:
        raise v.refuse(f"the weights {w!r} must be constant, for {shape[1]} channels in {groups} groups", FOLD)
    if tuple(v.attribute("kernel_shape", kernel[2:])) != kernel[2:]:
        raise v.refuse(f"kernel_shape does not fit the weights {list(kernel)}", AGAIN)
    if rank == 1:
        x = v.add(Reshape((*shape[:2], 1, shape[2])), [x], "image")
        w = v.add(Reshape((*kernel[:2], 1, kernel[2])), [w], "kernel")
    stride, dilation = _numbers(v, "strides", rank, 1), _numbers(v, "dilations", rank, 1)
    span, sizes = spans(v.shape(w)[2:], dilation), v.shape(x)[2:]
    image = v.image(x)
    channels, share, rows, columns = v.shape(w)
    apart = Reshape((groups, channels // groups, share, rows, columns))
    ohwi = Reshape((groups * share, rows, columns, channels // groups))
    weights = v.stretched(v.chain(w, (apart, Transpose((0, 2, 3, 4, 1)), ohwi), "ohwi", ("groups", "moved")), dilation)
    operands = [image, weights, *([v.value(2)] if v.has(2) else [])]
    axes = _transposed_axes(v, sizes, span, stride, rank)
    result = transposed_convolution(v, operands, axes, groups)
    moved = v.add(Transpose(TO_NCHW), [result], "nchw")
    whole = v.shape(moved)
    return moved if rank == 2 else v.add(Reshape((*whole[:2], whole[3])), [moved], "row")


def matrix(v: OnnxValues, w: str, rows_first: bool = True) -> str:
    """A constant [K, N] operand (already [N, K] unless `rows_first`) as the weights [N, K] of a dense layer."""
    kind = v.type_of(w)
    if not v.fixed(w) or len(kind.shape) != 2:
        raise v.refuse(f"the right operand {w!r} {kind} must be a constant matrix", FOLD)
    return v.add(Transpose((1, 0)), [w], name=f"{w}_rows") if rows_first else w


def with_rows(v: OnnxValues, x: str) -> str:
    """The left operand of a dense layer, checked."""
    if len(v.shape(x)) < 2:
        raise v.refuse(f"the left operand {x!r} {v.type_of(x)} must have at least two axes")
    return x


def matmul(v: OnnxValues) -> str:
    """MatMul: of floats with a constant matrix a dense layer, otherwise with leading axes that broadcast."""
    a, b = v.value(0), v.value(1)
    left, right = v.shape(a), v.shape(b)
    if v.fixed(b) and len(right) == 2 and len(left) >= 2:
        return v.add(FullyConnected(), [a, matrix(v, b)])
    if not left or not right:
        raise v.refuse(f"multiplies {v.type_of(a)} and {v.type_of(b)}; a matrix has axes")
    a = v.add(Reshape((1, *left)), [a], "left") if len(left) == 1 else a
    b = v.add(Reshape((*right, 1)), [b], "right") if len(right) == 1 else b
    result = v.add(MatrixProduct(), [a, b], "product")
    shape = v.shape(result)
    rows = shape[len(shape) - 2 :][len(left) == 1 : 1 if len(right) == 1 else 2]
    return v.reshape(result, (*shape[: len(shape) - 2], *rows))


def matmul_integer(v: OnnxValues) -> str:
    """MatMulInteger. Zero points that are no constant number come off the sums:

    sum (a - p) * (b - q) = sum a * b - p * sum b - q * sum a + depth * p * q.
    """
    a, b = with_rows(v, v.value(0)), v.value(1)
    rows, columns = v.shape(a), v.shape(b)
    left, right = _zero_point(v, 2, (rows[-2], 1)), _zero_point(v, 3, (1, columns[-1]))
    numbers = _number(left), _number(right)
    if v.fixed(b) and len(columns) == 2:
        sums = v.add(FullyConnected(*numbers), [a, matrix(v, b)], "sums")
    else:
        sums = v.add(MatrixProduct(*numbers), [a, b], "sums")
    for point, value, axis, number in ((left, b, -2, numbers[1]), (right, a, -1, numbers[0])):
        if isinstance(point, str):
            total = v.add(Reduce(ReduceKind.SUM, (axis + len(v.shape(value)),), number), [value], "total")
            sums = v.minus(sums, v.times(point, total, "share"), "less")
    if isinstance(left, str) and isinstance(right, str):
        both = v.times(v.times(left, right, "points"), v.constant(np.array(rows[-1], np.int32), "depth"), "both")
        sums = v.plus(sums, both, "whole")
    return sums


def gemm(v: OnnxValues) -> str:
    """Gemm; a constant right operand makes it a dense layer, where alpha and beta are 1."""
    alpha, beta = float(v.attribute("alpha", 1.0)), float(v.attribute("beta", 1.0))
    x, turned = with_rows(v, v.value(0)), v.attribute("transB", 0)
    if v.attribute("transA", 0):
        x = v.add(Transpose((1, 0)), [x], name=f"{x}_columns")
    b = v.value(1)
    if not v.fixed(b) or (alpha, beta) != (1.0, 1.0):
        b = v.add(Transpose((1, 0)), [b], name=f"{b}_columns") if turned else b
        product = v.scaled(v.add(MatrixProduct(), [x, b], "product"), alpha)
        return v.plus(product, v.scaled(v.value(2), beta), "sum") if v.has(2) else product
    operands = [x, matrix(v, b, rows_first=not turned)]
    channels = v.shape(operands[1])[0]
    if not v.has(2):
        return v.add(FullyConnected(), operands)
    bias = v.value(2)
    if v.fixed(bias) and v.type_of(bias).elements == channels and v.shape(bias)[-1:] == (channels,):
        return v.add(FullyConnected(), [*operands, _row_bias(v, bias, channels)])
    return v.plus(v.add(FullyConnected(), operands, "sum"), bias)


_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


class _RecurrentSizes(NamedTuple):
    """The sizes of a recurrent layer; whether each direction is reversed, and the attribute layout."""

    steps: int
    batch: int
    hidden: int
    directions: tuple[bool, ...]
    batch_first: bool


def recurrent(kind: RecurrentKind) -> Callable[[OnnxValues], None]:
    """The importer of LSTM, GRU or RNN: forward, reverse and bidirectional."""

    def build(v: OnnxValues) -> None:

        reset_after = bool(v.attribute("linear_before_reset", 0)) if kind is RecurrentKind.GRU else False
        if kind is RecurrentKind.LSTM:
            v.only("input_forget", 0)
        sizes = _sizes(v)
        curves = _curves(v, kind, len(sizes.directions))
        x = v.value(0)
        if sizes.batch_first:
            x = v.add(Transpose((1, 0, 2)), [x], name=f"{x}_steps")
        memory = _memory(v, kind, sizes)
        found = []
        for place, reverse in enumerate(sizes.directions):
            rows = [_direction(v, v.value(position), place) for position in (1, 2)]
            bias = _or_zeros(v, 3, (len(sizes.directions), 2 * kind.gates * sizes.hidden))
            operands = [x, *rows, _direction(v, bias, place), _direction(v, memory, place)]
            if v.has(7):
                operands.append(_direction(v, v.value(7), place))
            found.append(v.add(Recurrent(kind, reverse, reset_after, curves[place]), operands, str(place)))
        _results(v, sizes, found)

    return build


def _sizes(v: OnnxValues) -> _RecurrentSizes:
    x, r = v.shape(v.value(0)), v.shape(v.value(2))
    direction, layout = v.attribute("direction", "forward"), int(v.attribute("layout", 0))
    directions = _DIRECTIONS.get(direction, ())
    if len(x) != 3 or len(r) != 3 or r[0] != len(directions) or layout not in (0, 1):
        raise v.refuse(f"direction = {direction} and layout = {layout} do not fit {list(x)} and {list(r)}", AGAIN)
    if int(v.attribute("hidden_size", r[2])) != r[2]:
        raise v.refuse(f"hidden_size is {v.op.attributes['hidden_size']}, the weights have {r[2]}", AGAIN)
    if "clip" in v.op.attributes:
        raise v.refuse(f"the attribute clip = {v.op.attributes['clip']} is not supported")
    steps, batch = (x[1], x[0]) if layout else (x[0], x[1])
    if v.has(4) and set(v.integers(4, "sequence lengths")) != {steps}:
        raise v.refuse(f"sequences shorter than the {steps} steps of the input are not supported")
    return _RecurrentSizes(steps, batch, r[2], directions, layout == 1)


def _curves(v: OnnxValues, kind: RecurrentKind, directions: int) -> list[tuple[Curve, ...]]:
    """The activations of each direction."""
    default = DEFAULT_CURVES[kind]
    given = v.attribute("activations", [curve.value for curve in default] * directions)
    known = {curve.value.lower(): curve for curve in Curve}
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in given]
    curves = [known[name.lower()] for name in names if name.lower() in known]
    if not len(curves) == len(names) == directions * len(default):
        raise v.refuse(f"the activations {names} are not supported; each must be Sigmoid, Tanh or Relu")
    parts = [tuple(curves[place * len(default) :][: len(default)]) for place in range(directions)]
    return [() if part == default else part for part in parts]


def _memory(v: OnnxValues, kind: RecurrentKind, sizes: _RecurrentSizes) -> str:
    """Hidden values, and cells, before the first step: [directions, kept, batch, hidden]."""
    found, count = [], len(sizes.directions)
    lead = (sizes.batch, count) if sizes.batch_first else (count, sizes.batch)
    for position in (5, 6)[: kind.kept]:
        value = _or_zeros(v, position, (*lead, sizes.hidden))
        if v.shape(value) != (*lead, sizes.hidden):
            raise v.refuse(f"operand {position} is {v.type_of(value)}, expected {[*lead, sizes.hidden]}", AGAIN)
        if sizes.batch_first:
            value = v.add(Transpose((1, 0, 2)), [value], name=f"{value}_directions")
        found.append(v.add(Reshape((count, 1, sizes.batch, sizes.hidden)), [value], name=f"{value}_kept"))
    return v.concat(found, 1, "memory")


def _or_zeros(v: OnnxValues, position: int, shape: tuple[int, ...]) -> str:
    """An optional operand."""
    return v.value(position) if v.has(position) else v.constant(np.zeros(shape, np.float32), "zeros")


def _direction(v: OnnxValues, value: str, place: int) -> str:
    """The part of one direction, without the axis of directions."""
    shape = v.shape(value)
    if place >= shape[0]:
        raise v.refuse(f"{v.type_of(value)} has no part for direction {place}", AGAIN)
    if shape[0] > 1:
        value = v.part(value, 0, place, place + 1, name=f"{value}_{place}")
    return v.add(Reshape(shape[1:]), [value], name=f"{value}_one")


def _results(v: OnnxValues, sizes: _RecurrentSizes, found: list[str]) -> None:
    """Y, Y_h and Y_c from what each direction gives."""
    steps, (batch, hidden) = sizes.steps, (sizes.batch, sizes.hidden)
    last = [0 if reverse else steps - 1 for reverse in sizes.directions]
    spans = ([(0, steps)] * len(found), [(place, place + 1) for place in last], [(steps, steps + 1)] * len(found))
    names = (*v.op.outputs, "", "", "")[:3]
    for position, (name, parts) in enumerate(zip(names, spans, strict=True)):
        if not name:
            continue
        values = []
        for value, (begin, end) in zip(found, parts, strict=True):
            part = v.part(value, 0, begin, end, name=f"{name}_part")
            values.append(v.add(Reshape((end - begin, 1, batch, hidden)), [part], name=f"{name}_part"))
        whole = v.add(Concat(1), values, name=f"{name}_whole") if len(values) > 1 else values[0]
        if sizes.batch_first:
            whole = v.add(Transpose((2, 0, 1, 3)), [whole], name=f"{name}_whole")
        shape = list(v.shape(whole))
        if position:
            del shape[1 if sizes.batch_first else 0]
        v.values[name] = v.add(Reshape(tuple(shape)), [whole], name=name)
