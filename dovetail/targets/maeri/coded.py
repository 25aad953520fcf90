"""A programming image as bytes, little-endian words of 32 bits; a file that is read is checked.

Words: "MAER", the format, how many words there are, the CRC-32 of those behind this one; `_Header`; inputs, outputs,
steps, words of Layer_Info of each layer, words of RN_Config of each configuration, phases (first cycle, configuration),
items, constants. A record is its fields in the order they stand in `steps.py` and `order.py`, as `words.py` says; a
step has the number of its kind in `STEPS` before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from dovetail.errors import ModelError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import TaskKind
from dovetail.targets.maeri.order import Item
from dovetail.targets.maeri.rtl import tree_size
from dovetail.targets.maeri.steps import (
    INT8,
    INT16,
    STEPS,
    AdditionStep,
    FeatureMap,
    JoinStep,
    LayerStep,
    NumberFormat,
    PoolKind,
    PoolStep,
    ProgrammingImage,
    SoftmaxStep,
    Step,
    operands,
)
from dovetail.targets.maeri.tile import grid
from dovetail.targets.maeri.words import WordReader, words_of

MAGIC = int.from_bytes(b"MAER", "little")
FORMAT = 1
MOST_BYTES = 1 << 28
"""Of a file, and of the memory it speaks of."""
MOST_MULTIPLIERS = 1 << 14
MOST_PRODUCTS = 1 << 33
"""Of a layer."""
INFO_WORDS = 14
"""Of Layer_Info: two for each of K, C, R, S, Y and X; multipliers and virtual neurons; products of one of these."""
_HEAD = 4
_MOST_SIZE = 0xFFFF


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
        _check_step(image, step, f"step {number}")
    for place in (*image.inputs, *image.outputs):
        _check_place(image, place, "inputs and outputs")
    if len(image.infos) != len(image.layers):
        raise _wrong(f"{len(image.layers)} layers have {len(image.infos)} Layer_Info")
    starts = [start for start, _ in image.phases]
    if any(tree >= len(image.trees) for _, tree in image.phases) or starts != sorted(set(starts)):
        raise _wrong("its phases are not in order, or one has no configuration")
    for number, item in enumerate(image.items):
        _check_item(image, item, f"item {number}")


def _check_step(image: ProgrammingImage, step: Step, where: str) -> None:
    match step:
        case LayerStep():
            _check_layer(image, step, where)
        case AdditionStep():
            _check_constants(image, step.scales, 24, 4, where)
        case PoolStep():
            sizes, around = astuple(step)[3:7], astuple(step)[7:11]
            if not all(1 <= size <= _MOST_SIZE for size in sizes) or not all(0 <= size <= 255 for size in around):
                raise _wrong(f"a window of {sizes} with {around} around is none", where)
            if step.kind == PoolKind.SUM:
                _check_constants(image, step.scales, 8, 4, where)
        case JoinStep():
            if step.axis not in (0, 1, 2) or not step.parts:
                raise _wrong(f"{len(step.parts)} parts cannot be joined along {step.axis}", where)
        case SoftmaxStep():
            if not 0 <= step.shift <= 31 or step.multiplier < 0 or step.diff_min > 0:
                raise _wrong("a softmax has other parameters", where)


def _check_place(image: ProgrammingImage, place: FeatureMap, where: str) -> None:
    sizes, element = place.shape[1:], image.form.element
    fits = all(1 <= size <= _MOST_SIZE for size in sizes) and -128 <= place.zero_point <= 127
    inside = len(image.constants) <= place.address and image.bytes_of(place).stop <= image.memory
    if not fits or not inside or place.address % element:
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
    result = (1, 1) if step.kind == TaskKind.TURNED else (layer.out_rows, layer.out_columns)
    if result != (step.result.rows, step.result.columns):
        raise _wrong(f"its result is {result}, its place is for {(step.result.rows, step.result.columns)}", where)
    weights = image.form.element * int(np.prod(step.kind.weight_shape(layer)))
    _check_constants(image, step.weights, weights, image.form.element, where)
    _check_constants(image, step.bias, 4 * channels, 4, where)
    _check_constants(image, step.scales, 8 * channels, 4, where)


def _check_constants(image: ProgrammingImage, start: int, size: int, unit: int, where: str) -> None:
    if start % unit or not 0 <= start <= start + size <= len(image.constants):
        raise _wrong(f"{size} bytes at {start:#x} are not all constants, or not at a multiple of {unit}", where)


def _check_item(image: ProgrammingImage, item: Item, where: str) -> None:
    step = image.steps[item.work] if 0 <= item.work < len(image.steps) else None
    if not isinstance(step, LayerStep):
        raise _wrong(f"step {item.work} is no layer", where)
    layer, tile = step.layer, item.tile
    sizes = astuple(tile)[:7]
    if min(sizes) < 1 or tile.size * tile.neurons > item.place.size or item.place.end > image.config.multipliers:
        raise _wrong(f"the tile {sizes} is not on {image.config.multipliers} multipliers", where)
    if not 0 <= item.taps[0] < item.taps[1] <= layer.taps:
        raise _wrong(f"products {list(item.taps)} of {layer.taps}", where)
    (rows, columns), filters = grid(layer, tile), layer.filters * layer.groups
    for part in item.segments:
        if not 0 <= part.channel < filters or part.first < 0 or not 1 <= part.count <= rows * columns - part.first:
            raise _wrong(f"{part} is not of {filters} channels of {rows * columns} positions", where)
