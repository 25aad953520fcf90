"""Gives every buffer a fixed address, sharing memory between buffers that are never in use together.

Buffers that only the core touches are looked at in parts: what of an operand has been read for the last time is free
while the rest is still wanted. A result may take the place of an operand that is not wanted any more; such buffers are
moved together. A greedy answer comes first, and where it is not proven best, a constraint solver's.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

from dovetail import kernels
from dovetail.files import default_cache, keep_file, kept_file
from dovetail.ir.crop import reads_in_place
from dovetail.program.ir import (
    CORE,
    Begin,
    Buffer,
    Call,
    Queue,
    Role,
    Statement,
    Wait,
    queue_of,
    side_by_side,
    stream_of,
)
from dovetail.program.ir import touches as touched
from dovetail.target.chip import Memory


@dataclass(frozen=True)
class Lifetime:
    """When a buffer is in use, in statement indices."""

    first: int
    """The first statement that touches it is issued."""
    last: int
    """The last statement that touches it is issued."""
    first_by_queue: Mapping[Queue, int]
    last_by_queue: Mapping[Queue, int]

    def covers(self, index: int) -> bool:
        """True when the buffer is in use at a statement."""
        return self.first <= index <= self.last


@dataclass(frozen=True)
class BufferFragment:
    """A stretch of a buffer all of which is in use at the same times."""

    start: int
    """Bytes from the start of the buffer."""
    stop: int
    span: Lifetime


Pair = tuple[BufferFragment, BufferFragment]
"""A piece of one buffer and one of another that must not share bytes."""


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


Touch = tuple[int, Queue, int, int]
"""Index of a statement, its queue, and the first byte and one past the last byte of a buffer it touches."""


def touches(statements: Sequence[Statement], buffers: Mapping[str, Buffer], dma: Queue) -> dict[str, list[Touch]]:
    """Every access to each buffer, in order; to an input that nothing reads, none."""
    found: dict[str, list[Touch]] = {}
    together = side_by_side(statements)
    for index, statement in enumerate(statements):
        queue = queue_of(statement, dma)
        for view, _ in touched(statement):
            here = found.setdefault(view.buffer, [])
            here.append((together[index][0] if index in together else index, queue, *view.span))
            if index in together:  # launches side by side are in no order
                here.append((together[index][-1], queue, *view.span))
    for name, buffer in buffers.items():
        if buffer.role is Role.INPUT:
            found.setdefault(name, [])  # the user writes it, even where nothing reads it
    return found


class Timeline:
    """What is known of a list of statements: what touches each buffer, and what has finished when."""

    def __init__(self, statements: Sequence[Statement], buffers: Mapping[str, Buffer], dma: Queue) -> None:
        """The statements in issue order, with their waits; the buffers they touch; the queue of copies."""
        self.statements, self.buffers = statements, buffers
        self.touches = touches(statements, buffers, dma)
        self.order = StatementOrder(statements, dma)
        self.spans = {name: _lifetime(buffers[name].role, some, len(statements)) for name, some in self.touches.items()}
        """The lifetime of every buffer some statement touches; inputs live from the start, outputs to the end, states
        from start to end."""


def _lifetime(role: Role, some: Sequence[Touch], end: int) -> Lifetime:
    first: dict[Queue, int] = {}
    last: dict[Queue, int] = {}
    for index, queue, _, _ in some:
        first.setdefault(queue, index)
        last[queue] = index
    if role in (Role.INPUT, Role.STATE):
        first[CORE] = -1
        last.setdefault(CORE, -1)
    if role in (Role.OUTPUT, Role.STATE):
        last[CORE] = end
        first.setdefault(CORE, end)
    return Lifetime(min(first.values()), max(last.values()), first, last)


def _joined(spans: Sequence[Lifetime]) -> Lifetime:
    """The lifetime of several buffers as one."""
    queues = dict.fromkeys(queue for span in spans for queue in span.first_by_queue)
    first = {q: min(span.first_by_queue[q] for span in spans if q in span.first_by_queue) for q in queues}
    last = {q: max(span.last_by_queue[q] for span in spans if q in span.last_by_queue) for q in queues}
    return Lifetime(min(first.values()), max(last.values()), first, last)


Used = tuple[Buffer, Sequence[Touch]]
"""A buffer and what touches it, in order."""


def pieces(used: Sequence[Used], end: int, alignment: int) -> tuple[BufferFragment, ...]:
    """One buffer, or several of one size that lie at one place in turn, cut where the lifetime changes.

    Args:
        used: the buffers.
        end: how many statements there are.
        alignment: bytes; pieces begin and end at multiples of it.
    """
    size = _up(used[0][0].nbytes, alignment)
    if any(queue != CORE for _, some in used for _, queue, _, _ in some):
        return (BufferFragment(0, size, _joined([_lifetime(buffer.role, some, end) for buffer, some in used])),)
    down = [
        (buffer, [(i, q, start // alignment * alignment, _up(stop, alignment)) for i, q, start, stop in some])
        for buffer, some in used
    ]
    cuts = sorted({0, size, *(place for _, some in down for touch in some for place in touch[2:])})
    found: list[BufferFragment] = []
    for start, stop in pairwise(cuts):
        spans = []
        for buffer, some in down:
            own = [touch for touch in some if touch[2] <= start and stop <= touch[3]]
            if own or buffer.role in (Role.INPUT, Role.OUTPUT, Role.STATE):
                spans.append(_lifetime(buffer.role, own, end))
        if spans and found and found[-1].stop == start and found[-1].span == _joined(spans):
            found[-1] = BufferFragment(found[-1].start, stop, found[-1].span)
        elif spans:
            found.append(BufferFragment(start, stop, _joined(spans)))
    return tuple(found)


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class StatementOrder:
    """Which statements are known to have finished before others are issued."""

    def __init__(self, statements: Sequence[Statement], dma: Queue) -> None:
        work = [one for one in statements if not isinstance(one, Begin | Wait)]
        self._streams = {queue_of(one, dma): stream_of(one) for one in work}
        self._waits: dict[Queue, list[tuple[int, int, str]]] = {queue: [] for queue in self._streams}
        """By queue: up to which statement it has been waited for, at which one, and who knows (empty: everybody)."""
        self._known: dict[tuple[Queue, int, str], int] = {}
        self._heard: dict[tuple[Queue, str], tuple[list[int], list[int]]] = {}
        for index, statement in enumerate(statements):
            if isinstance(statement, Wait):
                whole = "" if statement.stream else self._streams[statement.queue]
                for queue, stream in self._streams.items():
                    if queue == statement.queue or (whole and stream == whole):  # core 0 waits for whole lists
                        self._waits[queue].append((statement.statement, index, statement.stream))

    def finished_at(self, queue: Queue, index: int, reader: Queue = CORE) -> int:
        """Index of the statement by whose issue, on the queue `reader`, the one at `index` has surely finished."""
        if queue == CORE:
            return index
        key = (queue, index, self._streams.get(reader, ""))
        if key not in self._known:
            if (queue, key[2]) not in self._heard:
                self._heard[queue, key[2]] = self._told(queue, key[2])
            upto, places = self._heard[queue, key[2]]
            first = bisect_left(upto, index)
            self._known[key] = places[first] if first < len(places) else 1 << 30
        return self._known[key]

    def _told(self, queue: Queue, stream: str) -> tuple[list[int], list[int]]:
        """Up to which statement of a queue an engine's list (empty: core 0) knows it has finished, growing, and where
        it learns that."""
        upto, places = list[int](), list[int]()
        for last, place, who in self._waits.get(queue, ()):
            if who in ("", stream) and (not upto or last > upto[-1]):
                upto.append(last)
                places.append(place)
        return upto, places

    def over(self, life: Lifetime) -> int:
        """Index of the statement by whose issue everything done to a buffer has finished, whoever asks."""
        return max(self.finished_at(queue, last) for queue, last in life.last_by_queue.items())

    def before(self, a: Lifetime, b: Lifetime) -> bool:
        """True when everything done to one buffer has finished before anything is done to the other."""
        for queue, last in a.last_by_queue.items():
            for other, first in b.first_by_queue.items():
                in_queue_order = queue == other and last < first
                if not in_queue_order and self.finished_at(queue, last, other) >= first:
                    return False
        return True


def allocate(
    memory: Memory,
    timeline: Timeline,
    overwrites: Mapping[str, str] | None = None,
    exact_seconds: float = 0.0,
) -> Placement:
    """Addresses for the buffers of one memory, peak as low as found.

    Args:
        memory: the memory; its size is not checked here.
        timeline: when all buffers are used; those of other memories, and constants, are passed over.
        overwrites: buffers that lie where another one has lain, and that one.
        exact_seconds: how long the exact solver may take where the greedy answer is above the lower bound; 0 for never.
    """
    end, used = len(timeline.statements), timeline.touches
    members: dict[str, list[Used]] = {}
    leaders: dict[str, str] = {}
    for name, buffer in timeline.buffers.items():
        if buffer.memory == memory.name and buffer.role is not Role.CONSTANT and name in used:
            leaders[name] = _leader(name, overwrites or {})
            members.setdefault(leaders[name], []).append((buffer, used[name]))
    groups = {name: pieces(own, end, memory.alignment) for name, own in members.items()}
    bound, busiest = _lower_bound([piece for own in groups.values() for piece in own])
    clashes = _clashes(groups, timeline.order)
    best: dict[str, int] = {}
    best_peak = -1
    for ranking in _rankings(groups):
        offsets = _first_fit(ranking, groups, clashes)
        peak = max((offsets[name] + _size(groups[name]) for name in offsets), default=0)
        if best_peak < 0 or peak < best_peak:
            best, best_peak = offsets, peak
    if best_peak > bound and exact_seconds > 0 and best_peak > (least := max(bound, _apart(groups, clashes))):
        sizes = {name: _size(own) for name, own in groups.items()}
        best, best_peak = _improved(sizes, clashes, best, least, memory.alignment, exact_seconds)
    addresses = {name: memory.base + best[leader] for name, leader in leaders.items()}
    return Placement(memory.name, addresses, best_peak, bound, busiest)


def _leader(name: str, overwrites: Mapping[str, str]) -> str:
    """The first of the buffers that lie at one place in turn."""
    while name in overwrites:
        name = overwrites[name]
    return name


def _size(own: Sequence[BufferFragment]) -> int:
    return max((piece.stop for piece in own), default=0)


def _clashes(groups: Mapping[str, Sequence[BufferFragment]], order: StatementOrder) -> dict[str, dict[str, list[Pair]]]:
    """For each buffer the others it must not share bytes with, and which pieces of the two."""
    names = list(groups)
    found: dict[str, dict[str, list[Pair]]] = {name: {} for name in names}
    for a, b in _close(groups, order):
        pairs = [
            (one, other)
            for one in groups[names[a]]
            for other in groups[names[b]]
            if not (order.before(one.span, other.span) or order.before(other.span, one.span))
        ]
        if pairs:
            found[names[a]][names[b]] = pairs
            found[names[b]][names[a]] = [(other, one) for one, other in pairs]
    return found


def _close(groups: Mapping[str, Sequence[BufferFragment]], order: StatementOrder) -> list[tuple[int, int]]:
    """The places of buffers, two and two in order, but of those of which one is surely over when the other begins."""
    times = [
        (min(piece.span.first for piece in own), max(order.over(piece.span) for piece in own), place)
        for place, own in enumerate(groups.values())
    ]
    times.sort()
    found: list[tuple[int, int]] = []
    for number, (_, over, place) in enumerate(times):
        for other in range(number + 1, len(times)):
            if times[other][0] > over:
                break
            found.append((min(place, times[other][2]), max(place, times[other][2])))
    return sorted(found)


def _lower_bound(own: Sequence[BufferFragment]) -> tuple[int, int]:
    changes: Counter[int] = Counter()
    for piece in own:
        changes[piece.span.first] += piece.stop - piece.start
        changes[piece.span.last + 1] -= piece.stop - piece.start
    live, most, busiest = 0, 0, 0
    for index in sorted(changes):
        live += changes[index]
        if live > most:
            most, busiest = live, index
    return most, busiest


def _apart(groups: Mapping[str, Sequence[BufferFragment]], clashes: Mapping[str, Mapping[str, Sequence[Pair]]]) -> int:
    """Bytes of buffers of which no two may share any, the most that are found by taking one after the other, largest
    first: no placement needs less. It is more than is in use together where engines are not waited for."""
    nbytes = {name: sum(piece.stop - piece.start for piece in own) for name, own in groups.items()}
    names = sorted(groups, key=lambda name: -nbytes[name])
    whole = {
        name: {other for other, pairs in clashes[name].items() if len(pairs) == len(groups[name]) * len(groups[other])}
        for name in names
    }
    most = 0
    for first in names:
        left, total = whole[first], nbytes[first]
        while left:
            other = max(left, key=lambda name: (nbytes[name], name))
            left, total = left & whole[other], total + nbytes[other]
        most = max(most, total)
    return most


def _rankings(groups: Mapping[str, Sequence[BufferFragment]]) -> list[list[str]]:
    """Orders worth trying: largest first, longest-lived first, by bytes times life, by time."""
    names = list(groups)
    sizes = {name: _size(own) for name, own in groups.items()}
    first = {name: min(piece.span.first for piece in own) for name, own in groups.items()}
    last = {name: max(piece.span.last for piece in own) for name, own in groups.items()}
    length = {name: last[name] - first[name] + 1 for name in names}
    return [
        sorted(names, key=lambda name: (-sizes[name], first[name])),
        sorted(names, key=lambda name: (-length[name], -sizes[name])),
        sorted(names, key=lambda name: (-sizes[name] * length[name], first[name])),
        sorted(names, key=lambda name: (first[name], -sizes[name])),
        sorted(names, key=lambda name: (-last[name], -sizes[name])),
    ]


def _first_fit(
    ranking: list[str], groups: Mapping[str, Sequence[BufferFragment]], clashes: Mapping[str, Mapping[str, list[Pair]]]
) -> dict[str, int]:
    offsets: dict[str, int] = {}
    for name in ranking:
        refused = sorted(  # from just above the first to just below the second
            (offsets[other] + its.start - mine.stop, offsets[other] + its.stop - mine.start)
            for other, pairs in clashes[name].items()
            if other in offsets
            for mine, its in pairs
        )
        start = 0
        for low, high in refused:
            if low < start < high:
                start = high
        offsets[name] = start
    return offsets


def _improved(
    sizes: Mapping[str, int],
    clashes: Mapping[str, Mapping[str, Sequence[Pair]]],
    start: Mapping[str, int],
    bound: int,
    alignment: int,
    seconds: float,
) -> tuple[dict[str, int], int]:
    """As `improve`, whose answer to the same question is kept in the cache: the solver alone takes longer to begin than
    a small network to compile."""
    try:
        solver = version("ortools")
    except PackageNotFoundError:
        return improve(sizes, clashes, start, bound, alignment, seconds)
    apart = [
        (name, other, [(mine.start, mine.stop, its.start, its.stop) for mine, its in clashes[name][other]])
        for name in sizes
        for other in sorted(clashes[name])
        if name < other
    ]
    asked = repr((solver, list(sizes.items()), apart, [start[name] for name in sizes], bound, alignment, seconds))
    place = default_cache() / "addresses" / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    if (data := kept_file(place)) is not None:
        known = dict(zip(sizes, json.loads(data), strict=True))
    else:
        known, _ = improve(sizes, clashes, start, bound, alignment, seconds)
        keep_file(place, json.dumps([known[name] for name in sizes]).encode())
    return known, max(known[name] + sizes[name] for name in known)


def improve(
    sizes: Mapping[str, int],
    clashes: Mapping[str, Mapping[str, Sequence[Pair]]],
    start: Mapping[str, int],
    bound: int,
    alignment: int,
    seconds: float,
) -> tuple[dict[str, int], int]:
    """Offsets with a peak no higher than the start's; the start itself when OR-tools is not installed.

    Args:
        sizes: bytes of each buffer, multiples of `alignment`.
        clashes: for each buffer the others it must not share bytes with, and which pieces of the two.
        start: offsets that are valid.
        bound: no peak can be lower.
        alignment: bytes.
        seconds: limit on deterministic solver time.
    """
    peak = max((start[name] + sizes[name] for name in start), default=0)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return dict(start), peak
    model = cp_model.CpModel()
    top = model.new_int_var(bound // alignment, peak // alignment, "peak")
    offsets = {name: model.new_int_var(0, (peak - size) // alignment, name) for name, size in sizes.items()}
    for name, size in sizes.items():
        model.add(offsets[name] + size // alignment <= top)
        model.add_hint(offsets[name], start[name] // alignment)
        for other in sorted(clashes[name]):
            for number, (mine, its) in enumerate(clashes[name][other] if name < other else ()):
                below = model.new_bool_var(f"{name} below {other} {number}")
                up, down = ((a.stop - b.start) // alignment for a, b in ((mine, its), (its, mine)))
                model.add(offsets[name] + up <= offsets[other]).only_enforce_if(below)
                model.add(offsets[other] + down <= offsets[name]).only_enforce_if(~below)
    model.minimize(top)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return dict(start), peak
    found = {name: solver.value(offset) * alignment for name, offset in offsets.items()}
    return found, max(found[name] + sizes[name] for name in found)


def overwrites(timeline: Timeline) -> dict[str, str]:
    """The buffers that may lie where another one has lain until the call that first writes them, and that one.

    The call reads the old buffer for the last time, element by element at the place it writes; both are filled by
    their values, so that they begin and end together.
    """
    spans, order, buffers = timeline.spans, timeline.order, timeline.buffers
    found: dict[str, str] = {}
    for index, statement in enumerate(timeline.statements):
        if not isinstance(statement, Call) or spans[statement.result.buffer].first < index:
            continue
        for value, view in statement.operands.items():
            last = spans[view.buffer].last_by_queue
            dies = all(order.finished_at(queue, last[queue]) <= index for queue in last)
            if dies and view.buffer not in found.values() and _may_share(statement, value, buffers):
                found[statement.result.buffer] = view.buffer
                break
    return found


def _may_share(call: Call, value: str, buffers: Mapping[str, Buffer]) -> bool:
    old, new = buffers[call.operands[value].buffer], buffers[call.result.buffer]
    views = ((call.operands[value], old), (call.result, new))
    filled = all(view.is_dense and view.span == (0, buffer.nbytes) for view, buffer in views)
    if old.memory != new.memory or not filled or call.operands[value].layout != call.result.layout:
        return False
    alone = sum(view.buffer == old.name for view in call.operands.values()) == 1
    return alone and reads_in_place(call.graph, value) and kernels.may_overwrite(call.graph)
