"""Dilated convolutions for engines that have none: interleaved undilated ones, computed as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dovetail.ir.graph import Graph
from dovetail.ir.operators.linear import Convolution
from dovetail.ir.operators.movement import Pad, Reshape, Slice, Transpose
from dovetail.ir.pattern import apply, constant, maybe, operand, rest
from dovetail.ir.rules import Rule, RuleMatch, rewriting
from dovetail.legalize.matrices import REQUANTISED_FIRST
from dovetail.legalize.requantisation import Accepts, accepted

_IMAGE, _WEIGHTS, _BIAS = operand("image"), constant("weights"), rest("bias")
_PAD = maybe(Pad, _IMAGE, alone=True)
_LAYER = apply(
    Convolution, _PAD, _WEIGHTS, _BIAS, having=lambda layer: layer.dilation != (1, 1) and layer.stride == (1, 1)
)


def without_dilation(chooses: Accepts) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen convolution of stride 1 with taps `d` apart reads every d-th row and column only. The images
    of all such rows and columns, one below the other, go through one convolution without dilation; what its windows
    over two of them give is left out, and the rest put back where it belongs, behind the requantisation. Exact.

    Args:
        chooses: of types and layer.
    """

    def interleaved(at: RuleMatch) -> str:
        operator, result, x = at[_LAYER], at.type(_LAYER).shape, at.root.inputs[0]
        (down, right), (_, height, width, depth) = operator.dilation, at.type(x).shape
        kernel = at.type(_WEIGHTS).shape[1:3]
        rows, columns = -(-height // down), -(-width // right)
        image = _grown(at, (rows * down - height, columns * right - width))
        apart = at.add(Reshape((rows, down, columns, right, depth)), image, stem=x)
        turned = at.add(Transpose((1, 3, 0, 2, 4)), apart, stem=x)
        tall = at.add(Reshape((1, down * right * rows, columns, depth)), turned, stem=x)
        if kernel[0] > 1:  # so that each image gives as many rows as it has; what they hold is left out
            tall = at.add(Pad((0,) * 4, (0, kernel[0] - 1, 0, 0), 0), tall, stem=x)
        sums = at.add(replace(operator, dilation=(1, 1)), tall, *at.root.inputs[1:])
        kept = (rows - kernel[0] + 1, columns - kernel[1] + 1)
        whole = (down, right, rows, kept[1], result[3])
        parts = at.add(Reshape(whole), sums)
        inner = at.add(Slice((0,) * 5, (down, right, kept[0], *whole[3:]), (1,) * 5), parts)
        back = at.add(Transpose((2, 0, 3, 1, 4)), inner)
        joined = at.add(Reshape((1, kept[0] * down, kept[1] * right, result[3])), back)
        exact = at.type(joined).shape == result
        return joined if exact else at.add(Slice((0,) * 4, result, (1,) * 4), joined)

    def is_one_image(at: RuleMatch) -> bool:
        return at.type(at.root.inputs[0]).shape[0] == 1

    return rewriting(Rule(_LAYER, interleaved, (is_one_image, accepted(chooses, _LAYER))), REQUANTISED_FIRST)


def _grown(at: RuleMatch, more: tuple[int, int]) -> str:
    """The layer's image with more rows below and columns to the right, which no result that is kept reads."""
    if not any(more):
        return at.root.inputs[0]
    if not at.has(_PAD):
        return at.add(Pad((0,) * 4, (0, *more, 0), at[_LAYER].input_zero_point), _IMAGE, stem=at[_IMAGE])
    first, rows, columns, last = at[_PAD].after
    return at.add(replace(at[_PAD], after=(first, rows + more[0], columns + more[1], last)), _IMAGE, like=_PAD)
