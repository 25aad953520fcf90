"""What each core did in an inference, or in a step of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.run import RunResult
    from dovetail.simulate.protocol import InferenceResult


@dataclass(frozen=True, slots=True)
class CoreUse:
    """One core. On the host all but what is planned is None, and there are no layers."""

    name: str
    """As in the timeline: "core", "core1", …"""
    speed: float
    """Relative to the others, as the target says."""
    cycles: int | None
    """Busy: not asleep, of further cores with a job."""
    instructions: int | None
    stack: int
    """Bytes reserved."""
    stack_used: int | None
    """Most bytes used."""
    layers: Mapping[str, int]
    """Cycles it worked for each layer of which it computes a part; core 0 until the next layer, waits included."""


def core_uses(result: RunResult, first: InferenceResult) -> tuple[CoreUse, ...]:
    """Every core's, by number.

    Args:
        result: of a run.
        first: its inference that is looked at.
    """
    layers, works = result.build.manifest["layers"], result.build.manifest["work"]
    names = [layer["name"] for layer in layers]
    alone = [(0,) if layer["engine"] == "core" else () for layer in layers]
    cores = [tuple(work.get("cores", one)) for work, one in zip(works, alone, strict=True)]
    used = (result.simulation.stack_bytes, *result.simulation.worker_stack_bytes)
    found = []
    for number, core in enumerate(result.build.target.cores):
        own = [name for name, some in zip(names, cores, strict=True) if number in some]
        name = f"core{number}" if number else "core"
        jobs = first.activities.get(name, ())
        cycles, instructions = first.core_cycles, first.instructions
        worked = _marked(first, names, own)
        if number and cycles is not None:
            cycles, instructions = sum(job.end - job.start for job in jobs), sum(job.instructions for job in jobs)
            worked = {layer: job.end - job.start for job in jobs for layer in own if job.label == f"{layer}_on_{name}"}
        stack_used = used[number] if number < len(used) else None
        found.append(CoreUse(name, core.speed, cycles, instructions, core.stack, stack_used, worked))
    return tuple(found)


def _marked(first: InferenceResult, names: Sequence[str], own: Sequence[str]) -> dict[str, int]:
    """Cycles between the markers of some layers and those that follow."""
    found: dict[str, int] = {}
    for marker in first.markers:
        if names[marker.layer] in own:
            name = names[marker.layer]
            found[name] = found.get(name, 0) + marker.end_cycle - marker.start_cycle
    return found
