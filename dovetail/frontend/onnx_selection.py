"""ONNX operators that take elements from other places: borders, gathering, repetition, blocks, splitting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.frontend.onnx_context import AGAIN, SMALLER, OnnxContext
from dovetail.frontend.onnx_file import OnnxNode
from dovetail.graph.types import Shape
from dovetail.operators.movement import Reshape, Slice, Transpose
from dovetail.operators.selection import Gather, Pick

MAX_PLACES = 1 << 16
"""Most places of one axis that elements are picked from."""


def pick(ctx: OnnxContext, op: OnnxNode, x: str, places: Sequence[Sequence[int]]) -> None:
    """Emit a Pick of x as the operator's result."""
    longest = max((len(chosen) for chosen in places), default=0)
    if longest > MAX_PLACES:
        raise ctx.refuse(op, f"picks {longest} places along one axis; the limit is {MAX_PLACES}", SMALLER)
    ctx.emit(op, Pick(tuple(tuple(int(place) for place in chosen) for chosen in places)), [x])


def bordered(size: int, before: int, after: int, mode: str) -> list[int]:
    """Where the elements of an axis with a border come from; a negative border cuts off.

    Raises:
        ValueError: a mirrored border is as wide as the axis.
    """
    places = range(-before, size + after)
    if mode == "edge":
        return [min(max(place, 0), size - 1) for place in places]
    if mode == "wrap":
        return [place % size for place in places]
    if size == 1 and len(places) > 1:
        raise ValueError("an axis of one element cannot be mirrored")
    period = 2 * (size - 1)
    return [min(place % period, period - place % period) if period else 0 for place in places]


def expand(ctx: OnnxContext, op: OnnxNode) -> None:
    """Expand: broadcasting to a constant shape."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    wanted = ctx.integers(op, 1, "shape")
    try:
        result = tuple(int(size) for size in np.broadcast_shapes(shape, wanted))
    except ValueError:
        raise ctx.refuse(op, f"{ctx.type_of(x)} cannot be expanded to {list(wanted)}", AGAIN) from None
    whole = (1,) * (len(result) - len(shape)) + shape
    if len(whole) != len(shape):
        x = ctx.add(op, Reshape(whole), [x], f"{op.outputs[0]}_whole")
    pick(ctx, op, x, [range(size) if size == have else [0] * size for size, have in zip(result, whole, strict=True)])


def tile(ctx: OnnxContext, op: OnnxNode) -> None:
    """Tile by constant repeats."""
    x = ctx.value(op, 0)
    shape, repeats = ctx.type_of(x).shape, ctx.integers(op, 1, "repeats")
    if len(repeats) != len(shape) or min(repeats, default=1) < 1:
        raise ctx.refuse(op, f"the repeats {list(repeats)} must be a positive number for each axis of {ctx.type_of(x)}",
                         AGAIN)
    pick(ctx, op, x, [list(range(size)) * count for size, count in zip(shape, repeats, strict=True)])


def gather(ctx: OnnxContext, op: OnnxNode) -> None:
    """Gather by constant or computed indices."""
    x = ctx.value(op, 0)
    kind = ctx.type_of(x)
    axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", 0)), len(kind.shape))
    name = ctx.name_of(op, 1)
    if name not in ctx.constants:
        ctx.emit(op, Gather(axis), [x, ctx.value(op, 1)])
        return
    indices = ctx.constants[name].array
    flat = [int(index) for index in indices.reshape(-1)]
    size = kind.shape[axis]
    if any(not -size <= index < size for index in flat):
        raise ctx.refuse(op, f"an index is outside the {size} elements of axis {axis}", AGAIN)
    places: list[Sequence[int]] = [range(length) for length in kind.shape]
    places[axis] = [index % size for index in flat]
    taken = ctx.add(op, Pick(tuple(tuple(chosen) for chosen in places)), [x], f"{op.outputs[0]}_taken")
    ctx.emit(op, Reshape((*kind.shape[:axis], *indices.shape, *kind.shape[axis + 1 :])), [taken])


def split(ctx: OnnxContext, op: OnnxNode) -> None:
    """Split into parts of given or of equal sizes; the last equal part may be smaller."""
    x = ctx.value(op, 0)
    shape = ctx.type_of(x).shape
    axis = ctx.positive_axis(op, int(ctx.attribute(op, "axis", 0)), len(shape))
    listed = ctx.attribute(op, "split", None)
    if listed is None and ctx.has(op, 1):
        listed = ctx.integers(op, 1, "sizes of the parts")
    count = int(ctx.attribute(op, "num_outputs", len(op.outputs)))
    if listed is None:
        each = -(-shape[axis] // count)
        listed = [min(each, shape[axis] - part * each) for part in range(count)]
    if len(listed) != len(op.outputs) or sum(listed) != shape[axis] or min(listed) < 1:
        raise ctx.refuse(op, f"the parts {list(listed)} do not make up the {shape[axis]} elements of axis {axis}",
                         AGAIN)
    start = 0
    for size, result in zip(listed, op.outputs, strict=True):
        begin, end = [0] * len(shape), list(shape)
        begin[axis], end[axis] = start, start + size
        part = Slice(tuple(begin), tuple(end), (1,) * len(shape))
        if result:
            ctx.values[result] = ctx.add(op, part, [x], result)
        start += size


def _blocks(ctx: OnnxContext, op: OnnxNode) -> tuple[str, Shape, int]:
    """Operand, its NCHW shape and the block size of DepthToSpace and SpaceToDepth."""
    x = ctx.value(op, 0)
    shape, size = ctx.type_of(x).shape, int(ctx.attribute(op, "blocksize", 0))
    if len(shape) != 4 or size < 1:
        raise ctx.refuse(op, f"works on 4 axes and a positive block size, got {ctx.type_of(x)} and {size}")
    return x, shape, size


def depth_to_space(ctx: OnnxContext, op: OnnxNode) -> None:
    """DepthToSpace in both modes."""
    x, (batch, channels, height, width), size = _blocks(ctx, op)
    mode = ctx.attribute(op, "mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise ctx.refuse(op, f"the attribute mode = {mode} is not supported, only DCR and CRD")
    depth = channels // size**2
    parts = (size, size, depth) if mode == "DCR" else (depth, size, size)
    order = (0, 3, 4, 1, 5, 2) if mode == "DCR" else (0, 1, 4, 2, 5, 3)
    stem = op.outputs[0]
    apart = ctx.add(op, Reshape((batch, *parts, height, width)), [x], f"{stem}_parts")
    moved = ctx.add(op, Transpose(order), [apart], f"{stem}_moved")
    ctx.emit(op, Reshape((batch, depth, height * size, width * size)), [moved])


def space_to_depth(ctx: OnnxContext, op: OnnxNode) -> None:
    """SpaceToDepth: the place in the block becomes the outer part of the channel, unless mode is CRD."""
    x, (batch, channels, height, width), size = _blocks(ctx, op)
    mode = ctx.attribute(op, "mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise ctx.refuse(op, f"the attribute mode = {mode} is not supported, only DCR and CRD")
    rows, columns, stem = height // size, width // size, op.outputs[0]
    apart = ctx.add(op, Reshape((batch, channels, rows, size, columns, size)), [x], f"{stem}_parts")
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    moved = ctx.add(op, Transpose(order), [apart], f"{stem}_moved")
    ctx.emit(op, Reshape((batch, channels * size**2, rows, columns)), [moved])


def reversed_slice(ctx: OnnxContext, op: OnnxNode, x: str, ranges: dict[int, tuple[int, int, int]]) -> None:
    """Slice where some axis runs backwards: numpy's meaning of (start, stop, step) per axis."""
    shape = ctx.type_of(x).shape
    places = [range(size) for size in shape]
    for axis, (start, stop, step) in ranges.items():
        limit = -(1 << 62) if step < 0 and stop < -shape[axis] else stop
        chosen = slice(start, None if step < 0 and limit == -(1 << 62) else limit, step)
        places[axis] = places[axis][chosen]
    if not all(places):
        raise ctx.refuse(op, f"the slice of {ctx.type_of(x)} is empty", AGAIN)
    pick(ctx, op, x, places)

