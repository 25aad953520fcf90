"""When a call may write its result over an operand: the rule, and which operand of a placed call it is."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail import kernels
from dovetail.graph.graph import Graph
from dovetail.program.ir import Buffer, Call


def reads_in_place(graph: Graph, value: str) -> bool:
    """True when a region reads an operand, of the result's own type, only at the place of the element it computes.

    So it is where everything that is made from the operand is pointwise: what is read at a place is then not needed
    for any element but the one that is written there.
    """
    if graph.types[value] != graph.types[graph.outputs[0]]:
        return False
    reached = {value}
    for node in graph.nodes:
        if not reached.isdisjoint(node.inputs):
            if not kernels.is_pointwise(node.operator):
                return False
            reached.add(node.output)
    return True


def overwritten(call: Call, buffers: Mapping[str, Buffer]) -> str | None:
    """The operand a placed call writes its result over; None for most."""
    for value, view in call.operands.items():
        if view.buffer != call.result.buffer and _place(call, value, buffers) == _place(call, None, buffers):
            return value
    return None


def _place(call: Call, value: str | None, buffers: Mapping[str, Buffer]) -> tuple[str, int | None]:
    view = call.result if value is None else call.operands[value]
    buffer = buffers[view.buffer]
    return buffer.memory, None if buffer.address is None else buffer.address + view.offset
