"""Runs the control flow of a scheduled procedure with given sizes: what is left is the instructions it issues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from dovetail.errors import TargetError
from dovetail.ir.types import Box
from dovetail.loops.matching import index_value, uncovered, unmet
from dovetail.loops.procedures import Procedure, expression_text, is_a
from dovetail.records import Record


class Allocation(Record):
    """A buffer that exists from here to the matching `Release`."""

    buffer: int
    """Number, unique in the trace."""
    name: str
    """The buffer's name in the schedule."""
    memory: str
    """The name of its memory."""
    shape: tuple[int, ...]
    """Elements along each dimension."""


class Release(Record):
    """The end of a buffer's life."""

    buffer: int
    """The number of the buffer."""


class Window(Record):
    """A box of an argument or a buffer."""

    array: str
    """Name of an argument of the procedure, or of the buffer as the schedule calls it."""
    buffer: int | None
    """Which buffer; None for an argument."""
    box: Box
    """Half-open interval per dimension of the array."""


class Issue(Record):
    """One instruction with its operands: windows, whole numbers, or the names of scalar arguments."""

    instruction: str
    """The name of the instruction."""
    operands: Mapping[str, Window | int | str]
    """Values of the operands by their names."""


Event: TypeAlias = Allocation | Release | Issue


def trace(scheduled: Procedure, sizes: Mapping[str, int], instructions: Sequence[Procedure] = ()) -> tuple[Event, ...]:
    """The events of a procedure with these sizes; each of its statements is an instruction.

    Args:
        scheduled: the procedure.
        sizes: of its size and index arguments.
        instructions: those the schedule could use, for the message when it has not covered a statement.

    Raises:
        TargetError: a statement that is no instruction is left over; names the nearest of the instructions given.
            Or an instruction's own conditions do not hold for its operands.
    """
    return tuple(_TraceWalker(scheduled, instructions, dict(sizes)).block(scheduled.body()))


class _TraceWalker:
    """Values of the size arguments and loop variables, and the buffers alive."""

    def __init__(self, scheduled: Procedure, instructions: Sequence[Procedure], values: dict[str, int]) -> None:
        self.scheduled = scheduled
        self.instructions = instructions
        self.values = values
        self.buffers: dict[str, int] = {}
        self.count = 0

    def block(self, statements: Any) -> Iterator[Event]:
        """The events of a list of statements, in order; buffers made in it are released behind it."""
        allocated: list[str] = []
        for statement in statements:
            if is_a(statement, "Alloc"):
                allocated.append(statement.name())
                yield self._allocate(statement)
            elif is_a(statement, "Call"):
                yield self._issue(statement)
            elif is_a(statement, "For"):
                for value in range(self.number(statement.lo()), self.number(statement.hi())):
                    self.values[statement.name()] = value
                    yield from self.block(statement.body())
            elif is_a(statement, "If"):
                yield from self.block(statement.body() if self.number(statement.cond()) else statement.orelse() or ())
            else:
                raise uncovered(self.scheduled, statement, self.instructions)
        for name in allocated:
            yield Release(self.buffers.pop(name))

    def _allocate(self, statement: Any) -> Allocation:
        shape = tuple(self.number(extent) for extent in statement.shape()) if statement.is_tensor() else ()
        self.buffers[statement.name()] = self.count
        self.count += 1
        return Allocation(self.count - 1, statement.name(), statement.mem().__name__, shape)

    def _issue(self, call: Any) -> Issue:
        instruction = call.subproc()
        broken = unmet(call, self.values)
        if broken:
            what = f"{instruction.name()} {broken}"
            hint = "change the schedule or the tile so that the instruction's condition holds"
            raise TargetError(what, where=f"the schedule of {self.scheduled.name()}", hint=hint)
        names = [argument.name() for argument in instruction.args()]
        return Issue(instruction.name(), dict(zip(names, map(self._operand, call.args()), strict=True)))

    def _operand(self, expression: Any) -> Window | int | str:
        if is_a(expression, "WindowExpr"):
            name = expression.name()
            box = tuple(self._interval(part) for part in expression.idx())
            return Window(name, self.buffers.get(name), box)
        if is_a(expression, "Read") and expression.name() not in self.values and not len(expression.idx()):
            return str(expression.name())
        return self.number(expression)

    def _interval(self, part: Any) -> tuple[int, int]:
        if isinstance(part, tuple | list):
            low, high = part
            return self.number(low), self.number(high)
        at = self.number(part)
        return at, at + 1

    def number(self, expression: Any) -> int:
        value = index_value(expression, self.values)
        if value is None:
            what = f"'{expression_text(expression)}' is no index"
            hint = "schedule with sizes of the tile only: an index is made of numbers and loop variables"
            raise TargetError(what, where=f"the schedule of {self.scheduled.name()}", hint=hint)
        return value
