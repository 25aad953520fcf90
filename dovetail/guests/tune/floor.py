"""Lower bounds on the cycles of a layer, whatever is chosen, and of a network, in whatever order its layers come.

A layer's bound is the busy cycles of its engine, or of the DMA, by the target's own formulas. In a network each unit
does one thing after the other, and a layer whose elements each read all of an operand begins when that is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.bounds import core_product, core_word
from dovetail.codegen.emit.plan_file import least_work
from dovetail.ir.crop import parts
from dovetail.ir.graph import Node
from dovetail.ir.types import Box, DType, TensorType, full_box
from dovetail.kernels import core_traits, offered
from dovetail.program.ir import CORE
from dovetail.schedule.cores import cores_cycles
from dovetail.schedule.region import Region
from dovetail.target.description import Target

_SURE = 0.75
"""Share of a core kernel's estimated cycles that it surely takes: no estimate is so much too high."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Cycles no choice of a layer is below, by the target's formulas: nothing is exposed, nothing waited for."""

    engine: int
    """Least busy cycles of the engine, or of the core that computes it."""
    copying: int
    """Least busy cycles of the DMA."""
    cycles: int
    """Least of the longer of the two, over all choices; or the offload's own floor."""
    fetching: int = 0
    """Least busy cycles of the DMA for constants alone."""


def network_floor(regions: Sequence[Region], floors: Mapping[str, Floor], target: Target) -> int:
    """Cycles below which no choices and no order bring a network; 0 where nothing is known.

    From when a region may begin at all, it and whatever may not begin earlier take as long as the busiest unit has work
    for them: engines and the core, with its kernels as they are. A DMA, which may always be ahead, has the constants of
    all to fetch; values may lie where they are used, or come from a relayout of the core's.
    An engine that holds one launch idles while it is programmed. Layers stay on their engines; nothing is counted for
    one that computes several side by side.

    Args:
        regions: the network, in execution order.
        floors: of those that can be tuned, by name; nothing is counted for other regions of engines.
        target: the machine.
    """
    if not floors:
        return 0
    work = [_work(region, floors.get(region.name), target) for region in regions]
    makers = {region.output: index for index, region in enumerate(regions)}
    begins: list[int] = []
    before: list[set[int]] = []
    for region in regions:
        own = {value: makers[value] for value in region.graph.inputs if value in makers}
        before.append(set(own.values()).union(*(before[maker] for maker in own.values())))
        whole = _read_whole(region)
        waits = (_end(work, begins, {maker, *before[maker]}) for value, maker in own.items() if value in whole)
        begins.append(max((*waits, *(begins[maker] for maker in own.values())), default=0))
    fetching = sum(floors[region.name].fetching for region in regions if region.name in floors)
    return max(fetching, _end(work, begins, set(range(len(regions))))) + target.core.statements.around


def core_floor(region: Region, target: Target) -> Floor | None:
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
    cycles = round((products * core_product(cores) + words * core_word(cores)) / speed)
    return Floor(cycles, 0, cycles)


def _is_requantised(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether a node multiplies and shifts 32-bit sums by two parameters."""
    return len(node.inputs) == 3 and all(types[name].dtype is DType.INT32 for name in (*node.inputs, node.output))


def _work(region: Region, floor: Floor | None, target: Target) -> tuple[str, int]:
    """The unit that computes a region, and its least cycles."""
    if region.engine is not None:
        idle = region.engine.launching if region.engine.queue == 1 and not region.engine.stream else 0
        if floor is None or len(region.shares) > 1 or region.engine.joint is not None:
            return region.engine.name, 0
        return region.engine.name, floor.engine + idle
    if not region.is_kernel or target.workers:
        return CORE, 0
    return CORE, floor.engine if floor is not None else int(_SURE * cores_cycles(region.graph, target))


def _end(work: Sequence[tuple[str, int]], begins: Sequence[int], done: set[int]) -> int:
    """The earliest time at which some regions can all have been computed: of the regions that begin at a time or later
    none has been begun before."""
    end = 0
    for time in {begins[index] for index in done}:
        busy = Counter[str]()
        for unit, cycles in (work[index] for index in done if begins[index] >= time):
            busy[unit] += cycles
        end = max(end, time + max(busy.values(), default=0))
    return end


class _NoContainmentError(Exception):
    """Two boxes of which none holds the other."""


def _read_whole(region: Region) -> set[str]:
    """The operands that every element of the result reads whole: its first and its last one do, or the first and the
    last row where only rows are computed. All operands of a layer that is only computed as a whole."""
    types = region.graph.types
    shape, whole = types[region.output].shape, set(region.graph.inputs)
    for last in (False, True) if all(shape) else ():
        ends = tuple((size - 1, size) if last else (0, 1) for size in shape)
        for box in (ends, (*ends[:-1], *full_box(shape[-1:]))):
            try:
                _, boxes = parts(region.graph, {region.output: box}, join=_larger)
            except _NoContainmentError:
                return set()
            except ValueError:
                continue
            whole = {value for value in whole if boxes.get(value) == full_box(types[value].shape)}
            break
    return whole


def _larger(_: str, a: Box, b: Box) -> Box:
    """The one of two boxes that holds the other; raises _NoContainmentError where none does."""
    both = tuple((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b, strict=True))
    if both not in (a, b):
        raise _NoContainmentError
    return both
