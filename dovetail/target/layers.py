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
    """How a layer walks over its operand, rows and columns in all pairs; a dense layer is a convolution of 1x1."""

    kernel: tuple[int, int]
    """Rows and columns of the weights."""
    stride: tuple[int, int]
    dilation: tuple[int, int]
    before: tuple[int, int]
    """Rows and columns of padding above and to the left."""
    after: tuple[int, int]
    """... below and to the right."""
    padding_value: int
    """Value of the padding, as an element of the operand; without padding the operand's zero point."""


PIXEL = LayerWindow((1, 1), (1, 1), (1, 1), (0, 0), (0, 0), 0)
"""The window of what is computed pixel by pixel."""


@dataclass(frozen=True)
class Layer(LayerWindow):
    """A layer `requantised` matched; a dense layer is a convolution of 1x1 over an image of one column."""

    weights: Array
    """OHWI; depthwise 1HWC."""
    bias: Array
    """int32 [O], 0 where there is none; so are the next two."""
    multiplier: Array
    """int32 [O]: what a sum is multiplied by, in units of 2**-31."""
    shift: Array
    """int32 [O]: the power of two that goes with it, negative to shift right."""
    input_zero_point: int
    """Taken off every element of the operand; what stands for 0.0 in it."""
    output_zero_point: int
    """Added to every result behind the requantisation."""
    low: int
    """The least a result may be, zero point included."""
    high: int
    """The most."""


def linear_of(match: Match) -> Linear:
    """The layer's operator."""
    return match.operator("layer", Linear)


def _requantisations(match: Match) -> list[Node]:
    return [node for node in match.nodes.values() if isinstance(node.operator, Requantize)]


def padding_of(match: Match) -> Pad:
    """The padding of a layer's image, as an operator; of nothing where there is none."""
    nothing = Pad((0,) * 4, (0,) * 4, linear_of(match).input_zero_point)
    return match.operator("pad", Pad) if match.has("pad") else nothing


def window_of(match: Match) -> LayerWindow:
    """How a matched layer, requantised or not, walks over its operand."""
    node, pad = match.nodes["layer"], padding_of(match)
    window = node.operator.window([match.graph.types[name] for name in node.inputs]) or SlidingWindow((1, 1))
    padding = ((pad.before[1], pad.before[2]), (pad.after[1], pad.after[2]), int(pad.value))
    return LayerWindow(window.kernel, window.stride, window.dilation, *padding)


def taps_inside(window: LayerWindow, x: Shape, y: Shape) -> int:
    """Pairs of a pixel of a result and a tap of its window that lies in the image; shapes of operand and result."""
    pairs = 1
    axes = zip(sizes_of(x), sizes_of(y), window.kernel, window.stride, window.dilation, window.before, strict=False)
    for size, outputs, kernel, stride, dilation, before in axes:
        places = np.arange(outputs)[:, None] * stride + np.arange(kernel) * dilation - before
        pairs *= int(((places >= 0) & (places < size)).sum())
    return pairs


def layer_of(match: Match) -> Layer:
    """Everything about a matched layer but where it lies."""
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
    """int32 [3, 2]: multiplier and shift of the sum, of x and of other."""
    input_zero_point: int
    """Taken off the elements of x, before they are raised by `RAISED_BITS`."""
    other_zero_point: int
    """... off those of other."""
    output_zero_point: int
    low: int
    high: int


def addition_of(match: Match) -> Addition:
    """Everything about a matched addition but where it lies."""
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


def sizes_of(shape: Shape) -> tuple[int, int, int]:
    """Rows, columns and channels of one NHWC image; a vector (1 x channels) is an image of one pixel."""
    return (shape[1], shape[2], shape[3]) if len(shape) == 4 else (1, 1, shape[-1])


def range_of(name: str) -> Callable[[Match], tuple[int, int]]:
    """The least and the greatest of a constant, to be limited."""
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
"""For an engine of signed bytes."""
NARROW_WEIGHTS = one_of("weights must be int8 or narrower", lambda m: m.type("weights").dtype.text, *_SIGNED)
SYMMETRIC_WEIGHTS = one_of("weights must be symmetric (zero point 0)", lambda m: linear_of(m).weight_zero_point, 0)
SYMMETRIC_OPERAND = one_of("activations must be symmetric (zero point 0)", lambda m: linear_of(m).input_zero_point, 0)
ONE_IMAGE = Constraint(
    "the operand must be one image, or a matrix",
    lambda m: m.type("x").shape,
    lambda v: len(v) == 2 or (len(v) == 4 and v[0] == 1),
)
BATCH = one_of("the batch must be 1", lambda m: m.result.shape[0], 1)
"""Axes of images, and of a dense layer's rows."""
BATCH_OF_IMAGES = Constraint(
    BATCH.sentence, lambda m: m.result.shape[0] if len(m.result.shape) > 2 else 1, BATCH.accepts
)
"""Axes of images only: a dense layer may have any number of rows."""
ONE_ROW = one_of("a dense layer must have one row of operands", lambda m: m.type("x").shape[:-1], (1,))
ALL_INT8 = Constraint(
    "values must be int8",
    lambda m: [m.graph.types[value].dtype for value in (*m.graph.inputs, m.root)],
    lambda v: set(v) == {DType.INT8},
)
"""Every operand and the result, of any pattern."""
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
    """Rows and columns of the weights."""
    return Constraint(
        f"the kernel must be at most {rows}x{columns}",
        lambda m: window_of(m).kernel,
        lambda v: v[0] <= rows and v[1] <= columns,
    )


def kernels_of(*allowed: int) -> Constraint:
    """As many rows as columns of the weights, one of these numbers."""
    return Constraint(f"the kernel must be {_squares(allowed)}", lambda m: window_of(m).kernel, _square_of(allowed))


def strides_of(*allowed: int) -> Constraint:
    """The same stride along rows and columns, one of these."""
    return Constraint(f"the strides must be {_squares(allowed)}", lambda m: window_of(m).stride, _square_of(allowed))


def _squares(sizes: Sequence[int]) -> str:
    return " or ".join(f"{size}x{size}" for size in sizes)


def _square_of(allowed: Sequence[int]) -> Callable[[tuple[int, int]], bool]:
    return lambda pair: pair[0] == pair[1] and pair[0] in allowed


def zero_padding_at_most(most: int) -> tuple[Constraint, ...]:
    """Padding of rows and columns on any side, of real zeros."""
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
    """Everything's extent."""
    return Constraint(
        f"every size must be below {limit:,}", lambda m: max(*m.type("x").shape, *m.result.shape), lambda v: v < limit
    )


if not TYPE_CHECKING:
    __getattr__ = names(__name__, Window="LayerWindow")
