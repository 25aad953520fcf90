"""Ready-made requantisations: their arithmetic, networks brought to them, and what they say of others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.arrays import built
from dovetail.compile import Options, compile_graph
from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.onnx_file import check_graph
from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding, fixed_point
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.requantisation.equal import HALVES, LimitedSums, equal_scales
from dovetail.ir.types import DType, TensorType
from dovetail.legalize.ready import (
    COMMON_SHIFT,
    FLOAT32,
    READY,
    SHIFTED,
    SHIFTED_PER_LAYER,
    TFLITE,
    Requantisation,
    normal,
)
from dovetail.program.interpret import sample_inputs
from dovetail.run import run_build
from dovetail.target.layers import requantised
from dovetail.target.pattern import Match, match_pattern
from dovetail.targets import load_target

NAMED = pytest.mark.parametrize("ready", READY, ids=[one.name for one in READY])


def layer(multiplier: list[int], shift: list[int], bias: bool = True, channels: int = 4) -> Graph:
    """A requantised convolution, its parameters repeated over the channels."""
    rng, builder = np.random.default_rng(3), GraphBuilder("net")
    x = builder.input("x", TensorType((1, 5, 4, 6), DType.INT8))
    operands = [x, builder.constant("w", rng.integers(-127, 128, (channels, 3, 3, 6)).astype(np.int8))]
    operands += [builder.constant("b", rng.integers(-3000, 3000, channels).astype(np.int32))] if bias else []
    sums = builder.add(Conv2d(input_zero_point=3), operands, "sums", "CONV_2D 0")
    names = [
        builder.constant(n, np.resize(np.array(v, np.int32), channels)) for n, v in (("m", multiplier), ("s", shift))
    ]
    scaled = builder.add(Requantize(output_zero_point=-5), [sums, *names], "scaled", "CONV_2D 0")
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "y", "CONV_2D 0")])


ANY = layer([1518500250, 1277, 1 << 30, (1 << 31) - 1], [-9, 3, -8, -10])
POWERS = layer([1 << 30], [-8])


def brought(graph: Graph, ready: Requantisation) -> tuple[Graph, Match | None]:
    """The network after the rewrite, and the pattern's match where all limits hold."""
    made = ready.rewrite().apply(graph)
    found = [match_pattern(pattern, made, "y") for pattern in requantised("convolution", Conv2d).values()]
    match = next((one for one in found if isinstance(one, Match)), None)
    assert match is not None
    return made, match if all(limit.failure(match) is None for limit in ready.limits) else None


@NAMED
def test_networks_are_brought_to_it_or_told_why_not(ready: Requantisation) -> None:
    for graph in (ANY, POWERS):
        made, match = brought(graph, ready)
        left = graph is ANY and (ready.bits == 1 or not ready.per_channel)
        assert (match is None) == left and bool(made.left) == left
        again = ready.rewrite().apply(made)
        assert [node.operator for node in again.nodes] == [node.operator for node in made.nodes]
        inputs = sample_inputs(graph, 1)
        gap = evaluate(made, inputs)["y"].astype(int) - evaluate(graph, inputs)["y"]
        assert np.abs(gap).max() <= ready.rewrite().lsb
        check_graph(made, inputs)


def test_what_is_said() -> None:
    assert "the multiplier of channel 0 is no power of two (0.00138107)" in SHIFTED.rewrite().apply(ANY).left["y"]
    uneven = layer([1 << 30], [-8, -9])
    assert "multipliers of channels differ: 0.00097" in SHIFTED_PER_LAYER.rewrite().apply(uneven).left["y"]
    assert SHIFTED.rewrite().apply(uneven).left == {}
    assert TFLITE.rewrite().lsb == 0 and TFLITE.rewrite().apply(ANY).nodes == ANY.nodes


@NAMED
@pytest.mark.parametrize("bias", [True, False])
def test_the_core_computes_the_same(ready: Requantisation, bias: bool) -> None:
    graph = ready.rewrite().apply(layer([1 << 30, 1 << 30, 1 << 30, 1 << 30], [-8], bias) if ready.bits == 1 else ANY)
    target = load_target("riscv")
    compiled = compile_graph(graph, target, Options())
    inputs = sample_inputs(graph, 2)
    with built(compiled, target) as build:
        found = run_build(build, "iss", [inputs]).outputs[0]
    assert np.array_equal(found["y"], evaluate(graph, inputs)["y"])


@settings(max_examples=200, deadline=None)
@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, (1 << 31) - 1), st.integers(-31, -1))
def test_roundings_mean_what_they_say(x: int, multiplier: int, shift: int) -> None:
    down, up = (int(fixed_point(np.array(x), multiplier, shift, one)) for one in (Rounding.DOWN, Rounding.SINGLE))
    assert down == (x * multiplier) >> (31 - shift) and up - down in (0, 1)
    scale = np.float32(multiplier * 2.0 ** (shift - 31))
    wanted = int(np.clip(np.rint(np.float32(x) * scale), -(1 << 20), 1 << 20))
    assert int(fixed_point(np.array(x), multiplier, shift, Rounding.FLOAT32)) == wanted
    raised, places = (int(array[0]) for array in normal(np.array([multiplier]), np.array([shift])))
    assert (1 << 30) <= raised < 1 << 31 and (not multiplier or raised * 2.0**places == multiplier * 2.0**shift)


def test_a_scale_in_float32_is_the_pattern_s_own() -> None:
    made, match = brought(ANY, FLOAT32)
    assert match is not None and made.nodes[1].operator == replace(ANY.nodes[1].operator, rounding=Rounding.FLOAT32)


def test_one_shift_beside_multipliers_of_their_own() -> None:
    """Multipliers of 15 bits are near enough beside one shift; of 6 bits they are not, and it is said how far off."""
    graph = layer([1518500250, 1277123456, 1 << 30, (1 << 31) - 1], [-9, -12, -8, -10])
    _, match = brought(graph, COMMON_SHIFT)
    assert match is not None and match.array("shift").size == 1
    multipliers = match.array("multiplier").astype(np.int64)
    assert ((multipliers >> 16) << 16 == multipliers).all() and (multipliers >> 16).max() >= 1 << 14
    few = replace(COMMON_SHIFT, bits=6)
    left = few.rewrite().apply(graph).left["y"]
    assert "beside one shift for all channels the multiplier of channel" in left and left.endswith(" off")
    assert few.rewrite().apply(POWERS).left == {}


SUMS = st.integers(-(1 << 12), 1 << 12)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1 << 30, (1 << 31) - 1), min_size=1, max_size=3),
    st.integers(-9, -2),
    st.sampled_from([Rounding.DOUBLE, Rounding.SINGLE, Rounding.AWAY]),
    st.sampled_from(list(HALVES)),
    st.integers(3, 18),
    st.booleans(),
    st.tuples(SUMS, SUMS).map(sorted),
    st.integers(-8, 8),
)
def test_equal_multipliers_are_equal_for_every_sum(
    multipliers: list[int],
    shift: int,
    old: Rounding,
    new: Rounding,
    bits: int,
    common: bool,
    ends: list[int],
    zero: int,
) -> None:
    """Against plain integers, over all sums; and where none is said to be there, every multiplier differs somewhere."""
    before = np.array(multipliers, np.int64)
    low, high = (np.full(len(before), end, np.int64) for end in ends)
    wanted = LimitedSums(Requantize(old, 0, zero), Clip(-9, 11, DType.INT8), before, np.array([shift]), low, high)
    sums = np.arange(ends[0], ends[1] + 1)[:, None]
    results = wanted.result(sums)
    found = equal_scales(wanted, new, bits, common)
    if not isinstance(found, int):
        multiplier, places = found
        assert len(places) == (1 if common else len(before)) and multiplier.max() < 1 << 31
        for channel, own in enumerate(np.broadcast_to(places, len(before))):
            scale, right = int(multiplier[channel]) >> (31 - bits), bits - int(own)
            plain = [limited(rounded(int(x) * scale, right, new) + zero) for x in sums[:, 0]]
            assert plain == results[:, channel].tolist()
    elif not common and bits <= 5:
        for right in range(1, bits + 31):
            for scale in range(1 << bits):
                plain = fixed_point(sums[:, 0], scale, 31 - right, new)
                assert (np.clip(plain + zero, -9, 11) != results[:, found]).any()


def limited(value: int) -> int:
    return min(max(value, -9), 11)


def rounded(value: int, right: int, rounding: Rounding) -> int:
    """value / 2**right in unbounded integers."""
    if rounding is Rounding.DOWN:
        return value >> right
    size = (abs(value) + (1 << (right - 1))) >> right
    return (value + (1 << (right - 1))) >> right if rounding is Rounding.SINGLE else size if value >= 0 else -size


def test_exact_means_exact() -> None:
    """Powers of two are brought without a changed result; others are left with a channel and its sums."""
    away = replace(COMMON_SHIFT, name="exact")
    small = away.rewrite(exact=True)
    left = small.apply(ANY).left["y"]
    assert small.lsb == 0 and "no multiplier of 15 bits beside a common shift gives channel" in left
    assert "the same result for every sum from -" in left
    wide = replace(away, bits=31)
    made, inputs = wide.rewrite(exact=True).apply(ANY), sample_inputs(ANY, 4)
    scaled = made.producers()[made.producers()["y"].inputs[0]].operator
    if not made.left:
        assert isinstance(scaled, Requantize) and scaled.rounding is Rounding.AWAY
    assert np.array_equal(evaluate(made, inputs)["y"], evaluate(ANY, inputs)["y"])
