"""What a work-item computes, as OpenCL C: sums of products, pools and pointwise operators.

Every item takes some neighbouring channels of one pixel, or some neighbouring elements, of the result: sums and pools
as OpenCL vectors, the pointwise operators behind them lane by lane with the text of `kernels.epilogue`. Zero points
and padding are folded into the constants by `kernels.convolution.sums_of`, as for the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from dovetail.graph.types import Array, DType, Shape
from dovetail.kernels.convolution import Products, Sums, anchor_expression, convolution_products, sums_of
from dovetail.kernels.elements import place_in
from dovetail.kernels.epilogue import Scope, finish
from dovetail.kernels.fully_connected import fully_connected_products
from dovetail.kernels.kernel import Unsupported, c_type
from dovetail.kernels.nest import row_major
from dovetail.kernels.pooling import Pooling, checked_pool
from dovetail.kernels.region import Region
from dovetail.kernels.text import block, loop, product, total
from dovetail.kernels.window import COLUMN, ROW, Window, anchored, store_lanes, tap_loop, variable
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.pooling import AveragePool2d, MaxPool2d, SumPool2d
from dovetail.targets.opencl.moves import MOVES, moved

Sizes = tuple[int, int, int]
WIDTHS = (1, 2, 4, 8)
"""Lanes of vectors. OpenCL has 16 too, with which PoCL 3.0 (LLVM 14) on processors with AVX-512 fails, or computes
something else."""

_ORIGIN = ((ROW, "top"), (COLUMN, "left"))
_NAMES = {
    "int8_t": "char", "uint8_t": "uchar", "int16_t": "short", "uint16_t": "ushort", "int32_t": "int",
    "int64_t": "long",
}  # fmt: skip


@dataclass(frozen=True)
class Body:
    """The statements of a work-item, and how many items there are along each dimension."""

    lines: list[str]
    items: Sizes


Writer = Callable[[Region, Scope, int], Body]
"""From a region, the kernel's parameters (which it adds to) and the lanes of a vector."""


def writer_of(region: Region) -> Writer:
    """What writes the body of a region's kernel; raises Unsupported where nothing does."""
    operator = region.anchor.operator if region.anchor else None
    if _by_element(region):
        return _elements
    if isinstance(operator, MaxPool2d | AveragePool2d | SumPool2d):
        return _pool
    if isinstance(operator, DepthwiseConv2d):
        channels = region.graph.types[region.source()].shape[-1]
        return _depthwise if region.output_shape[-1] == channels else _convolution
    if isinstance(operator, Conv2d | FullyConnected):
        return _convolution
    raise Unsupported(f"there is no OpenCL kernel for {type(operator).__name__}.")


def widths(region: Region) -> tuple[int, ...]:
    """The lanes a region may be computed with."""
    if _by_element(region) or region.anchor is None:
        return tuple(width for width in WIDTHS if prod(region.output_shape) % width == 0)
    channels = region.output_shape[-1]
    if isinstance(region.anchor.operator, Conv2d | FullyConnected) and _groups(region) == 1:
        return tuple(width for width in WIDTHS if width < 2 * channels)  # missing weights are zeros
    return tuple(width for width in WIDTHS if channels // _groups(region) % width == 0)


def items(region: Region, lanes: int) -> Sizes:
    """Work-items along each dimension: blocks of channels, columns and rows; or blocks of elements."""
    shape = region.output_shape
    if _by_element(region) or region.anchor is None:
        return (prod(shape) // lanes, 1, 1)
    pooled = isinstance(region.anchor.operator, MaxPool2d | AveragePool2d | SumPool2d)
    window = checked_pool(region)[2] if pooled else _products(region, Scope(region.graph)).window
    return (-(-shape[-1] // lanes), window.outputs[COLUMN], window.batch * window.outputs[ROW])


def _groups(region: Region) -> int:
    """Parts of the output channels that read parts of the input channels; 1 where each reads its own or all."""
    anchor, types = region.anchor, region.graph.types
    if anchor is None or len(anchor.inputs) < 2:
        return 1
    channels, depth = types[anchor.inputs[0]].shape[-1], types[anchor.inputs[1]].shape[-1]
    if isinstance(anchor.operator, DepthwiseConv2d):
        return 1 if depth == channels else channels
    return channels // depth


def _products(region: Region, scope: Scope) -> Products:
    dense = region.anchor is not None and isinstance(region.anchor.operator, FullyConnected)
    return fully_connected_products(region, scope) if dense else convolution_products(region, scope)


def _vector(kind: str, lanes: int) -> str:
    """OpenCL's name of a vector of elements of a C type."""
    return f"{_NAMES[kind]}{lanes if lanes > 1 else ''}"


def _load(pointer: str, kind: str, lanes: int) -> str:
    """Neighbouring elements as a vector of a C type."""
    return f"convert_{_vector(kind, lanes)}({f'vload{lanes}(0, {pointer})' if lanes > 1 else f'*({pointer})'})"


def _lanes_of(name: str, lanes: int) -> list[str]:
    return [f"{name}.s{lane:x}" for lane in range(lanes)] if lanes > 1 else [name]


def _pixel(window: Window, channels: int, lanes: int) -> list[str]:
    """Statements that name the item's channel and pixel, its window, and where its result goes."""
    line, rows = "(int32_t)get_global_id(2)", window.outputs[ROW]
    return [
        f"const int32_t channel = {product('(int32_t)get_global_id(0)', lanes)};",
        "const int32_t column = (int32_t)get_global_id(1);",
        f"const int32_t row = {f'{line} % {rows}' if window.batch > 1 else line};",
        f"const int32_t image = {line} / {rows};",
        *window.clamps(),
        f"const int32_t place = {window.output_index(channels)};",
    ]


def _taps(window: Window, lines: list[str]) -> list[str]:
    """The loops over the taps inside the image."""
    for axis, name in ((COLUMN, "kernel_column"), (ROW, "kernel_row")):
        lines = tap_loop(name, window.first(axis, True), window.end(axis, True), lines)
    return lines


def _tap(window: Window, axis: int) -> str:
    return variable(("kernel_row", "kernel_column")[axis], window.kernel[axis])


def _from(region: Region, scope: Scope, window: Window, channel: str) -> str:
    """The statement that points at the input element under a tap."""
    kind, image = c_type(region.graph.types[region.source()].dtype), scope.input(region.source(), "input")
    top, left = (total(name, product(_tap(window, axis), window.dilation[axis])) for axis, name in _ORIGIN)
    return f"__global const {kind} *from = {total(image, window.input_index(top, left, channel))};"


def _started(scope: Scope, sums: Sums, window: Window, lanes: int) -> str:
    """The statement that sets the sums to what they begin with."""
    start = sums.border if window.any_padded else sums.inside
    bias = scope.constant("sums", "bias", np.pad(start, (0, -len(start) % lanes)))
    return f"{_vector(sums.kind, lanes)} sum = {_load(f'{bias} + channel', sums.kind, lanes)};"


def _multiplied(sums: Sums, value: str, weights: str, lanes: int) -> str:
    """The statement that adds a product of 32-bit factors to the sums."""
    text = f"{value} * {weights}"
    return f"sum += {f'convert_{_vector(sums.kind, lanes)}({text})' if sums.kind == 'int64_t' else text};"


def _stored(region: Region, scope: Scope, sums: Sums, lanes: int) -> list[str]:
    """The pointwise operators behind the sums; channels beyond the last are left out."""
    anchor, shape = region.anchor, region.output_shape
    assert anchor is not None

    def epilogue(text: str, pixel: str, lane: str) -> list[str]:
        """Of one sum."""
        channel = total("channel", lane)
        index = anchored(shape, total("place", channel), channel)
        return finish(scope, region.tree, index, (anchor.output, anchor_expression(region, sums, text)))

    names, outputs = _lanes_of("sum", lanes), shape[-1]
    if outputs % lanes == 0:
        return store_lanes(sums.kind, names, 1, lanes, epilogue)
    rest = f"const int32_t lanes = {outputs} - channel < {lanes} ? {outputs} - channel : {lanes};"
    return [rest, *store_lanes(sums.kind, names, 1, "lanes", epilogue)]


def _convolution(region: Region, scope: Scope, lanes: int) -> Body:
    """A convolution or fully connected layer: weights in blocks of `lanes` outputs, side by side for each tap."""
    products = _products(region, scope)
    window, weights = products.window, products.weights
    for name in region.anchor.inputs[2:] if region.anchor else ():
        scope.known(name)
    sums, (outputs, rows, columns, depth) = sums_of(region, weights, products.zero_points), weights.shape
    blocked = _blocked(sums.weights, lanes)
    tap = total(product(_tap(window, ROW), columns), _tap(window, COLUMN))
    first = total(f"channel * {rows * columns * depth}", product(f"({tap})", depth * lanes))
    share = outputs // (window.channels // depth)
    group = "0" if depth == window.channels else product(f"(channel / {share})", depth)
    taken_off = sums.pad_value if window.any_padded else 0
    step = [
        f"const int32_t value = {total('from[element]', -taken_off)};",
        _multiplied(sums, "value", _load(f"tap + {product('element', lanes)}", "int32_t", lanes), lanes),
    ]
    held, kind = scope.constant("sums", "weights", blocked), c_type(DType.of(blocked.dtype))
    lines = [
        _from(region, scope, window, group),
        f"__global const {kind} *tap = {held} + {first};",
        *loop("element", depth, step),
    ]
    body = [_started(scope, sums, window, lanes), *_taps(window, lines), *_stored(region, scope, sums, lanes)]
    size = (-(-outputs // lanes), window.outputs[COLUMN], window.batch * window.outputs[ROW])
    return Body([*_pixel(window, outputs, lanes), *body], size)


def _blocked(weights: Array, lanes: int) -> Array:
    """Weights [outputs, KH, KW, depth] in blocks of `lanes` outputs; part-empty blocks hold zeros."""
    whole = np.pad(weights, ((0, -len(weights) % lanes), (0, 0), (0, 0), (0, 0)))
    return whole.reshape(-1, lanes, *weights.shape[1:]).transpose(0, 2, 3, 4, 1).reshape(-1)


def _depthwise(region: Region, scope: Scope, lanes: int) -> Body:
    """A depthwise convolution: every lane multiplies its own channel."""
    products = _products(region, scope)  # weights [C, KH, KW, 1]
    window, channels = products.window, len(products.weights)
    for name in region.anchor.inputs[2:] if region.anchor else ():
        scope.known(name)
    sums = sums_of(region, products.weights, products.zero_points)
    weights = scope.constant("sums", "weights", sums.weights[..., 0].transpose(1, 2, 0).reshape(-1))
    tap = total(product(_tap(window, ROW), window.kernel[COLUMN]), _tap(window, COLUMN))
    taken_off = sums.pad_value if window.any_padded else 0
    value = total(_load("from", "int32_t", lanes), -taken_off)
    weight = _load(total(weights, product(f"({tap})", channels), "channel"), "int32_t", lanes)
    step = [_from(region, scope, window, "channel"), _multiplied(sums, f"({value})", weight, lanes)]
    body = [_started(scope, sums, window, lanes), *_taps(window, step), *_stored(region, scope, sums, lanes)]
    size = (channels // lanes, window.outputs[COLUMN], window.batch * window.outputs[ROW])
    return Body([*_pixel(window, channels, lanes), *body], size)


def _pool(region: Region, scope: Scope, lanes: int) -> Body:
    """A pool: every lane collects its own channel."""
    operator, kind, window = checked_pool(region)
    pooling, channels = Pooling(region, scope, window, operator), window.channels
    name, start = ("best", kind.low) if pooling.largest else ("sum", 0)
    element = _load("from", "int32_t", lanes)
    collect = f"best = max(best, {element});" if pooling.largest else f"sum += {element};"
    lines = _taps(window, [_from(region, scope, window, "channel"), collect])
    sides = (f"({window.end(axis, True)} - {window.first(axis, True)})" for axis in (ROW, COLUMN))
    head = [*_pixel(window, channels, lanes), f"const int32_t count = {' * '.join(sides)};"]
    head.append(f"{_vector('int32_t', lanes)} {name} = {start};")
    stored = store_lanes("int32_t", _lanes_of(name, lanes), 1, lanes, pooling.epilogue)
    size = (channels // lanes, window.outputs[COLUMN], window.batch * window.outputs[ROW])
    return Body([*head, *lines, *stored], size)


def _by_element(region: Region) -> bool:
    """True when every element of the result is computed by itself."""
    return region.anchor is None or type(region.anchor.operator) in MOVES


def _elements(region: Region, scope: Scope, lanes: int) -> Body:
    """Pointwise operators, alone or on elements that are moved: neighbouring elements in turn."""
    shape, count = region.output_shape, prod(region.output_shape)
    names = [f"axis_{axis}" for axis in range(len(shape))]

    def index(operand: Shape) -> str:
        """The element of an operand that broadcasts to the result."""
        if prod(operand) == count:
            return "index"
        return place_in(operand, places)

    axes = [
        f"const int32_t {name} = index / {stride} % {size};"
        for name, size, stride in zip(names, shape, row_major(shape), strict=True)
    ]
    places = [variable(name, size) for name, size in zip(names, shape, strict=True)]
    first = product("(int32_t)get_global_id(0)", lanes)
    lines = [f"const int32_t index = {total(first, variable('lane', lanes))};", *axes]
    anchor = (region.anchor.output, moved(region, scope, places)) if region.anchor else None
    lines += finish(scope, region.tree, index, anchor)
    return Body(block("", lines) if lanes == 1 else loop("lane", lanes, lines), (count // lanes, 1, 1))
