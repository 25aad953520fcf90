"""Kernels for little code: plain loops whose sizes are numbers of a layer's block, so that layers share a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from dovetail.graph.types import Array, DType
from dovetail.kernels.convolution import Products, Sums, anchor_expression, choose_sums, convolution_products, sums_of
from dovetail.kernels.depthwise import border_share
from dovetail.kernels.epilogue import Expression, finish
from dovetail.kernels.fully_connected import fully_connected_products
from dovetail.kernels.kernel import BLOCK, Unsupported, c_type, declarations
from dovetail.kernels.pooling import checked_pool
from dovetail.kernels.region import Region, require_dtype
from dovetail.kernels.scope import Scope
from dovetail.kernels.text import atom, channel_lanes, function, integer, loop, times, total, without_unused, words
from dovetail.kernels.window import ONE_PIXEL, Window, anchored, store_lanes, window_of
from dovetail.operators.linear import DepthwiseConv2d
from dovetail.operators.pooling import AveragePool2d, MaxPool2d

Writer = Callable[[str], list[str]]
Number = int | str
_LANES = 8
"""Output channels of a convolution computed together, on a core with registers for them and as many sums again."""
_MOST_BORDER = 1 / 3
"""The part of a depthwise image's pixels up to which those at its border take the slower way."""
_CHANNELS = 4
"""Channels of a window that stays in its channel computed together, where they divide all channels."""


@dataclass(frozen=True)
class _Place:
    """The numbers of a window, and the C text of where it is."""

    scope: Scope
    window: Window
    one: bool = False
    """Whether the function computes the one pixel it is told."""

    def number(self, stem: str, value: int) -> Number:
        """A number of the window."""
        return self.scope.number("window", stem, value)

    def variable(self, name: str) -> str:
        """The loop variable over images, rows or columns, or 0 where the loop has one turn."""
        rows, columns = self.pair("outputs")
        turns = {"image": self.number("batch", self.window.batch), "row": rows, "column": columns}[name]
        if self.one:
            return "0" if name == "image" and self.window.batch == 1 else name
        return "0" if turns == 1 else name

    def arguments(self) -> list[str]:
        """Which pixel, where the function is told."""
        images = ["image"] if self.variable("image") != "0" else []
        return [*images, "row", "column"] if self.one else []

    def pair(self, stem: str) -> tuple[Number, Number]:
        """The numbers for rows and columns of one of the window's pairs."""
        rows, columns = getattr(self.window, stem)
        return self.number(f"{stem}_rows", rows), self.number(f"{stem}_columns", columns)

    def clamps(self) -> list[str]:
        """Statements that name the window's origin and the taps inside the image."""
        lines = []
        axes = zip(("top", "left"), ("row", "column"), *map(self.pair, _PAIRS), strict=True)
        padded = self.number("padded", int(self.window.any_padded))
        for origin, name, stride, before, dilation, kernel, size in axes:
            start = total(times(self.variable(name), stride), *([-before] if isinstance(before, int) else []))
            start = start if isinstance(before, int) else f"{start} - {before}"
            lines.append(f"const int32_t {origin} = {start};")
            first, end = "0", str(kernel)
            if padded != 0:
                first = f"first_tap({origin}, {dilation})"
                end = f"end_tap({origin}, {dilation}, {kernel}, {size})"
            lines += [f"const int32_t first_{name} = {first};", f"const int32_t end_{name} = {end};"]
        return lines

    def source(self, channel: str) -> str:
        """The flat index of the input element under the first tap of kernel row `kernel_row`."""
        dilation, size = self.pair("dilation"), self.pair("size")
        row = total(times(self.variable("image"), size[0]), "top", times("kernel_row", dilation[0]))
        column = total("left", times("first_column", dilation[1]))
        return total(times(total(times(row, size[1]), column), self.number("channels", self.window.channels)), channel)

    def loops(self, lines: Sequence[str], outputs: Number) -> list[str]:
        """The statements of one output pixel, in loops over all of them unless there is but one."""
        rows, columns = self.pair("outputs")
        image, row, column = map(self.variable, ("image", "row", "column"))
        pixel = total(times(total(times(image, rows), row), columns), column)
        lines = [*self.clamps(), f"const int32_t place = {times(pixel, outputs)};", *lines]
        if self.one:
            return without_unused(lines)
        lines = loop("row", rows, loop("column", columns, without_unused(lines)))
        return loop("image", self.number("batch", self.window.batch), lines)


_PAIRS = ("stride", "before", "dilation", "kernel", "size")


def _finish(region: Region, scope: Scope, outputs: Number, value: Expression, lane: str) -> list[str]:
    """The pointwise tree on one result."""
    anchor = region.anchor
    assert anchor is not None
    scope.channel = total("channel", lane)
    index = anchored(region.output_shape, total("place", scope.channel), scope.channel)
    return finish(scope, region.tree, index, (anchor.output, value))


def _function(scope: Scope, name: str, lines: Sequence[str], pixel: Sequence[str]) -> list[str]:
    """The kernel's function; its constants come through the block, the pixel it computes in arguments."""
    comment = ONE_PIXEL if pixel else "Every output pixel, from the taps inside the image."
    scope.keep(words(lines))
    place = [f"int32_t {coordinate}" for coordinate in pixel]
    plain = [parameter for parameter in scope.parameters() if not parameter.is_constant]
    block = [f"const struct {name}_{BLOCK} *restrict {BLOCK}"] if any(f"{BLOCK}->" in line for line in lines) else []
    return [f"/* {comment} */", *function(f"static void {name}", [*declarations(plain), *block, *place], lines)]


def _in_blocks(weights: Array, lanes: int) -> Array:
    """Weights [outputs, KH, KW, depth] with `lanes` outputs side by side, zeros for those there are not."""
    whole = np.zeros((-(-len(weights) // lanes) * lanes, *weights.shape[1:]), weights.dtype)
    whole[: len(weights)] = weights
    return whole.reshape(-1, lanes, *weights.shape[1:]).transpose(0, 2, 3, 4, 1).reshape(-1)


def _whole_bytes(sums: Sums) -> Sums:
    """The sums; raises Unsupported where several weights share a byte."""
    if sums.bits < 8:
        raise Unsupported("weights of less than a byte have no compact form.")
    return sums


def _write_sums(region: Region, scope: Scope, products: Products, lanes: int, one: bool = False) -> Writer:
    """The writer of sums over all channels: `lanes` outputs at a time, one pixel after the other, or the one told."""
    window, weights = products.window, products.weights
    for name in region.anchor.inputs[2:] if region.anchor else ():
        scope.known(name)
    if weights.shape[3] != window.channels:
        raise Unsupported("a convolution of groups has no compact form.")
    sums, place = _whole_bytes(sums_of(region, weights, products.zero_points)), _Place(scope, window, one)

    def write(name: str) -> list[str]:
        """The function."""
        outputs = scope.number("sums", "outputs", len(weights))
        ragged = scope.number("sums", "ragged", int(len(weights) % lanes > 0))
        start = np.pad(sums.border, (0, -len(weights) % lanes))
        bias = scope.constant("sums", "bias", start)
        lines = [f"{sums.kind} sum_{lane} = {bias}[{total('channel', lane)}];" for lane in range(lanes)]
        lines += _sum_loops(region, place, sums, lanes)
        stop: int | str = lanes
        if ragged != 0:
            rest = f"{outputs} - channel"
            lines.append(f"const int32_t lanes = {rest} < {lanes} ? {rest} : {lanes};")
            stop = "lanes"
        lines += store_lanes(
            sums.kind, [f"sum_{lane}" for lane in range(lanes)], 1, stop,
            lambda text, _, lane: _finish(region, scope, outputs, anchor_expression(region, sums, text), lane),
        )  # fmt: skip
        lines = place.loops(loop("channel", outputs, lines, step=lanes), outputs)
        return _function(scope, name, lines, place.arguments())

    return write


def _sum_loops(region: Region, place: _Place, sums: Sums, lanes: int) -> list[str]:
    """The loops over the taps inside the image."""
    scope, window = place.scope, place.window
    weights = scope.constant("sums", "weights", _in_blocks(sums.weights, lanes))
    depth = place.number("channels", window.channels)
    products = place.number("products", prod(window.kernel) * window.channels)
    columns, dilation = place.pair("kernel")[1], place.pair("dilation")[1]
    merged = place.number("contiguous", int(window.contiguous_columns))
    kinds = (region.graph.types[region.source()].dtype, DType.of(sums.weights.dtype))
    image = scope.input(region.source(), "input")
    tap = times(total(times("kernel_row", columns), "first_column"), depth, lanes)
    pointers = [
        f"const {c_type(kinds[0])} *from = {total(image, place.source('0'))};",
        f"const {c_type(kinds[1])} *tap = {total(weights, times('channel', products), tap)};",
    ]
    value = _less(scope, "*from++", sums.pad_value)
    turn = [f"const int32_t value = {value};", *(f"sum_{lane} += value * tap[{lane}];" for lane in range(lanes))]
    turn.append(f"tap += {lanes};")
    count = times("end_column - first_column", depth) if merged == 1 else str(depth)
    lines = loop("count", count, turn)
    if merged != 1:
        skipped = times(f"{dilation} - 1", depth)
        lines = loop("kernel_column", "end_column", [*lines, f"from += {skipped};"], start="first_column")
    return loop("kernel_row", "end_row", [*pointers, *lines], start="first_row")


def _less(scope: Scope, element: str, pad_value: int) -> str:
    """An input element less what the padding holds."""
    taken = scope.number("sums", "pad_value", pad_value)
    return total(element, -taken) if isinstance(taken, int) else f"{element} - {taken}"


def write_compact_convolution(region: Region, scope: Scope) -> Writer:
    """The writer of a compact Conv2d."""
    return _write_sums(region, scope, convolution_products(region, scope), _lanes(scope))


def write_border_of_convolution(region: Region, scope: Scope) -> Writer:
    """The writer of one pixel of a Conv2d whose other pixels are computed in blocks of their own.

    Raises:
        Unsupported: all are, or none.
    """
    products = convolution_products(region, scope)
    kernel, pixels = choose_sums(region, scope, products)
    if not kernel.has_border(pixels):
        raise Unsupported("no pixels are computed one by one, or all.")
    return _write_sums(region, scope, products, kernel.lanes, one=True)


def _lanes(scope: Scope) -> int:
    return _LANES if scope.accumulators >= 2 * _LANES else _LANES // 2


def write_compact_dense(region: Region, scope: Scope) -> Writer:
    """The writer of a compact FullyConnected, the same function as a Conv2d's."""
    return _write_sums(region, scope, fully_connected_products(region, scope), _lanes(scope))


def _write_channels(
    region: Region,
    scope: Scope,
    window: Window,
    kind: str,
    start: Callable[[str], str],
    taps: Callable[[int], tuple[list[str], list[str], list[str]]],
    result: Callable[[str], Expression],
    one: bool = False,
) -> Writer:
    """The writer of a window that stays in its channel.

    Args:
        region: anchor and tree.
        scope: the kernel's parameters.
        window: the geometry.
        kind: C type of what is collected.
        start: what is collected at first, for a channel.
        taps: for a number of lanes: statements at the start of a kernel row, those of a tap, those that go to the next.
        result: the anchor's value of what was collected.
        one: whether the function computes the one pixel it is told.
    """
    lanes, place = channel_lanes(window.channels, _CHANNELS), _Place(scope, window, one)

    def write(name: str) -> list[str]:
        """The function."""
        channels, dilation = place.number("channels", window.channels), place.pair("dilation")[1]
        element = c_type(region.graph.types[region.source()].dtype)
        image = scope.input(region.source(), "input")
        before, turn, after = taps(lanes)
        turn = [*turn, f"from += {times(dilation, channels)};", *after]
        lines = [f"const {element} *from = {total(image, place.source('channel'))};", *before]
        lines += loop("kernel_column", "end_column", turn, start="first_column")
        lines = loop("kernel_row", "end_row", lines, start="first_row")
        names = [f"total_{lane}" for lane in range(lanes)]
        head = [f"{kind} {name} = {start(total('channel', lane))};" for lane, name in enumerate(names)]
        lines = [*head, *lines, *store_lanes(kind, names, 1, lanes, lambda text, _, lane: _finish(
            region, scope, channels, result(text), lane))]  # fmt: skip
        count = "const int32_t count = (end_row - first_row) * (end_column - first_column);"
        lines = place.loops([count, *loop("channel", channels, lines, step=lanes)], channels)
        return _function(scope, name, lines, place.arguments())

    return write


def write_compact_depthwise(region: Region, scope: Scope, one: bool = False) -> Writer:
    """The writer of a compact DepthwiseConv2d, of all pixels or the one told."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, DepthwiseConv2d)
    operator = anchor.operator
    require_dtype(region, region.source(), (DType.INT8, DType.UINT8, DType.INT16))
    weights = scope.known(anchor.inputs[1])
    for name in anchor.inputs[2:]:
        scope.known(name)
    window = window_of(region, (weights.shape[1], weights.shape[2]), operator.stride, operator.dilation)
    if weights.shape[3] != window.channels:
        raise Unsupported("a depthwise convolution with a multiplier has no compact form.")
    zero_points = (operator.input_zero_point, operator.weight_zero_point)
    sums = _whole_bytes(sums_of(region, weights.transpose(3, 1, 2, 0), zero_points))

    def taps(lanes: int) -> tuple[list[str], list[str], list[str]]:
        """The statements of one tap."""
        place = _Place(scope, window)
        columns, channels = place.pair("kernel")[1], place.number("channels", window.channels)
        flat = sums.weights.transpose(1, 2, 3, 0).reshape(-1)
        at = total(times(total(times("kernel_row", columns), "first_column"), channels), "channel")
        before = f"const {c_type(DType.of(flat.dtype))} *tap = {total(scope.constant('sums', 'weights', flat), at)};"
        values = [atom(_less(scope, f"from[{lane}]", sums.pad_value)) for lane in range(lanes)]
        turn = [f"total_{lane} += {value} * tap[{lane}];" for lane, value in enumerate(values)]
        return [before], turn, [f"tap += {channels};"]

    return _write_channels(
        region, scope, window, sums.kind, lambda channel: f"{scope.constant('sums', 'bias', sums.border)}[{channel}]",
        taps, lambda text: anchor_expression(region, sums, text), one,
    )  # fmt: skip


def write_border_of_depthwise(region: Region, scope: Scope) -> Writer:
    """The writer of one pixel of a DepthwiseConv2d whose other pixels are computed in groups of columns.

    Raises:
        Unsupported: there are few of those, or no border.
    """
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, DepthwiseConv2d)
    shape = region.graph.types[anchor.inputs[1]].shape
    window = window_of(region, (shape[1], shape[2]), anchor.operator.stride, anchor.operator.dilation)
    if not 0 < border_share(window, scope.accumulators) <= _MOST_BORDER:
        raise Unsupported("the border is none, or much of the image.")
    return write_compact_depthwise(region, scope, one=True)


def write_compact_pool(region: Region, scope: Scope) -> Writer:
    """The writer of a compact pool."""
    operator, kind, window = checked_pool(region)
    taps = prod(window.kernel)

    def result(text: str) -> Expression:
        """The pool's value."""
        if isinstance(operator, MaxPool2d):
            return Expression(text, "int32_t", kind.low, kind.high)
        if isinstance(operator, AveragePool2d):
            return Expression(f"divide_rounded({text}, count)", "int32_t", kind.low, kind.high)
        bounds = [taps * (bound - operator.input_zero_point) for bound in (kind.low, kind.high)]
        off = times("count", scope.number("window", "input_zero_point", operator.input_zero_point))
        return Expression(f"{text} - {off}", "int32_t", min(*bounds, 0), max(*bounds, 0))

    def collected(lanes: int) -> tuple[list[str], list[str], list[str]]:
        """The statements of one tap."""
        if isinstance(operator, MaxPool2d):
            most = [(f"total_{lane}", f"from[{lane}]") for lane in range(lanes)]
            return [], [f"{name} = {value} > {name} ? {value} : {name};" for name, value in most], []
        return [], [f"total_{lane} += from[{lane}];" for lane in range(lanes)], []

    first = kind.low if isinstance(operator, MaxPool2d) else 0
    return _write_channels(region, scope, window, "int32_t", lambda _: integer(first), collected, result)
