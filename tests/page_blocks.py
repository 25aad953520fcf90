"""The code blocks of a page of docs/, and how each kind of them is tried.

| block | what is done |
|---|---|
| `sh` | every command in order, in one folder per page; those that take minutes or the network are only looked at |
| `text` after one that was executed | compared with what that printed; a line `...` is any lines, `…` any text |
| `python` | executed, in one namespace per page |
| `c` | compiled, `verilog` linted, `json`, `yaml`, `toml` parsed |
| a comment `file: NAME` in the first line | written to that file, or appended; compared with what a command wrote |

A figure on a page may be 10 % off what is printed; `pytest tests/test_pages.py --update` writes today's figures.
What stands above a block as an HTML comment is for these tests: `not run: REASON`, `status: 1` for commands that fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

FILE = re.compile(r"\s*(?:#|//|/\*)\s*file:\s*(\S+)")
SAID = re.compile(r"<!--\s*(not run|status|needs|files):\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """The line its text begins at, from 1."""
    language: str
    text: str
    said: dict[str, str] = field(default_factory=dict)
    """What the HTML comment above it says."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file its first line names, or empty."""
        found = FILE.match(self.text)
        return found.group(1) if found else ""


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        AssertionError: a block is indented rather than fenced.
    """
    comment: dict[str, str] = {}
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        line = (token.map or [0])[0] + 1
        assert token.type != "code_block", f"{page.name}:{line}: an indented block; put it between fences"
        if token.type == "html_block":
            comment = dict(SAID.findall(token.content))
        elif token.type == "fence":
            language = token.info.split(maxsplit=1)[0] if token.info else ""
            if not language.startswith("{"):
                yield Block(page.name, line + 1, language, token.content, comment)
            comment = {}
        elif token.type.endswith("_open"):
            comment = {}


def needs(page: Path) -> list[str]:
    """Python modules and programs a page cannot do without: `<!-- needs: verilator -->` anywhere in it."""
    return [word for kind, text in SAID.findall(page.read_text()) if kind == "needs" for word in text.split()]


def commands(text: str) -> list[str]:
    """The commands of an `sh` block; a backslash at the end of a line goes on."""
    lines = text.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#\s.*$", "", line).strip() for line in lines if line.strip() and not line.startswith("#")]


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
"""A figure of its own; not the 4 of `conv_4`, nor the sizes of `int8[1x8x8x1]`."""
NEAR = 0.1
"""How far a figure on a page may be from the printed one, as a share of the larger: `--update` writes today's."""


def today(shown: str, line: str, near: float = NEAR) -> str | None:
    """A line of a page with today's figures; None where another text was printed, or a figure is too far off."""
    figures = NUMBER.findall(shown)
    pieces = [r"\s+".join(map(re.escape, re.split(r"\s+", text))) for text in re.split(f"{NUMBER.pattern}|…", shown)]
    gaps = [".*" if gap == "…" else f"({NUMBER.pattern})" for gap in re.findall(f"{NUMBER.pattern}|…", shown)]
    found = re.fullmatch("".join(part for pair in zip(pieces, [*gaps, ""], strict=True) for part in pair), line)
    if found is None:
        return None
    pairs = [[float(text.replace(",", "")) for text in pair] for pair in zip(figures, found.groups(), strict=True)]
    if any(abs(a - b) > near * max(a, b) for a, b in pairs):
        return None
    fresh = iter(found.groups())
    return NUMBER.sub(lambda _: next(fresh), shown) if "…" in shown else line


def renewed(shown: str, printed: str, near: float = NEAR) -> tuple[list[str], str]:
    """The lines of a block with today's figures, and the first line that was not printed where it is shown, or empty.

    Lines must follow each other as printed; `...` stands for any number of lines, `…` for any text in one. A figure may
    be up to `near` off, so that pages need no new figures for each change of a cycle.
    """
    actual = [line.rstrip() for line in printed.splitlines()]
    lines, position, jump = list[str](), 0, True
    for line in (line.rstrip() for line in shown.strip("\n").splitlines()):
        if line.strip() == "...":
            jump = True
            lines.append(line)
            continue
        reach = range(position, len(actual) if jump else min(position + 1, len(actual)))
        fresh = ((index, today(line, actual[index], most)) for most in (0.0, near) for index in reach)
        index, text = next(((index, text) for index, text in fresh if text is not None), (0, None))
        if text is None:
            return lines, line
        lines.append(text)
        position, jump = index + 1, False
    return lines, ""


def differs(shown: str, printed: str) -> str:
    """The first line of a page that was not printed where it is shown, or empty."""
    return renewed(shown, printed)[1]


def assembled(found: list[Block]) -> dict[str, str]:
    """The files a page's blocks make, block by block."""
    files: dict[str, str] = {}
    for block in found:
        if block.file:
            files[block.file] = files.get(block.file, "") + block.text
    return files
