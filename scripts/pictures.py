"""Writes the pictures of the pages in docs/pictures: two from a run of the digits network on `ne16`, two drawn here.

    python scripts/pictures.py              # timeline, memory map, start and wait, a tile
    python scripts/pictures.py --report     # also report.png, the page of `dovetail report` in Chromium

A picture has a white ground, so it is legible on dark pages too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
STYLE = """
text { fill: #22303c } .small { font-size: 11px; fill: #44525f } .line { stroke: #5b6b7b; fill: none }
.core { fill: #7a8fa6 } .ne16 { fill: #1f4e79 } .dma { fill: #c97b2a } .idle { fill: #e4e9ee }
.value { fill: #a9c4e0; stroke: #1f4e79 } .constant { fill: #f0d3b0; stroke: #c97b2a }
.arrow { stroke: #22303c; fill: none; marker-end: url(#tip) }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="#22303c"/></marker></defs>'
)


def svg(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """A whole picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
    head += 'font-family="sans-serif" font-size="13">'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return (
        "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", TIP, ground, *parts, "</svg>"])
        + "\n"
    )


def box(kind: str, x: float, y: float, width: float, height: float, hint: str = "") -> str:
    """A rectangle; its hint is shown under the pointer."""
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}>{inside}</rect>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(*points: tuple[float, float]) -> str:
    """A line with a tip at its end."""
    return f'<path class="arrow" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def line(x1: float, y1: float, x2: float, y2: float, dash: str = "") -> str:
    """A thin line."""
    more = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="line" d="M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}"{more}/>'


def timeline(report: dict[str, Any]) -> Iterator[str]:
    """A run: a line each for core, engine and DMA, and the cycles below."""
    layers = {layer["name"]: layer for layer in report["layers"]}
    turns = report["timeline"]["core"]
    end = turns[-1]["end"]
    scale = 640 / end
    bars = {
        unit: [(job["start"], job["end"], job["label"]) for job in report["timeline"][unit]] for unit in ("ne16", "dma")
    }
    worked = [turn for turn in turns if layers[turn["label"]]["engine"] == "core"]
    bars["core"] = [(turn["start"] + layers[turn["label"]]["waiting"], turn["end"], turn["label"]) for turn in worked]
    for number, turn in enumerate(turn for turn in turns if turn["end"] - turn["start"] > 200):
        x = 90 + turn["start"] * scale
        yield line(x, 10 + number % 3 * 13, x, 196, "2 3")
        yield text(x + 3, 18 + number % 3 * 13, turn["label"], "small")
    for row, unit in enumerate(("core", "ne16", "dma")):
        y = 50 + 46 * row
        yield text(80, y + 20, unit, anchor="end")
        yield box("idle", 90, y, 640, 30)
        for begin, stop, label in bars[unit]:
            said = f"{label}: cycles {begin} to {stop}"
            yield box(unit, 90 + begin * scale, y, (stop - begin) * scale, 30, said)
    for cycle in range(0, end + 1, 1000):
        yield text(90 + cycle * scale, 212, f"{cycle:,}", "small", "middle")
    yield text(410, 230, "cycles; a layer of the core waits for the engine before its bar begins", "small", "middle")


def memory_map(report: dict[str, Any], name: str) -> Iterator[str]:
    """Buffers of one memory: layers from left to right, addresses upwards."""
    buffers = report["memories"][name]["buffers"]
    layers = [layer["name"] for layer in report["layers"]]
    top = max(one["address"] + one["bytes"] for one in buffers)
    step, scale = 640 / len(layers), 280 / top
    for one in sorted(buffers, key=lambda one: (one["address"], one["layers"])):
        left, right = one["layers"]
        kind = "value" if one["role"] == "value" else "constant"
        y, height = 310 - (one["address"] + one["bytes"]) * scale, one["bytes"] * scale
        said = f"{one['name']}: {one['bytes']:,} bytes at {one['address']:,}"
        yield box(kind, 90 + left * step, y, (right - left + 1) * step, height, said)
    yield from (line(90, 310, 730, 310), line(90, 20, 90, 310))
    for address in range(0, top + 1, 2048):
        yield text(84, 314 - address * scale, f"{address:,}", "small", "end")
    for place, label in enumerate(layers):
        x = 90 + (place + 0.6) * step
        turned = f'text-anchor="end" transform="translate({x:.1f} 322) rotate(-38)"'
        yield f'<text class="small" {turned}>{escape(label)}</text>'
    yield from (box("value", 520, 30, 14, 14), text(540, 42, "values"))
    yield from (box("constant", 620, 30, 14, 14), text(640, 42, "constants"))
    yield text(20, 14, f"bytes of {name}", "small")


def start_and_wait() -> Iterator[str]:
    """A launch, from the call that starts it to the return of the wait."""
    lanes = {"network (C)": 90, "driver (C)": 290, "registers": 490, "engine": 670}
    for name, x in lanes.items():
        yield text(x, 24, name, anchor="middle")
        yield line(x, 34, x, 350)
    network, driver, registers, engine = lanes.values()
    steps = [
        (network, driver, 60, "start(words)"),
        (driver, registers, 84, "job words, then START"),
        (registers, engine, 108, "begin"),
        (driver, network, 124, "ticket 1"),
        (network, driver, 196, "wait(1)"),
        (driver, registers, 220, "FINISHED?  0"),
        (engine, registers, 276, "end"),
        (registers, driver, 292, "interrupt"),
        (driver, registers, 312, "FINISHED?  1"),
        (driver, network, 338, "return"),
    ]
    yield box("ne16", engine - 6, 108, 12, 168)
    yield box("core", network - 6, 130, 12, 60)
    yield text(network + 12, 164, "other work: copies, core layers", "small")
    yield box("idle", driver - 6, 226, 12, 64)
    yield text(driver + 12, 262, "asleep (wfi)", "small")
    yield text(engine + 12, 196, "computes", "small")
    for source, target, y, words in steps:
        sign = 1 if target > source else -1
        yield arrow((source + 8 * sign, y), (target - 8 * sign, y))
        yield text((source + target) / 2, y - 4, words, "small", "middle")


def tile() -> Iterator[str]:
    """An image with a tile of a 3x3 layer: the rows and columns that neighbours read too, and the strides."""
    size, left, top, columns, rows = 26, 60, 60, 12, 9
    yield text(left, 30, "operand in memory: 9 x 12 pixels")
    for row in range(rows):
        for column in range(columns):
            inner = 3 <= row < 6 and 4 <= column < 8
            halo = 2 <= row < 7 and 3 <= column < 9
            kind = "value" if inner else "constant" if halo else "idle"
            yield box(kind, left + column * size, top + row * size, size - 2, size - 2)
    bottom = top + rows * size + 18
    yield arrow((left + 6, bottom), (left + size + 6, bottom))
    yield text(left + size + 14, bottom + 5, "x_pixel: bytes from one pixel to the next", "small")
    side = left - 16
    yield arrow((side, top + 8), (side, top + size + 8))
    yield text(left, bottom + 24, "x_row (left): bytes from one row to the next", "small")
    yield text(460, 30, "result of the tile: 3 x 4 pixels")
    for row in range(3):
        for column in range(4):
            yield box("value", 460 + column * size, 60 + row * size, size - 2, size - 2)
    for place, (kind, words) in enumerate(
        [("value", "pixels of the tile"), ("constant", "halo: neighbouring tiles read it too"), ("idle", "other tiles")]
    ):
        yield box(kind, 460, 180 + 26 * place, 16, 16)
        yield text(484, 193 + 26 * place, words, "small")
    yield text(460, 282, "The engine starts at the first pixel of the halo;", "small")
    yield text(460, 298, "rows and pixels stay where they are.", "small")


def reported(folder: Path) -> tuple[Path, Path]:
    """The report on the digits network on `ne16`, as JSON and as a page."""
    model, build, page, data = (folder / name for name in ("digits.onnx", "digits", "digits.html", "digits.json"))
    for words in (
        ("zoo", "digits", "-o", model),
        ("compile", model, "--target", "ne16", "-o", build),
        ("report", build, "-o", page, "--json", data),
    ):
        subprocess.run([sys.executable, "-m", "dovetail", *map(str, words)], check=True, capture_output=True)
    return data, page


def pictures() -> Iterator[tuple[str, str]]:
    """Name and text of every SVG."""
    with tempfile.TemporaryDirectory() as folder:
        report = json.loads(reported(Path(folder))[0].read_text())
    title = "The digits network on core, NE16 and DMA: constants are copied while the engine computes."
    yield "timeline.svg", svg(title, 760, 240, timeline(report))
    title = "Buffers in L1 while the digits network runs: each rectangle is a buffer, from its first to its last layer."
    yield "memory.svg", svg(title, 760, 390, memory_map(report, "L1"))
    title = "A launch: the driver starts the engine, the network goes on, and a wait sleeps until the interrupt."
    yield "launch.svg", svg(title, 760, 360, start_and_wait())
    title = "A tile of an image with its halo, and the strides between rows and pixels."
    yield "tile.svg", svg(title, 760, 350, tile())


def photograph(picture: Path) -> None:
    """The upper part of a report's page, with few colours."""
    from PIL import Image

    sys.path.append(str(ROOT / "tests"))
    from browser import chromium

    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        _, page = reported(Path(folder))
        browser.call("Emulation.setDeviceMetricsOverride", width=1000, height=640, deviceScaleFactor=1, mobile=False)
        browser.open(page)
        browser.screenshot(picture)
    Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


def main() -> int:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="also the report's page, which needs Chromium")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, content in pictures():
        (FOLDER / name).write_text(content)
    if options.report:
        photograph(FOLDER / "report.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
