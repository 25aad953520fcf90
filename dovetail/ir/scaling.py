"""Constant factors and offsets along the last axis of a value, such as those behind a layer normalisation."""

from __future__ import annotations

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Linear
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.reduction import Normalise
from dovetail.ir.pattern import apply, constant, maybe, occurrence, rest
from dovetail.ir.rewrite import X
from dovetail.ir.rules import Rule, RuleMatch
from dovetail.ir.types import Array, DType, Shape

ROWS = apply(Normalise, having=lambda operator: not operator.summed)
"""A layer normalisation, without factor and offset."""


def rows_of_line(line: tuple[Array, Array] | None, channels: Shape) -> tuple[Array, Array] | None:
    """Factor and offset of a line (`Operator.line_of`) as rows along the last axis of its result, [1] or [C] each; None
    where they do not run along it alone."""
    fitting = [array for array in line or () if array.size in (1, *array.shape[-1:]) and array.size in (1, *channels)]
    return (fitting[0].reshape(-1), fitting[1].reshape(-1)) if len(fitting) == 2 else None


def folding(first: bool = True) -> Rule:
    """The rule by which a constant factor and offset per channel go into the float weights of the layer before, perhaps
    with a reshape between them that keeps the channels: w' = w * factor, b' = b * factor + offset, as in
    arXiv:1712.05877, section 3.2. `first`: the layer's result is the first operand of what scales it, not the second.
    """
    weights = constant("weights")
    layer = apply(Linear, X, weights, rest("bias", known=True), alone=True)
    shaped = maybe(Reshape, layer, alone=True)

    def folded(at: RuleMatch) -> str | None:
        place, array = at.root.inputs[0 if first else 1], at.array(weights)
        arrays = [None if name == place else at.array(name) for name in at.root.inputs]
        line = rows_of_line(at.root.operator.line_of(arrays), at.type(layer).shape[-1:])
        if line is None or array.dtype != np.float32:
            return None
        axis, name = at[layer].weight_axis, at[weights]
        factor = np.broadcast_to(line[0], array.shape[axis : axis + 1])
        along = factor.reshape([-1 if index == axis else 1 for index in range(array.ndim)])
        bias = sum((at.array(one).astype(np.float64) for one in at.others(layer)), np.zeros(factor.size))
        new = {name: array.astype(np.float64) * along, f"{name}_bias": bias * factor + line[1]}
        operands = [at.constant(array.astype(np.float32), DType.FLOAT32, like) for like, array in new.items()]
        result = at.add(at[layer], X, *operands, like=layer, stem=at.root.output)
        return at.add(Reshape(at.type(at.root.output).shape), result) if at.has(shaped) else result

    def keeps_channels(at: RuleMatch) -> bool:
        before, after = at.type(layer), at.type(at.root.output)
        return (before.elements, before.shape[-1:]) == (after.elements, after.shape[-1:])

    operands = (shaped, rest("numbers", known=True)) if first else (constant("number"), shaped)
    return Rule(apply(Operator, *operands), folded, (keeps_channels,))


def scaled_rows(graph: Graph, node: Node) -> tuple[str, Normalise, Array, Array] | None:
    """Operand and operator of the layer normalisation whose rows a node gives scaled and moved by constants, with the
    product and the sum of these: what ONNX and Keras have as one operator. None for every other node."""
    size = graph.types[node.output].shape[-1:]
    factor, offset = np.ones(1), np.zeros(1)
    while (rows := occurrence(ROWS, graph, node)) is None:
        arrays = [known_real(graph, name) for name in node.inputs]
        line = rows_of_line(node.operator.line_of(arrays), size)
        if node.operator.is_view and graph.types[node.inputs[0]].shape[-1:] == size:
            line, arrays = (np.ones(1), np.zeros(1)), [None]
        place = next((place for place, array in enumerate(arrays) if array is None), 0)
        inner = graph.producer(node.inputs[place]) if line else None
        if line is None or inner is None:
            return None
        factor, offset, node = factor * line[0], offset + factor * line[1], inner
    return node.inputs[0], rows[ROWS], factor, offset


def known_real(graph: Graph, name: str) -> Array | None:
    """A float constant, as it is or as constant integers stand for it; None for a value computed at run time."""
    node = graph.producer(name)
    if node is None or not node.operator.dequantises or node.inputs[0] not in graph.constants:
        return graph.constants.get(name)
    return node.operator.evaluate([graph.constants[value] for value in node.inputs])
