"""Operators that move elements: a loop nest per source, whole runs copied where nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from dovetail.graph.types import Box, DType, Shape, TensorType, full_box
from dovetail.kernels.elementwise import real
from dovetail.kernels.epilogue import Expression, Index, Scope, expression_of, finish
from dovetail.kernels.kernel import Unsupported, c_type, declarations
from dovetail.kernels.nest import Walk, broadcast_walk, loop_names, merge, nest, row_major, walk_text
from dovetail.kernels.region import Region
from dovetail.kernels.text import block, function, integer, loop, product, total, without_unused
from dovetail.kernels.window import COLUMN, ROW, anchored, variable, window_of, wrapped
from dovetail.operators.base import Operator
from dovetail.operators.movement import Concat, Pad, Patches, Reshape, Slice, Transpose

_SHORT = 8
"""Runs below this many bytes are copied element by element: a call costs more."""


def _copy(region: Region, scope: Scope, result: Shape, box: Box, value: str, source: Walk) -> list[str]:
    """The loops that fill `box` of the result from a region input, the pointwise tree applied."""
    kind = region.graph.types[value].dtype
    name = scope.input(value, "input" if region.anchor and value == region.anchor.inputs[0] else "other")
    if not region.tree:
        walks = [broadcast_walk(result, result, box), source]
        loops = merge([stop - start for start, stop in box], walks)
        run = loops[-1] if loops else (1, (1, 1))
        size = run[0] * (kind.bits // 8)
        if run[1] == (1, 1) and size >= _SHORT:
            outer = [(count, strides) for count, strides in loops[:-1]]
            to, start = (walk_text(number, walk.start, outer) for number, walk in enumerate(walks))
            lines = [f"__builtin_memcpy({total('output', to)}, {total(name, start)}, {size});"]
            for variable_name, (count, _) in reversed(list(zip(loop_names(len(outer)), outer, strict=True))):
                lines = loop(variable_name, count, lines)
            return lines
    return _computed(region, scope, result, box, lambda text: expression_of(f"{name}[{text}]", kind), source)


def _computed(
    region: Region, scope: Scope, result: Shape, box: Box, value: Callable[[str], Expression], source: Walk | None
) -> list[str]:
    """The loops that fill `box` with the pointwise tree of `value` at the source's index."""
    anchor = region.anchor
    assert anchor is not None

    def body(index: Index, text: str) -> list[str]:
        return finish(scope, region.tree, index, (anchor.output, value(text)))

    return nest(result, box, body, source)


def _whole(region: Region) -> str:
    """The anchor's operand where no Pad may stand before it; raises Unsupported for one."""
    assert region.anchor is not None
    if region.pad is not None:
        raise Unsupported(f"a Pad before {type(region.anchor.operator).__name__} is not fused.")
    return region.anchor.inputs[0]


def _transpose(region: Region, scope: Scope) -> list[str]:
    value = _whole(region)
    assert region.anchor is not None and isinstance(region.anchor.operator, Transpose)
    dense = row_major(region.graph.types[value].shape)
    walk = Walk(tuple(dense[axis] for axis in region.anchor.operator.permutation))
    shape = region.output_shape
    return _copy(region, scope, shape, full_box(shape), value, walk)


def _reshape(region: Region, scope: Scope) -> list[str]:
    shape = region.output_shape
    return _copy(region, scope, shape, full_box(shape), _whole(region), Walk(row_major(shape)))


def _slice(region: Region, scope: Scope) -> list[str]:
    value = _whole(region)
    assert region.anchor is not None and isinstance(region.anchor.operator, Slice)
    operator = region.anchor.operator
    dense = row_major(region.graph.types[value].shape)
    start = sum(first * stride for first, stride in zip(operator.start, dense, strict=True))
    walk = Walk(tuple(step * stride for step, stride in zip(operator.step, dense, strict=True)), start)
    shape = region.output_shape
    return _copy(region, scope, shape, full_box(shape), value, walk)


def _concat(region: Region, scope: Scope) -> list[str]:
    _whole(region)
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Concat)
    shape = region.output_shape
    axis, place, lines = anchor.operator.axis % len(shape), 0, []
    for value in anchor.inputs:
        part = region.graph.types[value].shape
        if value in region.graph.constants:
            raise Unsupported(f"Concat of the constant {value!r} is not computed on the core.")
        box = tuple((place, place + part[axis]) if at == axis else (0, size) for at, size in enumerate(shape))
        lines += _copy(region, scope, shape, box, value, Walk(row_major(part)))
        place += part[axis]
    return lines


def _fill(region: Region, scope: Scope, result: Shape, kind: TensorType, number: float) -> list[str]:
    """The whole result set to what the pointwise tree makes of one value."""
    if kind.dtype is DType.FLOAT32:
        return _computed(region, scope, result, full_box(result), lambda _: Expression(real(number), "float"), None)
    value = int(number)
    if not region.tree and kind.dtype.bits == 8:
        return [f"__builtin_memset(output, {value & 255}, {prod(result)});"]
    constant = Expression(integer(value), "int32_t", value, value)
    return _computed(region, scope, result, full_box(result), lambda _: constant, None)


def _pad(region: Region, scope: Scope) -> list[str]:
    value = _whole(region)
    assert region.anchor is not None and isinstance(region.anchor.operator, Pad)
    operator, shape, kind = region.anchor.operator, region.output_shape, region.graph.types[value]
    if kind.dtype.bits > 32:
        raise Unsupported(f"Pad of {kind} is not computed on the core.")
    box = tuple((lead, lead + size) for lead, size in zip(operator.before, kind.shape, strict=True))
    filled = _fill(region, scope, shape, kind, operator.value)
    return [*filled, *_copy(region, scope, shape, box, value, Walk(row_major(kind.shape)))]


def _run(region: Region, scope: Scope, length: int, channel_base: str, source: str) -> list[str]:
    """Statements that take `length` neighbouring elements to the result from flat index `place` on.

    Args:
        channel_base: C text of the first element's place along the result's last axis.
        source: C text of a pointer to the first element, or the number all elements are.
    """
    assert region.anchor is not None
    kind = region.graph.types[region.source()].dtype
    number = source.lstrip("-").isdigit()
    if not region.tree and number and kind.bits == 8:
        return [f"__builtin_memset(output + place, {int(source) & 255}, {length});"]
    if not region.tree and not number and length * kind.bits // 8 >= _SHORT:
        return [f"__builtin_memcpy(output + place, {source}, {length * kind.bits // 8});"]
    index = anchored(region.output_shape, "place + channel", total(channel_base, "channel"))
    value = Expression(source, "int32_t", int(source), int(source)) if number else expression_of("from[channel]", kind)
    lines = finish(scope, region.tree, index, (region.anchor.output, value))
    head = [] if number else [f"const {c_type(kind)} *from = {source};"]
    return [*head, *block(f"for (int32_t channel = 0; channel < {length}; ++channel)", lines)]


def _patches(region: Region, scope: Scope) -> list[str]:
    assert region.anchor is not None and isinstance(region.anchor.operator, Patches)
    operator = region.anchor.operator
    window = window_of(region, operator.kernel, operator.stride, operator.dilation)
    rows, columns = window.kernel
    whole_rows = not window.any_padded and window.contiguous_columns
    tap_row = variable("kernel_row", rows)
    tap_column = "0" if whole_rows else variable("kernel_column", columns)
    tap = product(wrapped(total(product(tap_row, columns), tap_column)), window.channels)
    place = total(window.output_index(rows * columns * window.channels), tap)
    source = total(scope.input(region.source(), "input"), window.input_index("top", "left"))
    length = window.channels * (columns if whole_rows else 1)
    lines = _run(region, scope, length, tap, source)
    if window.any_padded:
        height, width = window.size
        assert region.pad is not None and isinstance(region.pad.operator, Pad)
        inside = f"if (top >= 0 && top < {height} && left >= 0 && left < {width})"
        outside = _run(region, scope, length, tap, str(int(region.pad.operator.value)))
        lines = [*block(inside, lines)[:-1], *block("} else", outside)]
    origins = [
        f"const int32_t top = {total(window.origin(ROW), product(tap_row, window.dilation[ROW]))};",
        f"const int32_t left = {total(window.origin(COLUMN), product(tap_column, window.dilation[COLUMN]))};",
    ]
    lines = [*origins, f"const int32_t place = {place};", *lines]
    sizes = (1 if whole_rows else columns, rows, window.outputs[COLUMN], window.outputs[ROW], window.batch)
    for name, count in zip(("kernel_column", "kernel_row", "column", "row", "image"), sizes, strict=True):
        lines = loop(name, count, lines)
    return lines


_MOVES: Mapping[type[Operator], Callable[[Region, Scope], list[str]]] = {
    Transpose: _transpose,
    Reshape: _reshape,
    Slice: _slice,
    Concat: _concat,
    Pad: _pad,
    Patches: _patches,
}


def write_movement(region: Region, scope: Scope) -> Callable[[str], list[str]]:
    """The writer of a kernel around an operator that moves elements."""
    assert region.anchor is not None
    move = _MOVES[type(region.anchor.operator)]

    def write(name: str) -> list[str]:
        lines = without_unused(move(region, scope))
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return write
