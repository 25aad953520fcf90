"""Convolutions, dense layers and additions as a coarse engine is told them: pattern, parameters, and the usual limits.

    patterns = requantised("convolution", Conv2d)        # with and without a bias
    layer = layer_of(match)                              # weights, strides, padding, zero points, ...
    limits = (INT8, ONE_IMAGE, kernel_at_most(3, 3))

The limits hold of other patterns too, where their parts go by the same names: the operator of a layer is "layer", with
a "pad" before it or not, its operand is "x" and its weights "weights". `Constraint.worded` says a limit in other words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.documented import document
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding
from dovetail.ir.operators.base import SlidingWindow
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.linear import Linear as Linear
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array, DType, Shape, TensorType
from dovetail.names import names
from dovetail.target.offload import Operand
from dovetail.target.pattern import Constraint, Match, Pattern, apply, constant, maybe, one_of, operand

_SIGNED = ("int8", "int4", "int2")


def requantised(name: str, kind: type[Linear]) -> dict[str, Pattern]:
    """A layer with padding (no dense one), requantisation and limits, with a bias and without: name -> pattern.

    Leaves: x, weights, bias, multiplier, shift. Operators: pad, layer, requantize, clip.

    Args:
        name: begins the name of each pattern.
        kind: the operator of the layer.
    """
    x = operand("x") if kind is FullyConnected else maybe(Pad, operand("x"))
    patterns: dict[str, Pattern] = {}
    for text, bias in ((name, (constant("bias"),)), (f"{name} without bias", ())):
        layer = apply(kind, x, constant("weights"), *bias, name="layer")
        patterns[text] = apply(Clip, apply(Requantize, layer, constant("multiplier"), constant("shift")))
    return patterns


def _scaled(name: str) -> Pattern:
    return apply(Requantize, operand(name), constant(f"{name}_multiplier"), constant(f"{name}_shift"), name=name)


ADDITION = apply(
    Clip, apply(Requantize, apply(Add, _scaled("x"), _scaled("other")), constant("multiplier"), constant("shift"))
)
"""A residual addition as TensorFlow Lite computes it: both operands brought to one scale, their sum to the result's.
Leaves: x, other, multiplier and shift of each (x_multiplier, ...) and of the sum. Operators: x, other (each operand's
requantisation), add, requantize, clip."""


@dataclass(frozen=True)
class LayerWindow:
    """Window of a layer, each field for rows and columns; a dense layer is a convolution of 1x1."""

    kernel: tuple[int, int]
    """Rows and columns of the weights."""
    stride: tuple[int, int]
    """Rows and columns from one window to the next."""
    dilation: tuple[int, int]
    """Rows and columns from one tap of a window to the next."""
    before: tuple[int, int]
    """Rows and columns of padding above and to the left."""
    after: tuple[int, int]
    """Rows and columns of padding below and to the right."""
    padding_value: int
    """Value of the padding, as an element of the operand; without padding the operand's zero point."""


PIXEL = LayerWindow((1, 1), (1, 1), (1, 1), (0, 0), (0, 0), 0)
"""The window of a layer that computes each pixel alone."""


@dataclass(frozen=True)
class Layer(LayerWindow):
    """A layer `requantised` matched; a dense layer is a convolution of 1x1 over an image of one column."""

    weights: Array
    """Weights: OHWI, or 1HWC for a depthwise layer."""
    bias: Array
    """Bias of each output channel: int32 [O], 0 without a bias."""
    multiplier: Array
    """Multiplier of each output channel's sums in units of 2**-31: int32 [O], 0 if nothing requantises."""
    shift: Array
    """Power of two of each output channel, negative to shift right: int32 [O], 0 if nothing requantises."""
    input_zero_point: int
    """Subtracted from every element of the operand; the integer for 0.0."""
    output_zero_point: int
    """Added to every result behind the requantisation."""
    low: int
    """Least element of the result."""
    high: int
    """Largest element of the result."""


def linear_of(match: Match) -> Linear:
    """The operator of a matched layer."""
    return match.operator("layer", Linear)


def _requantisations(match: Match) -> list[Node]:
    return [node for node in match.nodes.values() if isinstance(node.operator, Requantize)]


def padding_of(match: Match) -> Pad:
    """The padding of a layer's image, as an operator; padding by 0 for a layer without padding."""
    nothing = Pad((0,) * 4, (0,) * 4, linear_of(match).input_zero_point)
    return match.operator("pad", Pad) if match.has("pad") else nothing


def window_of(match: Match) -> LayerWindow:
    """Window of a matched layer: kernel, stride, dilation and padding."""
    node, pad = match.nodes["layer"], padding_of(match)
    window = node.operator.window([match.graph.types[name] for name in node.inputs]) or SlidingWindow((1, 1))
    padding = ((pad.before[1], pad.before[2]), (pad.after[1], pad.after[2]), int(pad.value))
    return LayerWindow(window.kernel, window.stride, window.dilation, *padding)


def taps_inside(window: LayerWindow, x: Shape, y: Shape) -> int:
    """Pairs of a pixel of a result and a tap of its window that lies in the image.

    Args:
        window: kernel, stride, dilation and padding.
        x: NHWC shape of the operand.
        y: NHWC shape of the result.
    """
    pairs = 1
    axes = zip(sizes_of(x), sizes_of(y), window.kernel, window.stride, window.dilation, window.before, strict=False)
    for size, outputs, kernel, stride, dilation, before in axes:
        places = np.arange(outputs)[:, None] * stride + np.arange(kernel) * dilation - before
        pairs *= int(((places >= 0) & (places < size)).sum())
    return pairs


def layer_of(match: Match) -> Layer:
    """Weights, bias, scales, window and limits of a matched layer; `image_of` has the addresses."""
    linear, weights, clip = linear_of(match), match.array("weights"), match.operator("clip", Clip)
    per_channel = [
        np.zeros(1, np.int32) if name not in match.values else match.array(name)
        for name in ("bias", "multiplier", "shift")
    ]
    bias, multiplier, shift = (np.broadcast_to(values, match.result.shape[-1]) for values in per_channel)
    return Layer(
        **vars(window_of(match)),
        weights=weights[:, None, None] if weights.ndim == 2 else weights,
        bias=bias,
        multiplier=multiplier,
        shift=shift,
        input_zero_point=linear.input_zero_point,
        output_zero_point=match.operator("requantize", Requantize).output_zero_point,
        low=clip.low,
        high=clip.high,
    )


@dataclass(frozen=True)
class Addition:
    """A matched `ADDITION`, which keeps the limits of the same name."""

    scales: Array
    """Multiplier and shift of the sum, of x and of other: int32 [3, 2]."""
    input_zero_point: int
    """Subtracted from the elements of x before `RAISED_BITS` shifts them."""
    other_zero_point: int
    """Subtracted from the elements of other before `RAISED_BITS` shifts them."""
    output_zero_point: int
    """Added to the scaled sum."""
    low: int
    """Least element of the result."""
    high: int
    """Largest element of the result."""


def addition_of(match: Match) -> Addition:
    """Scales, zero points and limits of a matched addition; `image_of` has the addresses."""
    names, clip = ("", "x_", "other_"), match.operator("clip", Clip)
    scales = [[match.array(f"{name}{kind}").reshape(-1)[0] for kind in ("multiplier", "shift")] for name in names]
    first, second = (match.operator(name, Requantize).input_zero_point for name in ("x", "other"))
    zero = match.operator("requantize", Requantize).output_zero_point
    return Addition(np.array(scales, np.int32), first, second, zero, clip.low, clip.high)


@dataclass(frozen=True)
class Image:
    """Place of an operand or a result; a matrix is an image of one column."""

    address: int
    """Address of the first byte."""
    rows: int
    """Rows of the image."""
    columns: int
    """Columns of the image."""
    channels: int
    """Channels of a pixel."""
    row: int
    """Bytes from one row to the next."""
    pixel: int
    """Bytes from one pixel to the next."""


def image_of(kind: TensorType, place: Operand) -> Image:
    """Address, sizes and strides of an NHWC image, or of a matrix as an image of one column."""
    if len(kind.shape) == 2:
        return Image(place.address, kind.shape[0], 1, kind.shape[1], place.strides[0], 0)
    return Image(place.address, *kind.shape[1:4], *place.strides[1:3])


def sizes_of(shape: Shape) -> tuple[int, int, int]:
    """Rows, columns and channels of a shape: one NHWC image, or a vector (1 x channels) as an image of one pixel."""
    return (shape[1], shape[2], shape[3]) if len(shape) == 4 else (1, 1, shape[-1])


def range_of(name: str) -> Callable[[Match], tuple[int, int]]:
    """The least and the largest element of a constant, for a constraint.

    Args:
        name: name of the constant in the pattern.
    """
    return lambda m: (int(m.array(name).min()), int(m.array(name).max()))


def keeps(limits: Sequence[Constraint], types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a layer keeps limits of its shape and window before any pattern is matched, e.g. to choose rewrites.

    Args:
        limits: only of operand, weights and result types, and of the window without padding.
        types: of every value of the graph.
        node: a convolution or dense layer in it.
    """
    values = {"x": node.inputs[0], "weights": node.inputs[1]}
    match = Match(Graph("", (), (), (), types), node.output, values, {"layer": node})
    return all(limit.failure(match) is None for limit in limits)


INT8 = (
    one_of(
        "operand and result must be int8", lambda m: [m.type("x").dtype.text, m.result.dtype.text], ["int8", "int8"]
    ),
    Constraint(
        "weights must be int8 or narrower, with zero point 0",
        lambda m: [m.type("weights").dtype.text, linear_of(m).weight_zero_point],
        lambda v: v[0] in _SIGNED and v[1] == 0,
    ),
)
"""Constraints of an engine of signed bytes."""
NARROW_WEIGHTS = one_of("weights must be int8 or narrower", lambda m: m.type("weights").dtype.text, *_SIGNED)
SYMMETRIC_WEIGHTS = one_of("weights must be symmetric (zero point 0)", lambda m: linear_of(m).weight_zero_point, 0)
SYMMETRIC_OPERAND = one_of("activations must be symmetric (zero point 0)", lambda m: linear_of(m).input_zero_point, 0)
ONE_IMAGE = Constraint(
    "the operand must be one image, or a matrix",
    lambda m: m.type("x").shape,
    lambda v: len(v) == 2 or (len(v) == 4 and v[0] == 1),
)
BATCH = one_of("the batch must be 1", lambda m: m.result.shape[0], 1)
"""Constraint: one image, or one row of a dense layer."""
BATCH_OF_IMAGES = Constraint(
    BATCH.sentence, lambda m: m.result.shape[0] if len(m.result.shape) > 2 else 1, BATCH.accepts
)
"""Constraint: one image; a dense layer may have any number of rows."""
ONE_ROW = one_of("a dense layer must have one row of operands", lambda m: m.type("x").shape[:-1], (1,))
ALL_INT8 = Constraint(
    "values must be int8",
    lambda m: [m.graph.types[value].dtype for value in (*m.graph.inputs, m.root)],
    lambda v: set(v) == {DType.INT8},
)
"""Constraint: every operand and the result are int8, for any pattern."""
INT8_WEIGHTS = one_of(
    "weights must be int8, zero point 0",
    lambda m: (m.type("weights").dtype, linear_of(m).weight_zero_point),
    (DType.INT8, 0),
)
NO_GROUPS = one_of("the groups must be 1", lambda m: m.type("x").shape[-1] // m.type("weights").shape[-1], 1)
NO_MULTIPLIER = one_of(
    "the depth multiplier must be 1", lambda m: m.type("weights").shape[-1] // m.type("x").shape[-1], 1
)
NO_DILATION = one_of("the dilation must be 1x1", lambda m: window_of(m).dilation, (1, 1))
ZERO_PADDING = one_of("padding must be zeros", lambda m: m.operator("pad", Pad).value if m.has("pad") else 0, 0)
PADDING_OF_ZERO_POINT = Constraint(
    "padding must be the zero point",
    lambda m: (padding_of(m).value, linear_of(m).input_zero_point),
    lambda v: v[0] == v[1],
)
EVEN_STRIDES = Constraint(
    "strides of rows and columns must be equal", lambda m: window_of(m).stride, lambda v: v[0] == v[1]
)
DOUBLE_ROUNDING = one_of(
    "requantisation must round twice, as TensorFlow Lite Micro does",
    lambda m: m.operator("requantize", Requantize).rounding.value,
    Rounding.DOUBLE.value,
)
ALL_DOUBLE_ROUNDING = one_of(
    "requantisations must be rounded twice",
    lambda m: {node.expect(Requantize).rounding for node in _requantisations(m)},
    {Rounding.DOUBLE},
)
"""Constraints of a pattern with any number of requantisations."""
ONE_SCALE = one_of(
    "multiplier and shift must be one for all channels",
    lambda m: max(m.graph.types[value].elements for node in _requantisations(m) for value in node.inputs[1:]),
    1,
)

RAISED_BITS = 20
"""Left shift of the operands of an addition in TensorFlow Lite (tensorflow/lite/kernels/add.cc)."""
SAME_SHAPES = Constraint(
    "both operands must have the result's shape",
    lambda m: [m.type(name).shape for name in ("x", "other")],
    lambda shapes: shapes[0] == shapes[1],
)
ADDITION_LIMITS = (
    ALL_INT8,
    SAME_SHAPES,
    one_of(
        "operands of an addition must be raised by 20 bits",
        lambda m: {m.operator(name, Requantize).left_shift for name in ("x", "other")},
        {RAISED_BITS},
    ),
    ALL_DOUBLE_ROUNDING,
    ONE_SCALE,
)
"""Constraints of `ADDITION` on an engine that computes it as TensorFlow Lite Micro does."""


def kernel_at_most(rows: int, columns: int) -> Constraint:
    """Constraint: the most rows and columns of the weights.

    Args:
        rows: most rows.
        columns: most columns.
    """
    return Constraint(
        f"the kernel must be at most {rows}x{columns}",
        lambda m: window_of(m).kernel,
        lambda v: v[0] <= rows and v[1] <= columns,
    )


def kernels_of(*allowed: int) -> Constraint:
    """Constraint: square kernels with one of some sizes.

    Args:
        allowed: rows, which are the columns too.
    """
    return Constraint(f"the kernel must be {_squares(allowed)}", lambda m: window_of(m).kernel, _square_of(allowed))


def strides_of(*allowed: int) -> Constraint:
    """Constraint: the same stride along rows and columns, one of some numbers.

    Args:
        allowed: the strides.
    """
    return Constraint(f"the strides must be {_squares(allowed)}", lambda m: window_of(m).stride, _square_of(allowed))


def _squares(sizes: Sequence[int]) -> str:
    return " or ".join(f"{size}x{size}" for size in sizes)


def _square_of(allowed: Sequence[int]) -> Callable[[tuple[int, int]], bool]:
    return lambda pair: pair[0] == pair[1] and pair[0] in allowed


def zero_padding_at_most(most: int) -> tuple[Constraint, ...]:
    """Constraint: padding of rows and columns with real zeros.

    Args:
        most: most rows or columns of padding on any side.
    """
    return (
        Constraint(
            f"padding must be of rows and columns, at most {most}",
            lambda m: m.operator("pad", Pad).before + m.operator("pad", Pad).after if m.has("pad") else (0,) * 8,
            lambda v: max(v) <= most and v[0] == v[3] == v[4] == v[7] == 0,
        ),
        Constraint(
            "padding must have the operand's zero point",
            lambda m: [window_of(m).padding_value, linear_of(m).input_zero_point],
            lambda v: v[0] == v[1],
        ),
    )


def sizes_below(limit: int) -> Constraint:
    """Constraint: rows, columns and channels of everything are below a limit.

    Args:
        limit: the first size that is too large.
    """
    return Constraint(
        f"every size must be below {limit:,}", lambda m: max(*m.type("x").shape, *m.result.shape), lambda v: v < limit
    )


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Window="LayerWindow")

document(__name__)
