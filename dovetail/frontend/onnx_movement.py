"""ONNX operators that move elements."""

from __future__ import annotations

from math import prod

from dovetail.frontend.onnx_context import AGAIN, OnnxContext
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.frontend.onnx_selection import bordered, pick, reversed_slice
from dovetail.graph.types import DType, Shape
from dovetail.operators.movement import Concat, Pad, Reshape, Slice, Transpose


def flatten(ctx: OnnxContext, op: OnnxNode) -> None:
    """Flatten to two axes."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    axis = int(ctx.attribute(op, "axis", 1))
    place = axis if axis == len(shape) else ctx.positive_axis(op, axis, len(shape))
    ctx.emit(op, Reshape((prod(shape[:place]), prod(shape[place:]))), [x])


def reshape(ctx: OnnxContext, op: OnnxNode) -> None:
    """Reshape: 0 keeps an axis (unless allowzero), one -1 takes what is left."""
    x = ctx.value(op, 0)
    kind = ctx.type_of(x)
    wanted = list(ctx.integers(op, 1, "new shape"))
    if not ctx.attribute(op, "allowzero", 0):
        if any(size == 0 and axis >= len(kind.shape) for axis, size in enumerate(wanted)):
            raise ctx.refuse(op, f"the new shape {wanted} keeps an axis that {kind} does not have", AGAIN)
        wanted = [kind.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    if wanted.count(-1) > 1 or any(size < -1 or size == 0 for size in wanted):
        raise ctx.refuse(op, f"the new shape {wanted} is not a shape", AGAIN)
    if -1 in wanted:
        rest = prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = kind.elements // rest
    ctx.emit(op, Reshape(tuple(wanted)), [x])


def _axes(ctx: OnnxContext, op: OnnxNode, rank: int) -> tuple[int, ...] | None:
    """The axes of Squeeze and Unsqueeze: an attribute before opset 13, operand 1 since; None when absent."""
    listed = ctx.attribute(op, "axes", None)
    if listed is None and ctx.has(op, 1):
        listed = ctx.integers(op, 1, "axes")
    return None if listed is None else tuple(ctx.positive_axis(op, axis, rank) for axis in listed)


def squeeze(ctx: OnnxContext, op: OnnxNode) -> None:
    """Squeeze the listed axes, or all of size 1."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    axes = _axes(ctx, op, len(shape))
    if axes is None:
        axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    if any(shape[axis] != 1 for axis in axes):
        raise ctx.refuse(op, f"the axes {list(axes)} of {ctx.type_of(x)} are not all of size 1", AGAIN)
    ctx.emit(op, Reshape(tuple(size for axis, size in enumerate(shape) if axis not in axes)), [x])


def unsqueeze(ctx: OnnxContext, op: OnnxNode) -> None:
    """New axes of size 1."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    count = len(_axes(ctx, op, 1 << 20) or ())
    if count > 8:
        raise ctx.refuse(op, f"adds {count} axes; at most 8 are supported")
    axes = set(_axes(ctx, op, len(shape) + count) or ())
    if len(axes) != count:
        raise ctx.refuse(op, "names an axis twice", AGAIN)
    sizes = iter(shape)
    ctx.emit(op, Reshape(tuple(1 if axis in axes else next(sizes) for axis in range(len(shape) + count))), [x])


def transpose(ctx: OnnxContext, op: OnnxNode) -> None:
    """Transpose; without perm the axes are reversed."""
    x = ctx.value(op, 0)
    rank = len(ctx.type_of(x).shape)
    ctx.emit(op, Transpose(tuple(ctx.attribute(op, "perm", tuple(reversed(range(rank)))))), [x])


def concat(ctx: OnnxContext, op: OnnxNode) -> None:
    """Concat."""
    parts = [ctx.value(op, position) for position in range(len(op.inputs))]
    axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", 1)), len(ctx.type_of(parts[0]).shape))
    ctx.emit(op, Concat(axis), parts)


def qlinear_concat(ctx: OnnxContext, op: OnnxNode) -> None:
    """com.microsoft QLinearConcat: every part with its own quantisation."""
    result = ctx.scaling(op, 0, 1, -1, DType.UINT8)
    parts = [
        ctx.dequantized(op, ctx.value(op, first), ctx.scaling(op, first + 1, first + 2, -1, DType.UINT8))
        for first in range(2, len(op.inputs), 3)
    ]
    axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", 1)), len(ctx.type_of(parts[0]).shape))
    joined = ctx.add(op, Concat(axis), parts, f"{op.outputs[0]}_real")
    ctx.values[op.outputs[0]] = ctx.quantized(op, joined, result)


def pad(ctx: OnnxContext, op: OnnxNode) -> None:
    """Pad with a constant or with elements of the value itself; attributes before opset 11, operands since."""
    mode = ctx.attribute(op, "mode", "constant")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise ctx.refuse(op, f"the attribute mode = {mode} is not supported")
    x = ctx.value(op, 0)
    kind = ctx.type_of(x)
    rank = len(kind.shape)
    listed = ctx.attribute(op, "pads", None)
    pads = tuple(listed) if listed is not None else ctx.integers(op, 1, "pads")
    filler = float(ctx.attribute(op, "value", 0.0)) if listed is not None else ctx.number(op, 2, 0.0, "border value")
    axes = ctx.integers(op, 3, "axes") if ctx.has(op, 3) else tuple(range(rank))
    if len(pads) != 2 * len(axes) or (mode == "constant" and any(size < 0 for size in pads)):
        raise ctx.refuse(op, f"the pads {list(pads)} must be two numbers of at least 0 for each of {len(axes)} axes",
                         AGAIN)
    before, after = [0] * rank, [0] * rank
    for place, axis in enumerate(axes):
        target = ctx.positive_axis(op, axis, rank)
        before[target], after[target] = pads[place], pads[place + len(axes)]
    if mode != "constant":
        sides = zip(kind.shape, before, after, strict=True)
        pick(ctx, op, x, [bordered(size, lead, trail, mode) for size, lead, trail in sides])
        return
    if kind.dtype.is_integer and not kind.dtype.low <= filler <= kind.dtype.high:
        raise ctx.refuse(op, f"the border value {filler} is outside {kind.dtype.text}", AGAIN)
    value = int(filler) if kind.dtype.is_integer else filler
    ctx.emit(op, Pad(tuple(before), tuple(after), value), [x])


def slice_(ctx: OnnxContext, op: OnnxNode) -> None:
    """Slice with constant bounds; attributes before opset 10, operands since."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    starts, stops, axes, steps = _slice_bounds(ctx, op, len(shape))
    if not len(starts) == len(stops) == len(axes) == len(steps) or 0 in steps:
        raise ctx.refuse(op, f"starts, ends, axes and steps must agree in number; the steps are {list(steps)}, not 0",
                         AGAIN)
    if min(steps, default=1) < 0:
        bounds = zip(starts, stops, steps, strict=True)
        reversed_slice(ctx, op, x, {ctx.positive_axis(op, a, len(shape)): b for a, b in zip(axes, bounds, strict=True)})
        return
    begin, end, stride = [0] * len(shape), list(shape), [1] * len(shape)
    for start, stop, axis, step in zip(starts, stops, axes, steps, strict=True):
        place = ctx.positive_axis(op, axis, len(shape))
        size = shape[place]
        begin[place] = min(max(start + size if start < 0 else start, 0), size)
        end[place] = min(max(stop + size if stop < 0 else stop, 0), size)
        stride[place] = step
    if any(a >= b for a, b in zip(begin, end, strict=True)):
        raise ctx.refuse(op, f"the slice {begin} to {end} of {ctx.type_of(x)} is empty", AGAIN)
    ctx.emit(op, Slice(tuple(begin), tuple(end), tuple(stride)), [x])


def _slice_bounds(ctx: OnnxContext, op: OnnxNode, rank: int) -> tuple[Shape, Shape, Shape, Shape]:
    """starts, ends, axes and steps as the model gives them."""
    listed = ctx.attribute(op, "starts", None)
    if listed is not None:
        starts, stops = tuple(listed), tuple(ctx.attribute(op, "ends", ()))
        return starts, stops, tuple(ctx.attribute(op, "axes", tuple(range(len(starts))))), (1,) * len(starts)
    starts, stops = ctx.integers(op, 1, "starts"), ctx.integers(op, 2, "ends")
    axes = ctx.integers(op, 3, "axes") if ctx.has(op, 3) else tuple(range(len(starts)))
    return starts, stops, axes, ctx.integers(op, 4, "steps") if ctx.has(op, 4) else (1,) * len(starts)
