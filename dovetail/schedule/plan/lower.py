"""Turns regions into statements: calls on the core, copies and launches for the engines, in issue order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from dovetail.program.ir import (
    CORE,
    Begin,
    Call,
    Copy,
    Queue,
    Role,
    Statement,
    View,
    dense_view,
    reads,
    writes,
)
from dovetail.schedule.cores import copies, split, workers_first
from dovetail.schedule.layout import LayoutPlan
from dovetail.schedule.plan.homes import seen_as_outputs
from dovetail.schedule.plan.lowered import LayerStatements, LoweredNetwork, LoweringCache
from dovetail.schedule.plan.on_engine import EngineLowering
from dovetail.schedule.region import CoreGroup, Homes, LaidRegion, Slot
from dovetail.schedule.tiles.tiling import CompleteTiling
from dovetail.target.description import Target


def in_turn(slots: Sequence[Slot | None], layers: Sequence[LayerStatements]) -> list[Statement]:
    """All statements, each stretch of one layer's behind a `Begin`.

    Args:
        slots: when each layer is scheduled; one without a slot comes right before the next one that has one.
        layers: what belongs to each. A layer's head and first tile come when it is issued, further tiles spread evenly
            over the time it takes, its tail at the end.
    """
    turns: list[tuple[float, int, int, list[Statement]]] = []
    for layer, (parts, when) in enumerate(zip(layers, _times(slots), strict=True)):
        first = parts.rest[0] if parts.rest else []
        steps = [[*parts.early, *parts.head, *first], *parts.rest[1:]]
        for number, step in enumerate(steps):
            spread = when.begin + (when.end - when.begin) * number / len(steps)
            turns.append((spread if number else when.issue, layer, number, step))
        turns.append((when.end, layer, len(steps), parts.tail))
    ordered: list[Statement] = []
    current = -1
    for _, layer, number, step in sorted(turns, key=lambda turn: turn[:3]):
        if layer != current and (step or not number):
            ordered.append(Begin(layer))
            current = layer
        ordered += step
    return ordered


def _times(slots: Sequence[Slot | None]) -> list[Slot]:
    """The time of every layer, no layer issued before the one ahead of it; all 0 where nothing is scheduled."""
    times: list[Slot] = []
    last = max((slot.end for slot in slots if slot), default=0)
    following = Slot(last, last, last)
    for slot in reversed(slots):
        following = slot or Slot(following.issue, following.issue, following.issue)
        times.append(following)
    return times[::-1]


def lower(
    laid: LayoutPlan,
    tilings: Mapping[str, CompleteTiling],
    target: Target,
    homes: Homes,
    early: frozenset[str],
    cores: Mapping[str, CoreGroup],
    known: LoweringCache | None = None,
) -> LoweredNetwork:
    """Statements in issue order, without waits.

    Args:
        laid: the network and how its values lie.
        tilings: by name of the region, or part of one.
        target: the machine.
        homes: memory of every computed value and input.
        early: names of the regions whose constants are fetched while the region before is computed.
        cores: the group of cores that computes each value, in a pipeline; empty without one.
        known: of the same network and target, from other tilings, homes and fetches; new parts are added.
    """
    graph, regions = laid.graph, laid.regions
    ends = {} if cores else {a: b for a, b in seen_as_outputs(laid).items() if homes[a] == homes[b]}
    context = LoweredNetwork(laid, target, homes, cores, ends, known or LoweringCache())
    names = {name: (f"input_{index}", Role.INPUT) for index, name in enumerate(graph.given)}
    names |= {name: (f"state_{index}", Role.STATE) for index, (name, _, _) in enumerate(graph.kept)}
    outers = sorted({inside.outer for inside in laid.inside.values()})
    context.joined |= {outer: f"joined_{number}" for number, outer in enumerate(outers)}
    for name, (stem, role) in names.items():
        buffer = context.buffer(stem, homes[name], laid.nbytes(name), role)
        context.values[name] = dense_view(buffer, graph.types[name], layout=laid.layouts.get(name))
    layers = [_region(context, index, region, tilings) for index, region in enumerate(regions)]
    for index, fetches in _early_of_next(regions, layers, early).items():
        has_kernel = regions[index].slot or any(isinstance(one, Call) for one in layers[index].head)
        if has_kernel and regions[index].place == CORE:  # which would hold them up
            layers[index].head[:0] = fetches
        elif (last := _last_fetch(context, layers[index])) is not None:
            layers[index].rest[last] = [*layers[index].rest[last], *fetches]
        else:
            layers[index].head += fetches
    context.statements = in_turn([region.slot for region in regions], layers)
    if cores:
        context.statements = workers_first(context.statements, regions, cores)
    for read, written, _ in graph.kept:
        if context.values[read] == context.values[written]:
            continue  # changed in place
        _replace_state(context.statements, context.values[read], context.values[written], bool(cores))
    return context


def _replace_state(ordered: list[Statement], state: View, value: View, at_end: bool) -> None:
    """Copy a state's next contents to it as soon as they are there and nothing reads the old ones any more; or at the
    end, where other cores may read them until then."""
    last = len(ordered) - 1
    while not at_end and not (
        any(view.buffer == state.buffer for view in reads(ordered[last]))
        or any(view.buffer == value.buffer for view in writes(ordered[last]))
    ):
        last -= 1
    ordered.insert(last + 1, Copy(ordered[last].layer, value, state))


def _early_of_next(
    regions: Sequence[LaidRegion], layers: Sequence[LayerStatements], early: frozenset[str]
) -> dict[int, list[Statement]]:
    """Move each early region's constants behind the first loads of the engine region before it (or the very start), or
    to where they are scheduled."""
    moved: dict[int, list[Statement]] = {}
    previous = 0
    for index, region in enumerate(regions):
        if not region.shares:
            continue
        if region.name in early and index > 0:
            moved.setdefault(_fetched_with(regions, index, previous), []).extend(layers[index].early)
            layers[index].early = []
        previous = index
    return moved


def _last_fetch(context: LoweredNetwork, layer: LayerStatements) -> int | None:
    """The tile with whose launch the last constants of a layer are fetched; None where all are before the first."""

    def fetches(one: Statement) -> bool:
        return isinstance(one, Copy) and context.buffers[one.source.buffer].role is Role.CONSTANT

    return max((number for number, step in enumerate(layer.rest) if any(map(fetches, step))), default=None)


def _fetched_with(regions: Sequence[LaidRegion], index: int, previous: int) -> int:
    """The region with which the constants of another one are fetched: the last that is issued when that is scheduled;
    the engine region before where nothing is."""
    own = regions[index].slot
    if own is None:
        return previous
    issued = [i for i, r in enumerate(regions[:index]) if r.slot and r.slot.issue <= own.fetch and not r.is_view]
    return issued[-1] if issued else 0


def _region(
    context: LoweredNetwork, index: int, region: LaidRegion, tilings: Mapping[str, CompleteTiling]
) -> LayerStatements:
    graph, values, target = context.laid.graph, context.values, context.target
    if region.is_view and (region.output not in graph.outputs or region.output in context.ends.values()):
        source = _operand(context, region, region.graph.inputs[0])
        kind, layout = graph.types[region.output], region.layouts.get(region.output)
        values[region.output] = dense_view(source.buffer, kind, source.offset, layout)
        return LayerStatements()
    result = values[region.output] = _result(context, region)
    if region.is_noop:
        return LayerStatements()
    operands = {value: _operand(context, region, value) for value in region.graph.inputs}
    if region.shares:
        held = context.laid.starts_with_next(region)
        parts = ((part, tilings[part.name], operands, result, held) for part in region.parts)
        return _together([EngineLowering(context, index, *part).lowered() for part in parts])
    first = region.graph.nodes[0]
    is_relayout = first.operator.changes_layout
    copying = bool(region.copied_by if is_relayout else target.dma or target.engines)
    by_kernel = first.operator.pads or first.operator.window([region.graph.types[value] for value in first.inputs])
    if by_kernel and not (target.dma or any(engine.dma for engine in target.engines)):  # it is faster than copies
        inside = any(view.buffer == result.buffer for view in operands.values())  # the border alone is to be filled
        copying = inside or any(not view.is_dense or view.layout for view in (result, *operands.values()))
    moved = copies(index, region.graph, operands, result) if copying else None
    if moved is not None:
        wanted = (copy for copy in moved if copy.source != copy.destination or copy.before)
        return LayerStatements(head=[made for copy in wanted for made in _by_engine(context, copy)])
    cores = context.cores.get(region.output, region.cores)
    return LayerStatements(head=[*split(index, region.graph, operands, result, target, cores)])


def _operand(context: LoweredNetwork, region: LaidRegion, value: str) -> View:
    """An operand in the layout the region takes it in; where its DMA converts, in the value's own."""
    view = context.values[value]
    return view if value in region.converted else view.seen_as(region.layouts.get(value))


def _by_engine(context: LoweredNetwork, copy: Copy) -> list[Copy]:
    """A copy that only moves elements, by an engine's own DMA where one of its ends is in that engine's memory. Such a
    DMA fills nothing: what surrounds the source is read from constants."""
    memories = [context.buffers[view.buffer].memory for view in (copy.source, copy.destination)]
    engine = next((e for e in context.target.engines if e.dma and e.memory in memories), None)
    if engine is None or engine.dma is None:
        return [copy]
    moves = [replace(copy, queue=Queue(engine.dma.name), stream=engine.name)]
    if copy.before:
        plain = replace(moves[0], before=(), fill=0)
        moves = [replace(plain, destination=copy.destination.part(copy.inner))] if not copy.fills_border else []
        if context.buffers[copy.destination.buffer].memory != engine.memory:  # constants lie outside it, too
            return [*moves, replace(copy, source=copy.destination.part(copy.inner))]
        moves += [replace(plain, source=_fill(context, one, copy.fill), destination=one) for one in copy.border]
    return moves


_MOST_FILL = 256


def _fill(context: LoweredNetwork, like: View, value: int) -> View:
    """A constant that is read again and again, as a view of one value repeated."""
    element = np.array(value).astype(like.type.dtype.numpy).tobytes()
    dims = list(zip(like.physical, like.strides, strict=True))
    nbytes, own = len(element), [0] * len(dims)
    for place in reversed(range(len(dims))):
        size, stride = dims[place]
        if size > 1 and (stride != nbytes or nbytes * size > _MOST_FILL):
            break
        own[place], nbytes = nbytes, nbytes * size
    name = f"fill_{like.type.dtype.text}_{value & 0xFFFFFFFF}_{nbytes}"
    context.constants[name] = np.frombuffer(element * (nbytes // len(element)), np.uint8)
    context.buffer(name, context.target.code, nbytes, Role.CONSTANT)
    return View(name, like.type, tuple(own), 0, like.layout)


def _result(context: LoweredNetwork, region: LaidRegion) -> View:
    """The place of a region's result; declares the buffer unless another region has."""
    laid, graph = context.laid, context.laid.graph
    inside = laid.inside.get(region.output)
    if inside is not None:
        outer = context.values.get(inside.outer)
        return (outer or _outer(context, inside.outer)).part(inside.box)
    within = [laid.inside[value].outer for value in region.graph.inputs if value in laid.inside]
    if region.output in within:
        return _outer(context, region.output)
    if (state := _state_in_place(context, region)) is not None:
        return state
    kind, end = graph.types[region.output], context.ends.get(region.output, region.output)
    role = Role.OUTPUT if end in graph.results else Role.VALUE
    name = f"output_{graph.results.index(end)}" if role is Role.OUTPUT else f"{region.name}_out"
    context.buffer(name, context.homes[region.output], laid.nbytes(region.output), role)
    return dense_view(name, kind, 0, laid.layouts.get(region.output))


def _state_in_place(context: LoweredNetwork, region: LaidRegion) -> View | None:
    """The place of a state that a region of the core changes in some elements, as its next contents, where nothing else
    reads the old ones; None for other regions."""
    graph, node = context.laid.graph, region.graph.nodes[0]
    held = next((read for read, written, _ in graph.kept if written == region.output), None)
    alone = len(region.graph.nodes) == 1 and node.operator.in_place and node.inputs[0] == held
    if held is None or not alone or region.place != CORE or graph.readers(held) > 1:
        return None
    view = context.values[held]
    same = context.homes[region.output] == context.homes[held] and view.layout == context.laid.layouts.get(
        region.output
    )
    return view if same else None


def _outer(context: LoweredNetwork, value: str) -> View:
    """The place of a value that others lie in."""
    laid = context.laid
    name = context.joined[value]
    if name not in context.buffers:
        context.buffer(name, context.homes[value], laid.nbytes(value), Role.VALUE)
    return dense_view(name, laid.graph.types[value], 0, laid.layouts.get(value))


def _together(parts: Sequence[LayerStatements]) -> LayerStatements:
    """The statements of a region's parts as those of one: the first tiles of all are launched, then the second ones."""
    layer = LayerStatements()
    for part in parts:
        layer.early += part.early
        layer.head += part.head
        layer.tail += part.tail
    for turn in zip_longest(*(part.rest for part in parts), fillvalue=()):
        launches = [step[0] for step in turn if step]
        layer.rest.append([*launches, *(statement for step in turn for statement in step[1:])])
    return layer
