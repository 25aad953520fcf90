"""Cycles of core kernels: how often the parts of their loops run, times what each part takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.kernels import core_traits, offered, turns
from dovetail.kernels.kernel import CHANNELS
from dovetail.target.costs import kernel_cycles
from dovetail.target.description import Target
from dovetail.target.pattern import Choice
from dovetail.timing.clock import Issuer

Parts = tuple[tuple[Graph, int], ...]
"""The parts of a region, each with the number of its core."""
UNKNOWN = {"element": 10.0, "result": 10.0, "product": 4.0, "tap": 4.0}
"""Core cycles of what takes its time in any kernel, where nobody measured the kernel."""


def rate(part: str, rates: Mapping[str, float]) -> float:
    """Cycles of a part, by those that were measured. What is not among them takes none where others of its family are,
    and else what is taken for granted of any kernel."""
    if part in rates:
        return rates[part]
    family, _, name = part.partition(".")
    if family == "end":
        return UNKNOWN["element"]
    return 0.0 if any(known.startswith(f"{family}.") for known in rates) else UNKNOWN.get(name, 0.0)


def core_cycles(graph: Graph, target: Target, choice: Choice = MappingProxyType({})) -> int:
    """Cycles of a region on core 0: of its kernel's parts, as often as they run with what is chosen of its knobs.

    A core with instructions of its own, but no `kernels`, counts as one without.
    """
    core, traits = target.core, core_traits(target.core)
    if core.kernels is None:
        traits = replace(traits, instructions=())
    rates = kernel_cycles(core.isa) if core.kernels is None else core.kernels
    counts = turns(graph, traits, choice)
    return round(sum(rate(part, rates) * count for part, count in counts.items()))


def shared_cycles(parts: Parts, target: Target, choice: Choice) -> int:
    """Cycles until core 0 knows that the last core has ended its part; workers are started one after the other."""
    issuer, ends = Issuer(target.core.statements), list[int]()
    for graph, core in parts:
        cycles = core_cycles(graph, target, _with_lanes(graph, parts, target, choice)) / target.cores[core].speed
        if core:
            ends.append(issuer.start_core(round(cycles)))
        else:
            issuer.now += round(cycles)
    for end in ends:
        issuer.wait_launch(end)
    return issuer.now


def _with_lanes(graph: Graph, parts: Parts, target: Target, choice: Choice) -> Choice:
    """The choice for a part's kernel: parts of the same weights read them in blocks as the largest wants them."""
    if choice or len(parts) == 1:
        return choice
    largest = max((other for other, _ in parts), key=lambda other: other.types[other.outputs[0]].elements)
    if graph is largest or any(
        not np.array_equal(array, largest.constants[name]) for name, array in graph.constants.items()
    ):
        return choice
    lanes = offered(largest, core_traits(target.core)).default.get(CHANNELS)
    return {} if lanes is None else {CHANNELS: lanes}
