"""Average pools in an engine's arithmetic, where it gives every possible sum the pool's own rounding. Exact.

A mean of bytes comes as an average pool, or as a sum that is requantised: the rules see both as one, a table of results
by the sum of a window (`_Mean`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import frexp, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.crop import part
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import AveragePool2d, ReduceKind, SummingPool2d, SumPool2d
from dovetail.ir.pattern import Apply, Pattern, apply, either, maybe, occurrence, operand, rest, some
from dovetail.ir.requantisation.engine import RequantisationLimits
from dovetail.ir.rules import Rule, RuleMatch, rewriting, run
from dovetail.ir.types import DType, TensorType, full_box
from dovetail.legalize.bands import cut_chain, layer, layers_ahead
from dovetail.legalize.requantisation import PARAMETERS, WEIGHTS, Accepts, accepted, scale_shifted
from dovetail.legalize.spans import Spans, rows_of
from dovetail.records import Record

_WEIGHTS = (DType.INT2, DType.INT4, DType.INT8)
_CORE = RequantisationLimits(20, 24)
"""The scale and shift with which the core divides."""
_MOST_TAPS = 4096
"""The most taps of a pool as a depthwise layer: as many as any engine has, and few enough to try every sum."""
_AHEAD = 1
"""Bands the engine is given beyond the one the core waits for."""

Division: TypeAlias = tuple[int, DType, tuple[int, int, int]]
"""A weight, its type, and scale, offset and shift."""


def division(
    wanted: NDArray[np.int64],
    taps: float,
    limits: RequantisationLimits,
    kinds: Sequence[DType] = _WEIGHTS,
    ends: tuple[int, int] = (0, 255),
) -> Division | None:
    """A weight of the first of some types, scale, offset and shift with which (sum * weight * scale + offset) >> shift,
    clipped to `ends`, is `wanted[sum]` for every sum, about sum / taps; None where there are none."""
    sums = np.arange(len(wanted), dtype=np.int64)
    for kind in kinds:
        for weight in range(1, kind.high + 1):
            for shift in range(min(limits.most_shift, 24) + 1):
                nearest = (1 << shift) / (taps * weight)
                for scale in {int(nearest), int(nearest) + 1}:
                    if 0 < scale < 1 << limits.scale_bits:
                        offset = _offset(sums * (weight * scale), wanted, shift, ends)
                        if offset is not None:
                            return weight, kind, (scale, offset, shift)
    return None


def _offset(products: NDArray[np.int64], wanted: NDArray[np.int64], shift: int, ends: tuple[int, int]) -> int | None:
    """A rounding offset with which every product shifts to the wanted value, or beyond a value at an end: the middle of
    all there are; None where there is none within 32 bits."""
    least = ((wanted << shift) - products)[wanted > ends[0]]
    most = (((wanted + 1) << shift) - 1 - products)[wanted < ends[1]]
    low, high = int(least.max(initial=-(1 << 31))), int(most.min(initial=(1 << 31) - 1))
    offset = (low + high) // 2
    return offset if low <= high and int(products[-1]) + abs(offset) < 1 << 31 else None


X = operand("x")


def _unpadded(pool: SummingPool2d) -> bool:
    return not any(map(any, pool.padding))


class _Mean(Record):
    """The mean of bytes, as the patterns of a pool, of what limits or requantises it, and of the whole."""

    pool: Apply[SummingPool2d]
    behind: Apply[Any]
    whole: Apply[Any]

    def results(self, at: RuleMatch) -> NDArray[np.int64] | None:
        """The mean for each sum of a window's bytes, from 0 on; None where parameters are not one for all channels."""
        taps = prod(at[self.pool].kernel)
        values = at[self.pool].of_sums(np.arange(255 * taps + 1), taps)
        for node in (*reversed(at.runs[self.behind]), at.root):
            parameters = [at.draft.constants.get(name, np.empty(0)) for name in node.inputs[1:]]
            if any(array.size != 1 for array in parameters):
                return None
            values = node.operator.evaluate([values, *parameters])
        return values.astype(np.int64)

    def divided(self, at: RuleMatch, limits: RequantisationLimits, kinds: Sequence[DType]) -> Division | None:
        """A weight, and scale, offset and shift, that give every sum of bytes its mean; None where there are none."""
        wanted, taps = (
            self.results(at),
            float(prod(at[self.pool].kernel)) if at[self.pool].kind is ReduceKind.MEAN else 1.0,
        )
        for node in at.runs[self.behind]:
            slope = node.operator.slope_of([at.draft.constants.get(name) for name in node.inputs])
            taps /= 1.0 if slope is None else slope or np.inf
        return None if wanted is None or taps <= 0 else division(wanted, taps, limits, kinds)


def _mean(image: Pattern) -> _Mean:
    pool = apply((AveragePool2d, SumPool2d), image, alone=True, having=_unpadded)
    behind = some((Requantize, Clip), pool, alone=True)
    return _Mean(pool, behind, apply((Offset, Clip), behind))


_MEAN = _mean(X)


def average_pool_as_depthwise(accepts: Accepts, limits: RequantisationLimits) -> Callable[[Graph], Graph]:
    """A rewrite: the mean of bytes becomes a depthwise convolution with one weight everywhere, scaled and shifted, if
    the engine takes that and a weight, scale, offset and shift give the same result for every sum.

    Args:
        accepts: whether the engine takes the shape of the pool, as that of a depthwise layer; told of the pool's node.
        limits: of the engine's requantisation.
    """
    kind = limits.activations

    def as_depthwise(at: RuleMatch) -> str | None:
        pool, chosen = at[_MEAN.pool], _MEAN.divided(at, limits, _WEIGHTS)
        if chosen is None:
            return None
        weight, held, parameters = chosen
        weights = at.constant(np.full((1, *pool.kernel, at.type(X).shape[3]), weight, held.numpy), held)
        name = at.value(_MEAN.pool)
        total = at.add(DepthwiseConv2d(_stride(at, _MEAN.pool)), X, weights, like=_MEAN.pool, stem=f"{name} sum")
        mean = scale_shifted(at, total, parameters, _MEAN.pool, stem=f"{name} scaled")
        return at.add(Clip(kind.low, kind.high, kind), mean)

    def is_of_bytes(at: RuleMatch) -> bool:
        return at.type(X).dtype is at.type(at.root.output).dtype is kind

    return rewriting(Rule(_MEAN.whole, as_depthwise, (is_of_bytes, accepted(accepts, _MEAN.pool))))


def _stride(at: RuleMatch, pool: Apply[SummingPool2d]) -> tuple[int, int]:
    """The stride of a pool as a layer: 1 where the window is the whole image."""
    return (1, 1) if at[pool].kernel == at.type(X).shape[1:3] else at[pool].stride


_FRONT = layer(maybe(Pad, operand("image"), alone=True), alone=True)
_POINT = apply(Conv2d(), maybe(Pad, either(_FRONT, operand("image")), alone=True), WEIGHTS, alone=True)
_ROWS = apply(Clip, apply(ScaleShift, _POINT, PARAMETERS, alone=True), alone=True)
"""An image any rows of which can be computed by themselves without computing another row: a scale-shifted 1x1
convolution, and the layer in front of it if there is one."""
_MEAN_OF_ROWS = _mean(_ROWS)


def average_pool_in_bands(
    spans: Callable[[Mapping[str, TensorType], Sequence[Node]], Spans],
) -> Callable[[Graph], Graph]:
    """A rewrite: the mean of a whole image of bytes that a scale-shifted 1x1 convolution makes becomes sums of bands of
    its rows, added and scaled; the core sums one band while the engine computes the next. The layer in front of the
    convolution is computed in the same bands.

    Args:
        spans: the bands of an image; told the types of values and the nodes that are computed in bands.
    """

    def is_whole(at: RuleMatch) -> bool:
        image, pool = at.type(_ROWS), at[_MEAN_OF_ROWS.pool]
        of_bytes = image.dtype is at.type(at.root.output).dtype is DType.UINT8
        point = at.type(WEIGHTS).shape[1:3] == (1, 1)
        return of_bytes and point and image.shape[0] == 1 and pool.kernel == image.shape[1:3]

    def in_bands(at: RuleMatch) -> str | None:
        chain = at.members[: at.members.index(at.node(_ROWS)) + 1]
        like = _MEAN_OF_ROWS.pool
        pool, name = at[like], at.value(like)
        cut = spans(at.draft.types, chain)
        chosen = _MEAN_OF_ROWS.divided(at, _CORE, (DType.INT2,)) if len(cut) > 1 else None
        if chosen is None or chosen[0] != 1:
            return None
        try:
            parts = _parts(at, chain, cut)
        except ValueError:
            return None
        sums, bands = list[str](), [_added(at, band) for band in parts[:_AHEAD]]
        for start, stop in cut:
            bands += [_added(at, band) for band in parts[len(bands) : len(bands) + 1]]
            window = (stop - start, pool.kernel[1])
            # names of their own: no value is the mean, which is what the pool's name stands for
            total = at.add(SumPool2d(window, window), bands[len(sums)], like=like, stem=f"{name} rows {start}")
            sums.append(at.add(Add(), total, sums[-1], like=like, stem=f"{name} upto {stop}") if sums else total)
        return at.add(Clip(0, 255, DType.UINT8), _divided(at, sums[-1], like, chosen[2], like, f"{name} scaled"))

    return rewriting(Rule(_MEAN_OF_ROWS.whole, in_bands, (is_whole,)))


def _divided(
    at: RuleMatch, total: str, pool: Apply[Any], parameters: tuple[int, int, int], like: Apply[Any], stem: str
) -> str:
    """A sum of bytes scaled on the core. The limits change nothing, but say that the product has 32 bits."""
    limits = Clip(0, 255 * prod(at[pool].kernel), DType.INT32)
    return scale_shifted(
        at, at.add(limits, total, like=pool, stem=f"{at.value(pool)} sum"), parameters, like, stem=stem
    )


def _parts(at: RuleMatch, chain: Sequence[Node], spans: Spans) -> list[Graph]:
    """A graph for each band of the last node's result, from all of what the first one reads; raises ValueError where
    one reads padding alone."""
    names = {*(value for node in chain for value in (node.output, *node.inputs))}
    types = {name: at.draft.types[name] for name in names}
    constants = {name: at.draft.constants[name] for name in names if name in at.draft.constants}
    image, result = chain[0].inputs[0], chain[-1].output
    whole, box = Graph("", (image,), (result,), tuple(chain), types, constants), full_box(types[result].shape)
    return [part(whole, {result: (box[0], span, *box[2:])}, f" rows {span[0]}") for span in spans]


def _added(at: RuleMatch, band: Graph) -> str:
    """The result of a part, its nodes added to the draft."""
    names: dict[str, str] = {}
    for node in band.nodes:
        names[node.output] = at.add(node.operator, *(names.get(name, name) for name in node.inputs), like=node)
    return names[band.outputs[0]]


_SCALES = (Requantize, ScaleShift, Clip)
_SCALE = apply(_SCALES)


def _convolved(source: str, kinds: tuple[type[Operator], ...]) -> tuple[Pattern, Apply[Conv2d]]:
    """A convolution's image with operators of some kinds behind it, and the convolution; nothing else reads a part."""
    sums = apply(Conv2d, maybe(Pad, operand(source), alone=True), rest("others"), alone=True)
    return some(kinds, sums, alone=True), sums


_IMAGE, _OF_IMAGE = _convolved("x", _SCALES)
(_LEFT, _OF_LEFT), (_RIGHT, _) = _convolved("left", (*_SCALES, Offset)), _convolved("right", (*_SCALES, Offset))
_TOTAL = some(_SCALES, apply(Add, _LEFT, _RIGHT, alone=True), alone=True)


def average_pool_in_channels(
    counts: Callable[[TensorType], int],
    step: int,
    scaled: tuple[type[Operator], ...] = (Requantize, ScaleShift),
    sums: bool = False,
) -> Callable[[Graph], Graph]:
    """A rewrite: a convolution, the average or sum of its whole image, and what scales and clips both, are computed for
    some channels at a time; the core sums some while the engine computes the next.

    Args:
        counts: in how many parts, for an image.
        step: parts have a multiple of so many channels, but for the last.
        scaled: what the convolution's sums are scaled by, where an engine computes it.
        sums: whether two convolutions' images may be added before the pool, as an engine does that too.
    """
    pool = apply((AveragePool2d, SumPool2d), either(_IMAGE, _TOTAL) if sums else _IMAGE, having=_unpadded)
    by_engine = apply(scaled)

    def rewrite(before: Graph) -> Graph:
        graph = before
        for node in before.nodes:
            place = occurrence(pool, before, node)
            image = before.types[node.inputs[0]] if place else before.types[node.output]
            if place is None or image.shape[0] != 1 or place[pool].kernel != image.shape[1:3]:
                continue
            chain = [*place.members, *_behind(before, node)]
            layer = place.node(_OF_IMAGE if place.has(_OF_IMAGE) else _OF_LEFT)
            (behind,) = before.users()[layer.output]
            count = min(counts(image), image.shape[3] // step) if by_engine.fits(behind) else 1
            if count > 1 and not any(link.output in before.outputs for link in chain[:-1]):
                with suppress(ValueError):
                    spans = rows_of(image.shape[3], count, step)
                    graph = cut_chain(graph, chain, 3, spans, layers_ahead(pool))
        return graph

    return rewrite


def _behind(graph: Graph, node: Node) -> list[Node]:
    """The nodes that scale and limit a result one behind the other, of which nothing else reads the operand."""
    chain: list[Node] = []
    while len(users := graph.users()[node.output]) == 1 and _SCALE.fits(users[0]):
        chain += users
        node = users[0]
    return chain


_POSITIVE = apply(Clip, X, alone=True, having=lambda clip: clip.dtype is DType.INT8 and clip.low >= 0)
_SUM_OF_POSITIVE = apply(SumPool2d, _POSITIVE)


def pools_in_words(graph: Graph) -> Graph:
    """The graph with sums of images in forms the core is quick at. An image of int8 limited to what is not negative is
    uint8 where only the sum reads it: the same bytes, but taken several at a time as they are. And what such a sum is
    scaled by, once for all channels, has 32 bits where that gives the same for every sum there can be."""

    def without_sign(at: RuleMatch) -> str:
        image = at.add(replace(at[_POSITIVE], dtype=DType.UINT8), X, like=_POSITIVE)
        return at.add(at[_SUM_OF_POSITIVE], image)

    return run(run(graph, [Rule(_SUM_OF_POSITIVE, without_sign)]), [Rule(_WORDS, _in_32_bits, (_is_sum_of_bytes,))])


_SUM = apply(SumPool2d, X, alone=True)
_SCALED = apply(Requantize, _SUM, PARAMETERS, alone=True)
_WORDS = apply(Clip, _SCALED)


def _is_sum_of_bytes(at: RuleMatch) -> bool:
    pool, sizes = at[_SUM], [at.draft.constants.get(name, np.empty(0)).size for name in at.others(_SCALED)]
    is_bytes = at.type(X).dtype is DType.UINT8 and not pool.input_zero_point
    return is_bytes and prod(pool.kernel) <= _MOST_TAPS and sizes == [1, 1] and _slope(at) > 0


def _slope(at: RuleMatch) -> float:
    return at[_SCALED].slope_of([None, *(at.array(name) for name in at.others(_SCALED))]) or 0.0


def _in_32_bits(at: RuleMatch) -> str | None:
    every = np.arange(255 * prod(at[_SUM].kernel) + 1, dtype=np.int32)
    scaled = at[_SCALED].evaluate([every, *(at.array(name) for name in at.others(_SCALED))])
    wanted = at[_WORDS].evaluate([scaled]).astype(np.int64)
    ends = (int(wanted.min()), int(wanted.max()))
    chosen = division(wanted, 1 / _slope(at), _CORE, (DType.INT2,), ends)
    if chosen is None or chosen[0] != 1:
        return None
    mean = _divided(at, at.value(_SUM), _SUM, chosen[2], _SCALED, f"{at.value(_SCALED)} in 32 bits")
    return at.add(Clip(*ends, at[_WORDS].dtype), mean)


_BYTES = apply(AveragePool2d, X, having=_unpadded)
_TOTALS = apply(SumPool2d, X, alone=True, having=_unpadded)
_REQUANTISED = apply(Requantize, _TOTALS, PARAMETERS)


def pools_as_depthwise(accepts: Accepts, rounding: Rounding) -> Callable[[Graph], Graph]:
    """A rewrite: average pools of bytes without padding become depthwise convolutions with one weight everywhere and a
    requantisation, where that gives every possible sum the pool's own rounding; and so do sums that are requantised as
    the engine does.

    Args:
        accepts: whether the engine takes the shape of the pool, as that of a depthwise layer; told of such a node.
        rounding: of the engine's requantisation.
    """

    def as_layer(at: RuleMatch, pool: Apply[Any], weight: int) -> str | None:
        """The sums of a pool by a layer with this weight."""
        operator, node = at[pool], at.node(pool)
        shape = (1, *operator.kernel, at.type(X).shape[3])
        weights = at.constant(np.full(shape, weight, np.int8), DType.INT8, node.output)
        layer = DepthwiseConv2d(_stride(at, pool), input_zero_point=operator.input_zero_point)
        takes = accepts(at.draft.types, replace(node, operator=layer, inputs=(at[X], weights)))
        return at.add(layer, X, weights, like=pool) if takes else None

    def mean(at: RuleMatch) -> str | None:
        chosen = _requantised(at[_BYTES], rounding)
        total = as_layer(at, _BYTES, chosen[0]) if chosen else None
        if chosen is None or total is None:
            return None
        numbers = [at.constant(np.array([number], np.int32), DType.INT32) for number in chosen[1:]]
        return at.add(Requantize(rounding), total, *numbers)

    def scaled_sum(at: RuleMatch) -> str | None:
        total = as_layer(at, _TOTALS, 1)
        return at.add(at[_REQUANTISED], total, *at.others(_REQUANTISED)) if total else None

    def is_bytes(at: RuleMatch) -> bool:
        return at.type(X).dtype is DType.INT8

    def rounds_so(at: RuleMatch) -> bool:
        scaling = at[_REQUANTISED]
        plain = not scaling.input_zero_point and not scaling.left_shift and prod(at[_TOTALS].kernel) <= _MOST_TAPS
        return plain and scaling.rounding is rounding and at.knows(_REQUANTISED)

    return rewriting(Rule(_BYTES, mean, (is_bytes,)), Rule(_REQUANTISED, scaled_sum, (is_bytes, rounds_so)))


def _requantised(pool: AveragePool2d, rounding: Rounding) -> tuple[int, int, int] | None:
    """A weight, a multiplier and a shift that give every sum of int8 the pool's mean; None where there are none. The
    larger the weight, the less the first of two roundings does."""
    taps, kind = prod(pool.kernel), DType.INT8
    if taps > _MOST_TAPS:
        return None
    totals = np.arange(taps * kind.low, taps * kind.high + 1)
    sums, means = totals - taps * pool.input_zero_point, pool.of_sums(totals, taps)
    for weight in (64, 127, 1):
        fraction, shift = frexp(1 / (weight * taps))
        numbers = (round(fraction * (1 << 31)), shift)
        scaled = [(sums * weight).astype(np.int32), *(np.array([number], np.int32) for number in numbers)]
        if np.abs(sums).max() * weight < 1 << 31 and np.array_equal(Requantize(rounding).evaluate(scaled), means):
            return weight, *numbers
    return None
