"""Which schedule of a region is taken when nobody has tuned it, and what may be tuned."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from heapq import nsmallest
from itertools import accumulate
from pathlib import Path

from dovetail.files import kept_answer
from dovetail.target import Choice, Knob, Match, Operand, Space
from dovetail.targets.vta.config import VtaConfig
from dovetail.targets.vta.cost import RegionShape, VtaTiling, cycles, problem, shape, sizes, tilings
from dovetail.targets.vta.lower import lower
from dovetail.targets.vta.mapping import constants, joined
from dovetail.targets.vta.stream import run_schedule
from dovetail.targets.vta.writer import VtaRegion, row_major

KNOBS = ("block_rows", "block_columns", "channel_blocks", "loop_order", "slots")
MOST_TIMED, MOST_TILES = 16, 1000
"""How many tilings are timed, the cheapest by the closed form, and how many tiles they have in all."""


@lru_cache(maxsize=1024)
def best(s: RegionShape, config: VtaConfig) -> VtaTiling | None:
    """The cheapest tiling, of equals the one that moves less; None when not even a pixel of one block fits. It is kept
    in the cache."""
    answer = kept_answer(Path(__file__).parent, f"{s!r} {config!r}", lambda: json.dumps(_best(s, config)).encode())
    return VtaTiling(**held) if (held := json.loads(answer)) is not None else None


def _best(s: RegionShape, config: VtaConfig) -> dict[str, int] | None:
    """As `best`, the fields by name."""

    def small(t: VtaTiling) -> tuple[int, int, int, bool]:
        return -t.rows, -t.columns, -t.blocks, t.channels_first

    found = nsmallest(MOST_TIMED, tilings(s, config), key=lambda t: (cycles(s, t, config), *small(t)))
    tiles = accumulate(-(-s.rows // t.rows) * -(-s.columns // t.columns) * -(-s.out_blocks // t.blocks) for t in found)
    timed = [t for place, (t, before) in enumerate(zip(found, tiles, strict=True)) if place < 2 or before <= MOST_TILES]
    chosen = min(timed, key=lambda t: (*taken(s, t, config), *small(t)), default=None)
    return None if chosen is None else asdict(chosen)


@lru_cache(maxsize=1024)
def taken(s: RegionShape, t: VtaTiling, config: VtaConfig) -> tuple[int, int]:
    """Cycles of a region under a tiling, its operand and result dense: those of its instructions (stream.py), and those
    in which the bus moves data."""
    region = joined(s.graph)
    x, y = (Operand(0, strides(region.types[name].shape, config)) for name in (*region.inputs, *region.outputs))
    placed = VtaRegion(region, (x,), y, constants(s.graph, config))
    timed = run_schedule(lower(placed, t, config).instructions, config)
    return timed.cycles, timed.bus_busy


def strides(shape: tuple[int, ...], config: VtaConfig) -> tuple[int, ...]:
    """Byte strides of a dense value: batch block, channel block, rows, columns, image lane if any, lane."""
    lanes = (config.batch, config.block) if config.batch > 1 else (config.block,)
    return row_major((-(-shape[0] // config.batch), -(-shape[-1] // config.block), *shape[1:-1], *lanes))


def default(match: Match, config: VtaConfig) -> Choice:
    """The cheapest schedule.

    Raises:
        ValueError: not even one pixel of one block fits; the offload's constraints say so first.
    """
    found = best(shape(match.graph, config), config)
    if found is None:
        raise ValueError(f"region {match.graph.name} has no schedule")
    chosen = {"block_rows": found.rows, "block_columns": found.columns, "channel_blocks": found.blocks}
    return {**chosen, "loop_order": "channels" if found.channels_first else "image", "slots": found.slots}


def space(match: Match, config: VtaConfig) -> Space:
    """Every schedule of a region."""
    found, base = shape(match.graph, config), default(match, config)

    def wrong(choice: Choice) -> str | None:
        return problem(found, _tiling({**base, **choice}), config) or None

    knobs = (
        Knob("block_rows", sizes(found.rows), "rows of the result computed together"),
        Knob("block_columns", sizes(found.columns), "columns of the result computed together"),
        Knob("channel_blocks", sizes(found.out_blocks), "blocks of output channels computed together"),
        Knob(
            "loop_order", ("image", "channels"), "what is finished first: the image for some channels, or all channels"
        ),
        Knob("slots", (0, 2, 3, 4, 8), "most slots for one kind of data in an SRAM; 0 for as many as are of use"),
    )
    return Space(knobs, wrong)


def tiling(match: Match, config: VtaConfig) -> VtaTiling:
    """The schedule chosen for a region, the default where nothing is chosen."""
    own = match.choice
    return _tiling(own if set(KNOBS) <= set(own) else {**default(match, config), **own})


def _tiling(choice: Choice) -> VtaTiling:
    rows, columns, blocks, slots = (int(choice[name]) for name in KNOBS if name != "loop_order")
    return VtaTiling(rows, columns, blocks, choice["loop_order"] == "channels", slots)


def estimate(match: Match, config: VtaConfig) -> int:
    """Cycles of a region under its schedule."""
    return taken(shape(match.graph, config), tiling(match, config), config)[0]
