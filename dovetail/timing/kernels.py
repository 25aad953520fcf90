"""Cycles of core kernels: how often the parts of their loops run, times what each part takes."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from dovetail.ir.graph import Graph
from dovetail.kernels import BYTES, WEIGHTS, core_traits, cycles, offered
from dovetail.kernels.kernel import CHANNELS
from dovetail.kernels.patches import pair_weights
from dovetail.target.description import Target
from dovetail.target.pattern import Choice
from dovetail.timing.clock import Issuer

Parts = tuple[tuple[Graph, int], ...]
"""The parts of a region, each with the number of its core."""
_COPIED = 0.9
"""Core cycles of each byte of a kernel that only copies, as `iss` shows it on RV32IMC."""


def core_cycles(graph: Graph, target: Target, choice: Choice = MappingProxyType({})) -> int:
    """Cycles of a region on core 0: of its kernel's parts, as often as they run with what is chosen of its knobs, and
    of waiting for its constants."""
    if all(node.operator.is_view for node in graph.nodes):
        return round(_COPIED * graph.types[graph.outputs[0]].nbytes)
    return round(cycles(graph, core_traits(target.core), choice)) + constant_waits(graph, target, choice)


def constant_waits(graph: Graph, target: Target, choice: Choice = MappingProxyType({})) -> int:
    """Cycles in which a core waits for a kernel's constants in a memory that is slower than it: once for every block of
    pixels, or once in all where its cache keeps them. Weights as pairs are twice their bytes. Waits for instructions,
    and for values there, are not known."""
    memory = target.memory(target.code)
    if not memory.waits or not graph.constants:
        return 0
    result, block = graph.types[graph.outputs[0]], offered(graph, core_traits(target.core)).block
    pixels = result.elements // max(1, result.shape[-1] if result.shape else 1)
    times = -(-pixels // block[0]) if block is not None else 1
    nbytes = sum(array.nbytes for array in graph.constants.values())
    if target.core.pairs is not None and choice.get(WEIGHTS) != BYTES:
        pairs = pair_weights(graph, core_traits(target.core))
        nbytes += 0 if pairs is None else pairs.nbytes
    return memory.wait_cycles(nbytes, max(1, times))


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
