"""What may be chosen about a region's schedule on VTA, and what is taken when nothing is."""

from __future__ import annotations

from dovetail.target import Choice, Knob, Match, Space
from dovetail.targets.vta import cost
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.lower import Tiling

_SLOTS = (0, 2, 3, 4, 8)


def default(match: Match, config: VtaConfig) -> Choice:
    """The cheapest schedule by the closed form.

    Raises:
        ValueError: not even one pixel of one block fits; the offload's constraints say so first.
    """
    found = cost.best(cost.shape(match.graph, config), config)
    if found is None:
        raise ValueError(f"region {match.graph.name} has no schedule")
    order = "channels" if found.channels_first else "image"
    return {
        "block_rows": found.rows,
        "block_columns": found.columns,
        "channel_blocks": found.blocks,
        "loop_order": order,
        "slots": found.slots,
    }


def space(match: Match, config: VtaConfig) -> Space:
    """Every schedule of a region."""
    shape, base = cost.shape(match.graph, config), default(match, config)

    def problem(choice: Choice) -> str | None:
        return cost.problem(shape, _tiling({**base, **choice}), config) or None

    knobs = (
        Knob("block_rows", cost.sizes(shape.rows), "rows of the result computed together"),
        Knob("block_columns", cost.sizes(shape.columns), "columns of the result computed together"),
        Knob("channel_blocks", cost.sizes(shape.out_blocks), "blocks of output channels computed together"),
        Knob("loop_order", ("image", "channels"),
             "what is finished first: the image for some channels, or all channels"),
        Knob("slots", _SLOTS, "most slots for one kind of data in an SRAM; 0 for as many as are of use"),
    )
    return Space(knobs, problem)


def tiling(match: Match, config: VtaConfig) -> Tiling:
    """The schedule chosen for a region, the default where nothing is chosen."""
    return _tiling({**default(match, config), **match.choice})


def _tiling(choice: Choice) -> Tiling:
    sizes = [choice[name] for name in ("block_rows", "block_columns", "channel_blocks", "slots")]
    rows, columns, blocks, slots = (int(value) for value in sizes)
    return Tiling(rows, columns, blocks, choice["loop_order"] == "channels", slots)
