"""Two builds side by side, as data and as a page: what was chosen differently, the totals, and layer by layer.

Layers are told by the operators of the user's model they compute, since targets cut and name them differently: layers
of the two builds that share operators are one row together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from dovetail.documents import read_document
from dovetail.guests.report.markup import (
    TIP,
    Sheet,
    bar,
    document,
    element,
    legend,
    navigation,
    section,
    swatch,
    table,
)
from dovetail.report import SCHEMA as REPORT_SCHEMA

SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning."""

_MOST_BYTES = 256 << 20
_CHOICES = ("model", "target", "policy", "simulator", "dovetail")

Json = dict[str, Any]


class ReportedLayer(TypedDict):
    """A layer of a report, as far as it is compared."""

    name: str
    operators: list[str]
    engine: str
    cycles: int | None
    time: NotRequired[int | None]
    macs: int
    bytes_moved: int
    ideal_macs_per_cycle: float | None


class ReportedMemory(TypedDict):
    """Bytes of a memory."""

    size: int
    peak: int


class ReportedRun(TypedDict):
    """A report's JSON, as far as it is compared."""

    model: str
    target: str
    policy: str
    simulator: str
    dovetail: str
    cycles: dict[str, int | None]
    macs: dict[str, int]
    memory: dict[str, ReportedMemory]
    sizes: dict[str, int]
    layers: list[ReportedLayer]
    instructions: NotRequired[int | None]
    stack: NotRequired[int | None]
    options: NotRequired[dict[str, Any] | None]


def read_report(path: Path) -> Json:
    """A report from the JSON that `dovetail report --json` or `dovetail run --json` wrote.
    Raises DovetailError where it is no such file."""
    hint = "give a build, or what dovetail report --json wrote"
    document = read_document(path, "json", ReportedRun, schema=REPORT_SCHEMA, most_bytes=_MOST_BYTES, hint=hint)
    if "total" not in document.value["cycles"]:
        raise document.wrong("'total' is missing", ("cycles",))
    return {**document.value}


def compare(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> Json:
    """Both reports, the JSON of a report or run each, beside each other as plain values; `names` are theirs."""
    one, other = ({"name": own, **{key: r[key] for key in _CHOICES}} for own, r in zip(names, (a, b), strict=True))
    parts = {"changed": _changed(a, b), "totals": _totals(a, b), "layers": _rows(a["layers"], b["layers"])}
    return {"schema": SCHEMA, "a": one, "b": other, **parts}


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Json]:
    """Options and targets that differ."""
    one, other = _choices(a), _choices(b)
    keys = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    return [{"what": key.replace("_", " "), "a": _said(one.get(key)), "b": _said(other.get(key))} for key in keys]


def _choices(report: Mapping[str, Any]) -> Json:
    peaks = {layer["engine"]: layer["ideal_macs_per_cycle"] for layer in report["layers"]}
    return {
        **{key: report[key] for key in _CHOICES},
        **(report.get("options") or {}),
        "memories": ", ".join(f"{name} {use['size']:,} bytes" for name, use in report["memory"].items()),
        "engines": ", ".join(f"{name} {peak:g} MACs per cycle" for name, peak in sorted(peaks.items()) if peak),
    }


def _said(value: Any) -> str:
    return "none" if value is None or value == "" else str(value)


def _totals(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Json]:
    """Figures of the whole inference, those that both know first."""
    one, other = _figures(a), _figures(b)
    rows = [(name, one.get(name), other.get(name)) for name in {**one, **other}]
    return [{"name": name, "a": x, "b": y, "ratio": _ratio(x, y)} for name, x, y in rows if x or y]


def _figures(report: Mapping[str, Any]) -> dict[str, int | None]:
    return {
        "cycles": report["cycles"]["total"],
        "instructions": report.get("instructions"),
        **{f"cycles busy, {name}": value for name, value in report["cycles"].items() if name != "total"},
        **{f"MACs on {name}" if name != "total" else "MACs": value for name, value in report["macs"].items()},
        "bytes copied": sum(layer["bytes_moved"] for layer in report["layers"]),
        **{f"peak of {name}, bytes": use["peak"] for name, use in report["memory"].items()},
        **{f"firmware {name}, bytes": size for name, size in report["sizes"].items()},
        "stack, bytes": report.get("stack"),
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    """B by A; None where one is unknown or A is 0."""
    return round(b / a, 4) if a and b is not None else None


def _rows(a: Sequence[Json], b: Sequence[Json]) -> list[Json]:
    """Rows of layers that compute the same operators, in the order of the first build."""
    rows = []
    for own, other in _matched(a, b):
        one, two = _side(own), _side(other)
        operators = dict.fromkeys(name for layer in (*own, *other) for name in layer["operators"])
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


def _matched(a: Sequence[Json], b: Sequence[Json]) -> list[tuple[list[Json], list[Json]]]:
    """Layers of both builds that hang together by shared operators.

    A layer that the compiler added belongs to a layer of the same name, else it is a row of its own.
    """
    both = [*a, *b]
    group = list(range(len(both)))
    """By layer, the first of the layers it hangs together with."""
    owner: dict[str, int] = {}
    for number, layer in enumerate(both):
        for mark in [f"operator {name}" for name in layer["operators"]] or [f"layer {layer['name']}"]:
            first, second = sorted((group[owner.setdefault(mark, number)], group[number]))
            group = [first if other == second else other for other in group] if first != second else group
    rows: dict[int, tuple[list[Json], list[Json]]] = {first: ([], []) for first in group}
    for number, first in enumerate(group):
        rows[first][number >= len(a)].append(both[number])
    return list(rows.values())


def versus(data: Mapping[str, Any]) -> str:
    """The page of what `compare` gave; that is embedded, and everything shown is taken from it."""
    sheet = Sheet(data)
    title = element("h1", f"{sheet.text('a', 'name')} <span>against</span> {sheet.text('b', 'name')}")
    builds = legend(*(_build(sheet.part(side), side) for side in "ab"))
    parts = f"{_changed_section(sheet)}{_totals_section(sheet)}{_layers_section(sheet)}"
    nav = navigation({"changed": "Changed", "totals": "Totals", "time": "Layers"})
    body = f"{nav}<main>{title}{builds}{parts}</main>{TIP}"
    return document(f"{data['a']['name']} against {data['b']['name']}", body, data)


def _build(sheet: Sheet, side: str) -> str:
    return f"{swatch(side)}{sheet.text('name')} <small>{sheet.text('model')} on {sheet.text('target')}</small>"


def _changed_section(sheet: Sheet) -> str:
    rows = [change.figures("text:what text:a text:b") for change in sheet.parts("changed")]
    if not rows:
        return section("changed", "What changed", "Nothing was chosen differently.")
    return section("changed", "What changed", "", table(("what", *_names(sheet)), rows))


def _names(sheet: Sheet) -> tuple[str, str]:
    return sheet.text("a", "name"), sheet.text("b", "name")


def _totals_section(sheet: Sheet) -> str:
    rows = []
    for total in sheet.parts("totals"):
        neutral = total.at("name").startswith("MACs")
        rows.append([*total.figures("text:name count:a count:b"), _ratio_mark(total, neutral)])
    return section("totals", "Totals", "", table(("", *_names(sheet), "ratio"), rows, (1, 2, 3)))


def _ratio_mark(row: Sheet, neutral: bool = False) -> str:
    """The ratio, marked where it is better or worse by a hundredth, unless more is neither."""
    value = row.at("ratio")
    same = value is None or abs(value - 1) < 0.01 or neutral
    kind = "" if same else "good" if value < 1 else "bad"
    return element("span", row.show("ratio", "ratio"), class_=kind)


def _layers_section(sheet: Sheet) -> str:
    most = max((layer[side]["time"] or 0 for layer in sheet.at("layers") for side in "ab"), default=0) or 1
    rows = []
    for row in sheet.parts("layers"):
        one, other = (row.part(side) for side in "ab")
        bars = "".join(f"<span>{bar(side, 100 * (row.at(side, 'time') or 0) / most)}</span>" for side in "ab")
        operators = element("small", row.texts("operators") or "added by Dovetail", class_="clamp")
        names = (_layers_of(one), _layers_of(other), element("span", bars, class_="twin"))
        rows.append([*names, one.count("time"), other.count("time"), _ratio_mark(row), operators])
    a, b = _names(sheet)
    headings = (a, b, "", f"cycles, {a}", f"cycles, {b}", "ratio", "operators of the model")
    intro = "Layers that compute the same operators of the model stand side by side."
    return section("time", "Layer by layer", intro, table(headings, rows, (3, 4, 5)))


def _layers_of(side: Sheet) -> str:
    names = "<br>".join(layer.text() for layer in side.parts("layers"))
    where = side.text("where") if names else "nothing"
    return element("span", f"{names} <small>{where}</small>", class_="nowrap")
