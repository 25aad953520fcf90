"""Sums of products in float32: convolutions, dense layers and matrix products, one sum after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dovetail.graph.types import DType
from dovetail.kernels.elements import Writer, operand, place_in, without_pad, write_elements
from dovetail.kernels.epilogue import Expression, Scope
from dovetail.kernels.kernel import Unsupported, accumulate_type
from dovetail.kernels.narrow import looked_up, packed
from dovetail.kernels.region import Region
from dovetail.kernels.text import atom, loop, product, total
from dovetail.kernels.window import COLUMN, ROW, tap_loop, variable, window_of, wrapped
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.operators.movement import Pad


@dataclass(frozen=True)
class _Weights:
    """The weights of a float layer as C text: floats, or integers whose sums are scaled afterwards."""

    region: Region
    scope: Scope

    @property
    def dtype(self) -> DType:
        """Of an element."""
        assert self.region.anchor is not None
        return self.region.graph.types[self.region.anchor.inputs[1]].dtype

    def at(self, start: str, offset: str) -> str:
        """The element `offset` after the place `start`."""
        assert self.region.anchor is not None
        place = total(start, offset)
        if self.dtype.bits >= 8:
            text = f"{operand(self.region, self.scope, 1, 'weights')}[{place}]"
            return text if self.dtype is DType.FLOAT32 else f"(float){text}"
        array = packed(self.scope.known(self.region.anchor.inputs[1]).reshape(-1), self.dtype.bits)
        name = self.scope.constant(self.region.anchor.output, "weights", array)
        return f"(float){looked_up(name, self.dtype.bits, place)}"


PIXEL = ("image", "row", "column", "channel")
"""Loop variables of an NHWC result."""


def write_float_convolution(region: Region, scope: Scope) -> Writer:
    """The writer of a float Conv2d or DepthwiseConv2d; a Pad with zeros before it is folded in."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, (Conv2d, DepthwiseConv2d))
    if region.pad is not None and isinstance(region.pad.operator, Pad) and region.pad.operator.value != 0:
        raise Unsupported("only a Pad with zeros is fused into a float convolution.")
    operator, types = anchor.operator, region.graph.types
    kernel = types[anchor.inputs[1]].shape
    window = window_of(region, (kernel[1], kernel[2]), operator.stride, operator.dilation)
    depthwise = isinstance(operator, DepthwiseConv2d)
    outputs, weights = types[anchor.output].shape[3], _Weights(region, scope)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        image = scope.input(region.source(), "input")
        channel = places[3]
        first = f"{operand(region, scope, 2, 'bias')}[{channel}]" if len(anchor.inputs) > 2 else "0.0f"
        rows, columns = variable("kernel_row", kernel[1]), variable("kernel_column", kernel[2])
        top = total("top", product(rows, operator.dilation[ROW]))
        left = total("left", product(columns, operator.dilation[COLUMN]))
        tap = wrapped(total(product(rows, kernel[2]), columns))
        if depthwise:
            share = outputs // window.channels
            source = window.input_index(top, left, channel if share == 1 else f"{channel} / {share}")
            lines = [f"sum += {image}[{source}] * {weights.at(product(tap, outputs), channel)};"]
        else:
            depth, share = kernel[3], outputs // (window.channels // kernel[3])
            group = "0" if kernel[3] == window.channels else f"{channel} / {share} * {depth}"
            tap = wrapped(total(product(channel, kernel[1] * kernel[2]), tap))
            lines = [
                f"const float *from = {image} + {window.input_index(top, left, group)};",
                *loop("depth", depth, [f"sum += from[depth] * {weights.at(product(tap, depth), 'depth')};"]),
            ]
        lines = tap_loop("kernel_column", window.first(COLUMN, True), window.end(COLUMN, True), lines)
        lines = tap_loop("kernel_row", window.first(ROW, True), window.end(ROW, True), lines)
        lines = ["{", *lines, "}"] if not depthwise and lines[0].startswith("const") else lines
        return [*window.clamps(), f"float sum = {first};", *lines], Expression("sum", "float")

    return write_elements(region, scope, element, PIXEL)


def write_float_dense(region: Region, scope: Scope) -> Writer:
    """The writer of a float FullyConnected."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, FullyConnected)
    without_pad(region)
    shape = region.graph.types[anchor.inputs[0]].shape
    depth, weights = shape[-1], _Weights(region, scope)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        first = f"{operand(region, scope, 2, 'bias')}[{places[-1]}]" if len(anchor.inputs) > 2 else "0.0f"
        row = wrapped(place_in(shape[:-1], places[:-1])) if prod(shape[:-1]) > 1 else "0"
        lines = [
            f"const float *from = {total(x, product(row, depth))};",
            f"float sum = {first};",
            *loop("depth", depth, [f"sum += from[depth] * {weights.at(product(places[-1], depth), 'depth')};"]),
        ]
        return lines, Expression("sum", "float")

    return write_elements(region, scope, element)


def write_matrix_product(region: Region, scope: Scope) -> Writer:
    """The writer of a MatrixProduct, float or integer."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, MatrixProduct)
    without_pad(region)
    operator = anchor.operator
    a_kind, b_kind = (region.graph.types[value] for value in anchor.inputs)
    left, right, depth = a_kind.shape, b_kind.shape, a_kind.shape[-1]
    real = a_kind.dtype is DType.FLOAT32
    reach = 0 if real else depth * prod(
        max(kind.dtype.high - zero, zero - kind.dtype.low)
        for kind, zero in ((a_kind, operator.left_zero_point), (b_kind, operator.right_zero_point))
    )
    held = "float" if real else accumulate_type(-reach, reach)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        a, b = operand(region, scope, 0, "input"), operand(region, scope, 1, "other")
        inner = variable("depth", depth)
        x = place_in(left, (*places[:-1], inner))
        y = place_in(right, (*places[:-2], inner, places[-1]))
        terms = (total(f"{a}[{x}]", -operator.left_zero_point), total(f"{b}[{y}]", -operator.right_zero_point))
        step = f"sum += {atom(terms[0])} * {atom(terms[1])};"
        start = "0.0f" if real else "0"
        return [f"{held} sum = {start};", *loop("depth", depth, [step])], Expression("sum", held, -reach, reach)

    return write_elements(region, scope, element)
