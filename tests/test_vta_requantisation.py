"""Requantisation without a product: factors in the weights, and scales of few digits."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.graph import Graph, GraphBuilder, evaluate
from dovetail.ir.operators.arithmetic import Clip, Requantize, ScaleShift, digit_scales, scale_digits
from dovetail.ir.operators.linear import FullyConnected
from dovetail.ir.requantisation.engine import folded, scale_of_digits
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import engine_requantisation
from dovetail.targets.vta import requantisation_limits, takes
from dovetail.targets.vta.config import PRESETS, VtaConfig

LIMITS = requantisation_limits(VtaConfig())
FACTORS = st.floats(1e-6, 0.9)


@settings(max_examples=100, deadline=None)
@given(st.lists(FACTORS, min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 1 << 16))
def test_weights_hold_a_factor(factors: list[float], taps: int, seed: int) -> None:
    """Near the exact weights and with their sum to half a unit; the largest uses the range unless the shift ends."""
    real = np.array(factors)
    weights = np.random.default_rng(seed).integers(-127, 128, (len(factors), taps))
    found = folded(real, weights, LIMITS.most_shift)
    assert found is not None
    made, shift = found
    exact = weights * real[:, None] * 2.0 ** shift[:, None]
    assert np.abs(made).max(initial=0) <= 127 and (shift >= 0).all() and (shift <= 15).all()
    assert (np.abs(made - exact) <= 1.5).all()
    assert (np.abs(made.sum(axis=1) - exact.sum(axis=1)) <= 0.5 + 1e-6).all()
    for channel in range(len(factors)):
        assert shift[channel] == 15 or np.abs(made[channel]).max() >= 63 or not weights[channel].any()


def test_powers_of_two_leave_weights_alone() -> None:
    weights = np.array([[127, -64, 3], [100, 1, -1]])
    found = folded(np.array([2.0**-9, 2.0**-4]), weights, 15)
    assert found is not None
    np.testing.assert_array_equal(found[0], weights)
    np.testing.assert_array_equal(found[1], [9, 4])
    assert folded(np.array([1.1]), np.array([[127]]), 15) is None, "a left shift would lose what is shifted in"


@settings(max_examples=200, deadline=None)
@given(FACTORS)
def test_scales_of_three_digits_are_near(factor: float) -> None:
    scale, shift = scale_of_digits(np.array([factor]), np.array([1e9]), 3, 30)
    assert abs(scale[0] / 2.0 ** shift[0] / factor - 1) <= 1 / 44
    digits = scale_digits(scale)
    assert digits is not None and len(digits) <= 3
    assert np.prod([1 + 2 ** int(each[0]) for each in digits], dtype=np.int64) == scale[0]


def test_digits_are_found_again() -> None:
    for count in range(4):
        for scale, found in digit_scales(count).items():
            again = scale_digits(np.array([scale]))
            assert again is not None and len(again) <= count and len(found) == count
    assert scale_digits(np.array([7])) is None


def dense(real: float, seed: int) -> Graph:
    """A dense layer of 128 products and its requantisation."""
    random, builder = np.random.default_rng(seed), GraphBuilder("layer")
    x = builder.input("x", TensorType((1, 128), DType.INT8))
    weights = builder.constant("w", random.integers(-127, 128, (16, 128)).astype(np.int8))
    bias = builder.constant("b", random.integers(-1000, 1000, 16).astype(np.int32))
    total = builder.add(FullyConnected(input_zero_point=-3), [x, weights, bias])
    mantissa, exponent = np.frexp(real)
    parts = [np.array([int(mantissa * 2**31)]), np.array([int(exponent)])]
    names = [builder.constant(n, a.astype(np.int32)) for n, a in zip(("m", "s"), parts, strict=True)]
    scaled = builder.add(Requantize(output_zero_point=5), [total, *names])
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled])])


def difference(graph: Graph, made: Graph) -> int:
    """Largest difference on random operands."""
    random, largest = np.random.default_rng(1), 0
    for _ in range(20):
        x = random.integers(-128, 128, (1, 128)).astype(np.int8)
        before, after = (evaluate(g, {"x": x})[g.outputs[0]].astype(int) for g in (graph, made))
        largest = max(largest, int(np.abs(before - after).max()))
    return largest


def test_the_better_way_is_taken() -> None:
    """Weights lose much where factors are large and no powers of two: digits are taken there."""
    large, small = 0.017, 0.0004
    for real, uses_digits in ((large, True), (small, False), (2.0**-6, False)):
        graph = dense(real, 0)
        folded_only = engine_requantisation(takes, LIMITS)(graph)
        best = engine_requantisation(takes, LIMITS, lambda types, node: True)(graph)
        scales = [best.constants[n.inputs[1]] for n in best.nodes if isinstance(n.operator, ScaleShift)]
        assert [bool((scale != 1).any()) for scale in scales] == [uses_digits]
        print(real, difference(graph, folded_only), difference(graph, best))
        assert difference(graph, best) <= (3 if uses_digits else 8)
        assert difference(graph, best) <= difference(graph, folded_only)


def test_with_a_product_nothing_is_folded() -> None:
    graph = dense(0.0004, 0)
    made = engine_requantisation(takes, requantisation_limits(PRESETS["fsim"]))(graph)
    (scaled,) = [node for node in made.nodes if isinstance(node.operator, ScaleShift)]
    assert (made.constants[scaled.inputs[1]] > 1).all()
    np.testing.assert_array_equal(made.constants["w"], graph.constants["w"])
