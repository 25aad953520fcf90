"""How near statements come to an instruction's meaning: the first difference in structure, operators and indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.loops.printing import expression_text, statement_text

Pair = tuple[Any, Any]
"""A statement of a meaning and the one that stands in its place, as cursors."""


@dataclass(frozen=True)
class LoopMismatch:
    """Why an instruction is nowhere in a procedure."""

    sentence: str
    """What the meaning says, what the nearest statements say instead."""
    depth: int
    """How near it came: two for each statement that agreed, one for one that nearly did."""


@dataclass
class Agreement:
    """What a meaning and some statements have in common."""

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
    from exo.API_cursors import ForCursor, IfCursor

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
        if isinstance(statement, ForCursor | IfCursor):
            _compare(made, list(statement.body()), list(other.body()))
        if isinstance(statement, IfCursor) and not made.difference:
            _compare(made, *(list(part.orelse() or ()) for part in (statement, other)))
        if made.difference:
            return
    if len(given) > len(wanted):
        made.difference = f"expects the end of the block, found {describe(given[len(wanted)])}"


def _difference(wanted: Any, given: Any) -> str:
    """What two statements differ in, their bodies and indices aside."""
    from exo.API_cursors import AllocCursor, AssignCursor, ForCursor, IfCursor, LiteralCursor, ReduceCursor

    if type(wanted) is not type(given):
        return f"expects {describe(wanted)}, found {describe(given)}"
    if isinstance(wanted, ForCursor):
        ends = (wanted.hi(), given.hi())
        if all(isinstance(end, LiteralCursor) for end in ends) and ends[0].value() != ends[1].value():
            return f"expects {describe(wanted)}, found {describe(given)}"
    elif isinstance(wanted, AllocCursor):
        return home_difference(wanted, given)
    elif isinstance(wanted, AssignCursor | ReduceCursor | IfCursor):
        parts = [part.cond() if isinstance(part, IfCursor) else part.rhs() for part in (wanted, given)]
        shapes = [_shape(part) for part in parts]
        if shapes[0] != shapes[1]:
            return f"expects {describe(wanted)}, found {describe(given)}: {shapes[0]} is not {shapes[1]}"
    return ""


def _same_kind(wanted: Any, given: Any) -> bool:
    """Whether two assignments compute with the same kind of operation."""
    from exo.API_cursors import AssignCursor, ReduceCursor

    assigns = type(wanted) is type(given) and isinstance(wanted, AssignCursor | ReduceCursor)
    return assigns and type(wanted.rhs()) is type(given.rhs())


def home_difference(wanted: Any, given: Any) -> str:
    """What two buffers or arguments differ in: memory, type of element."""
    if wanted.mem() is not given.mem():
        return f"expects {wanted.name()} in {wanted.mem().__name__}, found {given.name()} in {given.mem().__name__}"
    if wanted.type() is not given.type():
        return f"expects {wanted.name()} of {wanted.type().name}, found {given.name()} of {given.type().name}"
    return ""


def _shape(expression: Any) -> str:
    """An expression with a word for everything unification is free to choose."""
    from exo.API_cursors import BinaryOpCursor, ExternFunctionCursor, LiteralCursor, UnaryMinusCursor

    if isinstance(expression, UnaryMinusCursor):
        return f"-{_shape(expression.arg())}"
    if isinstance(expression, BinaryOpCursor):
        if expression.op() in ("<", "<=", ">", ">=", "=="):
            return "a comparison"  # Exo matches a < b with b > a
        return f"({_shape(expression.lhs())} {expression.op()} {_shape(expression.rhs())})"
    if isinstance(expression, ExternFunctionCursor):
        return f"{expression.name()}({', '.join(_shape(part) for part in expression.args())})"
    return str(expression.value()) if isinstance(expression, LiteralCursor) else "value"


def index_difference(pairs: Sequence[Pair]) -> str:
    """The first access whose indices move otherwise than the meaning's as the loops go round; empty for none.

    Only what loops inside the statements contribute is compared: the rest is where windows begin.
    """
    from exo.API_cursors import AssignCursor, ForCursor, ReduceCursor

    wanted_loops: dict[str, int] = {}
    given_loops: dict[str, int] = {}
    for number, (wanted, given) in enumerate(pairs):
        if isinstance(wanted, ForCursor):
            wanted_loops[wanted.name()] = given_loops[given.name()] = number
        elif isinstance(wanted, AssignCursor | ReduceCursor):
            for one, other in zip(_accesses(wanted), _accesses(given), strict=True):
                if _moves(one, wanted_loops) != _moves(other, given_loops):
                    return f"expects the indices of {_access_text(one)}, found {_access_text(other)}"
    return ""


def _accesses(statement: Any) -> Iterator[Any]:
    """The element written, then those read."""
    yield statement
    yield from _reads(statement.rhs())


def _reads(expression: Any) -> Iterator[Any]:
    from exo.API_cursors import BinaryOpCursor, ExternFunctionCursor, ReadCursor, UnaryMinusCursor

    if isinstance(expression, ReadCursor):
        yield expression
    elif isinstance(expression, UnaryMinusCursor):
        yield from _reads(expression.arg())
    elif isinstance(expression, BinaryOpCursor):
        yield from _reads(expression.lhs())
        yield from _reads(expression.rhs())
    elif isinstance(expression, ExternFunctionCursor):
        for part in expression.args():
            yield from _reads(part)


def _access_text(access: Any) -> str:
    return f"{access.name()}[{', '.join(expression_text(index) for index in access.idx())}]"


def _moves(access: Any, loops: Mapping[str, int]) -> list[dict[int, int]]:
    """Per index that depends on loops, how far it goes per iteration of each."""
    moves = [_steps(index, loops) for index in access.idx()]
    return [steps for steps in moves if steps]


def _steps(index: Any, loops: Mapping[str, int]) -> dict[int, int]:
    from exo.API_cursors import BinaryOpCursor, ReadCursor, UnaryMinusCursor

    if isinstance(index, ReadCursor):
        return {loops[index.name()]: 1} if index.name() in loops else {}
    if isinstance(index, UnaryMinusCursor):
        return _scaled(_steps(index.arg(), loops), -1)
    if not isinstance(index, BinaryOpCursor):
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
    from exo.API_cursors import LiteralCursor

    return int(expression.value()) if isinstance(expression, LiteralCursor) else 1


def describe(statement: Any) -> str:
    """A statement for a message."""
    from exo.API_cursors import AllocCursor, AssignCursor, CallCursor, ForCursor, IfCursor, ReduceCursor

    if isinstance(statement, ForCursor):
        return f"a loop over {statement.name()} to {expression_text(statement.hi())}"
    if isinstance(statement, AllocCursor):
        return f"a buffer ({statement.name()})"
    if isinstance(statement, CallCursor):
        return f"a call of {statement.subproc().name()}"
    kinds = {AssignCursor: "the assignment", ReduceCursor: "the sum", IfCursor: "the condition"}
    return f"{kinds.get(type(statement), 'the statement')} '{statement_text(statement).removesuffix(':')}'"
