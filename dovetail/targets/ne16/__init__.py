"""A RISC-V microcontroller with an NE16 convolution engine, as GAP9 has it.

Sources of the facts: job.py, packing.py and device.py; memories and clocking after the public GAP9 descriptions
(128 KiB L1, DMA of 8 bytes per cycle); L2 as a small chip has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

import dovetail.target as dt
from dovetail import legalize
from dovetail.ir.graph import Graph
from dovetail.ir.operators.arithmetic import Clip, ScaleShift
from dovetail.ir.operators.bits import BitProduct
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array
from dovetail.legalize import RequantisationLimits
from dovetail.target import layers
from dovetail.target.queue_driver import queue_driver
from dovetail.targets.ne16.forms import (
    DMA,
    L1,
    WINDOWS,
    additions_pay,
    attention_pays,
    bands,
    has_undilated,
    is_bytes,
    patch_bands,
    patches_pay,
    pixels_together,
    pool_bands,
    pools,
    products_pay,
    result_parts,
    strided_as_patches,
    takes,
    windows_together,
)
from dovetail.targets.ne16.job import (
    CHANNELS_IN,
    CHANNELS_OUT,
    EDGE,
    Ne16Job,
    Ne16Padding,
    Requantise,
    best,
    flattened,
    job_cycles,
    problem,
    task_words,
)
from dovetail.targets.ne16.packing import pack_linear_weights, pack_weights

L2 = dt.Memory("L2", base=0x1C000000, size=512 * 1024)
DRIVER = queue_driver("dovetail.targets.ne16:driver/ne16.c", base="NE16_BASE", place="word", offset="4u * word")
QUEUE = 2
"""Launches the engine holds: one it computes, one that waits."""
LIMITS = RequantisationLimits(scale_bits=8, most_shift=31)


def job(match: dt.Match, operands: Mapping[str, dt.Operand]) -> Ne16Job:
    """The engine's job for a tile. Addresses of operands that are not given are 0."""
    dense, width, computed = _dense(match), match.result.dtype.numpy.itemsize, match.has("product")
    window = layers.PIXEL if computed else layers.window_of(match)
    x, out = (shape[-1:] if dense else shape for shape in (match.type("x").shape, match.result.shape))
    (rows, columns, inputs), (height, breadth, outputs) = layers.sizes_of(x), layers.sizes_of(out)
    nowhere = dt.Operand(0, ())
    source, target = operands.get(match.values["x"], nowhere), operands.get("result", nowhere)
    gaps = [int(match.apart(value)) for value in (match.values["x"], match.root)]  # of any size: not one line of pixels
    source_apart = source.strides[1:3] if not dense and source.strides else (columns * inputs + gaps[0], inputs)
    line = breadth * outputs * width
    target_apart = target.strides[1:3] if not dense and target.strides else (line + gaps[1], outputs * width)
    whole = Ne16Job(
        in_height=rows,
        in_width=columns,
        in_channels=inputs,
        out_height=height,
        out_width=breadth,
        out_channels=outputs,
        in_pixel_stride=source_apart[1],
        in_row_stride=source_apart[0],
        out_pixel_stride=target_apart[1],
        out_row_stride=target_apart[0],
        kernel=window.kernel[0],
        depthwise=not computed and layers.linear_of(match).is_channelwise,
        linear=dense and dense_mode(match) == "linear",
        stride=window.stride[0],
        padding=Ne16Padding(window.before[0], window.after[0], window.before[1], window.after[1]),
        padding_value=window.padding_value if match.has("pad") else 0,
        weight_bits=weight_bits(match),
        weight_offset=-match.operator("product", BitProduct).zero_point if computed else None,
        requantise=Requantise(shift=common_shift(match)) if match.has("scale_shift") else None,
        out_bits=8 * width,
        infeat=source.address,
        outfeat=target.address,
        weights=operands.get(match.values["planes"] if computed else "weights", nowhere).address,
        scale=operands.get("scale", nowhere).address,
        scale_shift=operands.get("shift", nowhere).address,
        scale_bias=operands.get("offset", nowhere).address,
    )
    return flattened(whole)


def common_shift(match: dt.Match) -> int | None:
    """The right shift of every output channel, which a register holds; None where channels have their own, which the
    engine loads anew for every subtile."""
    found = set(match.array("shift").reshape(-1).tolist())
    return found.pop() if len(found) == 1 else None


def _dense(match: dt.Match) -> bool:
    return match.has("layer") and isinstance(layers.linear_of(match), FullyConnected)


def dense_default(match: dt.Match) -> dt.Choice:
    """Linear mode for the input sizes it has."""
    return {"mode": "pointwise" if match.type("x").shape[-1] % CHANNELS_IN else "linear"}


def dense_knobs(match: dt.Match) -> dt.Space:
    """How a dense layer is computed: linear mode takes 256 inputs at a time, one bit of the weights after the other;
    as a 1x1 convolution of one pixel it takes 16, all bits together."""
    depth = match.type("x").shape[-1]
    default = str(dense_default(match)["mode"])
    other = "linear" if default == "pointwise" else "pointwise"

    def problem(choice: dt.Choice) -> str | None:
        if choice.get("mode") == "linear" and depth % CHANNELS_IN:
            return f"linear mode needs a multiple of {CHANNELS_IN} inputs; here: {depth}"
        return None

    return dt.Space((dt.Knob("mode", (default, other), "the engine's mode for a dense layer"),), problem)


def dense_mode(match: dt.Match) -> str:
    """The mode that is chosen for a dense layer, or the default's."""
    return str({**dense_default(match), **match.choice}["mode"])


def weight_bits(match: dt.Match) -> int:
    """Bits the weights are stored with: those of their type, at least 2."""
    return 8 if match.has("product") else max(match.type("weights").dtype.bits, 2)


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights in bit planes; scale and shift as a byte, offset as a word per channel; no shifts where all are equal."""
    if match.has("product"):
        return {}
    weights, bits = match.array("weights"), weight_bits(match)
    if _dense(match):
        depth = weights.shape[1]
        square = weights.reshape(weights.shape[0], 1, 1, depth)
        is_linear = dense_mode(match) == "linear"
        packed = pack_linear_weights(weights, bits) if is_linear else pack_weights(square, bits, False)
    elif layers.linear_of(match).is_channelwise:
        packed = pack_weights(np.ascontiguousarray(weights.transpose(3, 1, 2, 0)), bits, True)
    else:
        packed = pack_weights(weights, bits, False)
    found = {"weights": packed.reshape(-1)}
    if match.has("scale_shift"):
        channels = match.result.shape[-1]
        found["scale"] = np.broadcast_to(match.array("scale"), channels).astype(np.uint8)
        if common_shift(match) is None:
            found["shift"] = match.array("shift").astype(np.uint8)
        found["offset"] = np.broadcast_to(match.array("offset"), channels).astype("<i4").view(np.uint8)
    return found


def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One start of the engine, which walks stride-2 layers itself."""
    whole = job(match, operands)
    return (dt.Command("ne16_start", task_words(whole), jobs=whole.grid[0] * whole.grid[1]),)


def cycles(match: dt.Match) -> int:
    """Engine cycles of a tile."""
    return job_cycles(job(match, {}))


def starting(match: dt.Match) -> int:
    """Cycles the driver goes along with a grid of launches, of which the engine takes two at a time."""
    whole = job(match, {})
    launches = whole.grid[0] * whole.grid[1]
    return job_cycles(whole) * max(launches - QUEUE, 0) // launches


CONSTRAINTS = (
    dt.one_of("activations must be uint8", lambda m: m.type("x").dtype.text, "uint8"),
    layers.NARROW_WEIGHTS.worded("weights must have 2 to 8 bits, signed"),
    layers.SYMMETRIC_WEIGHTS,
    layers.SYMMETRIC_OPERAND.worded("the operand's zero point must be folded into the bias"),
    layers.BATCH,
)
REQUANTISED = (
    dt.one_of(
        "outputs must be uint8, clipped to 0..255 only",
        lambda m: [m.result.dtype.text, m.operator("clip", Clip).low, m.operator("clip", Clip).high],
        ["uint8", 0, 255],
    ),
    dt.Constraint("the scale must be 0 to 255", layers.range_of("scale"), lambda v: v[0] >= 0 and v[1] <= 255),
)
LIMIT = (dt.one_of("the job must be one the engine has", lambda m: problem(job(m, {})), ""),)


def _of_computed() -> dt.Offload:
    """A 1x1 convolution whose weights are bits that the core took apart: a product of two computed matrices."""
    pattern = dt.apply(BitProduct, dt.operand("x"), dt.operand("planes"), name="product")
    packed = dt.one_of("bits must lie in groups of 16", lambda m: m.type("planes").shape[-1], CHANNELS_IN // 8)
    limits = (CONSTRAINTS[0], layers.BATCH, packed, *LIMIT)
    made = dt.Offload("product of computed matrices, 32-bit results", pattern, limits, pack, commands, cycles)
    return replace(made, channel_step=CHANNELS_OUT, row_step=6, starting=starting)


def _offloads() -> tuple[dt.Offload, ...]:
    """Every layer kind, with and without requantisation, padded by the engine where it can."""
    kinds = (
        ("convolution", Conv2d, WINDOWS[Conv2d], CHANNELS_OUT),
        ("depthwise convolution", DepthwiseConv2d, WINDOWS[DepthwiseConv2d], 16),
        ("dense", FullyConnected, (), CHANNELS_OUT),
    )
    found = []
    for name, kind, limits, step in kinds:
        for padded in (True, False) if kind is not FullyConnected else (False,):
            x = dt.operand("x")
            layer = dt.apply(kind, dt.maybe(Pad, x, name="pad") if padded else x, dt.constant("weights"), name="layer")
            scaled = dt.apply(
                ScaleShift, layer, dt.constant("scale"), dt.constant("offset"), dt.constant("shift"), name="scale_shift"
            )
            shared = (*CONSTRAINTS, *limits, *LIMIT)
            full = (*REQUANTISED, *shared)
            label = f"padded {name}" if padded else name
            own = (dense_knobs, dense_default) if kind is FullyConnected else (None, None)
            for text, pattern, constraints in (
                (label, dt.apply(Clip, scaled), full),
                (f"{label}, 32-bit results", layer, shared),
            ):
                offload = dt.Offload(text, pattern, constraints, pack, commands, cycles, channel_step=step, row_step=6)
                found.append(replace(offload, knobs=own[0], default=own[1], starting=starting))
    return (*sorted(found, key=lambda offload: "32-bit" in offload.name), _of_computed())


ENGINE = dt.Engine(
    name="ne16",
    memory=L1.name,
    offloads=_offloads(),
    ideal_macs_per_cycle=162.0,
    best=best,
    driver=("dovetail.targets.ne16:driver/ne16.h",),
    files={"ne16.c": DRIVER},
    device=dt.DeviceModel("dovetail.targets.ne16.device:Ne16Device", base=0x00201000, size=0x100),
    wait="ne16_wait",
    queue=QUEUE,
    launching=90,
    prepare="ne16_init",
)


def _strided_within(sizes: Mapping[str, int]) -> Callable[[Graph], Graph]:
    return strided_as_patches(sizes.get(L1.name, L1.size))


SHARED = (
    dt.Rewrite("attention", legalize.attention_of_bits(CHANNELS_IN, attention_pays), lsb=0),
    dt.Rewrite("unsigned", legalize.unsigned_activations, lsb=0),
    dt.Rewrite("rows as pixels", legalize.dense_as_convolution(is_bytes), lsb=0),
    dt.Rewrite("products", legalize.products_of_bits(products_pay, CHANNELS_IN), lsb=0),
    dt.Rewrite("dilation", legalize.without_dilation(has_undilated), lsb=0),
    dt.Rewrite("patches", legalize.convolution_as_im2col(patches_pay), lsb=0),
    dt.Rewrite("stride", legalize.stride_as_slice(is_bytes), lsb=0),
    dt.Rewrite("narrow weights", legalize.narrow_weights(), lsb=0),
)
FINAL_REWRITES = (
    dt.Rewrite("split bias", legalize.split_bias(takes), lsb=0),
    dt.Rewrite("views first", legalize.views_first, lsb=0),
)
TARGET = dt.Target(
    name="ne16",
    sentence="RISC-V RV32IMC, 512 KiB L2, 128 KiB L1, DMA, NE16 engine (2- to 8-bit weights)",
    core=dt.Core("rv32imc"),
    memories=(L2, L1),
    code=L2.name,
    values=L2.name,
    dma=DMA,
    engines=(ENGINE,),
    quantisation=dt.Quantisation(packed=True, wide_sums=True),
    policies=(
        dt.Policy(
            "engine",
            "the engine requantises with its own scale and shift, within 1 step",
            (
                *SHARED,
                dt.Rewrite("requantisation", legalize.engine_requantisation(takes, LIMITS), lsb=2),
                dt.Rewrite("residual", legalize.addition_as_convolution(LIMITS, additions_pay), lsb=2),
                dt.Rewrite("pools", legalize.average_pool_as_depthwise(pools, LIMITS), lsb=0),
                dt.Rewrite("pools in bands", legalize.average_pool_in_bands(pool_bands), lsb=0),
                dt.Rewrite("strided patches", strided_as_patches(L1.size), lsb=0, sized=_strided_within),
                dt.Rewrite("pixels together", legalize.pixels_as_one(pixels_together), lsb=0),
                dt.Rewrite("windows together", legalize.windows_as_one(windows_together), lsb=0),
                dt.Rewrite("moves first", legalize.moves_before_offset, lsb=0),
                dt.Rewrite("bands", legalize.first_layer_in_bands(bands, EDGE), lsb=0),
                dt.Rewrite("patches in bands", legalize.patches_in_bands(patch_bands), lsb=0),
                dt.Rewrite("parts", legalize.last_layer_in_parts(result_parts, CHANNELS_OUT), lsb=0),
                *FINAL_REWRITES,
            ),
        ),
        dt.Policy(
            "exact",
            "the engine gives 32-bit sums, the core requantises as TFLite Micro does",
            (*SHARED, *FINAL_REWRITES),
        ),
    ),
)
