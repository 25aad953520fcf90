"""The report as one HTML file that needs nothing else: no network, no fonts, no other scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.guests.report.bounds import KINDS
from dovetail.guests.report.drawings import memory_section, network_section, roofline_section
from dovetail.guests.report.markup import (
    TIP,
    Sheet,
    device_colours,
    document,
    element,
    figures,
    key,
    legend,
    navigation,
    section,
    swatch,
    table,
)

SPENT = {
    "peak": "engines at their peak",
    "below_peak": "engines below their peak",
    "transfers": "only the DMA",
    "core": "only cores",
}
"""Names of the kinds of cycles."""

LAYER_FIGURES = (
    ("cycles", "cycles until the core goes on to the next layer"),
    ("engine_cycles", "cycles its engine is busy"),
    ("modelled_cycles", "cycles its cost model says"),
    ("dma_cycles", "cycles the DMA is busy"),
    ("macs", "MACs"),
    ("launches", "starts of an engine"),
    ("bytes_moved", "bytes copies write"),
    ("read", "bytes of operands"),
    ("constants", "bytes of constants"),
    ("written", "bytes of the result"),
)


def page(data: Mapping[str, Any]) -> str:
    """The page of what `report.detail.detail` gave; that is embedded, and everything shown is taken from it."""
    sheet = Sheet(data)
    parts = {name: part(sheet) for name, (_, part) in SECTIONS.items()}
    links = {name: SECTIONS[name][0] for name, part in parts.items() if part}
    nav = navigation(links, '<button id="theme" title="Light or dark">◐</button>')
    foot = f"<footer>Dovetail {sheet.text('dovetail')}. Every figure on this page is in the JSON it carries.</footer>"
    body = f"{nav}\n<main>{overview(sheet)}{''.join(parts.values())}</main>{foot}\n{TIP}"
    return document(f"{data['model']} on {data['target']}", body, data)


def overview(sheet: Sheet) -> str:
    """The head of the page: what was run, the figures that matter most, and where the cycles went."""
    simulator = f"simulator {sheet.text('simulator')}, policy {sheet.text('policy')}"
    title = element("h1", f"{sheet.text('model')} <span>on {sheet.text('target')}</span>")
    colours = device_colours(sheet)
    devices = []
    for number, device in enumerate(sheet.at("devices")):
        peak = f" <small>{sheet.rate('devices', number, 'peak')} MAC/cycle</small>" if device["peak"] else ""
        devices.append(f"{swatch(colours[device['name']])}{sheet.text('devices', number, 'name')}{peak}")
    intro = element("p", simulator, class_="intro")
    return element("header", title, intro, legend(*devices), _tiles(sheet), _spent(sheet))


def _tiles(sheet: Sheet) -> str:
    layers, every = figures(sheet, "count:offloaded_layers count:layers", "summary")
    tiles = [
        ("cycles", sheet.count("cycles", "total"), ""),
        ("MACs", sheet.count("macs", "total"), f"{sheet.rate('summary', 'macs_per_cycle')} per cycle"),
        ("on engines", sheet.percent("summary", "offloaded_share"), f"of MACs; {layers} of {every} layers"),
    ]
    for name, use in sheet.at("memory").items():
        if use["peak"]:
            of = f"of {sheet.count('memory', name, 'size')} bytes"
            tiles.append((f"{key(name)} at its peak", sheet.percent("summary", "memory_share", name), of))
    if sheet.at("summary", "firmware") is not None:
        tiles.append(("firmware", sheet.count("summary", "firmware"), f"bytes; stack {sheet.count('stack')}"))
    tiles.append(("moved by copies", sheet.count("summary", "bytes_moved"), "bytes"))
    shown = [
        element("div", element("em", name), element("strong", figure), element("small", below), class_="tile")
        for name, figure, below in tiles
    ]
    return element("div", *shown, class_="tiles")


def _spent(sheet: Sheet) -> str:
    """One bar of all cycles by kind."""
    shares = sheet.at("summary", "spent_share")
    if shares is None:
        return element("p", "On the host there is no time: figures in cycles are left out.", class_="intro")
    kinds = [kind for kind in KINDS if shares[kind]]
    bar = "".join(f'<i class="{kind}" style="width:{100 * shares[kind]:.3f}%"></i>' for kind in kinds)
    items = (
        f"{swatch(kind)}{SPENT[kind]} {sheet.percent('summary', 'spent_share', kind)} "
        f"<small>{sheet.count('summary', 'spent', kind)} cycles</small>"
        for kind in kinds
    )
    return element("div", bar, class_="stack") + legend(*items)


def layers_section(sheet: Sheet) -> str:
    """Time of every layer beside its bound: name, bar, figures, reason; more when it is opened."""
    layers = sheet.at("layers")
    longest = max((max(layer["time"] or 0, layer["bound"] or 0) for layer in layers), default=0) or 1
    colours = device_colours(sheet)
    sides = {"layer": "word", "time and bound": "word", "time": "number", "bound": "number", "of time": "number"}
    sides["what is between them"] = "word"
    heading = element("div", *(element("span", text, class_=side) for text, side in sides.items()), class_="layer head")
    rows = "".join(_layer(sheet, number, colours, longest) for number in range(len(layers)))
    explained = legend(*(f"{swatch(kind)}{SPENT[kind]}" for kind in KINDS), '<i class="mark"></i>bound')
    order = (
        '<p class="controls"><button id="by-time" aria-pressed="false">longest first</button>'
        '<button id="open-all" aria-pressed="false">details</button></p>'
    )
    intro = (
        "The time of a layer is what its engine is busy for it, and what is spent on it while no engine works; waiting "
        "for another layer is not its own. Its bound is what its MACs take at the peak of what computes it, or its "
        "bytes on their way, whichever is longer."
    )
    listing = element("div", heading, element("div", rows, id="layers"), class_="layers")
    return section("time", "Where the time goes", intro, explained, order, listing)


def _layer(sheet: Sheet, number: int, colours: dict[str, str], longest: float) -> str:
    layer, own = sheet.at("layers", number), ("layers", number)
    name = swatch(colours[layer["engine"]]) + sheet.text(*own, "name")
    shown = figures(sheet, "count:time count:bound percent:share_of_bound", *own)
    cells = (
        element("span", name, element("small", sheet.text(*own, "engine")), class_="word name"),
        element("span", _time_bar(layer, longest), class_="word"),
        *(element("span", figure, class_="number") for figure in shown),
        element("span", sheet.text(*own, "gap") if layer["gap"] else "", class_="word why"),
    )
    summary = element("summary", *cells, class_="layer")
    return element("details", summary, _more(sheet, number), id=f"layer-{number}", data_time=str(layer["time"] or 0))


def _time_bar(layer: Mapping[str, Any], longest: float) -> str:
    parts, start = [], 0.0
    for kind in KINDS if layer["spent"] else ():
        width = 100 * layer["spent"][kind] / longest
        if width:
            parts.append(f'<i class="{kind}" style="left:{start:.3f}%;width:{width:.3f}%"></i>')
        start += width
    if layer["bound"]:
        parts.append(f'<i class="mark" style="left:{100 * layer["bound"] / longest:.3f}%"></i>')
    return element("span", *parts, class_="bar")


def _more(sheet: Sheet, number: int) -> str:
    """The details of a layer, shown when it is opened."""
    layer, own = sheet.at("layers", number), ("layers", number)
    items = [(text, sheet.count(*own, name)) for name, text in LAYER_FIGURES if layer[name]]
    items.append(("result", sheet.type(*own, "result")))
    for kind in KINDS if layer["spent"] else ():
        if layer["spent"][kind]:
            items.append((f"cycles, {SPENT[kind]}", sheet.count(*own, "spent", kind)))
    for place, core in enumerate(sheet.at("cores")):
        if layer["name"] in core["layers"]:
            items.append((f"cycles of {key(core['name'])}", sheet.count("cores", place, "layers", layer["name"])))
    for name, text in (("bound_by", "bound by"), ("offload", "taken as")):
        if layer[name]:
            items.append((text, sheet.text(*own, name)))
    for place in range(len(layer["weights"])):
        count, kind = figures(sheet, "count:elements text:dtype", *own, "weights", place)
        items.append(("weights", f"{count} of {kind}"))
    if layer["why_not_offloaded"]:
        items.append(("why not an engine", sheet.text(*own, "why_not_offloaded")))
    names = [sheet.text(*own, "operators", place) for place in range(len(layer["operators"]))]
    items.append(("operators of the model", ", ".join(names) or "added by Dovetail"))
    return element("dl", *(f"<div><dt>{text}</dt><dd>{value}</dd></div>" for text, value in items))


def timeline_section(sheet: Sheet) -> str:
    """Who works when: a line per core, engine and DMA, whose bars the script draws; nothing on the host."""
    if not sheet.at("timeline"):
        return ""
    colours = device_colours(sheet)
    lines = []
    for number, device in enumerate(sheet.at("devices")):
        name = device["name"]
        if name not in sheet.at("timeline"):
            continue
        said = f"{swatch(colours[name])}{sheet.text('devices', number, 'name')}"
        busy = element("small", f"busy {sheet.percent('devices', number, 'share')}")
        marks = {"data_device": name, "data_colour": colours[name], "tabindex": "0"}
        canvas = element("canvas", **marks, aria_label="bars of what works when")
        lines.append(element("div", element("span", said, busy, class_="lane"), canvas, class_="line"))
    axis = element("div", element("span", class_="lane"), element("canvas", id="time-axis"), class_="line")
    buttons = (
        '<p class="controls"><button id="zoom-in">+</button><button id="zoom-out">&minus;</button>'
        '<button id="zoom-all">all</button></p>'
    )
    intro = "Cycles from left to right. Wheel: zoom; drag: move; a click on a bar of the core opens its layer."
    return section("timeline", "Timeline", intro, buttons, element("div", *lines, axis, id="gantt"), _cores(sheet))


def _cores(sheet: Sheet) -> str:
    """A table of the cores, where there are several."""
    if len(sheet.at("cores")) < 2:
        return ""
    shown = "text:name rate:speed count:cycles count:instructions count:stack count:stack_used"
    rows = [figures(sheet, shown, "cores", number) for number in range(len(sheet.at("cores")))]
    headings = ("core", "speed", "cycles", "instructions", "stack, bytes", "stack used")
    return table(headings, rows, (1, 2, 3, 4, 5))


def bytes_section(sheet: Sheet) -> str:
    """Per pair of memories and per layer what copies write, and per layer what is read and written at least."""
    layers = sheet.at("layers")
    paths = []
    for number in range(len(sheet.at("summary", "moved"))):
        source, to, count = figures(sheet, "text:from text:to count:bytes", "summary", "moved", number)
        paths.append((f"{source} → {to}", count))
    parts = {"r-value": "read", "r-state": "constants", "r-output": "written"}
    touched = [sum(layer[name] for name in parts.values()) for layer in layers]
    most = max((*touched, *(layer["bytes_moved"] for layer in layers)), default=0) or 1
    colours = device_colours(sheet)
    rows = []
    for number, layer in enumerate(layers):
        if not (layer["bytes_moved"] or layer["launches"] or layer["macs"]):
            continue
        own = ("layers", number)
        upper = f'<i class="moved" style="width:{100 * layer["bytes_moved"] / most:.2f}%"></i>'
        lower = (f'<i class="{c}" style="width:{100 * layer[name] / most:.2f}%"></i>' for c, name in parts.items())
        bar = f'<span class="twin"><span>{upper}</span><span>{"".join(lower)}</span></span>'
        name = element("span", swatch(colours[layer["engine"]]), sheet.text(*own, "name"), class_="nowrap")
        rows.append([name, bar, *figures(sheet, "count:bytes_moved count:read count:constants count:written", *own)])
    kinds = {"moved": "copied", "r-value": "operands", "r-state": "constants", "r-output": "result"}
    explained = legend(*(f"{swatch(name)}{text}" for name, text in kinds.items()))
    intro = (
        "Upper bar: bytes copies write for the layer, padding included. Lower bar: operands, constants and result, "
        "each once, whoever reads them."
    )
    moved = table(("from → to", "bytes copied"), paths, (1,)) if paths else element("p", "No copies are made.")
    listing = table(("layer", "", *kinds.values()), rows, (2, 3, 4, 5))
    return section("bytes", "Bytes moved", intro, moved, explained, listing)


def weights_section(sheet: Sheet) -> str:
    """Weights by element type."""
    groups = sheet.at("weights")
    if not groups:
        return ""
    shown = "text:dtype count:bits count:elements percent:share count:bytes"
    rows, bar = [], ""
    for number, group in enumerate(groups):
        shade = {8: "w8", 4: "w4", 2: "w2"}.get(group["bits"], "w32")
        bar += f'<i class="{shade}" style="width:{100 * group["share"]:.2f}%"></i>'
        kind, *rest = figures(sheet, shown, "weights", number)
        rows.append([swatch(shade) + kind, *rest])
    numbers, size = figures(sheet, "count:elements count:bytes", "parameters")
    others = element("p", f"Other constants (biases, scales, tables): {numbers} numbers, {size} bytes.")
    listing = table(("weights", "bits", "number", "of all", "bytes when packed"), rows, (1, 2, 3, 4))
    intro = "What the integer graph holds, weights that rewrites add included."
    return section("weights", "Weights by width", intro, element("div", bar, class_="stack"), listing, others)


def rest_section(sheet: Sheet) -> str:
    """Layers that no engine computes, by reason."""
    groups = sheet.at("not_offloaded")
    if not groups:
        return section("rest", "Not offloaded", "Every layer is on an engine.")
    rows = []
    for number, group in enumerate(groups):
        own = ("not_offloaded", number)
        links = (f'<a href="#layer-{layer}">{sheet.text("layers", layer, "name")}</a>' for layer in group["layers"])
        shown = figures(sheet, "count:cycles percent:share_of_cycles count:macs percent:share_of_macs", *own)
        rows.append([sheet.text(*own, "reason"), ", ".join(links), *shown])
    headings = ("why", "layers", "cycles", "of all", "MACs", "of all")
    intro = "What no engine computes, and the sentence of the pattern or constraint that came nearest."
    return section("rest", "What was not offloaded, and why", intro, table(headings, rows, (2, 3, 4, 5)))


SECTIONS = {
    "time": ("Time", layers_section),
    "timeline": ("Timeline", timeline_section),
    "memory": ("Memory", memory_section),
    "network": ("Network", network_section),
    "roofline": ("Roofline", roofline_section),
    "bytes": ("Bytes", bytes_section),
    "weights": ("Weights", weights_section),
    "rest": ("Not offloaded", rest_section),
}
"""Parts of the page in their order, with their names in its navigation; each may be empty."""
