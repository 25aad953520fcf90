"""A layer as lists of Gemmini's instructions: what is brought when, and in which order it is multiplied.

A launch begins with weights, which nobody writes, then a fence: what the launches before it wrote is in memory, and the
moves behind it may read that, or write over what they read. Then step by step (a block of output channels, a band of
lines): moves for the next step are issued before the products of this one, and bands take turns in quarters of the
accumulator, so that the three units work side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

import dovetail.target as dt
from dovetail.ir.operators.arithmetic import Clip, float_scale
from dovetail.ir.operators.linear import Convolution
from dovetail.ir.types import Array, TensorType
from dovetail.records import Record
from dovetail.target import layers
from dovetail.targets.gemmini.nests import (
    ADDED,
    FENCE,
    MVIN,
    MVIN2,
    MVIN3,
    MVOUT,
    SUMS,
    Config,
    Held,
    LineBand,
    MoveLoop,
    PixelWalk,
    Words,
    array_setting,
    brought,
    cleared,
    cut,
    local,
    moves,
    products,
    way_in,
    way_out,
)

QUARTERS = 4
"""Parts of the accumulator that bands take turns in."""


def image_of(kind: TensorType, place: dt.Operand) -> layers.Image:
    """An image, or a matrix as an image of one line, as it lies in memory."""
    if len(kind.shape) == 2:
        return layers.Image(place.address, 1, kind.shape[0], kind.shape[1], 0, place.strides[0])
    return layers.image_of(kind, place)


class LayerShape(Record, dict=True):
    """Sizes that a layer's loops follow from."""

    config: Config
    window: layers.LayerWindow
    apart: bool
    """Whether each channel is by itself."""
    x: tuple[int, int, int]
    """Lines, columns and channels of the operand."""
    y: tuple[int, int, int]
    """... of the result."""

    @property
    def taps(self) -> int:
        """Taps of the window."""
        return self.window.kernel[0] * self.window.kernel[1]

    @property
    def blocks(self) -> int:
        """Blocks of output channels."""
        return -(-self.y[2] // self.config.dim)

    @property
    def inputs(self) -> int:
        """Input channels of a block of output channels."""
        return min(self.config.dim, self.x[2]) if self.apart else self.x[2]

    @property
    def weight_rows(self) -> int:
        """Rows of the weights of a block of output channels."""
        return self.taps * self.inputs

    @property
    def held(self) -> Held:
        """The place of the operand."""
        (above, left), (below, right) = self.window.before, self.window.after
        pitch = self.x[1] + max(left, right)
        return Held(0, pitch, (above + self.x[0] + below) * pitch + left, above, left)

    @property
    def image_rows(self) -> int:
        """Rows of the scratchpad the operand takes, and what zeros may go over."""
        over = max(64 // self.config.dim, 1) if self.held.pitch > self.x[1] else 0
        return -(-self.x[2] // self.config.dim) * self.held.block + over * self.held.pitch + self.config.dim

    @property
    def kept_weights(self) -> int:
        """Blocks of output channels whose weights are held at a time."""
        room = self.config.rows - self.image_rows
        return min(self.blocks, room // self.weight_rows)

    def walks(self, lines: int) -> Iterator[tuple[PixelWalk, int]]:
        """Ways over so many lines of the result, with the rows of sums from a line to the next."""
        (down, right), (_, columns, _), pitch = self.window.stride, self.y, self.held.pitch
        yield PixelWalk(lines, columns, (down * pitch, right), (columns, 1)), columns
        yield PixelWalk(columns, lines, (right, down * pitch), (1, columns)), columns
        if down == right == 1:
            length = (
                -(-((lines - 1) * pitch + columns) // self.config.dim) * self.config.dim
            )  # the last pixels mean nothing
            yield PixelWalk(1, length, (0, 1), (0, 1)), pitch

    @cached_property
    def bands(self) -> tuple[LineBand, ...]:
        """The result in bands whose sums fill a quarter of the accumulator, in the way that takes the fewest cycles."""
        most, (lines, columns, _) = self.config.sums // QUARTERS, self.y
        if self.x[0] == self.y[0] == self.taps == 1 and self.window.stride == (1, 1):
            pieces = ((start + n * count, count) for start, turns, count in cut(columns, most) for n in range(turns))
            return tuple(LineBand(0, 1, PixelWalk(1, n, (0, 1), (0, 1)), n, n, start) for start, n in pieces)
        ways = []
        for number, (_, pitch) in enumerate(self.walks(1)):
            step, found = (
                max((most - self.config.dim) // pitch if pitch > columns else most // pitch, 1),
                list[LineBand](),
            )
            for first in range(0, lines, step):
                count = min(step, lines - first)
                walk, _ = [*self.walks(count)][number]
                found.append(LineBand(first, count, walk, pitch, max(walk.runs * walk.length, count * columns)))
            ways.append(found)
        return tuple(min(ways, key=lambda found: sum(band.walk.cycles(self.config.dim) for band in found)))

    @property
    def fits(self) -> bool:
        """Whether the local memories hold what is needed at a time."""
        return (
            self.kept_weights >= min(2, self.blocks)
            and all(band.rows <= self.config.sums // QUARTERS for band in self.bands)
            and self.held.block < 1 << 16
        )


def shape_of(config: Config, match: dt.Match) -> LayerShape:
    """The sizes of a matched layer."""
    x, y = (pixels_of(kind.shape) for kind in (match.type("x"), match.result))
    return LayerShape(config, layers.window_of(match), layers.linear_of(match).is_channelwise, x, y)


def pixels_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Lines, columns and channels; the rows of a matrix are pixels of one line."""
    return (1, shape[0], shape[1]) if len(shape) == 2 else (shape[1], shape[2], shape[3])


class Fold(Record):
    """Neighbouring pixels taken as one with all their channels, so that narrow layers fill the array."""

    plain: LayerShape
    results: int
    """Pixels of the result in one."""

    @property
    def operands(self) -> int:
        """Pixels of the operand in one."""
        return self.results * self.plain.window.stride[1]

    @property
    def reach(self) -> tuple[int, int]:
        """The first and the last of such pixels that a result reads, from its own place on."""
        window, left = self.plain.window, self.plain.window.before[1]
        last = (self.results - 1) * window.stride[1] + window.kernel[1] - 1 - left
        return -left // self.operands, last // self.operands

    @property
    def shape(self) -> LayerShape:
        """The layer of such pixels."""
        plain, window, (first, last) = self.plain, self.plain.window, self.reach
        x = (plain.x[0], plain.x[1] // self.operands, plain.x[2] * self.operands)
        y = (plain.y[0], plain.y[1] // self.results, plain.y[2] * self.results)
        after = max(y[1] + last - x[1], 0)
        wide = layers.LayerWindow(
            (window.kernel[0], last - first + 1), (window.stride[0], 1), (window.dilation[0], 1),
            (window.before[0], -first), (window.after[0], after), 0,
        )  # fmt: skip
        return LayerShape(plain.config, wide, False, x, y)

    @property
    def is_possible(self) -> bool:
        """Whether whole pixels come out, and fill the array at most."""
        plain, dim = self.plain, self.plain.config.dim
        whole = plain.x[1] % self.operands == plain.y[1] % self.results == 0 and plain.window.dilation[1] == 1
        narrow = plain.x[2] * self.operands <= dim and (self.results == 1 or plain.y[2] * self.results <= dim)
        return whole and narrow and self.operands > 1 and (plain.y[0] > 1 or plain.y[1] > 1)

    def weights(self, dense: Array) -> Array:
        """The weights [O, KH, KW, I] as those of such pixels."""
        (outputs, lines, columns, inputs), (first, last) = dense.shape, self.reach
        wide = np.zeros((self.results, outputs, lines, last - first + 1, self.operands, inputs), dense.dtype)
        for pixel in range(self.results):
            for tap in range(columns):
                place = pixel * self.plain.window.stride[1] - self.plain.window.before[1] + tap
                wide[pixel, :, :, place // self.operands - first, place % self.operands] = dense[:, :, tap]
        return wide.reshape(self.results * outputs, lines, last - first + 1, self.operands * inputs)


def fold_of(config: Config, match: dt.Match) -> Fold | None:
    """The fold of a layer that takes the fewest cycles; None where none is better than none."""
    plain = shape_of(config, match)
    folds = [Fold(plain, 1 << power) for power in range(5)]
    best = min((fold for fold in folds if fold.is_possible), key=lambda fold: busy(fold.shape), default=None)
    return best if best is not None and busy(best.shape) < busy(plain) else None


def scale_of(match: dt.Match) -> float:
    """The factor of the requantisation, float32."""
    return float(float_scale(match.array("multiplier"), match.array("shift")).reshape(-1)[0])


def pack(config: Config, match: dt.Match, folded: bool = False) -> dict[str, Array]:
    """Weights by blocks of output channels: tap, input channel, output channel; channels apart as diagonals. Biases."""
    layer, dim, bias = match.array("weights").astype(np.int8), config.dim, np.zeros(1, np.int32)
    shape = shape_of(config, match)
    bias = np.broadcast_to(match.array("bias") if "bias" in match.values else bias, shape.y[2])
    if folded and (fold := fold_of(config, match)):
        layer = fold.weights(match.operator("layer", Convolution).dense_weights(layer))
        shape, bias = fold.shape, np.tile(bias, fold.results)
    outputs = shape.y[2]
    if layer.ndim == 2:
        layer = layer[:, None, None]
    padded = -outputs % dim
    if shape.apart:
        taps = np.pad(layer[0].reshape(shape.taps, outputs), [(0, 0), (0, padded)])
        wide = np.zeros((shape.blocks, shape.taps, shape.inputs, dim), np.int8)
        for channel in range(min(dim, outputs)):
            wide[:, :, channel, channel] = taps.reshape(shape.taps, -1, dim)[:, :, channel].T
    else:
        flat = np.pad(layer.reshape(outputs, shape.taps, -1), [(0, padded), (0, 0), (0, 0)])
        wide = flat.reshape(shape.blocks, dim, shape.taps, -1).transpose(0, 2, 3, 1)
    zero = layers.linear_of(match).input_zero_point
    taken = np.pad(bias, (0, padded)) - zero * wide.astype(np.int32).sum(axis=(1, 2)).reshape(-1)
    arrays = {"weights": wide, **({"biases": taken.astype("<i4")} if taken.any() else {})}
    if zero and any((*shape.window.before, *shape.window.after)):
        arrays["border"] = np.full(64, zero, np.int8)
    return {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}


class LayerLaunch(Record):
    """A layer with its operands' places."""

    shape: LayerShape
    x: layers.Image
    y: layers.Image
    weights: int
    biases: int
    """Their address; 0 for none."""
    scale: float
    relu: bool
    border: int = 0
    """Address of what stands around the operand; 0 for zeros."""
    full: bool = False
    """Whether sums are given as they are, int32."""

    @property
    def first_weights(self) -> int:
        """Row of the weights: where follows from their address, so that those of the next layer lie elsewhere."""
        shape, dim = self.shape, self.shape.config.dim
        free = shape.config.rows - shape.image_rows - shape.kept_weights * shape.weight_rows
        return shape.image_rows + (self.weights // dim) % (free + 1)

    def weights_at(self, block: int) -> int:
        """Row of the weights of a block of output channels."""
        return self.first_weights + block % self.shape.kept_weights * self.shape.weight_rows

    def fetch(self, block: int) -> Iterator[Words]:
        """The weights of a block of output channels."""
        dim, rows = self.shape.config.dim, self.shape.weight_rows
        for start, turns, count in cut(rows, dim):
            address = self.weights + (block * rows + start) * dim
            yield moves(
                MVIN2, address, local(self.weights_at(block) + start, count, dim), (MoveLoop(turns, dim * dim, dim),)
            )

    def sums_at(self, step: int) -> int:
        """Row of the accumulator for the sums of a step."""
        return step % QUARTERS * (self.shape.config.sums // QUARTERS)

    def bias(self, step: int, block: int, band: LineBand) -> Iterator[Words]:
        """The biases, if there are some, as first sums, the same for each pixel."""
        dim = self.shape.config.dim
        if not self.biases:
            return
        for start, turns, count in cut(band.rows, dim):
            operand = local(SUMS | self.sums_at(step) + start, count, self.outputs(block))
            yield moves(MVIN3, self.biases + 4 * block * dim, operand, (MoveLoop(turns, 0, dim),))

    def outputs(self, block: int) -> int:
        """Channels of a block of output channels."""
        dim = self.shape.config.dim
        return min(dim, self.shape.y[2] - block * dim)

    def borders(self, blocks: tuple[int, int]) -> Iterator[Words]:
        """Zeros around the operand."""
        shape, held = self.shape, self.shape.held
        lines, columns, _ = shape.x
        count, first, right = blocks[1] - blocks[0], blocks[0] * held.block, held.pitch - columns
        if held.above or held.left:
            yield from cleared(shape.config, self.border, first, held.above * held.pitch + held.left, count, held.block)
        if right:
            most = max(64 // shape.config.dim, 1)
            loops = (MoveLoop(count, 0, held.block), MoveLoop(-(-lines // most), 0, most * held.pitch))
            yield moves(MVIN3, self.border, local(first + held.at(0, columns), right, most * shape.config.dim), loops)
        if below := shape.window.after[0] * held.pitch:
            yield from cleared(shape.config, self.border, first + held.at(lines, 0), below, count, held.block)

    def reached(self, number: int) -> int:
        """Lines of the operand that bands up to this one read, none for the one before the first."""
        if number < 0:
            return 0
        band, window = self.shape.bands[number], self.shape.window
        tall = (window.kernel[0] - 1) * window.dilation[0] + 1
        return min((band.first + band.lines - 1) * window.stride[0] + tall - window.before[0], self.shape.x[0])

    def ready(self, step: int, block: int, number: int) -> Iterator[Words]:
        """All a step needs beyond what the steps before it brought, and the weights of the next block of outputs."""
        shape, band = self.shape, self.shape.bands[number]
        if shape.apart or block == 0:
            blocks = (block, block + 1) if shape.apart else (0, -(-shape.x[2] // shape.config.dim))
            if number == 0:
                yield from self.borders(blocks)
            lines = max(self.reached(number - 1), 0), self.reached(number)
            if lines[1] > lines[0]:
                yield from brought(shape.config, self.x, shape.held, lines, blocks)
        if step:
            yield from self.bias(step, block, band)
        if number == len(shape.bands) - 1 and block + 1 < shape.blocks:
            yield from self.fetch(block + 1)

    def multiplied(self, step: int, block: int, band: LineBand) -> Iterator[Words]:
        """The products of a step, a row of taps at a time."""
        shape, held, dim, window = self.shape, self.shape.held, self.shape.config.dim, self.shape.window
        (down, right), (lines, taps) = window.stride, window.kernel
        first = held.first + band.first * down * held.pitch + band.column * right
        first += block * held.block if shape.apart else 0
        inputs = min(dim, shape.x[2] - block * dim) if shape.apart else shape.x[2]
        sizes = (inputs, self.outputs(block))
        for line in range(lines):
            a = (first + line * window.dilation[0] * held.pitch, window.dilation[1], held.block)
            weights = (self.weights_at(block) + line * taps * shape.inputs, shape.inputs, dim)
            kind = SUMS if line == 0 and not self.biases else ADDED
            yield products(shape.config, band.walk, a, weights, kind | self.sums_at(step), taps, sizes)

    def given(self, step: int, block: int, band: LineBand) -> Iterator[Words]:
        """The results of a step to memory."""
        dim, y, size = self.shape.config.dim, self.y, 4 if self.full else 1
        kind, lines, columns = ADDED | (1 << 29 if self.full else 0), band.lines, min(y.columns, band.rows)
        if band.pitch == columns and y.row == columns * y.pixel:
            lines, columns = 1, lines * columns
        first = y.address + band.first * y.row + band.column * y.pixel + block * dim * size
        for column, chunks, count in cut(columns, dim):
            operand = local(kind | self.sums_at(step) + column, count, self.outputs(block))
            loops = (MoveLoop(lines, y.row, band.pitch), MoveLoop(chunks, dim * y.pixel, dim))
            yield moves(MVOUT, first + column * y.pixel, operand, loops)

    def words(self) -> Iterator[Words]:
        """The launch."""
        shape = self.shape
        steps = [(block, number) for block in range(shape.blocks) for number in range(len(shape.bands))]
        yield array_setting(shape.bands[0].walk.a[1], shape.bands[0].walk.sums[1])
        yield way_in(MVIN2, shape.config.dim)
        yield way_in(MVIN3, 0, shape.held.pitch)
        yield from self.fetch(0)
        yield from self.bias(0, 0, shape.bands[0])
        yield FENCE
        yield way_in(MVIN, self.x.pixel, shape.held.block)
        yield way_out(self.y.pixel, self.scale, self.relu)
        yield from self.ready(0, *steps[0])
        for step, (block, number) in enumerate(steps):
            before = self.given(step - 1, steps[step - 1][0], shape.bands[steps[step - 1][1]]) if step else ()
            after = self.ready(step + 1, *steps[step + 1]) if step + 1 < len(steps) else ()
            yield from spread([*before, *after], [*self.multiplied(step, block, shape.bands[number])])
        yield from self.given(len(steps) - 1, steps[-1][0], shape.bands[-1])


def spread(between: Sequence[Words], products: Sequence[Words]) -> Iterator[Words]:
    """Products with moves between them, so that the array has work while the core issues moves."""
    for number, one in enumerate(products):
        yield one
        part = (len(between) * turn // len(products) for turn in (number, number + 1))
        yield from between[slice(*part)]


def layer(
    config: Config, match: dt.Match, operands: Mapping[str, dt.Operand], folded: bool = False
) -> tuple[dt.Command, ...]:
    """A layer, requantised by one scale or with its sums as they are."""
    shape, scaled = shape_of(config, match), match.has("requantize")
    x, y = image_of(match.type("x"), operands[match.values["x"]]), image_of(match.result, operands["result"])
    if folded and (fold := fold_of(config, match)):
        shape = fold.shape
        x = layers.Image(x.address, *shape.x, x.row, x.pixel * fold.operands)
        y = layers.Image(y.address, *shape.y, y.row, y.pixel * fold.results)
    relu = scaled and match.operator("clip", Clip).low == 0
    parts = [operands[name].address if name in operands else 0 for name in ("weights", "biases", "border")]
    launch = LayerLaunch(
        shape, x, y, parts[0], parts[1], scale_of(match) if scaled else 1.0, relu, parts[2], not scaled
    )
    return (dt.Command("gemmini", tuple(chain.from_iterable(launch.words()))),)


def busy(shape: LayerShape) -> int:
    """Cycles of what has most to do: the core, which issues products and moves, or the moves in."""
    (lines, columns, channels), dim = shape.x, shape.config.dim
    groups = shape.blocks if shape.apart else -(-channels // 64)
    moved = lines * -(-columns // dim) * groups + shape.blocks * -(-shape.weight_rows // dim)
    products = 0
    for band in shape.bands:
        taps = ROW_OF_TAPS + shape.window.kernel[1] * (TAP + -(-shape.inputs // dim) * band.walk.cycles(dim))
        products += STEP + shape.window.kernel[0] * taps
        moved += shape.blocks * (-(-band.rows // dim) + band.lines * -(-shape.y[1] // dim))
    sums = sum(band.rows for band in shape.bands) * shape.blocks
    loaded = lines * columns * -(-channels // 16) + sums * dim // 16 + shape.blocks * shape.weight_rows * -(-dim // 16)
    return max(products * shape.blocks + MOVE * moved, loaded)


ROW_OF_TAPS, TAP, STEP, MOVE = 60, 23, 60, 5
"""Cycles of the core for each of these, in the driver's loops."""


def cycles(config: Config, match: dt.Match, folded: bool = False) -> int:
    """Cycles of a launch."""
    fold = fold_of(config, match) if folded else None
    return busy(fold.shape if fold else shape_of(config, match)) + STARTED


STARTED = 300
"""Cycles of a launch before its first product and behind its last."""


def mean(config: Config, match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """The mean of an image: its pixels are added up on their way into the accumulator."""
    x, dim, most = image_of(match.type("x"), operands[match.values["x"]]), config.dim, max(64, config.dim)
    words = [array_setting(1, 1), way_in(MVIN2, 0), FENCE, way_in(MVIN3, 0, dim, shrunk=True)]
    words.append(way_out(0, scale_of(match), match.operator("clip", Clip).low == 0))
    for start, groups, count in cut(x.channels, most):
        group = MoveLoop(groups, most, most // dim * dim)
        place = local(SUMS | start // dim * dim, 1, count)
        words.append(moves(MVIN3, 0, place, (MoveLoop(groups, 0, most // dim * dim),)))
        words.append(
            moves(
                MVIN3,
                x.address + start,
                place | 1 << 30,
                (MoveLoop(x.rows, x.row, 0), MoveLoop(x.columns, x.pixel, 0), group),
            )
        )
        words.append(moves(MVOUT, operands["result"].address + start, place | 1 << 30, (group,)))
    return (dt.Command("gemmini", tuple(chain.from_iterable(words))),)


def mean_cycles(config: Config, match: dt.Match) -> int:
    """A move for each pixel and 64 channels, in which a block of channels takes a cycle."""
    lines, columns, channels = layers.sizes_of(match.type("x").shape)
    most = max(64, config.dim)
    return lines * columns * -(-channels // most) * max(min(channels, most) // config.dim, 8) + STARTED
