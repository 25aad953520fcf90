"""Two builds side by side, as a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from dovetail.report.page.markup import Sheet, document, element, section, swatch, table


def versus(data: Mapping[str, Any]) -> str:
    """The page of a comparison.

    Args:
        data: of `dovetail.report.compare.compare`; it is embedded, and everything shown is taken from it.
    """
    sheet = Sheet(data)
    title = element("h1", f"{sheet.text('a', 'name')} <span>against</span> {sheet.text('b', 'name')}")
    items = [
        f"<li>{swatch(side)}{sheet.text(side, 'name')} <small>{sheet.text(side, 'model')} on "
        f"{sheet.text(side, 'target')}</small></li>"
        for side in "ab"
    ]
    legend = element("ul", *items, class_="legend")
    parts = (_changed(sheet), _totals(sheet), _layers(sheet))
    nav = (
        '<nav><a href="#changed">Changed</a><a href="#totals">Totals</a><a href="#time">Layers</a>'
        '<span class="grow"></span><button id="save">JSON</button><button id="theme">&#9680;</button></nav>'
    )
    body = f'{nav}<main>{title}{legend}{"".join(parts)}</main><div id="tip" role="status" hidden></div>'
    return document(f"{data['a']['name']} against {data['b']['name']}", body, data)


def _changed(sheet: Sheet) -> str:
    rows = [
        [sheet.text("changed", number, key) for key in ("what", "a", "b")] for number in range(len(sheet.at("changed")))
    ]
    if not rows:
        return section("changed", "What changed", "Nothing was chosen differently.")
    return section("changed", "What changed", "", table(("what", *_names(sheet)), rows))


def _names(sheet: Sheet) -> tuple[str, str]:
    return sheet.text("a", "name"), sheet.text("b", "name")


def _totals(sheet: Sheet) -> str:
    rows = []
    for number in range(len(sheet.at("totals"))):
        own = ("totals", number)
        rows.append([sheet.text(*own, "name"), sheet.count(*own, "a"), sheet.count(*own, "b"), _ratio(sheet, *own)])
    return section("totals", "Totals", "", table(("", *_names(sheet), "ratio"), rows, (1, 2, 3)))


def _ratio(sheet: Sheet, *own: str | int) -> str:
    """The ratio, marked where it is better or worse by a hundredth; more or fewer MACs are neither."""
    value = sheet.at(*own, "ratio")
    same = value is None or abs(value - 1) < 0.01 or sheet.at(*own).get("name", "").startswith("MACs")
    kind = "" if same else "good" if value < 1 else "bad"
    return element("span", sheet.show("ratio", *own, "ratio"), class_=kind)


def _layers(sheet: Sheet) -> str:
    layers = sheet.at("layers")
    most = max((layer[side]["time"] or 0 for layer in layers for side in "ab"), default=0) or 1
    rows = []
    for number, layer in enumerate(layers):
        own = ("layers", number)
        names = [
            ", ".join(sheet.text(*own, "operators", place) for place in range(len(layer["operators"])))
            or "added by Dovetail"
        ]
        shares = {side: 100 * (layer[side]["time"] or 0) / most for side in "ab"}
        bars = "".join(f'<span><i class="{side}" style="width:{shares[side]:.2f}%"></i></span>' for side in "ab")
        rows.append([
            _side(sheet, number, "a"), _side(sheet, number, "b"),
            element("span", bars, class_="twin"), sheet.count(*own, "a", "time"), sheet.count(*own, "b", "time"),
            _ratio(sheet, *own), element("small", *names, class_="clamp"),
        ])  # fmt: skip
    a, b = _names(sheet)
    headings = (a, b, "", f"cycles, {a}", f"cycles, {b}", "ratio", "operators of the model")
    intro = "Layers that compute the same operators of the model stand side by side."
    return section("time", "Layer by layer", intro, table(headings, rows, (3, 4, 5)))


def _side(sheet: Sheet, number: int, side: str) -> str:
    layers = sheet.at("layers", number, side, "layers")
    names = [sheet.text("layers", number, side, "layers", place) for place in range(len(layers))]
    where = sheet.text("layers", number, side, "where") if layers else escape("nothing")
    return element("span", f"{'<br>'.join(names)} <small>{where}</small>", class_="nowrap")
