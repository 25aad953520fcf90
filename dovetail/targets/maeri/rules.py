"""A user's rules for an order: their file, and what they mean for the layers of a network.

A rule names layers as the model does, or some of a layer's output channels: `conv_2[0:8]` are the first eight. The
channels of a layer that every rule treats alike are a unit; units are what is ordered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from dovetail.documents import read_document
from dovetail.documents.lines import ValuePath
from dovetail.errors import ModelError
from dovetail.targets.maeri.network import OrderNetwork

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
    return Rules(
        before=file.before or (),
        apart=file.apart or (),
        at_most=most.get("network"),
        whole_filters=file.whole_filters,
        together=file.together or (),
        pin=file.pin or (),
        priority=file.priority or (),
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


@dataclass(frozen=True)
class UnitRules:
    """Rules for the units of one network. Each comes with its reason."""

    rules: Rules
    units: tuple[ChannelRange, ...]
    """In the network's order."""
    before: Mapping[tuple[ChannelRange, ChannelRange], Reason]
    """(earlier, later), by a rule or a dependency."""
    rules_before: frozenset[tuple[ChannelRange, ChannelRange]]
    """Those of them that a rule names."""
    apart: Mapping[tuple[ChannelRange, ChannelRange], Reason]
    """Pairs, both ways round."""
    together: tuple[tuple[tuple[ChannelRange, ...], Reason], ...]
    """Units that begin in the same cycle."""
    no_later: Mapping[tuple[ChannelRange, ChannelRange], Reason]
    """(first, second): the first begins no later."""
    pins: tuple[tuple[ChannelRange, Pin, Reason], ...]
    limits: tuple[tuple[frozenset[int], int, Reason], ...]
    """(layers, virtual neurons of them at the same time)."""
    whole: frozenset[int]
    """Layers whose output channels stay on one virtual neuron."""

    def limit(self, work: int) -> int | None:
        """The fewest virtual neurons at the same time a layer may have; None for any number."""
        return min((most for works, most, _ in self.limits if work in works), default=None)


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


def unit_rules(rules: Rules, network: OrderNetwork) -> UnitRules:
    """Rules for the units of a network, as they stand; `clashes.py` finds what follows from several of them.

    Raises:
        ModelError: a rule names a layer or channels that the network has not.
    """
    ranges = {what: channel_range(what, network) for what in _names(rules)}
    cuts = [{0, work.channels} for work in network.works]
    for part in ranges.values():
        cuts[part.work] |= {part.first, part.end}
    units = [ChannelRange(number, *pair) for number, ends in enumerate(cuts) for pair in pairwise(sorted(ends))]

    def of(what: str) -> list[ChannelRange]:
        part = ranges[what]
        return [unit for unit in units if unit.work == part.work and part.first <= unit.first and unit.end <= part.end]

    before, ruled = _dependencies(network, units), set[tuple[ChannelRange, ChannelRange]]()
    for number, chain in enumerate(rules.before):
        for x, y in pairwise(chain):
            for pair in product(of(x), of(y)):
                before.setdefault(pair, Reason(f"{x} before {y}", ("before", number)))
                ruled.add(pair)
    apart = {
        pair: Reason(f"apart: [{x}, {y}]{_itself(of(x), of(y))}", ("apart", number))
        for number, group in enumerate(rules.apart)
        for x, y in combinations(group, 2)
        for one, other in product(of(x), of(y))
        for pair in ((one, other), (other, one))
    }
    together = [
        (tuple(dict.fromkeys(unit for what in group for unit in of(what))), Reason(text, ("together", number)))
        for number, group in enumerate(rules.together)
        for text in [f"together: [{', '.join(group)}]"]
    ]
    no_later = {
        pair: Reason(f"priority: [{x}, {y}]", ("priority", number))
        for number, chain in enumerate(rules.priority)
        for x, y in combinations(chain, 2)
        for pair in product(of(x), of(y))
        if pair[1].work not in network.ancestors[pair[0].work]
    }
    pins = [(unit, pin, Reason(str(pin), ("pin", n))) for n, pin in enumerate(rules.pin) for unit in of(pin.what)]
    return UnitRules(
        rules,
        tuple(units),
        before,
        frozenset(ruled),
        apart,
        tuple(together),
        no_later,
        tuple(pins),
        tuple(_limits(rules, network)),
        whole_layers(rules, network),
    )


def whole_layers(rules: Rules, network: OrderNetwork) -> frozenset[int]:
    """Layers whose output channels stay on one virtual neuron."""
    if isinstance(rules.whole_filters, bool):
        return frozenset(range(len(network.works)) if rules.whole_filters else ())
    return frozenset(channel_range(what, network).work for what in rules.whole_filters)


def _dependencies(
    network: OrderNetwork, units: Iterable[ChannelRange]
) -> dict[tuple[ChannelRange, ChannelRange], Reason]:
    """Pairs of units of which the second is computed from the first."""
    of_work: dict[int, list[ChannelRange]] = {}
    for unit in units:
        of_work.setdefault(unit.work, []).append(unit)
    return {
        pair: Reason(f"{work.name} reads what {network.works[earlier].name} computes")
        for number, work in enumerate(network.works)
        for earlier in network.earlier(number)
        for pair in product(of_work[earlier], of_work[number])
    }


def _itself(ones: Iterable[ChannelRange], others: Iterable[ChannelRange]) -> str:
    return " keeps a layer from itself" if set(ones) & set(others) else ""


def _limits(rules: Rules, network: OrderNetwork) -> Iterator[tuple[frozenset[int], int, Reason]]:
    if rules.at_most:
        yield (
            frozenset(range(len(network.works))),
            rules.at_most,
            Reason(f"at_most: {rules.at_most}", ("at_most", "network")),
        )
    for what, most in rules.at_most_of:
        works = [number for number, work in enumerate(network.works) if what in (work.name, work.family)]
        named = [number for number in works if network.works[number].name == what]
        yield frozenset(named or works), most, Reason(f"at_most: {what}: {most}", ("at_most", what))


def _names(rules: Rules) -> list[str]:
    """All layers and channels that rules name."""
    groups = (*rules.before, *rules.apart, *rules.together, *rules.priority)
    names = [what for group in groups for what in group] + [pin.what for pin in rules.pin]
    names += [what for what, _ in rules.at_most_of if what not in FAMILIES]
    return [*names, *(rules.whole_filters if isinstance(rules.whole_filters, tuple) else ())]
