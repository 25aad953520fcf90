"""From a region to VTA's instruction stream: tiles, their traces, places in the SRAMs, instructions, tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dovetail.graph.graph import Graph
from dovetail.graph.types import Box
from dovetail.loops import Allocation, Demand, Event, Issue, Lanes, Pool, Window, algorithm, pools, trace
from dovetail.operators.linear import Conv2d, DepthwiseConv2d
from dovetail.operators.pooling import MaxPool2d
from dovetail.target import crop
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.constants import depth
from dovetail.targets.vta.issues import write_issue
from dovetail.targets.vta.mapping import scheduled
from dovetail.targets.vta.writer import Placed, Stream, Writer, shifted

STREAMING = 8
"""Slots for data that cannot stay as a whole: more would only need more micro-operations."""


@dataclass(frozen=True)
class Tiling:
    """How a region's result is cut: a tile is computed from start to end before the next one."""

    rows: int
    columns: int
    blocks: int
    """Channel blocks."""
    channels_first: bool
    """Whether all channels of a part of the image come before its next part."""
    slots: int = 0
    """Most slots for one name in a memory; 0 for as many as are of use."""


@dataclass(frozen=True)
class _Tile:
    events: tuple[Event, ...]
    origins: Mapping[str, tuple[int, ...]]
    """First index of each argument's leading dimensions in this tile."""


def lower(placed: Placed, tiling: Tiling, config: VtaConfig) -> Stream:
    """The stream that computes a region.

    Raises:
        PlanError: a tile does not fit the SRAMs.
        TargetError: a field of an instruction is too small.
    """
    tiles = list(_tiles(placed.graph, tiling, config))
    writer = Writer(placed, config, _pools(tiles, tiling, config))
    for tile in tiles:
        _write(writer, tile)
    return writer.finish()


def _write(writer: Writer, tile: _Tile) -> None:
    """One tile from loads to stores."""
    writer.origins = tile.origins
    loads = [event for event in tile.events if isinstance(event, Issue)]
    contents = {_filled(event): _key(event, tile.origins) for event in loads}
    for event in tile.events:
        if isinstance(event, Allocation):
            writer.allocate(event, contents.get(event.buffer))
        elif isinstance(event, Issue):
            write_issue(writer, event)


def _filled(event: Issue) -> int | None:
    """The buffer a load fills."""
    if "source" not in event.operands:
        return None
    windows = [w for name, w in event.operands.items() if isinstance(w, Window) and name != "source"]
    return windows[0].buffer


def boxes(graph: Graph, tiling: Tiling, block: int) -> list[Box]:
    """The tiles of the result in the order they are computed."""
    shape = graph.types[graph.outputs[0]].shape
    channels = [(c, min(c + tiling.blocks * block, shape[-1])) for c in range(0, shape[-1], tiling.blocks * block)]
    if len(shape) == 2:
        return [((0, shape[0]), span) for span in channels]
    rows = [(h, min(h + tiling.rows, shape[1])) for h in range(0, shape[1], tiling.rows)]
    columns = [(w, min(w + tiling.columns, shape[2])) for w in range(0, shape[2], tiling.columns)]
    image = [(h, w) for h in rows for w in columns]
    if tiling.channels_first:
        return [((0, shape[0]), h, w, c) for h, w in image for c in channels]
    return [((0, shape[0]), h, w, c) for c in channels for h, w in image]


def _tiles(graph: Graph, tiling: Tiling, config: VtaConfig) -> Iterator[_Tile]:
    lanes = Lanes(config.block, config.batch)
    known: dict[Hashable, tuple[Event, ...]] = {}
    rows = depth(graph, config)
    for box in boxes(graph, tiling, config.block):
        cut = crop(graph, box)
        loops = algorithm(cut.graph, lanes, graph.constants, rows)
        key = (loops.text, tuple(loops.sizes.items()))
        if key not in known:
            known[key] = trace(scheduled(loops.text, config.batch, config.block, stride(graph)), loops.sizes)
        yield _Tile(known[key], _origins(graph, cut.reads[graph.inputs[0]], box, config.block))


def stride(graph: Graph) -> tuple[int, int]:
    """The strides of a region's window, rows and columns; 1 where there is none."""
    for node in graph.nodes:
        if isinstance(node.operator, Conv2d | DepthwiseConv2d | MaxPool2d):
            return node.operator.stride
    return 1, 1


def _origins(graph: Graph, read: Box, box: Box, block: int) -> dict[str, tuple[int, ...]]:
    x = (read[-1][0] // block, *(start for start, _ in read[1:-1]))
    y = (box[-1][0] // block, *(start for start, _ in box[1:-1]))
    return {"x": x, "y": y, **dict.fromkeys(("w", "digits", "scale", "shift"), y[:1])}


def _key(issue: Issue, origins: Mapping[str, tuple[int, ...]]) -> Hashable | None:
    """What a load brings, None when it is no load from an argument."""
    source = issue.operands.get("source")
    if not isinstance(source, Window):
        return None
    whole = tuple(value for value in issue.operands.values() if isinstance(value, int))
    return source.array, shifted(source.box, origins.get(source.array, ())), whole


def _pools(tiles: Sequence[_Tile], tiling: Tiling, config: VtaConfig) -> dict[str, Mapping[str, Pool]]:
    """Slots of every memory for what the tiles put into it.

    What is read again stays: everything if it fits, else what one tile reads, since the next tile may read the same.
    """
    entries: dict[tuple[str, str], int] = {}
    everything: dict[tuple[str, str], set[Hashable]] = {}
    of_a_tile: dict[tuple[str, str], int] = {}
    for tile in tiles:
        names: dict[int, tuple[str, str]] = {}
        here: dict[tuple[str, str], set[Hashable]] = {}
        for event in tile.events:
            if isinstance(event, Allocation):
                names[event.buffer] = name = (event.memory, event.name)
                entries[name] = max(entries.get(name, 0), prod(event.shape[:-2]))
            elif isinstance(event, Issue) and _key(event, tile.origins) is not None:
                filled = _filled(event)
                if filled is not None:
                    here.setdefault(names[filled], set()).add(_key(event, tile.origins))
        for name, keys in here.items():
            everything.setdefault(name, set()).update(keys)
            of_a_tile[name] = max(of_a_tile.get(name, 0), len(keys))
    made = {}
    for memory, room in capacities(config).items():
        demands = [
            Demand(name, size, slots_of_use(len(everything.get(key, ())), of_a_tile.get(key, 0), size, room))
            for key, size in sorted(entries.items())
            for name in [key[1]]
            if key[0] == memory
        ]
        made[memory] = pools(memory, room, demands, tiling.slots)
    return made


def capacities(config: VtaConfig) -> dict[str, int]:
    """Entries of the memories a schedule fills."""
    return {"INP": config.inp_entries, "WGT": config.wgt_entries, "ACC": config.acc_entries}


def slots_of_use(everything: int, of_a_tile: int, entries: int, room: int) -> int:
    """Slots that help: for all contents when they fit, twice those of a tile when these do, else a few to run ahead.

    Args:
        everything: distinct contents over the whole region; 0 for what is not loaded.
        of_a_tile: distinct contents of one tile.
        entries: of one slot.
        room: entries of the memory.
    """
    share = room * 3 // 4
    if everything == 0:
        return 2
    if everything * entries <= share:
        return everything
    return 2 * of_a_tile if of_a_tile * entries <= share and of_a_tile > 1 else STREAMING
