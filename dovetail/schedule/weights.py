"""Weights of core kernels: as pairs, which are faster and take twice the bytes, or as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.ir.graph import Graph
from dovetail.kernels import BYTES, WEIGHTS, core_traits
from dovetail.kernels.patches import pair_weights
from dovetail.program.loops import digest
from dovetail.schedule.region import AssignedRegion
from dovetail.target.description import Target
from dovetail.timing.kernels import core_cycles

_OTHERS = 8
"""One part in so many of the memory stays free of pairs: the user's own code lies there too."""

_CLEARLY = 0.9
"""Share of the cycles with pairs that bytes must stay below."""


def with_narrow_weights(
    regions: Sequence[AssignedRegion], target: Target, reserved: Mapping[str, int]
) -> tuple[AssignedRegion, ...]:
    """The regions, those marked whose weights stay bytes because the memory does not hold them all as pairs.

    Layers with the most multiply-accumulates for each weight become pairs first, of equal ones the largest.

    Args:
        regions: the network, as it is placed.
        target: the machine.
        reserved: bytes of each memory that are taken, weights once included.
    """
    if target.core.pairs is None:
        return tuple(regions)
    core = core_traits(target.core)
    groups: dict[bytes, list[AssignedRegion]] = {}  # parts of a layer have the same weights, which are there once
    sizes: dict[bytes, int] = {}
    for region in regions:
        if not region.shares and (weights := pair_weights(region.graph, core)) is not None:
            groups.setdefault(key := digest(weights), []).append(region)
            sizes[key] = weights.nbytes
    size = target.memory(target.code).size
    room = size - size // _OTHERS - reserved[target.code]
    if target.code == target.values:
        room -= max((_values(region.graph) for region in regions), default=0)
    macs = {key: sum(region.macs for region in parts) for key, parts in groups.items()}
    narrow = set[str]()
    if target.memory(target.code).waits:
        slower = {key for key, parts in groups.items() if not any(_gains(region, target) for region in parts)}
        narrow |= {region.name for key in slower for region in groups.pop(key)}
    for key in sorted(groups, key=lambda key: (-macs[key] / sizes[key], -sizes[key], groups[key][0].name)):
        if sizes[key] <= room:
            room -= sizes[key]
        else:
            narrow |= {region.name for region in groups[key]}
    return tuple(
        replace(region, choice={**region.choice, WEIGHTS: BYTES}) if region.name in narrow else region
        for region in regions
    )


def _gains(region: AssignedRegion, target: Target) -> bool:
    """Whether bytes, which are waited for half as long, are not clearly faster than pairs by estimate."""
    as_bytes = core_cycles(region.graph, target, {**region.choice, WEIGHTS: BYTES})
    return as_bytes > _CLEARLY * core_cycles(region.graph, target, region.choice)


def _values(graph: Graph) -> int:
    """Bytes of a region's operands and result."""
    return sum(graph.types[name].nbytes for name in (*graph.inputs, *graph.outputs))


def narrow_weights_note(regions: Sequence[AssignedRegion], target: Target) -> str:
    """A sentence with the layers whose weights stay bytes for want of room; empty if there are none."""
    names = ", ".join(region.name for region in regions if region.choice.get(WEIGHTS) == BYTES)
    what = f"weights of {names} stay bytes: as pairs they do not fit {target.code}, or have to be waited for too long"
    return f"{target.name}: {what}" if names else ""
