"""Estimates the cycles of a choice for a layer by itself: on an engine by the clock of its tiles, on the core by its
kernel's loops; changes of layout at both ends are part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dovetail.ir.types import Shape
from dovetail.program.ir import dense_view
from dovetail.schedule.cores import copies, core_parts, cores_cycles
from dovetail.schedule.layout import choose_layouts
from dovetail.schedule.region import LaidRegion, Region
from dovetail.schedule.tiles.clock import Estimate, PartClock, TileCut
from dovetail.schedule.tiles.tile import BUFFERS, EARLY, ORDER, PLACEMENT, TILE
from dovetail.target.description import Target
from dovetail.target.pattern import Choice
from dovetail.timing.kernels import shared_cycles
from dovetail.timing.transfers import CopyCost, copy_cost


def _alone(cost: Estimate, target: Target) -> Estimate:
    """The cost of a layer that is a network by itself."""
    return replace(cost, cycles=cost.cycles + target.core.statements.around)


Estimator = Callable[[Choice], Estimate | None]
"""The cost of a whole, allowed choice; None when its tiles need more memory than there is."""


def estimator(region: Region, target: Target, near: tuple[str, ...]) -> Estimator:
    """The estimator of a region, on an engine or on the core."""
    if region.engine is not None:
        return _OnEngine(region, target, near).estimate
    parts = core_parts(region.graph, target)
    return lambda choice: _alone(Estimate(shared_cycles(parts, target, choice)), target)


class _OnEngine:
    """Estimates whole choices for one layer's own region, nothing chosen. The inputs and outputs `near` lie in the
    engine's memory."""

    def __init__(self, region: Region, target: Target, near: tuple[str, ...]) -> None:
        laid, ends = choose_layouts(region.graph, [region], target, near), {*region.graph.inputs, region.output}
        place = next(place for place, one in enumerate(laid.regions) if one.engine is not None)
        self.region, self._target, self._layouts = region, target, laid.layouts
        (part,) = laid.regions[place].parts
        # an engine with a DMA of its own copies from and to the memory of values, whatever lies there
        inner = {*part.graph.inputs, part.output} - ends  # what a relayout makes or takes lies in its memory
        reads = {""} if target.reads_constants(part.engine) else set[str]()
        self._in_place = frozenset(reads | ({*near, *inner} - part.converted if part.engine.dma is None else set()))
        before, after = laid.regions[:place], laid.regions[place + 1 :]
        self._around = [self._relayout(one) for one in before], [self._relayout(one) for one in after]
        self._clock = PartClock(part, target, laid.layouts)
        self._room = target.memory(part.engine.memory).size - sum(laid.nbytes(name) for name in {*near, *inner})

    def estimate(self, choice: Choice) -> Estimate | None:
        """As of `Estimator`."""
        if choice.get(PLACEMENT) == "core":
            return _alone(Estimate(cores_cycles(self.region.graph, self._target)), self._target)
        shape = tile_shape(self._clock.part.shape, choice)
        own = {name: value for name, value in choice.items() if name not in (BUFFERS, ORDER, PLACEMENT, EARLY, *TILE)}
        outer = choice.get(ORDER, "channels") == "channels"
        cut = TileCut(shape, self._in_place, int(choice.get(BUFFERS, 2)), outer)
        cost = self._clock.estimate(cut, own, self._around)
        return _alone(cost, self._target) if cost is not None and cost.nbytes <= self._room else None

    def _relayout(self, region: LaidRegion) -> CopyCost:
        """Cost of a change of layout beside the engine's region; on the core all of its cycles."""
        views = {
            name: dense_view(name, kind, layout=self._layouts.get(name)) for name, kind in region.graph.types.items()
        }
        by_dma = self._target.dma and region.copied_by
        moves = copies(0, region.graph, views, views[region.output]) if by_dma else None
        if moves is None:
            return CopyCost(0, cores_cycles(region.graph, self._target))
        return copy_cost(self._target.dma, moves)


def tile_shape(shape: Shape, choice: Choice) -> Shape:
    """The shape of a whole tile's result under a whole choice; the whole result where the planner cuts none."""
    if len(shape) == 4:
        return (shape[0], *(int(choice.get(name, whole)) for name, whole in zip(TILE, shape[1:], strict=True)))
    return (*shape[:-1], int(choice.get(TILE[2], shape[-1])))
