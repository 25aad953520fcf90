"""A network as MAERI sees it: layers of dot products, and when their inputs exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Box, TensorType, full_box


@dataclass(frozen=True, slots=True)
class OrderLayer:
    """A convolution; a dense layer is one of 1x1 over a 1x1 image. Sizes of the input are with its padding.
    A dense layer of one vector is turned round: see `Work.turned`."""

    rows: int
    """Of the kernel."""
    columns: int
    channels: int
    """Input channels of one group."""
    filters: int
    """Output channels of one group."""
    in_rows: int
    in_columns: int
    groups: int = 1
    stride: int = 1

    @property
    def out_rows(self) -> int:
        """Rows of the result."""
        return (self.in_rows - self.rows) // self.stride + 1

    @property
    def out_columns(self) -> int:
        """Columns of the result."""
        return (self.in_columns - self.columns) // self.stride + 1

    @property
    def taps(self) -> int:
        """Products of one sum."""
        return self.rows * self.columns * self.channels

    @property
    def macs(self) -> int:
        """Products of the layer."""
        return self.taps * self.filters * self.groups * self.out_rows * self.out_columns


_LONGEST_NAME = 40
"""Letters of a layer's own name that rules and tables go by."""
Times = npt.NDArray[np.int64]
"""Cycle from which each [channel, row] of a value exists."""


@dataclass(frozen=True)
class MultiplierLayer:
    """A layer of the network on the multipliers."""

    node: Node
    """A convolution without padding, or a dense layer, with constant weights."""
    name: str
    """As the user's model calls it."""
    layer: OrderLayer
    is_image: bool
    """Whether the result has rows and columns; a dense layer's is one row."""

    turned: bool = False
    """Whether the layer is a dense one of a single vector, which then stays in the multipliers: it is their one filter,
    and the rows of weights are sent past it as inputs, a position each."""

    @property
    def outputs(self) -> int:
        """Filters of all groups, in the layer's own words: one where it is turned."""
        return self.layer.filters * self.layer.groups

    @property
    def channels(self) -> int:
        """Channels of the result."""
        return self.positions if self.turned else self.outputs

    @property
    def kind(self) -> str:
        """Which kind of layer rules count it to."""
        if isinstance(self.node.operator, FullyConnected):
            return "dense"
        return "depthwise" if isinstance(self.node.operator, DepthwiseConv2d) else "convolution"

    @property
    def positions(self) -> int:
        """Sums per output channel."""
        return self.layer.out_rows * self.layer.out_columns

    @property
    def weights(self) -> int:
        """Weights of all filters."""
        return self.layer.taps * self.outputs

    def of_result(self, times: Times) -> Times:
        """Times by [filter, row of positions] as times by [channel, row] of the layer's result."""
        if self.is_image:
            return times
        return np.ascontiguousarray(times.T) if self.turned else times.max(axis=1, keepdims=True)

    def rows_read(self, row: int) -> tuple[int, int]:
        """The input rows a row of the result is made from."""
        return row * self.layer.stride, row * self.layer.stride + self.layer.rows


@dataclass(frozen=True)
class OrderNetwork:
    """A graph with its layers."""

    graph: Graph
    works: tuple[MultiplierLayer, ...]
    """In the graph's order, so that each comes after those it reads."""

    def __post_init__(self) -> None:
        """Refuse what has nothing to compute."""
        if not self.works:
            hint = "choose a network with a convolution or dense layer"
            raise ModelError("the network has no convolution and no dense layer", where=self.graph.name, hint=hint)

    def before(self, work: MultiplierLayer) -> tuple[MultiplierLayer, ...]:
        """The layers a layer's operand is made from, without any other layer between."""
        makers, computed = self.graph.producers(), {each.node.output: each for each in self.works}
        found: dict[str, MultiplierLayer] = {}
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


def network(graph: Graph) -> OrderNetwork:
    """Find the layers of a graph of one image.

    Raises:
        ModelError: there is none.
    """
    works = []
    names: dict[str, int] = {}
    for node in graph.nodes:
        layer = _layer(graph, node)
        if layer is not None:
            stem = _short(node.origin or node.output)
            names[stem] = names.get(stem, 0) + 1
            name = stem if names[stem] == 1 else f"{stem}_{names[stem]}"
            dense = isinstance(node.operator, FullyConnected)
            turned = dense and all(size == 1 for size in graph.types[node.inputs[0]].shape[:-1])
            works.append(MultiplierLayer(node, name, layer, not dense, turned))
    return OrderNetwork(graph, tuple(works))


def _short(origin: str) -> str:
    """The layer's own name where the model has a handy one: that in brackets behind the operator's."""
    operator, _, own = origin.removesuffix(")").partition(" (")
    return own if own and len(own) <= _LONGEST_NAME and ";" not in own else operator


def _layer(graph: Graph, node: Node) -> OrderLayer | None:
    """The sizes of a layer; None for what is no layer of constant weights, for several images, and for strides that
    differ along rows and columns."""
    operator = node.operator
    if not isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected):
        return None
    x, w = (graph.types[name].shape for name in node.inputs[:2])
    if graph.is_constant(node.inputs[0]) or not graph.is_constant(node.inputs[1]):
        return None
    if isinstance(operator, FullyConnected):
        positions = int(np.prod(x[:-1]))
        return OrderLayer(1, 1, w[1], w[0], positions, 1) if positions > 1 else OrderLayer(1, 1, w[1], 1, w[0], 1)
    if x[0] != 1 or operator.stride[0] != operator.stride[1] or operator.dilation != (1, 1):
        return None
    depthwise = isinstance(operator, DepthwiseConv2d)
    groups = x[3] if depthwise else x[3] // w[3]
    filters = w[3] // x[3] if depthwise else w[0] // groups
    return OrderLayer(w[1], w[2], x[3] // groups, filters, x[1], x[2], groups, operator.stride[0])


def exists_from(graph: Graph, value: str, known: Mapping[str, Times]) -> Times:
    """When each channel and row of a value exists, from when the layers' results (`known`) do; the network's inputs
    exist from cycle 0."""
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
        rows_read = [boxes[number][1] if images else (0, times.shape[1]) for boxes in by_row]
        if rows_read == [(row, row + 1) for row in range(times.shape[1])]:
            narrowed = times
        for row, (low, high) in enumerate(rows_read) if narrowed is not times else ():
            narrowed[:, row] = times[:, low:high].max(axis=1, initial=0)
        spans = [boxes[number][-1] if boxes[number] else (0, 1) for boxes in by_channel]
        if all(span == (channel, channel + 1) for channel, span in enumerate(spans)):
            np.maximum(latest, narrowed[:channels], out=latest)
            continue
        most = {span: narrowed[slice(*span)].max(axis=0, initial=0) for span in set(spans)}
        np.maximum(latest, np.stack([most[span] for span in spans]), out=latest)
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
