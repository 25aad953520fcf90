"""What the user asks of an order beyond what the hardware does, and which of it cannot be kept together.

A rule names layers as the model does, or some of a layer's output channels: `conv_2[0:8]` are the first eight. The
channels of a layer that no rule tells apart are one unit; units are what is ordered.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import Network

MAX_BYTES = 1 << 20
"""Largest file of rules read, in bytes."""
KINDS = ("convolution", "depthwise", "dense")
"""Kinds of layers `at_most` may name."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Where and when something works."""

    what: str
    """A layer, or some of its output channels."""
    multipliers: tuple[int, int] | None = None
    """[first, end) of those it may use; None for any."""
    begin: int = 0
    """The earliest cycle of its first weight."""
    end: int | None = None
    """The cycle by which its last sum exists; None for any."""


@dataclass(frozen=True)
class Rules:
    """Conditions on an order. Where a rule says "what", it is a layer or some of its output channels."""

    before: tuple[tuple[str, ...], ...] = ()
    """Chains: each begins when all results of the one before it exist."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups: no two of one ever work at the same time."""
    at_most: int | None = None
    """Virtual neurons that work at the same time; None for as many as fit."""
    whole_filters: bool | tuple[str, ...] = False
    """Whether all sums of an output channel come from one virtual neuron, as large as its kernel where that fits; of
    all layers, or of some."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups: all of one begin in the same cycle."""
    pin: tuple[Pin, ...] = ()
    """Where and when something works."""
    priority: tuple[tuple[str, ...], ...] = ()
    """Chains: each begins no later than those behind it, but for what it is computed from."""
    at_most_of: tuple[tuple[str, int], ...] = ()
    """(layer or kind of layer, virtual neurons of it that work at the same time)."""


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """Output channels [first, end) of a layer."""

    work: int
    first: int
    end: int


_WHAT = re.compile(r"(.*?)(?:\[(\d+):(\d+)\])?", re.DOTALL)


def _wrong(what: str, hint: str, where: str = "rules") -> ModelError:
    return ModelError(what, where=where, hint=hint)


@dataclass(frozen=True)
class Asked:
    """Rules of one network, spelt out for its units."""

    rules: Rules
    units: tuple[Unit, ...]
    """In the network's order."""
    before: Mapping[tuple[Unit, Unit], str]
    """(earlier, later) -> the rule, or the dependency, as a sentence."""
    rules_before: frozenset[tuple[Unit, Unit]]
    """Those of them that a rule names."""
    apart: Mapping[tuple[Unit, Unit], str]
    """Both ways round."""
    together: tuple[tuple[tuple[Unit, ...], str], ...]
    """Groups of units; those of one group begin in the same cycle."""
    no_later: Mapping[tuple[Unit, Unit], str]
    """(first, second): the first begins no later."""
    pins: tuple[tuple[Unit, Pin], ...]
    limits: tuple[tuple[frozenset[int], int, str], ...]
    """(layers, virtual neurons of them at the same time, the rule)."""
    whole: frozenset[int]
    """Layers whose output channels stay on one virtual neuron."""

    def limit(self, work: int) -> int | None:
        """The fewest virtual neurons at the same time a layer may have; None for any number."""
        return min((most for works, most, _ in self.limits if work in works), default=None)


def asked(rules: Rules, network: Network, config: MaeriConfig) -> Asked:
    """Spell out rules for a network.

    Raises:
        ModelError: a rule names what the network has not, or rules contradict each other, naming the smallest set.
    """
    names = {work.name: number for number, work in enumerate(network.works)}
    cuts: dict[int, set[int]] = {number: {0, work.channels} for number, work in enumerate(network.works)}
    for what in _named(rules):
        number, first, end = _find(what, names, network)
        cuts[number] |= {first, end}
    units = tuple(Unit(number, *pair) for number in sorted(cuts) for pair in pairwise(sorted(cuts[number])))

    def of(what: str) -> list[Unit]:
        number, first, end = _find(what, names, network)
        return [unit for unit in units if unit.work == number and first <= unit.first and unit.end <= end]

    before: dict[tuple[Unit, Unit], str] = {}
    for work in network.works:
        for earlier in network.before(work):
            for pair in product(of(earlier.name), of(work.name)):
                before[pair] = f"{work.name} reads what {earlier.name} computes"
    given, ruled = dict(before), set[tuple[Unit, Unit]]()
    for x, y in (pair for chain in rules.before for pair in pairwise(chain)):
        for units_pair in product(of(x), of(y)):
            before.setdefault(units_pair, f"{x} before {y}")
            ruled.add(units_pair)
    apart = {
        pair: f"apart: [{x}, {y}]"
        for group in rules.apart
        for x, y in combinations(group, 2)
        for one, other in product(of(x), of(y))
        for pair in ((one, other), (other, one))
    }
    groups = tuple(
        (tuple(unit for what in group for unit in of(what)), _text("together", group)) for group in rules.together
    )
    reached = _reached(given)
    no_later = {
        pair: f"priority: [{chain[x]}, {chain[y]}]"
        for chain in rules.priority
        for x, y in combinations(range(len(chain)), 2)
        for pair in product(of(chain[x]), of(chain[y]))
        if pair[0].work not in reached.get(pair[1].work, set())
    }
    groups = (*groups, *_level(no_later, groups))
    limits = [(frozenset(range(len(names))), rules.at_most, f"at_most: {rules.at_most}")] if rules.at_most else []
    for what, most in rules.at_most_of:
        works = {names[what]} if what in names else {n for n, work in enumerate(network.works) if work.kind == what}
        limits.append((frozenset(works), most, f"at_most: {what}: {most}"))
    whole = range(len(names)) if rules.whole_filters is True else [names[what] for what in rules.whole_filters or ()]
    pins = tuple((unit, pin) for pin in rules.pin for unit in of(pin.what))
    found = Asked(
        rules, units, before, frozenset(ruled), apart, groups, no_later, pins, tuple(limits), frozenset(whole)
    )
    clash = _smallest_clash(found, config)
    if clash:
        raise _wrong(f"they contradict each other: {'; '.join(clash)}", "leave one of them out")
    return found


def _text(rule: str, group: Iterable[str]) -> str:
    return f"{rule}: [{', '.join(group)}]"


def _named(rules: Rules) -> list[str]:
    """All that rules name, but kinds of layers."""
    chains = (*rules.before, *rules.apart, *rules.together, *rules.priority)
    found = [what for chain in chains for what in chain]
    found += [pin.what for pin in rules.pin] + [what for what, _ in rules.at_most_of if what not in KINDS]
    return [*found, *(rules.whole_filters if isinstance(rules.whole_filters, tuple) else ())]


def _find(what: str, names: Mapping[str, int], network: Network) -> tuple[int, int, int]:
    """A layer's number and the range of output channels."""
    if what in names:
        return names[what], 0, network.works[names[what]].channels
    match = _WHAT.fullmatch(what)
    if match and match[1] in names and match[2]:
        work, first, end = names[match[1]], int(match[2]), int(match[3])
        if first < end <= network.works[work].channels:
            return work, first, end
        channels = network.works[work].channels
        raise _wrong(f"'{what}' are no output channels of the layer", f"it has {channels}, from 0 to {channels}")
    hint = f"use {', '.join(list(names)[:12])}{' ...' if len(names) > 12 else ''}"
    raise _wrong(f"there is no layer '{what}' in the network", hint)


def _level(
    no_later: Mapping[tuple[Unit, Unit], str], groups: Iterable[tuple[tuple[Unit, ...], str]]
) -> list[tuple[tuple[Unit, ...], str]]:
    """Groups of units of which each begins no later than each other one, and so all together."""
    after: dict[Unit, set[Unit]] = {}
    pairs = [*no_later, *(pair for group, _ in groups for pair in product(group, group))]
    for x, y in pairs:
        after.setdefault(x, set()).add(y)
    changed = True
    while changed:
        further = {x: set().union(*(after.get(y, set()) for y in found)) - found for x, found in after.items()}
        changed = any(further.values())
        for x, more in further.items():
            after[x] |= more
    alike = {frozenset(y for y in found if x in after.get(y, set())) | {x} for x, found in after.items()}
    sentences = {x: sentence for (x, _), sentence in no_later.items()}
    return [
        (tuple(sorted(group)), "; ".join(sorted({sentences[unit] for unit in group if unit in sentences})))
        for group in sorted(alike, key=sorted)
        if len(group) > 1 and any(unit in sentences for unit in group)
    ]


def _reached(before: Iterable[tuple[Unit, Unit]]) -> dict[int, set[int]]:
    """The layers each layer comes before, directly or not."""
    after: dict[int, set[int]] = {}
    for x, y in before:
        after.setdefault(x.work, set()).add(y.work)
    changed = True
    while changed:
        changed = False
        for reached in after.values():
            further = set().union(*(after.get(each, set()) for each in reached)) - reached
            reached |= further
            changed |= bool(further)
    return after


def _smallest_clash(found: Asked, config: MaeriConfig) -> list[str]:
    """The sentences of the smallest set of rules and dependencies that no order can keep; empty where there is none."""
    clashes = [*_of_groups(found, config), *_of_pins(found, config)]
    circle = _smallest_circle(found)
    if circle:
        clashes.append(circle)
    return min(clashes, key=len, default=[])


def _of_groups(found: Asked, config: MaeriConfig) -> list[list[str]]:
    clashes = []
    for (x, y), sentence in found.apart.items():
        if x == y:
            clashes.append([f"{sentence} keeps a layer from itself"])
        clashes += [[rule, sentence] for group, rule in found.together if x != y and x in group and y in group]
    for group, rule in found.together:
        for works, most, sentence in found.limits:
            if sum(unit.work in works for unit in group) > most:
                clashes.append([rule, sentence])
        if len(group) * max(config.port_width, 2) > config.multipliers:
            clashes.append([f"{rule} needs more than the {config.multipliers} multipliers"])
    return clashes


def _of_pins(found: Asked, config: MaeriConfig) -> list[list[str]]:
    clashes = []
    for unit, pin in found.pins:
        low, high = pin.multipliers or (0, config.multipliers)
        first, end = -(-low // config.port_width), high // config.port_width
        if not (0 <= low < high <= config.multipliers) or end <= first or high - low < 2:
            hint = f", of {config.multipliers}" + (f" in ports of {config.port_width}" if config.port_width > 1 else "")
            clashes.append([f"pin: {pin.what} to multipliers [{low}, {high}){hint}"])
        if pin.end is not None and pin.end <= pin.begin:
            clashes.append([f"pin: {pin.what} from cycle {pin.begin} to cycle {pin.end}"])
        for other, second in found.pins:
            if (unit, other) in found.before and second.end is not None and second.end <= pin.begin:
                late = f"pin: {pin.what} from cycle {pin.begin}"
                clashes.append([late, f"pin: {second.what} to cycle {second.end}", found.before[unit, other]])
            other_low, other_high = second.multipliers or (0, config.multipliers)
            if unit == other and pin != second and max(low, other_low) >= min(high, other_high):
                places = [f"pin: {each.what} to multipliers {list(each.multipliers or ())}" for each in (pin, second)]
                clashes.append(places)
    return clashes


def _smallest_circle(found: Asked) -> list[str]:
    """The sentences of the shortest circle of what must come before what, unless all of it may begin together."""
    arrows: dict[Unit, dict[Unit, tuple[str, bool]]] = {unit: {} for unit in found.units}
    for (x, y), sentence in found.no_later.items():
        arrows[x][y] = sentence, False
    for group, sentence in found.together:
        for x, y in combinations(group, 2):
            arrows[x].setdefault(y, (sentence, False))
            arrows[y].setdefault(x, (sentence, False))
    for (x, y), sentence in found.before.items():
        arrows[x][y] = sentence, True
    circles = (_shortest(arrows, start) for start in arrows)
    return min((circle for circle in circles if circle), key=len, default=[])


def _shortest(arrows: Mapping[Unit, Mapping[Unit, tuple[str, bool]]], start: Unit) -> list[str]:
    """The sentences of the shortest way from a unit back to itself that takes time."""
    waiting: deque[tuple[Unit, bool, list[str]]] = deque([(start, False, [])])
    seen = set[tuple[Unit, bool]]()
    while waiting:
        place, takes, path = waiting.popleft()
        for to, (sentence, strict) in arrows[place].items():
            further = path if sentence in path else [*path, sentence]
            if to == start and (takes or strict):
                return further
            if (to, takes or strict) not in seen:
                seen.add((to, takes or strict))
                waiting.append((to, takes or strict, further))
    return []


def load_rules(path: Path) -> Rules:
    """Read rules from a small YAML file, whose keys are the fields of `Rules`; `at_most` is a number or a mapping of
    `network`, kinds and layers to numbers, `pin` is a list of mappings of the fields of `Pin`.

    Raises:
        ModelError: the file cannot be read, or says something else.
    """
    import yaml  # type: ignore[import-untyped]

    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        what = f"there is no such file, or it is larger than {MAX_BYTES} bytes"
        raise _wrong(what, "check the spelling; rules are a small YAML file", str(path))
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(
            f"this is not YAML: {error}", "write rules such as before: [[conv_0, conv_2]]", str(path)
        ) from error
    return read_rules(found, str(path))


def read_rules(found: object, where: str = "rules") -> Rules:
    """Rules from what a YAML file holds.

    Raises:
        ModelError: it is something else.
    """
    keys = [field.name for field in fields(Rules) if field.name != "at_most_of"]
    if not isinstance(found, dict) or set(found) - set(keys):
        hint = "leave out what is not one of these keys"
        raise _wrong(f"rules are a mapping with some of {', '.join(keys)}", hint, where)
    chains = {key: _chains(key, found.get(key), where) for key in ("before", "apart", "together", "priority")}
    whole = found.get("whole_filters", False)
    if not (isinstance(whole, bool) or _is_names(whole)):
        what = f"whole_filters must be true or false or a list of layers, is {whole!r}"
        raise _wrong(what, "give true or false", where)
    most, most_of = _limits(found.get("at_most"), where)
    pins = found.get("pin") or []
    if not isinstance(pins, list):
        raise _wrong(
            "pin must be a list of mappings", "write it such as pin: [{what: conv_0, multipliers: [0, 16]}]", where
        )
    return Rules(
        **chains,
        at_most=most,
        whole_filters=whole if isinstance(whole, bool) else tuple(whole),
        pin=tuple(_pin(one, where) for one in pins),
        at_most_of=most_of,
    )


def _is_names(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _chains(key: str, found: object, where: str) -> tuple[tuple[str, ...], ...]:
    listed = found or []
    if not (isinstance(listed, list) and all(_is_names(one) and len(one) > 1 for one in listed)):
        what = f"{key} must be a list of pairs of layer names, or of longer lists"
        raise _wrong(what, f"write it such as {key}: [[conv_0, conv_2]]", where)
    return tuple(tuple(one) for one in listed)


def _limits(found: object, where: str) -> tuple[int | None, tuple[tuple[str, int], ...]]:
    given: Mapping[Any, Any] = found if isinstance(found, dict) else {"network": found} if found is not None else {}
    for name, most in given.items():
        if type(most) is not int or most < 1 or not isinstance(name, str):
            what = f"at_most must be a number of virtual neurons, at least 1, is {most!r}"
            raise _wrong(what, "give a whole number, such as at_most: 4, or numbers by layer or kind", where)
    return given.get("network"), tuple((name, most) for name, most in given.items() if name != "network")


def _pin(found: object, where: str) -> Pin:
    hint = "write it such as {what: conv_0, multipliers: [0, 16], begin: 100, end: 2000}"
    if not isinstance(found, dict) or set(found) - {field.name for field in fields(Pin)} or "what" not in found:
        raise _wrong("a pin is a mapping of what to multipliers, begin or end", hint, where)
    place, begin, end = found.get("multipliers"), found.get("begin", 0), found.get("end")
    numbers: Sequence[object] = [*(place if isinstance(place, list) else []), begin, *([] if end is None else [end])]
    fitting = place is None or (isinstance(place, list) and len(place) == 2)
    if not fitting or not isinstance(found["what"], str) or any(type(one) is not int or one < 0 for one in numbers):
        raise _wrong(f"this is no pin: {found!r}", hint, where)
    return Pin(found["what"], None if place is None else (place[0], place[1]), begin, end)
