"""Convolutions and dense layers of floats, and products of matrices: one sum after another."""

from __future__ import annotations

from math import prod

from dovetail.ir.operators.linear import Conv2d, Convolution, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.types import DType
from dovetail.kernels.c import atom, loop, product, total, variable, wrapped
from dovetail.kernels.elements import PIXEL, Computed, Places, place_in, write_elements
from dovetail.kernels.kernel import Expression, KernelWriter, accumulate_type, refuse
from dovetail.kernels.registry import FLOAT_FAMILIES, kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import looked_up, packed
from dovetail.kernels.window import COLUMN, ROW, Nest, window_of


def _weight(scope: KernelScope, start: str, offset: str) -> str:
    """The weight `offset` after the place `start`: a float, or an integer whose sum is scaled afterwards."""
    place, dtype = total(start, offset), scope.type(1).dtype
    if dtype.bits >= 8:
        text = f"{scope.operand(1, 'weights')}[{place}]"
        return text if dtype is DType.FLOAT32 else f"(float){text}"
    array = packed(scope.known(scope.node.inputs[1]).reshape(-1), dtype.bits)
    return f"(float){looked_up(scope.constant(scope.node.output, 'weights', array), dtype.bits, place)}"


def _bias(scope: KernelScope, channel: str) -> str:
    biased = len(scope.node.inputs) > 2
    return f"float sum = {scope.operand(2, 'bias') + f'[{channel}]' if biased else '0.0f'};"


@kernel(Conv2d, DepthwiseConv2d, table=FLOAT_FAMILIES)
def _float_convolution(scope: KernelScope, operator: Convolution) -> KernelWriter:
    """The writer of a float Conv2d or DepthwiseConv2d; a Pad with zeros before it is folded in."""
    refuse(scope.pad_value != 0, "only a Pad with zeros is fused into a float convolution.")
    (_, rows, columns, depth), outputs = scope.type(1).shape, scope.result.shape[3]
    nest = Nest(scope, window_of(scope))
    channels, depthwise = nest.window.channels, operator.is_channelwise

    def element(places: Places) -> Computed:
        image, channel = scope.input(scope.source(), "input"), places[3]
        start = _bias(scope, channel)
        row, column = nest.tap(ROW), nest.tap(COLUMN)
        below = nest.below(ROW, row), nest.below(COLUMN, column)
        tap = wrapped(total(product(row, columns), column))
        if depthwise:
            share = outputs // channels
            source = nest.input_index(*below, channel if share == 1 else f"{channel} / {share}")
            weight = _weight(scope, product(tap, outputs), channel)
            lines = [f"sum += {image}[{source}] * {weight};"]
        else:
            share = outputs // (channels // depth)
            group = "0" if depth == channels else f"{channel} / {share} * {depth}"
            tap = wrapped(total(product(channel, rows * columns), tap))
            weight = _weight(scope, product(tap, depth), "depth")
            step = f"sum += from[depth] * {weight};"
            pointer = f"const float *from = {image} + {nest.input_index(*below, group)};"
            lines = [pointer, *loop("depth", depth, [step])]
        lines = nest.rows(nest.columns(lines))
        lines = ["{", *lines, "}"] if not depthwise and lines[0].startswith("const") else lines
        return [*nest.clamps(), start, *lines], Expression("sum", "float")

    return write_elements(scope, element, PIXEL)


@kernel(FullyConnected, table=FLOAT_FAMILIES)
def _float_dense(scope: KernelScope, operator: FullyConnected) -> KernelWriter:
    shape = scope.type(0).shape
    depth = shape[-1]

    def element(places: Places) -> Computed:
        x = scope.operand(0, "input")
        start = _bias(scope, places[-1])
        row = wrapped(place_in(shape[:-1], places[:-1])) if prod(shape[:-1]) > 1 else "0"
        weight = _weight(scope, product(places[-1], depth), "depth")
        lines = [
            f"const float *from = {total(x, product(row, depth))};",
            start,
            *loop("depth", depth, [f"sum += from[depth] * {weight};"]),
        ]
        return lines, Expression("sum", "float")

    return write_elements(scope, element)


@kernel(MatrixProduct)
def _matrix_product(scope: KernelScope, operator: MatrixProduct) -> KernelWriter:
    a_kind, b_kind = scope.type(0), scope.type(1)
    left, right, depth = a_kind.shape, b_kind.shape, a_kind.shape[-1]
    real = a_kind.dtype is DType.FLOAT32
    farthest = prod(
        max(kind.dtype.high - zero, zero - kind.dtype.low)
        for kind, zero in ((a_kind, operator.left_zero_point), (b_kind, operator.right_zero_point))
        if not real
    )
    reach, wide = 0 if real else depth * farthest, "" if real or farthest < 1 << 31 else "(int64_t)"
    held = "float" if real else accumulate_type(-reach, reach)

    def element(places: Places) -> Computed:
        a, b = scope.operand(0, "input"), scope.operand(1, "other")
        inner = variable("depth", depth)
        x = place_in(left, (*places[:-1], inner))
        y = place_in(right, (*places[:-2], inner, places[-1]))
        terms = (total(f"{a}[{x}]", -operator.left_zero_point), total(f"{b}[{y}]", -operator.right_zero_point))
        step = f"sum += {wide}{atom(terms[0])} * {atom(terms[1])};"
        start = "0.0f" if real else "0"
        return [f"{held} sum = {start};", *loop("depth", depth, [step])], Expression("sum", held, -reach, reach)

    return write_elements(scope, element)
