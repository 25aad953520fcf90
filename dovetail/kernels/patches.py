"""Convolutions and dense layers on a core that multiplies pairs: both operands are halves of 32-bit registers.

Weights are pairs already in the constants, twice their bytes. Activations become pairs on the stack: of some
neighbouring pixels the columns they read, one behind the other, each with all kernel rows and channels, padding
included. The taps of a pixel are then one run, that of its neighbour begins a column further, and all pixels are alike;
a column is widened once for all pixels and channels that read it. Blocks of pixels and channels are the target's
(`PairBlocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.types import Array, DType
from dovetail.kernels.c import Lines, block, c_type, channel_lanes, code, function, product, total
from dovetail.kernels.kernel import (
    CHANNELS,
    PIXELS,
    UNROLL,
    CoreTraits,
    KernelChoices,
    KernelWriter,
    Turns,
    UnsupportedRegion,
    block_choices,
    declarations,
    refuse,
    summed_turns,
    turns_of_family,
)
from dovetail.kernels.planes import pairs_of
from dovetail.kernels.registry import family_of
from dovetail.kernels.scope import KernelScope, split
from dovetail.kernels.sums import EndFunction, Extra, RaisedNest, end_function, padded, products_of, raised_end, sums_of
from dovetail.kernels.window import COLUMN, ROW, WindowGeometry
from dovetail.records import Record
from dovetail.target.chip import CoreInstruction, PairBlock, PairBlocks
from dovetail.target.pattern import Knob

_WORD = 4
"""Elements one load brings, and bytes of a register."""
_UNROLLED = 24
"""Most steps of a turn where there are several turns and nothing is chosen: more are 1 % faster and more code."""
_STEPS = 8
"""Steps of a turn where their number has no divisor near."""
_LOADS = 4
"""Loads of a turn that widens a column."""
_WRITTEN_OUT, _WRITTEN_OUT_RAISED = 8, 12
"""Sums of all channels of a block's pixels up to which a compiler writes out the loop over blocks of channels, about;
where a product and a shift requantise them, so that there is less to write out for each."""


def _of_channels(extra: Extra, scope: KernelScope) -> bool:
    """Whether what an epilogue reads is a constant of 32 bits at most per channel."""
    array = scope.constants.get(extra.name)
    return extra.kind == "channel" and array is not None and array.dtype.kind in "iu" and array.dtype.itemsize <= 4


def _words(array: Array) -> Array:
    """Integers as int32, those of uint32 by their bits."""
    return array.reshape(-1).astype(np.int64).astype(np.uint32).view(np.int32)


def patches_of(scope: KernelScope) -> Patches:
    """The loops of a kernel of sums of products with the core's blocks of pairs, and with the block of `scope.choice`.

    Raises:
        Unsupported: the core has no blocks of pairs, or the layer is not of the kind they are for.
    """
    core = scope.core
    taken, products = pairs_of(core.instructions), products_of(scope)
    load = core.pairs.load if core.pairs else None
    load = load or (taken.load if taken else None)
    if core.pairs is None or load is None:
        raise UnsupportedRegion("the core multiplies no blocks of pairs.")
    sums, window = sums_of(scope, products), products.window
    refuse(
        scope.source_dtype is not DType.INT8 or sums.weights.dtype != np.int8 or sums.kind != "int32_t",
        "pairs are of int8, and their sums of int32.",
    )
    refuse(
        window.batch > 1 or window.channels != sums.weights.shape[3] or sums.bits < 8,
        "blocks of pairs are of one image without groups.",
    )
    refuse(window.dilation[COLUMN] > 1 and window.kernel[COLUMN] > 1, "the columns of a patch are neighbours.")
    choices = offered(window, len(sums.weights), core.pairs, core.room)
    wanted = {name: value for name, value in scope.choice.items() if name in choices.default}
    chosen = {**choices.default, **(wanted if choices.space.refusal(wanted) is None else {})}
    block = (int(chosen[name]) for name in (PIXELS, CHANNELS, UNROLL))
    return Patches(scope, window, sums, raised_end(scope, sums), core.pairs, load, choices, *block)


def pair_weights(graph: Graph, core: CoreTraits) -> Array | None:
    """The weights that a region's kernel takes as pairs, twice their bytes; None where it takes none."""
    try:
        scope = split(graph, core)
        ways = family_of(scope)[1].ways if scope.anchor is not None else ()
        return patches_of(scope).sums.weights if any(way.plan is patches_of for way in ways) else None
    except UnsupportedRegion:
        return None


def offered(window: WindowGeometry, outputs: int, pairs: PairBlocks, room: int) -> KernelChoices:
    """The blocks there are for a layer of so many outputs; raises Unsupported where there are none."""
    layout = Columns(window)
    most = min(window.outputs[COLUMN], room // (_WORD * layout.words))
    farthest = pairs.farthest // _WORD

    def reached(pixels: int) -> bool:
        return _WORD * layout.needed(pixels) <= room and (pixels - 1) * layout.distance + pairs.most <= farthest

    least = min(channels for _, channels in pairs.shapes)
    shapes = [(p, c) for p, c in pairs.shapes if p <= most and c <= max(outputs, least) and reached(p)]
    refuse(not shapes, f"the columns of one pixel take more than {room} bytes of stack, or lie too far apart.")

    def cost(block: tuple[int, int]) -> int:
        """Loads and products of the whole layer."""
        pixels, channels = block
        count, rest = divmod(window.outputs[COLUMN], pixels)
        parts = sum(n * (p + channels + 1 + p * channels) for n, p in ((count, pixels), (1, rest)) if p)
        return -(-outputs // channels) * parts

    pixels, channels = (dict.fromkeys(sizes) for sizes in zip(*shapes, strict=True))
    best = min(((p, c) for p in pixels for c in channels if (p, c) in shapes), key=cost)
    step = _WORD * (sum(best) + best[0] * best[1])
    room = min(max(1, pairs.loop // step), pairs.most) if pairs.loop else pairs.most
    own = unrollings(layout.words, room, pairs.most)
    unroll = Knob(UNROLL, own, "pairs of taps of a turn of the innermost loop")
    return block_choices(shapes, unroll, (*best, own[0]), 2)


def unrollings(steps: int, room: int, most: int) -> tuple[int, ...]:
    """Steps that may be written out in a turn, the default first: the most that divide them, if that is not too few; at
    most `room`, of others at most `most`."""
    divisors = [count for count in range(1, most + 1) if (steps % count == 0 and count > 1) or count == steps]
    whole, few = steps in divisors and steps <= room, min(_STEPS, steps, room)
    largest = steps if whole else max((count for count in divisors if count <= min(_UNROLLED, room)), default=0)
    first = largest if largest >= few else few
    others = [count for count in (*divisors[::-1], _STEPS) if count <= min(steps, most) and count * 4 >= first]
    return tuple(dict.fromkeys((first, *others)))


class Columns(Record):
    """How the columns of a patch lie."""

    window: WindowGeometry

    @property
    def spread(self) -> int:
        """Columns of the image from one that is widened to the next: all that are read, with kernels of one column only
        the strided ones."""
        return self.window.stride[COLUMN] if self.window.kernel[COLUMN] == 1 else 1

    @property
    def taps(self) -> int:
        """Elements of a column: kernel rows by channels, and one more where pixels would begin within a register."""
        count = self.window.kernel[ROW] * self.window.channels
        return count + (count * self.window.stride[COLUMN] // self.spread) % 2

    @property
    def words(self) -> int:
        """Registers that the columns of one pixel take: its pairs of taps."""
        return -(-self.taps * self.window.kernel[COLUMN] // 2)

    @property
    def distance(self) -> int:
        """Registers from a pixel to the next."""
        return self.taps * (self.window.stride[COLUMN] // self.spread) // 2

    def count(self, pixels: int) -> int:
        """Columns that so many neighbouring pixels read."""
        return (pixels - 1) * (self.window.stride[COLUMN] // self.spread) + self.window.kernel[COLUMN]

    def needed(self, pixels: int) -> int:
        """Registers that the columns of so many neighbouring pixels take, the half behind the last tap included."""
        return (self.count(pixels) * self.taps + self.ragged + 1) // 2

    @property
    def ragged(self) -> int:
        """1 where the last pair of a pixel has one tap, else 0."""
        return self.taps * self.window.kernel[COLUMN] % 2


class Patches(RaisedNest):
    """One kernel being written."""

    pairs: PairBlocks
    load: CoreInstruction
    """Brings four elements to two registers, 0 and 2, 1 and 3."""
    choices: KernelChoices
    """The knobs."""
    pixels: int
    channels: int
    """Output channels of a block."""
    unroll: int

    @property
    def layout(self) -> Columns:
        """How columns lie."""
        return Columns(self.window)

    @property
    def by_words(self) -> bool:
        """Whether elements are widened four at a time."""
        return self.window.channels % _WORD == 0

    @property
    def filled(self) -> int:
        """Neighbouring pixels whose columns are widened together: equal shares of a row, of whole blocks."""
        columns = self.window.outputs[COLUMN]
        for shares in range(1, columns + 1):
            blocks = -(-columns // (shares * self.pixels))
            share = min(blocks * self.pixels, columns)
            if _WORD * self.layout.needed(share) <= self.scope.core.room:
                return share
        return self.pixels

    def block(self, pixels: int) -> PairBlock:
        """The block of so many pixels."""
        return PairBlock(pixels, self.channels, self.layout.words, self.layout.distance, self.unroll)

    def parts(self, count: int) -> list[tuple[int, int]]:
        """Blocks of `count` neighbouring pixels: how many, of how many pixels."""
        whole, rest = divmod(count, self.pixels)
        return [(n, p) for n, p in ((whole, self.pixels), (1, rest)) if n and p]

    @property
    def shares(self) -> list[tuple[int, int]]:
        """How many times columns are widened in a row, and for how many pixels."""
        whole, rest = divmod(self.window.outputs[COLUMN], self.filled)
        return [(whole, self.filled), *([(1, rest)] if rest else [])]

    @property
    def blocks(self) -> list[int]:
        """Sizes of the blocks there are, in pixels."""
        return sorted({p for _, count in self.shares for _, p in self.parts(count)}, reverse=True)

    def written_out(self, pixels: int) -> bool:
        """Whether a compiler writes out all blocks of channels of so many pixels: few sums, or one block."""
        blocks = -(-self.outputs // self.channels)
        most = _WRITTEN_OUT_RAISED if self.raised else _WRITTEN_OUT
        return blocks == 1 or blocks * self.channels * pixels <= most

    def packed(self) -> Array:
        """The weights in the order they are read, [blocks of channels, steps, channels], as uint32."""
        layout, (rows, columns) = self.layout, self.window.kernel
        taps = padded(self.powers(self.sums.weights), self.channels) & 0xFFFF
        taps = taps.transpose(0, 2, 1, 3)  # columns outside
        if self.by_words:  # as the load has them: 0 and 2, 1 and 3
            taps = taps.reshape(*taps.shape[:3], -1, 2, 2).swapaxes(-1, -2)
        taps = taps.reshape(len(taps), columns, -1)
        taps = np.pad(taps, ((0, 0), (0, 0), (0, layout.taps - rows * self.window.channels))).reshape(len(taps), -1)
        taps = np.pad(taps, ((0, 0), (0, 2 * layout.words - taps.shape[1])))
        words = taps[:, 0::2] | taps[:, 1::2] << 16
        blocks = words.reshape(-1, self.channels, layout.words).transpose(0, 2, 1)
        return np.ascontiguousarray(blocks).astype(np.uint32).reshape(-1)

    def offered(self) -> KernelChoices:
        """The knobs of the block."""
        return self.choices

    def turns(self) -> Turns:
        """Columns widened, then blocks of pixels and channels."""
        layout, outputs, rows = self.layout, self.outputs, self.window.outputs[ROW]
        channels = -(-outputs // self.channels)
        kind = "wide" if self.by_words else "narrow"
        counts = []
        for times, count in self.shares:
            columns = layout.count(count) * rows * times
            counts.append(
                {"row": columns * self.window.kernel[ROW], kind: columns * layout.taps, "share": rows * times}
            )
            for blocks, pixels in self.parts(count):
                number = blocks * rows * times * channels
                turns_of_block, rest = divmod(layout.words, self.unroll)
                straight = self.written_out(pixels)  # places are numbers then, and no pointer moves
                once = pixels == 1 and turns_of_block <= 1  # no loop in which to hide where sums begin and end
                own = {
                    "product": number * layout.words * pixels * self.channels,
                    "load": number * layout.words * (pixels + self.channels),
                    "step": number * layout.words,
                    "turn": number * (turns_of_block if turns_of_block > 1 else 0),
                    "rest": 0 if straight else number * min(rest, 1),
                    "block_once" if once else f"block_{pixels}x{self.channels}": 0 if straight else number,
                    "sum": number * pixels * self.channels,
                    "straight_group" if straight else "group": blocks * rows * times,
                }
                counts.append(own)
        return {**turns_of_family("patches", summed_turns(*counts)), **self.raised_turns(), "patches.call": 1}

    def writer(self) -> KernelWriter:
        """Writes the kernel: the end of a sum, a block of each size, the columns of some pixels, then all."""
        scope = self.scope
        scope.input(self.scope.source(), "input")
        scope.constant("sums", "weights", self.packed())
        end = end_function(scope, self.ended)
        ends = {extra.name: scope.constants[extra.name] for extra in end.extras if _of_channels(extra, scope)}
        scope.constants = {name: array for name, array in scope.constants.items() if name not in ends}
        scope.constant("sums", "ends", padded(np.stack([self.begun, *map(_words, ends.values())], 1), self.channels))
        ends_types = {name: c_type(DType.of(array.dtype)) for name, array in ends.items()}
        loads = [self.load] if self.by_words else []
        texts = [
            *(self.pairs.write(self.block(pixels)) for pixels in self.blocks),
            *(one.declarations for one in loads),
        ]
        products = pairs_of(self.scope.core.instructions)
        used = (*(one.name for one in loads), *([products.product.name] if products else ["pairs"]))
        return KernelWriter(
            lambda name: self._lines(name, end, ends_types), declarations=tuple(texts), instructions=used
        )

    def _lines(self, name: str, end: EndFunction, ends: Mapping[str, str]) -> Lines:
        """The kernel under this name; `ends` are the C types, by name, of the numbers behind the start of each
        channel's sum."""
        parameters = self.scope.parameters()
        types = {**ends, **{parameter.name: parameter.c_type for parameter in parameters}}
        text = [*end.write(f"{name}_finish", types), ""]
        own = [parameter for parameter in parameters if parameter.name != "input"]
        places = ["const uint32_t *from", "int32_t place"]
        for pixels in self.blocks:
            inner = self._block(f"{name}_finish", pixels, end.extras, ends)
            text += [*function(f"static void {name}_{pixels}", [*declarations(own), *places], inner), ""]
        image = next(parameter for parameter in parameters if parameter.name == "input")
        columns = ["uint32_t *to", image.declaration, "int32_t top", "int32_t left", "int32_t count"]
        text += [*function(f"static void {name}_columns", columns, self._columns()), ""]
        arguments = [parameter.name for parameter in own]
        return [*text, *function(f"static void {name}", declarations(parameters), self._rows(name, arguments))]

    def _block(self, finish: str, pixels: int, extras: Sequence[Extra], ends: Mapping[str, str]) -> Lines:
        """All channels of neighbouring pixels; pointers move, as registers for their places are few."""
        lanes, outputs, row = self.channels, self.outputs, 1 + len(ends)
        order = {name: number for number, name in enumerate(ends, 1)}

        def read(extra: Extra, lane: int, pixel: int) -> str:
            """C text of what the end of a sum reads."""
            if extra.name in order:
                cast = "(uint32_t)" if ends[extra.name] == "uint32_t" else ""
                return f"{cast}ends[{lane * row + order[extra.name]}]"
            places = {"channel": total("channel", lane), "position": str(pixel * outputs + lane), "one": "0"}
            return f"{extra.name}[{places[extra.kind]}]"

        ended, whole = Lines(), outputs - outputs % lanes
        for lane in range(lanes):
            stores = []
            for pixel in range(pixels):
                values = [f"sums[{pixel * lanes + lane}]", *(read(extra, lane, pixel) for extra in extras)]
                stores.append(f"output[{total('channel', pixel * outputs + lane)}] = {finish}({', '.join(values)});")
            ended += block(f"if (channel < {whole})", stores) if whole < outputs <= whole + lane else stores
        starts = [f"ends[{lane * row}]" for lane in range(lanes)]
        moved = ["output", *dict.fromkeys(extra.name for extra in extras if extra.kind == "position")]
        steps = {"weights": lanes * self.layout.words, "ends": lanes * row, **dict.fromkeys(moved[1:], lanes)}
        return code(
            f"""
            @begun
            for (int32_t channel = 0; channel < {outputs}; channel += {lanes}) {{
                int32_t sums[{pixels * lanes}] = {{{", ".join(starts * pixels)}}};
                {self.block(pixels).name}(sums, from, weights);
                @ended
                @moved
            }}
            """,
            begun=[f"{name} += place;" for name in moved],
            ended=ended,
            moved=[f"{name} += {step};" for name, step in steps.items()],
        )

    def _columns(self) -> Lines:
        """The columns from `left` on, of the rows from `top` on, as pairs."""
        layout, window, rows = self.layout, self.window, self.window.kernel[ROW]
        return code(
            f"""
            {"uint32_t *at = to;" if self.by_words else "uint8_t *at = (uint8_t *)to;"}
            for (int32_t column = 0; column < count; ++column) {{
                const int32_t x = {total("left", product("column", layout.spread))};
                @beside
                for (int32_t row = 0; row < {rows}; ++row) {{
                    const int32_t y = {total("top", product("row", window.dilation[ROW]))};
                    @above
                    @widened
                }}
                @filler
            }}
            @ragged
            """,
            beside=self._outside(COLUMN, "x", layout.taps),
            above=self._outside(ROW, "y", window.channels),
            widened=self._widened(),
            filler=[] if layout.taps == rows * window.channels else ["put_half(at, 0);", "at += 2;"],
            ragged=["put_half(at, 0);"] if layout.ragged else [],
        )

    def _outside(self, axis: int, place: str, count: int) -> Lines:
        """Padding in the place of so many elements outside the image along an axis."""
        outside = f"if ({place} < 0 || {place} >= {self.window.size[axis]})"
        return block(outside, [*self._padding(count), "continue;"]) if self.window.padded(axis) else []

    def _widened(self) -> Lines:
        """The channels of a pixel as pairs."""
        depth = self.window.channels
        line = f"const int8_t *line = input + {product(f'(y * {self.window.size[COLUMN]} + x)', depth)};"
        if not self.by_words:
            return [line, *block(f"for (int32_t i = 0; i < {depth}; ++i)", ["put_half(at, line[i]);", "at += 2;"])]
        turn = channel_lanes(depth // _WORD, _LOADS)
        calls = [self.load.c.format(to=f"at + {2 * n}", of=f"line + {_WORD * n}") for n in range(turn)]
        step = [*calls, f"at += {2 * turn};", f"line += {_WORD * turn};"]
        return [line, *block(f"for (int32_t i = 0; i < {depth // _WORD // turn}; ++i)", step)]

    def _padding(self, count: int) -> Lines:
        """So many elements of padding as pairs."""
        value = self.sums.pad_value & 0xFFFF
        if self.by_words:
            return block(f"for (int32_t i = 0; i < {count // 2}; ++i)", [f"*at++ = 0x{value | value << 16:08x}u;"])
        halves = [f"put_half(at, {self.sums.pad_value});", "at += 2;"]
        return block(f"for (int32_t i = 0; i < {count}; ++i)", halves)

    def _rows(self, name: str, arguments: Sequence[str]) -> Lines:
        """All pixels."""
        window, layout, lines, column = self.window, self.layout, Lines(), 0
        top = total(product("row", window.stride[ROW]), -window.before[ROW])
        for times, count in self.shares:
            at = f"first + {column}" if column and times > 1 else "first" if times > 1 else str(column)
            left = total(product(f"({at})" if "+" in at else at, window.stride[COLUMN]), -window.before[COLUMN])
            inner = [f"{name}_columns(columns, input, {top}, {left}, {layout.count(count)});"]
            inner += list(self._turns(name, arguments, count, at))
            head = f"for (int32_t first = 0; first < {times * count}; first += {count})"
            lines += block(head, inner) if times > 1 else inner
            column += times * count
        rows = block(f"for (int32_t row = 0; row < {window.outputs[ROW]}; ++row)", lines)
        return [f"uint32_t columns[{layout.needed(self.filled)}];", *rows]

    def _turns(self, name: str, arguments: Sequence[str], count: int, at: str) -> Iterator[str]:
        """The blocks of neighbouring pixels, whose columns are there."""
        done = 0
        for number, pixels in self.parts(count):
            pixel = total("pixel", done) if number > 1 else str(done)
            place = f"(row * {self.window.outputs[COLUMN]} + {at} + {pixel}) * {self.outputs}"
            start = product(f"({pixel})", self.layout.distance)
            call = [f"{name}_{pixels}({', '.join(arguments)}, columns + {start}, {place});"]
            head = f"for (int32_t pixel = 0; pixel < {number * pixels}; pixel += {pixels})"
            yield from block(head, call) if number > 1 else call
            done += number * pixels
