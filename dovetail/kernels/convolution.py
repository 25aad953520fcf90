"""Convolutions and dense layers of integers, in blocks of pixels and channels that share loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.kernels.blocks import clamped_run, one_run, ordered, register_block, turn_elements
from dovetail.kernels.c import Lines, block, c_type, loop, product, times, total, variable, wrapped
from dovetail.kernels.kernel import UNROLL, KernelWriter, refuse
from dovetail.kernels.patches import patches_of
from dovetail.kernels.registry import InstructedWay, kernel
from dovetail.kernels.scheduled.write import scheduled_loops
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import (
    Products,
    SumConstants,
    SumNest,
    blocked,
    products_of,
    row_bytes,
    sums_of,
    unpacked,
)
from dovetail.kernels.window import COLUMN, ONE_PIXEL, ROW, Nest, pixel_loops

_LANES = 8
"""Output channels that functions shared by layers compute together, on a core with registers for them and as many sums
again."""
_IN_ORDER = 4
"""Products after which a barrier keeps the compiler from loading further ahead."""


def _made(names: Sequence[str]) -> str:
    """The statement before which these are computed, and loads that stand there made: else compilers load and multiply
    far ahead and run out of registers, and count pointers anew from an index."""
    operands = ", ".join(f'"+r"({name})' for name in names)
    return f'__asm__ volatile("" : {operands} : : "memory");'


@dataclass(frozen=True)
class _ConvolutionKernel(SumNest):
    """One convolution kernel being written."""

    groups: int
    lanes: int
    """Output channels computed together."""
    pixels: int
    """Neighbouring pixels computed together."""
    unroll: int
    """Most input elements of each pixel taken together; 0 for as many as suit the block."""

    @property
    def depth(self) -> int:
        return int(self.sums.weights.shape[3])

    @property
    def tap_size(self) -> int:
        """Elements of the constants that hold the weights of all lanes at one tap."""
        return row_bytes(self.lanes, self.sums.bits) if self.sums.bits < 8 else self.lanes

    def weight(self, element: int, lane: int) -> str:
        """C text of a weight: of a lane, at the tap `element` after the one pointed at."""
        base = element * self.tap_size
        return unpacked("tap", self.sums.bits, base, lane) if self.sums.bits < 8 else f"tap[{base + lane}]"

    def multiply(self, pixels: int, clamped: bool, step: int) -> Lines:
        """Products of `step` neighbouring input elements of each pixel with every lane."""
        lines = []
        distance = self.window.stride[COLUMN] * self.window.channels
        crowded, done = ordered(pixels * self.lanes, step), Lines()
        values = [f"value_{pixel}" if pixels > 1 else "value" for pixel in range(pixels)]
        for element in range(step):
            for pixel, name in enumerate(values):
                kind = "const int32_t " if step == 1 else ("int32_t " if element == 0 else "")
                lines.append(f"{kind}{name} = {self.less_padding(self.taken(element + pixel * distance), clamped)};")
            for lane in range(self.lanes):
                for pixel, name in enumerate(values):
                    lines.append(self.added(self.sum(pixel, lane, pixels), name, self.weight(element, lane)))
                    done.append(self.sum(pixel, lane, pixels))
                if crowded and len(done) >= _IN_ORDER:
                    lines.append(_made(done) if self.sums.kind == "int32_t" else "in_order();")
                    done = []
        return lines

    def sum(self, pixel: int, lane: int, pixels: int) -> str:
        return f"sum_{pixel}_{lane}" if pixels > 1 else f"sum_{lane}"

    def pointers(self, column: str) -> Lines:
        """Statements that point at the input element and the weight under the tap at `kernel_row` and `column`."""
        depth, (rows, columns) = self.depth, self.window.kernel
        row = self.tap(ROW)
        group = product(variable("group", self.groups), depth)
        tap = product(wrapped(total(product(row, columns), column)), depth * self.tap_size)
        channel, size = variable("channel", self.outputs), rows * columns * depth
        block_start = product(channel, size)
        if self.tap_size != self.lanes:
            block_start = product(f"{channel} / {self.lanes}" if channel != "0" else "0", size * self.tap_size)
        weights = self.weights(blocked(self.sums.weights, self.lanes))
        return [
            self.pointer(self.below(ROW, row), self.below(COLUMN, column), group),
            self.tap_pointer(total(weights, block_start, tap)),
        ]

    def taps(self, pixels: int, clamped: bool) -> Lines:
        """The loops over kernel rows, kernel columns and depth of one block of channels."""
        window, depth, columns = self.window, self.depth, self.window.kernel[COLUMN]
        clamped = clamped and window.any_padded
        merged = one_run(window, self.groups)
        first, end = self.first(COLUMN, clamped), self.end(COLUMN, clamped)
        lines = self.pointers(first if merged else "kernel_column")
        if clamped and clamped_run(window, self.groups):
            lines += self._run(pixels, clamped, product(f"({end} - {first})", depth), 1)
        else:
            length = columns * depth if merged else depth
            step = turn_elements(length, pixels * self.lanes, self.unroll)
            lines += self._run(pixels, clamped, str(length), step)
        return self.rows(lines if merged else self.columns(lines, clamped), clamped)

    def _run(self, pixels: int, clamped: bool, length: str, step: int) -> Lines:
        products = self.multiply(pixels, clamped, step)
        if length == str(step):
            return products
        advance = [f"from += {step};", f"tap += {step * self.tap_size};"]
        advance += [_made(["from", "tap"])] if ordered(pixels * self.lanes, step) else []
        end = f"const {c_type(self.sums.stored)} *const end = tap + {product(length, self.tap_size)};"
        return [end, *block("while (tap != end)", [*products, *advance])]

    def shared_taps(self) -> Lines:
        """As `taps`, of a function that layers share."""
        weights, lanes = self.weights(blocked(self.sums.weights, self.lanes)), self.lanes
        depth, size = self.number("channels", self.depth), prod(self.window.kernel) * self.depth
        block_start = times("channel", self.number("products", size))
        columns, dilation = self.pair("kernel")[COLUMN], self.pair("dilation")[COLUMN]
        merged = self.number("contiguous", int(self.window.contiguous_columns))
        tap = times(total(times("kernel_row", columns), "first_column"), depth, lanes)
        pointer = self.pointer(self.below(ROW, "kernel_row"), self.below(COLUMN, "first_column"), "0")
        turn = [f"const int32_t value = {self.less_padding('*from++')};"]
        turn += [*(f"sum_{lane} += value * tap[{lane}];" for lane in range(lanes)), f"tap += {lanes};"]
        lines = loop("count", times("end_column - first_column", depth) if merged == 1 else str(depth), turn)
        if merged != 1:
            lines = self.columns([*lines, f"from += {times(f'{dilation} - 1', depth)};"])
        return self.rows([pointer, self.tap_pointer(total(weights, block_start, tap)), *lines])

    def body(self, pixels: int, clamped: bool) -> Lines:
        number, compact = self.scope.number, self.scope.compact
        outputs, ragged = (
            number("sums", "outputs", self.outputs),
            number("sums", "ragged", self.outputs % self.lanes > 0),
        )
        start, channel = self.starts(clamped, self.lanes), self.channel
        sums = [(self.sum(pixel, lane, pixels), lane) for pixel in range(pixels) for lane in range(self.lanes)]
        lines = [f"{self.sums.kind} {name} = {start}[{total(channel, lane)}];" for name, lane in sums]
        names = [name for name, _ in sums]
        lines += self.shared_taps() if compact else self.taps(pixels, clamped)
        lines += self.store(self.sums.kind, names, self.sums.value, channel, pixels, outputs if ragged != 0 else None)
        if self.groups > 1:
            share = self.outputs // self.groups
            lines = loop("channel", f"(group + 1) * {share}", lines, start=f"group * {share}", step=self.lanes)
            lines = loop("group", self.groups, lines)
        else:
            lines = loop("channel", outputs, lines, step=self.lanes)
        return [*(self.clamps() if clamped else self.origins()), self.place(outputs), *lines]

    @property
    def has_several(self) -> bool:
        """True when some rows have as many neighbouring columns whose taps are all inside."""
        (first, end), (top, bottom) = self.window.inside(COLUMN), self.window.inside(ROW)
        return self.pixels > 1 and end - first >= self.pixels and bottom > top

    @property
    def has_border(self) -> bool:
        """True when some pixels are computed together and others one by one."""
        (first, end), rows = self.window.inside(COLUMN), self.window.inside(ROW)
        columns = self.window.outputs[COLUMN]
        whole = (end - first) // self.pixels * self.pixels == columns and rows == (0, self.window.outputs[ROW])
        return self.has_several and not whole

    def write(self, name: str) -> Lines:
        if self.scope.compact:
            return self.shared_function(name, self.body(1, clamped=True))
        parts = {}
        if self.scope.border is None:
            parts["pixel"] = ONE_PIXEL, self.body(1, clamped=True)
        if self.has_several:
            comment = f"{self.pixels} neighbouring output columns, all taps inside the image."
            parts["pixels"] = comment, self.body(self.pixels, clamped=False)
        return self.functions(name, parts, lambda calls: pixel_loops(self.window, calls, self.pixels))


_WAYS = (InstructedWay(patches_of), InstructedWay(scheduled_loops, explained=True))


@kernel(Conv2d, windowed=True, packed=True, once=True, compact=True, borders=True, ways=_WAYS)
@kernel(FullyConnected, packed=True, once=True, compact=True, ways=_WAYS)
def write_sums(scope: KernelScope, operator: Operator) -> KernelWriter:
    products = products_of(scope)
    sums = sums_of(scope, products)
    return KernelWriter(
        lambda name: blocked_nest(scope, products, sums).write(name),
        lambda: Nest(scope, products.window).finish(sums.value("sum"), "0"),
    )


def blocked_nest(scope: KernelScope, products: Products, sums: SumConstants) -> _ConvolutionKernel:
    """The kernel, the register block chosen; raises Unsupported for a bias that is not constant."""
    if scope.compact:
        sums.require_bytes()
        refuse(products.groups > 1, "a convolution of groups has no compact form.")
    share, accumulators = len(products.weights) // products.groups, scope.core.accumulators
    registers = max(accumulators // (2 if sums.kind == "int64_t" else 1), 1)
    fields = 8 // sums.bits
    multiple = fields if min(share, registers) >= fields and (products.groups == 1 or share % fields == 0) else 1
    pixels, scope.lanes = register_block(products, registers, multiple, scope.lanes, scope.choice)
    if scope.compact and not scope.single:
        scope.lanes = _LANES if accumulators >= 2 * _LANES else _LANES // 2
    unroll = int(scope.choice.get(UNROLL, 0))
    nest = _ConvolutionKernel(scope, products.window, sums, products.groups, scope.lanes, pixels, unroll)
    refuse(scope.single and not nest.has_border, "no pixels are computed one by one, or all.")
    return nest
