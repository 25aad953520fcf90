"""ONNX Resize: nearest elements, or weighted sums along one axis after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, prod

import numpy as np

from dovetail.frontend.onnx_context import AGAIN, SMALLER, OnnxContext
from dovetail.frontend.onnx_elementwise import number
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.frontend.onnx_selection import pick
from dovetail.graph.types import Array, Shape
from dovetail.operators.logic import Select
from dovetail.operators.selection import Resample

_COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    "tf_crop_and_resize",
)
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True)
class Axis:
    """How one axis is resized."""

    size: int
    result: int
    scale: float
    """Result over size; what the model says, which may be a little more than `result / size`."""
    mode: str
    """coordinate_transformation_mode"""
    region: tuple[float, float] = (0.0, 1.0)
    """Where tf_crop_and_resize begins and ends, as parts of the axis."""

    @property
    def still(self) -> bool:
        """True where nothing is resized."""
        return self.result == self.size and self.scale == 1.0 and self.region == (0.0, 1.0)

    def coordinates(self) -> Array:
        """Where the centre of each element of the result lies in the operand, float64 (ONNX's Resize)."""
        place = np.arange(self.result, dtype=np.float64)
        if self.mode == "align_corners":
            return place * (self.size - 1) / (self.result - 1) if self.result > 1 else place * 0.0
        if self.mode == "tf_crop_and_resize":
            start, end, last = *self.region, self.size - 1
            if self.result == 1:
                return place * 0.0 + 0.5 * (start + end) * last
            return np.asarray(start * last + place * (end - start) * last / (self.result - 1))
        if self.mode == "asymmetric":
            return np.asarray(place / self.scale)
        if self.mode == "pytorch_half_pixel" and self.result == 1:
            return place * 0.0
        centred = (place + 0.5) / self.scale - 0.5
        if self.mode == "half_pixel_symmetric":
            adjustment = self.result / (self.scale * self.size)
            return np.asarray(self.size / 2 * (1 - adjustment) + centred)
        return np.asarray(centred)


def nearest_places(axis: Axis, rounding: str) -> list[int]:
    """The element of the operand nearest to each of the result."""
    found = []
    for place in axis.coordinates():
        if rounding == "floor":
            nearest = floor(place)
        elif rounding == "ceil":
            nearest = ceil(place)
        else:
            nearest = ceil(place - 0.5) if rounding == "round_prefer_floor" else floor(place + 0.5)
        found.append(min(max(nearest, 0), axis.size - 1))
    return found


def _linear(distance: Array, _coefficient: float) -> Array:
    return np.asarray(np.maximum(1.0 - np.abs(distance), 0.0))


def _cubic(distance: Array, a: float) -> Array:
    """Keys' cubic convolution, as ONNX's Resize takes it."""
    d = np.abs(distance)
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, inner, np.where(d < 2, outer, 0.0))


def taps(axis: Axis, cubic: bool, coefficient: float, exclude_outside: bool, antialias: bool) -> tuple[Array, Array]:
    """Places int32 and weights float32, [result, taps] each, of linear or cubic interpolation."""
    stretch = min(axis.scale, 1.0) if antialias else 1.0
    reach = (2.0 if cubic else 1.0) / stretch
    centres = axis.coordinates()
    count = 2 * ceil(reach)
    first = np.floor(centres).astype(np.int64) - ceil(reach) + 1
    places = first[:, None] + np.arange(count)
    weights = (_cubic if cubic else _linear)((places - centres[:, None]) * stretch, coefficient)
    inside = (places >= 0) & (places < axis.size)
    if exclude_outside:
        weights = np.where(inside, weights, 0.0)
    if exclude_outside or antialias:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(places, 0, axis.size - 1).astype(np.int32), weights.astype(np.float32)


def _axes(ctx: OnnxContext, op: OnnxNode, shape: Shape) -> list[Axis]:
    """What happens to each axis, from the operands scales or sizes (opset 10: only scales, operand 1)."""
    mode = ctx.attribute(op, "coordinate_transformation_mode", "half_pixel" if ctx.opset > 10 else "asymmetric")
    if mode not in _COORDINATES:
        known = ", ".join(_COORDINATES)
        raise ctx.refuse(op, f"coordinate_transformation_mode = {mode} is not supported, only {known}")
    listed = ctx.attribute(op, "axes", tuple(range(len(shape))))
    axes = [ctx.positive_axis(op, axis, len(shape)) for axis in listed]
    result, scales = list(shape), [1.0] * len(shape)
    policy = ctx.attribute(op, "keep_aspect_ratio_policy", "stretch")
    given = 1 if ctx.opset == 10 else 2
    if ctx.has(op, 3) and ctx.constant(op, 3, "sizes").array.size:
        sizes = list(ctx.integers(op, 3, "sizes"))
        ratios = [size / shape[axis] for size, axis in zip(sizes, axes, strict=True)]
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [ratio] * len(axes)
            sizes = [floor(ratio * shape[axis] + 0.5) for axis in axes]
        for size, ratio, axis in zip(sizes, ratios, axes, strict=True):
            result[axis], scales[axis] = size, ratio
    else:
        array = ctx.constant(op, given, "scales").array.reshape(-1)
        for scale, axis in zip(array.astype(np.float64), axes, strict=True):
            result[axis], scales[axis] = floor(shape[axis] * scale), float(scale)
    if min(result, default=1) < 1 or prod(result) >= 1 << 31:
        raise ctx.refuse(op, f"the result {result} has no elements, or too many", SMALLER)
    regions = [(0.0, 1.0)] * len(shape)
    if mode == "tf_crop_and_resize":
        region = ctx.constant(op, 1, "region").array.astype(np.float64)
        if region.size != 2 * len(axes) or not np.isfinite(region).all():
            raise ctx.refuse(op, f"the region has {region.size} numbers; it must have a start and an end for each axis",
                             AGAIN)
        bounds = region.reshape(2, -1)
        for axis, start, end in zip(axes, *bounds.tolist(), strict=True):
            regions[axis] = (start, end)
    return [Axis(n, r, s, mode, span) for n, r, s, span in zip(shape, result, scales, regions, strict=True)]


def resize(ctx: OnnxContext, op: OnnxNode) -> None:
    """Resize; roi is read by tf_crop_and_resize only."""
    x = ctx.value(op, 0)
    axes = _axes(ctx, op, ctx.type_of(x).shape)
    mode = ctx.attribute(op, "mode", "nearest")
    rounding = ctx.attribute(op, "nearest_mode", "round_prefer_floor" if ctx.opset > 10 else "floor")
    coefficient = float(ctx.attribute(op, "cubic_coeff_a", -0.75))
    exclude, antialias = bool(ctx.attribute(op, "exclude_outside", 0)), bool(ctx.attribute(op, "antialias", 0))
    beyond = float(ctx.attribute(op, "extrapolation_value", 0.0))
    outside = _outside(axes)
    if mode == "nearest" and outside is None and rounding in _NEAREST and not antialias:
        pick(ctx, op, x, [nearest_places(axis, rounding) for axis in axes])
        return
    if mode not in ("linear", "cubic"):
        raise ctx.refuse(op, f"mode = {mode}, nearest_mode = {rounding}, antialias = {int(antialias)} is not supported")
    stem, resized = op.outputs[0], [n for n, axis in enumerate(axes) if not axis.still]
    operands = [x]
    for place in resized:
        arrays = taps(axes[place], mode == "cubic", coefficient, exclude, antialias)
        names = (f"{stem}_places", f"{stem}_weights")
        operands += [ctx.builder.constant(name, array) for name, array in zip(names, arrays, strict=True)]
    value = ctx.add(op, Resample(tuple(resized)), operands, f"{stem}_resampled") if resized else x
    if outside is not None:
        border = [ctx.builder.constant(f"{stem}_outside", outside), number(ctx, op, beyond)]
        value = ctx.add(op, Select(), [*border, value], f"{stem}_bordered")
    ctx.alias(op, value)


def _outside(axes: list[Axis]) -> Array | None:
    """Where the result of tf_crop_and_resize lies beyond the operand, bool of the result's shape; None if nowhere."""
    if axes and axes[0].mode != "tf_crop_and_resize":
        return None
    parts = [(axis.coordinates() < 0) | (axis.coordinates() > axis.size - 1) for axis in axes]
    whole = np.zeros([axis.result for axis in axes], np.bool_)
    for place, part in enumerate(parts):
        whole |= part.reshape([-1 if place == other else 1 for other in range(len(axes))])
    return whole if whole.any() else None
