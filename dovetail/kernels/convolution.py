"""Convolutions: blocks of output channels share each loaded input element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from dovetail.graph.types import Array, DType
from dovetail.kernels.blocking import choose_blocking
from dovetail.kernels.epilogue import Expression, Scope, finish
from dovetail.kernels.kernel import accumulate_type, c_type
from dovetail.kernels.narrow import WIDTHS, fits, packed, row_bytes, unpacked
from dovetail.kernels.region import Region, require_dtype
from dovetail.kernels.text import channel_lanes, loop, product, total
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
    wrapped,
)
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, accumulator_type
from dovetail.operators.movement import Pad

ACTIVATIONS = (DType.INT8, DType.UINT8, DType.INT16)
_IN_ORDER = 4
"""Products after which a barrier keeps the compiler from loading further ahead."""
_UNROLLED = 8
"""Products per turn up to which neighbouring input elements are taken together."""


@dataclass(frozen=True)
class Sums:
    """The numbers of a sum of products: what the kernel's constants hold."""

    weights: Array
    """Weights less their zero point, [outputs, KH, KW, depth], int8 where they fit, else int16."""
    inside: Array
    """Start of each sum where all taps are inside: bias less input zero point times sum of weights."""
    border: Array
    """Start of each sum where taps in the padding are left out and the pad value is taken off each element."""
    pad_value: int
    """What the padding holds."""
    kind: str
    """C type of a sum."""
    reach: int
    """No sum, partial or final, is larger than this."""
    bits: int = 8
    """Bits of a weight in the kernel's constants: below 8 they share bytes (`dovetail.kernels.narrow`)."""


def sums_of(region: Region, weights: Array, zero_points: tuple[int, int]) -> Sums:
    """Fold zero points and the pad value into the constants, exactly.

    With v the pad value: sum((x - zx) * w) over all taps = sum(x * w) + (bias - zx * sum(w)), and as padded
    taps hold v it is also sum((x - v) * w) over the taps inside + (bias + (v - zx) * sum(w)).

    Args:
        weights: [outputs, KH, KW, depth].
        zero_points: the input's and the weights'.
    """
    anchor = region.anchor
    assert anchor is not None
    types, graph = region.graph.types, region.graph
    wide = weights.astype(np.int64) - zero_points[1]
    narrow = wide.min() >= -128 and wide.max() <= 127
    bias = graph.constants[anchor.inputs[2]].astype(np.int64) if len(anchor.inputs) > 2 else np.int64(0)
    per_output = wide.reshape(len(wide), -1)
    total_weight, weight_reach = per_output.sum(axis=1), np.abs(per_output).sum(axis=1)
    pad_value = int(region.pad.operator.value) if region.pad and isinstance(region.pad.operator, Pad) else 0
    inside = bias - zero_points[0] * total_weight
    border = bias + (pad_value - zero_points[0]) * total_weight if region.pad else inside
    x = types[region.source()].dtype
    farthest = max(-x.low, x.high) + abs(pad_value)
    reach = int((np.maximum(np.abs(inside), np.abs(border)) + weight_reach * farthest).max())
    kind = accumulate_type(-reach, reach)
    start = np.int32 if kind == "int32_t" else np.int64
    stored = wide.astype(np.int8 if narrow else np.int16)
    bits = types[anchor.inputs[1]].dtype.bits
    bits = bits if bits in WIDTHS and fits(wide, bits) else 8
    return Sums(stored, inside.astype(start), border.astype(start), pad_value, kind, reach, bits)


def anchor_expression(region: Region, sums: Sums, text: str) -> Expression:
    """A finished sum; it wraps to 32 bits where the operator's own type does and the sum may leave it."""
    accumulator = accumulator_type(region.graph.types[region.source()].dtype)
    if sums.kind == "int64_t" and accumulator is DType.INT32:
        return Expression(f"(int32_t){text}", "int32_t", DType.INT32.low, DType.INT32.high)
    return Expression(text, sums.kind, -sums.reach, sums.reach)


@dataclass(frozen=True)
class _Convolution:
    """One convolution kernel being written."""

    region: Region
    scope: Scope
    window: Window
    sums: Sums
    groups: int
    lanes: int
    """Output channels computed together."""

    @property
    def outputs(self) -> int:
        """Output channels."""
        return len(self.sums.weights)

    @property
    def depth(self) -> int:
        """Input channels each output reads."""
        return int(self.sums.weights.shape[3])

    @property
    def input(self) -> str:
        """The input array's name in C."""
        return self.scope.input(self.region.source(), "input")

    def packed(self) -> str:
        """The weights in blocks of `lanes` outputs, side by side for each tap; part-empty blocks hold zeros."""
        weights = self.sums.weights
        blocks = -(-self.outputs // self.lanes)
        whole = np.zeros((blocks * self.lanes, *weights.shape[1:]), weights.dtype)
        whole[: self.outputs] = weights
        ordered = whole.reshape(blocks, self.lanes, *weights.shape[1:]).transpose(0, 2, 3, 4, 1)
        ordered = packed(ordered, self.sums.bits) if self.sums.bits < 8 else ordered
        return self.scope.constant("sums", "weights", ordered.reshape(-1))

    @property
    def tap_size(self) -> int:
        """Elements of the constants that hold the weights of all lanes at one tap."""
        return row_bytes(self.lanes, self.sums.bits) if self.sums.bits < 8 else self.lanes

    def weight(self, element: int, lane: int) -> str:
        """C text of a weight: of a lane, at the tap `element` after the one pointed at."""
        base = element * self.tap_size
        return unpacked("tap", self.sums.bits, base, lane) if self.sums.bits < 8 else f"tap[{base + lane}]"

    def starts(self, clamped: bool) -> str:
        """The constant each sum begins with."""
        uses_border = clamped and self.window.any_padded
        array = self.sums.border if uses_border else self.sums.inside
        same = np.array_equal(self.sums.border, self.sums.inside)
        padding = -len(array) % self.lanes
        stem = "border_bias" if uses_border and not same else "bias"
        return self.scope.constant("sums", stem, np.pad(array, (0, padding)))

    def multiply(self, pixels: int, taken_off: int, step: int) -> list[str]:
        """Products of `step` neighbouring input elements of each pixel with every lane."""
        lines = []
        distance = self.window.stride[COLUMN] * self.window.channels
        crowded, count = pixels * self.lanes * step > _UNROLLED, 0
        for element in range(step):
            for pixel in range(pixels):
                name = f"value_{pixel}" if pixels > 1 else "value"
                kind = "const int32_t " if step == 1 else ("int32_t " if element == 0 else "")
                lines.append(f"{kind}{name} = {total(f'from[{element + pixel * distance}]', -taken_off)};")
            for lane in range(self.lanes):
                for pixel in range(pixels):
                    name = f"value_{pixel}" if pixels > 1 else "value"
                    lines.append(f"{self.sum(pixel, lane, pixels)} += {name} * {self.weight(element, lane)};")
                    count += 1
                if crowded and count >= _IN_ORDER:
                    lines.append("in_order();")
                    count = 0
        return lines

    def sum(self, pixel: int, lane: int, pixels: int) -> str:
        """The C variable of one sum."""
        return f"sum_{pixel}_{lane}" if pixels > 1 else f"sum_{lane}"

    def pointers(self, column: str) -> list[str]:
        """Statements that point at the input element and the weight under the tap at `kernel_row` and `column`."""
        window, depth, (rows, columns) = self.window, self.depth, self.window.kernel
        row = variable("kernel_row", rows)
        top = total("top", product(row, window.dilation[ROW]))
        left = total("left", product(column, window.dilation[COLUMN]))
        element = window.input_index(top, left, product(variable("group", self.groups), depth))
        tap = product(wrapped(total(product(row, columns), column)), depth * self.tap_size)
        channel, size = variable("channel", self.outputs), rows * columns * depth
        block_start = product(channel, size)
        if self.tap_size != self.lanes:
            block_start = product(f"{channel} / {self.lanes}" if channel != "0" else "0", size * self.tap_size)
        stored = DType.UINT8 if self.sums.bits < 8 else DType.of(self.sums.weights.dtype)
        kinds = (self.region.graph.types[self.region.source()].dtype, stored)
        return [
            f"const {c_type(kinds[0])} *from = {total(self.input, element)};",
            f"const {c_type(kinds[1])} *tap = {total(self.packed(), block_start, tap)};",
        ]

    def taps(self, pixels: int, clamped: bool) -> list[str]:
        """The loops over kernel rows, kernel columns and depth of one block of channels."""
        window, depth, columns = self.window, self.depth, self.window.kernel[COLUMN]
        clamped = clamped and window.any_padded
        taken_off = self.sums.pad_value if clamped else 0
        merged = columns == 1 or (window.contiguous_columns and self.groups == 1)
        first, end = window.first(COLUMN, clamped), window.end(COLUMN, clamped)
        lines = self.pointers(first if merged else "kernel_column")
        if merged and clamped and window.padded(COLUMN):
            lines += self._run(pixels, taken_off, product(f"({end} - {first})", depth), 1)
        else:
            length = columns * depth if merged else depth
            step = channel_lanes(length, max(_UNROLLED // (pixels * self.lanes), 1))
            lines += self._run(pixels, taken_off, str(length), step)
        lines = lines if merged else tap_loop("kernel_column", first, end, lines)
        return tap_loop("kernel_row", window.first(ROW, clamped), window.end(ROW, clamped), lines)

    def _run(self, pixels: int, taken_off: int, length: str, step: int) -> list[str]:
        products = self.multiply(pixels, taken_off, step)
        if length == str(step):
            return products
        advance = [f"from += {step};", f"tap += {step * self.tap_size};"]
        return loop("count", int(length) if length.isdigit() else length, [*products, *advance], step=step)

    def body(self, pixels: int, clamped: bool) -> list[str]:
        """All output channels of `pixels` neighbouring pixels."""
        window = self.window
        start = self.starts(clamped)
        lines = []
        for pixel in range(pixels):
            for lane in range(self.lanes):
                place = total(variable("channel", self.outputs), lane)
                lines.append(f"{self.sums.kind} {self.sum(pixel, lane, pixels)} = {start}[{place}];")
        lines += [*self.taps(pixels, clamped), *self.store(pixels)]
        if self.groups > 1:
            share = self.outputs // self.groups
            lines = loop("channel", f"(group + 1) * {share}", lines, start=f"group * {share}", step=self.lanes)
            lines = loop("group", self.groups, lines)
        else:
            lines = loop("channel", self.outputs, lines, step=self.lanes)
        clamps = window.clamps() if clamped else [
            f"const int32_t {name} = {window.origin(axis)};" for axis, name in enumerate(("top", "left"))
        ]
        place = f"const int32_t place = {window.output_index(self.outputs)};"
        return [*clamps, place, *lines]

    def store(self, pixels: int) -> list[str]:
        """The epilogue of every sum."""
        names = [self.sum(pixel, lane, pixels) for pixel in range(pixels) for lane in range(self.lanes)]
        stop: int | str = self.lanes
        head = []
        if self.outputs % self.lanes:
            rest = f"{self.outputs} - channel"
            head.append(f"const int32_t lanes = {rest} < {self.lanes} ? {rest} : {self.lanes};")
            stop = "lanes"
        return [*head, *store_lanes(self.sums.kind, names, pixels, stop, self.epilogue)]

    def epilogue(self, text: str, pixel: str, lane: str) -> list[str]:
        """The pointwise tree on one sum."""
        region = self.region
        assert region.anchor is not None
        channel = total(variable("channel", self.outputs), lane)
        position = total("place", product(pixel, self.outputs), channel)
        shape = region.graph.types[region.anchor.output].shape
        expression = anchor_expression(region, self.sums, text)
        return finish(self.scope, region.tree, anchored(shape, position, channel), (region.anchor.output, expression))

    def has_several(self, pixels: int) -> bool:
        """True when some rows have as many neighbouring columns whose taps are all inside."""
        (first, end), (top, bottom) = self.window.inside(COLUMN), self.window.inside(ROW)
        return pixels > 1 and end - first >= pixels and bottom > top

    def has_border(self, pixels: int) -> bool:
        """True when some pixels are computed together and others one by one."""
        (first, end), rows = self.window.inside(COLUMN), self.window.inside(ROW)
        columns = self.window.outputs[COLUMN]
        whole = (end - first) // pixels * pixels == columns and rows == (0, self.window.outputs[ROW])
        return self.has_several(pixels) and not whole

    def write(self, name: str, pixels: int) -> list[str]:
        """The kernel's functions."""
        window, several = self.window, self.has_several(pixels)
        parts = {}
        if self.scope.border is None:
            parts["pixel"] = Part(ONE_PIXEL, self.body(1, clamped=True))
        if several:
            comment = f"{pixels} neighbouring output columns, all taps inside the image."
            parts["pixels"] = Part(comment, self.body(pixels, clamped=False))
        return pixel_functions(name, self.scope, window, parts, lambda calls: pixel_loops(window, calls, pixels))


@dataclass(frozen=True)
class Products:
    """What a layer of sums of products multiplies."""

    window: Window
    weights: Array
    """[outputs, KH, KW, depth]."""
    zero_points: tuple[int, int]
    """The input's and the weights'."""


def convolution_products(region: Region, scope: Scope) -> Products:
    """Those of a Conv2d, or of a DepthwiseConv2d with a channel multiplier."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Conv2d | DepthwiseConv2d)
    operator = anchor.operator
    require_dtype(region, region.source(), ACTIVATIONS)
    weights = scope.known(anchor.inputs[1])
    if isinstance(operator, DepthwiseConv2d):
        weights = weights.transpose(3, 1, 2, 0)
    window = window_of(region, (weights.shape[1], weights.shape[2]), operator.stride, operator.dilation)
    if not window.any_padded and window.kernel == (1, 1) and window.stride == (1, 1):
        pixels = window.batch * prod(window.size)
        window = Window(1, (1, pixels), window.channels, (1, pixels), (1, 1), (1, 1), (1, 1), (0, 0))
    return Products(window, weights, (operator.input_zero_point, operator.weight_zero_point))


def write_convolution(region: Region, scope: Scope) -> Callable[[str], list[str]]:
    """The writer of a Conv2d kernel, or of a DepthwiseConv2d with a channel multiplier."""
    return write_sums(region, scope, convolution_products(region, scope))


def write_sums(region: Region, scope: Scope, products: Products) -> Callable[[str], list[str]]:
    """The writer of a kernel of sums of products.

    Args:
        region: the region; its anchor's third operand, if any, is the bias.
        scope: the kernel's parameters.
        products: what is multiplied.
    """
    kernel, pixels = choose_sums(region, scope, products)
    return lambda name: kernel.write(name, pixels)


def choose_sums(region: Region, scope: Scope, products: Products) -> tuple[_Convolution, int]:
    """The kernel, its block of output channels chosen, and how many pixels it computes together."""
    window, weights = products.window, products.weights
    for name in region.anchor.inputs[2:] if region.anchor else ():
        scope.known(name)
    groups = window.channels // weights.shape[3]
    share = len(weights) // groups
    sums = sums_of(region, weights, products.zero_points)
    columns, rows = (end - first for first, end in (window.inside(COLUMN), window.inside(ROW)))
    others = window.outputs[ROW] * window.outputs[COLUMN] - rows * columns
    registers = max(scope.accumulators // (2 if sums.kind == "int64_t" else 1), 1)
    fields = 8 // sums.bits
    multiple = fields if min(share, registers) >= fields and (groups == 1 or share % fields == 0) else 1
    block = choose_blocking(share, columns, rows, others, registers, groups > 1, scope.lanes, multiple)
    scope.lanes = block.lanes
    return _Convolution(region, scope, window, sums, groups, block.lanes), block.pixels
