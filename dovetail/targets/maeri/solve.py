"""The best order found in a time: the list scheduler's at once, an exact one of small networks, then better sizes.

The exact scheduler places pieces on multipliers and time by CP-SAT. A piece is one output channel of a layer, or what
some input channels add to it: a rectangle of its virtual neuron's multipliers times its cycles. Pieces do not overlap,
and begin when the channels they read exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from dovetail.errors import MissingExtraError, SimulationError, TargetError
from dovetail.targets.maeri.tile import MultiplierTile, tile_of
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.clashes import asked
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.kept import broken
from dovetail.targets.maeri.listing import arrange, tried_sizes
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork, exists_from
from dovetail.targets.maeri.order import ChannelSegment, Item, NetworkOrder, laid_out, in_order
from dovetail.targets.maeri.rules import ChannelRange, Rules, UnitRules
from dovetail.targets.maeri.simulate import check
from dovetail.targets.maeri.timing import ItemTiming, timing
from dovetail.targets.maeri.tree import Range, line_of

CLOSE = 1.005
"""Orders this near the bound are not improved."""
MOST_PIECES = 160
"""More pieces than this are not tried: the list scheduler is close to the bound there."""
_ROUNDS = 12
"""How often pieces that met on a line of the collection bus are kept off each other and the rest is solved again."""
Found = Callable[[str, int, int], None]
"""Told every better order: what found it, its makespan and the bound, in cycles."""


def best_order(
    network: OrderNetwork,
    config: MaeriConfig,
    rules: Rules | None = None,
    seconds: float = 5.0,
    found: Found = lambda how, makespan, bound: None,
) -> NetworkOrder:
    """An order of a network, the best that is found.

    The list scheduler's comes first and is always valid. A small network is then solved as a whole (the extra
    "solver"); for others, one layer after the other tries other virtual neurons, the longest layer first.

    Args:
        network: what to compute.
        config: on what.
        rules: the user's own.
        seconds: to spend on better orders; the same orders come of the same time only where all are tried.
        found: told each better order.

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
    found("list", best.makespan, least)
    if seconds <= 0:
        return best
    try:
        solved = _solved(network, config, rules, until)
    except MissingExtraError:
        solved = None
    if solved is not None and solved.makespan < best.makespan and is_sound(solved, rules):
        best = solved
        found("exact", best.makespan, least)
    if config.shared_ports or rules != Rules():
        return best
    chosen: dict[int, int] = {}
    for number in sorted(range(len(network.works)), key=lambda number: (-network.works[number].layer.macs, number)):
        for size in tried_sizes(network.works[number], config, False):
            if best.makespan <= least * CLOSE or time.process_time() + took > until:
                return best
            try:
                made = arrange(network, config, rules, {**chosen, number: size})
            except TargetError:  # the memories
                continue
            if made.makespan < best.makespan:
                best, chosen = made, {**chosen, number: size}
                found("list, other sizes", best.makespan, least)
    return best


def is_sound(order: NetworkOrder, rules: Rules) -> bool:
    """Whether the hardware can do what an order says, by the time it says, and the rules are kept."""
    try:
        return check(order) <= order.makespan and not broken(order, rules)
    except (SimulationError, TargetError):
        return False


def _solved(network: OrderNetwork, config: MaeriConfig, rules: Rules, until: float) -> NetworkOrder | None:
    """The best order of whole output channels that is found in time, with and without parts over input channels; None
    where the network is too large for it, or a channel does not fit."""
    best: NetworkOrder | None = None
    spelt = asked(rules, network, config)
    for in_parts in (False, True):
        pieces = _pieces(network, config, spelt, in_parts)
        if pieces and len(pieces) <= MOST_PIECES and not config.shared_ports:
            made = _SolverModel(network, config, spelt, pieces, until).solve(
                (until - time.process_time()) / (2 - in_parts)
            )
            if made and (best is None or made.makespan < best.makespan):
                best = made
    return best


@dataclass(frozen=True)
class _NeuronTask:
    """What one virtual neuron computes in one go."""

    work: int
    segment: ChannelSegment
    gives: range
    """The channels of the layer's result it has a part in."""
    taps: tuple[int, int]
    time: ItemTiming
    tile: MultiplierTile
    exists: int
    """Cycles from the first weight until its last sum has left, wherever it lies."""

    @property
    def width(self) -> int:
        """Multipliers it takes."""
        return max(self.time.size, 2)


def _pieces(network: OrderNetwork, config: MaeriConfig, spelt: UnitRules, in_parts: bool) -> list[_NeuronTask]:
    """The pieces of a network; none where a layer's sums do not fit."""
    pieces: list[_NeuronTask] = []
    for number, work in enumerate(network.works):
        area = work.layer.rows * work.layer.columns
        divided = in_parts and work.layer.channels > 1 and config.accumulation_buffer and area > 1
        step = area if divided and number not in spelt.whole else work.layer.taps
        folds = -(-step // config.multipliers)
        if folds > 1 and not (config.fold and config.accumulation_buffer and folds <= config.weight_depth):
            return []
        tile = tile_of(work.layer, -(-step // folds))
        time = timing(config, work.layer, tile, step)
        most = max(timing(config, work.layer, tile, step, at).tail for at in range(config.multipliers - time.size + 1))
        for segment, gives in _goals(work):
            if len(pieces) > MOST_PIECES:
                return pieces
            exists = time.load + time.positions(work.layer.out_columns, segment.first, segment.count) + most
            parts = [(first, first + step) for first in range(0, work.layer.taps, step)]
            pieces += [_NeuronTask(number, segment, gives, taps, time, tile, exists) for taps in parts]
    return pieces


_ROWS = 8
"""Pieces a dense layer of one vector is cut into, at most."""


def _goals(work: MultiplierLayer) -> Iterator[tuple[ChannelSegment, range]]:
    """What pieces of a layer compute, and the channels of its result they have a part in."""
    if work.turned:
        step = -(-work.positions // _ROWS)
        for first in range(0, work.positions, step):
            count = min(step, work.positions - first)
            yield ChannelSegment(0, first, count), range(first, first + count)
    else:
        for channel in range(work.outputs):
            yield ChannelSegment(channel, 0, work.positions), range(channel, channel + 1)


class _SolverModel:
    """Where and when pieces work, as a model of CP-SAT.

    Raises:
        MissingExtraError: the solver is not installed.
    """

    def __init__(
        self, network: OrderNetwork, config: MaeriConfig, spelt: UnitRules, pieces: Sequence[_NeuronTask], until: float
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
        for works, most, _ in spelt.limits:
            counted = [span for span, piece in zip(spans, pieces, strict=True) if piece.work in works]
            model.add_cumulative(counted, [1] * len(counted), most)
        self._precedences(spelt, spans)
        makespan = model.new_int_var(0, horizon, "")
        for start, piece in zip(self._starts, pieces, strict=True):
            model.add(makespan >= start + piece.exists)
        model.minimize(makespan)

    def _precedences(self, spelt: UnitRules, spans: Sequence[Any]) -> None:
        """A piece's first product waits for the channels it reads, and for the user's rules."""
        model, starts, pieces, works = self._model, self._starts, self._pieces, self._network.works
        numbers = {work.name: number for number, work in enumerate(works)}
        own: dict[int, list[int]] = {number: [] for number in range(len(works))}
        for index, piece in enumerate(pieces):
            own[piece.work].append(index)
        reached: dict[tuple[int, int], list[set[int]]] = {}
        for index, piece in enumerate(pieces):
            work = works[piece.work]
            for earlier in self._network.before(work):
                key = piece.work, numbers[earlier.name]
                if key not in reached:
                    reached[key] = _reaches(self._network, work, earlier)
                lead = 0 if work.turned else piece.time.lead
                read = _channels_read(work, piece)
                for other in own[key[1]]:
                    if any(reached[key][channel] & read for channel in pieces[other].gives):
                        model.add(starts[index] + lead >= starts[other] + pieces[other].exists)
        inside = {unit: [index for index in own[unit.work] if _is_in(pieces[index], unit)] for unit in spelt.units}
        for x, y in spelt.rules_before:
            for other, index in product(inside[x], inside[y]):
                model.add(starts[index] >= starts[other] + pieces[other].exists)
        for x, y in spelt.apart:
            for other, index in product(inside[x], inside[y]):
                model.add_no_overlap([spans[other], spans[index]])
        for unit, pin, _ in spelt.pins:
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
            found = [
                (piece, solver.value(start), Range(solver.value(place), piece.width))
                for piece, start, place in zip(self._pieces, self._starts, self._places, strict=True)
            ]
            crossing = self._crossing(found)
            if not crossing:
                return self._order(found)
            for pair in crossing:
                self._keep_off(pair)
        return None

    def _order(self, found: Sequence[tuple[_NeuronTask, int, Range]]) -> NetworkOrder:
        items, exists = list[Item](), []
        for number, work in enumerate(self._network.works):
            own = tuple(
                Item(number, piece.tile, Range(place.start, piece.time.size), start, (piece.segment,), piece.taps)
                for piece, start, place in found
                if piece.work == number
            )
            items += own
            exists.append(laid_out(own, work, self._config).exists)
        return NetworkOrder(self._network, self._config, in_order(items), max(exists))

    def _crossing(self, found: Sequence[tuple[_NeuronTask, int, Range]]) -> list[tuple[int, int]]:
        """Pairs of pieces that work at the same time and give their sums to one line."""
        pairs = []
        for (one, (piece, start, place)), (other, (second, later, there)) in combinations(enumerate(found), 2):
            if start < later + second.exists and later < start + piece.exists:
                lines = {
                    line_of(self._config.multipliers, self._config.collection, Range(each.start, one_piece.time.size))
                    for each, one_piece in ((place, piece), (there, second))
                }
                pairs += [(one, other)] if len(lines) == 1 else []
        return pairs

    def _keep_off(self, pair: tuple[int, int]) -> None:
        """Two pieces use different lines, or one comes after the other."""
        model, starts, pieces, config = self._model, self._starts, self._pieces, self._config
        lines = []
        for index in pair:
            width = pieces[index].width
            places = (Range(place, pieces[index].time.size) for place in range(config.multipliers - width + 1))
            table = [line_of(config.multipliers, config.collection, place) for place in places]
            number = model.new_int_var(0, config.collection, "")
            model.add_element(self._places[index], table, number)
            lines.append(number)
        one, other = pair
        apart, first, second = (model.new_bool_var("") for _ in range(3))
        model.add(lines[0] != lines[1]).only_enforce_if(apart)
        model.add(starts[one] + pieces[one].exists <= starts[other]).only_enforce_if(first)
        model.add(starts[other] + pieces[other].exists <= starts[one]).only_enforce_if(second)
        model.add_bool_or(apart, first, second)


def _channels_read(work: MultiplierLayer, piece: _NeuronTask) -> set[int]:
    layer = work.layer
    area, first = layer.rows * layer.columns, piece.segment.channel // layer.filters * layer.channels
    return {first + channel for channel in range(piece.taps[0] // area, -(-piece.taps[1] // area))}


def _is_in(piece: _NeuronTask, unit: ChannelRange) -> bool:
    """Whether a piece computes some of a unit's channels."""
    return piece.gives.start < unit.end and unit.first < piece.gives.stop


def _reaches(network: OrderNetwork, work: MultiplierLayer, earlier: MultiplierLayer) -> list[set[int]]:
    """Which input channels of a layer each output channel of an earlier one has a part in."""
    reaches = []
    for channel in range(earlier.channels):
        known = {
            each.node.output: np.zeros((each.channels, each.layer.out_rows if each.is_image else 1), np.int64)
            for each in network.works
        }
        known[earlier.node.output][channel] = 1
        times = exists_from(network.graph, work.node.inputs[0], known)
        reaches.append({int(place) for place in np.flatnonzero(times.max(axis=1))})
    return reaches
