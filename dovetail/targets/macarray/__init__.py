"""A RISC-V microcontroller with an int8 convolution engine of 8 x 8 multipliers, whose Verilog is in `rtl`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import dovetail.target as dt
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.types import Array
from dovetail.target import layers
from dovetail.targets.macarray.model import REGISTERS, job_cycles

L1, L2 = dt.Memory("L1", base=0x10000000, size=128 << 10), dt.Memory("L2", base=0x1C000000, size=512 << 10)
BASE, HERE = 0x00201000, "dovetail.targets.macarray"
VERILOG = tuple(sorted(Path(__file__).with_name("rtl").glob("*.v")))


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights in blocks of 8 x 8 channels; bias, multiplier and shift of each output channel side by side."""
    layer = layers.layer_of(match)
    outputs, rows, columns, inputs = layer.weights.shape
    padded = np.pad(layer.weights, [(0, -outputs % 8), (0, 0), (0, 0), (0, -inputs % 8)]).astype(np.int8)
    blocks = padded.reshape(-1, 8, rows, columns, padded.shape[3] // 8, 8).transpose(0, 2, 3, 4, 1, 5)
    parameters = np.zeros((len(padded), 4), "<i4")
    parameters[:outputs, :3] = np.stack([layer.bias, layer.multiplier, layer.shift], axis=1)
    arrays = {"weights": blocks, "parameters": parameters}
    return {name: np.ascontiguousarray(array).view(np.uint8).reshape(-1) for name, array in arrays.items()}


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One job."""
    layer = layers.layer_of(match)
    x = layers.image_of(match.type("x"), operands[match.values["x"]])
    y = layers.image_of(match.result, operands["result"])
    bounds = np.array([layer.input_zero_point, layer.output_zero_point, layer.low, layer.high], np.int8)
    return (REGISTERS.command(
        "macarray_start", source=x.address - layer.before[0] * x.row - layer.before[1] * x.pixel, source_row=x.row,
        source_pixel=x.pixel, source_size=x.rows | x.columns << 16, result=y.address, result_row=y.row,
        result_pixel=y.pixel, result_size=y.rows | y.columns << 16, channels=x.channels | y.channels << 16,
        weights=operands["weights"].address, parameters=operands["parameters"].address,
        kernel=sum(n << 4 * i for i, n in enumerate((*layer.kernel, *layer.before, layer.stride[0]))),
        bounds=int(bounds.view("<u4")[0])),)  # fmt: skip


def cycles(match: dt.Match) -> int:
    """Engine cycles of a job."""
    outputs, rows, columns, inputs = layers.layer_of(match).weights.shape
    return job_cycles(match.result.elements // outputs, inputs, outputs, rows * columns)


LIMITS = (*layers.INT8, layers.ONE_IMAGE, layers.NO_GROUPS, layers.kernel_at_most(15, 15), layers.strides_of(1, 2),
          layers.NO_DILATION, *layers.zero_padding_at_most(15), layers.sizes_below(1 << 16),
          layers.DOUBLE_ROUNDING)  # fmt: skip
PATTERNS = layers.requantised("convolution", Conv2d) | layers.requantised("dense", FullyConnected)
ENGINE = dt.Engine(
    name="macarray", memory=L1.name, ideal_macs_per_cycle=64.0,
    offloads=tuple(dt.Offload(name, pattern, LIMITS, pack, commands, cycles, channel_step=8)
                   for name, pattern in PATTERNS.items()),
    driver=(f"{HERE}:driver/macarray.h", f"{HERE}:driver/macarray.c"), prepare="macarray_init", wait="macarray_wait",
    device=REGISTERS.device("macarray", f"{HERE}.model", BASE),
    rtl=dt.Rtl("macarray", VERILOG, dt.RtlPort("apb"), (dt.RtlPort("tcdm", "tcdm_"),),
               macs=f"{HERE}.model:macs_of_registers").device(BASE, 0x100),
)  # fmt: skip
TARGET = dt.Target(
    name="macarray", sentence="RISC-V RV32IMC, 512 KiB L2, 128 KiB L1, DMA, 8x8 MAC array in Verilog (int8)",
    core=dt.Core("rv32imc"), memories=(L2, L1), code=L2.name, values=L2.name, engines=(ENGINE,),
    dma=dt.Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000),
    policies=(dt.Policy("exact", "the engine requantises as TensorFlow Lite Micro does", (), dt.Rounding.DOUBLE),),
)  # fmt: skip
