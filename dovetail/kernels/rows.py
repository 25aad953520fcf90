"""Reductions, places of extremes, and functions of rows: softmax and normalisation, float and fixed-point."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dovetail.ir.operators.activation import FixedSoftmax, LogSoftmax, Softmax
from dovetail.ir.operators.fixed import FixedLogSoftmax, FixedNormalise, FixedSoftmax16, FixedStandard
from dovetail.ir.operators.reduction import ArgExtreme, Normalise, Reduce, ReduceKind
from dovetail.ir.types import DType, Shape
from dovetail.kernels.c import atom, block, c_type, loop, product, real, total, variable
from dovetail.kernels.elements import operand, place_in, write_elements
from dovetail.kernels.epilogue import finish
from dovetail.kernels.kernel import Expression, KernelWriter, UnsupportedRegion
from dovetail.kernels.region import RegionParts
from dovetail.kernels.registry import kernel
from dovetail.kernels.scope import KernelScope
from dovetail.kernels.window import anchored


@kernel(Reduce)
def _reduction(region: RegionParts, scope: KernelScope, operator: Reduce) -> KernelWriter:
    kind = region.type(0)
    extreme = operator.kind in (ReduceKind.MAXIMUM, ReduceKind.MINIMUM)
    held = c_type(kind.dtype) if extreme else "float" if kind.dtype is DType.FLOAT32 else "int32_t"
    count = prod(kind.shape[axis] for axis in operator.axes)

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        x = operand(region, scope, 0, "input")
        names = {axis: f"along_{axis}" for axis in operator.axes}
        inner = [variable(names[a], n) if a in names else places[a] for a, n in enumerate(kind.shape)]
        at = f"{x}[{place_in(kind.shape, inner)}]"
        if extreme and kind.dtype is DType.FLOAT32:
            call = "larger" if operator.kind is ReduceKind.MAXIMUM else "smaller"
            start, step = f"{x}[{_first(kind.shape, places, operator)}]", f"total = {call}({at}, total);"
        elif extreme:
            start = f"{x}[{_first(kind.shape, places, operator)}]"
            step = f"total = {at} {'>' if operator.kind is ReduceKind.MAXIMUM else '<'} total ? {at} : total;"
        elif operator.kind is ReduceKind.PRODUCT:
            start, step = "1.0f", f"total *= {at};"
        else:
            start, step = "0.0f" if held == "float" else "0", f"total += {at};"
        lines = [step]
        for axis in reversed(operator.axes):
            lines = loop(names[axis], kind.shape[axis], lines)
        return [f"{held} total = {start};", *lines], _result(operator, kind.dtype, held, count)

    return write_elements(region, scope, element)


def _first(shape: Shape, places: Sequence[str], operator: Reduce) -> str:
    return place_in(shape, ["0" if axis in operator.axes else place for axis, place in enumerate(places)])


def _result(operator: Reduce, dtype: DType, held: str, count: int) -> Expression:
    if held == "float":
        return Expression(f"total / {count}.0f" if operator.kind is ReduceKind.MEAN else "total", "float")
    if operator.kind is ReduceKind.SUM:
        low, high = (count * (bound - operator.input_zero_point) for bound in (dtype.low, dtype.high))
        return Expression(total("total", -count * operator.input_zero_point), "int32_t", low, high)
    wide = "int64_t" if dtype in (DType.INT64, DType.UINT32) else "int32_t"
    return Expression(f"({wide})total" if wide == "int64_t" else "total", wide, dtype.low, dtype.high)


@kernel(ArgExtreme)
def _arg_extreme(region: RegionParts, scope: KernelScope, operator: ArgExtreme) -> KernelWriter:
    kind = region.type(0)
    size = kind.shape[operator.axis]
    sign = (">" if operator.largest else "<") + ("=" if operator.last else "")

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        if size == 1:
            return [], Expression("0", "int32_t", 0, 0)
        x = operand(region, scope, 0, "input")
        start = place_in(kind.shape, ["0" if a == operator.axis else place for a, place in enumerate(places)])
        inner = ["along" if a == operator.axis else place for a, place in enumerate(places)]
        at = f"{x}[{place_in(kind.shape, inner)}]"
        turn = block(f"if ({at} {sign} best)", [f"best = {at};", "place = along;"])
        lines = [f"{c_type(kind.dtype)} best = {x}[{start}];", "int32_t place = 0;"]
        lines += block(f"for (int32_t along = 1; along < {size}; ++along)", turn)
        return lines, Expression("place", "int32_t", 0, size - 1)

    return write_elements(region, scope, element)


def _row_pointer(region: RegionParts, scope: KernelScope, places: Sequence[str]) -> str:
    """The statement that points at the first element of a row of the operand."""
    kind = region.type(0)
    start = total(operand(region, scope, 0, "input"), place_in(kind.shape, (*places, "0")))
    return f"const {c_type(kind.dtype)} *from = {start};"


def _largest(along: str, size: int) -> list[str]:
    """The statements that find a row's largest integer."""
    turn = f"largest = from[{along}] > largest ? from[{along}] : largest;"
    return ["int32_t largest = from[0];", *loop(along, size, [turn], start=1)]


@kernel(Softmax, LogSoftmax, Normalise)
def _row_function(region: RegionParts, scope: KernelScope, operator: Softmax | LogSoftmax | Normalise) -> KernelWriter:
    shape = region.output_shape
    size = shape[-1]

    def row(places: Sequence[str]) -> list[str]:
        head = [_row_pointer(region, scope, places)]
        if isinstance(operator, Normalise):
            return [*head, *_spread(operator, size)]
        beta = operator.beta if isinstance(operator, Softmax) else 1.0
        most = ["float largest = from[0];", *loop("along", size, ["largest = larger(from[along], largest);"], start=1)]
        if beta < 0:
            most = [line.replace("larger(", "smaller(") for line in most]
        centred = "from[along] - largest" if beta == 1.0 else f"{real(beta)} * (from[along] - largest)"
        head += [*most, "float sum = 0.0f;", *loop("along", size, [f"sum += exponential({centred});"])]
        return [*head, "const float logarithm_of_sum = logarithm(sum);"] if isinstance(operator, LogSoftmax) else head

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        at = f"from[{places[-1]}]"
        if isinstance(operator, Normalise):
            return [], Expression(f"({at} - mean) / spread" if operator.centred else f"{at} / spread", "float")
        if isinstance(operator, LogSoftmax):
            return [], Expression(f"{at} - largest - logarithm_of_sum", "float")
        centred = f"{at} - largest"
        centred = centred if operator.beta == 1.0 else f"{real(operator.beta)} * {atom(centred)}"
        return [], Expression(f"exponential({centred}) / sum", "float")

    return write_elements(region, scope, element, row=row)


def _spread(operator: Normalise, size: int) -> list[str]:
    lines = []
    centred = "from[along]"
    if operator.centred:
        lines = ["float sum = 0.0f;", *loop("along", size, ["sum += from[along];"])]
        lines.append(f"const float mean = sum / {size}.0f;")
        centred = "(from[along] - mean)"
    lines += ["float squares = 0.0f;", *loop("along", size, [f"squares += {centred} * {centred};"])]
    if operator.summed:
        return [*lines, f"const float spread = square_root(larger(squares, {real(operator.epsilon)}));"]
    return [*lines, f"const float spread = square_root(squares / {size}.0f + {real(operator.epsilon)});"]


def _softmax_row(region: RegionParts, scope: KernelScope, operator: FixedSoftmax, size: int) -> list[str]:
    table = scope.constant(region.node.output, "exponentials", operator.table())
    low, high = operator.dtype.low, operator.dtype.high
    channel = variable("channel", size)
    rows = prod(region.output_shape) // size
    index = anchored(region.output_shape, total(variable("place", rows), channel), channel)
    value = Expression("limited", "int32_t", low, high)
    power = f"{table}[largest - from[{channel}]]"
    base = 12 + 31 - operator.dtype.bits
    share = f"(int32_t)round_up_shift((uint32_t)multiply_high(reciprocal, {power}), exponent)"
    headroom = max(32 - (size << 19).bit_length(), 0)  # each adds 2^19 at most
    if base - headroom > 31:  # of so many channels each may have next to nothing
        share = f"exponent > 31 ? 0 : {share}"
    store = [f"const int32_t share = {share};", f"const int32_t limited = clip({total('share', low)}, {low}, {high});"]
    store += finish(scope, region.tree, index, (region.node.output, value))
    return [
        *_largest("channel", size),
        "uint32_t sum = 0; /* Q12.19 */",
        *loop("channel", size, [f"sum += round_up_shift((uint32_t){power}, 12);"]),
        f"int32_t headroom = {headroom};",
        *([f"sum <<= {headroom};"] if headroom else []),
        *block("while (sum < 0x80000000u)", ["sum *= 2u;", "++headroom;"]),
        "const int32_t reciprocal = softmax_reciprocal(sum);",
        f"const int32_t exponent = {base} - headroom;",
        *loop("channel", size, store),
    ]


@kernel(FixedSoftmax)
def _softmax(region: RegionParts, scope: KernelScope, operator: FixedSoftmax) -> KernelWriter:
    if operator.diff_min > 0:
        raise UnsupportedRegion(f"diff_min is {operator.diff_min}, it must not be positive.")
    kind = region.type(0)
    size, rows = kind.shape[-1], prod(kind.shape[:-1])

    def body() -> list[str]:
        image = scope.input(region.node.inputs[0], "input")
        head = [f"const int32_t place = {product('row', size)};"] if rows > 1 else []
        start = total(image, variable("place", rows))
        lines = [*head, f"const {c_type(kind.dtype)} *from = {start};", *_softmax_row(region, scope, operator, size)]
        return loop("row", rows, lines)

    return scope.writer(body)


@kernel(FixedLogSoftmax)
def _log_softmax(region: RegionParts, scope: KernelScope, operator: FixedLogSoftmax) -> KernelWriter:
    shape = region.type(0).shape
    scaled, powers = operator.tables()
    back = f"{operator.back_multiplier}, {operator.back_shift}"

    def row(places: Sequence[str]) -> list[str]:
        table = scope.constant(region.node.output, "exponentials", powers)
        return [
            _row_pointer(region, scope, places),
            *_largest("along", shape[-1]),
            "int32_t sum = 0; /* Q12.19 */",
            *loop("along", shape[-1], [f"sum += {table}[largest - from[along]];"]),
            "const int32_t logarithm = fixed_logarithm(sum);",
            f"const int32_t reach = requantize_double_any(wrap_add(logarithm, -2147483647 - 1), {back});",
            f"const int32_t limit = reach > {operator.diff_min - 1} ? reach : {operator.diff_min - 1};",
        ]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        table = scope.constant(region.node.output, "differences", scaled)
        raised = f"clip(round_shift({table}[below] - logarithm, 22) + 127, -128, 127)"
        lines = [
            f"const int32_t below = largest - from[{places[-1]}];",
            f"const int32_t limited = -below > limit ? {raised} : -128;",
        ]
        return lines, Expression("limited", "int32_t", -128, 127)

    return write_elements(region, scope, element, row=row)


@kernel(FixedSoftmax16)
def _softmax_16(region: RegionParts, scope: KernelScope, operator: FixedSoftmax16) -> KernelWriter:
    """The writer of a FixedSoftmax16; exponentials are computed for the sum, and again for each element."""
    shape = region.type(0).shape
    tables = dict(zip(("exponentials", "reciprocals"), operator.tables(), strict=True))
    factor = f"{operator.multiplier}, {operator.shift}"

    def power(at: str) -> str:
        scaled = f"requantize_double_any({at} - largest, {factor})"
        table = scope.constant(region.node.output, "exponentials", tables["exponentials"])
        return f"between_16({table}, clip({scaled} + 32767, -32768, 32767))"

    def row(places: Sequence[str]) -> list[str]:
        table = scope.constant(region.node.output, "reciprocals", tables["reciprocals"])
        return [
            _row_pointer(region, scope, places),
            *_largest("along", shape[-1]),
            "int32_t sum = 0; /* Q16.15 */",
            *loop("along", shape[-1], [f"sum += {power('from[along]')};"]),
            "const int32_t zeros = leading_zeros((uint32_t)sum);",
            "const int32_t above_one = (int32_t)((((int64_t)sum << (zeros - 1)) + 0x2000) >> 14) - 0x18000;",
            f"const int32_t reciprocal = between_16({table}, clip(above_one, -32768, 32767));",
        ]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        product = f"(int64_t){power(f'from[{places[-1]}]')} * reciprocal + ((int64_t)1 << (30 - zeros))"
        lines = [f"const int32_t limited = clip_wide(({product}) >> (31 - zeros), 0, 32767);"]
        return lines, Expression("limited", "int32_t", 0, 32767)

    return write_elements(region, scope, element, row=row)


@kernel(FixedNormalise)
def _normalisation(region: RegionParts, scope: KernelScope, operator: FixedNormalise) -> KernelWriter:
    shape, offset = region.type(0).shape, -operator.zero_point

    def row(places: Sequence[str]) -> list[str]:
        value = f"({total('from[along]', offset)})"
        return [
            _row_pointer(region, scope, places),
            "int32_t squares = 0;",
            *loop("along", shape[-1], [f"squares += {value} * {value};"]),
            "int32_t root_shift = 0;",
            "const int32_t inverse = inverse_root(squares, &root_shift);",
        ]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        scaled = f"requantize_double_any({total(f'from[{places[-1]}]', offset)}, inverse, root_shift + 7)"
        return [f"const int32_t limited = clip({scaled}, -128, 127);"], Expression("limited", "int32_t", -128, 127)

    return write_elements(region, scope, element, row=row)


@kernel(FixedStandard)
def _standard(region: RegionParts, scope: KernelScope, operator: FixedStandard) -> KernelWriter:
    """The writer of a FixedStandard; the sum of squares is of elements of which n fit 32 bits."""
    offset, size = -operator.zero_point, operator.size
    wide = region.type(0).dtype.bits > 8

    def row(places: Sequence[str]) -> list[str]:
        value = f"({total('from[along]', offset)})"
        square = f"(int64_t){value} * {value}" if wide else f"{value} * {value}"
        sums = ["int32_t sum = 0;"] if operator.centred else []
        turn = [f"sum += {value};"] if operator.centred else []
        spread = f"(int64_t)squares * {size}{' - (int64_t)sum * sum' if operator.centred else ''}"
        return [
            _row_pointer(region, scope, places),
            *sums,
            f"{'int64_t' if wide else 'int32_t'} squares = 0;",
            *loop("along", size, [*turn, f"squares += {square};"]),
            f"const int64_t spread = {spread} + {operator.epsilon};"
            if operator.epsilon
            else f"const int64_t spread = {spread};",
            "const int32_t above = (int32_t)(spread >> 29);",
            "const int32_t half = above > 1 ? (32 - leading_zeros((uint32_t)above)) >> 1 : 0;",
            "int32_t root_shift = 0;",
            "const int32_t inverse = inverse_root((int32_t)(spread >> (2 * half)), &root_shift);",
            f"const int32_t power = half - root_shift + {31 - operator.fraction_bits};",
        ]

    def element(places: Sequence[str]) -> tuple[list[str], Expression]:
        value = product(atom(total(f"from[{places[-1]}]", offset)), size)
        centred = f"{value} - sum" if operator.centred else value
        scaled = f"((int64_t)({centred}) * inverse + ((int64_t)1 << (power - 1))) >> power"
        return [f"const int32_t limited = clip_wide({scaled}, -32768, 32767);"], Expression(
            "limited", "int32_t", -32768, 32767
        )

    return write_elements(region, scope, element, row=row)
