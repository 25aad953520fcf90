"""ONNX operators that move elements: borders, parts, gathering, repetition, blocks, resizing."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod

import numpy as np

from dovetail.ir.operators.base import broadcast_shape
from dovetail.ir.operators.elementwise import Select
from dovetail.ir.operators.movement import Gather, Pick
from dovetail.ir.types import Array, Shape, TensorType
from dovetail.read.geometry import ResizeAxis, broadcast, mirrored, repeated
from dovetail.read.onnx.values import OnnxValues
from dovetail.read.values import SMALLER, Value, kept_shape, slice_of, words

_COORDINATES = words("half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric tf_crop_and_resize")
_NEAREST = words("round_prefer_floor round_prefer_ceil floor ceil")


def flatten(v: OnnxValues) -> Value:
    """Flatten to two axes."""
    x, axis = v.x, v.attribute("axis", 1)
    shape = x.shape
    place = axis if axis == len(shape) else v.axis(axis, len(shape))
    return v.reshape(x, (prod(shape[:place]), prod(shape[place:])))


def reshape(v: OnnxValues) -> Value:
    """Reshape: 0 keeps an axis (unless allowzero), one -1 takes what is left."""
    x = v.x
    shape, wanted = x.shape, list(v.integers(1, "new shape"))
    if not v.attribute("allowzero", False):
        v.wrong_if(0 in wanted[len(shape) :], f"the new shape {wanted} keeps an axis that {x.type} does not have")
        wanted = [shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    return v.reshape(x, v.full_shape(wanted, x.elements))


def squeeze(v: OnnxValues) -> Value:
    """Squeeze the listed axes, or all of size 1."""
    x = v.x
    shape = x.shape
    ones = tuple(axis for axis, size in enumerate(shape) if size == 1)
    axes = [v.axis(axis, len(shape)) for axis in v.integers(1, "axes", ones, "axes")]
    return v.reshape(x, kept_shape(shape, axes, False))


def unsqueeze(v: OnnxValues) -> Value:
    """New axes of size 1."""
    x, listed = v.x, v.integers(1, "axes", (), "axes")
    v.refuse_if(len(listed) > 8, f"adds {len(listed)} axes; at most 8 are supported")
    rank = x.rank + len(listed)
    axes = v.axes(listed, rank)
    v.wrong_if(len(axes) != len(listed), "names an axis twice")
    sizes = iter(x.shape)
    return v.reshape(x, [1 if axis in axes else next(sizes) for axis in range(rank)])


def pad(v: OnnxValues) -> Value:
    """Pad with a constant or with elements of the value itself; attributes before opset 11, operands since."""
    mode, x = v.attribute("mode", "constant"), v.x
    v.refuse_if(mode not in ("constant", "edge", "reflect", "wrap"), f"the attribute mode = {mode} is not supported")
    kind, rank = x.dtype, x.rank
    pads, axes = v.integers(1, "pads", old="pads"), v.integers(3, "axes", tuple(range(rank)))
    filler = v.one_number(2, v.attribute("value", 0.0), "border value")
    v.wrong_if(len(pads) != 2 * len(axes), f"the pads {list(pads)} must be two numbers for each of {len(axes)} axes")
    places = [v.axis(axis, rank) for axis in axes]
    ends = (dict(zip(places, half, strict=True)) for half in (pads[: len(axes)], pads[len(axes) :]))
    before, after = (tuple(sizes.get(axis, 0) for axis in range(rank)) for sizes in ends)
    if mode != "constant":
        return v.pick(x, [mirrored(*sides, mode) for sides in zip(x.shape, before, after, strict=True)])
    outside = kind.is_integer and not kind.low <= filler <= kind.high
    v.wrong_if(outside, f"the border value {filler} is outside {kind.text}")
    return v.surrounded(x, before, after, int(filler) if kind.is_integer else filler)


def slice_(v: OnnxValues) -> Value:
    """Slice with constant bounds; attributes before opset 10, operands since."""
    x = v.x
    starts, stops = v.integers(1, "starts", old="starts"), v.integers(2, "ends", old="ends")
    axes = v.integers(3, "axes", tuple(range(len(starts))), "axes")
    steps = v.integers(4, "steps", (1,) * len(starts))
    odd = not len(starts) == len(stops) == len(axes) == len(steps) or 0 in steps
    v.wrong_if(odd, f"starts, ends, axes and steps must agree in number; the steps are {list(steps)}, not 0")
    places = [*map(range, x.shape)]
    for axis, *bounds in zip(axes, starts, stops, steps, strict=True):
        place = v.axis(axis, len(places))
        places[place] = range(x.shape[place])[slice(*bounds)]
    v.refuse_if(not all(places), f"the slice {list(starts)} to {list(stops)} of {x.type} is empty")
    return v.pick(x, places) if min(steps, default=1) < 0 else v.add(slice_of(places), [x])


def expand(v: OnnxValues) -> Value:
    """Expand: broadcasting to a constant shape."""
    x = v.x
    result = broadcast_shape([x.type, TensorType(v.integers(1, "shape"), x.dtype)])
    v.check_places(max(result, default=0))
    whole, places = broadcast(x.shape, result)
    return v.pick(v.shaped(x, whole.shape, "whole"), places.places)


def tile(v: OnnxValues) -> Value:
    """Tile by constant repeats."""
    x, repeats = v.x, v.integers(1, "repeats")
    odd = len(repeats) != x.rank or min(repeats, default=1) < 1
    v.wrong_if(odd, f"the repeats {list(repeats)} must be a positive number for each axis of {x.type}")
    return v.pick(x, repeated(x.shape, repeats))


def gather(v: OnnxValues) -> Value:
    """Gather by constant or computed indices."""
    x, name = v.x, v.name_of(1)
    shape, axis = x.shape, v.axis_of(x, 0)
    if name not in v.constants:
        return v.add(Gather(axis), [x, v.value(1)])
    indices, size = v.constants[name].array, shape[axis]
    flat = [int(index) for index in indices.reshape(-1)]
    odd = any(not -size <= index < size for index in flat)
    v.wrong_if(odd, f"an index is outside the {size} elements of axis {axis}")
    places: list[Sequence[int]] = [*map(range, shape)]
    places[axis] = [index % size for index in flat]
    taken = v.add(Pick(tuple(map(tuple, places))), [x], "taken")
    return v.reshape(taken, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))


def _along(v: OnnxValues, x: Value, position: int) -> Array:
    """The flat places that constant indices along an axis (the attribute) stand for."""
    axis, indices = v.axis_of(x, 0), v.array(position, "indices").astype(np.int64)
    fits = indices.ndim == x.rank and all(
        place == axis or taken <= size for place, (taken, size) in enumerate(zip(indices.shape, x.shape, strict=False))
    )
    size = x.shape[axis]
    odd = not fits or bool(((indices < -size) | (indices >= size)).any())
    v.wrong_if(odd, f"indices {list(indices.shape)} along axis {axis} do not fit {x.type}")
    places: list[Array] = [np.asarray(each) for each in np.indices(indices.shape)]
    places[axis] = indices % size
    return np.asarray(np.ravel_multi_index(tuple(places), x.shape))


def gather_elements(v: OnnxValues) -> Value:
    """GatherElements by constant indices."""
    x = v.x
    places = _along(v, x, 1)
    taken = v.pick(v.reshape(x, (x.elements,), "flat"), [places.reshape(-1).tolist()], "taken")
    return v.reshape(taken, places.shape)


def scatter_elements(v: OnnxValues) -> Value:
    """ScatterElements by constant indices: of several for one place the last."""
    v.only("reduction", "none")
    x, updates = v.x, v.value(2)
    places = _along(v, x, 1)
    v.wrong_if(places.shape != updates.shape, f"{list(places.shape)} indices do not fit {updates.type}")
    source = np.arange(x.elements)
    source[places.reshape(-1)] = x.elements + np.arange(places.size)
    both = v.concat([v.reshape(one, (one.elements,), "flat") for one in (x, updates)], 0, "both")
    return v.reshape(v.pick(both, [source.tolist()], "scattered"), x.shape)


def triangle(v: OnnxValues) -> Value:
    """Trilu: zeros on one side of a diagonal."""
    x, offset = v.x, int(v.one_number(1, 0.0, "diagonal"))
    ones = np.ones(x.shape[-2:], np.bool_)
    mask = v.constant(np.triu(ones, offset) if v.attribute("upper", True) else np.tril(ones, offset), "mask")
    return v.add(Select(), [mask, x, v.constant(np.zeros((), x.dtype.numpy), "zero")])


def split(v: OnnxValues) -> None:
    """Split into parts of given or of equal sizes; the last equal part may be smaller."""
    x = v.x
    axis = v.axis_of(x, 0)
    size, count = x.shape[axis], v.attribute("num_outputs", len(v.op.outputs))
    each = -(-size // max(count, 1))
    equal = tuple(min(each, size - part * each) for part in range(min(count, size + 1)))
    sizes = v.integers(1, "sizes of the parts", equal, "split")
    v.refuse_if(0 in sizes, f"the parts {list(sizes)} do not make up values with elements")
    odd = len(sizes) != len(v.op.outputs) or sum(sizes) != size or min(sizes) < 1
    v.wrong_if(odd, f"the parts {list(sizes)} do not make up the {size} elements of axis {axis}")
    start = 0
    for length, result in zip(sizes, v.op.outputs, strict=True):
        if result:
            v.values[result] = v.part(x, axis, start, start + length, name=result)
        start += length


def in_blocks(v: OnnxValues, apart: bool) -> Value:
    """SpaceToDepth (`apart`) and DepthToSpace: a place in the block is the channel's outer part, or (CRD) the inner."""
    x, size = v.x, v.attribute("blocksize", 0)
    v.refuse_if(x.rank != 4 or size < 1, f"works on 4 axes and a positive block size, got {x.type} and {size}")
    (batch, channels, height, width), outer = x.shape, v.choice("mode", "DCR", "DCR", "CRD") == "DCR"
    if apart:
        rows, columns = height // size, width // size
        parts = (batch, channels, rows, size, columns, size)
        order = (0, 3, 5, 1, 2, 4) if outer else (0, 1, 3, 5, 2, 4)
        result = (batch, channels * size**2, rows, columns)
    else:
        depth = channels // size**2
        parts = (batch, *((size, size, depth) if outer else (depth, size, size)), height, width)
        order = (0, 3, 4, 1, 5, 2) if outer else (0, 1, 4, 2, 5, 3)
        result = (batch, depth, height * size, width * size)
    return v.reshape(v.transpose(v.reshape(x, parts, "parts"), order, "moved"), result)


def _resized(v: OnnxValues, shape: Shape) -> list[ResizeAxis]:
    """Resize's effect on each axis, from the operands scales or sizes (opset 10: only scales, operand 1)."""
    mode = v.attribute("coordinate_transformation_mode", "half_pixel" if v.opset > 10 else "asymmetric")
    if mode not in _COORDINATES:
        raise v.refuse(f"coordinate_transformation_mode = {mode} is not supported, only {', '.join(_COORDINATES)}")
    axes = [v.axis(axis, len(shape)) for axis in v.attribute("axes", tuple(range(len(shape))))]
    policy, regions = v.attribute("keep_aspect_ratio_policy", "stretch"), [(0.0, 1.0)] * len(axes)
    fixed = v.has(3) and v.array(3, "sizes").size > 0
    numbers = v.integers(3, "sizes") if fixed else v.array(1 if v.opset == 10 else 2, "scales").reshape(-1)
    v.wrong_if(len(numbers) != len(axes), f"{len(numbers)} scales or sizes do not fit {len(axes)} axes")
    pairs = [(float(number), shape[axis]) for number, axis in zip(numbers, axes, strict=True)]
    scales = [number / size if fixed else number for number, size in pairs]
    if fixed and policy != "stretch":
        scales = [min(scales) if policy == "not_larger" else max(scales)] * len(axes)
    results = [floor(scale * size + 0.5 * fixed) for scale, (_, size) in zip(scales, pairs, strict=True)]
    if mode == "tf_crop_and_resize":
        given = v.array(1, "region").astype(np.float64)
        odd = given.size != 2 * len(axes) or not np.isfinite(given).all()
        v.wrong_if(odd, f"the region has {given.size} numbers; it must have a start and an end for each axis")
        regions = [(start, end) for start, end in given.reshape(2, -1).T.tolist()]
    every = [ResizeAxis(size, size, 1.0, mode) for size in shape]
    for axis, size, scale, region in zip(axes, results, scales, regions, strict=True):
        every[axis] = ResizeAxis(shape[axis], size, scale, mode, region)
    whole = [axis.result for axis in every]
    if min(whole, default=1) < 1 or prod(whole) >= 1 << 31:
        raise v.refuse(f"the result {whole} has no elements, or too many", SMALLER)
    return every


def resize(v: OnnxValues) -> Value:
    """Resize: nearest elements, or weighted sums along one axis after the other; roi is read by tf_crop_and_resize."""
    x = v.x
    axes = _resized(v, x.shape)
    mode = v.attribute("mode", "nearest")
    rounding = v.attribute("nearest_mode", "round_prefer_floor" if v.opset > 10 else "floor")
    coefficient, beyond = v.attribute("cubic_coeff_a", -0.75), v.attribute("extrapolation_value", 0.0)
    exclude, antialias = v.attribute("exclude_outside", False), v.attribute("antialias", False)
    outside = _outside(axes)
    if mode == "nearest" and outside is None and rounding in _NEAREST and not antialias:
        return v.pick(x, [axis.nearest(rounding) for axis in axes])
    if mode not in ("linear", "cubic"):
        raise v.refuse(f"mode = {mode}, nearest_mode = {rounding}, antialias = {int(antialias)} is not supported")
    changed = {place: axis for place, axis in enumerate(axes) if not axis.still}
    moving = {at: axis.taps(mode == "cubic", coefficient, exclude, antialias) for at, axis in changed.items()}
    value = v.resampled(x, moving, "resampled")
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
