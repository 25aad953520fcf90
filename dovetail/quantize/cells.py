"""Whether anything reads an LSTM's cells, which stand behind its hidden values in one result."""

from __future__ import annotations

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.recurrent import Recurrent, RecurrentKind


def reads_cells(graph: Graph, node: Node) -> bool:
    """True for an LSTM whose cells may be read: they have other steps than hidden values, so that both together are no
    integers of one quantisation."""
    if not isinstance(node.operator, Recurrent) or node.operator.kind is not RecurrentKind.LSTM:
        return False
    users, steps, open_ = graph.users(), graph.types[node.inputs[0]].shape[0], [node.output]
    while open_:
        value = open_.pop()
        if value in graph.outputs:
            return True
        for reader in users[value]:
            part = reader.operator.box_read
            if reader.operator.quantises or reader.operator.dequantises:
                open_.append(reader.output)
            elif part is None or part[0][1] > steps:
                return True
    return False
