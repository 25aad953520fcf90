"""Who works when: a line per core, engine and DMA. The script draws the bars, so that they can be zoomed."""

from __future__ import annotations

from dovetail.report.page.markup import Sheet, element, section, swatch, table
from dovetail.report.page.overview import device_colours


def timeline_section(sheet: Sheet) -> str:
    """Labels and an empty canvas per line; nothing on the host."""
    if not sheet.at("timeline"):
        return ""
    colours = device_colours(sheet)
    lines = []
    for number, device in enumerate(sheet.at("devices")):
        name = device["name"]
        if name not in sheet.at("timeline"):
            continue
        busy = f"busy {sheet.percent('devices', number, 'share')}"
        label = element("span", f"{swatch(colours[name])}{sheet.text('devices', number, 'name')}",
                        element("small", busy), class_="lane")  # fmt: skip
        canvas = element("canvas", data_device=name, data_colour=colours[name], tabindex="0",
                         aria_label="bars of what works when")  # fmt: skip
        lines.append(element("div", label, canvas, class_="line"))
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
    rows = []
    for number in range(len(sheet.at("cores"))):
        own = ("cores", number)
        figures = [sheet.count(*own, key) for key in ("cycles", "instructions", "stack", "stack_used")]
        rows.append([sheet.text(*own, "name"), sheet.rate(*own, "speed"), *figures])
    headings = ("core", "speed", "cycles", "instructions", "stack, bytes", "stack used")
    return table(headings, rows, (1, 2, 3, 4, 5))
