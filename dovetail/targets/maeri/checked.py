"""An order of the user's own: read from a file in the form of `schedule.json`, and checked like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from dovetail.documents import read_document
from dovetail.errors import ModelError, SimulationError
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.item import ChannelSegment, Item, in_order
from dovetail.targets.maeri.machine import clock_of
from dovetail.targets.maeri.network import OrderNetwork
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.rules import Rules
from dovetail.targets.maeri.simulate import broken, check
from dovetail.targets.maeri.tile import MultiplierTile, grid
from dovetail.targets.maeri.tree import Range

_HINT = "take schedule.json of `dovetail schedule -o` as an example, and change its items"
_Size = Annotated[int, Meta(ge=1, lt=1 << 16)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Count = Annotated[int, Meta(ge=1, lt=1 << 31)]


class _FileTile(msgspec.Struct, frozen=True):
    """As a `MultiplierTile`."""

    rows: _Size = 1
    columns: _Size = 1
    channels: _Size = 1
    filters: _Size = 1
    groups: _Size = 1
    out_rows: _Size = 1
    out_columns: _Size = 1
    flat: bool = False


class _FileItem(msgspec.Struct, frozen=True):
    """An item as the file has it."""

    layer: str
    start: _Number
    multipliers: tuple[_Number, _Number]
    tile: _FileTile
    segments: Annotated[list[tuple[_Number, _Number, _Count]], Meta(min_length=1)]
    """(output channel, first position, positions)."""
    products: tuple[_Number, _Number] | None = None
    """[first, end) of the products of a sum; all if not given."""


class _OrderFile(msgspec.Struct, frozen=True):
    """The part of `schedule.json` that is an order."""

    items: Annotated[list[_FileItem], Meta(min_length=1)]


def checked(path: Path, network: OrderNetwork, config: MaeriConfig, rules: Rules) -> tuple[NetworkOrder, list[str]]:
    """An order from a file, and a sentence about what was checked: memories, hardware, inputs, sums and rules.

    Raises:
        ModelError: the file is no order of this network; or, with all there is to say, the order cannot be kept.
    """
    document = read_document(path, "json", _OrderFile, hint=_HINT, error=ModelError, what="the order")
    numbers = {work.name: number for number, work in enumerate(network.works)}
    items = list[Item]()
    for at, each in enumerate(document.value.items):
        where = document.place(("items", at))
        if each.layer not in numbers:
            hint = f"use {', '.join(numbers)}"
            raise ModelError(f"there is no layer '{each.layer}' in the network", where=where, hint=hint)
        items.append(_item(each, numbers[each.layer], network, config, where))
    if missing := [name for name, number in numbers.items() if number not in {item.work for item in items}]:
        raise ModelError(f"no item computes {', '.join(missing)}", where=str(path), hint="add items for it")
    order = NetworkOrder(network, config, in_order(items), 0)
    wrong = [f"rules: {rule}" for rule in broken(order, rules)]
    try:
        cycles = check(order)
    except SimulationError as error:
        wrong.append(f"{error.where}: {error.what}")
    if wrong:
        hint = "change these items; without --check an order is found"
        raise ModelError("; ".join(wrong), where=str(path), hint=hint)
    kept = "rules, " if rules != Rules() else ""
    note = f"{path.name} is kept: {kept}memories, multipliers, ports, lines, the tree, inputs and sums."
    return NetworkOrder(network, config, order.items, cycles), [note]


def _item(each: _FileItem, number: int, network: OrderNetwork, config: MaeriConfig, where: str) -> Item:
    """An item of a layer, its sizes those of the layer and the engine."""
    layer = network.works[number].layer
    tile = MultiplierTile(*msgspec.structs.astuple(each.tile))
    low, high = each.products or (0, layer.taps)
    first, end = each.multipliers
    (rows, columns), channels = grid(layer, tile), layer.filters * layer.groups
    fits = low < high <= layer.taps and first < end <= config.multipliers and tile.size * tile.neurons <= end - first
    if not fits:
        what = f"{tile.neurons} virtual neurons of {tile.size} for the products [{low}, {high}) of {layer.taps}"
        what = f"{what} are not on the multipliers [{first}, {end}) of {config.multipliers}"
        raise ModelError(what, where=where, hint="give the tile, the products and the multipliers that belong together")
    for channel, begin, count in each.segments:
        if channel >= channels or begin + count > rows * columns:
            what = f"channel {channel}, positions {begin} to {begin + count} are not of"
            what = f"{what} {channels} channels of {rows * columns} positions (in tiles)"
            raise ModelError(what, where=where, hint="count output channels and positions from 0")
    parts = tuple(ChannelSegment(*part) for part in each.segments)
    item = Item(number, each.start, Range(first, end - first), tile, (low, high), parts)
    clock_of(config, layer, item)
    return item
