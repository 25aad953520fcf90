"""Pieces of HTML and SVG: elements, charts, and figures.

Every number a page shows is taken from its data by a JSON pointer that stands beside it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partialmethod
from html import escape
from importlib import resources
from typing import Any

from dovetail.records import Record


def element(tag: str, *content: str, **attributes: str | float) -> str:
    """An element with an end tag.

    Args:
        tag: its name.
        content: HTML or SVG.
        attributes: text or numbers (two decimals at most of a float); `class_` is written `class`, underscores
            become hyphens.
    """
    return f"<{tag}{_attributes(attributes)}>{''.join(content)}</{tag}>"


def shape(tag: str, **attributes: str | float) -> str:
    """An element without content and without an end tag; see `element`."""
    return f"<{tag}{_attributes(attributes)}/>"


def _attributes(attributes: dict[str, str | float]) -> str:
    pairs = ((name.rstrip("_").replace("_", "-"), _plain(value)) for name, value in attributes.items())
    return "".join(f' {name}="{escape(value)}"' for name, value in pairs)


def _plain(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def bar(kind: str, percent: float, digits: int = 2) -> str:
    """A horizontal bar in one of the style's colours (a class)."""
    return f'<i class="{kind}" style="width:{percent:.{digits}f}%"></i>'


def nice_steps(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most so many, for the marks of an axis."""
    span = max(high - low, 1e-9)
    power = 10.0 ** (len(str(int(span / most))) - 1) if span / most >= 1 else 1.0
    step = next(power * factor for factor in (1, 2, 5, 10, 20, 50) if span / (power * factor) <= most)
    first = int(-(-low // step))
    return [step * number for number in range(first, int(high // step) + 1)]


class PlotArea(Record):
    """The plane of a chart within its margins, all in the picture's own units."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    def x(self, share: float) -> float:
        """The place of a share of the plane, 0 at its left edge, 1 at its right one."""
        return self.left + (self.width - self.left - self.right) * share

    def y(self, share: float) -> float:
        """The place of a share of the plane, 0 at its lower edge, 1 at its upper one."""
        return self.top + (self.height - self.top - self.bottom) * (1 - share)

    def lines(self, marks: Iterable[tuple[float, str]]) -> str:
        """Lines from left to right, each at a share of the height, with a text (HTML) beside it."""
        parts = []
        for share, text in marks:
            y = self.y(share)
            parts.append(element("line", x1=self.x(0), x2=self.x(1), y1=y, y2=y, class_="grid"))
            parts.append(element("text", text, x=self.left - 6.0, y=y + 3.5, class_="tick", text_anchor="end"))
        return "".join(parts)

    def svg(self, *parts: str, class_: str, label: str) -> str:
        """The whole picture; `label` says what it shows."""
        extent = f"0 0 {self.width} {self.height}"
        return element("svg", *parts, viewBox=extent, class_=class_, role="img", aria_label=label)


NOTHING = "\u2013"
"""Shown for a figure that is not known."""


def formatted(value: Any, kind: str) -> str:
    """A value as pages show it.

    Args:
        value: a number, or text; None where it is not known.
        kind: "count" (whole, with commas), "percent" (of 1), "rate" (three digits), "signed" (a percentage with its
            sign), "ratio" (two decimals and a cross), "value" (as it is given) or "text".
    """
    if value is None or value == "":
        return NOTHING
    if kind == "value":
        return f"{value:,}" if type(value) is int else str(value).lower()
    if kind == "count":
        return f"{round(value):,}"
    if kind == "percent":
        return f"{100 * value:.1f} %"
    if kind == "signed":
        return f"{100 * value:+.1f} %"
    if kind == "ratio":
        return f"{value:.2f} \u00d7"
    if kind == "rate":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return str(value)


def pointer(*steps: str | int) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


class Sheet(Record):
    """The data of a page, or a part of it, as plain values; every figure it shows says where it comes from."""

    data: Any
    place: str = ""
    """JSON pointer of the part within the data that is written into the page."""

    def at(self, *steps: str | int) -> Any:
        """The value at the end of these keys and indices."""
        value = self.data
        for step in steps:
            value = value[step]
        return value

    def part(self, *steps: str | int) -> Sheet:
        """The part at the end of these keys and indices."""
        return Sheet(self.at(*steps), self.place + pointer(*steps))

    def parts(self, *steps: str | int) -> list[Sheet]:
        """The elements of a list."""
        return [self.part(*steps, number) for number in range(len(self.at(*steps)))]

    def show(self, kind: str, *steps: str | int, tag: str = "span") -> str:
        """A figure or text as HTML with its JSON pointer; within SVG the tag is "tspan". See `formatted` for `kind`."""
        text = escape(formatted(self.at(*steps), kind))
        return f'<{tag} data-of="{escape(self.place + pointer(*steps))}" data-as="{kind}">{text}</{tag}>'

    count = partialmethod(show, "count")
    """A whole number."""
    percent = partialmethod(show, "percent")
    """A part of 1, as a percentage."""
    rate = partialmethod(show, "rate")
    """Three digits or so of a number."""
    text = partialmethod(show, "text")

    def figures(self, kinds: str) -> list[str]:
        """Several figures: "count:cycles percent:share ..."."""
        return [self.show(kind, name) for kind, name in (word.split(":") for word in kinds.split())]

    def texts(self, *steps: str | int) -> str:
        """The texts of a list, with commas between them."""
        return ", ".join(part.text() for part in self.parts(*steps))

    def type(self, *steps: str | int) -> str:
        """Shape and element type of a value."""
        sizes = " &times; ".join(size.count() for size in self.parts(*steps, "shape"))
        return f"{sizes} {self.text(*steps, 'dtype')}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table: headings and cells are HTML; columns of numbers are set to the right."""
    sides = ["number" if place in numeric else "word" for place in range(len(headings))]
    head = "".join(element("th", text, class_=side) for text, side in zip(headings, sides, strict=True))
    body = "".join(
        "<tr>" + "".join(element("td", cell, class_=side) for cell, side in zip(row, sides, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def section(name: str, title: str, intro: str, *content: str) -> str:
    """A part of the page with a heading; `intro` is HTML."""
    words = element("p", intro, class_="intro") if intro else ""
    return element("section", element("h2", escape(title)), words, *content, id=name)


def key(name: str) -> str:
    """A name that is a key of the data, such as a memory's."""
    return f'<span class="key">{escape(name)}</span>'


def swatch(colour: str) -> str:
    """A small square in one of the style's colours (a class)."""
    return f'<i class="swatch {escape(colour)}"></i>'


def legend(*items: str) -> str:
    """A line of explanations, each HTML."""
    return element("ul", *(f"<li>{item}</li>" for item in items), class_="legend")


TIP = '<div id="tip" role="status" hidden></div>'
"""End of a page's body: the element in which the script describes a point."""


def navigation(links: Mapping[str, str], theme: str = '<button id="theme">&#9680;</button>') -> str:
    """The bar on top: links to sections by their names, the JSON, and a button for light or dark."""
    anchors = "".join(f'<a href="#{name}">{label}</a>' for name, label in links.items())
    return f'<nav>{anchors}<span class="grow"></span><button id="save">JSON</button>{theme}</nav>'


def document(title: str, body: str, data: Any) -> str:
    """The whole page: one file that needs nothing else, and may load and run nothing but its own script."""
    style, script = (
        resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("style.css", "script.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def embedded(data: Any) -> str:
    """JSON that stays inside its script element, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def device_colours(sheet: Sheet) -> dict[str, str]:
    """The style's colour of each device: cores, the DMA, and engines by number; several engines by their first."""
    colours = {device["name"]: device["kind"] for device in sheet.at("devices")}
    engines = [name for name, kind in colours.items() if kind == "engine"]
    colours |= {name: f"e{number % 6}" for number, name in enumerate(engines)}
    for layer in sheet.at("layers"):
        colours.setdefault(layer["engine"], colours.get(layer["engine"].split("+")[0], "core"))
    return colours
