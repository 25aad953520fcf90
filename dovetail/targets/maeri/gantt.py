"""The picture of an order: multipliers against time, coloured by layer, in one HTML file that needs nothing else."""

from __future__ import annotations

import json
from html import escape

from dovetail.targets.maeri.schedule import Schedule, busy
from dovetail.targets.maeri.table import HEADINGS, cells, compare, rows

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>%(title)s</title>
<style>
 body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff; }
 h1 { font-size: 1.3em; }
 canvas { width: 100%%; height: 60vh; border: 1px solid #bbb; cursor: grab; display: block; }
 #tip { min-height: 1.5em; font-variant-numeric: tabular-nums; }
 table { border-collapse: collapse; margin-top: 1em; font-variant-numeric: tabular-nums; }
 th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; }
 th:first-child, td:first-child { text-align: left; }
 .swatch { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em; }
</style>
</head>
<body>
<h1>%(title)s</h1>
<p>%(summary)s</p>
<canvas id="chart" role="img" aria-label="Multipliers against time"></canvas>
<p id="tip">Wheel: zoom in time. Drag: move. Double click: all.</p>
%(table)s
<script>
"use strict";
const order = %(data)s;
const canvas = document.getElementById("chart"), tip = document.getElementById("tip");
const context = canvas.getContext("2d");
const left = 48, bottom = 24;
let from = 0, to = order.makespan;
function place(item) {
  const width = canvas.clientWidth - left, height = canvas.clientHeight - bottom;
  const x = left + (item[1] - from) / (to - from) * width, end = left + (item[2] - from) / (to - from) * width;
  const y = item[3] / order.multipliers * height, under = item[4] / order.multipliers * height;
  return [x, y, Math.max(end - x, 0.5), under - y];
}
function draw() {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio; canvas.height = canvas.clientHeight * ratio;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  for (const item of order.items) {
    if (item[2] < from || item[1] > to) continue;
    const [x, y, width, height] = place(item);
    context.fillStyle = order.colours[item[0]];
    context.fillRect(x, y, width, height);
    if (height > 6 && width > 3) { context.strokeStyle = "#fff"; context.strokeRect(x, y, width, height); }
  }
  context.fillStyle = "#fff"; context.fillRect(0, 0, left, canvas.clientHeight);
  context.fillStyle = "#222"; context.textAlign = "right"; context.textBaseline = "middle";
  const height = canvas.clientHeight - bottom;
  for (let part = 0; part <= 8; part++)
    context.fillText(String(Math.round(order.multipliers * part / 8)), left - 6, Math.max(height * part / 8, 6));
  context.textAlign = "center";
  for (let part = 0; part <= 8; part++) {
    const x = left + (canvas.clientWidth - left) * part / 8;
    context.fillText(Math.round(from + (to - from) * part / 8).toLocaleString("en"),
                     Math.min(x, canvas.clientWidth - 30), canvas.clientHeight - 10);
  }
}
function at(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const [x] = at(event), where = from + (x - left) / (canvas.clientWidth - left) * (to - from);
  const factor = event.deltaY < 0 ? 0.8 : 1.25;
  from = Math.max(0, where - (where - from) * factor); to = Math.min(order.makespan, where + (to - where) * factor);
  if (to - from < 8) to = from + 8;
  draw();
}, { passive: false });
let held = null;
canvas.addEventListener("mousedown", event => { held = at(event)[0]; });
window.addEventListener("mouseup", () => { held = null; });
canvas.addEventListener("mousemove", event => {
  const [x, y] = at(event);
  if (held !== null) {
    const by = (held - x) / (canvas.clientWidth - left) * (to - from), span = to - from;
    from = Math.min(Math.max(0, from + by), order.makespan - span); to = from + span; held = x;
    draw();
    return;
  }
  const hit = order.items.find(item => {
    const [left_, top, width, height] = place(item);
    return x >= left_ && x < left_ + width && y >= top && y < top + height;
  });
  if (hit) tip.textContent = order.layers[hit[0]] + ": multipliers " + hit[3] + " to " + (hit[4] - 1) + ", cycles " +
    hit[1].toLocaleString("en") + " to " + (hit[2] - 1).toLocaleString("en") + ", output channels " + hit[5];
});
canvas.addEventListener("dblclick", () => { from = 0; to = order.makespan; draw(); });
window.addEventListener("resize", draw);
draw();
</script>
</body>
</html>
"""


def to_html(schedule: Schedule) -> str:
    """The page."""
    works, config = schedule.network.works, schedule.config
    colours = [f"hsl({number * 137 % 360} 65% {45 + number % 3 * 8}%)" for number in range(len(works))]
    items = [
        [item.work, item.start, item.start + busy(item, schedule.network, config), item.place.start, item.place.end,
         _channels([part.channel for part in item.segments])]
        for item in schedule.items
    ]  # fmt: skip
    data = {"makespan": schedule.makespan, "multipliers": config.multipliers, "items": items, "colours": colours,
            "layers": [work.name for work in works]}  # fmt: skip
    title = f"{schedule.network.graph.name} on {config.multipliers} multipliers"
    text = json.dumps(data).replace("</", "<\\/")
    return _PAGE % {
        "title": escape(title), "summary": escape(summary(schedule)), "table": _table(schedule, colours), "data": text,
    }  # fmt: skip


def summary(schedule: Schedule) -> str:
    """One sentence: the order beside its bound and other ways."""
    found = compare(schedule)
    return (
        f"{found.makespan:,} cycles, {found.makespan / found.bound:.3f} times the bound of {found.bound:,}; "
        f"layer by layer {found.one_by_one:,}, with the best equal virtual neurons {found.uniform:,}."
    )


def _channels(channels: list[int]) -> str:
    low, high = min(channels), max(channels)
    return str(low) if low == high else f"{low} to {high}"


def _table(schedule: Schedule, colours: list[str]) -> str:
    numbers = {work.name: number for number, work in enumerate(schedule.network.works)}
    head = "".join(f"<th>{text}</th>" for text in HEADINGS)
    body = []
    for row in rows(schedule):
        swatch = f'<span class="swatch" style="background:{colours[numbers[row.name]]}"></span>'
        others = "".join(f"<td>{escape(text)}</td>" for text in cells(row)[1:])
        body.append(f"<tr><td>{swatch}{escape(row.name)}</td>{others}</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"
