"""Convolutions, dense layers and matrix products: integers in blocks that share loads, floats one sum after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, MatrixProduct
from dovetail.ir.types import DType
from dovetail.kernels.c import atom, block, c_type, channel_lanes, loop, product, total, variable, wrapped
from dovetail.kernels.elements import PIXEL, operand, place_in, write_elements
from dovetail.kernels.kernel import (
    CHANNELS,
    PIXELS,
    UNROLL,
    CoreTraits,
    Expression,
    KernelChoices,
    KernelScope,
    KernelWriter,
    UnsupportedRegion,
    accumulate_type,
    loads_per_product,
)
from dovetail.kernels.region import FLOAT_FAMILIES, OFFERED, RegionParts, kernel
from dovetail.kernels.sums import (
    Products,
    SumConstants,
    SumNest,
    blocked,
    looked_up,
    packed,
    products_of,
    row_bytes,
    sums_of,
    unpacked,
)
from dovetail.kernels.window import (
    COLUMN,
    ONE_PIXEL,
    ROW,
    Nest,
    PixelFunction,
    WindowGeometry,
    pixel_functions,
    pixel_loops,
    window_of,
)
from dovetail.target.pattern import Choice, Knob, Space

_IN_ORDER = 4
"""Products after which a barrier keeps the compiler from loading further ahead."""
UNROLLED = 8
"""Products per turn up to which neighbouring input elements are taken together."""
_UNROLLINGS = (1, 2, 4, 8)
_FEW = 3
"""Sums that are no work for the time a product takes."""
_LEAST_STEP = 2
"""Input elements of each pixel taken together where there are more products, and the number is even."""
ONCE: tuple[type[Operator], ...] = (Conv2d, FullyConnected)
"""Anchors whose kernels compute every element of the result once; of a depthwise one, columns may be computed twice."""


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

    def multiply(self, pixels: int, taken_off: int, step: int) -> list[str]:
        """Products of `step` neighbouring input elements of each pixel with every lane."""
        lines = []
        distance = self.window.stride[COLUMN] * self.window.channels
        crowded, done = ordered(pixels * self.lanes, step), list[str]()
        values = [f"value_{pixel}" if pixels > 1 else "value" for pixel in range(pixels)]
        for element in range(step):
            for pixel, name in enumerate(values):
                kind = "const int32_t " if step == 1 else ("int32_t " if element == 0 else "")
                lines.append(f"{kind}{name} = {total(self.taken(element + pixel * distance), -taken_off)};")
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

    def pointers(self, column: str) -> list[str]:
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

    def taps(self, pixels: int, clamped: bool) -> list[str]:
        """The loops over kernel rows, kernel columns and depth of one block of channels."""
        window, depth, columns = self.window, self.depth, self.window.kernel[COLUMN]
        clamped = clamped and window.any_padded
        taken_off = self.sums.pad_value if clamped else 0
        merged = one_run(window, self.groups)
        first, end = self.first(COLUMN, clamped), self.end(COLUMN, clamped)
        lines = self.pointers(first if merged else "kernel_column")
        if clamped and clamped_run(window, self.groups):
            lines += self._run(pixels, taken_off, product(f"({end} - {first})", depth), 1)
        else:
            length = columns * depth if merged else depth
            step = turn_elements(length, pixels * self.lanes, self.unroll)
            lines += self._run(pixels, taken_off, str(length), step)
        return self.rows(lines if merged else self.columns(lines, clamped), clamped)

    def _run(self, pixels: int, taken_off: int, length: str, step: int) -> list[str]:
        products = self.multiply(pixels, taken_off, step)
        if length == str(step):
            return products
        advance = [f"from += {step};", f"tap += {step * self.tap_size};"]
        advance += [_made(["from", "tap"])] if ordered(pixels * self.lanes, step) else []
        end = f"const {c_type(self.sums.stored)} *const end = tap + {product(length, self.tap_size)};"
        return [end, *block("while (tap != end)", [*products, *advance])]

    def body(self, pixels: int, clamped: bool) -> list[str]:
        start, channel = self.starts(clamped, self.lanes), variable("channel", self.outputs)
        sums = [(self.sum(pixel, lane, pixels), lane) for pixel in range(pixels) for lane in range(self.lanes)]
        lines = [f"{self.sums.kind} {name} = {start}[{total(channel, lane)}];" for name, lane in sums]
        ragged = self.outputs if self.outputs % self.lanes else None
        names = [name for name, _ in sums]
        lines += self.taps(pixels, clamped)
        lines += self.store(self.sums.kind, names, self.sums.value, channel, pixels, ragged)
        if self.groups > 1:
            share = self.outputs // self.groups
            lines = loop("channel", f"(group + 1) * {share}", lines, start=f"group * {share}", step=self.lanes)
            lines = loop("group", self.groups, lines)
        else:
            lines = loop("channel", self.outputs, lines, step=self.lanes)
        return [*(self.clamps() if clamped else self.origins()), self.place(self.outputs), *lines]

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

    def write(self, name: str) -> list[str]:
        parts = {}
        if self.scope.border is None:
            parts["pixel"] = PixelFunction(ONE_PIXEL, self.body(1, clamped=True))
        if self.has_several:
            comment = f"{self.pixels} neighbouring output columns, all taps inside the image."
            parts["pixels"] = PixelFunction(comment, self.body(self.pixels, clamped=False))
        window = self.window
        return pixel_functions(name, self.scope, window, parts, lambda calls: pixel_loops(window, calls, self.pixels))


@kernel(Conv2d, windowed=True, packed=True)
@kernel(FullyConnected, packed=True)
def write_sums(region: RegionParts, scope: KernelScope, operator: Operator) -> KernelWriter:
    products = products_of(region, scope)
    sums = sums_of(region, products)
    return KernelWriter(
        lambda name: blocked_nest(region, scope, products, sums).write(name),
        lambda: Nest(region, scope, products.window).finish(sums.value("sum"), "0"),
    )


def blocked_nest(region: RegionParts, scope: KernelScope, products: Products, sums: SumConstants) -> _ConvolutionKernel:
    """The kernel, the register block chosen; raises Unsupported for a bias that is not constant."""
    share = len(products.weights) // products.groups
    registers = max(scope.accumulators // (2 if sums.kind == "int64_t" else 1), 1)
    fields = 8 // sums.bits
    multiple = fields if min(share, registers) >= fields and (products.groups == 1 or share % fields == 0) else 1
    pixels, scope.lanes = register_block(products, registers, multiple, scope.lanes, scope.choice)
    unroll = int(scope.choice.get(UNROLL, 0))
    return _ConvolutionKernel(region, scope, products.window, sums, products.groups, scope.lanes, pixels, unroll)


@kernel(Conv2d, FullyConnected, table=OFFERED)
def _offered(region: RegionParts, core: CoreTraits) -> KernelChoices | None:
    """Blocks of as many sums as there are registers for, or a few more, and how far the innermost loop is unrolled; but
    none of more channels than as many blocks need."""
    products = products_of(region, KernelScope(region.graph))
    sums = sums_of(region, products)
    if sums.bits < 8 or sums.kind != "int32_t":
        return None
    outputs = len(products.weights) // products.groups
    blocks = [
        (width, count)
        for width, count in _blocks(products, core.accumulators * 5 // 4, 1)
        if count == -(-outputs // -(-outputs // count))
    ]
    pixels, channels = (tuple(dict.fromkeys(sizes)) for sizes in zip(*blocks, strict=True))
    default = register_block(products, core.accumulators, 1)
    knobs = (
        Knob(PIXELS, pixels, "neighbouring pixels of a block of sums in registers"),
        Knob(CHANNELS, channels, "channels of such a block"),
        Knob(UNROLL, _UNROLLINGS, "input elements of each pixel that a turn of the innermost loop takes at most"),
    )

    unroll = unrolled(default[0] * default[1])

    def problem(choice: Choice) -> str | None:
        block, taken = (choice.get(PIXELS), choice.get(CHANNELS)), choice.get(UNROLL)
        if None in block:
            return None
        if block not in blocks:
            return f"there are no registers for {block[0]} pixels x {block[1]} channels"
        if taken is None or (block, taken) == (default, unroll):
            return None
        first = (unroll,) if block == default else ()
        return _useless(products, (int(block[0]), int(block[1])), int(taken), first)

    most = (*min(blocks, key=loads_per_product), 1)
    return KernelChoices(Space(knobs, problem), {PIXELS: default[0], CHANNELS: default[1], UNROLL: unroll}, most)


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


def _weight(region: RegionParts, scope: KernelScope, start: str, offset: str) -> str:
    """The weight `offset` after the place `start`: a float, or an integer whose sum is scaled afterwards."""
    place, dtype = total(start, offset), region.type(1).dtype
    if dtype.bits >= 8:
        text = f"{operand(region, scope, 1, 'weights')}[{place}]"
        return text if dtype is DType.FLOAT32 else f"(float){text}"
    array = packed(scope.known(region.node.inputs[1]).reshape(-1), dtype.bits)
    return f"(float){looked_up(scope.constant(region.node.output, 'weights', array), dtype.bits, place)}"


def _bias(region: RegionParts, scope: KernelScope, channel: str) -> str:
    biased = len(region.node.inputs) > 2
    return f"float sum = {operand(region, scope, 2, 'bias') + f'[{channel}]' if biased else '0.0f'};"


@kernel(Conv2d, DepthwiseConv2d, table=FLOAT_FAMILIES)
def _float_convolution(region: RegionParts, scope: KernelScope, operator: Conv2d | DepthwiseConv2d) -> KernelWriter:
    """The writer of a float Conv2d or DepthwiseConv2d; a Pad with zeros before it is folded in."""
    if region.pad_value != 0:
        raise UnsupportedRegion("only a Pad with zeros is fused into a float convolution.")
    (_, rows, columns, depth), outputs = region.type(1).shape, region.result.shape[3]
    nest = Nest(region, scope, window_of(region, (rows, columns), operator.stride, operator.dilation))
    channels, depthwise = nest.window.channels, isinstance(operator, DepthwiseConv2d)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        image, channel = scope.input(region.source(), "input"), places[3]
        start = _bias(region, scope, channel)
        row, column = nest.tap(ROW), nest.tap(COLUMN)
        below = nest.below(ROW, row), nest.below(COLUMN, column)
        tap = wrapped(total(product(row, columns), column))
        if depthwise:
            share = outputs // channels
            source = nest.input_index(*below, channel if share == 1 else f"{channel} / {share}")
            weight = _weight(region, scope, product(tap, outputs), channel)
            lines = [f"sum += {image}[{source}] * {weight};"]
        else:
            share = outputs // (channels // depth)
            group = "0" if depth == channels else f"{channel} / {share} * {depth}"
            tap = wrapped(total(product(channel, rows * columns), tap))
            weight = _weight(region, scope, product(tap, depth), "depth")
            step = f"sum += from[depth] * {weight};"
            pointer = f"const float *from = {image} + {nest.input_index(*below, group)};"
            lines = [pointer, *loop("depth", depth, [step])]
        lines = nest.rows(nest.columns(lines))
        lines = ["{", *lines, "}"] if not depthwise and lines[0].startswith("const") else lines
        return [*nest.clamps(), start, *lines], Expression("sum", "float")

    return write_elements(region, scope, element, PIXEL)


@kernel(FullyConnected, table=FLOAT_FAMILIES)
def _float_dense(region: RegionParts, scope: KernelScope, operator: FullyConnected) -> KernelWriter:
    shape = region.type(0).shape
    depth = shape[-1]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        start = _bias(region, scope, places[-1])
        row = wrapped(place_in(shape[:-1], places[:-1])) if prod(shape[:-1]) > 1 else "0"
        weight = _weight(region, scope, product(places[-1], depth), "depth")
        lines = [
            f"const float *from = {total(x, product(row, depth))};",
            start,
            *loop("depth", depth, [f"sum += from[depth] * {weight};"]),
        ]
        return lines, Expression("sum", "float")

    return write_elements(region, scope, element)


@kernel(MatrixProduct)
def _matrix_product(region: RegionParts, scope: KernelScope, operator: MatrixProduct) -> KernelWriter:
    a_kind, b_kind = region.type(0), region.type(1)
    left, right, depth = a_kind.shape, b_kind.shape, a_kind.shape[-1]
    real = a_kind.dtype is DType.FLOAT32
    farthest = (
        max(kind.dtype.high - zero, zero - kind.dtype.low)
        for kind, zero in ((a_kind, operator.left_zero_point), (b_kind, operator.right_zero_point))
    )
    reach = 0 if real else depth * prod(farthest)
    held = "float" if real else accumulate_type(-reach, reach)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        a, b = operand(region, scope, 0, "input"), operand(region, scope, 1, "other")
        inner = variable("depth", depth)
        x = place_in(left, (*places[:-1], inner))
        y = place_in(right, (*places[:-2], inner, places[-1]))
        terms = (total(f"{a}[{x}]", -operator.left_zero_point), total(f"{b}[{y}]", -operator.right_zero_point))
        step = f"sum += {atom(terms[0])} * {atom(terms[1])};"
        start = "0.0f" if real else "0"
        return [f"{held} sum = {start};", *loop("depth", depth, [step])], Expression("sum", held, -reach, reach)

    return write_elements(region, scope, element)
