"""Gives every buffer a fixed address, sharing memory between buffers that are never in use together.

Buffers of which one takes the place of another are moved together. A greedy answer comes first, and where it is not
proven best, a constraint solver's.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from dovetail.files import kept_answer
from dovetail.program.ir import Queue, Role
from dovetail.records import Record
from dovetail.schedule.plan.lifetimes import BufferFragment, StatementOrder, Timeline, Used, leader, pieces
from dovetail.schedule.solver import new_model, solve, solver_version
from dovetail.target.chip import Memory

Groups = Mapping[str, Sequence[BufferFragment]]
"""The pieces of each buffer, or of several that lie at one place in turn, by the name of the first."""
Pair = tuple[BufferFragment, BufferFragment]
"""A piece of one buffer and one of another that must not share bytes."""
Clashes = Mapping[str, Mapping[str, Sequence[Pair]]]
"""For each buffer the others it must not share bytes with, and which pieces of the two."""


class Placement(Record):
    """Addresses in one memory."""

    memory: str
    addresses: Mapping[str, int]
    peak: int
    """Bytes from the memory's base to the end of the highest buffer."""
    lower_bound: int
    """Bytes that are in use together at some statement: no placement can need less."""
    busiest: int
    """The statement where that is so."""


def allocate(
    memory: Memory,
    timeline: Timeline,
    overwrites: Mapping[str, str] | None = None,
    exact_seconds: float = 0.0,
    lowest: Sequence[str] = (),
    most: int | None = None,
) -> Placement:
    """Addresses for the buffers of one memory, with a low peak.

    Args:
        memory: the memory; its size is not checked here.
        timeline: when all buffers are used; those of other memories, and constants, are passed over.
        overwrites: buffers that lie where another one has lain, and that one.
        exact_seconds: time of the exact solver where the greedy answer is above the lower bound; 0 for never.
        lowest: buffers that lie at the start of the memory in this order, where another program has them too.
        most: bytes above which nobody wants addresses: there are none where that is soon certain. None for no limit.
    """
    members: dict[str, list[Used]] = {}
    leaders: dict[str, str] = {}
    for name, buffer in timeline.buffers.items():
        if buffer.memory == memory.name and buffer.role is not Role.CONSTANT and name in timeline.touches:
            leaders[name] = leader(name, overwrites or {})
            members.setdefault(leaders[name], []).append((buffer, timeline.touches[name]))
    groups = {name: pieces(own, len(timeline.statements), memory.alignment) for name, own in members.items()}
    bound, busiest = _lower_bound(groups)
    if most is not None and (together := _together(groups, timeline.order, most)) > most:
        return Placement(memory.name, {}, together, bound, busiest)
    clashes, sizes = _clashes(groups, timeline.order), _sizes(groups)
    fixed = [name for name in lowest if name in groups]
    rankings = [[*fixed, *(name for name in ranking if name not in fixed)] for ranking in _rankings(groups)]
    answers = [_first_fit(ranking, clashes) for ranking in rankings]
    best = min(answers, key=lambda offsets: _peak(offsets, sizes))
    peak = _peak(best, sizes)
    if exact_seconds > 0 and not fixed and peak > bound and peak > (least := max(bound, _apart(groups, clashes))):
        best, peak = _improved(sizes, clashes, best, least, memory.alignment, exact_seconds)
    addresses = {name: memory.base + best[first] for name, first in leaders.items()}
    return Placement(memory.name, addresses, peak, bound, busiest)


def _sizes(groups: Groups) -> dict[str, int]:
    return {name: max((piece.stop for piece in own), default=0) for name, own in groups.items()}


def _peak(offsets: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    return max((offset + sizes[name] for name, offset in offsets.items()), default=0)


def _clashes(groups: Groups, order: StatementOrder) -> Clashes:
    clashes: dict[str, dict[str, list[Pair]]] = {name: {} for name in groups}
    for a, b in _close(groups, order):
        pairs = [(x, y) for x in groups[a] for y in groups[b] if not order.apart(x.span, y.span)]
        if pairs:
            clashes[a][b] = pairs
            clashes[b][a] = [(y, x) for x, y in pairs]
    return clashes


def _close(groups: Groups, order: StatementOrder) -> list[tuple[str, str]]:
    """Pairs of buffers, in order, but for those of which one is surely over when the other begins, whichever queue
    touches that first."""
    names, spans = list(groups), [[piece.span for piece in own] for own in groups.values()]
    begins = [min(span.first for span in own) for own in spans]
    first: dict[Queue, list[tuple[int, int]]] = {}
    """By queue, the first statement that touches each buffer, and the buffer's place."""
    for place, own in enumerate(spans):
        touched = [one for span in own for one in span.first_by_queue.items()]
        for queue in dict.fromkeys(queue for queue, _ in touched):
            first.setdefault(queue, []).append((min(index for other, index in touched if other == queue), place))
    pairs = set[tuple[int, int]]()
    for queue, starts in first.items():
        starts.sort()
        for place, own in enumerate(spans):
            over = max(order.over(span, queue) for span in own)
            low = bisect_left(starts, (begins[place], -1))
            for index, other in islice(starts, low, None):
                if index > over:
                    break
                if (begins[place], place) < (begins[other], other):
                    pairs.add((min(place, other), max(place, other)))
    return [(names[a], names[b]) for a, b in sorted(pairs)]


def _lower_bound(groups: Groups) -> tuple[int, int]:
    """Most bytes in use together, and the statement where that is so."""
    changes: Counter[int] = Counter()
    for piece in (piece for own in groups.values() for piece in own):
        changes[piece.span.first] += piece.stop - piece.start
        changes[piece.span.last + 1] -= piece.stop - piece.start
    live, most, busiest = 0, 0, 0
    for index in sorted(changes):
        live += changes[index]
        if live > most:
            most, busiest = live, index
    return most, busiest


def _together(groups: Groups, order: StatementOrder, most: int) -> int:
    """Bytes of some buffers that share none with one another: of the first in time that take more than a limit, if
    taking one after the other finds such."""
    alone = (own[0] for own in groups.values() if len(own) == 1)
    held, total = list[BufferFragment](), 0
    for piece in sorted(alone, key=lambda piece: piece.span.first):
        others = [one for one in held if not order.apart(one.span, piece.span)]
        nbytes = sum(one.stop - one.start for one in (*others, piece))
        if nbytes >= total:
            held, total = [*others, piece], nbytes
        if total > most:
            break
    return total


def _apart(groups: Groups, clashes: Clashes) -> int:
    """Bytes of buffers of which no two may share any, the most that taking one after the other gives, largest first.

    No placement needs less. It is more than is in use together where engines are not waited for.
    """
    nbytes = {name: sum(piece.stop - piece.start for piece in own) for name, own in groups.items()}
    whole = {
        name: {other for other, pairs in clashes[name].items() if len(pairs) == len(groups[name]) * len(groups[other])}
        for name in groups
    }
    most = 0
    for first in groups:
        left, total = whole[first], nbytes[first]
        while left:
            other = max(left, key=lambda name: (nbytes[name], name))
            left, total = left & whole[other], total + nbytes[other]
        most = max(most, total)
    return most


def _rankings(groups: Groups) -> list[list[str]]:
    """Orders worth trying: largest first, longest-lived first, by bytes times life, by time."""
    sizes = _sizes(groups)
    first = {name: min(piece.span.first for piece in own) for name, own in groups.items()}
    last = {name: max(piece.span.last for piece in own) for name, own in groups.items()}
    length = {name: last[name] - first[name] + 1 for name in groups}
    return [
        sorted(groups, key=lambda name: (-sizes[name], first[name])),
        sorted(groups, key=lambda name: (-length[name], -sizes[name])),
        sorted(groups, key=lambda name: (-sizes[name] * length[name], first[name])),
        sorted(groups, key=lambda name: (first[name], -sizes[name])),
        sorted(groups, key=lambda name: (-last[name], -sizes[name])),
    ]


def _first_fit(ranking: Sequence[str], clashes: Clashes) -> dict[str, int]:
    """Each buffer in turn at the lowest offset it can have."""
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
    sizes: Mapping[str, int], clashes: Clashes, start: Mapping[str, int], bound: int, alignment: int, seconds: float
) -> tuple[dict[str, int], int]:
    """As `improve`; the answer to the same question is kept in the cache: the solver alone takes longer to begin than a
    small network to compile."""
    apart = [
        (name, other, [(mine.start, mine.stop, its.start, its.stop) for mine, its in clashes[name][other]])
        for name in sizes
        for other in sorted(clashes[name])
        if name < other
    ]
    offsets = [start[name] for name in sizes]
    question = repr((solver_version(), list(sizes.items()), apart, offsets, bound, alignment, seconds))

    def answer() -> bytes:
        best, _ = improve(sizes, clashes, start, bound, alignment, seconds)
        return json.dumps([best[name] for name in sizes]).encode()

    best = dict(zip(sizes, json.loads(kept_answer(Path(__file__).parent, question, answer)), strict=True))
    return best, _peak(best, sizes)


def improve(
    sizes: Mapping[str, int], clashes: Clashes, start: Mapping[str, int], bound: int, alignment: int, seconds: float
) -> tuple[dict[str, int], int]:
    """Offsets with a peak no higher than the start's; the start itself when OR-tools is not installed.

    Args:
        sizes: bytes of each buffer, multiples of `alignment`.
        clashes: pieces that must not share bytes.
        start: offsets that are valid.
        bound: no peak can be lower.
        alignment: bytes.
        seconds: limit on deterministic solver time.
    """
    peak = _peak(start, sizes)
    if (model := new_model()) is None:
        return dict(start), peak
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
    if (solver := solve(model, seconds)) is None:
        return dict(start), peak
    best = {name: solver.value(offset) * alignment for name, offset in offsets.items()}
    return best, _peak(best, sizes)
