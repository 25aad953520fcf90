"""What is tuned: the distinct layers of a network, each as a network of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail.errors import DovetailError
from dovetail.graph.graph import Graph
from dovetail.partition.regions import Region, partition
from dovetail.plan import Plan
from dovetail.target.description import Target


@dataclass(frozen=True)
class Layer:
    """One kind of layer: all regions of the network with the same computation, between the same memories."""

    key: str
    """Names it in the log: the signature, and the ends that lie in the engine's memory."""
    signature: str
    graph: Graph
    """The first such region as a network of its own, weights kept."""
    near: tuple[str, ...]
    """Inputs and outputs of `graph` that lie in the engine's memory in the network's default plan."""
    names: tuple[str, ...]
    """The regions, in the network's order."""


def signature(graph: Graph) -> str:
    """A digest of operators, attributes, types and connections; neither weights nor names change it."""
    numbers = {name: f"i{index}" for index, name in enumerate(graph.inputs)}
    lines = [f"{name} {graph.types[value]}" for value, name in numbers.items()]
    for index, node in enumerate(graph.nodes):
        for value in node.inputs:
            if value not in numbers:
                numbers[value] = f"c{len(numbers)}"
                lines.append(f"{numbers[value]} {graph.types[value]}")
        numbers[node.output] = f"n{index}"
        operands = " ".join(numbers[value] for value in node.inputs)
        lines.append(f"{numbers[node.output]} {graph.types[node.output]} {node.operator!r} {operands}")
    lines.append(" ".join(numbers[value] for value in graph.outputs))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def region_alone(graph: Graph, target: Target) -> Region:
    """The one region of a layer's own network.

    Raises:
        DovetailError: by itself it is not computed as one region of an engine.
    """
    regions = partition(graph, target)
    if len(regions) != 1 or regions[0].engine is None:
        raise DovetailError("by itself this layer is not one region of an engine", where=graph.name,
                            hint="tune the whole network instead, or another layer")
    return regions[0]


def distinct_layers(regions: Sequence[Region], planned: Plan, target: Target) -> tuple[Layer, ...]:
    """The layers that have something to choose, each kind once, in the network's order.

    Args:
        regions: the network's, nothing chosen.
        planned: its default plan, which says in which memory values lie.
        target: the machine.
    """
    found: dict[str, Layer] = {}
    for region in regions:
        if region.engine is None or region.offload is None:
            continue
        alone = replace(region.graph, name=region.name)
        mark = signature(alone)
        ends = (*alone.inputs, *alone.outputs)
        flags = "".join("n" if _memory(planned, value) == region.engine.memory else "f" for value in ends)
        key = f"{mark}-{flags}"
        if key in found:
            found[key] = replace(found[key], names=(*found[key].names, region.name))
        elif _stands_alone(alone, region, target):
            near = tuple(value for value, flag in zip(ends, flags, strict=True) if flag == "n")
            found[key] = Layer(key, mark, alone, near, (region.name,))
    return tuple(found.values())


def _stands_alone(graph: Graph, region: Region, target: Target) -> bool:
    """Whether the region by itself goes to the same offload as in the network."""
    assert region.offload is not None
    try:
        alone = region_alone(graph, target)
    except DovetailError:
        return False
    return alone.offload is not None and alone.offload.name == region.offload.name


def _memory(planned: Plan, value: str) -> str:
    program = planned.program
    return program.buffers[program.values[value].buffer].memory
