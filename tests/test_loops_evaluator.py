"""Executes Exo procedures with numpy, as an independent judge of loops; with tests of the judge itself.

A procedure is translated, through Exo's cursors, to Python over integers: no wrapping, so a number that does not fit
its array raises. Buffers begin with rubbish. Calls run the callee's meaning on views, whose bounds are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from exo.API_cursors import (
    AllocCursor,
    AssignCursor,
    BinaryOpCursor,
    CallCursor,
    ExternFunctionCursor,
    ForCursor,
    IfCursor,
    LiteralCursor,
    ReadCursor,
    ReduceCursor,
    UnaryMinusCursor,
    WindowExprCursor,
)

from dovetail.ir.types import Array
from dovetail.loops import Procedure, memory, procedure

Run = Callable[..., None]

TYPES = {"I8": "np.int8", "I32": "np.int32"}
RUBBISH = 77


def evaluate_procedure(made: Procedure, arguments: Mapping[str, Any]) -> None:
    """Run a procedure on numbers and arrays given by argument name; arrays are changed in place."""
    names = [argument.name() for argument in made.args()]
    assert set(names) <= set(arguments), sorted(set(names) - set(arguments))
    compiled(made)(*(arguments[name] for name in names))


def compiled(made: Procedure) -> Run:
    """A procedure as a Python function of the same arguments."""
    scope: dict[str, Any] = {"np": np, "view": view, "least": min, "most": max, "shift_right": lambda x, n: x >> n}
    arguments = list(made.args())
    lines = [f"def run({', '.join(argument.name() for argument in arguments)}):"]
    for argument in arguments:
        if argument.is_tensor():
            shape = ", ".join(expression(extent) for extent in argument.shape())
            lines.append(f"    assert {argument.name()}.shape == ({shape},), ({argument.name()}.shape, ({shape},))")
    for statement in made.body():
        lines += ["    " + line for line in statement_lines(statement, scope)]
    exec("\n".join(lines), scope)
    run: Run = scope["run"]
    return run


def view(array: Array, *parts: Any) -> Array:
    """A window: (low, high) or one index per dimension, all inside the array."""
    for part, size in zip(parts, array.shape, strict=True):
        low, high = part if isinstance(part, tuple) else (part, part + 1)
        assert 0 <= low <= high <= size, f"the window {parts} leaves {array.shape}"
    return array[tuple(slice(*part) if isinstance(part, tuple) else part for part in parts)]


def statement_lines(statement: Any, scope: dict[str, Any]) -> list[str]:
    """A statement as lines of Python."""
    if isinstance(statement, AssignCursor | ReduceCursor):
        operator = "=" if isinstance(statement, AssignCursor) else "+="
        return [f"{place(statement)} {operator} {expression(statement.rhs())}"]
    if isinstance(statement, AllocCursor):
        shape = ", ".join(expression(extent) for extent in statement.shape()) + "," if statement.is_tensor() else ""
        return [f"{statement.name()} = np.full(({shape}), {RUBBISH}, {TYPES[statement.type().name]})"]
    if isinstance(statement, ForCursor):
        head = f"for {statement.name()} in range({expression(statement.lo())}, {expression(statement.hi())}):"
        return [head, *block_lines(statement.body(), scope)]
    if isinstance(statement, IfCursor):
        otherwise = ["else:", *block_lines(statement.orelse(), scope)] if statement.orelse() else []
        return [f"if {expression(statement.cond())}:", *block_lines(statement.body(), scope), *otherwise]
    assert isinstance(statement, CallCursor), type(statement)
    name = f"call_{statement.subproc().name()}"
    if name not in scope:
        scope[name] = compiled(statement.subproc())
    return [f"{name}({', '.join(operand(argument) for argument in statement.args())})"]


def block_lines(block: Any, scope: dict[str, Any]) -> list[str]:
    """Statements one level further in."""
    return ["    " + line for statement in block for line in statement_lines(statement, scope)]


def place(access: Any) -> str:
    """An element of an array."""
    return f"{access.name()}[{', '.join(map(expression, access.idx())) or '()'}]"


def operand(argument: Any) -> str:
    """An argument of a call: a window, a whole array or scalar by name, or a number."""
    if isinstance(argument, WindowExprCursor):
        parts = [
            f"({', '.join(map(expression, p))})" if isinstance(p, tuple | list) else expression(p)
            for p in argument.idx()
        ]
        return f"view({', '.join([argument.name(), *parts])})"
    if isinstance(argument, ReadCursor) and not len(argument.idx()):
        return str(argument.name())
    return expression(argument)


def expression(found: Any) -> str:
    """An expression as Python over integers."""
    if isinstance(found, LiteralCursor):
        assert found.value() == int(found.value())
        return str(int(found.value()))
    if isinstance(found, ReadCursor):
        return f"int({place(found)})" if len(found.idx()) else f"int({found.name()})"
    if isinstance(found, UnaryMinusCursor):
        return f"(-{expression(found.arg())})"
    if isinstance(found, ExternFunctionCursor):
        return f"{found.name()}({', '.join(map(expression, found.args()))})"
    assert isinstance(found, BinaryOpCursor), type(found)
    operator = "//" if found.op() == "/" else found.op()
    return f"({expression(found.lhs())} {operator} {expression(found.rhs())})"


SQUARES = """
def squares(N: size, x: [i8][N, 4] @ DRAM, y: [i32][N] @ DRAM):
    for i in seq(0, N):
        y[i] = 0.0
        for j in seq(0, 4):
            square: i32 @ DRAM
            if j < 3:
                square = x[i, j] * x[i, j]
            else:
                square = most(x[i, j], -2.0)
            y[i] += shift_right(square, 1.0)
"""


def test_the_evaluator_computes_what_is_written() -> None:
    x = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    y = np.full(3, RUBBISH, np.int32)
    evaluate_procedure(procedure(SQUARES, {}), {"N": 3, "x": x, "y": y})
    wide = x.astype(int)
    assert y.tolist() == [sum(v * v >> 1 for v in row[:3]) + (max(row[3], -2) >> 1) for row in wide.tolist()]


def test_the_evaluator_follows_calls_and_refuses_wrong_windows() -> None:
    head = "def row(N: size, x: [i8][N] @ DRAM, y: [i8][N] @ DRAM):"
    row = procedure(f"{head}\n    for i in seq(0, N):\n        y[i] = x[i]", {}, "row")
    text = """
def all_rows(N: size, x: [i8][N, 4] @ DRAM, y: [i8][N, 4] @ DRAM):
    for i in seq(0, N):
        row(3, x[i, 1:4], y[i, 0:3])
"""
    x = np.arange(8, dtype=np.int8).reshape(2, 4)
    y = np.zeros((2, 4), np.int8)
    made = procedure(text, {"row": row, "ELSEWHERE": memory("ELSEWHERE")})
    evaluate_procedure(made, {"N": 2, "x": x, "y": y})
    assert y.tolist() == [[1, 2, 3, 0], [5, 6, 7, 0]]
    with pytest.raises(AssertionError, match="leaves"):
        view(x, 0, (1, 5))
    with pytest.raises(AssertionError):
        evaluate_procedure(row, {"N": 3, "x": x[0], "y": y[0]})


def test_the_evaluator_refuses_numbers_that_do_not_fit() -> None:
    text = "def twice(x: i8 @ DRAM, y: [i8][1] @ DRAM):\n    for i in seq(0, 1):\n        y[i] = x + x"
    run = partial(evaluate_procedure, procedure(text, {}))
    y = np.zeros(1, np.int8)
    run({"x": 63, "y": y})
    assert y[0] == 126
    with pytest.raises(OverflowError):
        run({"x": 64, "y": y})
