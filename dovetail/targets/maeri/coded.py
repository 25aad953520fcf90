"""A programming image: addresses, steps, and the order of the multipliers; as records and as bytes, which are checked.

One memory of bytes from 0 on: constants, then features. A feature is a dense image, rows first, channels last. An image
for INT8 holds a network's numbers as they are. An image for INT16, the type of the public RTL, holds the same network:
its multipliers know no zero points, so these are taken off stored elements; and they keep bits 31 and 26 to 12 of a
product (maeri-project/MAERI_bsv@1351d1b src/ALUs/INT16_Multiplier.bsv), so features are raised by 4 bits and weights by
8: the bits that are kept are then the product itself.

A file is little-endian words of 32 bits: "MAER", the format, how many words there are, the CRC-32 of those behind this
one; the fields of `ProgrammingImage` up to its phases; items (`words_of_items`); the bytes of the constants, and these.
Records are those of this file, of `tile.py` and of the operators, in the words of `words.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from math import prod
from typing import Any, cast

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Concat, Pad, Reshape, Slice
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.pattern import Apply, OperatorT, apply
from dovetail.ir.types import Array, DType
from dovetail.records import Record
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.tile import Item, MultiplierTile
from dovetail.targets.maeri.words import Address, Byte, Count, Natural, WordReader, WordTable, words_of

LAYER = apply(Linear)
"""The operator of a step that multipliers compute."""
StepOperator = (
    Conv2d
    | DepthwiseConv2d
    | FullyConnected
    | Pad
    | Requantize
    | Clip
    | Add
    | MaxPool2d
    | AveragePool2d
    | SumPool2d
    | Concat
    | Slice
    | FixedSoftmax
    | Reshape
)
"""Operators of a step, by the number that stands before them in the file. Each is computed as its class says."""


class NumberFormat(Enum):
    """Form of numbers in memory: bytes of an element, and bits that features and weights are raised by."""

    INT8 = 1, 0, 0
    INT16 = 2, 4, 8

    def __init__(self, element: int, feature_shift: int, weight_shift: int) -> None:
        self.element, self.feature_shift, self.weight_shift = element, feature_shift, weight_shift


INT8, INT16 = NumberFormat
FORMS = {"int8": INT8, "int16": INT16}
"""By the names of their files."""


class FeatureMap(Record):
    """A feature in memory."""

    address: Address
    """Address of the first byte."""
    shape: tuple[Count, ...]
    zero_point: Byte
    """Taken off every element that is stored."""

    @property
    def elements(self) -> int:
        """Elements of the whole feature."""
        return prod(self.shape)


class StepConstant(Record):
    """A constant of a step in memory."""

    address: Natural
    shape: tuple[Count, ...]
    is_weight: bool
    """Whether it has the elements of the form, raised by its shift; else int32."""


class StepNode(Record):
    """An operator of a step."""

    operator: StepOperator
    reads: tuple[Natural, ...]
    """Its operands, counted through the step's features, constants and the results of the nodes before."""


class Step(Record):
    """A feature that is computed from others, such as a layer with its padding, requantisation and limits."""

    reads: tuple[FeatureMap, ...]
    constants: tuple[StepConstant, ...]
    nodes: tuple[StepNode, ...]
    """Each behind those it reads; the last one's result is the step's."""
    result: FeatureMap
    sum_bits: Natural
    """Bits of an adder that holds every sum of a layer's weights, whatever the features are; 0 without a layer."""

    @property
    def layer(self) -> StepNode | None:
        """The node that multipliers compute."""
        return next((node for node in self.nodes if operators(LAYER, [node])), None)


def operators(part: Apply[OperatorT], nodes: Iterable[Node | StepNode]) -> list[OperatorT]:
    """The operators of a kind."""
    return [cast(OperatorT, node.operator) for node in nodes if part.fits(cast(Node, node))]


def bits_of_sums(weights: Array, layer: Linear) -> int:
    """Bits, sign included, that hold every sum of a layer of int8, and every part of one; weights as they lie."""
    rows = layer.filters(weights.astype(np.int64))
    ends = [rows * (end - layer.input_zero_point) for end in (DType.INT8.low, DType.INT8.high)]
    most = np.maximum(*ends).clip(0).sum(axis=1).max()
    least = np.minimum(*ends).clip(None, 0).sum(axis=1).min()
    return max(int(most).bit_length(), int(-least - 1).bit_length()) + 1


def weights_of(graph: Graph) -> list[str]:
    """The constants of a step's graph that multipliers hold."""
    layers = filter(LAYER.fits, graph.nodes)
    return [node.inputs[1] for node in layers if graph.is_constant(node.inputs[1])]


def kept_constants(memory: bytearray, graph: Graph, form: NumberFormat) -> dict[str, StepConstant]:
    """The constants of a step's graph, put behind those in a memory."""
    places, weights = dict[str, StepConstant](), weights_of(graph)
    for name, array in graph.constants.items():
        is_weight = name in weights
        stored = array.astype(f"<i{form.element}") << form.weight_shift if is_weight else array.astype("<i4")
        memory += bytes(-len(memory) % 4)
        places[name] = StepConstant(len(memory), array.shape, is_weight)
        memory += np.ascontiguousarray(stored).tobytes()
    return places


def step_of(graph: Graph, constants: Mapping[str, StepConstant], place: Callable[[str], FeatureMap]) -> Step:
    """A graph of one feature computed from others as a step, with the places of its constants and of features."""
    numbers, nodes = {name: number for number, name in enumerate((*graph.inputs, *graph.constants))}, list[StepNode]()
    for node in graph.nodes:
        nodes.append(StepNode(cast(StepOperator, node.operator), tuple(numbers[name] for name in node.inputs)))
        numbers[node.output] = len(numbers)
    weights = [graph.constants[name] for name in weights_of(graph)]
    bits = [bits_of_sums(*each) for each in zip(weights, operators(LAYER, nodes), strict=True)]
    own = tuple(constants[name] for name in graph.constants)
    return Step(tuple(map(place, graph.inputs)), own, tuple(nodes), place(graph.outputs[0]), max(bits, default=0))


def add_step(builder: GraphBuilder, step: Step, values: Sequence[str], where: str) -> str:
    """Add the operators of a step, which reads these features and constants, to a graph; the name of its result. Names
    of its values begin with `where`.

    Raises:
        ValueError: operators do not fit together, or a value is too large.
        IndexError: a node reads what is not there.
    """
    values = list(values)
    for node in step.nodes:
        name = f"{where} {node.operator.class_name}"
        values.append(builder.add(node.operator, [values[number] for number in node.reads], name))
        if (count := builder.type_of(values[-1]).elements) > MOST_ELEMENTS:
            raise ValueError(f"a value of {where} has {count:,} elements, {MOST_ELEMENTS:,} are the most")
    return values[-1]


class ProgrammingImage(Record):
    """A programming image."""

    config: MaeriConfig
    form: NumberFormat
    makespan: Natural
    """Cycles of the order."""
    memory: Natural
    """Bytes, constants included."""
    inputs: tuple[FeatureMap, ...]
    """The network's, in its order."""
    outputs: tuple[FeatureMap, ...]
    steps: tuple[Step, ...]
    """Each after those it reads."""
    infos: WordTable
    """Words of Layer_Info for each layer, in the order of steps."""
    trees: WordTable
    """Words of RN_Config for each configuration of the reduction tree."""
    phases: tuple[tuple[Natural, Natural], ...]
    """(first cycle, number of the configuration)."""
    items: tuple[Item, ...]
    """The order of the multipliers; `work` is the number of the step."""
    constants: bytes
    """The first bytes of the memory."""

    @property
    def layers(self) -> list[int]:
        """Numbers of the steps that are layers."""
        return [number for number, step in enumerate(self.steps) if step.layer]

    def bytes_of(self, place: FeatureMap) -> range:
        """The addresses of a feature."""
        return range(place.address, place.address + self.form.element * place.elements)

    def numbers(self, constant: StepConstant) -> Array:
        """A constant as it is stored."""
        kind = f"<i{self.form.element if constant.is_weight else 4}"
        return np.frombuffer(self.constants, kind, prod(constant.shape), constant.address).reshape(constant.shape)


MAGIC = int.from_bytes(b"MAER", "little")
FORMAT = 4
MOST_BYTES = 1 << 28
"""Bytes of a file, and of the memory it describes."""
MOST_MULTIPLIERS = 1 << 14
MOST_ELEMENTS = 1 << 26
"""Elements of a value."""
_HEAD = 4


def write_image(image: ProgrammingImage) -> bytes:
    """An image as a file."""
    words = (*words_of(image, "items", "constants"), *words_of_items(image.items), len(image.constants))
    body = np.array(words, "<u4").tobytes() + image.constants + bytes(-len(image.constants) % 4)
    head = (MAGIC, FORMAT, _HEAD + len(body) // 4, zlib.crc32(body))
    return np.array(head, "<u4").tobytes() + body


def words_of_items(items: Sequence[Item], *left_out: str) -> Iterator[int]:
    """The words of items, without the fields that are left out: how many shapes (tile, products) there are and these;
    how many items and these, each behind the number of its shape."""
    shapes = list(dict.fromkeys((item.tile, item.taps) for item in items))
    yield len(shapes)
    for tile, taps in shapes:
        yield from (*words_of(tile), *taps)
    yield len(items)
    for item in items:
        yield from (shapes.index((item.tile, item.taps)), *words_of(item, "tile", "taps", *left_out))


def items_of(reader: WordReader, **given: int) -> tuple[Item, ...]:
    """The next items; fields whose values are given have no words."""

    def shape() -> dict[str, Any]:
        return {"tile": reader.record(MultiplierTile), "taps": reader.take(2)}

    def item() -> Item:
        (number,) = reader.take(1)
        if number >= len(shapes):
            raise reader.wrong(f"there is no shape {number} of items")
        return reader.record(Item, **shapes[number], **given)

    shapes = reader.many(reader.take(1)[0], shape)
    return reader.many(reader.take(1)[0], item)


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
    image = reader.record(ProgrammingImage, items=(), constants=b"")
    items, (count,) = items_of(reader), reader.take(1)
    if not count <= 4 * reader.left < count + 4:
        raise _wrong(f"{4 * reader.left} bytes are left, {count} of them should be constants")
    image = replace(image, items=items, constants=data[4 * (_HEAD + reader.at) :][:count])
    _check(image)
    return image


def _check(image: ProgrammingImage) -> None:
    """Nothing lies outside of the memory, and numbers that point to something do."""
    if image.config.multipliers > MOST_MULTIPLIERS:
        raise _wrong(f"{image.config.multipliers} multipliers, {MOST_MULTIPLIERS} are the most")
    if not len(image.constants) <= image.memory <= MOST_BYTES:
        raise _wrong(f"a memory of {image.memory} bytes, {len(image.constants)} of them constants")
    for number, step in enumerate(image.steps):
        for place in (*step.reads, step.result):
            _check_place(image, place, f"step {number}")
    for place in (*image.inputs, *image.outputs):
        _check_place(image, place, "inputs and outputs")
    if len(image.infos) != len(image.layers):
        raise _wrong(f"{len(image.layers)} layers have {len(image.infos)} Layer_Info")
    starts = [start for start, _ in image.phases]
    if any(tree >= len(image.trees) for _, tree in image.phases) or starts != sorted(set(starts)):
        raise _wrong("its phases are not in order, or one has no configuration")


def _check_place(image: ProgrammingImage, place: FeatureMap, where: str) -> None:
    inside = len(image.constants) <= place.address and image.bytes_of(place).stop <= image.memory
    if not inside or place.address % image.form.element:
        raise _wrong(f"a feature of {place.shape} at {place.address:#x} is not in the memory of features", where)
    if image.form == INT8 and place.zero_point:
        raise _wrong(f"features of INT8 are stored with their zero point, here {place.zero_point} is taken off", where)
