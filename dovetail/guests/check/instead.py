"""Results of usual mistakes: outputs of a layer in which one operator means something else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, permutations
from typing import Any

import numpy as np

from dovetail.guests.check.layers import MadeLayer
from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.elementwise import Binary
from dovetail.ir.operators.linear import Conv2d, Convolution, DepthwiseConv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import AveragePool2d, MaxPool2d, Pool2d, SumPool2d
from dovetail.ir.pattern import apply
from dovetail.ir.types import Array, DType
from dovetail.records import Record

ArrayChange = Callable[[Array], Array]
Compute = Callable[[Sequence[Array]], Array]
Change = tuple[str, Compute] | tuple[str, Compute, Compute]
"""A sentence, and the meaning that the operator has by mistake; two if the result depends on bytes around an operand:
only elements on which both agree are known. Several changes with one sentence are ways to make the same mistake."""
Mutation = tuple[str, Graph] | tuple[str, Graph, Graph]
"""A `Change` as one or two graphs."""
_REQUANTIZE = apply(Requantize)
FORGOTTEN_ZERO = "forgotten zero point: differs by the operand's zero point times the sum of the weights"


class MutantResult(Record):
    """The result of a mistake."""

    sentence: str
    result: Array
    known: Array | None = None
    """Elements that do not depend on bytes around an operand, bool of the result's shape; None for all."""

    def gives(self, actual: Array) -> bool:
        """Whether the mistake gives this result."""
        known = slice(None) if self.known is None else self.known
        return self.result.shape == actual.shape and np.array_equal(self.result[known], actual[known])


@dataclass(frozen=True)
class _MutantOperator(Operator):
    """An operator with another meaning."""

    compute: Compute

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return self.compute(inputs)


def instead(graph: Graph, layer: MadeLayer, wanted: Collection[str] = ()) -> Iterator[MutantResult]:
    """The result of every mistake that can be made here, also if it is the right one; with `wanted` only of these
    sentences."""
    for sentence, *mutants in _mutations(graph, layer):
        if wanted and sentence not in wanted:
            continue
        try:
            results = [evaluate(mutant, layer.inputs)[layer.root] for mutant in mutants]
        except (ValueError, IndexError):  # not a mistake that can be made here
            continue
        yield MutantResult(sentence, results[0], results[0] == results[-1] if len(results) > 1 else None)


def _mutations(graph: Graph, layer: MadeLayer) -> Iterator[Mutation]:
    for number, node in enumerate(graph.nodes):
        for changes in _MISTAKES.get(type(node.operator), ()):
            for sentence, *meanings in changes(node.operator):
                mutants = [_with(graph, {number: _MutantOperator(compute)}) for compute in meanings]
                yield (sentence, *mutants)  # type: ignore[misc]
    yield from _of_zeros(graph)
    yield from _misread(graph, layer)


def _with(graph: Graph, operators: Mapping[int, Operator]) -> Graph:
    """The graph with other operators in some places."""
    nodes = (replace(n, operator=operators.get(place, n.operator)) for place, n in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(nodes))


def _on(compute: Compute, change: ArrayChange, *places: int) -> Compute:
    """The same computation on changed operands."""
    return lambda inputs: compute([change(x) if place in places else x for place, x in enumerate(inputs)])


def _of_pad(pad: Pad) -> Iterator[Change]:
    none, top, left, last = pad.before
    sides = tuple(zip(pad.before, pad.after, strict=True))
    (rows, columns), swapped = sides[1:3], "padding swapped: rows and columns"
    yield swapped, *_bordered(pad, ((left, rows[1]), (top, columns[1])))
    yield swapped, *_bordered(pad, (columns, rows))
    yield "padding swapped: before and after", *_bordered(pad, (rows[::-1], columns[::-1]))
    yield "padding is forgotten", *_bordered(pad, ((0, 0), (0, 0)))
    yield swapped, _led(pad, (none, left, top, last))
    for count in (2, 4):
        units = -(-left // count)
        moved = (none, units, left + count * (top - units), last)
        yield f"{swapped}, where several pixels are taken as one", _led(pad, moved)
        zeros, ones = (_led(replace(pad, value=filler), moved) for filler in (0, 1))  # as what happens to lie there
        yield f"{swapped}, where several pixels are taken as one", zeros, ones
    yield "padding swapped: before and after", _led(pad, pad.after)
    yield "padding is filled with 0 in place of the zero point", _led(replace(pad, value=0), pad.before)
    for step, word in ((1, "late"), (-1, "early")):
        yield f"halo off by one: rows begin one too {word}", _led(pad, (none, top + step, left, last))
        yield f"halo off by one: columns begin one too {word}", _led(pad, (none, top, left + step, last))
    yield "padding is forgotten", _led(pad, (0, 0, 0, 0))
    for axis, name in ((1, "row"), (2, "column")):
        without = _on(pad.evaluate, partial(_without_last, axis, pad.value), 0)
        yield f"halo: the last {name} of the operand is taken for padding", without
    yield "padding repeats the edge in place of the zero point", lambda inputs: np.pad(inputs[0], sides, mode="edge")


def _led(pad: Pad, before: Sequence[int]) -> Compute:
    """The operand in a result of the same size with another lead along each axis."""
    more = [lead + behind for lead, behind in zip(pad.before, pad.after, strict=True)]

    def compute(inputs: Sequence[Array]) -> Array:
        wide = [(max(lead, 0) + 2, 16 + max(-lead, 0)) for lead in before]
        large = np.pad(inputs[0], wide, constant_values=int(pad.value))
        starts = [2 + max(lead, 0) - lead for lead in before]
        cuts = zip(starts, inputs[0].shape, more, strict=True)
        return large[tuple(slice(start, start + size + added) for start, size, added in cuts)]

    return compute


def _bordered(pad: Pad, sides: Sequence[tuple[int, int]]) -> tuple[Compute, Compute]:
    """Borders of other widths around an image that lies where it should: they cover some of it, or leave elements to
    the bytes that happen to lie there."""

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


def _without_last(axis: int, filler: float, array: Array) -> Array:
    """The array with a filler in the last place along an axis."""
    changed = array.copy()
    changed[(slice(None),) * axis + (-1,)] = filler
    return changed


def _of_linear(linear: Linear) -> Iterator[Change]:
    same, (zero, weight_zero) = linear.evaluate, linear.zero_points
    yield FORGOTTEN_ZERO, linear.with_zero_points(0, weight_zero).evaluate
    yield "the operand's zero point has the wrong sign", linear.with_zero_points(-zero, weight_zero).evaluate
    yield "forgotten zero point of the weights", linear.with_zero_points(zero).evaluate
    yield "the bias is forgotten", lambda inputs: same(inputs[:2])
    yield "the bias is taken off", _on(same, np.negative, 2)
    for step in (1, -1):
        sentence = f"parameters per channel: biases are shifted by {step}"
        yield sentence, _on(same, partial(np.roll, shift=step), 2)
        yield sentence, _on(same, partial(_moved_in, step), 2)
    yield (
        "a broadcast operand is read wrongly: the bias counts for the first pixel alone",
        partial(_first_biased, linear),
    )
    yield "weights are read as unsigned", _on(same, lambda weights: weights.view(np.uint8).astype(np.int64), 1)
    yield "what is added to stored weights (128) is not taken off", _on(same, partial(np.add, np.int64(128)), 1)
    yield "the operand is read with the wrong sign: as unsigned, or as signed", _on(same, _other_sign, 0)
    for step in (128, -128, 1, -1):
        yield f"zero point of the operand: it is off by {step}", _on(same, partial(np.add, np.int64(step)), 0)


def _moved_in(step: int, array: Array) -> Array:
    """The array shifted by a place along its last axis, with 0 where nothing comes in."""
    moved = np.roll(array, step, -1)
    moved[..., 0 if step > 0 else -1] = 0
    return moved


def _first_biased(linear: Linear, inputs: Sequence[Array]) -> Array:
    result, biased = linear.evaluate(inputs[:2]), linear.evaluate(inputs)
    result[:1, ..., :1, :] = biased[:1, ..., :1, :]
    return result


def _other_sign(x: Array) -> Array:
    return x.view(np.uint8 if x.dtype == np.int8 else np.int8).astype(np.int64)


def _of_window(linear: Convolution) -> Iterator[Change]:
    same = linear.evaluate
    if linear.stride[0] != linear.stride[1]:
        yield "strides of rows and columns are swapped", replace(linear, stride=linear.stride[::-1]).evaluate
    for axis, name in ((1, "row"), (2, "column")):
        without = _on(same, partial(_without_last, axis, linear.weight_zero_point), 1)
        yield f"the last {name} of the kernel is not read: halo off by one", without
    if max(linear.stride) > 1:
        yield "the stride is forgotten", _first_of(replace(linear, stride=(1, 1)), same)
    if max(linear.dilation) > 1:
        yield "the dilation is forgotten", _first_of(replace(linear, dilation=(1, 1)), same)


def _first_of(other: Operator, same: Compute) -> Compute:
    """The first rows and columns of another operator's result, as many as there should be."""

    def compute(inputs: Sequence[Array]) -> Array:
        _, rows, columns, _ = same(inputs).shape
        return other.evaluate(inputs)[:, :rows, :columns]

    return compute


_WEIGHT_AXES = {
    "O": "output channels",
    "I": "input channels",
    "H": "rows of the kernel",
    "W": "columns of the kernel",
}


def _ordered(linear: Linear, change: ArrayChange) -> Compute:
    """The layer with the same weights lying in another order."""
    return _on(linear.evaluate, lambda weights: change(weights).reshape(weights.shape), 1)


def _of_order(names: str, linear: Linear) -> Iterator[Change]:
    for order in islice(permutations(range(len(names))), 1, None):
        text = "".join(names[axis] for axis in order)
        yield f"weight order: they lie as {text}, not {names}", _ordered(linear, partial(np.transpose, axes=order))
    for axis, name in enumerate(names):
        text = f"{_WEIGHT_AXES[name]} permuted: weight order"
        yield f"{text} (reversed)", _ordered(linear, partial(np.flip, axis=axis))
        for step in (1, -1):
            yield f"{text} (shifted by {step})", _ordered(linear, partial(np.roll, shift=step, axis=axis))


def _of_taps(linear: Convolution) -> Iterator[Change]:
    for behind, words in ((False, "before the taps, not behind them"), (True, "behind the taps, not before them")):
        for block in (4, 8, 16, 32):
            change = _ordered(linear, partial(_in_blocks, block, behind))
            yield f"weight order: blocks of input channels lie {words}", change
    yield "the kernel is flipped both ways: weight order", _ordered(linear, partial(np.flip, axis=(1, 2)))
    swapped = _ordered(linear, partial(np.swapaxes, axis1=1, axis2=2))
    yield "rows and columns of the kernel are swapped: weight order", swapped


def _in_blocks(block: int, behind: bool, weights: Array) -> Array:
    """Weights in blocks of input channels, which lie on the other side of the taps than they are read from."""
    outputs, rows, columns, inputs = weights.shape
    whole = np.pad(weights, [(0, 0)] * 3 + [(0, -inputs % block)])
    if behind:
        lying = whole.reshape(outputs, -1, rows, columns, block).transpose(0, 2, 3, 1, 4)
    else:
        lying = whole.reshape(outputs, rows, columns, -1, block).transpose(0, 3, 1, 2, 4)
    return lying.reshape(whole.shape)[..., :inputs]


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
        yield f"requantisation: the shift is off by {step}", _on(same, partial(np.add, step), 2)


def _per_channel(scaling: Requantize | ScaleShift) -> Iterator[Change]:
    same, parameters = scaling.evaluate, (1, 2, 3)
    yield "parameters per channel: the first channel's are used for all", _on(same, lambda a: a[:1], *parameters)
    for step in (1, -1):
        rolled = _on(same, partial(np.roll, shift=step), *parameters)
        yield f"parameters per channel are shifted by {step}", rolled


def _of_scale_shift(scale_shift: ScaleShift) -> Iterator[Change]:
    same = scale_shift.evaluate
    yield "the offset behind the sums (bias, zero point) is forgotten", _on(same, np.zeros_like, 2)
    for step in (1, -1):
        shifted = _on(same, partial(lambda step, shift: np.maximum(shift + step, 0), step), 3)
        yield f"requantisation: the shift is off by {step}", shifted
    yield "wrong rounding: to nearest, not down", lambda i: same([i[0], i[1], i[2] + ((1 << i[3]) >> 1), i[3]])


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
    yield "operands: the first is read twice, the second never", lambda inputs: add.evaluate([inputs[0]] * 2)
    yield "operands: the second is read twice, the first never", lambda inputs: add.evaluate([inputs[1]] * 2)
    yield "operands: the second is taken off, not added", _on(add.evaluate, np.negative, 1)
    yield from _of_shapes(add)


def _of_shapes(operator: Operator) -> Iterator[Change]:
    """An operand of fewer elements than the other read otherwise, or one that is whole as if it had fewer."""
    same, words = operator.evaluate, "a broadcast operand is read wrongly"
    for place, name in enumerate(("first", "second")):
        yield f"{words}: of the {name} one element counts for all", _on(same, lambda x: x[..., :1][:, :1, :1], place)
        yield f"{words}: of the {name} one pixel counts for all", _on(same, lambda x: x[:, :1, :1], place)
        yield f"{words}: of the {name} one row counts for all", _on(same, lambda x: x[:, :1], place)
        repeated = partial(_repeated, operator, place)
        yield f"{words}: the {name} is repeated along another axis", repeated


def _repeated(operator: Operator, place: int, inputs: Sequence[Array]) -> Array:
    """The operator with the elements of a smaller operand one behind the other, as often as they fit the result."""
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    return operator.evaluate([np.resize(x, shape) if at == place else x for at, x in enumerate(inputs)])


def _of_maximum(pool: MaxPool2d) -> Iterator[Change]:
    average = AveragePool2d(pool.kernel, pool.stride, pool.padding)

    def narrow(inputs: Sequence[Array]) -> Array:
        return np.asarray(average.evaluate(inputs)).astype(inputs[0].dtype)

    yield "the kind of pool: it computes the average, not the maximum", narrow
    yield "padding counts as 0 in a maximum", _padded_with_0(pool)


def _of_mean(pool: Pool2d) -> Iterator[Change]:
    largest = MaxPool2d(pool.kernel, pool.stride, pool.padding)
    yield "the kind of pool: it computes the maximum, not the average", largest.evaluate
    yield "padding is counted: the divisor is the whole window", _padded_with_0(pool)


def _padded_with_0(pool: Pool2d) -> Compute:
    around = ((0, 0), *pool.padding, (0, 0))
    bare = replace(pool, padding=((0, 0), (0, 0)))
    return _on(bare.evaluate, lambda x: np.pad(x, around), 0)


def _of_steps(pool: Pool2d) -> Iterator[Change]:
    if max(pool.stride) > 1:
        yield "the stride is forgotten", _first_of(replace(pool, stride=(1, 1)), pool.evaluate)


_CONVOLUTION = (_of_linear, _of_window, partial(_of_order, "OHWI"), _of_taps)
_MISTAKES: Mapping[type[Operator], Sequence[Callable[[Any], Iterable[Change]]]] = {
    Pad: (_of_pad,),
    Conv2d: _CONVOLUTION,
    DepthwiseConv2d: _CONVOLUTION,
    FullyConnected: (_of_linear, partial(_of_order, "OI")),
    Requantize: (_of_requantize, _per_channel),
    ScaleShift: (_of_scale_shift, _per_channel),
    Clip: (_of_clip,),
    Add: (_of_add,),
    Binary: (_of_shapes,),
    MaxPool2d: (_of_maximum, _of_steps),
    AveragePool2d: (_of_mean, _of_steps),
    SumPool2d: (_of_mean, _of_steps),
}


def _of_zeros(graph: Graph) -> Iterator[Mutation]:
    """The zero point forgotten in the layer and in its padding at once, or in the place of the result's."""

    def zeros(operand: int, result: int | None = None) -> Graph:
        operators: dict[int, Operator] = {}
        for number, node in enumerate(graph.nodes):
            operator: Any = node.operator
            if operator.weight_axis is not None:
                operators[number] = operator.with_zero_points(operand, operator.weight_zero_point)
            elif operator.pads:  # what fills a border is an element, which a register holds as such
                value = int(np.array(operand).astype(graph.types[node.output].dtype.numpy))
                operators[number] = replace(operator, value=value)
            elif result is not None and _REQUANTIZE.fits(node):
                operators[number] = replace(operator, output_zero_point=result)
        return _with(graph, operators)

    yield f"{FORGOTTEN_ZERO}, padding too", zeros(0)
    layers: list[Any] = [node.operator for node in graph.nodes if node.operator.weight_axis is not None]
    scalings: list[Any] = [node.operator for node in graph.nodes if _REQUANTIZE.fits(node)]
    if len(layers) == len(scalings) == 1:
        sentence = "the zero points of operand and result are in each other's place"
        yield sentence, zeros(scalings[0].output_zero_point, layers[0].input_zero_point)


def _misread(graph: Graph, layer: MadeLayer) -> Iterator[Mutation]:
    """Values of few bits taken out of bytes, or put into them, in another way."""
    for name, kind in graph.types.items():
        if kind.dtype.bits >= 8:
            continue
        noun = "the result" if name == layer.root else "weights" if name in graph.constants else "the operand"
        for sentence, *ways in _of_bytes(kind.dtype):
            mutants = [_with(graph, _misreading(graph, name, change, name == layer.root)) for change in ways]
            yield (f"{noun} of few bits: {sentence}", *mutants)  # type: ignore[misc]


def _misreading(graph: Graph, value: str, change: ArrayChange, is_result: bool) -> dict[int, Operator]:
    """The operators that compute a value, or read it, with it changed."""
    operators: dict[int, Operator] = {}
    for number, node in enumerate(graph.nodes):
        if is_result and node.output == value:
            operators[number] = _MutantOperator(partial(_then, node.operator.evaluate, change))
        elif not is_result and value in node.inputs:
            places = [place for place, name in enumerate(node.inputs) if name == value]
            operators[number] = _MutantOperator(_on(node.operator.evaluate, change, *places))
    return operators


def _then(compute: Compute, change: ArrayChange, inputs: Sequence[Array]) -> Array:
    return change(compute(inputs))


def _of_bytes(dtype: DType) -> Iterator[tuple[str, *tuple[ArrayChange, ...]]]:
    """Other ways to read bytes of such elements; two that differ in the bytes behind the last."""
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
