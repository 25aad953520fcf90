"""Two builds side by side, as data and as a page: what was chosen differently, the totals, and layer by layer.

Layers are told by the operators of the user's model they compute, since targets cut and name them differently: layers
of the two builds that share operators are one row together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError
from dovetail.guests.report.markup import (
    TIP,
    Sheet,
    document,
    element,
    figures,
    legend,
    navigation,
    section,
    swatch,
    table,
)

SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning."""

_MOST = 256 << 20
_CHOICES = ("model", "target", "policy", "simulator", "dovetail")
_NEEDED = ("model", "target", "policy", "simulator", "dovetail", "cycles", "macs", "memory", "sizes", "layers")
_LAYER = ("name", "operators", "engine", "cycles", "macs", "bytes_moved", "ideal_macs_per_cycle")

Json = dict[str, Any]


def read_report(path: Path) -> Json:
    """A report from the JSON that `dovetail report --json` or `dovetail run --json` wrote.
    Raises DovetailError where it is no such file."""
    hint = "give a build, or what dovetail report --json wrote"
    if path.stat().st_size > _MOST:
        raise DovetailError(f"larger than {_MOST} bytes", where=str(path), hint=hint)
    try:
        found = dict(json.loads(path.read_text()))
        missing = [name for name in _NEEDED if name not in found]
        missing += [name for layer in found.get("layers", ()) for name in _LAYER if name not in layer]
        missing += [name for use in found.get("memory", {}).values() for name in ("size", "peak") if name not in use]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DovetailError(f"no report: {error}", where=str(path), hint=hint) from None
    if missing or found.get("schema") != 1:
        what = f"it has no '{missing[0]}'" if missing else f"its schema is {found.get('schema')}, expected 1"
        raise DovetailError(f"no report: {what}", where=str(path), hint=hint)
    return found


def compare(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> Json:
    """Both reports, the JSON of a report or run each, beside each other as plain values; `names` are theirs."""
    one, other = ({"name": own, **{key: r[key] for key in _CHOICES}} for own, r in zip(names, (a, b), strict=True))
    parts = {"changed": _changed(a, b), "totals": _totals(a, b), "layers": _rows(a["layers"], b["layers"])}
    return {"schema": SCHEMA, "a": one, "b": other, **parts}


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Json]:
    """Options and targets that differ."""
    chosen = [{**{key: r[key] for key in _CHOICES}, **(r.get("options") or {})} for r in (a, b)]
    for own, report in zip(chosen, (a, b), strict=True):
        own["memories"] = ", ".join(f"{name} {use['size']:,} bytes" for name, use in report["memory"].items())
        peaks = {layer["engine"]: layer["ideal_macs_per_cycle"] for layer in report["layers"]}
        own["engines"] = ", ".join(f"{name} {peak:g} MACs per cycle" for name, peak in sorted(peaks.items()) if peak)
    one, other = chosen
    keys = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    return [{"what": key.replace("_", " "), "a": _said(one.get(key)), "b": _said(other.get(key))} for key in keys]


def _said(value: Any) -> str:
    return "none" if value is None or value == "" else str(value)


def _totals(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Json]:
    """Figures of the whole inference, those that both know first."""
    both = [_figures(report) for report in (a, b)]
    names = [name for name in dict.fromkeys((*both[0], *both[1])) if both[0].get(name) or both[1].get(name)]
    pairs = [(name, both[0].get(name), both[1].get(name)) for name in names]
    return [{"name": name, "a": one, "b": other, "ratio": _ratio(one, other)} for name, one, other in pairs]


def _figures(report: Mapping[str, Any]) -> dict[str, int | None]:
    found: dict[str, int | None] = {"cycles": report["cycles"]["total"], "instructions": report.get("instructions")}
    found |= {f"cycles busy, {name}": value for name, value in report["cycles"].items() if name != "total"}
    found |= {f"MACs on {name}" if name != "total" else "MACs": value for name, value in report["macs"].items()}
    found["bytes copied"] = sum(layer["bytes_moved"] for layer in report["layers"])
    found |= {f"peak of {name}, bytes": use["peak"] for name, use in report["memory"].items()}
    found |= {f"firmware {name}, bytes": size for name, size in report["sizes"].items()}
    found["stack, bytes"] = report.get("stack")
    return found


def _ratio(a: float | None, b: float | None) -> float | None:
    """B by A, where that says something."""
    return round(b / a, 4) if a and b is not None else None


def _rows(a: Sequence[Json], b: Sequence[Json]) -> list[Json]:
    """Rows of layers that compute the same operators, in the order of the first build."""
    rows = []
    for own, other in _matched(a, b):
        one, two = _side([a[number] for number in own]), _side([b[number] for number in other])
        operators = dict.fromkeys(name for number in own for name in a[number]["operators"])
        operators |= dict.fromkeys(name for number in other for name in b[number]["operators"])
        if one["time"] or two["time"] or one["macs"] or two["macs"]:
            ratio = _ratio(one["time"], two["time"])
            rows.append({"operators": list(operators), "a": one, "b": two, "ratio": ratio})
    return rows


def _side(layers: Sequence[Json]) -> Json:
    times = [layer.get("time", layer["cycles"]) for layer in layers]
    return {
        "layers": [layer["name"] for layer in layers],
        "where": " ".join(dict.fromkeys(layer["engine"] for layer in layers)),
        "time": sum(time or 0 for time in times) if times and None not in times else None,
        "macs": sum(layer["macs"] for layer in layers),
        "bytes_moved": sum(layer["bytes_moved"] for layer in layers),
    }


def _matched(a: Sequence[Json], b: Sequence[Json]) -> list[tuple[list[int], list[int]]]:
    """Indices of the layers of both builds that hang together by shared operators.

    A layer that the compiler added belongs to a layer of the same name, else it is a row of its own.
    """
    owner: dict[str, int] = {}
    group: list[int] = []
    both = [*a, *b]
    for number, layer in enumerate(both):
        group.append(number)
        for mark in [f"operator {name}" for name in layer["operators"]] or [f"layer {layer['name']}"]:
            first, second = sorted((_root(group, owner.setdefault(mark, number)), _root(group, number)))
            group[second] = first
    found: dict[int, tuple[list[int], list[int]]] = {}
    for number in range(len(both)):
        own, other = found.setdefault(_root(group, number), ([], []))
        (own if number < len(a) else other).append(number if number < len(a) else number - len(a))
    return list(found.values())


def _root(group: Sequence[int], number: int) -> int:
    while group[number] != number:
        number = group[number]
    return number


def versus(data: Mapping[str, Any]) -> str:
    """The page of what `compare` gave; that is embedded, and everything shown is taken from it."""
    sheet = Sheet(data)
    title = element("h1", f"{sheet.text('a', 'name')} <span>against</span> {sheet.text('b', 'name')}")
    of = {side: f"<small>{sheet.text(side, 'model')} on {sheet.text(side, 'target')}</small>" for side in "ab"}
    builds = legend(*(f"{swatch(side)}{sheet.text(side, 'name')} {of[side]}" for side in "ab"))
    parts = f"{_changed_section(sheet)}{_totals_section(sheet)}{_layers_section(sheet)}"
    nav = navigation({"changed": "Changed", "totals": "Totals", "time": "Layers"})
    body = f"{nav}<main>{title}{builds}{parts}</main>{TIP}"
    return document(f"{data['a']['name']} against {data['b']['name']}", body, data)


def _changed_section(sheet: Sheet) -> str:
    rows = [figures(sheet, "text:what text:a text:b", "changed", n) for n in range(len(sheet.at("changed")))]
    if not rows:
        return section("changed", "What changed", "Nothing was chosen differently.")
    return section("changed", "What changed", "", table(("what", *_names(sheet)), rows))


def _names(sheet: Sheet) -> tuple[str, str]:
    return sheet.text("a", "name"), sheet.text("b", "name")


def _totals_section(sheet: Sheet) -> str:
    rows = []
    for number in range(len(sheet.at("totals"))):
        own = ("totals", number)
        rows.append([*figures(sheet, "text:name count:a count:b", *own), _ratio_mark(sheet, *own)])
    return section("totals", "Totals", "", table(("", *_names(sheet), "ratio"), rows, (1, 2, 3)))


def _ratio_mark(sheet: Sheet, *own: str | int) -> str:
    """The ratio, marked where it is better or worse by a hundredth; more or fewer MACs are neither."""
    value = sheet.at(*own, "ratio")
    same = value is None or abs(value - 1) < 0.01 or sheet.at(*own).get("name", "").startswith("MACs")
    kind = "" if same else "good" if value < 1 else "bad"
    return element("span", sheet.show("ratio", *own, "ratio"), class_=kind)


def _layers_section(sheet: Sheet) -> str:
    layers = sheet.at("layers")
    most = max((layer[side]["time"] or 0 for layer in layers for side in "ab"), default=0) or 1
    rows = []
    for number, layer in enumerate(layers):
        own = ("layers", number)
        names = ", ".join(sheet.text(*own, "operators", place) for place in range(len(layer["operators"])))
        shares = {side: 100 * (layer[side]["time"] or 0) / most for side in "ab"}
        bars = "".join(f'<span><i class="{side}" style="width:{shares[side]:.2f}%"></i></span>' for side in "ab")
        row = [*(_layers_of(sheet, number, side) for side in "ab"), element("span", bars, class_="twin")]
        row += [*(sheet.count(*own, side, "time") for side in "ab"), _ratio_mark(sheet, *own)]
        rows.append([*row, element("small", names or "added by Dovetail", class_="clamp")])
    a, b = _names(sheet)
    headings = (a, b, "", f"cycles, {a}", f"cycles, {b}", "ratio", "operators of the model")
    intro = "Layers that compute the same operators of the model stand side by side."
    return section("time", "Layer by layer", intro, table(headings, rows, (3, 4, 5)))


def _layers_of(sheet: Sheet, number: int, side: str) -> str:
    layers = sheet.at("layers", number, side, "layers")
    names = [sheet.text("layers", number, side, "layers", place) for place in range(len(layers))]
    where = sheet.text("layers", number, side, "where") if layers else "nothing"
    return element("span", f"{'<br>'.join(names)} <small>{where}</small>", class_="nowrap")
