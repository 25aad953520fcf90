"""Cycles of virtual neurons in step, by formulas: the times that the scheduler, the compiler and the bound use.

`machine.py` plays the same hardware event by event. Both take traffic and places from `tile.py`, and the way round of
sums from `feedback.py`.

All weights of a filter come first, at most one step of them per cycle; then positions, rows first, at most one step per
cycle. The next filter's weights wait until the last sum has left, unless multipliers have a place for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from dovetail.errors import TargetError
from dovetail.targets.maeri.config import TAIL_CYCLES, MaeriConfig
from dovetail.targets.maeri.feedback import FeedbackLoops
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.tile import MultiplierTile, grid, neuron_group, rounds, steps
from dovetail.targets.maeri.tree import sums_by_cycle


@dataclass(frozen=True, slots=True)
class ItemTiming:
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
    tail: int
    """Cycles from a position's last product until all its sums are in memory."""
    idle: int
    """Cycles of a position in which the next segment's weights may be sent; 0 without a place for them."""
    counted: tuple[int, ...]
    """Sums of a position in memory after each of the last cycles of `tail`; all of them after the last."""
    drains: bool
    """Whether the next segment's weights wait until the last sum is in memory."""

    @property
    def later(self) -> int:
        """Cycles of a position that is not a row's first, in the long run."""
        return max(ceil(self.pace[0] / self.pace[1]), *(later for _, later in self.rates))

    def fitting(self, cycles: int) -> int:
        """Positions, all alike, that end within so many cycles."""
        if cycles < self.folds:
            return 0
        return min(cycles // max(later for _, later in self.rates), cycles * self.pace[1] // self.pace[0])

    def load_after(self, positions: int) -> int:
        """Cycles between the last product of one segment and the first of the next.

        Args:
            positions: of the segment before; 0 if there is none.
        """
        drained = self.tail if positions and self.drains else 0
        space = max(ceil(self.pace[0] / self.pace[1]) - self.folds, 0) if positions and not self.drains else 0
        return drained + max(self.load - self.idle * positions, space)

    def positions(self, columns: int, first: int, count: int) -> int:
        """Cycles of `count` positions from `first` on, in rows of `columns`; the first of them counts as a row's."""
        if not count:
            return 0
        rows = 1 + (first + count - 1) // columns - first // columns
        row = count if rows == 1 else (first + count - 1) % columns + 1
        cycles = self.loops.until(count) if self.loops else self.folds + self._paced(count - 1)
        for start, later in self.rates:
            cycles = max(cycles, rows * start + (count - rows) * later)
            cycles = max(cycles, self._paced(count - row) + start + (row - 1) * later)  # a row's burst comes last
            for number, opens in ((1, 0), (2, columns - first % columns), (rows, count - row)):
                if number <= rows:  # after a row's burst, a step per cycle
                    sent = number * start + (opens - number + 1) * later
                    cycles = max(cycles, sent + (count - 1 - opens) * self.folds)
        return cycles

    def apart(self, count: int) -> int:
        """Cycles of `count` positions, at least one, each in a row of its own: `positions(1, 0, count)`, of which only
        the last and the first burst can be the slowest."""
        burst, rest = max(self.rates)[0], self._paced(count - 1)
        cycles = self.loops.until(count) if self.loops else self.folds + rest
        return max(cycles, count * burst, burst + rest, burst + (count - 1) * self.folds)

    def _paced(self, count: int) -> int:
        if self.loops:
            return self.loops.until(count) if count else 0
        return -(-count * self.pace[0] // self.pace[1])


@lru_cache(maxsize=65536)
def timing(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile, taps: int, at: int = 0) -> ItemTiming:
    """Times of virtual neurons from multiplier `at` on, which add up `taps` products of each sum.

    Raises:
        TargetError: the tile does not fit the multipliers, a sum needs more steps than a multiplier holds weights, or
            several where folding is off.
    """
    _check(config, tile, taps, steps(layer, tile, taps))
    group = neuron_group(config, layer, tile, taps, at)
    folds, (rows, columns) = group.folds, grid(layer, tile)
    together = sums_by_cycle(exit_.line for exit_ in group.exits)
    rates = {
        (folds * port.first + back, folds * port.later + back)
        for port in group.ports
        for back in [(folds - 1) * port.back]
    }
    if group.loops:
        pace, counted = group.loops.pace(rows * columns), [tile.neurons]
    else:
        pace = (max(folds, len(together)), 1)
        counted = _sums_in_memory(together, max(pace[0], *(later for _, later in rates)), rows * columns)
    return ItemTiming(
        size=group.width,
        folds=folds,
        load=folds * max(port.weights for port in group.ports),
        lead=folds * min(port.weights for port in group.ports),
        rates=tuple(sorted(rates)),
        pace=pace,
        loops=group.loops,
        tail=max(exit_.most for exit_ in group.exits) + config.bus_delay + len(counted),
        idle=max(pace[0] // pace[1] - max(first for first, _ in rates), 0) if config.prefetch else 0,
        counted=tuple(counted),
        drains=not config.prefetch,
    )


def _check(config: MaeriConfig, tile: MultiplierTile, taps: int, folds: int) -> None:
    used = (tile.size + config.carried(folds)) * tile.neurons
    if used > config.multipliers:
        what = f"the tile needs {used} multipliers, there are {config.multipliers}"
        raise TargetError(what, where="MAERI", hint="take smaller virtual neurons, or more multipliers")
    if folds > 1 and not config.fold:
        what = f"a sum of {taps} products does not fit a virtual neuron of {tile.size}, and folding is off"
        raise TargetError(what, where="MAERI", hint="allow folding, or take more multipliers")
    if folds > config.weight_depth:
        what = f"a sum needs {folds} steps, a multiplier holds {config.weight_depth} weights"
        hint = f"take larger virtual neurons, or --set weight_depth={folds}"
        raise TargetError(what, where="MAERI", hint=hint)


def _sums_in_memory(together: Sequence[int], period: int, positions: int) -> list[int]:
    """Sums of the last position that the memory has taken after each cycle, from the first that comes.

    The memory takes half of the sums that wait, as in the public simulator, whose cycles are measured.

    Args:
        together: sums that come in each cycle of one position.
        period: cycles between positions.
        positions: number of them; a few are enough.
    """
    waiting = 0
    for _ in range(min(positions - 1, 30)):
        for cycle in range(max(len(together), min(period, 40))):
            waiting = (waiting + (together[cycle] if cycle < len(together) else 0)) // 2
    counts, earlier, total, done = list[int](), waiting, waiting + sum(together), 0
    while done < total:
        waiting += together[len(counts)] if len(counts) < len(together) else 0
        done += waiting - waiting // 2
        waiting //= 2
        counts.append(max(done - earlier, 0))
    return counts


def addition_cycles(config: MaeriConfig, elements: int) -> int:
    """Cycles to add two images: both operands are sent, and each line's stage scales three numbers per element."""
    return max(ceil(2 * elements / config.distribution), ceil(3 * elements / config.collection)) + TAIL_CYCLES


def uniform_cycles(layer: OrderLayer, tile: MultiplierTile, config: MaeriConfig) -> int:
    """Cycles of a layer that one tile computes, filter after filter.

    The memory counts sums, those beyond the image's edge too: where tiles jut out, the next filter's weights are sent
    before the last sums of this one have come, and where these go round, as soon as ports have sent all inputs.

    Raises:
        TargetError: the tile does not fit the multipliers, or needs several steps per sum where folding is off.
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
