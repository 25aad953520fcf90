"""Kernels that take bytes apart into their bits, and products with such."""

from __future__ import annotations

import numpy as np

from dovetail.ir.operators.bits import BitProduct, SpreadBits, ToBitPlanes, WriteBits
from dovetail.kernels.c import Lines, block, code, loop, product, total, variable
from dovetail.kernels.elements import Computed, Places, place_in, write_elements
from dovetail.kernels.kernel import Expression, KernelWriter, Turns, UnsupportedRegion, refuse, turns_of_family
from dovetail.kernels.registry import TURNS, kernel
from dovetail.kernels.scope import KernelScope

_BITS = 8


def _alone(scope: KernelScope) -> None:
    """Raise Unsupported where something is computed behind the bits."""
    if scope.tree:
        raise UnsupportedRegion(f"{scope.tree[0].operator.class_name} behind bits is not fused.")


def _word(array: str, first: str, step: int = 1) -> str:
    """C text of four bytes of an array as a word, from its place `first` on."""
    places = (total(first, at * step) for at in range(4))
    return " | ".join(f"(uint32_t){array}[{place}]{f' << {8 * at}' if at else ''}" for at, place in enumerate(places))


def _place(part: int, each: int) -> int:
    """The place in a row of the bits of a part of eight bytes."""
    return part // each * each * _BITS + part % each


@kernel(ToBitPlanes)
def _apart(scope: KernelScope, operator: ToBitPlanes) -> KernelWriter:
    _alone(scope)
    rows, depth = scope.type(0).shape
    group, row = operator.group, scope.result.elements // rows
    each, whole, rest = group // _BITS, depth // _BITS, depth % _BITS
    low, high = ("word_at(from)", "word_at(from + 4)") if depth % 4 == 0 else (_word("from", "0"), _word("from", "4"))

    def body() -> Lines:
        x = scope.operand(0, "input")
        to = f"to + part / {each} * {group} + part % {each}" if each > 1 else f"to + part * {group}"
        lines = [f"const uint8_t *from = {x} + row * {depth};", f"uint8_t *to = output + row * {row};"]
        if depth % group:
            lines.append(f"__builtin_memset(to, 0, {row});")
        part = [f"bits_apart({low}, {high}, {to}, {each});", f"from += {_BITS};"]
        lines += loop("part", whole, part) if whole else []
        if rest:
            lines += ["uint8_t last[8] = {0};", f"__builtin_memcpy(last, from, {rest});"]
            last = f"{_word('last', '0')}, {_word('last', '4')}"
            lines.append(f"bits_apart({last}, to + {_place(whole, each)}, {each});")
        return block(f"for (int32_t row = 0; row < {rows}; ++row)", lines)

    return scope.writer(body)


@kernel(SpreadBits)
def _spread(scope: KernelScope, operator: SpreadBits) -> KernelWriter:
    _alone(scope)
    (heads, rows, depth), group = scope.type(0).shape, operator.group
    row, width, each = scope.result.elements // (heads * rows), operator.groups * depth, group // _BITS
    nothing = ToBitPlanes(group).evaluate([np.full((1, width), operator.nothing, np.uint8)])
    number = f"({total('head', scope.start(operator.first))})" if operator.first else "head"
    head = f"{number} / {operator.heads}" if operator.heads > 1 else number

    def by_parts() -> Lines:
        """Bits of nothing everywhere, and then those of the row's own eights."""
        zeros = scope.constant(scope.node.output, "nothing", nothing.reshape(-1))
        one = [
            f"uint8_t *to = output + part / {each} * {group} + part % {each};",
            f"bits_apart(word_at(from) ^ 0x80808080u, word_at(from + 4) ^ 0x80808080u, to, {each});",
            f"from += {_BITS};",
        ]
        parts = loop("part", f"first + {depth // _BITS}", one, "first")
        whole = f"__builtin_memcpy(__builtin_assume_aligned(output, 4), {zeros}, {row});"
        return [f"const int32_t first = {product(head, depth // _BITS)};", whole, *parts]

    def by_bytes() -> Lines:
        """The row as bytes, and then its bits."""
        to = f"output + part / {each} * {group} + part % {each}"
        apart = f"bits_apart({_word('row', 'part * 8')}, {_word('row', 'part * 8 + 4')}, {to}, {each});"
        return [
            f"uint8_t row[{-(-width // group) * group}] = {{0}};",
            f"__builtin_memset(row, {operator.nothing}, {width});",
            *loop("channel", depth, [f"row[{product(head, depth)} + channel] = *from++ ^ 128u;"]),
            *loop("part", row // _BITS, [apart]),
        ]

    def body() -> Lines:
        lines = [f"const uint8_t *from = (const uint8_t *){scope.operand(0, 'input')};"]
        one = [*(by_bytes() if depth % _BITS else by_parts()), f"output += {row};"]
        all_rows = loop("turn", rows, one)
        return [*lines, *block(f"for (int32_t head = 0; head < {heads}; ++head)", all_rows)]

    return scope.writer(body)


@kernel(WriteBits, table=TURNS)
def _written_turns(scope: KernelScope) -> Turns:
    """A product, about, for each bit of the row: shifted, and put among the others of its byte."""
    return turns_of_family("WriteBits", {"product": _BITS * scope.type(1).elements, "call": 1})


@kernel(WriteBits, once=True)
def _write_bits(scope: KernelScope, operator: WriteBits) -> KernelWriter:
    """The writer of a WriteBits: eight neighbours at a time where the places are such, else bit after bit."""
    _alone(scope)
    rows, groups, _, each = scope.result.shape
    count, places = scope.type(2).elements, groups * each * _BITS
    written = [
        f"to[{bit * each}] = (uint8_t)((to[{bit * each}] & kept) | (((uint32_t)*from >> {bit} & 1u) << lane));"
        for bit in range(_BITS)
    ]
    walk = f"for (int32_t row = 0; row < {rows}; ++row, ++from, to += {places})"
    eight = block(walk, [f"bits_apart({_word('from', '0', rows)}, {_word('from', str(4 * rows), rows)}, to, {each});"])

    def body() -> Lines:
        bytes_, place = scope.operand(1, "bytes"), scope.operand(2, "place")
        kept = scope.overwritten == scope.node.inputs[0]
        lines = [] if kept else [f"__builtin_memcpy(output, {scope.operand(0, 'input')}, {rows * places}u);"]
        together = code(
            f"""
            int32_t same = at % {_BITS} == 0;
            while (same > 0 && same < {_BITS} && step + same < {count} && {place}[step + same] == at + same) {{
                ++same;
            }}
            if (same == {_BITS}) {{
                @eight
                step += {_BITS - 1};
                continue;
            }}
            """,
            eight=eight,
        )
        write = code(
            f"""
            const int32_t at = gathered({place}[{variable("step", count)}], {places});
            uint8_t *to = output + at / {each * _BITS} * {each * _BITS} + at / {_BITS} % {each};
            const uint8_t *from = {total(bytes_, product(variable("step", count), rows))};
            @together
            const uint32_t lane = (uint32_t)at & 7u;
            const uint32_t kept = ~(1u << lane);
            @single
            """,
            together=together if count >= _BITS else [],
            single=block(walk, written),
        )
        return [*lines, *(loop("step", count, write) if count > 1 else write)]

    return scope.writer(body)


@kernel(BitProduct)
def _product(scope: KernelScope, operator: BitProduct) -> KernelWriter:
    shape, (_, groups, _, each) = scope.type(0).shape, scope.type(1).shape
    group, depth = 8 * each, shape[-1]
    reach = depth * 255 * 255
    refuse(reach >= 1 << 31, f"sums of up to {reach} do not fit 32 bits.")

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
