"""TFLite operators that move elements: they act on the stored integers and must keep the quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from dovetail.ir.operators.base import broadcast_shape
from dovetail.ir.operators.movement import Concat, Gather, Pad, Pick, Reshape, Slice, Transpose
from dovetail.ir.types import Shape
from dovetail.read.geometry import broadcast, mirrored, repeated
from dovetail.read.tflite.file import TfliteTensor
from dovetail.read.tflite.values import SHAPE_TYPES, TfliteValues, same_quantisation
from dovetail.read.values import ALIKE, Value, kept_shape, slice_of

COPIES = "copies elements, but the quantisation of"


def pack(v: TfliteValues) -> Value | None:
    """PACK: operands along a new axis; of known integers now, which is how converters put a shape together."""
    shape, parts = v.x.shape, v.inputs
    known = v.all_known(*parts)
    axis = v.axis(v.option("Axis"), len(shape) + 1)
    if known is not None:
        v.bind_known(np.stack(known, axis))
        return None
    if not all(same_quantisation(part, v.output) for part in parts):
        raise v.refuse("copies elements, but the quantisations of its operands and its result differ", ALIKE)
    wide = (*shape[:axis], 1, *shape[axis:])
    return v.add(Concat(axis), [v.reshape(v.value(part), wide, "part") for part in parts])


def reshape(v: TfliteValues) -> Value | None:
    """RESHAPE: the new shape is operand 1, or an option in old files; it must agree with the declared result."""
    x, result = v.x, v.output
    wanted = v.integers(1, "new shape") if v.has(1) else v.option("NewShape")
    fits = len(wanted) == result.rank and wanted.count(-1) <= 1
    odd = not fits or any(a not in (-1, b) for a, b in zip(wanted, result.shape, strict=True))
    v.wrong_if(odd, f"the new shape {list(wanted)} of {x} does not give the declared {result}")
    return v.moved(Reshape(result.shape))


def squeeze(v: TfliteValues) -> Value | None:
    """SQUEEZE: drops the listed axes of size 1, or all of them."""
    x = v.x
    dropped = v.axes(v.option("SqueezeDims") or [axis for axis, size in enumerate(x.shape) if size == 1], x.rank)
    return v.moved(Reshape(kept_shape(x.shape, dropped, False)))


def expand_dims(v: TfliteValues) -> Value | None:
    """EXPAND_DIMS: a new axis of size 1."""
    shape, (axis,) = v.x.shape, v.integers(1, "axis", 1)
    place = v.axis(axis, len(shape) + 1)
    return v.moved(Reshape((*shape[:place], 1, *shape[place:])))


def transpose(v: TfliteValues) -> Value | None:
    """TRANSPOSE."""
    order, rank = v.integers(1, "permutation"), v.x.rank
    return v.moved(Transpose(tuple(v.axis(axis, rank) for axis in order)))


def pad(v: TfliteValues) -> Value | None:
    """PAD and PADV2: the border is 0 (the zero point of a quantised tensor) or operand 2, quantised as the result."""
    x, pads = v.x, v.integers(1, "paddings")
    v.wrong_if(len(pads) != 2 * x.rank or min(pads, default=0) < 0, f"the paddings {list(pads)} do not fit {x}")
    return v.moved(Pad(pads[0::2], pads[1::2], _border(v, x, v.optional(2))))


def _border(v: TfliteValues, x: TfliteTensor, value: TfliteTensor | None = None) -> float:
    """The element a padding of x writes, as stored: `value`, or 0."""
    if value is None:
        return x.zero
    array = v.array(value, "border value")
    if value.dtype is not x.dtype or array.size != 1 or not same_quantisation(value, x):
        raise v.refuse(f"the border value {value} must be one element quantised as {x}", ALIKE)
    return int(array.reshape(-1)[0]) if x.dtype.is_integer else float(array.reshape(-1)[0])


def concatenation(v: TfliteValues) -> Value | None:
    """CONCATENATION: of the integers where all are quantised alike, else in float; of known integers now."""
    result, parts = v.output, v.inputs
    odd = not parts or any(part.rank != result.rank for part in parts)
    v.wrong_if(odd, f"the operands do not have the axes of the result {result}")
    operator = Concat(v.axis(v.option("Axis"), result.rank))
    if (known := v.all_known(*parts)) is not None:
        v.bind_known(operator.evaluate(known))
        return None
    v.same_type(result, *parts)
    if v.activation == 0 and all(same_quantisation(part, result) for part in parts):
        return v.add(operator, [*map(v.value, parts)])
    return v.finish(operator, [*map(v.real, parts)])


def slice_(v: TfliteValues) -> Value | None:
    """SLICE: begin and size per axis, size -1 to the end."""
    shape = v.x.shape
    begin, size = v.integers(1, "begin", len(shape)), v.integers(2, "size", len(shape))
    ends = zip(begin, size, shape, strict=True)
    return v.moved(slice_of([range(start, whole if count == -1 else start + count) for start, count, whole in ends]))


def strided_slice(v: TfliteValues) -> Value | None:
    """STRIDED_SLICE with constant steps and all its masks (their meaning is that of strided_slice.cc and
    kernels/internal/strided_slice_logic.h); axes behind those that are named are taken whole."""
    v.refuse_if(v.option("Offset"), f"the option Offset = {v.option('Offset')} is not supported")
    x = v.x
    begin, end, step = (v.integers(at, what) for at, what in ((1, "begin"), (2, "end"), (3, "strides")))
    odd = 0 in step or not len(begin) == len(end) == len(step)
    v.wrong_if(odd, f"the strides {list(step)} must not be 0, and as many as {list(begin)} and {list(end)}")

    def chosen(name: str, at: int) -> bool:
        return bool(v.option(f"{name}Mask") >> at & 1)

    key = list[Any]()
    for at, stride in enumerate(step):
        start, stop = (None if chosen(name, at) else ends[at] for name, ends in (("Begin", begin), ("End", end)))
        if chosen("Ellipsis", at):
            key.append(...)
        elif chosen("NewAxis", at):
            key.append(None)
        else:
            key.append((start or 0) if chosen("ShrinkAxis", at) else slice(start, stop, stride))
    places, shape = v.indexed(x.shape, key)
    v.wrong_if(not all(places), f"the slice of {x} has no elements")
    operator: Slice | Pick = Pick(tuple(map(tuple, places)))
    if all(one.step > 0 for one in places):
        operator = slice_of([range(one[0], one[-1] + 1, one.step if len(one) > 1 else 1) for one in places])
    return v.moved(operator, *([Reshape(tuple(shape))] if shape != [*map(len, places)] else []))


def _cut(v: TfliteValues, x: TfliteTensor, axis: int, sizes: Sequence[int], drop: bool = False) -> None:
    """The operator's results: parts of x along an axis, which they lose where `drop` says so."""
    results = v.results(len(sizes))
    odd = sum(sizes) != x.shape[axis] or min(sizes) < 1
    v.wrong_if(odd, f"the parts {list(sizes)} do not make up axis {axis} of {x}")
    start = 0
    for size, result in zip(sizes, results, strict=True):
        v.keeps(x, result, what=COPIES)
        value = v.part(v.value(x), axis, start, start + size, name=f"{result.name}_part" if drop else result.name)
        if drop:
            value = v.reshape(value, (*x.shape[:axis], *x.shape[axis + 1 :]), name=result.name)
        v.bind(value, result)
        start += size


def split(v: TfliteValues) -> None:
    """SPLIT into equal parts; the axis comes first."""
    x, count = v.input(1), v.option("NumSplits")
    axis = v.axis(v.integers(0, "axis", 1)[0], x.rank)
    _cut(v, x, axis, [x.shape[axis] // max(count, 1)] * count)


def split_v(v: TfliteValues) -> None:
    """SPLIT_V into parts of given sizes, one of which may be -1: what is left."""
    x, sizes = v.x, list(v.integers(1, "sizes"))
    axis = v.axis(v.integers(2, "axis", 1)[0], x.rank)
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = x.shape[axis] - sum(sizes) - 1
    _cut(v, x, axis, sizes)


def unpack(v: TfliteValues) -> None:
    """UNPACK: the slices along an axis, which they lose."""
    x = v.x
    _cut(v, x, v.axis(v.option("Axis"), x.rank), [1] * len(v.op.outputs), drop=True)


def gather(v: TfliteValues) -> Value | None:
    """GATHER along an axis, by constant or computed indices."""
    x, batch = v.x, v.option("BatchDims")
    axis = v.axis(v.option("Axis"), x.rank)
    v.refuse_if(batch, f"the option BatchDims = {batch} is not supported, only 0")
    return _gathered(v, x, v.input(1), axis)


def _gathered(v: TfliteValues, x: TfliteTensor, indices: TfliteTensor, axis: int) -> Value | None:
    known = v.all_known(x, indices)
    if known is not None:
        beyond = known[1].size and not 0 <= int(known[1].min()) <= int(known[1].max()) < known[0].shape[axis]
        v.wrong_if(beyond, f"the indices {indices} reach beyond axis {axis} of {x}")
        v.bind_known(np.take(known[0], known[1], axis))
        return None
    v.keeps(x, v.output, what=COPIES)
    return v.add(Gather(axis), [v.value(x), v.value(indices)])


def embedding_lookup(v: TfliteValues) -> Value | None:
    """EMBEDDING_LOOKUP: rows of a table, the indices come first; of integers their float meaning where wanted so."""
    indices, x = v.x, v.input(1)
    if x.dtype is v.output.dtype:
        return _gathered(v, x, indices, 0)
    return v.finish(Gather(0), [v.real(x), v.value(indices)])


def gather_nd(v: TfliteValues) -> Value | None:
    """GATHER_ND by constant indices, or by computed ones along the first axis."""
    x, indices = v.x, v.input(1)
    (*outer, depth), places = indices.shape, v.known_of(indices)
    v.wrong_if(depth > x.rank, f"the indices {indices} have more places than {x} axes")
    if places is None:
        v.refuse_if(depth != 1, f"computed indices {indices} over several axes are not supported")
        return v.add(Gather(0), [v.value(x), v.reshape(v.value(indices), outer, "rows")])
    rest, strides = x.shape[depth:], [prod(x.shape[axis + 1 : depth]) for axis in range(depth)]
    flat = places.reshape(-1, depth).astype(np.int64) @ np.array(strides, np.int64)
    whole = (prod(x.shape[:depth]), prod(rest))
    return v.moved(Reshape(whole), Pick((tuple(flat.tolist()), tuple(range(whole[1])))), Reshape((*outer, *rest)))


def _picked(v: TfliteValues, places: Sequence[Sequence[int]]) -> Value | None:
    return v.moved(Pick(tuple(map(tuple, places))))


def mirror_pad(v: TfliteValues) -> Value | None:
    """MIRROR_PAD: the border repeats the edge (SYMMETRIC) or not (REFLECT)."""
    x, pads, symmetric = v.x, v.integers(1, "paddings"), v.option("Mode") == 1
    sides = list(zip(x.shape, pads[::2], pads[1::2], strict=True))
    v.expect_shape([*map(sum, sides)])
    for size, before, after in sides:
        odd = max(before, after) > size - (not symmetric) or min(before, after) < 0
        v.wrong_if(odd, f"a border of {max(before, after)} cannot mirror {size} elements")
    return _picked(v, [mirrored(*side, "symmetric" if symmetric else "reflect") for side in sides])


def tile(v: TfliteValues) -> Value | None:
    """TILE."""
    x, counts = v.x, v.integers(1, "multiples")
    odd = len(counts) != x.rank or min(counts, default=1) < 1
    v.wrong_if(odd, f"the multiples {list(counts)} must be a positive number for each axis of {x}")
    v.expect_shape([size * count for size, count in zip(x.shape, counts, strict=True)])
    return _picked(v, repeated(x.shape, counts))


def broadcast_to(v: TfliteValues, place: int = 0) -> Value | None:
    """BROADCAST_TO, and FILL, whose value comes second and has no axes."""
    x, shape = v.input(place), v.integers(1 - place, "shape")
    v.expect_shape(shape)
    v.wrong_if(broadcast_shape([x.type, v.output.type]) != shape, f"{x} cannot be broadcast to {list(shape)}")
    known = v.known_of(x)
    if known is not None and x.dtype not in SHAPE_TYPES:
        return v.placed(v.stem, np.ascontiguousarray(np.broadcast_to(known, shape)), x.dtype)
    return v.moved(*broadcast(x.shape, shape), position=place)


def zeros_like(v: TfliteValues) -> Value:
    """ZEROS_LIKE: zeros as stored."""
    result = v.output
    return v.placed(result.name, np.zeros(result.shape, result.dtype.numpy), result.dtype)


def reverse(v: TfliteValues) -> Value | None:
    """REVERSE_V2 along some axes."""
    shape = v.x.shape
    axes = v.axes(v.integers(1, "axes"), len(shape))
    return _picked(v, [range(size)[:: -1 if axis in axes else 1] for axis, size in enumerate(shape)])


def in_blocks(v: TfliteValues, apart: bool) -> Value | None:
    """SPACE_TO_DEPTH (`apart`) and DEPTH_TO_SPACE: the place in the block is the outer part of the channel."""
    (batch, height, width, channels), block = v.image().shape, v.option("BlockSize")
    size = max(block, 1)
    if apart:
        parts = (batch, height // size, size, width // size, size, channels)
        result = (batch, height // size, width // size, size * size * channels)
    else:
        parts = (batch, height, width, block, block, channels // size**2)
        result = (batch, height * block, width * block, channels // size**2)
    return v.moved(Reshape(parts), Transpose((0, 1, 3, 2, 4, 5)), Reshape(result))


def _blocks(v: TfliteValues, what: str) -> tuple[TfliteTensor, Shape, list[Shape]]:
    """The operand, its blocks, and what is added or cut before and behind all axes."""
    x, blocks, sides = v.x, v.integers(1, "block shape"), v.integers(2, what)
    fits = len(sides) == 2 * len(blocks) and len(blocks) < x.rank
    odd = not fits or min(blocks, default=1) < 1 or min(sides, default=0) < 0
    v.wrong_if(odd, f"the blocks {list(blocks)} and {what} {list(sides)} do not fit {x}")
    rest = (0,) * (x.rank - 1 - len(blocks))
    return x, blocks, [(0, *sides[side::2], *rest) for side in (0, 1)]


def space_to_batch(v: TfliteValues) -> Value | None:
    """SPACE_TO_BATCH_ND: padded, then the place in the block becomes the outer part of the batch."""
    x, blocks, (before, after) = _blocks(v, "paddings")
    batch, *sizes = map(sum, zip(x.shape, before, after, strict=True))
    pairs, inner = list(zip(sizes, blocks, strict=False)), range(2 * len(blocks) + 1)
    apart = [part for size, block in pairs for part in (size // block, block)]
    rest = sizes[len(blocks) :]
    order = (*inner[2::2], 0, *inner[1::2], *range(len(inner), len(inner) + len(rest)))
    if any(before + after):
        v.tell_of_zero(x, "pads with 0 here in place of the zero point")
    moves = Reshape((batch, *apart, *rest)), Transpose(order), Reshape((batch * prod(blocks), *apart[::2], *rest))
    return v.moved(Pad(before, after, _border(v, x)), *moves)


def batch_to_space(v: TfliteValues) -> Value | None:
    """BATCH_TO_SPACE_ND: the inverse of SPACE_TO_BATCH_ND, then cut."""
    x, blocks, (start, end) = _blocks(v, "crops")
    count, batch = len(blocks), x.shape[0] // prod(blocks)
    order = [count, *(place for axis in range(count) for place in (count + 1 + axis, axis))]
    order += range(2 * count + 1, count + x.rank)
    inner = zip(x.shape[1:], (*blocks, *(1,) * x.rank), strict=False)
    whole = (batch, *(size * block for size, block in inner))
    kept = [range(first, size - last) for first, size, last in zip(start, whole, end, strict=True)]
    return v.moved(Reshape((*blocks, batch, *x.shape[1:])), Transpose(tuple(order)), Reshape(whole), slice_of(kept))


def nearest(v: TfliteValues) -> Value | None:
    """RESIZE_NEAREST_NEIGHBOR: places in float32, as TFLite's resize_nearest_neighbor.h finds them."""
    (batch, height, width, channels), results = v.image().shape, v.integers(1, "size")
    align, centred = v.option("AlignCorners"), v.option("HalfPixelCenters")
    v.expect_shape((batch, *results, channels))
    places: list[Sequence[int]] = []
    for size, result in zip((height, width), results, strict=True):
        corners = align and result > 1
        step = np.float32(size - corners) / np.float32(result - corners)
        at = (np.arange(result, dtype=np.float32) + np.float32(0.5 * centred)) * step
        taken = np.floor(at.astype(np.float64) + 0.5 * align)
        places.append(np.clip(taken, 0, size - 1).astype(np.int64).tolist())
    return _picked(v, [range(batch), *places, range(channels)])
