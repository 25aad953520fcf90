"""Orders that were found before, by all they follow from: layers, configuration, and the text of what finds them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path

from dovetail.files import default_cache, keep_file, kept_file
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import Network
from dovetail.targets.maeri.order import Item, Order, Segment
from dovetail.targets.maeri.timing import Tile
from dovetail.targets.maeri.tree import Range


def stored(asked: object, network: Network, config: MaeriConfig, find: Callable[[], Order | None]) -> Order | None:
    """The order of a network that was found for the same question, else what `find` gives, which is then kept.

    Args:
        asked: all the order depends on beside the configuration; its `repr` stands for it.
        network: of the order.
        config: likewise.
        find: finds it; None where there is none.
    """
    text = f"{asked!r} {config!r} {_maker()}"
    place = default_cache() / "maeri" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    data = kept_file(place)
    if data is not None:
        return _read(data, network, config)
    found = find()
    keep_file(place, _written(found))
    return found


def _written(order: Order | None) -> bytes:
    """An order as JSON: lists of numbers as `_read` takes them."""
    if order is None:
        return b"null"
    return json.dumps([order.makespan, [astuple(item) for item in order.items]], separators=(",", ":")).encode()


def _read(data: bytes, network: Network, config: MaeriConfig) -> Order | None:
    """What `_written` wrote, as the file's digest says."""
    held = json.loads(data)
    if held is None:
        return None
    items = tuple(
        Item(work, Tile(*tile), Range(*place), start, tuple(Segment(*one) for one in segments), (taps[0], taps[1]))
        for work, tile, place, start, segments, taps in held[1]
    )
    return Order(network, config, items, held[0])


@cache
def _maker() -> str:
    """A digest of this package's text."""
    texts = [source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()
