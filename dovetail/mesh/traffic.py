"""Who sends what to whom: one message per piece and input, to the set of pieces that read any of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.mesh.layers import INPUT, Layer, Reading
from dovetail.mesh.partition import Section, Stage, read_span

Ints = NDArray[Any]
ROWS, COLUMNS, CHANNELS, SUMS = range(4)
"""The axes pieces are numbered by."""


@dataclass(frozen=True)
class Traffic:
    """The messages of a section; piece i sends message i."""

    size: Ints
    """[pieces] bytes of its message."""
    group: Ints
    """[pieces] the set it goes to."""
    start: Ints
    """[sets + 1] where the members of each set begin in `members`."""
    members: Ints
    """Pieces, set by set, each once in a set."""
    held: Ints
    """Per member, how many inputs' worth of the message it holds."""
    fetches: tuple[Fetch, ...]
    """What comes from DRAM."""
    stores: NDArray[np.bool_]
    """[pieces] whose message goes to DRAM (too)."""

    @property
    def sets(self) -> int:
        """Number of sets."""
        return len(self.start) - 1

    def set_of_members(self) -> Ints:
        """The set of each entry of `members`."""
        return np.repeat(np.arange(self.sets), np.diff(self.start))


@dataclass(frozen=True)
class Fetch:
    """An operand that a stage's pieces read from DRAM."""

    value: str
    pieces: Ints
    boxes: Ints
    """[pieces, 6]: first and last + 1 of rows, columns, channels."""
    size: Ints
    """[pieces] bytes."""


def traffic_of(section: Section, outputs: frozenset[int]) -> Traffic:
    """The messages of a section.

    Args:
        section: its stages, everything resident.
        outputs: layers whose results are wanted in DRAM.
    """
    stages = {stage.layer.index: stage for stage in section.stages}
    users: dict[int, list[tuple[Stage, Reading, int]]] = {index: [] for index in stages}
    fetches = []
    for stage in section.stages:
        for place, reading in enumerate(stage.layer.readings):
            if reading.producer in users:
                users[reading.producer].append((stage, reading, stage.slots[place]))
            else:
                fetches.append(_fetch(stage, reading, place))
    size, group, start, members, held = [], [], [0], [], []
    stores = np.zeros(section.pieces, bool)
    for stage in section.stages:
        wanted = stage.layer.index in outputs
        stores[stage.first : stage.first + stage.pieces] = stage.last & wanted
        size.append(stage.costs.sent)
        found = np.empty(stage.pieces, np.int64)
        for pieces, depth, senders in _sets(stage, users[stage.layer.index]):
            found[senders] = len(start) - 1
            start.append(start[-1] + len(pieces))
            members.append(pieces)
            held.append(depth)
        group.append(found)
    none = np.zeros(0, np.int64)
    return Traffic(
        np.concatenate(size), np.concatenate(group), np.array(start, np.int64),
        np.concatenate([none, *members]), np.concatenate([none, *held]), tuple(fetches), stores,
    )  # fmt: skip


def _fetch(stage: Stage, reading: Reading, place: int) -> Fetch:
    readers = np.arange(stage.pieces) if place == 0 else np.nonzero(stage.last)[0]
    boxes = stage.boxes[readers]
    spans = [read_span(reading, stage.layer, axis, boxes) for axis in range(3)]
    size = np.prod([stop - start for start, stop in spans], axis=0) * reading.itemsize
    return Fetch(reading.value, stage.first + readers, np.stack([e for span in spans for e in span], axis=1), size)


def _sets(stage: Stage, users: list[tuple[Stage, Reading, int]]) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Members, what each holds, and the senders (numbers within the stage) of each set of a stage's messages."""
    parts = stage.cut.sums
    if parts > 1:
        held = np.array([stage.slots[0]])
        for sender in np.nonzero(~stage.last)[0]:
            yield np.array([stage.first + sender + 1]), held, np.array([sender])
    senders = np.nonzero(stage.last)[0]
    if not users:
        yield np.zeros(0, np.int64), np.zeros(0, np.int64), senders
        return
    ranges = np.concatenate([_readers(stage, senders, *user) for user in users], axis=1)
    unique, which = np.unique(ranges, axis=0, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    edges = np.searchsorted(which.reshape(-1)[order], np.arange(len(unique) + 1))
    for number, row in enumerate(unique.tolist()):
        pieces, held = _members(row, users)
        yield pieces, held, senders[order[edges[number] : edges[number + 1]]]


def _members(row: list[int], users: list[tuple[Stage, Reading, int]]) -> tuple[Ints, Ints]:
    """The pieces in the ranges of each reader; one that reads a value twice is there once, with what it can hold."""
    pieces, held = [], []
    for place, (user, _, depth) in enumerate(users):
        spans = [np.arange(a, b) for a, b in zip(row[8 * place : 8 * place + 8 : 2],
                                                 row[8 * place + 1 : 8 * place + 8 : 2], strict=True)]  # fmt: skip
        cut = user.cut
        outer = (spans[0][:, None] * cut.columns + spans[1][None]).reshape(-1)
        inner = (spans[2][:, None] * cut.sums + spans[3][None]).reshape(-1)
        pieces.append(user.first + (outer[:, None] * (cut.channels * cut.sums) + inner[None]).reshape(-1))
        held.append(np.full(len(pieces[-1]), depth))
    if len(users) == 1:
        return pieces[0], held[0]
    every, depths = np.concatenate(pieces), np.concatenate(held)
    order = np.lexsort((depths, every))
    first = np.diff(every[order], prepend=-1) > 0
    return every[order][first], depths[order][first]


def read_axes(reading: Reading, layer: Layer) -> dict[int, int]:
    """Axis of an operand's image -> the axis of the pieces that decides which part of it they read."""
    if reading.channels == "all":
        return {}
    if layer.kind == "dense" and reading.channels == "summed":
        return {2 if reading.image[0] * reading.image[1] == 1 else 0: SUMS}
    return {0: ROWS, 1: COLUMNS, 2: SUMS if reading.channels == "summed" else CHANNELS}


def _readers(stage: Stage, senders: Ints, user: Stage, reading: Reading, depth: int) -> Ints:
    """[senders, 8]: the readers' first and last + 1 part along each axis."""
    counts = (user.cut.rows, user.cut.columns, user.cut.channels, user.cut.sums)
    found = np.empty((len(senders), 8), np.int64)
    for axis, count in enumerate(counts):
        found[:, 2 * axis], found[:, 2 * axis + 1] = 0, count
    if reading is not user.layer.readings[0]:  # only the last of those that sum for each other
        found[:, 2 * SUMS] = user.cut.sums - 1
    steps = (counts[1] * counts[2] * counts[3], counts[2] * counts[3], counts[3], 1)
    for image_axis, axis in read_axes(reading, user.layer).items():
        low, high = read_span(reading, user.layer, image_axis, user.boxes[np.arange(counts[axis]) * steps[axis]])
        box = stage.boxes[senders]
        # parts in order: the first that ends behind the sender's start, the last that starts before its end
        found[:, 2 * axis] = np.searchsorted(np.maximum.accumulate(high), box[:, 2 * image_axis], side="right")
        found[:, 2 * axis + 1] = np.searchsorted(low, box[:, 2 * image_axis + 1], side="left")
    empty = (found[:, 1::2] <= found[:, ::2]).any(axis=1)
    found[empty] = 0
    return found


def expected(traffic: Traffic) -> Ints:
    """[pieces] messages each waits for, those from DRAM left out."""
    senders = np.bincount(traffic.group, minlength=traffic.sets)
    weight = senders[traffic.set_of_members()]
    return np.bincount(traffic.members, weights=weight, minlength=len(traffic.group)).astype(np.int64)


__all__ = ["INPUT", "Fetch", "Traffic", "expected", "read_axes", "traffic_of"]
