"""Elements from fixed, computed or weighted places."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np

from dovetail.graph.types import DType
from dovetail.kernels.elements import Writer, operand, place_in, without_pad, write_elements
from dovetail.kernels.epilogue import Expression, Scope, expression_of
from dovetail.kernels.kernel import Unsupported
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
    axes, kind = anchor.operator.axes, region.graph.types[anchor.inputs[0]]
    taps = [scope.known(value) for value in anchor.inputs[1:]]
    real = kind.dtype is DType.FLOAT32
    share = 1 if real else prod(int(np.abs(weights).sum(axis=1).max(initial=0)) for weights in taps[1::2])
    reach = 0 if real else share * max(-kind.dtype.low, kind.dtype.high)
    if reach >= 1 << 31:
        raise Unsupported(f"sums of up to {reach} do not fit 32 bits.")

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        source, factor = list(places), "1"
        lines = []
        loops = []
        for number, axis in enumerate(axes):
            count = taps[2 * number].shape[1]
            name = f"tap_{number}"
            tap = total(product(places[axis], count), variable(name, count))
            table = scope.constant(anchor.output, f"places_{axis}", taps[2 * number])
            weights = scope.constant(anchor.output, f"weights_{axis}", taps[2 * number + 1])
            source[axis] = f"{table}[{tap}]"
            weight = f"{weights}[{tap}]"
            factor = weight if factor == "1" else f"{factor} * {weight}"
            loops.append((name, count))
        lines = [f"sum += {x}[{place_in(kind.shape, source)}] * ({factor});"]
        for name, count in reversed(loops):
            lines = loop(name, count, lines)
        held, start = ("float", "0.0f") if real else ("int32_t", "0")
        return [f"{held} sum = {start};", *lines], Expression("sum", held, -reach, reach)

    return write_elements(region, scope, element)
