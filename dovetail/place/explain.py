"""Why every layer is where it is: its candidates with their costs, and one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from dovetail.place.model import Candidate, Layer, Schedule
from dovetail.program.ir import CORE


@dataclass(frozen=True, slots=True)
class Told:
    """What there is to say about one layer."""

    candidates: tuple[tuple[str, int], ...]
    """Each place, and its cycles for this layer alone."""
    refused: Mapping[str, str]
    """Engine -> why it does not take it."""
    why: str
    """Why it is where it is."""


def told(layers: tuple[Layer, ...], schedule: Schedule) -> dict[str, Told]:
    """Region name -> what there is to say; nothing for what nobody computes."""
    found: dict[str, Told] = {}
    for layer, pick in zip(layers, schedule.picks, strict=True):
        picked = layer.candidates[pick]
        known = (*layer.candidates, *layer.passed_over)
        if len(known) > 1 or layer.refused or layer.pinned:
            costs = tuple((one.place, one.cycles) for one in known)
            found |= dict.fromkeys(
                (step.region.name for step in picked.steps), Told(costs, layer.refused, why(layer, picked))
            )
    return found


def why(layer: Layer, picked: Candidate) -> str:
    """Why a layer is where it is, in one sentence."""
    if layer.pinned:
        return f"the user pinned it to {layer.pinned}"
    others = [one for one in layer.candidates if one is not picked]
    if not others:
        return layer.region.reason if picked.members == {CORE} else "nothing else takes it"
    best = min(others, key=lambda one: one.cycles)
    if picked.cycles < best.cycles:
        return f"fastest there: {picked.cycles:,} cycles, {best.cycles:,} on {best.place}"
    if picked.cycles == best.cycles:
        return f"as fast there as on {best.place}: {picked.cycles:,} cycles"
    return (
        f"{best.place} would take {best.cycles:,} cycles instead of {picked.cycles:,}, but is wanted by others then: "
        "the network ends no later like this"
    )


def overlap(layers: tuple[Layer, ...], schedule: Schedule) -> int:
    """Cycles of the schedule in which more than one of engines and core compute."""
    changes: list[tuple[int, int]] = []
    for layer, pick, starts in zip(layers, schedule.picks, schedule.starts, strict=True):
        for step, start in zip(layer.candidates[pick].steps, starts, strict=True):
            count = len(step.region.parts) if step.region.engine or step.region.place == CORE else 0
            changes += [(start, count), (start + step.cycles, -count)]
    total = busy = 0
    for (moment, count), (later, _) in pairwise(sorted(changes)):
        busy += count
        total += later - moment if busy > 1 else 0
    return total
