"""A RISC-V microcontroller with an int8 convolution engine of 8 x 8 multipliers, whose Verilog is in `rtl`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

import dovetail.target as dt
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array
from dovetail.legalize import average_pool_in_channels, pools_as_depthwise
from dovetail.target import layers
from dovetail.targets.macarray.model import REGISTERS, JobKind, best, job_cycles

L1, L2 = dt.Memory("L1", base=0x10000000, size=128 << 10), dt.Memory("L2", base=0x1C000000, size=512 << 10)
BASE, HERE = 0x00201000, "dovetail.targets.macarray"


def kind_of(match: dt.Match) -> JobKind:
    """The kind of a tile's job."""
    if not match.has("layer"):
        return JobKind.SUM
    return JobKind.DEPTHWISE if layers.linear_of(match).is_channelwise else JobKind.CONVOLUTION


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights in blocks of 8 x 8 channels, or of 8; bias, multiplier and shift of each output channel side by side."""
    if (kind := kind_of(match)) is JobKind.SUM:
        scales = np.pad(layers.addition_of(match).scales, [(0, 5), (1, 1)])
        return {"parameters": scales.astype("<i4").view(np.uint8).reshape(-1)}
    layer, lanes = layers.layer_of(match), 1 if kind is JobKind.DEPTHWISE else 8
    outputs, rows, columns, inputs = layer.weights.shape
    padded = np.pad(layer.weights, [(0, -outputs % lanes), (0, 0), (0, 0), (0, -inputs % 8)]).astype(np.int8)
    blocks = padded.reshape(-1, lanes, rows, columns, -(-inputs // 8), 8)
    arrays = {"weights": blocks.transpose((0, 2, 3, 4, 1, 5) if lanes == 8 else (4, 2, 3, 0, 1, 5))}
    numbers = np.stack([layer.bias, layer.multiplier, layer.shift], axis=1).astype("<i4")
    arrays["parameters"] = np.pad(numbers, [(0, -len(numbers) % 8), (0, 1)])
    return {name: np.ascontiguousarray(array).view(np.uint8).reshape(-1) for name, array in arrays.items()}


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One job."""
    kind, names = kind_of(match), match.values
    x = second = layers.image_of(match.type("x"), operands[names["x"]])
    y = layers.image_of(match.result, operands["result"])
    layer: layers.Layer | layers.Addition
    if kind is JobKind.SUM:
        layer = layers.addition_of(match)
        second = layers.image_of(match.type("other"), operands[names["other"]])
        walk, other, weights = (2, 1, 0, 0, 1), layer.other_zero_point, 0
    else:
        layer, weights = layers.layer_of(match), operands["weights"].address
        walk, other = (*layer.kernel, *layer.before, layer.stride[0]), 0
    bounds = np.array([layer.input_zero_point, layer.output_zero_point, layer.low, layer.high], np.int8)
    return (REGISTERS.command(
        "macarray_start", source=x.address - walk[2] * x.row - walk[3] * x.pixel, source_row=x.row,
        source_pixel=x.pixel, source_size=x.rows | x.columns << 16, second=second.address, second_row=second.row,
        second_pixel=second.pixel, result=y.address, result_row=y.row, result_pixel=y.pixel,
        result_size=y.rows | y.columns << 16, channels=x.channels | y.channels << 16, weights=weights,
        parameters=operands["parameters"].address, bounds=int(bounds.view("<u4")[0]),
        kernel=sum(n << 4 * i for i, n in enumerate((*walk, kind))) | (other & 255) << 24),)  # fmt: skip


def cycles(match: dt.Match) -> int:
    """Engine cycles of a job."""
    kind, x = kind_of(match), match.type("x").shape
    window = layers.PIXEL if kind is JobKind.SUM else layers.window_of(match)
    return job_cycles(kind, x, match.result.shape, window, match.within.get(match.values["x"], x)[-1])


WINDOWS = (layers.kernel_at_most(15, 15), layers.strides_of(1, 2))
LIMITS = (*layers.INT8, layers.ONE_IMAGE, *WINDOWS, layers.NO_DILATION,
          *layers.zero_padding_at_most(15), layers.sizes_below(1 << 16), layers.DOUBLE_ROUNDING)  # fmt: skip
KINDS = (("convolution", Conv2d, layers.NO_GROUPS), ("depthwise convolution", DepthwiseConv2d, layers.NO_MULTIPLIER),
         ("dense", FullyConnected, layers.NO_GROUPS))  # fmt: skip
PATTERNS = [(name, pattern, (*LIMITS, limit)) for given, operator, limit in KINDS
            for name, pattern in layers.requantised(given, operator).items()]  # fmt: skip
SUM = ("addition", layers.ADDITION, (*layers.ADDITION_LIMITS, layers.ONE_IMAGE, layers.sizes_below(1 << 16)))
POOL = dt.Rewrite("pools", pools_as_depthwise(partial(layers.keeps, WINDOWS), dt.Rounding.DOUBLE), lsb=0)
# a part more of a pool takes the core as long as 278 bytes of it
PART = dt.Rewrite("parts", average_pool_in_channels(lambda x: round((x.elements / 278) ** 0.5), 8), lsb=0)
ENGINE = dt.Engine(
    name="macarray", memory=L1.name, ideal_macs_per_cycle=64.0, best=best,
    offloads=tuple(dt.Offload(name, pattern, limits, pack, commands, cycles, channel_step=8)
                   for name, pattern, limits in (*PATTERNS, SUM)),
    driver=(f"{HERE}:driver/macarray.h", f"{HERE}:driver/macarray.c"), prepare="macarray_init", wait="macarray_wait",
    device=REGISTERS.device("macarray", f"{HERE}.model", BASE), queue=1, launching=45,
    rtl=dt.Rtl("macarray", tuple(sorted(Path(__file__).with_name("rtl").glob("*.v"))), dt.RtlPort("apb"),
               (dt.RtlPort("tcdm", "tcdm_"),), macs=f"{HERE}.model:macs_of_registers").device(BASE, 0x100))  # fmt: skip
TARGET = dt.Target(
    name="macarray", sentence="RISC-V RV32IMC, 512 KiB L2, 128 KiB L1, DMA, 8x8 MAC array in Verilog (int8)",
    core=dt.Core("rv32imc"), memories=(L2, L1), code=L2.name, values=L2.name, engines=(ENGINE,),
    policies=(dt.Policy("exact", "it requantises as TensorFlow Lite Micro does", (POOL, PART), dt.Rounding.DOUBLE),),
    dma=dt.Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000))  # fmt: skip
