"""The least cycles of a model on hardware, whatever the schedule: of its operators, without dead parts, and the target.

An operator is computed in one of several ways, or partly in each: by an engine, at the most that makes of its kind
(`Engine.best`), or by the cores, one multiply-accumulate per product and one load per word. Its weights, and the
network's inputs and outputs in it, go through a DMA once, through an engine's own port, or word by word through the
cores. Values between operators count nothing: computed in bands they can stay inside, however large they are.

Prices of the units' cycles that add up to one give a bound: all operators, each in the way that costs least at these
prices. (That is the dual of the linear program that shares the work out; any prices are right, the best are tried.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from dovetail.codegen.manifest import LayerEntry, OperatorWork
from dovetail.documented import document
from dovetail.ir.types import Array
from dovetail.kernels.scheduled.knobs import block_of, extents, is_product
from dovetail.program.ir import CORE
from dovetail.records import Record
from dovetail.sim.architecture import architecture_of, core_costs
from dovetail.target.chip import Core
from dovetail.target.description import Target
from dovetail.target.engine import Best, Engine, Macs

Way = Mapping[str, float]
"""Unit -> the cycles it works."""
_TRIED = 64
"""Operators whose ways are made equally dear to find prices, those with the most products."""


class Bound(Record):
    """The least cycles of some work and what sets them."""

    cycles: float
    """Least number of cycles."""
    by: str
    """Reason for the bound, as a sentence; empty if nothing is known."""


NOTHING = Bound(0, "")


def core_product(cores: Sequence[Core]) -> float:
    """Fewest cycles of a multiply-accumulate on these cores together."""
    return 1 / sum(1 / _product(core) for core in cores)


def core_word(cores: Sequence[Core]) -> float:
    """Fewest cycles in which some cores together load or store a word of 4 bytes."""
    return 1 / sum(1 / _word(core) for core in cores)


def _word(core: Core) -> float:
    """One core's."""
    cycles = architecture_of(core.isa).word(core_costs(core.isa, core.costs, core.isa))
    return min(cycles, 4 / core.vectors.bytes_per_cycle) if core.vectors else float(cycles)


def core_cycles(cores: Sequence[Core], products: float, nbytes: float) -> float:
    """Fewest cycles of a core for some products and for some bytes that are loaded or stored. Loads and products
    take turns; on cores with vectors they overlap."""
    parts = products * core_product(cores), nbytes / 4 * core_word(cores)
    return max(parts) if any(core.vectors for core in cores) else sum(parts)


def _product(core: Core) -> float:
    """One core's: by the widest of its own instructions that adds products, one cycle each, or its basic ones. What is
    all taps of a block is a loop of those instructions and no instruction."""
    basic = architecture_of(core.isa).product(core_costs(core.isa, core.costs, core.isa))
    single = [one for one in core.instructions if is_product(one) and block_of(one) is None]
    widths = [group * taps for group, taps in (extents(one) for one in single)]
    vectors = [1 / core.vectors.per_cycle] if core.vectors else []
    return float(min([basic, *vectors, *(1 / width for width in widths)]))


def best(engine: Engine, products: Macs) -> Best:
    """The most an engine makes of a kind of operator."""
    return engine.best(products) if engine.best else Best(engine.ideal_macs_per_cycle)


def model_bound(work: Sequence[OperatorWork], target: Target) -> Bound:
    """The least cycles of some operators, nothing known of cores nobody counts."""
    ways = [] if target.core.is_host else [list(_ways(one, target)) for one in work]
    if not ways:
        return NOTHING
    units = list(dict.fromkeys(unit for some in ways for way in some for unit in way))
    most = max(map(len, ways))
    times = np.array(
        [[[way.get(unit, 0.0) for unit in units] for way in (some * most)[:most]] for some in ways]
    )  # operators, ways, units
    largest = sorted(range(len(work)), key=lambda one: -sum(each.count for each in work[one].products))[:_TRIED]
    prices = np.array([*np.eye(len(units)), *(each for one in largest for each in _prices(ways[one], units))])
    costs = prices @ times.transpose(0, 2, 1)  # operators, prices, ways
    least = costs.min(axis=2).sum(axis=0)
    at = int(least.argmax())
    return Bound(float(least[at]), _by(units[int(prices[at].argmax())], target))


def layer_bounds(layers: Sequence[LayerEntry], work: Sequence[OperatorWork], target: Target) -> list[Bound]:
    """The least cycles of each layer, by the model's operators in it."""
    return [model_bound(own, target) for own in work_of(layers, work)]


def work_of(layers: Sequence[LayerEntry], work: Sequence[OperatorWork]) -> list[list[OperatorWork]]:
    """The model's operators in each layer; one that is in several layers is shared by their multiply-accumulates."""
    named, macs = {one.name: one for one in work}, Counter[str]()
    for layer in layers:
        macs.update(dict.fromkeys(layer.operators, layer.macs))
    return [
        [_part(named[name], layer.macs, macs[name]) for name in layer.operators if name in named] for layer in layers
    ]


def _part(work: OperatorWork, macs: int, of: int) -> OperatorWork:
    """The part of an operator that a layer with so many of its multiply-accumulates computes; all where it has none."""
    if macs == of:
        return work
    products = tuple(replace(one, count=one.count * macs // of) for one in work.products)
    sizes = (each * macs // of for each in (work.weights, work.read, work.written))
    return OperatorWork(work.name, products, *sizes)


def _ways(work: OperatorWork, target: Target) -> Iterator[Way]:
    """The ways an operator is computed."""
    word = core_word(target.cores)
    yield {CORE: core_cycles(target.cores, sum(each.count for each in work.products), work.moved)}
    for engine in target.engines:
        rates = [best(engine, each).macs_per_cycle for each in work.products]
        if not all(rates):
            continue
        cycles = sum(each.count / rate for each, rate in zip(work.products, rates, strict=True))
        in_place, dma = target.reads_constants(engine), target.dma_of(engine)
        ends = (0, 0) if target.works_in_place(engine) else (work.read, work.written)
        loaded, brought = ends[0] + (0 if in_place else work.weights), sum(ends) + (0 if in_place else work.weights)
        way = {engine.name: cycles}
        if in_place and engine.bytes_per_cycle:
            way[f"the port of {engine.name}"] = (work.moved - brought) / engine.bytes_per_cycle
        if dma is not None:
            yield {**way, dma.name: brought / dma.bytes_per_cycle}
        yield {**way, CORE: (loaded + brought) / 4 * word}  # what is loaded is stored


def _prices(ways: Sequence[Way], units: Sequence[str]) -> Iterator[Array]:
    """Prices at which a unit of each way costs the same."""
    for chosen in product(*([pair for pair in way.items() if pair[1]] for way in ways)):
        price = np.zeros(len(units))
        for unit, cycles in chosen:
            price[units.index(unit)] = max(price[units.index(unit)], 1 / cycles)
        yield price / price.sum()


def _by(unit: str, target: Target) -> str:
    """The dearest unit, as a sentence."""
    if unit == CORE:
        return "products and words of the cores"
    if unit in {engine.name for engine in target.engines}:
        return f"products on {unit}"
    return f"weights, inputs and outputs through {unit}"


document(__name__)
