"""The report as one HTML file that needs nothing else: no network, no fonts, no other scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.report.page.layers import layers_section
from dovetail.report.page.markup import Sheet, document
from dovetail.report.page.memory import memory_section
from dovetail.report.page.network import network_section
from dovetail.report.page.overview import overview
from dovetail.report.page.roofline import roofline_section
from dovetail.report.page.tables import bytes_section, rest_section, weights_section
from dovetail.report.page.timeline import timeline_section

SECTIONS = (
    layers_section,
    timeline_section,
    memory_section,
    network_section,
    roofline_section,
    bytes_section,
    weights_section,
    rest_section,
)
"""Parts of the page in their order; each may be empty."""

NAMES = {
    "time": "Time",
    "timeline": "Timeline",
    "memory": "Memory",
    "network": "Network",
    "roofline": "Roofline",
    "bytes": "Bytes",
    "weights": "Weights",
    "rest": "Not offloaded",
}


def page(data: Mapping[str, Any]) -> str:
    """The page of a report.

    Args:
        data: of `dovetail.report.detail.detail`; it is embedded, and everything shown is taken from it.
    """
    sheet = Sheet(data)
    parts = [part(sheet) for part in SECTIONS]
    links = "".join(
        f'<a href="#{name}">{label}</a>' for name, label in NAMES.items() if any(f'id="{name}"' in p for p in parts)
    )
    buttons = '<button id="save">JSON</button><button id="theme" title="Light or dark">◐</button>'
    bar = f'<nav>{links}<span class="grow"></span>{buttons}</nav>'
    foot = f"<footer>Dovetail {sheet.text('dovetail')}. Every figure on this page is in the JSON it carries.</footer>"
    body = f'{bar}\n<main>{overview(sheet)}{"".join(parts)}</main>{foot}\n<div id="tip" role="status" hidden></div>'
    return document(f"{data['model']} on {data['target']}", body, data)


__all__ = ["page"]
