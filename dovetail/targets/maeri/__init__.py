"""A RISC-V microcontroller with a MAERI: multipliers that form dot products of any sizes, side by side.

The tree is the published one; that it hangs on a bus of 32 bits, reads operands from the one memory and gives out
32-bit sums is this chip's. `dovetail schedule` orders a whole network on it; compiled, each layer is one launch with an
order of its own, and the core does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

import dovetail.target as dt
from dovetail.errors import TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import Array
from dovetail.target import layers
from dovetail.target.queue_driver import queue_driver
from dovetail.targets.maeri.config import MaeriConfig, Rules, with_multipliers
from dovetail.targets.maeri.listing import Order, arrange
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.task import Strided, Task, encode

HERE = "dovetail.targets.maeri"
MEMORY = dt.Memory("RAM", base=0x80000000, size=32 << 20, alignment=64)
MACS = dt.Derived(lambda config: config.multipliers, with_multipliers, ("multipliers", "distribution", "collection"))
DRIVER = queue_driver(
    f"{HERE}:driver/maeri.c",
    base="MAERI_BASE",
    busy="read_register(ROOM) != PLACES",
    masked=" The interrupt stays\n * "
    "masked, so no handler runs, and wfi returns at once when the line is high already.",
)


def _order(match: dt.Match, config: MaeriConfig) -> Order:
    return arrange(network(match.graph), config)


def pack(match: dt.Match) -> dict[str, Array]:
    """Weights as they are, a word of bias per output channel."""
    bias = match.array("bias") if "bias" in match.values else np.zeros(match.result.shape[-1])
    weights = np.ascontiguousarray(match.array("weights"), np.int8)
    return {"weights": weights.reshape(-1).view(np.uint8), "sums": bias.astype("<i4").view(np.uint8)}


def task(match: dt.Match, operands: Mapping[str, dt.Operand], config: MaeriConfig) -> Task:
    """The launch of a region."""
    order, layer, is_image = _order(match, config), layers.linear_of(match), len(match.result.shape) == 4

    def lies(operand: dt.Operand) -> Strided:
        """Rows of a matrix are rows of an image of one column."""
        row, column, channel = operand.strides[1:] if is_image else (operand.strides[-2], 0, operand.strides[-1])
        return Strided(operand.address, row, column, channel)

    return Task(
        layer=order.network.works[0].layer,
        depthwise=isinstance(layer, DepthwiseConv2d),
        zero_point=layer.input_zero_point,
        unsigned=not match.type("x").dtype.signed,
        source=lies(operands[match.values["x"]]),
        result=lies(operands["result"]),
        weights=operands["weights"].address,
        bias=operands["sums"].address,
        items=order.items,
    )


SHARED = (
    dt.one_of("the operand must be int8 or uint8", lambda m: m.type("x").dtype.text, "int8", "uint8"),
    layers.NARROW_WEIGHTS,
    layers.SYMMETRIC_WEIGHTS,
    layers.BATCH_OF_IMAGES,
    dt.one_of("a dense layer must read a matrix", lambda m: len(m.result.shape), 2, 4),
)
WINDOW = (layers.NO_DILATION, layers.EVEN_STRIDES)
KINDS = {
    "convolution": (Conv2d, WINDOW),
    "depthwise convolution": (DepthwiseConv2d, WINDOW),
    "dense": (FullyConnected, ()),
}


def _offloads(config: MaeriConfig) -> tuple[dt.Offload, ...]:
    def fits(match: dt.Match) -> str:
        """Why there is no order; empty where there is one."""
        try:
            return "" if _order(match, config).items else "nothing to do"
        except TargetError as error:
            return error.what

    def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
        """One launch, its words counted."""
        words = encode(task(match, operands, config))
        return (dt.Command("maeri_start", (len(words), *words), constants=True),)

    limit = dt.one_of("virtual neurons must fit the multipliers", fits, "")
    return tuple(
        dt.Offload(
            name=f"{name}{suffix}",
            pattern=dt.apply(kind, dt.operand("x"), dt.constant("weights"), *bias, name="layer"),
            constraints=(*SHARED, *window, limit),
            pack=pack,
            commands=commands,
            cycles=lambda match: _order(match, config).makespan,
        )
        for name, (kind, window) in KINDS.items()
        for suffix, bias in (("", (dt.constant("bias"),)), (" without bias", ()))
    )


def target(config: MaeriConfig, name: str = "maeri", rules: Rules | None = None) -> dt.Target:
    """The chip with an engine of this configuration.

    Args:
        config: its sizes.
        name: the target's.
        rules: what `dovetail schedule` keeps to where no file of rules is given.
    """

    def order(graph: Graph, request: dt.OrderRequest) -> dt.Ordered:
        from dovetail.targets.maeri.image import ordering

        return ordering(graph, request, config, rules or Rules())

    engine = dt.Engine(
        name="maeri",
        memory=MEMORY.name,
        offloads=_offloads(config),
        ideal_macs_per_cycle=float(config.multipliers),
        driver=(f"{HERE}:driver/maeri.h",),
        files={"maeri.c": DRIVER},
        device=dt.DeviceModel(f"{HERE}.device:MaeriDevice", base=0x43D00000, size=0x100, arguments=asdict(config)),
        wait="maeri_wait",
        prepare="maeri_init",
    )
    return dt.Target(
        name=name,
        recipe=dt.Recipe("maeri", config, lambda changed: target(changed, name, rules), {"macs": MACS}),
        sentence=f"RISC-V RV32IMC, 32 MiB RAM, MAERI of {config.multipliers} multipliers",
        core=dt.Core("rv32imc"),
        memories=(MEMORY,),
        code=MEMORY.name,
        values=MEMORY.name,
        engines=(engine,),
        policies=(dt.Policy("exact", "the engine gives 32-bit sums, the core requantises as TFLite Micro does", ()),),
        ordering=order,
    )


TARGET = target(MaeriConfig())
