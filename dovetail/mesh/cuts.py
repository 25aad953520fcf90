"""How a layer can be cut into pieces, and what the largest piece of each cut takes: clocks, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.mesh.layers import Layer, core_reads
from dovetail.target.mesh import Mesh, Work

Ints = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """Into how many parts each axis is cut."""

    rows: int = 1
    columns: int = 1
    channels: int = 1
    sums: int = 1

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return self.rows * self.columns * self.channels * self.sums


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of pieces along each axis, one entry per piece (or per candidate cut)."""

    rows: Ints
    columns: Ints
    channels: Ints
    sums: Ints
    """Elements of the axis summed over."""
    parts: Ints
    """Parts of the sums: with more than one, 32-bit sums go from piece to piece."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What pieces take, one entry each."""

    clocks: Ints
    """From all operands there to the result complete."""
    floor: Ints
    """Clocks of the multiply-accumulates alone; of the core's layers all."""
    received: Ints
    """Bytes of operands."""
    sent: Ints
    """Bytes of the result."""
    fixed: Ints
    """Bytes of memory for code, stack, constants, the row of sums and two results."""
    slot: Ints
    """Bytes for one input's first operand."""
    others: Ints
    """Bytes for one input's other operands and partial sums, as many slots as each needs counted."""
    constants: Ints
    """Bytes of `fixed` that are weights and parameters."""


@dataclass(frozen=True)
class Frontier:
    """The cuts of a layer none of which is better than another: more pieces, less time."""

    cuts: tuple[Cut, ...]
    pieces: Ints
    """Ascending."""
    clocks: Ints
    """Descending: the longest piece with its communication."""


def work_of(layer: Layer, sizes: Sizes) -> Work:
    """A MAC array's work on pieces."""
    (step_y, step_x), (span_y, span_x) = layer.readings[0].step, layer.readings[0].span
    return Work(
        layer.kind, sizes.rows, sizes.columns, sizes.channels, sizes.sums, layer.kernel, layer.stride,
        (sizes.rows - 1) * step_y + span_y, (sizes.columns - 1) * step_x + span_x,
    )  # fmt: skip


def costs_of(layer: Layer, sizes: Sizes, mesh: Mesh, slots: tuple[int, ...]) -> Costs:
    """What pieces take.

    Args:
        layer: what is cut.
        sizes: of the pieces.
        mesh: its elements.
        slots: per operand of the layer, how many inputs' worth of it a piece holds.
    """
    box = sizes.rows * sizes.columns * sizes.channels
    last = np.where(sizes.parts > 1, 4, layer.itemsize)
    others, received = np.zeros_like(box), np.zeros_like(box)
    for reading, count in zip(layer.readings[1:], slots[1:], strict=True):
        size = (box if reading.channels == "same" else int(np.prod(reading.image))) * reading.itemsize
        others, received = others + count * size, received + size
    partial = np.where(sizes.parts > 1, 4 * box, 0)
    others, received = others + slots[0] * partial, received + partial
    first, reads = _first_operand(layer, sizes)
    received = received + reads
    if layer.on_array:
        work = work_of(layer, sizes)
        clocks = mesh.array.clocks(work) + np.where(sizes.parts > 1, box, 0)
        floor = mesh.array.compute(work)
        constants = mesh.array.weights(work) + 12 * sizes.channels
        slot, rest = (mesh.array.operand(work), mesh.array.row_sums(work))
        if layer.kind == "dense":
            slot, rest = reads, rest + slot
    else:
        clocks = floor = np.ceil(box * core_reads(layer) * mesh.core_clocks).astype(np.int64)
        constants, slot, rest = np.full_like(box, layer.constant_bytes), first, np.zeros_like(box)
    fixed = mesh.code + mesh.stack + constants + rest + 2 * last * box
    return Costs(clocks, floor, received, last * box, fixed, slot, others, constants)


def _first_operand(layer: Layer, sizes: Sizes) -> tuple[Ints, Ints]:
    """Bytes of the first operand with its padding, and of what is received of it."""
    reading = layer.readings[0]
    height, width, depth = reading.image
    rows = (sizes.rows - 1) * reading.step[0] + reading.span[0]
    columns = (sizes.columns - 1) * reading.step[1] + reading.span[1]
    if reading.channels == "all":
        rows, columns, channels = (np.full_like(sizes.rows, size) for size in reading.image)
    elif layer.kind == "dense":
        # whole rows of the image that hold the elements summed over
        rows = np.minimum(height, -(-sizes.sums // (width * depth)) + (sizes.parts > 1)) if height > 1 else sizes.rows
        columns, channels = np.full_like(rows, width), sizes.sums if height * width == 1 else np.full_like(rows, depth)
    else:
        channels = sizes.channels if reading.channels == "same" else sizes.sums
    padded = rows * columns * channels * reading.itemsize
    return padded, np.minimum(rows, height) * np.minimum(columns, width) * channels * reading.itemsize


def _counts(total: int) -> Ints:
    """Numbers of parts worth trying: of those with equally large parts, the fewest."""
    sizes = np.unique(-(-total // np.arange(1, total + 1)))
    return np.unique(-(-total // sizes))


def candidates(layer: Layer, mesh: Mesh) -> tuple[NDArray[np.int64], Sizes]:
    """Every cut worth trying, [cuts, 4] rows, columns, channels, sums, and the size of its largest piece."""
    height, width, channels = layer.image
    array = mesh.array
    step = {"convolution": array.rows, "dense": array.dense_outputs}.get(layer.kind, array.rows)
    wide = array.columns if layer.on_array else 1
    units = (height, -(-width // wide), -(-channels // step))
    counts = [_counts(total) if may else np.array([1]) for total, may in zip(units, layer.cuttable, strict=True)]
    groups = -(-layer.summed // layer.unit)
    sums = np.array([count for count in _counts(groups) if count <= 64]) if layer.kind != "depthwise" else np.array([1])
    grid = np.stack(np.meshgrid(*counts, sums, indexing="ij"), axis=-1).reshape(-1, 4)
    largest = [-(-total // grid[:, axis]) for axis, total in enumerate(units)]
    sizes = Sizes(
        largest[0] if layer.cuttable[0] else np.full(len(grid), height),
        np.minimum(largest[1] * wide, width) if layer.cuttable[1] else np.full(len(grid), width),
        np.minimum(largest[2] * step, channels) if layer.cuttable[2] else np.full(len(grid), channels),
        np.minimum(-(-groups // grid[:, 3]) * layer.unit, layer.summed),
        grid[:, 3],
    )
    return grid, sizes


def frontier(layer: Layer, mesh: Mesh, slots: tuple[int, ...], most: int) -> Frontier:
    """The cuts of a layer worth choosing from.

    Args:
        layer: what is cut.
        mesh: its elements.
        slots: per operand, how many inputs' worth a piece holds.
        most: pieces there may be.

    Raises:
        PlanError: even the smallest piece does not fit an element; says which, how many bytes, and the levers.
    """
    grid, sizes = candidates(layer, mesh)
    costs = costs_of(layer, sizes, mesh, slots)
    memory = costs.fixed + slots[0] * costs.slot + costs.others
    pieces = grid.prod(axis=1)
    fits = memory <= mesh.usable
    if not fits.any():
        raise _too_large(layer, grid, sizes, costs, memory, mesh)
    longest = np.maximum(costs.clocks, np.ceil(np.maximum(costs.received, costs.sent) / mesh.rates.port))
    kept = np.nonzero(fits & (pieces <= most))[0]
    # ties go to fewer parts of the sums, then to less received
    kept = kept[np.lexsort((costs.received[kept], grid[kept, 3], longest[kept], pieces[kept]))]
    best = np.minimum.accumulate(longest[kept]) if len(kept) else longest[kept]
    first = np.concatenate(([True], best[1:] < best[:-1])) if len(kept) else np.zeros(0, bool)
    kept = kept[first]
    cuts = tuple(Cut(*(int(count) for count in grid[index])) for index in kept)
    return Frontier(cuts, pieces[kept], longest[kept].astype(np.int64))


def _too_large(
    layer: Layer, grid: NDArray[np.int64], sizes: Sizes, costs: Costs, memory: Ints, mesh: Mesh
) -> PlanError:
    """The message about a layer that no cut makes small enough."""
    least = int(memory.argmin())
    pick = tuple(int(axis[least]) for axis in (sizes.rows, sizes.columns, sizes.channels, sizes.sums))
    parts = f"constants {costs.constants[least]}, operands {costs.slot[least] + costs.others[least]}"
    sums = costs.fixed[least] - costs.constants[least] - 2 * costs.sent[least] - mesh.code - mesh.stack
    return PlanError(
        f"the smallest piece ({pick[0]}x{pick[1]} pixels of {pick[2]} channels, {pick[3]} summed) takes "
        f"{int(memory[least])} bytes, an element has {mesh.usable} ({parts}, results {2 * costs.sent[least]}, a row of "
        f"sums {sums}, code and stack {mesh.code + mesh.stack})",
        where=f"{layer.name} ({layer.origin})" if layer.origin else layer.name,
        hint="use elements with more memory (Mesh.usable), keep less for code (Mesh.code) or stack, use --objective "
        "latency (one slot per operand), or make the layer narrower",
    )


def bounds(total: int, parts: int, unit: int = 1) -> Ints:
    """Where parts of nearly equal size begin and end, in whole units: [parts + 1]."""
    units = -(-total // unit)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * units // parts * unit, total)
