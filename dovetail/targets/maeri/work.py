"""A network as MAERI sees it: layers of dot products, and when each of their inputs exists.

What is not a layer (padding, pooling, additions, activations, requantisation) happens as values pass and takes no time;
it only carries the dependency on. Time is kept per channel and row of a value: a row exists when its last element does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.errors import ModelError
from dovetail.graph.graph import Graph, Node
from dovetail.graph.types import Box, TensorType, full_box
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.targets.maeri.layer import Layer

_LONGEST_NAME = 40
"""Letters of a layer's own name that rules and tables go by."""
Times = npt.NDArray[np.int64]
"""Cycle from which each [channel, row] of a value exists."""


@dataclass(frozen=True)
class Work:
    """A layer of the network on the multipliers."""

    node: Node
    """A convolution without padding, or a dense layer, with constant weights."""
    name: str
    """As the user's model calls it."""
    layer: Layer
    is_image: bool
    """Whether the result has rows and columns; a dense layer's is one row."""

    @property
    def outputs(self) -> int:
        """Output channels: the filters of all groups."""
        return self.layer.filters * self.layer.groups

    @property
    def positions(self) -> int:
        """Sums per output channel."""
        return self.layer.out_rows * self.layer.out_columns

    @property
    def weights(self) -> int:
        """Weights of all filters."""
        return self.layer.taps * self.outputs

    @property
    def forwards(self) -> bool:
        """Whether neighbouring multipliers can pass inputs on, so that each is sent for a window's last column only."""
        return self.layer.stride == 1 and self.layer.columns > 1

    def rows_read(self, row: int) -> tuple[int, int]:
        """The input rows a row of the result is made from."""
        return row * self.layer.stride, row * self.layer.stride + self.layer.rows


@dataclass(frozen=True)
class Network:
    """A graph with its layers."""

    graph: Graph
    works: tuple[Work, ...]
    """In the graph's order, so that each comes after those it reads."""

    def __post_init__(self) -> None:
        """Refuse what has nothing to compute."""
        if not self.works:
            raise ModelError("the network has no convolution and no dense layer", where=self.graph.name,
                             hint="choose a network with a convolution or dense layer")

    def before(self, work: Work) -> tuple[Work, ...]:
        """The layers a layer's operand is made from, without any other layer between."""
        makers, computed = self.graph.producers(), {each.node.output: each for each in self.works}
        found: dict[str, Work] = {}
        waiting, seen = [work.node.inputs[0]], set[str]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in computed:
                found[value] = computed[value]
            elif value in makers:
                waiting.extend(makers[value].inputs)
        return tuple(each for each in self.works if each.node.output in found)


def network(graph: Graph) -> Network:
    """Find the layers of a graph of one image.

    Raises:
        ModelError: there is none.
    """
    works = []
    names: dict[str, int] = {}
    for node in graph.nodes:
        layer = _layer(node, graph.types) if _is_layer(graph, node) else None
        if layer is not None:
            stem = _short(node.origin or node.output)
            names[stem] = names.get(stem, 0) + 1
            name = stem if names[stem] == 1 else f"{stem}_{names[stem]}"
            works.append(Work(node, name, layer, not isinstance(node.operator, FullyConnected)))
    return Network(graph, tuple(works))


def _short(origin: str) -> str:
    """The layer's own name where the model has a handy one: that in brackets behind the operator's."""
    operator, _, own = origin.removesuffix(")").partition(" (")
    return own if own and len(own) <= _LONGEST_NAME and ";" not in own else operator


def _is_layer(graph: Graph, node: Node) -> bool:
    known = isinstance(node.operator, Conv2d | DepthwiseConv2d | FullyConnected)
    return known and graph.is_constant(node.inputs[1]) and not graph.is_constant(node.inputs[0])


def _layer(node: Node, types: Mapping[str, TensorType]) -> Layer | None:
    """The sizes of a layer; None for several images, or strides that differ along rows and columns."""
    x, w, operator = types[node.inputs[0]].shape, types[node.inputs[1]].shape, node.operator
    if isinstance(operator, FullyConnected):
        positions = int(np.prod(x[:-1]))
        return Layer(1, 1, w[1], w[0], positions, 1)
    assert isinstance(operator, Conv2d | DepthwiseConv2d)
    if x[0] != 1 or operator.stride[0] != operator.stride[1] or operator.dilation != (1, 1):
        return None
    depthwise = isinstance(operator, DepthwiseConv2d)
    groups = x[3] if depthwise else x[3] // w[3]
    filters = w[3] // x[3] if depthwise else w[0] // groups
    return Layer(w[1], w[2], x[3] // groups, filters, x[1], x[2], groups, operator.stride[0])


def exists_from(graph: Graph, value: str, known: Mapping[str, Times]) -> Times:
    """When each channel and row of a value exists, from when the layers' results do.

    Args:
        graph: the network.
        value: whose time is asked for.
        known: times of the layers' results; the network's inputs exist from cycle 0.
    """
    makers = graph.producers()
    found: dict[str, Times] = dict(known)

    def times(name: str) -> Times:
        """Those of a value, found once."""
        if name not in found:
            kind = graph.types[name]
            if name in makers:
                node = makers[name]
                operands = [times(each) for each in node.inputs]
                found[name] = _passed(node, [graph.types[each] for each in node.inputs], kind, operands)
            else:
                found[name] = np.zeros(_extent(kind), np.int64)
        return found[name]

    return times(value)


def _extent(kind: TensorType) -> tuple[int, int]:
    """Channels and rows of a value; what is not an image has one row."""
    return (kind.shape[-1] if kind.shape else 1, kind.shape[1] if len(kind.shape) == 4 else 1)


def _passed(node: Node, kinds: Sequence[TensorType], result: TensorType, operands: Sequence[Times]) -> Times:
    """When the result of an operator between layers exists: with the last of the elements it is made from."""
    channels, rows = _extent(result)
    if node.operator.is_elementwise(kinds):
        moving = [times for times in operands if times.shape == (channels, rows)]
        return np.asarray(np.stack(moving).max(axis=0), np.int64)
    try:
        by_row = [_reads(node, kinds, result, row, 1) for row in range(rows)]
        by_channel = _by_channel(node, kinds, result, channels)
    except ValueError:  # not computed in parts
        return np.full((channels, rows), max(int(each.max(initial=0)) for each in operands), np.int64)
    latest = np.zeros((channels, rows), np.int64)
    for number, (kind, times) in enumerate(zip(kinds, operands, strict=True)):
        images = len(kind.shape) == len(result.shape) == 4
        narrowed = np.zeros((times.shape[0], rows), np.int64)
        for row, boxes in enumerate(by_row):
            low, high = boxes[number][1] if images else (0, times.shape[1])
            narrowed[:, row] = times[:, low:high].max(axis=1, initial=0)
        for channel, boxes in enumerate(by_channel):
            low, high = boxes[number][-1] if boxes[number] else (0, 1)
            latest[channel] = np.maximum(latest[channel], narrowed[low:high].max(axis=0, initial=0))
    return latest


def _by_channel(node: Node, kinds: Sequence[TensorType], result: TensorType, channels: int) -> list[tuple[Box, ...]]:
    """What each channel of the result is made from; where the first and the last are of their own channel only, so are
    those between."""
    ends = [(place, _reads(node, kinds, result, place, -1)) for place in (0, channels - 1)]
    own = all(box[-1] == (place, place + 1) for place, boxes in ends for box in boxes if box)
    if own and all(kind.shape[-1] == channels for kind in kinds if kind.shape):
        return [tuple(((place, place + 1),) if kind.shape else () for kind in kinds) for place in range(channels)]
    return [_reads(node, kinds, result, place, -1) for place in range(channels)]


def _reads(node: Node, kinds: Sequence[TensorType], result: TensorType, place: int, axis: int) -> tuple[Box, ...]:
    """What one row (axis 1) or channel (axis -1) of the result is made from."""
    box = list(full_box(result.shape))
    if len(result.shape) == 4 or axis == -1:
        box[axis] = (place, place + 1)
    return node.operator.crop(tuple(box), kinds)[1]
