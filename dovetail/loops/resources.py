"""Slots for staged data in an engine's own memories, and the tokens that keep queues in order."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from dovetail.errors import PlanError
from dovetail.ir.types import Array
from dovetail.records import Record


class Demand(Record):
    """The buffers that a schedule puts into one memory under one name."""

    name: str
    """The name of the buffers."""
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
    """The number of slots."""
    contents: list[Hashable | None] = field(default_factory=list)
    """Key of the contents of each slot, None for contents without a key."""
    turn: int = 0
    """The slot that is filled next."""

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
        what = f"a tile needs {least} entries of {memory} ({named}), which has {capacity}"
        raise PlanError(what, where=memory, hint="let the offload's Space or a Constraint allow smaller tiles only")
    counts = dict.fromkeys((demand.name for demand in ordered), 1)
    left = capacity - least
    for wanted in (2, max(capacity, 2)):
        for demand in ordered:
            limit = min(demand.useful, wanted, most or capacity)
            more = max(0, min(limit - counts[demand.name], left // demand.entries))
            counts[demand.name] += more
            left -= more * demand.entries
    by_name, base = {}, 0
    for demand in ordered:
        count = counts[demand.name]
        by_name[demand.name] = Pool(base, demand.entries, count, [None] * count)
        base += count * demand.entries
    return by_name


class Span(Record):
    """Entries of an engine's memory."""

    memory: str
    """The name of the memory."""
    start: int
    """The first entry."""
    stop: int
    """The entry after the last."""


class Access(Record):
    """The entries one instruction reads and writes, and the queue it runs on."""

    queue: int
    """Position of the queue; only neighbours exchange tokens."""
    reads: tuple[Span, ...] = ()
    """The entries that it reads."""
    writes: tuple[Span, ...] = ()
    """The entries that it writes."""


@dataclass
class Tokens:
    """Tokens an instruction takes before it starts and gives when it ends, by the neighbouring queue."""

    pop_prev: bool = False
    """Whether it waits for a token of the queue before."""
    pop_next: bool = False
    """Whether it waits for a token of the queue after."""
    push_prev: bool = False
    """Whether it gives a token to the queue before."""
    push_next: bool = False
    """Whether it gives a token to the queue after."""


def tokens(accesses: Sequence[Access], sizes: Mapping[str, int]) -> list[Tokens]:
    """Tokens for instructions listed in program order; the last one runs after everything else has ended.

    Each queue works in order, so of the instructions of another queue only the latest conflicting one counts, and a
    wait that an earlier wait of the same queue covers is left out.

    Args:
        accesses: the instructions.
        sizes: entries of each memory.

    Raises:
        ValueError: queues that are no neighbours conflict.
    """
    all_tokens = [Tokens() for _ in accesses]
    last = _LastAccess(sizes)
    covered: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    for index, access in enumerate(accesses):
        needed = last.conflicts(access)
        if index == len(accesses) - 1:
            needed = {queue: end for queue, end in ends.items() if queue != access.queue}
        for queue, earlier in sorted(needed.items()):
            if covered.get((queue, access.queue), -1) < earlier:
                covered[queue, access.queue] = earlier
                _link(all_tokens, accesses, earlier, index)
        last.record(access, index)
        ends[access.queue] = index
    return all_tokens


def _link(made: list[Tokens], accesses: Sequence[Access], earlier: int, later: int) -> None:
    step = accesses[later].queue - accesses[earlier].queue
    if abs(step) != 1:
        raise ValueError(f"instructions {earlier} and {later} conflict, but their queues are no neighbours")
    if step == 1:
        made[earlier].push_next = made[later].pop_prev = True
    else:
        made[earlier].push_prev = made[later].pop_next = True


class _LastAccess:
    """For every entry of every memory and each queue, the last instruction that wrote and that read it."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._written: dict[tuple[str, int], Array] = {}
        self._read: dict[tuple[str, int], Array] = {}

    def conflicts(self, access: Access) -> dict[int, int]:
        """Other queue -> its latest instruction that conflicts."""
        latest_of: dict[int, int] = {}
        for spans, table in (
            (access.reads, self._written),
            (access.writes, self._written),
            (access.writes, self._read),
        ):
            for span, ((memory, queue), entries) in product(spans, table.items()):
                if memory == span.memory and queue != access.queue:
                    latest = int(entries[span.start : span.stop].max(initial=-1))
                    if latest >= 0:
                        latest_of[queue] = max(latest_of.get(queue, -1), latest)
        return latest_of

    def record(self, access: Access, index: int) -> None:
        for spans, table in ((access.reads, self._read), (access.writes, self._written)):
            for span in spans:
                key = (span.memory, access.queue)
                if key not in table:
                    table[key] = np.full(self._sizes[span.memory], -1, dtype=np.int64)
                table[key][span.start : span.stop] = index
