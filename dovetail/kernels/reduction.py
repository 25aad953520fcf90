"""Reductions, places of extremes, and what is normalised over the last axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dovetail.graph.types import DType, Shape
from dovetail.kernels.elements import Writer, operand, place_in, without_pad, write_elements
from dovetail.kernels.elementwise import real
from dovetail.kernels.epilogue import Expression, Scope
from dovetail.kernels.kernel import c_type
from dovetail.kernels.region import Region
from dovetail.kernels.text import atom, block, loop, total
from dovetail.kernels.window import variable
from dovetail.operators.activation import LogSoftmax, Softmax
from dovetail.operators.reduction import ArgExtreme, Normalise, Reduce, ReduceKind


def write_reduction(region: Region, scope: Scope) -> Writer:
    """The writer of a Reduce."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, Reduce)
    without_pad(region)
    operator, kind = anchor.operator, region.graph.types[anchor.inputs[0]]
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


def write_arg_extreme(region: Region, scope: Scope) -> Writer:
    """The writer of an ArgExtreme."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, ArgExtreme)
    without_pad(region)
    operator, kind = anchor.operator, region.graph.types[anchor.inputs[0]]
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


def write_row_function(region: Region, scope: Scope) -> Writer:
    """The writer of a float Softmax, LogSoftmax or Normalise."""
    anchor = region.anchor
    assert anchor is not None and isinstance(anchor.operator, (Softmax, LogSoftmax, Normalise))
    without_pad(region)
    operator, shape = anchor.operator, region.output_shape
    size = shape[-1]

    def row(places: Sequence[str]) -> list[str]:
        start = total(operand(region, scope, 0, "input"), place_in(shape, (*places, "0")))
        head = [f"const float *from = {start};"]
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
    """The statements that find a row's mean and the divisor of its elements."""
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
