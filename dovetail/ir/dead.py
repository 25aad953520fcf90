"""Channels that change nothing, left out of a graph of the same meaning to the bit.

A channel of a value is dead where whatever reads it multiplies it with zero weights: pruned networks are full of them.
One that is the same number at every place, whatever the input, is a constant: what a layer makes of it goes into that
layer's bias, and then it is dead as well. Channels run along the last axis of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from dovetail.ir.crop import cut_node, joined_boxes
from dovetail.ir.graph import Graph, Node, prune
from dovetail.ir.operators.linear import Linear
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.pattern import Occurrence, apply, constant, occurrence, operand, rest
from dovetail.ir.types import Array, Box, DType, TensorType, frozen, full_box
from dovetail.records import Record

_X, _WEIGHTS = operand("x"), constant("weights")
_LAYER = apply(Linear, _X, _WEIGHTS, rest("bias", known=True))
_WORD = 4
"""Channels are kept by so many: rows of pixels stay aligned to words, and vectors of cores and engines full."""

_Masks = dict[str, Array]
"""For each computed value or input a bool for each of its channels."""
_Followed = Mapping[str, tuple[int | None, ...] | None]
"""`_follows` of the node that computes a value, by the value's name; constants' contents are not asked for."""


def without_dead(graph: Graph) -> Graph:
    """The graph, of the same inputs, outputs and results, without channels nobody needs; itself where all are needed.

    Args:
        graph: of integers or floats; constants are folded into the biases of integer layers only.
    """
    folded = _fold_fixed(graph)
    how = {node.output: _follows(folded, node) for node in folded.nodes}
    live = _spread(folded, _nothing(folded), how)
    if all(mask.all() for mask in live.values()):
        return graph
    blank = _blanked(folded, live)
    return _cut(blank, _spread(blank, _filled_up(blank, live), how), how)


def _follows(graph: Graph, node: Node) -> tuple[int | None, ...] | None:
    """How channels are made where each is made by itself, by the operator's cropping rule; None where they are not.

    Returns:
        For each operand the axis, from the back, along which it has an element for each channel; None where it is read
        whole.
    """
    if (weights := _weights(graph, node)) is not None:
        return (None, -weights.ndim, -1)[: len(node.inputs)]
    channels = graph.types[node.output].shape[-1:]
    if not channels or channels[0] < 2:
        return None
    try:
        whole = cut_node(graph, node, full_box(graph.types[node.output].shape)).reads
        axes = {_axes_of(graph, node, whole, channel) for channel in (0, channels[0] // 2, channels[0] - 1)}
    except ValueError:
        return None
    found = axes.pop()
    for name, axis in zip(node.inputs, found, strict=True):
        last = axis == -1 or name in graph.constants
        if axis is not None and not (last and graph.types[name].shape[axis] == channels[0]):
            return None
    return None if axes else found


def _axes_of(graph: Graph, node: Node, whole: Sequence[Box], channel: int) -> tuple[int | None, ...]:
    """For each operand the axis along which just that channel is read; `whole` has what is read for all channels.

    Raises:
        ValueError: something else is read, or one channel takes another operator.
    """
    box = full_box(graph.types[node.output].shape)
    part = cut_node(graph, node, (*box[:-1], (channel, channel + 1)))
    if part.operator != node.operator:
        raise ValueError("the operator differs with the part it computes")
    return tuple(_axis_of(all_of_it, read, channel) for all_of_it, read in zip(whole, part.reads, strict=True))


def _axis_of(whole: Box, read: Box, channel: int) -> int | None:
    """The axis, from the back, of which just this channel is read, of what is read for all; None where that is read for
    each. Raises ValueError where it is neither."""
    cut = [axis for axis, span in enumerate(read) if span != whole[axis]]
    if cut and (len(cut) > 1 or read[cut[0]] != (channel, channel + 1)):
        raise ValueError("more or less than one channel is read")
    return cut[0] - len(read) if cut else None


def _rows(graph: Graph, node: Node) -> bool:
    """Whether a reshape keeps channels together: rows of the result are whole rows of the operand behind each other."""
    x, y = graph.types[node.inputs[0]].shape, graph.types[node.output].shape
    ends = {prod(x[axis:]) for axis in range(len(x))}
    return node.operator.is_view and bool(x and y) and y[-1] in ends


def _nothing(graph: Graph) -> _Masks:
    """No channel of any value but of inputs and outputs, whose types stay."""
    ends = {*graph.inputs, *graph.outputs}
    values = (name for name in graph.types if name not in graph.constants)
    return {name: np.full(graph.types[name].shape[-1:], name in ends) for name in values}


def _spread(graph: Graph, wanted: _Masks, how: _Followed) -> _Masks:
    """The channels that must be there for those that are wanted, of every value: the smallest such sets."""
    live = {name: mask.copy() for name, mask in wanted.items()}
    while True:
        before = sum(int(mask.sum()) for mask in live.values())
        for node in reversed(graph.nodes):
            _spread_node(graph, node, how[node.output], live)
        if sum(int(mask.sum()) for mask in live.values()) == before:
            return live


def _spread_node(graph: Graph, node: Node, how: tuple[int | None, ...] | None, live: _Masks) -> None:
    """Adds what one node demands."""
    out, operands = live[node.output], [live.get(name) for name in node.inputs]
    if _rows(graph, node) and operands[0] is not None:
        operands[0] |= out.reshape(-1, len(operands[0])).any(axis=0)
        out |= np.tile(operands[0], len(out) // len(operands[0]))
    elif spans := _joined_spans(graph, node):
        for mask, span in zip(operands, spans, strict=True):
            if mask is not None:
                mask |= out[slice(*span)]
            out[slice(*span)] |= True if mask is None else mask
    elif how is None:
        for mask in (out, *operands):
            if mask is not None:
                mask[...] = True
    else:
        for place, (mask, axis) in enumerate(zip(operands, how, strict=True)):
            if mask is None:
                continue
            if axis is not None:
                mask |= out
                out |= mask
            elif mask.all():
                continue
            elif place == 0 and _weights(graph, node) is not None:
                mask |= _products(graph, node)[out].any(axis=0)
            else:
                mask[...] = True


def _joined_spans(graph: Graph, node: Node) -> list[tuple[int, int]]:
    """The stretches of the channels that are operands side by side; none where these lie along another axis."""
    spans = [box[-1] for box in joined_boxes(graph, node)] if node.operator.joins else []
    return spans if len(set(spans)) > 1 else []


def _weights(graph: Graph, node: Node) -> Array | None:
    """The constant weights of a layer that sums over all channels of its first operand."""
    layer = occurrence(_LAYER, graph, node)
    if layer is None or layer[_LAYER].weight_axis != 0:
        return None
    weights = layer.array(_WEIGHTS)
    return weights if weights.shape[-1] == layer.type(_X).shape[-1] else None  # else groups


def _counts(layer: Occurrence) -> Array:
    """Which weights of a layer are not zero, zero point taken off."""
    return np.asarray(layer.array(_WEIGHTS) != np.int64(layer[_LAYER].weight_zero_point))


def _products(graph: Graph, node: Node) -> Array:
    """Whether a layer multiplies a channel of its operand with anything but zero, by (channel of the result, of the
    operand)."""
    layer = occurrence(_LAYER, graph, node)
    assert layer is not None
    counts = _counts(layer)
    return np.asarray(counts.reshape(len(counts), -1, counts.shape[-1]).any(axis=1))


def _filled_up(graph: Graph, live: _Masks) -> _Masks:
    """The masks with dead channels of layers' results added until they are whole words."""
    wanted = dict(live)
    for node in graph.nodes:
        if node.operator.weight_axis is not None:
            mask = live[node.output].copy()
            missing = min(max(-(-int(mask.sum()) // _WORD), 1) * _WORD, len(mask)) - int(mask.sum())
            mask[np.flatnonzero(~mask)[:missing]] = True
            wanted[node.output] = mask
    return wanted


def _blanked(graph: Graph, live: _Masks) -> Graph:
    """The graph with zeros for the weights of dead channels: kept or not, they demand nothing."""
    users = graph.users()
    constants = dict(graph.constants)
    for node in graph.nodes:
        dead, layer = ~live[node.output], occurrence(_LAYER, graph, node)
        if layer is None or _weights(graph, node) is None or not dead.any() or len(users[node.inputs[1]]) > 1:
            continue
        weights = layer.array(_WEIGHTS).copy()
        weights[dead] = layer[_LAYER].weight_zero_point
        constants[node.inputs[1]] = frozen(weights)
    return replace(graph, constants=constants)


def _cut(graph: Graph, kept: Mapping[str, Array], followed: _Followed) -> Graph:
    """The graph with only the channels of `kept`."""
    types: dict[str, TensorType] = {name: graph.types[name] for name in graph.inputs}
    constants: dict[str, Array] = {}
    nodes = []

    def constant(name: str, cuts: Mapping[int, Array]) -> str:
        """A constant of which only some elements along axes are kept, by name; cut in two ways it is there twice."""
        array = graph.constants[name]
        for axis, mask in cuts.items():
            array = np.compress(mask, array, axis=axis)
        new, count = name, 1
        while new in constants and not np.array_equal(constants[new], array):
            new, count = f"{name}_{count}", count + 1
        constants[new] = frozen(np.array(array, order="C"))
        types[new] = TensorType(array.shape, graph.types[name].dtype)
        return new

    for node in graph.nodes:
        out, how, operator = kept[node.output], followed[node.output], node.operator
        cuts: list[dict[int, Array]] = [{} for _ in node.inputs]
        if how is not None:
            cuts = [{} if axis is None else {axis: out} for axis in how]
            if _weights(graph, node) is not None:
                cuts[1][-1] = kept[node.inputs[0]]
        elif _rows(graph, node):
            operator = Reshape((*graph.types[node.output].shape[:-1], int(out.sum())))
        inputs = [
            constant(name, at) if name in graph.constants else name for name, at in zip(node.inputs, cuts, strict=True)
        ]
        types[node.output] = operator.infer([types[name] for name in inputs])
        nodes.append(replace(node, operator=operator, inputs=tuple(inputs)))
    return prune(replace(graph, nodes=tuple(nodes), types=types, constants=constants))


class _ConstantChannels(Record):
    """Channels of a value that are constant, whatever the input is."""

    known: Array
    """Whether a channel is the same number at every place, bool [C]."""
    numbers: Array
    """That number, of the value's own type, [C]; anything where it is not known."""


def _fold_fixed(graph: Graph) -> Graph:
    """The graph with what layers make of constant channels in their biases, and zeros for the weights of these."""
    found: dict[str, _ConstantChannels] = {}
    constants, types, nodes = dict(graph.constants), dict(graph.types), []
    for node in graph.nodes:
        fixed = _fixed(graph, node, found)
        if fixed is not None and fixed.known.any():
            found[node.output] = fixed
        folded = _folded(graph, node, found.get(node.inputs[0]) if node.inputs else None)
        if folded is not None:
            names = [f"{node.output}_{part}_live" for part in ("weights", "bias")]
            while any(name in types for name in names):
                names = [f"{name}_" for name in names]
            kinds = (graph.types[node.inputs[1]].dtype, DType.of(folded[1].dtype))
            for name, array, kind in zip(names, folded, kinds, strict=True):
                constants[name], types[name] = frozen(array), TensorType(array.shape, kind)
            node = replace(node, inputs=(node.inputs[0], *names))
        nodes.append(node)
    return prune(replace(graph, nodes=tuple(nodes), types=types, constants=constants))


def _integer_layer(graph: Graph, node: Node) -> Occurrence | None:
    """A layer of integers whose weights and bias are constant."""
    layer = occurrence(_LAYER, graph, node)
    if layer is None or not (kind := layer.type(_X).dtype).is_integer:
        return None
    return layer if kind.low <= layer[_LAYER].input_zero_point <= kind.high else None


def _folded(graph: Graph, node: Node, x: _ConstantChannels | None) -> tuple[Array, Array] | None:
    """Weights and bias of an integer layer with what its operand's constant channels add in the bias; None without."""
    layer = _integer_layer(graph, node)
    if x is None or layer is None or _weights(graph, node) is None or not _counts(layer)[..., x.known].any():
        return None
    kept = layer.array(_WEIGHTS).copy()
    kept[..., x.known] = layer[_LAYER].weight_zero_point
    return kept, _sums(graph, layer, x)


def _sums(graph: Graph, layer: Occurrence, x: _ConstantChannels) -> Array:
    """The sums of a layer with its bias and its operand's constant channels alone, [O]."""
    row = np.where(x.known, x.numbers, np.array(layer[_LAYER].input_zero_point, x.numbers.dtype))
    return _at_one_place(layer, layer[_LAYER], row, *map(layer.array, layer.nodes[_LAYER].inputs[1:]))


def _at_one_place(layer: Occurrence, operator: Linear, row: Array, *constants: Array) -> Array:
    """The sums of a layer, [O], where its operand is the same row everywhere."""
    window = operator.window([layer.type(_X), layer.type(_WEIGHTS)])
    image = np.broadcast_to(row, (1, *(window.span if window else ()), row.size))
    return operator.evaluate([image, *constants]).reshape(-1)


def _fixed(graph: Graph, node: Node, found: Mapping[str, _ConstantChannels]) -> _ConstantChannels | None:
    """The constant channels of a node's result."""
    layer = _integer_layer(graph, node)
    if layer is not None:
        kind, x = layer.type(_X), found.get(node.inputs[0])
        if x is None:
            if layer[_LAYER].filters(_counts(layer)).any(axis=1).all():
                return None
            x = _ConstantChannels(np.zeros(kind.shape[-1], bool), np.zeros(kind.shape[-1], kind.dtype.numpy))
        bare, counts = layer[_LAYER].with_zero_points(0), _counts(layer).astype(np.int8)
        moved = _at_one_place(layer, bare, (~x.known).astype(np.int8), counts)
        return _ConstantChannels(moved == 0, _sums(graph, layer, x))
    operands = [found.get(name) for name in node.inputs]
    follows = _follows(graph, node) if any(operands) else None
    kind = graph.types[node.output]
    if follows is None or (kind.dtype is DType.FLOAT32 and not node.operator.pointwise):
        return None
    known, arrays = np.ones(kind.shape[-1:], bool), []
    for name, operand_, axis in zip(node.inputs, operands, follows, strict=True):
        array = graph.constants.get(name)
        if array is None and operand_ is not None and axis is not None:
            array, known = np.broadcast_to(operand_.numbers, graph.types[name].shape), known & operand_.known
        if array is None:
            return None
        arrays.append(array)
    results = node.operator.evaluate(arrays).reshape(-1, known.size)
    return _ConstantChannels(known & (results == results[0]).all(axis=0), results[0])
