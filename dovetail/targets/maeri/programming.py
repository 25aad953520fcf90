"""From a network and its order to a programming image: its program as steps, and the numbers of INT8 or INT16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Clip, Dequantize, Quantize, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Reshape, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.ir.pattern import occurrence
from dovetail.ir.types import Array, DType
from dovetail.target import Match, apply, constant, layers, operand
from dovetail.target.pattern import match_pattern
from dovetail.targets.maeri.coded import (
    INT8,
    AdditionStep,
    FeatureMap,
    JoinStep,
    LayerStep,
    NumberFormat,
    PoolKind,
    PoolStep,
    ProgrammingImage,
    SliceStep,
    SoftmaxStep,
    Step,
    bits_of_sums,
)
from dovetail.targets.maeri.execute import ALIGNMENT, StepGraph, lowered, size_of
from dovetail.targets.maeri.network import MultiplierLayer
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.outputs import Phase, configurations, layer_words
from dovetail.targets.maeri.task import constants_of, limits_of
from dovetail.targets.maeri.words import Sides, StageLimits

_SCALE = (constant("multiplier"), constant("shift"))
_PATTERNS = (
    *(each for kind in (Conv2d, DepthwiseConv2d, FullyConnected) for each in layers.requantised("", kind).values()),
    layers.ADDITION,
    apply(Clip, apply(AveragePool2d, operand("x"), name="mean")),
    apply(Clip, apply(Requantize, apply(SumPool2d, operand("x"), name="sum"), *_SCALE)),
    apply(Clip, apply(Requantize, operand("x"), *_SCALE, name="change")),
    apply(MaxPool2d, operand("x"), name="largest"),
    apply(FixedSoftmax, operand("x"), name="softmax"),
    apply(Reshape, operand("x"), name="reshape"),
    apply(Slice, operand("x"), name="slice"),
)
"""Operators that are a step. A reshape is none, for it moves nothing."""
_BEHIND_INPUTS = apply((Quantize, Transpose))
_BEFORE_OUTPUTS = apply((Dequantize, Transpose))
_LAYER_LIMITS = (*layers.INT8, layers.DOUBLE_ROUNDING)
_POOLS = {"mean": PoolKind.MEAN, "largest": PoolKind.LARGEST, "sum": PoolKind.SUM, "change": PoolKind.SUM}


def programmed(order: NetworkOrder, form: NumberFormat, timeline: Sequence[Phase]) -> ProgrammingImage:
    """The image of a network and its order.

    Args:
        order: the order.
        form: the form of numbers.
        timeline: the order's phases.

    Raises:
        ModelError: an operator of the network is no step of an image, or there is no room; says which.
    """
    net, memory = _step_graph(inner(order.network.graph)), _ConstantMemory()
    net = replace(net, matches=tuple(net.matches[number] for number in net.in_time(net.spans(order))))
    zeros, program = _zero_points(net), lowered(net, order)
    constants = [[memory.add(array) for array in _constants(match, form)] for match in net.matches]
    needed = form.element * size_of(program)
    if order.config.feature_memory and needed > order.config.feature_memory:
        what = f"features of {8 * form.element} bits need {needed:,} bytes, the memory of features has"
        what = f"{what} {order.config.feature_memory:,}"
        raise ModelError(what, where=net.graph.name, hint="raise feature_memory")

    def place(value: str) -> FeatureMap:
        view = {**program.values, **program.inputs}[net.stored[value]]
        address = memory.end + form.element * (program.buffers[view.buffer].address or 0)
        zero = 0 if form == INT8 else zeros[net.stored[value]]
        return FeatureMap(address, *_sizes(net.graph.types[value].shape), zero)

    works = {work.node.output: work for work in order.network.works}
    steps = [_step(match, own, place, works) for match, own in zip(net.matches, constants, strict=True)]
    sums = {net.layers[match.root]: at for at, match in enumerate(net.matches) if match.root in net.layers}
    numbers = [sums[name] for name in works]
    infos = {
        number: tuple(layer_words(order.config, work.layer, next(i.tile for i in order.items if i.work == at)))
        for at, (number, work) in enumerate(zip(numbers, order.network.works, strict=True))
    }
    return ProgrammingImage(
        config=order.config,
        form=form,
        makespan=order.makespan,
        memory=memory.end + needed,
        inputs=tuple(map(place, net.graph.inputs)),
        outputs=tuple(map(place, net.graph.outputs)),
        steps=tuple(steps),
        infos=tuple(infos[number] for number in sorted(infos)),
        trees=tuple(configurations(timeline)),
        phases=tuple((phase.start, phase.configuration) for phase in timeline),
        items=tuple(replace(item, work=numbers[item.work]) for item in order.items),
        constants=bytes(memory.data),
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


def _step_graph(graph: Graph) -> StepGraph:
    if graph.states:
        raise _unfit("a network with states", graph.name)
    matches, covered = list[Match](), set[str]()
    for node in graph.nodes:
        join = apply(Concat, *(operand(f"x{at}") for at in range(len(node.inputs))), name="joined")
        for pattern in (*_PATTERNS, join):
            match = match_pattern(pattern, graph, node.output)
            if isinstance(match, Match) and not _is_refused(match):
                matches.append(_alone(match))
                covered |= {each.output for each in match.nodes.values()}
                break
    alone = [node for node in graph.nodes if node.output not in covered]
    if alone:
        node = next((node for node in alone if not occurrence(apply(Pad), graph, node)), alone[0])
        if graph.types[node.output].dtype is DType.FLOAT32:
            what, hint = (
                "the network computes in floats, an image holds int8",
                "dovetail quantize MODEL, then order that",
            )
            raise ModelError(what, where=node.origin or node.output, hint=hint)
        raise _unfit(type(node.operator).__name__, node.origin or node.output)
    stored = {value: value for value in graph.types}
    for match in matches:
        if match.has("reshape"):
            stored[match.root] = stored[match.values["x"]]
    steps = tuple(match for match in matches if not match.has("reshape"))
    for value in {*graph.inputs, *(match.root for match in matches)}:
        if graph.types[value].dtype is not DType.INT8 or graph.types[value].shape[0] != 1:
            raise _unfit(f"a value {graph.types[value]}", value)
    sums = {match.root: match.nodes["layer"].output for match in steps if match.has("layer")}
    return StepGraph(graph, steps, stored, sums)


def _alone(match: Match) -> Match:
    """A match in a graph of its own nodes."""
    graph, own = match.graph, {node.output: node for node in match.nodes.values()}
    nodes = tuple(node for node in graph.nodes if node.output in own)
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name not in own)
    inputs = tuple(name for name in read if not graph.is_constant(name))
    constants = {name: graph.constants[name] for name in read if graph.is_constant(name)}
    types = {name: graph.types[name] for name in (*read, *own)}
    return replace(match, graph=Graph(graph.name, inputs, (match.root,), nodes, types, constants))


def _read(match: Match) -> list[str]:
    """The values a match reads, in order."""
    return [value for name, value in match.values.items() if name in ("x", "other") or name[1:].isdigit()]


def _is_refused(match: Match) -> bool:
    """Whether a match computes more than a step says."""
    if any(match.graph.is_constant(value) for value in _read(match)):
        return True
    if match.has("requantize"):
        scaling = match.operator("requantize", Requantize)
        if scaling.input_zero_point or scaling.left_shift:
            return True
    if match.has("sum") or match.has("change"):
        scaling = match.operator("requantize" if match.has("sum") else "change", Requantize)
        per_channel = match.array("multiplier").size > 1
        plain = scaling.rounding is Rounding.DOUBLE and not scaling.left_shift and not per_channel
        return not plain or match.type("x").dtype is not DType.INT8
    if match.has("layer"):
        zero = layers.linear_of(match).input_zero_point
        unfit = any(limit.failure(match) for limit in _LAYER_LIMITS)
        return unfit or layers.window_of(match).padding_value != zero
    if match.has("add"):
        shapes = {match.type("x").shape, match.type("other").shape, match.result.shape}
        return len(shapes) > 1 or any(limit.failure(match) for limit in layers.ADDITION_LIMITS)
    return match.has("mean") and match.operator("mean", AveragePool2d).input_zero_point != 0


def _unfit(what: str, where: str) -> ModelError:
    return ModelError(f"a programming image has no step for {what}", where=where, hint="compile the network instead")


def _zero_points(net: StepGraph) -> dict[str, int]:
    """The number that stands for 0.0 in each value, from the step that reads it, or that writes it."""
    zeros, steps, stored = dict[str, int](), net.matches, net.stored

    def told(value: str, zero: int, match: Match) -> None:
        if zeros.setdefault(stored[value], zero) != zero:
            raise _unfit(f"a value that is read with the zero points {zeros[stored[value]]} and {zero}", match.root)

    for match in reversed(steps):
        if match.has("layer"):
            told(match.values["x"], layers.linear_of(match).input_zero_point, match)
        elif match.has("add"):
            added = layers.addition_of(match)
            told(match.values["x"], added.input_zero_point, match)
            told(match.values["other"], added.other_zero_point, match)
        elif _moves(match) and match.root in zeros:
            for value in _read(match):
                zeros.setdefault(stored[value], zeros[match.root])
    for match in steps:
        scaling = next((name for name in ("requantize", "change") if match.has(name)), None)
        own = (
            match.operator(scaling, Requantize).output_zero_point if scaling else zeros.get(stored[_read(match)[0]], 0)
        )
        zeros.setdefault(match.root, DType.INT8.low if match.has("softmax") else own)
        others = [zeros.setdefault(stored[value], zeros[match.root]) for value in _read(match)] if _moves(match) else []
        if any(zero != zeros[match.root] for zero in others):
            raise _unfit(f"values with the zero points {sorted({*others, zeros[match.root]})} as one", match.root)
    return {**{stored[name]: 0 for name in (*net.graph.inputs, *net.graph.outputs)}, **zeros}


def _moves(match: Match) -> bool:
    """Whether a step's result has the numbers of its operands."""
    return any(match.has(name) for name in ("joined", "slice", "largest", "mean"))


def _sizes(shape: tuple[int, ...], column: int = 1) -> tuple[int, int, int]:
    """Rows, columns and channels of a value of one image, one matrix or one vector; `column` where it has none."""
    return (shape[1], shape[2], shape[3]) if len(shape) == 4 else (prod(shape[1:-1]), column, shape[-1])


class _ConstantMemory:
    """The first bytes of the memory, put together."""

    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def end(self) -> int:
        """The next address."""
        return -(-len(self.data) // ALIGNMENT) * ALIGNMENT

    def add(self, array: Array) -> int:
        """The address of an array that is added."""
        start = self.end
        self.data += bytes(start - len(self.data)) + np.ascontiguousarray(array).tobytes()
        return start


def _constants(match: Match, form: NumberFormat) -> list[Array]:
    """Weights, biases and scales of a step; the scales of an addition or of a pool."""
    if match.has("sum") or match.has("change"):
        return [np.concatenate([match.array(name) for name in ("multiplier", "shift")]).astype("<i4")]
    if not match.has("layer") and not match.has("add"):
        return []
    constants = constants_of(match)
    if "weights" in constants:
        constants["weights"] = constants["weights"].astype(f"<i{form.element}") << form.weight_shift
    return list(constants.values())


def _step(
    match: Match, constants: Sequence[int], place: Callable[[str], FeatureMap], works: Mapping[str, MultiplierLayer]
) -> Step:
    if match.has("joined"):
        axis = match.operator("joined", Concat).axis - len(match.result.shape) + 3
        return JoinStep(2 if axis == 2 else max(axis, 0), tuple(map(place, _read(match))), place(match.root))
    source, result = place(match.values["x"]), place(match.root)
    if match.has("layer"):
        return _layer_step(match, constants, source, result, works[match.nodes["layer"].output])
    if match.has("add"):
        added = layers.addition_of(match)
        zeros = (added.input_zero_point, added.other_zero_point)
        return AdditionStep(source, place(match.values["other"]), result, *zeros, constants[0], limits_of(match))
    if match.has("slice"):
        part = match.operator("slice", Slice)
        return SliceStep(source, result, _sizes(part.start, 0), _sizes(part.step))
    if match.has("softmax"):
        softmax = match.operator("softmax", FixedSoftmax)
        return SoftmaxStep(source, result, softmax.multiplier, softmax.shift, softmax.diff_min)
    return _pool_step(match, constants, source, result)


def _pool_step(match: Match, constants: Sequence[int], source: FeatureMap, result: FeatureMap) -> PoolStep:
    name = next(name for name in _POOLS if match.has(name))
    pool = SumPool2d((1, 1), (1, 1)) if name == "change" else match.operator(name, Pool2d)
    (top, bottom), (left, right) = pool.padding
    zero = own = 0
    if name == "change":
        scaling = match.operator("change", Requantize)
        zero, own = scaling.input_zero_point, scaling.output_zero_point
    elif name == "sum":
        zero = match.operator("sum", SumPool2d).input_zero_point
        own = match.operator("requantize", Requantize).output_zero_point
    clip = match.operator("clip", Clip) if match.has("clip") else Clip(DType.INT8.low, DType.INT8.high, DType.INT8)
    limits, around = StageLimits(own, clip.low, clip.high), Sides(top, left, bottom, right)
    scales = constants[0] if constants else 0
    return PoolStep(_POOLS[name], source, result, *pool.kernel, *pool.stride, around, zero, scales, limits)


def _layer_step(
    match: Match, constants: Sequence[int], source: FeatureMap, result: FeatureMap, work: MultiplierLayer
) -> LayerStep:
    window, zero = layers.window_of(match), layers.linear_of(match).input_zero_point
    sizes = (*window.kernel, window.stride, window.dilation, work.layer.groups)
    bits = bits_of_sums(match.array("weights"), work.kind, zero)
    around = Sides(*window.before, *window.after)
    weights, bias, scales = constants
    limits = limits_of(match)
    return LayerStep(work.kind, source, result, around, *sizes, zero, weights, bias, scales, limits, bits)
