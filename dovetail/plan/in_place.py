"""Results that take the place of an operand that is not wanted any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail import kernels
from dovetail.plan.allocate import Order, lifetimes
from dovetail.program.in_place import reads_in_place
from dovetail.program.ir import Buffer, Call, Statement, View


def overwrites(statements: Sequence[Statement], buffers: Mapping[str, Buffer], dma: str) -> dict[str, str]:
    """The buffers that may lie where another one has lain until the call that first writes them, and that one.

    The call reads the old buffer for the last time, element by element at the place it writes; both are filled by
    their values, so that they begin and end together.
    """
    spans, order = lifetimes(statements, buffers, dma), Order(statements, dma)
    found: dict[str, str] = {}
    for index, statement in enumerate(statements):
        if not isinstance(statement, Call) or spans[statement.result.buffer].first < index:
            continue
        for value, view in statement.operands.items():
            last = spans[view.buffer].last_by_queue
            dies = all(order.finished_at(queue, last[queue]) <= index for queue in last)
            if dies and view.buffer not in found.values() and _may_share(statement, value, buffers):
                found[statement.result.buffer] = view.buffer
                break
    return found


def _may_share(call: Call, value: str, buffers: Mapping[str, Buffer]) -> bool:
    old, new = buffers[call.operands[value].buffer], buffers[call.result.buffer]
    if old.memory != new.memory or not all(_fills(view, buffers) for view in (call.operands[value], call.result)):
        return False
    alone = sum(view.buffer == old.name for view in call.operands.values()) == 1
    return alone and reads_in_place(call.graph, value) and kernels.may_overwrite(call.graph)


def _fills(view: View, buffers: Mapping[str, Buffer]) -> bool:
    return view.is_dense and view.span == (0, buffers[view.buffer].nbytes)
