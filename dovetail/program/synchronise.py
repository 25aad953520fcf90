"""What keeps queues and copies of memories in order.

`synchronise` puts in the waits a list of statements needs, so that none starts before what it depends on has finished.
`mirror` says which bytes are brought to engines with a copy of the memory, and back: no more than must be. A value that
only such an engine's launches write and read is never brought anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.ir import (
    CORE,
    Begin,
    Buffer,
    Copy,
    Launch,
    Move,
    Role,
    Statement,
    View,
    Wait,
    byte_places,
    dense_view,
    queue_of,
    reads,
    touches,
    writes,
)


@dataclass(frozen=True)
class _Access:
    index: int
    queue: str
    view: View
    is_write: bool


_IN_FLIGHT = 2
"""Launches an engine's queue holds, the one it computes included."""


def synchronise(
    statements: Sequence[Statement],
    dma: str,
    settle: bool = False,
    paced: bool = False,
    placed: Mapping[str, tuple[str, int]] | None = None,
) -> tuple[Statement, ...]:
    """The statements with the fewest waits, each as late as it can be.

    `statements` has no waits. Buffers are taken as disjoint; within one, the bytes touched are. With `settle`,
    everything also finishes before the next layer begins: slower, but neighbouring layers can then share memory.
    With `paced`, a copy waits for all launches but the last two, which have finished where a queue holds no more: it
    may then go where they worked. With `placed`, the memory and address of buffers, what is touched are bytes of
    memories, so that only waits remain which that placement needs.
    """
    result: list[Statement] = []
    accesses: dict[str, list[_Access]] = {}
    finished: dict[str, int] = {}
    launches: dict[str, list[int]] = {}
    for statement in statements:
        queue = queue_of(statement, dma)
        if settle and isinstance(statement, Begin):
            result = _finish(result, dma)
        touched = [(_placed(view, placed or {}), is_write) for view, is_write in touches(statement)]
        needed = _needed(touched, accesses, queue, finished)
        for other, handed in launches.items() if paced and isinstance(statement, Copy) else ():
            if len(handed) > _IN_FLIGHT and handed[-1 - _IN_FLIGHT] > finished.get(other, -1):
                needed[other] = max(needed.get(other, -1), handed[-1 - _IN_FLIGHT])
        for other, index in sorted(needed.items()):
            result.append(Wait(statement.layer, other, index))
            finished[other] = index
        for view, is_write in touched:
            record = accesses.setdefault(view.buffer, [])
            if is_write:
                start, stop = view.span
                covered = (start <= a.view.span[0] and a.view.span[1] <= stop and view.is_dense for a in record)
                record[:] = [access for access, gone in zip(record, tuple(covered), strict=True) if not gone]
            record.append(_Access(len(result), queue, view, is_write))
        if isinstance(statement, Launch) and queue != CORE:
            launches.setdefault(queue, []).append(len(result))
        result.append(statement)
    return tuple(_finish(result, dma))


def _placed(view: View, placed: Mapping[str, tuple[str, int]]) -> View:
    """A view as one of the memory its buffer is placed in; as it is where that is not known."""
    memory, address = placed.get(view.buffer, (view.buffer, 0))
    return replace(view, buffer=memory, offset=address + view.offset)


def _needed(
    touched: Sequence[tuple[View, bool]], accesses: Mapping[str, list[_Access]], queue: str, finished: Mapping[str, int]
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


NEAR = 4096
"""Bytes between two parts up to which they are brought together: about what a transfer costs by itself."""

_HOST = ""


def mirror(
    statements: Sequence[Statement],
    buffers: Mapping[str, Buffer],
    engines: Collection[str],
    first: Sequence[View],
    last: Sequence[View],
) -> dict[int, tuple[Move, ...]]:
    """The moves of a program, as `Program.moves` has them.

    Args:
        statements: in issue order, waits included.
        buffers: where views lie.
        engines: names of the engines that work on a copy of their memory.
        first: what the host holds at the start of an inference: inputs and states.
        last: what it must hold at the end: outputs and states.
    """
    found: dict[int, tuple[Move, ...]] = {}
    if not engines:
        return found
    state = _State(buffers, {_HOST: {}, **{name: {} for name in sorted(engines)}})
    for view in first:
        state.written(_HOST, view)
    for index, statement in enumerate(statements):
        here = statement.engine if isinstance(statement, Launch) and statement.engine in engines else _HOST
        made = [move for view in reads(statement) for move in state.needed(here, view)]
        if made:
            found[index] = tuple(made)
        for view in writes(statement):
            state.written(here, view)
    ending = [move for view in last for move in state.needed(_HOST, view)]
    return {**found, len(statements): tuple(ending)} if ending else found


@dataclass
class _State:
    """Who holds the present contents of each byte."""

    buffers: Mapping[str, Buffer]
    valid: dict[str, dict[str, Array]] = field(default_factory=dict)
    """Place -> buffer -> a bool per byte."""

    def held(self, place: str, buffer: str) -> Array:
        """Which bytes of a buffer a place holds."""
        return self.valid[place].setdefault(buffer, np.zeros(self.buffers[buffer].nbytes, dtype=np.bool_))

    def written(self, place: str, view: View) -> None:
        """A view has got new contents there, and so old ones everywhere else."""
        touched = _touched(view)
        for other in self.valid:
            self.held(other, view.buffer)[touched] = other == place

    def needed(self, place: str, view: View) -> Iterator[Move]:
        """What must be brought so that a place holds a view; what nobody has written yet is left out."""
        if self.buffers[view.buffer].role is Role.CONSTANT:
            return
        here, host = self.held(place, view.buffer), self.held(_HOST, view.buffer)
        wanted = np.zeros(len(here), dtype=np.bool_)
        wanted[_touched(view)] = True
        wanted &= ~here
        for other in sorted(self.valid):
            there = self.held(other, view.buffer)
            if other not in (_HOST, place):
                yield from self._brought(view.buffer, other, False, wanted & there & ~host, there, host)
        if place != _HOST:
            yield from self._brought(view.buffer, place, True, wanted & host, host, here)

    def _brought(
        self, buffer: str, engine: str, to_engine: bool, wanted: Array, source: Array, destination: Array
    ) -> Iterator[Move]:
        """Moves that bring the wanted bytes and overwrite none that the destination alone holds."""
        harmful = np.cumsum(destination & ~source)
        places = np.flatnonzero(wanted)
        if not len(places):
            return
        apart = (np.diff(places) > NEAR) | (np.diff(harmful[places]) > 0)
        for part in np.split(places, np.flatnonzero(apart) + 1):
            start, stop = int(part[0]), int(part[-1]) + 1
            yield Move(engine, dense_view(buffer, TensorType((stop - start,), DType.UINT8), start), to_engine)
            destination[start:stop] = source[start:stop]  # what lies between comes with them


def _touched(view: View) -> slice | Array:
    """The bytes of its buffer a view touches."""
    if view.is_dense:
        return slice(*view.span)
    return byte_places(view, 0).reshape(-1)
