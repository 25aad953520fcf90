"""Transposed convolution as a convolution that gives every phase of the stride as channels of its own.

With stride s, row t of the uncut result reads row u - j of the operand through row r + s * j of the kernel, where
t = s * u + r. So the s * s phases (r of rows and of columns) are s * s times the output channels of one convolution
with ceil(kernel / s) taps, moved to their places afterwards. Nothing is multiplied by zeros where s divides the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.graph.types import Shape
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d
from dovetail.operators.movement import Pad, Reshape, Slice, Transpose
from dovetail.operators.selection import Pick

Emit = Callable[[Operator, Sequence[str], str], str]
"""Adds a node: operator, operands, and a word for its name; returns its value."""


@dataclass(frozen=True)
class Transposed:
    """The geometry along one image axis."""

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
    def borders(self) -> tuple[int, int]:
        """Zeros before and after the operand; negative where it is cut."""
        return self.taps - 1 - self.first, self.first + self.blocks - self.size


def bordered(emit: Emit, x: str, shape: Shape, borders: Sequence[tuple[int, int]]) -> str:
    """The image with zeros around it, cut where a border is negative."""
    cut = [(max(-lead, 0), max(-trail, 0)) for lead, trail in borders]
    if any(any(pair) for pair in cut):
        start = (0, cut[0][0], cut[1][0], 0)
        stop = (shape[0], shape[1] - cut[0][1], shape[2] - cut[1][1], shape[3])
        x = emit(Slice(start, stop, (1,) * 4), [x], "cut")
    (top, bottom), (left, right) = ((max(lead, 0), max(trail, 0)) for lead, trail in borders)
    if not any((top, bottom, left, right)):
        return x
    return emit(Pad((0, top, left, 0), (0, bottom, right, 0), 0.0), [x], "bordered")


def phase_weights(emit: Emit, w: str, shape: Shape, axes: Sequence[Transposed], groups: int) -> str:
    """Weights OHWI as those of the phases: output channels (group, row phase, column phase, output)."""
    outputs, rows, columns, depth = shape
    (strides, taps) = ([axis.stride for axis in axes], [axis.taps for axis in axes])
    extra = [tap * stride - size for tap, stride, size in zip(taps, strides, (rows, columns), strict=True)]
    if any(extra):
        w = emit(Pad((0,) * 4, (0, extra[0], extra[1], 0), 0.0), [w], "kernel")
    order = [[(t - 1 - j) * s + r for j in range(t) for r in range(s)] for t, s in zip(taps, strides, strict=True)]
    places = (tuple(range(outputs)), tuple(order[0]), tuple(order[1]), tuple(range(depth)))
    turned = emit(Pick(places), [w], "turned")
    apart = (groups, outputs // groups, taps[0], strides[0], taps[1], strides[1], depth)
    parts = emit(Reshape(apart), [turned], "phases")
    moved = emit(Transpose((0, 3, 5, 1, 2, 4, 6)), [parts], "moved")
    return emit(Reshape((outputs * prod(strides), taps[0], taps[1], depth)), [moved], "ohwi")


def phase_bias(emit: Emit, bias: str, outputs: int, groups: int, phases: int) -> str:
    """A bias [outputs] as that of the phases."""
    if phases == 1:
        return bias
    share = outputs // groups
    places = tuple(g * share + o for g in range(groups) for _ in range(phases) for o in range(share))
    return emit(Pick((places,)), [bias], "bias")


def phases(axes: Sequence[Transposed], batch: int, outputs: int, groups: int) -> list[Operator]:
    """The movement that puts the phases' results in their places, and cuts what the result loses."""
    rows, columns = axes
    strides = (rows.stride, columns.stride)
    whole = (batch, rows.blocks * rows.stride, columns.blocks * columns.stride, outputs)
    start = tuple(axis.lead - axis.first * axis.stride for axis in axes)
    cut = Slice((0, *start, 0), (batch, start[0] + rows.result, start[1] + columns.result, outputs), (1,) * 4)
    moves: list[Operator] = []
    if prod(strides) > 1:
        apart = Reshape((batch, rows.blocks, columns.blocks, groups, *strides, outputs // groups))
        moves = [apart, Transpose((0, 1, 4, 2, 5, 3, 6)), Reshape(whole)]
    return [*moves, cut] if whole[1:3] != (rows.result, columns.result) else moves


def transposed_convolution(
    emit: Emit, operands: Sequence[str], shapes: Sequence[Shape], axes: Sequence[Transposed], groups: int
) -> tuple[str, list[Operator]]:
    """The convolution that gives all phases, and the movement that must follow its quantisation.

    Args:
        emit: adds nodes.
        operands: x NHWC, constant weights OHWI (I = channels / groups), a bias or none.
        shapes: of x and of the weights.
        axes: rows and columns.
        groups: independent channel groups.
    """
    x, w, *bias = operands
    outputs, count = shapes[1][0], axes[0].stride * axes[1].stride
    image = bordered(emit, x, shapes[0], [axis.borders for axis in axes])
    weights = phase_weights(emit, w, shapes[1], axes, groups)
    terms = [image, weights, *(phase_bias(emit, name, outputs, groups, count) for name in bias)]
    return emit(Conv2d(), terms, "phases_of_result"), phases(axes, shapes[0][0], outputs, groups)
