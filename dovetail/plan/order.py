"""The order statements are issued in: layer after layer, or tiles in turn where layers run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.partition.regions import Slot
from dovetail.program.ir import Begin, Statement


@dataclass
class Parts:
    """One layer's statements."""

    early: list[Statement] = field(default_factory=list)
    """What may be done while the layer before is computed."""
    head: list[Statement] = field(default_factory=list)
    """What must come before the first tile."""
    rest: list[list[Statement]] = field(default_factory=list)
    """One list for each tile, its launch first."""
    tail: list[Statement] = field(default_factory=list)
    """What waits for the last tiles."""


def in_turn(slots: Sequence[Slot | None], layers: Sequence[Parts]) -> list[Statement]:
    """All statements, each stretch of one layer's behind a `Begin`.

    Args:
        slots: when each layer is scheduled; one without a slot comes right before the next one that has one.
        layers: what belongs to each. A layer's head and first tile come when it is issued, further tiles spread evenly
            over the time it takes, its tail at the end.
    """
    turns: list[tuple[float, int, int, list[Statement]]] = []
    for layer, (parts, when) in enumerate(zip(layers, _times(slots), strict=True)):
        first = parts.rest[0] if parts.rest else []
        steps = [[*parts.early, *parts.head, *first], *parts.rest[1:]]
        for number, step in enumerate(steps):
            spread = when.begin + (when.end - when.begin) * number / len(steps)
            turns.append((spread if number else when.issue, layer, number, step))
        turns.append((when.end, layer, len(steps), parts.tail))
    ordered: list[Statement] = []
    current = -1
    for _, layer, number, step in sorted(turns, key=lambda turn: turn[:3]):
        if layer != current and (step or not number):
            ordered.append(Begin(layer))
            current = layer
        ordered += step
    return ordered


def _times(slots: Sequence[Slot | None]) -> list[Slot]:
    """The time of every layer, no layer issued before the one ahead of it; all 0 where nothing is scheduled."""
    found: list[Slot] = []
    last = max((slot.end for slot in slots if slot), default=0)
    following = Slot(last, last, last)
    for slot in reversed(slots):
        following = slot or Slot(following.issue, following.issue, following.issue)
        found.append(following)
    return found[::-1]
