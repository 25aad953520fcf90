"""Pointwise operators on floats, and integer arithmetic modulo the type's size, as C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from dovetail.graph.graph import Node
from dovetail.kernels.kernel import Unsupported, c_type
from dovetail.kernels.scope import Expression, Scope
from dovetail.kernels.text import atom
from dovetail.operators.activation import Clamp, Unary, UnaryKind
from dovetail.operators.elementwise import Binary, BinaryKind

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
}
"""The C of each function of `x`, an identifier."""

_SIGNS = {
    BinaryKind.ADD: "+",
    BinaryKind.SUBTRACT: "-",
    BinaryKind.MULTIPLY: "*",
    BinaryKind.DIVIDE: "/",
}
_CALLS = {BinaryKind.POWER: "power", BinaryKind.MODULO: "modulo"}


def real(value: float) -> str:
    """A float32 constant in C."""
    single = float(np.float32(value))
    if not np.isfinite(single):
        return '__builtin_nanf("")' if np.isnan(single) else f"{'-' if single < 0 else ''}__builtin_inff()"
    text = f"{single:.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"


def named(scope: Scope, operand: Expression, stem: str) -> str:
    """An identifier for an operand that is read more than once."""
    return operand.text if operand.text.isidentifier() else scope.define(stem, operand.c_type, operand.text)


def write_clamp(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a Clamp."""
    operator = node.operator
    assert isinstance(operator, Clamp)
    text = operands[0].text
    text = f"larger({text}, {real(operator.low)})" if operator.low > -inf else text
    text = f"smaller({text}, {real(operator.high)})" if operator.high < inf else text
    return Expression(text, "float")


def write_unary(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a Unary."""
    operator = node.operator
    assert isinstance(operator, Unary)
    x = named(scope, operands[0], "operand")
    text = CALLS[operator.kind].format(x=x, alpha=real(operator.alpha))
    return Expression(scope.define("function", "float", text), "float")


def write_binary(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a Binary."""
    operator = node.operator
    assert isinstance(operator, Binary)
    a, b = operands
    if a.c_type != "float":
        return _integers(scope, node, operator.kind, a, b)
    if operator.kind in _SIGNS:
        text = f"{atom(a.text)} {_SIGNS[operator.kind]} {atom(b.text)}"
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


def _integers(scope: Scope, node: Node, kind: BinaryKind, a: Expression, b: Expression) -> Expression:
    """Integer arithmetic: in unsigned words, which wrap, and back in the result's type."""
    dtype = scope.graph.types[node.output].dtype
    wide = "int64_t" if dtype.bits > 32 else "int32_t"
    held = "int64_t" if "int64_t" in (a.c_type, b.c_type) else "int32_t"
    stored = c_type(dtype)
    if kind in (BinaryKind.MINIMUM, BinaryKind.MAXIMUM):
        left, right = named(scope, a, "candidate"), named(scope, b, "candidate")
        text = f"{left} {'<' if kind is BinaryKind.MINIMUM else '>'} {right} ? {left} : {right}"
        return Expression(scope.define("chosen", held, text), held, min(a.low, b.low), max(a.high, b.high))
    if kind is BinaryKind.DIVIDE:
        text = f"({stored})divide_integers({a.text}, {b.text})"
    elif kind is BinaryKind.POWER:
        text = f"({stored})power_of_integers({a.text}, {b.text})"
    elif kind is BinaryKind.MODULO:
        text = f"({stored})modulo_of_integers({a.text}, {b.text})"
    elif kind is BinaryKind.SQUARED_DIFFERENCE:
        x = scope.define("difference", f"u{wide}", f"(u{wide}){atom(a.text)} - (u{wide}){atom(b.text)}")
        text = f"({stored})({x} * {x})"
    elif kind in _SIGNS:
        text = f"({stored})((u{wide}){atom(a.text)} {_SIGNS[kind]} (u{wide}){atom(b.text)})"
    else:
        raise Unsupported(f"{kind.value} of {dtype.text} is not computed on the core.")
    return Expression(scope.define("term", held, text), held, dtype.low, dtype.high)
