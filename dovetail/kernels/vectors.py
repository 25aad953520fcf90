"""Convolutions, dense and depthwise layers on a core with vectors of bytes (`VectorUnit`): what its functions mean, and
the kernels made of them.

Convolutions multiply runs of bytes: the kernel's columns and channels of a row lie one behind the other in memory, with
the weights of each output channel alike. Rows that reach into the padding are copied to the stack with it. Sums of some
pixels and all channels are then requantised together. A depthwise layer takes 16 channels at a time: copied to the
stack, column by column, each tap is a vector at a fixed place.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.operators.arithmetic import Requantize, Rounding
from dovetail.ir.requantisation.pairs import sum_chains
from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines, block, code, function, product, total
from dovetail.kernels.kernel import (
    ENDED,
    KernelChoices,
    KernelWriter,
    Turns,
    UnsupportedRegion,
    declarations,
    refuse,
    summed_turns,
    turns_of_family,
)
from dovetail.kernels.pointwise import ADD_BYTES, line_of_bytes
from dovetail.kernels.requantise import is_rectified
from dovetail.kernels.scope import REQUANTISED, KernelScope
from dovetail.kernels.sums import EndFunction, Products, SumConstants, end_function, products_of, sums_of
from dovetail.kernels.window import COLUMN, ROW, WindowGeometry
from dovetail.records import Record
from dovetail.target.chip import VECTOR_BYTES, VECTOR_CHANNELS, VectorColumns, VectorEnd, VectorProducts, VectorUnit
from dovetail.target.pattern import Match, match_pattern

_QUAD = 4
"""Sums of 32 bits in a vector."""
_MOST_TAPS = 30
ORDER = (*range(0, VECTOR_CHANNELS, 2), *range(1, VECTOR_CHANNELS, 2))
"""Channels in the order their sums lie: narrowed, they come out in order."""


class VectorFunctions(Record):
    """The unit's functions in C: each body under the unit's condition, and what it means for any other compiler."""

    unit: VectorUnit

    def _written(self, comment: str, head: str, body: str, meaning: Lines) -> str:
        plain = "".join(f"    {line}\n" if line else "\n" for line in meaning)
        condition = f"#if {self.unit.condition} && !defined(DOVETAIL_HOST)"
        return f"/* {comment} */\n{head}\n{{\n{condition}\n{body}#else\n{plain}#endif\n}}\n"

    def products(self, name: str, made: VectorProducts) -> str:
        """Sums of products of rows of bytes."""
        head = f"static inline void {name}(int32_t *sums, const int8_t *from, const int8_t *weights)"
        meaning = code(f"""
            for (int32_t i = 0; i < {made.pixels * made.channels}; ++i) {{
                const int32_t pixel = i / {made.channels}, channel = i % {made.channels};
                int32_t sum = 0;
                for (int32_t tap = 0; tap < {made.rows * made.taps}; ++tap) {{
                    const int32_t row = tap / {made.taps}, at = tap % {made.taps};
                    const int32_t vector = (row * {made.steps} + at / {VECTOR_BYTES}) * {made.channels} + channel;
                    sum += from[pixel * {made.distance} + row * {made.row} + at]
                        * weights[vector * {VECTOR_BYTES} + at % {VECTOR_BYTES}];
                }}
                sums[pixel * {made.sums} + channel] = sum;
            }}
        """)
        comment = f"Sums of {made.pixels} pixels and {made.channels} channels over {made.rows} x {made.taps} bytes."
        return self._written(comment, head, self.unit.products(made), meaning)

    def columns(self, name: str, made: VectorColumns) -> str:
        """Sums of channels, each over its own taps."""
        head = f"static inline void {name}(int32_t *sums, const int8_t *from, const int8_t *weights)"
        taps, lanes = made.kernel[COLUMN], VECTOR_CHANNELS
        meaning = code(f"""
            for (int32_t i = 0; i < {2 * lanes}; ++i) {{
                const int32_t pixel = i / {lanes}, channel = i % {lanes};
                int32_t sum = 0;
                for (int32_t tap = 0; tap < {made.kernel[ROW] * taps}; ++tap) {{
                    const int32_t at = tap / {taps} * {made.row} + tap % {taps} * {made.column};
                    sum += from[pixel * {made.distance} + at + channel] * weights[tap * {lanes} + channel];
                }}
                sums[pixel * {lanes} + channel % 2 * 4 + channel / 2] = sum;
            }}
        """)
        comment = f"Sums of two pixels and {lanes} channels over {made.kernel[ROW]} x {taps} taps."
        return self._written(comment, head, self.unit.columns(made), meaning)

    def end(self, name: str, made: VectorEnd) -> str:
        """Sums requantised to bytes."""
        head = (
            f"static inline void {name}(int8_t *to, int32_t step, const int32_t *sums, const int32_t *numbers,\n"
            f"{' ' * (len(name) + 20)}int32_t rows)"
        )
        whole, filled = made.channels // VECTOR_CHANNELS * VECTOR_CHANNELS, -(-made.channels // _QUAD) * _QUAD
        meaning = code(f"""
            for (int32_t i = 0; i < {made.channels} * rows; ++i) {{
                const int32_t row = i / {made.channels}, channel = i % {made.channels};
                const int32_t in = channel % {VECTOR_CHANNELS};
                const int32_t place = channel < {whole} ? channel - in + in % 2 * 4 + in / 2 : channel;
                const int32_t *number = numbers + place / 4 * 12 + place % 4;
                const int32_t sum = sums[row * {filled} + place] + number[0];
                const int32_t value = requantize_double_any(sum, number[4], number[8]);
                to[row * step + channel] = (int8_t)clip({total("value", made.zero_point)}, {made.low}, {made.high});
            }}
        """)
        comment = f"{made.channels} sums of each of so many pixels, less their start, to bytes."
        return self._written(comment, head, self.unit.end(made), meaning)

    def copy(self) -> str:
        """Bytes copied."""
        head = "static inline void copy_vectors(int8_t *to, const int8_t *from, int32_t count)"
        meaning = block("for (int32_t i = 0; i < count; ++i)", ["to[i] = from[i];"])
        return self._written("Bytes that do not overlap.", head, self.unit.copy, meaning)


class _Ending(Record):
    """How sums become bytes."""

    multiplier: Array
    shift: Array
    end: VectorEnd
    other: str = ""
    """The value whose bytes are added; empty for none."""
    line: tuple[int, int, int] = (0, 0, 0)
    """Factors of both and offset, as `add_bytes` takes them."""


class _VectorNest(Record):
    """A kernel being written."""

    scope: KernelScope
    window: WindowGeometry
    sums: SumConstants

    unit: VectorUnit
    ends: _Ending | None
    """None where sums end in another way."""

    @property
    def outputs(self) -> int:
        """Output channels."""
        return len(self.sums.weights)

    @property
    def functions(self) -> VectorFunctions:
        """The unit's functions."""
        return VectorFunctions(self.unit)

    @property
    def filled(self) -> int:
        """Sums of a pixel."""
        return -(-self.outputs // _QUAD) * _QUAD

    @property
    def order(self) -> list[int]:
        """The channels in the order their sums lie, -1 for none."""
        whole = self.outputs // VECTOR_CHANNELS if self.ends else 0
        ordered = [VECTOR_CHANNELS * group + channel for group in range(whole) for channel in ORDER]
        rest = list(range(VECTOR_CHANNELS * whole, self.outputs))
        return [*ordered, *rest, *[-1] * (self.filled - self.outputs)]

    def ordered(self, values: Array) -> Array:
        """A number of each channel, or a row, in that order, zeros for none."""
        filler = np.zeros((1, *values.shape[1:]), values.dtype)
        return np.concatenate([values, filler])[self.order]

    def numbers(self) -> Array:
        """For four sums at a time start, multiplier and shift of each."""
        assert self.ends is not None
        each = [np.broadcast_to(one, self.outputs) for one in (self.sums.inside, self.ends.multiplier, self.ends.shift)]
        stacked = np.stack([self.ordered(one.astype(np.int32)) for one in each])
        return np.ascontiguousarray(stacked.reshape(3, -1, _QUAD).transpose(1, 0, 2).reshape(-1))

    def span(self, pixels: int) -> int:
        """Columns that so many neighbouring pixels read."""
        window = self.window
        reach = (window.kernel[COLUMN] - 1) * window.dilation[COLUMN]
        return (pixels - 1) * window.stride[COLUMN] + reach + 1

    def row_bytes(self, pixels: int) -> int:
        """Bytes of a copied row, with what vectors read behind it."""
        return -(-(self.span(pixels) * self.window.channels + VECTOR_BYTES) // _QUAD) * _QUAD

    def copied(self, top: str, first: str, count: int, lines: int, step: int) -> Lines:
        """So many rows from row `top` on, of what `count` pixels from `first` on read, with their padding.

        Args:
            top: C text.
            first: C text.
            count: pixels.
            lines: rows.
            step: rows of the image from one to the next.
        """
        window, pad, size = self.window, self.sums.pad_value, self.row_bytes(count)
        (height, width), channels, span = window.size, window.channels, self.span(count)
        left = total(product(f"({first})" if "+" in first else first, window.stride[COLUMN]), -window.before[COLUMN])
        return code(f"""
            const int32_t left = {left};
            const int32_t begin = clip(-left, 0, {span});
            const int32_t end = clip({width} - left, begin, {span});
            for (int32_t down = 0; down < {lines}; ++down) {{
                int8_t *to = rows + {product("down", size)};
                const int32_t y = {total(top, product("down", step))};
                const int32_t outside = y < 0 || y >= {height};
                const int32_t before = outside ? {span} : begin;
                for (int32_t i = 0; i < {product("before", channels)}; ++i) {{
                    to[i] = {pad};
                }}
                if (outside) {{
                    continue;
                }}
                copy_vectors(to + {product("begin", channels)}, input + (y * {width} + left + begin) * {channels},
                             {product("(end - begin)", channels)});
                for (int32_t i = {product("end", channels)}; i < {span * channels}; ++i) {{
                    to[i] = {pad};
                }}
            }}
        """)

    def offered(self) -> KernelChoices:
        """No knobs."""
        return KernelChoices()


def _ends_of(scope: KernelScope, outputs: int) -> _Ending | None:
    """The end of a region's sums where vectors compute it exactly: a requantisation, perhaps added to other bytes."""
    graph, users = scope.graph, scope.graph.users()
    clips = users[scope.tree[0].output] if scope.tree else []
    match = match_pattern(REQUANTISED, graph, clips[0].output) if clips else None
    if not isinstance(match, Match) or match.values["x"] != scope.node.output:
        return None
    requantize, clip = match.nodes["requantize"], match.nodes["clip"]
    operator, limits = match.operator("requantize", Requantize), clip.operator.limited_to
    multiplier, shift = (match.array(name).reshape(-1) for name in ("multiplier", "shift"))
    if operator.rounding is not Rounding.DOUBLE or operator.input_zero_point or operator.left_shift or limits is None:
        return None
    if shift.max() > 0 or shift.min() < -31 or multiplier.min() < 0 or multiplier.size not in (1, outputs):
        return None
    if graph.types[clip.output].dtype is not DType.INT8:
        return None
    rectified = is_rectified(graph, requantize, operator.output_zero_point)
    end = VectorEnd(outputs, operator.output_zero_point, int(limits[0]), int(limits[1]), rectified)
    if clip.output in graph.outputs:
        return _Ending(multiplier, shift, end) if len(scope.tree) == 2 else None
    rest = [node for node in scope.tree if node not in (requantize, clip)]
    chain = sum_chains(graph, rest).get(graph.outputs[0])
    if chain is None or len(chain.nodes) + 1 != len(rest) or set(chain.operands) - {clip.output} - set(graph.inputs):
        return None
    linear, types = line_of_bytes(scope, chain), {graph.types[name] for name in (*chain.operands, *graph.outputs)}
    if linear is None or len(types) != 1 or len(chain.operands) != 2 or clip.output not in chain.operands:
        return None
    added = {name: factor for name, factor in zip(chain.operands, linear.factors, strict=True) if name != clip.output}
    factor = next(factor for name, factor in zip(chain.operands, linear.factors, strict=True) if name == clip.output)
    ((other, weight),) = added.items()
    return _Ending(multiplier, shift, end, other, (factor, weight, linear.offset))


def _unit_of(scope: KernelScope) -> VectorUnit:
    """The core's unit; raises Unsupported where it has none or the layer is not of int8."""
    unit = scope.core.vectors
    if unit is None:
        raise UnsupportedRegion("the core has no vectors.")
    refuse(scope.source_dtype is not DType.INT8 or scope.type(1).dtype is not DType.INT8, "vectors are of int8.")
    return unit


def _sums_of(scope: KernelScope, products: Products) -> SumConstants:
    """The sums of a layer; raises Unsupported where vectors do not compute them."""
    sums = sums_of(scope, products)
    refuse(products.window.batch > 1, "vectors are of one image.")
    refuse(sums.weights.dtype != np.int8 or sums.kind != "int32_t" or sums.bits < 8, "sums of vectors are int32.")
    return sums


class VectorRows(_VectorNest):
    """A convolution or dense layer being written."""

    @property
    def taps(self) -> int:
        """Bytes of a kernel row."""
        return self.window.kernel[COLUMN] * self.window.channels

    @property
    def is_direct(self) -> bool:
        """Whether pixels are read where they lie."""
        return self.window.kernel[ROW] == 1 and not self.window.any_padded

    @property
    def channels(self) -> int:
        """Output channels of a block: those with the fewest turns."""
        counts = dict.fromkeys(channels for _, channels in self.unit.shapes)

        def turns(channels: int) -> int:
            blocks = -(-self.outputs // channels)
            return sum(n * max(p * channels, p + channels) for n, p in self._parts(channels, self.share)) * blocks

        return min(counts, key=turns)

    def _parts(self, channels: int, count: int) -> list[tuple[int, int]]:
        """Blocks of neighbouring pixels: how many, of how many pixels."""
        parts = []
        for pixels in sorted((p for p, c in self.unit.shapes if c == channels), reverse=True):
            whole, count = divmod(count, pixels)
            parts += [(whole, pixels)] if whole else []
        return parts

    @property
    def share(self) -> int:
        """Neighbouring pixels whose rows are copied together; 0 where those of one take too much stack."""
        columns = self.window.outputs[COLUMN]
        if self.is_direct:
            return columns
        room = self.scope.core.room - 3 * (_QUAD + 1) * self.filled
        shares = (-(-columns // parts) for parts in range(1, columns + 1))
        return next((n for n in shares if self.window.kernel[ROW] * self.row_bytes(n) <= room), 0)

    def block(self, pixels: int) -> VectorProducts:
        """The products of so many pixels."""
        window = self.window
        row = 0 if self.is_direct else self.row_bytes(self.share)
        distance = window.stride[COLUMN] * window.channels
        rows, channels = window.kernel[ROW], self.channels
        return VectorProducts(pixels, channels, rows, self.taps, distance, row, self.filled, self.is_direct)

    def packed(self) -> Array:
        """The weights, [blocks of channels, rows, vectors, channels, bytes]."""
        made, weights = self.block(1), self.ordered(self.sums.weights)
        rows = weights.reshape(self.filled, made.rows, self.taps)
        rows = np.pad(rows, ((0, 0), (0, 0), (0, made.steps * VECTOR_BYTES - self.taps)))
        blocks = rows.reshape(-1, made.channels, made.rows, made.steps, VECTOR_BYTES)
        return np.ascontiguousarray(blocks.transpose(0, 2, 3, 1, 4)).reshape(-1)

    @property
    def shares(self) -> list[tuple[int, int]]:
        """How many times rows are copied for a row of the result, and for how many pixels."""
        whole, rest = divmod(self.window.outputs[COLUMN], self.share)
        return [(whole, self.share), *([(1, rest)] if rest else [])]

    def turns(self) -> Turns:
        """Rows copied, then blocks of pixels and channels."""
        counts, rows = [], self.window.outputs[ROW]
        for times, count in self.shares:
            copied = 0 if self.is_direct else rows * times * self.window.kernel[ROW] * self.row_bytes(count)
            counts.append({"copied": copied})
            for number, pixels in self._parts(self.channels, count):
                blocks = rows * times * number * (self.filled // self.channels)
                steps = blocks * self.window.kernel[ROW] * self.block(1).steps
                counts.append({"product": steps * pixels * self.channels, "block": blocks})
        results = self.scope.result.elements
        counts.append({"sum": 0 if self.ends else results, "added": results if self.ends and self.ends.other else 0})
        ended = {ENDED: float(results)} if self.ends else {}
        return {**turns_of_family("vectors", summed_turns(*counts, {"call": 1})), **ended}

    def writer(self) -> KernelWriter:
        """Writes the kernel."""
        scope, made = self.scope, self.functions
        scope.input(scope.source(), "input")
        if self.ends and self.ends.other:
            scope.input(self.ends.other)
        scope.constant("sums", "weights", self.packed())
        scope.constant("sums", "ends", self.numbers() if self.ends else self.sums.inside)
        end = None if self.ends else end_function(scope, lambda text, _: (self.sums.value(text), 0))
        texts = [] if self.is_direct else [made.copy()]
        return KernelWriter(
            lambda name: self._lines(name, end), declarations=tuple(texts), instructions=(self.unit.name,)
        )

    def _lines(self, name: str, end: EndFunction | None) -> Lines:
        parameters, made, text = self.scope.parameters(), self.functions, Lines()
        types = {parameter.name: parameter.c_type for parameter in parameters}
        sizes = sorted({p for _, count in self.shares for _, p in self._parts(self.channels, count)})
        for pixels in sizes:
            text += [*made.products(f"{name}_products_{pixels}", self.block(pixels)).splitlines(), ""]
        if self.ends:
            text += [*made.end(f"{name}_end", self.ends.end).splitlines(), ""]
        else:
            assert end is not None
            text += [*end.write(f"{name}_finish", types), ""]
        lines = Lines()
        column = 0
        for times, count in self.shares:
            first = f"first + {column}" if times > 1 and column else "first" if times > 1 else str(column)
            top = total(product("row", self.window.stride[ROW]), -self.window.before[ROW])
            inner = (
                []
                if self.is_direct
                else self.copied(top, first, count, self.window.kernel[ROW], self.window.dilation[ROW])
            )
            inner += self._pixels(name, first, count, end)
            head = f"for (int32_t first = 0; first < {times * count}; first += {count})"
            lines += block(head, inner) if times > 1 else inner
            column += times * count
        lines = block(f"for (int32_t row = 0; row < {self.window.outputs[ROW]}; ++row)", lines)
        rows = self.window.kernel[ROW] * self.row_bytes(self.share)
        held = [] if self.is_direct else [f"int8_t rows[{rows}] __attribute__((aligned(8)));"]
        held += [f"int32_t sums[{self.filled * max(sizes)}] __attribute__((aligned(8)));"]
        if self.ends and self.ends.other:
            held.append(f"int8_t results[{self.outputs * max(sizes)}];")
        return [*text, *function(f"static void {name}", declarations(parameters), [*held, *lines])]

    def _pixels(self, name: str, first: str, count: int, end: EndFunction | None) -> Lines:
        """Blocks of neighbouring pixels."""
        window, lines, done = self.window, Lines(), 0
        distance = window.stride[COLUMN] * window.channels
        line = product("row", window.stride[ROW] * window.size[COLUMN] * window.channels)
        for number, pixels in self._parts(self.channels, count):
            pixel = total("pixel", done) if number > 1 else str(done)
            at = product(f"({pixel})", distance)
            source = total("input", line, at) if self.is_direct else total("rows", at)
            place = f"((row * {window.outputs[COLUMN]} + {first} + {pixel}) * {self.outputs})"
            made = self.block(pixels)
            inner = code(
                f"""
                const int8_t *const from = {source};
                const int8_t *at = weights;
                for (int32_t channel = 0; channel < {self.filled}; channel += {made.channels}) {{
                    {name}_products_{pixels}(sums + channel, from, at);
                    at += {made.rows * made.steps * made.channels * VECTOR_BYTES};
                }}
                @ended
                """,
                ended=self._ended(name, place, pixels, end),
            )
            head = f"for (int32_t pixel = 0; pixel < {number * pixels}; pixel += {pixels})"
            lines += block(head, inner) if number > 1 else block("", inner)
            done += number * pixels
        return lines

    def _ended(self, name: str, place: str, pixels: int, end: EndFunction | None) -> Lines:
        if self.ends and self.ends.other:
            to, numbers = f"output + {place}", ", ".join(map(str, self.ends.line))
            other = f"{self.scope.input(self.ends.other)} + {place}"
            return [
                f"{name}_end(results, {self.outputs}, sums, ends, {pixels});",
                f"{ADD_BYTES}({to}, results, {other}, {pixels * self.outputs}, {numbers});",
            ]
        if end is None:
            return [f"{name}_end(output + {place}, {self.outputs}, sums, ends, {pixels});"]
        places = {"channel": "channel", "position": "place", "one": "0"}
        values = ["sums[sum] + ends[channel]", *(f"{extra.name}[{places[extra.kind]}]" for extra in end.extras)]
        return code(f"""
            for (int32_t i = 0; i < {pixels * self.outputs}; ++i) {{
                const int32_t channel = i % {self.outputs}, place = {place} + i;
                const int32_t sum = i / {self.outputs} * {self.filled} + channel;
                output[place] = {name}_finish({", ".join(values)});
            }}
        """)


def rows_of(scope: KernelScope) -> VectorRows:
    """The kernel of a convolution or dense layer with the core's vectors.

    Raises:
        Unsupported: the core has none, or the layer is not of the kind they are for.
    """
    unit, products = _unit_of(scope), products_of(scope)
    sums, window = _sums_of(scope, products), products.window
    refuse(window.channels != sums.weights.shape[3], "vectors are of all channels.")
    refuse(not window.contiguous_columns, "the bytes of a vector are neighbours.")
    nest = VectorRows(scope, window, sums, unit, _ends_of(scope, len(sums.weights)))
    refuse(nest.share == 0, f"the rows of one pixel take more than {scope.core.room} bytes of stack.")
    refuse(not nest.is_direct and nest.row_bytes(nest.share) >= 1 << 12, "rows are less than 4096 bytes apart.")
    return nest


class VectorChannels(_VectorNest):
    """A depthwise layer being written."""

    group_end: VectorEnd
    """The end of the sums of a group."""
    band: int
    """Rows of the result computed from one copy."""

    @property
    def lines(self) -> int:
        """Rows that are copied together."""
        return _lines_of(self.window, self.band)

    @property
    def starts(self) -> list[int]:
        """First channel of each group; the last group ends with the channels."""
        last = self.outputs - VECTOR_CHANNELS
        return [min(first, last) for first in range(0, self.outputs, VECTOR_CHANNELS)]

    def taps(self) -> VectorColumns:
        """The sums of a group."""
        window, channels, row = self.window, self.outputs, self.row_bytes(self.window.outputs[COLUMN])
        steps = (window.dilation[COLUMN] * channels, window.dilation[ROW] * row, window.stride[COLUMN] * channels)
        return VectorColumns(window.kernel, *steps)

    def packed(self) -> Array:
        """The weights, [groups, taps, channels of a group]."""
        taps = self.sums.weights[..., 0].transpose(1, 2, 0).reshape(-1, self.outputs)
        return np.concatenate([taps[:, first : first + VECTOR_CHANNELS].reshape(-1) for first in self.starts])

    @property
    def order(self) -> list[int]:
        """As of `_VectorNest`, group by group."""
        return [first + channel for first in self.starts for channel in ORDER]

    def turns(self) -> Turns:
        """Rows copied, then each pair of pixels' taps."""
        rows, columns = self.window.outputs
        pairs = len(self.starts) * rows * -(-columns // 2)
        counts = {
            "copied": -(-rows // self.band) * self.lines * self.row_bytes(columns),
            "tap": pairs * prod(self.window.kernel),
            "pair": pairs,
            "call": 1,
        }
        return {**turns_of_family("vectors", counts), ENDED: float(pairs * 2 * VECTOR_CHANNELS)}

    def writer(self) -> KernelWriter:
        """Writes the kernel."""
        self.scope.input(self.scope.source(), "input")
        self.scope.constant("sums", "weights", self.packed())
        self.scope.constant("sums", "ends", self.numbers())
        return KernelWriter(self._text, declarations=(self.functions.copy(),), instructions=(self.unit.name,))

    def _text(self, name: str) -> Lines:
        made, window, channels = self.functions, self.window, self.outputs
        rows, columns = window.outputs
        step = window.stride[COLUMN] * channels
        lanes, taps, size = VECTOR_CHANNELS, prod(window.kernel), self.row_bytes(columns)
        lines = code(
            f"""
            for (int32_t band = 0; band < {rows}; band += {self.band}) {{
                const int32_t last = band + {self.band} < {rows} ? band + {self.band} : {rows};
                @copied
                for (int32_t row = band; row < last; ++row) {{
                    const int8_t *line = rows + {product("(row - band)", window.stride[ROW] * size)};
                    for (int32_t group = 0; group < {len(self.starts)}; ++group) {{
                        const int32_t channel = {_least(product("group", lanes), channels - lanes, channels % lanes)};
                        for (int32_t pair = 0; pair < {columns}; pair += 2) {{
                            const int32_t column = {_least("pair", columns - 2, columns % 2)};
                            const int8_t *from = line + ({product("column", step)} + channel);
                            int8_t *to = output + ((row * {columns} + column) * {channels} + channel);
                            {name}_columns(sums, from, weights + {product("group", taps * lanes)});
                            {name}_end(to, {channels}, sums, ends + {product("group", 3 * lanes)}, 2);
                        }}
                    }}
                }}
            }}
            """,
            copied=self.copied(
                total(product("band", window.stride[ROW]), -window.before[ROW]), "0", columns, self.lines, 1
            ),
        )
        held = [f"int8_t rows[{self.lines * size}] __attribute__((aligned(8)));"]
        held += [f"int32_t sums[{2 * lanes}] __attribute__((aligned(8)));"]
        return [
            *made.columns(f"{name}_columns", self.taps()).splitlines(),
            *("", *made.end(f"{name}_end", self.group_end).splitlines(), ""),
            *function(f"static void {name}", declarations(self.scope.parameters()), [*held, *lines]),
        ]


def _least(text: str, most: int, ragged: int) -> str:
    """C text of the lesser of two numbers, where the first may be more."""
    return f"{text} < {most} ? {text} : {most}" if ragged else text


def _lines_of(window: WindowGeometry, band: int) -> int:
    """Rows that so many rows of the result read."""
    return (band - 1) * window.stride[ROW] + (window.kernel[ROW] - 1) * window.dilation[ROW] + 1


def channels_of(scope: KernelScope) -> VectorChannels:
    """The kernel of a depthwise layer with the core's vectors; raises Unsupported as `rows_of`."""
    unit, products = _unit_of(scope), products_of(scope, merged=False)
    refuse(not products.channelwise, "the channels of a vector are neighbours.")
    sums, window = _sums_of(scope, products), products.window
    ends = _ends_of(scope, len(sums.weights))
    if ends is None or ends.other:
        raise UnsupportedRegion("a depthwise layer of vectors ends with a requantisation.")
    refuse(window.channels < VECTOR_CHANNELS or window.outputs[COLUMN] < 2, "pairs of pixels have 8 channels at least.")
    refuse(prod(window.kernel) > _MOST_TAPS, f"the products of at most {_MOST_TAPS} taps are written out.")
    nest = VectorChannels(scope, window, sums, unit, ends, replace(ends.end, channels=VECTOR_CHANNELS), 0)
    room = (scope.core.room - 2 * VECTOR_CHANNELS * _QUAD) // nest.row_bytes(window.outputs[COLUMN])
    shares = (-(-window.outputs[ROW] // parts) for parts in range(1, window.outputs[ROW] + 1))
    band = next((rows for rows in shares if _lines_of(window, rows) <= room), 0)
    refuse(band == 0, f"the rows of one row take more than {scope.core.room} bytes of stack.")
    return replace(nest, band=band)
