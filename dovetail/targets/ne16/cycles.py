"""How long NE16 jobs take, in closed form: integers in, integer out; numpy arrays in, numpy array out.

Source: the state machine of gvsoc/gvsoc-pulp pulp/ne16/src/ne16_fsm.cpp (and ne16_load, ne16_matrixvec,
ne16_normquant, ne16_streamin, ne16_streamout), summed over its loops; equal to the cycles of all 30 vectors
of hardware/ne16_vectors.npz. No memory contention, no programming by the core.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dovetail.targets.ne16.job import CHANNELS_IN, CHANNELS_OUT, Job, last_in

Count = TypeVar("Count", int, NDArray[np.int64])
"""A number or an array of numbers; all arguments of that type broadcast against each other."""

_START = 1  # from trigger, or the end of the job before, to the first state
_LOAD_DELAY = 6
_LOAD_1X1 = 9
_MATRIX_DELAY = {1: 10 + 6, 3: 6 + 6}  # before and after the multiplications
_DEPTHWISE_DELAY = 22
_BIAS = 4


def launch_cycles(
    height: Count, width: Count, in_channels: Count, out_channels: Count, *,
    kernel: int = 3, depthwise: bool = False, linear: bool = False, weight_bits: int = 8,
    scale_bits: int = 8, bias: bool = True, channel_shift: bool = False, out_bits: int = 8,
    stream_in: bool = False, less_rows: Any = 0, less_columns: Any = 0,
) -> Count:  # fmt: skip
    """Cycles of one hardware launch, from its trigger or the end of the one before to its end.

    Args:
        height: output rows walked over (3 for a stride-2 launch of two rows); int or integer array.
        width: output columns walked over.
        in_channels: input channels.
        out_channels: output channels.
        kernel: 1 or 3.
        depthwise, linear: the mode; linear means one pixel and kernel 1.
        weight_bits: 2..8.
        scale_bits: 8 or 32; 0 without requantisation.
        bias, channel_shift: whether requantisation adds a bias, loads a shift per channel.
        out_bits: 8 or 32.
        stream_in: whether accumulators are loaded first.
        less_rows: padded rows at the bottom that the last subtile does not load (int or array).
        less_columns: padded columns at the right that the last subtile does not load.
    """
    edge = CHANNELS_IN if depthwise else CHANNELS_OUT
    high, wide = (height + 2) // 3, (width + 2) // 3
    tiles = high * wide
    groups_out = (out_channels + edge - 1) // edge
    last_out = out_channels - (groups_out - 1) * edge
    planes = weight_bits if kernel == 3 or linear else 1
    total: Count = _START + tiles * out_channels * planes * (1 if depthwise else _groups_in(in_channels, linear))
    total += _load_cycles(height, width, high, wide, in_channels, groups_out, kernel, depthwise, linear,
                          less_rows, less_columns)  # fmt: skip
    if scale_bits:
        last_scales = last_out if scale_bits == 32 else (last_out + 3) // 4
        extra = _BIAS * bias + channel_shift
        total += tiles * ((groups_out - 1) * (scale_bits + extra) + last_scales + extra)
    words = (groups_out - 1) * (edge // 8) + (last_out + 7) // 8 if out_bits == 32 else groups_out
    if linear:
        total += tiles * words * (1 + stream_in)
        return total
    # the engine steps over the third column of every row but the last of a narrow subtile
    total += (3 * (height - high) * wide + high * width) * words + 9 * tiles * words * stream_in
    if kernel == 1:
        total += groups_out * _short_cycles(height, width, high, wide, out_bits)
    return total


def _groups_in(in_channels: Count, linear: bool) -> Count:
    return (in_channels + 255) // 256 if linear else (in_channels + CHANNELS_IN - 1) // CHANNELS_IN


def _load_cycles(
    height: Count, width: Count, high: Count, wide: Count, in_channels: Count, groups_out: Count,
    kernel: int, depthwise: bool, linear: bool, less_rows: Any, less_columns: Any,
) -> Count:  # fmt: skip
    """Everything spent on input pixels and around the multiplications."""
    if linear:
        groups = _groups_in(in_channels, linear)
        return groups_out * (in_channels // CHANNELS_IN + groups * (_LOAD_DELAY + _MATRIX_DELAY[1]))
    tiles = high * wide
    if kernel == 1:
        return tiles * groups_out * _groups_in(in_channels, linear) * (_LOAD_DELAY + _LOAD_1X1 + _MATRIX_DELAY[1])
    pixels: Count = (height + 2 * high - less_rows) * (width + 2 * wide - less_columns)
    if depthwise:
        return groups_out * (pixels + tiles * (_LOAD_DELAY + _DEPTHWISE_DELAY))
    return groups_out * _groups_in(in_channels, linear) * (pixels + tiles * (_LOAD_DELAY + _MATRIX_DELAY[3]))


def _short_cycles(height: Count, width: Count, high: Count, wide: Count, out_bits: int) -> Count:
    """1x1 only: the wait that fills the stream-out of a subtile up to 9 cycles.

    The model computes 9 - pixels * bytes, negative for most 32-bit subtiles; time does not run backwards, so
    only the corner subtile of one or two pixels waits there.
    """
    if out_bits == 8:
        return 9 * high * wide - height * width
    corner = (height - 3 * (high - 1)) * (width - 3 * (wide - 1))
    wait: Count = (9 - 4 * corner) * (corner < 3)
    return wait


def job_cycles(job: Job) -> int:
    """Cycles of the whole job, all launches of its grid back to back."""
    quant = job.requantise
    height, width = job.launch_height, job.launch_width
    full_rows, full_columns = (height - 1) % 3 + job.kernel, (width - 1) % 3 + job.kernel
    rows, columns = job.grid
    return rows * columns * launch_cycles(
        height, width, job.in_channels, job.out_channels,
        kernel=job.kernel, depthwise=job.depthwise, linear=job.linear, weight_bits=job.weight_bits,
        scale_bits=quant.scale_bits if quant else 0, bias=bool(quant and quant.bias),
        channel_shift=bool(quant and quant.shift is None), out_bits=job.out_bits, stream_in=job.stream_in,
        less_rows=full_rows - last_in(job, height, job.missing_rows),
        less_columns=full_columns - last_in(job, width, job.missing_columns),
    )  # fmt: skip


def layer_cycles(
    out_height: Count, out_width: Count, in_channels: Count, out_channels: Count, *, stride: int = 1, **mode: Any
) -> Count:
    """Cycles of whole jobs for arrays of sizes; `mode` as for `launch_cycles`.

    Exact when `mode` has `less_rows` and `less_columns`: the padded rows and columns (of zeros) after the last
    pixel at stride 1, and 0 at stride 2 (but for sizes of 1); an upper bound without them.
    """
    if stride == 1:
        return launch_cycles(out_height, out_width, in_channels, out_channels, **mode)
    launches = ((out_height + 1) // 2) * ((out_width + 1) // 2)
    height, width = 1 + 2 * (out_height > 1), 1 + 2 * (out_width > 1)
    return launches * launch_cycles(height, width, in_channels, out_channels, **mode)


def ideal_macs_per_cycle(job: Job) -> float:
    """Multiply-accumulates per cycle while the array multiplies, every lane useful.

    9 columns x 9 blocks x 16 one-bit multipliers [R]: 1296 / bits for 3x3; one channel of the 16 for depthwise;
    one block per bit for 1x1, so its width does not matter; 16 blocks of 16 in linear mode.
    """
    if job.linear:
        return 256 / job.weight_bits
    if job.kernel == 1:
        return 9.0 * CHANNELS_IN
    return 81 / job.weight_bits if job.depthwise else 1296 / job.weight_bits
