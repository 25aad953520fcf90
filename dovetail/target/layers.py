"""Convolutions and dense layers as a coarse engine is told them: the pattern, its parameters, and the usual limits.

    patterns = requantised("convolution", Conv2d)        # with and without a bias
    layer = layer_of(match)                              # weights, strides, padding, zero points, ...
    limits = (INT8, ONE_IMAGE, kernel_at_most(3, 3))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.graph.types import Array, TensorType
from dovetail.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.target.description import Operand
from dovetail.target.pattern import Constraint, Match, Pattern, apply, constant, maybe, operand

Linear = Conv2d | DepthwiseConv2d | FullyConnected


def requantised(name: str, kind: type[Linear]) -> dict[str, Pattern]:
    """A layer with padding (no dense one), requantisation and limits, with a bias and without: name -> pattern.

    Leaves: x, weights, bias, multiplier, shift. Operators: pad, layer, requantize, clip.
    """
    x = operand("x") if kind is FullyConnected else maybe(Pad, operand("x"))
    found: dict[str, Pattern] = {}
    for text, bias in ((name, (constant("bias"),)), (f"{name} without bias", ())):
        layer = apply(kind, x, constant("weights"), *bias, name="layer")
        found[text] = apply(Clip, apply(Requantize, layer, constant("multiplier"), constant("shift")))
    return found


@dataclass(frozen=True)
class Layer:
    """What `requantised` matched; a dense layer is a convolution of 1x1 over an image of one column."""

    weights: Array
    """OHWI; depthwise 1HWC."""
    bias: Array
    """int32 [O], 0 where there is none; so are the next two."""
    multiplier: Array
    """int32 [O]: what a sum is multiplied by, in units of 2**-31."""
    shift: Array
    """int32 [O]: the power of two that goes with it, negative to shift right."""
    stride: tuple[int, int]
    """Rows and columns, as in all pairs here."""
    dilation: tuple[int, int]
    before: tuple[int, int]
    """Rows and columns of padding above and to the left."""
    after: tuple[int, int]
    """... below and to the right."""
    input_zero_point: int
    """Taken off every element of the operand; what stands for 0.0 in it."""
    padding_value: int
    """What padding holds, as an element of the operand."""
    output_zero_point: int
    """Added to every result behind the requantisation."""
    low: int
    """The least a result may be, zero point included."""
    high: int
    """The most."""

    @property
    def kernel(self) -> tuple[int, int]:
        """Rows and columns of the weights."""
        return (self.weights.shape[1], self.weights.shape[2])


def linear_of(match: Match) -> Linear:
    """The layer's operator."""
    found = match.nodes["layer"].operator
    assert isinstance(found, Conv2d | DepthwiseConv2d | FullyConnected)
    return found


def layer_of(match: Match) -> Layer:
    """Everything about a matched layer but where it lies."""
    linear, weights, clip = linear_of(match), match.array("weights"), match.operator("clip", Clip)
    pad = match.operator("pad", Pad) if match.has("pad") else None
    dense = isinstance(linear, FullyConnected)
    per_channel = [np.zeros(1, np.int32) if name not in match.values else match.array(name)
                   for name in ("bias", "multiplier", "shift")]  # fmt: skip
    bias, multiplier, shift = (np.broadcast_to(values, match.result.shape[-1]) for values in per_channel)
    return Layer(
        weights=weights[:, None, None] if dense else weights, bias=bias, multiplier=multiplier, shift=shift,
        stride=(1, 1) if isinstance(linear, FullyConnected) else linear.stride,
        dilation=(1, 1) if isinstance(linear, FullyConnected) else linear.dilation,
        before=(pad.before[1], pad.before[2]) if pad else (0, 0), after=(pad.after[1], pad.after[2]) if pad else (0, 0),
        input_zero_point=linear.input_zero_point,
        padding_value=int(pad.value) if pad else linear.input_zero_point,
        output_zero_point=match.operator("requantize", Requantize).output_zero_point, low=clip.low, high=clip.high,
    )  # fmt: skip


@dataclass(frozen=True)
class Image:
    """Where an operand or a result lies; a matrix is an image of one column."""

    address: int
    """Of the first byte."""
    rows: int
    columns: int
    channels: int
    row: int
    """Bytes between rows."""
    pixel: int
    """Bytes between pixels."""


def image_of(kind: TensorType, place: Operand) -> Image:
    """One NHWC image, or a matrix, in memory."""
    if len(kind.shape) == 2:
        return Image(place.address, kind.shape[0], 1, kind.shape[1], place.strides[0], 0)
    return Image(place.address, *kind.shape[1:4], *place.strides[1:3])


INT8 = (
    Constraint("operand and result must be int8", lambda m: [m.type("x").dtype.text, m.result.dtype.text],
               lambda v: v == ["int8", "int8"]),
    Constraint("weights must be int8 or narrower, with zero point 0",
               lambda m: [m.type("weights").dtype.text, linear_of(m).weight_zero_point],
               lambda v: v[0] in ("int8", "int4", "int2") and v[1] == 0),
)  # fmt: skip
"""For an engine of signed bytes."""
ONE_IMAGE = Constraint("the operand must be one image, or a matrix", lambda m: m.type("x").shape,
                       lambda v: len(v) == 2 or (len(v) == 4 and v[0] == 1))  # fmt: skip
NO_GROUPS = Constraint("the groups must be 1", lambda m: m.type("x").shape[-1] // m.type("weights").shape[-1],
                       lambda v: v == 1)  # fmt: skip
NO_MULTIPLIER = Constraint("the depth multiplier must be 1",
                           lambda m: m.type("weights").shape[-1] // m.type("x").shape[-1],
                           lambda v: v == 1)  # fmt: skip
NO_DILATION = Constraint("the dilation must be 1x1", lambda m: layer_of(m).dilation, lambda v: v == (1, 1))
DOUBLE_ROUNDING = Constraint("requantisation must round twice, as TensorFlow Lite Micro does",
                             lambda m: m.operator("requantize", Requantize).rounding.value,
                             lambda v: v == Rounding.DOUBLE.value)  # fmt: skip


def kernel_at_most(rows: int, columns: int) -> Constraint:
    """Rows and columns of the weights."""
    return Constraint(f"the kernel must be at most {rows}x{columns}", lambda m: layer_of(m).kernel,
                      lambda v: v[0] <= rows and v[1] <= columns)  # fmt: skip


def strides_of(*allowed: int) -> Constraint:
    """The same stride along rows and columns, one of these."""
    return Constraint(f"the strides must be {' or '.join(f'{one}x{one}' for one in allowed)}",
                      lambda m: layer_of(m).stride, lambda v: v[0] == v[1] and v[0] in allowed)  # fmt: skip


def zero_padding_at_most(most: int) -> tuple[Constraint, ...]:
    """Padding of rows and columns on any side, of real zeros."""
    return (
        Constraint(f"padding must be of rows and columns, at most {most}",
                   lambda m: m.operator("pad", Pad).before + m.operator("pad", Pad).after if m.has("pad") else (0,) * 8,
                   lambda v: max(v) <= most and v[0] == v[3] == v[4] == v[7] == 0),
        Constraint("padding must have the operand's zero point",
                   lambda m: [layer_of(m).padding_value, layer_of(m).input_zero_point], lambda v: v[0] == v[1]),
    )  # fmt: skip


def sizes_below(limit: int) -> Constraint:
    """Everything's extent."""
    return Constraint(f"every size must be below {limit:,}", lambda m: max(*m.type("x").shape, *m.result.shape),
                      lambda v: v < limit)  # fmt: skip
