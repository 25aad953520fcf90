"""Orders of a launch: of one layer, or of several layers side by side that do not read each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise, permutations
from pathlib import Path

import numpy as np

from dovetail.errors import DovetailError, SimulationError
from dovetail.files import kept_answer
from dovetail.targets.maeri.clashes import grain
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import OrderLayer, OrderNetwork, TaskKind
from dovetail.targets.maeri.order import Item, NetworkOrder, in_order
from dovetail.targets.maeri.rules import Pin, Rules
from dovetail.targets.maeri.simulate import check
from dovetail.targets.maeri.task import StridedArray, Task, layers_of
from dovetail.targets.maeri.words import WordReader, words_of

Part = tuple[OrderLayer, TaskKind]
"""A layer, and how its weights lie."""
_TURNS = 3
"""Layers of which every turn is tried."""
_WORTH = 100
"""Multipliers are shared out where that could save one in so many cycles."""


def of_parts(parts: Sequence[Part]) -> OrderNetwork:
    """Layers beside each other as a network."""
    nowhere = StridedArray(0, 0, 0, 0)
    return layers_of([Task(layer, kind, 0, False, nowhere, nowhere, 0, 0) for layer, kind in parts])


@lru_cache(maxsize=1024)
def alone(part: Part, config: MaeriConfig) -> NetworkOrder:
    """The order of one layer; its `makespan` is the scheduler's.

    Raises:
        TargetError: it does not fit.
    """
    order = stored(("alone", part), of_parts((part,)), config, lambda: arrange(of_parts((part,)), config))
    assert order is not None, "it fits, else an error says why not"
    return order


@lru_cache(maxsize=256)
def side_by_side(parts: tuple[Part, ...], config: MaeriConfig) -> NetworkOrder | None:
    """The order of layers beside each other that ends first, of those tried; its `makespan` is the machine's.

    Tried is one layer after the other without a gap, in every turn; and where more than that can be saved, multipliers
    shared out by the layers' work: to each of them, or to one, which the others then fill up.

    Returns:
        None where a layer does not fit.
    """
    return stored(("beside", parts), of_parts(parts), config, lambda: find_together(parts, config))


def stored(
    question: object, network: OrderNetwork, config: MaeriConfig, find: Callable[[], NetworkOrder | None]
) -> NetworkOrder | None:
    """The order of a network from the cache, else from `find`; it is then kept.

    Args:
        question: everything the order depends on beside the configuration; its `repr` stands for it.
        network: of the order.
        config: of the order.
        find: finds the order; None where there is none.
    """
    data = kept_answer(Path(__file__).parent, f"{question!r} {config!r}", lambda: _written(find()))
    reader, items = WordReader(np.frombuffer(data, "<u4").tolist(), _damaged), list[Item]()
    if not reader.left:
        return None
    (makespan,) = reader.take(1)
    while reader.left:
        items.append(reader.record(Item))
    return NetworkOrder(network, config, tuple(items), makespan)


def _written(order: NetworkOrder | None) -> bytes:
    """The words of an order: its makespan and its items; nothing if there is no order."""
    words = [order.makespan, *(word for item in order.items for word in words_of(item))] if order else []
    return np.array(words, "<u4").tobytes()


def _damaged(what: str) -> DovetailError:
    return SimulationError(f"an order in the cache is damaged: {what}", where="maeri", hint="clear the cache")


def find_together(parts: tuple[Part, ...], config: MaeriConfig) -> NetworkOrder | None:
    """As `side_by_side`, without the cache."""
    turns = list(permutations(range(len(parts)))) if len(parts) <= _TURNS else [tuple(range(len(parts)))]
    best = _first_to_end([_in_turn(parts, turn, config) for turn in turns])
    work = sum(layer.macs for layer, _ in parts)
    if best is None or len(parts) == 1 or (best.makespan - work // config.multipliers) * _WORTH < best.makespan:
        return best
    by_work = sorted(range(len(parts)), key=lambda number: parts[number][0].macs)
    ways = [(turn, places) for turn in (by_work, by_work[::-1]) for places in _shares(parts, turn, config)]
    ways += [(by_work, [(0, config.multipliers * quarters // 4)]) for quarters in (2, 3)]
    return _first_to_end([best, *(_in_turn(parts, turn, config, places) for turn, places in ways)])


def _first_to_end(orders: Sequence[NetworkOrder | None]) -> NetworkOrder | None:
    return min((order for order in orders if order), key=lambda order: order.makespan, default=None)


def _in_turn(
    parts: tuple[Part, ...], turn: Sequence[int], config: MaeriConfig, places: Sequence[tuple[int, int]] = ()
) -> NetworkOrder | None:
    """An order in which layers are laid out in turn, the first of them on multipliers [first, end) of their own; None
    where there is none."""
    net = of_parts(tuple(parts[number] for number in turn))
    pins = tuple(Pin(work.name, place) for work, place in zip(net.works, places, strict=False))
    try:
        order = arrange(net, config, Rules(pin=pins))
        cycles = check(order)
    except DovetailError:
        return None
    items = in_order(replace(item, work=turn[item.work]) for item in order.items)
    return NetworkOrder(of_parts(parts), config, items, cycles)


def _shares(parts: Sequence[Part], turn: Sequence[int], config: MaeriConfig) -> Iterator[list[tuple[int, int]]]:
    """Multipliers for each layer in turn, by its products, rounded down and up."""
    width = grain(config)
    ports, work = config.multipliers // width, [parts[number][0].macs for number in turn]
    for rounding in (0.3, 0.7):
        ends = [int(total * ports / sum(work) + rounding) for total in accumulate(work)]
        spans = list(pairwise((0, *ends[:-1], ports)))
        if all(first < end for first, end in spans):
            yield [(first * width, end * width) for first, end in spans]
