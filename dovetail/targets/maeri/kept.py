"""Whether an order keeps the user's rules: found from its items, and from what the hardware makes of them, alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from dovetail.targets.maeri.machine import play
from dovetail.targets.maeri.network import MultiplierLayer, OrderNetwork
from dovetail.targets.maeri.order import Item, NetworkOrder, channels_of
from dovetail.targets.maeri.rules import Rules


@dataclass(frozen=True)
class _ItemSpan:
    """An item in time."""

    item: Item
    work: MultiplierLayer
    channels: frozenset[int]
    """Of the layer's result."""
    begin: int
    end: int
    """From its first weight until its last sum has left."""
    places: tuple[tuple[int, int], ...]


def broken(order: NetworkOrder, rules: Rules) -> list[str]:
    """A sentence for everything the rules ask that an order does not do; none where it keeps them all."""
    spans = [_span(order, item) for item in order.items]
    found = [*_sequences(order.network, spans, rules), *_pins(spans, rules), *_limits(spans, rules)]
    return [*found, *_whole(order, spans, rules)]


def _span(order: NetworkOrder, item: Item) -> _ItemSpan:
    work, taps = order.work(item), item.taps[1] - item.taps[0]
    played = play(order.config, work.layer, item.tile, taps, item.place.start, item.start, item.segments)
    if work.turned:
        rows = [
            (part.first * item.tile.out_rows, (part.first + part.count) * item.tile.out_rows) for part in item.segments
        ]
        channels = {row for low, high in rows for row in range(low, min(high, work.channels))}
    else:
        channels = {channel for part in item.segments for channel in channels_of(work, item.tile, part.channel)}
    return _ItemSpan(item, work, frozenset(channels), item.start, played.until, played.places)


def _of(spans: Sequence[_ItemSpan], what: str) -> list[_ItemSpan]:
    """The items of a layer, or of some of its channels."""
    whole = [span for span in spans if span.work.name == what]
    match = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", what, re.DOTALL)
    if whole or not match:
        return whole
    wanted = set(range(int(match[2]), int(match[3])))
    return [span for span in spans if span.work.name == match[1] and span.channels & wanted]


def _sequences(network: OrderNetwork, spans: Sequence[_ItemSpan], rules: Rules) -> Iterator[str]:
    for x, y in (pair for chain in rules.before for pair in pairwise(chain)):
        last, first = max(span.end for span in _of(spans, x)), min(span.begin for span in _of(spans, y))
        if first < last:
            yield f"before: {y} begins in cycle {first}, {x} exists from {last}"
    for x, y in (pair for group in rules.apart for pair in combinations(group, 2)):
        if any(a.begin < b.end and b.begin < a.end for a in _of(spans, x) for b in _of(spans, y)):
            yield f"apart: {x} and {y} work at the same time"
    for group in rules.together:
        begins = {what: min(span.begin for span in _of(spans, what)) for what in group}
        if len(set(begins.values())) > 1:
            yield f"together: {begins}"
    for x, y in (pair for chain in rules.priority for pair in combinations(chain, 2)):
        one, other = _of(spans, x), _of(spans, y)
        late = min(span.begin for span in one) > min(span.begin for span in other)
        if late and not _depends(network, one[0].work, other[0].work):
            yield f"priority: {y} begins before {x}"


def _depends(network: OrderNetwork, work: MultiplierLayer, earlier: MultiplierLayer) -> bool:
    """Whether a layer reads what another computes, directly or not."""
    waiting, seen = [work], set[str]()
    while waiting:
        for each in network.before(waiting.pop()):
            if each.name == earlier.name:
                return True
            if each.name not in seen:
                seen.add(each.name)
                waiting.append(each)
    return False


def _pins(spans: Sequence[_ItemSpan], rules: Rules) -> Iterator[str]:
    for pin in rules.pin:
        for span in _of(spans, pin.what):
            first, end = span.places[0][0], span.places[-1][1]
            low, high = pin.multipliers or (first, end)
            if first < low or end > high:
                yield f"pin: {pin.what} is on multipliers [{first}, {end})"
            if span.begin < pin.begin or (pin.end is not None and span.end > pin.end):
                yield f"pin: {pin.what} works from cycle {span.begin} to {span.end}"


def _limits(spans: Sequence[_ItemSpan], rules: Rules) -> Iterator[str]:
    limits = [("the network", rules.at_most, list(spans))] if rules.at_most else []
    for what, most in rules.at_most_of:
        limits.append((what, most, _of(spans, what) or [span for span in spans if span.work.kind == what]))
    for what, most, counted in limits:
        assert most is not None
        for at in counted:
            working = sum(len(span.places) for span in counted if span.begin <= at.begin < span.end)
            if working > most:
                yield f"at_most: {working} virtual neurons of {what} work in cycle {at.begin}"
                break


def _whole(order: NetworkOrder, spans: Sequence[_ItemSpan], rules: Rules) -> Iterator[str]:
    names = {work.name for work in order.network.works}
    for name in names if rules.whole_filters is True else rules.whole_filters or ():
        places: dict[int, set[tuple[int, int]]] = {}
        for span in _of(spans, name):
            if span.item.taps != (0, span.work.layer.taps):
                yield f"whole_filters: {name} has sums in parts"
            if not span.work.turned and span.item.tile.out_rows * span.item.tile.out_columns > 1:
                yield f"whole_filters: {name} has several virtual neurons for one output channel"
            if not span.work.turned:
                each = span.item.tile.filters * span.item.tile.groups
                for part in span.item.segments:
                    for channel, place in zip(
                        channels_of(span.work, span.item.tile, part.channel), _in_order(span, each), strict=False
                    ):
                        places.setdefault(channel, set()).add(place)
        if any(len(found) > 1 for found in places.values()):
            yield f"whole_filters: an output channel of {name} is on several virtual neurons"


def _in_order(span: _ItemSpan, count: int) -> Sequence[tuple[int, int]]:
    """Virtual neurons in the order of the channels they compute."""
    return span.places[:count]
