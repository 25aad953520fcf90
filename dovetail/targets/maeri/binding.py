"""What keeps each item of an order from being quicker, and how much of the engine works when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dovetail.targets.maeri.tile import grid, traffic
from dovetail.targets.maeri.order import Item, NetworkOrder

Shares = npt.NDArray[np.float64]


class Bottleneck(IntEnum):
    """What an item waits for."""

    MULTIPLIERS = 0
    BOTH = 1
    PORTS = 2
    WEIGHTS = 3
    LINES = 4
    TREE = 5


SAID = {
    Bottleneck.MULTIPLIERS: ("multipliers", "a product in every cycle"),
    Bottleneck.BOTH: ("multipliers and ports", "a product and a value sent in every cycle"),
    Bottleneck.PORTS: ("ports", "inputs are sent more slowly than they could be multiplied"),
    Bottleneck.WEIGHTS: ("weights", "weights, and waiting for last sums, take longer than products"),
    Bottleneck.LINES: ("lines", "sums queue at the collection bus"),
    Bottleneck.TREE: ("tree", "sums go round through the tree between steps"),
}
"""A word and a sentence for each."""


def binds(order: NetworkOrder, item: Item) -> Bottleneck:
    """What an item waits for most of its time."""
    time, columns = order.timing(item), grid(order.work(item), item.tile)[1]
    products = sum(time.positions(columns, part.first, part.count) for part in item.segments)
    if order.end(item) - item.start > 2 * products:
        return Bottleneck.WEIGHTS
    sends, pace = max(later for _, later in time.rates), -(-time.pace[0] // time.pace[1])
    if max(sends, pace) <= time.folds:
        return Bottleneck.BOTH if sends == time.folds and order.config.shared_ports else Bottleneck.MULTIPLIERS
    if sends >= pace:
        return Bottleneck.PORTS
    return Bottleneck.TREE if time.going else Bottleneck.LINES


@dataclass(frozen=True)
class Utilisation:
    """How much of the engine works in spans of equal length."""

    edges: npt.NDArray[np.int64]
    """Cycles the spans lie between."""
    multipliers: Shares
    """[what binds, span]: multipliers of items that are bound so, as a part of all."""
    ports: Shares
    """Values sent, as a part of what the ports could."""
    lines: Shares
    """Sums taken, as a part of what the lines could."""


def use_of(order: NetworkOrder, spans: int) -> Utilisation:
    """How much of the engine an order uses, in at most so many spans; values and sums spread over each item evenly."""
    edges = np.unique(np.linspace(0, order.makespan, spans + 1).round().astype(np.int64))
    total = np.zeros((len(Bottleneck) + 2, len(edges)))
    for item in order.items:
        end, time, layer = order.end(item), order.timing(item), order.work(item).layer
        past = np.clip(edges - item.start, 0, end - item.start)
        total[binds(order, item)] += past * (time.size * item.tile.neurons / order.config.multipliers)
        weights, first, later = traffic(order.config, layer, item.tile)
        columns, sends, sums = grid(order.work(item), item.tile)[1], 0, 0
        for part in item.segments:
            rows = 1 + (part.first + part.count - 1) // columns - part.first // columns
            sends += time.folds * (weights + rows * first + (part.count - rows) * later)
            sums += part.count * item.tile.neurons
        total[-2] += past * (sends / (end - item.start) / order.config.distribution)
        total[-1] += past * (sums / (end - item.start) / order.config.collection)
    shares = np.clip(np.diff(total, axis=1) / np.diff(edges), 0.0, 1.0)
    return Utilisation(edges, shares[:-2], shares[-2], shares[-1])
