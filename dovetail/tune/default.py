"""What the planner does with a layer when nothing is chosen, said as a choice."""

from __future__ import annotations

from collections.abc import Collection

from dovetail.layout import choose_layouts
from dovetail.partition.regions import Region
from dovetail.plan import plan
from dovetail.plan.tiles import BUFFERS, EARLY, ORDER, PLACEMENT, TILE, offload_choice
from dovetail.target.description import Target
from dovetail.target.knobs import Value


def resolved_default(region: Region, target: Target, near: Collection[str]) -> dict[str, Value]:
    """The whole choice that stands for the planner's own, for a region that is a network by itself.

    Raises:
        PlanError: the layer does not fit.
    """
    assert region.engine is not None and region.match is not None
    own = {PLACEMENT: region.engine.name, **offload_choice(region, region.match)}
    if target.works_in_place(region.engine):
        return own
    tiling = plan(choose_layouts(region.graph, [region], target), target, {}, near).tilings[region.name]
    sizes = tiling.shape[1:] if len(tiling.shape) == 4 else tiling.shape[-1:]
    names = TILE if len(tiling.shape) == 4 else TILE[2:]
    several = len(tiling.tiles) > 1
    return {
        **own,
        **dict(zip(names, sizes, strict=True)),
        BUFFERS: tiling.buffers if several else 2,
        ORDER: "channels" if tiling.channels_outer else "positions",
        EARLY: "yes",
    }
