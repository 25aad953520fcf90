"""Executes a programming image: steps become a network, its order is played, and each address is followed.

From the file alone it finds which step reads the features of which other, and builds that network again; `simulate`
plays the order and computes its results. Layer_Info and RN_Config must be those of the items, and no byte may be
written while a step still reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import DovetailError, SimulationError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.movement import Concat, Pad, Reshape, Slice
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.target.layers import RAISED_BITS
from dovetail.targets.maeri.coded import (
    AdditionStep,
    FeatureMap,
    JoinStep,
    LayerStep,
    PoolKind,
    PoolStep,
    ProgrammingImage,
    SliceStep,
    SoftmaxStep,
    Step,
    bits_of_sums,
    operands,
)
from dovetail.targets.maeri.machine import play
from dovetail.targets.maeri.network import TaskKind, network
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.outputs import configurations, layer_words, phases
from dovetail.targets.maeri.simulate import simulate
from dovetail.targets.maeri.words import StageLimits


@dataclass(frozen=True)
class ImageRun:
    """Outputs and clock cycles of one execution of an image."""

    outputs: tuple[Array, ...]
    """The network's results, int8 [rows, columns, channels]."""
    cycles: int
    """Cycles until the last of them exists."""


def execute(image: ProgrammingImage, inputs: Sequence[Array]) -> ImageRun:
    """Execute an image.

    Args:
        image: as it was read.
        inputs: the network's, int8, in its order.

    Raises:
        SimulationError: the image cannot be executed; says which step or item.
    """
    sizes = [place.elements for place in image.inputs]
    if [array.size for array in inputs] != sizes:
        raise _wrong(f"inputs of {sizes} elements are wanted", "inputs")
    try:
        return _execute(image, inputs)
    except SimulationError:
        raise
    except DovetailError as error:
        raise _wrong(error.what, error.where) from error
    except (ValueError, IndexError, ZeroDivisionError, OverflowError, MemoryError) as error:
        raise _wrong(f"it contradicts itself: {error}", "programming image") from error


def _wrong(what: str, where: str) -> SimulationError:
    return SimulationError(what, where=where, hint="write the image again with dovetail schedule")


def _execute(image: ProgrammingImage, inputs: Sequence[Array]) -> ImageRun:
    rebuilt = _ImageGraph(image)
    order = rebuilt.order()
    names = order.network.graph.inputs
    values = {
        name: array.astype(np.int8).reshape(place.shape)
        for name, place, array in zip(names, image.inputs, inputs, strict=True)
    }
    run = simulate(order, values)
    if run.cycles > image.makespan:
        raise _wrong(f"it takes {run.cycles} cycles, not {image.makespan}", "programming image")
    _check_words(image, order)
    return ImageRun(tuple(run.outputs[name][0] for name in rebuilt.outputs), run.cycles)


def _check_words(image: ProgrammingImage, order: NetworkOrder) -> None:
    """Layer_Info is that of the layers and their items, RN_Config that of the virtual neurons at work."""
    for number, (step, words) in enumerate(zip(image.layers, image.infos, strict=True)):
        layer = order.network.works[number].layer
        tiles = {item.tile for item in order.of(number)}
        if all(list(words) != layer_words(image.config, layer, tile) for tile in tiles):
            raise _wrong("its Layer_Info does not say what its items are", f"step {step}")
    timeline = phases(order)
    if image.phases != tuple((phase.start, phase.configuration) for phase in timeline):
        raise _wrong("its phases are not those of its items", "RN_Config")
    for number, (words, wanted) in enumerate(zip(image.trees, configurations(timeline), strict=True)):
        if words != wanted:
            raise _wrong(f"configuration {number} of the tree does not add up the virtual neurons at work", "RN_Config")


@dataclass
class _StoredFeature:
    """A feature in memory."""

    value: str
    """In the graph."""
    place: FeatureMap
    written: tuple[int, int]
    """Cycles [first, end) in which it is written."""
    until: int
    """The cycle until which it is written or read."""
    is_whole: bool = True
    """Whether nothing has been written over it."""


class _ImageGraph:
    """The network that an image computes, put together step by step from the places that steps read and write."""

    def __init__(self, image: ProgrammingImage) -> None:
        self.image, self.builder = image, GraphBuilder("programming image")
        self.features: list[_StoredFeature] = []
        for number, place in enumerate(image.inputs):
            value = self.builder.input(f"input{number}", TensorType(place.shape, DType.INT8))
            self.features.append(_StoredFeature(value, place, (0, 0), 0))
        for number, step in enumerate(image.steps):
            self._add(step, number)
        self.outputs = [self._view(self._read(place, "outputs"), place) for place in image.outputs]

    def order(self) -> NetworkOrder:
        """The order of the network."""
        image, graph = self.image, network(self.builder.finish(dict.fromkeys(self.outputs)))
        if len(graph.works) != len(image.layers):
            what = f"of {len(image.layers)} layers {len(graph.works)} are needed for the outputs"
            raise _wrong(what, "programming image")
        if {item.work for item in image.items} != set(image.layers):
            raise _wrong("a layer has no item", "programming image")
        items = tuple(replace(item, work=image.layers.index(item.work)) for item in image.items)
        return NetworkOrder(graph, image.config, items, image.makespan)

    def _add(self, step: Step, number: int) -> None:
        where = f"step {number}"
        features = [self._read(place, where) for place in operands(step)]
        value = self._value(step, [self._view(*pair) for pair in zip(features, operands(step), strict=True)], where)
        if self.builder.type_of(value).shape != step.result.shape:
            raise _wrong(f"its result is {self.builder.type_of(value)}, its place is {step.result.shape}", where)
        # Steps other than layers take no time of their own: they work while their operands are written.
        begin, end = min(each.written[0] for each in features), max(each.written[1] for each in features)
        if isinstance(step, LayerStep):
            begin, end = self._span(step, number)
        for feature in features:
            feature.until = max(feature.until, end)
        here = self.image.bytes_of(step.result)
        for other in self.features:
            there = self.image.bytes_of(other.place)
            if there.start < here.stop and here.start < there.stop:
                if other.until > begin:
                    what = f"it writes from cycle {begin} on what is read or written until cycle {other.until}"
                    raise _wrong(f"{what}, at {step.result.address:#x}", where)
                other.is_whole = False
        self.features.append(_StoredFeature(value, step.result, (begin, end), end))

    def _span(self, step: LayerStep, number: int) -> tuple[int, int]:
        """Cycles in which the items of a layer work."""
        items = [item for item in self.image.items if item.work == number]
        ends = (play(self.image.config, step.layer, item).until for item in items if item.segments)
        return min((item.start for item in items), default=0), max(ends, default=0)

    def _read(self, place: FeatureMap, where: str) -> _StoredFeature:
        wanted = (place.address, place.elements, place.zero_point)
        for feature in self.features:
            there = feature.place
            if feature.is_whole and (there.address, there.elements, there.zero_point) == wanted:
                return feature
        what = f"it reads {place.elements} elements at {place.address:#x}, which no step before has written so"
        raise _wrong(what, where)

    def _view(self, feature: _StoredFeature, place: FeatureMap) -> str:
        """A feature's value in the sizes of a place."""
        same = feature.place.shape == place.shape
        return feature.value if same else self.builder.add(Reshape(place.shape), [feature.value])

    def _value(self, step: Step, read: Sequence[str], where: str) -> str:
        match step:
            case LayerStep():
                return self._layer(step, read[0], where)
            case AdditionStep():
                (own, *scales), zeros = self._scales(step.scales, 3, where), (step.zero_point, step.other_zero_point)
                raised = [
                    self._scaled(x, pair, Requantize(input_zero_point=zero, left_shift=RAISED_BITS))
                    for x, zero, pair in zip(read, zeros, scales, strict=True)
                ]
                return self._limited(step.limits, self.builder.add(Add(), raised), own)
            case JoinStep():
                return self.builder.add(Concat(step.axis + 1), read)
            case SliceStep():
                axes = zip(step.first, step.result.shape[1:], step.steps, strict=True)
                ends = (first + (size - 1) * each + 1 for first, size, each in axes)
                return self.builder.add(Slice((0, *step.first), (1, *ends), (1, *step.steps)), read)
            case SoftmaxStep():
                return self.builder.add(FixedSoftmax(step.multiplier, step.shift, step.diff_min, DType.INT8), read)
            case PoolStep():
                pooled = self.builder.add(_pool(step), read)
                if step.kind == PoolKind.SUM:
                    return self._limited(step.limits, pooled, self._scales(step.scales, 1, where)[0])
                return self.builder.add(Clip(step.limits.low, step.limits.high, DType.INT8), [pooled])

    def _layer(self, step: LayerStep, x: str, where: str) -> str:
        """Add a layer: its padding, its sums, and the stage behind them."""
        form, builder, channels = self.image.form, self.builder, step.result.channels
        if form.feature_shift and step.zero_point != step.source.zero_point:
            what = f"multipliers of 16 bits know no zero points, here it is {step.zero_point - step.source.zero_point}"
            raise _wrong(what, where)
        stored = self.image.numbers(step.weights, step.kind.weight_shape(step.layer), f"<i{form.element}")
        weights = (stored >> form.weight_shift).astype(np.int8)
        if (weights.astype(np.int64) << form.weight_shift != stored).any():
            raise _wrong(f"weights are not int8 raised by {form.weight_shift} bits", where)
        bits = bits_of_sums(weights, step.kind, step.zero_point)
        if not bits <= step.sum_bits <= 32:
            raise _wrong(f"sums of its weights take {bits} bits, the step says {step.sum_bits}", where)
        around = step.around
        before, after = (0, around.top, around.left, 0), (0, around.bottom, around.right, 0)
        if any((*before, *after)):
            x = builder.add(Pad(before, after, step.zero_point), [x])
        if step.kind is TaskKind.TURNED:
            x = builder.add(Reshape((1, step.source.channels)), [x])
        bias = builder.constant(f"{where} bias", self.image.numbers(step.bias, (channels,)))
        sums = step.kind.add_to(builder, x, weights, bias, layer=step.layer, zero_point=step.zero_point, stem=where)
        multiplier, shift = self._scales(step.scales, channels, where).T
        if step.kind is TaskKind.TURNED:
            sums = builder.add(Reshape((1, 1, 1, channels)), [sums])
        return self._limited(step.limits, sums, np.stack([multiplier, shift]))

    def _limited(self, limits: StageLimits, sums: str, scale: Array) -> str:
        scaled = self._scaled(sums, scale, Requantize(output_zero_point=limits.zero_point))
        return self.builder.add(Clip(limits.low, limits.high, DType.INT8), [scaled])

    def _scaled(self, x: str, scale: Array, operator: Requantize) -> str:
        """Add a requantisation by multipliers and shifts."""
        names = [self.builder.constant("scale", np.atleast_1d(numbers).astype(np.int32)) for numbers in scale]
        return self.builder.add(operator, [x, *names])

    def _scales(self, address: int, count: int, where: str) -> Array:
        """Multipliers and shifts, [count, 2]."""
        scales = self.image.numbers(address, (count, 2))
        if scales[:, 0].min() < 0 or not -31 <= scales[:, 1].min() <= scales[:, 1].max() <= 30:
            raise _wrong("a scale is none", where)
        return scales


def _pool(step: PoolStep) -> Pool2d:
    kernel, stride = (step.rows, step.columns), (step.row_stride, step.column_stride)
    padding = ((step.around.top, step.around.bottom), (step.around.left, step.around.right))
    if step.kind == PoolKind.SUM:
        return SumPool2d(kernel, stride, padding, step.zero_point)
    return (AveragePool2d if step.kind == PoolKind.MEAN else MaxPool2d)(kernel, stride, padding)
