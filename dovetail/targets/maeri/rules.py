"""What the user asks of an order beyond what the hardware does.

A rule names layers as the model does, or some of a layer's output channels: `conv_2[0:8]` are the first eight. The
channels of a layer that no rule tells apart are one unit; units are what is ordered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.targets.maeri.network import OrderNetwork

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
    lines: Mapping[tuple[str, int], str] = field(default_factory=dict, compare=False)
    """Where a rule is written, by kind (a field's name) and number; nothing where it comes of no file."""

    def at(self, kind: str, number: int) -> str:
        """Where a rule is written, for the end of its sentence."""
        return f" ({self.lines[kind, number]})" if (kind, number) in self.lines else ""


@dataclass(frozen=True, slots=True, order=True)
class ChannelRange:
    """Output channels [first, end) of a layer."""

    work: int
    first: int
    end: int


_WHAT = re.compile(r"(.*?)(?:\[(\d+):(\d+)\])?", re.DOTALL)


def _wrong(what: str, hint: str, where: str = "rules") -> ModelError:
    return ModelError(what, where=where, hint=hint)


@dataclass(frozen=True)
class UnitRules:
    """Rules of one network, spelt out for its units."""

    rules: Rules
    units: tuple[ChannelRange, ...]
    """In the network's order."""
    before: Mapping[tuple[ChannelRange, ChannelRange], str]
    """(earlier, later) -> the rule, or the dependency, as a sentence."""
    rules_before: frozenset[tuple[ChannelRange, ChannelRange]]
    """Those of them that a rule names."""
    apart: Mapping[tuple[ChannelRange, ChannelRange], str]
    """Both ways round."""
    together: tuple[tuple[tuple[ChannelRange, ...], str], ...]
    """(units that begin in the same cycle, the rule)."""
    no_later: Mapping[tuple[ChannelRange, ChannelRange], str]
    """(first, second): the first begins no later."""
    pins: tuple[tuple[ChannelRange, Pin, str], ...]
    """(what, where and when, the rule)."""
    limits: tuple[tuple[frozenset[int], int, str], ...]
    """(layers, virtual neurons of them at the same time, the rule)."""
    whole: frozenset[int]
    """Layers whose output channels stay on one virtual neuron."""

    def limit(self, work: int) -> int | None:
        """The fewest virtual neurons at the same time a layer may have; None for any number."""
        return min((most for works, most, _ in self.limits if work in works), default=None)


def spelt(rules: Rules, network: OrderNetwork) -> UnitRules:
    """Spell out rules for a network, as they stand: what follows from several of them is `clashes.py`'s.

    Raises:
        ModelError: a rule names what the network has not.
    """
    names = {work.name: number for number, work in enumerate(network.works)}
    cuts: dict[int, set[int]] = {number: {0, work.channels} for number, work in enumerate(network.works)}
    for what in _named(rules):
        number, first, end = _find(what, names, network)
        cuts[number] |= {first, end}
    units = tuple(ChannelRange(number, *pair) for number in sorted(cuts) for pair in pairwise(sorted(cuts[number])))

    def of(what: str) -> list[ChannelRange]:
        number, first, end = _find(what, names, network)
        return [unit for unit in units if unit.work == number and first <= unit.first and unit.end <= end]

    before: dict[tuple[ChannelRange, ChannelRange], str] = {}
    for work in network.works:
        for earlier in network.before(work):
            for pair in product(of(earlier.name), of(work.name)):
                before[pair] = f"{work.name} reads what {earlier.name} computes"
    reached, ruled = _reached(before), set[tuple[ChannelRange, ChannelRange]]()
    for number, chain in enumerate(rules.before):
        for x, y in pairwise(chain):
            for units_pair in product(of(x), of(y)):
                before.setdefault(units_pair, f"{x} before {y}{rules.at('before', number)}")
                ruled.add(units_pair)
    apart = {
        pair: f"apart: [{x}, {y}]{_itself(of(x), of(y))}{rules.at('apart', number)}"
        for number, group in enumerate(rules.apart)
        for x, y in combinations(group, 2)
        for one, other in product(of(x), of(y))
        for pair in ((one, other), (other, one))
    }
    groups = tuple(
        (tuple(dict.fromkeys(unit for what in group for unit in of(what))), _text(rules, number, group))
        for number, group in enumerate(rules.together)
    )
    no_later = {
        pair: f"priority: [{chain[x]}, {chain[y]}]{rules.at('priority', number)}"
        for number, chain in enumerate(rules.priority)
        for x, y in combinations(range(len(chain)), 2)
        for pair in product(of(chain[x]), of(chain[y]))
        if pair[0].work not in reached.get(pair[1].work, set())
    }
    whole = range(len(names)) if rules.whole_filters is True else [names[what] for what in rules.whole_filters or ()]
    pins = tuple(
        (unit, pin, f"{_pinned(pin)}{rules.at('pin', number)}")
        for number, pin in enumerate(rules.pin)
        for unit in of(pin.what)
    )
    limits = tuple(_spelt_limits(rules, network, names))
    return UnitRules(rules, units, before, frozenset(ruled), apart, groups, no_later, pins, limits, frozenset(whole))


def _itself(ones: Sequence[ChannelRange], others: Sequence[ChannelRange]) -> str:
    return " keeps a layer from itself" if set(ones) & set(others) else ""


def _spelt_limits(
    rules: Rules, network: OrderNetwork, names: Mapping[str, int]
) -> Iterator[tuple[frozenset[int], int, str]]:
    if rules.at_most:
        yield frozenset(names.values()), rules.at_most, f"at_most: {rules.at_most}{rules.at('at_most', 0)}"
    for number, (what, most) in enumerate(rules.at_most_of):
        works = {names[what]} if what in names else {n for n, work in enumerate(network.works) if work.kind == what}
        yield frozenset(works), most, f"at_most: {what}: {most}{rules.at('at_most_of', number)}"


def _pinned(pin: Pin) -> str:
    parts = [f"multipliers [{pin.multipliers[0]}, {pin.multipliers[1]})"] if pin.multipliers else []
    parts += [f"from cycle {pin.begin}"] if pin.begin else []
    parts += [f"to cycle {pin.end}"] if pin.end is not None else []
    return f"pin: {pin.what} to {' '.join(parts)}".replace("to from", "from").replace("to to", "to")


def _text(rules: Rules, number: int, group: Iterable[str]) -> str:
    return f"together: [{', '.join(group)}]{rules.at('together', number)}"


def _named(rules: Rules) -> list[str]:
    """All that rules name, but kinds of layers."""
    chains = (*rules.before, *rules.apart, *rules.together, *rules.priority)
    found = [what for chain in chains for what in chain]
    found += [pin.what for pin in rules.pin] + [what for what, _ in rules.at_most_of if what not in KINDS]
    return [*found, *(rules.whole_filters if isinstance(rules.whole_filters, tuple) else ())]


def _find(what: str, names: Mapping[str, int], network: OrderNetwork) -> tuple[int, int, int]:
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


def _reached(before: Iterable[tuple[ChannelRange, ChannelRange]]) -> dict[int, set[int]]:
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
        text = path.read_text()
        found, marks = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(
            f"this is not YAML: {error}", "write rules such as before: [[conv_0, conv_2]]", str(path)
        ) from error
    return replace(read_rules(found, str(path)), lines=dict(_lines(marks, path.name)))


def _lines(marks: Any, name: str) -> Iterator[tuple[tuple[str, int], str]]:
    """Where each rule of a file is written, from YAML's nodes of what was read as rules."""
    for key, value in marks.value if marks is not None else ():
        numbered = value.value if isinstance(value.value, list) else [value]
        if key.value == "at_most" and isinstance(value.value, list):
            numbered = [each for what, each in value.value if what.value != "network"]
            network = [each for what, each in value.value if what.value == "network"]
            yield from ((("at_most", 0), f"{name}:{each.start_mark.line + 1}") for each in network)
        kind = "at_most_of" if key.value == "at_most" and isinstance(value.value, list) else str(key.value)
        for number, each in enumerate(numbered):
            yield (kind, number), f"{name}:{each.start_mark.line + 1}"


def read_rules(found: object, where: str = "rules") -> Rules:
    """Rules from what a YAML file holds.

    Raises:
        ModelError: it is something else.
    """
    keys = [each.name for each in fields(Rules) if each.name not in ("at_most_of", "lines")]
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
        before=chains["before"],
        apart=chains["apart"],
        together=chains["together"],
        priority=chains["priority"],
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
    if not isinstance(found, dict) or set(found) - {each.name for each in fields(Pin)} or "what" not in found:
        raise _wrong("a pin is a mapping of what to multipliers, begin or end", hint, where)
    place, begin, end = found.get("multipliers"), found.get("begin", 0), found.get("end")
    numbers: Sequence[object] = [*(place if isinstance(place, list) else []), begin, *([] if end is None else [end])]
    fitting = place is None or (isinstance(place, list) and len(place) == 2)
    if not fitting or not isinstance(found["what"], str) or any(type(one) is not int or one < 0 for one in numbers):
        raise _wrong(f"this is no pin: {found!r}", hint, where)
    return Pin(found["what"], None if place is None else (place[0], place[1]), begin, end)
