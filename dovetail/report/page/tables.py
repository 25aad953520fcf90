"""Bytes moved, weights by their width, and what no engine computes."""

from __future__ import annotations

from dovetail.report.page.markup import Sheet, element, section, swatch, table
from dovetail.report.page.overview import device_colours


def bytes_section(sheet: Sheet) -> str:
    """Per pair of memories and per layer what copies write, and per layer what is read and written at least."""
    layers = sheet.at("layers")
    paths = [
        (
            f"{sheet.text('summary', 'moved', n, 'from')} → {sheet.text('summary', 'moved', n, 'to')}",
            sheet.count("summary", "moved", n, "bytes"),
        )
        for n in range(len(sheet.at("summary", "moved")))
    ]
    most = max((max(layer["bytes_moved"], _touched(layer)) for layer in layers), default=0) or 1
    colours = device_colours(sheet)
    rows = []
    for number, layer in enumerate(layers):
        if not (layer["bytes_moved"] or layer["launches"] or layer["macs"]):
            continue
        own = ("layers", number)
        bar = _bar(layer, most)
        figures = [sheet.count(*own, key) for key in ("bytes_moved", "read", "constants", "written")]
        name = element("span", swatch(colours[layer["engine"]]), sheet.text(*own, "name"), class_="nowrap")
        rows.append([name, bar, *figures])
    legend = element(
        "ul",
        *(f"<li>{swatch(name)}{text}</li>" for name, text in
          (("moved", "copied"), ("r-value", "operands"), ("r-state", "constants"), ("r-output", "result"))),
        class_="legend",
    )  # fmt: skip
    intro = (
        "Upper bar: bytes copies write for the layer, padding included. Lower bar: operands, constants and result, "
        "each once, whoever reads them."
    )
    moved = table(("from → to", "bytes copied"), paths, (1,)) if paths else element("p", "No copies are made.")
    headings = ("layer", "", "copied", "operands", "constants", "result")
    return section("bytes", "Bytes moved", intro, moved, legend, table(headings, rows, (2, 3, 4, 5)))


def _touched(layer: dict[str, int]) -> int:
    return layer["read"] + layer["constants"] + layer["written"]


def _bar(layer: dict[str, int], most: int) -> str:
    upper = f'<i class="moved" style="width:{100 * layer["bytes_moved"] / most:.2f}%"></i>'
    parts = (("r-value", "read"), ("r-state", "constants"), ("r-output", "written"))
    lower = "".join(f'<i class="{name}" style="width:{100 * layer[key] / most:.2f}%"></i>' for name, key in parts)
    return f'<span class="twin"><span>{upper}</span><span>{lower}</span></span>'


def weights_section(sheet: Sheet) -> str:
    """Weights by element type."""
    groups = sheet.at("weights")
    if not groups:
        return ""
    shades = {8: "w8", 4: "w4", 2: "w2"}
    widths = [(shades.get(group["bits"], "w32"), 100 * group["share"]) for group in groups]
    bar = "".join(f'<i class="{shade}" style="width:{width:.2f}%"></i>' for shade, width in widths)
    rows = [
        [
            swatch(shades.get(group["bits"], "w32")) + sheet.text("weights", number, "dtype"),
            sheet.count("weights", number, "bits"),
            sheet.count("weights", number, "elements"),
            sheet.percent("weights", number, "share"),
            sheet.count("weights", number, "bytes"),
        ]
        for number, group in enumerate(groups)
    ]
    others = (
        f"Other constants (biases, scales, tables): {sheet.count('parameters', 'elements')} numbers, "
        f"{sheet.count('parameters', 'bytes')} bytes."
    )
    headings = ("weights", "bits", "number", "of all", "bytes when packed")
    intro = "What the integer graph holds, weights that rewrites add included."
    listing = table(headings, rows, (1, 2, 3, 4))
    stack = element("div", bar, class_="stack")
    return section("weights", "Weights by width", intro, stack, listing, element("p", others))


def rest_section(sheet: Sheet) -> str:
    """What no engine computes, by reason."""
    groups = sheet.at("not_offloaded")
    if not groups:
        return section("rest", "Not offloaded", "Every layer is on an engine.")
    rows = []
    for number, group in enumerate(groups):
        own = ("not_offloaded", number)
        names = ", ".join(
            f'<a href="#layer-{layer}">{sheet.text("layers", layer, "name")}</a>' for layer in group["layers"]
        )
        figures = [sheet.count(*own, "cycles"), sheet.percent(*own, "share_of_cycles"), sheet.count(*own, "macs"),
                   sheet.percent(*own, "share_of_macs")]  # fmt: skip
        rows.append([sheet.text(*own, "reason"), names, *figures])
    headings = ("why", "layers", "cycles", "of all", "MACs", "of all")
    intro = "What no engine computes, and the sentence of the pattern or constraint that came nearest."
    return section("rest", "What was not offloaded, and why", intro, table(headings, rows, (2, 3, 4, 5)))
