"""Random layers, engines and rules for MAERI: `random_case`; each ordered, played and checked by `tried`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import ModelError, TargetError
from dovetail.ir.crop import total_macs
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.types import Array
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, network
from dovetail.targets.maeri.order import NetworkOrder, broken, check
from dovetail.targets.maeri.rules import FAMILIES, Pin, Rules
from networks import limited_net

Random = np.random.Generator


@dataclass(frozen=True)
class Simulation:
    """Outputs and clock cycles of one execution of an order."""

    outputs: Mapping[str, Array]
    """The network's results."""
    cycles: int
    """Cycles until the last of the layers' results exists."""
    products: int
    """Multiplications that belong to a sum."""


def simulate(order: NetworkOrder, inputs: Mapping[str, Array]) -> Simulation:
    """Check an order and compute its results: every product of every sum is added once, so they are the operators'.

    Args:
        order: the order.
        inputs: the network's, by name; and constants to replace.

    Raises:
        SimulationError: the engine cannot do what the order says; names the item, its place and the cycle.
    """
    cycles, graph = check(order), order.network.graph
    constants = {name: inputs.get(name, array) for name, array in graph.constants.items()}
    products = sum(work.layer.macs for work in order.network.works)
    return Simulation(evaluate(replace(graph, constants=constants), inputs), cycles, products)


def random_net(random: Random) -> tuple[Graph, Mapping[str, Array]]:
    """A few layers, in a row or side by side."""
    rows, columns, channels = (int(random.integers(4, high)) for high in (11, 11, 8))
    net = limited_net("random", rows, columns, channels)
    ends = [net.x]
    for _ in range(int(random.integers(1, 5))):
        start = ends[int(random.integers(len(ends)))]
        kernel, stride = int(random.choice([1, 2, 3, 5])), int(random.integers(1, 3))
        made = net.convolution(start, int(random.integers(1, 14)), kernel, stride=stride, relu=True)
        ends = [*ends, made] if random.random() < 0.5 else [made]
    if random.random() < 0.4:
        ends.append(net.dense(ends[-1], int(random.integers(1, 12))))
    outputs = [end for end in ends if end != net.x]
    return net.builder.finish(outputs), net.inputs()


def random_config(random: Random) -> MaeriConfig:
    """Any engine."""
    multipliers = int(random.choice([16, 32, 64, 128]))
    widths = [int(2 ** random.integers(2, int(np.log2(multipliers)) + 1)) for _ in range(2)]
    return MaeriConfig(
        multipliers,
        multipliers if random.random() < 0.4 else widths[0],
        widths[1],
        ports=bool(random.random() < 0.85),
        accumulation_buffer=bool(random.random() < 0.75),
        weight_depth=int(random.choice([2048, 2048, 64])),
        prefetch=int(random.random() < 0.2),
        fold=bool(random.random() < 0.9),
    )


def random_rules(random: Random, net: OrderNetwork, config: MaeriConfig) -> Rules:
    """Some rules of every kind, which may contradict each other."""
    work = [each for each in net.works for _ in range(2)]

    def what() -> str:
        """A layer, or some of its output channels."""
        return part(work[int(random.integers(len(work)))])

    def part(one: MultiplierLayer) -> str:
        """The layer, or some of its output channels."""
        if random.random() < 0.7 or one.channels < 2:
            return one.name
        first = int(random.integers(one.channels - 1))
        return f"{one.name}[{first}:{int(random.integers(first + 1, one.channels + 1))}]"

    def chains(chance: float) -> tuple[tuple[str, ...], ...]:
        if random.random() > chance:
            return ()
        count = int(random.integers(2, 4))
        if random.random() < 0.15 or len(net.works) < count:  # often a contradiction
            return (tuple(what() for _ in range(count)),)
        places = random.choice(len(net.works), count, replace=False)
        return (tuple(part(net.works[place]) for place in (sorted(places) if random.random() < 0.8 else places)),)

    pins = []
    if random.random() < 0.25:
        low = int(random.integers(config.multipliers // 2))
        place = (low, int(random.integers(low + 2, config.multipliers + 1))) if random.random() < 0.7 else None
        pins.append(Pin(what(), place, int(random.integers(400)) if random.random() < 0.5 else 0))
    return Rules(
        chains(0.3),
        chains(0.3),
        int(random.integers(1, 9)) if random.random() < 0.15 else None,
        (work[0].name,) if random.random() < 0.1 else bool(random.random() < 0.3),
        chains(0.2),
        tuple(pins),
        chains(0.3),
        ((str(random.choice([*FAMILIES, work[0].name])), int(random.integers(1, 7))),) if random.random() < 0.2 else (),
    )


def tried(seed: int) -> str:
    """What came of a case: "ordered", or why it is refused.

    Raises:
        AssertionError: the order breaks a rule, is late or early, beats the bound or computes something else.
        SimulationError: the engine cannot do it.
    """
    random = np.random.default_rng(seed)
    graph, inputs = random_net(random)
    net, config = network(graph), random_config(random)
    rules = random_rules(random, net, config)
    try:
        order = arrange(net, config, rules)
    except (ModelError, TargetError) as error:
        return error.what
    found = simulate(order, inputs)
    assert found.products == total_macs(graph)
    for name, array in evaluate(graph, inputs).items():
        np.testing.assert_array_equal(found.outputs[name], array)
    assert not broken(order, rules), (broken(order, rules), config, rules)
    assert found.cycles == order.makespan, (found.cycles, order.makespan, config, rules)
    assert found.cycles >= bound(net, config, rules).cycles, (found.cycles, bound(net, config, rules), config, rules)
    return "ordered"


def many(first: int, count: int) -> Counter[str]:
    """So many cases from a seed on; what came of them."""
    return Counter(tried(seed) for seed in range(first, first + count))
