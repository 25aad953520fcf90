"""A bias as products of int8 digits: the sum is exact, the rows are as many as said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.loops import digit_rows, digits, ones

BLOCKS = st.sampled_from([2, 8, 16, 32])


@st.composite
def biases(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A block and biases that need at most 300 rows of it, or 2**30."""
    block = draw(BLOCKS)
    most = min(2**30, 300 * 127 * 127 * (block - 1))
    bits = draw(st.integers(1, most.bit_length()))
    limit = min(most, 2**bits - 1)
    return block, draw(st.lists(st.integers(-limit, limit), min_size=1, max_size=9))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(biases())
def test_the_digits_sum_to_the_bias(drawn: tuple[int, list[int]]) -> None:
    block, values = drawn
    bias = np.array(values, np.int32)
    rows = digit_rows(bias, block)
    made, one = digits(bias, rows, block), ones(rows, block)
    assert made.dtype == one.dtype == np.int8
    assert made.shape == (len(values), rows, block) and one.shape == (rows, block)
    assert made.min() >= -127
    assert (made.astype(int) * one.astype(int)).sum(axis=(1, 2)).tolist() == values
    assert (one == one[0]).all()  # one row in memory serves them all


@pytest.mark.parametrize("block", [2, 8, 16, 32])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_beyond_the_rows_is_refused(block: int, sign: int) -> None:
    reach = 3 * 127 * 127 * (block - 1)
    assert digit_rows(np.array([sign * reach]), block) == 3
    assert digit_rows(np.array([sign * (reach + 1)]), block) == 4
    made = digits(np.array([sign * (reach + 127)]), 3, block)
    assert int((made.astype(int) * ones(3, block).astype(int)).sum()) == sign * (reach + 127)
    with pytest.raises(ValueError, match=f"a bias of {reach + 128} needs more than 3 rows of {block} digits"):
        digits(np.array([5, sign * (reach + 128)]), 3, block)


def test_the_largest_biases_of_int32() -> None:
    bias = np.array([-(2**31), 2**31 - 1, 0], np.int32)
    rows = digit_rows(bias, 256)
    made = digits(bias, rows, 256).astype(int) * ones(rows, 256).astype(int)
    assert made.sum(axis=(1, 2)).tolist() == bias.tolist()
    assert digit_rows(np.zeros(4, np.int32), 16) == digit_rows(np.zeros(0, np.int32), 16) == 1
