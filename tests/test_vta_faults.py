"""Seeded faults in the streams of real layers: each is found, with the right diagnosis, naming the instruction.

A mutation is left out only where it provably changes nothing: two instructions in the other order, where the tokens
still order every two accesses that depend on each other as before (`same_order`; for those the device must find
nothing), and micro-operations not loaded that the memory holds already (`holds_already`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dovetail.targets.vta.config import PRESETS, VtaConfig
from dovetail.targets.vta.isa import Alu, AluOpcode, Finish, Gemm, Instruction, Load, Store, VtaMemory, queue_of
from dovetail.targets.vta.lower import VtaTiling
from dovetail.targets.vta.stream import Fault, StreamError, explain
from vta_layers import Case, Layer, case_of, graph_of

TINY = VtaConfig(uop_bytes=32, inp_bytes=1024, wgt_bytes=16 * 1024, acc_bytes=4096)
LAYERS = {
    "convolution": (
        Layer("conv", (9, 10), 32, 48, (3, 3), (1, 1), (1, 1, 1, 1), "channel", "channel", 5000),
        VtaTiling(3, 5, 2, False),
        PRESETS["fsim"],
    ),
    "depthwise": (
        Layer("depthwise", (10, 10), 48, 0, (3, 3), (2, 2), (1, 0, 1, 0), "none", "uniform", 300_000),
        VtaTiling(2, 5, 2, True, 2),
        VtaConfig(),
    ),
    "streaming": (
        Layer("conv", (6, 6), 64, 48, (3, 3), (1, 1), (1, 1, 1, 1), bias=2000, rounds=True),
        VtaTiling(3, 4, 1, True, 1),
        TINY,
    ),
    "pool": (Layer("pool", (7, 8), 32, 0, (3, 2), (2, 2)), VtaTiling(2, 2, 1, False), VtaConfig()),
}
"""Layers without lanes to spare, so that every byte of the result is known."""


@dataclass(frozen=True)
class Mutant:
    """A stream with one fault."""

    what: str
    case: Case
    number: int
    """The instruction that was changed, or stands where one was taken out; -1 for a micro-operation."""
    swapped: tuple[int, int] | None = None


@cache
def case(name: str) -> Case:
    """A layer's correct stream."""
    layer, tiling, config = LAYERS[name]
    return case_of(graph_of(layer, 3), tiling, config, 4)


def kind(instruction: Instruction) -> str:
    """What is counted as one sort of instruction."""
    if isinstance(instruction, Load | Store):
        return f"{type(instruction).__name__} {instruction.memory.name}"
    if isinstance(instruction, Alu):
        return f"Alu {instruction.opcode.name}"
    return "Gemm reset" if isinstance(instruction, Gemm) and instruction.reset else type(instruction).__name__


def picked(good: Case, sort: Callable[[Instruction], str | None]) -> Iterator[int]:
    """The first, middle and last instruction of every sort; None is no sort."""
    found: dict[str, list[int]] = {}
    for number, instruction in enumerate(good.instructions):
        name = sort(instruction)
        if name is not None:
            found.setdefault(name, []).append(number)
    for name in sorted(found):
        numbers = found[name]
        yield from sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})


def changed(good: Case, number: int, what: str, **fields: Any) -> Mutant:
    """The stream with other fields of one instruction."""
    old: Any = good.instructions[number]
    stream = (*good.instructions[:number], replace(old, **fields), *good.instructions[number + 1 :])
    return Mutant(f"{what} of {number} ({explain(old)})", replace(good, instructions=stream), number)


def without(good: Case, number: int) -> Mutant:
    """The stream without one instruction."""
    stream = good.instructions[:number] + good.instructions[number + 1 :]
    return Mutant(f"no {number} ({explain(good.instructions[number])})", replace(good, instructions=stream), number)


# -- the classes of mutations


def dropped(good: Case, prefix: str) -> Iterator[Mutant]:
    for flag in (f"{prefix}_prev", f"{prefix}_next"):
        for number in picked(good, lambda i, f=flag: f"{f} {kind(i)}" if getattr(i.flags, f) else None):  # type: ignore[misc]
            yield changed(good, number, f"no {flag}", flags=replace(good.instructions[number].flags, **{flag: False}))


def swapped(good: Case) -> Iterator[Mutant]:
    """Neighbours within a queue, at most twice each sort of pair; those in the other order that means the same not."""
    seen: dict[str, int] = {}
    for queue in ("load", "compute", "store"):
        numbers = [n for n, i in enumerate(good.instructions) if queue_of(i) == queue]
        for first, second in pairwise(numbers):
            a, b = good.instructions[first], good.instructions[second]
            sort = f"{kind(a)} {a.flags} {kind(b)} {b.flags}"
            seen[sort] = seen.get(sort, 0) + 1
            if seen[sort] > 2 or a == b or isinstance(b, Finish):
                continue
            stream = list(good.instructions)
            stream[first], stream[second] = b, a
            what = f"swapped {first} ({explain(a)}) and {second} ({explain(b)})"
            yield Mutant(what, replace(good, instructions=tuple(stream)), second, (first, second))


def shifted_dram(good: Case) -> Iterator[Mutant]:
    for number in picked(good, lambda i: kind(i) if isinstance(i, Load | Store) else None):
        place = good.instructions[number].dram  # type: ignore[union-attr]
        for step in (1, -1, 1 << 16):
            yield changed(good, number, f"dram {step:+}", dram=place + step & 0xFFFFFFFF)


def shifted_sram(good: Case) -> Iterator[Mutant]:
    for number in picked(good, lambda i: kind(i) if isinstance(i, Load | Store) else None):
        place = good.instructions[number].sram  # type: ignore[union-attr]
        for step in (1, -1):
            yield changed(good, number, f"sram {step:+}", sram=place + step & 0xFFFF)


def shortened(good: Case) -> Iterator[Mutant]:
    for number in picked(good, lambda i: kind(i) if isinstance(i, Load) else None):
        load = good.instructions[number]
        assert isinstance(load, Load)
        for field in ("x_size", "y_size"):
            if getattr(load, field) == 1:
                continue  # a LOAD of no element has no encoding
            if load.memory is VtaMemory.UOP and holds_already(
                good, number, load.x_size - 1 if field == "x_size" else 0
            ):
                continue
            yield changed(good, number, f"{field} - 1", **{field: getattr(load, field) - 1})


def holds_already(good: Case, number: int, first: int) -> bool:
    """Whether the micro-operations a load brings, from its `first` on, are in the memory before it."""
    held: dict[int, object] = {}
    for i in good.instructions[:number]:
        if isinstance(i, Load) and i.memory is VtaMemory.UOP:
            held.update({i.sram + n: good.uops[i.dram + n] for n in range(i.x_size)})
    load = good.instructions[number]
    assert isinstance(load, Load)
    return all(held.get(load.sram + n) == good.uops[load.dram + n] for n in range(first, load.x_size))


def collisions(good: Case) -> Iterator[Mutant]:
    """The second micro-operation of a GEMM writes where the first does; or the inner loop stands still."""
    segments = [i for i in good.instructions if isinstance(i, Load) and i.memory is VtaMemory.UOP]
    current = -1
    done: set[int] = set()
    for number, i in enumerate(good.instructions):
        if isinstance(i, Load) and i.memory is VtaMemory.UOP:
            current += 1
        if not isinstance(i, Gemm) or number % 3:
            continue
        first = segments[current].dram + i.uop_begin
        if i.uop_end - i.uop_begin > 1 and first not in done:
            done.add(first)
            uops = list(good.uops)
            uops[first + 1] = replace(uops[first + 1], dst=uops[first].dst)
            what = f"micro-operation {first + 1} writes where {first} does ({number}: {explain(i)})"
            yield Mutant(what, replace(good, uops=tuple(uops)), -1)
        elif i.uop_end - i.uop_begin == 1 and i.iter_in > 1 and len(done) < 8:
            done.add(-number)
            yield changed(good, number, "inner loop stands still", dst=(i.dst[0], 0))


def no_uop_load(good: Case) -> Iterator[Mutant]:
    numbers = [n for n, i in enumerate(good.instructions) if isinstance(i, Load) and i.memory is VtaMemory.UOP]
    yield from (without(good, number) for number in numbers)


def no_store(good: Case) -> Iterator[Mutant]:
    for number in picked(good, lambda i: f"{i.flags}" if isinstance(i, Store) else None):
        yield without(good, number)


def empty_store(good: Case) -> Iterator[Mutant]:
    """With its tokens, but without its data."""
    for number in picked(good, lambda i: f"{i.flags}" if isinstance(i, Store) else None):
        yield changed(good, number, "empty store", y_size=0)


def flipped_reset(good: Case) -> Iterator[Mutant]:
    for number in picked(good, lambda i: f"{kind(i)} {i.flags}" if isinstance(i, Gemm) else None):
        gemm = good.instructions[number]
        assert isinstance(gemm, Gemm)
        yield changed(good, number, "other reset", reset=not gemm.reset)


DATA = {Fault.WRONG_OUTPUT, Fault.UNINITIALISED, Fault.RACE}
"""What can come of data that is elsewhere: stale, never written, or somebody else's."""
MICRO = {*DATA, Fault.BOUNDS, Fault.HAZARD}
"""What can come of other micro-operations."""
CLASSES: dict[str, tuple[Callable[[Case], Iterator[Mutant]], set[Fault]]] = {
    "dropped push": (lambda good: dropped(good, "push"), {Fault.DEADLOCK}),
    "dropped pop": (lambda good: dropped(good, "pop"), {Fault.RACE, Fault.LEFTOVER}),
    "swap": (swapped, {*MICRO, Fault.DEADLOCK}),
    # what is shifted by lies behind what is added, both loaded at once
    "dram address": (
        shifted_dram,
        {Fault.BOUNDS, Fault.WRONG_OUTPUT, Fault.REWRITTEN, Fault.UNWRITTEN, Fault.SHIFT, *MICRO},
    ),
    "sram address": (shifted_sram, {*MICRO}),
    "short load": (shortened, {*MICRO}),
    "collision": (collisions, {Fault.HAZARD}),
    "no uop load": (no_uop_load, {*MICRO}),
    "no store": (no_store, {Fault.RACE, Fault.LEFTOVER, Fault.DEADLOCK, Fault.UNWRITTEN}),
    "empty store": (empty_store, {Fault.UNWRITTEN}),
    "reset": (flipped_reset, {*DATA}),
}


def diagnosis(mutant: Mutant) -> StreamError | None:
    """What the device finds."""
    memory = mutant.case.memory()
    try:
        mutant.case.run(memory)
        mutant.case.check(memory)
    except StreamError as error:
        return error
    return None


# -- which swaps change nothing


@dataclass(frozen=True)
class Touch:
    """Entries an instruction touches, as bits of integers."""

    reads: int
    writes: int
    updates: int
    label: str
    """Updates of one label may change places: sums, and limits from both sides."""

    def before(self, other: Touch) -> bool:
        """Whether the order of the two matters."""
        free = self.label == other.label and bool(self.label)
        mine, its = (self.writes, other.writes) if free else (self.writes | self.updates, other.writes | other.updates)
        return bool(
            mine & (other.reads | other.writes | other.updates) or its & (self.reads | self.writes | self.updates)
        )


def touches(good: Case) -> list[Touch]:
    """What every instruction touches in order of the stream, expanded step by step."""
    sizes = {memory: 1 << 16 for memory in ("UOP", "INP", "WGT", "ACC", "OUT", "DRAM")}
    base = {memory: place << 16 for place, memory in enumerate(sizes)}
    uops: dict[int, tuple[int, int, int]] = {}

    def bits(memory: str, entries: set[int]) -> int:
        made = 0
        for entry in entries:
            made |= 1 << base[memory] + entry
        return made

    def expand(i: Gemm | Alu, place: int, factors: tuple[int, int]) -> set[int]:
        starts = {uops[u][place] for u in range(i.uop_begin, i.uop_end)}
        loops = {o * factors[0] + n * factors[1] for o in range(i.iter_out) for n in range(i.iter_in)}
        return {start + moved for start in starts for moved in loops}

    found = []
    for i in good.instructions:
        if isinstance(i, Load):
            memory = i.memory.name
            if i.memory is VtaMemory.UOP:
                words = good.uops[i.dram : i.dram + i.x_size]
                uops.update({i.sram + n: (u.dst, u.src, u.wgt) for n, u in enumerate(words)})
            found.append(Touch(0, bits(memory, set(range(i.sram, i.sram + i.entries))), 0, ""))
        elif isinstance(i, Store):
            rows = {i.dram + y * i.x_stride + x for y in range(i.y_size) for x in range(i.x_size)}
            first = (good.result.address - good.pointers.out) // good.config.out_element
            stored = bits("DRAM", {row - first for row in rows})
            found.append(Touch(bits("OUT", set(range(i.sram, i.sram + i.entries))), stored, 0, ""))
        elif isinstance(i, Finish):
            found.append(Touch(0, 0, 0, ""))
        else:
            found.append(_computed(i, bits, expand))
    return found


def _computed(i: Gemm | Alu, bits: Callable[[str, set[int]], int], expand: Callable[..., set[int]]) -> Touch:
    entries = expand(i, 0, i.dst)
    changes = bits("ACC", entries) | bits("OUT", entries)
    reads = bits("UOP", set(range(i.uop_begin, i.uop_end)))
    if isinstance(i, Gemm):
        if i.reset:
            return Touch(reads, changes, 0, "")
        return Touch(reads | bits("INP", expand(i, 1, i.src)) | bits("WGT", expand(i, 2, i.wgt)), 0, changes, "sum")
    if not i.use_imm:
        reads |= bits("ACC", expand(i, 1, i.src))
    if i.opcode is AluOpcode.ADD:
        return Touch(reads, 0, changes, "sum")
    return Touch(reads, 0, changes, "limit" if i.use_imm and i.opcode in (AluOpcode.MIN, AluOpcode.MAX) else "")


def happened_before(stream: Sequence[Instruction]) -> list[int] | None:
    """For each instruction those that have ended before it starts, as bits; None when some never start.

    The n-th token a queue takes from a neighbour is the n-th that one gives, whenever that is.
    """
    queues = ("load", "compute", "store")
    pushed: dict[tuple[int, int], list[int]] = {}
    waits: list[list[int | None]] = [[] for _ in stream]
    pops: dict[tuple[int, int], int] = {}
    places = [queues.index(queue_of(i)) for i in stream]
    for number, (i, queue) in enumerate(zip(stream, places, strict=True)):
        for given, other in ((i.flags.push_prev, queue - 1), (i.flags.push_next, queue + 1)):
            if given:
                pushed.setdefault((queue, other), []).append(number)
    previous: dict[int, int] = {}
    for number, (i, queue) in enumerate(zip(stream, places, strict=True)):
        if queue in previous:
            waits[number].append(previous[queue])
        previous[queue] = number
        for given, other in ((i.flags.pop_prev, queue - 1), (i.flags.pop_next, queue + 1)):
            if given:
                order = pops[other, queue] = pops.get((other, queue), -1) + 1
                givers = pushed.get((other, queue), [])
                waits[number].append(givers[order] if order < len(givers) else None)
    known: list[int | None] = [None] * len(stream)
    progress = True
    while progress:
        progress = False
        for number, needed in enumerate(waits):
            if known[number] is None and all(n is not None and known[n] is not None for n in needed):
                known[number] = sum_of(known, needed)
                progress = True
    return None if None in known else [bits for bits in known if bits is not None]


def sum_of(known: Sequence[int | None], needed: Sequence[int | None]) -> int:
    """Those that ended before, of the instructions waited for, and these themselves."""
    made = 0
    for n in needed:
        assert n is not None
        made |= (known[n] or 0) | 1 << n
    return made


def same_order(known: Sequence[Touch], swapped: tuple[int, int], stream: Sequence[Instruction]) -> bool:
    """Whether a stream with two instructions swapped still orders all that depends on each other."""
    order = happened_before(stream)
    if order is None:
        return False
    first, second = swapped
    place = {first: second, second: first}
    return all(
        order[place.get(later, later)] >> place.get(earlier, earlier) & 1
        for later in range(len(known))
        for earlier in range(later)
        if known[earlier].before(known[later])
    )


@cache
def known_touches(name: str) -> tuple[Touch, ...]:
    """`touches` of a layer's correct stream."""
    return tuple(touches(case(name)))


# -- the tests


def assert_named(mutant: Mutant, error: StreamError) -> None:
    """The message names instructions by number and printed form; the changed one where it is itself what is wrong."""
    stream, text = mutant.case.instructions, str(error)
    named = {n for n in map(int, re.findall(r"instruction (\d+) \(", text)) if f"{n} ({explain(stream[n])})" in text}
    assert named, text
    if error.kind in (Fault.BOUNDS, Fault.REWRITTEN) and isinstance(stream[mutant.number], Load | Store):
        changes_micro = getattr(stream[mutant.number], "memory", None) is VtaMemory.UOP
        assert mutant.number in named or changes_micro, text


def assert_right_token(mutant: Mutant, good: Case, error: StreamError) -> None:
    """A dropped token is missed, or its lack a race, between the two queues it went between."""
    old, new = good.instructions[mutant.number].flags, mutant.case.instructions[mutant.number].flags
    queues = ("load", "compute", "store")
    mine = queue_of(good.instructions[mutant.number])
    fields = ("pop_prev", "pop_next", "push_prev", "push_next")
    (flag,) = (field for field in fields if getattr(old, field) != getattr(new, field))
    other = queues[queues.index(mine) + (1 if flag.endswith("next") else -1)]
    text = str(error)
    if error.kind is Fault.DEADLOCK:
        assert re.search(f"{other} waits with instruction \\d+ .*? for a token from {mine}", text), text
    elif error.kind is Fault.LEFTOVER:
        assert f"1 from {other} to {mine}" in text, text
    else:
        named = {queue_of(mutant.case.instructions[int(n)]) for n in re.findall(r"instruction (\d+) \(", text)}
        assert named == {mine, other}, text


@pytest.mark.parametrize("name", LAYERS)
def test_the_streams_themselves_are_right(name: str) -> None:
    good = case(name)
    memory = good.memory()
    execution = good.run(memory)
    good.check(memory)
    np.testing.assert_array_equal(good.found(memory), good.expected)
    assert len(np.unique(good.expected)) > 60 and execution.cycles > 0
    assert same_order(known_touches(name), (0, 0), good.instructions)


@pytest.mark.parametrize("mutation", CLASSES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_mutation_is_found(name: str, mutation: str) -> None:
    good, (make, kinds) = case(name), CLASSES[mutation]
    found = 0
    for mutant in make(good):
        error = diagnosis(mutant)
        if mutant.swapped is not None and same_order(known_touches(name), mutant.swapped, mutant.case.instructions):
            assert error is None, f"{mutant.what}: means the same, but {error}"
            continue
        assert error is not None, f"{mutant.what}: not found"
        assert error.kind in kinds, f"{mutant.what}: {error}"
        assert_named(mutant, error)
        if mutation.startswith("dropped"):
            assert_right_token(mutant, good, error)
        found += 1
    print(f"{name}, {mutation}: {found} found")
    assert found >= 1


def test_there_are_many_mutations() -> None:
    counts = {name: sum(1 for make, _ in CLASSES.values() for _ in make(case(name))) for name in LAYERS}
    print(counts)
    assert min(counts.values()) >= 60 and sum(counts.values()) >= 500
