"""Kernels that compute each element of the result by itself, or each row; loops over boxes, as few as strides allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.ir.operators.arithmetic import Offset
from dovetail.ir.types import Box, DType, Shape, dense_steps, full_box
from dovetail.kernels.additions import addition_lines
from dovetail.kernels.c import (
    channel_lanes,
    function,
    indent,
    loop,
    product,
    total,
    variable,
    without_unused,
    words,
    wrapped,
)
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, Index, KernelScope, KernelWriter, declarations
from dovetail.kernels.quantising import quantising_lines
from dovetail.kernels.rectified import rectified_lines
from dovetail.kernels.region import RegionParts

_TURN = 4
"""Elements per turn of the innermost loop."""
_NAMES = {1: ("index",), 2: ("row", "index"), 3: ("plane", "row", "index"), 4: ("image", "plane", "row", "index")}


@dataclass(frozen=True)
class Walk:
    """How an array is walked while a box of the result is computed."""

    strides: tuple[int, ...]
    """Elements from one step to the next along each axis of the result."""
    start: int = 0
    """Flat index at the first element of the box."""


row_major = dense_steps
"""The strides, in elements, of a dense array."""


def broadcast_walk(shape: Shape, result: Shape, box: Box) -> Walk:
    """How an operand that broadcasts to the result is walked over `box` of it."""
    lead = len(result) - len(shape)
    dense = row_major(shape)
    strides = (0,) * lead + tuple(0 if size == 1 else stride for size, stride in zip(shape, dense, strict=True))
    start = sum(span[0] * stride for span, stride in zip(box, strides, strict=True))
    return Walk(strides, start)


def merge(sizes: Sequence[int], walks: Sequence[Walk]) -> list[tuple[int, tuple[int, ...]]]:
    """Loops as (count, stride of each walk), neighbours joined wherever every walk goes on evenly."""
    loops: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(sizes):
        strides = tuple(walk.strides[axis] for walk in walks)
        if size == 1:
            continue
        if loops and loops[-1][1] == tuple(stride * size for stride in strides):
            loops[-1] = (loops[-1][0] * size, strides)
        else:
            loops.append((size, strides))
    return loops


def loop_names(count: int) -> tuple[str, ...]:
    """Names of nested loop variables, outermost first."""
    return _NAMES.get(count) or tuple(f"axis_{number}" for number in range(count))


def walk_text(walk: int, start: int, loops: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    """C text of the flat index of walk number `walk`."""
    names = loop_names(len(loops))
    terms = [product(name, strides[walk]) for name, (_, strides) in zip(names, loops, strict=True)]
    return total(*terms, start)


def nest(result: Shape, box: Box, body: Callable[[Index, str], list[str]], source: Walk | None = None) -> list[str]:
    """The loops over a box of the result.

    Args:
        result: shape of the result.
        box: the part of it to compute.
        body: writes the statements of one element from the index of operands that broadcast to the result, and the
            C text of the source's index. It is called twice, the first time to learn which operands it reads.
        source: how the anchor's operand is walked; None when there is none.
    """
    shapes: list[Shape] = [result]

    def learn(shape: Shape) -> str:
        if shape not in shapes:
            shapes.append(shape)
        return "0"

    body(learn, "0")
    walks = [broadcast_walk(shape, result, box) for shape in shapes]
    walks += [source] if source else []
    sizes = [stop - start for start, stop in box]
    loops = merge(sizes, walks)
    texts = [walk_text(number, walk.start, loops) for number, walk in enumerate(walks)]
    names = loop_names(len(loops))
    turn = channel_lanes(loops[-1][0], _TURN) if loops else 1
    if turn > 1:
        inner = [product("lane", stride) for stride in loops[-1][1]]
        texts = [total(text, lane) for text, lane in zip(texts, inner, strict=True)]
    lines = body(lambda shape: texts[shapes.index(shape)], texts[-1])
    if turn > 1:
        count = loops[-1][0]
        lines = loop(names[-1], count, loop("lane", turn, lines), step=turn)
        loops = loops[:-1]
    for name, (count, _) in reversed(list(zip(names, loops, strict=False))):
        lines = loop(name, count, lines)
    if not names and len(lines) > 1:  # several nests may stand in one function, each with its own variables
        return ["{", *indent(lines), "}"]
    return lines


Element = Callable[[Sequence[str]], tuple[list[str], Expression]]
"""From the C texts of an element's place along each axis: the statements before it, and its value."""
Row = Callable[[Sequence[str]], list[str]]
"""From the C texts of a row's place along the outer axes: the statements before its first element."""


PIXEL = ("image", "row", "column", "channel")
"""Loop variables of an NHWC result."""


def place_in(shape: Shape, places: Sequence[str]) -> str:
    """C text of the flat index of an operand that broadcasts to axes with these places."""
    lead = len(places) - len(shape)
    terms = zip(shape, row_major(shape), places[lead:], strict=True)
    return total(*(product(wrapped(place), stride) for size, stride, place in terms if size > 1))


def operand(region: RegionParts, scope: KernelScope, position: int, name: str) -> str:
    """The C identifier of an operand of the anchor, computed or constant."""
    value = region.node.inputs[position]
    if value in region.graph.constants:
        return scope.constant(value, name, region.graph.constants[value])
    return scope.input(value, name)


def write_elements(
    region: RegionParts, scope: KernelScope, element: Element, names: Sequence[str] = (), row: Row | None = None
) -> KernelWriter:
    """The writer of a kernel with a loop for every axis of the result.

    Args:
        region: its anchor computes the element, its tree follows.
        scope: the parameters.
        element: the statements and the value of one element.
        names: loop variables; axis_0, axis_1, ... unless given.
        row: statements before the last axis' loop.
    """
    shape = region.output_shape
    names = names or tuple(f"axis_{axis}" for axis in range(len(shape)))
    places = tuple(variable(name, size) for name, size in zip(names, shape, strict=True))
    index: Index = lambda operand: place_in(operand, places)  # noqa: E731

    def one() -> list[str]:
        lines, value = element(places)
        return [*lines, *finish(scope, region.tree, index, (region.node.output, value))]

    def write(name: str) -> list[str]:
        lines = one()
        for axis in reversed(range(len(shape))):
            lines = loop(names[axis], shape[axis], lines)
            if row is not None and axis == len(shape) - 1:
                lines = [*row(places[:-1]), *lines]
        lines = without_unused(lines)
        scope.keep(words(lines))
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return KernelWriter(write, one)


_BYTES = (DType.INT8, DType.UINT8)
_FLIPPED = 64
"""Bytes `flip_signs` takes."""
_FLIPS = 4
"""Calls of it in one turn, where there are several such turns."""


def _flips_sign(region: RegionParts) -> bool:
    """True for int8 + 128 as uint8 and back: each byte with its top bit inverted."""
    if len(region.tree) != 1 or not isinstance(region.tree[0].operator, Offset):
        return False
    node, types = region.tree[0], region.graph.types
    kinds = {types[node.inputs[0]].dtype, types[node.output].dtype}
    return kinds == set(_BYTES) and node.inputs[0] not in region.graph.constants


def _flip(region: RegionParts, scope: KernelScope) -> list[str]:
    """The sign flip: XOR of whole words, which 8-byte aligned arrays load and store in one instruction each."""
    node = region.tree[0]
    name = scope.input(node.inputs[0])
    count = region.graph.types[node.output].elements
    whole, words_end = count - count % _FLIPPED, count - count % 4
    together = _FLIPPED * _FLIPS
    several = count - count % together if count > _FLIPS * together else 0
    lines = [
        f"const uint8_t *from = __builtin_assume_aligned({name}, 8);",
        "uint8_t *to = __builtin_assume_aligned(output, 8);",
    ]
    for start, end, step in ((0, several, together), (several, whole, _FLIPPED)):
        places = [total("index", place) for place in range(0, step, _FLIPPED)]
        flips = [f"flip_signs(to + {place}, from + {place});" for place in places]
        lines += loop("index", end, flips, start=start, step=step) if end > start else []
    if words_end > whole:
        word = ["uint32_t word;", "__builtin_memcpy(&word, from + index, 4);", "word ^= 0x80808080u;"]
        lines += loop("index", words_end, [*word, "__builtin_memcpy(to + index, &word, 4);"], start=whole, step=4)
    if count > words_end:
        lines += loop("index", count, ["to[index] = (uint8_t)(from[index] ^ 0x80u);"], start=words_end)
    return lines


def _by_bytes(region: RegionParts, scope: KernelScope) -> list[str] | None:
    """The loop over whole bytes of what shares them, where all operands are of the result's shape or one element: each
    byte is read and written once. None for other regions."""
    count = prod(region.output_shape)
    packed = [layout.fields for layout in scope.layouts.values() if layout.packed]
    step = max(packed, default=1)
    shapes: list[Shape] = []

    def one(lane: int) -> list[str]:
        """The statements of an element of a turn."""

        def index(operand: Shape) -> str:
            shapes.append(operand)
            return "0" if prod(operand) == 1 else total("index", lane)

        scope.turn = lane
        return ["{", *indent(finish(scope, region.tree, index, None)), "}"]

    lines = [line for lane in range(step) for line in one(lane)]
    scope.turn = None
    if step == 1 or count % step or any(prod(each) not in (1, count) for each in shapes):
        return None
    output = scope.layouts.get(region.graph.outputs[0])
    if output is not None and output.packed:
        places, shift = range(step // output.fields), output.fields.bit_length() - 1
        lines = [*(f"uint32_t byte_{place} = 0u;" for place in places), *lines]
        lines += [f"output[{total(f'(index >> {shift})', place)}] = (uint8_t)byte_{place};" for place in places]
    return loop("index", count, lines, step=step)


def write_pointwise(region: RegionParts, scope: KernelScope, operator: None) -> KernelWriter:
    """The writer of a region without an anchor."""

    def write(name: str) -> list[str]:
        if _flips_sign(region):
            lines = _flip(region, scope)
        elif (rectified := rectified_lines(region, scope)) is not None:
            lines = rectified
        elif (addition := addition_lines(region, scope)) is not None:
            lines = addition
        elif (quantised := quantising_lines(region, scope)) is not None:
            lines = quantised
        elif (whole_bytes := _by_bytes(region, scope)) is not None:
            lines = whole_bytes
        else:
            whole = full_box(region.output_shape)
            lines = nest(region.output_shape, whole, lambda index, _: finish(scope, region.tree, index, None))
        return function(f"static void {name}", declarations(scope.parameters()), lines)

    return KernelWriter(write, lambda: finish(scope, region.tree, lambda shape: "0", None))
