"""A network as MAERI sees it: layers of dot products, and the cycles from which their inputs exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from dovetail.errors import ModelError
from dovetail.ir.crop import macs
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, Convolution, DepthwiseConv2d, FullyConnected
from dovetail.ir.pattern import Apply, apply, constant, occurrence, operand, rest
from dovetail.ir.types import Box, TensorType, full_box
from dovetail.records import Record


class OrderLayer(Record):
    """Sizes of a convolution, with the input's padding; a dense layer is a convolution of 1x1."""

    rows: int
    """Rows of the kernel."""
    columns: int
    channels: int
    """Input channels of one group."""
    filters: int
    """Output channels of one group."""
    in_rows: int
    in_columns: int
    groups: int = 1
    strides: tuple[int, int] = (1, 1)
    """Rows and columns from one window to the next."""
    dilations: tuple[int, int] = (1, 1)
    """Rows and columns from one tap of the kernel to the next."""

    @property
    def span(self) -> tuple[int, int]:
        """Rows and columns that a window covers."""
        down, across = self.dilations
        return (self.rows - 1) * down + 1, (self.columns - 1) * across + 1

    @property
    def out_rows(self) -> int:
        """Rows of the result."""
        return (self.in_rows - self.span[0]) // self.strides[0] + 1

    @property
    def out_columns(self) -> int:
        """Columns of the result."""
        return (self.in_columns - self.span[1]) // self.strides[1] + 1

    @property
    def taps(self) -> int:
        """Products of one sum."""
        return self.rows * self.columns * self.channels

    @property
    def macs(self) -> int:
        """Products of the layer."""
        return self.taps * self.filters * self.groups * self.out_rows * self.out_columns


_X, _WEIGHTS = operand("x"), constant("weights")
_CONVOLUTION: Apply[Convolution] = apply((Conv2d, DepthwiseConv2d), _X, _WEIGHTS, rest("bias"))
_DENSE = apply(FullyConnected, _X, _WEIGHTS, rest("bias"))
_LONGEST_NAME = 40
"""Letters of a layer's own name that rules and tables go by."""
Times = npt.NDArray[np.int64]
"""Cycle from which each [channel, row] of a value exists."""


class MultiplierLayer(Record):
    """A layer of the network on the multipliers."""

    node: Node
    """A convolution without padding, or a dense layer, with constant weights."""
    name: str
    """As the user's model calls it."""
    layer: OrderLayer
    family: str
    """Kind of layer in the words of rules: convolution, depthwise or dense."""
    turned: bool = False
    """Whether the layer is a dense one of a single vector, which stays in the multipliers. The vector is the one
    filter, and the rows of weights are sent past it as inputs, a position each."""

    @property
    def is_image(self) -> bool:
        """Whether the result has rows and columns; a dense layer's is one row."""
        return self.family != "dense"

    @property
    def outputs(self) -> int:
        """Filters of all groups, in the layer's own words: one where it is turned."""
        return self.layer.filters * self.layer.groups

    @property
    def channels(self) -> int:
        """Channels of the result."""
        return self.positions if self.turned else self.outputs

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


@dataclass(frozen=True)
class OrderNetwork:
    """A graph with its layers."""

    graph: Graph
    works: tuple[MultiplierLayer, ...]
    """In the graph's order, so that each comes after those it reads."""
    _reached: dict[tuple[int, int], npt.NDArray[np.bool_]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a network without layers."""
        if not self.works:
            hint = "choose a network with a convolution or dense layer"
            raise ModelError("the network has no convolution and no dense layer", where=self.graph.name, hint=hint)

    @cached_property
    def _sources(self) -> list[set[str]]:
        """Results of layers and inputs of the network that each layer's operand is made from, with no layer between."""
        producers, computed = self.graph.producers(), {work.node.output for work in self.works}
        sources = []
        for work in self.works:
            waiting, seen = [work.node.inputs[0]], set[str]()
            while waiting:
                value = waiting.pop()
                if value not in seen and value not in computed and value in producers:
                    waiting.extend(producers[value].inputs)
                seen.add(value)
            sources.append(seen & (computed | set(self.graph.inputs)))
        return sources

    def earlier(self, number: int) -> list[int]:
        """The layers that a layer's operand is made from, without any other layer between."""
        return [other for other, work in enumerate(self.works) if work.node.output in self._sources[number]]

    def inputs(self, number: int) -> list[str]:
        """The network's inputs that a layer's operand is made from, without any other layer between."""
        return [name for name in self.graph.inputs if name in self._sources[number]]

    def reached(self, number: int, earlier: int) -> npt.NDArray[np.bool_]:
        """[output channel of an earlier layer, channel of an operand]: whether the other is made from the one."""
        if (number, earlier) not in self._reached:
            source, value, rows = self.works[earlier], self.works[number].node.inputs[0], list[npt.NDArray[np.bool_]]()
            others = {
                work.node.output: np.zeros((work.channels, work.layer.out_rows if work.is_image else 1), np.int64)
                for work in self.works
            }
            for channel in range(source.channels):
                marked = np.zeros_like(others[source.node.output])
                marked[channel] = 1
                times = exists_from(self.graph, value, {**others, source.node.output: marked})
                rows.append(times.max(axis=1) > 0)
            self._reached[number, earlier] = np.array(rows)
        return self._reached[number, earlier]

    @cached_property
    def ancestors(self) -> list[set[int]]:
        """The layers that each layer's operand is made from, directly or not."""
        ancestors: list[set[int]] = []
        for number in range(len(self.works)):
            earlier = self.earlier(number)
            ancestors.append(set(earlier).union(*(ancestors[other] for other in earlier)))
        return ancestors


def network(graph: Graph) -> OrderNetwork:
    """Find the layers of a graph of one image.

    Raises:
        ModelError: the graph has no layer, or products that no order can hold.
    """
    works = tuple(layers_in(graph))
    held = {work.node.output for work in works}
    for node in graph.nodes:
        if node.output not in held and not graph.is_constant(node.inputs[0]) and (count := macs(graph, node)):
            raise _refusal(graph, node, count)
    return OrderNetwork(graph, works)


def layers_in(graph: Graph) -> Iterator[MultiplierLayer]:
    """The layers of a graph, each under a name of its own."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        layer = _convolution(graph, node) or _dense(graph, node)
        if layer is not None and not graph.is_constant(node.inputs[0]):
            stem = own_name(node.origin or node.output)
            counts[stem] = counts.get(stem, 0) + 1
            yield replace(layer, name=stem if counts[stem] == 1 else f"{stem}_{counts[stem]}")


def own_name(origin: str) -> str:
    """The layer's own name where the model has a handy one: the name in brackets behind the operator's."""
    operator, _, own = origin.removesuffix(")").partition(" (")
    return own if own and len(own) <= _LONGEST_NAME and ";" not in own else operator


def _convolution(graph: Graph, node: Node) -> MultiplierLayer | None:
    """A convolution of one image as a layer, without its name; None for any other operator."""
    if (match := occurrence(_CONVOLUTION, graph, node)) is None:
        return None
    operator, x, w = match[_CONVOLUTION], match.type(_X).shape, match.type(_WEIGHTS).shape
    if x[0] != 1:
        return None
    depthwise = operator.weight_axis == 3
    groups = x[3] if depthwise else x[3] // w[3]
    sizes = (w[1], w[2], x[3] // groups, w[operator.weight_axis] // groups, x[1], x[2], groups)
    layer = OrderLayer(*sizes, operator.stride, operator.dilation)
    return MultiplierLayer(node, "", layer, "depthwise" if depthwise else "convolution")


def _refusal(graph: Graph, node: Node, count: int) -> ModelError:
    """The error of an operator whose products no order can hold."""
    where, kind = node.origin or node.output, type(node.operator).__name__
    if occurrence(_CONVOLUTION, graph, node):
        what = f"it is a {kind} of {graph.types[node.inputs[0]].shape[0]} images"
        return ModelError(f"{what}; an order is for one", where=where, hint="export the model with a batch of 1")
    what = f"{kind} is no convolution and no dense layer with constant weights"
    what = f"its {count:,} products would be in no order: {what}"
    return ModelError(what, where=where, hint="order the layers before and after it as networks of their own")


def _dense(graph: Graph, node: Node) -> MultiplierLayer | None:
    """A dense layer without its name; None for any other operator."""
    if (match := occurrence(_DENSE, graph, node)) is None:
        return None
    vectors, w = prod(match.type(_X).shape[:-1]), match.type(_WEIGHTS).shape
    sizes = (1, w[0], 1) if vectors == 1 else (w[0], vectors, 1)
    return MultiplierLayer(node, "", OrderLayer(1, 1, w[1], *sizes), "dense", vectors == 1)


def exists_from(graph: Graph, value: str, results: Mapping[str, Times]) -> Times:
    """The cycle from which each channel and row of a value exists, by those of the layers' results; inputs exist from
    cycle 0."""
    producers = graph.producers()
    times: dict[str, Times] = dict(results)

    def times_of(name: str) -> Times:
        if name not in times:
            if name in producers:
                node = producers[name]
                times[name] = _passed_on(graph, node, [times_of(each) for each in node.inputs])
            else:
                times[name] = np.zeros(_extent(graph.types[name]), np.int64)
        return times[name]

    return times_of(value)


def _extent(kind: TensorType) -> tuple[int, int]:
    """Channels and rows of a value; a value that is no image has one row."""
    return (kind.shape[-1] if kind.shape else 1, kind.shape[1] if len(kind.shape) == 4 else 1)


def _passed_on(graph: Graph, node: Node, operands: Sequence[Times]) -> Times:
    """Times of the result of an operator between layers: it exists with the last element it is made from."""
    kinds, result = tuple(graph.types[name] for name in node.inputs), graph.types[node.output]
    extent = _extent(result)
    if node.operator.is_elementwise(kinds):
        return np.asarray(np.max([times for times in operands if times.shape == extent], axis=0), np.int64)
    latest, spans = np.zeros(extent, np.int64), _spans(node.operator, kinds, result)
    for number, times in enumerate(operands):
        if spans is None:  # not computed in parts
            np.maximum(latest, times.max(initial=0), out=latest)
        else:
            channels, rows = spans[number]
            np.maximum(latest, _latest(_latest(times, rows, 1), channels, 0), out=latest)
    return latest


_Spans = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""The channels [first, end) of an operand that each channel of the result is made from, and its rows."""


@lru_cache(maxsize=1024)
def _spans(operator: Operator, kinds: tuple[TensorType, ...], result: TensorType) -> list[_Spans] | None:
    """Channels and rows of each operand that are read; None where an operator is not computed in parts."""
    spans = list[list[list[tuple[int, int]]]]()
    for axis, size in zip((-1, 1), _extent(result), strict=True):
        boxes = list[tuple[Box, ...]]()
        for place in range(size):
            box = list(full_box(result.shape))
            if len(result.shape) == 4 or axis == -1:
                box[axis] = (place, place + 1)
            try:
                boxes.append(operator.crop(tuple(box), kinds)[1])
            except ValueError:
                return None
        spans.append([[_span(box[number], kind, result, axis) for box in boxes] for number, kind in enumerate(kinds)])
    return list(zip(*spans, strict=True))


def _span(box: Box, kind: TensorType, result: TensorType, axis: int) -> tuple[int, int]:
    """Channels or rows of an operand's box; one row stands for all where an end is no image."""
    if axis == 1 and not len(kind.shape) == len(result.shape) == 4:
        return 0, _extent(kind)[1]
    return box[axis] if box else (0, 1)


def _latest(times: Times, spans: Sequence[tuple[int, int]], axis: int) -> Times:
    if all(span == (number, number + 1) for number, span in enumerate(spans)):
        return times[: len(spans)] if axis == 0 else times[:, : len(spans)]
    latest = {(low, high): times.take(range(low, high), axis).max(axis, initial=0) for low, high in set(spans)}
    return np.stack([latest[span] for span in spans], axis)
