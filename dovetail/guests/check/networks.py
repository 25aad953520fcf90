"""Layers from whole networks: where none can be made from a pattern alone, an ordinary quantised network goes through
the target's own policies, and what they leave for the pattern is taken. A port may give networks of its own
(`Offload.cases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from dovetail.errors import DovetailError
from dovetail.ir.graph import Graph, GraphBuilder, part_of
from dovetail.ir.operators.activation import Clamp, Softmax, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import Add, Dequantize, Quantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Reshape
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.rewrite import simplify
from dovetail.ir.types import Array, DType, TensorType
from dovetail.legalize import adapt
from dovetail.quantize import quantize
from dovetail.records import Record
from dovetail.target.description import Policy, Target
from dovetail.target.offload import Cases, Offload
from dovetail.target.pattern import Constraint, Match, Pattern, Scope, match_pattern

_MOST = 100_000
"""Elements of a value beyond which no network is made."""
_STEP = 0.0625
"""The scale of activations, about."""


class RealValue(Record):
    """A float value of a network, and the scale of the integers it stands on."""

    name: str
    scale: float


@dataclass
class CheckNetwork:
    """A quantised network while it is made, as a reader gives one; its numbers depend on the settings alone."""

    settings: Mapping[str, int]
    builder: GraphBuilder = field(default_factory=lambda: GraphBuilder("case"))
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(18))

    def scale(self) -> float:
        """Any scale near the usual one; that one itself, a power of two, where the settings want related ones."""
        return _STEP if self.settings["scales"] else float(np.float32(_STEP * self.random.uniform(0.6, 1.6)))

    def input(self, name: str = "x") -> RealValue:
        """An int8 image."""
        s, scale = self.settings, self.scale()
        kind = TensorType((1, s["rows"], s["columns"], s["channels"]), DType.INT8)
        if kind.elements > _MOST:
            raise ValueError("too large to be tried")
        return self._real(self.builder.input(name, kind), scale, s["input_zero"])

    def _pair(self, scale: float | Array, zero: int) -> list[str]:
        scales = np.atleast_1d(np.asarray(scale, np.float32))
        zeros = np.full(scales.shape, zero, np.int32)
        return [self.builder.constant("scale", scales), self.builder.constant("zero", zeros)]

    def _real(self, value: str, scale: float | Array, zero: int, axis: int = -1) -> RealValue:
        real = self.builder.add(Dequantize(axis), [value, *self._pair(scale, zero)], f"{value}_real")
        return RealValue(real, float(np.max(scale)))

    def add(self, operator: Operator, *operands: RealValue, scale: float = 0.0, zero: int | None = None) -> RealValue:
        """An operator, perhaps ReLU behind it, and its result in int8."""
        value = self.builder.add(operator, [one.name for one in operands])
        value = self.builder.add(Clamp(0.0, np.inf), [value]) if self.settings["relu"] else value
        zero, scale = self.settings["output_zero"] if zero is None else zero, scale or self.scale()
        whole = self.builder.add(Quantize(DType.INT8), [value, *self._pair(scale, zero)])
        return self._real(whole, scale, zero)

    def layer(self, x: RealValue, operator: Operator, shape: tuple[int, ...]) -> RealValue:
        """A linear layer with random weights whose results fill a byte."""
        axis = operator.weight_axis
        if prod(shape) > _MOST or axis is None:
            raise ValueError("too large to be tried")
        s, outputs = self.settings, shape[axis]
        each = outputs if s["per_channel"] else 1
        scales = 2.0 ** self.random.integers(-8, -6, each) * (
            1.0 if s["scales"] else self.random.uniform(0.7, 1.4, each)
        )
        weights = self.builder.constant("weights", self.random.integers(-127, 128, shape).astype(np.int8))
        operands = [x, self._real(weights, scales, 0, axis if each > 1 else -1)]
        if s["bias"]:
            bias = self.builder.constant("bias", self.random.integers(-3000, 3001, outputs).astype(np.int32))
            operands.append(self._real(bias, scales * x.scale, 0))
        spread = np.sqrt(prod(shape) / outputs) * 0.5  # of sums of such weights and operands
        return self.add(operator, *operands, scale=self.scale() * float(2.0 ** np.ceil(np.log2(spread))))

    def padded(self, x: RealValue) -> RealValue:
        """The image with a border of 0.0, if there is one."""
        sides = [self.settings[name] for name in ("top", "left", "bottom", "right")]
        border = Pad((0, *sides[:2], 0), (0, *sides[2:], 0), 0.0)
        return RealValue(self.builder.add(border, [x.name]), x.scale) if any(sides) else x

    def both(self, what: str) -> tuple[int, int]:
        """The settings of an axis of rows and of columns."""
        return self.settings[f"{what}_rows"], self.settings[f"{what}_columns"]


def _convolution(net: CheckNetwork, x: RealValue | None = None) -> RealValue:
    operator = Conv2d(net.both("stride"), net.both("dilation"))
    x = net.input() if x is None else x
    return net.layer(net.padded(x), operator, (net.settings["outputs"], *net.both("kernel"), net.settings["channels"]))


def _depthwise(net: CheckNetwork) -> RealValue:
    operator = DepthwiseConv2d(net.both("stride"), net.both("dilation"))
    channels = net.settings["channels"] * net.settings["depth"]
    return net.layer(net.padded(net.input()), operator, (1, *net.both("kernel"), channels))


def _dense(net: CheckNetwork) -> RealValue:
    s, x = net.settings, net.input()
    flat = net.builder.add(Reshape((1, s["rows"] * s["columns"] * s["channels"])), [x.name])
    shape = (s["outputs"], s["rows"] * s["columns"] * s["channels"])
    return net.layer(RealValue(flat, x.scale), FullyConnected(), shape)


def _pooled(kind: type[MaxPool2d] | type[AveragePool2d]) -> Callable[[CheckNetwork], RealValue]:
    def made(net: CheckNetwork) -> RealValue:
        pads = tuple((net.settings[a], net.settings[b]) for a, b in (("top", "bottom"), ("left", "right")))
        x = net.input()
        operator = kind(net.both("kernel"), net.both("stride"), (pads[0], pads[1]))
        return net.add(operator, x, scale=x.scale, zero=net.settings["input_zero"])

    return made


def _mean(net: CheckNetwork) -> RealValue:
    return net.add(AveragePool2d((net.settings["rows"], net.settings["columns"]), (1, 1), scaled_sum=True), net.input())


def _of_two(operator: Operator) -> Callable[[CheckNetwork], RealValue]:
    return lambda net: net.add(operator, net.input("a"), net.input("b"))


def _residual(net: CheckNetwork) -> RealValue:
    """A convolution and its operand added."""
    x = net.input()
    return net.add(Add(), _convolution(net, x), x)


def _then_pool(net: CheckNetwork) -> RealValue:
    x = _convolution(net)
    return net.add(MaxPool2d((2, 2), (2, 2)), x, scale=x.scale, zero=net.settings["output_zero"])


def _function(kind: UnaryKind) -> Callable[[CheckNetwork], RealValue]:
    return lambda net: net.add(Unary(kind), net.input())


NETWORKS: tuple[tuple[str, Callable[[CheckNetwork], RealValue]], ...] = (
    ("a convolution", _convolution),
    ("a depthwise convolution", _depthwise),
    ("a dense layer", _dense),
    ("an addition", _of_two(Add())),
    ("a product", _of_two(Binary(BinaryKind.MULTIPLY))),
    ("a maximum pool", _pooled(MaxPool2d)),
    ("an average pool", _pooled(AveragePool2d)),
    ("a mean", _mean),
    ("a convolution added to its operand", _residual),
    ("a convolution and a pool", _then_pool),
    ("a concatenation", _of_two(Concat(3))),
    ("a logistic function", _function(UnaryKind.SIGMOID)),
    ("a softmax", lambda net: net.add(Softmax(), net.input())),
)
"""The usual networks, in words and as the functions that make them."""


class FromNetworks(Record):
    """How layers of an offload are made from networks: called with settings, it gives the part its pattern matches."""

    pattern: Pattern
    limits: tuple[Constraint, ...]
    policies: tuple[Policy, ...]
    own: Cases | None
    """The port's own networks."""

    def __call__(self, settings: Mapping[str, int]) -> Graph:
        """The part of the network of these settings; raises ValueError where the pattern matches none of it."""
        kind = settings["model"]
        if kind == 0 and self.own is None:
            raise ValueError("the port gives no networks of its own")
        whole = self.own(settings) if kind == 0 and self.own is not None else integer_graph(settings, kind - 1)
        parts = [part for policy in self.policies for part in self._parts(whole, policy)]
        if not parts:
            raise ValueError("no policy makes of it what the pattern matches")
        return min(parts, key=lambda part: part[0])[1]

    def _parts(self, graph: Graph, policy: Policy) -> Iterator[tuple[int, Graph]]:
        """Every part the pattern matches, and how many limits it breaks."""
        try:
            graph = adapt(graph, policy)
        except DovetailError:
            return
        for node in reversed(graph.nodes):
            match = match_pattern(self.pattern, graph, node.output)
            if isinstance(match, Match):
                own_nodes = {one.output for one in match.nodes.values()}
                part = part_of(graph, [one for one in graph.nodes if one.output in own_nodes], "case")
                own = match_pattern(self.pattern, part, node.output)
                assert isinstance(own, Match)
                limits = [limit for limit in self.limits if limit.scope is not Scope.TILES]
                yield next((len(limits) - at for at, limit in enumerate(limits) if limit.failure(own)), 0), part


def integer_graph(settings: Mapping[str, int], kind: int) -> Graph:
    """The integer graph of one of `NETWORKS`; raises ValueError where the settings make none."""
    net = CheckNetwork(settings)
    result = NETWORKS[kind][1](net)
    whole = {node.output: node for node in net.builder.finish([result.name]).nodes}[result.name].inputs[0]
    try:
        return quantize(simplify(net.builder.finish([whole])))
    except DovetailError as error:
        raise ValueError(error.what) from None


def through_policies(target: Target) -> Target:
    """The target with offloads whose layers can also be made from networks."""

    def with_networks(offload: Offload) -> Offload:
        cases = FromNetworks(offload.pattern, offload.constraints, target.policies, offload.cases)
        return replace(offload, cases=cases)

    engines = (replace(engine, offloads=tuple(map(with_networks, engine.offloads))) for engine in target.engines)
    return replace(target, engines=tuple(engines))
