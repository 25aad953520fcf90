"""Fully connected layers: a convolution of one tap."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from dovetail.kernels.convolution import ACTIVATIONS, Products, write_sums
from dovetail.kernels.epilogue import Scope
from dovetail.kernels.kernel import Unsupported
from dovetail.kernels.region import Region, require_dtype
from dovetail.kernels.window import Window
from dovetail.operators.linear import FullyConnected


def fully_connected_products(region: Region, scope: Scope) -> Products:
    """Those of a FullyConnected: a 1x1 convolution of an image one row high."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, FullyConnected)
    if region.pad is not None:
        raise Unsupported("a Pad before FullyConnected is not fused.")
    operator = anchor.operator
    require_dtype(region, region.source(), ACTIVATIONS)
    weights = scope.known(anchor.inputs[1])
    shape = region.graph.types[anchor.inputs[0]].shape
    pixels = prod(shape[:-1])
    window = Window(1, (1, pixels), shape[-1], (1, pixels), (1, 1), (1, 1), (1, 1), (0, 0))
    zero_points = (operator.input_zero_point, operator.weight_zero_point)
    return Products(window, weights[:, None, None, :], zero_points)


def write_fully_connected(region: Region, scope: Scope) -> Callable[[str], list[str]]:
    """The writer of a FullyConnected kernel."""
    return write_sums(region, scope, fully_connected_products(region, scope))
