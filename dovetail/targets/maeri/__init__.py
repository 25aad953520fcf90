"""A RISC-V microcontroller with a MAERI: multipliers that form dot products of any sizes, side by side.

The tree is the published one; that it hangs on a bus of 32 bits, reads operands from the one memory and gives out
32-bit sums is this chip's. `dovetail schedule` orders a whole network on it; compiled, each layer is one launch with an
order of its own, and the core does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from dovetail.errors import TargetError
from dovetail.graph.graph import Graph
from dovetail.graph.types import Array
from dovetail.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.target import (
    Command,
    Constraint,
    Core,
    Derived,
    DeviceModel,
    Engine,
    Match,
    Memory,
    Offload,
    Operand,
    Ordered,
    OrderRequest,
    Policy,
    Recipe,
    Target,
    apply,
    constant,
    operand,
)
from dovetail.targets.maeri.config import MaeriConfig, with_multipliers
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.schedule import Schedule
from dovetail.targets.maeri.task import Place, Task, encode
from dovetail.targets.maeri.work import network

MEMORY = Memory("RAM", base=0x80000000, size=32 << 20, alignment=64)
MACS = Derived(lambda config: config.multipliers, with_multipliers, ("multipliers", "distribution", "collection"))
KINDS = {"convolution": Conv2d, "depthwise convolution": DepthwiseConv2d, "dense": FullyConnected}


def _layer(match: Match) -> Conv2d | DepthwiseConv2d | FullyConnected:
    found = match.nodes["layer"].operator
    assert isinstance(found, Conv2d | DepthwiseConv2d | FullyConnected)
    return found


def _schedule(match: Match, config: MaeriConfig) -> Schedule:
    return arrange(network(match.graph), config)


def pack(match: Match) -> dict[str, Array]:
    """Weights as they are, a word of bias per output channel."""
    bias = match.array("bias") if "bias" in match.values else np.zeros(match.result.shape[-1])
    weights = np.ascontiguousarray(match.array("weights"), np.int8)
    return {"weights": weights.reshape(-1).view(np.uint8), "sums": bias.astype("<i4").view(np.uint8)}


def _place(operand: Operand, image: bool) -> Place:
    """Rows of a matrix are rows of an image of one column."""
    row, column, channel = operand.strides[1:] if image else (operand.strides[-2], 0, operand.strides[-1])
    return Place(operand.address, row, column, channel)


def task(match: Match, operands: Mapping[str, Operand], config: MaeriConfig) -> Task:
    """The launch of a region."""
    schedule, layer = _schedule(match, config), _layer(match)
    image = len(match.result.shape) == 4
    return Task(
        layer=schedule.network.works[0].layer,
        depthwise=isinstance(layer, DepthwiseConv2d),
        zero_point=layer.input_zero_point,
        unsigned=not match.type("x").dtype.signed,
        source=_place(operands[match.values["x"]], image),
        result=_place(operands["result"], image),
        weights=operands["weights"].address,
        bias=operands["sums"].address,
        items=schedule.items,
    )


SHARED = (
    Constraint("the operand must be int8 or uint8", lambda m: m.type("x").dtype.text, lambda v: v in ("int8", "uint8")),
    Constraint("weights must be int8 or narrower", lambda m: m.type("weights").dtype.text,
               lambda v: v in ("int8", "int4", "int2")),
    Constraint("weights must be symmetric (zero point 0)", lambda m: _layer(m).weight_zero_point, lambda v: v == 0),
    Constraint("the batch must be 1", lambda m: 1 if len(m.result.shape) == 2 else m.result.shape[0], lambda v: v == 1),
    Constraint("a dense layer must read a matrix", lambda m: len(m.result.shape), lambda v: v in (2, 4)),
)  # fmt: skip
WINDOW = (
    Constraint("the dilation must be 1x1", lambda m: getattr(_layer(m), "dilation", (1, 1)), lambda v: v == (1, 1)),
    Constraint("strides of rows and columns must be equal", lambda m: getattr(_layer(m), "stride", (1, 1)),
               lambda v: v[0] == v[1]),
)  # fmt: skip


def _offloads(config: MaeriConfig) -> tuple[Offload, ...]:
    """Every kind of layer, with and without a bias."""

    def fits(match: Match) -> str:
        """Why there is no order; empty where there is one."""
        try:
            return "" if _schedule(match, config).items else "nothing to do"
        except TargetError as error:
            return error.what

    def commands(match: Match, operands: Mapping[str, Operand]) -> tuple[Command, ...]:
        """One launch, its words counted."""
        words = encode(task(match, operands, config))
        return (Command("maeri_start", (len(words), *words), constants=True),)

    limit = Constraint("virtual neurons must fit the multipliers", fits, lambda v: v == "")
    found = []
    for name, kind in KINDS.items():
        limits = (*SHARED, *(WINDOW if kind is not FullyConnected else ()), limit)
        for biased in (True, False):
            parts = (operand("x"), constant("weights"), *((constant("bias"),) if biased else ()))
            found.append(
                Offload(
                    name=name if biased else f"{name} without bias",
                    pattern=apply(kind, *parts, name="layer"),
                    constraints=limits,
                    pack=pack,
                    commands=commands,
                    cycles=lambda match: _schedule(match, config).makespan,
                )
            )
    return tuple(found)


def target(config: MaeriConfig, name: str = "maeri", rules: Rules | None = None) -> Target:
    """The chip with an engine of this configuration.

    Args:
        config: its sizes.
        name: the target's.
        rules: what `dovetail schedule` keeps to where no file of rules is given.
    """

    def ordering(graph: Graph, request: OrderRequest) -> Ordered:
        """See `dovetail.targets.maeri.order`."""
        from dovetail.targets.maeri.order import order

        return order(graph, request, config, rules or Rules())

    engine = Engine(
        name="maeri",
        memory=MEMORY.name,
        offloads=_offloads(config),
        ideal_macs_per_cycle=float(config.multipliers),
        driver=("dovetail.targets.maeri:driver/maeri.h", "dovetail.targets.maeri:driver/maeri.c"),
        device=DeviceModel("dovetail.targets.maeri.device:MaeriDevice", base=0x43D00000, size=0x100,
                           arguments=asdict(config)),
        wait="maeri_wait",
        prepare="maeri_init",
    )  # fmt: skip
    return Target(
        name=name,
        recipe=Recipe("maeri", config, lambda changed: target(changed, name, rules), {"macs": MACS}),
        sentence=f"RISC-V RV32IMC, 32 MiB RAM, MAERI of {config.multipliers} multipliers",
        core=Core("rv32imc"),
        memories=(MEMORY,),
        code=MEMORY.name,
        values=MEMORY.name,
        engines=(engine,),
        policies=(Policy("exact", "the engine gives 32-bit sums, the core requantises as TFLite Micro does", ()),),
        ordering=ordering,
    )


TARGET = target(MaeriConfig())
