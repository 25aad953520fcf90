"""Steps of a float graph's values: the values that get integers, those that share their steps, and the range they span.

Ranges come from the elements seen of a value: min-max, percentile, least square error, entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, log2

import numpy as np

from dovetail.guests.ptq.settings import Method
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.activation import Clamp
from dovetail.ir.operators.arithmetic import Add
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary, BinaryKind
from dovetail.ir.operators.recurrent import Recurrent
from dovetail.ir.pattern import apply, constant, occurrence, operand
from dovetail.ir.scaling import scaled_rows
from dovetail.ir.types import Array, DType
from dovetail.quantize.recurrent import reads_cells
from dovetail.records import Record

BINS = 2048
"""Bins of a histogram."""
PERCENTILE = 99.99
"""Percent of the elements the percentile method keeps."""
CANDIDATES = 80
"""Limits tried along one side."""
LEAST = 2.0**-40
"""The least magnitude that a scale is chosen for."""
SMALLEST = 0.2
"""The smallest share of a side that is tried."""
ENOUGH = 32
"""Elements per bin on average from which on a distribution is known well enough for its entropy."""
_CLAMP = apply(Clamp)
_ADDED = apply(Operator, having=lambda one: one in (Add(), Binary(BinaryKind.SUBTRACT)))
_TIMES = apply(Binary(BinaryKind.MULTIPLY))
RECURRENT = apply(Recurrent)
_INTEGER_RECURRENT = apply(
    Recurrent,
    operand("x"),
    *map(constant, ("weights", "recurrent_weights", "bias", "memory")),
    having=lambda layer: layer.is_plain,
)
"""Recurrent layers, and those that have an integer form."""


class TensorQuantisation(Record):
    """A quantisation per tensor: q stands for (q - zero_point) * scale."""

    dtype: DType
    scale: float
    """A float32 value, greater than 0."""
    zero_point: int

    def integers(self, array: Array) -> Array:
        """The nearest integers, in the array's own float type."""
        return np.asarray(np.clip(np.rint(array / self.scale) + self.zero_point, self.dtype.low, self.dtype.high))

    def real(self, integer: float) -> float:
        """The number an integer stands for."""
        return (integer - self.zero_point) * self.scale

    def rounded(self, array: Array) -> Array:
        """The array as its integers stand for it, in its own float type."""
        return np.asarray((self.integers(array) - self.zero_point) * self.scale)


def infinite(array: Array) -> int:
    """How many elements are NaN or infinite."""
    return int(array.size - np.isfinite(array).sum()) if array.dtype.kind == "f" else 0


Data = Mapping[str, Array]
"""Arrays by value: [N, *shape] at run time, [*shape] of constants, [C] of factors."""
StepsByValue = Mapping[str, TensorQuantisation]


class Histogram(Record):
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
        reach = max(-low if dtype.signed else 0.0, high, LEAST)
        return TensorQuantisation(dtype, float(np.float32(reach / dtype.high)), 0)
    scale = float(np.float32(max(high - low, LEAST) / (dtype.high - dtype.low)))
    return TensorQuantisation(dtype, scale, int(np.clip(np.rint(dtype.low - low / scale), dtype.low, dtype.high)))


def choose(seen: Histogram, method: Method, dtype: DType, symmetric: bool) -> TensorQuantisation:
    """The steps for a value with this histogram."""
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


def _search(
    seen: Histogram, dtype: DType, symmetric: bool, measure: Callable[[Histogram, TensorQuantisation], float]
) -> TensorQuantisation:
    """The limits of least error: each side in turn, while the other stays, until neither moves."""
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)
    shares = np.linspace(SMALLEST, 1.0, CANDIDATES)[::-1]

    def cost(a: float, b: float) -> float:
        return measure(seen, spanning(low * a, high * b, dtype, symmetric))

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
    """The mean square of the changes by rounding and saturation."""
    centres = seen.centres
    error = centres - steps.rounded(centres)
    return float((error * error * seen.counts).sum() / seen.counts.sum())


def divergence(seen: Histogram, steps: TensorQuantisation) -> float:
    """The Kullback-Leibler divergence of the quantised distribution from the one seen, in nats.

    As in "8-bit inference with TensorRT" (Migacz, GTC 2017): elements outside the range count for the outermost bins of
    the reference; the elements of an integer are spread evenly over the bins of its step that hold any.
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
    values = [name for name in graph.inputs if graph.types[name].dtype is DType.FLOAT32]
    for node in graph.nodes:
        moved = carries(node) and node.inputs[0] not in graph.constants  # elements picked from a table are computed
        if graph.types[node.output].dtype is not DType.FLOAT32 or moved:
            continue
        if in_normalisation(graph, users, node.output) or _stays_float(graph, node) or _in_rotation(graph, users, node):
            continue
        readers = users[node.output]
        is_inner = len(readers) == 1 and node.output not in graph.outputs
        if not is_inner or not _CLAMP.fits(readers[0]):
            values.append(node.output)
    return tuple(values)


def _stays_float(graph: Graph, node: Node) -> bool:
    """Whether a value stays float: of a recurrent layer without an integer form, or of an operator that takes floats as
    they are, unless something computes with the value."""
    if node.operator.as_given:
        return not _computed_with(graph.users(), node.output)
    whole = occurrence(_INTEGER_RECURRENT, graph, node) is not None and not reads_cells(graph, node)
    return RECURRENT.fits(node) and not whole


def _computed_with(users: Mapping[str, Sequence[Node]], value: str) -> bool:
    """Whether an operator with an integer form reads a value, perhaps moved."""
    readers = [node for node in users[value] if not node.operator.as_given]
    return any(not carries(node) or _computed_with(users, node.output) for node in readers)


def in_normalisation(graph: Graph, users: Mapping[str, Sequence[Node]], value: str) -> bool:
    """Whether a value is between a layer normalisation and the factor or offset per channel that comes behind it: the
    integer form rounds once, at their end."""
    if len(users[value]) != 1 or value in graph.outputs:
        return False
    (reader,) = users[value]
    while reader.operator.is_view and len(users[reader.output]) == 1:
        (reader,) = users[reader.output]
    return reader.operator.pointwise == 2 and scaled_rows(graph, reader) is not None


def _in_rotation(graph: Graph, users: Mapping[str, Sequence[Node]], node: Node) -> bool:
    """Whether a node is one of two products with rows of tables, whose sum or difference alone is rounded."""
    readers = users[node.output]
    if not _TIMES.fits(node) or len(readers) != 1 or not _ADDED.fits(readers[0]) or node.output in graph.outputs:
        return False
    terms = [graph.producer(name) for name in readers[0].inputs]
    return all(term is not None and len(users[term.output]) == 1 and of_table(graph, term) for term in terms)


def row_source(graph: Graph, value: str) -> str:
    """The value whose elements a value has, or the rows that are taken from a table."""
    while (node := graph.producer(value)) is not None and carries(node) and node.inputs[0] not in graph.constants:
        value = node.inputs[0]
    return value


def of_table(graph: Graph, node: Node) -> bool:
    """Whether a node is a product with rows picked from a table."""
    sources = [graph.producer(row_source(graph, name)) for name in node.inputs] if _TIMES.fits(node) else []
    return any(one is not None and carries(one) and one.inputs[0] in graph.constants for one in sources)


def shares(graph: Graph) -> frozenset[str]:
    """The shares that softmaxes give, whose range is known without data: 0 to 1."""
    return frozenset(node.output for node in graph.nodes if node.operator.gives_shares)


def shared(graph: Graph) -> dict[str, str]:
    """For each quantised value the one whose steps it takes: operands a result consists of take those of the result.

    A value with other readers keeps its own.
    """
    producers, users = graph.producers(), graph.users()
    owner = {name: name for name in quantised_values(graph)}
    for node in reversed(graph.nodes):
        joined = node.operator.chosen_from(node.inputs)
        whole = _limited(users, owner, node.output) if len(joined) > 1 else ""
        if whole not in owner:
            continue
        for name in joined:
            while name in producers and carries(producers[name]) and len(users[name]) == 1:
                name = producers[name].inputs[0]
            if name in owner and len(users[name]) == 1 and name not in graph.inputs:
                owner[name] = owner[whole]
    for read, written, _ in graph.kept:
        if read in owner and _origin(graph, owner, written):
            owner[read] = owner[_origin(graph, owner, written)]
    return owner


def _origin(graph: Graph, owner: Mapping[str, str], value: str) -> str:
    """The quantised value whose integers a value has; empty where there is none."""
    source = source_of(graph, value, owner)
    return source if source in owner else ""


def steps_of(graph: Graph, activations: StepsByValue, value: str) -> TensorQuantisation | None:
    """The steps of a value, its own or those of the value whose elements it has."""
    return activations.get(source_of(graph, value, activations))


def shiftable(graph: Graph, steps: StepsByValue, spare: Mapping[str, int]) -> dict[str, TensorQuantisation]:
    """The finest steps that are powers of two, no finer than `steps`, and fit each other.

    Args:
        graph: the float graph.
        steps: of the quantised values; zero points move so that the least value stays the least.
        spare: bits that stay free above a value, by name.
    """
    scale = {name: 2.0 ** (ceil(log2(one.scale)) + spare.get(name, 0)) for name, one in steps.items()}
    scale = _evened(scale, shared(graph), _sums(graph, steps))
    return {name: _coarser(one, scale[name]) for name, one in steps.items()}


def even_streams(graph: Graph, steps: StepsByValue) -> dict[str, TensorQuantisation]:
    """The steps, those of 16 bits made equal where values are added, so that sums of them are not rounded; not where a
    value that something else reads too would get steps more than `_EVENED` times as coarse. What the network gives in
    16 bits has powers of two, which are made floats of without a rounding, and so coarse that sums are not raised."""
    scale = {name: one.scale for name, one in steps.items() if one.dtype is DType.INT16 and not one.zero_point}
    ends = (name for name in graph.outputs if name in scale and graph.readers(name) == 1)
    scale |= {name: 2.0 ** (ceil(log2(scale[name])) + 1) for name in ends}
    joined = {name: owner for name, owner in shared(graph).items() if name in scale and owner in scale}
    most = {name: one * (_EVENED if graph.readers(name) > 1 else inf) for name, one in scale.items()}
    evened = _evened(scale, joined, _sums(graph, scale), most)
    return {name: replace(one, scale=evened.get(name, one.scale)) for name, one in steps.items()}


_EVENED = 8.0
"""How much coarser the steps of a value of 16 bits become at most, so that a sum needs no rounding."""


def _evened(
    scale: Mapping[str, float],
    joined: Mapping[str, str],
    sums: Sequence[tuple[tuple[str, ...], str]],
    most: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Scales by value, the greatest for values that share their steps and for the operands of a sum, whose result has
    no finer ones. With limits the result has the same, and a sum that would leave one is left out."""
    evened, before = dict(scale), dict[str, float]()
    while before != evened:
        before = dict(evened)
        for name, owner in joined.items():
            evened[name] = evened[owner] = max(evened[name], evened[owner])
        for operands, result in sums:
            greatest = max(evened[name] for name in (operands if most is None else (*operands, result)))
            if most is None or all(greatest <= most[name] for name in (*operands, result)):
                evened.update(dict.fromkeys(operands, greatest))
                evened[result] = max(evened[result], greatest)
    return evened


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


def source_of(graph: Graph, value: str, ends: Collection[str] = ()) -> str:
    """The value whose elements a value has, or the first of `ends` on the way to it."""
    producers = graph.producers()
    while value not in ends and value in producers and carries(producers[value]):
        value = producers[value].inputs[0]
    return value


def _sums(graph: Graph, steps: Collection[str]) -> list[tuple[tuple[str, ...], str]]:
    """The quantised operands and the quantised result of every sum of computed values."""
    users, sums = graph.users(), []
    for node in (node for node in graph.nodes if node.operator == Add()):
        operands = tuple(source_of(graph, value, steps) for value in node.inputs)
        result = _limited(users, steps, node.output)
        if all(name in steps for name in (*operands, result)):
            sums.append((operands, result))
    return sums


def _limited(users: Mapping[str, Sequence[Node]], ends: Collection[str], value: str) -> str:
    """The value, or the first of `ends` that it becomes when limits are applied to it."""
    while value not in ends and len(users[value]) == 1:
        value = users[value][0].output
    return value
