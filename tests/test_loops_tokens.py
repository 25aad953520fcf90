"""Tokens between queues, judged by running them: queues side by side in many orders, and what comes before what."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.loops import Access, Span, Tokens, tokens

SIZES = {"A": 12, "B": 12}
FIXED = settings(derandomize=True, deadline=None, max_examples=120)


@st.composite
def programs(draw: st.DrawFn, most: int = 24) -> list[Access]:
    """Instructions on three queues, the outer two sharing no memory; the last, of the middle one, touches nothing."""
    made = []
    for _ in range(draw(st.integers(1, most))):
        queue = draw(st.integers(0, 2))
        memory = "A" if queue == 0 else "B" if queue == 2 else draw(st.sampled_from("AB"))
        made.append(Access(queue, draw(spans(memory)), draw(spans(memory))))
        if queue == 1 and draw(st.booleans()):
            other = made.pop()
            made.append(replace(other, reads=(*other.reads, *draw(spans("AB".replace(memory, ""))))))
    return [*made, Access(1)]


@st.composite
def spans(draw: st.DrawFn, memory: str) -> tuple[Span, ...]:
    found = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, 11))
        found.append(Span(memory, start, draw(st.integers(start + 1, 12))))
    return tuple(found)


def touches(one: tuple[Span, ...], other: tuple[Span, ...]) -> bool:
    return any(a.memory == b.memory and a.start < b.stop and b.start < a.stop for a in one for b in other)


def ordered_pairs(program: list[Access]) -> list[tuple[int, int]]:
    """Instructions of two queues that must run one after the other."""
    last = len(program) - 1
    return [
        (i, j)
        for i, j in combinations(range(len(program)), 2)
        if program[i].queue != program[j].queue
        and (
            j == last
            or touches(program[i].writes, program[j].reads)
            or touches(program[i].writes, program[j].writes)
            or touches(program[i].reads, program[j].writes)
        )
    ]


def neighbours(queue: int, before: bool, after: bool) -> list[int]:
    return ([queue - 1] if before else []) + ([queue + 1] if after else [])


def run(program: list[Access], marks: list[Tokens], chance: random.Random) -> dict[int, tuple[int, int]]:
    """Start and end of each instruction in one random order that queues and tokens allow."""
    waiting = {queue: [n for n, access in enumerate(program) if access.queue == queue] for queue in range(3)}
    running: dict[int, int] = {}
    there: Counter[tuple[int, int]] = Counter()
    times: dict[int, tuple[int, int]] = {}
    starts: dict[int, int] = {}
    for clock in range(2 * len(program)):
        moves = [("end", queue) for queue in running]
        for queue, numbers in waiting.items():
            if numbers and queue not in running:
                mark = marks[numbers[0]]
                if all(there[other, queue] for other in neighbours(queue, mark.pop_prev, mark.pop_next)):
                    moves.append(("start", queue))
        assert moves, "deadlock"
        move, queue = chance.choice(moves)
        if move == "start":
            number = running[queue] = waiting[queue].pop(0)
            starts[number], mark = clock, marks[number]
            there.subtract((other, queue) for other in neighbours(queue, mark.pop_prev, mark.pop_next))
        else:
            number = running.pop(queue)
            times[number], mark = (starts[number], clock), marks[number]
            there.update((queue, other) for other in neighbours(queue, mark.push_prev, mark.push_next))
    assert len(times) == len(program) and not any(there.values()), "tokens are left"
    return times


@FIXED
@given(programs(), st.integers(0, 1000))
def test_conflicting_instructions_run_in_program_order(program: list[Access], seed: int) -> None:
    marks = tokens(program, SIZES)
    pairs, chance = ordered_pairs(program), random.Random(seed)
    for _ in range(20):
        times = run(program, marks, chance)
        for earlier, later in pairs:
            assert times[earlier][1] < times[later][0], (earlier, later)


def links(program: list[Access], marks: list[Tokens]) -> list[tuple[int, int]]:
    """Who waits for whom: the tokens of two queues are taken in the order they are given."""
    found = []
    for source, target in ((0, 1), (1, 0), (1, 2), (2, 1)):
        forward = target > source
        given = [
            n
            for n, (a, m) in enumerate(zip(program, marks, strict=True))
            if a.queue == source and (m.push_next if forward else m.push_prev)
        ]
        taken = [
            n
            for n, (a, m) in enumerate(zip(program, marks, strict=True))
            if a.queue == target and (m.pop_prev if forward else m.pop_next)
        ]
        found += list(zip(given, taken, strict=True))
    return found


def before(program: list[Access], waits: list[tuple[int, int]]) -> list[set[int]]:
    """For each instruction those that have ended when it starts."""
    known: list[set[int]] = []
    for number, access in enumerate(program):
        sources = [n for n in range(number) if program[n].queue == access.queue]
        sources += [earlier for earlier, later in waits if later == number]
        known.append({n for source in sources for n in (source, *known[source])})
    return known


@FIXED
@given(programs(most=12))
def test_no_token_is_too_many(program: list[Access]) -> None:
    waits, pairs = links(program, tokens(program, SIZES)), ordered_pairs(program)
    known = before(program, waits)
    assert all(earlier in known[later] for earlier, later in pairs)
    for gone in waits:
        known = before(program, [wait for wait in waits if wait != gone])
        assert any(earlier not in known[later] for earlier, later in pairs), gone


def test_the_double_buffer() -> None:
    """Load, compute, load into the other half, compute; the third load waits for the first computation."""
    halves = [Span("A", 0, 6), Span("A", 6, 12)]
    program = []
    for number in range(3):
        program += [Access(0, writes=(halves[number % 2],)), Access(1, (halves[number % 2],))]
    marks = tokens([*program, Access(1)], SIZES)
    assert [mark.pop_next for mark in marks] == [False, False, False, False, True, False, False]
    assert links([*program, Access(1)], marks) == [(0, 1), (2, 3), (4, 5), (1, 4)]


def test_readers_do_not_wait_for_readers() -> None:
    program = [Access(0, (Span("A", 0, 4),)), Access(1, (Span("A", 0, 4),)), Access(0, (Span("A", 2, 3),)), Access(1)]
    assert links(program, tokens(program, SIZES)) == [(2, 3)]


@pytest.mark.parametrize(
    ("program", "pair"),
    [
        ([Access(0, writes=(Span("A", 0, 4),)), Access(2, (Span("A", 3, 5),)), Access(1)], "0 and 1"),
        ([Access(0), Access(1), Access(2)], "0 and 2"),
    ],
)
def test_queues_that_are_no_neighbours_cannot_conflict(program: list[Access], pair: str) -> None:
    with pytest.raises(ValueError, match=f"instructions {pair} conflict, but their queues are no neighbours"):
        tokens(program, SIZES)
    assert tokens([], SIZES) == []
