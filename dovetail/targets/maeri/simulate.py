"""Executes an order on real tensors, cycle by cycle, and finds what is wrong with it.

It takes nothing of the scheduler on trust: every product's cycle is what the hardware makes of items (`machine.py`).
Checked are: multipliers and ports are used by one item at a time, until its last sum has left; the trees can be
configured so for every set of virtual neurons that works together, and the bus takes all their sums; every input exists
when it is sent; every product of every sum is added exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dovetail.errors import SimulationError
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array, DType, TensorType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.machine import ItemTimeline, in_turn, play
from dovetail.targets.maeri.memory import shortage
from dovetail.targets.maeri.network import MultiplierLayer, Times, exists_from
from dovetail.targets.maeri.order import Item, NetworkOrder, channels_of, grid
from dovetail.targets.maeri.tree import Range, configure

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Simulation:
    """What came of an order."""

    outputs: Mapping[str, Array]
    """The network's results."""
    cycles: int
    """Until the last of the layers' results exists."""
    products: int
    """Multiplications that belong to a sum."""

    def utilisation(self, config: MaeriConfig) -> float:
        """Products per multiplier and cycle."""
        return self.products / (self.cycles * config.multipliers)


@dataclass(frozen=True)
class _ItemRun:
    """An item spread out: one entry per position it computes, in order."""

    item: Item
    work: MultiplierLayer
    played: ItemTimeline
    channels: Numbers
    """The (first) output channel of each position."""
    positions: Numbers
    """In tiles, rows first."""
    exists: Numbers
    """From when each position's sums are in memory."""

    @cached_property
    def span(self) -> tuple[int, int]:
        """From the first weight until the last sum has left."""
        return self.item.start, self.played.until

    @cached_property
    def period(self) -> float:
        """Cycles between positions: on the long run at least one for each sum of its fullest line, though sums of the
        first few may overtake each other."""
        exists, fullest = self.played.exists, max(Counter(self.played.lines).values())
        if len(exists) == 1:
            return float(self.played.until)
        return max(float(exists[-1] - exists[0]) / (len(exists) - 1), float(fullest))


def simulate(order: NetworkOrder, inputs: Mapping[str, Array]) -> Simulation:
    """Execute an order.

    Args:
        order: the order.
        inputs: the network's, by name; and constants that shall be others.

    Raises:
        SimulationError: the order asks for something the engine cannot do; says which item, where and in which cycle.
    """
    runs = _runs(order)
    _check_places(order, runs)
    _check_memories(order, runs)
    _check_phases(order.config, runs)
    values: dict[str, Array] = {**order.network.graph.constants, **inputs}
    exists: dict[str, Times] = {}
    works = {work.node.output: number for number, work in enumerate(order.network.works)}
    for node in order.network.graph.nodes:
        operands = [values[name] for name in node.inputs]
        if node.output not in works:
            values[node.output] = node.operator.evaluate(operands)
            continue
        number = works[node.output]
        own = [run for run in runs if run.item.work == number]
        _check_inputs(order, own, exists)
        values[node.output] = _sums(order.network.works[number], own, operands)
        exists[node.output] = _results(order.network.works[number], own)
    cycles = max(int(times.max()) for times in exists.values())
    outputs = {name: values[name] for name in order.network.graph.outputs}
    return Simulation(outputs, cycles, sum(work.layer.macs for work in order.network.works))


def check(order: NetworkOrder) -> int:
    """What `simulate` finds but for the numbers: cycles until the last result exists.

    Raises:
        SimulationError: as `simulate`.
        TargetError: an item that the engine cannot compute.
    """
    runs = _runs(order)
    _check_places(order, runs)
    _check_memories(order, runs)
    _check_phases(order.config, runs)
    exists: dict[str, Times] = {}
    for number, work in enumerate(order.network.works):
        own = [run for run in runs if run.item.work == number]
        _check_inputs(order, own, exists)
        exists[work.node.output] = _results(work, own)
    return max(int(times.max()) for times in exists.values())


def makespan(order: NetworkOrder) -> int:
    """Cycles until the last result of an order exists, from its items alone.

    Raises:
        SimulationError: an item without work.
        TargetError: one that the engine cannot compute.
    """
    return max((int(run.exists.max()) for run in _runs(order)), default=0)


def spans(order: NetworkOrder) -> tuple[tuple[int, int], ...]:
    """Of each layer the cycle of its first weight, and that from which all its results exist."""
    runs = _runs(order)
    found = []
    for number in range(len(order.network.works)):
        own = [run for run in runs if run.item.work == number]
        found.append((min(run.item.start for run in own), max(int(run.exists.max()) for run in own)))
    return tuple(found)


def _runs(order: NetworkOrder) -> list[_ItemRun]:
    """Every item played, its sums as late as the lines it shares with others make them."""
    runs = [_run(order, item) for item in order.items]
    users: dict[int, list[tuple[int, int]]] = {}
    for number, run in enumerate(runs):
        for neuron, line in enumerate(run.played.lines):
            users.setdefault(line, []).append((number, neuron))
    late = [np.zeros_like(run.exists) for run in runs]
    for each in users.values():
        if len({number for number, _ in each}) > 1:
            _share(runs, each, late)
    for run, cycles in zip(runs, late, strict=True):
        run.exists[:] += cycles
    return runs


def _share(runs: list[_ItemRun], users: Sequence[tuple[int, int]], late: list[Numbers]) -> None:
    """Delay the sums of virtual neurons that several items' share of a line keeps waiting."""
    arrives = [runs[number].played.arrives[neuron] for number, neuron in users]
    taken = np.split(in_turn(np.concatenate(arrives)), np.cumsum([len(each) for each in arrives])[:-1])
    for (number, neuron), found in zip(users, taken, strict=True):
        own = [other for other, line in enumerate(runs[number].played.lines) if (number, other) in users]
        alone = in_turn(runs[number].played.arrives[own])[own.index(neuron)]
        np.maximum(late[number], found - alone, out=late[number])


def _run(order: NetworkOrder, item: Item) -> _ItemRun:
    """An item played."""
    work, config = order.work(item), order.config
    if not item.segments:
        raise _wrong("an item without work", _name(item, work))
    if item.taps != (0, work.layer.taps) and not config.accumulation_buffer:
        hint = "turn the accumulation buffer on in the configuration, or order without cut sums"
        raise SimulationError("a sum in parts needs the accumulation buffer", where=_name(item, work), hint=hint)
    taps = item.taps[1] - item.taps[0]
    carried = not config.accumulation_buffer and taps > item.tile.size
    if item.place.start < 0 or item.place.start + item.tile.neurons * (item.tile.size + carried) > config.multipliers:
        raise _wrong(f"there are {config.multipliers} multipliers, from cycle 0 on", _name(item, work))
    played = play(config, work.layer, item.tile, taps, item.place.start, item.start, item.segments)
    channels = np.concatenate([np.full(part.count, part.channel) for part in item.segments])
    positions = np.concatenate([np.arange(part.first, part.first + part.count) for part in item.segments])
    if played.steps > config.weight_depth:
        what = f"a multiplier would hold {played.steps} weights, it has room for {config.weight_depth}"
        raise _wrong(what, _name(item, work))
    return _ItemRun(item, work, played, channels, positions, played.exists.copy())


def _wrong(what: str, where: str) -> SimulationError:
    hint = "report this with the network and the rules; --rules may avoid the order meanwhile"
    return SimulationError(what, where=where, hint=hint)


def _name(item: Item, work: MultiplierLayer) -> str:
    return f"{work.name} on multipliers [{item.place.start}, {item.place.end}) from cycle {item.start}"


def _check_places(order: NetworkOrder, runs: list[_ItemRun]) -> None:
    """One item per multiplier at a time, and per port."""
    config = order.config
    width = config.port_width if config.ports else 1 if not config.shared_ports else config.multipliers
    until = np.zeros(config.multipliers, np.int64)
    owner: list[_ItemRun | None] = [None] * config.multipliers
    for run in sorted(runs, key=lambda each: each.item.start):
        place, name = run.item.place, _name(run.item, run.work)
        if place.start < 0 or place.end > config.multipliers or run.item.start < 0:
            raise _wrong(f"there are {config.multipliers} multipliers, from cycle 0 on", name)
        if run.played.places[-1][1] > place.end or (config.ports and place.start % width):
            what = f"{run.item.tile.neurons} virtual neurons up to multiplier {run.played.places[-1][1]} do not fit"
            raise _wrong(f"{what}, or do not begin at a multiple of {width}", name)
        taken = slice(place.start // width * width, -(-place.end // width) * width)
        late = int(until[taken].argmax()) + taken.start
        if until[late] > run.item.start:
            other = owner[late]
            assert other is not None
            by = _name(other.item, other.work)
            raise _wrong(f"multiplier {late} is in use until cycle {until[late]} by {by}", name)
        until[taken] = run.span[1]
        owner[taken] = [run] * (taken.stop - taken.start)


def _check_memories(order: NetworkOrder, runs: list[_ItemRun]) -> None:
    """What is alive at the same time fits the memories."""
    short = shortage(order.network, order.config, [(run.item, *run.span) for run in runs])
    if short is not None:
        raise SimulationError(short.what, where=short.where, hint=short.hint)


def _check_phases(config: MaeriConfig, runs: list[_ItemRun]) -> None:
    """Every set of virtual neurons that works at the same time is one the trees and the bus can be configured for."""
    changes = sorted({cycle for run in runs for cycle in run.span})
    starting, ending = sorted(runs, key=lambda run: run.span[0]), sorted(runs, key=lambda run: run.span[1])
    active: dict[int, _ItemRun] = {}
    known: set[tuple[tuple[int, int, float, int], ...]] = set()
    started = ended = 0
    for cycle in changes:
        while ended < len(ending) and ending[ended].span[1] <= cycle:
            active.pop(id(ending[ended]), None)
            ended += 1
        while started < len(starting) and starting[started].span[0] <= cycle:
            active[id(starting[started])] = starting[started]
            started += 1
        working = (
            (place, run.period, line)
            for run in active.values()
            for place, line in zip(run.played.places, run.played.lines, strict=True)
        )
        phase = tuple(sorted((start, end, period, line) for (start, end), period, line in working))
        if phase not in known:
            known.add(phase)
            _check_phase(config, phase, cycle)


@lru_cache(maxsize=4096)
def _set_up(multipliers: int, places: tuple[tuple[int, int], ...]) -> None:
    """Set up the tree for virtual neurons, or fail."""
    configure(multipliers, [Range(start, end - start) for start, end in places])


def _check_phase(config: MaeriConfig, phase: Sequence[tuple[int, int, float, int]], cycle: int) -> None:
    """The tree adds up each virtual neuron, and no line gets more than one sum per cycle."""
    _set_up(config.multipliers, tuple((start, end) for start, end, _, _ in phase))
    load: dict[int, float] = {}
    for _, _, period, place in phase:
        load[place] = load.get(place, 0.0) + 1.0 / max(period, 1.0)
    for place, sums in load.items():
        if sums > 1.0 + 1e-2:  # items keep to this themselves; what is sent for the first position shifts it a little
            what = f"line {place} of the collection bus would get {sums:.2f} sums per cycle"
            raise _wrong(what, f"from cycle {cycle}")


def _check_inputs(order: NetworkOrder, runs: list[_ItemRun], exists: Mapping[str, Times]) -> None:
    """Every input exists in the cycle it is first multiplied in."""
    if not runs:
        return
    work = runs[0].work
    times = exists_from(order.network.graph, work.node.inputs[0], exists)
    layer = work.layer
    if work.turned:
        for run in runs:
            if run.item.start < times.max(initial=0):
                what = f"the vector is sent in cycle {run.item.start}; its inputs exist from cycle {times.max()}"
                raise _wrong(what, _name(run.item, work))
        return
    if not work.is_image:
        times = np.broadcast_to(times.max(axis=1, keepdims=True), (times.shape[0], layer.in_rows))
    needs: dict[tuple[tuple[int, int], int], Times] = {}
    for run in runs:
        key = run.item.taps, run.item.tile.out_rows
        if key not in needs:
            needs[key] = _needed(work, times, *key)
        groups, rows = run.channels // layer.filters, run.positions // grid(work, run.item.tile)[1]
        wanted = needs[key][groups, rows]
        for further in range(1, run.item.tile.groups):
            wanted = np.maximum(wanted, needs[key][np.minimum(groups + further, layer.groups - 1), rows])
        early = np.flatnonzero(run.played.begins < wanted)
        if early.size:
            at = int(early[0])
            what = (
                f"position {run.positions[at]} of channel {run.channels[at]} is begun in cycle {run.played.begins[at]}"
            )
            raise _wrong(f"{what}; its inputs exist from cycle {wanted[at]}", _name(run.item, work))


def _needed(work: MultiplierLayer, times: Times, taps: tuple[int, int], height: int) -> Times:
    """From when each group's inputs of so many rows of the result at a time exist, by [group, such rows]."""
    layer, rows = work.layer, -(-work.layer.out_rows // height)
    area = layer.rows * layer.columns
    read = slice(taps[0] // area, -(-taps[1] // area))  # the input channels, of one group, that the products read
    by_group = times.reshape(layer.groups, layer.channels, -1)[:, read].max(axis=1)
    need = np.zeros((layer.groups, rows), np.int64)
    for row in range(rows):
        last = min((row + 1) * height, layer.out_rows) - 1
        need[:, row] = by_group[:, work.rows_read(row * height)[0] : work.rows_read(last)[1]].max(axis=1)
    return need


def _results(work: MultiplierLayer, runs: list[_ItemRun]) -> Times:
    """When each channel and row of a layer's result exists: with the last of its sums."""
    times = np.zeros((work.outputs, work.layer.out_rows), np.int64)
    for run in runs:
        if run.item.tile.neurons == 1:  # sums come in order: the last of a row is its latest
            found = np.zeros_like(times)
            found[run.channels, run.positions // work.layer.out_columns] = run.exists
            np.maximum(times, found, out=times)
            continue
        for channel, part in _segments(run):
            exists = run.exists[part]
            for rows, _ in _elements(run, run.positions[part]):
                inside = rows < work.layer.out_rows
                for each in channels_of(work, run.item.tile, channel):
                    np.maximum.at(times[each], rows[inside], exists[inside])
    return work.of_result(times)


def _sums(work: MultiplierLayer, runs: list[_ItemRun], operands: list[Array]) -> Array:
    """A layer's sums, put together from what each item adds; every product exactly once."""
    total, parts = np.zeros((work.positions, work.outputs)), sorted({run.item.taps for run in runs})
    ends = [0, *(taps[1] for taps in parts)]
    if [taps[0] for taps in parts] != ends[:-1] or ends[-1] != work.layer.taps:
        raise _wrong(f"the parts {parts} of a sum do not make up its {work.layer.taps} products", work.name)
    for taps in parts:
        places = np.concatenate([place for run in runs if run.item.taps == taps for place in _added(work, run)])
        count = np.bincount(places, minlength=total.size).reshape(total.shape)
        wrong = np.argwhere(count != 1)
        if wrong.size:
            position, channel = wrong[0]
            what = f"products {list(taps)} of position {position} of channel {channel}"
            raise _wrong(f"{what} are added {count[position, channel]} times", work.name)
        total += count * _products(work, operands, taps)
    return _accumulated(work, operands, total)


def _added(work: MultiplierLayer, run: _ItemRun) -> Iterable[Numbers]:
    """Which elements of [position, output channel] an item adds to, once for each time."""
    layer, tile = work.layer, run.item.tile
    if tile.neurons == 1:
        yield run.positions * work.outputs + run.channels
        return
    for channel, where in _segments(run):
        channels = np.array(channels_of(work, tile, channel))
        for rows, columns in _elements(run, run.positions[where]):
            inside = (rows < layer.out_rows) & (columns < layer.out_columns)
            positions = rows[inside] * layer.out_columns + columns[inside]
            yield (positions[:, None] * work.outputs + channels).reshape(-1)


def _segments(run: _ItemRun) -> Iterable[tuple[int, slice]]:
    first = 0
    for part in run.item.segments:
        yield part.channel, slice(first, first + part.count)
        first += part.count


def _elements(run: _ItemRun, positions: Numbers) -> Iterable[tuple[Numbers, Numbers]]:
    """Rows and columns of the result for each element of a tile of positions."""
    tile = run.item.tile
    rows, columns = np.divmod(positions, grid(run.work, tile)[1])
    for row in range(tile.out_rows):
        for column in range(tile.out_columns):
            yield rows * tile.out_rows + row, columns * tile.out_columns + column


def _products(work: MultiplierLayer, operands: Sequence[Array], taps: tuple[int, int]) -> Reals:
    """Sums of the products [first, end) of every sum of a layer, by [position, output channel].

    Integers stay exact: float64 holds them up to 2^53.
    """
    operator, layer = work.node.operator, work.layer
    assert isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected)
    x = operands[0].astype(np.float64) - operator.input_zero_point
    w = operands[1].astype(np.float64) - operator.weight_zero_point
    if work.turned:
        windows, weights = w.reshape(1, -1, layer.channels), x.reshape(1, 1, layer.channels)
    elif isinstance(operator, FullyConnected):
        windows = x.reshape(1, -1, layer.channels)
        weights = w.reshape(1, layer.filters, layer.channels)
    else:
        windows = _windows(x[0], work)
        depthwise = isinstance(operator, DepthwiseConv2d)  # [1, R, S, C * M], else [O, R, S, C]
        kernels = np.moveaxis(w[0], -1, 0)[:, None] if depthwise else np.moveaxis(w, -1, 1)
        weights = kernels.reshape(layer.groups, layer.filters, layer.taps)
    part = slice(*taps)
    sums = windows[..., part] @ weights[..., part].transpose(0, 2, 1)
    return np.ascontiguousarray(sums.transpose(1, 0, 2)).reshape(work.positions, work.outputs)


def _windows(image: Reals, work: MultiplierLayer) -> Reals:
    """[group, position, channel x row x column of the kernel]."""
    layer = work.layer
    view = np.lib.stride_tricks.sliding_window_view(image, (layer.rows, layer.columns), axis=(0, 1))
    view = view[:: layer.stride, :: layer.stride]
    shape = (layer.out_rows, layer.out_columns, layer.groups, layer.channels, layer.rows, layer.columns)
    return view.reshape(shape).transpose(2, 0, 1, 3, 4, 5).reshape(layer.groups, work.positions, layer.taps)


def _accumulated(work: MultiplierLayer, operands: Sequence[Array], total: Reals) -> Array:
    """Sums as the layer gives them: with the bias, in the type and shape of its result."""
    operator = work.node.operator
    kind = operator.infer([TensorType(array.shape, DType.of(array.dtype)) for array in operands])
    total = total.reshape(-1, total.shape[0]) if work.turned else total
    exact = total + operands[2].astype(np.float64) if len(operands) > 2 else total
    if kind.dtype.is_integer:
        exact = np.rint(exact).astype(np.int64)
    return exact.astype(kind.dtype.numpy).reshape(kind.shape)
