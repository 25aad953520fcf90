"""Energy of an inference, where the target says what things take (`pj_per_mac`, `pj_per_cycle`, `pj_per_byte`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.codegen.plan_file import read_plan
from dovetail.program.ir import core_queue

if TYPE_CHECKING:
    from dovetail.run import ProjectBuild, RunResult
    from dovetail.target.description import Target


def energy(result: RunResult, cycles: Mapping[str, int | None], macs: Mapping[str, int]) -> dict[str, float]:
    """uJ of the first inference by core, engine and memory; those of which the target says nothing are left out, and
    without time there is none.

    A core takes energy in the cycles it is awake; an engine for its multiply-accumulates and in busy cycles; a memory
    for the bytes that cores read and write, that are copied from it and to it, and for an engine's operands, constants
    and results, each once per layer.

    Args:
        result: the run.
        cycles: busy cycles of cores and engines, by name.
        macs: multiply-accumulates of engines, by name.
    """
    target = result.build.target
    cores = ((core_queue(number), core) for number, core in enumerate(target.cores))
    found: dict[str, float] = {name: (cycles.get(name) or 0) * core.pj_per_cycle for name, core in cores}
    for engine in target.engines:
        found[engine.name] = macs.get(engine.name, 0) * engine.pj_per_mac
        found[engine.name] += (cycles.get(engine.name) or 0) * engine.pj_per_cycle
    if any(memory.pj_per_byte for memory in target.memories):
        moved = Counter(result.simulation.inferences[0].traffic)
        moved.update(_moved(result.build))
        found |= {memory.name: moved[memory.name] * memory.pj_per_byte for memory in target.memories}
    timed = result.simulation.inferences[0].total_cycles is not None
    return {name: pj / 1e6 for name, pj in found.items() if name in said(target)} if timed else {}


def said(target: Target) -> list[str]:
    """The cores, engines and memories of which a target says what energy they take."""
    cores = [core_queue(number) for number, core in enumerate(target.cores) if core.pj_per_cycle]
    engines = [engine.name for engine in target.engines if engine.pj_per_mac or engine.pj_per_cycle]
    return [*cores, *engines, *(memory.name for memory in target.memories if memory.pj_per_byte)]


def _moved(build: ProjectBuild) -> Counter[str]:
    """Bytes of each memory that DMAs and engines read and write in an inference."""
    plan, target = read_plan(build.folder, len(build.manifest.layers)), build.target
    hardware = {engine.name: engine for engine in target.engines if engine.device is not None}
    moved = Counter[str]()
    for move in plan["moves"] if target.dmas else ():
        moved.update({move["from"]: move["bytes"]})
        moved.update({move["to"]: move["bytes"]})
    for layer, own in zip(build.manifest.layers, plan["layers"], strict=True):
        if (engine := hardware.get(layer.engine.partition("+")[0])) is not None:
            moved[engine.memory] += own["read"] + own["written"]
            moved[engine.constants_memory] += sum(constant["bytes"] for constant in own["constants"])
    return moved
