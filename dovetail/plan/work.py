"""About how long kernels of the core take: for dealing out work, where only the proportion counts."""

from __future__ import annotations

from math import prod

from dovetail.graph.graph import Graph
from dovetail.operators.linear import DepthwiseConv2d

_MAC, _DEPTHWISE_MAC = 3.0, 3.5
_ELEMENT = 6.0
"""Cycles of RV32IMC per multiply-accumulate, and per element of each operator's result (docs/benchmarks.md)."""


def work(graph: Graph) -> float:
    """Cycles that computing a region takes on a core of speed 1, by estimate."""
    found = 0.0
    for node in graph.nodes:
        types = [graph.types[name] for name in node.inputs]
        each = _DEPTHWISE_MAC if isinstance(node.operator, DepthwiseConv2d) else _MAC
        macs = node.operator.macs(types)
        elements = prod(graph.types[node.output].shape)
        if not macs:
            elements = max([elements, *(prod(kind.shape) for kind in types[:1])])
        found += each * macs + _ELEMENT * elements
    return found
