"""An order as a program of the compiler's: a launch for each step of its network, in one memory of bytes from 0 on; the
programming image of that; and an image, executed: its steps become a network and a program again, which are checked as
any others are.

Launches that are at work at the same time have queues of their own; the engine keeps every element behind those it is
made from (`Joint.chained`). A wait stands where the order has a launch over before another one begins. Addresses come
from the planner, rules from the verifier and numbers from the interpreter, as those of any program.

From the file of an image alone it is found which step reads the features of which other. The order is played on the
machine, the program with the file's addresses is verified (no byte may be written while a step still reads it) and
interpreted, and Layer_Info and RN_Config must be those of the items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, get_args

import numpy as np

import dovetail.target as dt
from dovetail.errors import DovetailError, ModelError, SimulationError
from dovetail.ir.graph import Graph, GraphBuilder, Node, part_of
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Dequantize, Quantize, Requantize, Rounding
from dovetail.ir.operators.linear import Convolution, Linear
from dovetail.ir.operators.movement import Pad, Reshape, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, SumPool2d
from dovetail.ir.pattern import Apply, apply, occurrence
from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.interpret import ProgramInterpreter
from dovetail.program.ir import CORE, Buffer, LaunchStatement, Program, Queue, Role, Statement, View, Wait, dense_view
from dovetail.program.verify import verify
from dovetail.records import Record
from dovetail.schedule.plan.allocate import allocate
from dovetail.schedule.plan.lifetimes import Timeline
from dovetail.targets.maeri.coded import (
    INT8,
    LAYER,
    FeatureMap,
    NumberFormat,
    ProgrammingImage,
    Step,
    StepConstant,
    StepOperator,
    add_step,
    bits_of_sums,
    kept_constants,
    operators,
    step_of,
    weights_of,
)
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import NetworkOrder, check
from dovetail.targets.maeri.outputs import Phase, configurations, layer_info, layer_words, phases

ALIGNMENT = 64
MOST_PRODUCTS = 1 << 33
"""Products of a layer."""
_ENGINE, _MEMORY = "maeri", "memory"
_EXACT_SECONDS = 2.0
_PAD, _CONVOLUTION, _SHAPE = apply(Pad), apply(Convolution), apply(Reshape)
_BEHIND_INPUTS = apply((Quantize, Transpose))
_BEFORE_OUTPUTS = apply((Dequantize, Transpose))
_STEP = apply(get_args(StepOperator))
_SCALE, _MEAN, _SOFTMAX = apply(Requantize), apply(AveragePool2d), apply(FixedSoftmax)
_TELLS: Apply[Any] = apply((Linear, Requantize, SumPool2d))
"""Operators that take the zero point off what they read."""


def machine(nbytes: int) -> dt.Target:
    """The machine of such programs, with a memory of so many bytes."""
    memory = dt.Memory(_MEMORY, base=0, size=nbytes, alignment=ALIGNMENT)
    joint = dt.Joint(1, lambda launches: None, lambda launches: [], chained=True)
    engine = dt.Engine(_ENGINE, _MEMORY, (), 1.0, (), wait="maeri_wait", joint=joint)
    policies = (dt.Policy("exact", "", (), None),)
    return dt.Target("maeri image", "", dt.Core("rv32imc"), (memory,), _MEMORY, _MEMORY, policies, (engine,))


class StepGraph(Record):
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
    """The program of an order of some steps, verified, with these addresses of the stored values; None to plan them.

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


def programmed(order: NetworkOrder, form: NumberFormat, timeline: Sequence[Phase]) -> ProgrammingImage:
    """The image of a network and its order, whose phases are given.

    Raises:
        ModelError: an operator of the network is in no step of an image, or there is no room; says which.
    """
    graph, memory = inner(order.network.graph), bytearray()
    _check(graph)
    net = step_graph(graph)
    _check_steps(net)
    net = replace(net, matches=tuple(net.matches[number] for number in net.in_time(net.spans(order))))
    zeros, program = _zero_points(net), lowered(net, order)
    constants = dict[str, StepConstant]()
    for match in net.matches:
        constants |= kept_constants(memory, match.graph, form)
    base, needed = -(-len(memory) // ALIGNMENT) * ALIGNMENT, form.element * size_of(program)
    if order.config.feature_memory and needed > order.config.feature_memory:
        what = f"features of {8 * form.element} bits need {needed:,} bytes, the memory of features has"
        what = f"{what} {order.config.feature_memory:,}"
        raise ModelError(what, where=graph.name, hint="raise feature_memory")

    def place(value: str) -> FeatureMap:
        view = {**program.values, **program.inputs}[net.stored[value]]
        address = base + form.element * (program.buffers[view.buffer].address or 0)
        zero = 0 if form == INT8 else zeros[net.stored[value]]
        return FeatureMap(address, graph.types[value].shape, zero)

    sums = {net.layers[match.root]: at for at, match in enumerate(net.matches) if match.root in net.layers}
    numbers = [sums[work.node.output] for work in order.network.works]
    in_steps = sorted(range(len(numbers)), key=numbers.__getitem__)
    return ProgrammingImage(
        config=order.config,
        form=form,
        makespan=order.makespan,
        memory=base + needed,
        inputs=tuple(map(place, graph.inputs)),
        outputs=tuple(map(place, graph.outputs)),
        steps=tuple(step_of(match.graph, constants, place) for match in net.matches),
        infos=tuple(tuple(layer_info(order, number)) for number in in_steps),
        trees=tuple(configurations(timeline)),
        phases=tuple((phase.start, phase.configuration) for phase in timeline),
        items=tuple(replace(item, work=numbers[item.work]) for item in order.items),
        constants=bytes(memory),
    )


def inner(graph: Graph) -> Graph:
    """A network without the host's part: quantising and transposing of inputs, and back of outputs; and without inputs
    that nothing reads."""
    users, producers = graph.users(), graph.producers()
    inputs, outputs, gone = list(graph.inputs), list(graph.outputs), set[str]()
    for at, name in enumerate(inputs):
        while len(users[name]) == 1 and occurrence(_BEHIND_INPUTS, graph, users[name][0]):
            name = users[name][0].output
            gone.add(name)
        inputs[at] = name
    for at, name in enumerate(outputs):
        while occurrence(_BEFORE_OUTPUTS, graph, name) and not users[name]:
            gone.add(name)
            name = producers[name].inputs[0]
            users = {**users, name: [node for node in users[name] if node.output not in gone]}
        outputs[at] = name
    nodes = tuple(node for node in graph.nodes if node.output not in gone)
    read = tuple(name for name in inputs if users[name] or name in outputs)
    return replace(graph, inputs=read, outputs=tuple(outputs), nodes=nodes)


def _check(graph: Graph) -> None:
    """Refuse a network that is no network of an image."""
    if graph.states:
        raise _unfit("a network with states", graph.name)
    for node in graph.nodes:
        where = node.origin or node.output
        if graph.types[node.output].dtype is DType.FLOAT32:
            hint = "dovetail quantize MODEL, then order that"
            raise ModelError("the network computes in floats, an image holds int8", where=where, hint=hint)
        asymmetric = any(layer.weight_zero_point for layer in operators(LAYER, [node]))
        other_stage = any(scale.rounding is not Rounding.DOUBLE for scale in operators(_SCALE, [node]))
        moved_mean = any(mean.input_zero_point or mean.scaled_sum for mean in operators(_MEAN, [node]))
        if not _STEP.fits(node) or asymmetric or other_stage or moved_mean:
            raise _unfit(node.operator.class_name, where)


def _check_steps(net: StepGraph) -> None:
    """Refuse steps that compute more than multipliers and what is behind them."""
    for value in {*net.graph.inputs, *(match.root for match in net.matches)}:
        kind = net.graph.types[value]
        if kind.dtype is not DType.INT8 or kind.shape[0] != 1:
            raise _unfit(f"a value {kind}", value)
    for match in net.matches:
        nodes, weights = match.graph.nodes, weights_of(match.graph)
        if not match.graph.inputs:
            raise _unfit("a value of constants", match.root)
        zeros = [layer.input_zero_point for layer in operators(LAYER, nodes)]
        is_one = len(zeros) == len(weights) == len(match.graph.inputs) == 1 and operators(_SCALE, nodes)
        if zeros and not (is_one and {pad.value for pad in operators(_PAD, nodes)} <= {*zeros}):
            node = next(filter(LAYER.fits, nodes))
            raise _unfit(node.operator.class_name, node.origin or node.output)
        for name, array in match.graph.constants.items():
            if array.dtype != (np.int8 if name in weights else np.int32):
                raise _unfit(f"a constant {match.graph.types[name]}", match.root)


def _unfit(what: str, where: str) -> ModelError:
    return ModelError(f"a programming image has no step for {what}", where=where, hint="compile the network instead")


def _zero_points(net: StepGraph) -> dict[str, int]:
    """The number that stands for 0.0 in each value, from the step that reads it, or that writes it."""
    zeros, stored = dict[str, int](), net.stored

    def told(value: str, zero: int, match: dt.Match) -> None:
        if zeros.setdefault(stored[value], zero) != zero:
            raise _unfit(f"a value that is read with the zero points {zeros[stored[value]]} and {zero}", match.root)

    for match in reversed(net.matches):
        own = {node.output: node for node in match.graph.nodes}
        for node in filter(_TELLS.fits, match.graph.nodes):
            value = node.inputs[0]
            value = own[value].inputs[0] if value in own and _PAD.fits(own[value]) else value
            if value in match.graph.inputs:
                told(value, operators(_TELLS, [node])[0].input_zero_point, match)
        if _made(match) is None and match.root in zeros:
            for value in match.graph.inputs:
                zeros.setdefault(stored[value], zeros[match.root])
    for match in net.matches:
        read, made = [stored[value] for value in match.graph.inputs], _made(match)
        zeros.setdefault(match.root, zeros.get(read[0], 0) if made is None else made)
        others = [zeros.setdefault(value, zeros[match.root]) for value in read] if made is None else []
        if any(zero != zeros[match.root] for zero in others):
            raise _unfit(f"values with the zero points {sorted({*others, zeros[match.root]})} as one", match.root)
    return {**{stored[name]: 0 for name in (*net.graph.inputs, *net.graph.outputs)}, **zeros}


def _made(match: dt.Match) -> int | None:
    """The zero point of a step's result; None where its numbers are those of the operands."""
    if operators(_SOFTMAX, match.graph.nodes):
        return DType.INT8.low
    scaled = [scale.output_zero_point for scale in operators(_SCALE, match.graph.nodes)]
    return scaled[-1] if scaled else None


class ImageRun(Record):
    """Outputs and clock cycles of one execution of an image."""

    outputs: tuple[Array, ...]
    """The network's results, int8 [rows, columns, channels]."""
    cycles: int
    """Cycles until the last of them exists."""


def execute(image: ProgrammingImage, inputs: Sequence[Array]) -> ImageRun:
    """Execute an image on the network's inputs (int8, in its order).

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
