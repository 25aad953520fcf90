"""The head of the page: what was run, the figures that matter most, and where the cycles went."""

from __future__ import annotations

from dovetail.report.bounds import KINDS
from dovetail.report.page.markup import Sheet, element, key, swatch

SPENT = {
    "peak": "engines at their peak",
    "below_peak": "engines below their peak",
    "transfers": "only the DMA",
    "core": "only cores",
}
"""What each kind of cycles is called."""


def device_colours(sheet: Sheet) -> dict[str, str]:
    """The style's colour of each device: cores, the DMA, and engines by number; several engines by their first."""
    found, engines = {}, 0
    for device in sheet.at("devices"):
        found[device["name"]] = f"e{engines % 6}" if device["kind"] == "engine" else device["kind"]
        engines += device["kind"] == "engine"
    for layer in sheet.at("layers"):
        found.setdefault(layer["engine"], found.get(layer["engine"].split("+")[0], "core"))
    return found


def overview(sheet: Sheet) -> str:
    """Title, tiles and the bar of all cycles."""
    simulator = f"simulator {sheet.text('simulator')}, policy {sheet.text('policy')}"
    title = element("h1", f"{sheet.text('model')} <span>on {sheet.text('target')}</span>")
    legend = "".join(
        f"<li>{swatch(colour)}{sheet.text('devices', number, 'name')}{_macs(sheet, number)}</li>"
        for number, colour in enumerate(_devices(sheet))
    )
    devices = element("ul", legend, class_="legend")
    return element("header", title, element("p", simulator, class_="intro"), devices, _tiles(sheet), _spent(sheet))


def _devices(sheet: Sheet) -> list[str]:
    colours = device_colours(sheet)
    return [colours[device["name"]] for device in sheet.at("devices")]


def _macs(sheet: Sheet, number: int) -> str:
    peak = sheet.at("devices", number, "peak")
    return f" <small>{sheet.rate('devices', number, 'peak')} MAC/cycle</small>" if peak else ""


def _tiles(sheet: Sheet) -> str:
    tiles = [
        ("cycles", sheet.count("cycles", "total"), ""),
        ("MACs", sheet.count("macs", "total"), f"{sheet.rate('summary', 'macs_per_cycle')} per cycle"),
        (
            "on engines",
            sheet.percent("summary", "offloaded_share"),
            f"of MACs; {sheet.count('summary', 'offloaded_layers')} of {sheet.count('summary', 'layers')} layers",
        ),
    ]
    for name, use in sheet.at("memory").items():
        if use["peak"]:
            of = f"of {sheet.count('memory', name, 'size')} bytes"
            tiles.append((f"{key(name)} at its peak", sheet.percent("summary", "memory_share", name), of))
    if sheet.at("summary", "firmware") is not None:
        tiles.append(("firmware", sheet.count("summary", "firmware"), f"bytes; stack {sheet.count('stack')}"))
    tiles.append(("moved by copies", sheet.count("summary", "bytes_moved"), "bytes"))
    return element("div", *(_tile(*tile) for tile in tiles), class_="tiles")


def _tile(name: str, figure: str, below: str) -> str:
    parts = element("em", name), element("strong", figure), element("small", below)
    return element("div", *parts, class_="tile")


def _spent(sheet: Sheet) -> str:
    """One bar of all cycles by kind."""
    shares = sheet.at("summary", "spent_share")
    if shares is None:
        return element("p", "On the host there is no time: figures in cycles are left out.", class_="intro")
    kinds = [kind for kind in KINDS if shares[kind]]
    bar = "".join(f'<i class="{kind}" style="width:{100 * shares[kind]:.3f}%"></i>' for kind in kinds)
    items = "".join(
        f"<li>{swatch(kind)}{SPENT[kind]} {sheet.percent('summary', 'spent_share', kind)} "
        f"<small>{sheet.count('summary', 'spent', kind)} cycles</small></li>"
        for kind in kinds
    )
    return element("div", bar, class_="stack") + element("ul", items, class_="legend")
