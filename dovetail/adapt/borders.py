"""Windows that lie off-centre as larger ones that do not, for engines that pad all sides alike. Exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dovetail.graph.graph import Graph, Node
from dovetail.graph.rewrite import Draft, run
from dovetail.graph.types import Array
from dovetail.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.operators.movement import Pad


def even_borders(largest: int) -> Callable[[Graph], Graph]:
    """A rewrite: convolutions get taps of zero until the border is half a window on every side.

    TFLite's SAME with stride 2 pads one row below and none above: a 3x3 window becomes the corner of a 5x5 one.

    Args:
        largest: rows and columns of the largest window made.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        """The layer reading a border of the wanted widths; None where it has them or cannot."""
        operator = node.operator
        if not isinstance(operator, Conv2d | DepthwiseConv2d) or operator.dilation != (1, 1):
            return None
        if operator.weight_zero_point or node.inputs[1] not in draft.constants:
            return None
        pad = draft.made_by(node.inputs[0], Pad)
        border = pad.operator if pad is not None else Pad((0,) * 4, (0,) * 4, operator.input_zero_point)
        source = pad.inputs[0] if pad is not None else node.inputs[0]
        assert isinstance(border, Pad)
        if border.value != operator.input_zero_point or any(border.before[a] + border.after[a] for a in (0, 3)):
            return None
        weights, kind = draft.constants[node.inputs[1]], draft.types[source]
        sides = [_half(weights.shape[axis], border.before[axis]) for axis in (1, 2)]
        wanted = (0, *sides, 0)
        fits = all(
            (kind.shape[1 + axis] - 1) // operator.stride[axis] + 1 == draft.types[node.output].shape[1 + axis]
            and 2 * sides[axis] + 1 <= largest
            for axis in (0, 1)
        )
        if not fits or (border.before == wanted and border.after == wanted):
            return None
        padded = draft.add(Pad(wanted, wanted, border.value), [source], node) if any(sides) else source
        grown = _grown(weights, [side - border.before[axis] for axis, side in enumerate(sides, 1)], sides)
        name = draft.constant(grown, draft.types[node.inputs[1]].dtype, node.inputs[1])
        return draft.add(replace(operator), [padded, name, *node.inputs[2:]], node)

    return lambda graph: run(graph, [rule])


def _half(taps: int, before: int) -> int:
    """Half the smallest window around the middle that holds `taps` taps, the first `before` pixels ahead of it."""
    return max(before, taps - 1 - before)


def _grown(weights: Array, first: list[int], sides: list[int]) -> Array:
    """The weights (taps along axes 1 and 2) from taps `first` on of a window of 2 * sides + 1."""
    pads = [(0, 0)] * 4
    for axis in (1, 2):
        lead = first[axis - 1]
        pads[axis] = (lead, 2 * sides[axis - 1] + 1 - lead - weights.shape[axis])
    return np.pad(weights, pads)
