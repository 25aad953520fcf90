"""Fixed-point softmax: exponentials from a table, one division per row."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from dovetail.kernels.epilogue import Expression, Scope, finish
from dovetail.kernels.kernel import Unsupported, c_type, declarations
from dovetail.kernels.region import Region
from dovetail.kernels.text import block, function, loop, product, total
from dovetail.kernels.window import anchored, variable
from dovetail.operators.activation import FixedSoftmax


def _row(region: Region, scope: Scope, operator: FixedSoftmax, size: int) -> list[str]:
    """The statements of one row, `from` pointing at its first element."""
    anchor = region.anchor
    assert anchor is not None
    table = scope.constant(anchor.output, "exponentials", operator.table())
    low, high = operator.dtype.low, operator.dtype.high
    channel = variable("channel", size)
    rows = prod(region.output_shape) // size
    index = anchored(region.output_shape, total(variable("place", rows), channel), channel)
    value = Expression("limited", "int32_t", low, high)
    power = f"{table}[largest - from[{channel}]]"
    share = f"exponent > 31 ? 0 : round_shift(multiply_high(reciprocal, {power}), exponent)"
    store = [f"const int32_t share = {share};", f"const int32_t limited = clip({total('share', low)}, {low}, {high});"]
    store += finish(scope, region.tree, index, (anchor.output, value))
    return [
        "int32_t largest = from[0];",
        *loop("channel", size, [f"largest = from[{channel}] > largest ? from[{channel}] : largest;"], start=1),
        "uint32_t sum = 0; /* Q12.19 */",
        *loop("channel", size, [f"sum += (uint32_t)round_shift({power}, 12);"]),
        "int32_t headroom = 0;",
        *block("while (sum < 0x80000000u)", ["sum *= 2u;", "++headroom;"]),
        "const int32_t reciprocal = softmax_reciprocal(sum);",
        f"const int32_t exponent = {12 + 31 - operator.dtype.bits} - headroom;",
        *loop("channel", size, store),
    ]


def write_softmax(region: Region, scope: Scope) -> Callable[[str], list[str]]:
    """The writer of a FixedSoftmax kernel."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, FixedSoftmax)
    operator = anchor.operator
    if region.pad is not None:
        raise Unsupported("a Pad before FixedSoftmax is not fused.")
    if operator.diff_min > 0:
        raise Unsupported(f"diff_min is {operator.diff_min}, it must not be positive.")
    kind = region.graph.types[anchor.inputs[0]]
    size, rows = kind.shape[-1], prod(kind.shape[:-1])

    def write(name: str) -> list[str]:
        image = scope.input(anchor.inputs[0], "input")
        head = [f"const int32_t place = {product('row', size)};"] if rows > 1 else []
        start = total(image, variable("place", rows))
        lines = [*head, f"const {c_type(kind.dtype)} *from = {start};", *_row(region, scope, operator, size)]
        return function(f"static void {name}", declarations(scope.parameters()), loop("row", rows, lines))

    return write
