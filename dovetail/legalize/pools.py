"""Average pools in an engine's arithmetic, where it gives every possible sum the pool's own rounding. Exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import frexp, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.crop import part
from dovetail.ir.graph import Graph, Node
from dovetail.ir.operators.arithmetic import Add, Clip, Offset, Requantize, Rounding, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.operators.movement import Pad
from dovetail.ir.operators.reduction import AveragePool2d, SumPool2d
from dovetail.ir.requantisation.engine import RequantisationLimits
from dovetail.ir.rewrite import Draft, run
from dovetail.ir.types import Array, DType, TensorType, full_box
from dovetail.legalize.bands import Spans, cut_chain, layers_ahead, rows_of
from dovetail.legalize.requantisation import Accepts, scaled_layer

_WEIGHTS = (DType.INT2, DType.INT4, DType.INT8)
_CORE_BITS = 20
"""Bits of the scale where the core divides."""
_MOST_TAPS = 4096
"""Of a pool as a depthwise layer: as many as any engine has, and few enough to try every sum."""
_AHEAD = 1
"""Bands the engine is given beyond the one the core waits for."""


def average_pool_as_depthwise(accepts: Accepts, limits: RequantisationLimits) -> Callable[[Graph], Graph]:
    """A rewrite: offset(clip(average pool)) of bytes becomes a depthwise convolution with one weight everywhere, scaled
    and shifted, if the engine takes that and a weight, scale, offset and shift give the same result for every sum.

    Args:
        accepts: whether the engine takes the shape of the pool, as that of a depthwise layer; told of the pool's node.
        limits: of the engine's requantisation.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        found = _pool(draft, node)
        if found is None or draft.types[node.output].dtype is not limits.activations:
            return None
        pool, clip = found
        operator, source = pool.operator, pool.inputs[0]
        assert isinstance(operator, AveragePool2d) and isinstance(node.operator, Offset)
        if draft.types[source].dtype is not limits.activations or any(map(any, operator.padding)):
            return None
        if not accepts(draft.types, pool):
            return None
        chosen = _exact(operator, clip, node.operator.offset, limits, _WEIGHTS)
        if chosen is None:
            return None
        weight, kind, parameters = chosen
        shape = (1, *operator.kernel, draft.types[source].shape[3])
        weights = draft.constant(np.full(shape, weight, kind.numpy), kind, node.output)
        one = prod(draft.types[pool.output].shape[1:3]) == 1
        layer = DepthwiseConv2d((1, 1) if one else operator.stride)
        total = draft.add(layer, [source, weights], pool, f"{pool.output} sum")
        names = [draft.constant(np.array([number], np.int32), DType.INT32, node.output) for number in parameters]
        scaled = draft.add(ScaleShift(), [total, *names], pool, f"{pool.output} scaled")
        return draft.add(Clip(limits.activations.low, limits.activations.high, limits.activations), [scaled], node)

    return lambda graph: run(graph, [rule])


def average_pool_in_bands(
    spans: Callable[[Mapping[str, TensorType], Sequence[Node]], Spans],
) -> Callable[[Graph], Graph]:
    """A rewrite: offset(clip(average pool)) of a whole image that a scale-shifted 1x1 convolution makes becomes sums of
    bands of its rows, added and scaled; the core sums one band while the engine computes the next. The layer in front
    of the convolution is computed in the same bands.

    Args:
        spans: the bands of an image; told the types of values and the nodes that are computed in bands.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        found = _pool(draft, node)
        if found is None or draft.types[node.output].dtype is not DType.UINT8:
            return None
        pool, clip = found
        image = draft.types[pool.inputs[0]]
        chain = _layers_of_rows(draft, pool.inputs[0])
        operator = pool.operator
        assert isinstance(operator, AveragePool2d) and isinstance(node.operator, Offset)
        whole = image.shape[0] == 1 and operator.kernel == image.shape[1:3] and not any(map(any, operator.padding))
        if not whole or not chain or image.dtype is not DType.UINT8 or len(cut := spans(draft.types, chain)) < 2:
            return None
        chosen = _exact(operator, clip, node.operator.offset, RequantisationLimits(_CORE_BITS, 24), (DType.INT2,))
        if chosen is None or chosen[0] != 1:
            return None
        try:
            parts = _parts(draft, chain, cut)
        except ValueError:
            return None
        sums, bands = list[str](), [_added(draft, band) for band in parts[:_AHEAD]]
        for start, stop in cut:
            bands += [_added(draft, band) for band in parts[len(bands) : len(bands) + 1]]
            window = (stop - start, operator.kernel[1])
            # names of their own: no value is the mean, which is what the pool's name stands for
            total = draft.add(SumPool2d(window, window), [bands[len(sums)]], pool, f"{pool.output} rows {start}")
            sums.append(draft.add(Add(), [total, sums[-1]], pool, f"{pool.output} upto {stop}") if sums else total)
        names = [draft.constant(np.array([number], np.int32), DType.INT32, node.output) for number in chosen[2]]
        # it changes nothing, but says that the product with the scale has 32 bits
        limits = Clip(0, 255 * prod(operator.kernel), DType.INT32)
        bounded = draft.add(limits, [sums[-1]], pool, f"{pool.output} sum")
        mean = draft.add(ScaleShift(), [bounded, *names], pool, f"{pool.output} scaled")
        return draft.add(Clip(0, 255, DType.UINT8), [mean], node)

    return lambda graph: run(graph, [rule])


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

    def rewrite(before: Graph) -> Graph:
        graph, users, makers = before, before.users(), {node.output: node for node in before.nodes}
        for node in before.nodes:
            if not _is_of_whole(before, node) or not (chain := _around_pool(node, makers, users, sums)):
                continue
            image = before.types[node.inputs[0]]
            behind = chain[next(place for place, link in enumerate(chain) if isinstance(link.operator, Conv2d)) + 1]
            count = min(counts(image), image.shape[3] // step) if isinstance(behind.operator, scaled) else 1
            if count > 1 and not any(link.output in before.outputs for link in chain[:-1]):
                with suppress(ValueError):
                    graph = cut_chain(
                        graph, chain, 3, rows_of(image.shape[3], count, step), layers_ahead(AveragePool2d, SumPool2d)
                    )
        return graph

    return rewrite


_SCALES = (Requantize, ScaleShift, Clip)


def _is_of_whole(graph: Graph, node: Node) -> bool:
    """Whether a node is the average or sum of a whole image."""
    pool = node.operator
    if not isinstance(pool, AveragePool2d | SumPool2d) or any(map(any, pool.padding)):
        return False
    image = graph.types[node.inputs[0]].shape
    return image[0] == 1 and pool.kernel == image[1:3]


def _around_pool(pool: Node, makers: Mapping[str, Node], users: Mapping[str, Sequence[Node]], sums: bool) -> list[Node]:
    """The nodes from a convolution to the pool behind it and what scales that; none where there is another node, or one
    that others read. Where there may be sums, one of two convolutions too."""

    def upto(value: str, added: bool) -> list[Node]:
        maker = makers.get(value)
        if maker is None or len(users[value]) > 1:
            return []
        if isinstance(maker.operator, Conv2d):
            border = makers.get(maker.inputs[0])
            alone = border is not None and isinstance(border.operator, Pad) and len(users[border.output]) == 1
            return [border, maker] if border is not None and alone else [maker]
        if isinstance(maker.operator, Add) and sums and not added:
            ways = [upto(operand, True) for operand in maker.inputs]
            return [*(node for way in ways for node in way), maker] if all(ways) else []
        if isinstance(maker.operator, (*_SCALES, Offset) if added else _SCALES):
            return [*before, maker] if (before := upto(maker.inputs[0], added)) else []
        return []

    chain = upto(pool.inputs[0], False)
    chain += [pool] if chain else []
    while chain and len(behind := users.get(chain[-1].output, ())) == 1 and isinstance(behind[0].operator, _SCALES):
        chain.append(behind[0])
    return chain


def _layers_of_rows(draft: Draft, image: str) -> list[Node]:
    """The nodes from a layer, its padding included, to an image, where any rows of that can be computed by themselves
    without computing another row: a scale-shifted 1x1 convolution, and the layer in front of it if there is one."""
    chain: list[Node] = []
    for kinds in ((Conv2d,), (Conv2d, DepthwiseConv2d)):
        made = draft.made_by(image, Clip)
        scaled, layer = scaled_layer(draft, made, ScaleShift, *kinds) if made is not None else (None, None)
        if made is None or scaled is None or layer is None or draft.users(made.output) > 1:
            return chain
        if not chain and (layer.operator != Conv2d() or draft.types[layer.inputs[1]].shape[1:3] != (1, 1)):
            return []
        pad = draft.made_by(layer.inputs[0], Pad)
        chain = [*([pad] if pad is not None and draft.users(pad.output) == 1 else []), layer, scaled, made, *chain]
        image = chain[0].inputs[0]
    return chain


def _parts(draft: Draft, chain: Sequence[Node], spans: Spans) -> list[Graph]:
    """What computes each band of the last node's result, from all of what the first one reads; raises ValueError where
    one reads padding alone."""
    names = {*(value for node in chain for value in (node.output, *node.inputs))}
    types = {name: draft.types[name] for name in names}
    constants = {name: draft.constants[name] for name in names if name in draft.constants}
    image, result = chain[0].inputs[0], chain[-1].output
    whole, box = Graph("", (image,), (result,), tuple(chain), types, constants), full_box(types[result].shape)
    return [part(whole, {result: (box[0], span, *box[2:])}, f" rows {span[0]}") for span in spans]


def _added(draft: Draft, band: Graph) -> str:
    """The result of a part, its nodes added to the draft."""
    names: dict[str, str] = {}
    for node in band.nodes:
        names[node.output] = draft.add(node.operator, [names.get(name, name) for name in node.inputs], node)
    return names[band.outputs[0]]


def _pool(draft: Draft, node: Node) -> tuple[Node, Clip | None] | None:
    """The pool behind an offset, and the clip between them; None where there is none or something else reads either."""
    if not isinstance(node.operator, Offset):
        return None
    clip = draft.made_by(node.inputs[0], Clip)
    value = clip.inputs[0] if clip is not None else node.inputs[0]
    pool = draft.made_by(value, AveragePool2d)
    if pool is None or draft.users(value) > 1 or draft.users(node.inputs[0]) > 1:
        return None
    if clip is None:
        return pool, None
    assert isinstance(clip.operator, Clip)
    return pool, clip.operator


Division: TypeAlias = tuple[int, DType, tuple[int, int, int]]
"""A weight, its type, and scale, offset and shift."""


def _exact(
    pool: AveragePool2d, clip: Clip | None, added: int, limits: RequantisationLimits, kinds: Sequence[DType]
) -> Division | None:
    """What gives every sum of bytes the pool's mean, clipped and offset."""
    taps = prod(pool.kernel)
    wanted = _means(taps, pool.input_zero_point)
    return division(np.clip(wanted, clip.low, clip.high) + added if clip else wanted + added, taps, limits, kinds)


def _means(taps: int, zero_point: int) -> NDArray[np.int64]:
    """What an average pool of so many bytes gives for each sum of theirs, from 0 on: rounded half away from zero."""
    totals = np.arange(255 * taps + 1, dtype=np.int64) - taps * zero_point
    means: NDArray[np.int64] = np.sign(totals) * ((np.abs(totals) + taps // 2) // taps)
    return means


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
    """What makes (product + offset) >> shift what is wanted for each product, or beyond where that is one of the ends:
    the middle of what does; None where nothing does within 32 bits."""
    least = ((wanted << shift) - products)[wanted > ends[0]]
    most = (((wanted + 1) << shift) - 1 - products)[wanted < ends[1]]
    low, high = int(least.max(initial=-(1 << 31))), int(most.min(initial=(1 << 31) - 1))
    offset = (low + high) // 2
    return offset if low <= high and int(products[-1]) + abs(offset) < 1 << 31 else None


def pools_in_words(graph: Graph) -> Graph:
    """The graph with sums of images in forms the core is quick at. An image of int8 limited to what is not negative is
    uint8 where only the sum reads it: the same bytes, but taken several at a time as they are. And what such a sum is
    scaled by, once for all channels, has 32 bits where that gives the same for every sum there can be."""

    def without_sign(draft: Draft, node: Node) -> str | None:
        operator, clip = node.operator, draft.made_by(node.inputs[0], Clip) if node.inputs else None
        if not isinstance(operator, SumPool2d) or clip is None or draft.users(clip.output) > 1:
            return None
        assert isinstance(clip.operator, Clip)
        if draft.types[clip.output].dtype is not DType.INT8 or clip.operator.low < 0:
            return None
        return draft.add(operator, [draft.add(replace(clip.operator, dtype=DType.UINT8), clip.inputs, clip)], node)

    def in_32_bits(draft: Draft, node: Node) -> str | None:
        scaled = draft.made_by(node.inputs[0], Requantize) if isinstance(node.operator, Clip) else None
        pool = draft.made_by(scaled.inputs[0], SumPool2d) if scaled is not None else None
        if scaled is None or pool is None or max(draft.users(scaled.output), draft.users(pool.output)) > 1:
            return None
        numbers = [draft.constants.get(name, np.empty(0)) for name in scaled.inputs[1:]]
        assert isinstance(node.operator, Clip) and isinstance(pool.operator, SumPool2d)
        taps = prod(pool.operator.kernel)
        is_bytes = draft.types[pool.inputs[0]].dtype is DType.UINT8 and not pool.operator.input_zero_point
        if not is_bytes or taps > _MOST_TAPS or any(array.size != 1 for array in numbers) or numbers[0].item() <= 0:
            return None
        every = np.arange(255 * taps + 1, dtype=np.int32)
        wanted = node.operator.evaluate([scaled.operator.evaluate([every, *numbers])]).astype(np.int64)
        ends, limits = (int(wanted.min()), int(wanted.max())), RequantisationLimits(_CORE_BITS, 24)
        chosen = division(wanted, 1 / _factor(*numbers), limits, (DType.INT2,), ends)
        if chosen is None or chosen[0] != 1:
            return None
        names = [draft.constant(np.array([number], np.int32), DType.INT32, node.output) for number in chosen[2]]
        bounded = draft.add(
            Clip(0, 255 * taps, DType.INT32), [pool.output], pool, f"{pool.output} sum"
        )  # the product keeps within 32 bits
        mean = draft.add(ScaleShift(), [bounded, *names], scaled, f"{scaled.output} in 32 bits")
        return draft.add(Clip(*ends, node.operator.dtype), [mean], node)

    return run(run(graph, [without_sign]), [in_32_bits])


def _factor(multiplier: Array, shift: Array) -> float:
    """What a requantisation multiplies by."""
    return float(multiplier.item() * 2.0 ** (shift.item() - 31))


def pools_as_depthwise(accepts: Accepts, rounding: Rounding) -> Callable[[Graph], Graph]:
    """A rewrite: average pools of bytes without padding become depthwise convolutions with one weight everywhere and a
    requantisation, where that gives every possible sum the pool's own rounding.

    Args:
        accepts: whether the engine takes the shape of the pool, as that of a depthwise layer; told of such a node.
        rounding: of the engine's requantisation.
    """

    def rule(draft: Draft, node: Node) -> str | None:
        operator, kind = node.operator, draft.types[node.inputs[0]] if node.inputs else None
        if not isinstance(operator, AveragePool2d) or any(map(any, operator.padding)) or kind is None:
            return None
        if kind.dtype is not DType.INT8 or (chosen := _requantised(operator, kind.dtype, rounding)) is None:
            return None
        weight, multiplier, shift = chosen
        shape = (1, *operator.kernel, kind.shape[3])
        weights = draft.constant(np.full(shape, weight, np.int8), DType.INT8, node.output)
        one = prod(draft.types[node.output].shape[1:3]) == 1
        layer = DepthwiseConv2d((1, 1) if one else operator.stride, input_zero_point=operator.input_zero_point)
        if not accepts(draft.types, replace(node, operator=layer, inputs=(node.inputs[0], weights))):
            return None
        total = draft.add(layer, [node.inputs[0], weights], node)
        numbers = [draft.constant(np.array([n], np.int32), DType.INT32, node.output) for n in (multiplier, shift)]
        return draft.add(Requantize(rounding), [total, *numbers], node)

    return lambda graph: run(graph, [rule])


def _requantised(pool: AveragePool2d, kind: DType, rounding: Rounding) -> tuple[int, int, int] | None:
    """A weight, a multiplier and a shift that give every sum the pool's mean; None where there are none. The larger the
    weight, the less the first of two roundings does."""
    if prod(pool.kernel) > _MOST_TAPS:
        return None
    sums, means = _centred_means(pool, kind)
    for weight in (64, 127, 1):
        fraction, shift = frexp(1 / (weight * prod(pool.kernel)))
        numbers = (round(fraction * (1 << 31)), shift)
        given = [(sums * weight).astype(np.int32), *(np.array([number], np.int32) for number in numbers)]
        if np.abs(sums).max() * weight < 1 << 31 and np.array_equal(Requantize(rounding).evaluate(given), means):
            return weight, *numbers
    return None


def _centred_means(pool: AveragePool2d, kind: DType) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every sum of centred elements there is, and the pool's mean of each: rounded half away from zero."""
    taps = prod(pool.kernel)
    sums = np.arange(taps * (kind.low - pool.input_zero_point), taps * (kind.high - pool.input_zero_point) + 1)
    return sums, np.sign(sums) * ((np.abs(sums) + taps // 2) // taps)
