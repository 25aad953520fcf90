"""The documentation site builds without a warning, and every page, link and anchor of it leads somewhere."""

from __future__ import annotations

import contextlib
import io
import os
import time
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from browser import chromium
from quicker import once

DOCS = Path(__file__).resolve().parents[1] / "docs"
pytestmark = [
    pytest.mark.docs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Elements that make a browser fetch something -> the attribute that says what."""


@dataclass
class Page(HTMLParser):
    """What a page has and where it leads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect."""
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADS and LOADS[tag] in found:
            self.loads.append(found[LOADS[tag]])


@dataclass
class Site:
    """The built site: its folder, its pages by path, and what Sphinx warned of."""

    folder: Path
    pages: dict[Path, Page]
    warnings: str


def build_site(folder: Path) -> None:
    """The site in `html`, what Sphinx warned of in `warnings`; notebooks are not executed (tests/test_notebooks.py
    does that)."""
    application = pytest.importorskip("sphinx.application", reason="the extra docs is not installed")
    pytest.importorskip("furo", reason="the extra docs is not installed")
    pytest.importorskip("myst_nb", reason="the extra docs is not installed")
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    warnings = io.StringIO()
    settings = {"nb_execution_mode": "off"}
    with (
        pytest.MonkeyPatch.context() as patch,
        patch_docutils(DOCS),
        docutils_namespace(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # docs/conf.py writes these two, and leaves them
        patch.syspath_prepend(DOCS.parent)
        places = DOCS, DOCS, folder / "html", folder / "trees"
        application.Sphinx(*places, "html", settings, status=None, warning=warnings).build()
    (folder / "warnings").write_text(warnings.getvalue())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site that `build_site` made."""
    folder = once(tmp_path_factory, "site", build_site)
    pages = {}
    for path in sorted((folder / "html").rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text())
    return Site(folder / "html", pages, (folder / "warnings").read_text())


def test_no_warnings(site: Site) -> None:
    assert site.warnings == ""


def test_every_page_is_reachable_from_the_index(site: Site) -> None:
    reached, waiting = set(), [site.folder / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in reached or path not in site.pages:
            continue
        reached.add(path)
        links = (urlsplit(link) for link in site.pages[path].links)
        waiting += [(path.parent / unquote(link.path)).resolve() for link in links if not link.scheme and link.path]
    sources = [
        path.relative_to(DOCS).with_suffix(".html") for suffix in ("md", "ipynb") for path in DOCS.rglob(f"*.{suffix}")
    ]
    assert len(sources) > 12
    assert [str(page) for page in sources if site.folder / page not in reached] == []


def test_every_link_and_anchor_resolves(site: Site) -> None:
    broken = []
    for path, page in site.pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = site.pages[place].anchors if place in site.pages else None
            missing = known is not None and parts.fragment not in known and parts.fragment not in ("", "top")
            if not place.exists() or missing:
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site: Site) -> None:
    for path, page in site.pages.items():
        for load in page.loads:
            parts = urlsplit(load)
            assert not parts.netloc and parts.scheme in ("", "data"), f"{path.name} loads {load}"
            assert parts.scheme or parts.path in ("#", "") or (path.parent / unquote(parts.path)).exists(), load
    for sheet in site.folder.rglob("*.css"):
        text = sheet.read_text()
        assert "@import" not in text and "url(http" not in text and "url(//" not in text, sheet.name


def test_the_reference_names_what_a_target_imports(site: Site) -> None:
    import dovetail.target

    page = (site.folder / "reference" / "api" / "dovetail.target.html").read_text()
    assert [name for name in dovetail.target.__all__ if f">{name}<" not in page] == []


@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_scrolls_sideways(site: Site, width: int, tmp_path: Path) -> None:
    """Nor the first page's own commands and their output; a picture of it is kept with the test's files."""
    with chromium() as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        wide = []
        for path in site.pages:
            browser.open(path)
            assert browser.faults == [], path.name
            reach = browser.evaluate("document.documentElement.scrollWidth")
            if reach > width:
                wide.append((path.name, reach))
        assert wide == []
        browser.open(site.folder / "index.html")
        over = "[...document.querySelectorAll('article pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert browser.evaluate(over) == 0
        browser.screenshot(tmp_path / f"index_{width}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_seen_on_light_and_dark_grounds(site: Site, scheme: str) -> None:
    with chromium() as browser:
        browser.scheme(scheme)
        for path in site.pages:
            browser.open(path)
            assert browser.pale() == [], path.name


def test_a_browser_shows_it_from_files_and_searches(site: Site) -> None:
    with chromium() as browser:
        for name in ("index", "port", "reference/api/dovetail.target", "notebooks/sweep"):
            browser.open(site.folder / f"{name}.html")
            assert browser.faults == [], name
            assert browser.evaluate("document.fonts.size") == 0
        browser.call("Page.navigate", url=(site.folder / "search.html").as_uri() + "?q=deadlock")
        found = "document.querySelectorAll('#search-results li a').length"
        end = time.monotonic() + 60
        while not browser.evaluate(found) and time.monotonic() < end:
            time.sleep(0.2)
        assert browser.evaluate(found) > 0
        assert browser.faults == []
