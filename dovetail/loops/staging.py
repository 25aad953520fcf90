"""Where staged data lies in an engine's own memories: slots reused in turn, loads left out when the data is there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from dovetail.errors import PlanError


@dataclass(frozen=True)
class Demand:
    """What a schedule puts into one memory under one name."""

    name: str
    entries: int
    """Entries of the largest buffer of that name."""
    useful: int
    """Slots beyond which more would not help: distinct contents, or buffers in all when contents are not reused."""


@dataclass
class Pool:
    """Slots of one size in one memory."""

    base: int
    """First entry."""
    entries: int
    """Entries of a slot."""
    count: int
    contents: list[Hashable | None] = field(default_factory=list)
    """What each slot holds, None for nothing that could be found again."""
    turn: int = 0

    def find(self, key: Hashable | None) -> int | None:
        """First entry of the slot that holds `key`."""
        return None if key is None or key not in self.contents else self._entry(self.contents.index(key))

    def take(self, key: Hashable | None) -> int:
        """First entry of the next slot in turn, which now holds `key`."""
        slot = self.turn
        self.turn = (self.turn + 1) % self.count
        self.contents[slot] = key
        return self._entry(slot)

    def _entry(self, slot: int) -> int:
        return self.base + slot * self.entries


def pools(memory: str, capacity: int, demands: list[Demand], most: int = 0) -> Mapping[str, Pool]:
    """Share a memory among the names of a schedule.

    Every name gets one slot, then, the smallest first, a second; what is left goes to the names in the same order as
    far as it is useful. So small parameters stay where they are and the stream of data fills the rest.

    Args:
        memory: its name, for the message.
        capacity: entries.
        demands: by name.
        most: upper limit of slots per name; 0 for none.

    Raises:
        PlanError: one slot of each does not fit.
    """
    ordered = sorted(demands, key=lambda demand: (demand.entries, demand.name))
    least = sum(demand.entries for demand in ordered)
    if least > capacity:
        named = ", ".join(f"{demand.name} {demand.entries}" for demand in ordered)
        raise PlanError(f"a tile needs {least} entries of {memory} ({named}), which has {capacity}", where=memory,
                        hint="let the offload's Space or a Constraint allow smaller tiles only")
    counts = dict.fromkeys((demand.name for demand in ordered), 1)
    left = capacity - least
    for wanted in (2, max(capacity, 2)):
        for demand in ordered:
            limit = min(demand.useful, wanted, most or capacity)
            more = max(0, min(limit - counts[demand.name], left // demand.entries))
            counts[demand.name] += more
            left -= more * demand.entries
    made, base = {}, 0
    for demand in ordered:
        count = counts[demand.name]
        made[demand.name] = Pool(base, demand.entries, count, [None] * count)
        base += count * demand.entries
    return made
