"""Fixed-point log-softmax: differences and their exponentials from tables, one logarithm per row."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.kernels.elements import Writer, operand, place_in, without_pad, write_elements
from dovetail.kernels.epilogue import Expression, Scope
from dovetail.kernels.region import Region
from dovetail.kernels.text import loop, total
from dovetail.operators.fixed import FixedLogSoftmax


def write_log_softmax(region: Region, scope: Scope) -> Writer:
    """The writer of a FixedLogSoftmax."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, FixedLogSoftmax)
    without_pad(region)
    operator, shape = anchor.operator, region.graph.types[anchor.inputs[0]].shape
    scaled, powers = operator.tables()
    back = f"{operator.back_multiplier}, {operator.back_shift}"

    def row(places: Sequence[str]) -> list[str]:
        start = total(operand(region, scope, 0, "input"), place_in(shape, (*places, "0")))
        table = scope.constant(anchor.output, "exponentials", powers)
        return [
            f"const int8_t *from = {start};",
            "int32_t largest = from[0];",
            *loop("along", shape[-1], ["largest = from[along] > largest ? from[along] : largest;"], start=1),
            "int32_t sum = 0; /* Q12.19 */",
            *loop("along", shape[-1], [f"sum += {table}[largest - from[along]];"]),
            "const int32_t logarithm = fixed_logarithm(sum);",
            f"const int32_t reach = requantize_double_any(wrap_add(logarithm, -2147483647 - 1), {back});",
            f"const int32_t limit = reach > {operator.diff_min - 1} ? reach : {operator.diff_min - 1};",
        ]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        table = scope.constant(anchor.output, "differences", scaled)
        raised = f"clip(round_shift({table}[below] - logarithm, 22) + 127, -128, 127)"
        lines = [
            f"const int32_t below = largest - from[{places[-1]}];",
            f"const int32_t limited = -below > limit ? {raised} : -128;",
        ]
        return lines, Expression("limited", "int32_t", -128, 127)

    return write_elements(region, scope, element, row=row)
