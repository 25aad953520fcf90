"""Residual additions of int8 that stand alone: one line (`SumChain`) over whole arrays, a loop for all layers."""

from __future__ import annotations

from math import prod

import numpy as np

from dovetail.ir.requantisation.pairs import SumChain, sum_chains
from dovetail.ir.types import DType
from dovetail.kernels.c import Lines, total
from dovetail.kernels.scope import KernelScope

ADD_BYTES = "add_bytes"
"""The loop of cores that compute it in their own way."""
_ADD_SHIFT = 21
"""Its shift."""
_MOST_SHIFT = 24
_MOST_PLACES = 2048
"""Most entries of a table of limited results."""


def _line_of(scope: KernelScope) -> SumChain | None:
    """The line a region is, where it adds two arrays of int8 of the result's shape."""
    graph, result = scope.graph, scope.graph.types[scope.graph.outputs[0]]
    if scope.anchor is not None or scope.layouts or result.dtype is not DType.INT8:
        return None
    line = sum_chains(graph, scope.tree).get(graph.outputs[0])
    if line is None or len(line.nodes) + 1 != len(scope.tree) or len(line.operands) != 2:
        return None
    return line if all(graph.types[name] == result and name in graph.inputs for name in line.operands) else None


def addition_lines(scope: KernelScope) -> Lines | None:
    """The statements of a region that only adds two arrays; None for others.

    Cores without a loop of their own limit the sums by a table, which takes as long for every sum.
    """
    line = _line_of(scope)
    if line is None:
        return None
    ranges = [(DType.INT8.low, DType.INT8.high)] * 2
    start = [*(scope.input(name) for name in line.operands), prod(scope.output_shape)]
    if ADD_BYTES in scope.core.functions and line.limits == ranges[0]:
        sum_of_two = line.linear(scope.graph, ranges, _ADD_SHIFT)
        if sum_of_two is not None and sum_of_two.shift == _ADD_SHIFT and max(map(abs, sum_of_two.factors)) < 1 << 23:
            return [f"{ADD_BYTES}({', '.join(map(str, ['output', *start, *sum_of_two.factors, sum_of_two.offset]))});"]
    sum_of_two = line.linear(scope.graph, ranges, _MOST_SHIFT)
    if (
        sum_of_two is None
        or sum_of_two.high - sum_of_two.low >= _MOST_PLACES
        or not sum_of_two.low <= 0 <= sum_of_two.high
    ):
        return None
    results = np.clip(np.arange(sum_of_two.low, sum_of_two.high + 1), *line.limits).astype(np.int8)
    table = scope.constant(line.clip.output, "limited", results)
    numbers = [*sum_of_two.factors, sum_of_two.offset, sum_of_two.shift, total(table, -sum_of_two.low)]
    return [f"add_by_table({', '.join(map(str, ['output', *start, *numbers]))});"]
