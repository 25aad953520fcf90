"""What a choice for a layer costs: its statements in the order of schedule/plan/lower.py, walked without being made.

Engine cycles are the target's own formula, DMA cycles those of sim/dma.py. What the core needs for a statement is what
the simulator `iss` shows on RV32IMC; scripts/tuning_model.py says how near whole layers come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from dovetail.codegen.emit.lists import dma_rows
from dovetail.ir.crop import Tile
from dovetail.ir.layout import nbytes
from dovetail.ir.types import Box, Shape, TensorType, full_box
from dovetail.program.ir import Copy, dense_view
from dovetail.program.transfers import transfers
from dovetail.schedule.assign.costs import core_parts, cores_cycles, shared_cycles
from dovetail.schedule.cores import copies
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.region import Region
from dovetail.schedule.tiles.chain import WAKE_CYCLES
from dovetail.schedule.tiles.tile import BUFFERS, ORDER, PLACEMENT, TILE, packed_bytes, tile_match
from dovetail.schedule.tiles.tiling import (
    LAUNCH_CYCLES,
    constants_ahead,
    constants_in_copies,
    constants_room,
    tiles_ahead,
)
from dovetail.sim.dma import QUEUE
from dovetail.target.chip import Dma
from dovetail.target.description import Target
from dovetail.target.engine import Engine, StreamDma
from dovetail.target.pattern import Choice

START_CYCLES, END_CYCLES = 26, 20
"""Core cycles before the first statement of a network, and after the last wait."""
COPY_CYCLES = 29
"""Core cycles of starting a copy."""
ROOM_CYCLES = 8
"""How long after an engine has room for a launch its driver goes on."""
BETWEEN_CYCLES = 45
"""From a launch to the look whether there is room for the next, where an engine holds one: a turn of the loop, and the
next launch's words."""
CHECK_CYCLES = (19, 40)
"""Core cycles of a wait for a launch, and for a copy, that has ended."""


@dataclass(frozen=True, slots=True)
class _IssueCost:
    """How long whoever issues the statements of a layer takes; cycles."""

    copy: int
    """Of starting a copy."""
    launch: int
    """Of starting a launch, once there is room."""
    between: int
    """From a launch to when the core looks whether there is room for the next."""
    queue: int
    """Launches that are held, the one that is computed included."""
    room: int
    """From the end of a launch to when a full queue is seen to have room."""
    check: tuple[int, int]
    """Of a wait for a launch, and for a copy, that has ended."""
    wake: int
    """From an event to when what waited for it goes on."""


def _pace(engine: Engine) -> _IssueCost:
    """A list's commands are handed out by the engine itself, in no time; else the core issues everything."""
    if engine.stream is not None:
        return _IssueCost(0, 0, 0, 1 << 30, 0, (0, 0), 0)
    between = BETWEEN_CYCLES if engine.queue == 1 else 0  # beside one that holds several it is part of launching
    return _IssueCost(COPY_CYCLES, engine.launching, between, engine.queue, ROOM_CYCLES, CHECK_CYCLES, WAKE_CYCLES)


@dataclass(frozen=True, slots=True)
class _CopyCost:
    """What a copy, or several behind one another, takes."""

    starts: int = 0
    """Transfers that are started one by one."""
    cycles: int = 0
    """Of the DMA for all of them."""

    def __add__(self, other: _CopyCost) -> _CopyCost:
        return _CopyCost(self.starts + other.starts, self.cycles + other.cycles)


NOTHING = _CopyCost()


@dataclass(frozen=True, slots=True)
class _OperandLoad:
    """An operand of one kind of tile that is copied to the engine, and what it depends on."""

    moved: _CopyCost
    by_place: bool
    """Whether other rows and columns of the result need another part of it."""
    by_span: bool
    """Whether other channels of the result do."""


@dataclass(frozen=True, slots=True)
class _TileKind:
    """What one kind of tile costs: cycles of the engine, each load, its constants and its store."""

    engine: int
    loads: tuple[_OperandLoad, ...]
    constants: _CopyCost
    store: _CopyCost
    load_bytes: int
    constant_bytes: int
    store_bytes: int
    scratch: int


@dataclass(frozen=True, slots=True)
class _TileAxes:
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
        self.region, self._target, self._parts = region, target, core_parts(region.graph, target)

    def estimate(self, choice: Choice) -> Estimate | None:
        """What a choice is thought to cost."""
        cycles = shared_cycles(self._parts, self._target, choice)
        return Estimate(cycles + START_CYCLES + END_CYCLES, 1, 0, 0, 0)


def estimator(region: Region, target: Target, near: tuple[str, ...]) -> Estimator | CoreEstimator:
    """What estimates choices for a region, on an engine or on the core."""
    return CoreEstimator(region, target) if region.engine is None else Estimator(region, target, near)


class Estimator:
    """Estimates whole choices for one layer's own region, nothing chosen; every shape of tile is looked at once.
    The inputs and outputs `near` lie in the engine's memory."""

    def __init__(self, region: Region, target: Target, near: tuple[str, ...]) -> None:
        laid, ends = choose_layouts(region.graph, [region], target, near), {*region.graph.inputs, region.output}
        place = next(place for place, one in enumerate(laid.regions) if one.engine is not None)
        self.region, self._target, self._layouts = region, target, laid.layouts
        region = laid.regions[place]
        (self._part,) = region.parts
        assert region.engine is not None and region.offload is not None
        self._engine, self._dma, self._offload = region.engine, region.engine.dma or target.dma, region.offload
        # an engine with a DMA of its own copies from and to the memory of values, whatever lies there
        inner = {*region.graph.inputs, region.output} - ends  # what a relayout makes or takes lies in its memory
        self._near = frozenset({*near, *inner} if region.engine.dma is None else ())
        self._before = [self._relayout(one) for one in laid.regions[:place]]
        self._after = [self._relayout(one) for one in laid.regions[place + 1 :]]
        self._shape = region.graph.types[region.output].shape
        held = sum(laid.nbytes(name) for name in {*near, *inner})
        self._room = target.memory(region.engine.memory).size - held
        self._constants_room = constants_room(target, self._engine)
        self._kinds: dict[tuple[object, ...], _TileKind] = {}
        self._constants: dict[tuple[object, ...], int] = {}
        self._tiles: dict[Box, Tile] = {}
        self._fetches = not target.reads_constants(region.engine)

    def estimate(self, choice: Choice) -> Estimate | None:
        """What a whole, allowed choice costs; None when its tiles need more memory than there is."""
        if choice.get(PLACEMENT) == "core":
            return Estimate(cores_cycles(self.region.graph, self._target) + START_CYCLES + END_CYCLES, 1, 0, 0, 0)
        size = tile_shape(self._shape, choice)
        *rest, channels = [_parts(total, step) for total, step in zip(self._shape, size, strict=True)]
        spatial = [_TileAxes(tuple(p.box[0] for p in parts), tuple(p.kind for p in parts)) for parts in product(*rest)]
        own = tuple(value for name, value in choice.items() if name not in (BUFFERS, ORDER, PLACEMENT, *TILE))
        first = self._kind(choice, own, spatial[0], channels[0])
        buffers = int(choice.get(BUFFERS, 2))
        nbytes = first.load_bytes * (buffers if len(spatial) > 1 else 1) + first.scratch
        nbytes += first.store_bytes * (buffers if len(spatial) * len(channels) > 1 else 1)
        room, cuts = self._constants_room, (len(spatial), len(channels))
        constants = constants_in_copies(self._dma, first.constant_bytes, cuts, buffers, room)
        if constants is None:
            return None
        nbytes += 0 if room else constants.held
        if nbytes > self._room:
            return None
        order = [(place, span) for place in range(len(spatial)) for span in range(len(channels))]
        if choice.get(ORDER, "channels") == "channels":
            order = [(place, span) for span in range(len(channels)) for place in range(len(spatial))]
        kinds = [self._kind(choice, own, spatial[place], channels[span]) for place, span in order]
        if (together := constants.together) > 1:
            kinds = [self._with_constants(kinds[tile : tile + together], tile % together) for tile in range(len(kinds))]
        walk = _LayerTimeline(_pace(self._engine), buffers)
        cycles = walk.all(kinds, order, together, self._before, self._after)
        if self._engine.stream is not None:
            cycles += self._engine.launching + WAKE_CYCLES
        return Estimate(cycles, len(kinds), nbytes, sum(kind.engine for kind in kinds), walk.copying, walk.fetching)

    def _kind(self, choice: Choice, own: tuple[object, ...], place: _TileAxes, span: _TileAxes) -> _TileKind:
        """Cost of a tile; tiles of one size that touch the same edges cost the same."""
        key = (own, place.kind, span.kind)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._cost(choice, (*place.box, *span.box), (own, span.kind))
        return found

    def _with_constants(self, kinds: Sequence[_TileKind], place: int) -> _TileKind:
        """The first of some tiles; if that is the one with which constants are fetched, with those of all."""
        nbytes = sum(kind.constant_bytes for kind in kinds)
        return replace(kinds[0], constants=NOTHING if place else _CopyCost(1, dma_cycles(self._dma, nbytes)))

    def _cost(self, choice: Choice, box: Box, constants: tuple[object, ...]) -> _TileKind:
        tile, match = tile_match(replace(self._part, choice=choice), box, self._tiles.get(box))
        self._tiles[box] = tile
        if constants not in self._constants:
            self._constants[constants] = packed_bytes(self._offload.pack(match)) if self._fetches else 0
        types, whole, output = tile.graph.types, self._part.graph.types, self._part.output
        boxes = {**tile.reads, output: box}
        within = {
            n: whole[n].shape for n, part in boxes.items() if n in self._near and part != full_box(whole[n].shape)
        }
        away = [name for name in tile.reads if name not in self._near]
        loads = tuple(self._load(name, tile.reads[name], types[name]) for name in away)
        store = self._copied(output, box, types[output], False) if output not in self._near else NOTHING
        packed = self._constants[constants]
        fetch = _CopyCost(1, dma_cycles(self._dma, packed)) if packed else NOTHING
        cycles = self._offload.cycles(replace(match, within=within))
        held = {name: nbytes(self._part.layouts.get(name), types[name]) for name in (*away, output)}
        load_bytes, stored = sum(held[name] for name in away), held[output] if store.starts else 0
        return _TileKind(cycles, loads, fetch, store, load_bytes, packed, stored, self._offload.scratch(match))

    def _load(self, name: str, part: Box, kind: TensorType) -> _OperandLoad:
        whole = self._part.graph.types[name].shape
        cut = [span != (0, size) for span, size in zip(part, whole, strict=True)]
        return _OperandLoad(self._copied(name, part, kind, True), any(cut[:-1]), cut[-1])

    def _copied(self, name: str, part: Box, kind: TensorType, loads: bool) -> _CopyCost:
        """The copy of a part of a value to a tile, which lies as the engine takes it, or from one."""
        layout = self._part.layouts.get(name)
        lies = self._layouts.get(name) if name in self._part.converted else layout
        whole = dense_view("value", self._part.graph.types[name], layout=lies).part(part)
        tile = dense_view("tile", kind, layout=layout)
        return _moved(self._dma, Copy(0, *((whole, tile) if loads else (tile, whole))))

    def _relayout(self, region: Region) -> _CopyCost:
        """What a change of layout beside the engine's region takes: of the core all of its cycles."""
        views = {
            name: dense_view(name, kind, layout=self._layouts.get(name)) for name, kind in region.graph.types.items()
        }
        moved = self._target.dma and region.copied_by
        made = copies(0, region.graph, views, views[region.output]) if moved else None
        if made is None:
            return _CopyCost(0, cores_cycles(region.graph, self._target))
        return sum((_moved(self._target.dma, copy) for copy in made), NOTHING)


def _parts(total: int, step: int) -> list[_TileAxes]:
    """An axis cut into parts; of one kind are those of one length that touch the same ends."""
    spans = [(start, min(start + step, total)) for start in range(0, total, step)]
    return [_TileAxes(((start, stop),), (stop - start, start == 0, stop == total)) for start, stop in spans]


@dataclass
class _OperandBuffers:
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


Copies = list[tuple[_CopyCost, int]]


@dataclass
class _LayerTimeline:
    """Core, DMA and engine while a layer's statements are issued. Times are cycles since the layer began."""

    pace: _IssueCost
    buffers: int
    core: int = START_CYCLES
    launched: int = 0
    """When the core had started the last launch."""
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

    def all(
        self,
        kinds: Sequence[_TileKind],
        order: Sequence[tuple[int, int]],
        together: int,
        before: Sequence[_CopyCost],
        after: Sequence[_CopyCost],
    ) -> int:
        """Cycles of a layer of these tiles; `order` says the position and the channels of each, `together` for how many
        one copy fetches constants, `before` and `after` how the layouts of operands and result are changed."""
        count, late = len(kinds), self.buffers - 1
        loads, constants = _contents(kinds, order, self.buffers, together)
        self.fetching = sum(moved.cycles for copies in constants for moved, _ in copies)
        both = self.fetching, sum(kind.engine + LAUNCH_CYCLES for kind in kinds)
        ahead = tiles_ahead(self.buffers, count, *both)
        fetched = constants_ahead(self.buffers, count, together, *both)
        first = self._relayouts(before)
        needs: list[list[int]] = [[*first] for _ in kinds]
        stores: list[int] = []
        for tiles in (constants[:fetched], loads[:ahead]):
            for tile, made in enumerate(tiles):
                self._load(made, needs[tile])
        for tile, kind in enumerate(kinds):
            if tile and not loads[tile] and not constants[tile]:
                needs[tile] = needs[tile - 1]
            overwritten = tile - self.buffers  # whose result lies where this one's goes
            needed = [*needs[tile], *stores[max(overwritten, 0) : overwritten + 1]]
            self._wait(1, max(needed, default=-1))
            self._launch(kind.engine)
            if tile >= late and kind.store.starts:
                stores.append(self._store(tile - late, kinds))
            for moves, later in ((constants, tile + fetched), (loads, tile + ahead)):
                if later < count:
                    self._load(moves[later], needs[later])
        for tile in range(max(count - late, 0), count):
            if kinds[tile].store.starts:
                self._store(tile, kinds)
        if after:
            self._wait(0, count - 1)
            self._relayouts(after)
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

    def _relayouts(self, all_moved: Sequence[_CopyCost]) -> list[int]:
        """Change layouts, on the DMA or on the core; the numbers of the copies."""
        self.core += sum(moved.cycles for moved in all_moved if not moved.starts)
        return [self._copy(moved) for moved in all_moved if moved.starts]

    def _copy(self, moved: _CopyCost) -> int:
        """Start the transfers of a copy; returns its number."""
        begun, each = self.core + self.pace.copy, moved.cycles / moved.starts
        self.core += moved.starts * self.pace.copy
        self.dma = round(max(self.dma + moved.cycles, begun + moved.cycles, self.core + each))
        if self.pace.copy:  # the core waits where the DMA's queue is full
            self.core = max(self.core, self.dma - round(QUEUE * each))
        self.copying += moved.cycles
        self.copied.append(self.dma)
        return len(self.copied) - 1

    def _load(self, copies: Copies, needed: list[int]) -> None:
        """Start copies, each after the launch that read what lay there before."""
        for moved, reader in copies:
            self._wait(0, reader)
            needed.append(self._copy(moved))

    def _store(self, tile: int, kinds: Sequence[_TileKind]) -> int:
        self._wait(0, tile)
        return self._copy(kinds[tile].store)

    def _launch(self, cycles: int) -> None:
        """The driver waits while the engine has as many launches as it holds."""
        number = len(self.ended) - self.pace.queue
        if number >= 0:
            self.core = max(self.core, self.launched + self.pace.between, self.ended[number] + self.pace.room)
        self.core = self.launched = self.core + self.pace.launch
        self.ended.append(max(self.core, self.ended[-1] if self.ended else 0) + cycles)


def _contents(
    kinds: Sequence[_TileKind], order: Sequence[tuple[int, int]], buffers: int, together: int
) -> tuple[list[Copies], list[Copies]]:
    """For each tile the copies of operands, and those of constants, that it needs beyond the tile before it, each with
    the last tile that reads what is overwritten (-1 for none). Those of constants are for several tiles `together`."""
    spans = len({span for _, span in order})
    operands, weights = [_OperandBuffers() for _ in kinds[0].loads], _OperandBuffers()
    seen: set[int] = set()
    loads: list[Copies] = []
    constants: list[Copies] = []
    for tile, (kind, (place, span)) in enumerate(zip(kinds, order, strict=True)):
        before = order[tile - 1] if tile else (-1, -1)
        made: Copies = []
        for slots, load in zip(operands, kind.loads, strict=True):
            changed = (load.by_place and place != before[0]) or (load.by_span and span != before[1])
            if slots.take(tile, changed):
                made.append((load.moved, slots.overwritten(buffers)))
        loads.append(made)
        fetched: Copies = []
        changed = weights.take(tile, span // together != before[1] // together)
        if changed and kind.constants.starts and not (spans <= buffers and span in seen):
            fetched = [(kind.constants, weights.overwritten(buffers))]
        seen.add(span)
        constants.append(fetched)
    return loads, constants


def tile_shape(shape: Shape, choice: Choice) -> Shape:
    """The shape of a whole tile's result under a whole choice; the whole result where the planner cuts none."""
    if len(shape) == 4:
        return (shape[0], *(int(choice.get(name, whole)) for name, whole in zip(TILE, shape[1:], strict=True)))
    return (*shape[:-1], int(choice.get(TILE[2], shape[-1])))


def _moved(dma: Dma | StreamDma | None, copy: Copy) -> _CopyCost:
    """What a copy takes: of an engine's own DMA a command for each plane of rows."""
    if dma is None:
        return NOTHING
    made = dma_rows(copy) if isinstance(dma, StreamDma) else transfers(copy)
    each = [dma_cycles(dma, one.destination_row_bytes, one.destination_rows) for one in made]
    return _CopyCost(len(each), sum(each))


def dma_cycles(dma: Dma | StreamDma | None, row_bytes: int, rows: int = 1) -> int:
    """Cycles of one transfer (sim/dma.py)."""
    return 0 if dma is None else dma.setup_cycles + rows * -(-row_bytes // dma.bytes_per_cycle)
