"""A network as MAERI sees it: layers of dot products, when their inputs exist, and what no order of it can beat."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Box, TensorType, full_box
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig, Rules


@dataclass(frozen=True, slots=True)
class OrderLayer:
    """A convolution; a dense layer is one of 1x1 over a 1x1 image. Sizes of the input are with its padding."""

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
class Work:
    """A layer of the network on the multipliers."""

    node: Node
    """A convolution without padding, or a dense layer, with constant weights."""
    name: str
    """As the user's model calls it."""
    layer: OrderLayer
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
            hint = "choose a network with a convolution or dense layer"
            raise ModelError("the network has no convolution and no dense layer", where=self.graph.name, hint=hint)

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
        layer = _layer(graph, node)
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
        return OrderLayer(1, 1, w[1], w[0], positions, 1)
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


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds of the makespan, in cycles, each for a reason of its own."""

    products: int
    """All multipliers multiply in every cycle, or get a weight where they have no place for further ones."""
    distribution: int
    """Every port sends in every cycle: each weight once, each product's input where neighbours cannot pass it on, else
    that of a window's last column."""
    collection: int
    """Every line takes a sum in every cycle."""
    path: int
    """One layer after the other as they depend on each other, each with all multipliers: a layer begins when the first
    of its inputs can exist and ends when the last of them can have been used."""

    @property
    def cycles(self) -> int:
        """The largest."""
        return max(self.products, self.distribution, self.collection, self.path)


def bound(network: Network, config: MaeriConfig) -> Bound:
    """The lower bounds of a network."""
    works = network.works
    products = sum(work.layer.macs + (0 if config.prefetch else work.weights) for work in works)
    sent = sum(_sent(work, config) for work in works)
    collected = sum(work.outputs * work.positions for work in works)
    path = max(_path(network, config).values())
    return Bound(
        -(-products // config.multipliers), -(-sent // config.distribution), -(-collected // config.collection), path
    )


def _sent(work: Work, config: MaeriConfig) -> int:
    """Values that must pass the distribution tree at least.

    A port gives a value to all its multipliers at once, so per product at most one in `port_width` needs its own.
    """
    share = config.port_width if config.ports else config.multipliers
    inputs = work.layer.macs // (work.layer.columns if work.forwards else 1)
    return work.weights // share + inputs // share


def _path(network: Network, config: MaeriConfig) -> Mapping[int, int]:
    done: dict[int, int] = {}
    numbers = {work.name: number for number, work in enumerate(network.works)}
    for number, work in enumerate(network.works):
        earlier = [numbers[each.name] for each in network.before(work)]
        # The last sum of a layer reads what exists last of some layer before, or of all of them at the same time.
        last = max((done[each] for each in earlier), default=0)
        done[number] = max(_alone(work, config), last + 1 + TAIL_CYCLES)
    return done


def _alone(work: Work, config: MaeriConfig) -> int:
    """Cycles of a layer that has everything for itself."""
    products = work.layer.macs + (0 if config.prefetch else work.weights)
    return max(-(-products // config.multipliers), -(-_sent(work, config) // config.distribution)) + TAIL_CYCLES


def check_rules(rules: Rules, network: Network) -> None:
    """Refuse rules that name no layer, and those that no order can keep.

    Raises:
        ModelError: naming the layer, or the smallest set of rules and dependencies that contradict each other.
    """
    names = {work.name: number for number, work in enumerate(network.works)}
    for name in (name for pair in (*rules.before, *rules.apart) for name in pair):
        if name not in names:
            hint = f"use {', '.join(list(names)[:12])}{' ...' if len(names) > 12 else ''}"
            raise ModelError(f"there is no layer '{name}' in the network", where="rules", hint=hint)
    for x, y in rules.apart:
        if x == y:
            what = f"apart: [{x}, {y}] keeps a layer from itself"
            raise ModelError(what, where="rules", hint="leave this pair out")
    circle = _smallest_circle(rules, network, names)
    if circle:
        what = f"they contradict each other: {'; '.join(circle)}"
        raise ModelError(what, where="rules", hint="leave one of them out")


def _smallest_circle(rules: Rules, network: Network, names: Mapping[str, int]) -> list[str]:
    """The sentences of the shortest circle of what must come before what; empty where there is none."""
    arrows: dict[int, dict[int, str]] = {number: {} for number in names.values()}
    for work in network.works:
        for earlier in network.before(work):
            sentence = f"{work.name} reads what {earlier.name} computes"
            arrows[names[earlier.name]][names[work.name]] = sentence
    for x, y in rules.before:
        arrows[names[x]].setdefault(names[y], f"{x} before {y}")
    circles = (_shortest(arrows, start) for start in arrows)
    return min((circle for circle in circles if circle), key=len, default=[])


def _shortest(arrows: Mapping[int, Mapping[int, str]], start: int) -> list[str]:
    """The sentences of the shortest way from a layer back to itself."""
    waiting: deque[tuple[int, list[str]]] = deque([(start, [])])
    seen = set[int]()
    while waiting:
        place, path = waiting.popleft()
        for to, sentence in arrows[place].items():
            if to == start:
                return [*path, sentence]
            if to not in seen:
                seen.add(to)
                waiting.append((to, [*path, sentence]))
    return []
