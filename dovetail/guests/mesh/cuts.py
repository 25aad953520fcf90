"""Cuts of a layer into pieces: parts of every axis, clocks and bytes of the pieces, cuts worth choosing from."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.layers import Ints, LineUse, MeshLayer, OperandRead, box_of, core_reads, is_pool
from dovetail.ir.crop import crop
from dovetail.ir.graph import Graph
from dovetail.ir.operators.movement import Transpose
from dovetail.ir.types import full_box
from dovetail.records import Record
from dovetail.target.mesh import CoreClocks, Mesh, Work

SUMS_TOGETHER = 512
"""Sums of the MAC array that are finished in one go, or one row of them: the array computes as many meanwhile."""


_TABLES = 20 * 1024
"""Bytes of the tables by which floats are quantised, at most."""


class Cut(Record):
    """Into how many parts each axis is cut."""

    rows: int = 1
    columns: int = 1
    channels: int = 1
    sums: int = 1

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return self.rows * self.columns * self.channels * self.sums


class PieceSizes(Record):
    """Sizes of pieces along each axis, one entry per piece (or per candidate cut)."""

    rows: Ints
    columns: Ints
    channels: Ints
    sums: Ints
    """Elements of the axis summed over."""
    parts: Ints
    """Parts of the sums: with more than one, 32-bit sums go from piece to piece."""
    place: Ints | None = None
    """Which of those parts; None for the last, which gives results."""
    lined: Ints | None = None
    """How a piece's sums are requantised, as `LineUse`; None where that is as for the whole layer."""

    @property
    def results(self) -> Ints:
        """Elements of a piece's result."""
        return np.asarray(self.rows * self.columns * self.channels)


class CutCosts(Record):
    """Clocks and bytes of pieces, one entry each."""

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

    def memory(self, slots: tuple[int, ...]) -> Ints:
        """Bytes of each piece's element, with so many slots of each operand."""
        return np.asarray(self.fixed + slots[0] * self.slot + self.others)


class Frontier(Record):
    """The Pareto-optimal cuts of a layer: more pieces, less time."""

    cuts: tuple[Cut, ...]
    pieces: Ints
    """Ascending."""
    clocks: Ints
    """Descending: the longest piece with its communication."""


def work_of(layer: MeshLayer, sizes: PieceSizes) -> Work:
    """A MAC array's work on pieces."""
    box = (sizes.rows, sizes.columns, sizes.channels, sizes.sums)
    return Work(layer.kind, *box, layer.kernel, layer.stride, *_windows(layer.readings[0], sizes))


def _windows(reading: OperandRead, sizes: PieceSizes) -> tuple[Ints, Ints]:
    """Rows and columns of an operand that pieces read, its padding included."""
    (down, right), (high, wide) = reading.step, reading.span
    return (sizes.rows - 1) * down + high, (sizes.columns - 1) * right + wide


def costs_of(layer: MeshLayer, sizes: PieceSizes, mesh: Mesh, slots: tuple[int, ...]) -> CutCosts:
    """Clocks and bytes of pieces, which hold so many inputs' worth (`slots`) of each operand of the layer."""
    box = sizes.results
    last = np.where(sizes.parts > 1, 4, layer.itemsize)
    others, received = np.zeros_like(box), np.zeros_like(box)
    for reading, count in zip(layer.readings[1:], slots[1:], strict=True):
        size = (box if reading.channels == "same" else prod(reading.image)) * reading.itemsize
        others, received = others + count * size, received + size
    partial = np.where(sizes.parts > 1, 4 * box, 0)
    others, received = others + slots[0] * partial, received + partial
    first, reads = _first_operand(layer, sizes)
    received = received + reads
    if mesh.pieces is not None:
        clocks = floor = np.array([mesh.pieces.price(graph) for graph in _first_pieces(layer, sizes)], np.int64)
        constants = layer.constant_bytes * sizes.channels // max(layer.image[2], 1) if layer.parts else 0 * box
        constants = np.where(constants > 0, constants, layer.constant_bytes)
        slot, rest = first, first + others + last * box  # while it is computed, all lies in buffers of its own
    elif layer.on_array:
        work = work_of(layer, sizes)
        together = rows_together(layer, sizes, mesh)
        clocks = np.ceil(by_turns(layer, sizes, mesh, together)).astype(np.int64)
        floor = mesh.mac.compute(work)
        constants = mesh.mac.weights(work) + 12 * sizes.channels
        slot, rest = (mesh.mac.operand(work), mesh.mac.row_sums(work))
        rest = rest * together * np.where(together < sizes.rows, 2, 1)
        rest += together * sizes.columns * sizes.channels if len(layer.readings) > 1 else 0
        if layer.kind == "dense":
            slot, rest = reads, rest + slot
    else:
        clocks = floor = np.ceil(core_clocks(layer, sizes, mesh.core)).astype(np.int64)
        tables = _TABLES * ((box >= mesh.core.tabled) & any(node.operator.quantises for node in layer.graph.nodes))
        constants, slot, rest = layer.constant_bytes + tables, first, np.zeros_like(box)
    fixed = mesh.code + mesh.stack + constants + rest + 2 * last * box
    return CutCosts(clocks, floor, received, last * box, fixed, slot, others, constants)


def rows_together(layer: MeshLayer, sizes: PieceSizes, mesh: Mesh) -> Ints:
    """Rows of pieces of these sizes whose sums are finished in one go while the array computes the next: as many goes
    as balance what is not computed beside each other against what each go costs."""
    row = sizes.columns * sizes.channels
    apart = np.minimum(mesh.mac.clocks(work_of(layer, sizes)), sizes.rows * row * mesh.core.finished)
    turns = np.maximum(1, np.rint(np.sqrt(apart / max(mesh.core.turn, 1.0)))).astype(np.int64)
    most = np.maximum(1, SUMS_TOGETHER // row)
    wanted = np.minimum(most, -(-sizes.rows // turns))
    for near in (2, -2, 1, -1, 0):  # rather so that all goes are alike
        other = wanted + near
        wanted = np.where((other > 0) & (other <= most) & (sizes.rows % np.maximum(other, 1) == 0), other, wanted)
    return np.asarray(wanted, np.int64)


def goes(layer: MeshLayer, sizes: PieceSizes, mesh: Mesh) -> Ints:
    """Goes in which the rows of pieces of these sizes are computed: one of the core's layers."""
    return -(-sizes.rows // rows_together(layer, sizes, mesh)) if layer.on_array else np.ones_like(sizes.rows)


def by_turns(layer: MeshLayer, sizes: PieceSizes, mesh: Mesh, together: Ints) -> NDArray[np.float64]:
    """Clocks of pieces of these sizes: the core finishes some rows while the array computes the next."""
    turns, array = -(-sizes.rows // together), mesh.mac.clocks(work_of(layer, sizes))
    core = finishing(layer, sizes, mesh.core, turns)
    turns = np.where(core > 0, turns, 1)
    each = (array + core + (turns - 1) * np.maximum(array, core)) / turns
    return np.asarray(each + mesh.core.handling + turns * (turns > 1) * mesh.core.turn)


def finishing(layer: MeshLayer, sizes: PieceSizes, core: CoreClocks, turns: Ints) -> NDArray[np.float64]:
    """Clocks of the core behind the array for pieces of these sizes, in so many turns."""
    box, groups = sizes.results, -(-sizes.channels // 4)
    place = sizes.parts - 1 if sizes.place is None else sizes.place
    passed, before = place < sizes.parts - 1, place > 0
    lined = layer.line_use(0, layer.image[2]) if sizes.lined is None else sizes.lined
    pixels, each = sizes.rows * sizes.columns, core.finished + core.gaining * (lined == LineUse.GAINING)
    by_lines = 4 * pixels * groups * each + turns * groups * (pixels > turns) * core.group
    last = np.where((lined != LineUse.NOT) & (sizes.parts == 1), by_lines, box * core.without_lines)
    last = last + box * core.added * (len(layer.readings) - 1) if layer.tail else 0.0 * box
    last = last + box * core.dequantised * _gives_floats(layer)
    return np.where(passed, box * core.passed, last) + box * before * core.joined


def core_clocks(layer: MeshLayer, sizes: PieceSizes, core: CoreClocks) -> NDArray[np.float64]:
    """Clocks of pieces of these sizes that the core computes alone."""
    anchor, taps = layer.anchor, core_reads(layer)
    each: NDArray[np.float64] | float = taps * core.read
    if anchor is not None and is_pool(anchor, layer.graph):
        mean = taps * core.averaged + core.result + core.divided * (taps & (taps - 1) > 0)
        each = taps * core.compared if anchor.operator.chosen_from(anchor.inputs) else mean
    elif any(node.operator.is_rowwise for node in layer.graph.nodes):
        each = core.row
    elif all(node.operator.moves_only for node in layer.graph.nodes):
        is_reordered = any(isinstance(node.operator, Transpose) for node in layer.graph.nodes)
        each = core.reordered if is_reordered else core.moved
    elif any(node.operator.quantises for node in layer.graph.nodes):
        least = core.tabled * (2 if sizes.place is None else 1)  # of a cut, other pieces are smaller than the largest
        each = np.where(sizes.results >= least, core.quantised, core.floating)
    return np.asarray(sizes.results * (each + core.dequantised * _gives_floats(layer)) + core.handling)


def _gives_floats(layer: MeshLayer) -> bool:
    return any(node.operator.dequantises for node in layer.graph.nodes)


def _first_pieces(layer: MeshLayer, sizes: PieceSizes) -> Iterator[Graph]:
    """The computation of pieces of these sizes that begin where the result does."""
    shape = layer.graph.types[layer.graph.outputs[0]].shape
    for size in np.stack((sizes.rows, sizes.columns, sizes.channels), axis=1).tolist():
        box = box_of(shape, *((0, end) for end in size))
        yield layer.graph if box == full_box(shape) else crop(layer.graph, box).graph


def _first_operand(layer: MeshLayer, sizes: PieceSizes) -> tuple[Ints, Ints]:
    """Bytes of the first operand with its padding, and of what is received of it."""
    reading = layer.readings[0]
    height, width, depth = reading.image
    rows, columns = _windows(reading, sizes)
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


def grain(layer: MeshLayer, mesh: Mesh) -> tuple[int, int, int]:
    """Elements along rows, columns and channels that sizes of parts are multiples of, but for the last part."""
    if mesh.pieces is not None:
        return mesh.pieces.grain(layer.graph)
    step = mesh.mac.dense_outputs if layer.kind == "dense" else mesh.mac.rows
    return 1, mesh.mac.columns if layer.on_array else 1, step


def part_counts(total: int) -> Ints:
    """Numbers of parts worth trying: of those with equally large parts, the fewest."""
    sizes = np.unique(-(-total // np.arange(1, total + 1)))
    return np.unique(-(-total // sizes))


def _parts(size: int, step: int, may: bool = True) -> tuple[Ints, Ints]:
    """Numbers of parts worth trying along an axis, whole steps each, and the sizes of the largest parts."""
    steps = -(-size // step)
    counts = part_counts(steps) if may else np.array([1])
    return counts, np.minimum(-(-steps // counts) * step, size)


def candidates(layer: MeshLayer, mesh: Mesh) -> tuple[NDArray[np.int64], PieceSizes]:
    """Every cut worth trying, [cuts, 4] rows, columns, channels, sums, and the size of its largest piece."""
    axes = [_parts(*axis) for axis in zip(layer.image, grain(layer, mesh), layer.cuttable, strict=True)]
    whole_sums = layer.kind == "depthwise" or mesh.pieces is not None  # engines give whole results
    sums, summed = _parts(layer.summed, layer.unit, not whole_sums)
    axes.append((sums[sums <= layer.most_sums], summed[sums <= layer.most_sums]))
    if mesh.pieces is not None and len(axes[0][0]) > 1:  # columns are cut where there are too few rows
        axes[1] = (axes[1][0][:1], axes[1][1][:1])
    grid, sizes = (np.stack(np.meshgrid(*each, indexing="ij"), -1).reshape(-1, 4) for each in zip(*axes, strict=True))
    rows, columns, channels, sums = sizes.T
    return grid, PieceSizes(rows, columns, channels, sums, grid[:, 3])


def frontier(layer: MeshLayer, mesh: Mesh, slots: tuple[int, ...], most: int) -> Frontier:
    """The cuts of a layer worth choosing from, with at most so many pieces and so many inputs' worth of each operand in
    a piece; none where not even the smallest piece fits an element."""
    grid, sizes = candidates(layer, mesh)
    costs = costs_of(layer, sizes, mesh, slots)
    pieces, clocks = grid.prod(axis=1), costs.clocks
    if mesh.pieces is not None:  # few floats are quantised one by one, which takes longer than many
        clocks = np.maximum(clocks, costs_of(layer, _smallest(layer, mesh, grid), mesh, slots).clocks)
    longest = np.maximum(clocks, np.ceil(np.maximum(costs.received, costs.sent) / mesh.rates.port))
    kept = np.nonzero((costs.memory(slots) <= mesh.usable) & (pieces <= most))[0]
    # ties go to fewer parts of the sums, then to less received
    kept = kept[np.lexsort((costs.received[kept], grid[kept, 3], longest[kept], pieces[kept]))]
    best = np.minimum.accumulate(longest[kept])
    kept = kept[np.concatenate(([True], best[1:] < best[:-1]))[: len(kept)]]
    cuts = tuple(Cut(*(int(count) for count in grid[index])) for index in kept)
    return Frontier(cuts, pieces[kept], longest[kept].astype(np.int64))


def _smallest(layer: MeshLayer, mesh: Mesh, grid: Ints) -> PieceSizes:
    """The size of the smallest piece of each cut, [cuts, 4], whose sums are whole."""
    sizes = np.repeat([layer.image], len(grid), axis=0)
    for axis, step in enumerate(grain(layer, mesh)):
        parts = {count: int(np.diff(bounds(layer.image[axis], count, step)).min()) for count in grid[:, axis].tolist()}
        sizes[:, axis] = [parts[count] for count in grid[:, axis].tolist()]
    rows, columns, channels = sizes.T
    return PieceSizes(rows, columns, channels, np.full(len(grid), layer.summed), grid[:, 3])


def require_fit(layer: MeshLayer, mesh: Mesh, slots: tuple[int, ...]) -> None:
    """Raise PlanError if even the smallest piece does not fit an element: how many bytes it takes, and the levers."""
    _, sizes = candidates(layer, mesh)
    costs = costs_of(layer, sizes, mesh, slots)
    memory = costs.memory(slots)
    least = int(memory.argmin())
    if memory[least] <= mesh.usable:
        return
    parts = f"constants {costs.constants[least]}, operands {slots[0] * costs.slot[least] + costs.others[least]}"
    sums = costs.fixed[least] - costs.constants[least] - 2 * costs.sent[least] - mesh.code - mesh.stack
    raise PlanError(
        f"the smallest piece ({sizes.rows[least]}x{sizes.columns[least]} pixels of {sizes.channels[least]} channels, "
        f"{sizes.sums[least]} summed) takes {int(memory[least])} bytes, an element has {mesh.usable} ({parts}, "
        f"results {2 * costs.sent[least]}, a row of sums {sums}, code and stack {mesh.code + mesh.stack})",
        where=f"{layer.name} ({layer.origin})" if layer.origin else layer.name,
        hint="use elements with more memory (Mesh.usable), keep less for code (Mesh.code) or stack, use --objective "
        "latency (one slot per operand), or make the layer narrower",
    )


def bounds(total: int, parts: int, unit: int = 1) -> Ints:
    """[parts + 1] first and last end of parts of nearly equal size, in whole units."""
    units = -(-total // unit)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * units // parts * unit, total)
