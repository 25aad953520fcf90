"""Depthwise convolutions: every channel for itself, channels innermost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dovetail.graph.types import DType
from dovetail.kernels.convolution import ACTIVATIONS, Sums, anchor_expression, sums_of, write_convolution
from dovetail.kernels.epilogue import Scope, finish
from dovetail.kernels.kernel import c_type
from dovetail.kernels.narrow import looked_up, packed
from dovetail.kernels.region import Region, require_dtype
from dovetail.kernels.text import block, channel_lanes, loop, product, total
from dovetail.kernels.window import (
    COLUMN,
    ONE_PIXEL,
    ROW,
    Part,
    Window,
    anchored,
    pixel_functions,
    pixel_loops,
    store_lanes,
    tap_loop,
    variable,
    window_of,
)
from dovetail.operators.linear import DepthwiseConv2d

_PIXELS = 5
"""Most output columns computed together."""
_ALONE = 4
"""Instructions per product of a pixel computed by itself."""
_MOST_PRODUCTS = 40
"""Products written out per kernel row; wider kernels compute fewer columns together."""


@dataclass(frozen=True)
class _Group:
    """Output columns computed together."""

    start: int
    """The first column."""
    pixels: int
    taps: tuple[tuple[int, ...], ...]
    """The kernel columns inside the image, for each pixel."""
    inside: bool
    """True when these are all: such groups share one function."""

    @property
    def name(self) -> str:
        """Suffix of the C function."""
        return "middle" if self.inside else f"column_{self.start}"

    def products(self, window: Window) -> list[tuple[int, list[str]]]:
        """Per input column, counted from the first tap's, the products its element takes part in."""
        reads: dict[int, list[str]] = {}
        for pixel, taps in enumerate(self.taps):
            for tap in taps:
                place = pixel * window.stride[COLUMN] + tap * window.dilation[COLUMN]
                reads.setdefault(place, []).append(f"sum_{pixel} += value * weight_{tap};")
        return sorted(reads.items())


def column_groups(window: Window, accumulators: int) -> list[_Group]:
    """The output columns in groups of one size, the last drawn back to end with the image; none for wide kernels."""
    columns, taps = window.outputs[COLUMN], window.kernel[COLUMN]
    most = min(_PIXELS, accumulators, columns, _MOST_PRODUCTS // taps)
    if most < 1:
        return []
    pixels = min(range(1, most + 1), key=lambda size: (-(-columns // size) * (size * (taps + 2) + taps), size))
    starts = dict.fromkeys([*range(0, columns - pixels, pixels), columns - pixels])
    groups = []
    for start in starts:
        inside = tuple(
            tuple(tap for tap in range(taps) if 0 <= _column(window, start + pixel, tap) < window.size[COLUMN])
            for pixel in range(pixels)
        )
        groups.append(_Group(start, pixels, inside, all(len(some) == taps for some in inside)))
    return groups if all(any(group.taps) for group in groups) else []


def inner_group(window: Window, accumulators: int) -> _Group:
    """Columns computed together where all their taps are inside and every other pixel is computed by itself."""
    (first, end), taps = window.inside(COLUMN), window.kernel[COLUMN]
    columns = end - first
    most = max(min(_PIXELS, accumulators, columns, _MOST_PRODUCTS // taps), 1)

    def cost(pixels: int) -> int:
        """Instructions of a row, about."""
        groups, rest = divmod(columns, pixels)
        return groups * (pixels * (taps + 2) + taps) + rest * _ALONE * taps

    pixels = min(range(1, most + 1), key=lambda size: (cost(size), size))
    return _Group(first, pixels, (tuple(range(taps)),) * pixels, True)


def border_share(window: Window, accumulators: int) -> float:
    """The part of the pixels that are computed by themselves beside those of `inner_group`."""
    (first, end), (top, bottom) = window.inside(COLUMN), window.inside(ROW)
    pixels = inner_group(window, accumulators).pixels
    inner = (end - first) // pixels * pixels * (bottom - top)
    return 1 - inner / (window.outputs[ROW] * window.outputs[COLUMN])


def _column(window: Window, output: int, tap: int) -> int:
    """The input column under a tap of an output column."""
    return output * window.stride[COLUMN] - window.before[COLUMN] + tap * window.dilation[COLUMN]


def group_loops(window: Window, groups: list[_Group], calls: Mapping[str, str]) -> list[str]:
    """Loops over all pixels, group by group."""
    lines: list[str] = []
    middle = [group for group in groups if group.inside]
    (top, bottom), rows = window.inside(ROW), window.outputs[ROW]
    for group in groups:
        if not group.inside:
            lines.append(calls[group.name])
        elif group is middle[0]:
            last = middle[-1].start
            regular = [part for part in middle if (part.start - group.start) % group.pixels == 0]
            stop = regular[-1].start + 1
            whole = _stretch(group, stop, last if regular[-1] is not middle[-1] else None, calls["middle"])
            if window.padded(ROW):
                edge = _stretch(group, stop, last if regular[-1] is not middle[-1] else None, calls["middle_edge"])
                whole = [*block(f"if (row >= {top} && row < {bottom})", whole)[:-1], *block("} else", edge)]
            lines += whole
    return loop("image", window.batch, loop("row", rows, lines))


def _stretch(first: _Group, stop: int, last: int | None, statement: str) -> list[str]:
    """The calls for groups whose taps are all inside: at even distances, and one that was drawn back."""
    lines = loop("column", stop, [statement], start=first.start, step=first.pixels)
    return lines if last is None else [*lines, *loop("column", last + 1, [statement], start=last)]


@dataclass(frozen=True)
class _Depthwise:
    """One depthwise kernel being written."""

    region: Region
    scope: Scope
    window: Window
    sums: Sums

    def pointers(self, row: str, columns: tuple[str, str], channel: str) -> list[str]:
        """Statements that point at a weight and an input element.

        Args:
            row: the kernel row, C text as all arguments.
            columns: the weight's kernel column, and the input's column from the window's first.
            channel: the channel.
        """
        window, channels = self.window, self.window.channels
        kinds = (self.region.graph.types[self.region.source()].dtype, DType.of(self.sums.weights.dtype))
        top = total("top", product(row, window.dilation[ROW]))
        left = total("left", int(columns[1]) if columns[1].isdigit() else columns[1])
        line = total(product(row, window.kernel[COLUMN]), columns[0])
        tap = total(product(f"({line})" if " " in line else line, channels), channel)
        image = self.scope.input(self.region.source(), "input")
        pointed = f"const {c_type(kinds[1])} *tap = {total(self.weights(), tap)};"
        pointed = f"int32_t tap = {tap};" if self.sums.bits < 8 else pointed
        return [f"const {c_type(kinds[0])} *from = {total(image, window.input_index(top, left, channel))};", pointed]

    def weights(self) -> str:
        """The C identifier of the weights, channels innermost; narrow ones share bytes."""
        ordered = self.sums.weights.transpose(1, 2, 3, 0).reshape(-1)
        ordered = packed(ordered, self.sums.bits) if self.sums.bits < 8 else ordered
        return self.scope.constant("sums", "weights", ordered)

    def weight(self, offset: int) -> str:
        """C text of the weight `offset` elements after the one pointed at."""
        if self.sums.bits == 8:
            return f"tap[{offset}]"
        return looked_up(self.weights(), self.sums.bits, total("tap", offset))

    def start(self, clamped: bool) -> str:
        """The constant each sum begins with."""
        if clamped and self.window.any_padded and (self.sums.border != self.sums.inside).any():
            return self.scope.constant("sums", "border_bias", self.sums.border)
        return self.scope.constant("sums", "bias", self.sums.inside)

    def epilogue(self, text: str, pixel: str, lane: str) -> list[str]:
        """The pointwise tree on one sum."""
        anchor, channels = self.region.anchor, self.window.channels
        assert anchor is not None
        channel = total(variable("channel", channels), lane)
        index = anchored(self.region.output_shape, total("place", product(pixel, channels), channel), channel)
        value = anchor_expression(self.region, self.sums, text)
        return finish(self.scope, self.region.tree, index, (anchor.output, value))

    def one(self) -> list[str]:
        """Any one pixel: some channels in registers, over the taps inside the image."""
        window, channels = self.window, self.window.channels
        clamped = window.any_padded
        lanes = channel_lanes(channels, 4)
        start, taken_off = self.start(True), self.sums.pad_value if clamped else 0
        channel = variable("channel", channels)
        column = window.first(COLUMN, clamped)
        first = product(column, window.dilation[COLUMN])
        products = []
        for lane in range(lanes):
            value = total(f"from[{lane}]", -taken_off)
            value = f"({value})" if taken_off else value
            products.append(f"sum_{lane} += {value} * {self.weight(lane)};")
        if window.kernel[COLUMN] > 1:
            products += [f"from += {window.dilation[COLUMN] * channels};", f"tap += {channels};"]
        lines = self.pointers(variable("kernel_row", window.kernel[ROW]), (column, first), channel)
        lines += tap_loop("kernel_column", column, window.end(COLUMN, clamped), products)
        lines = tap_loop("kernel_row", window.first(ROW, clamped), window.end(ROW, clamped), lines)
        names = [f"sum_{lane}" for lane in range(lanes)]
        sums = [f"{self.sums.kind} {name} = {start}[{total(channel, lane)}];" for lane, name in enumerate(names)]
        lines = [*sums, *lines, *store_lanes(self.sums.kind, names, 1, lanes, self.epilogue)]
        place = f"const int32_t place = {window.output_index(channels)};"
        return [*window.clamps(), place, *loop("channel", channels, lines, step=lanes)]

    def several(self, group: _Group, clamped: bool) -> list[str]:
        """Neighbouring pixels: each input element is loaded once for all of them.

        Args:
            group: the pixels; taps left and right of the image are left out of the text.
            clamped: whether kernel rows may be outside the image too.
        """
        window, channels = self.window, self.window.channels
        border = clamped or not group.inside
        taken_off = self.sums.pad_value if border else 0
        reads = group.products(window)
        nearest = reads[0][0]
        row, channel = variable("kernel_row", window.kernel[ROW]), variable("channel", channels)
        lines = self.pointers(row, ("0", str(nearest)), channel)
        visited = sorted({tap for taps in group.taps for tap in taps})
        lines += [f"const int32_t weight_{tap} = {self.weight(tap * channels)};" for tap in visited]
        for number, (place, products) in enumerate(reads):
            value = total(f"from[{(place - nearest) * channels}]", -taken_off)
            lines += [f"{'' if number else 'int32_t '}value = {value};", *products, "in_order();"]
        names = [f"sum_{pixel}" for pixel in range(group.pixels)]
        if self.sums.kind == "int32_t":
            lines += [f"{name} = held({name});" for name in names]
        lines = tap_loop("kernel_row", window.first(ROW, clamped), window.end(ROW, clamped), lines)
        start = f"{self.start(border)}[{variable('channel', channels)}]"
        sums = [f"{self.sums.kind} {name} = {start};" for name in names]
        lines = [*sums, *lines, *store_lanes(self.sums.kind, names, group.pixels, 1, self.epilogue)]
        fixed = [] if group.inside else [f"const int32_t column = {group.start};"]
        output = f"const int32_t place = {window.output_index(channels)};"
        return [*fixed, *window.clamps(), output, *loop("channel", channels, lines)]

    def write(self, name: str) -> list[str]:
        """The kernel's functions."""
        window = self.window
        groups = column_groups(window, self.scope.accumulators)
        if not groups:
            parts = {"pixel": Part(ONE_PIXEL, self.one())}
            return pixel_functions(name, self.scope, window, parts, lambda calls: pixel_loops(window, calls, 1))
        clamped, parts = window.padded(ROW), {}
        count = f"{groups[0].pixels} columns" if groups[0].pixels > 1 else "One column"
        if self.scope.border is not None:
            group = inner_group(window, self.scope.accumulators)
            several = group.pixels
            parts["pixels"] = Part(f"{several} columns, all taps inside the image.", self.several(group, False))
            return pixel_functions(name, self.scope, window, parts, lambda calls: pixel_loops(window, calls, several))
        for group in groups:
            if group.inside:
                parts["middle"] = Part(f"{count}, all taps inside the image.", self.several(group, False))
                if clamped:
                    parts["middle_edge"] = Part(f"{count}, some taps outside the image.", self.several(group, True))
            else:
                comment = f"{count} from column {group.start}, some taps outside the image."
                parts[group.name] = Part(comment, self.several(group, clamped))
        return pixel_functions(name, self.scope, window, parts, lambda calls: group_loops(window, groups, calls))


def write_depthwise(region: Region, scope: Scope) -> Callable[[str], list[str]]:
    """The writer of a DepthwiseConv2d kernel; one with a channel multiplier is a grouped convolution."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, DepthwiseConv2d)
    operator = anchor.operator
    require_dtype(region, region.source(), ACTIVATIONS)
    weights = scope.known(anchor.inputs[1])
    for name in anchor.inputs[2:]:
        scope.known(name)
    window = window_of(region, (weights.shape[1], weights.shape[2]), operator.stride, operator.dilation)
    if weights.shape[3] != window.channels:
        return write_convolution(region, scope)
    zero_points = (operator.input_zero_point, operator.weight_zero_point)
    sums = sums_of(region, weights.transpose(3, 1, 2, 0), zero_points)
    return _Depthwise(region, scope, window, sums).write
