"""Cycles of a schedule as the device takes them: the instructions of its tiles in time, without making them.

The instructions are those of lower.py and writer.py, their times those of stream.py. Of an axis with many tiles the
first ones and the last are walked, and each between is taken to be like the last of the first.
tests/test_vta_cost.py compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import lcm, prod
from typing import Any

from dovetail.loops import Demand, pools
from dovetail.targets.vta.config import UOP_ELEMENT, VtaConfig
from dovetail.targets.vta.cost import RegionShape, VtaTiling, capacities, slots_of_use
from dovetail.targets.vta.isa import INSTRUCTION_BYTES
from dovetail.targets.vta.writer import VtaLoop, micro, rectangles

MOST_STEPS, MOST_WALKED = 12, 320
"""Steps of a tile that are walked, and those of a region, but for `MOST_TURNS`."""
MOST_TURNS, MORE_TURNS = 4, (160, 12, 8, 6, 5)
"""Tiles along an axis that are walked, and where they have few steps."""


@dataclass(frozen=True, slots=True)
class _TileExtent:
    """Some rows or columns of the result, and those of the operand that are read for them."""

    size: int
    read: int
    """Without padding."""
    padding: int

    @property
    def window(self) -> int:
        """Rows or columns of the operand, padding included."""
        return self.read + self.padding


@lru_cache(maxsize=4096)
def products(s: RegionShape, tile: tuple[int, int, int, int], config: VtaConfig) -> tuple[int, int]:
    """Instructions of a step's products, and micro-operations of each; `tile` has so many rows, columns, columns of
    the operand, and blocks of channels."""
    rows, columns, width, blocks = tile
    (down, across), (tall, wide) = s.stride, s.kernel
    nest = (
        VtaLoop(1 if s.by_block else blocks, (rows * columns, 0, 0 if s.by_block else tall * wide)),
        VtaLoop(tall, (0, width, wide)),
        VtaLoop(wide, (0, 1, 1)),
        VtaLoop(rows, (columns, down * width, 0)),
        VtaLoop(columns, (1, across, 0)),
    )
    apart = s.taps if s.differ else 1  # where several share a matrix, taps are instructions of their own
    made = micro(nest[3:] if s.differ else nest, config.uop_entries, config.pipeline_cycles, True)
    return apart * len(made.starts), len(made.uops)


@dataclass(slots=True)
class _SlotContents:
    """Data of one name in its slots, and the compute event that read each last."""

    count: int
    stays: bool
    """Whether all contents have a slot."""
    kept: bool
    """Whether those of a tile have."""
    last: tuple[int, ...] = ()
    """The tile part whose contents came last."""
    seen: set[tuple[int, ...]] = field(default_factory=set)
    readers: list[int] = field(default_factory=list)
    """The last event that read the contents of each take."""
    fresh: bool = True

    def turn(self, part: tuple[int, ...]) -> None:
        """A tile's turn, which needs this part's contents."""
        self.fresh = not (part in self.seen if self.stays else self.kept and part == self.last)
        self.last = part
        self.seen.add(part)

    def read(self, event: int, back: int) -> None:
        """The compute event `event` reads what the last take but `back` - 1 brought."""
        if not self.stays:
            self.readers[-1 if self.fresh else -back] = event

    def overwritten(self) -> int:
        """The event to wait for before the next take, -1 for none."""
        place = len(self.readers) - self.count
        return self.readers[place] if place >= 0 and not self.stays else -1


@dataclass(slots=True)
class _Events:
    """Events of the queues, in order. Each begins with its fetch time and the events it waits for."""

    load: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Compute event, cycles on the bus, cycles of padding."""
    compute: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Load event, store event, cycles, cycles on the bus (-1: the bus is not asked for)."""
    store: list[tuple[int, int, int]] = field(default_factory=list)
    """Compute event, cycles on the bus."""
    fetched: int = 0
    """Instructions so far."""


@lru_cache(maxsize=4096)
def walked(s: RegionShape, t: VtaTiling, config: VtaConfig) -> int:
    """Cycles of a region's stream under a tiling that fits."""
    rows, columns = _parts(s, t.rows, 0), _parts(s, t.columns, 1)
    groups = [min(t.blocks, s.out_blocks - start) for start in range(0, s.out_blocks, t.blocks)]
    counts = (len(rows), len(columns), len(groups))
    walk = _EventCollector(s, config, _slots(s, t, config, (rows, columns, groups)))
    steps = min(groups[0] if s.by_block else s.in_blocks, MOST_STEPS)
    most = next((most for most in MORE_TURNS if prod(min(n, most) for n in counts) * steps <= MOST_WALKED), MOST_TURNS)
    turns = [_turns(count, most) for count in counts]
    order = (0, 1, 2) if t.channels_first else (2, 0, 1)
    weights: list[float] = []
    walk.begin(_micro_operations(s, t, config, walk, (rows[0], columns[0], groups[0]), counts))
    for chosen in product(*(turns[axis] for axis in order)):
        (row, _), (column, _), (group, _) = (chosen[order.index(axis)] for axis in range(3))
        often = prod(weight for _, weight in chosen)
        weights += [often * each for each in walk.tile(rows[row], columns[column], groups[group], (row, column), group)]
    ends, last = _run(walk.events, config)
    marks = [ends[number] for number in walk.marks]
    taken = [after - before for before, after in zip([0, *marks], marks, strict=False)]
    return round(
        sum(cycles * often for cycles, often in zip(taken, weights, strict=True)) + last - marks[-1] + walk.later
    )


def _turns(count: int, most: int) -> list[tuple[int, float]]:
    """The turns of a loop that are walked, and how many each stands for."""
    if count <= most:
        return [(turn, 1.0) for turn in range(count)]
    return [*((turn, 1.0) for turn in range(most - 2)), (most - 2, 1.0 + count - most), (count - 1, 1.0)]


def _parts(s: RegionShape, step: int, axis: int) -> list[_TileExtent]:
    """The result's rows (axis 0) or columns cut into tiles."""
    total, kernel, stride, before = (s.rows, s.columns)[axis], s.kernel[axis], s.stride[axis], s.before[axis]
    found = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        low, high = start * stride - before, (stop - 1) * stride + kernel - before
        read = max(0, min(high, s.size[axis]) - max(low, 0)) if s.size[axis] else high - low
        found.append(_TileExtent(stop - start, read, high - low - read))
    return found


def _slots(
    s: RegionShape, t: VtaTiling, config: VtaConfig, cut: tuple[list[_TileExtent], list[_TileExtent], list[int]]
) -> Mapping[str, _SlotContents]:
    """The slots of every name, as lower.py shares the memories."""
    rows, columns, groups = cut
    blocks, positions = max(groups), len(rows) * len(columns)
    window = max(part.window for part in rows) * max(part.window for part in columns)
    sums = max(part.size for part in rows) * max(part.size for part in columns) * blocks
    steps = blocks if s.by_block else s.in_blocks
    image = ("padded", window, positions * s.image_blocks, steps)
    matrices = s.out_blocks if s.by_block else len(groups) * steps
    wanted: dict[str, list[tuple[str, int, int, int]]] = {
        "INP": [image],
        "WGT": [("weights", s.matrices * (1 if s.by_block else blocks), matrices, steps)],
        "ACC": [("total", sums, 0, 0), *((f"part_{n}", sums, 0, 0) for n in range(s.parts))],
    }
    if s.pool:
        wanted["WGT"] = [("matrix", 1, 1, 1)]
        wanted["ACC"].append(("wide", window * blocks, 0, 0))
    if s.digits:
        wanted["INP"].append(("ones", s.digits, 1, 1))
        wanted["WGT"].append(("bias", blocks * s.digits, len(groups), 1))
    if s.parameters:
        wanted["ACC"].append(("parameters", blocks * s.parameters, len(groups), 1))
    found = {}
    for memory, room in capacities(s, config).items():
        uses = {name: slots_of_use(every, tile, size, room) for name, size, every, tile in wanted[memory]}
        demands = [Demand(name, size, uses[name]) for name, size, _, _ in sorted(wanted[memory])]
        made = pools(memory, room, demands, t.slots)
        for name, _, every, tile in wanted[memory]:
            count = made[name].count
            found[name] = _SlotContents(count, count >= every > 0, count >= tile)
    return found


def _micro_operations(
    s: RegionShape,
    t: VtaTiling,
    config: VtaConfig,
    walk: _EventCollector,
    tile: tuple[_TileExtent, _TileExtent, int],
    counts: tuple[int, int, int],
) -> int:
    """How many are loaded in all: those of products differ wherever another combination of slots comes together."""
    instructions, each = walk.nest(*tile)
    steps = tile[2] if s.by_block else s.in_blocks
    positions, groups = counts[0] * counts[1], counts[2]
    every = positions * groups * steps
    image, weights, total = (walk.slots[name] for name in ("padded", "matrix" if s.pool else "weights", "total"))
    inner, outer = (groups, positions) if t.channels_first else (positions, groups)
    apart, again = 1, total.count * steps
    for slots, outermost in ((image, t.channels_first or s.by_block), (weights, not t.channels_first)):
        if slots.stays:  # another part of the SRAM for each turn of the loop
            apart = outer if outermost else apart
            again = again if outermost and not (s.by_block and slots is image) else lcm(again, steps * inner)
        elif slots.kept and outermost and not (s.by_block and slots is image):
            apart *= min(outer, lcm(slots.count, steps) // steps)
        else:
            again = lcm(again, slots.count)
    own = min(every, apart * min(again, steps * inner)) * instructions * each
    return own + total.count * (1 + min(s.parameters, 1) + min(s.digits, 1)) + (s.taps if s.pool else 0) * total.count


class _EventCollector:
    """Collects the events of one tile after the other."""

    def __init__(self, s: RegionShape, config: VtaConfig, slots: Mapping[str, _SlotContents]) -> None:
        self.shape, self.config, self.slots = s, config, slots
        self.events = _Events()
        self.marks: list[int] = []
        """Compute events behind which a step ends."""
        self.later = 0
        """Cycles of what is loaded while nothing is computed."""
        self.stored: list[int] = []
        """The last store event of each tile."""
        self._instruction = -(-INSTRUCTION_BYTES // config.bus_bytes)

    def begin(self, uops: int) -> None:
        """Load the micro-operations; those beyond their memory come later."""
        config = self.config
        first = min(uops, config.uop_entries)
        self._compute(-1, -1, 0, -(-first * UOP_ELEMENT // config.bus_bytes))
        rest = uops - first
        times = -(-rest // config.uop_entries)
        self.later = times * config.bus_latency + -(-rest * UOP_ELEMENT // config.bus_bytes)

    def nest(self, row: _TileExtent, column: _TileExtent, blocks: int) -> tuple[int, int]:
        """Instructions of a step's products, and micro-operations of each."""
        s = self.shape
        if s.pool:
            return 1, 1
        return products(s, (row.size, column.size, column.window, blocks), self.config)

    def tile(
        self, row: _TileExtent, column: _TileExtent, blocks: int, position: tuple[int, int], group: int
    ) -> list[float]:
        """A tile's events; returns how often each of its steps comes."""
        s, config = self.shape, self.config
        pixels, entries = row.size * column.size, row.size * column.size * blocks
        image, weights = self.slots["padded"], self.slots["matrix" if s.pool else "weights"]
        image.turn((*position, group) if s.by_block else position)
        weights.turn(() if s.pool else (group,))
        fill = config.pipeline_cycles
        if s.parameters:
            slots = self.slots["parameters"]
            slots.turn((group,))
            if slots.fresh:
                self._compute(-1, -1, 0, self._beats(s.parameters, blocks * config.acc_element))
        taps, wide = (0, row.window * column.window) if s.pool else (s.taps, 0)
        before = len(self.stored) - self.slots["total"].count
        stored = self.stored[before] if before >= 0 else -1
        if s.pool:
            self._compute(-1, -1, fill + wide * blocks)
        else:
            self._compute(-1, stored, fill + entries)
        instructions, _ = self.nest(row, column, blocks)
        work = instructions * fill + (wide or pixels * taps * (1 if s.by_block else blocks))
        chosen = _turns(blocks if s.by_block else s.in_blocks, MOST_STEPS)
        for number, _ in chosen:
            loaded = self._image(image, row, column)
            matrices = 1 if s.pool else s.matrices * (1 if s.by_block else blocks)
            if not s.pool or number == 0:
                loaded = max(loaded, self._matrices(weights, matrices, not s.by_block and not s.pool))
            self._compute(loaded, -1, work, count=instructions)
            event = len(self.events.compute) - 1
            image.read(event, len(chosen) - number)
            weights.read(event, len(chosen) - number if not s.pool else 1)
            self.marks.append(event)
        self._finish(blocks, group, entries, stored)
        self.marks[-1] = len(self.events.compute) - 1
        self._store(row, column, blocks)
        return [often for _, often in chosen]

    def _finish(self, blocks: int, group: int, entries: int, stored: int) -> None:
        """Events behind a tile's products: the bias, a pool's maximum, and the ALU."""
        s, config = self.shape, self.config
        fill = config.pipeline_cycles
        if s.digits:
            ones, bias = self.slots["ones"], self.slots["bias"]
            ones.turn(())
            bias.turn((group,))
            loaded = self._load(ones, self._beats(1, s.digits * config.inp_element), 0) if ones.fresh else -1
            if bias.fresh:
                loaded = max(loaded, self._load(bias, self._beats(1, blocks * s.digits * config.wgt_element), 0))
            self._compute(loaded, -1, s.digits * (fill + entries))
            for slots in (ones, bias):
                slots.read(len(self.events.compute) - 1, 1)
        steps = s.alu
        cycles = s.parts * (fill + entries) + steps * (fill + config.alu_interval * entries)
        if s.pool:
            cycles = fill + entries + 2 * (fill + config.alu_interval * entries)
            cycles += (s.taps - 1) * config.alu_interval * entries
        self._compute(-1, stored if s.pool else -1, cycles, count=steps)

    def _image(self, slots: _SlotContents, row: _TileExtent, column: _TileExtent) -> int:
        """Load a block of the operand; returns the event, -1 where it is there."""
        if not slots.fresh:
            return -1
        each = column.read * self.config.inp_element
        whole = column.read == self.shape.size[1]
        beats = self._beats(1, row.read * each) if whole else self._beats(row.read, each)
        return self._load(slots, beats, row.window * column.window - row.read * column.read)

    def _matrices(self, slots: _SlotContents, count: int, apart: bool) -> int:
        """Load a step's weights; returns the event, -1 where they are there."""
        return self._load(slots, self._beats(1, count * self.config.wgt_element), 0) if slots.fresh else -1

    def _store(self, row: _TileExtent, column: _TileExtent, blocks: int) -> None:
        """Store a tile: neighbouring rows as one where they lie so, the blocks apart where they do not."""
        s, done = self.shape, len(self.events.compute) - 1
        dims = ((blocks, s.rows * s.columns), (row.size, s.columns), (column.size, 1))
        for _, rows, width, _ in rectangles(dims):
            self._event(self.events.store, (done, self._beats(rows, width * self.config.out_element)))
        self.stored.append(len(self.events.store) - 1)

    def _load(self, slots: _SlotContents, beats: int, padding: int) -> int:
        """Load what a name needs into its next slot."""
        self._event(self.events.load, (slots.overwritten(), beats, padding))
        slots.readers.append(-1)
        return len(self.events.load) - 1

    def _compute(self, loaded: int, stored: int, cycles: int, beats: int = -1, count: int = 1) -> None:
        """Append so many compute instructions as one event."""
        self._event(self.events.compute, (loaded, stored, cycles, beats), count)

    def _event(self, queue: list[Any], what: tuple[int, ...], count: int = 1) -> None:
        self.events.fetched += 1
        queue.append((self.events.fetched * self._instruction, *what))
        self.events.fetched += count - 1

    def _beats(self, rows: int, nbytes: int) -> int:
        """Cycles on the bus."""
        return rows * -(-nbytes // self.config.bus_bytes)


def _run(events: _Events, config: VtaConfig) -> tuple[list[int], int]:
    """When each compute event ends, and when everything has: the bus serves who asks first."""
    latency = config.bus_latency
    loads, stores, ends = list[int](), list[int](), list[int]()
    last_load = last_store = last = bus = 0
    load = compute = store = 0
    counts = len(events.load), len(events.compute), len(events.store)
    while compute < counts[1] or store < counts[2]:
        best, which = -1, -1
        if load < counts[0]:
            fetched, after, beats, padding = events.load[load]
            if after < compute:
                best = max(fetched, last_load, ends[after] if after >= 0 else 0) + latency
                which = 0
        if compute < counts[1]:
            fetched, needed, stored, cycles, own = events.compute[compute]
            if needed < load and stored < store:
                time = max(fetched, last, loads[needed] if needed >= 0 else 0, stores[stored] if stored >= 0 else 0)
                time += latency if own >= 0 else 0
                if which < 0 or time < best:
                    best, which = time, 1
        if store < counts[2]:
            fetched, result, moved = events.store[store]
            if result < compute:
                time = max(fetched, last_store, ends[result]) + latency
                if which < 0 or time < best:
                    best, which = time, 2
        if which == 0:
            bus = last_load = max(best, bus) + beats
            last_load += padding
            loads.append(last_load)
            load += 1
        elif which == 1:
            if own >= 0:
                best = bus = max(best, bus) + own
            last = best + cycles
            ends.append(last)
            compute += 1
        else:
            bus = last_store = max(best, bus) + moved
            stores.append(last_store)
            store += 1
    return ends, max(last, last_store) + 1
