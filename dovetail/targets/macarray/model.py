"""What the engine of rtl/macarray.v computes, and how long that takes, in Python."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.operators.linear import Conv2d
from dovetail.ir.types import Array
from dovetail.sim.device import Bus
from dovetail.target import JobRegisters

REGISTERS = JobRegisters(
    (
        *("source", "source_row", "source_pixel", "source_size", "result", "result_row", "result_pixel", "result_size"),
        *("channels", "weights", "parameters", "kernel", "bounds"),
    )
)
"""As rtl/macarray.v has them."""
_LANES, _BLOCK = 8, 64


def job_cycles(pixels: int, inputs: int, outputs: int, taps: int) -> int:
    """Cycles of a job: exact where the input channels are a multiple of 8, as the Verilog has it; else pixels that lie
    across two words of memory take two cycles, and how many do is an estimate."""
    groups = -(-inputs // _LANES)
    rest = inputs % _LANES
    words = groups + (((groups - 1) * 7 + rest - 1) / _LANES if rest else 0)
    blocks = -(-pixels // _BLOCK)
    passes = blocks * (_LANES * taps * groups + 4) + int(pixels * taps * words)
    return -(-outputs // _LANES) * (16 + passes) + pixels * outputs


def _halves(word: int) -> tuple[int, int]:
    return word & 0xFFFF, word >> 16


def _sizes(job: Mapping[str, int]) -> tuple[int, int, int, int]:
    rows, columns = _halves(job["result_size"])
    kernel = job["kernel"]
    return rows * columns, *_halves(job["channels"]), (kernel & 15) * (kernel >> 4 & 15)


def cycles(job: Mapping[str, int]) -> int:
    """Cycles of a job."""
    return job_cycles(*_sizes(job))


def macs(job: Mapping[str, int]) -> int:
    """Multiply-accumulates of a job, those with padding included."""
    pixels, inputs, outputs, taps = _sizes(job)
    return pixels * inputs * outputs * taps


def macs_of_registers(written: Mapping[int, int]) -> int:
    """The same from the registers as written, by byte offset."""
    return macs(REGISTERS.job(written))


def compute(job: Mapping[str, int], bus: Bus) -> None:
    """Carry a job out."""
    rows, columns = _halves(job["source_size"])
    inputs, outputs = _halves(job["channels"])
    high, wide, top, left, stride = (job["kernel"] >> shift & 15 for shift in (0, 4, 8, 12, 16))
    zero_in, zero_out, low, most = (int(value) for value in np.array([job["bounds"]], "<u4").view(np.int8))
    step = (job["source_row"], job["source_pixel"], 1)
    place = (job["source"] + top * step[0] + left * step[1]) & 0xFFFFFFFF
    x = _image(bus, place, (rows, columns, inputs), step)
    size = _halves(job["result_size"])
    below, right = (
        (o - 1) * stride + k - p - n
        for o, k, p, n in zip(size, (high, wide), (top, left), (rows, columns), strict=True)
    )
    around = ((top, max(below, 0)), (left, max(right, 0)), (0, 0))
    # A kernel that ends before the image does is the same on the part it reads.
    padded = np.pad(x, around, constant_values=zero_in)[: rows + top + below, : columns + left + right]
    groups = -(-outputs // _LANES), -(-inputs // _LANES)
    blocks = bus.view(job["weights"], groups[0] * high * wide * groups[1] * _LANES * _LANES).view(np.int8)
    weights = blocks.reshape(groups[0], high, wide, groups[1], _LANES, _LANES).transpose(0, 4, 1, 2, 3, 5)
    weights = weights.reshape(groups[0] * _LANES, high, wide, -1)[:outputs, :, :, :inputs]
    bias, multiplier, shift, _ = bus.view(job["parameters"], 16 * outputs).view("<i4").reshape(outputs, 4).T
    sums = Conv2d((stride, stride), input_zero_point=zero_in).evaluate([padded[None], weights, bias])[0]
    scaled = fixed_point(sums.astype(np.int64), multiplier, shift, Rounding.DOUBLE) + zero_out
    result = _image(bus, job["result"], (*size, outputs), (job["result_row"], job["result_pixel"], 1))
    result[...] = np.clip(scaled, low, most)


def _image(bus: Bus, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return as_strided(bus.view(address, extent).view(np.int8), shape, strides)
