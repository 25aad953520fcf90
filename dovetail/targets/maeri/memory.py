"""On-chip memories an order needs, and whether the engine has them: the one rule for a whole network's order and for a
launch's, whoever says when items work.

The feature memory holds the network's inputs and every layer's results, from the first weight of the items that make
them until the last that reads them has ended; results are bytes
behind the stage, else 32-bit sums. The prefetch
buffer is what ports send from: of every item at work the weights of its filters, twice where a multiplier has a place
for further ones, and the rows of its input that a window lies on; of a layer never more than all it has.
Weights a multiplier holds are `timing.py`'s, for they say which virtual neurons there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.errors import TargetError
from dovetail.ir.types import TensorType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork
from dovetail.targets.maeri.order import Item

Span = tuple[Item, int, int]
"""(item, cycle of its first weight, the cycle after its last sum has left)."""
_LISTED = 6
"""Things an error names."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of a memory that are in use at the same time."""

    used: int
    """Bytes."""
    cycle: int
    """From when."""
    holds: tuple[str, ...]
    """What they are, the largest first, with their bytes."""


def features(network: OrderNetwork, config: MaeriConfig, spans: Sequence[Span]) -> Peak:
    """Bytes of inputs and results that are alive at the same time."""
    begins, ends = dict[int, int](), dict[int, int]()
    for item, begin, end in spans:
        begins[item.work] = min(begins.get(item.work, begin), begin)
        ends[item.work] = max(ends.get(item.work, end), end)
    last, numbers = max(ends.values()), {work.name: number for number, work in enumerate(network.works)}
    read = dict[int, int]()
    inputs = dict[str, int]()
    for number, work in enumerate(network.works):
        for earlier in network.before(work):
            read[numbers[earlier.name]] = max(read.get(numbers[earlier.name], 0), ends[number])
        for name in _inputs(network, work):
            inputs[name] = max(inputs.get(name, 0), ends[number])
    given = [(name, _bytes(network.graph.types[name]), 0, end) for name, end in inputs.items()]
    made = [
        (work.name, _results(network, work, config), begins[number], read.get(number, last))
        for number, work in enumerate(network.works)
    ]
    return _peak([*given, *made])


def prefetched(network: OrderNetwork, config: MaeriConfig, spans: Iterable[Span]) -> Peak:
    """Bytes ports send from at the same time."""
    held = []
    for item, begin, end in spans:
        work = network.works[item.work]
        held += [(name, size, begin, end) for name, size in _parts(network, work, item, config)]
    all_of = {name: size for work in network.works for name, size in _whole(network, work).items()}
    return _peak(held, all_of)


def _parts(network: OrderNetwork, work: MultiplierLayer, item: Item, config: MaeriConfig) -> Iterator[tuple[str, int]]:
    """What an item has in the prefetch buffer."""
    layer, tile = work.layer, item.tile
    values, weights = (_each(network.graph.types[name]) for name in _operands(work))
    filters = tile.groups * tile.filters
    sets = 1 + (config.prefetch > 0 and len(item.segments) > 1)
    yield f"weights of {work.name}", sets * filters * (item.taps[1] - item.taps[0]) * weights
    rows = min((tile.out_rows - 1) * layer.stride + layer.rows, layer.in_rows)
    channels = -(-(item.taps[1] - item.taps[0]) // (layer.rows * layer.columns))
    yield f"inputs of {work.name}", rows * layer.in_columns * channels * tile.groups * values


def _whole(network: OrderNetwork, work: MultiplierLayer) -> Mapping[str, int]:
    """Bytes of all weights and inputs of a layer."""
    layer = work.layer
    values, weights = (_each(network.graph.types[name]) for name in _operands(work))
    image = layer.in_rows * layer.in_columns * layer.channels * layer.groups
    return {f"weights of {work.name}": work.weights * weights, f"inputs of {work.name}": image * values}


def _operands(work: MultiplierLayer) -> tuple[str, str]:
    """What is sent past the multipliers, and what stays in them."""
    x, weights = work.node.inputs[:2]
    return (weights, x) if work.turned else (x, weights)


def _inputs(network: OrderNetwork, work: MultiplierLayer) -> Iterator[str]:
    """The network's inputs a layer's operand is made from, without any other layer between."""
    makers, computed = network.graph.producers(), {each.node.output for each in network.works}
    waiting, seen = [work.node.inputs[0]], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name in computed:
            continue
        seen.add(name)
        if name in makers:
            waiting.extend(makers[name].inputs)
        elif name in network.graph.inputs:
            yield name


def _each(kind: TensorType) -> int:
    """Bytes of an element: integers as they are, but one for floats, whose place the engine's 8 bits take."""
    return -(-kind.dtype.bits // 8) if kind.dtype.is_integer else 1


def _bytes(kind: TensorType) -> int:
    return kind.elements * _each(kind)


def _results(network: OrderNetwork, work: MultiplierLayer, config: MaeriConfig) -> int:
    """Bytes of a layer's results."""
    name = work.node.output
    sums = not config.requantise or (name in network.graph.outputs and network.graph.types[name].dtype.is_integer)
    return work.channels * (1 if work.turned else work.positions) * (4 if sums else 1)


def _peak(held: Iterable[tuple[str, int, int, int]], most: Mapping[str, int] | None = None) -> Peak:
    """When most is held, of (what, bytes, begin, end); of one thing never more than `most`."""
    changes = sorted(
        change for name, size, begin, end in held for change in ((begin, 1, name, size), (end, 0, name, -size))
    )
    alive, best, used = dict[str, int](), Peak(0, 0, ()), 0
    for number, (cycle, _, name, size) in enumerate(changes):
        limit, before = (most or {}).get(name), alive.get(name, 0)
        alive[name] = before + size
        used += alive[name] - before if limit is None else min(alive[name], limit) - min(before, limit)
        if used > best.used and (number + 1 == len(changes) or changes[number + 1][0] > cycle):
            sizes = {each: min(size, (most or {}).get(each, size)) for each, size in alive.items() if size}
            listed = sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0]))
            best = Peak(used, cycle, tuple(f"{each} {size:,}" for each, size in listed))
    return best


def shortage(network: OrderNetwork, config: MaeriConfig, spans: Sequence[Span]) -> TargetError | None:
    """Why an order does not fit the memories: the bytes, what they are, and what to change; None where it does."""
    if config.feature_memory:
        peak = features(network, config, spans)
        others = "order layers that hold much one after the other (rules before, apart), or take a smaller input"
        if peak.used > config.feature_memory:
            return _short("feature_memory", config.feature_memory, peak, others)
    if config.prefetch_buffer:
        peak = prefetched(network, config, spans)
        others = "let fewer virtual neurons work at the same time (rules at_most, apart)"
        others += ", or turn prefetch off" if config.prefetch else ""
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
