"""Estimates the cycles of a choice for a layer: costs of its tiles, and its statements in time (`timeline.py`).

Engine cycles are the target's own formula, DMA cycles those of sim/dma.py; scripts/tuning_model.py says how near whole
layers come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from dovetail.codegen.emit.lists import dma_rows
from dovetail.guests.tune.timeline import (
    END_CYCLES,
    FREE,
    START_CYCLES,
    CopyCost,
    IssueCost,
    LayerTimeline,
    OperandLoad,
    TileCost,
    TilePass,
)
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
from dovetail.schedule.tiles.tiling import constants_in_copies, constants_room
from dovetail.target.chip import Dma
from dovetail.target.description import Target
from dovetail.target.engine import StreamDma
from dovetail.target.pattern import Choice


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated cost of a choice."""

    cycles: int
    tiles: int = 1
    nbytes: int = 0
    """Bytes of the engine's memory that tiles take."""
    engine: int = 0
    """Busy cycles of the engine."""
    copying: int = 0
    """Busy cycles of the DMA."""
    fetching: int = 0
    """Busy cycles of the DMA for constants."""


class CoreEstimator:
    """Estimates choices for the kernel of a region that the core computes."""

    def __init__(self, region: Region, target: Target) -> None:
        self.region, self._target, self._parts = region, target, core_parts(region.graph, target)

    def estimate(self, choice: Choice) -> Estimate | None:
        """The cost of a choice."""
        return Estimate(shared_cycles(self._parts, self._target, choice) + START_CYCLES + END_CYCLES)


def estimator(region: Region, target: Target, near: tuple[str, ...]) -> Estimator | CoreEstimator:
    """The estimator of a region, on an engine or on the core."""
    return CoreEstimator(region, target) if region.engine is None else Estimator(region, target, near)


@dataclass(frozen=True, slots=True)
class _TileAxes:
    """Some axes of a tile; tiles whose axes have one `kind` cost the same."""

    box: Box
    kind: tuple[object, ...]


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
        self._costs: dict[tuple[object, ...], TileCost] = {}
        self._constants: dict[tuple[object, ...], int] = {}
        self._tiles: dict[Box, Tile] = {}
        self._fetches = not target.reads_constants(region.engine)

    def estimate(self, choice: Choice) -> Estimate | None:
        """The cost of a whole, allowed choice; None when its tiles need more memory than there is."""
        if choice.get(PLACEMENT) == "core":
            return Estimate(cores_cycles(self.region.graph, self._target) + START_CYCLES + END_CYCLES)
        sizes = zip(self._shape, tile_shape(self._shape, choice), strict=True)
        *rest, channels = [_cut(total, step) for total, step in sizes]
        spatial = [_TileAxes(tuple(p.box[0] for p in parts), tuple(p.kind for p in parts)) for parts in product(*rest)]
        first, buffers = self._tile(choice, spatial[0], channels[0]), int(choice.get(BUFFERS, 2))
        cuts = len(spatial), len(channels)
        constants = constants_in_copies(self._dma, first.constant_bytes, cuts, buffers, self._constants_room)
        if constants is None:
            return None
        nbytes = first.load_bytes * (buffers if len(spatial) > 1 else 1) + first.scratch
        nbytes += first.store_bytes * (buffers if len(spatial) * len(channels) > 1 else 1)
        nbytes += 0 if self._constants_room else constants.held
        if nbytes > self._room:
            return None
        order = list(product(range(len(spatial)), range(len(channels))))
        if choice.get(ORDER, "channels") == "channels":
            order.sort(key=lambda tile: tile[1])
        tiles = [self._tile(choice, spatial[place], channels[span]) for place, span in order]
        if (together := constants.together) > 1:
            tiles = [self._with_constants(tiles[at : at + together], at % together) for at in range(len(tiles))]
        timeline = LayerTimeline(IssueCost.of(self._engine))
        cycles = timeline.run(TilePass(tiles, order, buffers, together), self._before, self._after)
        if self._engine.stream is not None:
            cycles += self._engine.launching + WAKE_CYCLES
        engine = sum(tile.engine for tile in tiles)
        return Estimate(cycles, len(tiles), nbytes, engine, timeline.copying, timeline.fetching)

    def _tile(self, choice: Choice, place: _TileAxes, span: _TileAxes) -> TileCost:
        """Cost of a tile; tiles of one size that touch the same edges cost the same."""
        own = tuple(value for name, value in choice.items() if name not in (BUFFERS, ORDER, PLACEMENT, *TILE))
        key = (own, place.kind, span.kind)
        if key not in self._costs:
            self._costs[key] = self._cost(choice, (*place.box, *span.box), (own, span.kind))
        return self._costs[key]

    def _with_constants(self, tiles: Sequence[TileCost], place: int) -> TileCost:
        """The first of some tiles; if constants are fetched with it, with those of all of them."""
        nbytes = sum(tile.constant_bytes for tile in tiles)
        return replace(tiles[0], constants=FREE if place else CopyCost(1, dma_cycles(self._dma, nbytes)))

    def _cost(self, choice: Choice, box: Box, constants: tuple[object, ...]) -> TileCost:
        tile, match = tile_match(replace(self._part, choice=choice), box, self._tiles.get(box))
        self._tiles[box] = tile
        if constants not in self._constants:
            self._constants[constants] = packed_bytes(self._offload.pack(match)) if self._fetches else 0
        packed = self._constants[constants]
        types, whole, output = tile.graph.types, self._part.graph.types, self._part.output
        within = {
            name: whole[name].shape
            for name, part in {**tile.reads, output: box}.items()
            if name in self._near and part != full_box(whole[name].shape)
        }
        away = [name for name in tile.reads if name not in self._near]
        store = FREE if output in self._near else self._copy(output, box, types[output], False)
        sizes = {name: nbytes(self._part.layouts.get(name), types[name]) for name in (*away, output)}
        return TileCost(
            engine=self._offload.cycles(replace(match, within=within)),
            loads=tuple(self._load(name, tile.reads[name], types[name]) for name in away),
            constants=CopyCost(1, dma_cycles(self._dma, packed)) if packed else FREE,
            store=store,
            load_bytes=sum(sizes[name] for name in away),
            constant_bytes=packed,
            store_bytes=sizes[output] if store.starts else 0,
            scratch=self._offload.scratch(match),
        )

    def _load(self, name: str, part: Box, kind: TensorType) -> OperandLoad:
        whole = self._part.graph.types[name].shape
        cut = [span != (0, size) for span, size in zip(part, whole, strict=True)]
        return OperandLoad(self._copy(name, part, kind, True), any(cut[:-1]), cut[-1])

    def _copy(self, name: str, part: Box, kind: TensorType, loads: bool) -> CopyCost:
        """Cost of copying a part of a value to a tile, which lies as the engine takes it, or from one."""
        layout = self._part.layouts.get(name)
        lies = self._layouts.get(name) if name in self._part.converted else layout
        whole = dense_view("value", self._part.graph.types[name], layout=lies).part(part)
        tile = dense_view("tile", kind, layout=layout)
        return _moved(self._dma, Copy(0, *((whole, tile) if loads else (tile, whole))))

    def _relayout(self, region: Region) -> CopyCost:
        """Cost of a change of layout beside the engine's region; on the core all of its cycles."""
        views = {
            name: dense_view(name, kind, layout=self._layouts.get(name)) for name, kind in region.graph.types.items()
        }
        by_dma = self._target.dma and region.copied_by
        moves = copies(0, region.graph, views, views[region.output]) if by_dma else None
        if moves is None:
            return CopyCost(0, cores_cycles(region.graph, self._target))
        return sum((_moved(self._target.dma, copy) for copy in moves), FREE)


def _cut(total: int, step: int) -> list[_TileAxes]:
    """An axis cut into parts; parts of one length that touch the same ends are of one kind."""
    spans = [(start, min(start + step, total)) for start in range(0, total, step)]
    return [_TileAxes(((start, stop),), (stop - start, start == 0, stop == total)) for start, stop in spans]


def tile_shape(shape: Shape, choice: Choice) -> Shape:
    """The shape of a whole tile's result under a whole choice; the whole result where the planner cuts none."""
    if len(shape) == 4:
        return (shape[0], *(int(choice.get(name, whole)) for name, whole in zip(TILE, shape[1:], strict=True)))
    return (*shape[:-1], int(choice.get(TILE[2], shape[-1])))


def _moved(dma: Dma | StreamDma | None, copy: Copy) -> CopyCost:
    """Cost of a copy; an engine's own DMA has a command for each plane of rows."""
    if dma is None:
        return FREE
    rows = dma_rows(copy) if isinstance(dma, StreamDma) else transfers(copy)
    each = [dma_cycles(dma, one.destination_row_bytes, one.destination_rows) for one in rows]
    return CopyCost(len(each), sum(each))


def dma_cycles(dma: Dma | StreamDma | None, row_bytes: int, rows: int = 1) -> int:
    """Cycles of one transfer (sim/dma.py)."""
    return 0 if dma is None else dma.setup_cycles + rows * -(-row_bytes // dma.bytes_per_cycle)
