"""Sums that the core has multiplied, rounded and limited by the array: in by moves that add up, and out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np

import dovetail.target as dt
from dovetail.ir.graph import Graph, GraphBuilder
from dovetail.ir.operators.arithmetic import Add, Clip, Requantize, Rounding, multiplier_arrays
from dovetail.ir.types import Array, DType, TensorType
from dovetail.target import layers
from dovetail.targets.gemmini.lower import QUARTERS, image_of, pixels_of, scale_of
from dovetail.targets.gemmini.nests import (
    ADDED,
    FENCE,
    MVIN,
    MVIN3,
    MVOUT,
    SUMS,
    Config,
    MoveLoop,
    Words,
    array_setting,
    cut,
    local,
    moves,
    way_in,
    way_out,
)


def pack(config: Config, match: dt.Match) -> dict[str, Array]:
    """The offsets, whole blocks of channels."""
    offset = match.array("offset").astype("<i4")
    return {"offsets": np.pad(offset, (0, -len(offset) % config.dim)).view(np.uint8)}


Tile = tuple[int, int, int, int, int]
"""First channel, blocks of channels and channels of a block; first pixel, and pixels."""


def tiles(config: Config, pixels: int, channels: int) -> Iterator[Tile]:
    """Parts of a matrix that fill a quarter of the accumulator at most."""
    rows = config.sums // QUARTERS
    together = max(rows // pixels, 1)
    for start, count, width in cut(channels, config.dim):
        for first in range(0, count, together):
            blocks = min(together, count - first)
            for pixel in range(0, pixels, rows):
                yield start + first * width, blocks, width, pixel, min(rows, pixels - pixel)


def moved(config: Config, tile: Tile, funct: int, place: int, address: int, steps: tuple[int, int]) -> Iterator[Words]:
    """The moves of a tile; `steps`: bytes from a pixel and from a block of channels to the next."""
    _, blocks, width, _, pixels = tile
    for start, turns, count in cut(pixels, config.dim):
        loops = (MoveLoop(turns, config.dim * steps[0], config.dim), MoveLoop(blocks, steps[1], pixels))
        yield moves(funct, address + start * steps[0], local(place + start, count, width), loops)


def words(
    config: Config, x: layers.Image, y: layers.Image, offsets: int, twice: bool, scale: float, relu: bool
) -> Iterator[Words]:
    """The launch: lines that follow one another without gaps are one."""
    dim = config.dim
    dense = x.row == x.columns * x.pixel and y.row == y.columns * y.pixel
    lines, pixels = (1, x.rows * x.columns) if dense else (x.rows, x.columns)
    yield array_setting(1, 1)
    yield way_in(MVIN3, 0)
    yield FENCE
    yield way_in(MVIN, x.pixel)
    yield way_out(y.pixel, scale, relu)
    turn, after = 0, list[Words]()
    for line in range(lines):
        for tile in tiles(config, pixels, x.channels):
            channel, _, _, pixel, _ = tile
            place = turn % QUARTERS * (config.sums // QUARTERS)
            source = x.address + line * x.row + pixel * x.pixel + 4 * channel
            yield from moved(config, tile, MVIN3, SUMS | place, offsets + 4 * channel, (0, 4 * dim))
            for _ in range(1 + twice):
                yield from moved(config, tile, MVIN, ADDED | place, source, (x.pixel, 4 * dim))
            yield from after
            result = y.address + line * y.row + pixel * y.pixel + channel
            after = [*moved(config, tile, MVOUT, ADDED | place, result, (y.pixel, dim))]
            turn += 1
    yield from after


def commands(config: Config, match: dt.Match, operands: Mapping[str, dt.Operand]) -> tuple[dt.Command, ...]:
    """One list."""
    x, y = image_of(match.type("x"), operands[match.values["x"]]), image_of(match.result, operands["result"])
    relu = match.operator("clip", Clip).low == 0
    launch = words(config, x, y, operands["offsets"].address, match.has("twice"), scale_of(match), relu)
    return (dt.Command("gemmini", tuple(chain.from_iterable(launch))),)


def cycles(config: Config, match: dt.Match) -> int:
    """Cycles of the moves in, of offsets and of int32 once or twice, and of the last tile's way out."""
    lines, columns, channels = pixels_of(match.result.shape)
    turns, rows = 1 + match.has("twice"), 0
    for _, count, width in cut(channels, config.dim):
        rows += count * (1 + turns * -(-width // 4))
    pixels = lines * columns
    issued = TILE * sum(1 for _ in tiles(config, pixels, channels))
    return max(pixels * rows, issued) + min(pixels, config.sums // QUARTERS) + ENDED


TILE, ENDED = 150, 250
"""Cycles of the core for the moves of a tile, and of a launch before its first and behind its last."""


def cases(settings: Mapping[str, int]) -> Graph:
    """A layer of two steps' second, for `dovetail check`, which makes no operator of twice the same operand."""
    builder, channels = GraphBuilder("rounding"), settings["channels"]
    x = builder.input("x", TensorType((1, settings["rows"], settings["columns"], channels), DType.INT32))
    numbers = (np.arange(channels, dtype=np.int32) * 37 - 11, *multiplier_arrays([2.0**-24]))
    offset, *scale = (builder.constant(f"number_{place}", one) for place, one in enumerate(numbers))
    moved = builder.add(Add(), [builder.add(Add(), [x, x], "twice"), offset], "moved")
    scaled = builder.add(Requantize(Rounding.FLOAT32), [moved, *scale], "scaled")
    return builder.finish([builder.add(Clip(-128, 127, DType.INT8), [scaled], "y")])
