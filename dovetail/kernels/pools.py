"""Pools: the largest element of a window, the sum or the mean, of the taps inside the image."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, ReduceKind, SumPool2d
from dovetail.ir.types import DType
from dovetail.kernels.c import Lines, channel_lanes, integer, loop, product, times, total, variable
from dovetail.kernels.elements import PIXEL, Computed, Places, write_elements
from dovetail.kernels.kernel import SHARING, Expression, KernelWriter, Turns, refuse, turns_of_family
from dovetail.kernels.registry import FLOAT_FAMILIES, TURNS, kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.window import COLUMN, ONE_PIXEL, ROW, Nest, pixel_loops, window_of

_NARROW = (*SHARING, DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
_UNROLLED = 5
"""Taps taken in one turn of a loop over words, at most."""
_MOST_BYTES = 256
"""Bytes whose sum 16 bits hold, and 65536 times it, 256 times another and a third one 32 bits together."""


class PoolNest(Nest):
    """The nest of a pool."""

    operator: Pool2d

    @property
    def largest(self) -> bool:
        """Whether the pool finds the largest element; else it sums."""
        return self.operator.kind is ReduceKind.MAXIMUM

    def value(self, text: str) -> Expression:
        """The pool's value from what was collected."""
        zero_point, kind, taps = self.operator.zero_point, self.scope.source_dtype, prod(self.window.kernel)
        if self.largest:
            return Expression(text, "int32_t", kind.low, kind.high)
        low, high = kind.low - zero_point, kind.high - zero_point
        if self.operator.kind is ReduceKind.MEAN:
            centred = self.centred(text, zero_point) if zero_point else text
            return Expression(f"divide_rounded({centred}, {'count' if self.counted else taps})", "int32_t", low, high)
        refuse(
            min(taps * low, 0) < -(1 << 31) or max(taps * high, 0) >= 1 << 31,
            f"a sum over {taps} elements of {kind.text} may leave 32 bits.",
        )
        least, most = (min(taps * low, 0), max(taps * high, 0)) if self.counted else (taps * low, taps * high)
        return Expression(self.centred(text, zero_point), "int32_t", least, most)

    @property
    def counted(self) -> bool:
        """Whether the code counts the taps inside the image."""
        return self.scope.compact or self.window.any_padded

    def centred(self, text: str, zero_point: int) -> str:
        """A sum of raw elements less their zero points."""
        if self.scope.compact:
            return f"{text} - {times('count', self.number('input_zero_point', zero_point))}"
        if zero_point and self.counted:
            return f"{text} {'-' if zero_point > 0 else '+'} {product('count', abs(zero_point))}"
        return total(text, -prod(self.window.kernel) * zero_point)

    def taps(self, channel: str, steps: Lines) -> Lines:
        """The loops over the window of some channels."""
        window, (rows, columns) = self.window, self.window.kernel
        if columns == window.size[COLUMN] and not self.counted:
            each = channel_lanes(rows * columns, _UNROLLED) if self.by_words else 1
            turn = [*steps, f"from += {window.channels};"] * each
            return [self.pointer("top", "left", channel), *loop("tap", rows * columns, turn, step=each)]
        step = times(self.pair("dilation")[COLUMN], self.number("channels", window.channels))
        advance = [f"from += {step};"] if columns > 1 or self.scope.compact else []
        pointer = self.pointer(self.below(ROW, self.tap(ROW)), self.below(COLUMN, self.first(COLUMN)), channel)
        return self.rows([pointer, *self.columns([*steps, *advance])])

    def one(self) -> Lines:
        """One pixel: some neighbouring channels in registers."""
        if self.by_words:
            return self.four_to_a_word()
        compact, (stem, start) = (
            self.scope.compact,
            ("best", self.scope.source_dtype.low) if self.largest else ("sum", 0),
        )
        lanes = channel_lanes(self.window.channels, 4 if compact else 8)
        names = [f"{'total' if compact else stem}_{lane}" for lane in range(lanes)]
        self.number("channels", self.window.channels)
        starts = dict.fromkeys(names, integer(start) if compact else str(start))
        return self.over_channels("int32_t", starts, self.taps(self.channel, self.collected(names)), self.value)

    @property
    def by_words(self) -> bool:
        """Whether sums of four neighbouring channels are kept in two words, which hold up to _MOST_BYTES of each."""
        few = prod(self.window.kernel) <= _MOST_BYTES and self.window.channels % 4 == 0
        return few and not (self.largest or self.counted) and self.scope.source_dtype in (DType.INT8, DType.UINT8)

    def four_to_a_word(self) -> Lines:
        """One pixel from words w of four bytes: the sums of w & 0xFF00FF hold those of bytes 0 and 2, and the sums of
        w >> 8, less 256 times that of byte 2, those of bytes 1 and 3. Bytes with a sign are taken with 128 added."""
        channels, channel = self.window.channels, variable("channel", self.window.channels // 4)
        count = channel_lanes(channels // 4, 2)
        lines = [f"uint32_t {stem}_{word} = 0;" for word in range(count) for stem in ("even", "odd")]
        lines.append(f"uint32_t words[{count}];")
        signed, taps = self.scope.source_dtype is DType.INT8, prod(self.window.kernel)
        step = [f"__builtin_memcpy(words, __builtin_assume_aligned(from, 4), {4 * count});"]
        for word in range(count):
            step += [f"words[{word}] ^= 0x80808080u;"] if signed else []
            step += [f"even_{word} += words[{word}] & 0xFF00FFu;", f"odd_{word} += words[{word}] >> 8;"]
        lines += self.taps(channel, step)
        lines += [f"odd_{word} -= even_{word} >> 8 & 0xFFFF00u;" for word in range(count)]
        cuts = ("(int32_t)({}_{} & 0xFFFFu)", "(int32_t)({}_{} >> 16)")
        less = f"({{}} - {128 * taps})" if signed else "{}"
        names = [
            less.format(cut.format(stem, word)) for word in range(count) for cut in cuts for stem in ("even", "odd")
        ]
        lines += self.store("int32_t", names, self.value, channel)
        head = [*self.clamps(), self.place(channels)]
        return [*head, *loop("channel", channels, lines, step=4 * count)]

    def collected(self, names: Sequence[str]) -> Lines:
        """The statements that take one element of each lane in."""
        if self.largest:
            taken = [self.taken(lane) for lane in range(len(names))]
            return [f"{name} = {text} > {name} ? {text} : {name};" for name, text in zip(names, taken, strict=True)]
        return [f"{name} += {self.taken(lane)};" for lane, name in enumerate(names)]

    def write(self, name: str) -> Lines:
        if self.scope.compact:
            return self.shared_function(name, self.one())
        parts = {"pixel": (ONE_PIXEL, self.one())}
        return self.functions(name, parts, lambda calls: pixel_loops(self.window, calls, 1))


def pool_nest(scope: KernelScope, operator: Pool2d) -> PoolNest:
    """The nest of a region's pool; raises Unsupported where its sums may be too large."""
    refuse(scope.pad is not None, "a Pad before a pool is not fused; the pool's own padding is.")
    nest, taps = PoolNest(scope, window_of(scope), operator), prod(operator.kernel)
    kind = scope.require((*_NARROW, DType.INT32) if nest.largest else _NARROW)
    refuse(
        taps * max(-kind.low, kind.high) >= 1 << 31 and not nest.largest,
        f"a sum over {taps} elements of {kind.text} may leave 32 bits.",
    )
    return nest


@kernel(MaxPool2d, AveragePool2d, SumPool2d, windowed=True, packed=True, compact=True)
def _pooling(scope: KernelScope, operator: Pool2d) -> KernelWriter:
    nest = pool_nest(scope, operator)
    return KernelWriter(nest.write, lambda: nest.finish(nest.value("sum"), "0"))


@kernel(MaxPool2d, AveragePool2d, table=FLOAT_FAMILIES)
def _float_pooling(scope: KernelScope, operator: Pool2d) -> KernelWriter:
    scope.without_pad()
    nest = PoolNest(scope, window_of(scope), operator)

    def element(places: Places) -> Computed:
        image = scope.input(scope.source(), "input")
        source = nest.input_index(nest.below(ROW, nest.tap(ROW)), nest.below(COLUMN, nest.tap(COLUMN)), places[3])
        step = f"best = larger({image}[{source}], best);" if nest.largest else f"sum += {image}[{source}];"
        lines = nest.rows(nest.columns([step]))
        if nest.largest:
            return [*nest.clamps(), "float best = -__builtin_inff();", *lines], Expression("best", "float")
        head = [*nest.clamps(), nest.count(), "float sum = 0.0f;"]
        return [*head, *lines], Expression("sum / (float)count", "float")

    return write_elements(scope, element, PIXEL)


@kernel(MaxPool2d, AveragePool2d, SumPool2d, table=TURNS)
def _pool_turns(scope: KernelScope) -> Turns:
    window = window_of(scope)
    lanes = channel_lanes(window.channels, 8)
    pixels, blocks = prod(window.outputs) * window.batch, window.channels // lanes
    inside, across = sum(window.taps_inside(ROW)), window.taps_inside(COLUMN)
    taps = inside * sum(across) * window.batch
    counts = {
        "tap": taps * window.channels,
        "turn": taps * blocks,
        "row": inside * len(across) * window.batch * blocks,
        "block": pixels * blocks,
        "result": pixels * window.channels,
        "pixel": pixels,
        "call": 1,
    }
    kind = "Padded" if window.any_padded else "Words" if scope.source_dtype is DType.UINT8 else ""
    sums = scope.node.expect(Pool2d).kind is ReduceKind.SUM
    family = AveragePool2d if sums and not kind else type(scope.node.operator)  # the same loops
    return turns_of_family(f"{family.__name__}{kind}", counts)
