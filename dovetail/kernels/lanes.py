"""Depthwise convolutions on a core that multiplies neighbouring channels lane by lane.

For some channels at a time, the window's rows of the image are laid side by side on the stack, a column's rows together
and padding included. The taps of a pixel then are one run, and those of the next pixel begin some columns further on.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines, block, code, loop, product, total
from dovetail.kernels.kernel import KernelChoices, KernelWriter, Turns, UnsupportedRegion, refuse, turns_of_family
from dovetail.kernels.scheduled.knobs import call_of, lanes_of
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import SumNest, products_of, sums_of
from dovetail.kernels.window import COLUMN, ROW
from dovetail.target.chip import CoreInstruction


def lanes_loops(scope: KernelScope) -> LaneProducts:
    """The loops of a depthwise kernel with the core's products of lanes.

    Raises:
        Unsupported: the core has no such instruction, or the layer is not of the kind it is for.
    """
    found = ((one, lanes_of(one)) for one in scope.core.instructions)
    instruction, lanes = next(((one, count) for one, count in found if count), (None, 0))
    if instruction is None:
        raise UnsupportedRegion("the core multiplies no lanes.")
    products = products_of(scope, merged=False)
    sums, window = sums_of(scope, products), products.window
    bytes_alone = scope.source_dtype is DType.INT8 and sums.weights.dtype == np.int8 and sums.kind == "int32_t"
    refuse(not bytes_alone, "lanes are of int8, and their sums of int32.")
    whole = window.batch == 1 and window.channels % lanes == 0 and products.channelwise
    refuse(not whole, f"lanes are of one image and {lanes} channels.")
    refuse(window.dilation[COLUMN] > 1, "lanes are of neighbouring columns.")
    nest = LaneProducts(scope, window, sums, instruction, lanes)
    refuse(nest.size > scope.core.room, f"the rows of one output take more than {scope.core.room} bytes of stack.")
    return nest


class LaneProducts(SumNest):
    """One kernel being written."""

    instruction: CoreInstruction
    lanes: int
    """Channels it multiplies at once."""

    @property
    def width(self) -> int:
        """Columns that a row of the result reads, padding included."""
        return self.window.stride[COLUMN] * (self.window.outputs[COLUMN] - 1) + self.window.kernel[COLUMN]

    @property
    def size(self) -> int:
        """Bytes of the rows on the stack."""
        return self.lanes * self.width * self.window.kernel[ROW]

    def packed(self) -> Array:
        """The weights, [channels / lanes, KW, KH, lanes]."""
        split = self.sums.weights[..., 0].reshape(-1, self.lanes, *self.window.kernel)
        return np.ascontiguousarray(split.transpose(0, 3, 2, 1)).reshape(-1)

    def _filled(self) -> Lines:
        """The rows under a row of the result."""
        (height, width), (above, before), rows = self.window.size, self.window.before, self.window.kernel[ROW]
        first, step = max(-before, 0), self.lanes * rows
        held = min(width, self.width - before) - first
        padding = f"__builtin_memset(to + column * {step}, {self.sums.pad_value}, {self.lanes});"
        copy = f"__builtin_memcpy(to + column * {step}, __builtin_assume_aligned(from, {self.lanes}), {self.lanes});"
        image, channels = self.scope.input(self.scope.source(), "input"), self.window.channels
        read = code(
            f"""
            const int8_t *from = {image} + ((y * {width} + {first}) * {channels} + channel);
            @columns
            """,
            columns=loop("column", held, [copy, f"from += {channels};"]),
        )
        if self.window.padded(ROW):
            outside = block(f"if (y < 0 || y >= {height})", loop("column", held, [padding]))
            read = [*outside[:-1], *block("} else", read)]
        start = total("rows", product("tap", self.lanes), max(before, 0) * step)
        y = total(product("row", self.window.stride[ROW]), product("tap", self.window.dilation[ROW]), -above)
        return loop("tap", rows, [f"int8_t *to = {start};", f"const int32_t y = {y};", *read])

    def _lines(self) -> Lines:
        window, lanes, taps = self.window, self.lanes, prod(self.window.kernel)
        (rows, columns), step = window.outputs, lanes * window.kernel[ROW] * window.stride[COLUMN]
        bias, weights = self.starts(False), self.scope.constant("sums", "weights", self.packed())
        call = call_of(self.instruction, (str(taps), "sums", total("rows", product("column", step)), "tap_weights"))
        starts = ", ".join(f"{bias}[{total('channel', lane)}]" for lane in range(lanes))
        pixel = [f"int32_t sums[{lanes}] = {{{starts}}};", call, self.place(self.outputs)]
        for lane in range(lanes):
            value = self.sums.value(f"sums[{lane}]")
            pixel += block("", self.finish(value, total("channel", lane)))
        return code(
            f"""
            int8_t rows[{self.size}] __attribute__((aligned(8)));
            __builtin_memset(rows, {self.sums.pad_value}, {self.size});
            for (int32_t channel = 0; channel < {self.outputs}; channel += {lanes}) {{
                const int8_t *tap_weights = {weights} + channel * {taps};
                @rows
            }}
            """,
            rows=loop("row", rows, [*self._filled(), *loop("column", columns, pixel)]),
        )

    def offered(self) -> KernelChoices:
        """No knobs."""
        return KernelChoices()

    def turns(self) -> Turns:
        """Rows side by side, then all pixels alike."""
        (rows, columns), groups = self.window.outputs, self.window.channels // self.lanes
        counts = {
            "filled": groups * rows * self.width * self.window.kernel[ROW],
            "product": groups * rows * columns * prod(self.window.kernel),
            "result": self.window.channels * rows * columns,
        }
        return {**turns_of_family("lanes", counts), "lanes.call": 1}

    def writer(self) -> KernelWriter:
        """Writes the kernel."""
        one = self.instruction
        return replace(self.scope.writer(self._lines), declarations=(one.declarations,), instructions=(one.name,))
