"""Where an element of a result comes from, for operators that only move elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dovetail.graph.types import Shape
from dovetail.kernels.epilogue import Expression, Scope, expression_of
from dovetail.kernels.kernel import Unsupported
from dovetail.kernels.nest import row_major
from dovetail.kernels.region import Region
from dovetail.kernels.text import integer, product, total
from dovetail.kernels.window import wrapped
from dovetail.operators.base import Operator
from dovetail.operators.movement import Concat, Pad, Slice, Transpose

Places = Sequence[str]
"""C texts of an element's place along each axis."""


def moved(region: Region, scope: Scope, places: Places) -> Expression:
    """The element of the anchor's result at a place.

    Raises:
        Unsupported: a Pad before it, or a constant among its operands.
    """
    anchor = region.anchor
    assert anchor is not None
    if region.pad is not None or any(value in region.graph.constants for value in anchor.inputs):
        raise Unsupported(f"{type(anchor.operator).__name__} of a constant, or of what is padded, has no kernel.")
    kind = region.graph.types[anchor.output].dtype
    return expression_of(f"({MOVES[type(anchor.operator)](region, scope, places)})", kind)


def _element(region: Region, scope: Scope, value: str, places: Places) -> str:
    """An element of an operand."""
    shape = region.graph.types[value].shape
    terms = zip(shape, row_major(shape), places, strict=True)
    return f"{scope.input(value)}[{total(*(product(wrapped(at), step) for size, step, at in terms if size > 1))}]"


def _source(region: Region) -> tuple[str, Shape]:
    assert region.anchor is not None
    value = region.anchor.inputs[0]
    return value, region.graph.types[value].shape


def _transpose(region: Region, scope: Scope, places: Places) -> str:
    assert region.anchor is not None and isinstance(region.anchor.operator, Transpose)
    value, shape = _source(region)
    permutation = region.anchor.operator.permutation
    return _element(region, scope, value, [places[permutation.index(axis)] for axis in range(len(shape))])


def _slice(region: Region, scope: Scope, places: Places) -> str:
    assert region.anchor is not None and isinstance(region.anchor.operator, Slice)
    operator = region.anchor.operator
    taken = zip(places, operator.step, operator.start, strict=True)
    return _element(region, scope, _source(region)[0], [total(product(at, step), start) for at, step, start in taken])


def _pad(region: Region, scope: Scope, places: Places) -> str:
    assert region.anchor is not None and isinstance(region.anchor.operator, Pad)
    operator, (value, shape) = region.anchor.operator, _source(region)
    inner = [total(at, -lead) for at, lead in zip(places, operator.before, strict=True)]
    tests = []
    for at, lead, size, behind in zip(places, operator.before, shape, operator.after, strict=True):
        tests += [f"{at} >= {lead}"] if lead else []
        tests += [f"{at} < {lead + size}"] if behind else []
    element = _element(region, scope, value, inner)
    return f"{' && '.join(tests)} ? {element} : {integer(int(operator.value))}" if tests else element


def _concat(region: Region, scope: Scope, places: Places) -> str:
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Concat)
    axis, start, text = anchor.operator.axis % len(places), 0, ""
    size = region.output_shape[axis]
    for value in anchor.inputs:
        inner = [total(at, -start) if number == axis else at for number, at in enumerate(places)]
        start += region.graph.types[value].shape[axis]
        element = _element(region, scope, value, inner)
        text += element if start == size else f"{places[axis]} < {start} ? {element} : "
    return text


MOVES: Mapping[type[Operator], Callable[[Region, Scope, Places], str]] = {
    Transpose: _transpose, Slice: _slice, Pad: _pad, Concat: _concat,
}  # fmt: skip
