"""The best order found in a time: of rules left out one by one, of small units, and with other sizes.

An order that is found without a rule and keeps it stands before one that is made with the rule: so a rule that an order
keeps anyway never costs a cycle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

from dovetail.errors import DovetailError, SimulationError, TargetError
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange, tried_sizes
from dovetail.targets.maeri.network import OrderNetwork
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.rules import Grain, Rules, consistent_rules, unit_rules
from dovetail.targets.maeri.simulate import broken, check

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

    Args:
        network: the network.
        config: the engine.
        rules: the user's own.
        seconds: to spend on better orders; equal seconds give equal orders only where all orders are tried in them.
        report: called with each better order.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit.
    """
    until = time.process_time() + seconds
    rules, least = rules or Rules(), bound(network, config, rules).cycles
    consistent_rules(rules, network, config)
    best = _OrderSearch(network, config, rules, until).found(frozenset(range(len(rules.parts()))))
    if isinstance(best, DovetailError):
        raise best
    took = time.process_time() - until + seconds
    report("list", best.makespan, least)
    if seconds <= 0 or config.shared_ports or rules != Rules():
        return best
    sizes: dict[int, int] = {}
    for number in sorted(range(len(network.works)), key=lambda number: (-network.works[number].layer.macs, number)):
        for size in tried_sizes(network.works[number], config, False):
            if best.makespan <= least * CLOSE or time.process_time() + took > until:
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


@dataclass
class _OrderSearch:
    """Orders of a network by the rules they were found with."""

    network: OrderNetwork
    config: MaeriConfig
    rules: Rules
    until: float
    known: dict[frozenset[int], NetworkOrder | DovetailError] = field(default_factory=dict)

    def of(self, kept: frozenset[int]) -> Rules:
        """Some of the rules, by number."""
        parts = self.rules.parts()
        return (
            self.rules if len(kept) == len(parts) else reduce(Rules.__or__, [parts[n] for n in sorted(kept)], Rules())
        )

    def found(self, kept: frozenset[int]) -> NetworkOrder | DovetailError:
        """The order that ends first, of those found with fewer rules that keep all of these; else one made with these;
        the error where there is none."""
        if kept not in self.known:
            every = len(self.rules.parts()) <= _MOST_RULES
            fewer = (
                [kept - {number} for number in sorted(kept)] if every or len(kept) == len(self.rules.parts()) else []
            )
            orders = [order for each in fewer if isinstance(order := self.found(each), NetworkOrder)]
            keeping = [order for order in orders if not broken(order, self.of(kept))]
            self.known[kept] = min(keeping, key=lambda order: order.makespan) if keeping else self.made(self.of(kept))
        return self.known[kept]

    def made(self, rules: Rules) -> NetworkOrder | DovetailError:
        """The best order that is made with some rules."""
        try:
            best = arrange(self.network, self.config, rules)
            if not is_sound(best, rules):
                best = arrange(self.network, self.config, rules, cautious=True)
        except DovetailError as error:
            return error
        for cut in (Grain.CHANNELS, Grain.PARTS) if not (self.config.shared_ports or rules.together) else ():
            units = len(unit_rules(rules, self.network, cut).units)
            if units > (_FEW_UNITS if time.process_time() > self.until else MOST_UNITS):
                break
            try:
                order = arrange(self.network, self.config, rules, cut=cut)
            except DovetailError:
                continue
            if order.makespan < best.makespan and is_sound(order, rules):
                best = order
        return best
