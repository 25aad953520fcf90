"""Bodies of work-items as OpenCL C: sums of products, pools and pointwise operators.

Every item takes some neighbouring channels of one pixel, or some neighbouring elements, of the result: sums and pools
as OpenCL vectors, the pointwise operators behind them lane by lane with the text of `kernels.epilogue`. Zero points
and padding are folded into the constants by `kernels.convolution.sums_of`, as for the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad, Slice, Transpose
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.ir.types import DType, Shape, dense_steps
from dovetail.kernels.c import block, c_type, integer, loop, product, total, variable
from dovetail.kernels.elements import place_in
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, UnsupportedRegion, expression_of
from dovetail.kernels.pools import pool_nest
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.sums import SumConstants, SumNest, blocked, padded, products_of, sums_of
from dovetail.kernels.window import COLUMN, ROW, Nest
from dovetail.records import Record

Sizes = tuple[int, int, int]
WIDTHS = (1, 2, 4, 8)
"""Lanes of vectors. OpenCL has 16 too, with which PoCL 3.0 (LLVM 14) on processors with AVX-512 fails, or computes
something else."""

_GLOBAL = "__global "
_NAMES = dict(int8_t="char", uint8_t="uchar", int16_t="short", uint16_t="ushort", int32_t="int", int64_t="long")


class Body(Record):
    """The statements of a work-item, and how many items there are along each dimension."""

    lines: list[str]
    items: Sizes


Writer = Callable[[KernelScope, int], Body]
"""From a region, the kernel's parameters (which it adds to) and the lanes of a vector."""


def writer_of(scope: KernelScope) -> Writer:
    """The function that writes the body of a region's kernel; raises UnsupportedRegion if there is none."""
    if _by_element(scope):
        return _elements
    kind = type(scope.node.operator)
    if kind not in _WRITERS:
        raise UnsupportedRegion(f"there is no OpenCL kernel for {kind.__name__}.")
    return _WRITERS[kind]


def widths(scope: KernelScope) -> tuple[int, ...]:
    """The lanes a region may be computed with."""
    if _by_element(scope) or scope.anchor is None:
        return tuple(width for width in WIDTHS if prod(scope.output_shape) % width == 0)
    channels = scope.output_shape[-1]
    if isinstance(scope.anchor.operator, Conv2d | FullyConnected) and _groups(scope) == 1:
        return tuple(width for width in WIDTHS if width < 2 * channels)  # missing weights are zeros
    return tuple(width for width in WIDTHS if channels // _groups(scope) % width == 0)


def items(scope: KernelScope, lanes: int) -> Sizes:
    """Work-items along each dimension: blocks of channels, columns and rows; or blocks of elements."""
    shape = scope.output_shape
    if _by_element(scope) or scope.anchor is None:
        return (prod(shape) // lanes, 1, 1)
    operator, scope = scope.anchor.operator, scope
    if isinstance(operator, MaxPool2d | AveragePool2d | SumPool2d):
        window = pool_nest(scope, operator).window
    else:
        window = products_of(scope).window
    return (-(-shape[-1] // lanes), window.outputs[COLUMN], window.batch * window.outputs[ROW])


def _groups(scope: KernelScope) -> int:
    """Parts of the output channels that read parts of the input channels; 1 where each reads its own or all."""
    if len(scope.node.inputs) < 2:
        return 1
    channels, depth = (scope.type(place).shape[-1] for place in (0, 1))
    if scope.node.operator.is_channelwise:
        return 1 if depth == channels else channels
    return channels // depth


def _vector(kind: str, lanes: int) -> str:
    return f"{_NAMES[kind]}{lanes if lanes > 1 else ''}"


def _load(pointer: str, kind: str, lanes: int) -> str:
    return f"convert_{_vector(kind, lanes)}({f'vload{lanes}(0, {pointer})' if lanes > 1 else f'*({pointer})'})"


def _lanes_of(name: str, lanes: int) -> list[str]:
    return [f"{name}.s{lane:x}" for lane in range(lanes)] if lanes > 1 else [name]


def _pixel(nest: Nest, channels: int, lanes: int) -> list[str]:
    """Statements that name the item's channel and pixel, its window, and where its result goes."""
    window = nest.window
    line, rows = "(int32_t)get_global_id(2)", window.outputs[ROW]
    return [
        f"const int32_t channel = {product('(int32_t)get_global_id(0)', lanes)};",
        "const int32_t column = (int32_t)get_global_id(1);",
        f"const int32_t row = {f'{line} % {rows}' if window.batch > 1 else line};",
        f"const int32_t image = {line} / {rows};",
        *nest.clamps(),
        nest.place(channels),
    ]


def _from(nest: Nest, channel: str) -> str:
    top, left = (nest.below(axis, nest.tap(axis)) for axis in (ROW, COLUMN))
    return nest.pointer(top, left, channel, _GLOBAL)


def _body(nest: Nest, channels: int, lanes: int, lines: list[str]) -> Body:
    """Items of `lanes` channels of a pixel each."""
    window = nest.window
    size = (-(-channels // lanes), window.outputs[COLUMN], window.batch * window.outputs[ROW])
    return Body([*_pixel(nest, channels, lanes), *lines], size)


def _summed(nest: SumNest, lanes: int, taps: list[str]) -> Body:
    """Sums in a vector: their start, the loops over the taps inside the image, the pointwise operators behind them."""
    sums, window, outputs = nest.sums, nest.window, nest.outputs
    start = sums.border if window.any_padded else sums.inside
    bias = nest.scope.constant("sums", "bias", padded(start, lanes))
    first = f"{_vector(sums.kind, lanes)} sum = {_load(f'{bias} + channel', sums.kind, lanes)};"
    names = _lanes_of("sum", lanes)
    stored = nest.store(sums.kind, names, sums.value, outputs=outputs if outputs % lanes else None)
    return _body(nest, outputs, lanes, [first, *nest.rows(nest.columns(taps)), *stored])


def _multiplied(sums: SumConstants, value: str, weights: str, lanes: int) -> str:
    """The statement that adds a product of 32-bit factors to the sums."""
    text = f"{value} * {weights}"
    return f"sum += {f'convert_{_vector(sums.kind, lanes)}({text})' if sums.kind == 'int64_t' else text};"


def _sums(scope: KernelScope, lanes: int) -> Body:
    """A convolution or fully connected layer: weights in blocks of `lanes` outputs, side by side for each tap; a
    depthwise one, where every lane multiplies its own channel."""
    products = products_of(scope)
    nest = SumNest(scope, products.window, sums_of(scope, products))
    sums, (outputs, rows, columns, depth) = nest.sums, products.weights.shape
    tap = f"({total(product(nest.tap(ROW), columns), nest.tap(COLUMN))})"
    taken_off = sums.pad_value if nest.window.any_padded else 0
    if scope.node.operator.is_channelwise and products.channelwise:
        weights = scope.constant("sums", "weights", sums.weights[..., 0].transpose(1, 2, 0).reshape(-1))
        value = total(_load("from", "int32_t", lanes), -taken_off)
        weight = _load(total(weights, product(tap, outputs), "channel"), "int32_t", lanes)
        return _summed(nest, lanes, [_from(nest, "channel"), _multiplied(sums, f"({value})", weight, lanes)])
    held = scope.constant("sums", "weights", blocked(sums.weights, lanes).reshape(-1))
    first = total(f"channel * {rows * columns * depth}", product(tap, depth * lanes))
    group = "0" if products.groups == 1 else product(f"(channel / {outputs // products.groups})", depth)
    step = [
        f"const int32_t value = {total('from[element]', -taken_off)};",
        _multiplied(sums, "value", _load(f"tap + {product('element', lanes)}", "int32_t", lanes), lanes),
    ]
    pointer = f"{_GLOBAL}const {c_type(DType.of(sums.weights.dtype))} *tap = {held} + {first};"
    return _summed(nest, lanes, [_from(nest, group), pointer, *loop("element", depth, step)])


def _pool(scope: KernelScope, lanes: int) -> Body:
    operator = scope.node.operator
    assert isinstance(operator, MaxPool2d | AveragePool2d | SumPool2d)
    pool = pool_nest(scope, operator)
    name, start = ("best", scope.source_dtype.low) if pool.largest else ("sum", 0)
    element = _load("from", "int32_t", lanes)
    collect = f"best = max(best, {element});" if pool.largest else f"sum += {element};"
    lines = [pool.count(), f"{_vector('int32_t', lanes)} {name} = {start};"]
    lines += pool.rows(pool.columns([_from(pool, "channel"), collect]))
    lines += pool.store("int32_t", _lanes_of(name, lanes), pool.value)
    return _body(pool, pool.window.channels, lanes, lines)


def _by_element(scope: KernelScope) -> bool:
    return scope.anchor is None or type(scope.anchor.operator) in MOVES


def _elements(scope: KernelScope, lanes: int) -> Body:
    """Pointwise operators, alone or on elements that are moved: neighbouring elements in turn."""
    shape, count = scope.output_shape, prod(scope.output_shape)
    names = [f"axis_{axis}" for axis in range(len(shape))]

    def index(operand: Shape) -> str:
        return "index" if prod(operand) == count else place_in(operand, places)

    steps = zip(names, shape, dense_steps(shape), strict=True)
    axes = [f"const int32_t {name} = index / {stride} % {size};" for name, size, stride in steps]
    places = [variable(name, size) for name, size in zip(names, shape, strict=True)]
    first = product("(int32_t)get_global_id(0)", lanes)
    lines = [f"const int32_t index = {total(first, variable('lane', lanes))};", *axes]
    value = moved(scope, places) if scope.anchor else None
    lines += finish(scope, index, value)
    return Body(block("", lines) if lanes == 1 else loop("lane", lanes, lines), (count // lanes, 1, 1))


Places = Sequence[str]
"""C texts of an element's place along each axis."""


def moved(scope: KernelScope, places: Places) -> Expression:
    """The element of the anchor's result at a place.

    Raises:
        Unsupported: a Pad before it, or a constant among its operands.
    """
    anchor = scope.node
    if scope.pad is not None or any(value in scope.graph.constants for value in anchor.inputs):
        raise UnsupportedRegion(f"{type(anchor.operator).__name__} of a constant, or of what is padded, has no kernel.")
    text = MOVES[type(anchor.operator)](scope, anchor.operator, places)
    return expression_of(f"({text})", scope.result.dtype)


def _element(scope: KernelScope, value: str, places: Places) -> str:
    return f"{scope.input(value)}[{place_in(scope.graph.types[value].shape, places)}]"


def _transpose(scope: KernelScope, operator: Transpose, places: Places) -> str:
    inner = [places[operator.permutation.index(axis)] for axis in range(len(places))]
    return _element(scope, scope.node.inputs[0], inner)


def _slice(scope: KernelScope, operator: Slice, places: Places) -> str:
    taken = zip(places, operator.step, operator.start, strict=True)
    inner = [total(product(at, step), start) for at, step, start in taken]
    return _element(scope, scope.node.inputs[0], inner)


def _pad(scope: KernelScope, operator: Pad, places: Places) -> str:
    value, shape = scope.node.inputs[0], scope.type(0).shape
    inner = [total(at, -lead) for at, lead in zip(places, operator.before, strict=True)]
    tests = []
    for at, lead, size, behind in zip(places, operator.before, shape, operator.after, strict=True):
        tests += [f"{at} >= {lead}"] if lead else []
        tests += [f"{at} < {lead + size}"] if behind else []
    element = _element(scope, value, inner)
    return f"{' && '.join(tests)} ? {element} : {integer(int(operator.value))}" if tests else element


def _concat(scope: KernelScope, operator: Concat, places: Places) -> str:
    axis, start, text = operator.axis % len(places), 0, ""
    size = scope.output_shape[axis]
    for value in scope.node.inputs:
        inner = [total(at, -start) if number == axis else at for number, at in enumerate(places)]
        start += scope.graph.types[value].shape[axis]
        element = _element(scope, value, inner)
        text += element if start == size else f"{places[axis]} < {start} ? {element} : "
    return text


MOVES: Mapping[type[Operator], Callable[[KernelScope, Any, Places], str]] = {
    Transpose: _transpose,
    Slice: _slice,
    Pad: _pad,
    Concat: _concat,
}

_WRITERS: Mapping[type[Operator], Writer] = {
    **dict.fromkeys((Conv2d, DepthwiseConv2d, FullyConnected), _sums),
    **dict.fromkeys((MaxPool2d, AveragePool2d, SumPool2d), _pool),
}
