"""Loops of a program as data: numbers that change from turn to turn by a rule, and stretches that repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

from dovetail.records import Record


class ByteAddress(Record):
    """A byte in a memory, or in a constant that the linker places."""

    base: str
    """Name of the memory or constant."""
    offset: int
    """Address, or bytes from the start of the constant."""


Number: TypeAlias = int | ByteAddress


class Series(Record):
    """A number in every turn of a loop."""

    first: Number
    step: int = 0
    """Added with every turn."""
    swing: int = 0
    """Added in every second turn."""
    table: tuple[Number, ...] = ()
    """All of them, where they follow no rule; else empty."""

    def at(self, turn: int) -> Number:
        """The number in a turn, from 0."""
        if self.table:
            return self.table[turn]
        by = self.step * turn + self.swing * (turn % 2)
        return _moved(self.first, by) if by else self.first

    @property
    def is_constant(self) -> bool:
        """True where no turn differs."""
        return not (self.step or self.swing or self.table)


def series(values: Sequence[Number]) -> Series:
    """The shortest rule for some numbers, which are of one kind."""
    first = values[0]
    if values.count(first) == len(values):
        return Series(first)
    ahead = [_distance(first, value) for value in values]
    step = ahead[min(1, len(ahead) - 1)]
    if step is not None and ahead == [step * turn for turn in range(len(ahead))]:
        return Series(first, step)
    if step is not None and ahead == [step * (turn % 2) for turn in range(len(ahead))]:
        return Series(first, swing=step)
    return Series(first, table=tuple(values))


def alike(table: Sequence[Number]) -> tuple[Number, ...]:
    """Numbers as they are behind the first: tables of which these are equal can be one, with something added."""
    start = table[0].offset if isinstance(table[0], ByteAddress) else table[0]
    return tuple(_moved(number, -start) for number in table)


def _distance(one: Number, other: Number) -> int | None:
    if isinstance(one, ByteAddress) and isinstance(other, ByteAddress):
        return other.offset - one.offset if one.base == other.base else None
    return other - one if isinstance(one, int) and isinstance(other, int) else None


def _moved(number: Number, by: int) -> Number:
    return ByteAddress(number.base, number.offset + by) if isinstance(number, ByteAddress) else number + by


class Loop(Record, dict=True):
    """Statements that are carried out several times: `count` turns of those from `first` on, as many as `numbers`."""

    first: int
    """Index of the first statement of the first turn."""
    count: int
    numbers: tuple[tuple[Series, ...], ...]
    """For each statement of a turn what `numbers` gives of it."""

    @property
    def period(self) -> int:
        """Statements of a turn."""
        return len(self.numbers)

    @property
    def stop(self) -> int:
        """One past the last statement of the last turn."""
        return self.first + self.count * self.period

    def place(self, index: int) -> tuple[int, int]:
        """The turn, and the number within it, of a statement of the program."""
        return divmod(index - self.first, self.period)

    @cached_property
    def awaited(self) -> Mapping[int, tuple[int, int]]:
        """Number of a wait within a turn -> number of the statement it waits for, and how many turns before. In the
        first turns, those it waits for came before the loop."""
        waits = {}
        for number, own in enumerate(self.numbers):
            index = own[-1].at(self.count - 1)
            if len(own) == 2 and isinstance(index, int):  # a wait: layer and statement
                turn, waited = self.place(index)
                waits[number] = (waited, self.count - 1 - turn)
        return waits
