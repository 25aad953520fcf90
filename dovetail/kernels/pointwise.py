"""Kernels of pointwise operators alone: loops over whole arrays, with shorter statements for some of them.

Floats become 8 bits without floating point: what a float gives is looked up by its exponent and first mantissa bits.
Quantising never falls as its operand grows, so the floats that share sign, exponent and so many mantissa bits give one
value, or two neighbouring ones with a step between. Which values and where is found at compile time with the operator's
own arithmetic, by bisection, and so is exact for every float. One word holds both: added to the mantissa bits that are
left, it carries into the value from the step on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from msgspec.structs import asdict

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Offset, Quantize, Requantize
from dovetail.ir.operators.elementwise import Compare, CompareKind
from dovetail.ir.requantisation.bounds import last_where
from dovetail.ir.requantisation.pairs import LinearSum, SumChain, sum_chains
from dovetail.ir.requantisation.rectified import rectified_sum
from dovetail.ir.types import Array, DType, Shape, full_box
from dovetail.kernels.c import Lines, c_type, channel_lanes, code, indent, loop, times, total, variable
from dovetail.kernels.elements import nest
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import KernelWriter
from dovetail.kernels.registry import ENDINGS, kernel
from dovetail.kernels.requantise import fixed_point_call
from dovetail.kernels.scope import REQUANTISED, KernelScope
from dovetail.records import Record
from dovetail.target.pattern import Match, Pattern, apply, constant, operand

_BYTES = (DType.INT8, DType.UINT8)
_INT8 = DType.INT8.low, DType.INT8.high
_FLIPPED = 64
"""Bytes `flip_signs` takes."""
_FLIPS = 4
"""Calls of it in one turn, where there are several such turns."""
_LEAST_ROWS = 8
"""Rows from which walking down a channel pays."""
_TURN = 4
ADD_BYTES = "add_bytes"
"""The loop of additions of cores that compute it in their own way."""
_ADD_SHIFT = 21
"""Its shift."""
_MOST_SHIFT = 24
_MOST_PLACES = 2048
"""Most entries of a table of limited results."""
_LEAST = 256
"""Elements from which tables of 10 to 20 KiB pay."""
_MANTISSA = 23
_INFINITY = 0x7F800000
_BITS = (7, 8)
"""Mantissa bits that may be part of the place in the tables."""


def _matched(scope: KernelScope, pattern: Pattern) -> Match | None:
    """The whole region as a pattern on a run-time operand `x` that gives bytes; None where it is another."""
    match = scope.whole(pattern)
    if match is None or match.result.dtype not in _BYTES or match.values["x"] in scope.graph.constants:
        return None
    return None if scope.layouts else match


_OFFSET = apply(Offset)


def flipped(scope: KernelScope) -> Lines | None:
    """The sign flip, int8 + 128 as uint8 and back: XOR of whole words, which 8-byte aligned arrays load and store in
    one instruction each."""
    moved = scope.anchor is None or scope.anchor.operator.is_view
    if len(scope.tree) != 1 or not moved or scope.layouts or not _OFFSET.fits(scope.tree[0]):
        return None
    (node,), types = scope.tree, scope.graph.types
    source, result = (scope.anchor or node).inputs[0], types[node.output]
    if {types[node.inputs[0]].dtype, result.dtype} != set(_BYTES) or source not in scope.graph.inputs:
        return None
    name, count = scope.input(source), result.elements
    whole, words_end = count - count % _FLIPPED, count - count % 4
    together = _FLIPPED * _FLIPS
    several = count - count % together if count > _FLIPS * together else 0
    lines = code(f"""
        const uint8_t *from = __builtin_assume_aligned({name}, 8);
        uint8_t *to = __builtin_assume_aligned(output, 8);
    """)
    for start, end, step in ((0, several, together), (several, whole, _FLIPPED)):
        places = [total("index", place) for place in range(0, step, _FLIPPED)]
        lines += loop("index", end, [f"flip_signs(to + {place}, from + {place});" for place in places], start, step)
    word = code("""
        uint32_t word;
        __builtin_memcpy(&word, from + index, 4);
        word ^= 0x80808080u;
        __builtin_memcpy(to + index, &word, 4);
    """)
    lines += loop("index", words_end, word, whole, 4)
    return lines + loop("index", count, ["to[index] = (uint8_t)(from[index] ^ 0x80u);"], words_end)


def _rectified(scope: KernelScope) -> Lines | None:
    """A requantisation of int32 in memory that cuts off at the zero point: one channel after the other, constants in
    registers. Engines of 32-bit sums leave such regions to the core. Most of the work is a comparison or two
    (`dovetail.ir.requantisation.rectified`)."""
    match = _matched(scope, REQUANTISED)
    if match is None:
        return None
    kind, limits = match.type("x"), match.nodes["clip"].operator.limited_to
    assert limits is not None
    channels = kind.shape[-1] if kind.shape else 0
    if kind.dtype is not DType.INT32 or kind.elements < _LEAST_ROWS * channels:
        return None
    operator = match.operator("requantize", Requantize)
    numbers = rectified_sum(operator, limits, match.array("multiplier"), match.array("shift"))
    if numbers is None:
        return None
    rows, source = kind.elements // channels, scope.input(match.values["x"])
    names = {
        stem: scope.constant(match.nodes["requantize"].output, stem, np.broadcast_to(array, channels))
        for stem, array in asdict(numbers).items()
    }
    stored, turn = c_type(match.result.dtype), channel_lanes(rows, _TURN)
    one = code(f"""
        const int32_t *from = {source} + row * {channels} + channel;
        {stored} *to = output + row * {channels} + channel;
    """)
    one += [f"const uint32_t sum_{lane} = (uint32_t)from[{lane * channels}];" for lane in range(turn)]
    for lane in range(turn):
        value, to = f"sum_{lane}", f"to[{lane * channels}] = ({stored})"
        upper = f"(uint32_t)(((uint64_t)(2u * {value}) * factor) >> 32)"
        one += code(f"""
            if (__builtin_expect({value} <= most, 1)) {{
                {to}({total(f"(int32_t)(({upper} + half) >> down)", limits[0])});
            }} else {{
                {to}((int32_t){value} < 0 ? {limits[0]} : {limits[1]});
            }}
        """)
    body = code(
        f"""
        const uint32_t factor = {names["multiplier"]}[channel];
        const uint32_t most = (uint32_t){names["limit"]}[channel];
        const int32_t down = {names["shift"]}[channel];
        const uint32_t half = 1u + (1u << (down - 1));
        @rows
        """,
        rows=loop("row", rows, one, step=turn),
    )
    return loop("channel", channels, body)


_TOGETHER = 32
"""Elements of a turn of long loops."""
_STEPS = 2048
"""Bytes from an address that one instruction of RISC-V reaches."""


def in_wide_registers(scope: KernelScope) -> tuple[str, list[tuple[str, Array]]] | None:
    """The function, and its constant arguments, of a requantisation of int32 in memory that stays int32, on a core
    whose registers hold a product; None for other regions."""
    match = scope.whole(apply(Requantize, operand("x"), constant("multiplier"), constant("shift")))
    if match is None or scope.layouts or not scope.core.wide or match.values["x"] in scope.graph.constants:
        return None
    operator, kind = match.operator("requantize", Requantize), match.type("x")
    if operator.input_zero_point or operator.output_zero_point or operator.left_shift or kind.dtype is not DType.INT32:
        return None
    found = fixed_point_call(operator, match.array("multiplier"), match.array("shift"), False, False)
    return found if found[0] in _WIDE and prod(kind.shape[:-1]) >= _LEAST_ROWS else None


def _in_wide_registers(scope: KernelScope) -> Lines | None:
    """Some channels at a time, whose numbers stay in registers, and several rows a turn."""
    found = in_wide_registers(scope)
    if found is None:
        return None
    (function, constants), shape = found, scope.output_shape
    rows, channels = prod(shape[:-1]), shape[-1]
    lanes = channel_lanes(channels, _TURN)
    turn = channel_lanes(rows, min(max(_STEPS // (4 * channels), 1), _TOGETHER // lanes))
    lines, zero = Lines(), ", 0" if function == _WIDE[1] else ""
    for stem, array in constants:
        name = scope.constant(scope.graph.outputs[0], stem, np.broadcast_to(array, channels))
        kind = c_type(DType.of(array.dtype))
        lines += [f"const {kind} {stem}_{lane} = {name}[{total('channel', lane)}];" for lane in range(lanes)]
    one = [f"const int32_t *from = {scope.input(scope.graph.inputs[0])} + (row * {channels} + channel);"]
    one += [f"int32_t *to = output + (row * {channels} + channel);"]
    places = [(row * channels + lane, lane) for row in range(turn) for lane in range(lanes)]
    for first in range(0, len(places), _TURN):  # some loads, then their stores, which may be to where an operand is
        part = [*enumerate(places[first : first + _TURN], first)]
        one += [f"const int32_t sum_{number} = from[{place}];" for number, (place, _) in part]
        for number, (place, lane) in part:
            one.append(f"to[{place}] = {function}(sum_{number}, multiplier_{lane}, shift_{lane}{zero});")
    return loop("channel", channels, [*lines, *loop("row", rows, one, step=turn)], step=lanes)


_WIDE = ("requantize_down", "requantize_double")
"""Requantisations that are a product and a shift in registers of 64 bits."""


def _addition(scope: KernelScope) -> Lines | None:
    """A residual addition of two arrays of int8 as a line (`SumChain`), a loop for all layers. Cores that have none of
    their own limit the sums by a table, which takes as long for every sum."""
    graph, result = scope.graph, scope.graph.types[scope.graph.outputs[0]]
    if scope.layouts or result.dtype is not DType.INT8:
        return None
    line = sum_chains(graph, scope.tree).get(graph.outputs[0])
    if line is None or len(line.nodes) + 1 != len(scope.tree) or len(line.operands) != 2:
        return None
    if any(graph.types[name] != result or name not in graph.inputs for name in line.operands):
        return None
    start = f"output, {', '.join(map(scope.input, line.operands))}, {result.elements}"
    if linear := line_of_bytes(scope, line):
        return [f"{ADD_BYTES}({start}, {', '.join(map(str, (*linear.factors, linear.offset)))});"]
    linear = line.linear(graph, [_INT8] * 2, _MOST_SHIFT)
    if linear is None or linear.high - linear.low >= _MOST_PLACES or not linear.low <= 0 <= linear.high:
        return None
    results = np.clip(np.arange(linear.low, linear.high + 1), *line.limits).astype(np.int8)
    table = total(scope.constant(line.clip.output, "limited", results), -linear.low)
    return [f"add_by_table({start}, {', '.join(map(str, (*linear.factors, linear.offset, linear.shift, table)))});"]


_UP_TO = apply(Compare, constant("places"), operand("x"))


def _places_up_to(scope: KernelScope) -> Lines | None:
    """Which places are up to a number, a row of them for each number: ones, and then zeros."""
    match, shape = scope.whole(_UP_TO), scope.output_shape
    if match is None or scope.layouts or match.operator("compare", Compare).kind is not CompareKind.LESS_OR_EQUAL:
        return None
    count, kind = shape[-1] if shape else 0, match.type("x")
    in_order = np.array_equal(match.array("places").reshape(-1), np.arange(count))
    each = match.array("places").shape[-1:] == shape[-1:] and kind.shape == (*shape[:-1], 1)
    if not in_order or not each or count % 4 or kind.dtype not in (DType.INT32, DType.INT64):
        return None
    store = ["__builtin_memcpy(to + at, &{word}, 4);", "in_order();"]
    row = code(
        f"""
        const {c_type(kind.dtype)} last = {scope.input(match.values["x"])}[{variable("row", prod(shape[:-1]))}];
        const int32_t ones = last < 0 ? 0 : (last >= {count} ? {count} : (int32_t)last + 1);
        uint8_t *to = __builtin_assume_aligned(output + {times(variable("row", prod(shape[:-1])), count)}, 4);
        const uint32_t whole = 0x01010101u, none = 0u, part = whole & ((1u << (8 * (ones & 3))) - 1u);
        int32_t at = 0;
        for (; at < (ones & ~3); at += 4) {{
            @whole
        }}
        if (at < {count}) {{
            @part
            at += 4;
        }}
        for (; at < {count}; at += 4) {{
            @none
        }}
        """,
        **{name: [line.replace("{word}", name) for line in store] for name in ("whole", "part", "none")},
    )
    return loop("row", prod(shape[:-1]), row)


def line_of_bytes(scope: KernelScope, line: SumChain) -> LinearSum | None:
    """The line of two operands of int8 that the core's own `ADD_BYTES` computes; None where it does not."""
    if ADD_BYTES not in scope.core.functions or line.limits != _INT8:
        return None
    linear = line.linear(scope.graph, [_INT8] * 2, _ADD_SHIFT)
    fits = linear is not None and linear.shift == _ADD_SHIFT and max(map(abs, linear.factors)) < 1 << 23
    return linear if fits else None


class QuantisationTable(Record):
    """The tables that quantise floats."""

    starts: Array
    """int32 [512]: by sign and exponent, what leads from a float's bits less `rest` of them to its word."""
    words: Array
    """uint32: a word for each value of the mantissa's first bits."""
    rest: int
    """Mantissa bits behind those."""


def steps_of(scale: float, zero_point: int, dtype: DType) -> QuantisationTable | None:
    """The tables of a scale and a zero point; None where floats that share a word give more than two values."""
    if not 0.0 < scale < float("inf"):
        return None
    divisor = np.float32(scale)

    def quantised(bits: Array) -> Array:
        """The integers that floats of these bits give, as the core's kernels compute them: NaN is the least value."""
        floats = bits.astype(np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            steps = np.rint(floats / divisor).astype(np.float64) + zero_point
        return np.where(np.isnan(steps), dtype.low, np.clip(steps, dtype.low, dtype.high)).astype(np.int64)

    for bits in _BITS:
        if (words := _words(quantised, bits)) is not None:
            break
    else:
        return None
    kept: dict[bytes, int] = {}
    starts = [kept.setdefault(row.tobytes(), len(kept)) << bits for row in words]
    rows = [np.frombuffer(row, np.uint32) for row in kept]
    return QuantisationTable(
        (np.array(starts) - (np.arange(512) << bits)).astype(np.int32), np.concatenate(rows), _MANTISSA - bits
    )


def _words(quantised: Callable[[Array], Array], bits: int) -> Array | None:
    """The word of each sign, exponent and first `bits` of the mantissa, uint32 [512, 2**bits]."""
    rest = _MANTISSA - bits
    start = np.arange(1 << (9 + bits), dtype=np.int64) << rest
    negative, last = start >> 31 == 1, (1 << rest) - 1
    first, final = quantised(start), quantised(start + last)
    not_numbers = start == _INFINITY  # from infinity to NaN: a step up as well, as bytes
    if np.any((np.abs(final - first) > 1) & ~not_numbers):
        return None
    before = last_where(lambda bits: quantised(start + bits) == first, np.zeros_like(start), last - 1, rest)
    high = before + 1  # the first float behind the step
    carried = np.where(first == final, 0, np.where(negative, high, (1 << rest) - high))
    known = np.where(negative, ~(start + last), start)  # of the bits the core adds
    value = np.where(negative, final, first) << rest
    return ((value + carried - known) & ((256 << rest) - 1)).astype(np.uint32).reshape(512, -1)


_QUANTISED = apply(Quantize, operand("x"), constant("scale"), constant("zero_point"))


@kernel(Quantize, table=ENDINGS)
def _quantise_ending(graph: Graph, node: Node) -> str:
    """The part that quantising floats is: by tables, or one by one, which few are."""
    return "Quantize" if graph.types[node.output].elements >= _LEAST else "Quantize_few"


def _quantised(scope: KernelScope) -> Lines | None:
    """An array quantised to 8 bits by one scale."""
    match = _matched(scope, _QUANTISED)
    if match is None or match.result.elements < _LEAST or (scale := match.array("scale")).size != 1:
        return None
    steps = steps_of(float(scale[0]), int(match.array("zero_point")[0]), match.result.dtype)
    if steps is None:
        return None
    source = scope.input(match.values["x"])
    tables = ", ".join(scope.constant(match.root, *one) for one in (("starts", steps.starts), ("steps", steps.words)))
    return [f"quantize_bytes((uint8_t *)output, {source}, {match.result.elements}, {tables}, {steps.rest});"]


def _by_bytes(scope: KernelScope) -> Lines | None:
    """The loop over whole bytes of what shares them, where all operands are of the result's shape or one element: each
    byte is read and written once."""
    count = prod(scope.output_shape)
    packed = [layout.fields for layout in scope.layouts.values() if layout.packed]
    step = max(packed, default=1)
    shapes: list[Shape] = []

    def one(lane: int) -> Lines:
        """The statements of an element of a turn."""

        def index(operand: Shape) -> str:
            shapes.append(operand)
            return "0" if prod(operand) == 1 else total("index", lane)

        scope.turn = lane
        return ["{", *indent(finish(scope, index, None)), "}"]

    lines = [line for lane in range(step) for line in one(lane)]
    scope.turn = None
    if step == 1 or count % step or any(prod(each) not in (1, count) for each in shapes):
        return None
    output = scope.layouts.get(scope.graph.outputs[0])
    if output is not None and output.packed:
        places, shift = range(step // output.fields), output.fields.bit_length() - 1
        lines = [*(f"uint32_t byte_{place} = 0u;" for place in places), *lines]
        lines += [f"output[{total(f'(index >> {shift})', place)}] = (uint8_t)byte_{place};" for place in places]
    return loop("index", count, lines, step=step)


def write_pointwise(scope: KernelScope) -> KernelWriter:
    """The writer of a region without an anchor."""

    def body() -> Lines:
        for form in _FORMS:
            if (lines := form(scope)) is not None:
                return lines
        shape = scope.output_shape
        return nest(scope, shape, full_box(shape), lambda index, _: finish(scope, index, None))

    return scope.writer(body, lambda: finish(scope, lambda shape: "0", None))


_FORMS = (flipped, _rectified, _in_wide_registers, _addition, _quantised, _places_up_to, _by_bytes)
"""Shorter statements for some regions of pointwise operators; each gives None for others."""
