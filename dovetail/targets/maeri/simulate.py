"""Executes an order on real tensors, cycle by cycle, and finds what is wrong with it.

It takes nothing of the scheduler on trust: every product's cycle follows from the items alone. Checked are: multipliers
are used by one virtual neuron at a time; the trees can be configured so for every set of them that works together, and
the bus takes all their sums; no port serves two items at a time; every input exists when it is sent; every product of
every sum is added exactly once. All cycles of an item are one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.errors import SimulationError
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array, DType, TensorType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import Item, Order, channels_of, grid, neurons
from dovetail.targets.maeri.network import Times, Work, exists_from
from dovetail.targets.maeri.timing import Range, Timing, configure, line

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
class _Run:
    """An item spread out: one entry per position it computes, in order."""

    item: Item
    work: Work
    time: Timing
    channels: Numbers
    """The (first) output channel of each position."""
    positions: Numbers
    """In tiles, rows first."""
    begins: Numbers
    """The cycle of each position's first product."""
    ends: Numbers
    """The cycle after its last."""

    @property
    def span(self) -> tuple[int, int]:
        """From the first weight to the last product."""
        return self.item.start, int(self.ends[-1])


def simulate(order: Order, inputs: Mapping[str, Array]) -> Simulation:
    """Execute an order.

    Args:
        order: the order.
        inputs: the network's, by name; and constants that shall be others.

    Raises:
        SimulationError: the order asks for something the engine cannot do; says which item, where and in which cycle.
    """
    runs = [_run(order, item) for item in order.items]
    _check_places(order, runs)
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


def makespan(order: Order) -> int:
    """Cycles until the last result of an order exists, from its items alone.

    Raises:
        SimulationError: an item without work.
        TargetError: one that the engine cannot compute.
    """
    runs = [_run(order, item) for item in order.items]
    return max((int(run.ends[-1]) + run.time.tail for run in runs), default=0)


def _run(order: Order, item: Item) -> _Run:
    """The cycles of every position of an item: weights, then positions; a row's first takes longer where it must."""
    work, time = order.work(item), order.timing(item)
    columns = grid(work, item.tile)[1]
    if not item.segments:
        raise _wrong("an item without work", _name(item, work))
    if item.taps != (0, work.layer.taps) and not order.config.accumulation_buffer:
        hint = "turn the accumulation buffer on in the configuration, or order without cut sums"
        raise SimulationError("a sum in parts needs the accumulation buffer", where=_name(item, work), hint=hint)
    channels = np.concatenate([np.full(part.count, part.channel) for part in item.segments])
    positions = np.concatenate([np.arange(part.first, part.first + part.count) for part in item.segments])
    counts = np.array([part.count for part in item.segments])
    opens = np.cumsum([0, *counts[:-1]])
    waits = np.zeros(len(positions), np.int64)
    waits[opens] = [time.load, *np.maximum(time.load - time.idle * counts[:-1], 0)]
    at_row = positions % columns == 0
    at_row[opens] = True
    lasts = np.where(at_row, time.first, time.later)
    ends = item.start + np.cumsum(lasts + waits)
    return _Run(item, work, time, channels, positions, ends - lasts, ends)


def _wrong(what: str, where: str) -> SimulationError:
    hint = "report this with the network and the rules; --rules may avoid the order meanwhile"
    return SimulationError(what, where=where, hint=hint)


def _name(item: Item, work: Work) -> str:
    return f"{work.name} on multipliers [{item.place.start}, {item.place.end}) from cycle {item.start}"


def _check_places(order: Order, runs: list[_Run]) -> None:
    """One virtual neuron per multiplier at a time, one item per port."""
    config = order.config
    width = config.port_width if config.ports else 1 if not config.shared_ports else config.multipliers
    until = np.zeros(config.multipliers, np.int64)
    owner: list[_Run | None] = [None] * config.multipliers
    for run in sorted(runs, key=lambda each: each.item.start):
        place, name = run.item.place, _name(run.item, run.work)
        if place.start < 0 or place.end > config.multipliers or run.item.start < 0:
            raise _wrong(f"there are {config.multipliers} multipliers, from cycle 0 on", name)
        if run.time.size * run.item.tile.neurons > place.size or (config.ports and place.start % width):
            what = f"{run.item.tile.neurons} virtual neurons of {run.time.size} do not fit"
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


def _check_phases(config: MaeriConfig, runs: list[_Run]) -> None:
    """Every set of virtual neurons that works at the same time is one the trees and the bus can be configured for."""
    changes = sorted({cycle for run in runs for cycle in run.span})
    starting, ending = sorted(runs, key=lambda run: run.span[0]), sorted(runs, key=lambda run: run.span[1])
    active: dict[int, _Run] = {}
    known: set[tuple[tuple[int, int, int], ...]] = set()
    started = ended = 0
    for cycle in changes:
        while ended < len(ending) and ending[ended].span[1] <= cycle:
            active.pop(id(ending[ended]), None)
            ended += 1
        while started < len(starting) and starting[started].span[0] <= cycle:
            active[id(starting[started])] = starting[started]
            started += 1
        working = ((run, place) for run in active.values() for place in neurons(run.item, run.time))
        phase = tuple(sorted((place.start, place.size, run.time.later) for run, place in working))
        if phase not in known:
            known.add(phase)
            _check_phase(config, phase, cycle)


def _check_phase(config: MaeriConfig, phase: Sequence[tuple[int, int, int]], cycle: int) -> None:
    """The tree adds up each virtual neuron, and no line gets more than one sum per cycle."""
    tree = configure(config.multipliers, [Range(start, size) for start, size, _ in phase])
    load: dict[int, float] = {}
    for output, (_, _, period) in zip(tree.outputs, phase, strict=True):
        place = line(config.multipliers, config.collection, output)
        load[place] = load.get(place, 0.0) + 1.0 / period
    for place, sums in load.items():
        if sums > 1.0 + 1e-9:
            what = f"line {place} of the collection bus would get {sums:.2f} sums per cycle"
            raise _wrong(what, f"from cycle {cycle}")


def _check_inputs(order: Order, runs: list[_Run], exists: Mapping[str, Times]) -> None:
    """Every input exists in the cycle it is first multiplied in."""
    if not runs:
        return
    work = runs[0].work
    times = exists_from(order.network.graph, work.node.inputs[0], exists)
    layer = work.layer
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
        early = np.flatnonzero(run.begins < wanted)
        if early.size:
            at = int(early[0])
            what = f"position {run.positions[at]} of channel {run.channels[at]} is begun in cycle {run.begins[at]}"
            raise _wrong(f"{what}; its inputs exist from cycle {wanted[at]}", _name(run.item, work))


def _needed(work: Work, times: Times, taps: tuple[int, int], height: int) -> Times:
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


def _results(work: Work, runs: list[_Run]) -> Times:
    """When each channel and row of a layer's result exists: with the last of its sums."""
    times = np.zeros((work.outputs, work.layer.out_rows), np.int64)
    for run in runs:
        for channel, part in _segments(run):
            exists = run.ends[part] + run.time.tail
            for rows, _ in _elements(run, run.positions[part]):
                inside = rows < work.layer.out_rows
                for each in channels_of(work, run.item.tile, channel):
                    np.maximum.at(times[each], rows[inside], exists[inside])
    return times if work.is_image else times.max(axis=1, keepdims=True)


def _sums(work: Work, runs: list[_Run], operands: list[Array]) -> Array:
    """A layer's sums, put together from what each item adds; every product exactly once."""
    shape = (work.positions, work.outputs)
    total, counts = np.zeros(shape), dict[tuple[int, int], npt.NDArray[np.int16]]()
    for taps in sorted({run.item.taps for run in runs}):
        part = _products(work, operands, taps)
        count = counts.setdefault(taps, np.zeros(shape, np.int16))
        for run in runs:
            if run.item.taps == taps:
                _add(work, run, part, total, count)
    ends = [0, *(taps[1] for taps in counts)]
    whole = [taps[0] for taps in counts] == ends[:-1] and ends[-1] == work.layer.taps
    if not whole:
        raise _wrong(f"the parts {sorted(counts)} of a sum do not make up its {work.layer.taps} products", work.name)
    for taps, count in counts.items():
        wrong = np.argwhere(count != 1)
        if wrong.size:
            position, channel = wrong[0]
            what = f"products {list(taps)} of position {position} of channel {channel}"
            raise _wrong(f"{what} are added {count[position, channel]} times", work.name)
    return _accumulated(work, operands, total)


def _add(work: Work, run: _Run, part: Reals, total: Reals, count: npt.NDArray[np.int16]) -> None:
    layer = work.layer
    for channel, where in _segments(run):
        channels = channels_of(work, run.item.tile, channel)
        for rows, columns in _elements(run, run.positions[where]):
            inside = (rows < layer.out_rows) & (columns < layer.out_columns)
            place = np.ix_(rows[inside] * layer.out_columns + columns[inside], np.array(channels))
            total[place] += part[place]
            count[place] += 1


def _segments(run: _Run) -> Iterable[tuple[int, slice]]:
    first = 0
    for part in run.item.segments:
        yield part.channel, slice(first, first + part.count)
        first += part.count


def _elements(run: _Run, positions: Numbers) -> Iterable[tuple[Numbers, Numbers]]:
    """Rows and columns of the result for each element of a tile of positions."""
    tile = run.item.tile
    rows, columns = np.divmod(positions, grid(run.work, tile)[1])
    for row in range(tile.out_rows):
        for column in range(tile.out_columns):
            yield rows * tile.out_rows + row, columns * tile.out_columns + column


def _products(work: Work, operands: Sequence[Array], taps: tuple[int, int]) -> Reals:
    """Sums of the products [first, end) of every sum of a layer, by [position, output channel].

    Integers stay exact: float64 holds them up to 2^53.
    """
    operator, layer = work.node.operator, work.layer
    assert isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected)
    x = operands[0].astype(np.float64) - operator.input_zero_point
    w = operands[1].astype(np.float64) - operator.weight_zero_point
    if isinstance(operator, FullyConnected):
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


def _windows(image: Reals, work: Work) -> Reals:
    """[group, position, channel x row x column of the kernel]."""
    layer = work.layer
    view = np.lib.stride_tricks.sliding_window_view(image, (layer.rows, layer.columns), axis=(0, 1))
    view = view[:: layer.stride, :: layer.stride]
    shape = (layer.out_rows, layer.out_columns, layer.groups, layer.channels, layer.rows, layer.columns)
    return view.reshape(shape).transpose(2, 0, 1, 3, 4, 5).reshape(layer.groups, work.positions, layer.taps)


def _accumulated(work: Work, operands: Sequence[Array], total: Reals) -> Array:
    """Sums as the layer gives them: with the bias, in the type and shape of its result."""
    operator = work.node.operator
    kind = operator.infer([TensorType(array.shape, DType.of(array.dtype)) for array in operands])
    exact = total + operands[2].astype(np.float64) if len(operands) > 2 else total
    if kind.dtype.is_integer:
        exact = np.rint(exact).astype(np.int64)
    return exact.astype(kind.dtype.numpy).reshape(kind.shape)
