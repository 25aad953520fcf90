"""Lower bounds on the cycles of a layer, whatever is chosen: by the busy cycles of engine and DMA in the estimates of
its choices, or by the products and words of a kernel on cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.bounds import core_product, core_word
from dovetail.codegen.emit.plan_file import least_work
from dovetail.ir.graph import Node
from dovetail.ir.types import DType, TensorType
from dovetail.kernels import core_traits, offered
from dovetail.schedule.region import Region
from dovetail.schedule.tiles.clock import Estimate
from dovetail.target.description import Target


def engine_floor(region: Region, estimates: Sequence[Estimate]) -> int | None:
    """The floor of a layer by the estimates of its choices on the engine, nothing exposed, nothing waited for; or the
    offload's own."""
    if not estimates or region.offload is None or region.match is None:
        return None
    if region.offload.floor is not None:
        return region.offload.floor(region.match)
    return min(max(one.engine, one.copying) for one in estimates)


def core_floor(region: Region, target: Target) -> int | None:
    """The floor of a layer of sums of products on all cores, in cycles of core 0: its products inside the image, by the
    widest instruction; the loads of their operands in the block of sums that needs fewest; a product and a shift for
    every element that is requantised, as long as a load each; a store for every word of the result. None for other
    layers."""
    block = offered(region.graph, core_traits(target.core)).block
    if block is None:
        return None
    products, _ = least_work(region.graph)
    (pixels, channels, taps), cores = block, target.cores[:1]
    graph, types = region.graph, region.graph.types
    words = products * (pixels + channels) / (pixels * channels * taps) + types[region.output].nbytes / 4
    words += sum(2 * types[node.output].elements for node in graph.nodes if _is_requantised(node, types))
    speed = sum(core.speed for core in target.cores)
    return round((products * core_product(cores) + words * core_word(cores)) / speed)


def _is_requantised(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether a node multiplies and shifts 32-bit sums by two parameters."""
    return len(node.inputs) == 3 and all(types[name].dtype is DType.INT32 for name in (*node.inputs, node.output))
