"""Kernels that compute each element of the result by itself, or each row: plain loops around a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.graph.types import Shape
from dovetail.kernels.epilogue import Expression, Index, Scope, finish
from dovetail.kernels.kernel import Unsupported, declarations
from dovetail.kernels.nest import row_major
from dovetail.kernels.region import Region
from dovetail.kernels.text import function, loop, product, total, without_unused, words
from dovetail.kernels.window import variable, wrapped

Writer = Callable[[str], list[str]]
Element = Callable[[Sequence[str]], tuple[list[str], Expression]]
"""From the C texts of an element's place along each axis: the statements before it, and its value."""
Row = Callable[[Sequence[str]], list[str]]
"""From the C texts of a row's place along the outer axes: the statements before its first element."""


def place_in(shape: Shape, places: Sequence[str]) -> str:
    """C text of the flat index of an operand that broadcasts to axes with these places."""
    lead = len(places) - len(shape)
    terms = zip(shape, row_major(shape), places[lead:], strict=True)
    return total(*(product(wrapped(place), stride) for size, stride, place in terms if size > 1))


def operand(region: Region, scope: Scope, position: int, name: str) -> str:
    """The C identifier of an operand of the anchor, computed or constant."""
    anchor = region.anchor
    assert anchor is not None
    value = anchor.inputs[position]
    if value in region.graph.constants:
        return scope.constant(anchor.output, name, region.graph.constants[value])
    return scope.input(value, name)


def without_pad(region: Region) -> None:
    """Raise Unsupported for a Pad before the anchor."""
    assert region.anchor is not None
    if region.pad is not None:
        raise Unsupported(f"a Pad before {type(region.anchor.operator).__name__} is not fused.")


def write_elements(
    region: Region,
    scope: Scope,
    element: Element,
    names: Sequence[str] = (),
    row: Row | None = None,
) -> Writer:
    """The writer of a kernel with a loop for every axis of the result.

    Args:
        region: its anchor computes the element, its tree follows.
        scope: the parameters.
        element: the statements and the value of one element.
        names: loop variables; axis_0, axis_1, ... unless given.
        row: statements before the last axis' loop.
    """
    anchor, shape = region.anchor, region.output_shape
    assert anchor is not None
    names = names or tuple(f"axis_{axis}" for axis in range(len(shape)))
    places = tuple(variable(name, size) for name, size in zip(names, shape, strict=True))
    index: Index = lambda operand: place_in(operand, places)  # noqa: E731

    def write(name: str) -> list[str]:
        """The kernel."""
        lines, value = element(places)
        lines = [*lines, *finish(scope, region.tree, index, (anchor.output, value))]
        for axis in reversed(range(len(shape))):
            lines = loop(names[axis], shape[axis], lines)
            if row is not None and axis == len(shape) - 1:
                lines = [*row(places[:-1]), *lines]
        lines = without_unused(lines)
        scope.keep(words(lines))
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return write
