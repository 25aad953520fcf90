"""Every block of code on every page of docs/ is executed, compiled or compared, or says why not."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model, sample_inputs
from dovetail.guests.newtarget import PortStyle, PortWish, write_new_target
from dovetail.ir.graph import evaluate
from dovetail.run import open_build, run_build
from dovetail.targets import load_target
from opencl_networks import require_device
from page_blocks import assembled, blocks, commands, differs, needs
from page_runner import REPOSITORY, Runner, in_process, options_exist

PAGES = sorted([*(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").rglob("*.md")])
pytestmark = pytest.mark.docs
LEFT_OUT = 14
"""Blocks with a reason not to be executed: as many as there are today, and no more."""


def name_of(page: Path) -> str:
    """A page's name in the repository."""
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: bool) -> None:
    for module in needs(page):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{page.name} needs the package '{module}'")
        if module == "pyopencl":
            require_device()
    monkeypatch.chdir(tmp_path)
    runner = Runner(tmp_path, update=page if update else None)
    for block in blocks(page):
        runner.try_block(block)


def test_what_is_not_executed_has_a_reason_and_does_not_grow() -> None:
    reasons = [
        (block.place, block.said["not run"]) for page in PAGES for block in blocks(page) if "not run" in block.said
    ]
    assert [place for place, reason in reasons if len(reason.split()) < 3] == []
    assert len(reasons) <= LEFT_OUT


def lines_of(text: str, comment: str) -> int:
    """Lines that are neither blank nor begin with a comment."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith(comment))


def test_the_walkthrough_is_a_short_and_right_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of docs/port.md alone, without its commands: their length, and a network's outputs on them."""
    monkeypatch.chdir(tmp_path)
    files = assembled(list(blocks(REPOSITORY / "docs" / "port.md")))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert {name for name in files if name.startswith("wren")} == {"wren.py", "wren_model.py", "wren.c", "wren.h"}
    assert lines_of(files["wren.py"], "#") <= 60
    assert lines_of(files["wren.c"], "/*") + lines_of(files["wren.h"], "/*") <= 60
    target = load_target("wren.py")
    assert in_process(["zoo", "digits", "-o", "digits.onnx"])[0] == 0
    compiled = compile_model(Path("digits.onnx"), target, Options())
    write_project(compiled.project, Path("build"))
    inputs = sample_inputs(compiled.graph, 5)
    result = run_build(open_build(Path("build"), target), "iss", [inputs])
    expected = evaluate(compiled.graph, inputs)
    assert result.outputs[0]
    assert all(np.array_equal(array, expected[name]) for name, array in result.outputs[0].items())


def test_the_engines_of_the_walkthroughs_are_short(tmp_path: Path) -> None:
    """The target of each at most 250 lines, its driver at most 50; the pages' blocks are compared with these files."""
    write_new_target("finch", tmp_path, wish=PortWish(PortStyle.LOOPS))
    bundled = REPOSITORY / "dovetail" / "targets" / "kestrel"
    for target, driver in ((tmp_path / "finch.py", tmp_path / "finch"), (bundled / "__init__.py", bundled / "kestrel")):
        assert len(target.read_text().splitlines()) <= 250
        c, h = (driver.with_suffix(suffix).read_text() for suffix in (".c", ".h"))
        assert lines_of(c, "/*") + lines_of(h, "/*") <= 50


def test_the_port_of_the_readme_stands_on_its_page() -> None:
    wren = assembled(list(blocks(REPOSITORY / "docs" / "port.md")))["wren.py"]
    shown = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert shown is not None and set(shown[1].splitlines()) <= set(wren.splitlines())


def test_the_way_of_a_newcomer_has_ten_commands() -> None:
    """From installing to a program for a board, on one page; `test_blocks` runs them."""
    page = blocks(REPOSITORY / "docs" / "tour.md")
    typed = [command for block in page if block.language == "sh" for command in commands(block.text)]
    assert len(typed) <= 10
    assert [
        word for word in ("explain", "compile", "run", "report", "export") if not any(word in one for one in typed)
    ] == []


def test_the_readme_shows_what_make_demo_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build" / "demo").mkdir(parents=True)
    shown = re.search(r"```text\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    printed = ""
    for line in shown.group(1).splitlines():
        if line.startswith(".venv/bin/dovetail "):
            status, text = in_process(shlex.split(line)[1:])
            assert status == 0, text
            printed += f"{line}\n{text}"
    assert differs(shown.group(1), printed) == ""


def test_the_commands_of_the_readme_have_these_options() -> None:
    lines = [
        line.strip() for line in (REPOSITORY / "README.md").read_text().splitlines() if line.startswith("    dovetail ")
    ]
    assert len(lines) >= 10
    for line in commands("\n".join(lines)):
        options_exist(line)


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        ("one 1,234\ntwo", ""),
        ("...\ntwo\n...", ""),
        ("one …\ntwo", ""),
        ("one 1,235\ntwo", ""),
        ("one   1,240\ntwo", ""),
        ("one 1,400\ntwo", "one 1,400"),
        ("one 1,234\ntwo 3", "two 3"),
        ("one 1,234\nthree", "three"),
        ("two\none 1,234", "one 1,234"),
        ("one 1,234\n...\none 1,234", "one 1,234"),
    ],
)
def test_what_is_shown_is_compared(shown: str, wrong: str) -> None:
    assert differs(shown, "one 1,234  \ntwo\nthree four\n") == wrong


def test_figures_of_a_page_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the lines that are shown, and no more of the page."""
    monkeypatch.chdir(tmp_path)
    text = (
        "About 900.\n\n```sh\necho conv_4 of 3: 1,234; echo more 17\n```\n\n```text\nconv_4 of 3: {}\nmore {}…\n```\n"
    )
    page = tmp_path / "page.md"
    page.write_text(text.format(900, 2))
    runner = Runner(tmp_path, update=page)
    for block in blocks(page):
        runner.try_block(block)
    assert page.read_text() == text.format("1,234", 17)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```sh\necho 1\n```\n\n```text\n2\n```", "not printed here"),
        ("```text\n2\n```", "what printed this"),
        ("```sh\nfalse\n```", "ends with status 1"),
        ("<!-- status: 1 -->\n```sh\ntrue\n```", "ends with status 0"),
        ("```sh\nmake soup\n```", "make soup"),
        ("```sh\npip install 'dovetail[soup]'\n```", "no extra of 'soup'"),
        ("```sh\npython scripts/soup.py\n```", "no scripts/soup.py"),
        ("```soup\n1\n```", "nothing is known about blocks of 'soup'"),
        ("```c\nint f(void) { return x; }\n```", "undeclared"),
        ("words\n\n    dovetail run build\n", "an indented block"),
    ],
)
def test_a_page_that_is_wrong_is_found(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(text)
    runner = Runner(tmp_path)
    with pytest.raises(AssertionError, match=re.escape(message)):
        for block in blocks(tmp_path / "page.md"):
            runner.try_block(block)
