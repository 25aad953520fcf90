"""NE16 weight packing against the bytes the public driver used, and against a bit-by-bit reading of the layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.targets.ne16.packing import pack_linear_weights, pack_weights
from ne16_oracle import packed_linear_weights_nbytes, packed_weights_nbytes, unpack_linear_weights, unpack_weights

VECTORS = Path(__file__).resolve().parents[1].parent / "shared" / "hardware" / "ne16_vectors.npz"


@pytest.mark.skipif(not VECTORS.exists(), reason="the shared facts (ne16_vectors.npz) are not beside the repository")
def test_packing_equals_the_public_drivers_bytes() -> None:
    with np.load(VECTORS) as vectors:
        configs = json.loads(str(vectors["configs"]))
        assert len(configs) == 30
        for index, config in enumerate(configs):
            weights = vectors[f"{index}/w"].transpose(0, 2, 3, 1)
            bits, depthwise = config["weight_bits"], config["depthwise"]
            packed = pack_weights(weights, bits, depthwise)
            assert np.array_equal(packed, vectors[f"{index}/w_packed"]), f"job {index}: {config}"
            expected = packed_weights_nbytes(config["c_out"], config["c_in"], config["kernel"], bits, depthwise)
            assert packed.nbytes == expected, f"job {index}"
            assert np.array_equal(unpack_weights(packed, bits, depthwise, weights.shape), weights), f"job {index}"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_bit_lies_where_the_layout_says(data: st.DataObject) -> None:
    bits = data.draw(st.integers(2, 8), label="bits")
    depthwise = data.draw(st.booleans(), label="depthwise")
    kernel = 3 if depthwise else data.draw(st.sampled_from((1, 3)), label="kernel")
    out_channels = data.draw(st.integers(1, 40), label="out_channels")
    in_channels = 1 if depthwise else data.draw(st.integers(1, 40), label="in_channels")
    seed = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    half = 1 << (bits - 1)
    weights = seed.integers(-half, half, (out_channels, kernel, kernel, in_channels)).astype(np.int8)
    packed = pack_weights(weights, bits, depthwise)
    groups = -(-(out_channels if depthwise else in_channels) // 16)
    assert packed.size == packed_weights_nbytes(out_channels, in_channels, kernel, bits, depthwise)
    for _ in range(40):
        place = tuple(int(seed.integers(size)) for size in weights.shape)
        row, channel = (0, place[0]) if depthwise else (place[0], place[3])
        stored = 0
        for bit in range(bits):
            plane = (row * groups + channel // 16) * bits + bit
            start = (plane * kernel * kernel + place[1] * kernel + place[2]) * 2
            word = int(packed[start]) | int(packed[start + 1]) << 8
            stored |= (word >> channel % 16 & 1) << bit
        assert stored - half == weights[place]
    assert np.array_equal(unpack_weights(packed, bits, depthwise, weights.shape), weights)


@pytest.mark.parametrize("bits", range(2, 9))
def test_linear_layout_is_one_plane_of_all_inputs_per_bit(bits: int) -> None:
    half = 1 << (bits - 1)
    weights = np.random.default_rng(bits).integers(-half, half, (5, 48)).astype(np.int8)
    packed = pack_linear_weights(weights, bits)
    assert packed.size == packed_linear_weights_nbytes(5, 48, bits) == 5 * bits * 6
    planes = packed.reshape(5, bits, 6)
    for row, channel in ((0, 0), (4, 47), (2, 17)):
        stored = sum((int(planes[row, bit, channel // 8]) >> channel % 8 & 1) << bit for bit in range(bits))
        assert stored - half == weights[row, channel]
    assert np.array_equal(unpack_linear_weights(packed, bits, 48), weights)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"-2\.\.1"):
        pack_weights(np.full((1, 1, 1, 1), 2, np.int8), 2, False)
    with pytest.raises(ValueError, match="multiple of 16"):
        pack_linear_weights(np.zeros((1, 17), np.int8), 8)
