"""int8 activations as uint8, for engines that read nothing else. Exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dovetail.ir.graph import Graph, GraphBuilder, Node
from dovetail.ir.operators.arithmetic import Clip, Offset, Requantize
from dovetail.ir.operators.base import Operator
from dovetail.ir.pattern import apply, occurrence, operand, rest
from dovetail.ir.types import DType

_SHIFT = 128
_X = operand("x")
_REQUANTIZE = apply(Requantize, _X, rest("parameters"), alone=True)
_CLIP = apply(Clip, _REQUANTIZE, having=lambda clip: clip.dtype is DType.INT8)


def unsigned_activations(graph: Graph) -> Graph:
    """The graph with int8 activations replaced by uint8 ones; inputs and outputs keep their types.

    Every int8 value v is stored as v + 128, and every zero point moves with it.
    """
    draft = _UnsignedRewriter(graph, GraphBuilder(graph.name))
    for name in graph.inputs:
        draft.builder.input(name, graph.types[name])
        draft.signed[name] = name
    for node in graph.nodes:
        draft.take(node)
    for name in graph.outputs:
        draft.same(name)
    return draft.builder.finish(graph.outputs, graph.states)


@dataclass
class _UnsignedRewriter:
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

    def offset_of(self, value: str) -> int:
        """How much higher a value can be: int8 ones that are computed at run time."""
        kind = self.graph.types[value].dtype
        return _SHIFT if kind is DType.INT8 and value not in self.graph.constants else 0

    def operands(self, values: Sequence[str], by: Sequence[int]) -> list[str]:
        """New values, raised where `by` says so."""
        return [self.unsigned(value) if raised else self.same(value) for value, raised in zip(values, by, strict=True)]

    def take(self, node: Node) -> None:
        """Add a node for values that are higher, where its operator can be."""
        whole = [self.offset_of(value) for value in node.inputs]
        limited = occurrence(_CLIP, self.graph, node)
        if limited is not None:
            clip, scaled, first = limited[_CLIP], limited.node(_REQUANTIZE), [self.offset_of(limited[_X]), 0, 0]
            raised = limited[_REQUANTIZE].raised(first)
            more = replace(raised, output_zero_point=limited[_REQUANTIZE].output_zero_point + _SHIFT)
            stem = f"{scaled.output}_unsigned"
            total = self.builder.add(more, self.operands(scaled.inputs, first), stem, scaled.origin)
            self._add_raised(node, Clip(clip.low + _SHIFT, clip.high + _SHIFT, DType.UINT8), [total])
            return
        chooses, none = bool(node.operator.chosen_from(node.inputs)), [0] * len(whole)
        may = any(whole) if not chooses else all(whole) and node.output not in self.graph.outputs
        ways = ((node.operator.raised(by), by) for by in (whole, [*whole[:1], *none[1:]]) if may and any(by))
        operator, by = next(((one, by) for one, by in ways if one is not None), (node.operator, none))
        if chooses and any(by):
            self._add_raised(node, operator, self.operands(node.inputs, by))
        else:
            inputs = self.operands(node.inputs, by)
            self.signed[node.output] = self.builder.add(operator, inputs, node.output, node.origin)

    def _add_raised(self, node: Node, operator: Operator, inputs: list[str]) -> None:
        stem = f"{node.output}_unsigned"
        self.raised[node.output] = self.builder.add(operator, inputs, stem, node.origin)
