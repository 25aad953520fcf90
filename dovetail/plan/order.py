"""The order statements are issued in: layers one after the other, or tiles in turn where layers run at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.partition.regions import Slot
from dovetail.program.ir import Begin, Statement


def in_turn(
    slots: Sequence[Slot | None],
    firsts: Sequence[Sequence[Statement]],
    rests: Sequence[Sequence[Sequence[Statement]]],
) -> list[Statement]:
    """All statements, each stretch of one layer's behind a `Begin`.

    Args:
        slots: when each layer is scheduled; one without a slot comes right before the next one that has one.
        firsts: what each layer begins with.
        rests: then, for each of its tiles, what belongs to it: spread evenly over the layer's slot.
    """
    turns: list[tuple[float, int, int, Sequence[Statement]]] = []
    times = _times(slots)
    for layer, (first, rest) in enumerate(zip(firsts, rests, strict=True)):
        start, end = times[layer]
        steps = [[*first, *(rest[0] if rest else ())], *rest[1:]]
        turns += [
            (start + (end - start) * number / len(steps), layer, number, step) for number, step in enumerate(steps)
        ]
    ordered: list[Statement] = []
    current = -1
    for _, layer, _, step in sorted(turns, key=lambda turn: turn[:3]):
        if layer != current:
            ordered.append(Begin(layer))
            current = layer
        ordered += step
    return ordered


def _times(slots: Sequence[Slot | None]) -> list[tuple[int, int]]:
    """Start and end of every layer, the starts never falling; all 0 where nothing is scheduled."""
    found: list[tuple[int, int]] = []
    following = (max((slot.end for slot in slots if slot), default=0),) * 2
    for slot in reversed(slots):
        following = (slot.start, slot.end) if slot else (following[0], following[0])
        found.append(following)
    return found[::-1]
