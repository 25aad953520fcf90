"""A loop of the program as a loop of C: its table, its tickets, its body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from dovetail.codegen.emit.lines import Hole, Line, rule_text, text_of
from dovetail.codegen.emit.tickets import Site, Tickets
from dovetail.codegen.emit.unit import Unit
from dovetail.kernels.c import array_definition
from dovetail.program.series import ByteAddress, Loop, Number, Series, alike, series
from dovetail.records import Record

_TURN = "i"
"""The variable of the turn."""


def is_repeat(loop: Loop, lines: Mapping[int, tuple[Line, ...]]) -> bool:
    """Whether every turn of a loop is the same C but for numbers."""
    for first in range(loop.first, loop.first + loop.period):
        forms = {tuple(line.form for line in lines.get(i, ())) for i in range(first, loop.stop, loop.period)}
        if len(forms) > 1:
            return False
    return True


class Repeat(Record, dict=True):
    """A loop, and the lines of its statements."""

    unit: Unit
    loop: Loop
    lines: Mapping[int, tuple[Line, ...]]
    table: str
    """Name of its table."""

    def numbers(self, number: int) -> list[list[Series]]:
        """For each line of a statement of a turn, the series of its holes."""
        turns = [self.lines.get(i, ()) for i in range(self.loop.first + number, self.loop.stop, self.loop.period)]
        return [
            [series(values) for values in zip(*([hole.number for hole in line.holes] for line in same), strict=True)]
            for same in zip(*turns, strict=True)
        ]

    @cached_property
    def fields(self) -> dict[tuple[Number, ...], tuple[str, tuple[Number, ...]]]:
        """Numbers that change without a rule -> their column's name in the table, and its contents."""
        found: dict[tuple[Number, ...], tuple[str, tuple[Number, ...]]] = {}
        for number in range(self.loop.period):
            for line, own in zip(self.lines.get(self.loop.first + number, ()), self.numbers(number), strict=True):
                for hole, one in zip(line.holes, own, strict=True):
                    if one.table and alike(one.table) not in found:
                        taken = sum(name.rstrip("_0123456789") == hole.name for name, _ in found.values())
                        found[alike(one.table)] = f"{hole.name}_{taken}" if taken else hole.name, one.table
        return found

    def entry(self, one: Series) -> str:
        """A number without a rule, from the table's entry of the turn."""
        name, held = self.fields[alike(one.table)]
        entry = f"{self.table}[{_TURN}]" + (f".{name}" if len(self.fields) > 1 else "")
        start, own = (table[0].offset if isinstance(table[0], ByteAddress) else table[0] for table in (held, one.table))
        bases = _bases(one.table)
        parts = [*(bases if len(bases) == 1 else ()), entry, *([str(own - start)] if own > start else ())]
        return " + ".join(parts) + (f" - {start - own}" if own < start else "")

    def table_lines(self) -> Iterator[str]:
        """The table's definition."""
        if not self.fields:
            return
        kinds = {name: _c_type(self.unit, table) for name, table in self.fields.values()}
        rows = zip(*(_entry_texts(table) for _, table in self.fields.values()), strict=True)
        values = [row[0] if len(row) == 1 else f"{{{', '.join(row)}}}" for row in rows]
        members = " ".join(f"{kind}{name};" for name, kind in kinds.items())
        kind = next(iter(kinds.values())) if len(kinds) == 1 else f"struct {{ {members} }} "
        head = f"static {kind}const " if kind.endswith("*") else f"static const {kind}"
        declaration = f"{head}{self.table}[{self.loop.count}]"
        if any(kind.endswith("*") for kind in kinds.values()):
            yield from (f"{declaration} = {{", *(f"    {value}," for value in values), "};")
        else:
            yield from array_definition(declaration, values).rstrip("\n").split("\n")


def _entry_texts(table: tuple[Number, ...]) -> list[str]:
    is_alone = len(_bases(table)) == 1
    return [str(one.offset) if isinstance(one, ByteAddress) and is_alone else text_of(one) for one in table]


def _bases(table: tuple[Number, ...]) -> set[str]:
    return {one.base for one in table if isinstance(one, ByteAddress)}


def _c_type(unit: Unit, table: tuple[Number, ...]) -> str:
    bases = _bases(table)
    if len(bases) < 2:
        return "uint32_t "
    if bases & {place.base for place in unit.tasks.values()}:
        return "const uint32_t *"
    return "uint8_t *" if bases <= {unit.arena_name(memory) for memory in unit.arenas()} else "const uint8_t *"


def loop_lines(repeat: Repeat, known: Tickets) -> Iterator[str]:
    """The loop as C, what must stand before it included."""
    loop, sites = repeat.loop, known.sites[repeat.loop.first]
    yield from repeat.table_lines()
    for site in sites.values():
        yield from _before(site, known)
    yield f"for (uint32_t {_TURN} = 0; {_TURN} < {loop.count}; ++{_TURN}) {{"
    for number in range(loop.period):
        for line in _body(repeat, number, sites, known):
            yield f"    {line}"
    yield "}"


def _before(site: Site, known: Tickets) -> Iterator[str]:
    """The variables that hold tickets from turn to turn."""
    for lag, name in enumerate(site.names):
        if lag in site.copied:
            yield f"{known.assigned(name)}{known.straight_names[site.given[lag]]};"
        elif name in site.outside and name not in known.declared:
            yield f"{known.assigned(name)}0;"


def _body(repeat: Repeat, number: int, sites: Mapping[int, Site], known: Tickets) -> Iterator[str]:
    """A statement of a turn."""
    lines, own = repeat.lines.get(repeat.loop.first + number, ()), repeat.numbers(number)
    for line, numbers in zip(lines, own, strict=True):
        left, text = list(numbers), ""
        for part in line.parts:
            if isinstance(part, str):
                text += part
            elif isinstance(part, Hole):
                one = left.pop(0)
                text += repeat.entry(one) if one.table else rule_text(one, _TURN)
            else:
                waited, turns = repeat.loop.awaited[number]
                text += sites[waited].names[turns if waited < number else turns - 1]
        site = sites.get(number)
        if line.starts and site:
            for lag in range(len(site.names) - 1, 0, -1):
                yield f"{_kind(site, lag)}{site.names[lag]} = {site.names[lag - 1]};"
            yield f"{_kind(site, 0)}{site.names[0]} = {text}"
        else:
            yield f"(void){text}" if line.starts else text


def _kind(site: Site, lag: int) -> str:
    return "" if site.names[lag] in site.outside else "const uint32_t "
