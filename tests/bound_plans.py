"""Random small networks and random plans of them, with their bounds and the cycles they take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from dovetail.bounds import model_bound
from dovetail.codegen.emit.plan_file import model_work
from dovetail.codegen.manifest import BuildManifest
from dovetail.compile import Compiled, Options, compile_graph
from dovetail.errors import DovetailError
from dovetail.guests.report.least import leasts, network_least
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d
from dovetail.ir.types import DType
from dovetail.legalize import adapt
from dovetail.schedule.knobs import region_space
from dovetail.schedule.partition import initial_partition
from dovetail.target import Target
from dovetail.target.pattern import Choice, Space
from networks import Net

LAYERS: tuple[type[Operator], ...] = (Conv2d, DepthwiseConv2d, FullyConnected, AveragePool2d, MaxPool2d)
TARGETS = ("ne16", "macarray", "kestrel", "vta", "diana", "riscv")


class ShiftNet(Net):
    """A network whose sums are only shifted, as DIANA takes them."""

    def _constants(self, shape: tuple[int, ...]) -> list[str]:
        return super()._constants(shape)[:1]

    def limited(self, sums: str, stem: str, shape: tuple[int, ...], relu: bool) -> str:
        """As `Net` has it, with one power of two for all channels, and the bias there."""
        amount = int(np.ceil(np.log2(75 * 24 * np.sqrt(np.prod(shape[1:])) / 40)))
        offsets = self.random.integers(-4096, 4096, shape[0])
        values = ([1], offsets, [amount])
        names = [self.builder.constant("shifts", np.array(value, np.int32)) for value in values]
        scaled = self.builder.add(ScaleShift(), [sums, *names])
        return self.builder.add(Clip(0 if relu else -128, 127, DType.INT8), [scaled], stem)


def network(seed: int, target: str) -> Graph:
    """Three to six layers, each an operator of the model, on 5 to 14 pixels a side or three times as many."""
    random = np.random.default_rng(seed)
    size, channels = int(random.integers(5, 15)), int(random.choice([1, 3, 4, 8, 16, 20]))
    size *= 3 if seed % 5 == 4 else 1  # large enough to be cut in bands
    kind_of_net = ShiftNet if target == "diana" else Net
    net = kind_of_net(f"small_{seed}", (size, size, channels), weights=int(random.choice([1, 7, 127])), seed=seed)
    x = net.x
    for number in range(int(random.integers(3, 7))):
        outputs, stem = int(random.choice([4, 8, 12, 16, 24, 32, 40])), f"v{number}"
        rows, _, inputs = net.builder.type_of(x).shape[1:]
        kind = random.choice(["conv", "conv", "pointwise", "depthwise", "strided", "sum", "pool"])
        if kind == "depthwise" and rows > 2:
            x = depthwise(net, x, stem)
        elif kind == "sum":
            x = net.addition(x, net.convolution(x, inputs, 3, f"{stem}_left"), stem)
        elif kind == "pool" and rows > 3:
            x = net.pool(x)
        else:
            stride = 2 if kind == "strided" and rows > 3 else 1
            x = net.convolution(x, outputs, 1 if kind == "pointwise" else 3, stem, stride=stride)
    if random.integers(2):
        x = net.dense(net.mean(x, "mean"), int(random.choice([2, 10])), "end")
    return _numbered(net.finish(x))


def depthwise(net: Net, x: str, stem: str) -> str:
    """A depthwise layer of 3x3 with padding."""
    channels = net.builder.type_of(x).shape[-1]
    edge = (0, 1, 1, 0)
    padded = net.builder.add(Pad(edge, edge, net.zero_point), [x], f"{stem}_pad")
    weights = net.random.integers(-net.weights, net.weights + 1, (1, 3, 3, channels)).astype(np.int8)
    operands = [padded, net.builder.constant("weights", weights)]
    if not isinstance(net, ShiftNet):
        bias = net.random.integers(-4096, 4096, channels).astype(np.int32)
        operands.append(net.builder.constant("bias", bias))
    sums = net.builder.add(DepthwiseConv2d((1, 1), input_zero_point=net.zero_point), operands)
    return net.limited(sums, stem, (channels, 3, 3), relu=False)


def _numbered(graph: Graph) -> Graph:
    """Each layer with what follows it as an operator of the model of its own."""
    nodes, number = [], 0
    for node in graph.nodes:
        number += isinstance(node.operator, LAYERS)
        nodes.append(replace(node, origin=f"layer_{number}"))
    return replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True)
class Drawn:
    """A random plan: its bounds, and its cycles by the clock."""

    compiled: Compiled
    graph: Graph
    choices: Mapping[str, Choice]
    bound: float
    least: float
    cycles: int

    def executed(self, target: Target) -> int:
        """Its cycles in `iss`, its outputs compared; without pins, which choices carry."""
        return measured(self.graph, target, None, self.choices)


def plans(graph: Graph, target: Target, seed: int, count: int) -> Iterator[Drawn]:
    """Random plans of a network: tiles, orders, buffers, modes and places of each of its layers. What does not fit is
    left out; the first is the planner's own."""
    random, work = np.random.default_rng(seed), model_work(graph)
    graph = adapt(graph, target.policy(None))
    spaces = {region.name: region_space(region, target) for region in initial_partition(graph, target)}
    for number in range(count):
        choices = {name: _point(space, random) for name, space in spaces.items() if number and random.random() < 0.8}
        try:
            compiled = compile_graph(
                graph, target, Options(), choices={n: c for n, c in choices.items() if c}, interpret=False, work=work
            )
        except DovetailError:
            continue
        manifest = msgspec.json.decode(compiled.project.files["dovetail.json"], type=BuildManifest)
        plan = json.loads(compiled.project.files["dovetail-plan.json"])
        least, _ = network_least(manifest, plan, leasts(manifest, plan, graph, target), target)
        bound = model_bound(manifest.operators, target).cycles
        assert manifest.estimated is not None
        yield Drawn(compiled, graph, {n: c for n, c in choices.items() if c}, bound, least, manifest.estimated)


def _point(space: Space, random: np.random.Generator) -> Choice:
    """A random choice that is allowed; nothing where a hundred are not."""
    for _ in range(100 if space.size > 1 else 0):
        point = space.point(int(random.integers(space.size)))
        if space.problem(point) is None:
            return point
    return {}
