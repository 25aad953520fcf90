"""The engine of rtl/macarray.v in Python: its results and cycles."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from math import gcd, prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dovetail.ir.operators.arithmetic import Rounding, fixed_point
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.ir.types import Array, Shape
from dovetail.sim.device import Bus
from dovetail.target import Best, JobRegisters, Macs
from dovetail.target.layers import LayerWindow, taps_inside

REGISTERS = JobRegisters(
    (
        *("source", "source_row", "source_pixel", "source_size", "result", "result_row", "result_pixel", "result_size"),
        *("channels", "weights", "parameters", "kernel", "bounds", "second", "second_row", "second_pixel"),
    )
)
"""As rtl/macarray.v has them."""
_LANES, _BLOCK = 8, 64


class JobKind(IntEnum):
    """Kind of a job."""

    CONVOLUTION = 0
    DEPTHWISE = 1
    SUM = 2


_LOADS = {JobKind.CONVOLUTION: _LANES, JobKind.DEPTHWISE: 1, JobKind.SUM: 0}
"""Words of weights loaded for each tap and 8 input channels."""


def job_cycles(kind: JobKind, x: Shape, y: Shape, window: LayerWindow, pixel: int) -> int:
    """Cycles of a job from the shapes of operand and result, pixels `pixel` bytes apart: exact where these are a
    multiple of 8 and begin with a word; else groups of channels that lie across two words of memory take two cycles.
    How many do is estimated: pixels begin as often at each place in a word that is a multiple of what the distances
    have in common."""
    inputs, outputs, operands = x[-1], y[-1], 2 if kind is JobKind.SUM else 1
    pixels, taps = prod(y[:-1]), operands * prod(window.kernel)
    starts, firsts = np.arange(0, _LANES, gcd(pixel, inputs, _LANES))[:, None], np.arange(0, inputs, _LANES)
    here = np.minimum(inputs - firsts, _LANES)
    across = ((starts + firsts) % _LANES + here > _LANES).sum() / len(starts)
    walked = round(pixels * taps * len(firsts) + operands * taps_inside(window, x, y) * across)
    return _cycles(kind, pixels, inputs, outputs, taps, walked)


def best(products: Macs) -> Best:
    """The most of a kind of layer: its weights are loaded for each block of pixels, depthwise results drained one a
    cycle."""
    taps, pixels = prod(products.kernel), products.pixels
    if products.kind == "DepthwiseConv2d":
        return Best(
            taps / (taps / _LANES + 1), f"depthwise: one of {_LANES} lanes, and a cycle for each result", (1, 8, 1, 1)
        )
    loaded = -(-pixels // _BLOCK) * _LANES
    return Best(_LANES * _LANES * pixels / (pixels + loaded), "weights are loaded for each 64 pixels", (8, 8, 1, 1))


def _cycles(kind: JobKind, pixels: int, inputs: int, outputs: int, taps: int, walked: int) -> int:
    """`walked`: cycles in which pixels are read, for all input channels of one group of output channels."""
    groups, blocks = -(-outputs // _LANES), -(-pixels // _BLOCK)
    if kind is JobKind.CONVOLUTION:
        loaded = _LANES * taps * -(-inputs // _LANES)
        return groups * (16 + blocks * (loaded + 4) + walked) + pixels * outputs
    parameters, drained = (16, 5 * groups) if kind is JobKind.SUM else (16 * groups, 4 * groups)
    return parameters + blocks * (_LOADS[kind] * taps * groups + drained) + walked + pixels * outputs


def _halves(word: int) -> tuple[int, int]:
    return word & 0xFFFF, word >> 16


def _kind(job: Mapping[str, int]) -> JobKind:
    return JobKind(job["kernel"] >> 20 & 3)


def _sizes(job: Mapping[str, int]) -> tuple[int, int, int, int]:
    rows, columns = _halves(job["result_size"])
    kernel = job["kernel"]
    return rows * columns, *_halves(job["channels"]), (kernel & 15) * (kernel >> 4 & 15)


def _residues(step: int, stride: int, before: int, kernel: int, results: int, size: int) -> Array:
    """How many of the rows (or columns) that are read begin at each place within a word."""
    place = np.arange(results)[:, None] * stride + np.arange(kernel)
    there = place[(place >= before) & (place < before + size)]
    return np.bincount(there * step % _LANES, minlength=_LANES)


def _across(place: int, rows: Array, columns: Array, channels: int) -> int:
    """How many reads lie across two words, `channels` input channels 8 at a time: rows and columns by `_residues`."""
    total = 0
    for first in range(0, channels, _LANES):
        here = min(_LANES, channels - first)
        at = (np.arange(_LANES)[:, None] + np.arange(_LANES) + place + first) % _LANES
        total += int((np.outer(rows, columns) * (at + here > _LANES)).sum())
    return total


def cycles(job: Mapping[str, int]) -> int:
    """Cycles of a job, as the Verilog takes them where its memory never makes it wait."""
    kind, (pixels, inputs, outputs, taps) = _kind(job), _sizes(job)
    high, wide, top, left, stride = (job["kernel"] >> shift & 15 for shift in (0, 4, 8, 12, 16))
    results, size = _halves(job["result_size"]), _halves(job["source_size"])
    if kind is JobKind.SUM:
        high, size, across = 1, results, 0
        for name in ("source", "second"):
            steps = job[f"{name}_row"], job[f"{name}_pixel"]
            parts = [_residues(step, 1, 0, 1, many, many) for step, many in zip(steps, results, strict=True)]
            across += _across(job[name], parts[0], parts[1], inputs)
    else:
        steps = job["source_row"], job["source_pixel"]
        windows = zip(steps, (top, left), (high, wide), results, size, strict=True)
        parts = [_residues(step, stride, before, k, many, n) for step, before, k, many, n in windows]
        across = _across(job["source"], parts[0], parts[1], inputs)
    return _cycles(kind, pixels, inputs, outputs, taps, pixels * taps * -(-inputs // _LANES) + across)


def macs(job: Mapping[str, int]) -> int:
    """Multiply-accumulates of a job, those with padding included."""
    pixels, inputs, outputs, taps = _sizes(job)
    return pixels * outputs * {JobKind.CONVOLUTION: inputs * taps, JobKind.DEPTHWISE: taps, JobKind.SUM: 0}[_kind(job)]


def macs_of_registers(written: Mapping[int, int]) -> int:
    """The same from the registers as written, by byte offset."""
    return macs(REGISTERS.job(written))


def compute(job: Mapping[str, int], bus: Bus) -> None:
    """Carry a job out."""
    kind, outputs = _kind(job), _halves(job["channels"])[1]
    _, zero_out, low, most = _bytes(job["bounds"])
    parameters = bus.view(job["parameters"], 16 * (3 if kind is JobKind.SUM else outputs)).view("<i4").reshape(-1, 4).T
    sums = _added(job, bus, parameters) if kind is JobKind.SUM else _window(job, bus, parameters[0])
    multiplier, shift = (row[:1] if kind is JobKind.SUM else row for row in parameters[1:3])
    scaled = fixed_point(sums.astype(np.int64), multiplier, shift, Rounding.DOUBLE) + zero_out
    result = _image(bus, job, "result", outputs)
    result[...] = np.clip(scaled, low, most)


def _added(job: Mapping[str, int], bus: Bus, parameters: Array) -> Array:
    """Both operands of a sum raised by 20 bits, brought to one scale and added."""
    zeros, names = (_bytes(job["bounds"])[0], _bytes(job["kernel"])[3]), ("source", "second")
    total = np.zeros((), np.int32)
    for operand, (name, zero) in enumerate(zip(names, zeros, strict=True), 1):
        raised = (_image(bus, job, name, _halves(job["channels"])[0]).astype(np.int64) - zero) << 20
        scaled = fixed_point(raised, parameters[1, operand], parameters[2, operand], Rounding.DOUBLE)
        total = total + scaled.astype(np.int32)
    return total


def _window(job: Mapping[str, int], bus: Bus, bias: Array) -> Array:
    """The sums of a convolution."""
    (rows, columns), (inputs, outputs) = _halves(job["source_size"]), _halves(job["channels"])
    high, wide, top, left, stride = (job["kernel"] >> shift & 15 for shift in (0, 4, 8, 12, 16))
    zero_in = _bytes(job["bounds"])[0]
    place = (job["source"] + top * job["source_row"] + left * job["source_pixel"]) & 0xFFFFFFFF
    x = _image(bus, {**job, "source": place}, "source", inputs)
    size = _halves(job["result_size"])
    below, right = (
        (o - 1) * stride + k - p - n
        for o, k, p, n in zip(size, (high, wide), (top, left), (rows, columns), strict=True)
    )
    around = ((top, max(below, 0)), (left, max(right, 0)), (0, 0))
    # A kernel that ends before the image does is the same on the part it reads.
    padded = np.pad(x, around, constant_values=zero_in)[: rows + top + below, : columns + left + right]
    groups = -(-outputs // _LANES), -(-inputs // _LANES)
    if _kind(job) is JobKind.DEPTHWISE:
        blocks = bus.view(job["weights"], groups[0] * high * wide * _LANES).view(np.int8)
        weights = blocks.reshape(groups[0], high, wide, _LANES).transpose(1, 2, 0, 3).reshape(1, high, wide, -1)
        depthwise, own = DepthwiseConv2d((stride, stride), (1, 1), zero_in), weights[..., :outputs]
        return np.asarray(depthwise.evaluate([padded[None], own, bias])[0])
    blocks = bus.view(job["weights"], groups[0] * high * wide * groups[1] * _LANES * _LANES).view(np.int8)
    weights = blocks.reshape(groups[0], high, wide, groups[1], _LANES, _LANES).transpose(0, 4, 1, 2, 3, 5)
    weights = weights.reshape(groups[0] * _LANES, high, wide, -1)[:outputs, :, :, :inputs]
    return np.asarray(Conv2d((stride, stride), input_zero_point=zero_in).evaluate([padded[None], weights, bias])[0])


def _bytes(word: int) -> list[int]:
    """The signed bytes of a register."""
    return [int(value) for value in np.array([word], "<u4").view(np.int8)]


def _image(bus: Bus, job: Mapping[str, int], name: str, channels: int) -> Array:
    """Bytes at a register's address: the second operand is as large as the result."""
    size = _halves(job["source_size" if name == "source" and _kind(job) is not JobKind.SUM else "result_size"])
    shape, strides = (*size, channels), (job[f"{name}_row"], job[f"{name}_pixel"], 1)
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return as_strided(bus.view(job[name], extent).view(np.int8), shape, strides)
