"""Bytes taken apart into bits for engines, eight at a time; products with these as an engine computes them."""

from __future__ import annotations

from dovetail.ir.operators.bits import BitProduct, ToBitPlanes
from dovetail.kernels.c import Lines, block, loop
from dovetail.kernels.elements import Computed, Places, place_in, write_elements
from dovetail.kernels.kernel import Expression, KernelWriter, UnsupportedRegion
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope


@kernel(ToBitPlanes)
def _apart(scope: KernelScope, operator: ToBitPlanes) -> KernelWriter:
    if scope.tree:
        raise UnsupportedRegion(f"{type(scope.tree[0].operator).__name__} behind bits taken apart is not fused.")
    rows, depth = scope.type(0).shape
    group, row = operator.group, scope.result.elements // rows
    each, whole, rest = group // 8, depth // 8, depth % 8

    def body() -> Lines:
        x = scope.operand(0, "input")
        to = f"to + part / {each} * {group} + part % {each}" if each > 1 else f"to + part * {group}"
        lines = [f"const uint8_t *from = {x} + row * {depth};", f"uint8_t *to = output + row * {row};"]
        if depth % group:
            lines.append(f"__builtin_memset(to, 0, {row});")
        lines += loop("part", whole, [f"bits_apart(from + part * 8, {to}, {each});"]) if whole else []
        if rest:
            last = whole // each * group + whole % each
            lines += ["uint8_t last[8] = {0};", f"__builtin_memcpy(last, from + {whole * 8}, {rest});"]
            lines.append(f"bits_apart(last, to + {last}, {each});")
        return block(f"for (int32_t row = 0; row < {rows}; ++row)", lines)

    return scope.writer(body)


@kernel(BitProduct)
def _product(scope: KernelScope, operator: BitProduct) -> KernelWriter:
    shape, (_, groups, _, each) = scope.type(0).shape, scope.type(1).shape
    group, depth = 8 * each, shape[-1]
    reach = depth * 255 * 255
    if reach >= 1 << 31:
        raise UnsupportedRegion(f"sums of up to {reach} do not fit 32 bits.")

    def element(places: Places) -> Computed:
        x, planes = scope.operand(0, "input"), scope.operand(1, "planes")
        bit = f"{planes}[(({places[-1]} * {groups} + depth / {group}) * 8 + bit) * {each} + depth % {group} / 8]"
        lines = [
            f"int32_t weight = -{operator.zero_point};",
            *loop("bit", 8, [f"weight += ({bit} >> depth % 8 & 1) << bit;"]),
            f"sum += {x}[{place_in(shape, (*places[:-1], 'depth'))}] * weight;",
        ]
        return ["int32_t sum = 0;", *loop("depth", depth, lines)], Expression("sum", "int32_t", -reach, reach)

    return write_elements(scope, element)
