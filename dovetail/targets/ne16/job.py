"""NE16 jobs: what one engine launch needs, the register image that says it, and what an image means.

Sources: register numbers and fields, pulp-platform/pulp-nnx ne16/hal/ne16_task_defs.h; their meaning,
gvsoc/gvsoc-pulp pulp/ne16/src (the FSM model) and pulp-platform/ne16 rtl/ctrl/ne16_ctrl.sv (the RTL);
the splitting of stride-2 layers, pulp-nnx src/pulp_nnx_ne16.c.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

CHANNELS_IN = 16
"""Input channels the engine takes in together (TP_IN)."""
CHANNELS_OUT = 32
"""Output channels of one subtile, 16 in depthwise mode (TP_OUT)."""
EDGE = 3
"""Output pixels along one edge of a subtile."""
MAXIMUM_PADDING = 2
"""Most padded pixels on one side (pulp-nnx NE16_MAX_PAD)."""
REGISTER_COUNT = 24
"""Task registers of one launch."""

(_WEIGHTS, _INFEAT, _OUTFEAT, _SCALE, _SHIFT, _BIAS, _IN_D0, _IN_D1, _IN_D2, _OUT_D0, _OUT_D1, _OUT_D2,
 _WEIGHTS_D0, _WEIGHTS_D1, _WEIGHTS_D2, _REM_CHANNELS, _REM_OUT, _REM_IN, _NB_CHANNELS, _NB_OUT, _PADDING,
 _WEIGHT_OFFSET, _FILTER_MASK, _CONF0) = range(REGISTER_COUNT)

_MASK32 = 0xFFFFFFFF


class Padding(NamedTuple):
    """Padded pixels on each side of the input."""

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0


NO_PADDING = Padding()
"""Padding on no side."""


@dataclass(frozen=True, slots=True)
class Requantise:
    """How 32-bit accumulators become outputs: ``(accumulator * scale + bias) >> shift``, clipped."""

    scale_bits: int = 8
    """Bits of the unsigned scale of each output channel: 8 or 32."""
    bias: bool = True
    """Whether an int32 per output channel is added before the shift."""
    relu: bool = True
    """True: clip to 0..2**out_bits-1; False: clip to the signed range."""
    shift: int | None = 0
    """Right shift of every channel, 0..31; None: one byte per output channel at ``Job.scale_shift``."""


@dataclass(frozen=True, slots=True)
class Job:
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
    padding: Padding = NO_PADDING
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
    def launch_height(self) -> int:
        """Output rows one hardware launch walks over, those skipped at stride 2 included."""
        return (3 if self.out_height > 1 else 1) if self.stride == 2 else self.out_height

    @property
    def launch_width(self) -> int:
        """Output columns one hardware launch walks over, those skipped at stride 2 included."""
        return (3 if self.out_width > 1 else 1) if self.stride == 2 else self.out_width

    @property
    def missing_rows(self) -> int:
        """Padded rows the last outputs really need below the input, 0..padding.bottom."""
        needed = (self.out_height - 1) * self.stride + self.kernel
        return max(0, needed - self.padding.top - self.in_height)

    @property
    def missing_columns(self) -> int:
        """Padded columns the last outputs really need right of the input, 0..padding.right."""
        needed = (self.out_width - 1) * self.stride + self.kernel
        return max(0, needed - self.padding.left - self.in_width)


def last_in(job: Job, launch_out: int, missing: int) -> int:
    """Input pixels the last subtile along one axis loads (register REM2).

    Padding after the last pixel comes for free as zeros: the subtile just loads less. Any other padding
    value, and every stride-2 launch of more than one output, needs the full edge loaded and overwritten
    (gvsoc ne16_load.cpp, RTL: implicit padding is always zero, explicit padding is `padding_value`).
    """
    last_out = (launch_out - 1) % EDGE + 1
    full = last_out + job.kernel - 1
    explicit = missing and last_out == EDGE and (job.padding_value != 0 or job.stride == 2)
    return full if explicit else full - missing


def problem(job: Job) -> str:
    """Why the engine cannot do the job, in one sentence; the empty string when it can."""
    requantise, padding = job.requantise, job.padding
    tests = (
        (job.kernel not in (1, 3), f"the kernel is {job.kernel}, the engine has 1 and 3"),
        (job.stride not in (1, 2), f"the stride is {job.stride}, the engine has 1 and 2"),
        (not 2 <= job.weight_bits <= 8, f"weights have {job.weight_bits} bits, the engine takes 2 to 8"),
        (job.out_bits not in (8, 32), f"outputs have {job.out_bits} bits, the engine writes 8 or 32"),
        (min(job.in_height, job.in_width, job.in_channels, job.out_height, job.out_width, job.out_channels) < 1,
         "a size is below 1"),
        (requantise is None and job.out_bits != 32, "accumulators without requantisation are written as 32 bits"),
        (requantise is not None and requantise.scale_bits not in (8, 32), "scales must have 8 or 32 bits"),
        (requantise is not None and requantise.shift is not None and not 0 <= requantise.shift <= 31,
         "the right shift must be 0 to 31"),
        (job.depthwise and job.kernel != 3, "depthwise mode exists for 3x3 only"),
        (job.depthwise and job.in_channels != job.out_channels, "depthwise needs as many output as input channels"),
        (job.stream_in and job.out_bits != 32, "stream-in needs 32-bit outputs"),
        (job.stream_in and job.depthwise, "stream-in does not work in depthwise mode"),
        (job.stream_in and job.stride == 2 and any(size > 1 and size % 2 for size in (job.out_height, job.out_width)),
         "stream-in at stride 2 needs even output sizes"),
        (job.kernel == 1 and any(padding), "padding exists for 3x3 only"),
        (max(padding) > MAXIMUM_PADDING or min(padding) < 0, f"padding must be 0 to {MAXIMUM_PADDING}"),
        (not 0 <= job.padding_value <= 255, "the padding value must be 0 to 255"),
        (job.stride == 2 and job.out_pixel_stride % 2 == 1, "stride 2 needs an even output pixel stride"),
        (job.stride == 2 and job.out_row_stride % 2 == 1, "stride 2 needs an even output row stride"),
        (job.missing_rows > padding.bottom or job.missing_columns > padding.right,
         "the outputs need more input pixels than there are"),
    )  # fmt: skip
    for wrong, sentence in tests:
        if wrong:
            return sentence
    return _linear_problem(job) or _edge_problem(job)


def _linear_problem(job: Job) -> str:
    if not job.linear:
        return ""
    if job.kernel != 1 or job.stride != 1 or job.out_height != 1 or job.out_width != 1:
        return "linear mode is for one output pixel and kernel 1"
    return "linear mode needs a multiple of 16 input channels" if job.in_channels % CHANNELS_IN else ""


def _edge_problem(job: Job) -> str:
    """The padding after the last pixel may not reach into the last subtile but one, which does not pad."""
    for launch_out, missing in ((job.launch_height, job.missing_rows), (job.launch_width, job.missing_columns)):
        last_out = (launch_out - 1) % EDGE + 1
        if missing and job.padding_value and last_out != EDGE:
            return (f"padding below or right of the input with the value {job.padding_value} needs an output size "
                    "that is a multiple of 3 (or zero as value)")  # fmt: skip
        if missing > last_out and launch_out > EDGE:
            return f"{missing} padded pixels after the input reach beyond the last subtile of {last_out} outputs"
    return ""


def _pair(high: int, low: int) -> int:
    return (high << 16) | low


def _halves(word: int) -> tuple[int, int]:
    return word >> 16, word & 0xFFFF


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


def _conf0(job: Job) -> int:
    word = (job.weight_bits - 1) | 1 << 15 | {8: 0, 32: 2}[job.out_bits] << 21
    word |= {(3, False): 0, (3, True): 1, (1, False): 2}[job.kernel, job.depthwise] << 5
    word |= job.linear << 7 | (job.stride == 2) << 8 | job.stream_in << 14
    if job.requantise is None:
        return word | 1 << 23
    quant = job.requantise
    word |= 1 << 4 | {8: 0, 32: 2}[quant.scale_bits] << 12 | (not quant.relu) << 23 | quant.bias << 25
    return word | (1 << 24 if quant.shift is None else quant.shift << 16)


def registers(job: Job) -> tuple[int, ...]:
    """The 24 task registers (unsigned 32-bit) of the job.

    For a stride-2 job: the registers all launches of its grid share, with the pointers of the first and
    the padding of every edge. Raises ValueError when `problem` finds one.
    """
    reason = problem(job)
    if reason:
        raise ValueError(f"the NE16 cannot run this job: {reason}")
    words = job.in_channels // CHANNELS_IN if job.linear else job.in_channels
    tile_out = CHANNELS_IN if job.depthwise else CHANNELS_OUT
    height, width, halve = job.launch_height, job.launch_width, job.stride == 2
    pad = job.padding
    first = job.infeat - pad.top * job.in_row_stride - pad.left * job.in_pixel_stride
    image = (
        job.weights, first & _MASK32, job.outfeat, job.scale, job.scale_shift, job.scale_bias,
        CHANNELS_IN if job.linear else job.in_pixel_stride, job.in_row_stride, 0,
        32, job.out_pixel_stride >> halve, job.out_row_stride >> halve,
        *weight_strides(job.kernel, job.depthwise, job.linear, job.weight_bits, job.in_channels),
        _pair(_last(job.out_channels, tile_out), _last(words, CHANNELS_IN)),
        _pair(_last(height, EDGE), _last(width, EDGE)),
        _pair(last_in(job, height, job.missing_rows), last_in(job, width, job.missing_columns)),
        _pair(-(-job.out_channels // tile_out), -(-words // CHANNELS_IN)),
        _pair(-(-height // EDGE), -(-width // EDGE)),
        pad.top << 28 | job.missing_columns << 24 | job.missing_rows << 20 | pad.left << 16 | job.padding_value,
        job.offset & _MASK32, 0, _conf0(job),
    )  # fmt: skip
    return tuple(int(word) for word in image)


def _edge_padding(word: int, row: int, column: int, rows: int, columns: int) -> int:
    """The padding register of one launch of a grid: only what touches its own edges."""
    keep = 0xFFFF
    keep |= 0xF0000000 if row == 0 else 0
    keep |= 0x0F000000 if column == columns - 1 else 0
    keep |= 0x00F00000 if row == rows - 1 else 0
    keep |= 0x000F0000 if column == 0 else 0
    return word & keep


def launches(job: Job) -> Iterator[tuple[int, ...]]:
    """The register image of every hardware launch of the job, in the order the C driver issues them.

    At stride 2 each launch makes 2x2 outputs; with an odd output size the second row (column) of launches
    starts one output early and repeats one, as the public driver does.
    """
    image = registers(job)
    rows, columns = job.grid
    for row in range(rows):
        for column in range(columns):
            down = 2 * row - (row > 0) * (job.out_height % 2)
            right = 2 * column - (column > 0) * (job.out_width % 2)
            words = list(image)
            words[_INFEAT] = (image[_INFEAT] + 2 * (down * job.in_row_stride + right * job.in_pixel_stride)) & _MASK32
            words[_OUTFEAT] = image[_OUTFEAT] + down * job.out_row_stride + right * job.out_pixel_stride
            words[_PADDING] = _edge_padding(image[_PADDING], row, column, rows, columns)
            yield tuple(words)


def task_words(job: Job) -> tuple[int, ...]:
    """The constant the C driver's ``ne16_start`` takes: 25 words, or 30 when the job is a grid of launches.

    Words 0..23 are `registers`. Word 24 is 0 for a single launch, else rows << 16 | columns of the grid,
    followed by the steps in bytes to the next column (input, output) and to the next row (input, output),
    and by a word whose bit 0 (bit 1) says that the first step between columns (rows) is half as long.
    """
    rows, columns = job.grid
    if rows * columns == 1:
        return (*registers(job), 0)
    return (
        *registers(job), _pair(rows, columns),
        4 * job.in_pixel_stride, 2 * job.out_pixel_stride, 4 * job.in_row_stride, 2 * job.out_row_stride,
        job.out_width % 2 | job.out_height % 2 << 1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """What one register image tells the engine, field by field; sizes in subtiles are as the engine counts."""

    weights: int
    infeat: int
    """Address of the first pixel, padded ones included: may lie before the image."""
    outfeat: int
    scale: int
    scale_shift: int
    scale_bias: int
    in_strides: tuple[int, int]
    """Bytes between pixels and between rows."""
    out_strides: tuple[int, int, int]
    """Bytes between groups of eight 32-bit channels, between pixels, between rows."""
    weight_strides: tuple[int, int, int]
    tiles_in: int
    """Groups of 16 input channels (256 in linear mode)."""
    tiles_out: int
    tiles_high: int
    tiles_wide: int
    last_channels_in: int
    """Channels of the last group; groups of 16 channels in linear mode."""
    last_channels_out: int
    last_height_out: int
    last_width_out: int
    last_height_in: int
    last_width_in: int
    padding: Padding
    padding_value: int
    weight_offset: int
    filter_mask: int
    filter_mode: int
    """0: 3x3, 1: depthwise 3x3, 2: 1x1, 3: reserved."""
    linear: bool
    strided: bool
    stream_in: bool
    mode16: bool
    rounding: bool
    weight_bits: int
    out_bits: int
    requantise: Requantise | None

    @property
    def depthwise(self) -> bool:
        """Whether each output channel sees only its own input channel."""
        return self.filter_mode == 1

    @property
    def kernel(self) -> int:
        """Rows and columns of the filter."""
        return 1 if self.filter_mode == 2 else 3

    @property
    def in_channels(self) -> int:
        """Input channels."""
        channels = (self.tiles_in - 1) * CHANNELS_IN + self.last_channels_in
        return channels * CHANNELS_IN if self.linear else channels

    @property
    def out_channels(self) -> int:
        """Output channels."""
        return (self.tiles_out - 1) * (CHANNELS_IN if self.depthwise else CHANNELS_OUT) + self.last_channels_out

    @property
    def height(self) -> int:
        """Output rows walked over, those a strided launch skips included."""
        return (self.tiles_high - 1) * EDGE + self.last_height_out

    @property
    def width(self) -> int:
        """Output columns walked over, those a strided launch skips included."""
        return (self.tiles_wide - 1) * EDGE + self.last_width_out


def _quantisation(conf0: int) -> Requantise | None:
    if not conf0 >> 4 & 1:
        return None
    return Requantise(
        scale_bits=8 << (conf0 >> 12 & 3),
        bias=bool(conf0 >> 25 & 1),
        relu=not conf0 >> 23 & 1,
        shift=None if conf0 >> 24 & 1 else conf0 >> 16 & 31,
    )


def parse(words: tuple[int, ...]) -> Launch:
    """What a register image (24 unsigned 32-bit words) says. A remainder of zero means a full subtile."""
    conf0, pad, offset = words[_CONF0], words[_PADDING], words[_WEIGHT_OFFSET]
    mode, linear = conf0 >> 5 & 3, bool(conf0 >> 7 & 1)
    edge_in = EDGE if mode == 2 else EDGE + 2
    tiles_out, tiles_in = _halves(words[_NB_CHANNELS])
    tiles_high, tiles_wide = _halves(words[_NB_OUT])
    last_out, last_in_channels = _halves(words[_REM_CHANNELS])
    last_rows, last_columns = _halves(words[_REM_OUT])
    last_rows_in, last_columns_in = _halves(words[_REM_IN])
    return Launch(
        weights=words[_WEIGHTS], infeat=words[_INFEAT], outfeat=words[_OUTFEAT],
        scale=words[_SCALE], scale_shift=words[_SHIFT], scale_bias=words[_BIAS],
        in_strides=(words[_IN_D0], words[_IN_D1]),
        out_strides=(words[_OUT_D0], words[_OUT_D1], words[_OUT_D2]),
        weight_strides=(words[_WEIGHTS_D0], words[_WEIGHTS_D1], words[_WEIGHTS_D2]),
        tiles_in=tiles_in, tiles_out=tiles_out, tiles_high=tiles_high, tiles_wide=tiles_wide,
        last_channels_in=last_in_channels or CHANNELS_IN,
        last_channels_out=last_out or (CHANNELS_IN if mode == 1 else CHANNELS_OUT),
        last_height_out=last_rows or EDGE, last_width_out=last_columns or EDGE,
        last_height_in=last_rows_in or edge_in, last_width_in=last_columns_in or edge_in,
        padding=Padding(top=pad >> 28 & 15, bottom=pad >> 20 & 15, left=pad >> 16 & 15, right=pad >> 24 & 15),
        padding_value=pad & 0xFF, weight_offset=offset - (offset >> 31 << 32), filter_mask=words[_FILTER_MASK],
        filter_mode=mode, linear=linear, strided=bool(conf0 >> 8 & 1), stream_in=bool(conf0 >> 14 & 1),
        mode16=bool(conf0 >> 3 & 1), rounding=bool(conf0 >> 11 & 1), weight_bits=(conf0 & 7) + 1,
        out_bits=8 << (conf0 >> 21 & 3), requantise=_quantisation(conf0),
    )  # fmt: skip
