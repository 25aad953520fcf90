"""Operators that move elements, whole runs at once where nothing is computed, or take them from computed places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd, prod

import numpy as np

from dovetail.ir.layout import Layout, row_major, stored_shape
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.movement import (
    Concat,
    Gather,
    Im2col,
    Pad,
    Pick,
    Relayout,
    Resample,
    Reshape,
    Slice,
    Transpose,
)
from dovetail.ir.types import Box, DType, Shape, TensorType, box_shape, dense_steps, full_box
from dovetail.kernels.c import (
    Lines,
    block,
    c_type,
    integer,
    loop,
    nested,
    product,
    real,
    total,
    variable,
    wrapped,
)
from dovetail.kernels.elements import (
    Computed,
    Places,
    Walk,
    broadcast_walk,
    loop_names,
    merge,
    nest,
    place_in,
    walk_text,
    write_elements,
)
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import (
    Expression,
    KernelWriter,
    Turns,
    expression_of,
    refuse,
    turns_of_family,
)
from dovetail.kernels.moved_words import TYPES, MovedRows, bytes_moved, filled, pad_rows, patch_rows
from dovetail.kernels.pointwise import flipped
from dovetail.kernels.registry import TURNS, kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.window import COLUMN, ROW, Nest, anchored, window_of

SHORT = 8
"""Runs below this many bytes are copied element by element: a call costs more."""
_WRITTEN_OUT = {"short": 8, "middle": 16}
"""Lengths of a run, in elements, up to which one compiler or another writes a copy of known size out."""
_LINE = 16
"""Bytes that a turn of memcpy takes."""
_LEAST_ROW = 4
"""Bytes of a row of a padded result that is moved in words."""
_GAP = 64
"""Bytes between rows that are filled by statements of their own; of a run that is never moved byte by byte."""


def _boxes(scope: KernelScope) -> Iterator[tuple[int, Box, Walk]]:
    """The boxes of a moved result: the operand each comes from, and how that is walked."""
    for piece in scope.node.operator.pieces(scope.types) or ():
        dense = dense_steps(scope.type(piece.operand).shape)
        start = sum(first * stride for first, stride in zip(piece.start, dense, strict=True)) if piece.start else 0
        walks = tuple(step * dense[axis] for axis, step in piece.walks) or dense_steps(box_shape(piece.box))
        yield piece.operand, piece.box, Walk(walks, start)


def _padded(scope: KernelScope) -> Iterator[tuple[int, Box, Walk]]:
    """The one box of a padded result that comes from the operand."""
    shape = scope.type(0).shape
    box = tuple((lead, lead + size) for lead, size in zip(scope.node.expect(Pad).before, shape, strict=True))
    yield 0, box, Walk(dense_steps(shape))


def _copy(scope: KernelScope, position: int, box: Box, source: Walk) -> Lines:
    """The loops that fill `box` of the result from an operand of the anchor, the pointwise tree applied."""
    kind, result = scope.type(position).dtype, scope.output_shape
    refuse(
        kind.bits < 8 and scope.node.inputs[position] in scope.graph.constants,
        f"a constant of {kind.text} is not moved on the core.",
    )
    name = scope.operand(position, "other" if position else "input")
    if not scope.tree:
        walks = [broadcast_walk(result, result, box), source]
        *outer, (count, strides) = merge(box_shape(box), walks) or [(1, (1, 1))]
        size = count * kind.numpy.itemsize
        if strides == (1, 1) and size >= SHORT:
            to, start = (walk_text(number, walk.start, outer) for number, walk in enumerate(walks))
            lines = [f"__builtin_memcpy({total('output', to)}, {total(name, start)}, {size});"]
            return nested(zip(loop_names(len(outer)), [count for count, _ in outer], strict=True), lines)
    return _computed(scope, box, lambda text: expression_of(scope.read(name, text), kind), source)


def _computed(scope: KernelScope, box: Box, value: Callable[[str], Expression], source: Walk | None) -> Lines:
    """The loops that fill `box` with the pointwise tree of `value` at the source's index."""
    return nest(scope, scope.output_shape, box, lambda index, text: finish(scope, index, value(text)), source)


def _fill(scope: KernelScope, kind: TensorType, number: float) -> Lines:
    """The whole result set to what the pointwise tree makes of one value."""
    if kind.dtype is DType.FLOAT32:
        element = Expression(real(number), "float")
    elif not scope.tree and kind.dtype.bits <= 8:
        return [f"__builtin_memset(output, {int(number) & 255}, {prod(scope.output_shape)});"]
    else:
        element = Expression(integer(int(number)), "int32_t", int(number), int(number))
    return _computed(scope, full_box(scope.output_shape), lambda _: element, None)


@kernel(Transpose, Reshape, Slice, Concat)
def _movement(scope: KernelScope, operator: Operator) -> KernelWriter:
    return scope.writer(lambda: flipped(scope) or [line for box in _boxes(scope) for line in _copy(scope, *box)])


def _byte_rows(scope: KernelScope, box: Box, source: Walk) -> tuple[int, int, int, int] | None:
    """The rows of bytes that a padded result has of its operand: where the first begins, how many, bytes of each, and
    from one to the next; None where they are no such rows."""
    result = scope.output_shape
    to = broadcast_walk(result, result, box)
    *outer, (size, strides) = merge(box_shape(box), [to, source]) or [(1, (1, 1))]
    least = _LEAST_ROW if scope.core.aligned else SHORT
    if scope.tree or scope.type(0).dtype.bits != 8 or strides != (1, 1) or size < least or len(outer) != 1:
        return None
    ((rows, (pitch, _)),) = outer
    ends_later = to.start + rows * pitch > prod(result)  # where the next row would begin
    return None if ends_later else (to.start, rows, size, pitch)


def _lie_apart(scope: KernelScope, rows: tuple[int, int, int, int] | None) -> bool:
    """Whether the rows of a padded result are put together in words that lie otherwise in the operand."""
    return rows is not None and scope.core.aligned > 0 and any(number % 4 for number in (rows[0], *rows[2:]))


def _bordered(scope: KernelScope, rows: tuple[int, int, int, int], value: int) -> Lines:
    """Rows of bytes, with a value before the first, between them and behind the last."""
    start, count, size, pitch = rows
    kind, name, outer = c_type(scope.type(0).dtype), scope.operand(0, "input"), [(count, (pitch, size))]
    gap = pitch - size
    behind = start + count * pitch

    def some(place: str, count: int) -> Lines:
        if 0 < count <= _LINE:  # a call costs more
            return [f"{{ {kind} *gap = {place}; {' '.join(f'gap[{i}] = {value};' for i in range(count))} }}"]
        return [f"__builtin_memset({place}, {value & 255}, {count});"] if count else []

    to, end = (total("output", walk_text(0, start + ahead, outer)) for ahead in (0, size))
    row = [f"__builtin_memcpy({to}, {total(name, walk_text(1, 0, outer))}, {size});", *some(end, gap)]
    lines = nested(zip(loop_names(1), [count], strict=True), row)
    if _lie_apart(scope, rows):
        moved = pad_rows(start, count, size, pitch, scope.core.aligned)
        last = [
            f"__builtin_memcpy(target, source, {size});",
            f"__builtin_memset(target + {size}, {value & 255}, {gap});",
        ]
        gaps = [last[1:] if gap > _GAP else filled(kind.ahead, size, gap, value & 255) for kind in moved.kinds]
        lines = _by_words(scope, moved, (1, count * size), lines, last, gaps, start)
    return [*some("output", start), *lines, *some(f"output + {behind}", prod(scope.output_shape) - behind)]


def _by_words(
    scope: KernelScope,
    moved: MovedRows,
    images: tuple[int, int],
    plain: Lines,
    last: Lines,
    behind: Sequence[Lines] = (),
    start: int = 0,
) -> Lines:
    """Rows moved in words where operand and result begin with one, else `plain`. `last` moves a row that would read a
    word behind the operand, which has so many `images` of so many bytes each."""
    (batch, size), name = images, scope.operand(0, "input")
    count, pitches, result = moved.within(size), moved.pitches, prod(scope.output_shape) // batch
    source, target = f"(const uint8_t *){name}", "(uint8_t *)output"
    if batch > 1:
        source, target = total(source, product("image", size)), total(target, product("image", result))
    lines = [f"const uint8_t *source = {source};", f"uint8_t *target = {total(target, start)};"]
    lines += moved.lines(count, behind)
    lines += loop("rest", moved.count - count, [*last, f"source += {pitches[0]};", f"target += {pitches[1]};"])
    fits = f"__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && (((uintptr_t){name} | (uintptr_t)output) & 3) == 0"
    types = [f"typedef {kind} __attribute__((may_alias)) {name};" for name, kind in TYPES.items() if name in str(lines)]
    by_words = block(f"if ({fits})", [*types, *loop("image", batch, lines)])
    return [*by_words[:-1], *block("} else", plain)]


@kernel(Pad)
def _pad(scope: KernelScope, operator: Pad) -> KernelWriter:
    kind = scope.type(0)

    def body() -> Lines:
        refuse(kind.dtype.bits > 32, f"Pad of {kind} is not computed on the core.")
        ((position, box, source),) = _padded(scope)
        if (rows := _byte_rows(scope, box, source)) is not None:
            return _bordered(scope, rows, int(operator.value))
        return _fill(scope, kind, operator.value) + _copy(scope, position, box, source)

    return scope.writer(body)


def _run(scope: KernelScope, length: int, channel_base: str, source: str, apart: bool = False) -> Lines:
    """Statements that take `length` neighbouring elements, behind a pointer or all the same number (`source`), to the
    result from flat index `place` on, which is at `channel_base` along its last axis; `apart`: byte by byte."""
    kind = scope.source_dtype
    number = source.lstrip("-").isdigit()
    if not scope.tree and number and kind.bits <= 8:
        return [f"__builtin_memset(output + place, {int(source) & 255}, {length});"]
    if not scope.tree and not number and apart:
        return bytes_moved("output + place", source, length * kind.numpy.itemsize)
    if not scope.tree and not number and length * kind.numpy.itemsize >= SHORT:
        return [f"__builtin_memcpy(output + place, {source}, {length * kind.numpy.itemsize});"]
    index = anchored(scope.output_shape, "place + channel", total(channel_base, "channel"))
    value = Expression(source, "int32_t", int(source), int(source)) if number else expression_of("from[channel]", kind)
    lines = finish(scope, index, value)
    head = [] if number else [f"const {c_type(kind)} *from = {source};"]
    return [*head, *block(f"for (int32_t channel = 0; channel < {length}; ++channel)", lines)]


def _im2col(scope: KernelScope, apart: bool = False) -> Lines:
    taps = Nest(scope, window_of(scope))
    window, (rows, columns) = taps.window, taps.window.kernel
    whole_rows = not window.any_padded and window.contiguous_columns
    tap_row, tap_column = taps.tap(ROW), "0" if whole_rows else taps.tap(COLUMN)
    tap = product(wrapped(total(product(tap_row, columns), tap_column)), window.channels)
    place = total(taps.output_index(rows * columns * window.channels), tap)
    source = total(scope.input(scope.source(), "input"), taps.input_index("top", "left"))
    length = window.channels * (columns if whole_rows else 1)
    lines = _run(scope, length, tap, source, apart)
    if window.any_padded:
        height, width = window.size
        inside = f"if (top >= 0 && top < {height} && left >= 0 && left < {width})"
        outside = _run(scope, length, tap, str(int(scope.pad_value)))
        lines = [*block(inside, lines)[:-1], *block("} else", outside)]
    origins = []
    for axis, (name, at) in enumerate((("top", tap_row), ("left", tap_column))):
        start = taps.origin(axis, window.stride[axis], window.before[axis])
        origins.append(f"const int32_t {name} = {total(start, product(at, window.dilation[axis]))};")
    lines = [*origins, f"const int32_t place = {place};", *lines]
    sizes = (window.batch, *window.outputs, rows, 1 if whole_rows else columns)
    return nested(zip(("image", "row", "column", "kernel_row", "kernel_column"), sizes, strict=True), lines)


def _patch_rows(scope: KernelScope) -> MovedRows | None:
    """The rows of patches that are put together in words; None where they are not."""
    if not scope.core.aligned or scope.tree or scope.source_dtype.bits != 8 or scope.compact:
        return None
    return patch_rows(window_of(scope), scope.core.aligned)


@kernel(Im2col, windowed=True)
def _patches(scope: KernelScope, operator: Im2col) -> KernelWriter:
    def body() -> Lines:
        window, moved = window_of(scope), _patch_rows(scope)
        plain = _im2col(scope, moved is None and _by_bytes(scope))
        if moved is None:
            return plain
        pitch, run = window.size[1] * window.channels, window.kernel[1] * window.channels
        begun, last = moved.begun(window.size[0] * pitch, window.kernel[0] * run)
        place = f"source + column * {window.stride[1] * window.channels} + tap * {pitch}"
        copied = bytes_moved(f"target + (column * {window.kernel[0]} + tap) * {run}", place, run)
        last = [*last, *loop("column", window.outputs[1], loop("tap", window.kernel[0], copied), begun)]
        return _by_words(scope, moved, (window.batch, window.size[0] * pitch), plain, last)

    return scope.writer(body)


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
def _pick(scope: KernelScope, operator: Pick) -> KernelWriter:
    kind = scope.type(0)

    def element(places: Places) -> Computed:
        x = scope.operand(0, "input")
        sources = [
            _picked(scope, scope.node.output, axis, chosen, at)
            for axis, (chosen, at) in enumerate(zip(operator.places, places, strict=True))
        ]
        return [], expression_of(f"{x}[{place_in(kind.shape, sources)}]", kind.dtype)

    return write_elements(scope, element)


@kernel(Gather)
def _gather(scope: KernelScope, operator: Gather) -> KernelWriter:
    axis = operator.axis
    kind, indices = (scope.graph.types[value] for value in scope.node.inputs)
    middle = axis + len(indices.shape)

    by_rows = middle < len(scope.output_shape) and kind.shape[axis] > 1

    def taken(places: Places) -> Lines:
        table = scope.operand(1, "indices")
        index = f"{table}[{place_in(indices.shape, places[axis:middle])}]"
        return [f"const int32_t taken = gathered({index}, {kind.shape[axis]});"]

    def element(places: Places) -> Computed:
        x = scope.operand(0, "input")
        if kind.shape[axis] == 1:
            only = place_in(kind.shape, (*places[:axis], "0", *places[middle:]))
            return [], expression_of(f"{x}[{only}]", kind.dtype)
        source = place_in(kind.shape, (*places[:axis], "taken", *places[middle:]))
        return [] if by_rows else taken(places), expression_of(f"{x}[{source}]", kind.dtype)

    return write_elements(scope, element, row=taken if by_rows else None)


@kernel(Resample)
def _resample(scope: KernelScope, operator: Resample) -> KernelWriter:
    axes, kind = operator.axes, scope.type(0)
    taps = [scope.known(value) for value in scope.node.inputs[1:]]
    real = kind.dtype is DType.FLOAT32
    share = 1 if real else prod(int(np.abs(weights).sum(axis=1).max(initial=0)) for weights in taps[1::2])
    reach = 0 if real else share * max(-kind.dtype.low, kind.dtype.high)
    refuse(reach >= 1 << 31, f"sums of up to {reach} do not fit 32 bits.")

    def element(places: Places) -> Computed:
        x = scope.operand(0, "input")
        source, factors, loops = list(places), [], []
        for number, (axis, sources, weights) in enumerate(zip(axes, taps[::2], taps[1::2], strict=True)):
            name, count = f"tap_{number}", sources.shape[1]
            tap = total(product(places[axis], count), variable(name, count))
            source[axis] = f"{scope.constant(scope.node.output, f'places_{axis}', sources)}[{tap}]"
            factors.append(f"{scope.constant(scope.node.output, f'weights_{axis}', weights)}[{tap}]")
            loops.append((name, count))
        lines = [f"sum += {x}[{place_in(kind.shape, source)}] * ({' * '.join(factors) or '1'});"]
        lines = nested(loops, lines)
        held, start = ("float", "0.0f") if real else ("int32_t", "0")
        return [f"{held} sum = {start};", *lines], Expression("sum", held, -reach, reach)

    return write_elements(scope, element)


@kernel(Concat, Slice, Transpose, table=TURNS)
def _moved_turns(scope: KernelScope) -> Turns:
    return _turns(scope, _boxes(scope), 0)


@kernel(Pad, table=TURNS)
def _padded_turns(scope: KernelScope) -> Turns:
    ((_, box, source),) = _padded(scope)
    rows = _byte_rows(scope, box, source)
    inside = prod(box_shape(box)) if rows is not None else 0
    apart = 1.5 if _lie_apart(scope, rows) else 0
    return _turns(scope, _padded(scope), scope.result.elements - inside, apart)


def _turns(scope: KernelScope, boxes: Iterator[tuple[int, Box, Walk]], filled: int, apart: float = 0) -> Turns:
    """Runs of neighbouring bytes, word by word where all begin with one; short ones, and what is computed from, element
    by element. Where bytes are moved in words that lie otherwise, each counts as `apart` others, a row as none."""
    result, size = scope.result, scope.result.dtype.numpy.itemsize
    counts = defaultdict[str, float](float, {"call": 1, **({"filled": filled * size} if filled else {})})
    for _, box, source in boxes:
        *outer, (count, strides) = merge(
            box_shape(box), walks := (broadcast_walk(result.shape, result.shape, box), source)
        ) or [(1, (1, 1))]
        rows = prod(times for times, _ in outer)
        own: dict[str, float] = {"byte": rows * count * size * apart}
        if not apart:
            distances = [size * (walks[0].start - source.start), *(size * (to - at) for _, (to, at) in outer)]
            own = _run_turns(scope, rows, count, strides == (1, 1), _alike(distances))
        for part, number in own.items():
            counts[part] += number
    return turns_of_family("move", counts)


def _run_turns(scope: KernelScope, rows: int, count: int, is_dense: bool, alike: float) -> dict[str, float]:
    """The parts of so many runs of `count` elements, a share of which begins `alike` in words."""
    run = count * scope.result.dtype.numpy.itemsize
    if scope.tree or not is_dense or run < SHORT:
        return {"element" if is_dense else "strided": rows * count, "row": rows}
    if length := next((name for name, most in _WRITTEN_OUT.items() if count <= most), ""):
        return {f"{length}_run": rows, f"{length}_byte": rows * run}
    nbytes = float(rows * run)
    return {"run": rows, "byte": nbytes * alike, "odd_byte": nbytes * (1 - alike), "tail": rows * (run % _LINE)}


_BYTES = 1.15
"""Bytes of a long run that take as long as one instruction."""


@kernel(Im2col, table=TURNS)
def _patch_turns(scope: KernelScope) -> Turns:
    window, moved = window_of(scope), _patch_rows(scope)
    images = window.batch * window.outputs[0]
    if moved is not None:
        cycles = images * sum(kind.cycles for kind in moved.kinds) / len(moved.kinds)
        return turns_of_family("move", {"call": 1, "byte": cycles * _BYTES})
    ((count, rows), alike), runs = _patch_runs(scope), images * window.outputs[1]
    own = {"byte": runs * rows * (2 * count + 6.4) * _BYTES}
    own = own if _by_bytes(scope) else _run_turns(scope, runs * rows, count, True, alike)
    return turns_of_family("move", {"call": 1, **own})


def _patch_runs(scope: KernelScope) -> tuple[tuple[int, int], float]:
    """Elements of a run of a patch, runs of a patch, and the share that begins alike in words."""
    window, size = window_of(scope), scope.result.dtype.numpy.itemsize
    (height, columns), channels = window.kernel, window.channels
    whole, run = not window.any_padded and window.contiguous_columns, columns * channels
    steps = run - window.size[1] * channels, height * run - window.stride[1] * channels
    return (run, height) if whole else (channels, height * columns), _alike([0, *(size * step for step in steps)])


def _by_bytes(scope: KernelScope) -> bool:
    """Whether runs of patches lie so in words that memcpy takes longer than bytes moved one by one."""
    ((count, _), alike), core = _patch_runs(scope), scope.core
    size = count * scope.result.dtype.numpy.itemsize
    in_words = size < SHORT or (alike == 1 and (size % 4 == 0 or size >= _GAP))
    return core.aligned > 0 and not (scope.tree or scope.compact or in_words)


def _alike(distances: Sequence[int]) -> float:
    """The share of runs that begin at the same place in a word as where they go: how far the first is from there, and
    how much farther each turn of the loops around it; bytes."""
    step = gcd(4, *distances[1:])
    return step / 4 if distances[0] % step == 0 else 0.0


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

    def body() -> Lines:
        if (run := _common_run(scope)) * scope.result.dtype.numpy.itemsize >= SHORT:
            return _runs_moved(scope, source, run)
        return nested([(f"axis_{axis}", size) for axis, size in enumerate(shape)], one())

    return scope.writer(body, one)


def _common_run(scope: KernelScope) -> int:
    """Elements side by side along one axis in operand and result alike, as many as divide the axis."""
    (source,), shape = scope.node.inputs, scope.output_shape
    one, other = (scope.layouts.get(value, row_major(len(shape))) for value in (source, scope.node.output))
    if scope.tree or one.dims[-1] != other.dims[-1] or one.packed or other.packed or one.backwards or other.backwards:
        return 1
    return gcd(shape[one.dims[-1][0]], stored_shape(one, shape)[-1], stored_shape(other, shape)[-1])


def _runs_moved(scope: KernelScope, source: str, run: int) -> Lines:
    """A relayout in runs of elements; in words where the core wants these aligned, and operand and result are."""
    shape, plain, name = scope.output_shape, row_major(len(scope.output_shape)), scope.input(source, "input")
    axis, nbytes = scope.layouts.get(source, plain).dims[-1][0], run * scope.result.dtype.numpy.itemsize
    loops = [(f"axis_{number}", size) for number, size in enumerate(shape)]
    loops[axis] = "run", shape[axis] // run
    places = [variable(*one) for one in loops]
    places[axis] = f"({places[axis]} * {run})"
    to, at = (
        total(base, element_text(scope.layouts.get(value, plain), shape, places))
        for base, value in (("output", scope.node.output), (name, source))
    )
    lines = nested(loops, [f"__builtin_memcpy({to}, {at}, {nbytes});"])
    if not scope.core.aligned or nbytes % 4:
        return lines
    words = f"__builtin_memcpy(__builtin_assume_aligned({to}, 4), __builtin_assume_aligned({at}, 4), {nbytes});"
    by_words = block(f"if ((((uintptr_t){name} | (uintptr_t)output) & 3) == 0)", nested(loops, [words]))
    return [*by_words[:-1], *block("} else", lines)]
