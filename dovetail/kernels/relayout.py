"""A value brought from one layout to another of which one has several elements in a byte: put together, taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.ir.layout import Layout, row_major, stored_shape
from dovetail.ir.operators.movement import Relayout
from dovetail.ir.types import Shape, dense_steps
from dovetail.kernels.c import c_type, function, loop, product, total, variable
from dovetail.kernels.kernel import Scope, Writer, declarations
from dovetail.kernels.region import Region, kernel


def byte_terms(layout: Layout, strides: Sequence[int], places: Sequence[str]) -> tuple[str, str]:
    """C texts of how far the element at `places` is from the first, in the unit of `strides`, and of its number among
    the fields of its byte, from the lowest bits on ("0" where it has a byte of its own)."""
    found = []
    for (axis, step), stride in zip(layout.dims, (*strides, 1)[: len(layout.dims)], strict=True):
        coarser = layout.coarser(axis, step)
        text = f"{places[axis]} / {step}" if step > 1 and places[axis] != "0" else places[axis]
        text += f" % {coarser // step}" if coarser and text != "0" else ""
        down = coarser is not None and (axis, step) in layout.backwards
        text = f"({coarser // step - 1} - {text})" if coarser and down else text
        found.append((text, stride))
    field = found.pop()[0] if layout.packed else "0"
    return total(*(product(f"({text})" if " " in text else text, stride) for text, stride in found)), field


def element_text(layout: Layout, shape: Shape, places: Sequence[str]) -> str:
    """C text of the flat index of an element of a dense value, counted in elements also where they share bytes: the
    first of a byte first, whichever bits it has."""
    upwards = replace(layout, backwards=tuple(d for d in layout.backwards if not layout.packed or d != layout.dims[-1]))
    place, field = byte_terms(upwards, dense_steps(stored_shape(layout, shape)), places)
    return total(product(f"({place})" if " " in place else place, layout.fields), field)


@kernel(Relayout, packed=True)
def _relayout(region: Region, scope: Scope, operator: Relayout) -> Writer:
    (source,), shape = region.node.inputs, region.output_shape
    places = tuple(variable(f"axis_{axis}", size) for axis, size in enumerate(shape))
    kind = c_type(region.result.dtype)

    def one() -> list[str]:
        plain = row_major(len(shape))
        at, to = (
            element_text(scope.layouts.get(value, plain), shape, places) for value in (source, region.node.output)
        )
        text = scope.loaded(source, scope.input(source, "input"), at)
        return [scope.stored(to, text if scope.shares(region.node.output) else f"({kind}){text}")]

    def write(name: str) -> list[str]:
        lines = one()
        for axis in reversed(range(len(shape))):
            lines = loop(f"axis_{axis}", shape[axis], lines)
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return Writer(write, one)
