"""Executes a programming image: values from memory to memory, cycles by the machine, and nothing taken on trust.

From the file alone it finds which step reads what which other has written, and lets `simulate.check` play the order:
multipliers, lines, when inputs exist. Words of RN_Config are followed switch by switch. Then each step reads its bytes,
a layer's sums are put together item by item (`simulate`), and the stage's results are written; a byte that is written
while something still reads it is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import DovetailError, SimulationError
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Add, Clip, Rounding, fixed_point
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Reshape
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.targets.maeri.coded import described
from dovetail.targets.maeri.machine import play
from dovetail.targets.maeri.network import network, TaskKind
from dovetail.targets.maeri.order import Item, NetworkOrder
from dovetail.targets.maeri.simulate import check, simulate
from dovetail.targets.maeri.steps import AdditionStep, FeatureMap, JoinStep, LayerStep, PoolKind, PoolStep, ProgrammingImage, SoftmaxStep, Step, operands
from dovetail.targets.maeri.switches import added

_RAISED = 20
"""Bits operands of an addition are raised by."""
_NOBODY, _HOST = -2, -1
"""Who wrote a byte, where no step has."""


@dataclass(frozen=True)
class ImageRun:
    """What came of an image."""

    outputs: tuple[Array, ...]
    """The network's results, int8 [rows, columns, channels]."""
    cycles: int
    """Until the last of them exists."""


def execute(image: ProgrammingImage, inputs: Sequence[Array]) -> ImageRun:
    """Execute an image.

    Args:
        image: as it was read.
        inputs: the network's, int8, in its order.

    Raises:
        SimulationError: what the image asks for cannot be done, or goes wrong; says which step or item.
    """
    if [array.size for array in inputs] != [place.elements for place in image.inputs]:
        sizes = [place.elements for place in image.inputs]
        raise _wrong(f"inputs of {sizes} elements are wanted", "inputs")
    try:
        return _executed(image, inputs)
    except SimulationError:
        raise
    except DovetailError as error:
        raise _wrong(error.what, error.where) from error
    except (ValueError, IndexError, ZeroDivisionError, OverflowError, MemoryError) as error:
        raise _wrong(f"it contradicts itself: {error}", "programming image") from error


def _wrong(what: str, where: str) -> SimulationError:
    return SimulationError(what, where=where, hint="write the image again with dovetail schedule")


def _executed(image: ProgrammingImage, inputs: Sequence[Array]) -> ImageRun:
    order, numbers = _order(image)
    cycles = check(order)
    _check_infos(image, order, numbers)
    if cycles > image.makespan:
        raise _wrong(f"it takes {cycles} cycles, not {image.makespan}", "programming image")
    spans = _check_trees(image, order, numbers)
    memory = _TimedMemory(image)
    for place, array in zip(image.inputs, inputs, strict=True):
        memory.write(place, array.reshape(-1).astype(np.int64), _HOST, (0, 0))
    for number, step in enumerate(image.steps):
        own = [item for item in image.items if item.work == number]
        span = spans.get(number) or memory.span(operands(step))
        read = [memory.read(place, span[1], number) for place in operands(step)]
        memory.write(step.result, _computed(image, step, own, read, number), number, span)
    return ImageRun(tuple(memory.read(place, cycles, _HOST).astype(np.int8) for place in image.outputs), cycles)


class _TimedMemory:
    """Bytes; who wrote each, from when to when, and until when it is read."""

    def __init__(self, image: ProgrammingImage) -> None:
        self.form = image.form
        self.bytes = np.zeros(image.memory, np.uint8)
        self.bytes[: len(image.constants)] = np.frombuffer(image.constants, np.uint8)
        self.writer = np.full(image.memory, _NOBODY, np.int32)
        self.until = np.zeros(image.memory, np.int64)
        self.spans: dict[int, tuple[int, int]] = {}

    def _part(self, place: FeatureMap) -> slice:
        return slice(place.address, place.address + self.form.element * place.elements)

    def span(self, places: Iterable[FeatureMap]) -> tuple[int, int]:
        """From when to when what lies there is written, which is when a step without time of its own works."""
        writers = {int(self.writer[place.address]) for place in places}
        found = [self.spans[writer] for writer in writers if writer in self.spans]
        return min((begin for begin, _ in found), default=0), max((end for _, end in found), default=0)

    def read(self, place: FeatureMap, until: int, reader: int) -> Array:
        """The network's own numbers, int64 [rows, columns, channels]."""
        part = self._part(place)
        writers = np.unique(self.writer[part])
        if len(writers) > 1 or writers[0] == _NOBODY:
            what = f"it reads {place.elements} elements at {place.address:#x}, which no step before has written so"
            raise _wrong(what, f"step {reader}" if reader >= 0 else "outputs")
        self.until[part] = np.maximum(self.until[part], until)
        stored = self.bytes[part].view(f"<i{self.form.element}").astype(np.int64)
        shape = (place.rows, place.columns, place.channels)
        return (stored >> self.form.feature_shift).reshape(shape) + place.zero_point

    def write(self, place: FeatureMap, values: Array, writer: int, span: tuple[int, int]) -> None:
        """Store numbers, which exist by the end of a span of cycles and are written from its begin on."""
        part = self._part(place)
        late = int(self.until[part].max(initial=0))
        if late > span[0]:
            what = f"it writes from cycle {span[0]} on what is read or written until cycle {late}"
            raise _wrong(f"{what}, at {place.address:#x}", f"step {writer}")
        stored = (values.reshape(-1) - place.zero_point) << self.form.feature_shift
        kept = stored.astype(f"<i{self.form.element}")
        if (kept != stored).any():
            raise _wrong(f"results do not fit {8 * self.form.element} bits", f"step {writer}")
        self.bytes[part], self.writer[part], self.until[part] = kept.view(np.uint8), writer, span[1]
        self.spans[writer] = span


def _numbers(image: ProgrammingImage, address: int, shape: tuple[int, ...], kind: str = "<i4") -> Array:
    """Constants."""
    return np.frombuffer(image.constants, kind, int(np.prod(shape)), address).reshape(shape)


def _scales(image: ProgrammingImage, address: int, count: int, number: int) -> Array:
    """Multipliers and shifts, [2, count]."""
    multiplier, shift = found = _numbers(image, address, (count, 2)).T
    if multiplier.min() < 0 or not -31 <= shift.min() <= shift.max() <= 30:
        raise _wrong("a scale is none", f"step {number}")
    return found


def _order(image: ProgrammingImage) -> tuple[NetworkOrder, dict[int, int]]:
    """The order as one of a network put together from what is read and written where; and each layer's step -> its
    number there."""
    builder = GraphBuilder("programming image")
    written: dict[str, FeatureMap] = {}
    for number, place in enumerate(image.inputs):
        shape = (1, place.rows, place.columns, place.channels)
        written[builder.input(f"input{number}", TensorType(shape, DType.INT8))] = place
    layers = [number for number, step in enumerate(image.steps) if isinstance(step, LayerStep)]
    for number, step in enumerate(image.steps):
        read = [_found(builder, written, place, f"step {number}") for place in operands(step)]
        value = _value(builder, step, read, number)
        shape = (1, step.result.rows, step.result.columns, step.result.channels)
        if builder.type_of(value).shape != shape:
            raise _wrong(f"its result is {builder.type_of(value)}, its place is {shape}", f"step {number}")
        start, end = _bytes(image, step.result)
        kept = {name: place for name, place in written.items() if not _meets(_bytes(image, place), (start, end))}
        written = {**kept, value: step.result}
    outputs = [_found(builder, written, place, "outputs") for place in image.outputs]
    graph = builder.finish(dict.fromkeys(outputs))
    found = network(graph)
    if len(found.works) != len(layers):
        raise _wrong(f"of {len(layers)} layers {len(found.works)} are needed for the outputs", "programming image")
    numbers = {step: work for work, step in enumerate(layers)}
    items = tuple(replace(item, work=numbers[item.work]) for item in image.items)
    if {item.work for item in items} != set(numbers.values()):
        raise _wrong("a layer has no item", "programming image")
    return NetworkOrder(found, image.config, items, image.makespan), numbers


def _bytes(image: ProgrammingImage, place: FeatureMap) -> tuple[int, int]:
    return place.address, place.address + image.form.element * place.elements


def _meets(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _found(builder: GraphBuilder, written: Mapping[str, FeatureMap], place: FeatureMap, where: str) -> str:
    """The value that lies at a place, in the place's sizes."""
    for name, other in written.items():
        same = (other.address, other.elements, other.zero_point) == (place.address, place.elements, place.zero_point)
        if same:
            shape = (1, place.rows, place.columns, place.channels)
            return name if builder.type_of(name).shape == shape else builder.add(Reshape(shape), [name])
    what = f"it reads {place.elements} elements at {place.address:#x}, which no step before has written so"
    raise _wrong(what, where)


def _value(builder: GraphBuilder, step: Step, read: Sequence[str], number: int) -> str:
    """What a step gives, as far as it matters when it exists."""
    if isinstance(step, LayerStep):
        before, after = (0, step.top, step.left, 0), (0, step.bottom, step.right, 0)
        padded = builder.add(Pad(before, after), [read[0]]) if any((*before, *after)) else read[0]
        sums = _sums_node(builder, step, padded, DType.INT8, step.zero_point, None, f"step {number}")
        return builder.add(Clip(DType.INT8.low, DType.INT8.high, DType.INT8), [sums])
    if isinstance(step, AdditionStep):
        wide = [builder.add(Clip(DType.INT8.low, DType.INT8.high, DType.INT32), [name]) for name in read]
        return builder.add(Clip(step.low, step.high, DType.INT8), [builder.add(Add(), wide)])
    if isinstance(step, JoinStep):
        return builder.add(Concat(step.axis + 1), read)
    if isinstance(step, SoftmaxStep):
        return builder.add(_softmax(step), read)
    pooled = builder.add(_pool(step), read)
    return builder.add(Clip(step.low, step.high, DType.INT8), [pooled])


def _sums_node(
    builder: GraphBuilder, step: LayerStep, x: str, kind: DType, zero_point: int, weights: Array | None, stem: str
) -> str:
    """A layer's sums of products, [1, rows, columns, channels]."""
    channels = step.result.channels
    w = builder.constant(f"{stem} weights", np.zeros(_kernel(step), kind.numpy) if weights is None else weights)
    if step.kind == TaskKind.TURNED:
        flat = builder.add(Reshape((1, step.source.channels)), [x])
        sums = builder.add(FullyConnected(input_zero_point=zero_point), [flat, w], stem)
        return builder.add(Reshape((1, 1, 1, channels)), [sums])
    operator = DepthwiseConv2d if step.kind == TaskKind.DEPTHWISE else Conv2d
    return builder.add(operator((step.stride, step.stride), input_zero_point=zero_point), [x, w], stem)


def _kernel(step: LayerStep) -> tuple[int, ...]:
    """How the weights lie."""
    channels = step.result.channels
    if step.kind == TaskKind.TURNED:
        return channels, step.source.channels
    if step.kind == TaskKind.DEPTHWISE:
        return 1, step.rows, step.columns, channels
    return channels, step.rows, step.columns, step.source.channels // step.groups


def _pool(step: PoolStep) -> Pool2d:
    kernel, stride = (step.rows, step.columns), (step.row_stride, step.column_stride)
    padding = ((step.top, step.bottom), (step.left, step.right))
    if step.kind == PoolKind.SUM:
        return SumPool2d(kernel, stride, padding, step.zero_point)
    return (AveragePool2d if step.kind == PoolKind.MEAN else MaxPool2d)(kernel, stride, padding)


def _softmax(step: SoftmaxStep) -> FixedSoftmax:
    return FixedSoftmax(step.multiplier, step.shift, step.diff_min, DType.INT8)


def _check_infos(image: ProgrammingImage, order: NetworkOrder, numbers: Mapping[int, int]) -> None:
    """Layer_Info says what the layers and their items are."""
    for step, work in numbers.items():
        tiles = {item.tile for item in order.items if item.work == work}
        if not described(image.infos[work], order.network.works[work].layer, tiles, image.config.multipliers):
            raise _wrong("its Layer_Info does not say what its items are", f"step {step}")


def _check_trees(
    image: ProgrammingImage, order: NetworkOrder, numbers: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """In every phase the tree adds up the virtual neurons at work, and no others' values; from when to when the items
    of each step work."""
    works, starts = order.network.works, [start for start, _ in image.phases]
    active: list[set[tuple[int, int]]] = [set() for _ in starts]
    spans: dict[int, tuple[int, int]] = {}
    steps = {work: step for step, work in numbers.items()}
    for item in order.items:
        layer, taps = works[item.work].layer, item.taps[1] - item.taps[0]
        played = play(image.config, layer, item.tile, taps, item.place.start, item.start, item.segments)
        begin, end = spans.get(steps[item.work], (item.start, 0))
        spans[steps[item.work]] = min(begin, item.start), max(end, played.until)
        first = int(np.searchsorted(starts, item.start, "right")) - 1
        last = int(np.searchsorted(starts, played.until, "left"))
        if first < 0:
            raise _wrong(f"no phase has begun in cycle {item.start}", f"step {steps[item.work]}")
        for phase in range(first, last):
            active[phase] |= set(played.places)
    for places, (start, tree) in zip(active, image.phases, strict=True):
        fault = added(image.config, image.trees[tree], sorted(places))
        if fault:
            raise _wrong(f"configuration {tree} of the tree, from cycle {start} on: {fault}", "RN_Config")
    return spans


def _computed(image: ProgrammingImage, step: Step, own: Sequence[Item], read: Sequence[Array], number: int) -> Array:
    """What a step makes of the network's own numbers."""
    if isinstance(step, LayerStep):
        return _layer(image, step, own, read[0], number)
    if isinstance(step, AdditionStep):
        (own_scale, *scales), zeros = _scales(image, step.scales, 3, number).T, (step.zero_point, step.other_zero_point)
        total = np.zeros(read[0].shape, np.int64)
        for x, zero, (multiplier, shift) in zip(read, zeros, scales, strict=True):
            total += fixed_point((x - zero) << _RAISED, multiplier, shift, Rounding.DOUBLE)
        return _limited(step, total, own_scale[0], own_scale[1])
    if isinstance(step, JoinStep):
        return np.concatenate(read, axis=step.axis)
    x = read[0][None].astype(np.int8)
    if (x != read[0]).any():
        raise _wrong("what it reads are no numbers of 8 bits", f"step {number}")
    if isinstance(step, SoftmaxStep):
        return _softmax(step).evaluate([x]).astype(np.int64)
    pooled = _pool(step).evaluate([x]).astype(np.int64)
    if step.kind == PoolKind.SUM:
        return _limited(step, pooled, *_scales(image, step.scales, 1, number))
    return np.clip(pooled, step.low, step.high)


def _layer(image: ProgrammingImage, step: LayerStep, own: Sequence[Item], x: Array, number: int) -> Array:
    """A layer's sums as its items put them together from what is stored, and what the stage makes of them."""
    form, kind = image.form, DType.of(f"int{8 * image.form.element}")
    zero = (step.zero_point - step.source.zero_point) << form.feature_shift
    if image.form.feature_shift and zero:
        raise _wrong(f"multipliers of 16 bits know no zero points, here it is {zero}", f"step {number}")
    around = ((step.top, step.bottom), (step.left, step.right), (0, 0))
    stored = np.pad((x - step.source.zero_point) << form.feature_shift, around, constant_values=zero)
    weights = _numbers(image, step.weights, _kernel(step), f"<i{form.element}").astype(kind.numpy)
    builder = GraphBuilder("step")
    name = builder.input("x", TensorType((1, *stored.shape), kind))
    net = network(builder.finish([_sums_node(builder, step, name, kind, zero, weights, "sums")]))
    items = tuple(replace(item, work=0) for item in own)
    alone = replace(image.config, feature_memory=0, prefetch_buffer=0)  # of all steps, `check` has counted them
    order = NetworkOrder(net, alone, items, image.makespan)
    (found,) = simulate(order, {name: stored[None].astype(kind.numpy)}).outputs.values()
    sums = found.astype(np.int64).reshape(step.result.rows, step.result.columns, -1)
    sums >>= form.feature_shift + form.weight_shift  # what the multipliers keep of their products
    room = 1 << (step.sum_bits - 1)
    if not 1 <= step.sum_bits <= 32 or sums.min() < -room or sums.max() >= room:
        raise _wrong(f"sums from {sums.min()} to {sums.max()} do not fit {step.sum_bits} bits", f"step {number}")
    channels = step.result.channels
    sums += _numbers(image, step.bias, (channels,))
    multiplier, shift = _scales(image, step.scales, channels, number)
    return _limited(step, sums, multiplier, shift)


def _limited(step: LayerStep | AdditionStep | PoolStep, sums: Array, multiplier: Array, shift: Array) -> Array:
    """What the stage makes of sums."""
    scaled = fixed_point(sums, multiplier, shift, Rounding.DOUBLE) + step.output_zero_point
    return np.asarray(np.clip(scaled, step.low, step.high))
