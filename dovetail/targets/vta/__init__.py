"""VTA: a RISC-V microcontroller beside an instruction-stream engine that multiplies 16x16 blocks and reads DRAM itself.

The engine takes whole layers; how a layer is cut, staged and overlapped inside it is its own affair (lower.py), found
from what its instructions mean (instructions.py). Another configuration is another `target(VtaConfig(...))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dovetail.adapt import RequantisationLimits, addition_as_convolution, engine_requantisation
from dovetail.graph.graph import Node
from dovetail.graph.types import DType, TensorType
from dovetail.operators.arithmetic import Clip, ScaleShift
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.operators.movement import Pad
from dovetail.operators.pooling import MaxPool2d
from dovetail.target import (
    Command,
    Constraint,
    Core,
    Derived,
    DeviceModel,
    Engine,
    Layout,
    Match,
    Memory,
    Offload,
    Operand,
    Policy,
    Raw,
    Recipe,
    Rewrite,
    Target,
    apply,
    constant,
    maybe,
    operand,
)
from dovetail.target.layers import NO_GROUPS, NO_MULTIPLIER
from dovetail.targets.vta import cost
from dovetail.targets.vta.config import VtaConfig, macs_per_cycle, with_macs
from dovetail.targets.vta.constants import constants, ones_row
from dovetail.targets.vta.isa import encode, encode_uop
from dovetail.targets.vta.knobs import default, space, tiling
from dovetail.targets.vta.lower import lower
from dovetail.targets.vta.writer import Placed, Stream

PAGE = Memory("page", base=0x80000000, size=4096)
"""Where the driver keeps the vector of ones; INP and OUT elements are counted from here."""
DRAM = Memory("DRAM", base=PAGE.base + PAGE.size, size=32 * 1024 * 1024 - PAGE.size, alignment=64)
LIMITS = RequantisationLimits(scale_bits=15, most_shift=31, activations=DType.INT8, bias_first=True)
_INT32 = 1 << 31
MACS = Derived(macs_per_cycle, with_macs, ("block", "batch", "inp_bytes", "wgt_bytes", "acc_bytes"))


def region_stream(match: Match, operands: Mapping[str, Operand], config: VtaConfig) -> Stream:
    """The engine's instructions for a region.

    Raises:
        PlanError: the tiling chosen for it does not fit the SRAMs.
    """
    places = []
    for name in (match.values["x"], "result"):
        found = operands[name]
        places.append(Operand(found.address - PAGE.base, found.strides))
    placed = Placed(match.graph, places[0], places[1], constants(match.graph, config))
    return lower(placed, tiling(match, config), config)


def offloads(config: VtaConfig) -> tuple[Offload, ...]:
    """What the engine computes: linear layers with requantisation, padded or not, and maximum pools."""
    image = Layout(_lanes(config, 4))
    vector = Layout(_lanes(config, 2))
    found = []
    for name, kind, limits in (
        ("convolution", Conv2d, CONVOLUTION),
        ("depthwise convolution", DepthwiseConv2d, DEPTHWISE),
        ("dense", FullyConnected, ()),
    ):
        for padded in (True, False) if kind is not FullyConnected else (False,):
            x = operand("x")
            layer = apply(kind, maybe(Pad, x, name="pad") if padded else x, constant("weights"), name="layer")
            scaled = apply(ScaleShift, layer, constant("scale"), constant("offset"), constant("shift"), name="scaled")
            layout = vector if kind is FullyConnected else image
            checks = (*LINEAR, *limits, *(PADDED if padded else ()), *SHARED)
            found.append(_offload(f"padded {name}" if padded else name, apply(Clip, scaled), checks, layout, config))
    pool = apply(MaxPool2d, operand("x"), name="layer")
    found.append(_offload("maximum pool", pool, (*POOL, *SHARED), image, config))
    return tuple(found)


def _offload(name: str, pattern: Any, checks: tuple[Constraint, ...], layout: Layout, config: VtaConfig) -> Offload:
    def commands(match: Match, operands: Mapping[str, Operand]) -> tuple[Command, ...]:
        made = region_stream(match, operands, config)
        words = [word for instruction in made.instructions for word in encode(instruction, config)]
        micro = [encode_uop(uop, config) for uop in made.uops]
        return (Command("vta_start", (len(made.instructions), len(micro), *words, *micro), constants=True),)

    def fits(match: Match) -> str:
        shape = cost.shape(match.graph, config)
        return "" if cost.best(shape, config) else "not even one pixel of one block fits the SRAMs"

    def batch(match: Match) -> int:
        return match.type("x").shape[0]

    own = (
        Constraint(f"there may be at most {config.batch} images", batch, lambda v: v <= config.batch),
        Constraint("a tile must fit the SRAMs", fits, lambda v: v == ""),
    )
    return Offload(
        name=name,
        pattern=pattern,
        constraints=(*checks, *own),
        pack=lambda match: {"constants": constants(match.graph, config).blob},
        commands=commands,
        cycles=lambda match: cost.cycles(cost.shape(match.graph, config), tiling(match, config), config),
        layouts={"x": layout, "result": layout},
        knobs=lambda match: space(match, config),
        default=lambda match: default(match, config),
        floor=lambda match: cost.floor(cost.shape(match.graph, config), config),
    )


def _parts(command: Command) -> dict[str, bytes]:
    """A task's instructions and micro-operations, little-endian."""
    count, micro, *words = command.words
    content = b"".join(word.to_bytes(4, "little") for word in words)
    assert len(content) == 16 * count + 4 * micro
    return {"instructions": content[: 16 * count], "uops": content[16 * count :]}


POINTERS = {
    "insn": "instructions",
    "uop": "uops",
    "inp": PAGE.name,
    "out": PAGE.name,
    "wgt": "constants",
    "acc": "constants",
}
"""What the driver points the engine's registers at (driver/vta.c)."""


def _lanes(config: VtaConfig, rank: int) -> tuple[tuple[int, int], ...]:
    """Blocks of images and channels outermost, rows and columns, then the lanes of one element."""
    lanes = ((0, 1), (rank - 1, 1)) if config.batch > 1 else ((rank - 1, 1),)
    return ((0, config.batch), (rank - 1, config.block), *((axis, 1) for axis in range(1, rank - 1)), *lanes)


def _layer(match: Match) -> Conv2d | DepthwiseConv2d:
    found = match.nodes["layer"].operator
    assert isinstance(found, Conv2d | DepthwiseConv2d)
    return found


def _zero_points(match: Match) -> tuple[int, int]:
    layer = match.nodes["layer"].operator
    assert isinstance(layer, Conv2d | DepthwiseConv2d | FullyConnected)
    return layer.input_zero_point, layer.weight_zero_point


def _wide(match: Match) -> int:
    """The largest number that sum, bias and scale can reach."""
    channels = match.result.shape[-1]
    scale, offset = (np.broadcast_to(match.array(name).astype(np.int64), channels) for name in ("scale", "offset"))
    weights = match.array("weights").astype(np.int64)
    depthwise = isinstance(match.nodes["layer"].operator, DepthwiseConv2d)
    rows = weights.reshape(-1, channels).T if depthwise else weights.reshape(channels, -1)
    least, most = rows * DType.INT8.low, rows * DType.INT8.high
    edges = (np.minimum(least, most).sum(axis=1), np.maximum(least, most).sum(axis=1))
    return int(max(np.abs(edge * scale + offset).max() for edge in edges))


SHARED = (
    Constraint("the operand must be int8", lambda m: m.type("x").dtype.text, lambda v: v == "int8"),
    Constraint("the result must be int8", lambda m: m.result.dtype.text, lambda v: v == "int8"),
)
LINEAR = (
    Constraint("weights must be int8 or narrower", lambda m: m.type("weights").dtype.text,
               lambda v: v in ("int8", "int4", "int2")),
    Constraint("zero points must be folded into the offset",
               _zero_points, lambda v: v == (0, 0)),
    Constraint("the scale must be 1 to 32767", lambda m: (int(m.array("scale").min()), int(m.array("scale").max())),
               lambda v: v[0] >= 1 and v[1] <= 32767),
    Constraint("the offset must be a multiple of the scale",
               lambda m: int((m.array("offset") % m.array("scale")).max()), lambda v: v == 0),
    Constraint("the shift must be 0 to 31", lambda m: (int(m.array("shift").min()), int(m.array("shift").max())),
               lambda v: v[0] >= 0 and v[1] <= 31),
    Constraint("sum, bias and scale must stay within 32 bits", _wide, lambda v: v < _INT32),
)  # fmt: skip
WINDOW = (
    Constraint("a kernel must be 1x1 to 7x7", lambda m: m.type("weights").shape[1:3], lambda v: max(v) <= 7),
    Constraint("the dilation must be 1x1", lambda m: _layer(m).dilation, lambda v: v == (1, 1)),
)
CONVOLUTION = (*WINDOW, NO_GROUPS)
DEPTHWISE = (*WINDOW, NO_MULTIPLIER)
PADDED = (
    Constraint("there must be padding", lambda m: m.has("pad"), lambda v: v),
    Constraint("padding must be zeros", lambda m: m.operator("pad", Pad).value, lambda v: v == 0),
    Constraint("padding must be of rows and columns, at most 15", lambda m: (m.operator("pad", Pad).before,
               m.operator("pad", Pad).after), lambda v: all(max(s) <= 15 and s[0] == s[3] == 0 for s in v)),
)  # fmt: skip
POOL = (
    Constraint("a pool must be 1x1 to 7x7", lambda m: m.operator("layer", MaxPool2d).kernel, lambda v: max(v) <= 7),
    Constraint("a pool must not be padded", lambda m: m.operator("layer", MaxPool2d).padding,
               lambda v: v == ((0, 0), (0, 0))),
)  # fmt: skip


def takes(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether the engine has the shape of a linear layer (used to choose rewrites, before patterns are matched)."""
    operator = node.operator
    if isinstance(operator, FullyConnected):
        return types[node.inputs[0]].shape[:-1] == (1,)
    if not isinstance(operator, Conv2d | DepthwiseConv2d) or operator.dilation != (1, 1):
        return False
    x, w = types[node.inputs[0]].shape, types[node.inputs[1]].shape
    return max(w[1:3]) <= 7 and x[0] == 1 and w[3] == x[3]


def target(config: VtaConfig, name: str = "vta") -> Target:
    """The chip with an engine of this configuration."""
    sizes = {field: getattr(config, field) for field in config.__slots__}
    engine = Engine(
        name="vta",
        memory=DRAM.name,
        offloads=offloads(config),
        ideal_macs_per_cycle=float(macs_per_cycle(config)),
        driver=("dovetail.targets.vta:driver/vta.h", "dovetail.targets.vta:driver/vta.c"),
        device=DeviceModel("dovetail.targets.vta.device:VtaDevice", base=0x43C00000, size=0x100, arguments=sizes),
        wait="vta_wait",
        prepare="vta_init",
        bytes_per_cycle=float(config.bus_bytes),
        defines={"VTA_MEMORY": PAGE.base, "VTA_BLOCK": config.block, "VTA_BATCH": config.batch},
        raw=Raw(_parts, POINTERS, {PAGE.name: ones_row(config).tobytes()}),
    )
    return Target(
        name=name,
        recipe=Recipe("vta", config, lambda changed: target(changed, name), {"macs": MACS}),
        sentence=f"RISC-V RV32IMC, 32 MiB DRAM, VTA engine of {config.batch}x{config.block}x{config.block}",
        core=Core("rv32imc"),
        memories=(PAGE, DRAM),
        code=DRAM.name,
        values=DRAM.name,
        engines=(engine,),
        policies=(
            Policy("engine", "the engine requantises: 32-bit product, shift, limits",
                   (Rewrite("requantisation", engine_requantisation(takes, LIMITS), lsb=2),
                    Rewrite("residual", addition_as_convolution(LIMITS), lsb=2))),
        ),
    )  # fmt: skip


TARGET = target(VtaConfig())


