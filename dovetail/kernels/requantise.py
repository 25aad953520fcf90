"""Requantisation, limits, quantising and dequantising of an element as C."""

from __future__ import annotations

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import (
    Clip,
    Dequantize,
    Offset,
    Quantize,
    Requantize,
    Rounding,
    ScaleShift,
    float_scale,
)
from dovetail.ir.requantisation.level import level_scale
from dovetail.ir.types import Array, DType, Shape
from dovetail.kernels.c import Lines, atom, integer, product, summand, times, total
from dovetail.kernels.kernel import INT32, Expression, refuse
from dovetail.kernels.registry import ENDINGS, kernel, rule
from dovetail.kernels.scope import KernelScope


def _require_integer(node: Node, operand: Expression) -> None:
    refuse(operand.c_type == "float", f"{type(node.operator).__name__} of float32 is not computed on the core.")


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


def fixed_point_call(
    operator: Requantize, multiplier: Array, shift: Array, any_shift: bool, near: bool
) -> tuple[str, list[tuple[str, Array]]]:
    """The cheapest helper that is exact for these shifts, or for all; its constant arguments as (stem, values). `near`
    says whether the one for values that are not large may be taken."""
    wide = operator.rounding is Rounding.WIDE
    low, high = (-47, 14) if wide else (-31, 30 if operator.rounding is not Rounding.FLOAT32 else 127)
    refuse(
        shift.min() < low or shift.max() > high,
        f"a shift of {int(shift.min())}..{int(shift.max())} is outside {low}..{high}.",
    )
    refuse(multiplier.min() < 0 and wide, f"a multiplier of {int(multiplier.min())} is negative.")
    doubled = (multiplier.astype(np.int64) * 2).astype(np.uint32)
    normal, right = multiplier.min() >= 1 << 30, shift.max() < 0 and not any_shift
    halves_up = operator.rounding in (Rounding.DOUBLE, Rounding.SINGLE)
    upper = halves_up and normal and not shift.any() and not any_shift
    name = f"requantize_{operator.rounding.value}"
    if operator.rounding is Rounding.FLOAT32:
        return name, [("scale", float_scale(multiplier, shift))]
    exact = normal or (operator.rounding is Rounding.SINGLE and multiplier.min() >= 0)
    reduced = np.where(multiplier < 0x7FFF0000, (multiplier.astype(np.int64) + (1 << 15)) >> 16, 0x7FFF)
    forms = (
        (wide, name, reduced.astype(np.int16), 15 - shift),
        (operator.rounding is Rounding.AWAY, name, multiplier, 31 - shift),
        (near and right and normal, "requantize_near", doubled, -shift),
        (upper, "multiply_upper", doubled, None),
        (operator.rounding is Rounding.DOWN, name, multiplier, 31 - shift),
        (right and exact, name, doubled, -1 - shift),
        (normal and operator.rounding is Rounding.DOUBLE, f"{name}_any_shift", doubled, shift),
        (True, f"{name}_any", multiplier, shift),
    )
    name, factor, places = next(form[1:] for form in forms if form[0])
    shifts = [] if places is None else [("shift", places.astype(np.int8))]
    return name, [("multiplier", factor), *shifts]


def _without_zeros(multiplier: Array, shift: Array) -> tuple[Array, Array]:
    """Multipliers of 0, as channels without weights have them, as 2^-32: it gives 0 too, for values within 2^31 - 2,
    and is one of those the shorter products take."""
    nothing = multiplier == 0
    return np.where(nothing, 1 << 30, multiplier), np.where(nothing, -31, shift)


_SHIFTED_LAST = ("requantize_double", "requantize_single")
"""Helpers that add the zero point themselves, as where the last shift by one is not made yet."""


def is_rectified(graph: Graph, node: Node, zero_point: int) -> bool:
    """Whether all that reads a node's result cuts it off at a zero point or above."""
    limits = [user.operator.limited_to for user in graph.users()[node.output]]
    return bool(limits) and all(limit is not None and limit[0] >= zero_point for limit in limits)


def _level(scope: KernelScope, node: Node, operator: Requantize, x: Expression) -> Expression | None:
    """A value that is scaled by one product and one shift, whatever its channel; None where there is no such form."""
    if scope.compact or scope.any_shift or x.c_type != "int32_t":
        return None
    limits = [user.operator.limited_to for user in scope.graph.users()[node.output]]
    multiplier, shift = (scope.known(name) for name in node.inputs[1:])
    only = limits[0] if len(limits) == 1 else None
    place = ("level", node.output, x.low, x.high)
    level = scope.graph.once(place, lambda: level_scale(operator, multiplier, shift, (x.low, x.high), only))
    if level is None:
        return None
    factor = scope.parameter(node.output, "factor", level.multiplier)
    text = f"multiply_add_upper({x.text}, {factor}, {level.offset}) >> {level.shift}"
    reach = ((x.reach * int(level.multiplier.max()) >> 32) + abs(level.offset) + 1 >> level.shift) + 1
    return scope.named("scaled", "int32_t", text, -reach, reach)


@rule(Requantize)
def _requantize(scope: KernelScope, node: Node, operator: Requantize, x: Expression) -> Expression:
    multiplier, shift = (scope.known(name) for name in node.inputs[1:])
    _require_integer(node, x)
    if (level := _level(scope, node, operator, x)) is not None:
        return level
    raised = _raised_by_members(scope, node, operator, x) or _raised(operator, x)
    if operator.rounding is Rounding.DOUBLE and raised.reach < INT32[1]:
        multiplier, shift = _without_zeros(multiplier, shift)
    near = "requantize_near" in scope.core.functions and operator.rounding is Rounding.DOUBLE
    near = near and raised.reach + (1 << max(-int(shift.min()), 1) - 1) < INT32[1]
    function, constants = fixed_point_call(operator, multiplier, shift, scope.any_shift, near)
    places = [scope.parameter(node.output, stem, array) for stem, array in constants]
    most, zero_point = int(shift.max()), operator.output_zero_point
    arguments, added = [raised.text, *places], scope.number(node.output, "output_zero_point", zero_point)
    if function in _SHIFTED_LAST:
        fits = raised.reach + 2 * abs(zero_point) < INT32[1]
        arguments.append(str(added) if fits else "0")
        added = 0 if fits else added
    if function == "requantize_double" and raised.reach < 1 << 30 and not scope.compact:
        function = "requantize_rectified" if is_rectified(scope.graph, node, zero_point) else function
    text = f"{function}({', '.join(arguments)})"
    reach = (raised.reach << most if most > 0 else raised.reach >> -most) + 1
    low, high = -reach + zero_point, reach + zero_point
    if INT32[0] <= low and high <= INT32[1]:
        return scope.named("scaled", "int32_t", total(text, added), low, high)
    text = f"wrap_add({text}, {added if isinstance(added, str) else integer(added)})" if added else text
    return scope.named("scaled", "int32_t", text, *INT32)


@kernel(Requantize, table=ENDINGS)
def _requantize_ending(graph: Graph, node: Node) -> str:
    """The part that a requantisation is, by the function it takes."""
    operator, shift = node.expect(Requantize), graph.constants.get(node.inputs[2])
    if shift is not None and not shift.any():
        return "raise"
    wide = "wide_" if graph.types[node.inputs[0]].dtype.bits > 32 else ""
    kind = "any" if shift is None or shift.max() >= 0 else "one" if shift.size == 1 else "each"
    rectified = "_rectified" if is_rectified(graph, node, operator.output_zero_point) else ""
    return f"{wide}{operator.rounding.value}_{kind}{rectified}"


@kernel(ScaleShift, table=ENDINGS)
def _scale_shift_ending(graph: Graph, node: Node) -> str:
    """The part that a scale and a shift are, by the width of the product with the largest sum of an anchor."""
    maker = graph.producer(node.inputs[0])
    weights = graph.constants.get(maker.inputs[1]) if maker is not None and len(maker.inputs) > 1 else None
    scale, offset = (graph.constants.get(name) for name in node.inputs[1:3])
    if maker is None or weights is None or scale is None or offset is None:
        return "ScaleShift"
    axis = 0 if weights.shape[0] == graph.types[node.output].shape[-1] else weights.ndim - 1
    sums = np.abs(weights.astype(np.int64)).sum(tuple(other for other in range(weights.ndim) if other != axis)).max()
    x = graph.types[maker.inputs[0]].dtype
    reach = int(sums) * max(-x.low, x.high) * int(np.abs(scale.astype(np.int64)).max())
    return "ScaleShift_wide" if reach + int(np.abs(offset.astype(np.int64)).max()) > INT32[1] else "ScaleShift"


@rule(ScaleShift)
def _scale_shift(scope: KernelScope, node: Node, operator: ScaleShift, x: Expression) -> Expression:
    _require_integer(node, x)
    scale, offset, shift = (scope.known(name) for name in node.inputs[1:])
    refuse(shift.min() < 0 or shift.max() > 31, f"a shift of {int(shift.min())}..{int(shift.max())} is outside 0..31.")
    names = ("scale", "offset", "shift")
    arrays = (scale, offset, shift.astype(np.int8))
    places = [scope.parameter(node.output, name, array) for name, array in zip(names, arrays, strict=True)]
    reach = x.reach * int(np.abs(scale.astype(np.int64)).max()) + int(np.abs(offset.astype(np.int64)).max())
    if reach > INT32[1]:
        sum_text = f"(int64_t){atom(x.text)} * {places[0]} + {places[1]}"
        text = f"(int32_t)(({sum_text}) >> {places[2]})"
        return scope.named("scaled", "int32_t", text, *INT32)
    text = f"({atom(x.text)} * {places[0]} + {places[1]}) >> {places[2]}"
    low, high = ((sign * reach) >> int(shift.min()) for sign in (-1, 1))
    return scope.named("scaled", "int32_t", text, low, high)


@rule(Clip)
def _clip(scope: KernelScope, node: Node, operator: Clip, x: Expression) -> Expression:
    _require_integer(node, x)
    refuse(operator.dtype in (DType.INT64, DType.UINT32), f"Clip to {operator.dtype.text} is not computed on the core.")
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
    refuse(
        x.c_type != "int32_t" or low < INT32[0] or high > INT32[1],
        f"Offset of values up to {x.reach} is not computed on the core.",
    )
    return Expression(total(x.text, operator.offset), "int32_t", low, high)


def _parameters_along(scope: KernelScope, node: Node, axis: int) -> tuple[Lines, Shape, Array]:
    """Scale and zero point of a Quantize or Dequantize: the C names, the shape under which both broadcast to the
    operand, and the zero points."""
    rank = len(scope.graph.types[node.inputs[0]].shape)
    scale, zero_point = (scope.known(name) for name in node.inputs[1:])
    shape = tuple(scale.size if scale.size > 1 and place == axis % rank else 1 for place in range(rank))
    names = [scope.constant(node.output, *one) for one in (("scale", scale), ("zero_point", zero_point))]
    return names, shape, zero_point


def _is_shifted(factors: Array, reach: int) -> bool:
    """Whether integers up to a magnitude become floats by a shift alone."""
    return bool(reach < 1 << 16 and (np.frexp(factors)[0] == 0.5).all())


@kernel(Dequantize, table=ENDINGS)
def _dequantize_ending(graph: Graph, node: Node) -> str:
    """The part that a conversion to float is: a shift, or a product."""
    kind, factors = graph.types[node.inputs[0]].dtype, graph.constants.get(node.inputs[1])
    is_shifted = factors is not None and kind.is_integer and _is_shifted(factors, max(-kind.low, kind.high))
    return "Dequantize_shifted" if is_shifted else "Dequantize"


@rule(Dequantize)
def _dequantize(scope: KernelScope, node: Node, operator: Dequantize, x: Expression) -> Expression:
    names, shape, zero_point = _parameters_along(scope, node, operator.axis)
    low, high = x.low - int(zero_point.max()), x.high - int(zero_point.min())
    if low < INT32[0] or high > INT32[1]:
        refuse(zero_point.any() and x.reach > 1 << 62, "Dequantize of int64 is not computed on the core.")
        x = Expression(f"(int64_t){atom(x.text)}", "int64_t")
    text = f"({summand(x.text)} - {scope.element(names[1], shape)})" if zero_point.any() else atom(x.text)
    scale, factors = scope.element(names[0], shape), scope.graph.constants[node.inputs[1]]
    if max(-low, high) <= 1 << 24 and ((factors > 2.0**-100) & (factors < 2.0**100)).all():
        how = "shifted" if _is_shifted(factors, max(-low, high)) else "scaled"
        return scope.named("real", "float", f"{how}_real({text}, {scale})")
    return scope.named("real", "float", f"(float){text} * {scale}")


@rule(Quantize)
def _quantize(scope: KernelScope, node: Node, operator: Quantize, x: Expression) -> Expression:
    refuse(operator.dtype.bits > 16, f"Quantize to {operator.dtype.text} is not computed on the core.")
    names, shape, zero_point = _parameters_along(scope, node, operator.axis)
    scale, place = (scope.element(name, shape) for name in names)
    refuse(
        np.abs(zero_point.astype(np.int64)).max() > 1 << 20,
        f"a zero point of {int(np.abs(zero_point).max())} is beyond {1 << 20}.",
    )
    low, high = operator.dtype.low, operator.dtype.high
    text = f"round_even({atom(x.text)} / {scale}, {low} - {place}, {high} - {place}) + {place}"
    return scope.named("steps", "int32_t", text, low, high)
