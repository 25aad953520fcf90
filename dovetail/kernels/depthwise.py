"""Depthwise convolutions: every channel for itself, channels innermost."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.ir.operators.linear import DepthwiseConv2d
from dovetail.kernels.c import Lines, atom, block, channel_lanes, loop, product, times, total
from dovetail.kernels.convolution import blocked_turns, write_sums
from dovetail.kernels.kernel import KernelWriter, Turns, UnsupportedRegion, refuse, summed_turns, turns_of_family
from dovetail.kernels.lanes import lanes_loops
from dovetail.kernels.planes import planes_of
from dovetail.kernels.registry import TURNS, InstructedWay, kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import Added, SumNest, looked_up, products_of, sums_of
from dovetail.kernels.vectors import channels_of
from dovetail.kernels.window import COLUMN, ONE_PIXEL, ROW, WindowGeometry, pixel_loops
from dovetail.records import Record

_PIXELS = 5
"""Most output columns computed together."""
_ALONE = 4
"""Instructions per product of a pixel computed by itself."""
_MOST_BORDER = 1 / 3
"""The part of an image's pixels up to which those at its border take the slower way."""
_MOST_PRODUCTS = 40
"""Products written out per kernel row; wider kernels compute fewer columns together."""


class ColumnGroup(Record):
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
        return "middle" if self.inside else f"column_{self.start}"

    def products(self, window: WindowGeometry, added: Added) -> list[tuple[int, Lines]]:
        """Per input column, counted from the first tap's, the products its element takes part in, as `added` has them
        written."""
        reads: dict[int, Lines] = {}
        for pixel, taps in enumerate(self.taps):
            for tap in taps:
                place = pixel * window.stride[COLUMN] + tap * window.dilation[COLUMN]
                reads.setdefault(place, []).append(added(f"sum_{pixel}", "value", f"weight_{tap}"))
        return sorted(reads.items())


def column_groups(window: WindowGeometry, accumulators: int) -> list[ColumnGroup]:
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
        groups.append(ColumnGroup(start, pixels, inside, all(len(some) == taps for some in inside)))
    return groups if all(any(group.taps) for group in groups) else []


def inner_group(window: WindowGeometry, accumulators: int) -> ColumnGroup:
    """Columns computed together where all their taps are inside and every other pixel is computed by itself."""
    (first, end), taps = window.inside(COLUMN), window.kernel[COLUMN]
    columns = end - first
    most = max(min(_PIXELS, accumulators, columns, _MOST_PRODUCTS // taps), 1)

    def cost(pixels: int) -> int:
        groups, rest = divmod(columns, pixels)
        return groups * (pixels * (taps + 2) + taps) + rest * _ALONE * taps

    pixels = min(range(1, most + 1), key=lambda size: (cost(size), size))
    return ColumnGroup(first, pixels, (tuple(range(taps)),) * pixels, True)


def border_share(window: WindowGeometry, accumulators: int) -> float:
    """The part of the pixels that are computed by themselves beside those of `inner_group`."""
    (first, end), (top, bottom) = window.inside(COLUMN), window.inside(ROW)
    pixels = inner_group(window, accumulators).pixels
    inner = (end - first) // pixels * pixels * (bottom - top)
    return 1 - inner / (window.outputs[ROW] * window.outputs[COLUMN])


def _column(window: WindowGeometry, output: int, tap: int) -> int:
    return output * window.stride[COLUMN] - window.before[COLUMN] + tap * window.dilation[COLUMN]


def group_loops(window: WindowGeometry, groups: list[ColumnGroup], calls: Mapping[str, str]) -> Lines:
    """Loops over all pixels, group by group."""
    lines: Lines = []
    middle = [group for group in groups if group.inside]
    (top, bottom), rows = window.inside(ROW), window.outputs[ROW]
    for group in groups:
        if not group.inside:
            lines.append(calls[group.name])
        elif group is middle[0]:
            regular = [part for part in middle if (part.start - group.start) % group.pixels == 0]
            stop, last = regular[-1].start + 1, None if regular[-1] is middle[-1] else middle[-1].start
            whole = _stretch(group, stop, last, calls["middle"])
            if window.padded(ROW):
                edge = _stretch(group, stop, last, calls["middle_edge"])
                whole = [*block(f"if (row >= {top} && row < {bottom})", whole)[:-1], *block("} else", edge)]
            lines += whole
    return loop("image", window.batch, loop("row", rows, lines))


def _stretch(first: ColumnGroup, stop: int, last: int | None, statement: str) -> Lines:
    """The calls for groups whose taps are all inside: at even distances, and one that was drawn back."""
    lines = loop("column", stop, [statement], start=first.start, step=first.pixels)
    return lines if last is None else [*lines, *loop("column", last + 1, [statement], start=last)]


class _DepthwiseKernel(SumNest):
    """One depthwise kernel being written."""

    def pointers(self, column: str, left: str) -> Lines:
        """Statements that point at a weight and an input element of the present kernel row and channel, at the weight's
        kernel column and at the input's (both C text)."""
        row, channels = self.tap(ROW), self.number("channels", self.outputs)
        line = total(times(row, self.pair("kernel")[COLUMN]), column)
        line = (
            times(line, channels) if self.scope.compact else product(f"({line})" if " " in line else line, self.outputs)
        )
        weights, tap = self.channelwise_weights(), total(line, self.channel)
        pointed = f"int32_t tap = {tap};" if self.sums.bits < 8 else self.tap_pointer(total(weights, tap))
        return [self.pointer(self.below(ROW, row), left, self.channel), pointed]

    def channelwise_weights(self) -> str:
        """The C identifier of the weights, channels innermost."""
        flat = self.sums.weights.transpose(1, 2, 3, 0).reshape(-1)
        return self.weights(flat)

    def weight(self, offset: int) -> str:
        """C text of the weight `offset` elements after the one pointed at."""
        if self.sums.bits == 8:
            return f"tap[{offset}]"
        return looked_up(self.channelwise_weights(), self.sums.bits, total("tap", offset))

    def one(self) -> Lines:
        """Any one pixel: some channels in registers, over the taps inside the image."""
        compact, column = self.scope.compact, self.first(COLUMN)
        channels, dilation = self.number("channels", self.outputs), self.pair("dilation")[COLUMN]
        lanes = range(channel_lanes(self.outputs, 4))
        names = [f"{'total' if compact else 'sum'}_{lane}" for lane in lanes]
        start = "" if compact else self.starts(True)
        self.pair("kernel")
        values = [atom(self.less_padding(self.taken(lane))) for lane in lanes]
        lines = self.pointers(column, self.below(COLUMN, column))
        steps = [self.added(name, values[lane], self.weight(lane)) for lane, name in enumerate(names)]
        if self.window.kernel[COLUMN] > 1 or compact:
            steps += [f"from += {times(dilation, channels)};", f"tap += {channels};"]
        lines = self.rows([*lines, *self.columns(steps)])
        start = start or self.starts(True)
        starts = {name: f"{start}[{total(self.channel, lane)}]" for lane, name in enumerate(names)}
        return self.over_channels(self.sums.kind, starts, lines, self.sums.value)

    def several(self, group: ColumnGroup, clamped: bool) -> Lines:
        """Neighbouring pixels: each input element is loaded once for all of them. Taps left and right of the image are
        left out of the text; `clamped` says whether kernel rows may be outside too."""
        channels, channel = self.outputs, self.channel
        border = clamped or not group.inside
        reads = group.products(self.window, self.added)
        nearest = reads[0][0]
        lines = self.pointers("0", total("left", nearest))
        visited = sorted({tap for taps in group.taps for tap in taps})
        lines += [f"const int32_t weight_{tap} = {self.weight(tap * channels)};" for tap in visited]
        for number, (place, products) in enumerate(reads):
            value = self.less_padding(self.taken((place - nearest) * channels), border)
            lines += [f"{'' if number else 'int32_t '}value = {value};", *products, "in_order();"]
        names = [f"sum_{pixel}" for pixel in range(group.pixels)]
        if self.sums.kind == "int32_t":
            lines += [f"{name} = held({name});" for name in names]
        start = f"{self.starts(border)}[{channel}]"
        lines = [*(f"{self.sums.kind} {name} = {start};" for name in names), *self.rows(lines, clamped)]
        lines += self.store(self.sums.kind, names, self.sums.value, channel, group.pixels)
        fixed = [] if group.inside else [f"const int32_t column = {group.start};"]
        return [*fixed, *self.clamps(), self.place(channels), *loop("channel", channels, lines)]

    def write(self, name: str) -> Lines:
        window, accumulators = self.window, self.scope.core.accumulators
        if self.scope.compact:
            return self.shared_function(name, self.one())
        groups = column_groups(window, accumulators)
        if not groups:
            return self.functions(name, {"pixel": (ONE_PIXEL, self.one())}, lambda calls: pixel_loops(window, calls, 1))
        clamped, parts = window.padded(ROW), {}
        count = f"{groups[0].pixels} columns" if groups[0].pixels > 1 else "One column"
        if self.scope.border is not None:
            group = inner_group(window, accumulators)
            several = group.pixels
            parts["pixels"] = f"{several} columns, all taps inside the image.", self.several(group, False)
            return self.functions(name, parts, lambda calls: pixel_loops(window, calls, several))
        for group in groups:
            if group.inside:
                parts["middle"] = f"{count}, all taps inside the image.", self.several(group, False)
                if clamped:
                    parts["middle_edge"] = f"{count}, some taps outside the image.", self.several(group, True)
            else:
                comment = f"{count} from column {group.start}, some taps outside the image."
                parts[group.name] = comment, self.several(group, clamped)
        return self.functions(name, parts, lambda calls: group_loops(window, groups, calls))


@kernel(DepthwiseConv2d, table=TURNS)
def _turns(scope: KernelScope) -> Turns:
    core, products = scope.core, products_of(scope, merged=False)
    groups = column_groups(products.window, core.accumulators) if products.channelwise else []
    return _turns_of_groups(products.window, groups) if groups else blocked_turns(products, core)


def _turns_of_groups(window: WindowGeometry, groups: list[ColumnGroup]) -> Turns:
    """Depthwise: neighbouring columns together, channel by channel."""
    inside, channels = window.taps_inside(ROW), window.channels * window.batch
    (top, bottom), rows = window.inside(ROW), sum(inside)
    name = "depthwise" if window.any_padded else "open_depthwise"
    per_group = []
    for group in groups:
        places = {
            pixel * window.stride[COLUMN] + tap * window.dilation[COLUMN]
            for pixel, taps in enumerate(group.taps)
            for tap in taps
        }
        counts = {
            "product": sum(map(len, group.taps)) * rows,
            "load": len(places) * rows,
            "weight": window.kernel[COLUMN] * rows,
            "row": rows,
            "edge_row": sum(inside[:top]) + sum(inside[bottom:]),
            "group": len(inside),
            "result": len(inside) * group.pixels,
        }
        per_group.append(turns_of_family(name, {part: count * channels for part, count in counts.items()}))
        per_group.append({f"{name}.turn": len(inside) * window.batch})
    return {**summed_turns(*per_group), f"{name}.call": 1}


@kernel(
    DepthwiseConv2d,
    windowed=True,
    packed=True,
    compact=True,
    borders=True,
    ways=(InstructedWay(channels_of), InstructedWay(planes_of), InstructedWay(lanes_loops)),
)
def _depthwise(scope: KernelScope, operator: DepthwiseConv2d) -> KernelWriter:
    """The writer of a DepthwiseConv2d kernel; one with a channel multiplier is a grouped convolution."""
    products = products_of(scope, merged=False)
    sums = sums_of(scope, products)
    if scope.compact:
        sums.require_bytes()
        share = border_share(products.window, scope.core.accumulators)
        refuse(scope.single and not 0 < share <= _MOST_BORDER, "the border is none, or much of the image.")
        if not products.channelwise:
            raise UnsupportedRegion("a depthwise convolution with a multiplier has no compact form.")
    elif not products.channelwise:
        return write_sums(scope, operator)
    nest = _DepthwiseKernel(scope, products.window, sums)
    return KernelWriter(nest.write, lambda: nest.finish(nest.sums.value("sum"), "0"))
