"""A programming image as bytes, little-endian words of 32 bits; reading takes nothing on trust.

Words: "MAER", the format, how many words there are, the CRC-32 of those behind this one; `_Header`; inputs, outputs,
steps, words of Layer_Info of each layer, words of RN_Config of each configuration, phases (first cycle, configuration),
items, constants. A record is its fields in the order they stand in `steps.py`, a list within it how many and these; a
step has the number of its kind in `STEPS` before it; an item is step, first cycle, first multiplier, multipliers, tile,
first product, one past the last, how many segments, and these.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from dovetail.errors import ModelError
from dovetail.targets.maeri.tile import MultiplierTile
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer, TaskKind
from dovetail.targets.maeri.order import ChannelSegment, Item
from dovetail.targets.maeri.steps import INT8, INT16, STEPS, AdditionStep, FeatureMap, JoinStep, LayerStep, NumberFormat, PoolKind, PoolStep, ProgrammingImage, Step, operands
from dovetail.targets.maeri.tree import Range

MAGIC = int.from_bytes(b"MAER", "little")
FORMAT = 1
MOST_BYTES = 1 << 28
"""Of a file, and of the memory it speaks of."""
MOST_MULTIPLIERS = 1 << 14
MOST_PRODUCTS = 1 << 33
"""Of a layer."""
INFO_WORDS = 14
"""Of Layer_Info: two for each of K, C, R, S, Y and X; multipliers and virtual neurons; products of one of these."""
_MASK = 0xFFFFFFFF
_HEAD = 4
_MOST_SIZE = 0xFFFF
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Header:
    """What stands before the lists."""

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


def tree_size(config: MaeriConfig) -> int:
    """Words of a configuration of the reduction tree."""
    single = 2 * config.levels - 1
    return -(-(config.multipliers - 1 - single) // 2 // 4) + -(-single // 8)


def write_image(image: ProgrammingImage) -> bytes:
    """An image as a file."""
    counts = (len(image.inputs), len(image.outputs), len(image.steps), len(image.infos))
    lists = (*counts, len(image.trees), len(image.phases), len(image.items), len(image.constants))
    words = [*_flat(_Header(image.config, image.form, image.makespan, image.memory, *lists))]
    for place in (*image.inputs, *image.outputs):
        words += _flat(place)
    for step in image.steps:
        words += [STEPS.index(type(step)), *_flat(step)]
    for each in (*image.infos, *image.trees, *image.phases):
        words += each
    for item in image.items:
        words += [item.work, item.start, item.place.start, item.place.size, *_flat(item.tile), *item.taps]
        words += [len(item.segments), *(number for part in item.segments for number in astuple(part))]
    constants = image.constants + bytes(-len(image.constants) % 4)
    body = np.array([word & _MASK for word in words], "<u4").tobytes() + constants
    head = (MAGIC, FORMAT, _HEAD + len(body) // 4, zlib.crc32(body))
    return np.array(head, "<u4").tobytes() + body


def _flat(record: Any) -> Iterator[int]:
    """The numbers of a record, those of records within it included."""
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from _flat(value)
        elif isinstance(value, tuple):
            yield len(value)
            for each in value:
                yield from _flat(each)
        else:
            yield int(value)


def _wrong(what: str, where: str = "programming image") -> ModelError:
    return ModelError(what, where=where, hint="write the image again with dovetail schedule")


class _Words:
    """Words of a file, taken one after the other."""

    def __init__(self, words: Sequence[int]) -> None:
        self.words, self.at = words, 0

    def take(self, count: int) -> tuple[int, ...]:
        """So many words, without a sign."""
        if count > len(self.words) - self.at:
            raise _wrong(f"{count} words are wanted, {len(self.words) - self.at} are left")
        self.at += count
        return tuple(self.words[self.at - count : self.at])

    def record(self, kind: type[T]) -> T:
        """A record of numbers and records."""
        hints, values = get_type_hints(kind), list[Any]()
        for field in fields(cast(Any, kind)):
            of = hints[field.name]
            if get_origin(of) is tuple:
                (count,), each = self.take(1), get_args(of)[0]
                values.append(self.many(count, partial(self.record, each)))
                continue
            if is_dataclass(of):
                values.append(self.record(cast(Any, of)))
                continue
            (word,) = self.take(1)
            number = word - (word >> 31 << 32)
            if (of is bool and number not in (0, 1)) or (issubclass(of, IntEnum) and number not in set(of)):
                raise _wrong(f"{kind.__name__} has {number} as its {field.name}")
            values.append(of(number))
        return kind(*values)

    def many(self, count: int, one: Callable[[], T]) -> tuple[T, ...]:
        """So many of something; each takes a word at least."""
        if not 0 <= count <= len(self.words) - self.at:
            raise _wrong(f"a list of {count} is longer than the file")
        return tuple(one() for _ in range(count))

    def step(self) -> Step:
        """A step of any kind."""
        (kind,) = self.take(1)
        if kind >= len(STEPS):
            raise _wrong(f"there is no step of kind {kind}")
        return self.record(STEPS[kind])

    def item(self) -> Item:
        """An item of the order."""
        step, start, first, size = self.take(4)
        tile, (low, high, count) = self.record(MultiplierTile), self.take(3)
        segments = self.many(count, lambda: ChannelSegment(*self.take(3)))
        return Item(step, tile, Range(first, size), start, segments, (low, high))


def read_image(data: bytes) -> ProgrammingImage:
    """Read a file back.

    Raises:
        ModelError: it is none, is damaged, or says something that cannot be.
    """
    if len(data) % 4 or not 4 * _HEAD <= len(data) <= MOST_BYTES:
        raise _wrong(f"a file of {len(data)} bytes is no programming image")
    words: list[int] = np.frombuffer(data, "<u4").tolist()
    magic, version, count, check = words[:_HEAD]
    if magic != MAGIC or version != FORMAT:
        raise _wrong(f"it begins with {magic:#x} and format {version}, not with {MAGIC:#x} and format {FORMAT}")
    if count != len(words) or check != zlib.crc32(data[4 * _HEAD :]):
        raise _wrong(f"it is damaged: {count} words with the check {check:#x} were written")
    stream = _Words(words[_HEAD:])
    head = stream.record(_Header)
    if head.config.multipliers > MOST_MULTIPLIERS or head.form not in (INT8, INT16):
        raise _wrong(f"{head.config.multipliers} multipliers and {head.form} are not what an image may be for")

    def place() -> FeatureMap:
        return stream.record(FeatureMap)

    inputs, outputs = stream.many(head.inputs, place), stream.many(head.outputs, place)
    steps = stream.many(head.steps, stream.step)
    infos = stream.many(head.infos, lambda: stream.take(INFO_WORDS))
    trees = stream.many(head.trees, lambda: stream.take(tree_size(head.config)))
    phases = stream.many(head.phases, lambda: (stream.take(1)[0], stream.take(1)[0]))
    items = stream.many(head.items, stream.item)
    left = data[4 * (_HEAD + stream.at) :]
    if not 0 <= head.constants <= len(left) < head.constants + 4:
        raise _wrong(f"{len(left)} bytes are left, {head.constants} of them should be constants")
    given = (head.config, head.form, head.makespan, head.memory, inputs, outputs, steps, infos, trees, phases, items)
    image = ProgrammingImage(*given, left[: head.constants])
    _check(image)
    return image


def _check(image: ProgrammingImage) -> None:
    """Nothing lies outside of the memory, and numbers that point to something do."""
    if not len(image.constants) <= image.memory <= MOST_BYTES:
        raise _wrong(f"a memory of {image.memory} bytes, {len(image.constants)} of them constants")
    for number, step in enumerate(image.steps):
        where = f"step {number}"
        for place in (*operands(step), step.result):
            _check_place(image, place, where)
        if isinstance(step, LayerStep):
            _check_layer(image, step, where)
        elif isinstance(step, AdditionStep):
            _check_constants(image, step.scales, 24, 4, where)
        elif isinstance(step, PoolStep):
            sizes, around = astuple(step)[3:7], astuple(step)[7:11]
            if not all(1 <= size <= _MOST_SIZE for size in sizes) or not all(0 <= size <= 255 for size in around):
                raise _wrong(f"a window of {sizes} with {around} around is none", where)
            if step.kind == PoolKind.SUM:
                _check_constants(image, step.scales, 8, 4, where)
        elif isinstance(step, JoinStep):
            if step.axis not in (0, 1, 2) or not step.parts:
                raise _wrong(f"{len(step.parts)} parts cannot be joined along {step.axis}", where)
        elif not 0 <= step.shift <= 31 or step.multiplier < 0 or step.diff_min > 0:
            raise _wrong("a softmax has other parameters", where)
    for place in (*image.inputs, *image.outputs):
        _check_place(image, place, "inputs and outputs")
    layers = [number for number, step in enumerate(image.steps) if isinstance(step, LayerStep)]
    if len(image.infos) != len(layers):
        raise _wrong(f"{len(layers)} layers have {len(image.infos)} Layer_Info")
    starts = [start for start, _ in image.phases]
    if any(tree >= len(image.trees) for _, tree in image.phases) or starts != sorted(set(starts)):
        raise _wrong("its phases are not in order, or one has no configuration")
    for number, item in enumerate(image.items):
        _check_item(image, item, f"item {number}")


def _check_place(image: ProgrammingImage, place: FeatureMap, where: str) -> None:
    sizes, element = (place.rows, place.columns, place.channels), image.form.element
    fits = all(1 <= size <= _MOST_SIZE for size in sizes) and -128 <= place.zero_point <= 127
    end = place.address + element * place.elements
    if not fits or not len(image.constants) <= place.address <= end <= image.memory or place.address % element:
        raise _wrong(f"a feature of {sizes} at {place.address:#x} is not in the memory of features", where)
    if image.form == INT8 and place.zero_point:
        raise _wrong(f"features of INT8 are stored with their zero point, here {place.zero_point} is taken off", where)


def _check_layer(image: ProgrammingImage, step: LayerStep, where: str) -> None:
    around = (step.top, step.left, step.bottom, step.right)
    sizes = (step.rows, step.columns, step.stride, step.groups)
    if not all(0 <= size <= 255 for size in around) or not all(1 <= size <= _MOST_SIZE for size in sizes):
        raise _wrong(f"sizes {sizes} and padding {around} are not those of a layer", where)
    layer, channels = step.layer, step.result.channels
    uneven = step.source.channels % step.groups or channels % step.groups
    if uneven or min(layer.out_rows, layer.out_columns) < 1 or layer.macs > MOST_PRODUCTS:
        raise _wrong(f"{step.groups} groups of windows {sizes[:2]} do not divide what it reads", where)
    plain = (step.source.elements, *sizes, sum(around)) == (step.source.channels, 1, 1, 1, 1, 0)
    fits = {TaskKind.DEPTHWISE: step.groups == step.source.channels, TaskKind.TURNED: plain}
    if not fits.get(step.kind, True):
        raise _wrong(f"{step.groups} groups of {step.source.channels} channels are no {step.kind.name}", where)
    found = (1, 1) if step.kind == TaskKind.TURNED else (layer.out_rows, layer.out_columns)
    if found != (step.result.rows, step.result.columns):
        raise _wrong(f"its result is {found}, its place is for {(step.result.rows, step.result.columns)}", where)
    weights = image.form.element * layer.taps * (layer.in_rows if step.kind == TaskKind.TURNED else channels)
    _check_constants(image, step.weights, weights, image.form.element, where)
    _check_constants(image, step.bias, 4 * channels, 4, where)
    _check_constants(image, step.scales, 8 * channels, 4, where)


def _check_constants(image: ProgrammingImage, start: int, size: int, unit: int, where: str) -> None:
    if start % unit or not 0 <= start <= start + size <= len(image.constants):
        raise _wrong(f"{size} bytes at {start:#x} are not all constants, or not at a multiple of {unit}", where)


def _check_item(image: ProgrammingImage, item: Item, where: str) -> None:
    step = image.steps[item.work] if item.work < len(image.steps) else None
    if not isinstance(step, LayerStep):
        raise _wrong(f"step {item.work} is no layer", where)
    layer, tile = step.layer, item.tile
    sizes = (tile.rows, tile.columns, tile.channels, tile.filters, tile.groups, tile.out_rows, tile.out_columns)
    if min(sizes) < 1 or tile.size * tile.neurons > item.place.size or item.place.end > image.config.multipliers:
        raise _wrong(f"the tile {sizes} is not on {image.config.multipliers} multipliers", where)
    if not 0 <= item.taps[0] < item.taps[1] <= layer.taps:
        raise _wrong(f"products {list(item.taps)} of {layer.taps}", where)
    count = -(-layer.out_rows // tile.out_rows) * -(-layer.out_columns // tile.out_columns)
    filters = layer.filters * layer.groups
    for part in item.segments:
        if part.channel >= filters or not 1 <= part.count <= count - part.first:
            raise _wrong(f"{part} is not of {filters} channels of {count} positions", where)


def described(words: Sequence[int], layer: OrderLayer, tiles: Iterable[MultiplierTile], multipliers: int) -> bool:
    """Whether every word of Layer_Info says what a layer is, and a tile that one of its items has: of each dimension
    size and tile, then what is left over and how many tiles fit; multipliers and virtual neurons; their products."""
    filters, positions = layer.filters * layer.groups, (layer.out_rows, layer.out_columns)
    whole = (filters, layer.channels, layer.rows, layer.columns, layer.in_rows, layer.in_columns)
    matrix = (filters, layer.taps, 1, 1, *positions)
    for tile in tiles:
        steps = (tile.filters * tile.groups, tile.channels, tile.rows, tile.columns, tile.out_rows, tile.out_columns)
        sizes = matrix if tile.flat else whole
        wanted = []
        for size, step, count in zip(sizes, steps, (*sizes[:4], *positions), strict=True):
            wanted += [(size, step), (count % step, count // step)]
        wanted += [(multipliers, tile.neurons), (0, tile.size)]
        if [(word >> 16, word & _MOST_SIZE) for word in words] == wanted:
            return True
    return False
