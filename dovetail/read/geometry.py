"""Windows over images, transposed convolution and resizing, as all readers compute them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import numpy as np

from dovetail.ir.operators.base import Padding2d, SlidingWindow
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Pad, Pick, Reshape
from dovetail.ir.types import Array, Shape
from dovetail.read.values import Value, Values, slice_of
from dovetail.records import Record

Pair = tuple[int, int]
"""Two numbers: for rows and columns, or before and after."""


def same_border(size: int, span: int, stride: int) -> Pair:
    """Border of an axis of ceil(size / stride) windows of `span` (TensorFlow's SAME, the odd one behind)."""
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    return total // 2, total - total // 2


def same_padding(window: SlidingWindow, sizes: Shape) -> Padding2d:
    """That border around the rows and the columns of an image of these sizes."""
    rows, columns = map(same_border, sizes, window.span, window.stride)
    return rows, columns


# Transposed convolution as a convolution that gives every phase of the stride as channels of its own.
#
# With stride s, row t of the uncut result reads row u - j of the operand through row r + s * j of the kernel, where
# t = s * u + r. So the s * s phases (r of rows and of columns) are s * s times the output channels of one convolution
# with ceil(kernel / s) taps, moved to their places afterwards. Nothing is multiplied by zeros where s divides the
# kernel.


class TransposedAxis(Record):
    """The geometry of a transposed convolution along one image axis."""

    size: int
    kernel: int
    stride: int
    lead: int
    """Rows the uncut result loses at its beginning; negative where zeros come before it."""
    result: int

    @property
    def taps(self) -> int:
        """Rows of each phase's kernel."""
        return -(-self.kernel // self.stride)

    @property
    def first(self) -> int:
        """The first block of `stride` rows of the uncut result that the result needs."""
        return self.lead // self.stride

    @property
    def blocks(self) -> int:
        """How many such blocks."""
        return (self.result - 1 + self.lead) // self.stride - self.first + 1

    @property
    def border(self) -> Pair:
        """Zeros before and after the operand; negative where it is cut."""
        return self.taps - 1 - self.first, self.first + self.blocks - self.size


def transposed_convolution(v: Values, operands: Sequence[Value], axes: Sequence[TransposedAxis], groups: int) -> Value:
    """A transposed convolution of x NHWC, constant weights OHWI (I = channels / groups), and a bias or none: one that
    gives all phases, the movement that puts these in their places, and a cut of what the result loses."""
    x, w, *bias = operands
    (batch, *_), (outputs, *_), (rows, columns) = x.shape, w.shape, axes
    strides, share = (rows.stride, columns.stride), outputs // groups
    image = v.bordered(x, (rows.border, columns.border), suffix="bordered")
    weights = _phase_weights(v, w, axes, groups)
    if prod(strides) > 1:  # the bias of each group, for each phase
        places = [g * share + o for g in range(groups) for _ in range(prod(strides)) for o in range(share)]
        bias = [v.pick(name, [places], "bias") for name in bias]
    result = v.add(Conv2d(), [image, weights, *bias], "phases_of_result")
    whole = [axis.blocks * axis.stride for axis in axes]
    if prod(strides) > 1:
        apart = v.reshape(result, (batch, rows.blocks, columns.blocks, groups, *strides, share), "placed")
        result = v.reshape(v.transpose(apart, (0, 1, 4, 2, 5, 3, 6), "placed"), (batch, *whole, outputs), "placed")
    if whole == [axis.result for axis in axes]:
        return result
    starts = [axis.lead - axis.first * axis.stride for axis in axes]
    kept = [range(start, start + axis.result) for start, axis in zip(starts, axes, strict=True)]
    return v.add(slice_of([range(batch), *kept, range(outputs)]), [result], "placed")


def _phase_weights(v: Values, w: Value, axes: Sequence[TransposedAxis], groups: int) -> Value:
    """Weights OHWI as those of the phases: output channels (group, row phase, column phase, output)."""
    outputs, rows, columns, depth = w.shape
    strides, taps = [axis.stride for axis in axes], [axis.taps for axis in axes]
    extra = [tap * stride - size for tap, stride, size in zip(taps, strides, (rows, columns), strict=True)]
    if any(extra):
        w = v.add(Pad((0,) * 4, (0, extra[0], extra[1], 0), 0.0), [w], "kernel")
    order = [[(t - 1 - j) * s + r for j in range(t) for r in range(s)] for t, s in zip(taps, strides, strict=True)]
    turned = v.pick(w, [range(outputs), *order, range(depth)], "turned")
    apart = (groups, outputs // groups, taps[0], strides[0], taps[1], strides[1], depth)
    moved = v.transpose(v.reshape(turned, apart, "phases"), (0, 3, 5, 1, 2, 4, 6), "moved")
    return v.reshape(moved, (outputs * prod(strides), *taps, depth), "ohwi")


# Places that elements are taken from, along one axis or all


def mirrored(size: int, before: int, after: int, mode: str) -> list[int]:
    """Source places of the elements of an axis with a border; a negative border cuts off.

    Raises:
        ValueError: a mirrored border is as wide as the axis.
    """
    places = range(-before, size + after)
    if mode == "edge":
        return [min(max(place, 0), size - 1) for place in places]
    if mode == "wrap":
        return [place % size for place in places]
    if mode == "symmetric":  # the edge itself is repeated
        return [min(place % (2 * size), 2 * size - 1 - place % (2 * size)) for place in places]
    if size == 1 and len(places) > 1:
        raise ValueError("an axis of one element cannot be mirrored")
    period = max(2 * (size - 1), 1)
    return [min(place % period, period - place % period) for place in places]


def repeated(shape: Shape, counts: Sequence[int]) -> list[list[int]]:
    """The places of a tensor repeated so many times along each axis."""
    return [list(range(size)) * count for size, count in zip(shape, counts, strict=True)]


def broadcast(shape: Shape, wanted: Shape) -> tuple[Reshape, Pick]:
    """The movement that broadcasts a shape to another one of at least as many axes, which it fits."""
    whole = (1,) * (len(wanted) - len(shape)) + shape
    sizes = zip(wanted, whole, strict=True)
    return Reshape(whole), Pick(tuple(tuple(range(size)) if size == have else (0,) * size for size, have in sizes))


# Resizing


class ResizeAxis(Record):
    """How one axis is resized."""

    size: int
    result: int
    scale: float
    """Result over size; what the model says, which may be a little more than `result / size`."""
    mode: str
    """ONNX's coordinate_transformation_mode"""
    region: tuple[float, float] = (0.0, 1.0)
    """Begin and end of tf_crop_and_resize, as parts of the axis."""

    @property
    def still(self) -> bool:
        """True where nothing is resized."""
        return self.result == self.size and self.scale == 1.0 and self.region == (0.0, 1.0)

    def coordinates(self) -> Array:
        """Places in the operand of the centres of the result's elements, float32 as ONNX Runtime has them."""
        place, last, scale = np.arange(self.result, dtype=np.float32), np.float32(self.size - 1), np.float32(self.scale)
        if self.mode == "tf_crop_and_resize":
            start, end = map(np.float32, self.region)
            if self.result == 1:
                return place + np.float32(0.5) * (start + end) * last
            return np.asarray(start * last + place * ((end - start) * last / np.float32(self.result - 1)))
        if self.result == 1 and self.mode in ("align_corners", "pytorch_half_pixel"):
            return place
        if self.mode == "align_corners":
            return place * last / np.float32(self.result - 1)
        if self.mode == "asymmetric":
            return np.asarray(place / scale)
        half = np.float32(0.5)
        centred = (place + half) / scale - half
        if self.mode == "half_pixel_symmetric":
            centred += np.float32(self.size / 2 * (1 - self.result / (self.scale * self.size)))
        return np.asarray(centred)

    def nearest(self, rounding: str) -> list[int]:
        """The element of the operand nearest to each of the result."""
        place = self.coordinates()
        rounded = {"floor": np.floor(place), "ceil": np.ceil(place), "round_prefer_floor": np.ceil(place - 0.5)}
        return [int(at) for at in np.clip(rounded.get(rounding, np.floor(place + 0.5)), 0, self.size - 1)]

    def taps(self, cubic: bool, coefficient: float, exclude_outside: bool, antialias: bool) -> tuple[Array, Array]:
        """Places int32 and weights float32, [result, taps] each, of linear or cubic interpolation."""
        stretch = min(self.scale, 1.0) if antialias else 1.0
        reach = (2.0 if cubic else 1.0) / stretch
        centres = self.coordinates()
        count = 2 * ceil(reach)
        first = np.floor(centres).astype(np.int64) - ceil(reach) + 1
        places = first[:, None] + np.arange(count)
        distance = np.abs((places - centres[:, None]) * stretch)
        weights = _cubic(distance, coefficient) if cubic else np.maximum(1.0 - distance, 0.0)
        inside = (places >= 0) & (places < self.size)
        if exclude_outside:
            weights = np.where(inside, weights, 0.0)
        if exclude_outside or antialias:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return np.clip(places, 0, self.size - 1).astype(np.int32), weights.astype(np.float32)


def _cubic(d: Array, a: float) -> Array:
    """Keys' cubic convolution of distances, as ONNX's Resize takes it."""
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, inner, np.where(d < 2, outer, 0.0))
