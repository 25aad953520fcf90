"""Elements from fixed, computed or weighted places."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dovetail.kernels.elements import Writer, operand, place_in, without_pad, write_elements
from dovetail.kernels.epilogue import Expression, Scope, expression_of
from dovetail.kernels.region import Region
from dovetail.kernels.text import loop, product, total
from dovetail.kernels.window import variable
from dovetail.operators.selection import Gather, Pick, Resample


def _picked(scope: Scope, owner: str, axis: int, places: Sequence[int], at: str) -> str:
    """C text of where an element at `at` comes from: a formula where the places rise evenly, else a table."""
    steps = {b - a for a, b in pairwise(places)}
    if len(steps) <= 1:
        step = steps.pop() if steps else 0
        if step < 0:
            return f"{places[0]} - {product(at, -step)}" if at != "0" else str(places[0])
        return total(product(at, step), places[0])
    kind = np.int16 if max(places) < 1 << 15 else np.int32
    return f"{scope.constant(owner, f'places_{axis}', np.array(places, kind))}[{at}]"


def write_pick(region: Region, scope: Scope) -> Writer:
    """The writer of a Pick."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Pick)
    without_pad(region)
    operator, kind = anchor.operator, region.graph.types[anchor.inputs[0]]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        sources = [
            _picked(scope, anchor.output, axis, chosen, at)
            for axis, (chosen, at) in enumerate(zip(operator.places, places, strict=True))
        ]
        return [], expression_of(f"{x}[{place_in(kind.shape, sources)}]", kind.dtype)

    return write_elements(region, scope, element)


def write_gather(region: Region, scope: Scope) -> Writer:
    """The writer of a Gather."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Gather)
    without_pad(region)
    axis = anchor.operator.axis
    kind, indices = (region.graph.types[value] for value in anchor.inputs)
    middle = axis + len(indices.shape)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        if kind.shape[axis] == 1:
            only = place_in(kind.shape, (*places[:axis], "0", *places[middle:]))
            return [], expression_of(f"{x}[{only}]", kind.dtype)
        table = operand(region, scope, 1, "indices")
        index = f"{table}[{place_in(indices.shape, places[axis:middle])}]"
        lines = [f"const int32_t taken = gathered({index}, {kind.shape[axis]});"]
        source = place_in(kind.shape, (*places[:axis], "taken", *places[middle:]))
        return lines, expression_of(f"{x}[{source}]", kind.dtype)

    return write_elements(region, scope, element)


def write_resample(region: Region, scope: Scope) -> Writer:
    """The writer of a Resample."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Resample)
    without_pad(region)
    axis = anchor.operator.axis
    kind, taps = region.graph.types[anchor.inputs[0]], region.graph.types[anchor.inputs[1]].shape[1]
    places_of, weights_of = (scope.known(value) for value in anchor.inputs[1:])

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        table = scope.constant(anchor.output, "places", places_of)
        weights = scope.constant(anchor.output, "weights", weights_of)
        tap = total(product(places[axis], taps), variable("tap", taps))
        source = place_in(kind.shape, (*places[:axis], f"{table}[{tap}]", *places[axis + 1 :]))
        step = f"sum += {x}[{source}] * {weights}[{tap}];"
        return ["float sum = 0.0f;", *loop("tap", taps, [step])], Expression("sum", "float")

    return write_elements(region, scope, element)
