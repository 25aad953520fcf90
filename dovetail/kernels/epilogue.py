"""The tree of pointwise operators behind an anchor, or alone, as C of one element."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.requantisation.pairs import SumChain, sum_chains
from dovetail.ir.requantisation.products import TableProduct, table_products
from dovetail.kernels.c import Lines, atom, c_type, product, real, total, wrapped
from dovetail.kernels.kernel import Expression, Index, UnsupportedRegion, expression_of
from dovetail.kernels.registry import RULES
from dovetail.kernels.scope import KernelScope

_MOST_SHIFT = 24


def _as_line(graph: Graph, line: SumChain, operands: Sequence[Expression]) -> Expression | None:
    """The sum of a line before it is limited; None where no line computes it."""
    numbers = line.linear(graph, [(x.low, x.high) for x in operands], _MOST_SHIFT)
    if numbers is None or any(x.c_type != "int32_t" for x in operands):
        return None
    terms = [product(atom(x.text), factor) for x, factor in zip(operands, numbers.factors, strict=True)]
    return Expression(f"({total(*terms, numbers.offset)}) >> {numbers.shift}", "int32_t", numbers.low, numbers.high)


def _by_table(scope: KernelScope, one: TableProduct, x: Expression, y: Expression, node: Node) -> Expression:
    """The product of a table's value and a byte before it is limited by a node."""
    table = scope.constant(node.output, "products", one.table)
    factor = f"{table}[{total(x.text, -scope.graph.types[one.x].dtype.low)}]"
    text = f"({factor} * {wrapped(total(y.text, one.offset))} + {one.addition}) >> {one.shift}"
    return Expression(text, "int32_t", one.low, one.high)


def element(scope: KernelScope, index: Index, value: Expression | None, done: int = 0) -> str:
    """C text of one element of the result, in its own type; the statements before it are `scope.lines`.

    Args:
        scope: the kernel's parameters; gains those the tree needs.
        index: where the present element is.
        value: the anchor's, or that of the last of the tree's operators that are computed already; None for a region of
            pointwise operators alone.
        done: how many are.
    """
    graph = scope.graph
    scope.begin(index)
    tree, before = scope.tree[done:], scope.tree[done - 1] if done else scope.anchor
    values = {before.output: value} if before and value else {}

    def value_of(name: str) -> Expression:
        if name not in values:
            kind = graph.types[name]
            if name in graph.constants:
                text = scope.element(scope.constant(name, "addends", graph.constants[name]), kind.shape)
            else:
                text = scope.loaded(name, scope.input(name), index(kind.shape))
            values[name] = expression_of(text, kind.dtype)
        return values[name]

    users, chains = graph.users(), {} if scope.compact else sum_chains(graph, tree)
    tables = {} if scope.compact else table_products(graph, tree)

    def compute(node: Node) -> None:
        write = RULES.get(type(node.operator), _by_template)
        result = write(scope, node, node.operator, *map(value_of, node.inputs[: node.operator.pointwise]))
        if len(users[node.output]) > 1 and not result.text.isidentifier():
            result = scope.named("shared", result.c_type, result.text, result.low, result.high)
        values[node.output] = result

    put_off = {node.output for chain in chains.values() for node in chain.nodes}
    put_off.update(*(one.inner for one in tables.values()))
    for node in tree:
        if one := tables.get(node.output):
            values[node.inputs[0]] = _by_table(scope, one, value_of(one.x), value_of(one.y), node)
            compute(node)
            continue
        chain = chains.get(node.output)
        if chain is not None and (whole := _as_line(graph, chain, [value_of(name) for name in chain.operands])):
            values[node.inputs[0]] = whole
        elif chain is not None:
            for part in chain.nodes:
                compute(part)
        if node.output not in put_off:
            compute(node)
    output = graph.outputs[0]
    final, stored = value_of(output), c_type(graph.types[output].dtype)
    plain = stored == final.c_type or scope.shares(output)
    return final.text if plain else f"({stored}){atom(final.text)}"


def finish(scope: KernelScope, index: Index, value: Expression | None) -> Lines:
    """The statements that compute one element of the result and store it; arguments as of `element`."""
    text = element(scope, index, value)
    return [*scope.lines, scope.stored(index(scope.graph.types[scope.graph.outputs[0]].shape), text)]


def _by_template(scope: KernelScope, node: Node, operator: Operator, *operands: Expression) -> Expression:
    """The C that a pointwise operator of floats says itself."""
    if not operator.c_template:
        raise UnsupportedRegion(f"there is no core kernel for {type(operator).__name__}.")
    reals = {name: real(value) for name, value in vars(operator).items() if isinstance(value, float)}
    names = {name: named(scope, x, "operand") for name, x in zip("xyz", operands, strict=False)}
    return scope.named("function", "float", operator.c_template.format(**names, **reals))


def named(scope: KernelScope, operand: Expression, stem: str) -> str:
    """An identifier for an operand that is read more than once."""
    return operand.text if operand.text.isidentifier() else scope.define(stem, operand.c_type, operand.text)
