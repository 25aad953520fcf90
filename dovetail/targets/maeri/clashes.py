"""Rules that no order can keep together: the smallest set of them, found by deletion; and the multipliers rules allow.

The search asks again and again whether some rules clash, with fewer and fewer of them: a rule without which the others
still clash is left out. So every rule that an error names matters, and so does every dependency of the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dovetail.errors import ModelError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderNetwork
from dovetail.targets.maeri.rules import ChannelRange, Reason, Rules, UnitRules, unit_rules
from dovetail.targets.maeri.tree import Range

Relation = npt.NDArray[np.bool_]
"""[unit, unit]."""
_MOST_SETS = 64
"""Sets of reasons that are left out in the search for the smallest contradiction."""


def consistent_rules(rules: Rules, network: OrderNetwork, config: MaeriConfig) -> UnitRules:
    """Rules for the units of a network, with groups of units that begin together because each begins no later than the
    others.

    Raises:
        ModelError: a rule names a layer that the network has not, or rules contradict each other; with the smallest set
            that does.
    """
    units = unit_rules(rules, network)
    if clash(units, config):
        reasons = smallest(reasons_of(units), lambda kept: clash(only(units, kept), config))
        named = [rules.in_words(reason) for reason in reasons]
        if len(named) == 1:
            ports = f" in ports of {config.port_width}" if config.ports and config.shared_ports else ""
            hint = f"change it; there are {config.multipliers} multipliers{ports}"
            raise ModelError(f"this cannot be kept: {named[0]}", where="rules", hint=hint)
        raise ModelError(f"they contradict each other: {'; '.join(named)}", where="rules", hint="leave one of them out")
    return replace(units, together=tuple((group, Reason("")) for group in _groups(units)))


def grain(config: MaeriConfig) -> int:
    """Multipliers that regions are counted in: ports, and pairs, since two virtual neurons of two cannot share an
    adder."""
    return max(config.port_width, 2) if config.ports or not config.shared_ports else config.multipliers


def region(rules: UnitRules, unit: ChannelRange, config: MaeriConfig) -> Range:
    """The multipliers a unit may use, as whole ports."""
    within, width = allowed(rules, unit, config), grain(config)
    low, high = -(-within.start // width) * width, within.end // width * width
    return Range(low, max(high - low, 0))


def allowed(rules: UnitRules, unit: ChannelRange, config: MaeriConfig) -> Range:
    """The multipliers a unit is pinned to, from the first of a port on; perhaps only a part of the last port."""
    low, high, width = 0, config.multipliers, config.port_width if config.ports else 1
    for other, pin, _ in rules.pins:
        if other == unit and pin.multipliers:
            low, high = max(low, pin.multipliers[0]), min(high, pin.multipliers[1])
    low = -(-low // width) * width
    return Range(low, max(high - low, 0))


def shares(regions: Mapping[ChannelRange, Range], config: MaeriConfig) -> dict[ChannelRange, Range] | None:
    """Multipliers for each of several units at the same time: as many for each, whole ports of those it may use; None
    if there are not enough.

    Ports are dealt out from the left, first to the unit whose region ends first: for single ports that finds a way.
    """
    width = grain(config)
    limits = {unit: (place.start // width, place.end // width) for unit, place in regions.items()}
    for share in range(config.multipliers // width // len(regions), 0, -1):
        taken, at = dict[ChannelRange, Range](), 0
        while len(taken) < len(limits) and at + share <= config.multipliers // width:
            open_ = [(high, unit) for unit, (low, high) in limits.items() if unit not in taken and low <= at]
            fitting = min((each for each in open_ if at + share <= each[0]), default=None)
            if fitting:
                taken[fitting[1]] = Range(at * width, share * width)
            at += share if fitting else 1
        if len(taken) == len(limits):
            return taken
    return None


def reasons_of(rules: UnitRules) -> list[Reason]:
    """All rules, and the network's dependencies, once each."""
    pairs = (*rules.before.values(), *rules.no_later.values(), *rules.apart.values())
    others = (*(entry[-1] for entry in rules.together), *pairs, *(entry[-1] for entry in rules.limits))
    return list(dict.fromkeys([*(entry[-1] for entry in rules.pins), *others]))


def only(rules: UnitRules, reasons: Collection[Reason]) -> UnitRules:
    """The part of rules that has some reasons."""
    kept = frozenset(reasons)
    before, apart, no_later = (
        {pair: reason for pair, reason in pairs.items() if reason in kept}
        for pairs in (rules.before, rules.apart, rules.no_later)
    )
    return replace(
        rules,
        before=before,
        apart=apart,
        no_later=no_later,
        together=tuple(entry for entry in rules.together if entry[-1] in kept),
        pins=tuple(entry for entry in rules.pins if entry[-1] in kept),
        limits=tuple(entry for entry in rules.limits if entry[-1] in kept),
    )


def smallest(reasons: Sequence[Reason], clashes: Callable[[Sequence[Reason]], bool]) -> list[Reason]:
    """The smallest part of reasons that still clash.

    Deletion finds a set from which nothing can be left out. Any other set does without one of its reasons; so each of
    them is left out in turn and the rest is searched, and so on.
    """
    sets, waiting, seen = [_needed(reasons, clashes)], deque([frozenset[Reason]()]), set[frozenset[Reason]]()
    while waiting and len(seen) < _MOST_SETS:
        out = waiting.popleft()
        if out in seen:
            continue
        seen.add(out)
        own = next((each for each in sets if not out & set(each)), None)
        left = [reason for reason in reasons if reason not in out]
        if own is None and clashes(left):
            own = _needed(left, clashes)
            sets.append(own)
        waiting += [out | {reason} for reason in own or ()]
    return min(sets, key=len)


def _needed(reasons: Sequence[Reason], clashes: Callable[[Sequence[Reason]], bool]) -> list[Reason]:
    """Reasons that clash, of which none can be left out: halves, quarters and so on are left out where they can be."""
    kept, step = list(reasons), len(reasons)
    while step > 1:
        step, at = -(-step // 2), 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + step :]
            if clashes(fewer):
                kept = fewer
            else:
                at += step
    return kept


def _relations(rules: UnitRules) -> tuple[Relation, Relation]:
    """[x, y]: whether y begins when x has ended, by a rule or dependency; whether x begins no later than y."""
    place = {unit: number for number, unit in enumerate(rules.units)}
    strict = np.zeros((len(place), len(place)), bool)
    for x, y in rules.before:
        strict[place[x], place[y]] = True
    reach = strict.copy()
    for x, y in rules.no_later:
        reach[place[x], place[y]] = True
    for group, _ in rules.together:
        numbers = [place[unit] for unit in group]
        reach[np.ix_(numbers, numbers)] = True
    np.fill_diagonal(reach, True)
    while True:
        further = reach | ((reach.astype(np.float32) @ reach.astype(np.float32)) > 0)
        if (further == reach).all():
            return strict, reach
        reach = further


def _groups(rules: UnitRules) -> list[tuple[ChannelRange, ...]]:
    """Units that begin together, those with others only."""
    reach = _relations(rules)[1]
    classes = {tuple(np.flatnonzero(row).tolist()) for row in reach & reach.T}
    return [tuple(rules.units[number] for number in each) for each in sorted(classes) if len(each) > 1]


def clash(rules: UnitRules, config: MaeriConfig) -> bool:
    """Whether no order can keep all rules."""
    strict, reach = _relations(rules)
    if (strict & reach.T).any():  # a circle that takes time
        return True
    place = {unit: number for number, unit in enumerate(rules.units)}
    if any(reach[place[x], place[y]] and reach[place[y], place[x]] for x, y in rules.apart):
        return True
    for unit, pin, _ in rules.pins:
        low, high = pin.multipliers or (0, config.multipliers)
        inside = 0 <= low < high <= config.multipliers and allowed(rules, unit, config).size
        earliest = max(other.begin for each, other, _ in rules.pins if reach[place[each], place[unit]])
        if not inside or (pin.end is not None and pin.end <= earliest):
            return True
    for group in _groups(rules):
        if any(sum(unit.work in works for unit in group) > most for works, most, _ in rules.limits):
            return True
        places = [allowed(rules, unit, config) for unit in group]
        if len(group) * grain(config) > config.multipliers or not _have_ports(places, config):
            return True
    return False


def _have_ports(places: Sequence[Range], config: MaeriConfig) -> bool:
    """Whether there is a port for each of several units, of those it may use: what ends first comes first."""
    width, waiting = config.port_width if config.ports else 1, list(places)
    for at in range(0, config.multipliers, width):
        open_ = [place for place in waiting if place.start <= at < place.end]
        if open_:
            waiting.remove(min(open_, key=lambda place: place.end))
    return not waiting
