"""The float network a quantised one stands for, so that it can be quantised anew: to other scales, widths or types.

Every integer that stands for a real number becomes that number. What the integers' range cut off stays where it is a
limit the network was made with: a zero point at the least integer is a ReLU that was put into the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from dovetail.errors import ModelError
from dovetail.guests.ptq.steps import TensorQuantisation
from dovetail.ir.boundary import boundary
from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.movement import Pad
from dovetail.ir.pattern import apply, occurrence
from dovetail.ir.types import Array, DType, TensorType

_PAD = apply(Pad)


def is_quantised(graph: Graph) -> bool:
    """Whether values, and not constants alone, are quantised."""
    return any(
        node.operator.quantises or (node.operator.dequantises and node.inputs[0] not in graph.constants)
        for node in graph.nodes
    )


def input_steps(graph: Graph) -> dict[str, TensorQuantisation]:
    """The quantisation of each quantised input, by its name."""
    kinds = {name: graph.types[name].dtype for name in graph.inputs}
    ends = boundary(graph).items()
    return {name: TensorQuantisation(kinds[name], one.scale, one.zero_point) for name, one in ends if name in kinds}


def unquantised(graph: Graph, saturates: bool = False) -> Graph:
    """The network on floats: no Quantize and no Dequantize is left.

    Args:
        graph: in QDQ form.
        saturates: whether all values stay limited to what their integers reach; else only from below where that is 0.

    Raises:
        ModelError: integers that stand for real numbers are computed with as such, by something that takes no floats.
    """
    rewriter = _FloatRewriter(graph, GraphBuilder(graph.name), saturates, input_steps(graph))
    for name in graph.inputs:
        kind = graph.types[name]
        real = TensorType(kind.shape, DType.FLOAT32) if name in rewriter.steps else kind
        rewriter.real[name] = rewriter.builder.input(name, real)
    for node in graph.nodes:
        rewriter.take(node)
    return rewriter.builder.finish([rewriter.value(name) for name in graph.outputs], graph.states)


@dataclass
class _FloatRewriter:
    graph: Graph
    builder: GraphBuilder
    saturates: bool
    steps: dict[str, TensorQuantisation]
    """Integer value -> what it stands for, where it is quantised."""
    real: dict[str, str] = field(default_factory=dict)
    """Value -> the new value: of integers that stand for real numbers, these."""

    def value(self, name: str) -> str:
        """The new value of an old one."""
        if name not in self.real:
            array, kind = self.graph.constants[name], self.graph.types[name]
            self.real[name] = self.builder.constant(name, array, kind.dtype)
        return self.real[name]

    def take(self, node: Node) -> None:
        """Add what a node means for floats."""
        operator, constants = node.operator, self.graph.constants
        if operator.dequantises:
            self.real[node.output] = self._dequantised(node)
        elif operator.quantises:
            self.real[node.output] = self._quantised(node)
        else:
            steps = next((self.steps[name] for name in node.inputs if name in self.steps), None)
            if steps is not None and (border := occurrence(_PAD, self.graph, node)) is not None:
                operator = replace(border[_PAD], value=steps.real(border[_PAD].value))
            try:
                inputs = [self.value(name) for name in node.inputs]
                self.real[node.output] = self.builder.add(operator, inputs, node.output, node.origin)
            except ValueError as error:
                hint = "give the float model"
                raise ModelError(f"its integers are computed with: {error}", where=node.origin, hint=hint) from None
            if steps is not None and all(name in self.steps or name in constants for name in node.inputs):
                self.steps[node.output] = steps

    def _dequantised(self, node: Node) -> str:
        if all(name in self.graph.constants for name in node.inputs):
            array = node.operator.evaluate([self.graph.constants[name] for name in node.inputs])
            return self.builder.constant(node.output, array.astype(np.float32))
        return self.value(node.inputs[0])

    def _quantised(self, node: Node) -> str:
        scale, zero = (self.graph.constants[name].reshape(-1) for name in node.inputs[1:])
        steps = TensorQuantisation(self.graph.types[node.output].dtype, float(scale[0]), int(zero[0]))
        self.steps[node.output] = steps
        value = self.value(node.inputs[0])
        low, high = steps.real(steps.dtype.low), steps.real(steps.dtype.high)
        if self.saturates:
            return self.builder.add(Clamp(low, high), [value], node.output, node.origin)
        if steps.zero_point != steps.dtype.low or self.builder.constant_of(value) is not None:
            return value
        return self.builder.add(Clamp(0.0, inf), [value], node.output, node.origin)


def as_reals(array: Array, steps: TensorQuantisation | None) -> Array:
    """Samples of an input: integers of the quantised input as the numbers they stand for; others as they are."""
    fits = steps is not None and array.dtype.kind in "iu" and array.dtype == steps.dtype.numpy
    return (array.astype(np.float64) - steps.zero_point) * steps.scale if fits and steps is not None else array
