"""Results of usual mistakes: what a layer gives where one of its operators means something else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from dovetail.guests.check.layers import MadeLayer
from dovetail.ir.graph import Graph, Node, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.ir.types import Array, DType

Compute = Callable[[Sequence[Array]], Array]
Change = tuple[str, Compute] | tuple[str, Compute, Compute]
"""A sentence and what the operator computes instead; twice where that depends on what lies around an operand: known is
what both give. Several of one sentence are ways to make the same mistake."""


@dataclass(frozen=True)
class MutantResult:
    """What a mistake gives."""

    sentence: str
    result: Array
    known: Array | None = None
    """Which elements do not depend on what lies around an operand, of the result's shape; None for all."""

    def gives(self, actual: Array) -> bool:
        """Whether this is what was computed."""
        known = slice(None) if self.known is None else self.known
        return np.array_equal(self.result[known], actual[known])


@dataclass(frozen=True)
class _MutantOperator(Operator):
    """An operator with another meaning."""

    compute: Compute

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return self.compute(inputs)


def instead(graph: Graph, layer: MadeLayer, wanted: Collection[str] = ()) -> Iterator[MutantResult]:
    """What every mistake gives that can be made here, the right result too; only those of the `wanted` sentences, if
    there are any."""
    for sentence, *changed in _changes(graph, layer):
        if wanted and sentence not in wanted:
            continue
        try:
            found = [evaluate(one, layer.inputs)[layer.root] for one in changed]
        except (ValueError, IndexError):  # not a mistake that can be made here
            continue
        known = found[0] == found[-1] if len(found) > 1 else None
        yield MutantResult(sentence, found[0], known)


def _changes(graph: Graph, layer: MadeLayer) -> Iterator[tuple[str, Graph] | tuple[str, Graph, Graph]]:
    """Mistakes as graphs, two where `Change` has two."""
    for number, node in enumerate(graph.nodes):
        for sentence, *ways in _MISTAKES.get(type(node.operator), lambda operator: ())(node.operator):
            changed = [_with(graph, {number: _MutantOperator(compute)}) for compute in ways]
            yield (sentence, *changed)  # type: ignore[misc]
    yield from _of_zeros(graph)
    yield from _misread(graph, layer)


def _with(graph: Graph, operators: Mapping[int, Operator]) -> Graph:
    """The graph with other operators in some places."""
    nodes = (replace(n, operator=operators.get(place, n.operator)) for place, n in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(nodes))


def _of_pad(pad: Pad) -> Iterator[Change]:
    total = tuple(b + a for b, a in zip(pad.before, pad.after, strict=True))

    def led(before: Sequence[int], value: float = pad.value) -> Compute:
        def compute(inputs: Sequence[Array]) -> Array:
            wide = [(max(lead, 0) + 2, 16) for lead in before]
            large = np.pad(inputs[0], wide, constant_values=int(value))
            starts = [2 + max(lead, 0) - lead for lead in before]
            cuts = zip(starts, inputs[0].shape, total, strict=True)
            return large[tuple(slice(start, start + size + more) for start, size, more in cuts)]

        return compute

    none, top, left, last = pad.before
    sides = tuple(zip(pad.before, pad.after, strict=True))[1:3]
    yield "padding swapped: rows and columns", *_bordered(pad, ((left, sides[0][1]), (top, sides[1][1])))
    yield "padding swapped: rows and columns", *_bordered(pad, sides[::-1])
    yield "padding swapped: before and after", *_bordered(pad, tuple(pair[::-1] for pair in sides))
    yield "padding is forgotten", *_bordered(pad, ((0, 0), (0, 0)))
    yield "padding swapped: rows and columns", led((none, left, top, last))
    yield "padding swapped: before and after", led(pad.after)
    yield "padding is filled with 0 in place of the zero point", led(pad.before, 0)
    for step, word in ((1, "late"), (-1, "early")):
        yield f"halo off by one: rows begin one too {word}", led((none, top + step, left, last))
        yield f"halo off by one: columns begin one too {word}", led((none, top, left + step, last))
    yield "padding is forgotten", led((0, 0, 0, 0))
    yield from _of_edges(pad)
    edge = tuple(zip(pad.before, pad.after, strict=True))
    yield "padding repeats the edge in place of the zero point", lambda inputs: np.pad(inputs[0], edge, mode="edge")


def _bordered(pad: Pad, sides: Sequence[tuple[int, int]]) -> tuple[Compute, Compute]:
    """Borders of other widths around an image that lies where it should: they cover some of it, or leave elements to
    what happens to lie there."""

    def filled(inputs: Sequence[Array], seed: int) -> Array:
        x, limits = inputs[0], np.iinfo(inputs[0].dtype)
        right = pad.evaluate([np.ones_like(x)])
        around = np.random.default_rng(seed).integers(limits.min, limits.max + 1, right.shape)
        around[tuple(slice(lead, lead + size) for lead, size in zip(pad.before, x.shape, strict=True))] = x
        for axis, (before, after) in enumerate(sides, 1):
            place, size = (slice(None),) * axis, right.shape[axis]
            around[(*place, slice(0, before))] = pad.value
            around[(*place, slice(size - after, size))] = pad.value
        return around

    return partial(filled, seed=0), partial(filled, seed=1)


def _of_linear(linear: Conv2d | DepthwiseConv2d | FullyConnected) -> Iterator[Change]:
    same, zero = linear.evaluate, linear.input_zero_point
    forgotten = "forgotten zero point: differs by the operand's zero point times the sum of the weights"
    yield forgotten, replace(linear, input_zero_point=0).evaluate
    yield "the operand's zero point has the wrong sign", replace(linear, input_zero_point=-zero).evaluate
    yield "forgotten zero point of the weights", replace(linear, weight_zero_point=0).evaluate
    yield "the bias is forgotten", lambda inputs: same(inputs[:2])
    yield "the bias is taken off", lambda inputs: same([*inputs[:2], *(-b for b in inputs[2:])])
    yield "weights are read as unsigned", lambda i: same([i[0], i[1].view(np.uint8).astype(np.int64), *i[2:]])
    yield "what is added to stored weights (128) is not taken off", lambda i: same([i[0], i[1] + np.int64(128), *i[2:]])
    yield from _of_operand(same)
    if not isinstance(linear, FullyConnected):
        yield from _of_window(linear)
    yield from _weight_orders(linear)


def _of_operand(same: Compute) -> Iterator[Change]:
    """Signs and zero points of an 8-bit operand, and edges of it that are not read."""

    def other_sign(inputs: Sequence[Array]) -> Array:
        x = inputs[0]
        return same([x.view(np.uint8 if x.dtype == np.int8 else np.int8).astype(np.int64), *inputs[1:]])

    yield "the operand is read with the wrong sign: as unsigned, or as signed", other_sign
    for step in (128, -128, 1, -1):
        text = f"zero point of the operand: it is off by {step}"
        yield text, partial(lambda inputs, step: same([inputs[0] + np.int64(step), *inputs[1:]]), step=step)


def _of_edges(pad: Pad) -> Iterator[Change]:
    """The last real row or column of the operand read as padding."""
    for axis, name in ((1, "row"), (2, "column")):

        def without(inputs: Sequence[Array], axis: int = axis) -> Array:
            x = inputs[0].copy()
            x[(slice(None),) * axis + (-1,)] = pad.value
            return pad.evaluate([x])

        yield f"halo: the last {name} of the operand is taken for padding", without


def _of_window(linear: Conv2d | DepthwiseConv2d) -> Iterator[Change]:
    if linear.stride[0] != linear.stride[1]:
        yield "strides of rows and columns are swapped", replace(linear, stride=linear.stride[::-1]).evaluate

    def without_last(inputs: Sequence[Array], axis: int) -> Array:
        weights = inputs[1].copy()
        weights[(slice(None),) * axis + (-1,)] = linear.weight_zero_point
        return linear.evaluate([inputs[0], weights, *inputs[2:]])

    def as_many(inputs: Sequence[Array], other: Conv2d | DepthwiseConv2d) -> Array:
        _, rows, columns, _ = linear.evaluate(inputs).shape
        return other.evaluate(inputs)[:, :rows, :columns]

    for axis, name in ((1, "row"), (2, "column")):
        yield f"the last {name} of the kernel is not read: halo off by one", partial(without_last, axis=axis)
    if max(linear.stride) > 1:
        yield "the stride is forgotten", partial(as_many, other=replace(linear, stride=(1, 1)))
    if max(linear.dilation) > 1:
        yield "the dilation is forgotten", partial(as_many, other=replace(linear, dilation=(1, 1)))


def _weight_orders(linear: Conv2d | DepthwiseConv2d | FullyConnected) -> Iterator[Change]:
    def ordered(change: Callable[[Array], Array]) -> Compute:
        return lambda inputs: linear.evaluate([inputs[0], change(inputs[1]).reshape(inputs[1].shape), *inputs[2:]])

    dense = isinstance(linear, FullyConnected)
    names = "OI" if dense else "OHWI"
    for order in permutations(range(len(names))):
        if list(order) != sorted(order):
            text = "".join(names[axis] for axis in order)
            moved = ordered(lambda weights, order=order: np.ascontiguousarray(weights.transpose(order)))  # type: ignore[misc]
            yield f"weight order: they lie as {text}, not {names}", moved
    for axis, name in enumerate(names):
        parts = {"O": "output channels", "I": "input channels", "H": "rows of the kernel", "W": "columns of the kernel"}
        text = f"{parts[name]} permuted: weight order"
        yield f"{text} (reversed)", ordered(partial(np.flip, axis=axis))
        for step in (1, -1):
            yield f"{text} (shifted by {step})", ordered(partial(np.roll, shift=step, axis=axis))
    if not dense:
        yield from _of_blocks(ordered)
        yield "the kernel is flipped both ways: weight order", ordered(lambda weights: weights[:, ::-1, ::-1])
        swapped = ordered(lambda weights: np.ascontiguousarray(weights.swapaxes(1, 2)))
        yield "rows and columns of the kernel are swapped: weight order", swapped


def _of_blocks(ordered: Callable[[Callable[[Array], Array]], Compute]) -> Iterator[Change]:
    """Weights of several blocks of input channels, the blocks on the other side of the taps."""

    def moved(weights: Array, block: int, first: bool) -> Array:
        outputs, rows, columns, inputs = weights.shape
        whole = np.pad(weights, [(0, 0)] * 3 + [(0, -inputs % block)])
        if first:  # they lie before the taps, and are read behind them
            lying = whole.reshape(outputs, rows, columns, -1, block).transpose(0, 3, 1, 2, 4).reshape(whole.shape)
        else:
            split = whole.reshape(outputs, -1, rows, columns, block)
            lying = split.transpose(0, 2, 3, 1, 4).reshape(whole.shape)
        return lying[..., :inputs]

    for first, words in ((True, "before the taps, not behind them"), (False, "behind the taps, not before them")):
        for block in (4, 8, 16, 32):
            change = ordered(partial(moved, block=block, first=first))
            yield f"weight order: blocks of input channels lie {words}", change


def _of_requantize(requantize: Requantize) -> Iterator[Change]:
    same, zero = requantize.evaluate, requantize.output_zero_point
    for rounding in Rounding:
        if rounding not in (requantize.rounding, Rounding.DOWN):
            words = f"off by one in rounding: it rounds as {rounding.value}, not {requantize.rounding.value}"
            yield words, replace(requantize, rounding=rounding).evaluate

    def down(inputs: Sequence[Array], twice: bool) -> Array:
        x, multiplier, shift = (array.astype(np.int64) for array in inputs)
        product = x * multiplier
        return np.asarray((product >> 31 >> -np.minimum(shift, 0) if twice else product >> (31 - shift)) + zero)

    yield "wrong rounding: shifts round down", partial(down, twice=True)
    yield "wrong rounding: one shift that rounds down", partial(down, twice=False)
    yield "forgotten zero point of the result", replace(requantize, output_zero_point=0).evaluate
    yield "the result's zero point has the wrong sign", replace(requantize, output_zero_point=-zero).evaluate
    for step in (1, -1):
        shifted = partial(lambda inputs, step: same([inputs[0], inputs[1], inputs[2] + step]), step=step)
        yield f"requantisation: the shift is off by {step}", shifted
    yield from _per_channel(same)


def _per_channel(same: Compute) -> Iterator[Change]:
    first: Compute = lambda inputs: same([inputs[0], *(array[:1] for array in inputs[1:])])  # noqa: E731
    yield "parameters per channel: the first channel's are used for all", first
    for step in (1, -1):
        rolled = partial(lambda inputs, step: same([inputs[0], *(np.roll(a, step) for a in inputs[1:])]), step=step)
        yield f"parameters per channel are shifted by {step}", rolled


def _of_scale_shift(scale_shift: ScaleShift) -> Iterator[Change]:
    same = scale_shift.evaluate
    yield "the offset behind the sums (bias, zero point) is forgotten", lambda i: same([i[0], i[1], i[2] * 0, i[3]])
    for step in (1, -1):
        shifted = partial(lambda i, step: same([*i[:3], np.maximum(i[3] + step, 0)]), step=step)
        yield f"requantisation: the shift is off by {step}", shifted
    yield "wrong rounding: to nearest, not down", lambda i: same([i[0], i[1], i[2] + ((1 << i[3]) >> 1), i[3]])
    yield from _per_channel(same)


def _of_clip(clip: Clip) -> Iterator[Change]:
    yield "results are not limited: they wrap", lambda inputs: inputs[0].astype(clip.dtype.numpy)
    wide = replace(clip, low=clip.dtype.low, high=clip.dtype.high)
    yield "limits of the activation are forgotten", wide.evaluate
    yield "the lower limit of the activation is forgotten", replace(clip, low=clip.dtype.low).evaluate
    yield "the upper limit of the activation is forgotten", replace(clip, high=clip.dtype.high).evaluate
    if clip.low < 0 < clip.high:
        yield "an activation function that is not there: nothing is below 0", replace(clip, low=0).evaluate
    if clip.high == DType.UINT8.high:
        yield "limits of the activation are those of a signed type", replace(clip, high=DType.INT8.high).evaluate


def _of_add(add: Add) -> Iterator[Change]:
    for kept, lost in (("first", "second"), ("second", "first")):
        chosen = partial(lambda inputs, at: add.evaluate([inputs[at], inputs[at]]), at=int(kept == "second"))
        yield f"operands: the {kept} is read twice, the {lost} never", chosen
    yield "operands: the second is taken off, not added", lambda inputs: add.evaluate([inputs[0], -inputs[1]])


def _of_pool(pool: Pool2d) -> Iterator[Change]:
    """Another kind of pool, and what its padding counts as."""
    average = AveragePool2d(pool.kernel, pool.stride, pool.padding)
    largest = MaxPool2d(pool.kernel, pool.stride, pool.padding)

    def narrow(inputs: Sequence[Array]) -> Array:
        return np.asarray(average.evaluate(inputs)).astype(inputs[0].dtype)

    (top, bottom), (left, right) = pool.padding
    around = ((0, 0), (top, bottom), (left, right), (0, 0))
    bare = replace(pool, padding=((0, 0), (0, 0)))
    if isinstance(pool, MaxPool2d):
        yield "the kind of pool: it computes the average, not the maximum", narrow
        yield "padding counts as 0 in a maximum", lambda inputs: bare.evaluate([np.pad(inputs[0], around)])
    else:
        yield "the kind of pool: it computes the maximum, not the average", largest.evaluate
        yield "padding is counted: the divisor is the whole window", lambda i: bare.evaluate([np.pad(i[0], around)])
    if max(pool.stride) > 1:

        def dense(inputs: Sequence[Array]) -> Array:
            _, rows, columns, _ = pool.evaluate(inputs).shape
            return np.asarray(replace(pool, stride=(1, 1)).evaluate(inputs)[:, :rows, :columns])

        yield "the stride is forgotten", dense


_MISTAKES: Mapping[type[Operator], Callable[[Any], Iterable[Change]]] = {
    Pad: _of_pad,
    Conv2d: _of_linear,
    DepthwiseConv2d: _of_linear,
    FullyConnected: _of_linear,
    Requantize: _of_requantize,
    ScaleShift: _of_scale_shift,
    Clip: _of_clip,
    Add: _of_add,
    MaxPool2d: _of_pool,
    AveragePool2d: _of_pool,
    SumPool2d: _of_pool,
}


def _zeros(graph: Graph, operand: int, result: int | None = None) -> Graph:
    """The graph with another zero point of its operand, padding included, and of its result if one is given."""
    changed: dict[int, Operator] = {}
    for number, operator in enumerate(node.operator for node in graph.nodes):
        if isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected):
            changed[number] = replace(operator, input_zero_point=operand)
        elif isinstance(operator, Pad):
            changed[number] = replace(operator, value=operand)
        elif isinstance(operator, Requantize) and result is not None:
            changed[number] = replace(operator, output_zero_point=result)
    return _with(graph, changed)


def _of_zeros(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """The zero point forgotten in the layer and in its padding at once, or in the place of the result's."""
    sentence = "forgotten zero point: differs by the operand's zero point times the sum of the weights, padding too"
    yield sentence, _zeros(graph, 0)
    operators = [node.operator for node in graph.nodes]
    linear = [one for one in operators if isinstance(one, Conv2d | DepthwiseConv2d | FullyConnected)]
    scaled = [one for one in operators if isinstance(one, Requantize)]
    if len(linear) == len(scaled) == 1:
        sentence = "the zero points of operand and result are in each other's place"
        yield sentence, _zeros(graph, scaled[0].output_zero_point, linear[0].input_zero_point)


def _misread(graph: Graph, layer: MadeLayer) -> Iterator[tuple[str, Graph] | tuple[str, Graph, Graph]]:
    """Values of few bits taken out of bytes, or put into them, in another way."""
    for name, kind in graph.types.items():
        if kind.dtype.bits >= 8:
            continue
        what = "the result" if name == layer.root else "weights" if name in graph.constants else "the operand"
        for sentence, *ways in _of_bytes(kind.dtype):
            changed = []
            for change in ways:
                read = {n: _MutantOperator(_reading(node, name, change)) for n, node in enumerate(graph.nodes)}
                made = {
                    n: _MutantOperator(_then(node, change)) for n, node in enumerate(graph.nodes) if node.output == name
                }
                changed.append(_with(graph, made if name == layer.root else read))
            yield (f"{what} of few bits: {sentence}", *changed)  # type: ignore[misc]


def _then(node: Node, change: Callable[[Array], Array]) -> Compute:
    """What a node computes, changed."""
    return lambda inputs: change(node.operator.evaluate(inputs))


def _reading(node: Node, name: str, change: Callable[[Array], Array]) -> Compute:
    """What a node computes where one of its operands is changed."""
    pairs = partial(zip, node.inputs, strict=True)
    return lambda inputs: node.operator.evaluate([change(a) if one == name else a for one, a in pairs(inputs)])


def _of_bytes(dtype: DType) -> Iterator[tuple[str, *tuple[Callable[[Array], Array], ...]]]:
    """Other ways to read bytes of such elements; two that differ in what lies behind the last."""
    share, half = 8 // dtype.bits, 1 << (dtype.bits - 1)

    def turned(array: Array, axis: int, seed: int) -> Array:
        behind = [-size % share if place == axis % array.ndim else 0 for place, size in enumerate(array.shape)]
        shape = [size + more for size, more in zip(array.shape, behind, strict=True)]
        whole = np.random.default_rng(seed).integers(dtype.low, dtype.high + 1, shape)
        whole[tuple(map(slice, array.shape))] = array
        moved = whole.swapaxes(axis, -1)
        flipped = moved.reshape(*moved.shape[:-1], -1, share)[..., ::-1].reshape(moved.shape)
        return flipped[..., : array.shape[axis]].swapaxes(axis, -1).astype(array.dtype)

    for axis in (-1, -2):
        ways = (partial(turned, axis=axis, seed=seed) for seed in (0, 1))
        yield ("elements that share a byte come in the other order", *ways)
    other = (lambda a: a & (2 * half - 1)) if dtype.signed else (lambda a: (a.astype(np.int64) ^ half) - half)
    yield "it has the wrong sign", other
