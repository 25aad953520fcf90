"""Gemmini, the systolic array of UC Berkeley, beside a 64-bit RISC-V core that issues its RoCC instructions.

What it is from and what its figures are: docs/gemmini.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial

import dovetail.target as dt
from dovetail.ir.graph import Node
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import TensorType
from dovetail.legalize.ready import FLOAT32_PER_LAYER
from dovetail.target import layers
from dovetail.targets.gemmini import lower, rounded
from dovetail.targets.gemmini.nests import FENCE, Config
from dovetail.targets.gemmini.rewrites import in_two_steps, sums_and_means

HERE = "dovetail.targets.gemmini"
DRAM = dt.Memory("dram", base=0x80000000, size=16 << 20)
LIMITED = dt.Constraint(
    "results must be limited to 127, and to -128 or 0",
    lambda m: (m.operator("clip", Clip).low, m.operator("clip", Clip).high),
    lambda v: v[0] in (-128, 0) and v[1] == 127,
)
NO_ZERO_POINTS = dt.one_of(
    "zero points must be 0",
    lambda m: (layers.linear_of(m).input_zero_point, layers.layer_of(m).output_zero_point),
    (0, 0),
)
WINDOW = (
    layers.strides_of(1, 2, 3),
    *layers.zero_padding_at_most(15),
    dt.Constraint(
        "padding must be smaller than the kernel",
        lambda m: (layers.window_of(m).before, layers.window_of(m).after, layers.window_of(m).kernel),
        lambda v: all(max(before, after) < size for before, after, size in zip(*v, strict=True)),
    ),
)
KINDS: Mapping[str, tuple[type[layers.Linear], tuple[dt.Constraint, ...]]] = {
    "convolution": (Conv2d, (*WINDOW, layers.NO_GROUPS)),
    "depthwise": (DepthwiseConv2d, (*WINDOW, layers.NO_MULTIPLIER)),
    "dense": (FullyConnected, ()),
}


def _is_centred(types: Mapping[str, TensorType], node: Node) -> bool:
    """Whether a layer reads integers whose zero point is 0: of others the core would round in float32, slowly."""
    return getattr(node.operator, "input_zero_point", 0) == 0


ONE_SCALE = (dt.Rewrite("sums and means", sums_and_means, lsb=1), FLOAT32_PER_LAYER.rewrite(_is_centred))
EXACT = (dt.Rewrite("in two steps", in_two_steps, lsb=0),)
SUMS = (
    dt.one_of("operands must be int8", lambda m: m.type("x").dtype.text, "int8"),
    layers.INT8_WEIGHTS,
    layers.ONE_IMAGE,
)


def sums(name: str, kind: type[layers.Linear]) -> dict[str, dt.Pattern]:
    """A layer whose sums the core requantises, as TensorFlow Lite's scales of channels want it."""
    x = dt.operand("x") if kind is FullyConnected else dt.maybe(Pad, dt.operand("x"))
    leaves = {f"sums of {name}": (dt.constant("bias"),), f"sums of {name} without bias": ()}
    return {text: dt.apply(kind, x, dt.constant("weights"), *bias, name="layer") for text, bias in leaves.items()}


def layers_of(config: Config) -> Iterator[dt.Offload]:
    """Linear layers: with one scale, several narrow pixels as one or not, and their sums as they are."""
    fits = dt.Constraint(
        "operand, weights and sums must fit the local memories",
        lambda m: lower.shape_of(config, m).fits,
        bool,
        dt.Scope.TILES,
    )
    narrow = dt.Constraint(
        "pixels must be so narrow that several taken as one fill the array better",
        lambda m: lower.fold_of(config, m) is not None,
        bool,
    )
    limits = (*layers.INT8, layers.INT8_WEIGHTS, layers.ONE_IMAGE, NO_ZERO_POINTS, LIMITED)

    def offload(name: str, pattern: dt.Pattern, own: tuple[dt.Constraint, ...], folded: bool = False) -> dt.Offload:
        pack, commands, cycles = (
            partial(lower.pack, config, folded=folded),
            partial(lower.layer, config, folded=folded),
            partial(lower.cycles, config, folded=folded),
        )
        step = 1 if folded else config.dim
        return dt.Offload(name, pattern, own, pack, commands, cycles, channel_step=step, strided=not folded)

    for given, (kind, own) in KINDS.items():
        for name, pattern in layers.requantised(given, kind).items():
            scaled = (*limits, *FLOAT32_PER_LAYER.limits, fits, *own)
            if kind is not FullyConnected:
                yield offload(f"{name}, pixels as one", pattern, (*scaled, narrow), folded=True)
            yield offload(name, pattern, scaled)
        for name, pattern in sums(given, kind).items():
            yield offload(name, pattern, (*SUMS, fits, *own))


def mean_of(config: Config) -> dt.Offload:
    """The mean of a whole image, as `rewrites` has it: a depthwise layer whose weights are all 1."""
    limits = (
        layers.ALL_INT8,
        layers.INT8_WEIGHTS,
        layers.ONE_IMAGE,
        NO_ZERO_POINTS,
        LIMITED,
        layers.NO_MULTIPLIER,
        *FLOAT32_PER_LAYER.limits,
        dt.one_of("all weights of a mean must be 1", lambda m: sorted({*m.array("weights").reshape(-1).tolist()}), [1]),
        dt.one_of("a mean must be of the whole image", lambda m: m.result.shape[1:3], (1, 1)),
        *layers.zero_padding_at_most(0),
    )
    pattern = layers.requantised("mean", DepthwiseConv2d)["mean without bias"]
    cycles = partial(lower.mean_cycles, config)
    return dt.Offload("mean", pattern, limits, lambda match: {}, partial(lower.mean, config), cycles)


def rounded_sums(config: Config) -> Iterator[dt.Offload]:
    """The second step of `rewrites.in_two_steps`: what the core has multiplied, once or twice, is moved, scaled and
    limited."""
    x = dt.operand("x")
    limits = (
        dt.one_of("sums must be int32", lambda m: m.type("x").dtype.text, "int32"),
        dt.one_of("results must be int8", lambda m: m.result.dtype.text, "int8"),
        layers.ONE_IMAGE,
        dt.one_of(
            "there must be one offset for each channel",
            lambda m: m.type("offset").shape == m.result.shape[-1:],
            True,
        ),
        dt.one_of("zero points must be 0", lambda m: m.operator("requantize", Requantize).output_zero_point, 0),
        LIMITED,
        *FLOAT32_PER_LAYER.limits,
    )
    pack, commands = partial(rounded.pack, config), partial(rounded.commands, config)
    cycles = partial(rounded.cycles, config)
    for name, total in (("rounding", dt.apply(Add, x, x, name="twice")), ("limiting", x)):
        moved = dt.apply(Add, total, dt.constant("offset"), name="moved")
        scaled = dt.apply(Requantize, moved, dt.constant("multiplier"), dt.constant("shift"))
        own = dt.Offload(name, dt.apply(Clip, scaled), limits, pack, commands, cycles, channel_step=config.dim)
        yield replace(own, cases=rounded.cases) if total is not x else own


def engine(config: Config) -> dt.Engine:
    """The array, as far as the compiler is concerned."""
    return dt.Engine(
        name="gemmini",
        memory=DRAM.name,
        ideal_macs_per_cycle=float(config.dim**2),
        offloads=(mean_of(config), *layers_of(config), *rounded_sums(config)),
        driver=(f"{HERE}:driver/gemmini.h", f"{HERE}:driver/gemmini.c"),
        device=dt.DeviceModel(f"{HERE}.device:GemminiDevice", arguments=asdict(config), opcode=0x7B),
        stream=dt.CommandStream("gemmini_start", lambda unit, unfinished: FENCE, pieces=False),
        wait="gemmini_wait",
        bytes_per_cycle=16,
    )


def target(config: Config) -> dt.Target:
    """A core with this Gemmini."""
    return dt.Target(
        name="gemmini",
        sentence=f"RV64 core, Gemmini of {config.dim} x {config.dim} behind its RoCC port, 16 MiB DRAM at 0x80000000",
        core=dt.Core("rv64gc"),
        memories=(DRAM,),
        code=DRAM.name,
        values=DRAM.name,
        engines=(engine(config),),
        policies=(
            dt.Policy(
                "one scale", "layers with one scale are rounded as its float32 product, within 1 step", ONE_SCALE
            ),
            dt.Policy(
                "exact", "the array makes sums, the core multiplies by channels' scales as the model says", EXACT
            ),
        ),
        quantisation=dt.Quantisation(per_channel=False, symmetric=True, weight_bits=(8,)),
        recipe=dt.Recipe("gemmini", config, target),
    )


TARGET = target(Config())
