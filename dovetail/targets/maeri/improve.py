"""The best order found in a time: the list scheduler's at once, then better ones."""

from __future__ import annotations

import time
from collections.abc import Callable

from dovetail.errors import MissingExtraError
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange, tried_sizes
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.schedule import Schedule
from dovetail.targets.maeri.solve import solve
from dovetail.targets.maeri.work import Network

CLOSE = 1.005
"""Orders this near the bound are not improved."""
Found = Callable[[str, int, int], None]
"""Told every better order: what found it, its makespan and the bound, in cycles."""


def best_order(
    network: Network, config: MaeriConfig, rules: Rules | None = None, seconds: float = 5.0,
    found: Found = lambda how, makespan, bound: None,
) -> Schedule:  # fmt: skip
    """An order of a network, the best that is found.

    The list scheduler's comes first and is always valid. A small network is then solved as a whole (the extra
    "solver"); for others, one layer after the other tries other virtual neurons, the longest layer first.

    Args:
        network: what to compute.
        config: on what.
        rules: the user's own.
        seconds: to spend on better orders; the same orders come of the same time only where all are tried.
        found: told each better order.

    Raises:
        ModelError: the rules name no layer, or contradict each other.
        TargetError: a layer does not fit.
    """
    rules, least = rules or Rules(), bound(network, config).cycles
    best = arrange(network, config, rules)
    found("list", best.makespan, least)
    if seconds <= 0:
        return best
    try:
        solved = solve(network, config, rules, seconds)
    except MissingExtraError:
        solved = None
    if solved is not None and solved.makespan < best.makespan:
        best = solved
        found("exact", best.makespan, least)
    return _climb(network, config, rules, best, least, time.monotonic() + seconds, found)


def _climb(
    network: Network, config: MaeriConfig, rules: Rules, best: Schedule, least: int, until: float, found: Found
) -> Schedule:
    """Other sizes of virtual neurons, layer by layer, while that helps."""
    if config.shared_ports or rules.whole_filters:
        return best
    chosen: dict[int, int] = {}
    numbers = sorted(range(len(network.works)), key=lambda number: (-network.works[number].layer.macs, number))
    for number in numbers:
        for size in tried_sizes(network.works[number], config, rules):
            if best.makespan <= least * CLOSE or time.monotonic() > until:
                return best
            made = arrange(network, config, rules, {**chosen, number: size})
            if made.makespan < best.makespan:
                best, chosen = made, {**chosen, number: size}
                found("list, other sizes", best.makespan, least)
    return best
