"""A programming image: addresses, steps, and the order of the multipliers.

One memory of bytes from 0 on: constants, then features. A feature is a dense image, rows first, channels last. An image
for INT8 holds a network's numbers as they are. An image for INT16, the type of the public RTL, holds the same network:
its multipliers know no zero points, so these are taken off stored elements; and they keep bits 31 and 26 to 12 of a
product (maeri-project/MAERI_bsv@1351d1b src/ALUs/INT16_Multiplier.bsv), so features are raised by 4 bits and weights by
8: the bits that are kept are then the product itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dovetail.ir.types import Array, DType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer, TaskKind
from dovetail.targets.maeri.order import Item


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
    """Of the first byte."""
    rows: int
    columns: int
    channels: int
    zero_point: int
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
    """A layer on the multipliers, and the stage behind them: fixed-point scaling as TensorFlow Lite Micro's."""

    kind: TaskKind
    source: FeatureMap
    result: FeatureMap
    top: int
    """Rows of the zero point above the source."""
    left: int
    bottom: int
    right: int
    rows: int
    """Rows of the kernel."""
    columns: int
    stride: int
    groups: int
    zero_point: int
    """The number that stands for 0.0 in the network's operand; stored it is less by the source's zero point."""
    weights: int
    """Address of the weights."""
    bias: int
    """Address of an int32 for each channel, added to its sums."""
    scales: int
    """Address of two int32 for each channel: multiplier, shift."""
    output_zero_point: int
    low: int
    """Least result, zero point included."""
    high: int
    sum_bits: int
    """Bits of an adder that holds every sum of these weights, whatever the features are."""

    @property
    def layer(self) -> OrderLayer:
        """Its sizes, as the multipliers see them."""
        if self.kind == TaskKind.TURNED:
            return OrderLayer(1, 1, self.source.channels, 1, self.result.channels, 1)
        source, result = self.source, self.result
        sizes = (source.rows + self.top + self.bottom, source.columns + self.left + self.right)
        channels, filters = source.channels // self.groups, result.channels // self.groups
        return OrderLayer(self.rows, self.columns, channels, filters, *sizes, self.groups, self.stride)


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
    zero_point: int
    other_zero_point: int
    scales: int
    """Address of int32 pairs, multiplier and shift: of the sum, of the source, of the other."""
    output_zero_point: int
    low: int
    high: int


class PoolKind(IntEnum):
    """The value that a pool makes of a window."""

    LARGEST = 0
    MEAN = 1
    """Rounded half away from zero."""
    SUM = 2
    """Of elements less their zero point, scaled as sums of a layer; of a window of one element, a change of scale."""


@dataclass(frozen=True, slots=True)
class PoolStep:
    """Each window's real elements as one."""

    kind: PoolKind
    source: FeatureMap
    result: FeatureMap
    rows: int
    """Rows of the window."""
    columns: int
    row_stride: int
    column_stride: int
    top: int
    """Rows beyond the source a window may reach."""
    left: int
    bottom: int
    right: int
    zero_point: int
    """Taken off every element of a sum; 0 otherwise."""
    scales: int
    """Address of a sum's multiplier and shift; 0 otherwise."""
    output_zero_point: int
    """Added to a sum; 0 otherwise."""
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class JoinStep:
    """Images one behind the other."""

    axis: int
    """Along rows, columns or channels: 0, 1, 2."""
    parts: tuple[FeatureMap, ...]
    result: FeatureMap


@dataclass(frozen=True, slots=True)
class SoftmaxStep:
    """Softmax over the channels, in TensorFlow Lite Micro's fixed point (`FixedSoftmax`); for the host."""

    source: FeatureMap
    result: FeatureMap
    multiplier: int
    shift: int
    diff_min: int


Step = LayerStep | AdditionStep | PoolStep | SoftmaxStep | JoinStep
STEPS: tuple[type[Step], ...] = (LayerStep, AdditionStep, PoolStep, SoftmaxStep, JoinStep)
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
