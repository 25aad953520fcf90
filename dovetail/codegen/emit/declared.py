"""Cycles that a target declares of each layer's work: what the planner compared, which a run compares with what was
taken (`dovetail.claims`)."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from dovetail.codegen.emit.unit import Unit
from dovetail.errors import DovetailError
from dovetail.kernels import Optimize
from dovetail.program.ir import CORE, Call, Copy, LaunchStatement, Program, queue_of, side_by_side
from dovetail.schedule.region import Region
from dovetail.target.description import Target
from dovetail.target.engine import Launched
from dovetail.timing.kernels import Parts, core_cycles, shared_cycles
from dovetail.timing.transfers import copy_cost


def launch_cycles(region: Region, launch: LaunchStatement) -> int:
    """Engine cycles of a launch by its offload's cost model."""
    own = next((share.offload for share in region.shares if share.engine.name == launch.engine), None)
    return own.cycles(launch.match) if own is not None else 0


def declared_fields(unit: Unit) -> list[dict[str, Any]]:
    """By layer, `declared`: cycles of each engine, DMA and of the core that works longest; of a layer on an engine
    also `instead`: cycles of the core if it computed it. Nothing is declared of a core whose cycles nobody counts, nor
    of small kernels, whose cycles nobody measured."""
    program, target = unit.program, unit.target
    if target.core.is_host:
        return [{} for _ in unit.regions]
    found = [Counter[str]() for _ in unit.regions]
    calls: list[Parts] = [() for _ in unit.regions]
    dmas = {dma.name: dma for dma in target.dmas}
    joint = _joint(program, unit, target)
    for index, statement in enumerate(program.statements):
        own, region = found[statement.layer], unit.regions[statement.layer]
        if isinstance(statement, LaunchStatement):
            cycles = joint.get(index)
            own[statement.engine] += launch_cycles(region, statement) if cycles is None else cycles
        elif isinstance(statement, Copy):
            dma = dmas.get(queue_of(statement, program.dma))
            if dma is not None or region.place == CORE:
                own[dma.name if dma else CORE] += copy_cost(dma, [statement]).cycles
        elif isinstance(statement, Call):
            calls[statement.layer] += ((statement.graph, statement.core),)
    for region, own, parts in zip(unit.regions, found, calls, strict=True):
        if parts and unit.optimize is Optimize.SPEED:
            own[CORE] += shared_cycles(parts, target, region.choice)
    return [
        {"declared": dict(own), **({"instead": _instead(region, target)} if region.shares else {})} if own else {}
        for region, own in zip(unit.regions, found, strict=True)
    ]


def _joint(program: Program, unit: Unit, target: Target) -> dict[int, int]:
    """Cycles of the launches that begin together, all at the last of them, by the index of each."""
    cycles: dict[int, int] = {}
    for turn in set(side_by_side(program.statements).values()):
        launches = [one for index in turn if isinstance(one := program.statements[index], LaunchStatement)]
        offloads = (unit.regions[one.layer].offload for one in launches)
        pairs = zip(offloads, launches, strict=True)
        launched = [Launched(offload.name, one.match) for offload, one in pairs if offload is not None]
        joint = target.engine(launches[0].engine).joint
        both = joint.cycles(launched) if joint is not None else None
        if both is not None:
            cycles |= {**dict.fromkeys(turn, 0), turn[-1]: both}
    return cycles


def _instead(region: Region, target: Target) -> int:
    """Cycles of the core for a region that an engine computes; 0 where no kernel of it is known."""
    with suppress(DovetailError):
        return core_cycles(region.graph, target)
    return 0
