"""VTA: a RISC-V microcontroller beside an instruction-stream engine that multiplies 16x16 blocks and reads DRAM itself.

The engine takes whole layers; how a layer is cut, staged and overlapped inside it is its own affair (lower.py), found
from what its instructions mean (mapping.py). Another configuration is another `target(VtaConfig(...))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import dovetail.target as dt
from dovetail.ir.graph import Node
from dovetail.ir.operators.arithmetic import Clip, ScaleShift, scale_digits
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Concat, Pad
from dovetail.ir.operators.reduction import MaxPool2d
from dovetail.ir.types import DType, TensorType
from dovetail.legalize import (
    RequantisationLimits,
    addition_as_convolution,
    engine_requantisation,
    first_layer_in_bands,
    pools_as_depthwise,
    soonest,
)
from dovetail.target import layers
from dovetail.target.queue_driver import queue_driver
from dovetail.targets.vta import choice, cost
from dovetail.targets.vta.config import MOST_PAD, VtaConfig, macs_per_cycle, with_macs
from dovetail.targets.vta.isa import encode, encode_uop
from dovetail.targets.vta.lower import lower
from dovetail.targets.vta.mapping import constants, joined, page
from dovetail.targets.vta.writer import VtaRegion

HERE = "dovetail.targets.vta"
PAGE = dt.Memory("page", base=0x80000000, size=4096)
"""The driver's page with the vector of ones; INP and OUT elements are counted from here."""
DRAM = dt.Memory("DRAM", base=PAGE.base + PAGE.size, size=32 * 1024 * 1024 - PAGE.size, alignment=64)
MOST_LSB = 8
"""Steps of a result that rounding a layer's weights may move it, as seen with random operands: 4. `compile --check`
allows so many."""
DIGITS_USED = 3
"""Shifts and additions that make a scale; the scale is then right to 1 part in 255 on average, in 45 at worst."""
LEAST_PRODUCTS = 32
"""Products of an output from which its weights take longer than `DIGITS_USED` shifts and additions."""
MOST_SUM_LSB = 5
"""Steps of a sum of two images: each has a weight of 64 to 127, rounded by a half, so by 1/128 of its 255 steps; and
one for the result's own rounding."""
MACS = dt.Derived(macs_per_cycle, with_macs, ("block", "batch", "inp_bytes", "wgt_bytes", "acc_bytes"))
DRIVER = queue_driver(f"{HERE}:driver/vta.c", base="VTA_BASE", busy="(read_register(CONTROL) & IDLE) == 0u")
POINTERS = dict(insn="instructions", uop="uops", inp=PAGE.name, out=PAGE.name, wgt="constants", acc="constants")
"""Memory regions the driver points the engine's registers at (driver/vta.c)."""


_PIXEL, _STEPS, _LAUNCH, _MOST_BANDS = 8, 9, 500, 8
"""Cycles the core brings a pixel into blocks in, those of the ALU's steps and the reset for an entry, and those a
further launch costs beside its weights; the most bands."""


def bands(config: VtaConfig, types: Mapping[str, TensorType], chain: Sequence[Node]) -> int:
    """In how many bands the first layer ends first, by estimate: the core lays out one while the engine computes the
    one before, which loads the weights for each. Rows that two bands read are laid out for both."""
    layer = next(node for node in chain if isinstance(node.operator, Conv2d | DepthwiseConv2d))
    assert isinstance(layer.operator, Conv2d | DepthwiseConv2d)
    x, weights, result = (types[name].shape for name in (chain[0].inputs[0], layer.inputs[1], layer.output))
    blocks = -(-result[3] // config.block) * (
        -(-weights[3] // config.block) if isinstance(layer.operator, Conv2d) else 1
    )
    taps = weights[1] * weights[2] * blocks
    entry = taps + _STEPS * -(-result[3] // config.block)
    core, engine = _PIXEL * x[1] * x[2], entry * result[1] * result[2]
    halo = _PIXEL * x[2] * max(0, weights[1] - layer.operator.stride[0])
    again = _LAUNCH + taps * config.wgt_element // config.bus_bytes
    return soonest(result[1], _MOST_BANDS, (core, halo), (engine, again))[1]


def requantisation_limits(config: VtaConfig) -> RequantisationLimits:
    """Limits of the ALU's scale and shift: with MUL 15 bits and any shift; without, one shift."""
    if config.multiplies:
        return RequantisationLimits(scale_bits=15, most_shift=31, activations=DType.INT8, bias_first=True)
    return RequantisationLimits(1, min(15, config.most_shift), DType.INT8, True, multiplies=False, digits=DIGITS_USED)


def digits_pay(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a scale made of shifts and additions costs little: dense layers, whose time is that of their weights."""
    return isinstance(node.operator, FullyConnected) and types[node.inputs[1]].shape[-1] >= LEAST_PRODUCTS


def _wide(match: dt.Match) -> int:
    """The largest number that sum, bias and scale can reach."""
    channels = match.result.shape[-1]
    scale, offset = (np.broadcast_to(match.array(name).astype(np.int64), channels) for name in ("scale", "offset"))
    weights = match.array("weights").astype(np.int64)
    depthwise = match.nodes["layer"].operator.is_channelwise
    rows = weights.reshape(-1, channels).T if depthwise else weights.reshape(channels, -1)
    least, most = rows * DType.INT8.low, rows * DType.INT8.high
    edges = (np.minimum(least, most).sum(axis=1), np.maximum(least, most).sum(axis=1))
    return int(max(np.abs(edge * scale + offset).max() for edge in edges))


OPERANDS = ("x", "y")
"""Leaves of the patterns: an operand, and the other one of a sum of two."""
SHARED = (
    dt.one_of("the operand must be int8", lambda m: m.type("x").dtype.text, "int8"),
    dt.one_of("the result must be int8", lambda m: m.result.dtype.text, "int8"),
)
SCALED = (
    dt.Constraint("the scale must be 1 to 32767", layers.range_of("scale"), lambda v: v[0] >= 1 and v[1] <= 32767),
    dt.Constraint("the shift must be 0 to 31", layers.range_of("shift"), lambda v: v[0] >= 0 and v[1] <= 31),
)
SHIFTED = (
    dt.one_of(
        "the scale must be 1 or made of few digits, as the ALU has no MUL",
        lambda m: scale_digits(np.atleast_1d(m.array("scale"))) is not None,
        True,
    ),
    dt.Constraint("the shift must be 0 to 30", layers.range_of("shift"), lambda v: v[0] >= 0 and v[1] <= 30),
)
LINEAR = (
    layers.NARROW_WEIGHTS,
    dt.one_of(
        "zero points must be folded into the offset",
        lambda m: (layers.linear_of(m).input_zero_point, layers.linear_of(m).weight_zero_point),
        (0, 0),
    ),
    dt.one_of(
        "the offset must be a multiple of the scale", lambda m: int((m.array("offset") % m.array("scale")).max()), 0
    ),
    dt.Constraint("sum, bias and scale must stay within 32 bits", _wide, lambda v: v < 1 << 31),
)
MOST_KERNEL = 2 * MOST_PAD + 1
WINDOW = (layers.kernel_at_most(MOST_KERNEL, MOST_KERNEL), layers.NO_DILATION)
PADDED = (
    dt.Constraint("there must be padding", lambda m: m.has("pad"), lambda v: v),
    layers.ZERO_PADDING,
    dt.Constraint(
        f"padding must be of rows and columns, at most {MOST_PAD}",
        lambda m: (m.operator("pad", Pad).before, m.operator("pad", Pad).after),
        lambda v: all(max(s) <= MOST_PAD and s[0] == s[3] == 0 for s in v),
    ),
)
POOL = (
    dt.Constraint(
        f"a pool must be 1x1 to {MOST_KERNEL}x{MOST_KERNEL}",
        lambda m: m.operator("layer", MaxPool2d).kernel,
        lambda v: max(v) <= MOST_KERNEL,
    ),
    dt.one_of("a pool must not be padded", lambda m: m.operator("layer", MaxPool2d).padding, ((0, 0), (0, 0))),
)
LAYERS: Mapping[str, tuple[type[layers.Linear], tuple[dt.Constraint, ...]]] = {
    "convolution": (Conv2d, (*WINDOW, layers.NO_GROUPS)),
    "depthwise convolution": (DepthwiseConv2d, (*WINDOW, layers.NO_MULTIPLIER)),
    "dense": (FullyConnected, ()),
}


def takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the engine has the shape of a linear layer (used to choose rewrites, before patterns are matched)."""
    if isinstance(node.operator, FullyConnected):
        return layers.keeps((layers.ONE_ROW,), types, node)
    limits = (*WINDOW, layers.ONE_IMAGE, layers.NO_GROUPS, layers.NO_MULTIPLIER)
    return isinstance(node.operator, Conv2d | DepthwiseConv2d) and layers.keeps(limits, types, node)


def offloads(config: VtaConfig) -> tuple[dt.Offload, ...]:
    """The engine's offloads: linear layers with requantisation, padded or not, and maximum pools."""
    image, vector = dt.Layout(_lanes(config, 4)), dt.Layout(_lanes(config, 2))
    scales = SCALED if config.multiplies else SHIFTED
    found = []
    for name, (kind, limits) in LAYERS.items():
        for padded in (True, False) if kind is not FullyConnected else (False,):
            x = dt.operand("x")
            before = dt.maybe(Pad, x, name="pad") if padded else x
            layer = dt.apply(kind, before, dt.constant("weights"), name="layer")
            checks = (*LINEAR, *scales, *limits, *(PADDED if padded else ()), *SHARED)
            layout = vector if kind is FullyConnected else image
            found.append(_offload(f"padded {name}" if padded else name, _requantised(layer), checks, layout, config))
    both = dt.apply(Concat, *(dt.operand(leaf) for leaf in OPERANDS), name="both")
    total = _requantised(dt.apply(Conv2d, both, dt.constant("weights"), name="layer"))
    found.insert(0, _offload("sum of two", total, (*LINEAR, *scales, *_of_two(config), *SHARED), image, config))
    pool = dt.apply(MaxPool2d, dt.operand("x"), name="layer")
    found.append(_offload("maximum pool", pool, (*POOL, *SHARED), image, config))
    return tuple(found)


def _requantised(layer: dt.Pattern) -> dt.Pattern:
    """The layer, scaled, shifted and limited."""
    parameters = (dt.constant(each) for each in ("scale", "offset", "shift"))
    return dt.apply(Clip, dt.apply(ScaleShift, layer, *parameters, name="scaled"))


def _of_two(config: VtaConfig) -> tuple[dt.Constraint, ...]:
    """Limits of a 1x1 convolution of two operands, their channels side by side."""
    return (
        layers.kernel_at_most(1, 1),
        dt.one_of("the operands must be joined along their channels", lambda m: m.operator("both", Concat).axis, 3),
        dt.one_of(
            "the operands must be two images of one shape", lambda m: m.type("x").shape == m.type("y").shape, True
        ),
        dt.Constraint(
            f"the operands must have a multiple of {config.block} channels",
            lambda m: m.type("x").shape[-1],
            lambda v: v % config.block == 0,
        ),
        dt.one_of(
            "the weights must be of both operands",
            lambda m: m.array("weights").shape[-1] == 2 * m.type("x").shape[-1],
            True,
        ),
    )


def _lanes(config: VtaConfig, rank: int) -> tuple[tuple[int, int], ...]:
    """Blocks of images and channels outermost, rows and columns, then the lanes of one element."""
    lanes = ((0, 1), (rank - 1, 1)) if config.batch > 1 else ((rank - 1, 1),)
    return ((0, config.batch), (rank - 1, config.block), *((axis, 1) for axis in range(1, rank - 1)), *lanes)


def _offload(
    name: str, pattern: Any, checks: tuple[dt.Constraint, ...], layout: dt.Layout, config: VtaConfig
) -> dt.Offload:
    def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
        """The number of instructions and of micro-operations, then these."""
        values = (match.values[leaf] for leaf in OPERANDS if leaf in match.values)
        places = (operands[each] for each in (*values, "result"))
        *parts, y = (dt.Operand(place.address - PAGE.base, place.strides) for place in places)
        region = VtaRegion(joined(match.graph), tuple(parts), y, constants(match.graph, config))
        made = lower(region, choice.tiling(match, config), config)
        words = [word for instruction in made.instructions for word in encode(instruction, config)]
        micro = [encode_uop(uop, config) for uop in made.uops]
        return (dt.Command("vta_start", (len(made.instructions), len(micro), *words, *micro), constants=True),)

    def fits(match: dt.Match) -> str:
        wrong = cost.problem(cost.shape(match.graph, config), cost.VtaTiling(1, 1, 1, True), config)
        return "not even one pixel of one block fits the SRAMs" if wrong else ""

    own = (
        dt.Constraint(
            f"there may be at most {config.batch} images",
            lambda match: match.type("x").shape[0],
            lambda v: v <= config.batch,
        ),
        dt.one_of("a tile must fit the SRAMs", fits, ""),
    )
    return dt.Offload(
        name=name,
        pattern=pattern,
        constraints=(*checks, *own),
        pack=lambda match: {"constants": constants(match.graph, config).blob},
        commands=commands,
        cycles=lambda match: choice.estimate(match, config),
        layouts=dict.fromkeys((*OPERANDS, "result"), layout),
        knobs=lambda match: choice.space(match, config),
        default=lambda match: choice.default(match, config),
        floor=lambda match: cost.floor(cost.shape(match.graph, config), config),
    )


def _parts(command: dt.Command) -> dict[str, bytes]:
    count, micro, *words = command.words
    content = b"".join(word.to_bytes(4, "little") for word in words)
    assert len(content) == 16 * count + 4 * micro
    return {"instructions": content[: 16 * count], "uops": content[16 * count :]}


def target(config: VtaConfig, name: str = "vta") -> dt.Target:
    """The chip with an engine of this configuration."""
    sizes = {field: getattr(config, field) for field in config.__struct_fields__}
    engine = dt.Engine(
        name="vta",
        memory=DRAM.name,
        offloads=offloads(config),
        ideal_macs_per_cycle=float(macs_per_cycle(config)),
        best=lambda products: cost.best(products, config),
        driver=(f"{HERE}:driver/vta.h",),
        files={"vta.c": DRIVER},
        device=dt.DeviceModel(f"{HERE}.device:VtaDevice", base=0x43C00000, size=0x100, arguments=sizes),
        wait="vta_wait",
        prepare="vta_init",
        bytes_per_cycle=float(config.bus_bytes),
        defines={"VTA_MEMORY": PAGE.base, "VTA_BLOCK": config.block, "VTA_BATCH": config.batch},
        raw=dt.Raw(_parts, POINTERS, {PAGE.name: page(config).tobytes()}),
    )
    limits = requantisation_limits(config)
    rewrites = (
        dt.Rewrite("pools", pools_as_depthwise(takes, dt.Rounding.DOUBLE), lsb=0),
        dt.Rewrite(
            "requantisation", engine_requantisation(takes, limits, digits_pay), lsb=2 if config.multiplies else MOST_LSB
        ),
        dt.Rewrite("residual", addition_as_convolution(limits), lsb=2 if config.multiplies else MOST_SUM_LSB),
        dt.Rewrite("bands", first_layer_in_bands(partial(bands, config), 1, laid_out=True), lsb=0),
    )
    return dt.Target(
        name=name,
        recipe=dt.Recipe("vta", config, lambda changed: target(changed, name), {"macs": MACS}),
        sentence=f"RISC-V RV32IMC, 32 MiB DRAM, VTA engine of {config.batch}x{config.block}x{config.block}",
        core=dt.Core("rv32imc"),
        memories=(PAGE, DRAM),
        code=DRAM.name,
        values=DRAM.name,
        engines=(engine,),
        quantisation=dt.Quantisation(shifts=not config.multiplies),
        policies=(
            dt.Policy("engine", f"the engine requantises: shift, limits; within {MOST_LSB} steps, mostly 1", rewrites),
        ),
    )


TARGET = target(VtaConfig())
