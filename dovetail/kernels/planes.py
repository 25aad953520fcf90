"""Depthwise convolutions on a core that multiplies pairs: each channel's image side by side, two columns to a register.

In memory the neighbours of an element are other channels, so an instruction that adds up neighbouring products finds
nothing to add. Some channels at a time are therefore copied into planes on the stack, padding included: a register
holds two neighbouring columns of one channel. Then all pixels are computed alike, whether at the border or not, and a
register serves two of them: of three taps, one pixel wants the pair (0, 1) and half of the next register, the pixel
right of it half of the first and the pair (1, 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines, block, c_type, code, identifiers, loop, product, total
from dovetail.kernels.epilogue import element
from dovetail.kernels.kernel import KernelChoices, KernelWriter, Turns, UnsupportedRegion, refuse, turns_of_family
from dovetail.kernels.scheduled.knobs import call_of, extents, is_product, staging_of
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import RaisedNest, products_of, raised_end, sums_of
from dovetail.kernels.window import COLUMN, ROW, anchored
from dovetail.records import Record
from dovetail.target.chip import CoreInstruction

_CHANNELS = 4
"""Channels copied together: what one load of the core brings."""
_PIXELS = 4
"""Neighbouring pixels computed together, at most."""
_MOST_TAPS = 49
_REGISTER = 4
"""Bytes."""
_HALVES = ("low", "high")
Halves = tuple[int | None, int | None]
"""The tap, if any, for the low and the high half of a register."""


class Pairs(Record):
    """The instructions of a core that multiplies two pairs of int8, each in half of a 32-bit register."""

    load: CoreInstruction
    """Four elements to two registers: 0 and 2, 1 and 3."""
    product: CoreInstruction
    """Adds the products of both halves to a sum."""


def pairs_of(instructions: Sequence[CoreInstruction]) -> Pairs | None:
    """The pair instructions of a core, found by their meanings; None where one is missing."""
    for one in filter(is_product, instructions):
        staging = staging_of(one, instructions)
        if staging is None or staging.memory.c_type != "uint32_t" or extents(one) != (1, 2):
            continue
        if (staging.memory.elements, staging.parts, staging.interleaved) == (2, 2, True):
            loads = (i for i in instructions if not is_product(i) and staging.memory in i.memories)
            return Pairs(next(loads), one)
    return None


def planes_of(scope: KernelScope) -> Planes:
    """The loops of a depthwise kernel with the core's products of pairs.

    Raises:
        Unsupported: the core has no products of pairs, or the layer is not of the kind they are for.
    """
    pairs, products = pairs_of(scope.core.instructions), products_of(scope, merged=False)
    if pairs is None:
        raise UnsupportedRegion("the core multiplies no pairs.")
    sums, window = sums_of(scope, products), products.window
    refuse(
        scope.source_dtype is not DType.INT8 or sums.weights.dtype != np.int8 or sums.kind != "int32_t",
        "pairs are of int8, and their sums of int32.",
    )
    refuse(
        window.batch > 1 or window.channels % _CHANNELS or not products.channelwise,
        f"planes are of one image and {_CHANNELS} channels.",
    )
    refuse(
        window.dilation[COLUMN] > 1 or window.stride[COLUMN] > 2,
        "pairs are of neighbouring columns, and begin at every or every second one.",
    )
    refuse(prod(window.kernel) > _MOST_TAPS, f"the products of at most {_MOST_TAPS} taps are written out.")
    nest = Planes(scope, window, sums, raised_end(scope, sums), pairs)
    refuse(nest.band == 0, f"the rows of one output take more than {scope.core.room} bytes of stack.")
    return nest


class _SumEnd(Record):
    """The epilogue of a sum."""

    lines: Lines
    text: str
    """C of the element."""
    arrays: tuple[str, ...]
    """Arrays it reads at the channel, from variables."""
    places: bool
    """Whether it reads others at the place of the element."""


class Planes(RaisedNest):
    """One kernel being written."""

    pairs: Pairs

    @property
    def width(self) -> int:
        """Registers of a row of a plane: what the last pixels read, whole."""
        last = self.window.stride[COLUMN] * (self.window.outputs[COLUMN] - 1)
        return (last + self.window.kernel[COLUMN] + 1) // 2

    def lines(self, rows: int) -> int:
        """Rows of the image that so many rows of the result read."""
        span = (self.window.kernel[ROW] - 1) * self.window.dilation[ROW] + 1
        return (rows - 1) * self.window.stride[ROW] + span

    @property
    def band(self) -> int:
        """Rows of the result computed from one filling of the planes: all of them, or equal shares; 0 where one takes
        too much stack."""
        rows = self.window.outputs[ROW]
        for shares in range(1, rows + 1):
            band = -(-rows // shares)
            if _CHANNELS * _REGISTER * self.width * self.lines(band) <= self.scope.core.room:
                return band
        return 0

    def reads(self, pixels: int) -> list[tuple[int, int, Halves]]:
        """Registers that pixels read of a plane's row: pixel, number of the register, the taps its halves are for."""
        taps, reads = self.window.kernel[COLUMN], []
        for pixel in range(pixels):
            first = pixel * self.window.stride[COLUMN]
            for number in range(first // 2, (first + taps - 1) // 2 + 1):
                low, high = (tap if 0 <= tap < taps else None for tap in (2 * number - first, 2 * number + 1 - first))
                reads.append((pixel, number, (low, high)))
        return reads

    @property
    def taps(self) -> list[Halves]:
        """The taps in each register of a kernel row's weights: all pairs that are read, then what is in none."""
        pairs = list(dict.fromkeys(halves for _, _, halves in self.reads(2) if None not in halves))
        held = {tap for pair in pairs for tap in pair}
        return [*pairs, *((tap, None) for tap in range(self.window.kernel[COLUMN]) if tap not in held)]

    def packed(self) -> Array:
        """The weights, [channels, kernel rows, registers of one]."""
        halves = self.powers(self.sums.weights[..., 0]) & 0xFFFF
        none = np.zeros_like(halves[..., 0])
        registers = [
            halves[..., low] + (halves[..., high] << 16 if high is not None else none)
            for low, high in self.taps
            if low is not None
        ]
        return np.stack(registers, axis=-1).astype(np.uint32)

    def _register(self, halves: Halves) -> int:
        """The register of a kernel row's weights that has taps of a register of columns."""
        if halves in self.taps and None not in halves:
            return self.taps.index(halves)
        tap = next(tap for tap in halves if tap is not None)
        return next(number for number, pair in enumerate(self.taps) if tap in pair)

    def _multiplied(self, sum_name: str, columns: str, halves: Halves) -> str:
        """The statement that adds the products of a register of columns."""
        number = self._register(halves)
        if None not in halves:
            return call_of(self.pairs.product, (f"&{sum_name}", f"&{columns}", f"&{_weight(number)}"))
        side = 0 if halves[0] is not None else 1
        half = self.taps[number].index(halves[side])
        return f"{sum_name} = add_{_HALVES[side]}_{_HALVES[half]}({sum_name}, {columns}, {_weight(number)});"

    def _pixels(self, pixels: int) -> Lines:
        """Neighbouring pixels of one channel, from the register `from` points at on, laid down where `to` points."""
        names, count = [f"sum_{pixel}" for pixel in range(pixels)], len(self.taps)
        lines = [f"int32_t {name} = start;" for name in names]
        reads = sorted(self.reads(pixels), key=lambda read: read[1])
        numbers = list(dict.fromkeys(number for _, number, _ in reads))
        weights = sorted({self._register(halves) for _, _, halves in reads})
        for row in range(self.window.kernel[ROW]):
            line = row * self.window.dilation[ROW] * self.width
            inner = [f"const uint32_t {_weight(n)} = tap[{row * count + n}];" for n in weights]
            inner += [f"const uint32_t columns_{n} = from[{line + n}];" for n in numbers]
            inner += [self._multiplied(names[pixel], f"columns_{n}", halves) for pixel, n, halves in reads]
            lines += block("", [*inner, *(f"{name} = held({name});" for name in names)])
        for pixel, name in enumerate(names):
            end = self._end(name, pixel * self.outputs)
            lines += block("", [*end.lines, f"to[{pixel * self.outputs}] = {end.text};"])
        step = pixels * self.outputs
        return [*lines, f"to += {step};", *([f"place += {step};"] if self._end("sum", 0).places else [])]

    def _end(self, name: str, place: int) -> _SumEnd:
        """The epilogue of a sum, with what it reads of a channel in variables."""
        index = anchored(self.scope.output_shape, total("place", place), "at")
        arrays, places = dict[str, str](), Lines()

        def read(array: str, index: str) -> str:
            if index == "at":
                arrays[f"{array}_at"] = array
                return f"{array}_at"
            places.extend([index] if index != "0" else [])
            return f"{array}[{index}]"

        with self.scope.reading(read):
            text = element(self.scope, index, *self.ended(name, index))
        ordered = (arrays[one] for one in identifiers([*self.scope.lines, text]) if one in arrays)
        return _SumEnd(self.scope.lines, text, tuple(ordered), bool(places))

    def _computed(self) -> Lines:
        """All pixels of a band, of one channel after the other: weights, the start of sums and the epilogue's numbers
        are read once per channel."""
        columns, step = self.window.outputs[COLUMN], self.window.stride[COLUMN]
        taps, plane = self.window.kernel[ROW] * len(self.taps), self.lines(self.band) * self.width
        weights = self.scope.constant("sums", "weights", self.packed().reshape(-1))
        bias = self.scope.constant("sums", "bias", self.begun)
        end = self._end("sum", 0)
        types = {parameter.name: parameter.c_type for parameter in self.scope.parameters()}
        place, whole = total(product("band", columns * self.outputs), "at"), columns // _PIXELS * _PIXELS
        moved = _PIXELS * step // 2
        hidden = '__asm__("" : "+r"(tap));'  # else compilers read all weights ahead, and have no registers for them
        row = _turns("column", whole, _PIXELS, [hidden, *self._pixels(_PIXELS), f"from += {moved};"])
        row += block("", [hidden, *self._pixels(columns - whole)]) if whole < columns else []
        row.append(f"from += {self.window.stride[ROW] * self.width - whole // _PIXELS * moved};")
        lines = code(
            f"""
            const int32_t at = channel + lane;
            const uint32_t *tap = {weights} + at * {taps};
            const int32_t start = {bias}[at];
            @numbers
            const uint32_t *from = planes + lane * {plane};
            {c_type(self.scope.graph.types[self.scope.graph.outputs[0]].dtype)} *to = output + {place};
            @place
            @rows
            """,
            numbers=[f"const {types[name]} {name}_at = {name}[at];" for name in end.arrays],
            place=[f"int32_t place = {place};"] if end.places else [],
            rows=loop("row", "end", row, start="band"),
        )
        return loop("lane", _CHANNELS, lines)

    def _pair(self, left: str | None, right: str | None) -> Lines:
        """Two columns of some channels, each at its place in memory or padding, into one register of each plane."""
        size, padding = self.lines(self.band) * self.width, f"{(self.sums.pad_value & 0xFFFF) * 0x10001:#010x}u"
        lines = []
        for name, place in (("left", left), ("right", right)):
            lines.append(f"uint32_t {name}[2]{f' = {{{padding}, {padding}}}' if place is None else ''};")
            lines += [] if place is None else [call_of(self.pairs.load, (f"&{name}[0]", f"&{place}"))]
        for lane in range(_CHANNELS):
            half = "upper" if lane >= 2 else "lower"
            lines.append(f"to[{lane * size}] = {half}_halves(left[{lane % 2}], right[{lane % 2}]);")
        return [*lines, "++to;"]

    def _filled(self) -> Lines:
        """Some channels of the rows a band reads, in planes."""
        (height, width), (above, before) = self.window.size, self.window.before
        channels = self.window.channels
        first = min(-(-before // 2), self.width)
        end = max(min((width + before) // 2, self.width), first)

        def edges(*pairs: int) -> Iterator[str]:
            for pair in pairs:
                columns = (2 * pair - before, 2 * pair + 1 - before)
                places = (f"line[{x * channels}]" if 0 <= x < width else None for x in columns)
                yield from block("", self._pair(*places))

        outside, middle, image = Lines(), Lines(), self.scope.input(self.scope.source(), "input")
        if self.window.padded(ROW) or self.window.outputs[ROW] % self.band:
            padding = [*_turns("pair", self.width, 1, self._pair(None, None)), "continue;"]
            outside = block(f"if (y < 0 || y >= {height})", padding)
        if end > first:
            inner = [*self._pair("from[0]", f"from[{channels}]"), f"from += {2 * channels};"]
            middle = [f"const int8_t *from = line + {(2 * first - before) * channels};"]
            middle += _turns("pair", end - first, 1, inner)
        return code(
            f"""
            for (int32_t down = 0; down < {self.lines(self.band)}; ++down) {{
                const int32_t y = {total(product("band", self.window.stride[ROW]), "down", -above)};
                uint32_t *to = planes + down * {self.width};
                @outside
                const int8_t *line = {image} + (y * {width * channels} + channel);
                @left
                @middle
                @right
            }}
            """,
            outside=outside,
            left=edges(*range(first)),
            middle=middle,
            right=edges(*range(end, self.width)),
        )

    def offered(self) -> KernelChoices:
        """No knobs."""
        return KernelChoices()

    def turns(self) -> Turns:
        """Some channels copied into planes, then all pixels alike."""
        window, channels = self.window, self.window.channels
        rows, columns = window.outputs
        bands, lines = -(-rows // self.band), self.lines(self.band)
        pairs = len(self.reads(4)) / 4 * window.kernel[ROW]
        counts = {
            "filled": channels * bands * lines * self.width,
            "line": channels * bands * lines,
            "product": channels * rows * columns * pairs,
            "row": channels * rows,
            "group": channels * rows * -(-columns // 4),
            "result": channels * rows * columns,
            "weight": channels * rows * -(-columns // 4) * len(self.taps) * window.kernel[ROW],
            "channel": channels * bands,
        }
        return {**turns_of_family("planes", counts), **self.raised_turns(), "planes.call": 1}

    def writer(self) -> KernelWriter:
        """Writes the kernel."""
        used = (self.pairs.load, self.pairs.product)
        texts, names = tuple(one.declarations for one in used), tuple(one.name for one in used)
        return replace(self.scope.writer(self._lines), declarations=texts, instructions=names)

    def _lines(self) -> Lines:
        rows, channels = self.window.outputs[ROW], self.window.channels
        end = f"band + {self.band}"
        end = f"{end} < {rows} ? {end} : {rows}" if rows % self.band else end
        size = _CHANNELS * self.lines(self.band) * self.width
        lines = [f"const int32_t end = {end};", *self._filled(), *self._computed()]
        lines = block(f"for (int32_t band = 0; band < {rows}; band += {self.band})", lines)
        return [f"uint32_t planes[{size}];", *loop("channel", channels, lines, step=_CHANNELS)]


def _turns(name: str, stop: int, step: int, lines: Lines) -> Lines:
    """A counting loop, with braces also where there is one turn."""
    return block("", lines) if stop == step else loop(name, stop, lines, step=step)


def _weight(at: int) -> str:
    """The variable that holds a register of a kernel row's weights."""
    return f"weight_{at}"
