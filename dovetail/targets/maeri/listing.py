"""The list scheduler: unit after unit, each spread over the multipliers so that they end together.

Where every multiplier has a port of its own, a layer's sums are dealt out to virtual neurons of one size, output
channel after output channel, so that all work until the same cycle, whenever each could begin. Several sizes are tried:
a size loses products that do not fill the last step of a sum, and multipliers that are left over. Where ports are
shared, virtual neurons work in step instead, so that values that are sent are shared too: gangs on ports of their own,
of several widths, to which sums are dealt out alike.

`best_order` spends a time on better orders: of rules left out one by one, of small units, and with other sizes. An
order that is found without a rule and keeps it stands before one that is made with the rule: so a rule that an order
keeps anyway never costs a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache, reduce
from itertools import chain, islice
from math import ceil
from time import process_time

from dovetail.errors import DovetailError, ModelError, SimulationError, TargetError
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.floor import (
    MOST_WAYS,
    Floorplan,
    UnitRoom,
    deal,
    gangs,
    lay_alongside,
    single_neurons,
)
from dovetail.targets.maeri.machine import unfit
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork
from dovetail.targets.maeri.order import NetworkOrder, broken, check, shortage
from dovetail.targets.maeri.rules import ChannelRange, Grain, Rules, consistent_rules, shares, units_of
from dovetail.targets.maeri.tile import Item, in_order, tile_of
from dovetail.targets.maeri.tree import Range, leaving

_FEW = 4
"""Output channels for which single virtual neurons are tried too."""
_SIZES = 6
"""Sizes of virtual neurons tried per layer, of those that look best."""
CLOSE = 1.005
"""Orders this near the bound are not improved."""
MOST_UNITS = 160
"""Networks of more units are ordered layer by layer only: that is close to the bound there."""
_FEW_UNITS = 48
"""Networks of so few units are ordered in units whatever time there is."""
_MOST_RULES = 6
"""Rules of which every choice is looked at; of more only those that lack one."""
Report = Callable[[str, int, int], None]
"""Called with every better order: its source, its makespan and the bound, in cycles."""


def arrange(
    network: OrderNetwork,
    config: MaeriConfig,
    rules: Rules | None = None,
    sizes: Mapping[int, int] | None = None,
    cut: Grain = Grain.RULES,
) -> NetworkOrder:
    """An order of a network. Where memories are too small for it, an order in which layers come one after the other,
    with fewer and fewer virtual neurons.

    Args:
        network: the network.
        config: the engine.
        rules: the user's own.
        sizes: sizes of virtual neurons that are chosen already, by number of their layer.
        cut: how far layers are cut into units; those of channels and of parts are a virtual neuron each.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit, or not as the rules say; or no order fits the memories.
    """
    rules = rules or Rules()
    order = first = _arrange(network, config, rules, sizes or {}, cut)
    most = rules.at_most or config.multipliers
    while shortage(order) and most:
        try:
            order = _arrange(network, config, replace(rules, at_most=most), sizes or {}, cut, in_turn=True)
        except (ModelError, TargetError):  # the rules want more at the same time
            break
        most //= 2
    if short := shortage(order, (order, first)):
        raise short
    return order


def _arrange(
    network: OrderNetwork,
    config: MaeriConfig,
    rules: Rules,
    sizes: Mapping[int, int],
    cut: Grain,
    in_turn: bool = False,
) -> NetworkOrder:
    """As `arrange`, whatever the memories; `in_turn`: each unit waits until all others have left."""
    floor = Floorplan(network, config, consistent_rules(rules, network, config, cut))
    waiting = set(floor.rules.units)
    while waiting:
        group = _next(floor, waiting)
        if len(group) == 1:
            room = floor.room(group[0])
            if in_turn:
                left = max(room.ready, room.earliest, int(floor.free.max()))
                room = replace(room, ready=left, earliest=left)
            floor.add(group[0], (_lay_single if cut else _lay)(floor, group[0], room, sizes.get(group[0].work)))
        else:
            _lay_together(floor, group)
        waiting -= set(group)
    for unit, pin in floor.rules.pins:
        if pin.end is not None and floor.done[unit].exists > pin.end:
            what = f"{pin.what} ends in cycle {floor.done[unit].exists:,}; the rules want it by {pin.end:,}"
            raise TargetError(what, where="rules", hint="give it more time, or leave out rules that hold it back")
    items = [item for laid in floor.done.values() for item in laid.items]
    return NetworkOrder(network, config, in_order(items), max(laid.exists for laid in floor.done.values()))


def _next(floor: Floorplan, waiting: set[ChannelRange]) -> tuple[ChannelRange, ...]:
    """The unit that can begin first, or several units that begin together."""
    rules = floor.rules
    blocked = {y for x, y in (*rules.reads, *rules.before) if x in waiting}
    late = dict[ChannelRange, set[ChannelRange]]()
    for x, y in rules.no_later:
        if x in waiting:
            late.setdefault(y, set()).add(x)
    groups: list[tuple[ChannelRange, ...]] = [(unit,) for unit in sorted(waiting)]
    for together in rules.together:
        groups = [group for group in groups if not set(group) & set(together)]
        groups += [together] if set(together) & waiting else []
    free = [group for group in groups if all(u not in blocked and late.get(u, set()) <= set(group) for u in group)]
    return min(free, key=lambda group: (max(max(floor.ready(unit), floor.earliest(unit)) for unit in group), group))


def _lay_together(floor: Floorplan, group: tuple[ChannelRange, ...]) -> None:
    """Lay out units that begin in the same cycle: each on its share of the multipliers, or on one virtual neuron."""
    rooms = {unit: floor.room(unit) for unit in group}
    start = max(int(floor.free.max()), *(max(room.ready, room.earliest) for room in rooms.values()))
    rooms = {unit: replace(room, ready=start, earliest=start) for unit, room in rooms.items()}
    free, done, best = floor.free.copy(), dict(floor.done), None
    sums = {unit: floor.network.works[unit.work].layer.macs * (unit.end - unit.first) for unit in group}
    work = {unit: count // floor.network.works[unit.work].channels for unit, count in sums.items()}
    for weights in (work, dict.fromkeys(group, 1)):
        if _lay_shares(floor, rooms, weights):
            end = max(floor.done[unit].finish for unit in group)
            best = min(best or (end, floor.free, floor.done), (end, floor.free, floor.done), key=lambda way: way[0])
        floor.free, floor.done = free.copy(), dict(done)
    if best:
        _, floor.free, floor.done = best
    elif not lay_alongside(floor, rooms):
        names = ", ".join(dict.fromkeys(floor.network.works[unit.work].name for unit in group))
        hint = "leave one out of the group, or give the group more multipliers"
        raise TargetError(f"{names} cannot begin together", where="rules", hint=hint)


def _lay_shares(floor: Floorplan, rooms: Mapping[ChannelRange, UnitRoom], weights: Mapping[ChannelRange, int]) -> bool:
    """Lay out units that begin together each on its share of the multipliers; whether that is possible."""
    places = shares({unit: room.region for unit, room in rooms.items()}, weights, floor.config)
    for unit, place in (places or {}).items():
        sharing = max((len(units & rooms.keys()) for units, _ in floor.rules.limits if unit in units), default=1)
        room = replace(rooms[unit], region=place, within=place, most=max(rooms[unit].most // sharing, 1))
        try:
            floor.add(unit, _lay(floor, unit, room, None))
        except TargetError:
            return False
        if floor.done[unit].start != room.earliest:
            return False
    return places is not None


def _lay(floor: Floorplan, unit: ChannelRange, room: UnitRoom, size: int | None) -> Sequence[Item]:
    """The items of a unit that end first."""
    taps, free = floor.network.works[unit.work].layer.taps, int(floor.free.max())
    rooms = dict.fromkeys((room, replace(room, earliest=max(room.earliest, free))))
    ways = chain(*(_spread(floor, unit, each, size) for each in rooms))
    if floor.config.shared_ports:
        ways = chain(*(gangs(floor, unit, each) for each in rooms))
    narrow = room.within.size < floor.config.multipliers or (room.whole and unit.end - unit.first < _FEW)
    ways = chain(ways, ((item,) for item in single_neurons(floor, unit, room, 2))) if narrow else ways
    best = _first_to_end(floor, ways)
    if best is None:
        best = _first_to_end(
            floor, ((i,) for each in rooms for i in islice(single_neurons(floor, unit, each), MOST_WAYS))
        )
    if best is None:
        raise unfit(floor.config, taps, room.region.size, floor.network.works[unit.work].name)
    return best


def _lay_single(floor: Floorplan, unit: ChannelRange, room: UnitRoom, size: int | None) -> Sequence[Item]:
    """A unit on the virtual neuron that takes the fewest steps, where it begins first."""
    ways = ((item,) for item in single_neurons(floor, unit, room, size or 1))
    return next((way for way in ways if floor.fits(way)), None) or _lay(floor, unit, room, None)


def _first_to_end(floor: Floorplan, ways: Iterable[Sequence[Item]]) -> Sequence[Item] | None:
    """The items that end first, of those that lines and the tree allow."""
    best, first = None, 0
    for items in ways:
        end = max(map(floor.end, items))
        if (best is None or end < first) and floor.fits(items):
            best, first = items, end
    return best


def _spread(floor: Floorplan, unit: ChannelRange, room: UnitRoom, size: int | None) -> Iterable[tuple[Item, ...]]:
    """Ways to deal a unit out to virtual neurons that have ports of their own: side by side, or further apart where the
    bus cannot take more sums."""
    work, (start, multipliers) = floor.network.works[unit.work], astuple(room.region)
    sizes = [size] if size else tried_sizes(work, floor.config, room.whole, multipliers)
    spacing, fits = 1, False
    while not fits and spacing <= multipliers:
        for tile in (tile_of(work.layer, each) for each in sizes):
            width = max(floor.time(unit, tile).size, 2)
            count = min(max(multipliers // (width * spacing), int(width <= multipliers)), room.most)
            if count:
                items = deal(floor, unit, room, [(tile, start + number * width * spacing) for number in range(count)])
                fits = fits or floor.fits(items)
                yield items
        spacing *= 2


def tried_sizes(work: MultiplierLayer, config: MaeriConfig, whole: bool, multipliers: int) -> list[int]:
    """Sizes of virtual neurons worth trying for a layer on so many multipliers, the best guess first."""
    taps, sums = work.layer.taps, work.outputs * work.positions
    most = min(taps, config.weight_depth) if config.fold else 1
    folds = [each for each in range(1, most + 1) if ceil(taps / each) + config.carried(each) <= multipliers]
    sizes = dict.fromkeys(max(ceil(taps / each), min(taps, 2)) for each in folds[: 1 if whole else most])

    def guess(size: int) -> tuple[int, int]:
        """Cycles if all virtual neurons begin together."""
        steps = ceil(taps / size)
        carried = config.carried(steps)
        width = max(size + carried, 2)
        links = leaving(config, Range(0, min(width, config.multipliers))).most
        each = ceil(sums / max(config.multipliers // width, 1))
        step = (steps - 1) * (links + 2) + 1 if carried else steps
        return step * each + ceil(each / work.positions) * (steps + (0 if config.prefetch else links + 3)), size

    return sorted(sizes, key=guess)[:_SIZES]


def best_order(
    network: OrderNetwork,
    config: MaeriConfig,
    rules: Rules | None = None,
    seconds: float = 5.0,
    report: Report = lambda source, makespan, bound: None,
) -> NetworkOrder:
    """The best order of a network that is found.

    The list scheduler's comes first and is always valid. A small network is then ordered in units of single output
    channels, and of what single input channels add to these; for others, one layer after the other tries other virtual
    neurons, the longest layer first.

    Equal seconds give equal orders only where all orders are tried in them. `report` is called with each better order.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit.
    """
    until = process_time() + seconds
    rules, least = rules or Rules(), bound(network, config, rules).cycles
    consistent_rules(rules, network, config)
    best = _with_rules(network, config, rules, until)
    took = process_time() - until + seconds
    report("list", best.makespan, least)
    if seconds <= 0 or config.shared_ports or rules != Rules():
        return best
    sizes: dict[int, int] = {}
    for number in sorted(range(len(network.works)), key=lambda number: (-network.works[number].layer.macs, number)):
        for size in tried_sizes(network.works[number], config, False, config.multipliers):
            if best.makespan <= least * CLOSE or process_time() + took > until:
                return best
            try:
                order = arrange(network, config, rules, {**sizes, number: size})
            except TargetError:  # the memories
                continue
            if order.makespan < best.makespan:
                best, sizes = order, {**sizes, number: size}
                report("list, other sizes", best.makespan, least)
    return best


def is_sound(order: NetworkOrder, rules: Rules) -> bool:
    """Whether the hardware can do what an order says, by the time it says, and the rules are kept."""
    try:
        return check(order) <= order.makespan and not broken(order, rules)
    except (SimulationError, TargetError):
        return False


def _with_rules(network: OrderNetwork, config: MaeriConfig, rules: Rules, until: float) -> NetworkOrder:
    """The order that ends first, of those found with fewer rules that keep all of these; else one made with these.

    Raises:
        DovetailError: there is none.
    """
    parts = rules.parts()
    every = frozenset(range(len(parts)))

    @cache
    def found(kept: frozenset[int]) -> NetworkOrder | DovetailError:
        own = rules if kept == every else reduce(Rules.__or__, [parts[number] for number in sorted(kept)], Rules())
        fewer = [kept - {number} for number in sorted(kept)] if kept == every or len(parts) <= _MOST_RULES else []
        orders = [order for order in map(found, fewer) if isinstance(order, NetworkOrder) and not broken(order, own)]
        try:
            return min(orders, key=lambda order: order.makespan) if orders else _made(network, config, own, until)
        except DovetailError as error:
            return error

    best = found(every)
    if isinstance(best, DovetailError):
        raise best
    return best


def _made(network: OrderNetwork, config: MaeriConfig, rules: Rules, until: float) -> NetworkOrder:
    """The best order that is made with some rules: of layers, or of small units where these are few."""
    best = arrange(network, config, rules)
    for cut in (Grain.CHANNELS, Grain.PARTS) if not (config.shared_ports or rules.together) else ():
        if len(units_of(rules, network, cut)) > (_FEW_UNITS if process_time() > until else MOST_UNITS):
            break
        try:
            order = arrange(network, config, rules, cut=cut)
        except DovetailError:
            continue
        if order.makespan < best.makespan and is_sound(order, rules):
            best = order
    return best
