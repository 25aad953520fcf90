"""A RISC-V microcontroller with an NE16 convolution engine, as GAP9 has it.

Sources of the facts: the engine's own sheet in job.py, cycles.py and device.py; memories and clocking after the public
GAP9 descriptions (128 KiB L1, DMA of 8 bytes per cycle); L2 as a small chip has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dovetail.adapt import (
    RequantisationLimits,
    addition_as_convolution,
    convolution_as_patches,
    engine_requantisation,
    narrow_weights,
    split_bias,
    stride_as_slice,
    unsigned_activations,
)
from dovetail.graph.graph import Node
from dovetail.graph.types import Array, DType, TensorType
from dovetail.operators.arithmetic import Clip, ScaleShift
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.target import (
    Choice,
    Command,
    Constraint,
    Core,
    DeviceModel,
    Dma,
    Engine,
    Knob,
    Match,
    Memory,
    Offload,
    Operand,
    Policy,
    Quantisation,
    Rewrite,
    Space,
    Target,
    apply,
    constant,
    maybe,
    operand,
)
from dovetail.target.layers import NO_GROUPS, NO_MULTIPLIER
from dovetail.targets.ne16.cycles import job_cycles, layer_cycles
from dovetail.targets.ne16.job import CHANNELS_IN, Job, Padding, Requantise, problem, task_words
from dovetail.targets.ne16.packing import pack_linear_weights, pack_weights

L1 = Memory("L1", base=0x10000000, size=128 * 1024)
L2 = Memory("L2", base=0x1C000000, size=512 * 1024)
DMA = Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000)
QUEUE = 2
"""Launches the engine holds: one it computes, one that waits."""
LIMITS = RequantisationLimits(scale_bits=8, most_shift=31)


def job(match: Match, operands: Mapping[str, Operand]) -> Job:
    """The engine's job for a tile. Addresses of operands that are not given are 0."""
    x, out = match.type("x").shape, match.result.shape
    dense = _linear(match)
    image, result = ((1, 1, 1, x[-1]), (1, 1, 1, out[-1])) if dense else (x, out)
    pads = match.operator("pad", Pad) if match.has("pad") else None
    layer = None if dense else _convolution(match)
    nowhere = Operand(0, ())
    source, target = operands.get(match.values["x"], nowhere), operands.get("result", nowhere)
    width = match.result.dtype.numpy.itemsize
    in_strides = source.strides[1:3] if not dense and source.strides else (image[2] * image[3], image[3])
    row, pixel = result[2] * result[3] * width, result[3] * width
    out_strides = target.strides[1:3] if not dense and target.strides else (row, pixel)
    requantise = Requantise(scale_bits=8, bias=True, relu=True, shift=None) if match.has("scale_shift") else None
    return Job(
        in_height=image[1],
        in_width=image[2],
        in_channels=image[3],
        out_height=result[1],
        out_width=result[2],
        out_channels=result[3],
        in_pixel_stride=in_strides[1],
        in_row_stride=in_strides[0],
        out_pixel_stride=out_strides[1],
        out_row_stride=out_strides[0],
        kernel=1 if dense else match.type("weights").shape[1],
        depthwise=isinstance(layer, DepthwiseConv2d),
        linear=dense and dense_mode(match) == "linear",
        stride=layer.stride[0] if layer else 1,
        padding=Padding(pads.before[1], pads.after[1], pads.before[2], pads.after[2]) if pads else Padding(),
        padding_value=int(pads.value) if pads else 0,
        weight_bits=weight_bits(match),
        requantise=requantise,
        out_bits=8 * width,
        infeat=source.address,
        outfeat=target.address,
        weights=operands.get("weights", nowhere).address,
        scale=operands.get("scale", nowhere).address,
        scale_shift=operands.get("shift", nowhere).address,
        scale_bias=operands.get("offset", nowhere).address,
    )


def _linear(match: Match) -> bool:
    return isinstance(match.nodes["layer"].operator, FullyConnected)


def dense_default(match: Match) -> Choice:
    """Linear mode for the input sizes it has."""
    return {"mode": "pointwise" if match.type("x").shape[-1] % CHANNELS_IN else "linear"}


def dense_knobs(match: Match) -> Space:
    """How a dense layer is computed: linear mode takes 256 inputs at a time, one bit of the weights after the other;
    as a 1x1 convolution of one pixel it takes 16, all bits together."""
    depth = match.type("x").shape[-1]
    default = str(dense_default(match)["mode"])
    other = "linear" if default == "pointwise" else "pointwise"

    def problem(choice: Choice) -> str | None:
        if choice.get("mode") == "linear" and depth % CHANNELS_IN:
            return f"linear mode needs a multiple of {CHANNELS_IN} inputs; here: {depth}"
        return None

    return Space((Knob("mode", (default, other), "the engine's mode for a dense layer"),), problem)


def dense_mode(match: Match) -> str:
    """The mode that is chosen for a dense layer, or the default's."""
    return str({**dense_default(match), **match.choice}["mode"])


def _convolution(match: Match) -> Conv2d | DepthwiseConv2d:
    layer = match.nodes["layer"].operator
    assert isinstance(layer, Conv2d | DepthwiseConv2d)
    return layer


def weight_bits(match: Match) -> int:
    """Bits the weights are stored with: those of their type, at least 2."""
    return max(match.type("weights").dtype.bits, 2)


def pack(match: Match) -> dict[str, Array]:
    """Weights in bit planes; scale and shift as a byte, offset as a word per channel."""
    weights, bits = match.array("weights"), weight_bits(match)
    if _linear(match):
        depth = weights.shape[1]
        square = weights.reshape(weights.shape[0], 1, 1, depth)
        is_linear = dense_mode(match) == "linear"
        packed = pack_linear_weights(weights, bits) if is_linear else pack_weights(square, bits, False)
    elif isinstance(match.nodes["layer"].operator, DepthwiseConv2d):
        packed = pack_weights(np.ascontiguousarray(weights.transpose(3, 1, 2, 0)), bits, True)
    else:
        packed = pack_weights(weights, bits, False)
    found = {"weights": packed.reshape(-1)}
    if match.has("scale_shift"):
        channels = match.result.shape[-1]
        found["scale"] = np.broadcast_to(match.array("scale"), channels).astype(np.uint8)
        found["shift"] = np.broadcast_to(match.array("shift"), channels).astype(np.uint8)
        found["offset"] = np.broadcast_to(match.array("offset"), channels).astype("<i4").view(np.uint8)
    return found


def commands(match: Match, operands: Mapping[str, Operand]) -> tuple[Command, ...]:
    """One start of the engine, which walks stride-2 layers itself."""
    return (Command("ne16_start", task_words(job(match, operands))),)


def cycles(match: Match) -> int:
    """Engine cycles of a tile."""
    return job_cycles(job(match, {}))


def starting(match: Match) -> int:
    """Cycles the driver goes along with a grid of launches, of which the engine takes two at a time."""
    whole = job(match, {})
    launches = whole.grid[0] * whole.grid[1]
    return job_cycles(whole) * max(launches - QUEUE, 0) // launches


CONSTRAINTS = (
    Constraint("activations must be uint8", lambda m: m.type("x").dtype.text, lambda v: v == "uint8"),
    Constraint("weights must have 2 to 8 bits, signed", lambda m: m.type("weights").dtype.text,
               lambda v: v in ("int2", "int4", "int8")),
    Constraint("weights must be symmetric (zero point 0)",
               lambda m: getattr(m.nodes["layer"].operator, "weight_zero_point", 0), lambda v: v == 0),
    Constraint("the operand's zero point must be folded into the bias",
               lambda m: getattr(m.nodes["layer"].operator, "input_zero_point", 0), lambda v: v == 0),
    Constraint("the batch must be 1", lambda m: m.result.shape[0], lambda v: v == 1),
)  # fmt: skip
REQUANTISED = (
    Constraint("outputs must be uint8, clipped to 0..255 only",
               lambda m: [m.result.dtype.text, m.operator("clip", Clip).low, m.operator("clip", Clip).high],
               lambda v: v == ["uint8", 0, 255]),
)  # fmt: skip
IMAGE = (
    Constraint(
        "the kernel must be 1x1 or 3x3", lambda m: m.type("weights").shape[1:3], lambda v: v in ((1, 1), (3, 3))
    ),
    Constraint("the stride must be 1x1 or 2x2", lambda m: _convolution(m).stride, lambda v: v in ((1, 1), (2, 2))),
    Constraint("the dilation must be 1x1", lambda m: _convolution(m).dilation, lambda v: v == (1, 1)),
)
FULL = (NO_GROUPS,)
DEPTHWISE = (
    NO_MULTIPLIER,
    Constraint("a depthwise kernel must be 3x3", lambda m: m.type("weights").shape[1:3], lambda v: v == (3, 3)),
)
LIMIT = (Constraint("the job must be one the engine has", lambda m: problem(job(m, {})), lambda v: v == ""),)


def _offloads() -> tuple[Offload, ...]:
    """Every layer kind, with and without requantisation, padded by the engine where it can."""
    kinds = (
        ("convolution", Conv2d, (*IMAGE, *FULL), 32),
        ("depthwise convolution", DepthwiseConv2d, (*IMAGE, *DEPTHWISE), 16),
        ("dense", FullyConnected, (), 32),
    )
    found = []
    for name, kind, limits, step in kinds:
        for padded in (True, False) if kind is not FullyConnected else (False,):
            x = operand("x")
            layer = apply(kind, maybe(Pad, x, name="pad") if padded else x, constant("weights"), name="layer")
            scaled = apply(
                ScaleShift, layer, constant("scale"), constant("offset"), constant("shift"), name="scale_shift"
            )
            shared = (*CONSTRAINTS, *limits, *LIMIT)
            full = (*REQUANTISED, *shared)
            label = f"padded {name}" if padded else name
            own = (dense_knobs, dense_default) if kind is FullyConnected else (None, None)
            for text, pattern, constraints in (
                (label, apply(Clip, scaled), full),
                (f"{label}, 32-bit results", layer, shared),
            ):
                offload = Offload(text, pattern, constraints, pack, commands, cycles, channel_step=step, row_step=6)
                found.append(replace(offload, knobs=own[0], default=own[1], starting=starting))
    return tuple(sorted(found, key=lambda offload: "32-bit" in offload.name))


def takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the engine has the shape of a linear layer (used to choose rewrites, before patterns are matched)."""
    operator = node.operator
    if isinstance(operator, FullyConnected):
        return types[node.inputs[0]].shape[:-1] == (1,)
    if not isinstance(operator, Conv2d | DepthwiseConv2d):
        return False
    x, w = types[node.inputs[0]].shape, types[node.inputs[1]].shape
    fits = operator.stride in ((1, 1), (2, 2)) and operator.dilation == (1, 1) and x[0] == 1
    if isinstance(operator, DepthwiseConv2d):
        return fits and w[1:3] == (3, 3) and w[3] == x[3]
    return fits and w[1:3] in ((1, 1), (3, 3)) and w[3] == x[3]


def patches_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a convolution is faster, or only possible, as a 1x1 convolution of patches gathered by the DMA."""
    operator = node.operator
    assert isinstance(operator, Conv2d)
    if (
        operator.dilation[1] != 1
        or types[node.inputs[0]].shape[0] != 1
        or types[node.inputs[0]].dtype is not DType.UINT8
    ):
        return False
    kernel, (_, height, width, channels) = types[node.inputs[1]].shape, types[node.output].shape
    depth = kernel[1] * kernel[2] * kernel[3]
    gather = kernel[1] * height * width * -(-kernel[2] * kernel[3] // DMA.bytes_per_cycle)
    as_patches = gather + layer_cycles(height, width, depth, channels, kernel=1, channel_shift=True)
    if not takes(types, node):
        return True
    direct = layer_cycles(height, width, kernel[3], channels, kernel=3, stride=operator.stride[0], channel_shift=True)
    return as_patches < direct


ENGINE = Engine(
    name="ne16",
    memory=L1.name,
    offloads=_offloads(),
    ideal_macs_per_cycle=162.0,
    driver=("dovetail.targets.ne16:driver/ne16.h", "dovetail.targets.ne16:driver/ne16.c"),
    device=DeviceModel("dovetail.targets.ne16.device:Ne16Device", base=0x00201000, size=0x100),
    wait="ne16_wait",
    prepare="ne16_init",
)
SHARED = (
    Rewrite("unsigned", unsigned_activations, lsb=0),
    Rewrite("patches", convolution_as_patches(patches_pay), lsb=0),
    Rewrite("stride", stride_as_slice(lambda types, node: types[node.inputs[0]].dtype is DType.UINT8), lsb=0),
    Rewrite("narrow weights", narrow_weights(), lsb=0),
)
TARGET = Target(
    name="ne16",
    sentence="RISC-V RV32IMC, 512 KiB L2, 128 KiB L1, DMA, NE16 engine (2- to 8-bit weights)",
    core=Core("rv32imc"),
    memories=(L2, L1),
    code=L2.name,
    values=L2.name,
    dma=DMA,
    engines=(ENGINE,),
    quantisation=Quantisation(packed=True),
    policies=(
        Policy("engine", "the engine requantises with its own scale and shift",
               (*SHARED, Rewrite("requantisation", engine_requantisation(takes, LIMITS), lsb=2),
                Rewrite("residual", addition_as_convolution(LIMITS), lsb=2))),
        Policy("exact", "the engine gives 32-bit sums, the core requantises as TFLite Micro does",
               (*SHARED, Rewrite("split bias", split_bias(takes), lsb=0))),
    ),
)  # fmt: skip
