"""Executes an order on real tensors, cycle by cycle, and checks it.

The cycle of every product is what the hardware makes of the items (`machine.py`). Checked are: multipliers and ports
are used by one item at a time, until its last sum has left; the tree can be configured for every set of virtual neurons
that works together, and the bus takes all their sums; every input exists when it is sent; every product of every sum is
added exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from dovetail.errors import SimulationError
from dovetail.ir.types import Array, DType, TensorType
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.machine import ItemTimeline, in_turn, play
from dovetail.targets.maeri.memory import shortage
from dovetail.targets.maeri.network import MultiplierLayer, OrderLayer, TaskKind, Times, exists_from
from dovetail.targets.maeri.order import Item, NetworkOrder, channels_of, sweep
from dovetail.targets.maeri.tile import grid
from dovetail.targets.maeri.tree import Range, configure

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Simulation:
    """Outputs and clock cycles of one execution of an order."""

    outputs: Mapping[str, Array]
    """The network's results."""
    cycles: int
    """Cycles until the last of the layers' results exists."""
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
    """Numbers of the positions, in tiles, rows first."""
    exists: Numbers
    """Cycle from which each position's sums are in memory."""

    @cached_property
    def span(self) -> tuple[int, int]:
        """The cycle of the first weight, and the cycle from which the last sum has left."""
        return self.item.start, self.played.until

    @cached_property
    def period(self) -> float:
        """Cycles between positions: in the long run at least one for each sum of its fullest line, though sums of the
        first few positions may overtake each other."""
        exists, fullest = self.played.exists, max(Counter(self.played.lines).values())
        if len(exists) == 1:
            return float(self.played.until)
        return max(float(exists[-1] - exists[0]) / (len(exists) - 1), float(fullest))


def simulate(order: NetworkOrder, inputs: Mapping[str, Array]) -> Simulation:
    """Execute an order.

    Args:
        order: the order.
        inputs: the network's, by name; and constants to replace.

    Raises:
        SimulationError: the engine cannot do what the order says; names the item, its place and the cycle.
    """
    layers, cycles = _layers(order), 0
    values: dict[str, Array] = {**order.network.graph.constants, **inputs}
    works = {work.node.output: work for work in order.network.works}
    for node in order.network.graph.nodes:
        operands, work = [values[name] for name in node.inputs], works.get(node.output)
        if work is None:
            values[node.output] = node.operator.evaluate(operands)
        else:
            runs, times = next(layers)
            values[node.output] = _sums(work, runs, operands)
            cycles = max(cycles, int(times.max()))
    outputs = {name: values[name] for name in order.network.graph.outputs}
    return Simulation(outputs, cycles, sum(work.layer.macs for work in order.network.works))


def check(order: NetworkOrder) -> int:
    """Cycles until the last result of an order exists; everything but its numbers is checked as by `simulate`.

    Raises:
        SimulationError: as `simulate`.
        TargetError: the engine cannot compute an item.
    """
    return max(int(times.max()) for _, times in _layers(order))


def layer_spans(order: NetworkOrder) -> list[tuple[int, int]]:
    """For each layer the cycle of its first weight, and the cycle from which all its results exist.

    Raises:
        SimulationError: an item without work.
        TargetError: the engine cannot compute an item.
    """
    runs = _runs(order)
    layers = [_of_layer(runs, number) for number in range(len(order.network.works))]
    return [(min(run.item.start for run in own), max(int(run.exists.max()) for run in own)) for own in layers]


def _of_layer(runs: Sequence[_ItemRun], number: int) -> list[_ItemRun]:
    return [run for run in runs if run.item.work == number]


def _layers(order: NetworkOrder) -> Iterator[tuple[list[_ItemRun], Times]]:
    """The items of each layer and the times of its results, in the network's order; checked one after the other."""
    runs = _runs(order)
    _check_places(order.config, runs)
    short = shortage(order.network, order.config, [(run.item, *run.span) for run in runs])
    if short is not None:
        raise SimulationError(short.what, where=short.where, hint=short.hint)
    _check_phases(order.config, runs)
    exists: dict[str, Times] = {}
    for number, work in enumerate(order.network.works):
        own = _of_layer(runs, number)
        if own:
            _check_inputs(work, exists_from(order.network.graph, work.node.inputs[0], exists), own)
        exists[work.node.output] = _results(work, own)
        yield own, exists[work.node.output]


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
    """Delay the sums of virtual neurons of several items that share a line."""
    arrives = [runs[number].played.arrives[neuron] for number, neuron in users]
    taken = np.split(in_turn(np.concatenate(arrives)), np.cumsum([len(each) for each in arrives])[:-1])
    for (number, neuron), cycles in zip(users, taken, strict=True):
        own = [other for other, line in enumerate(runs[number].played.lines) if (number, other) in users]
        alone = in_turn(runs[number].played.arrives[own])[own.index(neuron)]
        np.maximum(late[number], cycles - alone, out=late[number])


def _run(order: NetworkOrder, item: Item) -> _ItemRun:
    work, config = order.work(item), order.config
    if not item.segments:
        raise _wrong("an item without work", _name(item, work))
    if item.taps != (0, work.layer.taps) and not config.accumulation_buffer:
        hint = "turn the accumulation buffer on in the configuration, or order without cut sums"
        raise SimulationError("a sum in parts needs the accumulation buffer", where=_name(item, work), hint=hint)
    carried = not config.accumulation_buffer and item.taps[1] - item.taps[0] > item.tile.size
    if item.place.start < 0 or item.place.start + item.tile.neurons * (item.tile.size + carried) > config.multipliers:
        raise _wrong(f"there are {config.multipliers} multipliers, from cycle 0 on", _name(item, work))
    played = play(config, work.layer, item)
    channels = np.concatenate([np.full(part.count, part.channel) for part in item.segments])
    positions = np.concatenate([np.arange(part.first, part.first + part.count) for part in item.segments])
    if played.folds > config.weight_depth:
        what = f"a multiplier would hold {played.folds} weights, it has room for {config.weight_depth}"
        raise _wrong(what, _name(item, work))
    return _ItemRun(item, work, played, channels, positions, played.exists.copy())


def _wrong(what: str, where: str) -> SimulationError:
    hint = "report this with the network and the rules; --rules may avoid the order meanwhile"
    return SimulationError(what, where=where, hint=hint)


def _name(item: Item, work: MultiplierLayer) -> str:
    return f"{work.name} on multipliers [{item.place.start}, {item.place.end}) from cycle {item.start}"


def _check_places(config: MaeriConfig, runs: Sequence[_ItemRun]) -> None:
    """One item per multiplier at a time, and per port."""
    width = config.feed_width if config.ports or config.shared_ports else 1
    until = np.zeros(config.multipliers, np.int64)
    owner: list[_ItemRun | None] = [None] * config.multipliers
    for run in sorted(runs, key=lambda each: each.item.start):
        place, name = run.item.place, _name(run.item, run.work)
        if place.start < 0 or place.end > config.multipliers or run.item.start < 0:
            raise _wrong(f"there are {config.multipliers} multipliers, from cycle 0 on", name)
        if run.played.places[-1].end > place.end or (config.ports and place.start % width):
            what = f"{run.item.tile.neurons} virtual neurons up to multiplier {run.played.places[-1].end} do not fit"
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


def _check_phases(config: MaeriConfig, runs: Sequence[_ItemRun]) -> None:
    """The tree and the bus can be configured for every set of virtual neurons that works at the same time."""
    checked: set[tuple[tuple[int, int, float, int], ...]] = set()
    for cycle, working in sweep([run.span for run in runs]):
        neurons = (
            (place.start, place.end, runs[number].period, line)
            for number in working
            for place, line in zip(runs[number].played.places, runs[number].played.lines, strict=True)
        )
        phase = tuple(sorted(neurons))
        if phase not in checked:
            checked.add(phase)
            _check_phase(config, phase, cycle)


@lru_cache(maxsize=4096)
def _set_up(multipliers: int, places: tuple[tuple[int, int], ...]) -> None:
    """Set up the tree for virtual neurons, or fail."""
    configure(multipliers, [Range(start, end - start) for start, end in places])


def _check_phase(config: MaeriConfig, phase: Sequence[tuple[int, int, float, int]], cycle: int) -> None:
    """The tree adds up each virtual neuron, and no line gets more than one sum per cycle."""
    _set_up(config.multipliers, tuple((start, end) for start, end, _, _ in phase))
    load: dict[int, float] = {}
    for _, _, period, line in phase:
        load[line] = load.get(line, 0.0) + 1.0 / max(period, 1.0)
    for line, sums in load.items():
        if sums > 1.0 + 1e-2:  # items keep to this themselves; inputs of the first position shift it a little
            what = f"line {line} of the collection bus would get {sums:.2f} sums per cycle"
            raise _wrong(what, f"from cycle {cycle}")


def _check_inputs(work: MultiplierLayer, times: Times, runs: Sequence[_ItemRun]) -> None:
    """Every input exists in the cycle it is first multiplied in."""
    layer = work.layer
    if work.turned:
        for run in runs:
            if run.item.start < times.max(initial=0):
                what = f"the vector is sent in cycle {run.item.start}; its inputs exist from cycle {times.max()}"
                raise _wrong(what, _name(run.item, run.work))
        return
    if not work.is_image:
        times = np.broadcast_to(times.max(axis=1, keepdims=True), (times.shape[0], layer.in_rows))
    needs: dict[tuple[tuple[int, int], int], Times] = {}
    for run in runs:
        key = run.item.taps, run.item.tile.out_rows
        if key not in needs:
            needs[key] = _needed(layer, times, *key)
        groups, rows = run.channels // layer.filters, run.positions // grid(layer, run.item.tile)[1]
        wanted = needs[key][groups, rows]
        for further in range(1, run.item.tile.groups):
            wanted = np.maximum(wanted, needs[key][np.minimum(groups + further, layer.groups - 1), rows])
        early = np.flatnonzero(run.played.begins < wanted)
        if early.size:
            at = int(early[0])
            what = f"position {run.positions[at]} of channel {run.channels[at]} is begun in cycle"
            what += f" {run.played.begins[at]}; its inputs exist from cycle {wanted[at]}"
            raise _wrong(what, _name(run.item, work))


def _needed(layer: OrderLayer, times: Times, taps: tuple[int, int], height: int) -> Times:
    """Cycle from which the inputs of each group exist, by [group, `height` rows of the result at a time]."""
    rows, area = -(-layer.out_rows // height), layer.rows * layer.columns
    channels = slice(taps[0] // area, -(-taps[1] // area))  # of one group, those that the products read
    by_group = times.reshape(layer.groups, layer.channels, -1)[:, channels].max(axis=1)
    need = np.zeros((layer.groups, rows), np.int64)
    for row in range(rows):
        last = min((row + 1) * height, layer.out_rows) - 1
        need[:, row] = by_group[:, row * height * layer.stride : last * layer.stride + layer.rows].max(axis=1)
    return need


def _results(work: MultiplierLayer, runs: Sequence[_ItemRun]) -> Times:
    """Cycle from which each channel and row of a layer's result exists: that of the last of its sums."""
    times = np.zeros((work.outputs, work.layer.out_rows), np.int64)
    for run in runs:
        if run.item.tile.neurons == 1:  # sums come in order: the last of a row is its latest
            latest = np.zeros_like(times)
            latest[run.channels, run.positions // work.layer.out_columns] = run.exists
            np.maximum(times, latest, out=times)
            continue
        for channels, rows, _, at in _elements(run):
            inside = rows < work.layer.out_rows
            for channel in channels:
                np.maximum.at(times[channel], rows[inside], run.exists[at][inside])
    return work.of_result(times)


def _sums(work: MultiplierLayer, runs: Sequence[_ItemRun], operands: Sequence[Array]) -> Array:
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


def _added(work: MultiplierLayer, run: _ItemRun) -> Iterator[Numbers]:
    """Numbers of the elements of [position, output channel] that an item adds to, once for each time."""
    layer = work.layer
    if run.item.tile.neurons == 1:
        yield run.positions * work.outputs + run.channels
        return
    for channels, rows, columns, _ in _elements(run):
        inside = (rows < layer.out_rows) & (columns < layer.out_columns)
        positions = rows[inside] * layer.out_columns + columns[inside]
        yield (positions[:, None] * work.outputs + np.array(channels)).reshape(-1)


def _elements(run: _ItemRun) -> Iterator[tuple[list[int], Numbers, Numbers, slice]]:
    """Channels, rows and columns of the result for each segment and each element of a tile of positions, and where the
    segment's positions stand in the run."""
    tile, first = run.item.tile, 0
    for part in run.item.segments:
        at = slice(first, first + part.count)
        rows, columns = np.divmod(run.positions[at], grid(run.work.layer, tile)[1])
        for row, column in product(range(tile.out_rows), range(tile.out_columns)):
            channels = channels_of(run.work, tile, part.channel)
            yield channels, rows * tile.out_rows + row, columns * tile.out_columns + column, at
        first += part.count


def _products(work: MultiplierLayer, operands: Sequence[Array], taps: tuple[int, int]) -> Reals:
    """Sums of the products [first, end) of every sum of a layer, by [position, output channel].

    Integers stay exact: float64 holds them up to 2^53.
    """
    layer = work.layer
    x, w = (array.astype(np.float64) - zero for array, zero in zip(operands[:2], work.zero_points, strict=True))
    if work.turned:
        windows, weights = w.reshape(1, -1, layer.channels), x.reshape(1, 1, layer.channels)
    elif not work.is_image:
        windows, weights = x.reshape(1, -1, layer.channels), w.reshape(1, layer.filters, layer.channels)
    else:
        windows = _windows(x[0], work)
        depthwise = work.kind is TaskKind.DEPTHWISE  # [1, R, S, C * M], else [O, R, S, C]
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
    kind = work.node.operator.infer([TensorType(array.shape, DType.of(array.dtype)) for array in operands])
    exact = (total.reshape(-1, total.shape[0]) if work.turned else total).astype(np.float64)
    if len(operands) > 2:
        exact += operands[2]
    if kind.dtype.is_integer:
        exact = np.rint(exact).astype(np.int64)
    return exact.astype(kind.dtype.numpy).reshape(kind.shape)
