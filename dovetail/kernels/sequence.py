"""Kernels of networks that read a sequence step by step: a row written into a buffer, attention to live places."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from dovetail.ir.operators.sequence import FRACTION, Attention, FixedAttention, WriteRow
from dovetail.kernels.c import Lines, c_type, code, indent, loop, product, real, total, variable
from dovetail.kernels.elements import place_in
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, KernelWriter, UnsupportedRegion, refuse
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope

_WRITTEN_OUT = 16
"""Most elements of a head whose products are written out, so that they stay in registers."""


@kernel(WriteRow, once=True)
def _write_row(scope: KernelScope, operator: WriteRow) -> KernelWriter:
    if scope.tree:
        raise UnsupportedRegion(f"{scope.tree[0].operator.class_name} behind a row that is written is not fused.")
    shape, axis, nbytes = scope.result.shape, operator.axis, scope.result.dtype.numpy.itemsize
    outer, size, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])

    def body() -> Lines:
        row, place = scope.operand(1, "row"), scope.operand(2, "place")
        lines = Lines()
        if scope.overwritten != scope.node.inputs[0]:
            whole = prod(shape) * nbytes
            lines.append(f"__builtin_memcpy(output, {scope.operand(0, 'input')}, {whole}u);")
        to = total("output", product(variable("outer", outer), size * inner), product("at", inner))
        source = total(row, product(variable("outer", outer), inner))
        copied = f"__builtin_memcpy({to}, {source}, {inner * nbytes}u);"
        return [*lines, f"const int32_t at = gathered({place}[0], {size});", *loop("outer", outer, [copied])]

    return scope.writer(body)


def _dot(depth: int) -> Lines:
    """The statements that multiply a query with a key."""
    if depth > _WRITTEN_OUT:
        return loop("depth", depth, ["score += query[depth] * key[depth];"])
    return [f"score += {' + '.join(f'query_{at} * key[{at}]' for at in range(depth))};"]


def _query(kind: str, depth: int, zero_point: int) -> Lines:
    """The statements that read a query."""
    if depth > _WRITTEN_OUT:
        read = f"query[depth] = {total('from[depth]', -zero_point)};"
        return [f"{kind} query[{depth}];", *loop("depth", depth, [read])]
    return [f"const {kind} query_{at} = {total(f'from[{at}]', -zero_point)};" for at in range(depth)]


def _sums(kind: str, width: int) -> Lines:
    """Declarations of the sums of weighted values."""
    zero = "0.0f" if kind == "float" else "0"
    if width > _WRITTEN_OUT:
        return [f"{kind} sums[{width}] = {{{zero}}};"]
    return [f"{kind} sum_{at} = {zero};" for at in range(width)]


def _weighted(width: int) -> Lines:
    """The statements that add a weighted value to the sums."""
    if width > _WRITTEN_OUT:
        return loop("channel", width, ["sums[channel] += weight * value[channel];"])
    return [f"sum_{at} += weight * value[{at}];" for at in range(width)]


@dataclass(frozen=True)
class _Weighting:
    """How scores become weights, and weighted sums elements of the result."""

    kind: str
    """C type of scores and sums."""
    lowest: str
    """C text of a number below every score."""
    weight: Lines
    """Statements that make `weight` of `distance`, how far a score is below the largest, and add it to `all`."""
    ending: Lines
    """Statements between the sums and the elements."""
    element: str
    """C text of an element, made of {sum}."""
    value: Expression
    """The element, which is called `attended`."""
    zero_point: int = 0
    """Taken off queries."""


def _attention(scope: KernelScope, how: _Weighting) -> KernelWriter:
    """The writer of attention: each head of each row by itself, from the first live place to the last."""
    rows, places, masks = scope.type(0).shape[1], scope.type(1).shape[1], scope.type(3).shape[0]

    def body() -> Lines:
        heads, live, row = _heads_of(scope, how), scope.operand(3, "live"), variable("row", rows)
        limits = code(
            f"""
            const uint8_t *const lives = {total(live, product(row, places)) if masks > 1 else live};
            int32_t first = 0;
            int32_t last = {places};
            while (first < last && lives[first] == 0u) {{
                ++first;
            }}
            while (last > first && lives[last - 1] == 0u) {{
                --last;
            }}
            """
        )
        return [f"{how.kind} scores[{places}];", *loop("row", rows, [*limits, *heads])]

    return scope.writer(body)


def _heads_of(scope: KernelScope, how: _Weighting) -> Lines:
    """The loop over the heads of a row."""
    (heads, rows, depth), (groups, places, _), width = scope.type(0).shape, scope.type(1).shape, scope.type(2).shape[2]
    held, group = c_type(scope.type(0).dtype), "head" if heads == groups else f"head / {heads // groups}"
    q, k, v = (scope.operand(at, name) for at, name in enumerate(("queries", "keys", "values")))
    return code(
        f"""
        for (int32_t head = 0; head < {heads}; ++head) {{
            const {held} *const from = {total(q, place_in(scope.type(0).shape, ("head", variable("row", rows), "0")))};
            const {held} *key = {total(k, product(group, places * depth), product("first", depth))};
            const {held} *value = {total(v, product(group, places * width), product("first", width))};
            @query
            {how.kind} largest = {how.lowest};
            for (int32_t place = first; place < last; ++place, key += {depth}) {{
                if (lives[place] != 0u) {{
                    {how.kind} score = 0;
                    @dot
                    scores[place] = score;
                    largest = score > largest ? score : largest;
                }}
            }}
            {how.kind} all = 0;
            @sums
            for (int32_t place = first; place < last; ++place, value += {width}) {{
                if (lives[place] != 0u) {{
                    const {how.kind} distance = largest - scores[place];
                    @weight
                }}
            }}
            @ending
            @channels
        }}
        """,
        query=_query(how.kind, depth, how.zero_point),
        dot=_dot(depth),
        sums=_sums(how.kind, width),
        weight=[line for part in how.weight for line in (_weighted(width) if part == _TAKEN else [part])],
        ending=how.ending,
        channels=_channels(scope, how, width),
    )


def _channels(scope: KernelScope, how: _Weighting, width: int) -> Lines:
    """The statements that store a head's result."""
    row = variable("row", scope.type(0).shape[1])

    def channel(at: str) -> Lines:
        text = how.element.format(sum=f"sums[{at}]" if width > _WRITTEN_OUT else f"sum_{at}")
        stored = finish(scope, lambda shape: place_in(shape, ("head", row, at)), how.value)
        return [f"const {how.kind} attended = {text};", *stored]

    if width > _WRITTEN_OUT:
        return loop("channel", width, channel("channel"))
    return [line for at in range(width) for line in ("{", *indent(channel(str(at))), "}")]


_TAKEN = "@taken"
"""Stands for the statements that add a weighted value to the sums."""


@kernel(Attention)
def _float_attention(scope: KernelScope, operator: Attention) -> KernelWriter:
    weight = [f"const float weight = exponential(-distance * {real(operator.scale)});", "all += weight;", _TAKEN]
    ending = ["const float share = last > first ? 1.0f / all : 0.0f;"]
    refuse(operator.scale <= 0, f"the scale {operator.scale} of attention must be positive.")
    value = Expression("attended", "float")
    return _attention(scope, _Weighting("float", "-3.402823466e38f", weight, ending, "{sum} * share", value))


@kernel(FixedAttention)
def _fixed_attention(scope: KernelScope, operator: FixedAttention) -> KernelWriter:
    places, zero = scope.type(1).shape[1], operator.value_zero_point
    table = scope.constant(scope.node.output, "exponentials", operator.table(places).astype(np.uint16))
    index = f"(uint32_t)distance * {operator.multiplier}u >> {operator.shift}"
    weight = [
        f"if (distance < {operator.farthest(places)}) {{",
        f"    const int32_t weight = (int32_t){table}[{index}];",
        "    all += weight;",
        _TAKEN,
        "}",
    ]
    ending = code(
        f"""
        const uint32_t whole = all == 0 ? 1u : (uint32_t)all;
        const int32_t room = leading_zeros(whole) - 1;
        const int32_t reciprocal = 2147483647 / (int32_t)(whole << room >> 15);
        const int32_t back = {31 + 15 - FRACTION} - room;
        """
    )
    centred = f"({{sum}} - all * {zero})" if zero > 0 else f"({{sum}} + all * {-zero})" if zero else "{sum}"
    reach = 255 << FRACTION
    value = Expression("attended", "int32_t", -reach, reach)
    element = f"(int32_t)((int64_t){centred} * reciprocal >> back)"
    return _attention(
        scope, _Weighting("int32_t", "-2147483647 - 1", weight, ending, element, value, operator.query_zero_point)
    )
