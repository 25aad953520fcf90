"""Loops of a program: stretches in which the same statements come again, only numbers changing from turn to turn.

`rolled` finds them in a planned program. A `Loop` says what changes as series: a constant step, two values in turns
(ping-pong buffers) or, where there is no rule, a table; the C of a network is written by them. `check_loops` holds
the loops to the statements, which are what the verifier walks and the interpreter carries out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import chain, cycle, pairwise

import numpy as np

from dovetail.errors import ProgramError
from dovetail.ir.graph import Graph
from dovetail.ir.types import Array
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
    issuer_of,
    print_statement,
    print_view,
    queue_of,
)
from dovetail.program.series import ByteAddress, Loop, Number, Series, alike, series
from dovetail.program.transfers import Transfer, relative_transfers
from dovetail.records import replace

MOST_LAG = 3
"""Most turns later in which something may be waited for: each is a ticket more that is kept."""
_REPORT = "report this with the model and the target: loops made by Dovetail must say what the program does"
_MOST_PERIOD = 64
_LEAST_SAVED = 3
"""Statements a loop must save to be one: its head, its end and its first comment take lines too."""
_ROW = 110
"""Characters of a table's line."""
_MOST_FIELDS = 6
"""Numbers without a rule in a turn: with more, nobody reads the loop more easily than what it stands for."""


def numbers(program: Program, statement: Statement) -> tuple[Number, ...]:
    """The numbers of a statement that may change from turn to turn: the layer, where operands and results lie, sizes,
    strides and fill of copies, the statement that is waited for."""
    if isinstance(statement, Begin):
        return (statement.layer,)
    if isinstance(statement, Wait):
        return statement.layer, statement.statement
    places = tuple(_place_of(program, view) for view in _views(statement))
    if isinstance(statement, LaunchStatement):
        buffered = statement.buffered.values()
        return statement.layer, *places, *(number for one in buffered for number in (one.place.start, one.is_loaded))
    if not isinstance(statement, Copy):
        return statement.layer, *places
    source, target = statement.source, statement.destination
    sizes = (*source.type.shape, *source.strides, *target.type.shape, *target.strides, *statement.before)
    return statement.layer, *places, *sizes, statement.fill


def _views(statement: Copy | LaunchStatement | Call) -> tuple[View, ...]:
    if isinstance(statement, Copy):
        return statement.source, statement.destination
    return *statement.operands.values(), statement.result


def _place_of(program: Program, view: View) -> ByteAddress:
    """The first byte of a view."""
    buffer = program.buffers[view.buffer]
    if buffer.address is None:
        return ByteAddress(buffer.name, view.offset)
    return ByteAddress(buffer.memory, buffer.address + view.offset)


def print_program(program: Program) -> str:
    """The whole program as text: buffers by address, then numbered statements; of loops the first turn, and the change
    with each further one."""
    lines = [f"program {program.name}"]
    for buffer in sorted(program.buffers.values(), key=lambda b: (b.memory, b.address or -1, b.name)):
        place = "by the linker" if buffer.address is None else f"0x{buffer.address:08x}"
        bytes_in = f"{buffer.nbytes} bytes in {buffer.memory}"
        lines.append(f"  buffer {buffer.name}: {bytes_in} at {place} ({buffer.role.value})")
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
    """The change of each place in a statement from turn to turn, results last; empty where none moves."""
    places = [one for one in own if isinstance(one.first, ByteAddress)]
    rules = ("a table" if p.table else f"{p.step:+d}" if p.step else f"{p.swing:+d} in turns" for p in places)
    text = ", ".join("-" if place.is_constant else rule for place, rule in zip(places, rules, strict=True))
    return "" if all(place.is_constant for place in places) else f" [{text}]"


def check_loops(program: Program) -> None:
    """Hold every loop to the statements of the program.

    Raises:
        ProgramError: loops overlap or leave the program, or one says something else than a statement.
    """
    ends = [(loop.first, loop.stop) for loop in program.loops]
    if any(stop > after for (_, stop), (after, _) in pairwise([*ends, (len(program.statements), 0)])):
        raise ProgramError("loops lie over one another, or over the end", where=program.name, hint=_REPORT)
    for loop in program.loops:
        forms = [_form(program, one, 0) for one in program.statements[loop.first : loop.first + loop.period]]
        for index in range(loop.first, loop.stop):
            turn, number = loop.place(index)
            body, own = program.statements[loop.first + number], program.statements[index]
            actual = numbers(program, own)
            said = tuple(one.at(turn) for one in loop.numbers[number])
            if said != actual or forms[number] != _form(program, own, 0):
                odd = next((pair for pair in zip(said, actual, strict=False) if pair[0] != pair[1]), (body, own))
                what = f"turn {turn} of a loop says {odd[0]} where the program has {odd[1]}"
                raise ProgramError(what, where=f"statement {print_statement(program, index).strip()}", hint=_REPORT)


def rolled(program: Program) -> Program:
    """The program with its loops: the statements are the same."""
    known: dict[Hashable, int] = {}
    forms = [
        known.setdefault(("moved", index) if index in program.moves else _form(program, statement, index), len(known))
        for index, statement in enumerate(program.statements)
    ]
    return replace(program, loops=tuple(_LoopSearch(program, np.array(forms)).between(0, len(forms))))


def _form(program: Program, statement: Statement, index: int) -> Hashable:
    """All that must be the same for a statement to be another turn of one; what cannot be has its index in it."""
    if isinstance(statement, Begin):
        return ("begin",)
    if issuer_of(statement) or (isinstance(statement, Wait) and statement.known_to):
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
            for one in relative_transfers(statement)
        )
        return "copy", queue_of(statement, program.dma), bool(statement.before), made, where, kinds
    shapes = tuple(view.type.shape for view in views)
    return "call", _meaning(statement.graph), shapes, where, kinds


def _memory(program: Program, view: View) -> str:
    buffer = program.buffers[view.buffer]
    return "" if buffer.role is Role.CONSTANT and buffer.address is None else buffer.memory


def digest(array: Array) -> bytes:
    """A digest of an array's contents, to compare many."""
    return blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).digest()


def _meaning(graph: Graph) -> Hashable:
    """The computation of a graph, whatever its values are called."""
    order = dict.fromkeys((*graph.inputs, *(name for node in graph.nodes for name in (*node.inputs, node.output))))
    called = {name: number for number, name in enumerate(order)}
    nodes = tuple((repr(n.operator), tuple(called[name] for name in n.inputs), called[n.output]) for n in graph.nodes)
    held = tuple((called[name], digest(array)) for name, array in graph.constants.items() if name in called)
    return nodes, held, tuple(called[name] for name in graph.outputs)


class _LoopSearch:
    """The search for loops."""

    def __init__(self, program: Program, forms: Array) -> None:
        """The program, and a number for the form of each statement."""
        self.program, self.forms = program, forms
        self.begins = np.cumsum([0, *(isinstance(one, Begin) for one in program.statements)])
        """Layers that begin before each statement."""
        waits = {index: one.statement for index, one in enumerate(program.statements) if isinstance(one, Wait)}
        self.waits = waits
        """Wait -> the statement waited for."""
        self.last = {waited: index for index, waited in waits.items()}
        """Statement -> the last one that waits for it."""
        self.numbers = cache(lambda index: numbers(program, program.statements[index]))
        self.shown = cache(self._shown)
        self.turns = cache(self._turns)
        self.row = cache(self._row)
        self.loop = cache(self._loop)
        """These five are kept: stretches are looked at again and again."""

    def between(self, begin: int, end: int) -> list[Loop]:
        """The loops between two statements: the one that saves most, then those before and behind it."""
        pending, loops = [(begin, end)], list[Loop]()
        while pending:
            low, high = pending.pop()
            if (best := self._best(low, high)) is not None:
                loops.append(best)
                pending += [(low, best.first), (best.stop, high)]
        return sorted(loops, key=lambda loop: loop.first)

    def _best(self, begin: int, end: int) -> Loop | None:
        best, saved = None, _LEAST_SAVED - 1.0
        for most, *stretch in self._repeats(begin, end):
            if most <= saved:
                break
            turns = self.turns(*stretch)
            if turns is None or _gain(turns[1], stretch[1]) <= saved:
                continue
            loop, gain = self.loop(turns[0], stretch[1], turns[1])
            if loop and gain > saved:
                best, saved = loop, gain
        return best

    def _repeats(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Stretches whose forms repeat, with layers from their begin on: statements saved at most, first statement,
        period, turns; the best first."""
        stretches = []
        for period in range(1, min(_MOST_PERIOD, (end - begin) // 2) + 1):
            same = self.forms[begin : end - period] == self.forms[begin + period : end]
            edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8))).reshape(-1, 2)
            for low, high in edges[edges[:, 1] - edges[:, 0] >= period].tolist():
                for phase in range(min((high - low) % period + 1, high - low)):
                    count, first = (high - low - phase) // period + 1, begin + low + phase
                    layers = self.begins[first + period] - self.begins[first]
                    if count > 1 and (not layers or isinstance(self.program.statements[first], Begin)):
                        stretches.append(((count - 1) * period, first, period, count))
        return sorted(stretches, key=lambda one: (-one[0], one[2], one[1]))

    def _turns(self, first: int, period: int, count: int) -> tuple[int, int] | None:
        """The first statement, and the number, of the most turns of a stretch whose waits keep to a rule; None where
        there are not two."""
        indices = np.arange(first, first + count * period).reshape(count, period).tolist()
        turns = [tuple(index - self.waits.get(index, index) for index in turn) for turn in indices]
        low, high = max(_runs(turns), key=lambda run: (run[1] - run[0], -run[0]))
        while low > 0 and _may_begin(turns[low - 1 : high]):
            low -= 1
        return (first + low * period, high - low) if high - low > 1 else None

    def _loop(self, first: int, period: int, count: int) -> tuple[Loop | None, float]:
        """The loop of some turns whose waits keep to a rule, if there is one, and the lines it saves."""
        rows = [self.row(number, period, count) for number in range(first, first + period)]
        loop = Loop(first, count, tuple(own for own, _ in rows))
        if not self._is_followed(loop):
            return None, 0
        tasks = {
            own[0]
            for statement, (own, _) in zip(self.program.statements[first:], rows, strict=False)
            if isinstance(statement, LaunchStatement) and not own[0].is_constant
        }
        return loop, _saved(loop, len(tasks) + len({table for _, tables in rows for table in tables}))

    def _row(self, first: int, period: int, count: int) -> tuple[tuple[Series, ...], set[tuple[Number, ...]]]:
        """The series of a statement's numbers in some turns, and the tables among those that C shows."""
        same = range(first, first + count * period, period)
        shown = map(series, zip(*map(self.shown, same), strict=True))
        own = tuple(map(series, zip(*map(self.numbers, same), strict=True)))
        return own, {alike(one.table) for one in shown if one.table}

    def _is_followed(self, loop: Loop) -> bool:
        """Whether the tickets of the last turns are enough for what waits behind the loop, and within it."""
        if any(turns > min(MOST_LAG, loop.count - 1) for _, turns in loop.awaited.values()):
            return False
        stop = loop.stop
        early = range(loop.first, stop - (MOST_LAG + 1) * loop.period)
        return all(self.last.get(index, -1) < stop for index in early)

    def _shown(self, index: int) -> tuple[Number, ...]:
        """The numbers of a statement that C shows; of a copy those of its transfers."""
        statement, own = self.program.statements[index], self.numbers(index)
        if isinstance(statement, Copy):
            return *own[1:3], *(size for one in relative_transfers(statement) for size in _sizes(one))
        return own if isinstance(statement, Begin | Call) else ()


def _gain(count: int, period: int) -> int:
    """Lines a loop of some turns makes shorter where nothing is in tables."""
    return (count - 1) * period - 2


def _saved(loop: Loop, fields: int) -> float:
    """Lines a loop makes shorter, about: what is in tables takes lines of its own, kept tickets too. Less than none
    where the table has too many fields: numbers of a turn that have no rule, tasks of several layers among them."""
    if fields > _MOST_FIELDS:
        return -1
    kept = sum(turns > 0 for _, turns in loop.awaited.values())
    table = fields * loop.count * 12 / _ROW + 2 if fields else 0
    return _gain(loop.count, loop.period) - table - kept


def _may_begin(turns: Sequence[tuple[int, ...]]) -> bool:
    """Whether a loop may begin with some turns, of each the distances of its waits from what they wait for: where the
    distance is not that of the last turn, both lead to before the loop."""
    distances = enumerate(zip(chain(*turns), cycle(turns[-1]), strict=False))
    return all(own == usual or place < min(own, usual) for place, (own, usual) in distances)


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
