"""What a choice for a layer costs: its statements in the order of schedule/plan/lower.py, walked without being made.

Engine cycles are the target's own formula, DMA cycles those of sim/dma.py. What the core needs for a statement is what
the simulator `iss` shows on RV32IMC; scripts/tuning_model.py says how near whole layers come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from dovetail.ir.crop import Tile
from dovetail.ir.types import Box, Shape, TensorType
from dovetail.schedule.assign.costs import core_cycles
from dovetail.schedule.partition import Region
from dovetail.schedule.tiles.tile import BUFFERS, ORDER, PLACEMENT, TILE, packed_bytes, tile_match
from dovetail.target.chip import Dma
from dovetail.target.description import Target
from dovetail.target.engine import Engine, StreamDma
from dovetail.target.pattern import Choice

START_CYCLES, END_CYCLES = 26, 20
"""Core cycles before the first statement of a network, and after the last wait."""
COPY_CYCLES = 29
"""Core cycles of starting a copy."""
WAKE_CYCLES = 26
"""How long after an event the core goes on that slept until then."""
ROOM_CYCLES = 8
"""How long after an engine has room for a launch its driver goes on."""
CHECK_CYCLES = (19, 40)
"""Core cycles of a wait for a launch, and for a copy, that has ended."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """How long whoever issues the statements of a layer takes; cycles."""

    copy: int
    """Of starting a copy."""
    launch: int
    """Of starting a launch, once there is room."""
    queue: int
    """Launches that are held, the one that is computed included."""
    room: int
    """From the end of a launch to when a full queue is seen to have room."""
    check: tuple[int, int]
    """Of a wait for a launch, and for a copy, that has ended."""
    wake: int
    """From an event to when what waited for it goes on."""


def _pace(engine: Engine) -> _Pace:
    """A list's commands are handed out by the engine itself, in no time; else the core issues everything."""
    if engine.stream is not None:
        return _Pace(0, 0, 1 << 30, 0, (0, 0), 0)
    return _Pace(COPY_CYCLES, engine.launching, engine.queue, ROOM_CYCLES, CHECK_CYCLES, WAKE_CYCLES)


@dataclass(frozen=True, slots=True)
class _Load:
    """An operand of one kind of tile that is copied to the engine, and what it depends on."""

    cycles: int
    by_place: bool
    """Whether other rows and columns of the result need another part of it."""
    by_span: bool
    """Whether other channels of the result do."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one kind of tile costs: cycles of the engine, of each load, of its constants and of its store."""

    engine: int
    loads: tuple[_Load, ...]
    constants: int
    store: int
    load_bytes: int
    constant_bytes: int
    store_bytes: int
    scratch: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Some axes of a tile, and what tells its cost from others'."""

    box: Box
    kind: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a choice is thought to cost."""

    cycles: int
    tiles: int
    nbytes: int
    """Bytes of the engine's memory that tiles take."""
    engine: int
    """Busy cycles of the engine."""
    copying: int
    """Busy cycles of the DMA."""
    fetching: int = 0
    """Those of constants alone."""


class CoreEstimator:
    """Estimates choices for the kernel of a region that the core computes."""

    def __init__(self, region: Region, target: Target) -> None:
        self._region, self._target = region, target

    def estimate(self, choice: Choice) -> Estimate | None:
        """What a choice is thought to cost."""
        cycles = core_cycles(self._region.graph, self._target, choice)
        return Estimate(cycles + START_CYCLES + END_CYCLES, 1, 0, 0, 0)


def estimator(region: Region, target: Target, near: tuple[str, ...]) -> Estimator | CoreEstimator:
    """What estimates choices for a region, on an engine or on the core."""
    return CoreEstimator(region, target) if region.engine is None else Estimator(region, target, near)


class Estimator:
    """Estimates whole choices for one layer's own region, nothing chosen; every shape of tile is looked at once.
    The inputs and outputs `near` lie in the engine's memory."""

    def __init__(self, region: Region, target: Target, near: tuple[str, ...]) -> None:
        assert region.engine is not None and region.offload is not None
        self._region, self._offload, self._target = region, region.offload, target
        self._engine, self._dma = region.engine, region.engine.dma or target.dma
        # an engine with a DMA of its own copies from and to the memory of values, whatever lies there
        self._near = frozenset(near if region.engine.dma is None else ())
        self._shape = region.graph.types[region.output].shape
        held = sum(region.graph.types[name].nbytes for name in near)
        self._room = target.memory(region.engine.memory).size - held
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._constants: dict[tuple[object, ...], int] = {}
        self._tiles: dict[Box, Tile] = {}
        self._fetches = not target.reads_constants(region.engine)

    def estimate(self, choice: Choice) -> Estimate | None:
        """What a whole, allowed choice costs; None when its tiles need more memory than there is."""
        if choice.get(PLACEMENT) == "core":
            return Estimate(core_cycles(self._region.graph, self._target) + START_CYCLES + END_CYCLES, 1, 0, 0, 0)
        size = tile_shape(self._shape, choice)
        *rest, channels = [_parts(total, step) for total, step in zip(self._shape, size, strict=True)]
        spatial = [_Part(tuple(p.box[0] for p in parts), tuple(p.kind for p in parts)) for parts in product(*rest)]
        own = tuple(value for name, value in choice.items() if name not in (BUFFERS, ORDER, PLACEMENT, *TILE))
        first = self._kind(choice, own, spatial[0], channels[0])
        buffers = int(choice.get(BUFFERS, 2))
        nbytes = first.load_bytes * (buffers if len(spatial) > 1 else 1) + first.scratch
        nbytes += first.store_bytes * (buffers if len(spatial) * len(channels) > 1 else 1)
        nbytes += first.constant_bytes * (buffers if len(channels) > 1 else 1)
        if nbytes > self._room:
            return None
        order = [(place, span) for place in range(len(spatial)) for span in range(len(channels))]
        if choice.get(ORDER, "channels") == "channels":
            order = [(place, span) for span in range(len(channels)) for place in range(len(spatial))]
        kinds = [self._kind(choice, own, spatial[place], channels[span]) for place, span in order]
        walk = _Walk(_pace(self._engine), buffers)
        cycles = walk.all(kinds, order)
        if self._engine.stream is not None:
            cycles += self._engine.launching + WAKE_CYCLES
        return Estimate(cycles, len(kinds), nbytes, sum(kind.engine for kind in kinds), walk.copying, walk.fetching)

    def _kind(self, choice: Choice, own: tuple[object, ...], place: _Part, span: _Part) -> _Kind:
        """Cost of a tile; tiles of one size that touch the same edges cost the same."""
        key = (own, place.kind, span.kind)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._cost(choice, (*place.box, *span.box), (own, span.kind))
        return found

    def _cost(self, choice: Choice, box: Box, constants: tuple[object, ...]) -> _Kind:
        tile, match = tile_match(replace(self._region, choice=choice), box, self._tiles.get(box))
        self._tiles[box] = tile
        if constants not in self._constants:
            self._constants[constants] = packed_bytes(self._offload.pack(match)) if self._fetches else 0
        types, whole, output = tile.graph.types, self._region.graph.types, self._region.output
        boxes = {**tile.reads, output: box}
        apart = frozenset(name for name, part in boxes.items() if name in self._near and _rows_apart(part, whole[name]))
        away = [name for name in tile.reads if name not in self._near]
        loads = tuple(_load(self._dma, tile.reads[name], whole[name]) for name in away)
        store = _copy_cycles(self._dma, box, whole[output]) if output not in self._near else 0
        packed = self._constants[constants]
        fetch = _dma_cycles(self._dma, 1, packed) if packed else 0
        cycles = self._offload.cycles(replace(match, apart=apart))
        load_bytes, stored = sum(types[name].nbytes for name in away), types[output].nbytes if store else 0
        return _Kind(cycles, loads, fetch, store, load_bytes, packed, stored, self._offload.scratch(match))


def _rows_apart(part: Box, whole: TensorType) -> bool:
    """Whether neighbouring rows of an image's part have others' columns between them."""
    return len(part) > 2 and part[-2] != (0, whole.shape[-2])


def _load(dma: Dma | StreamDma | None, part: Box, whole: TensorType) -> _Load:
    cut = [span != (0, size) for span, size in zip(part, whole.shape, strict=True)]
    return _Load(_copy_cycles(dma, part, whole), any(cut[:-1]), cut[-1])


def _parts(total: int, step: int) -> list[_Part]:
    """An axis cut into parts; of one kind are those of one length that touch the same ends."""
    spans = [(start, min(start + step, total)) for start in range(0, total, step)]
    return [_Part(((start, stop),), (stop - start, start == 0, stop == total)) for start, stop in spans]


@dataclass
class _Slots:
    """The buffers of one operand, which tiles take in turn."""

    last: list[int] = field(default_factory=list)
    """The last tile that reads each."""

    def take(self, tile: int, changed: bool) -> bool:
        """A tile's turn; says whether it needs other contents than the tile before it."""
        if changed or not self.last:
            self.last.append(tile)
            return True
        self.last[-1] = tile
        return False

    def overwritten(self, buffers: int) -> int:
        """The last tile that read what lies where the present contents go, -1 for none."""
        return self.last[-1 - buffers] if len(self.last) > buffers else -1


@dataclass
class _Walk:
    """Core, DMA and engine while a layer's statements are issued. Times are cycles since the layer began."""

    pace: _Pace
    buffers: int
    core: int = START_CYCLES
    dma: int = 0
    copying: int = 0
    fetching: int = 0
    """Busy cycles of the DMA: all, and those for constants."""
    ended: list[int] = field(default_factory=list)
    """When each launch has finished."""
    copied: list[int] = field(default_factory=list)
    """When each copy has."""
    known: list[int] = field(default_factory=lambda: [0, 0])
    """How many launches and how many copies the core knows to have finished."""

    def all(self, kinds: Sequence[_Kind], order: Sequence[tuple[int, int]]) -> int:
        """Cycles of a layer of these tiles; `order` says the position and the channels of each."""
        count, ahead, late = len(kinds), max(self.buffers - 1, 1), self.buffers - 1
        loads, constants = _contents(kinds, order, self.buffers)
        self.fetching = sum(cycles for copies in constants for cycles, _ in copies)
        needs: list[list[int]] = [[] for _ in kinds]
        stores: list[int] = []
        for tiles in (constants[:ahead], loads[:ahead]):
            for tile, copies in enumerate(tiles):
                self._load(copies, needs[tile])
        for tile, kind in enumerate(kinds):
            if tile and not loads[tile] and not constants[tile]:
                needs[tile] = needs[tile - 1]
            overwritten = tile - self.buffers  # whose result lies where this one's goes
            needed = [*needs[tile], *stores[max(overwritten, 0) : overwritten + 1]]
            self._wait(1, max(needed, default=-1))
            self._launch(kind.engine)
            if tile >= late and kind.store:
                stores.append(self._store(tile - late, kinds))
            if tile + ahead < count:
                self._load(constants[tile + ahead], needs[tile + ahead])
                self._load(loads[tile + ahead], needs[tile + ahead])
        for tile in range(max(count - late, 0), count):
            if kinds[tile].store:
                self._store(tile, kinds)
        self._wait(1, len(self.copied) - 1)
        self._wait(0, count - 1)
        return self.core + END_CYCLES

    def _wait(self, queue: int, number: int) -> None:
        """Wait for a launch (queue 0) or a copy (1), where the core does not know that it has finished."""
        if number < self.known[queue]:
            return
        end = (self.ended, self.copied)[queue][number]
        self.core = max(self.core + self.pace.check[queue], end + self.pace.wake)
        self.known[queue] = number + 1

    def _copy(self, cycles: int) -> int:
        """Start a copy; returns its number."""
        self.core += self.pace.copy
        self.dma = max(self.dma, self.core) + cycles
        self.copying += cycles
        self.copied.append(self.dma)
        return len(self.copied) - 1

    def _load(self, copies: Sequence[tuple[int, int]], needed: list[int]) -> None:
        """Start copies of so many cycles, each after the launch that read what lay there before."""
        for cycles, reader in copies:
            self._wait(0, reader)
            needed.append(self._copy(cycles))

    def _store(self, tile: int, kinds: Sequence[_Kind]) -> int:
        self._wait(0, tile)
        return self._copy(kinds[tile].store)

    def _launch(self, cycles: int) -> None:
        """The driver waits while the engine has as many launches as it holds."""
        number = len(self.ended) - self.pace.queue
        if number >= 0:
            self.core = max(self.core, self.ended[number] + self.pace.room)
        self.core += self.pace.launch
        self.ended.append(max(self.core, self.ended[-1] if self.ended else 0) + cycles)


Copies = list[tuple[int, int]]


def _contents(
    kinds: Sequence[_Kind], order: Sequence[tuple[int, int]], buffers: int
) -> tuple[list[Copies], list[Copies]]:
    """For each tile the copies of operands, and those of constants, that it needs beyond the tile before it: cycles,
    and the last tile that reads what is overwritten (-1 for none)."""
    spans = len({span for _, span in order})
    operands, weights = [_Slots() for _ in kinds[0].loads], _Slots()
    seen: set[int] = set()
    loads: list[Copies] = []
    constants: list[Copies] = []
    for tile, (kind, (place, span)) in enumerate(zip(kinds, order, strict=True)):
        before = order[tile - 1] if tile else (-1, -1)
        made: Copies = []
        for slots, load in zip(operands, kind.loads, strict=True):
            changed = (load.by_place and place != before[0]) or (load.by_span and span != before[1])
            if slots.take(tile, changed):
                made.append((load.cycles, slots.overwritten(buffers)))
        loads.append(made)
        fetched: Copies = []
        if kind.constants and weights.take(tile, span != before[1]) and not (spans <= buffers and span in seen):
            fetched = [(kind.constants, weights.overwritten(buffers))]
        seen.add(span)
        constants.append(fetched)
    return loads, constants


def tile_shape(shape: Shape, choice: Choice) -> Shape:
    """The shape of a whole tile's result under a whole choice; the whole result where the planner cuts none."""
    if len(shape) == 4:
        return (shape[0], *(int(choice.get(name, whole)) for name, whole in zip(TILE, shape[1:], strict=True)))
    return (*shape[:-1], int(choice.get(TILE[2], shape[-1])))


def _copy_cycles(dma: Dma | StreamDma | None, box: Box, whole: TensorType) -> int:
    """Cycles of copying a part of a dense value to or from a dense tile (rules: program/transfers.py)."""
    row, rows = whole.dtype.numpy.itemsize, 1
    contiguous = True
    for (start, stop), total in zip(reversed(box), reversed(whole.shape), strict=True):
        row, rows = (row * (stop - start), rows) if contiguous else (row, rows * (stop - start))
        contiguous = contiguous and (start, stop) == (0, total)
    return _dma_cycles(dma, rows, row)


def _dma_cycles(dma: Dma | StreamDma | None, rows: int, row_bytes: int) -> int:
    return 0 if dma is None else dma.setup_cycles + rows * -(-row_bytes // dma.bytes_per_cycle)
