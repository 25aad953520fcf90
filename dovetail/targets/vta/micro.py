"""A loop nest over SRAM entries as GEMM or ALU instructions: two loops, micro-operations inside.

Which loops become the instruction's two, which are written out as micro-operations and which as instructions of their
own is chosen by the cycles it costs, under the rule that successive micro-operations write different accumulators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from math import prod

Triple = tuple[int, int, int]
"""An accumulator, input (ALU: second accumulator) and weight entry, or the steps of each."""

_MOST_ITERATIONS = (1 << 14) - 1
_UOP_CYCLES = 0.75
"""What a micro-operation costs: half a bus cycle, and room in its memory."""


@dataclass(frozen=True)
class Loop:
    """One loop of a nest: how often, and how far each entry moves per iteration."""

    extent: int
    step: Triple


@dataclass(frozen=True)
class Micro:
    """A nest as instructions that share their loops and, but for where they begin, their micro-operations."""

    outer: Loop
    inner: Loop
    uops: tuple[Triple, ...]
    starts: tuple[Triple, ...]
    """Where each instruction begins."""


_ONCE = Loop(1, (0, 0, 0))


@lru_cache(maxsize=4096)
def micro(nest: tuple[Loop, ...], entries: int, pipeline: int, hazard: bool) -> Micro:
    """The cheapest instructions for a nest.

    Args:
        nest: the loops; their order does not matter, sums and ALU steps may be done in any.
        entries: micro-operations the memory holds.
        pipeline: cycles an instruction costs beyond its steps.
        hazard: whether successive steps must write different accumulators (they must for GEMM).

    Raises:
        ValueError: there is none, because a loop is too long for its field.
    """
    loops = _merged([loop for loop in nest if loop.extent > 1])
    best: tuple[float, int, Micro] | None = None
    for outer, inner, inside, outside in _choices(loops):
        if prod(loop.extent for loop in inside) > entries or max(outer.extent, inner.extent) > _MOST_ITERATIONS:
            continue
        order = sorted(inside, key=lambda loop: (loop.step[0] != 0, loop.extent))
        if hazard and not _alternates([outer, inner, *order]):
            continue
        count = prod(loop.extent for loop in outside)
        cost = count * (pipeline + _UOP_CYCLES * prod(loop.extent for loop in inside))
        if best is None or (cost, count) < best[:2]:
            best = cost, count, Micro(outer, inner, _positions(order), _positions(outside))
    if best is None:
        raise ValueError(f"no instruction can hold the loops {nest}")
    return best[2]


def _merged(loops: list[Loop]) -> tuple[Loop, ...]:
    """Loops joined where one continues another in every entry."""
    changed = True
    while changed:
        changed = False
        for a, b in permutations(loops, 2):
            if a.step == tuple(step * b.extent for step in b.step) and a.extent * b.extent <= _MOST_ITERATIONS:
                others = [loop for loop in loops if loop is not a and loop is not b]
                loops = [*others, Loop(a.extent * b.extent, b.step)]
                changed = True
                break
    return tuple(loops)


def _choices(loops: Sequence[Loop]) -> Iterator[tuple[Loop, Loop, list[Loop], list[Loop]]]:
    """Every way to give each loop a place: outer, inner, among the micro-operations, or around the instructions."""
    for count in range(min(2, len(loops)) + 1):
        for chosen in permutations(range(len(loops)), count):
            pair = [_ONCE] * (2 - count) + [loops[index] for index in chosen]
            rest = [loop for index, loop in enumerate(loops) if index not in chosen]
            for inside in product((True, False), repeat=len(rest)):
                kept = [loop for loop, here in zip(rest, inside, strict=True) if here]
                yield pair[0], pair[1], kept, [loop for loop, here in zip(rest, inside, strict=True) if not here]


def _alternates(order: Sequence[Loop]) -> bool:
    """Whether two successive steps never write the same accumulator: the fastest loop moves it."""
    real = [loop for loop in order if loop.extent > 1]
    return not real or real[-1].step[0] != 0


def _positions(loops: Sequence[Loop]) -> tuple[Triple, ...]:
    """Every position of a nest, the last loop fastest."""
    found: list[Triple] = []
    for indices in product(*(range(loop.extent) for loop in loops)):
        steps = [tuple(index * step for step in loop.step) for index, loop in zip(indices, loops, strict=True)]
        found.append((sum(s[0] for s in steps), sum(s[1] for s in steps), sum(s[2] for s in steps)))
    return tuple(found)
