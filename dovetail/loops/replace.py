"""Instruction selection on loops: find the statements an instruction's meaning stands for, or how near they come."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from dovetail.errors import TargetError
from dovetail.loops.index import unmet
from dovetail.loops.mismatch import LoopMismatch, agreement, home_difference, index_difference
from dovetail.loops.printing import statement_text
from dovetail.loops.text import Procedure, exo


def replace_first(procedure: Procedure, instruction: Procedure) -> Procedure | LoopMismatch:
    """The procedure with the first statements that the instruction's meaning stands for replaced by a call of it.

    The meaning may be several statements, nests and temporaries included; Exo unifies it with as many consecutive
    statements at every place, windows and sizes being found by it.
    """
    exo()
    nearest = LoopMismatch(f"{instruction.name()}: there is no statement like it", -1)
    for block in _blocks(procedure.body(), len(instruction.body())):
        found = _replaced(procedure, block, instruction)
        if not isinstance(found, LoopMismatch):
            return found
        if found.depth > nearest.depth:
            nearest = found
    return nearest


def replace_all(procedure: Procedure, instructions: Sequence[Procedure]) -> tuple[Procedure, tuple[LoopMismatch, ...]]:
    """Replace each instruction, in the order given, wherever it is found; the mismatches are of those found nowhere."""
    missing: list[LoopMismatch] = []
    for instruction in instructions:
        found = replace_first(procedure, instruction)
        if isinstance(found, LoopMismatch):
            missing.append(found)
        while not isinstance(found, LoopMismatch):
            procedure = found
            found = replace_first(procedure, instruction)
    return procedure, tuple(missing)


def covered(procedure: Procedure, instructions: Sequence[Procedure]) -> Procedure:
    """`replace_all`, after which every statement must be an instruction.

    Raises:
        TargetError: a statement is left over; says which, and why the nearest instruction is not it.
    """
    from exo.API_cursors import AssignCursor, ReduceCursor

    found, _ = replace_all(procedure, instructions)
    for statement in _statements(found.body()):
        if isinstance(statement, AssignCursor | ReduceCursor):
            raise uncovered(found, statement, instructions)
    return found


def uncovered(procedure: Procedure, statement: Any, instructions: Sequence[Procedure] = ()) -> TargetError:
    """The error for a statement, at a cursor, that is no instruction; names the nearest of the instructions."""
    around = [statement]
    while around[0].parent():
        around.insert(0, around[0].parent())
    loops = ", ".join(loop.name() for loop in around if hasattr(loop, "hi"))
    nearest = LoopMismatch("", -1)
    for start in around:
        for instruction in instructions:
            found = _replaced(procedure, _run(start, len(instruction.body())), instruction)
            if isinstance(found, LoopMismatch) and found.depth > nearest.depth:
                nearest = found
    why = f"; the nearest is {nearest.sentence}" if nearest.sentence else ""
    where = f"the schedule of {procedure.name()}" + (f", inside the loops over {loops}" if loops else "")
    return TargetError(f"no instruction covers the statement '{statement_text(statement)}'{why}", where=where,
                       hint="change the schedule until the statement has an instruction's form, or add the instruction")


def _run(start: Any, length: int) -> list[Any]:
    """At most so many consecutive statements."""
    found = [start]
    while len(found) < length and found[-1].next():
        found.append(found[-1].next())
    return found


def _replaced(procedure: Procedure, block: Sequence[Any], instruction: Procedure) -> Procedure | LoopMismatch:
    """One place tried."""
    from exo.rewrite.LoopIR_unification import UnificationError
    from exo.stdlib.scheduling import SchedulingError, replace

    made = agreement(list(instruction.body()), block)
    difference = made.difference or index_difference(made.pairs)
    if not difference:
        whole = block[0].expand(0, len(block) - 1) if len(block) > 1 else block[0].as_block()
        try:
            found = replace(procedure, whole, instruction, quiet=True)
            difference = _misplaced(found, instruction) or _escaping(block)
            if not difference:
                return found
        except (UnificationError, SchedulingError, TypeError, NotImplementedError) as error:
            difference = _reason(error)  # TypeError: two operands overlap; NotImplementedError: a scalar for an array
        made.depth += 1
    return LoopMismatch(f"{instruction.name()}: {difference}", made.depth)


def _misplaced(procedure: Procedure, instruction: Procedure) -> str:
    """What is wrong with an operand of the instruction's calls: memory, type, conditions; unification looks at none."""
    from exo.API_cursors import AllocCursor

    homes = {argument.name(): argument for argument in procedure.args()}
    homes |= {found.name(): found for found in _statements(procedure.body()) if isinstance(found, AllocCursor)}
    for call in procedure.find(f"{instruction.name()}(_)", many=True):
        for wanted, given in zip(instruction.args(), call.args(), strict=True):
            home = homes.get(given.name()) if wanted.is_tensor() else None
            difference = home_difference(wanted, home) if home is not None else ""
            if difference:
                return difference
        if broken := unmet(call, {}):
            return broken
    return ""


def _statements(statements: Any) -> Iterator[Any]:
    """All statements, inner ones included, in reading order."""
    from exo.API_cursors import ForCursor, IfCursor

    for statement in statements:
        yield statement
        if isinstance(statement, ForCursor | IfCursor):
            yield from _statements(statement.body())
            if isinstance(statement, IfCursor):
                yield from _statements(statement.orelse() or ())


def _escaping(block: Sequence[Any]) -> str:
    """What is wrong with the temporaries of statements that a call replaces: one that is needed after them."""
    from exo.API_cursors import AllocCursor

    rest: list[Any] = []
    after = block[-1].next()
    while after:
        rest.append(after)
        after = after.next()
    used = {name for statement in rest for name in _names(statement)}
    for statement in block:
        if isinstance(statement, AllocCursor) and statement.name() in used:
            return f"keeps {statement.name()} to itself, which the statements after it need"
    return ""


def _names(statement: Any) -> Iterator[str]:
    """Names of the buffers a statement touches."""
    from exo.core.LoopIR import FreeVars

    yield from (symbol.name() for symbol in FreeVars([statement._impl._node]).result())


def _blocks(statements: Any, length: int) -> Iterator[list[Any]]:
    """Every run of `length` consecutive statements, or of what is left of a block, outer ones first."""
    from exo.API_cursors import ForCursor, IfCursor

    listed = list(statements)
    for start in range(len(listed)):
        yield listed[start : start + length]
    for statement in listed:
        if isinstance(statement, ForCursor | IfCursor):
            yield from _blocks(statement.body(), length)
        if isinstance(statement, IfCursor) and statement.orelse():
            yield from _blocks(statement.orelse(), length)


def _reason(error: Exception) -> str:
    """Exo's message without source places."""
    if "<<<unknown directive>>>" in str(error):
        return "one array would be two of its operands"
    if "buffer access with constant" in str(error):
        return "an element of an array cannot be its scalar operand"
    if "various index expressions" in str(error):
        return "no windows, sizes and numbers make its indices, limits and conditions those found"
    return re.sub(r"\s*\(@?[^()]*:\d+:\d+\)|<loops [0-9a-f]+>:\d+:\d+:?\s*", "", str(error)).strip()
