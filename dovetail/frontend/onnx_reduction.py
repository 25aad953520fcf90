"""ONNX reductions, places of extremes, softmax and normalisation."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from dovetail.frontend.onnx_context import AGAIN, OnnxContext
from dovetail.frontend.onnx_elementwise import batch_affine, number, real_value
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.graph.types import DType, Shape
from dovetail.operators.activation import LogSoftmax, Softmax, Unary, UnaryKind
from dovetail.operators.arithmetic import Add
from dovetail.operators.elementwise import Binary, BinaryKind
from dovetail.operators.movement import Reshape, Transpose
from dovetail.operators.reduction import ArgExtreme, Normalise, Reduce, ReduceKind

Importer = Callable[[OnnxContext, OnnxNode], None]


def reduced_axes(ctx: OnnxContext, op: OnnxNode, rank: int) -> tuple[int, ...] | None:
    """The axes a reduction names, in rising order: an attribute, or operand 1 in newer opsets; all where it names
    none; None where it shall then do nothing."""
    listed = ctx.attribute(op, "axes", None)
    if listed is None:
        listed = ctx.integers(op, 1, "axes") if ctx.has(op, 1) else ()
    noop = ctx.attribute(op, "noop_with_empty_axes", 0)
    if not listed:
        return None if noop else tuple(range(rank))
    return tuple(sorted({ctx.positive_axis(op, axis, rank) for axis in listed}))


def kept_shape(shape: Shape, axes: tuple[int, ...], keep: bool) -> Shape:
    """The shape after a reduction over `axes`."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes)


def reduction(kind: ReduceKind, before: UnaryKind | None = None, after: UnaryKind | None = None) -> Importer:
    """The importer of a reduction of floats, of function `before` of them; `after` is applied to the result.

    Without either, integers have a maximum and a minimum too.
    """

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        x = ctx.value(op, 0)
        shape = ctx.type_of(x).shape
        axes = reduced_axes(ctx, op, len(shape))
        if before is not None:
            x = ctx.add(op, Unary(before), [x], f"{op.outputs[0]}_before")
        keep = bool(ctx.attribute(op, "keepdims", 1))
        if axes is not None:
            x = ctx.add(op, Reduce(kind, axes), [x], f"{op.outputs[0]}_reduced")
            x = ctx.add(op, Reshape(kept_shape(shape, axes, keep)), [x], f"{op.outputs[0]}_shaped")
        ctx.alias(op, ctx.add(op, Unary(after), [x], f"{op.outputs[0]}_after") if after is not None else x)

    return build


def squares(root: bool) -> Importer:
    """The importer of ReduceSumSquare, and of ReduceL2, its square root."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        x = real_value(ctx, op)
        shape = ctx.type_of(x).shape
        axes = reduced_axes(ctx, op, len(shape))
        x = ctx.add(op, Binary(BinaryKind.MULTIPLY), [x, x], f"{op.outputs[0]}_squares")
        keep = bool(ctx.attribute(op, "keepdims", 1))
        if axes is not None:
            x = ctx.add(op, Reduce(ReduceKind.SUM, axes), [x], f"{op.outputs[0]}_sum")
            x = ctx.add(op, Reshape(kept_shape(shape, axes, keep)), [x], f"{op.outputs[0]}_shaped")
        ctx.alias(op, ctx.add(op, Unary(UnaryKind.SQUARE_ROOT), [x], f"{op.outputs[0]}_root") if root else x)

    return build


def log_sum_exp(ctx: OnnxContext, op: OnnxNode) -> None:
    """ReduceLogSumExp: the largest element is taken off first, and put back."""
    x = real_value(ctx, op)
    shape = ctx.type_of(x).shape
    axes = reduced_axes(ctx, op, len(shape))
    if axes is None:
        ctx.alias(op, x)
        return
    stem = op.outputs[0]
    most = ctx.add(op, Reduce(ReduceKind.MAXIMUM, axes), [x], f"{stem}_largest")
    centred = ctx.add(op, Binary(BinaryKind.SUBTRACT), [x, most], f"{stem}_centred")
    powers = ctx.add(op, Unary(UnaryKind.EXPONENTIAL), [centred], f"{stem}_powers")
    total = ctx.add(op, Reduce(ReduceKind.SUM, axes), [powers], f"{stem}_sum")
    logarithm = ctx.add(op, Unary(UnaryKind.LOGARITHM), [total], f"{stem}_log")
    result = ctx.add(op, Add(), [logarithm, most], f"{stem}_whole")
    ctx.emit(op, Reshape(kept_shape(shape, axes, bool(ctx.attribute(op, "keepdims", 1)))), [result])


def arg_extreme(largest: bool) -> Importer:
    """The importer of ArgMax or ArgMin."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        x = ctx.value(op, 0)
        shape = ctx.type_of(x).shape
        axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", 0)), len(shape))
        operator = ArgExtreme(axis, largest, bool(ctx.attribute(op, "select_last_index", 0)))
        places = ctx.add(op, operator, [x], f"{op.outputs[0]}_places")
        ctx.emit(op, Reshape(kept_shape(shape, (axis,), bool(ctx.attribute(op, "keepdims", 1)))), [places])

    return build


def normalised(ctx: OnnxContext, op: OnnxNode, x: str, opset: int, stem: str, logarithm: bool = False) -> str:
    """The softmax of a float value over the operator's axis; before opset 13 over all axes from it on."""
    operator = LogSoftmax() if logarithm else Softmax()
    shape = ctx.type_of(x).shape
    axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", -1 if opset >= 13 else 1)), len(shape))
    if axis == len(shape) - 1:
        return ctx.add(op, operator, [x], stem)
    if opset < 13:
        rows = ctx.add(op, Reshape((prod(shape[:axis]), prod(shape[axis:]))), [x], f"{stem}_rows")
        return ctx.add(op, Reshape(shape), [ctx.add(op, operator, [rows], f"{stem}_normalised")], stem)
    order = (*(place for place in range(len(shape)) if place != axis), axis)
    back = tuple(order.index(place) for place in range(len(shape)))
    last = ctx.add(op, Transpose(order), [x], f"{stem}_last")
    return ctx.add(op, Transpose(back), [ctx.add(op, operator, [last], f"{stem}_normalised")], stem)


def softmax(ctx: OnnxContext, op: OnnxNode) -> None:
    """Softmax."""
    ctx.values[op.outputs[0]] = normalised(ctx, op, real_value(ctx, op), ctx.opset, op.outputs[0])


def log_softmax(ctx: OnnxContext, op: OnnxNode) -> None:
    """LogSoftmax."""
    ctx.values[op.outputs[0]] = normalised(ctx, op, real_value(ctx, op), ctx.opset, op.outputs[0], logarithm=True)


def _over_rows(ctx: OnnxContext, op: OnnxNode, x: str, rows: Shape, operator: Normalise) -> str:
    """A float value normalised over the last axis of `rows`, in its own shape again."""
    stem = op.outputs[0]
    flat = ctx.add(op, Reshape(rows), [x], f"{stem}_rows")
    done = ctx.add(op, operator, [flat], f"{stem}_normalised")
    return ctx.add(op, Reshape(ctx.type_of(x).shape), [done], f"{stem}_shaped")


def _moments(ctx: OnnxContext, op: OnnxNode, x: str, rows: Shape, kept: Shape) -> None:
    """The other results of LayerNormalization: each row's mean, and 1 / its deviation."""
    stem = op.outputs[0]
    flat = ctx.add(op, Reshape(rows), [x], f"{stem}_rows")
    mean = ctx.add(op, Reduce(ReduceKind.MEAN, (1,)), [flat], f"{stem}_mean")
    found = [mean]
    if len(op.outputs) > 2 and op.outputs[2]:
        centred = ctx.add(op, Binary(BinaryKind.SUBTRACT), [flat, mean], f"{stem}_centred")
        squares = ctx.add(op, Binary(BinaryKind.MULTIPLY), [centred, centred], f"{stem}_squares")
        spread = ctx.add(op, Reduce(ReduceKind.MEAN, (1,)), [squares], f"{stem}_variance")
        epsilon = number(ctx, op, float(ctx.attribute(op, "epsilon", 1e-5)))
        root = ctx.add(op, Unary(UnaryKind.SQUARE_ROOT), [ctx.add(op, Add(), [spread, epsilon], f"{stem}_raised")])
        found.append(ctx.add(op, Unary(UnaryKind.RECIPROCAL), [root], f"{stem}_inverse"))
    for name, value in zip(op.outputs[1:], found, strict=False):
        if name:
            ctx.values[name] = ctx.add(op, Reshape(kept), [value], name)


def _layer(centred: bool) -> Importer:
    """The importer of LayerNormalization, or of RMSNormalization, which takes no mean off."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        ctx.only(op, "stash_type", 1)
        x = real_value(ctx, op)
        shape = ctx.type_of(x).shape
        axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", -1)), len(shape))
        operator = Normalise(float(ctx.attribute(op, "epsilon", 1e-5)), centred)
        rows = (prod(shape[:axis]), prod(shape[axis:]))
        result = _over_rows(ctx, op, x, rows, operator)
        if centred and any(op.outputs[1:]):
            _moments(ctx, op, x, rows, (*shape[:axis], *(1,) * (len(shape) - axis)))
        scaled = ctx.add(op, Binary(BinaryKind.MULTIPLY), [result, real_value(ctx, op, 1)], f"{op.outputs[0]}_scaled")
        if ctx.has(op, 2):
            scaled = ctx.add(op, Add(), [scaled, real_value(ctx, op, 2)], f"{op.outputs[0]}_offset")
        ctx.alias(op, scaled)

    return build


layer_normalisation = _layer(True)
rms_normalisation = _layer(False)


def instance_normalisation(ctx: OnnxContext, op: OnnxNode) -> None:
    """InstanceNormalization: every channel of every image by itself."""
    x = real_value(ctx, op)
    shape = ctx.type_of(x).shape
    operator = Normalise(float(ctx.attribute(op, "epsilon", 1e-5)))
    result = _over_rows(ctx, op, x, (shape[0] * shape[1], prod(shape[2:])), operator)
    batch_affine(ctx, op, result, real_value(ctx, op, 1), real_value(ctx, op, 2))


def group_normalisation(ctx: OnnxContext, op: OnnxNode) -> None:
    """GroupNormalization with a scale and an offset per channel (opset 21)."""
    ctx.only(op, "stash_type", 1)
    x = real_value(ctx, op)
    shape = ctx.type_of(x).shape
    groups = int(ctx.attribute(op, "num_groups", 1))
    if groups < 1 or shape[1] % groups:
        raise ctx.refuse(op, f"{groups} groups do not divide {shape[1]} channels", AGAIN)
    scale, offset = real_value(ctx, op, 1), real_value(ctx, op, 2)
    if ctx.type_of(scale).shape != (shape[1],):
        raise ctx.refuse(op, f"the scale is {ctx.type_of(scale)}, expected one element for each of {shape[1]} channels",
                         AGAIN)
    operator = Normalise(float(ctx.attribute(op, "epsilon", 1e-5)))
    result = _over_rows(ctx, op, x, (shape[0] * groups, prod(shape[1:]) // groups), operator)
    batch_affine(ctx, op, result, scale, offset)


def global_pool(kind: ReduceKind) -> Importer:
    """The importer of a pool over everything behind the channels."""

    def build(ctx: OnnxContext, op: OnnxNode) -> None:
        x = ctx.value(op, 0)
        rank = len(ctx.type_of(x).shape)
        if rank < 3 or ctx.type_of(x).dtype is DType.BOOL:
            raise ctx.refuse(op, f"pools {ctx.type_of(x)}, which has no image axes", AGAIN)
        ctx.emit(op, Reduce(kind, tuple(range(2, rank))), [x])

    return build
