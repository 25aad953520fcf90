"""A layer's statements in time, in the order of schedule/plan/lower.py: core, DMA and engine walk over tile costs.

What the core needs for a statement is what the simulator `iss` shows on RV32IMC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.schedule.tiles.chain import WAKE_CYCLES
from dovetail.schedule.tiles.tiling import LAUNCH_CYCLES, constants_ahead, tiles_ahead
from dovetail.sim.dma import QUEUE
from dovetail.target.engine import Engine

START_CYCLES, END_CYCLES = 26, 20
"""Core cycles before the first statement of a network, and after the last wait."""
COPY_CYCLES = 29
"""Core cycles of starting a copy."""
ROOM_CYCLES = 8
"""Cycles after which a driver goes on once its engine has room for a launch."""
BETWEEN_CYCLES = 45
"""Cycles from a launch to the look whether there is room for the next, where an engine holds one: a turn of the loop,
and the next launch's words."""
CHECK_CYCLES = (19, 40)
"""Core cycles of a wait for a launch, and for a copy, that has ended."""


@dataclass(frozen=True, slots=True)
class IssueCost:
    """Cycles that issuing the statements of a layer takes."""

    copy: int = COPY_CYCLES
    """To start a copy."""
    launch: int = 0
    """To start a launch, once there is room."""
    between: int = 0
    """From a launch to when the core looks whether there is room for the next."""
    queue: int = 1
    """Launches the engine holds, the one that is computed included."""
    room: int = ROOM_CYCLES
    """From the end of a launch to when a full queue is seen to have room."""
    check: tuple[int, int] = CHECK_CYCLES
    """To wait for a launch, and for a copy, that has ended."""
    wake: int = WAKE_CYCLES
    """From an event to when the core goes on that waited for it."""

    @classmethod
    def of(cls, engine: Engine) -> IssueCost:
        """An engine that takes lists hands out its commands in no time; else the core issues everything."""
        if engine.stream is not None:
            return cls(copy=0, queue=1 << 30, room=0, check=(0, 0), wake=0)
        between = BETWEEN_CYCLES if engine.queue == 1 else 0  # beside one that holds several it is part of launching
        return cls(launch=engine.launching, between=between, queue=engine.queue)


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Cost of a copy, or of several one after the other."""

    starts: int = 0
    """Transfers that are started one by one."""
    cycles: int = 0
    """Cycles of the DMA for all of them."""

    def __add__(self, other: CopyCost) -> CopyCost:
        return CopyCost(self.starts + other.starts, self.cycles + other.cycles)


FREE = CopyCost()


@dataclass(frozen=True, slots=True)
class OperandLoad:
    """Cost of copying an operand of a tile to the engine, and what the operand depends on."""

    copy: CopyCost
    by_place: bool
    """Whether other rows and columns of the result need another part of it."""
    by_span: bool
    """Whether other channels of the result do."""


@dataclass(frozen=True, slots=True)
class TileCost:
    """Cost of one kind of tile: cycles of the engine, each load, its constants and its store."""

    engine: int
    loads: tuple[OperandLoad, ...]
    constants: CopyCost
    store: CopyCost
    load_bytes: int
    constant_bytes: int
    store_bytes: int
    scratch: int


@dataclass(frozen=True, slots=True)
class TilePass:
    """The tiles of a layer in their order."""

    tiles: Sequence[TileCost]
    order: Sequence[tuple[int, int]]
    """Numbers of the position and of the channels of each."""
    buffers: int
    """Per operand that changes from tile to tile."""
    together: int
    """Tiles for which one copy fetches constants."""


Fetches = list[list[tuple[CopyCost, int]]]
"""For each tile the copies it needs beyond the tile before it, each with the last tile that reads what is overwritten
(-1 for none)."""


@dataclass
class LayerTimeline:
    """Core, DMA and engine while a layer's statements are issued. Times are cycles since the layer began."""

    issue: IssueCost
    core: int = START_CYCLES
    launched: int = 0
    """Time at which the core had started the last launch."""
    dma: int = 0
    copying: int = 0
    """Busy cycles of the DMA."""
    fetching: int = 0
    """Busy cycles of the DMA for constants."""
    ended: list[int] = field(default_factory=list)
    """Time at which each launch has finished."""
    copied: list[int] = field(default_factory=list)
    """Time at which each copy has finished."""
    known: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of launches and of copies that the core knows to have finished."""

    def run(self, layer: TilePass, before: Sequence[CopyCost], after: Sequence[CopyCost]) -> int:
        """Cycles of a layer; `before` and `after` change the layouts of operands and result."""
        tiles, buffers, count, late = layer.tiles, layer.buffers, len(layer.tiles), layer.buffers - 1
        loads, constants = operand_fetches(layer), constant_fetches(layer)
        self.fetching = sum(copy.cycles for copies in constants for copy, _ in copies)
        both = self.fetching, sum(tile.engine + LAUNCH_CYCLES for tile in tiles)
        ahead = tiles_ahead(buffers, count, *both)
        fetched = constants_ahead(buffers, count, layer.together, *both)
        first = self._relayouts(before)
        needs: list[list[int]] = [[*first] for _ in tiles]
        stores: list[int] = []
        for early in (constants[:fetched], loads[:ahead]):
            for number, copies in enumerate(early):
                self._fetch(copies, needs[number])
        for number, tile in enumerate(tiles):
            if number and not loads[number] and not constants[number]:
                needs[number] = needs[number - 1]
            overwritten = number - buffers  # its result lies in the place of this one's
            needed = [*needs[number], *stores[max(overwritten, 0) : overwritten + 1]]
            self._wait(1, max(needed, default=-1))
            self._launch(tile.engine)
            if number >= late and tile.store.starts:
                stores.append(self._store(number - late, tiles))
            for fetches, later in ((constants, number + fetched), (loads, number + ahead)):
                if later < count:
                    self._fetch(fetches[later], needs[later])
        for number in range(max(count - late, 0), count):
            if tiles[number].store.starts:
                self._store(number, tiles)
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
        self.core = max(self.core + self.issue.check[queue], end + self.issue.wake)
        self.known[queue] = number + 1

    def _relayouts(self, changes: Sequence[CopyCost]) -> list[int]:
        """Change layouts, on the DMA or on the core; the numbers of the copies."""
        self.core += sum(copy.cycles for copy in changes if not copy.starts)
        return [self._copy(copy) for copy in changes if copy.starts]

    def _copy(self, copy: CopyCost) -> int:
        """Start the transfers of a copy; returns its number."""
        begin, each = self.core + self.issue.copy, copy.cycles / copy.starts
        self.core += copy.starts * self.issue.copy
        self.dma = round(max(self.dma + copy.cycles, begin + copy.cycles, self.core + each))
        if self.issue.copy:  # the core waits where the DMA's queue is full
            self.core = max(self.core, self.dma - round(QUEUE * each))
        self.copying += copy.cycles
        self.copied.append(self.dma)
        return len(self.copied) - 1

    def _fetch(self, copies: Sequence[tuple[CopyCost, int]], needed: list[int]) -> None:
        """Start copies, each after the launch that read what lay there before."""
        for copy, reader in copies:
            self._wait(0, reader)
            needed.append(self._copy(copy))

    def _store(self, number: int, tiles: Sequence[TileCost]) -> int:
        self._wait(0, number)
        return self._copy(tiles[number].store)

    def _launch(self, cycles: int) -> None:
        """The driver waits while the engine has as many launches as it holds."""
        number = len(self.ended) - self.issue.queue
        if number >= 0:
            self.core = max(self.core, self.launched + self.issue.between, self.ended[number] + self.issue.room)
        self.core = self.launched = self.core + self.issue.launch
        self.ended.append(max(self.core, self.ended[-1] if self.ended else 0) + cycles)


def operand_fetches(layer: TilePass) -> Fetches:
    """The copies of operands."""
    fetches: Fetches = [[] for _ in layer.tiles]
    for loads in zip(*(tile.loads for tile in layer.tiles), strict=True):
        changes, before = [], (-1, -1)
        for load, tile in zip(loads, layer.order, strict=True):
            changes.append((load.by_place and tile[0] != before[0]) or (load.by_span and tile[1] != before[1]))
            before = tile
        for number, reader in _overwritten(changes, layer.buffers).items():
            fetches[number].append((loads[number].copy, reader))
    return fetches


def constant_fetches(layer: TilePass) -> Fetches:
    """The copies of constants; channels that still lie in a buffer are not fetched again."""
    spans = [span for _, span in layer.order]
    groups = [span // layer.together for span in spans]
    changes = [group != before for group, before in zip(groups, [-1, *groups], strict=False)]
    stay = len(set(spans)) <= layer.buffers
    fetches: Fetches = [[] for _ in layer.tiles]
    for number, reader in _overwritten(changes, layer.buffers).items():
        constants = layer.tiles[number].constants
        if constants.starts and not (stay and spans[number] in spans[:number]):
            fetches[number].append((constants, reader))
    return fetches


def _overwritten(changes: Sequence[bool], buffers: int) -> dict[int, int]:
    """Tiles that need other contents of a buffer than the tile before, each with the last tile that read what lies in
    the buffer they take, -1 for none. Buffers are taken in turn."""
    readers: dict[int, int] = {}
    last: list[int] = []
    """The last tile that reads each of the contents."""
    for number, is_other in enumerate(changes):
        if is_other or not last:
            last.append(number)
            readers[number] = last[-1 - buffers] if len(last) > buffers else -1
        else:
            last[-1] = number
    return readers
