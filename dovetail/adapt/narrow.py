"""Weights in the narrowest type that holds them, for engines that store and compute fewer bits faster. Exact."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from dovetail.graph.graph import Graph
from dovetail.graph.types import DType, TensorType
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected

_SIGNED = (DType.INT2, DType.INT4)


def narrow_weights(types: Collection[DType] = _SIGNED) -> Callable[[Graph], Graph]:
    """A rewrite that gives constant weights of layers the first of `types` whose range their values keep within.

    Files hold narrow weights in wider types where their format or its readers have none (a 2-bit one in ONNX).
    """

    def rewrite(graph: Graph) -> Graph:
        """The graph with narrower types."""
        kinds = dict(graph.types)
        for name in _weights_only(graph):
            array, kind = graph.constants[name], graph.types[name]
            low, high = int(array.min()), int(array.max())
            for dtype in types:
                if dtype.bits < kind.dtype.bits and kind.dtype.signed and dtype.low <= low and high <= dtype.high:
                    kinds[name] = TensorType(kind.shape, dtype)
                    break
        return replace(graph, types=kinds)

    return rewrite


def _weights_only(graph: Graph) -> list[str]:
    """Constant weights that nothing but layers reads."""
    users = graph.users()
    return [
        name
        for name, array in graph.constants.items()
        if array.size
        and name not in graph.outputs
        and users[name]
        and all(
            isinstance(node.operator, Conv2d | DepthwiseConv2d | FullyConnected)
            and node.inputs[1] == name
            and node.inputs.count(name) == 1
            for node in users[name]
        )
    ]
