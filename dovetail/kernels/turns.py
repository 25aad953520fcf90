"""How often each part of a kernel's loops runs. With the cycles of each part (`Core.kernels`) that is what the kernel
takes; `scripts/kernel_cycles.py` measures those.

The parts are those of the kernels as they are written: register blocks, pixels at borders and pixels inside, rows of
taps, ends of sums. Each writer counts its own (`registry.TURNS`). Layers that are made small instead (`generate_all`,
`little`) take longer.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from dovetail.ir.graph import Graph
from dovetail.ir.requantisation.pairs import sum_chains
from dovetail.kernels.core import instructed_ways
from dovetail.kernels.kernel import RAISED, CoreTraits, Turns, UnsupportedRegion, summed_turns, turns_of_family
from dovetail.kernels.registry import ENDINGS, TURNS, registered
from dovetail.kernels.scope import KernelScope, split
from dovetail.target.pattern import Choice


def turns(graph: Graph, core: CoreTraits, choice: Choice = MappingProxyType({})) -> Turns:
    """How often the parts of a region's kernel run on a core, with what is chosen of its knobs."""
    elements = graph.types[graph.outputs[0]].elements
    try:
        region = replace(split(graph, core), choice=choice)
    except UnsupportedRegion:  # there is no such kernel; its operators then count one by one
        named = ((type(node.operator).__name__, graph.types[node.output].elements) for node in graph.nodes)
        return summed_turns(*({f"{name}.element": count} for name, count in named))
    if region.anchor is None and sum_chains(graph, region.tree):  # one line computes the sum, `add_bytes` or as it is
        return {"line.element": elements, "line.call": 1}
    counts: Turns = {"pointwise.element": elements, "pointwise.call": 1}
    if region.anchor is not None:
        try:
            counts = _of_anchor(region)
        except UnsupportedRegion:
            counts = _by_elements(region)
    endings = []
    for node in region.tree[1:] if RAISED in counts else region.tree:
        name = registered(ENDINGS, node.operator)
        part = name(graph, node) if name else type(node.operator).__name__
        endings.append({f"end.{part}": graph.types[node.output].elements})
    return summed_turns(counts, *endings)


def _of_anchor(region: KernelScope) -> Turns:
    """The loops of the anchor; raises Unsupported where there is no kernel of it."""
    count = registered(TURNS, region.node.operator)
    for way in instructed_ways(region) if count else ():
        try:
            return way.plan(replace(region)).turns()
        except UnsupportedRegion:
            pass
    return count(region) if count else _by_elements(region)


def _by_elements(region: KernelScope) -> Turns:
    """Kernels without a count of their own: elements read and made, by the width of what is read."""
    name = f"{type(region.node.operator).__name__}{region.source_dtype.bits if region.node.inputs else ''}"
    kinds = region.types
    read, products = kinds[0].elements if kinds else 0, region.node.operator.macs(kinds)
    counts = {"element": region.result.elements, "read": read, "product": products, "call": 1}
    return turns_of_family(name, counts)
