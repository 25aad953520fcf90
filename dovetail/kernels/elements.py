"""Kernels that compute each element of the result by itself, or each row; loops over boxes of an array, as few as the
strides of what is read and written allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dovetail.ir.types import Box, Shape, dense_steps
from dovetail.kernels.c import (
    Lines,
    channel_lanes,
    identifiers,
    indent,
    loop,
    nested,
    product,
    total,
    unroll_loop,
    variable,
    wrapped,
)
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, Index, KernelWriter
from dovetail.kernels.scope import KernelScope
from dovetail.records import Record

Places = Sequence[str]
"""C texts of a place along each axis."""
Computed = tuple[Lines, Expression]
"""The statements before an element, and its value."""
PIXEL = ("image", "row", "column", "channel")
"""Loop variables of an NHWC result."""


def place_in(shape: Shape, places: Places) -> str:
    """C text of the flat index of an operand that broadcasts to axes with these places."""
    lead = len(places) - len(shape)
    terms = zip(shape, dense_steps(shape), places[lead:], strict=True)
    return total(*(product(wrapped(place), stride) for size, stride, place in terms if size > 1))


def write_elements(
    scope: KernelScope,
    element: Callable[[Places], Computed],
    names: Places = (),
    row: Callable[[Places], Lines] | None = None,
    turn: int = 1,
) -> KernelWriter:
    """The writer of a kernel with a loop for every axis of the result.

    Args:
        scope: of the region, whose anchor computes the element; its tree follows.
        element: from its place, the statements and the value of one element.
        names: loop variables; axis_0, axis_1, ... unless given.
        row: from a row's place along the outer axes, statements before the last axis' loop.
        turn: most elements of a turn of that loop, of which each is written out.
    """
    shape = scope.output_shape
    names = names or tuple(f"axis_{axis}" for axis in range(len(shape)))
    places = tuple(variable(name, size) for name, size in zip(names, shape, strict=True))
    lanes = channel_lanes(shape[-1], min(turn, scope.core.turn)) if shape else 1
    places = (*places[:-1], total(places[-1], "lane")) if lanes > 1 else places
    index: Index = lambda operand: place_in(operand, places)  # noqa: E731

    def one() -> Lines:
        lines, value = element(places)
        return [*lines, *finish(scope, index, value)]

    def body() -> Lines:
        lines, pairs = one(), list(zip(names, shape, strict=True))
        if row is not None:
            lines = [*row(places[:-1]), *loop(*pairs.pop(), unroll_loop("lane", lanes, lines), step=lanes)]
        return nested(pairs, lines)

    return scope.writer(body, one)


_NAMES = {1: ("index",), 2: ("row", "index"), 3: ("plane", "row", "index"), 4: ("image", "plane", "row", "index")}
row_major = dense_steps
"""The strides, in elements, of a dense array."""


class Walk(Record):
    """How an array is walked while a box of the result is computed."""

    strides: tuple[int, ...]
    """Elements from one step to the next along each axis of the result."""
    start: int = 0
    """Flat index at the first element of the box."""


def broadcast_walk(shape: Shape, result: Shape, box: Box) -> Walk:
    """How an operand that broadcasts to the result is walked over `box` of it."""
    shape = shape[max(len(shape) - len(result), 0) :]  # parameters of a scalar have an axis of 1
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
            size *= loops.pop()[0]
        loops.append((size, strides))
    return loops


def loop_names(count: int) -> tuple[str, ...]:
    """Names of nested loop variables, outermost first."""
    return _NAMES.get(count) or tuple(f"axis_{number}" for number in range(count))


def walk_text(walk: int, start: int, loops: Sequence[tuple[int, tuple[int, ...]]], names: Places = ()) -> str:
    """C text of the flat index of walk number `walk`; `names` of the loops' variables, by default `loop_names`."""
    names = names or loop_names(len(loops))
    terms = [product(name, strides[walk]) for name, (_, strides) in zip(names, loops, strict=True)]
    return total(*terms, start)


_COLUMNS = ("channel", "row")
"""Loop variables where channels are walked down."""
_LEAST_ROWS = 16
"""Rows from which walking down a channel pays."""
_MOST_STEP = 128
"""Elements from one row to the next up to which several rows lie within reach of one address."""


def _by_columns(loops: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
    """Whether channels are walked down one after the other, so that what all rows read of a channel is loaded once."""
    if len(loops) < 2 or loops[-2][0] < _LEAST_ROWS or max(loops[-2][1]) > _MOST_STEP:
        return False
    return any(along == 0 and across > 0 for along, across in zip(loops[-2][1], loops[-1][1], strict=True))


@dataclass
class _ColumnReads:
    """The reads of a kernel that walks down a channel: its numbers before all rows, and elements of a row before they
    are computed with, or each would wait for its load."""

    scope: KernelScope
    numbers: Lines = field(default_factory=list)
    loads: Lines = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def read(self, array: str, index: str) -> str:
        """The C identifier of an element that is read."""
        text = f"{array}[{index}]"
        if text not in self._names:
            self._names[text] = f"{array}_read" + (f"_{len(self._names)}" if self._names else "")
            lines = self.loads if _COLUMNS[1] in identifiers([index]) else self.numbers
            lines.append(f"const {self.scope.held_type(array)} {self._names[text]} = {text};")
        return self._names[text]


def nest(
    scope: KernelScope, result: Shape, box: Box, body: Callable[[Index, str], Lines], source: Walk | None = None
) -> Lines:
    """The loops over a box of the result.

    Args:
        scope: of the region.
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
    loops = merge([stop - start for start, stop in box], walks)
    names, columns = loop_names(len(loops)), None
    if not scope.layouts and _by_columns(loops):
        columns, names = _ColumnReads(scope), (*names[:-2], *_COLUMNS)
        loops[-2:] = loops[:-3:-1]
    counts = [count for count, _ in loops]
    texts = [walk_text(number, walk.start, loops, names) for number, walk in enumerate(walks)]
    turn = channel_lanes(counts[-1], scope.core.turn) if loops else 1
    if turn > 1:
        texts = [total(text, product("lane", step)) for text, step in zip(texts, loops[-1][1], strict=True)]
    with scope.reading(columns.read if columns else scope.read):
        lines = body(lambda shape: texts[shapes.index(shape)], texts[-1])
    if columns:
        lines = [*columns.loads, *(["in_order();"] if len(columns.loads) > 1 else []), *lines]
    if turn > 1:
        lines = loop(names[-1], counts.pop(), unroll_loop("lane", turn, lines), step=turn)
    if columns:
        lines = [*columns.numbers, *lines]
    lines = nested(zip(names, counts, strict=False), lines)
    if not names and len(lines) > 1:  # several nests may stand in one function, each with its own variables
        return ["{", *indent(lines), "}"]
    return lines
