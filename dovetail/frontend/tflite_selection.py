"""TFLite operators that take elements from other places: parts, gathered, repeated, mirrored, moved in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod

import numpy as np

from dovetail.frontend.tflite_context import TfliteContext
from dovetail.frontend.tflite_file import AGAIN, ALIKE, OperatorEntry, Tensor
from dovetail.frontend.tflite_movement import SHAPE_TYPES, border, moved
from dovetail.graph.types import Shape
from dovetail.operators.movement import Pad, Reshape, Slice, Transpose
from dovetail.operators.selection import Gather, Pick


def _picked(ctx: TfliteContext, op: OperatorEntry, places: Sequence[Sequence[int]], position: int = 0) -> None:
    moved(ctx, op, Pick(tuple(tuple(int(place) for place in chosen) for chosen in places)), position=position)


def _cut(ctx: TfliteContext, op: OperatorEntry, x: Tensor, axis: int, sizes: Sequence[int], drop: bool) -> None:
    """The operator's results: parts of x along an axis, which they lose where `drop` says so."""
    results = ctx.results(op, len(sizes))
    if sum(sizes) != x.shape[axis] or min(sizes) < 1:
        raise ctx.refuse(op, f"the parts {list(sizes)} do not make up axis {axis} of {x}", AGAIN)
    start = 0
    for size, result in zip(sizes, results, strict=True):
        if not ctx.same_quantisation(x, result):
            raise ctx.refuse(op, f"copies elements, but the quantisation of {x} and {result} differ", ALIKE)
        begin, end = [0] * len(x.shape), list(x.shape)
        begin[axis], end[axis] = start, start + size
        part = Slice(tuple(begin), tuple(end), (1,) * len(x.shape))
        stem = f"{result.name}_part" if drop else result.name
        value = ctx.builder.add(part, [ctx.value(op, x)], stem, ctx.origin(op))
        if drop:
            shape = (*x.shape[:axis], *x.shape[axis + 1 :])
            value = ctx.builder.add(Reshape(shape), [value], result.name, ctx.origin(op))
        ctx.bind(op, value, result)
        start += size


def split(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SPLIT into equal parts; the axis comes first."""
    x, count = ctx.input(op, 1), int(ctx.options(op, "SplitOptions")["NumSplits"])
    axis = ctx.axis(op, ctx.integers(op, 0, "axis")[0], len(x.shape))
    if count != len(op.outputs):
        raise ctx.refuse(op, f"the option NumSplits is {count}, there are {len(op.outputs)} results", AGAIN)
    _cut(ctx, op, x, axis, [x.shape[axis] // max(count, 1)] * count, drop=False)


def split_v(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SPLIT_V into parts of given sizes, one of which may be -1: what is left."""
    x, sizes = ctx.input(op, 0), list(ctx.integers(op, 1, "sizes"))
    axis = ctx.axis(op, ctx.integers(op, 2, "axis")[0], len(x.shape))
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = x.shape[axis] - sum(sizes) - 1
    _cut(ctx, op, x, axis, sizes, drop=False)


def unpack(ctx: TfliteContext, op: OperatorEntry) -> None:
    """UNPACK: the slices along an axis, which they lose."""
    x = ctx.input(op, 0)
    axis = ctx.axis(op, int(ctx.options(op, "UnpackOptions")["Axis"]), len(x.shape))
    if x.shape[axis] != len(op.outputs):
        raise ctx.refuse(op, f"axis {axis} of {x} has not as many elements as there are results ({len(op.outputs)})",
                         AGAIN)
    _cut(ctx, op, x, axis, [1] * x.shape[axis], drop=True)


def gather(ctx: TfliteContext, op: OperatorEntry) -> None:
    """GATHER along an axis, by constant or computed indices."""
    options, x, indices = ctx.options(op, "GatherOptions"), ctx.input(op, 0), ctx.input(op, 1)
    axis = ctx.axis(op, int(options["Axis"]), len(x.shape))
    if options["BatchDims"]:
        raise ctx.refuse(op, f"the option BatchDims = {options['BatchDims']} is not supported, only 0")
    _gathered(ctx, op, x, indices, axis)


def _gathered(ctx: TfliteContext, op: OperatorEntry, x: Tensor, indices: Tensor, axis: int) -> None:
    known, places = ctx.known(x), ctx.known(indices)
    if known is not None and places is not None and x.dtype in SHAPE_TYPES:
        ctx.bind_known(op, np.take(known, places, axis))
        return
    if not ctx.same_quantisation(x, ctx.output(op)):
        raise ctx.refuse(op, f"copies elements, but the quantisation of {x} and {ctx.output(op)} differ", ALIKE)
    ctx.emit(op, Gather(axis), [ctx.value(op, x), ctx.value(op, indices)])


def embedding_lookup(ctx: TfliteContext, op: OperatorEntry) -> None:
    """EMBEDDING_LOOKUP: rows of a table, the indices come first; of integers their float meaning where wanted so."""
    indices, x, result = ctx.input(op, 0), ctx.input(op, 1), ctx.output(op)
    if x.dtype is result.dtype:
        _gathered(ctx, op, x, indices, 0)
        return
    ctx.emit_real(op, Gather(0), [ctx.real(op, x), ctx.value(op, indices)])


def gather_nd(ctx: TfliteContext, op: OperatorEntry) -> None:
    """GATHER_ND by constant indices, or by computed ones along the first axis."""
    x, indices = ctx.input(op, 0), ctx.input(op, 1)
    depth, places = indices.shape[-1], ctx.known(indices)
    if depth > len(x.shape):
        raise ctx.refuse(op, f"the indices {indices} have more places than {x} axes", AGAIN)
    rest = x.shape[depth:]
    shape = (*indices.shape[:-1], *rest)
    if places is None:
        if depth != 1:
            raise ctx.refuse(op, f"computed indices {indices} over several axes are not supported")
        rows = ctx.add(op, Reshape(indices.shape[:-1]), [ctx.value(op, indices)], "rows")
        ctx.emit(op, Gather(0), [ctx.value(op, x), rows])
        return
    strides = np.array([prod(x.shape[axis + 1 : depth]) for axis in range(depth)], np.int64)
    flat = (places.reshape(-1, depth).astype(np.int64) * strides).sum(axis=1)
    whole = (prod(x.shape[:depth]), prod(rest))
    moved(ctx, op, Reshape(whole), Pick((tuple(flat.tolist()), tuple(range(whole[1])))), Reshape(shape))


def mirror_pad(ctx: TfliteContext, op: OperatorEntry) -> None:
    """MIRROR_PAD: the border repeats the edge (SYMMETRIC) or not (REFLECT)."""
    x, pads = ctx.input(op, 0), ctx.integers(op, 1, "paddings")
    symmetric = int(ctx.options(op, "MirrorPadOptions")["Mode"]) == 1
    ctx.expect_shape(op, [size + a + b for size, a, b in zip(x.shape, pads[::2], pads[1::2], strict=True)])
    places = []
    for size, before, after in zip(x.shape, pads[::2], pads[1::2], strict=True):
        if max(before, after) > size - (not symmetric) or min(before, after) < 0:
            raise ctx.refuse(op, f"a border of {max(before, after)} cannot mirror {size} elements", AGAIN)
        period = max(2 * size if symmetric else 2 * (size - 1), 1)
        along = (place % period for place in range(-before, size + after))
        places.append([place if place < size else period - place - symmetric for place in along])
    _picked(ctx, op, places)


def tile(ctx: TfliteContext, op: OperatorEntry) -> None:
    """TILE."""
    x, counts = ctx.input(op, 0), ctx.integers(op, 1, "multiples")
    if len(counts) != len(x.shape) or min(counts, default=1) < 1:
        raise ctx.refuse(op, f"the multiples {list(counts)} must be a positive number for each axis of {x}", AGAIN)
    ctx.expect_shape(op, [size * count for size, count in zip(x.shape, counts, strict=True)])
    _picked(ctx, op, [list(range(size)) * count for size, count in zip(x.shape, counts, strict=True)])


def broadcast_to(ctx: TfliteContext, op: OperatorEntry) -> None:
    """BROADCAST_TO, and FILL, whose value has no axes."""
    filled = op.opcode == "FILL"
    x, shape = ctx.input(op, 1 if filled else 0), ctx.integers(op, 0 if filled else 1, "shape")
    ctx.expect_shape(op, shape)
    whole = (1,) * (len(shape) - len(x.shape)) + x.shape
    if len(whole) != len(shape) or any(have not in (1, size) for have, size in zip(whole, shape, strict=True)):
        raise ctx.refuse(op, f"{x} cannot be broadcast to {list(shape)}", AGAIN)
    places = tuple(tuple(range(n)) if n == have else (0,) * n for n, have in zip(shape, whole, strict=True))
    known = ctx.known(x)
    if known is not None and x.dtype not in SHAPE_TYPES:
        array = np.ascontiguousarray(np.broadcast_to(known, shape))
        ctx.bind(op, ctx.builder.constant(ctx.output(op).name, array, x.dtype))
        return
    moved(ctx, op, Reshape(whole), Pick(places), position=1 if filled else 0)


def zeros_like(ctx: TfliteContext, op: OperatorEntry) -> None:
    """ZEROS_LIKE: zeros as stored."""
    result = ctx.output(op)
    array = np.zeros(result.shape, result.dtype.numpy)
    ctx.bind(op, ctx.builder.constant(result.name, array, result.dtype))


def reverse(ctx: TfliteContext, op: OperatorEntry) -> None:
    """REVERSE_V2 along some axes."""
    x = ctx.input(op, 0)
    axes = {ctx.axis(op, axis, len(x.shape)) for axis in ctx.integers(op, 1, "axes")}
    _picked(ctx, op, [range(size)[:: -1 if axis in axes else 1] for axis, size in enumerate(x.shape)])


def _image(ctx: TfliteContext, op: OperatorEntry) -> tuple[Tensor, Shape]:
    x = ctx.input(op, 0)
    if len(x.shape) != 4:
        raise ctx.refuse(op, f"needs an NHWC image, got {x}", AGAIN)
    return x, x.shape


def depth_to_space(ctx: TfliteContext, op: OperatorEntry) -> None:
    """DEPTH_TO_SPACE: the place in the block is the outer part of the channel."""
    _, (batch, height, width, channels) = _image(ctx, op)
    size = int(ctx.options(op, "DepthToSpaceOptions")["BlockSize"])
    depth = channels // max(size, 1) ** 2
    apart, whole = (batch, height, width, size, size, depth), (batch, height * size, width * size, depth)
    moved(ctx, op, Reshape(apart), Transpose((0, 1, 3, 2, 4, 5)), Reshape(whole))


def space_to_depth(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SPACE_TO_DEPTH: the inverse of DEPTH_TO_SPACE."""
    _, (batch, height, width, channels) = _image(ctx, op)
    size = max(int(ctx.options(op, "SpaceToDepthOptions")["BlockSize"]), 1)
    rows, columns = height // size, width // size
    apart, whole = (batch, rows, size, columns, size, channels), (batch, rows, columns, size * size * channels)
    moved(ctx, op, Reshape(apart), Transpose((0, 1, 3, 2, 4, 5)), Reshape(whole))


def _blocks(ctx: TfliteContext, op: OperatorEntry, blocks: Shape, what: str) -> Shape:
    """What is added or cut on both sides of each axis that has blocks; refuses blocks that do not fit the operand."""
    sides, x = ctx.integers(op, 2, what), ctx.input(op, 0)
    fits = len(sides) == 2 * len(blocks) and len(blocks) < len(x.shape)
    if not fits or min(blocks, default=1) < 1 or min(sides, default=0) < 0:
        raise ctx.refuse(op, f"the blocks {list(blocks)} and {what} {list(sides)} do not fit {x}", AGAIN)
    return sides


def space_to_batch(ctx: TfliteContext, op: OperatorEntry) -> None:
    """SPACE_TO_BATCH_ND: padded, then the place in the block becomes the outer part of the batch."""
    x, blocks = ctx.input(op, 0), ctx.integers(op, 1, "block shape")
    pads, count = _blocks(ctx, op, blocks, "paddings"), len(blocks)
    rest = len(x.shape) - 1 - count
    before, after = (0, *pads[::2], *(0,) * rest), (0, *pads[1::2], *(0,) * rest)
    pad = Pad(before, after, border(ctx, op, x, None))
    sizes = [size + lead + trail for size, lead, trail in zip(x.shape, before, after, strict=True)][1:]
    if any(size % block for size, block in zip(sizes, blocks, strict=False)):
        raise ctx.refuse(op, f"the padded sizes {sizes} do not divide into blocks {list(blocks)}", AGAIN)
    apart = [part for size, block in zip(sizes, blocks, strict=False) for part in (size // block, block)]
    order = (*range(2, 2 * count + 1, 2), 0, *range(1, 2 * count, 2), *range(2 * count + 1, 2 * count + 1 + rest))
    whole = (x.shape[0] * prod(blocks), *apart[::2], *sizes[count:])
    moved(ctx, op, pad, Reshape((x.shape[0], *apart, *sizes[count:])), Transpose(order), Reshape(whole))


def batch_to_space(ctx: TfliteContext, op: OperatorEntry) -> None:
    """BATCH_TO_SPACE_ND: the inverse of SPACE_TO_BATCH_ND, then cut."""
    x, blocks = ctx.input(op, 0), ctx.integers(op, 1, "block shape")
    crops, count = _blocks(ctx, op, blocks, "crops"), len(blocks)
    batch, rest = x.shape[0] // prod(blocks), x.shape[1 + count :]
    order = [count]
    for axis in range(count):
        order += [count + 1 + axis, axis]
    order += range(2 * count + 1, 2 * count + 1 + len(rest))
    sizes = [size * block for size, block in zip(x.shape[1 : 1 + count], blocks, strict=True)]
    start = (0, *crops[::2], *(0,) * len(rest))
    stop = (batch, *(size - crop for size, crop in zip(sizes, crops[1::2], strict=True)), *rest)
    moved(
        ctx, op,
        Reshape((*blocks, batch, *x.shape[1:])), Transpose(tuple(order)), Reshape((batch, *sizes, *rest)),
        Slice(start, stop, (1,) * len(start)),
    )  # fmt: skip


def nearest(ctx: TfliteContext, op: OperatorEntry) -> None:
    """RESIZE_NEAREST_NEIGHBOR: places in float32, as TFLite's resize_nearest_neighbor.h finds them."""
    _, shape = _image(ctx, op)
    options = ctx.options(op, "ResizeNearestNeighborOptions")
    align, centred = bool(options["AlignCorners"]), bool(options["HalfPixelCenters"])
    places: list[Sequence[int]] = [range(shape[0])]
    results = ctx.integers(op, 1, "size")
    ctx.expect_shape(op, (shape[0], *results, shape[3]))
    for size, result in zip(shape[1:3], results, strict=True):
        corners = align and result > 1
        scale = np.float32(size - 1) / np.float32(result - 1) if corners else np.float32(size) / np.float32(result)
        along = [np.float32(np.float32(place + (0.5 if centred else 0.0)) * scale) for place in range(result)]
        taken = [floor(float(place) + 0.5) if align else floor(float(place)) for place in along]
        places.append([min(max(place, 0), size - 1) for place in taken])
    _picked(ctx, op, [*places, range(shape[3])])
