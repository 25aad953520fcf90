"""Instruction selection on loops: the statements an instruction's meaning stands for, or how near they come to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import TargetError
from dovetail.loops.procedures import Procedure, exo, expression_text, is_a, statement_text, statements
from dovetail.records import Record


def index_value(expression: Any, values: Mapping[str, int]) -> int | None:
    """Value of an index expression at a cursor; None when it needs a name that has no value here."""
    if is_a(expression, "Literal"):
        return int(expression.value())
    if is_a(expression, "Read"):
        return values.get(expression.name())
    if is_a(expression, "UnaryMinus"):
        inner = index_value(expression.arg(), values)
        return None if inner is None else -inner
    if is_a(expression, "BinaryOp"):
        left, right = index_value(expression.lhs(), values), index_value(expression.rhs(), values)
        return None if left is None or right is None else _OPERATIONS[expression.op()](left, right)
    return None


def unmet(call: Any, values: Mapping[str, int]) -> str:
    """The first condition of an instruction (an `assert` of its meaning) that a call of it breaks; empty for none.

    Exo checks no conditions when it replaces statements by a call. What is not known yet is taken to hold.

    Args:
        call: cursor of the call.
        values: of the names its operands use, as far as they are known.
    """
    instruction = call.subproc()
    numbers: dict[str, int] = {}
    for argument, operand in zip(instruction.args(), call.args(), strict=True):
        value = None if argument.is_tensor() else index_value(operand, values)
        if value is not None:
            numbers[argument.name()] = value
    for condition in _conditions(instruction):
        if index_value(condition, numbers) == 0:
            text = expression_text(condition)
            used = [f"{name} = {value}" for name, value in numbers.items() if name in text.replace("(", " ").split()]
            return f"needs {text}, found {', '.join(used)}"
    return ""


def _conditions(instruction: Any) -> list[Any]:
    """Cursors of a procedure's asserts, for which Exo has no public way."""
    from exo.API_cursors import lift_cursor

    count = len(instruction.INTERNAL_proc().preds)
    root = instruction._root()
    return [lift_cursor(root._child_node("preds", place), instruction) for place in range(count)]


_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "and": lambda a, b: int(bool(a and b)),
    "or": lambda a, b: int(bool(a or b)),
}


Pair = tuple[Any, Any]
"""A statement of a meaning and the one that stands in its place, as cursors."""


class LoopMismatch(Record):
    """Why an instruction is nowhere in a procedure."""

    sentence: str
    """The meaning, and the nearest statements that differ from it."""
    depth: int
    """How near it came: two for each statement that agreed, one for one that nearly did."""


@dataclass
class Agreement:
    """How far a meaning and some statements agree."""

    depth: int = 0
    """Two for each statement that agrees, in reading order, and one for one that differs only inside an expression."""
    difference: str = ""
    """The first difference; empty for none."""
    pairs: list[Pair] = field(default_factory=list)
    """Statements that stand for each other."""


def agreement(meaning: Sequence[Any], found: Sequence[Any]) -> Agreement:
    """Compare statements in kind, nesting, memories, constant sizes and operators; their indices are not looked at."""
    made = Agreement()
    _compare(made, list(meaning), list(found))
    return made


def _compare(made: Agreement, wanted: Sequence[Any], given: Sequence[Any]) -> None:
    for position, statement in enumerate(wanted):
        if position >= len(given):
            made.difference = f"expects {describe(statement)}, found the end of the block"
            return
        other = given[position]
        made.difference = _difference(statement, other)
        if made.difference:
            made.depth += _same_kind(statement, other)
            return
        made.depth += 2
        made.pairs.append((statement, other))
        if is_a(statement, "For", "If"):
            _compare(made, list(statement.body()), list(other.body()))
        if is_a(statement, "If") and not made.difference:
            _compare(made, *(list(part.orelse() or ()) for part in (statement, other)))
        if made.difference:
            return
    if len(given) > len(wanted):
        made.difference = f"expects the end of the block, found {describe(given[len(wanted)])}"


def _difference(wanted: Any, given: Any) -> str:
    """The difference of two statements, their bodies and indices aside; empty for none."""
    if type(wanted) is not type(given):
        return f"expects {describe(wanted)}, found {describe(given)}"
    if is_a(wanted, "For"):
        ends = (wanted.hi(), given.hi())
        if all(is_a(end, "Literal") for end in ends) and ends[0].value() != ends[1].value():
            return f"expects {describe(wanted)}, found {describe(given)}"
    elif is_a(wanted, "Alloc"):
        return home_difference(wanted, given)
    elif is_a(wanted, "Assign", "Reduce", "If"):
        parts = [part.cond() if is_a(part, "If") else part.rhs() for part in (wanted, given)]
        shapes = [_shape(part) for part in parts]
        if shapes[0] != shapes[1]:
            return f"expects {describe(wanted)}, found {describe(given)}: {shapes[0]} is not {shapes[1]}"
    return ""


def _same_kind(wanted: Any, given: Any) -> bool:
    assigns = type(wanted) is type(given) and is_a(wanted, "Assign", "Reduce")
    return assigns and type(wanted.rhs()) is type(given.rhs())


def home_difference(wanted: Any, given: Any) -> str:
    """The difference of two buffers or arguments: memory, type of element; empty for none."""
    if wanted.mem() is not given.mem():
        return f"expects {wanted.name()} in {wanted.mem().__name__}, found {given.name()} in {given.mem().__name__}"
    if wanted.type() is not given.type():
        return f"expects {wanted.name()} of {wanted.type().name}, found {given.name()} of {given.type().name}"
    return ""


def _shape(expression: Any) -> str:
    """An expression with a word for everything unification is free to choose."""
    if is_a(expression, "UnaryMinus"):
        return f"-{_shape(expression.arg())}"
    if is_a(expression, "BinaryOp"):
        if expression.op() in ("<", "<=", ">", ">=", "=="):
            return "a comparison"  # Exo matches a < b with b > a
        return f"({_shape(expression.lhs())} {expression.op()} {_shape(expression.rhs())})"
    if is_a(expression, "ExternFunction"):
        return f"{expression.name()}({', '.join(_shape(part) for part in expression.args())})"
    return str(expression.value()) if is_a(expression, "Literal") else "value"


def index_difference(pairs: Sequence[Pair]) -> str:
    """The first access whose indices move otherwise than the meaning's as the loops go round; empty for none.

    Only what loops inside the statements contribute is compared: the rest is where windows begin.
    """
    wanted_loops: dict[str, int] = {}
    given_loops: dict[str, int] = {}
    for number, (wanted, given) in enumerate(pairs):
        if is_a(wanted, "For"):
            wanted_loops[wanted.name()] = given_loops[given.name()] = number
        elif is_a(wanted, "Assign", "Reduce"):
            for one, other in zip(_accesses(wanted), _accesses(given), strict=True):
                if _moves(one, wanted_loops) != _moves(other, given_loops):
                    return f"expects the indices of {_access_text(one)}, found {_access_text(other)}"
    return ""


def _accesses(statement: Any) -> Iterator[Any]:
    yield statement
    yield from _reads(statement.rhs())


def _reads(expression: Any) -> Iterator[Any]:
    if is_a(expression, "Read"):
        yield expression
    elif is_a(expression, "UnaryMinus"):
        yield from _reads(expression.arg())
    elif is_a(expression, "BinaryOp"):
        yield from _reads(expression.lhs())
        yield from _reads(expression.rhs())
    elif is_a(expression, "ExternFunction"):
        for part in expression.args():
            yield from _reads(part)


def _access_text(access: Any) -> str:
    return f"{access.name()}[{', '.join(expression_text(index) for index in access.idx())}]"


def _moves(access: Any, loops: Mapping[str, int]) -> list[dict[int, int]]:
    """Per index that depends on loops, how far it goes per iteration of each."""
    moves = [_steps(index, loops) for index in access.idx()]
    return [steps for steps in moves if steps]


def _steps(index: Any, loops: Mapping[str, int]) -> dict[int, int]:
    if is_a(index, "Read"):
        return {loops[index.name()]: 1} if index.name() in loops else {}
    if is_a(index, "UnaryMinus"):
        return _scaled(_steps(index.arg(), loops), -1)
    if not is_a(index, "BinaryOp"):
        return {}
    left, right = _steps(index.lhs(), loops), _steps(index.rhs(), loops)
    if index.op() == "*":
        return _scaled(left, _literal(index.rhs())) if left else _scaled(right, _literal(index.lhs()))
    if index.op() in "+-":
        right = _scaled(right, 1 if index.op() == "+" else -1)
        total = {loop: left.get(loop, 0) + right.get(loop, 0) for loop in sorted({*left, *right})}
        return {loop: step for loop, step in total.items() if step}
    return left


def _scaled(steps: Mapping[int, int], factor: int) -> dict[int, int]:
    return {loop: step * factor for loop, step in steps.items()}


def _literal(expression: Any) -> int:
    return int(expression.value()) if is_a(expression, "Literal") else 1


def describe(statement: Any) -> str:
    """A statement for a message."""
    if is_a(statement, "For"):
        return f"a loop over {statement.name()} to {expression_text(statement.hi())}"
    if is_a(statement, "Alloc"):
        return f"a buffer ({statement.name()})"
    if is_a(statement, "Call"):
        return f"a call of {statement.subproc().name()}"
    kinds = {"AssignCursor": "the assignment", "ReduceCursor": "the sum", "IfCursor": "the condition"}
    return f"{kinds.get(type(statement).__name__, 'the statement')} '{statement_text(statement).removesuffix(':')}'"


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
    found, _ = replace_all(procedure, instructions)
    for statement in statements(found.body()):
        if is_a(statement, "Assign", "Reduce"):
            raise uncovered(found, statement, instructions)
    return found


def uncovered(procedure: Procedure, statement: Any, instructions: Sequence[Procedure] = ()) -> TargetError:
    """The error for a statement, at a cursor, that is no instruction; names the nearest of the instructions."""
    around = [statement]
    while around[0].parent():
        around.insert(0, around[0].parent())
    loops = ", ".join(loop.name() for loop in around if hasattr(loop, "hi"))
    nearest, near = LoopMismatch("", -1), (-1, -1)
    for instruction in instructions:
        likeness = _likeness(procedure, statement, instruction)
        for start in around:
            found = _replaced(procedure, _run(start, len(instruction.body())), instruction)
            if isinstance(found, LoopMismatch) and (likeness, found.depth) > near:
                nearest, near = found, (likeness, found.depth)
    why = f"; the nearest is {nearest.sentence}" if nearest.sentence else ""
    where = f"the schedule of {procedure.name()}" + (f", inside the loops over {loops}" if loops else "")
    what = f"no instruction covers the statement '{statement_text(statement)}'{why}"
    hint = "change the schedule until the statement has an instruction's form, or add the instruction"
    return TargetError(what, where=where, hint=hint)


def _likeness(procedure: Procedure, statement: Any, instruction: Procedure) -> int:
    """How much of what a statement computes is in an instruction's meaning: a sum, or an assignment, as it is one, of
    operands in the same memories. Operators are left to the comparison of the loops."""
    wanted, given = _memories(procedure), _memories(instruction)
    alike = [
        1 + (_homes_of(one, given) == _homes_of(statement, wanted))
        for one in statements(instruction.body())
        if type(one) is type(statement)
    ]
    return max(alike, default=0)


def _memories(procedure: Procedure) -> dict[str, str]:
    """Memory of each array, by its name."""
    arrays = [argument for argument in procedure.args() if argument.is_tensor()]
    arrays += [one for one in statements(procedure.body()) if is_a(one, "Alloc")]
    return {array.name(): array.mem().__name__ for array in arrays}


def _homes_of(statement: Any, memories: Mapping[str, str]) -> list[str]:
    """Memories of the arrays that a statement reads and writes, the written one first."""
    target, *reads = (memories.get(access.name(), "") for access in _accesses(statement))
    return [target, *sorted(reads)]


def _run(start: Any, length: int) -> list[Any]:
    """At most so many consecutive statements."""
    run = [start]
    while len(run) < length and run[-1].next():
        run.append(run[-1].next())
    return run


def _replaced(procedure: Procedure, block: Sequence[Any], instruction: Procedure) -> Procedure | LoopMismatch:
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
    """The first operand with a wrong memory, type or condition, which unification does not check; empty for none."""
    homes = {argument.name(): argument for argument in procedure.args()}
    homes |= {found.name(): found for found in statements(procedure.body()) if is_a(found, "Alloc")}
    for call in procedure.find(f"{instruction.name()}(_)", many=True):
        for wanted, given in zip(instruction.args(), call.args(), strict=True):
            home = homes.get(given.name()) if wanted.is_tensor() else None
            difference = home_difference(wanted, home) if home is not None else ""
            if difference:
                return difference
        if broken := unmet(call, {}):
            return broken
    return ""


def _escaping(block: Sequence[Any]) -> str:
    """The temporary of replaced statements that is needed after them, as a sentence; empty for none."""
    rest: list[Any] = []
    after = block[-1].next()
    while after:
        rest.append(after)
        after = after.next()
    used = {name for statement in rest for name in _names(statement)}
    for statement in block:
        if is_a(statement, "Alloc") and statement.name() in used:
            return f"keeps {statement.name()} to itself, which the statements after it need"
    return ""


def _names(statement: Any) -> Iterator[str]:
    from exo.core.LoopIR import FreeVars

    yield from (symbol.name() for symbol in FreeVars([statement._impl._node]).result())


def _blocks(statements: Any, length: int) -> Iterator[list[Any]]:
    """Every run of `length` consecutive statements, or of what is left of a block, outer ones first."""
    listed = list(statements)
    for start in range(len(listed)):
        yield listed[start : start + length]
    for statement in listed:
        if is_a(statement, "For", "If"):
            yield from _blocks(statement.body(), length)
        if is_a(statement, "If") and statement.orelse():
            yield from _blocks(statement.orelse(), length)


def _reason(error: Exception) -> str:
    if "<<<unknown directive>>>" in str(error):
        return "one array would be two of its operands"
    if "buffer access with constant" in str(error):
        return "an element of an array cannot be its scalar operand"
    if "various index expressions" in str(error):
        return "no windows, sizes and numbers make its indices, limits and conditions those found"
    return re.sub(r"\s*\(@?[^()]*:\d+:\d+\)|<loops [0-9a-f]+>:\d+:\d+:?\s*", "", str(error)).strip()
