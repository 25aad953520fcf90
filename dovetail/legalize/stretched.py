"""Transposed convolutions without the zeros between the elements of their image, and kernels without taps of zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Clip, Requantize
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.operators.movement import Concat, Pad, Pick, Reshape, Slice
from dovetail.ir.pattern import Apply, apply, constant, maybe, operand, rest
from dovetail.ir.rules import Rule, RuleMatch, rewriting
from dovetail.ir.types import Array
from dovetail.records import Record

_IMAGE, _WEIGHTS, _BIAS = operand("image"), constant("weights"), rest("bias")
_ZEROS = apply(Pad, apply(Reshape, _IMAGE), name="zeros")
_CUT = maybe(Slice, apply(Reshape, _ZEROS, name="wide"), name="cut")
_BORDER = maybe(Pad, _CUT, name="border")
_STRETCHED = apply(Conv2d, _BORDER, _WEIGHTS, _BIAS, having=lambda layer: layer.stride == (1, 1), alone=True)
_PLAIN = apply(Conv2d, _IMAGE, _WEIGHTS, _BIAS, alone=True)


class _AxisPhase(Record):
    """The results t = stride * u + phase along an axis: taps and rows of the image that they read."""

    taps: tuple[int, ...]
    dilation: int
    first: int
    """Row of the image that result 0 reads first; negative for padding."""
    count: int
    """Results, the same of every phase; the last may lie beyond the image of results."""

    def border(self, size: int) -> tuple[int, int]:
        """Rows of padding before and after the image; negative where it is cut."""
        reach = self.first + self.count + (len(self.taps) - 1) * self.dilation
        return -self.first, reach - size


def _phases(stride: int, taps: int, dilation: int, lead: int, results: int) -> list[_AxisPhase]:
    """The phases of an axis whose image has stride - 1 zeros between rows and `lead` rows of padding."""
    phases, common = [], gcd(stride, dilation)
    for phase in range(stride):
        own = tuple(tap for tap in range(taps) if (phase + tap * dilation - lead) % stride == 0)
        first = (phase + own[0] * dilation - lead) // stride if own else 0
        phases.append(_AxisPhase(own, dilation // common, first, -(-results // stride)))
    return phases


def _axes(at: RuleMatch) -> list[list[_AxisPhase]]:
    """The phases of rows and columns; none where the zeros are no stretched image's."""
    before, after = at[_ZEROS].before, at[_ZEROS].after
    stretches = (after[2] + 1, after[4] + 1) if len(after) == 6 else (1, 1)
    shape, layer = at.type(_IMAGE).shape, at[_STRETCHED]
    wide = (shape[0], shape[1] * stretches[0], shape[2] * stretches[1], shape[3]) if len(shape) == 4 else ()
    values = {at[part].value for part in (_ZEROS, _BORDER) if at.has(part)}
    lead = at[_BORDER].before if at.has(_BORDER) else (0,) * 4
    cut = at[_CUT] if at.has(_CUT) else None
    plain = cut is None or (not any(cut.start) and set(cut.step) == {1})
    shaped = len(shape) == 4 and at.type(_CUT.inputs[0]).shape == wide and sum(after) == sum(stretches) - 2
    if max(stretches) == 1 or any(before) or not plain or not shaped or values != {layer.input_zero_point}:
        return []
    kernel, results = at.type(_WEIGHTS).shape[1:3], at.type(_STRETCHED).shape[1:3]
    sizes = zip(stretches, kernel, layer.dilation, lead[1:3], results, strict=True)
    axes = [_phases(*each) for each in sizes]
    return axes if all(phase.taps for axis in axes for phase in axis) else []


def _by_phases(at: RuleMatch) -> str | None:
    """A layer of each phase. Their pixels in turn are a row, their rows in turn the result."""
    axes, layer, rows = _axes(at), at[_STRETCHED], list[str]()
    if not axes:
        return None
    weights, shape = at.draft.constants[at[_WEIGHTS]], at.type(_IMAGE).shape
    for down in axes[0]:
        parts = []
        for across in axes[1]:
            image = _bordered(at, (down.border(shape[1]), across.border(shape[2])), layer.input_zero_point)
            own = weights[:, list(down.taps)][:, :, list(across.taps)]
            kernel = at.constant(np.ascontiguousarray(own), at.type(_WEIGHTS).dtype, _WEIGHTS)
            phase = replace(layer, dilation=(down.dilation, across.dilation))
            parts.append(_finished(at, _STRETCHED, at.add(phase, image, kernel, *at.others(_STRETCHED))))
        rows.append(_in_turn(at, parts, 2))
    whole, result = _in_turn(at, rows, 1), at.type(at.root.output).shape
    return whole if at.type(whole).shape == result else at.add(Slice((0,) * 4, result, (1,) * 4), whole)


def _finished(at: RuleMatch, layer: Apply[Conv2d], sums: str, own: Sequence[int] | None = None) -> str:
    """Sums, with what the pattern has behind its layer; of some filters with their constants."""
    for node in at.members[at.members.index(at.nodes[layer]) + 1 :]:
        sums = at.add(node.operator, sums, *_of_filters(at, node.inputs[1:], own), like=node)
    return sums


def _of_filters(at: RuleMatch, names: Sequence[str], own: Sequence[int] | None) -> list[str]:
    """Constants by filter, of some filters; others are for all."""
    filters = at.type(_WEIGHTS).shape[0]
    parts = [name if own is None or at.type(name).shape != (filters,) else "" for name in names]
    return [
        part or at.constant(at.draft.constants[name][own], at.type(name).dtype, name)
        for part, name in zip(parts, names, strict=True)
    ]


def _in_turn(at: RuleMatch, parts: Sequence[str], axis: int) -> str:
    """Images of one size, their rows or columns in turn: as memory has them where they lie side by side."""
    if len(parts) == 1:
        return parts[0]
    batch, rows, columns, channels = at.type(parts[0]).shape
    if axis == 2:
        return at.add(Reshape((batch, rows, columns * len(parts), channels)), at.add(Concat(3), *parts))
    flat = [at.add(Reshape((batch, rows, 1, columns * channels)), part) for part in parts]
    return at.add(Reshape((batch, rows * len(parts), columns, channels)), at.add(Concat(3), *flat))


def _bordered(at: RuleMatch, border: tuple[tuple[int, int], tuple[int, int]], value: int) -> str:
    """The image with rows and columns of padding, or cut."""
    (top, bottom), (left, right) = border
    shape, x = at.type(_IMAGE).shape, at[_IMAGE]
    start = (0, max(-top, 0), max(-left, 0), 0)
    stop = (shape[0], shape[1] - max(-bottom, 0), shape[2] - max(-right, 0), shape[3])
    if start != (0,) * 4 or stop != shape:
        x = at.add(Slice(start, stop, (1,) * 4), x, stem=x)
    before, after = (0, max(top, 0), max(left, 0), 0), (0, max(bottom, 0), max(right, 0), 0)
    return at.add(Pad(before, after, value), x, stem=x) if any((*before, *after)) else x


_LEAST = 0.9
"""A layer is divided where at most this part of its products is left."""
_MOST_GROUPS = 16
_Support = tuple[int, int, int, int]
"""Rows [first, end) and columns [first, end) of taps."""


def _supports(weights: Array, zero: int) -> list[_Support]:
    """The taps of each filter that are not all zeros."""
    boxes = list[_Support]()
    for used in (weights != zero).any(axis=3):
        rows, columns = np.flatnonzero(used.any(axis=1)), np.flatnonzero(used.any(axis=0))
        places = (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1) if rows.size else (0, 1, 0, 1)
        boxes.append((int(places[0]), int(places[1]), int(places[2]), int(places[3])))
    return boxes


def _without_zero_taps(at: RuleMatch) -> str | None:
    """A layer of each group of filters that have the same taps, and their channels in order again."""
    weights, image, result = at.draft.constants[at[_WEIGHTS]], at.type(_IMAGE).shape, at.type(_PLAIN).shape
    boxes = _supports(weights, at[_PLAIN].weight_zero_point)
    left = sum((bottom - top) * (right - first) for top, bottom, first, right in boxes)
    is_worth_it = left <= _LEAST * len(boxes) * weights.shape[1] * weights.shape[2]
    if image[3] != weights.shape[3] or not is_worth_it or len(set(boxes)) > _MOST_GROUPS:
        return None
    groups = {box: [number for number, each in enumerate(boxes) if each == box] for box in dict.fromkeys(boxes)}
    parts = [_group(at, box, own) for box, own in groups.items()]
    joined = at.add(Concat(3), *parts) if len(parts) > 1 else parts[0]
    places = tuple(int(place) for place in np.argsort([number for own in groups.values() for number in own]))
    if places == tuple(range(len(boxes))):
        return joined
    return at.add(Pick((*(tuple(range(size)) for size in result[:3]), places)), joined)


def _group(at: RuleMatch, box: _Support, own: list[int]) -> str:
    """Some filters of a layer with some of their taps."""
    layer, image, result = at[_PLAIN], at.type(_IMAGE).shape, at.type(_PLAIN).shape
    top, bottom, first, right = box
    start = (0, top * layer.dilation[0], first * layer.dilation[1], 0)
    taps = zip(result[1:3], layer.stride, (bottom - top, right - first), layer.dilation, strict=True)
    rows, columns = ((count - 1) * step + (size - 1) * each + 1 for count, step, size, each in taps)
    stop = (image[0], start[1] + rows, start[2] + columns, image[3])
    x = at[_IMAGE]
    if any(start) or stop != image:
        x = at.add(Slice(start, stop, (1,) * 4), x, stem=x)
    kernel = at.draft.constants[at[_WEIGHTS]][own, top:bottom, first:right]
    weights = at.constant(kernel, at.type(_WEIGHTS).dtype, _WEIGHTS)
    return _finished(at, _PLAIN, at.add(layer, x, weights, *_of_filters(at, at.others(_PLAIN), own)), own)


def _has_constants(at: RuleMatch) -> bool:
    return all(name in at.draft.constants for node in at.members for name in node.inputs[1:])


def _passes() -> Iterator[Callable[[Graph], Graph]]:
    """Rewrites of layers with what follows them first, so that results are put together once they are small."""
    for layer, rule in ((_STRETCHED, _by_phases), (_PLAIN, _without_zero_taps)):
        scaled = apply(Requantize, layer, rest("scales"), alone=True)
        for ends in (apply(Clip, replace(scaled, optional=True)), scaled, layer):
            yield rewriting(Rule(ends, rule, (_has_constants,)))


_PASSES = tuple(_passes())


def without_zeros(graph: Graph) -> Graph:
    """A rewrite, exact: a convolution of an image that was stretched by zeros becomes one of each phase of the stretch,
    and one whose filters have zeros in different taps one of each group of filters. Requantisation and limits go before
    the movement that puts results together."""
    for rewrite in _PASSES:
        graph = rewrite(graph)
    return graph
