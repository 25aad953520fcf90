"""Declarations that cannot be right, found without computing anything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from dovetail.check.cases import Unasked, ask
from dovetail.check.layers import LEAST, Point, setting
from dovetail.check.raised import raised
from dovetail.target.description import Engine, Offload, Target

_GROWING = ("rows", "channels", "outputs")
_SLACK = 0.75
"""What a layer twice as large may cost at least, relative to the smaller: hardware has modes that fit some sizes."""


def lint_target(target: Target) -> Iterator[str]:
    """What is wrong with memories, and with limits that say nothing; a sentence each."""
    used = {target.code, target.values}
    for engine in target.engines:
        used |= {engine.memory, *engine.raw.contents, *engine.raw.pointers.values()}
        used |= {engine.constants} if engine.constants else set()
        if engine.device is not None and engine.ideal_macs_per_cycle <= 0:
            yield f"{engine.name}: its ideal_macs_per_cycle is {engine.ideal_macs_per_cycle:g}; it must be positive"
        seen: dict[object, str] = {}
        for offload in engine.offloads:
            for number, limit in enumerate(offload.constraints, 1):
                if not limit.sentence.strip():
                    yield f"{engine.name} {offload.name}: limit {number} has no sentence: what shall a user be told?"
            key = (offload.pattern, offload.constraints)
            if key in seen:
                yield f"{engine.name} {offload.name}: nothing can reach it, {seen[key]} takes the same and comes first"
            seen.setdefault(key, offload.name)
    known = {memory.name for memory in target.memories}
    for name in sorted(used - known - {"constants", "task"}):
        if any(engine.memory == name or engine.constants == name for engine in target.engines):
            yield f"the memory {name} is used and not declared"
    ordered = sorted(target.memories, key=lambda memory: memory.base)
    for memory, after in zip(ordered, [*ordered[1:], None], strict=True):
        if memory.size <= 0 or memory.alignment <= 0 or memory.base % max(memory.alignment, 1):
            yield f"the memory {memory.name} has {memory.size} bytes at {memory.base:#x}, aligned to {memory.alignment}"
        if after is not None and memory.base + memory.size > after.base:
            yield f"the memories {memory.name} and {after.name} overlap at {after.base:#x}"
        if memory.name not in used and not _reachable(target, memory.name):
            yield f"nobody can fill the memory {memory.name}: no engine, value, constant or code lies there"


def _reachable(target: Target, name: str) -> bool:
    """Whether a driver is told where a memory lies."""
    base = target.memory(name).base
    return any(base in engine.defines.values() for engine in target.engines)


def lint_cost(engine: Engine, offload: Offload, start: Point) -> Iterator[str]:
    """What is wrong with the cycles an offload says it takes, around a layer it takes.

    Raises:
        Unasked: a limit or the cycles raise.
    """
    where = f"{engine.name} {offload.name}"
    for axis in ("", *_GROWING):
        costs: list[tuple[int, int]] = []
        for factor in (1, 2, 4) if axis else (1,):
            point = {**start, axis: setting(start, axis) * factor} if axis else dict(start)
            asked = ask(offload, point)
            if asked is None or asked.failures or (axis and axis not in asked.layer.used):
                continue
            try:
                cycles = offload.cycles(asked.match)
            except Exception as error:
                raise Unasked(f"its cycles raise {raised(error)}") from error
            if cycles <= 0:
                at = f"{axis} = {point[axis]}" if axis else "a usual layer"
                yield f"{where}: its cycles are {cycles} for {at}; they must be positive"
                return
            costs.append((max(setting(point, axis), LEAST[axis]) if axis else 0, cycles))
        for (small, few), (large, more) in pairwise(costs):
            if more < _SLACK * few:
                yield f"{where}: its cycles fall from {few} to {more} as {axis} grow from {small} to {large}"
