"""Schedules that come with the package, run without Exo: those of common layers, made by `scripts/ship_loops.py`.

A schedule is kept as Exo prints it. Its control flow is that of Python's own syntax, so that what it issues for given
sizes is read off the syntax tree. `dovetail.loops.trace` says the same of it: `tests/test_vta_listed.py` compares.
"""

from __future__ import annotations

import ast
import hashlib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from dovetail.loops import Allocation, Event, Issue, Release, Window
from dovetail.targets.vta.mapping import MEANINGS

SHIPPED = Path(__file__).with_name("schedules.zip")
"""Text of each schedule, by the digest of what it is made for."""


class ListingError(Exception):
    """A text that is no schedule whose every statement is an instruction, or whose conditions do not hold."""


def digest_of(text: str, batch: int, block: int, stride: tuple[int, int]) -> str:
    """The name of a schedule in the archive: of an algorithm's text, for lanes and the strides of a window."""
    return hashlib.sha256("\n".join((text, str((batch, block, stride)))).encode()).hexdigest()[:32]


def listed(
    text: str, batch: int, block: int, stride: tuple[int, int], sizes: Mapping[str, int]
) -> tuple[Event, ...] | None:
    """Events of an algorithm's schedule for these sizes; None if it does not come with the package, or if
    Exo has to say what is wrong."""
    found = _shipped().get(digest_of(text, batch, block, stride))
    if found is None:
        return None
    try:
        return tuple(_ListingWalker(dict(sizes)).block(_function(found).body))
    except (ListingError, SyntaxError):
        return None


@cache
def _shipped() -> Mapping[str, str]:
    if not SHIPPED.is_file():
        return {}
    with zipfile.ZipFile(SHIPPED) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@cache
def _function(text: str) -> ast.FunctionDef:
    made = ast.parse(text.strip()).body[0]
    if not isinstance(made, ast.FunctionDef):
        raise ListingError(text)
    return made


@cache
def _instruction(name: str) -> ast.FunctionDef:
    if name not in MEANINGS:
        raise ListingError(name)
    return _function(MEANINGS[name])


@cache
def computation(name: str) -> tuple[tuple[str, ...], Mapping[str, ast.expr], tuple[tuple[ast.expr, ...], ...]]:
    """The nest of an instruction that computes, lanes left out: operands, the sum first; variables and extents of the
    loops, the outermost first; and the indices of each operand."""
    loops, statement = dict[str, ast.expr](), _instruction(name).body[-1]
    while isinstance(statement, ast.For):
        assert isinstance(statement.target, ast.Name) and isinstance(statement.iter, ast.Call)
        loops[statement.target.id] = statement.iter.args[1]
        statement = statement.body[-1]
    places = {
        ast.unparse(place.value): tuple(place.slice.elts[:-2])
        for place in ast.walk(statement)
        if isinstance(place, ast.Subscript) and isinstance(place.slice, ast.Tuple)
    }
    inside = {loop: extent for loop, extent in loops.items() if loop not in _LANES}
    return tuple(places), inside, tuple(places.values())


_LANES = ("n", "o", "i")
"""Loops over the lanes of an element."""


class _ListingWalker:
    """As that of `dovetail.loops.trace`: values of sizes and loop variables, and the buffers alive."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values
        self.buffers: dict[str, int] = {}
        self.count = 0

    def block(self, statements: Sequence[ast.stmt]) -> Iterator[Event]:
        """The events of some statements, in order; buffers made in them are released behind them."""
        made: list[str] = []
        for statement in statements:
            match statement:
                case ast.Assert():
                    if not number(statement.test, self.values):
                        raise ListingError(ast.unparse(statement))
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    made.append(name)
                    yield self._allocate(name, annotation)
                case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=operands)):
                    yield self._issue(name, operands)
                case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="seq"), args=[low, high])):
                    for value in range(number(low, self.values), number(high, self.values)):
                        self.values[name] = value
                        yield from self.block(statement.body)
                case ast.If():
                    yield from self.block(statement.body if number(statement.test, self.values) else statement.orelse)
                case _:
                    raise ListingError(ast.unparse(statement))
        for name in made:
            yield Release(self.buffers.pop(name))

    def _allocate(self, name: str, annotation: ast.expr) -> Allocation:
        """The allocation of an annotation such as `i32[4, 4] @ACC`."""
        match annotation:
            case ast.BinOp(left=ast.Subscript(slice=extents), op=ast.MatMult(), right=ast.Name(id=memory)):
                parts = extents.elts if isinstance(extents, ast.Tuple) else [extents]
                self.buffers[name] = self.count
                self.count += 1
                shape = tuple(number(part, self.values) for part in parts)
                return Allocation(self.buffers[name], name, memory, shape)
        raise ListingError(ast.unparse(annotation))

    def _issue(self, name: str, operands: Sequence[ast.expr]) -> Issue:
        meaning = _instruction(name)
        names = [one.arg for one in meaning.args.args]
        given = dict(zip(names, (self._operand(one) for one in operands), strict=True))
        numbers = {name: value for name, value in given.items() if isinstance(value, int)}
        if not all(number(one.test, numbers) for one in meaning.body if isinstance(one, ast.Assert)):
            raise ListingError(name)
        return Issue(name, given)

    def _operand(self, operand: ast.expr) -> Window | int | str:
        if isinstance(operand, ast.Subscript) and isinstance(operand.value, ast.Name):
            parts = operand.slice.elts if isinstance(operand.slice, ast.Tuple) else [operand.slice]
            name = operand.value.id
            return Window(name, self.buffers.get(name), tuple(self._interval(part) for part in parts))
        if isinstance(operand, ast.Name) and operand.id not in self.values:
            return operand.id
        return number(operand, self.values)

    def _interval(self, part: ast.expr) -> tuple[int, int]:
        if isinstance(part, ast.Slice) and part.lower is not None and part.upper is not None:
            return number(part.lower, self.values), number(part.upper, self.values)
        at = number(part, self.values)
        return at, at + 1


_OPERATIONS: Mapping[type[ast.operator] | type[ast.cmpop], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Lt: lambda a, b: int(a < b),
    ast.LtE: lambda a, b: int(a <= b),
    ast.Gt: lambda a, b: int(a > b),
    ast.GtE: lambda a, b: int(a >= b),
    ast.Eq: lambda a, b: int(a == b),
}
"""Exo's, of which all numbers are whole."""


def number(expression: ast.expr, values: Mapping[str, int]) -> int:
    """The value of an index expression; raises Unread where it is none."""
    match expression:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -number(inner, values)
        case ast.BoolOp(op=operator, values=parts):
            found = [bool(number(part, values)) for part in parts]
            return int(all(found) if isinstance(operator, ast.And) else any(found))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](number(left, values), number(right, values))
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _OPERATIONS:
            return _OPERATIONS[type(comparison)](number(left, values), number(right, values))
    raise ListingError(ast.unparse(expression))
