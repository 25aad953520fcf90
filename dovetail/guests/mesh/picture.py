"""A mapping as a page: the mesh with the load of elements, memory and links, and where the time goes."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from dovetail.guests.mesh.mapping import Performance
from dovetail.guests.mesh.placement import MeshMapping, SectionPlacement, shared_bytes
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
    name = html.escape(mapped.graph.name)
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
        mesh = mapped.mesh
        busy = np.array([clocks[pieces].sum() for pieces in tenants]) / timing.interval
        memory = np.array([shared_bytes(held[pieces].tolist(), mesh) for pieces in tenants]) / mesh.usable
        title = "Elements: share of their memory that is used; lines: share of the time links are held"
        parts.append(_heat("Elements: share of the time they compute", placed, busy, None))
        parts.append(_heat(title, placed, memory, timing))
        parts.append(_timeline(placed, timing))
        parts.append(_where_time_goes(placed, timing))
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
    cells = "".join(_rectangle(20 * tenth + 30, 2, 20, 10, tenth / 10) for tenth in range(11))
    ends = "<text x='0' y='11'>0 %</text><text x='255' y='11'>100 %</text>"
    return f"<p><svg width='320' height='14'>{ends}{cells}</svg></p>"


def _chart(title: str, bars: Mapping[str, Sequence[tuple[float, float, str, str]]], foot: str) -> str:
    """A row for each name with its bars: where each begins and how long it is as shares of the row, colour and hint."""
    lines = [f"<h2>{html.escape(title)}</h2>", f"<svg width='1100' height='{len(bars) * 14 + 20}' role='img'>"]
    for row, (name, own) in enumerate(bars.items()):
        lines.append(f"<text x='0' y='{row * 14 + 11}'>{html.escape(name)}</text>")
        for begin, share, colour, hint in own:
            place = f"x='{200 + begin * 860:.1f}' y='{row * 14 + 2}' width='{max(share * 860, 1):.1f}' height='10'"
            lines.append(f"<rect {place} fill='{colour}'><title>{hint}</title></rect>")
    return "\n".join([*lines, f"<text x='200' y='{len(bars) * 14 + 14}'>{foot}</text></svg>"])


def _one_after_the_other(title: str, spans: Mapping[str, tuple[float, float]]) -> str:
    """A bar for each name, from its first to its last clock."""
    longest = max(end for _, end in spans.values())
    bars = {
        name: [(begin / longest, (end - begin) / longest, _BLUE, f"{begin:.0f} to {end:.0f} clocks")]
        for name, (begin, end) in spans.items()
    }
    return _chart(title, bars, f"0 to {longest:.0f} clocks")


def _timeline(placed: SectionPlacement, timing: StreamTiming) -> str:
    """The first input through all stages: from the first piece that begins to the last that is done."""
    spans = {}
    for stage in placed.section.stages:
        pieces = slice(stage.first, stage.first + stage.pieces)
        ends = float(timing.start[0, pieces].min()), float(timing.finish[0, pieces].max())
        spans[f"{stage.layer.name} ({stage.pieces})"] = ends
    title = "The first input: from the first piece of a layer that begins to the last that is done"
    return _one_after_the_other(title, spans)


def _sections(mapped: MeshMapping, clocks: Sequence[float]) -> str:
    spans, begin = {}, 0.0
    for number, (section, own) in enumerate(zip(mapped.sections, clocks, strict=True)):
        names = " to ".join(dict.fromkeys(section.stages[n].layer.name for n in (0, -1)))
        spans[f"{number}: {names} ({section.pieces} pieces)"] = (begin, begin := begin + own)
    return _one_after_the_other("Sections, one after the other", spans)


_BLUE = "#4878a8"
_SPENT = {
    "the MAC array": _BLUE,
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
    bars = {}
    for stage, shares in zip(placed.section.stages, time_spent(placed, timing).tolist(), strict=True):
        parts = zip(accumulate(shares, initial=0.0), shares, _SPENT.items(), strict=False)
        own = [(begin, share, colour, f"{name}: {share:.1%}") for begin, share, (name, colour) in parts if share > 0]
        bars[f"{stage.layer.name} ({stage.pieces})"] = own
    foot = "".join(f"<tspan fill='{colour}'>\u25a0</tspan> {name} " for name, colour in _SPENT.items())
    return _chart("Where the time of each layer's elements goes", bars, foot)
