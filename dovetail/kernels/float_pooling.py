"""Pools of float32 images."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.kernels.elements import Writer, operand, without_pad, write_elements
from dovetail.kernels.epilogue import Expression, Scope
from dovetail.kernels.float_linear import PIXEL
from dovetail.kernels.region import Region
from dovetail.kernels.text import total
from dovetail.kernels.window import COLUMN, ROW, tap_loop, variable, window_of
from dovetail.operators.pooling import AveragePool2d, MaxPool2d


def write_float_pooling(region: Region, scope: Scope) -> Writer:
    """The writer of a float MaxPool2d or AveragePool2d."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, (MaxPool2d, AveragePool2d))
    without_pad(region)
    operator = anchor.operator
    window = window_of(region, operator.kernel, operator.stride, own=operator.padding)
    largest = isinstance(operator, MaxPool2d)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        image = operand(region, scope, 0, "input")
        rows, columns = variable("kernel_row", operator.kernel[ROW]), variable("kernel_column", operator.kernel[COLUMN])
        source = window.input_index(total("top", rows), total("left", columns), places[3])
        step = f"best = larger({image}[{source}], best);" if largest else f"sum += {image}[{source}];"
        lines = tap_loop("kernel_column", window.first(COLUMN, True), window.end(COLUMN, True), [step])
        lines = tap_loop("kernel_row", window.first(ROW, True), window.end(ROW, True), lines)
        if largest:
            return [*window.clamps(), "float best = -__builtin_inff();", *lines], Expression("best", "float")
        sides = [f"({window.end(axis, True)} - {window.first(axis, True)})" for axis in (ROW, COLUMN)]
        count = f"const int32_t count = {' * '.join(sides)};"
        return [*window.clamps(), count, "float sum = 0.0f;", *lines], Expression("sum / (float)count", "float")

    return write_elements(region, scope, element, PIXEL)
