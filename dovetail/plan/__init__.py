"""Plan: where every value lives, how every region is cut, in what order, and at which addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.errors import PlanError
from dovetail.graph.graph import Graph
from dovetail.partition.regions import Region
from dovetail.plan.allocate import Order, Placement, lifetimes, place
from dovetail.plan.lower import Lowered, lower
from dovetail.plan.tiles import Tiling, choose_tiling, complete, packed_bytes
from dovetail.program.ir import Program, Role, Statement
from dovetail.program.synchronise import synchronise
from dovetail.target.description import Target

_EXACT_SECONDS = 2.0
_MOST_ROUNDS = 200


@dataclass(frozen=True)
class Plan:
    """The program, with what its placement needs and could at best need."""

    program: Program
    placements: tuple[Placement, ...]
    tilings: Mapping[str, Tiling]


def plan(graph: Graph, regions: Sequence[Region], target: Target, reserved: Mapping[str, int]) -> Plan:
    """Place, tile, order and allocate.

    Values start out in the memory their engines work in; while that does not fit, the largest value or early fetch of
    constants at the busiest moment is given up.

    Args:
        graph: the whole network.
        regions: in execution order.
        target: the machine.
        reserved: bytes of each memory taken by code, constants and stack.

    Raises:
        PlanError: the network does not fit; says which region or memory, and by how much.
    """
    homes = _first_homes(graph, regions, target)
    early = frozenset(region.name for region in regions if region.engine is not None)
    for _ in range(_MOST_ROUNDS):
        tilings = _tilings(regions, target, homes)
        lowered = lower(graph, regions, tilings, target, homes, early)
        dma = target.dma.name if target.dma else "dma"
        statements = synchronise(lowered.statements, dma)
        placements = _placements(target, lowered, statements, dma)
        crowded = next((p for p in placements if p.peak > _room(target, p.memory, reserved)), None)
        if crowded is None:
            return Plan(_program(graph, regions, lowered, statements, placements, dma), placements, tilings)
        relief = _relieve(crowded, lowered, statements, target, homes, early, dma)
        if relief is None:
            raise _too_large(crowded, lowered, statements, dma, _room(target, crowded.memory, reserved))
        homes, early = relief
    raise PlanError(f"no placement found in {_MOST_ROUNDS} rounds")


def _first_homes(graph: Graph, regions: Sequence[Region], target: Target) -> dict[str, str]:
    """Inputs and outputs in the memory of values; all else in the memory the engines reach, if there is one."""
    near = target.engines[0].memory if target.engines else target.values
    homes = {name: target.values for name in graph.inputs}
    for region in regions:
        if region.is_view:
            homes[region.output] = homes[region.graph.inputs[0]]
        else:
            homes[region.output] = target.values if region.output in graph.outputs else near
    return homes


def _tilings(regions: Sequence[Region], target: Target, homes: Mapping[str, str]) -> dict[str, Tiling]:
    found: dict[str, Tiling] = {}
    for region in regions:
        if region.engine is not None:
            budget = target.memory(region.engine.memory).size - _resident(region, regions, homes)
            found[region.name] = complete(region, choose_tiling(region, target, homes, budget))
    return found


def _resident(region: Region, regions: Sequence[Region], homes: Mapping[str, str]) -> int:
    """Bytes of the engine's memory that values hold while a region runs."""
    assert region.engine is not None
    position = regions.index(region)
    total = 0
    for index, producer in enumerate(regions[: position + 1]):
        if homes[producer.output] != region.engine.memory or producer.is_view:
            continue
        last = max((i for i, user in enumerate(regions) if producer.output in user.graph.inputs), default=index)
        if last >= position:
            total += producer.graph.types[producer.output].nbytes
    return total


def _placements(
    target: Target, lowered: Lowered, statements: Sequence[Statement], dma: str
) -> tuple[Placement, ...]:
    spans, order = lifetimes(statements, lowered.buffers, dma), Order(statements, dma)
    return tuple(place(memory, lowered.buffers, spans, order, _EXACT_SECONDS) for memory in target.memories)


def _room(target: Target, memory: str, reserved: Mapping[str, int]) -> int:
    return target.memory(memory).size - reserved.get(memory, 0)


def _relieve(
    crowded: Placement,
    lowered: Lowered,
    statements: Sequence[Statement],
    target: Target,
    homes: Mapping[str, str],
    early: frozenset[str],
    dma: str,
) -> tuple[dict[str, str], frozenset[str]] | None:
    """Give up the largest thing at the busiest moment that can be given up; None when nothing can."""
    if crowded.memory == target.values:
        return None
    spans = lifetimes(statements, lowered.buffers, dma)
    values = {view.buffer: name for name, view in lowered.values.items()}
    alive = [
        buffer
        for buffer in lowered.buffers.values()
        if buffer.memory == crowded.memory
        and buffer.name in spans
        and spans[buffer.name].first <= crowded.busiest <= spans[buffer.name].last
    ]
    for buffer in sorted(alive, key=lambda b: (-b.nbytes, b.name)):
        owner = buffer.name.removesuffix("_constants_0")
        if buffer.role is Role.TILE and owner in early and statements[crowded.busiest].layer < _layer_of(owner, statements, lowered):
            return dict(homes), early - {owner}
        if buffer.role is Role.VALUE:
            moved = {name for name, view in lowered.values.items() if view.buffer == buffer.name}
            return {name: target.values if name in moved else home for name, home in homes.items()}, early
    fetched = [b for b in alive if b.role is Role.TILE and b.name.removesuffix("_constants_0") in early]
    del values
    if fetched:
        largest = max(fetched, key=lambda b: (b.nbytes, b.name))
        return dict(homes), early - {largest.name.removesuffix("_constants_0")}
    return None


def _layer_of(region: str, statements: Sequence[Statement], lowered: Lowered) -> int:
    """Index of the layer that launches on a region's first constants."""
    from dovetail.program.ir import Launch, reads

    for statement in statements:
        if isinstance(statement, Launch) and any(v.buffer == f"{region}_constants_0" for v in reads(statement)):
            return statement.layer
    return 0


def _program(
    graph: Graph,
    regions: Sequence[Region],
    lowered: Lowered,
    statements: Sequence[Statement],
    placements: Sequence[Placement],
    dma: str,
) -> Program:
    addresses = {name: address for placement in placements for name, address in placement.addresses.items()}
    buffers = {
        name: replace(buffer, address=addresses.get(name)) for name, buffer in lowered.buffers.items()
    }
    return Program(
        name=graph.name,
        buffers=buffers,
        constants=lowered.constants,
        statements=tuple(statements),
        layers=tuple(region.name for region in regions),
        inputs={name: lowered.values[name] for name in graph.inputs},
        outputs={name: lowered.values[name] for name in graph.outputs},
        values=lowered.values,
        dma=dma,
    )


def _too_large(
    crowded: Placement, lowered: Lowered, statements: Sequence[Statement], dma: str, room: int
) -> PlanError:
    """The error of a network that does not fit, naming what is in memory at the busiest moment."""
    spans = lifetimes(statements, lowered.buffers, dma)
    alive = sorted(
        (buffer.nbytes, buffer.name)
        for buffer in lowered.buffers.values()
        if buffer.memory == crowded.memory
        and buffer.name in spans
        and spans[buffer.name].first <= crowded.busiest <= spans[buffer.name].last
    )
    listing = ", ".join(f"{name} {nbytes}" for nbytes, name in reversed(alive))
    return PlanError(
        f"{crowded.memory} needs {crowded.peak} bytes and has {room}: {crowded.peak - room} bytes short",
        where=f"at the busiest moment it holds {listing}",
        hint=f"a larger {crowded.memory}, a smaller input, or fewer channels in these layers",
    )


__all__ = ["Plan", "packed_bytes", "plan"]
