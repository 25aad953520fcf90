"""Instruction selection on loops: find the statements an instruction's meaning stands for, or say how near they came."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.loops.text import Procedure, exo


@dataclass(frozen=True)
class LoopMismatch:
    """Why an instruction is nowhere in a procedure."""

    sentence: str
    """What the meaning says, what the nearest statements say instead."""
    depth: int
    """How many levels of nesting agreed before they differed."""


def replace_first(procedure: Procedure, instruction: Procedure) -> Procedure | LoopMismatch:
    """The procedure with the first statements that the instruction's meaning stands for replaced by a call of it.

    The meaning may be several statements, nests and temporaries included; Exo unifies it with as many consecutive
    statements at every place, windows and sizes being found by it.
    """
    exo()
    from exo.rewrite.LoopIR_unification import UnificationError
    from exo.stdlib.scheduling import SchedulingError, replace

    length = len(instruction.body())
    nearest = LoopMismatch(f"{instruction.name()}: there is no statement like it", -1)
    for block in _blocks(procedure.body(), length):
        depth, difference = _agreement(instruction.body(), block)
        if difference:
            if depth > nearest.depth:
                nearest = LoopMismatch(f"{instruction.name()}: {difference}", depth)
            continue
        try:
            found = replace(procedure, block, instruction, quiet=True)
            depth, difference = depth + 1, _misplaced(found, instruction)
            if not difference:
                return found
            nearest = LoopMismatch(f"{instruction.name()}: {difference}", depth) if depth > nearest.depth else nearest
        except (UnificationError, SchedulingError, TypeError) as error:  # Exo: TypeError where a precondition is not met
            if depth >= nearest.depth:
                nearest = LoopMismatch(f"{instruction.name()}: {_reason(error)}", depth)
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


def _misplaced(procedure: Procedure, instruction: Procedure) -> str:
    """What is wrong with the memory or type of an operand of a call of the instruction; unification looks at neither."""
    homes = {argument.name(): argument for argument in procedure.args()}
    homes |= {buffer.name(): buffer for buffer in procedure.find("_: _", many=True)}
    for call in procedure.find(f"{instruction.name()}(_)", many=True):
        for wanted, given in zip(instruction.args(), call.args(), strict=True):
            home = homes.get(given.name()) if wanted.is_tensor() else None
            if home is None:
                continue
            if wanted.mem() is not home.mem():
                return f"expects {wanted.name()} in {wanted.mem().__name__}, found {home.name()} in {home.mem().__name__}"
            if wanted.type() is not home.type():
                return f"expects {wanted.name()} of {wanted.type().name}, found {home.name()} of {home.type().name}"
    return ""


def _blocks(statements: Any, length: int) -> Iterator[Any]:
    """Every run of `length` consecutive statements, outer ones first."""
    from exo.API_cursors import ForCursor, IfCursor

    listed = list(statements)
    for start in range(len(listed) - length + 1):
        yield listed[start].expand(0, length - 1) if length > 1 else listed[start].as_block()
    for statement in listed:
        if isinstance(statement, ForCursor | IfCursor):
            yield from _blocks(statement.body(), length)


def _agreement(meaning: Any, found: Any) -> tuple[int, str]:
    """How many statements agree in kind and nesting, in reading order, and what the first difference is."""
    from exo.API_cursors import ForCursor, IfCursor

    agreed = 0
    wanted, given = list(meaning), list(found)
    for position, statement in enumerate(wanted):
        if position >= len(given):
            return agreed, f"expects {_describe(statement)}, found the end of the block"
        other = given[position]
        if type(statement) is not type(other):
            return agreed, f"expects {_describe(statement)}, found {_describe(other)}"
        agreed += 1
        if isinstance(statement, ForCursor | IfCursor):
            inner, difference = _agreement(statement.body(), other.body())
            agreed += inner
            if difference:
                return agreed, difference
    if len(given) > len(wanted):
        return agreed, f"expects the end of the block, found {_describe(given[len(wanted)])}"
    same, difference = _expressions(wanted, given)
    return agreed + same, difference


def _expressions(wanted: Sequence[Any], given: Sequence[Any]) -> tuple[int, str]:
    """Compare the operators of assignments: `a * b` is no `a + b`, a call of one function none of another."""
    from exo.API_cursors import AssignCursor, ReduceCursor

    agreed = 0
    for statement, other in zip(wanted, given, strict=True):
        if isinstance(statement, AssignCursor | ReduceCursor):
            shape, found = _shape(statement.rhs()), _shape(other.rhs())
            if shape != found:
                return agreed, f"expects a right-hand side of the form {shape}, found {found} for {other.name()}"
            agreed += 1
    return agreed, ""


def _shape(expression: Any) -> str:
    from exo.API_cursors import BinaryOpCursor, ExternFunctionCursor, LiteralCursor

    if isinstance(expression, BinaryOpCursor):
        return f"({_shape(expression.lhs())} {expression.op()} {_shape(expression.rhs())})"
    if isinstance(expression, ExternFunctionCursor):
        return f"{expression.name()}({', '.join(_shape(part) for part in expression.args())})"
    if isinstance(expression, LiteralCursor):
        return str(expression.value())
    return "value"


def _describe(statement: Any) -> str:
    from exo.API_cursors import AllocCursor, AssignCursor, CallCursor, ForCursor, IfCursor, ReduceCursor

    if isinstance(statement, ForCursor):
        return f"a loop (over {statement.name()})"
    if isinstance(statement, IfCursor):
        return "a condition"
    if isinstance(statement, AllocCursor):
        return f"a buffer ({statement.name()})"
    if isinstance(statement, AssignCursor):
        return f"an assignment (to {statement.name()})"
    if isinstance(statement, ReduceCursor):
        return f"a sum (into {statement.name()})"
    return f"a call of {statement.subproc().name()}" if isinstance(statement, CallCursor) else "another statement"


def _reason(error: Exception) -> str:
    """Exo's message without source places."""
    return re.sub(r"\s*\(@?[^()]*:\d+:\d+\)|<loops [0-9a-f]+>:\d+:\d+:?\s*", "", str(error)).strip()
