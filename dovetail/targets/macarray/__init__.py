"""A RISC-V microcontroller with an int8 convolution engine of 8 x 8 multipliers, whose Verilog is in `rtl`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import dovetail.target as dt
from dovetail.graph.types import Array
from dovetail.operators.arithmetic import Clip, Requantize, Rounding
from dovetail.operators.linear import Conv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.targets.macarray.model import REGISTERS, job_cycles

L1, L2 = dt.Memory("L1", base=0x10000000, size=128 << 10), dt.Memory("L2", base=0x1C000000, size=512 << 10)
BASE, VERILOG = 0x00201000, sorted((Path(__file__).parent / "rtl").glob("*.v"))
UNPADDED = Pad((0,) * 4, (0,) * 4, 0)


def layer(match: dt.Match) -> tuple[Array, int, int, int, Pad]:
    """Weights as OHWI, stride, dilation, zero point and padding; a dense layer is a convolution of 1x1."""
    found: Any = match.nodes["layer"].operator
    weights = match.array("weights")
    stride, dilation = (getattr(found, name, (1, 1)) for name in ("stride", "dilation"))
    pad = match.operator("pad", Pad) if match.has("pad") else UNPADDED
    weights = weights if weights.ndim == 4 else weights[:, None, None]
    return weights, stride[0] if stride[0] == stride[1] else 0, max(dilation), found.input_zero_point, pad


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights in blocks of 8 x 8 channels; bias, multiplier and shift of each output channel side by side."""
    weights = layer(match)[0]
    outputs, rows, columns, inputs = weights.shape
    padded = np.pad(weights, [(0, -outputs % 8), (0, 0), (0, 0), (0, -inputs % 8)]).astype(np.int8)
    blocks = padded.reshape(-1, 8, rows, columns, padded.shape[3] // 8, 8).transpose(0, 2, 3, 4, 1, 5)
    parameters = np.zeros((len(padded), 4), "<i4")
    for column, name in enumerate(("bias", "multiplier", "shift")):
        parameters[:outputs, column] = match.array(name) if name in match.values else 0
    return {"weights": np.ascontiguousarray(blocks).view(np.uint8).reshape(-1),
            "parameters": parameters.view(np.uint8).reshape(-1)}  # fmt: skip


def image(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Rows and columns in one word, bytes between rows and between pixels; a matrix is an image of one column."""
    return (shape[1] | shape[2] << 16, *strides[1:3]) if len(shape) == 4 else (shape[0] | 1 << 16, strides[0], 0)


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One job."""
    weights, stride, _, zero_point, pad = layer(match)
    x, y = operands[match.values["x"]], operands["result"]
    (size, row, pixel), (y_size, y_row, y_pixel) = image(match.type("x").shape, x.strides), image(match.result.shape, y.strides)
    clip = match.operator("clip", Clip)
    limits = np.array([zero_point, match.operator("requantize", Requantize).output_zero_point, clip.low, clip.high])
    return (REGISTERS.command(
        "macarray_start", source=x.address - pad.before[1] * row - pad.before[2] * pixel, source_row=row,
        source_pixel=pixel, source_size=size, result=y.address, result_row=y_row, result_pixel=y_pixel,
        result_size=y_size, channels=weights.shape[3] | weights.shape[0] << 16, weights=operands["weights"].address,
        parameters=operands["parameters"].address, bounds=int(limits.astype(np.int8).view("<u4")[0]),
        kernel=sum(n << 4 * i for i, n in enumerate((*weights.shape[1:3], *pad.before[1:3], stride)))),)  # fmt: skip


def cycles(match: dt.Match) -> int:
    """Engine cycles of a job."""
    outputs, rows, columns, inputs = layer(match)[0].shape
    return job_cycles(match.result.elements // outputs, inputs, outputs, rows * columns)


LIMITS = (
    dt.Constraint("operand and result must be int8", lambda m: [m.type("x").dtype.text, m.result.dtype.text],
                  lambda v: v == ["int8", "int8"]),
    dt.Constraint("weights must be int8 or narrower, with zero point 0",
                  lambda m: [m.type("weights").dtype.text, getattr(m.nodes["layer"].operator, "weight_zero_point", 0)],
                  lambda v: v[0] in ("int8", "int4", "int2") and v[1] == 0),
    dt.Constraint("the operand must be one image, or a matrix, with at most 65535 of everything",
                  lambda m: m.type("x").shape, lambda v: max(v) < 1 << 16 and (len(v) == 2 or v[0] == 1)),
    dt.Constraint("the groups must be 1", lambda m: m.type("x").shape[-1] // layer(m)[0].shape[-1], lambda v: v == 1),
    dt.Constraint("the kernel must be at most 15x15", lambda m: layer(m)[0].shape[1:3], lambda v: max(v) < 16),
    dt.Constraint("the strides must be 1x1 or 2x2", lambda m: layer(m)[1], lambda v: v in (1, 2)),
    dt.Constraint("the dilation must be 1x1", lambda m: layer(m)[2], lambda v: v == 1),
    dt.Constraint("padding must be of rows and columns, at most 15, with the zero point",
                  lambda m: [layer(m)[4].before, int(layer(m)[4].value) - layer(m)[3] if m.has("pad") else 0],
                  lambda v: v[0][0] == v[0][3] == v[1] == 0 and max(v[0]) < 16),
    dt.Constraint("requantisation must round twice, as TensorFlow Lite Micro does",
                  lambda m: m.operator("requantize", Requantize).rounding, lambda v: v is Rounding.DOUBLE),
)  # fmt: skip


def offload(name: str, kind: type[Conv2d | FullyConnected], biased: bool) -> dt.Offload:
    """A kind of layer with its requantisation."""
    x = dt.maybe(Pad, dt.operand("x")) if kind is Conv2d else dt.operand("x")
    sums = dt.apply(kind, x, dt.constant("weights"), *([dt.constant("bias")] if biased else []), name="layer")
    pattern = dt.apply(Clip, dt.apply(Requantize, sums, dt.constant("multiplier"), dt.constant("shift")))
    return dt.Offload(name, pattern, LIMITS, pack, commands, cycles, channel_step=8)


ENGINE = dt.Engine(
    name="macarray", memory=L1.name, ideal_macs_per_cycle=64.0,
    offloads=tuple(offload(name if biased else f"{name} without bias", kind, biased)
                   for name, kind in (("convolution", Conv2d), ("dense", FullyConnected)) for biased in (True, False)),
    driver=("dovetail.targets.macarray:driver/macarray.h", "dovetail.targets.macarray:driver/macarray.c"),
    prepare="macarray_init", wait="macarray_wait",
    device=REGISTERS.device("macarray", "dovetail.targets.macarray.model", BASE),
    rtl=dt.Rtl("macarray", tuple(VERILOG), dt.RtlPort("apb"), (dt.RtlPort("tcdm", "tcdm_"),),
               macs="dovetail.targets.macarray.model:macs_of_registers").device(BASE, 0x100),
)  # fmt: skip
TARGET = dt.Target(
    name="macarray", sentence="RISC-V RV32IMC, 512 KiB L2, 128 KiB L1, DMA, 8x8 MAC array in Verilog (int8)",
    core=dt.Core("rv32imc"), memories=(L2, L1), code=L2.name, values=L2.name, engines=(ENGINE,),
    dma=dt.Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000),
    policies=(dt.Policy("exact", "the engine requantises as TensorFlow Lite Micro does", ()),),
)  # fmt: skip
