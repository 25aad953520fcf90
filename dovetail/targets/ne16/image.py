"""Register images of the NE16: their meaning, their faults, their cycles, and weights as the engine reads them.

Sources: see job.py and device.py. Nothing here is the compiler's: it is what the simulated engine goes by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dovetail.records import Record
from dovetail.targets.ne16.job import (
    CHANNELS_IN,
    CHANNELS_OUT,
    EDGE,
    MAXIMUM_PADDING,
    OFFSET_LIMIT,
    OFFSETS,
    PADDED_LINEAR,
    Ne16Padding,
    Register,
    Requantise,
    weight_strides,
)


class RegisterImage(Record):
    """The fields of a register image; sizes in subtiles are as the engine counts."""

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
    padding: Ne16Padding
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


def _halves(word: int) -> tuple[int, int]:
    return word >> 16, word & 0xFFFF


def _quantisation(conf0: int) -> Requantise | None:
    if not conf0 >> 4 & 1:
        return None
    return Requantise(
        scale_bits=8 << (conf0 >> 12 & 3),
        bias=bool(conf0 >> 25 & 1),
        relu=not conf0 >> 23 & 1,
        shift=None if conf0 >> 24 & 1 else conf0 >> 16 & 31,
    )


def parse(words: tuple[int, ...]) -> RegisterImage:
    """Decode a register image (24 unsigned 32-bit words). A remainder of zero means a full subtile."""
    conf0, pad, offset = words[Register.CONF0], words[Register.PADDING], words[Register.WEIGHT_OFFSET]
    mode, linear = conf0 >> 5 & 3, bool(conf0 >> 7 & 1)
    edge_in = EDGE if mode == 2 else EDGE + 2
    tiles_out, tiles_in = _halves(words[Register.NB_CHANNELS])
    tiles_high, tiles_wide = _halves(words[Register.NB_OUT])
    last_out, last_in_channels = _halves(words[Register.REM_CHANNELS])
    last_rows, last_columns = _halves(words[Register.REM_OUT])
    last_rows_in, last_columns_in = _halves(words[Register.REM_IN])
    return RegisterImage(
        weights=words[Register.WEIGHTS],
        infeat=words[Register.INFEAT],
        outfeat=words[Register.OUTFEAT],
        scale=words[Register.SCALE],
        scale_shift=words[Register.SHIFT],
        scale_bias=words[Register.BIAS],
        in_strides=(words[Register.IN_D0], words[Register.IN_D1]),
        out_strides=(words[Register.OUT_D0], words[Register.OUT_D1], words[Register.OUT_D2]),
        weight_strides=(words[Register.WEIGHTS_D0], words[Register.WEIGHTS_D1], words[Register.WEIGHTS_D2]),
        tiles_in=tiles_in,
        tiles_out=tiles_out,
        tiles_high=tiles_high,
        tiles_wide=tiles_wide,
        last_channels_in=last_in_channels or CHANNELS_IN,
        last_channels_out=last_out or (CHANNELS_IN if mode == 1 else CHANNELS_OUT),
        last_height_out=last_rows or EDGE,
        last_width_out=last_columns or EDGE,
        last_height_in=last_rows_in or edge_in,
        last_width_in=last_columns_in or edge_in,
        padding=Ne16Padding(top=pad >> 28 & 15, bottom=pad >> 20 & 15, left=pad >> 16 & 15, right=pad >> 24 & 15),
        padding_value=pad & 0xFF,
        weight_offset=offset - (offset >> 31 << 32),
        filter_mask=words[Register.FILTER_MASK],
        filter_mode=mode,
        linear=linear,
        strided=bool(conf0 >> 8 & 1),
        stream_in=bool(conf0 >> 14 & 1),
        mode16=bool(conf0 >> 3 & 1),
        rounding=bool(conf0 >> 11 & 1),
        weight_bits=(conf0 & 7) + 1,
        out_bits=8 << (conf0 >> 21 & 3),
        requantise=_quantisation(conf0),
    )


def image_problem(image: RegisterImage) -> str:
    """Why the engine, or this model of it, cannot run a register image; the empty string when it can."""
    quant = image.requantise
    tile_out = CHANNELS_IN if image.depthwise else CHANNELS_OUT
    tiles = (image.tiles_in, image.tiles_out, image.tiles_high, image.tiles_wide)
    tests = (
        (image.filter_mode == 3, "filter mode 3 is reserved"),
        (image.mode16, "16-bit inputs are not modelled"),
        (image.rounding, "the rounding bit (CONF0 bit 11) has no effect in the public RTL; round with the bias"),
        (image.filter_mask != 0, "filter masking is not modelled"),
        (image.weight_bits < 2, "weights of 1 bit are not modelled"),
        (image.out_bits not in (8, 32), f"outputs of {image.out_bits} bits are not modelled"),
        (min(tiles) < 1, "a number of subtiles is zero"),
        (image.last_channels_in > CHANNELS_IN, f"an input channel remainder is above {CHANNELS_IN}"),
        (image.last_channels_out > tile_out, f"an output channel remainder is above {tile_out}"),
        (max(image.last_height_out, image.last_width_out) > EDGE, "an output remainder is above 3"),
        (max(image.last_height_in, image.last_width_in) > EDGE + image.kernel - 1, "an input remainder is too big"),
        (quant is None and image.out_bits != 32, "accumulators without requantisation are written as 32 bits"),
        (quant is not None and quant.scale_bits not in (8, 32), "scales must have 8 or 32 bits"),
        (image.stream_in and image.out_bits != 32, "stream-in needs 32-bit outputs"),
        (image.stream_in and image.depthwise, "stream-in does not work in depthwise mode"),
        (image.depthwise and image.in_channels != image.out_channels, "depthwise channel counts differ"),
        (image.linear and image.kernel != 1, "linear mode needs filter mode 1x1"),
        (image.linear and (image.height, image.width) != (1, 1), "linear mode has one output pixel"),
        (image.linear and image.padding_value != 0, PADDED_LINEAR),
        (image.weight_offset not in OFFSETS, f"the weight offset {image.weight_offset} {OFFSET_LIMIT}"),
        (image.strided and tiles[2:] != (1, 1), "stride 2 works on a single spatial subtile"),
        (image.kernel == 1 and any(image.padding), "padding exists for 3x3 only"),
        (max(image.padding) > MAXIMUM_PADDING, f"padding is above {MAXIMUM_PADDING}"),
        (image.out_bits == 32 and image.out_strides[0] != 32, "the innermost output stride must be 32 bytes"),
        (image.linear and image.in_strides[0] != CHANNELS_IN, "the input stride of linear mode must be 16 bytes"),
        (
            image.filter_mode < 3 and image.weight_strides != _expected_weight_strides(image),
            f"weight strides {image.weight_strides} do not fit the packed layout, {_expected_weight_strides(image)}",
        ),
    )
    return next((sentence for wrong, sentence in tests if wrong), "") or _shared_edge_problem(image)


def _expected_weight_strides(image: RegisterImage) -> tuple[int, int, int]:
    return weight_strides(image.kernel, image.depthwise, image.linear, image.weight_bits, image.in_channels)


def _shared_edge_problem(image: RegisterImage) -> str:
    """Pixels the last two subtiles share are read from memory by the last but one, so may not be padded."""
    pad = image.padding
    for count, last, after in (
        (image.tiles_high, image.last_height_in, pad.bottom),
        (image.tiles_wide, image.last_width_in, pad.right),
    ):
        if image.kernel == 3 and count > 1 and min(last, EDGE + 2 - after) < 2:
            return "padding after the last pixel reaches into the last subtile but one, which does not pad"
    return ""


def walk_cycles(image: RegisterImage) -> int:
    """Cycles from the write of TRIGGER (or the event of the job before) to the event, state after state.

    Written after the state machine of rtl/ctrl/ne16_ctrl_fsm.sv on purpose, not with the closed form of job.py: each
    checks the other.
    """
    tile_out = CHANNELS_IN if image.depthwise else CHANNELS_OUT
    cycles, first = 0, 0
    for subtile in range(image.tiles_out):
        channels = image.last_channels_out if subtile == image.tiles_out - 1 else tile_out
        one = _output_cycles(image, channels)
        for group in range(1 if image.depthwise else image.tiles_in):
            inputs = _input_cycles(image, channels, streamed=image.stream_in and group == 0)
            first = first or inputs
            one += inputs + 2  # UPDATEIDX
        cycles += image.tiles_high * image.tiles_wide * one
    return 2 + cycles + max(0, _STEPS_KNOWN - first)  # UPDATEIDX_WAIT, once


_STEPS_KNOWN = 34
"""Cycles from the first LOAD until the address steps of the launch are known: two multiplications one after the other,
of 16 cycles each."""


def _input_cycles(image: RegisterImage, channels: int, streamed: bool) -> int:
    """LOAD, WEIGHTOFFS, STREAMIN and MATRIXVEC of one group of input channels."""
    by_pixel = image.kernel == 1 and not image.linear
    load = 22 if image.linear else 19 if by_pixel else 31
    offsets = 6 + (channels if image.depthwise else 0)
    products = 6 + channels * (1 if by_pixel else image.weight_bits)
    stream = 7 + EDGE * EDGE * _words(image, channels) if streamed else 0
    # with stream-in the weights are asked for in MATRIXVEC, not ahead of it
    return load + offsets + stream + products + (5 if image.stream_in else 0)


def _output_cycles(image: RegisterImage, channels: int) -> int:
    """NORMQUANT_SHIFT, NORMQUANT, NORMQUANT_BIAS and STREAMOUT of one subtile."""
    quant = image.requantise
    cycles = 3 + EDGE * EDGE * _words(image, channels) + 1
    if quant is None:
        return cycles
    cycles += 9 + (channels if quant.scale_bits == 32 else -(-channels // 4)) + (8 if quant.shift is None else 0)
    return cycles + (8 + -(-channels // 8) if quant.bias else -1)


def _words(image: RegisterImage, channels: int) -> int:
    """Words of 32 bytes, or less, of one pixel's outputs."""
    return -(-channels // 8) if image.out_bits == 32 else 1


def unpack_stored(packed: NDArray[np.uint8], bits: int, kernel: int, channels: int, rows: int) -> NDArray[np.uint8]:
    """The unsigned stored weights behind `packed`: (rows, kernel * kernel taps, channels).

    `rows` is C_out and `channels` C_in for a convolution, 1 and C for a depthwise one.
    """
    groups = -(-channels // CHANNELS_IN)
    planes = np.unpackbits(packed.reshape(rows, groups, bits, kernel * kernel, 2), axis=-1, bitorder="little")
    stored = np.packbits(planes.transpose(0, 3, 1, 4, 2), axis=-1, bitorder="little")
    return stored.reshape(rows, kernel * kernel, groups * CHANNELS_IN)[:, :, :channels]


def unpack_linear_stored(packed: NDArray[np.uint8], bits: int, in_channels: int) -> NDArray[np.uint8]:
    """The unsigned stored weights (C_out, C_in) behind the packed weights of linear mode."""
    planes = np.unpackbits(packed.reshape(-1, bits, in_channels // 8), axis=-1, bitorder="little")
    return np.packbits(planes.transpose(0, 2, 1), axis=-1, bitorder="little").reshape(-1, in_channels)
