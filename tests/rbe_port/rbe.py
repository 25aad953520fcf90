"""An engine like PULP's RBE beside a RISC-V core: convolutions of 1x1 and 3x3 with weights and activations of 8, 4 or 2
bits, several of them in a byte, 32 output channels at a time; and what it computes, in Python.

A target file, written against the public interface alone. Results are (sum * scale + offset) >> shift, limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import dovetail.target as dt
from dovetail import legalize
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.base import Operator
from dovetail.ir.operators.linear import Conv2d, FullyConnected, Linear
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array, DType, TensorType
from dovetail.sim.device import Bus
from dovetail.target import layers

HERE = Path(__file__).resolve()
L2 = dt.Memory("L2", base=0x1C000000, size=512 << 10)
L1 = dt.Memory("L1", base=0x10000000, size=128 << 10)
BASE, LANES = 0x00201000, 32
REGISTERS = dt.JobRegisters((
    "x", "x_row", "x_pixel", "x_rows", "x_columns", "channels", "x_form", "y", "y_row", "y_pixel", "y_rows",
    "y_columns", "outputs", "y_form", "kernel", "stride", "top", "left", "fill", "low", "high", "weights",
    "weight_bits", "parameters",
))  # fmt: skip
SIGNED, PAIRED = 1 << 8, 1 << 9
"""Of a form, beside its bits: negative values; neighbouring columns share a byte instead of channels."""


def layout_of(kind: TensorType) -> dt.Layout | None:
    """How the engine takes and gives values: channels in bytes, or columns where channels do not fill them."""
    if kind.dtype.bits >= 8:
        return None
    share = 8 // kind.dtype.bits
    axis = 2 if len(kind.shape) == 4 and kind.shape[-1] % share else -1
    return dt.packed(None, len(kind.shape), kind.dtype.bits, axis)


def layouts(match: dt.Match) -> dict[str, dt.Layout]:
    """Those of the operand and the result."""
    found = {"x": layout_of(match.type("x")), "result": layout_of(match.result)}
    return {leaf: layout for leaf, layout in found.items() if layout is not None}


def form(kind: TensorType) -> int:
    """A value's form, as the registers have it."""
    layout = layout_of(kind)
    paired = layout is not None and layout.dims[-1][0] != len(kind.shape) - 1
    return kind.dtype.bits | SIGNED * kind.dtype.signed | PAIRED * paired


def fields(array: Array, bits: int) -> Array:
    """Integers along the last axis in bytes, the first in the lowest bits; what is left over of a byte is 0."""
    share = 8 // bits
    whole = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % share)]).astype(np.int64)
    split = (whole & ((1 << bits) - 1)).reshape(*whole.shape[:-1], -1, share)
    return np.asarray((split << (bits * np.arange(share))).sum(axis=-1), np.uint8)


def elements(held: Array, bits: int, signed: bool) -> Array:
    """The integers in bytes, int64: the inverse of `fields`."""
    values = (held[..., None].astype(np.int64) >> (bits * np.arange(8 // bits))) & ((1 << bits) - 1)
    values = values - ((values >> (bits - 1)) << bits) if signed else values
    return values.reshape(*held.shape[:-1], -1)


def filters(match: dt.Match) -> Array:
    """Weights OHWI; a dense layer's as of 1x1."""
    weights = match.array("weights")
    return weights[:, None, None] if weights.ndim == 2 else weights


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights of each output channel, taps and inputs after the other; scale, offset and shift of each."""
    rows = [np.broadcast_to(match.array(name), match.result.shape[-1]) for name in ("scale", "offset", "shift")]
    held = fields(filters(match), match.type("weights").dtype.bits)
    return {"weights": held.reshape(-1), "parameters": np.stack(rows, axis=1).astype("<i4").reshape(-1).view(np.uint8)}


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """The registers of a tile's job."""
    window, clip, linear = layers.window_of(match), match.operator("clip", Clip), layers.linear_of(match)
    x = layers.image_of(match.type("x"), operands[match.values["x"]])
    y = layers.image_of(match.result, operands["result"])
    return (REGISTERS.command(
        "rbe_start", x=x.address, x_row=x.row, x_pixel=x.pixel, x_rows=x.rows, x_columns=x.columns,
        channels=x.channels, x_form=form(match.type("x")), y=y.address, y_row=y.row, y_pixel=y.pixel,
        y_rows=y.rows, y_columns=y.columns, outputs=y.channels, y_form=form(match.result),
        kernel=window.kernel[0], stride=window.stride[0], top=window.before[0], left=window.before[1],
        fill=window.padding_value if match.has("pad") else linear.input_zero_point, low=clip.low, high=clip.high,
        weights=operands["weights"].address, weight_bits=match.type("weights").dtype.bits,
        parameters=operands["parameters"].address),)  # fmt: skip


def job_cycles(pixels: int, channels: int, outputs: int, taps: int, weight_bits: int, bits: int) -> int:
    """Cycles of a job: 9 pixels times 32 outputs at once, a bit of the weights and 4 of the activations a cycle."""
    blocks = -(-pixels // 9) * -(-outputs // LANES) * -(-channels // LANES)
    return 40 + blocks * (taps * weight_bits * -(-bits // 4) + 9)


def cost(match: dt.Match) -> int:
    """Cycles of a layer or tile."""
    outputs, rows, columns, channels = filters(match).shape
    widths = match.type("weights").dtype.bits, match.type("x").dtype.bits
    return job_cycles(match.result.elements // outputs, channels, outputs, rows * columns, *widths)


def macs(job: Mapping[str, int]) -> int:
    """The device model: multiply-accumulates of a job."""
    return job["y_rows"] * job["y_columns"] * job["outputs"] * job["kernel"] ** 2 * job["channels"]


def cycles(job: Mapping[str, int]) -> int:
    """The device model: cycles of a job."""
    pixels = job["y_rows"] * job["y_columns"]
    sizes = pixels, job["channels"], job["outputs"], job["kernel"] ** 2
    return job_cycles(*sizes, job["weight_bits"], job["x_form"] & 15)


def image(bus: Bus, job: Mapping[str, int], name: str, channels: int) -> tuple[Array, int, bool, bool]:
    """The device model: the bytes of an image as a view, bits of an element, whether signed, whether columns share."""
    shape, what = [job[f"{name}_rows"], job[f"{name}_columns"], channels], job[f"{name}_form"]
    bits, paired = what & 15, bool(what & PAIRED)
    shape[1 if paired else 2] = -(-shape[1 if paired else 2] * bits // 8)
    strides = (job[f"{name}_row"], job[f"{name}_pixel"], 1)
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    held = np.lib.stride_tricks.as_strided(bus.view(job[name], extent), shape, strides)
    return held, bits, bool(what & SIGNED), paired


def compute(job: Mapping[str, int], bus: Bus) -> None:
    """The device model: what a job does to memory."""
    fill, low, high = (int(np.array(job[name], np.uint32).view(np.int32)) for name in ("fill", "low", "high"))
    held, bits, signed, paired = image(bus, job, "x", job["channels"])
    x = elements(held.swapaxes(1, 2) if paired else held, bits, signed)
    x = (x.swapaxes(1, 2) if paired else x)[:, : job["x_columns"], : job["channels"]]
    stride, kernel, rows, columns = job["stride"], job["kernel"], job["y_rows"], job["y_columns"]
    below = max((rows - 1) * stride + kernel - job["top"] - job["x_rows"], 0)
    right = max((columns - 1) * stride + kernel - job["left"] - job["x_columns"], 0)
    x = np.pad(x, [(job["top"], below), (job["left"], right), (0, 0)], constant_values=fill)
    row = -(-job["channels"] * job["weight_bits"] // 8)
    shape = (job["outputs"], kernel, kernel, row)
    stored = bus.view(job["weights"], int(np.prod(shape))).reshape(shape)
    weights = elements(stored, job["weight_bits"], True)[..., : job["channels"]]
    sums = np.zeros((rows, columns, job["outputs"]), np.int64)
    for down in range(kernel):
        for across in range(kernel):
            ends = down + (rows - 1) * stride + 1, across + (columns - 1) * stride + 1
            sums += x[down : ends[0] : stride, across : ends[1] : stride] @ weights[:, down, across].T
    parameters = bus.view(job["parameters"], 12 * job["outputs"]).view("<i4").reshape(-1, 3)
    scale, offset, shift = parameters.T.astype(np.int64)
    y = np.clip((sums * scale + offset) >> shift, low, high)
    target, bits, _, paired = image(bus, job, "y", job["outputs"])
    target[...] = fields(y.swapaxes(1, 2), bits).swapaxes(1, 2) if paired else fields(y, bits)


KINDS = ("int8", "uint8", "int4", "uint4", "int2", "uint2")
LIMITS = (
    dt.one_of("activations must have 8, 4 or 2 bits", lambda m: m.type("x").dtype.text, *KINDS),
    dt.one_of("results must have 8, 4 or 2 bits", lambda m: m.result.dtype.text, *KINDS),
    layers.NARROW_WEIGHTS, layers.SYMMETRIC_WEIGHTS, layers.SYMMETRIC_OPERAND, layers.ONE_IMAGE, layers.ONE_ROW,
)  # fmt: skip
IMAGES = (
    layers.BATCH, layers.NO_GROUPS, layers.kernels_of(1, 3), layers.strides_of(1, 2), layers.NO_DILATION,
    dt.Constraint("padding must be smaller than the kernel", layers.window_of,
                  lambda w: max(*w.before, *w.after) < w.kernel[0]),
)  # fmt: skip
UNSIGNED, SIGNED_TOO = (
    legalize.RequantisationLimits(scale_bits=15, most_shift=31, activations=kind) for kind in (DType.UINT8, DType.INT8)
)


def _offload(name: str, kind: type[Operator], limits: tuple[dt.Constraint, ...]) -> dt.Offload:
    x = dt.operand("x")
    layer = dt.apply(kind, dt.maybe(Pad, x) if kind is Conv2d else x, dt.constant("weights"), name="layer")
    scaled = dt.apply(ScaleShift, layer, dt.constant("scale"), dt.constant("offset"), dt.constant("shift"))
    return dt.Offload(name, dt.apply(Clip, scaled), limits, pack, commands, cost, channel_step=LANES, layouts=layouts)


def takes(types: Mapping[str, TensorType], node: object) -> bool:
    """Whether a layer may be requantised as the engine does."""
    return isinstance(getattr(node, "operator", None), Linear)


ENGINE = dt.Engine(
    name="rbe", memory=L1.name, ideal_macs_per_cycle=9.0 * LANES * LANES,
    offloads=(_offload("convolution", Conv2d, (*LIMITS[:-1], *IMAGES)),
              _offload("dense", FullyConnected, LIMITS)),
    driver=(), files={"rbe.h": HERE.with_name("rbe.h"), "rbe.c": HERE.with_name("rbe.c")}, headers=("rbe.h",),
    defines={"RBE_BASE": BASE, "RBE_WORDS": len(REGISTERS.names)}, prepare="rbe_init", wait="rbe_wait",
    device=REGISTERS.device("rbe", str(HERE), BASE),
)  # fmt: skip
TARGET = dt.Target(
    name="rbe", sentence="RISC-V RV32IMC, 512 KiB L2, 128 KiB L1, DMA, an engine like RBE (2- to 8-bit activations)",
    core=dt.Core("rv32imc"), memories=(L2, L1), code=L2.name, values=L2.name, engines=(ENGINE,),
    dma=dt.Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000),
    quantisation=dt.Quantisation(packed=True, activations=DType.UINT8, activation_bits=(8, 4, 2)),
    policies=(dt.Policy("engine", "the engine requantises with its own scale and shift", (
        dt.Rewrite("requantisation", legalize.engine_requantisation(takes, UNSIGNED), lsb=1),
                dt.Rewrite("requantisation of signed", legalize.engine_requantisation(takes, SIGNED_TOO), lsb=1),
        dt.Rewrite("narrow weights", legalize.narrow_weights(), lsb=0),
        dt.Rewrite("narrow activations", legalize.narrow_activations(), lsb=0),
    )),),
)  # fmt: skip
