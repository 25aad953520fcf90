"""MAERI's cycles by formulas, which know nothing of the machine's events: its judge.

All weights of a filter come first, at most one step of them per cycle; then positions, rows first, at most one step per
cycle. The next filter's weights wait until the last sum has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tile import (
    FeedbackLoops,
    FeedbackRun,
    MultiplierTile,
    grid,
    neuron_group,
    play_feedback,
    rounds,
)
from dovetail.targets.maeri.tree import sums_by_cycle, sums_taken

MOST_STEPS = 300
"""Steps of a virtual neuron that are played at most for the long run, but two positions at least."""
SHORT = 120
"""Sums of at most so many steps are played to their end; later, the end of the first virtual neurons does not count."""


def until(loops: FeedbackLoops, count: int) -> int:
    """Cycles from the first product until every virtual neuron has given `count` sums to the bus."""
    if len(loops.exits) == 1:
        return count * loops.alone
    run, climb = _played(loops, count if count * loops.folds <= SHORT else 0), max(each.most for each in loops.exits)
    return max(run.end(number, count) for number in range(len(loops.exits))) - climb - 1


def pace_of(loops: FeedbackLoops, positions: int) -> tuple[int, int]:
    """(cycles, positions) of the slowest virtual neuron in the long run, where each has `positions` in all."""
    if len(loops.exits) == 1:
        return loops.alone, 1
    if positions * loops.folds <= SHORT:
        return until(loops, positions), positions
    run = _played(loops, 0)
    return max(zip(run.period, run.repeated, strict=True), key=lambda pair: pair[0] / pair[1])


@lru_cache(maxsize=4096)
def _played(loops: FeedbackLoops, count: int) -> FeedbackRun:
    return play_feedback(loops, count, loops.folds * count or max(MOST_STEPS, 2 * loops.folds))


@dataclass(frozen=True, slots=True)
class FormulaTiming:
    """Cycles of the virtual neurons of a tile, from one place on."""

    size: int
    """Multipliers of a virtual neuron, the one that carries sums back included."""
    folds: int
    """Steps of one sum."""
    load: int
    """Cycles to send a segment's weights."""
    lead: int
    """Cycles from the first weight until some input may be sent."""
    rates: tuple[tuple[int, int], ...]
    """Cycles in which ports send the inputs of a row's first position, and of every other position."""
    pace: tuple[int, int]
    """(cycles, positions): the least that so many positions take in the long run, whatever is sent."""
    loops: FeedbackLoops | None
    """The way of sums back to the virtual neuron between steps; None where they stay in the accumulation buffer."""
    counted: tuple[int, ...]
    """Sums of a position in memory after each of the last cycles of `tail`; all of them after the last."""
    tail: int
    """Cycles from a position's last product until all its sums are in memory."""
    prefetch: bool
    """Whether multipliers have a place for the next segment's weights, which else wait for the last sum."""

    def positions(self, columns: int, first: int, count: int) -> int:
        """Cycles of `count` positions from `first` on, in rows of `columns`; the first of them counts as a row's."""
        if not count:
            return 0
        rows = 1 + (first + count - 1) // columns - first // columns
        row = count if rows == 1 else (first + count - 1) % columns + 1
        cycles = until(self.loops, count) if self.loops else self.folds + self._paced(count - 1)
        for start, later in self.rates:
            cycles = max(cycles, rows * start + (count - rows) * later)
            cycles = max(cycles, self._paced(count - row) + start + (row - 1) * later)  # a row's burst comes last
            for number, opens in ((1, 0), (2, columns - first % columns), (rows, count - row)):
                if number <= rows:  # after a row's burst, a step per cycle
                    sent = number * start + (opens - number + 1) * later
                    cycles = max(cycles, sent + (count - 1 - opens) * self.folds)
        return cycles

    def _paced(self, count: int) -> int:
        if self.loops:
            return until(self.loops, count) if count else 0
        return -(-count * self.pace[0] // self.pace[1])


@lru_cache(maxsize=65536)
def timing(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, taps: int, at: int = 0) -> FormulaTiming:
    """Times of virtual neurons from multiplier `at` on, which add up `taps` products of each sum."""
    group = neuron_group(config, layer, tile, taps, at)
    folds, (rows, columns) = group.folds, grid(layer, tile)
    together = sums_by_cycle(group.lines)
    sent = ((port, (folds - 1) * port.back) for port in group.ports)
    rates = {(folds * port.first + back, folds * port.later + back) for port, back in sent}
    if group.loops:
        pace, counted = pace_of(group.loops, rows * columns), [tile.neurons]
    else:
        pace = (max(folds, len(together)), 1)
        counted = _sums_in_memory(together, max(pace[0], *(later for _, later in rates)), rows * columns)
    loads = [folds * port.weights for port in group.ports]
    tail = max(exit_.most for exit_ in group.exits) + config.bus_delay + len(counted)
    paces = (max(loads), min(loads), tuple(sorted(rates)), pace)
    return FormulaTiming(group.width, folds, *paces, group.loops, tuple(counted), tail, config.prefetch > 0)


def _sums_in_memory(together: Sequence[int], period: int, positions: int) -> list[int]:
    """Sums of the last position that the memory has taken after each cycle, from the first that comes.

    Args:
        together: sums that come in each cycle of one position.
        period: cycles between positions.
        positions: number of them; a few are enough.
    """
    waiting = 0
    for _ in range(min(positions - 1, 30)):
        for cycle in range(max(len(together), min(period, 40))):
            waiting = (waiting + (together[cycle] if cycle < len(together) else 0)) // 2
    return [max(count - waiting, 0) for count in sums_taken(together, waiting)]


def formula_cycles(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> int:
    """Cycles of a layer that one tile computes, filter after filter.

    The memory counts sums, those beyond the image's edge too: where tiles jut out, the next filter's weights are sent
    before the last sums of this one have come, and where these go round, as soon as ports have sent all inputs.
    """
    time, moves, (rows, columns) = timing(config, layer, tile, layer.taps), rounds(layer, tile), grid(layer, tile)
    count = rows * columns
    whole = time.load + time.positions(columns, 0, count)
    beyond = count * tile.out_rows * tile.out_columns - layer.out_rows * layer.out_columns
    if not beyond or config.prefetch:
        return moves * (whole + time.tail)
    each, least = tile.filters * tile.groups, whole
    if time.loops:
        sent = max(rows * first + rows * (columns - 1) * later for first, later in time.rates)
        least = max(time.load + sent, whole - time.load)
    cycles = whole + time.tail
    for number in range(1, moves):
        wanted = tile.neurons * count - number * each * beyond
        position = max(ceil(wanted / tile.neurons), 0)
        missing = sum(done < wanted - (position - 1) * tile.neurons for done in time.counted) - len(time.counted) + 1
        early = time.load + time.positions(columns, 0, position) + time.tail + missing if position else 0
        cycles += max(least, min(early, whole + time.tail))
    return cycles
