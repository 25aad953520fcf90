"""A layer alone on one chip, streamed: operands, weights and results pass through DRAM in rounds, two of each held.

A piece goes through its box in bands of rows, slices of channels (the outermost) and slices of what is summed over.
What several pieces read is read once. The model: DRAM serves requests in the order they come; an element computes a
round when its operands are there, and its result is written while the next is computed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.mesh.cuts import Cut, Ints, Sizes, costs_of
from dovetail.mesh.layers import Layer
from dovetail.target.mesh import Mesh


@dataclass(frozen=True)
class Streaming:
    """How a layer is streamed."""

    cut: Cut
    bands: int
    slices: int
    """Of channels."""
    depths: int
    """Slices of what is summed over."""
    clocks: int
    """Of a round on the largest piece."""
    band_bytes: int
    """Read per round for the pieces of one part of the image."""
    weight_bytes: int
    """Read per round (with `depths`) or per slice for the pieces of one part of the channels."""
    result_bytes: int
    """Written by the largest piece per band and slice."""
    memory: int
    """Bytes of the largest piece's element."""
    estimate: float
    """Clocks in all, before it is simulated."""
    floor: float
    """Clocks of the MAC array, spread perfectly over all elements."""
    dram_clocks: float
    """Clocks DRAM is held."""

    @property
    def rounds(self) -> int:
        """Rounds of a piece."""
        return self.bands * self.slices * self.depths


@dataclass(frozen=True)
class _Grid:
    """Candidates: parts along each axis, and what a round's piece of each takes."""

    parts: Ints
    rows: Ints
    columns: Ints
    channels: Ints
    sums: Ints


def _few(total: int) -> Ints:
    sizes = np.unique(-(-total // np.arange(1, total + 1)))
    return np.unique(-(-total // sizes))


def stream_layer(layer: Layer, mesh: Mesh, elements: int) -> Streaming:
    """The best way to stream a layer, by an estimate.

    Raises:
        PlanError: not even a round of the smallest piece fits an element.
    """
    grid = _grid(layer, mesh, elements)
    rows, columns, channels, bands, slices, depths = grid.parts.T
    memory, clocks, band, weight, result, floor = _round(layer, mesh, grid)
    fits = memory <= mesh.usable
    if not fits.any():
        raise PlanError(
            f"a round of the smallest piece takes {int(memory.min())} bytes, an element has {mesh.usable}",
            where=layer.name, hint="use elements with more memory (Mesh.usable), or keep less for code (Mesh.code)",
        )  # fmt: skip
    rounds = bands * slices * depths
    loaded = weight * channels * slices * np.where(depths > 1, bands * depths, 1)
    read = band * rows * columns * rounds + loaded
    written = result * rows * columns * channels * bands * slices
    dram = (read + written) / mesh.rates.dram
    first = (band * rows * columns + weight * channels) / mesh.rates.dram
    last = result * rows * columns * channels / mesh.rates.dram
    total = np.maximum(clocks * rounds + first + last, dram + clocks)
    total = np.where(fits, total, np.inf)
    best = int(np.lexsort((memory, read + written, total))[0])
    return Streaming(
        Cut(int(rows[best]), int(columns[best]), int(channels[best])), int(bands[best]), int(slices[best]),
        int(depths[best]), int(clocks[best]), int(band[best]), int(weight[best]), int(result[best]),
        int(memory[best]), float(total[best]), float(floor) / elements, float(dram[best]),
    )  # fmt: skip


def _grid(layer: Layer, mesh: Mesh, elements: int) -> _Grid:
    height, width, depth = layer.image
    array = mesh.array
    step = array.dense_outputs if layer.kind == "dense" else array.rows
    wide = array.columns if layer.on_array else 1
    units = (height, -(-width // wide), -(-depth // step))
    counts = [_few(total) if may else np.array([1]) for total, may in zip(units, layer.cuttable, strict=True)]
    quads = -(-layer.summed // 4)
    sums = _few(quads)
    sums = sums[:40] if layer.kind == "dense" else sums[sums <= (8 if layer.kind == "convolution" else 1)]
    spatial = np.stack(np.meshgrid(*counts, indexing="ij"), -1).reshape(-1, 3)
    spatial = spatial[spatial.prod(axis=1) <= elements]
    left = [-(-total // spatial[:, axis]) for axis, total in enumerate(units)]
    tries = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64])
    index, bands, slices, depths = (axis.reshape(-1) for axis in np.meshgrid(
        np.arange(len(spatial)), tries, tries, sums, indexing="ij"))  # fmt: skip
    may = (bands <= left[0][index]) & (slices <= left[2][index])
    index, bands, slices, depths = (axis[may] for axis in (index, bands, slices, depths))
    parts = np.column_stack((spatial[index], bands, slices, depths))
    return _Grid(
        parts,
        -(-left[0][index] // bands) if layer.cuttable[0] else np.full(len(index), height),
        np.minimum(left[1][index] * wide, width) if layer.cuttable[1] else np.full(len(index), width),
        np.minimum(-(-left[2][index] // slices) * step, depth) if layer.cuttable[2] else np.full(len(index), depth),
        np.minimum(-(-quads // depths) * 4, layer.summed),
    )


def _round(layer: Layer, mesh: Mesh, grid: _Grid) -> tuple[Ints, Ints, Ints, Ints, Ints, float]:
    """Memory, clocks, bytes of a band, weights and result of a round on the largest piece; the whole layer's floor."""
    sizes = Sizes(grid.rows, grid.columns, grid.channels, grid.sums, np.ones_like(grid.rows))
    costs = costs_of(layer, sizes, mesh, (1,) * len(layer.readings))
    box = grid.rows * grid.columns * grid.channels
    depths, slices = grid.parts[:, 5], grid.parts[:, 4]
    twice = np.where((slices > 1) | (depths > 1), 2, 1)
    memory = costs.fixed + (twice - 1) * costs.constants + 2 * costs.slot + 2 * costs.others
    memory = memory + np.where(depths > 1, 4 * box, 0)
    clocks = costs.clocks + np.where(depths > 1, box, 0)
    whole = Sizes(*(np.array([size]) for size in (*layer.image, layer.summed, 1)))
    floor = float(costs_of(layer, whole, mesh, (1,) * len(layer.readings)).floor[0])
    constants = costs.constants if layer.on_array else np.zeros_like(costs.constants)
    return memory, clocks, costs.received, constants, box * layer.itemsize, floor


def simulate_stream(streaming: Streaming, mesh: Mesh) -> float:
    """Clocks from the first request to the last result in DRAM."""
    return _Stream(streaming, mesh).run()


_NEED, _GOT, _DONE, _WROTE = range(4)


class _Stream:
    """Groups are parts of the image, whose pieces (one per part of the channels) read the same bands."""

    def __init__(self, streaming: Streaming, mesh: Mesh) -> None:
        self.plan, self.rate = streaming, mesh.rates.dram
        self.groups = streaming.cut.rows * streaming.cut.columns
        self.parts = streaming.cut.channels
        shape = (self.groups, self.parts)
        self.round: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.busy: NDArray[np.bool_] = np.zeros(shape, bool)
        self.wrote: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.bands = np.zeros(self.groups, np.int64)
        self.weights = np.zeros(self.parts, np.int64)
        self.asked_bands, self.asked_weights = self.bands.copy(), self.weights.copy()
        self.free = self.last = 0.0
        self.events: list[tuple[float, int, int, int, int]] = []
        self.count = 0
        self.per_weights = 1 if streaming.depths > 1 else streaming.bands
        self.loads = streaming.rounds // self.per_weights

    def run(self) -> float:
        """Everything."""
        self._ask(0.0)
        while self.events:
            now, _, kind, group, part = heapq.heappop(self.events)
            if kind == _NEED:
                self.bands[group] += 1
            elif kind == _GOT:
                self.weights[part] += 1
            elif kind == _DONE:
                self._finished(group, part, now)
            else:
                self.wrote[group, part] += 1
            self._ask(now)
            self._start(now)
        if (self.round < self.plan.rounds).any():
            raise RuntimeError("a streamed layer stops")
        return self.last

    def _push(self, time: float, kind: int, group: int, part: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, kind, group, part))

    def _serve(self, now: float, size: int) -> float:
        self.free = max(self.free, now) + size / self.rate
        return self.free

    def _ask(self, now: float) -> None:
        """Ask for what there is room for: two bands of each group, two sets of weights of each part."""
        rounds = self.round.min(axis=1)
        for group in np.nonzero((self.asked_bands < self.plan.rounds) & (self.asked_bands < rounds + 2))[0].tolist():
            self.asked_bands[group] += 1
            self._push(self._serve(now, self.plan.band_bytes), _NEED, group, 0)
        loads = self.round.min(axis=0) // self.per_weights
        held = 2 if self.loads > 1 else 1
        for part in np.nonzero((self.asked_weights < self.loads) & (self.asked_weights < loads + held))[0].tolist():
            self.asked_weights[part] += 1
            self._push(self._serve(now, self.plan.weight_bytes), _GOT, 0, part)

    def _start(self, now: float) -> None:
        ready = (
            ~self.busy & (self.round < self.plan.rounds) & (self.bands[:, None] > self.round)
            & (self.weights[None] > self.round // self.per_weights)
            & (self.round // self.plan.depths - self.wrote < 2)
        )  # fmt: skip
        for group, part in np.argwhere(ready).tolist():
            self.busy[group, part] = True
            self._push(now + self.plan.clocks, _DONE, group, part)

    def _finished(self, group: int, part: int, now: float) -> None:
        self.busy[group, part] = False
        self.round[group, part] += 1
        if self.round[group, part] % self.plan.depths == 0:
            self.last = self._serve(now, self.plan.result_bytes)
            self._push(self.last, _WROTE, group, part)


