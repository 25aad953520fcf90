"""Pools: some neighbouring channels of a pixel in registers, over the taps inside the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.graph.types import DType
from dovetail.kernels.epilogue import Expression, Scope, finish
from dovetail.kernels.kernel import Unsupported, c_type
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
)
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d

Pool = MaxPool2d | AveragePool2d | SumPool2d
_NARROW = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)


@dataclass(frozen=True)
class Pooling:
    """One pool kernel being written."""

    region: Region
    scope: Scope
    window: Window
    operator: Pool

    @property
    def dtype(self) -> DType:
        """Of the operand."""
        return self.region.graph.types[self.region.source()].dtype

    @property
    def largest(self) -> bool:
        """True for the maximum, False for the pools that sum."""
        return isinstance(self.operator, MaxPool2d)

    def step(self, lane: int) -> str:
        """The statement that takes one element in."""
        if self.largest:
            return f"best_{lane} = from[{lane}] > best_{lane} ? from[{lane}] : best_{lane};"
        return f"sum_{lane} += from[{lane}];"

    def result(self, text: str) -> Expression:
        """The pool's value from what was collected."""
        operator, kind, taps = self.operator, self.dtype, self.window.kernel[0] * self.window.kernel[1]
        count = "count" if self.window.any_padded else str(taps)
        if isinstance(operator, MaxPool2d):
            return Expression(text, "int32_t", kind.low, kind.high)
        if isinstance(operator, AveragePool2d):
            return Expression(f"divide_rounded({text}, {count})", "int32_t", kind.low, kind.high)
        low, high = (taps * (bound - operator.input_zero_point) for bound in (kind.low, kind.high))
        if min(low, 0) < -(1 << 31) or max(high, 0) >= 1 << 31:
            raise Unsupported(f"a sum over {taps} elements of {kind.text} may leave 32 bits.")
        if operator.input_zero_point and count == "count":
            off = product("count", abs(operator.input_zero_point))
            text = f"{text} {'-' if operator.input_zero_point > 0 else '+'} {off}"
            return Expression(text, "int32_t", min(low, 0), max(high, 0))
        return Expression(total(text, -taps * operator.input_zero_point), "int32_t", low, high)

    def epilogue(self, text: str, pixel: str, lane: str) -> list[str]:
        """The pointwise tree on one result."""
        anchor = self.region.anchor
        assert anchor is not None
        channel = total(variable("channel", self.window.channels), lane)
        index = anchored(self.region.output_shape, total("place", channel), channel)
        return finish(self.scope, self.region.tree, index, (anchor.output, self.result(text)))

    def taps(self, lanes: int) -> list[str]:
        """The loops over the window of some channels."""
        window, channels = self.window, self.window.channels
        channel = variable("channel", channels)
        rows, columns = window.kernel
        steps = [self.step(lane) for lane in range(lanes)]
        image, kind = self.scope.input(self.region.source(), "input"), c_type(self.dtype)
        if columns == window.size[COLUMN] and not window.any_padded:
            start = total(image, window.input_index("top", "left", channel))
            return [f"const {kind} *from = {start};", *loop("tap", rows * columns, [*steps, f"from += {channels};"])]
        first = window.first(COLUMN, True)
        top, left = total("top", variable("kernel_row", rows)), total("left", first)
        lines = [f"const {kind} *from = {total(image, window.input_index(top, left, channel))};"]
        advance = [f"from += {channels};"] if columns > 1 else []
        lines += tap_loop("kernel_column", first, window.end(COLUMN, True), [*steps, *advance])
        return tap_loop("kernel_row", window.first(ROW, True), window.end(ROW, True), lines)

    def one(self) -> list[str]:
        """One pixel."""
        window, channels = self.window, self.window.channels
        lanes = channel_lanes(channels, 8)
        stem, start = ("best", self.dtype.low) if self.largest else ("sum", 0)
        names = [f"{stem}_{lane}" for lane in range(lanes)]
        lines = [f"int32_t {name} = {start};" for name in names]
        lines += [*self.taps(lanes), *store_lanes("int32_t", names, 1, lanes, self.epilogue)]
        head = [*window.clamps(), f"const int32_t place = {window.output_index(channels)};"]
        sides = [f"({window.end(axis, True)} - {window.first(axis, True)})" for axis in (ROW, COLUMN)]
        head.append(f"const int32_t count = {' * '.join(sides)};")
        return [*head, *loop("channel", channels, lines, step=lanes)]

    def write(self, name: str) -> list[str]:
        """The kernel's functions."""
        parts = {"pixel": Part(ONE_PIXEL, self.one())}
        return pixel_functions(name, self.scope, self.window, parts, lambda calls: pixel_loops(self.window, calls, 1))


def checked_pool(region: Region) -> tuple[Pool, DType, Window]:
    """The region's pool, what it reads and its window; raises Unsupported where its sums may be too large."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Pool)
    operator = anchor.operator
    if region.pad is not None:
        raise Unsupported("a Pad before a pool is not fused; the pool's own padding is.")
    allowed = (*_NARROW, DType.INT32) if isinstance(operator, MaxPool2d) else _NARROW
    kind = require_dtype(region, region.source(), allowed)
    taps = operator.kernel[0] * operator.kernel[1]
    if taps * max(-kind.low, kind.high) >= 1 << 31 and not isinstance(operator, MaxPool2d):
        raise Unsupported(f"a sum over {taps} elements of {kind.text} may leave 32 bits.")
    return operator, kind, window_of(region, operator.kernel, operator.stride, own=operator.padding)


def write_pooling(region: Region, scope: Scope) -> Callable[[str], list[str]]:
    """The writer of a pool kernel."""
    operator, _, window = checked_pool(region)
    return Pooling(region, scope, window, operator).write
