"""The roofline: MACs per cycle each layer reaches against MACs per byte it moves, below what its device allows."""

from __future__ import annotations

from math import ceil, floor, log10, sqrt

from dovetail.report.page.markup import Sheet, element, section, swatch
from dovetail.report.page.overview import device_colours

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 380, 60, 20, 14, 44


def roofline_section(sheet: Sheet) -> str:
    """The picture and a list of the roofs; nothing without time or MACs."""
    points, roofs = sheet.at("roofline", "points"), sheet.at("roofline", "roofs")
    placed = [point for point in points if point["intensity"]]
    if not placed:
        return ""
    xs = [point["intensity"] for point in placed]
    xs += [roof["macs_per_cycle"] / roof["bytes_per_cycle"] for roof in roofs if roof["bytes_per_cycle"]]
    ys = [point["macs_per_cycle"] for point in points] + [roof["macs_per_cycle"] for roof in roofs]
    sides = floor(log10(min(xs))), ceil(log10(max(xs)) + 0.15)
    scale = _Scale(*sides, floor(log10(min(ys))), ceil(log10(max(ys)) + 0.1))
    colours = device_colours(sheet)
    longest = max(sheet.at("layers", point["layer"], "time") for point in points)
    parts = [scale.grid()]
    for roof in roofs:
        parts.append(scale.roof(roof["macs_per_cycle"], roof["bytes_per_cycle"], colours[roof["device"]]))
    for number, point in enumerate(points):
        share = sheet.at("layers", point["layer"], "time") / longest
        at = scale.x(point["intensity"]) if point["intensity"] else float(WIDTH - RIGHT)
        parts.append(
            element("circle", cx=at, cy=scale.y(point["macs_per_cycle"]), r=4 + 9 * sqrt(share),
                    class_=f"point {colours[point['device']]}", data_point=str(number))
        )  # fmt: skip
    svg = element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="roofline", role="img",
                  aria_label="MACs per cycle against MACs per byte")  # fmt: skip
    intro = (
        "A dot per layer with MACs, the larger the longer it takes. Bytes are those copied to and from the engine's "
        "memory where there is a DMA, else operands, constants and result once."
    )
    return section("roofline", "Roofline", intro, _legend(sheet, colours), element("figure", svg))


def _legend(sheet: Sheet, colours: dict[str, str]) -> str:
    items = []
    for number, roof in enumerate(sheet.at("roofline", "roofs")):
        own = ("roofline", "roofs", number)
        width = f", {sheet.rate(*own, 'bytes_per_cycle')} bytes/cycle" if roof["bytes_per_cycle"] else ""
        items.append(f"<li>{swatch(colours[roof['device']])}{sheet.text(*own, 'device')} at most "
                     f"{sheet.rate(*own, 'macs_per_cycle')} MAC/cycle{width}</li>")  # fmt: skip
    return element("ul", *items, class_="legend")


class _Scale:
    """Logarithmic axes between powers of ten."""

    def __init__(self, left: int, right: int, low: int, high: int) -> None:
        self.left, self.right, self.low, self.high = left, max(right, left + 1), low, max(high, low + 1)

    def x(self, value: float) -> float:
        """Pixels of MACs per byte."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(value) - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        """Pixels of MACs per cycle."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (log10(value) - self.low) / (self.high - self.low))

    def grid(self) -> str:
        """Lines and marks at powers of ten, names of the axes."""
        found = []
        for power in range(self.left, self.right + 1):
            at = self.x(10.0**power)
            found.append(element("line", x1=at, x2=at, y1=float(TOP), y2=float(HEIGHT - BOTTOM), class_="grid"))
            found.append(element("text", f"{10.0**power:g}", x=at, y=float(HEIGHT - BOTTOM + 16), class_="tick",
                                 text_anchor="middle"))  # fmt: skip
        for power in range(self.low, self.high + 1):
            at = self.y(10.0**power)
            found.append(element("line", x1=float(LEFT), x2=float(WIDTH - RIGHT), y1=at, y2=at, class_="grid"))
            found.append(element("text", f"{10.0**power:g}", x=float(LEFT - 6), y=at + 3.5, class_="tick",
                                 text_anchor="end"))  # fmt: skip
        middle = (LEFT + WIDTH - RIGHT) / 2
        found.append(element("text", "MACs per byte", x=middle, y=HEIGHT - 6.0, class_="axis", text_anchor="middle"))
        turned = f"rotate(-90 14 {HEIGHT / 2:g})"
        found.append(element("text", "MACs per cycle", x=14.0, y=HEIGHT / 2, class_="axis", text_anchor="middle",
                             transform=turned))  # fmt: skip
        return "".join(found)

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
