"""What placement decides about: layers, the candidates of each, and when what is busy. All times are cycles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.partition.regions import Region


@dataclass(frozen=True, slots=True)
class Use:
    """A stretch of time in which a step keeps a queue busy."""

    queue: str
    """An engine, the DMA or the core."""
    offset: int
    """Cycles after the step's beginning."""
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """One region as a candidate computes it."""

    region: Region
    cycles: int
    """From its beginning to its end."""
    uses: tuple[Use, ...]
    fetch: int = 0
    """Cycles the DMA fetches constants before, not earlier than the engine's step before it begins."""
    launch: int = 0
    """Cycles the core starts it, when its operands are there and at any time before it begins: engines have queues."""
    issuing: int = 0
    """How long after its beginning its last tile is started."""
    engines: tuple[str, ...] = ()
    """Those it is started on, which work on by themselves."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way of computing a layer."""

    place: str
    """Who computes it: an engine, several joined by "+", "core", or who follows whom."""
    steps: tuple[Step, ...]
    """One after the other."""

    @property
    def cycles(self) -> int:
        """Of the layer by itself."""
        return sum(step.cycles for step in self.steps)

    @property
    def members(self) -> frozenset[str]:
        """Names of all who take part."""
        return frozenset(name for step in self.steps for name in step.region.place.split("+"))


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as the partition found it, and what else could compute it."""

    region: Region
    candidates: tuple[Candidate, ...]
    """At least one; the order is that of the target's engines, then several together, then the core."""
    refused: Mapping[str, str]
    """Engine -> why it does not take it."""
    after: tuple[int, ...]
    """The layers whose results it reads."""
    delays: Mapping[tuple[int, int, int], int]
    """Layer it reads from, that one's candidate, its own -> cycles between the two, where there are any."""
    pinned: str = ""
    """Where the user wants it; empty for no wish."""
    passed_over: tuple[Candidate, ...] = ()
    """What else could compute it, but for that wish."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A candidate and a time for every layer."""

    picks: tuple[int, ...]
    """By layer, which candidate."""
    launches: tuple[tuple[int, ...], ...]
    """By layer and step, when the core starts it."""
    starts: tuple[tuple[int, ...], ...]
    """By layer and step, when it begins."""
    finish: int
    """When everything has been computed."""
