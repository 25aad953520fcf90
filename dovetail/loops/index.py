"""Values of index expressions, and whether an instruction's own conditions hold for its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.loops.printing import expression_text


def index_value(expression: Any, values: Mapping[str, int]) -> int | None:
    """Value of an index expression at a cursor; None when it needs a name that has no value here."""
    from exo.API_cursors import BinaryOpCursor, LiteralCursor, ReadCursor, UnaryMinusCursor

    if isinstance(expression, LiteralCursor):
        return int(expression.value())
    if isinstance(expression, ReadCursor):
        return values.get(expression.name())
    if isinstance(expression, UnaryMinusCursor):
        inner = index_value(expression.arg(), values)
        return None if inner is None else -inner
    if isinstance(expression, BinaryOpCursor):
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
    given: dict[str, int] = {}
    for argument, operand in zip(instruction.args(), call.args(), strict=True):
        value = None if argument.is_tensor() else index_value(operand, values)
        if value is not None:
            given[argument.name()] = value
    for condition in _conditions(instruction):
        if index_value(condition, given) == 0:
            text = expression_text(condition)
            used = [f"{name} = {value}" for name, value in given.items() if name in text.replace("(", " ").split()]
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
