"""What a layer alone takes on a chip that cuts it once and for all: three plain ways, beside Dovetail's own.

They are those of the public simulator of SpiNNaker2, whose clocks per layer are published. Its chip is described by
`Mesh`; what follows is how it goes about a layer, found by reading it and put in formulas. An element holds one piece:
nothing is loaded while it computes. Bytes go in whole words of the port.

Cut: groups of channels as small as the array computes, the image in equal tiles. Of those that fit, the tiles whose
padding and shared borders are the fewest bytes; then as many channels to a piece as fit and leave enough pieces.

Alone (without or with fusion): every piece loads its tile and its weights from the DRAM of its part of the chip, and
writes its result there: 32-bit sums in padded rows, or with fusion requantised and pooled. Requests go in order.

Shared: a router at each DRAM keeps operands and results. Weights, then tiles, are loaded once and passed from element
to element; pieces of a router use each other's weights, which then move on; results go back while others compute.

Dense: groups of channels, one at each router that computes, in slices of what is summed; weights always come from DRAM.
The vector is in every slice four times, as the array reads it; shared or fused, it and the sums stay in the elements.

What elements wait for: the port of an element's memory, which serves its array and the neighbour that reads weights
from it in turn, and routers, whose bytes per clock the elements at them share.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from dovetail.errors import PlanError
from dovetail.guests.mesh.layers import MeshLayer
from dovetail.target.mesh import CoreClocks, Grid, Mesh, Work
from dovetail.targets.spinnaker2 import MESH

SIMULATOR_CHIP = replace(
    MESH, grid=Grid(6, 6, 4, gate=(2, 2), dram=(3, 2), drams=4), chips=1, core=CoreClocks(), usable=96 * 1024
)
"""The chip of the public simulator: 6x6 routers, 144 elements, 4 DRAMs; what the core does behind the array is not
charged, and all of its 96 KiB are for operands and results."""

_DEPTH = 256
"""Inputs of a dense layer that are summed in one go at most (hardware/spinnaker2.md, section 3)."""


class MappingStrategy(enum.StrEnum):
    """How a layer goes over the chip."""

    ALONE = "no fusion"
    FUSED = "fusion"
    SHARED = "fusion and reuse"


@dataclass(frozen=True, slots=True)
class MeshTiling:
    """A layer's pieces: a tile of the image and a group of channels each."""

    rows: int
    """Of a tile of the result, and its columns."""
    columns: int
    tiles: int
    channels: int
    """Of a group."""
    groups: int


@dataclass(frozen=True, slots=True)
class _PieceDemand:
    """Bytes and clocks of a piece."""

    operand: int
    weights: int
    sums: int
    clocks: float


def stream_clocks(layer: MeshLayer, mesh: Mesh, way: MappingStrategy, pool: int = 1, *, stored: bool = True) -> float:
    """Clocks from the first request to the last result.

    Args:
        layer: a convolution or a dense layer.
        mesh: of whose chips one computes it.
        way: how.
        pool: rows and columns of the result that are pooled to one behind it.
        stored: where operands are shared, the layer before has left them in the routers that keep them; else in DRAM.

    Raises:
        PlanError: it is neither, no piece of it fits an element, or the chip has too few routers.
        TypeError: the elements have no array.
    """
    if layer.kind == "dense":
        return _dense(layer, mesh, way)
    tiling = tiling_of(layer, mesh, pool)
    if way is MappingStrategy.SHARED:
        return _shared(layer, mesh, tiling, pool, stored)
    size = _sizes(layer, mesh, tiling)
    results = tiling.rows * tiling.columns * tiling.channels // pool**2
    loaded = (size.operand if way is MappingStrategy.ALONE else _operand_bytes(layer, tiling)) + size.weights
    pieces = tiling.tiles * tiling.groups
    return _alone(
        mesh, pieces, mesh.per_chip, loaded, size.sums if way is MappingStrategy.ALONE else results, size.clocks
    )


def tiling_of(layer: MeshLayer, mesh: Mesh, pool: int = 1) -> MeshTiling:
    """The cut of a convolution; arguments and errors as of `stream_clocks`."""
    if layer.kind != "convolution":
        raise PlanError("only convolutions are cut into tiles", where=layer.name, hint="use stream_layer")
    height, width, channels = layer.image
    step, least = mesh.mac.rows, _sharing(mesh)
    if least < mesh.grid.drams:
        routers = mesh.per_chip // mesh.grid.elements
        what = f"{mesh.grid.drams} of {routers} routers keep data: too few are left to compute"
        raise PlanError(what, where="Grid", hint="give the chip more routers, or fewer DRAM controllers (Grid.drams)")
    groups = -(-channels // step)
    whole = [
        MeshTiling(height, width, 1, -(-channels // n), n) for n in range(1, groups + 1) if channels % (step * n) == 0
    ]
    fits = next((one for one in whole if _memory(layer, mesh, one, copies=1) <= mesh.usable), None)
    if fits is not None and fits.groups >= least:
        return fits
    if fits is not None:
        groups = next(one.groups for one in reversed(whole) if one.groups <= least)
    for steps in ((4,), (2, 1)):
        best = [found for each in steps if (found := _best(layer, mesh, groups, pool, each))]
        if best:
            return min(best, key=lambda one: (_guess(layer, mesh, one), _grown(layer, mesh, one)))
    hint = "use elements with more memory (Mesh.usable)"
    raise PlanError("no tile of it fits an element", where=layer.name, hint=hint)


def _sharing(mesh: Mesh) -> int:
    """Elements that compute where operands are shared: all but those of one router at each DRAM."""
    return mesh.per_chip - mesh.grid.drams * mesh.grid.elements


def _best(layer: MeshLayer, mesh: Mesh, groups: int, pool: int, each: int) -> MeshTiling | None:
    """The tiles of the fewest bytes, a multiple of `each` along the rows; of equals the fewest and widest."""
    channels = -(-layer.image[2] // groups)
    fits = [
        one
        for one in _tilings(layer, mesh, groups, channels, pool, each)
        if _memory(layer, mesh, one, copies=2) <= mesh.usable
    ]
    if not fits:
        return None
    found = min(fits, key=lambda one: (_grown(layer, mesh, one), one.tiles, -one.columns))
    for times in range(groups, 1, -1):
        more = MeshTiling(found.rows, found.columns, found.tiles, channels * times, groups // times)
        many = more.groups >= _sharing(mesh) // mesh.grid.drams and more.groups * more.tiles >= _sharing(mesh)
        if groups % times == 0 and many and _memory(layer, mesh, more, copies=2) <= mesh.usable:
            return more
    return found


def _tilings(layer: MeshLayer, mesh: Mesh, groups: int, channels: int, pool: int, each: int) -> Iterator[MeshTiling]:
    """Equal tiles of whole pools that waste no columns of the array and are enough for all elements."""
    height, width, _ = layer.image
    columns = mesh.mac.columns
    for down in range(each, height // pool + 1, each):
        for across in range(1, width // pool + 1):
            even = height // pool % down == 0 and width // pool % across == 0
            wasted = _up(width // across, columns) * across != _up(width, columns)
            tiles = down * across
            binary = each < 4 or (_binary(tiles) == tiles and tiles <= _sharing(mesh))
            if even and not wasted and binary and groups * tiles >= _sharing(mesh):
                yield MeshTiling(height // down, width // across, tiles, channels, groups)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _binary(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()


def _spans(layer: MeshLayer, tiling: MeshTiling) -> tuple[int, int]:
    """Rows and columns a tile reads."""
    sizes = zip((tiling.rows, tiling.columns), layer.kernel, layer.stride, strict=True)
    rows, columns = ((size - 1) * step + max(kernel, step if kernel == 1 else 0) for size, kernel, step in sizes)
    return rows, columns


def _operand_bytes(layer: MeshLayer, tiling: MeshTiling) -> int:
    """Of a tile without padding of its rows."""
    rows, columns = _spans(layer, tiling)
    return rows * columns * layer.summed


def _work(layer: MeshLayer, tiling: MeshTiling) -> Work:
    """A piece as the array computes it, steps of one; with the sums that are thrown away."""
    rows, columns = _spans(layer, tiling)
    kernel, (high, wide) = layer.kernel, layer.kernel
    height, width, outputs = map(np.array, (rows - high + 1, columns - wide + 1, tiling.channels))
    return Work("convolution", height, width, outputs, np.array(layer.summed), kernel, (1, 1), rows, columns)


def _sizes(layer: MeshLayer, mesh: Mesh, tiling: MeshTiling) -> _PieceDemand:
    """Of a piece. What its array reads through the port waits for the `rows` bytes a clock of a neighbour's weights."""
    work, mac = _work(layer, tiling), mesh.mac
    computing, written = int(mac.compute(work)), int(mac.clocks(work) - mac.compute(work))
    row = int(mac.row_sums(replace(work, width=np.array(tiling.columns))))
    clocks = computing * (1 + mac.rows / mesh.rates.port) + written
    return _PieceDemand(int(mac.operand(work)), int(mac.weights(work)), row * tiling.rows, clocks)


def _memory(layer: MeshLayer, mesh: Mesh, tiling: MeshTiling, copies: int) -> int:
    """Bytes of a piece, weights as often as they are held."""
    work, mac = _work(layer, tiling), mesh.mac
    return int(mac.operand(work) + copies * mac.weights(work) + mac.row_sums(work) * work.height)


def _grown(layer: MeshLayer, mesh: Mesh, tiling: MeshTiling) -> int:
    """Bytes of all tiles of the operand and the sums."""
    size = _sizes(layer, mesh, tiling)
    return tiling.tiles * (size.operand + size.sums * tiling.groups)


def _guess(layer: MeshLayer, mesh: Mesh, tiling: MeshTiling) -> float:
    """Clocks by which tilings are compared: rounds of all elements, and their tiles through DRAM."""
    size = _sizes(layer, mesh, tiling)
    pieces = tiling.groups * _binary(tiling.tiles)
    return size.clocks * ceil(pieces / _sharing(mesh)) + _grown(layer, mesh, tiling) / mesh.rates.dram


def _dense(layer: MeshLayer, mesh: Mesh, way: MappingStrategy) -> float:
    """Of a dense layer: what is shared is not loaded from DRAM, and only one element at each router computes."""
    groups, columns = max(1, _sharing(mesh) // mesh.grid.elements), mesh.mac.dense_outputs
    slices = -(-layer.summed // _DEPTH)
    width, depth = _up(-(-layer.image[2] // groups), columns), _up(-(-layer.summed // slices), mesh.mac.rows)
    one = np.array(1)
    work, mac = Work("dense", one, one, np.array(width), np.array(depth)), mesh.mac
    operand, weights, written = int(mac.operand(work)), int(mac.weights(work)), 4 * width
    if operand + weights + int(mac.row_sums(work)) > mesh.usable:
        hint = "use elements with more memory (Mesh.usable)"
        raise PlanError("no slice of it fits an element", where=layer.name, hint=hint)
    clocks = int(mac.compute(work)) * (1 + mac.rows / mesh.rates.port) + int(mac.clocks(work) - mac.compute(work))
    if way is MappingStrategy.ALONE:
        return _alone(mesh, slices * groups, mesh.per_chip, operand + weights, written, clocks)
    return _alone(mesh, slices * groups, groups, weights, 0, clocks)


def _alone(mesh: Mesh, pieces: int, elements: int, loaded: int, written: int, clocks: float) -> float:
    """The pieces of one DRAM's elements: each loads, computes and writes; DRAM serves in the order of requests."""
    rate, word = mesh.rates.dram / mesh.grid.drams, int(mesh.rates.port)
    reading, writing = _up(loaded, word) / rate, _up(written, word) / rate
    left, free, now = -(-pieces // mesh.grid.drams), 0.0, 0.0
    events = [(0.0, number, False) for number in range(min(left, max(1, elements // mesh.grid.drams)))]
    while events:
        now, number, computed = heapq.heappop(events)
        if computed:
            free = max(free, now) + writing
            heapq.heappush(events, (free if written else now, number, False))
        elif left:
            left -= 1
            free = max(free, now) + reading
            heapq.heappush(events, (free + clocks, number, True))
    return now


def _shared(layer: MeshLayer, mesh: Mesh, tiling: MeshTiling, pool: int, stored: bool) -> float:
    """Loads, then rounds; results go while the next round is computed."""
    size, quarters, word = _sizes(layer, mesh, tiling), mesh.grid.drams, int(mesh.rates.port)
    dram, at_router, elements = mesh.rates.dram / quarters, mesh.grid.elements, _sharing(mesh)
    routers = elements // quarters // at_router
    each = mesh.rates.noc / at_router
    # weights: once from DRAM, then from one part of the chip to the next
    loading = -(-tiling.groups // quarters) * size.weights / dram
    loading += _copies(elements // tiling.groups) * size.weights / each
    # tiles: of a part of the chip, to the routers that need them, then within these
    tile = _up(_operand_bytes(layer, tiling), word)
    mine = -(-tiling.tiles // quarters)
    holding = _binary(mine)
    streams = min(mine, at_router)
    loading += mine * tile / (min(mesh.rates.noc, streams * mesh.rates.port) if stored else dram)
    steps = _copies(routers // -(-holding // at_router)) + -(-at_router // holding) - 1
    loading += steps * tile / min(mesh.rates.port, mesh.rates.noc / streams)
    # rounds: as many with the weights of a router as it has elements and the part has tiles
    rounds = -(-_binary(tiling.tiles) * tiling.groups // elements)
    moves = -(-rounds // min(holding, at_router)) - 1
    moving = 2 * moves * size.weights / each
    results = layer.result_bytes // pool**2
    kept = results <= quarters * at_router * mesh.usable
    writing = results / (quarters * mesh.rates.noc if kept else mesh.rates.dram)
    return loading + size.clocks + max((rounds - 1) * size.clocks + moving, writing)


def _copies(places: int) -> int:
    """Steps until so many routers have what one has: two rows of them, each passing it on, the second begun second."""
    return max(0, min(places - 1, -(-places // 2) + 1))
