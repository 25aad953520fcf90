"""Pointwise operators as C, one rule each, and the tree of them behind every anchor, or alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.activation import Clamp, Unary, UnaryKind
from dovetail.ir.operators.arithmetic import (
    Add,
    Clip,
    Dequantize,
    Lookup,
    Offset,
    Quantize,
    Requantize,
    Rounding,
    ScaleShift,
    float_scale,
)
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Convert, Select
from dovetail.ir.operators.fixed import FixedDivide, Sigmoid16, sigmoid_table
from dovetail.ir.requantisation.pairs import SumChain, sum_chains
from dovetail.ir.types import Array, DType
from dovetail.kernels.c import atom, c_type, integer, product, real, summand, times, total
from dovetail.kernels.kernel import INT32, RULES, Expression, Index, KernelScope, UnsupportedRegion, expression_of, rule


def _require_integer(node: Node, operand: Expression) -> None:
    if operand.c_type == "float":
        raise UnsupportedRegion(f"{type(node.operator).__name__} of float32 is not computed on the core.")


def _raised_by_members(scope: KernelScope, node: Node, operator: Requantize, x: Expression) -> Expression | None:
    """As `_raised`, with both numbers members of a compact kernel's block; None where that has no such form."""
    low, high = ((bound - operator.input_zero_point) << operator.left_shift for bound in (x.low, x.high))
    if not scope.compact or operator.rounding is Rounding.WIDE or low < INT32[0] or high > INT32[1]:
        return None
    if x.c_type != "int32_t" or (x.reach > 1 << 16 and operator.input_zero_point == operator.left_shift == 0):
        return None
    centred = total(x.text, scope.number(node.output, "centre", -operator.input_zero_point))
    text = times(centred, scope.number(node.output, "factor", 1 << operator.left_shift))
    return Expression(text, "int32_t", low, high)


def _raised(operator: Requantize, x: Expression) -> Expression:
    """(x - input_zero_point) * 2**left_shift, modulo 2**32 where it may leave int32 (WIDE: in 64 bits)."""
    factor = 1 << operator.left_shift
    low, high = ((bound - operator.input_zero_point) * factor for bound in (x.low, x.high))
    if operator.rounding is Rounding.WIDE:
        centred = total(f"(int64_t){atom(x.text)}", -operator.input_zero_point)
        return Expression(product(atom(centred), factor) if factor > 1 else centred, "int64_t", low, high)
    if x.c_type == "int64_t":
        x = Expression(f"(int32_t){atom(x.text)}", "int32_t", *INT32)
        low, high = INT32
    if INT32[0] <= low and high <= INT32[1]:
        centred = total(x.text, -operator.input_zero_point)
        return Expression(product(atom(centred), factor) if factor > 1 else centred, "int32_t", low, high)
    text = x.text
    if operator.input_zero_point:
        text = f"wrap_add({text}, {integer(-operator.input_zero_point)})"
    if operator.left_shift:
        text = f"wrap_shift({text}, {operator.left_shift})"
    return Expression(text, "int32_t", *INT32)


def _fixed_point_call(
    operator: Requantize, multiplier: Array, shift: Array, any_shift: bool, near: bool
) -> tuple[str, list[tuple[str, Array]]]:
    """The cheapest helper that is exact for these shifts, or for all; its constant arguments as (stem, values). `near`
    says whether the one for values that are not large may be taken."""
    wide = operator.rounding is Rounding.WIDE
    low, high = (-47, 14) if wide else (-31, 30 if operator.rounding is not Rounding.FLOAT32 else 127)
    if shift.min() < low or shift.max() > high:
        raise UnsupportedRegion(f"a shift of {int(shift.min())}..{int(shift.max())} is outside {low}..{high}.")
    if multiplier.min() < 0 and wide:
        raise UnsupportedRegion(f"a multiplier of {int(multiplier.min())} is negative.")
    doubled = (multiplier.astype(np.int64) * 2).astype(np.uint32)
    if wide:
        reduced = np.where(multiplier < 0x7FFF0000, (multiplier.astype(np.int64) + (1 << 15)) >> 16, 0x7FFF)
        narrow, right = reduced.astype(np.int16), (15 - shift).astype(np.int8)
        return "requantize_wide", [("multiplier", narrow), ("shift", right)]
    normal = multiplier.min() >= 1 << 30
    if near and shift.max() < 0 and normal and not any_shift:
        return "requantize_near", [("multiplier", doubled), ("shift", (-shift).astype(np.int8))]
    if not shift.any() and normal and not any_shift:
        return "multiply_upper", [("multiplier", doubled)]
    name = f"requantize_{operator.rounding.value}"
    if operator.rounding is Rounding.DOWN:
        return name, [("multiplier", multiplier), ("shift", (31 - shift).astype(np.int8))]
    if operator.rounding is Rounding.FLOAT32:
        return name, [("scale", float_scale(multiplier, shift))]
    exact = normal or (operator.rounding is Rounding.SINGLE and multiplier.min() >= 0)
    if shift.max() < 0 and exact and not any_shift:
        return name, [("multiplier", doubled), ("shift", (-1 - shift).astype(np.int8))]
    if normal and operator.rounding is Rounding.DOUBLE:
        return f"{name}_any_shift", [("multiplier", doubled), ("shift", shift.astype(np.int8))]
    return f"{name}_any", [("multiplier", multiplier), ("shift", shift.astype(np.int8))]


def _without_zeros(multiplier: Array, shift: Array) -> tuple[Array, Array]:
    """Multipliers of 0, as channels without weights have them, as 2^-32: it gives 0 too, for values within 2^31 - 2,
    and is one of those the shorter products take."""
    nothing = multiplier == 0
    return np.where(nothing, 1 << 30, multiplier), np.where(nothing, -31, shift)


_SHIFTED_LAST = ("requantize_double", "requantize_single")
"""Helpers that add the zero point themselves, as where the last shift by one is not made yet."""


def _is_rectified(scope: KernelScope, node: Node, zero_point: int) -> bool:
    """Whether nothing below the zero point comes through; not asked of functions that layers share."""
    users = scope.graph.users()[node.output]
    limits = [user.operator.low for user in users if isinstance(user.operator, Clip)]
    return not scope.compact and len(limits) == len(users) > 0 and min(limits) >= zero_point


@rule(Requantize)
def _requantize(scope: KernelScope, node: Node, operator: Requantize, x: Expression) -> Expression:
    multiplier, shift = (scope.known(name) for name in node.inputs[1:])
    _require_integer(node, x)
    raised = _raised_by_members(scope, node, operator, x) or _raised(operator, x)
    if operator.rounding is Rounding.DOUBLE and raised.reach < INT32[1]:
        multiplier, shift = _without_zeros(multiplier, shift)
    near = "requantize_near" in scope.functions and operator.rounding is Rounding.DOUBLE
    near = near and raised.reach + (1 << max(-int(shift.min()), 1) - 1) < INT32[1]
    function, constants = _fixed_point_call(operator, multiplier, shift, scope.any_shift, near)
    places = [scope.parameter(node.output, stem, array) for stem, array in constants]
    most, zero_point = int(shift.max()), operator.output_zero_point
    arguments, added = [raised.text, *places], scope.number(node.output, "output_zero_point", zero_point)
    if function in _SHIFTED_LAST:
        fits = raised.reach + 2 * abs(zero_point) < INT32[1]
        arguments.append(str(added) if fits else "0")
        added = 0 if fits else added
    if function == "requantize_double" and raised.reach < 1 << 30 and _is_rectified(scope, node, zero_point):
        function = "requantize_rectified"
    text = f"{function}({', '.join(arguments)})"
    reach = (raised.reach << most if most > 0 else raised.reach >> -most) + 1
    low, high = -reach + zero_point, reach + zero_point
    if INT32[0] <= low and high <= INT32[1]:
        return Expression(scope.define("scaled", "int32_t", total(text, added)), "int32_t", low, high)
    text = f"wrap_add({text}, {added if isinstance(added, str) else integer(added)})" if added else text
    return Expression(scope.define("scaled", "int32_t", text), "int32_t", *INT32)


@rule(ScaleShift)
def _scale_shift(scope: KernelScope, node: Node, operator: ScaleShift, x: Expression) -> Expression:
    _require_integer(node, x)
    scale, offset, shift = (scope.known(name) for name in node.inputs[1:])
    if shift.min() < 0 or shift.max() > 31:
        raise UnsupportedRegion(f"a shift of {int(shift.min())}..{int(shift.max())} is outside 0..31.")
    names = ("scale", "offset", "shift")
    arrays = (scale, offset, shift.astype(np.int8))
    places = [scope.parameter(node.output, name, array) for name, array in zip(names, arrays, strict=True)]
    reach = x.reach * int(np.abs(scale.astype(np.int64)).max()) + int(np.abs(offset.astype(np.int64)).max())
    if reach > INT32[1]:
        sum_text = f"(int64_t){atom(x.text)} * {places[0]} + {places[1]}"
        text = f"(int32_t)(({sum_text}) >> {places[2]})"
        return Expression(scope.define("scaled", "int32_t", text), "int32_t", *INT32)
    text = f"({atom(x.text)} * {places[0]} + {places[1]}) >> {places[2]}"
    low, high = ((sign * reach) >> int(shift.min()) for sign in (-1, 1))
    return Expression(scope.define("scaled", "int32_t", text), "int32_t", low, high)


@rule(Clip)
def _clip(scope: KernelScope, node: Node, operator: Clip, x: Expression) -> Expression:
    _require_integer(node, x)
    if operator.dtype in (DType.INT64, DType.UINT32):
        raise UnsupportedRegion(f"Clip to {operator.dtype.text} is not computed on the core.")
    if operator.low <= x.low and x.high <= operator.high and not scope.compact:
        return x
    function = "clip_wide" if x.c_type == "int64_t" else "clip"
    bounds = [scope.number(node.output, *bound) for bound in (("lowest", operator.low), ("highest", operator.high))]
    if (function, *bounds) == ("clip", -128, 127):
        return Expression(f"saturate({x.text})", "int32_t", operator.low, operator.high)
    low, high = (bound if isinstance(bound, str) else integer(bound) for bound in bounds)
    text = f"{function}({x.text}, {low}, {high})"
    return Expression(text, "int32_t", operator.low, operator.high)


@rule(Offset)
def _offset(scope: KernelScope, node: Node, operator: Offset, x: Expression) -> Expression:
    _require_integer(node, x)
    low, high = x.low + operator.offset, x.high + operator.offset
    if x.c_type != "int32_t" or low < INT32[0] or high > INT32[1]:
        raise UnsupportedRegion(f"Offset of values up to {x.reach} is not computed on the core.")
    return Expression(total(x.text, operator.offset), "int32_t", low, high)


@rule(Add, 2)
def _add(scope: KernelScope, node: Node, operator: Add, a: Expression, b: Expression) -> Expression:
    if a.c_type == "float":
        return Expression(scope.define("term", "float", f"{summand(a.text)} + {atom(b.text)}"), "float")
    low, high = a.low + b.low, a.high + b.high
    if INT32[0] <= low and high <= INT32[1]:
        return Expression(f"{summand(a.text)} + {atom(b.text)}", "int32_t", low, high)
    return Expression(f"wrap_add({a.text}, {b.text})", "int32_t", *INT32)


@rule(Lookup)
def _lookup(scope: KernelScope, node: Node, operator: Lookup, x: Expression) -> Expression:
    _require_integer(node, x)
    kind = scope.graph.types[node.inputs[0]].dtype
    table = scope.constant(node.output, "table", scope.known(node.inputs[1]))
    return expression_of(f"{table}[{total(x.text, -kind.low)}]", scope.graph.types[node.output].dtype)


def _parameters_along(scope: KernelScope, node: Node, axis: int) -> tuple[str, str, Array]:
    """Scale and zero point of a Quantize or Dequantize at the present place, and the zero points."""
    rank = len(scope.graph.types[node.inputs[0]].shape)
    scale, zero_point = (scope.known(name) for name in node.inputs[1:])
    shape = tuple(scale.size if scale.size > 1 and place == axis % rank else 1 for place in range(rank))
    places = [
        scope.element(scope.constant(node.output, stem, array), shape)
        for stem, array in (("scale", scale), ("zero_point", zero_point))
    ]
    return places[0], places[1], zero_point


@rule(Dequantize)
def _dequantize(scope: KernelScope, node: Node, operator: Dequantize, x: Expression) -> Expression:
    scale, place, zero_point = _parameters_along(scope, node, operator.axis)
    low, high = x.low - int(zero_point.max()), x.high - int(zero_point.min())
    if low < INT32[0] or high > INT32[1]:
        if zero_point.any() and x.reach > 1 << 62:
            raise UnsupportedRegion("Dequantize of int64 is not computed on the core.")
        x = Expression(f"(int64_t){atom(x.text)}", "int64_t")
    text = f"(float)({summand(x.text)} - {place}) * {scale}" if zero_point.any() else f"(float){atom(x.text)} * {scale}"
    return Expression(scope.define("real", "float", text), "float")


@rule(Quantize)
def _quantize(scope: KernelScope, node: Node, operator: Quantize, x: Expression) -> Expression:
    if operator.dtype.bits > 16:
        raise UnsupportedRegion(f"Quantize to {operator.dtype.text} is not computed on the core.")
    scale, place, zero_point = _parameters_along(scope, node, operator.axis)
    if np.abs(zero_point.astype(np.int64)).max() > 1 << 20:
        raise UnsupportedRegion(f"a zero point of {int(np.abs(zero_point).max())} is beyond {1 << 20}.")
    low, high = operator.dtype.low, operator.dtype.high
    text = f"round_even({atom(x.text)} / {scale}, {low} - {place}, {high} - {place}) + {place}"
    return Expression(scope.define("steps", "int32_t", text), "int32_t", low, high)


_MOST_SHIFT = 24


def _as_line(graph: Graph, line: SumChain, operands: Sequence[Expression]) -> Expression | None:
    """The sum of a line before it is limited; None where no line computes it."""
    found = line.linear(graph, [(x.low, x.high) for x in operands], _MOST_SHIFT)
    if found is None or any(x.c_type != "int32_t" for x in operands):
        return None
    terms = [product(atom(x.text), factor) for x, factor in zip(operands, found.factors, strict=True)]
    return Expression(f"({total(*terms, found.offset)}) >> {found.shift}", "int32_t", found.low, found.high)


def finish(scope: KernelScope, tree: Sequence[Node], index: Index, anchor: tuple[str, Expression] | None) -> list[str]:
    """The statements that compute one element of the result and store it.

    Args:
        scope: the kernel's parameters; gains those the tree needs.
        tree: the pointwise nodes in topological order.
        index: where the present element is.
        anchor: the anchor's value and its C expression; None for a region of pointwise operators alone.
    """
    graph = scope.graph
    scope.lines, scope.index = [], index
    values: dict[str, Expression] = dict([anchor] if anchor else [])

    def value_of(name: str) -> Expression:
        if name not in values:
            kind = graph.types[name]
            if name in graph.constants:
                text = scope.element(scope.constant(name, "addends", graph.constants[name]), kind.shape)
            else:
                text = scope.loaded(name, scope.input(name), index(kind.shape))
            values[name] = expression_of(text, kind.dtype)
        return values[name]

    users, lines = graph.users(), {} if scope.compact else sum_chains(graph, tree)

    def compute(node: Node) -> None:
        write, count = RULES[type(node.operator)]
        result = write(scope, node, node.operator, *map(value_of, node.inputs[:count]))
        if len(users[node.output]) > 1 and not result.text.isidentifier():
            name = scope.define("shared", result.c_type, result.text)
            result = Expression(name, result.c_type, result.low, result.high)
        values[node.output] = result

    put_off = {node.output for line in lines.values() for node in line.nodes}
    for node in tree:
        line = lines.get(node.output)
        if line is not None and (whole := _as_line(graph, line, [value_of(name) for name in line.operands])):
            values[node.inputs[0]] = whole
        elif line is not None:
            for part in line.nodes:
                compute(part)
        if node.output not in put_off:
            compute(node)
    output = graph.outputs[0]
    kind = graph.types[output]
    final = value_of(output)
    stored = c_type(kind.dtype)
    plain = stored == final.c_type or scope.shares(output)
    text = final.text if plain else f"({stored}){atom(final.text)}"
    return [*scope.lines, scope.stored(index(kind.shape), text)]


CALLS: Mapping[UnaryKind, str] = {
    UnaryKind.SIGMOID: "logistic({x})",
    UnaryKind.TANH: "hyperbolic_tangent({x})",
    UnaryKind.HARD_SIGMOID: "smaller(larger({x} / 6.0f + 0.5f, 0.0f), 1.0f)",
    UnaryKind.HARD_SWISH: "{x} * smaller(larger({x} / 6.0f + 0.5f, 0.0f), 1.0f)",
    UnaryKind.LEAKY_RELU: "{x} >= 0.0f ? {x} : {alpha} * {x}",
    UnaryKind.ELU: "{x} >= 0.0f ? {x} : {alpha} * exponential_less_one({x})",
    UnaryKind.GELU: "{x} * gaussian_share({x})",
    UnaryKind.GELU_TANH: (
        "0.5f * {x} * (1.0f + hyperbolic_tangent(0.797884561f * ({x} + 0.044715f * {x} * {x} * {x})))"
    ),
    UnaryKind.NEGATIVE: "-{x}",
    UnaryKind.ABSOLUTE: "absolute({x})",
    UnaryKind.SIGN: "sign_of({x})",
    UnaryKind.FLOOR: "floor_of({x})",
    UnaryKind.CEILING: "ceiling_of({x})",
    UnaryKind.ROUND: "nearest({x})",
    UnaryKind.RECIPROCAL: "1.0f / {x}",
    UnaryKind.SQUARE_ROOT: "square_root({x})",
    UnaryKind.EXPONENTIAL: "exponential({x})",
    UnaryKind.LOGARITHM: "logarithm({x})",
    UnaryKind.ERROR_FUNCTION: "error_function({x})",
    UnaryKind.SOFTPLUS: "soft_plus({x})",
    UnaryKind.SOFTSIGN: "{x} / (1.0f + absolute({x}))",
    UnaryKind.SINE: "sine({x})",
    UnaryKind.COSINE: "cosine({x})",
    UnaryKind.SQUARE: "{x} * {x}",
    UnaryKind.RECIPROCAL_ROOT: "1.0f / square_root({x})",
    UnaryKind.THRESHOLDED_RELU: "{x} > {alpha} ? {x} : 0.0f",
    UnaryKind.HARD_SHRINK: "absolute({x}) > {alpha} ? {x} : 0.0f",
}
"""The C of each function of `x`, an identifier."""

_ARITHMETIC = {BinaryKind.ADD: "+", BinaryKind.SUBTRACT: "-", BinaryKind.MULTIPLY: "*", BinaryKind.DIVIDE: "/"}
_CALLS = {BinaryKind.POWER: "power", BinaryKind.MODULO: "modulo"}
_INTEGER_CALLS = {
    BinaryKind.DIVIDE: "divide_integers",
    BinaryKind.POWER: "power_of_integers",
    BinaryKind.MODULO: "modulo_of_integers",
}


def named(scope: KernelScope, operand: Expression, stem: str) -> str:
    """An identifier for an operand that is read more than once."""
    return operand.text if operand.text.isidentifier() else scope.define(stem, operand.c_type, operand.text)


@rule(Clamp)
def _clamp(scope: KernelScope, node: Node, operator: Clamp, x: Expression) -> Expression:
    text = x.text
    text = f"larger({text}, {real(operator.low)})" if operator.low > -inf else text
    text = f"smaller({text}, {real(operator.high)})" if operator.high < inf else text
    return Expression(text, "float")


@rule(Unary)
def _unary(scope: KernelScope, node: Node, operator: Unary, x: Expression) -> Expression:
    name = named(scope, x, "operand")
    text = CALLS[operator.kind].format(x=name, alpha=real(operator.alpha))
    return Expression(scope.define("function", "float", text), "float")


@rule(Binary, 2)
def _binary(scope: KernelScope, node: Node, operator: Binary, a: Expression, b: Expression) -> Expression:
    if a.c_type != "float":
        return _integers(scope, node, operator.kind, a, b)
    if operator.kind in _ARITHMETIC:
        text = f"{atom(a.text)} {_ARITHMETIC[operator.kind]} {atom(b.text)}"
    elif operator.kind is BinaryKind.PRELU:
        x = named(scope, a, "operand")
        text = f"{x} >= 0.0f ? {x} : {x} * {atom(b.text)}"
    elif operator.kind is BinaryKind.SQUARED_DIFFERENCE:
        x = scope.define("difference", "float", f"{atom(a.text)} - {atom(b.text)}")
        text = f"{x} * {x}"
    elif operator.kind in _CALLS:
        text = f"{_CALLS[operator.kind]}({a.text}, {b.text})"
    else:
        text = f"{'larger' if operator.kind is BinaryKind.MAXIMUM else 'smaller'}({a.text}, {b.text})"
    return Expression(scope.define("term", "float", text), "float")


def _integers(scope: KernelScope, node: Node, kind: BinaryKind, a: Expression, b: Expression) -> Expression:
    dtype = scope.graph.types[node.output].dtype
    wide = "int64_t" if dtype.bits > 32 else "int32_t"
    held = "int64_t" if "int64_t" in (a.c_type, b.c_type) else "int32_t"
    stored = c_type(dtype)
    if kind in (BinaryKind.MINIMUM, BinaryKind.MAXIMUM):
        left, right = named(scope, a, "candidate"), named(scope, b, "candidate")
        text = f"{left} {'<' if kind is BinaryKind.MINIMUM else '>'} {right} ? {left} : {right}"
        return Expression(scope.define("chosen", held, text), held, min(a.low, b.low), max(a.high, b.high))
    if kind in _INTEGER_CALLS:
        text = f"({stored}){_INTEGER_CALLS[kind]}({a.text}, {b.text})"
    elif kind is BinaryKind.SQUARED_DIFFERENCE:
        x = scope.define("difference", f"u{wide}", f"(u{wide}){atom(a.text)} - (u{wide}){atom(b.text)}")
        text = f"({stored})({x} * {x})"
    elif kind in _ARITHMETIC:
        text = f"({stored})((u{wide}){atom(a.text)} {_ARITHMETIC[kind]} (u{wide}){atom(b.text)})"
    else:
        raise UnsupportedRegion(f"{kind.value} of {dtype.text} is not computed on the core.")
    return Expression(scope.define("term", held, text), held, dtype.low, dtype.high)


_COMPARISONS = {CompareKind.EQUAL: "==", CompareKind.LESS: "<", CompareKind.LESS_OR_EQUAL: "<="}


@rule(Compare, 2)
def _compare(scope: KernelScope, node: Node, operator: Compare, a: Expression, b: Expression) -> Expression:
    text = f"{atom(a.text)} {_COMPARISONS[operator.kind]} {atom(b.text)}"
    return Expression(scope.define("holds", "int32_t", text), "int32_t", 0, 1)


@rule(Select, 3)
def _select(
    scope: KernelScope, node: Node, operator: Select, condition: Expression, a: Expression, b: Expression
) -> Expression:
    held = "int64_t" if "int64_t" in (a.c_type, b.c_type) else a.c_type
    text = f"{atom(condition.text)} ? {atom(a.text)} : {atom(b.text)}"
    return Expression(scope.define("chosen", held, text), held, min(a.low, b.low), max(a.high, b.high))


@rule(Convert)
def _convert(scope: KernelScope, node: Node, operator: Convert, x: Expression) -> Expression:
    dtype = operator.dtype
    if dtype is DType.BOOL:
        zero = "0.0f" if x.c_type == "float" else "0"
        return Expression(scope.define("holds", "int32_t", f"{atom(x.text)} != {zero}"), "int32_t", 0, 1)
    if dtype is DType.FLOAT32:
        if x.c_type == "float":
            return x
        return Expression(scope.define("real", "float", f"(float){atom(x.text)}"), "float")
    wide = "int64_t" if dtype in (DType.INT64, DType.UINT32) else "int32_t"
    if x.c_type == "float":
        call = "converted_wide" if wide == "int64_t" else "converted"
        text = f"{call}({x.text}, {real(dtype.low)}, {real(dtype.high)})"
    elif dtype.low <= x.low and x.high <= dtype.high:
        text = x.text if x.c_type == wide else f"({wide}){atom(x.text)}"
    else:
        text = f"({wide})({c_type(dtype)}){atom(x.text)}"
    return Expression(scope.define("whole", wide, text), wide, dtype.low, dtype.high)


@rule(FixedDivide, 2)
def _divide(scope: KernelScope, node: Node, operator: FixedDivide, a: Expression, b: Expression) -> Expression:
    left = total(a.text, -operator.left_zero_point)
    right = total(b.text, -operator.right_zero_point)
    text = f"divide_fixed({left}, {right}, {operator.multiplier}, {operator.shift})"
    text = f"wrap_add({text}, {operator.output_zero_point})" if operator.output_zero_point else text
    return Expression(scope.define("quotient", "int32_t", text), "int32_t", DType.INT32.low, DType.INT32.high)


@rule(Sigmoid16)
def _sigmoid(scope: KernelScope, node: Node, operator: Sigmoid16, x: Expression) -> Expression:
    table = scope.constant(node.output, "sigmoids", sigmoid_table())
    scaled = total(product(atom(x.text), operator.multiplier), (1 << operator.shift) >> 1)
    scaled = f"({scaled}) >> {operator.shift}" if operator.shift else scaled
    text = f"{'tangent_16' if operator.tangent else 'sigmoid_16'}({scaled}, {table})"
    return Expression(scope.define("function", "int32_t", text), "int32_t", DType.INT16.low, DType.INT16.high)
