"""Layers of an inference with lists of commands: the engine issues these, so the core marks none of them.

A build describes its statements as stretches, in program order: `layer`, whether the core marks its beginning (`core`),
and how many commands each queue was given for it (`commands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.codegen.manifest import Stretch
from dovetail.sim.device import Activity
from dovetail.sim.protocol import InferenceResult, Marker


def jobs_of(stretches: Sequence[Stretch], inference: InferenceResult) -> list[list[tuple[str, Activity]]] | None:
    """The commands of each stretch, each with its queue; None where they do not match what the devices did."""
    places = {queue: 0 for own in stretches for queue in own.commands}
    found: list[list[tuple[str, Activity]]] = []
    for own in stretches:
        jobs: list[tuple[str, Activity]] = []
        for queue, count in own.commands.items():
            start = places[queue]
            places[queue] += count
            jobs += [(queue, job) for job in inference.activities.get(queue, ())[start : start + count]]
        found.append(jobs)
    fits = all(len(inference.activities.get(queue, ())) == count for queue, count in places.items())
    return found if fits else None


def with_lists(stretches: Sequence[Stretch], inference: InferenceResult) -> InferenceResult:
    """The inference with a marker for every stretch: one that is in a list ends with its last command, and each begins
    where the one before ended. As it is where it cannot be told, and without stretches."""
    jobs = jobs_of(stretches, inference) if inference.total_cycles is not None else None
    marked = [own.layer for own in stretches if own.core]
    if not stretches or jobs is None or marked != [marker.layer for marker in inference.markers]:
        return inference
    found: list[Marker] = []
    core = list(inference.markers)
    reached = core[0].start_cycle if core else 0
    count = core[0].start_instruction if core else 0
    for own, done in zip(stretches, jobs, strict=True):
        end, begun = max([reached, *(job.end for _, job in done)]), count
        if own.core:
            marker = core.pop(0)
            count = marker.end_instruction
            end = max(end, marker.end_cycle) if not done else end
        found.append(Marker(own.layer, reached, end, begun, count))
        reached = end
    return replace(inference, markers=tuple(found))
