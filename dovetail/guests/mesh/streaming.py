"""A layer alone on one chip; operands, weights and results pass through DRAM in rounds, two of each held.

A piece goes through its box in bands of rows, slices of channels (the outermost) and slices of what is summed over.
What several pieces read is read once. In the model of time DRAM serves requests in the order they come; an element
computes a round when its operands are there, and its result is written while the next is computed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.guests.mesh.cuts import (
    Cut,
    PieceSizes,
    costs_of,
    grains,
    largest,
    part_counts,
    spatial_counts,
)
from dovetail.guests.mesh.layers import Ints, MeshLayer
from dovetail.target.mesh import Mesh

_COUNTS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64])
"""Numbers of bands and slices that are tried."""
_MOST_DEPTHS = 40


@dataclass(frozen=True)
class Streaming:
    """A way to stream a layer."""

    cut: Cut
    bands: int
    slices: int
    """Slices of channels."""
    depths: int
    """Slices of what is summed over."""
    clocks: int
    """Clocks of a round on the largest piece."""
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


def stream_layer(layer: MeshLayer, mesh: Mesh, elements: int) -> Streaming:
    """The best way to stream a layer, by an estimate.

    Raises:
        PlanError: not even a round of the smallest piece fits an element.
    """
    parts, sizes = _rounds(layer, mesh, elements)
    rows, columns, channels, bands, slices, depths = parts.T
    costs, box = costs_of(layer, sizes, mesh, layer.one_slot), sizes.results
    memory = costs.fixed + np.where((slices > 1) | (depths > 1), costs.constants, 0) + 2 * costs.slot + 2 * costs.others
    memory = memory + np.where(depths > 1, 4 * box, 0)
    clocks = costs.clocks + np.where(depths > 1, box, 0)
    whole = PieceSizes(*(np.array([size]) for size in (*layer.image, layer.summed, 1)))
    floor = costs_of(layer, whole, mesh, layer.one_slot).floor[0]
    band, result = costs.received, box * layer.itemsize
    weight = costs.constants if layer.on_array else np.zeros_like(costs.constants)
    fits = memory <= mesh.usable
    if not fits.any():
        what = f"a round of the smallest piece takes {int(memory.min())} bytes, an element has {mesh.usable}"
        hint = "use elements with more memory (Mesh.usable), or keep less for code (Mesh.code)"
        raise PlanError(what, where=layer.name, hint=hint)
    rounds = bands * slices * depths
    moved = band * rows * columns * rounds + weight * channels * slices * np.where(depths > 1, bands * depths, 1)
    moved = moved + result * rows * columns * channels * bands * slices
    dram = moved / mesh.rates.dram
    first = (band * rows * columns + weight * channels) / mesh.rates.dram
    last = result * rows * columns * channels / mesh.rates.dram
    total = np.maximum(clocks * rounds + first + last, dram + clocks)
    total = np.where(fits, total, np.inf)
    best = int(np.lexsort((memory, moved, total))[0])
    cut = Cut(int(rows[best]), int(columns[best]), int(channels[best]))
    numbers = [int(one[best]) for one in (bands, slices, depths, clocks, band, weight, result, memory)]
    times = [float(total[best]), float(floor) / elements, float(dram[best])]
    return Streaming(cut, *numbers, *times)


def _rounds(layer: MeshLayer, mesh: Mesh, elements: int) -> tuple[Ints, PieceSizes]:
    """Candidates: parts along each axis, bands, slices and depths; and the largest piece of a round of each."""
    quads = -(-layer.summed // 4)
    sums = part_counts(quads)
    sums = sums[:_MOST_DEPTHS] if layer.kind == "dense" else sums[sums <= (8 if layer.kind == "convolution" else 1)]
    spatial = np.stack(np.meshgrid(*spatial_counts(layer, mesh), indexing="ij"), -1).reshape(-1, 3)
    spatial = spatial[spatial.prod(axis=1) <= elements]
    left = [-(-total // spatial[:, axis]) for axis, total in enumerate(grains(layer, mesh))]
    grid = np.meshgrid(np.arange(len(spatial)), _COUNTS, _COUNTS, sums, indexing="ij")
    index, bands, slices, depths = (axis.reshape(-1) for axis in grid)
    may = (bands <= left[0][index]) & (slices <= left[2][index])
    index, bands, slices, depths = (axis[may] for axis in (index, bands, slices, depths))
    parts = np.column_stack((spatial[index], bands, slices, depths))
    times = (bands, np.ones_like(bands), slices)
    rows, columns, channels = (largest(layer, mesh, axis, spatial[index, axis] * times[axis]) for axis in range(3))
    sums = np.minimum(-(-quads // depths) * 4, layer.summed)
    return parts, PieceSizes(rows, columns, channels, sums, np.ones_like(rows))


def simulate_stream(streaming: Streaming, mesh: Mesh) -> float:
    """Clocks from the first request to the last result in DRAM."""
    return _StreamingSimulation(streaming, mesh).run()


_BAND, _WEIGHTS, _ROUND, _RESULT = range(4)
"""Events: a band or weights are there, a round is computed, a result is written."""


class _StreamingSimulation:
    """Groups are parts of the image, whose pieces (one per part of the channels) read the same bands."""

    def __init__(self, streaming: Streaming, mesh: Mesh) -> None:
        self.plan, self.rate = streaming, mesh.rates.dram
        shape = (streaming.cut.rows * streaming.cut.columns, streaming.cut.channels)
        self.round: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.busy: NDArray[np.bool_] = np.zeros(shape, bool)
        self.wrote: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.bands, self.weights = (np.zeros(count, np.int64) for count in shape)
        self.requested_bands, self.requested_weights = self.bands.copy(), self.weights.copy()
        self.free = self.last = 0.0
        self.events: list[tuple[float, int, int, int, int]] = []
        self.count = 0
        self.per_weights = 1 if streaming.depths > 1 else streaming.bands
        self.loads = streaming.rounds // self.per_weights

    def run(self) -> float:
        self._request(0.0)
        while self.events:
            now, _, kind, group, part = heapq.heappop(self.events)
            if kind == _BAND:
                self.bands[group] += 1
            elif kind == _WEIGHTS:
                self.weights[part] += 1
            elif kind == _ROUND:
                self._finished(group, part, now)
            else:
                self.wrote[group, part] += 1
            self._request(now)
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

    def _request(self, now: float) -> None:
        """Request what there is room for: two bands of each group, two sets of weights of each part."""
        rounds, bands = self.round.min(axis=1), self.requested_bands
        for group in np.nonzero((bands < self.plan.rounds) & (bands < rounds + 2))[0].tolist():
            bands[group] += 1
            self._push(self._serve(now, self.plan.band_bytes), _BAND, group, 0)
        loads, weights = self.round.min(axis=0) // self.per_weights, self.requested_weights
        held = 2 if self.loads > 1 else 1
        for part in np.nonzero((weights < self.loads) & (weights < loads + held))[0].tolist():
            weights[part] += 1
            self._push(self._serve(now, self.plan.weight_bytes), _WEIGHTS, 0, part)

    def _start(self, now: float) -> None:
        ready = (
            ~self.busy
            & (self.round < self.plan.rounds)
            & (self.bands[:, None] > self.round)
            & (self.weights[None] > self.round // self.per_weights)
            & (self.round // self.plan.depths - self.wrote < 2)
        )
        for group, part in np.argwhere(ready).tolist():
            self.busy[group, part] = True
            self._push(now + self.plan.clocks, _ROUND, group, part)

    def _finished(self, group: int, part: int, now: float) -> None:
        self.busy[group, part] = False
        self.round[group, part] += 1
        if self.round[group, part] % self.plan.depths == 0:
            self.last = self._serve(now, self.plan.result_bytes)
            self._push(self.last, _RESULT, group, part)
