"""Kernels for little code: plain loops whose sizes are numbers of a layer's block, so that layers share a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.kernels.c import (
    Lines,
    atom,
    c_type,
    channel_lanes,
    function,
    identifiers,
    integer,
    loop,
    times,
    total,
    without_unused,
)
from dovetail.kernels.convolution import blocked_nest
from dovetail.kernels.depthwise import border_share
from dovetail.kernels.kernel import BLOCK, Expression, UnsupportedRegion, declarations
from dovetail.kernels.pools import pool_nest
from dovetail.kernels.registry import BORDERS, COMPACT, kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import Products, SumConstants, blocked, padded, products_of, sums_of
from dovetail.kernels.window import ONE_PIXEL, Nest, Number, window_of

Writing = Callable[[str], Lines]
"""Writes the C under a function name."""
_LANES = 8
"""Output channels of a convolution computed together, on a core with registers for them and as many sums again."""
_MOST_BORDER = 1 / 3
"""The part of a depthwise image's pixels up to which those at its border take the slower way."""
_CHANNELS = 4
"""Channels of a window that stays in its channel computed together, where they divide all channels."""


@dataclass(frozen=True)
class _CompactNest(Nest):
    """A nest whose sizes are members."""

    one: bool = False
    """Whether the function computes the one pixel it is told."""

    def at(self, name: str) -> str:
        """The loop variable, or the argument, over images, rows or columns."""
        variable = super().at(name)
        if self.one:
            return "0" if name == "image" and self.window.batch == 1 else name
        return variable

    def source(self, channel: str) -> str:
        """The statement that points at the input element under the first tap of kernel row `kernel_row`."""
        rows, columns = self.pair("dilation")
        top, left = total("top", times("kernel_row", rows)), total("left", times("first_column", columns))
        return self.pointer(top, left, channel)

    def tap_place(self, columns: Number) -> str:
        """The number of the first tap of kernel row `kernel_row`."""
        return total(times("kernel_row", columns), "first_column")

    def less_padding(self, element: str, pad_value: int) -> str:
        """An input element less what the padding holds."""
        taken = self.scope.number("sums", "pad_value", pad_value)
        return total(element, -taken) if isinstance(taken, int) else f"{element} - {taken}"

    def function(self, name: str, lines: Sequence[str], outputs: Number) -> Lines:
        """The kernel around the statements of one output pixel; its constants come through the block, the pixel it
        computes in arguments or loops."""
        rows, columns = self.pair("outputs")
        place = self.place(outputs)
        lines = without_unused([*self.clamps(), place, *lines])
        pixel = [*(["image"] if self.at("image") != "0" else []), "row", "column"] if self.one else []
        if not self.one:
            lines = loop("row", rows, loop("column", columns, lines))
            lines = loop("image", self.number("batch", self.window.batch), lines)
        comment = ONE_PIXEL if pixel else "Every output pixel, from the taps inside the image."
        self.scope.keep(identifiers(lines))
        plain = [parameter for parameter in self.scope.parameters() if not parameter.is_constant]
        uses_block = any(f"{BLOCK}->" in line for line in lines)
        block = [f"const struct {name}_{BLOCK} *restrict {BLOCK}"] if uses_block else []
        arguments = [*declarations(plain), *block, *(f"int32_t {coordinate}" for coordinate in pixel)]
        return [f"/* {comment} */", *function(f"static void {name}", arguments, lines)]


def _whole_bytes(sums: SumConstants) -> SumConstants:
    """The sums; raises Unsupported where several weights share a byte."""
    if sums.bits < 8:
        raise UnsupportedRegion("weights of less than a byte have no compact form.")
    return sums


@kernel(Conv2d, FullyConnected, table=COMPACT)
def _compact_sums(scope: KernelScope, operator: Operator) -> Writing:
    lanes = _LANES if scope.core.accumulators >= 2 * _LANES else _LANES // 2
    return _write_sums(scope, products_of(scope), lanes, one=False)


@kernel(Conv2d, table=BORDERS)
def _border_of_sums(scope: KernelScope, operator: Conv2d) -> Writing:
    """The writer of one pixel of a Conv2d some of whose pixels, not all, are computed in blocks of their own."""
    products = products_of(scope)
    whole = blocked_nest(scope, products, sums_of(scope, products))
    if not whole.has_border:
        raise UnsupportedRegion("no pixels are computed one by one, or all.")
    return _write_sums(scope, products, whole.lanes, one=True)


def _write_sums(scope: KernelScope, products: Products, lanes: int, one: bool) -> Writing:
    """The writer of sums over all channels: `lanes` outputs at a time, one pixel after the other, or the one told."""
    if products.groups > 1:
        raise UnsupportedRegion("a convolution of groups has no compact form.")
    sums, nest = _whole_bytes(sums_of(scope, products)), _CompactNest(scope, products.window, one)
    names = [f"sum_{lane}" for lane in range(lanes)]

    def write(name: str) -> Lines:
        outputs = scope.number("sums", "outputs", len(sums.weights))
        ragged = scope.number("sums", "ragged", int(len(sums.weights) % lanes > 0))
        bias = scope.constant("sums", "bias", padded(sums.border, lanes))
        starts = [f"{sums.kind} {sum} = {bias}[{total('channel', lane)}];" for lane, sum in enumerate(names)]
        taps = _sum_loops(nest, sums, lanes)
        stored = nest.store(sums.kind, names, sums.value, outputs=outputs if ragged != 0 else None)
        return nest.function(name, loop("channel", outputs, [*starts, *taps, *stored], step=lanes), outputs)

    return write


def _sum_loops(nest: _CompactNest, sums: SumConstants, lanes: int) -> Lines:
    window = nest.window
    weights = nest.scope.constant("sums", "weights", blocked(sums.weights, lanes).reshape(-1))
    depth = nest.number("channels", window.channels)
    products = nest.number("products", prod(window.kernel) * window.channels)
    columns, dilation = nest.pair("kernel")[1], nest.pair("dilation")[1]
    merged = nest.number("contiguous", int(window.contiguous_columns))
    tap = times(nest.tap_place(columns), depth, lanes)
    start = total(weights, times("channel", products), tap)
    pointers = [nest.source("0"), f"const {c_type(sums.stored)} *tap = {start};"]
    turn = [f"const int32_t value = {nest.less_padding('*from++', sums.pad_value)};"]
    turn += [*(f"sum_{lane} += value * tap[{lane}];" for lane in range(lanes)), f"tap += {lanes};"]
    lines = loop("count", times("end_column - first_column", depth) if merged == 1 else str(depth), turn)
    if merged != 1:
        lines = nest.columns([*lines, f"from += {times(f'{dilation} - 1', depth)};"])
    return nest.rows([*pointers, *lines])


def _write_channels(
    nest: _CompactNest,
    kind: str,
    start: Callable[[str], str],
    taps: Callable[[Sequence[str]], tuple[Lines, Lines, Lines]],
    value: Callable[[str], Expression],
) -> Writing:
    """The writer of a window that stays in its channel: of what is collected, the C type, the start in a channel and
    the anchor's value; for the lanes' names, the statements that begin a kernel row, those of a tap, those that go on.
    """

    def write(name: str) -> Lines:
        channels, dilation = nest.number("channels", nest.window.channels), nest.pair("dilation")[1]
        names = [f"total_{lane}" for lane in range(channel_lanes(nest.window.channels, _CHANNELS))]
        nest.scope.input(nest.scope.source(), "input")
        before, turn, after = taps(names)
        turn = [*turn, f"from += {times(dilation, channels)};", *after]
        lines = nest.rows([nest.source("channel"), *before, *nest.columns(turn)])
        head = [f"{kind} {name} = {start(total('channel', lane))};" for lane, name in enumerate(names)]
        lines = [*head, *lines, *nest.store(kind, names, value)]
        return nest.function(name, [nest.count(), *loop("channel", channels, lines, step=len(names))], channels)

    return write


@kernel(DepthwiseConv2d, table=COMPACT)
def write_compact_depthwise(scope: KernelScope, operator: DepthwiseConv2d, one: bool = False) -> Writing:
    products = products_of(scope, merged=False)
    if not products.channelwise:
        raise UnsupportedRegion("a depthwise convolution with a multiplier has no compact form.")
    sums, nest = _whole_bytes(sums_of(scope, products)), _CompactNest(scope, products.window, one)

    def taps(names: Sequence[str]) -> tuple[Lines, Lines, Lines]:
        columns, channels = nest.pair("kernel")[1], nest.number("channels", nest.window.channels)
        weights = scope.constant("sums", "weights", sums.weights.transpose(1, 2, 3, 0).reshape(-1))
        place = total(times(nest.tap_place(columns), channels), "channel")
        before = f"const {c_type(sums.stored)} *tap = {total(weights, place)};"
        values = [atom(nest.less_padding(f"from[{lane}]", sums.pad_value)) for lane in range(len(names))]
        turn = [
            f"{name} += {value} * tap[{lane}];" for lane, (name, value) in enumerate(zip(names, values, strict=True))
        ]
        return [before], turn, [f"tap += {channels};"]

    def start(channel: str) -> str:
        return f"{scope.constant('sums', 'bias', sums.border)}[{channel}]"

    return _write_channels(nest, sums.kind, start, taps, sums.value)


@kernel(DepthwiseConv2d, table=BORDERS)
def _border_of_depthwise(scope: KernelScope, operator: DepthwiseConv2d) -> Writing:
    """The writer of one pixel of a DepthwiseConv2d most of whose pixels are computed in groups of columns."""
    if not 0 < border_share(window_of(scope), scope.core.accumulators) <= _MOST_BORDER:
        raise UnsupportedRegion("the border is none, or much of the image.")
    return write_compact_depthwise(scope, operator, one=True)


@kernel(MaxPool2d, AveragePool2d, SumPool2d, table=COMPACT)
def _compact_pool(scope: KernelScope, operator: Pool2d) -> Writing:
    pool = pool_nest(scope, operator)
    first = integer(scope.source_dtype.low if pool.largest else 0)
    nest = _CompactNest(scope, pool.window)
    return _write_channels(nest, "int32_t", lambda _: first, lambda names: ([], pool.collected(names), []), pool.value)
