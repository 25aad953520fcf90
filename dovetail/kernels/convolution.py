"""Convolutions and dense layers of integers, in register blocks of pixels and channels that share loads: which blocks
there are, which is taken, how often the parts of its loops run, and the C."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from math import prod
from types import MappingProxyType

from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.kernels.c import Lines, block, c_type, channel_lanes, loop, product, times, total, variable, wrapped
from dovetail.kernels.kernel import (
    CHANNELS,
    PIXELS,
    UNROLL,
    CoreTraits,
    InstructedLoops,
    KernelChoices,
    KernelWriter,
    Turns,
    block_choices,
    refuse,
    turns_of_family,
)
from dovetail.kernels.patches import patches_of
from dovetail.kernels.registry import OFFERED, TURNS, InstructedWay, kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import Products, SumConstants, SumNest, blocked, products_of, row_bytes, sums_of, unpacked
from dovetail.kernels.vectors import rows_of
from dovetail.kernels.window import COLUMN, ONE_PIXEL, ROW, Nest, Number, WindowGeometry, pixel_loops
from dovetail.records import field
from dovetail.target.pattern import Choice, Knob

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


class _ConvolutionKernel(SumNest):
    """One convolution kernel being written."""

    groups: int
    lanes: int
    """Output channels computed together."""
    pixels: int
    """Neighbouring pixels computed together."""
    unroll: int
    """Most input elements of each pixel taken together; 0 for as many as suit the block."""
    ended: dict[int, Lines] = field(default_factory=dict)
    """`ends` of so many pixels."""

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
        start, channel, lanes = self.starts(clamped, self.lanes), self.channel, range(self.lanes)
        sums = [(self.sum(pixel, lane, pixels), lane) for pixel in range(pixels) for lane in lanes]
        lines = [f"{self.sums.kind} {name} = {start}[{total(channel, lane)}];" for name, lane in sums]
        lines += self.shared_taps() if compact else self.taps(pixels, clamped)
        lines += self.ends(pixels, outputs if ragged != 0 else None)
        if self.groups > 1:
            share = self.outputs // self.groups
            lines = loop("channel", f"(group + 1) * {share}", lines, start=f"group * {share}", step=self.lanes)
            lines = loop("group", self.groups, lines)
        else:
            lines = loop("channel", outputs, lines, step=self.lanes)
        return [*(self.clamps() if clamped else self.origins()), self.place(outputs), *lines]

    def ends(self, pixels: int, outputs: Number | None) -> Lines:
        """The statements that end the sums of one block of channels; `outputs` as of `store`."""
        if pixels not in self.ended:
            names = [self.sum(pixel, lane, pixels) for pixel in range(pixels) for lane in range(self.lanes)]
            value, channel = self.sums.value, self.channel
            self.ended[pixels] = self.store(self.sums.kind, names, value, channel, pixels, outputs)
        return self.ended[pixels]

    def alike(self) -> Hashable | None:
        """As of `KernelWriter`: constants decide only the types and the ends of the sums."""
        scope, sums = self.scope, self.sums
        if scope.compact or scope.layouts:
            return None
        outputs, ends = self.outputs if self.outputs % self.lanes else None, list[tuple[str, ...]]()
        alone: list[tuple[int, bool]] = [] if scope.border else [(1, True)]
        for pixels, clamped in [*alone, *([(self.pixels, False)] if self.has_several else [])]:
            begins = self.starts(clamped, self.lanes)
            if not ends:
                self.weights(blocked(sums.weights, self.lanes))
                scope.input(scope.source(), "input")
            ends.append((begins, *self.ends(pixels, outputs)))
        told = tuple((one.name, one.c_type, one.is_constant, one.overlaps) for one in scope.parameters())
        block = self.window, self.groups, self.lanes, self.pixels, self.unroll, self.outputs, self.depth
        kinds = sums.kind, sums.stored, sums.bits, sums.pad_value, scope.result, scope.core
        return *block, *kinds, scope.border and scope.border.name, told, tuple(ends)

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


def scheduled_loops(scope: KernelScope) -> InstructedLoops:
    """The loops of a region of sums of products, scheduled; errors as for `scheduled.write.scheduled_loops`."""
    from dovetail.kernels.scheduled import write  # with all that schedules loops

    return write.scheduled_loops(scope)


_WAYS = (InstructedWay(rows_of), InstructedWay(patches_of), InstructedWay(scheduled_loops, explained=True))


@kernel(Conv2d, windowed=True, packed=True, once=True, compact=True, borders=True, ways=_WAYS)
@kernel(FullyConnected, packed=True, once=True, compact=True, ways=_WAYS)
def write_sums(scope: KernelScope, operator: Operator) -> KernelWriter:
    products = products_of(scope)
    sums = sums_of(scope, products)
    nest = cache(lambda: blocked_nest(scope, products, sums))
    return KernelWriter(
        lambda name: nest().write(name),
        lambda: Nest(scope, products.window).finish(sums.value("sum"), "0"),
        alike=lambda: nest().alike(),
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


UNROLLED = 8
"""Products per turn up to which neighbouring input elements are taken together."""
_UNROLLINGS = (1, 2, 4, 8)
_FEW = 3
"""Sums that are no work for the time a product takes."""
_LEAST_STEP = 2
"""Input elements of each pixel taken together where there are more products, and the number is even."""
_MOST_PIXELS = 4
_MOST_LANES = 16
_LOOP = 3
"""Instructions per turn besides loads, products and additions: two pointers and a branch."""


def _instructions(pixels: int, lanes: int) -> float:
    """Per multiply-accumulate of one turn: a load per input and weight, a product and an addition each."""
    return (pixels + lanes + 2 * pixels * lanes + _LOOP) / (pixels * lanes)


def one_run(window: WindowGeometry, groups: int) -> bool:
    """Whether the taps of a kernel row lie behind one another, so that one loop takes them all."""
    return window.kernel[COLUMN] == 1 or (window.contiguous_columns and groups == 1)


def clamped_run(window: WindowGeometry, groups: int) -> bool:
    """Whether the loop over the taps of a kernel row is as long as there are some inside the image, where single pixels
    are computed: a turn then takes one element."""
    return one_run(window, groups) and window.padded(COLUMN)


def run_length(products: Products) -> int:
    """Input elements that the innermost loop takes in all."""
    window, depth = products.window, int(products.weights.shape[3])
    return depth * window.kernel[COLUMN] if one_run(window, products.groups) else depth


def turn_elements(length: int, sums: int, unroll: int = 0) -> int:
    """Input elements of each pixel that a turn of a loop over `length` takes, in a block of so many sums; at most
    `unroll` where that is given."""
    return channel_lanes(length, unroll or unrolled(sums))


def ordered(sums: int, step: int) -> bool:
    """Whether barriers keep a turn's products in order, as there are many."""
    return sums * step > UNROLLED


def written_out(length: int, step: int, pixels: int, lanes: int) -> bool:
    """Whether a compiler writes out all turns of the innermost loop by itself: short ones, of which no barrier keeps
    it from that."""
    sums = pixels * lanes
    return step < length and not ordered(sums, step) and length * (2 * sums + pixels + lanes) <= _STRAIGHT


_STRAIGHT = 160
"""Instructions of a loop up to which a compiler writes out all of its turns, about."""


def unrolled(sums: int) -> int:
    """Input elements of each pixel that a turn takes, for a block of so many sums."""
    return max(UNROLLED // sums, _LEAST_STEP)


def _blocks(products: Products, sums: int, multiple: int) -> list[tuple[int, int]]:
    """Pixels and output channels that may be computed together.

    Args:
        products: of the layer. Pixels are neighbouring columns whose taps are all inside, if some rows' are.
        sums: those there are registers for.
        multiple: what the channels of a block must be a multiple of; at most the outputs of a group, and `sums`.
    """
    (first, end), (top, bottom) = products.window.inside(COLUMN), products.window.inside(ROW)
    outputs, whole = len(products.weights) // products.groups, products.groups > 1
    return [
        (pixels, count)
        for pixels in range(1, min(_MOST_PIXELS, max(end - first, 1) if bottom > top else 1, sums) + 1)
        for count in range(1, min(_MOST_LANES, outputs, sums // pixels) + 1)
        if count % multiple == 0 and (not whole or outputs % count == 0)
    ]


def register_block(
    products: Products, sums: int, multiple: int, lanes: int | None = None, choice: Choice = MappingProxyType({})
) -> tuple[int, int]:
    """Pixels and output channels computed together: those with the fewest instructions, the smallest of equals.

    Args:
        products, sums, multiple: as `_blocks` takes them.
        lanes: the channels of a block, where they are given and there are registers for them.
        choice: what is chosen of pixels and channels; more sums than there are registers for may be.
    """
    window, outputs = products.window, len(products.weights) // products.groups
    columns, rows = (end - first for first, end in (window.inside(COLUMN), window.inside(ROW)))
    others = window.outputs[ROW] * window.outputs[COLUMN] - rows * columns
    blocks = _blocks(products, sums, multiple)
    wider = _blocks(products, sums * 5 // 4, multiple) if choice else []
    wanted = choice.get(PIXELS), choice.get(CHANNELS)
    chosen = [block for block in wider if all(w in (None, size) for w, size in zip(wanted, block, strict=True))]
    if wanted != (None, None) and chosen:
        blocks = chosen

    def cost(block: tuple[int, int]) -> tuple[float, int]:
        """Instructions per tap of a whole image: groups of columns in blocks, all other pixels one by one."""
        pixels, count = block
        computed, blocked = -(-outputs // count) * count, columns // pixels * pixels * rows
        single = columns * rows - blocked + others
        return computed * (blocked * _instructions(*block) + single * _instructions(1, count)), pixels * count

    return min([block for block in blocks if block[1] == lanes] or blocks, key=cost)


@kernel(Conv2d, FullyConnected, table=OFFERED)
def _offered(scope: KernelScope) -> KernelChoices | None:
    """Blocks of as many sums as there are registers for, or a few more, and how far the innermost loop is unrolled; but
    none of more channels than as many blocks need."""
    core, products = scope.core, products_of(scope)
    sums = sums_of(scope, products)
    if sums.bits < 8 or sums.kind != "int32_t":
        return None
    outputs = len(products.weights) // products.groups
    blocks = [
        (width, count)
        for width, count in _blocks(products, core.accumulators * 5 // 4, 1)
        if count == -(-outputs // -(-outputs // count))
    ]
    default = register_block(products, core.accumulators, 1)
    unroll = unrolled(default[0] * default[1])

    def useless(block: tuple[int, int], taken: int | str | None) -> str | None:
        if taken is None or (block, taken) == (default, unroll):
            return None
        return _useless(products, block, int(taken), (unroll,) if block == default else ())

    what = "input elements of each pixel that a turn of the innermost loop takes at most"
    return block_choices(blocks, Knob(UNROLL, _UNROLLINGS, what), (*default, unroll), 1, useless)


def _useless(products: Products, block: tuple[int, int], unroll: int, first: tuple[int, ...]) -> str | None:
    """Why an unrolling makes a block of sums no faster than others do, `first` what is unrolled by default."""
    if block[0] == 1 and clamped_run(products.window, products.groups):
        least = (*first, *_UNROLLINGS)[0]
        return None if unroll == least else f"{UNROLL} = {unroll} changes nothing: a turn takes one of the taps inside"
    length = run_length(products)
    step, sums = channel_lanes(length, unroll), block[0] * block[1]
    if unroll != next(count for count in (*first, *_UNROLLINGS) if channel_lanes(length, count) == step):
        return f"{UNROLL} = {unroll} changes nothing: a turn takes {step} of {length} elements as with fewer"
    if written_out(length, step, *block):
        return f"{UNROLL} = {unroll} changes nothing: a compiler writes out all turns of so short a loop"
    if sums <= _FEW and ordered(sums, step):
        return f"{UNROLL} = {unroll} is slower: each of so few sums would wait for its product before"
    return None


@kernel(Conv2d, FullyConnected, table=TURNS)
def _turns(scope: KernelScope) -> Turns:
    return blocked_turns(products_of(scope), scope.core, scope.choice)


def blocked_turns(products: Products, core: CoreTraits, choice: Choice = MappingProxyType({})) -> Turns:
    """Sums of products in register blocks: neighbouring pixels inside the image together, all others one by one.

    Of those there are three kinds: at a border, in a function that layers share, with taps clamped to the image; so in
    the layer's own function where it computes all pixels alone; and left over beside blocks, all their taps inside.
    """
    window, outputs, depth = products.window, len(products.weights), products.weights.shape[3]
    share = outputs // products.groups
    (left, right), (top, bottom) = window.inside(COLUMN), window.inside(ROW)
    columns, rows = right - left, bottom - top
    pixels = window.outputs[ROW] * window.outputs[COLUMN]
    together, lanes = register_block(products, core.accumulators, 1, choice=choice)
    blocks, taps = -(-share // lanes) * products.groups, prod(window.kernel) * depth
    fast = columns // together * together * rows
    single = ("border_" if together > 1 else "alone_") if window.any_padded else "left_"
    if together == 1:  # there is one function for all pixels
        fast = 0 if window.any_padded else pixels
    inside, across = window.taps_inside(ROW), window.taps_inside(COLUMN)
    slow, slow_taps = pixels - fast, sum(inside) * sum(across) * depth - fast * taps
    slow_rows, groups = sum(inside) * len(across) - fast * window.kernel[ROW], fast / together
    counts = {"group": groups, f"{single}pixel": slow if window.any_padded else 0}
    for name, width, number, often, kernel_rows in (
        ("", together, groups * taps, groups, groups * window.kernel[ROW]),
        (single, 1, slow_taps, slow, slow_rows),
    ):
        looped = name == "alone_" and _looped_ends(lanes, blocks)
        ends = "ragged_" if outputs % lanes else "looped_" if looped else ""
        counts[f"{name}{ends}result"] = often * width * outputs
        by_element = bool(name) and (window.padded(COLUMN) or together > 1)
        step, starts, per_element = _steps(products, core.joined, (width, lanes), choice, by_element)
        sums = lanes * width
        own = {
            "product": number * sums,
            "load": number * (lanes + width),
            "turn": number * per_element,
            "row": kernel_rows * starts if window.kernel != (1, 1) else 0,
            "block": often,
            "sum": often * sums,
            "crowded": number * max(sums - core.accumulators, 0),
        }
        if name == "left_":  # so few that what begins a row of theirs shall not be fitted by itself
            counts["row"] += own.pop("row") * blocks
        else:
            own["ordered"] = number if ordered(sums, step) else 0
            own["ordered_product"] = own["ordered"] * sums
            own[f"step_{width}x{lanes}"] = number  # what a compiler makes of a block of these sums beyond all that
        counts |= {f"{name}{part}": count * blocks for part, count in own.items()}
    return {**turns_of_family("sum", {part: count * window.batch for part, count in counts.items()}), "sum.call": 1}


_ENDS = 8
"""Sums of a pixel that a compiler ends without a loop, at most."""


def _looped_ends(lanes: int, blocks: int) -> bool:
    """Whether a compiler keeps the loop that ends the sums of a pixel, which then go through memory: of many, and
    sooner where there are several blocks of channels, as the places of constants are then computed."""
    return lanes > _ENDS or (lanes == _ENDS and blocks > 1)


def _steps(
    products: Products, joined: int, block: tuple[int, int], choice: Choice, by_element: bool
) -> tuple[int, int, float]:
    """Input elements of a turn of the innermost loop, such loops to a kernel row, and turns at last to an element: none
    where a compiler writes short loops of few products out, as the kernel does not keep it from that.

    Args:
        products: of the layer.
        joined: `CoreTraits.joined`.
        block: pixels and channels.
        choice: of the kernel's knobs.
        by_element: whether a loop over the taps of a row takes an element a turn, as the function of single pixels does
            that layers share, and any whose taps are clamped to the image.
    """
    window, merged = products.window, one_run(products.window, products.groups)
    length, starts = run_length(products), 1 if merged else window.kernel[COLUMN]
    clamped = by_element and clamped_run(window, products.groups)
    step = 1 if merged and by_element else turn_elements(length, prod(block), int(choice.get(UNROLL, 0)))
    if not clamped and (step == length or written_out(length, step, *block)):
        return step, starts, 0.0
    if ordered(prod(block), step) or not joined:
        return step, starts, 1 / step
    instructions = step * (sum(block) + 2 * prod(block)) + 1
    return step, starts, _turns_of_joined(length // step, instructions, joined, clamped) / length


_JOINED_AT_RUN_TIME = 4
"""Turns that a compiler makes one where it does not know how many there are."""


def _turns_of_joined(turns: int, instructions: int, most: int, unknown: bool) -> float:
    """Turns that a compiler leaves of a loop, of so many instructions each, by making several one: as many as divide
    them within `most` instructions; where it does not know how many there are, or nothing divides them, a power of two,
    and those left over one by one."""
    counts = [count for count in range(2, turns + 1) if turns % count == 0 and count * instructions <= most]
    if counts and not unknown:
        return turns // counts[-1] if counts[-1] < turns else 0
    count = next((count for count in (_JOINED_AT_RUN_TIME, 2) if count * instructions <= most), 1)
    return turns // count + turns % count
