"""DIANA's engines as published: registers, jobs and layers; constants as they are read, and back; cycles of jobs.

Registers: both engines are HWPEs. Offsets after dianaKUL/pulp-sdk-diana pkg/sdk/dev/install/include/archi/hwme,
hwme_v1.h; the fields of a layer after `Layer_parameters` of eml-eda/match target/diana/digital/src/digital_lib.c. The
public sources name CONF but not what it points to: here it is the layer's fields, one word each, then those the
driver's arguments leave out.

Constants: after pulp-platform/dory Hardware_targets/Diana/Diana_TVM: HW_Parser.py and C_Parser.py (digital), Diana_SoC
and Diana_TVM weights_encoder_analog.py (analog). Bytes of digital constants are swapped in words of 32 bits.

Cycles: the two public models, which disagree by up to 37 % per convolution and 3 times on dense layers. Neither is
silicon. eml-eda/plinio (diana_latency.py); eml-eda/match target/diana/digital/cost_model.py, as of e8eaf86^.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields
from enum import IntEnum
from math import ceil

import numpy as np

from dovetail.ir.types import Array
from dovetail.records import Record
from dovetail.sim.launch_queue import Control as Control
from dovetail.target import Best, Macs


class Digital(IntEnum):
    """Byte offsets of the digital engine's job registers: those that jobs use."""

    WT_CONV_ADDR = 0x40
    WT_CONV_N = 0x44
    WT_FC_ADDR = 0x48
    WT_FC_N = 0x4C
    ACT_ADDR = 0x58
    ACT_N = 0x5C
    CONF_ADDR = 0x60
    CONF_N = 0x64
    ACT_A_ADDR = 0x74
    OUT_DATA = 0x7C
    OUT_DATA_N = 0x80
    NB_TILE = 0x84


class Analog(IntEnum):
    """Byte offsets of the analog engine's job registers: those that jobs use."""

    WT_CONV_ADDR = 0x40
    WT_SIMD_ADDR = 0x44
    ACT_ADDR = 0x50
    ACT_N = 0x54
    CONF_ADDR = 0x58
    CONF_N = 0x5C
    OUT_DATA = 0x60
    OUT_DATA_N = 0x64
    NB_TILE = 0x68


class Operation(IntEnum):
    """Kind of a job."""

    CONVOLUTION = 0
    DEPTHWISE = 1
    DENSE = 2
    SUM = 3


class DianaPadding(Record):
    """Pixels of zeros around the operand."""

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0

    def digital(self) -> int:
        """The digital engine's field: four bits a side."""
        return self.right | self.left << 4 | self.top << 8 | self.bottom << 12

    def analog(self) -> int:
        """The analog engine's field: two bits a side."""
        return self.bottom | self.top << 2 | self.right << 4 | self.left << 6


def digital_padding(word: int) -> DianaPadding:
    """The padding of a field of four bits a side."""
    return DianaPadding(word >> 8 & 15, word >> 12 & 15, word >> 4 & 15, word & 15)


def analog_padding(word: int) -> DianaPadding:
    """The padding of a field of two bits a side."""
    return DianaPadding(word >> 2 & 3, word & 3, word >> 6 & 3, word >> 4 & 3)


class JobLayer(Record):
    """A layer as CONF says it: sizes in elements, distances in bytes."""

    operation: int
    c: int
    """Channels of the operand."""
    k: int
    """Channels of the result."""
    cx: int
    """Columns of the operand, without padding."""
    cy: int
    fx: int
    fy: int
    ox: int
    """Columns of the result."""
    oy: int
    activation_function: int
    """1: nothing below 0."""
    output_shift: int
    dilation: int
    stride: int
    """One less than the stride."""
    ox_unroll: int
    """Analog: columns computed at a time."""
    padding: int
    gain: int
    """Analog: bits below the converter's."""
    in_row: int
    """Between rows of the operand."""
    in_plane: int
    """Between its channels."""
    second_row: int
    second_plane: int
    out_row: int
    out_plane: int


LAYER_WORDS = len(fields(JobLayer))
"""Words of a layer."""


class DianaJob(Record):
    """A start of an engine: what the driver writes to its registers, and the layer."""

    weights: int
    """Address, as all of these; 0 where there is none."""
    weight_bytes: int
    more: int
    """Digital: the second operand of a sum. Analog: scales and offsets."""
    operand: int
    operand_bytes: int
    result: int
    result_bytes: int
    layer: JobLayer


def task_words(job: DianaJob) -> tuple[int, ...]:
    """A job as the driver takes it: addresses and sizes, then the layer."""
    numbers = (job.weights, job.weight_bytes, job.more, job.operand, job.operand_bytes, job.result, job.result_bytes)
    return (*numbers, *astuple(job.layer))


ROWS, COLUMNS = 1152, 512
"""Rows and columns of the analog array."""
ARRAY_CYCLES = 70e-9 * 260e6
"""Cycles of one use of the analog array: 70 ns at PLiNIO's 260 MHz."""
LEAST_ROWS = 64
"""Rows of the array each tap takes at least: its blocks have so many."""
UNROLLS = (1, 2, 4, 8)
"""Columns of a result the analog array may compute at a time."""


class Shape(Record):
    """A layer's computation, sizes in elements."""

    inputs: int
    """Channels of the operand, all groups."""
    outputs: int
    rows: int
    columns: int
    """Rows and columns of the result."""
    kernel: tuple[int, int]
    """Rows and columns of the window."""
    groups: int = 1


Cost = Callable[[Shape], float]
"""Cycles of a layer."""


def plinio_digital(shape: Shape) -> float:
    """Cycles on the 16x16 array, 16 columns by 16 channels at a time, and its transfers at 8 bytes per cycle."""
    height, width = shape.kernel
    blocks = ceil(shape.outputs / shape.groups / 16) * ceil(shape.columns / 16)
    work = blocks * shape.inputs * shape.rows * height * width
    return work + shape.columns * shape.rows * (shape.outputs + shape.inputs) / 8


def best(products: Macs, model: str) -> Best:
    """The most the digital engine makes of a kind of layer."""
    if products.kind == "DepthwiseConv2d":
        return Best(16, "depthwise: channels one after the other", (1, 1, 1, 16))
    if products.pixels == 1 and model == "plinio":
        return Best(16, "one of 16 columns", (1, 16, 1, 1))
    return Best(256, "", (1, 16, 1, 16))


def match_digital(shape: Shape) -> float:
    """Cycles of a convolution or dense layer alone: rows in which p of the window's rows are padded need less."""
    height, width = shape.kernel
    side, cycles = (height - 1) // 2, 0
    for pad in range(side + 1):
        rows = shape.rows - 2 * side if pad == 0 else 2
        loop = shape.inputs * (height - pad) * width + 2 * shape.inputs * (height - pad) + 23
        cycles += ceil(shape.outputs * rows * shape.columns / 256) * loop
    return float(cycles)


def plinio_analog(shape: Shape) -> float:
    """Cycles to load the array's rows and to use it for every group of columns of the result."""
    height, width = shape.kernel
    passes = ceil(shape.outputs / COLUMNS) * ceil(shape.inputs / 128) * shape.columns * shape.rows
    return 8 * shape.inputs * height * width + passes / unroll(shape) * ARRAY_CYCLES


def unroll(shape: Shape) -> int:
    """Columns of the result computed at a time: the most for which copies of the window fit the array."""
    height, width = shape.kernel
    depth = max(LEAST_ROWS, shape.inputs) * height
    fitting = [n for n in UNROLLS if n * shape.outputs <= COLUMNS and (n + width - 1) * depth <= ROWS]
    return max(fitting, default=1)


def sum_cycles(elements: int) -> float:
    """Cycles of an element-wise sum. No public model has it: three bytes per element at PLiNIO's 8 per cycle."""
    return 3 * elements / 8


DIGITAL: dict[str, Cost] = {"plinio": plinio_digital, "match": match_digital}
"""The models of convolutions and dense layers on the digital engine. Depthwise ones are PLiNIO's in both."""


LANES = 16
"""Channels of a block."""
SPREAD = 4
"""A depthwise channel is the first of so many, the others zero."""
LINES = 128
"""Columns of the analog array that are written together."""


def swapped(data: Array) -> Array:
    """Bytes with each word of four the other way round; its own inverse."""
    return np.ascontiguousarray(data.reshape(-1, 4)[:, ::-1]).reshape(-1)


def pack_convolution(weights: Array, bias: Array) -> Array:
    """Per 16 channels: weights (Cin, Kh, Kw, 16), then four planes of 16 bytes with the biases' bytes, lowest first.

    Args:
        weights: int8 [K, Kh, Kw, C].
        bias: int32 [K].
    """
    channels, height, width, depth = weights.shape
    spare = -channels % LANES
    padded = np.pad(weights, ((0, spare), (0, 0), (0, 0), (0, 0)))
    blocks = padded.reshape(-1, LANES, height, width, depth).transpose(0, 4, 2, 3, 1)
    return _with_biases(blocks, bias)


def pack_depthwise(weights: Array, bias: Array) -> Array:
    """As a convolution of one input channel with three channels of zeros behind each: four times the memory.

    Args:
        weights: int8 [1, Kh, Kw, C].
        bias: int32 [C].
    """
    _, height, width, channels = weights.shape
    spread = np.zeros((channels * SPREAD, height, width, 1), np.int8)
    spread[::SPREAD, :, :, 0] = weights[0].transpose(2, 0, 1)
    wide = np.zeros(channels * SPREAD, np.int32)
    wide[::SPREAD] = bias
    return pack_convolution(spread, wide)


def pack_dense(weights: Array, bias: Array) -> Array:
    """Per 16 results: weights (Cin/16, 16 results, 16 operands), both padded to 16, then the biases' planes.

    Args:
        weights: int8 [K, C].
        bias: int32 [K].
    """
    padded = np.pad(weights, ((0, -weights.shape[0] % LANES), (0, -weights.shape[1] % LANES)))
    blocks = padded.reshape(-1, LANES, padded.shape[1] // LANES, LANES).transpose(0, 2, 1, 3)
    return _with_biases(blocks, bias)


def _with_biases(blocks: Array, bias: Array) -> Array:
    count = blocks.shape[0]
    wide = np.pad(bias.astype("<i4"), (0, count * LANES - bias.size)).view(np.uint8)
    planes = wide.reshape(count, LANES, 4).transpose(0, 2, 1).reshape(count, -1)
    flat = np.ascontiguousarray(blocks).reshape(count, -1).view(np.uint8)
    return swapped(np.concatenate([flat, planes], axis=1).reshape(-1))


def block_bytes(taps: int, depth: int) -> int:
    """Bytes of a block of 16 channels with so many taps and (for dense layers, padded) input channels."""
    return LANES * taps * depth + 4 * LANES


def unpack_blocks(data: Array, taps: int, depth: int) -> tuple[Array, Array]:
    """Stored weights int8 [blocks, depth * taps * 16] and biases int32 [blocks, 16] of swapped constants."""
    blocks = swapped(data).reshape(-1, block_bytes(taps, depth))
    weights, planes = blocks[:, : -4 * LANES].view(np.int8), blocks[:, -4 * LANES :].reshape(-1, 4, LANES)
    biases = sum(planes[:, place].astype(np.uint32) << np.uint32(8 * place) for place in range(4))
    return weights, np.asarray(biases).view(np.int32)


def array_rows(taps: int, depth: int) -> int:
    """Rows of the analog array that a window takes."""
    return taps * max(LEAST_ROWS, depth)


def array_columns(channels: int) -> int:
    """Columns of the analog array that are written for so many channels."""
    return -(-channels // LINES) * LINES


def flipped(rows: int, columns: int) -> Array:
    """Which cells of the array hold a weight with the other sign, bool [rows, columns]: even columns in blocks 0 to 5
    and 12 to 17 of 64 rows, odd ones in blocks 0 to 8."""
    block = np.arange(rows)[:, None] // 64
    even = np.arange(columns)[None, :] % 2 == 0
    return np.where(even, (block < 6) | (block > 11), block <= 8)


def pack_ternary(weights: Array) -> Array:
    """Two bits a weight, 1 as 2 and -1 as 1: rows (Kh, Kw, Cin padded to 64) from the last to the first, of 128 columns
    or a multiple; four columns to a byte, the first lowest.

    Args:
        weights: int8 [K, Kh, Kw, C] of -1, 0 and 1.
    """
    channels, height, width, depth = weights.shape
    taps = height * width
    grid = np.zeros((taps, max(LEAST_ROWS, depth), array_columns(channels)), np.int8)
    grid[:, :depth, :channels] = weights.reshape(channels, taps, depth).transpose(1, 2, 0)
    cells = grid.reshape(array_rows(taps, depth), -1)[::-1]
    cells = np.where(flipped(*cells.shape), -cells, cells)
    codes = np.where(cells == 1, 2, np.where(cells == -1, 1, 0)).astype(np.uint8).reshape(-1, 4)
    return np.asarray((codes << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1), np.uint8)


def unpack_ternary(data: Array, rows: int, columns: int) -> Array:
    """Weights int8 [rows, columns] as the window's taps and channels have them.

    Raises:
        ValueError: a cell holds 3, which is no weight.
    """
    codes = (data.reshape(-1, 1) >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(rows, columns)
    if (codes == 3).any():
        raise ValueError("a cell of the array holds 3, which is no weight")
    cells = np.array([0, -1, 1, 0], np.int8)[codes]
    return np.asarray(np.where(flipped(rows, columns), -cells, cells)[::-1], np.int8)


def pack_scales(scale: Array, offset: Array, channels: int) -> Array:
    """Scales, then offsets, of 16 bits each, for every channel."""
    rows = [np.broadcast_to(array, channels).astype("<i2") for array in (scale, offset)]
    return np.ascontiguousarray(np.concatenate(rows)).view(np.uint8)
