"""What the scripts that measure have in common: Markdown tables, and a page whose sections they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Sections = Mapping[str, Callable[[], list[str]]]
"""Name of a section -> the lines it measures."""


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table: integers with commas, all but the first column to the right."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return [
        "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in line) + " |" for line in lines
    ]


def run(description: str, sections: Sections, page: Path, needed: Sequence[Path] = ()) -> None:
    """Measure the sections asked for on the command line and print them; --write puts them into the page.

    Args:
        description: what the script does, in one sentence.
        sections: all there are.
        page: the file; a section with a `<!-- begin NAME -->` and an end there is written, others are only printed.
        needed: folders without which nothing can be measured.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}; none: all")
    parser.add_argument("--write", action="store_true", help=f"put the tables that {page.name} has into it")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(sections):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    for folder in needed:
        if not folder.is_dir():
            parser.error(f"{folder.name} is not here: it lies in ../shared")
    for section in arguments.sections or sections:
        text = "\n".join(sections[section]()) + "\n"
        print(text, flush=True)
        begin, end = f"<!-- begin {section} -->\n", f"<!-- end {section} -->"
        if arguments.write and begin in page.read_text():
            before, rest = page.read_text().split(begin)
            page.write_text(before + begin + text + end + rest.split(end, 1)[1])
