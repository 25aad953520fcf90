"""What becomes one OpenCL kernel: a layer with what is behind it, also a residual addition; pools; the pointwise."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.target import apply, constant, maybe, operand
from dovetail.target.pattern import Pattern

_LAYERS: tuple[tuple[str, type[Operator]], ...] = (
    ("conv", Conv2d), ("depthwise", DepthwiseConv2d), ("dense", FullyConnected),
)  # fmt: skip
_POOLS: tuple[tuple[str, type[Operator]], ...] = (
    ("max_pool", MaxPool2d), ("average_pool", AveragePool2d), ("sum_pool", SumPool2d),
)  # fmt: skip

_MOVES: tuple[tuple[str, type[Operator]], ...] = (("transpose", Transpose), ("slice", Slice), ("pad", Pad))
MOST_PARTS = 8
"""Operands a concatenation on the device may have."""


def patterns() -> Iterator[tuple[str, Pattern]]:
    """Names and patterns, those with more operators first."""
    layers = list(_layers())
    for name, layer in layers:
        yield f"{name}_add", _sum(_rescaled(layer), operand("other"))
        yield f"add_{name}", _sum(operand("other"), _rescaled(layer))
    for name, layer in layers:
        yield name, maybe(Lookup, _rescaled(layer), constant("table"), name="lookup")
    for name, kind in _POOLS:
        pooled = _rescaled(apply(kind, operand("x"), name="layer"))
        yield name, maybe(Lookup, pooled, constant("table"), name="lookup")
    for name, kind in _MOVES:
        yield name, apply(kind, operand("x"), name="layer")
    for count in range(2, MOST_PARTS + 1):
        yield f"concat_{count}", apply(Concat, *(operand(f"part_{number}") for number in range(count)), name="layer")
    yield "add", _sum(operand("a"), operand("b"))
    shifted = [maybe(Offset, operand(name), name=f"{name}_offset") for name in "ab"]
    yield "binary", _rescaled(apply(Binary, *shifted, name="binary"))
    yield "lookup", apply(Lookup, operand("x"), constant("table"))
    parameters = (constant("multiplier"), constant("shift"))
    yield "requantize", maybe(Clip, apply(Requantize, operand("x"), *parameters), name="clip")


def _layers() -> Iterator[tuple[str, Pattern]]:
    """Sums of products, with a bias or without, over a padded image or not."""
    for name, kind in _LAYERS:
        image = operand("x") if kind is FullyConnected else maybe(Pad, operand("x"), name="pad")
        for stem, more in ((name, (constant("bias"),)), (f"{name}_no_bias", ())):
            yield stem, apply(kind, image, constant("weights"), *more, name="layer")


def _rescaled(inner: Pattern) -> Pattern:
    """Requantised and clipped, each if it is."""
    scaled = maybe(Requantize, inner, constant("multiplier"), constant("shift"), name="requantize")
    return maybe(Clip, scaled, name="clip")


def _sum(left: Pattern, right: Pattern) -> Pattern:
    """A residual addition: both sides brought to one scale (constants have been), and their sum to the result's."""
    sides = (
        maybe(Requantize, side, constant(f"{name}_multiplier"), constant(f"{name}_shift"), name=f"{name}_scaled")
        for side, name in ((left, "left"), (right, "right"))
    )
    added = apply(Add, *sides, name="sum")
    parameters = (constant("sum_multiplier"), constant("sum_shift"))
    return maybe(Clip, apply(Requantize, added, *parameters, name="sum_scaled"), name="sum_clip")
