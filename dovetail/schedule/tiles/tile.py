"""One tile of a region: where it lies, what a launch of it computes, and what the engine says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from dovetail.ir.crop import Tile, crop
from dovetail.ir.graph import Graph
from dovetail.ir.layout import check_part
from dovetail.ir.types import Array, Box, Shape, TensorType, box_shape, full_box
from dovetail.schedule.partition import Region
from dovetail.target.pattern import Choice, Match, Scope, match_again, match_pattern
from dovetail.user_file import asking

PLACEMENT, EARLY, ORDER, BUFFERS = "placement", "early", "order", "buffers"
"""Names of the planner's knobs; the sizes of a tile are `TILE`."""
TILE = ("tile_rows", "tile_columns", "tile_channels")
"""Names of the knobs for the rows, columns and channels of a tile's result."""
PACK_ALIGNMENT = 16
"""Bytes every packed constant of a tile is aligned to."""


@dataclass(frozen=True)
class EngineTile:
    """A tile with everything a launch of it needs."""

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
        size = -(-total // parts)
        size = -(-size // step) * step
        if size < total:
            sizes[size] = None
        if size <= step:
            break
        parts += 1 if parts < 8 else parts // 4
    return list(sizes)


def tile_match(region: Region, box: Box, tile: Tile | None = None) -> tuple[Tile, Match]:
    """A tile and the match of its offload in it, with the region's choice; `tile` where it has been cut before.

    Raises:
        ValueError: the region cannot be cut like that, or the offload does not take the tile; says why.
    """
    assert region.offload is not None
    tile, offload = tile or laid_part(region, box), region.offload
    again = match_again(region.match, tile.graph) if region.match is not None else None
    match = again or match_pattern(offload.pattern, tile.graph, tile.graph.outputs[0])
    if not isinstance(match, Match):
        raise ValueError(match.sentence)
    match = replace(match, choice=offload_choice(region, match))
    for constraint in offload.constraints:
        with asking(f"the limit '{constraint.sentence}' of {offload.name} for {region.name}"):
            failure = constraint.failure(match) if constraint.scope is not Scope.LAYERS else None
        if failure:
            raise ValueError(failure)
    return tile, match


def laid_part(region: Region, box: Box) -> Tile:
    """The computation of a box of the result, of whole blocks of every value; raises ValueError where it cannot be."""
    tile = _part(region, box)
    for value, part in (*tile.reads.items(), (region.output, box)):
        check_part(region.layouts.get(value), part, region.graph.types[value].shape)
    return tile


def _part(region: Region, box: Box) -> Tile:
    """The computation of a box of the result. What takes no strides is given whole operands: of the last rows too that
    a strided window does not reach. So is what cannot be cut, as several results of one launch."""
    is_whole = box == full_box(region.graph.types[region.output].shape)
    if region.takes_strides or not is_whole:
        try:
            return _whole_blocks(region, crop(region.graph, box))
        except ValueError:
            if not is_whole:
                raise
    return Tile(region.graph, box, {name: full_box(region.graph.types[name].shape) for name in region.graph.inputs})


def _whole_blocks(region: Region, tile: Tile) -> Tile:
    """The tile with operands up to the end of a block, where it computes the same from them: a strided window need not
    reach it."""
    types, reads = dict(tile.graph.types), dict(tile.reads)
    for name, layout in ((name, region.layouts[name]) for name in tile.reads if name in region.layouts):
        ends = zip(tile.reads[name], region.graph.types[name].shape, strict=True)
        reads[name] = tuple(
            (start, min(stop + -stop % layout.block(axis), size)) for axis, ((start, stop), size) in enumerate(ends)
        )
        types[name] = TensorType(box_shape(reads[name]), types[name].dtype)
    if reads == tile.reads:
        return tile
    for node in tile.graph.nodes:
        types[node.output] = node.operator.infer([types[name] for name in node.inputs])
    same = types[region.output] == tile.graph.types[region.output]
    return Tile(replace(tile.graph, types=types), tile.box, reads) if same else tile


def offload_choice(region: Region, match: Match) -> Choice:
    """Settings of the offload's own knobs: its default's, and over them those chosen for the region."""
    assert region.offload is not None
    if region.offload.knobs is None:
        return {}
    default = region.offload.default(match) if region.offload.default else {}
    planner = (PLACEMENT, EARLY, ORDER, BUFFERS, *TILE)
    return {**default, **{name: value for name, value in region.choice.items() if name not in planner}}


def packed_tile(region: Region, tile: Tile, match: Match, packs: bool = True) -> EngineTile:
    """What a launch of a matched tile needs; without constants unless it `packs`."""
    assert region.offload is not None
    with asking(f"the packed constants and scratch of {region.offload.name} for {region.name}"):
        packed = region.offload.pack(match) if packs else {}
        return EngineTile(tile, match, packed, region.offload.scratch(match))


def packed_tiles(region: Region, boxes: Iterable[Box]) -> Iterator[EngineTile]:
    """What launches of tiles need, for each box in turn: those that compute the same, with the same constants, have one
    graph and match, and the target is asked once for them. Raises ValueError as `tile_match`."""
    kinds: list[EngineTile] = []
    for box in boxes:
        tile = laid_part(region, box)
        same = next((kind for kind in kinds if _computes_same(kind.tile.graph, tile.graph)), None)
        if same is None:
            kinds.append(packed_tile(region, *tile_match(region, box, tile)))
            yield kinds[-1]
        else:
            yield replace(same, tile=replace(same.tile, box=box, reads=tile.reads))


def _computes_same(one: Graph, other: Graph) -> bool:
    """Whether two parts of a region compute the same, with the same part of its constants."""
    pairs = zip(one.constants.values(), other.constants.values(), strict=True)
    same = one.types == other.types and one.nodes == other.nodes
    return same and all(a.__array_interface__["data"] == b.__array_interface__["data"] for a, b in pairs)


def packed_bytes(packed: Mapping[str, Array]) -> int:
    """Bytes of the packed constants side by side, each aligned to `PACK_ALIGNMENT`."""
    return sum(-(-array.nbytes // PACK_ALIGNMENT) * PACK_ALIGNMENT for array in packed.values())


def first_part(region: Region, size: Shape) -> Tile | None:
    """The first tile of a size; None when the region cannot be cut like that."""
    try:
        return laid_part(region, next(tile_boxes(region.extent, size, True)))
    except ValueError:
        return None
