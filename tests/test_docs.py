"""The documentation says what the code says: generated pages are fresh, commands exist, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from tables import read

from page_blocks import blocks

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        REPOSITORY / "README.md",
        REPOSITORY / "CHANGELOG.md",
        REPOSITORY / "CONTRIBUTING.md",
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "examples").rglob("*.md"),
    ]
)


def script(name: str) -> ModuleType:
    """A script of the repository as a module, which may import its neighbours."""
    if str(REPOSITORY / "scripts") not in sys.path:
        sys.path.append(str(REPOSITORY / "scripts"))
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_support_page_is_fresh() -> None:
    text = (REPOSITORY / "docs" / "support.md").read_text()
    support = script("support_tables")
    assert text == support.page() and not support.outdated(), "run: python scripts/support_tables.py"


def test_options_page_is_fresh() -> None:
    text = (REPOSITORY / "docs" / "reference" / "options.md").read_text()
    assert text == script("options_page").page(), "run: python scripts/options_page.py"


def test_reference_pages_are_fresh() -> None:
    assert script("reference_pages").stale() == [], "run: python scripts/reference_pages.py"


def test_the_page_of_packages_shows_the_package_of_the_tests() -> None:
    osprey = REPOSITORY / "tests" / "third_party" / "osprey"
    toml, python = (block.text for block in blocks(REPOSITORY / "docs" / "reference" / "packages.md"))
    assert toml in (osprey / "pyproject.toml").read_text()
    assert python.partition("from typing")[2] in (osprey / "osprey" / "command.py").read_text()


def test_the_board_page_says_of_every_machine_what_was_run() -> None:
    from dovetail.targets import BUILT_IN

    text = (REPOSITORY / "docs" / "board.md").read_text()
    rows = [
        row.split("|")[1] for row in text.partition("## What was run on what")[2].splitlines() if row.count("|") == 5
    ]
    assert not [name for name in BUILT_IN if not any(f"`{name}`" in row for row in rows)]


def test_the_table_of_parts_names_every_part_and_its_source() -> None:
    from dovetail.target.parts import PARTS

    rows = read(REPOSITORY / "docs" / "figures" / "parts.csv")[1:]
    assert {row[0]: row[-1] for row in rows} == {
        name: f"{part.source}, {part.clock} MHz" for name, part in PARTS.items()
    }


def test_the_tables_of_limits_have_every_limit_of_every_engine() -> None:
    from dovetail.targets import BUILT_IN, load_target

    targets = [target for target in map(load_target, BUILT_IN) if target.engines]
    for target in targets:
        rows = read(REPOSITORY / "docs" / "figures" / f"limits_{target.name}.csv")[1:]
        offloads = [offload for engine in target.engines for offload in engine.offloads]
        sentences = {limit.sentence for offload in offloads for limit in offload.constraints}
        assert sentences and {sentence for _, sentence in rows} == sentences, target.name
    assert targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_make_commands_exist(page: Path) -> None:
    goals = set(re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    # In code spans and indented or fenced blocks only: "make sure" is not a command.
    asked = re.findall(r"(?:`|^(?:    |\$ )?)make (\w+)", page.read_text(), re.MULTILINE)
    assert set(asked) <= goals
    assert asked or page != REPOSITORY / "README.md", "the README shows how to start"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_relative_links_resolve(page: Path) -> None:
    prose = re.sub(r"`[^`]*`", "", page.read_text())
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose)
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []


def test_every_picture_is_small_has_words_and_is_shown() -> None:
    """Words beside it in a page, and in an SVG, which also has a white ground for dark pages."""
    shown = [found for page in PAGES for found in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())]
    assert [name for words, name in shown if len(words.split()) < 3] == []
    pictures = sorted(path for kind in ("svg", "png") for path in (REPOSITORY / "docs").glob(f"**/*.{kind}"))
    pictures = [path for path in pictures if not {"_build", "_static"} & {*path.parts}]
    assert len(pictures) > 7
    assert [path.name for path in pictures if not any(name.endswith(path.name) for _, name in shown)] == []
    assert [path.name for path in pictures if path.stat().st_size > 40_000] == []
    for path in pictures:
        if path.suffix == ".svg":
            tree = ElementTree.parse(path).getroot()
            words = [part.text for kind in ("title", "text") for part in tree.findall(f".//{{*}}{kind}")]
            assert words and words[0], path.name
            assert re.search(r'<rect[^>]*fill[:=]"?(#fff|white)\b', path.read_text()), path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_named_files_exist(page: Path) -> None:
    """Paths in code spans that begin with a folder of the repository; a `*` or `<` stands for many."""
    named = re.findall(r"`((?:dovetail|docs|scripts|tests)/[\w./-]+)`", page.read_text())
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_every_table_of_figures_has_a_page_and_a_source() -> None:
    """A page includes and links each table; the index says how it was measured."""
    figures = REPOSITORY / "docs" / "figures"
    known = {row[0]: row for row in read(figures / "figures.csv")[1:]}
    assert known.keys() == {path.stem for path in figures.glob("*.csv")} - {"figures"}
    shown: list[str] = []
    for page in (REPOSITORY / "docs").rglob("*.md"):
        text = page.read_text()
        names = re.findall(r"^```{figures} (\w+)$", text, re.MULTILINE)
        assert [name for name in names if f"figures/{name}.csv)" not in text] == [], page.name
        shown += names
    assert sorted(shown) == sorted(known)
    for name, (_, measured, machine, command) in known.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured) and machine, name
        script_name = command.split()[1]
        assert command.startswith("python scripts/") and (REPOSITORY / script_name).is_file(), name
        rows = read(figures / f"{name}.csv")
        assert len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}, name


def test_policies_are_as_near_to_the_exact_network_as_they_say() -> None:
    """Fewer layers than on the page; each policy's sentence has its limit."""
    from dovetail.targets import load_target

    for (name, policy), found in script("policy_distance").measured(40).items():
        within = re.search(r"within (\d+) step", load_target(name).policy(policy).sentence)
        if within:  # one that adds to another's rewrites has that one's limit
            assert found.changed and found.largest <= int(within[1]), (name, policy, found.worst)
