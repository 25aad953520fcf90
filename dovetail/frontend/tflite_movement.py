"""TFLite operators that move elements: they act on the stored integers and must keep the quantisation."""

from __future__ import annotations

import numpy as np

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import AGAIN, ALIKE, OperatorEntry, Tensor
from dovetail.graph.types import DType, Shape, TensorType
from dovetail.operators.base import Operator
from dovetail.operators.movement import Concat, Pad, Reshape, Slice, Transpose

SHAPE_TYPES = (DType.INT32, DType.INT64)
"""Element types of shapes."""


def shape(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SHAPE: known, since every size is fixed."""
    ctx.bind_known(op, np.array(ctx.input(op, 0).shape, np.int64))


def pack(ctx: TfliteContext, op: OperatorEntry) -> None:
    """PACK: operands along a new axis; of known integers now, which is how converters put a shape together."""
    parts = [ctx.input(op, position) for position in range(len(op.inputs))]
    axis = ctx.axis(op, int(ctx.options(op, "PackOptions")["Axis"]), len(parts[0].shape) + 1)
    known = [ctx.known(part) for part in parts]
    arrays = [array for array in known if array is not None]
    if len(arrays) == len(parts) and parts[0].dtype in SHAPE_TYPES:
        ctx.bind_known(op, np.stack(arrays, axis))
        return
    if not all(ctx.same_quantisation(part, ctx.output(op)) for part in parts):
        raise ctx.refuse(op, "copies elements, but the quantisations of its operands and its result differ", ALIKE)
    shape = (*parts[0].shape[:axis], 1, *parts[0].shape[axis:])
    names = [ctx.add(op, Reshape(shape), [ctx.value(op, part)], "part") for part in parts]
    ctx.emit(op, Concat(axis), names)


def moved(ctx: TfliteContext, op: OperatorEntry, *operators: Operator, position: int = 0) -> None:
    """Emit operators, one behind the other, that copy elements of an operand; of a known one now."""
    x, result = ctx.input(op, position), ctx.output(op)
    known = ctx.known(x)
    if known is not None and x.dtype in SHAPE_TYPES:
        for operator in operators:
            known = operator.evaluate([known])
        ctx.bind_known(op, known)
        return
    if not ctx.same_quantisation(x, result):
        raise ctx.refuse(op, f"copies elements, but the type or quantisation of {x} and {result} differ", ALIKE)
    value = ctx.value(op, x)
    for operator in operators[:-1]:
        value = ctx.add(op, operator, [value], "moved")
    ctx.emit(op, operators[-1], [value])


def reshape(ctx: TfliteContext, op: OperatorEntry) -> None:
    """RESHAPE: the new shape is operand 1, or an option in old files; it must agree with the declared result."""
    x, result = ctx.input(op, 0), ctx.output(op)
    if ctx.optional(op, 1) is not None:
        wanted = ctx.integers(op, 1, "new shape")
    else:
        wanted = tuple(ctx.options(op, "ReshapeOptions")["NewShape"])
    fits = len(wanted) == len(result.shape) and sum(size == -1 for size in wanted) <= 1
    if not fits or any(a not in (-1, b) for a, b in zip(wanted, result.shape, strict=True)):
        raise ctx.refuse(op, f"the new shape {list(wanted)} of {x} does not give the declared {result}", AGAIN)
    moved(ctx, op, Reshape(result.shape))


def squeeze(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SQUEEZE: drops the listed axes of size 1, or all of them."""
    x = ctx.input(op, 0)
    listed = ctx.options(op, "SqueezeOptions")["SqueezeDims"]
    dropped = {ctx.axis(op, axis, len(x.shape)) for axis in listed}
    if not dropped:
        dropped = {axis for axis, size in enumerate(x.shape) if size == 1}
    if any(x.shape[axis] != 1 for axis in dropped):
        raise ctx.refuse(op, f"the axes {sorted(dropped)} of {x} are not all of size 1", AGAIN)
    moved(ctx, op, Reshape(tuple(size for axis, size in enumerate(x.shape) if axis not in dropped)))


def expand_dims(ctx: TfliteContext, op: OperatorEntry) -> None:
    """EXPAND_DIMS: a new axis of size 1."""
    x = ctx.input(op, 0)
    (axis,) = _expect(ctx, op, ctx.integers(op, 1, "axis"), 1, "axis")
    place = ctx.axis(op, axis, len(x.shape) + 1)
    moved(ctx, op, Reshape((*x.shape[:place], 1, *x.shape[place:])))


def transpose(ctx: TfliteContext, op: OperatorEntry) -> None:
    """TRANSPOSE."""
    order = ctx.integers(op, 1, "permutation")
    rank = len(ctx.input(op, 0).shape)
    moved(ctx, op, Transpose(tuple(ctx.axis(op, axis, rank) for axis in order)))


def pad(ctx: TfliteContext, op: OperatorEntry) -> None:
    """PAD and PADV2: the border is 0 (the zero point of a quantised tensor) or operand 2, quantised as the result."""
    x = ctx.input(op, 0)
    pads = np.array(ctx.integers(op, 1, "paddings"), np.int64)
    if len(pads) != 2 * len(x.shape) or (pads < 0).any():
        raise ctx.refuse(op, f"the paddings {pads.tolist()} do not fit {x}", AGAIN)
    before, after = pads[0::2].tolist(), pads[1::2].tolist()
    moved(ctx, op, Pad(tuple(before), tuple(after), border(ctx, op, x, ctx.optional(op, 2))))


def border(ctx: TfliteContext, op: OperatorEntry, x: Tensor, value: Tensor | None) -> float:
    """The element a padding of x writes, as stored: `value`, or 0."""
    if value is None:
        return int(x.quantisation.zero_point[0]) if x.quantisation else 0
    array = ctx.array(op, value, "border value")
    if value.dtype is not x.dtype or array.size != 1 or not ctx.same_quantisation(value, x):
        raise ctx.refuse(op, f"the border value {value} must be one element quantised as {x}", ALIKE)
    element = array.reshape(-1)[0]
    return float(element) if x.dtype is DType.FLOAT32 else int(element)


def concatenation(ctx: TfliteContext, op: OperatorEntry) -> None:
    """CONCATENATION: of the integers where all are quantised alike, else in float."""
    options = ctx.options(op, "ConcatenationOptions")
    result = ctx.output(op)
    parts = [ctx.input(op, position) for position in range(len(op.inputs))]
    if not parts or any(len(part.shape) != len(result.shape) for part in parts):
        raise ctx.refuse(op, f"the operands do not have the axes of the result {result}", AGAIN)
    ctx.same_type(op, result, *parts)
    operator = Concat(ctx.axis(op, int(options["Axis"]), len(result.shape)))
    activation = int(options["FusedActivationFunction"])
    if activation == 0 and all(ctx.same_quantisation(part, result) for part in parts):
        ctx.emit(op, operator, [ctx.value(op, part) for part in parts])
    else:
        ctx.emit_real(op, operator, [ctx.real(op, part) for part in parts], activation)


def slice_(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SLICE: begin and size per axis, size -1 to the end."""
    x = ctx.input(op, 0)
    begin = _expect(ctx, op, ctx.integers(op, 1, "begin"), len(x.shape), "begin")
    size = _expect(ctx, op, ctx.integers(op, 2, "size"), len(x.shape), "size")
    stop = tuple(whole if s == -1 else b + s for b, s, whole in zip(begin, size, x.shape, strict=True))
    moved(ctx, op, Slice(begin, stop, (1,) * len(begin)))


def strided_slice(ctx: TfliteContext, op: OperatorEntry) -> None:
    """STRIDED_SLICE with constant positive steps; begin, end and shrink masks are honoured."""
    options = ctx.options(op, "StridedSliceOptions")
    for name in ("EllipsisMask", "NewAxisMask", "Offset"):
        if options[name]:
            raise ctx.refuse(op, f"the option {name} = {options[name]} is not supported")
    x = ctx.input(op, 0)
    rank = len(x.shape)
    begin, end, step = (
        _expect(ctx, op, ctx.integers(op, position, what), rank, what)
        for position, what in ((1, "begin"), (2, "end"), (3, "strides"))
    )
    if any(s <= 0 for s in step):
        raise ctx.refuse(op, f"the strides {list(step)} are not all positive", AGAIN)
    shrink = int(options["ShrinkAxisMask"])
    starts, stops = [], []
    for axis, size in enumerate(x.shape):
        first = 0 if options["BeginMask"] >> axis & 1 else _clamped(begin[axis], size)
        last = size if options["EndMask"] >> axis & 1 else _clamped(end[axis], size)
        starts.append(first)
        stops.append(first + 1 if shrink >> axis & 1 else last)
    operator = Slice(tuple(starts), tuple(stops), step)
    part = operator.infer([TensorType(x.shape, x.dtype)]).shape
    dropped = [Reshape(tuple(n for axis, n in enumerate(part) if not shrink >> axis & 1))] if shrink else []
    moved(ctx, op, operator, *dropped)


def _clamped(position: int, size: int) -> int:
    """A slice bound counted from either end, within the axis."""
    return min(max(position + size if position < 0 else position, 0), size)


def _expect(ctx: TfliteContext, op: OperatorEntry, found: Shape, count: int, what: str) -> Shape:
    if len(found) != count:
        raise ctx.refuse(op, f"the {what} has {len(found)} entries, expected {count}", AGAIN)
    return found
