"""The memory each value lies in, and how long values stay there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dovetail.program.ir import CORE
from dovetail.records import Record
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.region import Homes, LaidRegion, Region
from dovetail.target.description import Target


def first_homes(laid: LayoutPlan, target: Target, near_ends: Collection[str]) -> dict[str, str]:
    """Inputs and outputs in the memory of values; the rest, and the ends given, in the engines' memory."""
    graph, regions = laid.graph, laid.regions
    users: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        for name in dict.fromkeys((region.output, *region.graph.inputs)):
            users.setdefault(name, []).append(index)
    homes = {name: _near(name, regions, users, target) if name in near_ends else target.values for name in graph.inputs}
    for region in regions:
        if region.is_view and region.output not in graph.outputs:
            homes[region.output] = homes[region.graph.inputs[0]]
        else:
            is_end = region.output in graph.outputs and region.output not in near_ends
            homes[region.output] = target.values if is_end else _near(region.output, regions, users, target)
    homes |= {value: homes[output] for value, output in seen_as_outputs(laid).items()}
    for name, inside in laid.inside.items():  # a part lies where the whole does
        homes |= dict.fromkeys(same_bytes_as(name, regions), homes[inside.outer])
    private = {memory.name for memory in target.memories if not memory.is_reached_by(CORE)}
    shared = [region for region in regions if not region.is_view and not _is_of_engine(region, target)]
    for name in [*graph.inputs, *graph.outputs, *(v for r in shared for v in (*r.graph.inputs, r.output))]:
        if homes[name] in private:  # its maker or a reader does not reach it there
            homes |= dict.fromkeys(_together_with(name, laid), target.values)
    return homes


def seen_as_outputs(laid: LayoutPlan) -> dict[str, str]:
    """Computed values -> the output, or next contents of a state, that is a view of them and has their bytes."""
    made = {region.output for region in laid.regions if not region.is_idle} - {*laid.graph.outputs, *laid.inside}
    views = ((region.graph.inputs[0], region.output) for region in laid.regions if region.is_view)
    return {
        value: output
        for value, output in views
        if value in made and output in laid.graph.outputs and not {value, output} & laid.layouts.keys()
    }


def _is_of_engine(region: Region, target: Target) -> bool:
    """True for what engines and their own DMAs do by themselves, in memories the core does not reach."""
    return bool(region.shares) or any(one.dma and one.dma.name == region.copied_by for one in target.engines)


def _together_with(name: str, laid: LayoutPlan) -> set[str]:
    """Every value that lies with a value: other names for it, what it lies in, and what else lies in that."""
    views = {region.output: region.graph.inputs[0] for region in laid.regions if region.is_view}
    while name in views:
        name = views[name]
    names = same_bytes_as(name, laid.regions)
    outer = {laid.inside[value].outer for value in names if value in laid.inside} | names
    inner = {value for value, place in laid.inside.items() if place.outer in outer}
    return {other for value in outer | inner for other in same_bytes_as(value, laid.regions)}


def same_bytes_as(value: str, regions: Sequence[Region]) -> set[str]:
    """A value and every other name for the same bytes."""
    names = {value}
    for region in regions:
        if region.is_view and region.graph.inputs[0] in names:
            names.add(region.output)
    return names


def _near(value: str, regions: Sequence[Region], users: Mapping[str, Sequence[int]], target: Target) -> str:
    """The engines' memory a value lies in: that of most engines that make or read it, the maker's if it is a draw;
    of the next engine where none does; that of values where no engine computes anything. `users` are the places of the
    regions that make or read each value."""
    near = [regions[index] for index in users.get(value, ())]
    makers = [region for region in near if value == region.output]
    readers = [region for region in near if value in region.graph.inputs]
    memories = [share.engine.memory for region in (*makers, *readers) for share in region.shares]
    if memories:
        return max(dict.fromkeys(memories), key=memories.count)
    if not target.engines:
        return target.values
    after = users.get(value, (0,))[0]
    following = (r.engine.memory for r in (*regions[after:], *reversed(regions[:after])) if r.engine)
    return next(following, target.values)


class ValueLifetimes(Record):
    """The places until which regions' results, and the network's inputs, are read."""

    laid: LayoutPlan
    results: tuple[tuple[LaidRegion, ...], ...]
    """At each place, in order, the regions whose results are there or are made and will still be read, under whatever
    name; no views."""
    ends: Mapping[str, int]
    """For every value no region computes, the last place that reads it."""

    @classmethod
    def of(cls, laid: LayoutPlan) -> ValueLifetimes:
        """The lifetimes of a network's values."""
        named: dict[str, str] = {}
        last: dict[str, int] = {}
        for index, region in enumerate(laid.regions):
            for name in region.graph.inputs:
                last[named.get(name, name)] = index
            source = region.graph.inputs[0] if region.is_view else region.output
            named[region.output] = named.get(source, source)
        alive: list[list[LaidRegion]] = [[] for _ in laid.regions]
        for index, region in enumerate(laid.regions):
            for place in range(index, last.get(region.output, index) + 1) if not region.is_view else ():
                alive[place].append(region)
        read = {name: index for index, region in enumerate(laid.regions) for name in region.graph.inputs}
        ends = {name: index for name, index in read.items() if name not in named}
        return cls(laid, tuple(map(tuple, alive)), ends)

    def nbytes(self, position: int, memory: str, homes: Homes) -> int:
        """Bytes of a memory that values hold while the region at a position runs."""
        ends = [name for name, last in self.ends.items() if last >= position and homes[name] == memory]
        results = [region.output for region in self.resident(position, memory, homes)]
        return sum(self.laid.nbytes(name) for name in (*results, *ends))

    def resident(self, position: int, memory: str, homes: Homes) -> list[LaidRegion]:
        """The regions whose results lie in a memory while the region at a position runs, its own included."""
        return [region for region in self.results[position] if homes[region.output] == memory]
