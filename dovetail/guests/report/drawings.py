"""Drawings of the report's page: memory over time, the network as rows with lanes, and the roofline."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log10, sqrt
from typing import Any

from dovetail.guests.report.markup import (
    PlotArea,
    Sheet,
    device_colours,
    element,
    key,
    legend,
    nice_steps,
    section,
    swatch,
)
from dovetail.records import Record

FEW_BUFFERS = 6
"""Most buffers that fit a picture of less height."""

ROLES = {"input": "inputs", "output": "outputs", "value": "values", "tile": "tiles"}
ROLES |= {"scratch": "scratch", "state": "states"}

ROOFLINE = PlotArea(1000, 380, left=60, right=20, top=14, bottom=44)

ROW, LANE, RADIUS = 34, 16, 5
"""Pixels: height of a row of the network, distance of lanes, of a dot."""


def memory_section(sheet: Sheet) -> str:
    """A picture per memory that holds something: addresses against the program's steps, a rectangle per buffer."""
    names = [name for name, memory in sheet.at("memories").items() if memory["buffers"]]
    if not names:
        return ""
    used = {buffer["role"] for name in names for buffer in sheet.at("memories", name, "buffers")}
    explained = legend(
        *(f"{swatch('r-' + role)}{text}" for role, text in ROLES.items() if role in used),
        '<i class="line-mark live"></i>bytes in use',
        '<i class="line-mark bound"></i>least possible peak',
    )
    timed = bool(sheet.at("steps", "begins")) and sheet.at("steps", "begins", 0, "cycle") is not None
    toggle = '<p class="controls"><button id="memory-time" aria-pressed="false">in cycles</button></p>' if timed else ""
    intro = (
        "Addresses upwards, steps of the program from left to right; the strip below shows the working unit. A buffer "
        "is pale from the start of its last use until the core has waited for that use. Constants in the memory of the "
        "code are not shown."
    )
    pictures = "".join(_memory_figure(sheet, name) for name in names)
    return section("memory", "Memory over time", intro, explained, toggle, pictures)


def _memory_figure(sheet: Sheet, name: str) -> str:
    peak, size, least = sheet.part("memory", name).figures("count:peak count:size count:lower_bound")
    share = sheet.percent("summary", "memory_share", name)
    caption = f"<b>{key(name)}</b> {peak} of {size} bytes at the peak ({share}); the least possible is {least}"
    return element("figure", element("figcaption", caption), _memory_picture(sheet, name))


def _memory_picture(sheet: Sheet, name: str) -> str:
    memory, steps = sheet.at("memories", name), int(max(sheet.at("steps", "count"), 1))
    use = sheet.at("memory", name)
    top: float = max(use["peak"], 1) * 1.04
    high = 120 if len(memory["buffers"]) <= FEW_BUFFERS else 270
    frame = PlotArea(1000, high + 34, left=66, right=0, top=10, bottom=24)  # `script.js` knows left and width

    def across(step: float) -> float:
        return frame.x(step / steps)

    def up(address: float) -> float:
        return frame.y(address / top)

    parts = [frame.lines((address / top, f"{address:,.0f}") for address in nice_steps(0, top, 6))]
    for number, buffer in enumerate(memory["buffers"]):
        for piece, (start, stop, first, last, known) in enumerate(buffer["parts"]):
            low, above = up(buffer["address"] + start), up(buffer["address"] + stop)
            marks = {"data_memory": name, "data_buffer": str(number), "data_part": str(piece)}
            for kind, begin, end in (("buffer", first, last), ("tail", last, known)):
                if end > begin:
                    box: dict[str, Any] = {"x": across(begin), "width": across(end) - across(begin)}
                    box |= {"y": above, "height": max(low - above, 0.5)}
                    parts.append(element("rect", class_=f"{kind} r-{buffer['role']}", **box, **marks))
    live, before = "", 0
    for step, total in memory["live"]:
        at = across(min(step, steps))
        live += f"L{at:.1f} {up(before):.1f}L{at:.1f} {up(total):.1f}"
        before = total
    parts.append(element("path", d=f"M{frame.left} {up(0):.1f}{live}", class_="live", data_live=name))
    least = up(use["lower_bound"])
    parts.append(element("line", x1=float(frame.left), x2=float(frame.width), y1=least, y2=least, class_="bound"))
    parts.append(_strip(sheet, across, frame.y(0) + 6.0))
    return frame.svg(*parts, class_="memory", label=f"what lies where in {name}, and when")


def _strip(sheet: Sheet, across: Callable[[float], float], top: float) -> str:
    """A strip below the picture: the device that works for each layer."""
    begins, colours = sheet.at("steps", "begins"), device_colours(sheet)
    ends = [*(begin["step"] for begin in begins[1:]), sheet.at("steps", "count")]
    boxes = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        device = sheet.at("layers", begin["layer"], "engine")
        x, stop = across(begin["step"]), across(end)
        box: dict[str, Any] = {"x": x, "width": max(stop - x - 0.6, 0.4), "y": top, "height": 10.0}
        boxes.append(element("rect", **box, class_=f"strip {colours[device]}", data_begin=str(number)))
    return "".join(boxes)


class Wire(Record):
    """A value of the drawing: the row it comes from, the rows that read it, and its lane."""

    value: str
    row: int
    readers: tuple[int, ...]
    lane: int


def wires(inputs: list[str], edges: list[dict[str, list[str] | str]], outputs: list[str]) -> list[Wire]:
    """Lanes of all values, as few as they can be when a lane is taken from where its value is made to its last use.

    Args:
        inputs: the network's, in row 0 together; layer n is in row n + 1.
        edges: per layer the values it `reads` and the one it `makes`.
        outputs: the network's, read in the row behind the last layer.
    """
    rows = dict.fromkeys(inputs, 0)
    readers: dict[str, list[int]] = {}
    for number, edge in enumerate(edges, 1):
        rows.setdefault(str(edge["makes"]), number)
        for name in edge["reads"]:
            rows.setdefault(name, 0)
            readers.setdefault(name, []).append(number)
    for name in outputs:
        readers.setdefault(name, []).append(len(edges) + 1)
    free_from: list[int] = []
    lines = []
    for name, row in sorted(rows.items(), key=lambda item: item[1]):
        last = max(readers.get(name, [row]))
        lane = next((lane for lane, until in enumerate(free_from) if until <= row), len(free_from))
        free_from[lane : lane + 1] = [max(last, row + 1) if row == 0 else last]
        lines.append(Wire(name, row, tuple(readers.get(name, ())), lane))
    return lines


def network_section(sheet: Sheet) -> str:
    """A row per layer in the order they are computed, coloured by who computes it, with lanes for values beside."""
    graph, layers = sheet.at("graph"), sheet.at("layers")
    drawn = wires(list(graph["inputs"]), graph["edges"], list(graph["outputs"]))
    width = (max((wire.lane for wire in drawn), default=0) + 1) * LANE + 8
    colours = device_colours(sheet)
    rows = [_ends(sheet, "inputs")]
    for number, layer in enumerate(sheet.parts("layers")):
        title = element("a", layer.text("name"), href=f"#layer-{number}")
        kinds = element("small", layer.texts("kinds"))
        box = element("span", title, kinds, class_=f"box {colours[layer.at('engine')]}")
        kind = element("small", layer.type("result"), class_="shape")
        time = f"{layer.count('time')} cycles" if layer.at("time") else ""
        rows.append(element("li", box, kind, element("small", time, class_="end-of-row")))
    rows.append(_ends(sheet, "outputs"))
    picture = _lanes(drawn, width, [colours[layer["engine"]] for layer in layers])
    listing = element("ol", *rows, style=f"padding-left:{width}px")
    intro = "Layers in the order in which they are computed; lines are the values between them."
    return section("network", "Network", intro, element("div", picture, listing, class_="network"))


def _ends(sheet: Sheet, kind: str) -> str:
    names = element("small", f"{kind}: {sheet.texts('graph', kind)}")
    return element("li", element("span", names, class_="ends"))


def _lanes(drawn: list[Wire], width: int, colours: list[str]) -> str:
    """Lines from where values are made to where they are read, and a dot per layer on the lane of its result."""

    def x(lane: int) -> int:
        return 8 + lane * LANE

    def y(row: int) -> int:
        return row * ROW + ROW // 2

    dots = {wire.row: wire.lane for wire in drawn if wire.row}
    parts = []
    for wire in drawn:
        for row in wire.readers:
            to = dots.get(row, 0)
            bend = y(row) - ROW // 2
            down = f"M{x(wire.lane)} {y(wire.row)}V{bend}"
            curve = f"{down}C{x(wire.lane)} {y(row) - 4} {x(to)} {bend} {x(to)} {y(row)}"
            parts.append(element("path", d=curve, class_="wire"))
    for row, lane in dots.items():
        parts.append(element("circle", cx=x(lane), cy=y(row), r=RADIUS, class_=colours[row - 1]))
    parts += [element("circle", cx=x(wire.lane), cy=y(0), r=3.5, class_="end") for wire in drawn if not wire.row]
    return element("svg", *parts, width=width, height=(len(colours) + 2) * ROW, aria_hidden="true")


def roofline_section(sheet: Sheet) -> str:
    """MACs per cycle each layer reaches against MACs per byte it moves, below what its device allows.

    The picture and a list of the roofs; nothing without time or MACs.
    """
    points, roofs = sheet.at("roofline", "points"), sheet.at("roofline", "roofs")
    placed = [point for point in points if point["intensity"]]
    if not placed:
        return ""
    xs = [point["intensity"] for point in placed]
    xs += [roof["macs_per_cycle"] / roof["bytes_per_cycle"] for roof in roofs if roof["bytes_per_cycle"]]
    ys = [point["macs_per_cycle"] for point in points] + [roof["macs_per_cycle"] for roof in roofs]
    left, low = floor(log10(min(xs))), floor(log10(min(ys)))
    axes = _Axes(left, max(ceil(log10(max(xs)) + 0.15), left + 1), low, max(ceil(log10(max(ys)) + 0.1), low + 1))
    colours = device_colours(sheet)
    longest = max(sheet.at("layers", point["layer"], "time") for point in points)
    parts = [axes.grid()]
    parts += [axes.roof(r["macs_per_cycle"], r["bytes_per_cycle"], colours[r["device"]]) for r in roofs]
    for number, point in enumerate(points):
        share = sheet.at("layers", point["layer"], "time") / longest
        at = axes.x(point["intensity"]) if point["intensity"] else ROOFLINE.x(1)
        dot: dict[str, Any] = {"cx": at, "cy": axes.y(point["macs_per_cycle"]), "r": 4 + 9 * sqrt(share)}
        parts.append(element("circle", **dot, class_=f"point {colours[point['device']]}", data_point=str(number)))
    svg = ROOFLINE.svg(*parts, class_="roofline", label="MACs per cycle against MACs per byte")
    intro = (
        "A dot per layer with MACs; its size stands for the time. Bytes: with a DMA, copies to and from the engine's "
        "memory; otherwise operands, constants and result, each once."
    )
    explained = []
    for roof in sheet.parts("roofline", "roofs"):
        width = f", {roof.rate('bytes_per_cycle')} bytes/cycle" if roof.at("bytes_per_cycle") else ""
        name = f"{swatch(colours[roof.at('device')])}{roof.text('device')}"
        explained.append(f"{name} at most {roof.rate('macs_per_cycle')} MAC/cycle{width}")
    return section("roofline", "Roofline", intro, legend(*explained), element("figure", svg))


class _Axes(Record):
    """Logarithmic axes; their ends are powers of ten."""

    left: int
    right: int
    low: int
    high: int

    def x(self, value: float) -> float:
        """Pixels of MACs per byte."""
        return ROOFLINE.x((log10(value) - self.left) / (self.right - self.left))

    def y(self, value: float) -> float:
        """Pixels of MACs per cycle."""
        return ROOFLINE.y((log10(value) - self.low) / (self.high - self.low))

    def grid(self) -> str:
        """Lines and marks at powers of ten, names of the axes."""
        parts = []
        top, foot = ROOFLINE.y(1), ROOFLINE.y(0)
        for power in range(self.left, self.right + 1):
            at = self.x(10.0**power)
            parts.append(element("line", x1=at, x2=at, y1=top, y2=foot, class_="grid"))
            parts.append(element("text", f"{10.0**power:g}", x=at, y=foot + 16, class_="tick", text_anchor="middle"))
        span = self.high - self.low
        parts.append(ROOFLINE.lines((number / span, f"{10.0 ** (self.low + number):g}") for number in range(span + 1)))
        middle = (ROOFLINE.x(0) + ROOFLINE.x(1)) / 2
        name: dict[str, Any] = {"class_": "axis", "text_anchor": "middle"}
        parts.append(element("text", "MACs per byte", x=middle, y=ROOFLINE.height - 6.0, **name))
        turned = f"rotate(-90 14 {ROOFLINE.height / 2:g})"
        parts.append(element("text", "MACs per cycle", x=14.0, y=ROOFLINE.height / 2, **name, transform=turned))
        return "".join(parts)

    def roof(self, peak: float, width: float | None, colour: str) -> str:
        """A device's limits: what its bytes allow, up to its peak."""
        start, end = 10.0**self.left, 10.0**self.right
        points = [(start, peak), (end, peak)]
        if width:
            knee, floor_ = peak / width, 10.0**self.low
            first = (start, start * width) if start * width >= floor_ else (floor_ / width, floor_)
            points = [first, (knee, peak), (end, peak)]
        text = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return element("polyline", points=text, class_=f"roof {colour}")
