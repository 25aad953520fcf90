"""A programming image: addresses, steps, and the order of the multipliers; as records and as bytes, which are checked.

One memory of bytes from 0 on: constants, then features. A feature is a dense image, rows first, channels last. An image
for INT8 holds a network's numbers as they are. An image for INT16, the type of the public RTL, holds the same network:
its multipliers know no zero points, so these are taken off stored elements; and they keep bits 31 and 26 to 12 of a
product (maeri-project/MAERI_bsv@1351d1b src/ALUs/INT16_Multiplier.bsv), so features are raised by 4 bits and weights by
8: the bits that are kept are then the product itself.

A file is little-endian words of 32 bits: "MAER", the format, how many words there are, the CRC-32 of those behind this
one; `_Header`; inputs, outputs, steps, words of Layer_Info of each layer, words of RN_Config of each configuration,
phases (first cycle, configuration), items, constants. Records are those of this file and of `order.py`, in the words of
`words.py`; a step has the number of its kind in `STEPS` before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import numpy as np
from msgspec import Meta

from dovetail.errors import ModelError
from dovetail.ir.types import Array, DType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer, TaskKind
from dovetail.targets.maeri.outputs import tree_size
from dovetail.targets.maeri.tile import Item, grid
from dovetail.targets.maeri.words import Byte, Natural, Sides, Size, StageLimits, WordReader, words_of


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Form of numbers in memory."""

    element: int
    """Bytes of a feature's element, and of a weight."""
    feature_shift: int
    """Bits that features are raised by."""
    weight_shift: int
    """Bits that weights are raised by."""


INT8 = NumberFormat(1, 0, 0)
INT16 = NumberFormat(2, 4, 8)
FORMS = {"int8": INT8, "int16": INT16}
"""By the names of their files."""


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """A feature in memory; a vector is an image of one pixel, a matrix an image of one column."""

    address: int
    """Address of the first byte."""
    rows: Size
    columns: Size
    channels: Size
    zero_point: Byte
    """Taken off every element that is stored."""

    @property
    def elements(self) -> int:
        """Elements of the whole image."""
        return self.rows * self.columns * self.channels

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As a value of a graph."""
        return 1, self.rows, self.columns, self.channels


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A layer on the multipliers, and the stage behind them."""

    kind: TaskKind
    source: FeatureMap
    result: FeatureMap
    around: Sides
    """Padding of the source with the zero point."""
    rows: Size
    """Rows of the kernel."""
    columns: Size
    strides: tuple[Size, Size]
    """Rows and columns from one window to the next."""
    dilations: tuple[Size, Size]
    """Rows and columns from one tap to the next."""
    groups: Size
    zero_point: Byte
    """The number that stands for 0.0 in the network's operand; stored it is less by the source's zero point."""
    weights: int
    """Address of the weights."""
    bias: int
    """Address of an int32 for each channel, added to its sums."""
    scales: int
    """Address of two int32 for each channel: multiplier, shift."""
    limits: StageLimits
    sum_bits: int
    """Bits of an adder that holds every sum of these weights, whatever the features are."""

    @property
    def layer(self) -> OrderLayer:
        """Its sizes, as the multipliers see them."""
        source, result, around = self.source, self.result, self.around
        if self.kind == TaskKind.TURNED:
            return OrderLayer(1, 1, source.channels, 1, result.channels, 1)
        sizes = (source.rows + around.top + around.bottom, source.columns + around.left + around.right)
        channels, filters = source.channels // self.groups, result.channels // self.groups
        steps = (*self.strides, *self.dilations)
        return OrderLayer(self.rows, self.columns, channels, filters, *sizes, self.groups, *steps)


def bits_of_sums(weights: Array, kind: TaskKind, zero_point: int) -> int:
    """Bits, sign included, that hold every sum of a layer of int8, and every part of one; weights as they lie."""
    by_filter = np.moveaxis(weights[0], -1, 0) if kind is TaskKind.DEPTHWISE else weights
    rows = by_filter.reshape(len(by_filter), -1).astype(np.int64)
    ends = [rows * (end - zero_point) for end in (DType.INT8.low, DType.INT8.high)]
    most = np.maximum(*ends).clip(0).sum(axis=1).max()
    least = np.minimum(*ends).clip(None, 0).sum(axis=1).min()
    return max(int(most).bit_length(), int(-least - 1).bit_length()) + 1


@dataclass(frozen=True, slots=True)
class AdditionStep:
    """Two images of one size added: each brought to one scale, raised by 20 bits; then the sum to the result's."""

    source: FeatureMap
    other: FeatureMap
    result: FeatureMap
    zero_point: Byte
    other_zero_point: Byte
    scales: int
    """Address of int32 pairs, multiplier and shift: of the sum, of the source, of the other."""
    limits: StageLimits


class PoolKind(IntEnum):
    """The value that a pool makes of a window."""

    LARGEST = 0
    MEAN = 1
    """Rounded half away from zero."""
    SUM = 2
    """Elements less their zero point, scaled as sums of a layer; with a window of one element, a change of scale."""


@dataclass(frozen=True, slots=True)
class PoolStep:
    """Each window's real elements as one."""

    kind: PoolKind
    source: FeatureMap
    result: FeatureMap
    rows: Size
    """Rows of the window."""
    columns: Size
    row_stride: Size
    column_stride: Size
    around: Sides
    """Rows and columns beyond the source that a window may reach."""
    zero_point: Byte
    """Taken off every element of a sum; 0 otherwise."""
    scales: int
    """Address of a sum's multiplier and shift; 0 otherwise."""
    limits: StageLimits
    """The zero point is added to a sum; 0 otherwise."""


@dataclass(frozen=True, slots=True)
class JoinStep:
    """Images one behind the other."""

    axis: Annotated[int, Meta(ge=0, lt=3)]
    """Along rows, columns or channels."""
    parts: tuple[FeatureMap, ...]
    result: FeatureMap


@dataclass(frozen=True, slots=True)
class SliceStep:
    """A part of an image: every so many rows, columns and channels, from a first one on."""

    source: FeatureMap
    result: FeatureMap
    first: tuple[Natural, Natural, Natural]
    """Row, column and channel."""
    steps: tuple[Size, Size, Size]
    """Rows, columns and channels from one element to the next."""


@dataclass(frozen=True, slots=True)
class SoftmaxStep:
    """Softmax over the channels, in TensorFlow Lite Micro's fixed point (`FixedSoftmax`); for the host."""

    source: FeatureMap
    result: FeatureMap
    multiplier: Natural
    shift: Annotated[int, Meta(ge=0, lt=32)]
    diff_min: Annotated[int, Meta(ge=-(1 << 31), lt=1)]


Step = LayerStep | AdditionStep | PoolStep | SoftmaxStep | JoinStep | SliceStep
STEPS: tuple[type[Step], ...] = (LayerStep, AdditionStep, PoolStep, SoftmaxStep, JoinStep, SliceStep)
"""By the number that stands before a step in the file."""


def operands(step: Step) -> tuple[FeatureMap, ...]:
    """The features that a step reads."""
    if isinstance(step, JoinStep):
        return step.parts
    return (step.source, step.other) if isinstance(step, AdditionStep) else (step.source,)


@dataclass(frozen=True)
class ProgrammingImage:
    """A programming image."""

    config: MaeriConfig
    form: NumberFormat
    makespan: int
    """Cycles of the order."""
    memory: int
    """Bytes, constants included."""
    inputs: tuple[FeatureMap, ...]
    """The network's, in its order."""
    outputs: tuple[FeatureMap, ...]
    steps: tuple[Step, ...]
    """Each after those it reads."""
    infos: tuple[tuple[int, ...], ...]
    """Words of Layer_Info for each layer, in the order of steps."""
    trees: tuple[tuple[int, ...], ...]
    """Words of RN_Config for each configuration of the reduction tree."""
    phases: tuple[tuple[int, int], ...]
    """(first cycle, number of the configuration)."""
    items: tuple[Item, ...]
    """The order of the multipliers; `work` is the number of the step."""
    constants: bytes
    """The first bytes of the memory."""

    @property
    def layers(self) -> list[int]:
        """Numbers of the steps that are layers."""
        return [number for number, step in enumerate(self.steps) if isinstance(step, LayerStep)]

    def bytes_of(self, place: FeatureMap) -> range:
        """The addresses of a feature."""
        return range(place.address, place.address + self.form.element * place.elements)

    def numbers(self, address: int, shape: tuple[int, ...], kind: str = "<i4") -> Array:
        """Constants."""
        return np.frombuffer(self.constants, kind, int(np.prod(shape)), address).reshape(shape)


MAGIC = int.from_bytes(b"MAER", "little")
FORMAT = 2
MOST_BYTES = 1 << 28
"""Bytes of a file, and of the memory it describes."""
MOST_MULTIPLIERS = 1 << 14
MOST_PRODUCTS = 1 << 33
"""Products of a layer."""
INFO_WORDS = 14
"""Words of Layer_Info: two for each of K, C, R, S, Y and X; multipliers and virtual neurons; products of one."""
_HEAD = 4


@dataclass(frozen=True, slots=True)
class _Header:
    """The record before the lists."""

    config: MaeriConfig
    form: NumberFormat
    makespan: int
    memory: int
    inputs: int
    outputs: int
    steps: int
    infos: int
    trees: int
    phases: int
    items: int
    constants: int
    """Bytes."""


def write_image(image: ProgrammingImage) -> bytes:
    """An image as a file."""
    constants = image.constants + bytes(-len(image.constants) % 4)
    body = np.fromiter(_words(image), "<u4").tobytes() + constants
    head = (MAGIC, FORMAT, _HEAD + len(body) // 4, zlib.crc32(body))
    return np.array(head, "<u4").tobytes() + body


def _words(image: ProgrammingImage) -> Iterator[int]:
    """The words of an image, without head and constants."""
    lists = (image.inputs, image.outputs, image.steps, image.infos, image.trees, image.phases, image.items)
    counts = (*map(len, lists), len(image.constants))
    yield from words_of(_Header(image.config, image.form, image.makespan, image.memory, *counts))
    for place in (*image.inputs, *image.outputs):
        yield from words_of(place)
    for step in image.steps:
        yield STEPS.index(type(step))
        yield from words_of(step)
    for words in (*image.infos, *image.trees, *image.phases):
        yield from words
    for item in image.items:
        yield from words_of(item)


def _wrong(what: str, where: str = "programming image") -> ModelError:
    return ModelError(what, where=where, hint="write the image again with dovetail schedule")


def read_image(data: bytes) -> ProgrammingImage:
    """Read a file back.

    Raises:
        ModelError: it is no programming image, is damaged, or says something that cannot be.
    """
    if len(data) % 4 or not 4 * _HEAD <= len(data) <= MOST_BYTES:
        raise _wrong(f"a file of {len(data)} bytes is no programming image")
    words: list[int] = np.frombuffer(data, "<u4").tolist()
    magic, version, count, check = words[:_HEAD]
    if magic != MAGIC or version != FORMAT:
        raise _wrong(f"it begins with {magic:#x} and format {version}, not with {MAGIC:#x} and format {FORMAT}")
    if count != len(words) or check != zlib.crc32(data[4 * _HEAD :]):
        raise _wrong(f"it is damaged: {count} words with the check {check:#x} were written")
    reader = WordReader(words[_HEAD:], _wrong)
    head = reader.record(_Header)
    if head.config.multipliers > MOST_MULTIPLIERS or head.form not in (INT8, INT16):
        raise _wrong(f"{head.config.multipliers} multipliers and {head.form} are not what an image may be for")

    def feature() -> FeatureMap:
        return reader.record(FeatureMap)

    def step() -> Step:
        (kind,) = reader.take(1)
        if kind >= len(STEPS):
            raise _wrong(f"there is no step of kind {kind}")
        return reader.record(STEPS[kind])

    image = ProgrammingImage(
        head.config,
        head.form,
        head.makespan,
        head.memory,
        inputs=reader.many(head.inputs, feature),
        outputs=reader.many(head.outputs, feature),
        steps=reader.many(head.steps, step),
        infos=reader.many(head.infos, lambda: reader.take(INFO_WORDS)),
        trees=reader.many(head.trees, lambda: reader.take(tree_size(head.config))),
        phases=reader.many(head.phases, lambda: (reader.take(1)[0], reader.take(1)[0])),
        items=reader.many(head.items, lambda: reader.record(Item)),
        constants=data[4 * (_HEAD + reader.at) :][: max(head.constants, 0)],
    )
    if not 0 <= head.constants <= 4 * reader.left < head.constants + 4:
        raise _wrong(f"{4 * reader.left} bytes are left, {head.constants} of them should be constants")
    _check(image)
    return image


def _check(image: ProgrammingImage) -> None:
    """Nothing lies outside of the memory, and numbers that point to something do."""
    if not len(image.constants) <= image.memory <= MOST_BYTES:
        raise _wrong(f"a memory of {image.memory} bytes, {len(image.constants)} of them constants")
    for number, step in enumerate(image.steps):
        for place in (*operands(step), step.result):
            _check_place(image, place, f"step {number}")
        if isinstance(step, LayerStep) and step.layer.macs > MOST_PRODUCTS:
            raise _wrong(f"{step.layer.macs:,} products of a layer, {MOST_PRODUCTS:,} are the most", f"step {number}")
    for place in (*image.inputs, *image.outputs):
        _check_place(image, place, "inputs and outputs")
    if len(image.infos) != len(image.layers):
        raise _wrong(f"{len(image.layers)} layers have {len(image.infos)} Layer_Info")
    starts = [start for start, _ in image.phases]
    if any(tree >= len(image.trees) for _, tree in image.phases) or starts != sorted(set(starts)):
        raise _wrong("its phases are not in order, or one has no configuration")
    for number, item in enumerate(image.items):
        _check_item(image, item, f"item {number}")


def _check_place(image: ProgrammingImage, place: FeatureMap, where: str) -> None:
    inside = len(image.constants) <= place.address and image.bytes_of(place).stop <= image.memory
    if not inside or place.address % image.form.element:
        raise _wrong(f"a feature of {place.shape[1:]} at {place.address:#x} is not in the memory of features", where)
    if image.form == INT8 and place.zero_point:
        raise _wrong(f"features of INT8 are stored with their zero point, here {place.zero_point} is taken off", where)


def _check_item(image: ProgrammingImage, item: Item, where: str) -> None:
    step = image.steps[item.work] if item.work < len(image.steps) else None
    if not isinstance(step, LayerStep):
        raise _wrong(f"step {item.work} is no layer", where)
    layer, tile = step.layer, item.tile
    if tile.size * tile.neurons > item.place.size or item.place.end > image.config.multipliers:
        raise _wrong(f"{tile} is not on {image.config.multipliers} multipliers", where)
    if not item.taps[0] < item.taps[1] <= layer.taps:
        raise _wrong(f"products {list(item.taps)} of {layer.taps}", where)
    (rows, columns), filters = grid(layer, tile), layer.filters * layer.groups
    for part in item.segments:
        if part.channel >= filters or part.first + part.count > rows * columns:
            raise _wrong(f"{part} is not of {filters} channels of {rows * columns} positions", where)
