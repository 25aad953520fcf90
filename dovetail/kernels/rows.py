"""Reductions, places of extremes, and functions of rows: softmax and normalisation, float and fixed-point."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from dovetail.ir.operators.activation import FixedSoftmax, LogSoftmax, Softmax
from dovetail.ir.operators.fixed import FixedLogSoftmax, FixedNormalise, FixedSoftmax16, FixedStandard
from dovetail.ir.operators.reduction import ArgExtreme, CumSum, Normalise, Reduce, ReduceKind
from dovetail.ir.types import DType
from dovetail.kernels.c import Lines, atom, c_type, channel_lanes, code, loop, nested, product, real, total, variable
from dovetail.kernels.elements import Computed, Places, place_in, write_elements
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, KernelWriter, Turns, expression_of, refuse, turns_of_family
from dovetail.kernels.registry import TURNS, kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.window import anchored

_TURN = 4
"""Elements of a turn."""
_SQUARES = 8
"""Squares of a turn."""


@kernel(Reduce)
def _reduction(scope: KernelScope, operator: Reduce) -> KernelWriter:
    kind, shape = scope.type(0).dtype, scope.type(0).shape
    largest, is_float = operator.kind is ReduceKind.MAXIMUM, kind is DType.FLOAT32
    extreme = largest or operator.kind is ReduceKind.MINIMUM
    held = c_type(kind) if extreme else "float" if is_float else "int32_t"
    count = prod(shape[axis] for axis in operator.axes)

    def element(places: Places) -> Computed:
        x = scope.operand(0, "input")
        along = {axis: f"along_{axis}" for axis in operator.axes}
        inner = [variable(along[axis], shape[axis]) if axis in along else place for axis, place in enumerate(places)]
        at, start = f"{x}[{place_in(shape, inner)}]", "0.0f" if is_float else "0"
        step = f"total *= {at};" if operator.kind is ReduceKind.PRODUCT else f"total += {at};"
        if operator.kind is ReduceKind.PRODUCT:
            start = "1.0f"
        if extreme:
            first = ["0" if axis in along else place for axis, place in enumerate(places)]
            start = f"{x}[{place_in(shape, first)}]"
            step = f"total = {at} {'>' if largest else '<'} total ? {at} : total;"
        if extreme and is_float:
            step = f"total = {'larger' if largest else 'smaller'}({at}, total);"
        lines = nested([(along[axis], shape[axis]) for axis in operator.axes], [step])
        return [f"{held} total = {start};", *lines], _reduced(operator, kind, count)

    return write_elements(scope, element)


def _reduced(operator: Reduce, dtype: DType, count: int) -> Expression:
    """The result of a reduction, from what was collected in `total`."""
    if dtype is DType.FLOAT32:
        return Expression(f"total / {count}.0f" if operator.kind is ReduceKind.MEAN else "total", "float")
    if operator.kind is ReduceKind.SUM:
        low, high = (count * (bound - operator.input_zero_point) for bound in (dtype.low, dtype.high))
        return Expression(total("total", -count * operator.input_zero_point), "int32_t", low, high)
    wide = dtype in (DType.INT64, DType.UINT32)
    return Expression("(int64_t)total" if wide else "total", "int64_t" if wide else "int32_t", dtype.low, dtype.high)


@kernel(CumSum)
def _running_sums(scope: KernelScope, operator: CumSum) -> KernelWriter:
    kind, shape, axis, zero_point = scope.type(0).dtype, scope.output_shape, operator.axis, operator.input_zero_point
    ends = [shape[axis] * (bound - zero_point) for bound in (kind.low, kind.high)]
    held, value = "int32_t", Expression("total", "int32_t", min(0, *ends), max(0, *ends))
    if kind is DType.FLOAT32:
        held, value = "float", Expression("total", "float")
    elif kind.bits > 16:  # sums wrap
        held = f"uint{kind.bits}_t"
        value = expression_of(f"({c_type(kind)})total", kind)

    def body() -> Lines:
        x, pairs = scope.operand(0, "input"), [(f"axis_{place}", size) for place, size in enumerate(shape)]
        places = [variable(name, size) for name, size in pairs]
        if operator.reverse:
            places[axis] = f"{shape[axis] - 1} - {places[axis]}"
        add = f"total += {total(f'{x}[{place_in(shape, places)}]', -zero_point)};"
        lines = finish(scope, lambda shape: place_in(shape, places), value)
        along = loop(*pairs.pop(axis), [*lines, add] if operator.exclusive else [add, *lines])
        return nested(pairs, [f"{held} total = 0;", *along])

    return scope.writer(body)


@kernel(ArgExtreme)
def _arg_extreme(scope: KernelScope, operator: ArgExtreme) -> KernelWriter:
    kind = scope.type(0)
    size = kind.shape[operator.axis]
    sign = (">" if operator.largest else "<") + ("=" if operator.last else "")

    def element(places: Places) -> Computed:
        if size == 1:
            return [], Expression("0", "int32_t", 0, 0)
        x = scope.operand(0, "input")
        start = place_in(kind.shape, ["0" if a == operator.axis else place for a, place in enumerate(places)])
        inner = ["along" if a == operator.axis else place for a, place in enumerate(places)]
        at = f"{x}[{place_in(kind.shape, inner)}]"
        lines = code(f"""
            {c_type(kind.dtype)} best = {x}[{start}];
            int32_t place = 0;
            for (int32_t along = 1; along < {size}; ++along) {{
                if ({at} {sign} best) {{
                    best = {at};
                    place = along;
                }}
            }}
        """)
        return lines, Expression("place", "int32_t", 0, size - 1)

    return write_elements(scope, element)


def _write_rows(
    scope: KernelScope,
    before: Callable[[int], Lines],
    element: Callable[[str], Computed | str],
    first: str = "0",
    turn: int = 1,
) -> KernelWriter:
    """The writer of a kernel that computes each row by itself.

    Args:
        scope: as `write_elements`.
        before: the statements before the first element, from the size of a row; `from` points at the operand's row.
        element: what is computed of each element then; a text alone is a float's.
        first: C text of the first element that is computed.
        turn: as `write_elements`.
    """
    kind = scope.type(0)

    def row(places: Places) -> Lines:
        start = total(scope.operand(0, "input"), place_in(kind.shape, (*places, "0")))
        return [f"const {c_type(kind.dtype)} *from = {start};", *before(kind.shape[-1])]

    def one(places: Places) -> Computed:
        computed = element(f"from[{total(places[-1], first)}]")
        return ([], Expression(computed, "float")) if isinstance(computed, str) else computed

    return write_elements(scope, one, row=row, turn=turn)


def _limited(text: str, low: int, high: int, *before: str) -> Computed:
    """An element within a range, by the name of `limited`."""
    return [*before, f"const int32_t limited = {text};"], Expression("limited", "int32_t", low, high)


def _collected(size: int, start: str, *steps: str, first: int = 0, along: str = "along") -> Lines:
    """The statements that take in the elements of a row, one after the other."""
    return [start, *loop(along, size, steps, start=first)]


def _largest(size: int, along: str = "along") -> Lines:
    """The statements that find a row's largest integer."""
    step = f"largest = from[{along}] > largest ? from[{along}] : largest;"
    return _collected(size, "int32_t largest = from[0];", step, first=1, along=along)


def _exponentials(beta: float, size: int) -> Lines:
    """The statements that find a row's largest float, and the sum of exponentials of how far each is from it."""
    step = f"largest = {'larger' if beta >= 0 else 'smaller'}(from[along], largest);"
    return [
        *_collected(size, "float largest = from[0];", step, first=1),
        *_collected(size, "float sum = 0.0f;", f"sum += exponential({_distance('from[along]', beta)});"),
    ]


def _distance(at: str, beta: float) -> str:
    """C text of how far an element is from the largest, times beta."""
    return f"{at} - largest" if beta == 1.0 else f"{real(beta)} * ({at} - largest)"


@kernel(Softmax)
def _softmax(scope: KernelScope, operator: Softmax) -> KernelWriter:
    beta = operator.beta
    return _write_rows(
        scope, lambda size: _exponentials(beta, size), lambda at: f"exponential({_distance(at, beta)}) / sum"
    )


@kernel(LogSoftmax)
def _log_softmax(scope: KernelScope, operator: LogSoftmax) -> KernelWriter:
    def before(size: int) -> Lines:
        return [*_exponentials(1.0, size), "const float logarithm_of_sum = logarithm(sum);"]

    return _write_rows(scope, before, lambda at: f"{at} - largest - logarithm_of_sum")


@kernel(Normalise)
def _normalisation(scope: KernelScope, operator: Normalise) -> KernelWriter:
    epsilon, less = real(operator.epsilon), " - mean" if operator.centred else ""

    def before(size: int) -> Lines:
        lines, centred = Lines(), f"(from[along]{less})" if less else "from[along]"
        if less:
            lines = _collected(size, "float sum = 0.0f;", "sum += from[along];")
            lines.append(f"const float mean = sum / {size}.0f;")
        lines += _collected(size, "float squares = 0.0f;", f"squares += {centred} * {centred};")
        limited = f"larger(squares, {epsilon})" if operator.summed else f"squares / {size}.0f + {epsilon}"
        return [*lines, f"const float spread = square_root({limited});"]

    return _write_rows(scope, before, lambda at: f"({at}{less}) / spread" if less else f"{at} / spread")


def _softmax_row(scope: KernelScope, operator: FixedSoftmax, size: int) -> Lines:
    table = scope.constant(scope.node.output, "exponentials", operator.table())
    low, high = operator.dtype.low, operator.dtype.high
    channel = variable("channel", size)
    rows = prod(scope.output_shape) // size
    index = anchored(scope.output_shape, total(variable("place", rows), channel), channel)
    power = f"{table}[largest - from[{channel}]]"
    base = 12 + 31 - operator.dtype.bits
    share = f"(int32_t)round_up_shift((uint32_t)multiply_high(reciprocal, {power}), exponent)"
    headroom = max(32 - (size << 19).bit_length(), 0)  # each adds 2^19 at most
    if base - headroom > 31:  # of so many channels each may have next to nothing
        share = f"exponent > 31 ? 0 : {share}"
    lines, value = _limited(f"clip({total('share', low)}, {low}, {high})", low, high)
    return code(
        f"""
        @sums
        int32_t headroom = {headroom};
        @raised
        while (sum < 0x80000000u) {{
            sum *= 2u;
            ++headroom;
        }}
        const int32_t reciprocal = softmax_reciprocal(sum);
        const int32_t exponent = {base} - headroom;
        @shares
        """,
        sums=[
            *_largest(size, "channel"),
            "uint32_t sum = 0; /* Q12.19 */",
            *loop("channel", size, [f"sum += round_up_shift((uint32_t){power}, 12);"]),
        ],
        raised=[f"sum <<= {headroom};"] if headroom else [],
        shares=loop("channel", size, [f"const int32_t share = {share};", *lines, *finish(scope, index, value)]),
    )


@kernel(FixedSoftmax)
def _fixed_softmax(scope: KernelScope, operator: FixedSoftmax) -> KernelWriter:
    refuse(operator.diff_min > 0, f"diff_min is {operator.diff_min}, it must not be positive.")
    kind = scope.type(0)
    size, rows = kind.shape[-1], prod(kind.shape[:-1])

    def body() -> Lines:
        start = total(scope.input(scope.node.inputs[0], "input"), variable("place", rows))
        head = [f"const int32_t place = {product('row', size)};"] if rows > 1 else []
        head.append(f"const {c_type(kind.dtype)} *from = {start};")
        return loop("row", rows, [*head, *_softmax_row(scope, operator, size)])

    return scope.writer(body)


@kernel(FixedLogSoftmax)
def _fixed_log_softmax(scope: KernelScope, operator: FixedLogSoftmax) -> KernelWriter:
    differences, powers = operator.tables()
    back, least = f"{operator.back_multiplier}, {operator.back_shift}", operator.diff_min - 1

    def before(size: int) -> Lines:
        table = scope.constant(scope.node.output, "exponentials", powers)
        return [
            *_largest(size),
            *_collected(size, "int32_t sum = 0; /* Q12.19 */", f"sum += {table}[largest - from[along]];"),
            "const int32_t logarithm = fixed_logarithm(sum);",
            f"const int32_t reach = requantize_double_any(wrap_add(logarithm, -2147483647 - 1), {back});",
            f"const int32_t limit = reach > {least} ? reach : {least};",
        ]

    def element(at: str) -> Computed:
        table = scope.constant(scope.node.output, "differences", differences)
        raised = f"clip(round_shift({table}[below] - logarithm, 22) + 127, -128, 127)"
        below = f"const int32_t below = largest - {at};"
        return _limited(f"-below > limit ? {raised} : -128", -128, 127, below)

    return _write_rows(scope, before, element)


@kernel(FixedSoftmax16)
def _softmax_16(scope: KernelScope, operator: FixedSoftmax16) -> KernelWriter:
    """The writer of a FixedSoftmax16; exponentials are computed for the sum, and again for each element."""
    exponentials, reciprocals = operator.tables()

    def power(at: str) -> str:
        scaled = f"requantize_double_any({at} - largest, {operator.multiplier}, {operator.shift})"
        table = scope.constant(scope.node.output, "exponentials", exponentials)
        return f"between_16({table}, clip({scaled} + 32767, -32768, 32767))"

    def before(size: int) -> Lines:
        table = scope.constant(scope.node.output, "reciprocals", reciprocals)
        return [
            *_largest(size),
            *_collected(size, "int32_t sum = 0; /* Q16.15 */", f"sum += {power('from[along]')};"),
            "const int32_t zeros = leading_zeros((uint32_t)sum);",
            "const int32_t above_one = (int32_t)((((int64_t)sum << (zeros - 1)) + 0x2000) >> 14) - 0x18000;",
            f"const int32_t reciprocal = between_16({table}, clip(above_one, -32768, 32767));",
        ]

    def element(at: str) -> Computed:
        product = f"(int64_t){power(at)} * reciprocal + ((int64_t)1 << (30 - zeros))"
        return _limited(f"clip_wide(({product}) >> (31 - zeros), 0, 32767)", 0, 32767)

    return _write_rows(scope, before, element)


@kernel(FixedNormalise)
def _fixed_normalisation(scope: KernelScope, operator: FixedNormalise) -> KernelWriter:
    offset = -operator.zero_point

    def before(size: int) -> Lines:
        value = f"({total('from[along]', offset)})"
        return [
            *_collected(size, "int32_t squares = 0;", f"squares += {value} * {value};"),
            "int32_t root_shift = 0;",
            "const int32_t inverse = inverse_root(squares, &root_shift);",
        ]

    def element(at: str) -> Computed:
        scaled = f"requantize_double_any({total(at, offset)}, inverse, root_shift + 7)"
        return _limited(f"clip({scaled}, -128, 127)", -128, 127)

    return _write_rows(scope, before, element)


@kernel(FixedStandard, table=TURNS)
def _standard_turns(scope: KernelScope) -> Turns:
    """The squares and the root of each row, and its elements; all of a row are squared where few are computed."""
    kind, made = scope.type(0), scope.result
    squares, rows = kind.elements, kind.elements // kind.shape[-1]
    counts = {"square": squares, "element": made.elements, "row": rows, "call": 1}
    return turns_of_family(f"FixedStandard{kind.dtype.bits}", counts)


@kernel(FixedStandard)
def _standard(scope: KernelScope, operator: FixedStandard) -> KernelWriter:
    """The writer of a FixedStandard; the sum of squares is of elements of which n fit 32 bits."""
    offset, size = -operator.zero_point, operator.size
    kind = "int64_t" if scope.type(0).dtype.bits > 8 else "int32_t"
    whole = kind == "int64_t" and bool(offset)  # whether a square may leave 31 bits

    # The product is raised so that its upper word is enough, where no spread is so small that it has to be whole.
    raised = 31 - (size << scope.type(0).dtype.bits).bit_length()
    right = int(operator.scaling(np.array([operator.epsilon]))[1][0]) + raised - 32
    upper = operator.epsilon > 0 and right > 1

    def before(_: int) -> Lines:
        turn = channel_lanes(size, _SQUARES)
        places = [total("along", lane) for lane in range(turn)]
        values = [f"({total(f'from[{place}]', offset)})" for place in places]
        squares = [f"{'(int64_t)' if whole else ''}{value} * {value}" for value in values]
        if kind == "int64_t" and not whole and turn % 2 == 0:  # two fit 32 bits, which a wide sum takes at once
            squares = [f"(uint32_t)({a}) + (uint32_t)({b})" for a, b in zip(squares[::2], squares[1::2], strict=True)]
        steps, less = [f"squares += {square};" for square in squares], ""
        if operator.centred:
            steps, less = [*(f"sum += {value};" for value in values), *steps], " - (int64_t)sum * sum"
        sums = ["int32_t sum = 0;"] if operator.centred else []
        return code(
            f"""
            @sums
            const int64_t spread = {total(f"(int64_t)squares * {size}{less}", operator.epsilon)};
            const int32_t above = (int32_t)(spread >> 29);
            const int32_t paired = above > 1 ? (32 - leading_zeros((uint32_t)above)) >> 1 : 0;
            int32_t root_shift = 0;
            const int32_t inverse = held(inverse_root((int32_t)(spread >> (2 * paired)), &root_shift));
            const int32_t power = paired - root_shift + {31 - operator.fraction_bits + (raised - 32) * upper};
            @half
            """,
            half=["const int32_t half = 1 << (power - 1);"] if upper else [],
            sums=[*sums, f"{kind} squares = 0;", *loop("along", size, steps, step=turn)],
        )

    def element(at: str) -> Computed:
        value = product(atom(total(at, offset)), size)
        centred = f"{value} - sum" if operator.centred else value
        reach = operator.reach
        if upper:
            high = f"(int32_t)((int64_t)(({centred}) * {1 << raised}) * inverse >> 32)"
            return _limited(f"({high} + half) >> power", -reach, reach)
        scaled = f"((int64_t)({centred}) * inverse + ((int64_t)1 << (power - 1))) >> power"
        return _limited(f"clip_wide({scaled}, -32768, 32767)", -reach, reach)

    return _write_rows(scope, before, element, scope.start(operator.span[0] if operator.span else 0), _TURN)
