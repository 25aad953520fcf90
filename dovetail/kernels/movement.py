"""Operators that move elements, whole runs at once where nothing is computed, or take them from computed places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import Concat, Gather, Im2col, Pad, Pick, Resample, Reshape, Slice, Transpose
from dovetail.ir.types import Box, DType, Shape, TensorType, box_shape, full_box
from dovetail.kernels.c import (
    block,
    c_type,
    function,
    integer,
    loop,
    product,
    real,
    total,
    variable,
    without_unused,
    wrapped,
)
from dovetail.kernels.elements import (
    Walk,
    broadcast_walk,
    loop_names,
    merge,
    nest,
    operand,
    place_in,
    row_major,
    walk_text,
    write_elements,
)
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import (
    Expression,
    KernelScope,
    KernelWriter,
    UnsupportedRegion,
    declarations,
    expression_of,
)
from dovetail.kernels.region import RegionParts, kernel
from dovetail.kernels.window import COLUMN, ROW, Nest, anchored, window_of

SHORT = 8
"""Runs below this many bytes are copied element by element: a call costs more."""


def _copy(region: RegionParts, scope: KernelScope, result: Shape, box: Box, position: int, source: Walk) -> list[str]:
    """The loops that fill `box` of the result from an operand of the anchor, the pointwise tree applied."""
    kind = region.type(position).dtype
    if kind.bits < 8 and region.node.inputs[position] in region.graph.constants:
        raise UnsupportedRegion(f"a constant of {kind.text} is not moved on the core.")
    name = operand(region, scope, position, "other" if position else "input")
    if not region.tree:
        walks = [broadcast_walk(result, result, box), source]
        loops = merge([stop - start for start, stop in box], walks)
        run = loops[-1] if loops else (1, (1, 1))
        size = run[0] * kind.numpy.itemsize
        if run[1] == (1, 1) and size >= SHORT:
            outer = [(count, strides) for count, strides in loops[:-1]]
            to, start = (walk_text(number, walk.start, outer) for number, walk in enumerate(walks))
            lines = [f"__builtin_memcpy({total('output', to)}, {total(name, start)}, {size});"]
            for variable_name, (count, _) in reversed(list(zip(loop_names(len(outer)), outer, strict=True))):
                lines = loop(variable_name, count, lines)
            return lines
    return _computed(region, scope, result, box, lambda text: expression_of(f"{name}[{text}]", kind), source)


def _computed(
    region: RegionParts,
    scope: KernelScope,
    result: Shape,
    box: Box,
    value: Callable[[str], Expression],
    source: Walk | None,
) -> list[str]:
    """The loops that fill `box` with the pointwise tree of `value` at the source's index."""
    name, tree = region.node.output, region.tree
    return nest(result, box, lambda index, text: finish(scope, tree, index, (name, value(text))), source)


def _pieces(region: RegionParts, scope: KernelScope, operator: Operator) -> list[str]:
    """The strided copies that compute a movement."""
    types, lines = region.graph.types, list[str]()
    for piece in operator.pieces([types[value] for value in region.node.inputs]) or ():
        dense = row_major(region.type(piece.operand).shape)
        start = sum(first * stride for first, stride in zip(piece.start, dense, strict=True)) if piece.start else 0
        walks = tuple(step * dense[axis] for axis, step in piece.walks) or row_major(box_shape(piece.box))
        lines += _copy(region, scope, region.output_shape, piece.box, piece.operand, Walk(walks, start))
    return lines


def _fill(region: RegionParts, scope: KernelScope, result: Shape, kind: TensorType, number: float) -> list[str]:
    """The whole result set to what the pointwise tree makes of one value."""
    if kind.dtype is DType.FLOAT32:
        return _computed(region, scope, result, full_box(result), lambda _: Expression(real(number), "float"), None)
    value = int(number)
    if not region.tree and kind.dtype.bits <= 8:
        return [f"__builtin_memset(output, {value & 255}, {prod(result)});"]
    constant = Expression(integer(value), "int32_t", value, value)
    return _computed(region, scope, result, full_box(result), lambda _: constant, None)


def _pad(region: RegionParts, scope: KernelScope, operator: Pad) -> list[str]:
    value = region.node.inputs[0]
    shape, kind = region.output_shape, region.graph.types[value]
    if kind.dtype.bits > 32:
        raise UnsupportedRegion(f"Pad of {kind} is not computed on the core.")
    box = tuple((lead, lead + size) for lead, size in zip(operator.before, kind.shape, strict=True))
    filled = _fill(region, scope, shape, kind, operator.value)
    return [*filled, *_copy(region, scope, shape, box, 0, Walk(row_major(kind.shape)))]


def _run(region: RegionParts, scope: KernelScope, length: int, channel_base: str, source: str) -> list[str]:
    """Statements that take `length` neighbouring elements, behind a pointer or all the same number (`source`), to the
    result from flat index `place` on, which is at `channel_base` along its last axis."""
    kind = region.source_dtype
    number = source.lstrip("-").isdigit()
    if not region.tree and number and kind.bits <= 8:
        return [f"__builtin_memset(output + place, {int(source) & 255}, {length});"]
    if not region.tree and not number and length * kind.numpy.itemsize >= SHORT:
        return [f"__builtin_memcpy(output + place, {source}, {length * kind.numpy.itemsize});"]
    index = anchored(region.output_shape, "place + channel", total(channel_base, "channel"))
    value = Expression(source, "int32_t", int(source), int(source)) if number else expression_of("from[channel]", kind)
    lines = finish(scope, region.tree, index, (region.node.output, value))
    head = [] if number else [f"const {c_type(kind)} *from = {source};"]
    return [*head, *block(f"for (int32_t channel = 0; channel < {length}; ++channel)", lines)]


def _im2col(region: RegionParts, scope: KernelScope, operator: Im2col) -> list[str]:
    taps = Nest(region, scope, window_of(region, operator.kernel, operator.stride, operator.dilation))
    window, (rows, columns) = taps.window, taps.window.kernel
    whole_rows = not window.any_padded and window.contiguous_columns
    tap_row, tap_column = taps.tap(ROW), "0" if whole_rows else taps.tap(COLUMN)
    tap = product(wrapped(total(product(tap_row, columns), tap_column)), window.channels)
    place = total(taps.output_index(rows * columns * window.channels), tap)
    source = total(scope.input(region.source(), "input"), taps.input_index("top", "left"))
    length = window.channels * (columns if whole_rows else 1)
    lines = _run(region, scope, length, tap, source)
    if window.any_padded:
        height, width = window.size
        inside = f"if (top >= 0 && top < {height} && left >= 0 && left < {width})"
        outside = _run(region, scope, length, tap, str(int(region.pad_value)))
        lines = [*block(inside, lines)[:-1], *block("} else", outside)]
    origins = []
    for axis, (name, at) in enumerate((("top", tap_row), ("left", tap_column))):
        start = taps.origin(axis, window.stride[axis], window.before[axis])
        origins.append(f"const int32_t {name} = {total(start, product(at, window.dilation[axis]))};")
    lines = [*origins, f"const int32_t place = {place};", *lines]
    sizes = (1 if whole_rows else columns, rows, window.outputs[COLUMN], window.outputs[ROW], window.batch)
    for name, count in zip(("kernel_column", "kernel_row", "column", "row", "image"), sizes, strict=True):
        lines = loop(name, count, lines)
    return lines


_MOVES: Mapping[type[Operator], Callable[[RegionParts, KernelScope, Any], list[str]]] = {
    **dict.fromkeys((Transpose, Reshape, Slice, Concat), _pieces),
    Pad: _pad,
    Im2col: _im2col,
}


@kernel(Im2col, windowed=True)
@kernel(*_MOVES)
def _movement(region: RegionParts, scope: KernelScope, operator: Operator) -> KernelWriter:
    def body() -> list[str]:
        return _MOVES[type(operator)](region, scope, operator)

    def write(name: str) -> list[str]:
        lines = without_unused(body())
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return KernelWriter(write, body)


def _picked(scope: KernelScope, owner: str, axis: int, places: Sequence[int], at: str) -> str:
    """C text of where an element at `at` comes from: a formula where the places rise evenly, else a table."""
    steps = {b - a for a, b in pairwise(places)}
    if len(steps) <= 1:
        step = steps.pop() if steps else 0
        if step < 0:
            return f"{places[0]} - {product(at, -step)}" if at != "0" else str(places[0])
        return total(product(at, step), places[0])
    kind = np.int16 if max(places) < 1 << 15 else np.int32
    return f"{scope.constant(owner, f'places_{axis}', np.array(places, kind))}[{at}]"


@kernel(Pick)
def _pick(region: RegionParts, scope: KernelScope, operator: Pick) -> KernelWriter:
    kind = region.type(0)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        sources = [
            _picked(scope, region.node.output, axis, chosen, at)
            for axis, (chosen, at) in enumerate(zip(operator.places, places, strict=True))
        ]
        return [], expression_of(f"{x}[{place_in(kind.shape, sources)}]", kind.dtype)

    return write_elements(region, scope, element)


@kernel(Gather)
def _gather(region: RegionParts, scope: KernelScope, operator: Gather) -> KernelWriter:
    axis = operator.axis
    kind, indices = (region.graph.types[value] for value in region.node.inputs)
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


@kernel(Resample)
def _resample(region: RegionParts, scope: KernelScope, operator: Resample) -> KernelWriter:
    axes, kind = operator.axes, region.type(0)
    taps = [scope.known(value) for value in region.node.inputs[1:]]
    real = kind.dtype is DType.FLOAT32
    share = 1 if real else prod(int(np.abs(weights).sum(axis=1).max(initial=0)) for weights in taps[1::2])
    reach = 0 if real else share * max(-kind.dtype.low, kind.dtype.high)
    if reach >= 1 << 31:
        raise UnsupportedRegion(f"sums of up to {reach} do not fit 32 bits.")

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        source, factors, loops = list(places), [], []
        for number, (axis, sources, weights) in enumerate(zip(axes, taps[::2], taps[1::2], strict=True)):
            name, count = f"tap_{number}", sources.shape[1]
            tap = total(product(places[axis], count), variable(name, count))
            source[axis] = f"{scope.constant(region.node.output, f'places_{axis}', sources)}[{tap}]"
            factors.append(f"{scope.constant(region.node.output, f'weights_{axis}', weights)}[{tap}]")
            loops.append((name, count))
        lines = [f"sum += {x}[{place_in(kind.shape, source)}] * ({' * '.join(factors) or '1'});"]
        for name, count in reversed(loops):
            lines = loop(name, count, lines)
        held, start = ("float", "0.0f") if real else ("int32_t", "0")
        return [f"{held} sum = {start};", *lines], Expression("sum", held, -reach, reach)

    return write_elements(region, scope, element)
