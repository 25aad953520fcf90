"""Kernels of networks that read a sequence step by step: a row written into a buffer, attention to live places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from dovetail.ir.operators.sequence import (
    FRACTION,
    ROOM,
    Attention,
    AttentionEnd,
    AttentionWeights,
    FixedAttention,
    WriteRow,
)
from dovetail.kernels.c import (
    Lines,
    block,
    c_type,
    channel_lanes,
    code,
    indent,
    loop,
    product,
    real,
    total,
    unroll_loop,
    variable,
)
from dovetail.kernels.elements import place_in
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, KernelWriter, Turns, UnsupportedRegion, refuse, turns_of_family
from dovetail.kernels.planes import Pairs, pairs_of
from dovetail.kernels.registry import TURNS, kernel
from dovetail.kernels.scheduled.knobs import call_of, extents, is_product
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import MULTIPLY_ADD
from dovetail.records import Record
from dovetail.target.chip import CoreInstruction

_WRITTEN_OUT = 16
"""Most elements of a head whose products are written out, so that they stay in registers."""


@kernel(WriteRow, once=True)
def _write_row(scope: KernelScope, operator: WriteRow) -> KernelWriter:
    if scope.tree:
        raise UnsupportedRegion(f"{scope.tree[0].operator.class_name} behind a row that is written is not fused.")
    shape, axis, nbytes = scope.result.shape, operator.axis, scope.result.dtype.numpy.itemsize
    outer, size, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    count = scope.type(2).elements
    step = variable("step", count)

    def body() -> Lines:
        row, place = scope.operand(1, "row"), scope.operand(2, "place")
        lines = Lines()
        if scope.overwritten != scope.node.inputs[0]:
            whole = prod(shape) * nbytes
            lines.append(f"__builtin_memcpy(output, {scope.operand(0, 'input')}, {whole}u);")
        to = total("output", product(variable("outer", outer), size * inner), product("at", inner))
        source = total(row, product(variable("outer", outer), count * inner), product(step, inner))
        copied = f"__builtin_memcpy({to}, {source}, {inner * nbytes}u);"
        write = [f"const int32_t at = gathered({place}[{step}], {size});", *loop("outer", outer, [copied])]
        return [*lines, *(loop("step", count, write) if count > 1 else write)]

    return scope.writer(body)


class _Weighting(Record):
    """How scores become weights, and weighted sums elements of the result; `{n}` in a text is the number of a head
    among those that are computed together."""

    kind: str
    """C type of scores and sums."""
    lowest: str
    """C text of a number below every score: that of places that are not live."""
    weight: Lines
    """Statements that make `weight_{n}` of `distance_{n}`, how far a score is below the largest, and add it to
    `all_{n}`."""
    worth: str
    """C text of whether a place counts; empty where its weights say it."""
    ending: Lines
    """Statements between the sums and the elements."""
    element: str
    """C text of an element, made of {sum}."""
    value: Expression
    """The element, which is called `attended`."""
    zero_point: int = 0
    """Taken off queries."""
    adds: str = ""
    """A function that adds a product to a sum, where the core has its own."""

    def added(self, sum_: str, left: str, right: str) -> str:
        """The statement that adds a product to a sum."""
        return f"{sum_} = {self.adds}({sum_}, {left}, {right});" if self.adds else f"{sum_} += {left} * {right};"


def _limits(live: str, places: int) -> Lines:
    """The statements that find the first live place and one behind the last, and whether others lie between."""
    return code(
        f"""
        const uint8_t *const lives = {live};
        int32_t first = 0;
        while (first < {places} && lives[first] == 0u) {{
            ++first;
        }}
        const int32_t last = last_live(lives, first, {places});
        const int32_t holes = has_holes(lives, first, last);
        """
    )


class _AttentionWriter(Record, dict=True):
    """A kernel of attention being written: heads that read the same keys are computed together, from the first live
    place to the last."""

    scope: KernelScope
    how: _Weighting

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Heads, rows, depth, heads of keys, places, width."""
        (heads, rows, depth), (groups, places, _) = self.scope.type(0).shape, self.scope.type(1).shape
        return heads, rows, depth, groups, places, self.scope.type(2).shape[2]

    @property
    def together(self) -> int:
        """Heads that are computed together: of two, queries or sums stay in registers."""
        heads, _, depth, groups, _, width = self.sizes
        fits = 2 * max(depth, width) <= _WRITTEN_OUT and heads // groups % 2 == 0
        return 2 if fits and self.how.kind == "int32_t" else 1

    @cached_property
    def own(self) -> CoreInstruction | Pairs | None:
        """The core's own instructions that multiply queries with keys, if it has any that fit."""
        if self.how.kind == "float":
            return None
        depth, instructions = self.sizes[2], self.scope.core.instructions
        dots = (one for one in instructions if not one.memories and is_product(one) and extents(one)[:-1] == (1,))
        words = next((one for one in dots if depth % extents(one)[-1] == 0), None)
        return words or (pairs_of(instructions) if depth % 4 == 0 else None)

    @property
    def used(self) -> tuple[CoreInstruction, ...]:
        """The core's own instructions in the kernel."""
        return (self.own.load, self.own.product) if isinstance(self.own, Pairs) else (self.own,) if self.own else ()

    def writer(self) -> KernelWriter:
        """The writer of the kernel."""
        writer, names = self.scope.writer(self.body), tuple(one.name for one in self.used)
        return replace(writer, declarations=tuple(one.declarations for one in self.used), instructions=names)

    def each(self, *lines: str) -> Lines:
        """Lines for each of the heads that are computed together."""
        return [line.replace("{n}", str(number)) for number in range(self.together) for line in lines]

    def body(self) -> Lines:
        """All rows."""
        rows, places, masks = self.sizes[1], self.sizes[4], self.scope.type(3).shape[0]
        live, row = self.scope.operand(3, "live"), variable("row", rows)
        limits = _limits(total(live, product(row, places)) if masks > 1 else live, places)
        return [f"{self.how.kind} scores[{places * self.together}];", *loop("row", rows, [*limits, *self._heads()])]

    def _heads(self) -> Lines:
        """The loop over the heads of a row."""
        how, scope = self.how, self.scope
        heads, rows, depth, groups, _, width = self.sizes
        group = "head" if heads == groups else f"head / {heads // groups}"
        q, k, v = (scope.operand(at, name) for at, name in enumerate(("queries", "keys", "values")))
        held, shape = c_type(scope.type(0).dtype), scope.type(0).shape
        places = [place_in(shape, (f"head + {n}" if n else "head", variable("row", rows), "0")) for n in range(2)]
        asked = [f"const {held} *const from_{n} = {total(q, places[n])};" for n in range(self.together)]
        greater = ["if (__builtin_expect({score} > largest_{n}, 0)) {", "    largest_{n} = {score};", "}"]
        return code(
            f"""
            for (int32_t head = 0; head < {heads}; head += {self.together}) {{
                const {held} *key = {total(k, product(group, self.sizes[4] * depth), product("first", depth))};
                const {held} *value = {total(v, product(group, self.sizes[4] * width), product("first", width))};
                @asked
                {how.kind} *score = scores;
                @largest
                for (int32_t place = first; place < last; ++place, key += {depth}, score += {self.together}) {{
                    @dot
                }}
                if (holes != 0) {{
                    score = scores;
                    @lowest
                    for (int32_t place = first; place < last; ++place, score += {self.together}) {{
                        @dead
                    }}
                }}
                score = scores;
                @alls
                for (int32_t place = first; place < last; ++place, score += {self.together}) {{
                    @weight
                }}
                score = scores;
                @sums
                for (int32_t place = first; place < last; ++place, value += {width}, score += {self.together}) {{
                    @taken
                }}
                @channels
            }}
            """,
            asked=[*asked, *self._queries()],
            largest=self.each(f"{how.kind} largest_{{n}} = {how.lowest};"),
            dot=[
                *self.each(f"{how.kind} score_{{n}} = 0;"),
                *self._dot(),
                *self.each("score[{n}] = score_{n};", *(line.replace("{score}", "score_{n}") for line in greater)),
            ],
            lowest=self.each(f"largest_{{n}} = {how.lowest};"),
            dead=self.each(
                f"score[{{n}}] = lives[place] != 0u ? score[{{n}}] : {how.lowest};",
                *(line.replace("{score}", "score[{n}]") for line in greater),
            ),
            alls=self.each(f"{how.kind} all_{{n}} = 0;"),
            weight=self._weighed(),
            sums=self._sums(),
            taken=[*self.each(f"const {how.kind} weight_{{n}} = score[{{n}}];"), *self._taken()],
            channels=[line for n in range(self.together) for line in ("{", *indent(self._channels(n)), "}")],
        )

    def _weighed(self) -> Lines:
        """The statements that make weights of the scores of a place."""
        distance = f"const {self.how.kind} distance_{{n}} = largest_{{n}} - score[{{n}}];"
        rest = (*self.how.weight, "score[{n}] = weight_{n};")
        return self.each(distance, *rest) if self.own else [*self.each(distance), "in_order();", *self.each(*rest)]

    def _queries(self) -> Lines:
        """The statements that read the queries."""
        depth, zero, kind = self.sizes[2], -self.how.zero_point, self.how.kind
        if isinstance(self.own, CoreInstruction):
            return []
        if isinstance(self.own, Pairs):
            halves = [f"(uint16_t)({total(f'from_{{n}}[at / 2 * 4 + at % 2 + {at}]', zero)})" for at in (0, 2)]
            pair = f"query_{{n}}[at] = (uint32_t){halves[0]} | (uint32_t){halves[1]} << 16;"
            return self.each(f"uint32_t query_{{n}}[{depth // 2}];", *loop("at", depth // 2, [pair]))
        if depth > _WRITTEN_OUT:
            read = loop("depth", depth, [f"query_{{n}}[depth] = {total('from_{n}[depth]', zero)};"])
            return self.each(f"{kind} query_{{n}}[{depth}];", *read)
        return self.each(
            *(f"const {kind} query_{{n}}_{at} = {total(f'from_{{n}}[{at}]', zero)};" for at in range(depth))
        )

    def _dot(self) -> Lines:
        """The statements that multiply the queries with a key."""
        depth, added = self.sizes[2], self.how.added
        if isinstance(self.own, CoreInstruction):
            return self._words(self.own)
        if isinstance(self.own, Pairs):
            lines = ["uint32_t part[2];"]
            for at in range(0, depth, 4):
                lines.append(call_of(self.own.load, ("&part[0]", f"&key[{at}]")))
                products = (("&score_{n}", f"&query_{{n}}[{at // 2 + half}]", f"&part[{half}]") for half in (0, 1))
                lines += self.each(*(call_of(self.own.product, one) for one in products))
            return lines
        if depth > _WRITTEN_OUT:
            return loop("depth", depth, self.each(added("score_{n}", "query_{n}[depth]", "key[depth]")))
        return self._in_order("key", ["score_{n}"] * depth)

    def _words(self, product: CoreInstruction) -> Lines:
        """Products of whole words; those of the query's zero point are taken off."""
        lines, taps, zero = Lines(), extents(product)[-1], self.how.zero_point
        for at in range(0, self.sizes[2], taps):
            lines += self.each(call_of(product, ("&score_{n}", f"&from_{{n}}[{at}]", f"&key[{at}]")))
        if not zero:
            return lines
        zeros = self.scope.constant(self.scope.node.output, "zeros", np.full(taps, zero, np.int8))
        lines.append("int32_t past = 0;")
        lines += [call_of(product, ("&past", zeros, f"&key[{at}]")) for at in range(0, self.sizes[2], taps)]
        return [*lines, *self.each("score_{n} -= past;")]

    def _sums(self) -> Lines:
        """Declarations of the sums of weighted values."""
        kind, width = self.how.kind, self.sizes[5]
        zero = "0.0f" if kind == "float" else "0"
        if width > _WRITTEN_OUT:
            return self.each(f"{kind} sums_{{n}}[{width}] = {{{zero}}};")
        return self.each(*(f"{kind} sum_{{n}}_{at} = {zero};" for at in range(width)))

    def _taken(self) -> Lines:
        """The statements that take the weighted values of a place."""
        worth = self.how.worth or f"({' | '.join(self.each('weight_{n}'))}) != 0"
        width, added = self.sizes[5], self.how.added
        if width > _WRITTEN_OUT:
            lines = loop("channel", width, self.each(added("sums_{n}[channel]", "weight_{n}", "value[channel]")))
        else:
            lines = self._in_order("value", [f"sum_{{n}}_{at}" for at in range(width)])
        return block(f"if ({worth})", lines)

    def _in_order(self, array: str, sums: Sequence[str]) -> Lines:
        """Each element of an array read while the one before is multiplied and added, to one sum or each to its own."""
        roomy = self.how.kind == "int32_t" and self.scope.core.accumulators > 2 * len(sums) - 1
        lines = [f"const {self.how.kind} element_0 = {array}[0];"]
        for at, total_ in enumerate(sums):
            if at + 1 < len(sums):
                lines += [f"const {self.how.kind} element_{at + 1} = {array}[{at + 1}];", "in_order();"]
            factor = "weight_{n}" if array == "value" else f"query_{{n}}_{at}"
            lines += self.each(self.how.added(total_, factor, f"element_{at}"))
            lines += self.each(f"{total_} = held({total_});") if roomy else []
        return lines

    def _channels(self, number: int) -> Lines:
        """The statements that store a head's result."""
        row, width, how = variable("row", self.sizes[1]), self.sizes[5], self.how
        head, own = f"head + {number}" if number else "head", str(number)

        def channel(at: str) -> Lines:
            text = f"sums_{own}[{at}]" if width > _WRITTEN_OUT else f"sum_{own}_{at}"
            text = how.element.replace("{n}", own).replace("{sum}", text)
            stored = finish(self.scope, lambda shape: place_in(shape, (head, row, at)), how.value)
            return [f"const {how.kind} attended = {text};", *stored]

        ending = [line.replace("{n}", own) for line in how.ending]
        if width > _WRITTEN_OUT:
            return [*ending, *loop("channel", width, channel("channel"))]
        return [*ending, *(line for at in range(width) for line in ("{", *indent(channel(str(at))), "}"))]


@kernel(Attention)
def _float_attention(scope: KernelScope, operator: Attention) -> KernelWriter:
    refuse(operator.scale <= 0, f"the scale {operator.scale} of attention must be positive.")
    exact = f"exponential(-distance_{{n}} * {real(operator.scale)})"
    weight = [f"const float weight_{{n}} = lives[place] != 0u ? {exact} : 0.0f;", "all_{n} += weight_{n};"]
    ending = ["const float share = last > first ? 1.0f / all_{n} : 0.0f;"]
    value = Expression("attended", "float")
    how = _Weighting("float", "-3.402823466e38f", weight, "lives[place] != 0u", ending, "{sum} * share", value)
    return _AttentionWriter(scope, how).writer()


_ELEMENT = "(int32_t)((int64_t)({sum} * (1 << raise)) * reciprocal >> 32)"
"""C text of an element of fixed attention, made of {sum}, behind `_ending`."""


def _ending(whole: str) -> Lines:
    """The statements before the elements of a head, from the sum of its weights."""
    return code(
        f"""
        const uint32_t whole = {whole} == 0 ? 1u : (uint32_t){whole};
        const int32_t room = leading_zeros(whole) - 1;
        const int32_t reciprocal = 2147483647 / (int32_t)(whole << room >> 15) * {1 << (FRACTION - 6)};
        const int32_t raise = room - {ROOM - 1};
        """
    )


def _weight(operator: FixedAttention, table: str, far: int, behind: Sequence[str]) -> Lines:
    """The statements that make `weight_{n}` of `distance_{n}`, and those behind, where it is not 0."""
    index = f"(uint32_t)distance_{{n}} * {operator.multiplier}u >> {operator.shift}"
    inside = [f"weight_{{n}} = (int32_t){table}[{index}];", *behind]
    return ["int32_t weight_{n} = 0;", *block(f"if (distance_{{n}} < {far})", inside)]


def _cleared(nbytes: int) -> Lines:
    """The statements that make so many bytes of the result 0, a multiple of 16."""
    cleared = "__builtin_memset(__builtin_assume_aligned(output + at + lane * 16, 4), 0, 16);"
    lanes = channel_lanes(nbytes // 16, 8)
    turn = unroll_loop("lane", lanes, [cleared, "in_order();"])  # one at a time, or compilers call a function
    return block(f"for (int32_t at = 0; at < {nbytes}; at += {16 * lanes})", turn)


_TURN = 4
"""Places of a turn."""


def _places(every: int, moved: str, lines: Sequence[str]) -> Lines:
    """The loops over the places of a head's scores: of some at a time where all are live, and of single ones.

    Args:
        every: scores of a place.
        moved: what else moves on by {n} places.
        lines: statements of `score_{n}`, that of place number {n} of a turn.
    """
    read = f"const int32_t score_{{n}} = score[{{n}} * {every}];"
    own = [[line.replace("{n}", str(n)) for line in (read, *lines)] for n in range(_TURN)]
    several = [*(one[0] for one in own), "in_order();", *(line for one in own for line in one[1:])]
    return code(
        f"""
        score = from;
        place = first;
        for (; place < even; place += {_TURN}, score += {_TURN * every}{moved.replace("{n}", str(_TURN))}) {{
            @several
        }}
        for (; place < last; ++place, score += {every}{moved.replace("{n}", "1")}) {{
            if (lives[place] != 0u) {{
                @single
            }}
        }}
        """,
        several=several,
        single=own[0],
    )


@kernel(AttentionWeights, once=True)
def _attention_weights(scope: KernelScope, operator: AttentionWeights) -> KernelWriter:
    """The writer of an AttentionWeights; the table has the lower bytes of all exponentials, then the upper ones."""
    refuse(bool(scope.tree), "nothing behind weights of attention is fused.")
    (_, places, _, every), rows = scope.type(0).shape, scope.type(1).shape[0]
    skipped, stop = operator.span([scope.type(0), scope.type(1)])
    heads, row, powers, far = stop - skipped, variable("row", rows), operator.table(places), operator.farthest(places)
    refuse(far * operator.multiplier >= 1 << 32, "a distance times the multiplier of attention must fit 32 bits.")
    refuse(places % 8 > 0, "weights of attention are for a multiple of 8 places.")
    table = scope.constant(scope.node.output, "exponentials", np.stack((powers & 255, powers >> 8)).astype(np.uint8))
    larger = ["if (__builtin_expect(score_{n} > largest, 0)) {", "    largest = held(score_{n});", "}"]
    index = f"(uint32_t)distance_{{n}} * {operator.multiplier}u >> {operator.shift}"
    power = [f"const uint8_t *const power_{{n}} = {table} + ({index});", "const uint8_t low_{n} = power_{n}[0];"]
    power += [f"upper[{{n}}] = power_{{n}}[{powers.size}];", "lower[{n}] = low_{n};"]
    near = block(f"if (__builtin_expect(distance_{{n}} < {far}, 1))", power)

    def body() -> Lines:
        scores, live = scope.operand(0, "scores"), scope.operand(1, "live")
        own = total(scores, product("first", every), product("head", rows), row, scope.start(skipped * rows))
        weighed = code(
            f"""
            @limits
            const int32_t even = holes != 0 ? first : last - (last - first) % {_TURN};
            for (int32_t head = 0; head < {heads}; ++head) {{
                const int32_t *const from = {own};
                const int32_t *score;
                int32_t place;
                int32_t largest = INT32_MIN;
                @largest
                uint8_t *lower = output + {total(product("head", 2 * rows * places), product(row, 2 * places))} + first;
                uint8_t *upper = lower + {places};
                @weights
            }}
            """,
            limits=_limits(total(live, product(row, places)), places),
            largest=_places(every, "", larger),
            weights=_places(
                every,
                ", lower += {n}, upper += {n}",
                ["const int32_t distance_{n} = largest - score_{n};", *near],
            ),
        )
        return [*_cleared(2 * heads * rows * places), *loop("row", rows, weighed)]

    return scope.writer(body)


@kernel(AttentionEnd)
def _attention_end(scope: KernelScope, operator: AttentionEnd) -> KernelWriter:
    heads, rows, width = scope.result.shape
    whole, row = scope.type(0).shape[3], variable("row", rows)
    reach = 255 << FRACTION

    def body() -> Lines:
        sums, totals = scope.operand(0, "sums"), scope.operand(1, "totals")
        raised = f"(from[channel] + from[{whole} + channel] * 256)"
        value = Expression("attended", "int32_t", -reach, reach)
        stored = finish(scope, lambda shape: place_in(shape, ("head", row, "channel")), value)
        element = f"const int32_t attended = {_ELEMENT.replace('{sum}', raised)};"
        at, head = total(product("head", 2 * rows), product(row, 2)), total("head", scope.start(operator.first))
        group = f"{f'({head})' if operator.first else head} / {operator.each} * {width}"
        from_ = total(sums, product("head", 2 * rows * whole), product(row, 2 * whole), group)
        inner = [
            f"const int32_t all = {totals}[{at}] + {totals}[{at} + 1] * 256;",
            f"const int32_t *const from = {from_};",
            *_ending("all"),
            *loop("channel", width, [element, *stored]),
        ]
        return block(f"for (int32_t head = 0; head < {heads}; ++head)", loop("row", rows, inner))

    return scope.writer(body)


@kernel(FixedAttention, table=TURNS)
def _attention_turns(scope: KernelScope) -> Turns:
    """Products of queries with keys and of weights with values, and what is between, of all places: how many are live
    is not known."""
    (heads, rows, depth), (_, places, width) = scope.type(0).shape, scope.type(2).shape
    products = scope.node.operator.macs(scope.types)
    counts = {"product": products, "weight": heads * rows * places, "element": scope.result.elements, "call": 1}
    is_wide = max(depth, width) > _WRITTEN_OUT
    return turns_of_family("FixedAttentionWide" if is_wide else "FixedAttention", counts)


@kernel(FixedAttention)
def _fixed_attention(scope: KernelScope, operator: FixedAttention) -> KernelWriter:
    places, zero = scope.type(1).shape[1], operator.value_zero_point
    table = scope.constant(scope.node.output, "exponentials", operator.table(places).astype(np.uint16))
    farthest = 255 * 128 * scope.type(0).shape[2]  # no score is farther from 0
    far = min(operator.farthest(places), 2 * farthest + 1)
    weight = _weight(operator, table, far, ["all_{n} += weight_{n};"])
    ending = _ending("all_{n}")
    centred = f"({{sum}} - all_{{n}} * {zero})" if zero > 0 else f"({{sum}} + all_{{n}} * {-zero})" if zero else "{sum}"
    reach = 255 << FRACTION
    value = Expression("attended", "int32_t", -reach, reach)
    element = _ELEMENT.replace("{sum}", centred)
    adds = MULTIPLY_ADD if MULTIPLY_ADD in scope.core.functions else ""
    zeros = operator.query_zero_point
    how = _Weighting("int32_t", str(-farthest - far), weight, "", ending, element, value, zeros, adds)
    return _AttentionWriter(scope, how).writer()
