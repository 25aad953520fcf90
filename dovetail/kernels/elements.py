"""Kernels that compute each element of the result by itself, or each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.ir.types import Shape, dense_steps
from dovetail.kernels.c import Lines, identifiers, loop, nested, product, total, variable, without_unused, wrapped
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, Index, KernelWriter
from dovetail.kernels.scope import KernelScope

Element = Callable[[Sequence[str]], tuple[Lines, Expression]]
"""From the C texts of an element's place along each axis: the statements before it, and its value."""
Row = Callable[[Sequence[str]], Lines]
"""From the C texts of a row's place along the outer axes: the statements before its first element."""


PIXEL = ("image", "row", "column", "channel")
"""Loop variables of an NHWC result."""


def place_in(shape: Shape, places: Sequence[str]) -> str:
    """C text of the flat index of an operand that broadcasts to axes with these places."""
    lead = len(places) - len(shape)
    terms = zip(shape, dense_steps(shape), places[lead:], strict=True)
    return total(*(product(wrapped(place), stride) for size, stride, place in terms if size > 1))


def write_elements(
    scope: KernelScope, element: Element, names: Sequence[str] = (), row: Row | None = None
) -> KernelWriter:
    """The writer of a kernel with a loop for every axis of the result.

    Args:
        scope: of the region, whose anchor computes the element; its tree follows.
        element: the statements and the value of one element.
        names: loop variables; axis_0, axis_1, ... unless given.
        row: statements before the last axis' loop.
    """
    shape = scope.output_shape
    names = names or tuple(f"axis_{axis}" for axis in range(len(shape)))
    places = tuple(variable(name, size) for name, size in zip(names, shape, strict=True))
    index: Index = lambda operand: place_in(operand, places)  # noqa: E731

    def one() -> Lines:
        lines, value = element(places)
        return [*lines, *finish(scope, index, value)]

    def body() -> Lines:
        lines, pairs = one(), list(zip(names, shape, strict=True))
        if row is not None:
            lines = [*row(places[:-1]), *loop(*pairs.pop(), lines)]
        lines = without_unused(nested(pairs, lines))
        scope.keep(identifiers(lines))
        return lines

    return scope.writer(body, one)
