"""What may be chosen about a core kernel: the knobs of whatever writes it, and what it takes where nothing is said."""

from __future__ import annotations

from dovetail.ir.graph import Graph
from dovetail.ir.operators.linear import Conv2d, DepthwiseConv2d, FullyConnected
from dovetail.ir.types import DType
from dovetail.kernels.kernel import CoreTraits, KernelChoices, KernelScope, UnsupportedRegion
from dovetail.kernels.patches import patches_of
from dovetail.kernels.planes import planes_of
from dovetail.kernels.region import OFFERED, RegionParts, split
from dovetail.kernels.scheduled.write import knobs_of
from dovetail.kernels.sums import products_of
from dovetail.target.pattern import Space

NOTHING = KernelChoices(Space(()), {})


def offered(graph: Graph, core: CoreTraits) -> KernelChoices:
    """What may be chosen about a region's kernel on a core that makes it for speed; no knobs where nothing may.

    What is offered can be written: blocks fit registers and stack.
    """
    try:
        region = split(graph)
        kind = type(region.anchor.operator) if region.anchor else None
        if kind is None or region.type(0).dtype is DType.FLOAT32:
            return NOTHING
        if core.instructions and kind in (Conv2d, FullyConnected, DepthwiseConv2d):
            return _with_instructions(region, core)
        return _written_out(region, core)
    except UnsupportedRegion:
        return NOTHING


def _written_out(region: RegionParts, core: CoreTraits) -> KernelChoices:
    ask = OFFERED.get(type(region.node.operator))
    return (ask(region, core) if ask else None) or NOTHING


def _with_instructions(region: RegionParts, core: CoreTraits) -> KernelChoices:
    """As the kernels of a core with instructions are tried one after the other."""
    scope = KernelScope(region.graph, core.accumulators, room=core.room, functions=core.functions)
    if isinstance(region.node.operator, DepthwiseConv2d):
        try:
            planes_of(region, scope, products_of(region, scope, merged=False), core.instructions)
        except UnsupportedRegion:
            return _written_out(region, core)
        return NOTHING
    products = products_of(region, scope)
    try:
        return patches_of(region, scope, products, core).offered
    except UnsupportedRegion:
        pass
    try:
        knobs_of(region, products, core)
    except UnsupportedRegion:
        return _written_out(region, core)
    return NOTHING
