"""Waits that keep queues in order, and moves that keep copies of a memory alike.

`synchronise` puts in the waits a list of statements needs, so that none starts before what it depends on has finished.
`mirror` says which bytes are brought to engines with a copy of the memory, and back: no more than must be. A value that
only such an engine's launches write and read is never brought anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from dovetail.ir.types import Array, DType, TensorType
from dovetail.program.ir import (
    CORE,
    Begin,
    Buffers,
    Call,
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
    """Index of the statement, or of the launch that starts it."""
    queue: Queue
    stream: str
    view: View
    is_write: bool


@dataclass
class _CompletionState:
    """The statements up to which queues are known to have finished: to everybody where core 0 has waited, to an
    engine's list or a further core where that has."""

    upto: dict[tuple[str, str], int] = field(default_factory=dict)
    """Waiter (empty: core 0) and queue, or for lists as a whole engine -> index of a statement."""

    def knows(self, waiter: str, access: _ViewAccess) -> bool:
        """Whether a waiter (empty: core 0) knows that an access is over."""
        own = self.upto.get((waiter, access.queue), -1)
        return max(own, self.upto.get(("", access.stream or access.queue), -1)) >= access.index


_IN_FLIGHT = 2
"""Launches an engine's queue holds, the one it computes included."""
_MANY = 32
"""Accesses to a buffer after which those that are over are left out."""
_Needed = dict[tuple[str, str], tuple[int, Queue]]
"""Waiter (empty: core 0) and queue, or engine for its list -> index of the statement waited for, and its queue."""


def synchronise(
    statements: Sequence[Statement],
    dma: Queue,
    settle: bool = False,
    paced: bool = False,
    placed: Mapping[str, tuple[str, int]] | None = None,
    apart: bool = False,
) -> tuple[Statement, ...]:
    """The statements with the fewest waits, each as late as it can be. Buffers are taken as disjoint; within one, the
    bytes touched are.

    Args:
        statements: in issue order, without waits.
        dma: the queue of copies.
        settle: everything also finishes before the next layer begins: slower, but neighbouring layers can then share
            memory.
        paced: a copy waits for all launches but the last two, which have finished where a queue holds no more: it may
            then go where they worked.
        placed: memory and address of buffers. Bytes of memories are then looked at, so that only waits remain which
            that placement needs.
        apart: further cores wait for one another by themselves, so that core 0 goes on.
    """
    walk = _Synchroniser(dma, paced, placed or {}, apart)
    for number, statement in enumerate(statements):
        if settle and isinstance(statement, Begin):
            walk.wait_for_all(_streamed(statements, number + 1))
        walk.add(statement)
    walk.wait_for_all()
    return tuple(walk.result)


@dataclass
class _Synchroniser:
    """The statements so far, with their waits."""

    dma: Queue
    paced: bool
    placed: Mapping[str, tuple[str, int]]
    apart: bool
    result: list[Statement] = field(default_factory=list)
    accesses: dict[str, list[_ViewAccess]] = field(default_factory=dict)
    """By buffer, the accesses somebody may still have to wait for."""
    finished: _CompletionState = field(default_factory=_CompletionState)
    launches: dict[Queue, list[int]] = field(default_factory=dict)
    held: dict[Queue, list[_ViewAccess]] = field(default_factory=dict)
    """Accesses of launches that another one starts."""
    settled: int = 0
    """Number of statements before which everything has finished."""
    layer: int = 0
    """The last layer of these."""

    def wait_for_all(self, stream: str = "") -> None:
        """Wait for whatever still runs; as `_waits_for_all`."""
        layer = max((statement.layer for statement in self.result[self.settled :]), default=0)
        layer = max(layer, self.layer)
        self.result += _waits_for_all(self.result, self.settled, layer, self.dma, stream)
        if not stream:
            self.settled, self.layer = len(self.result), layer

    def add(self, statement: Statement) -> None:
        """Issue a statement behind the waits it needs."""
        queue, stream = queue_of(statement, self.dma), stream_of(statement)
        touched = [(self._placed(view), is_write) for view, is_write in touches(statement)]
        core = queue if self.apart and isinstance(statement, Call) else CORE
        needed = self._needed(touched, queue, stream, core)
        if self.paced and isinstance(statement, Copy):
            for other, handed in self.launches.items():
                if len(handed) > _IN_FLIGHT and handed[-1 - _IN_FLIGHT] > self.finished.upto.get(("", other), -1):
                    needed["", other] = max(needed.get(("", other), (-1, CORE)), (handed[-1 - _IN_FLIGHT], other))
        for (waiter, what), (index, other) in sorted(needed.items()):
            self.result.append(Wait(statement.layer, other, index, stream if waiter == stream else "", core))
            self.finished.upto[waiter, what] = index
        launch = statement if isinstance(statement, LaunchStatement) else None
        for view, is_write in touched if queue != CORE else ():  # what the core does is over when the next begins
            access = _ViewAccess(len(self.result), queue, stream, view, is_write)
            self._record(view, is_write).append(access)
            if launch and launch.starts_with_next:
                self.held.setdefault(queue, []).append(access)
        if launch and not launch.starts_with_next:
            for access in self.held.pop(queue, ()):  # it ends with the launch that starts it
                access.index = len(self.result)
            if queue != CORE and not stream:
                self.launches.setdefault(queue, []).append(len(self.result))
        self.result.append(statement)

    def _record(self, view: View, is_write: bool) -> list[_ViewAccess]:
        """The accesses to a view's buffer: not those whose bytes are written now, and now and then not those that
        everybody knows are over."""
        record = self.accesses.setdefault(view.buffer, [])
        if is_write and view.is_dense:
            start, stop = view.span
            record[:] = [a for a in record if not (start <= a.view.span[0] and a.view.span[1] <= stop)]
        if not self.held and len(record) % _MANY == _MANY - 1:
            record[:] = [access for access in record if not self.finished.knows("", access)]
        return record

    def _placed(self, view: View) -> View:
        """A view as one of the memory its buffer is placed in; as it is where that is not known."""
        if view.buffer not in self.placed:
            return view
        memory, address = self.placed[view.buffer]
        return replace(view, buffer=memory, offset=address + view.offset)

    def _needed(self, touched: Sequence[tuple[View, bool]], queue: Queue, stream: str, core: Queue) -> _Needed:
        """The waits without which these views may not be touched. An engine waits for its own queues only."""
        needed: _Needed = {}
        waiter = stream or ("" if core == CORE else core)
        for view, is_write in touched:
            for access in self.accesses.get(view.buffer, ()):
                if access.queue == queue or not (is_write or access.is_write) or self.finished.knows(waiter, access):
                    continue
                if access.view.is_apart(view):
                    continue
                mine = core != CORE or (bool(stream) and access.stream == stream)
                key = (waiter, str(access.queue)) if mine else ("", access.stream or access.queue)
                needed[key] = max(needed.get(key, (-1, CORE)), (access.index, access.queue))
        return needed


def _streamed(statements: Sequence[Statement], first: int) -> str:
    """The engine whose list all of a layer's statements are commands of, from its first on; empty where there is
    none."""
    behind = (statements[number] for number in range(first, len(statements)))
    own = takewhile(lambda statement: not isinstance(statement, Begin), behind)
    streams = {stream_of(statement) for statement in own}
    return streams.pop() if len(streams) == 1 else ""


def _waits_for_all(statements: Sequence[Statement], first: int, layer: int, dma: Queue, stream: str) -> list[Wait]:
    """Waits, of a layer, for whatever still runs behind some statements, of which those before the first are over.

    They are of core 0, so that the network has finished when its function returns; or of an engine's list (`stream`)
    for the engine's own queues, where what follows is of that list too.
    """
    last: dict[Queue, tuple[int, str]] = {}
    """Queue -> its last statement that has not been waited for, and the list that is of."""
    for index in range(first, len(statements)):
        statement = statements[index]
        queue, own = queue_of(statement, dma), stream_of(statement)
        if isinstance(statement, Wait) and statement.known_to in ("", stream):
            whole = "" if own else stream_of(statements[statement.statement])
            for name, (at, its) in list(last.items()):
                if at <= statement.statement and (name == statement.queue or (whole and its == whole)):
                    del last[name]
        elif queue != CORE and (own == stream or not stream):
            last[queue] = (index, own)
    if stream:
        return [Wait(layer, queue, index, stream) for queue, (index, _) in sorted(last.items())]
    by_index = sorted(last.items(), key=lambda one: one[1])
    ending = {own or queue: (index, queue) for queue, (index, own) in by_index}
    return [Wait(layer, queue, index) for _, (index, queue) in sorted(ending.items())]


NEAR = 4096
"""Bytes between two parts up to which they are brought together: about what a transfer costs by itself."""

_HOST = ""


def mirror(
    statements: Sequence[Statement],
    buffers: Buffers,
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
    if not engines:
        return {}
    moves: dict[int, tuple[Move, ...]] = {}
    state = _CoherenceState(buffers, {_HOST: {}, **{name: {} for name in sorted(engines)}})
    for view in first:
        state.written(_HOST, view)
    for index, statement in enumerate(statements):
        here = statement.engine if isinstance(statement, LaunchStatement) and statement.engine in engines else _HOST
        moves[index] = tuple(move for view in reads(statement) for move in state.needed(here, view))
        for view in writes(statement):
            state.written(here, view)
    moves[len(statements)] = tuple(move for view in last for move in state.needed(_HOST, view))
    return {index: own for index, own in moves.items() if own}


@dataclass
class _CoherenceState:
    """The places that hold the present contents of each byte."""

    buffers: Buffers
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
        """The moves after which a place holds a view; what nobody has written yet is left out."""
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
