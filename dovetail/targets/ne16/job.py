"""NE16 jobs: what one engine launch needs, the register image that says it, and how long it takes, in closed form.

Sources: register numbers and fields, pulp-platform/pulp-nnx ne16/hal/ne16_task_defs.h; their meaning,
gvsoc/gvsoc-pulp pulp/ne16/src (the FSM model) and pulp-platform/ne16 rtl/ctrl/ne16_ctrl.sv (the RTL);
the splitting of stride-2 layers, pulp-nnx src/pulp_nnx_ne16.c. Cycles: the states of the RTL (rtl/ctrl/
ne16_ctrl_fsm.sv), summed over its loops, with memory that always grants; no programming by the core.
"""

from __future__ import annotations

from enum import IntEnum
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dovetail.records import Record, replace
from dovetail.target import Best, Macs

CHANNELS_IN = 16
"""Input channels the engine takes in together (TP_IN)."""
CHANNELS_OUT = 32
"""Output channels of one subtile, 16 in depthwise mode (TP_OUT)."""
EDGE = 3
"""Output pixels along one edge of a subtile."""
MAXIMUM_PADDING = 2
"""Most padded pixels on one side (pulp-nnx NE16_MAX_PAD)."""
OFFSETS = range(-256, 256)
"""Weight offsets: what the 9-bit signed multipliers of rtl/accumulator/ne16_normquant.sv take of the register."""
OFFSET_LIMIT = f"is outside {OFFSETS[0]}..{OFFSETS[-1]}, the 9 bits the engine multiplies with"
PADDED_LINEAR = "linear mode needs a padding value of 0: idle columns add any other to every sum"

Register = IntEnum(
    "Register",
    "WEIGHTS INFEAT OUTFEAT SCALE SHIFT BIAS IN_D0 IN_D1 IN_D2 OUT_D0 OUT_D1 OUT_D2 WEIGHTS_D0 WEIGHTS_D1 WEIGHTS_D2 "
    "REM_CHANNELS REM_OUT REM_IN NB_CHANNELS NB_OUT PADDING WEIGHT_OFFSET FILTER_MASK CONF0",
    start=0,
)
"""Numbers of the task registers of one launch."""
_MASK32 = 0xFFFFFFFF


class Ne16Padding(NamedTuple):
    """Padded pixels on each side of the input."""

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0


NO_PADDING = Ne16Padding()
"""Padding on no side."""


class Requantise(Record):
    """How 32-bit accumulators become outputs: ``(accumulator * scale + bias) >> shift``, clipped."""

    scale_bits: int = 8
    """Bits of the unsigned scale of each output channel: 8 or 32."""
    bias: bool = True
    """Whether an int32 per output channel is added before the shift."""
    relu: bool = True
    """True: clip to 0..2**out_bits-1; False: clip to the signed range."""
    shift: int | None = 0
    """Right shift of every channel, 0..31; None: one byte per output channel at ``Job.scale_shift``."""


class Ne16Job(Record):
    """One launch of a convolution, a depthwise convolution or a fully connected layer on data in L1.

    The input is uint8, HWC, channels contiguous; the output is HWC, channels contiguous. Sizes are in
    pixels and channels, strides and pointers in bytes.
    """

    in_height: int
    """Rows that really lie in memory, padding not counted."""
    in_width: int
    in_channels: int
    out_height: int
    out_width: int
    out_channels: int
    in_pixel_stride: int
    in_row_stride: int
    out_pixel_stride: int
    out_row_stride: int
    kernel: int = 3
    """Rows and columns of the filter: 1 or 3."""
    depthwise: bool = False
    linear: bool = False
    """Linear mode: one pixel, 256 input channels per pass, weights of `packing.pack_linear_weights`."""
    stride: int = 1
    padding: Ne16Padding = NO_PADDING
    padding_value: int = 0
    weight_bits: int = 8
    weight_offset: int | None = None
    """Added to the unsigned stored weights; None: -2**(weight_bits-1)."""
    requantise: Requantise | None = None
    """None: the accumulators themselves are written, 32 bits each."""
    out_bits: int = 32
    """8, or 32 (with or without `requantise`)."""
    stream_in: bool = False
    """The accumulators start from the 32-bit words already at `outfeat` (needs 32-bit output)."""
    infeat: int = 0
    """Address of the first pixel in memory."""
    weights: int = 0
    outfeat: int = 0
    scale: int = 0
    scale_shift: int = 0
    scale_bias: int = 0

    @property
    def macs(self) -> int:
        """Useful multiply-accumulates, padded pixels included."""
        channels = 1 if self.depthwise else self.in_channels
        return self.out_height * self.out_width * self.out_channels * channels * self.kernel**2

    @property
    def offset(self) -> int:
        """The signed value of the weight-offset register."""
        return -(1 << (self.weight_bits - 1)) if self.weight_offset is None else self.weight_offset

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of hardware launches: (1, 1), but 2x2 outputs per launch at stride 2."""
        return ((self.out_height + 1) // 2, (self.out_width + 1) // 2) if self.stride == 2 else (1, 1)

    @property
    def launch(self) -> list[int]:
        """Output rows and columns one hardware launch walks over, those skipped at stride 2 included."""
        sizes = (self.out_height, self.out_width)
        return [(3 if size > 1 else 1) if self.stride == 2 else size for size in sizes]

    @property
    def missing(self) -> list[int]:
        """Padded rows below, and columns right of, the input that the last outputs really need."""
        pad, step = self.padding, self.stride
        axes = ((self.out_height, pad.top + self.in_height), (self.out_width, pad.left + self.in_width))
        return [max(0, (out - 1) * step + self.kernel - there) for out, there in axes]

    @property
    def last_in(self) -> list[int]:
        """Input rows and columns the last subtile loads (register REM2).

        Padding after the last pixel comes for free as zeros: the subtile just loads less. Any other padding
        value, and every stride-2 launch of more than one output, needs the full edge loaded and overwritten
        (gvsoc ne16_load.cpp, RTL: implicit padding is always zero, explicit padding is `padding_value`).
        """
        overwritten = self.padding_value != 0 or self.stride == 2
        loaded = []
        for size, missing in zip(self.launch, self.missing, strict=True):
            last = _last(size, EDGE)
            loaded.append(last + self.kernel - 1 - (0 if last == EDGE and overwritten else missing))
        return loaded


def line(height: int, width: int) -> tuple[int, int, int]:
    """The rows and the columns an image of so many pixels, all one behind the other, is walked in by fewest subtiles,
    and how many pixels apart these rows begin: (rows - 1) * apart + columns is the number of pixels."""
    pixels, best = height * width, (height, width, width)
    subtiles = -(-height // EDGE) * -(-width // EDGE)
    for rows in range(EDGE, pixels // EDGE + 1, EDGE):
        if -(-pixels // (EDGE * EDGE)) == subtiles:
            break
        columns = -(-pixels // rows)
        columns += (pixels - columns) % (rows - 1)  # so that the other rows begin whole pixels apart
        if rows // EDGE * -(-columns // EDGE) < subtiles:
            best, subtiles = (rows, columns, (pixels - columns) // (rows - 1)), rows // EDGE * -(-columns // EDGE)
    return best


def flattened(job: Ne16Job) -> Ne16Job:
    """A 1x1 job that walks its pixels in fewer subtiles, if there is one; else the job itself.

    To a 1x1 convolution an image is a line of pixels, where in memory each row follows the one before on both sides.
    The engine walks that line in rows (`line`); where one is longer than they are apart, the pixels two rows share are
    computed twice, alike.
    """
    sides = (
        (job.in_row_stride, job.in_pixel_stride, job.in_width),
        (job.out_row_stride, job.out_pixel_stride, job.out_width),
    )
    if job.kernel != 1 or job.stride != 1 or job.linear or any(row != pixel * width for row, pixel, width in sides):
        return job
    rows, columns, apart = line(job.out_height, job.out_width)
    if (rows, columns) == (job.out_height, job.out_width):
        return job
    return replace(
        job,
        in_height=rows,
        in_width=columns,
        in_row_stride=apart * job.in_pixel_stride,
        out_height=rows,
        out_width=columns,
        out_row_stride=apart * job.out_pixel_stride,
    )


def problem(job: Ne16Job) -> str:
    """Why the engine cannot do the job, in one sentence; the empty string when it can."""
    requantise, padding = job.requantise, job.padding
    tests = (
        (job.kernel not in (1, 3), f"the kernel is {job.kernel}, the engine has 1 and 3"),
        (job.stride not in (1, 2), f"the stride is {job.stride}, the engine has 1 and 2"),
        (not 2 <= job.weight_bits <= 8, f"weights have {job.weight_bits} bits, the engine takes 2 to 8"),
        (job.out_bits not in (8, 32), f"outputs have {job.out_bits} bits, the engine writes 8 or 32"),
        (
            min(job.in_height, job.in_width, job.in_channels, job.out_height, job.out_width, job.out_channels) < 1,
            "a size is below 1",
        ),
        (requantise is None and job.out_bits != 32, "accumulators without requantisation are written as 32 bits"),
        (requantise is not None and requantise.scale_bits not in (8, 32), "scales must have 8 or 32 bits"),
        (
            requantise is not None and requantise.shift is not None and not 0 <= requantise.shift <= 31,
            "the right shift must be 0 to 31",
        ),
        (job.depthwise and job.kernel != 3, "depthwise mode exists for 3x3 only"),
        (job.depthwise and job.in_channels != job.out_channels, "depthwise needs as many output as input channels"),
        (job.stream_in and job.out_bits != 32, "stream-in needs 32-bit outputs"),
        (job.stream_in and job.depthwise, "stream-in does not work in depthwise mode"),
        (
            job.stream_in
            and job.stride == 2
            and any(size > 1 and size % 2 for size in (job.out_height, job.out_width)),
            "stream-in at stride 2 needs even output sizes",
        ),
        (job.kernel == 1 and any(padding), "padding exists for 3x3 only"),
        (max(padding) > MAXIMUM_PADDING or min(padding) < 0, f"padding must be 0 to {MAXIMUM_PADDING}"),
        (not 0 <= job.padding_value <= 255, "the padding value must be 0 to 255"),
        (job.linear and job.padding_value != 0, PADDED_LINEAR),
        (job.offset not in OFFSETS, f"the weight offset {job.offset} {OFFSET_LIMIT}"),
        (job.stride == 2 and job.out_pixel_stride % 2 == 1, "stride 2 needs an even output pixel stride"),
        (job.stride == 2 and job.out_row_stride % 2 == 1, "stride 2 needs an even output row stride"),
        (
            job.missing[0] > padding.bottom or job.missing[1] > padding.right,
            "the outputs need more input pixels than there are",
        ),
    )
    found = next((sentence for wrong, sentence in tests if wrong), "")
    return found or _linear_problem(job) or _edge_problem(job)


def _linear_problem(job: Ne16Job) -> str:
    if not job.linear:
        return ""
    if job.kernel != 1 or job.stride != 1 or job.out_height != 1 or job.out_width != 1:
        return "linear mode is for one output pixel and kernel 1"
    return "linear mode needs a multiple of 16 input channels" if job.in_channels % CHANNELS_IN else ""


def _edge_problem(job: Ne16Job) -> str:
    """The padding after the last pixel may not reach into the last subtile but one, which does not pad."""
    for launch_out, missing in zip(job.launch, job.missing, strict=True):
        last_out = _last(launch_out, EDGE)
        if missing and job.padding_value and last_out != EDGE:
            return (
                f"padding below or right of the input with the value {job.padding_value} needs an output size "
                "that is a multiple of 3 (or zero as value)"
            )
        if missing > last_out and launch_out > EDGE:
            return f"{missing} padded pixels after the input reach beyond the last subtile of {last_out} outputs"
    return ""


def _pair(high: int, low: int) -> int:
    return (high << 16) | low


def _last(size: int, step: int) -> int:
    return (size - 1) % step + 1


def weight_strides(kernel: int, depthwise: bool, linear: bool, bits: int, in_channels: int) -> tuple[int, int, int]:
    """The three weight-stride registers, in bytes, that fit the layouts of `packing`."""
    groups = -(-in_channels // CHANNELS_IN)
    if linear:
        plane = in_channels // 8
        return plane, bits * plane, CHANNELS_OUT * bits * plane
    if kernel == 1:
        return 2 * bits, 2 * bits * groups, 0
    return 18, 0 if depthwise else 18 * bits * groups, 0


def _conf0(job: Ne16Job) -> int:
    word = (job.weight_bits - 1) | 1 << 15 | {8: 0, 32: 2}[job.out_bits] << 21
    word |= {(3, False): 0, (3, True): 1, (1, False): 2}[job.kernel, job.depthwise] << 5
    word |= job.linear << 7 | (job.stride == 2) << 8 | job.stream_in << 14
    if job.requantise is None:
        return word | 1 << 23
    quant = job.requantise
    word |= 1 << 4 | {8: 0, 32: 2}[quant.scale_bits] << 12 | (not quant.relu) << 23 | quant.bias << 25
    return word | (1 << 24 if quant.shift is None else quant.shift << 16)


def registers(job: Ne16Job) -> tuple[int, ...]:
    """The 24 task registers (unsigned 32-bit) of the job.

    For a stride-2 job: the registers all launches of its grid share, with the pointers of the first and
    the padding of every edge. Raises ValueError when `problem` finds one.
    """
    reason = problem(job)
    if reason:
        raise ValueError(f"the NE16 cannot run this job: {reason}")
    words = job.in_channels // CHANNELS_IN if job.linear else job.in_channels
    tile_out = CHANNELS_IN if job.depthwise else CHANNELS_OUT
    (height, width), (down, right), halve, pad = job.launch, job.missing, job.stride == 2, job.padding
    first = job.infeat - pad.top * job.in_row_stride - pad.left * job.in_pixel_stride
    image = (
        job.weights,
        first & _MASK32,
        job.outfeat,
        job.scale,
        job.scale_shift,
        job.scale_bias,
        CHANNELS_IN if job.linear else job.in_pixel_stride,
        job.in_row_stride,
        0,
        32,
        job.out_pixel_stride >> halve,
        job.out_row_stride >> halve,
        *weight_strides(job.kernel, job.depthwise, job.linear, job.weight_bits, job.in_channels),
        _pair(_last(job.out_channels, tile_out), _last(words, CHANNELS_IN)),
        _pair(_last(height, EDGE), _last(width, EDGE)),
        _pair(*job.last_in),
        _pair(-(-job.out_channels // tile_out), -(-words // CHANNELS_IN)),
        _pair(-(-height // EDGE), -(-width // EDGE)),
        pad.top << 28 | right << 24 | down << 20 | pad.left << 16 | job.padding_value,
        job.offset & _MASK32,
        0,
        _conf0(job),
    )
    return tuple(int(word) for word in image)


def task_words(job: Ne16Job) -> tuple[int, ...]:
    """The constant the C driver's ``ne16_start`` takes: 25 words, or 30 when the job is a grid of launches.

    Words 0..23 are `registers`. Word 24 is 0 for a single launch, else rows << 16 | columns of the grid,
    followed by the steps in bytes to the next column (input, output) and to the next row (input, output),
    and by a word whose bit 0 (bit 1) says that the first step between columns (rows) is half as long.
    """
    rows, columns = job.grid
    if rows * columns == 1:
        return (*registers(job), 0)
    return (
        *registers(job),
        _pair(rows, columns),
        4 * job.in_pixel_stride,
        2 * job.out_pixel_stride,
        4 * job.in_row_stride,
        2 * job.out_row_stride,
        job.out_width % 2 | job.out_height % 2 << 1,
    )


Count = TypeVar("Count", int, NDArray[np.int64])
"""A number or an array of numbers; all arguments of that type broadcast against each other."""

_LAUNCH = 2  # around the states of a launch
_LOAD, _LOAD_1X1, _LOAD_LINEAR = 31, 19, 22  # all 25, 9 or 16 words of an input subtile, whatever of it is real
_ACCUMULATE = 6 + 6 + 2  # WEIGHTOFFS, MATRIXVEC before and after the products, UPDATEIDX
_STREAMED_IN = 5  # without the weights' head start in WEIGHTOFFS
_SCALE, _BIAS, _SHIFT, _STREAMIN, _STREAMOUT = 9, 8, 8, 7, 3 + 1
_COLUMNS = EDGE * EDGE  # streamed out and in one after the other, whether enabled or not
_ITERATORS = 3  # channels of a 1x1 subtile whose products take as long as computing the address steps of the launch


def launch_cycles(
    height: Count,
    width: Count,
    in_channels: Count,
    out_channels: Count,
    *,
    kernel: int = 3,
    depthwise: bool = False,
    linear: bool = False,
    weight_bits: int = 8,
    scale_bits: int = 8,
    bias: bool = True,
    channel_shift: bool = False,
    out_bits: int = 8,
    stream_in: bool = False,
) -> Count:
    """Cycles of one hardware launch, from the write of TRIGGER, or the event of the one before, to its event.

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
    """
    edge, by_pixel = CHANNELS_IN if depthwise else CHANNELS_OUT, kernel == 1 and not linear
    groups_in = 1 if depthwise else (in_channels + 255) // 256 if linear else (in_channels + 15) // CHANNELS_IN
    groups_out = (out_channels + edge - 1) // edge
    load = _LOAD_LINEAR if linear else _LOAD_1X1 if by_pixel else _LOAD
    around = load + _ACCUMULATE + _STREAMED_IN * stream_in
    one: Count = groups_in * (groups_out * around + out_channels * (1 if by_pixel else weight_bits))
    one += out_channels * depthwise  # a depthwise subtile offsets every channel by itself
    if scale_bits:
        one += groups_out * (_SCALE - (not bias) + _BIAS * bias + _SHIFT * channel_shift)
        one += out_channels if scale_bits == 32 else (out_channels + 3) // 4
        one += (out_channels + 7) // 8 * bias
    words = (out_channels + 7) // 8 if out_bits == 32 else groups_out
    one += groups_out * (_STREAMOUT + _STREAMIN * stream_in) + _COLUMNS * words * (1 + stream_in)
    waits = (out_channels < _ITERATORS) * (_ITERATORS - out_channels) if by_pixel and not stream_in else 0
    return _LAUNCH + waits + (height + 2) // 3 * ((width + 2) // 3) * one


def best(products: Macs) -> Best:
    """The most of a kind of layer: subtiles of 3x3 pixels, or in linear mode of one, whose loads and offsets come once
    for 16 inputs; results of depthwise layers are written for each."""
    planes = max(products.bits, 2)
    apart = CHANNELS_OUT * planes + _ACCUMULATE
    linear = Best(256 * CHANNELS_OUT / (_LOAD_LINEAR + apart), f"linear mode, {planes} bit planes", (256, 32, 1, 1))
    if products.kind == "DepthwiseConv2d":
        rate = _COLUMNS * CHANNELS_OUT * 9 / (_LOAD + apart + _COLUMNS * 2 + _STREAMOUT)
        return Best(rate, "depthwise: one of 16 inputs is of use to a channel", (1, 16, 3, 3))
    if products.kernel != (1, 1):
        rate = _COLUMNS * CHANNELS_OUT * CHANNELS_IN * 9 / (_LOAD + apart)
        return Best(rate, f"{planes} bit planes beside the loads of a subtile", (16, 32, 3, 3))
    rate = _COLUMNS * CHANNELS_OUT * CHANNELS_IN / (_LOAD_1X1 + _ACCUMULATE + CHANNELS_OUT)
    by_pixel = Best(rate, "1x1: one of 9 taps", (16, 32, 3, 3))
    return max(by_pixel, linear, key=lambda one: one.macs_per_cycle) if products.pixels > 1 else linear


def job_cycles(job: Ne16Job) -> int:
    """Cycles of the whole job, all launches of its grid back to back."""
    quant = job.requantise
    height, width = job.launch
    one = launch_cycles(
        height,
        width,
        job.in_channels,
        job.out_channels,
        kernel=job.kernel,
        depthwise=job.depthwise,
        linear=job.linear,
        weight_bits=job.weight_bits,
        scale_bits=quant.scale_bits if quant else 0,
        bias=bool(quant and quant.bias),
        channel_shift=bool(quant and quant.shift is None),
        out_bits=job.out_bits,
        stream_in=job.stream_in,
    )
    return prod(job.grid) * one


def layer_cycles(
    out_height: Count, out_width: Count, in_channels: Count, out_channels: Count, *, stride: int = 1, **mode: Any
) -> Count:
    """Cycles of whole jobs for arrays of sizes; `mode` as for `launch_cycles`."""
    if stride == 1:
        return launch_cycles(out_height, out_width, in_channels, out_channels, **mode)
    launches = ((out_height + 1) // 2) * ((out_width + 1) // 2)
    height, width = 1 + 2 * (out_height > 1), 1 + 2 * (out_width > 1)
    return launches * launch_cycles(height, width, in_channels, out_channels, **mode)
