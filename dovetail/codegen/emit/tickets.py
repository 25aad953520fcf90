"""The local variables that hold tickets: one for what is waited for, in loops one for each turn that is under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.codegen.emit.lines import Hole, Line, Ticket, text_of
from dovetail.codegen.emit.unit import Unit
from dovetail.program.ir import Call, Copy, Wait, stream_of
from dovetail.program.series import Loop
from dovetail.records import Record


class Site(Record):
    """A start in a loop whose ticket is kept."""

    names: tuple[str, ...]
    """The variable of the last start, then of that in the turn before, and so on."""
    given: Mapping[int, int]
    """How many turns before the first -> statement before the loop whose ticket that variable holds at first."""
    copied: frozenset[int]
    """Statements of `given` whose ticket is in another variable before."""
    after: frozenset[int]
    """How many turns before the last there are starts that something behind the loop waits for."""

    @property
    def outside(self) -> tuple[str, ...]:
        """The variables that must exist before the loop: all but the oldest where nothing needs that outside."""
        oldest = len(self.names) - 1
        return tuple(name for lag, name in enumerate(self.names) if lag < oldest or lag in self.after | {*self.given})


@dataclass
class Tickets:
    """The tickets of a function."""

    straight_names: dict[int, str] = field(default_factory=dict)
    """Statement -> variable, of those outside loops and of the last turns within."""
    sites: dict[int, dict[int, Site]] = field(default_factory=dict)
    """First statement of a loop -> number within a turn -> what is kept."""
    declared: set[str] = field(default_factory=set)

    def straight(self, index: int, lines: Sequence[Line]) -> Iterator[str]:
        """The lines of a statement outside loops as C."""
        for line in lines:
            body = "".join(self._part(part) for part in line.parts)
            yield f"{self.assigned(self.straight_names.get(index))}{body}" if line.starts else body

    def assigned(self, name: str | None) -> str:
        """Assignment before a call that gives a ticket."""
        if name is None:
            return "(void)"
        kind = "" if name in self.declared else "uint32_t "
        self.declared.add(name)
        return f"{kind}{name} = "

    def _part(self, part: str | Hole | Ticket) -> str:
        if isinstance(part, Ticket):
            return self.straight_names[part.statement]
        return text_of(part.number) if isinstance(part, Hole) else part


def tickets(unit: Unit, indices: Sequence[int], loops: Sequence[Loop]) -> Tickets:
    """The tickets of the statements of a function, in order, of which some are in loops."""
    waits: dict[int, list[int]] = {}
    for index in indices:
        one = unit.program.statements[index]
        if isinstance(one, Wait):
            waits.setdefault(unit.starts.get(one.statement, one.statement), []).append(index)
    within = {index: loop for loop in loops for index in range(loop.first, loop.stop)}
    naming = _VariableNames(unit)
    found = Tickets()
    for loop in loops:
        found.sites[loop.first] = dict(_sites(unit, loop, waits, naming, found.straight_names))
    for index in sorted(waits):
        if index not in within and index not in found.straight_names:
            found.straight_names[index] = naming.name(index)
    return found


def _sites(
    unit: Unit, loop: Loop, waits: Mapping[int, Sequence[int]], naming: _VariableNames, names: dict[int, str]
) -> Iterator[tuple[int, Site]]:
    """Tickets kept of a loop; `names` gains the variables of statements before it and of its last turns."""
    lags: dict[int, int] = {}
    given: dict[int, dict[int, int]] = {}
    for number, (site, turns) in loop.awaited.items():
        lags[site] = max(lags.get(site, 0), turns if site < number else turns - 1)
        for turn in range(turns):
            wait = unit.program.statements[loop.first + turn * loop.period + number]
            assert isinstance(wait, Wait)
            given.setdefault(site, {})[turns - 1 - turn] = unit.starts.get(wait.statement, wait.statement)
    behind = {}
    for index in (index for index in range(loop.first, loop.stop) if max(waits.get(index, (0,))) >= loop.stop):
        turn, site = loop.place(index)
        behind[index] = (site, loop.count - 1 - turn)
        lags[site] = max(lags.get(site, 0), loop.count - 1 - turn)
    for site, most in sorted(lags.items()):
        base = naming.name(loop.first + site)
        own = tuple(base + ("_before" if lag else "") + (f"_{lag}" if lag > 1 else "") for lag in range(most + 1))
        copied = set()
        for lag, index in given.get(site, {}).items():
            if index in names or max(waits[index]) >= loop.stop:
                copied.add(lag)
            else:
                names[index] = own[lag]
        after = [index for index, (same, _) in behind.items() if same == site]
        names.update((index, own[behind[index][1]]) for index in after)
        yield site, Site(own, given.get(site, {}), frozenset(copied), frozenset(behind[index][1] for index in after))


@dataclass
class _VariableNames:
    """Gives out names of variables."""

    unit: Unit
    counts: dict[str, int] = field(default_factory=dict)

    def name(self, index: int) -> str:
        """A new variable for the ticket of a statement."""
        statement = self.unit.program.statements[index]
        verb = "copied" if isinstance(statement, Copy) else "started" if isinstance(statement, Call) else "launched"
        verb = "listed" if stream_of(statement) else verb
        stem = f"{self.unit.program.layers[statement.layer]}_{verb}"
        self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}_{self.counts[stem]}"
