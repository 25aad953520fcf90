"""MAERI refuses rules only where there is no order: small cases, whose orders are all tried here.

Whether any order keeps some rules (without deadlines) does not depend on how long things take: if there is one, there
is one in stages, one after the other, in which each unit is a single virtual neuron. All stages, places and sizes are
tried, and what is found is checked by the machine and against the rules.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from dovetail.errors import ModelError, SimulationError, TargetError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.machine import clock
from dovetail.targets.maeri.network import OrderNetwork, network
from dovetail.targets.maeri.order import ChannelSegment, Item, NetworkOrder, broken, check
from dovetail.targets.maeri.rules import ChannelRange, Rules, UnitRules, unit_rules
from dovetail.targets.maeri.tile import in_order, tile_of
from dovetail.targets.maeri.tree import Range
from maeri_trials import Random, random_rules
from networks import limited_net

CASES = int(os.environ.get("MAERI_REFUSALS", "120"))
"""Random cases."""
MOST_UNITS = 4
LONG = 100_000
"""Cycles a stage has: more than any takes here."""


def small_net(random: Random) -> OrderNetwork:
    """Two or three layers of a few products."""
    net = limited_net("small", 3, 3, int(random.integers(1, 3)))
    ends = [net.x]
    for _ in range(int(random.integers(2, 4))):
        start = ends[int(random.integers(len(ends)))]
        ends.append(net.convolution(start, int(random.integers(1, 3)), int(random.integers(1, 3)), relu=True))
    return network(net.builder.finish(ends[1:]))


def small_config(random: Random) -> MaeriConfig:
    """4 or 8 multipliers."""
    multipliers = int(random.choice([4, 8]))
    widths = [int(random.choice([each for each in (2, 4, 8) if each <= multipliers])) for _ in range(2)]
    return MaeriConfig(
        multipliers, *widths, accumulation_buffer=bool(random.random() < 0.8), fold=bool(random.random() < 0.8)
    )


def stages(told: UnitRules) -> Iterator[tuple[int, ...]]:
    """The stage of each unit, as rules and the network's dependencies let it be."""
    place = {unit: number for number, unit in enumerate(told.units)}
    for found in product(range(len(place)), repeat=len(place)):
        if set(found) != set(range(max(found) + 1)):
            continue
        kept = all(found[place[x]] < found[place[y]] for x, y in (*told.reads, *told.before))
        kept = kept and all(found[place[x]] <= found[place[y]] for x, y in told.no_later)
        kept = kept and all(x != y and found[place[x]] != found[place[y]] for x, y in told.apart)
        kept = kept and all(len({found[place[unit]] for unit in group}) == 1 for group in told.together)
        for units, most in told.limits:
            kept = (
                kept
                and max(Counter(s for s, u in zip(found, told.units, strict=True) if u in units).values(), default=0)
                <= most
            )
        if kept:
            yield found


def items(net: OrderNetwork, config: MaeriConfig, told: UnitRules, unit: ChannelRange, start: int) -> list[Item]:
    """Every way to compute a unit on one virtual neuron, small ones first."""
    work, found = net.works[unit.work], []
    channels = range(unit.first, unit.end)
    parts = [ChannelSegment(channel, 0, work.positions) for channel in channels]
    begin = max((pin.begin for each, pin in told.pins if each == unit), default=0)
    pins = [pin.multipliers for each, pin in told.pins if each == unit and pin.multipliers]
    for size in range(1, work.layer.taps + 1):
        tile = tile_of(work.layer, size)
        try:
            width = clock(config, work.layer, tile, work.layer.taps).size
        except TargetError:
            continue
        for at in range(0, config.multipliers - width + 1, config.port_width):
            if all(low <= at and at + width <= high for low, high in pins):
                place = Range(at, width)
                found.append(Item(unit.work, start + begin, place, tile, (0, work.layer.taps), tuple(parts)))
    return found


def alongside(choices: Sequence[Sequence[Item]], config: MaeriConfig) -> Iterator[tuple[Item, ...]]:
    """One of each, on ports of their own."""
    if not choices:
        yield ()
        return
    width = max(config.port_width, 1)
    for item in choices[0]:
        for others in alongside(choices[1:], config):
            ends = [(each.place.start // width, -(-each.place.end // width)) for each in (item, *others)]
            if all(ends[0][1] <= low or high <= ends[0][0] for low, high in ends[1:]):
                yield (item, *others)


def any_order(net: OrderNetwork, config: MaeriConfig, rules: Rules) -> NetworkOrder | None:
    """An order that keeps the rules, if there is one."""
    told = unit_rules(rules, net)
    for found in stages(told):
        chosen: list[Item] = []
        for stage in range(max(found) + 1):
            units = [unit for unit, own in zip(told.units, found, strict=True) if own == stage]
            begin = max((pin.begin for unit, pin in told.pins if unit in units), default=0)
            start = stage * LONG + begin
            choices = [[*items(net, config, told, unit, stage * LONG)] for unit in units]
            same = [[replace(item, start=start) for item in each] for each in choices]
            for together in alongside(same, config):
                if works_together(net, config, together):
                    chosen += together
                    break
            else:
                break
        else:
            order = NetworkOrder(net, config, in_order(chosen), (max(found) + 2) * LONG)
            if not broken(order, rules):
                check(order)
                return order
    return None


def works_together(net: OrderNetwork, config: MaeriConfig, together: Sequence[Item]) -> bool:
    """Whether the machine can do these; sums of layers in other stages are missing still."""
    try:
        check(NetworkOrder(net, config, in_order(together), LONG))
    except SimulationError as error:
        return "the parts [] of a sum" in error.what or "are added 0 times" in error.what
    except TargetError:
        return False
    return True


def test_refusals_are_right() -> None:
    """Random rules of small networks: where there is no order for the scheduler, all that is tried finds none."""
    counts: Counter[str] = Counter()
    for seed in range(CASES):
        random = np.random.default_rng(seed)
        net, config = small_net(random), small_config(random)
        rules = random_rules(random, net, config)
        if len(unit_rules(rules, net).units) > MOST_UNITS:
            continue
        try:
            arrange(net, config, rules)
            counts["ordered"] += 1
        except (ModelError, TargetError) as error:
            counts["refused"] += 1
            assert any_order(net, config, rules) is None, (seed, error.what, rules, config)
    print(counts)
    assert counts["refused"] >= CASES // 5


def test_the_search_finds_orders() -> None:
    """Where the scheduler finds one it does, too; so it is not blind."""
    found = 0
    for seed in range(CASES // 4):
        random = np.random.default_rng(seed)
        net, config = small_net(random), small_config(random)
        rules = random_rules(random, net, config)
        if len(unit_rules(rules, net).units) > MOST_UNITS:
            continue
        try:
            arrange(net, config, rules)
        except (ModelError, TargetError):
            continue
        found += 1
        assert any_order(net, config, rules) is not None, (seed, rules, config)
    assert found >= CASES // 20
