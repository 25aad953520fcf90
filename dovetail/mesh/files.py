"""A mapping as files: JSON for other tools, YAML that can be edited and given back, and pictures in HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from dovetail.mesh.mapping import Mapped, Performance
from dovetail.mesh.own_routes import routes_of
from dovetail.mesh.placement import Placed, shared_bytes
from dovetail.mesh.simulate import Timing
from dovetail.mesh.traffic import Floats
from dovetail.mesh.wishes import SCHEMA as OWN_SCHEMA

SCHEMA = 1


def mapping_json(mapped: Mapped) -> bytes:
    """The mapping as JSON text: per stage its cut, and per piece its element (column and row of the chip, number on
    it), box, bytes and key; per chip its routing entries."""
    parts = mapped.parts
    content = {
        "schema": SCHEMA,
        "network": parts.graph.name,
        "objective": parts.objective.value,
        "boards": parts.mesh.boards,
        "chips": parts.mesh.chips,
        "elements_per_chip": parts.mesh.per_chip,
        "usable_bytes": parts.mesh.usable,
        "sections": [_section(mapped, index) for index in range(len(parts.sections))],
    }
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _section(mapped: Mapped, index: int) -> dict[str, Any]:
    section, placed, tables = mapped.parts.sections[index], mapped.placed[index], mapped.tables[index]
    streaming = section.streaming
    streamed = streaming and {name: getattr(streaming, name) for name in ("bands", "slices", "depths")}
    stages = []
    for stage in section.stages:
        one: dict[str, Any] = {"layer": stage.layer.name, "cut": list(astuple(stage.cut)), "slots": list(stage.slots)}
        if placed is not None and tables is not None:
            numbers = slice(stage.first, stage.first + stage.pieces)
            places = [list(mapped.topology.position(element)) for element in placed.element[numbers].tolist()]
            columns = (places, stage.boxes.tolist(), stage.memory.tolist(), tables.key[numbers].tolist())
            names = ("element", "box", "bytes", "key")
            one["pieces"] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        stages.append(one)
    found: dict[str, Any] = {"streamed": streamed, "stages": stages}
    if tables is not None:
        found["routes"] = [
            {
                "chip": list(mapped.topology.places[chip]),
                "entries": np.column_stack(
                    [array[tables.chip == chip] for array in (tables.first, tables.keys, tables.ways, tables.local)]
                ).tolist(),
            }
            for chip in np.unique(tables.chip).tolist()
        ]
    return found


def mapping_yaml(mapped: Mapped) -> bytes:
    """The mapping of a resident network in the form `own.read_mapping` reads: with nothing left to choose."""
    placed, _ = mapped.whole
    parts, topology = mapped.parts, mapped.topology
    lines = [f"schema: {OWN_SCHEMA}", f"network: {json.dumps(parts.graph.name)}", f"objective: {parts.objective.value}"]
    lines.append("layers:")
    for stage in placed.section.stages:
        lines += [f"  {json.dumps(stage.layer.name)}:", f"    slots: {list(stage.slots)}", "    pieces:"]
        numbers = slice(stage.first, stage.first + stage.pieces)
        spans = stage.boxes.reshape(-1, 4, 2)[:, : 4 if stage.cut.sums > 1 else 3].tolist()
        for box, element in zip(spans, placed.element[numbers].tolist(), strict=True):
            lines.append(f"      - {{box: {box}, on: {list(topology.position(element))}}}")
    routes = routes_of(placed)
    lines += ["routes:"] * bool(routes) + [f"  - {route}" for route in routes]
    return ("\n".join(lines) + "\n").encode()


_CELL = 5
_GAP = 8
_MOST_CHIPS = 64
"""With more, a chip is one cell."""
_STYLE = """body{font:14px sans-serif;margin:2em;max-width:1200px}svg{background:#fafafa;margin:.3em 0}
h2{font-size:1.05em;margin:1.2em 0 .2em}text{font:10px sans-serif;fill:#333}p{margin:.2em 0}"""


def picture(mapped: Mapped, performance: Performance) -> bytes:
    """A self-contained page: no scripts, nothing loaded from elsewhere."""
    name = html.escape(mapped.parts.graph.name)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{name} on a mesh</title>",
        f"<style>{_STYLE}</style><h1>{name}</h1>",
        f"<p>{html.escape(sentence(mapped, performance))}</p>",
    ]
    timing, placed = performance.timing, mapped.placed[0]
    if timing is not None and placed is not None:
        clocks = np.concatenate([stage.costs.clocks for stage in placed.section.stages])
        held = np.concatenate([stage.memory for stage in placed.section.stages])
        tenants = [list(pieces) for pieces in placed.tenants.values()]
        mesh = mapped.parts.mesh
        busy = np.array([clocks[pieces].sum() for pieces in tenants]) / timing.interval
        memory = np.array([shared_bytes(held[pieces].tolist(), mesh) for pieces in tenants]) / mesh.usable
        title = "Elements: share of their memory that is used; lines: share of the time links are held"
        parts.append(_heat("Elements: share of the time they compute", placed, busy, None))
        parts.append(_heat(title, placed, memory, timing))
        parts.append(_timeline(placed, timing))
    else:
        parts.append(_sections(mapped, performance.sections))
    return "\n".join([*parts, "</html>", ""]).encode()


def sentence(mapped: Mapped, performance: Performance) -> str:
    """Elements and times of a mapping, in words."""
    clock = mapped.parts.mesh.clock
    pairs = zip(mapped.parts.sections, mapped.placed, strict=True)
    used = max(len(placed.tenants) if placed else section.pieces for section, placed in pairs)
    ratio = performance.interval / performance.bound
    return (
        f"{used} of {len(mapped.topology.elements)} elements; one input takes {performance.latency:.0f} clocks "
        f"({performance.latency / clock * 1e3:.3f} ms), a stream one every {performance.interval:.0f} "
        f"({clock / performance.interval:.0f} per second), {ratio:.2f} times its bound of {performance.bound:.0f}: "
        f"{performance.bottleneck}"
    )


def _colour(share: float) -> str:
    """From pale blue over yellow to red."""
    share = min(max(share, 0.0), 1.0)
    stops = ((230, 240, 250), (250, 210, 90), (190, 30, 40))
    at = min(int(share * 2), 1)
    part = share * 2 - at
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(stops[at], stops[at + 1], strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


_Corner = Callable[[int], tuple[int, int]]


def _heat(title: str, placed: Placed, value: Floats, timing: Timing | None) -> str:
    """Chips at their places, elements in them coloured by a share; with a timing, links between chips too."""
    topology = placed.topology
    grid, per = topology.mesh.grid, topology.mesh.per_chip
    whole = len(topology.places) > _MOST_CHIPS
    side = int(np.ceil(np.sqrt(grid.elements)))
    wide, high = (_CELL * 3, _CELL * 3) if whole else (grid.width * side * _CELL, grid.height * side * _CELL)
    xs, ys = [x for x, _ in topology.places], [y for _, y in topology.places]
    left, top = min(xs), max(ys)

    def corner(chip: int) -> tuple[int, int]:
        """Pixel of a chip's upper left corner."""
        x, y = topology.places[chip]
        return (x - left) * (wide + _GAP) + _GAP, (top - y) * (high + _GAP) + _GAP

    width, height = (max(xs) - left + 1) * (wide + _GAP) + _GAP, (top - min(ys) + 1) * (high + _GAP) + _GAP
    lines = [f"<h2>{html.escape(title)}</h2>", f"<svg width='{width}' height='{height}' role='img'>"]
    for chip in range(len(topology.places)):
        x, y = corner(chip)
        lines.append(f"<rect x='{x}' y='{y}' width='{wide}' height='{high}' fill='#fff' stroke='#bbb'/>")
    if whole:
        homes = np.array(list(placed.tenants)) // per
        total = np.bincount(homes, weights=value, minlength=len(topology.places)) / per
        lines += [_rectangle(*corner(chip), wide, high, share) for chip, share in enumerate(total.tolist())]
    else:
        for element, share in zip(placed.tenants, value.tolist(), strict=True):
            chip, number = divmod(element, per)
            row, column = divmod(int(topology.router_of[number]), grid.width)
            down, right = divmod(number % grid.elements, side)
            x, y = corner(chip)
            place = (x + (column * side + right) * _CELL, y + (row * side + down) * _CELL)
            lines.append(_rectangle(*place, _CELL, _CELL, share))
    lines += _link_lines(placed, timing, corner, wide, high) if timing else []
    return "\n".join([*lines, "</svg>", _legend()])


def _rectangle(x: int, y: int, width: int, height: int, share: float) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='{_colour(share)}'/>"


def _link_lines(placed: Placed, timing: Timing, corner: _Corner, wide: int, high: int) -> list[str]:
    """Each link as a line from chip to chip; one each way, a little apart."""
    ways = len(placed.topology.mesh.directions)
    lines = []
    for (chip, to), way in placed.topology.direction_between.items():
        share = float(timing.busy[chip * ways + way]) / timing.interval
        if share > 0.01:
            (x0, y0), (x1, y1) = corner(chip), corner(to)
            apart = 2 if chip < to else -2
            lines.append(
                f"<line x1='{x0 + wide // 2 + apart}' y1='{y0 + high // 2 + apart}' x2='{x1 + wide // 2 + apart}' "
                f"y2='{y1 + high // 2 + apart}' stroke='{_colour(share)}' stroke-width='3' stroke-opacity='.8'/>"
            )
    return lines


def _legend() -> str:
    cells = "".join(
        f"<rect x='{20 * i + 30}' y='2' width='20' height='10' fill='{_colour(i / 10)}'/>" for i in range(11)
    )
    ends = "<text x='0' y='11'>0 %</text><text x='255' y='11'>100 %</text>"
    return f"<p><svg width='320' height='14'>{ends}{cells}</svg></p>"


def _timeline(placed: Placed, timing: Timing) -> str:
    """The first input through all stages: from the first piece that begins to the last that is done."""
    begins, ends, names = [], [], []
    for stage in placed.section.stages:
        pieces = slice(stage.first, stage.first + stage.pieces)
        begins.append(float(timing.start[0, pieces].min()))
        ends.append(float(timing.finish[0, pieces].max()))
        names.append(f"{stage.layer.name} ({stage.pieces})")
    title = "The first input: from the first piece of a layer that begins to the last that is done"
    return _bars(title, names, begins, ends)


def _sections(mapped: Mapped, clocks: Sequence[float]) -> str:
    ends = np.cumsum(clocks)
    names = []
    for section in mapped.parts.sections:
        layers = [stage.layer.name for stage in section.stages]
        how = "streamed" if section.streaming is not None else f"{section.pieces} pieces"
        names.append(f"{layers[0]}{' to ' + layers[-1] if len(layers) > 1 else ''} ({how})")
    return _bars("Sections, one after the other", names, (ends - np.array(clocks)).tolist(), ends.tolist())


def _bars(title: str, names: Sequence[str], begins: Sequence[float], ends: Sequence[float]) -> str:
    longest = max(ends)
    lines = [f"<h2>{html.escape(title)}</h2>", f"<svg width='1100' height='{len(names) * 14 + 20}' role='img'>"]
    for row, (name, begin, end) in enumerate(zip(names, begins, ends, strict=True)):
        x, width = 200 + begin / longest * 860, max((end - begin) / longest * 860, 1)
        lines.append(
            f"<text x='0' y='{row * 14 + 11}'>{html.escape(name)}</text>"
            f"<rect x='{x:.1f}' y='{row * 14 + 2}' width='{width:.1f}' height='10' fill='#4878a8'>"
            f"<title>{begin:.0f} to {end:.0f} clocks</title></rect>"
        )
    foot = len(names) * 14 + 14
    lines.append(f"<text x='200' y='{foot}'>0</text><text x='1000' y='{foot}'>{longest:.0f} clocks</text>")
    return "\n".join([*lines, "</svg>"])
