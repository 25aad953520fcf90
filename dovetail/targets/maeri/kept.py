"""Whether an order keeps the user's rules, by its items and the times that the hardware makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from dovetail.targets.maeri.machine import play
from dovetail.targets.maeri.network import MultiplierLayer
from dovetail.targets.maeri.order import Item, NetworkOrder, channels_of, sweep
from dovetail.targets.maeri.rules import FAMILIES, Rules, channel_range, whole_layers
from dovetail.targets.maeri.tree import Range


@dataclass(frozen=True)
class _ItemSpan:
    """An item in time."""

    item: Item
    work: MultiplierLayer
    channels: frozenset[int]
    """Of the layer's result."""
    begin: int
    """The cycle of its first weight."""
    end: int
    """The cycle from which its last sum has left."""
    places: tuple[Range, ...]


def broken(order: NetworkOrder, rules: Rules) -> list[str]:
    """A sentence for every rule that an order breaks."""
    judge = _RuleJudge(order, rules)
    return [*judge.sequences(), *judge.pins(), *judge.limits(), *judge.whole_filters()]


def _span(order: NetworkOrder, item: Item) -> _ItemSpan:
    work = order.work(item)
    if work.turned:
        height = item.tile.out_rows
        rows = [range(part.first * height, (part.first + part.count) * height) for part in item.segments]
        channels = {row for own in rows for row in own if row < work.channels}
    else:
        channels = {channel for part in item.segments for channel in channels_of(work, item.tile, part.channel)}
    played = play(order.config, work.layer, item)
    return _ItemSpan(item, work, frozenset(channels), item.start, played.until, played.places)


class _RuleJudge:
    """An order's items beside the rules."""

    def __init__(self, order: NetworkOrder, rules: Rules) -> None:
        self.network, self.rules = order.network, rules
        self.spans = [_span(order, item) for item in order.items]

    def of(self, what: str) -> list[_ItemSpan]:
        """The items of a layer, or of some of its channels."""
        part = channel_range(what, self.network)
        channels = range(part.first, part.end)
        return [span for span in self.spans if span.item.work == part.work and not span.channels.isdisjoint(channels)]

    def begin(self, what: str) -> int:
        """The cycle in which a layer begins."""
        return min(span.begin for span in self.of(what))

    def sequences(self) -> Iterator[str]:
        """Rules about what comes first."""
        for x, y in (pair for chain in self.rules.before for pair in pairwise(chain)):
            last, first = max(span.end for span in self.of(x)), self.begin(y)
            if first < last:
                yield f"before: {y} begins in cycle {first}, {x} exists from {last}"
        for x, y in (pair for group in self.rules.apart for pair in combinations(group, 2)):
            if any(a.begin < b.end and b.begin < a.end for a in self.of(x) for b in self.of(y)):
                yield f"apart: {x} and {y} work at the same time"
        for group in self.rules.together:
            begins = {what: self.begin(what) for what in group}
            if len(set(begins.values())) > 1:
                yield f"together: {begins}"
        for x, y in (pair for chain in self.rules.priority for pair in combinations(chain, 2)):
            first, second = (channel_range(what, self.network).work for what in (x, y))
            if self.begin(x) > self.begin(y) and second not in self.network.ancestors[first]:
                yield f"priority: {y} begins before {x}"

    def pins(self) -> Iterator[str]:
        """Places and times of layers."""
        for pin in self.rules.pin:
            for span in self.of(pin.what):
                first, end = span.places[0].start, span.places[-1].end
                low, high = pin.multipliers or (first, end)
                if first < low or end > high:
                    yield f"pin: {pin.what} is on multipliers [{first}, {end})"
                if span.begin < pin.begin or (pin.end is not None and span.end > pin.end):
                    yield f"pin: {pin.what} works from cycle {span.begin} to {span.end}"

    def limits(self) -> Iterator[str]:
        """Virtual neurons at the same time."""
        limits = [("the network", self.rules.at_most, self.spans)] if self.rules.at_most else []
        names = {work.name for work in self.network.works}
        for what, most in self.rules.at_most_of:
            is_family = what in FAMILIES and what not in names
            spans = [span for span in self.spans if span.work.family == what] if is_family else self.of(what)
            limits.append((what, most, spans))
        for what, most, spans in limits:
            for cycle, numbers in sweep((span.begin, span.end) for span in spans):
                working = sum(len(spans[number].places) for number in numbers)
                if working > most:
                    yield f"at_most: {working} virtual neurons of {what} work in cycle {cycle}"
                    break

    def whole_filters(self) -> Iterator[str]:
        """Output channels on one virtual neuron each."""
        for number in sorted(whole_layers(self.rules, self.network)):
            work, places = self.network.works[number], dict[int, set[Range]]()
            for span in self.of(work.name):
                tile = span.item.tile
                if span.item.taps != (0, work.layer.taps):
                    yield f"whole_filters: {work.name} has sums in parts"
                if work.turned:
                    continue
                if tile.out_rows * tile.out_columns > 1:
                    yield f"whole_filters: {work.name} has several virtual neurons for one output channel"
                neurons = span.places[: tile.filters * tile.groups]  # in the order of the channels they compute
                for part in span.item.segments:
                    for channel, place in zip(channels_of(work, tile, part.channel), neurons, strict=False):
                        places.setdefault(channel, set()).add(place)
            if any(len(each) > 1 for each in places.values()):
                yield f"whole_filters: an output channel of {work.name} is on several virtual neurons"
