"""On-chip memories: the bytes an order needs, for a whole network's order and for a launch's.

The feature memory holds the network's inputs and every layer's results, from the first weight of the items that compute
them until the last item that reads them has ended; results are bytes behind the stage, else 32-bit sums. The prefetch
buffer is the memory that ports send from: of every item at work it holds the weights of its filters, twice where a
multiplier has a place for further weights, and the rows of its input that a window lies on; of a layer never more than
all it has. Weights in a multiplier are counted in `timing.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.errors import TargetError
from dovetail.ir.types import TensorType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork
from dovetail.targets.maeri.order import Item, sweep

ItemSpan = tuple[Item, int, int]
"""(item, cycle of its first weight, the cycle after its last sum has left)."""
_LISTED = 6
"""Contents of a memory that an error names."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of a memory that are in use at the same time."""

    used: int
    """Bytes."""
    cycle: int
    """The first cycle of the peak."""
    holds: tuple[str, ...]
    """Contents with their bytes, the largest first."""


def features(network: OrderNetwork, config: MaeriConfig, spans: Sequence[ItemSpan]) -> Peak:
    """Bytes of inputs and results that are alive at the same time."""
    begins, ends = dict[int, int](), dict[int, int]()
    for item, begin, end in spans:
        begins[item.work] = min(begins.get(item.work, begin), begin)
        ends[item.work] = max(ends.get(item.work, end), end)
    read, inputs = dict[int, int](), dict[str, int]()
    for number in range(len(network.works)):
        for earlier in network.earlier(number):
            read[earlier] = max(read.get(earlier, 0), ends[number])
        for name in network.inputs(number):
            inputs[name] = max(inputs.get(name, 0), ends[number])
    last, types = max(ends.values()), network.graph.types
    operands = [(name, types[name].elements * _width(types[name]), 0, end) for name, end in inputs.items()]
    results = [
        (work.name, _result_bytes(network, work, config), begins[number], read.get(number, last))
        for number, work in enumerate(network.works)
    ]
    return _peak([*operands, *results], {})


def prefetched(network: OrderNetwork, config: MaeriConfig, spans: Iterable[ItemSpan]) -> Peak:
    """Bytes that ports send from at the same time."""
    contents, most = [], dict[str, int]()
    for item, begin, end in spans:
        for name, size, whole in _sent(network, item, config):
            contents.append((name, size, begin, end))
            most[name] = whole
    return _peak(contents, most)


def _sent(network: OrderNetwork, item: Item, config: MaeriConfig) -> Iterator[tuple[str, int, int]]:
    """(name, bytes of it an item has in the prefetch buffer, bytes of all of it), for weights and inputs."""
    work, tile = network.works[item.work], item.tile
    layer, taps = work.layer, item.taps[1] - item.taps[0]
    inputs, weights = (_width(network.graph.types[name]) for name in work.node.inputs[:2])
    if work.turned:  # the vector stays in the multipliers, and weights are sent past it
        inputs, weights = weights, inputs
    sets = 1 + (config.prefetch > 0 and len(item.segments) > 1)
    yield f"weights of {work.name}", sets * tile.groups * tile.filters * taps * weights, work.weights * weights
    rows = min((tile.out_rows - 1) * layer.stride + layer.rows, layer.in_rows)
    channels = -(-taps // (layer.rows * layer.columns))
    image = layer.in_rows * layer.in_columns * layer.channels * layer.groups
    yield f"inputs of {work.name}", rows * layer.in_columns * channels * tile.groups * inputs, image * inputs


def _width(kind: TensorType) -> int:
    """Bytes of an element; 1 for floats, which stand for the engine's 8 bits."""
    return -(-kind.dtype.bits // 8) if kind.dtype.is_integer else 1


def _result_bytes(network: OrderNetwork, work: MultiplierLayer, config: MaeriConfig) -> int:
    name, graph = work.node.output, network.graph
    sums = not config.requantise or (name in graph.outputs and graph.types[name].dtype.is_integer)
    return work.channels * (1 if work.turned else work.positions) * (4 if sums else 1)


def _peak(contents: Sequence[tuple[str, int, int, int]], most: Mapping[str, int]) -> Peak:
    """The peak of (name, bytes, begin, end); of one name never more bytes than `most` says."""
    peak = Peak(0, 0, ())
    for cycle, alive in sweep([(begin, end) for _, _, begin, end in contents]):
        sizes = Counter[str]()
        for number in alive:
            sizes[contents[number][0]] += contents[number][1]
        sizes = Counter({name: min(size, most.get(name, size)) for name, size in sizes.items()})
        if sizes.total() > peak.used:
            listed = sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0]))
            peak = Peak(sizes.total(), cycle, tuple(f"{name} {size:,}" for name, size in listed))
    return peak


def shortage(network: OrderNetwork, config: MaeriConfig, spans: Sequence[ItemSpan]) -> TargetError | None:
    """The error of an order that does not fit the memories: bytes, contents, and what to change; None if it fits."""
    if config.feature_memory:
        others = "order layers that hold much one after the other (rules before, apart), or take a smaller input"
        peak = features(network, config, spans)
        if peak.used > config.feature_memory:
            return _short("feature_memory", config.feature_memory, peak, others)
    if config.prefetch_buffer:
        others = "let fewer virtual neurons work at the same time (rules at_most, apart)"
        others += ", or turn prefetch off" if config.prefetch else ""
        peak = prefetched(network, config, spans)
        if peak.used > config.prefetch_buffer:
            return _short("prefetch_buffer", config.prefetch_buffer, peak, others)
    return None


def _short(name: str, size: int, peak: Peak, others: str) -> TargetError:
    listed = ", ".join(peak.holds[:_LISTED]) + (", ..." if len(peak.holds) > _LISTED else "")
    return TargetError(
        f"the {name.replace('_', ' ')} needs {peak.used:,} bytes and has {size:,}: {peak.used - size:,} bytes short",
        where=f"cycle {peak.cycle:,}, where it holds {listed}",
        hint=f"--set {name}={peak.used}; or {others}",
    )
