"""From a network and its order to a programming image: steps, addresses, and the numbers of INT8 or INT16.

A feature has a place in memory from when the first of it may be written until the last of it has been read, by the
order; features that are never there at the same time may share bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import ModelError
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.activation import FixedSoftmax
from dovetail.ir.operators.arithmetic import Clip, Dequantize, Quantize, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Reshape, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.ir.types import Array, DType
from dovetail.target import Match, Pattern, apply, constant, layers, operand
from dovetail.target.pattern import match_pattern
from dovetail.targets.maeri.network import TaskKind
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.steps import INT8, AdditionStep, FeatureMap, JoinStep, LayerStep, NumberFormat, PoolKind, PoolStep, ProgrammingImage, SoftmaxStep, Step

_ALIGNMENT = 64
_FOREVER = 1 << 62
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
)
"""What is a step. A reshape is none, for it moves nothing."""
Placed = Callable[[str], FeatureMap]


@dataclass(frozen=True)
class StepGraph:
    """A graph as steps."""

    graph: Graph
    matches: tuple[Match, ...]
    """One for each step, in order."""
    kept: Mapping[str, str]
    """The value a value's bytes are, itself where nothing reshapes."""
    zero_points: Mapping[str, int]
    """What stands for 0.0 in each value that is kept."""


def programmed(
    order: NetworkOrder,
    form: NumberFormat,
    infos: Sequence[tuple[int, ...]],
    trees: tuple[tuple[int, ...], ...],
    phases: tuple[tuple[int, int], ...],
) -> ProgrammingImage:
    """The image of a network and its order.

    Args:
        order: the order.
        form: how numbers lie.
        infos: Layer_Info of each layer of the order.
        trees: RN_Config of each configuration.
        phases: (first cycle, configuration) of each phase.

    Raises:
        ModelError: something of the network is no step of an image, or there is no room; says what.
    """
    net = _network(inner(order.network.graph))
    memory = _ConstantMemory(form)
    addresses = [memory.add(match) for match in net.matches]
    features, size = _placed(net, _lives(order, net), form, memory.end())
    room, needed = order.config.feature_memory, size - memory.end()
    if room and needed > room:
        what = f"features of {8 * form.element} bits need {needed:,} bytes, the memory of features has {room:,}"
        raise ModelError(what, where=net.graph.name, hint="raise feature_memory")

    def place(value: str) -> FeatureMap:
        kept = net.kept[value]
        rows, columns, channels = _sizes(net.graph.types[value].shape)
        return FeatureMap(features[kept], rows, columns, channels, 0 if form == INT8 else net.zero_points[kept])

    steps = tuple(_step(match, where, place) for match, where in zip(net.matches, addresses, strict=True))
    sums = {match.nodes["layer"].output: at for at, match in enumerate(net.matches) if match.has("layer")}
    works = [sums[work.node.output] for work in order.network.works]
    words = tuple(infos[works.index(at)] for at in sorted(works))
    items = tuple(replace(item, work=works[item.work]) for item in order.items)
    ends = (tuple(map(place, net.graph.inputs)), tuple(map(place, net.graph.outputs)))
    return ProgrammingImage(
        order.config, form, order.makespan, size, *ends, steps, words, trees, phases, items, memory.data()
    )


def inner(graph: Graph) -> Graph:
    """A network without what the host does: quantising and transposing of inputs, and back of outputs; and without
    inputs that nobody reads."""
    users, makers = graph.users(), graph.producers()
    inputs, outputs, gone = list(graph.inputs), list(graph.outputs), set[str]()
    for at, name in enumerate(inputs):
        while len(users[name]) == 1 and isinstance(users[name][0].operator, Quantize | Transpose):
            name = users[name][0].output
            gone.add(name)
        inputs[at] = name
    for at, name in enumerate(outputs):
        while name in makers and isinstance(makers[name].operator, Dequantize | Transpose) and len(users[name]) == 0:
            gone.add(name)
            name = makers[name].inputs[0]
            users = {**users, name: [node for node in users[name] if node.output not in gone]}
        outputs[at] = name
    nodes = tuple(node for node in graph.nodes if node.output not in gone)
    read = tuple(name for name in inputs if users[name] or name in outputs)
    return replace(graph, inputs=read, outputs=tuple(outputs), nodes=nodes)


def _patterns(node: Node) -> Iterator[Pattern]:
    """What a node may be the last operator of."""
    yield from _PATTERNS
    if isinstance(node.operator, Concat):
        yield apply(Concat, *(operand(f"x{at}") for at in range(len(node.inputs))), name="joined")


def _read(match: Match) -> list[str]:
    """The values a match reads, in order."""
    return [value for name, value in match.values.items() if name in ("x", "other") or name[1:].isdigit()]


def _network(graph: Graph) -> StepGraph:
    if graph.states:
        raise _unfit("a network with states", graph.name)
    matches, covered = list[Match](), set[str]()
    for node in graph.nodes:
        for pattern in _patterns(node):
            found = match_pattern(pattern, graph, node.output)
            if isinstance(found, Match) and not _refusal(found):
                matches.append(found)
                covered |= {each.output for each in found.nodes.values()}
                break
    alone = [node for node in graph.nodes if node.output not in covered]
    if alone:
        node = next((node for node in alone if not isinstance(node.operator, Pad)), alone[0])
        raise _unfit(type(node.operator).__name__, node.origin or node.output)
    kept = {value: value for value in graph.types}
    for match in matches:
        if match.has("reshape"):
            kept[match.root] = kept[match.values["x"]]
    steps = tuple(match for match in matches if not match.has("reshape"))
    values = {*graph.inputs, *(match.root for match in matches)}
    for value in values:
        if graph.types[value].dtype is not DType.INT8 or graph.types[value].shape[0] != 1:
            raise _unfit(f"a value {graph.types[value]}", value)
    return StepGraph(graph, steps, kept, _zero_points(graph, steps, kept))


def _refusal(match: Match) -> bool:
    """Whether what a match computes is more than a step says."""
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
        limits = (*layers.INT8, layers.DOUBLE_ROUNDING, layers.NO_DILATION, layers.EVEN_STRIDES)
        window = layers.window_of(match)
        return any(limit.failure(match) for limit in limits) or window.padding_value != _zero_of(match)
    if match.has("add"):
        shapes = {match.type("x").shape, match.type("other").shape, match.result.shape}
        return len(shapes) > 1 or any(limit.failure(match) for limit in layers.ADDITION_LIMITS)
    if match.has("mean"):
        return match.operator("mean", AveragePool2d).input_zero_point != 0
    return False


def _zero_of(match: Match) -> int:
    return layers.linear_of(match).input_zero_point


def _unfit(what: str, where: str) -> ModelError:
    return ModelError(f"a programming image has no step for {what}", where=where, hint="compile the network instead")


def _zero_points(graph: Graph, steps: Sequence[Match], kept: Mapping[str, str]) -> dict[str, int]:
    """What stands for 0.0 in each value, from who makes it, or reads it."""
    found: dict[str, int] = {}
    for match in steps:
        x = kept[_read(match)[0]]
        if match.has("layer"):
            found.setdefault(x, _zero_of(match))
            if found[x] != _zero_of(match):
                raise _unfit(f"a value that is read with the zero points {found[x]} and {_zero_of(match)}", match.root)
        if match.has("add"):
            added = layers.addition_of(match)
            found.setdefault(x, added.input_zero_point)
            found.setdefault(kept[match.values["other"]], added.other_zero_point)
        scaled = next((name for name in ("requantize", "change") if match.has(name)), None)
        own = match.operator(scaled, Requantize).output_zero_point if scaled else found.setdefault(x, 0)
        found[match.root] = DType.INT8.low if match.has("softmax") else own
    return {**{kept[name]: 0 for name in (*graph.inputs, *graph.outputs)}, **found}


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Rows, columns and channels of a value of one image, one matrix or one vector."""
    if len(shape) == 4:
        return shape[1], shape[2], shape[3]
    return int(np.prod(shape[1:-1], dtype=np.int64)), 1, shape[-1]


class _ConstantMemory:
    """The first bytes of the memory, put together."""

    def __init__(self, form: NumberFormat) -> None:
        self.form, self.parts, self.size = form, list[bytes](), 0

    def add(self, match: Match) -> tuple[int, ...]:
        """Addresses of a step's weights, biases and scales; of an addition's scales."""
        if match.has("add"):
            return (self._put(layers.addition_of(match).scales.astype("<i4")),)
        if match.has("sum") or match.has("change"):
            return (self._put(np.concatenate([match.array(name) for name in ("multiplier", "shift")]).astype("<i4")),)
        if not match.has("layer"):
            return ()
        layer = layers.layer_of(match)
        weights = match.array("weights").astype(f"<i{self.form.element}") << self.form.weight_shift
        scales = np.stack([layer.multiplier, layer.shift], axis=1)
        return tuple(self._put(each) for each in (weights, layer.bias.astype("<i4"), scales.astype("<i4")))

    def _put(self, array: Array) -> int:
        start = self.end()
        self.parts.append(bytes(start - self.size) + np.ascontiguousarray(array).tobytes())
        self.size = start + array.nbytes
        return start

    def end(self) -> int:
        """The next address."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT

    def data(self) -> bytes:
        """All of them, in order."""
        return b"".join(self.parts)


def _step(match: Match, constants: Sequence[int], place: Placed) -> Step:
    """What a match does, where."""
    if match.has("joined"):
        axis = match.operator("joined", Concat).axis - len(match.result.shape) + 3
        return JoinStep(2 if axis == 2 else max(axis, 0), tuple(map(place, _read(match))), place(match.root))
    source, result = place(match.values["x"]), place(match.root)
    if match.has("layer"):
        return _layer(match, constants, source, result)
    if match.has("add"):
        added = layers.addition_of(match)
        zeros = (added.input_zero_point, added.other_zero_point)
        limits = (added.output_zero_point, added.low, added.high)
        return AdditionStep(source, place(match.values["other"]), result, *zeros, constants[0], *limits)
    if match.has("softmax"):
        softmax = match.operator("softmax", FixedSoftmax)
        return SoftmaxStep(source, result, softmax.multiplier, softmax.shift, softmax.diff_min)
    return _pool(match, constants, source, result)


def _pool(match: Match, constants: Sequence[int], source: FeatureMap, result: FeatureMap) -> PoolStep:
    kinds = {"mean": PoolKind.MEAN, "largest": PoolKind.LARGEST, "sum": PoolKind.SUM, "change": PoolKind.SUM}
    name = next(name for name in kinds if match.has(name))
    operator = match.nodes[name].operator
    pool = operator if isinstance(operator, Pool2d) else SumPool2d((1, 1), (1, 1))
    (top, bottom), (left, right) = pool.padding
    scaling = match.nodes["requantize" if match.has("requantize") else name].operator
    zero, own = 0, 0
    if isinstance(scaling, Requantize):
        zero = scaling.input_zero_point if name == "change" else match.operator("sum", SumPool2d).input_zero_point
        own = scaling.output_zero_point
    clip = match.operator("clip", Clip) if match.has("clip") else None
    low, high = (clip.low, clip.high) if clip else (DType.INT8.low, DType.INT8.high)
    sizes = (*pool.kernel, *pool.stride, top, left, bottom, right)
    scales = constants[0] if constants else 0
    return PoolStep(kinds[name], source, result, *sizes, zero, scales, own, low, high)


def _layer(match: Match, constants: Sequence[int], source: FeatureMap, result: FeatureMap) -> LayerStep:
    layer, operator = layers.layer_of(match), layers.linear_of(match)
    turned = isinstance(operator, FullyConnected) and source.rows * source.columns == 1
    depthwise = isinstance(operator, DepthwiseConv2d)
    groups = source.channels if depthwise else 1 if turned else source.channels // layer.weights.shape[3]
    weights, bias, scales = constants
    return LayerStep(
        kind=TaskKind.TURNED if turned else TaskKind.DEPTHWISE if depthwise else TaskKind.CONVOLUTION,
        source=source,
        result=result,
        top=layer.before[0],
        left=layer.before[1],
        bottom=layer.after[0],
        right=layer.after[1],
        rows=layer.kernel[0],
        columns=layer.kernel[1],
        stride=layer.stride[0],
        groups=groups,
        zero_point=layer.input_zero_point,
        weights=weights,
        bias=bias,
        scales=scales,
        output_zero_point=layer.output_zero_point,
        low=layer.low,
        high=layer.high,
        sum_bits=_sum_bits(layer.weights, depthwise, layer.input_zero_point),
    )


def _sum_bits(weights: Array, depthwise: bool, zero_point: int) -> int:
    """Bits, sign included, that hold every sum of a layer, and every part of one."""
    by_filter = np.moveaxis(weights[0], -1, 0) if depthwise else weights
    rows = by_filter.reshape(len(by_filter), -1).astype(np.int64)
    ends = [rows * (end - zero_point) for end in (DType.INT8.low, DType.INT8.high)]
    most = np.maximum(*ends).clip(0).sum(axis=1).max()
    least = np.minimum(*ends).clip(None, 0).sum(axis=1).min()
    return max(int(most).bit_length(), int(-least - 1).bit_length()) + 1


def _lives(order: NetworkOrder, net: StepGraph) -> dict[str, tuple[int, int]]:
    """From when to when the bytes of each value are taken, in cycles. What is no layer takes no time of its own."""
    spans: dict[str, tuple[int, int]] = {}
    for item in order.items:
        sums = order.work(item).node.output
        begin, end = spans.get(sums, (item.start, 0))
        spans[sums] = min(begin, item.start), max(end, order.end(item))
    made: dict[str, tuple[int, int]] = dict.fromkeys(map(net.kept.__getitem__, net.graph.inputs), (0, 0))
    lives = dict(made)
    for match in net.matches:
        read = [net.kept[value] for value in _read(match)]
        begin, end = min(made[value][0] for value in read), max(made[value][1] for value in read)
        made[match.root] = spans[match.nodes["layer"].output] if match.has("layer") else (begin, end)
        for value in (*read, match.root):
            first, last = lives.get(value, made[match.root])
            lives[value] = first, max(last, made[match.root][1])
    for name in net.graph.outputs:
        lives[net.kept[name]] = lives[net.kept[name]][0], _FOREVER
    return lives


def _placed(
    net: StepGraph, lives: Mapping[str, tuple[int, int]], form: NumberFormat, base: int
) -> tuple[dict[str, int], int]:
    """An address of each value, the largest first, each as low as it can be; and how many bytes there are."""
    sizes = {name: form.element * net.graph.types[name].elements for name in lives}
    taken: dict[str, int] = {}
    for name in sorted(lives, key=lambda name: (-sizes[name], lives[name], name)):
        begin, until = lives[name]
        meeting = [other for other in taken if lives[other][0] <= until and begin <= lives[other][1]]
        address = base
        for other in sorted(meeting, key=taken.__getitem__):
            if taken[other] >= address + sizes[name]:
                break
            address = max(address, -(-(taken[other] + sizes[other]) // _ALIGNMENT) * _ALIGNMENT)
        taken[name] = address
    return taken, max((taken[name] + sizes[name] for name in taken), default=base)
