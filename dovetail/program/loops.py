"""Loops of a program: stretches in which the same statements come again, only numbers changing from turn to turn.

`rolled` finds them in a planned program. A `Loop` says what changes as series: a constant step, two values in turns
(ping-pong buffers) or, where there is no rule, a table. `carried_out` is the program as its loops say it: what is
interpreted and written as C. `check_loops` holds the loops to the statements the verifier has walked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from dovetail.errors import ProgramError
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array, TensorType
from dovetail.program.ir import (
    Begin,
    Call,
    Copy,
    LaunchStatement,
    Program,
    Role,
    Statement,
    View,
    Wait,
    print_statement,
    print_view,
    queue_of,
    stream_of,
)
from dovetail.program.series import ByteAddress, Loop, Number, Series, alike, series
from dovetail.program.transfers import Transfer, transfers

MOST_LAG = 3
"""How many turns later something may be waited for: each is a ticket more that is kept."""
_REPORT = "report this with the model and the target: loops made by Dovetail must say what the program does"
_MOST_PERIOD = 64
_LEAST_SAVED = 3
"""Statements a loop must save to be one: its head, its end and its first comment take lines too."""
_ROW = 110
"""Characters of a table's line."""
_MOST_FIELDS = 6
"""Numbers without a rule in a turn: with more, nobody reads the loop more easily than what it stands for."""


def numbers(program: Program, statement: Statement) -> tuple[Number, ...]:
    """What may change from turn to turn: the layer; where operands and results lie; of copies sizes, strides and fill
    too; the statement that is waited for."""
    if isinstance(statement, Begin):
        return (statement.layer,)
    if isinstance(statement, Wait):
        return statement.layer, statement.statement
    places = tuple(place_of(program, view) for view in _views(statement))
    if not isinstance(statement, Copy):
        return statement.layer, *places
    source, target = statement.source, statement.destination
    sizes = (*source.type.shape, *source.strides, *target.type.shape, *target.strides, *statement.before)
    return statement.layer, *places, *sizes, statement.fill


def _views(statement: Copy | LaunchStatement | Call) -> tuple[View, ...]:
    if isinstance(statement, Copy):
        return statement.source, statement.destination
    return *statement.operands.values(), statement.result


def place_of(program: Program, view: View) -> ByteAddress:
    """Where a view begins."""
    buffer = program.buffers[view.buffer]
    if buffer.address is None:
        return ByteAddress(buffer.name, view.offset)
    return ByteAddress(buffer.memory, buffer.address + view.offset)


def turn_of(program: Program, loop: Loop, index: int) -> Statement:
    """A statement of a loop as the loop says it. What a launch or a call computes is looked up, as its task is; all
    else comes from the first turn and the series."""
    turn, number = loop.place(index)
    given, body = [one.at(turn) for one in loop.numbers[number]], program.statements[loop.first + number]
    layer = _whole(given[0])
    if isinstance(body, Begin):
        return Begin(layer)
    if isinstance(body, Wait):
        return replace(body, layer=layer, statement=_whole(given[1]))
    if isinstance(body, Copy):
        return _copy_in(program, body, layer, given)
    own = program.statements[index]
    if not isinstance(own, LaunchStatement | Call) or len(own.operands) + 2 != len(given):
        where = f"statement {print_statement(program, index).strip()}"
        raise ProgramError("a loop repeats something else than the program does", where=where, hint=_REPORT)
    views = [_at(program, view, place) for view, place in zip(_views(own), given[1:], strict=True)]
    operands = dict(zip(own.operands, views, strict=False))
    return replace(own, layer=layer, operands=operands, result=views[-1])


def _copy_in(program: Program, body: Copy, layer: int, given: Sequence[Number]) -> Copy:
    """The first turn's copy with other numbers."""
    sizes, views = [_whole(number) for number in given[3:]], []
    for view, place in zip(_views(body), given[1:3], strict=True):
        shape, strides = (_taken(sizes, len(known)) for known in (view.type.shape, view.strides))
        same = replace(view, type=TensorType(shape, view.type.dtype), strides=strides)
        views.append(_at(program, same, place))
    before = _taken(sizes, len(body.before))
    return replace(body, layer=layer, source=views[0], destination=views[1], before=before, fill=sizes[0])


def _taken(sizes: list[int], count: int) -> tuple[int, ...]:
    found, sizes[:count] = tuple(sizes[:count]), ()
    return found


def _at(program: Program, view: View, number: Number) -> View:
    """The view from another byte on, in its own buffer or beyond its ends."""
    assert isinstance(number, ByteAddress)
    address = program.buffers[view.buffer].address
    if address is None:
        return replace(view, buffer=number.base, offset=number.offset)
    return replace(view, offset=number.offset - address)


def _whole(number: Number) -> int:
    assert isinstance(number, int)
    return number


def carried_out(program: Program) -> Iterator[tuple[int, Statement]]:
    """The statements in order, with their indices: those of loops as the loops say them."""
    own = {index: loop for loop in program.loops for index in range(loop.first, loop.stop)}
    for index, statement in enumerate(program.statements):
        yield index, turn_of(program, own[index], index) if index in own else statement


def print_program(program: Program) -> str:
    """The whole program as text: buffers by address, then numbered statements; of loops the first turn, and what each
    further turn adds."""
    lines = [f"program {program.name}"]
    for buffer in sorted(program.buffers.values(), key=lambda b: (b.memory, b.address or -1, b.name)):
        place = "by the linker" if buffer.address is None else f"0x{buffer.address:08x}"
        lines.append(
            f"  buffer {buffer.name}: {buffer.nbytes} bytes in {buffer.memory} at {place} ({buffer.role.value})"
        )
    within = {index: loop for loop in program.loops for index in range(loop.first, loop.stop)}
    for index in range(len(program.statements) + 1):
        loop = within.get(index)
        for move in program.moves.get(index, ()):
            lines.append(f"        {'to' if move.to_engine else 'from'} {move.engine}: {print_view(move.view)}")
        if loop and index == loop.first:
            lines.append(f"  {loop.count} times, statements {loop.first} to {loop.stop - 1}:")
        if loop is None and index < len(program.statements):
            lines.append(print_statement(program, index))
        elif loop and index < loop.first + loop.period:
            lines.append(f"  {print_statement(program, index)}{_changes(loop.numbers[index - loop.first])}")
    return "\n".join(lines) + "\n"


def _changes(own: Sequence[Series]) -> str:
    """What becomes of the places in a statement from turn to turn, results last."""
    rules = ["a table" if one.table else f"{one.step:+d}" if one.step else f"{one.swing:+d} in turns" for one in own]
    found = [rule for one, rule in zip(own, rules, strict=True) if isinstance(one.first, ByteAddress)]
    moving = any(not one.is_constant for one in own if isinstance(one.first, ByteAddress))
    return f" [{', '.join(rule.replace('+0 in turns', '-') for rule in found)}]" if moving else ""


def check_loops(program: Program) -> None:
    """Hold every loop to the statements of the program.

    Raises:
        ProgramError: loops overlap or leave the program, or one says something else than a statement.
    """
    ends = [(loop.first, loop.stop) for loop in program.loops]
    if any(stop > after for (_, stop), (after, _) in pairwise([*ends, (len(program.statements), 0)])):
        raise ProgramError("loops lie over one another, or over the end", where=program.name, hint=_REPORT)
    for loop in program.loops:
        for index in range(loop.first, loop.stop):
            turn, number = loop.place(index)
            body, own = program.statements[loop.first + number], program.statements[index]
            found = numbers(program, own)
            said = tuple(one.at(turn) for one in loop.numbers[number])
            if said != found or _form(program, body, 0) != _form(program, own, 0):
                odd = next((pair for pair in zip(said, found, strict=False) if pair[0] != pair[1]), (body, own))
                what = f"turn {turn} of a loop says {odd[0]} where the program has {odd[1]}"
                raise ProgramError(what, where=f"statement {print_statement(program, index).strip()}", hint=_REPORT)


def rolled(program: Program) -> Program:
    """The program with its loops: the statements are the same."""
    moved = set(program.moves)
    known: dict[Hashable, int] = {}
    forms = [
        known.setdefault(("moved", index) if index in moved else _form(program, statement, index), len(known))
        for index, statement in enumerate(program.statements)
    ]
    waits = [one.statement if isinstance(one, Wait) else -1 for one in program.statements]
    last = _last_waits(program)
    return replace(program, loops=tuple(_LoopSearch(program, np.array(forms), waits, last).between(0, len(forms))))


def _last_waits(program: Program) -> dict[int, int]:
    """Statement -> the last statement that waits for it."""
    return {one.statement: index for index, one in enumerate(program.statements) if isinstance(one, Wait)}


def _form(program: Program, statement: Statement, index: int) -> Hashable:
    """All that must be the same for a statement to be another turn of one; what cannot be has its index in it."""
    if isinstance(statement, Begin):
        return ("begin",)
    if stream_of(statement) or (isinstance(statement, Call) and statement.core):
        return type(statement).__name__, index
    if isinstance(statement, Wait):
        return "wait", statement.queue
    views = _views(statement)
    where = tuple(_memory(program, view) for view in views)
    kinds = tuple((view.type.dtype, len(view.type.shape), view.layout) for view in views)
    if isinstance(statement, LaunchStatement):
        return (
            "launch",
            statement.engine,
            statement.queue,
            statement.starts_with_next,
            tuple(statement.packed),
            where,
            kinds,
        )
    if isinstance(statement, Copy):
        made = tuple(
            (one.is_padded, one.border, one.planes > 1, one.rows > 1, one.pad_rows, one.pad_bytes, one.fill)
            for one in transfers(statement)
        )
        return "copy", queue_of(statement, program.dma), bool(statement.before), made, where, kinds
    shapes = tuple(view.type.shape for view in views)
    return "call", _meaning(statement.graph), shapes, where, kinds


def _memory(program: Program, view: View) -> str:
    buffer = program.buffers[view.buffer]
    return "" if buffer.role is Role.CONSTANT and buffer.address is None else buffer.memory


def digest(array: Array) -> bytes:
    """What stands for the contents of an array where many are compared."""
    return blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).digest()


def _meaning(graph: Graph) -> Hashable:
    """What a graph computes, whatever its values are called."""
    order = dict.fromkeys((*graph.inputs, *(name for node in graph.nodes for name in (*node.inputs, node.output))))
    called = {name: number for number, name in enumerate(order)}
    nodes = tuple((repr(n.operator), tuple(called[name] for name in n.inputs), called[n.output]) for n in graph.nodes)
    held = tuple((called[name], digest(array)) for name, array in graph.constants.items() if name in called)
    return nodes, held, tuple(called[name] for name in graph.outputs)


@dataclass(frozen=True)
class _LoopSearch:
    """The search for loops."""

    program: Program
    forms: Array
    """A number for the form of each statement."""
    waits: Sequence[int]
    """For each statement that which it waits for, -1 for none."""
    last: Mapping[int, int]
    """Statement -> the last one that waits for it."""
    known: dict[int, tuple[Number, ...]] = field(default_factory=dict)
    """The numbers of statements looked at."""
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Those of the transfers of copies looked at."""
    tried: dict[tuple[int, int, int], tuple[Loop | None, float]] = field(default_factory=dict)
    """First statement, period and turns of stretches looked at."""

    def _numbers(self, index: int) -> tuple[Number, ...]:
        if index not in self.known:
            self.known[index] = numbers(self.program, self.program.statements[index])
        return self.known[index]

    def between(self, begin: int, end: int) -> Iterator[Loop]:
        """The loops between two statements, in order: the one that saves most, then those before and behind it."""
        pending = [(begin, end)]
        found = []
        while pending:
            low, high = pending.pop()
            best = self._best(low, high)
            if best is not None:
                found.append(best)
                pending += [(low, best.first), (best.stop, high)]
        return iter(sorted(found, key=lambda loop: loop.first))

    def _best(self, begin: int, end: int) -> Loop | None:
        best, saved = None, _LEAST_SAVED - 1.0
        for most, *stretch in self._repeats(begin, end):
            if most <= saved:
                break
            loop, gain = self._tried(*stretch)
            if loop and gain > saved:
                best, saved = loop, gain
        return best

    def _tried(self, first: int, period: int, count: int) -> tuple[Loop | None, float]:
        """The longest loop of some turns, if there is one, and what it saves."""
        place = first, period, count
        if place not in self.tried:
            loop = self._loop(first, period, count)
            self.tried[place] = loop, self._saved(loop) if loop else 0
        return self.tried[place]

    def _repeats(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Stretches whose forms repeat, with layers from their begin on: statements saved at most, first statement,
        period, turns; the best first."""
        found = []
        begins = np.cumsum([0, *(isinstance(one, Begin) for one in self.program.statements)])
        for period in range(1, min(_MOST_PERIOD, (end - begin) // 2) + 1):
            same = self.forms[begin : end - period] == self.forms[begin + period : end]
            edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8))).reshape(-1, 2)
            for low, high in edges[edges[:, 1] - edges[:, 0] >= period].tolist():
                for phase in range(min((high - low) % period + 1, high - low)):
                    count, first = (high - low - phase) // period + 1, begin + low + phase
                    layers = begins[first + period] - begins[first]
                    if count > 1 and (not layers or isinstance(self.program.statements[first], Begin)):
                        found.append(((count - 1) * period, first, period, count))
        return sorted(found, key=lambda one: (-one[0], one[2], one[1]))

    def _loop(self, first: int, period: int, count: int) -> Loop | None:
        """The longest loop of some turns whose waits keep to a rule; None if there is none."""
        turns = [
            tuple(
                first + turn * period + number - self.waits[first + turn * period + number]
                if self.waits[first + turn * period + number] >= 0
                else 0
                for number in range(period)
            )
            for turn in range(count)
        ]
        low, high = max(_runs(turns), key=lambda run: (run[1] - run[0], -run[0]))
        while low > 0 and self._may_begin(first, period, low - 1, high, turns):
            low -= 1
        if high - low < 2:
            return None
        begin, count = first + low * period, high - low
        own = (range(begin + number, begin + count * period, period) for number in range(period))
        given = ([self._numbers(index) for index in same] for same in own)
        made = tuple(tuple(series(changing) for changing in zip(*found, strict=True)) for found in given)
        loop = Loop(begin, count, made)
        return loop if self._is_followed(loop) else None

    def _may_begin(self, first: int, period: int, low: int, high: int, turns: Sequence[tuple[int, ...]]) -> bool:
        """Whether a loop may begin with turn `low`: what its first turns wait for otherwise came before it."""
        begin, steady = first + low * period, turns[high - 1]
        for turn in range(low, high):
            for number, (distance, usual) in enumerate(zip(turns[turn], steady, strict=True)):
                here = first + turn * period + number
                if distance != usual and here - distance >= begin:
                    return False
                if distance != usual and here - usual >= begin:
                    return False
        return True

    def _is_followed(self, loop: Loop) -> bool:
        """Whether the tickets of the last turns are enough for what waits behind the loop, and within it."""
        if any(turns > min(MOST_LAG, loop.count - 1) for _, turns in loop.awaited.values()):
            return False
        for index in range(loop.first, loop.stop):
            if self.last.get(index, -1) >= loop.stop and loop.count - 1 - loop.place(index)[0] > MOST_LAG:
                return False
        return True

    def _saved(self, loop: Loop) -> float:
        """Lines the loop makes shorter, about: what is in tables takes lines of its own, kept tickets too. Less than
        none where the table has too many fields."""
        fields = self._fields(loop)
        if fields > _MOST_FIELDS:
            return -1
        kept = sum(turns > 0 for _, turns in loop.awaited.values())
        table = fields * loop.count * 12 / _ROW + 2 if fields else 0
        return (loop.count - 1) * loop.period - table - kept - 2

    def _fields(self, loop: Loop) -> int:
        """How many numbers of a turn have no rule, tasks of several layers among them."""
        found, tasks = set[tuple[Number, ...]](), set[Series]()
        for number, own in enumerate(loop.numbers):
            first = loop.first + number
            if isinstance(self.program.statements[first], LaunchStatement) and not own[0].is_constant:
                tasks.add(own[0])
            shown = zip(*(self._shown(index) for index in range(first, loop.stop, loop.period)), strict=True)
            found |= {alike(one.table) for one in map(series, shown) if one.table}
        return len(found) + len(tasks)

    def _shown(self, index: int) -> tuple[Number, ...]:
        """The numbers of a statement that C shows; of a copy those of its transfers."""
        statement, own = self.program.statements[index], self._numbers(index)
        if isinstance(statement, Begin | Call):
            return own
        if not isinstance(statement, Copy):
            return ()
        if index not in self.sizes:
            self.sizes[index] = tuple(size for one in transfers(statement) for size in _sizes(one))
        return *own[1:3], *self.sizes[index]


def _sizes(one: Transfer) -> Iterator[int]:
    yield one.row_bytes
    if one.rows > 1 or one.planes > 1:
        yield from (one.rows, one.destination_row_stride, one.source_row_stride)
    if one.planes > 1:
        yield from (one.planes, one.destination_plane_stride, one.source_plane_stride)


def _runs(items: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Begin and end of every stretch of equal items."""
    edges = [0, *(index + 1 for index, (one, other) in enumerate(pairwise(items)) if one != other), len(items)]
    return list(pairwise(edges))
