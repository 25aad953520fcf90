"""Pointwise operators as C: one rule per operator, used behind every anchor and alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dovetail.graph.graph import Node
from dovetail.graph.types import Array, DType
from dovetail.kernels.elementwise import write_binary, write_clamp, write_unary
from dovetail.kernels.kernel import Unsupported, c_type
from dovetail.kernels.logic import write_compare, write_convert, write_divide, write_select, write_sigmoid
from dovetail.kernels.scope import INT32, Rule
from dovetail.kernels.scope import Expression as Expression
from dovetail.kernels.scope import Index as Index
from dovetail.kernels.scope import Scope as Scope
from dovetail.kernels.scope import expression_of as expression_of
from dovetail.kernels.text import atom, integer, product, times, total
from dovetail.operators.activation import Clamp, Unary
from dovetail.operators.arithmetic import Add, Clip, Lookup, Offset, Requantize, Rounding, ScaleShift
from dovetail.operators.base import Operator
from dovetail.operators.elementwise import Binary
from dovetail.operators.fixed import FixedDivide, Sigmoid16
from dovetail.operators.logic import Compare, Convert, Select
from dovetail.operators.quantization import Dequantize, Quantize


def _integer_operand(node: Node, operand: Expression) -> Expression:
    if operand.c_type == "float":
        raise Unsupported(f"{type(node.operator).__name__} of float32 is not computed on the core.")
    return operand


def _raised_by_members(scope: Scope, node: Node, x: Expression) -> Expression | None:
    """As `_raised`, with both numbers members of a compact kernel's block; None where that has no such form."""
    operator = node.operator
    assert isinstance(operator, Requantize)
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
    operator: Requantize, multiplier: Array, shift: Array, any_shift: bool
) -> tuple[str, list[tuple[str, Array]]]:
    """The cheapest helper that is exact for these shifts, or for all; its constant arguments as (stem, values)."""
    wide = operator.rounding is Rounding.WIDE
    low, high = (-47, 14) if wide else (-31, 30)
    if shift.min() < low or shift.max() > high:
        raise Unsupported(f"a shift of {int(shift.min())}..{int(shift.max())} is outside {low}..{high}.")
    if multiplier.min() < 0 and wide:
        raise Unsupported(f"a multiplier of {int(multiplier.min())} is negative.")
    doubled = (multiplier.astype(np.int64) * 2).astype(np.uint32)
    if wide:
        reduced = np.where(multiplier < 0x7FFF0000, (multiplier.astype(np.int64) + (1 << 15)) >> 16, 0x7FFF)
        narrow, right = reduced.astype(np.int16), (15 - shift).astype(np.int8)
        return "requantize_wide", [("multiplier", narrow), ("shift", right)]
    normal = multiplier.min() >= 1 << 30
    if not shift.any() and normal and not any_shift:
        return "multiply_upper", [("multiplier", doubled)]
    name = f"requantize_{operator.rounding.value}"
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


def _requantize(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    operator = node.operator
    assert isinstance(operator, Requantize)
    multiplier, shift = (scope.known(name) for name in node.inputs[1:])
    x = _integer_operand(node, operands[0])
    raised = _raised_by_members(scope, node, x) or _raised(operator, x)
    if operator.rounding is Rounding.DOUBLE and raised.reach < INT32[1]:
        multiplier, shift = _without_zeros(multiplier, shift)
    function, constants = _fixed_point_call(operator, multiplier, shift, scope.any_shift)
    places = [scope.parameter(node.output, stem, array) for stem, array in constants]
    most, zero_point = int(shift.max()), operator.output_zero_point
    arguments, added = [raised.text, *places], scope.number(node.output, "output_zero_point", zero_point)
    if function in _SHIFTED_LAST:
        fits = raised.reach + 2 * abs(zero_point) < INT32[1]
        arguments.append(str(added) if fits else "0")
        added = 0 if fits else added
    text = f"{function}({', '.join(arguments)})"
    reach = (raised.reach << most if most > 0 else raised.reach >> -most) + 1
    low, high = -reach + zero_point, reach + zero_point
    if INT32[0] <= low and high <= INT32[1]:
        return Expression(scope.define("scaled", "int32_t", total(text, added)), "int32_t", low, high)
    text = f"wrap_add({text}, {added if isinstance(added, str) else integer(added)})" if added else text
    return Expression(scope.define("scaled", "int32_t", text), "int32_t", *INT32)


def _scale_shift(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    x = _integer_operand(node, operands[0])
    scale, offset, shift = (scope.known(name) for name in node.inputs[1:])
    if shift.min() < 0 or shift.max() > 31:
        raise Unsupported(f"a shift of {int(shift.min())}..{int(shift.max())} is outside 0..31.")
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


def _clip(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    operator = node.operator
    assert isinstance(operator, Clip)
    x = _integer_operand(node, operands[0])
    if operator.dtype in (DType.INT64, DType.UINT32):
        raise Unsupported(f"Clip to {operator.dtype.text} is not computed on the core.")
    if operator.low <= x.low and x.high <= operator.high and not scope.compact:
        return x
    function = "clip_wide" if x.c_type == "int64_t" else "clip"
    bounds = [scope.number(node.output, *bound) for bound in (("lowest", operator.low), ("highest", operator.high))]
    if (function, *bounds) == ("clip", -128, 127):
        return Expression(f"saturate({x.text})", "int32_t", operator.low, operator.high)
    low, high = (bound if isinstance(bound, str) else integer(bound) for bound in bounds)
    text = f"{function}({x.text}, {low}, {high})"
    return Expression(text, "int32_t", operator.low, operator.high)


def _offset(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    operator = node.operator
    assert isinstance(operator, Offset)
    x = _integer_operand(node, operands[0])
    low, high = x.low + operator.offset, x.high + operator.offset
    if x.c_type != "int32_t" or low < INT32[0] or high > INT32[1]:
        raise Unsupported(f"Offset of values up to {x.reach} is not computed on the core.")
    return Expression(total(x.text, operator.offset), "int32_t", low, high)


def _add(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    if operands[0].c_type == "float":
        return Expression(scope.define("term", "float", f"{operands[0].text} + {atom(operands[1].text)}"), "float")
    a, b = operands
    low, high = a.low + b.low, a.high + b.high
    if INT32[0] <= low and high <= INT32[1]:
        return Expression(f"{a.text} + {atom(b.text)}", "int32_t", low, high)
    return Expression(f"wrap_add({a.text}, {b.text})", "int32_t", *INT32)


def _lookup(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    x = _integer_operand(node, operands[0])
    kind = scope.graph.types[node.inputs[0]].dtype
    table = scope.constant(node.output, "table", scope.known(node.inputs[1]))
    return expression_of(f"{table}[{total(x.text, -kind.low)}]", scope.graph.types[node.output].dtype)


def _parameters_along(scope: Scope, node: Node, axis: int) -> tuple[str, str, Array]:
    """Scale and zero point of a Quantize or Dequantize at the present place, and the zero points."""
    rank = len(scope.graph.types[node.inputs[0]].shape)
    scale, zero_point = (scope.known(name) for name in node.inputs[1:])
    shape = tuple(scale.size if scale.size > 1 and place == axis % rank else 1 for place in range(rank))
    places = [
        scope.element(scope.constant(node.output, stem, array), shape)
        for stem, array in (("scale", scale), ("zero_point", zero_point))
    ]
    return places[0], places[1], zero_point


def _dequantize(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    operator = node.operator
    assert isinstance(operator, Dequantize)
    x = operands[0]
    scale, place, zero_point = _parameters_along(scope, node, operator.axis)
    low, high = x.low - int(zero_point.max()), x.high - int(zero_point.min())
    if low < INT32[0] or high > INT32[1]:
        if x.high > 1 << 62 or x.low < -(1 << 62):
            raise Unsupported("Dequantize of int64 is not computed on the core.")
        x = Expression(f"(int64_t){atom(x.text)}", "int64_t")
    text = f"(float)({x.text} - {place}) * {scale}" if zero_point.any() else f"(float){atom(x.text)} * {scale}"
    return Expression(scope.define("real", "float", text), "float")


def _quantize(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    operator = node.operator
    assert isinstance(operator, Quantize)
    if operator.dtype.bits > 16:
        raise Unsupported(f"Quantize to {operator.dtype.text} is not computed on the core.")
    scale, place, zero_point = _parameters_along(scope, node, operator.axis)
    if np.abs(zero_point.astype(np.int64)).max() > 1 << 20:
        raise Unsupported(f"a zero point of {int(np.abs(zero_point).max())} is beyond {1 << 20}.")
    low, high = operator.dtype.low, operator.dtype.high
    text = f"round_even({atom(operands[0].text)} / {scale}, {low} - {place}, {high} - {place}) + {place}"
    return Expression(scope.define("steps", "int32_t", text), "int32_t", low, high)


RULES: Mapping[type[Operator], Rule] = {
    Requantize: _requantize,
    ScaleShift: _scale_shift,
    Clip: _clip,
    Offset: _offset,
    Add: _add,
    Lookup: _lookup,
    Dequantize: _dequantize,
    Quantize: _quantize,
    Clamp: write_clamp,
    Unary: write_unary,
    Binary: write_binary,
    Compare: write_compare,
    Select: write_select,
    Convert: write_convert,
    FixedDivide: write_divide,
    Sigmoid16: write_sigmoid,
}
"""The C of each pointwise operator: a new one needs its function and a line here."""


_OPERANDS: Mapping[type[Operator], int] = {Add: 2, Binary: 2, Compare: 2, FixedDivide: 2, Select: 3}
"""Operands that are elements, where that is more than the first; what follows them are parameters."""


def is_pointwise(operator: Operator) -> bool:
    """True for operators that compute each element from the same place of their operands."""
    return type(operator) in RULES


def finish(scope: Scope, tree: Sequence[Node], index: Index, anchor: tuple[str, Expression] | None) -> list[str]:
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
        """The expression of a value made before, a constant's element or an operand's."""
        if name not in values:
            kind = graph.types[name]
            if name in graph.constants:
                array = scope.constant(name, "addends", graph.constants[name])
            else:
                array = scope.input(name)
            values[name] = expression_of(scope.element(array, kind.shape), kind.dtype)
        return values[name]

    users = graph.users()
    for node in tree:
        operands = [value_of(name) for name in node.inputs[: _OPERANDS.get(type(node.operator), 1)]]
        result = RULES[type(node.operator)](scope, node, operands)
        if len(users[node.output]) > 1 and not result.text.isidentifier():
            name = scope.define("shared", result.c_type, result.text)
            result = Expression(name, result.c_type, result.low, result.high)
        values[node.output] = result
    output = graph.outputs[0]
    kind = graph.types[output]
    final = value_of(output)
    stored = c_type(kind.dtype)
    text = final.text if stored == final.c_type else f"({stored}){atom(final.text)}"
    return [*scope.lines, f"output[{index(kind.shape)}] = {text};"]
