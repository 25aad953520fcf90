"""The lines that requantise sums on an element's core: the same bytes as the operator, for every sum there can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ir.operators.arithmetic import Requantize
from dovetail.ir.requantisation.lines import ChannelLines, lines_of
from dovetail.ir.types import Array


def computed(lines: ChannelLines, sums: Array) -> Array:
    """What `narrow_sums` gives, in whole numbers; every step must stay within its register."""
    raised = (sums << lines.raise_by) + lines.additions
    assert np.abs(raised).max() < 1 << 31
    gains = np.where(raised < 0, 0, 0 if lines.gains is None else lines.gains)
    whole = ((raised * lines.factors.astype(np.int64) >> 32) + gains >> 16) + lines.centre
    assert np.abs(whole).max() < 1 << 15
    return np.asarray(np.clip(whole, 0, 255) - 128)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), zero_point=st.sampled_from([-128, -128, 4, 38, -17, 127]))
def test_lines_are_the_requantisation(seed: int, zero_point: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 5))
    multiplier, shift = draw.integers(1 << 30, (1 << 31) - 1, count), draw.integers(-11, -5, count)
    folded, reach = draw.integers(-20_000, 20_000, count), draw.integers(0, 300_000, count)
    operator = Requantize(output_zero_point=zero_point)
    lines = lines_of(operator, multiplier, shift, folded, reach)
    if lines is None:
        return
    near = np.arange(-3000, 3000)[:, None] * np.ones(count, np.int64)
    for sums in (near, draw.integers(-reach, reach + 1, (20_000, count)), np.stack([reach, -reach])):
        held = np.clip(sums, -reach, reach)
        wanted = np.clip(operator.evaluate([held + folded, multiplier, shift]), -128, 127)
        assert np.array_equal(computed(lines, held), wanted)


def test_lines_are_found_and_a_wrong_one_is_noticed() -> None:
    multiplier, shift, folded = np.array([1_500_000_000]), np.array([-8]), np.array([1234])
    for zero_point in (-128, 4):
        operator = Requantize(output_zero_point=zero_point)
        lines = lines_of(operator, multiplier, shift, folded, np.array([200_000]))
        assert lines is not None and (lines.gains is None) == (zero_point == -128)
        sums = np.arange(-200_000, 200_001)[:, None]
        wanted = np.clip(operator.evaluate([sums + folded, multiplier, shift]), -128, 127)
        assert np.array_equal(computed(lines, sums), wanted)
        wrong = ChannelLines(
            lines.additions + (1 << lines.raise_by), lines.factors, lines.gains, lines.raise_by, lines.centre
        )
        assert not np.array_equal(computed(wrong, sums), wanted)
