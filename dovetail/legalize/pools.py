"""Average pools in an engine's arithmetic, where it gives every possible sum the pool's own rounding. Exact."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Clip, Offset, ScaleShift
from dovetail.ir.operators.linear import DepthwiseConv2d
from dovetail.ir.operators.reduction import AveragePool2d
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import DType
from dovetail.legalize.requantisation import Accepts, RequantisationLimits

_WEIGHTS = (DType.INT2, DType.INT4, DType.INT8)


def average_pool_as_depthwise(accepts: Accepts, limits: RequantisationLimits) -> Callable[[Graph], Graph]:
    """A rewrite: offset(clip(average pool)) of bytes becomes a depthwise convolution with one weight everywhere, scaled
    and shifted, if the engine takes that and a weight, scale, offset and shift give the same result for every sum.

    Args:
        accepts: whether the engine takes the shape of the pool, as that of a depthwise layer; told of the pool's node.
        limits: of the engine's requantisation.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        found = _pool(draft, node)
        if found is None or draft.types[node.output].dtype is not limits.activations:
            return None
        pool, clip = found
        operator, source = pool.operator, pool.inputs[0]
        assert isinstance(operator, AveragePool2d) and isinstance(node.operator, Offset)
        if draft.types[source].dtype is not limits.activations or any(map(any, operator.padding)):
            return None
        if not accepts(draft.types, pool):
            return None
        taps, added = prod(operator.kernel), node.operator.offset
        wanted = _means(taps, operator.input_zero_point)
        chosen = division(np.clip(wanted, clip.low, clip.high) + added if clip else wanted + added, taps, limits)
        if chosen is None:
            return None
        weight, kind, parameters = chosen
        shape = (1, *operator.kernel, draft.types[source].shape[3])
        weights = draft.constant(np.full(shape, weight, kind.numpy), kind, node.output)
        one = prod(draft.types[pool.output].shape[1:3]) == 1
        total = draft.add(DepthwiseConv2d((1, 1) if one else operator.stride), [source, weights], pool)
        names = [draft.constant(np.array([number], np.int32), DType.INT32, node.output) for number in parameters]
        scaled = draft.add(ScaleShift(), [total, *names], pool)
        return draft.add(Clip(limits.activations.low, limits.activations.high, limits.activations), [scaled], node)

    return lambda graph: run(graph, [rule])


def _pool(draft: Draft, node: Node) -> tuple[Node, Clip | None] | None:
    """The pool behind an offset, and the clip between them; None where there is none or something else reads either."""
    if not isinstance(node.operator, Offset):
        return None
    clip = draft.made_by(node.inputs[0], Clip)
    value = clip.inputs[0] if clip is not None else node.inputs[0]
    pool = draft.made_by(value, AveragePool2d)
    if pool is None or draft.users(value) > 1 or draft.users(node.inputs[0]) > 1:
        return None
    if clip is None:
        return pool, None
    assert isinstance(clip.operator, Clip)
    return pool, clip.operator


def _means(taps: int, zero_point: int) -> NDArray[np.int64]:
    """What an average pool of so many bytes gives for each sum of theirs, from 0 on: rounded half away from zero."""
    totals = np.arange(255 * taps + 1, dtype=np.int64) - taps * zero_point
    means: NDArray[np.int64] = np.sign(totals) * ((np.abs(totals) + taps // 2) // taps)
    return means


def division(
    wanted: NDArray[np.int64], taps: int, limits: RequantisationLimits
) -> tuple[int, DType, tuple[int, int, int]] | None:
    """A weight, its type, and scale, offset and shift with which (sum * weight * scale + offset) >> shift, clipped to
    0..255, is `wanted[sum]` for every sum; None where there are none. Of several, weights of the fewest bits."""
    sums = np.arange(len(wanted), dtype=np.int64)
    for kind in _WEIGHTS:
        for weight in range(1, kind.high + 1):
            for shift in range(min(limits.most_shift, 24) + 1):
                nearest = (1 << shift) / (taps * weight)
                for scale in {int(nearest), int(nearest) + 1}:
                    if 0 < scale < 1 << limits.scale_bits:
                        offset = _offset(sums * (weight * scale), wanted, shift)
                        if offset is not None:
                            return weight, kind, (scale, offset, shift)
    return None


def _offset(products: NDArray[np.int64], wanted: NDArray[np.int64], shift: int) -> int | None:
    """What makes (product + offset) >> shift the wanted byte for each product, the bounds of bytes apart: the middle of
    what does; None where nothing does within 32 bits."""
    least = ((wanted << shift) - products)[wanted > 0]
    most = (((wanted + 1) << shift) - 1 - products)[wanted < 255]
    low, high = int(least.max(initial=-(1 << 31))), int(most.min(initial=(1 << 31) - 1))
    offset = (low + high) // 2
    return offset if low <= high and int(products[-1]) + abs(offset) < 1 << 31 else None
