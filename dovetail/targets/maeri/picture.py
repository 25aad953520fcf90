"""The picture of an order: multipliers against time, on one page that needs no other file and no script.

Drawings are in cycles and multipliers and stretched to the page, so their texts stand beside them as HTML. Bars are
coloured by layer or by the part of the engine that binds them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from html import escape
from importlib import resources
from string import Template

import numpy as np
import numpy.typing as npt

from dovetail.records import Record
from dovetail.targets.maeri.network import MultiplierLayer
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.outputs import HEADINGS
from dovetail.targets.maeri.tile import Item, grid, traffic
from dovetail.targets.maeri.tree import Range

MOST_BARS = 2000
"""Bars that are drawn; where there are more, neighbours in time are drawn as one, and the largest of all."""
_MOST_LISTED = 100
_SPANS = 400
_TICKS = 6
_FILES = ("order.html", "order.css", "order.js")
Shares = npt.NDArray[np.float64]


class Bottleneck(IntEnum):
    """The part of the engine that an item waits for."""

    MULTIPLIERS = 0
    BOTH = 1
    PORTS = 2
    WEIGHTS = 3
    LINES = 4
    TREE = 5


TEXTS = {
    Bottleneck.MULTIPLIERS: ("multipliers", "a product in every cycle"),
    Bottleneck.BOTH: ("multipliers and ports", "a product and a value sent in every cycle"),
    Bottleneck.PORTS: ("ports", "inputs are sent more slowly than they could be multiplied"),
    Bottleneck.WEIGHTS: ("weights", "weights, and waiting for last sums, take longer than products"),
    Bottleneck.LINES: ("lines", "sums queue at the collection bus"),
    Bottleneck.TREE: ("tree", "sums go round through the tree between steps"),
}
"""A word and a sentence for each bottleneck."""


def binds(order: NetworkOrder, item: Item) -> Bottleneck:
    """The part of the engine that an item waits for most of its time."""
    clock = order.clock(item)
    products = sum(int(own.ends[-1]) - own.load for _, own in clock.segments(item.segments))
    if order.end(item) - item.start > 2 * products:
        return Bottleneck.WEIGHTS
    sends = clock.sends[1]
    if clock.later <= clock.folds:
        return Bottleneck.BOTH if sends == clock.folds and order.config.shared_ports else Bottleneck.MULTIPLIERS
    if sends >= clock.pace:
        return Bottleneck.PORTS
    return Bottleneck.TREE if clock.group.loops else Bottleneck.LINES


class Utilisation(Record):
    """Utilisation of the engine in spans of equal length."""

    edges: npt.NDArray[np.int64]
    """Cycles the spans lie between."""
    multipliers: Shares
    """[bottleneck, span]: multipliers of items that are bound so, as a part of all."""
    ports: Shares
    """Values sent, as a part of those that ports can send."""
    lines: Shares
    """Sums taken, as a part of those that lines can take."""


def use_of(order: NetworkOrder, spans: int) -> Utilisation:
    """Utilisation of the engine by an order, in at most so many spans; values and sums spread over each item evenly."""
    edges = np.unique(np.linspace(0, order.makespan, spans + 1).round().astype(np.int64))
    total = np.zeros((len(Bottleneck) + 2, len(edges)))
    for item in order.items:
        end, time, layer = order.end(item), order.clock(item), order.work(item).layer
        past = np.clip(edges - item.start, 0, end - item.start)
        total[binds(order, item)] += past * (time.size * item.tile.neurons / order.config.multipliers)
        weights, first, later = traffic(order.config, layer, item.tile)
        columns, sends, sums = grid(layer, item.tile)[1], 0, 0
        for part in item.segments:
            rows = 1 + (part.first + part.count - 1) // columns - part.first // columns
            sends += time.folds * (weights + rows * first + (part.count - rows) * later)
            sums += part.count * item.tile.neurons
        total[-2] += past * (sends / (end - item.start) / order.config.distribution)
        total[-1] += past * (sums / (end - item.start) / order.config.collection)
    shares = np.clip(np.diff(total, axis=1) / np.diff(edges), 0.0, 1.0)
    return Utilisation(edges, shares[:-2], shares[-2], shares[-1])


class ItemBar(Record):
    """An item as it is drawn, or several of a layer that follow one another in one place."""

    work: int
    place: Range
    start: int
    end: int
    binds: Bottleneck
    neurons: int
    """Virtual neurons side by side."""
    kernel: str
    """Products of each at a time."""
    channels: tuple[int, int]
    """The first and the last output channel."""
    items: int


def page(order: NetworkOrder, summary: str, rows: Sequence[tuple[int, tuple[str, ...]]]) -> str:
    """The page of an order, under a sentence, with the table of layers (`layer_rows`)."""
    bars, use = _bars(order), use_of(order, _SPANS)
    files = {name: resources.files(__package__).joinpath("templates", name).read_text("utf-8") for name in _FILES}
    digest = base64.b64encode(hashlib.sha256(files["order.js"].encode()).digest()).decode()
    title = f"{order.network.graph.name} on {order.config.multipliers} multipliers"
    return Template(files["order.html"]).substitute(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=escape(title),
        style=files["order.css"] + _colours(order),
        script=files["order.js"],
        summary=escape(summary),
        choice="".join(f'<option value="{number}">{escape(work.name)}</option>' for number, work in _works(order)),
        legend="".join(f"<li>{_link(number, _described(order.network.works[number]))}</li>" for number, _ in rows),
        reasons="".join(
            f'<li><i class="swatch b{reason}"></i><b>{word}</b> {sentence}</li>'
            for reason, (word, sentence) in TEXTS.items()
        ),
        gantt=_gantt(order, bars, (0, order.makespan), "main"),
        use=_use(order, use),
        table=_table(HEADINGS, ((_link(n, escape(cells[0])), *map(escape, cells[1:])) for n, cells in rows)),
        layers="".join(_layer(order, number, bars) for number, _ in rows),
    )


def _works(order: NetworkOrder) -> Iterable[tuple[int, MultiplierLayer]]:
    return enumerate(order.network.works)


def _bars(order: NetworkOrder) -> list[ItemBar]:
    bars = [_bar(order, item) for item in order.items]
    if len(bars) > MOST_BARS:
        bars = sorted(_joined(bars, order.makespan // 1000), key=lambda bar: (bar.start - bar.end) * bar.place.size)
    return sorted(bars[:MOST_BARS], key=lambda bar: (bar.start, bar.place.start))


def _joined(bars: Sequence[ItemBar], gap: int) -> list[ItemBar]:
    """Bars of a layer that follow one another in one place, at most `gap` cycles later, as one bar."""
    last: dict[tuple[int, Range], ItemBar] = {}
    done: list[ItemBar] = []
    for bar in bars:
        before = last.get((bar.work, bar.place))
        if before is not None and bar.start - before.end <= gap:
            channels = min(before.channels[0], bar.channels[0]), max(before.channels[1], bar.channels[1])
            bar = replace(bar, start=before.start, channels=channels, items=before.items + 1)
        elif before is not None:
            done.append(before)
        last[bar.work, bar.place] = bar
    return [*done, *last.values()]


def _bar(order: NetworkOrder, item: Item) -> ItemBar:
    tile, work = item.tile, order.work(item)
    kernel = f"{tile.size} products" if tile.flat else f"{tile.rows}x{tile.columns}x{tile.channels}"
    if work.turned:  # its positions are the layer's outputs
        each = tile.out_rows
        spans = [(each * part.first, each * (part.first + part.count)) for part in item.segments]
    else:
        spans = [(part.channel, part.channel + tile.filters * tile.groups) for part in item.segments]
    channels = min(low for low, _ in spans), min(max(high for _, high in spans), work.channels) - 1
    more = (binds(order, item), tile.neurons, kernel, channels, 1)
    return ItemBar(item.work, item.place, item.start, order.end(item), *more)


def _colours(order: NetworkOrder) -> str:
    """A colour of each layer, far from its neighbours'."""
    rules = (f".l{number}{{--l:hsl({number * 137 % 360} 58% {46 + number % 3 * 9}%)}}" for number, _ in _works(order))
    return "".join(rules)


def _described(work: MultiplierLayer) -> str:
    """A layer's name and sizes."""
    return f"{escape(work.name)} <small>{_kernel(work)}</small>"


def _kernel(work: MultiplierLayer) -> str:
    layer = work.layer
    if work.family == "dense":
        return f"dense, {layer.channels} to {work.channels}"
    sizes = f"{layer.rows}x{layer.columns}, {layer.channels * layer.groups} to {work.channels} channels"
    for name, (down, across) in (("stride", layer.strides), ("dilation", layer.dilations)):
        sizes += f", {name} {down if down == across else f'{down}x{across}'}" if max(down, across) > 1 else ""
    return f"{work.family} {sizes}"


def _gantt(order: NetworkOrder, bars: Sequence[ItemBar], span: tuple[int, int], name: str) -> str:
    """Bars against time, with ticks; bars end at the ends of the span."""
    multipliers, (begin, end) = order.config.multipliers, span
    inside = [bar for bar in bars if bar.start < end and bar.end > begin]
    label = f"{len(inside)} groups of virtual neurons on {multipliers} multipliers, cycles {begin:,} to {end:,}"
    shapes = "".join(_shape(order, bar) for bar in inside)
    box = f'viewBox="{begin} 0 {end - begin} {multipliers}" preserveAspectRatio="none"'
    rows = [multipliers * part // 4 for part in range(5)]
    scale = "".join(f'<span style="top:{25 * part}%">{row}</span>' for part, row in enumerate(rows))
    drawing = f'<svg class="gantt" {box} role="img" aria-label="{escape(label)}">{shapes}</svg>'
    return (
        f'<div class="chart" data-name="{name}"><div class="rows" aria-hidden="true">{scale}</div>{drawing}'
        f"{_ticks(begin, end)}</div>"
    )


def _facts(bar: ItemBar) -> dict[str, str]:
    """Facts that hints and tables give of a bar, by name."""
    (low, high), place = bar.channels, bar.place
    return {
        "multipliers": f"{place.start} to {place.end - 1}",
        "cycles": f"{bar.start:,} to {bar.end - 1:,}",
        "kernel": f"{bar.neurons} of {bar.kernel}" if bar.neurons > 1 else bar.kernel,
        "output channels": f"{low}" if low == high else f"{low} to {high}",
        **({"one after the other": str(bar.items)} if bar.items > 1 else {}),
        "bound by": TEXTS[bar.binds][0],
    }


def _shape(order: NetworkOrder, bar: ItemBar) -> str:
    """A bar, lines between its virtual neurons, and its text."""
    texts = [order.network.works[bar.work].name, *(f"{name} {text}" for name, text in _facts(bar).items())]
    width, first, each = bar.end - bar.start, bar.place.start, bar.place.size / bar.neurons
    numbers = range(1, bar.neurons) if bar.neurons <= 64 else ()
    between = "".join(f"M{bar.start} {first + number * each:g}h{width}" for number in numbers)
    lines = f'<path class="between" d="{between}"/>' if between else ""
    box = f'x="{bar.start}" y="{first}" width="{width}" height="{bar.place.size}"'
    text = escape("; ".join(texts))
    return f'<g class="l{bar.work} b{bar.binds}"><title>{text}</title><rect {box}/>{lines}</g>'


def _ticks(begin: int, end: int) -> str:
    places = ((begin + (end - begin) * part // _TICKS, 100 * part / _TICKS) for part in range(_TICKS + 1))
    marks = "".join(f'<span style="left:{place:.2f}%">{cycle:,}</span>' for cycle, place in places)
    return f'<div class="ticks" aria-hidden="true">{marks}</div>'


def _use(order: NetworkOrder, use: Utilisation) -> str:
    """Multipliers by bottleneck, and ports and lines at work, against time."""
    tops, areas = use.multipliers.cumsum(axis=0), list[str]()
    for reason, (top, height) in enumerate(zip(tops, use.multipliers, strict=True)):
        title = f"{TEXTS[Bottleneck(reason)][0]}: {100 * _mean(use, height):.1f} % of the multipliers on average"
        areas.append(f'<path class="b{reason}" d="{_area(use, top - height, top)}"><title>{title}</title></path>')
    strips = [("Multipliers, by what binds them", "".join(areas), tops[-1])]
    for name, shares in (("Values sent by the ports", use.ports), ("Sums taken by the lines", use.lines)):
        strips.append((name, f'<path class="share" d="{_area(use, 0 * shares, shares)}"/>', shares))
    figures, box = [], f'viewBox="0 0 {order.makespan} 100" preserveAspectRatio="none"'
    for name, drawing, shares in strips:
        said = f"{name}: {100 * _mean(use, shares):.1f} % on average"
        svg = f'<svg class="strip" {box} role="img" aria-label="{said}">{drawing}</svg>'
        figures.append(f'<figure><figcaption>{said}</figcaption><div class="chart">{svg}</div></figure>')
    return "".join(figures)


def _mean(use: Utilisation, shares: Shares) -> float:
    cycles = use.edges[1:] - use.edges[:-1]
    return float((cycles * shares).sum() / cycles.sum())


def _area(use: Utilisation, low: Shares, high: Shares) -> str:
    """Steps between two edges, the share 1 at the top."""
    spans = list(zip(use.edges[:-1].tolist(), use.edges[1:].tolist(), strict=True))
    there = "".join(f"V{100 - 100 * top:.3g}H{end}" for (_, end), top in zip(spans, high, strict=True))
    pairs = list(zip(spans, low, strict=True))
    back = "".join(f"V{100 - 100 * bottom:.3g}H{begin}" for (begin, _), bottom in reversed(pairs))
    return f"M0 100{there}{back}Z"


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML; the cells of the first column say what a row is of."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    body = (
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
        for name, *others in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _link(number: int, text: str) -> str:
    """A layer's name, a link to its own drawing."""
    return f'<a href="#layer{number}" data-layer="{number}"><i class="swatch l{number}"></i>{text}</a>'


def _layer(order: NetworkOrder, number: int, bars: Sequence[ItemBar]) -> str:
    """A layer's time alone, and its items as a table."""
    work, own = order.network.works[number], [bar for bar in bars if bar.work == number]
    begin, end = min(bar.start for bar in own), max(bar.end for bar in own)
    names = dict.fromkeys(name for bar in own for name in _facts(bar))
    table = _table(names, ([_facts(bar).get(name, "") for name in names] for bar in own[:_MOST_LISTED]))
    more = f"<p>… and {len(own) - _MOST_LISTED} more, in schedule.json.</p>" if len(own) > _MOST_LISTED else ""
    text = f"{escape(work.name)} <small>{_kernel(work)}; cycles {begin:,} to {end:,}</small>"
    drawing = _gantt(order, bars, (begin, end), f"layer{number}")
    data = f'data-layer="{number}" data-begin="{begin}" data-end="{end}"'
    return (
        f'<details {data}><summary><i class="swatch l{number}"></i>{text}</summary>'
        f'<div id="layer{number}">{drawing}<div class="wide">{table}</div>{more}</div></details>'
    )
