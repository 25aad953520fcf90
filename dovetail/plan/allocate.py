"""Gives every buffer a fixed address, sharing memory between buffers that are never in use together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.program.ir import CORE, Buffer, Role, Statement, Wait, queue_of, reads, writes
from dovetail.target.description import Memory


@dataclass(frozen=True)
class Lifetime:
    """When a buffer is in use, in statement indices."""

    first: int
    """The first statement that touches it is issued."""
    last: int
    """The last statement that touches it is issued."""
    first_by_queue: Mapping[str, int]
    last_by_queue: Mapping[str, int]

    def covers(self, index: int) -> bool:
        """True when the buffer is in use at a statement."""
        return self.first <= index <= self.last


@dataclass(frozen=True)
class Placement:
    """Addresses in one memory."""

    memory: str
    addresses: Mapping[str, int]
    peak: int
    """Bytes from the memory's base to the end of the highest buffer."""
    lower_bound: int
    """Bytes that are in use together at some statement: no placement can need less."""
    busiest: int
    """The statement where that is so."""


def lifetimes(statements: Sequence[Statement], buffers: Mapping[str, Buffer], dma: str) -> dict[str, Lifetime]:
    """The lifetime of every buffer some statement touches; inputs live from the start, outputs to the end,
    states from start to end."""
    firsts: dict[str, dict[str, int]] = {}
    lasts: dict[str, dict[str, int]] = {}
    for index, statement in enumerate(statements):
        queue = queue_of(statement, dma)
        for view in (*reads(statement), *writes(statement)):
            firsts.setdefault(view.buffer, {}).setdefault(queue, index)
            lasts.setdefault(view.buffer, {})[queue] = index
    found: dict[str, Lifetime] = {}
    for name, first in firsts.items():
        begin, end = dict(first), dict(lasts[name])
        if buffers[name].role in (Role.INPUT, Role.STATE):
            begin[CORE] = -1
        if buffers[name].role in (Role.OUTPUT, Role.STATE):
            end[CORE] = len(statements)
        found[name] = Lifetime(min(begin.values()), max(end.values()), begin, end)
    return found


class Order:
    """Which statements are known to have finished before others are issued."""

    def __init__(self, statements: Sequence[Statement], dma: str) -> None:
        self._waits: dict[str, list[tuple[int, int]]] = {}
        for index, statement in enumerate(statements):
            if isinstance(statement, Wait):
                self._waits.setdefault(statement.queue, []).append((statement.statement, index))

    def finished_at(self, queue: str, index: int) -> int:
        """Index of the statement by whose issue the one at `index` has surely finished."""
        if queue == CORE:
            return index
        later = (position for upto, position in self._waits.get(queue, ()) if upto >= index)
        return next(later, 1 << 30)

    def before(self, a: Lifetime, b: Lifetime) -> bool:
        """True when everything done to one buffer has finished before anything is done to the other."""
        for queue, last in a.last_by_queue.items():
            done = self.finished_at(queue, last)
            for other, first in b.first_by_queue.items():
                in_queue_order = queue == other and last < first
                if not in_queue_order and done >= first:
                    return False
        return True


def place(
    memory: Memory,
    buffers: Mapping[str, Buffer],
    spans: Mapping[str, Lifetime],
    order: Order,
    exact_seconds: float = 0.0,
) -> Placement:
    """Addresses for the buffers of one memory, peak as low as found.

    Args:
        memory: the memory; its size is not checked here.
        buffers: all buffers; those of other memories, and constants, are passed over.
        spans: lifetimes.
        order: the order of statements.
        exact_seconds: how long the exact solver may take where the greedy answer is above the lower bound; 0 for never.
    """
    mine = {
        name: buffer
        for name, buffer in buffers.items()
        if buffer.memory == memory.name and buffer.role is not Role.CONSTANT and name in spans
    }
    sizes = {name: -(-buffer.nbytes // memory.alignment) * memory.alignment for name, buffer in mine.items()}
    bound, busiest = _lower_bound(sizes, spans)
    clashes = _clashes(list(mine), spans, order)
    best: dict[str, int] = {}
    best_peak = -1
    for ranking in _rankings(sizes, spans):
        offsets = _first_fit(ranking, sizes, clashes)
        peak = max((offsets[name] + sizes[name] for name in offsets), default=0)
        if best_peak < 0 or peak < best_peak:
            best, best_peak = offsets, peak
    if best_peak > bound and exact_seconds > 0:
        from dovetail.plan.exact import improve

        best, best_peak = improve(sizes, clashes, best, bound, memory.alignment, exact_seconds)
    addresses = {name: memory.base + offset for name, offset in best.items()}
    return Placement(memory.name, addresses, best_peak, bound, busiest)


def _clashes(names: list[str], spans: Mapping[str, Lifetime], order: Order) -> dict[str, set[str]]:
    """The buffers that must not share bytes with each buffer."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for position, a in enumerate(names):
        for b in names[position + 1 :]:
            if not (order.before(spans[a], spans[b]) or order.before(spans[b], spans[a])):
                found[a].add(b)
                found[b].add(a)
    return found


def _lower_bound(sizes: Mapping[str, int], spans: Mapping[str, Lifetime]) -> tuple[int, int]:
    changes: dict[int, int] = {}
    for name, size in sizes.items():
        changes[spans[name].first] = changes.get(spans[name].first, 0) + size
        changes[spans[name].last + 1] = changes.get(spans[name].last + 1, 0) - size
    live, most, busiest = 0, 0, 0
    for index in sorted(changes):
        live += changes[index]
        if live > most:
            most, busiest = live, index
    return most, busiest


def _rankings(sizes: Mapping[str, int], spans: Mapping[str, Lifetime]) -> list[list[str]]:
    """Orders worth trying: largest first, longest-lived first, by bytes times life, by time."""
    names = list(sizes)
    length = {name: spans[name].last - spans[name].first + 1 for name in names}
    return [
        sorted(names, key=lambda name: (-sizes[name], spans[name].first)),
        sorted(names, key=lambda name: (-length[name], -sizes[name])),
        sorted(names, key=lambda name: (-sizes[name] * length[name], spans[name].first)),
        sorted(names, key=lambda name: (spans[name].first, -sizes[name])),
        sorted(names, key=lambda name: (-spans[name].last, -sizes[name])),
    ]


def _first_fit(ranking: list[str], sizes: Mapping[str, int], clashes: Mapping[str, set[str]]) -> dict[str, int]:
    offsets: dict[str, int] = {}
    for name in ranking:
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in clashes[name] if other in offsets)
        start = 0
        for low, high in taken:
            if low - start >= sizes[name]:
                break
            start = max(start, high)
        offsets[name] = start
    return offsets
