"""A mapping as a page: the mesh with the load of elements, memory and links, where the time goes, and over time."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

import numpy as np

from dovetail.guests.mesh.mapping import MeshMapping, Performance
from dovetail.guests.mesh.placement import Links, SectionPlacement, shared_bytes
from dovetail.guests.mesh.simulate import StreamTiming
from dovetail.guests.mesh.traffic import Floats

_CELL = 5
_GAP = 8
_MOST_CHIPS = 64
"""With more, a chip is one cell."""
_STYLE = """body{font:14px sans-serif;margin:2em;max-width:1200px}svg{background:#fafafa;margin:.3em 0}
h2{font-size:1.05em;margin:1.2em 0 .2em}text{font:10px sans-serif;fill:#333}p{margin:.2em 0}"""


def picture(mapped: MeshMapping, performance: Performance, sentence: str) -> bytes:
    """A self-contained page, under a sentence: no scripts, nothing loaded from elsewhere."""
    name = html.escape(mapped.parts.graph.name)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{name} on a mesh</title>",
        f"<style>{_STYLE}</style><h1>{name}</h1>",
        f"<p>{html.escape(sentence)}</p>",
    ]
    timing, placed = performance.timing, mapped.placed[0]
    if timing is not None:
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
        parts.append(_where_time_goes(placed, timing))
        parts.append(_over_time(placed, timing))
    else:
        parts.append(_sections(mapped, performance.sections))
    return "\n".join([*parts, "</html>", ""]).encode()


def _colour(share: float) -> str:
    """From pale blue over yellow to red."""
    share = min(max(share, 0.0), 1.0)
    stops = ((230, 240, 250), (250, 210, 90), (190, 30, 40))
    at = min(int(share * 2), 1)
    part = share * 2 - at
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(stops[at], stops[at + 1], strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


_Corner = Callable[[int], tuple[int, int]]


def _heat(title: str, placed: SectionPlacement, value: Floats, timing: StreamTiming | None) -> str:
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


def _link_lines(placed: SectionPlacement, timing: StreamTiming, corner: _Corner, wide: int, high: int) -> list[str]:
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


def _timeline(placed: SectionPlacement, timing: StreamTiming) -> str:
    """The first input through all stages: from the first piece that begins to the last that is done."""
    begins, ends, names = [], [], []
    for stage in placed.section.stages:
        pieces = slice(stage.first, stage.first + stage.pieces)
        begins.append(float(timing.start[0, pieces].min()))
        ends.append(float(timing.finish[0, pieces].max()))
        names.append(f"{stage.layer.name} ({stage.pieces})")
    title = "The first input: from the first piece of a layer that begins to the last that is done"
    return _bars(title, names, begins, ends)


def _sections(mapped: MeshMapping, clocks: Sequence[float]) -> str:
    ends = np.cumsum(clocks)
    names = []
    for section in mapped.parts.sections:
        layers = [stage.layer.name for stage in section.stages]
        names.append(f"{layers[0]}{' to ' + layers[-1] if len(layers) > 1 else ''} ({section.pieces} pieces)")
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


_SPENT = {
    "the MAC array": "#4878a8",
    "the core and results": "#8fbbe0",
    "waiting for messages": "#f2b661",
    "waiting for readers": "#c8483c",
}
"""Uses of an element's time, and their colours."""


def time_spent(placed: SectionPlacement, timing: StreamTiming) -> Floats:
    """[stages, 4] shares of the time of a stage's pieces, as in `_SPENT`, over the second half of the stream.

    Between what its element did before and its start, a piece waits for messages until all are there, and then for
    readers to take an earlier result.
    """
    stages, half = placed.section.stages, len(timing.start) // 2
    waits = np.zeros((2, placed.section.pieces))
    for pieces in map(list, placed.tenants.values()):
        start = timing.start[:, pieces].reshape(-1)
        order = np.argsort(start, kind="stable")
        before = np.concatenate(([start[order[0]]], timing.finish[:, pieces].reshape(-1)[order[:-1]]))
        gap = np.maximum(start[order] - before, 0.0)
        messages = np.clip(timing.ready[:, pieces].reshape(-1)[order] - before, 0.0, gap)
        late = order // len(pieces) >= half
        which = np.array(pieces)[order % len(pieces)]
        np.add.at(waits[0], which[late], messages[late])
        np.add.at(waits[1], which[late], (gap - messages)[late])
    runs = len(timing.start) - half
    array = np.concatenate([s.costs.floor * s.layer.on_array for s in stages]) * float(runs)
    core = np.concatenate([s.costs.clocks for s in stages]) * float(runs) - array
    spent = np.stack((array, core, *waits), axis=1)
    per_stage = np.add.reduceat(spent, [stage.first for stage in stages])
    return np.asarray(per_stage / np.maximum(per_stage.sum(axis=1, keepdims=True), 1e-9))


def _where_time_goes(placed: SectionPlacement, timing: StreamTiming) -> str:
    rows = time_spent(placed, timing).tolist()
    words = "".join(
        f"<rect x='{200 + 180 * n}' y='2' width='10' height='10' fill='{colour}'/>"
        f"<text x='{214 + 180 * n}' y='11'>{name}</text>"
        for n, (name, colour) in enumerate(_SPENT.items())
    )
    lines = ["<h2>Where the time of each layer's elements goes</h2>"]
    lines += [f"<svg width='1100' height='{len(rows) * 14 + 20}' role='img'>", words]
    for row, (stage, shares) in enumerate(zip(placed.section.stages, rows, strict=True)):
        y, x = row * 14 + 18, 200.0
        lines.append(f"<text x='0' y='{y + 9}'>{html.escape(stage.layer.name)} ({stage.pieces})</text>")
        for share, (name, colour) in zip(shares, _SPENT.items(), strict=True):
            if share > 0:
                lines.append(
                    f"<rect x='{x:.1f}' y='{y}' width='{share * 860:.1f}' height='10' fill='{colour}'>"
                    f"<title>{name}: {share:.1%}</title></rect>"
                )
            x += share * 860
    return "\n".join([*lines, "</svg>"])


_WINDOWS = 108
_BUSIEST = 10
"""Links that are drawn over time."""


def covered(begin: Floats, end: Floats, edges: Floats) -> Floats:
    """[windows] how much of stretches of time lies between neighbouring edges."""
    until = np.clip(edges[:, None] - begin[None], 0.0, (end - begin)[None]).sum(axis=1)
    return np.diff(until)


def _over_time(placed: SectionPlacement, timing: StreamTiming) -> str:
    """A row per layer: the share of its elements that compute; and one for each of the busiest links."""
    last = max(float(timing.finish.max()), max(timing.done))
    edges = np.linspace(0.0, last, _WINDOWS + 1)
    width = last / _WINDOWS
    rows: list[tuple[str, Floats]] = []
    for stage in placed.section.stages:
        own = slice(stage.first, stage.first + stage.pieces)
        busy = covered(timing.start[:, own].reshape(-1), timing.finish[:, own].reshape(-1), edges)
        rows.append((f"{stage.layer.name} ({stage.pieces})", busy / (width * stage.pieces)))
    links = Links(placed.topology)
    for link in np.argsort(-timing.busy, kind="stable")[:_BUSIEST].tolist():
        held = timing.held[timing.held[:, 0] == link]
        if len(held):
            rows.append((links.name(link), covered(held[:, 1], held[:, 2], edges) / width))
    title = "Over time: share of a layer's elements that compute, and of the time the busiest links are held"
    lines = [f"<h2>{title}</h2>", f"<svg width='1100' height='{len(rows) * 14 + 20}' role='img'>"]
    for row, (name, shares) in enumerate(rows):
        lines.append(f"<text x='0' y='{row * 14 + 11}'>{html.escape(name)}</text>")
        for place, share in enumerate(shares.tolist()):
            if share >= 0.005:
                lines.append(
                    f"<rect x='{230 + place * 8}' y='{row * 14 + 2}' width='8' height='12' fill='{_colour(share)}'/>"
                )
    foot = len(rows) * 14 + 14
    lines.append(f"<text x='230' y='{foot}'>0</text><text x='1000' y='{foot}'>{last:.0f} clocks</text>")
    return "\n".join([*lines, "</svg>", _legend()])
