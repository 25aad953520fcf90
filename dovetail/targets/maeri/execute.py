"""An order as a program of the compiler's: a launch for each step of its network, in one memory of bytes from 0 on; and
a programming image, executed: its steps become a network and a program again, which are checked as any others are.

Launches that are at work at the same time have queues of their own; the engine keeps every element behind those it is
made from (`Joint.chained`). A wait stands where the order has a launch over before another one begins. Addresses come
from the planner, rules from the verifier and numbers from the interpreter, as those of any program.

From the file of an image alone it is found which step reads the features of which other. The order is played on the
machine, the program with the file's addresses is verified (no byte may be written while a step still reads it) and
interpreted, and Layer_Info and RN_Config must be those of the items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import dovetail.target as dt
from dovetail.errors import DovetailError, SimulationError
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.movement import Concat, Pad, Reshape, Slice
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.interpret import ProgramInterpreter
from dovetail.program.ir import CORE, Buffer, LaunchStatement, Program, Queue, Role, Statement, View, Wait, dense_view
from dovetail.program.verify import verify
from dovetail.schedule.plan.allocate import allocate
from dovetail.schedule.plan.lifetimes import Timeline
from dovetail.target import Match
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
from dovetail.targets.maeri.network import TaskKind, network
from dovetail.targets.maeri.order import NetworkOrder, check
from dovetail.targets.maeri.outputs import configurations, layer_words, phases
from dovetail.targets.maeri.words import StageLimits

ALIGNMENT = 64
_ENGINE, _MEMORY = "maeri", "memory"
_EXACT_SECONDS = 2.0


def machine(nbytes: int) -> dt.Target:
    """The machine of such programs, with a memory of so many bytes."""
    memory = dt.Memory(_MEMORY, base=0, size=nbytes, alignment=ALIGNMENT)
    joint = dt.Joint(1, lambda launches: None, lambda launches: [], chained=True)
    engine = dt.Engine(_ENGINE, _MEMORY, (), 1.0, (), wait="maeri_wait", joint=joint)
    policies = (dt.Policy("exact", "", (), None),)
    return dt.Target("maeri image", "", dt.Core("rv32imc"), (memory,), _MEMORY, _MEMORY, policies, (engine,))


@dataclass(frozen=True)
class StepGraph:
    """A graph as steps."""

    graph: Graph
    matches: tuple[dt.Match, ...]
    """One for each step, in a graph of its own nodes; each after those it reads."""
    stored: Mapping[str, str]
    """Value -> the value with the same bytes that is stored: itself, if nothing reshapes it."""
    layers: Mapping[str, str]
    """Result of a step that is a layer -> its sums."""

    def reads(self, match: dt.Match) -> list[str]:
        """The stored values that a step reads."""
        return [self.stored[value] for value in match.graph.inputs]

    def spans(self, order: NetworkOrder) -> list[tuple[int, int]]:
        """Cycles [begin, end) of each step: of a layer those of its items; of others, which take no time, those in
        which their operands are written."""
        layers: dict[str, tuple[int, int]] = {}
        for item in order.items:
            sums = order.work(item).node.output
            begin, end = layers.get(sums, (item.start, 0))
            layers[sums] = min(begin, item.start), max(end, order.end(item))
        written: dict[str, tuple[int, int]] = dict.fromkeys(self.graph.inputs, (0, 0))
        for match in self.matches:
            own = [written[value] for value in self.reads(match)]
            span = min(begin for begin, _ in own), max(end for _, end in own)
            written[match.root] = layers[self.layers[match.root]] if match.root in self.layers else span
        return [written[match.root] for match in self.matches]

    def in_time(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The steps in the order they begin, each after those it reads."""
        begins: dict[str, int] = dict.fromkeys(self.graph.inputs, 0)
        for match, (begin, _) in zip(self.matches, spans, strict=True):
            begins[match.root] = max([begin, *(begins[value] for value in self.reads(match))])
        return sorted(range(len(self.matches)), key=lambda number: (begins[self.matches[number].root], number))


def lowered(net: StepGraph, order: NetworkOrder, places: Mapping[str, int] | None = None) -> Program:
    """The program of an order, verified.

    Args:
        net: the steps of its network.
        order: the order.
        places: addresses of the stored values; None to plan them.

    Raises:
        ProgramError: values lie over others that are still read or written.
    """
    graph, spans, names = net.graph, net.spans(order), dict[str, Buffer]()
    for value in (*graph.inputs, *(match.root for match in net.matches)):
        outputs = {net.stored[name] for name in graph.outputs}
        role = Role.INPUT if value in graph.inputs else Role.OUTPUT if value in outputs else Role.VALUE
        names[value] = Buffer(f"value_{len(names)}", _MEMORY, graph.types[value].nbytes, role)

    def view(value: str) -> View:
        return dense_view(names[net.stored[value]].name, graph.types[value])

    statements, lanes = list[Statement](), dict[Queue, tuple[int, int]]()
    waited = dict[Queue, int]()
    for number in net.in_time(spans):
        match, (begin, end) = net.matches[number], spans[number]
        over = {queue: index for queue, (until, index) in lanes.items() if until <= begin}
        statements += [Wait(number, queue, index) for queue, index in over.items() if waited.get(queue) != index]
        waited |= over
        queue = next(iter(over), Queue(f"{_ENGINE} {len(lanes)}"))
        lanes[queue] = end, len(statements)
        operands = {value: view(value) for value in match.graph.inputs}
        statements.append(LaunchStatement(number, _ENGINE, match, operands, view(match.root), queue=queue))
    last = len(net.matches) - 1
    statements += [Wait(last, queue, index) for queue, (_, index) in lanes.items() if waited.get(queue) != index]
    buffers = {buffer.name: buffer for buffer in names.values()}
    if places is None:
        memory, timeline = machine(1 << 40).memory(_MEMORY), Timeline(statements, buffers, CORE)
        addresses = allocate(memory, timeline, exact_seconds=_EXACT_SECONDS).addresses
    else:
        addresses = {names[value].name: place for value, place in places.items()}
    program = Program(
        name=graph.name,
        buffers={name: replace(buffer, address=addresses[name]) for name, buffer in buffers.items()},
        constants={},
        statements=tuple(statements),
        layers=tuple(match.root for match in net.matches),
        inputs={name: view(name) for name in graph.inputs},
        outputs={name: view(name) for name in graph.outputs},
        values={match.root: view(match.root) for match in net.matches},
        dma=CORE,
    )
    verify(program, machine(size_of(program)))
    return program


def size_of(program: Program) -> int:
    """Bytes of memory that a program takes."""
    return max(((buffer.address or 0) + buffer.nbytes for buffer in program.buffers.values()), default=0)


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
    net = rebuilt.steps()
    order = _order(image, net)
    cycles = check(order)
    if cycles > image.makespan:
        raise _wrong(f"it takes {cycles} cycles, not {image.makespan}", "programming image")
    _check_words(image, order)
    base = -(-len(image.constants) // ALIGNMENT) * ALIGNMENT
    places = {value: (place.address - base) // image.form.element for value, place in rebuilt.features}
    program = lowered(net, order, places)
    runner = ProgramInterpreter(program, machine(size_of(program)))
    for view, place, array in zip(program.inputs.values(), image.inputs, inputs, strict=True):
        runner.write(view, array.astype(np.int8).reshape(place.shape))
    for index, statement in enumerate(program.statements):
        runner.step(index, statement)
    return ImageRun(tuple(runner.read(program.outputs[name])[0] for name in rebuilt.outputs), cycles)


def _order(image: ProgrammingImage, net: StepGraph) -> NetworkOrder:
    """The order of the network."""
    works = network(net.graph)
    if len(works.works) != len(image.layers):
        what = f"of {len(image.layers)} layers {len(works.works)} are needed for the outputs"
        raise _wrong(what, "programming image")
    items = tuple(replace(item, work=image.layers.index(item.work)) for item in image.items)
    return NetworkOrder(works, image.config, items, image.makespan)


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


class _ImageGraph:
    """The network that an image computes, put together step by step from the places that steps read and write."""

    def __init__(self, image: ProgrammingImage) -> None:
        self.image, self.builder = image, GraphBuilder("programming image")
        self.features: list[tuple[str, FeatureMap]] = []
        """Values and their places, the last one written last."""
        self.stored, self.layers, self.matches = dict[str, str](), dict[str, str](), list[Match]()
        for number, place in enumerate(image.inputs):
            self._keep(self.builder.input(f"input{number}", TensorType(place.shape, DType.INT8)), place)
        for number, step in enumerate(image.steps):
            self._add(step, f"step {number}")
        self.outputs = [self._read(place, "outputs") for place in image.outputs]

    def steps(self) -> StepGraph:
        """The network as steps."""
        graph = self.builder.finish(dict.fromkeys(self.outputs))
        return StepGraph(graph, tuple(self.matches), self.stored, self.layers)

    def _keep(self, value: str, place: FeatureMap) -> None:
        self.features.append((value, place))
        self.stored[value] = value

    def _add(self, step: Step, where: str) -> None:
        read = [self._read(place, where) for place in operands(step)]
        value, sums = add_step(self.image, self.builder, step, read, where)
        if self.builder.type_of(value).shape != step.result.shape:
            raise _wrong(f"its result is {self.builder.type_of(value)}, its place is {step.result.shape}", where)
        own = GraphBuilder(where)
        for name in dict.fromkeys(read):
            own.input(name, self.builder.type_of(name))
        graph = own.finish([add_step(self.image, own, step, read, where)[0]])
        self.matches.append(Match(graph, value))
        self.layers |= {value: sums} if sums else {}
        self._keep(value, step.result)

    def _read(self, place: FeatureMap, where: str) -> str:
        """The feature that was written last at a place, in the sizes of the place."""
        wanted = (place.address, place.elements, place.zero_point)
        for value, there in reversed(self.features):
            if (there.address, there.elements, there.zero_point) == wanted:
                if there.shape == place.shape:
                    return value
                seen = self.builder.add(Reshape(place.shape), [value])
                self.stored[seen] = value
                return seen
        what = f"it reads {place.elements} elements at {place.address:#x}, which no step before has written so"
        raise _wrong(what, where)


def add_step(
    image: ProgrammingImage, builder: GraphBuilder, step: Step, read: Sequence[str], where: str
) -> tuple[str, str]:
    """Add what a step computes to a graph; its result, and of a layer its sums."""
    match step:
        case LayerStep():
            return _add_layer(image, builder, step, read[0], where)
        case AdditionStep():
            (own, *scales), zeros = _scales(image, step.scales, 3, where), (step.zero_point, step.other_zero_point)
            raised = [
                _scaled(builder, x, pair, Requantize(input_zero_point=zero, left_shift=RAISED_BITS))
                for x, zero, pair in zip(read, zeros, scales, strict=True)
            ]
            return _limited(builder, step.limits, builder.add(Add(), raised), own), ""
        case JoinStep():
            return builder.add(Concat(step.axis + 1), read), ""
        case SliceStep():
            axes = zip(step.first, step.result.shape[1:], step.steps, strict=True)
            ends = (first + (size - 1) * each + 1 for first, size, each in axes)
            return builder.add(Slice((0, *step.first), (1, *ends), (1, *step.steps)), read), ""
        case SoftmaxStep():
            return builder.add(FixedSoftmax(step.multiplier, step.shift, step.diff_min, DType.INT8), read), ""
        case PoolStep():
            pooled = builder.add(_pool(step), read)
            if step.kind == PoolKind.SUM:
                return _limited(builder, step.limits, pooled, _scales(image, step.scales, 1, where)[0]), ""
            return builder.add(Clip(step.limits.low, step.limits.high, DType.INT8), [pooled]), ""


def _add_layer(image: ProgrammingImage, builder: GraphBuilder, step: LayerStep, x: str, where: str) -> tuple[str, str]:
    """Add a layer: its padding, its sums, and the stage behind them."""
    form, channels = image.form, step.result.channels
    if form.feature_shift and step.zero_point != step.source.zero_point:
        what = f"multipliers of 16 bits know no zero points, here it is {step.zero_point - step.source.zero_point}"
        raise _wrong(what, where)
    stored = image.numbers(step.weights, step.kind.weight_shape(step.layer), f"<i{form.element}")
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
    bias = builder.constant(f"{where} bias", image.numbers(step.bias, (channels,)))
    sums = step.kind.add_to(builder, x, weights, bias, layer=step.layer, zero_point=step.zero_point, stem=where)
    multiplier, shift = _scales(image, step.scales, channels, where).T
    shown = builder.add(Reshape((1, 1, 1, channels)), [sums]) if step.kind is TaskKind.TURNED else sums
    return _limited(builder, step.limits, shown, np.stack([multiplier, shift])), sums


def _limited(builder: GraphBuilder, limits: StageLimits, sums: str, scale: Array) -> str:
    scaled = _scaled(builder, sums, scale, Requantize(output_zero_point=limits.zero_point))
    return builder.add(Clip(limits.low, limits.high, DType.INT8), [scaled])


def _scaled(builder: GraphBuilder, x: str, scale: Array, operator: Requantize) -> str:
    """Add a requantisation by multipliers and shifts."""
    names = [builder.constant("scale", np.atleast_1d(numbers).astype(np.int32)) for numbers in scale]
    return builder.add(operator, [x, *names])


def _scales(image: ProgrammingImage, address: int, count: int, where: str) -> Array:
    """Multipliers and shifts, [count, 2]."""
    scales = image.numbers(address, (count, 2))
    if scales[:, 0].min() < 0 or not -31 <= scales[:, 1].min() <= scales[:, 1].max() <= 30:
        raise _wrong("a scale is none", where)
    return scales


def _pool(step: PoolStep) -> Pool2d:
    kernel, stride = (step.rows, step.columns), (step.row_stride, step.column_stride)
    padding = ((step.around.top, step.around.bottom), (step.around.left, step.around.right))
    if step.kind == PoolKind.SUM:
        return SumPool2d(kernel, stride, padding, step.zero_point)
    return (AveragePool2d if step.kind == PoolKind.MEAN else MaxPool2d)(kernel, stride, padding)
