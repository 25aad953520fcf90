"""The files of an order: words of the published hardware, phases, JSON, a trace, and a C program that feeds the order.

Words have the published format (maeri-project/MAERI_bsv@1351d1b, src/maeri_controller/CR_Types.bsv,
compiler/lib/include). A double switch takes a byte, four to a word, the first lowest: mode of the left half, of the
right half, two bits each; whether the left and the right half give out a sum; two zeros. A single switch takes four
bits, eight to a word: mode, whether it gives out a sum, zero. Switches are counted from the root, left to right. Modes
of half a double switch: how many values it adds; of a single switch: idle, add two, flow left, flow right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dovetail.records import Record
from dovetail.targets.maeri.bound import bound
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.network import OrderLayer
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.tile import MultiplierTile, sweep
from dovetail.targets.maeri.tree import (
    Range,
    Switch,
    TreeConfiguration,
    configure,
    double_switches,
    is_single,
    single_switches,
)
from dovetail.targets.maeri.words import Count, Natural


class Phase(Record):
    """A span of time in which the same virtual neurons work."""

    start: int
    """Its first cycle."""
    places: tuple[Range, ...]
    """The virtual neurons at work, from the left."""
    words: tuple[int, ...]
    """The tree's configuration that adds them up."""
    configuration: int
    """Number of the configuration, from 0 in the order they first come; equal virtual neurons have equal numbers."""


def phases(order: NetworkOrder) -> list[Phase]:
    """The phases of an order, in order of time; neighbours differ. A phase without virtual neurons is idle."""
    spans, own = list[tuple[int, int]](), list[tuple[Range, ...]]()
    for item in order.items:
        spans.append((item.start, order.end(item)))
        own.append(order.clock(item).group.places)
    timeline, trees = list[Phase](), dict[tuple[Range, ...], tuple[int, ...]]()
    for cycle, working in sweep(spans):
        places = tuple(sorted({place for number in working for place in own[number]}, key=lambda place: place.start))
        if not timeline or places != timeline[-1].places:
            if places not in trees:
                trees[places] = tuple(tree_words(order.config, configure(order.config.multipliers, places)))
            timeline.append(Phase(cycle, places, trees[places], list(trees).index(places)))
    return timeline


def configurations(timeline: Sequence[Phase]) -> list[tuple[int, ...]]:
    """The words of every configuration of the tree, by number."""
    words = {phase.configuration: phase.words for phase in timeline}
    return [words[number] for number in sorted(words)]


def tree_words(config: MaeriConfig, tree: TreeConfiguration) -> list[int]:
    """A configuration of the reduction tree, 32 bits each: double switches, then single switches."""
    double, single, gives = [], [], set(tree.outputs)
    for level, number in double_switches(config.levels):
        left, right = (level, number), (level, number + 1)
        modes = _mode(tree, left) << 6 | _mode(tree, right) << 4
        double.append(modes | (left in gives) << 3 | (right in gives) << 2)
    for switch in single_switches(config.levels):
        single.append(_mode(tree, switch) << 2 | (switch in gives) << 1)
    return [*_packed(double, 8), *_packed(single, 4)]


def _mode(tree: TreeConfiguration, switch: Switch) -> int:
    values = sum(tree.loads.get(switch, {}).values())
    if not is_single(switch):
        return min(values, 3)
    if values == 1:
        return 3 if min(tree.children[switch]) % 2 else 2
    return min(values, 1)


def _packed(fields: Sequence[int], bits: int) -> list[int]:
    each = 32 // bits
    groups = (fields[first : first + each] for first in range(0, len(fields), each))
    return [sum(field << bits * place for place, field in enumerate(group)) for group in groups]


def layer_words(config: MaeriConfig, layer: OrderLayer, tile: MultiplierTile) -> list[int]:
    """The sizes of a layer and of its tile.

    For each of K, C, R, S, Y and X a word of size and tile, and a word of the rest and how many times the tile fits;
    then multipliers and virtual neurons, and the size of one. A tile of any products of a sum is a tile of the layer as
    a matrix product, its patches as channels.
    """
    if tile.flat:
        rows, columns = layer.out_rows, layer.out_columns
        layer = OrderLayer(1, 1, layer.taps, layer.filters, rows, columns, layer.groups)
    words = []
    sizes = (
        (layer.filters * layer.groups, tile.filters * tile.groups, layer.filters * layer.groups),
        (layer.channels, tile.channels, layer.channels),
        (layer.rows, tile.rows, layer.rows),
        (layer.columns, tile.columns, layer.columns),
        (layer.in_rows, tile.out_rows, layer.out_rows),
        (layer.in_columns, tile.out_columns, layer.out_columns),
    )
    for size, step, count in sizes:
        rounds, left = divmod(count, step)
        words += [size << 16 | step, left << 16 | rounds]
    return [*words, config.multipliers << 16 | tile.neurons, tile.size]


def layer_info(order: NetworkOrder, number: int) -> list[int]:
    """The sizes of a layer of an order, and of the tile of its first item."""
    return layer_words(order.config, order.network.works[number].layer, order.of(number)[0].tile)


FORMAT = 1
"""Version of the JSON."""


def order_files(order: NetworkOrder, timeline: Sequence[Phase], page: str) -> dict[str, bytes]:
    """Contents of an order's files by name; its phases and its picture are given."""
    files = {
        "schedule.json": _json(order, timeline),
        "schedule.html": page,
        "trace.json": _trace(order),
        **{f"host/{name}": text for name, text in _host_files(order, timeline).items()},
    }
    for number, words in enumerate(configurations(timeline)):
        files[f"trees/RN_Config_{number:04d}.vmh"] = _vmh(words, 3)
    for number in range(len(order.network.works)):
        files[f"layers/Layer_Info_{number:03d}.vmh"] = _vmh(layer_info(order, number), 2)
    return {name: text.encode() for name, text in files.items()}


HEADINGS = ("layer", "start", "end", "virtual neurons", "multipliers each", "steps", "MACs", "used")
"""Headings of the table of layers."""


def layer_rows(order: NetworkOrder) -> list[tuple[int, tuple[str, ...]]]:
    """The number of each layer and its cells in the table of layers, by start.

    Virtual neurons are all that are ever used; "used" are products per cycle and multiplier taken.
    """
    rows = []
    for number, work in enumerate(order.network.works):
        items = order.of(number)
        times, ends = [order.clock(item) for item in items], [order.end(item) for item in items]
        taken = sum(
            (end - item.start) * time.size * item.tile.neurons
            for end, time, item in zip(ends, times, items, strict=True)
        )
        start, end = min(item.start for item in items), max(ends)
        cells = (
            work.name,
            f"{start:,}",
            f"{end:,}",
            str(sum(item.tile.neurons for item in items)),
            ", ".join(map(str, sorted({time.size for time in times}))),
            str(max(time.folds for time in times)),
            f"{work.layer.macs:,}",
            f"{100 * (work.layer.macs / taken):.1f} %",
        )
        rows.append((start, end, number, cells))
    return [(number, cells) for _, _, number, cells in sorted(rows, key=lambda row: row[:2])]


def _vmh(words: Iterable[int], digits: int) -> str:
    """Words as the text of a memory file that `$readmemh` reads."""
    return "\n".join([f"@{0:0{digits}d}", *(f"{word & 0xFFFFFFFF:08X}" for word in words)]) + "\n"


class FileItem(msgspec.Struct, frozen=True):
    """An item as the file has it."""

    layer: str
    start: Natural
    multipliers: tuple[Natural, Natural]
    tile: MultiplierTile
    segments: Annotated[list[tuple[Natural, Natural, Count]], Meta(min_length=1)]
    """(output channel, first position, positions)."""
    products: tuple[Natural, Natural] | None = None
    """[first, end) of the products of a sum; all if not given."""
    end: Natural = 0
    """The cycle after its last sum; it is not read."""


class OrderFile(msgspec.Struct, frozen=True):
    """The part of `schedule.json` that is an order."""

    items: Annotated[list[FileItem], Meta(min_length=1)]


def _json(order: NetworkOrder, timeline: Sequence[Phase]) -> str:
    """The whole order: configuration, layers, items, and the virtual neurons of each phase."""
    items = []
    for item in order.items:
        parts, place = (
            [(part.channel, part.first, part.count) for part in item.segments],
            (item.place.start, item.place.end),
        )
        more = (item.start, place, item.tile, parts, item.taps, order.end(item))
        items.append(FileItem(order.work(item).name, *more))
    data = {
        "format": FORMAT,
        "model": order.network.graph.name,
        "configuration": order.config,
        "makespan": order.makespan,
        "bound": bound(order.network, order.config).reasons,
        "layers": [{"name": work.name, **asdict(work.layer)} for work in order.network.works],
        "items": items,
        "phases": [
            {
                "start": phase.start,
                "configuration": phase.configuration,
                "neurons": [(p.start, p.end) for p in phase.places],
            }
            for phase in timeline
        ],
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"


def _trace(order: NetworkOrder) -> str:
    """The order in the Trace Event format (a JSON array of complete events; a cycle is a microsecond there)."""

    def event(kind: str, name: str, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": 1, **more}

    def track(place: Range) -> int:
        return place.start * 100_000 + place.end

    events = [event("M", "process_name", args={"name": f"MAERI {order.config.multipliers}"})]
    for place in sorted({item.place for item in order.items}, key=lambda place: (place.start, place.end)):
        name = f"multipliers {place.start}..{place.end - 1}"
        events.append(event("M", "thread_name", tid=track(place), args={"name": name}))
    for item in order.items:
        channels = sorted({part.channel for part in item.segments})[:64]
        when = {"tid": track(item.place), "ts": item.start, "dur": order.end(item) - item.start}
        events.append(event("X", order.work(item).name, **when, args={"channels": channels}))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _host_files(order: NetworkOrder, timeline: Sequence[Phase]) -> dict[str, str]:
    """The C program that feeds an order to the engine: phases, the tree's words, and the items each begins."""
    trees, starts = configurations(timeline), [item.start for item in order.items]
    size, segments = len(trees[0]), [part for item in order.items for part in item.segments]
    items, at = [], 0
    for item in order.items:
        each = item.place.size // item.tile.neurons if item.tile.neurons > 1 else item.tile.size
        low, high = item.taps
        parts = (item.tile.neurons, low, high - low, at, len(item.segments))
        items.append(_row(item.start, item.work, item.place.start, each, *parts))
        at += len(item.segments)
    begun = []
    for phase in timeline:
        first = starts.index(phase.start) if phase.start in starts else 0
        begun.append(_row(phase.start, phase.configuration * size, first, starts.count(phase.start)))
    arrays = [
        *_array("char *const maeri_layer_names[MAERI_LAYERS]", (f'"{_plain(w.name)}"' for w in order.network.works), 1),
        *_array("maeri_segment_t maeri_segments[]", (_row(p.channel, p.first, p.count) for p in segments), 4),
        *_array("maeri_item_t maeri_items[MAERI_ITEMS]", items, 2),
        *_array("maeri_phase_t maeri_phases[MAERI_PHASES]", begun, 4),
        *_array("uint32_t maeri_words[]", (f"0x{word:08x}u" for words in trees for word in words), 8),
    ]
    counts = {"layers": len(order.network.works), "items": len(items), "phases": len(timeline), "words": size}
    header = _template("maeri_order.h") % {**counts, "makespan": order.makespan}
    return {"maeri_order.h": header, "maeri_order.c": _template("maeri_order.c") % {"arrays": "\n".join(arrays)}}


def _row(*numbers: int) -> str:
    return "{" + ", ".join(f"{number}u" for number in numbers) + "}"


def _array(declaration: str, elements: Iterable[str], each: int) -> list[str]:
    """A constant array, `each` elements on a line."""
    texts = list(elements)
    lines = [f"    {', '.join(texts[at : at + each])}," for at in range(0, len(texts), each)]
    return [f"const {declaration} = {{", *lines, "};", ""]


def _plain(name: str) -> str:
    """A name that may stand in a C string."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\?' else "_" for c in name)


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text("utf-8")
