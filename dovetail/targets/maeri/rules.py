"""A user's rules for an order: their file, their meaning for the layers of a network, and contradictions between them.

A rule names layers as the model does, or some of a layer's output channels: `conv_2[0:8]` are the first eight. The
channels of a layer that every rule treats alike are a unit; units are what is ordered. Of rules that no order can keep
the smallest set is found by deletion: a rule without which the others still clash is left out. So every rule that an
error names matters, and so does every dependency of the network.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from dovetail.documents import read_document
from dovetail.documents.lines import ValuePath
from dovetail.errors import ModelError
from dovetail.records import Record
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork
from dovetail.targets.maeri.tree import Range

MOST_CYCLES = 1 << 40
"""Latest cycle that a pin may name."""
FAMILIES = ("convolution", "depthwise", "dense")
"""Kinds of layers that `at_most` may name."""
_RANGE = re.compile(r"(.*)\[(\d{1,9}):(\d{1,9})\]", re.DOTALL)

LayerName = Annotated[str, Meta(description="the name of a layer")]
LayerGroup = Annotated[tuple[LayerName, ...], Meta(min_length=2, description="a list of two or more layers")]
LayerGroups = Annotated[
    tuple[LayerGroup, ...],
    Meta(description="a list of pairs of layers, or of longer lists, such as [[conv_0, conv_2]]"),
]
Neurons = Annotated[int, Meta(ge=1, le=1 << 20, description="a whole number of virtual neurons from 1 to 1048576")]
Cycle = Annotated[int, Meta(ge=0, le=MOST_CYCLES)]
Multipliers = Annotated[tuple[Cycle, Cycle], Meta(description="two whole numbers from 0 on, such as [0, 16]")]


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Place and time of a layer."""

    what: str
    """A layer, or some of its output channels."""
    multipliers: Multipliers | None = None
    """[first, end) of those it may use; None for any."""
    begin: Cycle = 0
    """The earliest cycle of its first weight."""
    end: Cycle | None = None
    """The cycle by which its last sum exists; None for any."""

    def __str__(self) -> str:
        """The pin in words."""
        parts = [f"multipliers [{self.multipliers[0]}, {self.multipliers[1]})"] if self.multipliers else []
        parts += [f"from cycle {self.begin}"] if self.begin else []
        parts += [f"to cycle {self.end}"] if self.end is not None else []
        return f"pin: {self.what} to {' '.join(parts)}".replace("to from", "from").replace("to to", "to")


class _RuleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of rules: the fields of `Rules`, but both kinds of `at_most` in one."""

    before: LayerGroups | None = None
    apart: LayerGroups | None = None
    together: LayerGroups | None = None
    priority: LayerGroups | None = None
    pin: tuple[Pin, ...] | None = None
    at_most: Neurons | dict[LayerName, Neurons] | None = None
    whole_filters: bool | tuple[LayerName, ...] = False


class Reason(NamedTuple):
    """A rule, or a dependency of the network, in words."""

    text: str
    path: ValuePath = ()
    """Path of the rule in its file; empty for a dependency."""


_LISTS = ("before", "apart", "together", "pin", "priority", "at_most_of")
"""Kinds of rules of which there may be several."""


@dataclass(frozen=True)
class Rules:
    """Conditions on an order. A rule names layers, or some of their output channels."""

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
    """Places and times of layers."""
    priority: tuple[tuple[str, ...], ...] = ()
    """Chains: each begins no later than those behind it, but for the layers it is computed from."""
    at_most_of: tuple[tuple[str, int], ...] = ()
    """(layer or kind of layer, virtual neurons of it that work at the same time)."""
    place: Callable[[ValuePath], str] | None = field(default=None, compare=False, repr=False)
    """FILE:LINE of a rule; None where the rules come from no file."""

    @property
    def limits(self) -> tuple[tuple[str, int], ...]:
        """(network, kind of layer or layer, virtual neurons of it that work at the same time)."""
        return (*((("network", self.at_most),) if self.at_most else ()), *self.at_most_of)

    def parts(self) -> tuple[Rules, ...]:
        """Each rule alone."""
        alone: list[dict[str, Any]] = [{name: (rule,)} for name in _LISTS for rule in getattr(self, name)]
        alone += [{"at_most": self.at_most}] if self.at_most else []
        whole = [True] if self.whole_filters is True else [(name,) for name in self.whole_filters or ()]
        return tuple(replace(Rules(), **rule) for rule in (*alone, *({"whole_filters": each} for each in whole)))

    def __or__(self, other: Rules) -> Rules:
        """Rules of both; of two limits of the network the lower."""
        both: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _LISTS}
        limits = [each.at_most for each in (self, other) if each.at_most]
        names = [name for each in (self, other) if each.whole_filters is not True for name in each.whole_filters or ()]
        whole = True in (self.whole_filters, other.whole_filters) or tuple(names)
        return replace(self, **both, at_most=min(limits, default=None), whole_filters=whole)

    def about(self, names: Collection[str]) -> Rules:
        """The rules for some layers, and limits of all."""

        def is_in(what: str) -> bool:
            match = _RANGE.fullmatch(what)
            return what in names or bool(match and match[1] in names)

        groups: dict[str, Any] = {
            name: tuple(part for group in getattr(self, name) if len(part := tuple(filter(is_in, group))) > 1)
            for name in ("before", "apart", "together", "priority")
        }
        limits = tuple(limit for limit in self.at_most_of if limit[0] in FAMILIES or is_in(limit[0]))
        named = () if isinstance(self.whole_filters, bool) else tuple(filter(is_in, self.whole_filters))
        whole = self.whole_filters is True or named
        pins = tuple(pin for pin in self.pin if is_in(pin.what))
        return replace(self, **groups, at_most_of=limits, whole_filters=whole, pin=pins)

    def in_words(self, reason: Reason) -> str:
        """A reason with the line it stands on."""
        return f"{reason.text} ({self.place(reason.path)})" if self.place and reason.path else reason.text


def load_rules(path: Path) -> Rules:
    """Read rules from a YAML file, whose keys are the fields of `Rules`; `at_most` is a number or a mapping of
    `network`, kinds of layers and layers to numbers.

    Raises:
        ModelError: the file cannot be read, or something in it is no rule; with the line.
    """
    hint = "write rules such as before: [[conv_0, conv_2]], see docs/maeri.md"
    document = read_document(path, "yaml", _RuleFile, hint=hint, error=ModelError, what="the file of rules")
    file = document.value
    most = file.at_most if isinstance(file.at_most, dict) else {"network": file.at_most}
    lists: dict[str, Any] = {name: getattr(file, name) or () for name in _LISTS if name != "at_most_of"}
    return Rules(
        **lists,
        at_most=most.get("network"),
        whole_filters=file.whole_filters,
        at_most_of=tuple((name, limit) for name, limit in most.items() if name != "network" and limit),
        place=replace(document, name=path.name).place,
    )


@dataclass(frozen=True, slots=True, order=True)
class ChannelRange:
    """Output channels [first, end) of a layer."""

    work: int
    """Number of the layer in the network."""
    first: int
    end: int
    taps: tuple[int, int] | None = None
    """The products of each sum; None for all."""


UnitPair = tuple[ChannelRange, ChannelRange]


class UnitRules(Record, dict=True):
    """Rules for the units of one network, and its dependencies, each with its reason."""

    units: tuple[ChannelRange, ...]
    """In the network's order."""
    whole: frozenset[int]
    """Layers whose output channels stay on one virtual neuron."""
    pins: Mapping[tuple[ChannelRange, Pin], Reason]
    """Units and their pins."""
    together: Mapping[tuple[ChannelRange, ...], Reason]
    """Groups of units that begin in the same cycle."""
    reads: Mapping[UnitPair, Reason]
    """(earlier, later): the second is computed from the first."""
    before: Mapping[UnitPair, Reason]
    """(earlier, later): the second begins when all results of the first exist."""
    no_later: Mapping[UnitPair, Reason]
    """(first, second): the first begins no later."""
    apart: Mapping[UnitPair, Reason]
    """Pairs that never work at the same time, both ways round."""
    limits: Mapping[tuple[frozenset[ChannelRange], int], Reason]
    """(units, virtual neurons of them at the same time)."""

    @cached_property
    def tables(self) -> Mapping[str, Mapping[Any, Reason]]:
        """All kinds of rules by the name of their field."""
        return {name: own for name, own in msgspec.structs.asdict(self).items() if isinstance(own, dict)}

    @property
    def reasons(self) -> list[Reason]:
        """All rules and dependencies, once each."""
        return list(dict.fromkeys(reason for own in self.tables.values() for reason in own.values()))

    def only(self, reasons: Iterable[Reason]) -> UnitRules:
        """The part of the rules that has some reasons."""
        kept: Any = set(reasons)
        parts: dict[str, Any] = {
            name: {content: reason for content, reason in own.items() if reason in kept}
            for name, own in self.tables.items()
        }
        return replace(self, **parts)

    def limit(self, unit: ChannelRange) -> int | None:
        """The fewest virtual neurons at the same time a unit may have; None for any number."""
        return min((most for units, most in self.limits if unit in units), default=None)


def channel_range(what: str, network: OrderNetwork) -> ChannelRange:
    """The output channels that a rule names.

    Raises:
        ModelError: the network has no such layer, or the layer no such channels.
    """
    names = {work.name: number for number, work in enumerate(network.works)}
    if what in names:
        return ChannelRange(names[what], 0, network.works[names[what]].channels)
    match = _RANGE.fullmatch(what)
    if match and match[1] in names:
        part = ChannelRange(names[match[1]], int(match[2]), int(match[3]))
        channels = network.works[part.work].channels
        if part.first < part.end <= channels:
            return part
        text, hint = f"'{what}' are no output channels of the layer", f"it has {channels}, from 0 to {channels}"
        raise ModelError(text, where="rules", hint=hint)
    hint = f"use {', '.join(list(names)[:12])}{' ...' if len(names) > 12 else ''}"
    raise ModelError(f"there is no layer '{what}' in the network", where="rules", hint=hint)


class Grain(IntEnum):
    """How far layers are cut into units."""

    RULES = 0
    """Into channels that rules treat alike."""
    CHANNELS = 1
    """Into output channels; a dense layer of one vector into a few parts."""
    PARTS = 2
    """Into output channels, and these into what each input channel adds."""


_PARTS = 8
"""Units of a dense layer of one vector, at most, where layers are cut into channels."""


def _taps(work: MultiplierLayer, grain: Grain) -> list[tuple[int, int] | None]:
    """The parts of a layer's sums that are units of their own."""
    area, taps = work.layer.rows * work.layer.columns, work.layer.taps
    if grain is not Grain.PARTS or work.turned or area == 1 or area == taps:
        return [None]
    return [(first, first + area) for first in range(0, taps, area)]


def units_of(rules: Rules, network: OrderNetwork, grain: Grain) -> list[ChannelRange]:
    """The units of a network, in its order.

    Raises:
        ModelError: a rule names a layer or channels that the network has not.
    """
    cuts = [{0, work.channels} for work in network.works]
    for part in (channel_range(what, network) for what in _names(rules)):
        cuts[part.work] |= {part.first, part.end}
    whole, units = whole_layers(rules, network), list[ChannelRange]()
    for number, work in enumerate(network.works):
        if grain:
            cuts[number] |= set(range(0, work.channels, -(-work.channels // _PARTS) if work.turned else 1))
        taps = [None] if number in whole else _taps(work, grain)
        units += [ChannelRange(number, *pair, part) for pair in pairwise(sorted(cuts[number])) for part in taps]
    return units


def unit_rules(rules: Rules, network: OrderNetwork, grain: Grain = Grain.RULES) -> UnitRules:
    """Rules for the units of a network, as they stand; raises as `units_of` does."""
    ranges, units = {what: channel_range(what, network) for what in _names(rules)}, units_of(rules, network, grain)

    def of(what: str) -> list[ChannelRange]:
        """The units of a layer or channels, of a kind of layers, or of the network."""
        if what in ranges:
            part = ranges[what]
            return [u for u in units if u.work == part.work and part.first <= u.first and u.end <= part.end]
        return [unit for unit in units if what in ("network", network.works[unit.work].family)]

    def pairs(kind: str, every: Callable[[Sequence[str]], Iterable[tuple[str, str]]]) -> dict[UnitPair, Reason]:
        """Pairs of units of every two layers of a rule's lists."""
        table = dict[UnitPair, Reason]()
        for number, group in enumerate(getattr(rules, kind)):
            for x, y in every(group):
                text = f"{x} before {y}" if kind == "before" else f"{kind}: [{x}, {y}]"
                text += " keeps a layer from itself" if kind == "apart" and set(of(x)) & set(of(y)) else ""
                table = dict.fromkeys(product(of(x), of(y)), Reason(text, (kind, number))) | table
        return table

    apart, priority = pairs("apart", _every_two), pairs("priority", _every_two)
    groups = {number: [unit for what in group for unit in of(what)] for number, group in enumerate(rules.together)}
    return UnitRules(
        units=tuple(units),
        whole=whole_layers(rules, network),
        reads=_dependencies(network, units),
        before=pairs("before", pairwise),
        no_later={(x, y): why for (x, y), why in priority.items() if y.work not in network.ancestors[x.work]},
        apart=apart | {(y, x): why for (x, y), why in apart.items()},
        together={
            tuple(dict.fromkeys(own)): Reason(f"together: [{', '.join(rules.together[at])}]", ("together", at))
            for at, own in groups.items()
        },
        pins={(unit, pin): Reason(str(pin), ("pin", at)) for at, pin in enumerate(rules.pin) for unit in of(pin.what)},
        limits={
            (frozenset(of(what)), most): Reason(f"at_most: {most if what == 'network' else f'{what}: {most}'}", path)
            for what, most in rules.limits
            for path in [("at_most", what)]
        },
    )


def _every_two(group: Sequence[str]) -> Iterable[tuple[str, str]]:
    return combinations(group, 2)


def whole_layers(rules: Rules, network: OrderNetwork) -> frozenset[int]:
    """Layers whose output channels stay on one virtual neuron."""
    if isinstance(rules.whole_filters, bool):
        return frozenset(range(len(network.works)) if rules.whole_filters else ())
    return frozenset(channel_range(what, network).work for what in rules.whole_filters)


def channels_read(work: MultiplierLayer, unit: ChannelRange) -> slice:
    """The channels of a layer's operand that a unit reads."""
    layer = work.layer
    if work.turned or not work.is_image:
        return slice(None)
    low, high = unit.taps or (0, layer.taps)
    area, first, last = layer.rows * layer.columns, unit.first // layer.filters, (unit.end - 1) // layer.filters
    return slice(first * layer.channels + low // area, last * layer.channels + -(-high // area))


def _dependencies(network: OrderNetwork, units: Sequence[ChannelRange]) -> dict[UnitPair, Reason]:
    """Pairs of units of which the second is computed from the first."""
    of_work: dict[int, list[ChannelRange]] = {}
    for unit in units:
        of_work.setdefault(unit.work, []).append(unit)
    pairs: dict[UnitPair, Reason] = {}
    for number, work in enumerate(network.works):
        for earlier in network.earlier(number):
            reason = Reason(f"{work.name} reads what {network.works[earlier].name} computes")
            single = len(of_work[earlier]) == 1 or len(of_work[number]) == 1
            reached = None if single else network.reached(number, earlier)
            for x, y in product(of_work[earlier], of_work[number]):
                if reached is None or reached[x.first : x.end, channels_read(work, y)].any():
                    pairs[x, y] = reason
    return pairs


def _names(rules: Rules) -> list[str]:
    """All layers and channels that rules name."""
    groups = (*rules.before, *rules.apart, *rules.together, *rules.priority)
    names = [what for group in groups for what in group] + [pin.what for pin in rules.pin]
    names += [what for what, _ in rules.at_most_of if what not in FAMILIES]
    return [*names, *(rules.whole_filters if isinstance(rules.whole_filters, tuple) else ())]


Relation = npt.NDArray[np.bool_]
"""[unit, unit]."""
_MOST_SETS = 64
"""Sets of reasons that are left out in the search for the smallest contradiction."""


def consistent_rules(rules: Rules, network: OrderNetwork, config: MaeriConfig, cut: Grain = Grain.RULES) -> UnitRules:
    """Rules for the units of a network, with groups of units that begin together because each begins no later than the
    others.

    Raises:
        ModelError: a rule names a layer that the network has not, or rules contradict each other; with the smallest set
            that does.
    """
    units = unit_rules(rules, network, cut)
    if not cut and clash(units, config):
        reasons = smallest(units.reasons, lambda kept: clash(units.only(kept), config))
        named = [rules.in_words(reason) for reason in reasons]
        if len(named) == 1:
            ports = f" in ports of {config.port_width}" if config.ports and config.shared_ports else ""
            hint = f"change it; there are {config.multipliers} multipliers{ports}"
            raise ModelError(f"this cannot be kept: {named[0]}", where="rules", hint=hint)
        raise ModelError(f"they contradict each other: {'; '.join(named)}", where="rules", hint="leave one of them out")
    return replace(units, together=dict.fromkeys(_groups(units), Reason("")))


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
    for other, pin in rules.pins:
        if other == unit and pin.multipliers:
            low, high = max(low, pin.multipliers[0]), min(high, pin.multipliers[1])
    low = -(-low // width) * width
    return Range(low, max(high - low, 0))


def shares(
    regions: Mapping[ChannelRange, Range], weights: Mapping[ChannelRange, int], config: MaeriConfig
) -> dict[ChannelRange, Range] | None:
    """Multipliers for each of several units at the same time, by weight: whole ports of those it may use; None if there
    are not enough.

    Ports are dealt out from the left, first to the unit whose region ends first: for single ports that finds a way.
    """
    width, weight = grain(config), sum(weights.values())
    ports = config.multipliers // width
    limits = {unit: (place.start // width, place.end // width) for unit, place in regions.items()}
    for dealt in range(ports, 0, -1):
        wanted = {unit: max(dealt * weights[unit] // weight, 1) for unit in limits}
        taken, at = dict[ChannelRange, Range](), 0
        while len(taken) < len(limits) and at < ports:
            open_ = [(high, unit) for unit, (low, high) in limits.items() if unit not in taken and low <= at]
            fitting = min((each for each in open_ if at + wanted[each[1]] <= each[0]), default=None)
            if fitting:
                taken[fitting[1]] = Range(at * width, wanted[fitting[1]] * width)
            at += wanted[fitting[1]] if fitting else 1
        if len(taken) == len(limits):
            return taken
    return None


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
    for x, y in (*rules.reads, *rules.before):
        strict[place[x], place[y]] = True
    reach = strict.copy()
    for x, y in rules.no_later:
        reach[place[x], place[y]] = True
    for group in rules.together:
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
    for unit, pin in rules.pins:
        low, high = pin.multipliers or (0, config.multipliers)
        inside = 0 <= low < high <= config.multipliers and allowed(rules, unit, config).size
        earliest = max(other.begin for each, other in rules.pins if reach[place[each], place[unit]])
        if not inside or (pin.end is not None and pin.end <= earliest):
            return True
    for group in _groups(rules):
        if any(len(units.intersection(group)) > most for units, most in rules.limits):
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
