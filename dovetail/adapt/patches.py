"""Convolutions an engine lacks, or does slowly, as data movement and 1x1 convolutions. Exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.types import TensorType
from dovetail.operators.linear import Conv2d
from dovetail.operators.movement import Patches, Slice

Chooses = Callable[[Mapping[str, TensorType], Node], bool]
"""Whether a convolution is to be rewritten; told the types of all values."""


def convolution_as_patches(chooses: Chooses) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen convolution becomes a 1x1 convolution of its patches."""

    def rule(draft: Draft, node: Node) -> str | None:
        """The convolution of patches; None where it was not chosen."""
        operator = node.operator
        if not isinstance(operator, Conv2d) or node.inputs[1] not in draft.constants:
            return None
        weights = draft.constants[node.inputs[1]]
        kernel = (weights.shape[1], weights.shape[2])
        kinds = [draft.types[value] for value in node.inputs]
        if kernel == (1, 1) or operator.groups(kinds) > 1 or not chooses(draft.types, node):
            return None
        moved = draft.add(Patches(kernel, operator.stride, operator.dilation), [node.inputs[0]], node)
        flat = weights.reshape(weights.shape[0], 1, 1, prod(weights.shape[1:]))
        name = draft.constant(flat, draft.types[node.inputs[1]].dtype, node.inputs[1])
        dense = replace(operator, stride=(1, 1), dilation=(1, 1))
        return draft.add(dense, [moved, name, *node.inputs[2:]], node)

    return lambda graph: run(graph, [rule])


def stride_as_slice(chooses: Chooses) -> Callable[[Graph], Graph]:
    """A rewrite: a chosen strided 1x1 convolution becomes a dense one of every n-th pixel."""

    def rule(draft: Draft, node: Node) -> str | None:
        """Every n-th pixel, then a dense convolution; None where it was not chosen."""
        operator = node.operator
        if not isinstance(operator, Conv2d) or operator.stride == (1, 1):
            return None
        if draft.types[node.inputs[1]].shape[1:3] != (1, 1) or not chooses(draft.types, node):
            return None
        shape = draft.types[node.inputs[0]].shape
        step = (1, *operator.stride, 1)
        sliced = draft.add(Slice((0, 0, 0, 0), shape, step), [node.inputs[0]], node)
        return draft.add(replace(operator, stride=(1, 1)), [sliced, *node.inputs[1:]], node)

    return lambda graph: run(graph, [rule])
