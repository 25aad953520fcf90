"""ONNX ConvTranspose: a convolution of the operand with zeros between its elements."""

from __future__ import annotations

from dovetail.frontend.onnx_context import TO_NCHW, OnnxContext
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.graph.types import Shape
from dovetail.operators.linear import Conv2d
from dovetail.operators.movement import Pad, Reshape, Slice, Transpose
from dovetail.operators.selection import Pick

Pairs = tuple[tuple[int, int], tuple[int, int]]


def _numbers(ctx: OnnxContext, op: OnnxNode, name: str, rank: int, default: int) -> tuple[int, int]:
    """An attribute of one number per image axis, as rows and columns."""
    found = tuple(int(value) for value in ctx.attribute(op, name, (default,) * rank))
    if len(found) != rank:
        raise ctx.refuse(op, f"the attribute {name} = {list(found)} must be {rank} numbers")
    return (default, found[0]) if rank == 1 else (found[0], found[1])


def _borders(ctx: OnnxContext, op: OnnxNode, sizes: Shape, span: Shape, stride: Shape, rank: int) -> Pairs:
    """Zeros before and after the stretched operand: span - 1 less the padding, which the result loses; negative
    where it loses more."""
    extra = _numbers(ctx, op, "output_padding", rank, 0)
    mode = ctx.attribute(op, "auto_pad", "NOTSET")
    pads = tuple(ctx.attribute(op, "pads", (0,) * (2 * rank)))
    pads = (0, pads[0], 0, pads[1]) if rank == 1 else pads
    wanted = ctx.attribute(op, "output_shape", None)
    found = []
    for axis in (0, 1):
        lead, trail = pads[axis], pads[2 + axis]
        whole = (sizes[axis] - 1) * stride[axis] + span[axis] + extra[axis]
        result = None
        if wanted is not None and rank - 2 + axis >= 0:
            result = wanted[axis + rank - 2]
        elif mode in ("SAME_UPPER", "SAME_LOWER"):
            result = sizes[axis] * stride[axis]
        elif mode == "VALID":
            lead = trail = 0
        if result is not None:
            total = whole - result
            lead = total // 2 if mode == "SAME_UPPER" else total - total // 2
            trail = total - lead
        found.append((span[axis] - 1 - lead, span[axis] - 1 - trail + extra[axis]))
    return found[0], found[1]


def _stretched(ctx: OnnxContext, op: OnnxNode, x: str, stride: Shape) -> str:
    """The NHWC image with stride - 1 zeros between rows and between columns."""
    (batch, height, width, channels), stem = ctx.type_of(x).shape, op.outputs[0]
    if stride == (1, 1):
        return x
    apart = ctx.add(op, Reshape((batch, height, 1, width, 1, channels)), [x], f"{stem}_apart")
    after = (0, 0, stride[0] - 1, 0, stride[1] - 1, 0)
    padded = ctx.add(op, Pad((0,) * 6, after, 0.0), [apart], f"{stem}_zeros")
    wide = ctx.add(op, Reshape((batch, height * stride[0], width * stride[1], channels)), [padded], f"{stem}_wide")
    stop = (batch, (height - 1) * stride[0] + 1, (width - 1) * stride[1] + 1, channels)
    return ctx.add(op, Slice((0,) * 4, stop, (1,) * 4), [wide], f"{stem}_stretched")


def _bordered(ctx: OnnxContext, op: OnnxNode, x: str, borders: Pairs) -> str:
    """The image with zeros around it, cut where a border is negative."""
    shape, stem = ctx.type_of(x).shape, op.outputs[0]
    cut = [(max(-lead, 0), max(-trail, 0)) for lead, trail in borders]
    if any(any(pair) for pair in cut):
        start = (0, cut[0][0], cut[1][0], 0)
        stop = (shape[0], shape[1] - cut[0][1], shape[2] - cut[1][1], shape[3])
        x = ctx.add(op, Slice(start, stop, (1,) * 4), [x], f"{stem}_cut")
    (top, bottom), (left, right) = ((max(lead, 0), max(trail, 0)) for lead, trail in borders)
    if not any((top, bottom, left, right)):
        return x
    return ctx.add(op, Pad((0, top, left, 0), (0, bottom, right, 0), 0.0), [x], f"{stem}_bordered")


def _turned(ctx: OnnxContext, op: OnnxNode, w: str, groups: int) -> str:
    """Weights [C, M / groups, KH, KW] turned by half a circle, as OHWI."""
    (channels, share, rows, columns), stem = ctx.type_of(w).shape, op.outputs[0]
    places = (range(channels), range(share), reversed(range(rows)), reversed(range(columns)))
    turned = ctx.add(op, Pick(tuple(tuple(chosen) for chosen in places)), [w], f"{stem}_turned")
    parts = ctx.add(op, Reshape((groups, channels // groups, share, rows, columns)), [turned], f"{stem}_groups")
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
        raise ctx.refuse(op, f"the weights {w!r} must be constant, for {shape[1]} channels in {groups} groups")
    if tuple(ctx.attribute(op, "kernel_shape", kernel[2:])) != kernel[2:]:
        raise ctx.refuse(op, f"kernel_shape does not fit the weights {list(kernel)}")
    if rank == 1:
        x = ctx.add(op, Reshape((*shape[:2], 1, shape[2])), [x], f"{op.outputs[0]}_image")
        w = ctx.add(op, Reshape((*kernel[:2], 1, kernel[2])), [w], f"{op.outputs[0]}_kernel")
    stride, dilation = _numbers(ctx, op, "strides", rank, 1), _numbers(ctx, op, "dilations", rank, 1)
    sizes, taps = ctx.type_of(x).shape[2:], ctx.type_of(w).shape[2:]
    span = tuple((count - 1) * step + 1 for count, step in zip(taps, dilation, strict=True))
    borders = _borders(ctx, op, sizes, span, stride, rank)
    image = _bordered(ctx, op, _stretched(ctx, op, ctx.image(op, x), stride), borders)
    operands = [image, _turned(ctx, op, w, groups)]
    operands += [ctx.value(op, 2)] if ctx.has(op, 2) else []
    result = ctx.add(op, Conv2d((1, 1), dilation), operands, f"{op.outputs[0]}_nhwc")
    moved = ctx.add(op, Transpose(TO_NCHW), [result], f"{op.outputs[0]}_nchw")
    whole = ctx.type_of(moved).shape
    ctx.alias(op, moved if rank == 2 else ctx.add(op, Reshape((*whole[:2], whole[3])), [moved], f"{op.outputs[0]}_row"))
