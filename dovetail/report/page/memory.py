"""Memory over time: address against the steps of the program, a rectangle per buffer and the time it is in use."""

from __future__ import annotations

from typing import Any

from dovetail.report.page.markup import Sheet, element, key, nice_steps, section, swatch
from dovetail.report.page.overview import device_colours

WIDTH, LEFT, TOP, BOTTOM = 1000, 66, 10, 24
"""Of a picture, in its own units; `script.js` knows LEFT and WIDTH."""
_FEW = 6
"""So many buffers need less height."""

ROLES = {
    "input": "inputs",
    "output": "outputs",
    "value": "values",
    "tile": "tiles",
    "scratch": "scratch",
    "state": "states",
}


def memory_section(sheet: Sheet) -> str:
    """A picture per memory that holds something."""
    names = [name for name, memory in sheet.at("memories").items() if memory["buffers"]]
    if not names:
        return ""
    used = {buffer["role"] for name in names for buffer in sheet.at("memories", name, "buffers")}
    roles = "".join(f"<li>{swatch('r-' + role)}{text}</li>" for role, text in ROLES.items() if role in used)
    lines = (
        '<li><i class="line-mark live"></i>bytes in use</li>'
        '<li><i class="line-mark bound"></i>least possible peak</li>'
    )
    timed = bool(sheet.at("steps", "begins")) and sheet.at("steps", "begins", 0, "cycle") is not None
    toggle = (
        '<p class="controls"><button id="memory-time" aria-pressed="false">in cycles</button></p>' if timed else ""
    )
    intro = (
        "Addresses upwards, the program from left to right, as the core starts it; the strip below says who works. A "
        "buffer is pale from when its last use is started until the core has waited for it. Constants and code are not "
        "shown."
    )
    pictures = "".join(_figure(sheet, name) for name in names)
    return section("memory", "Memory over time", intro, element("ul", roles, lines, class_="legend"), toggle, pictures)


def _figure(sheet: Sheet, name: str) -> str:
    peak, size = sheet.count("memory", name, "peak"), sheet.count("memory", name, "size")
    share = sheet.percent("summary", "memory_share", name)
    least = sheet.count("memory", name, "lower_bound")
    caption = f"<b>{key(name)}</b> {peak} of {size} bytes at the peak ({share}); the least possible is {least}"
    return element("figure", element("figcaption", caption), _picture(sheet, name))


def _picture(sheet: Sheet, name: str) -> str:
    memory, steps = sheet.at("memories", name), int(max(sheet.at("steps", "count"), 1))
    use = sheet.at("memory", name)
    top: float = max(use["peak"], 1) * 1.04
    wide, high = WIDTH - LEFT, 120 if len(memory["buffers"]) <= _FEW else 270

    def across(step: float) -> float:
        """Pixels of a step."""
        return LEFT + wide * step / steps

    def up(address: float) -> float:
        """Pixels of an address."""
        return TOP + high * (1 - address / top)

    parts = [_marks(top, up)]
    for number, buffer in enumerate(memory["buffers"]):
        for piece, (start, stop, first, last, known) in enumerate(buffer["parts"]):
            low, above = up(buffer["address"] + start), up(buffer["address"] + stop)
            for kind, begin, end in (("buffer", first, last), ("tail", last, known)):
                if end > begin:
                    box = {"x": across(begin), "width": across(end) - across(begin), "y": above,
                           "height": max(low - above, 0.5)}  # fmt: skip
                    parts.append(element("rect", class_=f"{kind} r-{buffer['role']}", **box, data_memory=name,
                                         data_buffer=str(number), data_part=str(piece)))  # fmt: skip
    live = "".join(f"L{across(step):.1f} {up(total):.1f}" for step, total in _stairs(memory["live"], steps))
    parts.append(element("path", d=f"M{LEFT} {up(0):.1f}{live}", class_="live", data_live=name))
    parts.append(element("line", x1=float(LEFT), x2=float(WIDTH), y1=up(use["lower_bound"]), y2=up(use["lower_bound"]),
                         class_="bound"))  # fmt: skip
    parts.append(_strip(sheet, across, TOP + high + 6.0))
    label = f"what lies where in {name}, and when"
    extent = f"0 0 {WIDTH} {TOP + high + BOTTOM}"
    return element("svg", *parts, viewBox=extent, class_="memory", role="img", aria_label=label)


def _marks(top: float, up: Any) -> str:
    """Horizontal lines at round addresses."""
    found = []
    for address in nice_steps(0, top, 6):
        y = up(address)
        found.append(element("line", x1=float(LEFT), x2=float(WIDTH), y1=y, y2=y, class_="grid"))
        found.append(element("text", f"{address:,.0f}", x=float(LEFT - 6), y=y + 3.5, class_="tick", text_anchor="end"))
    return "".join(found)


def _stairs(live: list[list[int]], steps: int) -> list[tuple[int, int]]:
    found, before = [], 0
    for step, total in live:
        found += [(min(step, steps), before), (min(step, steps), total)]
        before = total
    return found


def _strip(sheet: Sheet, across: Any, top: float) -> str:
    """Who works for which layer, below the picture."""
    begins, colours = sheet.at("steps", "begins"), device_colours(sheet)
    ends = [*(begin["step"] for begin in begins[1:]), sheet.at("steps", "count")]
    found = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        device = sheet.at("layers", begin["layer"], "engine")
        x, stop = across(begin["step"]), across(end)
        found.append(
            element("rect", x=x, width=max(stop - x - 0.6, 0.4), y=top, height=10.0,
                    class_=f"strip {colours[device]}", data_begin=str(number))
        )  # fmt: skip
    return "".join(found)
