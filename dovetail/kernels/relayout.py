"""A value brought from one layout to another of which one has several elements in a byte: put together, taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.ir.layout import Layout, row_major, stored_shape
from dovetail.ir.operators.movement import Relayout
from dovetail.ir.types import Shape, dense_steps
from dovetail.kernels.c import Lines, c_type, nested, product, total, variable
from dovetail.kernels.kernel import KernelWriter
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope


def index_text(layout: Layout, dimension: tuple[int, int], places: Sequence[str]) -> str:
    """C text of the index along a physical dimension of the element at `places`, one C text per axis."""
    axis, step = dimension
    coarser, text = layout.coarser(axis, step), places[axis]
    text = f"{text} / {step}" if step > 1 else text
    text += f" % {coarser // step}" if coarser else ""
    return f"{coarser // step - 1} - {text}" if coarser and dimension in layout.backwards else text


def field_text(layout: Layout, places: Sequence[str]) -> str:
    """C text of the number of an element among the fields of its byte, from the lowest bits on."""
    return index_text(layout, layout.dims[-1], places)


def element_text(layout: Layout, shape: Shape, places: Sequence[str]) -> str:
    """C text of the flat index of an element of a dense value, counted in elements also where they share bytes: the
    first of a byte first, whichever bits it has."""
    upwards = tuple(each for each in layout.backwards if not layout.packed or each != layout.dims[-1])
    plain = replace(layout, backwards=upwards)
    strides = dense_steps(stored_shape(layout, shape))
    terms = [
        product(f"({index_text(plain, dimension, places)})", stride * layout.fields)
        for dimension, stride in zip(layout.stored, strides, strict=True)
    ]
    return total(*terms, *([f"{field_text(plain, places)}"] if layout.packed else []))


@kernel(Relayout, packed=True)
def _relayout(scope: KernelScope, operator: Relayout) -> KernelWriter:
    (source,), shape = scope.node.inputs, scope.output_shape
    places = tuple(variable(f"axis_{axis}", size) for axis, size in enumerate(shape))
    kind = c_type(scope.result.dtype)

    def one() -> Lines:
        plain = row_major(len(shape))
        at, to = (element_text(scope.layouts.get(value, plain), shape, places) for value in (source, scope.node.output))
        text = scope.loaded(source, scope.input(source, "input"), at)
        return [scope.stored(to, text if scope.shares(scope.node.output) else f"({kind}){text}")]

    return scope.writer(lambda: nested([(f"axis_{axis}", size) for axis, size in enumerate(shape)], one()), one)
