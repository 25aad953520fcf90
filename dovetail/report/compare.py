"""Two builds side by side: what was chosen differently, the totals, and layer by layer what became of it.

Layers are told by the operators of the user's model they compute, since targets cut and name them differently: layers
of the two builds that share operators are one row together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError

SCHEMA = 1
"""Version of the JSON. It grows when a field is removed or changes its meaning."""

_MOST = 256 << 20
_CHOICES = ("model", "target", "policy", "simulator", "dovetail")
_NEEDED = ("model", "target", "policy", "simulator", "dovetail", "cycles", "macs", "memory", "sizes", "layers")
_LAYER = ("name", "operators", "engine", "cycles", "macs", "bytes_moved", "ideal_macs_per_cycle")

Json = dict[str, Any]


def read_report(path: Path) -> Json:
    """A report from the JSON that `dovetail report --json` or `dovetail run --json` wrote.

    Raises:
        DovetailError: it is no such file.
    """
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
    """Both reports beside each other, as plain values.

    Args:
        a: the JSON of a report or a run; b: another.
        names: what they are called.
    """
    return {
        "schema": SCHEMA,
        "a": _who(a, names[0]),
        "b": _who(b, names[1]),
        "changed": _changed(a, b),
        "totals": _totals(a, b),
        "layers": _rows(a["layers"], b["layers"]),
    }


def _who(report: Mapping[str, Any], name: str) -> Json:
    return {"name": name, **{key: report[key] for key in _CHOICES}}


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Json]:
    """What was chosen differently."""
    chosen = [{**{key: r[key] for key in _CHOICES}, **(r.get("options") or {})} for r in (a, b)]
    for own, report in zip(chosen, (a, b), strict=True):
        own["memories"] = ", ".join(f"{name} {use['size']:,} bytes" for name, use in report["memory"].items())
        peaks = {layer["engine"]: layer["ideal_macs_per_cycle"] for layer in report["layers"]}
        own["engines"] = ", ".join(f"{name} {peak:g} MACs per cycle" for name, peak in sorted(peaks.items()) if peak)
    keys = dict.fromkeys((*chosen[0], *chosen[1]))
    return [
        {"what": key.replace("_", " "), "a": _said(chosen[0].get(key)), "b": _said(chosen[1].get(key))}
        for key in keys
        if chosen[0].get(key) != chosen[1].get(key)
    ]


def _said(value: Any) -> str:
    return "none" if value is None or value == "" else str(value)


def _totals(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Json]:
    """Figures of the whole inference, those that both know first."""
    both = [_figures(report) for report in (a, b)]
    rows = []
    for name in dict.fromkeys((*both[0], *both[1])):
        one, other = both[0].get(name), both[1].get(name)
        if one or other:
            rows.append({"name": name, "a": one, "b": other, "ratio": _ratio(one, other)})
    return rows


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
    """What one build does for a row."""
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
            _join(group, owner.setdefault(mark, number), number)
    found: dict[int, tuple[list[int], list[int]]] = {}
    for number in range(len(both)):
        own, other = found.setdefault(_root(group, number), ([], []))
        (own if number < len(a) else other).append(number if number < len(a) else number - len(a))
    return list(found.values())


def _root(group: Sequence[int], number: int) -> int:
    while group[number] != number:
        number = group[number]
    return number


def _join(group: list[int], one: int, other: int) -> None:
    first, second = sorted((_root(group, one), _root(group, other)))
    group[second] = first
