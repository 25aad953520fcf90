"""Rows of dense layers: the operand of every dense layer becomes a matrix, and so does what is computed beside it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.pattern import apply
from dovetail.ir.rules import Draft, tidy_names
from dovetail.ir.types import Shape

_DENSE = apply(FullyConnected)


def rows_as_matrix(graph: Graph) -> Graph:
    """The operand of every dense layer, `[1, 1, K]` or `[1, N, K]` in exports of language models, becomes a matrix
    `[N, K]`, and so does what is computed by element or by row before and behind it: one kernel or engine computes it
    together with the layer. The reshapes around all of these move nothing. Exact."""
    marked = _marked(graph)
    if not marked:
        return graph
    draft, matrices = Draft(graph), dict[str, str]()
    for node in graph.nodes:
        if node.output in marked:
            matrices[node.output] = _as_matrices(draft, node, matrices)
            node = replace(node, operator=Reshape(graph.types[node.output].shape), inputs=(node.output,))
        if node.operator.is_view:  # of the matrix itself
            node = replace(node, inputs=tuple(matrices.get(name, name) for name in node.inputs))
        draft.take(node, ())
    return tidy_names(draft.finish())


def _marked(graph: Graph) -> set[str]:
    """Results of the nodes that are to be computed as matrices: dense layers of other operands, and what is computed by
    element or by row from one to the next."""
    producers, users = graph.producers(), graph.users()
    left = [node for node in graph.nodes if _DENSE.fits(node) and len(graph.types[node.inputs[0]].shape) != 2]
    marked = {node.output for node in left}
    while left:
        node = left.pop()
        near = [*(producers[name] for name in _rows(graph, node) if name in producers), *users[node.output]]
        for other in near:
            if other.output not in marked and _takes_matrices(graph, other):
                marked.add(other.output)
                left.append(other)
    return marked


def _rows(graph: Graph, node: Node) -> list[str]:
    """The operands with a row for each row of the result."""
    if _DENSE.fits(node):
        return [node.inputs[0]]
    count, shape = node.operator.pointwise or int(node.operator.is_rowwise), graph.types[node.output].shape
    return [name for name in node.inputs[:count] if graph.types[name].shape == shape]


def _takes_matrices(graph: Graph, node: Node) -> bool:
    """Whether a node is computed by element or by row, of operands that are whole or the same for all rows."""
    operator, shape = node.operator, graph.types[node.output].shape
    count = operator.pointwise or int(operator.is_rowwise)
    shapes = [graph.types[name].shape for name in node.inputs[:count]]
    if len(shape) in (0, 2) or not all(own == shape or prod(own[:-1]) == 1 for own in shapes):
        return False
    along_rows = getattr(operator, "axis", -1) % len(shape) != len(shape) - 1
    return bool(shapes) and not (along_rows and any(graph.types[name].elements > 1 for name in node.inputs[count:]))


def _as_matrices(draft: Draft, node: Node, matrices: dict[str, str]) -> str:
    """Add a node that computes a matrix; `matrices` has those of values, and gets those of operands."""
    operator, rows = node.operator, _rows(draft.graph, node)
    operands = []
    for place, name in enumerate(node.inputs):
        shape = draft.types[name].shape
        if name in rows and name not in matrices:
            matrices[name] = _seen(draft, node, name, (prod(shape[:-1]), shape[-1]))
        small = place < operator.pointwise and len(shape) > 2 and name not in rows
        operands.append(matrices[name] if name in rows else _seen(draft, node, name, shape[-1:]) if small else name)
    if getattr(operator, "axis", -1) != -1:
        operator = replace(operator, **{"axis": -1})
    return draft.add(operator, operands, node)


def _seen(draft: Draft, node: Node, name: str, shape: Shape) -> str:
    """The same elements under another shape, for a node that reads them."""
    if name in draft.constants:
        return draft.constant(draft.constants[name].reshape(shape), draft.types[name].dtype, name)
    while (view := draft.producer(name)) is not None and view.operator.is_view:
        name = view.inputs[0]
    return name if draft.types[name].shape == shape else draft.add(Reshape(shape), [name], node, name)
