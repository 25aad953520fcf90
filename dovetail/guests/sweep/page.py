"""A sweep as a page: a plot for every figure, and a table of all points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dovetail.guests.report.markup import (
    TIP,
    PlotArea,
    Sheet,
    document,
    element,
    formatted,
    key,
    legend,
    navigation,
    nice_steps,
    section,
    swatch,
    table,
)

FRAME = PlotArea(1000, 360, left=90, right=20, top=16, bottom=52)
COLOURS = ("e0", "e1", "e2", "e3", "e4", "e5", "dma", "core")

_METRICS = {"cycles": "cycles", "macs_per_cycle": "MACs per cycle"}
_METRICS |= {"energy": "uJ", "bytes_moved": "bytes copied", "firmware": "bytes of firmware"}


def sweep_page(data: Mapping[str, Any]) -> str:
    """The page of what `sweep.run.to_json` gave; that is embedded, and everything shown is taken from it."""
    sheet = Sheet(data)
    fields = ", ".join(sheet.text("fields", number, "name") for number in range(len(sheet.at("fields"))))
    title = element("h1", f"{sheet.text('model')} <span>on {sheet.text('target')}</span>")
    intro = element("p", f"What if: {fields}. Policy {sheet.text('policy')}.", class_="intro")
    nav = navigation({"plot": "Plot", "points": "Points"})
    body = f"{nav}<main>{title}{intro}{_plots(sheet)}{_points(sheet)}</main>{TIP}"
    return document(f"{data['model']} on {data['target']}: what if", body, data)


def _metrics(sheet: Sheet) -> list[tuple[tuple[str, ...], str]]:
    """Paths of the figures in a point, and their names."""
    paths: dict[tuple[str, ...], str] = {(key,): name for key, name in _METRICS.items()}
    paths |= {("peaks", name): f"bytes of {name} at the peak" for name in sheet.at("memories")}
    return [(path, name) for path, name in paths.items() if any(_at(point, path) for point in sheet.at("points"))]


def _at(point: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = point
    for step in path:
        value = value.get(step)
        if value is None:
            return None
    return value


def _series(sheet: Sheet) -> tuple[int, list[list[int]]]:
    """The field along the axis, the one with the most values, and the points of each line, by the other fields."""
    fields, points = sheet.at("fields"), sheet.at("points")
    axis = max(range(len(fields)), key=lambda number: (len(fields[number]["values"]), -number))
    others = [field["name"] for number, field in enumerate(fields) if number != axis]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, point in enumerate(points):
        groups.setdefault(tuple(point["settings"][name] for name in others), []).append(number)
    return axis, list(groups.values())


def _plots(sheet: Sheet) -> str:
    """One plot per figure, and which to show."""
    axis, lines = _series(sheet)
    metrics = list(enumerate(_metrics(sheet)))
    options = "".join(f'<option value="{n}" class="key">{escape(name)}</option>' for n, (_, name) in metrics)
    if not metrics:
        return section("plot", "Plot", "No point could be compiled.")
    choose = f'<p class="controls"><label>shown <select id="metric">{options}</select></label></p>'
    names = legend(*(_line_name(sheet, axis, line, number) for number, line in enumerate(lines)))
    drawn = [(str(number), _plot(sheet, axis, lines, path, name)) for number, (path, name) in metrics]
    plots = "".join(element("figure", plot, data_metric=number) for number, plot in drawn)
    intro = "A cross is a point that could not be compiled."
    return section("plot", "Plot", intro, choose, names if len(lines) > 1 else "", plots)


def _line_name(sheet: Sheet, axis: int, line: Sequence[int], number: int) -> str:
    parts = [
        f"{sheet.text('fields', other, 'name')} {sheet.show('value', 'points', line[0], 'settings', field['name'])}"
        for other, field in enumerate(sheet.at("fields"))
        if other != axis
    ]
    return f"{swatch(COLOURS[number % len(COLOURS)])}{', '.join(parts)}"


def _plot(sheet: Sheet, axis: int, lines: Sequence[Sequence[int]], path: Sequence[str], name: str) -> str:
    field, points = sheet.at("fields", axis), sheet.at("points")
    values = [value for point in points if (value := _at(point, path)) is not None]
    top: float = max(values) * 1.06 or 1.0
    count = len(field["values"])
    xs = [FRAME.x((place + 0.5) / count) for place in range(count)]
    kind = "count" if top > 6 else "rate"
    parts = [FRAME.lines((step / top, formatted(step, kind)) for step in nice_steps(0, top, 6))]
    foot = FRAME.y(0)
    for place, x in enumerate(xs):
        value = sheet.show("value", "fields", axis, "values", place, tag="tspan")
        parts.append(element("text", value, x=x, y=foot + 18.0, text_anchor="middle"))
    title, middle = sheet.show("text", "fields", axis, "name", tag="tspan"), (FRAME.x(0) + FRAME.x(1)) / 2
    parts.append(element("text", title, class_="axis", x=middle, y=FRAME.height - 8.0, text_anchor="middle"))
    for number, line in enumerate(lines):
        parts.append(_line(sheet, list(zip(xs, line, strict=False)), top, path, number))
    return FRAME.svg(*parts, class_="plot", label=name)


def _line(sheet: Sheet, line: Sequence[tuple[float, int]], top: float, path: Sequence[str], number: int) -> str:
    """One line with a dot per point, `top` at the frame's upper edge; a cross on the axis where there is none."""
    colour, parts, drawn = COLOURS[number % len(COLOURS)], [], ""
    for x, point in line:
        value = _at(sheet.at("points", point), path)
        told = "\n".join(f"{name} {value:,}" for name, value in sheet.at("points", point, "settings").items())
        if value is None:
            drawn += " "
            foot, error = FRAME.y(0), sheet.at("points", point, "error")
            cross = f"M{x - 5:.1f} {foot - 13:.1f}l10 10m0 -10l-10 10"
            parts.append(element("path", d=cross, class_=f"series {colour}", data_tip=f"{told}\n{error}"))
            continue
        y = FRAME.y(value / top)
        drawn += f"{'L' if drawn[-1:].isdigit() else 'M'}{x:.1f} {y:.1f}"
        shown = formatted(value, "count" if value >= 100 else "rate")
        parts.append(element("circle", cx=x, cy=y, r=5.0, class_=colour, data_tip=f"{told}\n{shown}"))
    return element("path", d=drawn.strip() or "M0 0", class_=f"series {colour}") + "".join(parts)


def _points(sheet: Sheet) -> str:
    names = [field["name"] for field in sheet.at("fields")]
    metrics = _metrics(sheet)
    rows = []
    for number, point in enumerate(sheet.at("points")):
        own = ("points", number)
        cells = [sheet.show("value", *own, "settings", name) for name in names]
        for path, _ in metrics:
            kind = "rate" if path == ("macs_per_cycle",) else "count"
            cells.append(sheet.show(kind, *own, *path) if _at(point, path) is not None else "")
        cells.append(sheet.show("ratio", *own, "by_best") if point["by_best"] else "")
        cells.append(sheet.text(*own, "error") if point["error"] else "")
        rows.append(cells)
    headings = [sheet.text("fields", number, "name") for number in range(len(names))]
    headings += [key(name.replace("bytes of ", "")) for _, name in metrics]
    places = range(len(headings) + 1)
    return section("points", "Points", "", table([*headings, "by the best", "why not"], rows, tuple(places)))
