"""The audio front end of TensorFlow Lite Micro, on integers: window, spectrum, energies, filter bank, noise, logarithm.

Facts from tflite-micro's signal/src and signal/micro/kernels, and of the transform from kissfft (kiss_fft.c and
kiss_fftr.c with 16 bits): radix 4, then 2, every stage scaled by its radix. Everything is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np

from dovetail.guests.operators.common import Arrays, Numbers, Results, Types, text
from dovetail.ir.operators.base import require
from dovetail.ir.operators.user import Said, UserOperator
from dovetail.ir.types import Array, DType, TensorType

_BITS = text("bits")


def _expect(kinds: Sequence[TensorType], *dtypes: DType) -> None:
    wanted, texts = ", ".join(dtype.text for dtype in dtypes), ", ".join(map(str, kinds))
    require(tuple(kind.dtype for kind in kinds) == dtypes, f"expects operands of {wanted}, got {texts}")
    require(all(kind.elements for kind in kinds), f"expects elements, got {texts}")


@dataclass(frozen=True)
class SignalWindow(UserOperator):
    """Rows times weights, int16, shifted right and limited."""

    custom_code = "SignalWindow"
    c = text("window")
    function = "window_rows"

    shift: int

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.INT16, DType.INT16)
        require(inputs[0].elements % inputs[1].elements == 0, "the weights are not as long as a row")
        require(0 <= self.shift < 32, f"a shift of {self.shift}")
        return (inputs[0],)

    def compute(self, inputs: Arrays) -> Arrays:
        rows = inputs[0].astype(np.int32).reshape(-1, inputs[1].size) * inputs[1].reshape(-1)
        return [np.clip(rows >> self.shift, -32768, 32767).astype(np.int16).reshape(inputs[0].shape)]

    def numbers(self, inputs: Types) -> Numbers:
        size = inputs[1].elements
        return (inputs[0].elements // size, size, self.shift)


@dataclass(frozen=True)
class SignalFftAutoScale(UserOperator):
    """int16 values as far to the left as the largest has room, and by how many bits, int32."""

    custom_code = "SignalFftAutoScale"
    c = (_BITS, text("auto_scale"))
    function = "auto_scale"

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.INT16)
        return inputs[0], TensorType((), DType.INT32)

    def compute(self, inputs: Arrays) -> Arrays:
        largest = 0
        for value in inputs[0].reshape(-1).tolist():
            if value > largest or -value > largest:
                largest = -32768 if value == -32768 else abs(value)
        bits = max(15 - ((largest & 0xFFFFFFFF).bit_length() or 32), 0)
        return [(inputs[0].astype(np.int32) << bits).astype(np.int16), np.array(bits, np.int32)]

    def numbers(self, inputs: Types) -> Numbers:
        return (inputs[0].elements,)


def _q15(products: Array) -> Array:
    """Products of two Q15, rounded."""
    return np.asarray((products + 16384) >> 15).astype(np.int16).astype(np.int64)


def _times(a: Array, b: Array) -> Array:
    """Products of complex numbers, (real, imaginary) along the last axis."""
    real, imaginary = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1], a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]
    return _q15(np.stack([real, imaginary], axis=-1).astype(np.int32).astype(np.int64))


def _wrapped(values: Array) -> Array:
    return values.astype(np.int16).astype(np.int64)


def _turns(angles: Array) -> Array:
    """Points of the unit circle in Q15, (cosine, sine)."""
    both = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return np.floor(0.5 + 32767 * both).astype(np.int16)


@dataclass(frozen=True)
class SignalRfft(UserOperator):
    """The first half of the spectrum of rows of int16: real and imaginary parts in turns."""

    custom_code = "SignalRfft"
    passed_over = ("T",)
    c = text("rfft")
    function = "rfft"

    fft_length: int

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.INT16)
        size, length = self.fft_length, inputs[0].shape[-1]
        require(
            4 <= size <= 1 << 14 and size & (size - 1) == 0, f"an fft_length of {size} is no power of 2 up to 16384"
        )
        require(length <= size, f"rows of {length} are longer than the fft_length {size}")
        return (TensorType((*inputs[0].shape[:-1], size + 2), DType.INT16),)

    def _radices(self) -> list[int]:
        """From the outermost stage to the innermost."""
        left, radices = self.fft_length // 2, []
        while left > 1:
            radices.append(4 if left % 4 == 0 else 2)
            left //= radices[-1]
        return radices

    def tables(self, inputs: Types) -> Arrays:
        half, places = self.fft_length // 2, np.zeros(1, np.int64)
        for radix in reversed(self._radices()):
            places = np.concatenate([radix * places + leg for leg in range(radix)])
        turns, halves = -2 * np.pi * np.arange(half) / half, -np.pi * (np.arange(1, half // 2 + 1) / half + 0.5)
        return places.astype(np.int16), _turns(turns), _turns(halves)

    def compute(self, inputs: Arrays) -> Arrays:
        places, turns, halves = (table.astype(np.int64) for table in self.tables(()))
        rows = inputs[0].reshape(-1, inputs[0].shape[-1]).astype(np.int64)
        rows = np.pad(rows, ((0, 0), (0, self.fft_length - rows.shape[1])))
        values = _transformed(rows.reshape(len(rows), -1, 2)[:, places], turns, self._radices())
        values = np.concatenate([values, values[:, :1]], axis=1)
        half, count = self.fft_length // 2, self.fft_length // 4
        spectrum, scaled = np.zeros((len(rows), half + 1, 2), np.int64), _q15(values * 16383)
        rising, falling = slice(1, count + 1), slice(half - 1, half - count - 1, -1)
        low, high = scaled[:, rising], _q15(_wrapped(values[:, falling] * [1, -1]) * 16383)
        total, turned = _wrapped(low + high), _times(_wrapped(low - high), halves)
        spectrum[:, rising], spectrum[:, falling] = (total + turned) >> 1, ((total - turned) * [1, -1]) >> 1
        spectrum[:, 0, 0], spectrum[:, half, 0] = scaled[:, 0].sum(axis=1), scaled[:, 0, 0] - scaled[:, 0, 1]
        return [spectrum.astype(np.int16).reshape(*inputs[0].shape[:-1], -1)]

    def numbers(self, inputs: Types) -> Numbers:
        return (prod(inputs[0].shape[:-1]), inputs[0].shape[-1], self.fft_length // 2)

    def scratch(self, inputs: Types) -> Types:
        return (TensorType((self.fft_length,), DType.INT16),)


def _transformed(values: Array, turns: Array, radices: Sequence[int]) -> Array:
    """The complex transform of rows [N, size, 2] whose elements are in the order of the stages."""
    size, apart = values.shape[1], 1
    for radix in reversed(radices):
        legs = _q15(values.reshape(len(values), -1, radix, apart, 2) * (32767 // radix))
        step = np.arange(apart) * (size // (radix * apart))
        parts = [legs[:, :, 0], *(_times(legs[:, :, leg], turns[leg * step]) for leg in range(1, radix))]
        if radix == 2:
            sums = [parts[0] + parts[1], parts[0] - parts[1]]
        else:
            across, along = _wrapped(parts[0] - parts[2]), _wrapped(parts[0] + parts[2])
            total, between = _wrapped(parts[1] + parts[3]), _wrapped(parts[1] - parts[3])
            aside = between[..., ::-1] * [1, -1]
            sums = [along + total, across + aside, along - total, across - aside]
        values, apart = _wrapped(np.stack(sums, axis=2)).reshape(len(values), size, 2), apart * radix
    return values


@dataclass(frozen=True)
class SignalEnergy(UserOperator):
    """The energy of each frequency of a spectrum, uint32; outside of start and end it is 0."""

    custom_code = "SignalEnergy"
    c = text("energy")
    function = "spectrum_energy"

    end_index: int
    start_index: int

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.INT16)
        size = inputs[0].elements // 2
        require(
            0 <= self.start_index <= self.end_index <= size, f"takes {self.start_index} to {self.end_index} of {size}"
        )
        return (TensorType((size,), DType.UINT32),)

    def compute(self, inputs: Arrays) -> Arrays:
        energies = (inputs[0].astype(np.int64).reshape(-1, 2) ** 2).sum(axis=1)
        energies[: self.start_index], energies[self.end_index :] = 0, 0
        return [energies.astype(np.uint32)]

    def numbers(self, inputs: Types) -> Numbers:
        return (inputs[0].elements // 2, self.start_index, self.end_index)


@dataclass(frozen=True)
class SignalFilterBank(UserOperator):
    """Sums of energies, uint32, in overlapping triangles, as int64 (TFLite says uint64).

    Operands: energies, then constants of int16: weights of rising and of falling sides; for each channel and one before
    the first the first energy, the first weight, and how many.
    """

    custom_code = "SignalFilterBank"
    c = text("filter_bank")
    function = "filter_bank"

    num_channels: int

    @classmethod
    def read(cls, said: Said) -> Self:
        """Raises ValueError also where a channel reaches beyond what there is."""
        bank, energies = super().read(said), said.operands[0] if said.operands else None
        rising, falling, *places = (said.constant(place).reshape(-1).astype(np.int64) for place in range(1, 6))
        count = bank.num_channels + 1
        require(all(len(one) >= count for one in places), "too few places for the channels")
        starts, firsts, widths = (one[:count] for one in places)
        require(min(one.min() for one in (starts, firsts, widths)) >= 0, "a place of a channel is negative")
        held = energies.type.elements if energies is not None and energies.type is not None else 0
        fits = (starts + widths).max() <= held and (firsts + widths).max() <= min(len(rising), len(falling))
        require(bool(fits), "a channel reaches beyond the energies or the weights")
        return bank

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.UINT32, *(DType.INT16,) * 5)
        require(0 < self.num_channels < 1 << 15, f"{self.num_channels} channels")
        return (TensorType((self.num_channels,), DType.INT64),)

    def compute(self, inputs: Arrays) -> Arrays:
        energies, rising, falling, *places = (array.reshape(-1).astype(np.int64) for array in inputs)
        count, sums = self.num_channels + 1, np.zeros(self.num_channels + 2, np.int64)
        for channel, (start, first, width) in enumerate(np.stack([one[:count] for one in places], axis=1)):
            own = energies[start : start + width]
            sums[channel] += (rising[first : first + width] * own).sum()
            sums[channel + 1] += (falling[first : first + width] * own).sum()
        return [sums[1:count]]

    def numbers(self, inputs: Types) -> Numbers:
        return (self.num_channels,)


@dataclass(frozen=True)
class SignalFilterBankSquareRoot(UserOperator):
    """Square roots of sums, rounded, uint32, shifted right by the bits of the second operand, int32."""

    custom_code = "SignalFilterBankSquareRoot"
    c = (_BITS, text("filter_bank_root"))
    function = "filter_bank_root"

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.INT64, DType.INT32)
        return (TensorType(inputs[0].shape, DType.UINT32),)

    def compute(self, inputs: Arrays) -> Arrays:
        roots = [_root(int(one)) for one in inputs[0].view(np.uint64).reshape(-1)]
        shift = np.uint32(int(inputs[1].reshape(-1)[0]) & 31)
        return [np.array(roots, np.uint32).reshape(inputs[0].shape) >> shift]

    def numbers(self, inputs: Types) -> Numbers:
        return (inputs[0].elements,)


def _root(number: int) -> int:
    """The root rounded to the nearest, but not to more than half the bits hold."""
    floor = int(np.sqrt(number))
    while floor * floor > number:
        floor -= 1
    while (floor + 1) * (floor + 1) <= number:
        floor += 1
    most = 0xFFFF if number < 1 << 32 else 0xFFFFFFFF
    return floor + int(number - floor * floor > floor and floor != most)


@dataclass(frozen=True)
class SignalFilterBankSpectralSubtraction(UserOperator):
    """Energies above the noise, and the estimate of the noise, which is kept between inferences; uint32."""

    custom_code = "SignalFilterBankSpectralSubtraction"
    c = text("filter_bank_noise")
    function = "filter_bank_noise"

    alternate_one_minus_smoothing: int
    alternate_smoothing: int
    clamping: bool
    min_signal_remaining: int
    num_channels: int
    one_minus_smoothing: int
    smoothing: int
    smoothing_bits: int
    spectral_subtraction_bits: int

    def states(self, inputs: Types) -> Arrays:
        return (np.zeros(self.num_channels, np.uint32),)

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.UINT32, DType.UINT32)
        kind = TensorType((self.num_channels,), DType.UINT32)
        require(inputs[0] == kind, f"expects {kind}, got {inputs[0]}")
        require(0 <= self.smoothing_bits < 32 and 0 <= self.spectral_subtraction_bits < 64, "a shift is out of range")
        return kind, kind, kind

    def compute(self, inputs: Arrays) -> Arrays:
        energies, before = inputs[0].astype(np.uint64), inputs[1].astype(np.uint64)
        odd = np.arange(len(energies)) % 2 == 1
        low, shift = np.uint64(0xFFFFFFFF), np.uint64(self.spectral_subtraction_bits)
        share = np.where(odd, self.alternate_smoothing, self.smoothing).astype(np.uint32).astype(np.uint64)
        rest = np.where(odd, self.alternate_one_minus_smoothing, self.one_minus_smoothing)
        raised = (energies << np.uint64(self.smoothing_bits)) & low
        noise = ((raised * share + before * rest.astype(np.uint32).astype(np.uint64)) >> shift) & low
        lower = np.minimum(noise, raised)
        least = ((energies * np.uint64(self.min_signal_remaining & 0xFFFFFFFF)) >> shift) & low
        clean = np.maximum((raised - lower) >> np.uint64(self.smoothing_bits), least).astype(np.uint32)
        estimate = (lower if self.clamping else noise).astype(np.uint32)
        return [clean, estimate, estimate]

    def numbers(self, inputs: Types) -> Numbers:
        even = (self.smoothing, self.one_minus_smoothing)
        odd = (self.alternate_smoothing, self.alternate_one_minus_smoothing)
        bits = (self.smoothing_bits, self.spectral_subtraction_bits)
        return (self.num_channels, *even, *odd, *bits, self.min_signal_remaining, int(self.clamping))


@dataclass(frozen=True)
class SignalPcan(UserOperator):
    """Gain by the noise: a table of parabolas of it; uint32. Operands: signal, noise, table int16."""

    custom_code = "SignalPCAN"
    c = (_BITS, text("pcan"))
    function = "pcan"

    snr_shift: int

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.UINT32, DType.UINT32, DType.INT16)
        require(inputs[0] == inputs[1] and len(inputs[0].shape) == 1, "expects as much noise as signal")
        require(inputs[2].elements >= 4 * 32 - 3, f"a table of {inputs[2].elements} is too short")
        require(0 <= self.snr_shift < 64, f"a shift of {self.snr_shift}")
        return (inputs[0],)

    def compute(self, inputs: Arrays) -> Arrays:
        table = [int(one) for one in inputs[2].reshape(-1)]
        gained = []
        for own, noise in zip(inputs[0].tolist(), inputs[1].tolist(), strict=True):
            ratio = ((own * (_gain(noise, table) & 0xFFFFFFFF)) & (1 << 64) - 1) >> self.snr_shift & 0xFFFFFFFF
            gained.append((ratio * ratio & 0xFFFFFFFF) >> 20 if ratio < 8192 else (ratio >> 6) - 64)
        return [np.array(gained, np.uint32)]

    def numbers(self, inputs: Types) -> Numbers:
        return (inputs[0].elements, self.snr_shift)


def _gain(x: int, table: Sequence[int]) -> int:
    """The parabola of an interval between powers of 2, in the arithmetic of 32 bits."""
    if x <= 2:
        return table[x]
    interval = x.bit_length()
    own = table[4 * interval - 6 :][:3]
    part = (x << (11 - interval) if interval < 11 else x >> (interval - 11)) & 0x3FF
    bent = (((own[2] * part) >> 5) + (own[1] << 5)) * part
    bent = (bent + (1 << 14) + (1 << 31)) % (1 << 32) - (1 << 31)
    return ((bent >> 15) + own[0] + (1 << 15)) % (1 << 16) - (1 << 15)


@dataclass(frozen=True)
class SignalFilterBankLog(UserOperator):
    """The natural logarithm of uint32, scaled, int16."""

    custom_code = "SignalFilterBankLog"
    c = (_BITS, text("filter_bank_log"))
    function = "filter_bank_log"

    input_correction_bits: int
    output_scale: int

    def results(self, inputs: Types) -> Results:
        _expect(inputs, DType.UINT32)
        require(0 <= self.input_correction_bits < 32, f"{self.input_correction_bits} correction bits")
        return (TensorType(inputs[0].shape, DType.INT16),)

    def tables(self, inputs: Types) -> Arrays:
        x = np.arange(130) / 128
        chord = np.where(x <= 1, np.log2(1 + x) - x, 0)
        return (np.rint(65536 * chord).astype(np.uint16),)

    def compute(self, inputs: Arrays) -> Arrays:
        table = [int(one) for one in self.tables(())[0]]
        raised = ((int(one) << self.input_correction_bits) & 0xFFFFFFFF for one in inputs[0].flat)
        return [np.array([self._logarithm(one, table) for one in raised], np.int16).reshape(inputs[0].shape)]

    def _logarithm(self, number: int, table: Sequence[int]) -> int:
        if number <= 1:
            return 0
        whole = number.bit_length() - 1
        above = number - (1 << whole)
        part = above << (16 - whole) if whole < 16 else above >> (whole - 16)
        place = part >> 9
        bent = ((table[place + 1] - table[place]) * (part - (place << 9))) >> 16
        natural = (45426 * ((whole << 16) + part + table[place] + bent) + 32768) >> 16
        return min((self.output_scale * natural + 32768 & 0xFFFFFFFF) >> 16, 32767)

    def numbers(self, inputs: Types) -> Numbers:
        return (inputs[0].elements, self.output_scale, self.input_correction_bits)
