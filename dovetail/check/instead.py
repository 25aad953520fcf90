"""What a port with a usual mistake computes in place of a layer: a sentence and a result for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from dovetail.check.layers import Layer
from dovetail.graph.graph import Graph, Node, evaluate
from dovetail.graph.types import Array
from dovetail.operators.arithmetic import Clip, Requantize, Rounding, ScaleShift
from dovetail.operators.base import Operator
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad

Change = tuple[str, Callable[[Sequence[Array]], Array]]
"""A sentence and what the operator computes instead."""


@dataclass(frozen=True)
class _Instead(Operator):
    """An operator with another meaning."""

    compute: Callable[[Sequence[Array]], Array]

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return self.compute(inputs)


def instead(graph: Graph, layer: Layer) -> Iterator[tuple[str, Array]]:
    """Every mistake's result that is another than the right one."""
    for number, node in enumerate(graph.nodes):
        for sentence, compute in _changes(node):
            nodes = list(graph.nodes)
            nodes[number] = replace(node, operator=_Instead(compute))
            yield from _result(replace(graph, nodes=tuple(nodes)), layer, sentence)
    yield from _unpadded_zero(graph, layer)


def _result(graph: Graph, layer: Layer, sentence: str) -> Iterator[tuple[str, Array]]:
    try:
        found = evaluate(graph, layer.inputs)[layer.root]
    except (ValueError, IndexError):  # not a mistake that can be made here
        return
    if not np.array_equal(found, layer.expected):
        yield sentence, found


def _changes(node: Node) -> Iterator[Change]:
    operator: Any = node.operator
    makers: Mapping[type[Operator], Callable[[Any], Iterator[Change]]] = {
        Pad: _of_pad, Conv2d: _of_linear, DepthwiseConv2d: _of_linear, FullyConnected: _of_linear,
        Requantize: _of_requantize, ScaleShift: _of_scale_shift, Clip: _of_clip,
    }  # fmt: skip
    maker = makers.get(type(operator))
    if maker is not None:
        yield from maker(operator)


def _of_pad(pad: Pad) -> Iterator[Change]:
    total = tuple(b + a for b, a in zip(pad.before, pad.after, strict=True))

    def led(before: Sequence[int], value: float = pad.value) -> Callable[[Sequence[Array]], Array]:
        """Padding with other leads, and results of the same size, cropped or filled as an engine would."""
        def compute(inputs: Sequence[Array]) -> Array:
            """The image at another place of the padded one."""
            wide = [(max(lead, 0) + 2, 16) for lead in before]
            large = np.pad(inputs[0], wide, constant_values=int(value))
            starts = [2 + max(lead, 0) - lead for lead in before]
            cuts = zip(starts, inputs[0].shape, total, strict=True)
            return large[tuple(slice(start, start + size + more) for start, size, more in cuts)]
        return compute

    none, top, left, last = pad.before
    yield "padding swapped: rows and columns", led((none, left, top, last))
    yield "padding swapped: before and after", led(pad.after)
    yield "padding is filled with 0 in place of the zero point", led(pad.before, 0)
    for step, word in ((1, "late"), (-1, "early")):
        yield f"halo off by one: rows begin one too {word}", led((none, top + step, left, last))
        yield f"halo off by one: columns begin one too {word}", led((none, top, left + step, last))
    yield "padding is forgotten", led((0, 0, 0, 0))
    edge = tuple(zip(pad.before, pad.after, strict=True))
    yield "padding repeats the edge in place of the zero point", lambda inputs: np.pad(inputs[0], edge, mode="edge")


def _of_linear(linear: Conv2d | DepthwiseConv2d | FullyConnected) -> Iterator[Change]:
    same = linear.evaluate
    zero = linear.input_zero_point
    yield ("forgotten zero point: differs by the operand's zero point times the sum of the weights",
           replace(linear, input_zero_point=0).evaluate)  # fmt: skip
    yield "the operand's zero point has the wrong sign", replace(linear, input_zero_point=-zero).evaluate
    yield "forgotten zero point of the weights", replace(linear, weight_zero_point=0).evaluate
    yield "the bias is forgotten", lambda inputs: same(inputs[:2])
    yield "the bias is taken off", lambda inputs: same([*inputs[:2], *(-b for b in inputs[2:])])
    yield "weights are read as unsigned", lambda i: same([i[0], i[1].view(np.uint8).astype(np.int64), *i[2:]])
    if not isinstance(linear, FullyConnected) and linear.stride[0] != linear.stride[1]:
        yield "strides of rows and columns are swapped", replace(linear, stride=linear.stride[::-1]).evaluate
    if not isinstance(linear, FullyConnected):
        for axis, name in ((1, "row"), (2, "column")):
            yield f"the last {name} of the kernel is not read: halo off by one", _without_last(linear, axis)
        if max(linear.stride) > 1:
            yield "the stride is forgotten", _strideless(linear, replace(linear, stride=(1, 1)))
        if max(linear.dilation) > 1:
            yield "the dilation is forgotten", _strideless(linear, replace(linear, dilation=(1, 1)))
    yield from _weight_orders(linear)


def _strideless(
    linear: Conv2d | DepthwiseConv2d, other: Conv2d | DepthwiseConv2d
) -> Callable[[Sequence[Array]], Array]:
    def compute(inputs: Sequence[Array]) -> Array:
        """As many results as there should be, one beside the other."""
        right = linear.evaluate(inputs).shape
        found = other.evaluate(inputs)
        return found[:, : right[1], : right[2]]
    return compute


def _without_last(linear: Conv2d | DepthwiseConv2d, axis: int) -> Callable[[Sequence[Array]], Array]:
    def compute(inputs: Sequence[Array]) -> Array:
        """The weights of the last taps do nothing."""
        weights = inputs[1].copy()
        weights[(slice(None),) * axis + (-1,)] = linear.weight_zero_point
        return linear.evaluate([inputs[0], weights, *inputs[2:]])
    return compute


def _weight_orders(linear: Conv2d | DepthwiseConv2d | FullyConnected) -> Iterator[Change]:
    def ordered(change: Callable[[Array], Array]) -> Callable[[Sequence[Array]], Array]:
        """The layer with its weights in another order."""
        return lambda inputs: linear.evaluate([inputs[0], change(inputs[1]).reshape(inputs[1].shape), *inputs[2:]])

    dense = isinstance(linear, FullyConnected)
    names = "OI" if dense else "OHWI"
    for order in permutations(range(len(names))):
        if list(order) != sorted(order):
            text = "".join(names[axis] for axis in order)
            yield f"weight order: they lie as {text}, not {names}", ordered(
                lambda weights, order=order: np.ascontiguousarray(weights.transpose(order))  # type: ignore[misc]
            )
    for axis, name in enumerate(names):
        what = {"O": "output channels permuted", "I": "input channels permuted",
                "H": "rows of the kernel permuted", "W": "columns of the kernel permuted"}[name]  # fmt: skip
        text = f"{what}: weight order"
        yield f"{text} (reversed)", ordered(lambda weights, axis=axis: np.flip(weights, axis))  # type: ignore[misc]
        for step in (1, -1):
            yield f"{text} (shifted by {step})", ordered(
                lambda weights, axis=axis, step=step: np.roll(weights, step, axis)  # type: ignore[misc]
            )
    if not dense:
        yield "the kernel is flipped both ways: weight order", ordered(lambda weights: weights[:, ::-1, ::-1])
        yield "rows and columns of the kernel are swapped: weight order", ordered(
            lambda weights: np.ascontiguousarray(weights.swapaxes(1, 2))
        )


def _of_requantize(requantize: Requantize) -> Iterator[Change]:
    same = requantize.evaluate
    for rounding in Rounding:
        if rounding is not requantize.rounding:
            yield (f"off by one in rounding: it rounds as {rounding.value}, not {requantize.rounding.value}",
                   replace(requantize, rounding=rounding).evaluate)  # fmt: skip

    def truncated(inputs: Sequence[Array]) -> Array:
        """Right shifts without rounding."""
        x, multiplier, shift = (array.astype(np.int64) for array in inputs)
        product = (x * multiplier) >> 31
        return np.asarray((product >> -np.minimum(shift, 0)) + requantize.output_zero_point)

    def once_down(inputs: Sequence[Array]) -> Array:
        """One right shift without rounding."""
        x, multiplier, shift = (array.astype(np.int64) for array in inputs)
        return np.asarray(((x * multiplier) >> (31 - shift)) + requantize.output_zero_point)

    yield "wrong rounding: shifts round down", truncated
    yield "wrong rounding: one shift that rounds down", once_down
    yield "forgotten zero point of the result", replace(requantize, output_zero_point=0).evaluate
    yield "the result's zero point has the wrong sign", replace(
        requantize, output_zero_point=-requantize.output_zero_point
    ).evaluate
    for step in (1, -1):
        yield f"requantisation: the shift is off by {step}", _with_shift(same, step)
    yield from _per_channel(same)


def _per_channel(same: Callable[[Sequence[Array]], Array]) -> Iterator[Change]:
    yield "parameters per channel: the first channel's are used for all", lambda inputs: same(
        [inputs[0], *(array[:1] for array in inputs[1:])]
    )
    for step in (1, -1):
        yield f"parameters per channel are shifted by {step}", _rolled(same, step)


def _with_shift(same: Callable[[Sequence[Array]], Array], step: int) -> Callable[[Sequence[Array]], Array]:
    return lambda inputs: same([inputs[0], inputs[1], inputs[2] + step])


def _rolled(same: Callable[[Sequence[Array]], Array], step: int) -> Callable[[Sequence[Array]], Array]:
    return lambda inputs: same([inputs[0], *(np.roll(array, step) for array in inputs[1:])])


def _of_scale_shift(scale_shift: ScaleShift) -> Iterator[Change]:
    same = scale_shift.evaluate
    yield "the offset behind the sums (bias, zero point) is forgotten", lambda i: same([i[0], i[1], i[2] * 0, i[3]])
    yield "wrong rounding: to nearest, not down", lambda i: same([i[0], i[1], i[2] + ((1 << i[3]) >> 1), i[3]])
    yield from _per_channel(same)


def _of_clip(clip: Clip) -> Iterator[Change]:
    yield "results are not limited: they wrap", lambda inputs: inputs[0].astype(clip.dtype.numpy)
    wide = replace(clip, low=clip.dtype.low, high=clip.dtype.high)
    yield "limits of the activation are forgotten", wide.evaluate
    yield "the lower limit of the activation is forgotten", replace(clip, low=clip.dtype.low).evaluate
    yield "the upper limit of the activation is forgotten", replace(clip, high=clip.dtype.high).evaluate


def _unpadded_zero(graph: Graph, layer: Layer) -> Iterator[tuple[str, Array]]:
    """The zero point forgotten in the layer and in its padding at once."""
    forgetting = []
    for node in graph.nodes:
        operator = node.operator
        if isinstance(operator, Conv2d | DepthwiseConv2d | FullyConnected):
            operator = replace(operator, input_zero_point=0)
        elif isinstance(operator, Pad):
            operator = replace(operator, value=0)
        forgetting.append(replace(node, operator=operator))
    sentence = "forgotten zero point: differs by the operand's zero point times the sum of the weights, padding too"
    yield from _result(replace(graph, nodes=tuple(forgetting)), layer, sentence)
