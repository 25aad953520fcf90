"""Sums, tables, comparisons, conversions and functions of elements as C."""

from __future__ import annotations

from math import inf
from operator import add, mul, sub

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Add, Lookup
from dovetail.ir.operators.elementwise import Binary, BinaryKind, Compare, CompareKind, Convert, Select
from dovetail.ir.operators.fixed import FixedDivide, Sigmoid16, sigmoid_table
from dovetail.ir.types import DType
from dovetail.kernels.c import atom, c_type, product, real, summand, total
from dovetail.kernels.epilogue import named
from dovetail.kernels.kernel import INT32, Expression, UnsupportedRegion, expression_of
from dovetail.kernels.registry import ENDINGS, kernel, rule
from dovetail.kernels.scope import KernelScope


@rule(Add)
def _add(scope: KernelScope, node: Node, operator: Add, a: Expression, b: Expression) -> Expression:
    if a.c_type == "float":
        return scope.named("term", "float", f"{summand(a.text)} + {atom(b.text)}")
    low, high = a.low + b.low, a.high + b.high
    if INT32[0] <= low and high <= INT32[1]:
        return Expression(f"{summand(a.text)} + {atom(b.text)}", "int32_t", low, high)
    return Expression(f"wrap_add({a.text}, {b.text})", "int32_t", *INT32)


@rule(Lookup)
def _lookup(scope: KernelScope, node: Node, operator: Lookup, x: Expression) -> Expression:
    kind = scope.graph.types[node.inputs[0]].dtype
    table = scope.constant(node.output, "table", scope.known(node.inputs[1]))
    return expression_of(f"{table}[{total(x.text, -kind.low)}]", scope.graph.types[node.output].dtype)


_ARITHMETIC = {BinaryKind.ADD: "+", BinaryKind.SUBTRACT: "-", BinaryKind.MULTIPLY: "*", BinaryKind.DIVIDE: "/"}
_ENDS = {BinaryKind.ADD: add, BinaryKind.SUBTRACT: sub, BinaryKind.MULTIPLY: mul}
_CALLS = {BinaryKind.POWER: "power", BinaryKind.MODULO: "modulo"}
_INTEGER_CALLS = {
    BinaryKind.DIVIDE: "divide_integers",
    BinaryKind.POWER: "power_of_integers",
    BinaryKind.MODULO: "modulo_of_integers",
}


@rule(Clamp)
def _clamp(scope: KernelScope, node: Node, operator: Clamp, x: Expression) -> Expression:
    text = x.text
    text = f"larger({text}, {real(operator.low)})" if operator.low > -inf else text
    text = f"smaller({text}, {real(operator.high)})" if operator.high < inf else text
    return Expression(text, "float")


@rule(Binary)
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
    return scope.named("term", "float", text)


_SLOW = [Binary(kind) for kind in _INTEGER_CALLS]


@kernel(Binary, table=ENDINGS)
def _binary_ending(graph: Graph, node: Node) -> str:
    """The part that a function of two values is: of integers about an addition, unless it divides in a loop."""
    is_float = graph.types[node.output].dtype is DType.FLOAT32
    return "Binary" if is_float or node.operator in _SLOW else "Add"


def _integers(scope: KernelScope, node: Node, kind: BinaryKind, a: Expression, b: Expression) -> Expression:
    dtype = scope.graph.types[node.output].dtype
    wide = "int64_t" if dtype.bits > 32 else "int32_t"
    held = "int64_t" if "int64_t" in (a.c_type, b.c_type) else "int32_t"
    stored = c_type(dtype)
    if kind in (BinaryKind.MINIMUM, BinaryKind.MAXIMUM):
        left, right = named(scope, a, "candidate"), named(scope, b, "candidate")
        text = f"{left} {'<' if kind is BinaryKind.MINIMUM else '>'} {right} ? {left} : {right}"
        return scope.named("chosen", held, text, min(a.low, b.low), max(a.high, b.high))
    if kind in _INTEGER_CALLS:
        text = f"({stored}){_INTEGER_CALLS[kind]}({a.text}, {b.text})"
    elif kind is BinaryKind.SQUARED_DIFFERENCE:
        x = scope.define("difference", f"u{wide}", f"(u{wide}){atom(a.text)} - (u{wide}){atom(b.text)}")
        text = f"({stored})({x} * {x})"
    elif kind in _ARITHMETIC:
        text = f"({stored})((u{wide}){atom(a.text)} {_ARITHMETIC[kind]} (u{wide}){atom(b.text)})"
        ends = [_ENDS[kind](x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        if dtype.low <= min(ends) and max(ends) <= dtype.high:
            return scope.named("term", held, text, min(ends), max(ends))
    else:
        raise UnsupportedRegion(f"{kind.value} of {dtype.text} is not computed on the core.")
    return scope.named("term", held, text, dtype.low, dtype.high)


_COMPARISONS = {CompareKind.EQUAL: "==", CompareKind.LESS: "<", CompareKind.LESS_OR_EQUAL: "<="}


@rule(Compare)
def _compare(scope: KernelScope, node: Node, operator: Compare, a: Expression, b: Expression) -> Expression:
    text = f"{atom(a.text)} {_COMPARISONS[operator.kind]} {atom(b.text)}"
    return scope.named("holds", "int32_t", text, 0, 1)


@rule(Select)
def _select(
    scope: KernelScope, node: Node, operator: Select, condition: Expression, a: Expression, b: Expression
) -> Expression:
    held = "int64_t" if "int64_t" in (a.c_type, b.c_type) else a.c_type
    text = f"{atom(condition.text)} ? {atom(a.text)} : {atom(b.text)}"
    return scope.named("chosen", held, text, min(a.low, b.low), max(a.high, b.high))


@rule(Convert)
def _convert(scope: KernelScope, node: Node, operator: Convert, x: Expression) -> Expression:
    dtype = operator.dtype
    if dtype is DType.BOOL:
        zero = "0.0f" if x.c_type == "float" else "0"
        return scope.named("holds", "int32_t", f"{atom(x.text)} != {zero}", 0, 1)
    if dtype is DType.FLOAT32:
        if x.c_type == "float":
            return x
        return scope.named("real", "float", f"(float){atom(x.text)}")
    wide = "int64_t" if dtype in (DType.INT64, DType.UINT32) else "int32_t"
    if x.c_type == "float":
        call = "converted_wide" if wide == "int64_t" else "converted"
        text = f"{call}({x.text}, {real(dtype.low)}, {real(dtype.high)})"
    elif dtype.low <= x.low and x.high <= dtype.high:
        text = x.text if x.c_type == wide else f"({wide}){atom(x.text)}"
    else:
        text = f"({wide})({c_type(dtype)}){atom(x.text)}"
    return scope.named("whole", wide, text, dtype.low, dtype.high)


@rule(FixedDivide)
def _divide(scope: KernelScope, node: Node, operator: FixedDivide, a: Expression, b: Expression) -> Expression:
    left = total(a.text, -operator.left_zero_point)
    right = total(b.text, -operator.right_zero_point)
    text = f"divide_fixed({left}, {right}, {operator.multiplier}, {operator.shift})"
    text = f"wrap_add({text}, {operator.output_zero_point})" if operator.output_zero_point else text
    return scope.named("quotient", "int32_t", text, DType.INT32.low, DType.INT32.high)


@rule(Sigmoid16)
def _sigmoid(scope: KernelScope, node: Node, operator: Sigmoid16, x: Expression) -> Expression:
    table = scope.constant(node.output, "sigmoids", sigmoid_table())
    scaled = total(product(atom(x.text), operator.multiplier), (1 << operator.shift) >> 1)
    scaled = f"({scaled}) >> {operator.shift}" if operator.shift else scaled
    text = f"{'tangent_16' if operator.tangent else 'sigmoid_16'}({scaled}, {table})"
    return scope.named("function", "int32_t", text, DType.INT16.low, DType.INT16.high)
