"""TFLite operators that move elements: they act on the stored integers and must keep the quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod

import numpy as np

from dovetail.ir.operators.movement import Concat, Gather, Pad, Pick, Reshape, Slice, Transpose
from dovetail.ir.types import Shape, TensorType
from dovetail.read.geometry import broadcast, mirrored, repeated
from dovetail.read.tflite.file import AGAIN, ALIKE, TfliteTensor
from dovetail.read.tflite.values import SHAPE_TYPES, TfliteValues, same_quantisation

COPIES = "copies elements, but the quantisation of"


def pack(v: TfliteValues) -> str | None:
    """PACK: operands along a new axis; of known integers now, which is how converters put a shape together."""
    parts = v.inputs
    axis = v.axis(int(v.options("PackOptions")["Axis"]), len(parts[0].shape) + 1)
    arrays = [array for array in map(v.known_of, parts) if array is not None]
    if len(arrays) == len(parts) and parts[0].dtype in SHAPE_TYPES:
        v.bind_known(np.stack(arrays, axis))
        return None
    if not all(same_quantisation(part, v.output) for part in parts):
        raise v.refuse("copies elements, but the quantisations of its operands and its result differ", ALIKE)
    shape = (*parts[0].shape[:axis], 1, *parts[0].shape[axis:])
    return v.add(Concat(axis), [v.add(Reshape(shape), [v.value(part)], "part") for part in parts])


def reshape(v: TfliteValues) -> str | None:
    """RESHAPE: the new shape is operand 1, or an option in old files; it must agree with the declared result."""
    x, result = v.input(0), v.output
    wanted = v.integers(1, "new shape") if v.has(1) else tuple(v.options("ReshapeOptions")["NewShape"])
    fits = len(wanted) == len(result.shape) and sum(size == -1 for size in wanted) <= 1
    if not fits or any(a not in (-1, b) for a, b in zip(wanted, result.shape, strict=True)):
        raise v.refuse(f"the new shape {list(wanted)} of {x} does not give the declared {result}", AGAIN)
    return v.moved(Reshape(result.shape))


def squeeze(v: TfliteValues) -> str | None:
    """SQUEEZE: drops the listed axes of size 1, or all of them."""
    x = v.input(0)
    listed = {v.axis(axis, len(x.shape)) for axis in v.options("SqueezeOptions")["SqueezeDims"]}
    dropped = listed or {axis for axis, size in enumerate(x.shape) if size == 1}
    if any(x.shape[axis] != 1 for axis in dropped):
        raise v.refuse(f"the axes {sorted(dropped)} of {x} are not all of size 1", AGAIN)
    return v.moved(Reshape(tuple(size for axis, size in enumerate(x.shape) if axis not in dropped)))


def expand_dims(v: TfliteValues) -> str | None:
    """EXPAND_DIMS: a new axis of size 1."""
    shape, (axis,) = v.input(0).shape, v.integers(1, "axis", 1)
    place = v.axis(axis, len(shape) + 1)
    return v.moved(Reshape((*shape[:place], 1, *shape[place:])))


def transpose(v: TfliteValues) -> str | None:
    """TRANSPOSE."""
    order, rank = v.integers(1, "permutation"), len(v.input(0).shape)
    return v.moved(Transpose(tuple(v.axis(axis, rank) for axis in order)))


def pad(v: TfliteValues) -> str | None:
    """PAD and PADV2: the border is 0 (the zero point of a quantised tensor) or operand 2, quantised as the result."""
    x, pads = v.input(0), v.integers(1, "paddings")
    if len(pads) != 2 * len(x.shape) or min(pads, default=0) < 0:
        raise v.refuse(f"the paddings {list(pads)} do not fit {x}", AGAIN)
    return v.moved(Pad(pads[0::2], pads[1::2], _border(v, x, v.optional(2))))


def _border(v: TfliteValues, x: TfliteTensor, value: TfliteTensor | None) -> float:
    """The element a padding of x writes, as stored: `value`, or 0."""
    if value is None:
        return int(x.quantisation.zero_point[0]) if x.quantisation else 0
    array = v.array(value, "border value")
    if value.dtype is not x.dtype or array.size != 1 or not same_quantisation(value, x):
        raise v.refuse(f"the border value {value} must be one element quantised as {x}", ALIKE)
    element = array.reshape(-1)[0]
    return int(element) if x.dtype.is_integer else float(element)


def concatenation(v: TfliteValues) -> str:
    """CONCATENATION: of the integers where all are quantised alike, else in float."""
    options, result, parts = v.options("ConcatenationOptions"), v.output, v.inputs
    if not parts or any(len(part.shape) != len(result.shape) for part in parts):
        raise v.refuse(f"the operands do not have the axes of the result {result}", AGAIN)
    v.same_type(result, *parts)
    operator = Concat(v.axis(int(options["Axis"]), len(result.shape)))
    if v.activation == 0 and all(same_quantisation(part, result) for part in parts):
        return v.add(operator, [v.value(part) for part in parts])
    return v.finish(operator, [v.real(part) for part in parts], v.activation)


def slice_(v: TfliteValues) -> str | None:
    """SLICE: begin and size per axis, size -1 to the end."""
    shape = v.input(0).shape
    begin, size = v.integers(1, "begin", len(shape)), v.integers(2, "size", len(shape))
    stop = tuple(whole if s == -1 else b + s for b, s, whole in zip(begin, size, shape, strict=True))
    return v.moved(Slice(begin, stop, (1,) * len(begin)))


def strided_slice(v: TfliteValues) -> str | None:
    """STRIDED_SLICE with constant steps and all its masks (their meaning is that of strided_slice.cc and
    kernels/internal/strided_slice_logic.h); axes behind those that are named are taken whole."""
    options = v.options("StridedSliceOptions")
    if options["Offset"]:
        raise v.refuse(f"the option Offset = {options['Offset']} is not supported")
    x = v.input(0)
    begin, end, step = (v.integers(at, what) for at, what in ((1, "begin"), (2, "end"), (3, "strides")))
    if 0 in step or not len(begin) == len(end) == len(step):
        raise v.refuse(f"the strides {list(step)} must not be 0, and as many as {list(begin)} and {list(end)}", AGAIN)
    masked = {name: int(options[f"{name}Mask"]) for name in ("Ellipsis", "NewAxis", "ShrinkAxis", "Begin", "End")}

    def chosen(name: str, at: int) -> bool:
        return bool(masked[name] >> at & 1)

    added = sum(chosen("NewAxis", at) and not chosen("Ellipsis", at) for at in range(len(begin)))
    skipped = len(x.shape) - (len(begin) - added - any(chosen("Ellipsis", at) for at in range(len(begin))))
    if skipped < 0 or masked["Ellipsis"] & (masked["Ellipsis"] - 1):
        raise v.refuse(f"{len(begin)} parts do not fit the axes of {x}", AGAIN)
    places: list[range] = []
    shape: list[int] = []
    for at in range(len(begin)):
        if chosen("Ellipsis", at):
            whole = x.shape[len(places) : len(places) + skipped]
            places += map(range, whole)
            shape += whole
        elif chosen("NewAxis", at):
            shape.append(1)
        else:
            size, start = x.shape[len(places)], None if chosen("Begin", at) else begin[at]
            if chosen("ShrinkAxis", at):
                places.append(range(size)[start or 0 : None if start == -1 else (start or 0) + 1])
            else:
                places.append(range(size)[start : None if chosen("End", at) else end[at] : step[at]])
                shape.append(len(places[-1]))
    rest = x.shape[len(places) :]
    places, shape = [*places, *map(range, rest)], [*shape, *rest]
    if not all(places):
        raise v.refuse(f"the slice of {x} has no elements", AGAIN)
    operator: Slice | Pick = Pick(tuple(map(tuple, places)))
    if all(one.step > 0 for one in places):
        steps = tuple(1 if len(one) == 1 else one.step for one in places)
        operator = Slice(tuple(one[0] for one in places), tuple(one[-1] + 1 for one in places), steps)
    part = operator.infer([TensorType(x.shape, x.dtype)]).shape
    return v.moved(operator, *([Reshape(tuple(shape))] if tuple(shape) != part else []))


def _cut(v: TfliteValues, x: TfliteTensor, axis: int, sizes: Sequence[int], drop: bool) -> None:
    """The operator's results: parts of x along an axis, which they lose where `drop` says so."""
    results = v.results(len(sizes))
    if sum(sizes) != x.shape[axis] or min(sizes) < 1:
        raise v.refuse(f"the parts {list(sizes)} do not make up axis {axis} of {x}", AGAIN)
    start = 0
    for size, result in zip(sizes, results, strict=True):
        v.keeps(x, result, what=COPIES)
        name = f"{result.name}_part" if drop else result.name
        value = v.part(v.value(x), axis, start, start + size, name=name)
        if drop:
            value = v.add(Reshape((*x.shape[:axis], *x.shape[axis + 1 :])), [value], name=result.name)
        v.bind(value, result)
        start += size


def split(v: TfliteValues) -> None:
    """SPLIT into equal parts; the axis comes first."""
    x, count = v.input(1), int(v.options("SplitOptions")["NumSplits"])
    axis = v.axis(v.integers(0, "axis")[0], len(x.shape))
    if count != len(v.op.outputs):
        raise v.refuse(f"the option NumSplits is {count}, there are {len(v.op.outputs)} results", AGAIN)
    _cut(v, x, axis, [x.shape[axis] // max(count, 1)] * count, drop=False)


def split_v(v: TfliteValues) -> None:
    """SPLIT_V into parts of given sizes, one of which may be -1: what is left."""
    x, sizes = v.input(0), list(v.integers(1, "sizes"))
    axis = v.axis(v.integers(2, "axis")[0], len(x.shape))
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = x.shape[axis] - sum(sizes) - 1
    _cut(v, x, axis, sizes, drop=False)


def unpack(v: TfliteValues) -> None:
    """UNPACK: the slices along an axis, which they lose."""
    x = v.input(0)
    axis, count = v.axis(int(v.options("UnpackOptions")["Axis"]), len(x.shape)), len(v.op.outputs)
    if x.shape[axis] != count:
        raise v.refuse(f"axis {axis} of {x} has not as many elements as there are results ({count})", AGAIN)
    _cut(v, x, axis, [1] * x.shape[axis], drop=True)


def gather(v: TfliteValues) -> str | None:
    """GATHER along an axis, by constant or computed indices."""
    options, x = v.options("GatherOptions"), v.input(0)
    axis = v.axis(int(options["Axis"]), len(x.shape))
    if options["BatchDims"]:
        raise v.refuse(f"the option BatchDims = {options['BatchDims']} is not supported, only 0")
    return _gathered(v, x, v.input(1), axis)


def _gathered(v: TfliteValues, x: TfliteTensor, indices: TfliteTensor, axis: int) -> str | None:
    known, places = v.known_of(x), v.known_of(indices)
    if known is not None and places is not None and x.dtype in SHAPE_TYPES:
        v.bind_known(np.take(known, places, axis))
        return None
    v.keeps(x, v.output, what=COPIES)
    return v.add(Gather(axis), [v.value(x), v.value(indices)])


def embedding_lookup(v: TfliteValues) -> str | None:
    """EMBEDDING_LOOKUP: rows of a table, the indices come first; of integers their float meaning where wanted so."""
    indices, x = v.input(0), v.input(1)
    if x.dtype is v.output.dtype:
        return _gathered(v, x, indices, 0)
    return v.finish(Gather(0), [v.real(x), v.value(indices)])


def gather_nd(v: TfliteValues) -> str | None:
    """GATHER_ND by constant indices, or by computed ones along the first axis."""
    x, indices = v.input(0), v.input(1)
    depth, places = indices.shape[-1], v.known_of(indices)
    if depth > len(x.shape):
        raise v.refuse(f"the indices {indices} have more places than {x} axes", AGAIN)
    rest = x.shape[depth:]
    if places is None:
        if depth != 1:
            raise v.refuse(f"computed indices {indices} over several axes are not supported")
        return v.add(Gather(0), [v.value(x), v.add(Reshape(indices.shape[:-1]), [v.value(indices)], "rows")])
    strides = np.array([prod(x.shape[axis + 1 : depth]) for axis in range(depth)], np.int64)
    flat = (places.reshape(-1, depth).astype(np.int64) * strides).sum(axis=1)
    whole = (prod(x.shape[:depth]), prod(rest))
    rows = Pick((tuple(flat.tolist()), tuple(range(whole[1]))))
    return v.moved(Reshape(whole), rows, Reshape((*indices.shape[:-1], *rest)))


def _picked(v: TfliteValues, places: Sequence[Sequence[int]]) -> str | None:
    return v.moved(Pick(tuple(tuple(int(place) for place in chosen) for chosen in places)))


def mirror_pad(v: TfliteValues) -> str | None:
    """MIRROR_PAD: the border repeats the edge (SYMMETRIC) or not (REFLECT)."""
    x, pads = v.input(0), v.integers(1, "paddings")
    symmetric = int(v.options("MirrorPadOptions")["Mode"]) == 1
    sides = list(zip(x.shape, pads[::2], pads[1::2], strict=True))
    v.expect_shape([sum(side) for side in sides])
    for size, before, after in sides:
        if max(before, after) > size - (not symmetric) or min(before, after) < 0:
            raise v.refuse(f"a border of {max(before, after)} cannot mirror {size} elements", AGAIN)
    return _picked(v, [mirrored(*side, "symmetric" if symmetric else "reflect") for side in sides])


def tile(v: TfliteValues) -> str | None:
    """TILE."""
    x, counts = v.input(0), v.integers(1, "multiples")
    if len(counts) != len(x.shape) or min(counts, default=1) < 1:
        raise v.refuse(f"the multiples {list(counts)} must be a positive number for each axis of {x}", AGAIN)
    v.expect_shape([size * count for size, count in zip(x.shape, counts, strict=True)])
    return _picked(v, repeated(x.shape, counts))


def broadcast_to(v: TfliteValues) -> str | None:
    """BROADCAST_TO, and FILL, whose value has no axes."""
    place = 1 if v.op.opcode == "FILL" else 0
    x, shape = v.input(place), v.integers(1 - place, "shape")
    v.expect_shape(shape)
    whole = (1,) * (len(shape) - len(x.shape)) + x.shape
    if len(whole) != len(shape) or any(have not in (1, size) for have, size in zip(whole, shape, strict=True)):
        raise v.refuse(f"{x} cannot be broadcast to {list(shape)}", AGAIN)
    known = v.known_of(x)
    if known is not None and x.dtype not in SHAPE_TYPES:
        return v.builder.constant(v.stem, np.ascontiguousarray(np.broadcast_to(known, shape)), x.dtype)
    return v.moved(*broadcast(x.shape, shape), position=place)


def zeros_like(v: TfliteValues) -> str:
    """ZEROS_LIKE: zeros as stored."""
    result = v.output
    return v.builder.constant(result.name, np.zeros(result.shape, result.dtype.numpy), result.dtype)


def reverse(v: TfliteValues) -> str | None:
    """REVERSE_V2 along some axes."""
    x = v.input(0)
    axes = {v.axis(axis, len(x.shape)) for axis in v.integers(1, "axes")}
    return _picked(v, [range(size)[:: -1 if axis in axes else 1] for axis, size in enumerate(x.shape)])


def depth_to_space(v: TfliteValues) -> str | None:
    """DEPTH_TO_SPACE: the place in the block is the outer part of the channel."""
    batch, height, width, channels = v.image().shape
    size = int(v.options("DepthToSpaceOptions")["BlockSize"])
    depth = channels // max(size, 1) ** 2
    apart, whole = (batch, height, width, size, size, depth), (batch, height * size, width * size, depth)
    return v.moved(Reshape(apart), Transpose((0, 1, 3, 2, 4, 5)), Reshape(whole))


def space_to_depth(v: TfliteValues) -> str | None:
    """SPACE_TO_DEPTH: the inverse of DEPTH_TO_SPACE."""
    batch, height, width, channels = v.image().shape
    size = max(int(v.options("SpaceToDepthOptions")["BlockSize"]), 1)
    rows, columns = height // size, width // size
    apart, whole = (batch, rows, size, columns, size, channels), (batch, rows, columns, size * size * channels)
    return v.moved(Reshape(apart), Transpose((0, 1, 3, 2, 4, 5)), Reshape(whole))


def _blocks(v: TfliteValues, what: str) -> tuple[TfliteTensor, Shape, Shape]:
    """The operand, its blocks, and what is added or cut on both sides of each axis that has blocks."""
    x, blocks, sides = v.input(0), v.integers(1, "block shape"), v.integers(2, what)
    fits = len(sides) == 2 * len(blocks) and len(blocks) < len(x.shape)
    if not fits or min(blocks, default=1) < 1 or min(sides, default=0) < 0:
        raise v.refuse(f"the blocks {list(blocks)} and {what} {list(sides)} do not fit {x}", AGAIN)
    return x, blocks, sides


def space_to_batch(v: TfliteValues) -> str | None:
    """SPACE_TO_BATCH_ND: padded, then the place in the block becomes the outer part of the batch."""
    x, blocks, pads = _blocks(v, "paddings")
    count, rest = len(blocks), len(x.shape) - 1 - len(blocks)
    before, after = (0, *pads[::2], *(0,) * rest), (0, *pads[1::2], *(0,) * rest)
    sizes = [sum(sides) for sides in zip(x.shape, before, after, strict=True)][1:]
    if any(size % block for size, block in zip(sizes, blocks, strict=False)):
        raise v.refuse(f"the padded sizes {sizes} do not divide into blocks {list(blocks)}", AGAIN)
    apart = [part for size, block in zip(sizes, blocks, strict=False) for part in (size // block, block)]
    order = (*range(2, 2 * count + 1, 2), 0, *range(1, 2 * count, 2), *range(2 * count + 1, 2 * count + 1 + rest))
    whole = (x.shape[0] * prod(blocks), *apart[::2], *sizes[count:])
    moves = Reshape((x.shape[0], *apart, *sizes[count:])), Transpose(order), Reshape(whole)
    return v.moved(Pad(before, after, _border(v, x, None)), *moves)


def batch_to_space(v: TfliteValues) -> str | None:
    """BATCH_TO_SPACE_ND: the inverse of SPACE_TO_BATCH_ND, then cut."""
    x, blocks, crops = _blocks(v, "crops")
    count = len(blocks)
    batch, rest = x.shape[0] // prod(blocks), x.shape[1 + count :]
    order = [count, *(place for axis in range(count) for place in (count + 1 + axis, axis))]
    order += range(2 * count + 1, 2 * count + 1 + len(rest))
    sizes = [size * block for size, block in zip(x.shape[1 : 1 + count], blocks, strict=True)]
    start = (0, *crops[::2], *(0,) * len(rest))
    stop = (batch, *(size - crop for size, crop in zip(sizes, crops[1::2], strict=True)), *rest)
    apart, whole = Reshape((*blocks, batch, *x.shape[1:])), Reshape((batch, *sizes, *rest))
    return v.moved(apart, Transpose(tuple(order)), whole, Slice(start, stop, (1,) * len(start)))


def nearest(v: TfliteValues) -> str | None:
    """RESIZE_NEAREST_NEIGHBOR: places in float32, as TFLite's resize_nearest_neighbor.h finds them."""
    shape, options = v.image().shape, v.options("ResizeNearestNeighborOptions")
    align, centred = bool(options["AlignCorners"]), bool(options["HalfPixelCenters"])
    results, places = v.integers(1, "size"), []
    v.expect_shape((shape[0], *results, shape[3]))
    for size, result in zip(shape[1:3], results, strict=True):
        corners = align and result > 1
        scale = np.float32(size - 1) / np.float32(result - 1) if corners else np.float32(size) / np.float32(result)
        along = [np.float32(np.float32(place + (0.5 if centred else 0.0)) * scale) for place in range(result)]
        taken = [floor(float(place) + 0.5) if align else floor(float(place)) for place in along]
        places.append([min(max(place, 0), size - 1) for place in taken])
    return _picked(v, [range(shape[0]), *places, range(shape[3])])
