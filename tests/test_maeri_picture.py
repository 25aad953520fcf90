"""The picture of an order in a real browser: every item where it works, with and without script, on narrow screens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from browser import Browser, chromium
from dovetail.targets.maeri import picture
from dovetail.targets.maeri.config import MaeriConfig
from dovetail.targets.maeri.listing import arrange
from dovetail.targets.maeri.network import network
from dovetail.targets.maeri.order import NetworkOrder
from dovetail.targets.maeri.outputs import layer_rows
from dovetail.targets.maeri.picture import Bottleneck, binds, use_of
from networks import ORDERED

BARS = """[...document.querySelectorAll('[data-name="main"] rect')].map(
  e => [...['x', 'y', 'width', 'height'].map(name => Number(e.getAttribute(name))),
        e.parentElement.querySelector('title').textContent])"""
HOVER = """(() => {
  const bar = document.querySelector('[data-name="main"] rect'), box = bar.getBoundingClientRect();
  bar.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.x + 2, clientY: box.y + 2}));
  return document.getElementById('tip').innerText;
})()"""
BOX = "document.querySelector('[data-name=\"main\"] svg').getAttribute('viewBox')"
FILL = "getComputedStyle(document.querySelector('[data-name=\"main\"] rect')).fill"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    with chromium() as found:
        yield found


@cache
def order_of(name: str, *sizes: int) -> NetworkOrder:
    """The first order of a network."""
    graph, _ = ORDERED[name]()
    return arrange(network(graph), MaeriConfig(*sizes))


def order_page(order: NetworkOrder) -> str:
    """The page of an order, under a sentence."""
    return picture.page(order, "An order.", layer_rows(order))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page of a small network."""
    path = tmp_path / "order.html"
    path.write_text(order_page(order_of("LeNet", 64, 16, 16)))
    return path


def test_every_item_is_where_it_works(browser: Browser, page: Path) -> None:
    order = order_of("LeNet", 64, 16, 16)
    browser.open(page)
    assert browser.faults == [] == browser.pale_anywhere()
    shown = browser.evaluate(BARS)
    expected = {
        (item.start, item.place.start, order.end(item) - item.start, item.place.size): order.work(item).name
        for item in order.items
    }
    assert {tuple(each[:4]) for each in shown} == set(expected)
    for *box, title in shown:
        assert title.startswith(expected[tuple(box)] + "; ")
        assert f"multipliers {box[1]} to {box[1] + box[3] - 1}; cycles {box[0]:,} to {box[0] + box[2] - 1:,}" in title
        assert re.search(r"bound by (multipliers|multipliers and ports|ports|weights|lines|tree)$", title)
    names = [work.name for work in order.network.works]
    assert browser.evaluate("[...document.querySelectorAll('#layers a')].map(e => e.textContent).length") == len(names)


def test_zoom_hover_and_colours(browser: Browser, page: Path) -> None:
    order = order_of("LeNet", 64, 16, 16)
    browser.open(page)
    said = browser.evaluate(HOVER)
    assert order.work(order.items[0]).name in said and "cycles 0 to" in said and "output channel" in said
    before = browser.evaluate(FILL)
    browser.evaluate("document.getElementById('by-binds').click()")
    assert browser.evaluate(FILL) != before
    assert browser.evaluate(BOX) == f"0 0 {order.makespan} 64"
    own = [(item.start, order.end(item)) for item in order.items if item.work == 1]
    browser.evaluate("document.querySelector('#layers a[data-layer=\"1\"]').click()")
    low, _, width, height = map(float, browser.evaluate(BOX).split())
    begin, end = min(start for start, _ in own), max(stop for _, stop in own)
    assert low <= begin and end <= low + width <= end + (end - begin) / 10 and height == 64
    assert browser.evaluate("document.querySelector('details[data-layer=\"1\"]').open")
    strips = browser.evaluate("[...document.querySelectorAll('svg.strip')].map(e => e.viewBox.baseVal.x)")
    assert len(strips) == 3 and all(abs(each - low) < 1 for each in strips)
    browser.evaluate("""(() => { const chart = document.querySelector('[data-name="main"] svg');
      for (const key of ['+', 'ArrowRight', 'ArrowLeft', '-', 'Home'])
        chart.dispatchEvent(new KeyboardEvent('keydown', {key, cancelable: true}));
      chart.dispatchEvent(new WheelEvent('wheel', {deltaY: -99, clientX: 300, cancelable: true})); })()""")
    assert float(browser.evaluate(BOX).split()[2]) == pytest.approx(0.8 * order.makespan)
    browser.evaluate("document.querySelector('[data-zoom=all]').click()")
    assert browser.evaluate(BOX) == f"0 0 {order.makespan} 64" and browser.faults == []


def test_without_script(browser: Browser, page: Path) -> None:
    """Drawings, hints, colours, tables and each layer's own time are there; what needs the script is not."""
    text = page.read_text()
    plain = page.with_name("plain.html")
    plain.write_text(text[: text.index("<script>")] + "</body></html>")
    browser.open(plain)
    assert len(browser.evaluate(BARS)) == len(order_of("LeNet", 64, 16, 16).items)
    assert browser.evaluate("document.getElementById('controls').hidden")
    before = browser.evaluate(FILL)
    browser.evaluate("document.getElementById('by-binds').click()")
    assert browser.evaluate(FILL) != before
    browser.evaluate("location.hash = '#layer2'")
    assert browser.evaluate("document.querySelectorAll('details svg[role=img][aria-label]').length") == 5
    assert browser.evaluate("document.querySelectorAll('details[data-layer=\"2\"] tbody tr').length") >= 1
    assert browser.faults == []


def test_narrow_screens(browser: Browser, page: Path) -> None:
    try:
        for width in (320, 360, 768):
            size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": True}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.open(page)
            browser.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_names_are_only_text(browser: Browser, tmp_path: Path) -> None:
    order = order_of("LeNet", 64, 16, 16)
    hostile = '</script><img src=x onerror="throw 1">&'
    works = tuple(replace(work, name=f"{hostile}{at}") for at, work in enumerate(order.network.works))
    path = tmp_path / "order.html"
    path.write_text(order_page(replace(order, network=replace(order.network, works=works))))
    browser.open(path)
    assert browser.faults == [] and browser.evaluate("document.images.length") == 0
    assert "onerror" in browser.evaluate(HOVER)


def test_size_and_long_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of as many bars as there may be has at most 2 MB and needs nothing else; where there are more items, those
    that follow one another are one, and the largest are drawn."""
    order = order_of("AlexNet", 256, 256, 256)
    text, bars = order_page(order), picture._bars(order)
    assert len(bars) == len(order.items) > 400
    assert len(text.encode()) * picture.MOST_BARS / len(bars) <= 2_000_000
    assert not re.search(r"https?:|src=|@import|url\(", text)
    joined = picture._joined(bars, order.makespan)
    assert sum(bar.items for bar in joined) == len(bars)
    assert len(joined) == len({(bar.work, bar.place) for bar in bars})
    monkeypatch.setattr(picture, "MOST_BARS", 100)
    assert len(picture._bars(order)) == 100


def test_what_binds() -> None:
    """Few ports, few lines, no accumulation buffer, a vector that is sent once: each is said."""
    found = {
        name: {binds(order, item) for item in order.items}
        for name, order in {
            "full": order_of("LeNet", 64),
            "ports": order_of("LeNet", 64, 4, 64),
            "tree": arrange(network(ORDERED["LeNet"]()[0]), MaeriConfig(64, 64, 64, accumulation_buffer=False)),
        }.items()
    }
    assert Bottleneck.MULTIPLIERS in found["full"] and not {Bottleneck.BOTH, Bottleneck.PORTS} & found["full"]
    assert Bottleneck.PORTS in found["ports"] and Bottleneck.TREE in found["tree"]


def test_use_adds_up() -> None:
    """All spans together: the multipliers' cycles of all items; never more than there is."""
    order = order_of("LeNet", 64, 16, 16)
    use = use_of(order, 400)
    assert use.edges[0] == 0 and use.edges[-1] == order.makespan
    taken = sum((order.end(item) - item.start) * order.clock(item).size * item.tile.neurons for item in order.items)
    assert (use.multipliers * np.diff(use.edges)).sum() * order.config.multipliers == pytest.approx(taken)
    assert use.multipliers.sum(axis=0).max() <= 1 + 1e-9
    assert 0 < use.ports.mean() <= 1 and 0 < use.lines.mean() <= 1
