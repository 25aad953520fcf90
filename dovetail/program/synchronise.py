"""Inserts the waits a list of statements needs: no statement starts before what it depends on has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.program.ir import CORE, Begin, Statement, View, Wait, queue_of, reads, writes


@dataclass(frozen=True)
class _Access:
    index: int
    queue: str
    view: View
    is_write: bool


def synchronise(statements: Sequence[Statement], dma: str, settle: bool = False) -> tuple[Statement, ...]:
    """The statements with the fewest waits, each as late as it can be.

    `statements` has no waits. Buffers are taken as disjoint; within one, the bytes touched are. With `settle`,
    everything also finishes before the next layer begins: slower, but neighbouring layers can then share memory.
    """
    result: list[Statement] = []
    accesses: dict[str, list[_Access]] = {}
    finished: dict[str, int] = {}
    for statement in statements:
        queue = queue_of(statement, dma)
        if settle and isinstance(statement, Begin):
            result = _finish(result, dma)
        touched = [*((view, False) for view in reads(statement)), *((view, True) for view in writes(statement))]
        for other, index in sorted(_needed(touched, accesses, queue, finished).items()):
            result.append(Wait(statement.layer, other, index))
            finished[other] = index
        for view, is_write in touched:
            record = accesses.setdefault(view.buffer, [])
            if is_write:
                start, stop = view.span
                covered = (start <= a.view.span[0] and a.view.span[1] <= stop and view.is_dense for a in record)
                record[:] = [access for access, gone in zip(record, tuple(covered), strict=True) if not gone]
            record.append(_Access(len(result), queue, view, is_write))
        result.append(statement)
    return tuple(_finish(result, dma))


def _needed(
    touched: Sequence[tuple[View, bool]],
    accesses: Mapping[str, list[_Access]],
    queue: str,
    finished: Mapping[str, int],
) -> dict[str, int]:
    """Queue -> statement index that must have finished before these views may be touched."""
    needed: dict[str, int] = {}
    for view, is_write in touched:
        for access in accesses.get(view.buffer, ()):
            conflict = (is_write or access.is_write) and not access.view.is_apart(view)
            if conflict and access.queue not in (queue, CORE) and finished.get(access.queue, -1) < access.index:
                needed[access.queue] = max(needed.get(access.queue, -1), access.index)
    return needed


def _finish(statements: list[Statement], dma: str) -> list[Statement]:
    """Add waits for whatever still runs at the end, so that the network has finished when its function returns."""
    last: dict[str, int] = {}
    for index, statement in enumerate(statements):
        if isinstance(statement, Wait):
            if last.get(statement.queue, -1) <= statement.statement:
                last.pop(statement.queue, None)
        elif queue_of(statement, dma) != CORE:
            last[queue_of(statement, dma)] = index
    layer = max((statement.layer for statement in statements), default=0)
    return [*statements, *(Wait(layer, queue, index) for queue, index in sorted(last.items()))]
