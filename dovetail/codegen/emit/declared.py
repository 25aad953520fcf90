"""Cycles that a target declares of each layer's work: what the planner compared, which a run compares with what was
taken (`dovetail.claims`)."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from dovetail.codegen.emit.unit import Unit
from dovetail.errors import DovetailError
from dovetail.kernels import Optimize
from dovetail.program.ir import CORE, Call, Copy, LaunchStatement, queue_of, side_by_side
from dovetail.schedule.plan.timed import launch_cycles
from dovetail.schedule.region import Region
from dovetail.target.description import Target
from dovetail.timing.kernels import Parts, core_cycles, shared_cycles
from dovetail.timing.transfers import copy_cost


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
    turns = side_by_side(program.statements)
    for index, statement in enumerate(program.statements):
        own, region = found[statement.layer], unit.regions[statement.layer]
        if isinstance(statement, LaunchStatement):
            turn = turns.get(index, (index,))
            launches = [one for at in turn if isinstance(one := program.statements[at], LaunchStatement)]
            starts = index == turn[-1]  # all of them
            own[statement.engine] += launch_cycles(launches, program, unit.regions, target)[0] if starts else 0
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


def _instead(region: Region, target: Target) -> int:
    """Cycles of the core for a region that an engine computes; 0 where no kernel of it is known."""
    with suppress(DovetailError):
        return core_cycles(region.graph, target)
    return 0
