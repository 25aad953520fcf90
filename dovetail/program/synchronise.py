"""What keeps queues and copies of memories in order.

`synchronise` puts in the waits a list of statements needs, so that none starts before what it depends on has finished.
`mirror` says which bytes are brought to engines with a copy of the memory, and back: no more than must be. A value that
only such an engine's launches write and read is never brought anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

import numpy as np

from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.ir import (
    CORE,
    Begin,
    Buffer,
    Copy,
    LaunchStatement,
    Move,
    Queue,
    Role,
    Statement,
    View,
    Wait,
    byte_places,
    dense_view,
    queue_of,
    reads,
    stream_of,
    touches,
    writes,
)


@dataclass
class _ViewAccess:
    index: int
    """Of the statement, or of the launch that starts it."""
    queue: Queue
    stream: str
    view: View
    is_write: bool


@dataclass
class _CompletionState:
    """Up to which statement queues are known to have finished: to everybody where core 0 has waited, to an engine's
    list where that has."""

    upto: dict[tuple[str, str], int] = field(default_factory=dict)
    """Who waited (empty: core 0), and for which queue, or of lists as a whole engine -> index of a statement."""

    def knows(self, stream: str, access: _ViewAccess) -> bool:
        """Whether who issues the commands of a stream (empty: core 0) knows that an access is over."""
        own = self.upto.get((stream, access.queue), -1)
        return max(own, self.upto.get(("", access.stream or access.queue), -1)) >= access.index


_IN_FLIGHT = 2
"""Launches an engine's queue holds, the one it computes included."""


def synchronise(
    statements: Sequence[Statement],
    dma: Queue,
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
    accesses: dict[str, list[_ViewAccess]] = {}
    finished, running = _CompletionState(), _QueueState()
    launches: dict[Queue, list[int]] = {}
    held: dict[Queue, list[_ViewAccess]] = {}

    def issue(statement: Statement) -> None:
        """Put a statement behind the others."""
        result.append(statement)
        running.issued(result, len(result) - 1, queue_of(statement, dma))

    for number, statement in enumerate(statements):
        queue, stream = queue_of(statement, dma), stream_of(statement)
        if settle and isinstance(statement, Begin):
            own = _streamed(statements, number + 1)
            for wait in _left(result, dma, own) if own else running.waits():
                issue(wait)
        touched = touches(statement)
        if placed is not None:
            touched = [(_placed(view, placed), is_write) for view, is_write in touched]
        needed = _needed(touched, accesses, queue, stream, finished)
        for other, handed in launches.items() if paced and isinstance(statement, Copy) else ():
            if len(handed) > _IN_FLIGHT and handed[-1 - _IN_FLIGHT] > finished.upto.get(("", other), -1):
                needed["", other] = max(needed.get(("", other), (-1, CORE)), (handed[-1 - _IN_FLIGHT], other))
        for (waiter, what), (index, other) in sorted(needed.items()):
            issue(Wait(statement.layer, other, index, waiter))
            finished.upto[waiter, what] = index
        is_launch = isinstance(statement, LaunchStatement)
        is_held = isinstance(statement, LaunchStatement) and statement.starts_with_next
        for view, is_write in touched if queue != CORE else ():  # what the core does is over when the next begins
            record = _still_running(accesses, view, is_write, None if held else finished)
            record.append(_ViewAccess(len(result), queue, stream, view, is_write))
            if is_held:
                held.setdefault(queue, []).append(record[-1])
        if is_launch and not is_held:
            for access in held.pop(queue, ()):  # it ends with the launch that starts it
                access.index = len(result)
        if is_launch and queue != CORE and not stream and not is_held:
            launches.setdefault(queue, []).append(len(result))
        issue(statement)
    return (*result, *running.waits())


_MANY = 32
"""Accesses to a buffer after which those that are over are left out."""


def _still_running(
    accesses: dict[str, list[_ViewAccess]], view: View, is_write: bool, finished: _CompletionState | None
) -> list[_ViewAccess]:
    """The accesses to a view's buffer that somebody may still have to wait for: not those whose bytes are written now,
    and now and then not those that everybody knows are over."""
    record = accesses.setdefault(view.buffer, [])
    if is_write and view.is_dense:
        start, stop = view.span
        record[:] = [a for a in record if not (start <= a.view.span[0] and a.view.span[1] <= stop)]
    if finished is not None and len(record) % _MANY == _MANY - 1:
        record[:] = [access for access in record if not finished.knows("", access)]
    return record


def _streamed(statements: Sequence[Statement], first: int) -> str:
    """The engine whose list all of a layer's statements are commands of, from its first on; empty where there is
    none."""
    own = takewhile(lambda statement: not isinstance(statement, Begin), islice(statements, first, None))
    found = {stream_of(statement) for statement in own}
    return found.pop() if len(found) == 1 else ""


def _placed(view: View, placed: Mapping[str, tuple[str, int]]) -> View:
    """A view as one of the memory its buffer is placed in; as it is where that is not known."""
    memory, address = placed.get(view.buffer, (view.buffer, 0))
    return replace(view, buffer=memory, offset=address + view.offset)


def _needed(
    touched: Sequence[tuple[View, bool]],
    accesses: Mapping[str, list[_ViewAccess]],
    queue: Queue,
    stream: str,
    finished: _CompletionState,
) -> dict[tuple[str, str], tuple[int, Queue]]:
    """Who must wait (empty: core 0) for which queue, or for an engine's list -> index of the statement that must have
    finished before these views may be touched, and its queue. An engine waits for its own queues only."""
    needed: dict[tuple[str, str], tuple[int, Queue]] = {}
    for view, is_write in touched:
        for access in accesses.get(view.buffer, ()):
            if access.queue == queue or not (is_write or access.is_write) or finished.knows(stream, access):
                continue
            if access.view.is_apart(view):
                continue
            mine = bool(stream) and access.stream == stream
            key = (stream, access.queue) if mine else ("", access.stream or access.queue)
            needed[key] = max(needed.get(key, (-1, CORE)), (access.index, access.queue))
    return needed


@dataclass
class _QueueState:
    """What queues still run, as core 0 knows, or as an engine's list does."""

    stream: str = ""
    """The engine; empty for core 0."""
    last: dict[Queue, tuple[int, str]] = field(default_factory=dict)
    """Queue -> its last statement that has not been waited for, and whose list that is of."""
    layer: int = 0
    """The last that anything has been issued for."""

    def issued(self, statements: Sequence[Statement], index: int, queue: Queue) -> None:
        """The next of some statements, by its index, is handed to a queue."""
        statement, stream = statements[index], self.stream
        own = stream_of(statement)
        self.layer = max(self.layer, statement.layer)
        if isinstance(statement, Wait):
            whole = "" if own else stream_of(statements[statement.statement])
            over = [name for name, (_, its) in self.last.items() if name == statement.queue or (whole and its == whole)]
            for name in over if own in ("", stream) else ():
                if self.last[name][0] <= statement.statement:
                    del self.last[name]
        elif queue != CORE and (own == stream or not stream):
            self.last[queue] = (index, own)

    def waits(self) -> list[Wait]:
        """Waits for whatever still runs: of core 0, so that the network has finished when its function returns; or of
        an engine's list for the engine's own queues, where what follows is of that list too."""
        if self.stream:
            return [Wait(self.layer, queue, index, self.stream) for queue, (index, _) in sorted(self.last.items())]
        by_index = sorted(self.last.items(), key=lambda one: one[1])
        ending = {own or queue: (index, queue) for queue, (index, own) in by_index}
        return [Wait(self.layer, queue, index) for _, (index, queue) in sorted(ending.items())]


def _left(statements: Sequence[Statement], dma: Queue, stream: str) -> list[Wait]:
    """The waits of an engine's list for what it still runs."""
    running = _QueueState(stream)
    for index, statement in enumerate(statements):
        running.issued(statements, index, queue_of(statement, dma))
    return running.waits()


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
    state = _CoherenceState(buffers, {_HOST: {}, **{name: {} for name in sorted(engines)}})
    for view in first:
        state.written(_HOST, view)
    for index, statement in enumerate(statements):
        here = statement.engine if isinstance(statement, LaunchStatement) and statement.engine in engines else _HOST
        made = [move for view in reads(statement) for move in state.needed(here, view)]
        if made:
            found[index] = tuple(made)
        for view in writes(statement):
            state.written(here, view)
    ending = [move for view in last for move in state.needed(_HOST, view)]
    return {**found, len(statements): tuple(ending)} if ending else found


@dataclass
class _CoherenceState:
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
