"""Kernels that compute each element of the result by itself, or each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.ir.types import Shape, dense_steps
from dovetail.kernels.c import Lines, identifiers, loop, nested, product, total, variable, without_unused, wrapped
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, Index, KernelWriter
from dovetail.kernels.scope import KernelScope

Places = Sequence[str]
"""C texts of a place along each axis."""
Computed = tuple[Lines, Expression]
"""The statements before an element, and its value."""
PIXEL = ("image", "row", "column", "channel")
"""Loop variables of an NHWC result."""


def place_in(shape: Shape, places: Places) -> str:
    """C text of the flat index of an operand that broadcasts to axes with these places."""
    lead = len(places) - len(shape)
    terms = zip(shape, dense_steps(shape), places[lead:], strict=True)
    return total(*(product(wrapped(place), stride) for size, stride, place in terms if size > 1))


def write_elements(
    scope: KernelScope,
    element: Callable[[Places], Computed],
    names: Places = (),
    row: Callable[[Places], Lines] | None = None,
) -> KernelWriter:
    """The writer of a kernel with a loop for every axis of the result.

    Args:
        scope: of the region, whose anchor computes the element; its tree follows.
        element: from its place, the statements and the value of one element.
        names: loop variables; axis_0, axis_1, ... unless given.
        row: from a row's place along the outer axes, statements before the last axis' loop.
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
