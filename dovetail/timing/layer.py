"""A layer's tiles in time, in the order in which schedule/plan issues their copies, launches and waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.records import Record
from dovetail.timing.clock import CopyQueue, EngineQueue, Issuer
from dovetail.timing.transfers import FREE, CopyCost


class OperandLoad(Record):
    """Cost of copying an operand of a tile to the engine, and what the operand depends on."""

    copy: CopyCost
    by_place: bool
    """Whether other rows and columns of the result need another part of it."""
    by_span: bool
    """Whether other channels of the result do."""
    nbytes: int = 0
    """Bytes of the engine's memory that it takes."""


class TileCost(Record):
    """Cost of one kind of tile: cycles of the engine, each load, its constants and its store."""

    engine: int
    starting: int
    """Cycles in which the core goes along with its start."""
    loads: tuple[OperandLoad, ...]
    store: CopyCost
    load_bytes: int
    store_bytes: int
    scratch: int
    constants: CopyCost = FREE


class TilePass(Record):
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
class LayerClock:
    """Core, DMA and engine while a layer's statements are issued."""

    issuer: Issuer
    engine: EngineQueue
    dma: CopyQueue = field(default_factory=CopyQueue)
    fetching: int = 0
    """Busy cycles of the DMA for constants."""
    copied: list[int] = field(default_factory=list)
    """Time at which each copy has finished."""
    known: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of launches and of copies that the core knows to have finished."""

    def run(self, layer: TilePass, before: Sequence[CopyCost], after: Sequence[CopyCost]) -> int:
        """Time at which a layer ends; `before` and `after` change the layouts of operands and result."""
        tiles, buffers, count, late = layer.tiles, layer.buffers, len(layer.tiles), layer.buffers - 1
        loads, constants = operand_fetches(layer), constant_fetches(layer)
        self.fetching = sum(copy.cycles for copies in constants for copy, _ in copies)
        both = self.fetching, sum(tile.engine for tile in tiles)
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
            self._wait_copy(max(needed, default=-1))
            self.engine.launch(self.issuer, tile.engine, tile.starting)
            if number >= late and tile.store.starts:
                stores.append(self._store(number - late, tiles))
            for fetches, later in ((constants, number + fetched), (loads, number + ahead)):
                if later < count:
                    self._fetch(fetches[later], needs[later])
        for number in range(max(count - late, 0), count):
            if tiles[number].store.starts:
                self._store(number, tiles)
        if after:
            self._wait_launch(count - 1)
            self._relayouts(after)
        self._wait_copy(len(self.copied) - 1)
        self._wait_launch(count - 1)
        return self.issuer.now

    def _wait_launch(self, number: int) -> None:
        """Wait for a launch, where the core does not know that it has finished."""
        if number >= self.known[0] and not self.engine.is_core:
            self.issuer.wait_launch(self.engine.ends[number])
            self.known[0] = number + 1

    def _wait_copy(self, number: int) -> None:
        """Wait for a copy, where the core does not know that it has finished."""
        if number >= self.known[1]:
            self.issuer.wait_copy(self.copied[number])
            self.known[1] = number + 1

    def _relayouts(self, changes: Sequence[CopyCost]) -> list[int]:
        """Change layouts, on the DMA or on the core; the numbers of the copies."""
        self.issuer.now += sum(copy.cycles for copy in changes if not copy.starts)
        return [self._copy(copy) for copy in changes if copy.starts]

    def _copy(self, copy: CopyCost) -> int:
        """Start the transfers of a copy; returns its number."""
        self.copied.append(self.dma.copy(self.issuer, copy))
        return len(self.copied) - 1

    def _fetch(self, copies: Sequence[tuple[CopyCost, int]], needed: list[int]) -> None:
        """Start copies, each after the launch that read what lay there before."""
        for copy, reader in copies:
            self._wait_launch(reader)
            needed.append(self._copy(copy))

    def _store(self, number: int, tiles: Sequence[TileCost]) -> int:
        self._wait_launch(number)
        return self._copy(tiles[number].store)


def tiles_ahead(buffers: int, parts: int, fetching: int, computing: int) -> int:
    """Number of tiles whose constants are fetched before the first is launched.

    It is one less than there are buffers, so that the core launches soon; all where each tile has a buffer and the DMA
    takes longer than the engine, as it would idle else.

    Args:
        buffers: per operand that changes from tile to tile.
        parts: tiles with constants of their own.
        fetching: cycles of the DMA for the constants of all tiles.
        computing: cycles of the engine for all tiles.
    """
    return parts if parts <= buffers and fetching > computing else min(parts, max(buffers - 1, 1))


def constants_ahead(buffers: int, tiles: int, together: int, fetching: int, computing: int) -> int:
    """As `tiles_ahead`, for constants that one copy fetches for several tiles: with one buffer the next are fetched
    when the last tile that reads these has been launched."""
    copies = -(-tiles // together)
    return 1 if buffers == 1 < copies else together * tiles_ahead(buffers, copies, fetching, computing)


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
