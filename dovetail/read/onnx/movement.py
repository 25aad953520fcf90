"""ONNX operators that move elements: borders, parts, gathering, repetition, blocks, resizing."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod

import numpy as np

from dovetail.ir.operators.elementwise import Select
from dovetail.ir.operators.movement import Concat, Gather, Pad, Pick, Resample, Reshape, Slice, Transpose
from dovetail.ir.types import Array, Shape
from dovetail.read.geometry import ResizeAxis, broadcast, mirrored, repeated
from dovetail.read.onnx.values import AGAIN, SMALLER, OnnxValues

_HALF_PIXEL = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
_COORDINATES = (*_HALF_PIXEL, "align_corners", "asymmetric", "tf_crop_and_resize")
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def flatten(v: OnnxValues) -> str:
    """Flatten to two axes."""
    x, axis = v.value(0), int(v.attribute("axis", 1))
    shape = v.shape(x)
    place = axis if axis == len(shape) else v.axis(axis, len(shape))
    return v.add(Reshape((prod(shape[:place]), prod(shape[place:]))), [x])


def reshape(v: OnnxValues) -> str:
    """Reshape: 0 keeps an axis (unless allowzero), one -1 takes what is left."""
    x = v.value(0)
    kind = v.type_of(x)
    wanted = list(v.integers(1, "new shape"))
    if not v.attribute("allowzero", 0):
        if any(size == 0 and axis >= len(kind.shape) for axis, size in enumerate(wanted)):
            raise v.refuse(f"the new shape {wanted} keeps an axis that {kind} does not have", AGAIN)
        wanted = [kind.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    if wanted.count(-1) > 1 or any(size < -1 or size == 0 for size in wanted):
        raise v.refuse(f"the new shape {wanted} is not a shape", AGAIN)
    if -1 in wanted:
        rest = prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = kind.elements // rest
    return v.add(Reshape(tuple(wanted)), [x])


def _axes(v: OnnxValues, rank: int) -> tuple[int, ...] | None:
    """The axes of Squeeze and Unsqueeze; None when absent."""
    listed = v.listed("axes", 1, "axes")
    return None if listed is None else tuple(v.axis(axis, rank) for axis in listed)


def squeeze(v: OnnxValues) -> str:
    """Squeeze the listed axes, or all of size 1."""
    x = v.value(0)
    shape = v.shape(x)
    listed = _axes(v, len(shape))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1) if listed is None else listed
    if any(shape[axis] != 1 for axis in axes):
        raise v.refuse(f"the axes {list(axes)} of {v.type_of(x)} are not all of size 1", AGAIN)
    return v.add(Reshape(tuple(size for axis, size in enumerate(shape) if axis not in axes)), [x])


def unsqueeze(v: OnnxValues) -> str:
    """New axes of size 1."""
    x = v.value(0)
    shape = v.shape(x)
    count = len(_axes(v, 1 << 20) or ())
    if count > 8:
        raise v.refuse(f"adds {count} axes; at most 8 are supported")
    axes = set(_axes(v, len(shape) + count) or ())
    if len(axes) != count:
        raise v.refuse("names an axis twice", AGAIN)
    sizes = iter(shape)
    return v.add(Reshape(tuple(1 if axis in axes else next(sizes) for axis in range(len(shape) + count))), [x])


def transpose(v: OnnxValues) -> str:
    """Transpose; without perm the axes are reversed."""
    x = v.value(0)
    return v.add(Transpose(tuple(v.attribute("perm", tuple(reversed(range(len(v.shape(x)))))))), [x])


def concat(v: OnnxValues) -> str:
    """Concat."""
    return v.add(Concat(v.axis_of(v.operands[0], 1)), v.operands)


def pad(v: OnnxValues) -> str:
    """Pad with a constant or with elements of the value itself; attributes before opset 11, operands since."""
    mode = v.attribute("mode", "constant")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise v.refuse(f"the attribute mode = {mode} is not supported")
    x = v.value(0)
    kind, old = v.type_of(x), v.attribute("pads", None) is not None
    rank = len(kind.shape)
    pads = v.op.attributes["pads"] if old else v.integers(1, "pads")
    filler = float(v.attribute("value", 0.0)) if old else v.one_number(2, 0.0, "border value")
    axes = v.integers(3, "axes") if v.has(3) else tuple(range(rank))
    if len(pads) != 2 * len(axes) or (mode == "constant" and any(size < 0 for size in pads)):
        raise v.refuse(f"the pads {list(pads)} must be two numbers of at least 0 for each of {len(axes)} axes", AGAIN)
    before, after = [0] * rank, [0] * rank
    for place, axis in enumerate(axes):
        target = v.axis(axis, rank)
        before[target], after[target] = pads[place], pads[place + len(axes)]
    if mode != "constant":
        return v.pick(x, [mirrored(*sides, mode) for sides in zip(kind.shape, before, after, strict=True)])
    if kind.dtype.is_integer and not kind.dtype.low <= filler <= kind.dtype.high:
        raise v.refuse(f"the border value {filler} is outside {kind.dtype.text}", AGAIN)
    return v.add(Pad(tuple(before), tuple(after), int(filler) if kind.dtype.is_integer else filler), [x])


def slice_(v: OnnxValues) -> str:
    """Slice with constant bounds; attributes before opset 10, operands since."""
    x = v.value(0)
    shape = v.shape(x)
    starts, stops, axes, steps = _slice_bounds(v)
    if not len(starts) == len(stops) == len(axes) == len(steps) or 0 in steps:
        raise v.refuse(f"starts, ends, axes and steps must agree in number; the steps are {list(steps)}, not 0", AGAIN)
    bounds = zip(starts, stops, steps, strict=True)
    if min(steps, default=1) < 0:
        return _reversed_slice(v, x, {v.axis(a, len(shape)): b for a, b in zip(axes, bounds, strict=True)})
    begin, end, stride = [0] * len(shape), list(shape), [1] * len(shape)
    for axis, (start, stop, step) in zip(axes, bounds, strict=True):
        place = v.axis(axis, len(shape))
        size = shape[place]
        begin[place] = min(max(start + size if start < 0 else start, 0), size)
        end[place] = min(max(stop + size if stop < 0 else stop, 0), size)
        stride[place] = step
    if any(a >= b for a, b in zip(begin, end, strict=True)):
        raise v.refuse(f"the slice {begin} to {end} of {v.type_of(x)} is empty", AGAIN)
    return v.add(Slice(tuple(begin), tuple(end), tuple(stride)), [x])


def _slice_bounds(v: OnnxValues) -> tuple[Shape, Shape, Shape, Shape]:
    """starts, ends, axes and steps as the model gives them."""
    listed = v.attribute("starts", None)
    if listed is not None:
        starts, stops = tuple(listed), tuple(v.attribute("ends", ()))
        return starts, stops, tuple(v.attribute("axes", tuple(range(len(starts))))), (1,) * len(starts)
    starts, stops = v.integers(1, "starts"), v.integers(2, "ends")
    axes = v.integers(3, "axes") if v.has(3) else tuple(range(len(starts)))
    return starts, stops, axes, v.integers(4, "steps") if v.has(4) else (1,) * len(starts)


def _reversed_slice(v: OnnxValues, x: str, ranges: dict[int, tuple[int, int, int]]) -> str:
    """Slice where some axis runs backwards: numpy's meaning of (start, stop, step) per axis."""
    shape = v.shape(x)
    places = [range(size) for size in shape]
    for axis, (start, stop, step) in ranges.items():
        whole = step < 0 and stop < -shape[axis]
        places[axis] = places[axis][slice(start, None if whole else stop, step)]
    if not all(places):
        raise v.refuse(f"the slice of {v.type_of(x)} is empty", AGAIN)
    return v.pick(x, places)


def expand(v: OnnxValues) -> str:
    """Expand: broadcasting to a constant shape."""
    x = v.value(0)
    wanted = v.integers(1, "shape")
    try:
        result = tuple(int(size) for size in np.broadcast_shapes(v.shape(x), wanted))
    except ValueError:
        raise v.refuse(f"{v.type_of(x)} cannot be expanded to {list(wanted)}", AGAIN) from None
    v.check_places(max(result, default=0))
    whole, places = broadcast(v.shape(x), result)
    return v.pick(v.reshape(x, whole.shape, "whole"), places.places)


def tile(v: OnnxValues) -> str:
    """Tile by constant repeats."""
    x, repeats = v.value(0), v.integers(1, "repeats")
    if len(repeats) != len(v.shape(x)) or min(repeats, default=1) < 1:
        raise v.refuse(f"the repeats {list(repeats)} must be a positive number for each axis of {v.type_of(x)}", AGAIN)
    return v.pick(x, repeated(v.shape(x), repeats))


def gather(v: OnnxValues) -> str:
    """Gather by constant or computed indices."""
    x, name = v.value(0), v.name_of(1)
    shape, axis = v.shape(x), v.axis_of(x, 0)
    if name not in v.constants:
        return v.add(Gather(axis), [x, v.value(1)])
    indices = v.constants[name].array
    flat = [int(index) for index in indices.reshape(-1)]
    size = shape[axis]
    if any(not -size <= index < size for index in flat):
        raise v.refuse(f"an index is outside the {size} elements of axis {axis}", AGAIN)
    places: list[Sequence[int]] = [range(length) for length in shape]
    places[axis] = [index % size for index in flat]
    taken = v.add(Pick(tuple(map(tuple, places))), [x], "taken")
    return v.add(Reshape((*shape[:axis], *indices.shape, *shape[axis + 1 :])), [taken])


def split(v: OnnxValues) -> None:
    """Split into parts of given or of equal sizes; the last equal part may be smaller."""
    x = v.value(0)
    axis = v.axis_of(x, 0)
    size, count = v.shape(x)[axis], int(v.attribute("num_outputs", len(v.op.outputs)))
    listed = v.listed("split", 1, "sizes of the parts")
    if listed is None:
        each = -(-size // count)
        listed = tuple(min(each, size - part * each) for part in range(count))
    if len(listed) != len(v.op.outputs) or sum(listed) != size or min(listed) < 1:
        raise v.refuse(f"the parts {list(listed)} do not make up the {size} elements of axis {axis}", AGAIN)
    start = 0
    for length, result in zip(listed, v.op.outputs, strict=True):
        if result:
            v.values[result] = v.part(x, axis, start, start + length, name=result)
        start += length


def _blocks(v: OnnxValues) -> tuple[str, Shape, int, bool]:
    """Operand, its NCHW shape, the block size of DepthToSpace and SpaceToDepth, and whether the place in the block is
    the outer part of the channel."""
    x, size = v.value(0), int(v.attribute("blocksize", 0))
    if len(v.shape(x)) != 4 or size < 1:
        raise v.refuse(f"works on 4 axes and a positive block size, got {v.type_of(x)} and {size}")
    return x, v.shape(x), size, v.choice("mode", "DCR", "DCR", "CRD") == "DCR"


def depth_to_space(v: OnnxValues) -> str:
    """DepthToSpace in both modes."""
    x, (batch, channels, height, width), size, outer = _blocks(v)
    depth = channels // size**2
    parts = (size, size, depth) if outer else (depth, size, size)
    order = (0, 3, 4, 1, 5, 2) if outer else (0, 1, 4, 2, 5, 3)
    moved = v.add(Transpose(order), [v.add(Reshape((batch, *parts, height, width)), [x], "parts")], "moved")
    return v.add(Reshape((batch, depth, height * size, width * size)), [moved])


def space_to_depth(v: OnnxValues) -> str:
    """SpaceToDepth in both modes."""
    x, (batch, channels, height, width), size, outer = _blocks(v)
    rows, columns = height // size, width // size
    order = (0, 3, 5, 1, 2, 4) if outer else (0, 1, 3, 5, 2, 4)
    apart = v.add(Reshape((batch, channels, rows, size, columns, size)), [x], "parts")
    return v.add(Reshape((batch, channels * size**2, rows, columns)), [v.add(Transpose(order), [apart], "moved")])


def _resized(v: OnnxValues, shape: Shape) -> list[ResizeAxis]:
    """Resize's effect on each axis, from the operands scales or sizes (opset 10: only scales, operand 1)."""
    mode = v.attribute("coordinate_transformation_mode", "half_pixel" if v.opset > 10 else "asymmetric")
    if mode not in _COORDINATES:
        known = ", ".join(_COORDINATES)
        raise v.refuse(f"coordinate_transformation_mode = {mode} is not supported, only {known}")
    axes = [v.axis(axis, len(shape)) for axis in v.attribute("axes", tuple(range(len(shape))))]
    result, scales = list(shape), [1.0] * len(shape)
    policy = v.attribute("keep_aspect_ratio_policy", "stretch")
    if v.has(3) and v.constant_operand(3, "sizes").array.size:
        sizes = list(v.integers(3, "sizes"))
        ratios = [size / shape[axis] for size, axis in zip(sizes, axes, strict=True)]
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [ratio] * len(axes)
            sizes = [floor(ratio * shape[axis] + 0.5) for axis in axes]
        for size, ratio, axis in zip(sizes, ratios, axes, strict=True):
            result[axis], scales[axis] = size, ratio
    else:
        array = v.constant_operand(1 if v.opset == 10 else 2, "scales").array.reshape(-1)
        for scale, axis in zip(array.astype(np.float64), axes, strict=True):
            result[axis], scales[axis] = floor(shape[axis] * scale), float(scale)
    if min(result, default=1) < 1 or prod(result) >= 1 << 31:
        raise v.refuse(f"the result {result} has no elements, or too many", SMALLER)
    regions = [(0.0, 1.0)] * len(shape)
    if mode == "tf_crop_and_resize":
        region = v.constant_operand(1, "region").array.astype(np.float64)
        if region.size != 2 * len(axes) or not np.isfinite(region).all():
            what = f"the region has {region.size} numbers"
            raise v.refuse(f"{what}; it must have a start and an end for each axis", AGAIN)
        for axis, start, end in zip(axes, *region.reshape(2, -1).tolist(), strict=True):
            regions[axis] = (start, end)
    return [ResizeAxis(n, r, s, mode, span) for n, r, s, span in zip(shape, result, scales, regions, strict=True)]


def resize(v: OnnxValues) -> str:
    """Resize: nearest elements, or weighted sums along one axis after the other; roi is read by tf_crop_and_resize."""
    x = v.value(0)
    axes = _resized(v, v.shape(x))
    mode = v.attribute("mode", "nearest")
    rounding = v.attribute("nearest_mode", "round_prefer_floor" if v.opset > 10 else "floor")
    coefficient = float(v.attribute("cubic_coeff_a", -0.75))
    exclude, antialias = bool(v.attribute("exclude_outside", 0)), bool(v.attribute("antialias", 0))
    beyond = float(v.attribute("extrapolation_value", 0.0))
    outside = _outside(axes)
    if mode == "nearest" and outside is None and rounding in _NEAREST and not antialias:
        return v.pick(x, [axis.nearest(rounding) for axis in axes])
    if mode not in ("linear", "cubic"):
        raise v.refuse(f"mode = {mode}, nearest_mode = {rounding}, antialias = {int(antialias)} is not supported")
    moving, operands = [n for n, axis in enumerate(axes) if not axis.still], [x]
    for place in moving:
        places, weights = axes[place].taps(mode == "cubic", coefficient, exclude, antialias)
        operands += [v.constant(places, "places"), v.constant(weights, "weights")]
    value = v.add(Resample(tuple(moving)), operands, "resampled") if moving else x
    if outside is None:
        return value
    return v.add(Select(), [v.constant(outside, "outside"), v.number(beyond), value], "bordered")


def _outside(axes: list[ResizeAxis]) -> Array | None:
    """Mask of the result's elements of tf_crop_and_resize that lie beyond the operand, bool; None if there are none."""
    if axes and axes[0].mode != "tf_crop_and_resize":
        return None
    parts = [(axis.coordinates() < 0) | (axis.coordinates() > axis.size - 1) for axis in axes]
    whole = np.zeros([axis.result for axis in axes], np.bool_)
    for place, part in enumerate(parts):
        whole |= part.reshape([-1 if place == other else 1 for other in range(len(axes))])
    return whole if whole.any() else None
