"""A failure in its smallest form, and what is likely wrong.

Every axis is made as simple as it can be with the failure still there. What the result equals instead (the results of
usual mistakes are computed), how it differs, and what the failure cannot do without give the suspicions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from dovetail.ir.graph import Graph, evaluate
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array
from dovetail.target.description import Offload
from dovetail.tools.check.cases import Case, ask
from dovetail.tools.check.layers import LEAST, MADE, PADS, SIZES, MadeLayer, single
from dovetail.tools.check.run import Outcome

_SIMPLEST = {"scale": 1, "offset": 2, "along": 3}
"""The simplest settings of axes of which it is not 0."""
_ROUNDS = 9
Attempt = Callable[[Sequence[Case]], list[Outcome]]
"""Carries cases out."""


@dataclass(frozen=True)
class Shrunk:
    """The smallest form found."""

    outcome: Outcome
    needed: tuple[str, ...]
    """Axes without whose settings all is well."""


def shrink(outcome: Outcome, offload: Offload, attempt: Attempt, dear: bool = False) -> Shrunk:
    """Make a failing case as simple as it goes; `dear` where a try that ends in an error takes long."""
    needed: tuple[str, ...] = ()
    if outcome.hangs or (dear and outcome.error):
        simpler = {axis: Outcome(case) for axis, case in _simpler(outcome.case, offload)}
        small = _together(outcome, simpler, offload, lambda cases: _first(outcome, cases, attempt))
        return Shrunk(small or outcome, ())
    for _ in range(_ROUNDS):
        single = dict(_simpler(outcome.case, offload))
        results = dict(zip(single, attempt(list(single.values())), strict=True))
        failing = {axis: result for axis, result in results.items() if _same(outcome, result)}
        needed = tuple(axis for axis in single if axis not in failing)
        if not failing:
            break
        outcome = _together(outcome, failing, offload, attempt) or next(iter(failing.values()))
    return Shrunk(outcome, needed)


def _first(outcome: Outcome, cases: Sequence[Case], attempt: Attempt) -> list[Outcome]:
    """Cases one at a time, up to the first that fails alike."""
    found: list[Outcome] = []
    for case in cases:
        found += attempt([case])
        if _same(outcome, found[-1]):
            break
    return found


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether two cases fail alike: with a wrong result, or with an error."""
    return other.failed and bool(one.error) == bool(other.error)


def _together(outcome: Outcome, failing: Mapping[str, Outcome], offload: Offload, attempt: Attempt) -> Outcome | None:
    """Every simplification at once, if that fails too; else half of them, and so on; None where nothing fails."""
    axes = list(failing)
    tries = []
    while len(axes) > 1:
        point = {**outcome.case.point, **{axis: failing[axis].case.point[axis] for axis in axes}}
        asked = ask(offload, point)
        if asked is not None and not asked.failures:
            tries.append(replace(outcome.case, point=asked.layer.settings(point)))
        axes = axes[: len(axes) // 2]
    found = [result for result in attempt(tries) if _same(outcome, result)] if tries else []
    return found[0] if found else None


def _simplest(axis: str) -> int:
    return LEAST[axis] if axis in SIZES else _SIMPLEST.get(axis.split(":")[0], 0)


def _simpler(case: Case, offload: Offload) -> Iterator[tuple[str, Case]]:
    """For each axis the simplest setting the limits take with all others as they are."""
    for axis, value in case.point.items():
        steps = [_simplest(axis)]
        if value == steps[0] or axis in MADE:
            continue
        if axis in SIZES:
            steps += [size for size in (2, 3, value // 2, value - 1) if LEAST[axis] < size < value]
        other = axis.replace("_rows", "_columns") if axis.endswith("_rows") else axis.replace("_columns", "_rows")
        both = {axis, other} & set(case.point)
        tries = [{axis: size} for size in steps] + [dict.fromkeys(both, size) for size in steps if len(both) > 1]
        for less in tries:  # some limits want both directions alike
            point = _smaller_image({**case.point, **less}, axis)
            asked = ask(offload, point)
            if asked is not None and not asked.failures:
                yield axis, replace(case, point=asked.layer.settings(point))
                break


def _smaller_image(point: dict[str, int], axis: str) -> dict[str, int]:
    """A kernel that gets smaller takes the padding beyond it along."""
    if axis in ("kernel_rows", "kernel_columns"):
        sides = PADS[:2] if axis == "kernel_rows" else PADS[2:]
        point |= {side: min(point[side], point[axis] - 1) for side in sides if side in point}
    return point


Compute = Callable[[Sequence[Array]], Array]
Change = tuple[str, Compute]
"""A sentence and what the operator computes instead."""


@dataclass(frozen=True)
class _Instead(Operator):
    """An operator with another meaning."""

    compute: Compute

    def evaluate(self, inputs: Sequence[Array]) -> Array:
        return self.compute(inputs)


def instead(graph: Graph, layer: MadeLayer) -> Iterator[tuple[str, Array]]:
    """Every mistake's result that is another than the right one."""
    for number, node in enumerate(graph.nodes):
        for sentence, compute in _MISTAKES.get(type(node.operator), lambda operator: ())(node.operator):
            nodes = list(graph.nodes)
            nodes[number] = replace(node, operator=_Instead(compute))
            yield from _result(replace(graph, nodes=tuple(nodes)), layer, sentence)
    yield from _unpadded_zero(graph, layer)


def _result(graph: Graph, layer: MadeLayer, sentence: str) -> Iterator[tuple[str, Array]]:
    try:
        found = evaluate(graph, layer.inputs)[layer.root]
    except (ValueError, IndexError):  # not a mistake that can be made here
        return
    if not np.array_equal(found, layer.expected):
        yield sentence, found


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
    same, zero = linear.evaluate, linear.input_zero_point
    forgotten = "forgotten zero point: differs by the operand's zero point times the sum of the weights"
    yield forgotten, replace(linear, input_zero_point=0).evaluate
    yield "the operand's zero point has the wrong sign", replace(linear, input_zero_point=-zero).evaluate
    yield "forgotten zero point of the weights", replace(linear, weight_zero_point=0).evaluate
    yield "the bias is forgotten", lambda inputs: same(inputs[:2])
    yield "the bias is taken off", lambda inputs: same([*inputs[:2], *(-b for b in inputs[2:])])
    yield "weights are read as unsigned", lambda i: same([i[0], i[1].view(np.uint8).astype(np.int64), *i[2:]])
    if not isinstance(linear, FullyConnected):
        yield from _of_window(linear)
    yield from _weight_orders(linear)


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
        yield "the kernel is flipped both ways: weight order", ordered(lambda weights: weights[:, ::-1, ::-1])
        swapped = ordered(lambda weights: np.ascontiguousarray(weights.swapaxes(1, 2)))
        yield "rows and columns of the kernel are swapped: weight order", swapped


def _of_requantize(requantize: Requantize) -> Iterator[Change]:
    same, zero = requantize.evaluate, requantize.output_zero_point
    for rounding in Rounding:
        if rounding is not requantize.rounding:
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
    yield "wrong rounding: to nearest, not down", lambda i: same([i[0], i[1], i[2] + ((1 << i[3]) >> 1), i[3]])
    yield from _per_channel(same)


def _of_clip(clip: Clip) -> Iterator[Change]:
    yield "results are not limited: they wrap", lambda inputs: inputs[0].astype(clip.dtype.numpy)
    wide = replace(clip, low=clip.dtype.low, high=clip.dtype.high)
    yield "limits of the activation are forgotten", wide.evaluate
    yield "the lower limit of the activation is forgotten", replace(clip, low=clip.dtype.low).evaluate
    yield "the upper limit of the activation is forgotten", replace(clip, high=clip.dtype.high).evaluate


_MISTAKES: Mapping[type[Operator], Callable[[Any], Iterable[Change]]] = {
    Pad: _of_pad,
    Conv2d: _of_linear,
    DepthwiseConv2d: _of_linear,
    FullyConnected: _of_linear,
    Requantize: _of_requantize,
    ScaleShift: _of_scale_shift,
    Clip: _of_clip,
}


def _unpadded_zero(graph: Graph, layer: MadeLayer) -> Iterator[tuple[str, Array]]:
    """The zero point forgotten in the layer and in its padding at once."""
    forgetting = []
    for node in graph.nodes:
        if isinstance(node.operator, Conv2d | DepthwiseConv2d | FullyConnected):
            node = replace(node, operator=replace(node.operator, input_zero_point=0))
        elif isinstance(node.operator, Pad):
            node = replace(node, operator=replace(node.operator, value=0))
        forgetting.append(node)
    sentence = "forgotten zero point: differs by the operand's zero point times the sum of the weights, padding too"
    yield from _result(replace(graph, nodes=tuple(forgetting)), layer, sentence)


_NEEDED = (
    (("input_zero",), "the operand's zero point: forgotten, or not taken off everywhere"),
    (("output_zero",), "the result's zero point: forgotten, or its sign"),
    (("weight_zero",), "the weights' zero point: forgotten"),
    (("pad_offset",), "the value of padding: too wide a limit, or not told to the engine"),
    (("groups",), "groups: too wide a limit"),
    (("dilation_rows", "dilation_columns"), "dilation: too wide a limit, or not told to the engine"),
    (("stride_rows", "stride_columns"), "stride: too wide a limit, or not told to the engine"),
    (("bias",), "the bias: forgotten, or in the wrong place"),
    (PADS, "padding or halo"),
    (("per_channel", "scale"), "parameters per channel: their order or their number"),
    (("kernel_rows", "kernel_columns"), "kernel or halo: too wide a limit, or the order of the taps"),
    (("batch",), "several images: too wide a limit"),
    (("rounding",), "rounding: too wide a limit"),
    (("type", "result"), "the type of operand or result: too wide a limit"),
    (("weight_type",), "narrow weights: too wide a limit, or how they are packed"),
    (("channels",), "input channels: weight order, alignment or too wide a limit"),
    (("outputs",), "output channels: weight order, alignment or too wide a limit"),
    (("rows", "columns"), "addresses: alignment, strides between rows, or too wide a limit"),
)
_UNWRITTEN = 0xA5
_ASKED = 6
"""Failing cases that mistakes are compared with."""


def suspicions(shrunk: Shrunk, failed: Sequence[Outcome], offload: Offload) -> list[str]:
    """Sentences, the likeliest first; at least one. `failed` are all that failed alike, the one shrunk first."""
    if shrunk.outcome.error:
        found = _of_error(shrunk.outcome.error)
    else:
        assert failed[0].actual is not None and failed[0].expected is not None
        found = _of_instead([shrunk.outcome, *failed[:_ASKED]], offload)
        found += _of_difference(failed[0].actual, failed[0].expected)
    found += _of_needed(shrunk)
    return list(dict.fromkeys(found)) or ["nothing about it is known: compare the driver's registers with the job"]


def _of_error(error: str) -> list[str]:
    """What an error that is no wrong result points to."""
    text = error.lower()
    known = (
        ("gave no answer", "the port hangs: the device model, the driver or a library never comes to an end"),
        ("hang", "the port hangs: the engine never finishes, or the driver waits for the wrong register"),
        ("instructions without an end", "the port hangs: the driver polls for what never comes"),
        ("deadlock", "the port hangs: the engine raised no interrupt, or the driver waits for one too many"),
        ("writes outside of its result", "the engine writes outside of its result: halo, size or stride"),
        ("not inside one memory", "an address is wrong: halo, size or stride"),
        ("align", "bad alignment: of an address, a stride or packed constants"),
        ("multiple of", "bad alignment: of an address, a stride or packed constants"),
        ("does not fit 32 bits", "a register is given a number that is too large: too wide a limit"),
        ("against its limit", "a limit is asked differently of the same layer: what its measure depends on"),
    )
    return [sentence for key, sentence in known if key in text][:1] or [f"the port's own code: {error.splitlines()[0]}"]


def _of_instead(outcomes: Sequence[Outcome], offload: Offload) -> list[str]:
    """Mistakes that give the very results, those that explain the most cases first."""
    explained: Counter[str] = Counter()
    for outcome in outcomes:
        assert outcome.actual is not None
        graph, layer = single(offload.pattern, offload.cases, outcome.case.point)
        for sentence, other in instead(graph, layer):
            if np.array_equal(other, outcome.actual):
                explained[sentence] += 1
    return sorted(explained, key=lambda sentence: -explained[sentence])[:2]


def _of_difference(actual: Array, expected: Array) -> Iterator[str]:
    """What the places and sizes of the differences look like."""
    wrong, gap = actual != expected, actual.astype(np.int64) - expected.astype(np.int64)
    if (np.ascontiguousarray(actual[wrong]).view(np.uint8) == _UNWRITTEN).all():
        yield f"never written: {_where(wrong) or 'part of the result'}"
    if (order := _permutation(actual, expected)) is not None:
        yield f"output channels permuted: weight order (result channels are {order[:8]}...)"
    if actual.ndim == 4 and actual.shape[1] == actual.shape[2] and np.array_equal(actual.swapaxes(1, 2), expected):
        yield "rows and columns of the result are swapped: strides"
    if place := _where(wrong):
        yield f"differs only {place}"
    if np.abs(gap).max() == 1 and expected.dtype.itemsize == 1:
        yield "off by one in rounding"
    if actual[..., 0].size > 3 and (gap == gap[(0,) * (actual.ndim - 1)]).all():
        yield "differs by a constant per channel: the bias, or the zero point times the sum of the weights"


def _where(wrong: Array) -> str:
    """The part of the result all differences lie in, where that says something; empty otherwise."""
    if wrong.ndim == 4:
        for axis, name in ((1, "row"), (2, "column")):
            size = wrong.shape[axis]
            lines = np.flatnonzero(wrong.any(axis=tuple(other for other in range(4) if other != axis)))
            if size > 2 and lines.size == 1 and lines[0] in (0, size - 1):
                return f"on the {'last' if lines[0] else 'first'} {name}: padding or halo"
        inner = wrong[:, 1:-1, 1:-1]
        if inner.size and not inner.any():
            return "on the border: padding or halo"
    channels = np.flatnonzero(wrong.any(axis=tuple(range(wrong.ndim - 1))))
    if channels.size and channels[0] > 0 and wrong.shape[-1] - channels[0] <= wrong.shape[-1] // 2:
        return f"from channel {channels[0]} on: what does not fill a block of channels"
    return ""


def _permutation(actual: Array, expected: Array) -> list[int] | None:
    """Which expected channel each channel is, where they are all there in another order."""
    flat, wanted = (array.reshape(-1, array.shape[-1]) for array in (actual, expected))
    if len(flat) < 4 or flat.shape[1] < 2:
        return None
    order = []
    for channel in range(flat.shape[1]):
        same = np.flatnonzero((wanted == flat[:, channel : channel + 1]).all(axis=0))
        if not same.size:
            return None
        order.append(int(same[0]))
    return order if order != sorted(order) else None


def _of_needed(shrunk: Shrunk) -> Iterator[str]:
    needed = {axis.split(":")[0] for axis in shrunk.needed}
    for axes, sentence in _NEEDED:
        if needed & set(axes):
            yield sentence
    if "weights" in needed:
        yield "weight order: it is right where all weights are the same"
