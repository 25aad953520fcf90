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

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

import dovetail.target as dt
from dovetail.errors import DovetailError, SimulationError
from dovetail.ir.graph import Graph, GraphBuilder, Node, part_of
from dovetail.ir.operators.linear import Convolution
from dovetail.ir.operators.movement import Pad, Reshape
from dovetail.ir.pattern import apply
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.interpret import ProgramInterpreter
from dovetail.program.ir import CORE, Buffer, LaunchStatement, Program, Queue, Role, Statement, View, Wait, dense_view
from dovetail.program.verify import verify
from dovetail.schedule.plan.allocate import allocate
from dovetail.schedule.plan.lifetimes import Timeline
from dovetail.targets.maeri.coded import (
    LAYER,
    FeatureMap,
    ProgrammingImage,
    Step,
    StepConstant,
    add_step,
    bits_of_sums,
    operators,
)
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import NetworkOrder, check
from dovetail.targets.maeri.outputs import configurations, layer_words, phases

ALIGNMENT = 64
MOST_PRODUCTS = 1 << 33
"""Products of a layer."""
_ENGINE, _MEMORY = "maeri", "memory"
_EXACT_SECONDS = 2.0
_PAD, _CONVOLUTION, _SHAPE = apply(Pad), apply(Convolution), apply(Reshape)


def machine(nbytes: int) -> dt.Target:
    """The machine of such programs, with a memory of so many bytes."""
    memory = dt.Memory(_MEMORY, base=0, size=nbytes, alignment=ALIGNMENT)
    joint = dt.Joint(1, lambda launches: None, lambda launches: [], chained=True)
    engine = dt.Engine(_ENGINE, _MEMORY, (), 1.0, (), wait="maeri_wait", joint=joint)
    policies = (dt.Policy("exact", "", (), None),)
    return dt.Target("maeri image", "", dt.Core("rv32imc"), (memory,), _MEMORY, _MEMORY, policies, (engine,))


@dataclass(frozen=True)
class StepGraph:
    """A graph as steps: its features, each with the operators that compute it from others."""

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


def step_graph(graph: Graph) -> StepGraph:
    """A graph as steps. A step is a value of 8 bits with all operators up to the values of 8 bits that it is made from;
    the padding of a layer is the layer's, and what is only seen in another shape is no step."""
    users, stored = graph.users(), {value: value for value in graph.types}
    matches, layers = list[dt.Match](), dict[str, str]()
    inner = {
        node.output
        for node in graph.nodes
        if graph.types[node.output].dtype.bits > 8
        or (_PAD.fits(node) and all(map(_CONVOLUTION.fits, users[node.output])))
    }
    for node in graph.nodes:
        if _SHAPE.fits(node) and node.inputs[0] not in inner:
            stored[node.output] = stored[node.inputs[0]]
        elif node.output not in inner or node.output in graph.outputs:
            own = _part(graph, node, inner)
            matches.append(dt.Match(own, node.output))
            sums = [each.output for each in own.nodes if LAYER.fits(each)]
            layers |= {node.output: sums[0]} if sums else {}
    return StepGraph(graph, tuple(matches), stored, layers)


def _part(graph: Graph, root: Node, inner: Set[str]) -> Graph:
    """The graph of one step."""
    own, waiting, producers = {root.output}, list(root.inputs), graph.producers()
    while waiting:
        value = waiting.pop()
        if value in inner and value not in own:
            own.add(value)
            waiting += producers[value].inputs
    return part_of(graph, [node for node in graph.nodes if node.output in own], graph.name)


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
    graph, features = _rebuilt(image)
    net = step_graph(graph)
    if tuple(match.root for match in net.matches) != tuple(value for value, _ in features[len(image.inputs) :]):
        raise _wrong("its steps are not the features of its network", "programming image")
    order = _order(image, net)
    cycles = check(order)
    if cycles > image.makespan:
        raise _wrong(f"it takes {cycles} cycles, not {image.makespan}", "programming image")
    _check_words(image, order)
    base = -(-len(image.constants) // ALIGNMENT) * ALIGNMENT
    places = {value: (place.address - base) // image.form.element for value, place in features}
    program = lowered(net, order, places)
    runner = ProgramInterpreter(program, machine(size_of(program)))
    for view, place, array in zip(program.inputs.values(), image.inputs, inputs, strict=True):
        runner.write(view, array.astype(np.int8).reshape(place.shape))
    for index, statement in enumerate(program.statements):
        runner.step(index, statement)
    return ImageRun(tuple(runner.read(program.outputs[name])[0] for name in graph.outputs), cycles)


def _order(image: ProgrammingImage, net: StepGraph) -> NetworkOrder:
    """The order of the network."""
    works = network(net.graph)
    if len(works.works) != len(image.layers):
        what = f"of {len(image.layers)} layers {len(works.works)} are needed for the outputs"
        raise _wrong(what, "programming image")
    items = tuple(replace(item, work=image.layers.index(item.work)) for item in image.items)
    if (most := max(work.layer.macs for work in works.works)) > MOST_PRODUCTS:
        raise _wrong(f"{most:,} products of a layer", "programming image")
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


def _rebuilt(image: ProgrammingImage) -> tuple[Graph, list[tuple[str, FeatureMap]]]:
    """The network that an image computes, put together step by step from the places that steps read and write; its
    values and their places, the last one written last."""
    builder, features = GraphBuilder("programming image"), list[tuple[str, FeatureMap]]()

    def read(place: FeatureMap, where: str) -> str:
        """The feature that was written last at a place, in the shape of the place."""
        wanted = (place.address, place.elements, place.zero_point)
        for value, there in reversed(features):
            if (there.address, there.elements, there.zero_point) == wanted:
                return value if there.shape == place.shape else builder.add(Reshape(place.shape), [value])
        what = f"it reads {place.elements} elements at {place.address:#x}, which no step before has written so"
        raise _wrong(what, where)

    for number, place in enumerate(image.inputs):
        features.append((builder.input(f"input{number}", TensorType(place.shape, DType.INT8)), place))
    for number, step in enumerate(image.steps):
        where = f"step {number}"
        values = [read(place, where) for place in step.reads]
        values += [
            builder.constant(f"{where} constant", _constant(image, step, constant, where))
            for constant in step.constants
        ]
        _check_layer(image, step, where)
        value = add_step(builder, step, values, where)
        if builder.type_of(value) != TensorType(step.result.shape, DType.INT8):
            raise _wrong(f"its result is {builder.type_of(value)}, its place is {step.result.shape}", where)
        features.append((value, step.result))
    return builder.finish(dict.fromkeys(read(place, "outputs") for place in image.outputs)), features


def _constant(image: ProgrammingImage, step: Step, constant: StepConstant, where: str) -> Array:
    """A constant as the network has it."""
    stored = image.numbers(constant)
    if not constant.is_weight:
        return stored
    weights, shift = (stored >> image.form.weight_shift).astype(np.int8), image.form.weight_shift
    if (weights.astype(np.int64) << shift != stored).any():
        raise _wrong(f"weights are not int8 raised by {shift} bits", where)
    return weights


def _check_layer(image: ProgrammingImage, step: Step, where: str) -> None:
    """Multipliers can compute the step's layer, and adders hold its sums."""
    if step.layer is None:
        return
    (layer,) = operators(LAYER, [step.layer])
    zero = layer.input_zero_point
    if image.form.feature_shift and any(zero != place.zero_point for place in step.reads):
        what = f"multipliers of 16 bits know no zero points, here it is {zero - step.reads[0].zero_point}"
        raise _wrong(what, where)
    weights = _constant(image, step, step.constants[step.layer.reads[1] - len(step.reads)], where)
    bits = bits_of_sums(weights, layer)
    if not bits <= step.sum_bits <= 32:
        raise _wrong(f"sums of its weights take {bits} bits, the step says {step.sum_bits}", where)
