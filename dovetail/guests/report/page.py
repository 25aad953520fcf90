"""The report as one HTML file that needs nothing else: no network, no fonts, no other scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.guests.report.bounds import KINDS
from dovetail.guests.report.drawings import memory_section, network_section, roofline_section
from dovetail.guests.report.markup import (
    TIP,
    Sheet,
    bar,
    device_colours,
    document,
    element,
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
    ("waiting", "of these, waits of the core"),
    ("engine_cycles", "cycles its engine is busy"),
    ("nanoseconds", "nanoseconds of its kernels on the device"),
    ("modelled_cycles", "cycles by its cost model"),
    ("least", "cycles of the whole layer by its cost model"),
    ("bound", "fewest cycles on this hardware"),
    ("dma_cycles", "cycles the DMA is busy"),
    ("macs", "MACs"),
    ("launches", "starts of an engine"),
    ("bytes_moved", "bytes copies write"),
    ("read", "bytes of operands"),
    ("constants", "bytes of constants"),
    ("written", "bytes of the result"),
)
BOUNDS = (
    ("least: all layers by the engines' own cost models", "least"),
    ("bound: any schedule on this hardware", "bound"),
)
"""The two bounds of a network."""
TOUCHED = {"r-value": "read", "r-state": "constants", "r-output": "written"}
"""Bytes a layer touches at least, by the style's colour."""
LAYER_WORDS = (("bound_by", "bound by"), ("offload", "taken as"), ("why_least", "its engine's least"))


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
    for device in sheet.parts("devices"):
        peak = f" <small>{device.rate('peak')} MAC/cycle</small>" if device.at("peak") else ""
        devices.append(f"{swatch(colours[device.at('name')])}{device.text('name')}{peak}")
    intro = element("p", simulator, class_="intro")
    said = element("p", " ".join(_in_words(sheet)), id="in-words")
    return element("header", title, intro, said, legend(*devices), _tiles(sheet), _spent(sheet))


def _in_words(sheet: Sheet) -> Iterator[str]:
    """The result in a few sentences: time, the share of engines, the longest layer, and the next step."""
    summary = sheet.part("summary")
    total = sheet.at("cycles", "total")
    yield f"One inference takes {sheet.count('cycles', 'total')} cycles." if total else "The run has no clock."
    share = f"{summary.percent('offloaded_share')} of the multiply-accumulates"
    if any(device["kind"] == "engine" for device in sheet.at("devices")):
        alone = f"; {summary.percent('spent_share', 'core')} of the time only cores work" if total else ""
        yield f"Engines compute {share}{alone}."
    timed = [group.at("time") or 0 for group in sheet.parts("groups")]
    if any(timed):
        number = timed.index(max(timed))
        group = sheet.part("groups", number)
        name = f'<a href="#group-{number}">{group.text("name")}</a>'
        yield f"The longest layer is {name} with {group.count('time')} cycles."
    if sheet.at("not_offloaded"):
        yield 'Next: see <a href="#rest">why layers stay on the core</a>, or try <code>dovetail tune</code>.'


def _tiles(sheet: Sheet) -> str:
    summary = sheet.part("summary")
    layers, every = summary.figures("count:offloaded_layers count:layers")
    tiles = [
        ("cycles", sheet.count("cycles", "total"), ""),
        ("MACs", sheet.count("macs", "total"), f"{summary.rate('macs_per_cycle')} per cycle"),
        ("on engines", summary.percent("offloaded_share"), f"of MACs; {layers} of {every} layers"),
    ]
    for name, use in sheet.at("memory").items():
        if use["peak"]:
            of = f"of {sheet.count('memory', name, 'size')} bytes"
            tiles.append((f"{key(name)} at its peak", summary.percent("memory_share", name), of))
    if summary.at("firmware") is not None:
        tiles.append(("firmware", summary.count("firmware"), f"bytes; stack {sheet.count('stack')}"))
    if used := sheet.at("energy"):
        parts = ", ".join(f"{key(name)} {sheet.rate('energy', name)}" for name in used)
        tiles.append(("energy, uJ", summary.rate("energy"), parts))
    tiles.append(("moved by copies", summary.count("bytes_moved"), "bytes"))
    boxes = (
        element("div", element("em", name), element("strong", figure), element("small", below), class_="tile")
        for name, figure, below in tiles
    )
    return element("div", *boxes, class_="tiles")


def _spent(sheet: Sheet) -> str:
    """One bar of all cycles by kind."""
    summary = sheet.part("summary")
    shares = summary.at("spent_share")
    if shares is None:
        return element("p", "On the host there is no time: figures in cycles are left out.", class_="intro")
    kinds = [kind for kind in KINDS if shares[kind]]
    whole = "".join(bar(kind, 100 * shares[kind], digits=3) for kind in kinds)
    items = (
        f"{swatch(kind)}{SPENT[kind]} {summary.percent('spent_share', kind)} "
        f"<small>{summary.count('spent', kind)} cycles</small>"
        for kind in kinds
    )
    return element("div", whole, class_="stack") + legend(*items)


def layers_section(sheet: Sheet) -> str:
    """Time of every layer of the model beside its bounds: name, bar, figures, reason; its parts when it is opened."""
    groups = sheet.at("groups")
    longest = max((max(group["time"] or 0, group["bound"] or 0) for group in groups), default=0) or 1
    colours = device_colours(sheet)
    headings = ("layer", "time and bound", "time", "waits", "least", "bound", "of time", "reason for the difference")
    sides = ("word", "word", *("number",) * 5, "word")
    spans = (element("span", text, class_=side) for text, side in zip(headings, sides, strict=True))
    heading = element("div", *spans, class_="layer head")
    rows = "".join(_group(sheet, number, colours, longest) for number in range(len(groups)))
    explained = legend(*(f"{swatch(kind)}{SPENT[kind]}" for kind in KINDS), '<i class="mark"></i>bound')
    order = (
        '<p class="controls"><button id="by-time" aria-pressed="false">longest first</button>'
        '<button id="open-all" aria-pressed="false">details</button></p>'
    )
    intro = (
        "A row is a layer of the model; open it to see its parts. Time: cycles its engine is busy, and cycles of the "
        "core and the DMA while no engine works. Waits of the core are not counted. Bound: the fewest cycles that any "
        "schedule needs on this hardware. Least: cycles of the whole layer by the engine's own cost model."
    )
    whole = _whole(sheet) if sheet.at("bound") else ""
    whole += "".join(element("p", note.text("text"), class_="intro") for note in sheet.parts("notes"))
    listing = element("div", heading, element("div", rows, id="layers"), class_="layers")
    return section("time", "Where the time goes", intro, whole, explained, order, listing)


def _whole(sheet: Sheet) -> str:
    """The network's cycles beside its bounds."""
    rows = [(name, sheet.count(key), sheet.text(f"{key}_by")) for name, key in BOUNDS]
    rows = [("taken", sheet.count("cycles", "total"), ""), *rows]
    return table(("the network", "cycles", "set by"), rows, (1,))


def _group(sheet: Sheet, number: int, colours: dict[str, str], longest: float) -> str:
    """A layer of the model and, when it is opened, its parts."""
    group, time = sheet.part("groups", number), sheet.at("groups", number, "time") or 0
    figures = group.figures("count:time count:waiting count:least count:bound percent:share_of_bound")
    cells = (
        element("span", swatch(colours[group.at("engine")]) + group.text("name"), class_="word name"),
        element("span", _time_bar(group.data, longest), class_="word"),
        *(element("span", figure, class_="number") for figure in figures),
        element("span", group.text("gap") if group.at("gap") else "", class_="word why"),
    )
    inner = "".join(_part(sheet, layer, len(group.at("layers")) > 1) for layer in group.at("layers"))
    summary = element("summary", *cells, class_="layer")
    return element("details", summary, inner, id=f"group-{number}", data_time=str(time))


def _part(sheet: Sheet, number: int, is_one_of_several: bool) -> str:
    """The details of a layer, below its name where it is a part of one."""
    part = sheet.part("layers", number)
    if not is_one_of_several:
        return element("div", _more(sheet, part), id=f"layer-{number}")
    name = element("summary", part.text("name"), " ", element("small", part.text("engine")), class_="part")
    return element("details", name, _more(sheet, part), id=f"layer-{number}")


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


def _more(sheet: Sheet, layer: Sheet) -> str:
    """The details of a layer, shown when it is opened."""
    items = [(text, layer.count(name)) for name, text in LAYER_FIGURES if layer.at(name)]
    items.append(("result", layer.type("result")))
    spent = layer.at("spent") or {}
    items += [(f"cycles, {SPENT[kind]}", layer.count("spent", kind)) for kind in KINDS if spent.get(kind)]
    for core in sheet.parts("cores"):
        if layer.at("name") in core.at("layers"):
            items.append((f"cycles of {key(core.at('name'))}", core.count("layers", layer.at("name"))))
    items += [(text, layer.text(name)) for name, text in LAYER_WORDS if layer.at(name)]
    for weights in layer.parts("weights"):
        items.append(("weights", " of ".join(weights.figures("count:elements text:dtype"))))
    if layer.at("why_not_offloaded"):
        items.append(("why not an engine", layer.text("why_not_offloaded")))
    items.append(("operators of the model", layer.texts("operators") or "added by Dovetail"))
    return element("dl", *(f"<div><dt>{text}</dt><dd>{value}</dd></div>" for text, value in items))


def claims_section(sheet: Sheet) -> str:
    """Cycles declared and taken, by layer and unit; nothing where nothing was compared."""
    shown = "text:layer text:unit count:declared count:taken count:instead"
    claims = sheet.parts("claims")
    words = ["off" if claim.at("is_off") else "slower" if claim.at("is_loss") else "" for claim in claims]
    rows = [
        (*claim.figures(shown), element("b", word) if word else "") for claim, word in zip(claims, words, strict=True)
    ]
    intro = (
        "Cycles that the target file declares, beside the cycles of the run, and the core's estimate for the same "
        'layer. "off": the declared cycles differ too much from the run. '
        '"slower": the engine took longer than the core would.'
    )
    listing = table(("layer", "unit", "declared", "taken", "on the core", ""), rows, (2, 3, 4))
    return section("claims", "Declared and taken", intro, listing) if rows else ""


def timeline_section(sheet: Sheet) -> str:
    """A line per core, engine and DMA, whose bars the script draws; nothing on the host."""
    if not sheet.at("timeline"):
        return ""
    colours = device_colours(sheet)
    lines = []
    for device in sheet.parts("devices"):
        name = device.at("name")
        if name not in sheet.at("timeline"):
            continue
        title = f"{swatch(colours[name])}{device.text('name')}"
        busy = element("small", f"busy {device.percent('share')}")
        marks = {"data_device": name, "data_colour": colours[name], "tabindex": "0"}
        canvas = element("canvas", **marks, aria_label="bars of its work over time")
        lines.append(element("div", element("span", title, busy, class_="lane"), canvas, class_="line"))
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
    rows = [core.figures(shown) for core in sheet.parts("cores")]
    headings = ("core", "speed", "cycles", "instructions", "stack, bytes", "stack used")
    return table(headings, rows, (1, 2, 3, 4, 5))


def bytes_section(sheet: Sheet) -> str:
    """Per pair of memories and per layer what copies write, and per layer what is read and written at least."""
    layers = sheet.at("layers")
    paths = []
    for move in sheet.parts("summary", "moved"):
        source, to, count = move.figures("text:from text:to count:bytes")
        paths.append((f"{source} → {to}", count))
    touched = [sum(layer[name] for name in TOUCHED.values()) for layer in layers]
    most = max((*touched, *(layer["bytes_moved"] for layer in layers)), default=0) or 1
    colours = device_colours(sheet)
    rows = []
    for layer in sheet.parts("layers"):
        if not (layer.at("bytes_moved") or layer.at("launches") or layer.at("macs")):
            continue
        upper = bar("moved", 100 * layer.at("bytes_moved") / most)
        lower = "".join(bar(kind, 100 * layer.at(name) / most) for kind, name in TOUCHED.items())
        name = element("span", swatch(colours[layer.at("engine")]), layer.text("name"), class_="nowrap")
        bars = f'<span class="twin"><span>{upper}</span><span>{lower}</span></span>'
        rows.append([name, bars, *layer.figures("count:bytes_moved count:read count:constants count:written")])
    kinds = {"moved": "copied", "r-value": "operands", "r-state": "constants", "r-output": "result"}
    explained = legend(*(f"{swatch(name)}{text}" for name, text in kinds.items()))
    intro = (
        "Upper bar: bytes that copies write for the layer, padding included. Lower bar: bytes of operands, constants "
        "and result, each counted once."
    )
    moved = table(("from → to", "bytes copied"), paths, (1,)) if paths else element("p", "No copies are made.")
    listing = table(("layer", "", *kinds.values()), rows, (2, 3, 4, 5))
    return section("bytes", "Bytes moved", intro, moved, explained, listing)


def weights_section(sheet: Sheet) -> str:
    """Weights by element type."""
    if not sheet.at("weights"):
        return ""
    rows, whole = [], ""
    for group in sheet.parts("weights"):
        shade = {8: "w8", 4: "w4", 2: "w2"}.get(group.at("bits"), "w32")
        whole += bar(shade, 100 * group.at("share"))
        kind, *rest = group.figures("text:dtype count:bits count:elements percent:share count:bytes")
        rows.append([swatch(shade) + kind, *rest])
    numbers, size = sheet.part("parameters").figures("count:elements count:bytes")
    others = element("p", f"Other constants (biases, scales, tables): {numbers} numbers, {size} bytes.")
    listing = table(("weights", "bits", "number", "of all", "bytes when packed"), rows, (1, 2, 3, 4))
    intro = "Weights of the integer graph, including weights that rewrites add."
    return section("weights", "Weights by width", intro, element("div", whole, class_="stack"), listing, others)


def rest_section(sheet: Sheet) -> str:
    """Layers that no engine computes, by reason."""
    groups = sheet.parts("not_offloaded")
    if not groups:
        return section("rest", "Not offloaded", "Every layer is on an engine.")
    rows = []
    for group in groups:
        layers = group.at("layers")
        links = (f'<a href="#layer-{layer}">{sheet.text("layers", layer, "name")}</a>' for layer in layers)
        figures = group.figures("count:cycles percent:share_of_cycles count:macs percent:share_of_macs")
        rows.append([group.text("reason"), ", ".join(links), *figures])
    headings = ("why", "layers", "cycles", "of all", "MACs", "of all")
    intro = "Layers that no engine computes, with the pattern or limit that came nearest."
    return section("rest", "Not on an engine, and why", intro, table(headings, rows, (2, 3, 4, 5)))


SECTIONS = {
    "time": ("Time", layers_section),
    "claims": ("Declared", claims_section),
    "timeline": ("Timeline", timeline_section),
    "memory": ("Memory", memory_section),
    "network": ("Network", network_section),
    "roofline": ("Roofline", roofline_section),
    "bytes": ("Bytes", bytes_section),
    "weights": ("Weights", weights_section),
    "rest": ("Not offloaded", rest_section),
}
"""Parts of the page in their order, with their names in its navigation; each may be empty."""
