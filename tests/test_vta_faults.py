"""Seeded faults in the streams of real layers: each is found, with the right diagnosis, naming the instruction.

A mutation is left out only where a rule says why it cannot change anything (`commutes`, `same_data`).
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

from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.isa import NO_FLAGS, Alu, AluOpcode, Finish, Gemm, Instruction, Load, Memory, Store, queue_of
from dovetail.targets.vta.lower import Tiling
from dovetail.targets.vta.stream import Fault, StreamError, explain
from vta_layers import Case, Layer, case_of, graph_of

TINY = VtaConfig(uop_bytes=512, inp_bytes=1024, wgt_bytes=16 * 1024, acc_bytes=4096)
LAYERS = {
    "convolution": (
        Layer("conv", (9, 10), 32, 48, (3, 3), (1, 1), (1, 1, 1, 1), "channel", "channel", 5000),
        Tiling(3, 5, 2, False), VtaConfig()),
    "depthwise": (
        Layer("depthwise", (9, 9), 48, 0, (3, 3), (2, 2), (1, 1, 1, 1), "uniform", "uniform", 300_000),
        Tiling(2, 5, 2, True, 2), VtaConfig()),
    "streaming": (
        Layer("conv", (6, 6), 64, 48, (3, 3), (1, 1), (1, 1, 1, 1), bias=2000, rounds=True),
        Tiling(3, 4, 1, True, 1), TINY),
    "pool": (Layer("pool", (7, 8), 32, 0, (3, 2), (2, 2)), Tiling(2, 2, 1, False), VtaConfig()),
}  # fmt: skip
"""Layers without lanes to spare, so that every byte of the result is known."""


@dataclass(frozen=True)
class Mutant:
    """A stream with one fault."""

    what: str
    case: Case
    number: int
    """The instruction that was changed, or stands where one was taken out; -1 for a micro-operation."""


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
    """Neighbours within a queue: instructions of different queues wait for tokens, whatever their order."""
    seen: dict[str, int] = {}
    for queue in ("load", "compute", "store"):
        numbers = [n for n, i in enumerate(good.instructions) if queue_of(i) == queue]
        for first, second in pairwise(numbers):
            a, b = good.instructions[first], good.instructions[second]
            sort = f"{kind(a)} {a.flags} {kind(b)} {b.flags}"
            seen[sort] = seen.get(sort, 0) + 1
            if seen[sort] > 2 or commutes(a, b) or isinstance(b, Finish):
                continue
            stream = list(good.instructions)
            stream[first], stream[second] = b, a
            what = f"swapped {first} ({explain(a)}) and {second} ({explain(b)})"
            yield Mutant(what, replace(good, instructions=tuple(stream)), second)


def commutes(a: Instruction, b: Instruction) -> bool:
    """Whether neighbours of a queue may change places: no tokens, and an effect that does not depend on the order."""
    if a.flags != NO_FLAGS or b.flags != NO_FLAGS:
        return False
    if isinstance(a, Load) and isinstance(b, Load):  # different entries
        return a.memory is not b.memory or a.sram + a.entries <= b.sram or b.sram + b.entries <= a.sram
    if isinstance(a, Load) or isinstance(b, Load):  # a memory the other has no part in: only the ALU reads parameters
        load, other = (a, b) if isinstance(a, Load) else (b, a)
        return isinstance(load, Load) and load.memory is Memory.ACC and isinstance(other, Gemm)
    if isinstance(a, Gemm) and isinstance(b, Gemm):  # sums
        return not a.reset and not b.reset
    if isinstance(a, Alu) and isinstance(b, Alu):  # low <= high
        return {a.opcode, b.opcode} == {AluOpcode.MIN, AluOpcode.MAX} and a.use_imm and b.use_imm
    return False


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
            yield changed(good, number, f"{field} - 1", **{field: getattr(load, field) - 1})


def collisions(good: Case) -> Iterator[Mutant]:
    """The second micro-operation of a GEMM writes where the first does; or the inner loop stands still."""
    segments = [i for i in good.instructions if isinstance(i, Load) and i.memory is Memory.UOP]
    current = -1
    done: set[int] = set()
    for number, i in enumerate(good.instructions):
        if isinstance(i, Load) and i.memory is Memory.UOP:
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
    numbers = [n for n, i in enumerate(good.instructions) if isinstance(i, Load) and i.memory is Memory.UOP]
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
    "swap": (swapped, {*DATA, Fault.DEADLOCK}),
    "dram address": (shifted_dram, {Fault.BOUNDS, Fault.WRONG_OUTPUT, Fault.REWRITTEN, Fault.UNWRITTEN, *MICRO}),
    "sram address": (shifted_sram, {*MICRO}),
    "short load": (shortened, {*MICRO}),
    "collision": (collisions, {Fault.HAZARD}),
    "no uop load": (no_uop_load, {*MICRO}),
    "no store": (no_store, {Fault.RACE, Fault.LEFTOVER, Fault.DEADLOCK}),
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
