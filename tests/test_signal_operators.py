"""The audio operators of TensorFlow Lite Micro: equal to its kernels in every bit, in numpy and in C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import ModelError
from dovetail.ir.types import Array
from dovetail.targets import load_target
from tflite_writer import ModelWriter, run_calls
from user_operators import compiled_from, run_everywhere

KINDS = {"int16": "INT16", "int32": "INT32", "uint32": "UINT32", "int64": "UINT64"}
"""Element types in the file by those of arrays; sums of uint64 are int64 here."""
RISCV = load_target("riscv")


def run_one(
    folder: Path,
    code: str,
    options: Mapping[str, Any],
    feeds: Sequence[Sequence[Array]],
    results: Sequence[tuple[tuple[int, ...], str]],
    constants: Sequence[Array] = (),
) -> None:
    """Run an operator in TFLite Micro, in numpy and as C on host and iss, call after call: all must be equal."""
    writer = ModelWriter()
    given = [writer.tensor(f"x{at}", array.shape, KINDS[array.dtype.name]) for at, array in enumerate(feeds[0])]
    held = [writer.tensor(f"w{at}", w.shape, KINDS[w.dtype.name], w) for at, w in enumerate(constants)]
    ends = [writer.tensor(f"y{at}", shape, KINDS[kind]) for at, (shape, kind) in enumerate(results)]
    writer.custom(code, [*given, *held], ends, options)
    writer.ends(given, ends)
    data = writer.finish()
    wide = [[array.view(np.uint64) if array.dtype == np.int64 else array for array in feed] for feed in feeds]
    expected = run_calls(data, [dict(enumerate(feed)) for feed in wide], len(results))
    inputs = [{f"x{at}": array for at, array in enumerate(feed)} for feed in feeds]
    found = run_everywhere(compiled_from(data, folder, "one.tflite", RISCV), RISCV, inputs)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for at, array in enumerate(other):
            kept = array.view(np.int64) if array.dtype == np.uint64 else array
            np.testing.assert_array_equal(one[f"y{at}"], kept, f"{code}: y{at} of call {number}", strict=True)


def drawn(seed: int, count: int, *shape: int, kind: type = np.int16, high: int | None = None) -> list[list[Array]]:
    """Sets of random values of all sizes, the extremes among them."""
    rng, info = np.random.default_rng(seed), np.iinfo(kind)
    top = high or int(info.max)
    sets = []
    for number in range(count):
        spread = int(min(top, 2.0 ** (1 + (number * 7) % 33)))
        array = rng.integers(max(int(info.min), -spread), spread, shape, endpoint=True, dtype=kind)
        if number % 3 == 0:
            array.reshape(-1)[:2] = info.min if info.min == 0 or high is None else 0, top
        sets.append([array])
    return sets


@pytest.mark.parametrize("shift", [0, 12, 15])
def test_window(tmp_path: Path, shift: int) -> None:
    weights = np.random.default_rng(shift).integers(-4096, 4097, 30).astype(np.int16)
    run_one(tmp_path, "SignalWindow", {"shift": shift}, drawn(1, 6, 2, 30), [((2, 30), "int16")], [weights])


def test_automatic_scale(tmp_path: Path) -> None:
    feeds = [*drawn(2, 24, 40), [np.zeros(40, np.int16)], [np.array([-32768, 5, *[1] * 38], np.int16)]]
    run_one(tmp_path, "SignalFftAutoScale", {}, feeds, [((40,), "int16"), ((), "int32")])


@pytest.mark.parametrize(("length", "row"), [(4, 4), (8, 8), (16, 13), (32, 32), (64, 50), (256, 200), (512, 480)])
def test_spectrum(tmp_path: Path, length: int, row: int) -> None:
    options = {"T": 7, "fft_length": length}
    run_one(tmp_path, "SignalRfft", options, drawn(length, 10, 2, row), [((2, length + 2), "int16")])


def test_energy(tmp_path: Path) -> None:
    feeds = drawn(3, 8, 66)
    run_one(tmp_path, "SignalEnergy", {"end_index": 33, "start_index": 0}, feeds, [((33,), "uint32")])


def bank(channels: int, size: int, rng: np.random.Generator) -> list[Array]:
    """Weights, unweights, and for each channel and one more: where energies and weights begin, and how many."""
    widths = rng.integers(1, size // (channels + 1), channels + 1)
    starts = np.concatenate([[1], 1 + np.cumsum(widths)[:-1]])
    rising = rng.integers(0, 4097, int(widths.sum()))
    return [a.astype(np.int16) for a in (rising, 4096 - rising, starts, starts - 1, widths)]


def test_filter_bank(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    feeds = drawn(4, 12, 129, kind=np.uint32, high=2**31)
    run_one(tmp_path, "SignalFilterBank", {"num_channels": 20}, feeds, [((20,), "int64")], bank(20, 128, rng))


def test_square_root(tmp_path: Path) -> None:
    values = drawn(5, 33, 40, kind=np.int64, high=2**62)
    edges = [k * k + d for k in (1, 5, 300, 65535, 65536, 70000) for d in (-1, 0, 1, k, k + 1)]
    rows = [np.maximum(value, 0) for (value,) in values] + [np.resize(np.array(edges, np.int64), 40)]
    feeds = [[row, np.array(number % 6, np.int32)] for number, row in enumerate(rows)]
    run_one(tmp_path, "SignalFilterBankSquareRoot", {}, feeds, [((40,), "uint32")])


@pytest.mark.parametrize("clamping", [False, True])
def test_spectral_subtraction_keeps_its_estimate(tmp_path: Path, clamping: bool) -> None:
    options = {
        **{"alternate_one_minus_smoothing": 14746, "alternate_smoothing": 1638, "clamping": clamping},
        **{"min_signal_remaining": 819, "num_channels": 9, "one_minus_smoothing": 15974, "smoothing": 410},
        **{"smoothing_bits": 10, "spectral_subtraction_bits": 14},
    }
    feeds = drawn(6, 20, 9, kind=np.uint32)
    results = [((9,), "uint32"), ((9,), "uint32")]
    run_one(tmp_path, "SignalFilterBankSpectralSubtraction", options, feeds, results)


def test_pcan(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    table = rng.integers(-2000, 2001, 125).astype(np.int16)
    feeds = [[a, b] for (a,), (b,) in zip(*(drawn(seed, 20, 16, kind=np.uint32) for seed in (7, 8)), strict=True)]
    run_one(tmp_path, "SignalPCAN", {"snr_shift": 6}, feeds, [((16,), "uint32")], [table])


@pytest.mark.parametrize(("bits", "scale"), [(3, 64), (0, 1600), (7, 1)])
def test_logarithm(tmp_path: Path, bits: int, scale: int) -> None:
    options = {"input_correction_bits": bits, "output_scale": scale}
    feeds = [*drawn(9, 33, 60, kind=np.uint32), [np.arange(60, dtype=np.uint32)]]
    run_one(tmp_path, "SignalFilterBankLog", options, feeds, [((60,), "int16")])


def front_end() -> tuple[bytes, int]:
    """Window, spectrum, mel filters, noise and logarithm of rows of 480 samples, as TFLite Micro's examples have them;
    the file and how many channels there are."""
    rng, channels = np.random.default_rng(10), 40
    writer = ModelWriter()
    tensor, custom = writer.tensor, writer.custom
    x = tensor("x", (480,), "INT16")
    hann = np.round(4096 * np.sin(np.pi * (np.arange(480) + 0.5) / 480) ** 2).astype(np.int16)
    names = {
        "windowed": (480, "INT16"),
        "scaled": (480, "INT16"),
        "spectrum": (514, "INT16"),
        "energy": (257, "UINT32"),
    }
    names |= {"sums": (channels, "UINT64"), "roots": (channels, "UINT32"), "clean": (channels, "UINT32")}
    names |= {"noise": (channels, "UINT32"), "gained": (channels, "UINT32"), "logs": (channels, "INT16")}
    at = {name: tensor(name, (size,), kind) for name, (size, kind) in names.items()}
    bits, weights = tensor("bits", (), "INT32"), tensor("hann", (480,), "INT16", hann)
    filters = [
        tensor(f"bank{place}", array.shape, "INT16", array) for place, array in enumerate(bank(channels, 250, rng))
    ]
    table = np.clip(3000 - 20 * np.arange(125), 1, None).astype(np.int16)
    gains = tensor("gains", (125,), "INT16", table)
    custom("SignalWindow", [x, weights], [at["windowed"]], {"shift": 12})
    custom("SignalFftAutoScale", [at["windowed"]], [at["scaled"], bits], {})
    custom("SignalRfft", [at["scaled"]], [at["spectrum"]], {"T": 7, "fft_length": 512})
    custom("SignalEnergy", [at["spectrum"]], [at["energy"]], {"end_index": 257, "start_index": 0})
    custom("SignalFilterBank", [at["energy"], *filters], [at["sums"]], {"num_channels": channels})
    custom("SignalFilterBankSquareRoot", [at["sums"], bits], [at["roots"]], {})
    noise = {
        **{"alternate_one_minus_smoothing": 14746, "alternate_smoothing": 1638, "clamping": False},
        **{"min_signal_remaining": 819, "num_channels": channels, "one_minus_smoothing": 15974, "smoothing": 410},
        **{"smoothing_bits": 10, "spectral_subtraction_bits": 14},
    }
    custom("SignalFilterBankSpectralSubtraction", [at["roots"]], [at["clean"], at["noise"]], noise)
    custom("SignalPCAN", [at["clean"], at["noise"], gains], [at["gained"]], {"snr_shift": 6})
    custom("SignalFilterBankLog", [at["gained"]], [at["logs"]], {"input_correction_bits": 3, "output_scale": 64})
    writer.ends([x], [at["logs"]])
    return writer.finish(), channels


def test_a_whole_front_end_hears_a_tone(tmp_path: Path) -> None:
    data, _ = front_end()
    rng, time = np.random.default_rng(11), np.arange(480)
    sounds = [20000 * np.sin(time * 0.03 * (1 + n)) + rng.normal(0, 300, 480) for n in range(8)]
    feeds = [np.clip(sound, -32768, 32767).astype(np.int16) for sound in sounds]
    expected = run_calls(data, [{0: feed} for feed in feeds])
    compiled = compiled_from(data, tmp_path, "front.tflite", RISCV)
    found = run_everywhere(compiled, RISCV, [{"x": feed} for feed in feeds])
    assert any(array.any() for (array,) in expected)
    for one, (other,) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one["logs"], other, strict=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"T": 7, "fft_length": 24}, "no power of 2"),
        ({"T": 7, "fft_length": 8}, "longer than the fft_length 8"),
        ({"T": 7}, "fft_length is missing"),
        ({"T": 7, "fft_length": 16, "window": 1}, "window is not known"),
        (b"nonsense that is no flexbuffer", "fft_length is missing: the custom options"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, options: Mapping[str, Any] | bytes, said: str) -> None:
    writer = ModelWriter()
    x, y = writer.tensor("x", (16,), "INT16"), writer.tensor("y", (18,), "INT16")
    writer.custom("SignalRfft", [x], [y], options)
    writer.ends([x], [y])
    with pytest.raises(ModelError, match=said) as caught:
        compiled_from(writer.finish(), tmp_path, "bad.tflite", RISCV)
    assert "SignalRfft 0" in caught.value.where
