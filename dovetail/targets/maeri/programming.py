"""From a network and its order to a programming image: its program as steps, and the numbers of INT8 or INT16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Dequantize, Quantize, Requantize, Rounding
from dovetail.ir.operators.linear import Linear
from dovetail.ir.operators.movement import Pad, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, SumPool2d
from dovetail.ir.pattern import Apply, apply, occurrence
from dovetail.ir.types import DType
from dovetail.target import Match
from dovetail.targets.maeri.coded import (
    INT8,
    LAYER,
    FeatureMap,
    NumberFormat,
    ProgrammingImage,
    StepConstant,
    StepOperator,
    kept_constants,
    operators,
    step_of,
    weights_of,
)
from dovetail.targets.maeri.execute import ALIGNMENT, StepGraph, lowered, size_of, step_graph
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.outputs import Phase, configurations, layer_info

_BEHIND_INPUTS = apply((Quantize, Transpose))
_BEFORE_OUTPUTS = apply((Dequantize, Transpose))
_STEP = apply(get_args(StepOperator))
_PAD, _SCALE, _MEAN, _SOFTMAX = apply(Pad), apply(Requantize), apply(AveragePool2d), apply(FixedSoftmax)
_TELLS: Apply[Any] = apply((Linear, Requantize, SumPool2d))
"""Operators that take the zero point off what they read."""


def programmed(order: NetworkOrder, form: NumberFormat, timeline: Sequence[Phase]) -> ProgrammingImage:
    """The image of a network and its order.

    Args:
        order: the order.
        form: the form of numbers.
        timeline: the order's phases.

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

    def told(value: str, zero: int, match: Match) -> None:
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


def _made(match: Match) -> int | None:
    """The zero point of a step's result; None where its numbers are those of the operands."""
    if operators(_SOFTMAX, match.graph.nodes):
        return DType.INT8.low
    scaled = [scale.output_zero_point for scale in operators(_SCALE, match.graph.nodes)]
    return scaled[-1] if scaled else None
