"""The cost model of the tuner: a layer's cycles from its tiles, by walking the queues of core, DMA and engine.

It follows the order in which plan/lower.py issues copies and launches. Engine cycles are the target's own formula,
DMA cycles those of simulate/dma.py; what the core needs is a mean of what the `iss` simulator shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dovetail.graph.types import Box, Shape, TensorType
from dovetail.partition.regions import Region
from dovetail.plan.tiles import BUFFERS, ORDER, PLACEMENT, TILE, packed_bytes, tile_match
from dovetail.target.description import Dma, Target
from dovetail.target.knobs import Choice, Value

START_CYCLES = 20
"""Core cycles before the first and after the last statement of a network."""
LAUNCH_CYCLES = 110
"""Core cycles of a launch and the waits around it."""
COPY_CYCLES = 45
"""Core cycles of starting a copy."""
CORE_CYCLES_PER_MAC, CORE_CYCLES_PER_RESULT = 4, 30
"""What a layer costs on the core, roughly (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one kind of tile costs: cycles of the engine, of each load, of its constants and of its store."""

    engine: int
    load: int
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


class Estimator:
    """Estimates whole choices for one layer; every shape of tile is looked at once.

    Args:
        region: the layer's own region, nothing chosen.
        target: the machine.
        near: its inputs and outputs that lie in the engine's memory.
    """

    def __init__(self, region: Region, target: Target, near: tuple[str, ...]) -> None:
        assert region.engine is not None and region.offload is not None
        self._region, self._offload, self._dma = region, region.offload, target.dma
        self._near = frozenset(near)
        self._shape = region.graph.types[region.output].shape
        held = sum(region.graph.types[name].nbytes for name in near)
        self._room = target.memory(region.engine.memory).size - held
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._constants: dict[tuple[object, ...], int] = {}

    def estimate(self, choice: Choice) -> Estimate | None:
        """What a whole, allowed choice costs; None when its tiles need more memory than there is."""
        if choice.get(PLACEMENT) == "core":
            elements = self._region.graph.types[self._region.output].elements
            return Estimate(self._region.macs * CORE_CYCLES_PER_MAC + elements * CORE_CYCLES_PER_RESULT, 1, 0, 0, 0)
        size = tile_shape(self._shape, choice)
        *rest, channels = [_parts(total, step) for total, step in zip(self._shape, size, strict=True)]
        spatial = [
            _Part(tuple(part.box[0] for part in parts), tuple(part.kind for part in parts)) for parts in product(*rest)
        ]
        own = tuple(value for name, value in choice.items() if name not in (BUFFERS, ORDER, PLACEMENT, *TILE))
        first = self._kind(choice, own, spatial[0], channels[0])
        buffers = int(choice.get(BUFFERS, 2))
        nbytes = first.load_bytes * (buffers if len(spatial) > 1 else 1) + first.scratch
        nbytes += first.store_bytes * (buffers if len(spatial) * len(channels) > 1 else 1)
        nbytes += first.constant_bytes * (buffers if len(channels) > 1 else 1)
        if nbytes > self._room:
            return None
        if choice.get(ORDER, "channels") == "channels":
            order = [(place, span) for span in channels for place in spatial]
        else:
            order = [(place, span) for place in spatial for span in channels]
        return _walk([self._kind(choice, own, place, span) for place, span in order], order, buffers, nbytes)

    def _kind(self, choice: Choice, own: tuple[object, ...], place: _Part, span: _Part) -> _Kind:
        """Cost of a tile; tiles of one size that touch the same edges cost the same."""
        key = (own, place.kind, span.kind)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._cost(choice, (*place.box, *span.box), (own, span.kind))
        return found

    def _cost(self, choice: Choice, box: Box, constants: tuple[object, ...]) -> _Kind:
        tile, match = tile_match(replace(self._region, choice=choice), box)
        if constants not in self._constants:
            self._constants[constants] = packed_bytes(self._offload.pack(match))
        types, whole = tile.graph.types, self._region.graph.types
        load = load_bytes = 0
        for name, part in tile.reads.items():
            if name not in self._near:
                load += _copy_cycles(self._dma, part, whole[name])
                load_bytes += types[name].nbytes
        output, store, store_bytes = self._region.output, 0, 0
        if output not in self._near:
            store, store_bytes = _copy_cycles(self._dma, box, whole[output]), types[output].nbytes
        packed = self._constants[constants]
        fetch = _dma_cycles(self._dma, 1, packed) if packed else 0
        cycles = self._offload.cycles(match)
        return _Kind(cycles, load, fetch, store, load_bytes, packed, store_bytes, self._offload.scratch(match))


def _parts(total: int, step: int) -> list[_Part]:
    """An axis cut into parts; of one kind are those of one length that touch the same ends."""
    spans = [(start, min(start + step, total)) for start in range(0, total, step)]
    return [_Part(((start, stop),), (stop - start, start == 0, stop == total)) for start, stop in spans]


def _walk(kinds: Sequence[_Kind], order: Sequence[tuple[_Part, _Part]], buffers: int, nbytes: int) -> Estimate:
    """Issue copies and launches as the program does; the core waits for what each needs."""
    core, dma, engine, busy, copying = START_CYCLES, 0, 0, 0, 0
    done: list[int] = []
    stored: list[int] = []
    late = buffers - 1
    for number, (kind, (place, span)) in enumerate(zip(kinds, order, strict=True)):
        before = order[number - 1] if number else None
        free = done[number - buffers] if number >= buffers else 0
        moved = kind.constants if before is None or before[1] is not span else 0
        moved += kind.load if before is None or before[0] is not place else 0
        if moved:
            core = max(core, free) + COPY_CYCLES
            dma = max(dma, core) + moved
            copying += moved
            core = max(core, dma)
        if kind.store and number >= buffers:
            core = max(core, stored[number - buffers])
        core += LAUNCH_CYCLES
        engine = max(engine, core) + kind.engine
        busy += kind.engine
        done.append(engine)
        if kind.store and number >= late:
            core = max(core, done[number - late]) + COPY_CYCLES
            dma = max(dma, core) + kinds[number - late].store
            copying += kinds[number - late].store
            stored.append(dma)
    for number in range(max(0, len(kinds) - late), len(kinds)):
        if kinds[number].store:
            core = max(core, done[number]) + COPY_CYCLES
            dma = max(dma, core) + kinds[number].store
            copying += kinds[number].store
    return Estimate(max(core, dma, engine), len(kinds), nbytes, busy, copying)


def tile_shape(shape: Shape, choice: Choice) -> Shape:
    """The shape of a whole tile's result under a whole choice; the whole result where the planner cuts none."""
    if len(shape) == 4:
        return (shape[0], *(int(choice.get(name, whole)) for name, whole in zip(TILE, shape[1:], strict=True)))
    return (*shape[:-1], int(choice.get(TILE[2], shape[-1])))


def _copy_cycles(dma: Dma | None, box: Box, whole: TensorType) -> int:
    """Cycles of copying a part of a dense value to or from a dense tile (rules: program/transfers.py)."""
    row, rows = whole.dtype.numpy.itemsize, 1
    contiguous = True
    for (start, stop), total in zip(reversed(box), reversed(whole.shape), strict=True):
        if contiguous:
            row *= stop - start
        else:
            rows *= stop - start
        contiguous = contiguous and (start, stop) == (0, total)
    return _dma_cycles(dma, rows, row)


def _dma_cycles(dma: Dma | None, rows: int, row_bytes: int) -> int:
    return 0 if dma is None else dma.setup_cycles + rows * -(-row_bytes // dma.bytes_per_cycle)


def features(choice: Mapping[str, Value], found: Estimate, knobs: Mapping[str, tuple[Value, ...]]) -> list[float]:
    """What the learned model sees of a choice: settings, their logarithms, and what the cost model thinks of it."""
    from math import log2

    row: list[float] = []
    for name, values in knobs.items():
        value = choice.get(name, values[0])
        number = float(value) if isinstance(value, int) else float(values.index(value))
        row += [number, log2(1 + number)]
    for count in (found.cycles, found.tiles, found.nbytes, found.engine, found.copying):
        row.append(log2(1 + count))
    return row
