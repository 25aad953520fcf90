"""Activations as uint8: every int8 value v is stored as v + 128, and every zero point moves with it. Exact."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dovetail.graph.graph import Graph, GraphBuilder, Node
from dovetail.graph.types import DType
from dovetail.operators.arithmetic import Clip, Lookup, Offset, Requantize
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Concat, Pad, Patches, Reshape, Slice, Transpose
from dovetail.operators.pooling import MaxPool2d, SumPool2d

_SHIFT = 128

_MOVERS = (Reshape, Transpose, Concat, Slice, Patches, MaxPool2d)
_READERS = (Conv2d, DepthwiseConv2d, FullyConnected, Requantize, SumPool2d)


def unsigned_activations(graph: Graph) -> Graph:
    """The graph with int8 activations replaced by uint8 ones; inputs and outputs keep their types."""
    draft = _Draft(graph, GraphBuilder(graph.name))
    for name in graph.inputs:
        draft.builder.input(name, graph.types[name])
        draft.signed[name] = name
    for node in graph.nodes:
        draft.take(node)
    return draft.builder.finish(graph.outputs, graph.states)


@dataclass
class _Draft:
    graph: Graph
    builder: GraphBuilder
    signed: dict[str, str] = field(default_factory=dict)
    """Old value -> new value with the same elements."""
    raised: dict[str, str] = field(default_factory=dict)
    """Old int8 value -> new uint8 value, 128 higher."""

    def same(self, value: str) -> str:
        """The new value with the elements of an old one."""
        if value not in self.signed:
            if value in self.graph.constants:
                dtype = self.graph.types[value].dtype
                self.signed[value] = self.builder.constant(value, self.graph.constants[value], dtype)
            else:
                self.signed[value] = self.builder.add(Offset(-_SHIFT, DType.INT8), [self.raised[value]], value)
        return self.signed[value]

    def unsigned(self, value: str) -> str:
        """The new uint8 value of an old int8 one."""
        if value not in self.raised:
            stem = f"{value}_unsigned"
            self.raised[value] = self.builder.add(Offset(_SHIFT, DType.UINT8), [self.same(value)], stem)
        return self.raised[value]

    def is_int8(self, value: str) -> bool:
        """True for an int8 value computed at run time."""
        return self.graph.types[value].dtype is DType.INT8 and value not in self.graph.constants

    def take(self, node: Node) -> None:
        """Carry one node over."""
        operator = node.operator
        keeps_name = node.output in self.graph.outputs
        data = [self.is_int8(value) for value in node.inputs]
        if (
            isinstance(operator, Clip)
            and operator.dtype is DType.INT8
            and not keeps_name
            and self._clip(node, operator)
        ):
            return
        if data and all(data) and isinstance(operator, (*_MOVERS, Pad)) and not keeps_name:
            moved = replace(operator, value=operator.value + _SHIFT) if isinstance(operator, Pad) else operator
            self._add_raised(node, moved, [self.unsigned(value) for value in node.inputs])
        elif data and data[0] and isinstance(operator, _READERS):
            shifted = replace(operator, input_zero_point=operator.input_zero_point + _SHIFT)
            inputs = [self.unsigned(node.inputs[0]), *(self.same(value) for value in node.inputs[1:])]
            self.signed[node.output] = self.builder.add(shifted, inputs, node.output, node.origin)
        elif data and data[0] and isinstance(operator, Lookup):
            inputs = [self.unsigned(node.inputs[0]), self.same(node.inputs[1])]
            self.signed[node.output] = self.builder.add(operator, inputs, node.output, node.origin)
        else:
            inputs = [self.same(value) for value in node.inputs]
            self.signed[node.output] = self.builder.add(operator, inputs, node.output, node.origin)

    def _clip(self, node: Node, clip: Clip) -> bool:
        """Let the requantisation before a clip add the 128; False where another operator stands there."""
        producer = self.graph.producers().get(node.inputs[0])
        if producer is None or not isinstance(producer.operator, Requantize):
            return False
        if len(self.graph.users()[producer.output]) > 1 or producer.output in self.graph.outputs:
            return False
        raised = replace(producer.operator, output_zero_point=producer.operator.output_zero_point + _SHIFT)
        first = producer.inputs[0]
        if self.is_int8(first):
            raised = replace(raised, input_zero_point=raised.input_zero_point + _SHIFT)
        operand = self.unsigned(first) if self.is_int8(first) else self.same(first)
        inputs = [operand, *(self.same(value) for value in producer.inputs[1:])]
        scaled = self.builder.add(raised, inputs, f"{producer.output}_unsigned", producer.origin)
        self._add_raised(node, Clip(clip.low + _SHIFT, clip.high + _SHIFT, DType.UINT8), [scaled])
        return True

    def _add_raised(self, node: Node, operator: Operator, inputs: list[str]) -> None:
        stem = f"{node.output}_unsigned"
        self.raised[node.output] = self.builder.add(operator, inputs, stem, node.origin)
