"""Requantisation by shifting alone: sums of two values of one scale, and results that fill whole words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.adapt.residual import sum_of_two
from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.types import Array, DType
from dovetail.operators.arithmetic import Add, Clip, Offset, ScaleShift
from dovetail.operators.linear import FullyConnected
from dovetail.operators.movement import Slice


def addition_by_shift(most_shift: int) -> Callable[[Graph], Graph]:
    """A rewrite: requantize(add(requantize(a), requantize(b))) of two int8 images of one shape and one scale, a power
    of two apart from the result's, becomes (a + b) >> shift, rounded down. The result is within 1 of the original."""

    def rule(draft: Draft, node: Node) -> str | None:
        """The sum shifted; None where the scales are not a power of two apart."""
        found = sum_of_two(draft, node, DType.INT8)
        if found is None or found.factors[0] != found.factors[1] or any((*found.zeros, found.zero)):
            return None
        shift = -np.log2(found.factors[0])
        if shift != int(shift) or not 0 <= shift <= most_shift:
            return None
        wide = [draft.add(Offset(0, DType.INT32), [value], node) for value in found.operands]
        total = draft.add(Add(), wide, node)
        names = [draft.constant(np.array([n], np.int32), DType.INT32, node.output) for n in (1, 0, int(shift))]
        return draft.add(node.operator, [draft.add(ScaleShift(), [total, *names], node)], node)

    return lambda graph: run(graph, [rule])


def dense_results_of(multiple: int) -> Callable[[Graph], Graph]:
    """A rewrite: a scale-shifted dense layer whose results are no multiple of so many gets results of zero, which are
    cut off again. Exact."""

    def rule(draft: Draft, node: Node) -> str | None:
        """The layer with more rows, and a slice of it; None where there are enough."""
        scaled = draft.made_by(node.inputs[0], ScaleShift) if isinstance(node.operator, Clip) else None
        dense = draft.made_by(scaled.inputs[0], FullyConnected) if scaled is not None else None
        if scaled is None or dense is None or max(draft.users(scaled.output), draft.users(dense.output)) > 1:
            return None
        count, known = draft.types[dense.output].shape[-1], draft.constants
        if count % multiple == 0 or len(dense.inputs) > 2 or any(v not in known for v in scaled.inputs[1:]):
            return None

        def longer(name: str, fill: str) -> str:
            """The constant with more rows: of zeros, or of its last."""
            array = known[name] if known[name].shape[0] > 1 else np.repeat(known[name], count, axis=0)
            return draft.constant(_rows(array, -count % multiple, fill), draft.types[name].dtype, name)

        wide = draft.add(dense.operator, [dense.inputs[0], longer(dense.inputs[1], "constant")], dense)
        parameters = [longer(name, "edge") for name in scaled.inputs[1:]]
        clipped = draft.add(node.operator, [draft.add(ScaleShift(), [wide, *parameters], scaled)], node)
        shape = draft.types[node.output].shape
        return draft.add(Slice((0,) * len(shape), shape, (1,) * len(shape)), [clipped], node)

    return lambda graph: run(graph, [rule])


def _rows(array: Array, count: int, mode: str) -> Array:
    """The array with `count` more rows."""
    pads = [(0, count)] + [(0, 0)] * (array.ndim - 1)
    return np.asarray(np.pad(array, pads, mode="edge" if mode == "edge" else "constant"))
