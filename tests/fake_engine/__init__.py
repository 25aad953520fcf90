"""A made-up chip for tests: one memory for everything, no DMA, an engine that takes 8-bit values in channel blocks.

The engine reads and writes the one memory itself, whole blocks of 16 channels at a time, and its constants where they
lie. `emulate` carries out a task from its words and its blob alone.
"""
# VTA works like this; its target is to find every stage ready.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dovetail.ir.operators.arithmetic import Clip, Requantize, Rounding, fixed_point
from dovetail.ir.operators.linear import Conv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array, DType
from dovetail.target import (
    Command,
    Constraint,
    Core,
    DeviceModel,
    Dma,
    Engine,
    Layout,
    Match,
    Memory,
    Offload,
    Operand,
    Policy,
    Target,
    apply,
    blocked,
    constant,
    maybe,
    operand,
)

BLOCK = 16
IMAGES = blocked((0, 3, 1, 2), 3, BLOCK)
ROWS = Layout(((0, 1), (1, BLOCK), (1, 1)))
MEMORY = Memory("dram", base=0x40000000, size=4 << 20, alignment=64)
_NAMES = ("weights", "bias", "multiplier", "shift")


def _image(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 4 else (shape[0], 1, 1, shape[1])


def _strides(operand: Operand) -> tuple[int, ...]:
    """Bytes between blocks, rows, columns and channels."""
    return operand.strides[1:] if len(operand.strides) == 5 else (operand.strides[1], 0, 0, operand.strides[2])


def _weights(match: Match) -> Array:
    weights = match.array("weights")
    return weights if weights.ndim == 4 else weights[:, None, None, :]


def pack(match: Match) -> dict[str, Array]:
    """Weights as [OC/16, KH, KW, C/16, 16 out, 16 in], parameters as int32 per channel; zero where there is none."""
    weights = _weights(match)
    outputs, _, _, inputs = weights.shape
    weights = np.pad(weights, [(0, -outputs % BLOCK), (0, 0), (0, 0), (0, -inputs % BLOCK)])
    split = weights.reshape(-1, BLOCK, *weights.shape[1:3], weights.shape[3] // BLOCK, BLOCK)
    packed = {"weights": np.ascontiguousarray(split.transpose(0, 2, 3, 4, 1, 5)).reshape(-1).view(np.uint8)}
    for name in _NAMES[1:]:
        values = np.broadcast_to(match.array(name), outputs).astype("<i4")
        packed[name] = np.pad(values, (0, -outputs % BLOCK)).view(np.uint8)
    return packed


def commands(match: Match, operands: Mapping[str, Operand]) -> tuple[Command, ...]:
    """One task: everything about it in words; constants as places in the blob."""
    x, result = operands[match.values["x"]], operands["result"]
    layer = match.nodes["layer"].operator
    assert isinstance(layer, Conv2d | FullyConnected)
    requantise, clip = match.operator("requantize", Requantize), match.operator("clip", Clip)
    pad = match.operator("pad", Pad) if match.has("pad") else Pad((0,) * 4, (0,) * 4, layer.input_zero_point)
    stride = layer.stride if isinstance(layer, Conv2d) else (1, 1)
    words = [
        x.address,
        *_strides(x),
        *_image(match.type("x").shape),
        result.address,
        *_strides(result),
        *_image(match.result.shape),
        *_weights(match).shape[1:3],
        *stride,
        pad.before[1],
        pad.before[2],
        int(pad.value),
        layer.input_zero_point,
        requantise.output_zero_point,
        list(Rounding).index(requantise.rounding),
        clip.low,
        clip.high,
        *(operands[name].address for name in _NAMES),
    ]
    return (Command("blocks_start", tuple(word & 0xFFFFFFFF for word in words), constants=True),)


def emulate(words: Sequence[int], blob: Array, memory: Array) -> None:
    """Carry out a task: whole blocks in, whole blocks out; `memory` is all of the chip's, from its base on."""
    numbers = [int(word) - (1 << 32) if word >> 31 else int(word) for word in words]
    xa, xc, xh, xw, x1, _, h, w, c, ya, yc, yh, yw, y1, _, oh, ow, oc = numbers[:18]
    kh, kw, sh, sw, top, left, fill, zero, output_zero, rounding, low, high, *places = numbers[18:]
    blocks_in, blocks_out = -(-c // BLOCK), -(-oc // BLOCK)
    assert x1 == y1 == 1
    sizes = (blocks_out * kh * kw * blocks_in * BLOCK * BLOCK, *[blocks_out * BLOCK * 4] * 3)
    weights, *parameters = (blob[start : start + size] for start, size in zip(places, sizes, strict=True))
    weights = weights.view(np.int8).reshape(blocks_out, kh, kw, blocks_in, BLOCK, BLOCK).astype(np.int64)
    bias, multiplier, shift = (p.view("<i4").astype(np.int64) for p in parameters)

    def tensor(address: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
        start = memory[address - MEMORY.base :].view(np.int8)
        return np.lib.stride_tricks.as_strided(start, (*shape, BLOCK), (*strides, 1))

    x = tensor(xa, (blocks_in, h, w), (xc, xh, xw)).astype(np.int64)
    y = tensor(ya, (blocks_out, oh, ow), (yc, yh, yw))
    bottom, right = (max(0, (o - 1) * s + k - p - n) for o, s, k, p, n in ((oh, sh, kh, top, h), (ow, sw, kw, left, w)))
    x = np.pad(x, [(0, 0), (top, bottom), (left, right), (0, 0)], constant_values=fill) - zero
    sums = np.zeros((blocks_out, oh, ow, BLOCK), dtype=np.int64)
    for row in range(kh):
        for column in range(kw):
            window = x[:, row : row + (oh - 1) * sh + 1 : sh, column : column + (ow - 1) * sw + 1 : sw]
            sums += np.einsum("ihwc,bikc->bhwk", window, weights[:, row, column])
    sums += bias.reshape(blocks_out, 1, 1, BLOCK)
    multiplier, shift = (p.reshape(blocks_out, 1, 1, BLOCK) for p in (multiplier, shift))
    scaled = fixed_point(sums, multiplier, shift, list(Rounding)[rounding]) + output_zero
    y[...] = np.clip(scaled, low, high).astype(np.int8)


CONSTRAINTS = (
    Constraint("values must be int8", lambda m: (m.type("x").dtype, m.result.dtype), lambda v: set(v) == {DType.INT8}),
    Constraint(
        "weights must be int8, zero point 0",
        lambda m: (m.type("weights").dtype, getattr(m.nodes["layer"].operator, "weight_zero_point", 0)),
        lambda v: v == (DType.INT8, 0),
    ),
    Constraint("the batch must be 1", lambda m: m.result.shape[0], lambda v: v == 1),
    Constraint(
        "the groups must be 1", lambda m: m.type("x").shape[-1] // m.type("weights").shape[-1], lambda v: v == 1
    ),
)


def _offload(name: str, kind: type[Conv2d] | type[FullyConnected], pads: bool) -> Offload:
    x, layout = operand("x"), IMAGES if kind is Conv2d else ROWS
    source = maybe(Pad, x, name="pad") if pads else x
    layer = apply(kind, source, constant("weights"), constant("bias"), name="layer")
    pattern = apply(Clip, apply(Requantize, layer, constant("multiplier"), constant("shift")))
    return Offload(
        name,
        pattern,
        CONSTRAINTS,
        pack,
        commands,
        lambda m: m.graph.types[m.root].elements,
        channel_step=BLOCK,
        layouts={"x": layout, "result": layout},
    )


def machine(pads: bool = True, dense: bool = True) -> Target:
    """The chip; its engine may or may not pad by itself, and compute dense layers beside convolutions."""
    offloads = (
        *([_offload("padded convolution", Conv2d, True)] if pads else []),
        _offload("convolution", Conv2d, False),
        *([_offload("dense", FullyConnected, False)] if dense else []),
    )
    device = DeviceModel("none:none", base=0, size=0)
    files = ("fake_engine:blocks.h", "fake_engine:blocks.c")
    return Target(
        name="blocks",
        sentence="made up for tests",
        core=Core("rv32imc"),
        memories=(MEMORY,),
        code=MEMORY.name,
        values=MEMORY.name,
        policies=(Policy("exact", "the engine requantises as the model says", ()),),
        engines=(Engine("blocks", MEMORY.name, offloads, 256.0, files, device, wait="blocks_wait"),),
    )


def machine_with_near_memory(size: int) -> Target:
    """The same engine behind a DMA: it reaches a small memory of its own only, so that blocked values are cut."""
    near = Memory("near", base=0x10000000, size=size, alignment=64)
    target = machine()
    engine = replace(target.engines[0], memory=near.name)
    dma = Dma("dma", bytes_per_cycle=8, setup_cycles=16, base=0x1A100000)
    return replace(target, memories=(MEMORY, near), engines=(engine,), dma=dma)
