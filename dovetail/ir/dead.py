"""Channels that change nothing, left out of a graph of the same meaning to the bit.

A channel of a value is dead where whatever reads it multiplies it with zero weights: pruned networks are full of them.
One that is the same number at every place, whatever the input, is a constant: what a layer makes of it goes into that
layer's bias, and then it is dead as well. Channels run along the last axis of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dovetail.ir.crop import cut_node
from dovetail.ir.graph import Graph, Node, prune
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Concat, Pad, Reshape
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import Array, Box, DType, TensorType, blocks, frozen, full_box

_WORD = 4
"""Channels are kept by so many: rows of pixels stay aligned to words, and vectors of cores and engines full."""

_Masks = dict[str, Array]
"""For each computed value or input a bool for each of its channels."""


def without_dead(graph: Graph) -> Graph:
    """The graph, of the same inputs, outputs and results, without channels nobody needs; itself where all are needed.

    Args:
        graph: of integers or floats; constants are folded into the biases of integer layers only.
    """
    folded = _fold_fixed(graph)
    live = _spread(folded, _nothing(folded))
    if all(mask.all() for mask in live.values()):
        return graph
    blank = _blanked(folded, live)
    return _cut(blank, _spread(blank, _filled_up(blank, live)))


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
        axes = {_axes_of(graph, node, channel) for channel in (0, channels[0] // 2, channels[0] - 1)}
    except ValueError:
        return None
    found = axes.pop()
    for name, axis in zip(node.inputs, found, strict=True):
        last = axis == -1 or name in graph.constants
        if axis is not None and not (last and graph.types[name].shape[axis] == channels[0]):
            return None
    return None if axes else found


def _axes_of(graph: Graph, node: Node, channel: int) -> tuple[int | None, ...]:
    """For each operand the axis along which just that channel is read.

    Raises:
        ValueError: something else is read, or one channel takes another operator.
    """
    box = full_box(graph.types[node.output].shape)
    whole, part = cut_node(graph, node, box), cut_node(graph, node, (*box[:-1], (channel, channel + 1)))
    if part.operator != node.operator:
        raise ValueError("the operator differs with the part it computes")
    return tuple(_axis_of(all_of_it, read, channel) for all_of_it, read in zip(whole.reads, part.reads, strict=True))


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
    return isinstance(node.operator, Reshape) and bool(x and y) and y[-1] in ends


def _nothing(graph: Graph) -> _Masks:
    """No channel of any value but of inputs and outputs, whose types stay."""
    ends = {*graph.inputs, *graph.outputs}
    values = (name for name in graph.types if name not in graph.constants)
    return {name: np.full(graph.types[name].shape[-1:], name in ends) for name in values}


def _spread(graph: Graph, wanted: _Masks) -> _Masks:
    """The channels that must be there for those that are wanted, of every value: the smallest such sets."""
    live = {name: mask.copy() for name, mask in wanted.items()}
    how = {node.output: _follows(graph, node) for node in graph.nodes}
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
    elif isinstance(node.operator, Concat) and node.operator.axis == len(graph.types[node.output].shape) - 1:
        for name, part in zip(node.inputs, _parts(graph, node, out), strict=True):
            if name in live:
                live[name] |= part
                part |= live[name]
            else:
                part[...] = True
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
            elif place == 0 and _weights(graph, node) is not None:
                mask |= _products(graph, node)[out].any(axis=0)
            else:
                mask[...] = True


def _parts(graph: Graph, node: Node, mask: Array) -> list[Array]:
    """The stretches of the channels of a concatenation that are its operands', as views."""
    sizes = [graph.types[name].shape[-1] for name in node.inputs]
    return np.split(mask, np.cumsum(sizes)[:-1].tolist())


def _weights(graph: Graph, node: Node) -> Array | None:
    """The constant weights of a layer that sums over all channels of its first operand."""
    operator = node.operator
    if not isinstance(operator, Conv2d | FullyConnected) or node.inputs[1] not in graph.constants:
        return None
    weights = graph.constants[node.inputs[1]]
    if weights.shape[-1] != graph.types[node.inputs[0]].shape[-1]:
        return None  # groups
    return weights


def _counts(node: Node, weights: Array) -> Array:
    """Which weights of a layer are not zero, zero point taken off."""
    assert isinstance(node.operator, Linear)
    return np.asarray(weights != np.int64(node.operator.weight_zero_point))


def _products(graph: Graph, node: Node) -> Array:
    """Whether a layer multiplies a channel of its operand with anything but zero, by (channel of the result, of the
    operand)."""
    weights = _weights(graph, node)
    assert weights is not None
    return np.asarray(_counts(node, weights).reshape(len(weights), -1, weights.shape[-1]).any(axis=1))


def _filled_up(graph: Graph, live: _Masks) -> _Masks:
    """The masks with dead channels of layers' results added until they are whole words."""
    wanted = dict(live)
    for node in graph.nodes:
        if isinstance(node.operator, Linear):
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
        dead = ~live[node.output]
        if _weights(graph, node) is None or not dead.any() or len(users[node.inputs[1]]) > 1:
            continue
        weights = graph.constants[node.inputs[1]].copy()
        weights[dead] = getattr(node.operator, "weight_zero_point", 0)
        constants[node.inputs[1]] = frozen(weights)
    return replace(graph, constants=constants)


def _cut(graph: Graph, kept: Mapping[str, Array]) -> Graph:
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
        out, how, operator = kept[node.output], _follows(graph, node), node.operator
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


@dataclass(frozen=True)
class _ConstantChannels:
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


def _is_integer_layer(graph: Graph, node: Node) -> bool:
    known = all(name in graph.constants for name in node.inputs[1:])
    return isinstance(node.operator, Linear) and known and graph.types[node.output].dtype is not DType.FLOAT32


def _folded(graph: Graph, node: Node, x: _ConstantChannels | None) -> tuple[Array, Array] | None:
    """Weights and bias of an integer layer with what its operand's constant channels add in the bias; None without."""
    weights = _weights(graph, node) if _is_integer_layer(graph, node) else None
    if x is None or weights is None or not _counts(node, weights[..., x.known]).any():
        return None
    assert isinstance(node.operator, Linear)
    held = graph.types[node.output].dtype.numpy
    bias = graph.constants[node.inputs[2]] if len(node.inputs) > 2 else np.zeros(len(weights), held)
    added = _sums(weights, x, node.operator)
    kept = graph.constants[node.inputs[1]].copy()
    kept[..., x.known] = node.operator.weight_zero_point
    return kept, (bias.astype(np.int64) + added).astype(held)


def _sums(weights: Array, x: _ConstantChannels, operator: Linear) -> Array:
    """Share of the constant channels in each sum: int64 [O]."""
    numbers = np.where(x.known, x.numbers.astype(np.int64) - operator.input_zero_point, 0)
    found = np.empty(len(weights), np.int64)
    for part in blocks(weights):
        wide = weights[part].astype(np.int64) - operator.weight_zero_point
        found[part] = (wide * numbers).reshape(len(wide), -1).sum(axis=1)
    return found


def _fixed(graph: Graph, node: Node, found: Mapping[str, _ConstantChannels]) -> _ConstantChannels | None:
    """The constant channels of a node's result."""
    if _is_integer_layer(graph, node):
        return _fixed_sums(graph, node, found.get(node.inputs[0]))
    operands = [found.get(name) for name in node.inputs]
    x = operands[0] if operands else None
    if isinstance(node.operator, Concat | Reshape) or x is None or _follows(graph, node) is None:
        return None
    if isinstance(node.operator, MaxPool2d):
        return x
    if isinstance(node.operator, Pad):
        return _ConstantChannels(x.known & (x.numbers == x.numbers.dtype.type(node.operator.value)), x.numbers)
    return _fixed_pointwise(graph, node, operands) if node.operator.pointwise else None


def _fixed_sums(graph: Graph, node: Node, x: _ConstantChannels | None) -> _ConstantChannels:
    """Sums in which nothing changes: all that is multiplied with is zero, or all that is multiplied is known."""
    channels = graph.types[node.inputs[0]].shape[-1]
    x = x or _ConstantChannels(np.zeros(channels, bool), np.zeros(channels, graph.types[node.inputs[0]].dtype.numpy))
    held, operator = graph.types[node.output].dtype.numpy, node.operator
    outputs = graph.types[node.output].shape[-1]
    bias = graph.constants[node.inputs[2]].astype(np.int64) if len(node.inputs) > 2 else np.zeros(outputs, np.int64)
    assert isinstance(operator, Linear)
    weights = _weights(graph, node)
    if weights is not None:
        moved = np.asarray(_counts(node, weights[..., ~x.known]).reshape(outputs, -1).any(axis=1))
        return _ConstantChannels(~moved, (bias + _sums(weights, x, operator)).astype(held))
    if not isinstance(operator, DepthwiseConv2d) or outputs != channels:
        return _ConstantChannels(np.zeros(outputs, bool), np.zeros(outputs, held))
    taps = graph.constants[node.inputs[1]].astype(np.int64) - operator.weight_zero_point
    numbers = np.where(x.known, x.numbers.astype(np.int64) - operator.input_zero_point, 0)
    known = x.known | ~(taps != 0).any(axis=(0, 1, 2))
    return _ConstantChannels(known, (bias + taps.sum(axis=(0, 1, 2)) * numbers).astype(held))


def _fixed_pointwise(graph: Graph, node: Node, operands: list[_ConstantChannels | None]) -> _ConstantChannels | None:
    """The constant channels of a pointwise operator's result."""
    shape = graph.types[node.output].shape
    known, arrays = np.ones(shape[-1:], bool), []
    for name, operand in zip(node.inputs, operands, strict=True):
        array = graph.constants.get(name)
        if array is None and operand is not None and operand.known.shape == known.shape:
            array, known = operand.numbers.reshape((1,) * (len(shape) - 1) + known.shape), known & operand.known
        if array is None or prod(array.shape[:-1]) > 1:
            return None
        arrays.append(array)
    return _ConstantChannels(known, np.asarray(node.operator.evaluate(arrays)).reshape(-1))
