"""The best order found in a time: the list scheduler's at once, an exact order of small networks, then better sizes.

The exact scheduler places pieces on multipliers and time by CP-SAT. A piece is one output channel of a layer, or the
part of it that some input channels add: a rectangle of its virtual neuron's multipliers times its cycles. Pieces do not
overlap, and begin when the channels they read exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import ceil
from typing import Any

import numpy as np

from dovetail.errors import MissingExtraError, SimulationError, TargetError
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange, tried_sizes
from dovetail.targets.maeri.machine import NeuronClock, clock
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, exists_from
from dovetail.targets.maeri.order import ChannelSegment, Item, NetworkOrder, in_order, laid_out
from dovetail.targets.maeri.rules import ChannelRange, Rules, UnitRules, consistent_rules
from dovetail.targets.maeri.simulate import broken, check
from dovetail.targets.maeri.tile import MultiplierTile, tile_of
from dovetail.targets.maeri.tree import Range, leaving

CLOSE = 1.005
"""Orders this near the bound are not improved."""
MOST_PIECES = 160
"""Networks of more pieces are not solved: the list scheduler is close to the bound there."""
_ROWS = 8
"""Pieces of a dense layer of one vector, at most."""
_ROUNDS = 12
"""Times that pieces which meet on a line of the collection bus are kept off each other and the rest is solved again."""
Report = Callable[[str, int, int], None]
"""Called with every better order: its source, its makespan and the bound, in cycles."""


def best_order(
    network: OrderNetwork,
    config: MaeriConfig,
    rules: Rules | None = None,
    seconds: float = 5.0,
    report: Report = lambda source, makespan, bound: None,
) -> NetworkOrder:
    """The best order of a network that is found.

    The list scheduler's comes first and is always valid. A small network is then solved as a whole (the extra
    "solver"); for others, one layer after the other tries other virtual neurons, the longest layer first.

    Args:
        network: the network.
        config: the engine.
        rules: the user's own.
        seconds: to spend on better orders; equal seconds give equal orders only where all orders are tried in them.
        report: called with each better order.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit.
    """
    until = time.process_time() + seconds
    rules, least = rules or Rules(), bound(network, config, rules).cycles
    best = arrange(network, config, rules)
    if not is_sound(best, rules):
        best = arrange(network, config, rules, cautious=True)
    took = time.process_time() - until + seconds
    report("list", best.makespan, least)
    if seconds <= 0:
        return best
    try:
        solved = _solve(network, config, rules, until)
    except MissingExtraError:
        solved = None
    if solved is not None and solved.makespan < best.makespan and is_sound(solved, rules):
        best = solved
        report("exact", best.makespan, least)
    if config.shared_ports or rules != Rules():
        return best
    sizes: dict[int, int] = {}
    for number in sorted(range(len(network.works)), key=lambda number: (-network.works[number].layer.macs, number)):
        for size in tried_sizes(network.works[number], config, False):
            if best.makespan <= least * CLOSE or time.process_time() + took > until:
                return best
            try:
                order = arrange(network, config, rules, {**sizes, number: size})
            except TargetError:  # the memories
                continue
            if order.makespan < best.makespan:
                best, sizes = order, {**sizes, number: size}
                report("list, other sizes", best.makespan, least)
    return best


def is_sound(order: NetworkOrder, rules: Rules) -> bool:
    """Whether the hardware can do what an order says, by the time it says, and the rules are kept."""
    try:
        return check(order) <= order.makespan and not broken(order, rules)
    except (SimulationError, TargetError):
        return False


def _solve(network: OrderNetwork, config: MaeriConfig, rules: Rules, until: float) -> NetworkOrder | None:
    """The best order of whole output channels that is found in time, with and without parts over input channels; None
    where the network is too large for it, or a channel does not fit."""
    best: NetworkOrder | None = None
    units = consistent_rules(rules, network, config)
    for in_parts in (False, True):
        pieces = _pieces(network, config, units, in_parts)
        if pieces and len(pieces) <= MOST_PIECES and not config.shared_ports:
            model = _SolverModel(network, config, units, pieces, until)
            order = model.solve((until - time.process_time()) / (2 - in_parts))
            if order and (best is None or order.makespan < best.makespan):
                best = order
    return best


@dataclass(frozen=True)
class _NeuronTask:
    """Sums that one virtual neuron computes in one go."""

    work: int
    segment: ChannelSegment
    gives: range
    """The channels of the layer's result it has a part in."""
    taps: tuple[int, int]
    time: NeuronClock
    tile: MultiplierTile
    exists: int
    """Cycles from the first weight until its last sum has left, wherever it lies."""

    @property
    def width(self) -> int:
        """Multipliers it takes."""
        return max(self.time.size, 2)


def _pieces(network: OrderNetwork, config: MaeriConfig, rules: UnitRules, in_parts: bool) -> list[_NeuronTask]:
    """The pieces of a network; none where a layer's sums do not fit."""
    pieces: list[_NeuronTask] = []
    for number, work in enumerate(network.works):
        area, taps = work.layer.rows * work.layer.columns, work.layer.taps
        divided = in_parts and work.layer.channels > 1 and config.accumulation_buffer and area > 1
        step = area if divided and number not in rules.whole else taps
        folds = ceil(step / config.multipliers)
        if folds > 1 and not (config.fold and config.accumulation_buffer and folds <= config.weight_depth):
            return []
        tile = tile_of(work.layer, ceil(step / folds))
        time = clock(config, work.layer, tile, step)
        places = [clock(config, work.layer, tile, step, at) for at in range(config.multipliers - time.size + 1)]
        for segment, gives in _goals(work):
            if len(pieces) > MOST_PIECES:
                return pieces
            exists = max(place.end((segment,)) for place in places)
            parts = [(first, first + step) for first in range(0, taps, step)]
            pieces += [_NeuronTask(number, segment, gives, part, time, tile, exists) for part in parts]
    return pieces


def _goals(work: MultiplierLayer) -> Iterator[tuple[ChannelSegment, range]]:
    """The sums of pieces of a layer, and the channels of its result they have a part in."""
    if work.turned:
        step = ceil(work.positions / _ROWS)
        for first in range(0, work.positions, step):
            count = min(step, work.positions - first)
            yield ChannelSegment(0, first, count), range(first, first + count)
    else:
        for channel in range(work.outputs):
            yield ChannelSegment(channel, 0, work.positions), range(channel, channel + 1)


class _SolverModel:
    """Places and times of pieces, as a model of CP-SAT.

    Raises:
        MissingExtraError: the solver is not installed.
    """

    def __init__(
        self, network: OrderNetwork, config: MaeriConfig, rules: UnitRules, pieces: Sequence[_NeuronTask], until: float
    ) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise MissingExtraError("ortools", "solver", "finding the best order") from error
        self._cp, self._network, self._config, self._pieces, self._until = cp_model, network, config, pieces, until
        self._model: Any = cp_model.CpModel()
        model, horizon = self._model, sum(piece.exists for piece in pieces)
        self._starts = [model.new_int_var(0, horizon, "") for _ in pieces]
        self._places = [model.new_int_var(0, config.multipliers - piece.width, "") for piece in pieces]
        interval = model.new_fixed_size_interval_var
        spans = [interval(start, piece.exists, "") for start, piece in zip(self._starts, pieces, strict=True)]
        rows = [interval(place, piece.width, "") for place, piece in zip(self._places, pieces, strict=True)]
        model.add_no_overlap_2d(spans, rows)
        model.add_cumulative(spans, [piece.width for piece in pieces], config.multipliers)
        for works, most in rules.limits:
            counted = [span for span, piece in zip(spans, pieces, strict=True) if piece.work in works]
            model.add_cumulative(counted, [1] * len(counted), most)
        self._add_dependencies()
        self._add_rules(rules, spans)
        makespan = model.new_int_var(0, horizon, "")
        for start, piece in zip(self._starts, pieces, strict=True):
            model.add(makespan >= start + piece.exists)
        model.minimize(makespan)

    def _add_dependencies(self) -> None:
        """A piece's first product waits for the channels it reads."""
        reached: dict[tuple[int, int], list[set[int]]] = {}
        for piece, start in zip(self._pieces, self._starts, strict=True):
            lead = 0 if self._network.works[piece.work].turned else piece.time.lead
            channels = _channels_read(self._network.works[piece.work], piece)
            for earlier in self._network.earlier(piece.work):
                key = piece.work, earlier
                if key not in reached:
                    reached[key] = _reaches(self._network, *key)
                for other, before in zip(self._pieces, self._starts, strict=True):
                    if other.work == earlier and any(reached[key][channel] & channels for channel in other.gives):
                        self._model.add(start + lead >= before + other.exists)

    def _add_rules(self, rules: UnitRules, spans: Sequence[Any]) -> None:
        """Pieces keep the user's rules of what comes first, of times and of places."""
        model, starts, pieces = self._model, self._starts, self._pieces
        inside = {
            unit: [index for index, piece in enumerate(pieces) if piece.work == unit.work and _is_in(piece, unit)]
            for unit in rules.units
        }
        for x, y in rules.rules_before:
            for other, index in product(inside[x], inside[y]):
                model.add(starts[index] >= starts[other] + pieces[other].exists)
        for x, y in rules.apart:
            for other, index in product(inside[x], inside[y]):
                model.add_no_overlap([spans[other], spans[index]])
        for unit, pin in rules.pins:
            low, high = pin.multipliers or (0, self._config.multipliers)
            for index in inside[unit]:
                model.add(self._places[index] >= low)
                model.add(self._places[index] + pieces[index].width <= high)
                model.add(starts[index] >= pin.begin)
                if pin.end is not None:
                    model.add(starts[index] + pieces[index].exists <= pin.end)

    def solve(self, seconds: float) -> NetworkOrder | None:
        """The best order that is found in a deterministic time."""
        solver: Any = self._cp.CpSolver()
        solver.parameters.max_deterministic_time = max(seconds, 0.0) / _ROUNDS
        solver.parameters.num_search_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.log_search_progress = False
        for _ in range(_ROUNDS):
            left = self._until - time.process_time()
            if left <= 0:
                return None
            solver.parameters.max_time_in_seconds = left
            if solver.solve(self._model) not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
                return None
            starts = [solver.value(start) for start in self._starts]
            places = [
                Range(solver.value(place), piece.time.size)
                for place, piece in zip(self._places, self._pieces, strict=True)
            ]
            crossing = self._crossing(starts, places)
            if not crossing:
                return self._order(starts, places)
            for pair in crossing:
                self._keep_off(*pair)
        return None

    def _order(self, starts: Sequence[int], places: Sequence[Range]) -> NetworkOrder:
        items, exists = list[Item](), list[int]()
        for number, work in enumerate(self._network.works):
            own = [
                Item(number, start, place, piece.tile, piece.taps, (piece.segment,))
                for piece, start, place in zip(self._pieces, starts, places, strict=True)
                if piece.work == number
            ]
            items += own
            exists.append(laid_out(own, work, self._config).exists)
        return NetworkOrder(self._network, self._config, in_order(items), max(exists))

    def _crossing(self, starts: Sequence[int], places: Sequence[Range]) -> list[tuple[int, int]]:
        """Pairs of pieces that work at the same time and give their sums to one line."""
        lines = [leaving(self._config, place).line for place in places]
        ends = [start + piece.exists for start, piece in zip(starts, self._pieces, strict=True)]
        return [
            (one, other)
            for one, other in combinations(range(len(starts)), 2)
            if starts[one] < ends[other] and starts[other] < ends[one] and lines[one] == lines[other]
        ]

    def _keep_off(self, one: int, other: int) -> None:
        """Two pieces use different lines, or one comes after the other."""
        model, starts, pieces, lines = self._model, self._starts, self._pieces, []
        for index in (one, other):
            width, size = pieces[index].width, pieces[index].time.size
            places = range(self._config.multipliers - width + 1)
            table = [leaving(self._config, Range(place, size)).line for place in places]
            line = model.new_int_var(0, self._config.collection, "")
            model.add_element(self._places[index], table, line)
            lines.append(line)
        apart, first, second = (model.new_bool_var("") for _ in range(3))
        model.add(lines[0] != lines[1]).only_enforce_if(apart)
        model.add(starts[one] + pieces[one].exists <= starts[other]).only_enforce_if(first)
        model.add(starts[other] + pieces[other].exists <= starts[one]).only_enforce_if(second)
        model.add_bool_or(apart, first, second)


def _channels_read(work: MultiplierLayer, piece: _NeuronTask) -> set[int]:
    layer = work.layer
    area, first = layer.rows * layer.columns, piece.segment.channel // layer.filters * layer.channels
    return {first + channel for channel in range(piece.taps[0] // area, ceil(piece.taps[1] / area))}


def _is_in(piece: _NeuronTask, unit: ChannelRange) -> bool:
    return piece.gives.start < unit.end and unit.first < piece.gives.stop


def _reaches(network: OrderNetwork, number: int, earlier: int) -> list[set[int]]:
    """For each output channel of an earlier layer the input channels of a layer that it has a part in."""
    reaches, source = [], network.works[earlier]
    results = {
        work.node.output: np.zeros((work.channels, work.layer.out_rows if work.is_image else 1), np.int64)
        for work in network.works
    }
    for channel in range(source.channels):
        marked = results[source.node.output].copy()
        marked[channel] = 1
        value = network.works[number].node.inputs[0]
        times = exists_from(network.graph, value, {**results, source.node.output: marked})
        reaches.append({int(place) for place in np.flatnonzero(times.max(axis=1))})
    return reaches
