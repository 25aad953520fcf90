"""The emitted network: a function for each layer, or for layers that hand something under way to one another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from dovetail.codegen.emit.lines import Hole, Line, Ticket, job_name, kernel_call, moves, statement_lines, text_of
from dovetail.codegen.emit.repeat import Repeat, is_repeat, loop_lines
from dovetail.codegen.emit.tickets import tickets
from dovetail.codegen.emit.unit import Unit, state_bytes
from dovetail.kernels import Optimize
from dovetail.kernels.c import Lines, block, code, function, identifier, one_line
from dovetail.program.ir import Begin, Call, LaunchStatement, Statement, StateVariable, Wait
from dovetail.program.series import Loop
from dovetail.records import Record
from dovetail.schedule.region import Region

_TOGETHER = 256
"""Functions of layers that the compiler may put together into one: with more, its time grows with their square."""


def model_source(unit: Unit) -> str:
    """The network: functions of layers, and the function that runs them."""
    runtime = [("dma", unit.target.dma), ("copy", unit.core_copies), ("cores", unit.target.workers)]
    headers = [*(f"{name}.h" for name, wanted in runtime if wanted), *unit.driver_headers()]
    arenas = Lines()
    for memory, size in unit.arenas().items():
        if (name := unit.arena_name(memory)) != unit.shared_arena and unit.base is None:
            section = f', section(".{identifier(memory)}")' if unit.is_fixed(memory) else ""
            arenas.append(f"uint8_t {name}[{size}] __attribute__((aligned(16){section}));")
    functions = list(_functions(unit))
    used = {one.engine for one in unit.program.statements if isinstance(one, LaunchStatement)}
    reset = (unit.base or unit).model
    first = [f"if ({unit.has_states} == 0u) {{\n        {reset}_reset();\n    }}"] if unit.program.states else []
    lines = code(
        f"""
        #include "{unit.model}.h"

        #include "dovetail_rt.h"
        @headers
        #include "{unit.model}_constants.h"
        #include "{unit.model}_kernels.h"

        @arenas

        @functions
        @reset
        void {unit.model}_run(void)
        {{
            @first
            @prepared
            @layers
            @moves
            DOVETAIL_MARK_END();
        }}
        """,
        headers=[f'#include "{header}"' for header in headers],
        arenas=arenas,
        functions=[line for _, text in functions for line in text],
        reset=_of_base(unit, unit.base) if unit.base else _state_functions(unit) if unit.program.states else [],
        first=first,
        prepared=[f"{one.prepare}();" for one in unit.target.engines if one.prepare and one.name in used],
        layers=[f"{name}();" for name, _ in functions],
        moves=moves(unit, len(unit.program.statements)),
    )
    return "\n".join([*lines, ""])


def _of_base(unit: Unit, base: Unit) -> Lines:
    """Declarations that a network of several steps shares with that of one, and the function that runs either."""
    either = [
        f"if ({unit.model}_next != 0u) {{",
        f"    {unit.model}_run();",
        "} else {",
        f"    {base.model}_run();",
        "}",
    ]
    flags = [f"extern uint8_t {unit.has_states};", f"uint32_t {unit.model}_next;", ""]
    return [*flags, *function(f"void {unit.model}_or_step", ["void"], either), ""]


def _state_functions(unit: Unit) -> Lines:
    """The functions that give every state its first contents, bytes that are repeated or what a constant holds, that
    copy the states away, and back."""
    storage = "" if unit.room else "static "
    states, copied, at = Lines(), {"save": Lines(), "restore": Lines()}, 0
    for index, kept in enumerate(unit.program.states):
        size, place = kept.first.nbytes, unit.first_byte(kept.view)
        states += _first_contents(unit, kept, place, f"{unit.model}_state_{index}_first")
        for name, ends in (("save", f"to + {at}, {{0}}"), ("restore", f"{{0}}, from + {at}")):
            copied[name].append(f"__builtin_memcpy({ends.format(place)}, {size}u);")
        at += size
    lines = code(
        f"""
        @shared
        {storage}uint8_t {unit.has_states}; /* 0 until what is kept between inferences has been set */

        void {unit.model}_reset(void)
        {{
            @states
            {unit.has_states} = 1u;
        }}

        void {unit.model}_save(uint8_t *to)
        {{
            if ({unit.has_states} == 0u) {{
                {unit.model}_reset();
            }}
            @save
        }}

        void {unit.model}_restore(const uint8_t *from)
        {{
            @restore
            {unit.has_states} = 1u;
        }}
        """,
        shared=[f"extern uint8_t {unit.has_states};"] if unit.room else [],
        states=states,
        **copied,
    )
    return [*lines, ""]


def _first_contents(unit: Unit, state: StateVariable, place: str, first: str) -> Lines:
    """Give a state its first contents: one byte repeated, 16 repeated, or all of a constant."""
    size, content = state.first.nbytes, state_bytes(state.first)
    if content.size == 1:
        return block(f"for (uint32_t i = 0; i < {size}u; ++i)", [f"({place})[i] = {content[0]}u;"])
    if content.size == size:
        return [f"__builtin_memcpy({place}, {first}, {size}u);"]
    to = f"{place} + i"
    if unit.place(state.view).offset % 4 == 0:
        to = f"__builtin_assume_aligned({to}, 4)"
    step = f"for (uint32_t i = 0; i < {size}u; i += {content.size}u)"
    from_ = f"__builtin_assume_aligned({first}, 4)"
    return block(step, [f"__builtin_memcpy({to}, {from_}, {content.size}u);"])


class _StatementGroup(Record):
    """Statements of one layer that follow one another."""

    begin: int
    """Index of the `Begin`."""
    layer: int
    members: Sequence[int]
    """Indices of what core 0 does."""


class _FunctionWriter(Record, dict=True):
    """Everything the functions are written from."""

    unit: Unit
    lines: Mapping[int, tuple[Line, ...]]
    """Statement index -> its lines; of a `Begin` before statements, its mark."""
    loops: Sequence[Loop]
    """Statements that are written as loops, in order."""

    @cached_property
    def firsts(self) -> Sequence[int]:
        """The first statement of each loop."""
        return [loop.first for loop in self.loops]

    @cached_property
    def tables(self) -> Mapping[int, str]:
        """First statement of a loop -> name of its table."""
        program, found = self.unit.program, dict[str, list[int]]()
        for loop in self.loops:
            found.setdefault(program.layers[program.statements[loop.first].layer], []).append(loop.first)
        return {
            first: f"{layer}_turns" + (f"_{number}" if number else "")
            for layer, loops in found.items()
            for number, first in enumerate(loops)
        }


def _functions(unit: Unit) -> Iterator[tuple[str, Lines]]:
    """The static functions of the layers that do something, in order, by name."""
    inside = {index for one in unit.lists for index in one.statements[1:]}  # the engine goes on by itself
    statements = unit.program.statements
    stretches = [one for one in _stretches(statements, inside) if one.members]
    issued = [index for one in stretches for index in (one.begin, *one.members)]
    lines = {index: statement_lines(unit, index, statements[index]) for index in issued}
    text = _FunctionWriter(unit, lines, [loop for loop in unit.program.loops if is_repeat(loop, lines)])
    groups = list(_groups(text, stretches))
    is_apart = len(groups) > _TOGETHER and unit.optimize is Optimize.SPEED  # which takes more bytes
    kind = "static __attribute__((noinline)) void" if is_apart else "static void"
    for group in groups:
        layers = list(dict.fromkeys(one.layer for one in group))
        name = "_to_".join(dict.fromkeys(unit.regions[layer].name for layer in (min(layers), max(layers))))
        yield name, [*_jobs(unit, group), *_function(text, f"{kind} {name}(void)", group), ""]


def _stretches(statements: Sequence[Statement], inside: set[int]) -> list[_StatementGroup]:
    found: list[_StatementGroup] = []
    members: list[int] = []
    for index, statement in enumerate(statements):
        if isinstance(statement, Begin):
            members = []
            found.append(_StatementGroup(index, statement.layer, members))
        elif index not in inside:
            members.append(index)
    return found


def _groups(text: _FunctionWriter, stretches: Sequence[_StatementGroup]) -> Iterator[list[_StatementGroup]]:
    """The stretches in groups: those between the first and the last of a layer belong together, between a start and
    the wait for it, and those of a loop."""
    at = {index: place for place, one in enumerate(stretches) for index in (one.begin, *one.members)}
    last = {one.layer: place for place, one in enumerate(stretches)}
    ends = [last[one.layer] for one in stretches]
    first = text.unit.starts
    for index, statement in enumerate(text.unit.program.statements):
        if isinstance(statement, Wait) and not statement.stream:
            start = at[first.get(statement.statement, statement.statement)]
            ends[start] = max(ends[start], at[index])
    for loop in text.loops:
        own = [at[index] for index in range(loop.first, loop.stop) if index in at]
        ends[own[0]] = max(ends[own[0]], own[-1])
    group: list[_StatementGroup] = []
    end = 0
    for place, stretch in enumerate(stretches):
        group.append(stretch)
        end = max(end, ends[place])
        if place == end:
            yield group
            group, end = [], place + 1


def _jobs(unit: Unit, group: Sequence[_StatementGroup]) -> Iterator[str]:
    """The functions that other cores are started with."""
    for index in (index for one in group for index in one.members):
        call = unit.program.statements[index]
        if isinstance(call, Call) and call.core:
            body = "".join(one if isinstance(one, str) else _plain(one) for one in kernel_call(unit, index, call))
            yield from (f"static void {job_name(unit, call)}(void)", "{", f"    {body}", "}", "")


def _plain(part: Hole | Ticket) -> str:
    assert isinstance(part, Hole)
    return text_of(part.number)


def _function(text: _FunctionWriter, head: str, group: Sequence[_StatementGroup]) -> Iterator[str]:
    """A function, each of its layers under a comment."""
    unit, layers = text.unit, list(dict.fromkeys(one.layer for one in group))
    alone = len(layers) == 1
    if alone:
        yield _comment(unit, group, layers)
    for one in (unit.started[index] for stretch in group for index in stretch.members if index in unit.started):
        own = dict.fromkeys(unit.program.layers[unit.program.statements[index].layer] for index in one.statements)
        yield f"/* {one.name} is a list of commands for {', '.join(own)} */"
    yield from (head, "{")
    indices = [index for one in group for index in (one.begin, *one.members)]
    low, high = bisect_left(text.firsts, group[0].begin), bisect_right(text.firsts, indices[-1])
    loops = {loop.first: loop for loop in text.loops[low:high]}
    known = tickets(unit, indices, list(loops.values()))
    place, described = 0, set(layers) if alone else set[int]()
    within = {index: loop for loop in loops.values() for index in range(loop.first, loop.stop)}
    while place < len(indices):
        index = indices[place]
        loop = within.get(index)
        new = _new(unit, group, [index] if loop is None else range(loop.first, loop.stop), described)
        if new and place:
            yield ""
        yield from (f"    {_comment(unit, group, [layer, *same])}" for layer, same in new)
        if loop is None:
            yield from (f"    {line}" for line in known.straight(index, text.lines[index]))
            place += 1
            continue
        yield from (
            f"    {line}" for line in loop_lines(Repeat(unit, loop, text.lines, text.tables[loop.first]), known)
        )
        while place < len(indices) and indices[place] < loop.stop:
            place += 1
    yield "}"


def _new(
    unit: Unit, group: Sequence[_StatementGroup], indices: Sequence[int], described: set[int]
) -> list[tuple[int, list[int]]]:
    """The layers that begin here and have not been described: one for all that are computed at the same place, of the
    same operator; `described` gains them."""
    begun = {one.begin: one.layer for one in group}
    found: dict[tuple[str, str], list[int]] = {}
    for layer in dict.fromkeys(begun[index] for index in indices if index in begun):
        if layer not in described:
            region = unit.regions[layer]
            found.setdefault((region.place, region.name.rpartition("_")[0]), []).append(layer)
            described.add(layer)
    return [(same[0], same[1:]) for same in found.values()]


def _comment(unit: Unit, group: Sequence[_StatementGroup], layers: Sequence[int]) -> str:
    """Which layers, and who computes them."""
    region = unit.regions[layers[0]]
    where = _where(unit, region, [index for one in group if one.layer == layers[0] for index in one.members])
    origin = one_line(", ".join(dict.fromkeys(o for layer in layers for o in unit.regions[layer].origins)))[:160]
    names = [unit.regions[layer].name for layer in layers]
    side = unit.beside
    where += f" beside {', '.join(side[names[0]])}" if len(names) == 1 and names[0] in side else ""
    named = ", ".join(names if len(names) < 4 else [*names[:2], "…", names[-1]]).replace("…", "...")
    return f"/* {named} on {where}: {origin or 'made by the compiler'} */"


def _where(unit: Unit, region: Region, members: Sequence[int]) -> str:
    """The engine or core that computes a layer, in words."""
    if region.place != "core":
        return region.place
    cores = sorted({call.core for index in members if isinstance(call := unit.program.statements[index], Call)})
    return "the core" if not unit.target.workers else f"core {' and '.join(map(str, cores))}"
