"""Tiles of an engine's part of a region: where they lie, what a launch computes, and what the target says of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from dovetail.ir.crop import Tile, crop
from dovetail.ir.graph import Graph
from dovetail.ir.layout import check_part
from dovetail.ir.types import Array, Box, Shape, TensorType, box_shape, full_box
from dovetail.records import Record
from dovetail.schedule.region import EnginePart
from dovetail.target.pattern import Choice, Match, Mismatch, Scope, broken_limits, match_again, match_pattern
from dovetail.user_file import asking

PLACEMENT, EARLY, ORDER, BUFFERS = "placement", "early", "order", "buffers"
"""Names of the planner's knobs; the sizes of a tile are `TILE`."""
TILE = ("tile_rows", "tile_columns", "tile_channels")
"""Names of the knobs for the rows, columns and channels of a tile's result."""
PACK_ALIGNMENT = 16
"""Bytes every packed constant of a tile is aligned to."""


class EngineTile(Record):
    """A tile with everything a launch needs."""

    tile: Tile
    match: Match
    packed: Mapping[str, Array]
    scratch: int
    """Bytes of working memory."""


def tile_boxes(extent: Box, size: Shape, channels_outer: bool) -> Iterator[Box]:
    """The tiles of a box of a result, channels outermost or innermost."""
    spans = [
        [(start, min(start + step, end)) for start in range(begin, end, step)]
        for (begin, end), step in zip(extent, size, strict=True)
    ]
    if channels_outer:
        for last, *rest in product(spans[-1], *spans[:-1]):
            yield (*rest, last)
    else:
        yield from product(*spans)


def tile_counts(extent: Box, size: Shape) -> list[int]:
    """How many tiles of a size a box of a result has along each axis."""
    return [-(-(end - begin) // step) for (begin, end), step in zip(extent, size, strict=True)]


def tile_classes(shape: Shape, size: Shape) -> Iterator[tuple[Box, int]]:
    """The kinds of tile there are (first, middle and last along each axis), and how many of each.

    Args:
        shape: the result.
        size: a whole tile.

    Yields:
        The box of one tile of the kind, and the number of such tiles.
    """
    axes = []
    for total, step in zip(shape, size, strict=True):
        count = -(-total // step)
        kinds = [((0, min(step, total)), 1), ((step, 2 * step), count - 2), (((count - 1) * step, total), 1)]
        axes.append([kinds[0], *([kinds[1]] if count > 2 else []), *([kinds[2]] if count > 1 else [])])
    for parts in product(*axes):
        yield tuple(span for span, _ in parts), prod(times for _, times in parts)


_MOST_CUTS = 64


def cuts(total: int, step: int) -> list[int]:
    """Sizes that cut `total` into 1, 2, 3, … nearly equal parts at multiples of `step`."""
    sizes = {total: None}
    parts = 2
    while parts <= _MOST_CUTS:
        size = -(-total // (parts * step)) * step
        if size < total:
            sizes[size] = None
        if size <= step:
            break
        parts += 1 if parts < 8 else parts // 4
    return list(sizes)


def tile_match(part: EnginePart, box: Box, tile: Tile | None = None) -> tuple[Tile, Match]:
    """A tile and the match of its offload in it, with the part's choice; `tile` where it has been cut before.

    Raises:
        ValueError: the region cannot be cut like that, or the offload does not take the tile; says why.
    """
    tile, offload = tile or laid_part(part, box), part.offload
    match = match_again(part.match, tile.graph) or match_pattern(offload.pattern, tile.graph, tile.graph.outputs[0])
    if isinstance(match, Mismatch):
        raise ValueError(match.sentence)
    match = replace(match, choice=offload_choice(part, match))
    with asking(f"the limits of {offload.name} for {part.name}"):
        if failure := broken_limits(offload.constraints, match, Scope.LAYERS):
            raise ValueError(failure)
    return tile, match


def laid_part(part: EnginePart, box: Box) -> Tile:
    """The computation of a box of the result, of whole blocks of every value; raises ValueError where it cannot be."""
    tile = _cropped(part, box)
    for value, read in (*tile.reads.items(), (part.output, box)):
        check_part(part.layouts.get(value), read, part.graph.types[value].shape)
    return tile


def _cropped(part: EnginePart, box: Box) -> Tile:
    """The computation of a box of the result.

    An offload that takes no strides is given whole operands: the last rows too that a strided window does not reach.
    So is one that cannot be cut, as several results of one launch.
    """
    graph, is_whole = part.graph, box == full_box(part.shape)
    if part.offload.strided or not is_whole:
        try:
            return _whole_blocks(part, crop(graph, box))
        except ValueError:
            if not is_whole:
                raise
    return Tile(graph, box, {name: full_box(graph.types[name].shape) for name in graph.inputs})


def _whole_blocks(part: EnginePart, tile: Tile) -> Tile:
    """The tile with operands up to the end of a block, where it computes the same from them: a strided window need not
    reach it."""
    types, reads = dict(tile.graph.types), dict(tile.reads)
    for name, layout in ((name, part.layouts[name]) for name in tile.reads if name in part.layouts):
        ends = zip(tile.reads[name], part.graph.types[name].shape, strict=True)
        reads[name] = tuple(
            (start, min(stop + -stop % layout.block(axis), size)) for axis, ((start, stop), size) in enumerate(ends)
        )
        types[name] = TensorType(box_shape(reads[name]), types[name].dtype)
    if reads == tile.reads:
        return tile
    for node in tile.graph.nodes:
        types[node.output] = node.operator.infer([types[name] for name in node.inputs])
    same = types[part.output] == tile.graph.types[part.output]
    return Tile(replace(tile.graph, types=types), tile.box, reads) if same else tile


def offload_choice(part: EnginePart, match: Match) -> Choice:
    """Settings of the offload's own knobs: its default's, and over them those chosen for the region."""
    if part.offload.knobs is None:
        return {}
    default = part.offload.default(match) if part.offload.default else {}
    planner = (PLACEMENT, EARLY, ORDER, BUFFERS, *TILE)
    return {**default, **{name: value for name, value in part.choice.items() if name not in planner}}


def packed_tile(part: EnginePart, tile: Tile, match: Match, packs: bool = True) -> EngineTile:
    """A matched tile with its constants and scratch; without constants unless it `packs`."""
    with asking(f"the packed constants and scratch of {part.offload.name} for {part.name}"):
        packed = part.offload.pack(match) if packs else {}
        return EngineTile(tile, match, packed, part.offload.scratch(match))


def packed_tiles(part: EnginePart, boxes: Iterable[Box]) -> Iterator[EngineTile]:
    """The tile of each box in turn.

    Tiles that compute the same, with the same constants, have one graph and match, and the target is asked once for
    them. Raises ValueError as `tile_match`.
    """
    kinds: list[EngineTile] = []
    for box in boxes:
        tile = laid_part(part, box)
        same = next((kind for kind in kinds if _computes_same(kind.tile.graph, tile.graph)), None)
        if same is None:
            kinds.append(packed_tile(part, *tile_match(part, box, tile)))
            yield kinds[-1]
        else:
            yield replace(same, tile=replace(same.tile, box=box, reads=tile.reads))


def _computes_same(one: Graph, other: Graph) -> bool:
    """Whether two parts of a region compute the same, with the same part of its constants."""
    pairs = zip(one.constants.values(), other.constants.values(), strict=True)
    same = one.types == other.types and one.nodes == other.nodes
    return same and all(a.__array_interface__["data"] == b.__array_interface__["data"] for a, b in pairs)


def packed_bytes(packed: Mapping[str, Array]) -> int:
    """Bytes of packed constants side by side, each aligned to `PACK_ALIGNMENT`."""
    return sum(-(-array.nbytes // PACK_ALIGNMENT) * PACK_ALIGNMENT for array in packed.values())
