"""Time of every layer beside its bound, with the reason for what is between them."""

from __future__ import annotations

from dovetail.report.bounds import KINDS
from dovetail.report.page.markup import Sheet, element, key, section, swatch
from dovetail.report.page.overview import SPENT, device_colours

_FIGURES = (
    ("count", "cycles", "cycles until the core goes on to the next layer"),
    ("count", "engine_cycles", "cycles its engine is busy"),
    ("count", "modelled_cycles", "cycles its cost model says"),
    ("count", "dma_cycles", "cycles the DMA is busy"),
    ("count", "macs", "MACs"),
    ("count", "launches", "starts of an engine"),
    ("count", "bytes_moved", "bytes copies write"),
    ("count", "read", "bytes of operands"),
    ("count", "constants", "bytes of constants"),
    ("count", "written", "bytes of the result"),
)


def layers_section(sheet: Sheet) -> str:
    """A row per layer: name, bar, figures, reason; more when it is opened."""
    layers = sheet.at("layers")
    longest = max((max(layer["time"] or 0, layer["bound"] or 0) for layer in layers), default=0) or 1
    colours = device_colours(sheet)
    head = "".join(
        element("span", text, class_=side)
        for text, side in (("layer", "word"), ("time and bound", "word"), ("time", "number"), ("bound", "number"),
                           ("of time", "number"), ("what is between them", "word"))
    )  # fmt: skip
    rows = "".join(_row(sheet, number, colours, longest) for number in range(len(layers)))
    kinds = "".join(f"<li>{swatch(kind)}{SPENT[kind]}</li>" for kind in KINDS)
    legend = element("ul", kinds + '<li><i class="mark"></i>bound</li>', class_="legend")
    order = (
        '<p class="controls"><button id="by-time" aria-pressed="false">longest first</button>'
        '<button id="open-all" aria-pressed="false">details</button></p>'
    )
    intro = (
        "The time of a layer is what its engine is busy for it, and what is spent on it while no engine works; waiting "
        "for another layer is not its own. Its bound is what its MACs take at the peak of what computes it, or its "
        "bytes on their way, whichever is longer."
    )
    heading = element("div", head, class_="layer head")
    table = element("div", heading, element("div", rows, id="layers"), class_="layers")
    return section("time", "Where the time goes", intro, legend, order, table)


def _row(sheet: Sheet, number: int, colours: dict[str, str], longest: float) -> str:
    layer = sheet.at("layers", number)
    name = swatch(colours[layer["engine"]]) + sheet.text("layers", number, "name")
    where = element("small", sheet.text("layers", number, "engine"))
    cells = (
        element("span", name, where, class_="word name"),
        element("span", _bar(sheet, number, longest), class_="word"),
        element("span", sheet.count("layers", number, "time"), class_="number"),
        element("span", sheet.count("layers", number, "bound"), class_="number"),
        element("span", sheet.percent("layers", number, "share_of_bound"), class_="number"),
        element("span", sheet.text("layers", number, "gap") if layer["gap"] else "", class_="word why"),
    )
    summary = element("summary", *cells, class_="layer")
    return element("details", summary, _more(sheet, number), id=f"layer-{number}", data_time=str(layer["time"] or 0))


def _bar(sheet: Sheet, number: int, longest: float) -> str:
    layer = sheet.at("layers", number)
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
    """What is shown of a layer when it is opened."""
    layer = sheet.at("layers", number)
    items = [(text, sheet.show(kind, "layers", number, key)) for kind, key, text in _FIGURES if layer[key]]
    items.append(("result", sheet.type("layers", number, "result")))
    for kind in KINDS if layer["spent"] else ():
        if layer["spent"][kind]:
            items.append((f"cycles, {SPENT[kind]}", sheet.count("layers", number, "spent", kind)))
    for place, core in enumerate(sheet.at("cores")):
        if layer["name"] in core["layers"]:
            worked = sheet.count("cores", place, "layers", layer["name"])
            items.append((f"cycles of {key(core['name'])}", worked))
    if layer["bound_by"]:
        items.append(("bound by", sheet.text("layers", number, "bound_by")))
    if layer["offload"]:
        items.append(("taken as", sheet.text("layers", number, "offload")))
    for place in range(len(layer["weights"])):
        own = ("layers", number, "weights", place)
        items.append(("weights", f"{sheet.count(*own, 'elements')} of {sheet.text(*own, 'dtype')}"))
    if layer["why_not_offloaded"]:
        items.append(("why not an engine", sheet.text("layers", number, "why_not_offloaded")))
    names = [sheet.text("layers", number, "operators", place) for place in range(len(layer["operators"]))]
    items.append(("operators of the model", ", ".join(names) or "added by Dovetail"))
    return element("dl", *(f"<div><dt>{text}</dt><dd>{value}</dd></div>" for text, value in items))
