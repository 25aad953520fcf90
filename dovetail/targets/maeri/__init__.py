"""A RISC-V microcontroller with a MAERI: multipliers that form dot products of any sizes, side by side.

The tree is the published one; that it hangs on a bus of 32 bits and reads operands from the one memory is this chip's,
and so is the stage behind the collection bus that makes int8 of sums. Without it (`MaeriConfig.requantise`) the core
does that. `dovetail schedule` orders a whole network on it; compiled, each layer is one launch with its own order.

docs/maeri.md lists the modules in reading order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

import dovetail.target as dt
from dovetail.errors import TargetError
from dovetail.ir.graph import Graph
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.operators.movement import Pad
from dovetail.ir.types import Array
from dovetail.legalize import pools_as_depthwise, without_zeros
from dovetail.target import layers
from dovetail.target.queue_driver import queue_driver
from dovetail.targets.maeri.bound import addition_cycles
from dovetail.targets.maeri.coded import INT8, LAYER, FeatureMap, kept_constants, operators, step_of
from dovetail.targets.maeri.config import STAGE_CYCLES, MaeriConfig, with_multipliers
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.task import Part, Task, chip_rules, encode, in_ruled_order, side_by_side
from dovetail.targets.maeri.tile import Item

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
HANDING_CYCLES = 24
"""Core cycles of `maeri_hold` and `maeri_start`."""
LIMITS = (
    layers.NARROW_WEIGHTS,
    layers.SYMMETRIC_WEIGHTS,
    layers.BATCH_OF_IMAGES,
    dt.one_of("a dense layer must read a matrix", lambda m: len(m.result.shape), 2, 4),
)
BYTES = dt.one_of("the operand must be int8 or uint8", lambda m: m.type("x").dtype.text, "int8", "uint8")
WINDOW = layers.zero_padding_at_most(255)
KINDS = {
    "convolution": (Conv2d, WINDOW),
    "depthwise convolution": (DepthwiseConv2d, WINDOW),
    "dense": (FullyConnected, ()),
}
ADDITION = (
    *layers.ADDITION_LIMITS,
    dt.one_of("operands of an addition must be one image or a matrix", lambda m: _is_plain(m.result.shape), True),
)


def _is_plain(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 4 and shape[0] == 1)


def _order(matches: Sequence[dt.Match], config: MaeriConfig, rules: Rules) -> NetworkOrder | None:
    """The order of a launch; None for one with an addition, or where layers do not fit side by side."""
    if not all(match.has("layer") for match in matches):
        return None
    return side_by_side(tuple(map(_part, matches)), config, chip_rules(matches, rules))


def _cycles(matches: Sequence[dt.Match], config: MaeriConfig, rules: Rules) -> int | None:
    """Cycles of a launch; None where layers do not fit side by side."""
    if len(matches) == 1 and not matches[0].has("layer"):
        return addition_cycles(config, matches[0].result.elements) + STAGE_CYCLES
    order, stage = _order(matches, config, rules), any(match.has("clip") for match in matches)
    return None if order is None else order.makespan + stage * STAGE_CYCLES


def _commands(
    launches: Sequence[tuple[dt.Match, Mapping[str, dt.Operand]]], config: MaeriConfig, rules: Rules
) -> list[tuple[dt.Command, ...]]:
    """The driver's calls of a launch: each hands over the words of a task, counted."""
    order = _order([match for match, _ in launches], config, rules)
    last, rows = len(launches) - 1, list[tuple[dt.Command, ...]]()
    for number, (match, operands) in enumerate(launches):
        items = tuple(item for item in order.items if item.work == number) if order else ()
        words = encode(task(match, operands, items))
        function = "maeri_start" if number == last else "maeri_hold"
        rows.append((dt.Command(function, (len(words), *words), constants=True),))
    return rows


def _part(match: dt.Match) -> Part:
    node, types = network(match.graph).works[0].node, match.graph.types
    (layer,) = operators(LAYER, [node])
    return layer.with_zero_points(0), types[node.inputs[0]].shape, types[node.inputs[1]].shape


def pack(match: dt.Match) -> dict[str, Array]:
    """The constants of a launch as bytes, those of its step one behind the other."""
    memory = bytearray()
    kept_constants(memory, match.graph, INT8)
    return {"constants": np.frombuffer(memory, np.uint8)}


def task(match: dt.Match, operands: Mapping[str, dt.Operand], items: tuple[Item, ...] = ()) -> Task:
    """The launch of a region, a layer's with the items of its order."""
    graph, types = match.graph, match.graph.types
    places = {match.root: operands["result"], **{value: operands[value] for value in graph.inputs}}
    base, constants = operands["constants"].address, kept_constants(bytearray(), graph, INT8)
    constants = {name: replace(kept, address=base + kept.address) for name, kept in constants.items()}
    step = step_of(graph, constants, lambda value: FeatureMap(places[value].address, types[value].shape, 0))
    strides = tuple(places[value].strides for value in (*graph.inputs, match.root))
    return Task(step, strides, not match.type("x").dtype.signed, items)


def _offloads(config: MaeriConfig, rules: Rules) -> tuple[dt.Offload, ...]:
    def fits(match: dt.Match) -> str:
        """Why there is no order; empty if there is one."""
        try:
            order = _order([match], config, rules)
            return "" if order and order.items else "nothing to do"
        except TargetError as error:
            return error.what

    def commands(match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
        return _commands([(match, operands)], config, rules)[0]

    def cycles(match: dt.Match) -> int:
        return _cycles([match], config, rules) or 0

    limit = dt.one_of("virtual neurons must fit the multipliers", fits, "")
    rows: list[tuple[str, dt.Pattern, tuple[dt.Constraint, ...]]] = []
    for name, (kind, window) in KINDS.items():
        limits = (*LIMITS, *window, limit)
        if config.requantise:
            patterns = layers.requantised(f"requantised {name}", kind)
            rows += [(each, patterns[each], (*layers.INT8, layers.DOUBLE_ROUNDING, *limits)) for each in patterns]
        image = dt.maybe(Pad, dt.operand("x"), name="pad") if window and config.padding else dt.operand("x")
        for suffix, bias in (("", (dt.constant("bias"),)), (" without bias", ())):
            pattern: dt.Pattern = dt.apply(kind, image, dt.constant("weights"), *bias, name="layer")
            rows.append((f"{name}{suffix}", pattern, (BYTES, *limits)))
    if config.requantise:
        rows.append(("addition", layers.ADDITION, ADDITION))
    return tuple(dt.Offload(name, pattern, limits, pack, commands, cycles) for name, pattern, limits in rows)


def _joint(config: MaeriConfig, rules: Rules) -> dt.Joint:
    """Layers side by side; additions take all ports and lines."""

    def cycles(launches: Sequence[dt.Launched]) -> int | None:
        return _cycles([launch.match for launch in launches], config, rules)

    def commands(launches: Sequence[tuple[dt.Launched, Mapping[str, dt.Operand]]]) -> list[tuple[dt.Command, ...]]:
        return _commands([(launch.match, operands) for launch, operands in launches], config, rules)

    return dt.Joint(config.joint, cycles, commands, HANDING_CYCLES)


def target(config: MaeriConfig, name: str = "maeri", rules: Rules | None = None) -> dt.Target:
    """The chip with an engine of this configuration.

    Args:
        config: sizes of the engine.
        name: of the target.
        rules: the user's own; `dovetail schedule` takes those of a file instead, if one is given.
    """

    def order(graph: Graph, request: dt.OrderRequest) -> dt.Ordered:
        from dovetail.targets.maeri.schedule import ordering

        return ordering(graph, request, config, own)

    own = rules or Rules()
    is_ordered = bool(own.before or own.priority)
    engine = dt.Engine(
        name="maeri",
        memory=MEMORY.name,
        offloads=_offloads(config, own),
        ideal_macs_per_cycle=float(config.multipliers),
        driver=(f"{HERE}:driver/maeri.h",),
        files={"maeri.c": DRIVER},
        device=dt.DeviceModel(f"{HERE}.device:MaeriDevice", base=0x43D00000, size=0x100, arguments=asdict(config)),
        wait="maeri_wait",
        prepare="maeri_init",
        launching=10,
        joint=_joint(config, own) if config.joint > 1 and not is_ordered else None,
    )
    rewrites = [dt.Rewrite("no zeros of stretched images", without_zeros, 0)]
    if own != Rules():
        rewrites.append(dt.Rewrite("rules of the target", in_ruled_order(own, config), 0, orders=True))
    if config.requantise:
        rewrites.insert(0, dt.Rewrite("pools", pools_as_depthwise(lambda *_: True, dt.Rounding.DOUBLE), 0))
    who, rounding = ("engine", dt.Rounding.DOUBLE) if config.requantise else ("core", None)
    return dt.Target(
        name=name,
        recipe=dt.Recipe("maeri", config, lambda changed: target(changed, name, rules), {"macs": MACS}),
        sentence=f"RISC-V RV32IMC, 32 MiB RAM, MAERI of {config.multipliers} multipliers",
        core=dt.Core("rv32imc"),
        memories=(MEMORY,),
        code=MEMORY.name,
        values=MEMORY.name,
        engines=(engine,),
        policies=(
            dt.Policy("exact", f"the {who} requantises as TensorFlow Lite Micro does", tuple(rewrites), rounding),
        ),
        ordering=order,
    )


TARGET = target(MaeriConfig())
