"""The graph: a row per layer in the order they are computed, coloured by who computes it, with lanes for values."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.report.page.markup import Sheet, element, section
from dovetail.report.page.overview import device_colours

ROW, LANE, RADIUS = 34, 16, 5
"""Pixels: height of a row, distance of lanes, of a dot."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A value: the row it is made in, the rows that read it, and its lane."""

    value: str
    made: int
    read: tuple[int, ...]
    lane: int


def wires(inputs: list[str], edges: list[dict[str, list[str] | str]], outputs: list[str]) -> list[Wire]:
    """Lanes of all values, as few as they can be when a lane is taken from where its value is made to its last use.

    Args:
        inputs: the network's, in row 0 together; layer n is in row n + 1.
        edges: per layer the values it `reads` and the one it `makes`.
        outputs: the network's, read in the row behind the last layer.
    """
    made = {name: 0 for name in inputs}
    read: dict[str, list[int]] = {}
    for number, edge in enumerate(edges, 1):
        made.setdefault(str(edge["makes"]), number)
        for name in edge["reads"]:
            if name not in made:
                made[name] = 0
            read.setdefault(name, []).append(number)
    for name in outputs:
        read.setdefault(name, []).append(len(edges) + 1)
    free_from: list[int] = []
    found = []
    for name, row in sorted(made.items(), key=lambda item: item[1]):
        last = max(read.get(name, [row]))
        lane = next((lane for lane, until in enumerate(free_from) if until <= row), len(free_from))
        free_from[lane : lane + 1] = [max(last, row + 1) if row == 0 else last]
        found.append(Wire(name, row, tuple(read.get(name, ())), lane))
    return found


def network_section(sheet: Sheet) -> str:
    """The rows, and one drawing of all lanes beside them."""
    graph, layers = sheet.at("graph"), sheet.at("layers")
    drawn = wires(list(graph["inputs"]), graph["edges"], list(graph["outputs"]))
    lanes = max((wire.lane for wire in drawn), default=0) + 1
    colours = device_colours(sheet)
    rows = [_ends(sheet, "inputs")]
    for number, layer in enumerate(layers):
        kinds = ", ".join(sheet.text("layers", number, "kinds", place) for place in range(len(layer["kinds"])))
        title = element("a", sheet.text("layers", number, "name"), href=f"#layer-{number}")
        box = element("span", title, element("small", kinds), class_=f"box {colours[layer['engine']]}")
        kind = element("small", sheet.type("layers", number, "result"), class_="shape")
        time = f"{sheet.count('layers', number, 'time')} cycles" if layer["time"] else ""
        rows.append(element("li", box, kind, element("small", time, class_="end-of-row")))
    rows.append(_ends(sheet, "outputs"))
    picture = _lanes(drawn, lanes, len(layers), [colours[layer["engine"]] for layer in layers])
    width = lanes * LANE + 8
    listing = element("ol", *rows, style=f"padding-left:{width}px")
    return section("network", "Network", "Layers in the order in which they are computed; lines are the values between "
                   "them.", element("div", picture, listing, class_="network"))  # fmt: skip


def _ends(sheet: Sheet, kind: str) -> str:
    names = [sheet.text("graph", kind, place) for place in range(len(sheet.at("graph", kind)))]
    return element("li", element("span", element("small", f"{kind}: {', '.join(names)}"), class_="ends"))


def _lanes(drawn: list[Wire], lanes: int, count: int, colours: list[str]) -> str:
    """Lines from where values are made to where they are read, and a dot per layer on the lane of its result."""

    def x(lane: int) -> int:
        """Pixels of a lane."""
        return 8 + lane * LANE

    def y(row: int) -> int:
        """Pixels of the middle of a row."""
        return row * ROW + ROW // 2

    dots = {wire.made: wire.lane for wire in drawn if wire.made}
    parts = []
    for wire in drawn:
        for row in wire.read:
            to = dots.get(row, 0)
            bend = y(row) - ROW // 2
            down = f"M{x(wire.lane)} {y(wire.made)}V{bend}"
            parts.append(element("path", d=f"{down}C{x(wire.lane)} {y(row) - 4} {x(to)} {bend} {x(to)} {y(row)}",
                                 class_="wire"))  # fmt: skip
    for row, lane in dots.items():
        parts.append(element("circle", cx=str(x(lane)), cy=str(y(row)), r=str(RADIUS), class_=colours[row - 1]))
    parts += [element("circle", cx=str(x(w.lane)), cy=str(y(0)), r="3.5", class_="end") for w in drawn if not w.made]
    width, height = lanes * LANE + 8, (count + 2) * ROW
    return element("svg", *parts, width=str(width), height=str(height), aria_hidden="true")
