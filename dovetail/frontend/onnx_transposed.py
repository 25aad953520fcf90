"""ONNX ConvTranspose (`dovetail.frontend.transposed` says how it is computed)."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.frontend.onnx_context import AGAIN, FOLD, SMALLER, TO_NCHW, OnnxContext
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.frontend.transposed import Transposed, transposed_convolution
from dovetail.graph.types import Shape
from dovetail.operators.base import Operator
from dovetail.operators.movement import Pad, Reshape, Slice, Transpose


def _numbers(ctx: OnnxContext, op: OnnxNode, name: str, rank: int, default: int) -> tuple[int, int]:
    """An attribute of one number per image axis, as rows and columns."""
    found = tuple(int(value) for value in ctx.attribute(op, name, (default,) * rank))
    if len(found) != rank:
        raise ctx.refuse(op, f"the attribute {name} = {list(found)} must be {rank} numbers", AGAIN)
    return (default, found[0]) if rank == 1 else (found[0], found[1])


def _axes(ctx: OnnxContext, op: OnnxNode, sizes: Shape, span: Shape, stride: Shape, rank: int) -> list[Transposed]:
    """Rows and columns: what the uncut result loses, and how long it is then."""
    extra = _numbers(ctx, op, "output_padding", rank, 0)
    mode = ctx.attribute(op, "auto_pad", "NOTSET")
    pads = tuple(ctx.attribute(op, "pads", (0,) * (2 * rank)))
    pads = (0, pads[0], 0, pads[1]) if rank == 1 else pads
    wanted = ctx.attribute(op, "output_shape", None)
    found = []
    for axis in (0, 1):
        lead, trail = (0, 0) if mode == "VALID" else (pads[axis], pads[2 + axis])
        whole = (sizes[axis] - 1) * stride[axis] + span[axis] + extra[axis]
        result = whole - lead - trail
        fixed = None
        if wanted is not None and rank - 2 + axis >= 0:
            fixed = wanted[axis + rank - 2]
        elif mode in ("SAME_UPPER", "SAME_LOWER"):
            fixed = sizes[axis] * stride[axis]
        if fixed is not None:
            total, result = whole - fixed, fixed
            lead = total // 2 if mode == "SAME_UPPER" else total - total // 2
        if result < 1:
            raise ctx.refuse(op, f"the result has {result} elements along an image axis", SMALLER)
        found.append(Transposed(sizes[axis], span[axis], stride[axis], lead, result))
    return found


def _stretched(ctx: OnnxContext, op: OnnxNode, w: str, step: Shape) -> str:
    """Weights OHWI with step - 1 zeros between rows and between columns: a dilated kernel."""
    (outputs, rows, columns, depth), stem = ctx.type_of(w).shape, op.outputs[0]
    if step == (1, 1):
        return w
    apart = ctx.add(op, Reshape((outputs, rows, 1, columns, 1, depth)), [w], f"{stem}_apart")
    after = (0, 0, step[0] - 1, 0, step[1] - 1, 0)
    padded = ctx.add(op, Pad((0,) * 6, after, 0.0), [apart], f"{stem}_zeros")
    wide = ctx.add(op, Reshape((outputs, rows * step[0], columns * step[1], depth)), [padded], f"{stem}_wide")
    stop = (outputs, (rows - 1) * step[0] + 1, (columns - 1) * step[1] + 1, depth)
    return ctx.add(op, Slice((0,) * 4, stop, (1,) * 4), [wide], f"{stem}_stretched")


def _ordered(ctx: OnnxContext, op: OnnxNode, w: str, groups: int) -> str:
    """Weights [C, M / groups, KH, KW] as OHWI."""
    (channels, share, rows, columns), stem = ctx.type_of(w).shape, op.outputs[0]
    parts = ctx.add(op, Reshape((groups, channels // groups, share, rows, columns)), [w], f"{stem}_groups")
    moved = ctx.add(op, Transpose((0, 2, 3, 4, 1)), [parts], f"{stem}_moved")
    return ctx.add(op, Reshape((groups * share, rows, columns, channels // groups)), [moved], f"{stem}_ohwi")


def conv_transpose(ctx: OnnxContext, op: OnnxNode) -> None:
    """ConvTranspose over one or two image axes, with constant weights."""
    x, w = ctx.value(op, 0), ctx.value(op, 1)
    shape, kernel = ctx.type_of(x).shape, ctx.type_of(w).shape
    rank = len(shape) - 2
    groups = int(ctx.attribute(op, "group", 1))
    if rank not in (1, 2) or len(kernel) != len(shape):
        raise ctx.refuse(op, f"only one or two image axes are supported, the operand is {ctx.type_of(x)}")
    if w not in ctx.static or kernel[0] != shape[1] or groups < 1 or shape[1] % groups:
        raise ctx.refuse(op, f"the weights {w!r} must be constant, for {shape[1]} channels in {groups} groups", FOLD)
    if tuple(ctx.attribute(op, "kernel_shape", kernel[2:])) != kernel[2:]:
        raise ctx.refuse(op, f"kernel_shape does not fit the weights {list(kernel)}", AGAIN)
    if rank == 1:
        x = ctx.add(op, Reshape((*shape[:2], 1, shape[2])), [x], f"{op.outputs[0]}_image")
        w = ctx.add(op, Reshape((*kernel[:2], 1, kernel[2])), [w], f"{op.outputs[0]}_kernel")
    stride, dilation = _numbers(ctx, op, "strides", rank, 1), _numbers(ctx, op, "dilations", rank, 1)
    sizes, taps = ctx.type_of(x).shape[2:], ctx.type_of(w).shape[2:]
    span = tuple((count - 1) * step + 1 for count, step in zip(taps, dilation, strict=True))
    stem = op.outputs[0]

    def emit(operator: Operator, operands: Sequence[str], suffix: str) -> str:
        return ctx.add(op, operator, operands, f"{stem}_{suffix}")

    image, weights = ctx.image(op, x), _stretched(ctx, op, _ordered(ctx, op, w, groups), dilation)
    operands = [image, weights, *([ctx.value(op, 2)] if ctx.has(op, 2) else [])]
    shapes = (ctx.type_of(image).shape, ctx.type_of(weights).shape)
    axes = _axes(ctx, op, sizes, span, stride, rank)
    result, moves = transposed_convolution(emit, operands, shapes, axes, groups)
    for move in moves:
        result = emit(move, [result], "placed")
    moved = emit(Transpose(TO_NCHW), [result], "nchw")
    whole = ctx.type_of(moved).shape
    ctx.alias(op, moved if rank == 2 else emit(Reshape((*whole[:2], whole[3])), [moved], "row"))
