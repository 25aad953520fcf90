"""Comparison, choice, conversion and TFLite's fixed-point functions as C: pointwise."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.graph.graph import Node
from dovetail.graph.types import DType
from dovetail.kernels.elementwise import real
from dovetail.kernels.kernel import c_type
from dovetail.kernels.scope import Expression, Scope
from dovetail.kernels.text import atom, product, total
from dovetail.operators.fixed import FixedDivide, Sigmoid16, sigmoid_table
from dovetail.operators.logic import Compare, CompareKind, Convert

_SIGNS = {CompareKind.EQUAL: "==", CompareKind.LESS: "<", CompareKind.LESS_OR_EQUAL: "<="}


def write_compare(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a Compare."""
    operator = node.operator
    assert isinstance(operator, Compare)
    a, b = operands
    text = f"{atom(a.text)} {_SIGNS[operator.kind]} {atom(b.text)}"
    return Expression(scope.define("holds", "int32_t", text), "int32_t", 0, 1)


def write_select(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a Select."""
    condition, a, b = operands
    held = "int64_t" if "int64_t" in (a.c_type, b.c_type) else a.c_type
    text = f"{atom(condition.text)} ? {atom(a.text)} : {atom(b.text)}"
    return Expression(scope.define("chosen", held, text), held, min(a.low, b.low), max(a.high, b.high))


def write_convert(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a Convert."""
    operator, x = node.operator, operands[0]
    assert isinstance(operator, Convert)
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


def write_divide(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a FixedDivide."""
    operator = node.operator
    assert isinstance(operator, FixedDivide)
    left = total(operands[0].text, -operator.left_zero_point)
    right = total(operands[1].text, -operator.right_zero_point)
    text = f"divide_fixed({left}, {right}, {operator.multiplier}, {operator.shift})"
    text = f"wrap_add({text}, {operator.output_zero_point})" if operator.output_zero_point else text
    return Expression(scope.define("quotient", "int32_t", text), "int32_t", DType.INT32.low, DType.INT32.high)


def write_sigmoid(scope: Scope, node: Node, operands: Sequence[Expression]) -> Expression:
    """The C of a Sigmoid16."""
    operator = node.operator
    assert isinstance(operator, Sigmoid16)
    table = scope.constant(node.output, "sigmoids", sigmoid_table())
    scaled = total(product(atom(operands[0].text), operator.multiplier), (1 << operator.shift) >> 1)
    scaled = f"({scaled}) >> {operator.shift}" if operator.shift else scaled
    text = f"{'tangent_16' if operator.tangent else 'sigmoid_16'}({scaled}, {table})"
    return Expression(scope.define("function", "int32_t", text), "int32_t", DType.INT16.low, DType.INT16.high)
