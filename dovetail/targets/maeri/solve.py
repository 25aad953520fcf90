"""The exact scheduler for small networks: every output channel a piece, placed on multipliers and time by CP-SAT.

A piece is one output channel of a layer, or what some input channels add to it: a rectangle of its virtual neuron's
multipliers times its cycles. Pieces do not overlap, and begin when the channels they read exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from dovetail.errors import MissingExtraError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.deal import laid_out
from dovetail.targets.maeri.delivery import Tile
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.schedule import Item, Schedule, Segment, ordered
from dovetail.targets.maeri.timing import Timing, timing
from dovetail.targets.maeri.tree import Range, line_of
from dovetail.targets.maeri.work import Network, Times, Work, exists_from

MOST_PIECES = 160
"""More pieces than this are not tried: the list scheduler is close to the bound there."""
_ROUNDS = 12
"""How often pieces that met on a line of the collection bus are kept off each other and the rest is solved again."""
Progress = Callable[[int, int], None]
"""Told each better order: its makespan, and the bound so far, in cycles."""


@dataclass(frozen=True)
class _Piece:
    """What one virtual neuron computes in one go."""

    work: int
    channel: int
    taps: tuple[int, int]
    time: Timing
    tile: Tile
    cycles: int
    """From the first weight to the last product."""


def solve(
    network: Network, config: MaeriConfig, rules: Rules, seconds: float, found: Progress = lambda makespan, bound: None
) -> Schedule | None:
    """The best order of whole output channels that is found in a time, with and without parts over input channels.

    Args:
        network: what to compute.
        config: on what; every multiplier must have a port.
        rules: the user's own.
        seconds: of search, as deterministic time.
        found: told each better order.

    Returns:
        None where the network is too large for it, or a channel does not fit.

    Raises:
        MissingExtraError: the solver is not installed.
    """
    best: Schedule | None = None
    for in_parts in (False, True):
        pieces = _pieces(network, config, in_parts)
        if pieces and len(pieces) <= MOST_PIECES and not config.shared_ports:
            made = _solve(network, config, rules, pieces, seconds / 2, found)
            if made and (best is None or made.makespan < best.makespan):
                best = made
    return best


def _pieces(network: Network, config: MaeriConfig, in_parts: bool) -> list[_Piece]:
    """The pieces of a network; none where a layer's sums do not fit."""
    pieces: list[_Piece] = []
    for number, work in enumerate(network.works):
        area = work.layer.rows * work.layer.columns
        divided = in_parts and work.layer.channels > 1 and config.accumulation_buffer and area > 1
        step = area if divided else work.layer.taps
        folds = -(-step // config.multipliers)
        if folds > 1 and not (config.fold and config.accumulation_buffer):
            return []
        tile = Tile(channels=-(-step // folds))
        time = timing(config, work.layer, tile, step)
        cycles = time.load + time.positions(work.layer.out_columns, 0, work.positions)
        for channel in range(work.outputs):
            if len(pieces) > MOST_PIECES:
                return pieces
            parts = [(first, first + step) for first in range(0, work.layer.taps, step)]
            pieces += [_Piece(number, channel, taps, time, tile, cycles) for taps in parts]
    return pieces


def _solve(
    network: Network, config: MaeriConfig, rules: Rules, pieces: list[_Piece], seconds: float, found: Progress
) -> Schedule | None:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError("ortools", "solver", "finding the best order") from error
    model: Any = cp_model.CpModel()
    horizon = sum(piece.cycles + piece.time.tail for piece in pieces)
    starts = [model.new_int_var(0, horizon, "") for _ in pieces]
    places = [model.new_int_var(0, config.multipliers - _width(piece), "") for piece in pieces]
    spans = [model.new_fixed_size_interval_var(start, piece.cycles, "")
             for start, piece in zip(starts, pieces, strict=True)]
    rows = [model.new_fixed_size_interval_var(place, _width(piece), "")
            for place, piece in zip(places, pieces, strict=True)]
    model.add_no_overlap_2d(spans, rows)
    model.add_cumulative(spans, [_width(piece) for piece in pieces], config.multipliers)
    if rules.at_most is not None:
        model.add_cumulative(spans, [1] * len(pieces), rules.at_most)
    _precedences(model, network, rules, pieces, starts, spans)
    makespan = model.new_int_var(0, horizon, "")
    for start, piece in zip(starts, pieces, strict=True):
        model.add(makespan >= start + piece.cycles + piece.time.tail)
    model.minimize(makespan)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_search_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.log_search_progress = False
    for _ in range(_ROUNDS):
        if solver.solve(model, _telling(cp_model, found)) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        at = [(solver.value(start), Range(solver.value(place), _width(piece)))
              for piece, start, place in zip(pieces, starts, places, strict=True)]  # fmt: skip
        crossing = _crossing(config, pieces, at)
        if not crossing:
            return _schedule(network, config, pieces, at)
        for one, other in crossing:
            _keep_off(model, config, pieces, starts, places, (one, other))
    return None


def _schedule(
    network: Network, config: MaeriConfig, pieces: list[_Piece], at: list[tuple[int, Range]]
) -> Schedule:
    items = [
        Item(piece.work, piece.tile, place, start, (Segment(piece.channel, 0, network.works[piece.work].positions),),
             piece.taps)
        for piece, (start, place) in zip(pieces, at, strict=True)
    ]  # fmt: skip
    exists = [laid_out(tuple(item for item in items if item.work == number), work, config).exists
              for number, work in enumerate(network.works)]  # fmt: skip
    return Schedule(network, config, ordered(items), max(exists))


def _crossing(
    config: MaeriConfig, pieces: list[_Piece], at: list[tuple[int, Range]]
) -> list[tuple[int, int]]:
    """Pairs of pieces that work at the same time and give more sums to one line than it takes."""
    found = []
    for (one, (start, place)), (other, (later, there)) in combinations(enumerate(at), 2):
        meet = start < later + pieces[other].cycles and later < start + pieces[one].cycles
        if meet and _too_many(pieces[one], pieces[other]):
            lines = {line_of(config.multipliers, config.collection, each) for each in (place, there)}
            found += [(one, other)] if len(lines) == 1 else []
    return found


def _too_many(one: _Piece, other: _Piece) -> bool:
    return 1.0 / one.time.later + 1.0 / other.time.later > 1.0


def _keep_off(
    model: Any, config: MaeriConfig, pieces: list[_Piece], starts: list[Any], places: list[Any], pair: tuple[int, int]
) -> None:
    """Two pieces use different lines, or one comes after the other."""
    lines = []
    for index in pair:
        width = _width(pieces[index])
        table = [line_of(config.multipliers, config.collection, Range(place, width))
                 for place in range(config.multipliers - width + 1)]  # fmt: skip
        number = model.new_int_var(0, config.collection, "")
        model.add_element(places[index], table, number)
        lines.append(number)
    one, other = pair
    apart, first, second = (model.new_bool_var("") for _ in range(3))
    model.add(lines[0] != lines[1]).only_enforce_if(apart)
    model.add(starts[one] + pieces[one].cycles <= starts[other]).only_enforce_if(first)
    model.add(starts[other] + pieces[other].cycles <= starts[one]).only_enforce_if(second)
    model.add_bool_or(apart, first, second)


def _width(piece: _Piece) -> int:
    return max(piece.time.size, 2)


def _precedences(
    model: Any, network: Network, rules: Rules, pieces: list[_Piece], starts: list[Any], spans: list[Any]
) -> None:
    """A piece's first product waits for the channels it reads, and for the user's rules."""
    numbers = {work.name: number for number, work in enumerate(network.works)}
    own: dict[int, list[int]] = {number: [] for number in range(len(network.works))}
    for index, piece in enumerate(pieces):
        own[piece.work].append(index)
    reached: dict[tuple[int, int], list[set[int]]] = {}
    for index, piece in enumerate(pieces):
        work = network.works[piece.work]
        for earlier in network.before(work):
            number = numbers[earlier.name]
            reaches = reached.setdefault((piece.work, number), _reaches(network, work, earlier))
            for other in own[number]:
                if reaches[pieces[other].channel] & _channels_read(work, piece):
                    exists = starts[other] + pieces[other].cycles + pieces[other].time.tail
                    model.add(starts[index] + piece.time.load >= exists)
    for x, y in rules.before:
        for other in own[numbers[x]]:
            for index in own[numbers[y]]:
                model.add(starts[index] >= starts[other] + pieces[other].cycles + pieces[other].time.tail)
    for x, y in rules.apart:
        for other in own[numbers[x]]:
            for index in own[numbers[y]]:
                model.add_no_overlap([spans[other], spans[index]])


def _channels_read(work: Work, piece: _Piece) -> set[int]:
    """The input channels a piece reads."""
    layer = work.layer
    area, first = layer.rows * layer.columns, piece.channel // layer.filters * layer.channels
    return {first + channel for channel in range(piece.taps[0] // area, -(-piece.taps[1] // area))}


def _reaches(network: Network, work: Work, earlier: Work) -> list[set[int]]:
    """Which input channels of a layer each output channel of an earlier one has a part in."""
    reaches = []
    for channel in range(earlier.outputs):
        known = {each.node.output: _no_times(each) for each in network.works}
        known[earlier.node.output][channel] = 1
        times = exists_from(network.graph, work.node.inputs[0], known)
        reaches.append({int(place) for place in np.flatnonzero(times.max(axis=1))})
    return reaches


def _no_times(work: Work) -> Times:
    return np.zeros((work.outputs, work.layer.out_rows if work.is_image else 1), np.int64)


def _telling(cp_model: Any, found: Progress) -> Any:
    """A callback of the solver."""

    class Telling(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            found(round(self.objective_value), round(self.best_objective_bound))

    return Telling()


