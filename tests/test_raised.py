"""Sums that end in one product and one shift: the same integers as two roundings, for every sum there can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dovetail.errors import DovetailError
from dovetail.guests.tune.measure import measured
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.requantisation.raised import RaisedSum
from dovetail.ir.types import Array, DType, TensorType
from dovetail.kernels.helpers import HELPERS
from dovetail.kernels.scope import split
from dovetail.kernels.sums import SumConstants, products_of, raised_end, sums_of
from dovetail.targets.cortex_m import M4
from firmware import require_chip

DEPTH = 2
MULTIPLIERS = st.one_of(
    st.sampled_from([0, 1 << 30, (1 << 30) + 1, (1 << 31) - 1]), st.integers(1 << 30, (1 << 31) - 1)
)


def layer(
    weights: Array,
    bias: Array,
    multiplier: list[int],
    shift: list[int],
    requantize: Requantize,
    limits: tuple[int, int] = (-128, 127),
) -> Graph:
    """A convolution of one tap and two input channels, requantised and limited."""
    builder = GraphBuilder("layer")
    x = builder.input("x", TensorType((1, 1, 1, DEPTH), DType.INT8))
    kernel = builder.constant("w", weights.astype(np.int8).reshape(-1, 1, 1, DEPTH))
    sums = builder.add(Conv2d((1, 1)), [x, kernel, builder.constant("b", bias.astype(np.int32))])
    scale = [builder.constant(n, np.array(v, np.int32)) for n, v in (("m", multiplier), ("s", shift))]
    scaled = builder.add(requantize, [sums, *scale])
    return builder.finish([builder.add(Clip(*limits, DType.INT8), [scaled])])


def raised(graph: Graph) -> tuple[SumConstants, RaisedSum | None]:
    """The sums of a layer and how they are raised."""
    region = split(graph)
    sums = sums_of(region, products_of(region))
    return sums, raised_end(region, sums)


def differing(graph: Graph, sums: SumConstants, found: RaisedSum) -> int:
    """Sums, of all there can be, whose elements are others than the graph's operators give; nothing may leave its type
    on the way."""
    region, count = split(graph), 0
    requantize, clip = (node.operator for node in region.tree)
    assert isinstance(clip, Clip)
    scale = [graph.constants[name] for name in region.tree[0].inputs[1:]]
    for channel, weights in enumerate(sums.weights.reshape(len(sums.weights), -1).astype(np.int64)):
        power, multiplier, offset = (
            int(array[channel % len(array)]) for array in (found.powers, found.multiplier, found.offset)
        )
        assert (weights << power).min() >= -(1 << 15) and (weights << power).max() < 1 << 15
        reach = abs(int(sums.inside[channel])) + 128 * int(abs(weights).sum())
        assert reach << power < 1 << 31
        values = np.arange(*ends_of(weights), dtype=np.int64) + sums.inside[channel]
        made = ((values << power) * multiplier >> 32) + offset
        assert abs(made).max() < 1 << 31 and abs(made >> found.shift).max() <= found.reach
        own = [array[[channel % len(array)]] for array in scale]
        wanted = clip.evaluate([requantize.evaluate([values.astype(np.int32)[:, None], *own])])[:, 0]
        count += int((np.clip(made >> found.shift, clip.low, clip.high) != wanted).sum())
    return count


def ends_of(weights: Array) -> tuple[int, int]:
    """The least sum of products with int8, and one more than the largest."""
    ends = np.stack([weights * -128, weights * 127])
    return int(ends.min(axis=0).sum()), int(ends.max(axis=0).sum()) + 1


@st.composite
def layers(draw: st.DrawFn) -> Graph:
    """Layers of which a third can be raised."""
    outputs = draw(st.integers(1, 3))
    weights = np.array(draw(st.lists(st.integers(-128, 127), min_size=outputs * DEPTH, max_size=outputs * DEPTH)))
    bias = np.array(draw(st.lists(st.integers(-(1 << 15), 1 << 15), min_size=outputs, max_size=outputs)))
    size = draw(st.sampled_from([1, outputs]))
    least = draw(st.integers(1, 12))
    shift = draw(st.lists(st.integers(-least - 7, -least), min_size=size, max_size=size))
    multiplier = draw(st.lists(MULTIPLIERS, min_size=size, max_size=size))
    zero_point = draw(st.sampled_from([-128, -128, 0, 5, 127]))
    rounding = draw(st.sampled_from([Rounding.DOUBLE, Rounding.SINGLE]))
    low = zero_point if rounding is Rounding.DOUBLE else draw(st.integers(-128, 0))
    limits = (low, draw(st.integers(low, 127)))
    return layer(weights, bias, multiplier, shift, Requantize(rounding, 0, zero_point), limits)


@given(layers())
@examples(max_examples=200, deadline=None)
def test_every_sum_ends_as_the_operators_say(graph: Graph) -> None:
    """Where sums are raised: with both roundings, channels that are still, numbers for each channel and for all."""
    sums, found = raised(graph)
    event("raised" if found else "not raised")
    assert found is None or differing(graph, sums, found) == 0


WEIGHTS, BIAS = np.array([[127, 90], [-128, 31], [0, 3]]), np.array([900, -70, 0])
DOUBLE = Requantize(Rounding.DOUBLE, 0, -128)


def test_usual_layers_are_raised() -> None:
    """Shifts up to six apart; of a channel whose results are all alike the shift does not count."""
    for shift, total in (([-8, -8, -8], 9), ([-12, -6, -9], 13), ([-9, -8, -28], 12)):
        graph = layer(WEIGHTS, BIAS, [1 << 30, 1900000001, 1700000000], shift, DOUBLE)
        sums, found = raised(graph)
        assert found is not None and found.shift == total
        assert differing(graph, sums, found) == 0


@pytest.mark.parametrize(
    ("shift", "requantize", "multiplier"),
    [
        ([-13, -6, -9], DOUBLE, 1 << 30),
        ([-8, -8, 0], DOUBLE, 1 << 30),
        ([-8, -8, -8], DOUBLE, 1 << 29),
        ([-8, -8, -8], Requantize(Rounding.DOUBLE, 0, -127), 1 << 30),
        ([-8, -8, -8], Requantize(Rounding.DOUBLE, 3, -128), 1 << 30),
        ([-8, -8, -8], Requantize(Rounding.DOUBLE, 0, -128, 2), 1 << 30),
        ([-8, -8, -8], Requantize(Rounding.DOWN, 0, -128), 1 << 30),
    ],
    ids=["apart", "no shift", "fewer bits", "below the zero point", "centred", "left", "other rounding"],
)
def test_others_are_not(shift: list[int], requantize: Requantize, multiplier: int) -> None:
    """What has no such end is left as it is."""
    weights = np.array([[127, 90], [-128, 31], [44, 3]])
    assert raised(layer(weights, BIAS, [multiplier] * 3, shift, requantize))[1] is None


def test_a_forgotten_rounding_is_found() -> None:
    """An offset without what the first rounding adds is another function, as is a shift of one more."""
    graph = layer(WEIGHTS, BIAS, [1900000001, 1800000000, 1700000000], [-5, -6, -7], DOUBLE)
    sums, found = raised(graph)
    assert found is not None and differing(graph, sums, found) == 0
    less = replace(found, offset=(found.offset - (1 << found.powers >> 2)).astype(np.int32))
    assert differing(graph, sums, less) > 0
    assert differing(graph, sums, replace(found, shift=found.shift + 1)) > 0


@pytest.mark.parametrize("wrong", ["", "smmlar %0", "smmul %0, %1, %2 @"], ids=["right", "rounded", "nothing added"])
def test_assembly_in_iss(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 30,000 elements in firmware: results of networks do not show a product that is rounded, which sets few
    elements of a layer off by one."""
    require_chip()
    draw = np.random.default_rng(3)
    builder = GraphBuilder("layer")
    x = builder.input("x", TensorType((1, 64, 64, 4), DType.INT8))
    kernel = builder.constant("w", draw.integers(-128, 128, (8, 1, 1, 4)).astype(np.int8))
    bias = builder.constant("b", draw.integers(9000, 15000, 8).astype(np.int32))
    scale = [(1 << 30, 1 << 31, 8), (-8, -5, 8)]
    constants = [builder.constant(n, draw.integers(*v).astype(np.int32)) for n, v in zip("ms", scale, strict=True)]
    sums = builder.add(Conv2d((1, 1)), [x, kernel, bias])
    graph = builder.finish([builder.add(Clip(-128, 127, DType.INT8), [builder.add(DOUBLE, [sums, *constants])])])
    assert raised(graph)[1] is not None
    if not wrong:
        measured(graph, M4, None, {})
        return
    text = HELPERS["multiply_add_upper"].replace("smmla %0", wrong)
    assert isinstance(HELPERS, dict) and text != HELPERS["multiply_add_upper"]
    monkeypatch.setitem(HELPERS, "multiply_add_upper", text)
    with pytest.raises(DovetailError, match="differ"):
        measured(graph, M4, None, {})
