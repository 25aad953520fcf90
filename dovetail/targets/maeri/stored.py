"""Orders that were found before, by all they follow from: layers, configuration, and the text of what finds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

from dovetail.files import kept_answer
from dovetail.targets.maeri.tile import MultiplierTile
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderNetwork
from dovetail.targets.maeri.order import ChannelSegment, Item, NetworkOrder
from dovetail.targets.maeri.tree import Range


def stored(
    asked: object, network: OrderNetwork, config: MaeriConfig, find: Callable[[], NetworkOrder | None]
) -> NetworkOrder | None:
    """The order of a network that was found for the same question, else what `find` gives, which is then kept.

    Args:
        asked: all the order depends on beside the configuration; its `repr` stands for it.
        network: of the order.
        config: likewise.
        find: finds it; None where there is none.
    """
    data = kept_answer(Path(__file__).parent, f"{asked!r} {config!r}", lambda: _written(find()))
    return _read(data, network, config)


def _written(order: NetworkOrder | None) -> bytes:
    """An order as JSON: lists of numbers as `_read` takes them."""
    if order is None:
        return b"null"
    return json.dumps([order.makespan, [astuple(item) for item in order.items]], separators=(",", ":")).encode()


def _read(data: bytes, network: OrderNetwork, config: MaeriConfig) -> NetworkOrder | None:
    """What `_written` wrote, as the file's digest says."""
    held = json.loads(data)
    if held is None:
        return None
    items = tuple(
        Item(
            work,
            MultiplierTile(*tile),
            Range(*place),
            start,
            tuple(ChannelSegment(*one) for one in segments),
            (taps[0], taps[1]),
        )
        for work, tile, place, start, segments, taps in held[1]
    )
    return NetworkOrder(network, config, items, held[0])
