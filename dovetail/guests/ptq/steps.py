"""The integers of a float graph's values: which values get any, which share their steps, and what range they span.

Ranges come from what was seen of a value: min-max, percentile, least square error, entropy.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np

from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.activation import Clamp, Softmax
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.movement import Reshape
from dovetail.ir.operators.recurrent import DEFAULT_CURVES, Recurrent
from dovetail.ir.operators.reduction import Normalise
from dovetail.ir.types import Array, DType
from dovetail.quantize.cells import reads_cells

BINS = 2048
"""Bins of a histogram."""
PERCENTILE = 99.99
"""Percent of the elements the percentile method keeps."""
CANDIDATES = 80
"""Limits tried along one side."""
SMALLEST = 0.2
"""The smallest share of a side that is tried."""


ENOUGH = 32
"""Elements per bin on average below which a distribution is not known well enough for its entropy."""


class Method(enum.StrEnum):
    """How a range is chosen."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"
    ENTROPY = "entropy"
    """For values with few elements least square error instead."""


@dataclass(frozen=True)
class TensorQuantisation:
    """A quantisation per tensor: q stands for (q - zero_point) * scale."""

    dtype: DType
    scale: float
    """A float32 value, greater than 0."""
    zero_point: int

    def rounded(self, array: Array) -> Array:
        """The array as its integers stand for it, float64."""
        steps = np.clip(np.rint(array / self.scale) + self.zero_point, self.dtype.low, self.dtype.high)
        return np.asarray((steps - self.zero_point) * self.scale)


@dataclass(frozen=True)
class Histogram:
    """The elements of a value, counted in equal bins from low to high."""

    low: float
    high: float
    counts: Array
    """int64 [BINS]"""

    @property
    def centres(self) -> Array:
        """The middle of each bin; of the bin that holds 0, which every quantisation has exactly, 0."""
        width = (self.high - self.low) / len(self.counts)
        centres = self.low + width * (np.arange(len(self.counts)) + 0.5)
        return np.where(np.abs(centres) <= width / 2, 0.0, centres)


def spanning(low: float, high: float, dtype: DType, symmetric: bool) -> TensorQuantisation:
    """The finest steps whose integers reach from `low` to `high`, with 0.0 exact; symmetric ones have zero point 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    if symmetric:
        return TensorQuantisation(
            dtype, float(np.float32(max(-low if dtype.signed else 0.0, high, 2.0**-40) / dtype.high)), 0
        )
    scale = float(np.float32(max(high - low, 2.0**-40) / (dtype.high - dtype.low)))
    return TensorQuantisation(dtype, scale, int(np.clip(np.rint(dtype.low - low / scale), dtype.low, dtype.high)))


def choose(seen: Histogram, method: Method, dtype: DType, symmetric: bool) -> TensorQuantisation:
    """The steps for a value of which this was seen."""
    if method is Method.MINMAX or seen.low == seen.high:
        return spanning(seen.low, seen.high, dtype, symmetric)
    if method is Method.PERCENTILE:
        return spanning(*percentile(seen), dtype, symmetric)
    few = seen.counts.sum() < ENOUGH * len(seen.counts)
    return _search(seen, dtype, symmetric, square_error if method is Method.MSE or few else divergence)


def percentile(seen: Histogram, share: float = PERCENTILE) -> tuple[float, float]:
    """The limits outside which (100 - share) / 2 percent of the elements lie on either side."""
    total = np.cumsum(seen.counts)
    width = (seen.high - seen.low) / len(seen.counts)
    tail = (1 - share / 100) / 2 * total[-1]
    first, last = int(np.searchsorted(total, tail, "right")), int(np.searchsorted(total, total[-1] - tail))
    return seen.low + width * first, seen.low + width * (last + 1)


def _search(seen: Histogram, dtype: DType, symmetric: bool, measure: object) -> TensorQuantisation:
    """The limits of least error: each side in turn, while the other stays, until neither moves."""
    assert callable(measure)
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)
    shares = np.linspace(SMALLEST, 1.0, CANDIDATES)[::-1]

    def cost(a: float, b: float) -> float:
        return float(measure(seen, spanning(low * a, high * b, dtype, symmetric)))

    if symmetric:
        best = min(shares, key=lambda share: cost(share, share))
        return spanning(low * best, high * best, dtype, symmetric)
    down = up = float(min(shares, key=lambda share: cost(share, share)))
    for _ in range(4):
        before = down, up
        up = float(min(shares, key=lambda share: cost(down, share))) if high > 0 else up
        down = float(min(shares, key=lambda share: cost(share, up))) if low < 0 else down
        if (down, up) == before:
            break
    return spanning(low * down, high * up, dtype, symmetric)


def square_error(seen: Histogram, steps: TensorQuantisation) -> float:
    """The mean square of what rounding and saturation change."""
    centres = seen.centres
    error = centres - steps.rounded(centres)
    return float((error * error * seen.counts).sum() / seen.counts.sum())


def divergence(seen: Histogram, steps: TensorQuantisation) -> float:
    """The Kullback-Leibler divergence of the quantised distribution from the one seen, in nats.

    As "8-bit inference with TensorRT" (Migacz, GTC 2017) has it: what lies outside the range counts for the outermost
    bins of the reference; the elements of an integer are spread evenly over the bins of its step that hold any.
    """
    centres, counts = seen.centres, seen.counts.astype(np.float64)
    integers = np.rint(centres / steps.scale) + steps.zero_point
    inside = (integers >= steps.dtype.low) & (integers <= steps.dtype.high)
    places = np.flatnonzero(inside)
    if len(places) == 0:
        return float("inf")
    reference = counts[inside].copy()
    reference[0] += counts[: places[0]].sum()
    reference[-1] += counts[places[-1] + 1 :].sum()
    levels = (integers[inside] - steps.dtype.low).astype(np.int64)
    held = (counts[inside] > 0).astype(np.float64)
    size = steps.dtype.high - steps.dtype.low + 1
    total, used = (np.bincount(levels, values, size) for values in (counts[inside], held))
    spread = held * (total / np.maximum(used, 1))[levels]
    p, q = reference / reference.sum(), spread / max(spread.sum(), 1e-30)
    with_mass = p > 0
    return float((p[with_mass] * np.log(p[with_mass] / np.maximum(q[with_mass], 1e-12))).sum())


def carries(node: Node) -> bool:
    """True where the result has the integers of its first operand, so that it needs no quantisation of its own."""
    return len(node.operator.chosen_from(node.inputs)) == 1


def quantised_values(graph: Graph) -> tuple[str, ...]:
    """The float values that get integers: inputs and whatever is computed, after its limits (a ReLU) are applied."""
    users = graph.users()
    found = [name for name in graph.inputs if graph.types[name].dtype is DType.FLOAT32]
    for node in graph.nodes:
        moved = carries(node) and node.inputs[0] not in graph.constants  # what is picked from a table is not
        if graph.types[node.output].dtype is not DType.FLOAT32 or moved:
            continue
        readers = users[node.output]
        if in_normalisation(graph, users, node.output) or _stays_float(graph, node):
            continue
        clamped = len(readers) == 1 and isinstance(readers[0].operator, Clamp) and node.output not in graph.outputs
        if not clamped:
            found.append(node.output)
    return tuple(found)


def _stays_float(graph: Graph, node: Node) -> bool:
    """True for a recurrent layer without an integer form, and for what is given and gives floats as they are, unless
    something computes with these."""
    operator = node.operator
    if operator.as_given:
        return not _computed_with(graph.users(), node.output)
    if not isinstance(operator, Recurrent):
        return False
    plain = operator.functions == DEFAULT_CURVES[operator.kind] and len(node.inputs) == 5
    return not plain or reads_cells(graph, node) or any(name not in graph.constants for name in node.inputs[1:])


def _computed_with(users: Mapping[str, Sequence[Node]], value: str) -> bool:
    """Whether a value, perhaps moved, is an operand of what has an integer form."""
    readers = [node for node in users[value] if not node.operator.as_given]
    return any(not carries(node) or _computed_with(users, node.output) for node in readers)


def in_normalisation(graph: Graph, users: Mapping[str, Sequence[Node]], value: str) -> bool:
    """True for a value between a layer normalisation and the factor or offset per channel that comes behind it: the
    integer form rounds once, at their end."""
    producers = graph.producers()
    readers = users[value]
    if len(readers) != 1 or value in graph.outputs or _scaled(graph, _behind_moves(users, readers[0])) is None:
        return False
    node: Node | None = producers.get(value)
    while node is not None and not isinstance(node.operator, Normalise):
        source = node.inputs[0] if isinstance(node.operator, Reshape) else _scaled(graph, node)
        node = producers.get(source) if source is not None else None
    return node is not None and not (isinstance(node.operator, Normalise) and node.operator.summed)


def _behind_moves(users: Mapping[str, Sequence[Node]], node: Node) -> Node:
    """The node, or the first behind reshapes that only one reads."""
    while isinstance(node.operator, Reshape) and len(users[node.output]) == 1:
        (node,) = users[node.output]
    return node


def _scaled(graph: Graph, node: Node) -> str | None:
    """The operand of a factor or an offset along the last axis; None where the node is neither."""
    operator, kinds = node.operator, (BinaryKind.MULTIPLY, BinaryKind.ADD)
    if not isinstance(operator, Add) and not (isinstance(operator, Binary) and operator.kind in kinds):
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        array = graph.constants.get(other)
        if array is not None and value not in graph.constants and array.size in (1, *array.shape[-1:]):
            return value
    return None


def fixed_ranges(graph: Graph) -> dict[str, tuple[float, float]]:
    """Ranges that are known without data: shares of a softmax."""
    ranges = {node.output: (0.0, 1.0) for node in graph.nodes if isinstance(node.operator, Softmax)}
    return ranges


def shared(graph: Graph, points: tuple[str, ...]) -> dict[str, str]:
    """For each quantised value the one whose steps it takes: operands a result consists of take those of the result.

    A value read elsewhere too keeps its own.
    """
    producers, users = graph.producers(), graph.users()
    owner = {name: name for name in points}
    for node in reversed(graph.nodes):
        joined = node.operator.chosen_from(node.inputs)
        if len(joined) < 2:
            continue
        whole = _limited(users, owner, node.output)
        if whole not in owner:
            continue
        for value in joined:
            name = value
            while name in producers and carries(producers[name]) and len(users[name]) == 1:
                name = producers[name].inputs[0]
            if name in owner and len(users[name]) == 1 and name not in graph.inputs:
                owner[name] = owner[whole]
    return owner


def steps_of(graph: Graph, activations: Mapping[str, TensorQuantisation], value: str) -> TensorQuantisation | None:
    """The steps of a value, its own or those of the value whose elements it has."""
    return activations.get(source_of(graph, value, activations))


def shiftable(
    graph: Graph, steps: Mapping[str, TensorQuantisation], spare: Mapping[str, int]
) -> dict[str, TensorQuantisation]:
    """The finest steps that are powers of two, no finer than those given, and fit each other.

    Args:
        graph: the float graph.
        steps: of the quantised values; zero points move so that the least value stays the least.
        spare: bits that are to stay free above a value, by name.
    """
    scale = {name: 2.0 ** (ceil(log2(one.scale)) + spare.get(name, 0)) for name, one in steps.items()}
    joined = shared(graph, tuple(steps))
    sums = _sums(graph, steps)
    before: dict[str, float] = {}
    while before != scale:
        before = dict(scale)
        for name, owner in joined.items():
            scale[name] = scale[owner] = max(scale[name], scale[owner])
        for operands, result in sums:
            most = max(scale[name] for name in operands)
            scale.update(dict.fromkeys(operands, most))
            scale[result] = max(scale[result], most)
    return {name: _coarser(one, scale[name]) for name, one in steps.items()}


def _coarser(steps: TensorQuantisation, scale: float) -> TensorQuantisation:
    """Steps of a greater scale that reach as far on both sides."""
    low = steps.dtype.low
    if not steps.zero_point:
        return replace(steps, scale=scale)
    zero_point = low + round((steps.zero_point - low) * steps.scale / scale)
    return replace(steps, scale=scale, zero_point=zero_point)


def operands_of(graph: Graph, layers: Collection[str]) -> set[str]:
    """The quantised values that layers, by their results, read their activations from."""
    return {source_of(graph, node.inputs[0]) for node in graph.nodes if node.output in layers}


def source_of(graph: Graph, value: str, known: Collection[str] = ()) -> str:
    """The value whose elements a value has, or the first of those it was moved through that is known."""
    producers = graph.producers()
    while value not in known and value in producers and carries(producers[value]):
        value = producers[value].inputs[0]
    return value


def _sums(graph: Graph, steps: Mapping[str, TensorQuantisation]) -> list[tuple[tuple[str, ...], str]]:
    """The quantised operands and the quantised result of every sum of computed values."""
    users = graph.users()
    found = []
    for node in (node for node in graph.nodes if isinstance(node.operator, Add)):
        operands, result = tuple(source_of(graph, value) for value in node.inputs), _limited(users, steps, node.output)
        if all(name in steps for name in (*operands, result)):
            found.append((operands, result))
    return found


def _limited(users: Mapping[str, Sequence[Node]], known: Collection[str], value: str) -> str:
    """The first that is known of a value and what becomes of it when limits are applied to it."""
    while value not in known and len(users[value]) == 1:
        value = users[value][0].output
    return value
