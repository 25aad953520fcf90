"""Requantised sums of narrow values as one line: `(a * m + b * n + c) >> s`, proved on every pair of operands.

A residual addition scales both operands, adds, scales again and limits. Of two 8-bit operands there are 65,536 pairs:
all of it is computed for each at compile time, and numbers are sought with which one line agrees everywhere. For given
m and n those of c are an interval: each pair with a result above the least says how small the sum may be there, each
with one below the greatest how large. The room between the two bounds is concave in (m, n), so steps uphill from the
real factors find it where it is. Nothing is assumed of how the operators round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import floor, log2

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.base import Operator
from dovetail.ir.requantisation.bounds import Range
from dovetail.ir.types import Array
from dovetail.records import Record, field

VALUES = 256
"""Most values of an operand."""
_STEPS = 400
"""Most sums tried in the search for one."""
_TILTS = (1.0, 1.0 + 2**-14, 1.0 + 2**-11)
"""Halves rounded away from zero on both sides are those of a sum a little too steep."""
_NEIGHBOURS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))


class LinearSum(Record):
    """(operands times factors + offset) >> shift, to be limited; no part of the sum leaves 32 bits."""

    factors: tuple[int, ...]
    """One for each operand."""
    offset: int
    shift: int
    low: int
    """The least value before it is limited."""
    high: int
    """The greatest."""


class SumChain(Record):
    """Nodes that are one line together."""

    nodes: tuple[Node, ...]
    """Requantisations and additions, in order; `clip` limits the result of the last."""
    clip: Node
    limits: Range
    """Limits of `clip`."""
    operands: tuple[str, ...]
    """One or two values."""
    slopes: tuple[float, ...]
    """How fast the sum grows with each operand."""

    def linear(self, graph: Graph, ranges: Sequence[Range], most: int) -> LinearSum | None:
        """The line, for operands within these ranges and a shift of at most `most`; None where there is none."""
        if any(high - low >= VALUES for low, high in ranges):
            return None
        steps, places = [], {name: number for number, name in enumerate(self.operands)}
        for node in (*self.nodes, self.clip):
            numbers = tuple(int(graph.constants[name][0]) for name in node.inputs if name in graph.constants)
            inputs = tuple(places[name] for name in node.inputs if name in places)
            steps.append((node.operator, inputs, numbers))
            places[node.output] = len(places)
        return _line(tuple(steps), tuple(ranges), self.slopes, self.limits, most)


def sum_chains(graph: Graph, tree: Sequence[Node]) -> Mapping[str, SumChain]:
    """The parts of a tree of pointwise nodes that may be one line, by the value each computes."""
    users = graph.users()
    own = {node.output: node for node in tree if len(users[node.output]) == 1 and node.output not in graph.outputs}
    chains = {}
    for clip in tree:
        limits = clip.operator.limited_to
        if limits and graph.types[clip.output].dtype.bits <= 8 and clip.inputs[0] in own:
            tracer = _SumTracer(graph, own)
            if tracer.visit(clip.inputs[0], 1.0) and tracer.nodes and len(tracer.slopes) <= 2:
                slopes = tracer.slopes
                chain = SumChain(tuple(tracer.nodes), clip, limits, tuple(slopes), tuple(slopes.values()))
                chains[clip.output] = chain
    return chains


class _SumTracer(Record):
    """Follows a sum back to its operands."""

    graph: Graph
    own: Mapping[str, Node]
    """Nodes that may be part of a line."""
    slopes: dict[str, float] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def visit(self, name: str, slope: float) -> bool:
        """Note the operands of a value by which the sum grows with this slope, and the nodes; False where one is of
        more than 8 bits, constant or scaled by channels."""
        node, constants = self.own.get(name), self.graph.constants
        factor = None if node is None else node.operator.slope_of([constants.get(value) for value in node.inputs])
        if node is None or factor is None:
            self.slopes[name] = self.slopes.get(name, 0.0) + slope
            return self.graph.types[name].dtype.bits <= 8 and name not in constants
        if not all(self.visit(source, slope * factor) for source in node.inputs[: node.operator.pointwise]):
            return False
        if node not in self.nodes:  # a value may be added to itself
            self.nodes.append(node)
        return True


_Step = tuple[Operator, tuple[int, ...], tuple[int, ...]]
"""An operator, which values it reads, and its constant operands."""


def _limited_results(steps: Sequence[_Step], operands: Sequence[Array]) -> Array:
    """The results of nodes, limited, for all combinations of the operands' values."""
    values = list(np.meshgrid(*operands, indexing="ij"))
    for operator, inputs, numbers in steps:
        constants = [np.array([number], np.int32) for number in numbers]
        values.append(operator.evaluate([*(values[number] for number in inputs), *constants]))
    return values[-1].astype(np.int64)


@lru_cache(maxsize=256)
def _line(
    steps: tuple[_Step, ...], ranges: tuple[Range, ...], slopes: tuple[float, ...], limits: Range, most: int
) -> LinearSum | None:
    operands = [np.arange(low, high + 1, dtype=np.int32) for low, high in ranges]
    wanted = _limited_results(steps, operands)
    grid = np.stack([axis.astype(np.int64) for axis in np.meshgrid(*operands, indexing="ij")])
    above, below = wanted > limits[0], wanted < limits[1]
    if not above.any() or not below.any():
        return None
    inner = above & below if (above & below).any() else above
    moved = (wanted - np.tensordot(slopes, grid.astype(np.float64), 1))[inner].mean()
    reach = sum(abs(slope) * max(-low, high) for slope, (low, high) in zip(slopes, ranges, strict=True))
    shift = min(most, floor(30.9 - log2(reach + abs(moved) + 2)))
    if shift < 1:
        return None
    factors, offset = _uphill(grid, wanted, (above, below), slopes, shift)
    total = np.tensordot(factors, grid, 1) + offset
    if 0 in factors or not np.array_equal(np.clip(total >> shift, *limits), wanted):
        return None
    ends = [(factor * low, factor * high) for factor, (low, high) in zip(factors, ranges, strict=True)]
    if sum(max(map(abs, pair)) for pair in ends) + abs(offset) >= 1 << 31:
        return None
    corners = [sum(parts) + offset for parts in product(*ends)]
    return LinearSum(factors, offset, shift, min(corners) >> shift, max(corners) >> shift)


def _uphill(
    grid: Array, wanted: Array, bounds: tuple[Array, Array], slopes: Sequence[float], shift: int
) -> tuple[tuple[int, ...], int]:
    """Factors near the slopes that leave the sum the most room, and the offset in the middle of it."""
    same = wanted[..., 1:] == wanted[..., :-1]  # of neighbours with one result only the outer two matter
    never = np.zeros((*wanted.shape[:-1], 1), bool)
    above = bounds[0] & ~(np.concatenate([never, same], -1) & (slopes[-1] > 0))
    below = bounds[1] & ~(np.concatenate([same, never], -1) & (slopes[-1] > 0))
    least = ([axis[above] for axis in grid], wanted[above] << shift)
    most = ([axis[below] for axis in grid], ((wanted[below] + 1) << shift) - 1)

    def room(factors: tuple[int, ...]) -> tuple[int, int]:
        """The room for the offset, and its middle."""
        low, high = (
            reduce(start - sum(f * axis for f, axis in zip(factors, axes, strict=True)))
            for reduce, (axes, start) in ((np.max, least), (np.min, most))
        )
        return int(high - low), int(low + high) >> 1

    starts = [tuple(round(slope * tilt * 2.0**shift) for slope in slopes) for tilt in _TILTS]
    (best, present), tried, step = max((room(start), start) for start in starts), 0, 1 << max(shift - 18, 2)
    while step and tried < _STEPS:
        for move in _NEIGHBOURS:
            there = tuple(factor + step * along for factor, along in zip(present, move, strict=False))
            tried += 1
            if (there_room := room(there))[0] > best[0]:
                present, best = there, there_room
                break
        else:
            step //= 2
    return present, best[1]
