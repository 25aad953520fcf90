"""Which of the user's rules cannot be kept together, whatever the order: the smallest set of them, by deletion.

Whether some rules clash is asked again and again, with fewer and fewer: what can be left out, so that the others still
clash, is left out. Every rule that is named then matters, and so does every dependency of the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dovetail.errors import ModelError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderNetwork
from dovetail.targets.maeri.rules import ChannelRange, Rules, UnitRules, spelt
from dovetail.targets.maeri.tree import Range

Relation = npt.NDArray[np.bool_]
"""[unit, unit]."""
_MOST = 64
"""Sets of sentences that are left out in the search for the smallest contradiction."""


def asked(rules: Rules, network: OrderNetwork, config: MaeriConfig) -> UnitRules:
    """Rules spelt out, with what follows from them: units of which each begins no later than the others begin together.

    Raises:
        ModelError: a rule names what the network has not, or rules contradict each other, naming the smallest set.
    """
    found = spelt(rules, network)
    if _clash(found, config):
        named = _smallest(_sentences(found), lambda kept: _clash(_only(found, kept), config))
        if len(named) == 1:
            ports = f" in ports of {config.port_width}" if config.ports and config.shared_ports else ""
            hint = f"change it; there are {config.multipliers} multipliers{ports}"
            raise ModelError(f"this cannot be kept: {named[0]}", where="rules", hint=hint)
        raise ModelError(f"they contradict each other: {'; '.join(named)}", where="rules", hint="leave one of them out")
    return replace(found, together=tuple((group, "") for group in _groups(found)))


def grain(config: MaeriConfig) -> int:
    """Multipliers regions are counted in: ports, and pairs, since two virtual neurons of two cannot share an adder."""
    return max(config.port_width, 2) if config.ports or not config.shared_ports else config.multipliers


def region(found: UnitRules, unit: ChannelRange, config: MaeriConfig) -> Range:
    """The multipliers a unit may use, as whole ports."""
    within, width = allowed(found, unit, config), grain(config)
    low, high = -(-within.start // width) * width, within.end // width * width
    return Range(low, max(high - low, 0))


def allowed(found: UnitRules, unit: ChannelRange, config: MaeriConfig) -> Range:
    """The multipliers a unit is pinned to, from a port's first on; of the last port not all, perhaps."""
    low, high, width = 0, config.multipliers, config.port_width if config.ports else 1
    for other, pin, _ in found.pins:
        if other == unit and pin.multipliers:
            low, high = max(low, pin.multipliers[0]), min(high, pin.multipliers[1])
    low = -(-low // width) * width
    return Range(low, max(high - low, 0))


def shares(regions: Mapping[ChannelRange, Range], config: MaeriConfig) -> dict[ChannelRange, Range] | None:
    """Multipliers for each of several units at the same time: as many for each, whole ports of those it may use; None
    where there are not enough. From the left, what must end soonest comes first: for single ports that finds a way."""
    width = grain(config)
    limits = {unit: (place.start // width, place.end // width) for unit, place in regions.items()}
    for share in range(config.multipliers // width // len(regions), 0, -1):
        taken, at = dict[ChannelRange, Range](), 0
        while len(taken) < len(limits) and at + share <= config.multipliers // width:
            open_ = [(high, unit) for unit, (low, high) in limits.items() if unit not in taken and low <= at]
            fitting = min((one for one in open_ if at + share <= one[0]), default=None)
            if fitting:
                taken[fitting[1]] = Range(at * width, share * width)
            at += share if fitting else 1
        if len(taken) == len(limits):
            return taken
    return None


def _sentences(found: UnitRules) -> list[str]:
    """All that is asked, and the network's dependencies, once each."""
    pairs = (*found.before.values(), *found.no_later.values(), *found.apart.values())
    groups, limits = (sentence for _, sentence in found.together), (sentence for _, _, sentence in found.limits)
    return list(dict.fromkeys([*(sentence for _, _, sentence in found.pins), *groups, *pairs, *limits]))


def _only(found: UnitRules, kept: Iterable[str]) -> UnitRules:
    """What of that is said in some sentences."""
    wanted = set(kept)
    before, apart, no_later = (
        {pair: sentence for pair, sentence in each.items() if sentence in wanted}
        for each in (found.before, found.apart, found.no_later)
    )
    return replace(
        found,
        before=before,
        apart=apart,
        no_later=no_later,
        together=tuple(each for each in found.together if each[1] in wanted),
        pins=tuple(each for each in found.pins if each[2] in wanted),
        limits=tuple(each for each in found.limits if each[2] in wanted),
    )


def _smallest(sentences: Sequence[str], clashes: Callable[[Sequence[str]], bool]) -> list[str]:
    """The smallest part of sentences that still clash. One from which nothing can be left out is found by deletion; any
    other does without one of its sentences, so each is left out in turn and what is left searched, and so on."""
    found, waiting, seen = [_needed(sentences, clashes)], deque([frozenset[str]()]), set[frozenset[str]]()
    while waiting and len(seen) < _MOST:
        out = waiting.popleft()
        if out in seen:
            continue
        seen.add(out)
        own = next((each for each in found if not out & set(each)), None)
        left = [sentence for sentence in sentences if sentence not in out]
        if own is None and clashes(left):
            own = _needed(left, clashes)
            found.append(own)
        waiting += [out | {sentence} for sentence in own or ()]
    return min(found, key=len)


def _needed(sentences: Sequence[str], clashes: Callable[[Sequence[str]], bool]) -> list[str]:
    """Sentences that clash, of which none can be left out: halves, quarters and so on that can be are."""
    kept, step = list(sentences), len(sentences)
    while step > 1:
        step, at = -(-step // 2), 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + step :]
            if clashes(fewer):
                kept = fewer
            else:
                at += step
    return kept


def _reach(found: UnitRules) -> tuple[Relation, Relation]:
    """[x, y]: whether y begins when x has ended, by a rule or dependency; whether x begins no later than y."""
    place = {unit: number for number, unit in enumerate(found.units)}
    strict = np.zeros((len(place), len(place)), bool)
    for x, y in found.before:
        strict[place[x], place[y]] = True
    reach = strict.copy()
    for x, y in found.no_later:
        reach[place[x], place[y]] = True
    for group, _ in found.together:
        numbers = [place[unit] for unit in group]
        reach[np.ix_(numbers, numbers)] = True
    np.fill_diagonal(reach, True)
    while True:
        further = reach | ((reach.astype(np.float32) @ reach.astype(np.float32)) > 0)
        if (further == reach).all():
            return strict, reach
        reach = further


def _groups(found: UnitRules) -> list[tuple[ChannelRange, ...]]:
    """Units that begin together, those with others only."""
    reach = _reach(found)[1]
    classes = {tuple(np.flatnonzero(row).tolist()) for row in reach & reach.T}
    return [tuple(found.units[number] for number in each) for each in sorted(classes) if len(each) > 1]


def _clash(found: UnitRules, config: MaeriConfig) -> bool:
    """Whether no order can keep all that is asked."""
    strict, reach = _reach(found)
    if (strict & reach.T).any():  # a circle that takes time
        return True
    place = {unit: number for number, unit in enumerate(found.units)}
    if any(reach[place[x], place[y]] and reach[place[y], place[x]] for x, y in found.apart):
        return True
    for unit, pin, _ in found.pins:
        low, high = pin.multipliers or (0, config.multipliers)
        inside = 0 <= low < high <= config.multipliers and allowed(found, unit, config).size
        earliest = max(other.begin for each, other, _ in found.pins if reach[place[each], place[unit]])
        if not inside or (pin.end is not None and pin.end <= earliest):
            return True
    for group in _groups(found):
        if any(sum(unit.work in works for unit in group) > most for works, most, _ in found.limits):
            return True
        if len(group) * grain(config) > config.multipliers or not _ports_for(
            [allowed(found, u, config) for u in group], config
        ):
            return True
    return False


def _ports_for(places: Sequence[Range], config: MaeriConfig) -> bool:
    """Whether there is a port for each of several units, from those it may use: what ends first comes first."""
    width, waiting = config.port_width if config.ports else 1, list(places)
    for at in range(0, config.multipliers, width):
        open_ = [place for place in waiting if place.start <= at < place.end]
        if open_:
            waiting.remove(min(open_, key=lambda place: place.end))
    return not waiting
