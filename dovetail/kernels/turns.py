"""How often each part of a kernel's loops runs. With the cycles of each part (`Core.kernels`) that is what the kernel
takes; `scripts/kernel_cycles.py` measures those.

The parts are those of the kernels as they are written: register blocks, pixels at borders and pixels inside, rows of
taps, ends of sums. Each writer counts its own (`registry.TURNS`). Layers that are made small instead (`generate_all`,
`little`) take longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from dovetail.ir.graph import Graph
from dovetail.ir.requantisation.pairs import sum_chains
from dovetail.ir.requantisation.products import table_products
from dovetail.kernels.kernel import ENDED, RAISED, CoreTraits, Turns, UnsupportedRegion, summed_turns, turns_of_family
from dovetail.kernels.pointwise import in_wide_registers
from dovetail.kernels.registry import ENDINGS, TURNS, InstructedWay, family_of, registered
from dovetail.kernels.scope import KernelScope, split
from dovetail.target.costs import kernel_cycles
from dovetail.target.pattern import Choice

UNKNOWN = {"element": 10.0, "result": 10.0, "product": 4.0, "tap": 4.0}
"""Core cycles of what takes its time in any kernel, where nobody measured the kernel."""
_APART = 1.05
"""A plain kernel must look so many times faster where such kernels were measured on another core alone."""
_BUNDLED = {
    **{"instruction": "rv32imc+dot4", "staged": "rv32imc+dot4", "straight": "xpulp"},
    **{"patches": "cortex-m4+dsp", "planes": "cortex-m4+dsp"},
}
"""Kernels with a core's own instructions, by family -> the bundled core that has such."""


def turns(graph: Graph, core: CoreTraits, choice: Choice = MappingProxyType({})) -> Turns:
    """How often the parts of a region's kernel run on a core, with what is chosen of its knobs."""
    return _turns(graph, settled(graph, core.chosen(choice)), choice)


def cycles(graph: Graph, core: CoreTraits, choice: Choice = MappingProxyType({})) -> float:
    """Cycles of a region's kernel on a core of which cycles are known: of its parts, as often as they run."""
    core = settled(graph, core.chosen(choice))
    return _cycles(_turns(graph, core, choice), core)


def settled(graph: Graph, core: CoreTraits) -> CoreTraits:
    """The core as a region is computed on it: without instructions of its own where they do not pay."""
    return _plain(core) if plain_wins(graph, core) else core


def plain_wins(graph: Graph, core: CoreTraits) -> str:
    """Both figures, as a sentence, where a region's plain kernel takes fewer cycles by estimate than one with the
    core's own instructions; empty where it does not."""
    own, plain = compared(graph, core)
    apart = core.rates is not None and core.rates is not core.plain
    if own <= plain * (_APART if apart else 1):
        return ""
    names = ", ".join([*(one.name for one in core.instructions), *([core.vectors.name] if core.vectors else [])])
    names = names or "blocks of pairs"
    return f"{names}: {own:,} cycles, the core's plain kernel {plain:,}: the plain kernel is taken"


def compared(graph: Graph, core: CoreTraits) -> tuple[int, int]:
    """Cycles of a region's kernel with a core's own instructions, and of the plain kernel; 0 of both where there are no
    such instructions for it, or nobody knows cycles."""
    return graph.once(("compared", core), lambda: _compared(graph, core))


def _compared(graph: Graph, core: CoreTraits) -> tuple[int, int]:
    if core == core.basic or core.plain is None:
        return 0, 0
    try:
        if _instructed(split(graph, core)) is None:
            return 0, 0
    except UnsupportedRegion:
        return 0, 0
    plain = _plain(core)
    return round(_cycles(_turns(graph, core), core)), round(_cycles(_turns(graph, plain), plain))


def _plain(core: CoreTraits) -> CoreTraits:
    return replace(core.basic, rates=core.plain)


def _cycles(counts: Turns, core: CoreTraits) -> float:
    families = {part.partition(".")[0] for part in counts}
    bundled = [_of_bundled(family) for family in families & _BUNDLED.keys() if core.rates is None]
    rates = core.rates or {part: rate for known in bundled or [core.plain or {}] for part, rate in known.items()}
    return sum(rate(part, rates) * count for part, count in counts.items())


@cache
def _of_bundled(family: str) -> Mapping[str, float]:
    """The cycles that stand in for those of a family of kernels that nobody measured on its core."""
    known = kernel_cycles(_BUNDLED[family])
    return {part.replace("instruction.", f"{family}."): rate for part, rate in known.items()}


def rate(part: str, rates: Mapping[str, float]) -> float:
    """Cycles of a part, by those that were measured. What is not among them takes none where others of its family are,
    and else what is taken for granted of any kernel."""
    if part in rates:
        return rates[part]
    family, _, name = part.partition(".")
    if family == "end":
        return UNKNOWN["element"]
    return 0.0 if any(known.startswith(f"{family}.") for known in rates) else UNKNOWN.get(name, 0.0)


def _turns(graph: Graph, core: CoreTraits, choice: Choice = MappingProxyType({})) -> Turns:
    return graph.once(("turns", core, *sorted(choice.items())), lambda: _counted(graph, core, choice))


def _counted(graph: Graph, core: CoreTraits, choice: Choice) -> Turns:
    elements = graph.types[graph.outputs[0]].elements
    try:
        region = replace(split(graph, core), choice=choice)
    except UnsupportedRegion:  # there is no such kernel; its operators then count one by one
        named = ((type(node.operator).__name__, graph.types[node.output].elements) for node in graph.nodes)
        return summed_turns(*({f"{name}.element": count} for name, count in named))
    if region.anchor is None and sum_chains(graph, region.tree):  # one line computes the sum, `add_bytes` or as it is
        return {"line.element": elements, "line.call": 1}
    if region.anchor is None and (found := in_wide_registers(region)):
        return {f"wide.{found[0]}": elements, "wide.channel": region.output_shape[-1], "wide.call": 1}
    counts: Turns = {"pointwise.element": elements, "pointwise.call": 1}
    if region.anchor is not None:
        try:
            counts = _of_anchor(region)
        except UnsupportedRegion:
            counts = _by_elements(region)
    endings: list[Turns] = []
    gates = {} if ENDED in counts or RAISED in counts else table_products(graph, region.tree)
    endings += [{"end.gate": graph.types[name].elements} for name in gates]
    one_product = {*gates, *(value for gate in gates.values() for value in gate.inner)}
    for node in () if ENDED in counts else region.tree[1:] if RAISED in counts else region.tree:
        if node.output in one_product:
            continue
        name = registered(ENDINGS, node.operator)
        part = name(graph, node) if name else type(node.operator).__name__
        endings.append({f"end.{part}": graph.types[node.output].elements})
    return summed_turns(counts, *endings)


def _of_anchor(region: KernelScope) -> Turns:
    """The loops of the anchor; raises Unsupported where there is no kernel of it."""
    count, own = registered(TURNS, region.node.operator), _instructed(region)
    return own or (count(region) if count else _by_elements(region))


def instructed_ways(scope: KernelScope) -> Iterator[InstructedWay]:
    """The ways to write a region's kernel with a core's own instructions, the preferred first."""
    if scope.core != scope.core.basic and scope.anchor is not None:
        yield from family_of(scope)[1].ways


def _instructed(region: KernelScope) -> Turns | None:
    """The loops of the anchor with the core's own instructions; None where there are none."""
    if region.anchor is None or not registered(TURNS, region.node.operator):
        return None
    for way in instructed_ways(region):
        try:
            return way.plan(replace(region)).turns()
        except UnsupportedRegion:
            pass
    return None


def _by_elements(region: KernelScope) -> Turns:
    """Kernels without a count of their own: elements read and made, by the width of what is read."""
    name = f"{type(region.node.operator).__name__}{region.source_dtype.bits if region.node.inputs else ''}"
    kinds = region.types
    operator, made = region.node.operator, region.result.elements
    read, products = kinds[0].elements if kinds else 0, operator.macs(kinds)
    if operator.in_place:  # it writes its second operand into its first
        made = read = kinds[1].elements
    counts = {"element": made, "read": read, "product": products, "call": 1}
    return turns_of_family(name, counts)
