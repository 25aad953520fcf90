"""Registers of DIANA's two engines, and a job as the driver writes it.

Both engines are HWPEs. Offsets after dianaKUL/pulp-sdk-diana pkg/sdk/dev/install/include/archi/hwme/hwme_v1.h; the
fields of a layer after `Layer_parameters` of eml-eda/match target/diana/digital/src/digital_lib.c. The public sources
name CONF but not what it points to: here it is the layer's fields, one word each, then those the driver's arguments
leave out.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from enum import IntEnum


class Control(IntEnum):
    """Byte offsets of the registers of every HWPE."""

    TRIGGER = 0x00
    ACQUIRE = 0x04
    FINISHED = 0x08
    STATUS = 0x0C
    RUNNING_JOB = 0x10
    SOFT_CLEAR = 0x14


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
    """What a job computes."""

    CONVOLUTION = 0
    DEPTHWISE = 1
    DENSE = 2
    SUM = 3


@dataclass(frozen=True, slots=True)
class Padding:
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


def digital_padding(word: int) -> Padding:
    """The padding of a field of four bits a side."""
    return Padding(word >> 8 & 15, word >> 12 & 15, word >> 4 & 15, word & 15)


def analog_padding(word: int) -> Padding:
    """The padding of a field of two bits a side."""
    return Padding(word >> 2 & 3, word & 3, word >> 6 & 3, word >> 4 & 3)


@dataclass(frozen=True, slots=True)
class Layer:
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


LAYER_WORDS = len(fields(Layer))
"""Words of a layer."""


@dataclass(frozen=True, slots=True)
class Job:
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
    layer: Layer


def task_words(job: Job) -> tuple[int, ...]:
    """A job as the driver takes it: addresses and sizes, then the layer."""
    numbers = (job.weights, job.weight_bytes, job.more, job.operand, job.operand_bytes, job.result, job.result_bytes)
    return (*numbers, *astuple(job.layer))
