"""Fixed-point functions of rows: log-softmax, 16-bit softmax, normalisation; one logarithm, reciprocal or root each."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.kernels.elements import Writer, operand, place_in, without_pad, write_elements
from dovetail.kernels.epilogue import Expression, Scope
from dovetail.kernels.region import Region
from dovetail.kernels.text import loop, total
from dovetail.operators.fixed import FixedLogSoftmax, FixedNormalise, FixedSoftmax16


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


def write_softmax_16(region: Region, scope: Scope) -> Writer:
    """The writer of a FixedSoftmax16; exponentials are computed for the sum, and again for each element."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, FixedSoftmax16)
    without_pad(region)
    operator, shape = anchor.operator, region.graph.types[anchor.inputs[0]].shape
    tables = dict(zip(("exponentials", "reciprocals"), operator.tables(), strict=True))
    factor = f"{operator.multiplier}, {operator.shift}"

    def power(at: str) -> str:
        scaled = f"requantize_double_any({at} - largest, {factor})"
        table = scope.constant(anchor.output, "exponentials", tables["exponentials"])
        return f"between_16({table}, clip({scaled} + 32767, -32768, 32767))"

    def row(places: Sequence[str]) -> list[str]:
        start = total(operand(region, scope, 0, "input"), place_in(shape, (*places, "0")))
        table = scope.constant(anchor.output, "reciprocals", tables["reciprocals"])
        return [
            f"const int16_t *from = {start};",
            "int32_t largest = from[0];",
            *loop("along", shape[-1], ["largest = from[along] > largest ? from[along] : largest;"], start=1),
            "int32_t sum = 0; /* Q16.15 */",
            *loop("along", shape[-1], [f"sum += {power('from[along]')};"]),
            "const int32_t zeros = leading_zeros((uint32_t)sum);",
            "const int32_t above_one = (int32_t)((((int64_t)sum << (zeros - 1)) + 0x2000) >> 14) - 0x18000;",
            f"const int32_t reciprocal = between_16({table}, clip(above_one, -32768, 32767));",
        ]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        product = f"(int64_t){power(f'from[{places[-1]}]')} * reciprocal + ((int64_t)1 << (30 - zeros))"
        lines = [f"const int32_t limited = clip_wide(({product}) >> (31 - zeros), 0, 32767);"]
        return lines, Expression("limited", "int32_t", 0, 32767)

    return write_elements(region, scope, element, row=row)


def write_normalisation(region: Region, scope: Scope) -> Writer:
    """The writer of a FixedNormalise."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, FixedNormalise)
    without_pad(region)
    shape, offset = region.graph.types[anchor.inputs[0]].shape, -anchor.operator.zero_point

    def row(places: Sequence[str]) -> list[str]:
        start = total(operand(region, scope, 0, "input"), place_in(shape, (*places, "0")))
        value = f"({total('from[along]', offset)})"
        return [
            f"const int8_t *from = {start};",
            "int32_t squares = 0;",
            *loop("along", shape[-1], [f"squares += {value} * {value};"]),
            "int32_t shift = 0;",
            "const int32_t inverse = inverse_root(squares, &shift);",
        ]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        scaled = f"requantize_double_any({total(f'from[{places[-1]}]', offset)}, inverse, shift + 7)"
        return [f"const int32_t limited = clip({scaled}, -128, 127);"], Expression("limited", "int32_t", -128, 127)

    return write_elements(region, scope, element, row=row)
