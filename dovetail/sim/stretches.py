"""Jobs of engines by layer; and layers of an inference with lists of commands: the engine issues these, so the core
marks none of them.

A build describes its statements as stretches, in program order: `layer`, whether the core marks its beginning (`core`),
and how many commands each queue was given for it (`commands`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from dovetail.codegen.manifest import Stretch
from dovetail.sim.device import Activity
from dovetail.sim.protocol import InferenceResult, Marker


def jobs_of(
    stretches: Sequence[Stretch], inference: InferenceResult
) -> tuple[list[list[tuple[str, Activity]]], Mapping[str, int]]:
    """The jobs of each stretch, each with its queue; and the queues whose device shows another number of jobs than it
    was given, with that number: nothing is told of them."""
    counts = Counter[str]()
    for own in stretches:
        counts.update(own.commands)
    unknown = {queue: count for queue, count in counts.items() if len(inference.activities.get(queue, ())) != count}
    left = {queue: iter(inference.activities[queue]) for queue in counts if queue not in unknown}
    return [
        [(queue, job) for queue, count in own.commands.items() if queue in left for job in islice(left[queue], count)]
        for own in stretches
    ], unknown


def with_lists(stretches: Sequence[Stretch], inference: InferenceResult) -> InferenceResult:
    """The inference with a marker for every stretch: one that is in a list ends with its last command, and each begins
    where the one before ended. As it is where it cannot be told, and without stretches."""
    jobs, unknown = jobs_of(stretches, inference)
    marked = [own.layer for own in stretches if own.core]
    if not stretches or unknown or marked != [marker.layer for marker in inference.markers]:
        return inference
    found: list[Marker] = []
    core = list(inference.markers)
    reached = core[0].start_cycle if core else 0
    count = core[0].start_instruction if core else 0
    for own, done in zip(stretches, jobs, strict=True):
        end, begun = max([reached, *(job.end for _, job in done)]), count
        awake = 0
        if own.core:
            marker = core.pop(0)
            awake = marker.end_cycle - marker.start_cycle - marker.idle
            count = marker.end_instruction
            end = max(end, marker.end_cycle) if not done else end
        found.append(Marker(own.layer, reached, end, begun, count, max(end - reached - awake, 0)))
        reached = end
    return replace(inference, markers=tuple(found))


def union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same stretches without overlaps, in order."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def busy(jobs: Iterable[Activity]) -> int:
    """Cycles in which at least one of these jobs is going on."""
    return sum(end - start for start, end in union([(job.start, job.end) for job in jobs]))
