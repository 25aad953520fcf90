"""When buffers are in use: what touches each, and what has surely finished when.

Buffers that only the core touches are looked at in parts: what of an operand has been read for the last time is free
while the rest is still wanted. A result may take the place of an operand that is not wanted any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

from dovetail import kernels
from dovetail.ir.crop import reads_in_place
from dovetail.program.ir import (
    CORE,
    Begin,
    Buffer,
    Buffers,
    Call,
    Queue,
    Role,
    Statement,
    Wait,
    issuer_of,
    queue_of,
    side_by_side,
)
from dovetail.program.ir import touches as views_touched
from dovetail.records import Record
from dovetail.target.chip import Memory


class Lifetime(Record, dict=True):
    """The statements between which a buffer, or a part of one, is in use, by index."""

    first_by_queue: Mapping[Queue, int]
    """The first statement of each queue that touches it."""
    last_by_queue: Mapping[Queue, int]

    @cached_property
    def first(self) -> int:
        """The first statement that touches it is issued."""
        return min(self.first_by_queue.values())

    @cached_property
    def last(self) -> int:
        """The last statement that touches it is issued."""
        return max(self.last_by_queue.values())

    def covers(self, index: int) -> bool:
        """True when the buffer is in use at a statement."""
        return self.first <= index <= self.last


Touch = tuple[int, Queue, int, int]
"""Index of a statement, its queue, and the first byte and one past the last byte of a buffer it touches."""
Used = tuple[Buffer, Sequence[Touch]]
"""A buffer and what touches it, in order."""


def touches(statements: Sequence[Statement], buffers: Buffers, dma: Queue) -> dict[str, list[Touch]]:
    """Every access to each buffer, in order; to an input that nothing reads, none."""
    accesses: dict[str, list[Touch]] = {}
    together = side_by_side(statements)
    for index, statement in enumerate(statements):
        queue = queue_of(statement, dma)
        for view, _ in views_touched(statement):
            turn = together.get(index)  # launches side by side are in no order
            places = (turn[0], turn[-1]) if turn else (index,)
            accesses.setdefault(view.buffer, []).extend((place, queue, *view.span) for place in places)
    for name, buffer in buffers.items():
        if buffer.role is Role.INPUT:
            accesses.setdefault(name, [])  # the user writes it, even where nothing reads it
    return accesses


def lifetime(used: Sequence[Used], end: int) -> Lifetime:
    """The lifetime of buffers as one, of `end` statements; inputs live from the start, outputs to the end, states from
    start to end."""
    first: dict[Queue, int] = {}
    last: dict[Queue, int] = {}
    for buffer, accesses in used:
        ends = [(-1, CORE)] if buffer.role in (Role.INPUT, Role.STATE) else []
        ends += [(end, CORE)] if buffer.role in (Role.OUTPUT, Role.STATE) else []
        for index, queue in (*((index, queue) for index, queue, _, _ in accesses), *ends):
            first[queue] = min(first.get(queue, index), index)
            last[queue] = max(last.get(queue, index), index)
    return Lifetime(first, last)


class BufferFragment(Record):
    """A stretch of a buffer all of which is in use at the same times."""

    start: int
    """Bytes from the start of the buffer."""
    stop: int
    span: Lifetime


def pieces(used: Sequence[Used], end: int, alignment: int) -> tuple[BufferFragment, ...]:
    """One buffer, or several of one size that lie at one place in turn, cut where the lifetime changes.

    Args:
        used: the buffers.
        end: number of statements.
        alignment: bytes; pieces begin and end at multiples of it.
    """
    size = aligned(used[0][0].nbytes, alignment)
    if any(queue != CORE for _, accesses in used for _, queue, _, _ in accesses):
        return (BufferFragment(0, size, lifetime(used, end)),)
    whole = [
        (buffer, [(i, q, start // alignment * alignment, aligned(stop, alignment)) for i, q, start, stop in accesses])
        for buffer, accesses in used
    ]
    cuts = sorted({0, size, *(place for _, accesses in whole for touch in accesses for place in touch[2:])})
    fragments: list[BufferFragment] = []
    for start, stop in pairwise(cuts):
        own = [(buffer, [t for t in accesses if t[2] <= start and stop <= t[3]]) for buffer, accesses in whole]
        own = [(buffer, accesses) for buffer, accesses in own if accesses or buffer.role in _KEPT]
        if not own:
            continue
        span = lifetime(own, end)
        if fragments and fragments[-1].stop == start and fragments[-1].span == span:
            start = fragments.pop().start
        fragments.append(BufferFragment(start, stop, span))
    return tuple(fragments)


_KEPT = (Role.INPUT, Role.OUTPUT, Role.STATE)
"""Buffers that are in use whatever touches them."""


def aligned(size: int, alignment: int) -> int:
    """The next multiple of an alignment."""
    return -(-size // alignment) * alignment


class StatementOrder:
    """Which statements are known to have finished before others are issued."""

    def __init__(self, statements: Sequence[Statement], dma: Queue) -> None:
        work = [one for one in statements if not isinstance(one, Begin | Wait)]
        self._issuers = {queue_of(one, dma): issuer_of(one) for one in work}
        self._waits: dict[Queue, list[tuple[int, int, str]]] = {queue: [] for queue in self._issuers}
        """By queue: the statement waited for, the wait, and the list or core that knows (empty: everybody)."""
        self._known: dict[tuple[Queue, str], tuple[list[int], list[int]]] = {}
        for index, statement in enumerate(statements):
            if isinstance(statement, Wait):
                whole = "" if statement.known_to else self._issuers[statement.queue]
                for queue, issuer in self._issuers.items():
                    if queue == statement.queue or (whole and issuer == whole):  # core 0 waits for whole lists
                        self._waits[queue].append((statement.statement, index, statement.known_to))

    def finished_at(self, queue: Queue, index: int, reader: Queue = CORE) -> int:
        """Index of the statement by whose issue, on the queue `reader`, the one at `index` has surely finished."""
        if queue == CORE:
            return index
        issuer = self._issuers.get(reader, "")
        if (queue, issuer) not in self._known:
            self._known[queue, issuer] = self._waited(queue, issuer)
        upto, places = self._known[queue, issuer]
        first = bisect_left(upto, index)
        return places[first] if first < len(places) else 1 << 30

    def _waited(self, queue: Queue, issuer: str) -> tuple[list[int], list[int]]:
        """The statements of a queue that a list or further core (empty: core 0) has waited for, each with the wait."""
        upto, places = list[int](), list[int]()
        for last, place, waiter in self._waits.get(queue, ()):
            if waiter in ("", issuer) and (not upto or last > upto[-1]):
                upto.append(last)
                places.append(place)
        return upto, places

    def over(self, life: Lifetime, reader: Queue = CORE) -> int:
        """Index of the statement by whose issue, on the queue `reader`, everything done to a buffer has finished."""
        ends = life.last_by_queue.items()
        return max(last if queue == reader else self.finished_at(queue, last, reader) for queue, last in ends)

    def before(self, a: Lifetime, b: Lifetime) -> bool:
        """True when everything done to one buffer has finished before anything is done to the other."""
        return all(self.over(a, queue) < first for queue, first in b.first_by_queue.items())

    def apart(self, a: Lifetime, b: Lifetime) -> bool:
        """True when two buffers are never in use together."""
        return self.before(a, b) or self.before(b, a)


class Timeline:
    """A list of statements with the accesses to each buffer, and what has finished when."""

    def __init__(self, statements: Sequence[Statement], buffers: Buffers, dma: Queue) -> None:
        """The statements in issue order, with their waits; the buffers they touch; the queue of copies."""
        self.statements, self.buffers = statements, buffers
        self.touches = touches(statements, buffers, dma)
        self.order = StatementOrder(statements, dma)
        self.spans = {name: lifetime([(buffers[name], own)], len(statements)) for name, own in self.touches.items()}
        """The lifetime of every buffer some statement touches."""


def overwrites(timeline: Timeline) -> dict[str, str]:
    """The buffers that may lie where another one has lain until the call that first writes them, and that one.

    The call reads the old buffer for the last time, element by element at the place it writes; both are filled by
    their values, so that they begin and end together.
    """
    over = {name: timeline.order.over(span) for name, span in timeline.spans.items()}
    first = {name: span.first for name, span in timeline.spans.items()}
    return _overwrites(timeline.statements, timeline.buffers, first, over)


def _overwrites(
    statements: Sequence[Statement], buffers: Buffers, first: Mapping[str, int], over: Mapping[str, int]
) -> dict[str, str]:
    """As `overwrites`, of buffers with the index of the first statement that touches each, and of the one by whose
    issue everything done to it has finished."""
    old: dict[str, str] = {}
    taken = set[str]()
    for index, statement in enumerate(statements):
        if not isinstance(statement, Call) or first[statement.result.buffer] < index:
            continue
        for value, view in statement.operands.items():
            dies = over[view.buffer] <= index
            if dies and view.buffer not in taken and _may_share(statement, value, buffers):
                old[statement.result.buffer] = view.buffer
                taken.add(view.buffer)
                break
    return old


def leader(name: str, overwrites: Mapping[str, str]) -> str:
    """The first of the buffers that lie at one place in turn."""
    while name in overwrites:
        name = overwrites[name]
    return name


def crowded(
    statements: Sequence[Statement], buffers: Buffers, memories: Sequence[tuple[Memory, int]], dma: Queue
) -> Iterator[tuple[Memory, list[Buffer]]]:
    """Each stretch of statements in which more bytes of a memory are in use together than there is room for, with the
    buffers in use where they are most, largest first; the fullest stretches of a memory first.

    Args:
        statements: without waits.
        buffers: those they touch; what only the core touches is not counted.
        memories: each with its bytes of room.
        dma: the queue of copies.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    counted = set[str]()
    for index, statement in enumerate(statements):
        names = [view.buffer for view, _ in views_touched(statement)]
        last |= dict.fromkeys(names, index)
        first |= {name: index for name in names if name not in first}
        if queue_of(statement, dma) != CORE:
            counted.update(names)
    again = _overwrites(statements, buffers, first, last)
    for memory, room in memories:
        own = [one for one in buffers.values() if one.memory == memory.name and one.name in first]
        own = [one for one in own if one.role is not Role.CONSTANT]
        changes: Counter[int] = Counter()
        groups: dict[str, list[str]] = {}
        for one in own:
            groups.setdefault(leader(one.name, again), []).append(one.name)
        for name, members in groups.items():
            if not counted.isdisjoint(members):
                nbytes = aligned(buffers[name].nbytes, memory.alignment)
                changes[min(first[member] for member in members)] += nbytes
                changes[max(last[member] for member in members) + 1] -= nbytes
        places = sorted(changes)
        in_use = zip(accumulate(changes[index] for index in places), places, strict=True)
        marked = ((nbytes > room, nbytes, index) for nbytes, index in in_use)
        stretches = (max(own, key=itemgetter(1)) for is_over, own in groupby(marked, itemgetter(0)) if is_over)
        for _, _, busiest in sorted(stretches, key=itemgetter(1), reverse=True):
            alive = (one for one in own if first[one.name] <= busiest <= last[one.name])
            yield memory, sorted(alive, key=lambda one: (-one.nbytes, one.name))


def _may_share(call: Call, value: str, buffers: Buffers) -> bool:
    old, new = buffers[call.operands[value].buffer], buffers[call.result.buffer]
    views = ((call.operands[value], old), (call.result, new))
    filled = all(view.is_dense and view.span == (0, buffer.nbytes) for view, buffer in views)
    if old.memory != new.memory or not filled or call.operands[value].layout != call.result.layout:
        return False
    alone = sum(view.buffer == old.name for view in call.operands.values()) == 1
    return alone and reads_in_place(call.graph, value) and kernels.may_overwrite(call.graph)
